/* server/fetch: deadlines, clients that leave in any stage, many downloads at once, and its end with jobs. */
#include "tests/unit/fetch_util.h"

static void times(void **state)
{
	struct fs_fetch_opts o = opts();
	size_t n;
	o.timeout_ms = 1500; /* in which a loaded machine reaches the server */
	struct fs_fetch *f = create(o);
	assert_int_equal(get(f, url_of("public.test", "/drip"), &n), FS_ETIMEOUT);
	assert_string_equal(e.text, NOT_FETCHED);
	assert_int_equal(get(f, url_of("public.test", "/silent"), &n), FS_ETIMEOUT);
	wait_for(web_left, 2);
	fs_fetch_destroy(f);

	o = opts();
	o.stall_s = 1;
	f = create(o);
	assert_int_equal(get(f, url_of("public.test", "/drip"), &n), FS_ETIMEOUT);
	assert_int_equal(get(f, url_of("public.test", "/silent"), &n), FS_ETIMEOUT);
	fs_fetch_destroy(f);

	o = opts();
	o.connect_timeout_ms = 1500;
	f = create(o);
	atomic_store(&names_stay, true);
	assert_int_equal(get(f, url_of("slow.test", "/pic?10"), &n), FS_ETIMEOUT);
	assert_string_equal(e.text, NOT_FETCHED);
	/* connected is connected: it counts no further */
	struct fs_fetch_job *j = submit(f, url_of("public.test", "/gate?10"), NULL);
	wait_for(web_waiting, 1);
	poll(NULL, 0, 1600);
	web_open_gate(web);
	assert_int_equal(wait_size(j, &n), FS_OK);
	atomic_store(&names_stay, false);
	fs_fetch_destroy(f);
}

static void deadline_of_the_token(void **state)
{
	struct fs_fetch *f = create(opts());
	struct fs_cancel *c = fs_cancel_create(fs_deadline_ms(1500)); /* the server is reached before */
	size_t n;
	assert_int_equal(wait_size(submit(f, url_of("public.test", "/silent"), c), &n), FS_ECANCELLED);
	assert_int_equal(fs_cancel_cause(c), FS_CANCEL_DEADLINE);
	fs_cancel_unref(c);
	/* nobody waits, and it ends all the same */
	c = fs_cancel_create(fs_deadline_ms(1500));
	struct fs_fetch_job *j = submit(f, url_of("public.test", "/silent"), c);
	wait_for(web_left, 2);
	fs_fetch_job_destroy(j);
	fs_cancel_unref(c);
	fs_fetch_destroy(f);
}

struct firing {
	struct fs_cancel *cancel;
	int (*value)(struct web *);
	int want;
};

/* Fires once the download is where it shall be. */
static void *fire(void *arg)
{
	struct firing *x = arg;
	wait_for(x->value, x->want);
	fs_cancel_fire(x->cancel, FS_CANCEL_CLIENT);
	return NULL;
}

static void cancelled_when(struct fs_fetch *f, const char *url, int (*value)(struct web *), int want)
{
	struct firing x = {fs_cancel_create(FS_NEVER), value, want};
	pthread_t t;
	size_t n;
	struct fs_fetch_job *j = submit(f, url, x.cancel);
	assert_int_equal(fs_thread_start(&t, "fire", fire, &x, NULL), FS_OK);
	assert_int_equal(wait_size(j, &n), FS_ECANCELLED);
	pthread_join(t, NULL);
	fs_cancel_unref(x.cancel);
}

static void cancelling(void **state)
{
	struct fs_fetch_opts o = opts();
	o.max_active = 1;
	struct fs_fetch *f = create(o);
	size_t n;
	cancelled_when(f, url_of("public.test", "/silent"), web_waiting, 1);
	wait_for(web_left, 1); /* and the server sees it go */
	cancelled_when(f, url_of("public.test", "/drip"), web_waiting, 1);
	wait_for(web_left, 2);

	/* in the queue, behind one that keeps the only place */
	struct fs_fetch_job *first = submit(f, url_of("public.test", "/gate?10"), NULL);
	wait_for(web_waiting, 1);
	cancelled_when(f, url_of("public.test", "/pic?10"), web_waiting, 1);
	web_open_gate(web);
	assert_int_equal(wait_size(first, &n), FS_OK);
	assert_int_equal(web_accepted(web), 3);

	/* before */
	struct fs_cancel *c = fs_cancel_create(FS_NEVER);
	fs_cancel_fire(c, FS_CANCEL_CLIENT);
	assert_int_equal(fs_fetch_submit(f, url_of("public.test", "/pic?10"), c, &first, &e), FS_ECANCELLED);
	fs_cancel_unref(c);
	/* by the job's end */
	wait_for(web_waiting, 0); /* the server may still be closing what it has sent whole */
	first = submit(f, url_of("public.test", "/silent"), NULL);
	wait_for(web_waiting, 1);
	fs_fetch_job_destroy(first);
	wait_for(web_left, 3);
	fs_fetch_destroy(f);
}

/* libcurl looks at its transfers once a second by itself; 40 times that would be longer. */
static void cancelling_is_quick(void **state)
{
	struct fs_fetch *f = create(opts());
	int64_t start = fs_now();
	for (int i = 1; i <= 40; i++) {
		cancelled_when(f, url_of("public.test", "/silent"), web_waiting, 1);
		wait_for(web_left, i);
	}
	assert_true(fs_now() - start < 20 * FS_SEC);
	fs_fetch_destroy(f);
}

/* A name server that does not answer holds up neither the one who leaves nor the others, and what comes of
 * the look-up later connects to nothing. */
static void cancelling_a_look_up(void **state)
{
	struct fs_fetch_opts o = opts();
	o.max_active = 2;
	struct fs_fetch *f = create(o);
	size_t n;
	atomic_store(&names_stay, true);
	cancelled_when(f, url_of("slow.test", "/pic?10"), look_ups, 1);
	assert_int_equal(get(f, url_of("public.test", "/pic?10"), &n), FS_OK);
	cancelled_when(f, url_of("slow.test", "/pic?10"), look_ups, 2);

	/* as many look-ups hang as may: the next has to wait, cancellable, and no thread is added */
	struct fs_cancel *c = fs_cancel_create(fs_deadline_ms(200));
	assert_int_equal(wait_size(submit(f, url_of("public.test", "/pic?10"), c), &n), FS_ECANCELLED);
	fs_cancel_unref(c);
	assert_int_equal(look_ups(web), 2);
	struct fs_fetch_job *waiting = submit(f, url_of("public.test", "/pic?11"), NULL);
	atomic_store(&names_stay, false);
	assert_int_equal(wait_size(waiting, &n), FS_OK);
	assert_int_equal(get(f, url_of("slow.test", "/pic?12"), &n), FS_OK);
	assert_int_equal(web_accepted(web), 3);
	fs_fetch_destroy(f);
}

static void many_side_by_side(void **state)
{
	struct fs_fetch_opts o = opts();
	o.max_active = 8;
	struct fs_fetch *f = create(o);
	struct fs_fetch_job *jobs[40];
	for (size_t i = 0; i < 40; i++) {
		char path[32];
		snprintf(path, sizeof(path), "/gate?%zu", 1000 + i);
		jobs[i] = submit(f, url_of("public.test", path), NULL);
	}
	wait_for(web_waiting, 8); /* the gate is shut: they are there together */
	web_open_gate(web);
	for (size_t i = 40; i-- > 0;) {
		size_t n;
		assert_int_equal(wait_size(jobs[i], &n), FS_OK);
		assert_int_equal(n, 1000 + i);
	}
	assert_int_equal(web_most_waiting(web), 8);
	assert_int_equal(web_accepted(web), 40);
	fs_fetch_destroy(f);
}

static void too_many(void **state)
{
	struct fs_fetch *f = create(opts());
	static struct fs_fetch_job *jobs[FS_FETCH_MAX_JOBS];
	struct fs_fetch_job *one;
	size_t n;
	for (size_t i = 0; i < FS_FETCH_MAX_JOBS; i++)
		jobs[i] = submit(f, url_of("public.test", "/silent"), NULL);
	assert_int_equal(
	        fs_fetch_submit(f, url_of("public.test", "/pic?1"), NULL, &one, &e), FS_EUNAVAILABLE);
	for (size_t i = 0; i < FS_FETCH_MAX_JOBS; i++)
		fs_fetch_job_destroy(jobs[i]);
	int rc = FS_EUNAVAILABLE; /* until the thread has let go of them */
	for (int64_t until = fs_deadline_ms(LONG_MS); rc == FS_EUNAVAILABLE && fs_now() < until;
	        poll(NULL, 0, 2))
		rc = fs_fetch_submit(f, url_of("public.test", "/pic?1"), NULL, &one, &e);
	assert_int_equal(rc, FS_OK);
	assert_int_equal(wait_size(one, &n), FS_OK);
	fs_fetch_destroy(f);
}

/* Jobs of all stages when it ends; the end waits for none of them, nor for the name server. */
static void destroyed_with_jobs(void **state)
{
	struct fs_fetch_opts o = opts();
	o.max_active = 3;
	struct fs_fetch *f = create(o);
	struct fs_fetch_job *jobs[6];
	atomic_store(&names_stay, true);
	jobs[0] = submit(f, url_of("slow.test", "/pic?10"), NULL);
	jobs[1] = submit(f, url_of("public.test", "/silent"), NULL);
	jobs[2] = submit(f, url_of("public.test", "/drip"), NULL);
	jobs[3] = submit(f, url_of("public.test", "/pic?10"), NULL);
	jobs[4] = submit(f, url_of("public.test", "/pic?10"), NULL);
	jobs[5] = submit(f, url_of("slow.test", "/pic?10"), NULL);
	wait_for(web_waiting, 2);
	wait_for(look_ups, 1);
	fs_fetch_job_destroy(jobs[5]);
	fs_fetch_destroy(f);
	wait_for(web_left, 2);
	assert_int_equal(look_ups(web), 1);
	for (size_t i = 0; i < 5; i++) {
		size_t n;
		assert_int_equal(wait_size(jobs[i], &n), FS_EUNAVAILABLE);
		assert_string_equal(e.text, "the server is shutting down");
	}
	atomic_store(&names_stay, false);
	wait_for(look_ups, 0);
	fs_fetch_destroy(NULL);
	fs_fetch_job_destroy(NULL);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
	        TEST(times),
	        TEST(deadline_of_the_token),
	        TEST(cancelling),
	        TEST(cancelling_is_quick),
	        TEST(cancelling_a_look_up),
	        TEST(many_side_by_side),
	        TEST(too_many),
	        TEST(destroyed_with_jobs),
	};
	return cmocka_run_group_tests_name("fetch_time", tests, NULL, NULL);
}
