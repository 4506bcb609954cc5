/*
 * Vocabulary stubs: what stays of a model, what does not, and which files are refused. Files are read with
 * the reader of this tree and, where it is lenient, byte by byte as the format says.
 */
#include "tests/unit/gguf_make.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

static char dir[] = "/tmp/fs-test-stub-XXXXXX";
static char model[256], stub[256];

static const char *const words[] = {"a", "", "\xc4\xa0word", "<|end|>"};
static const float scores[4] = {0, -1, -2, 0.5f};
static const int32_t kinds[4] = {1, 1, 1, 3};

/* The metadata in an order of its own, with the split's keys in the middle. */
static void put_metadata(struct gguf_make *m, int no, int count)
{
	gm_str(m, "general.architecture", "qwen2vl");
	gm_u32(m, "qwen2vl.block_count", 2);
	if (count > 0) {
		gm_u16(m, "split.no", (uint16_t)no);
		gm_u16(m, "split.count", (uint16_t)count);
		gm_i32(m, "split.tensors.count", 77);
	}
	gm_arr_str(m, "tokenizer.ggml.tokens", words, 4);
	gm_arr(m, "tokenizer.ggml.scores", 6, scores, 4, 4);
	gm_arr(m, "tokenizer.ggml.token_type", 5, kinds, 4, 4);
	gm_str(m, "tokenizer.chat_template", "{% for m in messages %}\n{% endfor %}");
	gm_bool(m, "a.flag", true);
}

static void put_tensors(struct gguf_make *m)
{
	const int64_t two[2] = {256, 3}, one[1] = {8}, odd[1] = {256};
	uint8_t *data = calloc(1, 4096);
	memset(data, 0x5a, 4096);
	gm_tensor(m, "token_embd.weight", FS_Q8_0, two, 2, data, 3 * 256 / 32 * 34);
	gm_tensor(m, "output_norm.weight", FS_F32, one, 1, data, 32);
	gm_tensor(m, "blk.0.attn_q.weight", 16, odd, 1, data, 66); /* IQ2_XXS: no type of ours */
	free(data);
}

static void write_model(struct gguf_make *m)
{
	gm_build(m);
	gm_write(model, m->file.data, m->file.len);
}

static uint64_t u64_at(const uint8_t *p)
{
	uint64_t v;
	memcpy(&v, p, 8);
	return v;
}

static struct fs_buf slurp(const char *path)
{
	struct fs_buf b;
	fs_buf_init(&b, 1 << 24);
	assert_int_equal(fs_buf_append_file(&b, path, NULL), FS_OK);
	return b;
}

static bool holds(const struct fs_buf *b, const void *what, size_t n)
{
	return memmem(b->data, b->len, what, n) != NULL;
}

static void expect_refused(int err, const char *text)
{
	struct fs_errbuf e = {""};
	int got = fs_gguf_write_stub(model, stub, NULL, &e);
	if (got != err || !strstr(e.text, text))
		fail_msg("got %d \"%s\", expected %d with \"%s\"", got, e.text, err, text);
	assert_int_equal(access(stub, F_OK), -1);
}

static void check_split_keys(const struct fs_gguf *g, uint32_t tensors)
{
	uint32_t v;
	assert_int_equal(fs_gguf_u32(g, "split.no", &v, NULL), FS_OK);
	assert_int_equal(v, 0);
	assert_int_equal(fs_gguf_u32(g, "split.count", &v, NULL), FS_OK);
	assert_int_equal(v, 1);
	assert_int_equal(fs_gguf_u32(g, "split.tensors.count", &v, NULL), FS_OK);
	assert_int_equal(v, tensors);
}

static void check_vocabulary(const struct fs_gguf *g)
{
	struct fs_gguf_strs it;
	const char *s;
	size_t n, i = 0;
	float got[4];
	assert_int_equal(fs_gguf_arr_strs(g, "tokenizer.ggml.tokens", &it, NULL), FS_OK);
	for (; fs_gguf_strs_next(&it, &s, &n); i++) {
		assert_int_equal(n, strlen(words[i]));
		assert_memory_equal(s, words[i], n);
	}
	assert_int_equal(i, 4);
	assert_int_equal(fs_gguf_arr_f32(g, "tokenizer.ggml.scores", got, 4, NULL), FS_OK);
	assert_memory_equal(got, scores, sizeof(got));
}

static void test_keeps_metadata_and_names(void **state)
{
	struct gguf_make m;
	struct fs_gguf_stub_info info;
	struct fs_gguf *g;
	struct fs_errbuf e = {""};
	gm_init(&m);
	put_metadata(&m, 0, 0);
	put_tensors(&m);
	write_model(&m);
	assert_int_equal(fs_gguf_write_stub(model, stub, &info, &e), FS_OK);
	assert_int_equal(info.n_keys, 7 + 3);
	assert_int_equal(info.n_tensors, 3);
	assert_int_equal(info.bytes_in, m.file.len);
	assert_int_equal(fs_gguf_open(&g, stub, &e), FS_OK);
	check_split_keys(g, 3);
	check_vocabulary(g);
	const uint8_t *first = fs_gguf_tensor_at(g, 0)->data;
	const char *const names[] = {"token_embd.weight", "output_norm.weight", "blk.0.attn_q.weight"};
	for (size_t i = 0; i < 3; i++) {
		const struct fs_gguf_tensor *t = fs_gguf_tensor_at(g, i);
		assert_string_equal(t->name, names[i]);
		assert_int_equal(t->type, FS_F32);
		assert_int_equal(t->n_dims, 1);
		assert_int_equal(t->ne[0], 1);
		assert_ptr_equal(t->data, first + 32 * i); /* one behind the other, as strict readers want */
	}
	fs_gguf_close(g);
	struct fs_buf bytes = slurp(stub);
	assert_int_equal(bytes.len, info.bytes_out);
	assert_int_equal(bytes.len % 32, 0);
	assert_memory_equal(bytes.data, "GGUF\3\0\0\0", 8);
	assert_int_equal(u64_at(bytes.data + 8), 3);
	assert_int_equal(u64_at(bytes.data + 16), 10);
	/* records as they were and in their order; no weights */
	assert_memory_equal(bytes.data + 24, m.kv.data, m.kv.len);
	assert_false(holds(&bytes, "\x5a\x5a\x5a\x5a\x5a\x5a\x5a\x5a", 8));
	fs_buf_finish(&bytes);
	gm_finish(&m);
}

static void test_first_part_is_enough(void **state)
{
	struct gguf_make m;
	struct fs_gguf *g;
	struct fs_errbuf e = {""};
	gm_init(&m);
	put_metadata(&m, 0, 3);
	put_tensors(&m);
	write_model(&m);
	assert_int_not_equal(fs_gguf_open(&g, model, &e), FS_OK); /* a whole model it is not */
	assert_int_equal(fs_gguf_write_stub(model, stub, NULL, &e), FS_OK);
	assert_int_equal(fs_gguf_open(&g, stub, &e), FS_OK);
	check_split_keys(g, 3);
	check_vocabulary(g);
	assert_true(fs_gguf_has(g, "a.flag"));
	fs_gguf_close(g);
	gm_finish(&m);
}

static void test_stub_of_a_stub_is_the_same(void **state)
{
	struct gguf_make m;
	gm_init(&m);
	put_metadata(&m, 0, 0);
	put_tensors(&m);
	write_model(&m);
	assert_int_equal(fs_gguf_write_stub(model, stub, NULL, NULL), FS_OK);
	struct fs_buf once = slurp(stub);
	gm_write(model, once.data, once.len);
	assert_int_equal(fs_gguf_write_stub(model, stub, NULL, NULL), FS_OK); /* and it is replaced */
	struct fs_buf twice = slurp(stub);
	assert_int_equal(once.len, twice.len);
	assert_memory_equal(once.data, twice.data, once.len);
	fs_buf_finish(&once);
	fs_buf_finish(&twice);
	gm_finish(&m);
}

static void test_alignment_and_version(void **state)
{
	struct gguf_make m;
	struct fs_gguf *g;
	gm_init(&m);
	m.version = 2;
	m.alignment = 4096;
	gm_u32(&m, "general.alignment", 4096);
	put_metadata(&m, 0, 0);
	put_tensors(&m);
	write_model(&m);
	assert_int_equal(fs_gguf_write_stub(model, stub, NULL, NULL), FS_OK);
	assert_int_equal(fs_gguf_open(&g, stub, NULL), FS_OK);
	assert_ptr_equal(
	        fs_gguf_tensor_at(g, 1)->data, (const uint8_t *)fs_gguf_tensor_at(g, 0)->data + 4096);
	fs_gguf_close(g);
	gm_finish(&m);
}

static void test_model_without_tensors(void **state)
{
	struct gguf_make m;
	struct fs_gguf *g;
	gm_init(&m);
	put_metadata(&m, 0, 2);
	write_model(&m);
	assert_int_equal(fs_gguf_write_stub(model, stub, NULL, NULL), FS_OK);
	assert_int_equal(fs_gguf_open(&g, stub, NULL), FS_OK);
	check_split_keys(g, 0);
	fs_gguf_close(g);
	gm_finish(&m);
}

static void test_refuses_what_makes_no_stub(void **state)
{
	struct gguf_make m;
	gm_init(&m);
	put_metadata(&m, 1, 3);
	write_model(&m);
	expect_refused(FS_EINVAL, "first part");
	gm_finish(&m);
	gm_init(&m);
	gm_str(&m, "general.architecture", "clip");
	put_tensors(&m);
	write_model(&m);
	expect_refused(FS_EINVAL, "no vocabulary");
	gm_finish(&m);
	gm_write(model, "this is no model at all, but long enough", 40);
	expect_refused(FS_EFORMAT, "not a GGUF file");
	unlink(model);
	expect_refused(FS_EIO, "model.gguf");
	gm_init(&m);
	m.alignment = 4096;
	gm_u32(&m, "general.alignment", 1 << 24);
	put_metadata(&m, 0, 0);
	for (int i = 0; i < 17; i++) {
		char name[16];
		snprintf(name, sizeof(name), "t%d", i);
		gm_table_entry(&m, name, FS_F32, (const int64_t[1]){1}, 1, 0);
	}
	gm_build(&m);
	gm_write(model, m.file.data, m.file.len);
	assert_int_equal(truncate(model, (1 << 24) + 64), 0); /* where the blob begins: sparse */
	expect_refused(FS_ELIMIT, "alignment");
	gm_finish(&m);
}

static void test_refuses_to_harm_files(void **state)
{
	struct gguf_make m;
	struct fs_errbuf e = {""};
	char linked[300];
	gm_init(&m);
	put_metadata(&m, 0, 0);
	put_tensors(&m);
	write_model(&m);
	assert_int_equal(fs_gguf_write_stub(model, model, NULL, &e), FS_EINVAL);
	snprintf(linked, sizeof(linked), "%s/linked.gguf", dir);
	assert_int_equal(link(model, linked), 0);
	assert_int_equal(fs_gguf_write_stub(model, linked, NULL, &e), FS_EINVAL);
	assert_int_equal(unlink(linked), 0);
	assert_int_equal(fs_gguf_write_stub(model, "/dev/null", NULL, &e), FS_EINVAL);
	assert_int_equal(fs_gguf_write_stub(model, dir, NULL, &e), FS_EINVAL);
	assert_int_equal(fs_gguf_write_stub(model, "/nonexistent/folder/s.gguf", NULL, &e), FS_EIO);
	struct fs_buf now = slurp(model);
	assert_int_equal(now.len, m.file.len);
	assert_memory_equal(now.data, m.file.data, now.len);
	fs_buf_finish(&now);
	gm_finish(&m);
}

static int make_dir(void **state)
{
	if (!mkdtemp(dir))
		return -1;
	snprintf(model, sizeof(model), "%s/model.gguf", dir);
	snprintf(stub, sizeof(stub), "%s/stub.gguf", dir);
	return 0;
}

static int clean(void **state)
{
	unlink(stub);
	unlink(model);
	return 0;
}

/* Fails when a test has left anything there, a half-written file for one. */
static int remove_dir(void **state)
{
	return rmdir(dir);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
	        cmocka_unit_test_teardown(test_keeps_metadata_and_names, clean),
	        cmocka_unit_test_teardown(test_first_part_is_enough, clean),
	        cmocka_unit_test_teardown(test_stub_of_a_stub_is_the_same, clean),
	        cmocka_unit_test_teardown(test_alignment_and_version, clean),
	        cmocka_unit_test_teardown(test_model_without_tensors, clean),
	        cmocka_unit_test_teardown(test_refuses_what_makes_no_stub, clean),
	        cmocka_unit_test_teardown(test_refuses_to_harm_files, clean),
	};
	return cmocka_run_group_tests(tests, make_dir, remove_dir);
}
