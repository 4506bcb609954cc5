/*
 * dequant.c: weight rows of any readable type to f32, for one level. Pure functions, any thread. Layouts:
 * common/gguf.
 */
#include "common/compute/cpu/kernels.h"
#include "common/compute/cpu/vec.h"

void FS_LV(dequantize)(enum fs_dtype type, const void *src, float *dst, int64_t n)
{
	fs_dequantize_row(type, src, dst, n);
}
