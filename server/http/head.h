/*
 * A request's head and the chunks of its body, read strictly by RFC 9112: pure functions over bytes, bounded,
 * fuzzed. What two readers could take in two ways (two lengths, a length beside chunks, bare line feeds,
 * folded lines) is refused, so that nothing in front of the server sees other requests than it does.
 */
#ifndef FS_SERVER_HTTP_HEAD_H
#define FS_SERVER_HTTP_HEAD_H

#include "common/base/base.h"

#define HTTP_MAX_HEAD ((size_t)64 * 1024) /* bytes, its end included */
#define HTTP_MAX_HEADERS 100

struct http_head {
	char *text;                        /* owned; the strings below lie in it */
	const char *method, *path, *query; /* query NULL when none */
	int minor;                         /* of HTTP/1.x: 0 or 1 */
	int64_t length;                    /* Content-Length; -1 = none */
	bool chunked, wants_continue;
	bool last; /* the client wants the connection closed after the answer */
	size_t n_headers;
	struct {
		const char *name, *value;
	} headers[HTTP_MAX_HEADERS];
};

/* Bytes of the head that begins at p, its empty line included; 0 when its end is not among the n bytes.
 * *scanned: how far an earlier call on the same bytes got; 0 at first. FS_EFORMAT, FS_ELIMIT. */
int http_head_end(const char *p, size_t n, size_t *scanned, struct fs_errbuf *e);
/* The n bytes that http_head_end told. *status: the HTTP status of an error. out is to be finished on success
 * only. FS_EFORMAT, FS_ELIMIT, FS_ENOTSUP, FS_ENOMEM. */
int http_head_parse(const char *p, size_t n, struct http_head *out, int *status, struct fs_errbuf *e);
void http_head_finish(struct http_head *h); /* leaves an empty one; an empty one is accepted */
/* The first of that name, in any case; NULL when there is none. */
const char *http_head_find(const struct http_head *h, const char *name);

/* The chunked coding. All zero is the start. */
struct http_chunks {
	int state;
	uint64_t left;
	size_t line; /* bytes of the current line, or of the trailers, so far */
};
/* Reads on at p: *used bytes are done with, of which the *data_n at *data (in p) belong to the body. 1 when
 * the body is complete, 0 when more is to come (also when *used < n), FS_EFORMAT. */
int http_chunks_read(struct http_chunks *c, const char *p, size_t n, size_t *used, const char **data,
        size_t *data_n, struct fs_errbuf *e);

#endif
