/*
 * vocab: loads a vocabulary from the tokenizer.ggml.* keys. Refuses models other than "gpt2" and "llama",
 * unknown pre-tokenizers, duplicate tokens and arrays whose lengths disagree.
 */
#include "server/engine/vocab.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_VOCAB (1u << 24)
#define MAX_VOCAB_BYTES ((size_t)1 << 30)

/* Turn and text ends that publishers use; such a token ends generation even where the file does not say so.
 */
static const char *const eog_texts[] = {
        "<|eot_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|flush|>",
        "<|calls|>",
        "<end_of_turn>",
        "<|endoftext|>",
        "</s>",
        "<|eom_id|>",
        "<EOT>",
        "_<EOT>",
        "[EOT]",
        "[EOS]",
        "<|end_of_text|>",
        "<end_of_utterance>",
        "<eos>",
        "<turn|>",
        "<|tool_response>",
        "<\357\275\234end\xe2\x96\x81of\xe2\x96\x81sentence\xef\xbd\x9c>",
};
/* The end of a turn, where the file names none: the first that exists. */
static const char *const eot_texts[] = {
        "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>"};
/* Marks of chat templates. Some files call them user-defined, which would let a message's text open a turn.
 */
static const char *const mark_texts[] = {
        "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "<start_of_turn>", "<s>"};

static bool listed(const char *const *list, size_t n, const char *s, size_t len)
{
	size_t i;

	for (i = 0; i < n; i++)
		if (strlen(list[i]) == len && memcmp(list[i], s, len) == 0)
			return true;
	return false;
}

static int load_model(struct fs_tok *t, const struct fs_gguf *g, struct fs_errbuf *e)
{
	const char *s;
	size_t len;
	int rc;

	if ((rc = fs_gguf_str(g, "tokenizer.ggml.model", &s, &len, e)) != FS_OK)
		return rc;
	if (len == 5 && memcmp(s, "llama", 5) == 0) {
		t->spm = true;
		t->info.model = "llama";
		t->info.pre = "";
		return FS_OK;
	}
	if (len != 4 || memcmp(s, "gpt2", 4) != 0)
		return fs_fail(e, FS_ENOTSUP,
		        "tokenizer.ggml.model: unknown \"%.*s\"; known are gpt2 and llama",
		        (int)FS_MIN(len, (size_t)64), s);
	t->info.model = "gpt2";
	s = "default";
	len = 7;
	if (fs_gguf_has(g, "tokenizer.ggml.pre") &&
	        (rc = fs_gguf_str(g, "tokenizer.ggml.pre", &s, &len, e)) != FS_OK)
		return rc;
	t->ignore_merges = false;
	if ((rc = fs_pre_find(s, len, &t->pre, &t->info.pre, e)) != FS_OK)
		return rc;
	t->ignore_merges = t->pre == FS_PRE_LLAMA3;
	return FS_OK;
}

static int load_tokens(struct fs_tok *t, const struct fs_gguf *g, struct fs_errbuf *e)
{
	const char *key = "tokenizer.ggml.tokens", *s;
	struct fs_gguf_strs it;
	size_t n, len;
	uint32_t number;
	char empty[32];
	bool is_new;
	int rc;

	if ((rc = fs_gguf_arr_len(g, key, &n, e)) != FS_OK ||
	        (rc = fs_gguf_arr_strs(g, key, &it, e)) != FS_OK)
		return rc;
	if (n == 0 || n > MAX_VOCAB)
		return fs_fail(e, FS_EFORMAT, "%s: %zu tokens; 1 to %u are possible", key, n, MAX_VOCAB);
	t->info.n_vocab = (int32_t)n;
	while (fs_gguf_strs_next(&it, &s, &len)) {
		if (len == 0) {
			len = (size_t)snprintf(empty, sizeof(empty), "[EMPTY_%zu]", t->strs.n);
			s = empty;
		}
		t->longest = FS_MAX(t->longest, len);
		if ((rc = fs_strtab_intern(&t->strs, s, len, &number, &is_new)) != FS_OK)
			return fs_fail(e, rc, "%s: out of memory", key);
		if (!is_new)
			return fs_fail(e, FS_EFORMAT, "%s: tokens %u and %zu are the same", key,
			        (unsigned)number, t->strs.n);
	}
	if (t->strs.n != n)
		return fs_fail(e, FS_EFORMAT, "%s: %zu of %zu tokens are there", key, t->strs.n, n);
	return FS_OK;
}

static int load_types(struct fs_tok *t, const struct fs_gguf *g, struct fs_errbuf *e)
{
	const char *key = "tokenizer.ggml.token_type";
	size_t n = (size_t)t->info.n_vocab, have, i;
	int32_t *v = NULL;
	int rc;

	t->types = malloc(n);
	t->eog = calloc(n, sizeof(*t->eog));
	if (t->types == NULL || t->eog == NULL)
		return fs_fail(e, FS_ENOMEM, "tokenizer: out of memory");
	memset(t->types, FS_TT_NORMAL, n);
	if (!fs_gguf_has(g, key))
		return FS_OK;
	if ((rc = fs_gguf_arr_len(g, key, &have, e)) != FS_OK)
		return rc;
	if (have != n)
		return fs_fail(e, FS_EFORMAT, "%s: has %zu entries for %zu tokens", key, have, n);
	if ((v = calloc(n, sizeof(*v))) == NULL)
		return fs_fail(e, FS_ENOMEM, "tokenizer: out of memory");
	rc = fs_gguf_arr_i32(g, key, v, n, e);
	for (i = 0; rc == FS_OK && i < n; i++)
		if (v[i] >= FS_TT_NORMAL && v[i] <= FS_TT_BYTE)
			t->types[i] = (uint8_t)v[i];
	free(v);
	return rc;
}

/* A token id; fallback when the key is absent, -1 when it points outside the vocabulary. */
static int load_id(const struct fs_tok *t, const struct fs_gguf *g, const char *key, int32_t fallback,
        int32_t *out, struct fs_errbuf *e)
{
	uint32_t v;
	int rc;

	*out = fallback < t->info.n_vocab ? fallback : -1;
	if (!fs_gguf_has(g, key))
		return FS_OK;
	if (fs_gguf_u32(g, key, &v, NULL) != FS_OK) {
		int32_t i;

		if ((rc = fs_gguf_i32(g, key, &i, e)) != FS_OK)
			return rc;
		v = (uint32_t)i;
	}
	*out = v < (uint32_t)t->info.n_vocab ? (int32_t)v : -1;
	if (*out < 0)
		fs_warn("%s: token %u is not in the vocabulary of %d, ignored", key, (unsigned)v,
		        (int)t->info.n_vocab);
	return FS_OK;
}

static int load_flag(const struct fs_gguf *g, const char *key, bool fallback, bool *out, struct fs_errbuf *e)
{
	*out = fallback;
	return fs_gguf_has(g, key) ? fs_gguf_bool(g, key, out, e) : FS_OK;
}

static void set_eog(struct fs_tok *t, int32_t id)
{
	if (id >= 0)
		t->eog[id] = true;
}

static int load_ids(struct fs_tok *t, const struct fs_gguf *g, struct fs_errbuf *e)
{
	static const char *const more_eog[] = {"tokenizer.ggml.eom_token_id",
	        "tokenizer.ggml.fim_pad_token_id", "tokenizer.ggml.fim_rep_token_id",
	        "tokenizer.ggml.fim_sep_token_id"};
	struct fs_tok_info *in = &t->info;
	int32_t id;
	size_t i;
	int rc;

	if ((rc = load_id(t, g, "tokenizer.ggml.bos_token_id", t->spm ? 1 : -1, &in->bos, e)) != FS_OK ||
	        (rc = load_id(t, g, "tokenizer.ggml.eos_token_id", t->spm ? 2 : -1, &in->eos, e)) != FS_OK ||
	        (rc = load_id(t, g, "tokenizer.ggml.unknown_token_id", t->spm ? 0 : -1, &in->unk, e)) !=
	                FS_OK ||
	        (rc = load_id(t, g, "tokenizer.ggml.eot_token_id", -1, &in->eot, e)) != FS_OK ||
	        (rc = load_flag(g, "tokenizer.ggml.add_bos_token", t->spm || t->pre == FS_PRE_LLAMA3,
	                 &in->add_bos, e)) != FS_OK ||
	        (rc = load_flag(g, "tokenizer.ggml.add_eos_token", false, &in->add_eos, e)) != FS_OK ||
	        (rc = load_flag(g, "tokenizer.ggml.add_space_prefix", t->spm, &in->add_space_prefix, e)) !=
	                FS_OK)
		return rc;
	for (i = 0; in->eot < 0 && i < FS_ARRAY_LEN(eot_texts); i++)
		in->eot = fs_tok_find(t, eot_texts[i], strlen(eot_texts[i]));
	set_eog(t, in->eos);
	set_eog(t, in->eot);
	for (i = 0; i < FS_ARRAY_LEN(more_eog); i++) {
		if ((rc = load_id(t, g, more_eog[i], -1, &id, e)) != FS_OK)
			return rc;
		set_eog(t, id);
	}
	return FS_OK;
}

/* Turn ends and template marks are control tokens whatever the file calls them, and so is all of the form
 * <|...|> that it calls user-defined. */
static void force_control(struct fs_tok *t)
{
	size_t i, len;

	for (i = 0; i < (size_t)t->info.n_vocab; i++) {
		const char *s = fs_strtab_get(&t->strs, (uint32_t)i, &len);
		bool bars = len > 4 && memcmp(s, "<|", 2) == 0 && memcmp(s + len - 2, "|>", 2) == 0;

		if (listed(eog_texts, FS_ARRAY_LEN(eog_texts), s, len))
			t->eog[i] = true;
		else if (!listed(mark_texts, FS_ARRAY_LEN(mark_texts), s, len) &&
		         !(bars && t->types[i] == FS_TT_USER))
			continue;
		t->types[i] = FS_TT_CONTROL;
	}
}

static int load(struct fs_tok *t, const struct fs_gguf *g, struct fs_errbuf *e)
{
	int rc;

	if ((rc = load_model(t, g, e)) != FS_OK || (rc = load_tokens(t, g, e)) != FS_OK ||
	        (rc = load_types(t, g, e)) != FS_OK || (rc = load_ids(t, g, e)) != FS_OK)
		return rc;
	force_control(t);
	if (fs_special_index(t) != FS_OK)
		return fs_fail(e, FS_ENOMEM, "tokenizer: out of memory");
	return t->spm ? fs_spm_load(t, g, e) : fs_bpe_load(t, g, e);
}

int fs_tok_create(const struct fs_gguf *g, struct fs_tok **out, struct fs_errbuf *e)
{
	struct fs_tok *t = calloc(1, sizeof(*t));
	int rc;

	if (t == NULL)
		return fs_fail(e, FS_ENOMEM, "tokenizer: out of memory");
	fs_strtab_init(&t->strs, MAX_VOCAB_BYTES);
	if ((rc = load(t, g, e)) != FS_OK) {
		fs_tok_destroy(t);
		return rc;
	}
	*out = t;
	return FS_OK;
}

void fs_tok_destroy(struct fs_tok *t)
{
	if (t == NULL)
		return;
	fs_strtab_finish(&t->strs);
	fs_map64_finish(&t->merges);
	free(t->types);
	free(t->eog);
	free(t->specials);
	free(t->scores);
	free(t);
}
