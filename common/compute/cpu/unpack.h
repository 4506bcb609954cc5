/*
 * unpack: the quants of one block of 32 as bytes in a 256-bit register, for the files of levels 1 and 2.
 * Layouts: common/gguf/gguf.h, llama.cpp's ggml-common.h. w points at a block; blocks have no alignment.
 */
#ifndef FS_COMPUTE_CPU_UNPACK_H
#define FS_COMPUTE_CPU_UNPACK_H

#include "common/compute/cpu/vec.h"

#if FS_LEVEL > 0

FS_INLINE float half(const uint8_t *p)
{
	uint16_t h;

	memcpy(&h, p, sizeof(h));
	return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(h)));
}

FS_INLINE __m256i load32(const void *p)
{
	return _mm256_loadu_si256(p);
}

/* 16 bytes: low nibbles to bytes 0..15, high nibbles to 16..31 */
FS_INLINE __m256i nibbles(const uint8_t *p)
{
	__m128i b = _mm_loadu_si128((const __m128i *)(const void *)p);

	return _mm256_and_si256(_mm256_set_m128i(_mm_srli_epi16(b, 4), b), _mm256_set1_epi8(15));
}

/* 32 bits to 32 bytes: 16 where the bit is set, else 0 */
FS_INLINE __m256i fifth_bits(const uint8_t *p)
{
	uint32_t bits;
	__m256i b;

	memcpy(&bits, p, sizeof(bits));
	b = _mm256_shuffle_epi8(
	        _mm256_set1_epi32((int)bits), _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1,
	                                              2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3));
	b = _mm256_and_si256(b, _mm256_set1_epi64x((long long)0x8040201008040201ULL));
	b = _mm256_cmpeq_epi8(b, _mm256_set1_epi64x((long long)0x8040201008040201ULL));
	return _mm256_and_si256(b, _mm256_set1_epi8(16));
}

/* Types of 32 elements with unsigned quants: value = d·q + m. */
FS_INLINE __m256i small_quants(enum fs_dtype type, const uint8_t *w, float *d, float *m)
{
	*d = half(w);
	switch (type) {
	case FS_Q4_0:
		*m = -8.0f * *d;
		return nibbles(w + 2);
	case FS_Q4_1:
		*m = half(w + 2);
		return nibbles(w + 4);
	case FS_Q5_0:
		*m = -16.0f * *d;
		return _mm256_or_si256(nibbles(w + 6), fifth_bits(w + 2));
	default: /* FS_Q5_1 */
		*m = half(w + 2);
		return _mm256_or_si256(nibbles(w + 8), fifth_bits(w + 4));
	}
}

/* The eight 6-bit scales and minima of Q4_K and Q5_K. */
FS_INLINE void scales_k(const uint8_t *b, __m256 *scale, __m256 *min)
{
	uint32_t w[3];
	uint64_t s, m;

	memcpy(w, b, sizeof(w));
	s = (w[0] & 0x3f3f3f3f) | (uint64_t)((w[2] & 0x0f0f0f0f) | (w[0] >> 6 & 0x03030303) << 4) << 32;
	m = (w[1] & 0x3f3f3f3f) | (uint64_t)((w[2] >> 4 & 0x0f0f0f0f) | (w[1] >> 6 & 0x03030303) << 4) << 32;
	*scale = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128((long long)s)));
	*min = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128((long long)m)));
}

/* Group j of 0..7 of Q4_K or (five) Q5_K; qs: the nibbles, high: the 32 bytes of fifth bits. */
FS_INLINE __m256i k_quants(bool five, const uint8_t *qs, __m256i high, int j)
{
	__m256i u = load32(qs + 32 * (j / 2));

	u = _mm256_and_si256(j & 1 ? _mm256_srli_epi16(u, 4) : u, _mm256_set1_epi8(15));
	if (!five)
		return u;
	high = _mm256_and_si256(_mm256_srli_epi16(high, j), _mm256_set1_epi8(1));
	return _mm256_or_si256(u, _mm256_slli_epi16(high, 4));
}

/* Quants 0..63 of 32 elements, group j of 0..7. */
FS_INLINE __m256i six_bits(const uint8_t *w, int j)
{
	const uint8_t *ql = w + 64 * (j / 4) + 32 * (j & 1), *qh = w + 128 + 32 * (j / 4);
	__m256i lo = load32(ql), hi = load32(qh);

	lo = _mm256_and_si256(j & 2 ? _mm256_srli_epi16(lo, 4) : lo, _mm256_set1_epi8(15));
	hi = _mm256_and_si256(_mm256_srli_epi16(hi, 2 * (j & 3)), _mm256_set1_epi8(3));
	return _mm256_or_si256(lo, _mm256_slli_epi16(hi, 4));
}

#endif

#endif
