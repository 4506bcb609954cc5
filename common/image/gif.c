/*
 * The first frame of a GIF, on its canvas, through giflib's record functions (nothing of the later frames is
 * read). One decoder a call; any thread. Refuses data that ends early and colours outside the palette.
 */
#include "common/image/internal.h"

#include <gif_lib.h>
#include <stdlib.h>
#include <string.h>

#define CANCEL_ROWS 64

struct reader {
	const struct image_source *s;
	size_t at;
	GifFileType *gif;
	int transparent; /* palette index, or -1 */
};

static int read_bytes(GifFileType *gif, GifByteType *to, int n)
{
	struct reader *r = gif->UserData;
	size_t k = FS_MIN((size_t)FS_MAX(n, 0), r->s->n - r->at);

	memcpy(to, r->s->bytes + r->at, k);
	r->at += k;
	return (int)k;
}

static int refuse(struct fs_errbuf *e, int code)
{
	const char *text = GifErrorString(code);

	return fs_fail(e, code == D_GIF_ERR_NOT_ENOUGH_MEM ? FS_ENOMEM : FS_EFORMAT, "%s",
	        text != NULL ? text : "its data ends early");
}

static int read_extension(struct reader *r, struct fs_errbuf *e)
{
	GifByteType *data;
	GraphicsControlBlock gcb;
	int code;

	if (DGifGetExtension(r->gif, &code, &data) != GIF_OK)
		return refuse(e, r->gif->Error);
	while (data != NULL) {
		if (code == GRAPHICS_EXT_FUNC_CODE && DGifExtensionToGCB(data[0], data + 1, &gcb) == GIF_OK)
			r->transparent = gcb.TransparentColor;
		if (DGifGetExtensionNext(r->gif, &data) != GIF_OK)
			return refuse(e, r->gif->Error);
	}
	return FS_OK;
}

/* Reads up to the first frame's description. */
static int find_frame(struct reader *r, struct fs_errbuf *e)
{
	GifRecordType type;
	int err = FS_OK;

	while (err == FS_OK) {
		if (DGifGetRecordType(r->gif, &type) != GIF_OK)
			return refuse(e, r->gif->Error);
		if (type == TERMINATE_RECORD_TYPE)
			return fs_fail(e, FS_EFORMAT, "there is no frame in it");
		if (type == IMAGE_DESC_RECORD_TYPE)
			return DGifGetImageDesc(r->gif) == GIF_OK ? FS_OK : refuse(e, r->gif->Error);
		if (type == EXTENSION_RECORD_TYPE)
			err = read_extension(r, e);
	}
	return err;
}

static int reader_open(struct reader *r, const struct image_source *s, struct fs_errbuf *e)
{
	int code = 0, err;

	*r = (struct reader){.s = s, .transparent = -1};
	r->gif = DGifOpen(r, read_bytes, &code);
	if (r->gif == NULL)
		return refuse(e, code);
	err = find_frame(r, e);
	if (err != FS_OK)
		DGifCloseFile(r->gif, NULL);
	return err;
}

/* Some writers leave the canvas at zero: the frame is the picture then. */
static void canvas_size(const GifFileType *gif, int *w, int *h)
{
	bool none = gif->SWidth < 1 || gif->SHeight < 1;

	*w = none ? gif->Image.Left + gif->Image.Width : gif->SWidth;
	*h = none ? gif->Image.Top + gif->Image.Height : gif->SHeight;
}

int image_gif_probe(const struct image_source *s, struct fs_image_info *info, struct fs_errbuf *e)
{
	struct reader r;
	int err = reader_open(&r, s, e);

	if (err != FS_OK)
		return err;
	canvas_size(r.gif, &info->width, &info->height);
	DGifCloseFile(r.gif, NULL);
	return FS_OK;
}

static int put_row(const struct reader *r, const ColorMapObject *map, const uint8_t *line, int y,
        struct fs_image *out, struct fs_errbuf *e)
{
	const GifImageDesc *d = &r->gif->Image;
	int left = d->Left, w = FS_MIN(d->Width, out->width - left);
	uint8_t *to;

	if (y + d->Top >= out->height)
		return FS_OK; /* frames may stick out of the canvas */
	to = out->rgb + ((size_t)(y + d->Top) * (size_t)out->width + (size_t)left) * 3;
	for (int x = 0; x < w; x++, to += 3) {
		if (line[x] == r->transparent)
			continue;
		if (line[x] >= map->ColorCount)
			return fs_fail(e, FS_EFORMAT, "a colour outside the palette");
		to[0] = map->Colors[line[x]].Red;
		to[1] = map->Colors[line[x]].Green;
		to[2] = map->Colors[line[x]].Blue;
	}
	return FS_OK;
}

/* The i-th stored row's place in an interlaced frame of h rows: every 8th from 0, every 8th from 4, every 4th
 * from 2, every 2nd from 1. */
static int interlaced_row(int i, int h)
{
	static const int first[] = {0, 4, 2, 1}, step[] = {8, 8, 4, 2};

	for (int pass = 0; pass < 4; pass++) {
		int rows = h <= first[pass] ? 0 : (h - first[pass] + step[pass] - 1) / step[pass];

		if (i < rows)
			return first[pass] + i * step[pass];
		i -= rows;
	}
	return h - 1;
}

static int read_rows(struct reader *r, struct fs_image *out, struct fs_errbuf *e)
{
	const GifImageDesc *d = &r->gif->Image;
	const ColorMapObject *map = d->ColorMap != NULL ? d->ColorMap : r->gif->SColorMap;
	uint8_t *line;
	int err = FS_OK;

	if (map == NULL)
		return fs_fail(e, FS_EFORMAT, "there is no palette");
	line = malloc((size_t)d->Width);
	if (line == NULL)
		return fs_fail(e, FS_ENOMEM, "no memory");
	for (int i = 0; i < d->Height && err == FS_OK; i++) {
		if (i % CANCEL_ROWS == 0 && fs_cancelled(r->s->cancel))
			err = fs_fail(e, FS_ECANCELLED, "cancelled");
		else if (DGifGetLine(r->gif, line, d->Width) != GIF_OK)
			err = refuse(e, r->gif->Error);
		else
			err = put_row(r, map, line, d->Interlace ? interlaced_row(i, d->Height) : i, out, e);
	}
	free(line);
	return err;
}

int image_gif_decode(const struct image_source *s, const struct fs_image_info *info, struct fs_image *out,
        struct fs_errbuf *e)
{
	struct reader r;
	int err = reader_open(&r, s, e);

	if (err != FS_OK)
		return err;
	if (r.gif->Image.Width < 1 || r.gif->Image.Height < 1 || r.gif->Image.Left < 0 ||
	        r.gif->Image.Top < 0 || r.gif->Image.Left >= info->width || r.gif->Image.Top >= info->height)
		err = fs_fail(e, FS_EFORMAT, "its first frame lies outside the canvas");
	else if ((uint64_t)r.gif->Image.Width * (uint64_t)r.gif->Image.Height > s->lim.max_pixels)
		err = fs_fail(e, FS_ELIMIT, "its first frame has %d x %d pixels, more than the limit",
		        r.gif->Image.Width, r.gif->Image.Height);
	else
		err = image_alloc(out, info->width, info->height, e);
	if (err == FS_OK) {
		memset(out->rgb, 0xff, (size_t)out->width * (size_t)out->height * 3);
		err = read_rows(&r, out, e);
	}
	DGifCloseFile(r.gif, NULL);
	return err;
}
