/*
 * PNG through libspng: every colour type and depth becomes 8-bit RGB, alpha over white, 16 bits rounded. One
 * context a call; any thread. Refuses what the library refuses (damaged checksums, data that ends early);
 * metadata is read up to a bound and thrown away.
 */
#include "common/image/internal.h"

#include <spng.h>
#include <stdlib.h>
#include <string.h>

#define MAX_CHUNK ((size_t)16 << 20)  /* one chunk besides the pixels */
#define MAX_CHUNKS ((size_t)32 << 20) /* all of them, decompressed */
#define PROBE_MAX ((size_t)4 << 20)   /* both, where many pictures may be looked at at once */
#define CANCEL_ROWS 32

static int refuse(struct fs_errbuf *e, int rc)
{
	return fs_fail(e, rc == SPNG_EMEM ? FS_ENOMEM : FS_EFORMAT, "%s", spng_strerror(rc));
}

static int open_png(const struct image_source *s, size_t max_chunk, size_t max_chunks, spng_ctx **out,
        struct spng_ihdr *ihdr, struct fs_errbuf *e)
{
	spng_ctx *ctx = spng_ctx_new(0);
	int rc;

	if (ctx == NULL)
		return fs_fail(e, FS_ENOMEM, "no memory");
	rc = spng_set_chunk_limits(ctx, max_chunk, max_chunks);
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

/* The orientation stands behind the header, among chunks that the library unpacks on its way: it is not
 * looked for in a picture that is too large anyway. */
int image_png_probe(const struct image_source *s, struct fs_image_info *info, struct fs_errbuf *e)
{
	spng_ctx *ctx = NULL;
	struct spng_ihdr ihdr;
	struct spng_exif exif;
	int err = open_png(s, PROBE_MAX, PROBE_MAX, &ctx, &ihdr, e);

	if (err != FS_OK)
		return err;
	info->width = (int)ihdr.width;
	info->height = (int)ihdr.height;
	if (image_check_size(s, info, NULL) == FS_OK && spng_get_exif(ctx, &exif) == 0)
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

/* How rows come out of the library and where they go. */
struct layout {
	enum spng_format format;
	size_t bytes;  /* a pixel: 3 RGB8, 4 RGBA8, 8 RGBA16 */
	bool all_rows; /* interlaced passes fill parts of rows: unless they land in the result, the whole
	                  picture is kept */
	uint8_t *rows; /* one row, or all; NULL for RGB8, which goes straight to the result */
};

static int layout_init(struct layout *l, spng_ctx *ctx, const struct spng_ihdr *ihdr, struct fs_errbuf *e)
{
	*l = (struct layout){.format = SPNG_FMT_RGB8, .bytes = 3};
	if (ihdr->bit_depth == 16)
		*l = (struct layout){.format = SPNG_FMT_RGBA16, .bytes = 8};
	else if (has_alpha(ctx, ihdr))
		*l = (struct layout){.format = SPNG_FMT_RGBA8, .bytes = 4};
	if (l->bytes == 3)
		return FS_OK;
	l->all_rows = ihdr->interlace_method != 0;
	l->rows = malloc(l->bytes * ihdr->width * (l->all_rows ? ihdr->height : 1));
	return l->rows != NULL ? FS_OK : fs_fail(e, FS_ENOMEM, "no memory");
}

/* RGBA16 (the machine's byte order) to RGBA8 in place, rounded to the nearest. */
static void narrow(uint8_t *row, size_t n)
{
	for (size_t i = 0; i < n * 4; i++) {
		uint16_t v;

		memcpy(&v, row + 2 * i, 2);
		row[i] = (uint8_t)((v * 255u + 32767u) / 65535u);
	}
}

static void finish_row(const struct layout *l, uint8_t *from, uint8_t *to, size_t w)
{
	if (l->bytes == 8)
		narrow(from, w);
	image_over_white(from, to, w);
}

/* Row by row, so that a cancel is seen. */
static int read_rows(spng_ctx *ctx, const struct image_source *s, const struct layout *l,
        struct fs_image *out, struct fs_errbuf *e)
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
		to = l->rows == NULL ? row : l->rows + (l->all_rows ? at.row_num * w * l->bytes : 0);
		rc = spng_decode_row(ctx, to, w * l->bytes);
		if (l->rows != NULL && !l->all_rows && (rc == 0 || rc == SPNG_EOI))
			finish_row(l, to, row, w);
	} while (rc == 0);
	if (rc != SPNG_EOI)
		return refuse(e, rc);
	for (size_t y = 0; l->all_rows && y < (size_t)out->height; y++)
		finish_row(l, l->rows + y * w * l->bytes, out->rgb + y * w * 3, w);
	/* the last checksums lie behind the last row */
	rc = spng_decode_chunks(ctx);
	return rc != 0 ? refuse(e, rc) : FS_OK;
}

static int read_pixels(spng_ctx *ctx, const struct image_source *s, const struct spng_ihdr *ihdr,
        struct fs_image *out, struct fs_errbuf *e)
{
	struct layout l;
	int err = layout_init(&l, ctx, ihdr, e), rc;

	if (err != FS_OK)
		return err;
	rc = spng_decode_image(
	        ctx, NULL, 0, l.format, SPNG_DECODE_PROGRESSIVE | (l.bytes == 3 ? 0 : SPNG_DECODE_TRNS));
	err = rc != 0 ? refuse(e, rc) : read_rows(ctx, s, &l, out, e);
	free(l.rows);
	return err;
}

int image_png_decode(const struct image_source *s, const struct fs_image_info *info, struct fs_image *out,
        struct fs_errbuf *e)
{
	spng_ctx *ctx = NULL;
	struct spng_ihdr ihdr;
	int err = open_png(s, MAX_CHUNK, MAX_CHUNKS, &ctx, &ihdr, e);

	if (err != FS_OK)
		return err;
	err = image_alloc(out, info->width, info->height, e);
	if (err == FS_OK)
		err = read_pixels(ctx, s, &ihdr, out, e);
	spng_ctx_free(ctx);
	return err;
}
