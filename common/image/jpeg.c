/*
 * JPEG through libjpeg-turbo. One decoder object a call; any thread. Refuses pictures whose data ends early
 * or is damaged, which the library itself only warns of, and progressive files with absurdly many scans.
 * libjpeg leaves by longjmp, so everything that must survive it lives in struct reader, and nothing between
 * setjmp and longjmp owns memory but that struct.
 */
#include "common/image/internal.h"

#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <jpeglib.h>
#include <jerror.h>

#define MAX_SCANS 200
#define CANCEL_ROWS 16

struct reader {
	struct jpeg_decompress_struct c;
	struct jpeg_error_mgr err;
	struct jpeg_progress_mgr progress;
	jmp_buf leave;
	const struct image_source *s;
	int code;
	struct fs_errbuf *e;
	uint8_t *cmyk; /* one row */
};

static struct reader *reader_of(j_common_ptr c)
{
	return (struct reader *)c->client_data;
}

static _Noreturn void leave_with_message(j_common_ptr c)
{
	struct reader *r = reader_of(c);
	char text[JMSG_LENGTH_MAX];

	c->err->format_message(c, text);
	r->code = c->err->msg_code == JERR_OUT_OF_MEMORY ? FS_ENOMEM : FS_EFORMAT;
	fs_fail(r->e, r->code, "%s", text);
	longjmp(r->leave, 1);
}

/* Warnings that mean lost or invented pixels are errors; others (bytes between markers, odd Adobe flags) are
 * not. */
static void on_message(j_common_ptr c, int level)
{
	static const int fatal[] = {
	        JWRN_HIT_MARKER, JWRN_JPEG_EOF, JWRN_HUFF_BAD_CODE, JWRN_ARITH_BAD_CODE, JWRN_MUST_RESYNC};

	if (level >= 0)
		return;
	for (size_t i = 0; i < FS_ARRAY_LEN(fatal); i++)
		if (c->err->msg_code == fatal[i])
			leave_with_message(c);
}

static void no_output(j_common_ptr c)
{
}

static void on_progress(j_common_ptr c)
{
	struct reader *r = reader_of(c);

	if (fs_cancelled(r->s->cancel)) {
		r->code = fs_fail(r->e, FS_ECANCELLED, "cancelled");
		longjmp(r->leave, 1);
	}
	if (c->is_decompressor && ((j_decompress_ptr)c)->input_scan_number > MAX_SCANS) {
		r->code = fs_fail(r->e, FS_EFORMAT, "more than %d scans", MAX_SCANS);
		longjmp(r->leave, 1);
	}
}

/* Creates the decoder and reads the header. Called behind setjmp. */
static void read_header(struct reader *r)
{
	jpeg_create_decompress(&r->c);
	r->c.client_data = r;
	r->progress.progress_monitor = on_progress;
	r->c.progress = &r->progress;
	jpeg_mem_src(&r->c, r->s->bytes, (unsigned long)r->s->n);
	jpeg_save_markers(&r->c, JPEG_APP0 + 1, 0xffff);
	jpeg_read_header(&r->c, TRUE);
}

static void reader_init(struct reader *r, const struct image_source *s, struct fs_errbuf *e)
{
	memset(r, 0, sizeof(*r));
	r->s = s;
	r->e = e;
	r->c.err = jpeg_std_error(&r->err);
	r->c.client_data = r;
	r->err.error_exit = leave_with_message;
	r->err.emit_message = on_message;
	r->err.output_message = no_output;
}

static int orientation(const struct reader *r)
{
	for (jpeg_saved_marker_ptr m = r->c.marker_list; m != NULL; m = m->next)
		if (m->marker == JPEG_APP0 + 1 && m->data_length >= 6 && memcmp(m->data, "Exif\0\0", 6) == 0)
			return image_exif_orientation(m->data, m->data_length);
	return 1;
}

int image_jpeg_probe(const struct image_source *s, struct fs_image_info *info, struct fs_errbuf *e)
{
	struct reader r;

	reader_init(&r, s, e);
	if (setjmp(r.leave) == 0) {
		read_header(&r);
		info->width = (int)r.c.image_width;
		info->height = (int)r.c.image_height;
		info->orientation = orientation(&r);
	}
	jpeg_destroy_decompress(&r.c);
	return r.code;
}

static uint8_t mul_255(unsigned a, unsigned b)
{
	unsigned t = a * b + 128;

	return (uint8_t)((t + (t >> 8)) >> 8);
}

/* Adobe's programs store the inks inverted and say so by their marker. */
static void cmyk_to_rgb(const uint8_t *in, uint8_t *out, size_t n, bool inverted)
{
	uint8_t flip = inverted ? 0xff : 0;

	for (size_t i = 0; i < n; i++, in += 4, out += 3) {
		unsigned white = 255u - (in[3] ^ flip);

		for (int c = 0; c < 3; c++)
			out[c] = (uint8_t)(white - mul_255((unsigned)(in[c] ^ flip), white));
	}
}

static void choose_output(struct reader *r)
{
	switch (r->c.jpeg_color_space) {
	case JCS_GRAYSCALE:
	case JCS_RGB:
	case JCS_YCbCr:
		r->c.out_color_space = JCS_RGB;
		break;
	case JCS_CMYK:
	case JCS_YCCK:
		r->c.out_color_space = JCS_CMYK;
		break;
	default:
		r->code = fs_fail(
		        r->e, FS_EFORMAT, "%d colour components of an unknown kind", r->c.num_components);
		longjmp(r->leave, 1);
	}
}

/* Called behind setjmp. */
static void read_pixels(struct reader *r, struct fs_image *out)
{
	bool cmyk;

	choose_output(r);
	jpeg_start_decompress(&r->c);
	if ((int)r->c.output_width != out->width || (int)r->c.output_height != out->height) {
		r->code = fs_fail(r->e, FS_EFORMAT, "its size changed while reading");
		longjmp(r->leave, 1);
	}
	cmyk = r->c.out_color_space == JCS_CMYK;
	while (r->c.output_scanline < r->c.output_height) {
		uint8_t *row = out->rgb + (size_t)r->c.output_scanline * (size_t)out->width * 3,
		        *to = cmyk ? r->cmyk : row;

		if (r->c.output_scanline % CANCEL_ROWS == 0)
			on_progress((j_common_ptr)&r->c);
		jpeg_read_scanlines(&r->c, &to, 1);
		if (cmyk)
			cmyk_to_rgb(to, row, (size_t)out->width, r->c.saw_Adobe_marker);
	}
	jpeg_finish_decompress(&r->c);
}

int image_jpeg_decode(const struct image_source *s, const struct fs_image_info *info, struct fs_image *out,
        struct fs_errbuf *e)
{
	struct reader r;
	int err = image_alloc(out, info->width, info->height, e);

	if (err != FS_OK)
		return err;
	reader_init(&r, s, e);
	r.cmyk = malloc((size_t)info->width * 4);
	if (r.cmyk == NULL) {
		r.code = fs_fail(e, FS_ENOMEM, "no memory");
	} else if (setjmp(r.leave) == 0) {
		read_header(&r);
		read_pixels(&r, out);
	}
	jpeg_destroy_decompress(&r.c);
	free(r.cmyk);
	return r.code;
}
