/*
 * large.c: products with many rows: activations go to bf16 (or stay f32), weights are taken in panels of
 * output columns, packed before or dequantised here, and each panel is multiplied by oneDNN with all rows at
 * hand. Scratch is bounded: LARGE_ROWS activation rows and one panel a worker. Runs on the owner thread, its
 * tasks on the pool.
 */
#include "common/compute/cpu/cpu.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#define LARGE_ROWS 1024 /* activation rows converted at a time */
#define TILE_ROWS 256   /* rows of one oneDNN product */
#define PANEL 64        /* output columns of a dequantised panel */
#define PACKED_PANEL 128

struct fs_packed {
	bool bf16;
	size_t panel_bytes; /* of a whole panel; the last may be smaller */
	uint8_t *data;
};

struct large_job {
	struct fs_cpu *c;
	const struct fs_weight *w;
	const struct fs_packed *packed; /* or NULL */
	const float *bias;
	const float *x; /* f32 rows of this round */
	uint16_t *x16;  /* the same in bf16, or NULL */
	float *y;
	int64_t n;             /* rows of this round */
	bool add, bf16, as_is; /* as_is: the rows of the file are what oneDNN takes */
	int64_t panel, panels,
	        groups; /* groups: pieces the rows are cut into, so that all threads have work */
	int64_t tile;
	const struct fs_gemm_plan *plan[2][2]; /* [last panel][last tile] */
	uint8_t *scratch;                      /* [workers][scratch_bytes]: panel, piece of y, oneDNN's */
	size_t scratch_bytes, panel_bytes, piece_bytes;
	_Atomic bool failed;
};

static void convert_task(void *arg, int64_t task, int worker)
{
	struct large_job *j = arg;
	int64_t r0 = task * 16, r1 = FS_MIN(j->n, r0 + 16);

	j->c->k->to_bf16(j->x + r0 * j->w->in, j->x16 + r0 * j->w->in, (r1 - r0) * j->w->in);
}

static const void *panel_of(const struct large_job *j, int64_t p, int64_t cols, uint8_t *scratch)
{
	size_t row = fs_dtype_row_bytes(j->w->type, j->w->in);
	const uint8_t *w = (const uint8_t *)j->w->data + (size_t)(p * j->panel) * row;

	if (j->packed)
		return j->packed->data + (size_t)p * j->packed->panel_bytes;
	if (j->as_is)
		return w;
	for (int64_t o = 0; o < cols; o++) {
		if (j->bf16)
			j->c->k->dequantize_bf16(j->w->type, w + (size_t)o * row,
			        (uint16_t *)(void *)scratch + o * j->w->in, j->w->in);
		else
			j->c->k->dequantize(j->w->type, w + (size_t)o * row,
			        (float *)(void *)scratch + o * j->w->in, j->w->in);
	}
	return scratch;
}

/* A dense piece into its place in y. */
static void put_piece(
        const struct large_job *j, const float *piece, int64_t r0, int64_t rows, int64_t o0, int64_t cols)
{
	for (int64_t r = 0; r < rows; r++, piece += cols) {
		float *y = j->y + (r0 + r) * j->w->out + o0;

		if (!j->add)
			memcpy(y, piece, (size_t)cols * sizeof(*y));
		else
			j->c->k->add(y, piece, cols);
		if (j->bias)
			j->c->k->add(y, j->bias + o0, cols);
	}
}

static void large_task(void *arg, int64_t task, int worker)
{
	struct large_job *j = arg;
	int64_t p = task / j->groups, g = task % j->groups, in = j->w->in;
	int64_t cols = FS_MIN(j->panel, j->w->out - p * j->panel);
	int64_t tiles = (j->n + j->tile - 1) / j->tile;
	uint8_t *scratch = j->scratch + (size_t)worker * j->scratch_bytes;
	float *piece = (float *)(void *)(scratch + j->panel_bytes);
	const void *w = panel_of(j, p, cols, scratch);

	for (int64_t t = tiles * g / j->groups; t < tiles * (g + 1) / j->groups; t++) {
		int64_t r0 = t * j->tile, rows = FS_MIN(j->tile, j->n - r0);
		const void *a = j->x16 ? (const void *)(j->x16 + r0 * in) : j->x + r0 * in;

		if (!fs_gemm_execute(j->c->gemm, j->plan[cols < j->panel][rows < j->tile], worker, a, w,
		            piece, scratch + j->panel_bytes + j->piece_bytes))
			atomic_store(&j->failed, true);
		put_piece(j, piece, r0, rows, p * j->panel, cols);
	}
}

/* Plans for whole and last panels and tiles; the scratch that they need. */
static bool plan_all(struct large_job *j, size_t *scratch)
{
	int64_t last_cols = j->w->out % j->panel, last_rows = j->n % j->tile;
	struct fs_errbuf e;

	*scratch = 0;
	for (int i = 0; i < 4; i++) {
		struct fs_gemm_shape s = {.k = j->w->in, .bf16 = j->bf16, .packed = j->packed};
		int err;

		s.n = i & 2 ? last_cols : j->panel;
		s.m = i & 1 ? last_rows : j->tile;
		if (!s.n || !s.m || s.n > j->w->out || s.m > j->n)
			continue;
		err = fs_gemm_plan(j->c->gemm, &s, &j->plan[i >> 1][i & 1], &e);
		if (err) {
			fs_dev_fail(&j->c->dev, err, "%s", e.text);
			return false;
		}
		*scratch = FS_MAX(*scratch, fs_gemm_plan_scratch(j->plan[i >> 1][i & 1]));
	}
	return true;
}

static size_t round64(size_t n)
{
	return (n + 63) & ~(size_t)63;
}

/* One round of at most LARGE_ROWS rows. */
static void round_of_rows(struct large_job *j)
{
	struct fs_cpu *c = j->c;
	int threads = c->dev.threads;
	size_t plan_scratch;
	int64_t tiles;

	/* with few panels the rows are cut too; a tile is at least 32 rows */
	j->groups = j->panels >= 4 * threads ? 1 : (4 * threads + j->panels - 1) / j->panels;
	j->tile = FS_MAX(32, FS_MIN(TILE_ROWS, ((j->n + j->groups - 1) / j->groups + 15) / 16 * 16));
	tiles = (j->n + j->tile - 1) / j->tile;
	j->groups = FS_MIN(j->groups, tiles);
	if (!plan_all(j, &plan_scratch))
		return;
	if (j->bf16) {
		j->x16 = fs_scratch_get(c, &c->rows, (size_t)(j->n * j->w->in), sizeof(*j->x16));
		if (!j->x16)
			return;
		fs_pool_run(c->pool, (j->n + 15) / 16, convert_task, j);
	}
	j->panel_bytes =
	        j->packed || j->as_is ? 0 : round64((size_t)(j->panel * j->w->in) * (j->bf16 ? 2 : 4));
	j->piece_bytes = round64((size_t)(j->tile * j->panel) * sizeof(float));
	j->scratch_bytes = j->panel_bytes + j->piece_bytes + round64(plan_scratch + 64);
	j->scratch = fs_scratch_get(c, &c->worker, (size_t)threads, j->scratch_bytes);
	if (!j->scratch)
		return;
	fs_pool_run(c->pool, j->panels * j->groups, large_task, j);
	if (atomic_load(&j->failed))
		fs_dev_fail(&c->dev, FS_EINTERNAL, "oneDNN failed in a product of %lld x %lld",
		        (long long)j->w->in, (long long)j->w->out);
}

void fs_cpu_matmul_large(struct fs_cpu *c, const struct fs_weight *w, const float *bias, const float *x,
        float *y, int64_t n, bool add)
{
	for (int64_t r = 0; r < n && !c->dev.err; r += LARGE_ROWS) {
		struct large_job j = {.c = c, .w = w, .packed = w->packed, .bias = bias, .add = add};

		j.bf16 = j.packed ? j.packed->bf16 : c->bf16;
		j.as_is = w->type == (j.bf16 ? FS_BF16 : FS_F32);
		j.panel = j.packed ? PACKED_PANEL : PANEL;
		j.panels = (w->out + j.panel - 1) / j.panel;
		j.x = x + r * w->in;
		j.y = y + r * w->out;
		j.n = FS_MIN(LARGE_ROWS, n - r);
		round_of_rows(&j);
	}
}

void fs_cpu_packed_free(struct fs_packed *p)
{
	if (p)
		free(p->data);
	free(p);
}

static int fill_packed(struct fs_cpu *c, const struct fs_weight *w, struct fs_packed *p, struct fs_errbuf *e)
{
	struct large_job j = {.c = c, .w = w, .bf16 = p->bf16, .panel = PACKED_PANEL};
	uint8_t *rows = fs_scratch_get(c, &c->worker, (size_t)(PACKED_PANEL * w->in), p->bf16 ? 2 : 4);
	int err = FS_OK;

	j.as_is = w->type == (j.bf16 ? FS_BF16 : FS_F32);
	if (!rows)
		return fs_dev_sync(&c->dev, e);
	for (int64_t i = 0; i * PACKED_PANEL < w->out && !err; i++) {
		int64_t cols = FS_MIN(PACKED_PANEL, w->out - i * PACKED_PANEL);
		const void *plain = panel_of(&j, i, cols, rows);

		err = fs_gemm_pack(
		        c->gemm, cols, w->in, p->bf16, plain, p->data + (size_t)i * p->panel_bytes, e);
	}
	return err;
}

int fs_cpu_pack(struct fs_cpu *c, const struct fs_weight *w, struct fs_packed **out, struct fs_errbuf *e)
{
	int64_t whole = w->out / PACKED_PANEL, rest = w->out % PACKED_PANEL;
	struct fs_packed *p = calloc(1, sizeof(*p));
	size_t rest_bytes = 0, bytes;
	int err = FS_OK;

	if (!p)
		return fs_fail(e, FS_ENOMEM, "no memory for packed weights");
	p->bf16 = c->bf16;
	if (whole)
		err = fs_gemm_packed_bytes(c->gemm, PACKED_PANEL, w->in, p->bf16, &p->panel_bytes, e);
	if (!err && rest)
		err = fs_gemm_packed_bytes(c->gemm, rest, w->in, p->bf16, &rest_bytes, e);
	p->panel_bytes = round64(p->panel_bytes);
	if (!err && (!fs_mul_size(p->panel_bytes, (size_t)whole, &bytes) ||
	                    !fs_add_size(bytes, rest_bytes + 63, &bytes)))
		err = fs_fail(e, FS_ENOMEM, "packed weights are too large");
	if (!err) {
		p->data = aligned_alloc(64, bytes & ~(size_t)63);
		err = p->data ? fill_packed(c, w, p, e)
		              : fs_fail(e, FS_ENOMEM, "no memory for %zu bytes of packed weights", bytes);
	}
	if (err) {
		fs_cpu_packed_free(p);
		return err;
	}
	*out = p;
	return FS_OK;
}
