/* Shared by the compute tests: a small generator, random weights of every type, a device at a chosen level.
 */
#ifndef FS_TESTS_COMPUTE_UTIL_H
#define FS_TESTS_COMPUTE_UTIL_H

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/compute/cpu/cpu.h"

static uint64_t rng_state = 88172645463325252ULL;

static inline uint32_t rng(void)
{
	rng_state ^= rng_state << 13;
	rng_state ^= rng_state >> 7;
	rng_state ^= rng_state << 17;
	return (uint32_t)(rng_state >> 16);
}

static inline float uniform(float lo, float hi)
{
	return lo + (hi - lo) * ((float)(rng() >> 8) / 16777216.0f);
}

static inline void *need(size_t bytes)
{
	void *p = malloc(bytes ? bytes : 1);

	assert_non_null(p);
	return p;
}

static inline float *randoms(int64_t n)
{
	float *x = need((size_t)n * sizeof(*x));

	for (int64_t i = 0; i < n; i++)
		x[i] = uniform(-2.0f, 2.0f);
	return x;
}

static inline void put_half(uint8_t *p, float f)
{
	uint16_t h = fs_f32_to_f16(f);

	memcpy(p, &h, sizeof(h));
}

/* Offsets of the half-precision fields of a block, -1 where there is none. */
static inline void half_fields(enum fs_dtype type, int at[2])
{
	at[0] = 0;
	at[1] = -1;
	if (type == FS_Q4_1 || type == FS_Q5_1 || type == FS_Q4_K || type == FS_Q5_K)
		at[1] = 2;
	if (type == FS_Q6_K)
		at[0] = 208;
}

/* Rows of any type: random bits, with scales that keep values near 1. */
static inline uint8_t *random_weight(enum fs_dtype type, int64_t in, int64_t out)
{
	const struct fs_dtype_info *info = fs_dtype_info(type);
	size_t bytes = fs_dtype_row_bytes(type, in) * (size_t)out;
	uint8_t *w = need(bytes);
	int at[2];

	if (!fs_is_quantized(type)) {
		for (int64_t i = 0; i < in * out; i++) {
			float f = uniform(-1.0f, 1.0f);

			assert_int_equal(
			        fs_quantize_row(type, &f, w + (size_t)i * info->block_bytes, 1), FS_OK);
		}
		return w;
	}
	for (size_t i = 0; i < bytes; i++)
		w[i] = (uint8_t)rng();
	half_fields(type, at);
	for (size_t b = 0; b < bytes; b += info->block_bytes) {
		float scale = type == FS_Q8_0 || type == FS_Q4_K || type == FS_Q5_K || type == FS_Q6_K
		                      ? 0.002f
		                      : 0.06f;

		put_half(w + b + at[0], uniform(0.5f, 1.0f) * scale);
		if (at[1] >= 0)
			put_half(w + b + at[1], uniform(-1.0f, 1.0f) * scale);
	}
	return w;
}

static inline struct fs_dev *device(enum fs_cpu_level level, enum fs_precision precision, bool bf16)
{
	struct fs_dev_opts o = {.device = "cpu", .threads = 3, .precision = precision};
	struct fs_errbuf e;
	struct fs_dev *d = NULL;

	assert_int_equal(fs_cpu_open_level(&o, level, bf16, &d, &e), FS_OK);
	return d;
}

static inline enum fs_cpu_level best_level(void)
{
	bool bf16;

	return fs_cpu_detect(&bf16);
}

static inline void no_error(struct fs_dev *d)
{
	struct fs_errbuf e = {0};

	if (fs_dev_sync(d, &e))
		fail_msg("%s", e.text);
}

static inline void near(float got, double want, double tolerance, const char *what, int64_t at)
{
	if (!(fabs((double)got - want) <= tolerance))
		fail_msg("%s at %lld: got %.9g, want %.9g within %.3g", what, (long long)at, (double)got,
		        want, tolerance);
}

#endif
