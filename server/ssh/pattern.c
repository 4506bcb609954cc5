/* Host patterns of ssh_config and known_hosts. Pure functions, any thread. */
#include "server/ssh/internal.h"

#include <string.h>

/* One '*' is remembered at a time: a later star makes earlier ones irrelevant, so this is O(pattern * text).
 */
bool fs_ssh_glob(const char *pattern, const char *s)
{
	const char *star = NULL, *mark = NULL;
	while (*s) {
		if (*pattern == '*') {
			star = pattern++;
			mark = s;
		} else if (*pattern == '?' || (*pattern && *pattern == *s)) {
			pattern++;
			s++;
		} else if (star) {
			pattern = star + 1;
			s = ++mark;
		} else {
			return false;
		}
	}
	while (*pattern == '*')
		pattern++;
	return *pattern == '\0';
}

int fs_ssh_glob_list(const char *list, char sep, const char *s)
{
	int found = 0;
	while (*list) {
		const char *end = strchr(list, sep);
		size_t n = end ? (size_t)(end - list) : strlen(list);
		bool negated = n > 0 && *list == '!';
		char one[1024];
		if (n - negated < sizeof(one)) {
			memcpy(one, list + negated, n - negated);
			one[n - negated] = '\0';
			if (*one && fs_ssh_glob(one, s)) {
				if (negated)
					return -1;
				found = 1;
			}
		}
		list += n + (end != NULL);
	}
	return found;
}
