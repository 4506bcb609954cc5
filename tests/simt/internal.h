/*
 * What the files of tests/simt share: a thread of a block with what it posts to a collective, and the machine
 * of one host thread.
 */
#ifndef FS_TESTS_SIMT_INTERNAL_H
#define FS_TESTS_SIMT_INTERNAL_H

#include <vector>

#include "tests/simt/fiber.h"
#include "tests/simt/simt.h"

enum simt_state { SIMT_DONE, SIMT_READY, SIMT_AT_BARRIER, SIMT_AT_WARP };

struct simt_copy { /* of fs_cp16 */
	void *to;
	const void *from; /* NULL: zeros */
	int group;
};

/* For TSan: what came before a meeting is seen by those that leave it, and nothing that was done after it by
 * those that left earlier. Meetings take turns, since some are at the next while others still leave. */
struct simt_meeting {
	char at[2];
	int turn;
};

struct simt_thread {
	simt_place place; /* first: simt_now points here */
	simt_fiber fiber;
	simt_state state;
	const char *what; /* it waits at; compared by address */
	unsigned int mask;
	/* posted to a collective, and answered in place */
	uint64_t bits;
	int from;
	float *c;
	const uint32_t *a, *b;
	uint32_t *r;
	const void *row;
	/* copies under way */
	std::vector<simt_copy> copies;
	int group;         /* the one that is being filled */
	simt_meeting warp; /* of lane 0: its warp's */
};

struct simt_piece {
	const void *key;
	void *p;
};

struct simt_machine {
	~simt_machine();

	simt_home home;
	const simt_job *job; /* NULL between launches */
	std::vector<simt_thread *> threads;
	int n;               /* threads of the block */
	unsigned int blocks; /* run so far */
	std::vector<simt_piece> pieces;
	void *dynamic;
	size_t shared_bytes;
	int arrived, votes, result; /* of the block's barrier */
	simt_meeting barrier;
	char begun, ended; /* for TSan */
};
extern thread_local simt_machine simt_m;

static inline simt_thread *simt_thread_now(void)
{
	return (simt_thread *)(void *)simt_now;
}

/* Until somebody makes it ready. */
void simt_wait(simt_thread *t, simt_state state, const char *what);
/* Does the copies of the groups before this one. */
void simt_copies_land(simt_thread *t, int before);

#endif
