/*
 * fiber: the threads of a block: stacks between which one thread switches, known to the sanitizers. A fiber
 * runs its function again and again, each time it is entered after the function returned. Inside tests/simt
 * only.
 */
#ifndef FS_TESTS_SIMT_FIBER_H
#define FS_TESTS_SIMT_FIBER_H

#include <stddef.h>

struct simt_fiber {
	void *sp; /* saved while it does not run */
	void *stack;
	void *fake; /* ASan's */
	void *tsan; /* TSan's */
	void (*run)(void *arg);
	void *arg;
};

/* The one who enters fibers. */
struct simt_home {
	void *sp;
	const void *bottom;
	size_t size;
	void *fake, *tsan;
};

void simt_fiber_init(struct simt_fiber *f, void (*run)(void *arg), void *arg);
void simt_fiber_finish(struct simt_fiber *f); /* between two runs of its function, or never run */
/* Runs f until it leaves. */
void simt_fiber_enter(struct simt_home *home, struct simt_fiber *f);
/* Called on f: back to home; returns when f is entered again. */
void simt_fiber_leave(struct simt_home *home, struct simt_fiber *f);

/* What one fiber did before the first is seen by those that pass the second: for TSan. */
void simt_order_release(void *at);
void simt_order_acquire(void *at);
/* 16 bytes that the emulation reads or writes for the fiber, for TSan, which does not watch the emulation. */
void simt_watch_read(const void *at);
void simt_watch_write(void *at);

#endif
