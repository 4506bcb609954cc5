/*
 * The model's own published preprocessing: the picture is stretched (never letterboxed) to sides that are
 * multiples of one merged cell, by Pillow's bicubic filter, then normalised and cut into patches. Runs on the
 * caller's thread; the cancel token is looked at every few rows. Refuses pictures that are 200 times longer
 * than wide.
 */
#include "remote/encoder/tower.h"

#include "common/image/image.h"
#include "common/wire/wire.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define MAX_RATIO 200
#define MAX_SIDE 65535 /* of the resized picture */

void patches_finish(struct patches *p)
{
	free(p->data);
	memset(p, 0, sizeof(*p));
}

/* nearbyint rounds halves to even, as Python's round() does in the published code. */
static double to_multiple(double side, int factor)
{
	return nearbyint(side / factor) * factor;
}

int smart_resize(int w, int h, int factor, int64_t min_pixels, int64_t max_pixels, int *out_w, int *out_h,
        struct fs_errbuf *e)
{
	double rw, rh, beta;

	if ((double)FS_MAX(w, h) / FS_MIN(w, h) > MAX_RATIO)
		return fs_fail(e, FS_EINVAL,
		        "the picture has %d x %d pixels; a side may be at most %d times as long as the other",
		        w, h, MAX_RATIO);
	rw = to_multiple(w, factor);
	rh = to_multiple(h, factor);
	if (rw * rh > (double)max_pixels) {
		beta = sqrt((double)w * h / (double)max_pixels);
		rw = FS_MAX((double)factor, floor(w / beta / factor) * factor);
		rh = FS_MAX((double)factor, floor(h / beta / factor) * factor);
	} else if (rw * rh < (double)min_pixels) {
		beta = sqrt((double)min_pixels / ((double)w * h));
		rw = ceil(w * beta / factor) * factor;
		rh = ceil(h * beta / factor) * factor;
	}
	if (rw < factor || rh < factor) /* only when min_pixels is less than one cell */
		return fs_fail(e, FS_EINVAL, "the picture of %d x %d pixels is too small", w, h);
	if (rw > MAX_SIDE || rh > MAX_SIDE || rw / factor * (rh / factor) > FS_ROWS_MAX_TOKENS)
		return fs_fail(e, FS_ELIMIT, "the picture of %d x %d pixels would take more than %d rows", w,
		        h, FS_ROWS_MAX_TOKENS);
	*out_w = (int)rw;
	*out_h = (int)rh;
	return FS_OK;
}

static int patches_init(
        struct patches *p, const struct vision_hparams *h, int gw, int gh, struct fs_errbuf *e)
{
	size_t n = (size_t)gw * (size_t)gh, row = 3 * (size_t)h->patch * (size_t)h->patch, bytes;

	p->gw = gw;
	p->gh = gh;
	p->n = (int64_t)n;
	if (!fs_mul_size(n, row, &bytes) || !fs_mul_size(bytes, sizeof(float), &bytes))
		return fs_fail(e, FS_ELIMIT, "%zu patches are too many", n);
	p->data = malloc(bytes);
	return p->data != NULL ? FS_OK : fs_fail(e, FS_ENOMEM, "no memory for %zu patches", n);
}

/* table[c][v]: the normalised value of byte v in channel c. */
static void fill_table(const struct vision_hparams *h, float table[3][256])
{
	for (int c = 0; c < 3; c++)
		for (int v = 0; v < 256; v++)
			table[c][v] = (float)((v / 255.0 - (double)h->mean[c]) / (double)h->std[c]);
}

/* One patch at pixel (x0, y0) of the picture. */
static void cut_patch(const struct fs_image *im, int x0, int y0, int side, float table[3][256], float *out)
{
	size_t plane = (size_t)side * (size_t)side;

	for (int y = 0; y < side; y++) {
		const uint8_t *in = im->rgb + ((size_t)(y0 + y) * (size_t)im->width + (size_t)x0) * 3;

		for (int x = 0; x < side; x++, in += 3, out++) {
			out[0] = table[0][in[0]];
			out[plane] = table[1][in[1]];
			out[2 * plane] = table[2][in[2]];
		}
	}
}

/* A row of blocks, merge · patch pixels high, from pixel row y0. */
static float *cut_block_row(
        const struct vision_hparams *h, const struct fs_image *im, int y0, float table[3][256], float *out)
{
	int p = h->patch, step = p * h->merge;

	for (int x0 = 0; x0 < im->width; x0 += step)
		for (int dy = 0; dy < h->merge; dy++)
			for (int dx = 0; dx < h->merge; dx++, out += 3 * p * p)
				cut_patch(im, x0 + dx * p, y0 + dy * p, p, table, out);
	return out;
}

static int cut(const struct vision_hparams *h, const struct fs_image *im, struct fs_cancel *cancel,
        struct patches *out, struct fs_errbuf *e)
{
	float table[3][256], *at;
	int err = patches_init(out, h, im->width / h->patch, im->height / h->patch, e);

	if (err != FS_OK)
		return err;
	fill_table(h, table);
	at = out->data;
	for (int y0 = 0; y0 < im->height && err == FS_OK; y0 += h->patch * h->merge) {
		at = cut_block_row(h, im, y0, table, at);
		if (fs_cancelled(cancel))
			err = fs_fail(e, FS_ECANCELLED, "cancelled");
	}
	if (err != FS_OK)
		patches_finish(out);
	return err;
}

int preprocess(const struct vision_hparams *h, const void *picture, size_t n, int64_t min_pixels,
        int64_t max_pixels, struct fs_cancel *cancel, struct patches *out, struct fs_errbuf *e)
{
	struct fs_image im = {0}, small = {0};
	int w = 0, t = 0;
	int err = fs_image_decode(picture, n, NULL, cancel, &im, e);

	if (err != FS_OK)
		return err;
	err = smart_resize(im.width, im.height, h->patch * h->merge, min_pixels, max_pixels, &w, &t, e);
	if (err == FS_OK)
		err = fs_image_resize_cancellable(&im, w, t, FS_BICUBIC, cancel, &small, e);
	fs_image_finish(&im);
	if (err == FS_OK)
		err = cut(h, &small, cancel, out, e);
	fs_image_finish(&small);
	return err;
}

int patches_grey(const struct vision_hparams *h, int gw, int gh, struct patches *out, struct fs_errbuf *e)
{
	int err = patches_init(out, h, gw, gh, e);

	if (err == FS_OK)
		memset(out->data, 0,
		        (size_t)out->n * 3 * (size_t)h->patch * (size_t)h->patch * sizeof(float));
	return err;
}
