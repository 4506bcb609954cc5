#include "common/bench/bench.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

static int ascending(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return (x > y) - (x < y);
}

void fs_sample_sort(struct fs_sample *s)
{
	qsort(s->v, (size_t)s->n, sizeof(s->v[0]), ascending);
}

double fs_sample_median(struct fs_sample *s)
{
	fs_sample_sort(s);
	return s->n % 2 == 1 ? s->v[s->n / 2] : (s->v[s->n / 2 - 1] + s->v[s->n / 2]) / 2;
}

bool fs_bench_int(const char *program, const char *option, const char *text, int min, int max, int *out)
{
	char *end;

	errno = 0;
	long v = strtol(text, &end, 10);
	if (errno != 0 || end == text || *end != '\0' || v < min || v > max) {
		fprintf(stderr, "%s: --%s takes %d to %d, not \"%s\"\n", program, option, min, max, text);
		return false;
	}
	*out = (int)v;
	return true;
}

uint64_t fs_bench_hash(const void *data, size_t n)
{
	const uint8_t *b = data;
	uint64_t v = 0xcbf29ce484222325u;

	for (size_t i = 0; i < n; i++)
		v = (v ^ b[i]) * 0x100000001b3u;
	return v;
}
