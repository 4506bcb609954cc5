/*
 * Name lookup and TCP connect within a deadline, and the one poll that all steps of a connection wait in.
 * getaddrinfo can not be interrupted, so it runs on a detached thread that outlives an impatient caller; at
 * most MAX_LOOKUPS of them exist in the process.
 */
#include "server/ssh/internal.h"

#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define MAX_LOOKUPS 32
#define MAX_ADDRESSES 8
#define USER_TIMEOUT_MS 15000u /* unacknowledged data for so long: the host is gone */

static atomic_int lookups; /* threads that are in getaddrinfo now */

int fs_patience_poll(const struct fs_patience *p, int fd, short events)
{
	struct pollfd pf[2] = {{.fd = fd, .events = events}, {.fd = p->wake_fd, .events = POLLIN}};
	if (p->cancelled && p->cancelled(p->arg))
		return FS_ECANCELLED;
	if (fs_now() >= p->deadline)
		return FS_ETIMEOUT;
	int n = poll(pf, 2, fs_poll_ms(p->deadline));
	if (n < 0 && errno != EINTR)
		return FS_EIO;
	if (n > 0 && (pf[1].revents & POLLIN))
		fs_wake_drain(p->wake_fd); /* or it would stay readable and this would spin */
	if (p->cancelled && p->cancelled(p->arg))
		return FS_ECANCELLED;
	if (n > 0 && pf[0].revents)
		return FS_OK;
	return fs_now() >= p->deadline ? FS_ETIMEOUT : FS_OK;
}

/* ---- lookup ---- */

struct lookup {
	atomic_int refs; /* caller and thread */
	char host[256], port[8];
	int done_fd; /* eventfd */
	atomic_bool done;
	int gai, sys_errno;
	struct addrinfo *list;
};

static void lookup_unref(struct lookup *l)
{
	if (atomic_fetch_sub(&l->refs, 1) != 1)
		return;
	if (l->list)
		freeaddrinfo(l->list);
	close(l->done_fd);
	free(l);
}

static void *lookup_run(void *arg)
{
	struct lookup *l = arg;
	struct addrinfo hints = {
	        .ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM, .ai_flags = AI_ADDRCONFIG};
	l->gai = getaddrinfo(l->host, l->port, &hints, &l->list);
	l->sys_errno = errno;
	atomic_store(&l->done, true);
	fs_wake(l->done_fd);
	lookup_unref(l);
	atomic_fetch_sub(&lookups, 1);
	return NULL;
}

static struct lookup *lookup_create(const char *host, int port)
{
	struct lookup *l = calloc(1, sizeof(*l));
	if (!l)
		return NULL;
	atomic_init(&l->refs, 1);
	snprintf(l->host, sizeof(l->host), "%s", host);
	snprintf(l->port, sizeof(l->port), "%d", port);
	l->done_fd = fs_wake_open();
	if (l->done_fd < 0) {
		free(l);
		return NULL;
	}
	return l;
}

static int lookup_start(struct lookup *l, struct fs_errbuf *e)
{
	if (atomic_fetch_add(&lookups, 1) >= MAX_LOOKUPS) {
		atomic_fetch_sub(&lookups, 1);
		return fs_fail(e, FS_EUNAVAILABLE, "%d name lookups are hanging; check the name servers",
		        MAX_LOOKUPS);
	}
	atomic_fetch_add(&l->refs, 1);
	pthread_t t;
	int rc = fs_thread_start(&t, "fs-lookup", lookup_run, l, e);
	if (rc) {
		atomic_fetch_sub(&lookups, 1);
		atomic_fetch_sub(&l->refs, 1);
		return rc;
	}
	pthread_detach(t);
	return FS_OK;
}

/* Addresses as digits need no thread and no name server. */
static bool lookup_numeric(struct lookup *l)
{
	struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_NUMERICHOST | AI_NUMERICSERV};
	return getaddrinfo(l->host, l->port, &hints, &l->list) == 0;
}

static int lookup_wait(struct lookup *l, const struct fs_patience *p, struct fs_errbuf *e)
{
	int rc = lookup_start(l, e);
	if (rc)
		return rc;
	while (!atomic_load(&l->done)) {
		rc = fs_patience_poll(p, l->done_fd, POLLIN);
		if (rc == FS_ETIMEOUT)
			return fs_fail(e, rc, "looking up the name %s took too long", l->host);
		if (rc)
			return fs_fail(e, rc, "cancelled");
	}
	if (l->gai == EAI_SYSTEM) {
		errno = l->sys_errno;
		return fs_fail_errno(e, FS_EUNAVAILABLE, "can not look up the name %s", l->host);
	}
	if (l->gai)
		return fs_fail(
		        e, FS_EUNAVAILABLE, "can not look up the name %s: %s", l->host, gai_strerror(l->gai));
	return FS_OK;
}

/* ---- connect ---- */

static void tune(int fd)
{
	/* The send buffer is left to the kernel on purpose: a fixed small one makes libssh2 send packets in
	 * part. */
	int on = 1, idle = 15, every = 5, count = 3;
	unsigned user_timeout = USER_TIMEOUT_MS;
	setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
	setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof(on));
	setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof(idle));
	setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &every, sizeof(every));
	setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &count, sizeof(count));
	setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &user_timeout, sizeof(user_timeout));
}

/* *fd is set on FS_OK alone. errno tells why else (ETIMEDOUT for the patience). */
static int try_address(const struct addrinfo *ai, const struct fs_patience *p, int *out)
{
	int fd = socket(ai->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
	if (fd < 0)
		return FS_EIO;
	int rc = FS_OK, err = 0;
	socklen_t n = sizeof(err);
	if (connect(fd, ai->ai_addr, ai->ai_addrlen) == 0) {
		*out = fd;
		return FS_OK;
	}
	if (errno != EINPROGRESS) {
		err = errno;
		rc = FS_EUNAVAILABLE;
	}
	while (!rc) {
		struct pollfd now = {.fd = fd, .events = POLLOUT};
		if (poll(&now, 1, 0) > 0) {
			if (getsockopt(fd, SOL_SOCKET, SO_ERROR, &err, &n) || err)
				rc = FS_EUNAVAILABLE;
			break;
		}
		rc = fs_patience_poll(p, fd, POLLOUT);
		if (rc == FS_ETIMEOUT)
			err = ETIMEDOUT;
	}
	if (!rc) {
		*out = fd;
		return FS_OK;
	}
	close(fd);
	errno = err;
	return rc;
}

static int dial_list(const struct addrinfo *list, const char *host, int port, const struct fs_patience *p,
        int *fd, struct fs_errbuf *e)
{
	int left = 0, rc = FS_EUNAVAILABLE;
	for (const struct addrinfo *ai = list; ai && left < MAX_ADDRESSES; ai = ai->ai_next)
		left++;
	for (const struct addrinfo *ai = list; left > 0; ai = ai->ai_next, left--) {
		/* what is left is shared among the addresses that are left, so that one black hole does not
		 * use it all up */
		struct fs_patience mine = *p;
		int64_t now = fs_now();
		if (left > 1 && p->deadline > now && p->deadline != FS_NEVER)
			mine.deadline = now + (p->deadline - now) / left;
		rc = try_address(ai, &mine, fd);
		if (!rc)
			return FS_OK;
		if (rc == FS_ECANCELLED)
			return fs_fail(e, rc, "cancelled");
		int err = errno;
		char text[64] = "?";
		getnameinfo(ai->ai_addr, ai->ai_addrlen, text, sizeof(text), NULL, 0, NI_NUMERICHOST);
		errno = err;
		rc = fs_fail_errno(e, err == ETIMEDOUT ? FS_ETIMEOUT : FS_EUNAVAILABLE,
		        err == ECONNREFUSED ? "nothing listens on %s (%s) port %d; is sshd running there?"
		                            : "can not connect to %s (%s) port %d",
		        host, text, port);
	}
	return rc;
}

int fs_ssh_dial(const char *host, int port, const struct fs_patience *p, int *fd, struct fs_errbuf *e)
{
	struct lookup *l = lookup_create(host, port);
	if (!l)
		return fs_fail(e, FS_ENOMEM, "out of memory or descriptors");
	int rc = lookup_numeric(l) ? FS_OK : lookup_wait(l, p, e);
	if (!rc)
		rc = dial_list(l->list, host, port, p, fd, e);
	if (!rc)
		tune(*fd);
	lookup_unref(l);
	return rc;
}
