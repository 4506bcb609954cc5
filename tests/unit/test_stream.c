/* server/stream: random interleavings against a plain reference, and the same with threads for the
 * sanitizers.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "server/stream/stream.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const uint8_t anna[FS_SESSION_OWNER] = {1}, bert[FS_SESSION_OWNER] = {2};

static uint64_t seed;
static uint32_t rnd(uint32_t n)
{
	seed = seed * 6364136223846793005ULL + 1442695040888963407ULL;
	return (uint32_t)(seed >> 33) % n;
}

static void count_notify(void *arg)
{
	atomic_fetch_add((atomic_int *)arg, 1);
}

static struct fs_streams *make(size_t ring, size_t total, size_t max)
{
	struct fs_streams_opts o = {.ring_bytes = ring, .total_bytes = total, .max_sessions = max};
	struct fs_streams *t;
	assert_int_equal(fs_streams_create(&o, &t, NULL), FS_OK);
	return t;
}

/* ---- against a reference: everything ever written is kept, and what a ring of RING bytes would hold is
 * worked out from that ---- */

enum { RING = 64, IDS = 3, MODELS = 4096, READERS = 6, MOST = 4096 };

struct model { /* of one session; lives on while somebody holds it */
	struct fs_session *s;
	struct fs_cancel *cancel;
	uint8_t bytes[MOST];
	size_t total;
	bool done, gone; /* finished; taken out of the table */
	int id;
};
struct model_reader {
	struct fs_reader *r;
	struct model *m;
	size_t at;
};

struct world {
	struct fs_streams *t;
	struct model *current[IDS];
	struct model *all[MODELS];
	size_t n_all;
	struct model_reader readers[READERS];
	atomic_int notified;
};

static const char *name_of(int id)
{
	static const char *const names[IDS] = {"a", "a::b", "c/d"};
	return names[id];
}

static size_t dropped(const struct model *m)
{
	return m->total > RING ? m->total - RING : 0;
}

static void take_out(struct world *w, int id)
{
	struct model *m = w->current[id];
	if (!m)
		return;
	assert_int_equal(fs_cancel_cause(m->cancel), m->done ? FS_CANCEL_NONE : FS_CANCEL_DELETED);
	m->gone = true;
	w->current[id] = NULL;
}

static void do_open(struct world *w, int id)
{
	struct model *m = calloc(1, sizeof(*m));
	m->id = id;
	m->cancel = fs_cancel_create(FS_NEVER);
	assert_int_equal(fs_session_open(w->t, name_of(id), anna, m->cancel, false, &m->s, NULL), FS_OK);
	fs_session_kind(m->s, true, 200, "text/event-stream");
	take_out(w, id);
	w->current[id] = w->all[w->n_all++] = m;
}

static void do_append(struct model *m)
{
	uint8_t piece[2 * RING];
	size_t n = 1 + rnd(rnd(8) ? 20 : sizeof(piece));
	if (!m || m->done || m->total + n > MOST)
		return;
	for (size_t i = 0; i < n; i++)
		piece[i] = m->bytes[m->total + i] = (uint8_t)rnd(256);
	m->total += n;
	fs_session_append(m->s, piece, n);
}

static void do_finish(struct model *m)
{
	if (!m || m->done)
		return;
	m->done = true;
	fs_session_finish(m->s);
}

static void do_attach(struct world *w, struct model_reader *mr, int id)
{
	struct model *m = w->current[id];
	size_t from = m ? rnd((uint32_t)m->total + 3) : 0;
	fs_reader_detach(mr->r);
	memset(mr, 0, sizeof(*mr));
	int rc = fs_reader_attach(w->t, name_of(id), anna, from, count_notify, &w->notified, &mr->r, NULL);
	if (!m)
		assert_int_equal(rc, FS_ENOTFOUND);
	else if (from < dropped(m))
		assert_int_equal(rc, FS_ELIMIT);
	else
		assert_int_equal(rc, FS_OK);
	if (rc)
		mr->r = NULL;
	mr->m = m;
	mr->at = from;
}

static void do_read(struct model_reader *mr)
{
	uint8_t got[40];
	struct model *m = mr->m;
	if (!mr->r)
		return;
	assert_int_equal(fs_reader_offset(mr->r), mr->at);
	ssize_t n = fs_reader_read(mr->r, got, 1 + rnd(sizeof(got)));
	if (mr->at < dropped(m)) {
		assert_int_equal(n, FS_ELIMIT);
	} else if (mr->at < m->total) {
		assert_true(n > 0);
		assert_memory_equal(got, m->bytes + mr->at, (size_t)n);
		mr->at += (size_t)n;
	} else {
		assert_int_equal(n, m->done ? FS_ECANCELLED : 0);
	}
}

static void do_lookup(struct world *w)
{
	struct fs_session_row rows[IDS + 1];
	size_t want = (w->current[0] != NULL) + (w->current[1] != NULL);
	assert_int_equal(fs_streams_lookup(w->t, "a", anna, rows, IDS + 1), want);
	for (size_t i = 0; i < want; i++) {
		struct model *m = w->current[strcmp(rows[i].id, "a") ? 1 : 0];
		assert_int_equal(rows[i].total_bytes, m->total);
		assert_int_equal(rows[i].done, m->done);
		assert_int_equal(rows[i].completed_at != 0, m->done);
	}
	assert_int_equal(fs_streams_lookup(w->t, "a", bert, rows, IDS + 1), 0);
	assert_int_equal(fs_streams_lookup(w->t, "", anna, rows, IDS + 1), 0);
}

static void do_delete(struct world *w, int id)
{
	assert_int_equal(fs_streams_delete(w->t, name_of(id), bert), false);
	assert_int_equal(fs_streams_delete(w->t, name_of(id), anna), w->current[id] != NULL);
	take_out(w, id);
}

static void one_step(struct world *w)
{
	int id = (int)rnd(IDS);
	struct model *any =
	        w->n_all ? w->all[w->n_all - 1 - rnd((uint32_t)FS_MIN(w->n_all, (size_t)4))] : NULL;
	struct model_reader *mr = &w->readers[rnd(READERS)];
	uint32_t what = rnd(100);
	if (what < 6 && w->n_all < MODELS)
		do_open(w, id);
	else if (what < 40)
		do_append(any);
	else if (what < 44)
		do_finish(any);
	else if (what < 56)
		do_attach(w, mr, id);
	else if (what < 94)
		do_read(mr);
	else if (what < 96)
		do_delete(w, id);
	else
		do_lookup(w);
}

static void check_stats(struct world *w)
{
	struct fs_streams_stats st;
	size_t live = 0, done = 0, readers = 0;
	for (int i = 0; i < IDS; i++) {
		live += w->current[i] && !w->current[i]->done;
		done += w->current[i] && w->current[i]->done;
	}
	for (int i = 0; i < READERS; i++)
		readers += w->readers[i].r != NULL;
	fs_streams_stats(w->t, &st);
	assert_int_equal(st.live, live);
	assert_int_equal(st.completed, done);
	assert_int_equal(st.readers, readers);
}

static void interleavings_follow_the_reference(void **state)
{
	for (uint64_t s = 1; s <= 40; s++) {
		struct world *w = calloc(1, sizeof(*w));
		seed = s;
		w->t = make(RING, 0, 0);
		for (int i = 0; i < 3000; i++)
			one_step(w);
		check_stats(w);
		for (size_t i = 0; i < w->n_all; i++)
			do_finish(w->all[i]);
		for (int i = 0; i < READERS; i++)
			fs_reader_detach(w->readers[i].r);
		check_stats(
		        &(struct world){.t = w->t, .current = {w->current[0], w->current[1], w->current[2]}});
		fs_streams_destroy(w->t);
		for (size_t i = 0; i < w->n_all; i++) {
			fs_cancel_unref(w->all[i]->cancel);
			free(w->all[i]);
		}
		free(w);
	}
}

/* ---- rules that the reference does not cover ---- */

static struct fs_session *open_one(struct fs_streams *t, const char *id)
{
	struct fs_session *s = NULL;
	assert_int_equal(fs_session_open(t, id, anna, NULL, false, &s, NULL), FS_OK);
	return s;
}

static void memory_of_all_is_bounded(void **state)
{
	enum { TOTAL = 64 << 10 };
	static uint8_t block[16 << 10];
	struct fs_streams *t = make(32 << 10, TOTAL, 0);
	struct fs_streams_stats st;
	struct fs_reader *r;
	for (int i = 0; i < 20; i++) {
		char id[16];
		snprintf(id, sizeof(id), "c%d", i);
		struct fs_session *s = open_one(t, id);
		fs_session_append(s, block, sizeof(block));
		fs_session_finish(s);
		fs_streams_stats(t, &st);
		assert_true(st.bytes <= TOTAL);
	}
	assert_int_equal(st.completed, TOTAL / sizeof(block)); /* the newest; the oldest went */
	atomic_int n = 0;
	assert_int_equal(fs_reader_attach(t, "c15", anna, 0, count_notify, &n, &r, NULL), FS_ENOTFOUND);
	assert_int_equal(fs_reader_attach(t, "c19", anna, 0, count_notify, &n, &r, NULL), FS_OK);
	fs_reader_detach(r);
	struct fs_session *live[4], *more = NULL;
	struct fs_errbuf e;
	for (int i = 0; i < 4; i++) { /* running ones are not taken out: they keep fewer bytes */
		char id[16];
		snprintf(id, sizeof(id), "l%d", i);
		live[i] = open_one(t, id);
	}
	for (int i = 0; i < 8; i++)
		fs_session_append(live[i % 4], block, sizeof(block));
	fs_streams_stats(t, &st);
	assert_true(st.bytes <= TOTAL);
	assert_int_equal(st.live, 4);
	assert_int_equal(st.completed, 0);
	assert_int_equal(st.dropped_bytes, 4 * sizeof(block));
	/* and no further one begins that could keep nothing at all */
	assert_int_equal(fs_session_open(t, "m", anna, NULL, false, &more, &e), FS_ELIMIT);
	fs_session_finish(live[0]);
	assert_int_equal(fs_session_open(t, "m", anna, NULL, false, &more, &e), FS_OK);
	fs_streams_stats(t, &st);
	assert_int_equal(st.refused, 1);
	for (int i = 1; i < 4; i++)
		fs_session_finish(live[i]);
	fs_session_finish(more);
	fs_streams_destroy(t);
}

static void too_many_running_ones_are_refused(void **state)
{
	struct fs_streams *t = make(0, 0, 2);
	struct fs_session *a = open_one(t, "a"), *b = open_one(t, "b"), *c = NULL;
	struct fs_errbuf e;
	assert_int_equal(fs_session_open(t, "c", anna, NULL, false, &c, &e), FS_ELIMIT);
	fs_session_finish(a);
	assert_int_equal(
	        fs_session_open(t, "c", anna, NULL, false, &c, &e), FS_OK); /* a completed one makes place */
	fs_session_finish(b);
	fs_session_finish(c);
	assert_int_equal(fs_session_open(t, "", anna, NULL, false, &c, &e), FS_EINVAL);
	char long_id[FS_SESSION_ID_MAX + 2];
	memset(long_id, 'x', sizeof(long_id) - 1);
	long_id[sizeof(long_id) - 1] = '\0';
	assert_int_equal(fs_session_open(t, long_id, anna, NULL, false, &c, &e), FS_EINVAL);
	fs_streams_destroy(t);
}

static void completed_ones_expire_and_running_ones_never(void **state)
{
	struct fs_streams *t = make(0, 0, 0);
	struct fs_session *a = open_one(t, "a"), *b = open_one(t, "b");
	struct fs_streams_stats st;
	fs_session_finish(a);
	fs_streams_expire(t, fs_now() + 299 * FS_SEC);
	fs_streams_stats(t, &st);
	assert_int_equal(st.completed, 1);
	fs_streams_expire(t, fs_now() + 301 * FS_SEC);
	fs_streams_stats(t, &st);
	assert_int_equal(st.completed, 0);
	assert_int_equal(st.live, 1);
	assert_int_equal(st.expired, 1);
	fs_session_finish(b);
	fs_streams_destroy(t);
}

/* Also of one that is taken out: the producer's last words tell why. */
static void readers_end_with_the_producer(void **state)
{
	struct fs_streams *t = make(0, 0, 0);
	struct fs_reader *r;
	struct fs_reader_kind kind;
	char buf[16];
	atomic_int n = 0;
	for (int said = 0; said < 2; said++) {
		struct fs_session *s = open_one(t, "a");
		fs_session_expect_events(s, "before", "after");
		assert_int_equal(fs_reader_attach(t, "a", anna, 0, count_notify, &n, &r, NULL), FS_OK);
		fs_reader_kind(r, &kind);
		assert_true(kind.events_expected && !kind.known);
		assert_string_equal(kind.error_after, "after");
		assert_true(fs_streams_delete(t, "a", anna));
		assert_int_equal(fs_reader_read(r, buf, sizeof(buf)), 0);
		if (said) {
			fs_session_kind(s, false, 499, "application/json");
			fs_session_append(s, "why", 3);
			assert_int_equal(fs_reader_read(r, buf, sizeof(buf)), 3);
			assert_int_equal(fs_reader_read(r, buf, sizeof(buf)), 0);
		}
		int before = n;
		fs_session_finish(s);
		assert_true(n > before);
		assert_int_equal(fs_reader_read(r, buf, sizeof(buf)), FS_ECANCELLED);
		fs_reader_kind(r, &kind);
		assert_true(kind.known && !kind.events);
		assert_int_equal(kind.status, said ? 499 : 500);
		fs_reader_detach(r);
	}
	fs_streams_destroy(t);
}

/* "id: N" holds the offset behind its event, itself included, also where N gets one more digit. */
static void events_carry_their_offsets(void **state)
{
	struct fs_streams *t = make(0, 0, 0);
	struct fs_session *s = NULL;
	static char all[1 << 16];
	atomic_int n = 0;
	assert_int_equal(fs_session_open(t, "a", anna, NULL, true, &s, NULL), FS_OK);
	for (int i = 0; i < 1200; i++)
		fs_session_event(s, "data: x\n\n", i % 9 + 1);
	struct fs_reader *r;
	assert_int_equal(fs_reader_attach_to(s, 0, count_notify, &n, &r), FS_OK);
	size_t len = 0;
	for (ssize_t got; (got = fs_reader_read(r, all + len, sizeof(all) - len)) > 0;)
		len += (size_t)got;
	char *at = all;
	for (int i = 0; i < 1200; i++) {
		char *end;
		assert_memory_equal(at, "id: ", 4);
		unsigned long long offset = strtoull(at + 4, &end, 10);
		at = end + 1 + (i % 9 + 1);
		assert_int_equal(offset, at - all);
	}
	assert_int_equal(at - all, len);
	fs_reader_detach(r);
	fs_session_finish(s);
	fs_streams_destroy(t);
}

/* ---- with threads ---- */

enum { THREAD_READERS = 4, ROUNDS = 60, PIECES = 400 };

struct shared {
	struct fs_streams *t;
	atomic_bool stop;
	atomic_ullong bytes_read;
};

static uint8_t byte_at(uint64_t offset)
{
	return (uint8_t)(offset * 131 + offset / 251);
}

static void *produce(void *arg)
{
	struct shared *sh = arg;
	for (int round = 0; round < ROUNDS; round++) {
		struct fs_cancel *c = fs_cancel_create(FS_NEVER);
		struct fs_session *s = NULL;
		uint64_t total = 0;
		uint8_t piece[97];
		if (fs_session_open(sh->t, "x", anna, c, false, &s, NULL) == FS_OK) {
			fs_session_kind(s, true, 200, "text/event-stream");
			for (int i = 0; i < PIECES && !fs_cancelled(c); i++) {
				size_t n = 1 + (size_t)(i * 7 + round) % sizeof(piece);
				for (size_t k = 0; k < n; k++)
					piece[k] = byte_at(total + k);
				fs_session_append(s, piece, n);
				total += n;
			}
			fs_session_finish(s);
		}
		fs_cancel_unref(c);
	}
	atomic_store(&sh->stop, true);
	return NULL;
}

static void *read_along(void *arg)
{
	struct shared *sh = arg;
	atomic_int notified = 0;
	while (!atomic_load(&sh->stop)) {
		struct fs_reader *r;
		uint8_t buf[333];
		if (fs_reader_attach(sh->t, "x", anna, 0, count_notify, &notified, &r, NULL))
			continue;
		for (;;) {
			uint64_t at = fs_reader_offset(r);
			ssize_t n = fs_reader_read(r, buf, sizeof(buf));
			if (n < 0 || (n == 0 && atomic_load(&sh->stop)))
				break;
			for (ssize_t i = 0; i < n; i++)
				if (buf[i] != byte_at(at + (uint64_t)i))
					return sh; /* wrong bytes */
			atomic_fetch_add(&sh->bytes_read, (uint64_t)n);
		}
		fs_reader_detach(r);
	}
	return NULL;
}

static void *meddle(void *arg)
{
	struct shared *sh = arg;
	struct fs_session_row rows[4];
	struct fs_streams_stats st;
	for (int i = 0; !atomic_load(&sh->stop); i++) {
		fs_streams_lookup(sh->t, "x", anna, rows, 4);
		fs_streams_stats(sh->t, &st);
		if (i % 64 == 0)
			fs_streams_delete(sh->t, "x", anna);
		if (i % 64 == 32)
			fs_streams_expire(sh->t, fs_now() + 301 * FS_SEC);
	}
	return NULL;
}

static void threads_see_the_right_bytes(void **state)
{
	struct shared sh = {.t = make(1 << 14, 0, 0)};
	pthread_t producer, readers[THREAD_READERS], meddler;
	assert_int_equal(fs_thread_start(&producer, "producer", produce, &sh, NULL), FS_OK);
	assert_int_equal(fs_thread_start(&meddler, "meddler", meddle, &sh, NULL), FS_OK);
	for (int i = 0; i < THREAD_READERS; i++)
		assert_int_equal(fs_thread_start(&readers[i], "reader", read_along, &sh, NULL), FS_OK);
	for (int i = 0; i < THREAD_READERS; i++) {
		void *wrong;
		pthread_join(readers[i], &wrong);
		assert_null(wrong);
	}
	pthread_join(producer, NULL);
	pthread_join(meddler, NULL);
	fs_streams_destroy(sh.t);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
	        cmocka_unit_test(interleavings_follow_the_reference),
	        cmocka_unit_test(memory_of_all_is_bounded),
	        cmocka_unit_test(too_many_running_ones_are_refused),
	        cmocka_unit_test(completed_ones_expire_and_running_ones_never),
	        cmocka_unit_test(readers_end_with_the_producer),
	        cmocka_unit_test(events_carry_their_offsets),
	        cmocka_unit_test(threads_see_the_right_bytes),
	};
	return cmocka_run_group_tests_name("stream", tests, NULL, NULL);
}
