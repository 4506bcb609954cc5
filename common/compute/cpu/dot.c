/*
 * dot.c: products with few rows in f32 arithmetic, and the int8 form of activations, for one level. Each
 * weight row is read once for up to four activation rows. Pure functions, any thread. The int8 products are
 * in qdot.c.
 */
#include "common/compute/cpu/kernels.h"
#include "common/compute/cpu/vec.h"

FS_INLINE vf load_w(enum fs_dtype type, const uint8_t *w, int64_t i)
{
	if (type == FS_F16)
		return v_load_f16((const uint16_t *)(const void *)w + i);
	if (type == FS_BF16)
		return v_load_bf16((const uint16_t *)(const void *)w + i);
	return v_load((const float *)(const void *)w + i);
}

FS_INLINE float one_w(enum fs_dtype type, const uint8_t *w, int64_t i)
{
	if (type == FS_F16)
		return fs_f16_to_f32(((const uint16_t *)(const void *)w)[i]);
	if (type == FS_BF16)
		return fs_bf16_to_f32(((const uint16_t *)(const void *)w)[i]);
	return ((const float *)(const void *)w)[i];
}

/* out[r] = w[in]·x[r][in] for one or two rows (a constant): one weight row read in order, as fast as memory
 * gives it, into several sums. */
FS_INLINE void dots_long(
        enum fs_dtype type, const uint8_t *w, const float *x, int64_t in, int rows, float *out)
{
	vf sum[2][4];
	int64_t i = 0;

	FS_UNROLL
	for (int r = 0; r < rows; r++)
		FS_UNROLL
	for (int k = 0; k < 4; k++)
		sum[r][k] = v_set(0.0f);
	for (; i + 4 * VW <= in; i += 4 * VW) {
		FS_UNROLL
		for (int k = 0; k < 4; k++) {
			vf a = load_w(type, w, i + k * VW);

			FS_UNROLL
			for (int r = 0; r < rows; r++)
				sum[r][k] = v_fma(a, v_load(x + r * in + i + k * VW), sum[r][k]);
		}
	}
	for (; i + VW <= in; i += VW) {
		vf a = load_w(type, w, i);

		FS_UNROLL
		for (int r = 0; r < rows; r++)
			sum[r][0] = v_fma(a, v_load(x + r * in + i), sum[r][0]);
	}
	FS_UNROLL
	for (int r = 0; r < rows; r++)
		out[r] = v_sum(v_add(v_add(sum[r][0], sum[r][1]), v_add(sum[r][2], sum[r][3])));
	for (; i < in; i++)
		for (int r = 0; r < rows; r++)
			out[r] += one_w(type, w, i) * x[r * in + i];
}

/*
 * out[o][r] = w[o][in]·x[r][in] for outs weight rows (row_bytes apart) and rows activation rows; both are
 * constants where it is inlined, so that all sums stay in registers and every load serves several of them.
 */
FS_INLINE void dots(enum fs_dtype type, const uint8_t *w, size_t row_bytes, const float *x, int64_t in,
        int outs, int rows, float out[4][4])
{
	vf sum[4][4];
	int64_t i = 0;

	FS_UNROLL
	for (int o = 0; o < outs; o++)
		FS_UNROLL
	for (int r = 0; r < rows; r++)
		sum[o][r] = v_set(0.0f);
	for (; i + VW <= in; i += VW) {
		vf a[4];

		FS_UNROLL
		for (int o = 0; o < outs; o++)
			a[o] = load_w(type, w + (size_t)o * row_bytes, i);
		FS_UNROLL
		for (int r = 0; r < rows; r++) {
			vf v = v_load(x + r * in + i);

			FS_UNROLL
			for (int o = 0; o < outs; o++)
				sum[o][r] = v_fma(a[o], v, sum[o][r]);
		}
	}
	FS_UNROLL
	for (int o = 0; o < outs; o++)
		FS_UNROLL
	for (int r = 0; r < rows; r++)
		out[o][r] = v_sum(sum[o][r]);
	for (; i < in; i++)
		for (int o = 0; o < outs; o++)
			for (int r = 0; r < rows; r++)
				out[o][r] += one_w(type, w + (size_t)o * row_bytes, i) * x[r * in + i];
}

FS_INLINE void dots_rows(enum fs_dtype type, const uint8_t *w, size_t row_bytes, const float *x, int64_t in,
        int outs, int rows, float out[4][4])
{
	if (rows == 3)
		dots(type, w, row_bytes, x, in, outs, 3, out);
	else
		dots(type, w, row_bytes, x, in, outs, 4, out);
}

FS_INLINE void dots_outs(enum fs_dtype type, const uint8_t *w, size_t row_bytes, const float *x, int64_t in,
        int outs, int rows, float out[4][4])
{
	if (rows > 2 && outs == 4) {
		dots_rows(type, w, row_bytes, x, in, 4, rows, out);
		return;
	}
	for (int o = 0; o < outs; o++, w += row_bytes) {
		if (rows == 1)
			dots_long(type, w, x, in, 1, out[o]);
		else if (rows == 2)
			dots_long(type, w, x, in, 2, out[o]);
		else
			dots_rows(type, w, row_bytes, x, in, 1, rows, out + o);
	}
}

static void dots_any(enum fs_dtype type, const uint8_t *w, size_t row_bytes, const float *x, int64_t in,
        int outs, int rows, float out[4][4])
{
	if (type == FS_F16)
		dots_outs(FS_F16, w, row_bytes, x, in, outs, rows, out);
	else if (type == FS_BF16)
		dots_outs(FS_BF16, w, row_bytes, x, in, outs, rows, out);
	else
		dots_outs(FS_F32, w, row_bytes, x, in, outs, rows, out);
}

void FS_LV(few_f32)(const struct fs_few *f)
{
	bool quantized = fs_is_quantized(f->type);
	int step = quantized ? 1 : 4;

	for (int64_t o = f->o0; o < f->o1; o += step) {
		const uint8_t *w = f->w + (size_t)o * f->row_bytes;
		int outs = (int)FS_MIN(step, f->o1 - o);

		if (quantized) {
			FS_LV(dequantize)(f->type, w, f->tmp, f->in);
			w = (const uint8_t *)f->tmp;
		}
		for (int r = 0; r < f->n; r += 4) {
			int rows = FS_MIN(4, f->n - r);
			float out[4][4];

			dots_any(quantized ? FS_F32 : f->type, w, f->row_bytes, f->x + r * f->in, f->in, outs,
			        rows, out);
			for (int i = 0; i < outs * rows; i++) {
				int64_t at = o + i / rows;
				float *y = f->y + (r + i % rows) * f->ldy + at;

				*y = out[i / rows][i % rows] + (f->bias ? f->bias[at] : 0.0f) +
				     (f->add ? *y : 0.0f);
			}
		}
	}
}

/* The largest magnitude becomes 127; an all-zero block has d = 0, and one so small that 127 divided by it
 * overflows counts as zero. */
void FS_LV(quantize)(const float *x, struct fs_xq *xq, int64_t in)
{
	for (int64_t b = 0; b < in / 32; b++) {
		const float *v = x + 32 * b;
		int8_t *q = xq->q + 32 * b;
		vf m = v_set(0.0f);
		float max, inv, d;
		int sum[2] = {0, 0};

		for (int i = 0; i < 32; i += VW)
			m = v_max(m, v_abs(v_load(v + i)));
		max = v_hmax(m);
		inv = max > 1e-36f ? 127.0f / max : 0.0f;
		d = max / 127.0f;
		for (int i = 0; i < 32; i += VW)
			sum[i / 16] += v_store_i8(q + i, v_mul(v_load(v + i), v_set(inv)));
		xq->d[b] = d;
		xq->s16[2 * b] = d * (float)sum[0];
		xq->s16[2 * b + 1] = d * (float)sum[1];
		xq->s[b] = d * (float)(sum[0] + sum[1]);
	}
}
