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

/* out[r] = w[in]·x[r][in] for rows r of x, rows a constant 1..4; two sums a row, so that additions do not
 * wait for each other. */
FS_INLINE void dots(enum fs_dtype type, const uint8_t *w, const float *x, int64_t in, int rows, float *out)
{
	vf sum[4], sum2[4];
	int64_t i = 0;

	FS_UNROLL
	for (int r = 0; r < rows; r++)
		sum[r] = sum2[r] = v_set(0.0f);
	for (; i + 2 * VW <= in; i += 2 * VW) {
		vf a = load_w(type, w, i), b = load_w(type, w, i + VW);

		FS_UNROLL
		for (int r = 0; r < rows; r++) {
			sum[r] = v_fma(a, v_load(x + r * in + i), sum[r]);
			sum2[r] = v_fma(b, v_load(x + r * in + i + VW), sum2[r]);
		}
	}
	for (; i + VW <= in; i += VW) {
		vf a = load_w(type, w, i);

		FS_UNROLL
		for (int r = 0; r < rows; r++)
			sum[r] = v_fma(a, v_load(x + r * in + i), sum[r]);
	}
	FS_UNROLL
	for (int r = 0; r < rows; r++)
		out[r] = v_sum(v_add(sum[r], sum2[r]));
	for (; i < in; i++)
		for (int r = 0; r < rows; r++)
			out[r] += one_w(type, w, i) * x[r * in + i];
}

FS_INLINE void dots_typed(
        enum fs_dtype type, const uint8_t *w, const float *x, int64_t in, int rows, float *out)
{
	switch (rows) {
	case 1:
		dots(type, w, x, in, 1, out);
		break;
	case 2:
		dots(type, w, x, in, 2, out);
		break;
	case 3:
		dots(type, w, x, in, 3, out);
		break;
	default:
		dots(type, w, x, in, 4, out);
		break;
	}
}

static void dots_any(enum fs_dtype type, const uint8_t *w, const float *x, int64_t in, int rows, float *out)
{
	if (type == FS_F16)
		dots_typed(FS_F16, w, x, in, rows, out);
	else if (type == FS_BF16)
		dots_typed(FS_BF16, w, x, in, rows, out);
	else
		dots_typed(FS_F32, w, x, in, rows, out);
}

void FS_LV(few_f32)(const struct fs_few *f)
{
	for (int64_t o = f->o0; o < f->o1; o++) {
		const uint8_t *w = f->w + (size_t)o * f->row_bytes;
		enum fs_dtype type = f->type;
		float bias = f->bias ? f->bias[o] : 0.0f;

		if (fs_is_quantized(type)) {
			FS_LV(dequantize)(type, w, f->tmp, f->in);
			w = (const uint8_t *)f->tmp;
			type = FS_F32;
		}
		for (int r = 0; r < f->n; r += 4) {
			int rows = FS_MIN(4, f->n - r);
			float out[4];

			dots_any(type, w, f->x + r * f->in, f->in, rows, out);
			for (int k = 0; k < rows; k++) {
				float *y = f->y + (r + k) * f->ldy + o;

				*y = out[k] + bias + (f->add ? *y : 0.0f);
			}
		}
	}
}

/* The largest magnitude becomes 127; an all-zero block has d = 0. */
void FS_LV(quantize)(const float *x, struct fs_xq *xq, int64_t in)
{
	for (int64_t b = 0; b < in / 32; b++) {
		const float *v = x + 32 * b;
		int8_t *q = xq->q + 32 * b;
		vf m = v_set(0.0f);
		float max, inv;
		int sum = 0;

		for (int i = 0; i < 32; i += VW)
			m = v_max(m, v_abs(v_load(v + i)));
		max = v_hmax(m);
		inv = max > 0.0f ? 127.0f / max : 0.0f;
		for (int i = 0; i < 32; i++) {
			int k = (int)lrintf(v[i] * inv);

			q[i] = (int8_t)k;
			sum += k;
		}
		xq->d[b] = max / 127.0f;
		xq->s[b] = max / 127.0f * (float)sum;
	}
}
