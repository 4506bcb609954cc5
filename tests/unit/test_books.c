/* server/service/books: what is known of a request while it runs and after its end, however many there are.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "server/service/books.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct fs_books *books;
static struct fs_books_totals totals;
static struct fs_record_row rows[FS_HISTORY_ROWS + 100];

static int setup(void **state)
{
	return fs_books_create(&books, NULL);
}

static int teardown(void **state)
{
	fs_books_destroy(books);
	return 0;
}

static struct fs_record *open_record(const char *id)
{
	struct fs_record *r = fs_record_open(books, "chat.completions", id, fs_now());
	assert_non_null(r);
	return r;
}

static void close_with(struct fs_record *r, enum fs_end end)
{
	fs_record_close(r, &(struct fs_record_end){.end = end, .status = 200});
}

static int64_t sum_of_phases(const struct fs_record_row *row)
{
	int64_t sum = 0;
	for (size_t i = 0; i < FS_N_PHASES; i++)
		sum += row->spent[i];
	return sum;
}

static void names_are_stable(void **state)
{
	assert_string_equal(fs_phase_name(FS_PHASE_ACCEPT), "accept");
	assert_string_equal(fs_phase_name(FS_PHASE_DECODE), "decode");
	assert_string_equal(fs_phase_name(FS_N_PHASES), "?");
	assert_string_equal(fs_end_name(FS_END_REFUSED), "refused");
	assert_string_equal(fs_end_name(FS_N_ENDS), "?");
}

static void a_live_record_shows_where_it_is(void **state)
{
	struct fs_record *first = open_record("first"), *second = open_record("second");
	fs_record_stream(first, true);
	fs_record_phase(first, FS_PHASE_PARSE);
	fs_record_phase(first, FS_PHASE_ENCODE);
	fs_record_pictures(first, 3, 1);
	assert_int_equal(fs_books_live(books, rows, FS_ARRAY_LEN(rows)), 2);
	assert_string_equal(rows[0].id, "first");
	assert_string_equal(rows[1].id, "second");
	assert_true(rows[0].stream && !rows[1].stream);
	assert_int_equal(rows[0].phase, FS_PHASE_ENCODE);
	assert_int_equal(rows[0].end, FS_END_NONE);
	assert_int_equal(rows[0].pictures, 3);
	assert_int_equal(rows[0].pictures_cached, 1);
	assert_true(rows[0].phase_age >= 0 && rows[0].phase_age <= rows[0].lasted);
	assert_int_equal(sum_of_phases(&rows[0]), rows[0].lasted);
	assert_int_equal(fs_books_live(books, rows, 1), 1);
	assert_int_equal(fs_books_history(books, rows, FS_ARRAY_LEN(rows)), 0);
	fs_books_totals(books, &totals);
	assert_int_equal(totals.live[FS_PHASE_ENCODE], 1);
	assert_int_equal(totals.live[FS_PHASE_ACCEPT], 1);
	assert_int_equal(totals.requests, 2);
	close_with(first, FS_END_STOP);
	close_with(second, FS_END_STOP);
	assert_int_equal(fs_books_live(books, rows, FS_ARRAY_LEN(rows)), 0);
}

static void an_ended_record_keeps_everything(void **state)
{
	struct fs_record *r = open_record("one");
	fs_record_phase(r, FS_PHASE_QUEUE);
	fs_record_phase(r, FS_PHASE_PREFILL);
	fs_record_prompt(r, 40, 7);
	fs_record_turn(r, true);
	fs_record_reused(r, 8);
	fs_record_progress(r, 24, 40);
	assert_int_equal(fs_books_live(books, rows, 1), 1);
	assert_int_equal(rows[0].prompt_done, 24);
	assert_true(rows[0].holds_turn);
	fs_record_token(r);
	fs_record_token(r);
	assert_int_equal(fs_books_live(books, rows, 1), 1);
	assert_int_equal(rows[0].phase, FS_PHASE_DECODE);
	assert_int_equal(rows[0].prompt_done, 40);
	fs_record_counts(r, 41, 9, 3);
	struct fs_record_end end = {FS_END_CANCEL, FS_CANCEL_CLIENT, 499, "client_closed", "it left"};
	fs_record_close(r, &end);
	assert_int_equal(fs_books_history(books, rows, FS_ARRAY_LEN(rows)), 1);
	const struct fs_record_row *row = &rows[0];
	assert_string_equal(row->id, "one");
	assert_string_equal(row->api, "chat.completions");
	assert_int_equal(row->end, FS_END_CANCEL);
	assert_int_equal(row->cause, FS_CANCEL_CLIENT);
	assert_int_equal(row->status, 499);
	assert_string_equal(row->code, "client_closed");
	assert_string_equal(row->error, "it left");
	assert_int_equal(row->phase, FS_PHASE_DECODE);
	assert_false(row->holds_turn);
	assert_int_equal(row->prompt_tokens, 41);
	assert_int_equal(row->reused_tokens, 9);
	assert_int_equal(row->completion_tokens, 3);
	assert_int_equal(row->max_tokens, 7);
	assert_int_equal(sum_of_phases(row), row->lasted);
	fs_books_totals(books, &totals);
	assert_int_equal(totals.ends[FS_END_CANCEL], 1);
	assert_int_equal(totals.prompt_tokens, 41);
	assert_int_equal(totals.reused_tokens, 9);
	assert_int_equal(totals.completion_tokens, 3);
	assert_int_equal(totals.first_token.count, 1);
}

static void texts_that_are_too_long_are_cut(void **state)
{
	char text[400];
	memset(text, 'x', sizeof(text) - 1);
	text[sizeof(text) - 1] = '\0';
	struct fs_record *r = open_record(text);
	fs_record_close(r, &(struct fs_record_end){.end = FS_END_ERROR, .code = text, .error = text});
	assert_int_equal(fs_books_history(books, rows, 1), 1);
	assert_int_equal(strlen(rows[0].id), sizeof(rows[0].id) - 1);
	assert_int_equal(strlen(rows[0].code), sizeof(rows[0].code) - 1);
	assert_int_equal(strlen(rows[0].error), sizeof(rows[0].error) - 1);
}

static void check_newest(size_t n, size_t newest)
{
	char want[16];
	for (size_t i = 0; i < n; i++) {
		snprintf(want, sizeof(want), "%zu", newest - i);
		assert_string_equal(rows[i].id, want);
	}
}

static void the_history_is_a_ring(void **state)
{
	char id[16];
	for (size_t i = 0; i < FS_HISTORY_ROWS + 37; i++) {
		snprintf(id, sizeof(id), "%zu", i);
		close_with(open_record(id), FS_END_STOP);
		if (i + 1 == FS_HISTORY_ROWS) {
			assert_int_equal(fs_books_history(books, rows, FS_ARRAY_LEN(rows)), FS_HISTORY_ROWS);
			check_newest(FS_HISTORY_ROWS, i);
		}
	}
	assert_int_equal(fs_books_history(books, rows, FS_ARRAY_LEN(rows)), FS_HISTORY_ROWS);
	check_newest(FS_HISTORY_ROWS, FS_HISTORY_ROWS + 36);
	assert_int_equal(fs_books_history(books, rows, 50), 50); /* across the end of the array */
	check_newest(50, FS_HISTORY_ROWS + 36);
	fs_books_totals(books, &totals);
	assert_int_equal(totals.requests, FS_HISTORY_ROWS + 37);
	assert_int_equal(totals.ends[FS_END_STOP], FS_HISTORY_ROWS + 37);
}

/* A request that arrived so many seconds ago and was only accepted. Bounds double: no delay of a test moves
 * it to another bucket. */
static void end_after(int64_t seconds)
{
	struct fs_record *r = fs_record_open(books, "messages", "x", fs_now() - seconds * FS_SEC);
	assert_non_null(r);
	close_with(r, FS_END_REFUSED);
}

static void durations_fall_into_buckets(void **state)
{
	assert_true(fs_bucket_bound(0) == 0.001);
	for (size_t i = 1; i < FS_N_BUCKETS; i++)
		assert_true(fs_bucket_bound(i) == 2 * fs_bucket_bound(i - 1));
	end_after(600);
	end_after(700);
	end_after(300);
	end_after(3000); /* longer than the last bound */
	fs_books_totals(books, &totals);
	size_t at = 0;
	while (fs_bucket_bound(at) < 600)
		at++;
	assert_int_equal(totals.whole.count, 4);
	assert_int_equal(totals.whole.buckets[at], 2);
	assert_int_equal(totals.whole.buckets[at - 1], 1);
	assert_int_equal(totals.whole.buckets[FS_N_BUCKETS], 1);
	assert_true(totals.whole.sum >= 4600 && totals.whole.sum < 4700);
	assert_int_equal(totals.phase[FS_PHASE_ACCEPT].buckets[at], 2);
	for (size_t i = FS_PHASE_ACCEPT + 1; i < FS_N_PHASES; i++)
		assert_int_equal(totals.phase[i].count, 0);
	assert_int_equal(totals.first_token.count, 0);
}

static void a_phase_that_comes_twice_counts_once(void **state)
{
	struct fs_record *r = open_record("x");
	fs_record_phase(r, FS_PHASE_ENCODE);
	fs_record_phase(r, FS_PHASE_FETCH);
	fs_record_phase(r, FS_PHASE_ENCODE);
	close_with(r, FS_END_STOP);
	fs_books_totals(books, &totals);
	assert_int_equal(totals.phase[FS_PHASE_ENCODE].count, 1);
	assert_int_equal(totals.phase[FS_PHASE_FETCH].count, 1);
	double sum = 0;
	for (size_t i = 0; i < FS_N_PHASES; i++)
		sum += totals.phase[i].sum;
	assert_true(sum > totals.whole.sum - 1e-6 && sum < totals.whole.sum + 1e-6);
}

/* Between two looks at the clock outside, no rate can be lower than what was counted. */
static void rates_follow_the_tokens(void **state)
{
	struct fs_record *r = open_record("x");
	int64_t start = fs_now();
	fs_record_token(r);
	assert_int_equal(fs_books_live(books, rows, 1), 1);
	assert_true(rows[0].tokens_per_s == 0 && rows[0].tokens_per_s_mean == 0); /* one token is no rate */
	for (int i = 0; i < 1000; i++)
		fs_record_token(r);
	assert_int_equal(fs_books_live(books, rows, 1), 1);
	double least = 1000 / ((double)(fs_now() - start) / 1e9);
	assert_int_equal(rows[0].completion_tokens, 1001);
	assert_true(rows[0].tokens_per_s_mean >= least);
	assert_true(rows[0].tokens_per_s > 0 && rows[0].tokens_per_s <= rows[0].tokens_per_s_mean);
	close_with(r, FS_END_STOP);
}

static void no_record_is_no_harm(void **state)
{
	fs_record_stream(NULL, true);
	fs_record_phase(NULL, FS_PHASE_PARSE);
	fs_record_pictures(NULL, 1, 1);
	fs_record_prompt(NULL, 1, 1);
	fs_record_turn(NULL, true);
	fs_record_progress(NULL, 1, 1);
	fs_record_reused(NULL, 1);
	fs_record_token(NULL);
	fs_record_counts(NULL, 1, 1, 1);
	close_with(NULL, FS_END_STOP);
	fs_books_totals(books, &totals);
	assert_int_equal(totals.requests, 0);
	fs_books_destroy(NULL);
}

#define THREADS 4
#define EACH 300

static void *many_requests(void *arg)
{
	atomic_bool *failed = arg;
	for (int i = 0; i < EACH; i++) {
		struct fs_record *r = fs_record_open(books, "messages", "x", fs_now());
		if (!r)
			atomic_store(failed, true);
		for (enum fs_phase p = FS_PHASE_PARSE; p <= FS_PHASE_PREFILL; p++)
			fs_record_phase(r, p);
		fs_record_pictures(r, 1, 0);
		fs_record_progress(r, 1, 2);
		fs_record_token(r);
		fs_record_counts(r, 2, 1, 1);
		close_with(r, i % 2 ? FS_END_STOP : FS_END_LENGTH);
	}
	return NULL;
}

/* What a reader sees is whole at any time. */
static void *reader(void *arg)
{
	atomic_bool *done = arg;
	static struct fs_record_row seen[FS_HISTORY_ROWS];
	struct fs_books_totals t;
	bool good = true;
	while (!atomic_load(done)) {
		size_t n = fs_books_live(books, seen, FS_ARRAY_LEN(seen));
		good &= n <= THREADS;
		for (size_t i = 0; i < n; i++)
			good &= seen[i].end == FS_END_NONE && sum_of_phases(&seen[i]) == seen[i].lasted;
		n = fs_books_history(books, seen, FS_ARRAY_LEN(seen));
		for (size_t i = 0; i < n; i++)
			good &= seen[i].completion_tokens == 1 && seen[i].phase == FS_PHASE_DECODE;
		fs_books_totals(books, &t);
		good &= t.whole.count == t.ends[FS_END_STOP] + t.ends[FS_END_LENGTH];
	}
	return good ? arg : NULL;
}

static void many_threads_lose_nothing(void **state)
{
	pthread_t writers[THREADS], watch;
	atomic_bool failed = false, done = false;
	void *good;
	assert_int_equal(fs_thread_start(&watch, "reader", reader, &done, NULL), FS_OK);
	for (size_t i = 0; i < THREADS; i++)
		assert_int_equal(fs_thread_start(&writers[i], "writer", many_requests, &failed, NULL), FS_OK);
	for (size_t i = 0; i < THREADS; i++)
		pthread_join(writers[i], NULL);
	atomic_store(&done, true);
	pthread_join(watch, &good);
	assert_non_null(good);
	assert_false(atomic_load(&failed));
	fs_books_totals(books, &totals);
	assert_int_equal(totals.requests, THREADS * EACH);
	assert_int_equal(totals.ends[FS_END_STOP], THREADS * EACH / 2);
	assert_int_equal(totals.pictures, THREADS * EACH);
	assert_int_equal(totals.first_token.count, THREADS * EACH);
	for (size_t i = 0; i < FS_N_PHASES; i++) {
		assert_int_equal(totals.live[i], 0);
		assert_int_equal(totals.phase[i].count, THREADS * EACH);
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
	        cmocka_unit_test(names_are_stable),
	        cmocka_unit_test_setup_teardown(a_live_record_shows_where_it_is, setup, teardown),
	        cmocka_unit_test_setup_teardown(an_ended_record_keeps_everything, setup, teardown),
	        cmocka_unit_test_setup_teardown(texts_that_are_too_long_are_cut, setup, teardown),
	        cmocka_unit_test_setup_teardown(the_history_is_a_ring, setup, teardown),
	        cmocka_unit_test_setup_teardown(durations_fall_into_buckets, setup, teardown),
	        cmocka_unit_test_setup_teardown(a_phase_that_comes_twice_counts_once, setup, teardown),
	        cmocka_unit_test_setup_teardown(rates_follow_the_tokens, setup, teardown),
	        cmocka_unit_test_setup_teardown(no_record_is_no_harm, setup, teardown),
	        cmocka_unit_test_setup_teardown(many_threads_lose_nothing, setup, teardown),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}
