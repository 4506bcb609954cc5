/*
 * pack.cu: weights from the file's layout into planes (blocks.cuh), and back into numbers: for products that
 * need 16 bits, and for embeddings. F32, F16 and BF16 keep their numbers; only their rows are padded to a
 * multiple of 16 bytes.
 *
 * Packing runs once a weight, behind a copy over PCIe (25 to 60 GB/s): a thread takes a block and reads it
 * byte by byte, since blocks have no alignment; that is still several times faster than the copy. Back into
 * numbers: a thread takes eight, so that a warp writes 512 bytes (16 bits) or 1 KiB (f32) in one piece, and
 * reads at most half as many. The writes are the limit: 2.6 bytes move for each weight of Q4_K in 16 bits.
 */
#include "common/compute/cuda/blocks.cuh"

#define THREADS 128

static int block_bytes(enum fs_dtype type)
{
	switch (type) {
	case FS_Q4_0:
		return 18;
	case FS_Q4_1:
		return 20;
	case FS_Q5_0:
		return 22;
	case FS_Q5_1:
		return 24;
	case FS_Q8_0:
		return 34;
	case FS_Q4_K:
		return 144;
	case FS_Q5_K:
		return 176;
	case FS_Q6_K:
		return 210;
	case FS_F32:
		return 4;
	default:
		return 2;
	}
}

size_t fs_cuk_packed_bytes(enum fs_dtype type, int64_t in, int64_t out)
{
	return (size_t)(fs_planes_of(type, in).row * out);
}

/* ---- file to planes ---- */

FS_DEVICE uint32_t bytes2(const uint8_t *p)
{
	return p[0] | (uint32_t)p[1] << 8;
}

/* Quant e of block j of a (super)block, unsigned (int8 for Q8_0). */
template <int type> FS_DEVICE uint32_t quant(const uint8_t *p, int j, int e)
{
	if constexpr (type == FS_Q8_0) {
		return p[2 + e];
	} else if constexpr (type == FS_Q4_K) {
		return p[16 + 32 * (j / 2) + e] >> 4 * (j & 1) & 15;
	} else if constexpr (type == FS_Q5_K) {
		return (p[48 + 32 * (j / 2) + e] >> 4 * (j & 1) & 15) | (p[16 + e] >> j & 1) << 4;
	} else if constexpr (type == FS_Q6_K) {
		return (p[64 * (j / 4) + 32 * (j & 1) + e] >> 2 * (j & 2) & 15) |
		       (p[128 + 32 * (j / 4) + e] >> 2 * (j & 3) & 3) << 4;
	} else {
		const int at = type == FS_Q4_0 ? 2 : type == FS_Q5_1 ? 8 : type == FS_Q5_0 ? 6 : 4;
		uint32_t u = p[at + (e & 15)] >> e / 16 * 4 & 15;

		if constexpr (fs_is_five(type))
			u |= (uint32_t)(p[at - 4 + e / 8] >> (e & 7) & 1) << 4;
		return u;
	}
}

/* The header of a K superblock: see blocks.cuh, plane s. */
FS_DEVICE uint4 k_header(const uint8_t *p)
{
	uint32_t low[2] = {0, 0}, high = 0;

#pragma unroll
	for (int j = 0; j < 8; j++) {
		const uint8_t *t = p + 4;
		uint32_t scale = j < 4 ? t[j] & 63u : (t[j + 4] & 15u) | (t[j - 4] >> 6) << 4;
		uint32_t min = j < 4 ? t[j + 4] & 63u : (uint32_t)t[j + 4] >> 4 | (t[j] >> 6) << 4;

		low[j / 4] |= ((scale & 15) | (min & 15) << 4) << 8 * (j & 3);
		high |= (scale >> 4 | min >> 4 << 2) << 4 * j;
	}
	return make_uint4(bytes2(p) | bytes2(p + 2) << 16, low[0], low[1], high);
}

template <int type>
FS_DEVICE void store_scales(const uint8_t *p, uint8_t *row, const struct fs_planes &to, int b)
{
	const int j = b & 7;

	if constexpr (fs_is_k(type)) {
		if (j == 0)
			fs_st16(row + to.s + 16 * (b / 8), k_header(p));
	} else if constexpr (type == FS_Q6_K) {
		*(uint16_t *)(row + to.s + 2 * b) = (uint16_t)bytes2(p + 192 + 2 * j);
		if (j == 0)
			*(uint16_t *)(row + to.d + 2 * (b / 8)) = (uint16_t)bytes2(p + 208);
	} else if constexpr (fs_has_min(type)) {
		*(uint32_t *)(row + to.s + 4 * b) = bytes2(p) | bytes2(p + 2) << 16;
	} else {
		*(uint16_t *)(row + to.s + 2 * b) = (uint16_t)bytes2(p);
	}
}

template <int type>
__global__ void pack_kernel(
        const uint8_t *rows, int64_t row_bytes, int bytes, uint8_t *packed, struct fs_planes to)
{
	constexpr bool super = fs_is_k(type) || type == FS_Q6_K;
	const int b = (int)(blockIdx.x * blockDim.x + threadIdx.x), j = super ? b & 7 : 0;

	if (b >= to.blocks)
		return;
	const uint8_t *p = rows + blockIdx.y * row_bytes + (int64_t)(super ? b / 8 : b) * bytes;
	uint8_t *row = packed + blockIdx.y * to.row;
	uint32_t q[4] = {0, 0, 0, 0}, r[4] = {0, 0, 0, 0}, h[2] = {0, 0};

#pragma unroll
	for (int e = 0; e < 32; e++) {
		const uint32_t u = quant<type>(p, j, e);
		const int w = e / 4, i = e & 3;

		if constexpr (type == FS_Q8_0) {
			if (w < 4)
				q[w] |= u << 8 * i;
			else
				r[w - 4] |= u << 8 * i;
			continue;
		}
		q[w & 3] |= (u & 15) << (8 * i + w / 4 * 4);
		if constexpr (fs_is_five(type))
			h[0] |= u >> 4 << (8 * i + w);
		if constexpr (type == FS_Q6_K)
			h[w / 4] |= u >> 4 << (8 * i + 2 * (w & 3));
	}
	fs_st16(row + 16 * b, make_uint4(q[0], q[1], q[2], q[3]));
	if constexpr (type == FS_Q8_0)
		fs_st16(row + to.r + 16 * b, make_uint4(r[0], r[1], r[2], r[3]));
	if constexpr (fs_is_five(type))
		*(uint32_t *)(row + to.h + 4 * b) = h[0];
	if constexpr (type == FS_Q6_K)
		*(uint2 *)(row + to.h + 8 * b) = make_uint2(h[0], h[1]);
	store_scales<type>(p, row, to, b);
}

/* Rows of numbers: 16 bytes a thread, whatever they are, zeros behind the row's end. */
__global__ void pad_kernel(const uint8_t *rows, int64_t row_bytes, uint8_t *packed, int64_t to)
{
	const int64_t at = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * 16;

	if (at >= to)
		return;
	const uint8_t *p = rows + blockIdx.y * row_bytes + at;
	uint4 v = make_uint4(0, 0, 0, 0);

	if ((uintptr_t)p % 16 == 0 && at + 16 <= row_bytes) {
		v = fs_ld16(p);
	} else {
		uint32_t w[4] = {0, 0, 0, 0};

#pragma unroll
		for (int i = 0; i < 16; i++)
			if (at + i < row_bytes)
				w[i / 4] |= (uint32_t)p[i] << 8 * (i & 3);
		v = make_uint4(w[0], w[1], w[2], w[3]);
	}
	fs_st16(packed + blockIdx.y * to + at, v);
}

#define ROWS_AT_ONCE 65535 /* of a grid's second dimension */

struct pack_args {
	struct CUstream_st *s;
	enum fs_dtype type;
	const uint8_t *rows;
	int64_t row_bytes, n;
	uint8_t *packed;
	struct fs_planes to;
};

template <int type> static int pack_rows(const struct pack_args *a, int64_t i, unsigned int n)
{
	return FS_LAUNCH(pack_kernel<type>, dim3((a->to.blocks + THREADS - 1) / THREADS, n), THREADS, 0, a->s,
	        a->rows + i * a->row_bytes, a->row_bytes, block_bytes(a->type), a->packed + i * a->to.row,
	        a->to);
}

static int pack_any(const struct pack_args *a, int64_t i, unsigned int n)
{
	switch (a->type) {
		FS_BY_QUANT(a->type, pack_rows, a, i, n)
	default:
		return FS_LAUNCH(pad_kernel, dim3((unsigned)((a->to.row / 16 + THREADS - 1) / THREADS), n),
		        THREADS, 0, a->s, a->rows + i * a->row_bytes, a->row_bytes, a->packed + i * a->to.row,
		        a->to.row);
	}
}

int fs_cuk_pack(struct CUstream_st *s, enum fs_dtype type, const void *rows, int64_t first, int64_t n,
        void *packed, int64_t in, int64_t out)
{
	struct pack_args a = {};
	int err = 0;

	if (first < 0 || n < 0 || first + n > out)
		return FS_CUK_INVALID;
	a.s = s;
	a.type = type;
	a.rows = (const uint8_t *)rows;
	a.n = n;
	a.to = fs_planes_of(type, in);
	a.packed = (uint8_t *)packed + first * a.to.row;
	a.row_bytes = in /
	              (fs_is_plain(type)                         ? 1
	                      : fs_is_k(type) || type == FS_Q6_K ? 256
	                                                         : 32) *
	              block_bytes(type);
	for (int64_t i = 0; i < n && !err; i += ROWS_AT_ONCE)
		err = pack_any(&a, i, (unsigned int)FS_MIN(ROWS_AT_ONCE, n - i));
	return err;
}

/* ---- planes to numbers ---- */

struct rows_args {
	const uint8_t *packed;
	struct fs_planes p;
	const int32_t *ids; /* which rows; NULL: first and those that follow */
	int64_t first, n, in;
	enum fs_dtype to;
	void *dst; /* [n][in] */
};

FS_DEVICE const uint8_t *row_of(const struct rows_args &a, int64_t i)
{
	return a.packed + (a.ids ? a.ids[i] : a.first + i) * a.p.row;
}

FS_DEVICE void store8(const struct rows_args &a, int64_t at, const float w[8])
{
	uint32_t u[8];

	if (a.to == FS_F32) {
#pragma unroll
		for (int i = 0; i < 8; i++)
			u[i] = __float_as_uint(w[i]);
		fs_st16((float *)a.dst + at, make_uint4(u[0], u[1], u[2], u[3]));
		fs_st16((float *)a.dst + at + 4, make_uint4(u[4], u[5], u[6], u[7]));
		return;
	}
#pragma unroll
	for (int i = 0; i < 4; i++)
		u[i] = a.to == FS_F16 ? fs_pack_h2(w[2 * i], w[2 * i + 1])
		                      : fs_pack_b2(w[2 * i], w[2 * i + 1]);
	fs_st16((uint16_t *)a.dst + at, make_uint4(u[0], u[1], u[2], u[3]));
}

/* in is a multiple of 8; a thread takes the same eight columns of rows gridDim.y apart. */
template <int type> __global__ void rows_kernel(struct rows_args a)
{
	const int c = (int)(blockIdx.x * blockDim.x + threadIdx.x);

	if (8 * (int64_t)c >= a.in)
		return;
	for (int64_t i = blockIdx.y; i < a.n; i += gridDim.y) {
		struct fs_chunk k;
		float w[8];

		fs_chunk_load<type>(row_of(a, i), a.p, c, &k);
		fs_chunk_floats<type>(k, w);
		store8(a, i * a.in + 8 * c, w);
	}
}

/* Numbers of any row length. */
template <int type> __global__ void numbers_kernel(struct rows_args a)
{
	const int64_t k = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;

	if (k >= a.in)
		return;
	for (int64_t i = blockIdx.y; i < a.n; i += gridDim.y) {
		const uint8_t *row = row_of(a, i);
		const int64_t at = i * a.in + k;
		float v;

		if constexpr (type == FS_F32)
			v = ((const float *)row)[k];
		else if constexpr (type == FS_F16)
			v = fs_h2f(((const uint16_t *)row)[k]);
		else
			v = fs_b2f(((const uint16_t *)row)[k]);
		if (a.to == FS_F32)
			((float *)a.dst)[at] = v;
		else
			((uint16_t *)a.dst)[at] = a.to == FS_F16 ? fs_f2h(v) : fs_f2b(v);
	}
}

static dim3 grid_for(int64_t columns, int64_t n)
{
	return dim3((unsigned int)((columns + THREADS - 1) / THREADS), (unsigned int)FS_MIN(n, ROWS_AT_ONCE));
}

template <int type> static int rows_of_type(struct CUstream_st *s, const struct rows_args *a)
{
	if constexpr (fs_is_plain(type))
		if (a->in % 8)
			return FS_LAUNCH(numbers_kernel<type>, grid_for(a->in, a->n), THREADS, 0, s, *a);
	return FS_LAUNCH(rows_kernel<type>, grid_for(a->in / 8, a->n), THREADS, 0, s, *a);
}

static int rows_any(struct CUstream_st *s, enum fs_dtype type, const struct rows_args *a)
{
	if (a->n <= 0)
		return a->n < 0 ? FS_CUK_INVALID : 0;
	switch (type) {
		FS_BY_QUANT(type, rows_of_type, s, a)
		FS_BY_PLAIN(type, rows_of_type, s, a)
	}
	return FS_CUK_INVALID;
}

int fs_cuk_dequantize(struct CUstream_st *s, enum fs_dtype type, const void *packed, int64_t first, int64_t n,
        int64_t in, int64_t out, enum fs_dtype to, void *dst)
{
	struct rows_args a = {};

	if (first < 0 || first + n > out || !fs_is_plain(to))
		return FS_CUK_INVALID;
	a.packed = (const uint8_t *)packed;
	a.p = fs_planes_of(type, in);
	a.first = first;
	a.n = n;
	a.in = in;
	a.to = to;
	a.dst = dst;
	return rows_any(s, type, &a);
}

int fs_cuk_embed(struct CUstream_st *s, enum fs_dtype type, const void *packed, int64_t in, int64_t out,
        const int32_t *ids, float *y, int64_t n)
{
	struct rows_args a = {};

	a.packed = (const uint8_t *)packed;
	a.p = fs_planes_of(type, in);
	a.ids = ids;
	a.n = n;
	a.in = in;
	a.to = FS_F32;
	a.dst = y;
	return rows_any(s, type, &a);
}
