/*
 * server/vision against fake_agent behind a real sshd: rows arrive whole and under the right request, faults
 * become the right errors, lost work is done again, and a host that is away comes back by itself.
 */
#include "tests/unit/vision_rig.h"

/* ---- work ---- */

static void rows_arrive_as_f32(void **state)
{
	struct rig r;
	rig_up(&r, "--rows 1024 --embd 8");
	good_encode(&r, 200000, 3); /* submitted while the first attempt goes on */
	good_encode(&r, 1, 255);
	struct fs_host_status st;
	assert_int_equal(fs_vision_status(r.v, &st, 1), 1);
	assert_int_equal(st.state, FS_HOST_UP);
	assert_int_equal(st.encodes, 2);
	assert_int_equal(st.errors, 0);
	assert_int_equal(st.outstanding, 0);
	assert_string_equal(st.device, "fake");
	assert_int_equal(st.vram_free_mb, 3000);
	assert_int_equal(st.vram_total_mb, 12000);
	assert_int_equal(st.max_tokens, 1000);
	fs_vision_destroy(r.v);
	wait_log(&r, "bye", 1);
}

static void large_rows_arrive(void **state)
{
	struct rig r;
	prepare(&r, "--rows 1024 --embd 2560");
	r.o.n_embd = 2560;
	start(&r);
	good_encode(&r, 3 << 20, 7);
	fs_vision_destroy(r.v);
}

/* sshd asks for new keys after each MiB, in the middle of uploads and answers. */
static void keys_are_renegotiated_on_the_way(void **state)
{
	struct test_sshd strict;
	struct test_sshd_opts so = {.extra = "RekeyLimit 1M"};
	struct rig r;
	test_sshd_init(&strict, &so);
	prepare(&r, "--rows 1024 --embd 2560");
	r.o.n_hosts = 0;
	add_host(&r, &strict, r.host, r.command);
	r.o.n_embd = 2560;
	start(&r);
	for (uint8_t i = 0; i < 4; i++)
		good_encode(&r, 4 << 20, i);
	assert_int_equal(count_log(&r, "enc"), 4); /* none was lost and tried again */
	fs_vision_destroy(r.v);
	test_sshd_finish(&strict);
}

static void rows_arrive_as_f16(void **state)
{
	struct rig r;
	prepare(&r, "--rows 1023 --embd 9");
	r.o.n_embd = 9; /* odd: a tail behind the vectors */
	r.o.f16 = true;
	start(&r);
	good_encode(&r, 5000, 11);
	fs_vision_destroy(r.v);
}

static void facts_of_an_encode_are_told(void **state)
{
	struct rig r;
	rig_up(&r, "");
	struct fs_vision_job *j = submit(&r, 10, 1, NULL);
	struct fs_rows *rows = NULL;
	struct fs_errbuf e;
	assert_int_equal(fs_vision_wait(j, &rows, &e), FS_OK);
	assert_string_equal(rows->host, r.host);
	assert_true(rows->encode_ms > 1.4 && rows->encode_ms < 1.6);
	assert_true(rows->queue_ms > 0.4 && rows->queue_ms < 0.6);
	assert_true(rows->total_ms > 0);
	assert_int_equal(rows->shape.nx, 4);
	fs_vision_job_destroy(j); /* rows outlive the job */
	check_rows(rows, 10, 1);
	fs_rows_unref(rows);
	fs_vision_destroy(r.v);
}

static void answers_find_their_requests(void **state)
{
	enum { N = 12 };
	struct rig r;
	rig_up(&r, "--rows 20000 --delay 50 --slow-first"); /* ten chunks each, interleaved, the first one
	                                                       last */
	struct fs_vision_job *j[N];
	for (int i = 0; i < N; i++)
		j[i] = submit(&r, 100000 + (size_t)i, (uint8_t)(i + 1), NULL);
	for (int i = 0; i < N; i++) {
		struct fs_rows *rows = NULL;
		struct fs_errbuf e;
		assert_int_equal(fs_vision_wait(j[i], &rows, &e), FS_OK);
		check_rows(rows, 100000 + (size_t)i, (uint8_t)(i + 1));
		fs_rows_unref(rows);
		fs_vision_job_destroy(j[i]);
	}
	fs_vision_destroy(r.v);
}

/* ---- cancel ---- */

struct firing {
	struct rig *r;
	struct fs_cancel *c;
};
static void *fire_when_encoding(void *arg)
{
	struct firing *f = arg;
	wait_log(f->r, "enc", 1);
	fs_cancel_fire(f->c, FS_CANCEL_CLIENT);
	return NULL;
}

static void cancel_ends_the_wait_and_tells_the_host(void **state)
{
	struct rig r;
	rig_up(&r, "--delay 600000 --slow-first");
	struct fs_cancel *c = fs_cancel_create(FS_NEVER);
	struct fs_vision_job *j = submit(&r, 10, 1, c);
	struct firing f = {&r, c};
	pthread_t t;
	struct fs_errbuf e;
	struct fs_rows *rows = NULL;
	assert_int_equal(fs_thread_start(&t, "fire", fire_when_encoding, &f, &e), FS_OK);
	assert_int_equal(fs_vision_wait(j, &rows, &e), FS_ECANCELLED);
	pthread_join(t, NULL);
	fs_vision_job_destroy(j);
	fs_cancel_unref(c);
	wait_log(&r, "cancel", 1);
	good_encode(&r, 20, 2);
	fs_vision_destroy(r.v);
}

static void fired_tokens_and_deadlines_end_it(void **state)
{
	struct rig r;
	struct fs_errbuf e;
	struct fs_vision_job *j = NULL;
	struct fs_rows *rows = NULL;
	rig_up(&r, "--hang");
	struct fs_cancel *c = fs_cancel_create(FS_NEVER);
	fs_cancel_fire(c, FS_CANCEL_CLIENT);
	assert_int_equal(fs_vision_submit(r.v, "x", 1, key, NULL, c, &j, &e), FS_ECANCELLED);
	fs_cancel_unref(c);
	c = fs_cancel_create(fs_deadline_ms(50));
	j = submit(&r, 5, 1, c);
	assert_int_equal(fs_vision_wait(j, &rows, &e), FS_ECANCELLED);
	assert_int_equal(fs_cancel_cause(c), FS_CANCEL_DEADLINE);
	fs_vision_job_destroy(j);
	fs_cancel_unref(c);
	fs_vision_destroy(r.v);
}

static void encode_timeout_is_its_own_error(void **state)
{
	struct rig r;
	prepare(&r, "--hang");
	r.o.encode_timeout_ms = 3000;
	start(&r);
	wait_state(&r, 0, FS_HOST_UP);
	bad_encode(&r, FS_ETIMEOUT, "was not encoded within 3 s");
	wait_log(&r, "cancel", 1);
	fs_vision_destroy(r.v);
}

static void destroyed_jobs_are_cancelled(void **state)
{
	struct rig r;
	rig_up(&r, "--hang");
	struct fs_vision_job *j = submit(&r, 5, 1, NULL);
	wait_log(&r, "enc", 1);
	fs_vision_job_destroy(j);
	wait_log(&r, "cancel", 1);
	fs_vision_destroy(r.v);
}

static void *wait_for_the_end(void *arg)
{
	struct fs_rows *rows = NULL;
	struct fs_errbuf e;
	int rc = fs_vision_wait(arg, &rows, &e);
	fs_vision_job_destroy(arg);
	return (void *)(intptr_t)rc;
}

static void destroy_ends_waiting_jobs(void **state)
{
	struct rig r;
	struct fs_errbuf e;
	rig_up(&r, "--hang");
	struct fs_vision_job *j = submit(&r, 5, 1, NULL);
	wait_log(&r, "enc", 1);
	pthread_t t;
	void *rc;
	assert_int_equal(fs_thread_start(&t, "wait", wait_for_the_end, j, &e), FS_OK);
	fs_vision_destroy(r.v);
	pthread_join(t, &rc);
	assert_int_equal((int)(intptr_t)rc, FS_EUNAVAILABLE);
}

/* ---- faults ---- */

static void refused_pictures_are_the_pictures_fault(void **state)
{
	struct rig r;
	rig_up(&r, "--refuse 4 'truncated JPEG'"); /* FS_EFORMAT */
	bad_encode(&r, FS_EINVAL, "truncated JPEG");
	assert_int_equal(count_log(&r, "enc"), 1);
	struct fs_host_status st;
	fs_vision_status(r.v, &st, 1);
	assert_int_equal(st.state, FS_HOST_UP);
	fs_vision_destroy(r.v);
}

static void encoder_trouble_is_tried_again(void **state)
{
	struct rig r;
	rig_up(&r, "--refuse 7 'the encoder died' --once %O"); /* FS_EUNAVAILABLE, the first time */
	good_encode(&r, 9, 9);
	assert_int_equal(count_log(&r, "enc"), 2);
	fs_vision_destroy(r.v);

	rig_up(&r, "--refuse 7 'the encoder died'");
	bad_encode(&r, FS_EUNAVAILABLE, "the encoder died");
	assert_int_equal(count_log(&r, "enc"), 3);
	fs_vision_destroy(r.v);
}

static void rows_with_nan_are_refused(void **state)
{
	struct rig r;
	rig_up(&r, "--nan");
	bad_encode(&r, FS_EUNAVAILABLE, r.host);
	assert_int_equal(count_log(&r, "enc"), 1);
	fs_vision_destroy(r.v);
}

static void rows_of_another_width_end_the_connection(void **state)
{
	struct rig r;
	rig_up(&r, "--hello-embd 8 --embd 16");
	bad_encode(&r, FS_EUNAVAILABLE, "rows of 16 values instead of 8");
	fs_vision_destroy(r.v);
}

static void malformed_frames_end_the_connection(void **state)
{
	struct rig r;
	rig_up(&r, "--malformed");
	bad_encode(&r, FS_EUNAVAILABLE, "unknown type");
	fs_vision_destroy(r.v);
}

static void host_that_dies_mid_answer_is_asked_again(void **state)
{
	static const int at[] = {0, 1, 100000, 163840 - 1};
	for (size_t i = 0; i < FS_ARRAY_LEN(at); i++) {
		struct rig r;
		char args[100];
		snprintf(args, sizeof(args), "--rows 5120 --die-at %d --once %%O", at[i]); /* 163840 bytes */
		rig_up(&r, args);
		good_encode(&r, 70000, 5);
		assert_int_equal(count_log(&r, "enc"), 2);
		assert_int_equal(count_log(&r, "died"), 1);
		fs_vision_destroy(r.v);
	}
}

static void host_that_always_dies_is_given_up(void **state)
{
	struct rig r;
	rig_up(&r, "--die-at 1");
	bad_encode(&r, FS_EUNAVAILABLE, r.host);
	assert_int_equal(count_log(&r, "enc"), 3);
	fs_vision_destroy(r.v);
}

/* Rows are sent while they are written: what writes them may still fail. */
static void answer_that_is_broken_off_is_asked_for_again(void **state)
{
	static const int at[] = {0, 1, 100000, 163840 - 1};
	struct rig r;
	for (size_t i = 0; i < FS_ARRAY_LEN(at); i++) {
		char args[100];
		snprintf(args, sizeof(args), "--rows 5120 --break-at %d --once %%O", at[i]);
		rig_up(&r, args);
		good_encode(&r, 70000, 5);
		assert_int_equal(count_log(&r, "enc"), 2);
		assert_int_equal(count_log(&r, "broken"), 1);
		fs_vision_destroy(r.v);
	}
	rig_up(&r, "--break-at 1");
	bad_encode(&r, FS_EUNAVAILABLE, "broken off");
	assert_int_equal(count_log(&r, "enc"), 3);
	fs_vision_destroy(r.v);
}

static void wrong_models_are_refused_by_name(void **state)
{
	struct rig r;
	rig_up(&r, "--embd 16");
	bad_encode(&r, FS_EUNAVAILABLE, "belongs to another model");
	fs_vision_destroy(r.v);

	prepare(&r, "--fingerprint ffffffffffffffffffffffffffffffff");
	r.o.fingerprint = "00000000000000000000000000000000";
	start(&r);
	bad_encode(&r, FS_EUNAVAILABLE, "another mmproj (ffffffffffffffffffffffffffffffff)");
	fs_vision_destroy(r.v);

	rig_up(&r, "--version 2");
	bad_encode(&r, FS_EUNAVAILABLE, "protocol version 2; this program (farsight");
	fs_vision_destroy(r.v);
}

static void chatter_before_the_protocol_is_explained(void **state)
{
	struct rig r;
	rig_up(&r, "--print 'Welcome to this machine, it is a fine day'");
	bad_encode(&r, FS_EUNAVAILABLE, "start-up file");
	fs_vision_destroy(r.v);
}

static void missing_agent_is_named(void **state)
{
	struct rig r;
	prepare(&r, "");
	r.o.hosts[0].command = "farsight-agent-that-is-not-there";
	start(&r);
	bad_encode(&r, FS_EUNAVAILABLE, "is not installed on");
	fs_vision_destroy(r.v);
}

static void last_words_are_told(void **state)
{
	struct rig r;
	prepare(&r, "");
	r.o.hosts[0].command = "echo the mmproj is missing >&2; exit 1";
	start(&r);
	bad_encode(&r, FS_EUNAVAILABLE, "the mmproj is missing");
	fs_vision_destroy(r.v);
}

/* An agent's ERR, 7 (unavailable), whose text also stands on its stderr. */
static void words_said_twice_are_told_once(void **state)
{
	struct rig r;
	struct fs_host_status st;
	prepare(&r, "");
	r.o.hosts[0].command = "echo agent: no watchdog >&2; printf "
	                       "'\\017\\0\\0\\0\\005\\0\\0\\0\\0\\0\\0\\0\\007\\0\\0\\0no watchdog'; exit 1";
	start(&r);
	wait_state(&r, 0, FS_HOST_DOWN);
	fs_vision_status(r.v, &st, 1);
	assert_string_equal(st.cause, "no watchdog");
	fs_vision_destroy(r.v);
}

/* ---- coming and going ---- */

static void starting_encoders_are_waited_for(void **state)
{
	struct rig r;
	rig_up(&r, "--starting 300");
	good_encode(&r, 100, 4);
	fs_vision_destroy(r.v);
}

static void failed_encoders_are_told_at_once(void **state)
{
	struct rig r;
	rig_up(&r, "--failed 'no such mmproj'");
	bad_encode(&r, FS_EUNAVAILABLE, "no such mmproj");
	fs_vision_destroy(r.v);
}

static void absent_host_is_refused_then_found(void **state)
{
	struct rig r;
	test_sshd_stop(&sshd);
	rig_up(&r, "");
	wait_state(&r, 0, FS_HOST_DOWN);
	bad_encode(&r, FS_EUNAVAILABLE, "nothing listens on");
	bad_encode(&r, FS_EUNAVAILABLE, r.host);
	test_sshd_start(&sshd);
	wait_state(&r, 0, FS_HOST_UP);
	good_encode(&r, 100, 4);
	fs_vision_destroy(r.v);
}

/* Its picture was lost with the connection, but what keeps it away is the key. */
static void a_picture_that_waited_in_vain_tells_what_keeps_its_host_away(void **state)
{
	struct rig r;
	struct fs_rows *rows = NULL;
	struct fs_errbuf e = {""};
	char text[8192], known[300];
	prepare(&r, "--hang");
	r.o.connect_timeout_ms = 5000;
	snprintf(known, sizeof(known), "%s/known_then_changed", sshd.dir);
	char *right = test_read_file(sshd.known_hosts), *other = test_read_file(sshd.authorized_keys);
	snprintf(text, sizeof(text), "[127.0.0.1]:%d %s", sshd.port, other);
	test_write_file(known, right, 0600);
	r.o.hosts[0].known_hosts = known;
	start(&r);
	struct fs_vision_job *j = submit(&r, 100, 1, NULL);
	wait_log(&r, "enc", 1);
	test_write_file(known, text, 0600);
	assert_true(test_sshd_signal_sessions(&sshd, SIGKILL) > 0);
	assert_int_equal(fs_vision_wait(j, &rows, &e), FS_EUNAVAILABLE);
	if (!strstr(e.text, "has changed") || !strstr(e.text, "lost before: "))
		fail_msg("%s", e.text);
	fs_vision_job_destroy(j);
	bad_encode(&r, FS_EUNAVAILABLE, "has changed");
	fs_vision_destroy(r.v);
	free(right);
	free(other);
}

static void lost_host_comes_back_by_itself(void **state)
{
	struct rig r;
	rig_up(&r, "");
	good_encode(&r, 100, 4);
	test_sshd_stop(&sshd);
	wait_state(&r, 0, FS_HOST_DOWN);
	test_sshd_start(&sshd);
	wait_state(&r, 0, FS_HOST_UP);
	good_encode(&r, 100, 5);
	fs_vision_destroy(r.v);
}

static void frozen_host_is_noticed(void **state)
{
	struct rig r;
	prepare(&r, "");
	r.o.ping_interval_ms = 100;
	r.o.dead_after_ms = 3000; /* long enough for a thawed host on a loaded machine */
	r.o.connect_timeout_ms = 3000;
	start(&r);
	good_encode(&r, 100, 4);
	kill(sshd.child.pid, SIGSTOP);
	assert_true(test_sshd_signal_sessions(&sshd, SIGSTOP) > 0);
	wait_state(&r, 0, FS_HOST_DOWN);
	bad_encode(&r, FS_EUNAVAILABLE, r.host);
	kill(sshd.child.pid, SIGCONT);
	test_sshd_signal_sessions(&sshd, SIGCONT);
	wait_state(&r, 0, FS_HOST_UP);
	good_encode(&r, 100, 4);
	fs_vision_destroy(r.v);
}

static void silent_agents_are_noticed_by_their_pings(void **state)
{
	struct rig r;
	prepare(&r, "--mute-pings --hang");
	r.o.ping_interval_ms = 50;
	r.o.dead_after_ms = 400;
	start(&r);
	bad_encode(&r, FS_EUNAVAILABLE, "no sign of life");
	fs_vision_destroy(r.v);
}

static void hosts_that_freeze_under_an_upload_are_given_up(void **state)
{
	struct rig r;
	prepare(&r, "");
	r.o.ping_interval_ms = 100;
	r.o.dead_after_ms = 1500;
	r.o.encode_timeout_ms = 30000;
	start(&r);
	wait_state(&r, 0, FS_HOST_UP);
	assert_true(test_sshd_signal_sessions(&sshd, SIGSTOP) > 0);
	struct fs_vision_job *j = submit(&r, 16 << 20, 1, NULL); /* more than window and sockets take */
	struct fs_rows *rows = NULL;
	struct fs_errbuf e = {""};
	if (fs_vision_wait(j, &rows, &e)) /* over a fresh connection, which is not frozen */
		fail_msg("%s", e.text);
	fs_rows_unref(rows);
	fs_vision_job_destroy(j);
	test_sshd_signal_sessions(&sshd, SIGCONT);
	fs_vision_destroy(r.v);
}

static void two_hosts_share_and_stand_in(void **state)
{
	enum { N = 8 };
	struct rig r;
	prepare(&r, "--delay 1500 --die-at 0 --once %O"); /* one of its answers is lost */
	expand(&r, r.command2, sizeof(r.command2), "--delay 1500");
	add_host(&r, &sshd2, r.host2, r.command2);
	start(&r);
	wait_state(&r, 0, FS_HOST_UP);
	wait_state(&r, 1, FS_HOST_UP);
	struct fs_vision_job *j[N];
	for (int i = 0; i < N; i++)
		j[i] = submit(&r, 50, (uint8_t)i, NULL);
	struct fs_host_status st[2];
	assert_int_equal(fs_vision_status(r.v, st, 2), 2);
	assert_int_equal(st[0].outstanding, N / 2);
	assert_int_equal(st[1].outstanding, N / 2);
	for (int i = 0; i < N; i++) {
		struct fs_rows *rows = NULL;
		struct fs_errbuf e;
		int rc = fs_vision_wait(j[i], &rows, &e);
		if (rc)
			fail_msg("%s", e.text);
		check_rows(rows, 50, (uint8_t)i);
		fs_rows_unref(rows);
		fs_vision_job_destroy(j[i]);
	}
	fs_vision_status(r.v, st, 2);
	assert_int_equal(st[0].encodes + st[1].encodes, N);
	assert_true(st[1].encodes > N / 2);
	fs_vision_destroy(r.v);
}

static void second_host_with_another_model_is_refused(void **state)
{
	struct rig r;
	prepare(&r, "");
	expand(&r, r.command2, sizeof(r.command2),
	        "--fingerprint ffffffffffffffffffffffffffffffff --starting 5000");
	add_host(&r, &sshd2, r.host2, r.command2);
	start(&r);
	wait_state(&r, 0, FS_HOST_UP);
	wait_state(&r, 1, FS_HOST_DOWN);
	struct fs_host_status st[2];
	fs_vision_status(r.v, st, 2);
	assert_non_null(strstr(st[1].cause, "another mmproj"));
	good_encode(&r, 4, 4);
	fs_vision_destroy(r.v);
}

static void nonsense_is_refused(void **state)
{
	struct fs_vision_opts o = {0};
	struct fs_vision *v = NULL;
	struct fs_errbuf e;
	o.n_hosts = FS_VISION_MAX_HOSTS + 1;
	assert_int_equal(fs_vision_create(&o, &v, &e), FS_EINVAL);
	o.n_hosts = 1;
	o.hosts[0].host = "-oProxyCommand=x";
	assert_int_equal(fs_vision_create(&o, &v, &e), FS_EINVAL);
	struct rig r;
	rig_up(&r, "");
	struct fs_vision_job *j = NULL;
	assert_int_equal(fs_vision_submit(r.v, "", 0, key, NULL, NULL, &j, &e), FS_EINVAL);
	assert_int_equal(fs_vision_submit(r.v, "", FS_PICTURE_MAX + 1, key, NULL, NULL, &j, &e), FS_EINVAL);
	fs_vision_destroy(r.v);
}

int main(int argc, char **argv)
{
	const struct CMUnitTest tests[] = {
	        cmocka_unit_test(rows_arrive_as_f32),
	        cmocka_unit_test(large_rows_arrive),
	        cmocka_unit_test(keys_are_renegotiated_on_the_way),
	        cmocka_unit_test(rows_arrive_as_f16),
	        cmocka_unit_test(facts_of_an_encode_are_told),
	        cmocka_unit_test(answers_find_their_requests),
	        cmocka_unit_test(cancel_ends_the_wait_and_tells_the_host),
	        cmocka_unit_test(fired_tokens_and_deadlines_end_it),
	        cmocka_unit_test(encode_timeout_is_its_own_error),
	        cmocka_unit_test(destroyed_jobs_are_cancelled),
	        cmocka_unit_test(destroy_ends_waiting_jobs),
	        cmocka_unit_test(refused_pictures_are_the_pictures_fault),
	        cmocka_unit_test(encoder_trouble_is_tried_again),
	        cmocka_unit_test(rows_with_nan_are_refused),
	        cmocka_unit_test(rows_of_another_width_end_the_connection),
	        cmocka_unit_test(malformed_frames_end_the_connection),
	        cmocka_unit_test(host_that_dies_mid_answer_is_asked_again),
	        cmocka_unit_test(host_that_always_dies_is_given_up),
	        cmocka_unit_test(answer_that_is_broken_off_is_asked_for_again),
	        cmocka_unit_test(wrong_models_are_refused_by_name),
	        cmocka_unit_test(chatter_before_the_protocol_is_explained),
	        cmocka_unit_test(missing_agent_is_named),
	        cmocka_unit_test(last_words_are_told),
	        cmocka_unit_test(words_said_twice_are_told_once),
	        cmocka_unit_test(starting_encoders_are_waited_for),
	        cmocka_unit_test(failed_encoders_are_told_at_once),
	        cmocka_unit_test(absent_host_is_refused_then_found),
	        cmocka_unit_test(a_picture_that_waited_in_vain_tells_what_keeps_its_host_away),
	        cmocka_unit_test(lost_host_comes_back_by_itself),
	        cmocka_unit_test(frozen_host_is_noticed),
	        cmocka_unit_test(silent_agents_are_noticed_by_their_pings),
	        cmocka_unit_test(hosts_that_freeze_under_an_upload_are_given_up),
	        cmocka_unit_test(two_hosts_share_and_stand_in),
	        cmocka_unit_test(second_host_with_another_model_is_refused),
	        cmocka_unit_test(nonsense_is_refused),
	};
	return vision_tests(tests, argc, argv);
}
