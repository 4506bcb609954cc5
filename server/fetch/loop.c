/*
 * The thread of the multi handle. A name look-up can not be interrupted: the transfer of a job that ends
 * during one is put aside until the look-up comes back, and connects to nothing then. Of those there are at
 * most as many as downloads, so that a dead name server can not gather threads.
 */
#include "server/fetch/internal.h"

#include <poll.h>
#include <stdlib.h>

#define IDLE_MS 3600000 /* curl_multi_poll knows no "for ever"; a wake-up ends it */

void fs_fetch_append(struct fs_fetch_list *l, struct fs_fetch_job *j)
{
	j->next = NULL;
	j->prev = l->last;
	*(l->last ? &l->last->next : &l->first) = j;
	l->last = j;
	l->n++;
}

void fs_fetch_take_off(struct fs_fetch_list *l, struct fs_fetch_job *j)
{
	*(j->prev ? &j->prev->next : &l->first) = j->next;
	*(j->next ? &j->next->prev : &l->last) = j->prev;
	j->prev = j->next = NULL;
	l->n--;
}

static bool is_done(struct fs_fetch_job *j)
{
	pthread_mutex_lock(&j->f->lock);
	bool done = j->done;
	pthread_mutex_unlock(&j->f->lock);
	return done;
}

/* The list's reference goes, and with it the thread's hold of the transfer. */
static void drop(struct fs_fetch_job *j)
{
	fs_transfer_stop(&j->t, j->f->multi);
	fs_transfer_finish(&j->t);
	pthread_mutex_lock(&j->f->lock);
	fs_fetch_unref_unlock(j);
}

static void drop_active(struct fs_fetch_job *j)
{
	struct fs_fetch *f = j->f;
	fs_fetch_take_off(&f->active, j);
	if (!j->t.resolving) {
		drop(j);
		return;
	}
	j->t.abandoned = true;
	fs_fetch_append(&f->aside, j);
}

static void log_failure(const struct fs_fetch_job *j, const char *why)
{
	if (j->t.hops)
		fs_info("picture URL %s, redirected to %s: %s", j->shown, j->t.url.shown, why);
	else
		fs_info("picture URL %s: %s", j->shown, why);
}

static void expire_connect(struct fs_fetch_job *j)
{
	if (fs_fetch_end(j, FS_ETIMEOUT, FS_FETCH_NOT_FETCHED))
		log_failure(j, j->t.resolving ? "name not found in time" : "not connected in time");
}

/* Ends what is late and lets go of what has ended. */
static void review_active(struct fs_fetch *f, int64_t *next_look)
{
	for (struct fs_fetch_job *j = f->active.first, *next; j; j = next) {
		next = j->next;
		int64_t now = fs_now();
		if (now >= j->deadline)
			fs_fetch_expire(j);
		else if (now >= j->t.connect_by)
			expire_connect(j);
		if (is_done(j))
			drop_active(j);
		else
			*next_look = FS_MIN(*next_look, FS_MIN(j->deadline, j->t.connect_by));
	}
}

/* The next job of the queue that may begin; those that end there go to `over`. */
static struct fs_fetch_job *take_queued_locked(
        struct fs_fetch *f, struct fs_fetch_list *over, int64_t *next_look)
{
	bool has_place = f->active.n < f->o.max_active && f->aside.n < f->o.max_active;
	for (struct fs_fetch_job *j = f->queue.first, *next; j; j = next) {
		next = j->next;
		bool is_over = j->done || fs_now() >= j->deadline;
		if (is_over || has_place)
			fs_fetch_take_off(&f->queue, j);
		if (is_over)
			fs_fetch_append(over, j);
		else if (has_place)
			return j;
		else
			*next_look = FS_MIN(*next_look, j->deadline);
	}
	return NULL;
}

static void succeed(struct fs_fetch_job *j)
{
	struct fs_fetch *f = j->f;
	size_t n;
	char *bytes = fs_buf_take(&j->t.body, &n);
	char *fitting = bytes ? realloc(bytes, n) : NULL; /* it grew by doubling */
	bytes = fitting ? fitting : bytes;
	pthread_mutex_lock(&f->lock);
	if (!j->done && bytes) {
		j->bytes = (uint8_t *)bytes;
		j->n = n;
		j->charged = j->t.charged; /* given back when they are taken, or with the job */
		j->t.charged = 0;
		bytes = NULL;
	}
	fs_fetch_end_locked(j, j->bytes ? FS_OK : FS_ENOMEM, "out of memory");
	pthread_mutex_unlock(&f->lock);
	free(bytes);
	fs_debug("picture URL %s: %zu bytes in %.0f ms", j->shown, n,
	        (double)(fs_now() - j->submitted) / (double)FS_MS);
}

/* An active job's transfer has come to its end. */
static void finish(struct fs_fetch_job *j, int rc, struct fs_errbuf *e)
{
	if (!rc)
		succeed(j);
	else if (fs_fetch_end(j, rc, e->text))
		log_failure(j, j->t.why);
	fs_fetch_take_off(&j->f->active, j);
	drop(j);
}

static void review_queue(struct fs_fetch *f, int64_t *next_look)
{
	struct fs_fetch_list over = {0};
	for (;;) {
		pthread_mutex_lock(&f->lock);
		struct fs_fetch_job *j = take_queued_locked(f, &over, next_look);
		pthread_mutex_unlock(&f->lock);
		if (!j)
			break;
		struct fs_errbuf e = {""};
		fs_fetch_append(&f->active, j);
		int rc = fs_transfer_start(&j->t, f->multi, j, &e);
		if (rc)
			finish(j, rc, &e);
		else
			*next_look = FS_MIN(*next_look, FS_MIN(j->deadline, j->t.connect_by));
	}
	for (struct fs_fetch_job *j; (j = over.first);) {
		if (!is_done(j))
			fs_fetch_expire(j);
		fs_fetch_take_off(&over, j);
		drop(j);
	}
}

static void hop_ended(struct fs_fetch_job *j, CURLcode code)
{
	struct fs_fetch *f = j->f;
	struct fs_errbuf e = {""};
	bool again;
	if (j->t.abandoned) {
		fs_fetch_take_off(&f->aside, j);
		drop(j);
		return;
	}
	int rc = fs_transfer_result(&j->t, code, &again, &e);
	fs_transfer_stop(&j->t, f->multi);
	if (!rc && again) {
		rc = fs_transfer_start(&j->t, f->multi, j, &e);
		if (!rc)
			return;
	}
	finish(j, rc, &e);
}

/* True when any transfer has ended. */
static bool take_messages(struct fs_fetch *f)
{
	CURLMsg *m;
	int left;
	bool any = false;
	while ((m = curl_multi_info_read(f->multi, &left))) {
		char *tag = NULL;
		if (m->msg != CURLMSG_DONE)
			continue;
		CURLcode code = m->data.result; /* gone with the handle */
		curl_easy_getinfo(m->easy_handle, CURLINFO_PRIVATE, &tag);
		hop_ended((struct fs_fetch_job *)(void *)tag, code);
		any = true;
	}
	return any;
}

static void end_all(struct fs_fetch *f)
{
	struct fs_fetch_list *lists[] = {&f->queue, &f->active, &f->aside};
	pthread_mutex_lock(&f->lock); /* nothing is added any more */
	for (size_t i = 0; i < FS_ARRAY_LEN(lists); i++)
		for (struct fs_fetch_job *j = lists[i]->first; j; j = j->next)
			fs_fetch_end_locked(j, FS_EUNAVAILABLE, "the server is shutting down");
	pthread_mutex_unlock(&f->lock);
	for (size_t i = 0; i < FS_ARRAY_LEN(lists); i++)
		for (struct fs_fetch_job *j; (j = lists[i]->first);) {
			fs_fetch_take_off(lists[i], j);
			drop(j);
		}
}

static bool turn(struct fs_fetch *f)
{
	int64_t next_look = FS_NEVER;
	int running;
	pthread_mutex_lock(&f->lock);
	bool stopping = f->stopping;
	pthread_mutex_unlock(&f->lock);
	if (stopping)
		return false;
	review_active(f, &next_look);
	review_queue(f, &next_look);
	CURLMcode rc = curl_multi_perform(f->multi, &running);
	if (!take_messages(f) && !rc)
		rc = curl_multi_poll(
		        f->multi, NULL, 0, fs_poll_ms(FS_MIN(next_look, fs_deadline_ms(IDLE_MS))), NULL);
	if (rc) {
		fs_error("libcurl: %s", curl_multi_strerror(rc));
		poll(NULL, 0, 100); /* no busy loop while memory is short */
	}
	return true;
}

void *fs_fetch_run(void *arg)
{
	struct fs_fetch *f = arg;
	while (turn(f))
		;
	end_all(f);
	return NULL;
}
