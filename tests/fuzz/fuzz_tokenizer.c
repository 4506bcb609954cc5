/*
 * Fuzz target: the first byte picks a tokenizer and what is fed to it: the rest as text (every pre-tokenizer
 * and SPM, trusted and not), as a chat template, or as a GGUF that holds a vocabulary. Checked: ids lie in
 * the vocabulary, untrusted text makes no control token, and the ids of valid UTF-8 decode to the text.
 */
#include <stdlib.h>
#include <sys/mman.h>

#include "server/engine/chat.h"
#include "server/engine/utf8.h"
#include "tests/unit/tok_make.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static const struct tok_spec specs[] = {
        {.pre = "qwen2",
                .tokens = {"<|im_start|>", "<|im_end|>", "aa", "\n\n", "th", "the"},
                .types = {3, 3, 1, 4},
                .merges = {"a a", "t h", "th e"},
                .bos = 256,
                .eos = 257},
        {.pre = "llama-bpe", .tokens = {"<|eot_id|>", "12", "123", "aaaa"}, .types = {3}, .merges = {"1 2"}},
        {.pre = "gpt-2", .tokens = {"'s", "aa"}, .merges = {"' s", "a a"}},
        {.pre = "smollm", .tokens = {"aa"}, .merges = {"a a", "aa aa"}},
        {.tokens = {"\xe2\x96\x81", "a", "b", "ab", "<", "s", "<s", ">"},
                .scores = {-10, -11, -12, -2, -3, -4, -5, -6}},
};
#define N_TOKS FS_ARRAY_LEN(specs)

/* Every byte has a token, so nothing is lost; SPM turns U+2581 into a space and puts one in front. */
static void check_decoded(const struct fs_tok *t, const struct fs_ids *ids, const char *text, size_t n)
{
	struct fs_tok_stream s = {.drop_space = fs_tok_info(t)->add_space_prefix};
	struct fs_buf out, want;
	size_t i;

	fs_buf_init(&out, SIZE_MAX / 2);
	fs_buf_init(&want, SIZE_MAX / 2);
	for (i = 0; i < ids->len; i++)
		FS_ASSERT(fs_tok_stream_push(t, &s, ids->data[i], &out) == FS_OK);
	FS_ASSERT(fs_tok_stream_flush(&s, &out) == FS_OK);
	FS_ASSERT(fs_utf8_append_clean(&want, text, n) == FS_OK);
	if (fs_tok_info(t)->add_space_prefix)
		FS_ASSERT(out.len <= want.len);
	else
		FS_ASSERT(out.len == want.len && (out.len == 0 || memcmp(out.data, want.data, out.len) == 0));
	fs_buf_finish(&out);
	fs_buf_finish(&want);
}

static void check_text(const struct fs_tok *t, const char *text, size_t n)
{
	size_t half = n / 2, i;
	struct fs_tok_span spans[] = {{text, half, true}, {text + half, n - half, false}};
	struct fs_ids ids;

	fs_ids_init(&ids, 1 << 20);
	FS_ASSERT(fs_tok_encode(t, text, n, false, &ids, NULL) == FS_OK);
	for (i = 0; i < ids.len; i++)
		FS_ASSERT(ids.data[i] >= 0 && ids.data[i] < fs_tok_info(t)->n_vocab &&
		          !fs_tok_is_control(t, ids.data[i]));
	check_decoded(t, &ids, text, n);
	FS_ASSERT(fs_tok_encode(t, text, n, true, &ids, NULL) == FS_OK);
	FS_ASSERT(fs_tok_encode_spans(t, spans, 2, &ids, NULL) == FS_OK);
	fs_ids_finish(&ids);
}

static void check_template(const struct fs_tok *t, const char *text, size_t n)
{
	const struct fs_part part = {.text = text, .text_len = n};
	static const enum fs_role roles[] = {FS_ROLE_SYSTEM, FS_ROLE_USER, FS_ROLE_ASSISTANT, FS_ROLE_USER};
	struct fs_message msgs[FS_ARRAY_LEN(roles)];
	struct fs_chat *c;
	struct fs_ids ids;

	if (fs_chat_create_text(text, n, t, NULL, &c, NULL) != FS_OK)
		return;
	for (size_t i = 0; i < FS_ARRAY_LEN(roles); i++)
		msgs[i] = (struct fs_message){.role = roles[i], .parts = &part, .n_parts = 1};
	fs_ids_init(&ids, 1 << 20);
	fs_chat_encode(c, msgs, FS_ARRAY_LEN(msgs), NULL, &ids, NULL, NULL);
	fs_ids_finish(&ids);
	fs_chat_destroy(c);
}

static void check_file(const uint8_t *data, size_t n)
{
	static int fd = -1;
	struct fs_gguf *g;
	struct fs_tok *t;
	struct fs_ids ids;
	char path[64];

	if (fd < 0)
		fd = memfd_create("fuzz.gguf", 0);
	FS_ASSERT(fd >= 0 && ftruncate(fd, 0) == 0 && pwrite(fd, data, n, 0) == (ssize_t)n);
	snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
	if (fs_gguf_open(&g, path, NULL) != FS_OK)
		return;
	fs_ids_init(&ids, 1 << 16);
	if (fs_tok_create(g, &t, NULL) == FS_OK) {
		fs_tok_encode(t, "It's <s> 12\xc3\xa9\n\n x", 17, true, &ids, NULL);
		fs_tok_destroy(t);
	}
	fs_ids_finish(&ids);
	fs_gguf_close(g);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
	static struct fs_tok *toks[N_TOKS];
	size_t i, kind;

	for (i = 0; i < N_TOKS; i++)
		if (toks[i] == NULL)
			toks[i] = tm_tokenizer(&specs[i]);
	if (n == 0)
		return 0;
	kind = data[0] % (N_TOKS + 2);
	if (kind < N_TOKS)
		check_text(toks[kind], (const char *)data + 1, n - 1);
	else if (kind == N_TOKS)
		check_template(toks[0], (const char *)data + 1, n - 1);
	else
		check_file(data + 1, n - 1);
	return 0;
}
