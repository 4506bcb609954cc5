/* wire: lines, frames, hello and rows files; the bytes written out by hand, and hostile ones. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "common/wire/wire.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static struct fs_errbuf e;

/* A copy of exactly n bytes, so that reading past them is seen. */
static int parse_reply(const char *line, struct fs_reply *r)
{
	size_t n = strlen(line);
	char *copy = malloc(n + (n == 0));
	int err;

	memcpy(copy, line, n);
	err = fs_reply_parse(copy, n, r, &e);
	free(copy);
	return err;
}

static int parse_order(const char *line, bool extended, struct fs_order *o)
{
	return fs_order_parse(line, strlen(line), extended, o, &e);
}

/* ---- lines ---- */

static void replies_are_read(void **state)
{
	struct fs_reply r;

	assert_int_equal(parse_reply("READY 2560", &r), FS_OK);
	assert_int_equal(r.kind, FS_REPLY_READY);
	assert_int_equal(r.ready.n_embd, 2560);
	assert_string_equal(r.ready.fingerprint, "");
	assert_int_equal(
	        parse_reply("READY 64 fingerprint=00112233445566778899aabbccddeeff device=cpu "
	                    "min_tokens=4 max_tokens=1024 vram_free_mb=3000 vram_total_mb=12000 new=1\r",
	                &r),
	        FS_OK);
	assert_string_equal(r.ready.fingerprint, "00112233445566778899aabbccddeeff");
	assert_string_equal(r.ready.device, "cpu");
	assert_int_equal(r.ready.min_tokens, 4);
	assert_int_equal(r.ready.max_tokens, 1024);
	assert_int_equal(r.ready.vram_free_mb, 3000);
	assert_int_equal(r.ready.vram_total_mb, 12000);
	assert_false(r.ready.pipe);
	assert_int_equal(parse_reply("READY 64 rows=pipe", &r), FS_OK);
	assert_true(r.ready.pipe);
	assert_int_equal(parse_reply("READY 64 rows=carrier-pigeon", &r), FS_OK);
	assert_false(r.ready.pipe);
	assert_int_equal(parse_reply("OK 12 4 3 17.25", &r), FS_OK);
	assert_int_equal(r.kind, FS_REPLY_OK);
	assert_int_equal(r.shape.nx, 4);
	assert_int_equal(r.shape.ny, 3);
	assert_true(r.ms == 17.25);
	assert_int_equal(parse_reply("OK 12 4 3", &r), FS_OK);
	assert_int_equal(parse_reply("OK 12", &r), FS_OK);
	assert_int_equal(r.shape.nx, 12);
	assert_int_equal(r.shape.ny, 1);
	assert_int_equal(parse_reply("ERR the image  could not be read", &r), FS_OK);
	assert_int_equal(r.kind, FS_REPLY_ERR);
	assert_string_equal(r.text, "the image  could not be read");
	assert_int_equal(parse_reply("ERR", &r), FS_OK);
	assert_int_equal(parse_reply("ERR \x1b[2J", &r), FS_OK);
	assert_string_equal(r.text, "?[2J");
}

static void wrong_replies_are_refused(void **state)
{
	static const char *const wrong[] = {"", " ", "READY", "READY ", "READY 0", "READY -5", "READY 65537",
	        "READY 12x", "READY 0x10", "READY 99999999999999999999", "READY 64 fingerprint=xyz",
	        "READY 64 min_tokens=-1", "READY 64 vram_free_mb=-1", "OK", "OK 0", "OK -1", "OK 65537",
	        "OK 12 4", "OK 12 4 4", "OK 12 -4 -3", "OK 12 65536 65536", "OK 12 4 3 nan",
	        "OK 12 4 3 1e999", "OK 12 4 3 5s", "OKAY 12", "ready 12", "READY64", "ERRor", "hello"};
	struct fs_reply r;
	char line[FS_LINE_MAX + 10];

	for (size_t i = 0; i < FS_ARRAY_LEN(wrong); i++)
		if (parse_reply(wrong[i], &r) != FS_EFORMAT)
			fail_msg("taken: %s", wrong[i]);
	assert_int_equal(fs_reply_parse("OK 1\0", 5, &r, &e), FS_EFORMAT);
	memset(line, 'x', sizeof(line));
	memcpy(line, "ERR ", 4);
	assert_int_equal(fs_reply_parse(line, FS_LINE_MAX - 1, &r, &e), FS_OK);
	assert_int_equal(strlen(r.text), sizeof(r.text) - 1);
	assert_int_equal(fs_reply_parse(line, FS_LINE_MAX, &r, &e), FS_EFORMAT);
}

static void orders_are_read(void **state)
{
	struct fs_order o;

	assert_int_equal(parse_order("ENC a picture.png out.sve", false, &o), FS_OK);
	assert_string_equal(o.in, "a picture.png");
	assert_string_equal(o.out, "out.sve");
	assert_int_equal(parse_order("ENC dtype=f16 min=4 x y", false, &o), FS_OK);
	assert_string_equal(o.in, "dtype=f16 min=4 x");
	assert_false(o.f16);
	assert_int_equal(parse_order("ENC dtype=f16 min=4 max=64 a b c", true, &o), FS_OK);
	assert_true(o.f16);
	assert_int_equal(o.min_tokens, 4);
	assert_int_equal(o.max_tokens, 64);
	assert_string_equal(o.in, "a b");
	assert_int_equal(parse_order("QUIT", false, &o), FS_OK);
	assert_int_equal(o.kind, FS_ORDER_QUIT);
	assert_int_equal(parse_order("CANCEL", true, &o), FS_OK);
	assert_int_equal(o.kind, FS_ORDER_CANCEL);
}

static void wrong_orders_are_refused(void **state)
{
	static const char *const wrong[] = {"", "ENC", "ENC ", "ENC a", "ENC a ", "ENC  b", "enc a b",
	        "CANCEL", "QUIT now", "ENCa b", "READY 5"};
	static const char *const wrong_extended[] = {"ENC dtype=f8 a b", "ENC min=0 a b",
	        "ENC min=9 max=8 a b", "ENC max=99999999 a b", "ENC max=-1 a b", "CANCEL x"};
	struct fs_order o;
	char line[FS_LINE_MAX];

	for (size_t i = 0; i < FS_ARRAY_LEN(wrong); i++)
		if (parse_order(wrong[i], false, &o) != FS_EFORMAT)
			fail_msg("taken: %s", wrong[i]);
	for (size_t i = 0; i < FS_ARRAY_LEN(wrong_extended); i++)
		if (parse_order(wrong_extended[i], true, &o) != FS_EFORMAT)
			fail_msg("taken: %s", wrong_extended[i]);
	snprintf(line, sizeof(line), "ENC %04100d b", 1);
	assert_int_equal(parse_order(line, false, &o), FS_ELIMIT);
}

static void orders_are_written(void **state)
{
	struct fs_order o = {.kind = FS_ORDER_ENC, .in = "a b.jpg", .out = "o.sve"}, back;
	char line[FS_LINE_MAX];

	assert_int_equal(fs_order_format(&o, false, line, sizeof(line), &e), FS_OK);
	assert_string_equal(line, "ENC a b.jpg o.sve\n");
	o.f16 = true;
	o.max_tokens = 64;
	assert_int_equal(fs_order_format(&o, false, line, sizeof(line), &e), FS_EINVAL);
	assert_int_equal(fs_order_format(&o, true, line, sizeof(line), &e), FS_OK);
	assert_string_equal(line, "ENC dtype=f16 max=64 a b.jpg o.sve\n");
	assert_int_equal(fs_order_format(&o, true, line, 20, &e), FS_ELIMIT);
	/* a picture whose name looks like an option stays a picture */
	o = (struct fs_order){.kind = FS_ORDER_ENC, .in = "min=5 x.png", .out = "o"};
	assert_int_equal(fs_order_format(&o, true, line, sizeof(line), &e), FS_OK);
	assert_int_equal(fs_order_parse(line, strlen(line) - 1, true, &back, &e), FS_OK);
	assert_string_equal(back.in, "./min=5 x.png");
	assert_int_equal(back.min_tokens, 0);
	o = (struct fs_order){.kind = FS_ORDER_ENC, .in = "a\nQUIT", .out = "o"};
	assert_int_equal(fs_order_format(&o, true, line, sizeof(line), &e), FS_EINVAL);
	o = (struct fs_order){.kind = FS_ORDER_ENC, .in = "a", .out = "o o"};
	assert_int_equal(fs_order_format(&o, true, line, sizeof(line), &e), FS_EINVAL);
	o = (struct fs_order){.kind = FS_ORDER_ENC, .in = "", .out = "o"};
	assert_int_equal(fs_order_format(&o, true, line, sizeof(line), &e), FS_EINVAL);
	o.kind = FS_ORDER_CANCEL;
	assert_int_equal(fs_order_format(&o, true, line, sizeof(line), &e), FS_OK);
	assert_string_equal(line, "CANCEL\n");
	assert_int_equal(fs_order_format(&o, false, line, sizeof(line), &e), FS_EINVAL);
	o.kind = FS_ORDER_QUIT;
	assert_int_equal(fs_order_format(&o, false, line, sizeof(line), &e), FS_OK);
	assert_string_equal(line, "QUIT\n");
}

static void lines_are_found(void **state)
{
	struct fs_buf b;
	size_t n = 99;

	fs_buf_init(&b, 3 * FS_LINE_MAX);
	assert_int_equal(fs_line_next(&b, &n, &e), FS_ENOTFOUND);
	assert_int_equal(fs_buf_append_str(&b, "READ"), FS_OK);
	assert_int_equal(fs_line_next(&b, &n, &e), FS_ENOTFOUND);
	assert_int_equal(fs_buf_append_str(&b, "Y 5\n\nx"), FS_OK);
	assert_int_equal(fs_line_next(&b, &n, &e), FS_OK);
	assert_int_equal(n, 7);
	fs_buf_consume(&b, n + 1);
	assert_int_equal(fs_line_next(&b, &n, &e), FS_OK);
	assert_int_equal(n, 0);
	fs_buf_consume(&b, 1);
	assert_int_equal(fs_line_next(&b, &n, &e), FS_ENOTFOUND);
	while (b.len < FS_LINE_MAX - 1)
		assert_int_equal(fs_buf_append_str(&b, "x"), FS_OK);
	assert_int_equal(fs_line_next(&b, &n, &e), FS_ENOTFOUND);
	assert_int_equal(fs_buf_append_str(&b, "x\n"), FS_OK); /* the newline is byte FS_LINE_MAX + 1 */
	assert_int_equal(fs_line_next(&b, &n, &e), FS_EFORMAT);
	b.data[b.len - 2] = '\n';
	assert_int_equal(fs_line_next(&b, &n, &e), FS_OK);
	assert_int_equal(n, FS_LINE_MAX - 1);
	fs_buf_finish(&b);
}

/* ---- frames ---- */

static void frames_have_these_bytes(void **state)
{
	static const uint8_t ping[] = {3, 0, 0, 0, 7, 0, 0, 0, 0x04, 0x03, 0x02, 0x01, 'a', 'b', 'c'};
	struct fs_buf b;
	struct fs_frame f;
	size_t used;

	fs_buf_init(&b, 1 << 20);
	assert_int_equal(fs_frame_append(&b, FS_FRAME_PING, 0x01020304, "abc", 3), FS_OK);
	assert_int_equal(b.len, sizeof(ping));
	assert_memory_equal(b.data, ping, sizeof(ping));
	assert_int_equal(fs_frame_append(&b, FS_FRAME_BYE, 0, NULL, 0), FS_OK);
	for (size_t n = 0; n < sizeof(ping); n++) {
		uint8_t *part = malloc(n + 1);

		memcpy(part, ping, n);
		assert_int_equal(fs_frame_parse(part, n, &f, &used, &e), FS_ENOTFOUND);
		free(part);
	}
	assert_int_equal(fs_frame_parse(b.data, b.len, &f, &used, &e), FS_OK);
	assert_int_equal(used, sizeof(ping));
	assert_int_equal(f.id, 0x01020304);
	assert_int_equal(f.len, 3);
	assert_memory_equal(f.payload, "abc", 3);
	fs_buf_consume(&b, used);
	assert_int_equal(fs_frame_parse(b.data, b.len, &f, &used, &e), FS_OK);
	assert_int_equal(f.type, FS_FRAME_BYE);
	assert_int_equal(f.len, 0);
	fs_buf_finish(&b);
}

static void wrong_frames_are_refused_from_the_header(void **state)
{
	uint8_t head[FS_FRAME_HEADER];
	struct fs_frame f;
	struct fs_buf b;
	size_t used;

	fs_frame_header_put(head, FS_FRAME_DATA, 1, FS_FRAME_MAX + 1);
	assert_int_equal(fs_frame_parse(head, sizeof(head), &f, &used, &e), FS_EFORMAT);
	fs_frame_header_put(head, FS_FRAME_DATA, 1, UINT32_MAX);
	assert_int_equal(fs_frame_parse(head, sizeof(head), &f, &used, &e), FS_EFORMAT);
	fs_frame_header_put(head, FS_FRAME_DATA, 1, FS_FRAME_MAX);
	assert_int_equal(fs_frame_parse(head, sizeof(head), &f, &used, &e), FS_ENOTFOUND);
	for (int type = 0; type < 256; type++) {
		fs_frame_header_put(head, (uint8_t)type, 0, 0);
		assert_int_equal(fs_frame_parse(head, sizeof(head), &f, &used, &e),
		        type >= 1 && type <= 10 ? FS_OK : FS_EFORMAT);
	}
	for (int i = 5; i < 8; i++) {
		fs_frame_header_put(head, FS_FRAME_PING, 0, 0);
		head[i] = 1;
		assert_int_equal(fs_frame_parse(head, sizeof(head), &f, &used, &e), FS_EFORMAT);
	}
	fs_buf_init(&b, 20);
	assert_int_equal(fs_frame_append(&b, FS_FRAME_PING, 1, "123456789", 9), FS_ENOMEM);
	assert_int_equal(b.len, 0);
	fs_buf_finish(&b);
}

static void enc_heads_are_checked(void **state)
{
	static const uint8_t bytes[] = {
	        0xe8, 3, 0, 0, 1, 0, 0, 0, 4, 0, 0, 0, 0, 4, 0, 0, 0x10, 0x27, 0, 0, 0, 0, 0, 0};
	const struct fs_enc_head good = {1000, FS_WIRE_F16, 4, 1024, 10000, 0};
	static const struct fs_enc_head wrong[] = {{0, 0, 0, 0, 0, 0}, {FS_PICTURE_MAX + 1, 0, 0, 0, 0, 0},
	        {1, 2, 0, 0, 0, 0}, {1, 0, -1, 0, 0, 0}, {1, 0, 0, -1, 0, 0}, {1, 0, 9, 8, 0, 0},
	        {1, 0, 0, 65537, 0, 0}, {1, 0, 0, 0, 0, 1}};
	struct fs_enc_head h;
	uint8_t out[FS_ENC_HEAD];

	fs_enc_head_put(out, &good);
	assert_memory_equal(out, bytes, sizeof(bytes));
	assert_int_equal(fs_enc_head_get(out, sizeof(out), &h, &e), FS_OK);
	assert_int_equal(h.max_tokens, 1024);
	assert_int_equal(fs_enc_head_get(out, sizeof(out) - 1, &h, &e), FS_EFORMAT);
	for (size_t i = 0; i < FS_ARRAY_LEN(wrong); i++) {
		fs_enc_head_put(out, &wrong[i]);
		if (fs_enc_head_get(out, sizeof(out), &h, &e) != FS_EFORMAT)
			fail_msg("taken: %zu", i);
	}
}

static void rows_heads_are_checked(void **state)
{
	const struct fs_rows_head good = {{12, 4, 3, 2560}, FS_WIRE_F16, 1500, 20, 0};
	static const struct fs_rows_head wrong[] = {{{12, 4, 4, 8}, 0, 0, 0, 0}, {{0, 0, 0, 8}, 0, 0, 0, 0},
	        {{-4, -2, 2, 8}, 0, 0, 0, 0}, {{4, -2, -2, 8}, 0, 0, 0, 0}, {{4, 2, 2, 0}, 0, 0, 0, 0},
	        {{4, 2, 2, 65537}, 0, 0, 0, 0}, {{65536, 256, 256, 65536}, 0, 0, 0, 0},
	        {{4, 2, 2, 8}, 2, 0, 0, 0}, {{4, 2, 2, 8}, 0, 0, 0, 1}, {{0, 65536, 65536, 8}, 0, 0, 0, 0}};
	struct fs_rows_head h;
	uint8_t out[FS_ROWS_HEAD];
	size_t n;

	fs_rows_head_put(out, &good);
	assert_int_equal(fs_rows_head_get(out, sizeof(out), &h, &e), FS_OK);
	assert_int_equal(h.shape.n_embd, 2560);
	assert_int_equal(h.encode_us, 1500);
	assert_int_equal(fs_rows_head_bytes(&h, &n, &e), FS_OK);
	assert_int_equal(n, 12 * 2560 * 2);
	for (size_t i = 0; i < FS_ARRAY_LEN(wrong); i++) {
		fs_rows_head_put(out, &wrong[i]);
		if (fs_rows_head_get(out, sizeof(out), &h, &e) != FS_EFORMAT)
			fail_msg("taken: %zu", i);
	}
}

static void errors_cross(void **state)
{
	struct fs_buf b;
	struct fs_frame f;
	struct fs_errbuf text;
	size_t used;
	int err;

	fs_buf_init(&b, 1 << 16);
	assert_int_equal(fs_frame_append_err(&b, 9, FS_ECANCELLED, "cancelled"), FS_OK);
	assert_int_equal(fs_frame_parse(b.data, b.len, &f, &used, &e), FS_OK);
	assert_int_equal(f.type, FS_FRAME_ERR);
	assert_memory_equal(f.payload, "\x06\0\0\0cancelled", 13);
	assert_int_equal(fs_err_payload_get(f.payload, f.len, &err, &text, &e), FS_OK);
	assert_int_equal(err, FS_ECANCELLED);
	assert_string_equal(text.text, "cancelled");
	assert_int_equal(
	        fs_err_payload_get((const uint8_t *)"\xff\xff\xff\xff\x1b", 5, &err, &text, &e), FS_OK);
	assert_int_equal(err, FS_EINTERNAL);
	assert_string_equal(text.text, "?");
	assert_int_equal(fs_err_payload_get((const uint8_t *)"\0\0\0\0", 4, &err, &text, &e), FS_OK);
	assert_int_equal(err, FS_EINTERNAL);
	assert_int_equal(fs_err_payload_get((const uint8_t *)"abc", 3, &err, &text, &e), FS_EFORMAT);
	fs_buf_finish(&b);
}

/* ---- hello ---- */

static int parse_hello(const char *json, struct fs_hello *h)
{
	return fs_hello_parse((const uint8_t *)json, strlen(json), h, &e);
}

static void hello_crosses(void **state)
{
	struct fs_hello h = {.version = 1,
	                        .program = "farsight-watchdog 0.1.0",
	                        .state = "failed",
	                        .n_embd = 2560,
	                        .max_picture_bytes = (int64_t)64 << 20},
	                got;
	struct fs_buf b;

	fs_buf_init(&b, 1 << 16);
	strcpy(h.cause, "exec: \xff\xfe no such \"file\"\n");
	strcpy(h.fingerprint, "00112233445566778899aabbccddeeff");
	assert_int_equal(fs_hello_format(&h, &b), FS_OK);
	assert_int_equal(fs_hello_parse(b.data, b.len, &got, &e), FS_OK);
	assert_string_equal(got.program, h.program);
	assert_string_equal(got.fingerprint, h.fingerprint);
	assert_string_equal(got.cause, "exec: ?? no such \"file\"?");
	assert_int_equal(got.n_embd, 2560);
	assert_true(got.max_picture_bytes == (int64_t)64 << 20);
	assert_int_equal(got.liveness_port, 0);
	assert_null(strstr((const char *)b.data, "lease"));
	fs_buf_finish(&b);
}

static void wrong_hellos_are_refused(void **state)
{
	static const char *const wrong[] = {"", "{", "[]", "1", "{}", "{\"version\":\"1\"}",
	        "{\"version\":1.0}", "{\"version\":-1}", "{\"version\":1,\"n_embd\":65537}",
	        "{\"version\":1,\"n_embd\":4294967297}", "{\"version\":1,\"program\":7}",
	        "{\"version\":1,\"liveness_port\":65536}", "{\"version\":1,\"state\":\"tired\"}",
	        "{\"version\":1,\"fingerprint\":\"abc\"}",
	        "{\"version\":1,\"state\":\"ready to go, and more\"}", "{\"version\":1,\"version\":1}",
	        "{\"version\":1,\"device\":\"a\\u0000b\"}", "{\"version\":1} x",
	        "{\"version\":1,\"device\":null}"};
	struct fs_hello h;
	char *deep = malloc(100001);

	for (size_t i = 0; i < FS_ARRAY_LEN(wrong); i++)
		if (parse_hello(wrong[i], &h) != FS_EFORMAT)
			fail_msg("taken: %s", wrong[i]);
	memset(deep, '[', 100000);
	deep[100000] = 0;
	assert_int_equal(parse_hello(deep, &h), FS_EFORMAT);
	free(deep);
	assert_int_equal(parse_hello("{\"version\":2}", &h), FS_ENOTSUP);
	assert_non_null(strstr(e.text, "version 2"));
	assert_int_equal(parse_hello("{\"version\":1,\"later\":{\"a\":[1]}}", &h), FS_OK);
}

/* ---- rows files ---- */

static char dir[] = "/tmp/fs-test-wire-XXXXXX";

static const char *file_path(const char *name)
{
	static char path[256];

	snprintf(path, sizeof(path), "%s/%s", dir, name);
	return path;
}

static void write_bytes(const void *bytes, size_t n)
{
	FILE *f = fopen(file_path("r.sve"), "wb");

	assert_non_null(f);
	assert_int_equal(fwrite(bytes, 1, n, f), n);
	fclose(f);
}

static void rows_files_have_these_bytes(void **state)
{
	static const uint8_t want[] = {0x53, 0x56, 0x45, 0x31};
	const float rows[4] = {1, -2, 0.5f, 0};
	const struct fs_rows_shape s = {2, 2, 1, 2};
	struct fs_rows_shape got;
	float *back;
	uint8_t bytes[64];
	struct stat st;
	FILE *f;

	assert_int_equal(fs_rows_write_file(file_path("r.sve"), &s, rows, &e), FS_OK);
	f = fopen(file_path("r.sve"), "rb");
	assert_non_null(f);
	assert_int_equal(fread(bytes, 1, sizeof(bytes), f), 36);
	fclose(f);
	assert_memory_equal(bytes, want, 4);
	assert_memory_equal(bytes + 4, "\2\0\0\0\2\0\0\0\1\0\0\0\2\0\0\0", 16);
	assert_memory_equal(bytes + 20, "\0\0\x80\x3f\0\0\0\xc0\0\0\0\x3f\0\0\0\0", 16);
	assert_int_equal(stat(file_path("r.sve"), &st), 0);
	assert_int_equal(st.st_mode & 0777, 0600);
	assert_int_equal(fs_rows_read_file(file_path("r.sve"), &got, &back, &e), FS_OK);
	assert_memory_equal(&got, &s, sizeof(s));
	assert_memory_equal(back, rows, sizeof(rows));
	free(back);
}

/* Who has the old file open keeps it whole; a failure leaves the old one and nothing else. */
static void rows_files_are_replaced_at_once(void **state)
{
	const float old[4] = {1, 2, 3, 4}, fresh[2] = {5, 6};
	const struct fs_rows_shape s = {2, 2, 1, 2}, smaller = {1, 1, 1, 2}, wrong = {2, 1, 1, 2};
	struct fs_rows_shape got;
	float *back;
	uint8_t bytes[64];
	char folder[256], part[300];

	assert_int_equal(fs_rows_replace_file(file_path("r.sve"), &s, old, &e), FS_OK);
	FILE *f = fopen(file_path("r.sve"), "rb");
	assert_non_null(f);
	assert_int_equal(fs_rows_replace_file(file_path("r.sve"), &smaller, fresh, &e), FS_OK);
	assert_int_equal(fread(bytes, 1, sizeof(bytes), f), 36);
	fclose(f);
	assert_int_equal(fs_rows_replace_file(file_path("r.sve"), &wrong, old, &e), FS_EFORMAT);
	assert_int_equal(fs_rows_read_file(file_path("r.sve"), &got, &back, &e), FS_OK);
	assert_memory_equal(&got, &smaller, sizeof(got));
	assert_memory_equal(back, fresh, sizeof(fresh));
	free(back);
	snprintf(folder, sizeof(folder), "%s", file_path("folder.sve"));
	snprintf(part, sizeof(part), "%s.%ld.part", folder, (long)getpid());
	assert_int_equal(mkdir(folder, 0700), 0);
	assert_int_equal(fs_rows_replace_file(folder, &s, old, &e), FS_EIO);
	assert_int_equal(access(part, F_OK), -1);
	assert_int_equal(rmdir(folder), 0);
}

static void halves_fit_their_header(void **state)
{
	const uint16_t rows[4] = {0x3c00, 0xc000, 0x3800, 0};
	const struct fs_rows_shape s = {2, 2, 1, 2};
	struct fs_rows_shape got;
	uint8_t bytes[64];
	FILE *f;

	assert_int_equal(fs_rows_write_file_f16(file_path("r.sve"), &s, rows, &e), FS_OK);
	f = fopen(file_path("r.sve"), "rb");
	assert_non_null(f);
	assert_int_equal(fread(bytes, 1, sizeof(bytes), f), 28);
	fclose(f);
	assert_memory_equal(bytes + 20, rows, 8);
	assert_int_equal(fs_rows_header_get_dtype(bytes, 28, FS_WIRE_F16, &got, &e), FS_OK);
	assert_int_equal(fs_rows_header_get(bytes, 28, &got, &e), FS_EFORMAT);
}

/* Rows that are still being written have no size yet but the one that their header tells. */
static void a_header_alone_tells_the_size(void **state)
{
	const struct fs_rows_shape s = {6, 3, 2, 5}, none = {0};
	struct fs_rows_shape got = none;
	uint8_t bytes[FS_ROWS_HEADER];
	size_t n = 7;

	fs_rows_header_put(bytes, &s);
	assert_int_equal(fs_rows_header_begin(bytes, FS_WIRE_F32, &got, &n, &e), FS_OK);
	assert_memory_equal(&got, &s, sizeof(s));
	assert_int_equal(n, 120);
	assert_int_equal(fs_rows_header_begin(bytes, FS_WIRE_F16, &got, &n, &e), FS_OK);
	assert_int_equal(n, 60);
	got = none;
	bytes[8] = 4; /* 4 x 2 are no 6 */
	assert_int_equal(fs_rows_header_begin(bytes, FS_WIRE_F32, &got, &n, &e), FS_EFORMAT);
	bytes[8] = 3;
	bytes[3] ^= 1;
	assert_int_equal(fs_rows_header_begin(bytes, FS_WIRE_F32, &got, &n, &e), FS_EFORMAT);
	assert_non_null(strstr(e.text, "magic"));
	assert_memory_equal(&got, &none, sizeof(none));
}

static void wrong_rows_files_are_refused(void **state)
{
	static const struct fs_rows_shape wrong[] = {{2, 1, 1, 2}, {0, 0, 0, 2}, {2, -2, -1, 2},
	        {-2, -2, 1, 2}, {2, 2, 1, -2}, {65537, 65537, 1, 1}, {1, 1, 1, 65537},
	        {65536, 256, 256, 65536}, {0, 65536, 65536, 1}, {INT32_MIN, INT32_MIN, 1, 1}};
	const struct fs_rows_shape s = {2, 2, 1, 2};
	struct fs_rows_shape got;
	uint8_t bytes[FS_ROWS_HEADER + 17] = {0};
	float *back, nan = NAN, inf = -INFINITY;

	for (size_t i = 0; i < FS_ARRAY_LEN(wrong); i++) {
		fs_rows_header_put(bytes, &wrong[i]);
		if (fs_rows_header_get(bytes, 36, &got, &e) != FS_EFORMAT)
			fail_msg("taken: %zu", i);
		assert_int_not_equal(
		        fs_rows_write_file(file_path("never"), &wrong[i], (const float *)&bytes, &e), FS_OK);
	}
	fs_rows_header_put(bytes, &s);
	for (size_t n = 0; n < sizeof(bytes); n++) {
		write_bytes(bytes, n);
		if (n != 36)
			assert_int_equal(fs_rows_read_file(file_path("r.sve"), &got, &back, &e), FS_EFORMAT);
	}
	write_bytes(bytes, 36);
	bytes[0] ^= 1;
	write_bytes(bytes, 36);
	assert_int_equal(fs_rows_read_file(file_path("r.sve"), &got, &back, &e), FS_EFORMAT);
	assert_non_null(strstr(e.text, "magic"));
	bytes[0] ^= 1;
	memcpy(bytes + 32, &nan, 4);
	write_bytes(bytes, 36);
	assert_int_equal(fs_rows_read_file(file_path("r.sve"), &got, &back, &e), FS_EFORMAT);
	assert_non_null(strstr(e.text, "element 3"));
	memcpy(bytes + 24, &inf, 4);
	write_bytes(bytes, 36);
	assert_int_equal(fs_rows_read_file(file_path("r.sve"), &got, &back, &e), FS_EFORMAT);
	assert_non_null(strstr(e.text, "element 1"));
	assert_int_equal(fs_rows_read_file(file_path("absent"), &got, &back, &e), FS_EIO);
}

/* /dev/full takes the open and refuses the bytes. */
static void failed_writes_leave_nothing(void **state)
{
	const struct fs_rows_shape s = {2, 2, 1, 2};
	const float rows[4] = {0};
	char link[256];

	assert_int_equal(fs_rows_write_file(file_path("no/such/folder"), &s, rows, &e), FS_EIO);
	snprintf(link, sizeof(link), "%s", file_path("full"));
	assert_int_equal(symlink("/dev/full", link), 0);
	assert_int_equal(fs_rows_write_file(link, &s, rows, &e), FS_EIO);
	assert_non_null(strstr(e.text, "No space"));
	assert_int_equal(access(link, F_OK), -1);
}

static int setup(void **state)
{
	return mkdtemp(dir) == NULL;
}

static int teardown(void **state)
{
	unlink(file_path("r.sve"));
	return rmdir(dir);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
	        cmocka_unit_test(replies_are_read),
	        cmocka_unit_test(wrong_replies_are_refused),
	        cmocka_unit_test(orders_are_read),
	        cmocka_unit_test(wrong_orders_are_refused),
	        cmocka_unit_test(orders_are_written),
	        cmocka_unit_test(lines_are_found),
	        cmocka_unit_test(frames_have_these_bytes),
	        cmocka_unit_test(wrong_frames_are_refused_from_the_header),
	        cmocka_unit_test(enc_heads_are_checked),
	        cmocka_unit_test(rows_heads_are_checked),
	        cmocka_unit_test(errors_cross),
	        cmocka_unit_test(hello_crosses),
	        cmocka_unit_test(wrong_hellos_are_refused),
	        cmocka_unit_test(rows_files_have_these_bytes),
	        cmocka_unit_test(rows_files_are_replaced_at_once),
	        cmocka_unit_test(halves_fit_their_header),
	        cmocka_unit_test(a_header_alone_tells_the_size),
	        cmocka_unit_test(wrong_rows_files_are_refused),
	        cmocka_unit_test(failed_writes_leave_nothing),
	};

	return cmocka_run_group_tests(tests, setup, teardown);
}
