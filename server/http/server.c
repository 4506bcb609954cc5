/* The loop thread: listening, and the queue of orders from other threads. */
#include "server/http/internal.h"

#include <event2/buffer.h>
#include <event2/listener.h>
#include <errno.h>
#include <netdb.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <arpa/inet.h>
#include <unistd.h>

#define ACCEPT_PAUSE_MS 200
/* Answers that are on their way get this long when the loop ends. */
#define FLUSH_MS 1000
#define DEFAULT_CONNECTIONS 512
#define DEFAULT_READ_MS 60000
#define DEFAULT_PEER_MS 30000
#define DEFAULT_IDLE_MS 60000

struct order *http_order_new(enum act act, struct fs_http_request *r, const void *data, size_t n)
{
	size_t size;
	if (!fs_add_size(sizeof(struct order), n, &size))
		return NULL;
	struct order *o = calloc(1, size);
	if (!o)
		return NULL;
	o->act = act;
	o->r = r ? fs_http_ref(r) : NULL;
	o->n = n;
	if (n)
		memcpy(o->data, data, n);
	return o;
}

static void order_free(struct order *o)
{
	fs_http_unref(o->r);
	free(o->content_type);
	free(o->extra_header);
	free(o);
}

void http_post(struct fs_http *h, struct order *o)
{
	o->next = NULL;
	pthread_mutex_lock(&h->lock);
	*h->last = o;
	h->last = &o->next;
	pthread_mutex_unlock(&h->lock);
	fs_wake(h->wake_fd);
}

static void do_stop_accepting(struct fs_http *h)
{
	event_del(h->retry_accept);
	if (h->bound)
		evhttp_del_accept_socket(h->ev, h->bound);
	h->bound = NULL;
	http_gate_close_idle(h);
}

static void end_loop(evutil_socket_t fd, short what, void *arg)
{
	struct fs_http *h = arg;
	event_base_loopexit(h->base, NULL);
}

void http_exit_when_idle(struct fs_http *h)
{
	if (h->exiting && !http_gate_any_busy(h))
		end_loop(-1, 0, h);
}

static void do_exit(struct fs_http *h)
{
	struct timeval tv = {.tv_sec = FLUSH_MS / 1000};
	h->exiting = true;
	evtimer_add(h->exit_timer, &tv);
	http_exit_when_idle(h);
}

static void on_wake(evutil_socket_t fd, short what, void *arg)
{
	struct fs_http *h = arg;
	fs_wake_drain(h->wake_fd);
	pthread_mutex_lock(&h->lock);
	struct order *o = h->first;
	h->first = NULL;
	h->last = &h->first;
	pthread_mutex_unlock(&h->lock);
	while (o) {
		struct order *next = o->next;
		if (o->act == ACT_STOP_ACCEPTING)
			do_stop_accepting(h);
		else if (o->act == ACT_EXIT)
			do_exit(h);
		else
			http_do_order(o);
		order_free(o);
		o = next;
	}
}

/* "host:port" or "[v6]:port"; host and port point into buf. */
static int split_listen(
        const char *listen, char *buf, size_t cap, const char **host, int *port, struct fs_errbuf *e)
{
	const char *colon = strrchr(listen, ':');
	char *end;
	long p = colon ? strtol(colon + 1, &end, 10) : -1;
	if (!colon || strlen(listen) >= cap || end == colon + 1 || *end || p < 0 || p > 65535)
		return fs_fail(e, FS_EINVAL, "\"listen\" must be address:port, not \"%s\"", listen);
	snprintf(buf, cap, "%.*s", (int)(colon - listen), listen);
	size_t n = strlen(buf);
	*host = buf;
	if (n >= 2 && buf[0] == '[' && buf[n - 1] == ']') {
		buf[n - 1] = '\0';
		*host = buf + 1;
	}
	*port = (int)p;
	return FS_OK;
}

/* The port, and whether only this machine can reach it. */
static int bound_port(struct evhttp_bound_socket *b, bool *loopback)
{
	struct sockaddr_storage ss = {0};
	socklen_t n = sizeof(ss);
	*loopback = false;
	if (getsockname(evhttp_bound_socket_get_fd(b), (struct sockaddr *)&ss, &n))
		return 0;
	if (ss.ss_family == AF_INET6) {
		const struct sockaddr_in6 *v6 = (struct sockaddr_in6 *)&ss;
		*loopback = IN6_IS_ADDR_LOOPBACK(&v6->sin6_addr) ||
		            (IN6_IS_ADDR_V4MAPPED(&v6->sin6_addr) && v6->sin6_addr.s6_addr[12] == 127);
		return ntohs(v6->sin6_port);
	}
	const struct sockaddr_in *v4 = (struct sockaddr_in *)&ss;
	*loopback = ntohl(v4->sin_addr.s_addr) >> 24 == 127;
	return ntohs(v4->sin_port);
}

/* The server of this loop thread; a listener's error callback is not told it. */
static _Thread_local struct fs_http *loop_server;

/* A connection that can not be accepted stays in the backlog, so the listener would try again at once and for
 * ever. */
static void accept_failed(struct evconnlistener *l, void *arg)
{
	struct timeval tv = {.tv_usec = ACCEPT_PAUSE_MS * 1000};
	fs_warn("can not accept a connection: %s", strerror(errno));
	evconnlistener_disable(l);
	evtimer_add(loop_server->retry_accept, &tv);
}

void http_accept_pause(struct fs_http *h)
{
	h->full = true;
	if (h->bound)
		evconnlistener_disable(evhttp_bound_socket_get_listener(h->bound));
}

void http_accept_again(struct fs_http *h)
{
	if (!h->full || h->n_gates >= h->o.max_connections + HTTP_SPARE_CONNECTIONS)
		return;
	h->full = false;
	if (h->bound)
		evconnlistener_enable(evhttp_bound_socket_get_listener(h->bound));
}

static void retry_accept(evutil_socket_t fd, short what, void *arg)
{
	struct fs_http *h = arg;
	if (h->bound && !h->full)
		evconnlistener_enable(evhttp_bound_socket_get_listener(h->bound));
}

static bool names_address(const char *host)
{
	struct addrinfo hints = {.ai_socktype = SOCK_STREAM}, *found = NULL;
	bool yes = getaddrinfo(host, NULL, &hints, &found) == 0;
	if (yes)
		freeaddrinfo(found);
	return yes;
}

static int bind_socket(struct fs_http *h, struct fs_errbuf *e)
{
	char buf[256];
	const char *host = NULL;
	int port = 0, rc = split_listen(h->o.listen, buf, sizeof(buf), &host, &port, e);
	if (!rc)
		rc = http_access_init(&h->access, &h->o, host, e);
	if (rc)
		return rc;
	if (!names_address(host)) /* libevent would leave an errno that says nothing */
		return fs_fail(e, FS_EIO, "can not listen on %s: there is no such address", h->o.listen);
	h->bound = evhttp_bind_socket_with_handle(h->ev, host, (uint16_t)port);
	if (!h->bound)
		return fs_fail_errno(e, FS_EIO, "can not listen on %s", h->o.listen);
	evconnlistener_set_error_cb(evhttp_bound_socket_get_listener(h->bound), accept_failed);
	bool loopback;
	h->port = bound_port(h->bound, &loopback);
	if (!loopback && !h->access.n_keys && !h->o.open_without_key)
		return fs_fail(e, FS_EAUTH,
		        "\"listen\" is %s, which other machines can reach, and there is no key: set "
		        "\"api_key\", "
		        "listen on 127.0.0.1, or set \"open_to_network_without_key\": true",
		        h->o.listen);
	if (!loopback)
		http_access_add_machine_name(&h->access);
	return FS_OK;
}

static void *loop_thread(void *arg)
{
	loop_server = arg;
	event_base_dispatch(loop_server->base);
	return NULL;
}

static void http_free(struct fs_http *h)
{
	h->exiting = true;
	if (h->chores)
		http_gate_chores(h);
	http_linger_end_all(h);
	if (h->ev)
		evhttp_free(h->ev);
	if (h->wake_event)
		event_free(h->wake_event);
	struct event *const events[] = {h->retry_accept, h->chores, h->exit_timer};
	for (size_t i = 0; i < FS_ARRAY_LEN(events); i++)
		if (events[i])
			event_free(events[i]);
	if (h->base)
		event_base_free(h->base);
	if (h->wake_fd >= 0)
		close(h->wake_fd);
	while (h->first) {
		struct order *o = h->first;
		h->first = o->next;
		order_free(o);
	}
	pthread_mutex_destroy(&h->lock);
	free(h);
}

/* libevent's own complaints, in our log's form. */
static void event_log(int severity, const char *text)
{
	if (severity >= EVENT_LOG_WARN)
		fs_warn("libevent: %s", text);
	else
		fs_debug("libevent: %s", text);
}

static void on_chores(evutil_socket_t fd, short what, void *arg)
{
	http_gate_chores(arg);
}

/* False: memory or descriptors are out. */
static bool make_loop(struct fs_http *h)
{
	h->wake_fd = fs_wake_open();
	h->base = event_base_new();
	h->ev = h->base ? evhttp_new(h->base) : NULL;
	if (!h->ev || h->wake_fd < 0)
		return false;
	h->wake_event = event_new(h->base, h->wake_fd, EV_READ | EV_PERSIST, on_wake, h);
	h->retry_accept = evtimer_new(h->base, retry_accept, h);
	h->chores = evtimer_new(h->base, on_chores, h);
	h->exit_timer = evtimer_new(h->base, end_loop, h);
	return h->wake_event && h->retry_accept && h->chores && h->exit_timer &&
	       event_add(h->wake_event, NULL) == 0;
}

static void fill_defaults(struct fs_http_opts *o)
{
	if (!o->max_connections)
		o->max_connections = DEFAULT_CONNECTIONS;
	if (!o->max_bodies)
		o->max_bodies = 4 * o->max_body;
	if (!o->read_timeout_ms)
		o->read_timeout_ms = DEFAULT_READ_MS;
	if (!o->peer_timeout_ms)
		o->peer_timeout_ms = DEFAULT_PEER_MS;
	if (!o->idle_timeout_ms)
		o->idle_timeout_ms = DEFAULT_IDLE_MS;
}

int fs_http_create(const struct fs_http_opts *o, struct fs_http **out, struct fs_errbuf *e)
{
	struct fs_http *h = calloc(1, sizeof(*h));
	if (!h)
		return fs_fail(e, FS_ENOMEM, "out of memory");
	h->o = *o;
	h->last = &h->first;
	fill_defaults(&h->o);
	event_set_log_callback(event_log);
	pthread_mutex_init(&h->lock, NULL);
	int rc = make_loop(h) ? FS_OK : fs_fail(e, FS_EIO, "can not set up the event loop");
	if (!rc) {
		struct timeval idle = http_idle(h);
		evhttp_set_timeout_tv(h->ev, &idle);
		evhttp_set_bevcb(h->ev, http_gate_open, h);
		evhttp_set_gencb(h->ev, http_on_request, h);
		rc = bind_socket(h, e);
	}
	if (rc) {
		http_free(h);
		return rc;
	}
	*out = h;
	return FS_OK;
}

int fs_http_start(struct fs_http *h, struct fs_errbuf *e)
{
	int rc = fs_thread_start(&h->thread, "http", loop_thread, h, e);
	h->started = !rc;
	return rc;
}

int fs_http_port(const struct fs_http *h)
{
	return h->port;
}

static void post_plain(struct fs_http *h, enum act act)
{
	struct order *o = http_order_new(act, NULL, NULL, 0);
	FS_ASSERT(o); /* a few bytes, at shutdown */
	http_post(h, o);
}

void fs_http_stop_accepting(struct fs_http *h)
{
	atomic_store(&h->stopping, true);
	post_plain(h, ACT_STOP_ACCEPTING);
}

/* One at a time, outside the lock: a token's hooks may post orders. A fired request stays in the list, so the
 * search goes on behind the tokens that have fired. */
void fs_http_cancel_all(struct fs_http *h, enum fs_cancel_cause cause)
{
	for (;;) {
		struct fs_cancel *token = NULL;
		pthread_mutex_lock(&h->lock);
		for (struct fs_http_request *r = h->live; r && !token; r = r->next)
			if (fs_cancel_cause(r->cancel) == FS_CANCEL_NONE)
				token = fs_cancel_ref(r->cancel);
		pthread_mutex_unlock(&h->lock);
		if (!token)
			return;
		fs_cancel_fire(token, cause);
		fs_cancel_unref(token);
	}
}

size_t fs_http_live(const struct fs_http *h)
{
	return atomic_load(&h->n_live);
}

void fs_http_destroy(struct fs_http *h)
{
	if (!h)
		return;
	if (h->started) {
		fs_http_stop_accepting(h);
		post_plain(h, ACT_EXIT);
		pthread_join(h->thread, NULL);
	}
	http_free(h);
}
