/*
 * many.c: products of quantised weights with many rows in int8 (qtile.c), where the processor has the
 * instructions. Scratch is bounded: MANY_ROWS activation rows, and a few panels a worker. Runs on the owner
 * thread, its tasks on the pool.
 */
#include "common/compute/cpu/cpu.h"

#define MANY_ROWS 1024 /* activation rows quantised at a time */
#define PANELS 4       /* of a task: activation rows are read once from outer caches for all of them */
#define ROW_BYTES                                                                                            \
	(256 << 10) /* of activations that are multiplied with all panels of a task before the next rows */

struct many_job {
	const struct fs_kernels *k;
	const struct fs_weight *w;
	const float *bias, *x;
	float *y;
	bool add;
	int64_t n;
	int64_t groups; /* pieces the rows are cut into, so that all threads have work */
	struct fs_xq xq;
	uint8_t *panels; /* [workers][PANELS][panel_bytes] */
	size_t panel_bytes;
};

static void quantize_task(void *arg, int64_t task, int worker)
{
	struct many_job *j = arg;
	int64_t in = j->w->in;

	for (int64_t r = task * 8; r < FS_MIN(j->n, task * 8 + 8); r++) {
		struct fs_xq row = {
		        .q = j->xq.q + r * in, .d = j->xq.d + r * in / 32, .s = j->xq.s + r * in / 32};

		row.s16 = j->xq.s16 + r * in / 16;
		j->k->quantize(j->x + r * in, &row, in);
	}
}

static void many_task(void *arg, int64_t task, int worker)
{
	struct many_job *j = arg;
	int64_t o0 = task / j->groups * PANELS * FS_TILE_OUTS, g = task % j->groups;
	int64_t o1 = FS_MIN(j->w->out, o0 + PANELS * FS_TILE_OUTS);
	int64_t first = j->n * g / j->groups, last = j->n * (g + 1) / j->groups;
	int64_t rows = FS_MAX(8, ROW_BYTES / j->w->in / 8 * 8);
	size_t row_bytes = fs_dtype_row_bytes(j->w->type, j->w->in);
	uint8_t *panels = j->panels + (size_t)worker * PANELS * j->panel_bytes;
	struct fs_tile t = {.type = j->w->type, .in = j->w->in, .xq = j->xq, .ldy = j->w->out, .add = j->add};

	for (int64_t o = o0; o < o1; o += FS_TILE_OUTS)
		j->k->panel_pack(j->w->type, (const uint8_t *)j->w->data + (size_t)o * row_bytes, row_bytes,
		        (int)FS_MIN(FS_TILE_OUTS, o1 - o), j->w->in,
		        panels + (size_t)((o - o0) / FS_TILE_OUTS) * j->panel_bytes);
	for (t.r0 = first; t.r0 < last; t.r0 = t.r1) {
		t.r1 = FS_MIN(last, t.r0 + rows);
		for (int64_t o = o0; o < o1; o += FS_TILE_OUTS) {
			t.panel = panels + (size_t)((o - o0) / FS_TILE_OUTS) * j->panel_bytes;
			t.outs = (int)FS_MIN(FS_TILE_OUTS, o1 - o);
			t.bias = j->bias ? j->bias + o : NULL;
			t.y = j->y + o;
			j->k->panel_multiply(&t);
		}
	}
}

static bool room_for_rows(struct fs_cpu *c, struct many_job *j)
{
	int64_t in = j->w->in, n = j->n;

	j->xq.d = fs_scratch_get(c, &c->rows, (size_t)n, (size_t)(in + in / 32 * 16));
	if (!j->xq.d)
		return false;
	j->xq.s = j->xq.d + n * in / 32;
	j->xq.s16 = j->xq.s + n * in / 32;
	j->xq.q = (int8_t *)(j->xq.s16 + n * in / 16);
	return true;
}

void fs_cpu_matmul_many(struct fs_cpu *c, const struct fs_weight *w, const float *bias, const float *x,
        float *y, int64_t n, bool add)
{
	int64_t tasks = (w->out + PANELS * FS_TILE_OUTS - 1) / (PANELS * FS_TILE_OUTS),
	        threads = c->dev.threads;

	for (int64_t r = 0; r < n; r += MANY_ROWS) {
		struct many_job j = {
		        .k = c->k, .w = w, .bias = bias, .x = x + r * w->in, .y = y + r * w->out, .add = add};

		j.n = FS_MIN(MANY_ROWS, n - r);
		/* cut the rows only where that does not make unpacking the larger part */
		j.groups = tasks >= 2 * threads ? 1 : FS_MAX(1, FS_MIN(2 * threads / tasks, j.n / 64));
		j.panel_bytes = c->k->panel_bytes(w->type, w->in);
		j.panels = fs_scratch_get(c, &c->worker, (size_t)(threads * PANELS), j.panel_bytes);
		if (!j.panels || !room_for_rows(c, &j))
			return;
		fs_pool_run(c->pool, (j.n + 7) / 8, quantize_task, &j);
		fs_pool_run(c->pool, tasks * j.groups, many_task, &j);
	}
}
