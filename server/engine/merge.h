/*
 * merge: the loop that both kinds of BPE share: a list of symbols over a text, and a queue of adjacent pairs
 * from which the best (lowest rank, then leftmost) is merged until none is left. O(n log n) time and at most
 * 48 bytes of scratch a symbol (doubled by growth), kept from piece to piece. One thread. Internal to
 * server/engine.
 */
#ifndef FS_ENGINE_MERGE_H
#define FS_ENGINE_MERGE_H

#include "common/base/base.h"

#define FS_SYM_NONE UINT32_MAX /* as an id: no token; as a rank: no merge */

struct fs_sym {
	uint32_t id;         /* token or merge string */
	uint32_t off;        /* where it starts in the text, bytes */
	uint32_t prev, next; /* indices; next == n_syms at the end, prev == FS_SYM_NONE at the start */
	uint32_t rank;   /* of the pair (this, next); FS_SYM_NONE = they do not merge or this one is gone */
	uint32_t merged; /* what that pair becomes */
};
struct fs_merge {
	struct fs_sym *syms;
	uint64_t *heap; /* rank << 32 | index of the left symbol */
	size_t n_syms, cap_syms, n_heap, cap_heap;
	uint32_t n_bytes;         /* of the text */
	struct fs_cancel *cancel; /* borrowed; NULL = none */
};

/* Whether left and right merge. end: where right ends in the text. */
typedef bool fs_merge_pair_fn(const void *arg, const struct fs_sym *left, const struct fs_sym *right,
        uint32_t end, uint32_t *rank, uint32_t *merged);

/* Starts over with an empty list. n_bytes < 2^32 - 1. */
void fs_merge_start(struct fs_merge *m, uint32_t n_bytes);
int fs_merge_add(struct fs_merge *m, uint32_t id, uint32_t off);
/* Whether to look at the token, after `steps` steps of some nanoseconds each; and whether it has fired. */
static inline bool fs_merge_cancelled(const struct fs_merge *m, size_t steps)
{
	return (steps & 0xffff) == 0 && fs_cancelled(m->cancel);
}
/* Merges; FS_ECANCELLED. Afterwards walk from index 0 along next, the end of a symbol is fs_merge_end. */
int fs_merge_run(struct fs_merge *m, fs_merge_pair_fn *pair, const void *arg);
void fs_merge_finish(struct fs_merge *m);

static inline uint32_t fs_merge_end(const struct fs_merge *m, const struct fs_sym *s)
{
	return s->next < m->n_syms ? m->syms[s->next].off : m->n_bytes;
}

#endif
