/*
 * Parts of the watchdog on their own: what a service manager is told, the one place a user has, what makes an
 * encoder another one, and how long an encoder's failures are held against it.
 */
#include "common/encproc/encproc.h"
#include "remote/watchdog/config.h"
#include "remote/watchdog/notify.h"
#include "remote/watchdog/place.h"

#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cmocka.h>

static char folder[64];

static int make_folder(void **state)
{
	fs_log_set_level(FS_LOG_ERROR);
	strcpy(folder, "/tmp/farsight-parts-XXXXXX");
	return mkdtemp(folder) ? 0 : -1;
}

static int remove_folder(void **state)
{
	return rmdir(folder);
}

/* ---- notify ---- */

static int manager(const char *name)
{
	struct sockaddr_un a = {.sun_family = AF_UNIX};
	size_t n = strlen(name);
	memcpy(a.sun_path, name, n);
	if (name[0] == '@')
		a.sun_path[0] = 0;
	int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_NONBLOCK, 0);
	assert_int_equal(
	        bind(fd, (struct sockaddr *)&a, (socklen_t)(offsetof(struct sockaddr_un, sun_path) + n)), 0);
	return fd;
}

static void assert_told(int fd, const char *text)
{
	char got[256] = "";
	ssize_t n = recv(fd, got, sizeof(got) - 1, 0);
	if (!text) {
		assert_true(n < 0);
		return;
	}
	assert_true(n > 0);
	assert_string_equal(got, text);
}

static void manager_is_told_at_both_kinds_of_socket(void **state)
{
	char path[128], name[64];
	snprintf(path, sizeof(path), "%s/notify", folder);
	snprintf(name, sizeof(name), "@farsight-parts-%d", (int)getpid());
	const char *const names[] = {path, name};
	for (size_t i = 0; i < FS_ARRAY_LEN(names); i++) {
		struct fs_notify n;
		int fd = manager(names[i]);
		setenv("NOTIFY_SOCKET", names[i], 1);
		fs_notify_init(&n);
		assert_true(fs_notify_wanted(&n));
		assert_null(getenv("NOTIFY_SOCKET"));
		fs_notify_send(&n, "READY=1");
		assert_told(fd, "READY=1");
		fs_notify_status(&n, "%d pictures", 3);
		fs_notify_status(&n, "%d pictures", 3); /* nothing new */
		assert_told(fd, "STATUS=3 pictures");
		assert_told(fd, NULL);
		close(fd); /* a manager that is gone is no error */
		fs_notify_send(&n, "STOPPING=1");
		fs_notify_finish(&n);
		fs_notify_finish(&n);
	}
	unlink(path);
}

static void signs_of_life_follow_the_units_time(void **state)
{
	static const struct {
		const char *usec, *pid;
		int64_t every;
	} cases[] = {{"3000000", NULL, 1500 * FS_MS}, {"3000000", "self", 1500 * FS_MS}, {"3000000", "1", 0},
	        {NULL, NULL, 0}, {"0", NULL, 0}, {"-5", NULL, 0}, {"3s", NULL, 0},
	        {"99999999999999999999", NULL, 0}};
	char path[128], self[16];
	snprintf(path, sizeof(path), "%s/notify", folder);
	snprintf(self, sizeof(self), "%d", (int)getpid());
	int fd = manager(path);
	for (size_t i = 0; i < FS_ARRAY_LEN(cases); i++) {
		struct fs_notify n;
		const char *pid = cases[i].pid;
		setenv("NOTIFY_SOCKET", path, 1);
		if (cases[i].usec)
			setenv("WATCHDOG_USEC", cases[i].usec, 1);
		if (pid)
			setenv("WATCHDOG_PID", strcmp(pid, "self") ? pid : self, 1);
		fs_notify_init(&n);
		assert_int_equal(n.every, cases[i].every);
		assert_null(getenv("WATCHDOG_USEC"));
		assert_null(getenv("WATCHDOG_PID"));
		fs_notify_dispatch(&n); /* the first one at once */
		assert_told(fd, cases[i].every ? "WATCHDOG=1" : NULL);
		fs_notify_dispatch(&n);
		assert_told(fd, NULL);
		fs_notify_finish(&n);
	}
	close(fd);
	unlink(path);
}

static void nobody_asked(void **state)
{
	static char long_path[200];
	memset(long_path, 'x', sizeof(long_path) - 1);
	long_path[0] = '/';
	const char *const names[] = {NULL, "", "@", "vsock:2:1234", "relative", long_path};
	for (size_t i = 0; i < FS_ARRAY_LEN(names); i++) {
		struct fs_notify n;
		struct fs_pollset ps = {.deadline = FS_NEVER};
		if (names[i])
			setenv("NOTIFY_SOCKET", names[i], 1);
		fs_notify_init(&n);
		assert_false(fs_notify_wanted(&n));
		fs_notify_send(&n, "READY=1");
		fs_notify_prepare(&n, &ps);
		assert_true(ps.deadline == FS_NEVER);
		fs_notify_finish(&n);
	}
}

/* ---- place ---- */

static void one_place_one_watchdog(void **state)
{
	struct fs_place a, b;
	struct fs_errbuf e;
	char path[FS_WD_PATH_MAX], lock[FS_WD_PATH_MAX + 8], run[FS_WD_PATH_MAX];
	int fd;
	snprintf(run, sizeof(run), "%s/run", folder);
	snprintf(path, sizeof(path), "%s/w.sock", run);
	snprintf(lock, sizeof(lock), "%s.lock", path);
	assert_int_equal(fs_place_open(&a, path, &e), FS_OK);
	assert_int_equal(fs_place_open(&b, path, &e), FS_EUNAVAILABLE);
	fs_place_finish(&b); /* touches nothing of a's */
	assert_int_equal(fs_wd_connect(path, &fd, &e), FS_OK);
	close(fd);
	/* swept away: made anew */
	unlink(path);
	unlink(lock);
	rmdir(run);
	a.check_at = 0;
	assert_int_equal(fs_place_check(&a), FS_OK);
	assert_int_equal(fs_wd_connect(path, &fd, &e), FS_OK);
	close(fd);
	/* swept away, and another one was faster: the place is its, and stays so */
	unlink(path);
	unlink(lock);
	assert_int_equal(fs_place_open(&b, path, &e), FS_OK);
	a.check_at = 0;
	assert_int_equal(fs_place_check(&a), FS_EUNAVAILABLE);
	assert_int_equal(a.listen_fd, -1);
	a.check_at = 0;
	assert_int_equal(fs_place_check(&a), FS_OK); /* told once */
	fs_place_finish(&a);
	assert_int_equal(fs_wd_connect(path, &fd, &e), FS_OK);
	close(fd);
	fs_place_finish(&b);
	assert_int_equal(access(path, F_OK), -1);
	unlink(lock);
	rmdir(run);
}

static void socket_that_answers_is_found(void **state)
{
	struct fs_place p;
	struct fs_errbuf e;
	char path[FS_WD_PATH_MAX], found[FS_WD_PATH_MAX], part[160];
	setenv("XDG_RUNTIME_DIR", folder, 1);
	snprintf(path, sizeof(path), "%s/farsight/watchdog.sock", folder);
	assert_int_equal(fs_place_open(&p, path, &e), FS_OK);
	assert_int_equal(fs_wd_find_socket(found, &e), FS_OK);
	assert_string_equal(found, path);
	fs_place_finish(&p);
	snprintf(part, sizeof(part), "%s.lock", path);
	unlink(part);
	snprintf(part, sizeof(part), "%s/farsight", folder);
	rmdir(part);
	unsetenv("XDG_RUNTIME_DIR");
}

/* ---- settings ---- */

static void write_text(const char *path, const char *text)
{
	FILE *f = fopen(path, "w");
	assert_non_null(f);
	fputs(text, f);
	fclose(f);
}

static void load(const char *path, const char *text, struct fs_buf *command, struct fs_buf *files)
{
	static struct fs_wd_config c;
	struct fs_errbuf e;
	write_text(path, text);
	assert_int_equal(fs_wd_config_load(&c, path, &e), FS_OK);
	assert_int_equal(fs_wd_config_command(&c, command), FS_OK);
	assert_int_equal(fs_wd_config_files(&c, files), FS_OK);
	fs_wd_config_finish(&c);
}

static bool same(const struct fs_buf *a, const struct fs_buf *b)
{
	return a->len == b->len && !memcmp(a->data, b->data, a->len);
}

static void what_makes_another_encoder(void **state)
{
	static const struct {
		const char *more;
		bool other;
	} cases[] = {{"", false}, {", \"threads\": 2", true}, {", \"gpu\": true", true},
	        {", \"device\": \"cuda:1\"", true}, {", \"model\": \"/t\"", true},
	        {", \"max_tokens\": 9", true}, {", \"min_tokens\": 9", true}, {", \"extended\": true", true},
	        {", \"encoder_args\": [\"a b\"]", true}, {", \"encode_timeout_s\": 9", false},
	        {", \"max_queue\": 9", false}, {", \"log_level\": \"debug\"", false},
	        {", \"keep_warm\": true", false}};
	struct fs_buf base, files, command, files_now;
	char path[128], model[128], text[512];
	snprintf(path, sizeof(path), "%s/vision-host.json", folder);
	snprintf(model, sizeof(model), "%s/m.gguf", folder);
	write_text(model, "one");
	fs_buf_init(&base, 65536);
	fs_buf_init(&files, 1024);
	fs_buf_init(&command, 65536);
	fs_buf_init(&files_now, 1024);
	load(path, "{\"mmproj\": \"m.gguf\", \"encoder\": \"/bin/true\"}", &base, &files);
	for (size_t i = 0; i < FS_ARRAY_LEN(cases); i++) {
		snprintf(text, sizeof(text), "{\"mmproj\": \"m.gguf\", \"encoder\": \"/bin/true\"%s}",
		        cases[i].more);
		load(path, text, &command, &files_now);
		assert_int_equal(!same(&base, &command), cases[i].other);
	}
	load(path, "{\"mmproj\": \"m.gguf\", \"encoder\": \"/bin/true\"}", &command, &files_now);
	assert_true(same(&files, &files_now));
	char fresh[160];
	snprintf(fresh, sizeof(fresh), "%s.new", model);
	write_text(fresh, "one");
	assert_int_equal(rename(fresh, model), 0);
	load(path, "{\"mmproj\": \"m.gguf\", \"encoder\": \"/bin/true\"}", &command, &files_now);
	assert_true(same(&base, &command));
	assert_false(same(&files, &files_now));
	fs_buf_finish(&base);
	fs_buf_finish(&files);
	fs_buf_finish(&command);
	fs_buf_finish(&files_now);
	unlink(path);
	unlink(model);
}

/* ---- failures of an encoder ---- */

static void failure_long_ago_is_forgiven_when_somebody_comes(void **state)
{
	struct fs_encproc_opts o = {.program = "/nowhere/encoder", .mmproj = "m", .stop_grace_ms = 1};
	struct fs_encproc p;
	fs_encproc_init(&p, &o, NULL, NULL);
	p.failures = 10;
	fs_encproc_want(&p, true);
	assert_int_equal(p.state, FS_ENC_BACKOFF);
	fs_encproc_hurry(&p);
	assert_int_equal(p.failures, 11);
	p.failed_at -= 20 * FS_SEC;
	fs_encproc_hurry(&p);
	assert_int_equal(p.failures, 0);
	assert_true(p.deadline <= fs_now());
	fs_encproc_finish(&p);
}

/* Runs its loop until it is in this state. */
static void turn_until(struct fs_encproc *p, enum fs_encproc_state wanted)
{
	int64_t limit = fs_deadline_ms(30000);
	while (p->state != wanted) {
		struct pollfd fds[FS_ENCPROC_FDS];
		int64_t until = fs_deadline_ms(20); /* the end of a child is no event of these descriptors */
		assert_true(fs_now() < limit);
		fs_encproc_prepare(p, fds, &until);
		poll(fds, FS_ENCPROC_FDS, fs_poll_ms(until));
		fs_encproc_dispatch(p, fds);
	}
}

static int orders_over;

static void count_order(void *arg, int err, const struct fs_reply *reply, const char *text)
{
	orders_over++;
}

static void long_good_service_is_remembered(void **state)
{
	char program[512];
	snprintf(program, sizeof(program), "%s/tests/tools/fake_encoder", getenv("FS_BUILD"));
	struct fs_encproc_opts o = {.program = program,
	        .mmproj = "m",
	        .extended = true,
	        .stop_grace_ms = 100,
	        .ready_timeout_s = 30,
	        .encode_timeout_s = 30};
	for (int steady = 0; steady < 2; steady++) {
		struct fs_encproc p;
		fs_encproc_init(&p, &o, NULL, NULL);
		fs_encproc_want(&p, true);
		turn_until(&p, FS_ENC_READY);
		p.failures = 5;
		if (steady)
			p.ready_since -= 3600 * FS_SEC;
		assert_int_equal(kill(p.child.pid, SIGKILL), 0);
		turn_until(&p, FS_ENC_BACKOFF);
		assert_int_equal(p.failures, steady ? 1 : 6);
		assert_non_null(strstr(p.cause, "signal 9 (killed from outside"));
		fs_encproc_finish(&p);
	}
}

/* It lives, and reads nothing more: an order is not waited for until its time is up, nor asked for again and
 * again. */
static void an_encoder_that_takes_no_orders_is_ended(void **state)
{
	char program[128];
	struct fs_order order = {.kind = FS_ORDER_ENC, .in = "picture", .out = "rows"};
	struct fs_encproc p;
	struct fs_errbuf e;
	snprintf(program, sizeof(program), "%s/deaf", folder);
	write_text(program, "#!/bin/sh\nexec 0<&-\necho READY 8\nexec sleep 30\n");
	assert_int_equal(chmod(program, 0700), 0);
	struct fs_encproc_opts o = {.program = program,
	        .mmproj = "m",
	        .stop_grace_ms = 100,
	        .ready_timeout_s = 30,
	        .encode_timeout_s = 30};
	orders_over = 0;
	fs_encproc_init(&p, &o, count_order, NULL);
	fs_encproc_want(&p, true);
	turn_until(&p, FS_ENC_READY);
	assert_int_equal(fs_encproc_encode(&p, &order, &e), FS_OK);
	int turns = 0;
	for (int64_t limit = fs_deadline_ms(10000); p.state == FS_ENC_BUSY && fs_now() < limit; turns++) {
		struct pollfd fds[FS_ENCPROC_FDS];
		int64_t until = limit;
		fs_encproc_prepare(&p, fds, &until);
		poll(fds, FS_ENCPROC_FDS, fs_poll_ms(until));
		fs_encproc_dispatch(&p, fds);
	}
	assert_int_equal(p.state, FS_ENC_ENDING);
	assert_true(turns < 20);
	assert_int_equal(orders_over, 1);
	assert_string_equal(p.cause, "the encoder closed its input");
	fs_encproc_finish(&p);
	unlink(program);
}

/* Other options end a process that rests, and the next one has them; a process whose start fails meanwhile is
 * not waited for. */
static void other_options_are_taken_by_the_next_process(void **state)
{
	char program[512];
	snprintf(program, sizeof(program), "%s/tests/tools/fake_encoder", getenv("FS_BUILD"));
	struct fs_encproc_opts o = {.program = program,
	        .mmproj = "m",
	        .extended = true,
	        .stop_grace_ms = 100,
	        .ready_timeout_s = 30,
	        .encode_timeout_s = 30};
	struct fs_encproc_opts broken = o;
	struct fs_encproc p;
	broken.program = "/nowhere/encoder";
	fs_encproc_init(&p, &broken, NULL, NULL);
	p.failures = 10;
	fs_encproc_want(&p, true);
	assert_int_equal(p.state, FS_ENC_BACKOFF);
	assert_string_equal(fs_encproc_state_word(&p), "failed");
	fs_encproc_renew(&p, &o);
	assert_string_equal(fs_encproc_state_word(&p), "starting");
	turn_until(&p, FS_ENC_READY);
	assert_int_equal(p.facts.n_embd, 8);
	o.extended = false;
	fs_encproc_renew(&p, &o);
	assert_int_equal(p.state, FS_ENC_ENDING);
	turn_until(&p, FS_ENC_STARTING);
	turn_until(&p, FS_ENC_READY);
	assert_false(p.o.extended);
	assert_int_equal(p.failures, 0);
	fs_encproc_finish(&p);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
	        cmocka_unit_test(manager_is_told_at_both_kinds_of_socket),
	        cmocka_unit_test(signs_of_life_follow_the_units_time),
	        cmocka_unit_test(nobody_asked),
	        cmocka_unit_test(one_place_one_watchdog),
	        cmocka_unit_test(socket_that_answers_is_found),
	        cmocka_unit_test(what_makes_another_encoder),
	        cmocka_unit_test(failure_long_ago_is_forgiven_when_somebody_comes),
	        cmocka_unit_test(long_good_service_is_remembered),
	        cmocka_unit_test(an_encoder_that_takes_no_orders_is_ended),
	        cmocka_unit_test(other_options_are_taken_by_the_next_process),
	};
	signal(SIGPIPE, SIG_IGN); /* as the watchdog does */
	return cmocka_run_group_tests(tests, make_folder, remove_folder);
}
