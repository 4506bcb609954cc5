/*
 * vec: floats by the register for the file's FS_LEVEL: 1, 8 or 16 at a time. Only files that are compiled
 * once a level include it. Partial loads fill with zeros; partial stores write nothing past n. exp keeps
 * infinities, zeros and NaN as libm does.
 */
#ifndef FS_COMPUTE_CPU_VEC_H
#define FS_COMPUTE_CPU_VEC_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#if FS_LEVEL > 0
#include <immintrin.h>
#endif

#define FS_INLINE static inline __attribute__((always_inline, unused))
/* Sanitizers multiply unrolled code: qdot.c takes nine times as long to compile then, and 0.6 GB. */
#ifdef __has_feature
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define FS_SANITIZED 1
#endif
#endif
#if defined(FS_SANITIZED) || defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define FS_UNROLL
#elif defined(__clang__)
#define FS_UNROLL _Pragma("clang loop unroll(full)")
#else
#define FS_UNROLL _Pragma("GCC unroll 16")
#endif

#if FS_LEVEL == 2

typedef __m512 vf;
#define VW 16
FS_INLINE vf v_set(float x)
{
	return _mm512_set1_ps(x);
}
FS_INLINE vf v_load(const float *p)
{
	return _mm512_loadu_ps(p);
}
FS_INLINE void v_store(float *p, vf x)
{
	_mm512_storeu_ps(p, x);
}
FS_INLINE vf v_load_n(const float *p, int n)
{
	return _mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p);
}
FS_INLINE void v_store_n(float *p, vf x, int n)
{
	_mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1), x);
}
FS_INLINE vf v_load_f16(const uint16_t *p)
{
	return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}
FS_INLINE vf v_load_bf16(const uint16_t *p)
{
	return _mm512_castsi512_ps(
	        _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16));
}
FS_INLINE void v_store_f16(uint16_t *p, vf x)
{
	_mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
/* Round to nearest even on the upper half; a NaN keeps its upper bits and is made quiet. */
FS_INLINE void v_store_bf16(uint16_t *p, vf x)
{
	__m512i u = _mm512_castps_si512(x), up = _mm512_srli_epi32(u, 16);
	__m512i odd = _mm512_and_si512(up, _mm512_set1_epi32(1));
	__m512i r =
	        _mm512_srli_epi32(_mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);

	r = _mm512_mask_or_epi32(r, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), up, _mm512_set1_epi32(0x40));
	_mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16(r));
}
/* Rounds to bytes (x within -127..127) and returns their sum. */
FS_INLINE int v_store_i8(int8_t *p, vf x)
{
	__m512i i = _mm512_cvtps_epi32(x);

	_mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8(i));
	return _mm512_reduce_add_epi32(i);
}
FS_INLINE vf v_from_u8(__m256i u, int i) /* the i-th VW bytes; i a constant */
{
	__m128i b = i ? _mm256_extracti128_si256(u, 1) : _mm256_castsi256_si128(u);

	return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(b));
}
FS_INLINE vf v_from_i8(__m256i u, int i)
{
	__m128i b = i ? _mm256_extracti128_si256(u, 1) : _mm256_castsi256_si128(u);

	return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(b));
}
FS_INLINE vf v_add(vf a, vf b)
{
	return _mm512_add_ps(a, b);
}
FS_INLINE vf v_sub(vf a, vf b)
{
	return _mm512_sub_ps(a, b);
}
FS_INLINE vf v_mul(vf a, vf b)
{
	return _mm512_mul_ps(a, b);
}
FS_INLINE vf v_div(vf a, vf b)
{
	return _mm512_div_ps(a, b);
}
FS_INLINE vf v_fma(vf a, vf b, vf c) /* a·b + c */
{
	return _mm512_fmadd_ps(a, b, c);
}
FS_INLINE vf v_max(vf a, vf b)
{
	return _mm512_max_ps(a, b);
}
FS_INLINE vf v_min(vf a, vf b)
{
	return _mm512_min_ps(a, b);
}
FS_INLINE vf v_abs(vf a)
{
	return _mm512_abs_ps(a);
}
/* a where x < 0, else b */
FS_INLINE vf v_if_neg(vf x, vf a, vf b)
{
	return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_LT_OQ), b, a);
}
FS_INLINE float v_sum(vf a)
{
	return _mm512_reduce_add_ps(a);
}
FS_INLINE float v_hmax(vf a)
{
	return _mm512_reduce_max_ps(a);
}
FS_INLINE vf v_round(vf a)
{
	return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
FS_INLINE vf v_scale2(vf a, vf n) /* a·2ⁿ */
{
	return _mm512_scalef_ps(a, n);
}

#elif FS_LEVEL == 1

typedef __m256 vf;
#define VW 8
FS_INLINE vf v_set(float x)
{
	return _mm256_set1_ps(x);
}
FS_INLINE vf v_load(const float *p)
{
	return _mm256_loadu_ps(p);
}
FS_INLINE void v_store(float *p, vf x)
{
	_mm256_storeu_ps(p, x);
}
FS_INLINE __m256i v_mask(int n)
{
	return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
FS_INLINE vf v_load_n(const float *p, int n)
{
	return _mm256_maskload_ps(p, v_mask(n));
}
FS_INLINE void v_store_n(float *p, vf x, int n)
{
	_mm256_maskstore_ps(p, v_mask(n), x);
}
FS_INLINE vf v_load_f16(const uint16_t *p)
{
	return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
}
FS_INLINE vf v_load_bf16(const uint16_t *p)
{
	return _mm256_castsi256_ps(
	        _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16));
}
FS_INLINE void v_store_f16(uint16_t *p, vf x)
{
	_mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
/* Round to nearest even on the upper half; a NaN keeps its upper bits and is made quiet. */
FS_INLINE void v_store_bf16(uint16_t *p, vf x)
{
	__m256i u = _mm256_castps_si256(x), up = _mm256_srli_epi32(u, 16);
	__m256i odd = _mm256_and_si256(up, _mm256_set1_epi32(1));
	__m256i r =
	        _mm256_srli_epi32(_mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
	__m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));

	r = _mm256_blendv_epi8(r, _mm256_or_si256(up, _mm256_set1_epi32(0x40)), nan);
	r = _mm256_permute4x64_epi64(_mm256_packus_epi32(r, r), 0x08);
	_mm_storeu_si128((__m128i *)p, _mm256_castsi256_si128(r));
}
/* Rounds to bytes (x within -127..127) and returns their sum. */
FS_INLINE int v_store_i8(int8_t *p, vf x)
{
	__m256i i = _mm256_cvtps_epi32(x);
	__m128i lo = _mm256_castsi256_si128(i), hi = _mm256_extracti128_si256(i, 1),
	        w = _mm_packs_epi32(lo, hi);
	__m128i sum = _mm_add_epi32(lo, hi);

	_mm_storel_epi64((__m128i *)p, _mm_packs_epi16(w, w));
	sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4e));
	return _mm_cvtsi128_si32(_mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xb1)));
}
FS_INLINE __m128i v_eight(__m256i u, int i)
{
	__m128i b = i & 2 ? _mm256_extracti128_si256(u, 1) : _mm256_castsi256_si128(u);

	return i & 1 ? _mm_srli_si128(b, 8) : b;
}
FS_INLINE vf v_from_u8(__m256i u, int i) /* the i-th VW bytes; i a constant */
{
	return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(v_eight(u, i)));
}
FS_INLINE vf v_from_i8(__m256i u, int i)
{
	return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(v_eight(u, i)));
}
FS_INLINE vf v_add(vf a, vf b)
{
	return _mm256_add_ps(a, b);
}
FS_INLINE vf v_sub(vf a, vf b)
{
	return _mm256_sub_ps(a, b);
}
FS_INLINE vf v_mul(vf a, vf b)
{
	return _mm256_mul_ps(a, b);
}
FS_INLINE vf v_div(vf a, vf b)
{
	return _mm256_div_ps(a, b);
}
FS_INLINE vf v_fma(vf a, vf b, vf c) /* a·b + c */
{
	return _mm256_fmadd_ps(a, b, c);
}
FS_INLINE vf v_max(vf a, vf b)
{
	return _mm256_max_ps(a, b);
}
FS_INLINE vf v_min(vf a, vf b)
{
	return _mm256_min_ps(a, b);
}
FS_INLINE vf v_abs(vf a)
{
	return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a);
}
/* a where x < 0, else b */
FS_INLINE vf v_if_neg(vf x, vf a, vf b)
{
	return _mm256_blendv_ps(b, a, _mm256_cmp_ps(x, _mm256_setzero_ps(), _CMP_LT_OQ));
}
FS_INLINE float v_sum(vf a)
{
	__m128 s = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));

	s = _mm_add_ps(s, _mm_movehl_ps(s, s));
	return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
FS_INLINE float v_hmax(vf a)
{
	__m128 s = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));

	s = _mm_max_ps(s, _mm_movehl_ps(s, s));
	return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}
FS_INLINE vf v_round(vf a)
{
	return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
/* a·2ⁿ for |n| <= 252, in two steps so that results below 2^-126 come out right */
FS_INLINE vf v_scale2(vf a, vf n)
{
	__m256i i = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(i, 1);
	__m256i one = _mm256_set1_epi32(127);
	vf lo = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(half, one), 23));
	vf hi = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_sub_epi32(i, half), one), 23));

	return _mm256_mul_ps(_mm256_mul_ps(a, lo), hi);
}

#else

typedef float vf;
#define VW 1
FS_INLINE vf v_set(float x)
{
	return x;
}
FS_INLINE vf v_load(const float *p)
{
	return *p;
}
FS_INLINE void v_store(float *p, vf x)
{
	*p = x;
}
FS_INLINE vf v_load_n(const float *p, int n)
{
	return n ? *p : 0.0f;
}
FS_INLINE void v_store_n(float *p, vf x, int n)
{
	if (n)
		*p = x;
}
FS_INLINE vf v_load_f16(const uint16_t *p)
{
	return fs_f16_to_f32(*p);
}
FS_INLINE vf v_load_bf16(const uint16_t *p)
{
	return fs_bf16_to_f32(*p);
}
FS_INLINE void v_store_f16(uint16_t *p, vf x)
{
	*p = fs_f32_to_f16(x);
}
FS_INLINE void v_store_bf16(uint16_t *p, vf x)
{
	*p = fs_f32_to_bf16(x);
}
/* Rounds to a byte (x within -127..127) and returns it. */
FS_INLINE int v_store_i8(int8_t *p, vf x)
{
	*p = (int8_t)lrintf(x);
	return *p;
}
FS_INLINE vf v_add(vf a, vf b)
{
	return a + b;
}
FS_INLINE vf v_sub(vf a, vf b)
{
	return a - b;
}
FS_INLINE vf v_mul(vf a, vf b)
{
	return a * b;
}
FS_INLINE vf v_div(vf a, vf b)
{
	return a / b;
}
FS_INLINE vf v_fma(vf a, vf b, vf c) /* a·b + c */
{
	return a * b + c;
}
FS_INLINE vf v_max(vf a, vf b)
{
	return a > b ? a : b;
}
FS_INLINE vf v_min(vf a, vf b)
{
	return a < b ? a : b;
}
FS_INLINE vf v_abs(vf a)
{
	return fabsf(a);
}
/* a where x < 0, else b */
FS_INLINE vf v_if_neg(vf x, vf a, vf b)
{
	return x < 0 ? a : b;
}
FS_INLINE float v_sum(vf a)
{
	return a;
}
FS_INLINE float v_hmax(vf a)
{
	return a;
}

#endif

/* eˣ to about 1 ulp. x = n·ln 2 + r, |r| <= ln 2 / 2; Taylor's series of e^r to the seventh power, evaluated
 * by Horner. */
FS_INLINE vf v_exp(vf x)
{
#if FS_LEVEL == 0
	return expf(x);
#else
	const vf lo = v_set(-104.5f), hi = v_set(89.5f);
	vf n, r, p;

	x = v_max(lo, x); /* a NaN in x stays: max and min return their second operand then */
	x = v_min(hi, x);
	n = v_round(v_mul(x, v_set(1.44269504f)));
	r = v_fma(n, v_set(-0.693359375f), x);
	r = v_fma(n, v_set(2.12194440e-4f), r);
	p = v_fma(v_set(1.0f / 5040), r, v_set(1.0f / 720));
	p = v_fma(p, r, v_set(1.0f / 120));
	p = v_fma(p, r, v_set(1.0f / 24));
	p = v_fma(p, r, v_set(1.0f / 6));
	p = v_fma(p, r, v_set(0.5f));
	p = v_fma(v_mul(r, r), p, r);
	return v_scale2(v_add(p, v_set(1.0f)), n);
#endif
}

/* 1 / (1 + e^-x) */
FS_INLINE vf v_sigmoid(vf x)
{
	return v_div(v_set(1.0f), v_add(v_set(1.0f), v_exp(v_sub(v_set(0.0f), x))));
}

#endif
