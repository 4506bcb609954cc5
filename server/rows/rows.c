/*
 * rows: counted embedding rows. Owns what it was given, and the memory of one that is gone; any thread may
 * take and drop references. It refuses shapes that do not follow wire.h's limits, so holders need not check
 * again.
 */
#include "server/rows/rows.h"

#include <malloc.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define HUGE_PAGE ((size_t)2 << 20)
#define SPARE_MAX ((size_t)64 << 20)

static bool shape_ok(const struct fs_rows_shape *s)
{
	if (s->n_tokens < 1 || s->n_tokens > FS_ROWS_MAX_TOKENS || s->n_embd < 1 ||
	        s->n_embd > FS_ROWS_MAX_EMBD)
		return false;
	if (s->nx < 1 || s->ny < 1 || (int64_t)s->nx * s->ny != s->n_tokens)
		return false;
	return (size_t)s->n_tokens * (size_t)s->n_embd * sizeof(float) <= FS_ROWS_MAX_BYTES;
}

/* Memory of rows that are gone, for the next ones: the kernel clears fresh memory when it is first touched, 2
 * ms for 10 MB, a tenth of what it takes to receive them. One piece, for whoever comes first; NULL = none. */
static _Atomic(void *) spare;

/* False: it stays the caller's. */
static bool keep(void *data)
{
	size_t n = malloc_usable_size(data);
	if (n < HUGE_PAGE || n > SPARE_MAX)
		return false;
	free(atomic_exchange(&spare, data));
	return true;
}

void *fs_rows_alloc(size_t bytes)
{
	void *p = NULL;

	if (bytes < HUGE_PAGE)
		return malloc(bytes);
	if (bytes <= SPARE_MAX && (p = atomic_exchange(&spare, NULL))) {
		size_t n = malloc_usable_size(p);
		if (n >= bytes && n - bytes <= bytes / 16)
			return p;
		free(p);
	}
	if (posix_memalign(&p, HUGE_PAGE, bytes) != 0)
		return NULL;
	madvise(p, bytes / HUGE_PAGE * HUGE_PAGE, MADV_HUGEPAGE); /* a wish: small pages do as well */
	return p;
}

int fs_rows_create(
        const struct fs_rows_shape *shape, float *data, const uint8_t key[32], struct fs_rows **out)
{
	struct fs_rows *r;

	if (data == NULL || !shape_ok(shape)) {
		free(data);
		return FS_EINVAL;
	}
	r = calloc(1, sizeof(*r));
	if (r == NULL) {
		free(data);
		return FS_ENOMEM;
	}
	r->shape = *shape;
	r->data = data;
	memcpy(r->key, key, sizeof(r->key));
	r->refs = 1;
	*out = r;
	return FS_OK;
}

struct fs_rows *fs_rows_ref(struct fs_rows *r)
{
	if (r != NULL)
		FS_ASSERT(__atomic_fetch_add(&r->refs, 1, __ATOMIC_RELAXED) > 0);
	return r;
}

void fs_rows_unref(struct fs_rows *r)
{
	if (r == NULL)
		return;
	int before = __atomic_fetch_sub(&r->refs, 1, __ATOMIC_ACQ_REL);
	FS_ASSERT(before > 0);
	if (before == 1) {
		if (!keep(r->data))
			free(r->data);
		free(r);
	}
}
