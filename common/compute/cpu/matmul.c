/*
 * matmul.c: chooses how a product is made. Few rows: own kernels that read each weight once, in int8
 * activations for quantised types (FS_PRECISION_AUTO) or f32; many rows: large.c. Runs on the owner thread.
 */
#include "common/compute/cpu/cpu.h"

#include <string.h>

/* int8 tiles serve this weight: quantised, not packed for oneDNN, and the caller did not ask for f32. */
static bool takes_tiles(const struct fs_cpu *c, const struct fs_weight *w)
{
	return c->k->panel_pack && fs_is_quantized(w->type) && !w->packed &&
	       c->dev.precision == FS_PRECISION_AUTO;
}

/* Up to this many rows the few-row kernels are faster than a large product (measured on Zen 4: int8 dots
 * cross int8 tiles near 8 rows, oneDNN's bf16 near 18 and its f32 near 36; f32 dots cross bf16 near 9). */
static int64_t few_limit(const struct fs_cpu *c, const struct fs_weight *w)
{
	if (!fs_is_quantized(w->type) || c->dev.precision != FS_PRECISION_AUTO || c->k == &fs_kernels_scalar)
		return 8;
	if (takes_tiles(c, w))
		return 8;
	return c->bf16 ? 16 : 32;
}

struct few_job {
	const struct fs_kernels *k;
	struct fs_few f;
	bool int8;
	int64_t out, grain;
	float *tmp; /* [workers][in] or NULL */
};

static void few_task(void *arg, int64_t task, int worker)
{
	struct few_job *j = arg;
	struct fs_few f = j->f;

	f.o0 = task * j->grain;
	f.o1 = FS_MIN(j->out, f.o0 + j->grain);
	f.tmp = j->tmp ? j->tmp + worker * f.in : NULL;
	if (j->int8)
		j->k->few_q8(&f);
	else
		j->k->few_f32(&f);
}

/* Activations to int8, into the device's scratch. */
static bool quantize_rows(struct fs_cpu *c, struct few_job *j)
{
	int64_t in = j->f.in, n = j->f.n;
	struct fs_xq *xq = &j->f.xq;

	xq->d = fs_scratch_get(c, &c->rows, (size_t)n, (size_t)(in + in / 32 * 16));
	if (!xq->d)
		return false;
	xq->s = xq->d + n * in / 32;
	xq->s16 = xq->s + n * in / 32;
	xq->q = (int8_t *)(xq->s16 + n * in / 16);
	for (int64_t r = 0; r < n; r++) {
		struct fs_xq row = {.q = xq->q + r * in, .d = xq->d + r * in / 32, .s = xq->s + r * in / 32};

		row.s16 = xq->s16 + r * in / 16;
		c->k->quantize(j->f.x + r * in, &row, in);
	}
	return true;
}

/* Outputs of a task: enough work to be worth handing out, yet several tasks for each thread. */
static int64_t few_grain(const struct fs_cpu *c, int64_t in, int64_t out, int n)
{
	int64_t least = FS_MAX(1, 32768 / FS_MAX(1, in * n));

	return FS_MAX(least, out / (c->dev.threads * 8));
}

static void matmul_few(struct fs_cpu *c, const struct fs_weight *w, const float *bias, const float *x,
        float *y, int n, bool add)
{
	struct few_job j = {.k = c->k, .out = w->out, .grain = few_grain(c, w->in, w->out, n)};

	j.f = (struct fs_few){
	        .type = w->type, .in = w->in, .w = w->data, .bias = bias, .add = add, .n = n, .x = x, .y = y};
	j.f.row_bytes = fs_dtype_row_bytes(w->type, w->in);
	j.f.ldy = w->out;
	j.int8 = fs_is_quantized(w->type) && c->dev.precision == FS_PRECISION_AUTO;
	if (j.int8 && !quantize_rows(c, &j))
		return;
	if (fs_is_quantized(w->type)) {
		j.tmp = fs_scratch_get(c, &c->worker, (size_t)c->dev.threads, (size_t)w->in * sizeof(float));
		if (!j.tmp)
			return;
	}
	fs_pool_run(c->pool, (w->out + j.grain - 1) / j.grain, few_task, &j);
}

void fs_cpu_matmul(struct fs_dev *d, const struct fs_weight *w, const float *bias, const float *x, float *y,
        int64_t n, bool add)
{
	struct fs_cpu *c = (struct fs_cpu *)d;

	if (n > few_limit(c, w) && takes_tiles(c, w))
		fs_cpu_matmul_many(c, w, bias, x, y, n, add);
	else if (n > few_limit(c, w))
		fs_cpu_matmul_large(c, w, bias, x, y, n, add);
	else
		matmul_few(c, w, bias, x, y, (int)n, add);
}

void fs_cpu_embed(struct fs_dev *d, const struct fs_weight *w, const int32_t *ids, float *y, int64_t n)
{
	struct fs_cpu *c = (struct fs_cpu *)d;
	size_t row = fs_dtype_row_bytes(w->type, w->in);

	for (int64_t i = 0; i < n; i++) {
		FS_ASSERT(ids[i] >= 0 && ids[i] < w->out);
		c->k->dequantize(
		        w->type, (const uint8_t *)w->data + (size_t)ids[i] * row, y + i * w->in, w->in);
	}
}
