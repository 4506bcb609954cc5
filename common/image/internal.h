/* image internals, shared by the files of this folder alone. */
#ifndef FS_IMAGE_INTERNAL_H
#define FS_IMAGE_INTERNAL_H

#include "common/image/image.h"

/* The encoded picture and what its reader may use. Limits are resolved: no zeros. */
struct image_source {
	const uint8_t *bytes;
	size_t n;
	struct fs_image_limits lim;
	struct fs_cancel *cancel;
};

/*
 * One pair a format. probe fills info (sizes as stored, before orientation) and allocates next to nothing.
 * decode gives the pixels as stored; info is what probe found and has passed the limits. Errors carry the
 * reason alone; decode.c puts the context in front.
 */
int image_jpeg_probe(const struct image_source *s, struct fs_image_info *info, struct fs_errbuf *e);
int image_jpeg_decode(const struct image_source *s, const struct fs_image_info *info, struct fs_image *out,
        struct fs_errbuf *e);
int image_png_probe(const struct image_source *s, struct fs_image_info *info, struct fs_errbuf *e);
int image_png_decode(const struct image_source *s, const struct fs_image_info *info, struct fs_image *out,
        struct fs_errbuf *e);
int image_webp_probe(const struct image_source *s, struct fs_image_info *info, struct fs_errbuf *e);
int image_webp_decode(const struct image_source *s, const struct fs_image_info *info, struct fs_image *out,
        struct fs_errbuf *e);
int image_gif_probe(const struct image_source *s, struct fs_image_info *info, struct fs_errbuf *e);
int image_gif_decode(const struct image_source *s, const struct fs_image_info *info, struct fs_image *out,
        struct fs_errbuf *e);

/* Whether info's size is within the limits: before a reader goes beyond the header. */
int image_check_size(const struct image_source *s, const struct fs_image_info *info, struct fs_errbuf *e);

/* Orientation 1..8 of an EXIF block, with or without the "Exif\0\0" in front; 1 when absent or damaged. */
int image_exif_orientation(const uint8_t *exif, size_t n);

/* Allocates out->rgb for w x h; sizes are positive and within the limits. */
int image_alloc(struct fs_image *out, int w, int h, struct fs_errbuf *e);
/* n pixels RGBA over white, rounded to the nearest. */
void image_over_white(const uint8_t *rgba, uint8_t *rgb, size_t n);

#endif
