/* Threads that each carry one request at a time; most of that time they sleep, waiting for pictures or for
 * the turn. */
#include "server/service/workers.h"

#include <stdlib.h>

struct call {
	void (*fn)(void *arg);
	void *arg;
};

struct fs_workers {
	pthread_mutex_t lock;
	pthread_cond_t more;
	struct call *queue; /* ring of depth */
	size_t depth, head, waiting, idle;
	bool closing;
	int n_threads;
	pthread_t threads[];
};

static void *worker(void *p)
{
	struct fs_workers *w = p;
	pthread_mutex_lock(&w->lock);
	for (;;) {
		w->idle++;
		while (w->waiting == 0 && !w->closing)
			pthread_cond_wait(&w->more, &w->lock);
		w->idle--;
		if (w->waiting == 0)
			break;
		struct call c = w->queue[w->head];
		w->head = (w->head + 1) % w->depth;
		w->waiting--;
		pthread_mutex_unlock(&w->lock);
		c.fn(c.arg);
		pthread_mutex_lock(&w->lock);
	}
	pthread_mutex_unlock(&w->lock);
	return NULL;
}

int fs_workers_create(int threads, size_t depth, struct fs_workers **out, struct fs_errbuf *e)
{
	struct fs_workers *w = calloc(1, sizeof(*w) + (size_t)threads * sizeof(pthread_t));
	size_t slots = depth + (size_t)threads; /* calls that find an idle thread do not count as waiting */
	struct call *queue = calloc(slots, sizeof(*queue));
	if (!w || !queue) {
		free(w);
		free(queue);
		return fs_fail(e, FS_ENOMEM, "out of memory");
	}
	w->queue = queue;
	w->depth = slots;
	pthread_mutex_init(&w->lock, NULL);
	pthread_cond_init(&w->more, NULL);
	for (int i = 0; i < threads; i++) {
		int rc = fs_thread_start(&w->threads[i], "worker", worker, w, e);
		if (rc) {
			fs_workers_destroy(w);
			return rc;
		}
		w->n_threads++;
	}
	*out = w;
	return FS_OK;
}

int fs_workers_submit(struct fs_workers *w, void (*fn)(void *arg), void *arg)
{
	pthread_mutex_lock(&w->lock);
	size_t limit = w->depth - (size_t)w->n_threads + w->idle;
	bool full = w->closing || w->waiting >= limit;
	if (!full) {
		w->queue[(w->head + w->waiting) % w->depth] = (struct call){fn, arg};
		w->waiting++;
		pthread_cond_signal(&w->more);
	}
	pthread_mutex_unlock(&w->lock);
	return full ? FS_EUNAVAILABLE : FS_OK;
}

void fs_workers_destroy(struct fs_workers *w)
{
	if (!w)
		return;
	pthread_mutex_lock(&w->lock);
	w->closing = true;
	pthread_cond_broadcast(&w->more);
	pthread_mutex_unlock(&w->lock);
	for (int i = 0; i < w->n_threads; i++)
		pthread_join(w->threads[i], NULL);
	pthread_cond_destroy(&w->more);
	pthread_mutex_destroy(&w->lock);
	free(w->queue);
	free(w);
}
