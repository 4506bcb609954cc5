/*
 * spread: which host has which job, and what is remembered of hosts for that. pool.h has the arithmetic; here
 * it meets the lists. Its functions run on callers' threads and on the hosts', all under the lock.
 */
#include "server/vision/internal.h"

#include <stdio.h>
#include <string.h>
#include <sys/random.h>

static size_t index_of(const struct fs_host *h)
{
	return (size_t)(h - h->v->hosts);
}

static size_t unsent_bytes(const struct fs_host *h)
{
	size_t n = 0;
	for (const struct fs_vision_job *j = h->jobs.first; j; j = j->next)
		n += j->done || j->stage > FS_JOB_SENDING ? 0
		                                          : j->n - (j->stage == FS_JOB_SENDING ? j->sent : 0);
	return n;
}

static void describe_locked(const struct fs_vision *v, struct fs_pool *p)
{
	int32_t n_embd = v->o.n_embd;
	p->n = v->n_hosts;
	p->rows = v->rows;
	p->now = fs_now();
	for (size_t i = 0; i < v->n_hosts; i++) {
		const struct fs_host *h = &v->hosts[i];
		p->hosts[i] = (struct fs_pool_host){.up = fs_host_is_live(h) && h->state == FS_HOST_UP,
		        .on_trial = h->fails > 0,
		        .benched_until = h->benched_until,
		        .max_bytes = (uint64_t)FS_MAX(h->facts.max_picture_bytes, (int64_t)0),
		        .queued = h->outstanding,
		        .sent = h->ahead,
		        .unsent = unsent_bytes(h),
		        .rtt_ms = h->rtt_ms,
		        .speed = h->speed};
		n_embd = n_embd ? n_embd : h->facts.n_embd;
	}
	p->row_bytes = (size_t)n_embd * (v->o.f16 ? 2 : 4);
}

struct fs_host *fs_vision_pick_locked(const struct fs_vision *v, size_t picture_bytes, uint32_t without)
{
	struct fs_pool p;
	describe_locked(v, &p);
	int i = fs_pool_choose(&p, picture_bytes, without);
	return i < 0 ? NULL : (struct fs_host *)&v->hosts[i];
}

void fs_vision_assign_locked(struct fs_host *h, struct fs_vision_job *j)
{
	j->host = h;
	j->stage = FS_JOB_WAITING;
	h->outstanding++;
	fs_jobs_append(&h->jobs, j);
	fs_wake(h->wake);
}

/* ---- what was seen of a host ---- */

bool fs_host_has_room_locked(const struct fs_host *h, const struct fs_vision_job *j)
{
	struct fs_pool p;
	if (h->ahead == 0)
		return true;
	describe_locked(h->v, &p);
	return h->ahead < fs_pool_ahead(&p, index_of(h), j->n);
}

void fs_host_begins_locked(struct fs_vision_job *j)
{
	struct fs_host *h = j->host;
	struct fs_pool p;
	h->ahead++;
	j->begun_at = fs_now();
	j->hedge_at = FS_NEVER;
	if (h->v->o.hedge <= 0 || j->first || j->hedged)
		return;
	describe_locked(h->v, &p);
	double usual = fs_pool_usual_ms(&p, index_of(h), j->n);
	if (usual > 0)
		j->hedge_at = p.now + (int64_t)(h->v->o.hedge * FS_MAX(usual, FS_VISION_HEDGE_MIN_MS) *
		                                (double)FS_MS);
}

void fs_host_sent_locked(struct fs_vision_job *j)
{
	j->sent_at = fs_now();
}

void fs_host_answers_locked(struct fs_vision_job *j)
{
	struct fs_host *h = j->host;
	int64_t now = fs_now(), since = FS_MAX(j->sent_at, h->last_rows); /* before, it did another one */
	fs_pool_saw_encode(&h->speed, (double)(now - since) / (double)FS_MS, j->head.shape.n_tokens, now);
	h->v->rows = fs_pool_mean(h->v->rows, j->head.shape.n_tokens);
	h->last_rows = j->rows_at = now;
}

static void took(struct fs_host_times *t, int64_t ns)
{
	double s = (double)FS_MAX(ns, (int64_t)0) / (double)FS_SEC;
	size_t i = 0;
	while (i < FS_HOST_BUCKETS && s > fs_host_bucket_bound(i))
		i++;
	t->buckets[i]++;
	t->count++;
	t->sum += s;
	t->mean_ms = fs_pool_mean(t->mean_ms, s * 1000);
}

/* What the host says that it did is part of the time between the last byte there and the first byte back. */
static void time_locked(struct fs_host *h, const struct fs_vision_job *j)
{
	int64_t away = j->rows_at - j->sent_at, us = FS_SEC / 1000000;
	int64_t queue = FS_MIN((int64_t)j->head.queue_us * us, away);
	int64_t encode = FS_MIN((int64_t)j->head.encode_us * us, away - queue);
	int64_t moving = (j->sent_at - j->begun_at) + (away - queue - encode) + (fs_now() - j->rows_at);
	took(&h->times[FS_HOST_TIME_QUEUE], j->begun_at - j->waits_since + queue);
	took(&h->times[FS_HOST_TIME_TRANSFER], moving);
	took(&h->times[FS_HOST_TIME_ENCODE], encode);
}

void fs_host_did_locked(struct fs_vision_job *j)
{
	struct fs_host *h = j->host;
	if (j->rows_at)
		time_locked(h, j);
	h->encodes++;
	h->fails = 0;
	h->benched_until = 0;
	if (j->rows_at)
		fs_pool_saw_transfer(&h->speed, (double)(fs_now() - j->rows_at) / (double)FS_MS, j->need);
}

void fs_host_failed_locked(struct fs_host *h)
{
	uint16_t chance = 0x8000;
	if (getrandom(&chance, sizeof(chance), GRND_NONBLOCK) < 0)
		chance = 0x8000;
	h->fails = FS_MIN(h->fails + 1, 1000);
	h->benched_until = fs_deadline_ms(
	        fs_pool_backoff_ms(h->fails, FS_VISION_BENCH_FIRST_MS, FS_VISION_BENCH_MAX_MS, chance));
}

/* ---- waiting jobs ---- */

/* Whether a host may be up soon: its first attempt, or the first one after a loss, is going on, or its
 * encoder starts. */
bool fs_vision_hope_locked(const struct fs_vision *v, bool *starting)
{
	bool hope = false;
	*starting = false;
	for (size_t i = 0; i < v->n_hosts; i++) {
		const struct fs_host *h = &v->hosts[i];
		hope = hope || (fs_host_is_live(h) && h->state == FS_HOST_CONNECTING);
		*starting = *starting || (fs_host_is_live(h) && h->state == FS_HOST_STARTING);
	}
	return hope || *starting;
}

static bool is_waking(const struct fs_host *h, int64_t now)
{
	return fs_host_is_live(h) && h->state != FS_HOST_UP && h->woken_at &&
	       now < h->woken_at + FS_VISION_WOL_HOPE_MS * FS_MS;
}

int fs_vision_retry_after_s(struct fs_vision *v)
{
	int s = 0;
	pthread_mutex_lock(&v->lock);
	for (size_t i = 0; i < v->n_hosts; i++)
		if (is_waking(&v->hosts[i], fs_now()))
			s = FS_VISION_WOL_RETRY_S;
	pthread_mutex_unlock(&v->lock);
	return s;
}

void fs_vision_causes_locked(const struct fs_vision *v, char *out, size_t cap)
{
	size_t n = 0;
	int64_t now = fs_now();
	out[0] = '\0';
	for (size_t i = 0; i < v->n_hosts && n < cap; i++) {
		const struct fs_host *h = &v->hosts[i];
		if (!fs_host_is_live(h))
			continue;
		const char *cause = *h->cause                        ? h->cause
		                    : h->state == FS_HOST_CONNECTING ? "still connecting"
		                                                     : fs_host_state_name(h->state);
		int r = snprintf(out + n, cap - n, "%s%s: %s%s", n ? "; " : "", h->name,
		        is_waking(h, now) ? "it was sent a wake-up packet, try again in a moment; " : "",
		        cause);
		n += r > 0 ? (size_t)r : 0;
	}
	if (n == 0)
		snprintf(out, cap, "no vision host is configured any more");
}

int64_t fs_vision_rouse_locked(struct fs_vision *v)
{
	int64_t now = fs_now(), until = 0;
	for (size_t i = 0; i < v->n_hosts; i++) {
		struct fs_host *h = &v->hosts[i];
		if (!fs_host_is_live(h) || !h->has_wol || h->state == FS_HOST_UP ||
		        h->state == FS_HOST_STARTING || !h->asleep)
			continue;
		if (!h->woken_at || now >= h->woken_at + FS_VISION_WOL_EVERY_MS * FS_MS) {
			h->woken_at = now;
			h->wol_due = true;
			fs_wake(h->wake);
		}
		until = FS_MAX(until, h->woken_at + v->o.wol_wait_ms * FS_MS);
	}
	return until > now ? until : 0;
}

void fs_vision_rouse(struct fs_vision *v)
{
	pthread_mutex_lock(&v->lock);
	fs_vision_rouse_locked(v);
	pthread_mutex_unlock(&v->lock);
}

/* To a host that has not lost it yet; else to any. */
static struct fs_host *host_for_locked(const struct fs_vision *v, const struct fs_vision_job *j)
{
	struct fs_host *h = fs_vision_pick_locked(v, j->n, j->tried);
	return h || !j->tried ? h : fs_vision_pick_locked(v, j->n, 0);
}

static void review_parked_locked(struct fs_vision *v)
{
	bool starting, hope = fs_vision_hope_locked(v, &starting);
	int64_t now = fs_now();
	for (struct fs_vision_job *j = v->parked.first, *next; j; j = next) {
		next = j->next;
		struct fs_host *h = now >= j->not_before && !j->twin ? host_for_locked(v, j) : NULL;
		if (!h && !hope && j->tries == 0 && !j->wait_for_wake)
			j->wait_for_wake = fs_vision_rouse_locked(v);
		if (h) {
			fs_jobs_remove(&v->parked, j);
			fs_vision_assign_locked(h, j);
		} else if (!hope && j->tries == 0 && now >= j->wait_for_wake) {
			char text[480];
			fs_vision_causes_locked(v, text, sizeof(text));
			fs_job_end_locked(j, FS_EUNAVAILABLE, "%s", text);
		} else {
			pthread_cond_broadcast(&j->cond); /* its times may have changed */
		}
	}
}

/* The last one that waits on a host and may go to another. */
static struct fs_vision_job *last_waiting(const struct fs_host *from, const struct fs_host *to)
{
	struct fs_vision_job *j = from->jobs.last;
	while (j && (j->stage != FS_JOB_WAITING || j->done || j->first || (j->tried >> index_of(to) & 1)))
		j = j->prev;
	return j;
}

/* A host that came up, or was faster than it was thought, takes over what waits elsewhere. */
static bool take_over_locked(struct fs_host *to)
{
	struct fs_vision *v = to->v;
	struct fs_pool p;
	uint32_t givers = 0;
	for (size_t i = 0; i < v->n_hosts; i++)
		if (&v->hosts[i] != to && last_waiting(&v->hosts[i], to))
			givers |= 1u << i;
	if (!givers)
		return false;
	describe_locked(v, &p);
	int from = fs_pool_giver(&p, index_of(to), 0, givers);
	if (from < 0)
		return false;
	struct fs_vision_job *j = last_waiting(&v->hosts[from], to);
	int64_t most = to->facts.max_picture_bytes;
	if (most > 0 && j->n > (uint64_t)most)
		return false;
	fs_jobs_remove(&v->hosts[from].jobs, j);
	v->hosts[from].outstanding--;
	fs_vision_assign_locked(to, j);
	return true;
}

void fs_vision_review_locked(struct fs_vision *v)
{
	review_parked_locked(v);
	for (size_t i = 0; i < v->n_hosts && v->n_hosts > 1; i++)
		for (int n = 0; n < FS_POOL_MAX_AHEAD && fs_host_is_live(&v->hosts[i]) &&
		                v->hosts[i].state == FS_HOST_UP;
		        n++)
			if (!take_over_locked(&v->hosts[i]))
				break;
}

/* ---- late pictures ---- */

int64_t fs_host_hedge_locked(struct fs_host *h)
{
	int64_t now = fs_now(), next = FS_NEVER;
	if (h->v->o.hedge <= 0)
		return next;
	for (struct fs_vision_job *j = h->jobs.first; j; j = j->next) {
		if (j->done || j->stage == FS_JOB_WAITING || j->hedged || j->hedge_at == FS_NEVER)
			continue;
		if (now >= j->hedge_at) {
			struct fs_host *second =
			        fs_vision_pick_locked(h->v, j->n, j->tried | 1u << index_of(h));
			if (second && now >= second->benched_until)
				fs_job_twin_locked(j, second);
			else
				j->hedge_at = now + FS_VISION_HEDGE_MIN_MS * FS_MS; /* one may come up */
		}
		if (!j->hedged)
			next = FS_MIN(next, j->hedge_at);
	}
	return next;
}
