/*
 * spm: SentencePiece BPE: the best scored pair whose text is a token is merged; characters that have no token
 * become <0xXX> bytes. Spaces are U+2581 inside. No normalisation. Tokens of the types control, unknown, byte
 * and unused never come out of merging. Runs on the caller's thread with its scratch.
 */
#include "server/engine/vocab.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "server/engine/utf8.h"

static const char space_mark[] = "\xe2\x96\x81"; /* U+2581 */
#define SPACE_MARK_LEN 3

static int hex_digit(char c)
{
	if (c >= '0' && c <= '9')
		return c - '0';
	return c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
}

int fs_spm_byte_value(const char *text, size_t len)
{
	int hi, lo;

	if (len != 6 || memcmp(text, "<0x", 3) != 0 || text[5] != '>')
		return -1;
	hi = hex_digit(text[3]);
	lo = hex_digit(text[4]);
	return hi < 0 || lo < 0 ? -1 : hi << 4 | lo;
}

static void find_byte_tokens(struct fs_tok *t)
{
	char text[8];
	uint32_t id;
	int b;

	t->all_bytes = true;
	for (b = 0; b < 256; b++) {
		char raw = (char)b;

		snprintf(text, sizeof(text), "<0x%02X>", (unsigned)b);
		if (fs_strtab_find(&t->strs, text, 6, &id) && id < (uint32_t)t->info.n_vocab &&
		        t->types[id] == FS_TT_BYTE) {
			t->byte_sym[b] = id;
		} else if (fs_strtab_find(&t->strs, &raw, 1, &id) && fs_tok_is_textual(t, id)) {
			t->byte_sym[b] = id;
		} else {
			t->byte_sym[b] = FS_SYM_NONE;
			t->all_bytes = false;
		}
	}
}

int fs_spm_load(struct fs_tok *t, const struct fs_gguf *g, struct fs_errbuf *e)
{
	const char *key = "tokenizer.ggml.scores";
	size_t i, n = (size_t)t->info.n_vocab, have;
	int rc;

	if ((rc = fs_gguf_arr_len(g, key, &have, e)) != FS_OK)
		return rc;
	if (have != n)
		return fs_fail(e, FS_EFORMAT, "%s: has %zu entries for %zu tokens", key, have, n);
	t->scores = calloc(n, sizeof(*t->scores));
	if (t->scores == NULL)
		return fs_fail(e, FS_ENOMEM, "tokenizer: out of memory");
	if ((rc = fs_gguf_arr_f32(g, key, t->scores, n, e)) != FS_OK)
		return rc;
	for (i = 0; i < n; i++)
		if (isnan(t->scores[i]))
			return fs_fail(e, FS_EFORMAT, "%s: entry %zu is not a number", key, i);
	find_byte_tokens(t);
	return FS_OK;
}

/* A rank that falls as the score rises, equal for equal scores. */
static uint32_t score_rank(float score)
{
	union {
		float f;
		uint32_t u;
	} v = {.f = score + 0.0f}; /* -0 becomes 0 */
	uint32_t up = (v.u & 0x80000000u) != 0 ? ~v.u : v.u | 0x80000000u;

	return ~up == FS_SYM_NONE ? FS_SYM_NONE - 1 : ~up;
}

struct piece {
	const struct fs_tok *t;
	const uint8_t *s;
};

static bool pair(const void *arg, const struct fs_sym *left, const struct fs_sym *right, uint32_t end,
        uint32_t *rank, uint32_t *merged)
{
	const struct piece *p = arg;
	uint32_t len = end - left->off;

	if (len > p->t->longest || !fs_strtab_find(&p->t->strs, p->s + left->off, len, merged) ||
	        !fs_tok_is_textual(p->t, *merged))
		return false;
	*rank = score_rank(p->t->scores[*merged]);
	return true;
}

static int emit_bytes(const struct fs_tok *t, const uint8_t *s, size_t n, struct fs_ids *out)
{
	size_t i;
	int rc;

	for (i = 0; i < n; i++)
		if (t->byte_sym[s[i]] == FS_SYM_NONE)
			return t->info.unk >= 0 ? fs_ids_append(out, t->info.unk) : FS_OK;
	for (i = 0; i < n; i++)
		if ((rc = fs_ids_append(out, (int32_t)t->byte_sym[s[i]])) != FS_OK)
			return rc;
	return FS_OK;
}

static int mark_spaces(struct fs_buf *b, const struct fs_merge *m, const uint8_t *s, size_t n, bool prefix)
{
	const uint8_t *end = s + n, *sp;
	size_t steps = 0;
	int rc;

	fs_buf_clear(b);
	if (prefix && (rc = fs_buf_append(b, space_mark, SPACE_MARK_LEN)) != FS_OK)
		return rc;
	while ((sp = memchr(s, ' ', (size_t)(end - s))) != NULL) {
		if ((rc = fs_buf_append(b, s, (size_t)(sp - s))) != FS_OK ||
		        (rc = fs_buf_append(b, space_mark, SPACE_MARK_LEN)) != FS_OK)
			return rc;
		if (fs_merge_cancelled(m, ++steps))
			return FS_ECANCELLED;
		s = sp + 1;
	}
	return fs_buf_append(b, s, (size_t)(end - s));
}

static int add_characters(const struct fs_tok *t, struct fs_merge *m, const uint8_t *s, size_t n)
{
	size_t i = 0, steps = 0;
	int rc;

	while (i < n) {
		uint32_t cp, id;
		size_t len = fs_utf8_get(s + i, n - i, &cp);

		if (fs_merge_cancelled(m, ++steps))
			return FS_ECANCELLED;
		if (!fs_strtab_find(&t->strs, s + i, len, &id) || !fs_tok_is_textual(t, id))
			id = FS_SYM_NONE;
		if ((rc = fs_merge_add(m, id, (uint32_t)i)) != FS_OK)
			return rc;
		i += len;
	}
	return FS_OK;
}

int fs_spm_encode(const struct fs_tok *t, struct fs_tok_scratch *x, const uint8_t *s, size_t n, bool prefix,
        struct fs_ids *out)
{
	struct fs_merge *m = &x->merge;
	struct piece p = {.t = t};
	size_t i;
	int rc;

	if ((rc = mark_spaces(&x->tmp, m, s, n, prefix)) != FS_OK)
		return rc;
	if (x->tmp.len >= UINT32_MAX)
		return FS_ENOMEM;
	p.s = x->tmp.data;
	fs_merge_start(m, (uint32_t)x->tmp.len);
	if ((rc = add_characters(t, m, p.s, x->tmp.len)) != FS_OK ||
	        (rc = fs_merge_run(m, pair, &p)) != FS_OK)
		return rc;
	for (i = 0; i < m->n_syms; i = m->syms[i].next) {
		const struct fs_sym *sym = &m->syms[i];

		if (sym->id != FS_SYM_NONE)
			rc = fs_ids_append(out, (int32_t)sym->id);
		else
			rc = emit_bytes(t, p.s + sym->off, fs_merge_end(m, sym) - sym->off, out);
		if (rc != FS_OK)
			return rc;
	}
	return FS_OK;
}

int fs_spm_bytes(const char *text, size_t len, struct fs_buf *out)
{
	const char *end = text + len, *mark;
	int rc;

	while ((mark = memmem(text, (size_t)(end - text), space_mark, SPACE_MARK_LEN)) != NULL) {
		if ((rc = fs_buf_append(out, text, (size_t)(mark - text))) != FS_OK ||
		        (rc = fs_buf_append(out, " ", 1)) != FS_OK)
			return rc;
		text = mark + SPACE_MARK_LEN;
	}
	return fs_buf_append(out, text, (size_t)(end - text));
}
