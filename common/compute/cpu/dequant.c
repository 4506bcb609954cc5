/*
 * dequant.c: weight rows of any readable type to f32 or bf16, for one level. Pure functions, any thread.
 * Level 0 is common/gguf's own reference. Layouts: unpack.h.
 */
#include "common/compute/cpu/kernels.h"
#include "common/compute/cpu/unpack.h"
#include "common/compute/cpu/vec.h"

#if FS_LEVEL == 0

void FS_LV(dequantize)(enum fs_dtype type, const void *src, float *dst, int64_t n)
{
	fs_dequantize_row(type, src, dst, n);
}

/* By way of f32 in pieces that stay in the first cache. */
void FS_LV(dequantize_bf16)(enum fs_dtype type, const void *src, uint16_t *dst, int64_t n)
{
	const struct fs_dtype_info *info = fs_dtype_info(type);
	const uint8_t *p = src;
	float tmp[1024];

	for (int64_t i = 0; i < n; i += 1024) {
		int64_t m = FS_MIN(1024, n - i);

		fs_dequantize_row(type, p, tmp, m);
		FS_LV(to_bf16)(tmp, dst + i, m);
		p += (size_t)(m / info->block_elems) * info->block_bytes;
	}
}

#else

/* Where the numbers go: exactly one is set, and a constant wherever it is inlined. */
struct sink {
	float *f32;
	uint16_t *bf16;
};

FS_INLINE void put(bool bf16, struct sink to, int64_t at, vf x)
{
	if (bf16)
		v_store_bf16(to.bf16 + at, x);
	else
		v_store(to.f32 + at, x);
}

/* d·q + m of 32 unsigned quants */
FS_INLINE void put_u8(bool bf16, struct sink to, int64_t at, __m256i q, vf d, vf m)
{
	FS_UNROLL
	for (int i = 0; i < 32 / VW; i++)
		put(bf16, to, at + i * VW, v_fma(v_from_u8(q, i), d, m));
}

FS_INLINE void small(bool bf16, enum fs_dtype type, int bytes, const uint8_t *w, struct sink to, int64_t n)
{
	for (int64_t i = 0; i < n; i += 32, w += bytes) {
		float d, m;
		__m256i q = small_quants(type, w, &d, &m);

		put_u8(bf16, to, i, q, v_set(d), v_set(m));
	}
}

FS_INLINE void q8_0(bool bf16, const uint8_t *w, struct sink to, int64_t n)
{
	for (int64_t i = 0; i < n; i += 32, w += 34) {
		__m256i q = load32(w + 2);
		vf d = v_set(half(w));

		FS_UNROLL
		for (int k = 0; k < 32 / VW; k++)
			put(bf16, to, i + k * VW, v_mul(v_from_i8(q, k), d));
	}
}

FS_INLINE void k45(bool bf16, bool five, const uint8_t *w, struct sink to, int64_t n)
{
	for (int64_t i = 0; i < n; i += 256, w += five ? 176 : 144) {
		__m256 scale, min;
		__m256i high = five ? load32(w + 16) : _mm256_setzero_si256();
		float d[8], m[8];

		scales_k(w + 4, &scale, &min);
		_mm256_storeu_ps(d, _mm256_mul_ps(scale, _mm256_set1_ps(half(w))));
		_mm256_storeu_ps(m, _mm256_mul_ps(min, _mm256_set1_ps(-half(w + 2))));
		FS_UNROLL
		for (int j = 0; j < 8; j++)
			put_u8(bf16, to, i + 32 * j, k_quants(five, w + (five ? 48 : 16), high, j),
			        v_set(d[j]), v_set(m[j]));
	}
}

FS_INLINE void q6_k(bool bf16, const uint8_t *w, struct sink to, int64_t n)
{
	for (int64_t i = 0; i < n; i += 256, w += 210) {
		const int8_t *scales = (const int8_t *)w + 192;
		float d = half(w + 208);

		FS_UNROLL
		for (int j = 0; j < 8; j++) {
			__m256i q = _mm256_sub_epi8(six_bits(w, j), _mm256_set1_epi8(32));

			FS_UNROLL
			for (int k = 0; k < 32 / VW; k++)
				put(bf16, to, i + 32 * j + k * VW,
				        v_mul(v_from_i8(q, k),
				                v_set(d * (float)scales[2 * j + k * VW / 16])));
		}
	}
}

FS_INLINE void floats(bool bf16, enum fs_dtype type, const void *src, struct sink to, int64_t n)
{
	int64_t i = 0;
	float tail[VW], *last = tail;

	for (; i + VW <= n; i += VW)
		put(bf16, to, i,
		        type == FS_F16 ? v_load_f16((const uint16_t *)src + i)
		                       : v_load((const float *)src + i));
	if (i == n)
		return;
	if (type == FS_F16)
		fs_dequantize_row(FS_F16, (const uint16_t *)src + i, last, n - i);
	else
		memcpy(last, (const float *)src + i, (size_t)(n - i) * sizeof(*last));
	for (int64_t k = i; k < n; k++) {
		if (bf16)
			to.bf16[k] = fs_f32_to_bf16(last[k - i]);
		else
			to.f32[k] = last[k - i];
	}
}

/* bf16 to f32, or unchanged */
FS_INLINE void from_bf16(bool bf16, const uint16_t *src, struct sink to, int64_t n)
{
	if (bf16)
		memcpy(to.bf16, src, (size_t)n * sizeof(*src));
	else
		for (int64_t i = 0; i < n; i++)
			to.f32[i] = fs_bf16_to_f32(src[i]);
}

FS_INLINE void any(bool bf16, enum fs_dtype type, const void *src, struct sink to, int64_t n)
{
	switch (type) {
	case FS_F32:
		floats(bf16, FS_F32, src, to, n);
		break;
	case FS_F16:
		floats(bf16, FS_F16, src, to, n);
		break;
	case FS_BF16:
		from_bf16(bf16, src, to, n);
		break;
	case FS_Q8_0:
		q8_0(bf16, src, to, n);
		break;
	case FS_Q4_0:
		small(bf16, FS_Q4_0, 18, src, to, n);
		break;
	case FS_Q4_1:
		small(bf16, FS_Q4_1, 20, src, to, n);
		break;
	case FS_Q5_0:
		small(bf16, FS_Q5_0, 22, src, to, n);
		break;
	case FS_Q5_1:
		small(bf16, FS_Q5_1, 24, src, to, n);
		break;
	case FS_Q4_K:
		k45(bf16, false, src, to, n);
		break;
	case FS_Q5_K:
		k45(bf16, true, src, to, n);
		break;
	case FS_Q6_K:
		q6_k(bf16, src, to, n);
		break;
	}
}

void FS_LV(dequantize)(enum fs_dtype type, const void *src, float *dst, int64_t n)
{
	any(false, type, src, (struct sink){.f32 = dst}, n);
}

void FS_LV(dequantize_bf16)(enum fs_dtype type, const void *src, uint16_t *dst, int64_t n)
{
	any(true, type, src, (struct sink){.bf16 = dst}, n);
}

#endif
