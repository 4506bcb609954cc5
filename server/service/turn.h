/*
 * turn: the FIFO queue in front of the engine, and of this machine's GPU when pictures are encoded on it. By
 * ticket; waiting requests leave at once when their token fires, and only so many may wait. Any thread;
 * entries are counted, so that tests can tell who took it.
 */
#ifndef FS_SERVER_SERVICE_TURN_H
#define FS_SERVER_SERVICE_TURN_H

#include "server/vision/vision.h"

/* One place in the queue. The caller's, untouched by it between ask and drop. */
struct fs_turn_ticket {
	void (*granted)(
	        void *arg); /* from whoever left, or from within ask; with the lock held: takes note */
	void *arg;
	struct fs_turn_ticket *prev, *next; /* private */
	bool held;                          /* private */
};
struct fs_turn {
	pthread_mutex_t lock;
	struct fs_turn_ticket *first, *last; /* those that wait */
	bool held;
	size_t waiting, depth;
	uint64_t entries;
};
int fs_turn_init(struct fs_turn *t, size_t depth);
void fs_turn_finish(struct fs_turn *t); /* nobody may wait or hold */
/* FS_OK: the caller holds the turn. FS_ECANCELLED. FS_EUNAVAILABLE: `depth` wait already. */
int fs_turn_enter(struct fs_turn *t, struct fs_cancel *cancel);
void fs_turn_leave(struct fs_turn *t);

/* Without waiting, and whatever the depth: the ticket goes behind the others. */
void fs_turn_ask(struct fs_turn *t, struct fs_turn_ticket *k);
/* Gives the turn back, or stops waiting for it; granted is not called afterwards. */
void fs_turn_drop(struct fs_turn *t, struct fs_turn_ticket *k);

/* The turn as an encoder on this machine's GPU takes it; it must outlive the vision. */
struct fs_turn_of_encoder {
	struct fs_turn *turn;
	struct fs_turn_ticket ticket;
};
struct fs_vision_turn fs_turn_for_encoder(struct fs_turn_of_encoder *o, struct fs_turn *t);

#endif
