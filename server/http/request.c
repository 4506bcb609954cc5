/* The life of a request from its arrival to its end, what its holder may ask of it, and which route it takes.
 */
#include "server/http/internal.h"

#include <stdlib.h>
#include <string.h>

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
	atomic_fetch_sub(&r->h->bodies, r->body_len);
	http_head_finish(&r->head);
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
	return r->body ? r->body : "";
}

void fs_http_drop_body(struct fs_http_request *r)
{
	atomic_fetch_sub(&r->h->bodies, r->body_len);
	free(r->body);
	r->body = NULL;
	r->body_len = 0;
}

int64_t fs_http_arrived(const struct fs_http_request *r)
{
	return r->arrived;
}

const char *fs_http_header(const struct fs_http_request *r, const char *name)
{
	return http_head_find(&r->head, name);
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

/* n bytes, decoded; NULL when they hold a NUL, which no string of ours has. plus: '+' is a space. */
static char *decode(const char *s, size_t n, int plus)
{
	size_t len = 0;
	char *copy = strndup(s, n), *out = copy ? evhttp_uridecode(copy, plus, &len) : NULL;
	free(copy);
	if (out && strlen(out) == len)
		return out;
	free(out);
	return NULL;
}

/* By hand: libevent's reader gives up at a parameter without a value, and at a '&' with nothing behind it. */
char *fs_http_query_value(const struct fs_http_request *r, const char *name)
{
	size_t len = strlen(name);
	for (const char *p = r->head.query; p && *p;) {
		size_t n = strcspn(p, "&");
		if (n >= len && strncmp(p, name, len) == 0 && (n == len || p[len] == '='))
			return n == len ? strdup("") : decode(p + len + 1, n - len - 1, 1);
		p += n + (p[n] == '&');
	}
	return NULL;
}

char *fs_http_path_tail(const struct fs_http_request *r, const char *prefix)
{
	size_t n = strlen(prefix);
	if (strncmp(r->head.path, prefix, n) != 0)
		return NULL;
	return decode(r->head.path + n, strlen(r->head.path) - n, 0);
}

int fs_http_key(const struct fs_http_request *r)
{
	return r->key;
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
	if (r->gate)
		r->gate->request = NULL;
	r->gate = NULL;
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

/* The gate's head goes to the request; what the gate has to know later stays. */
static void take_head(struct fs_http_request *r, struct http_gate *g)
{
	char *address = NULL;
	uint16_t port;
	r->key = http_access_key(&r->h->access, &g->head);
	r->head = g->head;
	g->head = (struct http_head){.last = r->head.last};
	g->request = r;
	r->gate = g;
	evhttp_connection_get_peer(g->evcon, &address, &port);
	snprintf(r->peer, sizeof(r->peer), "%s", address ? address : "");
}

struct fs_http_request *http_request_create(
        struct fs_http *h, struct http_gate *g, struct evhttp_request *req)
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
	/* Its bytes stay counted in h->bodies. */
	r->body = g->body.len ? fs_buf_take(&g->body, &r->body_len) : calloc(1, 1);
	if (!r->cancel || !r->end || !r->body || http_timer_start(r) || http_watch_start(r)) {
		http_watch_stop(r);
		if (r->timer)
			event_free(r->timer);
		fs_http_unref(r);
		return NULL;
	}
	r->end->act = ACT_END;
	take_head(r, g);
	pthread_mutex_lock(&h->lock);
	r->next = h->live;
	if (h->live)
		h->live->prev = r;
	h->live = r;
	pthread_mutex_unlock(&h->lock);
	return r;
}
