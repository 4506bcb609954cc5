/* Sampler: distributions worked out by hand, the generator against the published reference vectors of its
 * authors, determinism. */
#include "server/engine/sampler.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <string.h>

#include <cmocka.h>

#define N 4
static const float probs[N] = {0.125f, 0.5f, 0.125f, 0.25f};

static struct fs_gen_params plain(void)
{
	return (struct fs_gen_params){.temperature = 1, .top_p = 1, .repeat_penalty = 1, .has_seed = true};
}

static void logits_of(float out[N])
{
	for (int i = 0; i < N; i++)
		out[i] = logf(probs[i]) + 3; /* a constant changes nothing */
}

/* Ids in order with their probabilities; id -1 ends the list. */
struct want {
	int32_t id;
	double p;
};

static void check(const struct fs_gen_params *p, const struct want *want)
{
	struct fs_sampler s;
	struct fs_cand *c;
	float logits[N];
	int32_t n, k = 0;
	double sum = 0;

	assert_int_equal(fs_sampler_init(&s, N, 16, NULL), FS_OK);
	fs_sampler_begin(&s, p, NULL, 0);
	logits_of(logits);
	n = fs_sampler_filter(&s, logits, &c);
	for (; want[k].id >= 0; k++) {
		bool found = false;
		for (int32_t i = 0; i < n; i++)
			if (c[i].id == want[k].id) {
				assert_float_equal(c[i].p, want[k].p, 1e-5);
				found = true;
			}
		if (!found)
			fail_msg("token %d was filtered out", want[k].id);
		sum += want[k].p;
	}
	assert_int_equal(n, k);
	assert_float_equal(sum, 1, 1e-9); /* of the test itself */
	fs_sampler_finish(&s);
}

static void filters(void **state)
{
	struct fs_gen_params p = plain();

	check(&p, (struct want[]){{0, .125}, {1, .5}, {2, .125}, {3, .25}, {-1, 0}});
	p.temperature = 0.5f; /* squares: 1/64, 16/64, 1/64, 4/64 */
	check(&p, (struct want[]){{0, 1 / 22.0}, {1, 16 / 22.0}, {2, 1 / 22.0}, {3, 4 / 22.0}, {-1, 0}});
	p = plain();
	p.top_k = 3; /* of the equal ones the lower id stays */
	check(&p, (struct want[]){{1, 4 / 7.0}, {3, 2 / 7.0}, {0, 1 / 7.0}, {-1, 0}});
	p = plain();
	p.top_p = 0.7f; /* 0.5 is not enough, 0.75 is */
	check(&p, (struct want[]){{1, 2 / 3.0}, {3, 1 / 3.0}, {-1, 0}});
	p.top_p = 0.49f;
	check(&p, (struct want[]){{1, 1}, {-1, 0}});
	p.top_p = 0;
	check(&p, (struct want[]){{1, 1}, {-1, 0}});
	p = plain();
	p.min_p = 0.3f; /* of 0.5: 0.15 */
	check(&p, (struct want[]){{1, 2 / 3.0}, {3, 1 / 3.0}, {-1, 0}});
	p.min_p = 1;
	check(&p, (struct want[]){{1, 1}, {-1, 0}});
}

/* Each filter sees what the one before left, and temperature comes before all of them. */
static void order(void **state)
{
	struct fs_gen_params p = plain();

	p.top_k = 2; /* 2/3, 1/3: of these 0.6 needs one; of the whole it would need two */
	p.top_p = 0.6f;
	check(&p, (struct want[]){{1, 1}, {-1, 0}});
	p = plain();
	p.temperature = 0.5f; /* 16/22 > 0.7: one token, where at temperature 1 it takes two */
	p.top_p = 0.7f;
	check(&p, (struct want[]){{1, 1}, {-1, 0}});
	p = plain();
	p.temperature = 0.5f; /* 4/16 < 0.3 */
	p.min_p = 0.3f;
	check(&p, (struct want[]){{1, 1}, {-1, 0}});
	p = plain();
	p.top_k = 3;
	p.top_p = 0.9f; /* 6/7 < 0.9: all three */
	p.min_p = 0.4f; /* then the third, 0.25 of the best, goes */
	check(&p, (struct want[]){{1, 2 / 3.0}, {3, 1 / 3.0}, {-1, 0}});
}

static void penalties(void **state)
{
	struct fs_sampler s;
	struct fs_gen_params p = plain();
	const int32_t prompt[] = {0, -1, 1, 1, 2};
	float l[N] = {2, 4, -3, 1};

	assert_int_equal(fs_sampler_init(&s, N, 16, NULL), FS_OK);
	p.repeat_penalty = 2;
	p.repeat_last_n = 3; /* 1, 1, 2: rows do not count, 0 is too far back */
	fs_sampler_begin(&s, &p, prompt, 5);
	fs_sampler_penalise(&s, l);
	assert_float_equal(l[0], 2, 0);
	assert_float_equal(l[1], 2, 0); /* once, however often it stands there */
	assert_float_equal(l[2], -6, 0);
	assert_float_equal(l[3], 1, 0);

	p = plain();
	p.presence_penalty = 0.5f;
	p.frequency_penalty = 0.25f;
	fs_sampler_begin(&s, &p, prompt, 5);
	fs_sampler_accept(&s, 3);
	fs_sampler_accept(&s, 3);
	fs_sampler_accept(&s, 2);
	memcpy(l, (float[N]){2, 4, -3, 1}, sizeof(l));
	fs_sampler_penalise(&s, l);
	assert_float_equal(l[0], 2, 0); /* of the prompt: not generated */
	assert_float_equal(l[1], 4, 0);
	assert_float_equal(l[2], -3.75, 0);
	assert_float_equal(l[3], 0, 0); /* 1 - 0.5 - 2 · 0.25 */

	fs_sampler_begin(&s, &p, NULL, 0); /* a new generation knows nothing of the last */
	memcpy(l, (float[N]){2, 4, -3, 1}, sizeof(l));
	fs_sampler_penalise(&s, l);
	assert_float_equal(l[3], 1, 0);
	fs_sampler_finish(&s);
}

static void greedy(void **state)
{
	struct fs_sampler s;
	struct fs_gen_params p = plain();
	float l[N] = {1, 7, 7, -HUGE_VALF}, bad[N] = {1, NAN, 2, 3},
	      none[N] = {-HUGE_VALF, -HUGE_VALF, -HUGE_VALF, -HUGE_VALF};
	int32_t id = -1;

	assert_int_equal(fs_sampler_init(&s, N, 16, NULL), FS_OK);
	p.temperature = 0;
	fs_sampler_begin(&s, &p, NULL, 0);
	assert_int_equal(fs_sampler_pick(&s, l, &id, NULL), FS_OK);
	assert_int_equal(id, 1);
	assert_int_equal(fs_sampler_pick(&s, bad, &id, NULL), FS_EINTERNAL);
	assert_int_equal(fs_sampler_pick(&s, none, &id, NULL), FS_EINTERNAL);
	p.temperature = 1;
	fs_sampler_begin(&s, &p, NULL, 0);
	assert_int_equal(fs_sampler_pick(&s, bad, &id, NULL), FS_EINTERNAL);
	assert_int_equal(fs_sampler_pick(&s, none, &id, NULL), FS_EINTERNAL);
	fs_sampler_finish(&s);
}

/* Vectors: the authors' xoshiro256plusplus.c from state {1, 2, 3, 4}, and the same seeded by splitmix64 from
 * 0. */
static void generator(void **state)
{
	static const uint64_t from_1234[] = {41943041u, 58720359u, 3588806011781223u, 3591011842654386u,
	        9228616714210784205u, 9973669472204895162u, 14011001112246962877u, 12406186145184390807u};
	static const uint64_t from_seed_0[] = {5987356902031041503u, 7051070477665621255u,
	        6633766593972829180u, 211316841551650330u, 9136120204379184874u, 379361710973160858u};
	struct fs_gen_params p = plain();
	struct fs_sampler s;

	assert_int_equal(fs_sampler_init(&s, N, 16, NULL), FS_OK);
	for (uint64_t i = 0; i < 4; i++)
		s.rng[i] = i + 1;
	for (size_t i = 0; i < FS_ARRAY_LEN(from_1234); i++)
		assert_true(fs_sampler_next(&s) == from_1234[i]);
	p.seed = 0;
	fs_sampler_begin(&s, &p, NULL, 0);
	for (size_t i = 0; i < FS_ARRAY_LEN(from_seed_0); i++)
		assert_true(fs_sampler_next(&s) == from_seed_0[i]);
	fs_sampler_finish(&s);
}

/* Frequencies of many draws follow the distribution, and a seed gives the same draws again. */
static void draws(void **state)
{
	enum { DRAWS = 20000 };
	static int32_t first[DRAWS];
	struct fs_sampler s;
	struct fs_gen_params p = plain();
	int count[N] = {0};

	assert_int_equal(fs_sampler_init(&s, N, 16, NULL), FS_OK);
	p.seed = 42;
	for (int round = 0; round < 2; round++) {
		fs_sampler_begin(&s, &p, NULL, 0);
		for (int i = 0; i < DRAWS; i++) {
			float l[N];
			int32_t id;
			logits_of(l);
			assert_int_equal(fs_sampler_pick(&s, l, &id, NULL), FS_OK);
			if (round == 0) {
				first[i] = id;
				count[id]++;
			} else {
				assert_int_equal(id, first[i]);
			}
		}
	}
	for (int i = 0; i < N; i++) /* 5 standard deviations */
		assert_float_equal(count[i], (double)probs[i] * DRAWS, (float)(5 * sqrt(DRAWS * 0.25)));
	fs_sampler_finish(&s);
}

static void checks(void **state)
{
	struct fs_gen_params p;
	struct fs_errbuf e;

	fs_gen_params_default(&p);
	assert_int_equal(fs_gen_params_check(&p, &e), FS_OK);
	p.top_p = NAN;
	assert_int_equal(fs_gen_params_check(&p, &e), FS_EINVAL);
	assert_non_null(strstr(e.text, "top_p"));
	fs_gen_params_default(&p);
	p.temperature = -0.1f;
	assert_int_equal(fs_gen_params_check(&p, &e), FS_EINVAL);
	assert_non_null(strstr(e.text, "temperature"));
	fs_gen_params_default(&p);
	p.repeat_penalty = 0;
	assert_int_equal(fs_gen_params_check(&p, &e), FS_EINVAL);
	fs_gen_params_default(&p);
	p.top_k = -1;
	assert_int_equal(fs_gen_params_check(&p, &e), FS_EINVAL);
}

int main(void)
{
	const struct CMUnitTest tests[] = {cmocka_unit_test(filters), cmocka_unit_test(order),
	        cmocka_unit_test(penalties), cmocka_unit_test(greedy), cmocka_unit_test(generator),
	        cmocka_unit_test(draws), cmocka_unit_test(checks)};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
