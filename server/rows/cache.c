/*
 * A hash table of chained entries that are also links of one ring in order of use. Keys are SHA-256 sums:
 * their first bytes are as good as any hash of them.
 */
#include "server/rows/cache.h"

#include <stdlib.h>
#include <string.h>

#define BUCKETS_FIRST 64
#define BUCKETS_MAX ((size_t)1 << 22)

struct entry {
	struct entry *chain;       /* next of its bucket; while it is being evicted, next victim */
	struct entry *prev, *next; /* ring: next is older */
	struct fs_rows *rows;
	size_t cost;
};

struct fs_rows_cache {
	pthread_mutex_t lock;
	struct entry ring; /* ring.next: used last; ring.prev: used longest ago; itself no entry */
	struct entry **buckets;
	size_t n_buckets; /* a power of two */
	struct fs_rows_cache_stats n;
};

int fs_rows_cache_create(size_t max_bytes, struct fs_rows_cache **out, struct fs_errbuf *e)
{
	struct fs_rows_cache *c = calloc(1, sizeof(*c));
	struct entry **buckets = calloc(BUCKETS_FIRST, sizeof(*buckets));
	if (!c || !buckets) {
		free(c);
		free(buckets);
		return fs_fail(e, FS_ENOMEM, "out of memory");
	}
	pthread_mutex_init(&c->lock, NULL);
	c->ring.prev = c->ring.next = &c->ring;
	c->buckets = buckets;
	c->n_buckets = BUCKETS_FIRST;
	c->n.limit = max_bytes;
	*out = c;
	return FS_OK;
}

void fs_rows_cache_destroy(struct fs_rows_cache *c)
{
	if (!c)
		return;
	for (struct entry *x = c->ring.next, *next; x != &c->ring; x = next) {
		next = x->next;
		fs_rows_unref(x->rows);
		free(x);
	}
	free(c->buckets);
	pthread_mutex_destroy(&c->lock);
	free(c);
}

static size_t cost_of(const struct fs_rows *r)
{
	size_t data = (size_t)r->shape.n_tokens * (size_t)r->shape.n_embd * sizeof(float);
	return data + sizeof(*r) + sizeof(struct entry);
}

static struct entry **bucket_locked(struct fs_rows_cache *c, const uint8_t key[32])
{
	uint64_t h;
	memcpy(&h, key, sizeof(h));
	return &c->buckets[h & (c->n_buckets - 1)];
}

static struct entry *find_locked(struct fs_rows_cache *c, const uint8_t key[32])
{
	struct entry *x = *bucket_locked(c, key);
	while (x && memcmp(x->rows->key, key, 32) != 0)
		x = x->chain;
	return x;
}

static void unlink_ring(struct entry *x)
{
	x->prev->next = x->next;
	x->next->prev = x->prev;
}

static void link_first_locked(struct fs_rows_cache *c, struct entry *x)
{
	x->prev = &c->ring;
	x->next = c->ring.next;
	x->next->prev = x;
	c->ring.next = x;
}

/* More buckets when chains grow long; without the memory for them chains stay long. */
static void grow_locked(struct fs_rows_cache *c)
{
	size_t n = c->n_buckets * 2;
	struct entry **old = c->buckets,
	             **bigger = n <= BUCKETS_MAX ? calloc(n, sizeof(struct entry *)) : NULL;
	if (!bigger)
		return;
	c->buckets = bigger;
	c->n_buckets = n;
	for (struct entry *x = c->ring.next; x != &c->ring; x = x->next) {
		struct entry **b = bucket_locked(c, x->rows->key);
		x->chain = *b;
		*b = x;
	}
	free(old);
}

/* Takes the oldest entries out until `need` more bytes fit; the caller frees them without the lock. */
static struct entry *evict_locked(struct fs_rows_cache *c, size_t need)
{
	struct entry *victims = NULL;
	while (c->n.bytes + need > c->n.limit) {
		struct entry *x = c->ring.prev, **at = bucket_locked(c, x->rows->key);
		while (*at != x)
			at = &(*at)->chain;
		*at = x->chain;
		unlink_ring(x);
		c->n.bytes -= x->cost;
		c->n.entries--;
		c->n.evictions++;
		x->chain = victims;
		victims = x;
	}
	return victims;
}

struct fs_rows *fs_rows_cache_get(struct fs_rows_cache *c, const uint8_t key[32])
{
	struct fs_rows *rows = NULL;
	pthread_mutex_lock(&c->lock);
	struct entry *x = find_locked(c, key);
	if (x) {
		unlink_ring(x);
		link_first_locked(c, x);
		rows = fs_rows_ref(x->rows);
		c->n.hits++;
	} else {
		c->n.misses++;
	}
	pthread_mutex_unlock(&c->lock);
	return rows;
}

void fs_rows_cache_put(struct fs_rows_cache *c, struct fs_rows *rows)
{
	size_t cost = cost_of(rows);
	struct entry *x = cost <= c->n.limit ? malloc(sizeof(*x)) : NULL, *victims = NULL;
	if (!x)
		return;
	pthread_mutex_lock(&c->lock);
	if (find_locked(c, rows->key)) {
		*x = (struct entry){0};
		victims = x;
	} else {
		victims = evict_locked(c, cost);
		if (c->n.entries >= c->n_buckets)
			grow_locked(c);
		struct entry **b = bucket_locked(c, rows->key);
		*x = (struct entry){.chain = *b, .rows = fs_rows_ref(rows), .cost = cost};
		*b = x;
		link_first_locked(c, x);
		c->n.entries++;
		c->n.bytes += cost;
	}
	pthread_mutex_unlock(&c->lock);
	for (struct entry *next; victims; victims = next) {
		next = victims->chain;
		fs_rows_unref(victims->rows);
		free(victims);
	}
}

void fs_rows_cache_stats(struct fs_rows_cache *c, struct fs_rows_cache_stats *out)
{
	pthread_mutex_lock(&c->lock);
	*out = c->n;
	pthread_mutex_unlock(&c->lock);
}
