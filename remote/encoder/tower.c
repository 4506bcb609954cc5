/*
 * The qwen2vl_merger tower, written against common/compute. Runs on the device's thread. All patches see each
 * other, but the work is cut into chunks of rows: that bounds the memory of the intermediate values and gives
 * the places where the cancel token is looked at. Patches stay in merge order throughout (attention does not
 * mind), so that merging is a change of shape and rows come out in raster order.
 */
#include "remote/encoder/tower.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* One operation on a CPU should stay near 10 to 40 ms: cancelling must be seen within 100. Chunks of 128 rows
 * cost no more processor time than all rows at once; 80 rows, 8 % more. */
#define CPU_CHUNK_FLOPS 4e9
#define CPU_CHUNK_STEP 64 /* rows */
#define GPU_CHUNK 8192

/* The state of one picture. [dev] unless said otherwise. */
struct run {
	const struct tower *t;
	struct fs_dev *d;
	struct fs_cancel *cancel;
	struct fs_errbuf *e;
	int64_t n, chunk; /* patches; patches a step, a multiple of merge² */
	float *cs;        /* [n][head_dim/2][2] rope angles */
	float *x;         /* [n][n_embd] residual stream */
	float *k, *v;     /* [n][n_embd] */
	float *a, *b;     /* [chunk][n_embd] */
	float *wide;      /* [chunk][n_ff], and the projector's [chunk/merge²][merge² · n_embd] */
	float *pixels;    /* [chunk][3 · patch²] */
	float *rows;      /* [chunk/merge²][n_out] */
};

static int checkpoint(struct run *r)
{
	if (fs_cancelled(r->cancel))
		return fs_fail(r->e, FS_ECANCELLED, "cancelled");
	return FS_OK;
}

static void linear(const struct run *r, const struct linear *l, const float *x, float *y, int64_t n, bool add)
{
	fs_op_matmul(r->d, &l->w, l->b, x, y, n, add);
}

static void norm(const struct run *r, const struct norm *w, const float *x, float *y, int64_t n)
{
	fs_op_layer_norm(r->d, x, w->w, w->b, y, n, r->t->h.n_embd, r->t->h.eps);
}

/* ---- memory ---- */

static int64_t choose_chunk(const struct fs_dev *d, const struct vision_hparams *h, int64_t n)
{
	int64_t cell = (int64_t)h->merge * h->merge, chunk = GPU_CHUNK;

	if (!fs_dev_is_gpu(d)) {
		double a_row =
		        FS_MAX(2.0 * h->n_embd * FS_MAX(h->n_ff, h->n_embd), 4.0 * (double)n * h->n_embd);

		chunk = FS_MAX((int64_t)(CPU_CHUNK_FLOPS / a_row) / CPU_CHUNK_STEP, (int64_t)1) *
		        CPU_CHUNK_STEP;
	}
	chunk = (chunk + cell - 1) / cell * cell;
	return FS_MIN(chunk, n);
}

static void run_finish(struct run *r)
{
	float *all[] = {r->cs, r->x, r->k, r->v, r->a, r->b, r->wide, r->pixels, r->rows};

	for (size_t i = 0; i < FS_ARRAY_LEN(all); i++)
		fs_dev_free(r->d, all[i]);
}

/* The buffers of a run: where, and how many floats. */
struct buffer {
	float **to;
	int64_t floats;
};
#define N_BUFFERS 9

static void list_buffers(
        struct run *r, const struct vision_hparams *h, int64_t n, int64_t c, struct buffer out[N_BUFFERS])
{
	int64_t embd = h->n_embd, cell = (int64_t)h->merge * h->merge;
	const struct buffer all[N_BUFFERS] = {
	        {&r->cs, n * (h->head_dim / 4 * 2) * 2},
	        {&r->x, n * embd},
	        {&r->k, n * embd},
	        {&r->v, n * embd},
	        {&r->a, c * embd},
	        {&r->b, c * embd},
	        {&r->wide, c * FS_MAX((int64_t)h->n_ff, embd)},
	        {&r->pixels, c * 3 * h->patch * h->patch},
	        {&r->rows, c / cell * h->n_out},
	};

	memcpy(out, all, sizeof(all));
}

uint64_t tower_work_bytes(const struct fs_dev *d, const struct vision_hparams *h, int64_t n)
{
	int64_t c = choose_chunk(d, h, n), cell = (int64_t)h->merge * h->merge,
	        widest = FS_MAX(FS_MAX((int64_t)h->n_ff, cell * h->n_embd), (int64_t)3 * h->patch * h->patch);
	struct run r;
	struct buffer all[N_BUFFERS];
	uint64_t sum = fs_dev_rounded(2 * (uint64_t)n * sizeof(int32_t)); /* positions */

	list_buffers(&r, h, n, c, all);
	for (size_t i = 0; i < N_BUFFERS; i++)
		sum += fs_dev_rounded((uint64_t)all[i].floats * sizeof(float));
	return sum + fs_dev_scratch(d, c, widest, n, h->n_embd);
}

static int run_init(struct run *r, const struct tower *t, const struct patches *p, struct fs_cancel *cancel,
        struct fs_errbuf *e)
{
	int64_t c = choose_chunk(t->d, &t->h, p->n);
	struct buffer all[N_BUFFERS];

	*r = (struct run){.t = t, .d = t->d, .cancel = cancel, .e = e, .n = p->n, .chunk = c};
	list_buffers(r, &t->h, p->n, c, all);
	for (size_t i = 0; i < N_BUFFERS; i++) {
		void *mem = NULL;
		int err = fs_dev_alloc(r->d, (size_t)all[i].floats * sizeof(float), &mem, e);

		if (err != FS_OK) {
			run_finish(r);
			return err;
		}
		*all[i].to = mem;
	}
	return FS_OK;
}

/* ---- steps ---- */

/* Positions of the patches in merge order: planes y and x, [2][n]. */
static void fill_positions(const struct patches *p, int merge, int32_t *pos)
{
	int64_t i = 0;

	for (int by = 0; by < p->gh; by += merge)
		for (int bx = 0; bx < p->gw; bx += merge)
			for (int k = 0; k < merge * merge; k++, i++) {
				pos[i] = by + k / merge;
				pos[p->n + i] = bx + k % merge;
			}
}

static int set_angles(struct run *r, const struct patches *p)
{
	size_t bytes = 2 * (size_t)p->n * sizeof(int32_t);
	int32_t *pos = malloc(bytes);
	void *dev = NULL;
	int err = pos == NULL ? fs_fail(r->e, FS_ENOMEM, "no memory") : fs_dev_alloc(r->d, bytes, &dev, r->e);

	if (err == FS_OK) {
		fill_positions(p, r->t->h.merge, pos);
		fs_dev_upload(r->d, dev, pos, bytes);
		fs_op_rope_angles(r->d, &r->t->rope, dev, r->cs, p->n);
		err = fs_dev_sync(r->d, r->e);
		fs_dev_free(r->d, dev);
	}
	free(pos);
	return err;
}

static int embed_patches(struct run *r, const struct patches *p)
{
	int64_t width = 3 * (int64_t)r->t->h.patch * r->t->h.patch;
	int err = FS_OK;

	for (int64_t at = 0; at < r->n && err == FS_OK; at += r->chunk) {
		int64_t n = FS_MIN(r->chunk, r->n - at);

		fs_dev_upload(r->d, r->pixels, p->data + at * width, (size_t)(n * width) * sizeof(float));
		linear(r, &r->t->patch, r->pixels, r->x + at * r->t->h.n_embd, n, false);
		err = checkpoint(r);
	}
	return err;
}

static void rope(const struct run *r, float *x, int64_t at, int64_t n)
{
	const struct vision_hparams *h = &r->t->h;

	fs_op_rope(r->d, &r->t->rope, r->cs + at * r->t->rope.n_pairs * 2, x, h->n_embd, n, h->n_heads,
	        h->head_dim);
}

/* Keys and values of all patches must stand before the first query. */
static int keys_and_values(struct run *r, const struct tower_layer *l)
{
	int64_t embd = r->t->h.n_embd;
	int err = FS_OK;

	for (int64_t at = 0; at < r->n && err == FS_OK; at += r->chunk) {
		int64_t n = FS_MIN(r->chunk, r->n - at);

		norm(r, &l->ln1, r->x + at * embd, r->a, n);
		linear(r, &l->k, r->a, r->k + at * embd, n, false);
		linear(r, &l->v, r->a, r->v + at * embd, n, false);
		rope(r, r->k + at * embd, at, n);
		err = checkpoint(r);
	}
	return err;
}

/* x += out(attention(q, k, v)) for one chunk; q from this chunk's rows before they change. */
static void attend(struct run *r, const struct tower_layer *l, int64_t at, int64_t n)
{
	const struct vision_hparams *h = &r->t->h;
	float *x = r->x + at * h->n_embd;
	struct fs_attn a = {
	        .q = r->b,
	        .q_stride = h->n_embd,
	        .k = r->k,
	        .v = r->v,
	        .kv_stride = h->n_embd,
	        .kv_type = FS_F32,
	        .out = r->a,
	        .out_stride = h->n_embd,
	        .n_q = n,
	        .n_kv = r->n,
	        .heads = h->n_heads,
	        .kv_heads = h->n_heads,
	        .head_dim = h->head_dim,
	        .scale = 1.0f / sqrtf((float)h->head_dim),
	};

	norm(r, &l->ln1, x, r->a, n);
	linear(r, &l->q, r->a, r->b, n, false);
	rope(r, r->b, at, n);
	fs_op_attention(r->d, &a);
	linear(r, &l->out, r->a, x, n, true);
}

static int feed_forward(struct run *r, const struct tower_layer *l, int64_t at, int64_t n)
{
	const struct vision_hparams *h = &r->t->h;
	float *x = r->x + at * h->n_embd;
	int err;

	norm(r, &l->ln2, x, r->a, n);
	linear(r, &l->up, r->a, r->wide, n, false);
	fs_op_act(r->d, h->act, r->wide, n * h->n_ff);
	err = checkpoint(r);
	if (err == FS_OK)
		linear(r, &l->down, r->wide, x, n, true);
	return err;
}

static int run_layer(struct run *r, const struct tower_layer *l)
{
	int err = keys_and_values(r, l);

	for (int64_t at = 0; at < r->n && err == FS_OK; at += r->chunk) {
		int64_t n = FS_MIN(r->chunk, r->n - at);

		attend(r, l, at, n);
		err = checkpoint(r);
		if (err == FS_OK)
			err = feed_forward(r, l, at, n);
		if (err == FS_OK)
			err = checkpoint(r);
	}
	/* on a GPU the work is only queued so far: without waiting, the token would be looked at long before
	 * it is done */
	if (err == FS_OK)
		fs_dev_pace(r->d);
	return err;
}

/* A cell's merge² patches lie side by side, so [n][n_embd] is [n/merge²][merge² · n_embd]. */
static int project(struct run *r, float *out)
{
	const struct vision_hparams *h = &r->t->h;
	int64_t cell = (int64_t)h->merge * h->merge;
	int err = FS_OK;

	for (int64_t at = 0; at < r->n && err == FS_OK; at += r->chunk) {
		int64_t n = FS_MIN(r->chunk, r->n - at), rows = n / cell;

		norm(r, &r->t->post_ln, r->x + at * h->n_embd, r->a, n);
		linear(r, &r->t->merge1, r->a, r->wide, rows, false);
		fs_op_act(r->d, FS_GELU_ERF, r->wide, n * h->n_embd);
		linear(r, &r->t->merge2, r->wide, r->rows, rows, false);
		err = fs_dev_download(r->d, out + at / cell * h->n_out, r->rows,
		        (size_t)(rows * h->n_out) * sizeof(float), r->e);
		if (err == FS_OK)
			err = checkpoint(r);
	}
	return err;
}

int tower_run(const struct tower *t, const struct patches *p, struct fs_cancel *cancel, float *rows,
        struct fs_errbuf *e)
{
	struct run r;
	int err = run_init(&r, t, p, cancel, e), late;

	if (err != FS_OK)
		return err;
	err = set_angles(&r, p);
	if (err == FS_OK)
		err = embed_patches(&r, p);
	for (int il = 0; il < t->h.n_layers && err == FS_OK; il++)
		err = run_layer(&r, &t->layers[il]);
	if (err == FS_OK)
		err = project(&r, rows);
	late = fs_dev_sync(r.d, err == FS_OK ? e : NULL); /* queued work must not outlive its memory */
	run_finish(&r);
	return err != FS_OK ? err : late;
}
