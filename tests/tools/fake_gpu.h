/*
 * fake_gpu: a card for tests without one: the CPU's operations behind a device that says it is a GPU, has so
 * much memory, and fails when it is told to. A program gets it in the place of fs_dev_open by the linker
 * (-Wl,--wrap=fs_dev_open); "cpu" is still the CPU. What a real device forbids (allocating, copying or
 * waiting while a step is recorded, closing with memory taken, operations on a lost card) ends the program.
 *
 * Threads: one device at a time, on whatever thread opened it; the card's fields may be set from others while
 * no operation runs.
 */
#ifndef FS_TESTS_FAKE_GPU_H
#define FS_TESTS_FAKE_GPU_H

#include "common/compute/internal.h"

#include <stdatomic.h>

struct fake_card {
	/* what it is */
	_Atomic uint64_t total, others; /* memory; what other programs have of it */
	_Atomic int no_card;            /* so many opens fail from now on; -1 = all */
	/* what goes wrong */
	_Atomic int lose_at; /* counts operations down; the one that brings it to 0 loses the card */
	_Atomic bool hangs;  /* it is lost without an answer, and must not be opened again */
	_Atomic int fail_at; /* the same, an error that the card survives */
	const char *folder;  /* or NULL: files in it do the same, see fake_gpu_folder */
	/* what was seen */
	_Atomic uint64_t used, peak; /* of the memory */
	_Atomic int opens, ops, paces, recordings;
};
extern struct fake_card fake_card;

int fake_gpu_open(const struct fs_dev_opts *o, struct fs_dev **out, struct fs_errbuf *e);
/* Memory in the folder's file "memory" (bytes); a file "lose" is taken away and the card is lost with it;
 * while there is a file "gone" no card is found. Called at program start with a folder from the environment.
 */
void fake_gpu_folder(const char *folder);

#endif
