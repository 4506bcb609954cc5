/*
 * WebP through libwebp, lossy and lossless; of an animation the first frame on its canvas. One decoder a
 * call; any thread. Data is fed in steps so that a cancel is seen. Refuses data that ends early.
 */
#include "common/image/internal.h"

#include <stdlib.h>
#include <string.h>
#include <webp/decode.h>
#include <webp/demux.h>

#define STEPS 64
#define MIN_STEP 4096

static int refuse(struct fs_errbuf *e, VP8StatusCode rc)
{
	switch (rc) {
	case VP8_STATUS_OUT_OF_MEMORY:
		return fs_fail(e, FS_ENOMEM, "no memory");
	case VP8_STATUS_NOT_ENOUGH_DATA:
	case VP8_STATUS_SUSPENDED:
		return fs_fail(e, FS_EFORMAT, "its data ends early");
	case VP8_STATUS_UNSUPPORTED_FEATURE:
		return fs_fail(e, FS_EFORMAT, "it uses a feature that is not supported");
	default:
		return fs_fail(e, FS_EFORMAT, "damaged data");
	}
}

static int features(const uint8_t *bytes, size_t n, WebPBitstreamFeatures *f, struct fs_errbuf *e)
{
	VP8StatusCode rc = WebPGetFeatures(bytes, n, f);

	if (rc != VP8_STATUS_OK)
		return refuse(e, rc);
	if (f->width < 1 || f->height < 1)
		return fs_fail(e, FS_EFORMAT, "damaged data");
	return FS_OK;
}

/* Only the extended form can hold EXIF; a file whose chunks do not add up simply has none. */
static int orientation(const struct image_source *s)
{
	const WebPData data = {s->bytes, s->n};
	WebPDemuxer *d = WebPDemux(&data);
	WebPChunkIterator it;
	int found = 1;

	if (d == NULL)
		return 1;
	if (WebPDemuxGetChunk(d, "EXIF", 1, &it)) {
		found = image_exif_orientation(it.chunk.bytes, it.chunk.size);
		WebPDemuxReleaseChunkIterator(&it);
	}
	WebPDemuxDelete(d);
	return found;
}

int image_webp_probe(const struct image_source *s, struct fs_image_info *info, struct fs_errbuf *e)
{
	WebPBitstreamFeatures f;
	int err = features(s->bytes, s->n, &f, e);

	if (err != FS_OK)
		return err;
	info->width = f.width;
	info->height = f.height;
	info->orientation = orientation(s);
	return FS_OK;
}

/* Runs the decoder over all of the data; cancel is checked between steps. */
static int feed(
        WebPIDecoder *d, const struct image_source *s, const uint8_t *bytes, size_t n, struct fs_errbuf *e)
{
	size_t step = FS_MAX(n / STEPS, (size_t)MIN_STEP), have = 0;
	VP8StatusCode rc = VP8_STATUS_SUSPENDED;

	while (have < n && rc == VP8_STATUS_SUSPENDED) {
		if (fs_cancelled(s->cancel))
			return fs_fail(e, FS_ECANCELLED, "cancelled");
		have = FS_MIN(n, have + step);
		rc = WebPIUpdate(d, bytes, have);
	}
	return rc == VP8_STATUS_OK ? FS_OK : refuse(e, rc);
}

/* One bitstream of w x h into pixels (RGB or RGBA, stride bytes a row). */
static int decode_stream(const struct image_source *s, const uint8_t *bytes, size_t n, uint8_t *pixels,
        size_t stride, size_t size, bool alpha, struct fs_errbuf *e)
{
	WebPDecoderConfig config;
	WebPIDecoder *d;
	int err;

	if (!WebPInitDecoderConfig(&config))
		return fs_fail(e, FS_EINTERNAL, "libwebp has another version than its headers");
	config.output.colorspace = alpha ? MODE_RGBA : MODE_RGB;
	config.output.u.RGBA.rgba = pixels;
	config.output.u.RGBA.stride = (int)stride;
	config.output.u.RGBA.size = size;
	config.output.is_external_memory = 1;
	d = WebPIDecode(NULL, 0, &config);
	if (d == NULL)
		return fs_fail(e, FS_ENOMEM, "no memory");
	err = feed(d, s, bytes, n, e);
	WebPIDelete(d);
	WebPFreeDecBuffer(&config.output);
	return err;
}

/* Puts a frame of fw x fh at (x, y) onto the canvas; the frame lies within it. */
static int decode_onto(const struct image_source *s, const uint8_t *bytes, size_t n, int fw, int fh, int x,
        int y, struct fs_image *out, struct fs_errbuf *e)
{
	size_t stride = (size_t)fw * 4, size = stride * (size_t)fh;
	uint8_t *rgba = malloc(size);
	int err;

	if (rgba == NULL)
		return fs_fail(e, FS_ENOMEM, "no memory");
	err = decode_stream(s, bytes, n, rgba, stride, size, true, e);
	for (int row = 0; row < fh && err == FS_OK; row++)
		image_over_white(rgba + (size_t)row * stride,
		        out->rgb + ((size_t)(y + row) * (size_t)out->width + (size_t)x) * 3, (size_t)fw);
	free(rgba);
	return err;
}

static int decode_first_frame(const struct image_source *s, struct fs_image *out, struct fs_errbuf *e)
{
	const WebPData data = {s->bytes, s->n};
	WebPDemuxer *d = WebPDemux(&data);
	WebPIterator it;
	int err;

	if (d == NULL || !WebPDemuxGetFrame(d, 1, &it)) {
		WebPDemuxDelete(d);
		return fs_fail(e, FS_EFORMAT, "its data ends early or is damaged");
	}
	memset(out->rgb, 0xff, (size_t)out->width * (size_t)out->height * 3);
	if (it.width < 1 || it.height < 1 || it.x_offset < 0 || it.y_offset < 0 ||
	        it.width > out->width - it.x_offset || it.height > out->height - it.y_offset)
		err = fs_fail(e, FS_EFORMAT, "its first frame lies outside the canvas");
	else
		err = decode_onto(s, it.fragment.bytes, it.fragment.size, it.width, it.height, it.x_offset,
		        it.y_offset, out, e);
	WebPDemuxReleaseIterator(&it);
	WebPDemuxDelete(d);
	return err;
}

int image_webp_decode(const struct image_source *s, const struct fs_image_info *info, struct fs_image *out,
        struct fs_errbuf *e)
{
	WebPBitstreamFeatures f;
	int err = features(s->bytes, s->n, &f, e);
	size_t stride = (size_t)info->width * 3;

	if (err == FS_OK)
		err = image_alloc(out, info->width, info->height, e);
	if (err != FS_OK)
		return err;
	if (f.has_animation)
		return decode_first_frame(s, out, e);
	if (f.has_alpha)
		return decode_onto(s, s->bytes, s->n, info->width, info->height, 0, 0, out, e);
	return decode_stream(s, s->bytes, s->n, out->rgb, stride, stride * (size_t)info->height, false, e);
}
