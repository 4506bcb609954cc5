/*
 * Leases and their probes; see lease.h for the rules. A probe is one non-blocking connect with its own
 * deadline, at most one in flight a lease, closed as soon as it is answered. Nothing is ever sent on it.
 */
#include "remote/watchdog/lease.h"

#include <errno.h>
#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define PROBE_TIMEOUT_MS 3000
#define PROBE_INTERVAL_MIN_MS 50
#define PROBE_INTERVAL_MAX_MS 600000
#define PROBE_FAILS_MAX 1000

void fs_leases_init(struct fs_leases *l, const struct fs_wd_config *cfg)
{
	*l = (struct fs_leases){.cfg = cfg};
}

static void free_lease(struct fs_lease *l)
{
	if (l->probe_fd >= 0)
		close(l->probe_fd);
	free(l);
}

void fs_leases_finish(struct fs_leases *ls)
{
	while (ls->head) {
		struct fs_lease *l = ls->head;
		ls->head = l->next;
		free_lease(l);
	}
	ls->n = 0;
}

static bool good_id(const char *id)
{
	return strspn(id, "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ-_.") == strlen(id);
}

/* What the server asked for, within bounds; 0 means ours. */
static void set_terms(
        const struct fs_leases *ls, struct fs_lease *l, const struct fs_hello *h, const char *peer)
{
	int64_t ms = h->probe_interval_ms > 0 ? h->probe_interval_ms : ls->cfg->probe_interval_s * 1000LL;
	ms = FS_MAX(PROBE_INTERVAL_MIN_MS, FS_MIN(ms, PROBE_INTERVAL_MAX_MS));
	int32_t fails = h->probe_fails > 0 ? h->probe_fails : ls->cfg->probe_fails;
	if (l->port != h->liveness_port || strcmp(l->peer, peer))
		l->answered = l->reported = false;
	l->port = h->liveness_port;
	snprintf(l->peer, sizeof(l->peer), "%s", peer);
	l->interval = ms * FS_MS;
	l->max_fails = FS_MIN(fails, PROBE_FAILS_MAX);
	l->fails = 0;
	if (l->probe_fd >= 0)
		close(l->probe_fd);
	l->probe_fd = -1;
	l->probe_at = fs_now(); /* the first one at once: it tells whether the port answers */
}

static int add_lease(struct fs_leases *ls, const char *id, struct fs_lease **out, struct fs_errbuf *e)
{
	if (ls->n >= FS_LEASES_MAX)
		return fs_fail(e, FS_ELIMIT, "this vision host already serves %d servers", FS_LEASES_MAX);
	struct fs_lease *l = calloc(1, sizeof(*l));
	if (!l)
		return fs_fail(e, FS_ENOMEM, "out of memory");
	snprintf(l->id, sizeof(l->id), "%s", id);
	l->probe_fd = l->slot = -1;
	l->next = ls->head;
	ls->head = l;
	ls->n++;
	*out = l;
	return FS_OK;
}

int fs_lease_resume(struct fs_leases *ls, const struct fs_lease *was, struct fs_errbuf *e)
{
	struct fs_lease *l = NULL, *next;
	int rc = add_lease(ls, was->id, &l, e);
	if (rc)
		return rc;
	next = l->next;
	*l = *was;
	l->next = next;
	l->probe_fd = l->slot = -1;
	l->probe_at = fs_now();
	l->channels = 0;
	return FS_OK;
}

int fs_lease_open(struct fs_leases *ls, const struct fs_hello *h, const char *peer, struct fs_lease **out,
        struct fs_errbuf *e)
{
	if (!good_id(h->lease))
		return fs_fail(e, FS_EINVAL,
		        "the lease id holds other characters than letters, digits, '-', '_', '.'");
	if (h->liveness_port < 0 || h->liveness_port > 65535)
		return fs_fail(e, FS_EINVAL, "the liveness port %d is no port", h->liveness_port);
	struct fs_lease *l = h->lease[0] ? ls->head : NULL;
	while (l && (l->over || strcmp(l->id, h->lease)))
		l = l->next;
	if (!l) {
		int rc = add_lease(ls, h->lease, &l, e);
		if (rc)
			return rc;
		fs_info("lease %.8s: begins, server at %s port %d", l->id,
		        peer[0] ? peer : "an unknown address", h->liveness_port);
	} else {
		fs_info("lease %.8s: taken up again", l->id);
	}
	set_terms(ls, l, h, peer);
	l->channels++;
	l->opened = l->last_sign = fs_now();
	*out = l;
	return FS_OK;
}

void fs_lease_frame(struct fs_lease *l)
{
	l->last_sign = fs_now();
	l->fails = 0;
}

void fs_lease_close(struct fs_lease *l)
{
	FS_ASSERT(l->channels > 0);
	l->channels--;
	if (l->channels == 0)
		l->last_sign = fs_now();
	if (l->channels == 0 && !l->id[0])
		fs_lease_end(l, "its connection is gone");
}

void fs_lease_end(struct fs_lease *l, const char *why)
{
	if (l->over)
		return;
	l->over = true;
	fs_info("lease %.8s: ends: %s", l->id, why);
}

void fs_leases_end_absent(struct fs_leases *ls, const char *why)
{
	for (struct fs_lease *l = ls->head; l; l = l->next)
		if (l->channels == 0)
			fs_lease_end(l, why);
}

bool fs_lease_live(const struct fs_leases *ls, const struct fs_lease *l)
{
	return l->channels > 0 && fs_now() - l->last_sign < ls->cfg->silence_s * FS_SEC;
}

size_t fs_leases_count(const struct fs_leases *ls)
{
	size_t n = 0;
	for (const struct fs_lease *l = ls->head; l; l = l->next)
		n += !l->over;
	return n;
}

void fs_leases_sweep(struct fs_leases *ls)
{
	for (struct fs_lease **at = &ls->head; *at;) {
		struct fs_lease *l = *at;
		if (l->over && l->channels == 0 && l->requests == 0) {
			*at = l->next;
			ls->n--;
			free_lease(l);
		} else {
			at = &l->next;
		}
	}
}

/* ---- probes ---- */

static bool probed(const struct fs_lease *l)
{
	return l->port > 0 && l->peer[0] && !l->over;
}

static void probe_result(struct fs_leases *ls, struct fs_lease *l, int error)
{
	if (l->probe_fd >= 0)
		close(l->probe_fd);
	l->probe_fd = -1;
	l->probe_at = fs_now() + l->interval;
	l->probes++;
	if (!error) {
		l->answered = true;
		l->fails = 0;
		return;
	}
	if (!l->answered && !l->reported) {
		fs_warn("lease %.8s: port %d of %s does not answer (%s), so only the channel tells whether "
		        "the server "
		        "lives",
		        l->id, l->port, l->peer, strerror(error));
		l->reported = true;
	}
	if (l->answered && !fs_lease_live(ls, l)) {
		l->fails++;
		fs_info("lease %.8s: port %d of %s failed probe %d of %d: %s", l->id, l->port, l->peer,
		        l->fails, l->max_fails, strerror(error));
	}
}

static void probe_start(struct fs_leases *ls, struct fs_lease *l)
{
	struct addrinfo hints = {.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV, .ai_socktype = SOCK_STREAM}, *a;
	char port[16];
	snprintf(port, sizeof(port), "%d", l->port);
	if (getaddrinfo(l->peer, port, &hints, &a)) {
		probe_result(ls, l, EADDRNOTAVAIL);
		return;
	}
	l->probe_fd = socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	int rc = l->probe_fd < 0 ? -1 : connect(l->probe_fd, a->ai_addr, a->ai_addrlen);
	int error = errno;
	freeaddrinfo(a);
	if (rc == 0)
		probe_result(ls, l, 0);
	else if (error != EINPROGRESS)
		probe_result(ls, l, error);
	else
		l->probe_at = fs_now() + FS_MIN(l->interval, PROBE_TIMEOUT_MS * FS_MS);
}

static void probe_step(struct fs_leases *ls, struct fs_lease *l, const struct fs_pollset *ps)
{
	int error = 0;
	socklen_t n = sizeof(error);
	if (l->probe_fd >= 0 && fs_pollset_got(ps, l->slot)) {
		if (getsockopt(l->probe_fd, SOL_SOCKET, SO_ERROR, &error, &n))
			error = errno;
		probe_result(ls, l, error);
	} else if (fs_now() >= l->probe_at) {
		if (l->probe_fd >= 0)
			probe_result(ls, l, ETIMEDOUT);
		else
			probe_start(ls, l);
	}
}

/* ---- the end of a lease ---- */

/* Somebody else answers at its port by now: a server that was killed and started again, as a rule. Two
 * servers behind one address that chose the same port can not be told apart by probes either. */
static bool superseded(const struct fs_leases *ls, const struct fs_lease *l)
{
	if (l->port == 0 || !l->peer[0])
		return false;
	for (const struct fs_lease *o = ls->head; o; o = o->next)
		if (o != l && !o->over && o->port == l->port && o->opened > l->opened &&
		        strcmp(o->peer, l->peer) == 0)
			return true;
	return false;
}

/* When a server without any sign of life loses its lease, unless probes decide that: FS_NEVER then. */
static int64_t grace_end(const struct fs_leases *ls, const struct fs_lease *l)
{
	int64_t dead = l->last_sign + (l->channels > 0 ? ls->cfg->silence_s * FS_SEC : 0);
	if (superseded(ls, l))
		return dead;
	if (probed(l) && l->answered)
		return FS_NEVER;
	return dead + ls->cfg->lease_grace_s * FS_SEC;
}

static void judge(struct fs_leases *ls, struct fs_lease *l)
{
	if (fs_now() >= grace_end(ls, l))
		fs_lease_end(l, superseded(ls, l) ? "no channel, and another server has its address and port"
		                                  : "no channel, and its port can not be probed");
	else if (probed(l) && l->answered && l->fails >= l->max_fails && !fs_lease_live(ls, l))
		fs_lease_end(l, "no channel, and its port does not answer any more");
}

void fs_leases_prepare(struct fs_leases *ls, struct fs_pollset *ps)
{
	for (struct fs_lease *l = ls->head; l; l = l->next) {
		l->slot = -1;
		if (l->over)
			continue;
		if (l->probe_fd >= 0)
			l->slot = fs_pollset_add(ps, l->probe_fd, POLLOUT);
		if (probed(l))
			fs_pollset_until(ps, l->probe_at);
		fs_pollset_until(ps, grace_end(ls, l));
	}
}

void fs_leases_dispatch(struct fs_leases *ls, const struct fs_pollset *ps)
{
	for (struct fs_lease *l = ls->head; l; l = l->next) {
		if (probed(l))
			probe_step(ls, l, ps);
		if (!l->over)
			judge(ls, l);
	}
}
