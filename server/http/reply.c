/* Replies and streams: the public calls post orders from any thread, and the loop thread carries them out
 * here. */
#include "server/http/internal.h"

#include <event2/buffer.h>
#include <event2/bufferevent.h>
#include <string.h>

static void add_header(struct evhttp_request *req, const char *name, const char *value)
{
	evhttp_add_header(evhttp_request_get_output_headers(req), name, value);
}

static void add_extra(struct evhttp_request *req, const char *line)
{
	const char *colon = line ? strchr(line, ':') : NULL;
	char name[64];
	if (!colon || (size_t)(colon - line) >= sizeof(name))
		return;
	memcpy(name, line, (size_t)(colon - line));
	name[colon - line] = '\0';
	add_header(req, name, colon + 1 + strspn(colon + 1, " "));
}

static void set_timer(struct fs_http_request *r, int ms)
{
	struct timeval tv = {.tv_sec = ms / 1000, .tv_usec = (ms % 1000) * 1000};
	evtimer_add(r->timer, &tv);
}

static struct bufferevent *output(struct fs_http_request *r)
{
	struct evhttp_connection *evcon = evhttp_request_get_connection(r->req);
	return evcon ? evhttp_connection_get_bufferevent(evcon) : NULL;
}

/* What is queued for the socket right now; a client that stops reading makes it grow. */
static void note_backlog(struct fs_http_request *r, size_t taken)
{
	struct bufferevent *bev = output(r);
	size_t queued = bev ? evbuffer_get_length(bufferevent_get_output(bev)) : 0;
	atomic_fetch_sub(&r->backlog, taken);
	if (queued > FS_HTTP_MAX_BACKLOG)
		fs_cancel_fire(r->cancel, FS_CANCEL_UNREAD);
}

static bool is_head(const struct fs_http_request *r)
{
	return strcmp(r->head.method, "HEAD") == 0;
}

static void on_drain(struct evbuffer *b, const struct evbuffer_cb_info *info, void *arg)
{
	struct fs_http_request *r = arg;
	size_t n = evbuffer_get_length(b);
	atomic_store(&r->queued, n);
	if (!r->drained || n >= FS_HTTP_LOW_BACKLOG || info->n_deleted == 0)
		return;
	/* Not at once: the buffer is in the middle of its change. */
	if (fs_http_call(r, r->drained, r->drained_arg) == FS_OK)
		r->drained = NULL;
}

static void drain_start(struct fs_http_request *r)
{
	struct bufferevent *bev = output(r);
	if (bev)
		r->drain = evbuffer_add_cb(bufferevent_get_output(bev), on_drain, r);
}

void http_drain_stop(struct fs_http_request *r)
{
	struct bufferevent *bev = r->drain ? output(r) : NULL;
	if (bev)
		evbuffer_remove_cb_entry(bufferevent_get_output(bev), r->drain);
	r->drain = NULL;
}

static void send_chunk(struct fs_http_request *r, const void *data, size_t n)
{
	if (is_head(r))
		return;
	struct evbuffer *b = evbuffer_new();
	if (!b)
		return;
	evbuffer_add(b, data, n);
	evhttp_send_reply_chunk(r->req, b);
	evbuffer_free(b);
	r->wrote_at = fs_now();
}

static void do_begin(struct fs_http_request *r)
{
	if (r->phase != PHASE_OPEN)
		return;
	r->phase = PHASE_STREAM;
	add_header(r->req, "Content-Type", "text/event-stream; charset=utf-8");
	add_header(r->req, "Cache-Control", "no-cache");
	add_header(r->req, "X-Accel-Buffering", "no");
	http_say_if_last(r->h, r->req);
	evhttp_send_reply_start(r->req, 200, NULL);
	drain_start(r);
	r->wrote_at = fs_now();
	set_timer(r, FS_HTTP_KEEPALIVE_MS);
}

static void on_timer(evutil_socket_t fd, short what, void *arg)
{
	static const char comment[] = ": keep-alive\n\n";
	struct fs_http_request *r = arg;
	bool due = r->phase == PHASE_OPEN;
	if (due)
		do_begin(r);
	int64_t idle_ms = (fs_now() - r->wrote_at) / FS_MS;
	if (due || idle_ms >= FS_HTTP_KEEPALIVE_MS) {
		send_chunk(r, comment, sizeof(comment) - 1);
		idle_ms = 0;
	}
	set_timer(r, (int)(FS_HTTP_KEEPALIVE_MS - idle_ms));
}

static void do_begin_after(struct fs_http_request *r, int ms)
{
	if (r->phase == PHASE_OPEN)
		set_timer(r, ms);
}

static void do_end(struct fs_http_request *r)
{
	if (r->phase == PHASE_DONE)
		return;
	bool started = r->phase == PHASE_STREAM;
	struct evhttp_request *req = r->req;
	http_request_over(r);
	if (started)
		evhttp_send_reply_end(req);
	else
		http_answer_failure(r->h, req);
}

/* The error of a request whose stream has begun by itself can only be an event. */
static void reply_in_stream(struct fs_http_request *r, const struct order *o)
{
	const char *before = r->frame_before ? r->frame_before : "data: ";
	const char *after = r->frame_after ? r->frame_after : "\n\ndata: [DONE]\n\n";
	send_chunk(r, before, strlen(before));
	send_chunk(r, o->data, o->n);
	send_chunk(r, after, strlen(after));
	do_end(r);
}

static void do_reply(struct fs_http_request *r, const struct order *o)
{
	if (r->phase == PHASE_STREAM)
		reply_in_stream(r, o);
	if (r->phase != PHASE_OPEN)
		return;
	struct evbuffer *body = evbuffer_new();
	if (is_head(r)) {
		char length[24];
		snprintf(length, sizeof(length), "%zu", o->n);
		add_header(r->req, "Content-Length", length);
	} else if (body) {
		evbuffer_add(body, o->data, o->n);
	}
	add_header(r->req, "Content-Type", o->content_type ? o->content_type : "application/json");
	add_extra(r->req, o->extra_header);
	http_say_if_last(r->h, r->req);
	struct evhttp_request *req = r->req;
	http_request_over(r);
	evhttp_send_reply(req, o->value, NULL, body);
	if (body)
		evbuffer_free(body);
}

int http_timer_start(struct fs_http_request *r)
{
	r->timer = evtimer_new(r->h->base, on_timer, r);
	return r->timer ? FS_OK : FS_ENOMEM;
}

void http_do_order(struct order *o)
{
	struct fs_http_request *r = o->r;
	switch (o->act) {
	case ACT_REPLY:
		do_reply(r, o);
		break;
	case ACT_HEADER:
		if (r->phase == PHASE_OPEN)
			add_extra(r->req, o->data);
		break;
	case ACT_BEGIN:
		do_begin(r);
		break;
	case ACT_BEGIN_AFTER:
		do_begin_after(r, o->value);
		break;
	case ACT_WRITE:
		if (r->phase == PHASE_STREAM)
			send_chunk(r, o->data, o->n);
		if (r->phase == PHASE_STREAM)
			note_backlog(r, o->n);
		break;
	case ACT_END:
		do_end(r);
		break;
	case ACT_CALL:
		o->fn(o->arg);
		break;
	case ACT_STOP_ACCEPTING:
	case ACT_EXIT:
		break;
	}
}

void fs_http_reply(struct fs_http_request *r, int status, const char *content_type, const char *extra_header,
        const void *body, size_t n)
{
	struct order *o = http_order_new(ACT_REPLY, r, body, n);
	if (!o) { /* out of memory: the order that every request carries for its end still gets an answer out
		   */
		fs_http_stream_end(r);
		return;
	}
	o->value = status;
	o->content_type = content_type ? strdup(content_type) : NULL;
	o->extra_header = extra_header ? strdup(extra_header) : NULL;
	http_post(r->h, o);
}

void fs_http_add_header(struct fs_http_request *r, const char *name, const char *value)
{
	char line[1024];
	int n = snprintf(line, sizeof(line), "%s: %s", name, value);
	struct order *o = n < (int)sizeof(line) ? http_order_new(ACT_HEADER, r, line, (size_t)n + 1) : NULL;
	if (o)
		http_post(r->h, o);
}

void fs_http_set_stream_frame(struct fs_http_request *r, const char *before, const char *after)
{
	r->frame_before = before;
	r->frame_after = after;
}

int fs_http_call(struct fs_http_request *r, void (*fn)(void *arg), void *arg)
{
	struct order *o = http_order_new(ACT_CALL, r, NULL, 0);
	if (!o)
		return FS_ENOMEM;
	o->fn = fn;
	o->arg = arg;
	http_post(r->h, o);
	return FS_OK;
}

void fs_http_when_drained(struct fs_http_request *r, void (*fn)(void *arg), void *arg)
{
	r->drained = fn;
	r->drained_arg = arg;
	if (fs_http_stream_backlog(r) >= FS_HTTP_LOW_BACKLOG && r->drain)
		return;
	if (fs_http_call(r, fn, arg) == FS_OK)
		r->drained = NULL;
}

bool fs_http_not_when_drained(struct fs_http_request *r)
{
	bool waits = r->drained != NULL;
	r->drained = NULL;
	return waits;
}

size_t fs_http_stream_backlog(const struct fs_http_request *r)
{
	return atomic_load(&r->backlog) + atomic_load(&r->queued);
}

/* A token that fired for another cause does not end the answer: its last words are still to be sent. */
static bool client_left(const struct fs_http_request *r)
{
	enum fs_cancel_cause cause = fs_cancel_cause(r->cancel);
	return cause == FS_CANCEL_CLIENT || cause == FS_CANCEL_UNREAD;
}

int fs_http_stream_begin(struct fs_http_request *r)
{
	struct order *o = client_left(r) ? NULL : http_order_new(ACT_BEGIN, r, NULL, 0);
	if (!o)
		return FS_ECANCELLED;
	http_post(r->h, o);
	return FS_OK;
}

void fs_http_stream_begin_after(struct fs_http_request *r, int ms)
{
	struct order *o = http_order_new(ACT_BEGIN_AFTER, r, NULL, 0);
	if (!o)
		return;
	o->value = ms;
	http_post(r->h, o);
}

int fs_http_stream_write(struct fs_http_request *r, const void *data, size_t n)
{
	if (client_left(r))
		return FS_ECANCELLED;
	bool fits = atomic_fetch_add(&r->backlog, n) + n <= FS_HTTP_MAX_BACKLOG;
	struct order *o = fits ? http_order_new(ACT_WRITE, r, data, n) : NULL;
	if (!o) {
		atomic_fetch_sub(&r->backlog, n);
		fs_cancel_fire(r->cancel, FS_CANCEL_UNREAD);
		return FS_ECANCELLED;
	}
	http_post(r->h, o);
	return FS_OK;
}

void fs_http_stream_end(struct fs_http_request *r)
{
	r->end->r = fs_http_ref(r);
	struct order *o = r->end;
	r->end = NULL;
	http_post(r->h, o);
}
