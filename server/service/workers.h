/* workers: a fixed number of threads and a bounded queue of calls in front of them. Any thread may submit. */
#ifndef FS_SERVER_SERVICE_WORKERS_H
#define FS_SERVER_SERVICE_WORKERS_H

#include "common/base/base.h"

struct fs_workers;
int fs_workers_create(int threads, size_t depth, struct fs_workers **out, struct fs_errbuf *e);
/* FS_EUNAVAILABLE when depth calls wait, or after destroy has begun. */
int fs_workers_submit(struct fs_workers *w, void (*fn)(void *arg), void *arg);
/* Runs what is queued, then joins. NULL is fine. */
void fs_workers_destroy(struct fs_workers *w);

#endif
