/* The FIFO queue in front of the engine. A waiter lives on its thread's stack, in the queue, until it gets
 * the turn or gives up. */
#include "server/service/turn.h"

struct fs_turn_waiter {
	struct fs_turn_waiter *prev, *next;
	struct fs_turn *turn;
	pthread_cond_t wake;
	bool granted, cancelled;
};

int fs_turn_init(struct fs_turn *t, size_t depth)
{
	*t = (struct fs_turn){.depth = depth};
	return pthread_mutex_init(&t->lock, NULL) ? FS_ENOMEM : FS_OK;
}

void fs_turn_finish(struct fs_turn *t)
{
	FS_ASSERT(!t->first && !t->held);
	pthread_mutex_destroy(&t->lock);
}

static void remove_locked(struct fs_turn *t, struct fs_turn_waiter *w)
{
	if (w->prev)
		w->prev->next = w->next;
	else
		t->first = w->next;
	if (w->next)
		w->next->prev = w->prev;
	else
		t->last = w->prev;
	t->waiting--;
}

static void grant_locked(struct fs_turn *t)
{
	struct fs_turn_waiter *w = t->first;
	if (t->held || !w)
		return;
	remove_locked(t, w);
	t->held = true;
	t->entries++;
	w->granted = true;
	pthread_cond_signal(&w->wake);
}

static void on_cancel(void *arg)
{
	struct fs_turn_waiter *w = arg;
	pthread_mutex_lock(&w->turn->lock);
	w->cancelled = true;
	pthread_cond_signal(&w->wake);
	pthread_mutex_unlock(&w->turn->lock);
}

int fs_turn_enter(struct fs_turn *t, struct fs_cancel *cancel)
{
	struct fs_turn_waiter w = {.turn = t};
	struct fs_cancel_hook hook = {.fn = on_cancel, .arg = &w};
	if (fs_cond_init(&w.wake))
		return FS_ENOMEM;
	pthread_mutex_lock(&t->lock);
	if (t->held && t->waiting >= t->depth) {
		pthread_mutex_unlock(&t->lock);
		pthread_cond_destroy(&w.wake);
		return FS_EUNAVAILABLE;
	}
	w.prev = t->last;
	if (t->last)
		t->last->next = &w;
	else
		t->first = &w;
	t->last = &w;
	t->waiting++;
	grant_locked(t);
	pthread_mutex_unlock(&t->lock);

	bool listening = fs_cancel_listen(cancel, &hook);
	pthread_mutex_lock(&t->lock);
	while (!w.granted && !w.cancelled && listening) {
		if (!fs_cond_wait_until(&w.wake, &t->lock, fs_cancel_deadline(cancel)))
			break; /* the deadline passed; fs_cancelled below fires the token */
	}
	bool granted = w.granted;
	if (!granted)
		remove_locked(t, &w);
	pthread_mutex_unlock(&t->lock);
	fs_cancel_unlisten(cancel, &hook);
	pthread_cond_destroy(&w.wake);
	if (granted)
		return FS_OK;
	fs_cancelled(cancel);
	return FS_ECANCELLED;
}

void fs_turn_leave(struct fs_turn *t)
{
	pthread_mutex_lock(&t->lock);
	FS_ASSERT(t->held);
	t->held = false;
	grant_locked(t);
	pthread_mutex_unlock(&t->lock);
}
