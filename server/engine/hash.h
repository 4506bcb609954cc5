/*
 * hash: the two tables that a vocabulary needs: 64-bit keys to 64-bit values, and byte strings to consecutive
 * numbers. Open addressing, grows as filled, nothing is ever removed. One thread while filling; any thread
 * for look-ups afterwards. Text from users only looks up, so it can not degrade a table. Internal to
 * server/engine.
 */
#ifndef FS_ENGINE_HASH_H
#define FS_ENGINE_HASH_H

#include "common/base/base.h"

struct fs_map64 {
	uint64_t *keys, *vals;
	size_t n, cap; /* cap is 0 or a power of two; n <= cap / 2 */
};
/* Zero-initialise. UINT64_MAX is no valid key. Keeps the first value of a key that is put twice; FS_ENOMEM.
 */
int fs_map64_put(struct fs_map64 *m, uint64_t key, uint64_t val);
bool fs_map64_get(const struct fs_map64 *m, uint64_t key, uint64_t *val);
void fs_map64_finish(struct fs_map64 *m);

/* Strings numbered from 0 in the order of their arrival, kept NUL-terminated one behind the other. */
struct fs_strtab {
	struct fs_buf bytes;
	size_t *offs;    /* n + 1 of them: string i is bytes [offs[i], offs[i+1] - 1) */
	uint32_t *slots; /* number + 1, 0 = free */
	size_t n, cap, n_slots;
};
void fs_strtab_init(struct fs_strtab *t, size_t max_bytes);
void fs_strtab_finish(struct fs_strtab *t);
/* *is_new tells whether it was added now. FS_ENOMEM. */
int fs_strtab_intern(struct fs_strtab *t, const char *s, size_t len, uint32_t *number, bool *is_new);
bool fs_strtab_find(const struct fs_strtab *t, const void *s, size_t len, uint32_t *number);
/* number < n. Valid until the next intern. */
const char *fs_strtab_get(const struct fs_strtab *t, uint32_t number, size_t *len);

#endif
