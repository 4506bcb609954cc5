/*
 * Several vision hosts together, fake agents behind real sshds: who gets the work, who is left alone after a
 * failure, who stands in for a late one, how a sleeping one is woken, and what becomes of a host that floods
 * or moves.
 */
#include "tests/unit/vision_rig.h"

#include <arpa/inet.h>
#include <math.h>
#include <sys/socket.h>

static struct fs_host_status status_of(const struct rig *r, size_t host)
{
	struct fs_host_status st[FS_VISION_MAX_HOSTS];
	assert_true(fs_vision_status(r->v, st, FS_VISION_MAX_HOSTS) > host);
	return st[host];
}

/* The second host, with its own knobs. */
static void second(struct rig *r, const struct test_sshd *s, const char *args)
{
	expand(r, r->command2, sizeof(r->command2), args);
	add_host(r, s, r->host2, r->command2);
}

static void both_up(struct rig *r)
{
	start(r);
	wait_state(r, 0, FS_HOST_UP);
	wait_state(r, 1, FS_HOST_UP);
}

static void get_rows(struct fs_vision_job *j, size_t n, uint8_t fill)
{
	struct fs_rows *rows = NULL;
	struct fs_errbuf e;
	int rc = fs_vision_wait(j, &rows, &e);
	if (rc)
		fail_msg("%s: %s", fs_err_name(rc), e.text);
	check_rows(rows, n, fill);
	fs_rows_unref(rows);
	fs_vision_job_destroy(j);
}

/* ---- who gets the work ---- */

static void waiting_pictures_move_to_a_free_host(void **state)
{
	enum { N = 10 };
	struct rig r;
	struct fs_vision_job *j[N];
	prepare(&r, "--serial --delay 3000");
	second(&r, &sshd2, "--serial --delay 500 --late-from 2 --late 5");
	both_up(&r);
	for (int i = 0; i < N; i++)
		j[i] = submit(&r, 50, (uint8_t)i, NULL);
	assert_int_equal(status_of(&r, 0).outstanding, N / 2); /* nothing is known of either */
	for (int i = 0; i < N; i++)
		get_rows(j[i], 50, (uint8_t)i);
	/* the slow one kept what had been sent to it */
	assert_int_equal(status_of(&r, 0).encodes, 2);
	assert_int_equal(status_of(&r, 1).encodes, N - 2);
	assert_true(status_of(&r, 0).picture_ms > status_of(&r, 1).picture_ms);
	/* and is not asked while the fast one is idle */
	for (int i = 0; i < 5; i++)
		good_encode(&r, 50, 9);
	assert_int_equal(status_of(&r, 0).encodes, 2);
	assert_int_equal(count_log(&r, "enc"), N + 5); /* none twice */
	fs_vision_destroy(r.v);
}

static void a_host_that_comes_up_takes_its_share(void **state)
{
	enum { N = 8 };
	struct rig r;
	struct fs_vision_job *j[N];
	test_sshd_stop(&sshd2);
	prepare(&r, "--serial --delay 1500");
	second(&r, &sshd2, "--serial --delay 5");
	start(&r);
	wait_state(&r, 0, FS_HOST_UP);
	wait_state(&r, 1, FS_HOST_DOWN);
	for (int i = 0; i < N; i++)
		j[i] = submit(&r, 50, (uint8_t)i, NULL);
	assert_int_equal(status_of(&r, 0).outstanding, N);
	test_sshd_start(&sshd2);
	for (int i = 0; i < N; i++)
		get_rows(j[i], 50, (uint8_t)i);
	assert_true(status_of(&r, 1).encodes > 0);
	assert_int_equal(status_of(&r, 0).encodes + status_of(&r, 1).encodes, N);
	fs_vision_destroy(r.v);
}

static void hosts_that_are_written_alike_have_names_of_their_own(void **state)
{
	struct rig r;
	char want[80];
	prepare(&r, "");
	second(&r, &sshd2, "");
	r.o.hosts[0].host = r.o.hosts[1].host = "127.0.0.1";
	r.o.hosts[0].port = sshd.port;
	r.o.hosts[1].port = sshd2.port;
	r.o.hosts[2] = r.o.hosts[1];
	r.o.hosts[2].host = "::1";
	r.o.hosts[3] = r.o.hosts[4] = r.o.hosts[2];
	r.o.hosts[3].host = r.o.hosts[4].host = "::2";
	r.o.n_hosts = 5;
	start(&r);
	snprintf(want, sizeof(want), "127.0.0.1:%d", sshd.port);
	assert_string_equal(status_of(&r, 0).host, want);
	snprintf(want, sizeof(want), "127.0.0.1:%d", sshd2.port);
	assert_string_equal(status_of(&r, 1).host, want);
	assert_string_equal(status_of(&r, 2).host, "::1");
	assert_string_equal(status_of(&r, 3).host, "::2 #4");
	assert_string_equal(status_of(&r, 4).host, "::2 #5");
	fs_vision_destroy(r.v);
}

static void where_the_time_of_pictures_went_adds_up(void **state)
{
	enum { N = 5 };
	struct rig r;
	struct fs_vision_job *j[N];
	double total = 0, parts = 0;
	prepare(&r, "--serial --delay 300");
	start(&r);
	wait_state(&r, 0, FS_HOST_UP);
	assert_true(status_of(&r, 0).times[FS_HOST_TIME_QUEUE].mean_ms <= 0);
	for (int i = 0; i < N; i++)
		j[i] = submit(&r, 5000, (uint8_t)i, NULL);
	for (int i = 0; i < N; i++) {
		struct fs_rows *rows = NULL;
		assert_int_equal(fs_vision_wait(j[i], &rows, NULL), FS_OK);
		total += rows->total_ms / 1000;
		fs_rows_unref(rows);
		fs_vision_job_destroy(j[i]);
	}
	struct fs_host_status st = status_of(&r, 0);
	for (size_t i = 0; i < FS_N_HOST_TIMES; i++) {
		const struct fs_host_times *t = &st.times[i];
		uint64_t n = 0;
		for (size_t k = 0; k <= FS_HOST_BUCKETS; k++)
			n += t->buckets[k];
		assert_int_equal(t->count, N);
		assert_int_equal(n, N);
		assert_true(t->sum >= 0 && t->mean_ms >= 0);
		parts += t->sum;
	}
	/* a queue or an encode that were left out would be most of it; a busy machine adds its own between
	 * two clocks */
	assert_true(fabs(parts - total) < 0.2 * total);
	/* the last ones waited here, since no more than what keeps the host busy is sent ahead */
	assert_true(st.times[FS_HOST_TIME_QUEUE].sum > 0.300);
	fs_vision_destroy(r.v);
}

/* ---- failures ---- */

static void failing_hosts_are_left_alone_for_longer_each_time(void **state)
{
	struct rig r;
	prepare(&r, "--refuse 7 'the encoder died'");
	second(&r, &sshd2, "");
	both_up(&r);
	int64_t began = fs_now(), until = fs_deadline_ms(120000);
	uint64_t failures = 0, pictures = 0;
	while (failures < 3) {
		good_encode(&r, 10, 1); /* of the other one */
		pictures++;
		failures = status_of(&r, 0).errors_by[FS_HOST_ERR_ENCODER];
		assert_true(fs_now() < until);
		poll(NULL, 0, 5);
	}
	assert_true(fs_now() - began > 2300 * FS_MS); /* 80 % of 1 s and 2 s lie in between */
	struct fs_host_status st = status_of(&r, 0);
	assert_int_equal(st.encodes, 0);
	assert_int_equal(st.errors, 3);
	assert_int_equal(st.retries, 3);
	assert_int_equal(status_of(&r, 1).encodes, pictures);
	assert_int_equal(st.state, FS_HOST_UP);
	fs_vision_destroy(r.v);
}

static void a_host_that_recovers_is_asked_again(void **state)
{
	struct rig r;
	int64_t until = fs_deadline_ms(120000);
	prepare(&r, "--refuse 7 'the encoder died' --once %O");
	second(&r, &sshd2, "--delay 100");
	both_up(&r);
	while (status_of(&r, 0).encodes < 3) {
		good_encode(&r, 10, 1);
		assert_true(fs_now() < until);
	}
	assert_int_equal(status_of(&r, 0).benched_until, 0);
	assert_int_equal(status_of(&r, 0).errors, 1);
	fs_vision_destroy(r.v);
}

static void causes_are_counted(void **state)
{
	static const struct {
		const char *knobs;
		enum fs_host_error cause;
		int rc;
		uint64_t n;
	} cases[] = {{"--refuse 4 'no JPEG'", FS_HOST_ERR_PICTURE, FS_EINVAL, 1},
	        {"--refuse 12 'a bug'", FS_HOST_ERR_ENCODER, FS_EUNAVAILABLE, 3},
	        {"--refuse 5 'too slow'", FS_HOST_ERR_TIMEOUT, FS_ETIMEOUT, 1},
	        {"--nan", FS_HOST_ERR_ROWS, FS_EUNAVAILABLE, 1},
	        {"--die-at 1", FS_HOST_ERR_LOST, FS_EUNAVAILABLE, 3}};
	for (size_t i = 0; i < FS_ARRAY_LEN(cases); i++) {
		struct rig r;
		rig_up(&r, cases[i].knobs);
		wait_state(&r, 0, FS_HOST_UP);
		bad_encode(&r, cases[i].rc, "");
		struct fs_host_status st = status_of(&r, 0);
		for (size_t k = 0; k < FS_N_HOST_ERRORS; k++)
			if (st.errors_by[k] != (k == cases[i].cause ? cases[i].n : 0))
				fail_msg("%s: %d x %s", cases[i].knobs, (int)st.errors_by[k],
				        fs_host_error_name((enum fs_host_error)k));
		assert_int_equal(st.errors, cases[i].cause == FS_HOST_ERR_PICTURE ? 0 : cases[i].n);
		assert_int_equal(st.retries, cases[i].n == 3 ? 2 : 0);
		fs_vision_destroy(r.v);
	}
}

static void an_encoder_that_hangs_is_not_asked_twice(void **state)
{
	struct rig r;
	prepare(&r, "--refuse 5 'it took too long'"); /* FS_ETIMEOUT */
	second(&r, &sshd2, "");
	both_up(&r);
	good_encode(&r, 10, 1);
	assert_int_equal(status_of(&r, 0).errors_by[FS_HOST_ERR_TIMEOUT], 1);
	assert_int_equal(count_log(&r, "enc"), 2);
	fs_vision_destroy(r.v);
}

static void floods_end_the_connection(void **state)
{
	static const char *const what[] = {"data", "pings", "states"};
	for (size_t i = 0; i < FS_ARRAY_LEN(what); i++) {
		struct rig r;
		char knobs[64];
		snprintf(knobs, sizeof(knobs), "--flood %s --once %%O", what[i]);
		rig_up(&r, knobs);
		good_encode(&r, 100, 4);
		assert_int_equal(count_log(&r, "enc"), 2);
		assert_int_equal(status_of(&r, 0).errors_by[FS_HOST_ERR_LOST], 1);
		fs_vision_destroy(r.v);
	}
}

/* ---- late pictures ---- */

/* Both are measured: the first one fast, the second one slow. The next picture goes to the first. */
static void hedge_up(struct rig *r, const char *first, const char *other)
{
	prepare(r, first);
	second(r, &sshd2, other);
	r->o.hedge = 2;
	both_up(r);
	good_encode(r, 10, 1);
	good_encode(r, 10, 1);
	assert_int_equal(status_of(r, 0).encodes, 1);
	assert_int_equal(status_of(r, 1).encodes, 1);
}

static void wait_hedged(const struct rig *r, uint64_t n)
{
	int64_t until = fs_deadline_ms(90000);
	while (status_of(r, 0).hedged < n) {
		assert_true(fs_now() < until);
		poll(NULL, 0, 2);
	}
	wait_log(r, "enc", 3 + n);
}

static void late_pictures_get_a_second_host(void **state)
{
	struct rig r;
	hedge_up(&r, "--late-from 2 --late 600000", "--delay 1200");
	struct fs_vision_job *j = submit(&r, 100, 7, NULL);
	struct fs_rows *rows = NULL;
	struct fs_errbuf e;
	assert_int_equal(fs_vision_wait(j, &rows, &e), FS_OK);
	assert_string_equal(rows->host, r.host2);
	check_rows(rows, 100, 7);
	fs_rows_unref(rows);
	fs_vision_job_destroy(j);
	wait_log(&r, "cancel", 1); /* the late one */
	struct fs_host_status a = status_of(&r, 0), b = status_of(&r, 1);
	assert_int_equal(a.hedged, 1);
	assert_int_equal(a.hedge_wins, 0);
	assert_int_equal(b.hedge_wins, 1);
	assert_int_equal(b.encodes, 2);
	assert_int_equal(a.errors + b.errors, 0);
	fs_vision_destroy(r.v);
}

static void the_second_host_is_told_when_it_was_not_needed(void **state)
{
	struct rig r;
	hedge_up(&r, "--late-from 2 --late 3000", "--delay 1200 --late-from 2 --late 600000");
	struct fs_vision_job *j = submit(&r, 100, 7, NULL);
	get_rows(j, 100, 7);
	wait_log(&r, "cancel", 1);
	struct fs_host_status a = status_of(&r, 0), b = status_of(&r, 1);
	assert_int_equal(a.hedged, 1);
	assert_int_equal(a.encodes, 2);
	assert_int_equal(b.hedge_wins, 0);
	assert_int_equal(b.encodes, 1);
	fs_vision_destroy(r.v);
}

static void either_host_of_a_late_picture_may_be_lost(void **state)
{
	struct rig r;
	for (int which = 1; which <= 3; which++) { /* the first, the second, both */
		hedge_up(&r, "--late-from 2 --late 3000", "--delay 1200 --late-from 2 --late 3000");
		struct fs_vision_job *j = submit(&r, 100, 7, NULL);
		wait_hedged(&r, 1);
		if (which & 1)
			assert_true(test_sshd_signal_sessions(&sshd, SIGKILL) > 0);
		if (which & 2)
			assert_true(test_sshd_signal_sessions(&sshd2, SIGKILL) > 0);
		get_rows(j, 100, 7);
		assert_int_equal(status_of(&r, 0).errors_by[FS_HOST_ERR_LOST], which & 1);
		assert_int_equal(status_of(&r, 1).errors_by[FS_HOST_ERR_LOST], which >> 1);
		fs_vision_destroy(r.v);
	}
}

static void cancelled_late_pictures_leave_both_hosts(void **state)
{
	struct rig r;
	hedge_up(&r, "--late-from 2 --late 600000", "--delay 1200 --late-from 2 --late 600000");
	struct fs_vision_job *j = submit(&r, 100, 7, NULL);
	wait_hedged(&r, 1);
	fs_vision_job_destroy(j);
	wait_log(&r, "cancel", 2);
	assert_int_equal(status_of(&r, 0).outstanding + status_of(&r, 1).outstanding, 0);
	/* and the end may come while a second host works */
	j = submit(&r, 100, 7, NULL);
	wait_hedged(&r, 2);
	fs_vision_destroy(r.v);
	fs_vision_job_destroy(j);
}

static void the_pictures_own_fault_is_final(void **state)
{
	struct rig r;
	hedge_up(&r, "--late-from 2 --late 600000", "--delay 1200 --refuse-from 2 --refuse 4 'no JPEG'");
	struct fs_vision_job *j = submit(&r, 100, 7, NULL);
	struct fs_rows *rows = NULL;
	struct fs_errbuf e;
	assert_int_equal(fs_vision_wait(j, &rows, &e), FS_EINVAL);
	assert_non_null(strstr(e.text, "no JPEG"));
	fs_vision_job_destroy(j);
	wait_log(&r, "cancel", 1);
	fs_vision_destroy(r.v);
}

/* ---- hosts that sleep, and that move ---- */

static int udp_listener(char *to, size_t cap)
{
	struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	socklen_t n = sizeof(at);
	int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	assert_int_equal(bind(fd, (struct sockaddr *)&at, n), 0);
	assert_int_equal(getsockname(fd, (struct sockaddr *)&at, &n), 0);
	snprintf(to, cap, "127.0.0.1:%d", ntohs(at.sin_port));
	return fd;
}

static int count_packets(int fd, int wait_ms)
{
	uint8_t packet[200];
	struct pollfd p = {.fd = fd, .events = POLLIN};
	int n = 0;
	while (poll(&p, 1, n < 3 ? wait_ms : 100) > 0 && recv(fd, packet, sizeof(packet), 0) == 102)
		n++;
	return n;
}

static void sleeping_hosts_are_woken_by_a_picture_alone(void **state)
{
	struct rig r;
	char to[32];
	int fd = udp_listener(to, sizeof(to));
	test_sshd_stop(&sshd);
	prepare(&r, "");
	r.o.hosts[0].wol = "02:00:00:00:00:01";
	r.o.hosts[0].wol_broadcast = to;
	start(&r);
	wait_state(&r, 0, FS_HOST_DOWN);
	assert_int_equal(count_packets(fd, 0), 0);
	assert_int_equal(fs_vision_retry_after_s(r.v), 0);
	bad_encode(&r, FS_EUNAVAILABLE, "it was sent a wake-up packet, try again in a moment");
	assert_true(fs_vision_retry_after_s(r.v) > 0);
	assert_int_equal(count_packets(fd, 90000), 3);
	for (int i = 0; i < 20; i++) /* one burst a minute */
		bad_encode(&r, FS_EUNAVAILABLE, r.host);
	assert_int_equal(count_packets(fd, 300), 0);
	test_sshd_start(&sshd);
	wait_state(&r, 0, FS_HOST_UP);
	good_encode(&r, 10, 1);
	assert_int_equal(fs_vision_retry_after_s(r.v), 0);
	assert_int_equal(count_packets(fd, 0), 0);
	fs_vision_destroy(r.v);
	close(fd);
}

static void pictures_wait_for_a_host_that_wakes(void **state)
{
	struct rig r;
	char to[32];
	int fd = udp_listener(to, sizeof(to));
	for (int early = 0; early < 2; early++) {
		test_sshd_stop(&sshd);
		prepare(&r, "");
		r.o.hosts[0].wol = "02:00:00:00:00:01";
		r.o.hosts[0].wol_broadcast = to;
		r.o.wol_wait_ms = 90000;
		start(&r);
		if (!early) /* else the first attempt to connect is still going on, perhaps */
			wait_state(&r, 0, FS_HOST_DOWN);
		struct fs_vision_job *j = submit(&r, 10, 1, NULL);
		assert_int_equal(count_packets(fd, 90000), 3);
		test_sshd_start(&sshd);
		get_rows(j, 10, 1);
		fs_vision_destroy(r.v);
	}
	close(fd);
}

static void waiting_for_a_host_that_wakes_is_bounded(void **state)
{
	struct rig r;
	char to[32];
	int fd = udp_listener(to, sizeof(to));
	test_sshd_stop(&sshd);
	prepare(&r, "");
	r.o.hosts[0].wol = "02:00:00:00:00:01";
	r.o.hosts[0].wol_broadcast = to;
	r.o.wol_wait_ms = 1500;
	start(&r);
	wait_state(&r, 0, FS_HOST_DOWN);
	int64_t began = fs_now();
	bad_encode(&r, FS_EUNAVAILABLE, "wake-up packet");
	assert_true(fs_now() - began > 1400 * FS_MS && fs_now() - began < 60 * FS_SEC);
	struct fs_vision_job *j = NULL;
	struct fs_errbuf e;
	assert_int_equal(fs_vision_submit(r.v, "x", 1, key, NULL, NULL, &j, &e),
	        FS_EUNAVAILABLE); /* it had its time */
	test_sshd_start(&sshd);
	fs_vision_destroy(r.v);
	close(fd);
}

static void bad_wake_up_addresses_are_refused(void **state)
{
	struct rig r;
	struct fs_errbuf e;
	prepare(&r, "");
	r.o.hosts[0].wol = "nonsense";
	assert_int_equal(fs_vision_create(&r.o, &r.v, &e), FS_EINVAL);
	assert_non_null(strstr(e.text, "is no MAC address"));
}

/* When the host came up; waits until it is. */
static int64_t up_since(const struct rig *r)
{
	struct fs_host_status st[FS_VISION_MAX_HOSTS];
	wait_state(r, 0, FS_HOST_UP);
	fs_vision_status(r->v, st, FS_VISION_MAX_HOSTS);
	return st[0].since;
}

static void an_alias_that_moves_is_followed(void **state)
{
	struct rig r;
	char path[200], known[200], text[1024];
	prepare(&r, "");
	snprintf(path, sizeof(path), "%s/alias", sshd.dir);
	snprintf(known, sizeof(known), "%s/known_both", sshd.dir);
	char *a = test_read_file(sshd.known_hosts), *b = test_read_file(sshd2.known_hosts);
	char *both = malloc(strlen(a) + strlen(b) + 1);
	strcat(strcpy(both, a), b);
	test_write_file(known, both, 0600);
	free(a);
	free(b);
	free(both);
	const struct test_sshd *homes[] = {&sshd, &sshd2};
	for (int i = 0; i < 2; i++) {
		snprintf(text, sizeof(text),
		        "Host eyes\n HostName 127.0.0.1\n Port %d\n IdentityFile %s\n IdentityFile %s\n",
		        homes[i]->port, sshd.identity, sshd2.identity);
		test_write_file(path, text, 0600);
		if (i == 0) {
			r.o.hosts[0].host = "eyes";
			r.o.hosts[0].identity = NULL;
			r.o.hosts[0].known_hosts = known;
			r.o.hosts[0].config_file = path;
			start(&r);
			wait_state(&r, 0, FS_HOST_UP);
		} else {
			int64_t before = up_since(&r);
			test_sshd_stop(&sshd);
			while (up_since(&r) == before) /* the loss has been seen, and it is up again */
				poll(NULL, 0, 2);
		}
		good_encode(&r, 10, 1);
	}
	assert_true(test_sshd_signal_sessions(&sshd2, SIGKILL) > 0); /* that is where it went */
	fs_vision_destroy(r.v);
	test_sshd_start(&sshd);
}

int main(int argc, char **argv)
{
	const struct CMUnitTest tests[] = {
	        cmocka_unit_test(waiting_pictures_move_to_a_free_host),
	        cmocka_unit_test(a_host_that_comes_up_takes_its_share),
	        cmocka_unit_test(hosts_that_are_written_alike_have_names_of_their_own),
	        cmocka_unit_test(where_the_time_of_pictures_went_adds_up),
	        cmocka_unit_test(failing_hosts_are_left_alone_for_longer_each_time),
	        cmocka_unit_test(a_host_that_recovers_is_asked_again),
	        cmocka_unit_test(causes_are_counted),
	        cmocka_unit_test(an_encoder_that_hangs_is_not_asked_twice),
	        cmocka_unit_test(floods_end_the_connection),
	        cmocka_unit_test(late_pictures_get_a_second_host),
	        cmocka_unit_test(the_second_host_is_told_when_it_was_not_needed),
	        cmocka_unit_test(either_host_of_a_late_picture_may_be_lost),
	        cmocka_unit_test(cancelled_late_pictures_leave_both_hosts),
	        cmocka_unit_test(the_pictures_own_fault_is_final),
	        cmocka_unit_test(sleeping_hosts_are_woken_by_a_picture_alone),
	        cmocka_unit_test(pictures_wait_for_a_host_that_wakes),
	        cmocka_unit_test(waiting_for_a_host_that_wakes_is_bounded),
	        cmocka_unit_test(bad_wake_up_addresses_are_refused),
	        cmocka_unit_test(an_alias_that_moves_is_followed),
	};
	return vision_tests(tests, argc, argv);
}
