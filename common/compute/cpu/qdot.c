/*
 * qdot.c: products of quantised weights with int8 activations, for one level. Integer sums inside a block of
 * 32, f32 across blocks. A block of weights is unpacked once for up to four activation rows. Level 0 is the
 * reference: the same numbers in f32. 256-bit registers serve both levels: memory is the limit, and the
 * 512-bit level gains by its dot instruction (VNNI). Pure functions, any thread. Block layouts:
 * common/gguf/gguf.h, llama.cpp's ggml-common.h.
 */
#include "common/compute/cpu/kernels.h"
#include "common/compute/cpu/unpack.h"
#include "common/compute/cpu/vec.h"

#if FS_LEVEL == 0

void FS_LV(few_q8)(const struct fs_few *f)
{
	for (int64_t o = f->o0; o < f->o1; o++) {
		fs_dequantize_row(f->type, f->w + (size_t)o * f->row_bytes, f->tmp, f->in);
		for (int r = 0; r < f->n; r++) {
			const int8_t *q = f->xq.q + r * f->in;
			const float *d = f->xq.d + r * f->in / 32;
			float *y = f->y + r * f->ldy + o;
			float sum = 0.0f;

			for (int64_t i = 0; i < f->in; i++)
				sum += f->tmp[i] * (d[i / 32] * (float)q[i]);
			*y = sum + (f->bias ? f->bias[o] : 0.0f) + (f->add ? *y : 0.0f);
		}
	}
}

#else

#define MAX_ROWS 4

/* One weight row against `rows` activation rows: what a block's code gets. */
struct dot {
	const uint8_t *w;
	int64_t in;
	const int8_t *q;
	const float *d, *s, *s16;
	float *out; /* [rows] */
};

/* Sums of four products of u (0..128) and s (-127..127) in each of eight lanes. */
FS_INLINE __m256i dot32(__m256i u, __m256i s)
{
#if FS_LEVEL == 2
	return _mm256_dpbusd_epi32(_mm256_setzero_si256(), u, s);
#else
	return _mm256_madd_epi16(_mm256_maddubs_epi16(u, s), _mm256_set1_epi16(1));
#endif
}

FS_INLINE __m256 scaled(__m256i p, float d, __m256 acc)
{
	return _mm256_fmadd_ps(_mm256_cvtepi32_ps(p), _mm256_set1_ps(d), acc);
}

FS_INLINE float sum8(__m256 a)
{
	__m128 s = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));

	s = _mm_add_ps(s, _mm_movehl_ps(s, s));
	return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}

/*
 * Sums that do not wait for each other: a fused multiply-add takes four cycles, so one row of activations is
 * spread over four sums, two rows over two each. `way` is a constant in 0..WAYS(rows)-1.
 */
#define WAYS(rows) ((rows) == 1 ? 4 : (rows) == 2 ? 2 : 1)
struct sums {
	__m256 acc[MAX_ROWS][4];
	float low[MAX_ROWS][4];
};

FS_INLINE void sums_clear(struct sums *s, int rows)
{
	FS_UNROLL
	for (int r = 0; r < rows; r++)
		FS_UNROLL
	for (int k = 0; k < 4; k++) {
		s->acc[r][k] = _mm256_setzero_ps();
		s->low[r][k] = 0.0f;
	}
}

FS_INLINE void sums_store(const struct sums *s, float *out, int rows)
{
	const int ways = WAYS(rows);

	FS_UNROLL
	for (int r = 0; r < rows; r++) {
		__m256 a = s->acc[r][0];
		float low = s->low[r][0];

		FS_UNROLL
		for (int k = 1; k < ways; k++) {
			a = _mm256_add_ps(a, s->acc[r][k]);
			low += s->low[r][k];
		}
		out[r] = sum8(a) + low;
	}
}

/* One block of 32; type and bytes are constants. */
FS_INLINE void block_small(
        enum fs_dtype type, int bytes, const struct dot *t, int64_t b, struct sums *s, int way, int rows)
{
	float d, m;
	__m256i u = small_quants(type, t->w + b * bytes, &d, &m);

	FS_UNROLL
	for (int r = 0; r < rows; r++) {
		int64_t at = r * (t->in / 32) + b;

		s->acc[r][way] = scaled(dot32(u, load32(t->q + 32 * at)), d * t->d[at], s->acc[r][way]);
		s->low[r][way] += m * t->s[at];
	}
}

FS_INLINE void block_q8_0(const struct dot *t, int64_t b, struct sums *s, int way, int rows)
{
	const uint8_t *w = t->w + b * 34;
	float d = half(w);
	__m256i v = load32(w + 2), u = _mm256_abs_epi8(v);

	FS_UNROLL
	for (int r = 0; r < rows; r++) {
		int64_t at = r * (t->in / 32) + b;
		__m256i x = _mm256_sign_epi8(load32(t->q + 32 * at), v);

		s->acc[r][way] = scaled(dot32(u, x), d * t->d[at], s->acc[r][way]);
	}
}

FS_INLINE void dot_small(enum fs_dtype type, int bytes, const struct dot *t, int rows)
{
	struct sums s;
	int64_t b = 0, n = t->in / 32;
	const int ways = WAYS(rows);

	sums_clear(&s, rows);
	for (; b + ways <= n; b += ways)
		FS_UNROLL
	for (int way = 0; way < ways; way++) {
		if (type == FS_Q8_0)
			block_q8_0(t, b + way, &s, way, rows);
		else
			block_small(type, bytes, t, b + way, &s, way, rows);
	}
	for (; b < n; b++) {
		if (type == FS_Q8_0)
			block_q8_0(t, b, &s, 0, rows);
		else
			block_small(type, bytes, t, b, &s, 0, rows);
	}
	sums_store(&s, t->out, rows);
}

/* Q4_K and Q5_K: value = d·scale·q - dmin·min over eight groups of 32. */
FS_INLINE void dot_k(bool five, const struct dot *t, int rows)
{
	struct sums s;
	__m256 low[MAX_ROWS];
	const uint8_t *w = t->w;

	sums_clear(&s, rows);
	FS_UNROLL
	for (int r = 0; r < rows; r++)
		low[r] = _mm256_setzero_ps();
	for (int64_t b = 0; b < t->in / 256; b++, w += five ? 176 : 144) {
		float k[MAX_ROWS][8];
		__m256 scale, min;
		__m256i high = five ? load32(w + 16) : _mm256_setzero_si256();

		scales_k(w + 4, &scale, &min);
		scale = _mm256_mul_ps(scale, _mm256_set1_ps(half(w)));
		min = _mm256_mul_ps(min, _mm256_set1_ps(half(w + 2)));
		FS_UNROLL
		for (int r = 0; r < rows; r++) {
			int64_t at = r * (t->in / 32) + 8 * b;

			_mm256_storeu_ps(k[r], _mm256_mul_ps(scale, _mm256_loadu_ps(t->d + at)));
			low[r] = _mm256_fnmadd_ps(min, _mm256_loadu_ps(t->s + at), low[r]);
		}
		FS_UNROLL
		for (int j = 0; j < 8; j++) {
			__m256i u = k_quants(five, w + (five ? 48 : 16), high, j);

			FS_UNROLL
			for (int r = 0; r < rows; r++) {
				__m256i x = load32(t->q + r * t->in + 256 * b + 32 * j);
				__m256 *acc = &s.acc[r][j % WAYS(rows)];

				*acc = scaled(dot32(u, x), k[r][j], *acc);
			}
		}
	}
	FS_UNROLL
	for (int r = 0; r < rows; r++)
		s.acc[r][0] = _mm256_add_ps(s.acc[r][0], low[r]);
	sums_store(&s, t->out, rows);
}

/*
 * Keeps an array in memory, from where a multiply-add takes one number for all lanes at no cost; left alone,
 * compilers keep it in a register and pay two shuffles a number, of which Q6_K has enough (Q4_K is faster
 * with them).
 */
#define IN_MEMORY(array) __asm__("" : "+m"(array))

/* Scales 2j and 2j + 1 of sixteen, as 16-bit numbers for the halves of a group of 32. */
FS_INLINE __m256i pair_of_scales(__m128i scales, int j)
{
	__m128i pick = _mm_add_epi8(
	        _mm_set1_epi8((char)(2 * j)), _mm_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1));

	return _mm256_cvtepi8_epi16(_mm_shuffle_epi8(scales, pick));
}

/* Q6_K: value = d·scale·(q - 32), a scale (int8) for 16 elements. The 32 is taken off by the sums of the
 * activations. */
FS_INLINE void dot_q6_k(const struct dot *t, int rows)
{
	struct sums s;
	__m256 low[MAX_ROWS];
	const uint8_t *w = t->w;

	sums_clear(&s, rows);
	FS_UNROLL
	for (int r = 0; r < rows; r++)
		low[r] = _mm256_setzero_ps();
	for (int64_t b = 0; b < t->in / 256; b++, w += 210) {
		__m128i scales = _mm_loadu_si128((const __m128i *)(const void *)(w + 192));
		__m256 d = _mm256_set1_ps(half(w + 208)), d32 = _mm256_mul_ps(d, _mm256_set1_ps(-32.0f));
		__m256 lo = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(scales)), d32);
		__m256 hi = _mm256_mul_ps(
		        _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(scales, 8))), d32);
		float k[MAX_ROWS][8];

		FS_UNROLL
		for (int r = 0; r < rows; r++) {
			const float *sums16 = t->s16 + r * (t->in / 16) + 16 * b;

			_mm256_storeu_ps(
			        k[r], _mm256_mul_ps(d, _mm256_loadu_ps(t->d + r * (t->in / 32) + 8 * b)));
			low[r] = _mm256_fmadd_ps(lo, _mm256_loadu_ps(sums16), low[r]);
			low[r] = _mm256_fmadd_ps(hi, _mm256_loadu_ps(sums16 + 8), low[r]);
			IN_MEMORY(k[r]);
		}
		FS_UNROLL
		for (int j = 0; j < 8; j++) {
			__m256i u = six_bits(w, j), sc = pair_of_scales(scales, j);

			FS_UNROLL
			for (int r = 0; r < rows; r++) {
				__m256i x = load32(t->q + r * t->in + 256 * b + 32 * j);
				__m256i p = _mm256_madd_epi16(_mm256_maddubs_epi16(u, x), sc);
				__m256 *acc = &s.acc[r][j % WAYS(rows)];

				*acc = scaled(p, k[r][j], *acc);
			}
		}
	}
	FS_UNROLL
	for (int r = 0; r < rows; r++)
		s.acc[r][0] = _mm256_add_ps(s.acc[r][0], low[r]);
	sums_store(&s, t->out, rows);
}

FS_INLINE void dot_rows(enum fs_dtype type, const struct dot *t, int rows)
{
	switch (type) {
	case FS_Q8_0:
		dot_small(FS_Q8_0, 34, t, rows);
		break;
	case FS_Q4_0:
		dot_small(FS_Q4_0, 18, t, rows);
		break;
	case FS_Q4_1:
		dot_small(FS_Q4_1, 20, t, rows);
		break;
	case FS_Q5_0:
		dot_small(FS_Q5_0, 22, t, rows);
		break;
	case FS_Q5_1:
		dot_small(FS_Q5_1, 24, t, rows);
		break;
	case FS_Q4_K:
		dot_k(false, t, rows);
		break;
	case FS_Q5_K:
		dot_k(true, t, rows);
		break;
	default:
		dot_q6_k(t, rows);
		break;
	}
}

static void dot_any(enum fs_dtype type, const struct dot *t, int rows)
{
	switch (rows) {
	case 1:
		dot_rows(type, t, 1);
		break;
	case 2:
		dot_rows(type, t, 2);
		break;
	case 3:
		dot_rows(type, t, 3);
		break;
	default:
		dot_rows(type, t, 4);
		break;
	}
}

void FS_LV(few_q8)(const struct fs_few *f)
{
	for (int64_t o = f->o0; o < f->o1; o++) {
		for (int r = 0; r < f->n; r += MAX_ROWS) {
			int rows = FS_MIN(MAX_ROWS, f->n - r);
			float out[MAX_ROWS];
			struct dot t = {.w = f->w + (size_t)o * f->row_bytes,
			        .in = f->in,
			        .q = f->xq.q + r * f->in,
			        .d = f->xq.d + r * f->in / 32,
			        .s = f->xq.s + r * f->in / 32,
			        .s16 = f->xq.s16 + r * f->in / 16,
			        .out = out};

			dot_any(f->type, &t, rows);
			for (int k = 0; k < rows; k++) {
				float *y = f->y + (r + k) * f->ldy + o;

				*y = out[k] + (f->bias ? f->bias[o] : 0.0f) + (f->add ? *y : 0.0f);
			}
		}
	}
}

#endif
