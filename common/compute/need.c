/*
 * need: whether a model fits a device, told before anything of it is allocated. Runs on the thread that owns
 * the device. What is free is asked once, so another program may still be faster: then the allocation itself
 * fails.
 */
#include "common/compute/internal.h"

#include <stdio.h>

#define MIB ((uint64_t)1 << 20)

/* Allocations of a GPU begin at such multiples. */
#define ROUND 512

/* Slices of weights as 16-bit numbers, the workspace of the library of large products, results of split keys,
 * and what the driver takes when kernels are first used. */
#define FIXED (256 * MIB)

uint64_t fs_dev_rounded(uint64_t bytes)
{
	return (bytes + ROUND - 1) / ROUND * ROUND;
}

uint64_t fs_dev_scratch(const struct fs_dev *d, int64_t rows, int64_t widest, int64_t n_kv, int64_t kv_width)
{
	uint64_t narrow = (uint64_t)rows * (uint64_t)widest, keys = 2 * (uint64_t)n_kv * (uint64_t)kv_width;

	return d->is_gpu ? FIXED + sizeof(uint16_t) * (narrow + keys) : 0;
}

uint64_t fs_vector_bytes(const struct fs_dev *d, const struct fs_gguf_tensor *t)
{
	uint64_t n = 1;

	for (int i = 0; i < 4; i++)
		n *= t->ne[i] > 0 ? (uint64_t)t->ne[i] : 1;
	return d->is_gpu ? fs_dev_rounded(n * sizeof(float)) : 0;
}

static void tell_bytes(char *out, size_t cap, uint64_t bytes)
{
	if (bytes >= 1024 * MIB / 10)
		snprintf(out, cap, "%.1f GiB", (double)bytes / (double)(1024 * MIB));
	else
		snprintf(out, cap, "%.1f MiB", (double)bytes / (double)MIB);
}

/* "5.1 GiB of device memory: weights 4.4 GiB, KV cache 0.5 GiB, work 0.2 GiB" */
static void tell_need(char *out, size_t cap, const struct fs_dev_need *n)
{
	char all[24], weights[24], cache[24], work[24];

	tell_bytes(all, sizeof(all), n->weights + n->cache + n->work);
	tell_bytes(weights, sizeof(weights), n->weights);
	tell_bytes(cache, sizeof(cache), n->cache);
	tell_bytes(work, sizeof(work), n->work);
	if (n->cache > 0)
		snprintf(out, cap, "%s of device memory: weights %s, KV cache %s, work %s", all, weights,
		        cache, work);
	else
		snprintf(out, cap, "%s of device memory: weights %s, work %s", all, weights, work);
}

int fs_dev_fit(struct fs_dev *d, const struct fs_dev_need *n, const char *advice, struct fs_errbuf *e)
{
	uint64_t have, total;
	char need[160], have_text[24], total_text[24];

	if (!fs_dev_memory(d, &have, &total))
		return FS_OK;
	tell_need(need, sizeof(need), n);
	tell_bytes(have_text, sizeof(have_text), have);
	tell_bytes(total_text, sizeof(total_text), total);
	if (n->weights + n->cache + n->work > have)
		return fs_fail(e, FS_ENOMEM, "it needs %s; %s has %s of %s free: %s", need, d->name,
		        have_text, total_text, advice);
	fs_info("needs %s; %s has %s of %s free", need, d->name, have_text, total_text);
	return FS_OK;
}
