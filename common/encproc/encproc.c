/*
 * The encoder's process: start, READY, orders and answers, deadlines, end, back-off. See encproc.h for the
 * states. The line protocol is docs/PROTOCOL.md's; an answer that does not follow it ends the encoder, since
 * nothing after it could be matched to a picture.
 */
#include "common/encproc/launch.h"

#include "common/gguf/gguf.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define CANCEL_ANSWER_MS 1000 /* an extended encoder answers CANCEL within 100 ms */
#define EXIT_MS 1000          /* from the end of its output or input to its own */
#define KILLED_MS 100
#define BACKOFF_MAX_S 60
#define HURRY_MS 1000
#define LONG_AGO_S 10 /* a failure so long ago tells nothing about the next start */
#define STEADY_S 600  /* who was ready for so long has its earlier failures forgiven */

static void close_fd(int *fd)
{
	if (*fd >= 0)
		close(*fd);
	*fd = -1;
}

/* Texts of the encoder go into JSON and logs: what is not printable ASCII is not worth breaking them. */
static void make_printable(char *s)
{
	for (; *s; s++)
		if (*s < 0x20 || *s > 0x7e)
			*s = '?';
}

static void set_state(struct fs_encproc *p, enum fs_encproc_state state, int64_t deadline)
{
	p->state = state;
	p->deadline = deadline;
	fs_debug("encoder: %s", fs_encproc_state_name(p));
}

void fs_encproc_init(struct fs_encproc *p, const struct fs_encproc_opts *o, fs_encproc_done *done, void *arg)
{
	*p = (struct fs_encproc){.o = *o,
	        .done = done,
	        .done_arg = arg,
	        .child = {.in = -1, .out = -1, .err = -1},
	        .deadline = FS_NEVER,
	        .cancel_deadline = FS_NEVER};
	fs_buf_init(&p->in, FS_LINE_MAX + 4096); /* a line and one read */
	fs_buf_init(&p->out, FS_LINE_MAX + 64);
	fs_buf_init(&p->err, 4096);
}

void fs_encproc_finish(struct fs_encproc *p)
{
	if (p->child.pid > 0)
		fs_child_end(&p->child, p->o.stop_grace_ms);
	fs_buf_finish(&p->in);
	fs_buf_finish(&p->out);
	fs_buf_finish(&p->err);
}

/* ---- start ---- */

static void back_off(struct fs_encproc *p)
{
	int seconds = p->failures > 6 ? BACKOFF_MAX_S : FS_MIN(BACKOFF_MAX_S, 1 << (p->failures - 1));
	fs_warn("encoder: %s; next start in %d s", p->cause, seconds);
	p->failed_at = fs_now();
	set_state(p, FS_ENC_BACKOFF, fs_deadline_ms(seconds * 1000LL));
}

/* The process is gone, or is being ended, although it was needed. */
static void count_failure(struct fs_encproc *p)
{
	p->start_failed = p->state == FS_ENC_STARTING;
	if (!p->start_failed && p->ready_since && fs_now() - p->ready_since >= STEADY_S * FS_SEC)
		p->failures = 0;
	p->failures++;
	p->retry = true;
}

static void start(struct fs_encproc *p)
{
	struct fs_launch l;
	struct fs_errbuf e;
	if (p->renew)
		p->o = p->next;
	p->renew = false;
	p->asleep = p->cancelling = p->late_cancel = p->retry = false;
	p->last_words[0] = 0;
	p->failures_before = 0;
	fs_buf_clear(&p->in);
	fs_buf_clear(&p->out);
	fs_buf_clear(&p->err);
	p->starts++;
	p->ready_since = 0;
	p->oom_kills = fs_launch_oom_kills();
	int rc = fs_launch_init(&l, &p->o, &e);
	if (rc == FS_OK)
		rc = fs_child_start(&p->child, l.argv, l.env, true, true, &e); /* it dies with this thread */
	fs_launch_finish(&l);
	if (rc) {
		p->start_failed = true;
		p->failures++;
		snprintf(p->cause, sizeof(p->cause), "%.250s", e.text);
		make_printable(p->cause);
		back_off(p);
		return;
	}
	fs_info("encoder: started %s, process %d", p->o.program, (int)p->child.pid);
	set_state(p, FS_ENC_STARTING, fs_deadline_ms(p->o.ready_timeout_s * 1000LL));
}

/* ---- end ---- */

/* The order under way ends with err; nothing when there is none. */
static void end_order(struct fs_encproc *p, int err, const struct fs_reply *reply, const char *text)
{
	if (p->state != FS_ENC_BUSY)
		return;
	if (p->cancelling)
		err = FS_ECANCELLED;
	p->cancelling = false;
	p->cancel_deadline = FS_NEVER;
	p->done(p->done_arg, err, reply, text);
}

static void signal_next(struct fs_encproc *p)
{
	int sig = p->next_signal;
	fs_child_signal(&p->child, sig);
	fs_debug("encoder: signal %d to group %d", sig, (int)p->child.pid);
	p->next_signal = SIGKILL;
	/* After a KILL its end is looked for: nothing else may tell, since its output is closed by then. */
	p->deadline = fs_deadline_ms(sig == SIGKILL ? KILLED_MS : p->o.stop_grace_ms);
}

/* It misbehaved, or its order is taking too long: TERM now, KILL after the grace. */
static void fail(struct fs_encproc *p, int err, const char *fmt, ...) FS_PRINTF(3, 4);
static void fail(struct fs_encproc *p, int err, const char *fmt, ...)
{
	va_list ap;
	va_start(ap, fmt);
	vsnprintf(p->cause, sizeof(p->cause), fmt, ap);
	va_end(ap);
	make_printable(p->cause);
	end_order(p, err, NULL, p->cause);
	count_failure(p);
	p->next_signal = SIGTERM;
	close_fd(&p->child.in);
	set_state(p, FS_ENC_ENDING, FS_NEVER);
	signal_next(p);
}

/* Nobody needs it: QUIT and the end of its input, TERM after the grace, KILL after another. */
static void dismiss(struct fs_encproc *p)
{
	static const char quit[] = "QUIT\n";
	end_order(p, FS_ECANCELLED, NULL, "nobody waits for it");
	if (p->out.len == 0) {
		ssize_t n = write(p->child.in, quit, sizeof(quit) - 1);
		(void)n; /* the end of its input says the same */
	}
	close_fd(&p->child.in);
	fs_info("encoder: process %d is not needed any more", (int)p->child.pid);
	p->retry = false;
	p->next_signal = SIGTERM;
	set_state(p, FS_ENC_ENDING, fs_deadline_ms(p->o.stop_grace_ms));
}

static void tell_exit(const struct fs_encproc *p, int status, char *out, size_t cap)
{
	const char *colon = p->last_words[0] ? ": " : "", *why = "";
	if (WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL)
		why = fs_launch_oom_kills() > p->oom_kills
		              ? " (out of memory: the kernel took it back)"
		              : " (killed from outside; the kernel does so when memory runs out)";
	if (WIFSIGNALED(status))
		snprintf(out, cap, "the encoder was ended by signal %d%s%s%s", WTERMSIG(status), why, colon,
		        p->last_words);
	else if (WEXITSTATUS(status) == FS_ENCODER_EXIT_LOST && p->o.extended)
		snprintf(out, cap, "the encoder's GPU failed (status %d)%s%s", WEXITSTATUS(status), colon,
		        p->last_words);
	else
		snprintf(out, cap, "the encoder ended with status %d%s%s", WEXITSTATUS(status), colon,
		        p->last_words);
}

/* The leader is a zombie: what is left of its group is killed while its pid still names the group. */
static void gone(struct fs_encproc *p)
{
	int status = 0;
	fs_child_signal(&p->child, SIGKILL);
	fs_child_reap(&p->child, &status);
	fs_child_end(&p->child, 0);
	if (p->state != FS_ENC_ENDING) {
		tell_exit(p, status, p->cause, sizeof(p->cause));
		make_printable(p->cause);
		count_failure(p);
		end_order(p, FS_EUNAVAILABLE, NULL, p->cause);
	}
	if (p->wanted && p->retry) {
		back_off(p);
		return;
	}
	fs_info("encoder: ended");
	set_state(p, FS_ENC_ABSENT, FS_NEVER);
	if (p->wanted && !p->asleep)
		start(p);
}

static bool has_exited(const struct fs_encproc *p)
{
	siginfo_t si = {0};
	return p->child.pid > 0 && waitid(P_PID, (id_t)p->child.pid, &si, WEXITED | WNOHANG | WNOWAIT) == 0 &&
	       si.si_pid;
}

/* ---- what others ask for ---- */

static void rest(struct fs_encproc *p)
{
	int32_t idle = p->o.idle_s;
	if (p->renew) {
		dismiss(p);
		return;
	}
	set_state(p, FS_ENC_READY, idle ? fs_deadline_ms(idle * 1000LL) : FS_NEVER);
}

void fs_encproc_want(struct fs_encproc *p, bool wanted)
{
	if (p->wanted == wanted)
		return;
	p->wanted = wanted;
	if (wanted && p->o.on_demand) {
		p->asleep = true;
	} else if (wanted && p->state == FS_ENC_ABSENT) {
		start(p);
	} else if (!wanted && p->state == FS_ENC_BACKOFF) {
		set_state(p, FS_ENC_ABSENT, FS_NEVER);
	} else if (!wanted && p->child.pid > 0 && p->state != FS_ENC_ENDING) {
		dismiss(p);
	}
	if (!wanted)
		p->asleep = false;
}

void fs_encproc_wake(struct fs_encproc *p)
{
	p->asleep = false;
	if (p->wanted && p->state == FS_ENC_ABSENT)
		start(p);
	else if (p->state == FS_ENC_READY)
		rest(p);
}

void fs_encproc_hurry(struct fs_encproc *p)
{
	if (p->state != FS_ENC_BACKOFF)
		return;
	if (fs_now() - p->failed_at >= LONG_AGO_S * FS_SEC) {
		p->failures = 0;
		p->deadline = fs_now();
	}
	p->deadline = FS_MIN(p->deadline, fs_deadline_ms(HURRY_MS));
}

void fs_encproc_renew(struct fs_encproc *p, const struct fs_encproc_opts *o)
{
	p->next = *o;
	p->renew = true;
	p->start_failed = p->retry = false; /* what it did with the old settings counts no more */
	p->failures = 0;
	if (p->state == FS_ENC_BACKOFF)
		p->deadline = fs_now();
	else if (p->state == FS_ENC_STARTING || p->state == FS_ENC_READY)
		dismiss(p);
}

void fs_encproc_adjust(struct fs_encproc *p, const struct fs_encproc_opts *o)
{
	*(p->renew ? &p->next : &p->o) = *o;
	if (p->state == FS_ENC_READY)
		rest(p);
}

void fs_encproc_adopt(
        struct fs_encproc *p, const struct fs_child *c, const struct fs_ready *facts, uint64_t starts)
{
	FS_ASSERT(p->state == FS_ENC_ABSENT && !p->wanted);
	p->facts = *facts;
	p->have_facts = p->wanted = true;
	p->starts = starts;
	p->asleep = c->pid == 0;
	if (p->asleep)
		return;
	p->child = *c;
	p->ready_since = fs_now();
	p->oom_kills = fs_launch_oom_kills();
	rest(p);
}

static void flush(struct fs_encproc *p)
{
	while (p->out.len && p->child.in >= 0) {
		ssize_t n = write(p->child.in, p->out.data, p->out.len);
		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0 && errno == EAGAIN)
			return; /* POLLOUT follows */
		if (n > 0)
			fs_buf_consume(&p->out, (size_t)n);
		else
			close_fd(&p->child.in); /* or its error would wake us again and again */
	}
	/* It takes no more: as a rule its exit follows, see expire(). */
	if (p->child.in < 0)
		p->deadline = FS_MIN(p->deadline, fs_deadline_ms(EXIT_MS));
}

int fs_encproc_encode(struct fs_encproc *p, const struct fs_order *order, struct fs_errbuf *e)
{
	char line[FS_LINE_MAX];
	FS_ASSERT(p->state == FS_ENC_READY);
	int rc = fs_order_format(order, p->o.extended, line, sizeof(line), e);
	if (rc == FS_OK)
		rc = fs_buf_append(&p->out, line, strlen(line));
	if (rc)
		return rc;
	set_state(p, FS_ENC_BUSY, fs_deadline_ms(p->o.encode_timeout_s * 1000LL));
	flush(p);
	return FS_OK;
}

void fs_encproc_cancel(struct fs_encproc *p)
{
	if (p->state != FS_ENC_BUSY || p->cancelling)
		return;
	p->cancelling = true;
	if (p->o.extended && fs_buf_append_str(&p->out, "CANCEL\n") == FS_OK) {
		p->cancel_deadline = fs_deadline_ms(CANCEL_ANSWER_MS);
		flush(p);
	} else {
		p->cancel_deadline = fs_deadline_ms(p->o.cancel_kill_s * 1000LL);
	}
}

void fs_encproc_fault(struct fs_encproc *p, const char *text)
{
	if (p->state != FS_ENC_READY && p->state != FS_ENC_BUSY)
		return;
	p->failures = FS_MAX(p->failures, p->failures_before);
	fail(p, FS_EUNAVAILABLE, "%s", text);
}

/* ---- what it says ---- */

/* A plain encoder does not tell its model: the file that it was given does. "" when that is no GGUF. */
static void read_fingerprint(const struct fs_encproc *p, char out[33])
{
	struct fs_gguf *g;
	struct fs_errbuf e;
	out[0] = 0;
	if (fs_gguf_open(&g, p->o.mmproj, &e)) {
		fs_warn("encoder: its model can not be named: %s", e.text);
		return;
	}
	if (fs_gguf_fingerprint(g, out, &e))
		out[0] = 0;
	fs_gguf_close(g);
}

static void take_ready(struct fs_encproc *p, const struct fs_reply *r)
{
	p->facts = r->ready;
	make_printable(p->facts.device);
	if (!p->facts.fingerprint[0])
		read_fingerprint(p, p->facts.fingerprint);
	p->have_facts = true;
	p->ready_since = fs_now();
	p->start_failed = false;
	p->cause[0] = 0;
	fs_info("encoder: ready, %d wide, device \"%s\", model %s", p->facts.n_embd, p->facts.device,
	        p->facts.fingerprint[0] ? p->facts.fingerprint : "not told");
}

static void take_answer(struct fs_encproc *p, const struct fs_reply *r)
{
	bool cancelled = r->kind == FS_REPLY_ERR && !strcmp(r->text, "cancelled");
	if (cancelled && p->late_cancel && !p->cancelling) {
		p->late_cancel = false; /* the answer to a CANCEL that came after its picture was done */
		return;
	}
	p->late_cancel = p->cancelling && p->o.extended && !cancelled;
	p->failures_before = p->failures;
	p->failures = 0;
	if (r->kind == FS_REPLY_OK)
		end_order(p, FS_OK, r, "");
	else
		end_order(p, FS_EINVAL, r, r->text);
	rest(p);
}

static void take_line(struct fs_encproc *p, const char *line, size_t n)
{
	struct fs_reply r;
	struct fs_errbuf e;
	if (fs_reply_parse(line, n, &r, &e)) {
		fail(p, FS_EUNAVAILABLE, "the encoder answered nonsense: %.120s", e.text);
	} else if (p->state == FS_ENC_STARTING && r.kind == FS_REPLY_READY) {
		take_ready(p, &r);
		rest(p);
	} else if (p->state == FS_ENC_STARTING && r.kind == FS_REPLY_ERR) {
		fail(p, FS_EUNAVAILABLE, "the encoder did not start: %.200s", r.text);
	} else if (p->state == FS_ENC_BUSY && r.kind != FS_REPLY_READY) {
		take_answer(p, &r);
	} else if (p->late_cancel && r.kind == FS_REPLY_ERR) {
		p->late_cancel = false;
	} else {
		fail(p, FS_EUNAVAILABLE, "the encoder answered without being asked: %.*s", (int)FS_MIN(n, 80),
		        line);
	}
}

static void read_answers(struct fs_encproc *p)
{
	char bytes[4096];
	while (p->child.out >= 0 && p->state != FS_ENC_ENDING) {
		struct fs_errbuf e;
		size_t n_line;
		ssize_t n = read(p->child.out, bytes, sizeof(bytes));
		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0)
			return;
		if (n == 0) {
			/* Its death closes this before it can be waited for: see expire(). */
			close_fd(&p->child.out);
			p->deadline = FS_MIN(p->deadline, fs_deadline_ms(EXIT_MS));
			return;
		}
		int rc = fs_buf_append(&p->in, bytes, (size_t)n) ? FS_EFORMAT : FS_OK;
		while (rc == FS_OK && p->state != FS_ENC_ENDING) {
			rc = fs_line_next(&p->in, &n_line, &e);
			if (rc)
				break;
			take_line(p, (const char *)p->in.data, n_line);
			fs_buf_consume(&p->in, n_line + 1);
		}
		if (rc == FS_EFORMAT)
			fail(p, FS_EUNAVAILABLE, "the encoder sent a line of more than %d bytes",
			        FS_LINE_MAX);
	}
}

/* Its stderr goes to our log; the last line is kept, since it tells why a start failed. */
#define STDERR_READS 16

static void read_stderr(struct fs_encproc *p)
{
	char bytes[1024];
	/* A bounded number of reads a round: an encoder that never stops talking must not hold the loop. */
	for (int round = 0; p->child.err >= 0; round++) {
		ssize_t n = round < STDERR_READS ? read(p->child.err, bytes, sizeof(bytes)) : -1;
		if (n < 0)
			return;
		if (n == 0)
			break;
		for (ssize_t i = 0; i < n; i++) {
			bool full = p->err.len + 1 >= p->err.max;
			if (bytes[i] != '\n' && !full && fs_buf_append(&p->err, &bytes[i], 1) == FS_OK)
				continue;
			if (p->err.len) {
				fs_info("encoder: %s", (const char *)p->err.data);
				snprintf(p->last_words, sizeof(p->last_words), "%.159s",
				        (const char *)p->err.data);
			}
			fs_buf_clear(&p->err);
		}
	}
	close_fd(&p->child.err);
}

/* ---- the loop ---- */

void fs_encproc_prepare(struct fs_encproc *p, struct pollfd fds[FS_ENCPROC_FDS], int64_t *until)
{
	bool listens = p->state != FS_ENC_ENDING;
	fds[0] = (struct pollfd){.fd = p->out.len ? p->child.in : -1, .events = POLLOUT};
	fds[1] = (struct pollfd){.fd = listens ? p->child.out : -1, .events = POLLIN};
	fds[2] = (struct pollfd){.fd = p->child.err, .events = POLLIN};
	*until = FS_MIN(*until, FS_MIN(p->deadline, p->cancel_deadline));
}

static void expire(struct fs_encproc *p)
{
	int64_t now = fs_now();
	if (p->state == FS_ENC_BUSY && now >= p->cancel_deadline) {
		fail(p, FS_ECANCELLED, "the encoder did not stop when its work was cancelled");
		p->failures--; /* that nobody waits is not its fault: it comes back without a pause */
		p->retry = false;
		return;
	}
	if (now < p->deadline)
		return;
	if (p->child.pid > 0 && (p->child.out < 0 || p->child.in < 0) && p->state != FS_ENC_ENDING) {
		fail(p, FS_EUNAVAILABLE, "the encoder closed its %s", p->child.out < 0 ? "output" : "input");
		return;
	}
	switch (p->state) {
	case FS_ENC_ABSENT:
		break;
	case FS_ENC_STARTING:
		fail(p, FS_ETIMEOUT, "the encoder was not ready after %d s", p->o.ready_timeout_s);
		break;
	case FS_ENC_READY:
		p->asleep = true;
		dismiss(p);
		break;
	case FS_ENC_BUSY:
		fail(p, FS_ETIMEOUT, "the encoder said nothing for %d s", p->o.encode_timeout_s);
		break;
	case FS_ENC_ENDING:
		signal_next(p);
		break;
	case FS_ENC_BACKOFF:
		p->asleep = p->o.on_demand;
		if (p->asleep)
			set_state(p, FS_ENC_ABSENT, FS_NEVER);
		else
			start(p);
		break;
	}
}

void fs_encproc_dispatch(struct fs_encproc *p, const struct pollfd fds[FS_ENCPROC_FDS])
{
	if (fds[0].revents)
		flush(p);
	bool exited = has_exited(p);
	if (exited || fds[2].revents)
		read_stderr(p);
	if (exited || fds[1].revents)
		read_answers(p);
	if (exited)
		gone(p);
	expire(p);
}

const char *fs_encproc_state_word(const struct fs_encproc *p)
{
	if (p->state == FS_ENC_READY || p->state == FS_ENC_BUSY || p->asleep)
		return "ready";
	return p->start_failed ? "failed" : "starting";
}

const char *fs_encproc_state_name(const struct fs_encproc *p)
{
	static const char *const names[] = {"absent", "starting", "ready", "busy", "ending", "back-off"};
	return names[p->state];
}
