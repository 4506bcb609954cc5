/* merge: see merge.h. A queue entry whose rank is no longer its left symbol's is stale and skipped. */
#include "server/engine/merge.h"

#include <stdlib.h>

void fs_merge_start(struct fs_merge *m, uint32_t n_bytes)
{
	m->n_syms = 0;
	m->n_heap = 0;
	m->n_bytes = n_bytes;
}

void fs_merge_finish(struct fs_merge *m)
{
	free(m->syms);
	free(m->heap);
	*m = (struct fs_merge){0};
}

static int grow(void **p, size_t *cap, size_t need, size_t elem)
{
	size_t want = *cap ? *cap * 2 : 256, bytes;
	void *q;

	if (need <= *cap)
		return FS_OK;
	if (!fs_mul_size(want, elem, &bytes) || (q = realloc(*p, bytes)) == NULL)
		return FS_ENOMEM;
	*p = q;
	*cap = want;
	return FS_OK;
}

int fs_merge_add(struct fs_merge *m, uint32_t id, uint32_t off)
{
	void *p = m->syms;
	uint32_t i = (uint32_t)m->n_syms;
	int rc = grow(&p, &m->cap_syms, m->n_syms + 1, sizeof(*m->syms));

	m->syms = p;
	if (rc != FS_OK)
		return rc;
	m->syms[i] = (struct fs_sym){id, off, i == 0 ? FS_SYM_NONE : i - 1, i + 1, FS_SYM_NONE, FS_SYM_NONE};
	m->n_syms++;
	return FS_OK;
}

static int push(struct fs_merge *m, uint64_t key)
{
	void *p = m->heap;
	int rc = grow(&p, &m->cap_heap, m->n_heap + 1, sizeof(*m->heap));
	size_t i;

	m->heap = p;
	if (rc != FS_OK)
		return rc;
	for (i = m->n_heap++; i > 0 && m->heap[(i - 1) / 2] > key; i = (i - 1) / 2)
		m->heap[i] = m->heap[(i - 1) / 2];
	m->heap[i] = key;
	return FS_OK;
}

static uint64_t pop(struct fs_merge *m)
{
	uint64_t top = m->heap[0], last = m->heap[--m->n_heap];
	size_t i = 0, kid;

	while ((kid = 2 * i + 1) < m->n_heap) {
		if (kid + 1 < m->n_heap && m->heap[kid + 1] < m->heap[kid])
			kid++;
		if (m->heap[kid] >= last)
			break;
		m->heap[i] = m->heap[kid];
		i = kid;
	}
	m->heap[i] = last;
	return top;
}

/* Looks at the pair that starts at symbol i and queues it. */
static int offer(struct fs_merge *m, uint32_t i, fs_merge_pair_fn *pair, const void *arg)
{
	struct fs_sym *s = &m->syms[i], *r;

	s->rank = FS_SYM_NONE;
	if (s->next >= m->n_syms)
		return FS_OK;
	r = &m->syms[s->next];
	if (!pair(arg, s, r, fs_merge_end(m, r), &s->rank, &s->merged)) {
		s->rank = FS_SYM_NONE;
		return FS_OK;
	}
	return push(m, (uint64_t)s->rank << 32 | i);
}

int fs_merge_run(struct fs_merge *m, fs_merge_pair_fn *pair, const void *arg)
{
	size_t i, steps = 0;
	int rc;

	for (i = 0; i + 1 < m->n_syms; i++)
		if ((rc = offer(m, (uint32_t)i, pair, arg)) != FS_OK)
			return rc;
		else if (fs_merge_cancelled(m, i))
			return FS_ECANCELLED;
	while (m->n_heap > 0) {
		if (fs_merge_cancelled(m, ++steps))
			return FS_ECANCELLED;
		uint64_t key = pop(m);
		uint32_t left = (uint32_t)key;
		struct fs_sym *s = &m->syms[left], *r;

		if (s->rank == FS_SYM_NONE || s->rank != key >> 32)
			continue;
		r = &m->syms[s->next];
		s->id = s->merged;
		s->next = r->next;
		r->rank = FS_SYM_NONE;
		if (s->next < m->n_syms)
			m->syms[s->next].prev = left;
		if (s->prev != FS_SYM_NONE && (rc = offer(m, s->prev, pair, arg)) != FS_OK)
			return rc;
		if ((rc = offer(m, left, pair, arg)) != FS_OK)
			return rc;
	}
	return FS_OK;
}
