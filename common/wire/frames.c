/*
 * Frames of the ssh channel and the fixed payloads of ENC, ROWS and ERR. Stateless, any thread. Refuses
 * unknown types, set flags, lengths and sizes over the limits, before anything is allocated for them.
 */
#include "common/wire/bytes.h"
#include "common/wire/internal.h"

#include <stdio.h>
#include <string.h>

void fs_frame_header_put(uint8_t out[FS_FRAME_HEADER], uint8_t type, uint32_t id, uint32_t len)
{
	put_u32(out, len);
	out[4] = type;
	out[5] = 0;
	out[6] = 0;
	out[7] = 0;
	put_u32(out + 8, id);
}

int fs_frame_append(struct fs_buf *b, uint8_t type, uint32_t id, const void *payload, size_t n)
{
	uint8_t head[FS_FRAME_HEADER];
	int err;

	if (n > FS_FRAME_MAX)
		return FS_EINVAL;
	err = fs_buf_reserve(b, FS_FRAME_HEADER + n);
	if (err != FS_OK)
		return err;
	fs_frame_header_put(head, type, id, (uint32_t)n);
	FS_ASSERT(fs_buf_append(b, head, sizeof(head)) == FS_OK);
	if (n > 0)
		FS_ASSERT(fs_buf_append(b, payload, n) == FS_OK);
	return FS_OK;
}

int fs_frame_header_get(const uint8_t in[FS_FRAME_HEADER], struct fs_frame *out, struct fs_errbuf *e)
{
	uint32_t len = get_u32(in);

	if (in[4] < FS_FRAME_HELLO || in[4] > FS_FRAME_BYE)
		return fs_fail(e, FS_EFORMAT, "a frame of unknown type %u", in[4]);
	if (in[5] != 0 || in[6] != 0 || in[7] != 0)
		return fs_fail(e, FS_EFORMAT, "a frame with flags that this version does not know");
	if (len > FS_FRAME_MAX)
		return fs_fail(
		        e, FS_EFORMAT, "a frame of %u bytes; at most %d are allowed", len, FS_FRAME_MAX);
	*out = (struct fs_frame){.type = in[4], .id = get_u32(in + 8), .len = len};
	return FS_OK;
}

int fs_frame_parse(const uint8_t *data, size_t n, struct fs_frame *out, size_t *used, struct fs_errbuf *e)
{
	struct fs_frame f;
	int err;

	if (n < FS_FRAME_HEADER)
		return FS_ENOTFOUND;
	err = fs_frame_header_get(data, &f, e);
	if (err != FS_OK)
		return err;
	if (n - FS_FRAME_HEADER < f.len)
		return FS_ENOTFOUND;
	f.payload = data + FS_FRAME_HEADER;
	*out = f;
	*used = FS_FRAME_HEADER + (size_t)f.len;
	return FS_OK;
}

/* ---- ENC ---- */

void fs_enc_head_put(uint8_t out[FS_ENC_HEAD], const struct fs_enc_head *h)
{
	put_u32(out, h->picture_bytes);
	put_u32(out + 4, h->dtype);
	put_u32(out + 8, (uint32_t)h->min_tokens);
	put_u32(out + 12, (uint32_t)h->max_tokens);
	put_u32(out + 16, h->deadline_ms);
	put_u32(out + 20, h->reserved);
}

static bool token_bounds_ok(int32_t min, int32_t max)
{
	return min >= 0 && max >= 0 && min <= FS_ROWS_MAX_TOKENS && max <= FS_ROWS_MAX_TOKENS &&
	       (max == 0 || min <= max);
}

int fs_enc_head_get(const uint8_t *in, size_t n, struct fs_enc_head *out, struct fs_errbuf *e)
{
	struct fs_enc_head h;

	if (n != FS_ENC_HEAD)
		return fs_fail(e, FS_EFORMAT, "an ENC frame of %zu bytes, not %d", n, FS_ENC_HEAD);
	h = (struct fs_enc_head){
	        .picture_bytes = get_u32(in),
	        .dtype = get_u32(in + 4),
	        .min_tokens = get_i32(in + 8),
	        .max_tokens = get_i32(in + 12),
	        .deadline_ms = get_u32(in + 16),
	        .reserved = get_u32(in + 20),
	};
	if (h.picture_bytes == 0 || h.picture_bytes > FS_PICTURE_MAX)
		return fs_fail(e, FS_EFORMAT, "an ENC frame for a picture of %u bytes; 1 to %zu are allowed",
		        h.picture_bytes, FS_PICTURE_MAX);
	if (fs_wire_dtype_bytes(h.dtype) == 0)
		return fs_fail(e, FS_EFORMAT, "an ENC frame with unknown dtype %u", h.dtype);
	if (!token_bounds_ok(h.min_tokens, h.max_tokens))
		return fs_fail(e, FS_EFORMAT, "an ENC frame with impossible bounds of %d to %d tokens",
		        h.min_tokens, h.max_tokens);
	if (h.reserved != 0)
		return fs_fail(e, FS_EFORMAT, "an ENC frame with fields that this version does not know");
	*out = h;
	return FS_OK;
}

/* ---- ROWS ---- */

void fs_rows_head_put(uint8_t out[FS_ROWS_HEAD], const struct fs_rows_head *h)
{
	put_u32(out, (uint32_t)h->shape.n_tokens);
	put_u32(out + 4, (uint32_t)h->shape.nx);
	put_u32(out + 8, (uint32_t)h->shape.ny);
	put_u32(out + 12, (uint32_t)h->shape.n_embd);
	put_u32(out + 16, h->dtype);
	put_u32(out + 20, h->encode_us);
	put_u32(out + 24, h->queue_us);
	put_u32(out + 28, h->reserved);
}

int fs_rows_head_bytes(const struct fs_rows_head *h, size_t *out, struct fs_errbuf *e)
{
	return wire_shape_check(&h->shape, h->dtype, out, e);
}

int fs_rows_head_get(const uint8_t *in, size_t n, struct fs_rows_head *out, struct fs_errbuf *e)
{
	struct fs_rows_head h;
	size_t bytes;
	int err;

	if (n != FS_ROWS_HEAD)
		return fs_fail(e, FS_EFORMAT, "a ROWS frame of %zu bytes, not %d", n, FS_ROWS_HEAD);
	h = (struct fs_rows_head){
	        .shape = {get_i32(in), get_i32(in + 4), get_i32(in + 8), get_i32(in + 12)},
	        .dtype = get_u32(in + 16),
	        .encode_us = get_u32(in + 20),
	        .queue_us = get_u32(in + 24),
	        .reserved = get_u32(in + 28),
	};
	if (h.reserved != 0)
		return fs_fail(e, FS_EFORMAT, "a ROWS frame with fields that this version does not know");
	err = fs_rows_head_bytes(&h, &bytes, e);
	if (err == FS_OK)
		*out = h;
	return err;
}

/* ---- ERR ---- */

int fs_frame_append_err(struct fs_buf *b, uint32_t id, int err, const char *text)
{
	uint8_t payload[4 + FS_ERR_TEXT_MAX];
	size_t n = strnlen(text, FS_ERR_TEXT_MAX);

	put_u32(payload, err < 0 ? (uint32_t)-err : (uint32_t)-FS_EINTERNAL);
	memcpy(payload + 4, text, n);
	return fs_frame_append(b, FS_FRAME_ERR, id, payload, 4 + n);
}

int fs_err_payload_get(const uint8_t *in, size_t n, int *err, struct fs_errbuf *text, struct fs_errbuf *e)
{
	uint32_t code;

	if (n < 4 || n > 4 + FS_ERR_TEXT_MAX)
		return fs_fail(e, FS_EFORMAT, "an ERR frame of %zu bytes", n);
	code = get_u32(in);
	if (code < 1 || code > (uint32_t)-FS_EINTERNAL)
		code = (uint32_t)-FS_EINTERNAL;
	*err = -(int)code;
	fs_fail(text, *err, "%.*s", (int)(n - 4), (const char *)in + 4);
	return FS_OK;
}
