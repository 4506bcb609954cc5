/*
 * What becomes of a process whose model file is overwritten in place: the kernel sends SIGBUS for pages that
 * are no more, and the handler here names the file before it ends the process. State of the process, since
 * signal handlers have nothing else: which maps there are, in slots that are taken and given back without
 * locks. Maps beyond the slots, and faults elsewhere, go the way they went before.
 */
#include "common/gguf/internal.h"

#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

#define SLOTS (GGUF_MAX_PARTS + 64) /* a split model, and others */
#define TAKEN ((uintptr_t)1)        /* being filled */

static struct {
	atomic_uintptr_t map; /* 0 = free */
	size_t size;
	const char *path;
} slots[SLOTS];
static struct sigaction before;
static atomic_flag told = ATOMIC_FLAG_INIT;

void gguf_guard_add(const struct gguf_part *part)
{
	for (size_t i = 0; i < SLOTS; i++) {
		uintptr_t none = 0;
		if (!atomic_compare_exchange_strong(&slots[i].map, &none, TAKEN))
			continue;
		slots[i].size = part->size;
		slots[i].path = part->path;
		atomic_store(&slots[i].map, (uintptr_t)part->map);
		return;
	}
}

void gguf_guard_remove(const struct gguf_part *part)
{
	for (size_t i = 0; i < SLOTS; i++)
		if (atomic_load(&slots[i].map) == (uintptr_t)part->map)
			atomic_store(&slots[i].map, 0);
}

static const char *path_of(uintptr_t at)
{
	for (size_t i = 0; i < SLOTS; i++) {
		uintptr_t map = atomic_load(&slots[i].map);
		if (map > TAKEN && at >= map && at - map < slots[i].size)
			return slots[i].path;
	}
	return NULL;
}

_Noreturn static void end(const char *path)
{
	static const char why[] =
	        " was changed while it was in use, and is shorter than it was; put a new model "
	        "beside the old one and rename it, then restart\n",
	                  what[] = ": the model file ";
	const char *who = program_invocation_short_name;
	struct iovec v[] = {{(void *)who, strlen(who)}, {(void *)what, sizeof(what) - 1},
	        {(void *)path, strlen(path)}, {(void *)why, sizeof(why) - 1}};
	if (atomic_flag_test_and_set(&told)) /* another thread is at it */
		for (;;)
			pause();
	ssize_t n = writev(STDERR_FILENO, v, FS_ARRAY_LEN(v));
	(void)n;
	_exit(FS_GGUF_CHANGED_STATUS);
}

static void on_bus_error(int sig, siginfo_t *info, void *context)
{
	const char *path = path_of((uintptr_t)info->si_addr);
	if (path)
		end(path);
	sigaction(sig, &before, NULL); /* the access is tried again, and ends as if we were not there */
}

void fs_gguf_name_changed_files(void)
{
	struct sigaction sa = {.sa_sigaction = on_bus_error, .sa_flags = SA_SIGINFO};
	sigemptyset(&sa.sa_mask);
	sigaction(SIGBUS, &sa, &before);
}
