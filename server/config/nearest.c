/* The known word nearest to a mistyped one. */
#include "server/config/config.h"

#include <string.h>

#define WORD_MAX 64

/* Levenshtein distance over two rows; words longer than WORD_MAX are never near. */
static size_t distance(const char *a, const char *b)
{
	size_t la = strlen(a), lb = strlen(b);
	if (la > WORD_MAX || lb > WORD_MAX)
		return SIZE_MAX;
	size_t row[WORD_MAX + 1];
	for (size_t j = 0; j <= lb; j++)
		row[j] = j;
	for (size_t i = 1; i <= la; i++) {
		size_t diagonal = row[0];
		row[0] = i;
		for (size_t j = 1; j <= lb; j++) {
			size_t best = diagonal + (a[i - 1] != b[j - 1]);
			best = FS_MIN(best, FS_MIN(row[j], row[j - 1]) + 1);
			diagonal = row[j];
			row[j] = best;
		}
	}
	return row[lb];
}

const char *fs_config_nearest(const char *word, const char *const *known, size_t n)
{
	const char *best = NULL;
	size_t best_distance = FS_MAX(strlen(word) / 2, (size_t)2) + 1;
	for (size_t i = 0; i < n; i++) {
		size_t d = distance(word, known[i]);
		if (d < best_distance) {
			best_distance = d;
			best = known[i];
		}
	}
	return best;
}
