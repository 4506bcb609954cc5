/*
 * pool: the workers of one CPU device. One thread (the device's owner) hands out work and takes part in it as
 * worker 0. Workers spin for some tens of microseconds after work, since the next operation of a graph
 * follows at once, then sleep in the kernel.
 */
#ifndef FS_COMPUTE_CPU_POOL_H
#define FS_COMPUTE_CPU_POOL_H

#include "common/base/base.h"

struct fs_pool;

/* threads: the owner and threads - 1 workers; 1..1024. on_start runs once in every worker (not in the owner);
 * may be NULL. */
int fs_pool_create(int threads, void (*on_start)(void), struct fs_pool **out, struct fs_errbuf *e);
void fs_pool_destroy(struct fs_pool *p); /* NULL is fine; no work may be running */
int fs_pool_threads(const struct fs_pool *p);

/* A task: index in 0..n_tasks-1, worker in 0..threads-1 (for scratch memory; no two tasks run with the same
 * worker at once). */
typedef void fs_task_fn(void *arg, int64_t task, int worker);
/* Runs fn for every task and returns when all are done. Not re-entrant. */
void fs_pool_run(struct fs_pool *p, int64_t n_tasks, fs_task_fn *fn, void *arg);

#endif
