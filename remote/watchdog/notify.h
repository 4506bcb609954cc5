/*
 * notify: what a service manager wants to hear, by the datagrams of sd_notify(3): ready, reloading, stopping,
 * a line of status, and a sign of life at half the time of the unit's WatchdogSec. Does nothing when nobody
 * asked for it. One thread, never blocks: a manager that does not read loses the message.
 */
#ifndef FS_WATCHDOG_NOTIFY_H
#define FS_WATCHDOG_NOTIFY_H

#include "remote/watchdog/pollset.h"

struct fs_notify {
	int fd;         /* -1 = no service manager */
	char path[108]; /* of its socket, '@' first for an abstract one; kept over an exec */
	int64_t every;  /* ns between signs of life; 0 = none wanted */
	int64_t next;
	char status[160]; /* told last */
};

/* Takes NOTIFY_SOCKET, WATCHDOG_USEC and WATCHDOG_PID out of the environment, so that no encoder speaks for
 * us. */
void fs_notify_init(struct fs_notify *n);
/* The same from what an earlier program of this process knew. */
void fs_notify_resume(struct fs_notify *n, const char *path, int64_t every);
void fs_notify_finish(struct fs_notify *n);

bool fs_notify_wanted(const struct fs_notify *n);
void fs_notify_send(struct fs_notify *n, const char *text);
/* RELOADING=1 with its time; READY=1 ends it. */
void fs_notify_reloading(struct fs_notify *n);
/* STATUS=, when it is another one than the last. */
void fs_notify_status(struct fs_notify *n, const char *fmt, ...) FS_PRINTF(2, 3);
void fs_notify_prepare(const struct fs_notify *n, struct fs_pollset *ps);
void fs_notify_dispatch(struct fs_notify *n);

#endif
