/*
 * vision: the hosts together: creation and end, what is told of them. Its functions run on callers'
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

const char *fs_host_time_name(enum fs_host_time t)
{
	static const char *const names[] = {"queue", "transfer", "encode"};
	_Static_assert(FS_ARRAY_LEN(names) == FS_N_HOST_TIMES, "a name for each");
	return (size_t)t < FS_ARRAY_LEN(names) ? names[t] : "unknown";
}

double fs_host_bucket_bound(size_t i)
{
	return 0.001 * (double)(1u << i);
}

/* ---- life ---- */

static int init_local(struct fs_vision *v, const struct fs_vision_local_opts *o, struct fs_errbuf *e)
{
	struct fs_host *h = &v->hosts[v->n_hosts++];
	h->v = v;
	h->use = FS_SLOT_LIVE;
	h->state = o->elastic ? FS_HOST_UP : FS_HOST_STARTING;
	h->since = fs_now();
	snprintf(h->name, sizeof(h->name), "local");
	h->wake = fs_wake_open();
	if (h->wake < 0)
		return fs_fail_errno(e, FS_EIO, "can not open an eventfd");
	int rc = fs_local_create(h, o, &v->local, e);
	if (!rc)
		rc = fs_thread_start(&h->thread, "fs-local", fs_local_run, v->local, e);
	h->started = rc == FS_OK;
	return rc;
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
	if (!rc)
		rc = o->local ? init_local(v, o->local, e) : fs_hosts_create(v, o, e);
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
	for (size_t i = 0; i < v->n_hosts; i++) {
		for (struct fs_vision_job *j = v->hosts[i].jobs.first; j; j = j->next)
			fs_job_end_locked(j, FS_EUNAVAILABLE, "the server is shutting down");
		if (v->hosts[i].started)
			fs_wake(v->hosts[i].wake);
	}
	while (v->parked.first)
		fs_job_end_locked(v->parked.first, FS_EUNAVAILABLE, "the server is shutting down");
	pthread_mutex_unlock(&v->lock);
	for (size_t i = 0; i < v->n_hosts; i++)
		if (v->hosts[i].started)
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
	fs_local_destroy(v->local);
	for (size_t i = 0; i < v->n_hosts; i++)
		fs_host_finish(&v->hosts[i]);
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
	char unknown[24];
	pthread_mutex_lock(&v->lock);
	/* what was encoded before the model of that time was known is not taken for the next one's */
	snprintf(unknown, sizeof(unknown), "unknown %u", v->unbound);
	if (v->local) /* what it is started with says all */
		snprintf(out, FS_VISION_IDENTITY, "local %s limits %d %d", v->fingerprint, v->o.min_tokens,
		        v->o.max_tokens);
	else
		snprintf(out, FS_VISION_IDENTITY, "remote %s %s limits %d %d of %d %d",
		        v->o.f16 ? "f16" : "f32", *v->fingerprint ? v->fingerprint : unknown, v->o.min_tokens,
		        v->o.max_tokens, v->last_limits.min_tokens, v->last_limits.max_tokens);
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
	memcpy(s->times, h->times, sizeof(s->times));
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
	const struct fs_host *in_order[FS_VISION_MAX_HOSTS] = {NULL};
	size_t n = 0;
	pthread_mutex_lock(&v->lock);
	for (size_t i = 0; i < v->n_hosts; i++)
		if (fs_host_is_live(&v->hosts[i]))
			in_order[v->hosts[i].order] = &v->hosts[i];
	for (size_t i = 0; i < FS_ARRAY_LEN(in_order) && n < cap; i++)
		if (in_order[i])
			describe_host_locked(in_order[i], now, &out[n++]);
	pthread_mutex_unlock(&v->lock);
	return n;
}

bool fs_vision_has_hosts(struct fs_vision *v)
{
	bool any = false;
	if (!v)
		return false;
	pthread_mutex_lock(&v->lock);
	for (size_t i = 0; i < v->n_hosts && !any; i++)
		any = fs_host_is_live(&v->hosts[i]);
	pthread_mutex_unlock(&v->lock);
	return any;
}

size_t fs_vision_leaving(struct fs_vision *v)
{
	size_t n = 0;
	pthread_mutex_lock(&v->lock);
	for (size_t i = 0; i < v->n_hosts; i++)
		n += v->hosts[i].use == FS_SLOT_LEAVING;
	pthread_mutex_unlock(&v->lock);
	return n;
}
