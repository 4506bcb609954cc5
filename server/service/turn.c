/* The FIFO queue in front of the engine. A waiter lives on its thread's stack, its ticket in the queue, until
 * it gets the turn or gives up. */
#include "server/service/turn.h"

struct waiter {
	struct fs_turn *turn;
	struct fs_turn_ticket ticket;
	pthread_cond_t wake;
	bool cancelled;
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

static void append_locked(struct fs_turn *t, struct fs_turn_ticket *k)
{
	k->held = false;
	k->next = NULL;
	k->prev = t->last;
	*(t->last ? &t->last->next : &t->first) = k;
	t->last = k;
	t->waiting++;
}

static void remove_locked(struct fs_turn *t, struct fs_turn_ticket *k)
{
	*(k->prev ? &k->prev->next : &t->first) = k->next;
	*(k->next ? &k->next->prev : &t->last) = k->prev;
	k->prev = k->next = NULL;
	t->waiting--;
}

static void grant_locked(struct fs_turn *t)
{
	struct fs_turn_ticket *k = t->first;
	if (t->held || !k)
		return;
	remove_locked(t, k);
	t->held = true;
	t->entries++;
	k->held = true;
	k->granted(k->arg);
}

static void leave_locked(struct fs_turn *t)
{
	FS_ASSERT(t->held);
	t->held = false;
	grant_locked(t);
}

/* ---- requests ---- */

static void on_granted(void *arg)
{
	struct waiter *w = arg;
	pthread_cond_signal(&w->wake);
}

static void on_cancel(void *arg)
{
	struct waiter *w = arg;
	pthread_mutex_lock(&w->turn->lock);
	w->cancelled = true;
	pthread_cond_signal(&w->wake);
	pthread_mutex_unlock(&w->turn->lock);
}

int fs_turn_enter(struct fs_turn *t, struct fs_cancel *cancel)
{
	struct waiter w = {.turn = t, .ticket = {.granted = on_granted, .arg = &w}};
	struct fs_cancel_hook hook = {.fn = on_cancel, .arg = &w};
	if (fs_cond_init(&w.wake))
		return FS_ENOMEM;
	pthread_mutex_lock(&t->lock);
	if (t->held && t->waiting >= t->depth) {
		pthread_mutex_unlock(&t->lock);
		pthread_cond_destroy(&w.wake);
		return FS_EUNAVAILABLE;
	}
	append_locked(t, &w.ticket);
	grant_locked(t);
	pthread_mutex_unlock(&t->lock);

	bool listening = fs_cancel_listen(cancel, &hook);
	pthread_mutex_lock(&t->lock);
	while (!w.ticket.held && !w.cancelled && listening) {
		if (!fs_cond_wait_until(&w.wake, &t->lock, fs_cancel_deadline(cancel)))
			break; /* the deadline passed; fs_cancelled below fires the token */
	}
	bool granted = w.ticket.held;
	if (!granted)
		remove_locked(t, &w.ticket);
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
	leave_locked(t);
	pthread_mutex_unlock(&t->lock);
}

/* ---- an encoder ---- */

void fs_turn_ask(struct fs_turn *t, struct fs_turn_ticket *k)
{
	pthread_mutex_lock(&t->lock);
	append_locked(t, k);
	grant_locked(t);
	pthread_mutex_unlock(&t->lock);
}

void fs_turn_drop(struct fs_turn *t, struct fs_turn_ticket *k)
{
	pthread_mutex_lock(&t->lock);
	if (k->held)
		leave_locked(t);
	else
		remove_locked(t, k);
	k->held = false;
	pthread_mutex_unlock(&t->lock);
}

static void encoder_asks(void *arg, void (*granted)(void *), void *granted_arg)
{
	struct fs_turn_of_encoder *o = arg;
	o->ticket = (struct fs_turn_ticket){.granted = granted, .arg = granted_arg};
	fs_turn_ask(o->turn, &o->ticket);
}

static void encoder_drops(void *arg)
{
	struct fs_turn_of_encoder *o = arg;
	fs_turn_drop(o->turn, &o->ticket);
}

struct fs_vision_turn fs_turn_for_encoder(struct fs_turn_of_encoder *o, struct fs_turn *t)
{
	o->turn = t;
	return (struct fs_vision_turn){.arg = o, .ask = encoder_asks, .give_back = encoder_drops};
}
