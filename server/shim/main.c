/*
 * farsight-remote: says READY once a vision host is up, turns each ENC into rows, ends with its server. What
 * goes wrong with a picture is an ERR line; the program stays, and so does its lease on the host.
 */
#include "server/shim/shim.h"

#include <errno.h>
#include <openssl/evp.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define HOST_GRACE_MS 5000 /* that a host may be down before a start or a picture fails for it */
#define WAKING_MS 60000    /* that a picture waits for a host that was sent a wake-up packet */

struct shim {
	struct shim_opts o;
	struct shim_orders *orders;
	struct fs_vision *v;
	int32_t n_embd; /* as READY told it */
};

/* ---- answers ---- */

/* False when nobody reads them any more. */
static bool say(const char *line, size_t n)
{
	while (n > 0) {
		ssize_t k = write(STDOUT_FILENO, line, n);
		if (k < 0 && errno == EINTR)
			continue;
		if (k < 0)
			return false;
		line += k;
		n -= (size_t)k;
	}
	return true;
}

static bool say_err(const struct fs_errbuf *e)
{
	char line[sizeof(e->text) + 8];
	int n = snprintf(line, sizeof(line), "ERR %s\n", *e->text ? e->text : "failed");
	fs_warn("%s", e->text);
	return say(line, (size_t)n);
}

/* ---- hosts ---- */

enum outlook { OUTLOOK_UP, OUTLOOK_HOPE, OUTLOOK_DOWN };

/* The best state of any host; of one that is up the width of its rows, of those that are down the cause. */
static enum outlook look(struct shim *s, int32_t *n_embd, struct fs_errbuf *e)
{
	struct fs_host_status st[FS_VISION_MAX_HOSTS];
	size_t n = fs_vision_status(s->v, st, FS_ARRAY_LEN(st));
	enum outlook best = OUTLOOK_DOWN;
	for (size_t i = 0; i < n; i++) {
		if (st[i].state == FS_HOST_UP && st[i].n_embd > 0) {
			*n_embd = st[i].n_embd;
			return OUTLOOK_UP;
		}
		if (st[i].state != FS_HOST_DOWN)
			best = OUTLOOK_HOPE;
		fs_fail(e, FS_EUNAVAILABLE, "%.120s: %.380s", st[i].host,
		        *st[i].cause ? st[i].cause : fs_host_state_name(st[i].state));
	}
	return best == OUTLOOK_DOWN && fs_vision_retry_after_s(s->v) > 0 ? OUTLOOK_HOPE : best;
}

/* Waits for a host that is up, until the deadline; all of them down for HOST_GRACE_MS, and none of them
 * waking, end it early. */
static int wait_for_host(struct shim *s, int64_t deadline, int32_t *n_embd, struct fs_errbuf *e)
{
	struct pollfd p[2] = {{.fd = fs_vision_news(s->v), .events = POLLIN},
	        {.fd = shim_orders_end_fd(s->orders), .events = POLLIN}};
	int64_t down_until = FS_NEVER;
	for (;;) {
		fs_wake_drain(p[0].fd);
		enum outlook now = look(s, n_embd, e);
		if (now == OUTLOOK_UP)
			return FS_OK;
		if (now == OUTLOOK_DOWN)
			fs_vision_rouse(s->v);
		if (now == OUTLOOK_HOPE)
			down_until = FS_NEVER;
		else if (down_until == FS_NEVER)
			down_until = fs_deadline_ms(HOST_GRACE_MS);
		int64_t until = FS_MIN(deadline, down_until);
		if (fs_cancelled(shim_orders_end(s->orders)))
			return fs_fail(e, FS_ECANCELLED, "ended");
		if (fs_now() >= until)
			return now == OUTLOOK_DOWN ? FS_EUNAVAILABLE
			                           : fs_fail_prefix(e, FS_ETIMEOUT,
			                                     "the vision host was not ready in time");
		poll(p, 2, fs_poll_ms(until));
	}
}

/* ---- a picture ---- */

static int submit(
        struct shim *s, const struct fs_buf *picture, struct fs_vision_job **job, struct fs_errbuf *e)
{
	uint8_t key[EVP_MAX_MD_SIZE];
	if (EVP_Digest(picture->data, picture->len, key, NULL, EVP_sha256(), NULL) != 1)
		return fs_fail(e, FS_EINTERNAL, "SHA-256 failed");
	struct fs_cancel *end = shim_orders_end(s->orders);
	int rc = fs_vision_submit(s->v, picture->data, picture->len, key, NULL, end, job, e);
	if (rc != FS_EUNAVAILABLE)
		return rc;
	/* that refusal has made the host try again: it may be back within a moment */
	struct fs_errbuf why;
	int32_t n_embd;
	int64_t until = fs_deadline_ms(FS_MIN(s->o.vision.encode_timeout_ms, WAKING_MS));
	rc = wait_for_host(s, until, &n_embd, &why);
	if (rc)
		return fs_fail(e, rc, "%s", why.text);
	return fs_vision_submit(s->v, picture->data, picture->len, key, NULL, end, job, e);
}

static int encode(struct shim *s, const struct fs_order *order, struct fs_rows **rows, struct fs_errbuf *e)
{
	struct fs_vision_job *job;
	struct fs_buf picture;
	fs_buf_init(&picture, FS_PICTURE_MAX);
	int rc = fs_buf_append_file(&picture, order->in, e);
	if (!rc && picture.len == 0)
		rc = fs_fail(e, FS_EINVAL, "%s is empty", order->in);
	if (!rc)
		rc = submit(s, &picture, &job, e);
	fs_buf_finish(&picture);
	if (rc)
		return rc;
	rc = fs_vision_wait(job, rows, e);
	fs_vision_job_destroy(job);
	return rc;
}

static bool answer(struct shim *s, const struct fs_order *order)
{
	struct fs_rows *rows = NULL;
	struct fs_errbuf e = {""};
	char line[128];
	int64_t began = fs_now();
	int rc = encode(s, order, &rows, &e);
	const struct fs_rows_shape *shape = rc ? NULL : &rows->shape;
	if (!rc && shape->n_embd != s->n_embd)
		rc = fs_fail(&e, FS_EUNAVAILABLE,
		        "the vision host has another model now: rows of %d values instead of %d",
		        shape->n_embd, s->n_embd);
	if (!rc)
		rc = fs_rows_replace_file(order->out, shape, rows->data, &e);
	bool heard = true;
	if (rc == FS_OK) {
		double ms = (double)(fs_now() - began) / (double)FS_MS;
		int n = snprintf(
		        line, sizeof(line), "OK %d %d %d %.1f\n", shape->n_tokens, shape->nx, shape->ny, ms);
		heard = say(line, (size_t)n);
	} else if (!fs_cancelled(shim_orders_end(s->orders))) {
		heard = say_err(&e);
	}
	fs_rows_unref(rows);
	return heard;
}

/* ---- life ---- */

static bool take_line(struct shim *s, const char *line, size_t n, bool *quit)
{
	struct fs_order *order = malloc(sizeof(*order));
	struct fs_errbuf e = {"out of memory"};
	bool heard = true;
	if (!order || fs_order_parse(line, n, false, order, &e) != FS_OK)
		heard = say_err(&e);
	else if (order->kind == FS_ORDER_QUIT)
		*quit = true;
	else
		heard = answer(s, order);
	free(order);
	return heard;
}

static void work(struct shim *s)
{
	bool quit = false, heard = true;
	while (!quit && heard) {
		char *line;
		size_t n;
		struct fs_errbuf e = {""};
		int rc = shim_orders_next(s->orders, &line, &n, &e);
		if (rc == FS_EUNAVAILABLE)
			return;
		if (rc) {
			heard = say_err(&e);
			continue;
		}
		heard = take_line(s, line, n, &quit);
		free(line);
	}
}

static int start(struct shim *s, pid_t parent, struct fs_errbuf *e)
{
	char line[32];
	int rc = shim_orders_open(&s->orders, parent, e);
	if (!rc)
		rc = fs_vision_create(&s->o.vision, &s->v, e);
	if (!rc)
		rc = wait_for_host(s, fs_deadline_ms(s->o.start_timeout_ms), &s->n_embd, e);
	if (rc)
		return rc;
	int n = snprintf(line, sizeof(line), "READY %d\n", s->n_embd);
	return say(line, (size_t)n) ? FS_OK : fs_fail(e, FS_ECANCELLED, "nobody reads its answers");
}

int main(int argc, char **argv)
{
	pid_t parent = getppid(); /* first: a parent that dies from now on is missed */
	struct shim s = {.v = NULL};
	struct fs_errbuf e = {""};
	signal(SIGPIPE, SIG_IGN);
	int rc = shim_opts_read(&s.o, argc, argv, &e), status = rc ? 2 : 1;
	if (!rc)
		rc = start(&s, parent, &e);
	if (!rc)
		work(&s);
	if (rc < 0 && rc != FS_ECANCELLED)
		say_err(&e);
	fs_vision_destroy(s.v); /* says BYE: the lease ends with us */
	shim_orders_close(s.orders);
	shim_opts_finish(&s.o);
	return rc < 0 && rc != FS_ECANCELLED ? status : 0;
}
