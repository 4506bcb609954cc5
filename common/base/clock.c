/* Monotonic time. Deadlines are absolute, so a budget is spent across the steps of a wait without arithmetic
 * at each of them. */
#include "common/base/base.h"

#include <time.h>

int64_t fs_now(void)
{
	struct timespec ts;
	clock_gettime(CLOCK_MONOTONIC, &ts);
	return (int64_t)ts.tv_sec * FS_SEC + ts.tv_nsec;
}

int64_t fs_deadline_ms(int64_t ms)
{
	int64_t ns, t;
	if (ms < 0 || __builtin_mul_overflow(ms, FS_MS, &ns) || __builtin_add_overflow(fs_now(), ns, &t))
		return FS_NEVER;
	return t;
}

int fs_poll_ms(int64_t deadline)
{
	if (deadline == FS_NEVER)
		return -1;
	int64_t left = deadline - fs_now();
	if (left <= 0)
		return 0;
	int64_t ms = (left + FS_MS - 1) / FS_MS;
	return (int)FS_MIN(ms, (int64_t)3600 * 1000);
}
