/*
 * Cancel tokens. A token is counted and fires once; hooks run on the thread that fires, under the token's own
 * mutex, so that unlisten can promise that none is running afterwards. fs_cancelled takes no lock unless it
 * has to fire a passed deadline.
 */
#include "common/base/base.h"

#include <stdatomic.h>
#include <stdlib.h>

struct fs_cancel {
	atomic_int refs;
	atomic_int cause;         /* enum fs_cancel_cause */
	_Atomic int64_t deadline; /* ns or FS_NEVER */
	pthread_mutex_t lock;
	struct fs_cancel_hook hooks; /* ring; the head is no hook */
};

struct fs_cancel *fs_cancel_create(int64_t deadline)
{
	struct fs_cancel *c = calloc(1, sizeof(*c));
	if (!c)
		return NULL;
	atomic_init(&c->refs, 1);
	atomic_init(&c->cause, FS_CANCEL_NONE);
	atomic_init(&c->deadline, deadline);
	pthread_mutex_init(&c->lock, NULL);
	c->hooks.prev = c->hooks.next = &c->hooks;
	return c;
}

struct fs_cancel *fs_cancel_ref(struct fs_cancel *c)
{
	if (c)
		atomic_fetch_add(&c->refs, 1);
	return c;
}

void fs_cancel_unref(struct fs_cancel *c)
{
	if (!c || atomic_fetch_sub(&c->refs, 1) != 1)
		return;
	FS_ASSERT(c->hooks.next == &c->hooks);
	pthread_mutex_destroy(&c->lock);
	free(c);
}

static void unlink_locked(struct fs_cancel_hook *h)
{
	h->prev->next = h->next;
	h->next->prev = h->prev;
	h->prev = h->next = NULL;
}

void fs_cancel_fire(struct fs_cancel *c, enum fs_cancel_cause cause)
{
	if (!c || cause == FS_CANCEL_NONE)
		return;
	pthread_mutex_lock(&c->lock);
	int none = FS_CANCEL_NONE;
	if (atomic_compare_exchange_strong(&c->cause, &none, (int)cause)) {
		while (c->hooks.next != &c->hooks) {
			struct fs_cancel_hook *h = c->hooks.next;
			unlink_locked(h);
			h->fn(h->arg);
		}
	}
	pthread_mutex_unlock(&c->lock);
}

bool fs_cancelled(struct fs_cancel *c)
{
	if (!c)
		return false;
	if (atomic_load_explicit(&c->cause, memory_order_acquire) != FS_CANCEL_NONE)
		return true;
	int64_t deadline = atomic_load(&c->deadline);
	if (deadline == FS_NEVER || fs_now() < deadline)
		return false;
	fs_cancel_fire(c, FS_CANCEL_DEADLINE);
	return true;
}

enum fs_cancel_cause fs_cancel_cause(const struct fs_cancel *c)
{
	return c ? (enum fs_cancel_cause)atomic_load(&c->cause) : FS_CANCEL_NONE;
}

const char *fs_cancel_cause_name(enum fs_cancel_cause cause)
{
	static const char *const names[] = {[FS_CANCEL_NONE] = "none",
	        [FS_CANCEL_CLIENT] = "client",
	        [FS_CANCEL_DELETED] = "deleted",
	        [FS_CANCEL_DEADLINE] = "deadline",
	        [FS_CANCEL_SHUTDOWN] = "shutdown",
	        [FS_CANCEL_UNREAD] = "unread"};
	return (size_t)cause < FS_ARRAY_LEN(names) ? names[cause] : "unknown";
}

void fs_cancel_shorten(struct fs_cancel *c, int64_t deadline)
{
	int64_t old = atomic_load(&c->deadline);
	while (deadline < old && !atomic_compare_exchange_weak(&c->deadline, &old, deadline))
		;
}

int64_t fs_cancel_deadline(const struct fs_cancel *c)
{
	return c ? atomic_load(&c->deadline) : FS_NEVER;
}

bool fs_cancel_listen(struct fs_cancel *c, struct fs_cancel_hook *h)
{
	h->prev = h->next = NULL;
	if (!c)
		return true;
	pthread_mutex_lock(&c->lock);
	bool live = atomic_load(&c->cause) == FS_CANCEL_NONE;
	if (live) {
		h->next = &c->hooks;
		h->prev = c->hooks.prev;
		h->prev->next = h;
		c->hooks.prev = h;
	}
	pthread_mutex_unlock(&c->lock);
	return live;
}

void fs_cancel_unlisten(struct fs_cancel *c, struct fs_cancel_hook *h)
{
	if (!c)
		return;
	pthread_mutex_lock(&c->lock);
	if (h->next)
		unlink_locked(h);
	pthread_mutex_unlock(&c->lock);
}
