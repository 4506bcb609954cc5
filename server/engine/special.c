/*
 * special: finds control, unknown and user-defined tokens in a text: a binary search that narrows a sorted
 * list byte by byte, so the cost does not grow with the number of tokens (Gemma has thousands that begin
 * alike).
 */
#include "server/engine/vocab.h"

#include <stdlib.h>
#include <string.h>

static int by_bytes(const void *a, const void *b, void *arg)
{
	const struct fs_tok *t = arg;
	size_t la, lb;
	const char *sa = fs_strtab_get(&t->strs, *(const uint32_t *)a, &la);
	const char *sb = fs_strtab_get(&t->strs, *(const uint32_t *)b, &lb);
	int c = memcmp(sa, sb, FS_MIN(la, lb));

	return c != 0 ? c : (la > lb) - (la < lb);
}

int fs_special_index(struct fs_tok *t)
{
	size_t i, len;
	uint32_t b, n = 0;

	t->specials = calloc((size_t)t->info.n_vocab, sizeof(*t->specials));
	if (t->specials == NULL)
		return FS_ENOMEM;
	for (i = 0; i < (size_t)t->info.n_vocab; i++) {
		uint8_t type = t->types[i];

		fs_strtab_get(&t->strs, (uint32_t)i, &len);
		if (len > 0 && (type == FS_TT_CONTROL || type == FS_TT_UNKNOWN || type == FS_TT_USER))
			t->specials[n++] = (uint32_t)i;
	}
	t->n_specials = n;
	qsort_r(t->specials, n, sizeof(*t->specials), by_bytes, t);
	for (b = 0, i = 0; b <= 256; b++) {
		while (i < n && (uint8_t)fs_strtab_get(&t->strs, t->specials[i], &len)[0] < b)
			i++;
		t->special_first[b] = b == 256 ? n : (uint32_t)i;
	}
	return FS_OK;
}

static int byte_at(const struct fs_tok *t, uint32_t k, size_t depth)
{
	size_t len;
	const char *s = fs_strtab_get(&t->strs, t->specials[k], &len);

	return depth < len ? (uint8_t)s[depth] : -1;
}

/* First k in [lo, hi) whose byte at depth is >= want; all in the range agree before depth. */
static uint32_t lower(const struct fs_tok *t, uint32_t lo, uint32_t hi, size_t depth, int want)
{
	while (lo < hi) {
		uint32_t mid = lo + (hi - lo) / 2;

		if (byte_at(t, mid, depth) < want)
			lo = mid + 1;
		else
			hi = mid;
	}
	return lo;
}

uint32_t fs_special_match(const struct fs_tok *t, const uint8_t *s, size_t n, size_t trusted, size_t *len)
{
	uint32_t lo = t->special_first[s[0]], hi = t->special_first[s[0] + 1], best = FS_SYM_NONE;
	size_t depth;

	for (depth = 1; lo < hi; depth++) {
		if (byte_at(t, lo, depth) < 0) { /* one ends here; no two have the same text */
			uint32_t id = t->specials[lo++];

			if (depth <= trusted || t->types[id] == FS_TT_USER) {
				best = id;
				*len = depth;
			}
		}
		if (depth == n)
			break;
		lo = lower(t, lo, hi, depth, s[depth]);
		hi = lower(t, lo, hi, depth, s[depth] + 1);
	}
	return best;
}
