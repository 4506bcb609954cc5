/* Reading the chunked coding (RFC 9112, 7.1). Extensions and trailers are passed over, within bounds. */
#include "server/http/head.h"

#define MAX_LINE 256
#define MAX_TRAILERS ((size_t)8 * 1024)
#define MAX_DIGITS 12 /* 256 TiB: no sum of sizes can overflow, and any limit is far below */

enum state {
	SIZE,
	EXTENSION,
	SIZE_LF,
	DATA,
	DATA_CR,
	DATA_LF,
	TRAILER_START,
	TRAILER,
	TRAILER_LF,
	END_LF,
	DONE
};

static int hex(char c)
{
	if (c >= '0' && c <= '9')
		return c - '0';
	if (c >= 'a' && c <= 'f')
		return c - 'a' + 10;
	return c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
}

/* The state after c, or -1. */
static int after_size(struct http_chunks *c, char ch)
{
	int digit = hex(ch);
	if (digit >= 0) {
		if (++c->line > MAX_DIGITS)
			return -1;
		c->left = c->left * 16 + (uint64_t)digit;
		return SIZE;
	}
	if (c->line == 0)
		return -1;
	c->line = 0;
	return ch == '\r' ? SIZE_LF : ch == ';' ? EXTENSION : -1;
}

static int after_text(struct http_chunks *c, char ch, size_t max, int same, int at_cr)
{
	if (ch == '\r')
		return at_cr;
	bool control = (unsigned char)ch < ' ' ? ch != '\t' : ch == 0x7f;
	return control || ++c->line > max ? -1 : same;
}

static int step(struct http_chunks *c, char ch)
{
	switch ((enum state)c->state) {
	case SIZE:
		return after_size(c, ch);
	case EXTENSION:
		return after_text(c, ch, MAX_LINE, EXTENSION, SIZE_LF);
	case SIZE_LF:
		c->line = 0;
		return ch != '\n' ? -1 : c->left ? DATA : TRAILER_START;
	case DATA_CR:
		return ch == '\r' ? DATA_LF : -1;
	case DATA_LF:
		return ch == '\n' ? SIZE : -1;
	case TRAILER_START:
		if (ch == '\r')
			return END_LF;
		return ch == ' ' || ch == '\t' ? -1 : after_text(c, ch, MAX_TRAILERS, TRAILER, -1);
	case TRAILER:
		return after_text(c, ch, MAX_TRAILERS, TRAILER, TRAILER_LF);
	case TRAILER_LF:
		return ch == '\n' ? TRAILER_START : -1;
	case END_LF:
		return ch == '\n' ? DONE : -1;
	case DATA:
	case DONE:
		break;
	}
	return -1;
}

int http_chunks_read(struct http_chunks *c, const char *p, size_t n, size_t *used, const char **data,
        size_t *data_n, struct fs_errbuf *e)
{
	size_t i = 0;
	*data = p;
	*data_n = 0;
	while (i < n && c->state != DONE && c->state != DATA) {
		int next = step(c, p[i++]);
		if (next < 0)
			return fs_fail(e, FS_EFORMAT, "the chunks of the request's body are malformed");
		c->state = next;
	}
	if (c->state == DATA) {
		*data = p + i;
		*data_n = (size_t)FS_MIN((uint64_t)(n - i), c->left);
		i += *data_n;
		c->left -= *data_n;
		if (c->left == 0)
			c->state = DATA_CR;
	}
	*used = i;
	return c->state == DONE;
}
