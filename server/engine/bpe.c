/*
 * bpe: byte-level BPE. Symbols are numbers of strings in the vocabulary's table; a merge whose parts or
 * result are no token gets a number above the tokens', so that merging needs no strings at run time. Runs on
 * the caller's thread with its scratch.
 */
#include "server/engine/vocab.h"

#include <string.h>

#include "server/engine/utf8.h"

/* GPT-2's alphabet: printable Latin-1 bytes stand for themselves, the others for U+0100 and up, in order. */
static void make_alphabet(struct fs_tok *t)
{
	uint16_t next = 256;
	int b;

	for (b = 0; b < FS_ALPHABET; b++)
		t->byte_of[b] = -1;
	for (b = 0; b < 256; b++) {
		bool self = (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || b >= 174;

		t->letter[b] = self ? (uint16_t)b : next++;
		t->byte_of[t->letter[b]] = (int16_t)b;
	}
}

static int intern_letters(struct fs_tok *t)
{
	uint8_t utf8[4];
	bool is_new;
	int b, rc;

	t->all_bytes = true;
	for (b = 0; b < 256; b++) {
		size_t len = fs_utf8_put(t->letter[b], utf8);

		rc = fs_strtab_intern(&t->strs, (const char *)utf8, len, &t->byte_sym[b], &is_new);
		if (rc != FS_OK)
			return rc;
		if (!fs_tok_is_textual(t, t->byte_sym[b]))
			t->all_bytes = false;
	}
	return FS_OK;
}

/* "left right": the first space after the first byte parts them. */
static int add_merge(
        struct fs_tok *t, uint32_t rank, const char *s, size_t len, struct fs_buf *tmp, struct fs_errbuf *e)
{
	const char *sp = len > 1 ? memchr(s + 1, ' ', len - 1) : NULL;
	uint32_t left, right, both;
	size_t nl, nr;
	bool is_new;
	int rc;

	if (sp == NULL || sp + 1 == s + len)
		return fs_fail(e, FS_EFORMAT, "tokenizer.ggml.merges: entry %u is no pair", (unsigned)rank);
	nl = (size_t)(sp - s);
	nr = len - nl - 1;
	fs_buf_clear(tmp);
	if ((rc = fs_buf_append(tmp, s, nl)) != FS_OK || (rc = fs_buf_append(tmp, sp + 1, nr)) != FS_OK ||
	        (rc = fs_strtab_intern(&t->strs, s, nl, &left, &is_new)) != FS_OK ||
	        (rc = fs_strtab_intern(&t->strs, sp + 1, nr, &right, &is_new)) != FS_OK ||
	        (rc = fs_strtab_intern(&t->strs, (char *)tmp->data, tmp->len, &both, &is_new)) != FS_OK ||
	        (rc = fs_map64_put(&t->merges, (uint64_t)left << 32 | right, (uint64_t)rank << 32 | both)) !=
	                FS_OK)
		return fs_fail(e, rc, "tokenizer.ggml.merges: out of memory at entry %u", (unsigned)rank);
	return FS_OK;
}

int fs_bpe_load(struct fs_tok *t, const struct fs_gguf *g, struct fs_errbuf *e)
{
	struct fs_gguf_strs it;
	struct fs_buf tmp;
	const char *s;
	size_t len;
	uint32_t rank = 0;
	int rc;

	make_alphabet(t);
	if (intern_letters(t) != FS_OK)
		return fs_fail(e, FS_ENOMEM, "tokenizer: out of memory");
	if ((rc = fs_gguf_arr_strs(g, "tokenizer.ggml.merges", &it, e)) != FS_OK)
		return rc;
	fs_buf_init(&tmp, t->strs.bytes.max);
	while (rc == FS_OK && fs_gguf_strs_next(&it, &s, &len))
		rc = add_merge(t, rank++, s, len, &tmp, e);
	fs_buf_finish(&tmp);
	return rc;
}

static bool pair(const void *arg, const struct fs_sym *left, const struct fs_sym *right, uint32_t end,
        uint32_t *rank, uint32_t *merged)
{
	const struct fs_tok *t = arg;
	uint64_t val;

	if (!fs_map64_get(&t->merges, (uint64_t)left->id << 32 | right->id, &val))
		return false;
	*rank = (uint32_t)(val >> 32);
	*merged = (uint32_t)val;
	return true;
}

/* Bytes that have no token are left out, as everywhere. */
static int emit_bytes(const struct fs_tok *t, const uint8_t *s, size_t n, struct fs_ids *out)
{
	size_t i;
	int rc;

	for (i = 0; i < n; i++) {
		uint32_t id = t->byte_sym[s[i]];

		if (fs_tok_is_textual(t, id) && (rc = fs_ids_append(out, (int32_t)id)) != FS_OK)
			return rc;
	}
	return FS_OK;
}

/* The token that is the whole piece, or FS_SYM_NONE. */
static uint32_t find_whole(const struct fs_tok *t, struct fs_buf *tmp, const uint8_t *s, size_t n)
{
	uint8_t utf8[4];
	uint32_t id;
	size_t i;

	if (n > t->longest)
		return FS_SYM_NONE;
	fs_buf_clear(tmp);
	for (i = 0; i < n; i++)
		if (fs_buf_append(tmp, utf8, fs_utf8_put(t->letter[s[i]], utf8)) != FS_OK)
			return FS_SYM_NONE;
	return fs_strtab_find(&t->strs, tmp->data, tmp->len, &id) && fs_tok_is_textual(t, id) ? id
	                                                                                      : FS_SYM_NONE;
}

static int encode_piece(
        const struct fs_tok *t, struct fs_tok_scratch *x, const uint8_t *s, size_t n, struct fs_ids *out)
{
	struct fs_merge *m = &x->merge;
	uint32_t id;
	size_t i;
	int rc;

	if (t->ignore_merges && (id = find_whole(t, &x->tmp, s, n)) != FS_SYM_NONE)
		return fs_ids_append(out, (int32_t)id);
	fs_merge_start(m, (uint32_t)n);
	for (i = 0; i < n; i++)
		if ((rc = fs_merge_add(m, t->byte_sym[s[i]], (uint32_t)i)) != FS_OK)
			return rc;
		else if (i > 0 && fs_merge_cancelled(m, i))
			return FS_ECANCELLED;
	if ((rc = fs_merge_run(m, pair, t)) != FS_OK)
		return rc;
	for (i = 0; i < m->n_syms; i = m->syms[i].next) {
		const struct fs_sym *sym = &m->syms[i];

		if (fs_tok_is_textual(t, sym->id))
			rc = fs_ids_append(out, (int32_t)sym->id);
		else
			rc = emit_bytes(t, s + sym->off, fs_merge_end(m, sym) - sym->off, out);
		if (rc != FS_OK)
			return rc;
	}
	return FS_OK;
}

int fs_bpe_encode(
        const struct fs_tok *t, struct fs_tok_scratch *x, const uint8_t *s, size_t n, struct fs_ids *out)
{
	size_t i = 0, pieces = 0;
	int rc;

	while (i < n) {
		size_t len = fs_pre_next(t->pre, s + i, n - i);

		if ((++pieces & 0xff) == 0 && fs_cancelled(x->merge.cancel))
			return FS_ECANCELLED;
		if ((rc = encode_piece(t, x, s + i, len, out)) != FS_OK)
			return rc;
		i += len;
	}
	return FS_OK;
}

int fs_bpe_bytes(const struct fs_tok *t, const char *text, size_t len, struct fs_buf *out)
{
	const uint8_t *s = (const uint8_t *)text;
	size_t i = 0, used;
	uint32_t cp;
	int rc;

	for (; i < len; i += used) {
		uint8_t byte;

		fs_utf8_next(s + i, len - i, &cp, &used);
		if (cp < FS_ALPHABET && t->byte_of[cp] >= 0) {
			byte = (uint8_t)t->byte_of[cp];
			rc = fs_buf_append(out, &byte, 1);
		} else { /* outside the alphabet: as it stands */
			rc = fs_buf_append(out, s + i, used);
		}
		if (rc != FS_OK)
			return rc;
	}
	return FS_OK;
}
