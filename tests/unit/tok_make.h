/*
 * Makes small tokenizers, for tests: a vocabulary-only GGUF is written to a temporary file, loaded and
 * removed. Byte-level ("gpt2") ones hold the 256 letters of the byte alphabet as ids 0 to 255, SPM ("llama")
 * ones <unk> <s> </s> <0x00>…<0xFF> as ids 0 to 258; then come the given tokens. One thread; asserts on
 * failure.
 */
#ifndef FS_TEST_TOK_MAKE_H
#define FS_TEST_TOK_MAKE_H

#include <unistd.h>

#include "server/engine/tokenizer.h"
#include "tests/unit/gguf_make.h"

#define TM_BPE_FIRST 256
#define TM_SPM_FIRST 259
#define TM_MAX 600

struct tok_spec {
	const char *pre; /* NULL: SPM */
	const char *tokens[64];
	int32_t types[64]; /* 0 = normal */
	float scores[64];
	const char *merges[64];
	int32_t bos, eos;        /* ids; 0 = the key is left out (BPE only) */
	int add_bos, add_prefix; /* 0 = the key is left out, 1 = true, -1 = false */
	const char *chat_template;
};

struct tm_lists {
	char bytes[256][8];
	const char *tokens[TM_MAX];
	int32_t types[TM_MAX];
	float scores[TM_MAX];
	size_t n;
};

static inline void tm_add(struct tm_lists *l, const char *token, int32_t type, float score)
{
	FS_ASSERT(l->n < TM_MAX);
	l->tokens[l->n] = token;
	l->types[l->n] = type;
	l->scores[l->n++] = score;
}

/* The letter of a byte, by the rule of GPT-2's encoder. */
static inline void tm_letter(int byte, int *next, char out[8])
{
	bool self = (byte >= '!' && byte <= '~') || (byte >= 0xa1 && byte <= 0xac) || byte >= 0xae;
	int cp = self ? byte : 256 + (*next)++;

	if (cp < 0x80)
		snprintf(out, 8, "%c", cp);
	else
		snprintf(out, 8, "%c%c", 0xc0 | cp >> 6, 0x80 | (cp & 0x3f));
}

static inline void tm_fill(struct tm_lists *l, const struct tok_spec *s)
{
	int b, next = 0;
	size_t i;

	l->n = 0;
	if (s->pre == NULL) {
		tm_add(l, "<unk>", 2, 0);
		tm_add(l, "<s>", 3, 0);
		tm_add(l, "</s>", 3, 0);
	}
	for (b = 0; b < 256; b++) {
		if (s->pre != NULL)
			tm_letter(b, &next, l->bytes[b]);
		else
			snprintf(l->bytes[b], 8, "<0x%02X>", (unsigned)b & 0xff);
		tm_add(l, l->bytes[b], s->pre != NULL ? 1 : 6, 0);
	}
	for (i = 0; i < 64 && s->tokens[i] != NULL; i++)
		tm_add(l, s->tokens[i], s->types[i] ? s->types[i] : 1, s->scores[i]);
}

static inline void tm_keys(struct gguf_make *m, const struct tm_lists *l, const struct tok_spec *s)
{
	size_t n = 0;

	gm_str(m, "tokenizer.ggml.model", s->pre != NULL ? "gpt2" : "llama");
	gm_arr_str(m, "tokenizer.ggml.tokens", l->tokens, l->n);
	gm_arr(m, "tokenizer.ggml.token_type", 5, l->types, l->n, 4);
	if (s->pre != NULL) {
		gm_str(m, "tokenizer.ggml.pre", s->pre);
		while (n < 64 && s->merges[n] != NULL)
			n++;
		gm_arr_str(m, "tokenizer.ggml.merges", s->merges, n);
	} else {
		gm_arr(m, "tokenizer.ggml.scores", 6, l->scores, l->n, 4);
	}
	if (s->bos)
		gm_u32(m, "tokenizer.ggml.bos_token_id", (uint32_t)s->bos);
	if (s->eos)
		gm_u32(m, "tokenizer.ggml.eos_token_id", (uint32_t)s->eos);
	if (s->add_bos)
		gm_bool(m, "tokenizer.ggml.add_bos_token", s->add_bos > 0);
	if (s->add_prefix)
		gm_bool(m, "tokenizer.ggml.add_space_prefix", s->add_prefix > 0);
	if (s->chat_template != NULL)
		gm_str(m, "tokenizer.chat_template", s->chat_template);
}

/* Builds, writes and opens the file; the caller closes it. */
static inline struct fs_gguf *tm_open(struct gguf_make *m)
{
	char path[] = "/tmp/farsight-tok-XXXXXX";
	int fd = mkstemp(path);
	struct fs_gguf *g = NULL;
	struct fs_errbuf e = {{0}};
	int rc;

	FS_ASSERT(fd >= 0 && close(fd) == 0);
	gm_build(m);
	gm_write(path, m->file.data, m->file.len);
	rc = fs_gguf_open(&g, path, &e);
	unlink(path);
	if (rc != FS_OK)
		fprintf(stderr, "%s\n", e.text);
	FS_ASSERT(rc == FS_OK);
	return g;
}

static inline struct fs_gguf *tm_gguf(const struct tok_spec *s)
{
	struct tm_lists *l = calloc(1, sizeof(*l));
	struct gguf_make m;
	struct fs_gguf *g;

	FS_ASSERT(l != NULL);
	gm_init(&m);
	gm_str(&m, "general.architecture", "llama");
	tm_fill(l, s);
	tm_keys(&m, l, s);
	g = tm_open(&m);
	gm_finish(&m);
	free(l);
	return g;
}

static inline struct fs_tok *tm_tokenizer(const struct tok_spec *s)
{
	struct fs_gguf *g = tm_gguf(s);
	struct fs_tok *t = NULL;
	struct fs_errbuf e = {{0}};
	int rc = fs_tok_create(g, &t, &e);

	fs_gguf_close(g);
	if (rc != FS_OK)
		fprintf(stderr, "%s\n", e.text);
	FS_ASSERT(rc == FS_OK);
	return t;
}

#endif
