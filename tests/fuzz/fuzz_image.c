/* Fuzz target: bytes as a picture, with limits that keep a run short; what decodes is resized. */
#include "common/image/image.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
	static const struct fs_image_limits lim = {.max_pixels = 1 << 18, .max_side = 4096};
	struct fs_image_info info;
	struct fs_image im = {0}, small = {0};

	if (fs_image_probe(data, n, &lim, &info, NULL) != FS_OK)
		return 0;
	if (fs_image_decode(data, n, &lim, NULL, &im, NULL) != FS_OK)
		return 0;
	FS_ASSERT(im.width == info.width && im.height == info.height);
	if (fs_image_resize(&im, 28, 56, FS_BICUBIC, &small, NULL) == FS_OK)
		fs_image_finish(&small);
	fs_image_finish(&im);
	return 0;
}
