/* chat_scan: see chat_scan.h. */
#include "server/engine/chat_scan.h"

#include <string.h>

bool fs_scan_has(const char *tmpl, size_t len, const char *needle)
{
	return memmem(tmpl, len, needle, strlen(needle)) != NULL;
}

bool fs_scan_atom_has(const struct fs_scan_atom *a, const char *needle)
{
	return a->kind == FS_SCAN_LITERAL && fs_scan_has(a->s, a->len, needle);
}

int fs_scan_unescape(struct fs_buf *out, const char *s, size_t len)
{
	size_t i;
	int rc;

	for (i = 0; i < len; i++) {
		char c = s[i];

		if (c == '\\' && i + 1 < len && strchr("nt'\"\\", s[i + 1]) != NULL && s[i + 1] != 0) {
			c = s[++i];
			c = c == 'n' ? '\n' : c == 't' ? '\t' : c;
		}
		if ((rc = fs_buf_append(out, &c, 1)) != FS_OK)
			return rc;
	}
	return FS_OK;
}

/* Index of the quote that ends the literal begun at s[0], or len. */
static size_t literal_end(const char *s, size_t len)
{
	size_t i;

	for (i = 1; i < len && s[i] != s[0]; i++)
		if (s[i] == '\\')
			i++;
	return FS_MIN(i, len);
}

static bool is_name(char c)
{
	return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_';
}

static bool is_blank(char c)
{
	return c == ' ' || c == '\t' || c == '\r' || c == '\n';
}

/* An operand such as message['content'].strip(): names, dots and bracketed parts. Returns its length, 0 when
 * s[0] begins none. */
static size_t operand_len(const char *s, size_t len)
{
	size_t i = 0;
	int depth = 0;

	if (len == 0 || !is_name(s[0]))
		return 0;
	while (i < len) {
		if (s[i] == '[' || s[i] == '(')
			depth++;
		else if ((s[i] == ']' || s[i] == ')') && depth > 0)
			depth--;
		else if (depth > 0 && (s[i] == '\'' || s[i] == '"'))
			i += literal_end(s + i, len - i);
		else if (depth == 0 && !is_name(s[i]) && s[i] != '.')
			break;
		i++;
	}
	return FS_MIN(i, len);
}

static enum fs_scan_kind classify(const char *s, size_t len)
{
	if (len == 9 && memcmp(s, "bos_token", 9) == 0)
		return FS_SCAN_BOS;
	if (len == 9 && memcmp(s, "eos_token", 9) == 0)
		return FS_SCAN_EOS;
	if (len >= 15 && memcmp(s, "raise_exception", 15) == 0)
		return FS_SCAN_OTHER;
	if (fs_scan_has(s, len, "system"))
		return FS_SCAN_SYSTEM;
	return fs_scan_has(s, len, "content") ? FS_SCAN_CONTENT : FS_SCAN_OTHER;
}

static void add_atom(struct fs_scan_block *b, enum fs_scan_kind kind, const char *s, size_t len)
{
	if (b->n < FS_SCAN_ATOMS)
		b->atoms[b->n++] = (struct fs_scan_atom){
		        kind, s, len, kind != FS_SCAN_LITERAL && fs_scan_has(s, len, ".strip()")};
}

/* Returns the length of the atom or filter at s. */
static size_t take_atom(struct fs_scan_block *b, const char *s, size_t len, bool *filter)
{
	size_t n;

	if (s[0] == '\'' || s[0] == '"') {
		n = literal_end(s, len);
		add_atom(b, FS_SCAN_LITERAL, s + 1, n - 1);
		return FS_MIN(n + 1, len);
	}
	n = operand_len(s, len);
	if (n == 0) {
		if (s[0] == '|')
			*filter = true;
		return 1;
	}
	if (!*filter)
		add_atom(b, classify(s, n), s, n);
	else if (n == 4 && memcmp(s, "trim", 4) == 0 && b->n > 0)
		b->atoms[b->n - 1].trim = true;
	*filter = false;
	return n;
}

/* Reads a sum up to end and '}'; returns the index behind them. */
static size_t take_sum(struct fs_scan_block *b, const char *s, size_t len, size_t i, char end)
{
	bool filter = false;

	b->n = 0;
	while (i < len && !(s[i] == end && i + 1 < len && s[i + 1] == '}'))
		i += take_atom(b, s + i, len - i, &filter);
	return FS_MIN(i + 2, len);
}

bool fs_scan_next(const char *tmpl, size_t len, size_t *pos, struct fs_scan_block *b)
{
	const char *p = *pos < len ? memmem(tmpl + *pos, len - *pos, "{{", 2) : NULL;

	if (p == NULL)
		return false;
	*pos = take_sum(b, tmpl, len, (size_t)(p - tmpl) + 2, '}');
	return true;
}

static size_t skip_blanks(const char *s, size_t len, size_t i)
{
	while (i < len && is_blank(s[i]))
		i++;
	return i;
}

/* "content" [ quote ] [ "]" ] then "| trim" or ".strip()" */
static bool trimmed_here(const char *s, size_t len)
{
	size_t i = strlen("content");

	if (i < len && (s[i] == '\'' || s[i] == '"'))
		i++;
	if (i < len && s[i] == ']')
		i++;
	if (len - i >= 8 && memcmp(s + i, ".strip()", 8) == 0)
		return true;
	i = skip_blanks(s, len, i);
	if (i == len || s[i] != '|')
		return false;
	i = skip_blanks(s, len, i + 1);
	return len - i >= 4 && memcmp(s + i, "trim", 4) == 0;
}

bool fs_scan_trims(const char *tmpl, size_t len)
{
	const char *end = tmpl + len, *p = tmpl;

	while ((p = memmem(p, (size_t)(end - p), "content", 7)) != NULL) {
		if (trimmed_here(p, (size_t)(end - p)))
			return true;
		p += 7;
	}
	return false;
}

/* Index behind the "=" of the next assignment to the variable at or after i, len when there is none. */
static size_t next_assignment(const char *tmpl, size_t len, size_t i, const char *name)
{
	size_t n = strlen(name);
	const char *p;

	while (i < len && (p = memmem(tmpl + i, len - i, name, n)) != NULL) {
		i = skip_blanks(tmpl, len, (size_t)(p - tmpl) + n);
		if (i + 1 < len && tmpl[i] == '=' && tmpl[i + 1] != '=')
			return i + 1;
	}
	return len;
}

int fs_scan_assigned(const char *tmpl, size_t len, const char *name, struct fs_buf *out)
{
	size_t i = 0, n;

	while ((i = next_assignment(tmpl, len, i, name)) < len) {
		i = skip_blanks(tmpl, len, i);
		if (i == len || (tmpl[i] != '\'' && tmpl[i] != '"'))
			continue;
		n = literal_end(tmpl + i, len - i);
		if (n > 1)
			return fs_scan_unescape(out, tmpl + i + 1, n - 1);
	}
	return FS_ENOTFOUND;
}

bool fs_scan_set(const char *tmpl, size_t len, const char *name, struct fs_scan_block *b)
{
	size_t i = 0, k;

	while ((i = next_assignment(tmpl, len, i, name)) < len) {
		take_sum(b, tmpl, len, i, '%');
		for (k = 0; k < b->n; k++)
			if (b->atoms[k].kind == FS_SCAN_CONTENT)
				return true;
	}
	return false;
}

/* No block border and no end of a literal: a quote before + ~ } % or a filter. */
static bool is_constant(const char *s, size_t len)
{
	size_t i, k;

	for (i = 0; i < len; i++) {
		if (s[i] == '\\') {
			i++;
			continue;
		}
		if (i + 1 < len &&
		        ((s[i] == '{' && strchr("{%", s[i + 1])) || (s[i + 1] == '}' && strchr("}%", s[i]))))
			return false;
		if (s[i] != '\'' && s[i] != '"')
			continue;
		k = skip_blanks(s, len, i + 1);
		if (k < len && strchr("+~}%|-", s[k]) != NULL)
			return false;
	}
	return true;
}

int fs_scan_between(const char *tmpl, size_t len, const char *open, const char *close, struct fs_buf *out)
{
	const char *end = tmpl + len, *p = tmpl, *q;

	while ((p = memmem(p, (size_t)(end - p), open, strlen(open))) != NULL) {
		p += strlen(open);
		if (p < end && *p == '\n')
			p++;
		else if (end - p >= 2 && p[0] == '\\' && p[1] == 'n')
			p += 2;
		else
			continue;
		q = memmem(p, (size_t)(end - p), close, strlen(close));
		if (q != NULL && q > p && is_constant(p, (size_t)(q - p)))
			return fs_scan_unescape(out, p, (size_t)(q - p));
	}
	return FS_ENOTFOUND;
}
