/*
 * Log probabilities against softmax worked by hand and in double, and the order in which token events and
 * text come out: an event right before the first text that holds some of its token.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <cmocka.h>

#include <math.h>
#include <string.h>

#include "server/engine/logprobs.h"

static bool near(double a, double b)
{
	return fabs(a - b) <= 1e-6 * FS_MAX(1, fabs(b));
}

/* softmax(0, ln 2, ln 5) = 1/8, 2/8, 5/8 */
static void by_hand(void **state)
{
	const float logits[] = {0, (float)log(2), (float)log(5)};
	struct fs_lp_entry top[3];
	double norm = fs_lp_norm(logits, 3);

	assert_true(near(norm, log(8)));
	fs_lp_best(logits, 3, norm, 3, top);
	assert_int_equal(top[0].id, 2);
	assert_int_equal(top[1].id, 1);
	assert_int_equal(top[2].id, 0);
	assert_true(near((double)top[0].logprob, log(0.625)));
	assert_true(near((double)top[1].logprob, log(0.25)));
	assert_true(near((double)top[2].logprob, log(0.125)));
}

static void extremes(void **state)
{
	const float large[] = {3e38f, 3e38f, -3e38f, -INFINITY}, none[] = {-INFINITY, -INFINITY};
	struct fs_lp_entry top[4];
	double norm = fs_lp_norm(large, 4);

	fs_lp_best(large, 4, norm, 4, top);
	assert_int_equal(top[0].id, 0); /* ties go to the lower id */
	assert_int_equal(top[1].id, 1);
	assert_true(top[2].logprob == FS_LOGPROB_MIN && top[3].logprob == FS_LOGPROB_MIN);
	assert_true(isinf(fs_lp_norm(none, 2)));
	fs_lp_best(none, 2, fs_lp_norm(none, 2), 2, top);
	assert_true(top[0].logprob == FS_LOGPROB_MIN);
}

/* The best of a vocabulary against a search for each. */
static void best_of_many(void **state)
{
	enum { N = 5000 };
	static float logits[N];
	struct fs_lp_entry top[FS_MAX_TOP_LOGPROBS];
	uint32_t x = 12345;
	double sum = 0, norm;

	for (int i = 0; i < N; i++) {
		x = x * 1664525 + 1013904223;
		logits[i] = (float)(x >> 20) / 256; /* with many ties */
		sum += exp((double)logits[i]);
	}
	norm = fs_lp_norm(logits, N);
	assert_true(near(norm, log(sum)));
	for (int32_t n = 0; n <= FS_MAX_TOP_LOGPROBS; n++) {
		bool taken[N] = {false};

		fs_lp_best(logits, N, norm, n, top);
		for (int32_t k = 0; k < n; k++) {
			int32_t best = -1;

			for (int32_t i = 0; i < N; i++)
				if (!taken[i] && (best < 0 || logits[i] > logits[best]))
					best = i;
			taken[best] = true;
			assert_int_equal(top[k].id, best);
			assert_true(near((double)top[k].logprob, (double)logits[best] - log(sum)));
		}
	}
}

/* ---- order ---- */

struct log {
	int32_t ids[16];
	size_t n;
};

static void take_token(void *arg, const struct fs_token_event *t)
{
	struct log *l = arg;

	assert_true(l->n < FS_ARRAY_LEN(l->ids));
	assert_int_equal(t->n_top, 2);
	l->ids[l->n++] = t->chosen.id;
}

static const float flat[4];
static const struct fs_gen_params asks = {.logprobs = true, .n_top_logprobs = 2};

/* A token of n bytes. */
static void put(struct fs_lp *lp, int32_t id, size_t n)
{
	fs_lp_measure(lp, flat);
	assert_int_equal(fs_lp_add(lp, id, false), FS_OK);
	fs_lp_text_in(lp, n);
}

static void order(void **state)
{
	static const int32_t want[] = {0, 1, 2, 3, 0, 1};
	struct log l = {.n = 0};
	const struct fs_gen_events ev = {.arg = &l, .token = take_token};
	struct fs_lp lp;

	fs_lp_init(&lp, NULL, 4, &asks, &ev);
	lp.tok = (const struct fs_tok *)&l; /* never looked into while nothing goes out */
	put(&lp, 0, 0);                     /* half a character */
	put(&lp, 1, 3);                     /* its rest */
	put(&lp, 2, 5);                     /* held: the first byte may begin a stop string … */
	assert_int_equal(l.n, 0);
	lp.tok = NULL; /* names are not wanted here */
	fs_lp_text_out(&lp, 3);
	assert_int_equal(l.n, 2);
	fs_lp_text_out(&lp, 1); /* … and it was none, but the second may */
	assert_int_equal(l.n, 3);
	fs_lp_text_out(&lp, 4);
	assert_int_equal(l.n, 3);
	put(&lp, 3, 1); /* ids only: at once */
	assert_int_equal(l.n, 4);
	lp.tok = (const struct fs_tok *)&l;
	put(&lp, 0, 2); /* a stop string takes these back */
	put(&lp, 1, 2);
	lp.tok = NULL;
	assert_int_equal(l.n, 4);
	fs_lp_flush(&lp); /* or the end lets them go */
	assert_int_equal(l.n, 6);
	assert_memory_equal(l.ids, want, sizeof(want));
	fs_lp_finish(&lp);
}

/* Nobody asked, or nobody listens. */
static void off(void **state)
{
	const struct fs_gen_params none = {.n_top_logprobs = 5};
	const struct fs_gen_events deaf = {.arg = NULL}, ev = {.token = take_token};
	struct fs_lp lp;

	fs_lp_init(&lp, NULL, 4, &none, &ev);
	assert_false(fs_lp_on(&lp));
	put(&lp, 0, 1);
	fs_lp_text_out(&lp, 1);
	fs_lp_flush(&lp);
	assert_null(lp.queue);
	fs_lp_finish(&lp);
	fs_lp_init(&lp, NULL, 4, &asks, &deaf);
	assert_false(fs_lp_on(&lp));
	fs_lp_finish(&lp);
}

int main(void)
{
	const struct CMUnitTest tests[] = {cmocka_unit_test(by_hand), cmocka_unit_test(extremes),
	        cmocka_unit_test(best_of_many), cmocka_unit_test(order), cmocka_unit_test(off)};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
