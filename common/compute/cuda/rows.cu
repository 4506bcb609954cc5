/*
 * rows: everything but products and attention: norms, rotary embedding, activations, sums, conversions. All
 * are limited by memory (for a single row of a decode step: by the launch), so each element is read and
 * written once by 16 bytes a thread where addresses allow it, by 4 where not; the second look at a row that
 * norms need comes from the first cache. Numbers are f32 throughout; functions are the accurate ones, the
 * memory leaves time for them.
 */
#include "common/compute/cuda/device.cuh"

#define BLOCK 256
#define MAX_BLOCKS 8192 /* of kernels that walk on: eight waves of the largest card */

#ifndef __grid_constant__
#define __grid_constant__ /* parameters that are read by index where they lie; in tests they are plain */
#endif

static bool fs_rows_wide(const void *a, const void *b, const void *c, int64_t elements)
{
	return ((uintptr_t)a | (uintptr_t)b | (uintptr_t)c) % 16 == 0 && elements % 4 == 0;
}

/* Blocks for n threads that walk on. */
static dim3 fs_rows_blocks(int64_t n)
{
	return dim3((unsigned)FS_MAX(1, FS_MIN((n + BLOCK - 1) / BLOCK, MAX_BLOCKS)));
}

FS_DEVICE int64_t fs_rows_first(void)
{
	return (int64_t)blockIdx.x * BLOCK + threadIdx.x;
}

FS_DEVICE int64_t fs_rows_step(void)
{
	return (int64_t)gridDim.x * BLOCK;
}

FS_DEVICE float4 fs_rows_ld(const float *p)
{
	uint4 u = fs_ld16(p);

	return make_float4(
	        __uint_as_float(u.x), __uint_as_float(u.y), __uint_as_float(u.z), __uint_as_float(u.w));
}

FS_DEVICE void fs_rows_st(float *p, float x, float y, float z, float w)
{
	fs_st16(p,
	        make_uint4(__float_as_uint(x), __float_as_uint(y), __float_as_uint(z), __float_as_uint(w)));
}

/* ---- conversions and copies ---- */

template <bool F16> FS_DEVICE uint32_t fs_rows_pack(float lo, float hi)
{
	return F16 ? fs_pack_h2(fs_hold_f16(lo), fs_hold_f16(hi)) : fs_pack_b2(lo, hi);
}

template <bool F16>
__global__ void __launch_bounds__(BLOCK)
        fs_narrow_kernel(const float *src, uint16_t *dst, int64_t n, bool wide)
{
	int64_t whole = wide ? n / 4 * 4 : 0;

	for (int64_t i = fs_rows_first() * 4; i < whole; i += fs_rows_step() * 4) {
		float4 v = fs_rows_ld(src + i);

		*(uint2 *)(dst + i) = make_uint2(fs_rows_pack<F16>(v.x, v.y), fs_rows_pack<F16>(v.z, v.w));
	}
	for (int64_t i = whole + fs_rows_first(); i < n; i += fs_rows_step())
		dst[i] = F16 ? fs_f2h(fs_hold_f16(src[i])) : fs_f2b(src[i]);
}

int fs_cuk_narrow(struct CUstream_st *s, const float *src, uint16_t *dst, int64_t n, enum fs_dtype to)
{
	bool wide = (uintptr_t)src % 16 == 0 && (uintptr_t)dst % 8 == 0;
	dim3 grid = fs_rows_blocks(wide ? (n + 3) / 4 : n);

	if (to == FS_F16)
		return FS_LAUNCH(fs_narrow_kernel<true>, grid, BLOCK, 0, s, src, dst, n, wide);
	return FS_LAUNCH(fs_narrow_kernel<false>, grid, BLOCK, 0, s, src, dst, n, wide);
}

/* wide: rows, width and strides by four elements. */
__global__ void __launch_bounds__(BLOCK) fs_kv_store_kernel(const struct fs_kv_store k, bool wide)
{
	int64_t at = k.at + (k.past ? *k.past : 0), per = wide ? k.width / 4 : k.width, n = k.n * per;

	for (int64_t i = fs_rows_first(); i < n; i += fs_rows_step()) {
		int64_t row = i / per, e = i % per;
		const float *src = k.src + row * k.src_stride;
		int64_t to = (at + row) * k.width;

		if (!wide && k.type == FS_F16) {
			((uint16_t *)k.dst)[to + e] = fs_f2h(src[e]);
		} else if (!wide) {
			((float *)k.dst)[to + e] = src[e];
		} else {
			float4 v = fs_rows_ld(src + 4 * e);

			if (k.type == FS_F16)
				*(uint2 *)((uint16_t *)k.dst + to + 4 * e) =
				        make_uint2(fs_pack_h2(v.x, v.y), fs_pack_h2(v.z, v.w));
			else
				fs_rows_st((float *)k.dst + to + 4 * e, v.x, v.y, v.z, v.w);
		}
	}
}

int fs_cuk_kv_store(struct CUstream_st *s, const struct fs_kv_store *k)
{
	bool wide = fs_rows_wide(k->src, k->dst, NULL, k->width) && k->src_stride % 4 == 0;

	if (k->n * k->width == 0)
		return 0;
	return FS_LAUNCH(
	        fs_kv_store_kernel, fs_rows_blocks(k->n * k->width / (wide ? 4 : 1)), BLOCK, 0, s, *k, wide);
}

/* ---- sums ---- */

template <bool ADD>
__global__ void __launch_bounds__(BLOCK)
        fs_bias_kernel(const float *bias, float *y, int64_t n, int64_t out, bool wide)
{
	int64_t per = wide ? out / 4 : out;

	for (int64_t i = fs_rows_first(); i < n * per; i += fs_rows_step()) {
		if (wide) {
			float4 b = fs_rows_ld(bias + i % per * 4);
			float4 v = ADD ? fs_rows_ld(y + i * 4) : make_float4(0, 0, 0, 0);

			fs_rows_st(y + i * 4, v.x + b.x, v.y + b.y, v.z + b.z, v.w + b.w);
		} else {
			y[i] = ADD ? y[i] + bias[i % per] : bias[i % per];
		}
	}
}

int fs_cuk_bias(struct CUstream_st *s, const float *bias, float *y, int64_t n, int64_t out, bool add)
{
	bool wide = fs_rows_wide(bias, y, NULL, out);
	dim3 grid = fs_rows_blocks(n * out / (wide ? 4 : 1));

	if (add)
		return FS_LAUNCH(fs_bias_kernel<true>, grid, BLOCK, 0, s, bias, y, n, out, wide);
	return FS_LAUNCH(fs_bias_kernel<false>, grid, BLOCK, 0, s, bias, y, n, out, wide);
}

__global__ void __launch_bounds__(BLOCK) fs_add_kernel(float *y, const float *x, int64_t n, bool wide)
{
	int64_t whole = wide ? n / 4 * 4 : 0;

	for (int64_t i = fs_rows_first() * 4; i < whole; i += fs_rows_step() * 4) {
		float4 a = fs_rows_ld(y + i), b = fs_rows_ld(x + i);

		fs_rows_st(y + i, a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
	}
	for (int64_t i = whole + fs_rows_first(); i < n; i += fs_rows_step())
		y[i] += x[i];
}

int fs_cuk_add(struct CUstream_st *s, float *y, const float *x, int64_t n)
{
	bool wide = fs_rows_wide(y, x, NULL, 0);

	return FS_LAUNCH(fs_add_kernel, fs_rows_blocks(wide ? (n + 3) / 4 : n), BLOCK, 0, s, y, x, n, wide);
}

/* ---- norms ----
 * A row is one warp's where rows are many and short (heads), else one block's, with as many threads as the
 * row has float4. Sums are taken by threads first, then as a tree, which is closer to the true sum than one
 * in order. */

struct fs_norm {
	const float *x, *w, *b;
	float *y;
	int64_t n;
	int dim;
	float eps;
	bool wide;
};

/* Over the threads that share a row: a warp (one float of partial is not used) or the block. */
template <bool ONE_WARP> FS_DEVICE float fs_norm_sum(float v, float *partial)
{
	int warp = (int)threadIdx.x / FS_WARP, lane = (int)threadIdx.x % FS_WARP;

	v = fs_warp_sum(v);
	if (ONE_WARP)
		return v;
	__syncthreads(); /* partial may still be read from the sum before */
	if (lane == 0)
		partial[warp] = v;
	__syncthreads();
	return fs_warp_sum(lane < (int)blockDim.x / FS_WARP ? partial[lane] : 0.0f);
}

/* Sum of (x - mean)² or, for SQUARE false, of x, over this thread's elements. */
template <bool SQUARE>
FS_DEVICE float fs_norm_part(const struct fs_norm &j, const float *x, float mean, int first, int step)
{
	float s = 0.0f, t = 0.0f;

	if (!j.wide) {
		for (int i = first; i < j.dim; i += step)
			s += SQUARE ? (x[i] - mean) * (x[i] - mean) : x[i];
		return s;
	}
	for (int i = 4 * first; i < j.dim; i += 4 * step) {
		float4 v = fs_rows_ld(x + i);

		if (SQUARE) {
			s += (v.x - mean) * (v.x - mean) + (v.y - mean) * (v.y - mean);
			t += (v.z - mean) * (v.z - mean) + (v.w - mean) * (v.w - mean);
		} else {
			s += v.x + v.y;
			t += v.z + v.w;
		}
	}
	return s + t;
}

FS_DEVICE void fs_norm_write(
        const struct fs_norm &j, const float *x, float *y, float mean, float scale, int first, int step)
{
	if (!j.wide) {
		for (int i = first; i < j.dim; i += step)
			y[i] = (x[i] - mean) * scale * j.w[i] + (j.b ? j.b[i] : 0.0f);
		return;
	}
	for (int i = 4 * first; i < j.dim; i += 4 * step) {
		float4 v = fs_rows_ld(x + i), w = fs_rows_ld(j.w + i);
		float4 b = j.b ? fs_rows_ld(j.b + i) : make_float4(0, 0, 0, 0);

		fs_rows_st(y + i, (v.x - mean) * scale * w.x + b.x, (v.y - mean) * scale * w.y + b.y,
		        (v.z - mean) * scale * w.z + b.z, (v.w - mean) * scale * w.w + b.w);
	}
}

/* Each thread writes what it alone has read, so y may be x. */
template <bool RMS, bool ONE_WARP>
__global__ void __launch_bounds__(ONE_WARP ? 4 * FS_WARP : 1024) fs_norm_kernel(const struct fs_norm j)
{
	FS_SHARED(float, partial, [FS_WARP]);
	int step = ONE_WARP ? FS_WARP : (int)blockDim.x, first = (int)threadIdx.x % step;
	int64_t row = ONE_WARP ? (int64_t)blockIdx.x * (blockDim.x / FS_WARP) + threadIdx.x / FS_WARP
	                       : (int64_t)blockIdx.x;
	float mean = 0.0f, var;
	const float *x = j.x + row * j.dim;

	if (row >= j.n)
		return;
	if (!RMS)
		mean = fs_norm_sum<ONE_WARP>(fs_norm_part<false>(j, x, 0.0f, first, step), partial) /
		       (float)j.dim;
	var = fs_norm_sum<ONE_WARP>(fs_norm_part<true>(j, x, mean, first, step), partial) / (float)j.dim;
	fs_norm_write(j, x, j.y + row * j.dim, mean, 1.0f / sqrtf(var + j.eps), first, step);
}

template <bool RMS> static int fs_norm_launch(struct CUstream_st *s, struct fs_norm j)
{
	int64_t units = (j.dim + 3) / 4, threads = (units + FS_WARP - 1) / FS_WARP * FS_WARP;

	j.wide = fs_rows_wide(j.x, j.w, j.y, j.dim) && (uintptr_t)j.b % 16 == 0;
	if (j.dim <= 512)
		return FS_LAUNCH(
		        (fs_norm_kernel<RMS, true>), (unsigned)((j.n + 3) / 4), 4 * FS_WARP, 0, s, j);
	return FS_LAUNCH(
	        (fs_norm_kernel<RMS, false>), (unsigned)j.n, (unsigned)FS_MIN(threads, 1024), 0, s, j);
}

int fs_cuk_rms_norm(
        struct CUstream_st *s, const float *x, const float *w, float *y, int64_t n, int64_t dim, float eps)
{
	struct fs_norm j = {x, w, NULL, y, n, (int)dim, eps, false};

	return fs_norm_launch<true>(s, j);
}

int fs_cuk_layer_norm(struct CUstream_st *s, const float *x, const float *w, const float *b, float *y,
        int64_t n, int64_t dim, float eps)
{
	struct fs_norm j = {x, w, b, y, n, (int)dim, eps, false};

	return fs_norm_launch<false>(s, j);
}

/* ---- rotary embedding ---- */

/* The angle is a product in f32, as on the CPU: at far positions its rounding is part of what models have
 * learnt with. */
__global__ void __launch_bounds__(BLOCK) fs_rope_angles_kernel(
        const __grid_constant__ struct fs_rope r, const int32_t *pos, float *cs, int64_t n)
{
	for (int64_t i = fs_rows_first(); i < n * r.n_pairs; i += fs_rows_step()) {
		int p = (int)(i % r.n_pairs);
		float angle = (float)pos[r.axis[p] * n + i / r.n_pairs] * r.freq[p];

		*(float2 *)(cs + 2 * i) = make_float2(cosf(angle), sinf(angle));
	}
}

int fs_cuk_rope_angles(
        struct CUstream_st *s, const struct fs_rope *r, const int32_t *pos, float *cs, int64_t n)
{
	if (r->n_pairs == 0)
		return 0;
	return FS_LAUNCH(fs_rope_angles_kernel, fs_rows_blocks(n * r->n_pairs), BLOCK, 0, s, *r, pos, cs, n);
}

struct fs_rope_job {
	const float *cs;
	float *x;
	int64_t stride, n;
	int heads, head_dim, pairs;
	bool interleaved;
};

/* One pair a thread. */
__global__ void __launch_bounds__(BLOCK) fs_rope_kernel(const struct fs_rope_job j)
{
	int per_row = j.heads * j.pairs;

	for (int64_t i = fs_rows_first(); i < j.n * per_row; i += fs_rows_step()) {
		int64_t row = i / per_row;
		int h = (int)(i % per_row) / j.pairs, p = (int)(i % per_row) % j.pairs;
		float2 cs = *(const float2 *)(j.cs + 2 * (row * j.pairs + p));
		float *a = j.x + row * j.stride + (int64_t)h * j.head_dim + (j.interleaved ? 2 * p : p);
		float *b = a + (j.interleaved ? 1 : j.pairs);
		float a0 = *a, b0 = *b;

		*a = a0 * cs.x - b0 * cs.y;
		*b = a0 * cs.y + b0 * cs.x;
	}
}

int fs_cuk_rope(struct CUstream_st *s, const struct fs_rope *r, const float *cs, float *x, int64_t stride,
        int64_t n, int heads, int head_dim)
{
	struct fs_rope_job j = {cs, x, stride, n, heads, head_dim, r->n_pairs, r->interleaved};

	if (r->n_pairs == 0)
		return 0;
	return FS_LAUNCH(fs_rope_kernel, fs_rows_blocks(n * heads * r->n_pairs), BLOCK, 0, s, j);
}

/* ---- activations ---- */

FS_DEVICE float fs_sigmoid(float x)
{
	return 1.0f / (1.0f + expf(-x));
}

template <int ACT> FS_DEVICE float fs_act_of(float x)
{
	switch (ACT) {
	case FS_GELU_ERF: /* by erfc, so that large negative x go to zero without cancellation */
		return 0.5f * x * erfcf(-0.70710678f * x);
	case FS_GELU_TANH: /* 0.5·x·(1 + tanh(u)) = x·sigmoid(2u), u = sqrt(2/pi)·(x + 0.044715·x³) */
		return x * fs_sigmoid(x * fmaf(x * x, 2 * 0.79788456f * 0.044715f, 2 * 0.79788456f));
	case FS_GELU_QUICK:
		return x * fs_sigmoid(1.702f * x);
	default:
		return x * fs_sigmoid(x);
	}
}

/* y = act(x)·up; up NULL: act(x). y may be x or up. */
template <int ACT>
__global__ void __launch_bounds__(BLOCK)
        fs_act_kernel(const float *x, const float *up, float *y, int64_t n, bool wide)
{
	int64_t whole = wide ? n / 4 * 4 : 0;

	for (int64_t i = fs_rows_first() * 4; i < whole; i += fs_rows_step() * 4) {
		float4 v = fs_rows_ld(x + i), u = up ? fs_rows_ld(up + i) : make_float4(1, 1, 1, 1);

		fs_rows_st(y + i, fs_act_of<ACT>(v.x) * u.x, fs_act_of<ACT>(v.y) * u.y,
		        fs_act_of<ACT>(v.z) * u.z, fs_act_of<ACT>(v.w) * u.w);
	}
	for (int64_t i = whole + fs_rows_first(); i < n; i += fs_rows_step())
		y[i] = fs_act_of<ACT>(x[i]) * (up ? up[i] : 1.0f);
}

static int fs_act_launch(
        struct CUstream_st *s, enum fs_act act, const float *x, const float *up, float *y, int64_t n)
{
	bool wide = fs_rows_wide(x, up, y, 0);
	dim3 grid = fs_rows_blocks(wide ? (n + 3) / 4 : n);

	switch (act) {
	case FS_GELU_ERF:
		return FS_LAUNCH(fs_act_kernel<FS_GELU_ERF>, grid, BLOCK, 0, s, x, up, y, n, wide);
	case FS_GELU_TANH:
		return FS_LAUNCH(fs_act_kernel<FS_GELU_TANH>, grid, BLOCK, 0, s, x, up, y, n, wide);
	case FS_GELU_QUICK:
		return FS_LAUNCH(fs_act_kernel<FS_GELU_QUICK>, grid, BLOCK, 0, s, x, up, y, n, wide);
	default:
		return FS_LAUNCH(fs_act_kernel<FS_SILU>, grid, BLOCK, 0, s, x, up, y, n, wide);
	}
}

int fs_cuk_act(struct CUstream_st *s, enum fs_act act, float *x, int64_t n)
{
	return fs_act_launch(s, act, x, NULL, x, n);
}

int fs_cuk_gate(
        struct CUstream_st *s, enum fs_act act, const float *gate, const float *up, float *y, int64_t n)
{
	return fs_act_launch(s, act, gate, up, y, n);
}
