/*
 * local: the thread of the encoder on this machine. It appears as a host named "local": jobs come to its list
 * like to any other, one at a time goes to the encoder (common/encproc drives it), through files in a private
 * folder. An encode on the GPU is preceded by a ticket for the turn, which is waited for without holding
 * anything up. Rows are checked like those from a network; an encoder whose answer is no good is ended.
 */
#include "server/vision/internal.h"

#include "common/encproc/encproc.h"
#include "common/gguf/gguf.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define STOP_GRACE_MS 1000
#define CANCEL_KILL_S 1 /* a plain encoder can not be told; a picture that nobody wants is not heard out */

struct fs_local {
	struct fs_host *h;
	char *exe, *mmproj, *model;
	bool gpu;        /* its pictures take the turn */
	bool gpu_if_any; /* READY tells whether they do */
	bool elastic;
	struct fs_vision_turn turn;
	struct fs_encproc enc;
	struct fs_spool spool;
	int news; /* eventfd: the state has changed, for fs_vision_wait_ready */

	/* the picture at work */
	bool working;
	struct fs_vision_job *job; /* NULL while working: nobody waits for it any more */
	char picture[FS_SPOOL_PATH], rows[FS_SPOOL_PATH];
	int64_t began;

	const struct fs_vision_job *asked_for; /* the turn; not followed, only compared */
	atomic_bool granted;
	uint64_t checked; /* which start's READY was looked at */
	char fault[300];  /* why its last answer is no good; "" = it is */
};

/* ---- the turn ---- */

static void on_granted(void *arg)
{
	struct fs_local *l = arg;
	atomic_store(&l->granted, true);
	fs_wake(l->h->wake);
}

static void give_turn_back(struct fs_local *l)
{
	if (!l->asked_for)
		return;
	l->turn.give_back(l->turn.arg);
	l->asked_for = NULL;
	atomic_store(&l->granted, false);
}

/* True when the encode may begin. */
static bool have_turn(struct fs_local *l, const struct fs_vision_job *j)
{
	if (!l->gpu || !l->turn.ask)
		return true;
	if (l->asked_for != j) {
		give_turn_back(l); /* its picture is gone; the next one queues for itself */
		l->asked_for = j;
		l->turn.ask(l->turn.arg, on_granted, l);
	}
	return atomic_load(&l->granted);
}

/* ---- one picture ---- */

static void remove_files(struct fs_local *l)
{
	unlink(l->picture);
	unlink(l->rows);
}

/* Ends a job that is in our list, and takes it off. */
static void fail_job(struct fs_local *l, struct fs_vision_job *j, int err, const char *text)
{
	struct fs_vision *v = l->h->v;
	pthread_mutex_lock(&v->lock);
	if (err == FS_EINVAL) {
		l->h->errors[FS_HOST_ERR_PICTURE]++;
		fs_job_end_locked(j, err, "%s", text);
	} else {
		l->h->errors[err == FS_ETIMEOUT ? FS_HOST_ERR_TIMEOUT : FS_HOST_ERR_ENCODER]++;
		fs_job_end_locked(
		        j, err == FS_ETIMEOUT ? err : FS_EUNAVAILABLE, "%s: %.400s", l->h->name, text);
	}
	fs_job_unassign_locked(j);
	pthread_mutex_unlock(&v->lock);
}

static int write_picture(struct fs_local *l, const struct fs_vision_job *j, struct fs_errbuf *e)
{
	int fd, rc = fs_spool_picture(&l->spool, l->picture, l->rows, &fd, e);
	if (rc)
		return rc;
	for (size_t at = 0; at < j->n && !rc;) {
		ssize_t n = write(fd, j->bytes + at, j->n - at);
		if (n > 0)
			at += (size_t)n;
		else if (n == 0 || errno != EINTR)
			rc = fs_fail_errno(e, FS_EIO, "can not store the picture for the encoder");
	}
	close(fd);
	return rc;
}

static void begin(struct fs_local *l, struct fs_vision_job *j)
{
	struct fs_order o = {.kind = FS_ORDER_ENC};
	struct fs_errbuf e = {""};
	remove_files(l); /* one that was ended may have written before it obeyed */
	int rc = write_picture(l, j, &e);
	if (!rc) {
		snprintf(o.in, sizeof(o.in), "%s", l->picture);
		snprintf(o.out, sizeof(o.out), "%s", l->rows);
		if (l->enc.o.extended) { /* a plain one has those of its start for all pictures */
			o.min_tokens = j->params.min_tokens;
			o.max_tokens = j->params.max_tokens;
		}
		rc = fs_encproc_encode(&l->enc, &o, &e);
	}
	if (rc) {
		remove_files(l);
		give_turn_back(l);
		fail_job(l, j, rc, e.text);
		return;
	}
	pthread_mutex_lock(&l->h->v->lock);
	fs_host_begins_locked(j);
	j->stage = FS_JOB_SENT;
	fs_host_sent_locked(j);
	pthread_mutex_unlock(&l->h->v->lock);
	l->job = j;
	l->working = true;
	l->began = fs_now();
}

/* The rows file into the job. */
static int read_rows(
        struct fs_local *l, struct fs_vision_job *j, const struct fs_reply *r, struct fs_errbuf *e)
{
	struct fs_rows_shape s;
	float *rows;
	int rc = fs_rows_read_file(l->rows, &s, &rows, e);
	if (rc)
		return rc;
	if (s.n_embd != l->enc.facts.n_embd || s.n_tokens != r->shape.n_tokens) {
		free(rows);
		return fs_fail(e, FS_EFORMAT, "it told %d rows of %d and wrote %d of %d", r->shape.n_tokens,
		        l->enc.facts.n_embd, s.n_tokens, s.n_embd);
	}
	double ms = r->ms > 0 ? r->ms : (double)(fs_now() - l->began) / (double)FS_MS;
	int64_t queued = (l->began - j->submitted) / 1000;
	j->head = (struct fs_rows_head){.shape = s,
	        .dtype = FS_WIRE_F32,
	        .encode_us = (uint32_t)FS_MIN(ms * 1000, 4e9),
	        .queue_us = (uint32_t)FS_MIN(queued, (int64_t)UINT32_MAX)};
	j->data = (uint8_t *)rows;
	j->data_at = 0;
	j->n_finite = (size_t)s.n_tokens * (size_t)s.n_embd; /* the file's reader looked at all */
	pthread_mutex_lock(&l->h->v->lock);
	fs_host_answers_locked(j);
	pthread_mutex_unlock(&l->h->v->lock);
	return FS_OK;
}

/* From within encproc: the order is over. Whoever waits learns it last, when nothing of it is left here. */
static void on_done(void *arg, int err, const struct fs_reply *reply, const char *text)
{
	struct fs_local *l = arg;
	struct fs_vision_job *j = l->job;
	struct fs_errbuf e = {""};
	if (j && !err && read_rows(l, j, reply, &e)) {
		err = fs_fail_prefix(&e, FS_EUNAVAILABLE, "the encoder's rows are no good");
		snprintf(l->fault, sizeof(l->fault), "%.290s", e.text);
		text = e.text;
	}
	l->working = false;
	l->job = NULL;
	remove_files(l);
	give_turn_back(l);
	if (j && err)
		fail_job(l, j, err, text);
	else if (j)
		fs_job_complete(j);
}

/* ---- the thread ---- */

/* Ended jobs leave the list; the one at work is cancelled. */
static void drop_ended_jobs(struct fs_local *l)
{
	struct fs_vision *v = l->h->v;
	bool cancel = false;
	pthread_mutex_lock(&v->lock);
	for (struct fs_vision_job *j = l->h->jobs.first, *next; j; j = next) {
		next = j->next;
		if (!j->done)
			continue;
		if (l->job == j) {
			l->job = NULL;
			cancel = true;
		}
		fs_job_unassign_locked(j);
	}
	pthread_mutex_unlock(&v->lock);
	if (cancel)
		fs_encproc_cancel(&l->enc);
}

static void start_next(struct fs_local *l)
{
	struct fs_vision *v = l->h->v;
	struct fs_vision_job *j;
	if (l->working)
		return;
	pthread_mutex_lock(&v->lock);
	for (j = l->h->jobs.first; j && j->done; j = j->next)
		;
	pthread_mutex_unlock(&v->lock);
	if (j) /* only this thread takes jobs off the list, so it stays */
		fs_encproc_wake(&l->enc);
	if (!j || l->enc.state != FS_ENC_READY)
		give_turn_back(l);
	else if (have_turn(l, j))
		begin(l, j);
}

/* Each start's READY is compared with what the text model takes. */
static void check_ready(struct fs_local *l)
{
	struct fs_encproc *p = &l->enc;
	struct fs_host *h = l->h;
	if (*l->fault) {
		fs_encproc_fault(p, l->fault);
		*l->fault = '\0';
	}
	if (p->state != FS_ENC_READY || l->checked == p->starts)
		return;
	struct fs_hello f = {.n_embd = p->facts.n_embd,
	        .min_tokens = p->facts.min_tokens,
	        .max_tokens = p->facts.max_tokens,
	        .vram_free_mb = p->facts.vram_free_mb,
	        .vram_total_mb = p->facts.vram_total_mb,
	        .max_picture_bytes = (int64_t)FS_PICTURE_MAX};
	snprintf(f.fingerprint, sizeof(f.fingerprint), "%s", p->facts.fingerprint);
	snprintf(f.device, sizeof(f.device), "%s", p->facts.device);
	struct fs_errbuf e;
	pthread_mutex_lock(&h->v->lock);
	h->facts = f;
	int rc = fs_host_check_model_locked(h, &f, &e);
	pthread_mutex_unlock(&h->v->lock);
	l->checked = p->starts;
	if (l->gpu_if_any)
		l->gpu = fs_device_is_gpu(f.device);
	if (rc)
		fs_encproc_fault(p, e.text);
}

static enum fs_host_state state_now(const struct fs_local *l, const char **cause)
{
	const struct fs_encproc *p = &l->enc;
	*cause = "";
	if (p->state == FS_ENC_READY || p->state == FS_ENC_BUSY)
		return FS_HOST_UP;
	if (p->state == FS_ENC_BACKOFF || (p->state == FS_ENC_ENDING && p->retry)) {
		*cause = p->cause;
		return FS_HOST_DOWN;
	}
	if (l->elastic && p->state != FS_ENC_STARTING)
		return FS_HOST_UP; /* asleep, or on its way there: a picture wakes it */
	*cause = "the encoder is being started";
	return FS_HOST_STARTING;
}

static void show_state(struct fs_local *l)
{
	struct fs_host *h = l->h;
	const char *cause;
	enum fs_host_state s = state_now(l, &cause);
	pthread_mutex_lock(&h->v->lock);
	bool changed = h->state != s || strcmp(h->cause, cause) != 0;
	if (changed)
		fs_host_set_state_locked(h, s, cause);
	pthread_mutex_unlock(&h->v->lock);
	if (changed)
		fs_wake(l->news);
}

static void turn(struct fs_local *l)
{
	struct pollfd fds[1 + FS_ENCPROC_FDS] = {{.fd = l->h->wake, .events = POLLIN}};
	int64_t until = FS_NEVER;
	fs_encproc_prepare(&l->enc, fds + 1, &until);
	if (poll(fds, FS_ARRAY_LEN(fds), fs_poll_ms(until)) < 0)
		for (size_t i = 0; i < FS_ARRAY_LEN(fds); i++)
			fds[i].revents = 0;
	fs_wake_drain(l->h->wake);
	fs_encproc_dispatch(&l->enc, fds + 1);
	check_ready(l);
	show_state(l);
}

void *fs_local_run(void *arg)
{
	struct fs_local *l = arg;
	struct fs_vision *v = l->h->v;
	fs_encproc_want(&l->enc, true);
	show_state(l);
	while (!atomic_load(&v->stopping)) {
		drop_ended_jobs(l);
		start_next(l);
		show_state(l); /* a program that can not be executed has failed already */
		turn(l);
	}
	fs_encproc_finish(&l->enc);
	give_turn_back(l);
	pthread_mutex_lock(&v->lock);
	while (l->h->jobs.first) {
		struct fs_vision_job *j = l->h->jobs.first;
		fs_job_end_locked(j, FS_EUNAVAILABLE, "the server is shutting down");
		fs_job_unassign_locked(j);
	}
	pthread_mutex_unlock(&v->lock);
	return NULL;
}

/* ---- life ---- */

/* An encoder that sleeps has told nothing yet; its file names the model all the same, so that its first rows
 * get the name that they keep. What is no GGUF file is the encoder's to judge. */
static void name_model(struct fs_local *l)
{
	struct fs_vision *v = l->h->v;
	struct fs_gguf *g;
	if (*v->fingerprint || fs_gguf_open(&g, l->mmproj, NULL))
		return;
	if (fs_gguf_fingerprint(g, v->fingerprint, NULL))
		*v->fingerprint = '\0';
	snprintf(v->fingerprint_of, sizeof(v->fingerprint_of), "%.127s", l->mmproj);
	fs_gguf_close(g);
}

int fs_local_create(
        struct fs_host *h, const struct fs_vision_local_opts *o, struct fs_local **out, struct fs_errbuf *e)
{
	struct fs_local *l = calloc(1, sizeof(*l));
	if (!l)
		return fs_fail(e, FS_ENOMEM, "out of memory");
	l->h = h;
	l->spool.lock_fd = -1;
	l->exe = strdup(o->exe);
	l->mmproj = strdup(o->mmproj);
	l->model = strdup(o->model ? o->model : "");
	l->elastic = o->elastic;
	l->turn = o->turn;
	l->news = fs_wake_open();
	int timeout_s = (h->v->o.encode_timeout_ms + 999) / 1000;
	struct fs_encproc_opts p = {.program = l->exe,
	        .mmproj = l->mmproj,
	        .model = l->model,
	        .gpu = o->gpu,
	        .extended = o->extended,
	        .on_demand = o->elastic,
	        .threads = o->threads,
	        .min_tokens = h->v->o.min_tokens,
	        .max_tokens = h->v->o.max_tokens,
	        .ready_timeout_s = o->ready_timeout_s > 0 ? o->ready_timeout_s : 300,
	        .encode_timeout_s = timeout_s,
	        .cancel_kill_s = CANCEL_KILL_S,
	        .stop_grace_ms = STOP_GRACE_MS,
	        .idle_s = !o->elastic     ? 0
	                  : o->idle_s > 0 ? o->idle_s
	                                  : 300};
	int rc = !l->exe || !l->mmproj || !l->model ? fs_fail(e, FS_ENOMEM, "out of memory") : FS_OK;
	if (!rc && o->device)
		rc = fs_encproc_set_device(&p, o->device, e);
	l->gpu = p.gpu;
	l->gpu_if_any = p.gpu_if_any;
	fs_encproc_init(&l->enc, &p, on_done, l);
	if (!rc && l->news < 0)
		rc = fs_fail_errno(e, FS_EIO, "can not open an eventfd");
	if (!rc)
		rc = fs_spool_init(&l->spool, e);
	if (rc) {
		fs_local_destroy(l);
		return rc;
	}
	name_model(l);
	*out = l;
	return FS_OK;
}

void fs_local_destroy(struct fs_local *l)
{
	if (!l)
		return;
	fs_encproc_finish(&l->enc);
	fs_spool_finish(&l->spool);
	if (l->news >= 0)
		close(l->news);
	free(l->exe);
	free(l->mmproj);
	free(l->model);
	free(l);
}

int fs_vision_wait_ready(struct fs_vision *v, int stop_fd, struct fs_errbuf *e)
{
	struct fs_local *l = v->local;
	if (!l || l->elastic)
		return FS_OK;
	for (;;) {
		struct pollfd fds[2] = {{.fd = l->news, .events = POLLIN}, {.fd = stop_fd, .events = POLLIN}};
		struct fs_host *h = l->h;
		fs_wake_drain(l->news);
		pthread_mutex_lock(&v->lock);
		enum fs_host_state state = h->state;
		if (state == FS_HOST_DOWN)
			fs_fail(e, FS_EUNAVAILABLE, "the image encoder %s can not start: %s", l->exe,
			        h->cause);
		pthread_mutex_unlock(&v->lock);
		if (state == FS_HOST_UP)
			return FS_OK;
		if (state == FS_HOST_DOWN)
			return FS_EUNAVAILABLE;
		/* READY has its own deadline, after which the state changes */
		if (poll(fds, 2, -1) > 0 && fds[1].revents)
			return fs_fail(e, FS_ECANCELLED, "stopped while the image encoder was starting");
	}
}
