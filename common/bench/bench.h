/*
 * bench: what the programs behind scripts/bench share: samples and their medians, numbers from the command
 * line, hashes of results. Nothing that is installed uses it. One thread.
 */
#ifndef FS_COMMON_BENCH_H
#define FS_COMMON_BENCH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define FS_BENCH_MAX_REPEAT 1000

struct fs_sample {
	double v[FS_BENCH_MAX_REPEAT]; /* in any order until sorted */
	int n;
};
void fs_sample_sort(struct fs_sample *s); /* ascending */
/* Sorts; the middle one, or the mean of the two in the middle. n > 0. */
double fs_sample_median(struct fs_sample *s);

/* A whole number from min to max; else false and a line on stderr that names program and option. */
bool fs_bench_int(const char *program, const char *option, const char *text, int min, int max, int *out);

/* FNV-1a, 64 bits: tells that two runs have computed the same. */
uint64_t fs_bench_hash(const void *data, size_t n);

#endif
