/* common/base: buffers' bounds, errors' texts, cancel tokens under threads, children and their ends. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "common/base/base.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static void buf_takes_files_whole(void **state)
{
	struct fs_buf b;
	struct fs_errbuf e = {""};
	char path[] = "/tmp/fs-test-base-XXXXXX", fifo[64];
	int fd = mkstemp(path);
	assert_true(fd >= 0 && write(fd, "0123456789", 10) == 10);
	close(fd);
	fs_buf_init(&b, 15);
	assert_int_equal(fs_buf_append(&b, "ab", 2), FS_OK);
	assert_int_equal(fs_buf_append_file(&b, path, &e), FS_OK);
	assert_string_equal((char *)b.data, "ab0123456789");
	assert_int_equal(fs_buf_append_file(&b, path, &e), FS_ELIMIT);
	assert_int_equal(fs_buf_append_file(&b, "/dev/zero", &e), FS_EINVAL);
	assert_int_equal(fs_buf_append_file(&b, "/", &e), FS_EINVAL);
	snprintf(fifo, sizeof(fifo), "%s.fifo", path);
	assert_int_equal(mkfifo(fifo, 0600), 0);
	assert_int_equal(fs_buf_append_file(&b, fifo, &e), FS_EINVAL); /* and nobody waits for a writer */
	unlink(fifo);
	unlink(path);
	assert_int_equal(fs_buf_append_file(&b, path, &e), FS_EIO);
	assert_non_null(strstr(e.text, path));
	assert_int_equal(b.len, 12);
	fs_buf_finish(&b);
}

static void buf_keeps_its_maximum(void **state)
{
	struct fs_buf b;
	fs_buf_init(&b, 10);
	assert_int_equal(fs_buf_append(&b, "0123456789", 10), FS_OK);
	assert_int_equal(fs_buf_append(&b, "x", 1), FS_ENOMEM);
	assert_int_equal(fs_buf_reserve(&b, SIZE_MAX), FS_ENOMEM);
	assert_int_equal(b.len, 10);
	assert_string_equal((char *)b.data, "0123456789");
	fs_buf_consume(&b, 4);
	assert_int_equal(fs_buf_printf(&b, "%04d", 7), FS_OK);
	assert_string_equal((char *)b.data, "4567890007");
	assert_int_equal(fs_buf_printf(&b, "%d", 1), FS_ENOMEM);
	fs_buf_finish(&b);
	size_t n = 1;
	char *s = fs_buf_take(&b, &n);
	assert_string_equal(s, "");
	assert_int_equal(n, 0);
	free(s);
}

static void buf_grows_through_many_sizes(void **state)
{
	struct fs_buf b;
	fs_buf_init(&b, 100000);
	for (int i = 0; i < 20000; i++)
		assert_int_equal(fs_buf_append(&b, "abcde", 5), FS_OK);
	assert_int_equal(b.len, 100000);
	assert_int_equal(b.data[b.len], 0);
	assert_int_equal(fs_buf_append(&b, "", 1), FS_ENOMEM);
	fs_buf_finish(&b);
}

static void errors_are_clean_text(void **state)
{
	struct fs_errbuf e;
	assert_int_equal(fs_fail(&e, FS_EFORMAT, "a\nb\x1b[31m%s", "c"), FS_EFORMAT);
	assert_string_equal(e.text, "a?b?[31mc");
	errno = ENOENT;
	assert_int_equal(fs_fail_errno(&e, FS_EIO, "can not open %s", "x"), FS_EIO);
	assert_string_equal(e.text, "can not open x: No such file or directory");
	fs_fail_prefix(&e, FS_EIO, "host");
	assert_string_equal(e.text, "host: can not open x: No such file or directory");
	assert_int_equal(fs_fail(NULL, FS_EIO, "nobody listens"), FS_EIO);
	assert_string_equal(fs_err_name(FS_EAUTH), "auth");
	assert_string_equal(fs_err_name(-99), "unknown");
}

static void a_cut_text_ends_on_a_whole_character(void **state)
{
	struct fs_errbuf e;
	char big[600];
	for (size_t pad = 0; pad < 4; pad++) {
		memset(big, 'a', pad);
		for (size_t i = pad; i + 3 < sizeof(big); i += 3)
			memcpy(big + i, "\xe2\x82\xac\0", 4);
		fs_fail(&e, FS_EINVAL, "%s", big);
		size_t n = strlen(e.text);
		assert_true(n >= sizeof(e.text) - 4);
		assert_int_equal((n - pad) % 3, 0);
	}
}

static void count_hook(void *arg)
{
	atomic_fetch_add((atomic_int *)arg, 1);
}

static void cancel_fires_once(void **state)
{
	/* words of docs/API.md */
	assert_string_equal(fs_cancel_cause_name(FS_CANCEL_CLIENT), "client");
	assert_string_equal(fs_cancel_cause_name(FS_CANCEL_DELETED), "deleted");
	assert_string_equal(fs_cancel_cause_name(FS_CANCEL_DEADLINE), "deadline");
	assert_string_equal(fs_cancel_cause_name(FS_CANCEL_SHUTDOWN), "shutdown");
	assert_string_equal(fs_cancel_cause_name(FS_CANCEL_UNREAD), "unread");
	struct fs_cancel *c = fs_cancel_create(FS_NEVER);
	atomic_int a = 0, b = 0;
	struct fs_cancel_hook ha = {.fn = count_hook, .arg = &a}, hb = {.fn = count_hook, .arg = &b};
	assert_true(fs_cancel_listen(c, &ha));
	assert_true(fs_cancel_listen(c, &hb));
	fs_cancel_unlisten(c, &hb);
	assert_false(fs_cancelled(c));
	fs_cancel_fire(c, FS_CANCEL_CLIENT);
	fs_cancel_fire(c, FS_CANCEL_SHUTDOWN);
	assert_true(fs_cancelled(c));
	assert_int_equal(fs_cancel_cause(c), FS_CANCEL_CLIENT);
	assert_int_equal(a, 1);
	assert_int_equal(b, 0);
	assert_false(fs_cancel_listen(c, &hb));
	fs_cancel_unlisten(c, &hb);
	fs_cancel_unlisten(c, &ha);
	fs_cancel_unref(c);
}

static void cancel_keeps_its_deadline(void **state)
{
	struct fs_cancel *c = fs_cancel_create(fs_now() - 1);
	assert_true(fs_cancelled(c));
	assert_int_equal(fs_cancel_cause(c), FS_CANCEL_DEADLINE);
	fs_cancel_unref(c);
	assert_false(fs_cancelled(NULL));
}

static void *fire_thread(void *arg)
{
	fs_cancel_fire(arg, FS_CANCEL_CLIENT);
	fs_cancel_unref(arg);
	return NULL;
}

/* After unlisten the hook's memory may be gone: racing both, the hook ran before unlisten returned or never
 * runs. */
static void unlisten_races_with_fire(void **state)
{
	for (int i = 0; i < 500; i++) {
		struct fs_cancel *c = fs_cancel_create(FS_NEVER);
		atomic_int *count = calloc(1, sizeof(*count));
		struct fs_cancel_hook h = {.fn = count_hook, .arg = count};
		pthread_t t;
		assert_true(fs_cancel_listen(c, &h));
		assert_int_equal(fs_thread_start(&t, "fire", fire_thread, fs_cancel_ref(c), NULL), FS_OK);
		fs_cancel_unlisten(c, &h);
		int seen = atomic_load(count);
		pthread_join(t, NULL);
		assert_int_equal(atomic_load(count), seen);
		free(count);
		fs_cancel_unref(c);
	}
}

static void deadlines(void **state)
{
	assert_int_equal(fs_poll_ms(FS_NEVER), -1);
	assert_int_equal(fs_poll_ms(0), 0);
	assert_int_equal(fs_deadline_ms(-1), FS_NEVER);
	assert_int_equal(fs_deadline_ms(INT64_MAX), FS_NEVER);
	int ms = fs_poll_ms(fs_now() + 1);
	assert_true(ms == 0 || ms == 1);
}

static size_t read_all(int fd, char *buf, size_t cap)
{
	size_t n = 0;
	while (n < cap) {
		struct pollfd p = {.fd = fd, .events = POLLIN};
		assert_int_equal(poll(&p, 1, 60000), 1);
		ssize_t r = read(fd, buf + n, cap - n);
		if (r <= 0)
			break;
		n += (size_t)r;
	}
	return n;
}

static void child_reads_and_writes(void **state)
{
	struct fs_child c;
	struct fs_errbuf e;
	const char *argv[] = {"cat", NULL};
	assert_int_equal(fs_child_start(&c, argv, NULL, false, true, &e), FS_OK);
	assert_int_equal(write(c.in, "hello", 5), 5);
	close(c.in);
	c.in = -1;
	char buf[16];
	assert_int_equal(read_all(c.out, buf, sizeof(buf)), 5);
	assert_memory_equal(buf, "hello", 5);
	fs_child_end(&c, 1000);
	assert_int_equal(c.pid, 0);
	assert_int_equal(c.out, -1);
}

static void child_exec_failure_is_told(void **state)
{
	struct fs_child c;
	struct fs_errbuf e;
	const char *argv[] = {"/nonexistent/farsight-encoder", NULL};
	assert_int_equal(fs_child_start(&c, argv, NULL, true, false, &e), FS_EUNAVAILABLE);
	assert_string_equal(
	        e.text, "can not execute /nonexistent/farsight-encoder: No such file or directory");
	assert_int_equal(waitpid(-1, NULL, WNOHANG), -1); /* nothing left to reap */
}

/* The shell's own child ignores TERM; only a kill of the whole group ends it. */
static void child_end_reaches_the_group(void **state)
{
	struct fs_child c;
	const char *argv[] = {"sh", "-c", "trap '' TERM; sleep 1000 & echo $!; wait", NULL};
	assert_int_equal(fs_child_start(&c, argv, NULL, false, false, NULL), FS_OK);
	char buf[32] = "";
	struct pollfd p = {.fd = c.out, .events = POLLIN};
	assert_int_equal(poll(&p, 1, 60000), 1);
	assert_true(read(c.out, buf, sizeof(buf) - 1) > 0);
	pid_t grandchild = (pid_t)atoi(buf);
	assert_int_equal(kill(grandchild, 0), 0);
	fs_child_end(&c, 50);
	/* init reaps it in its own time: gone, or a zombie */
	int64_t until = fs_deadline_ms(60000);
	bool gone = false;
	while (!gone && fs_now() < until) {
		char path[64], st[256] = "";
		snprintf(path, sizeof(path), "/proc/%d/stat", (int)grandchild);
		FILE *f = fopen(path, "r");
		gone = !f || !fgets(st, sizeof(st), f) || strstr(st, ") Z ");
		if (f)
			fclose(f);
		if (!gone)
			poll(NULL, 0, 5);
	}
	assert_true(gone);
}

static void child_inherits_no_descriptor(void **state)
{
	int extra = dup(0); /* without close-on-exec */
	char script[64];
	snprintf(script, sizeof(script), "test -e /proc/$$/fd/%d && echo leaked; echo end", extra);
	struct fs_child c;
	const char *argv[] = {"sh", "-c", script, NULL};
	assert_int_equal(fs_child_start(&c, argv, NULL, false, false, NULL), FS_OK);
	char buf[16] = "";
	read_all(c.out, buf, sizeof(buf) - 1);
	assert_string_equal(buf, "end\n");
	fs_child_end(&c, 1000);
	close(extra);
}

static void words_for_devices(void **state)
{
	static const struct {
		const char *word;
		bool ok, gpu;
		int number;
	} words[] = {{"auto", true, false, -1}, {"cpu", true, false, -1}, {"cuda", true, true, -1},
	        {"cuda:0", true, true, 0}, {"cuda:12", true, true, 12}, {"cuda:999", true, true, 999},
	        {"", false, false, -1}, {"cuda:", false, false, -1}, {"cuda:1x", false, false, -1},
	        {"cuda:1000", false, false, -1}, {"cuda: 1", false, false, -1}, {"cuda:-1", false, false, -1},
	        {"cuda0", false, false, -1}, {"CUDA", false, false, -1}, {"gpu", false, false, -1}};

	for (size_t i = 0; i < FS_ARRAY_LEN(words); i++) {
		assert_int_equal(fs_device_is_word(words[i].word), words[i].ok);
		assert_int_equal(fs_device_is_gpu(words[i].word), words[i].gpu);
		assert_int_equal(fs_device_number(words[i].word), words[i].number);
	}
}

int main(void)
{
	signal(SIGPIPE, SIG_IGN);
	const struct CMUnitTest tests[] = {
	        cmocka_unit_test(buf_keeps_its_maximum),
	        cmocka_unit_test(buf_takes_files_whole),
	        cmocka_unit_test(buf_grows_through_many_sizes),
	        cmocka_unit_test(errors_are_clean_text),
	        cmocka_unit_test(a_cut_text_ends_on_a_whole_character),
	        cmocka_unit_test(cancel_fires_once),
	        cmocka_unit_test(cancel_keeps_its_deadline),
	        cmocka_unit_test(unlisten_races_with_fire),
	        cmocka_unit_test(deadlines),
	        cmocka_unit_test(child_reads_and_writes),
	        cmocka_unit_test(child_exec_failure_is_told),
	        cmocka_unit_test(child_end_reaches_the_group),
	        cmocka_unit_test(child_inherits_no_descriptor),
	        cmocka_unit_test(words_for_devices),
	};
	return cmocka_run_group_tests_name("base", tests, NULL, NULL);
}
