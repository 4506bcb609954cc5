/* The log: whole lines on stderr, one write a line, so that lines of several threads never mix. */
#include "common/base/base.h"

#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static atomic_int log_level = FS_LOG_INFO;
static const char *const level_names[] = {"error", "warn", "info", "debug"};

void fs_log_set_level(enum fs_log_level level)
{
	atomic_store(&log_level, (int)level);
}

enum fs_log_level fs_log_get_level(void)
{
	return (enum fs_log_level)atomic_load(&log_level);
}

int fs_log_parse_level(const char *name, enum fs_log_level *out)
{
	for (size_t i = 0; i < FS_ARRAY_LEN(level_names); i++) {
		if (strcmp(name, level_names[i]) == 0) {
			*out = (enum fs_log_level)i;
			return FS_OK;
		}
	}
	return FS_EINVAL;
}

void fs_log(enum fs_log_level level, const char *fmt, ...)
{
	if ((int)level > atomic_load_explicit(&log_level, memory_order_relaxed))
		return;
	char line[2048];
	struct timespec ts;
	struct tm tm;
	char thread[16] = "";
	clock_gettime(CLOCK_REALTIME, &ts);
	gmtime_r(&ts.tv_sec, &tm);
	pthread_getname_np(pthread_self(), thread, sizeof(thread));
	size_t n = strftime(line, sizeof(line), "%Y-%m-%dT%H:%M:%S", &tm);
	n += (size_t)snprintf(line + n, sizeof(line) - n, ".%03ldZ %-5s %s: ", ts.tv_nsec / 1000000,
	        level_names[level], thread);
	size_t text = n;
	va_list ap;
	va_start(ap, fmt);
	int m = vsnprintf(line + n, sizeof(line) - n - 1, fmt, ap);
	va_end(ap);
	if (m < 0)
		return;
	n = FS_MIN(n + (size_t)m, sizeof(line) - 2);
	for (size_t i = text; i < n; i++) {
		unsigned char c = (unsigned char)line[i];
		if (c < 0x20 || c == 0x7f)
			line[i] = '?';
	}
	line[n++] = '\n';
	ssize_t w = write(STDERR_FILENO, line, n);
	(void)w; /* nowhere left to report it */
}
