#include "server/ssh/heap.h"

#include <stdalign.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

struct fs_heap_block {
	struct fs_heap_block *next, **at; /* *at is this block */
	size_t n;
	alignas(max_align_t) char bytes[];
};

static struct fs_heap_block *block_of(void *p)
{
	return (struct fs_heap_block *)((char *)p - offsetof(struct fs_heap_block, bytes));
}

static void unlink_block(const struct fs_heap_block *b)
{
	*b->at = b->next;
	if (b->next)
		b->next->at = b->at;
}

static void link_block(struct fs_heap *h, struct fs_heap_block *b)
{
	b->next = h->first;
	b->at = &h->first;
	if (b->next)
		b->next->at = &b->next;
	h->first = b;
}

static LIBSSH2_ALLOC_FUNC(allocate)
{
	struct fs_heap_block *b = count < SIZE_MAX - sizeof(*b) ? malloc(sizeof(*b) + count) : NULL;
	if (!b)
		return NULL;
	b->n = count;
	link_block(*abstract, b);
	return b->bytes;
}

static LIBSSH2_REALLOC_FUNC(resize)
{
	if (!ptr)
		return allocate(count, abstract);
	if (count >= SIZE_MAX - sizeof(struct fs_heap_block))
		return NULL;
	struct fs_heap_block *old = block_of(ptr), *b;
	unlink_block(old);
	b = realloc(old, sizeof(*b) + count);
	if (b)
		b->n = count;
	link_block(*abstract, b ? b : old);
	return b ? b->bytes : NULL;
}

static LIBSSH2_FREE_FUNC(release)
{
	if (!ptr)
		return;
	unlink_block(block_of(ptr));
	free(block_of(ptr));
}

LIBSSH2_SESSION *fs_heap_session(struct fs_heap *h)
{
	return libssh2_session_init_ex(allocate, release, resize, h);
}

void *fs_heap_copy(LIBSSH2_SESSION *ls, const void *p, size_t n)
{
	void *copy = allocate(n, libssh2_session_abstract(ls));
	return copy ? memcpy(copy, p, n) : NULL;
}

void fs_heap_clear(struct fs_heap *h)
{
	for (struct fs_heap_block *b; (b = h->first);) {
		h->first = b->next;
		explicit_bzero(b->bytes, b->n);
		free(b);
	}
}
