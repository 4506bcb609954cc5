/*
 * pool: a parallel loop with little latency. The owner thread publishes a job; it and the workers claim task
 * numbers from one atomic word. A worker that is still asleep is never waited for, so small jobs cost no
 * wake-up. It refuses nested use.
 *
 * The claim word holds a generation (high half) and the next task (low half). Before the job's fields change
 * the owner stores CLOSED in the low half under a new generation; a worker that read fields of two jobs
 * therefore fails its compare-and-swap.
 */
#include "common/compute/cpu/pool.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#define CLOSED 0xffffffffu
#define SPINS 4000 /* pause instructions before sleeping: about 50 us on current processors */

struct worker {
	pthread_t thread;
	struct fs_pool *pool;
	int index;
};

struct fs_pool {
	int threads;
	int started; /* worker threads that run */
	void (*on_start)(void);

	_Alignas(64) _Atomic uint64_t claim;
	_Atomic uint32_t n_tasks;
	_Atomic(fs_task_fn *) fn;
	_Atomic(void *) arg;
	_Alignas(64) _Atomic uint32_t done; /* tasks finished of this job; futex of the owner */
	_Atomic uint32_t owner_sleeps;
	_Alignas(64) _Atomic uint32_t epoch; /* counts jobs; futex of the workers */
	_Atomic uint32_t sleepers;
	_Atomic bool stop;
	struct worker workers[];
};

static void relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
	__builtin_ia32_pause();
#else
	atomic_signal_fence(memory_order_seq_cst);
#endif
}

static void futex_wait(_Atomic uint32_t *word, uint32_t seen)
{
	syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
}

static void futex_wake(_Atomic uint32_t *word, int n)
{
	syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, n, NULL, NULL, 0);
}

/* Claims and runs tasks of the open job until none is left. */
static void work(struct fs_pool *p, int worker)
{
	for (;;) {
		uint64_t c = atomic_load_explicit(&p->claim, memory_order_acquire);
		uint32_t task = (uint32_t)c;
		uint32_t n = atomic_load_explicit(&p->n_tasks, memory_order_acquire);
		fs_task_fn *fn = atomic_load_explicit(&p->fn, memory_order_acquire);
		void *arg = atomic_load_explicit(&p->arg, memory_order_acquire);

		if (task == CLOSED || task >= n)
			return;
		if (!atomic_compare_exchange_strong(&p->claim, &c, c + 1))
			continue;
		fn(arg, task, worker);
		if (atomic_fetch_add(&p->done, 1) + 1 == n && atomic_load(&p->owner_sleeps))
			futex_wake(&p->done, 1);
	}
}

static void wait_for_job(struct fs_pool *p, uint32_t seen)
{
	for (int i = 0; i < SPINS; i++) {
		if (atomic_load_explicit(&p->epoch, memory_order_acquire) != seen)
			return;
		relax();
	}
	atomic_fetch_add(&p->sleepers, 1);
	while (atomic_load(&p->epoch) == seen)
		futex_wait(&p->epoch, seen);
	atomic_fetch_sub(&p->sleepers, 1);
}

static void *worker_main(void *arg)
{
	struct worker *w = arg;
	struct fs_pool *p = w->pool;
	uint32_t seen = 0;

	if (p->on_start)
		p->on_start();
	for (;;) {
		wait_for_job(p, seen);
		seen = atomic_load_explicit(&p->epoch, memory_order_acquire);
		if (atomic_load(&p->stop))
			return NULL;
		work(p, w->index);
	}
}

int fs_pool_create(int threads, void (*on_start)(void), struct fs_pool **out, struct fs_errbuf *e)
{
	struct fs_pool *p;
	size_t size = sizeof(*p) + (size_t)threads * sizeof(struct worker);
	int err = FS_OK;

	FS_ASSERT(threads >= 1 && threads <= 1024);
	size = (size + 63) & ~(size_t)63;
	p = aligned_alloc(64, size);
	if (!p)
		return fs_fail(e, FS_ENOMEM, "no memory for %d workers", threads);
	*p = (struct fs_pool){.threads = threads, .on_start = on_start, .claim = CLOSED};
	for (int i = 1; i < threads && !err; i++) {
		char name[16];

		p->workers[i] = (struct worker){.pool = p, .index = i};
		snprintf(name, sizeof(name), "compute-%d", i);
		err = fs_thread_start(&p->workers[i].thread, name, worker_main, &p->workers[i], e);
		if (!err)
			p->started = i;
	}
	if (err) {
		fs_pool_destroy(p);
		return err;
	}
	*out = p;
	return FS_OK;
}

void fs_pool_destroy(struct fs_pool *p)
{
	if (!p)
		return;
	atomic_store(&p->stop, true);
	atomic_fetch_add(&p->epoch, 1);
	futex_wake(&p->epoch, INT_MAX);
	for (int i = 1; i <= p->started; i++)
		pthread_join(p->workers[i].thread, NULL);
	free(p);
}

int fs_pool_threads(const struct fs_pool *p)
{
	return p->threads;
}

static void wait_until_done(struct fs_pool *p, uint32_t n)
{
	uint32_t done;

	for (int i = 0; i < SPINS; i++) {
		if (atomic_load_explicit(&p->done, memory_order_acquire) == n)
			return;
		relax();
	}
	atomic_store(&p->owner_sleeps, 1);
	while ((done = atomic_load(&p->done)) != n)
		futex_wait(&p->done, done);
	atomic_store(&p->owner_sleeps, 0);
}

static void run_some(struct fs_pool *p, uint32_t n, fs_task_fn *fn, void *arg)
{
	uint64_t gen = (atomic_load(&p->claim) >> 32) + 1;
	uint32_t sleepers;

	atomic_store(&p->claim, gen << 32 | CLOSED);
	atomic_store_explicit(&p->n_tasks, n, memory_order_release);
	atomic_store_explicit(&p->fn, fn, memory_order_release);
	atomic_store_explicit(&p->arg, arg, memory_order_release);
	atomic_store(&p->done, 0);
	atomic_store(&p->claim, (gen + 1) << 32);
	atomic_fetch_add(&p->epoch, 1);
	sleepers = atomic_load(&p->sleepers);
	if (sleepers)
		futex_wake(&p->epoch, (int)FS_MIN(sleepers, n - 1));
	work(p, 0);
	wait_until_done(p, n);
}

void fs_pool_run(struct fs_pool *p, int64_t n_tasks, fs_task_fn *fn, void *arg)
{
	if (p->threads == 1 || n_tasks == 1) {
		for (int64_t i = 0; i < n_tasks; i++)
			fn(arg, i, 0);
		return;
	}
	FS_ASSERT(n_tasks < CLOSED);
	if (n_tasks > 0)
		run_some(p, (uint32_t)n_tasks, fn, arg);
}
