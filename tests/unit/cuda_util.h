/* Shared by the tests of CUDA kernels that read weights: a weight of random bits, as in the file, as numbers
 * and packed. Memory is of exact size, so that a sanitizer sees every access outside. */
#ifndef FS_TESTS_CUDA_UTIL_H
#define FS_TESTS_CUDA_UTIL_H

#include "compute_util.h"

#include "common/compute/cuda/launch.h"
#include "tests/simt/launches.h"

static const enum fs_dtype all_types[] = {
        FS_F32, FS_F16, FS_BF16, FS_Q8_0, FS_Q4_0, FS_Q4_1, FS_Q5_0, FS_Q5_1, FS_Q4_K, FS_Q5_K, FS_Q6_K};

/* Filled with 0xff, as junk of a kind that shows. */
static inline void *device_memory(size_t bytes)
{
	void *p = NULL;

	assert_int_equal(posix_memalign(&p, 64, bytes ? bytes : 1), 0);
	memset(p, 0xff, bytes);
	return p;
}

struct weight {
	enum fs_dtype type;
	int64_t in, out;
	uint8_t *file;
	float *numbers; /* [out][in] by the reference */
	uint8_t *packed;
	size_t packed_bytes;
};

static inline struct weight weight_make(enum fs_dtype type, int64_t in, int64_t out)
{
	struct weight w = {.type = type, .in = in, .out = out, .file = random_weight(type, in, out)};
	size_t row = fs_dtype_row_bytes(type, in);

	w.numbers = need((size_t)(in * out) * sizeof(float));
	for (int64_t o = 0; o < out; o++)
		fs_dequantize_row(type, w.file + (size_t)o * row, w.numbers + o * in, in);
	w.packed_bytes = fs_cuk_packed_bytes(type, in, out);
	w.packed = device_memory(w.packed_bytes);
	assert_int_equal(fs_cuk_pack(NULL, type, w.file, 0, out, w.packed, in, out), 0);
	return w;
}

static inline void weight_drop(struct weight *w)
{
	free(w->file);
	free(w->numbers);
	free(w->packed);
}

#endif
