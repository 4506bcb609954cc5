/* The known word nearest to a mistyped one. */
#include "common/base/base.h"

#include <string.h>

#define WORD_MAX 64

size_t fs_word_distance(const char *a, const char *b)
{
	size_t la = strlen(a), lb = strlen(b);
	if (la > WORD_MAX || lb > WORD_MAX)
		return FS_WORD_FAR;
	size_t row[WORD_MAX + 1]; /* Levenshtein's matrix, of which one row is enough */
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

const char *fs_nearest_word(const char *word, const char *const *known, size_t n)
{
	const char *best = known[0];
	for (size_t i = 1; i < n; i++)
		if (fs_word_distance(word, known[i]) < fs_word_distance(word, best))
			best = known[i];
	return best;
}

bool fs_word_is_near(const char *word, const char *known)
{
	size_t d = fs_word_distance(word, known);
	return d < FS_WORD_FAR && d <= FS_MAX(strlen(word) / 2, (size_t)2);
}
