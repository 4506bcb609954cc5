/*
 * memory: the card's memory and the copies to and from it. A copy between the host's pageable memory and the
 * card makes the driver wait for the card; so bytes pass through pinned slots, used in turn, each free again
 * when the event behind its last copy has happened.
 */
#include "common/compute/cuda/cuda.h"

#include <stdlib.h>
#include <string.h>

/* ---- slots ---- */

int fs_slots_init(struct fs_cuda *c, struct fs_slots *s, size_t size, struct fs_errbuf *e)
{
	void *mem = NULL;
	int rc = cudaHostAlloc(&mem, FS_SLOTS * size, cudaHostAllocDefault);

	memset(s, 0, sizeof(*s));
	s->mem = rc ? NULL : mem;
	s->size = size;
	for (int i = 0; i < FS_SLOTS && !rc; i++)
		rc = cudaEventCreateWithFlags(&s->done[i], cudaEventDisableTiming);
	if (rc) {
		fs_slots_finish(c, s);
		return fs_fail(e, FS_ENOMEM, "%s: no %zu MiB of pinned memory for copies: %s", c->dev.name,
		        FS_SLOTS * size >> 20, cudaGetErrorString((cudaError_t)rc));
	}
	return FS_OK;
}

void fs_slots_finish(struct fs_cuda *c, struct fs_slots *s)
{
	if (!c->dev.lost) { /* else the context takes them along */
		for (int i = 0; i < FS_SLOTS; i++)
			if (s->done[i])
				cudaEventDestroy(s->done[i]);
		if (s->mem)
			cudaFreeHost(s->mem);
	}
	memset(s, 0, sizeof(*s));
}

bool fs_slots_free(struct fs_cuda *c, struct fs_slots *s, unsigned i)
{
	if (s->busy[i] && !fs_cuda_wait_event(c, s->done[i], "a copy"))
		return false;
	s->busy[i] = false;
	return true;
}

void fs_slots_used(struct fs_cuda *c, struct fs_slots *s, unsigned i)
{
	int rc = cudaEventRecord(s->done[i], c->stream);

	if (rc)
		fs_cuda_fail(c, rc, "a copy");
	else
		s->busy[i] = true;
}

/* ---- copies ---- */

void fs_cuda_upload(struct fs_dev *d, void *dst, const void *src, size_t bytes)
{
	struct fs_cuda *c = fs_cuda(d);
	struct fs_slots *ring = &c->slots;

	FS_ASSERT(!c->rec.on);
	fs_cuda_forget_forms(c);
	for (size_t at = 0; at < bytes && fs_cuda_usable(c); at += ring->size) {
		unsigned i = ring->next++ % FS_SLOTS;
		size_t n = FS_MIN(bytes - at, ring->size);
		uint8_t *pinned = ring->mem + i * ring->size;

		if (!fs_slots_free(c, ring, i))
			return;
		memcpy(pinned, (const uint8_t *)src + at, n);
		FS_CUDA_QUEUE(c, "copying to the card",
		        cudaMemcpyAsync((uint8_t *)dst + at, pinned, n, cudaMemcpyHostToDevice, s));
		fs_slots_used(c, ring, i);
	}
}

/* As many slots under way as there are, each emptied in its turn. */
void fs_cuda_download(struct fs_dev *d, void *dst, const void *src, size_t bytes)
{
	struct fs_cuda *c = fs_cuda(d);
	struct fs_slots *ring = &c->slots;
	size_t asked = 0, got = 0;
	unsigned first = ring->next;

	FS_ASSERT(!c->rec.on);
	while (got < bytes && fs_cuda_usable(c)) {
		unsigned oldest = (first + (unsigned)(got / ring->size)) % FS_SLOTS;
		size_t n;

		while (asked < bytes && asked - got < FS_SLOTS * ring->size) {
			unsigned i = ring->next++ % FS_SLOTS;

			n = FS_MIN(bytes - asked, ring->size);
			if (!fs_slots_free(c, ring, i))
				return;
			FS_CUDA_QUEUE(c, "copying from the card",
			        cudaMemcpyAsync(ring->mem + i * ring->size, (const uint8_t *)src + asked, n,
			                cudaMemcpyDeviceToHost, s));
			fs_slots_used(c, ring, i);
			asked += n;
		}
		if (!fs_slots_free(c, ring, oldest))
			return;
		n = FS_MIN(bytes - got, ring->size);
		memcpy((uint8_t *)dst + got, ring->mem + oldest * ring->size, n);
		got += n;
	}
}

void fs_cuda_copy(struct fs_dev *d, void *dst, const void *src, size_t bytes)
{
	struct fs_cuda *c = fs_cuda(d);

	fs_cuda_forget_forms(c);
	FS_CUDA_QUEUE(
	        c, "copying on the card", cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDeviceToDevice, s));
}

/* ---- memory ---- */

static bool room_to_hold(struct fs_cuda *c)
{
	size_t cap = FS_MAX(c->cap_held * 2, (size_t)64);
	void **grown;

	if (c->n_held < c->cap_held)
		return true;
	grown = realloc(c->held, cap * sizeof(*grown));
	if (!grown)
		return false;
	c->held = grown;
	c->cap_held = cap;
	return true;
}

static int take(struct fs_cuda *c, size_t bytes, void **out)
{
	int rc;

	if (!c->pool)
		return cudaMalloc(out, bytes);
	if (!room_to_hold(c))
		return cudaErrorMemoryAllocation;
	rc = cudaMallocFromPoolAsync(out, bytes, c->pool, c->stream);
	if (!rc)
		c->held[c->n_held++] = *out;
	return rc;
}

static int give_back(struct fs_cuda *c, void *p)
{
	size_t i = c->n_held;

	while (i > 0 && c->held[i - 1] != p) /* the youngest goes first, as a rule */
		i--;
	FS_ASSERT(i > 0);
	c->held[i - 1] = c->held[--c->n_held];
	return cudaFreeAsync(p, c->stream);
}

void fs_cuda_drop_pool(struct fs_cuda *c)
{
	for (size_t i = 0; i < c->n_held; i++)
		(void)cudaFree(c->held[i]);
	if (c->pool)
		(void)cudaMemPoolDestroy(c->pool);
	(void)cudaGetLastError();
	c->n_held = 0;
	c->pool = NULL;
}

int fs_cuda_alloc(struct fs_dev *d, size_t bytes, void **out, struct fs_errbuf *e)
{
	struct fs_cuda *c = fs_cuda(d);
	uint64_t have = 0, total = 0;
	void *p = NULL;
	int rc;

	if (!fs_cuda_usable(c))
		return fs_fail(e, d->err, "%s", d->err_text.text);
	rc = take(c, FS_MAX(bytes, (size_t)1), &p);
	if (rc == cudaErrorMemoryAllocation && c->pool) {
		/* Freed memory that does not fit together goes back to the driver first. */
		(void)cudaGetLastError();
		fs_cuda_wait_stream(c, "freeing memory");
		cudaMemPoolTrimTo(c->pool, 0);
		rc = take(c, FS_MAX(bytes, (size_t)1), &p);
	}
	if (rc == cudaErrorMemoryAllocation) {
		(void)cudaGetLastError();
		fs_cuda_memory(d, &have, &total);
		return fs_fail(e, FS_ENOMEM, "%s has no memory for %.1f MiB: %.1f of %.1f MiB are free",
		        d->name, (double)bytes / 1048576, (double)have / 1048576, (double)total / 1048576);
	}
	if (rc) {
		fs_cuda_fail(c, rc, "allocating memory");
		return fs_fail(e, FS_EINTERNAL, "%s", d->err_text.text);
	}
	*out = p;
	return FS_OK;
}

void fs_cuda_release(struct fs_dev *d, void *p)
{
	struct fs_cuda *c = fs_cuda(d);
	int rc = 0;

	/* A lost device's memory goes when it is closed. */
	if (!p || c->dev.lost)
		return;
	if (c->pool)
		rc = give_back(c, p);
	else if (fs_cuda_wait_stream(c, "freeing memory"))
		rc = cudaFree(p);
	if (rc)
		fs_cuda_fail(c, rc, "freeing memory");
}

bool fs_cuda_memory(struct fs_dev *d, uint64_t *free_bytes, uint64_t *total_bytes)
{
	struct fs_cuda *c = fs_cuda(d);
	uint64_t reserved = 0, used = 0;
	size_t have, total;
	int rc;

	if (c->dev.lost)
		return false;
	rc = cudaMemGetInfo(&have, &total);
	if (!rc && c->pool) {
		rc = cudaMemPoolGetAttribute(c->pool, cudaMemPoolAttrReservedMemCurrent, &reserved);
		if (!rc)
			rc = cudaMemPoolGetAttribute(c->pool, cudaMemPoolAttrUsedMemCurrent, &used);
	}
	if (rc) {
		fs_cuda_fail(c, rc, "asking for free memory");
		return false;
	}
	*free_bytes = have + (reserved - FS_MIN(used, reserved));
	*total_bytes = total;
	return true;
}

void *fs_cuda_need(struct fs_cuda *c, struct fs_cuda_buf *b, size_t bytes)
{
	const size_t step = (size_t)1 << 20;
	struct fs_errbuf e;
	void *p = NULL;
	size_t size;
	int err;

	if (bytes <= b->size)
		return b->p;
	/* Recordings use the old one. Doubling keeps small ones from losing them often. */
	fs_cuda_forget(&c->dev);
	size = FS_MAX(bytes, 2 * b->size <= 16 * step ? 2 * b->size : 0);
	size = (size + step - 1) / step * step;
	fs_cuda_release(&c->dev, b->p);
	*b = (struct fs_cuda_buf){0};
	fs_cuda_forget_forms(c);
	err = fs_cuda_alloc(&c->dev, size, &p, &e);
	if (err) {
		fs_dev_fail(&c->dev, err, "%s", e.text);
		return NULL;
	}
	*b = (struct fs_cuda_buf){.p = p, .size = size};
	return p;
}
