/*
 * http: libevent's evhttp behind a small, thread-safe face. Owns the loop thread, the listening socket and
 * every connection; nobody else touches evhttp. A handler runs on the loop thread, must not block, and hands
 * the request to a worker; replies are posted to the loop from any thread.
 *
 * Lifetime: a request lives until its last reference is dropped. Its holder ends it with exactly one of
 * fs_http_reply or fs_http_stream_end (after fs_http_stream_begin), which both work and do nothing when the
 * client has left. Cancel: the token is made before the handler is called, and fires when the client leaves,
 * also while no reply has been started. A client that shuts down its writing side counts as gone.
 */
#ifndef FS_SERVER_HTTP_H
#define FS_SERVER_HTTP_H

#include "common/base/base.h"

struct fs_http;
struct fs_http_request;

typedef void (*fs_http_handler)(void *arg, struct fs_http_request *r);
struct fs_http_route {
	const char *method; /* "GET" or "POST" */
	const char *path;
	fs_http_handler fn; /* takes over one reference */
	void *arg;
};

struct fs_http_opts {
	const char *listen;                 /* "127.0.0.1:8080", "[::1]:0" */
	size_t max_body;                    /* bytes */
	int64_t timeout_ms;                 /* deadline of each request's token */
	const struct fs_http_route *routes; /* must outlive the server */
	size_t n_routes;
};
/* Binds; connections wait in the socket's backlog until fs_http_start starts the loop thread. */
int fs_http_create(const struct fs_http_opts *o, struct fs_http **out, struct fs_errbuf *e);
int fs_http_start(struct fs_http *h, struct fs_errbuf *e);
int fs_http_port(const struct fs_http *h);
/* No new connections or requests from now on (503 for those on open connections). */
void fs_http_stop_accepting(struct fs_http *h);
/* Fires every live request's token. */
void fs_http_cancel_all(struct fs_http *h, enum fs_cancel_cause cause);
/* Requests between arrival and their end. */
size_t fs_http_live(const struct fs_http *h);
/* Ends the loop; every request must have been ended before. Stops listening first. */
void fs_http_destroy(struct fs_http *h);

struct fs_http_request *fs_http_ref(struct fs_http_request *r);
void fs_http_unref(struct fs_http_request *r);
struct fs_cancel *fs_http_cancel(struct fs_http_request *r); /* borrowed */
/* The body, [len] bytes; valid while the request lives. */
const char *fs_http_body(const struct fs_http_request *r, size_t *len);
int64_t fs_http_arrived(const struct fs_http_request *r); /* monotonic ns */

/* One whole answer. extra_header NULL, or "Name: value". body is copied. Any thread. When the stream has
 * begun by itself the body (one line of JSON) goes out as its last event before [DONE]. */
void fs_http_reply(struct fs_http_request *r, int status, const char *content_type, const char *extra_header,
        const void *body, size_t n);

/*
 * Server-sent events. begin sends status 200 and the headers that keep proxies from buffering; write sends
 * bytes (whole events). When nothing was written for keep-alive time, the loop itself sends a comment line.
 * FS_ECANCELLED: the client is gone or reads so slowly that FS_HTTP_MAX_BACKLOG bytes wait for it (its token
 * is then fired too).
 */
#define FS_HTTP_MAX_BACKLOG ((size_t)4 << 20)
#define FS_HTTP_KEEPALIVE_MS 10000
int fs_http_stream_begin(struct fs_http_request *r);
/* Begins the stream by itself, with a comment, when neither reply nor begin came within ms: a client behind a
 * proxy sees life while a picture is encoded. */
void fs_http_stream_begin_after(struct fs_http_request *r, int ms);
int fs_http_stream_write(struct fs_http_request *r, const void *data, size_t n);
void fs_http_stream_end(struct fs_http_request *r);

#endif
