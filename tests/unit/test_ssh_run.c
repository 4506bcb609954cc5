/* Commands one after another over one session, and host keys before they are trusted, against a real sshd. */
#include "server/ssh/ssh.h"
#include "tests/unit/sshd.h"

#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

static struct test_sshd sshd;

static struct fs_ssh_opts opts(void)
{
	return (struct fs_ssh_opts){.host = "127.0.0.1",
	        .port = sshd.port,
	        .identity = sshd.identity,
	        .only_identity = true,
	        .config_file = sshd.ssh_config,
	        .known_hosts = sshd.known_hosts};
}

static int64_t soon(void)
{
	return fs_deadline_ms(30000);
}

static struct fs_ssh *open_session(void)
{
	struct fs_ssh_opts o = opts();
	struct fs_errbuf e = {""};
	struct fs_ssh *s = NULL;
	int rc = fs_ssh_open(&o, soon(), -1, NULL, NULL, &s, &e);
	if (rc)
		fail_msg("%s", e.text);
	return s;
}

/* Runs it and gives stdout; stderr is expected as it is. */
static int run(struct fs_ssh *s, struct fs_ssh_run *r, const char *want_out, const char *want_err)
{
	struct fs_buf out, err;
	struct fs_errbuf e = {""};
	int status = -1;
	fs_buf_init(&out, 1 << 20);
	fs_buf_init(&err, 4096);
	r->out = &out;
	r->err = &err;
	r->deadline = soon();
	r->wake_fd = -1;
	int rc = fs_ssh_run(s, r, &status, &e);
	if (rc)
		fail_msg("%s", e.text);
	assert_string_equal(out.data ? (char *)out.data : "", want_out);
	assert_string_equal(err.data ? (char *)err.data : "", want_err);
	fs_buf_finish(&out);
	fs_buf_finish(&err);
	return status;
}

static void test_commands_follow_one_another(void **state)
{
	struct fs_ssh *s = open_session();
	assert_int_equal(
	        run(s, &(struct fs_ssh_run){.command = "echo one; echo two >&2; exit 3"}, "one\n", "two\n"),
	        3);
	assert_int_equal(run(s, &(struct fs_ssh_run){.command = "tr a-z A-Z", .input = "shout", .input_n = 5},
	                         "SHOUT", ""),
	        0);
	assert_int_equal(run(s, &(struct fs_ssh_run){.command = "cat"}, "", ""), 0); /* no input: it ends */
	assert_int_equal(run(s, &(struct fs_ssh_run){.command = "kill -9 $$"}, "", ""), 255);
	/* its output has ended long before it does */
	assert_int_equal(
	        run(s, &(struct fs_ssh_run){.command = "exec >&- 2>&-; sleep 1; exit 7"}, "", ""), 7);
	fs_ssh_close(s);
}

static void test_values_stay_values(void **state)
{
	static const char *const values[] = {
	        "plain", "", "two words", "it's", "$(id)", "`id`", "a\\b", "*", "\"q\"", "-n", "'; id; '"};
	struct fs_ssh *s = open_session();
	for (size_t i = 0; i < FS_ARRAY_LEN(values); i++) {
		struct fs_buf b;
		fs_buf_init(&b, 4096);
		fs_buf_append_str(&b, "printf %s");
		assert_int_equal(fs_ssh_quote(&b, values[i], NULL), FS_OK);
		run(s, &(struct fs_ssh_run){.command = (char *)b.data}, values[i], "");
		fs_buf_finish(&b);
	}
	struct fs_buf b;
	fs_buf_init(&b, 64);
	assert_int_equal(fs_ssh_quote(&b, "a\nb", NULL), FS_EINVAL);
	fs_buf_finish(&b);
	fs_ssh_close(s);
}

static void count(void *arg, uint64_t n)
{
	*(uint64_t *)arg = n;
}

/* More than any window, from a file's middle; the far end echoes all of it meanwhile. */
static void test_a_large_file_crosses(void **state)
{
	char path[200], want[32];
	const size_t size = (size_t)12 << 20, skip = 1000;
	snprintf(path, sizeof(path), "%s/large", sshd.dir);
	uint8_t *bytes = malloc(size);
	uint32_t x = 1;
	for (size_t i = 0; i < size; i++)
		bytes[i] = (uint8_t)((x = x * 1664525 + 1013904223) >> 24);
	FILE *f = fopen(path, "we");
	assert_int_equal(fwrite(bytes, 1, size, f), size);
	fclose(f);
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	assert_int_equal(lseek(fd, (off_t)skip, SEEK_SET), skip);
	uint64_t sent = 0;
	struct fs_buf echo;
	struct fs_errbuf e = {""};
	int status = -1;
	fs_buf_init(&echo, size);
	struct fs_ssh *s = open_session();
	struct fs_ssh_run r = {.command = "cat",
	        .input_fd = fd,
	        .input_n = size - skip,
	        .sent = count,
	        .arg = &sent,
	        .out = &echo,
	        .idle_ms = 20000,
	        .deadline = fs_deadline_ms(120000),
	        .wake_fd = -1};
	int rc = fs_ssh_run(s, &r, &status, &e);
	if (rc)
		fail_msg("%s", e.text);
	assert_int_equal(status, 0);
	assert_int_equal(sent, size - skip);
	assert_int_equal(echo.len, size - skip);
	assert_memory_equal(echo.data, bytes + skip, size - skip);
	/* one that does not want its input: its status counts, and the session goes on */
	lseek(fd, 0, SEEK_SET);
	assert_int_equal(run(s,
	                         &(struct fs_ssh_run){
	                                 .command = "echo full >&2; exit 5", .input_fd = fd, .input_n = size},
	                         "", "full\n"),
	        5);
	snprintf(want, sizeof(want), "%d\n", 42);
	assert_int_equal(run(s, &(struct fs_ssh_run){.command = "echo 42"}, want, ""), 0);
	fs_ssh_close(s);
	close(fd);
	fs_buf_finish(&echo);
	free(bytes);
}

static void test_patience_and_limits(void **state)
{
	struct fs_errbuf e = {""};
	struct fs_buf small;
	int status;
	fs_buf_init(&small, 10);
	struct fs_ssh *s = open_session();
	struct fs_ssh_run r = {.command = "exec sleep 1000", .deadline = fs_deadline_ms(300), .wake_fd = -1};
	assert_int_equal(fs_ssh_run(s, &r, &status, &e), FS_ETIMEOUT);
	fs_ssh_close(s);
	s = open_session();
	r = (struct fs_ssh_run){
	        .command = "echo much more than ten bytes", .out = &small, .deadline = soon(), .wake_fd = -1};
	assert_int_equal(fs_ssh_run(s, &r, &status, &e), FS_ELIMIT);
	fs_ssh_close(s);
	fs_buf_finish(&small);
}

static bool count_looks(void *arg)
{
	++*(int *)arg;
	return false;
}

/* A build there may take an hour, in which nothing is to be done here: it looks around only when something
 * happened. */
static void test_waiting_costs_nothing(void **state)
{
	int looks = 0;
	struct fs_ssh *s = open_session();
	struct fs_ssh_run r = {
	        .command = "echo a; echo b >&2; sleep 2", .cancelled = count_looks, .cancelled_arg = &looks};
	assert_int_equal(run(s, &r, "a\n", "b\n"), 0);
	assert_in_range(looks, 1, 200);
	fs_ssh_close(s);
}

static void test_a_key_is_shown_pinned_and_taken(void **state)
{
	char known[250];
	struct fs_ssh_host_key k;
	struct fs_errbuf e = {""};
	struct fs_ssh *s;
	snprintf(known, sizeof(known), "%s/new/known_hosts", sshd.dir);
	struct fs_ssh_opts o = opts();
	o.known_hosts = known;
	assert_int_equal(fs_ssh_open(&o, soon(), -1, NULL, NULL, &s, &e), FS_EAUTH);
	assert_int_equal(fs_ssh_host_key(&o, soon(), -1, NULL, NULL, &k, &e), FS_OK);
	assert_false(k.known);
	assert_memory_equal(k.fingerprint, "SHA256:", 7);
	assert_int_not_equal(access(known, F_OK), 0); /* asking writes nothing */
	assert_int_equal(fs_ssh_pin(&k, &e), FS_OK);
	assert_int_equal(fs_ssh_host_key(&o, soon(), -1, NULL, NULL, &k, &e), FS_OK);
	assert_true(k.known);
	assert_int_equal(fs_ssh_open(&o, soon(), -1, NULL, NULL, &s, &e), FS_OK);
	fs_ssh_close(s);

	/* a file without a last newline keeps its line */
	test_write_file(known, "elsewhere ssh-ed25519 AAAA", 0600);
	assert_int_equal(fs_ssh_pin(&k, &e), FS_OK);
	char *text = test_read_file(known);
	assert_non_null(strstr(text, "AAAA\n[127.0.0.1]"));
	free(text);
}

static void test_a_changed_key_is_not_shown_as_new(void **state)
{
	char known[250], line[400];
	struct fs_ssh_host_key k;
	struct fs_errbuf e = {""};
	snprintf(known, sizeof(known), "%s/changed", sshd.dir);
	char pub[220];
	snprintf(pub, sizeof(pub), "%s.pub", sshd.identity);
	char *other = test_read_file(pub); /* an ed25519 key, and not this host's */
	snprintf(line, sizeof(line), "[127.0.0.1]:%d %s", sshd.port, other);
	test_write_file(known, line, 0600);
	free(other);
	struct fs_ssh_opts o = opts();
	o.known_hosts = known;
	assert_int_equal(fs_ssh_host_key(&o, soon(), -1, NULL, NULL, &k, &e), FS_EAUTH);
	assert_non_null(strstr(e.text, "has changed"));
}

static void test_only_the_named_key_is_offered(void **state)
{
	char home[220], dir[240], key[280];
	struct fs_errbuf e = {""};
	struct fs_ssh *s;
	snprintf(home, sizeof(home), "%s/home", sshd.dir);
	snprintf(dir, sizeof(dir), "%s/.ssh", home);
	snprintf(key, sizeof(key), "%s/id_ed25519", dir);
	mkdir(home, 0700);
	mkdir(dir, 0700);
	char *good = test_read_file(sshd.identity);
	test_write_file(key, good, 0600); /* ssh's usual place: would let us in */
	free(good);
	setenv("HOME", home, 1);
	unsetenv("SSH_AUTH_SOCK");
	struct fs_ssh_opts o = opts();
	o.identity = NULL;
	o.only_identity = false;
	assert_int_equal(fs_ssh_open(&o, soon(), -1, NULL, NULL, &s, &e), FS_OK);
	fs_ssh_close(s);
	snprintf(dir, sizeof(dir), "%s/other", sshd.dir);
	const char *const argv[] = {"ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", dir, NULL};
	assert_int_equal(test_run(argv), 0);
	o.identity = dir;
	o.only_identity = true;
	assert_int_equal(fs_ssh_open(&o, soon(), -1, NULL, NULL, &s, &e), FS_EAUTH);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
	        cmocka_unit_test(test_commands_follow_one_another),
	        cmocka_unit_test(test_values_stay_values),
	        cmocka_unit_test(test_a_large_file_crosses),
	        cmocka_unit_test(test_patience_and_limits),
	        cmocka_unit_test(test_waiting_costs_nothing),
	        cmocka_unit_test(test_a_key_is_shown_pinned_and_taken),
	        cmocka_unit_test(test_a_changed_key_is_not_shown_as_new),
	        cmocka_unit_test(test_only_the_named_key_is_offered),
	};
	if (!test_sshd_available())
		return 77;
	assert_int_equal(fs_ssh_init(NULL), FS_OK);
	/* start-up files of the user's shell may say anything */
	test_sshd_init(&sshd, &(struct test_sshd_opts){.extra = "SetEnv HOME=/nonexistent"});
	int failed = cmocka_run_group_tests(tests, NULL, NULL);
	test_sshd_finish(&sshd);
	return failed;
}
