/*
 * http: libevent's evhttp behind a small, thread-safe face. Owns the loop thread, the listening socket and
 * every connection; nobody else touches evhttp. A handler runs on the loop thread, must not block, and hands
 * the request to a worker; replies are posted to the loop from any thread.
 *
 * Lifetime: a request lives until its last reference is dropped. Its holder ends it with exactly one of
 * fs_http_reply or fs_http_stream_end (after fs_http_stream_begin), which both work and do nothing when the
 * client has left. Cancel: the token is made before the handler is called, and fires when the client leaves,
 * also while no reply has been started. A client that shuts down its writing side counts as gone, and so does
 * one that acknowledges nothing for peer_timeout_ms (its machine lost power or the network).
 *
 * Requests are read strictly and within limits; errors that are answered here, before any handler, are JSON
 * like all others.
 */
#ifndef FS_SERVER_HTTP_H
#define FS_SERVER_HTTP_H

#include "common/base/base.h"

struct fs_http;
struct fs_http_request;

typedef void (*fs_http_handler)(void *arg, struct fs_http_request *r);
/* The first route that fits is taken. HEAD falls back to the path's GET route, whose answer is then sent
 * without its body. */
struct fs_http_route {
	const char *method; /* "GET", "POST", "DELETE", "OPTIONS" or "HEAD" */
	const char *path;   /* whole; or ending in "/" and a star: every longer path that begins so far */
	fs_http_handler fn; /* takes over one reference */
	void *arg;
};

/* Appends the body of an error answer to out, in the envelope of the API that path belongs to. code NULL =
 * none. Loop thread; must not block. */
typedef int (*fs_http_error_body)(const char *path, int status, const char *type, const char *code,
        const char *message, struct fs_buf *out);

/* What pointers lead to must outlive the server. Zeros mean the stated defaults. */
struct fs_http_opts {
	const char *listen; /* "127.0.0.1:8080", "[::1]:0" */
	size_t max_body;    /* bytes */
	int64_t timeout_ms; /* deadline of each request's token */
	const struct fs_http_route *routes;
	size_t n_routes;

	/* Access. With keys every request must carry one, but for GET /health and OPTIONS; without, names of
	 * hosts and origins of web pages are checked. */
	const char *const *api_keys;
	size_t n_api_keys;
	const char *const *allowed_hosts; /* "name", ".name" with all below it, "*" */
	size_t n_allowed_hosts;
	const char *const *cors_origins; /* "https://app.example", "*" */
	size_t n_cors_origins;
	bool open_without_key; /* may listen where other machines reach it, without a key */

	/* Limits. */
	size_t max_connections;  /* 512; past it new ones get 503 */
	size_t max_bodies;       /* bytes of all bodies in memory; 4 times max_body; past it 503 */
	int64_t read_timeout_ms; /* 60 s for a whole request, from its first byte on; then 408 */
	int64_t peer_timeout_ms; /* 30 s; a peer that acknowledges nothing for so long is gone */
	int64_t idle_timeout_ms; /* 60 s without a request, or without taking a byte of an answer */

	fs_http_error_body error_body; /* of errors answered here; default OpenAI's envelope */
};
/* Binds; connections wait in the socket's backlog until fs_http_start starts the loop thread. */
int fs_http_create(const struct fs_http_opts *o, struct fs_http **out, struct fs_errbuf *e);
int fs_http_start(struct fs_http *h, struct fs_errbuf *e);
int fs_http_port(const struct fs_http *h);
/* No new connections or requests from now on (503 for those on open connections); idle connections are
 * closed, others with their answer. */
void fs_http_stop_accepting(struct fs_http *h);
/* Fires every live request's token. */
void fs_http_cancel_all(struct fs_http *h, enum fs_cancel_cause cause);
/* Requests between arrival and their end. */
size_t fs_http_live(const struct fs_http *h);
/* Requests that were answered here, with an error, instead of by a handler: how many of which status, those
 * of which there were any. Any thread. */
#define FS_HTTP_MAX_STATUSES 16
struct fs_http_turned_away {
	int status;
	uint64_t n;
};
size_t fs_http_turned_away(const struct fs_http *h, struct fs_http_turned_away out[FS_HTTP_MAX_STATUSES]);
/* Ends the loop, when the last answers have left or after a second; every request must have been ended before
 * and its references dropped. Stops listening first. */
void fs_http_destroy(struct fs_http *h);

struct fs_http_request *fs_http_ref(struct fs_http_request *r);
void fs_http_unref(struct fs_http_request *r);
struct fs_cancel *fs_http_cancel(struct fs_http_request *r); /* borrowed */
/* The body, [len] bytes; valid while the request lives, unless it is dropped. */
const char *fs_http_body(const struct fs_http_request *r, size_t *len);
/* The body is not needed any more: its memory, which counts for max_bodies, goes. For the thread that answers
 * r, once nobody reads the body. */
void fs_http_drop_body(struct fs_http_request *r);
int64_t fs_http_arrived(const struct fs_http_request *r); /* monotonic ns */
/* What the request said; all valid while it lives. A header that came twice gives the first; NULL when
 * absent. */
const char *fs_http_header(const struct fs_http_request *r, const char *name);
const char *fs_http_method(const struct fs_http_request *r);
const char *fs_http_path(const struct fs_http_request *r);  /* as sent: percent-escapes are not decoded */
const char *fs_http_query(const struct fs_http_request *r); /* behind the '?', as sent; NULL when none */
/* One parameter of the query, percent-escapes decoded; NULL when absent. malloc'd. */
char *fs_http_query_value(const struct fs_http_request *r, const char *name);
/* What the path holds behind `prefix`, percent-escapes decoded; NULL when it begins otherwise. malloc'd. Both
 * are NULL as well when what they decode holds a NUL. */
char *fs_http_path_tail(const struct fs_http_request *r, const char *prefix);
/* Which of the options' API keys the request carried; -1 = none. */
int fs_http_key(const struct fs_http_request *r);
const char *fs_http_peer(const struct fs_http_request *r); /* the client's address, without its port */

/* Adds a header to the answer or stream, when called before it begins. Any thread; both are copied; at most 1
 * KiB together. */
void fs_http_add_header(struct fs_http_request *r, const char *name, const char *value);

/* One whole answer. extra_header NULL, or "Name: value". body is copied. Any thread. When the stream has
 * begun by itself the body (one line of JSON) goes out as its last event, between the texts of
 * fs_http_set_stream_frame. */
void fs_http_reply(struct fs_http_request *r, int status, const char *content_type, const char *extra_header,
        const void *body, size_t n);

/*
 * Server-sent events. begin sends status 200 and the headers that keep proxies from buffering; write sends
 * bytes (whole events). When nothing was written for keep-alive time, the loop itself sends a comment line.
 * FS_ECANCELLED: the client is gone or reads so slowly that FS_HTTP_MAX_BACKLOG bytes wait for it (its token
 * is then fired too, as unread).
 */
#define FS_HTTP_MAX_BACKLOG ((size_t)4 << 20)
#define FS_HTTP_KEEPALIVE_MS 10000
int fs_http_stream_begin(struct fs_http_request *r);
/* Begins the stream by itself, with a comment, when neither reply nor begin came within ms: a client behind a
 * proxy sees life while a picture is encoded. */
void fs_http_stream_begin_after(struct fs_http_request *r, int ms);
int fs_http_stream_write(struct fs_http_request *r, const void *data, size_t n);
/* Calls fn(arg) on the loop thread, where it must not block, while the server runs; also when the request has
 * ended meanwhile. Any thread. FS_ENOMEM: it will not be called. */
int fs_http_call(struct fs_http_request *r, void (*fn)(void *arg), void *arg);
/* The same, once the stream's backlog has fallen under FS_HTTP_LOW_BACKLOG; not when the client leaves
 * before. Loop thread only; a later call takes the place of one that still waits. */
#define FS_HTTP_LOW_BACKLOG ((size_t)64 << 10)
void fs_http_when_drained(struct fs_http_request *r, void (*fn)(void *arg), void *arg);
/* Takes it back. False: none waits, but the call may be on its way. Loop thread. */
bool fs_http_not_when_drained(struct fs_http_request *r);
/* Bytes of the stream that the client's socket has not taken yet. Any thread. */
size_t fs_http_stream_backlog(const struct fs_http_request *r);
/* What stands around an error's body that has to go out as an event (see fs_http_reply). Default: "data: "
 * and
 * "\n\ndata: [DONE]\n\n". The texts must outlive the request; call it before fs_http_reply. */
void fs_http_set_stream_frame(struct fs_http_request *r, const char *before, const char *after);
void fs_http_stream_end(struct fs_http_request *r);

#endif
