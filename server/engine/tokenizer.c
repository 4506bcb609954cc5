/* tokenizer: see tokenizer.h. Cuts a text at its special tokens, hands what lies between to bpe.c or spm.c,
 * and decodes. */
#include "server/engine/tokenizer.h"

#include <stdlib.h>
#include <string.h>

#include "server/engine/utf8.h"
#include "server/engine/vocab.h"

#define SLICE ((size_t)256 << 10)    /* bytes between two looks at the cancel token */
#define MAX_TEXT ((size_t)256 << 20) /* bytes of one text, after U+FFFD took the place of bad bytes */

void fs_ids_init(struct fs_ids *a, size_t max)
{
	*a = (struct fs_ids){.max = max};
}

void fs_ids_finish(struct fs_ids *a)
{
	free(a->data);
	fs_ids_init(a, a->max);
}

int fs_ids_append(struct fs_ids *a, int32_t id)
{
	if (a->len >= a->max)
		return FS_ELIMIT;
	if (a->len == a->cap) {
		size_t cap = a->cap ? a->cap * 2 : 64, bytes;
		int32_t *p;

		if (!fs_mul_size(cap, sizeof(*p), &bytes) || (p = realloc(a->data, bytes)) == NULL)
			return FS_ENOMEM;
		a->data = p;
		a->cap = cap;
	}
	a->data[a->len++] = id;
	return FS_OK;
}

const struct fs_tok_info *fs_tok_info(const struct fs_tok *t)
{
	return &t->info;
}

static bool in_vocab(const struct fs_tok *t, int32_t id)
{
	return id >= 0 && id < t->info.n_vocab;
}

bool fs_tok_is_eog(const struct fs_tok *t, int32_t id)
{
	return in_vocab(t, id) && t->eog[id];
}

bool fs_tok_is_control(const struct fs_tok *t, int32_t id)
{
	return in_vocab(t, id) && (t->types[id] == FS_TT_CONTROL || t->types[id] == FS_TT_UNKNOWN);
}

int32_t fs_tok_find(const struct fs_tok *t, const char *text, size_t len)
{
	uint32_t id;

	return fs_strtab_find(&t->strs, text, len, &id) && id < (uint32_t)t->info.n_vocab ? (int32_t)id : -1;
}

const char *fs_tok_text(const struct fs_tok *t, int32_t id, size_t *len)
{
	return in_vocab(t, id) ? fs_strtab_get(&t->strs, (uint32_t)id, len) : NULL;
}

/* ---- encoding ---- */

struct trust { /* [start, end) of the joined text, not touching its neighbours */
	size_t start, end;
};
struct joined {
	struct fs_buf text;
	struct trust *trusts;
	size_t n_trusts;
};

/* In slices that cut no character in two. */
static int append_clean(struct fs_buf *b, const char *text, size_t n, struct fs_cancel *cancel)
{
	while (n > 0) {
		size_t k = FS_MIN(n, SLICE);
		int rc;

		while (k < n && ((uint8_t)text[k] & 0xc0) == 0x80)
			k++;
		if (fs_cancelled(cancel))
			return FS_ECANCELLED;
		if ((rc = fs_utf8_append_clean(b, text, k)) != FS_OK)
			return rc;
		text += k;
		n -= k;
	}
	return FS_OK;
}

static int join(const struct fs_tok_span *spans, size_t n, struct fs_cancel *cancel, struct joined *j)
{
	size_t i;
	int rc;

	j->trusts = calloc(n ? n : 1, sizeof(*j->trusts));
	if (j->trusts == NULL)
		return FS_ENOMEM;
	for (i = 0; i < n; i++) {
		size_t start = j->text.len;

		if ((rc = append_clean(&j->text, spans[i].text, spans[i].len, cancel)) != FS_OK)
			return rc;
		if (!spans[i].special || j->text.len == start)
			continue;
		if (j->n_trusts > 0 && j->trusts[j->n_trusts - 1].end == start)
			j->trusts[j->n_trusts - 1].end = j->text.len;
		else
			j->trusts[j->n_trusts++] = (struct trust){start, j->text.len};
	}
	return FS_OK;
}

struct plain { /* state between two special tokens */
	const struct fs_tok *t;
	struct fs_tok_scratch scratch;
	struct fs_ids *out;
	bool after_special; /* or at the start: where SPM puts its space */
};

static int encode_plain(struct plain *p, const uint8_t *s, size_t n)
{
	bool prefix = p->t->info.add_space_prefix && p->after_special;

	if (n == 0)
		return FS_OK;
	p->after_special = false;
	if (p->t->spm)
		return fs_spm_encode(p->t, &p->scratch, s, n, prefix, p->out);
	return fs_bpe_encode(p->t, &p->scratch, s, n, p->out);
}

static int encode_joined(struct plain *p, const struct joined *j)
{
	const uint8_t *s = j->text.data;
	size_t n = j->text.len, pos = 0, from = 0, k = 0, len = 0, looked = 0;
	int rc;

	while (pos < n) {
		size_t trusted = 0;
		uint32_t id;

		if (pos - looked >= SLICE) {
			looked = pos;
			if (fs_cancelled(p->out->cancel))
				return FS_ECANCELLED;
		}

		while (k < j->n_trusts && j->trusts[k].end <= pos)
			k++;
		if (k < j->n_trusts && j->trusts[k].start <= pos)
			trusted = j->trusts[k].end - pos;
		id = fs_special_match(p->t, s + pos, n - pos, trusted, &len);
		if (id == FS_SYM_NONE) {
			pos++;
			continue;
		}
		if ((rc = encode_plain(p, s + from, pos - from)) != FS_OK ||
		        (rc = fs_ids_append(p->out, (int32_t)id)) != FS_OK)
			return rc;
		p->after_special = true;
		pos += len;
		from = pos;
	}
	return encode_plain(p, s + from, n - from);
}

int fs_tok_encode_spans(const struct fs_tok *t, const struct fs_tok_span *spans, size_t n, struct fs_ids *out,
        struct fs_errbuf *e)
{
	struct plain p = {.t = t, .out = out, .after_special = true};
	size_t before = out->len;
	struct joined j = {.n_trusts = 0};
	size_t bytes = 0;
	int rc = FS_OK;

	for (size_t i = 0; i < n; i++)
		bytes += spans[i].len;
	fs_buf_init(&p.scratch.tmp, MAX_TEXT * 3 + 3);
	fs_buf_init(&j.text, MAX_TEXT);
	p.scratch.merge.cancel = out->cancel;
	/* A text that can not fit is refused before the work, which takes some 50 bytes of memory a byte.
	 * What takes the place of bad bytes is no shorter. */
	if (t->all_bytes && bytes / t->longest > out->max - out->len)
		rc = FS_ELIMIT;
	if (rc == FS_OK)
		rc = join(spans, n, out->cancel, &j);
	if (rc == FS_OK && j.text.len > 0)
		rc = encode_joined(&p, &j);
	if (rc != FS_OK) {
		out->len = before;
		if (rc == FS_ELIMIT)
			fs_fail(e, rc, "the text is too long: %zu bytes do not fit in %zu tokens", bytes,
			        out->max - before);
		else if (rc == FS_ECANCELLED)
			fs_fail(e, rc, "cancelled");
		else
			fs_fail(e, rc, "no memory to take %zu bytes of text apart", bytes);
	}
	fs_merge_finish(&p.scratch.merge);
	fs_buf_finish(&p.scratch.tmp);
	fs_buf_finish(&j.text);
	free(j.trusts);
	return rc;
}

int fs_tok_encode(const struct fs_tok *t, const char *text, size_t len, bool parse_special,
        struct fs_ids *out, struct fs_errbuf *e)
{
	struct fs_tok_span span = {text, len, parse_special};

	return fs_tok_encode_spans(t, &span, 1, out, e);
}

/* ---- decoding ---- */

/* Marks of calls: in most files plain text, in some control tokens, and part of the answer in any case. */
static bool is_spoken(const char *s, size_t len)
{
	return (len == 11 && memcmp(s, "<tool_call>", len) == 0) ||
	       (len == 12 && memcmp(s, "</tool_call>", len) == 0);
}

int fs_tok_bytes(const struct fs_tok *t, int32_t id, struct fs_buf *out)
{
	const char *s;
	size_t len;
	uint8_t byte;
	int v;

	if (!in_vocab(t, id))
		return FS_OK;
	s = fs_strtab_get(&t->strs, (uint32_t)id, &len);
	switch ((enum fs_tok_type)t->types[id]) {
	case FS_TT_NORMAL:
		return t->spm ? fs_spm_bytes(s, len, out) : fs_bpe_bytes(t, s, len, out);
	case FS_TT_BYTE:
		if ((v = fs_spm_byte_value(s, len)) < 0)
			return fs_buf_append(out, s, len);
		byte = (uint8_t)v;
		return fs_buf_append(out, &byte, 1);
	case FS_TT_USER:
		return fs_buf_append(out, s, len);
	case FS_TT_CONTROL:
		return is_spoken(s, len) ? fs_buf_append(out, s, len) : FS_OK;
	case FS_TT_UNKNOWN:
	case FS_TT_UNUSED:
		return FS_OK;
	}
	FS_ASSERT(false);
}

/* Puts out what is complete at the front of the held bytes and bad parts; keeps an unfinished character
 * unless at_end. */
static int drain(struct fs_tok_stream *s, bool at_end, struct fs_buf *out)
{
	uint32_t cp;
	size_t len;
	int rc;

	while (s->n_held > 0) {
		enum fs_utf8_state st = fs_utf8_next(s->held, s->n_held, &cp, &len);

		if (st == FS_UTF8_INCOMPLETE && !at_end)
			return FS_OK;
		rc = st == FS_UTF8_OK ? fs_buf_append(out, s->held, len)
		                      : fs_buf_append(out, "\xef\xbf\xbd", 3);
		if (rc != FS_OK)
			return rc;
		s->n_held = (uint8_t)(s->n_held - len);
		memmove(s->held, s->held + len, s->n_held);
	}
	return FS_OK;
}

int fs_tok_stream_push(const struct fs_tok *t, struct fs_tok_stream *s, int32_t id, struct fs_buf *out)
{
	struct fs_buf bytes;
	size_t i = 0;
	int rc;

	fs_buf_init(&bytes, SIZE_MAX - 1);
	rc = fs_tok_bytes(t, id, &bytes);
	if (rc == FS_OK && s->drop_space && bytes.len > 0) {
		i = bytes.data[0] == ' ' ? 1 : 0;
		s->drop_space = false;
	}
	for (; rc == FS_OK && i < bytes.len; i++) {
		s->held[s->n_held++] = bytes.data[i];
		rc = drain(s, false, out);
	}
	fs_buf_finish(&bytes);
	return rc;
}

int fs_tok_stream_flush(struct fs_tok_stream *s, struct fs_buf *out)
{
	return drain(s, true, out);
}
