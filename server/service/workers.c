/* An idle thread waits with a condition of its own, in a stack: the last to become idle is the first to work
 * again, so that the others can end. */
#include "server/service/workers.h"

#include <stdlib.h>

#define IDLE_MS 30000

struct worker {
	struct fs_workers *w;
	struct worker *below; /* in the stack of idle ones */
	pthread_cond_t wake;
	void (*fn)(void *arg); /* NULL: nothing to do */
	void *arg;
	bool idle;
};

struct fs_workers {
	pthread_mutex_t lock;
	pthread_cond_t ended;
	struct worker *idle;
	int max, running, n_idle; /* threads */
	bool closing;
};

static void remove_idle(struct fs_workers *w, struct worker *me)
{
	struct worker **at = &w->idle;
	while (*at != me)
		at = &(*at)->below;
	*at = me->below;
	me->idle = false;
	w->n_idle--;
}

/* Waits for a call; false: the thread is to end. */
static bool next_call(struct fs_workers *w, struct worker *me)
{
	int64_t until = fs_deadline_ms(IDLE_MS);
	me->fn = NULL;
	me->idle = true;
	me->below = w->idle;
	w->idle = me;
	w->n_idle++;
	while (me->idle && !w->closing)
		if (!fs_cond_wait_until(&me->wake, &w->lock, until))
			break;
	if (me->idle)
		remove_idle(w, me);
	return me->fn != NULL;
}

static void *work(void *arg)
{
	struct worker *me = arg;
	struct fs_workers *w = me->w;
	pthread_mutex_lock(&w->lock);
	do {
		pthread_mutex_unlock(&w->lock);
		me->fn(me->arg);
		pthread_mutex_lock(&w->lock);
	} while (next_call(w, me));
	pthread_cond_destroy(&me->wake);
	free(me);
	w->running--;
	pthread_cond_signal(&w->ended);
	pthread_mutex_unlock(&w->lock);
	return NULL;
}

int fs_workers_create(int max, struct fs_workers **out, struct fs_errbuf *e)
{
	struct fs_workers *w = calloc(1, sizeof(*w));
	if (!w || pthread_mutex_init(&w->lock, NULL) || pthread_cond_init(&w->ended, NULL)) {
		free(w);
		return fs_fail(e, FS_ENOMEM, "out of memory");
	}
	w->max = max;
	*out = w;
	return FS_OK;
}

static int start_thread(struct fs_workers *w, void (*fn)(void *arg), void *arg)
{
	struct worker *me = calloc(1, sizeof(*me));
	pthread_t thread;
	struct fs_errbuf e;
	if (!me || fs_cond_init(&me->wake)) {
		free(me);
		return FS_EUNAVAILABLE;
	}
	me->w = w;
	me->fn = fn;
	me->arg = arg;
	if (fs_thread_start(&thread, "worker", work, me, &e)) {
		fs_warn("%s", e.text);
		pthread_cond_destroy(&me->wake);
		free(me);
		return FS_EUNAVAILABLE;
	}
	pthread_detach(thread);
	w->running++;
	return FS_OK;
}

int fs_workers_submit(struct fs_workers *w, void (*fn)(void *arg), void *arg)
{
	int rc = FS_EUNAVAILABLE;
	pthread_mutex_lock(&w->lock);
	struct worker *me = w->idle;
	if (!w->closing && me) {
		remove_idle(w, me);
		me->fn = fn;
		me->arg = arg;
		pthread_cond_signal(&me->wake);
		rc = FS_OK;
	} else if (!w->closing && w->running < w->max) {
		rc = start_thread(w, fn, arg);
	}
	pthread_mutex_unlock(&w->lock);
	return rc;
}

size_t fs_workers_busy(struct fs_workers *w)
{
	pthread_mutex_lock(&w->lock);
	size_t n = (size_t)(w->running - w->n_idle);
	pthread_mutex_unlock(&w->lock);
	return n;
}

void fs_workers_destroy(struct fs_workers *w)
{
	if (!w)
		return;
	pthread_mutex_lock(&w->lock);
	w->closing = true;
	for (struct worker *me = w->idle; me; me = me->below)
		pthread_cond_signal(&me->wake);
	while (w->running > 0)
		pthread_cond_wait(&w->ended, &w->lock);
	pthread_mutex_unlock(&w->lock);
	pthread_cond_destroy(&w->ended);
	pthread_mutex_destroy(&w->lock);
	free(w);
}
