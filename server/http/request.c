/* The life of a request from its arrival to its end, what its holder may ask of it, and which route it takes.
 */
#include "server/http/internal.h"

#include <event2/buffer.h>
#include <event2/keyvalq_struct.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

struct fs_http_request *fs_http_ref(struct fs_http_request *r)
{
	atomic_fetch_add(&r->refs, 1);
	return r;
}

void fs_http_unref(struct fs_http_request *r)
{
	if (!r || atomic_fetch_sub(&r->refs, 1) != 1)
		return;
	fs_cancel_unref(r->cancel);
	free(r->end);
	free(r->head.text);
	free(r->body);
	free(r);
}

struct fs_cancel *fs_http_cancel(struct fs_http_request *r)
{
	return r->cancel;
}

const char *fs_http_body(const struct fs_http_request *r, size_t *len)
{
	*len = r->body_len;
	return r->body;
}

int64_t fs_http_arrived(const struct fs_http_request *r)
{
	return r->arrived;
}

const char *fs_http_header(const struct fs_http_request *r, const char *name)
{
	for (size_t i = 0; i < r->head.n_headers; i++)
		if (strcasecmp(r->head.headers[i].name, name) == 0)
			return r->head.headers[i].value;
	return NULL;
}

const char *fs_http_method(const struct fs_http_request *r)
{
	return r->head.method;
}

const char *fs_http_path(const struct fs_http_request *r)
{
	return r->head.path;
}

const char *fs_http_query(const struct fs_http_request *r)
{
	return r->head.query;
}

const char *fs_http_peer(const struct fs_http_request *r)
{
	return r->peer;
}

void http_request_over(struct fs_http_request *r)
{
	struct fs_http *h = r->h;
	r->phase = PHASE_DONE;
	http_drain_stop(r);
	r->req = NULL;
	http_watch_stop(r);
	if (r->timer)
		event_free(r->timer);
	r->timer = NULL;
	pthread_mutex_lock(&h->lock);
	if (r->next)
		r->next->prev = r->prev;
	if (r->prev)
		r->prev->next = r->next;
	else
		h->live = r->next;
	pthread_mutex_unlock(&h->lock);
	atomic_fetch_sub(&h->n_live, 1);
	fs_http_unref(r);
}

static const char *method_name(struct evhttp_request *req)
{
	switch (evhttp_request_get_command(req)) {
	case EVHTTP_REQ_GET:
		return "GET";
	case EVHTTP_REQ_POST:
		return "POST";
	case EVHTTP_REQ_DELETE:
		return "DELETE";
	case EVHTTP_REQ_OPTIONS:
		return "OPTIONS";
	case EVHTTP_REQ_HEAD:
		return "HEAD";
	default:
		return "";
	}
}

/* Copies text to *at and moves on behind its NUL. */
static const char *put(char **at, const char *text)
{
	size_t n = strlen(text) + 1;
	char *to = memcpy(*at, text, n);
	*at += n;
	return to;
}

static int take_head(struct fs_http_request *r)
{
	const struct evhttp_uri *uri = evhttp_request_get_evhttp_uri(r->req);
	const char *path = evhttp_uri_get_path(uri), *query = evhttp_uri_get_query(uri);
	struct evkeyvalq *list = evhttp_request_get_input_headers(r->req);
	struct evkeyval *kv;
	size_t need = 16 + strlen(path) + 1 + (query ? strlen(query) + 1 : 0);
	for (kv = list->tqh_first; kv; kv = kv->next.tqe_next)
		need += strlen(kv->key) + strlen(kv->value) + 2;
	char *at = r->head.text = malloc(need);
	if (!at)
		return FS_ENOMEM;
	r->head.method = put(&at, method_name(r->req));
	r->head.path = put(&at, path);
	r->head.query = query ? put(&at, query) : NULL;
	for (kv = list->tqh_first; kv && r->head.n_headers < HTTP_MAX_HEADERS; kv = kv->next.tqe_next) {
		r->head.headers[r->head.n_headers].name = put(&at, kv->key);
		r->head.headers[r->head.n_headers++].value = put(&at, kv->value);
	}
	return FS_OK;
}

static void take_peer(struct fs_http_request *r)
{
	char *address = NULL;
	uint16_t port;
	evhttp_connection_get_peer(evhttp_request_get_connection(r->req), &address, &port);
	snprintf(r->peer, sizeof(r->peer), "%s", address ? address : "");
}

static int take_body(struct fs_http_request *r)
{
	struct evbuffer *in = evhttp_request_get_input_buffer(r->req);
	r->body_len = evbuffer_get_length(in);
	r->body = malloc(r->body_len + 1);
	if (!r->body)
		return FS_ENOMEM;
	evbuffer_remove(in, r->body, r->body_len);
	r->body[r->body_len] = '\0';
	return FS_OK;
}

/* NULL when memory or descriptors are out. */
static struct fs_http_request *request_create(struct fs_http *h, struct evhttp_request *req)
{
	struct fs_http_request *r = calloc(1, sizeof(*r));
	if (!r)
		return NULL;
	atomic_init(&r->refs, 1);
	r->h = h;
	r->req = req;
	r->gone_fd = -1;
	r->arrived = fs_now();
	r->cancel = fs_cancel_create(fs_deadline_ms(h->o.timeout_ms));
	r->end = calloc(1, sizeof(*r->end));
	if (!r->cancel || !r->end || take_head(r) || take_body(r) || http_timer_start(r) ||
	        http_watch_start(r)) {
		http_watch_stop(r);
		if (r->timer)
			event_free(r->timer);
		fs_http_unref(r);
		return NULL;
	}
	r->end->act = ACT_END;
	take_peer(r);
	pthread_mutex_lock(&h->lock);
	r->next = h->live;
	if (h->live)
		h->live->prev = r;
	h->live = r;
	pthread_mutex_unlock(&h->lock);
	return r;
}

static void refuse(struct evhttp_request *req, int status, const char *type, const char *message)
{
	struct evbuffer *b = evbuffer_new();
	if (b && evhttp_request_get_command(req) != EVHTTP_REQ_HEAD) /* whose answers have no body */
		evbuffer_add_printf(b,
		        "{\"error\":{\"message\":\"%s\",\"type\":\"%s\",\"param\":null,\"code\":null}}",
		        message, type);
	evhttp_add_header(evhttp_request_get_output_headers(req), "Content-Type", "application/json");
	evhttp_send_reply(req, status, NULL, b);
	if (b)
		evbuffer_free(b);
}

static bool path_fits(const char *route, const char *path)
{
	size_t n = strlen(route);
	if (n >= 2 && strcmp(route + n - 2, "/*") == 0)
		return strncmp(route, path, n - 1) == 0 && path[n - 1];
	return strcmp(route, path) == 0;
}

/* NULL: allowed (cap bytes) then names the methods that the path does take, and is empty when there is no
 * such path. */
static const struct fs_http_route *find_route(
        const struct fs_http *h, const char *method, const char *path, char *allowed, size_t cap)
{
	size_t n = 0;
	allowed[0] = '\0';
	for (size_t i = 0; i < h->o.n_routes; i++) {
		const struct fs_http_route *route = &h->o.routes[i];
		if (!path_fits(route->path, path))
			continue;
		if (strcmp(route->method, method) == 0)
			return route;
		if (strcmp(method, "HEAD") == 0 && strcmp(route->method, "GET") == 0)
			return route;
		int more = snprintf(allowed + n, cap - n, "%s%s", n ? ", " : "", route->method);
		n = FS_MIN(n + (size_t)more, cap - 1);
	}
	return NULL;
}

/* Whether a handler has it now; else it was answered here. */
static bool hand_over(struct fs_http *h, struct evhttp_request *req)
{
	const struct evhttp_uri *uri = evhttp_request_get_evhttp_uri(req);
	const char *path = uri ? evhttp_uri_get_path(uri) : NULL;
	char allowed[64];
	const struct fs_http_route *route =
	        find_route(h, method_name(req), path ? path : "", allowed, sizeof(allowed));
	if (atomic_load(&h->stopping)) {
		refuse(req, 503, "unavailable_error", "the server is shutting down");
		return false;
	}
	if (!route && allowed[0]) {
		evhttp_add_header(evhttp_request_get_output_headers(req), "Allow", allowed);
		refuse(req, 405, "invalid_request_error", "this path does not take this method");
		return false;
	}
	if (!route) {
		refuse(req, 404, "not_found_error", "there is nothing at this path");
		return false;
	}
	struct fs_http_request *r = request_create(h, req);
	if (!r) {
		refuse(req, 503, "unavailable_error", "the server is out of memory or file descriptors");
		return false;
	}
	route->fn(route->arg, fs_http_ref(r));
	return true;
}

/* Counted before it looks at `stopping`: whoever has set that and sees no live request will see none later.
 */
void http_on_request(struct evhttp_request *req, void *arg)
{
	struct fs_http *h = arg;
	atomic_fetch_add(&h->n_live, 1);
	if (!hand_over(h, req))
		atomic_fetch_sub(&h->n_live, 1);
}
