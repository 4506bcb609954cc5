/* Error names and texts for people. Any thread; owns nothing. */
#include "common/base/base.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

_Noreturn void fs_assert_failed(const char *cond, const char *file, int line)
{
	fprintf(stderr, "%s:%d: invariant broken: %s\n", file, line, cond);
	abort();
}

const char *fs_err_name(int err)
{
	static const char *const names[] = {"ok", "invalid", "out_of_memory", "io", "format", "timeout",
	        "cancelled", "unavailable", "limit", "not_supported", "not_found", "auth", "internal"};
	size_t i = err <= 0 ? (size_t) - (int64_t)err : FS_ARRAY_LEN(names);
	return i < FS_ARRAY_LEN(names) ? names[i] : "unknown";
}

/* Texts end up in logs and JSON: no control characters, and no UTF-8 character cut in half by the buffer's
 * end. */
static void clean(struct fs_errbuf *e)
{
	size_t n = strlen(e->text);
	for (size_t i = 0; i < n; i++) {
		unsigned char c = (unsigned char)e->text[i];
		if (c < 0x20 || c == 0x7f)
			e->text[i] = '?';
	}
	if (n < sizeof(e->text) - 1)
		return;
	size_t start = n;
	while (start > 0 && n - start < 4 && ((unsigned char)e->text[start - 1] & 0xc0) == 0x80)
		start--;
	if (start > 0 && (unsigned char)e->text[start - 1] >= 0xc0)
		e->text[start - 1] = '\0';
}

int fs_fail(struct fs_errbuf *e, int err, const char *fmt, ...)
{
	if (e) {
		va_list ap;
		va_start(ap, fmt);
		vsnprintf(e->text, sizeof(e->text), fmt, ap);
		va_end(ap);
		clean(e);
	}
	return err;
}

int fs_fail_errno(struct fs_errbuf *e, int err, const char *fmt, ...)
{
	int saved = errno;
	if (e) {
		va_list ap;
		va_start(ap, fmt);
		int n = vsnprintf(e->text, sizeof(e->text), fmt, ap);
		va_end(ap);
		char reason[128];
		if (n >= 0 && (size_t)n < sizeof(e->text))
			snprintf(e->text + n, sizeof(e->text) - (size_t)n, ": %s",
			        strerror_r(saved, reason, sizeof(reason)));
		clean(e);
	}
	errno = saved;
	return err;
}

int fs_fail_prefix(struct fs_errbuf *e, int err, const char *fmt, ...)
{
	if (e) {
		struct fs_errbuf old = *e;
		va_list ap;
		va_start(ap, fmt);
		int n = vsnprintf(e->text, sizeof(e->text), fmt, ap);
		va_end(ap);
		if (n >= 0 && (size_t)n < sizeof(e->text))
			snprintf(e->text + n, sizeof(e->text) - (size_t)n, ": %s", old.text);
		clean(e);
	}
	return err;
}
