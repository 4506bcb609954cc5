/* What the files of http share. Everything marked [loop] is touched by the loop thread alone. */
#ifndef FS_SERVER_HTTP_INTERNAL_H
#define FS_SERVER_HTTP_INTERNAL_H

#include "server/http/http.h"

#include <event2/event.h>
#include <event2/http.h>
#include <stdatomic.h>

#define HTTP_MAX_HEADERS 100

enum act {
	ACT_REPLY,
	ACT_HEADER,
	ACT_BEGIN,
	ACT_BEGIN_AFTER,
	ACT_WRITE,
	ACT_END,
	ACT_STOP_ACCEPTING,
	ACT_EXIT
};

/* An order to the loop, from any thread. Holds a reference to its request. */
struct order {
	struct order *next;
	enum act act;
	struct fs_http_request *r; /* NULL for orders about the server */
	int value;                 /* status, or milliseconds */
	char *content_type, *extra_header;
	size_t n;
	char data[]; /* n bytes */
};

struct fs_http {
	struct event_base *base;
	struct evhttp *ev;
	struct evhttp_bound_socket *bound; /* [loop]; NULL once accepting stopped */
	struct event *wake_event;
	struct event *retry_accept; /* [loop]; pending while descriptors are out */
	struct fs_http_opts o;
	int port, wake_fd;
	pthread_t thread;
	bool started;
	atomic_bool stopping;

	pthread_mutex_t lock;
	struct order *first, **last;  /* lock */
	struct fs_http_request *live; /* lock; list */
	atomic_size_t n_live;
};

enum phase { PHASE_OPEN, PHASE_STREAM, PHASE_DONE };

/* A request's head as text; the strings live in it. */
struct http_head {
	char *text;
	const char *method, *path, *query; /* query NULL when none */
	size_t n_headers;
	struct {
		const char *name, *value;
	} headers[HTTP_MAX_HEADERS];
};

struct fs_http_request {
	atomic_int refs;
	struct fs_http *h;
	struct fs_cancel *cancel;
	int64_t arrived;
	struct http_head head;
	char peer[64];
	char *body;
	size_t body_len;
	const char *frame_before, *frame_after;
	struct fs_http_request *prev, *next; /* h->lock */

	atomic_size_t backlog; /* bytes handed to the loop that it has not handed on */
	atomic_size_t queued;  /* bytes that the loop handed on and the socket has not taken */
	struct order *end;     /* made beforehand, so that a request can always be ended; NULL once posted */

	struct evhttp_request *req;      /* [loop]; NULL once ended */
	enum phase phase;                /* [loop] */
	struct event *gone_event;        /* [loop]; watches the socket for the peer's end */
	struct event *timer;             /* [loop]; begin-after, then keep-alives */
	int gone_fd;                     /* [loop]; our duplicate of the socket; -1 = none */
	int64_t wrote_at;                /* [loop] */
	struct evbuffer_cb_entry *drain; /* [loop]; while streaming: keeps `queued` true */
};

/* request.c: accessors, routing, life. [loop] */
void http_on_request(struct evhttp_request *req, void *arg);

/* watch.c: notices the peer's end without evhttp's reading side. [loop] */
int http_watch_start(struct fs_http_request *r);
void http_watch_stop(struct fs_http_request *r);

/* reply.c: carries orders out. [loop] */
void http_do_order(struct order *o);
int http_timer_start(struct fs_http_request *r);
void http_drain_stop(struct fs_http_request *r);
/* Ends a request's part on the loop: timer, watch, list, the loop's reference (request.c). */
void http_request_over(struct fs_http_request *r);

/* server.c */
void http_post(struct fs_http *h, struct order *o);
/* NULL when memory is out. Takes a reference to r. */
struct order *http_order_new(enum act act, struct fs_http_request *r, const void *data, size_t n);

#endif
