/*
 * turn: the FIFO queue in front of the engine. Waiting is by ticket, ends at once when the waiter's token
 * fires, and has a depth limit. Any thread; entries are counted, so that tests can tell who took it.
 */
#ifndef FS_SERVER_SERVICE_TURN_H
#define FS_SERVER_SERVICE_TURN_H

#include "common/base/base.h"

struct fs_turn_waiter;
struct fs_turn {
	pthread_mutex_t lock;
	struct fs_turn_waiter *first, *last; /* first holds the turn when held is set */
	bool held;
	size_t waiting, depth;
	uint64_t entries;
};
int fs_turn_init(struct fs_turn *t, size_t depth);
void fs_turn_finish(struct fs_turn *t); /* nobody may wait or hold */
/* FS_OK: the caller holds the turn. FS_ECANCELLED. FS_EUNAVAILABLE: `depth` wait already. */
int fs_turn_enter(struct fs_turn *t, struct fs_cancel *cancel);
void fs_turn_leave(struct fs_turn *t);

#endif
