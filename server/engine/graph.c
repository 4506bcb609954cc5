/*
 * graph: one pass of the decoder, written once against compute.h. Runs on the device's thread. Looks at its
 * cancel token within and between layers; cells are committed to the KV cache only after the last one. It
 * refuses nothing: its callers have checked ids, sizes and room.
 *
 * Shapes in comments: n rows of the batch, E = n_embd, Q = heads·head_dim, K = kv_heads·head_dim, F = n_ff.
 */
#include "server/engine/graph.h"

#include <stdlib.h>
#include <string.h>

static int alloc_floats(struct fs_graph *g, int64_t rows, int64_t width, float **out, struct fs_errbuf *e)
{
	size_t bytes;
	void *p;
	int err;

	if (!fs_mul_size((size_t)rows, (size_t)width, &bytes) || !fs_mul_size(bytes, sizeof(float), &bytes))
		return fs_fail(e, FS_ENOMEM, "scratch of %lld x %lld does not fit", (long long)rows,
		        (long long)width);
	err = fs_dev_alloc(g->dev, bytes, &p, e);
	if (err == FS_OK)
		*out = p;
	return err;
}

static int alloc_index(struct fs_graph *g, struct fs_errbuf *e)
{
	size_t rows = (size_t)g->max_rows, axes = (size_t)g->m->rope.n_axes;
	void *p;
	int err = fs_dev_alloc(g->dev, rows * sizeof(int32_t), &p, e);

	if (err != FS_OK)
		return err;
	g->ids = p;
	err = fs_dev_alloc(g->dev, rows * axes * sizeof(int32_t), &p, e);
	if (err != FS_OK)
		return err;
	g->pos = p;
	err = fs_dev_alloc(g->dev, (2 + axes) * sizeof(int32_t), &p, e);
	if (err != FS_OK)
		return err;
	g->step = p;
	g->host_ids = calloc(rows, sizeof(int32_t));
	g->host_pos = calloc(rows * axes, sizeof(int32_t));
	if (g->host_ids == NULL || g->host_pos == NULL)
		return fs_fail(e, FS_ENOMEM, "no memory for the graph");
	return FS_OK;
}

/* The float buffers: where, rows, width. */
struct buffer {
	float **to;
	int64_t rows, width;
};
#define N_BUFFERS 10

static void list_buffers(struct fs_graph *g, const struct fs_model *m, int64_t max_rows, int64_t max_logits,
        struct buffer out[N_BUFFERS])
{
	const struct fs_hparams *hp = &m->hp;
	int64_t q = (int64_t)hp->heads * hp->head_dim, kv = (int64_t)hp->kv_heads * hp->head_dim;
	const struct buffer all[N_BUFFERS] = {
	        {&g->x, max_rows, hp->n_embd},
	        {&g->h, max_rows, hp->n_embd},
	        {&g->q, max_rows, q},
	        {&g->att, max_rows, q},
	        {&g->k, max_rows, kv},
	        {&g->v, max_rows, kv},
	        {&g->gate, max_rows, hp->n_ff},
	        {&g->up, max_rows, hp->n_ff},
	        {&g->cs, max_rows, 2 * (int64_t)m->rope.n_pairs},
	        {&g->logits, max_logits, hp->n_vocab},
	};

	memcpy(out, all, sizeof(all));
}

uint64_t fs_graph_bytes(const struct fs_model *m, int32_t max_rows, int32_t max_logits)
{
	struct fs_graph g;
	struct buffer all[N_BUFFERS];
	uint64_t sum = fs_dev_rounded((uint64_t)max_rows * sizeof(int32_t)) * (1 + (uint64_t)m->rope.n_axes);

	list_buffers(&g, m, max_rows, max_logits, all);
	for (size_t i = 0; i < N_BUFFERS; i++)
		sum += fs_dev_rounded((uint64_t)all[i].rows * (uint64_t)all[i].width * sizeof(float));
	return sum + fs_dev_rounded((2 + (uint64_t)m->rope.n_axes) * sizeof(int32_t));
}

int fs_graph_init(struct fs_graph *g, const struct fs_model *m, struct fs_kv *kv, int32_t max_rows,
        int32_t max_logits, struct fs_errbuf *e)
{
	struct buffer all[N_BUFFERS];
	int err;

	FS_ASSERT(
	        max_rows >= 1 && max_logits >= 1 && max_logits <= max_rows); /* the logits' input lies in h */
	memset(g, 0, sizeof(*g));
	g->dev = m->dev;
	g->m = m;
	g->kv = kv;
	g->max_rows = max_rows;
	g->max_logits = max_logits;
	list_buffers(g, m, max_rows, max_logits, all);
	err = alloc_index(g, e);
	for (size_t i = 0; i < N_BUFFERS && err == FS_OK; i++)
		err = alloc_floats(g, all[i].rows, all[i].width, all[i].to, e);
	if (err != FS_OK)
		fs_graph_finish(g);
	return err;
}

void fs_graph_finish(struct fs_graph *g)
{
	void *const all[] = {g->x, g->h, g->q, g->att, g->k, g->v, g->gate, g->up, g->cs, g->logits, g->ids,
	        g->pos, g->step};

	if (g->dev != NULL)
		fs_dev_forget(g->dev);
	for (size_t i = 0; i < FS_ARRAY_LEN(all); i++)
		if (all[i] != NULL)
			fs_dev_free(g->dev, all[i]);
	free(g->host_ids);
	free(g->host_pos);
	memset(g, 0, sizeof(*g));
}

/* Where a batch begins in the cache. */
struct place {
	int32_t at;          /* cells before it, */
	const int32_t *past; /* or [dev] the same number, at being 0: the step can then be recorded */
	int32_t max;         /* cells that there may be, the batch included */
	const int32_t *pos;  /* [dev] [n_axes][n] */
};

/* K and V of the batch into its cells of layer il. */
static void store_kv(struct fs_graph *g, int il, const struct place *p, int32_t n)
{
	const struct fs_kv *kv = g->kv;
	struct fs_kv_store s = {.dst = kv->k[il],
	        .type = kv->type,
	        .at = p->at,
	        .past = p->past,
	        .src = g->k,
	        .src_stride = kv->width,
	        .n = n,
	        .width = kv->width};

	fs_op_kv_store(g->dev, &s);
	s.dst = kv->v[il];
	s.src = g->v;
	fs_op_kv_store(g->dev, &s);
}

/* x += o(attention(rope(qkv(norm(x))))); from row `from` of the batch on, K and V of all n rows. */
static void attention_block(struct fs_graph *g, int il, const struct place *p, int32_t n, int32_t from)
{
	const struct fs_hparams *hp = &g->m->hp;
	const struct fs_rope *rope = &g->m->rope;
	const struct fs_layer *y = &g->m->layers[il];
	struct fs_dev *d = g->dev;
	int64_t E = hp->n_embd, hd = hp->head_dim, Q = hp->heads * hd, m = n - from;
	const float *cs = g->cs + (int64_t)from * rope->n_pairs * 2;
	float *x = g->x + from * E;

	fs_op_rms_norm(d, g->x, y->attn_norm, g->h, n, E, hp->rms_eps);
	fs_op_matmul(d, &y->k, y->k_bias, g->h, g->k, n, false);
	fs_op_matmul(d, &y->v, y->v_bias, g->h, g->v, n, false);
	if (y->k_norm != NULL)
		fs_op_rms_norm(d, g->k, y->k_norm, g->k, (int64_t)n * hp->kv_heads, hd, hp->rms_eps);
	fs_op_rope(d, rope, g->cs, g->k, g->kv->width, n, hp->kv_heads, hp->head_dim);
	store_kv(g, il, p, n);
	if (m == 0)
		return;
	fs_op_matmul(d, &y->q, y->q_bias, g->h + from * E, g->q, m, false);
	if (y->q_norm != NULL)
		fs_op_rms_norm(d, g->q, y->q_norm, g->q, m * hp->heads, hd, hp->rms_eps);
	fs_op_rope(d, rope, cs, g->q, Q, m, hp->heads, hp->head_dim);
	const struct fs_attn a = {.q = g->q,
	        .q_stride = Q,
	        .k = g->kv->k[il],
	        .v = g->kv->v[il],
	        .kv_stride = g->kv->width,
	        .kv_type = g->kv->type,
	        .out = g->att,
	        .out_stride = Q,
	        .n_q = m,
	        .n_kv = p->at + n,
	        .heads = hp->heads,
	        .kv_heads = hp->kv_heads,
	        .head_dim = hp->head_dim,
	        .scale = hp->attn_scale,
	        .causal = true,
	        .q_first = p->at + from,
	        .past = p->past,
	        .n_kv_max = p->max};
	fs_op_attention(d, &a);
	fs_op_matmul(d, &y->o, y->o_bias, g->att, x, m, true);
}

/* x += down(silu(gate(h)) · up(h)), h = norm(x), rows from `from` on. These are the longest operations, so
 * the token is looked at between them: with 256 rows of a 7B model one takes 100 ms on two cores. */
static void ffn_block(struct fs_graph *g, int il, int32_t n, int32_t from, struct fs_cancel *cancel)
{
	const struct fs_hparams *hp = &g->m->hp;
	const struct fs_layer *y = &g->m->layers[il];
	struct fs_dev *d = g->dev;
	int64_t m = n - from;
	float *x = g->x + (int64_t)from * hp->n_embd;

	if (m == 0 || fs_cancelled(cancel))
		return;
	fs_op_rms_norm(d, x, y->ffn_norm, g->h, m, hp->n_embd, hp->rms_eps);
	fs_op_matmul(d, &y->gate, y->gate_bias, g->h, g->gate, m, false);
	if (fs_cancelled(cancel))
		return;
	fs_op_matmul(d, &y->up, y->up_bias, g->h, g->up, m, false);
	if (fs_cancelled(cancel))
		return;
	fs_op_gate(d, FS_SILU, g->gate, g->up, g->gate, m * hp->n_ff);
	fs_op_matmul(d, &y->down, y->down_bias, g->gate, x, m, true);
}

/* x and the position planes are filled. Leaves the outputs in x[keep .. n); false: the token fired. It stays
 * fired, so blocks that left early end up here. */
static bool queue_layers(
        struct fs_graph *g, const struct place *p, int32_t n, int32_t keep, struct fs_cancel *cancel)
{
	const struct fs_model *m = g->m;
	bool recorded = p->past != NULL;

	fs_op_rope_angles(g->dev, &m->rope, p->pos, g->cs, n);
	for (int il = 0; il < m->hp.n_layer; il++) {
		int32_t from = il == m->hp.n_layer - 1 ? keep : 0;
		attention_block(g, il, p, n, from);
		ffn_block(g, il, n, from, cancel);
		if (!recorded)
			fs_dev_pace(g->dev);
		if (fs_cancelled(cancel))
			return false;
	}
	return true;
}

static void upload_pos(struct fs_graph *g, int32_t n)
{
	fs_dev_upload(g->dev, g->pos, g->host_pos, (size_t)n * (size_t)g->m->rope.n_axes * sizeof(int32_t));
}

/* Waits for what was queued; whole: the token did not fire on the way. */
static int end_pass(struct fs_graph *g, int32_t n, int32_t keep, bool whole, struct fs_errbuf *e)
{
	if (!whole) {
		fs_dev_sync(g->dev, NULL);
		return FS_ECANCELLED;
	}
	g->n = n;
	g->keep = keep;
	g->have_logits = false;
	return fs_dev_sync(g->dev, e);
}

/* Plane a of the batch's row i: t, h, w; the fourth is 0. */
static void set_pos(struct fs_graph *g, int32_t n, int32_t i, const int32_t pos[3])
{
	for (int a = 0; a < g->m->rope.n_axes; a++)
		g->host_pos[(int64_t)a * n + i] = a < 3 ? pos[a] : 0;
}

/* Runs of tokens and of rows into x. */
static void embed_prompt(struct fs_graph *g, const struct fs_prompt *p, int32_t first, int32_t n)
{
	int64_t E = g->m->hp.n_embd;
	int32_t i = 0;

	memcpy(g->host_ids, p->ids + first, (size_t)n * sizeof(int32_t));
	fs_dev_upload(g->dev, g->ids, g->host_ids, (size_t)n * sizeof(int32_t));
	while (i < n) {
		int32_t end = i + 1, id = p->ids[first + i];
		while (end < n && (id >= 0 ? p->ids[first + end] >= 0 : p->ids[first + end] == id))
			end++;
		if (id >= 0)
			fs_op_embed(g->dev, &g->m->tok_embd, g->ids + i, g->x + i * E, end - i);
		else
			fs_dev_upload(g->dev, g->x + i * E, fs_prompt_row(p, first + i),
			        (size_t)(end - i) * (size_t)E * sizeof(float));
		i = end;
	}
}

int fs_graph_prompt(struct fs_graph *g, const struct fs_prompt *p, int32_t first, int32_t n, int32_t keep,
        struct fs_cancel *cancel, struct fs_errbuf *e)
{
	const struct place place = {.at = first, .max = g->kv->n_ctx, .pos = g->pos};
	int err;

	FS_ASSERT(n >= 1 && n <= g->max_rows && first == g->kv->used && n <= p->n - first &&
	          n <= g->kv->n_ctx - first);
	FS_ASSERT(keep >= 0 && keep <= n);
	for (int32_t i = 0; i < n; i++)
		set_pos(g, n, i, p->pos[first + i]);
	embed_prompt(g, p, first, n);
	upload_pos(g, n);
	err = end_pass(g, n, keep, queue_layers(g, &place, n, keep, cancel), e);
	if (err == FS_OK)
		fs_kv_commit(g->kv, p, first, n);
	return err;
}

static void queue_logits(struct fs_graph *g, int32_t row, int32_t n)
{
	const struct fs_hparams *hp = &g->m->hp;

	fs_op_rms_norm(
	        g->dev, g->x + (int64_t)row * hp->n_embd, g->m->out_norm, g->h, n, hp->n_embd, hp->rms_eps);
	fs_op_matmul(g->dev, fs_model_output(g->m), g->m->out_bias, g->h, g->logits, n, false);
}

/* A recording serves all places up to the next multiple of this. */
#define STEP_CELLS 256

/* In one upload, since a decode step may take no longer than a millisecond. */
static void upload_step(struct fs_graph *g, int32_t id, int32_t pos)
{
	int32_t step[2 + 4] = {g->kv->used, id, pos, pos, pos, 0};
	size_t axes = (size_t)g->m->rope.n_axes;

	FS_ASSERT(axes <= 4);
	fs_dev_upload(g->dev, g->step, step, (2 + axes) * sizeof(*step));
}

int fs_graph_token(struct fs_graph *g, int32_t id, int32_t pos, struct fs_cancel *cancel, struct fs_errbuf *e)
{
	const struct place place = {.past = g->step,
	        .max = FS_MIN((g->kv->used / STEP_CELLS + 1) * STEP_CELLS, g->kv->n_ctx),
	        .pos = g->step + 2};
	bool whole = true;

	FS_ASSERT(id >= 0 && id < g->m->hp.n_vocab && g->kv->used < g->kv->n_ctx);
	upload_step(g, id, pos);
	if (!fs_dev_replay(g->dev, (uint64_t)place.max)) {
		fs_op_embed(g->dev, &g->m->tok_embd, g->step + 1, g->x, 1);
		whole = queue_layers(g, &place, 1, 0, cancel);
		if (whole)
			queue_logits(g, 0, 1);
		fs_dev_recorded(g->dev);
		if (!whole)
			fs_dev_forget(g->dev); /* half a step */
	}
	if (!whole)
		return end_pass(g, 1, 0, false, e);
	g->n = 1;
	g->keep = 0;
	g->have_logits = true;
	fs_kv_commit_token(g->kv, id);
	return FS_OK;
}

int fs_graph_logits(struct fs_graph *g, int32_t row, int32_t n, float *out, struct fs_errbuf *e)
{
	FS_ASSERT(n >= 1 && n <= g->max_logits && row >= g->keep && n <= g->n - row);
	if (!g->have_logits)
		queue_logits(g, row, n);
	return fs_dev_download(
	        g->dev, out, g->logits, (size_t)n * (size_t)g->m->hp.n_vocab * sizeof(float), e);
}
