/*
 * workers: threads that carry one request at a time; most of that time they sleep, waiting for pictures or
 * for the turn, so there is no queue in front of them: a call gets a thread at once or is refused. Threads
 * are started as they are needed, at most `max`, and end when they had nothing to do for a while. Any thread
 * may submit.
 */
#ifndef FS_SERVER_SERVICE_WORKERS_H
#define FS_SERVER_SERVICE_WORKERS_H

#include "common/base/base.h"

struct fs_workers;
int fs_workers_create(int max, struct fs_workers **out, struct fs_errbuf *e);
/* FS_EUNAVAILABLE when max calls run, when no thread could be started, or after destroy has begun. */
int fs_workers_submit(struct fs_workers *w, void (*fn)(void *arg), void *arg);
size_t fs_workers_busy(struct fs_workers *w); /* calls that run */
/* Waits for the calls that run. NULL is fine. */
void fs_workers_destroy(struct fs_workers *w);

#endif
