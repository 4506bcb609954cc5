/*
 * One round of poll(2): each part of the watchdog adds its descriptors and its next deadline before the wait
 * and looks its slots up after it. Rebuilt every round, so that no part holds state in it.
 */
#ifndef FS_WATCHDOG_POLLSET_H
#define FS_WATCHDOG_POLLSET_H

#include "common/base/base.h"

#include <poll.h>

#define FS_POLLSET_MAX 320

struct fs_pollset {
	struct pollfd fds[FS_POLLSET_MAX];
	size_t n;
	int64_t deadline; /* monotonic ns; the earliest one asked for */
};

static inline void fs_pollset_until(struct fs_pollset *p, int64_t deadline)
{
	p->deadline = FS_MIN(p->deadline, deadline);
}

/* The slot to ask for after the wait. Limits on connections and leases keep the set from filling up. */
static inline int fs_pollset_add(struct fs_pollset *p, int fd, short events)
{
	FS_ASSERT(p->n < FS_POLLSET_MAX);
	p->fds[p->n] = (struct pollfd){.fd = fd, .events = events};
	return (int)p->n++;
}

static inline short fs_pollset_got(const struct fs_pollset *p, int slot)
{
	return slot >= 0 && (size_t)slot < p->n ? p->fds[slot].revents : 0;
}

#endif
