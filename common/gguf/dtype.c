/*
 * Tensor types: sizes, half and bfloat16 conversions, and the scalar reference that turns every readable type
 * into f32. Owns nothing; any thread. Every faster kernel elsewhere is compared with this file. Block
 * layouts: ggml's ggml-common.h; all block scales are IEEE halves, little-endian, and blocks have no
 * alignment of their own.
 */
#include "common/gguf/gguf.h"

#include <math.h>
#include <string.h>

const struct fs_dtype_info *fs_dtype_info(int type)
{
	static const struct {
		int type;
		struct fs_dtype_info info;
	} table[] = {
	        {FS_F32, {"F32", 1, 4}},
	        {FS_F16, {"F16", 1, 2}},
	        {FS_BF16, {"BF16", 1, 2}},
	        {FS_Q4_0, {"Q4_0", 32, 18}},
	        {FS_Q4_1, {"Q4_1", 32, 20}},
	        {FS_Q5_0, {"Q5_0", 32, 22}},
	        {FS_Q5_1, {"Q5_1", 32, 24}},
	        {FS_Q8_0, {"Q8_0", 32, 34}},
	        {FS_Q4_K, {"Q4_K", 256, 144}},
	        {FS_Q5_K, {"Q5_K", 256, 176}},
	        {FS_Q6_K, {"Q6_K", 256, 210}},
	};

	for (size_t i = 0; i < FS_ARRAY_LEN(table); i++)
		if (table[i].type == type)
			return &table[i].info;
	return NULL;
}

size_t fs_dtype_row_bytes(enum fs_dtype type, int64_t n)
{
	const struct fs_dtype_info *info = fs_dtype_info((int)type);
	size_t bytes;

	if (info == NULL || n <= 0 || n % info->block_elems != 0 ||
	        !fs_mul_size((size_t)n / info->block_elems, info->block_bytes, &bytes))
		return 0;
	return bytes;
}

union bits {
	uint32_t u;
	float f;
};

float fs_f16_to_f32(uint16_t h)
{
	uint32_t sign = (uint32_t)(h & 0x8000) << 16, exp = (h >> 10) & 31, man = h & 0x3ff;
	union bits v;

	if (exp == 0) {
		v.f = (float)man * 0x1p-24f; /* zero and subnormals, exact */
		v.u |= sign;
	} else if (exp == 31) {
		v.u = sign | 0x7f800000 | man << 13;
	} else {
		v.u = sign | (exp + 112) << 23 | man << 13;
	}
	return v.f;
}

uint16_t fs_f32_to_f16(float f)
{
	union bits v = {.f = f};
	uint16_t sign = (uint16_t)(v.u >> 16 & 0x8000);
	uint32_t a = v.u & 0x7fffffff;

	if (a > 0x7f800000)
		return (uint16_t)(sign | 0x7e00 | (a >> 13 & 0x1ff));
	if (a >= 0x47800000) /* 65536 and up; 65520..65536 carries into infinity below */
		return (uint16_t)(sign | 0x7c00);
	if (a < 0x38800000) { /* below 2^-14: multiples of 2^-24, rounded to even by the addition */
		union bits m = {.u = a};

		m.f = m.f * 0x1p24f + 0x1p23f;
		return (uint16_t)(sign | (m.u & 0x7fffff));
	}
	a += 0xfff + (a >> 13 & 1);
	return (uint16_t)(sign | (a - (112u << 23)) >> 13);
}

uint16_t fs_f32_to_bf16(float f)
{
	union bits v = {.f = f};

	if ((v.u & 0x7fffffff) > 0x7f800000)
		return (uint16_t)(v.u >> 16 | 0x40);
	return (uint16_t)((v.u + 0x7fff + (v.u >> 16 & 1)) >> 16);
}

static uint16_t get_u16(const uint8_t *p)
{
	return (uint16_t)(p[0] | p[1] << 8);
}

static uint32_t get_u32(const uint8_t *p)
{
	return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

static float get_half(const uint8_t *p)
{
	return fs_f16_to_f32(get_u16(p));
}

/* ---- one block each ---- */

static void block_q4_0(const uint8_t *b, float *y)
{
	float d = get_half(b);

	for (int j = 0; j < 16; j++) {
		y[j] = d * (float)((b[2 + j] & 15) - 8);
		y[j + 16] = d * (float)((b[2 + j] >> 4) - 8);
	}
}

static void block_q4_1(const uint8_t *b, float *y)
{
	float d = get_half(b), m = get_half(b + 2);

	for (int j = 0; j < 16; j++) {
		y[j] = d * (float)(b[4 + j] & 15) + m;
		y[j + 16] = d * (float)(b[4 + j] >> 4) + m;
	}
}

static void block_q5_0(const uint8_t *b, float *y)
{
	float d = get_half(b);
	uint32_t qh = get_u32(b + 2);

	for (int j = 0; j < 16; j++) {
		int lo = (b[6 + j] & 15) | (int)(qh >> j & 1) << 4;
		int hi = (b[6 + j] >> 4) | (int)(qh >> (j + 16) & 1) << 4;

		y[j] = d * (float)(lo - 16);
		y[j + 16] = d * (float)(hi - 16);
	}
}

static void block_q5_1(const uint8_t *b, float *y)
{
	float d = get_half(b), m = get_half(b + 2);
	uint32_t qh = get_u32(b + 4);

	for (int j = 0; j < 16; j++) {
		int lo = (b[8 + j] & 15) | (int)(qh >> j & 1) << 4;
		int hi = (b[8 + j] >> 4) | (int)(qh >> (j + 16) & 1) << 4;

		y[j] = d * (float)lo + m;
		y[j + 16] = d * (float)hi + m;
	}
}

static void block_q8_0(const uint8_t *b, float *y)
{
	float d = get_half(b);

	for (int j = 0; j < 32; j++)
		y[j] = d * (float)(int8_t)b[2 + j];
}

/* The six-bit scale and minimum of sub-block s (0..7) of a Q4_K or Q5_K block; b is the 12-byte table. */
static void k_scale_min(const uint8_t *b, int s, int *scale, int *min)
{
	if (s < 4) {
		*scale = b[s] & 63;
		*min = b[s + 4] & 63;
	} else {
		*scale = (b[s + 4] & 15) | (b[s - 4] >> 6) << 4;
		*min = (b[s + 4] >> 4) | (b[s] >> 6) << 4;
	}
}

static void block_q4_k(const uint8_t *b, float *y)
{
	float d = get_half(b), dmin = get_half(b + 2);
	const uint8_t *q = b + 16;

	for (int k = 0; k < 4; k++, q += 32, y += 64) {
		int s0, m0, s1, m1;

		k_scale_min(b + 4, 2 * k, &s0, &m0);
		k_scale_min(b + 4, 2 * k + 1, &s1, &m1);
		for (int l = 0; l < 32; l++) {
			y[l] = d * (float)s0 * (float)(q[l] & 15) - dmin * (float)m0;
			y[l + 32] = d * (float)s1 * (float)(q[l] >> 4) - dmin * (float)m1;
		}
	}
}

static void block_q5_k(const uint8_t *b, float *y)
{
	float d = get_half(b), dmin = get_half(b + 2);
	const uint8_t *qh = b + 16, *q = b + 48;

	for (int k = 0; k < 4; k++, q += 32, y += 64) {
		int s0, m0, s1, m1;

		k_scale_min(b + 4, 2 * k, &s0, &m0);
		k_scale_min(b + 4, 2 * k + 1, &s1, &m1);
		for (int l = 0; l < 32; l++) {
			int lo = (q[l] & 15) | (qh[l] >> (2 * k) & 1) << 4;
			int hi = (q[l] >> 4) | (qh[l] >> (2 * k + 1) & 1) << 4;

			y[l] = d * (float)s0 * (float)lo - dmin * (float)m0;
			y[l + 32] = d * (float)s1 * (float)hi - dmin * (float)m1;
		}
	}
}

static void block_q6_k(const uint8_t *b, float *y)
{
	float d = get_half(b + 208);

	for (int half = 0; half < 2; half++, y += 128) {
		const uint8_t *ql = b + 64 * half, *qh = b + 128 + 32 * half;
		const int8_t *sc = (const int8_t *)(b + 192 + 8 * half);

		for (int l = 0; l < 32; l++) {
			int i = l / 16;
			int q0 = (ql[l] & 15) | (qh[l] & 3) << 4;
			int q1 = (ql[l + 32] & 15) | (qh[l] >> 2 & 3) << 4;
			int q2 = (ql[l] >> 4) | (qh[l] >> 4 & 3) << 4;
			int q3 = (ql[l + 32] >> 4) | (qh[l] >> 6 & 3) << 4;

			y[l] = d * (float)sc[i] * (float)(q0 - 32);
			y[l + 32] = d * (float)sc[i + 2] * (float)(q1 - 32);
			y[l + 64] = d * (float)sc[i + 4] * (float)(q2 - 32);
			y[l + 96] = d * (float)sc[i + 6] * (float)(q3 - 32);
		}
	}
}

static void dequantize_blocks(enum fs_dtype type, const uint8_t *src, float *dst, int64_t n)
{
	const struct fs_dtype_info *info = fs_dtype_info((int)type);
	void (*block)(const uint8_t *, float *);

	switch (type) {
	case FS_Q4_0:
		block = block_q4_0;
		break;
	case FS_Q4_1:
		block = block_q4_1;
		break;
	case FS_Q5_0:
		block = block_q5_0;
		break;
	case FS_Q5_1:
		block = block_q5_1;
		break;
	case FS_Q8_0:
		block = block_q8_0;
		break;
	case FS_Q4_K:
		block = block_q4_k;
		break;
	case FS_Q5_K:
		block = block_q5_k;
		break;
	case FS_Q6_K:
		block = block_q6_k;
		break;
	default:
		block = NULL;
		break;
	}
	FS_ASSERT(block != NULL && info != NULL && n % info->block_elems == 0);
	for (int64_t i = 0; i < n; i += info->block_elems, src += info->block_bytes)
		block(src, dst + i);
}

void fs_dequantize_row(enum fs_dtype type, const void *src, float *dst, int64_t n)
{
	const uint8_t *p = src;

	switch (type) {
	case FS_F32:
		memcpy(dst, src, (size_t)n * sizeof(float));
		break;
	case FS_F16:
		for (int64_t i = 0; i < n; i++)
			dst[i] = get_half(p + 2 * i);
		break;
	case FS_BF16:
		for (int64_t i = 0; i < n; i++)
			dst[i] = fs_bf16_to_f32(get_u16(p + 2 * i));
		break;
	default:
		dequantize_blocks(type, p, dst, n);
		break;
	}
}

static void put_u16(uint8_t *p, uint16_t v)
{
	p[0] = (uint8_t)v;
	p[1] = (uint8_t)(v >> 8);
}

/* The block's largest magnitude becomes ±127. */
static void quantize_q8_0(const float *x, uint8_t *b)
{
	float amax = 0;

	for (int j = 0; j < 32; j++)
		amax = fmaxf(amax, fabsf(x[j]));
	float d = amax / 127.0f, inv = d > 0 ? 1.0f / d : 0;

	put_u16(b, fs_f32_to_f16(d));
	for (int j = 0; j < 32; j++) {
		float q = roundf(x[j] * inv);

		b[2 + j] = (uint8_t)(int8_t)(q > 127 ? 127 : q >= -127 ? q : q < -127 ? -127 : 0);
	}
}

int fs_quantize_row(enum fs_dtype type, const float *src, void *dst, int64_t n)
{
	uint8_t *p = dst;

	switch (type) {
	case FS_F32:
		memcpy(dst, src, (size_t)n * sizeof(float));
		return FS_OK;
	case FS_F16:
		for (int64_t i = 0; i < n; i++)
			put_u16(p + 2 * i, fs_f32_to_f16(src[i]));
		return FS_OK;
	case FS_BF16:
		for (int64_t i = 0; i < n; i++)
			put_u16(p + 2 * i, fs_f32_to_bf16(src[i]));
		return FS_OK;
	case FS_Q8_0:
		if (n % 32 != 0)
			return FS_EINVAL;
		for (int64_t i = 0; i < n; i += 32, p += 34)
			quantize_q8_0(src + i, p);
		return FS_OK;
	default:
		return FS_ENOTSUP;
	}
}
