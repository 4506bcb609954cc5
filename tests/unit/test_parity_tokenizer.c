/*
 * Tokenizers against Hugging Face tokenizers and SentencePiece (tests/parity/make_tokenizers.py): a few
 * thousand awkward strings, control tokens as plain text and as control tokens. And the way back: the bytes
 * of the ids are the text.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "server/engine/tokenizer.h"

#define MAX_PRINTED 5

struct tokenizer {
	struct fs_gguf *g;
	struct fs_tok *t;
};

static FILE *open_golden(const char *name)
{
	const char *data = getenv("FS_TEST_DATA");
	char path[512];
	FILE *f;

	assert_non_null(data);
	snprintf(path, sizeof(path), "%s/parity/tokenizers/%s", data, name);
	f = fopen(path, "r");
	if (f == NULL)
		fail_msg("%s is missing", path);
	return f;
}

static struct tokenizer load(const char *name)
{
	struct tokenizer x;
	struct fs_errbuf e;
	char path[512];

	snprintf(path, sizeof(path), "%s/parity/tokenizers/%s.gguf", getenv("FS_TEST_DATA"), name);
	if (fs_gguf_open(&x.g, path, &e) != FS_OK || fs_tok_create(x.g, &x.t, &e) != FS_OK)
		fail_msg("%s", e.text);
	return x;
}

static void unload(struct tokenizer *x)
{
	fs_tok_destroy(x->t);
	fs_gguf_close(x->g);
}

/* The next line as JSON, NULL at the end. */
static json_t *next_line(FILE *f, char **line, size_t *cap)
{
	json_error_t je;
	json_t *j;

	if (getline(line, cap, f) < 0)
		return NULL;
	j = json_loads(*line, JSON_DECODE_ANY | JSON_ALLOW_NUL, &je);
	if (j == NULL)
		fail_msg("golden: %s", je.text);
	return j;
}

/* True when the ids are the expected ones; prints the first difference of the first few. */
static bool same_ids(
        const char *name, size_t row, const json_t *want, const struct fs_ids *got, size_t *n_bad)
{
	size_t i = 0, n = json_array_size(want);

	while (i < n && i < got->len && json_integer_value(json_array_get(want, i)) == got->data[i])
		i++;
	if (i == n && i == got->len)
		return true;
	if ((*n_bad)++ < MAX_PRINTED)
		print_error("%s row %zu: %zu ids, want %zu; at %zu %d, want %d\n", name, row, got->len, n, i,
		        i < got->len ? (int)got->data[i] : -1,
		        i < n ? (int)json_integer_value(json_array_get(want, i)) : -1);
	return false;
}

static void encode(const struct tokenizer *x, const json_t *text, bool special, struct fs_ids *ids)
{
	struct fs_errbuf e;

	ids->len = 0;
	if (fs_tok_encode(x->t, json_string_value(text), json_string_length(text), special, ids, &e) != FS_OK)
		fail_msg("%s", e.text);
}

/* SPM can not tell U+2581 in a text from a space. */
static void blank_marks(struct fs_buf *b)
{
	const char *mark = "\xe2\x96\x81";
	uint8_t *p;

	while (b->len > 0 && (p = memmem(b->data, b->len, mark, 3)) != NULL) {
		*p = ' ';
		memmove(p + 1, p + 3, b->len - (size_t)(p + 3 - b->data));
		b->len -= 2;
	}
}

/* What decodes from the ids is the text; the space that SPM puts in front is dropped. */
static void check_decodes(const struct tokenizer *x, const json_t *text, const struct fs_ids *ids)
{
	struct fs_tok_stream s = {.drop_space = fs_tok_info(x->t)->add_space_prefix};
	struct fs_buf out, want;
	size_t i;

	fs_buf_init(&out, 1 << 24);
	fs_buf_init(&want, 1 << 24);
	assert_int_equal(fs_buf_append(&want, json_string_value(text), json_string_length(text)), FS_OK);
	if (strcmp(fs_tok_info(x->t)->model, "llama") == 0)
		blank_marks(&want);
	for (i = 0; i < ids->len; i++)
		assert_int_equal(fs_tok_stream_push(x->t, &s, ids->data[i], &out), FS_OK);
	assert_int_equal(fs_tok_stream_flush(&s, &out), FS_OK);
	assert_int_equal(out.len, want.len);
	if (out.len > 0)
		assert_memory_equal(out.data, want.data, out.len);
	fs_buf_finish(&out);
	fs_buf_finish(&want);
}

static void plain(void **state)
{
	const char *name = *state;
	struct tokenizer x = load(name);
	char file[64], *line[2] = {NULL, NULL};
	size_t cap[2] = {0, 0}, rows = 0, n_bad = 0;
	FILE *texts = open_golden("strings.jsonl"), *ids_file;
	struct fs_ids ids;
	json_t *row, *want;

	snprintf(file, sizeof(file), "%s.ids.jsonl", name);
	ids_file = open_golden(file);
	fs_ids_init(&ids, 1 << 20);
	while ((row = next_line(texts, &line[0], &cap[0])) != NULL) {
		const json_t *text = json_object_get(row, "text");

		want = next_line(ids_file, &line[1], &cap[1]);
		assert_non_null(want);
		encode(&x, text, false, &ids);
		same_ids(name, rows, want, &ids, &n_bad);
		check_decodes(&x, text, &ids);
		rows++;
		json_decref(row);
		json_decref(want);
	}
	assert_null(next_line(ids_file, &line[1], &cap[1]));
	assert_true(rows > 2000);
	assert_int_equal(n_bad, 0);
	fs_ids_finish(&ids);
	free(line[0]);
	free(line[1]);
	fclose(texts);
	fclose(ids_file);
	unload(&x);
}

static void special(void **state)
{
	const char *name = *state;
	struct tokenizer x = load(name);
	char file[64], *line = NULL;
	size_t cap = 0, rows = 0, n_bad = 0;
	struct fs_ids ids;
	json_t *row;
	FILE *f;

	snprintf(file, sizeof(file), "%s.special.jsonl", name);
	f = open_golden(file);
	fs_ids_init(&ids, 1 << 20);
	while ((row = next_line(f, &line, &cap)) != NULL) {
		encode(&x, json_object_get(row, "text"), true, &ids);
		same_ids(name, rows++, json_object_get(row, "ids"), &ids, &n_bad);
		json_decref(row);
	}
	assert_true(rows > 20);
	assert_int_equal(n_bad, 0);
	fs_ids_finish(&ids);
	free(line);
	fclose(f);
	unload(&x);
}

#define BOTH(name)                                                                                           \
	{name " plain", plain, NULL, NULL, (void *)(uintptr_t)name},                                         \
	{                                                                                                    \
		name " special", special, NULL, NULL, (void *)(uintptr_t)name                                \
	}

int main(void)
{
	const struct CMUnitTest tests[] = {BOTH("qwen2"), BOTH("llama-bpe"), BOTH("gpt-2"), BOTH("smollm"),
	        BOTH("spm-llama"), BOTH("spm-gemma")};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
