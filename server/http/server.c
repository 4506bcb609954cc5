/* The loop thread: listening, and the queue of orders from other threads. */
#include "server/http/internal.h"

#include <event2/buffer.h>
#include <event2/listener.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <arpa/inet.h>
#include <unistd.h>

#define MAX_HEADERS (64 * 1024)
/* evhttp cuts a connection that is quiet for this long: slow senders of a request, and idle keep-alive
 * connections. Streams are kept by comments. */
#define SOCKET_TIMEOUT_S 60
#define ACCEPT_PAUSE_MS 200

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
			event_base_loopexit(h->base, NULL);
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

static int bound_port(struct evhttp_bound_socket *b)
{
	struct sockaddr_storage ss = {0};
	socklen_t n = sizeof(ss);
	if (getsockname(evhttp_bound_socket_get_fd(b), (struct sockaddr *)&ss, &n))
		return 0;
	if (ss.ss_family == AF_INET6)
		return ntohs(((struct sockaddr_in6 *)&ss)->sin6_port);
	return ntohs(((struct sockaddr_in *)&ss)->sin_port);
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

static void accept_again(evutil_socket_t fd, short what, void *arg)
{
	struct fs_http *h = arg;
	if (h->bound)
		evconnlistener_enable(evhttp_bound_socket_get_listener(h->bound));
}

static int bind_socket(struct fs_http *h, struct fs_errbuf *e)
{
	char buf[256];
	const char *host = NULL;
	int port = 0, rc = split_listen(h->o.listen, buf, sizeof(buf), &host, &port, e);
	if (rc)
		return rc;
	errno = 0;
	h->bound = evhttp_bind_socket_with_handle(h->ev, host, (uint16_t)port);
	if (!h->bound && errno == 0) /* the resolver tells by no errno */
		return fs_fail(e, FS_EIO, "can not listen on %s: there is no such address", h->o.listen);
	if (!h->bound)
		return fs_fail_errno(e, FS_EIO, "can not listen on %s", h->o.listen);
	evconnlistener_set_error_cb(evhttp_bound_socket_get_listener(h->bound), accept_failed);
	h->port = bound_port(h->bound);
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
	if (h->ev)
		evhttp_free(h->ev);
	if (h->wake_event)
		event_free(h->wake_event);
	if (h->retry_accept)
		event_free(h->retry_accept);
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

int fs_http_create(const struct fs_http_opts *o, struct fs_http **out, struct fs_errbuf *e)
{
	struct fs_http *h = calloc(1, sizeof(*h));
	if (!h)
		return fs_fail(e, FS_ENOMEM, "out of memory");
	h->o = *o;
	h->last = &h->first;
	event_set_log_callback(event_log);
	pthread_mutex_init(&h->lock, NULL);
	h->wake_fd = fs_wake_open();
	h->base = event_base_new();
	h->ev = h->base ? evhttp_new(h->base) : NULL;
	if (h->ev && h->wake_fd >= 0)
		h->wake_event = event_new(h->base, h->wake_fd, EV_READ | EV_PERSIST, on_wake, h);
	if (h->wake_event)
		h->retry_accept = evtimer_new(h->base, accept_again, h);
	int rc = FS_OK;
	if (!h->retry_accept || event_add(h->wake_event, NULL)) {
		rc = fs_fail(e, FS_EIO, "can not set up the event loop");
	} else {
		evhttp_set_allowed_methods(h->ev, EVHTTP_REQ_GET | EVHTTP_REQ_POST | EVHTTP_REQ_HEAD |
		                                          EVHTTP_REQ_PUT | EVHTTP_REQ_DELETE |
		                                          EVHTTP_REQ_OPTIONS | EVHTTP_REQ_PATCH);
		evhttp_set_max_headers_size(h->ev, MAX_HEADERS);
		evhttp_set_max_body_size(h->ev, (ssize_t)o->max_body);
		evhttp_set_timeout(h->ev, SOCKET_TIMEOUT_S);
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

void fs_http_cancel_all(struct fs_http *h, enum fs_cancel_cause cause)
{
	pthread_mutex_lock(&h->lock);
	for (struct fs_http_request *r = h->live; r; r = r->next)
		fs_cancel_fire(r->cancel, cause);
	pthread_mutex_unlock(&h->lock);
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
