/*
 * The reading side of the line protocol: one thread that owns stdin, and a bounded queue of orders. It never
 * touches the encoder; it fires tokens. When the process is told to end and the encoder does not come back in
 * time, it ends the process itself.
 */
#include "remote/encoder/inbox.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/signalfd.h>
#include <unistd.h>

#define QUEUE_MAX 16    /* orders; a sender that runs further ahead waits */
#define END_GRACE_MS 80 /* for the encoder to notice that it should end */

struct inbox {
	bool extended;
	pthread_t thread;
	int signals, stop; /* signalfd; eventfd that ends the thread */
	struct fs_buf in;
	bool skipping; /* behind a line that was too long */

	pthread_mutex_t m;
	pthread_cond_t changed;
	struct inbox_order *queue[QUEUE_MAX]; /* [0] is being worked on, or is next */
	int n;
	bool ready, quit, ended, finished, writing;
};

static void order_free(struct inbox_order *o)
{
	if (o == NULL)
		return;
	fs_cancel_unref(o->cancel);
	free(o);
}

/* ---- the thread ---- */

static void wait_for_room_locked(struct inbox *b)
{
	while (b->n == QUEUE_MAX && !b->finished)
		fs_cond_wait_until(&b->changed, &b->m, FS_NEVER);
}

static void push(struct inbox *b, struct inbox_order *o)
{
	pthread_mutex_lock(&b->m);
	wait_for_room_locked(b);
	if (b->finished)
		order_free(o);
	else
		b->queue[b->n++] = o;
	pthread_cond_broadcast(&b->changed);
	pthread_mutex_unlock(&b->m);
}

static void cancel_oldest(struct inbox *b)
{
	struct fs_cancel *c = NULL;

	pthread_mutex_lock(&b->m);
	if (b->n > 0)
		c = fs_cancel_ref(b->queue[0]->cancel);
	pthread_mutex_unlock(&b->m);
	if (c != NULL)
		fs_cancel_fire(c, FS_CANCEL_CLIENT);
	fs_cancel_unref(c);
}

static void push_error(struct inbox *b, const struct fs_errbuf *e)
{
	struct inbox_order *o = calloc(1, sizeof(*o));

	FS_ASSERT(o != NULL);
	o->error = *e;
	push(b, o);
}

/* False when reading is over. */
static bool take_line(struct inbox *b, const char *line, size_t n)
{
	struct inbox_order *o = calloc(1, sizeof(*o));
	int err;

	FS_ASSERT(o != NULL);
	err = fs_order_parse(line, n, b->extended, &o->order, &o->error);
	if (err == FS_OK && o->order.kind == FS_ORDER_CANCEL) {
		cancel_oldest(b);
		order_free(o);
		return true;
	}
	if (err == FS_OK && o->order.kind == FS_ORDER_QUIT) {
		order_free(o);
		pthread_mutex_lock(&b->m);
		b->quit = true;
		pthread_cond_broadcast(&b->changed);
		pthread_mutex_unlock(&b->m);
		return false;
	}
	if (err == FS_OK) {
		o->cancel = fs_cancel_create(FS_NEVER);
		FS_ASSERT(o->cancel != NULL);
		o->error.text[0] = 0;
	}
	push(b, o);
	return true;
}

static bool take_lines(struct inbox *b)
{
	struct fs_errbuf e;
	size_t n;
	int err;

	while ((err = fs_line_next(&b->in, &n, &e)) == FS_OK) {
		bool skip = b->skipping;

		b->skipping = false;
		if (!skip && !take_line(b, (const char *)b->in.data, n))
			return false;
		fs_buf_consume(&b->in, n + 1);
	}
	if (err == FS_EFORMAT) {
		if (!b->skipping)
			push_error(b, &e);
		b->skipping = true;
		fs_buf_clear(&b->in);
	}
	return true;
}

/* False at the end of stdin. */
static bool read_some(struct inbox *b)
{
	uint8_t chunk[FS_LINE_MAX];
	ssize_t n = read(STDIN_FILENO, chunk, sizeof(chunk));

	if (n < 0)
		return errno == EINTR || errno == EAGAIN;
	if (n == 0)
		return false;
	FS_ASSERT(fs_buf_append(&b->in, chunk, (size_t)n) == FS_OK);
	return true;
}

/* Nobody waits for answers any more: stop what runs; if it does not stop in time, end without it. */
static void end_now(struct inbox *b)
{
	int64_t deadline = fs_deadline_ms(END_GRACE_MS);

	pthread_mutex_lock(&b->m);
	if (!b->ready)
		_exit(0);
	b->ended = true;
	for (int i = 0; i < b->n; i++)
		if (b->queue[i]->cancel != NULL)
			fs_cancel_fire(b->queue[i]->cancel, FS_CANCEL_SHUTDOWN);
	pthread_cond_broadcast(&b->changed);
	while (!b->finished && (b->writing || fs_now() < deadline))
		fs_cond_wait_until(&b->changed, &b->m, b->writing ? FS_NEVER : deadline);
	if (!b->finished)
		_exit(0);
	pthread_mutex_unlock(&b->m);
}

static void *read_orders(void *arg)
{
	struct inbox *b = arg;
	struct pollfd p[3] = {{STDIN_FILENO, POLLIN, 0}, {b->signals, POLLIN, 0}, {b->stop, POLLIN, 0}};

	for (;;) {
		if (poll(p, 3, -1) < 0)
			continue;
		if (p[2].revents != 0)
			return NULL;
		if (p[1].revents != 0 || (p[0].revents != 0 && !read_some(b))) {
			end_now(b);
			return NULL;
		}
		if (p[0].revents != 0 && !take_lines(b))
			p[0].fd = -1; /* after QUIT only signals matter */
	}
}

/* ---- the encoder's side ---- */

int inbox_open(struct inbox **out, bool extended, struct fs_errbuf *e)
{
	struct inbox *b = calloc(1, sizeof(*b));
	sigset_t set;
	int err;

	if (b == NULL)
		return fs_fail(e, FS_ENOMEM, "no memory");
	b->extended = extended;
	fs_buf_init(&b->in, 2 * FS_LINE_MAX);
	pthread_mutex_init(&b->m, NULL);
	fs_cond_init(&b->changed);
	sigemptyset(&set);
	sigaddset(&set, SIGTERM);
	sigaddset(&set, SIGINT);
	sigaddset(&set, SIGHUP);
	b->signals = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
	b->stop = fs_wake_open();
	if (b->signals < 0 || b->stop < 0)
		err = fs_fail_errno(e, FS_EIO, "cannot watch for signals");
	else
		err = fs_thread_start(&b->thread, "orders", read_orders, b, e);
	if (err != FS_OK) {
		b->thread = 0;
		inbox_close(b);
		return err;
	}
	*out = b;
	return FS_OK;
}

void inbox_ready(struct inbox *b)
{
	pthread_mutex_lock(&b->m);
	b->ready = true;
	pthread_mutex_unlock(&b->m);
}

struct inbox_order *inbox_next(struct inbox *b)
{
	struct inbox_order *o = NULL;

	pthread_mutex_lock(&b->m);
	while (b->n == 0 && !b->quit && !b->ended)
		fs_cond_wait_until(&b->changed, &b->m, FS_NEVER);
	if (b->n > 0 && !b->ended)
		o = b->queue[0];
	pthread_mutex_unlock(&b->m);
	return o;
}

void inbox_done(struct inbox *b)
{
	struct inbox_order *o;

	pthread_mutex_lock(&b->m);
	FS_ASSERT(b->n > 0);
	o = b->queue[0];
	b->n--;
	memmove(b->queue, b->queue + 1, (size_t)b->n * sizeof(struct inbox_order *));
	pthread_cond_broadcast(&b->changed);
	pthread_mutex_unlock(&b->m);
	order_free(o);
}

void inbox_writing(struct inbox *b, bool writing)
{
	pthread_mutex_lock(&b->m);
	b->writing = writing;
	pthread_cond_broadcast(&b->changed);
	pthread_mutex_unlock(&b->m);
}

void inbox_close(struct inbox *b)
{
	if (b == NULL)
		return;
	pthread_mutex_lock(&b->m);
	b->finished = true;
	pthread_cond_broadcast(&b->changed);
	pthread_mutex_unlock(&b->m);
	if (b->thread != 0) {
		fs_wake(b->stop);
		pthread_join(b->thread, NULL);
	}
	for (int i = 0; i < b->n; i++)
		order_free(b->queue[i]);
	if (b->signals >= 0)
		close(b->signals);
	if (b->stop >= 0)
		close(b->stop);
	fs_buf_finish(&b->in);
	pthread_cond_destroy(&b->changed);
	pthread_mutex_destroy(&b->m);
	free(b);
}
