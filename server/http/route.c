/* What becomes of a request that has arrived whole: a handler's, or answered here (errors, CORS preflights).
 */
#include "server/http/internal.h"

#include <event2/buffer.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

static void out_header(struct evhttp_request *req, const char *name, const char *value)
{
	evhttp_add_header(evhttp_request_get_output_headers(req), name, value);
}

void http_say_if_last(struct fs_http *h, struct evhttp_request *req)
{
	if (atomic_load(&h->stopping))
		out_header(req, "Connection", "close");
}

/* ---- errors ---- */

static int openai_body(const char *type, const char *code, const char *message, struct fs_buf *out)
{
	json_t *o = json_pack("{s:{s:s, s:s, s:n, s:s?}}", "error", "message", message, "type", type, "param",
	        "code", code);
	char *text = o ? json_dumps(o, JSON_COMPACT) : NULL;
	int rc = text ? fs_buf_append_str(out, text) : FS_ENOMEM;
	json_decref(o);
	free(text);
	return rc;
}

/* Quoted bytes that are no UTF-8, which JSON can not hold. */
static void make_ascii(char *s)
{
	for (; *s; s++)
		if ((unsigned char)*s >= 0x7f)
			*s = '?';
}

static const int statuses[] = {400, 401, 403, 404, 405, 408, 413, 417, 431, 500, 501, 503, 505};
_Static_assert(FS_ARRAY_LEN(statuses) <= FS_HTTP_MAX_STATUSES, "a counter each");

static void count(struct fs_http *h, int status)
{
	for (size_t i = 0; i < FS_ARRAY_LEN(statuses); i++)
		if (statuses[i] == status)
			atomic_fetch_add(&h->turned_away[i], 1);
}

size_t fs_http_turned_away(const struct fs_http *h, struct fs_http_turned_away out[FS_HTTP_MAX_STATUSES])
{
	size_t n = 0;
	for (size_t i = 0; i < FS_ARRAY_LEN(statuses); i++) {
		uint64_t times = atomic_load(&h->turned_away[i]);
		if (times > 0)
			out[n++] = (struct fs_http_turned_away){statuses[i], times};
	}
	return n;
}

static void answer_error(
        struct fs_http *h, struct evhttp_request *req, const char *path, const struct http_refusal *why)
{
	char message[sizeof(why->message)];
	struct fs_buf body;
	fs_buf_init(&body, 16 * 1024);
	memcpy(message, why->message, sizeof(message));
	make_ascii(message);
	count(h, why->status);
	int rc = FS_ENOTSUP;
	if (h->o.error_body)
		rc = h->o.error_body(path ? path : "", why->status, why->type, why->code, message, &body);
	if (rc) {
		fs_buf_clear(&body);
		openai_body(why->type, why->code, message, &body);
	}
	struct evbuffer *b = evbuffer_new();
	if (b && evhttp_request_get_command(req) != EVHTTP_REQ_HEAD) /* whose answers have no body */
		evbuffer_add(b, body.data, body.len);
	out_header(req, "Content-Type", "application/json");
	const char *colon = why->header ? strchr(why->header, ':') : NULL;
	if (colon) {
		char name[32];
		snprintf(name, sizeof(name), "%.*s", (int)(colon - why->header), why->header);
		out_header(req, name, colon + 2);
	}
	http_say_if_last(h, req);
	evhttp_send_reply(req, why->status, NULL, b);
	if (b)
		evbuffer_free(b);
	fs_buf_finish(&body);
}

static void answer_text(struct fs_http *h, struct evhttp_request *req, const char *path, int status,
        const char *type, const char *code, const char *text)
{
	struct http_refusal why = {.status = status,
	        .type = type,
	        .code = code,
	        .header = status == 503 ? "Retry-After: 2" : NULL};
	snprintf(why.message, sizeof(why.message), "%s", text);
	answer_error(h, req, path, &why);
}

void http_answer_failure(struct fs_http *h, struct evhttp_request *req)
{
	static const char text[] = "{\"error\":{\"message\":\"out of memory\",\"type\":\"server_error\","
	                           "\"param\":null,\"code\":null}}";
	struct evbuffer *b = evbuffer_new();
	if (b && evhttp_request_get_command(req) != EVHTTP_REQ_HEAD)
		evbuffer_add(b, text, sizeof(text) - 1);
	out_header(req, "Content-Type", "application/json");
	http_say_if_last(h, req);
	evhttp_send_reply(req, 500, NULL, b);
	if (b)
		evbuffer_free(b);
}

/* ---- CORS ---- */

static void add_cors(const struct fs_http *h, const struct http_head *head, struct evhttp_request *req)
{
	const char *origin = http_access_cors(&h->access, head);
	if (origin) {
		out_header(req, "Access-Control-Allow-Origin", origin);
		out_header(req, "Access-Control-Expose-Headers",
		        "x-request-id, request-id, X-Conversation-Resumable, X-Conversation-Error, "
		        "Retry-After");
	}
	if (h->access.n_cors_origins)
		out_header(req, "Vary", "Origin");
}

static void answer_options(
        struct fs_http *h, const struct http_head *head, struct evhttp_request *req, const char *allowed)
{
	const char *wanted = http_head_find(head, "Access-Control-Request-Headers");
	if (allowed[0])
		out_header(req, "Allow", allowed);
	if (http_access_cors(&h->access, head)) {
		out_header(req, "Access-Control-Allow-Methods", "GET, POST, DELETE, OPTIONS");
		if (wanted)
			out_header(req, "Access-Control-Allow-Headers", wanted);
		out_header(req, "Access-Control-Max-Age", "600");
	}
	http_say_if_last(h, req);
	evhttp_send_reply(req, 204, NULL, NULL);
}

/* ---- routes ---- */

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
        const struct fs_http *h, const struct http_head *head, char *allowed, size_t cap)
{
	size_t n = 0;
	allowed[0] = '\0';
	for (size_t i = 0; i < h->o.n_routes; i++) {
		const struct fs_http_route *route = &h->o.routes[i];
		if (!path_fits(route->path, head->path))
			continue;
		if (strcmp(route->method, head->method) == 0)
			return route;
		if (strcmp(head->method, "HEAD") == 0 && strcmp(route->method, "GET") == 0)
			return route;
		int more = snprintf(allowed + n, cap - n, "%s%s", n ? ", " : "", route->method);
		n = FS_MIN(n + (size_t)more, cap - 1);
	}
	return NULL;
}

/* Whether a handler has it now; else it was answered here. */
static bool hand_over(struct fs_http *h, struct http_gate *g, struct evhttp_request *req)
{
	const struct http_head *head = &g->head;
	char allowed[64];
	const struct fs_http_route *route = find_route(h, head, allowed, sizeof(allowed));
	if (atomic_load(&h->stopping)) {
		answer_text(h, req, head->path, 503, "unavailable_error", "shutting_down",
		        "the server is shutting down");
		return false;
	}
	if (!route && strcmp(head->method, "OPTIONS") == 0) {
		answer_options(h, head, req, allowed);
		return false;
	}
	if (!route && allowed[0]) {
		out_header(req, "Allow", allowed);
		answer_text(h, req, head->path, 405, "invalid_request_error", NULL,
		        "this path does not take this method");
		return false;
	}
	if (!route) {
		answer_text(
		        h, req, head->path, 404, "not_found_error", NULL, "there is nothing at this path");
		return false;
	}
	struct fs_http_request *r = http_request_create(h, g, req);
	if (!r) {
		answer_text(h, req, head->path, 503, "unavailable_error", NULL,
		        "the server is out of memory or file descriptors");
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
	struct http_gate *g = http_gate_of(h, req);
	if (!g) {
		out_header(req, "Connection", "close");
		answer_text(h, req, NULL, 503, "unavailable_error", NULL, "the server is out of memory");
		return;
	}
	http_gate_answering(g, req);
	add_cors(h, &g->head, req);
	if (g->state == GATE_REFUSED) {
		answer_error(h, req, g->head.path, &g->refusal);
		return;
	}
	atomic_fetch_add(&h->n_live, 1);
	if (!hand_over(h, g, req))
		atomic_fetch_sub(&h->n_live, 1);
}
