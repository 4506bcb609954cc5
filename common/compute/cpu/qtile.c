/*
 * qtile.c: products of quantised weights with many rows of int8 activations, for the level with VNNI (on the
 * others the table says NULL and large.c dequantises for oneDNN). Sixteen weight rows are unpacked into a
 * panel whose lanes are outputs, so that one dot instruction serves 64 products and scales are vectors; then
 * any number of activation rows is multiplied with it. Pure functions, any thread.
 *
 * A panel is, for each 32 elements of the row, u8[8][16][4] (four elements of sixteen outputs, eight times),
 * then for each part of the 32 with its own scale (two for Q6_K, else one) f32 d[16], m[16]: weight = d·q +
 * m. Outputs past the last weight row are zero.
 */
#include "common/compute/cpu/kernels.h"
#include "common/compute/cpu/unpack.h"
#include "common/compute/cpu/vec.h"

#if FS_LEVEL == 2

#define OUTS FS_TILE_OUTS
#define AHEAD                                                                                                \
	512 /* bytes of a weight row fetched before they are unpacked; a prefetch past the end does no harm  \
	     */
#define QUANT_BYTES (32 * OUTS)

static int parts_of(enum fs_dtype type)
{
	return type == FS_Q6_K ? 2 : 1;
}

/* Bytes of a panel for 32 elements of the row. */
static size_t step_bytes(int parts)
{
	return QUANT_BYTES + (size_t)parts * 2 * OUTS * sizeof(float);
}

size_t FS_LV(panel_bytes)(enum fs_dtype type, int64_t in)
{
	return (size_t)(in / 32) * step_bytes(parts_of(type));
}

/* Dword indices that turn sixteen rows of eight dwords into eight of sixteen, in three rounds of two-source
 * permutations. */
static const int32_t round1[2][16] = {
        {0, 8, 16, 24, 1, 9, 17, 25, 2, 10, 18, 26, 3, 11, 19, 27},
        {4, 12, 20, 28, 5, 13, 21, 29, 6, 14, 22, 30, 7, 15, 23, 31},
};
static const int32_t round2[2][16] = {
        {0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23},
        {8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31},
};
static const int32_t round3[2][16] = {
        {0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23},
        {8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31},
};

FS_INLINE __m512i mix(__m512i a, const int32_t *index, __m512i b)
{
	return _mm512_permutex2var_epi32(a, _mm512_loadu_si512(index), b);
}

/* src: 16 rows of 32 bytes, stride apart; dst: [8][16][4] */
static void transpose(const uint8_t *src, size_t stride, uint8_t *dst)
{
	__m512i quad[4][2], half_rows[2][4];

	FS_UNROLL
	for (int p = 0; p < 4; p++) {
		const uint8_t *s = src + (size_t)p * 4 * stride;
		__m512i a = _mm512_inserti64x4(_mm512_castsi256_si512(load32(s)), load32(s + stride), 1);
		__m512i b = _mm512_inserti64x4(
		        _mm512_castsi256_si512(load32(s + 2 * stride)), load32(s + 3 * stride), 1);

		quad[p][0] = mix(a, round1[0], b);
		quad[p][1] = mix(a, round1[1], b);
	}
	FS_UNROLL
	for (int k = 0; k < 4; k++) { /* elements 8k..8k+7 of all rows */
		half_rows[0][k] = mix(quad[0][k / 2], round2[k % 2], quad[1][k / 2]);
		half_rows[1][k] = mix(quad[2][k / 2], round2[k % 2], quad[3][k / 2]);
	}
	FS_UNROLL
	for (int k = 0; k < 8; k++)
		_mm512_storeu_si512(
		        dst + 64 * k, mix(half_rows[0][k / 2], round3[k % 2], half_rows[1][k / 2]));
}

/* One weight row's 32 (small types) or 256 elements: quants in order to q, scales of part i to d[i·step],
 * m[i·step]. */
FS_INLINE void unpack_small(enum fs_dtype type, const uint8_t *w, uint8_t *q, float *d, float *m)
{
	__m256i u;

	if (type == FS_Q8_0) {
		*d = half(w);
		*m = -128.0f * *d;
		u = _mm256_xor_si256(load32(w + 2), _mm256_set1_epi8((char)0x80));
	} else {
		u = small_quants(type, w, d, m);
	}
	_mm256_storeu_si256((__m256i *)(void *)q, u);
}

FS_INLINE void unpack_k(bool five, const uint8_t *w, uint8_t *q, float *d, float *m, size_t step)
{
	__m256 scale, min;
	__m256i high = five ? load32(w + 16) : _mm256_setzero_si256();
	float ds[8], ms[8];

	scales_k(w + 4, &scale, &min);
	_mm256_storeu_ps(ds, _mm256_mul_ps(scale, _mm256_set1_ps(half(w))));
	_mm256_storeu_ps(ms, _mm256_mul_ps(min, _mm256_set1_ps(-half(w + 2))));
	FS_UNROLL
	for (int j = 0; j < 8; j++) {
		_mm256_storeu_si256(
		        (__m256i *)(void *)(q + 32 * j), k_quants(five, w + (five ? 48 : 16), high, j));
		d[(size_t)j * step] = ds[j];
		m[(size_t)j * step] = ms[j];
	}
}

FS_INLINE void unpack_q6_k(const uint8_t *w, uint8_t *q, float *d, float *m, size_t step)
{
	const int8_t *scales = (const int8_t *)w + 192;
	float base = half(w + 208);

	FS_UNROLL
	for (int j = 0; j < 8; j++) {
		_mm256_storeu_si256((__m256i *)(void *)(q + 32 * j), six_bits(w, j));
		for (int i = 0; i < 2; i++) {
			d[(size_t)j * step + (size_t)i * 2 * OUTS] = base * (float)scales[2 * j + i];
			m[(size_t)j * step + (size_t)i * 2 * OUTS] = -32.0f * base * (float)scales[2 * j + i];
		}
	}
}

/* w: the block's bytes of one row; q: its quants; d, m: its lane in the scales of the first 32 elements. */
static void unpack(enum fs_dtype type, const uint8_t *w, uint8_t *q, float *d, float *m)
{
	size_t step = step_bytes(parts_of(type)) / sizeof(float);

	switch (type) {
	case FS_Q4_0:
		unpack_small(FS_Q4_0, w, q, d, m);
		break;
	case FS_Q4_1:
		unpack_small(FS_Q4_1, w, q, d, m);
		break;
	case FS_Q5_0:
		unpack_small(FS_Q5_0, w, q, d, m);
		break;
	case FS_Q5_1:
		unpack_small(FS_Q5_1, w, q, d, m);
		break;
	case FS_Q4_K:
		unpack_k(false, w, q, d, m, step);
		break;
	case FS_Q5_K:
		unpack_k(true, w, q, d, m, step);
		break;
	case FS_Q6_K:
		unpack_q6_k(w, q, d, m, step);
		break;
	default:
		unpack_small(FS_Q8_0, w, q, d, m);
		break;
	}
}

void FS_LV(panel_pack)(
        enum fs_dtype type, const uint8_t *w, size_t row_bytes, int outs, int64_t in, uint8_t *panel)
{
	const struct fs_dtype_info *info = fs_dtype_info(type);
	int64_t elems = info->block_elems;
	size_t step = step_bytes(parts_of(type));
	uint8_t q[OUTS * 256];

	if (outs < OUTS) { /* lanes without a weight row: no quants, scales of zero */
		memset(panel, 0, FS_LV(panel_bytes)(type, in));
		memset(q, 0, sizeof(q));
	}
	for (int64_t i = 0; i < in; i += elems, w += info->block_bytes) {
		for (int o = 0; o < outs; o++) {
			float *d = (float *)(void *)(panel + QUANT_BYTES) + o;

			/* sixteen streams are too many for the processor to foresee */
			__builtin_prefetch(w + (size_t)o * row_bytes + AHEAD);
			if (elems == 256)
				__builtin_prefetch(w + (size_t)o * row_bytes + AHEAD + 64);
			unpack(type, w + (size_t)o * row_bytes, q + o * elems, d, d + OUTS);
		}
		for (int64_t j = 0; j < elems; j += 32, panel += step)
			transpose(q + j, (size_t)elems, panel);
	}
}

/* Rows r0..r0+rows-1 with one panel; rows and parts are constants. */
FS_INLINE void multiply(const struct fs_tile *t, int64_t r0, int rows, int parts)
{
	const size_t step = step_bytes(parts);
	const int8_t *x = t->xq.q + r0 * t->in;
	const float *xd = t->xq.d + r0 * (t->in / 32), *xs = parts == 2 ? t->xq.s16 : t->xq.s;
	const uint8_t *p = t->panel;
	__m512 acc[8];

	xs += r0 * (t->in / 32) * parts;
	FS_UNROLL
	for (int r = 0; r < rows; r++)
		acc[r] = _mm512_setzero_ps();
	for (int64_t b = 0; b < t->in / 32; b++, p += step) {
		const float *scales = (const float *)(const void *)(p + QUANT_BYTES);

		FS_UNROLL
		for (int part = 0; part < parts; part++) {
			const int first = part * 8 / parts, last = (part + 1) * 8 / parts;
			__m512 d = _mm512_loadu_ps(scales + part * 2 * OUTS),
			       m = _mm512_loadu_ps(scales + part * 2 * OUTS + OUTS);
			__m512i sum[8];

			FS_UNROLL
			for (int r = 0; r < rows; r++)
				sum[r] = _mm512_setzero_si512();
			FS_UNROLL
			for (int k = first; k < last; k++) {
				__m512i w = _mm512_loadu_si512(p + 64 * k);

				FS_UNROLL
				for (int r = 0; r < rows; r++) {
					int32_t four;

					memcpy(&four, x + r * t->in + 32 * b + 4 * k, sizeof(four));
					sum[r] = _mm512_dpbusd_epi32(sum[r], w, _mm512_set1_epi32(four));
				}
			}
			FS_UNROLL
			for (int r = 0; r < rows; r++) {
				__m512 scale = _mm512_mul_ps(d, _mm512_set1_ps(xd[r * (t->in / 32) + b]));
				__m512 s = _mm512_set1_ps(xs[(r * (t->in / 32) + b) * parts + part]);

				acc[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[r]), scale, acc[r]);
				acc[r] = _mm512_fmadd_ps(m, s, acc[r]);
			}
		}
	}
	FS_UNROLL
	for (int r = 0; r < rows; r++) {
		__mmask16 lanes = (__mmask16)((1u << t->outs) - 1);
		float *y = t->y + (r0 + r) * t->ldy;

		if (t->bias)
			acc[r] = _mm512_add_ps(acc[r], _mm512_maskz_loadu_ps(lanes, t->bias));
		if (t->add)
			acc[r] = _mm512_add_ps(acc[r], _mm512_maskz_loadu_ps(lanes, y));
		_mm512_mask_storeu_ps(y, lanes, acc[r]);
	}
}

FS_INLINE void multiply_all(const struct fs_tile *t, int parts)
{
	int64_t r = t->r0;

	for (; r + 8 <= t->r1; r += 8)
		multiply(t, r, 8, parts);
	if (r + 4 <= t->r1) {
		multiply(t, r, 4, parts);
		r += 4;
	}
	if (r + 2 <= t->r1) {
		multiply(t, r, 2, parts);
		r += 2;
	}
	if (r < t->r1)
		multiply(t, r, 1, parts);
}

void FS_LV(panel_multiply)(const struct fs_tile *t)
{
	if (parts_of(t->type) == 2)
		multiply_all(t, 2);
	else
		multiply_all(t, 1);
}

#endif
