/*
 * The jobs that requests hold, and the life of the whole. A job ends for its waiter the moment its token
 * fires, on whatever thread that is; the thread of the multi handle, woken, then lets go of the transfer.
 */
#include "server/fetch/internal.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void free_fetch(struct fs_fetch *f)
{
	fs_fetch_allow_finish(&f->allow);
	pthread_mutex_destroy(&f->lock);
	free(f);
}

static void free_job(struct fs_fetch_job *j)
{
	fs_transfer_finish(&j->t);
	atomic_fetch_sub(&j->f->budget.used, j->charged);
	fs_cancel_unref(j->cancel);
	pthread_cond_destroy(&j->cond);
	free(j->bytes);
	free(j);
}

void fs_fetch_unref_unlock(struct fs_fetch_job *j)
{
	struct fs_fetch *f = j->f;
	bool last = --j->refs == 0, last_of_all = last && --f->refs == 0;
	pthread_mutex_unlock(&f->lock);
	if (last)
		free_job(j);
	if (last_of_all)
		free_fetch(f);
}

void fs_fetch_end_locked(struct fs_fetch_job *j, int rc, const char *text)
{
	if (j->done)
		return;
	j->done = true;
	j->rc = rc;
	snprintf(j->err.text, sizeof(j->err.text), "%s", text);
	pthread_cond_broadcast(&j->cond);
	curl_multi_wakeup(j->f->multi);
}

bool fs_fetch_end(struct fs_fetch_job *j, int rc, const char *text)
{
	pthread_mutex_lock(&j->f->lock);
	bool was_done = j->done;
	fs_fetch_end_locked(j, rc, text);
	pthread_mutex_unlock(&j->f->lock);
	return !was_done;
}

static void on_cancel(void *arg)
{
	fs_fetch_end(arg, FS_ECANCELLED, "cancelled");
}

void fs_fetch_expire(struct fs_fetch_job *j)
{
	if (fs_cancelled(j->cancel))
		fs_fetch_end(j, FS_ECANCELLED, "cancelled");
	else if (fs_fetch_end(j, FS_ETIMEOUT, FS_FETCH_NOT_FETCHED))
		fs_info("picture URL %s: not fetched within %lld ms", j->shown,
		        (long long)j->f->o.timeout_ms);
}

/* ---- life ---- */

static void set_defaults(struct fs_fetch_opts *o)
{
	o->timeout_ms = o->timeout_ms ? o->timeout_ms : 20000;
	o->connect_timeout_ms = o->connect_timeout_ms ? o->connect_timeout_ms : 5000;
	o->stall_s = o->stall_s ? o->stall_s : 10;
	o->max_active = o->max_active ? o->max_active : 16;
	if (!o->max_total && !fs_mul_size(o->max_bytes, (size_t)o->max_active, &o->max_total))
		o->max_total = SIZE_MAX;
	o->allow = NULL; /* the caller's; kept parsed */
	o->n_allow = 0;
}

static int start(struct fs_fetch *f, struct fs_errbuf *e)
{
	if (curl_global_init(CURL_GLOBAL_DEFAULT))
		return fs_fail(e, FS_EINTERNAL, "libcurl can not be set up");
	f->multi = curl_multi_init();
	int rc = FS_OK;
	if (!f->multi || curl_multi_setopt(f->multi, CURLMOPT_PIPELINING, CURLPIPE_NOTHING))
		rc = fs_fail(e, FS_ENOMEM, "out of memory");
	else
		rc = fs_thread_start(&f->thread, "fetch", fs_fetch_run, f, e);
	if (rc) {
		curl_multi_cleanup(f->multi);
		curl_global_cleanup();
	}
	return rc;
}

int fs_fetch_create(const struct fs_fetch_opts *o, struct fs_fetch **out, struct fs_errbuf *e)
{
	struct fs_fetch *f = calloc(1, sizeof(*f));
	if (!f)
		return fs_fail(e, FS_ENOMEM, "out of memory");
	f->o = *o;
	f->refs = 1;
	pthread_mutex_init(&f->lock, NULL);
	set_defaults(&f->o);
	f->budget.max = f->o.max_total;
	int rc = fs_fetch_allow_init(&f->allow, o->allow, o->n_allow, e);
	if (!rc && f->o.enabled)
		rc = start(f, e);
	if (rc) {
		free_fetch(f);
		return rc;
	}
	*out = f;
	return FS_OK;
}

void fs_fetch_destroy(struct fs_fetch *f)
{
	if (!f)
		return;
	pthread_mutex_lock(&f->lock);
	f->stopping = true;
	if (f->multi)
		curl_multi_wakeup(f->multi);
	pthread_mutex_unlock(&f->lock);
	if (f->multi) {
		pthread_join(f->thread, NULL);
		curl_multi_cleanup(f->multi);
		curl_global_cleanup();
	}
	pthread_mutex_lock(&f->lock);
	bool last = --f->refs == 0;
	pthread_mutex_unlock(&f->lock);
	if (last)
		free_fetch(f);
}

/* ---- the owner's side ---- */

static struct fs_fetch_job *create_job(struct fs_fetch *f, struct fs_fetch_url *url, struct fs_cancel *cancel)
{
	struct fs_fetch_job *j = calloc(1, sizeof(*j));
	if (!j || fs_cond_init(&j->cond)) {
		free(j);
		return NULL;
	}
	j->f = f;
	j->refs = 2;
	j->cancel = fs_cancel_ref(cancel);
	j->hook = (struct fs_cancel_hook){.fn = on_cancel, .arg = j};
	j->submitted = fs_now();
	j->deadline = FS_MIN(fs_deadline_ms(f->o.timeout_ms), fs_cancel_deadline(cancel));
	snprintf(j->shown, sizeof(j->shown), "%s", url->shown);
	fs_transfer_init(&j->t, &f->o, &f->allow, &f->budget, url);
	return j;
}

static int enqueue(struct fs_fetch *f, struct fs_fetch_job *j, struct fs_errbuf *e)
{
	int rc = FS_OK;
	pthread_mutex_lock(&f->lock);
	if (f->stopping)
		rc = fs_fail(e, FS_EUNAVAILABLE, "the server is shutting down");
	else if (f->refs > FS_FETCH_MAX_JOBS)
		rc = fs_fail(e, FS_EUNAVAILABLE, "too many pictures are being fetched; try again shortly");
	if (!rc) {
		f->refs++;
		fs_fetch_append(&f->queue, j);
		curl_multi_wakeup(f->multi);
	}
	pthread_mutex_unlock(&f->lock);
	return rc;
}

int fs_fetch_submit(struct fs_fetch *f, const char *url, struct fs_cancel *cancel, struct fs_fetch_job **out,
        struct fs_errbuf *e)
{
	struct fs_fetch_url u = {0};
	int rc = fs_fetch_url_init(&u, NULL, url, e);
	if (rc)
		return rc;
	if (!f->o.enabled)
		rc = fs_fail(e, FS_EINVAL, "this server fetches no URLs; send the picture as a data: URL");
	else if (fs_cancelled(cancel))
		rc = fs_fail(e, FS_ECANCELLED, "cancelled");
	struct fs_fetch_job *j = rc ? NULL : create_job(f, &u, cancel);
	if (!rc)
		rc = j ? enqueue(f, j, e) : fs_fail(e, FS_ENOMEM, "out of memory");
	fs_fetch_url_finish(&u);
	if (rc) {
		if (j)
			free_job(j);
		return rc;
	}
	if (!fs_cancel_listen(cancel, &j->hook))
		on_cancel(j); /* it fired in between */
	*out = j;
	return FS_OK;
}

int fs_fetch_wait(struct fs_fetch_job *j, uint8_t **bytes, size_t *n, struct fs_errbuf *e)
{
	struct fs_fetch *f = j->f;
	pthread_mutex_lock(&f->lock);
	while (!j->done) {
		if (fs_cond_wait_until(&j->cond, &f->lock, j->deadline) || j->done)
			continue;
		pthread_mutex_unlock(&f->lock);
		fs_fetch_expire(j);
		pthread_mutex_lock(&f->lock);
	}
	int rc = j->rc;
	if (rc == FS_OK) {
		FS_ASSERT(j->bytes);
		*bytes = j->bytes;
		*n = j->n;
		j->bytes = NULL;
		atomic_fetch_sub(&f->budget.used, j->charged);
		j->charged = 0;
	} else {
		fs_fail(e, rc, "%s", j->err.text);
	}
	pthread_mutex_unlock(&f->lock);
	return rc;
}

void fs_fetch_job_destroy(struct fs_fetch_job *j)
{
	if (!j)
		return;
	fs_cancel_unlisten(j->cancel, &j->hook);
	pthread_mutex_lock(&j->f->lock);
	fs_fetch_end_locked(j, FS_ECANCELLED, "cancelled");
	fs_fetch_unref_unlock(j);
}
