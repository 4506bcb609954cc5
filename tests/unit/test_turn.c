/* server/service: the turn is FIFO, cancellable and bounded; workers run everything once. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "server/service/turn.h"
#include "server/service/workers.h"

#include <poll.h>
#include <stdatomic.h>
#include <stdlib.h>

#define N 16

struct waiter {
	struct fs_turn *turn;
	struct fs_cancel *cancel;
	pthread_t thread;
	int rc;
	int place; /* order of entry */
	atomic_int *next_place;
};

static void wait_until_waiting(struct fs_turn *t, size_t n)
{
	for (;;) {
		pthread_mutex_lock(&t->lock);
		size_t waiting = t->waiting;
		pthread_mutex_unlock(&t->lock);
		if (waiting == n)
			return;
		poll(NULL, 0, 1);
	}
}

static void *enter(void *arg)
{
	struct waiter *w = arg;
	w->rc = fs_turn_enter(w->turn, w->cancel);
	if (!w->rc) {
		w->place = atomic_fetch_add(w->next_place, 1);
		fs_turn_leave(w->turn);
	}
	return NULL;
}

static void the_turn_is_first_in_first_out(void **state)
{
	struct fs_turn t;
	struct waiter w[N];
	atomic_int next = 0;
	assert_int_equal(fs_turn_init(&t, N), FS_OK);
	assert_int_equal(fs_turn_enter(&t, NULL), FS_OK);
	for (size_t i = 0; i < N; i++) {
		w[i] = (struct waiter){.turn = &t, .cancel = fs_cancel_create(FS_NEVER), .next_place = &next};
		assert_int_equal(fs_thread_start(&w[i].thread, "waiter", enter, &w[i], NULL), FS_OK);
		wait_until_waiting(&t, i + 1);
	}
	/* every third leaves the queue before its turn */
	for (size_t i = 0; i < N; i += 3)
		fs_cancel_fire(w[i].cancel, FS_CANCEL_CLIENT);
	for (size_t i = 0; i < N; i += 3)
		pthread_join(w[i].thread, NULL);
	assert_int_equal(next, 0);
	fs_turn_leave(&t);
	int place = 0;
	for (size_t i = 0; i < N; i++) {
		if (i % 3) {
			pthread_join(w[i].thread, NULL);
			assert_int_equal(w[i].rc, FS_OK);
			assert_int_equal(w[i].place, place++);
		} else {
			assert_int_equal(w[i].rc, FS_ECANCELLED);
		}
		fs_cancel_unref(w[i].cancel);
	}
	assert_int_equal(t.entries, 1 + (uint64_t)place);
	fs_turn_finish(&t);
}

static void the_turn_has_a_depth(void **state)
{
	struct fs_turn t;
	atomic_int next = 0;
	assert_int_equal(fs_turn_init(&t, 1), FS_OK);
	assert_int_equal(fs_turn_enter(&t, NULL), FS_OK);
	struct waiter w = {.turn = &t, .next_place = &next};
	assert_int_equal(fs_thread_start(&w.thread, "waiter", enter, &w, NULL), FS_OK);
	wait_until_waiting(&t, 1);
	assert_int_equal(fs_turn_enter(&t, NULL), FS_EUNAVAILABLE);
	fs_turn_leave(&t);
	pthread_join(w.thread, NULL);
	assert_int_equal(w.rc, FS_OK);
	fs_turn_finish(&t);
}

static void a_deadline_leaves_the_queue(void **state)
{
	struct fs_turn t;
	assert_int_equal(fs_turn_init(&t, 4), FS_OK);
	assert_int_equal(fs_turn_enter(&t, NULL), FS_OK);
	struct fs_cancel *c = fs_cancel_create(fs_deadline_ms(20));
	assert_int_equal(fs_turn_enter(&t, c), FS_ECANCELLED);
	assert_int_equal(fs_cancel_cause(c), FS_CANCEL_DEADLINE);
	assert_int_equal(t.waiting, 0);
	fs_cancel_unref(c);
	fs_turn_leave(&t);
	fs_turn_finish(&t);
}

static void add(void *arg)
{
	atomic_fetch_add((atomic_int *)arg, 1);
}

static void workers_run_each_call_once(void **state)
{
	struct fs_workers *w;
	atomic_int count = 0;
	int accepted = 0;
	assert_int_equal(fs_workers_create(3, &w, NULL), FS_OK);
	for (int i = 0; i < 1000; i++)
		accepted += fs_workers_submit(w, add, &count) == FS_OK;
	fs_workers_destroy(w);
	assert_int_equal(count, accepted);
	assert_true(accepted >= 3);
}

struct gate {
	atomic_int inside;
	atomic_bool open;
};

static void hold(void *arg)
{
	struct gate *g = arg;
	atomic_fetch_add(&g->inside, 1);
	while (!atomic_load(&g->open))
		poll(NULL, 0, 1);
}

static void workers_refuse_when_all_are_busy(void **state)
{
	struct fs_workers *w;
	struct gate g = {0};
	assert_int_equal(fs_workers_create(2, &w, NULL), FS_OK);
	for (int i = 1; i <= 2; i++) {
		assert_int_equal(fs_workers_submit(w, hold, &g), FS_OK);
		while (atomic_load(&g.inside) != i)
			poll(NULL, 0, 1);
	}
	assert_int_equal(fs_workers_submit(w, hold, &g), FS_EUNAVAILABLE);
	atomic_store(&g.open, true);
	while (fs_workers_submit(w, hold, &g) == FS_EUNAVAILABLE) /* one that became free works again */
		poll(NULL, 0, 1);
	fs_workers_destroy(w);
	assert_int_equal(g.inside, 3);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
	        cmocka_unit_test(the_turn_is_first_in_first_out),
	        cmocka_unit_test(the_turn_has_a_depth),
	        cmocka_unit_test(a_deadline_leaves_the_queue),
	        cmocka_unit_test(workers_run_each_call_once),
	        cmocka_unit_test(workers_refuse_when_all_are_busy),
	};
	return cmocka_run_group_tests_name("turn", tests, NULL, NULL);
}
