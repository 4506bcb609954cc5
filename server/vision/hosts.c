/*
 * hosts: which hosts a vision has: made, named, and changed while it works. A host lives in a slot from its
 * making until its thread has ended, so pointers and bits of slots stay good meanwhile. fs_vision_set_hosts
 * runs on one caller's thread; the lock guards what the hosts' threads see.
 */
#include "server/vision/internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- one slot ---- */

static int copy_text(const char **dst, const char *src, struct fs_errbuf *e)
{
	*dst = src ? strdup(src) : NULL;
	return src && !*dst ? fs_fail(e, FS_ENOMEM, "out of memory") : FS_OK;
}

static int copy_opts(struct fs_vision_host_opts *to, const struct fs_vision_host_opts *o, struct fs_errbuf *e)
{
	int rc;
	*to = (struct fs_vision_host_opts){.port = o->port};
	if ((rc = copy_text(&to->host, o->host, e)) || (rc = copy_text(&to->identity, o->identity, e)) ||
	        (rc = copy_text(&to->known_hosts, o->known_hosts, e)) ||
	        (rc = copy_text(&to->config_file, o->config_file, e)) ||
	        (rc = copy_text(&to->command, o->command, e)) || (rc = copy_text(&to->wol, o->wol, e)) ||
	        (rc = copy_text(&to->wol_broadcast, o->wol_broadcast, e)))
		return rc;
	return FS_OK;
}

static void free_opts(struct fs_vision_host_opts *o)
{
	free((char *)o->host);
	free((char *)o->identity);
	free((char *)o->known_hosts);
	free((char *)o->config_file);
	free((char *)o->command);
	free((char *)o->wol);
	free((char *)o->wol_broadcast);
}

static bool same_text(const char *a, const char *b)
{
	return a && b ? strcmp(a, b) == 0 : a == b;
}

static bool same_opts(const struct fs_vision_host_opts *a, const struct fs_vision_host_opts *b)
{
	return same_text(a->host, b->host) && a->port == b->port && same_text(a->identity, b->identity) &&
	       same_text(a->known_hosts, b->known_hosts) && same_text(a->config_file, b->config_file) &&
	       same_text(a->command, b->command) && same_text(a->wol, b->wol) &&
	       same_text(a->wol_broadcast, b->wol_broadcast);
}

/* What is wrong in the configuration shows now, not at the first picture. */
static int init_host(
        struct fs_host *h, const char *name, const struct fs_vision_host_opts *o, struct fs_errbuf *e)
{
	struct fs_ssh_target target;
	int rc;
	snprintf(h->name, sizeof(h->name), "%s", name);
	h->state = FS_HOST_CONNECTING;
	h->since = fs_now();
	if (!o->host || !*o->host)
		return fs_fail(e, FS_EINVAL, "a vision host has no name");
	if ((rc = copy_opts(&h->own, o, e)))
		return rc;
	h->ssh = (struct fs_ssh_opts){.host = h->own.host,
	        .port = h->own.port,
	        .identity = h->own.identity,
	        .known_hosts = h->own.known_hosts,
	        .config_file = h->own.config_file,
	        .command = h->own.command};
	if ((rc = fs_ssh_resolve(&h->ssh, &target, e)))
		return fs_fail_prefix(e, rc, "vision host %s", h->name);
	if (o->wol && (rc = fs_wol_parse(o->wol, o->wol_broadcast, &h->wol, e)))
		return fs_fail_prefix(e, rc, "vision host %s", h->name);
	h->has_wol = o->wol != NULL;
	h->wake = fs_wake_open();
	return h->wake < 0 ? fs_fail_errno(e, FS_EIO, "can not open an eventfd") : FS_OK;
}

void fs_host_finish(struct fs_host *h)
{
	if (h->use != FS_SLOT_FREE && h->wake >= 0)
		close(h->wake);
	free_opts(&h->own);
	memset(h, 0, sizeof(*h));
}

/* Those that lost a picture are remembered by slots: another host is about to get this one. */
static void forget_slot_locked(struct fs_vision *v, size_t slot)
{
	for (struct fs_vision_job *j = v->parked.first; j; j = j->next)
		j->tried &= ~(1u << slot);
	for (size_t i = 0; i < v->n_hosts; i++)
		for (struct fs_vision_job *j = v->hosts[i].jobs.first; j; j = j->next)
			j->tried &= ~(1u << slot);
}

static struct fs_host *take_slot(struct fs_vision *v)
{
	struct fs_host *h = NULL;
	pthread_mutex_lock(&v->lock);
	for (size_t i = 0; i < FS_VISION_SLOTS && !h; i++)
		if (v->hosts[i].use == FS_SLOT_FREE) {
			h = &v->hosts[i];
			h->use = FS_SLOT_NEW;
			h->v = v;
			h->wake = -1;
			v->n_hosts = FS_MAX(v->n_hosts, i + 1);
			forget_slot_locked(v, i);
		}
	pthread_mutex_unlock(&v->lock);
	return h;
}

static void end_slot(struct fs_host *h)
{
	struct fs_vision *v = h->v;
	if (h->started)
		pthread_join(h->thread, NULL);
	pthread_mutex_lock(&v->lock);
	if (v->fingerprint_from == h)
		fs_host_unbind_locked(h);
	fs_host_finish(h);
	pthread_mutex_unlock(&v->lock);
}

/* Slots whose threads have ended since the last time. */
static void reap(struct fs_vision *v)
{
	for (size_t i = 0; i < v->n_hosts; i++) {
		pthread_mutex_lock(&v->lock);
		bool ended = v->hosts[i].use == FS_SLOT_ENDED;
		pthread_mutex_unlock(&v->lock);
		if (ended)
			end_slot(&v->hosts[i]);
	}
}

static int start_host(struct fs_host *h, struct fs_errbuf *e)
{
	char name[16];
	snprintf(name, sizeof(name), "fs-host-%zu", (size_t)(h - h->v->hosts));
	int rc = fs_thread_start(&h->thread, name, fs_host_run, h, e);
	h->started = rc == FS_OK;
	return rc;
}

/* ---- by the host's thread ---- */

bool fs_host_is_over(struct fs_host *h)
{
	if (atomic_load(&h->v->stopping))
		return true;
	if (!atomic_load(&h->leaving))
		return false;
	pthread_mutex_lock(&h->v->lock);
	bool idle = !h->jobs.first;
	pthread_mutex_unlock(&h->v->lock);
	return idle;
}

void fs_host_ended(struct fs_host *h)
{
	pthread_mutex_lock(&h->v->lock);
	if (h->use == FS_SLOT_LEAVING) {
		fs_info("vision host %s is let go", h->name);
		h->use = FS_SLOT_ENDED;
	}
	pthread_mutex_unlock(&h->v->lock);
}

/* ---- names ---- */

void fs_vision_host_name(const struct fs_vision_host_opts *hosts, size_t n, size_t i, char *out, size_t cap)
{
	bool alike = false, same_port = false;
	const char *own = hosts[i].host ? hosts[i].host : "";
	for (size_t k = 0; k < n; k++) {
		bool other = k != i && same_text(hosts[i].host, hosts[k].host);
		alike |= other;
		same_port |= other && hosts[i].port == hosts[k].port;
	}
	if (same_port)
		snprintf(out, cap, "%.100s #%zu", own, i + 1);
	else if (alike && hosts[i].port)
		snprintf(out, cap, "%.100s:%d", own, hosts[i].port);
	else
		snprintf(out, cap, "%s", own);
}

/* ---- all of them ---- */

/* What a change is made of: for each wanted host its slot. */
struct plan {
	struct fs_host *of[FS_VISION_MAX_HOSTS];
	bool fresh[FS_VISION_MAX_HOSTS];
	size_t n;
};

static bool is_taken(const struct plan *p, const struct fs_host *h)
{
	for (size_t i = 0; i < p->n; i++)
		if (p->of[i] == h)
			return true;
	return false;
}

/* A live one with the same settings that is nobody else's yet; only set_hosts changes what is live. */
static struct fs_host *find_same(
        struct fs_vision *v, const struct plan *p, const struct fs_vision_host_opts *o)
{
	struct fs_host *found = NULL;
	pthread_mutex_lock(&v->lock); /* threads of those that leave change theirs */
	for (size_t i = 0; i < v->n_hosts && !found; i++)
		if (fs_host_is_live(&v->hosts[i]) && same_opts(&v->hosts[i].own, o) &&
		        !is_taken(p, &v->hosts[i]))
			found = &v->hosts[i];
	pthread_mutex_unlock(&v->lock);
	return found;
}

/* The kept ones keep their names, so a new one may have to have another than it would get. */
static void name_new(const struct plan *p, size_t at, const struct fs_vision_host_opts *hosts, size_t n,
        char *out, size_t cap)
{
	char plain[128];
	fs_vision_host_name(hosts, n, at, plain, sizeof(plain));
	snprintf(out, cap, "%s", plain);
	for (size_t number = at + 1, i = 0; i < n; i++)
		if (i != at && p->of[i] && strcmp(p->of[i]->name, out) == 0) {
			snprintf(out, cap, "%.100s #%zu", plain, ++number);
			i = (size_t)-1; /* is it another's, too? */
		}
}

static int make(struct fs_vision *v, struct plan *p, size_t i, const struct fs_vision_host_opts *hosts,
        size_t n, struct fs_errbuf *e)
{
	char name[128];
	struct fs_host *h = take_slot(v);
	if (!h)
		return fs_fail(e, FS_EUNAVAILABLE,
		        "too many vision hosts are still finishing their last pictures; try again shortly");
	p->of[i] = h;
	p->fresh[i] = true;
	name_new(p, i, hosts, n, name, sizeof(name));
	return init_host(h, name, &hosts[i], e);
}

static void leave_locked(struct fs_host *h)
{
	h->use = FS_SLOT_LEAVING;
	for (struct fs_vision_job *j = h->jobs.first, *next; j; j = next) {
		next = j->next;
		if (j->stage == FS_JOB_WAITING)
			fs_job_unassign_locked(j);
	}
	atomic_store(&h->leaving, true); /* its thread may see an empty list from here on */
	fs_wake(h->wake);
}

static void kick_locked(struct fs_host *h)
{
	h->kicked = true;
	fs_wake(h->wake);
}

void fs_host_unbind_locked(const struct fs_host *h)
{
	struct fs_vision *v = h->v;
	for (size_t i = 0; i < v->n_hosts; i++) {
		const struct fs_host *o = &v->hosts[i];
		if (o != h && fs_host_is_live(o) && o->state == FS_HOST_UP &&
		        strcmp(o->facts.fingerprint, v->fingerprint) == 0) {
			memcpy(v->fingerprint_of, o->name, sizeof(v->fingerprint_of));
			v->fingerprint_from = o;
			return;
		}
	}
	v->fingerprint[0] = v->fingerprint_of[0] = '\0';
	v->fingerprint_from = NULL;
	v->unbound++;
	for (size_t i = 0; i < v->n_hosts; i++)
		if (fs_host_is_live(&v->hosts[i])) /* it may have been refused for it */
			kick_locked(&v->hosts[i]);
}

/* A model that only hosts of the past had binds the new ones to nothing. */
static void forget_model_locked(struct fs_vision *v)
{
	if (v->fingerprint_from && !fs_host_is_live(v->fingerprint_from))
		fs_host_unbind_locked(v->fingerprint_from);
}

/* None of the new ones was given anything yet. */
static void undo(struct fs_vision *v, struct plan *p)
{
	for (size_t i = 0; i < p->n; i++)
		if (p->fresh[i] && p->of[i]) {
			atomic_store(&p->of[i]->leaving, true);
			if (p->of[i]->started)
				fs_wake(p->of[i]->wake);
			end_slot(p->of[i]);
		}
}

static void commit(struct fs_vision *v, const struct plan *p, struct fs_vision_change *change)
{
	*change = (struct fs_vision_change){0};
	pthread_mutex_lock(&v->lock);
	for (size_t i = 0; i < p->n; i++) {
		struct fs_host *h = p->of[i];
		h->order = i;
		h->use = FS_SLOT_LIVE;
		change->added += p->fresh[i];
		change->kept += !p->fresh[i];
		if (!p->fresh[i] && h->state != FS_HOST_UP)
			kick_locked(h); /* who changes settings has mended something */
	}
	for (size_t i = 0; i < v->n_hosts; i++)
		if (fs_host_is_live(&v->hosts[i]) && !is_taken(p, &v->hosts[i])) {
			leave_locked(&v->hosts[i]);
			change->removed++;
		}
	forget_model_locked(v);
	fs_wake(v->news);
	fs_vision_review_locked(v);
	pthread_mutex_unlock(&v->lock);
}

int fs_vision_set_hosts(struct fs_vision *v, const struct fs_vision_host_opts *hosts, size_t n,
        struct fs_vision_change *change, struct fs_errbuf *e)
{
	struct plan p = {.n = n};
	int rc = FS_OK;
	if (v->local)
		return fs_fail(e, FS_ENOTSUP, "pictures are encoded on this machine");
	if (n > FS_VISION_MAX_HOSTS)
		return fs_fail(e, FS_EINVAL, "%zu vision hosts are named; at most %d are possible", n,
		        FS_VISION_MAX_HOSTS);
	reap(v);
	for (size_t i = 0; i < n; i++)
		p.of[i] = find_same(v, &p, &hosts[i]);
	for (size_t i = 0; i < n && !rc; i++)
		if (!p.of[i])
			rc = make(v, &p, i, hosts, n, e);
	for (size_t i = 0; i < n && !rc; i++) /* none is dialled before all are known to be good */
		if (p.fresh[i])
			rc = start_host(p.of[i], e);
	if (rc) {
		undo(v, &p);
		return rc;
	}
	commit(v, &p, change);
	return FS_OK;
}

int fs_hosts_create(struct fs_vision *v, const struct fs_vision_opts *o, struct fs_errbuf *e)
{
	struct fs_vision_change none;
	return fs_vision_set_hosts(v, o->hosts, o->n_hosts, &none, e);
}
