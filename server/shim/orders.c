/*
 * Lines from stdin, and everything that ends the program. One thread owns stdin; main takes lines from a
 * bounded queue. When the queue is full, stdin is left alone but its end is still seen.
 */
#include "server/shim/shim.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <unistd.h>

#define QUEUE_MAX 16
#define END_GRACE_MS 3000 /* more than a vision needs to say BYE */
#define PARENT_CHECK_MS                                                                                      \
	2000 /* beside the kernel's signal, for parents that are gone before it is asked for */

struct line {
	char *text; /* NULL: it was too long */
	size_t n;
};

struct shim_orders {
	pid_t parent;
	pthread_t thread;
	bool started;
	int signals, stop, room,
	        ended; /* signalfd; eventfds: end of the thread, room in the queue, the end */
	struct fs_cancel *end;
	struct fs_buf in;
	bool skipping; /* behind a line that was too long */

	pthread_mutex_t m;
	pthread_cond_t changed;
	struct line queue[QUEUE_MAX];
	size_t n;
	bool over; /* the end has come, or main is done */
};

/* ---- the thread ---- */

static bool is_full(struct shim_orders *o)
{
	pthread_mutex_lock(&o->m);
	bool full = o->n == QUEUE_MAX;
	pthread_mutex_unlock(&o->m);
	return full;
}

static void push(struct shim_orders *o, const uint8_t *text, size_t n)
{
	struct line l = {.text = text ? malloc(n + 1) : NULL, .n = n};
	if (l.text) {
		memcpy(l.text, text, n);
		l.text[n] = '\0';
	}
	pthread_mutex_lock(&o->m);
	FS_ASSERT(o->n < QUEUE_MAX);
	o->queue[o->n++] = l;
	pthread_cond_broadcast(&o->changed);
	pthread_mutex_unlock(&o->m);
}

/* Moves whole lines from the buffer to the queue, as far as it has room. */
static void take_lines(struct shim_orders *o)
{
	size_t n;
	int rc = FS_ENOTFOUND;
	while (!is_full(o) && (rc = fs_line_next(&o->in, &n, NULL)) == FS_OK) {
		if (!o->skipping)
			push(o, o->in.data, n);
		o->skipping = false;
		fs_buf_consume(&o->in, n + 1);
	}
	if (rc != FS_EFORMAT)
		return;
	if (!o->skipping)
		push(o, NULL, 0);
	o->skipping = true;
	fs_buf_clear(&o->in);
}

/* False at the end of stdin. */
static bool read_some(struct shim_orders *o)
{
	uint8_t chunk[FS_LINE_MAX];
	ssize_t n = read(STDIN_FILENO, chunk, sizeof(chunk));
	if (n <= 0)
		return n < 0 && (errno == EINTR || errno == EAGAIN);
	return fs_buf_append(&o->in, chunk, (size_t)n) == FS_OK;
}

/* Nobody reads answers any more. What main does for an orderly end is bounded, but stdout may be stuck. */
static void end_now(struct shim_orders *o)
{
	int64_t deadline = fs_deadline_ms(END_GRACE_MS);
	fs_cancel_fire(o->end, FS_CANCEL_SHUTDOWN);
	fs_wake(o->ended);
	pthread_mutex_lock(&o->m);
	o->over = true;
	pthread_cond_broadcast(&o->changed);
	pthread_mutex_unlock(&o->m);
	struct pollfd p = {.fd = o->stop, .events = POLLIN};
	while (fs_now() < deadline)
		if (poll(&p, 1, fs_poll_ms(deadline)) > 0)
			return;
	_exit(0);
}

/* True when the process is to end. The signal of a parent's death also comes when the thread that started us
 * ends, which means nothing. */
static bool is_ending_signal(struct shim_orders *o)
{
	struct signalfd_siginfo info;
	if (read(o->signals, &info, sizeof(info)) != (ssize_t)sizeof(info))
		return false;
	return info.ssi_signo != SIGUSR1;
}

static void *read_orders(void *arg)
{
	struct shim_orders *o = arg;
	for (;;) {
		take_lines(o);
		short want = is_full(o) || o->in.len > FS_LINE_MAX ? 0 : POLLIN;
		struct pollfd p[4] = {{STDIN_FILENO, want, 0}, {o->signals, POLLIN, 0}, {o->stop, POLLIN, 0},
		        {o->room, POLLIN, 0}};
		if (poll(p, 4, PARENT_CHECK_MS) < 0)
			continue;
		if (p[2].revents)
			return NULL;
		bool over = getppid() != o->parent || (p[1].revents && is_ending_signal(o));
		if (p[3].revents)
			fs_wake_drain(o->room);
		if (p[0].revents && !over)
			over = !want || !read_some(o); /* unasked, only its end shows */
		if (over) {
			end_now(o);
			return NULL;
		}
	}
}

/* ---- main's side ---- */

static int open_fds(struct shim_orders *o, struct fs_errbuf *e)
{
	sigset_t set;
	sigemptyset(&set);
	sigaddset(&set, SIGTERM);
	sigaddset(&set, SIGINT);
	sigaddset(&set, SIGHUP);
	sigaddset(&set, SIGUSR1);
	pthread_sigmask(SIG_BLOCK, &set, NULL);
	/* not TERM: the death of the starting thread must be told from a wish to end us */
	prctl(PR_SET_PDEATHSIG, SIGUSR1);
	o->signals = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
	o->stop = fs_wake_open();
	o->room = fs_wake_open();
	o->ended = fs_wake_open();
	if (o->signals < 0 || o->stop < 0 || o->room < 0 || o->ended < 0)
		return fs_fail_errno(e, FS_EIO, "can not watch for signals");
	return FS_OK;
}

int shim_orders_open(struct shim_orders **out, pid_t parent, struct fs_errbuf *e)
{
	struct shim_orders *o = calloc(1, sizeof(*o));
	if (!o)
		return fs_fail(e, FS_ENOMEM, "out of memory");
	o->signals = o->stop = o->room = o->ended = -1;
	o->parent = parent;
	fs_buf_init(&o->in, 4 * FS_LINE_MAX);
	pthread_mutex_init(&o->m, NULL);
	fs_cond_init(&o->changed);
	o->end = fs_cancel_create(FS_NEVER);
	int rc = o->end ? open_fds(o, e) : fs_fail(e, FS_ENOMEM, "out of memory");
	if (!rc)
		rc = fs_thread_start(&o->thread, "orders", read_orders, o, e);
	o->started = rc == FS_OK;
	if (rc)
		shim_orders_close(o);
	else
		*out = o;
	return rc;
}

void shim_orders_close(struct shim_orders *o)
{
	if (!o)
		return;
	if (o->started) {
		fs_wake(o->stop);
		pthread_join(o->thread, NULL);
	}
	const int fds[] = {o->signals, o->stop, o->room, o->ended};
	for (size_t i = 0; i < FS_ARRAY_LEN(fds); i++)
		if (fds[i] >= 0)
			close(fds[i]);
	for (size_t i = 0; i < o->n; i++)
		free(o->queue[i].text);
	fs_cancel_unref(o->end);
	fs_buf_finish(&o->in);
	pthread_cond_destroy(&o->changed);
	pthread_mutex_destroy(&o->m);
	free(o);
}

struct fs_cancel *shim_orders_end(struct shim_orders *o)
{
	return o->end;
}

int shim_orders_end_fd(struct shim_orders *o)
{
	return o->ended;
}

int shim_orders_next(struct shim_orders *o, char **line, size_t *n, struct fs_errbuf *e)
{
	struct line l = {0};
	pthread_mutex_lock(&o->m);
	while (o->n == 0 && !o->over)
		fs_cond_wait_until(&o->changed, &o->m, FS_NEVER);
	bool over = o->over;
	if (!over) {
		l = o->queue[0];
		o->n--;
		memmove(o->queue, o->queue + 1, o->n * sizeof(o->queue[0]));
	}
	pthread_mutex_unlock(&o->m);
	if (over)
		return FS_EUNAVAILABLE;
	fs_wake(o->room);
	if (!l.text)
		return fs_fail(e, FS_EFORMAT, "a line of more than %d bytes", FS_LINE_MAX);
	*line = l.text;
	*n = l.n;
	return FS_OK;
}
