/*
 * matvec.cu: y = x · Wᵀ for one to eight rows of x, W read once: the decode step, which is as fast as W comes
 * out of memory.
 *
 * A warp takes two rows of W (or a share of their columns, when there are too few rows for all
 * multiprocessors): activations are then read half as often, and four 16-byte reads of quants a lane are
 * under way before the first is used: 2 KiB a warp, 56 KiB for the 28 warps that a multiprocessor holds,
 * where 4.8 TB/s at 0.8 us of latency over 132 multiprocessors ask for 29 KiB.
 *
 * Quantised weights meet int8 activations (blocks of 32 with a scale): four products an instruction. A block
 * of Q4_K, 18 bytes, costs 65 instructions of a lane (counted in the code for sm_90); at 85 % of an
 * H200's 4.8 TB/s that is 14.7e12 a second of the 29.6e12 that its schedulers issue, at 85 % of a 4090's 1
 * TB/s 3.1e12 of 41e12. Eight rows of x cost about 200, so there the H200 is bound by instructions (at near
 * half of its memory's speed), the 4090 is not. F16 and BF16 in f32: about 35 instructions for 8 weights, 16
 * bytes: 8.9e12 of 29.6e12. Activations come from the first cache, 40 bytes a block and row of x for two rows
 * of W: 20 B/clock of 128 on the H200. None of this has been measured.
 */
#include "common/compute/cuda/blocks.cuh"

#define WARPS 4
#define ROWS 2             /* of W, a warp */
#define WARPS_OF_A_CARD 24 /* for each multiprocessor: below, rows are shared between warps */

struct product {
	const uint8_t *w;
	struct fs_planes p;
	const uint8_t *xq; /* quantize_kernel's, or NULL */
	int64_t xq_row;
	const float *x;
	bool x_aligned;
	int64_t in, out;
	int n;
	const float *bias;
	float *y;
	bool add;
	int split; /* warps that share a row: 1, 2 or 4 */
};

/* ---- activations in int8 ----
 * A row of x is three planes: 16 bytes a block for its elements 0..15, 16 bytes for 16..31, and 8 bytes: the
 * scale d and the sums of the two halves' integers, 16 bits each. */

static int64_t quantized_row(int64_t in)
{
	return FS_UP16(in / 32 * 40);
}

size_t fs_cuk_quantized_bytes(int64_t n, int64_t in)
{
	return (size_t)(n * quantized_row(in));
}

bool fs_cuk_matvec_wants_q8(enum fs_dtype type, int64_t in)
{
	return !fs_is_plain(type);
}

/* Eight lanes a block, four elements each. As integers the magnitudes sort like the numbers, and a NaN comes
 * out on top: then d is NaN, and what is computed with it. */
__global__ void quantize_kernel(const float *x, uint8_t *xq, int64_t n, int64_t in, int64_t row_bytes)
{
	const int64_t t = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, b = t / 8;
	const bool live = 4 * t < in;
	const int part = (int)(t & 7);
	const int64_t blocks = in / 32;

	for (int64_t r = blockIdx.y; r < n; r += gridDim.y) {
		float v[4];
		unsigned int max_bits = 0, word = 0;
		int sum = 0;

#pragma unroll
		for (int i = 0; i < 4; i++) {
			v[i] = live ? x[r * in + 4 * t + i] : 0.0f;
			max_bits = max(max_bits, __float_as_uint(fabsf(v[i])));
		}
#pragma unroll
		for (int k = 1; k < 8; k *= 2)
			max_bits = max(max_bits, __shfl_xor_sync(FS_FULL, max_bits, k));
		const float d = __uint_as_float(max_bits) / 127.0f, inverse = d > 0.0f ? 1.0f / d : 0.0f;

#pragma unroll
		for (int i = 0; i < 4; i++) {
			const int q = max(-127, min(127, __float2int_rn(v[i] * inverse)));

			sum += q;
			word |= (unsigned int)(q & 255) << 8 * i;
		}
		sum += __shfl_xor_sync(FS_FULL, sum, 1);
		sum += __shfl_xor_sync(FS_FULL, sum, 2);
		const int other = __shfl_xor_sync(FS_FULL, sum, 4);
		uint8_t *row = xq + r * row_bytes;

		if (!live)
			continue;
		*(uint32_t *)(row + (part < 4 ? 0 : 16 * blocks) + 16 * b + 4 * (part & 3)) = word;
		if (part == 0)
			*(uint2 *)(row + 32 * blocks + 8 * b) = make_uint2(
			        __float_as_uint(d), (unsigned int)(sum & 0xffff) | (unsigned int)other << 16);
	}
}

int fs_cuk_quantize(struct CUstream_st *s, const float *x, void *xq, int64_t n, int64_t in)
{
	const int threads = 128;

	if (n < 1 || in % 32)
		return FS_CUK_INVALID;
	return FS_LAUNCH(quantize_kernel,
	        dim3((unsigned)((in / 4 + threads - 1) / threads), (unsigned)FS_MIN(n, 65535)), threads, 0, s,
	        x, (uint8_t *)xq, n, in, quantized_row(in));
}

/* ---- sums over the warp, and what becomes of them ---- */

/* Sums v[i] over the lanes: lane l gets sum number l / (32 / count). Halves of the values change places with
 * halves of the warp, so that 16 sums take 16 exchanges instead of 80. */
template <int count> FS_DEVICE float warp_sums(float v[count], int lane)
{
#pragma unroll
	for (int m = count / 2; m >= 1; m /= 2) {
		const int k = 32 * m / count; /* 16, 8, ... */
		const bool up = lane & k;

#pragma unroll
		for (int i = 0; i < m; i++) {
			const float send = up ? v[i] : v[i + m];

			v[i] = (up ? v[i + m] : v[i]) + __shfl_xor_sync(FS_FULL, send, k);
		}
	}
#pragma unroll
	for (int j = 16 / count; j >= 1; j /= 2)
		v[0] += __shfl_xor_sync(FS_FULL, v[0], j);
	return v[0];
}

/* acc[ROWS][N] of every warp, to y. row: the warp's first of W. All threads of the block come here. */
template <int N> FS_DEVICE void finish(const struct product &a, float acc[ROWS * N], int64_t row)
{
	constexpr int count = ROWS * N, lanes = 32 / count;
	const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32, k = lane / lanes;
	FS_SHARED(float, parts, [WARPS][count]);
	float sum = warp_sums<count>(acc, lane);

	if (a.split > 1) {
		if (lane % lanes == 0)
			parts[warp][k] = sum;
		__syncthreads();
		if (warp % a.split)
			return;
		for (int i = 1; i < a.split; i++)
			sum += parts[warp + i][k];
	}
	const int64_t o = row + k / N, j = k % N;

	if (lane % lanes || o >= a.out || j >= a.n)
		return;
	if (a.bias)
		sum += a.bias[o];
	if (a.add)
		sum += a.y[j * a.out + o];
	a.y[j * a.out + o] = sum;
}

/* Where a warp begins and how it goes on: units (blocks or chunks) at, at + step, ... of rows row, row + 1.
 */
struct way {
	int64_t row;
	const uint8_t *w[ROWS];
	int at, step;
};

/* keep: the rows' addresses stay in registers. It costs other loops their unrolling (nvcc 13.0). */
template <bool keep> FS_DEVICE struct way way_of(const struct product &a)
{
	const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
	struct way y;

	y.row = ((int64_t)blockIdx.x * (WARPS / a.split) + warp / a.split) * ROWS;
	y.at = warp % a.split * 32 + lane;
	y.step = 32 * a.split;
#pragma unroll
	for (int r = 0; r < ROWS; r++) { /* behind the last row: read it again, and drop what comes out */
		y.w[r] = a.w + min(y.row + r, a.out - 1) * a.p.row;
		if constexpr (keep)
			fs_keep(y.w[r]);
	}
	return y;
}

/* ---- quantised weights, int8 activations ---- */

struct unpacked {
	uint32_t u[8];
	float d, m;
	int scale[2]; /* Q6_K */
};

template <int type> FS_DEVICE struct unpacked unpack(const struct fs_block &f, int b)
{
	struct unpacked w;

#pragma unroll
	for (int i = 0; i < 8; i++)
		w.u[i] = fs_block_word<type>(f, i);
	if constexpr (type == FS_Q6_K) {
		w.d = fs_h2f((uint16_t)(f.s >> 16));
		w.scale[0] = (int8_t)f.s;
		w.scale[1] = (int8_t)(f.s >> 8);
	} else {
		const float2 s = fs_block_scale<type>(f, b, 0);

		w.d = s.x;
		w.m = s.y;
	}
	return w;
}

struct activations {
	uint4 lo, hi;
	float d;
	int sum[2];
};

/* The block's part of the product. Sums of integers are exact; offsets come off by the activations' sums. */
template <int type> FS_DEVICE float block_dot(const struct unpacked &w, const struct activations &x)
{
	const uint32_t q[8] = {x.lo.x, x.lo.y, x.lo.z, x.lo.w, x.hi.x, x.hi.y, x.hi.z, x.hi.w};
	int s[2] = {0, 0};

#pragma unroll
	for (int i = 0; i < 4; i++) {
		s[0] = __dp4a((int)w.u[i], (int)q[i], s[0]);
		s[1] = __dp4a((int)w.u[4 + i], (int)q[4 + i], s[1]);
	}
	if constexpr (type == FS_Q6_K) {
		return w.d * x.d *
		       (float)((s[0] - 32 * x.sum[0]) * w.scale[0] + (s[1] - 32 * x.sum[1]) * w.scale[1]);
	} else if constexpr (fs_has_min(type)) {
		return x.d * (w.d * (float)(s[0] + s[1]) + w.m * (float)(x.sum[0] + x.sum[1]));
	}
	return w.d * x.d * (float)(s[0] + s[1] - fs_offset(type) * (x.sum[0] + x.sum[1]));
}

FS_DEVICE struct activations activations_load(const struct product &a, int j, unsigned int b)
{
	const uint8_t *row = a.xq + j * a.xq_row;
	struct activations x;

	x.lo = fs_ld16(row + 16 * b);
	x.hi = fs_ld16(row + 16 * ((unsigned int)a.p.blocks + b));
	const uint2 more = fs_ld8(row + (32 * (unsigned int)a.p.blocks + 8 * b));

	x.d = __uint_as_float(more.x);
	x.sum[0] = (int16_t)more.y;
	x.sum[1] = (int)more.y >> 16;
	return x;
}

/* Blocks of a multiprocessor at once, which bounds registers: 8 leave 64, 7 leave 72, 4 leave 128. */
__host__ __device__ constexpr int resident(int type, int N)
{
	return N > 2 ? 4 : (fs_is_k(type) || type == FS_Q6_K) && N == 1 ? 7 : 8;
}

template <int type, int N>
__global__ void __launch_bounds__(32 * WARPS, resident(type, N)) quantized_kernel(struct product a)
{
	constexpr int ahead = N == 1 ? 2 : 1; /* blocks of a row under way at once */
	const struct way y = way_of<true>(a);
	float acc[ROWS * N] = {};

	for (int b0 = y.at; b0 < a.p.blocks; b0 += ahead * y.step) {
		struct fs_block f[ahead][ROWS];

#pragma unroll
		for (int k = 0; k < ahead; k++)
			if (b0 + k * y.step < a.p.blocks)
#pragma unroll
				for (int r = 0; r < ROWS; r++)
					f[k][r] = fs_block_load<type>(y.w[r], a.p, b0 + k * y.step);
#pragma unroll
		for (int k = 0; k < ahead; k++) {
			const int b = b0 + k * y.step;

			if (b >= a.p.blocks)
				break;
			if constexpr (N == 1) { /* one row of W after the other, in few registers */
				const struct activations x = activations_load(a, 0, b);

#pragma unroll
				for (int r = 0; r < ROWS; r++)
					acc[r] += block_dot<type>(unpack<type>(f[k][r], b), x);
			} else {
				struct unpacked w[ROWS];

#pragma unroll
				for (int r = 0; r < ROWS; r++)
					w[r] = unpack<type>(f[k][r], b);
#pragma unroll
				for (int j = 0; j < N; j++) {
					if (j >= a.n)
						break;
					const struct activations x = activations_load(a, j, b);

#pragma unroll
					for (int r = 0; r < ROWS; r++)
						acc[r * N + j] += block_dot<type>(w[r], x);
				}
			}
		}
	}
	finish<N>(a, acc, y.row);
}

/* ---- activations in f32 ---- */

FS_DEVICE void load8(const struct product &a, const float *x, float v[8])
{
	if (a.x_aligned) {
		const uint4 lo = fs_ld16(x), hi = fs_ld16(x + 4);
		const uint32_t u[8] = {lo.x, lo.y, lo.z, lo.w, hi.x, hi.y, hi.z, hi.w};

#pragma unroll
		for (int i = 0; i < 8; i++)
			v[i] = __uint_as_float(u[i]);
	} else {
#pragma unroll
		for (int i = 0; i < 8; i++)
			v[i] = x[i];
	}
}

/* Chunks of eight; in is a multiple of 8. */
template <int type, int N>
__global__ void __launch_bounds__(32 * WARPS, N <= 2 ? 8 : 4) float_kernel(struct product a)
{
	constexpr int ahead = N <= 2 && fs_is_plain(type) ? 2 : 1;
	const int chunks = (int)(a.in / 8);
	const struct way y = way_of<fs_is_plain(type)>(a);
	float acc[ROWS * N] = {};

	for (int c0 = y.at; c0 < chunks; c0 += ahead * y.step) {
		struct fs_chunk f[ahead][ROWS];

#pragma unroll
		for (int k = 0; k < ahead; k++)
			if (c0 + k * y.step < chunks)
#pragma unroll
				for (int r = 0; r < ROWS; r++)
					fs_chunk_load<type>(y.w[r], a.p, c0 + k * y.step, &f[k][r]);
#pragma unroll
		for (int k = 0; k < ahead; k++) {
			const int c = c0 + k * y.step;
			float w[ROWS][8];

			if (c >= chunks)
				break;
#pragma unroll
			for (int r = 0; r < ROWS; r++)
				fs_chunk_floats<type>(f[k][r], w[r]);
#pragma unroll
			for (int j = 0; j < N; j++) {
				float x[8];

				if (j >= a.n)
					break;
				load8(a, a.x + j * a.in + 8 * c, x);
#pragma unroll
				for (int r = 0; r < ROWS; r++)
#pragma unroll
					for (int i = 0; i < 8; i++)
						acc[r * N + j] = fmaf(w[r][i], x[i], acc[r * N + j]);
			}
		}
	}
	finish<N>(a, acc, y.row);
}

/* Numbers whose rows are no multiple of eight long: element by element. */
template <int type> __global__ void __launch_bounds__(32 * WARPS) odd_kernel(struct product a)
{
	constexpr int N = FS_CUK_MATVEC_ROWS;
	const struct way y = way_of<false>(a);
	float acc[ROWS * N] = {};

	for (int64_t i = y.at; i < a.in; i += y.step) {
		float w[ROWS];

#pragma unroll
		for (int r = 0; r < ROWS; r++) {
			if constexpr (type == FS_F32)
				w[r] = ((const float *)y.w[r])[i];
			else if constexpr (type == FS_F16)
				w[r] = fs_h2f(((const uint16_t *)y.w[r])[i]);
			else
				w[r] = fs_b2f(((const uint16_t *)y.w[r])[i]);
		}
#pragma unroll
		for (int j = 0; j < N; j++)
			if (j < a.n)
#pragma unroll
				for (int r = 0; r < ROWS; r++)
					acc[r * N + j] = fmaf(w[r], a.x[j * a.in + i], acc[r * N + j]);
	}
	finish<N>(a, acc, y.row);
}

/* ---- launches ---- */

/* Chooses how many warps share a row of `units`, and starts the kernel with as many blocks as that takes. */
template <class K> static int start(struct CUstream_st *s, K kernel, struct product *a, int64_t units)
{
	const int64_t groups = (a->out + ROWS - 1) / ROWS, enough = (int64_t)WARPS_OF_A_CARD * fs_sms();

	a->split = 1;
	while (a->split < WARPS && groups * a->split < enough && units > 32 * a->split)
		a->split *= 2;
	return FS_LAUNCH(
	        kernel, (unsigned int)((groups * a->split + WARPS - 1) / WARPS), 32 * WARPS, 0, s, *a);
}

template <int type> static int launch_quantized(struct CUstream_st *s, struct product *a)
{
	if (a->n == 1)
		return start(s, quantized_kernel<type, 1>, a, a->p.blocks);
	if (a->n == 2)
		return start(s, quantized_kernel<type, 2>, a, a->p.blocks);
	if (a->n <= 4)
		return start(s, quantized_kernel<type, 4>, a, a->p.blocks);
	return start(s, quantized_kernel<type, 8>, a, a->p.blocks);
}

/* Speed matters for plain types; quantised ones come here for every digit of x. */
template <int type> static int launch_float(struct CUstream_st *s, struct product *a)
{
	const int64_t chunks = a->in / 8;

	if constexpr (fs_is_plain(type)) {
		if (a->in % 8)
			return start(s, odd_kernel<type>, a, a->in);
		if (a->n == 2)
			return start(s, float_kernel<type, 2>, a, chunks);
		if (a->n == 3 || a->n == 4)
			return start(s, float_kernel<type, 4>, a, chunks);
	}
	return a->n == 1 ? start(s, float_kernel<type, 1>, a, chunks)
	                 : start(s, float_kernel<type, 8>, a, chunks);
}

int fs_cuk_matvec(struct CUstream_st *s, const struct fs_cuk_matvec *m)
{
	struct product a = {};

	if (m->n < 1 || m->n > FS_CUK_MATVEC_ROWS || m->in < 1 || m->out < 1)
		return FS_CUK_INVALID;
	a.w = (const uint8_t *)m->w;
	a.p = fs_planes_of(m->type, m->in);
	a.xq = (const uint8_t *)m->xq;
	a.xq_row = quantized_row(m->in);
	a.x = m->x;
	a.x_aligned = (uintptr_t)m->x % 16 == 0 && m->in % 4 == 0;
	a.in = m->in;
	a.out = m->out;
	a.n = (int)m->n;
	a.bias = m->bias;
	a.y = m->y;
	a.add = m->add;
	if (m->xq && !fs_is_plain(m->type))
		switch (m->type) {
			FS_BY_QUANT(m->type, launch_quantized, s, &a)
		default:
			return FS_CUK_INVALID;
		}
	switch (m->type) {
		FS_BY_QUANT(m->type, launch_float, s, &a)
		FS_BY_PLAIN(m->type, launch_float, s, &a)
	}
	return FS_CUK_INVALID;
}
