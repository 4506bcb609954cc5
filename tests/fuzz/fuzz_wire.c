/* Fuzz target: the first byte chooses a parser of common/wire, the rest is its input. What parses must
 * survive a round trip. */
#include "common/wire/wire.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static void order(const char *line, size_t n, bool extended)
{
	struct fs_order o, again;
	char text[FS_LINE_MAX + 64];

	if (fs_order_parse(line, n, extended, &o, NULL) != FS_OK ||
	        fs_order_format(&o, extended, text, sizeof(text), NULL) != FS_OK)
		return;
	FS_ASSERT(fs_order_parse(text, strlen(text) - 1, extended, &again, NULL) == FS_OK);
	FS_ASSERT(again.kind == o.kind && again.f16 == o.f16 && strcmp(again.out, o.out) == 0);
}

static void frames(const uint8_t *data, size_t n)
{
	struct fs_frame f;
	struct fs_enc_head enc;
	struct fs_rows_head rows;
	struct fs_hello hello;
	struct fs_errbuf text;
	size_t used, bytes;
	int err;

	while (fs_frame_parse(data, n, &f, &used, NULL) == FS_OK) {
		FS_ASSERT(used <= n && f.payload + f.len <= data + n);
		fs_enc_head_get(f.payload, f.len, &enc, NULL);
		if (fs_rows_head_get(f.payload, f.len, &rows, NULL) == FS_OK)
			FS_ASSERT(fs_rows_head_bytes(&rows, &bytes, NULL) == FS_OK && bytes > 0);
		fs_err_payload_get(f.payload, f.len, &err, &text, NULL);
		fs_hello_parse(f.payload, f.len, &hello, NULL);
		data += used;
		n -= used;
	}
}

static void hello(const uint8_t *data, size_t n)
{
	struct fs_hello h, again;
	struct fs_buf b;

	if (fs_hello_parse(data, n, &h, NULL) != FS_OK)
		return;
	fs_buf_init(&b, 1 << 20);
	FS_ASSERT(fs_hello_format(&h, &b) == FS_OK);
	FS_ASSERT(fs_hello_parse(b.data, b.len, &again, NULL) == FS_OK);
	FS_ASSERT(strcmp(h.device, again.device) == 0 && h.n_embd == again.n_embd);
	fs_buf_finish(&b);
}

/* A file's length is what its header says, and nothing else. */
static void rows(const uint8_t *data, size_t n)
{
	struct fs_rows_shape s, again;
	size_t bytes;

	fs_rows_header_get(data, n, &s, NULL);
	for (int dtype = FS_WIRE_F32; dtype <= FS_WIRE_F16; dtype++) {
		if (fs_rows_header_begin(data, (enum fs_wire_dtype)dtype, &s, &bytes, NULL) != FS_OK)
			continue;
		FS_ASSERT(bytes > 0 && bytes <= FS_ROWS_MAX_BYTES && s.n_tokens == s.nx * s.ny);
		FS_ASSERT(fs_rows_header_get_dtype(data, FS_ROWS_HEADER + bytes, (enum fs_wire_dtype)dtype,
		                  &again, NULL) == FS_OK);
		FS_ASSERT(fs_rows_header_get_dtype(data, FS_ROWS_HEADER + bytes + 1,
		                  (enum fs_wire_dtype)dtype, &again, NULL) != FS_OK);
	}
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
	struct fs_reply reply;

	if (n < 1)
		return 0;
	switch (data[0] % 6) {
	case 0:
		fs_reply_parse((const char *)data + 1, n - 1, &reply, NULL);
		break;
	case 1:
		order((const char *)data + 1, n - 1, false);
		break;
	case 2:
		order((const char *)data + 1, n - 1, true);
		break;
	case 3:
		frames(data + 1, n - 1);
		break;
	case 4:
		hello(data + 1, n - 1);
		break;
	default:
		if (n >= 1 + FS_ROWS_HEADER)
			rows(data + 1, n - 1);
	}
	return 0;
}
