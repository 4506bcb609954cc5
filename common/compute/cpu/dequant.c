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

/* By way of f32 in pieces that stay in the first cache. */
void FS_LV(dequantize_bf16)(enum fs_dtype type, const void *src, uint16_t *dst, int64_t n)
{
	const struct fs_dtype_info *info = fs_dtype_info(type);
	const uint8_t *p = src;
	float tmp[1024];

	for (int64_t i = 0; i < n; i += 1024) {
		int64_t m = FS_MIN(1024, n - i);

		FS_LV(dequantize)(type, p, tmp, m);
		FS_LV(to_bf16)(tmp, dst + i, m);
		p += (size_t)(m / info->block_elems) * info->block_bytes;
	}
}
