/*
 * The relay: two rings of 256 KiB, one a direction. A full ring stops the reading on its side, so that a slow
 * reader slows the writer down and nothing piles up here.
 */
#include "remote/agent/agent.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

#define RING ((size_t)256 * 1024)
#define FLUSH_MS 2000

struct ring {
	uint8_t *data;
	size_t start, len;
};

/* The free (or filled) bytes as at most two pieces; 0 when there are none. */
static int pieces(const struct ring *r, bool filled, struct iovec v[2])
{
	size_t at = filled ? r->start : (r->start + r->len) % RING;
	size_t n = filled ? r->len : RING - r->len;
	size_t first = FS_MIN(n, RING - at);
	v[0] = (struct iovec){r->data + at, first};
	v[1] = (struct iovec){r->data, n - first};
	return (n > 0) + (n > first);
}

/* FS_OK: bytes moved or none to be had now; FS_EUNAVAILABLE: the end of it, or it broke. */
static int fill(struct ring *r, int fd)
{
	struct iovec v[2];
	int n_pieces = pieces(r, false, v);
	ssize_t n = n_pieces ? readv(fd, v, n_pieces) : 1;
	if (n_pieces == 0 || (n < 0 && (errno == EAGAIN || errno == EINTR)))
		return FS_OK;
	if (n <= 0)
		return FS_EUNAVAILABLE;
	r->len += (size_t)n;
	return FS_OK;
}

static int drain(struct ring *r, int fd)
{
	struct iovec v[2];
	int n_pieces = pieces(r, true, v);
	ssize_t n = n_pieces ? writev(fd, v, n_pieces) : 0;
	if (n_pieces == 0 || (n < 0 && (errno == EAGAIN || errno == EINTR)))
		return FS_OK;
	if (n < 0)
		return FS_EUNAVAILABLE;
	r->len -= (size_t)n;
	r->start = r->len ? (r->start + (size_t)n) % RING : 0;
	return FS_OK;
}

struct relay {
	int in, out, sock;
	struct ring up, down; /* in -> sock, sock -> out */
};

/* One side has ended: what was read from it is still written to the other. */
static void flush(struct ring *r, int fd)
{
	int64_t until = fs_deadline_ms(FLUSH_MS);
	while (r->len && fs_now() < until) {
		struct pollfd p = {.fd = fd, .events = POLLOUT};
		int n = poll(&p, 1, fs_poll_ms(until));
		if ((n < 0 && errno != EINTR) || (n > 0 && drain(r, fd)))
			return;
	}
}

static int run(struct relay *r, enum fs_relay_end *end, struct fs_errbuf *e)
{
	for (;;) {
		struct pollfd p[3] = {
		        {.fd = r->up.len < RING ? r->in : -1, .events = POLLIN},
		        {.fd = r->out, .events = r->down.len ? POLLOUT : 0},
		        /* out of the set when nothing can be done with it: a hang-up would be told again and
		           again */
		        {.fd = r->down.len < RING || r->up.len ? r->sock : -1,
		                .events = (short)((r->down.len < RING ? POLLIN : 0) |
		                                  (r->up.len ? POLLOUT : 0))},
		};
		if (poll(p, 3, -1) < 0) {
			if (errno == EINTR)
				continue;
			return fs_fail_errno(e, FS_EIO, "poll");
		}
		bool in_end = p[0].revents && fill(&r->up, r->in);
		bool sock_end = (p[2].revents & (POLLIN | POLLHUP | POLLERR)) && fill(&r->down, r->sock);
		/* Tried at once rather than after another poll: the other side is nearly always ready. */
		sock_end |= drain(&r->up, r->sock) != FS_OK;
		bool out_end = drain(&r->down, r->out) != FS_OK || (p[1].revents & (POLLERR | POLLNVAL));
		if (in_end || out_end) {
			*end = FS_RELAY_PEER_GONE;
			flush(&r->up, r->sock);
			return FS_OK;
		}
		if (sock_end) {
			*end = FS_RELAY_WATCHDOG_GONE;
			flush(&r->down, r->out);
			return FS_OK;
		}
	}
}

int fs_agent_relay(
        int in, int out, int sock, const void *first, size_t n, enum fs_relay_end *end, struct fs_errbuf *e)
{
	struct relay r = {.in = in, .out = out, .sock = sock};
	const int fds[] = {in, out, sock};
	FS_ASSERT(n <= RING);
	for (size_t i = 0; i < FS_ARRAY_LEN(fds); i++) {
		int flags = fcntl(fds[i], F_GETFL);
		if (flags < 0 || fcntl(fds[i], F_SETFL, flags | O_NONBLOCK))
			return fs_fail_errno(e, FS_EIO, "can not prepare the relay");
	}
	r.up.data = malloc(RING);
	r.down.data = malloc(RING);
	int rc = FS_ENOMEM;
	if (r.up.data && r.down.data) {
		memcpy(r.up.data, first, n);
		r.up.len = n;
		rc = run(&r, end, e);
	} else {
		fs_fail(e, rc, "out of memory");
	}
	free(r.up.data);
	free(r.down.data);
	return rc;
}
