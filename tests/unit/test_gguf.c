/*
 * GGUF reader: files made by hand, right ones and every kind of wrong one; the scalar dequantisation against
 * values worked out from the format's description.
 */
#include "tests/unit/gguf_make.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

static char dir[] = "/tmp/fs-test-gguf-XXXXXX";

static const char *file_path(const char *name)
{
	static char path[256];

	snprintf(path, sizeof(path), "%s/%s", dir, name);
	return path;
}

static int open_bytes(const void *bytes, size_t n, struct fs_gguf **g, struct fs_errbuf *e)
{
	const char *path = file_path("t.gguf");

	gm_write(path, bytes, n);
	return fs_gguf_open(g, path, e);
}

static void expect_refused(const struct gguf_make *m, int err, const char *text)
{
	struct fs_gguf *g = NULL;
	struct fs_errbuf e = {{0}};
	int got = open_bytes(m->file.data, m->file.len, &g, &e);

	if (got == FS_OK)
		fs_gguf_close(g);
	if (got != err || strstr(e.text, text) == NULL)
		fail_msg("got %d \"%s\", expected %d with \"%s\"", got, e.text, err, text);
}

static const float some_floats[8] = {1, 2, 3, 4, 5, 6, 7, -8};

static void make_good(struct gguf_make *m)
{
	static const char *const words[] = {"a", "", "long word"};
	static const float mean[3] = {0.5f, 0.25f, -1};
	static const int8_t small[2] = {-3, 7};
	const int64_t ne[2] = {4, 2}, ne1[1] = {3};
	const uint64_t big = UINT64_MAX - 1;

	gm_init(m);
	gm_str(m, "general.architecture", "qwen2vl");
	gm_u32(m, "n", 7);
	gm_i32(m, "neg", -2);
	gm_f32(m, "eps", 1e-6f);
	gm_bool(m, "yes", true);
	gm_kv(m, "big", 10, &big, 8);
	gm_arr_str(m, "words", words, 3);
	gm_arr(m, "mean", 6, mean, 3, 4);
	gm_arr(m, "small", 1, small, 2, 1);
	gm_tensor(m, "w", FS_F32, ne, 2, some_floats, sizeof(some_floats));
	gm_tensor(m, "b", FS_F16, ne1, 1, "\x00\x3c\x00\x40\x00\xbc", 6);
	gm_build(m);
}

static void test_reads_metadata(void **state)
{
	struct gguf_make m;
	struct fs_gguf *g;
	struct fs_errbuf e;
	uint32_t u;
	int32_t i, small[2];
	uint64_t big;
	float f, mean[3];
	bool b;
	const char *s;
	size_t n;
	struct fs_gguf_strs it;

	make_good(&m);
	assert_int_equal(open_bytes(m.file.data, m.file.len, &g, &e), FS_OK);
	assert_int_equal(fs_gguf_u32(g, "n", &u, &e), FS_OK);
	assert_int_equal(u, 7);
	assert_int_equal(fs_gguf_i32(g, "neg", &i, &e), FS_OK);
	assert_int_equal(i, -2);
	assert_int_equal(fs_gguf_u32(g, "neg", &u, &e), FS_EFORMAT);
	assert_int_equal(fs_gguf_u64(g, "big", &big, &e), FS_OK);
	assert_true(big == UINT64_MAX - 1);
	assert_int_equal(fs_gguf_i32(g, "big", &i, &e), FS_EFORMAT);
	assert_non_null(strstr(e.text, "big"));
	assert_int_equal(fs_gguf_f32(g, "eps", &f, &e), FS_OK);
	assert_true(f == 1e-6f);
	assert_int_equal(fs_gguf_f32(g, "general.architecture", &f, &e), FS_EFORMAT);
	assert_int_equal(fs_gguf_bool(g, "yes", &b, &e), FS_OK);
	assert_true(b);
	assert_int_equal(fs_gguf_str(g, "general.architecture", &s, &n, &e), FS_OK);
	assert_int_equal(n, 7);
	assert_memory_equal(s, "qwen2vl", 7);
	assert_int_equal(fs_gguf_u32(g, "absent.key", &u, &e), FS_ENOTFOUND);
	assert_non_null(strstr(e.text, "absent.key"));
	assert_true(fs_gguf_has(g, "n"));
	assert_false(fs_gguf_has(g, "nn"));
	assert_int_equal(fs_gguf_arr_len(g, "words", &n, &e), FS_OK);
	assert_int_equal(n, 3);
	assert_int_equal(fs_gguf_arr_f32(g, "mean", mean, 3, &e), FS_OK);
	assert_true(mean[1] == 0.25f && mean[2] == -1);
	assert_int_equal(fs_gguf_arr_f32(g, "mean", mean, 4, &e), FS_EINVAL);
	assert_int_equal(fs_gguf_arr_i32(g, "small", small, 2, &e), FS_OK);
	assert_int_equal(small[0], -3);
	assert_int_equal(fs_gguf_arr_i32(g, "mean", small, 2, &e), FS_EFORMAT);
	assert_int_equal(fs_gguf_arr_strs(g, "words", &it, &e), FS_OK);
	assert_true(fs_gguf_strs_next(&it, &s, &n) && n == 1 && s[0] == 'a');
	assert_true(fs_gguf_strs_next(&it, &s, &n) && n == 0);
	assert_true(fs_gguf_strs_next(&it, &s, &n) && n == 9 && memcmp(s, "long word", 9) == 0);
	assert_false(fs_gguf_strs_next(&it, &s, &n));
	assert_int_equal(fs_gguf_arr_strs(g, "mean", &it, &e), FS_EFORMAT);
	fs_gguf_close(g);
	gm_finish(&m);
}

static void test_reads_tensors(void **state)
{
	struct gguf_make m;
	struct fs_gguf *g;
	struct fs_errbuf e;
	const struct fs_gguf_tensor *t;
	struct fs_gguf_tensor part;
	float y[3];
	char fp[33], fp2[33];

	make_good(&m);
	for (m.version = 2; m.version <= 3; m.version++) {
		gm_build(&m);
		assert_int_equal(open_bytes(m.file.data, m.file.len, &g, &e), FS_OK);
		assert_int_equal(fs_gguf_n_tensors(g), 2);
		t = fs_gguf_tensor(g, "w");
		assert_non_null(t);
		assert_int_equal(t->ne[0], 4);
		assert_int_equal(t->ne[1], 2);
		assert_int_equal(t->ne[2], 1);
		assert_int_equal(t->nbytes, 32);
		assert_memory_equal(t->data, some_floats, 32);
		assert_int_equal(fs_gguf_need(g, "b", 3, 0, &t, &e), FS_OK);
		fs_dequantize_row(t->type, t->data, y, 3);
		assert_true(y[0] == 1 && y[1] == 2 && y[2] == -1);
		part = fs_gguf_part(t, 0, 1, 2);
		assert_true(part.ne[0] == 2 && part.nbytes == t->nbytes / 3 * 2);
		fs_dequantize_row(part.type, part.data, y, 2);
		assert_true(y[0] == 2 && y[1] == -1);
		part = fs_gguf_part(fs_gguf_tensor(g, "w"), 1, 1, 1);
		assert_true(part.ne[0] == 4 && part.ne[1] == 1 && part.nbytes == 16);
		assert_memory_equal(part.data, some_floats + 4, 16);
		assert_int_equal(fs_gguf_need(g, "w", 4, 3, &t, &e), FS_EFORMAT);
		assert_non_null(strstr(e.text, "4 x 2, expected 4 x 3"));
		assert_int_equal(fs_gguf_need(g, "v", 0, 0, &t, &e), FS_ENOTFOUND);
		assert_null(fs_gguf_tensor(g, "v"));
		assert_int_equal(fs_gguf_tensor_bytes(g), 38);
		assert_int_equal(fs_gguf_fingerprint(g, fp, &e), FS_OK);
		assert_int_equal(strlen(fp), 32);
		fs_gguf_close(g);
	}
	m.version = 3;
	m.blob.data[1] ^= 1;
	gm_build(&m);
	assert_int_equal(open_bytes(m.file.data, m.file.len, &g, &e), FS_OK);
	assert_int_equal(fs_gguf_fingerprint(g, fp2, &e), FS_OK);
	assert_string_not_equal(fp, fp2);
	fs_gguf_close(g);
	gm_finish(&m);
}

static void test_refuses_truncation_anywhere(void **state)
{
	struct gguf_make m;
	struct fs_gguf *g;
	struct fs_errbuf e;
	size_t whole;

	make_good(&m);
	whole = m.file.len - 26; /* the padding behind the last tensor may be missing */
	for (size_t n = 0; n < whole; n++) {
		int err = open_bytes(m.file.data, n, &g, &e);

		if (err != FS_EFORMAT)
			fail_msg("%zu of %zu bytes: %d", n, whole, err);
	}
	assert_int_equal(open_bytes(m.file.data, whole, &g, &e), FS_OK);
	fs_gguf_close(g);
	gm_finish(&m);
}

/* Whatever a flipped byte does, it must not reach outside the file: the sanitizers watch. */
static void test_survives_flipped_bytes(void **state)
{
	struct gguf_make m;
	struct fs_gguf *g;
	struct fs_errbuf e;
	static const uint8_t flips[] = {0x01, 0x80, 0xff};

	make_good(&m);
	for (size_t i = 0; i < m.file.len; i++)
		for (size_t k = 0; k < sizeof(flips); k++) {
			m.file.data[i] ^= flips[k];
			if (open_bytes(m.file.data, m.file.len, &g, &e) == FS_OK) {
				float y[3];
				const struct fs_gguf_tensor *t = fs_gguf_tensor(g, "b");

				if (t != NULL && t->type == FS_F16 && t->ne[0] == 3)
					fs_dequantize_row(t->type, t->data, y, 3);
				fs_gguf_close(g);
			}
			m.file.data[i] ^= flips[k];
		}
	gm_finish(&m);
}

static void test_refuses_bad_headers(void **state)
{
	struct gguf_make m;
	uint64_t counts[] = {UINT64_MAX, INT64_MAX, (uint64_t)1 << 61, 100000};

	make_good(&m);
	m.file.data[0] = 'g';
	expect_refused(&m, FS_EFORMAT, "not a GGUF");
	for (uint32_t v = 0; v <= 5; v++) {
		m.version = v;
		gm_build(&m);
		if (v != 2 && v != 3)
			expect_refused(&m, FS_ENOTSUP, "version");
	}
	m.version = 0x03000000;
	gm_build(&m);
	expect_refused(&m, FS_ENOTSUP, "big-endian");
	m.version = 3;
	for (size_t i = 0; i < FS_ARRAY_LEN(counts); i++) {
		gm_build(&m);
		memcpy(m.file.data + 8, &counts[i], 8);
		expect_refused(&m, FS_EFORMAT, i == 0 ? "negative" : "more than fit");
		gm_build(&m);
		memcpy(m.file.data + 16, &counts[i], 8);
		expect_refused(&m, FS_EFORMAT, i == 0 ? "negative" : "more than fit");
	}
	gm_finish(&m);
}

static void test_refuses_bad_metadata(void **state)
{
	struct gguf_make m;
	uint64_t huge = (uint64_t)1 << 62;
	int32_t elem;

	gm_init(&m);
	gm_u32(&m, "twice", 1);
	gm_u32(&m, "twice", 1);
	gm_build(&m);
	expect_refused(&m, FS_EFORMAT, "twice");
	gm_finish(&m);

	gm_init(&m);
	gm_u32(&m, "", 1);
	gm_build(&m);
	expect_refused(&m, FS_EFORMAT, "empty");
	gm_finish(&m);

	for (elem = 4; elem <= 13;
	        elem++) { /* u32, strings, arrays of arrays, an unknown type: with 2^62 elements */
		gm_init(&m);
		gm_kv(&m, "a", 9, &elem, 4);
		gm_bytes(&m.kv, &huge, 8);
		gm_build(&m);
		expect_refused(&m, FS_EFORMAT, "array");
		gm_finish(&m);
	}
	gm_init(&m);
	gm_kv(&m, "t", 13, "abcd", 4);
	gm_build(&m);
	expect_refused(&m, FS_EFORMAT, "unknown metadata type");
	gm_finish(&m);
}

static void test_refuses_bad_alignment(void **state)
{
	struct gguf_make m;
	static const uint32_t wrong[] = {0, 3, 48, 0x80000000};
	const int64_t ne[1] = {4};

	for (size_t i = 0; i < FS_ARRAY_LEN(wrong); i++) {
		gm_init(&m);
		gm_u32(&m, "general.alignment", wrong[i]);
		gm_build(&m);
		expect_refused(&m, FS_EFORMAT, "alignment");
		gm_finish(&m);
	}
	gm_init(&m);
	gm_i32(&m, "general.alignment", 64);
	gm_build(&m);
	expect_refused(&m, FS_EFORMAT, "not u32");
	gm_finish(&m);

	gm_init(&m);
	m.alignment = 64;
	gm_u32(&m, "general.alignment", 64);
	gm_table_entry(&m, "w", FS_F32, ne, 1, 32);
	gm_bytes(&m.blob, some_floats, 32);
	gm_bytes(&m.blob, some_floats, 32);
	gm_build(&m);
	expect_refused(&m, FS_EFORMAT, "not aligned");
	gm_finish(&m);
}

static void test_refuses_bad_tensors(void **state)
{
	struct gguf_make m;
	static const struct {
		int64_t ne[4];
		uint32_t n;
		int32_t type;
		uint64_t offset;
		const char *text;
	} bad[] = {
	        {{8}, 1, FS_F32, 32, "outside"},
	        {{9}, 1, FS_F32, 0, "outside"},
	        {{8}, 1, FS_F32, (uint64_t)1 << 63, "outside"},
	        {{8}, 1, FS_F32, UINT64_MAX - 31, "outside"},
	        {{0}, 1, FS_F32, 0, "impossible"},
	        {{-8}, 1, FS_F32, 0, "impossible"},
	        {{INT64_MAX}, 1, FS_F32, 0, "impossible"},
	        {{(int64_t)1 << 32, (int64_t)1 << 32}, 2, FS_F32, 0, "impossible"},
	        {{(int64_t)1 << 61}, 1, FS_F32, 0, "outside"},
	        {{(int64_t)1 << 60}, 1, FS_F32, 0, "outside"},
	        {{33}, 1, FS_Q8_0, 0, "do not divide"},
	        {{128}, 1, FS_Q4_K, 0, "do not divide"},
	};

	for (size_t i = 0; i < FS_ARRAY_LEN(bad); i++) {
		gm_init(&m);
		gm_table_entry(&m, "w", bad[i].type, bad[i].ne, bad[i].n, bad[i].offset);
		gm_bytes(&m.blob, some_floats, 32);
		gm_build(&m);
		expect_refused(&m, FS_EFORMAT, bad[i].text);
		gm_finish(&m);
	}
	gm_init(&m);
	gm_table_entry(&m, "w", FS_F32, bad[0].ne, 1, 0);
	gm_table_entry(&m, "w", FS_F32, bad[0].ne, 1, 0);
	gm_bytes(&m.blob, some_floats, 32);
	gm_build(&m);
	expect_refused(&m, FS_EFORMAT, "twice");
	gm_finish(&m);
	gm_init(&m);
	gm_table_entry(&m, "0123456789012345678901234567890123456789012345678901234567890123", FS_F32,
	        bad[0].ne, 1, 0);
	gm_bytes(&m.blob, some_floats, 32);
	gm_build(&m);
	expect_refused(&m, FS_EFORMAT, "63 bytes");
	gm_finish(&m);
	gm_init(&m);
	gm_table_entry(&m, "w", FS_F32, (const int64_t[5]){1, 1, 1, 1, 1}, 5, 0);
	gm_bytes(&m.blob, some_floats, 32);
	gm_build(&m);
	expect_refused(&m, FS_EFORMAT, "5 dimensions");
	gm_finish(&m);
}

static void test_unknown_type_only_when_asked(void **state)
{
	struct gguf_make m;
	struct fs_gguf *g;
	struct fs_errbuf e;
	const struct fs_gguf_tensor *t;
	const int64_t ne[1] = {256};

	gm_init(&m);
	gm_table_entry(&m, "iq", 16, ne, 1, 0);
	gm_bytes(&m.blob, some_floats, 32);
	gm_build(&m);
	assert_int_equal(open_bytes(m.file.data, m.file.len, &g, &e), FS_OK);
	assert_null(fs_gguf_tensor(g, "iq"));
	assert_int_equal(fs_gguf_need(g, "iq", 0, 0, &t, &e), FS_ENOTSUP);
	assert_non_null(strstr(e.text, "type 16"));
	fs_gguf_close(g);
	gm_finish(&m);
}

static void write_split(int no, int count, int says, int total, const char *tensor)
{
	struct gguf_make m;
	const int64_t ne[1] = {8};
	char name[64];

	gm_init(&m);
	gm_u16(&m, "split.no", (uint16_t)says);
	gm_u16(&m, "split.count", (uint16_t)count);
	gm_i32(&m, "split.tensors.count", total);
	gm_u32(&m, "part", (uint32_t)no);
	gm_tensor(&m, tensor, FS_F32, ne, 1, some_floats, 32);
	gm_build(&m);
	snprintf(name, sizeof(name), "s-%05d-of-%05d.gguf", no + 1, count);
	gm_write(file_path(name), m.file.data, m.file.len);
	gm_finish(&m);
}

static void test_split_files(void **state)
{
	struct fs_gguf *g;
	struct fs_errbuf e;
	uint32_t part;

	write_split(0, 2, 0, 2, "a");
	assert_int_equal(
	        fs_gguf_open(&g, file_path("s-00001-of-00002.gguf"), &e), FS_EIO); /* no second part yet */
	assert_non_null(strstr(e.text, "s-00002-of-00002.gguf"));
	write_split(1, 2, 1, 2, "b");
	assert_int_equal(fs_gguf_open(&g, file_path("s-00001-of-00002.gguf"), &e), FS_OK);
	assert_int_equal(fs_gguf_n_tensors(g), 2);
	assert_memory_equal(fs_gguf_tensor(g, "b")->data, some_floats, 32);
	assert_int_equal(fs_gguf_u32(g, "part", &part, &e), FS_OK);
	assert_int_equal(part, 0);
	fs_gguf_close(g);
	assert_int_equal(fs_gguf_open(&g, file_path("s-00002-of-00002.gguf"), &e), FS_EINVAL);
	assert_non_null(strstr(e.text, "first part"));
	write_split(1, 2, 0, 2, "b");
	assert_int_equal(fs_gguf_open(&g, file_path("s-00001-of-00002.gguf"), &e), FS_EFORMAT);
	write_split(1, 2, 1, 2, "a");
	assert_int_equal(fs_gguf_open(&g, file_path("s-00001-of-00002.gguf"), &e), FS_EFORMAT);
	assert_non_null(strstr(e.text, "twice"));
	write_split(0, 2, 0, 3, "b");
	assert_int_equal(fs_gguf_open(&g, file_path("s-00001-of-00002.gguf"), &e), FS_EFORMAT);
	assert_non_null(strstr(e.text, "2 tensors, not 3"));
}

static void test_missing_file(void **state)
{
	struct fs_gguf *g;
	struct fs_errbuf e;

	assert_int_equal(fs_gguf_open(&g, file_path("absent.gguf"), &e), FS_EIO);
	assert_non_null(strstr(e.text, "absent.gguf"));
	assert_int_equal(fs_gguf_open(&g, dir, &e), FS_EIO);
	assert_non_null(strstr(e.text, "regular"));
}

/* ---- numbers ---- */

static void test_half_all_values(void **state)
{
	for (uint32_t h = 0; h < 65536; h++) {
		int exp = (int)(h >> 10 & 31), man = (int)(h & 0x3ff);
		double want = exp == 0 ? ldexp(man, -24) : ldexp(1024 + man, exp - 25);
		float got = fs_f16_to_f32((uint16_t)h);

		if (h & 0x8000)
			want = -want;
		if (exp == 31) {
			assert_true(man != 0 ? isnan(got) : isinf(got));
			if (man != 0)
				assert_true(isnan(fs_f16_to_f32(fs_f32_to_f16(got))));
			else
				assert_int_equal(fs_f32_to_f16(got), h);
			continue;
		}
		assert_true((double)got == want && !signbit(got) == !signbit(want));
		assert_int_equal(fs_f32_to_f16(got), h);
	}
}

/* Halfway between two neighbours goes to the even one, a hair above or below to the nearer. */
static void test_half_rounding(void **state)
{
	for (uint32_t h = 0; h < 0x7bff; h++) {
		float lo = fs_f16_to_f32((uint16_t)h), hi = fs_f16_to_f32((uint16_t)(h + 1)),
		      mid = (lo + hi) / 2;

		assert_int_equal(fs_f32_to_f16(mid), h % 2 == 0 ? h : h + 1);
		assert_int_equal(fs_f32_to_f16(nextafterf(mid, INFINITY)), h + 1);
		assert_int_equal(fs_f32_to_f16(nextafterf(mid, 0)), h);
		assert_int_equal(fs_f32_to_f16(-mid), 0x8000 | (h % 2 == 0 ? h : h + 1));
	}
	assert_int_equal(fs_f32_to_f16(65519.996f), 0x7bff);
	assert_int_equal(fs_f32_to_f16(65520.0f), 0x7c00);
	assert_int_equal(fs_f32_to_f16(1e30f), 0x7c00);
	assert_int_equal(fs_f32_to_f16(1e-30f), 0);
}

static void test_bf16_rounding(void **state)
{
	assert_int_equal(fs_f32_to_bf16(1.0f), 0x3f80);
	assert_int_equal(fs_f32_to_bf16(1.00390625f), 0x3f80);                /* halfway, even below */
	assert_int_equal(fs_f32_to_bf16(1.01171875f), 0x3f82);                /* halfway, even above */
	assert_int_equal(fs_f32_to_bf16(nextafterf(1.00390625f, 2)), 0x3f81); /* a hair above halfway */
	assert_int_equal(fs_f32_to_bf16(3.4028235e38f), 0x7f80);              /* carries into infinity */
	assert_true(isnan(fs_bf16_to_f32(fs_f32_to_bf16(NAN))));
	assert_true(fs_bf16_to_f32(0xc040) == -3.0f);
}

static void test_small_blocks(void **state)
{
	uint8_t b[34] = {0};
	float y[32];

	/* scale 0.5 (0x3800), minimum 2 (0x4000); byte j holds j low and 15 - j high */
	memcpy(b, "\x00\x38", 2);
	for (int j = 0; j < 16; j++)
		b[2 + j] = (uint8_t)(j | (15 - j) << 4);
	fs_dequantize_row(FS_Q4_0, b, y, 32);
	for (int j = 0; j < 16; j++)
		assert_true(y[j] == 0.5f * (float)(j - 8) && y[j + 16] == 0.5f * (float)(7 - j));
	memmove(b + 4, b + 2, 16);
	memcpy(b + 2, "\x00\x40", 2);
	fs_dequantize_row(FS_Q4_1, b, y, 32);
	for (int j = 0; j < 16; j++)
		assert_true(y[j] == 0.5f * (float)j + 2 && y[j + 16] == 0.5f * (float)(15 - j) + 2);
	/* fifth bits: elements 0, 3 and 31 */
	memmove(b + 8, b + 4, 16);
	memcpy(b + 4, "\x09\x00\x00\x80", 4);
	fs_dequantize_row(FS_Q5_1, b, y, 32);
	for (int j = 0; j < 16; j++) {
		assert_true(y[j] == 0.5f * (float)(j + (j == 0 || j == 3 ? 16 : 0)) + 2);
		assert_true(y[j + 16] == 0.5f * (float)(15 - j + (j == 15 ? 16 : 0)) + 2);
	}
	memmove(b + 2, b + 4, 20);
	fs_dequantize_row(FS_Q5_0, b, y, 32);
	for (int j = 0; j < 16; j++) {
		assert_true(y[j] == 0.5f * (float)(j - 16 + (j == 0 || j == 3 ? 16 : 0)));
		assert_true(y[j + 16] == 0.5f * (float)(-1 - j + (j == 15 ? 16 : 0)));
	}
	for (int j = 0; j < 32; j++)
		b[2 + j] = (uint8_t)(j * 8 - 128);
	fs_dequantize_row(FS_Q8_0, b, y, 32);
	for (int j = 0; j < 32; j++)
		assert_true(y[j] == 0.5f * (float)(j * 8 - 128));
}

/* Packs six-bit scales and minimums as ggml does, from the other side. */
static void pack_k_table(uint8_t t[12], const int *sc, const int *mn)
{
	memset(t, 0, 12);
	for (int s = 0; s < 4; s++) {
		t[s] = (uint8_t)(sc[s] | (sc[s + 4] >> 4) << 6);
		t[s + 4] = (uint8_t)(mn[s] | (mn[s + 4] >> 4) << 6);
		t[s + 8] = (uint8_t)((sc[s + 4] & 15) | (mn[s + 4] & 15) << 4);
	}
}

static void test_k_blocks(void **state)
{
	const int sc[8] = {1, 63, 17, 40, 33, 2, 63, 16}, mn[8] = {0, 5, 63, 32, 48, 63, 1, 17};
	uint8_t b[210] = {0};
	float y[256];
	int q[256];

	for (int i = 0; i < 256; i++)
		q[i] = (i * 7 + i / 32) % 32;
	memcpy(b, "\x00\x30\x00\x34", 4); /* 0.125 and 0.25 */
	pack_k_table(b + 4, sc, mn);
	for (int i = 0; i < 256; i++)
		b[16 + i / 64 * 32 + i % 32] |= (uint8_t)((q[i] & 15) << (i % 64 >= 32 ? 4 : 0));
	fs_dequantize_row(FS_Q4_K, b, y, 256);
	for (int i = 0; i < 256; i++)
		assert_true(y[i] == 0.125f * (float)(sc[i / 32] * (q[i] & 15)) - 0.25f * (float)mn[i / 32]);

	memmove(b + 48, b + 16, 128);
	memset(b + 16, 0, 32);
	for (int i = 0; i < 256; i++)
		b[16 + i % 32] |= (uint8_t)((q[i] >> 4) << (i / 32));
	fs_dequantize_row(FS_Q5_K, b, y, 256);
	for (int i = 0; i < 256; i++)
		assert_true(y[i] == 0.125f * (float)(sc[i / 32] * q[i]) - 0.25f * (float)mn[i / 32]);

	memset(b, 0, sizeof(b));
	for (int i = 0; i < 256; i++) {
		int half = i / 128, quarter = i % 128 / 32, l = i % 32, v = (i * 11 + i / 64) % 64;

		q[i] = v;
		b[64 * half + (quarter % 2) * 32 + l] |= (uint8_t)((v & 15) << (quarter >= 2 ? 4 : 0));
		b[128 + 32 * half + l] |= (uint8_t)((v >> 4) << (2 * quarter));
	}
	for (int s = 0; s < 16; s++)
		b[192 + s] = (uint8_t)(int8_t)(s * 16 - 128);
	memcpy(b + 208, "\x00\x30", 2);
	fs_dequantize_row(FS_Q6_K, b, y, 256);
	for (int i = 0; i < 256; i++)
		assert_true(y[i] == 0.125f * (float)((i / 16 * 16 - 128) * (q[i] - 32)));
}

static void test_quantize_rows(void **state)
{
	float x[64], y[64];
	uint8_t b[68];

	for (int i = 0; i < 64; i++)
		x[i] = sinf((float)i) * 3;
	assert_int_equal(fs_quantize_row(FS_Q8_0, x, b, 64), FS_OK);
	fs_dequantize_row(FS_Q8_0, b, y, 64);
	for (int i = 0; i < 64; i++)
		assert_true(fabsf(x[i] - y[i]) <= 3.0f / 127 / 2 * 1.01f);
	memset(x, 0, sizeof(x));
	assert_int_equal(fs_quantize_row(FS_Q8_0, x, b, 64), FS_OK);
	fs_dequantize_row(FS_Q8_0, b, y, 64);
	assert_true(y[5] == 0);
	assert_int_equal(fs_quantize_row(FS_Q4_K, x, b, 64), FS_ENOTSUP);
	assert_int_equal(fs_quantize_row(FS_Q8_0, x, b, 33), FS_EINVAL);
}

static int setup(void **state)
{
	return mkdtemp(dir) == NULL;
}

/* ---- a file that is cut while it is open ---- */

static void *touch(void *arg)
{
	const struct fs_gguf *g = arg;
	volatile uint8_t sum = 0;

	for (size_t i = 0; i < fs_gguf_n_tensors(g); i++) {
		const struct fs_gguf_tensor *t = fs_gguf_tensor_at(g, i);
		const uint8_t *bytes = t->data;
		for (size_t k = 0; k < t->nbytes; k++)
			sum = (uint8_t)(sum + bytes[k]);
	}
	return NULL;
}

/* The child's own doing: opens, cuts, reads; 0 when nothing ended it. */
static int cut_and_read(const char *path, bool in_a_thread)
{
	struct fs_gguf *g = NULL, *closed = NULL;
	pthread_t t;

	fs_gguf_name_changed_files();
	if (fs_gguf_open(&closed, path, NULL) || fs_gguf_open(&g, path, NULL))
		return 1;
	fs_gguf_close(closed); /* what is closed is not looked at */
	touch(g);
	if (truncate(path, 0))
		return 2;
	if (!in_a_thread)
		touch(g);
	else if (fs_thread_start(&t, "reader", touch, g, NULL) || pthread_join(t, NULL))
		return 3;
	return 0;
}

static int ended(bool in_a_thread, char *said, size_t cap)
{
	const char *path = file_path("t.gguf");
	struct gguf_make m;
	int fds[2], status;

	make_good(&m);
	gm_write(path, m.file.data, m.file.len);
	gm_finish(&m);
	assert_int_equal(pipe(fds), 0);
	pid_t pid = fork();
	if (pid == 0) {
		dup2(fds[1], STDERR_FILENO);
		close(fds[0]);
		close(fds[1]);
		_exit(cut_and_read(path, in_a_thread));
	}
	close(fds[1]);
	size_t n = 0;
	for (ssize_t r; (r = read(fds[0], said + n, cap - 1 - n)) > 0;)
		n += (size_t)r;
	said[n] = '\0';
	close(fds[0]);
	assert_int_equal(waitpid(pid, &status, 0), pid);
	return status;
}

static void test_a_file_that_is_cut_in_use_is_named(void **state)
{
	char said[2048];
	for (int thread = 0; thread < 2; thread++) {
		int status = ended(thread != 0, said, sizeof(said));
		if (!WIFEXITED(status) || WEXITSTATUS(status) != FS_GGUF_CHANGED_STATUS)
			fail_msg("status %#x, \"%s\"", (unsigned)status, said);
		if (!strstr(said, file_path("t.gguf")) || !strstr(said, "was changed while it was in use"))
			fail_msg("\"%s\"", said);
	}
}

static int teardown(void **state)
{
	static const char *const names[] = {"t.gguf", "s-00001-of-00002.gguf", "s-00002-of-00002.gguf"};

	for (size_t i = 0; i < FS_ARRAY_LEN(names); i++)
		unlink(file_path(names[i]));
	return rmdir(dir);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
	        cmocka_unit_test(test_reads_metadata),
	        cmocka_unit_test(test_reads_tensors),
	        cmocka_unit_test(test_refuses_truncation_anywhere),
	        cmocka_unit_test(test_survives_flipped_bytes),
	        cmocka_unit_test(test_refuses_bad_headers),
	        cmocka_unit_test(test_refuses_bad_metadata),
	        cmocka_unit_test(test_refuses_bad_alignment),
	        cmocka_unit_test(test_refuses_bad_tensors),
	        cmocka_unit_test(test_unknown_type_only_when_asked),
	        cmocka_unit_test(test_split_files),
	        cmocka_unit_test(test_missing_file),
	        cmocka_unit_test(test_a_file_that_is_cut_in_use_is_named),
	        cmocka_unit_test(test_half_all_values),
	        cmocka_unit_test(test_half_rounding),
	        cmocka_unit_test(test_bf16_rounding),
	        cmocka_unit_test(test_small_blocks),
	        cmocka_unit_test(test_k_blocks),
	        cmocka_unit_test(test_quantize_rows),
	};

	return cmocka_run_group_tests(tests, setup, teardown);
}
