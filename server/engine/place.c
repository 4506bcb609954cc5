/*
 * place: the part of the core that lives on a device: its memory compared with what the model needs, weights,
 * KV cache and graph brought up and taken down. On the engine's thread; once at start, and again when the
 * device was lost. It refuses a model that does not fit before anything is allocated.
 */
#include "server/engine/core.h"

/* Tokens between two looks at the cancel token. A GPU wants many rows, and is through them as soon. */
#define CPU_CHUNK 256
#define GPU_CHUNK 1024

static const char no_room[] =
        "lower \"context\", take a smaller quantisation of the model, or set \"device\" to \"cpu\"";

static int32_t logits_rows(int32_t chunk)
{
	return FS_MIN(chunk, FS_CORE_LOGITS);
}

static void fill_need(const struct fs_core *c, int32_t chunk, struct fs_dev_need *n)
{
	const struct fs_hparams *hp = &c->model.hp;
	int64_t widest = FS_MAX((int64_t)hp->n_ff, (int64_t)hp->heads * hp->head_dim),
	        kv_width = (int64_t)hp->kv_heads * hp->head_dim;

	n->cache = fs_kv_bytes(hp, c->n_ctx, c->exact);
	n->work =
	        fs_graph_bytes(&c->model, chunk, logits_rows(chunk)) +
	        fs_dev_scratch(c->dev, chunk, FS_MAX(widest, hp->n_embd), c->n_ctx, c->exact ? kv_width : 0);
}

/* Chooses the chunk too: where there is no room for many rows, few are better than none. */
static int check_room(struct fs_core *c, int32_t *chunk, struct fs_errbuf *e)
{
	struct fs_dev_need n = {0};
	uint64_t have, total;
	int err;

	*chunk = c->chunk > 0 ? c->chunk : fs_dev_is_gpu(c->dev) ? GPU_CHUNK : CPU_CHUNK;
	*chunk = FS_MIN(*chunk, c->n_ctx);
	err = fs_model_bytes(&c->model, c->dev, &n.weights, e);
	if (err != FS_OK)
		return err;
	fill_need(c, *chunk, &n);
	if (c->chunk == 0 && *chunk > CPU_CHUNK && fs_dev_memory(c->dev, &have, &total) &&
	        n.weights + n.cache + n.work > have) {
		*chunk = CPU_CHUNK;
		fill_need(c, *chunk, &n);
	}
	return fs_dev_fit(c->dev, &n, no_room, e);
}

static int load(struct fs_core *c, struct fs_errbuf *e)
{
	int64_t start = fs_now();
	int err = fs_model_load(&c->model, c->dev, e);

	c->load_ns = fs_now() - start;
	return err;
}

static int bring_up(struct fs_core *c, const char *device, struct fs_errbuf *e)
{
	const struct fs_dev_opts o = {.device = device,
	        .threads = c->threads,
	        .precision = c->exact ? FS_PRECISION_F32 : FS_PRECISION_AUTO};
	int32_t chunk = 0;
	int err = fs_dev_open(&o, &c->dev, e);

	if (err == FS_OK)
		err = check_room(c, &chunk, e);
	if (err == FS_OK)
		err = load(c, e);
	if (err == FS_OK)
		err = fs_kv_init(&c->kv, c->dev, &c->model.hp, c->n_ctx, c->exact, e);
	if (err == FS_OK)
		err = fs_graph_init(&c->graph, &c->model, &c->kv, chunk, logits_rows(chunk), e);
	return err;
}

int fs_core_place(struct fs_core *c, const char *device, struct fs_errbuf *e)
{
	struct fs_errbuf why = {""};
	int err = bring_up(c, device, &why);
	bool again;

	if (err == FS_OK)
		return FS_OK;
	again = fs_dev_else_cpu(c->dev, device, err, why.text);
	fs_core_displace(c);
	if (!again)
		return fs_fail(e, err, "%s", why.text);
	err = bring_up(c, "cpu", e);
	if (err != FS_OK)
		fs_core_displace(c);
	return err;
}

void fs_core_displace(struct fs_core *c)
{
	fs_graph_finish(&c->graph);
	fs_kv_finish(&c->kv);
	fs_model_unload(&c->model);
	fs_dev_close(c->dev);
	c->dev = NULL;
}
