/*
 * image: encoded picture bytes in, RGB u8 out; and resizing. Recognises JPEG, PNG, WebP and GIF by their
 * first bytes, never by a name or media type. Owns nothing between calls; any thread. Limits are checked from
 * the header before pixels are allocated. A truncated or damaged picture is an error, never a half-grey one.
 */
#ifndef FS_COMMON_IMAGE_H
#define FS_COMMON_IMAGE_H

#include "common/base/base.h"

struct fs_image {
	uint8_t *rgb; /* [height][width][3], malloc'd; owned by the struct */
	int width, height;
};
void fs_image_finish(struct fs_image *im); /* frees rgb; zeroes */

enum fs_image_format { FS_IMAGE_UNKNOWN, FS_IMAGE_JPEG, FS_IMAGE_PNG, FS_IMAGE_WEBP, FS_IMAGE_GIF };

struct fs_image_limits {
	size_t max_bytes;    /* encoded; 0 = 64 MiB */
	uint64_t max_pixels; /* width * height; 0 = 64 million */
	int max_side;        /* 0 = 16384 */
};

struct fs_image_info {
	enum fs_image_format format;
	int width, height; /* as decoded, that is after EXIF orientation */
	int orientation;   /* EXIF 1..8; 1 when absent */
};

/* Reads the header alone: format, size, limits. FS_EFORMAT (unknown format: the text lists the known ones),
 * FS_ELIMIT (the text names the limit and the picture's size). Allocates next to nothing. */
int fs_image_probe(const void *bytes, size_t n, const struct fs_image_limits *lim, struct fs_image_info *out,
        struct fs_errbuf *e);

/*
 * Decodes to RGB: EXIF orientation applied; CMYK/YCCK JPEG converted (Adobe marker honoured); grey, palette,
 * 16-bit and alpha handled; alpha over white (round half up per channel); GIF: the first frame on its canvas,
 * transparent parts white. lim NULL = defaults. cancel may be NULL.
 */
int fs_image_decode(const void *bytes, size_t n, const struct fs_image_limits *lim, struct fs_cancel *cancel,
        struct fs_image *out, struct fs_errbuf *e);

enum fs_filter { FS_BILINEAR, FS_BICUBIC, FS_LANCZOS };
/*
 * Pillow's antialiased resampling (ImagingResample: separable, 22-bit fixed-point weights, u8 between the
 * passes): bit-identical to PIL.Image.resize of Pillow 13 on RGB. w, h >= 1. An unchanged axis is not
 * touched.
 */
int fs_image_resize(const struct fs_image *src, int w, int h, enum fs_filter filter, struct fs_image *out,
        struct fs_errbuf *e);

/* The same, giving up with FS_ECANCELLED within some milliseconds of the token's firing. cancel may be NULL.
 */
int fs_image_resize_cancellable(const struct fs_image *src, int w, int h, enum fs_filter filter,
        struct fs_cancel *cancel, struct fs_image *out, struct fs_errbuf *e);

#endif
