/*
 * vision: the hosts together: creation and end, names, what is told of them. Its functions run on callers'
 * threads; the lock guards what the hosts' threads touch.
 */
#include "server/vision/internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

const char *fs_host_state_name(enum fs_host_state s)
{
	static const char *const names[] = {"connecting", "starting", "up", "down"};
	return (size_t)s < FS_ARRAY_LEN(names) ? names[s] : "unknown";
}

const char *fs_host_error_name(enum fs_host_error err)
{
	static const char *const names[] = {"connect", "lost", "encoder", "timeout", "rows", "picture"};
	_Static_assert(FS_ARRAY_LEN(names) == FS_N_HOST_ERRORS, "a name for each");
	return (size_t)err < FS_ARRAY_LEN(names) ? names[err] : "unknown";
}

/* ---- life ---- */

static int copy_text(const char **dst, const char *src, struct fs_errbuf *e)
{
	*dst = src ? strdup(src) : NULL;
	return src && !*dst ? fs_fail(e, FS_ENOMEM, "out of memory") : FS_OK;
}

static int init_host(struct fs_vision *v, const struct fs_vision_host_opts *o, struct fs_errbuf *e)
{
	struct fs_host *h = &v->hosts[v->n_hosts];
	h->v = v;
	h->wake = -1;
	h->state = FS_HOST_CONNECTING;
	h->since = fs_now();
	v->n_hosts++; /* from here on destroy frees what is there */
	if (!o->host || !*o->host)
		return fs_fail(e, FS_EINVAL, "a vision host has no name");
	snprintf(h->name, sizeof(h->name), "%s", o->host);
	h->ssh.port = o->port;
	int rc;
	if ((rc = copy_text(&h->ssh.host, o->host, e)) ||
	        (rc = copy_text(&h->ssh.identity, o->identity, e)) ||
	        (rc = copy_text(&h->ssh.known_hosts, o->known_hosts, e)) ||
	        (rc = copy_text(&h->ssh.config_file, o->config_file, e)) ||
	        (rc = copy_text(&h->ssh.command, o->command, e)))
		return rc;
	struct fs_ssh_target
	        target; /* what is wrong in the configuration shows now, not at the first picture */
	if ((rc = fs_ssh_resolve(&h->ssh, &target, e)))
		return fs_fail_prefix(e, rc, "vision host %s", h->name);
	if (o->wol && (rc = fs_wol_parse(o->wol, o->wol_broadcast, &h->wol, e)))
		return fs_fail_prefix(e, rc, "vision host %s", h->name);
	h->has_wol = o->wol != NULL;
	h->wake = fs_wake_open();
	return h->wake < 0 ? fs_fail_errno(e, FS_EIO, "can not open an eventfd") : FS_OK;
}

/* Names tell hosts apart in errors, figures and metrics: those that are written alike get their port or
 * number. */
static void name_hosts(struct fs_vision *v, const struct fs_vision_opts *o)
{
	for (size_t i = 0; i < o->n_hosts; i++) {
		bool alike = false, same_port = false;
		for (size_t k = 0; k < o->n_hosts; k++) {
			bool other = k != i && strcmp(o->hosts[i].host, o->hosts[k].host) == 0;
			alike |= other;
			same_port |= other && o->hosts[i].port == o->hosts[k].port;
		}
		struct fs_host *h = &v->hosts[i];
		if (same_port)
			snprintf(h->name, sizeof(h->name), "%.100s #%zu", o->hosts[i].host, i + 1);
		else if (alike && o->hosts[i].port)
			snprintf(h->name, sizeof(h->name), "%.100s:%d", o->hosts[i].host, o->hosts[i].port);
	}
}

static int init_local(struct fs_vision *v, const struct fs_vision_local_opts *o, struct fs_errbuf *e)
{
	struct fs_host *h = &v->hosts[v->n_hosts++];
	h->v = v;
	h->state = o->elastic ? FS_HOST_UP : FS_HOST_STARTING;
	h->since = fs_now();
	snprintf(h->name, sizeof(h->name), "local");
	h->wake = fs_wake_open();
	if (h->wake < 0)
		return fs_fail_errno(e, FS_EIO, "can not open an eventfd");
	return fs_local_create(h, o, &v->local, e);
}

static int random_lease(char lease[65], struct fs_errbuf *e)
{
	uint8_t raw[16];
	if (getrandom(raw, sizeof(raw), 0) != (ssize_t)sizeof(raw))
		return fs_fail_errno(e, FS_EIO, "can not get random bytes");
	for (size_t i = 0; i < sizeof(raw); i++)
		snprintf(lease + 2 * i, 3, "%02x", raw[i]);
	return FS_OK;
}

static void put_defaults(struct fs_vision_opts *o)
{
	o->connect_timeout_ms = o->connect_timeout_ms > 0 ? o->connect_timeout_ms : 3000;
	o->ping_interval_ms = o->ping_interval_ms > 0 ? o->ping_interval_ms : 5000;
	o->dead_after_ms = o->dead_after_ms > 0 ? o->dead_after_ms : 15000;
	o->encode_timeout_ms = o->encode_timeout_ms > 0 ? o->encode_timeout_ms : 300000;
}

int fs_vision_create(const struct fs_vision_opts *o, struct fs_vision **out, struct fs_errbuf *e)
{
	if (!o->local && (o->n_hosts < 1 || o->n_hosts > FS_VISION_MAX_HOSTS))
		return fs_fail(e, FS_EINVAL, "%zu vision hosts are named; 1 to %d are possible", o->n_hosts,
		        FS_VISION_MAX_HOSTS);
	if (o->fingerprint && strlen(o->fingerprint) >= sizeof((*out)->fingerprint))
		return fs_fail(e, FS_EINVAL, "the fingerprint of the mmproj is too long");
	struct fs_vision *v = calloc(1, sizeof(*v));
	if (!v)
		return fs_fail(e, FS_ENOMEM, "out of memory");
	pthread_mutex_init(&v->lock, NULL);
	v->o = *o;
	put_defaults(&v->o);
	snprintf(v->program, sizeof(v->program), "%s", o->program ? o->program : "farsight-server");
	snprintf(v->fingerprint, sizeof(v->fingerprint), "%s", o->fingerprint ? o->fingerprint : "");
	v->news = fs_wake_open();
	int rc = v->news < 0 ? fs_fail_errno(e, FS_EIO, "can not open an eventfd") : fs_ssh_init(e);
	if (!rc)
		rc = random_lease(v->lease, e);
	if (!rc && o->local)
		rc = init_local(v, o->local, e);
	for (size_t i = 0; i < o->n_hosts && !o->local && !rc; i++)
		rc = init_host(v, &o->hosts[i], e);
	if (!rc)
		name_hosts(v, o);
	for (size_t i = 0; i < v->n_hosts && !rc; i++) {
		char name[16];
		snprintf(name, sizeof(name), "fs-host-%zu", i);
		rc = v->local ? fs_thread_start(&v->hosts[i].thread, "fs-local", fs_local_run, v->local, e)
		              : fs_thread_start(&v->hosts[i].thread, name, fs_host_run, &v->hosts[i], e);
		v->n_started += rc == FS_OK;
	}
	if (rc) {
		fs_vision_destroy(v);
		return rc;
	}
	*out = v;
	return FS_OK;
}

void fs_vision_destroy(struct fs_vision *v)
{
	if (!v)
		return;
	atomic_store(&v->stopping, true);
	pthread_mutex_lock(&v->lock);
	for (size_t i = 0; i < v->n_started; i++) {
		for (struct fs_vision_job *j = v->hosts[i].jobs.first; j; j = j->next)
			fs_job_end_locked(j, FS_EUNAVAILABLE, "the server is shutting down");
		fs_wake(v->hosts[i].wake);
	}
	while (v->parked.first)
		fs_job_end_locked(v->parked.first, FS_EUNAVAILABLE, "the server is shutting down");
	pthread_mutex_unlock(&v->lock);
	for (size_t i = 0; i < v->n_started; i++)
		pthread_join(v->hosts[i].thread, NULL);
	pthread_mutex_lock(&v->lock);
	v->destroyed = true;
	bool last = v->n_jobs == 0; /* else the owner of the last job frees it */
	pthread_mutex_unlock(&v->lock);
	if (last)
		fs_vision_free(v);
}

void fs_vision_free(struct fs_vision *v)
{
	for (size_t i = 0; i < v->n_hosts; i++) {
		struct fs_host *h = &v->hosts[i];
		if (h->wake >= 0)
			close(h->wake);
		free((char *)h->ssh.host);
		free((char *)h->ssh.identity);
		free((char *)h->ssh.known_hosts);
		free((char *)h->ssh.config_file);
		free((char *)h->ssh.command);
	}
	fs_local_destroy(v->local);
	if (v->news >= 0)
		close(v->news);
	pthread_mutex_destroy(&v->lock);
	free(v);
}

int fs_vision_news(const struct fs_vision *v)
{
	return v->news;
}

void fs_vision_identity(struct fs_vision *v, char out[FS_VISION_IDENTITY])
{
	pthread_mutex_lock(&v->lock);
	if (v->local) /* what it is started with says all */
		snprintf(out, FS_VISION_IDENTITY, "local %s limits %d %d", v->fingerprint, v->o.min_tokens,
		        v->o.max_tokens);
	else
		snprintf(out, FS_VISION_IDENTITY, "remote %s %s limits %d %d of %d %d",
		        v->o.f16 ? "f16" : "f32", v->fingerprint, v->o.min_tokens, v->o.max_tokens,
		        v->last_limits.min_tokens, v->last_limits.max_tokens);
	pthread_mutex_unlock(&v->lock);
}

static void describe_host_locked(const struct fs_host *h, int64_t now, struct fs_host_status *s)
{
	int64_t pause = h->state == FS_HOST_DOWN ? h->next_attempt : h->benched_until;
	*s = (struct fs_host_status){.state = h->state,
	        .n_embd = h->facts.n_embd,
	        .min_tokens = h->facts.min_tokens,
	        .max_tokens = h->facts.max_tokens,
	        .vram_free_mb = h->facts.vram_free_mb,
	        .vram_total_mb = h->facts.vram_total_mb,
	        .rtt_ms = h->rtt_ms,
	        .encodes = h->encodes,
	        .bytes_up = h->bytes_up,
	        .bytes_down = h->bytes_down,
	        .retries = h->retries,
	        .hedged = h->hedged,
	        .hedge_wins = h->hedge_wins,
	        .picture_ms = h->speed.picture_ms,
	        .bytes_per_s = h->speed.byte_ms > 0 ? 1000 / h->speed.byte_ms : 0,
	        .outstanding = h->outstanding,
	        .since = h->since,
	        .benched_until = pause > now ? pause : 0};
	for (size_t i = 0; i < FS_N_HOST_ERRORS; i++) {
		s->errors_by[i] = h->errors[i];
		if (i != FS_HOST_ERR_CONNECT && i != FS_HOST_ERR_PICTURE)
			s->errors += h->errors[i];
	}
	snprintf(s->host, sizeof(s->host), "%s", h->name);
	snprintf(s->cause, sizeof(s->cause), "%s", h->cause);
	snprintf(s->device, sizeof(s->device), "%s", h->facts.device);
	snprintf(s->fingerprint, sizeof(s->fingerprint), "%s", h->facts.fingerprint);
}

size_t fs_vision_status(struct fs_vision *v, struct fs_host_status *out, size_t cap)
{
	int64_t now = fs_now();
	pthread_mutex_lock(&v->lock);
	size_t n = FS_MIN(v->n_hosts, cap);
	for (size_t i = 0; i < n; i++)
		describe_host_locked(&v->hosts[i], now, &out[i]);
	pthread_mutex_unlock(&v->lock);
	return n;
}
