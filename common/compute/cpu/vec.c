/*
 * vec.c: norms, rotary embedding, activations and conversions, for one level; and the level's table. Pure
 * functions, any thread.
 */
#include "common/compute/cpu/kernels.h"
#include "common/compute/cpu/vec.h"

static void rms_norm(const float *x, const float *w, float *y, int64_t n, int64_t dim, float eps)
{
	for (int64_t row = 0; row < n; row++, x += dim, y += dim) {
		vf sum = v_set(0.0f), sum2 = v_set(0.0f), scale;
		int64_t i = 0;

		for (; i + 2 * VW <= dim; i += 2 * VW) {
			vf a = v_load(x + i), b = v_load(x + i + VW);

			sum = v_fma(a, a, sum);
			sum2 = v_fma(b, b, sum2);
		}
		for (; i < dim; i += VW) {
			vf a = v_load_n(x + i, (int)FS_MIN(VW, dim - i));

			sum = v_fma(a, a, sum);
		}
		scale = v_set(1.0f / sqrtf(v_sum(v_add(sum, sum2)) / (float)dim + eps));
		for (i = 0; i + VW <= dim; i += VW)
			v_store(y + i, v_mul(v_mul(v_load(x + i), scale), v_load(w + i)));
		if (i < dim) {
			int m = (int)(dim - i);

			v_store_n(y + i, v_mul(v_mul(v_load_n(x + i, m), scale), v_load_n(w + i, m)), m);
		}
	}
}

/* Two passes over the row (it is in the cache): the variance from squares alone would lose digits. */
static void layer_norm(
        const float *x, const float *w, const float *b, float *y, int64_t n, int64_t dim, float eps)
{
	int64_t whole = dim / VW * VW;
	int rest = (int)(dim - whole);

	for (int64_t row = 0; row < n; row++, x += dim, y += dim) {
		vf sum = v_set(0.0f), mean, scale;
		float m, var;

		for (int64_t i = 0; i < whole; i += VW)
			sum = v_add(sum, v_load(x + i));
		if (rest)
			sum = v_add(sum, v_load_n(x + whole, rest));
		m = v_sum(sum) / (float)dim;
		mean = v_set(m);
		sum = v_set(0.0f);
		for (int64_t i = 0; i < whole; i += VW) {
			vf a = v_sub(v_load(x + i), mean);

			sum = v_fma(a, a, sum);
		}
		var = v_sum(sum);
		for (int64_t i = whole; i < dim; i++)
			var += (x[i] - m) * (x[i] - m);
		scale = v_set(1.0f / sqrtf(var / (float)dim + eps));
		for (int64_t i = 0; i < dim; i += VW) {
			int k = (int)FS_MIN(VW, dim - i);
			vf a = v_mul(v_mul(v_sub(v_load_n(x + i, k), mean), scale), v_load_n(w + i, k));

			v_store_n(y + i, b ? v_add(a, v_load_n(b + i, k)) : a, k);
		}
	}
}

static void rope(const struct fs_rope *r, const float *cs, float *x, int64_t stride, int64_t n, int heads,
        int head_dim)
{
	int pairs = r->n_pairs;
	int near = r->interleaved ? 2 : 1, far = r->interleaved ? 1 : pairs;

	for (int64_t i = 0; i < n; i++, cs += 2 * pairs, x += stride) {
		for (int h = 0; h < heads; h++) {
			float *v = x + (int64_t)h * head_dim;

			for (int p = 0; p < pairs; p++) {
				float *a = v + near * p, *b = a + far;
				float a0 = *a, b0 = *b, c = cs[2 * p], s = cs[2 * p + 1];

				*a = a0 * c - b0 * s;
				*b = a0 * s + b0 * c;
			}
		}
	}
}

/*
 * GELU by the error function: x·Φ(x), Φ from erfc's approximation 7.1.26 of Abramowitz and Stegun (absolute
 * error 1.5e-7), which is taken of |x| so that large negative x go to zero without cancellation.
 */
FS_INLINE vf gelu_erf(vf x)
{
#if FS_LEVEL == 0
	return 0.5f * x * (1.0f + erff(x * 0.70710678f));
#else
	vf z = v_mul(v_abs(x), v_set(0.70710678f));
	vf t = v_div(v_set(1.0f), v_fma(z, v_set(0.3275911f), v_set(1.0f)));
	vf p = v_fma(v_set(1.061405429f), t, v_set(-1.453152027f));
	vf half;

	p = v_fma(p, t, v_set(1.421413741f));
	p = v_fma(p, t, v_set(-0.284496736f));
	p = v_fma(p, t, v_set(0.254829592f));
	p = v_mul(v_mul(p, t), v_exp(v_sub(v_set(0.0f), v_mul(z, z)))); /* erfc(z) */
	half = v_mul(v_mul(v_set(0.5f), v_min(v_set(100.0f), v_abs(x))),
	        p); /* p is 0 from 14 on; no infinity times 0 */
	return v_if_neg(x, v_sub(v_set(0.0f), half), v_sub(x, half));
#endif
}

FS_INLINE vf apply(enum fs_act act, vf x)
{
	switch (act) {
	case FS_GELU_ERF:
		return gelu_erf(x);
	case FS_GELU_TANH: /* 0.5·x·(1 + tanh(u)) = x·sigmoid(2u), u = sqrt(2/pi)·(x + 0.044715·x³) */
		return v_mul(x, v_sigmoid(v_mul(x, v_fma(v_mul(x, x), v_set(2 * 0.79788456f * 0.044715f),
		                                           v_set(2 * 0.79788456f)))));
	case FS_GELU_QUICK:
		return v_mul(x, v_sigmoid(v_mul(x, v_set(1.702f))));
	case FS_SILU:
		return v_mul(x, v_sigmoid(x));
	}
	return x;
}

FS_INLINE void act_all(enum fs_act act, float *x, int64_t n)
{
	int64_t i = 0;

	for (; i + VW <= n; i += VW)
		v_store(x + i, apply(act, v_load(x + i)));
	if (i < n)
		v_store_n(x + i, apply(act, v_load_n(x + i, (int)(n - i))), (int)(n - i));
}

static void act_any(enum fs_act act, float *x, int64_t n)
{
	switch (act) { /* a constant in each branch, so that the loop has no switch */
	case FS_GELU_ERF:
		act_all(FS_GELU_ERF, x, n);
		break;
	case FS_GELU_TANH:
		act_all(FS_GELU_TANH, x, n);
		break;
	case FS_GELU_QUICK:
		act_all(FS_GELU_QUICK, x, n);
		break;
	case FS_SILU:
		act_all(FS_SILU, x, n);
		break;
	}
}

static void gate(enum fs_act act, const float *g, const float *up, float *y, int64_t n)
{
	float tmp[256];

	for (int64_t i = 0; i < n; i += 256) {
		int64_t m = FS_MIN(256, n - i), j = 0;

		memcpy(tmp, g + i, (size_t)m * sizeof(*tmp));
		act_any(act, tmp, m);
		for (; j + VW <= m; j += VW)
			v_store(y + i + j, v_mul(v_load(tmp + j), v_load(up + i + j)));
		for (; j < m; j++)
			y[i + j] = tmp[j] * up[i + j];
	}
}

static void add(float *y, const float *x, int64_t n)
{
	int64_t i = 0;

	for (; i + VW <= n; i += VW)
		v_store(y + i, v_add(v_load(y + i), v_load(x + i)));
	for (; i < n; i++)
		y[i] += x[i];
}

static void to_f16(const float *x, uint16_t *y, int64_t n)
{
	int64_t i = 0;

	for (; i + VW <= n; i += VW)
		v_store_f16(y + i, v_load(x + i));
	for (; i < n; i++)
		y[i] = fs_f32_to_f16(x[i]);
}

void FS_LV(to_bf16)(const float *x, uint16_t *y, int64_t n)
{
	int64_t i = 0;

	for (; i + VW <= n; i += VW)
		v_store_bf16(y + i, v_load(x + i));
	for (; i < n; i++)
		y[i] = fs_f32_to_bf16(x[i]);
}

const struct fs_kernels FS_LV(kernels) = {
#if FS_LEVEL == 0
        .name = "scalar",
#elif FS_LEVEL == 1
        .name = "AVX2",
#else
        .name = "AVX-512",
#endif
        .rms_norm = rms_norm,
        .layer_norm = layer_norm,
        .rope = rope,
        .act = act_any,
        .gate = gate,
        .add = add,
        .to_f16 = to_f16,
        .to_bf16 = FS_LV(to_bf16),
        .dequantize = FS_LV(dequantize),
        .dequantize_bf16 = FS_LV(dequantize_bf16),
        .quantize = FS_LV(quantize),
        .few_f32 = FS_LV(few_f32),
        .few_q8 = FS_LV(few_q8),
#if FS_LEVEL == 2
        .panel_bytes = FS_LV(panel_bytes),
        .panel_pack = FS_LV(panel_pack),
        .panel_multiply = FS_LV(panel_multiply),
#endif
        .attention = FS_LV(attention),
};
