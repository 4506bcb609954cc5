/*
 * The watchdog's parts that need no encoder: the greeting, the socket's folder, the spool. What needs
 * processes and sockets is in tests/integration/test_watchdog.py.
 */
#include "common/encproc/encproc.h"
#include "remote/watchdog/watchdog.h"

#include <fcntl.h>
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

static char folder[64];

static int make_folder(void **state)
{
	strcpy(folder, "/tmp/farsight-test-XXXXXX");
	return mkdtemp(folder) && setenv("TMPDIR", folder, 1) == 0 ? 0 : -1;
}

static int remove_folder(void **state)
{
	return rmdir(folder);
}

static void greetings_that_are_taken(void **state)
{
	static const struct {
		const char *line;
		enum fs_wd_purpose purpose;
		const char *peer;
	} good[] = {{"FARSIGHT 1 channel 192.168.1.7", FS_WD_CHANNEL, "192.168.1.7"},
	        {"FARSIGHT 1 channel fe80::1%lo", FS_WD_CHANNEL, "fe80::1%lo"},
	        {"FARSIGHT 1 channel ::ffff:10.0.0.1", FS_WD_CHANNEL, "::ffff:10.0.0.1"},
	        {"FARSIGHT 1 channel -", FS_WD_CHANNEL, ""}, {"FARSIGHT 1 status -", FS_WD_STATUS, ""},
	        {"FARSIGHT 1 stop -", FS_WD_STOP, ""}, {"FARSIGHT 1 retire -", FS_WD_RETIRE, ""},
	        {"FARSIGHT 1 replace -", FS_WD_REPLACE, ""}, {"FARSIGHT 1 reload -", FS_WD_RELOAD, ""}};
	for (size_t i = 0; i < FS_ARRAY_LEN(good); i++) {
		struct fs_wd_greeting g;
		struct fs_errbuf e;
		char line[FS_WD_GREETING_MAX];
		assert_int_equal(fs_wd_greeting_parse(good[i].line, strlen(good[i].line), &g, &e), FS_OK);
		assert_int_equal(g.purpose, good[i].purpose);
		assert_string_equal(g.peer, good[i].peer);
		size_t n = fs_wd_greeting_format(&g, line);
		assert_int_equal(n, strlen(good[i].line) + 1);
		assert_memory_equal(line, good[i].line, n - 1);
		assert_int_equal(line[n - 1], '\n');
	}
}

static void greetings_that_are_refused(void **state)
{
	static const char long_line[200] = "FARSIGHT 1 channel -";
	static const struct {
		const char *line;
		size_t n;
		int rc;
	} bad[] = {{"", 0, FS_EFORMAT}, {"FARSIGHT 1 channel", 18, FS_EFORMAT},
	        {"FARSIGHT 2 channel -", 20, FS_ENOTSUP}, {"FARSIGHT 1 shell -", 18, FS_EFORMAT},
	        {"FARSIGHT 1 channel host.lan", 27, FS_EFORMAT},
	        {"FARSIGHT 1 channel - more", 25, FS_EFORMAT}, {"FARSIGHT 1 channel -\0x", 22, FS_EFORMAT},
	        {long_line, sizeof(long_line), FS_EFORMAT}};
	for (size_t i = 0; i < FS_ARRAY_LEN(bad); i++) {
		struct fs_wd_greeting g;
		struct fs_errbuf e;
		assert_int_equal(fs_wd_greeting_parse(bad[i].line, bad[i].n, &g, &e), bad[i].rc);
	}
}

/* A name, or an option, in SSH_CONNECTION's place never reaches the watchdog. */
static void peer_that_is_no_address_is_left_out(void **state)
{
	struct fs_wd_greeting g = {.purpose = FS_WD_CHANNEL, .peer = "localhost"};
	char line[FS_WD_GREETING_MAX];
	size_t n = fs_wd_greeting_format(&g, line);
	assert_int_equal(n, 21);
	assert_memory_equal(line, "FARSIGHT 1 channel -\n", n);
}

static void socket_folder_is_made_private_and_checked(void **state)
{
	char path[FS_WD_PATH_MAX], inner[FS_WD_PATH_MAX];
	struct fs_errbuf e;
	struct stat st;
	int fd;
	snprintf(inner, sizeof(inner), "%s/run", folder);
	snprintf(path, sizeof(path), "%s/w.sock", inner);
	assert_int_equal(fs_wd_connect(path, &fd, &e), FS_EUNAVAILABLE);
	assert_int_equal(fs_wd_prepare_folder(path, &e), FS_OK);
	assert_int_equal(stat(inner, &st), 0);
	assert_int_equal(st.st_mode & 0777, 0700);
	assert_int_equal(fs_wd_connect(path, &fd, &e), FS_EUNAVAILABLE);
	assert_int_equal(chmod(inner, 0710), 0);
	assert_int_equal(fs_wd_prepare_folder(path, &e), FS_EAUTH);
	assert_int_equal(fs_wd_connect(path, &fd, &e), FS_EAUTH);
	assert_non_null(strstr(e.text, "chmod 700"));
	assert_int_equal(rmdir(inner), 0);
	/* a link to a good folder is another's chance to move it */
	assert_int_equal(symlink(folder, inner), 0);
	assert_int_equal(fs_wd_prepare_folder(path, &e), FS_EAUTH);
	assert_int_equal(unlink(inner), 0);
	assert_int_equal(fs_wd_prepare_folder("relative/w.sock", &e), FS_EINVAL);
}

static void socket_path_follows_the_runtime_folder(void **state)
{
	char path[FS_WD_PATH_MAX], long_name[300];
	struct fs_errbuf e;
	setenv("XDG_RUNTIME_DIR", "/run/user/7", 1);
	assert_int_equal(fs_wd_socket_path(path, &e), FS_OK);
	assert_string_equal(path, "/run/user/7/farsight/watchdog.sock");
	memset(long_name, 'x', sizeof(long_name) - 1);
	long_name[0] = '/';
	long_name[sizeof(long_name) - 1] = 0;
	setenv("XDG_RUNTIME_DIR", long_name, 1);
	assert_int_equal(fs_wd_socket_path(path, &e), FS_EINVAL);
	unsetenv("XDG_RUNTIME_DIR");
	assert_int_equal(fs_wd_socket_path(path, &e), FS_OK);
	assert_non_null(strstr(path, "/watchdog.sock"));
}

static void spool_is_private_and_leaves_nothing(void **state)
{
	struct fs_spool s;
	struct fs_errbuf e;
	struct stat st;
	char picture[FS_SPOOL_PATH], rows[FS_SPOOL_PATH], again[FS_SPOOL_PATH];
	int fd, fd2;
	assert_int_equal(fs_spool_init(&s, &e), FS_OK);
	assert_int_equal(stat(s.folder, &st), 0);
	assert_int_equal(st.st_mode & 0777, 0700);
	assert_null(strpbrk(s.folder, " \n"));
	assert_int_equal(fs_spool_picture(&s, picture, rows, &fd, &e), FS_OK);
	assert_int_equal(fs_spool_picture(&s, again, rows, &fd2, &e), FS_OK);
	assert_string_not_equal(picture, again);
	assert_int_equal(fstat(fd, &st), 0);
	assert_int_equal(st.st_mode & 0777, 0600);
	close(fd);
	close(fd2);
	fs_spool_finish(&s);
	assert_int_equal(access(s.folder, F_OK), -1);
}

/* Room in another place counts only on another file system. */
static void second_spool_is_on_another_file_system(void **state)
{
	struct fs_spool s, beside;
	struct fs_errbuf e;
	struct stat a, b;
	assert_int_equal(fs_spool_init_at(&s, folder, &e), FS_OK);
	assert_true(fs_spool_room(&s) > 0);
	int rc = fs_spool_init_beside(&beside, &s, 1, &e);
	assert_int_equal(stat("/dev/shm", &a) || stat(folder, &b), 0);
	assert_int_equal(rc, a.st_dev == b.st_dev ? FS_ENOTFOUND : FS_OK);
	if (rc == FS_OK)
		assert_memory_equal(beside.folder, "/dev/shm/", 9);
	fs_spool_finish(&beside);
	assert_int_equal(fs_spool_init_beside(&beside, &s, UINT64_MAX, &e), FS_ENOTFOUND);
	fs_spool_finish(&s);
	assert_int_equal(fs_spool_room(&s), 0);
	assert_int_equal(fs_spool_init_at(&s, "/tmp/with blank", &e), FS_EINVAL);
	assert_int_equal(fs_spool_init_at(&s, "/nowhere", &e), FS_EIO);
}

/* A second watchdog removes a dead one's folder, leaves a live one's alone, and follows no link. */
static void only_dead_folders_are_removed(void **state)
{
	struct fs_spool live, other;
	struct fs_errbuf e;
	char dead[128], inside[160], link[128], kept[128];
	snprintf(dead, sizeof(dead), "%s/farsight-spool-%u-dead00", folder, (unsigned)getuid());
	snprintf(inside, sizeof(inside), "%s/3.img", dead);
	snprintf(link, sizeof(link), "%s/farsight-spool-%u-link00", folder, (unsigned)getuid());
	snprintf(kept, sizeof(kept), "%s/kept", folder);
	assert_int_equal(fs_spool_init(&live, &e), FS_OK);
	assert_int_equal(mkdir(dead, 0700), 0);
	close(open(inside, O_CREAT | O_WRONLY, 0600));
	assert_int_equal(mkdir(kept, 0700), 0);
	assert_int_equal(symlink(kept, link), 0);
	assert_int_equal(fs_spool_init(&other, &e), FS_OK);
	assert_int_equal(access(dead, F_OK), -1);
	assert_int_equal(access(live.folder, F_OK), 0);
	assert_int_equal(access(kept, F_OK), 0);
	fs_spool_finish(&live);
	assert_int_equal(access(other.folder, F_OK), 0);
	fs_spool_finish(&other);
	assert_int_equal(unlink(link), 0);
	assert_int_equal(rmdir(kept), 0);
}

/* After many failures the next start is a minute away, unless somebody new comes. */
static void back_off_is_cut_short(void **state)
{
	struct fs_encproc_opts o = {.program = "/nowhere/encoder", .mmproj = "m", .stop_grace_ms = 1};
	struct fs_encproc p;
	fs_encproc_init(&p, &o, NULL, NULL);
	p.failures = 10;
	fs_log_set_level(FS_LOG_ERROR);
	fs_encproc_want(&p, true);
	assert_int_equal(p.state, FS_ENC_BACKOFF);
	assert_true(p.deadline > fs_deadline_ms(30000));
	fs_encproc_hurry(&p);
	assert_true(p.deadline <= fs_deadline_ms(1000));
	int64_t soon = p.deadline;
	fs_encproc_hurry(&p); /* again and again puts nothing off */
	assert_int_equal(p.deadline, soon);
	fs_encproc_finish(&p);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
	        cmocka_unit_test(greetings_that_are_taken),
	        cmocka_unit_test(greetings_that_are_refused),
	        cmocka_unit_test(peer_that_is_no_address_is_left_out),
	        cmocka_unit_test(socket_folder_is_made_private_and_checked),
	        cmocka_unit_test(socket_path_follows_the_runtime_folder),
	        cmocka_unit_test(back_off_is_cut_short),
	        cmocka_unit_test(spool_is_private_and_leaves_nothing),
	        cmocka_unit_test(second_spool_is_on_another_file_system),
	        cmocka_unit_test(only_dead_folders_are_removed),
	};
	return cmocka_run_group_tests(tests, make_folder, remove_folder);
}
