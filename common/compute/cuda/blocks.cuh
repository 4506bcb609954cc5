/*
 * blocks: how quantised weights lie in the card's memory, for pack.cu (which writes them) and matvec.cu. All
 * types are seen as blocks of 32 elements, one for a lane. A row is made of planes, each an array over the
 * row's blocks (or over its superblocks of 256), each plane and each row beginning at a multiple of 16 bytes.
 * So the 32 lanes of a warp read 512 bytes in one piece where the file has blocks of 18 to 210 bytes at any
 * address. The bytes are as many as in the file, up to the padding of planes.
 *
 *	q   16 B a block: byte i holds the low four bits of element i in its low half, of 16 + i in its high
 *	    half. Q8_0: int8 of elements 0..15.
 *	r   16 B a block, Q8_0 alone: int8 of elements 16..31.
 *	h   Q5_x, 4 B a block: bit 8i + w is the fifth bit of element 4w + i. Q6_K, 8 B: bits 8i + 2w and the
 *	    next of word 0 are the upper two of element 4w + i, of word 1 of element 16 + 4w + i.
 *	s   Q4_0, Q5_0, Q8_0: half d, 2 B a block. Q4_1, Q5_1: halves d and m, 4 B. Q6_K: two int8 scales,
 *	    2 B. Q4_K, Q5_K: 16 B a superblock: halves d and dmin; byte j of eight: scale of block j, low four
 *	    bits, and those of its minimum above; nibble j of four bytes: their upper two bits likewise.
 *	d   Q6_K alone: half d, 2 B a superblock.
 */
#ifndef FS_COMMON_COMPUTE_CUDA_BLOCKS_CUH
#define FS_COMMON_COMPUTE_CUDA_BLOCKS_CUH

#include "common/compute/cuda/device.cuh"

struct fs_planes {   /* offsets in a row */
	int64_t row; /* bytes from row to row */
	int blocks;  /* of 32, in a row; of types that are not quantised: chunks of 8 */
	unsigned int r, h, s, d;
};

#define FS_UP16(n) (((n) + 15) / 16 * 16)

__host__ __device__ constexpr bool fs_is_k(int type)
{
	return type == FS_Q4_K || type == FS_Q5_K;
}

__host__ __device__ constexpr bool fs_is_five(int type)
{
	return type == FS_Q5_0 || type == FS_Q5_1 || type == FS_Q5_K;
}

__host__ __device__ constexpr bool fs_has_min(int type)
{
	return type == FS_Q4_1 || type == FS_Q5_1 || fs_is_k(type);
}

__host__ __device__ constexpr bool fs_is_plain(int type)
{
	return type == FS_F32 || type == FS_F16 || type == FS_BF16;
}

/* What is taken off the quants: value = d · (q - offset). */
__host__ __device__ constexpr int fs_offset(int type)
{
	return type == FS_Q4_0 ? 8 : type == FS_Q5_0 ? 16 : type == FS_Q6_K ? 32 : 0;
}

static inline struct fs_planes fs_planes_of(enum fs_dtype type, int64_t in)
{
	struct fs_planes p = {};
	unsigned int blocks = (unsigned int)(in / 32), supers = (unsigned int)(in / 256), at = 16 * blocks;

	if (fs_is_plain(type)) {
		p.blocks = (int)((in + 7) / 8);
		p.row = FS_UP16(in * (type == FS_F32 ? 4 : 2));
		return p;
	}
	p.blocks = (int)blocks;
	p.r = at;
	at += type == FS_Q8_0 ? 16 * blocks : 0;
	p.h = at;
	at += FS_UP16(fs_is_five(type) ? 4 * blocks : type == FS_Q6_K ? 8 * blocks : 0);
	p.s = at;
	at += FS_UP16(fs_is_k(type) ? 16 * supers : fs_has_min(type) ? 4 * blocks : 2 * blocks);
	p.d = at;
	at += FS_UP16(type == FS_Q6_K ? 2 * supers : 0);
	p.row = at;
	return p;
}

/* ---- a block as it is read ---- */

struct fs_block {
	uint4 q, r; /* r: plane r, or plane s of K types */
	uint2 h;
	uint32_t s; /* d, or d | m << 16, or the two scales | d << 16 */
};

template <int type>
FS_DEVICE struct fs_block fs_block_load(const uint8_t *row, const struct fs_planes &p, unsigned int b)
{
	struct fs_block f;

	f.q = fs_ld16_once(row + 16 * b);
	if constexpr (type == FS_Q8_0)
		f.r = fs_ld16_once(row + p.r + 16 * b);
	if constexpr (fs_is_k(type))
		f.r = fs_ld16_const(row + p.s + 16 * (b / 8));
	if constexpr (fs_is_five(type))
		f.h.x = fs_ld4_once(row + p.h + 4 * b);
	if constexpr (type == FS_Q6_K) {
		f.h = fs_ld8_once(row + p.h + 8 * b);
		f.s = (uint32_t)fs_ld2_const(row + p.s + 2 * b) |
		      (uint32_t)fs_ld2_const(row + p.d + 2 * (b / 8)) << 16;
	} else if constexpr (type == FS_Q4_1 || type == FS_Q5_1) {
		f.s = fs_ld4_const(row + p.s + 4 * b);
	} else if constexpr (!fs_is_k(type)) {
		f.s = (uint32_t)fs_ld2_const(row + p.s + 2 * b);
	}
	return f;
}

/* ---- its parts ---- */

/* Scale and minimum of block b of a K type, six bits each. */
FS_DEVICE void fs_k_scale(uint4 head, int b, int *scale, int *min)
{
	uint32_t low = (b & 4 ? head.z : head.y) >> 8 * (b & 3), high = head.w >> 4 * (b & 7);

	*scale = (int)((low & 15) | (high & 3) << 4);
	*min = (int)((low >> 4 & 15) | (high & 12) << 2);
}

/* v shifted left by k, right if k is negative; k is a constant. */
FS_DEVICE uint32_t fs_shift(uint32_t v, int k)
{
	return k >= 0 ? v << k : v >> -k;
}

/* Quants of elements 4w .. 4w + 3 as bytes; w is a constant. */
template <int type> FS_DEVICE uint32_t fs_block_word(const struct fs_block &f, int w)
{
	const uint32_t q[4] = {f.q.x, f.q.y, f.q.z, f.q.w};

	if constexpr (type == FS_Q8_0) {
		const uint32_t r[4] = {f.r.x, f.r.y, f.r.z, f.r.w};

		return w < 4 ? q[w] : r[w - 4];
	}
	uint32_t u = (w < 4 ? q[w] : q[w - 4] >> 4) & 0x0f0f0f0fu;

	if constexpr (fs_is_five(type))
		u |= fs_shift(f.h.x, 4 - w) & 0x10101010u;
	if constexpr (type == FS_Q6_K)
		u |= fs_shift(w < 4 ? f.h.x : f.h.y, 4 - 2 * (w & 3)) & 0x30303030u;
	return u;
}

/* d and m of value = d · (q - offset) + m, for a half of the block (0 or 1; they differ in Q6_K alone), by
 * the roundings of the reference. */
template <int type> FS_DEVICE float2 fs_block_scale(const struct fs_block &f, int b, int half)
{
	if constexpr (fs_is_k(type)) {
		int scale, min;

		fs_k_scale(f.r, b, &scale, &min);
		return make_float2(__fmul_rn(fs_h2f((uint16_t)f.r.x), (float)scale),
		        -__fmul_rn(fs_h2f((uint16_t)(f.r.x >> 16)), (float)min));
	} else if constexpr (type == FS_Q6_K) {
		return make_float2(
		        __fmul_rn(fs_h2f((uint16_t)(f.s >> 16)), (float)(int8_t)(half ? f.s >> 8 : f.s)),
		        0.0f);
	} else if constexpr (fs_has_min(type)) {
		return make_float2(fs_h2f((uint16_t)f.s), fs_h2f((uint16_t)(f.s >> 16)));
	}
	return make_float2(fs_h2f((uint16_t)f.s), 0.0f);
}

/* ---- eight elements as f32: chunk c holds elements 8c .. 8c + 7 of a row ---- */

template <int type>
FS_DEVICE void fs_chunk_quants(const uint8_t *row, const struct fs_planes &p, int c, float w[8])
{
	const int b = c / 4, k = c % 4;
	struct fs_block f = {};
	float2 s;

	/* only the half of the quants that the chunk has; the words below pick from it */
	uint2 q = fs_ld8(row + (type == FS_Q8_0 && k >= 2 ? p.r : 0u) + 16 * b + 8 * (k & 1));
	if constexpr (fs_is_k(type))
		f.r = fs_ld16_const(row + p.s + 16 * (b / 8));
	if constexpr (type == FS_Q6_K)
		f.s = (uint32_t)fs_ld2_const(row + p.s + 2 * b) |
		      (uint32_t)fs_ld2_const(row + p.d + 2 * (b / 8)) << 16;
	else if constexpr (type == FS_Q4_1 || type == FS_Q5_1)
		f.s = fs_ld4_const(row + p.s + 4 * b);
	else if constexpr (!fs_is_k(type))
		f.s = (uint32_t)fs_ld2_const(row + p.s + 2 * b);
	s = fs_block_scale<type>(f, b, k / 2);
	uint32_t u[2] = {q.x, q.y};
#pragma unroll
	for (int i = 0; i < 2; i++) {
		if constexpr (type != FS_Q8_0)
			u[i] = (k < 2 ? u[i] : u[i] >> 4) & 0x0f0f0f0fu;
		if constexpr (fs_is_five(type))
			u[i] |= (fs_ld4_const(row + p.h + 4 * b) >> (2 * k + i) & 0x01010101u) << 4;
		if constexpr (type == FS_Q6_K)
			u[i] |= (fs_ld4_const(row + p.h + 8 * b + 4 * (k / 2)) >> 2 * (2 * (k & 1) + i) &
			                0x03030303u)
			        << 4;
#pragma unroll
		for (int e = 0; e < 4; e++) {
			int v = type == FS_Q8_0 ? (int)(int8_t)(u[i] >> 8 * e)
			                        : (int)(u[i] >> 8 * e & 255) - fs_offset(type);

			w[4 * i + e] = __fmul_rn(s.x, (float)v);
			if constexpr (fs_has_min(type))
				w[4 * i + e] = __fadd_rn(w[4 * i + e], s.y);
		}
	}
}

/* A chunk of any type as it is read, so that reads can be begun before they are used. */
struct fs_chunk {
	uint4 a, b;
	float w[8];
};

template <int type>
FS_DEVICE void fs_chunk_load(const uint8_t *row, const struct fs_planes &p, int c, struct fs_chunk *k)
{
	if constexpr (type == FS_F32) {
		k->a = fs_ld16_once(row + 32 * (int64_t)c);
		k->b = fs_ld16_once(row + 32 * (int64_t)c + 16);
	} else if constexpr (fs_is_plain(type)) {
		k->a = fs_ld16_once(row + 16 * (int64_t)c);
	} else {
		fs_chunk_quants<type>(row, p, c, k->w);
	}
}

template <int type> FS_DEVICE void fs_chunk_floats(const struct fs_chunk &k, float w[8])
{
	const uint32_t a[4] = {k.a.x, k.a.y, k.a.z, k.a.w};

#pragma unroll
	for (int i = 0; i < 4; i++) {
		if constexpr (type == FS_F32) {
			const uint32_t b[4] = {k.b.x, k.b.y, k.b.z, k.b.w};

			w[i] = __uint_as_float(a[i]);
			w[4 + i] = __uint_as_float(b[i]);
		} else if constexpr (type == FS_F16) {
			float2 v = fs_unpack_h2(a[i]);

			w[2 * i] = v.x;
			w[2 * i + 1] = v.y;
		} else if constexpr (type == FS_BF16) {
			w[2 * i] = __uint_as_float(a[i] << 16);
			w[2 * i + 1] = __uint_as_float(a[i] & 0xffff0000u);
		} else {
			w[2 * i] = k.w[2 * i];
			w[2 * i + 1] = k.w[2 * i + 1];
		}
	}
}

/* The call with the type as a constant: FS_BY_TYPE(type, f, arguments) is f<FS_Q4_0>(arguments) and so on. */
#define FS_BY_QUANT(type, f, ...)                                                                            \
	case FS_Q4_0:                                                                                        \
		return f<FS_Q4_0>(__VA_ARGS__);                                                              \
	case FS_Q4_1:                                                                                        \
		return f<FS_Q4_1>(__VA_ARGS__);                                                              \
	case FS_Q5_0:                                                                                        \
		return f<FS_Q5_0>(__VA_ARGS__);                                                              \
	case FS_Q5_1:                                                                                        \
		return f<FS_Q5_1>(__VA_ARGS__);                                                              \
	case FS_Q8_0:                                                                                        \
		return f<FS_Q8_0>(__VA_ARGS__);                                                              \
	case FS_Q4_K:                                                                                        \
		return f<FS_Q4_K>(__VA_ARGS__);                                                              \
	case FS_Q5_K:                                                                                        \
		return f<FS_Q5_K>(__VA_ARGS__);                                                              \
	case FS_Q6_K:                                                                                        \
		return f<FS_Q6_K>(__VA_ARGS__);
#define FS_BY_PLAIN(type, f, ...)                                                                            \
	case FS_F32:                                                                                         \
		return f<FS_F32>(__VA_ARGS__);                                                               \
	case FS_F16:                                                                                         \
		return f<FS_F16>(__VA_ARGS__);                                                               \
	case FS_BF16:                                                                                        \
		return f<FS_BF16>(__VA_ARGS__);

#endif
