/*
 * job: one picture on its way to rows. Made and waited for by a request's thread, worked on by the thread of
 * the host it is given to. A cancel ends it at once for its waiter; the host's thread then tells the host and
 * lets go of it. It refuses empty and oversized pictures and more jobs than the limits allow.
 */
#include "server/vision/internal.h"

#include "common/gguf/gguf.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#ifdef __x86_64__
#include <cpuid.h>
#include <immintrin.h>
#endif

void fs_jobs_append(struct fs_job_list *l, struct fs_vision_job *j)
{
	j->next = NULL;
	j->prev = l->last;
	*(l->last ? &l->last->next : &l->first) = j;
	l->last = j;
}

void fs_jobs_remove(struct fs_job_list *l, struct fs_vision_job *j)
{
	*(j->prev ? &j->prev->next : &l->first) = j->next;
	*(j->next ? &j->next->prev : &l->last) = j->prev;
	j->prev = j->next = NULL;
}

void fs_job_unref_locked(struct fs_vision_job *j)
{
	if (--j->refs > 0)
		return;
	struct fs_vision_job *first = j->first;
	if (first) {
		first->twin = NULL;
	} else {
		j->v->n_jobs--;
		j->v->job_bytes -= j->n;
		free(j->bytes);
	}
	fs_rows_unref(j->rows);
	fs_cancel_unref(j->cancel);
	pthread_cond_destroy(&j->cond);
	free(j->data);
	free(j);
	if (first)
		fs_job_unref_locked(first);
}

/* The one end of a job: with rows (taken over), or with the text that it has. */
static void conclude_locked(struct fs_vision_job *j, int rc, struct fs_rows *rows)
{
	j->done = true;
	j->rc = rc;
	j->rows = rows;
	if (j->twin)
		fs_job_end_locked(j->twin, FS_ECANCELLED, "the other host was faster");
	pthread_cond_broadcast(&j->cond);
	if (j->host) {
		fs_wake(j->host->wake);
	} else {
		fs_jobs_remove(&j->v->parked, j);
		fs_job_unref_locked(j); /* the list's; its owner's is still there */
	}
}

void fs_job_end_locked(struct fs_vision_job *j, int rc, const char *fmt, ...)
{
	if (j->done)
		return;
	va_list ap;
	va_start(ap, fmt);
	vsnprintf(j->err.text, sizeof(j->err.text), fmt, ap);
	va_end(ap);
	conclude_locked(j, rc, NULL);
	if (j->first && rc == FS_EINVAL) /* the picture's fault, whoever found it */
		fs_job_end_locked(j->first, rc, "%s", j->err.text);
}

static void leave_host_locked(struct fs_vision_job *j)
{
	struct fs_host *h = j->host;
	fs_jobs_remove(&h->jobs, j);
	h->outstanding--;
	if (j->stage != FS_JOB_WAITING) {
		h->ahead--;
		fs_wake(h->wake); /* there is room for another one */
	}
	j->host = NULL;
	j->stage = FS_JOB_WAITING;
	j->id = 0;
	j->rows_at = 0;
	free(j->data);
	j->data = NULL;
}

/* Its host lost it: j has none now, and one reference for a list. Another host gets it, or it waits for one,
 * or that was one time too many. */
static void try_again_locked(struct fs_vision_job *j, enum fs_host_error cause)
{
	struct fs_vision *v = j->v;
	bool may = ++j->tries <= FS_VISION_MAX_RETRIES;
	j->waits_since = fs_now();
	struct fs_host *other = may && !j->twin ? fs_vision_pick_locked(v, j->n, j->tried) : NULL;
	if (other) {
		fs_vision_assign_locked(other, j);
		return;
	}
	int64_t now = fs_now();
	j->park_until = now + (v->o.connect_timeout_ms + FS_VISION_LOST_EXTRA_MS) * FS_MS;
	j->not_before = now + FS_VISION_RETRY_PAUSE_MS * FS_MS;
	fs_jobs_append(&v->parked, j);
	/* bad rows, and an encoder that hangs, are not asked for twice of the same host */
	bool same_host = cause == FS_HOST_ERR_LOST || cause == FS_HOST_ERR_ENCODER;
	if (!j->twin && (!may || !same_host)) {
		char text[sizeof(j->err.text)];
		memcpy(text, j->err.text, sizeof(text));
		fs_job_end_locked(
		        j, cause == FS_HOST_ERR_TIMEOUT ? FS_ETIMEOUT : FS_EUNAVAILABLE, "%s", text);
		return;
	}
	pthread_cond_broadcast(&j->cond); /* its waiter minds the two times */
}

/* A twin that came to nothing. When its first has been lost meanwhile, that was waiting for this. */
static void drop_twin_locked(struct fs_vision_job *j, enum fs_host_error cause)
{
	struct fs_vision_job *first = j->first;
	if (!j->done && !first->done && !first->host) {
		first->twin = NULL;
		fs_jobs_remove(&first->v->parked, first);
		first->tries--; /* the loss was counted when it happened */
		try_again_locked(first, cause);
	}
	j->done = true;
	fs_job_unref_locked(j);
}

void fs_job_unassign_locked(struct fs_vision_job *j)
{
	leave_host_locked(j);
	if (j->first)
		drop_twin_locked(j, FS_HOST_ERR_LOST);
	else if (j->done)
		fs_job_unref_locked(j);
	else
		fs_jobs_append(&j->v->parked, j);
}

void fs_job_lost_locked(struct fs_vision_job *j, enum fs_host_error cause, const char *why)
{
	struct fs_host *h = j->host;
	leave_host_locked(j);
	if (j->done) {
		fs_job_unref_locked(j);
		return;
	}
	h->errors[cause]++;
	struct fs_vision_job *owner = j->first ? j->first : j;
	snprintf(owner->err.text, sizeof(owner->err.text), "%.120s: %.380s", h->name, why);
	owner->tried |= 1u << (h - h->v->hosts);
	if (j->first) {
		drop_twin_locked(j, cause);
		return;
	}
	try_again_locked(j, cause);
	h->retries += !j->done; /* its owner has it still */
}

/* ---- rows ---- */

#ifdef __x86_64__
__attribute__((target("avx,f16c"))) static size_t widen_f16c(const uint16_t *in, float *out, size_t n)
{
	size_t i = 0;
	for (; i + 8 <= n; i += 8) /* reads before it writes: the output may overtake the input only behind
	                              its reading point */
		_mm256_storeu_ps(
		        out + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)(in + i))));
	return i;
}
#endif

static size_t widen_fast(const uint16_t *in, float *out, size_t n)
{
#ifdef __x86_64__
	unsigned a, b, c = 0, d;
	if (__builtin_cpu_supports("avx") && __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C))
		return widen_f16c(in, out, n);
#endif
	return 0;
}

/* n halves in the second half of the buffer to n floats in all of it, front to back in place. */
static void widen(uint8_t *data, size_t n)
{
	float *out = (float *)(void *)data;
	const uint16_t *in = (const uint16_t *)(const void *)(data + n * sizeof(uint16_t));
	for (size_t i = widen_fast(in, out, n); i < n; i++) {
		uint16_t h;
		memcpy(&h, in + i, sizeof(h));
		float f = fs_f16_to_f32(h);
		memcpy(out + i, &f, sizeof(f));
	}
}

void fs_job_received(struct fs_vision_job *j, size_t n)
{
	j->got += n;
	if (j->head.dtype != FS_WIRE_F32)
		return; /* halves are checked once they are widened */
	const float *rows = (const float *)(const void *)j->data;
	size_t whole = j->got / sizeof(float);
	if (!fs_rows_check_finite(rows + j->n_finite, whole - j->n_finite, NULL))
		j->n_finite = whole;
}

void fs_job_complete(struct fs_vision_job *j)
{
	struct fs_vision *v = j->v;
	struct fs_host *h = j->host;
	const struct fs_rows_shape *s = &j->head.shape;
	size_t n = (size_t)s->n_tokens * (size_t)s->n_embd;
	struct fs_rows *rows = NULL;
	struct fs_errbuf e = {""};
	if (j->head.dtype == FS_WIRE_F16)
		widen(j->data, n);
	int rc = j->n_finite < n ? fs_rows_check_finite((const float *)(const void *)j->data, n, &e) : FS_OK;
	if (!rc) {
		rc = fs_rows_create(s, (float *)(void *)j->data, j->key, &rows);
		j->data = NULL; /* taken over, on failure too */
	}
	pthread_mutex_lock(&v->lock);
	if (rc) {
		fs_host_failed_locked(h);
		fs_job_lost_locked(j, FS_HOST_ERR_ROWS, *e.text ? e.text : "out of memory");
		fs_vision_review_locked(v);
		pthread_mutex_unlock(&v->lock);
		return;
	}
	struct fs_vision_job *owner = j->first ? j->first : j;
	snprintf(rows->host, sizeof(rows->host), "%.63s", h->name);
	rows->encode_ms = j->head.encode_us / 1000.0;
	rows->queue_ms = j->head.queue_us / 1000.0;
	rows->total_ms = (double)(fs_now() - owner->submitted) / (double)FS_MS;
	fs_host_did_locked(j);
	if (!owner->done) {
		h->hedge_wins += owner != j;
		conclude_locked(owner, FS_OK, rows);
	} else {
		fs_rows_unref(rows);
	}
	leave_host_locked(j);
	j->done = true; /* a twin was ended with its first, and this changes nothing then */
	fs_job_unref_locked(j);
	fs_vision_review_locked(v);
	pthread_mutex_unlock(&v->lock);
}

void fs_job_twin_locked(struct fs_vision_job *j, struct fs_host *second)
{
	struct fs_vision_job *t = calloc(1, sizeof(*t));
	j->hedged = true; /* once, also when it does not come to it */
	if (!t || fs_cond_init(&t->cond)) {
		free(t);
		return;
	}
	t->v = j->v;
	t->refs = 1; /* the list's */
	t->first = j;
	t->bytes = j->bytes;
	t->n = j->n;
	memcpy(t->key, j->key, sizeof(t->key));
	t->params = j->params;
	t->submitted = t->waits_since = fs_now();
	t->deadline = j->deadline;
	j->refs++;
	j->twin = t;
	j->host->hedged++;
	fs_vision_assign_locked(second, t);
}

/* ---- the owner's side ---- */

static void on_cancel(void *arg)
{
	struct fs_vision_job *j = arg;
	pthread_mutex_lock(&j->v->lock);
	fs_job_end_locked(j, FS_ECANCELLED, "cancelled");
	pthread_mutex_unlock(&j->v->lock);
}

static int admit_locked(struct fs_vision *v, size_t n, int64_t *wait_for_wake, struct fs_errbuf *e)
{
	if (atomic_load(&v->stopping))
		return fs_fail(e, FS_EUNAVAILABLE, "the server is shutting down");
	if (v->n_jobs >= FS_VISION_MAX_JOBS || v->job_bytes + n > FS_VISION_MAX_JOB_BYTES)
		return fs_fail(e, FS_EUNAVAILABLE, "too many pictures are being encoded; try again shortly");
	struct fs_host *h = fs_vision_pick_locked(v, n, 0);
	bool starting;
	if (h || fs_vision_hope_locked(v, &starting))
		return FS_OK;
	for (size_t i = 0; i < v->n_hosts; i++)
		if (fs_host_is_live(&v->hosts[i]) && v->hosts[i].state == FS_HOST_UP)
			return fs_fail(e, FS_ELIMIT, "%.120s takes pictures of at most %lld bytes",
			        v->hosts[i].name, (long long)v->hosts[i].facts.max_picture_bytes);
	for (size_t i = 0; i < v->n_hosts; i++)
		if (fs_host_is_live(&v->hosts[i])) {
			v->hosts[i].kicked = true; /* refused now, but the next one may find it up */
			fs_wake(v->hosts[i].wake);
		}
	*wait_for_wake = fs_vision_rouse_locked(v);
	if (*wait_for_wake)
		return FS_OK;
	char text[480];
	fs_vision_causes_locked(v, text, sizeof(text));
	return fs_fail(e, FS_EUNAVAILABLE, "%s", text);
}

static struct fs_vision_job *create(struct fs_vision *v, const void *bytes, size_t n, const uint8_t key[32],
        const struct fs_encode_params *p, struct fs_cancel *cancel)
{
	struct fs_vision_job *j = calloc(1, sizeof(*j));
	uint8_t *copy = malloc(n);
	if (!j || !copy || fs_cond_init(&j->cond)) {
		free(j);
		free(copy);
		return NULL;
	}
	memcpy(copy, bytes, n);
	j->v = v;
	j->refs = 2; /* the owner's and the list's */
	j->cancel = fs_cancel_ref(cancel);
	j->hook = (struct fs_cancel_hook){.fn = on_cancel, .arg = j};
	j->bytes = copy;
	j->n = n;
	memcpy(j->key, key, sizeof(j->key));
	j->params = (struct fs_encode_params){v->o.min_tokens, v->o.max_tokens};
	if (p && p->max_tokens > 0)
		j->params.max_tokens =
		        v->o.max_tokens > 0 ? FS_MIN(p->max_tokens, v->o.max_tokens) : p->max_tokens;
	if (p && p->min_tokens > 0)
		j->params.min_tokens = p->min_tokens;
	if (j->params.max_tokens > 0)
		j->params.min_tokens = FS_MIN(j->params.min_tokens, j->params.max_tokens);
	j->submitted = j->waits_since = fs_now();
	int64_t own = j->submitted + v->o.encode_timeout_ms * FS_MS;
	j->deadline = FS_MIN(own, fs_cancel_deadline(cancel));
	j->park_until = j->submitted + v->o.connect_timeout_ms * FS_MS;
	return j;
}

int fs_vision_submit(struct fs_vision *v, const void *bytes, size_t n, const uint8_t key[32],
        const struct fs_encode_params *p, struct fs_cancel *cancel, struct fs_vision_job **out,
        struct fs_errbuf *e)
{
	if (n == 0 || n > FS_PICTURE_MAX)
		return fs_fail(
		        e, FS_EINVAL, "a picture of %zu bytes; 1 to %zu are possible", n, FS_PICTURE_MAX);
	if (fs_cancelled(cancel))
		return fs_fail(e, FS_ECANCELLED, "cancelled");
	struct fs_vision_job *j = create(v, bytes, n, key, p, cancel);
	if (!j)
		return fs_fail(e, FS_ENOMEM, "out of memory");
	pthread_mutex_lock(&v->lock);
	int rc = admit_locked(v, n, &j->wait_for_wake, e);
	v->n_jobs++;
	v->job_bytes += n;
	if (rc) {
		j->refs = 1;
		fs_job_unref_locked(j);
	} else {
		fs_jobs_append(&v->parked, j);
		fs_vision_review_locked(v);
	}
	pthread_mutex_unlock(&v->lock);
	if (rc)
		return rc;
	if (!fs_cancel_listen(cancel, &j->hook))
		on_cancel(j); /* it fired in between */
	*out = j;
	return FS_OK;
}

static bool any_up_locked(const struct fs_vision *v)
{
	for (size_t i = 0; i < v->n_hosts; i++)
		if (fs_host_is_live(&v->hosts[i]) && v->hosts[i].state == FS_HOST_UP)
			return true;
	return false;
}

/* When a parked job's waiter must look again. */
static int64_t parked_until_locked(struct fs_vision_job *j)
{
	bool starting = false;
	fs_vision_hope_locked(j->v, &starting);
	int64_t now = fs_now();
	if (now < j->not_before)
		return j->not_before;
	/* an encoder that is being started may take as long as the job may */
	int64_t patience = FS_MAX(j->park_until, j->wait_for_wake);
	int64_t until = starting || j->twin ? j->deadline : FS_MIN(patience, j->deadline);
	if (now < until)
		return until;
	char causes[480], lost[sizeof(j->err.text)];
	fs_vision_causes_locked(j->v, causes, sizeof(causes));
	memcpy(lost, j->err.text, sizeof(lost));
	/* Why no host came back for it is what can be mended; how it was lost explains the wait. */
	if (!j->tries)
		fs_job_end_locked(j, FS_EUNAVAILABLE, "%s", causes);
	else if (any_up_locked(j->v))
		fs_job_end_locked(j, FS_EUNAVAILABLE, "%s", lost);
	else
		fs_job_end_locked(j, FS_EUNAVAILABLE, "%.390s (lost before: %.100s)", causes, lost);
	return now;
}

/* One of those who wait for a job. */
struct waiter {
	struct fs_vision_job *job;
	bool cancelled; /* under the lock */
};

static void on_waiter_cancel(void *arg)
{
	struct waiter *w = arg;
	pthread_mutex_lock(&w->job->v->lock);
	w->cancelled = true;
	pthread_cond_broadcast(&w->job->cond);
	pthread_mutex_unlock(&w->job->v->lock);
}

/* Waits once; fires tokens whose deadlines have passed, and then ends a job that is late. */
static void wait_once_locked(struct fs_vision_job *j, struct fs_cancel *cancel)
{
	struct fs_vision *v = j->v;
	int64_t until = FS_MIN(j->deadline, fs_cancel_deadline(cancel));
	if (!j->host && fs_now() >= j->not_before)
		fs_vision_review_locked(v);
	if (!j->done && !j->host)
		until = FS_MIN(until, parked_until_locked(j));
	if (!j->done && fs_now() < until)
		fs_cond_wait_until(&j->cond, &v->lock, until);
	if (j->done)
		return;
	bool late = fs_now() >= j->deadline;
	pthread_mutex_unlock(&v->lock); /* the hooks of both tokens take it */
	bool over = fs_cancelled(j->cancel);
	fs_cancelled(cancel);
	pthread_mutex_lock(&v->lock);
	if (late && !over)
		fs_job_end_locked(j, FS_ETIMEOUT, "%.120s: the picture was not encoded within %d s",
		        j->host ? j->host->name : "vision", v->o.encode_timeout_ms / 1000);
}

int fs_vision_wait_for(
        struct fs_vision_job *j, struct fs_cancel *cancel, struct fs_rows **rows, struct fs_errbuf *e)
{
	struct fs_vision *v = j->v;
	struct waiter w = {.job = j};
	struct fs_cancel_hook hook = {.fn = on_waiter_cancel, .arg = &w};
	if (!fs_cancel_listen(cancel, &hook))
		return fs_fail(e, FS_ECANCELLED, "cancelled");
	pthread_mutex_lock(&v->lock);
	while (!j->done && !w.cancelled)
		wait_once_locked(j, cancel);
	int rc = j->done ? j->rc : FS_ECANCELLED;
	if (rc == FS_OK)
		*rows = fs_rows_ref(j->rows);
	else
		fs_fail(e, rc, "%s", j->done ? j->err.text : "cancelled");
	pthread_mutex_unlock(&v->lock);
	fs_cancel_unlisten(cancel, &hook);
	return rc;
}

int fs_vision_wait(struct fs_vision_job *j, struct fs_rows **rows, struct fs_errbuf *e)
{
	return fs_vision_wait_for(j, NULL, rows, e);
}

bool fs_vision_job_failed(struct fs_vision_job *j)
{
	pthread_mutex_lock(&j->v->lock);
	bool failed = j->done && j->rc != FS_OK;
	pthread_mutex_unlock(&j->v->lock);
	return failed;
}

void fs_vision_job_destroy(struct fs_vision_job *j)
{
	if (!j)
		return;
	struct fs_vision *v = j->v;
	fs_cancel_unlisten(j->cancel, &j->hook);
	pthread_mutex_lock(&v->lock);
	fs_job_end_locked(j, FS_ECANCELLED, "cancelled");
	fs_job_unref_locked(j);
	bool last = v->destroyed && v->n_jobs == 0;
	pthread_mutex_unlock(&v->lock);
	if (last)
		fs_vision_free(v);
}
