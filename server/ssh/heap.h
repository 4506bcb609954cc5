/*
 * heap: the memory that libssh2 allocates for one session, on a list, so that closing the session frees what
 * libssh2 1.10 forgets: the packets and secret numbers of an exchange of keys that was given up, the host key
 * of every exchange after the first, and more. Belongs to the session's thread.
 */
#ifndef FS_SERVER_SSH_HEAP_H
#define FS_SERVER_SSH_HEAP_H

#include <stddef.h>

#include <libssh2.h>

struct fs_heap_block;
struct fs_heap {
	struct fs_heap_block *first; /* NULL = nothing is allocated; so it begins */
	void *owner;                 /* for the session's other callbacks */
};
/* A session whose abstract pointer is h. NULL when memory is out. */
LIBSSH2_SESSION *fs_heap_session(struct fs_heap *h);
/* What ls will free: a copy of n bytes. NULL when memory is out. */
void *fs_heap_copy(LIBSSH2_SESSION *ls, const void *p, size_t n);
/* Once the session is gone: wipes and frees all that is left. */
void fs_heap_clear(struct fs_heap *h);

#endif
