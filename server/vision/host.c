/*
 * host: one connection to a vision host, on the host's thread (dial.c): says HELLO, moves frames, pings,
 * notices silence. It refuses a host with another protocol version, another model or another width, by name.
 */
#include "server/vision/internal.h"

#include <errno.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define HELLO_MIN_MS 10000 /* an agent may have to start its watchdog first */
#define BYE_MS 700
#define STDERR_LAST_READS 64
#define STDERR_LINES 100 /* logged for one connection; the last one is kept all the same */

/* One connection's life. */
struct run {
	struct fs_host *h;
	struct fs_link link;
	int64_t hello_by;   /* FS_NEVER once it came */
	int64_t next_ping;  /* FS_NEVER while one is unanswered */
	int64_t ping_sent;  /* what it holds; 0 = none is unanswered */
	int64_t mono, boot; /* the two clocks when they were last looked at */
	char line[240];     /* of the remote stderr */
	size_t line_n;
	char last_line[240];
	int logged;
};

void fs_host_set_state_locked(struct fs_host *h, enum fs_host_state state, const char *cause)
{
	if (h->state != state || strcmp(h->cause, cause)) {
		if (state == FS_HOST_DOWN)
			fs_warn("vision host %s is down: %s", h->name, cause);
		else if (h->state != state)
			fs_info("vision host %s is %s", h->name, fs_host_state_name(state));
	}
	if (h->state != state)
		h->since = fs_now();
	h->state = state;
	fs_wake(h->v->news);
	if (state == FS_HOST_UP)
		fs_wake(h->wake); /* a picture may be half sent */
	snprintf(h->cause, sizeof(h->cause), "%s", cause);
	if (state != FS_HOST_UP)
		for (struct fs_vision_job *j = h->jobs.first, *next; j; j = next) {
			next = j->next;
			if (j->stage == FS_JOB_WAITING)
				fs_job_unassign_locked(j);
		}
	fs_vision_review_locked(h->v);
}

/* ---- frames ---- */

static int send_hello(struct run *r, struct fs_errbuf *e)
{
	struct fs_vision *v = r->h->v;
	struct fs_hello hello = {.version = FS_PROTOCOL_VERSION,
	        .channel = (int32_t)(r->h - v->hosts) + 1,
	        .liveness_port = v->o.liveness_port,
	        .probe_fails = v->o.probe_fails,
	        .probe_interval_ms = v->o.probe_interval_ms,
	        .want_n_embd = v->o.n_embd};
	snprintf(hello.program, sizeof(hello.program), "%s %s", v->program, FS_VERSION);
	snprintf(hello.lease, sizeof(hello.lease), "%s", v->lease);
	pthread_mutex_lock(&v->lock);
	snprintf(hello.want_fingerprint, sizeof(hello.want_fingerprint), "%s", v->fingerprint);
	pthread_mutex_unlock(&v->lock);
	struct fs_buf b;
	fs_buf_init(&b, 8192);
	int rc = fs_hello_format(&hello, &b);
	rc = rc ? fs_fail(e, rc, "out of memory")
	        : fs_link_queue(&r->link, FS_FRAME_HELLO, 0, b.data, b.len, e);
	fs_buf_finish(&b);
	return rc;
}

/* Rows of another model would be noise: the host is refused. */
int fs_host_check_model_locked(struct fs_host *h, const struct fs_hello *f, struct fs_errbuf *e)
{
	struct fs_vision *v = h->v;
	if (v->o.n_embd && f->n_embd != v->o.n_embd)
		return fs_fail(e, FS_EUNAVAILABLE,
		        "its encoder makes rows of %d values, the text model takes %d: the mmproj belongs to "
		        "another model",
		        f->n_embd, v->o.n_embd);
	if (v->fingerprint_from == h && *f->fingerprint && strcmp(v->fingerprint, f->fingerprint))
		fs_host_unbind_locked(h); /* it was given another one */
	if (*v->fingerprint && *f->fingerprint && strcmp(v->fingerprint, f->fingerprint))
		return fs_fail(e, FS_EUNAVAILABLE, "it has another mmproj (%s) than %s (%s)", f->fingerprint,
		        *v->fingerprint_of ? v->fingerprint_of : "the configuration asks for",
		        v->fingerprint);
	if (!*v->fingerprint && *f->fingerprint && !atomic_load(&h->leaving)) {
		memcpy(v->fingerprint, f->fingerprint, sizeof(v->fingerprint));
		memcpy(v->fingerprint_of, h->name, sizeof(v->fingerprint_of));
		v->fingerprint_from = h;
	}
	v->last_limits = (struct fs_encode_params){f->min_tokens, f->max_tokens};
	return FS_OK;
}

/* state is "ready", "starting" or "failed", of a HELLO or a STATE frame. */
static int take_state(struct fs_host *h, const char *state, const char *cause, struct fs_errbuf *e)
{
	char why[300];
	int rc = FS_OK;
	pthread_mutex_lock(&h->v->lock);
	if (!strcmp(state, "ready")) {
		rc = h->facts.n_embd > 0 ? fs_host_check_model_locked(h, &h->facts, e) : FS_OK;
		/* ready without facts: the HELLO that brings them is on its way */
		if (!rc && h->facts.n_embd > 0)
			fs_host_set_state_locked(h, FS_HOST_UP, "");
	} else if (!strcmp(state, "failed")) {
		snprintf(why, sizeof(why), "its encoder can not start: %.250s",
		        *cause ? cause : "no cause told");
		fs_host_set_state_locked(h, FS_HOST_DOWN, why);
	} else {
		fs_host_set_state_locked(h, FS_HOST_STARTING, "its encoder is being started");
	}
	pthread_mutex_unlock(&h->v->lock);
	return rc;
}

static int on_hello(struct fs_host *h, struct fs_link *l, const struct fs_frame *f, struct fs_errbuf *e)
{
	struct fs_hello hello;
	int rc = fs_hello_parse(f->payload, f->len, &hello, e);
	if (rc)
		return fs_fail_prefix(e, rc, "its HELLO can not be read");
	l->hello_seen = true;
	pthread_mutex_lock(&h->v->lock);
	h->facts = hello;
	pthread_mutex_unlock(&h->v->lock);
	return take_state(h, hello.state, hello.cause, e);
}

static int on_state(struct fs_host *h, const struct fs_frame *f, struct fs_errbuf *e)
{
	json_t *o = json_loadb((const char *)f->payload, f->len, JSON_REJECT_DUPLICATES, NULL);
	const char *state = json_string_value(json_object_get(o, "state")),
	           *cause = json_string_value(json_object_get(o, "cause"));
	int rc = state ? take_state(h, state, cause ? cause : "", e)
	               : fs_fail(e, FS_EFORMAT, "its STATE frame can not be read");
	json_decref(o);
	return rc;
}

static struct fs_vision_job *job_locked(struct fs_host *h, uint32_t id)
{
	struct fs_vision_job *j = h->jobs.first;
	while (j && j->id != id)
		j = j->next;
	return id ? j : NULL;
}

static int on_rows(struct fs_host *h, const struct fs_frame *f, struct fs_errbuf *e)
{
	struct fs_rows_head head;
	int rc = fs_rows_head_get(f->payload, f->len, &head, e);
	if (rc)
		return rc;
	pthread_mutex_lock(&h->v->lock);
	struct fs_vision_job *j = job_locked(h, f->id);
	bool wanted = j && !j->done;
	pthread_mutex_unlock(&h->v->lock);
	if (!wanted)
		return FS_OK; /* the answer to a cancelled request */
	if (j->stage != FS_JOB_SENT)
		return fs_fail(e, FS_EFORMAT, "it answered before it had the whole picture, or twice");
	int32_t want = h->v->o.n_embd ? h->v->o.n_embd : h->facts.n_embd;
	if (head.shape.n_embd != want)
		return fs_fail(
		        e, FS_EFORMAT, "it sent rows of %d values instead of %d", head.shape.n_embd, want);
	if (head.dtype == FS_WIRE_F16 && !h->v->o.f16)
		return fs_fail(e, FS_EFORMAT, "it sent f16 rows that nobody asked for");
	if ((rc = fs_rows_head_bytes(&head, &j->need, e)))
		return rc;
	size_t n = (size_t)head.shape.n_tokens * (size_t)head.shape.n_embd;
	if (n > FS_ROWS_MAX_BYTES / sizeof(float)) /* as halves they were not too large */
		return fs_fail(e, FS_EFORMAT, "it sent rows of more than %zu bytes", FS_ROWS_MAX_BYTES);
	j->data = fs_rows_alloc(n * sizeof(float));
	if (!j->data)
		return fs_fail(e, FS_ENOMEM, "out of memory for %zu bytes of rows", n * sizeof(float));
	j->head = head;
	j->got = j->n_finite = 0;
	j->data_at = n * sizeof(float) - j->need;
	pthread_mutex_lock(&h->v->lock);
	j->stage = FS_JOB_RECEIVING;
	fs_host_answers_locked(j);
	pthread_mutex_unlock(&h->v->lock);
	return FS_OK;
}

/* What an ERR frame means for the job: the picture's fault ends it, the host's fault lets it try again. */
static void fail_job_locked(struct fs_vision_job *j, int err, const char *text)
{
	struct fs_host *h = j->host;
	if (j->done) { /* the answer to a CANCEL, as a rule */
		fs_job_unassign_locked(j);
		return;
	}
	if (err == FS_EINVAL || err == FS_EFORMAT || err == FS_ELIMIT || err == FS_ENOTSUP) {
		h->errors[FS_HOST_ERR_PICTURE]++;
		fs_job_end_locked(j, FS_EINVAL, "%s", text);
		fs_job_unassign_locked(j); /* done: this only takes it off the list */
		return;
	}
	fs_host_failed_locked(h);
	fs_job_lost_locked(j, err == FS_ETIMEOUT ? FS_HOST_ERR_TIMEOUT : FS_HOST_ERR_ENCODER, text);
}

static int on_err(struct fs_host *h, const struct fs_frame *f, struct fs_errbuf *e)
{
	struct fs_errbuf text;
	int err, rc = fs_err_payload_get(f->payload, f->len, &err, &text, e);
	if (rc)
		return rc;
	if (!*text.text)
		fs_fail(&text, 0, "it tells no reason (error %d)", -err);
	if (f->id == 0)
		return fs_fail(e, FS_EUNAVAILABLE, "%s", text.text);
	pthread_mutex_lock(&h->v->lock);
	struct fs_vision_job *j = job_locked(h, f->id);
	if (j)
		fail_job_locked(j, err, text.text);
	fs_vision_review_locked(h->v);
	pthread_mutex_unlock(&h->v->lock);
	return FS_OK;
}

static int on_pong(struct fs_host *h, struct fs_link *l, const struct fs_frame *f, struct fs_errbuf *e)
{
	struct run *r = (struct run *)((char *)l - offsetof(struct run, link));
	int64_t sent;
	if (f->len == sizeof(sent))
		memcpy(&sent, f->payload, sizeof(sent));
	if (f->len != sizeof(sent) || !r->ping_sent || sent != r->ping_sent)
		return fs_fail(e, FS_EFORMAT, "its PONG is not an echo");
	r->ping_sent = 0;
	pthread_mutex_lock(&h->v->lock);
	h->rtt_ms = (double)(fs_now() - sent) / (double)FS_MS;
	pthread_mutex_unlock(&h->v->lock);
	r->next_ping = fs_deadline_ms(h->v->o.ping_interval_ms);
	return FS_OK;
}

int fs_host_frame(struct fs_host *h, struct fs_link *l, const struct fs_frame *f, struct fs_errbuf *e)
{
	if (!l->hello_seen && f->type != FS_FRAME_HELLO && f->type != FS_FRAME_ERR &&
	        f->type != FS_FRAME_PING && f->type != FS_FRAME_PONG)
		return fs_fail(e, FS_EFORMAT, "it does not begin with HELLO");
	switch (f->type) {
	case FS_FRAME_HELLO:
		return on_hello(h, l, f, e);
	case FS_FRAME_STATE:
		return on_state(h, f, e);
	case FS_FRAME_ROWS:
		return on_rows(h, f, e);
	case FS_FRAME_ERR:
		return on_err(h, f, e);
	case FS_FRAME_PING:
		return f->len <= 64 ? fs_link_queue(l, FS_FRAME_PONG, 0, f->payload, f->len, e)
		                    : fs_fail(e, FS_EFORMAT, "its PING is too long");
	case FS_FRAME_PONG:
		return on_pong(h, l, f, e);
	case FS_FRAME_BYE:
		return fs_fail(e, FS_EUNAVAILABLE, "it ended the connection: its watchdog is shutting down");
	default:
		return fs_fail(e, FS_EFORMAT, "it sent a frame that only a server sends");
	}
}

/* ---- one connection ---- */

/* Ended jobs that the host still works on: it is told, and they leave the list. */
static int drop_ended_jobs(struct run *r, struct fs_errbuf *e)
{
	struct fs_host *h = r->h;
	int rc = FS_OK;
	pthread_mutex_lock(&h->v->lock);
	for (struct fs_vision_job *j = h->jobs.first, *next; j && !rc; j = next) {
		next = j->next;
		if (!j->done)
			continue;
		if (j->stage != FS_JOB_WAITING)
			rc = fs_link_queue(&r->link, FS_FRAME_CANCEL, j->id, NULL, 0, e);
		fs_link_forget(&r->link, j);
		fs_job_unassign_locked(j);
	}
	h->bytes_up += r->link.up;
	h->bytes_down += r->link.down;
	pthread_mutex_unlock(&h->v->lock);
	r->link.up = r->link.down = 0;
	return rc;
}

static void end_line(struct run *r)
{
	r->line[r->line_n] = '\0';
	if (r->line_n) {
		struct fs_errbuf clean; /* no control characters in our log or in causes */
		fs_fail(&clean, 0, "%s", r->line);
		snprintf(r->last_line, sizeof(r->last_line), "%.239s", clean.text);
		if (r->logged++ < STDERR_LINES)
			fs_info("vision host %s: %s", r->h->name, clean.text);
	}
	r->line_n = 0;
}

/* Whether there was any. */
static bool read_stderr(struct run *r, struct fs_ssh *ssh)
{
	char buf[2048];
	ssize_t n = fs_ssh_read_stderr(ssh, buf, sizeof(buf));
	for (ssize_t i = 0; i < n; i++) {
		if (buf[i] == '\n')
			end_line(r);
		else if (r->line_n < sizeof(r->line) - 1)
			r->line[r->line_n++] = buf[i];
	}
	return n > 0;
}

/* After a sleep of this machine the host may have given the connection up, or may be asleep itself: silence
 * is not borne for as long as usual. */
static void mind_sleep(struct run *r)
{
	const struct fs_vision_opts *o = &r->h->v->o;
	if (!fs_host_slept(&r->mono, &r->boot))
		return;
	int64_t soon = fs_now() + (o->connect_timeout_ms - o->dead_after_ms) * FS_MS;
	r->link.last_alive = FS_MIN(r->link.last_alive, soon);
	if (!r->ping_sent)
		r->next_ping = 0;
	fs_info("this machine slept; asking whether vision host %s is there", r->h->name);
}

static int64_t hedge(struct fs_host *h)
{
	pthread_mutex_lock(&h->v->lock);
	int64_t next = fs_host_hedge_locked(h);
	pthread_mutex_unlock(&h->v->lock);
	return next;
}

static int check_times(struct run *r, int64_t *next, struct fs_errbuf *e)
{
	const struct fs_vision_opts *o = &r->h->v->o;
	mind_sleep(r);
	int64_t now = fs_now(), dead = r->link.last_alive + o->dead_after_ms * FS_MS;
	int rc = FS_OK;
	if (r->link.hello_seen)
		r->hello_by = FS_NEVER;
	if (now >= r->hello_by)
		return fs_fail(e, FS_EUNAVAILABLE, "what runs there says nothing; is it farsight-agent?");
	if (now >= dead)
		return fs_fail(e, FS_EUNAVAILABLE, "no sign of life for %g s", o->dead_after_ms / 1000.0);
	*next = hedge(r->h);
	if (now >= r->next_ping) {
		r->next_ping = FS_NEVER; /* until its PONG */
		r->ping_sent = now;
		rc = fs_link_queue(&r->link, FS_FRAME_PING, 0, &now, sizeof(now), e);
	}
	/* also after a ping: behind an upload that is stuck it may never be sent */
	*next = FS_MIN(*next, FS_MIN(FS_MIN(r->hello_by, dead), r->next_ping));
	return rc;
}

/* Tells the host that its lease is over; waits until its kernel has it, within the limit. */
static void say_bye(struct run *r, struct fs_ssh *ssh)
{
	int64_t until = fs_deadline_ms(BYE_MS);
	if (fs_link_queue(&r->link, FS_FRAME_BYE, 0, NULL, 0, NULL))
		return;
	while (fs_now() < until) {
		bool moved = false;
		if (fs_link_send(&r->link, &moved, NULL) || fs_link_receive(&r->link, &moved, NULL))
			return;
		if (r->link.out_at == r->link.out_n && !r->link.control.len && fs_ssh_unsent(ssh) == 0)
			return;
		if (!moved)
			fs_ssh_wait(ssh, fs_link_wants_write(&r->link), -1, FS_MIN(until, fs_deadline_ms(5)));
	}
}

static int turn(struct run *r, struct fs_ssh *ssh, struct fs_errbuf *e)
{
	struct fs_host *h = r->h;
	int64_t next = FS_NEVER;
	bool moved = false;
	int rc;
	if ((rc = drop_ended_jobs(r, e)) || (rc = fs_link_send(&r->link, &moved, e)))
		return rc;
	read_stderr(r, ssh);
	if ((rc = fs_link_receive(&r->link, &moved, e)) || (rc = check_times(r, &next, e)))
		return rc;
	/* comes back at once when there is something to send, or more to receive */
	rc = fs_ssh_wait(ssh, fs_link_wants_write(&r->link), h->wake, next);
	return rc ? fs_fail_errno(e, rc, "can not wait for the connection") : FS_OK;
}

/* Agents say on stderr what they sent as ERR, behind their name; either text may be cut. */
static bool says_the_same(const char *line, const char *text)
{
	char begin[60];
	snprintf(begin, sizeof(begin), "%s", text);
	return *begin && strstr(line, begin);
}

int fs_host_serve(struct fs_host *h, struct fs_ssh *ssh, bool *greeted, struct fs_errbuf *e)
{
	struct run *r = calloc(1, sizeof(*r));
	if (!r)
		return fs_fail(e, FS_ENOMEM, "out of memory");
	r->h = h;
	r->hello_by = fs_deadline_ms(FS_MAX(h->v->o.connect_timeout_ms, HELLO_MIN_MS));
	r->next_ping = fs_deadline_ms(h->v->o.ping_interval_ms);
	int rc = fs_link_init(&r->link, h, ssh, e);
	if (!rc)
		rc = send_hello(r, e);
	while (!rc) {
		fs_wake_drain(h->wake); /* before anything is looked at that it may be about */
		if (fs_host_is_over(h))
			break;
		rc = turn(r, ssh, e);
	}
	if (!rc)
		say_bye(r, ssh);
	/* What it said last tells more than how the channel ended; a host that never stops talking is not
	 * heard out. */
	for (int i = 0; rc && i < STDERR_LAST_READS && read_stderr(r, ssh); i++)
		;
	end_line(r);
	if (rc && !r->link.hello_seen && rc == FS_EFORMAT)
		fs_fail_prefix(e, rc,
		        "what it sends is not farsight's protocol (does a start-up file of its shell print "
		        "something?)");
	if (rc == FS_EUNAVAILABLE && *r->last_line && !says_the_same(r->last_line, e->text)) {
		struct fs_errbuf how = *e;
		fs_fail(e, rc, "%.250s (it said: %.200s)", how.text, r->last_line);
	}
	*greeted = r->link.hello_seen;
	fs_link_finish(&r->link);
	free(r);
	return rc;
}
