/* The first line on the watchdog's socket. What is accepted must come out the same when it is said again. */
#include "remote/watchdog/watchdog.h"

#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
	struct fs_wd_greeting g, again;
	struct fs_errbuf e;
	char line[FS_WD_GREETING_MAX];
	if (fs_wd_greeting_parse((const char *)data, n, &g, &e))
		return 0;
	size_t len = fs_wd_greeting_format(&g, line);
	FS_ASSERT(line[len - 1] == '\n');
	FS_ASSERT(fs_wd_greeting_parse(line, len - 1, &again, &e) == FS_OK);
	FS_ASSERT(again.purpose == g.purpose && !strcmp(again.peer, g.peer));
	return 0;
}
