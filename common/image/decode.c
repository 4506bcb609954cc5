/*
 * Which format, within which limits, turned which way. Stateless, any thread. Refuses unknown formats and
 * sizes over the limits before a pixel is allocated; a picture that fails half-way leaves nothing behind.
 */
#include "common/image/internal.h"

#include <stdlib.h>
#include <string.h>

#define DEFAULT_MAX_BYTES ((size_t)64 << 20)
#define DEFAULT_MAX_PIXELS 64000000
#define DEFAULT_MAX_SIDE 16384
#define TILE 64 /* pixels a side, for turning */

struct codec {
	const char *name;
	int (*probe)(const struct image_source *s, struct fs_image_info *info, struct fs_errbuf *e);
	int (*decode)(const struct image_source *s, const struct fs_image_info *info, struct fs_image *out,
	        struct fs_errbuf *e);
};

static const struct codec codecs[] = {
        [FS_IMAGE_UNKNOWN] = {"unknown", NULL, NULL},
        [FS_IMAGE_JPEG] = {"JPEG", image_jpeg_probe, image_jpeg_decode},
        [FS_IMAGE_PNG] = {"PNG", image_png_probe, image_png_decode},
        [FS_IMAGE_WEBP] = {"WebP", image_webp_probe, image_webp_decode},
        [FS_IMAGE_GIF] = {"GIF", image_gif_probe, image_gif_decode},
};

void fs_image_finish(struct fs_image *im)
{
	free(im->rgb);
	memset(im, 0, sizeof(*im));
}

int image_alloc(struct fs_image *out, int w, int h, struct fs_errbuf *e)
{
	size_t bytes;

	FS_ASSERT(w > 0 && h > 0 && out->rgb == NULL);
	if (!fs_mul_size((size_t)w, (size_t)h, &bytes) || !fs_mul_size(bytes, 3, &bytes))
		return fs_fail(e, FS_ELIMIT, "%d x %d pixels are too many", w, h);
	out->rgb = malloc(bytes);
	if (out->rgb == NULL)
		return fs_fail(e, FS_ENOMEM, "no memory for %d x %d pixels", w, h);
	out->width = w;
	out->height = h;
	return FS_OK;
}

void image_over_white(const uint8_t *rgba, uint8_t *rgb, size_t n)
{
	for (size_t i = 0; i < n; i++, rgba += 4, rgb += 3) {
		unsigned a = rgba[3], white = 255 * (255 - a) + 127;

		for (int c = 0; c < 3; c++)
			rgb[c] = (uint8_t)((rgba[c] * a + white) / 255);
	}
}

/* ---- recognising ---- */

static bool starts(const uint8_t *b, size_t n, size_t at, const char *magic, size_t m)
{
	return n >= at + m && memcmp(b + at, magic, m) == 0;
}

static enum fs_image_format recognise(const uint8_t *b, size_t n)
{
	if (starts(b, n, 0, "\xff\xd8\xff", 3))
		return FS_IMAGE_JPEG;
	if (starts(b, n, 0, "\x89PNG\r\n\x1a\n", 8))
		return FS_IMAGE_PNG;
	if (starts(b, n, 0, "RIFF", 4) && starts(b, n, 8, "WEBP", 4))
		return FS_IMAGE_WEBP;
	if (starts(b, n, 0, "GIF87a", 6) || starts(b, n, 0, "GIF89a", 6))
		return FS_IMAGE_GIF;
	return FS_IMAGE_UNKNOWN;
}

/* The name of a format that people often send and that is not read; NULL else. */
static const char *foreign_name(const uint8_t *b, size_t n)
{
	static const struct {
		size_t at;
		const char *magic;
		size_t m;
		const char *name;
	} known[] = {
	        {0, "BM", 2, "BMP"},
	        {0, "II*\0", 4, "TIFF"},
	        {0, "MM\0*", 4, "TIFF"},
	        {4, "ftypavif", 8, "AVIF"},
	        {4, "ftypheic", 8, "HEIC"},
	        {4, "ftypmif1", 8, "HEIF"},
	        {0, "\0\0\0\x0cJXL ", 8, "JPEG XL"},
	        {0, "<svg", 4, "SVG"},
	        {0, "%PDF", 4, "PDF"},
	};

	for (size_t i = 0; i < FS_ARRAY_LEN(known); i++)
		if (starts(b, n, known[i].at, known[i].magic, known[i].m))
			return known[i].name;
	return NULL;
}

static int unknown_format(const uint8_t *b, size_t n, struct fs_errbuf *e)
{
	const char *name = foreign_name(b, n);

	if (name != NULL)
		return fs_fail(
		        e, FS_EFORMAT, "the picture is a %s file; JPEG, PNG, WebP and GIF can be read", name);
	return fs_fail(e, FS_EFORMAT, "not a picture in a known format; JPEG, PNG, WebP and GIF can be read");
}

int image_check_size(const struct image_source *s, const struct fs_image_info *i, struct fs_errbuf *e)
{
	const struct fs_image_limits *lim = &s->lim;

	if (i->width < 1 || i->height < 1)
		return fs_fail(e, FS_EFORMAT, "the picture has no pixels (%d x %d)", i->width, i->height);
	if (i->width > lim->max_side || i->height > lim->max_side)
		return fs_fail(e, FS_ELIMIT, "the picture has %d x %d pixels; a side may have at most %d",
		        i->width, i->height, lim->max_side);
	if ((uint64_t)i->width * (uint64_t)i->height > lim->max_pixels)
		return fs_fail(e, FS_ELIMIT,
		        "the picture has %d x %d pixels; at most %llu in all are allowed", i->width,
		        i->height, (unsigned long long)lim->max_pixels);
	return FS_OK;
}

static void source_init(struct image_source *s, const void *bytes, size_t n,
        const struct fs_image_limits *lim, struct fs_cancel *cancel)
{
	*s = (struct image_source){.bytes = bytes, .n = n, .cancel = cancel};
	if (lim != NULL)
		s->lim = *lim;
	if (s->lim.max_bytes == 0)
		s->lim.max_bytes = DEFAULT_MAX_BYTES;
	if (s->lim.max_pixels == 0)
		s->lim.max_pixels = DEFAULT_MAX_PIXELS;
	if (s->lim.max_side == 0)
		s->lim.max_side = DEFAULT_MAX_SIDE;
}

/* info's sizes are as stored. */
static int probe_source(const struct image_source *s, struct fs_image_info *info, struct fs_errbuf *e)
{
	int err;

	*info = (struct fs_image_info){.orientation = 1};
	if (s->n > s->lim.max_bytes)
		return fs_fail(e, FS_ELIMIT, "the picture has %zu bytes; at most %zu are allowed", s->n,
		        s->lim.max_bytes);
	info->format = s->n == 0 ? FS_IMAGE_UNKNOWN : recognise(s->bytes, s->n);
	if (info->format == FS_IMAGE_UNKNOWN)
		return s->n == 0 ? fs_fail(e, FS_EFORMAT, "the picture is empty")
		                 : unknown_format(s->bytes, s->n, e);
	err = codecs[info->format].probe(s, info, e);
	if (err != FS_OK)
		return fs_fail_prefix(e, err, "could not decode the %s picture", codecs[info->format].name);
	return image_check_size(s, info, e);
}

static bool swaps_sides(int orientation)
{
	return orientation >= 5;
}

int fs_image_probe(const void *bytes, size_t n, const struct fs_image_limits *lim, struct fs_image_info *out,
        struct fs_errbuf *e)
{
	struct image_source s;
	struct fs_image_info info;
	int err;

	source_init(&s, bytes, n, lim, NULL);
	err = probe_source(&s, &info, e);
	if (err != FS_OK)
		return err;
	*out = info;
	if (swaps_sides(info.orientation)) {
		out->width = info.height;
		out->height = info.width;
	}
	return FS_OK;
}

/* ---- orientation ---- */

/*
 * EXIF orientation as a walk over the stored picture: the pixel (x, y) of the result is stored at start +
 * x·right + y·down (in pixels).
 */
struct walk {
	int64_t start, right, down;
};

static struct walk walk_of(int orientation, int64_t w, int64_t h)
{
	switch (orientation) {
	case 2:
		return (struct walk){w - 1, -1, w};
	case 3:
		return (struct walk){w * h - 1, -1, -w};
	case 4:
		return (struct walk){(h - 1) * w, 1, -w};
	case 5:
		return (struct walk){0, w, 1};
	case 6:
		return (struct walk){(h - 1) * w, -w, 1};
	case 7:
		return (struct walk){w * h - 1, -w, -1};
	case 8:
		return (struct walk){w - 1, w, -1};
	default:
		return (struct walk){0, 1, w};
	}
}

static void turn_tile(const struct fs_image *src, const struct walk *k, struct fs_image *dst, int x0, int y0)
{
	int x1 = FS_MIN(x0 + TILE, dst->width), y1 = FS_MIN(y0 + TILE, dst->height);

	for (int y = y0; y < y1; y++) {
		const uint8_t *from = src->rgb + (k->start + x0 * k->right + y * k->down) * 3;
		uint8_t *to = dst->rgb + ((size_t)y * (size_t)dst->width + (size_t)x0) * 3;

		for (int x = x0; x < x1; x++, to += 3) {
			to[0] = from[0];
			to[1] = from[1];
			to[2] = from[2];
			if (x + 1 < x1)
				from += k->right * 3;
		}
	}
}

/* Replaces im by the picture turned upright. */
static int turn(struct fs_image *im, int orientation, struct fs_cancel *cancel, struct fs_errbuf *e)
{
	struct walk k = walk_of(orientation, im->width, im->height);
	struct fs_image dst = {0};
	int err;

	if (orientation == 1)
		return FS_OK;
	err = swaps_sides(orientation) ? image_alloc(&dst, im->height, im->width, e)
	                               : image_alloc(&dst, im->width, im->height, e);
	if (err != FS_OK)
		return err;
	for (int y = 0; y < dst.height; y += TILE) {
		if (fs_cancelled(cancel)) {
			fs_image_finish(&dst);
			return fs_fail(e, FS_ECANCELLED, "cancelled");
		}
		for (int x = 0; x < dst.width; x += TILE)
			turn_tile(im, &k, &dst, x, y);
	}
	fs_image_finish(im);
	*im = dst;
	return FS_OK;
}

int fs_image_decode(const void *bytes, size_t n, const struct fs_image_limits *lim, struct fs_cancel *cancel,
        struct fs_image *out, struct fs_errbuf *e)
{
	struct image_source s;
	struct fs_image_info info;
	struct fs_image im = {0};
	int err;

	source_init(&s, bytes, n, lim, cancel);
	err = probe_source(&s, &info, e);
	if (err != FS_OK)
		return err;
	if (fs_cancelled(cancel))
		return fs_fail(e, FS_ECANCELLED, "cancelled");
	err = codecs[info.format].decode(&s, &info, &im, e);
	if (err == FS_OK)
		err = turn(&im, info.orientation, cancel, e);
	if (err == FS_OK)
		*out = im;
	else
		fs_image_finish(&im);
	if (err == FS_OK || err == FS_ECANCELLED)
		return err;
	return fs_fail_prefix(e, err, "could not decode the %s picture", codecs[info.format].name);
}
