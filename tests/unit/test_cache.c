/* server/rows: the cache is bounded in bytes, the oldest goes first, rows in use live on, counters tell the
 * truth; memory is used again. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "server/rows/cache.h"

#include <malloc.h>
#include <stdlib.h>
#include <string.h>

#define TOKENS 16
#define EMBD 64
#define DATA_BYTES ((size_t)TOKENS * EMBD * sizeof(float))

static void make_key(uint8_t key[32], uint32_t name)
{
	memset(key, 0, 32);
	/* as spread out as a hash's first bytes are */
	uint64_t h = (name + 1) * 0x9e3779b97f4a7c15ull;
	memcpy(key, &h, sizeof(h));
	memcpy(key + 16, &name, sizeof(name));
}

static struct fs_rows *make_rows(uint32_t name)
{
	struct fs_rows_shape s = {.n_tokens = TOKENS, .nx = TOKENS, .ny = 1, .n_embd = EMBD};
	float *data = calloc(TOKENS * EMBD, sizeof(float));
	uint8_t key[32];
	struct fs_rows *r = NULL;
	make_key(key, name);
	data[0] = (float)name;
	assert_int_equal(fs_rows_create(&s, data, key, &r), FS_OK);
	return r;
}

static void put(struct fs_rows_cache *c, uint32_t name)
{
	struct fs_rows *r = make_rows(name);
	fs_rows_cache_put(c, r);
	fs_rows_unref(r);
}

/* True when it is there, and then with the right content. */
static bool has(struct fs_rows_cache *c, uint32_t name)
{
	uint8_t key[32];
	make_key(key, name);
	struct fs_rows *r = fs_rows_cache_get(c, key);
	if (r)
		assert_true(r->data[0] == (float)name);
	fs_rows_unref(r);
	return r != NULL;
}

static struct fs_rows_cache_stats stats(struct fs_rows_cache *c)
{
	struct fs_rows_cache_stats s;
	fs_rows_cache_stats(c, &s);
	return s;
}

static void the_one_used_longest_ago_goes_first(void **state)
{
	struct fs_rows_cache *c;
	assert_int_equal(fs_rows_cache_create(3 * DATA_BYTES + 2048, &c, NULL), FS_OK);
	for (uint32_t i = 0; i < 3; i++)
		put(c, i);
	assert_int_equal(stats(c).entries, 3);
	assert_true(stats(c).bytes >= 3 * DATA_BYTES && stats(c).bytes <= stats(c).limit);
	assert_true(has(c, 0)); /* now 1 is the oldest */
	put(c, 3);
	assert_false(has(c, 1));
	assert_true(has(c, 0) && has(c, 2) && has(c, 3));
	struct fs_rows_cache_stats s = stats(c);
	assert_int_equal(s.hits, 4);
	assert_int_equal(s.misses, 1);
	assert_int_equal(s.evictions, 1);
	assert_int_equal(s.entries, 3);
	fs_rows_cache_destroy(c);
}

static void rows_in_use_outlive_their_entry(void **state)
{
	struct fs_rows_cache *c;
	uint8_t key[32];
	assert_int_equal(fs_rows_cache_create(DATA_BYTES + 1024, &c, NULL), FS_OK);
	put(c, 7);
	make_key(key, 7);
	struct fs_rows *held = fs_rows_cache_get(c, key);
	assert_non_null(held);
	put(c, 8);
	assert_false(has(c, 7));
	assert_int_equal(stats(c).entries, 1);
	assert_true(stats(c).bytes <= stats(c).limit); /* what is only held does not count */
	assert_true(held->data[0] == 7.0f);
	fs_rows_cache_destroy(c);
	assert_true(held->data[0] == 7.0f);
	fs_rows_unref(held);
}

static void the_same_key_is_kept_once(void **state)
{
	struct fs_rows_cache *c;
	assert_int_equal(fs_rows_cache_create(1 << 20, &c, NULL), FS_OK);
	put(c, 1);
	uint64_t bytes = stats(c).bytes;
	put(c, 1);
	assert_int_equal(stats(c).bytes, bytes);
	assert_int_equal(stats(c).entries, 1);
	assert_int_equal(stats(c).evictions, 0);
	assert_true(has(c, 1));
	fs_rows_cache_destroy(c);
}

static void too_large_or_switched_off(void **state)
{
	static const size_t limits[] = {0, DATA_BYTES};
	for (size_t i = 0; i < FS_ARRAY_LEN(limits); i++) {
		struct fs_rows_cache *c;
		assert_int_equal(fs_rows_cache_create(limits[i], &c, NULL), FS_OK);
		put(c, 1);
		assert_false(has(c, 1));
		assert_int_equal(stats(c).bytes, 0);
		assert_int_equal(stats(c).misses, 1);
		fs_rows_cache_destroy(c);
	}
}

static void many_entries_are_all_found(void **state)
{
	struct fs_rows_cache *c;
	assert_int_equal(fs_rows_cache_create(64 << 20, &c, NULL), FS_OK);
	for (uint32_t i = 0; i < 5000; i++)
		put(c, i);
	for (uint32_t i = 0; i < 5000; i++)
		assert_true(has(c, i));
	assert_false(has(c, 5000));
	assert_int_equal(stats(c).entries, 5000);
	assert_int_equal(stats(c).evictions, 0);
	fs_rows_cache_destroy(c);
}

#define THREADS 4
#define STEPS 3000

struct hand {
	struct fs_rows_cache *c;
	unsigned seed;
	pthread_t thread;
};

static void *hammer(void *arg)
{
	struct hand *h = arg;
	struct fs_rows_cache *c = h->c;
	for (int i = 0; i < STEPS; i++) {
		uint32_t name = (uint32_t)rand_r(&h->seed) % 40;
		uint8_t key[32];
		make_key(key, name);
		struct fs_rows *r = fs_rows_cache_get(c, key);
		if (!r) {
			r = make_rows(name);
			fs_rows_cache_put(c, r);
		}
		FS_ASSERT(r->data[0] == (float)name);
		fs_rows_unref(r);
	}
	return NULL;
}

static void threads_share_it(void **state)
{
	struct fs_rows_cache *c;
	struct hand h[THREADS];
	assert_int_equal(fs_rows_cache_create(20 * (DATA_BYTES + 512), &c, NULL), FS_OK);
	for (size_t i = 0; i < THREADS; i++) {
		h[i] = (struct hand){.c = c, .seed = (unsigned)i + 1};
		assert_int_equal(fs_thread_start(&h[i].thread, "hammer", hammer, &h[i], NULL), FS_OK);
	}
	for (size_t i = 0; i < THREADS; i++)
		pthread_join(h[i].thread, NULL);
	struct fs_rows_cache_stats s = stats(c);
	assert_int_equal(s.hits + s.misses, THREADS * STEPS);
	assert_true(s.bytes <= s.limit && s.entries > 0 && s.evictions > 0);
	fs_rows_cache_destroy(c);
}

static void drop(void *data, int32_t n_tokens)
{
	struct fs_rows_shape s = {.n_tokens = n_tokens, .nx = n_tokens, .ny = 1, .n_embd = 1024};
	struct fs_rows *r = NULL;
	assert_int_equal(fs_rows_create(&s, data, (const uint8_t[32]){0}, &r), FS_OK);
	fs_rows_unref(r);
}

static void memory_of_rows_that_are_gone_is_used_again(void **state)
{
	const size_t n = (size_t)1024 * 1024 * sizeof(float);
	void *first = fs_rows_alloc(n);
	memset(first, 1, n);
	drop(first, 1024);
	void *second = fs_rows_alloc(n - n / 32);
	assert_ptr_equal(second, first);
	memset(second, 2, n - n / 32);
	void *third = fs_rows_alloc(n); /* there is no other piece */
	assert_ptr_not_equal(third, first);
	memset(third, 3, n);
	drop(second, 992);
	drop(third, 1024);
	/* what is much too large, or too small, is let go instead */
	void *small = fs_rows_alloc(n * 3 / 4), *large;
	assert_true(malloc_usable_size(small) < n);
	drop(small, 768);
	large = fs_rows_alloc(n);
	memset(large, 4, n);
	free(large);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
	        cmocka_unit_test(the_one_used_longest_ago_goes_first),
	        cmocka_unit_test(rows_in_use_outlive_their_entry),
	        cmocka_unit_test(the_same_key_is_kept_once),
	        cmocka_unit_test(too_large_or_switched_off),
	        cmocka_unit_test(many_entries_are_all_found),
	        cmocka_unit_test(threads_share_it),
	        cmocka_unit_test(memory_of_rows_that_are_gone_is_used_again),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}
