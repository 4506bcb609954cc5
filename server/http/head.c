/* Reading a request's head: its end, its lines, and the few headers that say how the request goes on. */
#include "server/http/head.h"

#include <stdlib.h>
#include <string.h>
#include <strings.h>

static bool is_token(const char *s, size_t n)
{
	static const char others[] = "!#$%&'*+-.^_`|~";
	for (size_t i = 0; i < n; i++) {
		char c = s[i];
		bool alnum = (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
		if (!alnum && (c == '\0' || !strchr(others, c)))
			return false;
	}
	return n > 0;
}

int http_head_end(const char *p, size_t n, size_t *scanned, struct fs_errbuf *e)
{
	for (size_t i = *scanned; i < n && i < HTTP_MAX_HEAD; i++) {
		if ((unsigned char)p[i] < ' ' &&
		        !memchr("\t\r\n", p[i], 3)) /* as in TLS to this plain port */
			return fs_fail(e, FS_EFORMAT, "a control character in the request's head");
		if (p[i] != '\n')
			continue;
		if (i == 0 || p[i - 1] != '\r')
			return fs_fail(
			        e, FS_EFORMAT, "a line of the request's head ends without a carriage return");
		if (i >= 3 && p[i - 2] == '\n')
			return (int)i + 1;
	}
	*scanned = FS_MIN(n, HTTP_MAX_HEAD);
	if (n >= HTTP_MAX_HEAD)
		return fs_fail(
		        e, FS_ELIMIT, "the request's head is larger than %zu KiB", HTTP_MAX_HEAD / 1024);
	return 0;
}

static int bad(int *status, int value, struct fs_errbuf *e, const char *text)
{
	*status = value;
	return fs_fail(e, value == 400 ? FS_EFORMAT : FS_ENOTSUP, "%s", text);
}

/* Cuts the request line into method, path and query. */
static int parse_request_line(char *line, struct http_head *h, int *status, struct fs_errbuf *e)
{
	char *target = strchr(line, ' '), *version = target ? strchr(target + 1, ' ') : NULL;
	if (!version || !is_token(line, (size_t)(target - line)))
		return bad(status, 400, e, "the request line is not \"METHOD /path HTTP/1.1\"");
	*target++ = '\0';
	*version++ = '\0';
	if (strcmp(version, "HTTP/1.1") != 0 && strcmp(version, "HTTP/1.0") != 0) {
		bool other = strncmp(version, "HTTP/", 5) == 0 && strspn(version + 5, "0123456789.") == 3 &&
		             version[8] == '\0';
		return bad(status, other ? 505 : 400, e, "only HTTP/1.1 and HTTP/1.0 are spoken here");
	}
	for (const char *c = target; *c; c++)
		if (*c <= ' ' || *c >= 0x7f || *c == '#')
			return bad(
			        status, 400, e, "a character of the request's path must be percent-encoded");
	if (*target != '/' && (strcmp(target, "*") != 0 || strcmp(line, "OPTIONS") != 0))
		return bad(status, 400, e, "the request's path must begin with \"/\"");
	char *query = strchr(target, '?');
	if (query)
		*query++ = '\0';
	h->method = line;
	h->path = target;
	h->query = query;
	h->minor = version[7] - '0';
	return FS_OK;
}

static int add_header(char *line, struct http_head *h, int *status, struct fs_errbuf *e)
{
	char *colon = strchr(line, ':'), *end = line + strlen(line);
	if (*line == ' ' || *line == '\t')
		return bad(status, 400, e, "a header line that goes on from the one before");
	if (!colon || !is_token(line, (size_t)(colon - line)))
		return bad(status, 400, e, "a header line without a proper name");
	if (h->n_headers == HTTP_MAX_HEADERS) {
		*status = 431;
		return fs_fail(e, FS_ELIMIT, "the request has more than %d headers", HTTP_MAX_HEADERS);
	}
	*colon++ = '\0';
	colon += strspn(colon, " \t");
	while (end > colon && (end[-1] == ' ' || end[-1] == '\t'))
		*--end = '\0';
	if (strchr(colon, 0x7f))
		return bad(status, 400, e, "a control character in a header");
	h->headers[h->n_headers].name = line;
	h->headers[h->n_headers++].value = colon;
	return FS_OK;
}

static size_t count(const struct http_head *h, const char *name)
{
	size_t n = 0;
	for (size_t i = 0; i < h->n_headers; i++)
		n += strcasecmp(h->headers[i].name, name) == 0;
	return n;
}

/* Whether one of the words between commas, in any header of that name, is that one. */
static bool has_word(const struct http_head *h, const char *name, const char *word)
{
	for (size_t i = 0; i < h->n_headers; i++) {
		if (strcasecmp(h->headers[i].name, name) != 0)
			continue;
		for (const char *v = h->headers[i].value; *v;) {
			v += strspn(v, ", \t");
			size_t n = strcspn(v, ", \t");
			if (n == strlen(word) && strncasecmp(v, word, n) == 0)
				return true;
			v += n;
		}
	}
	return false;
}

static int parse_framing(struct http_head *h, int *status, struct fs_errbuf *e)
{
	const char *length = http_head_find(h, "Content-Length");
	const char *coding = http_head_find(h, "Transfer-Encoding");
	h->length = -1;
	if (count(h, "Content-Length") > 1 || count(h, "Transfer-Encoding") > 1 || (length && coding))
		return bad(status, 400, e, "the length of the request's body is given twice");
	if (length) {
		size_t n = strlen(length);
		if (n == 0 || n > 18 || strspn(length, "0123456789") != n)
			return bad(status, 400, e, "Content-Length must be a number of bytes");
		h->length = strtoll(length, NULL, 10);
	}
	if (coding && (strcasecmp(coding, "chunked") != 0 || h->minor == 0))
		return bad(status, 400, e, "no Transfer-Encoding but \"chunked\" is understood");
	h->chunked = coding != NULL;
	return FS_OK;
}

static int parse_rest(struct http_head *h, int *status, struct fs_errbuf *e)
{
	size_t hosts = count(h, "Host");
	if (hosts > 1 || (hosts == 0 && h->minor == 1))
		return bad(status, 400, e, "the request must have one Host header");
	const char *expect = http_head_find(h, "Expect");
	if (expect && strcasecmp(expect, "100-continue") != 0)
		return bad(status, 417, e, "no Expect but \"100-continue\" is understood");
	h->wants_continue = expect && h->minor == 1;
	/* A stream has no length, and HTTP/1.0 no chunks: its end is that of the connection, "keep-alive" or
	 * not. */
	h->last = has_word(h, "Connection", "close") || h->minor == 0;
	return parse_framing(h, status, e);
}

/* Ends the line at s with a NUL; the next one, NULL at the end or at a carriage return that ends no line. */
static char *cut_line(char *s)
{
	char *end = strchr(s, '\r');
	if (!end || end[1] != '\n')
		return NULL;
	*end = '\0';
	return end + 2;
}

int http_head_parse(const char *p, size_t n, struct http_head *out, int *status, struct fs_errbuf *e)
{
	struct http_head h = {.text = malloc(n + 1)};
	*status = 500;
	if (!h.text)
		return fs_fail(e, FS_ENOMEM, "out of memory");
	memcpy(h.text, p, n);
	h.text[n] = '\0';
	char *line = h.text, *next = cut_line(line), *end = h.text + n - 2; /* where the empty line begins */
	int rc = next ? parse_request_line(line, &h, status, e) : FS_OK;
	for (line = next; !rc && line && line != end; line = next) {
		next = cut_line(line);
		if (next)
			rc = add_header(line, &h, status, e);
	}
	if (!rc && !line)
		rc = bad(status, 400, e, "a carriage return within a line of the request's head");
	if (!rc)
		rc = parse_rest(&h, status, e);
	if (rc) {
		free(h.text);
		return rc;
	}
	*out = h;
	return FS_OK;
}

void http_head_finish(struct http_head *h)
{
	free(h->text);
	memset(h, 0, sizeof(*h));
}

const char *http_head_find(const struct http_head *h, const char *name)
{
	for (size_t i = 0; i < h->n_headers; i++)
		if (strcasecmp(h->headers[i].name, name) == 0)
			return h->headers[i].value;
	return NULL;
}
