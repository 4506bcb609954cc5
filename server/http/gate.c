/* The connections' way in: see struct http_gate. Loop thread only. */
#include "server/http/internal.h"

#include <event2/buffer.h>
#include <event2/bufferevent.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

static struct evbuffer *input_of(const struct http_gate *g)
{
	return bufferevent_get_input(g->bev);
}

static void drop_body(struct http_gate *g)
{
	atomic_fetch_sub(&g->h->bodies, g->body.len);
	fs_buf_finish(&g->body);
}

/* ---- what evhttp gets to see ---- */

/* The bytes that evhttp reads as the next request. It is at a request's beginning, having read all that came
 * before. */
static void feed(struct http_gate *g, const char *text)
{
	struct evbuffer *input = input_of(g);
	g->feeding = true;
	evbuffer_unfreeze(input, 0); /* as bufferevents keep it, but while they read */
	evbuffer_add(input, text, strlen(text));
	evbuffer_freeze(input, 0);
	g->feeding = false;
}

static void hand_over(struct http_gate *g)
{
	char text[80];
	const char *connection = g->head.last ? "Connection: close\r\n" : "";
	snprintf(text, sizeof(text), "%s / HTTP/1.%d\r\n%s\r\n",
	        strcmp(g->head.method, "HEAD") == 0 ? "HEAD" : "GET", g->head.minor, connection);
	event_del(g->deadline);
	g->state = GATE_BUSY;
	feed(g, text);
}

static void refuse(struct http_gate *g, const struct http_refusal *why)
{
	bool is_head = g->head.method && strcmp(g->head.method, "HEAD") == 0;
	g->refusal = *why;
	g->state = GATE_REFUSED;
	event_del(g->deadline);
	drop_body(g);
	evbuffer_drain(g->raw, evbuffer_get_length(g->raw));
	evbuffer_drain(input_of(g), evbuffer_get_length(input_of(g)));
	feed(g, is_head ? "HEAD / HTTP/1.1\r\nConnection: close\r\n\r\n"
	                : "GET / HTTP/1.1\r\nConnection: close\r\n\r\n");
}

static void refuse_text(struct http_gate *g, int status, const char *code, const char *text)
{
	struct http_refusal why = {.status = status, .type = "invalid_request_error", .code = code};
	if (status >= 500 && status != 501 && status != 505)
		why.type = "unavailable_error";
	if (status == 503)
		why.header = "Retry-After: 2";
	snprintf(why.message, sizeof(why.message), "%s", text);
	refuse(g, &why);
}

static void refuse_size(struct http_gate *g)
{
	char text[128];
	snprintf(text, sizeof(text), "the request's body is larger than this server takes: %zu bytes",
	        g->h->o.max_body);
	refuse_text(g, 413, "request_too_large", text);
}

static void refuse_memory(struct http_gate *g)
{
	refuse_text(g, 503, "busy", "too many bytes of requests are in memory; try again shortly");
}

/* ---- reading ---- */

/* Before any of the body is read. False: refused. */
static bool check_head(struct http_gate *g)
{
	static const char *const methods[] = {"GET", "POST", "HEAD", "DELETE", "OPTIONS", "PUT", "PATCH"};
	const struct http_head *head = &g->head;
	struct http_refusal why;
	bool known = false;
	for (size_t i = 0; i < FS_ARRAY_LEN(methods); i++)
		known |= strcmp(methods[i], head->method) == 0;
	if (!known)
		refuse_text(g, 501, NULL, "this method is not known here");
	else if (atomic_load(&g->h->stopping))
		refuse_text(g, 503, "shutting_down", "the server is shutting down");
	else if (!http_access_allows(&g->h->access, head, &why))
		refuse(g, &why);
	else if (head->length > (int64_t)g->h->o.max_body)
		refuse_size(g);
	else if (head->length > 0 && atomic_load(&g->h->bodies) + (size_t)head->length > g->h->o.max_bodies)
		refuse_memory(g);
	return g->state != GATE_REFUSED;
}

/* The socket's buffer is empty now, so these few bytes fit; a client that misses them sends after a while. */
static void send_continue(struct http_gate *g)
{
	static const char text[] = "HTTP/1.1 100 Continue\r\n\r\n";
	ssize_t n = send(bufferevent_getfd(g->bev), text, sizeof(text) - 1, MSG_DONTWAIT | MSG_NOSIGNAL);
	(void)n;
}

static void begin_body(struct http_gate *g)
{
	if (g->head.length <= 0 && !g->head.chunked) {
		hand_over(g);
		return;
	}
	g->state = GATE_BODY;
	g->chunks = (struct http_chunks){0};
	fs_buf_init(&g->body, g->h->o.max_body);
	if (g->head.wants_continue && evbuffer_get_length(g->raw) == 0)
		send_continue(g);
}

/* False when more bytes are needed. */
static bool read_head(struct http_gate *g)
{
	struct fs_errbuf e;
	size_t n = FS_MIN(evbuffer_get_length(g->raw), HTTP_MAX_HEAD);
	const char *p = n ? (const char *)evbuffer_pullup(g->raw, (ev_ssize_t)n) : NULL;
	if (!p)
		return false;
	int status = 400, end = http_head_end(p, n, &g->scanned, &e);
	if (end == 0)
		return false;
	int rc = end < 0 ? end : http_head_parse(p, (size_t)end, &g->head, &status, &e);
	if (rc) {
		refuse_text(g, end == FS_ELIMIT ? 431 : status, NULL, e.text);
		return true;
	}
	evbuffer_drain(g->raw, (size_t)end);
	if (check_head(g))
		begin_body(g);
	return true;
}

/* False: refused. */
static bool keep(struct http_gate *g, const char *data, size_t n)
{
	if (n > g->h->o.max_body - g->body.len) {
		refuse_size(g);
		return false;
	}
	bool fits = atomic_fetch_add(&g->h->bodies, n) + n <= g->h->o.max_bodies;
	if (!fits || fs_buf_append(&g->body, data, n)) {
		atomic_fetch_sub(&g->h->bodies, n);
		refuse_memory(g);
		return false;
	}
	return true;
}

static bool read_body(struct http_gate *g)
{
	struct evbuffer_iovec v;
	struct fs_errbuf e;
	if (evbuffer_peek(g->raw, -1, NULL, &v, 1) < 1 || v.iov_len == 0)
		return false;
	const char *data = v.iov_base;
	size_t n = v.iov_len, used;
	int done;
	if (g->head.chunked) {
		done = http_chunks_read(&g->chunks, v.iov_base, v.iov_len, &used, &data, &n, &e);
	} else {
		n = used = FS_MIN(n, (size_t)g->head.length - g->body.len);
		done = g->body.len + n == (size_t)g->head.length;
	}
	if (done < 0) {
		refuse_text(g, 400, NULL, e.text);
	} else if (keep(g, data, n)) {
		evbuffer_drain(g->raw, used);
		if (done)
			hand_over(g);
	}
	return true;
}

static void read_on(struct http_gate *g)
{
	bool more = true;
	evbuffer_add_buffer(g->raw, input_of(g));
	while (more && g->state <= GATE_BODY)
		more = g->state == GATE_HEAD ? read_head(g) : read_body(g);
	bool begun = g->state == GATE_BODY || (g->state == GATE_HEAD && evbuffer_get_length(g->raw));
	if (begun && !evtimer_pending(g->deadline, NULL)) {
		struct timeval tv = {.tv_sec = g->h->o.read_timeout_ms / 1000,
		        .tv_usec = g->h->o.read_timeout_ms % 1000 * 1000};
		evtimer_add(g->deadline, &tv);
	}
}

static void on_input(struct evbuffer *b, const struct evbuffer_cb_info *info, void *arg)
{
	struct http_gate *g = arg;
	if (g->feeding || info->n_added == 0)
		return;
	if (g->state == GATE_REFUSED)
		evbuffer_drain(b, evbuffer_get_length(b));
	else if (g->state != GATE_BUSY) /* what comes then waits there, up to the read watermark */
		read_on(g);
}

static void on_deadline(evutil_socket_t fd, short what, void *arg)
{
	struct http_gate *g = arg;
	refuse_text(g, 408, "request_timeout", "the request did not arrive in time");
	bufferevent_trigger(g->bev, EV_READ, BEV_TRIG_IGNORE_WATERMARKS);
}

/* ---- answers ---- */

struct http_gate *http_gate_of(struct fs_http *h, struct evhttp_request *req)
{
	struct evhttp_connection *evcon = evhttp_request_get_connection(req);
	struct http_gate *g = h->gates;
	while (g && g->evcon != evcon)
		g = g->next;
	return g;
}

struct timeval http_idle(const struct fs_http *h)
{
	int64_t ms = h->o.idle_timeout_ms;
	return (struct timeval){.tv_sec = ms / 1000, .tv_usec = ms % 1000 * 1000};
}

static void set_timeouts(struct http_gate *g, bool reading)
{
	struct timeval tv = http_idle(g->h);
	bufferevent_set_timeouts(g->bev, reading ? &tv : NULL, &tv);
}

static void doom(struct http_gate *g)
{
	g->doomed = true;
	event_active(g->h->chores, EV_TIMEOUT, 0);
}

/* evhttp has sent the answer. It closes the connection next when the client or the answer said so. */
static void on_answered(struct evhttp_request *req, void *arg)
{
	struct http_gate *g = arg;
	bool last = g->head.last || g->state == GATE_REFUSED;
	http_head_finish(&g->head);
	g->scanned = 0;
	g->used = true;
	set_timeouts(g, true);
	if (last)
		return;
	g->state = GATE_HEAD;
	if (atomic_load(&g->h->stopping))
		doom(g);
	else
		read_on(g);
}

void http_gate_answering(struct http_gate *g, struct evhttp_request *req)
{
	evhttp_request_set_on_complete_cb(req, on_answered, g);
	set_timeouts(g, false); /* an answer may take long, and nothing is to be read meanwhile */
}

/* ---- connections ---- */

static void gate_free(struct http_gate *g)
{
	if (g->raw)
		evbuffer_free(g->raw);
	if (g->deadline)
		event_free(g->deadline);
	http_head_finish(&g->head);
	drop_body(g);
	free(g);
}

static void on_closed(struct evhttp_connection *evcon, void *arg)
{
	struct http_gate *g = arg;
	struct fs_http *h = g->h;
	evbuffer_remove_cb_entry(input_of(g), g->entry);
	if (g->request)
		http_peer_lost(g->request);
	if (g->state == GATE_REFUSED && !h->exiting)
		http_linger_start(h, bufferevent_getfd(g->bev));
	if (g->next)
		g->next->prev = g->prev;
	if (g->prev)
		g->prev->next = g->next;
	else
		h->gates = g->next;
	h->n_gates--;
	h->n_served -= g->served;
	gate_free(g);
	http_accept_again(h);
	http_exit_when_idle(h);
}

struct bufferevent *http_gate_open(struct event_base *base, void *arg)
{
	struct fs_http *h = arg;
	struct http_gate *g = calloc(1, sizeof(*g));
	if (!g)
		return NULL; /* evhttp then makes its own, and http_on_request refuses what comes over it */
	g->h = h;
	g->bev = bufferevent_socket_new(base, -1, 0);
	g->raw = evbuffer_new();
	g->deadline = evtimer_new(base, on_deadline, g);
	g->entry = g->bev ? evbuffer_add_cb(input_of(g), on_input, g) : NULL;
	struct bufferevent *bev = g->bev;
	if (!g->raw || !g->deadline || !g->entry) {
		if (bev)
			bufferevent_free(bev);
		gate_free(g);
		return NULL;
	}
	bufferevent_setwatermark(bev, EV_READ, 0, HTTP_READ_AHEAD);
	g->next = h->gates;
	if (h->gates)
		h->gates->prev = g;
	h->gates = g;
	if (++h->n_gates >= h->o.max_connections + HTTP_SPARE_CONNECTIONS)
		http_accept_pause(h);
	event_active(h->chores, EV_TIMEOUT, 0);
	return bev;
}

/* A peer whose machine lost power or network sends no end: probes, and unanswered bytes, have to tell. */
static void set_socket(const struct fs_http *h, int fd)
{
	int on = 1, ms = (int)h->o.peer_timeout_ms, idle = FS_MAX(ms / 3000, 1), every = FS_MAX(ms / 6000, 1);
	int count = FS_MAX((ms / 1000 - idle) / every, 1);
	setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof(on));
	setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof(idle));
	setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &every, sizeof(every));
	setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &count, sizeof(count));
	setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &ms, sizeof(ms));
	setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
}

static bool is_idle(const struct http_gate *g)
{
	return g->evcon && g->state == GATE_HEAD && evbuffer_get_length(g->raw) == 0;
}

/* Makes room: of the connections that wait for a next request the oldest is closed. */
static bool close_oldest_idle(struct fs_http *h)
{
	struct http_gate *oldest = NULL;
	for (struct http_gate *g = h->gates; g; g = g->next)
		if (g->used && is_idle(g))
			oldest = g;
	if (oldest)
		evhttp_connection_free(oldest->evcon);
	return oldest != NULL;
}

/* evhttp made the connection right after it had asked for the bufferevent, and tells of it only with the
 * first request; what it gave the bufferevent's callbacks is the connection, which is checked here. */
static void adopt(struct http_gate *g)
{
	void *evcon = NULL;
	bufferevent_getcb(g->bev, NULL, NULL, NULL, &evcon);
	FS_ASSERT(evcon && evhttp_connection_get_bufferevent(evcon) == g->bev);
	g->evcon = evcon;
	evhttp_connection_set_closecb(g->evcon, on_closed, g);
	set_socket(g->h, bufferevent_getfd(g->bev));
	if (g->h->n_served < g->h->o.max_connections || close_oldest_idle(g->h)) {
		g->served = true;
		g->h->n_served++;
		return;
	}
	refuse_text(g, 503, "too_many_connections", "too many connections are open; try again shortly");
	bufferevent_trigger(g->bev, EV_READ, BEV_TRIG_IGNORE_WATERMARKS);
}

/* Runs as an event of its own, soon after connections were accepted or doomed. */
void http_gate_chores(struct fs_http *h)
{
	for (struct http_gate *g = h->gates, *next; g; g = next) {
		next = g->next;
		if (g->doomed)
			evhttp_connection_free(g->evcon);
	}
	for (;;) {
		struct http_gate *oldest = NULL; /* of the new ones, which stand first */
		for (struct http_gate *g = h->gates; g && !g->evcon; g = g->next)
			oldest = g;
		if (!oldest)
			return;
		adopt(oldest);
	}
}

void http_gate_close_idle(struct fs_http *h)
{
	http_gate_chores(h);
	for (struct http_gate *g = h->gates, *next; g; g = next) {
		next = g->next;
		if (is_idle(g))
			evhttp_connection_free(g->evcon);
	}
}

bool http_gate_any_busy(const struct fs_http *h)
{
	for (const struct http_gate *g = h->gates; g; g = g->next)
		if (g->state >= GATE_BUSY && g->evcon)
			return true;
	return false;
}
