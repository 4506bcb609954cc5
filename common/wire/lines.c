/*
 * The encoder's line protocol: orders to it, replies from it. Pure functions over one line, any thread.
 * Refuses NUL bytes, numbers with trailing text, paths that would not survive the trip.
 */
#include "common/wire/wire.h"

#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int fs_line_next(const struct fs_buf *b, size_t *len, struct fs_errbuf *e)
{
	const uint8_t *nl = b->len > 0 ? memchr(b->data, '\n', FS_MIN(b->len, (size_t)FS_LINE_MAX)) : NULL;

	if (nl != NULL) {
		*len = (size_t)(nl - b->data);
		return FS_OK;
	}
	if (b->len >= FS_LINE_MAX)
		return fs_fail(e, FS_EFORMAT, "a line of more than %d bytes", FS_LINE_MAX);
	return FS_ENOTFOUND;
}

/* A NUL-terminated copy without a trailing CR. line holds FS_LINE_MAX + 1 bytes. */
static int copy_line(char *line, const char *in, size_t n, struct fs_errbuf *e)
{
	if (n >= FS_LINE_MAX)
		return fs_fail(e, FS_EFORMAT, "a line of more than %d bytes", FS_LINE_MAX);
	if (memchr(in, 0, n) != NULL || memchr(in, '\n', n) != NULL)
		return fs_fail(e, FS_EFORMAT, "a line with a NUL or newline inside");
	memcpy(line, in, n);
	if (n > 0 && line[n - 1] == '\r')
		n--;
	line[n] = 0;
	return FS_OK;
}

/* A decimal number that fills the word; min..max. */
static bool parse_int(const char *word, int32_t min, int32_t max, int32_t *out)
{
	char *end;
	long v;

	if (!isdigit((unsigned char)word[0]))
		return false;
	errno = 0;
	v = strtol(word, &end, 10);
	if (*end != 0 || errno != 0 || v < min || v > max)
		return false;
	*out = (int32_t)v;
	return true;
}

/* Cuts the next space-separated word off *rest; NULL at the end. */
static char *next_word(char **rest)
{
	char *word = *rest + strspn(*rest, " "), *end;

	if (*word == 0)
		return NULL;
	end = word + strcspn(word, " ");
	*rest = *end == 0 ? end : end + 1;
	*end = 0;
	return word;
}

/* ---- replies ---- */

static const char *option_value(const char *word, const char *name)
{
	size_t n = strlen(name);

	return strncmp(word, name, n) == 0 && word[n] == '=' ? word + n + 1 : NULL;
}

static bool is_fingerprint(const char *s)
{
	return strlen(s) == 32 && strspn(s, "0123456789abcdef") == 32;
}

static int ready_option(const char *word, struct fs_ready *r, struct fs_errbuf *e)
{
	const char *v;
	bool ok = true;

	if ((v = option_value(word, "fingerprint")) != NULL) {
		ok = is_fingerprint(v);
		if (ok)
			memcpy(r->fingerprint, v, 33);
	} else if ((v = option_value(word, "device")) != NULL) {
		ok = strlen(v) < sizeof(r->device);
		if (ok)
			memcpy(r->device, v, strlen(v) + 1);
	} else if ((v = option_value(word, "rows")) != NULL) {
		r->pipe = strcmp(v, "pipe") == 0; /* another word is one that we do not know */
	} else if ((v = option_value(word, "min_tokens")) != NULL) {
		ok = parse_int(v, 1, FS_ROWS_MAX_TOKENS, &r->min_tokens);
	} else if ((v = option_value(word, "vram_free_mb")) != NULL) {
		ok = parse_int(v, 0, INT32_MAX, &r->vram_free_mb);
	} else if ((v = option_value(word, "vram_total_mb")) != NULL) {
		ok = parse_int(v, 0, INT32_MAX, &r->vram_total_mb);
	} else if ((v = option_value(word, "max_tokens")) != NULL) {
		ok = parse_int(v, 1, FS_ROWS_MAX_TOKENS, &r->max_tokens);
	}
	return ok ? FS_OK : fs_fail(e, FS_EFORMAT, "READY with a wrong option: %s", word);
}

static int parse_ready(char *rest, struct fs_ready *r, struct fs_errbuf *e)
{
	char *word = next_word(&rest);
	int err = FS_OK;

	if (word == NULL || !parse_int(word, 1, FS_ROWS_MAX_EMBD, &r->n_embd))
		return fs_fail(e, FS_EFORMAT, "READY without a usable row width");
	while (err == FS_OK && (word = next_word(&rest)) != NULL)
		err = ready_option(word, r, e);
	return err;
}

static int parse_ok(char *rest, struct fs_reply *r, struct fs_errbuf *e)
{
	char *word = next_word(&rest), *ny;
	struct fs_rows_shape *s = &r->shape;
	char *end;

	if (word == NULL || !parse_int(word, 1, FS_ROWS_MAX_TOKENS, &s->n_tokens))
		return fs_fail(e, FS_EFORMAT, "OK without a usable number of rows");
	s->nx = s->n_tokens;
	s->ny = 1;
	word = next_word(&rest);
	if (word == NULL)
		return FS_OK;
	ny = next_word(&rest);
	if (ny == NULL || !parse_int(word, 1, FS_ROWS_MAX_TOKENS, &s->nx) ||
	        !parse_int(ny, 1, FS_ROWS_MAX_TOKENS, &s->ny) || (int64_t)s->nx * s->ny != s->n_tokens)
		return fs_fail(e, FS_EFORMAT, "OK with a grid that is not its %d rows", s->n_tokens);
	word = next_word(&rest);
	if (word == NULL)
		return FS_OK;
	if (!isdigit((unsigned char)word[0]))
		return fs_fail(e, FS_EFORMAT, "OK with a wrong time: %s", word);
	r->ms = strtod(word, &end);
	if (*end != 0 || !isfinite(r->ms))
		return fs_fail(e, FS_EFORMAT, "OK with a wrong time: %s", word);
	return FS_OK;
}

static void copy_text(char *out, size_t cap, const char *text)
{
	size_t n = strnlen(text, cap - 1);

	for (size_t i = 0; i < n; i++)
		out[i] = (unsigned char)text[i] < 0x20 || text[i] == 0x7f ? '?' : text[i];
	out[n] = 0;
}

/* The text behind "word " or "word" alone; NULL when the line is something else. */
static char *after_word(char *line, const char *word)
{
	size_t n = strlen(word);

	if (strncmp(line, word, n) != 0)
		return NULL;
	return line[n] == ' ' ? line + n + 1 : line[n] == 0 ? line + n : NULL;
}

int fs_reply_parse(const char *line, size_t n, struct fs_reply *out, struct fs_errbuf *e)
{
	char copy[FS_LINE_MAX + 1], *rest;
	struct fs_reply r;
	int err = copy_line(copy, line, n, e);

	if (err != FS_OK)
		return err;
	memset(&r, 0, sizeof(r));
	if ((rest = after_word(copy, "READY")) != NULL) {
		r.kind = FS_REPLY_READY;
		err = parse_ready(rest, &r.ready, e);
	} else if ((rest = after_word(copy, "OK")) != NULL) {
		r.kind = FS_REPLY_OK;
		err = parse_ok(rest, &r, e);
	} else if ((rest = after_word(copy, "ERR")) != NULL) {
		r.kind = FS_REPLY_ERR;
		copy_text(r.text, sizeof(r.text), *rest == 0 ? "no reason given" : rest);
	} else {
		err = fs_fail(e, FS_EFORMAT, "neither READY, OK nor ERR: %.200s", copy);
	}
	if (err == FS_OK)
		*out = r;
	return err;
}

/* ---- orders ---- */

static bool is_option(const char *word)
{
	return option_value(word, "dtype") != NULL || option_value(word, "min") != NULL ||
	       option_value(word, "max") != NULL;
}

/* word is cut off: an option as is_option has it. */
static int enc_option(const char *word, struct fs_order *o, struct fs_errbuf *e)
{
	const char *v;
	bool ok = false;

	if ((v = option_value(word, "dtype")) != NULL) {
		o->f16 = strcmp(v, "f16") == 0;
		ok = o->f16 || strcmp(v, "f32") == 0;
	} else if ((v = option_value(word, "min")) != NULL) {
		ok = parse_int(v, 1, FS_ROWS_MAX_TOKENS, &o->min_tokens);
	} else if ((v = option_value(word, "max")) != NULL) {
		ok = parse_int(v, 1, FS_ROWS_MAX_TOKENS, &o->max_tokens);
	}
	return ok ? FS_OK : fs_fail(e, FS_EFORMAT, "ENC with a wrong option: %s", word);
}

static int parse_enc(char *rest, bool extended, struct fs_order *o, struct fs_errbuf *e)
{
	char *split;
	int err = FS_OK;

	while (extended && err == FS_OK && is_option(rest) && strchr(rest, ' ') != NULL)
		err = enc_option(next_word(&rest), o, e);
	if (err != FS_OK)
		return err;
	if (o->min_tokens > 0 && o->max_tokens > 0 && o->min_tokens > o->max_tokens)
		return fs_fail(e, FS_EFORMAT, "ENC with min over max");
	split = strrchr(rest, ' ');
	if (split == NULL || split == rest || split[1] == 0)
		return fs_fail(e, FS_EFORMAT, "expected: ENC <image> <output>");
	*split = 0;
	if (strlen(rest) >= sizeof(o->in) || strlen(split + 1) >= sizeof(o->out))
		return fs_fail(e, FS_ELIMIT, "ENC with a path of more than %zu bytes", sizeof(o->in) - 1);
	memcpy(o->in, rest, strlen(rest) + 1);
	memcpy(o->out, split + 1, strlen(split + 1) + 1);
	return FS_OK;
}

int fs_order_parse(const char *line, size_t n, bool extended, struct fs_order *out, struct fs_errbuf *e)
{
	char copy[FS_LINE_MAX + 1], *rest;
	int err = copy_line(copy, line, n, e);

	if (err != FS_OK)
		return err;
	memset(out, 0, sizeof(*out));
	if ((rest = after_word(copy, "ENC")) != NULL) {
		out->kind = FS_ORDER_ENC;
		return parse_enc(rest, extended, out, e);
	}
	if (strcmp(copy, "QUIT") == 0)
		out->kind = FS_ORDER_QUIT;
	else if (extended && strcmp(copy, "CANCEL") == 0)
		out->kind = FS_ORDER_CANCEL;
	else
		return fs_fail(e, FS_EFORMAT, "expected: ENC <image> <output>");
	return FS_OK;
}

/* What would not arrive as it was sent: empty, or with bytes that end or cut a line. */
static bool path_is_bad(const char *path)
{
	return path[0] == 0 || path[strcspn(path, "\r\n")] != 0;
}

static int format_enc(const struct fs_order *o, bool extended, char *line, size_t cap, struct fs_errbuf *e)
{
	char options[64] = "";
	size_t at = 0;
	int n;

	if (path_is_bad(o->in) || path_is_bad(o->out) || strchr(o->out, ' ') != NULL)
		return fs_fail(e, FS_EINVAL,
		        "a path of the encoder's order is empty or holds a newline, or the output a space");
	if (!extended && (o->f16 || o->min_tokens != 0 || o->max_tokens != 0))
		return fs_fail(e, FS_EINVAL, "this encoder does not take options");
	if (o->f16)
		at += (size_t)snprintf(options, sizeof(options), "dtype=f16 ");
	if (o->min_tokens > 0)
		at += (size_t)snprintf(options + at, sizeof(options) - at, "min=%d ", o->min_tokens);
	if (o->max_tokens > 0)
		snprintf(options + at, sizeof(options) - at, "max=%d ", o->max_tokens);
	/* a relative path that looks like an option is told apart by "./" */
	n = snprintf(line, cap, "ENC %s%s%s %s\n", options, extended && is_option(o->in) ? "./" : "", o->in,
	        o->out);
	if (n < 0 || (size_t)n >= cap || n > FS_LINE_MAX)
		return fs_fail(e, FS_ELIMIT, "the encoder's order is longer than a line may be");
	return FS_OK;
}

int fs_order_format(const struct fs_order *o, bool extended, char *line, size_t cap, struct fs_errbuf *e)
{
	const char *word = o->kind == FS_ORDER_CANCEL ? "CANCEL\n" : "QUIT\n";

	if (o->kind == FS_ORDER_ENC)
		return format_enc(o, extended, line, cap, e);
	if (o->kind == FS_ORDER_CANCEL && !extended)
		return fs_fail(e, FS_EINVAL, "this encoder cannot cancel");
	if (strlen(word) >= cap)
		return fs_fail(e, FS_ELIMIT, "no room for the order");
	memcpy(line, word, strlen(word) + 1);
	return FS_OK;
}
