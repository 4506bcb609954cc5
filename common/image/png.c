/*
 * PNG through libspng: every colour type and depth comes out as 8-bit RGB or RGBA. One context a call; any
 * thread. Refuses what the library refuses (damaged checksums, data that ends early); metadata is read up to
 * a bound and thrown away.
 */
#include "common/image/internal.h"

#include <spng.h>
#include <stdlib.h>

#define MAX_CHUNK ((size_t)16 << 20)  /* one chunk besides the pixels */
#define MAX_CHUNKS ((size_t)32 << 20) /* all of them, decompressed */
#define CANCEL_ROWS 32

static int refuse(struct fs_errbuf *e, int rc)
{
	return fs_fail(e, rc == SPNG_EMEM ? FS_ENOMEM : FS_EFORMAT, "%s", spng_strerror(rc));
}

static int open_png(const struct image_source *s, spng_ctx **out, struct spng_ihdr *ihdr, struct fs_errbuf *e)
{
	spng_ctx *ctx = spng_ctx_new(0);
	int rc;

	if (ctx == NULL)
		return fs_fail(e, FS_ENOMEM, "no memory");
	rc = spng_set_chunk_limits(ctx, MAX_CHUNK, MAX_CHUNKS);
	if (rc == 0)
		rc = spng_set_png_buffer(ctx, s->bytes, s->n);
	if (rc == 0)
		rc = spng_get_ihdr(ctx, ihdr);
	if (rc == 0 && (ihdr->width > INT32_MAX || ihdr->height > INT32_MAX))
		rc = SPNG_EUSER_WIDTH;
	if (rc != 0) {
		spng_ctx_free(ctx);
		return refuse(e, rc);
	}
	*out = ctx;
	return FS_OK;
}

/* Reads the header chunk alone; orientation is left to decode's caller until the size has passed the limits.
 */
int image_png_probe(const struct image_source *s, struct fs_image_info *info, struct fs_errbuf *e)
{
	spng_ctx *ctx = NULL;
	struct spng_ihdr ihdr;
	struct spng_exif exif;
	int err = open_png(s, &ctx, &ihdr, e);

	if (err != FS_OK)
		return err;
	info->width = (int)ihdr.width;
	info->height = (int)ihdr.height;
	if (spng_get_exif(ctx, &exif) == 0)
		info->orientation = image_exif_orientation((const uint8_t *)exif.data, exif.length);
	spng_ctx_free(ctx);
	return FS_OK;
}

static bool has_alpha(spng_ctx *ctx, const struct spng_ihdr *ihdr)
{
	struct spng_trns trns;

	return ihdr->color_type == SPNG_COLOR_TYPE_GRAYSCALE_ALPHA ||
	       ihdr->color_type == SPNG_COLOR_TYPE_TRUECOLOR_ALPHA || spng_get_trns(ctx, &trns) == 0;
}

/*
 * Row by row, so that a cancel is seen. Interlaced pictures come in passes that fill parts of rows, so with
 * alpha they need all of the RGBA picture at once (rgba_rows == height), others a single row of it.
 */
static int read_rows(spng_ctx *ctx, const struct image_source *s, struct fs_image *out, uint8_t *rgba,
        bool all_rows, struct fs_errbuf *e)
{
	size_t w = (size_t)out->width;
	struct spng_row_info at;
	unsigned n = 0;
	int rc;

	do {
		uint8_t *row, *to;

		if (n++ % CANCEL_ROWS == 0 && fs_cancelled(s->cancel))
			return fs_fail(e, FS_ECANCELLED, "cancelled");
		rc = spng_get_row_info(ctx, &at);
		if (rc != 0)
			break;
		row = out->rgb + at.row_num * w * 3;
		to = rgba == NULL ? row : all_rows ? rgba + at.row_num * w * 4 : rgba;
		rc = spng_decode_row(ctx, to, rgba == NULL ? w * 3 : w * 4);
		if (rgba != NULL && !all_rows && (rc == 0 || rc == SPNG_EOI))
			image_over_white(rgba, row, w);
	} while (rc == 0);
	if (rc != SPNG_EOI)
		return refuse(e, rc);
	if (all_rows)
		image_over_white(rgba, out->rgb, w * (size_t)out->height);
	return FS_OK;
}

static int read_pixels(spng_ctx *ctx, const struct image_source *s, const struct spng_ihdr *ihdr,
        struct fs_image *out, struct fs_errbuf *e)
{
	bool alpha = has_alpha(ctx, ihdr), all_rows = alpha && ihdr->interlace_method != 0;
	uint8_t *rgba = NULL;
	int rc, err;

	if (alpha) {
		rgba = malloc((size_t)out->width * 4 * (all_rows ? (size_t)out->height : 1));
		if (rgba == NULL)
			return fs_fail(e, FS_ENOMEM, "no memory");
	}
	rc = spng_decode_image(ctx, NULL, 0, alpha ? SPNG_FMT_RGBA8 : SPNG_FMT_RGB8,
	        SPNG_DECODE_PROGRESSIVE | (alpha ? SPNG_DECODE_TRNS : 0));
	err = rc != 0 ? refuse(e, rc) : read_rows(ctx, s, out, rgba, all_rows, e);
	free(rgba);
	return err;
}

int image_png_decode(const struct image_source *s, const struct fs_image_info *info, struct fs_image *out,
        struct fs_errbuf *e)
{
	spng_ctx *ctx = NULL;
	struct spng_ihdr ihdr;
	int err = open_png(s, &ctx, &ihdr, e);

	if (err != FS_OK)
		return err;
	err = image_alloc(out, info->width, info->height, e);
	if (err == FS_OK)
		err = read_pixels(ctx, s, &ihdr, out, e);
	spng_ctx_free(ctx);
	return err;
}
