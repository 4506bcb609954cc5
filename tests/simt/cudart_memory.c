/*
 * cudart_memory: the card's memory and pinned memory of the imitated runtime, in one list, so that copies can
 * be told memory of the wrong kind.
 */
#include "tests/simt/cudart_inside.h"

#include <stdlib.h>
#include <string.h>

#if defined(__SANITIZE_ADDRESS__)
#define WATCHED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define WATCHED 1
#endif
#endif
#ifdef WATCHED
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(p, size) ((void)(p), (void)(size))
#define ASAN_UNPOISON_MEMORY_REGION(p, size) ((void)(p), (void)(size))
#define __asan_address_is_poisoned(p) 1
#endif

#define SMALL ((size_t)8 << 20) /* the rest is written by copies, or scratch, and takes long to go over */

/* ---- memory ---- */

struct block {
	uint8_t *p;
	size_t size;
	bool pinned, freed; /* freed: by a stream that has not got there */
	bool pooled;        /* outlives its context */
	struct block *next;
};
static struct block *blocks;

static cudaError_t new_block(void **out, size_t size, bool pinned)
{
	struct block *b;

	if (fake_cuda_broken)
		return fake_cuda_say(fake_cuda_broken);
	if (!pinned && size > fake_cuda.memory - fake_cuda.used)
		return fake_cuda_say(cudaErrorMemoryAllocation);
	b = fake_cuda_need(sizeof(*b));
	FS_ASSERT(posix_memalign((void **)&b->p, 512, size ? size : 1) == 0); /* to the byte */
	if (size <= SMALL)
		memset(b->p, 0xff, size);
	b->size = size;
	b->pinned = pinned;
	b->next = blocks;
	blocks = b;
	if (!pinned && size <= SMALL)
		ASAN_POISON_MEMORY_REGION(b->p, size);
	if (!pinned) {
		fake_cuda.used += size;
		fake_cuda.peak = FS_MAX(fake_cuda.peak, fake_cuda.used);
		fake_cuda.blocks++;
	} else {
		fake_cuda.pinned++;
	}
	*out = b->p;
	return cudaSuccess;
}

void fake_cuda_reach(bool card)
{
	for (struct block *b = blocks; b; b = b->next)
		if (b->pinned || b->size > SMALL)
			continue;
		else if (card)
			ASAN_UNPOISON_MEMORY_REGION(b->p, b->size);
		else
			ASAN_POISON_MEMORY_REGION(b->p, b->size);
}

bool fake_cuda_stops(const void *p)
{
	return __asan_address_is_poisoned(p);
}

static struct block **block_at(const void *p)
{
	struct block **at = &blocks;

	while (*at && (*at)->p != p)
		at = &(*at)->next;
	return at;
}

static void remove_block(struct block **at)
{
	struct block *b = *at;

	*at = b->next;
	ASAN_UNPOISON_MEMORY_REGION(b->p, b->size);
	free(b->p);
	free(b);
}

/* What the caller sees of a free; the memory itself may go later. */
static void count_freed(struct block *b)
{
	if (b->pinned) {
		fake_cuda.pinned--;
	} else {
		fake_cuda.used -= b->size;
		fake_cuda.blocks--;
	}
	b->freed = true;
}

static cudaError_t free_block(void *p, bool pinned)
{
	struct block **at = block_at(p);

	if (fake_cuda_broken)
		return fake_cuda_say(fake_cuda_broken);
	if (!*at || (*at)->freed || (*at)->pinned != pinned)
		return fake_cuda_say(cudaErrorInvalidValue);
	count_freed(*at);
	remove_block(at);
	return cudaSuccess;
}

/* Whether n bytes at p are memory of that kind. */
static bool is_block(const void *p, size_t n, bool pinned)
{
	for (const struct block *b = blocks; b; b = b->next) {
		uintptr_t at = (uintptr_t)p - (uintptr_t)b->p;

		if (at < b->size && n <= b->size - at)
			return b->pinned == pinned && !b->freed;
	}
	return false;
}

cudaError_t cudaMalloc(void **out, size_t bytes)
{
	return new_block(out, bytes, false);
}

cudaError_t cudaFree(void *p)
{
	return free_block(p, false);
}

cudaError_t cudaHostAlloc(void **out, size_t bytes, unsigned flags)
{
	if (++fake_cuda.pinned_allocs == fake_cuda.no_pinned_at)
		return fake_cuda_say(cudaErrorMemoryAllocation);
	return new_block(out, bytes, true);
}

cudaError_t cudaFreeHost(void *p)
{
	return free_block(p, true);
}

cudaError_t cudaMallocFromPoolAsync(void **out, size_t bytes, cudaMemPool_t pool, cudaStream_t s)
{
	cudaError_t rc = new_block(out, bytes, false);

	if (!rc)
		blocks->pooled = true;
	return rc;
}

static void nothing(void *arg)
{
}

static void free_later(void *arg)
{
	remove_block(block_at(arg));
}

cudaError_t cudaFreeAsync(void *p, cudaStream_t s)
{
	struct block **at = block_at(p);

	if (fake_cuda_broken)
		return fake_cuda_say(fake_cuda_broken);
	if (!*at || (*at)->freed || (*at)->pinned || fake_cuda_captures(s))
		return fake_cuda_say(cudaErrorInvalidValue);
	count_freed(*at);
	return (cudaError_t)fake_cuda_queue(s, free_later, nothing, p);
}

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total)
{
	*free_bytes = fake_cuda.memory - fake_cuda.used;
	*total = fake_cuda.memory;
	return fake_cuda_say(fake_cuda_broken);
}

struct CUmemPoolHandle_st {
	struct CUmemPoolHandle_st *next;
};
static struct CUmemPoolHandle_st *pools; /* no context's */

cudaError_t cudaMemPoolCreate(cudaMemPool_t *out, const struct cudaMemPoolProps *props)
{
	if (fake_cuda_broken)
		return fake_cuda_say(fake_cuda_broken);
	*out = fake_cuda_need(sizeof(**out));
	(*out)->next = pools;
	pools = *out;
	fake_cuda.pools++;
	return cudaSuccess;
}

cudaError_t cudaMemPoolDestroy(cudaMemPool_t pool)
{
	struct CUmemPoolHandle_st **at = &pools;

	while (*at != pool)
		at = &(*at)->next;
	*at = pool->next;
	free(pool);
	fake_cuda.pools--;
	return cudaSuccess;
}

cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr attr, void *value)
{
	return cudaSuccess;
}

/* What was freed is given back at once. */
cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr attr, void *value)
{
	uint64_t used = fake_cuda.used;

	memcpy(value, &used, sizeof(used));
	return fake_cuda_say(fake_cuda_broken);
}

cudaError_t cudaMemPoolTrimTo(cudaMemPool_t pool, size_t keep)
{
	return fake_cuda_say(fake_cuda_broken);
}

/* ---- copies ---- */

struct copy {
	void *dst;
	const void *src;
	size_t bytes;
};

static void run_copy(void *arg)
{
	const struct copy *c = arg;

	memcpy(c->dst, c->src, c->bytes);
}

cudaError_t cudaMemcpyAsync(
        void *dst, const void *src, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t s)
{
	struct copy *c;

	if (fake_cuda_broken)
		return fake_cuda_say(fake_cuda_broken);
	if (!is_block(dst, bytes, kind == cudaMemcpyDeviceToHost) ||
	        !is_block(src, bytes, kind == cudaMemcpyHostToDevice))
		return fake_cuda_say(cudaErrorInvalidValue);
	c = fake_cuda_need(sizeof(*c));
	*c = (struct copy){.dst = dst, .src = src, .bytes = bytes};
	return (cudaError_t)fake_cuda_queue(s, run_copy, free, c);
}

void fake_cuda_free_all(bool pooled)
{
	for (struct block **at = &blocks; *at;) {
		if ((*at)->pooled && !(*at)->freed && !pooled) {
			at = &(*at)->next;
			continue;
		}
		if (!(*at)->freed)
			count_freed(*at);
		remove_block(at);
	}
	while (pooled && pools)
		cudaMemPoolDestroy(pools);
}
