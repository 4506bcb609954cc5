/*
 * clock_shift: preloaded into programs whose wall clock a test wants to jump. The file that CLOCK_SHIFT names
 * holds the seconds as an int64; they are added to CLOCK_REALTIME. Monotonic time is left alone, as a real
 * jump leaves it.
 */
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile int64_t *shift;
static int (*real_clock)(clockid_t, struct timespec *);

__attribute__((constructor)) static void begin(void)
{
	const char *path = getenv("CLOCK_SHIFT");
	int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
	*(void **)&real_clock = dlsym(RTLD_NEXT, "clock_gettime");
	if (fd < 0)
		return;
	void *p = mmap(NULL, sizeof(*shift), PROT_READ, MAP_SHARED, fd, 0);
	shift = p == MAP_FAILED ? NULL : p;
	close(fd);
}

int clock_gettime(clockid_t id, struct timespec *ts)
{
	if (!real_clock)
		begin();
	int rc = real_clock(id, ts);
	if (!rc && shift && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE))
		ts->tv_sec += *shift;
	return rc;
}

time_t time(time_t *out)
{
	struct timespec ts;
	clock_gettime(CLOCK_REALTIME, &ts);
	if (out)
		*out = ts.tv_sec;
	return ts.tv_sec;
}

int gettimeofday(struct timeval *restrict tv, void *restrict zone)
{
	struct timespec ts;
	(void)zone;
	clock_gettime(CLOCK_REALTIME, &ts);
	*tv = (struct timeval){.tv_sec = ts.tv_sec, .tv_usec = ts.tv_nsec / 1000};
	return 0;
}
