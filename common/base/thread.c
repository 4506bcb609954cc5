/* Named threads with signals blocked, condition variables on the monotonic clock, eventfd wake-ups. */
#include "common/base/base.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

struct start {
	void *(*fn)(void *);
	void *arg;
	char name[16];
};

static void *run(void *p)
{
	struct start s = *(struct start *)p;
	free(p);
	pthread_setname_np(pthread_self(), s.name);
	return s.fn(s.arg);
}

int fs_thread_start(pthread_t *out, const char *name, void *(*fn)(void *), void *arg, struct fs_errbuf *e)
{
	struct start *s = malloc(sizeof(*s));
	if (!s)
		return fs_fail(e, FS_ENOMEM, "out of memory");
	s->fn = fn;
	s->arg = arg;
	snprintf(s->name, sizeof(s->name), "%s", name);

	sigset_t all, old;
	sigfillset(&all);
	sigdelset(&all, SIGBUS); /* the fault of a thread itself: where it is blocked no handler is called */
	pthread_sigmask(SIG_SETMASK, &all, &old);
	int rc = pthread_create(out, NULL, run, s);
	pthread_sigmask(SIG_SETMASK, &old, NULL);
	if (rc) {
		free(s);
		errno = rc;
		return fs_fail_errno(e, FS_EIO, "can not start thread %s", name);
	}
	return FS_OK;
}

int fs_cond_init(pthread_cond_t *c)
{
	pthread_condattr_t a;
	if (pthread_condattr_init(&a))
		return FS_ENOMEM;
	pthread_condattr_setclock(&a, CLOCK_MONOTONIC);
	int rc = pthread_cond_init(c, &a);
	pthread_condattr_destroy(&a);
	return rc ? FS_ENOMEM : FS_OK;
}

bool fs_cond_wait_until(pthread_cond_t *c, pthread_mutex_t *m, int64_t deadline)
{
	if (deadline == FS_NEVER) {
		pthread_cond_wait(c, m);
		return true;
	}
	struct timespec ts = {.tv_sec = (time_t)(deadline / FS_SEC), .tv_nsec = (long)(deadline % FS_SEC)};
	return pthread_cond_timedwait(c, m, &ts) != ETIMEDOUT;
}

int fs_wake_open(void)
{
	int fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	return fd < 0 ? FS_EIO : fd;
}

void fs_wake(int fd)
{
	uint64_t one = 1;
	ssize_t n;
	do
		n = write(fd, &one, sizeof(one));
	while (n < 0 && errno == EINTR);
}

void fs_wake_drain(int fd)
{
	uint64_t v;
	ssize_t n = read(fd, &v, sizeof(v));
	(void)n;
}
