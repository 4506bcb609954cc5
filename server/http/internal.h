/* What the files of http share. Everything marked [loop] is touched by the loop thread alone. */
#ifndef FS_SERVER_HTTP_INTERNAL_H
#define FS_SERVER_HTTP_INTERNAL_H

#include "server/http/access.h"
#include "server/http/head.h"
#include "server/http/http.h"

#include <event2/event.h>
#include <event2/http.h>
#include <stdatomic.h>

/* Connections past max_connections that are answered (with 503) at once; more wait to be accepted. And
 * connections that linger after an answer whose request was not read to its end. */
#define HTTP_SPARE_CONNECTIONS 64
/* Bytes of a following request, or sent during a stream, that are held for a client. */
#define HTTP_READ_AHEAD ((size_t)64 * 1024)

enum act {
	ACT_REPLY,
	ACT_HEADER,
	ACT_BEGIN,
	ACT_BEGIN_AFTER,
	ACT_WRITE,
	ACT_END,
	ACT_CALL,
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
	void (*fn)(void *arg); /* of ACT_CALL */
	void *arg;
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
	struct http_access access;

	struct http_gate *gates;             /* [loop]; newest first */
	struct http_linger *lingers;         /* [loop]; newest first */
	size_t n_gates, n_served, n_lingers; /* [loop] */
	struct event *chores;                /* [loop]; see gate.c */
	bool full;                /* [loop]; not accepting: too many connections even to refuse them */
	struct event *exit_timer; /* [loop]; last answers get this long to leave */
	bool exiting;             /* [loop] */
	atomic_size_t bodies;     /* bytes of request bodies in memory */
	atomic_ullong turned_away[FS_HTTP_MAX_STATUSES]; /* see route.c */

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

struct fs_http_request {
	atomic_int refs;
	struct fs_http *h;
	struct fs_cancel *cancel;
	int64_t arrived;
	struct http_head head;
	char peer[64];
	int key; /* which of the API keys it carried; -1 = none */
	char *body;
	size_t body_len;
	const char *frame_before, *frame_after;
	struct fs_http_request *prev, *next; /* h->lock */

	atomic_size_t backlog; /* bytes handed to the loop that it has not handed on */
	atomic_size_t queued;  /* bytes that the loop handed on and the socket has not taken */
	struct order *end;     /* made beforehand, so that a request can always be ended; NULL once posted */

	struct evhttp_request *req;      /* [loop]; NULL once ended */
	struct http_gate *gate;          /* [loop]; it came by; NULL once ended, or once that is closed */
	enum phase phase;                /* [loop] */
	struct event *gone_event;        /* [loop]; watches the socket for the peer's end */
	struct event *timer;             /* [loop]; begin-after, then keep-alives */
	int gone_fd;                     /* [loop]; our duplicate of the socket; -1 = none */
	int64_t wrote_at;                /* [loop] */
	struct evbuffer_cb_entry *drain; /* [loop]; while streaming: keeps `queued` true */
	void (*drained)(void *arg);      /* [loop]; see fs_http_when_drained; NULL = none waits */
	void *drained_arg;
};

/*
 * One connection's way in. evhttp is lenient in what it reads, answers its own errors in HTML, knows no limit
 * of connections and begins to read bodies that will be refused; so the gate takes the bytes off the
 * connection's input, reads whole requests itself (head.h), and gives evhttp a bare request line for each,
 * upon which evhttp calls http_on_request. Refused requests go the same way: they are answered and the
 * connection ends.
 */
enum gate_state {
	GATE_HEAD,    /* a head is read or awaited */
	GATE_BODY,    /* a body is read */
	GATE_BUSY,    /* a request is answered; the next one waits */
	GATE_REFUSED, /* an error is answered; what else comes is thrown away */
};
struct http_gate {
	struct fs_http *h;
	struct http_gate *prev, *next; /* h->gates */
	struct bufferevent *bev;
	struct evhttp_connection *evcon; /* NULL for a moment after accepting */
	struct evbuffer_cb_entry *entry;
	enum gate_state state;
	bool feeding, doomed;
	bool served;          /* counted in h->n_served: not refused for their number */
	bool used;            /* a request was answered on it */
	struct evbuffer *raw; /* bytes that were not judged yet */
	struct event *deadline;
	size_t scanned;
	struct http_head head;           /* the request's, once read; handed over with it */
	struct fs_http_request *request; /* that is answered; NULL = none */
	struct http_chunks chunks;
	struct fs_buf body; /* its bytes are counted in h->bodies */
	struct http_refusal refusal;
};

/* gate.c. [loop] */
struct bufferevent *http_gate_open(struct event_base *base, void *arg); /* evhttp asks for one a connection */
void http_gate_chores(struct fs_http *h);
struct http_gate *http_gate_of(struct fs_http *h, struct evhttp_request *req);
struct timeval http_idle(const struct fs_http *h); /* evhttp cuts a connection after this long */
void http_gate_answering(struct http_gate *g, struct evhttp_request *req);
void http_gate_close_idle(struct fs_http *h);
bool http_gate_any_busy(const struct fs_http *h);

/* linger.c: keeps a connection's socket until the client has had a chance to read the answer. [loop] */
void http_linger_start(struct fs_http *h, int fd); /* duplicates fd */
void http_linger_end_all(struct fs_http *h);

/* request.c. NULL when memory or descriptors are out. Takes head and body from the gate on success only.
 * [loop] */
struct fs_http_request *http_request_create(
        struct fs_http *h, struct http_gate *g, struct evhttp_request *req);

/* route.c. [loop] */
void http_on_request(struct evhttp_request *req, void *arg);
/* 500, when memory was out for any answer of the handler's. */
void http_answer_failure(struct fs_http *h, struct evhttp_request *req);
/* The connection's last answer says so; to be called before any answer begins. */
void http_say_if_last(struct fs_http *h, struct evhttp_request *req);

/* watch.c: notices the peer's end without evhttp's reading side. [loop] */
int http_watch_start(struct fs_http_request *r);
void http_watch_stop(struct fs_http_request *r);

/* reply.c: carries orders out. [loop] */
void http_do_order(struct order *o);
int http_timer_start(struct fs_http_request *r);
void http_drain_stop(struct fs_http_request *r);
/* Ends a request's part on the loop: timer, watch, list, the loop's reference (request.c). */
void http_request_over(struct fs_http_request *r);
void http_peer_lost(struct fs_http_request *r); /* watch.c */

/* server.c */
void http_accept_pause(struct fs_http *h);   /* [loop] */
void http_accept_again(struct fs_http *h);   /* [loop] */
void http_exit_when_idle(struct fs_http *h); /* [loop] */
void http_post(struct fs_http *h, struct order *o);
/* NULL when memory is out. Takes a reference to r. */
struct order *http_order_new(enum act act, struct fs_http_request *r, const void *data, size_t n);

#endif
