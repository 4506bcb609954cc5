/*
 * server/vision/local: an encoder on this machine. What it answers, what it may do wrong, how it is started,
 * cancelled and ended, and who takes the turn.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "tests/unit/local_rig.h"

#include "server/service/turn.h"

#include <errno.h>

static struct fs_errbuf e;
static const uint8_t key[32] = {1};

static void start(struct rig *r)
{
	rig_create(r);
	int rc = fs_vision_wait_ready(r->v, -1, &e);
	if (rc)
		print_error("%s\n", e.text);
	assert_int_equal(rc, FS_OK);
}

static struct fs_vision_job *submit(struct rig *r, const char *picture, struct fs_cancel *cancel)
{
	struct fs_vision_job *j = NULL;
	int rc = fs_vision_submit(r->v, picture, strlen(picture), key, NULL, cancel, &j, &e);
	if (rc)
		print_error("%s\n", e.text);
	assert_int_equal(rc, FS_OK);
	return j;
}

static int encode(struct rig *r, const char *picture, struct fs_rows **rows)
{
	struct fs_vision_job *j = NULL;
	int rc = fs_vision_submit(r->v, picture, strlen(picture), key, NULL, NULL, &j, &e);
	if (!rc)
		rc = fs_vision_wait(j, rows, &e);
	fs_vision_job_destroy(j);
	return rc;
}

static void good_encode(struct rig *r, const char *picture)
{
	struct fs_rows *rows = NULL;
	int rc = encode(r, picture, &rows);
	if (rc)
		print_error("%s\n", e.text);
	assert_int_equal(rc, FS_OK);
	assert_true(rig_rows_are_of(rows, picture));
	fs_rows_unref(rows);
}

static void bad_encode(struct rig *r, const char *picture, int err, const char *text)
{
	struct fs_rows *rows = NULL;
	assert_int_equal(encode(r, picture, &rows), err);
	if (!strstr(e.text, text))
		print_error("\"%s\" lacks \"%s\"\n", e.text, text);
	assert_non_null(strstr(e.text, text));
}

static int files_in(const char *path_of_a_file)
{
	char folder[256];
	snprintf(folder, sizeof(folder), "%s", path_of_a_file);
	*strrchr(folder, '/') = '\0';
	DIR *d = opendir(folder);
	int n = 0;
	if (!d)
		return -1;
	for (struct dirent *f; (f = readdir(d));)
		n += f->d_name[0] != '.';
	closedir(d);
	return n;
}

/* ---- good answers ---- */

static void rows_come_and_no_file_stays(void **state)
{
	char file[300];
	struct rig r;
	rig_prepare(&r, "--rows 3x2", true);
	start(&r);
	struct fs_rows *rows = NULL;
	assert_int_equal(encode(&r, "a picture", &rows), FS_OK);
	assert_int_equal(rows->shape.nx, 3);
	assert_int_equal(rows->shape.ny, 2);
	assert_true(rig_rows_are_of(rows, "a picture"));
	assert_string_equal(rows->host, "local");
	assert_memory_equal(rows->key, key, 32);
	fs_rows_unref(rows);
	assert_int_equal(rig_events(&r, "file ", file, sizeof(file)), 1);
	struct stat st;
	*strrchr(file, '/') = '\0';
	assert_int_equal(stat(file, &st), 0);
	assert_int_equal(st.st_mode & 0777, 0700);
	strcat(file, "/x");
	assert_int_equal(files_in(file), 0);
	struct fs_host_status s = rig_status(&r);
	assert_string_equal(s.host, "local");
	assert_int_equal(s.state, FS_HOST_UP);
	assert_string_equal(s.device, "fake");
	assert_int_equal(s.encodes, 1);
	rig_finish(&r);
	assert_int_equal(files_in(file), -1);
}

static void it_is_told_what_is_configured(void **state)
{
	char limits[64];
	struct rig r;
	rig_prepare(&r, "", true);
	r.local.gpu = true;
	r.local.threads = 3;
	r.local.model = "text.gguf";
	r.o.max_tokens = 64;
	start(&r);
	static const char *const args[] = {"arg --mmproj", "arg none.gguf", "arg --model", "arg text.gguf",
	        "arg --gpu", "arg --threads", "arg 3", "arg --max-tokens", "arg 64", "arg --extended"};
	for (size_t i = 0; i < FS_ARRAY_LEN(args); i++)
		assert_int_equal(rig_events(&r, args[i], NULL, 0), 1);
	assert_int_equal(rig_events(&r, "arg --min-tokens", NULL, 0), 0);
	static const struct fs_encode_params asked[] = {{0, 0}, {4, 16}, {0, 100}, {90, 0}};
	static const char *const told[] = {" max=64", " min=4 max=16", " max=64", " min=64 max=64"};
	for (size_t i = 0; i < FS_ARRAY_LEN(asked); i++) {
		struct fs_vision_job *j = NULL;
		struct fs_rows *rows = NULL;
		assert_int_equal(fs_vision_submit(r.v, "x", 1, key, &asked[i], NULL, &j, &e), FS_OK);
		assert_int_equal(fs_vision_wait(j, &rows, &e), FS_OK);
		fs_rows_unref(rows);
		fs_vision_job_destroy(j);
		assert_int_equal(rig_events(&r, "limits", limits, sizeof(limits)), i + 1);
		assert_string_equal(limits, told[i]);
	}
	rig_finish(&r);
	rig_prepare(&r, "", false);
	start(&r);
	good_encode(&r, "plain");
	static const char *const absent[] = {
	        "arg --gpu", "arg --threads", "arg --max-tokens", "arg --extended", "arg --model", "limits"};
	for (size_t i = 0; i < FS_ARRAY_LEN(absent); i++)
		assert_int_equal(rig_events(&r, absent[i], NULL, 0), 0);
	rig_finish(&r);
}

static void pictures_go_one_by_one_in_order(void **state)
{
	struct rig r;
	struct fs_vision_job *j[4];
	static const char *const pictures[] = {
	        "FAKE delay=30 a", "FAKE bb", "FAKE delay=10 ccc", "FAKE dddd"};
	rig_prepare(&r, "", false);
	start(&r);
	for (size_t i = 0; i < FS_ARRAY_LEN(j); i++)
		j[i] = submit(&r, pictures[i], NULL);
	for (size_t i = FS_ARRAY_LEN(j); i-- > 0;) {
		struct fs_rows *rows = NULL;
		assert_int_equal(fs_vision_wait(j[i], &rows, &e), FS_OK);
		assert_true(rig_rows_are_of(rows, pictures[i]));
		fs_rows_unref(rows);
		fs_vision_job_destroy(j[i]);
	}
	FILE *f = fopen(r.log, "re");
	char line[256];
	size_t seen = 0;
	while (fgets(line, sizeof(line), f))
		if (strncmp(line, "enc ", 4) == 0)
			assert_int_equal(atoi(line + 4), strlen(pictures[seen++]));
	fclose(f);
	assert_int_equal(seen, FS_ARRAY_LEN(j));
	rig_finish(&r);
}

/* ---- faults ---- */

static void its_err_is_the_pictures_fault(void **state)
{
	struct rig r;
	rig_prepare(&r, "", true);
	start(&r);
	bad_encode(&r, "FAKE err=unreadable", FS_EINVAL, "unreadable");
	good_encode(&r, "next");
	assert_int_equal(rig_events(&r, "start ", NULL, 0), 1);
	rig_finish(&r);
}

static void a_death_is_told_and_healed(void **state)
{
	struct rig r;
	rig_prepare(&r, "", true);
	start(&r);
	struct fs_vision_job *behind;
	struct fs_vision_job *dies = submit(&r, "FAKE delay=1000 die", NULL);
	behind = submit(&r, "behind it", NULL);
	struct fs_rows *rows = NULL;
	assert_int_equal(fs_vision_wait(dies, &rows, &e), FS_EUNAVAILABLE);
	assert_non_null(strstr(e.text, "local: the encoder was ended by signal 9"));
	assert_int_equal(fs_vision_wait(behind, &rows, &e), FS_EUNAVAILABLE);
	assert_non_null(strstr(e.text, "signal 9"));
	fs_vision_job_destroy(dies);
	fs_vision_job_destroy(behind);
	/* during the back-off: at once, with the cause */
	assert_int_equal(rig_status(&r).state, FS_HOST_DOWN);
	struct fs_vision_job *j = NULL;
	assert_int_equal(fs_vision_submit(r.v, "x", 1, key, NULL, NULL, &j, &e), FS_EUNAVAILABLE);
	assert_non_null(strstr(e.text, "local: the encoder was ended by signal 9"));
	rig_wait_state(&r, FS_HOST_UP);
	good_encode(&r, "back again");
	assert_int_equal(rig_events(&r, "start ", NULL, 0), 2);
	rig_finish(&r);
}

static void answers_that_are_no_good_end_it(void **state)
{
	static const struct {
		const char *picture, *text;
	} cases[] = {
	        {"FAKE nonsense", "answered nonsense"},
	        {"FAKE longline", "a line of more than"},
	        {"FAKE nan", "the encoder's rows are no good"},
	        {"FAKE norows", "the encoder's rows are no good"},
	        {"FAKE short", "the encoder's rows are no good"},
	        {"FAKE embd=9", "it told 4 rows of 8 and wrote 4 of 9"},
	};
	for (size_t i = 0; i < FS_ARRAY_LEN(cases); i++) {
		char file[300];
		struct rig r;
		rig_prepare(&r, "", i % 2 == 0);
		start(&r);
		bad_encode(&r, cases[i].picture, FS_EUNAVAILABLE, cases[i].text);
		rig_wait_state(&r, FS_HOST_DOWN);
		assert_non_null(strstr(rig_status(&r).cause, cases[i].text));
		rig_events(&r, "file ", file, sizeof(file));
		assert_int_equal(files_in(file), 0);
		if (i == 0 || i == 5) { /* each costs a back-off */
			rig_wait_state(&r, FS_HOST_UP);
			good_encode(&r, "again");
			assert_int_equal(rig_events(&r, "start ", NULL, 0), 2);
		}
		rig_finish(&r);
	}
}

static void an_answer_that_nobody_asked_for_ends_it(void **state)
{
	struct rig r;
	rig_prepare(&r, "", true);
	start(&r);
	good_encode(&r, "FAKE twice");
	rig_wait_state(&r, FS_HOST_DOWN);
	assert_non_null(strstr(rig_status(&r).cause, "without being asked"));
	rig_finish(&r);
}

static void silence_has_a_deadline(void **state)
{
	struct rig r;
	rig_prepare(&r, "", false);
	r.o.encode_timeout_ms = 1500; /* of the next picture as well */
	start(&r);
	bad_encode(&r, "FAKE hang", FS_ETIMEOUT, "local: the picture was not encoded within");
	rig_wait_events(&r, "start ", 2); /* it said nothing, was ended, and is back without a pause */
	rig_wait_state(&r, FS_HOST_UP);
	good_encode(&r, "next");
	rig_finish(&r);
}

/* ---- the start ---- */

static void bad_start(const char *args, int ready_timeout_s, const char *text)
{
	struct rig r;
	rig_prepare(&r, args, true);
	r.local.ready_timeout_s = ready_timeout_s;
	rig_create(&r);
	assert_int_equal(fs_vision_wait_ready(r.v, -1, &e), FS_EUNAVAILABLE);
	if (!strstr(e.text, text))
		print_error("\"%s\" lacks \"%s\"\n", e.text, text);
	assert_non_null(strstr(e.text, text));
	assert_non_null(strstr(e.text, r.exe));
	struct fs_vision_job *j = NULL;
	assert_int_equal(fs_vision_submit(r.v, "x", 1, key, NULL, NULL, &j, &e), FS_EUNAVAILABLE);
	rig_finish(&r);
}

static void a_start_that_fails_says_why(void **state)
{
	bad_start("--exit 3", 60, "the encoder ended with status 3: the fake model is broken");
	bad_start("--start-err 'no such model'", 60, "the encoder did not start: no such model");
	bad_start("--mute", 1, "the encoder was not ready after 1 s");
	bad_start("--embd 16", 60, "rows of 16 values, the text model takes 8");
	struct rig r;
	rig_prepare(&r, "", true);
	r.local.exe = "/nonexistent/encoder";
	rig_create(&r);
	assert_int_equal(fs_vision_wait_ready(r.v, -1, &e), FS_EUNAVAILABLE);
	assert_non_null(strstr(e.text, "can not execute /nonexistent/encoder: No such file"));
	rig_finish(&r);
}

static void a_slow_start_can_be_given_up(void **state)
{
	struct rig r;
	rig_prepare(&r, "--mute", true);
	rig_create(&r);
	rig_wait_events(&r, "start ", 1);
	int stop = fs_wake_open();
	fs_wake(stop);
	assert_int_equal(fs_vision_wait_ready(r.v, stop, &e), FS_ECANCELLED);
	close(stop);
	rig_finish(&r);
}

static void pictures_wait_for_a_start(void **state)
{
	struct rig r;
	rig_prepare(&r, "--ready-delay-ms 200", true);
	rig_create(&r);
	good_encode(&r, "early");
	rig_finish(&r);
}

static void an_elastic_one_comes_and_goes(void **state)
{
	struct rig r;
	rig_prepare(&r, "", true);
	r.local.elastic = true;
	r.local.idle_s = 2;
	start(&r);
	assert_int_equal(rig_status(&r).state, FS_HOST_UP);
	assert_int_equal(access(r.log, F_OK), -1); /* nothing has run yet */
	good_encode(&r, "first");
	good_encode(&r, "second");
	assert_int_equal(rig_events(&r, "start ", NULL, 0), 1);
	rig_wait_events(&r, "end ", 1);
	assert_int_equal(rig_status(&r).state, FS_HOST_UP);
	good_encode(&r, "third");
	assert_int_equal(rig_events(&r, "start ", NULL, 0), 2);
	rig_finish(&r);
}

static void an_elastic_one_that_can_not_start_refuses_its_picture(void **state)
{
	struct rig r;
	rig_prepare(&r, "--exit 3", true);
	r.local.elastic = true;
	start(&r);
	bad_encode(&r, "x", FS_EUNAVAILABLE, "local: the encoder ended with status 3");
	bad_encode(&r, "x", FS_EUNAVAILABLE, "local: the encoder ended with status 3");
	assert_int_equal(rig_events(&r, "start ", NULL, 0), 1); /* the second came during the back-off */
	rig_args(&r, "");
	rig_wait_state(&r, FS_HOST_UP);
	assert_int_equal(rig_events(&r, "start ", NULL, 0), 1); /* asleep until a picture comes */
	good_encode(&r, "y");
	rig_finish(&r);
	rig_prepare(&r, "", true);
	r.local.elastic = true;
	r.local.exe = "/nonexistent/encoder";
	start(&r);
	bad_encode(&r, "x", FS_EUNAVAILABLE, "local: can not execute /nonexistent/encoder");
	rig_finish(&r);
}

/* ---- leaving ---- */

static void cancel_running(const char *picture, bool extended, int starts)
{
	struct rig r;
	struct fs_rows *rows = NULL;
	struct fs_cancel *c = fs_cancel_create(FS_NEVER);
	char file[300];
	rig_prepare(&r, "", extended);
	start(&r);
	struct fs_vision_job *j = submit(&r, picture, c), *behind = submit(&r, "behind it", NULL);
	rig_wait_events(&r, "enc ", 1);
	fs_cancel_fire(c, FS_CANCEL_CLIENT);
	assert_int_equal(fs_vision_wait(j, &rows, &e), FS_ECANCELLED);
	fs_vision_job_destroy(j);
	assert_int_equal(fs_vision_wait(behind, &rows, &e), FS_OK);
	assert_true(rig_rows_are_of(rows, "behind it"));
	fs_rows_unref(rows);
	fs_vision_job_destroy(behind);
	assert_int_equal(rig_events(&r, "cancel", NULL, 0), extended && starts == 1);
	assert_int_equal(rig_events(&r, "start ", NULL, 0), starts);
	rig_events(&r, "file ", file, sizeof(file));
	assert_int_equal(files_in(file), 0);
	fs_cancel_unref(c);
	rig_finish(&r);
}

static void a_running_picture_is_cancelled(void **state)
{
	cancel_running("FAKE hang", true, 1);
	cancel_running("FAKE hang", false, 2);             /* it can not be told, so it is ended */
	cancel_running("FAKE delay=100000 deaf", true, 2); /* nor does it listen */
	cancel_running("FAKE delay=500", false, 1);        /* it answered soon enough to stay */
}

static void a_queued_picture_is_never_seen(void **state)
{
	struct rig r;
	struct fs_rows *rows = NULL;
	struct fs_cancel *c = fs_cancel_create(FS_NEVER);
	rig_prepare(&r, "", true);
	start(&r);
	struct fs_vision_job *first = submit(&r, "FAKE delay=1000", NULL), *second = submit(&r, "second", c);
	rig_wait_events(&r, "enc ", 1);
	fs_cancel_fire(c, FS_CANCEL_CLIENT);
	assert_int_equal(fs_vision_wait(second, &rows, &e), FS_ECANCELLED);
	assert_int_equal(fs_vision_wait(first, &rows, &e), FS_OK);
	fs_rows_unref(rows);
	fs_vision_job_destroy(first);
	fs_vision_job_destroy(second);
	good_encode(&r, "third");
	assert_int_equal(rig_events(&r, "enc ", NULL, 0), 2);
	fs_cancel_unref(c);
	rig_finish(&r);
}

/* Or a zombie: the first process of a container may reap nobody. */
static bool is_gone(const char *pid)
{
	char path[64], st[256] = "";
	snprintf(path, sizeof(path), "/proc/%d/stat", atoi(pid));
	FILE *f = fopen(path, "re");
	bool gone = !f || !fgets(st, sizeof(st), f) || strstr(st, ") Z ");
	if (f)
		fclose(f);
	return gone;
}

static void nothing_stays_when_it_ends(void **state)
{
	char leader[32], child[32];
	struct rig r;
	rig_prepare(&r, "--child --stubborn", false);
	start(&r);
	struct fs_vision_job *j = submit(&r, "FAKE hang", NULL);
	rig_wait_events(&r, "enc ", 1);
	rig_events(&r, "start ", leader, sizeof(leader));
	rig_events(&r, "child ", child, sizeof(child));
	assert_false(is_gone(leader));
	fs_vision_destroy(r.v);
	r.v = NULL;
	assert_true(kill(atoi(leader), 0) != 0 && errno == ESRCH); /* reaped */
	int64_t until = fs_deadline_ms(RIG_LIMIT_MS);
	while (!is_gone(child) && fs_now() < until)
		poll(NULL, 0, 5);
	assert_true(is_gone(child));
	struct fs_rows *rows = NULL;
	assert_int_equal(fs_vision_wait(j, &rows, &e), FS_EUNAVAILABLE);
	fs_vision_job_destroy(j);
	rig_finish(&r);
}

/* ---- the turn ---- */

static uint64_t entries(struct fs_turn *t)
{
	pthread_mutex_lock(&t->lock);
	uint64_t n = t->entries;
	pthread_mutex_unlock(&t->lock);
	return n;
}

static void wait_waiting(struct fs_turn *t, size_t n)
{
	int64_t until = fs_deadline_ms(RIG_LIMIT_MS);
	for (size_t waiting = n + 1; waiting != n; poll(NULL, 0, 1)) {
		pthread_mutex_lock(&t->lock);
		waiting = t->waiting;
		pthread_mutex_unlock(&t->lock);
		assert_true(fs_now() < until);
	}
}

static void only_a_gpu_takes_the_turn(void **state)
{
	for (int gpu = 0; gpu < 4; gpu++) { /* 0 and 3: the CPU */
		struct fs_turn t;
		struct fs_turn_of_encoder of;
		struct rig r;
		assert_int_equal(fs_turn_init(&t, 4), FS_OK);
		rig_prepare(&r, "", true);
		r.local.gpu = gpu == 1;
		r.local.device = gpu == 2 ? "cuda:1" : gpu == 3 ? "auto" : NULL;
		r.local.turn = fs_turn_for_encoder(&of, &t);
		start(&r);
		good_encode(&r, "one");
		assert_int_equal(entries(&t), gpu % 3 ? 1 : 0);
		bad_encode(&r, "FAKE err=two", FS_EINVAL, "two");
		good_encode(&r, "three");
		assert_int_equal(entries(&t), gpu % 3 ? 3 : 0);
		rig_finish(&r);
		fs_turn_finish(&t);
	}
}

static void an_encode_waits_for_its_turn(void **state)
{
	struct fs_turn t;
	struct fs_turn_of_encoder of;
	struct fs_rows *rows = NULL;
	struct fs_cancel *c = fs_cancel_create(FS_NEVER);
	struct rig r;
	assert_int_equal(fs_turn_init(&t, 0), FS_OK); /* no depth: encodes do not count against it */
	rig_prepare(&r, "", true);
	r.local.gpu = true;
	r.local.turn = fs_turn_for_encoder(&of, &t);
	start(&r);
	assert_int_equal(fs_turn_enter(&t, NULL), FS_OK);
	struct fs_vision_job *first = submit(&r, "first", c);
	wait_waiting(&t, 1);
	fs_cancel_fire(c, FS_CANCEL_CLIENT);
	assert_int_equal(fs_vision_wait(first, &rows, &e), FS_ECANCELLED);
	fs_vision_job_destroy(first);
	wait_waiting(&t, 0);
	struct fs_vision_job *second = submit(&r, "second", NULL);
	wait_waiting(&t, 1);
	assert_int_equal(rig_events(&r, "enc ", NULL, 0), 0);
	fs_turn_leave(&t);
	assert_int_equal(fs_vision_wait(second, &rows, &e), FS_OK);
	fs_rows_unref(rows);
	fs_vision_job_destroy(second);
	assert_int_equal(rig_events(&r, "enc ", NULL, 0), 1);
	assert_int_equal(entries(&t), 2);
	fs_cancel_unref(c);
	rig_finish(&r);
	fs_turn_finish(&t);
}

/* The GPU is not free before the encoder has stopped, whoever has left. */
static void a_cancelled_encode_keeps_the_turn_while_it_runs(void **state)
{
	struct fs_turn t;
	struct fs_turn_of_encoder of;
	struct rig r;
	assert_int_equal(fs_turn_init(&t, 0), FS_OK);
	rig_prepare(&r, "", true);
	r.local.gpu = true;
	r.local.turn = fs_turn_for_encoder(&of, &t);
	start(&r);
	struct fs_vision_job *j = submit(&r, "FAKE delay=100000 deaf", NULL);
	rig_wait_events(&r, "enc ", 1);
	fs_vision_job_destroy(j);
	assert_int_equal(fs_turn_enter(&t, NULL), FS_EUNAVAILABLE); /* it is ended after a second */
	rig_wait_events(&r, "start ", 2);
	good_encode(&r, "next");
	assert_int_equal(entries(&t), 2);
	rig_finish(&r);
	fs_turn_finish(&t);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
	        cmocka_unit_test(rows_come_and_no_file_stays),
	        cmocka_unit_test(it_is_told_what_is_configured),
	        cmocka_unit_test(pictures_go_one_by_one_in_order),
	        cmocka_unit_test(its_err_is_the_pictures_fault),
	        cmocka_unit_test(a_death_is_told_and_healed),
	        cmocka_unit_test(answers_that_are_no_good_end_it),
	        cmocka_unit_test(an_answer_that_nobody_asked_for_ends_it),
	        cmocka_unit_test(silence_has_a_deadline),
	        cmocka_unit_test(a_start_that_fails_says_why),
	        cmocka_unit_test(a_slow_start_can_be_given_up),
	        cmocka_unit_test(pictures_wait_for_a_start),
	        cmocka_unit_test(an_elastic_one_comes_and_goes),
	        cmocka_unit_test(an_elastic_one_that_can_not_start_refuses_its_picture),
	        cmocka_unit_test(a_running_picture_is_cancelled),
	        cmocka_unit_test(a_queued_picture_is_never_seen),
	        cmocka_unit_test(nothing_stays_when_it_ends),
	        cmocka_unit_test(only_a_gpu_takes_the_turn),
	        cmocka_unit_test(an_encode_waits_for_its_turn),
	        cmocka_unit_test(a_cancelled_encode_keeps_the_turn_while_it_runs),
	};
	signal(SIGPIPE, SIG_IGN);
	fs_log_set_level(FS_LOG_ERROR);
	return cmocka_run_group_tests(tests, NULL, NULL);
}
