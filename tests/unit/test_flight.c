/*
 * server/service/flight: the same picture asked for by several is encoded once; each may leave by itself; the
 * last one to leave ends the encode; rows that came are cached; failures reach everybody and are not kept.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "tests/unit/local_rig.h"

#include "server/service/flight.h"
#include "server/service/pictures.h"

static struct fs_errbuf e;

struct hangar {
	struct rig r;
	struct fs_flights *f;
};

static void prepare(struct hangar *h, size_t cache_bytes)
{
	rig_prepare(&h->r, "", true);
	rig_create(&h->r);
	assert_int_equal(fs_vision_wait_ready(h->r.v, -1, &e), FS_OK);
	assert_int_equal(fs_flights_create(h->r.v, cache_bytes, &h->f, &e), FS_OK);
}

static void finish(struct hangar *h)
{
	fs_flights_destroy(h->f);
	rig_finish(&h->r);
}

/* Keys are made from the text, as service makes them from bytes. */
static int join(struct hangar *h, const char *picture, struct fs_seat **s)
{
	struct fs_flight_picture p = {.bytes = picture, .n = strlen(picture)};
	uint64_t sum = 14695981039346656037u;
	for (const char *c = picture; *c; c++)
		sum = (sum ^ (unsigned char)*c) * 1099511628211u;
	memcpy(p.key, &sum, sizeof(sum));
	return fs_flight_join(h->f, &p, s, &e);
}

static struct fs_seat *seat(struct hangar *h, const char *picture)
{
	struct fs_seat *s = NULL;
	assert_int_equal(join(h, picture, &s), FS_OK);
	return s;
}

static struct fs_rows *rows_of(struct fs_seat *s, const char *picture)
{
	struct fs_rows *rows = NULL;
	int rc = fs_seat_wait(s, NULL, &rows, &e);
	if (rc)
		print_error("%s\n", e.text);
	assert_int_equal(rc, FS_OK);
	assert_true(rig_rows_are_of(rows, picture));
	return rows;
}

static struct fs_flight_stats stats(struct hangar *h)
{
	struct fs_flight_stats s;
	fs_flights_stats(h->f, &s);
	return s;
}

static int encodes_seen(struct hangar *h)
{
	return rig_events(&h->r, "enc ", NULL, 0);
}

static void one_encode_serves_all(void **state)
{
	struct hangar h;
	struct fs_seat *s[5];
	struct fs_rows *rows[5];
	static const char picture[] = "FAKE delay=100 shared";
	prepare(&h, 1 << 20);
	for (size_t i = 0; i < FS_ARRAY_LEN(s); i++)
		s[i] = seat(&h, picture);
	assert_int_equal(stats(&h).live, 1);
	for (size_t i = 0; i < FS_ARRAY_LEN(s); i++) {
		assert_false(fs_seat_cached(s[i]));
		rows[i] = rows_of(s[i], picture);
		assert_ptr_equal(rows[i], rows[0]);
	}
	assert_int_equal(encodes_seen(&h), 1);
	assert_int_equal(stats(&h).joins, 4);
	assert_int_equal(stats(&h).encodes, 1);
	assert_int_equal(stats(&h).live, 0);
	/* and from the cache afterwards */
	struct fs_seat *later = seat(&h, picture);
	assert_true(fs_seat_cached(later));
	fs_rows_unref(rows_of(later, picture));
	fs_seat_leave(later);
	assert_int_equal(encodes_seen(&h), 1);
	assert_int_equal(stats(&h).cache.hits, 1);
	for (size_t i = 0; i < FS_ARRAY_LEN(s); i++) {
		fs_rows_unref(rows[i]);
		fs_seat_leave(s[i]);
	}
	finish(&h);
}

static void who_leaves_leaves_alone(void **state)
{
	struct hangar h;
	struct fs_rows *rows = NULL;
	struct fs_cancel *c = fs_cancel_create(FS_NEVER);
	static const char picture[] = "FAKE delay=200 two";
	prepare(&h, 1 << 20);
	struct fs_seat *first = seat(&h, picture), *second = seat(&h, picture);
	fs_cancel_fire(c, FS_CANCEL_CLIENT);
	assert_int_equal(fs_seat_wait(first, c, &rows, &e), FS_ECANCELLED);
	fs_seat_leave(first); /* the one that began it */
	fs_rows_unref(rows_of(second, picture));
	fs_seat_leave(second);
	assert_int_equal(rig_events(&h.r, "cancel", NULL, 0), 0);
	assert_int_equal(encodes_seen(&h), 1);
	fs_cancel_unref(c);
	finish(&h);
}

static void a_deadline_is_its_owners(void **state)
{
	struct hangar h;
	struct fs_rows *rows = NULL;
	struct fs_cancel *c = fs_cancel_create(fs_deadline_ms(30));
	static const char picture[] = "FAKE delay=300 late";
	prepare(&h, 1 << 20);
	struct fs_seat *first = seat(&h, picture), *second = seat(&h, picture);
	assert_int_equal(fs_seat_wait(first, c, &rows, &e), FS_ECANCELLED);
	assert_int_equal(fs_cancel_cause(c), FS_CANCEL_DEADLINE);
	fs_seat_leave(first);
	fs_rows_unref(rows_of(second, picture));
	fs_seat_leave(second);
	fs_cancel_unref(c);
	finish(&h);
}

static void the_last_one_to_leave_ends_it(void **state)
{
	struct hangar h;
	prepare(&h, 1 << 20);
	struct fs_seat *first = seat(&h, "FAKE hang"), *second = seat(&h, "FAKE hang");
	rig_wait_events(&h.r, "enc ", 1);
	fs_seat_leave(first);
	assert_int_equal(rig_events(&h.r, "cancel", NULL, 0), 0);
	fs_seat_leave(second);
	assert_int_equal(stats(&h).live, 0);
	rig_wait_events(&h.r, "cancel", 1);
	/* the same picture again is a new encode */
	struct fs_seat *third = seat(&h, "FAKE hang");
	rig_wait_events(&h.r, "enc ", 2);
	fs_seat_leave(third);
	rig_wait_events(&h.r, "cancel", 2);
	assert_int_equal(rig_events(&h.r, "start ", NULL, 0), 1);
	finish(&h);
}

static void a_failure_is_everybodys_and_not_kept(void **state)
{
	struct hangar h;
	struct fs_rows *rows = NULL;
	static const char picture[] = "FAKE delay=100 err=broken";
	prepare(&h, 1 << 20);
	struct fs_seat *s[3];
	for (size_t i = 0; i < FS_ARRAY_LEN(s); i++)
		s[i] = seat(&h, picture);
	for (size_t i = 0; i < FS_ARRAY_LEN(s); i++) {
		assert_int_equal(fs_seat_wait(s[i], NULL, &rows, &e), FS_EINVAL);
		assert_string_equal(e.text, "broken");
		fs_seat_leave(s[i]);
	}
	assert_int_equal(encodes_seen(&h), 1);
	assert_int_equal(stats(&h).live, 0);
	struct fs_seat *again = seat(&h, picture);
	assert_int_equal(fs_seat_wait(again, NULL, &rows, &e), FS_EINVAL);
	fs_seat_leave(again);
	assert_int_equal(encodes_seen(&h), 2);
	finish(&h);
}

/* Its owner is busy with something else meanwhile, perhaps for minutes. */
static void a_failure_that_nobody_has_seen_is_not_joined(void **state)
{
	struct hangar h;
	struct fs_rows *rows = NULL;
	static const char picture[] = "FAKE err=broken";
	prepare(&h, 1 << 20);
	struct fs_seat *busy = seat(&h, picture);
	int64_t until = fs_deadline_ms(RIG_LIMIT_MS);
	do {
		struct fs_seat *later = seat(&h, picture); /* joins until the first encode has failed */
		fs_seat_leave(later);
		assert_true(fs_now() < until);
	} while (stats(&h).encodes < 2);
	assert_int_equal(fs_seat_wait(busy, NULL, &rows, &e), FS_EINVAL);
	assert_string_equal(e.text, "broken");
	fs_seat_leave(busy);
	assert_int_equal(stats(&h).live, 0);
	finish(&h);
}

static void a_refusal_is_told_at_once(void **state)
{
	struct hangar h;
	struct fs_seat *s = NULL;
	struct fs_rows *rows = NULL;
	prepare(&h, 1 << 20);
	struct fs_seat *dies = seat(&h, "FAKE die");
	assert_int_equal(fs_seat_wait(dies, NULL, &rows, &e), FS_EUNAVAILABLE);
	fs_seat_leave(dies);
	rig_wait_state(&h.r, FS_HOST_DOWN);
	assert_int_equal(join(&h, "x", &s), FS_EUNAVAILABLE);
	assert_non_null(strstr(e.text, "local: the encoder was ended by signal 9"));
	assert_null(s);
	assert_int_equal(stats(&h).live, 0);
	finish(&h);
}

static void a_hit_never_waits_behind_an_encode(void **state)
{
	struct hangar h;
	prepare(&h, 1 << 20);
	struct fs_seat *s = seat(&h, "seen");
	fs_rows_unref(rows_of(s, "seen"));
	fs_seat_leave(s);
	struct fs_seat *slow = seat(&h, "FAKE hang");
	rig_wait_events(&h.r, "enc ", 2);
	s = seat(&h, "seen");
	assert_true(fs_seat_cached(s));
	fs_rows_unref(rows_of(s, "seen")); /* or this hangs */
	fs_seat_leave(s);
	fs_seat_leave(slow);
	/* a hit is answered, too, while nothing can be encoded */
	struct fs_rows *rows = NULL;
	struct fs_seat *dies = seat(&h, "FAKE die");
	assert_int_equal(fs_seat_wait(dies, NULL, &rows, &e), FS_EUNAVAILABLE);
	fs_seat_leave(dies);
	s = seat(&h, "seen");
	fs_rows_unref(rows_of(s, "seen"));
	fs_seat_leave(s);
	finish(&h);
}

static void without_a_cache_only_the_flight_is_shared(void **state)
{
	struct hangar h;
	prepare(&h, 0);
	for (int i = 0; i < 2; i++) {
		struct fs_seat *s = seat(&h, "again");
		assert_false(fs_seat_cached(s));
		fs_rows_unref(rows_of(s, "again"));
		fs_seat_leave(s);
	}
	assert_int_equal(encodes_seen(&h), 2);
	finish(&h);
}

/* ---- at random ---- */

#define THREADS 6
#define STEPS 60

static const char *const pictures[] = {"FAKE delay=1 a", "FAKE delay=2 bb", "FAKE delay=4 ccc", "FAKE dddd",
        "FAKE delay=1 err=bad", "FAKE delay=6 eeeee"};

struct traveller {
	struct hangar *h;
	unsigned seed;
	pthread_t thread;
	int good, left, bad;
};

static void *travel(void *arg)
{
	struct traveller *t = arg;
	for (int i = 0; i < STEPS; i++) {
		const char *picture = pictures[(size_t)rand_r(&t->seed) % FS_ARRAY_LEN(pictures)];
		int ms = rand_r(&t->seed) % 3 ? RIG_LIMIT_MS : rand_r(&t->seed) % 8;
		struct fs_cancel *c = fs_cancel_create(fs_deadline_ms(ms));
		struct fs_seat *s = NULL;
		struct fs_rows *rows = NULL;
		FS_ASSERT(join(t->h, picture, &s) == FS_OK);
		int rc = rand_r(&t->seed) % 10 ? fs_seat_wait(s, c, &rows, NULL) : FS_ECANCELLED;
		fs_seat_leave(s);
		if (rc == FS_OK) {
			FS_ASSERT(rig_rows_are_of(rows, picture));
			t->good++;
		} else if (rc == FS_ECANCELLED) {
			t->left++;
		} else {
			FS_ASSERT(rc == FS_EINVAL && strstr(picture, "err="));
			t->bad++;
		}
		fs_rows_unref(rows);
		fs_cancel_unref(c);
	}
	return NULL;
}

static void coming_and_going_at_random(void **state)
{
	struct hangar h;
	struct traveller t[THREADS];
	int good = 0, left = 0, bad = 0;
	prepare(&h, 700); /* room for one or two */
	for (size_t i = 0; i < THREADS; i++) {
		t[i] = (struct traveller){.h = &h, .seed = (unsigned)i + 1};
		assert_int_equal(fs_thread_start(&t[i].thread, "traveller", travel, &t[i], NULL), FS_OK);
	}
	for (size_t i = 0; i < THREADS; i++) {
		pthread_join(t[i].thread, NULL);
		good += t[i].good;
		left += t[i].left;
		bad += t[i].bad;
	}
	assert_true(good > 0 && left > 0 && bad > 0);
	struct fs_flight_stats s = stats(&h);
	assert_int_equal(s.live, 0);
	assert_int_equal(s.cache.hits + s.encodes + s.joins, THREADS * STEPS);
	assert_true(s.cache.bytes <= s.cache.limit);
	/* and all is well afterwards */
	struct fs_seat *after = seat(&h, "after");
	fs_rows_unref(rows_of(after, "after"));
	fs_seat_leave(after);
	assert_int_equal(rig_events(&h.r, "start ", NULL, 0), 1);
	finish(&h);
}

static void who_has_left_has_nothing_encoded(void **state)
{
	static uint8_t png[] = {0x89, 0x50, 0x4e, 0x47, 0x0d, 0x0a, 0x1a, 0x0a, 0x00, 0x00, 0x00, 0x0d, 0x49,
	        0x48, 0x44, 0x52, 0x00, 0x00, 0x00, 0x08, 0x00, 0x00, 0x00, 0x08, 0x08, 0x02, 0x00, 0x00,
	        0x00, 0x4b, 0x6d, 0x29, 0xdc, 0x00, 0x00, 0x00, 0x11, 0x49, 0x44, 0x41, 0x54, 0x78, 0xda,
	        0x63, 0xf8, 0xcf, 0xc0, 0x80, 0x15, 0x31, 0x0c, 0x2d, 0x09, 0x00, 0x28, 0xff, 0x3f, 0xc1,
	        0xce, 0x77, 0xc8, 0x4f, 0x00, 0x00, 0x00, 0x00, 0x49, 0x45, 0x4e, 0x44, 0xae, 0x42, 0x60,
	        0x82};
	struct hangar h;
	struct fs_rows *rows[2] = {NULL, NULL};
	struct fs_picture same[2] = {{.bytes = png, .n = sizeof(png)}, {.bytes = png, .n = sizeof(png)}};
	struct fs_chat chat = {.pictures = same, .n_pictures = 2};
	struct fs_refusal why;
	prepare(&h, 1 << 20);
	struct fs_service_opts o = {.vision = h.r.v, .flights = h.f, .picture = {.max_bytes = 1 << 20}};
	struct fs_cancel *cancel = fs_cancel_create(FS_NEVER);
	fs_cancel_fire(cancel, FS_CANCEL_CLIENT);
	assert_int_equal(fs_pictures_encode(&o, &chat, cancel, rows, &why), FS_ECANCELLED);
	assert_int_equal(stats(&h).encodes, 0);
	assert_int_equal(fs_pictures_encode(&o, &chat, NULL, rows, &why), FS_OK);
	assert_int_equal(stats(&h).encodes, 1);
	fs_rows_unref(rows[0]);
	fs_rows_unref(rows[1]);
	fs_cancel_unref(cancel);
	finish(&h);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
	        cmocka_unit_test(one_encode_serves_all),
	        cmocka_unit_test(who_leaves_leaves_alone),
	        cmocka_unit_test(a_deadline_is_its_owners),
	        cmocka_unit_test(the_last_one_to_leave_ends_it),
	        cmocka_unit_test(a_failure_is_everybodys_and_not_kept),
	        cmocka_unit_test(a_failure_that_nobody_has_seen_is_not_joined),
	        cmocka_unit_test(a_refusal_is_told_at_once),
	        cmocka_unit_test(a_hit_never_waits_behind_an_encode),
	        cmocka_unit_test(without_a_cache_only_the_flight_is_shared),
	        cmocka_unit_test(coming_and_going_at_random),
	        cmocka_unit_test(who_has_left_has_nothing_encoded),
	};
	signal(SIGPIPE, SIG_IGN);
	fs_log_set_level(FS_LOG_ERROR);
	return cmocka_run_group_tests(tests, NULL, NULL);
}
