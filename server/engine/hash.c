/* hash: see hash.h. */
#include "server/engine/hash.h"

#include <stdlib.h>
#include <string.h>

#define EMPTY UINT64_MAX

/* The finisher of splitmix64 (Steele, Lea, Flood 2014): every input bit reaches every output bit. */
static uint64_t mix(uint64_t x)
{
	x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
	x = (x ^ x >> 27) * 0x94d049bb133111ebu;
	return x ^ x >> 31;
}

static size_t map_slot(const struct fs_map64 *m, uint64_t key)
{
	size_t i = mix(key) & (m->cap - 1);

	while (m->keys[i] != EMPTY && m->keys[i] != key)
		i = (i + 1) & (m->cap - 1);
	return i;
}

static int map_grow(struct fs_map64 *m)
{
	struct fs_map64 big = {.cap = m->cap ? m->cap * 2 : 64};
	size_t i, bytes;

	if (!fs_mul_size(big.cap, sizeof(uint64_t), &bytes))
		return FS_ENOMEM;
	big.keys = malloc(bytes);
	big.vals = malloc(bytes);
	if (big.keys == NULL || big.vals == NULL) {
		fs_map64_finish(&big);
		return FS_ENOMEM;
	}
	memset(big.keys, 0xff, bytes);
	for (i = 0; i < m->cap; i++)
		if (m->keys[i] != EMPTY) {
			size_t s = map_slot(&big, m->keys[i]);

			big.keys[s] = m->keys[i];
			big.vals[s] = m->vals[i];
		}
	big.n = m->n;
	fs_map64_finish(m);
	*m = big;
	return FS_OK;
}

int fs_map64_put(struct fs_map64 *m, uint64_t key, uint64_t val)
{
	size_t i;
	int rc;

	FS_ASSERT(key != EMPTY);
	if (m->n >= m->cap / 2 && (rc = map_grow(m)) != FS_OK)
		return rc;
	i = map_slot(m, key);
	if (m->keys[i] == key)
		return FS_OK;
	m->keys[i] = key;
	m->vals[i] = val;
	m->n++;
	return FS_OK;
}

bool fs_map64_get(const struct fs_map64 *m, uint64_t key, uint64_t *val)
{
	size_t i;

	if (m->cap == 0)
		return false;
	i = map_slot(m, key);
	if (m->keys[i] == EMPTY)
		return false;
	*val = m->vals[i];
	return true;
}

void fs_map64_finish(struct fs_map64 *m)
{
	free(m->keys);
	free(m->vals);
	*m = (struct fs_map64){0};
}

/* Eight bytes a step, each mixed; the length goes in first so that trailing zeros count. */
static uint64_t hash_bytes(const void *p, size_t n)
{
	const uint8_t *s = p;
	uint64_t h = mix(n + 0x9e3779b97f4a7c15u), w;

	for (; n >= 8; s += 8, n -= 8) {
		memcpy(&w, s, 8);
		h = mix(h ^ w) + 0x9e3779b97f4a7c15u;
	}
	w = 0;
	memcpy(&w, s, n);
	return mix(h ^ w);
}

void fs_strtab_init(struct fs_strtab *t, size_t max_bytes)
{
	*t = (struct fs_strtab){0};
	fs_buf_init(&t->bytes, max_bytes);
}

void fs_strtab_finish(struct fs_strtab *t)
{
	fs_buf_finish(&t->bytes);
	free(t->offs);
	free(t->slots);
	t->offs = NULL;
	t->slots = NULL;
	t->n = t->cap = t->n_slots = 0;
}

const char *fs_strtab_get(const struct fs_strtab *t, uint32_t number, size_t *len)
{
	FS_ASSERT(number < t->n);
	*len = t->offs[number + 1] - t->offs[number] - 1;
	return (const char *)t->bytes.data + t->offs[number];
}

static size_t str_slot(const struct fs_strtab *t, const void *s, size_t len)
{
	size_t i = hash_bytes(s, len) & (t->n_slots - 1), have;

	for (; t->slots[i] != 0; i = (i + 1) & (t->n_slots - 1)) {
		const char *old = fs_strtab_get(t, t->slots[i] - 1, &have);

		if (have == len && memcmp(old, s, len) == 0)
			break;
	}
	return i;
}

static int str_grow(struct fs_strtab *t)
{
	size_t cap = t->cap ? t->cap * 2 : 64, i, len;
	size_t *offs;
	uint32_t *slots;

	if (cap > UINT32_MAX / 4)
		return FS_ENOMEM;
	offs = realloc(t->offs, (cap + 1) * sizeof(*offs));
	if (offs == NULL)
		return FS_ENOMEM;
	t->offs = offs;
	offs[t->n] = t->bytes.len;
	slots = calloc(cap * 2, sizeof(*slots));
	if (slots == NULL)
		return FS_ENOMEM;
	free(t->slots);
	t->slots = slots;
	t->n_slots = cap * 2;
	t->cap = cap;
	for (i = 0; i < t->n; i++) {
		const char *s = fs_strtab_get(t, (uint32_t)i, &len);

		slots[str_slot(t, s, len)] = (uint32_t)i + 1;
	}
	return FS_OK;
}

int fs_strtab_intern(struct fs_strtab *t, const char *s, size_t len, uint32_t *number, bool *is_new)
{
	size_t i, need;
	int rc;

	if (t->n == t->cap && (rc = str_grow(t)) != FS_OK)
		return rc;
	i = str_slot(t, s, len);
	*is_new = t->slots[i] == 0;
	if (!*is_new) {
		*number = t->slots[i] - 1;
		return FS_OK;
	}
	if (!fs_add_size(len, 1, &need) || (rc = fs_buf_reserve(&t->bytes, need)) != FS_OK)
		return FS_ENOMEM;
	if ((rc = fs_buf_append(&t->bytes, s, len)) != FS_OK ||
	        (rc = fs_buf_append(&t->bytes, "", 1)) != FS_OK)
		return rc;
	*number = (uint32_t)t->n;
	t->n++;
	t->offs[t->n] = t->bytes.len;
	t->slots[i] = *number + 1;
	return FS_OK;
}

bool fs_strtab_find(const struct fs_strtab *t, const void *s, size_t len, uint32_t *number)
{
	size_t i;

	if (t->n == 0)
		return false;
	i = str_slot(t, s, len);
	if (t->slots[i] == 0)
		return false;
	*number = t->slots[i] - 1;
	return true;
}
