/*
 * cache: the rows of pictures seen lately, by their key, bounded in bytes. The entry used longest ago goes
 * first; whoever still holds rows that were evicted keeps them by its reference, and only the cache's own
 * are counted. Any thread; its lock is held for a look-up, never while anything is encoded or freed.
 */
#ifndef FS_SERVER_ROWS_CACHE_H
#define FS_SERVER_ROWS_CACHE_H

#include "server/rows/rows.h"

struct fs_rows_cache;

struct fs_rows_cache_stats {
	uint64_t hits, misses;
	uint64_t evictions;    /* to make room */
	uint64_t bytes, limit; /* of the entries with their bookkeeping */
	uint64_t entries;
};

/* max_bytes 0: a cache that keeps nothing and counts misses. */
int fs_rows_cache_create(size_t max_bytes, struct fs_rows_cache **out, struct fs_errbuf *e);
void fs_rows_cache_destroy(struct fs_rows_cache *c); /* NULL is fine */
/* A reference of the caller's, or NULL. */
struct fs_rows *fs_rows_cache_get(struct fs_rows_cache *c, const uint8_t key[32]);
/* Takes a reference of its own. Rows larger than the bound are not kept; of equal keys the first rows stay.
 */
void fs_rows_cache_put(struct fs_rows_cache *c, struct fs_rows *rows);
void fs_rows_cache_stats(struct fs_rows_cache *c, struct fs_rows_cache_stats *out);

#endif
