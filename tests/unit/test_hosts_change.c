/*
 * Other hosts for a vision that works: fake agents behind real sshds come, go and change while pictures are
 * on their way.
 */
#include "tests/unit/vision_rig.h"

static char second_log[256];

/* Two hosts with a log each; the first one alone is in r.o. */
static void prepare_two(
        struct rig *r, const char *args, const char *args2, struct fs_vision_host_opts both[2])
{
	char own[1024];
	prepare(r, args);
	snprintf(second_log, sizeof(second_log), "%s/second%d", sshd.dir, n_tests);
	snprintf(own, sizeof(own), "--log %s %s", second_log, args2);
	expand(r, r->command2, sizeof(r->command2), own);
	add_host(r, &sshd2, r->host2, r->command2);
	both[0] = r->o.hosts[0];
	both[1] = r->o.hosts[1];
	r->o.n_hosts = 1;
}

static size_t count_log2(const struct rig *r, const char *word)
{
	struct rig other = *r;
	memcpy(other.log, second_log, sizeof(second_log));
	return count_log(&other, word);
}

static void wait_log2(const struct rig *r, const char *word, size_t n)
{
	struct rig other = *r;
	memcpy(other.log, second_log, sizeof(second_log));
	wait_log(&other, word, n);
}

static void set(
        struct rig *r, const struct fs_vision_host_opts *hosts, size_t n, size_t added, size_t removed)
{
	struct fs_vision_change c;
	struct fs_errbuf e;
	int64_t until = fs_deadline_ms(60000);
	int rc = fs_vision_set_hosts(r->v, hosts, n, &c, &e);
	while (rc == FS_EUNAVAILABLE && fs_now() < until) { /* the last ones are on their way out */
		poll(NULL, 0, 2);
		rc = fs_vision_set_hosts(r->v, hosts, n, &c, &e);
	}
	if (rc)
		fail_msg("%s", e.text);
	assert_int_equal(c.added, added);
	assert_int_equal(c.removed, removed);
	assert_int_equal(c.kept, n - added);
}

static size_t n_hosts(const struct rig *r)
{
	struct fs_host_status st[FS_VISION_MAX_HOSTS];
	return fs_vision_status(r->v, st, FS_VISION_MAX_HOSTS);
}

static void get_rows_of(struct fs_vision_job *j, size_t n, uint8_t fill, const char *host)
{
	struct fs_rows *rows = NULL;
	struct fs_errbuf e;
	int rc = fs_vision_wait(j, &rows, &e);
	if (rc)
		fail_msg("%s: %s", fs_err_name(rc), e.text);
	check_rows(rows, n, fill);
	assert_string_equal(rows->host, host);
	fs_rows_unref(rows);
	fs_vision_job_destroy(j);
}

static void a_vision_without_hosts_gets_some_and_loses_them(void **state)
{
	struct rig r;
	struct fs_vision_host_opts both[2];
	prepare_two(&r, "", "", both);
	r.o.n_hosts = 0;
	start(&r);
	assert_false(fs_vision_has_hosts(r.v));
	bad_encode(&r, FS_EUNAVAILABLE, "no vision host is configured");
	for (int i = 0; i < 40; i++) { /* more often than there are slots */
		set(&r, both, 1, 1, 0);
		assert_true(fs_vision_has_hosts(r.v));
		if (i % 20 == 0)
			good_encode(&r, 100, (uint8_t)i);
		set(&r, both, 0, 0, 1);
		assert_int_equal(n_hosts(&r), 0);
	}
	bad_encode(&r, FS_EUNAVAILABLE, "no vision host is configured");
	fs_vision_destroy(r.v);
}

static void a_new_host_is_used_and_the_old_one_is_not_disturbed(void **state)
{
	struct rig r;
	struct fs_vision_host_opts both[2];
	struct fs_vision_job *j[8];
	prepare_two(&r, "--serial --delay 300", "--serial --delay 5", both);
	start(&r);
	wait_state(&r, 0, FS_HOST_UP);
	for (int i = 0; i < 8; i++)
		j[i] = submit(&r, 50, (uint8_t)i, NULL);
	wait_log(&r, "enc", 1);
	set(&r, both, 2, 1, 0);
	for (int i = 0; i < 8; i++) {
		struct fs_rows *rows = NULL;
		assert_int_equal(fs_vision_wait(j[i], &rows, NULL), FS_OK);
		check_rows(rows, 50, (uint8_t)i);
		fs_rows_unref(rows);
		fs_vision_job_destroy(j[i]);
	}
	assert_true(count_log2(&r, "enc") > 0); /* it took what waited */
	assert_int_equal(count_log(&r, "hello"), 1);
	assert_int_equal(count_log(&r, "enc") + count_log2(&r, "enc"), 8); /* none twice */
	fs_vision_destroy(r.v);
}

static void a_removed_host_finishes_what_it_has_and_the_rest_moves(void **state)
{
	enum { N = 6 };
	struct rig r;
	struct fs_vision_host_opts both[2];
	struct fs_vision_job *j[N];
	prepare_two(&r, "--serial --delay 1500", "", both);
	start(&r);
	wait_state(&r, 0, FS_HOST_UP);
	for (int i = 0; i < N; i++)
		j[i] = submit(&r, 50, (uint8_t)i, NULL);
	wait_log(&r, "enc", 2);
	set(&r, &both[1], 1, 1, 1);
	assert_int_equal(n_hosts(&r), 1);
	for (int i = 0; i < N; i++)
		get_rows_of(j[i], 50, (uint8_t)i, i < 2 ? r.host : r.host2);
	wait_log(&r, "bye", 1);
	assert_int_equal(count_log(&r, "enc"), 2);
	assert_int_equal(count_log2(&r, "enc"), N - 2);
	good_encode(&r, 50, 9);
	fs_vision_destroy(r.v);
}

static void what_a_removed_host_loses_is_tried_elsewhere(void **state)
{
	struct rig r;
	struct fs_vision_host_opts both[2];
	prepare_two(&r, "--hang", "", both);
	start(&r);
	wait_state(&r, 0, FS_HOST_UP);
	struct fs_vision_job *j = submit(&r, 50, 3, NULL), *left = submit(&r, 50, 4, NULL);
	wait_log(&r, "enc", 2);
	set(&r, &both[1], 1, 1, 1);
	wait_state(&r, 0, FS_HOST_UP);
	fs_vision_job_destroy(left); /* its client went: told to the host that is leaving */
	wait_log(&r, "cancel", 1);
	assert_true(test_sshd_signal_sessions(&sshd, SIGKILL) > 0);
	get_rows_of(j, 50, 3, r.host2);
	good_encode(&r, 60, 4);
	assert_int_equal(count_log(&r, "hello"), 1); /* nobody dialled it again */
	fs_vision_destroy(r.v);
}

static void a_host_with_other_settings_is_replaced_and_others_are_left_alone(void **state)
{
	struct rig r;
	struct fs_vision_host_opts both[2], changed[2];
	char command[1100];
	prepare_two(&r, "--delay 800", "--delay 5", both);
	r.o.n_hosts = 2;
	start(&r);
	wait_state(&r, 0, FS_HOST_UP);
	wait_state(&r, 1, FS_HOST_UP);
	memcpy(changed, both, sizeof(changed));
	snprintf(command, sizeof(command), "%s --rows 5", r.command);
	changed[0].command = command;
	struct fs_vision_job *j = submit(&r, 50, 3, NULL);
	wait_log(&r, "enc", 1);
	set(&r, changed, 2, 1, 1);
	wait_state(&r, 0, FS_HOST_UP);
	wait_log(&r, "hello", 2);
	get_rows_of(j, 50, 3, r.host);
	wait_log(&r, "bye", 1);
	/* the same again, and in another order, is no change */
	set(&r, changed, 2, 0, 0);
	struct fs_vision_host_opts turned[2] = {changed[1], changed[0]};
	set(&r, turned, 2, 0, 0);
	struct fs_host_status st[FS_VISION_MAX_HOSTS];
	assert_int_equal(fs_vision_status(r.v, st, FS_VISION_MAX_HOSTS), 2);
	assert_string_equal(st[0].host, r.host2);
	assert_string_equal(st[1].host, r.host);
	good_encode(&r, 50, 9);
	assert_int_equal(count_log(&r, "hello"), 2);
	assert_int_equal(count_log2(&r, "hello"), 1);
	assert_int_equal(count_log2(&r, "bye"), 0);
	fs_vision_destroy(r.v);
}

static void wrong_hosts_change_nothing(void **state)
{
	struct rig r;
	struct fs_vision_host_opts both[2];
	struct fs_vision_change c;
	struct fs_errbuf e;
	prepare_two(&r, "", "", both);
	start(&r);
	wait_state(&r, 0, FS_HOST_UP);
	struct fs_vision_host_opts wrong[2] = {both[1], both[1]};
	wrong[1].wol = "no address";
	assert_int_equal(fs_vision_set_hosts(r.v, wrong, 2, &c, &e), FS_EINVAL);
	assert_non_null(strstr(e.text, "is no MAC address"));
	assert_int_equal(n_hosts(&r), 1);
	good_encode(&r, 50, 1);
	assert_int_equal(count_log(&r, "hello"), 1);
	assert_int_equal(count_log(&r, "bye"), 0);
	fs_vision_destroy(r.v);
}

/* While the first host stays, its model binds the second; without it, it does not. */
static void the_model_of_a_removed_host_binds_nobody(void **state)
{
	struct rig r;
	struct fs_vision_host_opts both[2];
	prepare_two(&r, "", "--fingerprint ffeeddccbbaa99887766554433221100", both);
	start(&r);
	wait_state(&r, 0, FS_HOST_UP);
	set(&r, both, 2, 1, 0);
	wait_state(&r, 1, FS_HOST_DOWN);
	set(&r, &both[1], 1, 0, 1);
	wait_state(&r, 0, FS_HOST_UP);
	good_encode(&r, 50, 1);
	wait_log2(&r, "enc", 1);
	fs_vision_destroy(r.v);
}

/* The same name, but a host of other settings: another machine, for all that is known. */
static void the_model_of_a_replaced_host_binds_nobody(void **state)
{
	struct rig r;
	struct fs_vision_host_opts both[2], changed;
	char command[1200];
	prepare_two(&r, "", "", both);
	start(&r);
	wait_state(&r, 0, FS_HOST_UP);
	changed = both[0];
	snprintf(command, sizeof(command), "%s --fingerprint ffeeddccbbaa99887766554433221100", r.command);
	changed.command = command;
	set(&r, &changed, 1, 1, 1);
	wait_state(&r, 0, FS_HOST_UP);
	good_encode(&r, 50, 1);
	set(&r, both, 2, 2, 1); /* now its model is the one that binds, until it goes as well */
	wait_state(&r, 0, FS_HOST_UP);
	wait_state(&r, 1, FS_HOST_UP);
	fs_vision_destroy(r.v);
}

static void wait_first_cause(const struct rig *r, const char *text, const char *and_text)
{
	struct fs_host_status st[FS_VISION_MAX_HOSTS];
	int64_t until = fs_deadline_ms(90000);
	for (;;) {
		fs_vision_status(r->v, st, FS_VISION_MAX_HOSTS);
		if (strstr(st[0].cause, text) && strstr(st[0].cause, and_text))
			return;
		if (fs_now() > until)
			fail_msg("host is %s (%s)", fs_host_state_name(st[0].state), st[0].cause);
		poll(NULL, 0, 2);
	}
}

/* A host that was given another model by its admin; the second one follows later. */
static void the_model_of_a_host_may_change(void **state)
{
	struct rig r;
	struct fs_vision_host_opts both[2];
	char first[1600], second[1600], identity[2][FS_VISION_IDENTITY];
	static const char at_will[] =
	        "test -e %s && set -- --fingerprint ffeeddccbbaa99887766554433221100; %s \"$@\"";
	char given[300], given2[300];
	prepare_two(&r, "", "", both);
	snprintf(given, sizeof(given), "%s.given", second_log);
	snprintf(given2, sizeof(given2), "%s.given2", second_log);
	snprintf(first, sizeof(first), at_will, given, r.command);
	snprintf(second, sizeof(second), at_will, given2, r.command2);
	r.o.hosts[0].command = first;
	r.o.hosts[1].command = second;
	r.o.n_hosts = 2;
	start(&r);
	wait_state(&r, 0, FS_HOST_UP);
	wait_state(&r, 1, FS_HOST_UP);
	test_write_file(given, "", 0);
	assert_true(test_sshd_signal_sessions(&sshd, SIGKILL) > 0);
	wait_first_cause(&r, "it has another mmproj (ffeeddccbbaa99887766554433221100) than", r.host2);
	good_encode(&r, 50, 1);
	fs_vision_identity(r.v, identity[0]);
	test_write_file(given2, "", 0);
	assert_true(test_sshd_signal_sessions(&sshd2, SIGKILL) > 0);
	wait_log2(&r, "hello", 2);
	wait_state(&r, 0, FS_HOST_UP);
	wait_state(&r, 1, FS_HOST_UP);
	good_encode(&r, 50, 2);
	fs_vision_identity(r.v, identity[1]);
	assert_string_not_equal(identity[0], identity[1]);
	fs_vision_destroy(r.v);
}

int main(int argc, char **argv)
{
	const struct CMUnitTest tests[] = {
	        cmocka_unit_test(a_vision_without_hosts_gets_some_and_loses_them),
	        cmocka_unit_test(a_new_host_is_used_and_the_old_one_is_not_disturbed),
	        cmocka_unit_test(a_removed_host_finishes_what_it_has_and_the_rest_moves),
	        cmocka_unit_test(what_a_removed_host_loses_is_tried_elsewhere),
	        cmocka_unit_test(a_host_with_other_settings_is_replaced_and_others_are_left_alone),
	        cmocka_unit_test(wrong_hosts_change_nothing),
	        cmocka_unit_test(the_model_of_a_removed_host_binds_nobody),
	        cmocka_unit_test(the_model_of_a_replaced_host_binds_nobody),
	        cmocka_unit_test(the_model_of_a_host_may_change),
	};
	return vision_tests(tests, argc, argv);
}
