/* Cells and positions of prompts, rows and their counting, and which prefix of a prompt the cache still
 * holds. No device. */
#include "server/engine/kv.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static const struct fs_hparams vl = {.arch_name = "qwen2vl", .n_vocab = 100, .n_embd = 2, .mrope = true};

static struct fs_rows *make_rows(int32_t nx, int32_t ny, int32_t width, uint8_t name)
{
	struct fs_rows_shape s = {.n_tokens = nx * ny, .nx = nx, .ny = ny, .n_embd = width};
	float *data = calloc((size_t)s.n_tokens * (size_t)width, sizeof(float));
	uint8_t key[32] = {name};
	struct fs_rows *r;

	for (int32_t i = 0; i < s.n_tokens * width; i++)
		data[i] = (float)i;
	assert_int_equal(fs_rows_create(&s, data, key, &r), FS_OK);
	return r;
}

static struct fs_prompt *build(const int32_t *ids, size_t n, struct fs_rows *const *rows, size_t n_rows)
{
	struct fs_errbuf e = {""};
	struct fs_prompt *p = NULL;

	if (fs_prompt_build(&vl, ids, n, rows, n_rows, &p, &e) != FS_OK)
		fail_msg("%s", e.text);
	return p;
}

/* A 3 x 2 picture between texts: t = p0, h = p0 + y, w = p0 + x, then p0 + 3. */
static void positions(void **state)
{
	static const int32_t ids[] = {7, 8, -1, 9, 5};
	static const int32_t want[][4] = {{7, 0, 0, 0}, {8, 1, 1, 1}, {-1, 2, 2, 2}, {-1, 2, 2, 3},
	        {-1, 2, 2, 4}, {-1, 2, 3, 2}, {-1, 2, 3, 3}, {-1, 2, 3, 4}, {9, 5, 5, 5}, {5, 6, 6, 6}};
	struct fs_rows *r = make_rows(3, 2, 2, 1);
	struct fs_prompt *p = build(ids, 5, &r, 1);

	assert_int_equal(fs_prompt_cells(p), 10);
	for (int i = 0; i < 10; i++) {
		assert_int_equal(p->ids[i], want[i][0]);
		for (int a = 0; a < 3; a++)
			assert_int_equal(p->pos[i][a], want[i][1 + a]);
	}
	assert_int_equal(p->next_pos, 7);
	assert_float_equal(fs_prompt_row(p, 4)[1], 5, 0); /* row 2 of width 2 */
	fs_rows_unref(r);                                 /* the prompt keeps its own */
	assert_float_equal(fs_prompt_row(p, 7)[0], 10, 0);
	fs_prompt_destroy(p);
}

/* A tall picture goes on at p0 + ny; two pictures in turn. */
static void two_pictures(void **state)
{
	static const int32_t ids[] = {-1, 1, -1, 2};
	struct fs_rows *r[] = {make_rows(1, 4, 2, 1), make_rows(2, 2, 2, 2)};
	struct fs_prompt *p = build(ids, 4, r, 2);

	assert_int_equal(p->n, 10);
	assert_int_equal(p->pos[4][0], 4);
	assert_int_equal(p->pos[5][0], 5);
	assert_int_equal(p->pos[8][1], 6);
	assert_int_equal(p->pos[8][2], 6);
	assert_int_equal(p->pos[9][0], 7);
	assert_int_equal(p->next_pos, 8);
	fs_prompt_destroy(p);
	fs_rows_unref(r[0]);
	fs_rows_unref(r[1]);
}

static void expect_refused(const struct fs_hparams *hp, const int32_t *ids, size_t n,
        struct fs_rows *const *rows, size_t n_rows, const char *text)
{
	struct fs_errbuf e = {""};
	struct fs_prompt *p;

	assert_int_equal(fs_prompt_build(hp, ids, n, rows, n_rows, &p, &e), FS_EINVAL);
	if (strstr(e.text, text) == NULL)
		fail_msg("\"%s\" does not hold \"%s\"", e.text, text);
}

static void refused(void **state)
{
	const struct fs_hparams plain = {.arch_name = "qwen2", .n_vocab = 100, .n_embd = 2};
	struct fs_rows *r = make_rows(1, 1, 2, 1), *wide = make_rows(1, 1, 3, 1);

	expect_refused(&vl, (int32_t[]){100}, 1, NULL, 0, "vocabulary");
	expect_refused(&vl, (int32_t[]){-2}, 1, &r, 1, "vocabulary");
	expect_refused(&vl, (int32_t[]){-1}, 1, NULL, 0, "vocabulary");
	expect_refused(&vl, (int32_t[]){1}, 1, &r, 1, "1 pictures for 0 places");
	expect_refused(&vl, NULL, 0, NULL, 0, "empty");
	expect_refused(&vl, (int32_t[]){-1}, 1, &wide, 1, "rows of 3");
	expect_refused(&plain, (int32_t[]){-1}, 1, &r, 1, "can not take pictures");
	fs_rows_unref(r);
	fs_rows_unref(wide);
}

static void rows_shapes(void **state)
{
	static const struct fs_rows_shape bad[] = {{0, 0, 0, 1}, {6, 3, 3, 1}, {-4, -2, 2, 1}, {1, 1, 1, 0},
	        {1, 1, 1, 70000}, {70000, 70000, 1, 1}, {65536, 65536, 1, 65536}};
	const uint8_t key[32] = {0};
	struct fs_rows *r;

	for (size_t i = 0; i < FS_ARRAY_LEN(bad); i++)
		assert_int_equal(fs_rows_create(&bad[i], malloc(16), key, &r), FS_EINVAL);
	fs_rows_unref(NULL);
	assert_null(fs_rows_ref(NULL));
}

/* ---- the cache's records, without its memory ---- */

#define CTX 64
static void cache_init(struct fs_kv *kv, int32_t ids[CTX])
{
	memset(kv, 0, sizeof(*kv));
	kv->n_ctx = CTX;
	kv->ids = ids;
}

static void cache_fill(struct fs_kv *kv, const struct fs_prompt *p, int32_t n)
{
	int32_t at = fs_kv_common(kv, p);

	fs_kv_truncate(kv, at);
	assert_int_equal(fs_kv_reserve(kv, p, NULL), FS_OK);
	fs_kv_commit(kv, p, at, n - at);
	assert_int_equal(kv->used, n);
}

static void common_prefix(void **state)
{
	int32_t cells[CTX];
	struct fs_kv kv;
	struct fs_rows *a = make_rows(2, 2, 2, 1), *b = make_rows(2, 2, 2, 2), *a2 = make_rows(2, 2, 2, 1),
	               *wide = make_rows(4, 1, 2, 1);
	static const int32_t ids[] = {1, 2, -1, 3, -1, 4};
	struct fs_prompt *base = build(ids, 6, (struct fs_rows *[]){a, b}, 2);
	struct fs_prompt *same = build(ids, 6, (struct fs_rows *[]){a2, b}, 2); /* other rows, same key */
	struct fs_prompt *second = build(ids, 6, (struct fs_rows *[]){a, a}, 2);
	struct fs_prompt *shape = build(ids, 6, (struct fs_rows *[]){wide, b}, 2);
	struct fs_prompt *text = build((int32_t[]){1, 2, 3}, 3, NULL, 0);
	struct fs_prompt *more =
	        build((int32_t[]){1, 2, -1, 3, -1, 4, 5, 6}, 8, (struct fs_rows *[]){a, b}, 2);

	cache_init(&kv, cells);
	assert_int_equal(fs_kv_common(&kv, base), 0);
	cache_fill(&kv, base, base->n);
	assert_int_equal(fs_kv_common(&kv, same), 12);
	assert_int_equal(fs_kv_common(&kv, second), 7);
	assert_int_equal(fs_kv_common(&kv, shape), 2);
	assert_int_equal(fs_kv_common(&kv, text), 2);
	fs_kv_commit_token(&kv, 5);
	assert_int_equal(fs_kv_common(&kv, more), 13);

	fs_kv_truncate(
	        &kv, 9); /* in the middle of the second picture, as a cancel between chunks leaves it */
	assert_int_equal(fs_kv_common(&kv, base), 9);
	assert_int_equal(kv.pics[1].n, 2);
	cache_fill(&kv, base, 10); /* and on */
	assert_int_equal(kv.n_pics, 2);
	assert_int_equal(kv.pics[1].n, 3);
	cache_fill(&kv, second, second->n);
	assert_int_equal(fs_kv_common(&kv, base), 7);
	fs_kv_truncate(&kv, 2);
	assert_int_equal(kv.n_pics, 0);

	free(kv.pics);
	struct fs_prompt *const all[] = {base, same, second, shape, text, more};
	for (size_t i = 0; i < FS_ARRAY_LEN(all); i++)
		fs_prompt_destroy(all[i]);
	struct fs_rows *const rows[] = {a, b, a2, wide};
	for (size_t i = 0; i < FS_ARRAY_LEN(rows); i++)
		fs_rows_unref(rows[i]);
}

int main(void)
{
	const struct CMUnitTest tests[] = {cmocka_unit_test(positions), cmocka_unit_test(two_pictures),
	        cmocka_unit_test(refused), cmocka_unit_test(rows_shapes), cmocka_unit_test(common_prefix)};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
