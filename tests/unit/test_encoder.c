/*
 * farsight-encoder as a process: the line protocol, plain and extended, with real pictures; cancel, the end
 * of stdin and SIGTERM in the middle of a picture. A picture is made slow by asking for many rows, never by
 * sleeping.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "common/gguf/gguf.h"
#include "common/wire/wire.h"

#include <dirent.h>
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define LIMIT_MS 120000 /* of any wait: a sanitizer's build on a busy machine */

static char dir[] = "/tmp/fs-test-encoder-XXXXXX";
static struct fs_errbuf e;

/* Valid for the next three calls. */
static const char *text(const char *fmt, ...) FS_PRINTF(1, 2);
static const char *text(const char *fmt, ...)
{
	static char texts[4][4096];
	static unsigned turn;
	char *s = texts[turn++ % 4];
	va_list ap;

	va_start(ap, fmt);
	vsnprintf(s, sizeof(texts[0]), fmt, ap);
	va_end(ap);
	return s;
}

static const char *picture(const char *name)
{
	return text("%s/parity/vision/%s", getenv("FS_TEST_DATA"), name);
}

/* ---- the process ---- */

struct encoder {
	struct fs_child child;
	struct fs_buf in;
};

/* Starts it with these arguments behind --mmproj (NULL-terminated). */
static void start(struct encoder *v, const char *mmproj, const char *const args[])
{
	const char *argv[24];
	size_t n = 0;

	argv[n++] = text("%s/remote/encoder/farsight-encoder", getenv("FS_BUILD"));
	if (mmproj != NULL) {
		argv[n++] = "--mmproj";
		argv[n++] = picture(mmproj);
	}
	for (size_t i = 0; args[i] != NULL; i++)
		argv[n++] = args[i];
	argv[n] = NULL;
	fs_buf_init(&v->in, 4 * FS_LINE_MAX);
	if (fs_child_start(&v->child, argv, NULL, false, true, &e) != FS_OK)
		fail_msg("%s", e.text);
}

static void order(struct encoder *v, const char *line)
{
	size_t n = strlen(line);

	while (n > 0) {
		struct pollfd p = {v->child.in, POLLOUT, 0};
		ssize_t k;

		assert_true(poll(&p, 1, LIMIT_MS) > 0);
		k = write(v->child.in, line, n);
		assert_true(k > 0 || errno == EAGAIN);
		if (k > 0) {
			line += k;
			n -= (size_t)k;
		}
	}
}

/* The next line without its newline, or "" at the end of its stdout. Valid until the next call. */
static const char *answer(struct encoder *v)
{
	static char line[FS_LINE_MAX];
	size_t n;

	for (;;) {
		struct pollfd p = {v->child.out, POLLIN, 0};
		uint8_t chunk[4096];
		ssize_t k;

		if (fs_line_next(&v->in, &n, &e) == FS_OK)
			break;
		if (poll(&p, 1, LIMIT_MS) <= 0)
			fail_msg("no answer in %d ms", LIMIT_MS);
		k = read(v->child.out, chunk, sizeof(chunk));
		if (k == 0)
			return "";
		assert_true(k > 0 || errno == EAGAIN);
		if (k > 0)
			assert_int_equal(fs_buf_append(&v->in, chunk, (size_t)k), FS_OK);
	}
	memcpy(line, v->in.data, n);
	line[n] = 0;
	fs_buf_consume(&v->in, n + 1);
	return line;
}

static void expect(struct encoder *v, const char *start_of_line)
{
	const char *got = answer(v);

	if (strncmp(got, start_of_line, strlen(start_of_line)) != 0)
		fail_msg("answer \"%s\", expected \"%s\"", got, start_of_line);
}

/* Reads to the end of its stdout, so without waiting on a clock; then its exit status. */
static int end(struct encoder *v)
{
	int status = 0;

	while (answer(v)[0] != 0)
		;
	assert_int_equal(waitpid(v->child.pid, &status, 0), v->child.pid);
	v->child.pid = 0;
	fs_child_end(&v->child, 0);
	fs_buf_finish(&v->in);
	assert_true(WIFEXITED(status));
	return WEXITSTATUS(status);
}

static void quit(struct encoder *v)
{
	order(v, "QUIT\n");
	assert_int_equal(end(v), 0);
}

static bool exists(const char *name)
{
	return access(text("%s/%s", dir, name), F_OK) == 0;
}

static void copy(const char *from, const char *to)
{
	uint8_t bytes[65536];
	FILE *f = fopen(from, "rb"), *t = fopen(to, "wb");
	size_t n;

	assert_non_null(f);
	assert_non_null(t);
	n = fread(bytes, 1, sizeof(bytes), f);
	assert_int_equal(fwrite(bytes, 1, n, t), n);
	fclose(f);
	fclose(t);
}

/* ---- plain ---- */

static const char *const none[] = {NULL};

static void expect_rows(const char *path, const char *golden)
{
	const struct fs_gguf_tensor *t = NULL;
	struct fs_gguf *g;
	struct fs_rows_shape s;
	float *rows = NULL;
	double err = 0, all = 0;

	assert_int_equal(fs_gguf_open(&g, picture("vision.golden.gguf"), &e), FS_OK);
	assert_int_equal(fs_gguf_need(g, golden, 0, 0, &t, &e), FS_OK);
	if (fs_rows_read_file(path, &s, &rows, &e) != FS_OK)
		fail_msg("%s", e.text);
	assert_int_equal(s.n_embd, t->ne[0]);
	assert_int_equal(s.n_tokens, t->ne[1]);
	for (int64_t i = 0; i < t->ne[0] * t->ne[1]; i++) {
		double want = (double)((const float *)t->data)[i], d = (double)rows[i] - want;

		err += d * d;
		all += want * want;
	}
	assert_true(err / all < 1e-4); /* large products run in bf16 where the processor has it */
	free(rows);
	fs_gguf_close(g);
}

static void plain_protocol(void **state)
{
	struct encoder v;
	struct fs_reply r;
	const char *line;

	start(&v, "mmproj-f32.gguf", none);
	assert_string_equal(answer(&v), "READY 128");
	copy(picture("grid.png"), text("%s/a name with spaces.png", dir));
	order(&v, text("ENC %s/a name with spaces.png %s/out.sve\n", dir, dir));
	line = answer(&v);
	assert_int_equal(fs_reply_parse(line, strlen(line), &r, &e), FS_OK);
	assert_int_equal(r.kind, FS_REPLY_OK);
	assert_int_equal(r.shape.n_tokens, 12);
	assert_int_equal(r.shape.nx, 4);
	assert_int_equal(r.shape.ny, 3);
	expect_rows(text("%s/out.sve", dir), "grid.rows_f32");
	/* nothing of the extended protocol is known */
	order(&v, "CANCEL\n");
	assert_string_equal(answer(&v), "ERR expected: ENC <image> <output>");
	order(&v, text("ENC dtype=f16 %s %s/out.sve\n", picture("grid.png"), dir));
	expect(&v, "ERR cannot read the image dtype=f16 ");
	quit(&v);
}

static void orders_ahead_are_answered_in_turn(void **state)
{
	static const char *const names[] = {"grid", "off", "wide", "tall", "tiny", "half"};
	static const char *const answers[] = {
	        "OK 12 4 3 ", "OK 6 3 2 ", "OK 11 11 1 ", "OK 7 1 7 ", "OK 4 2 2 ", "OK 8 2 4 "};
	struct encoder v;

	start(&v, "mmproj-f16.gguf", none);
	for (int round = 0; round < 5; round++)
		for (size_t i = 0; i < FS_ARRAY_LEN(names); i++)
			order(&v, text("ENC %s %s/%s.sve\r\n", picture(text("%s.png", names[i])), dir,
			                  names[i]));
	assert_string_equal(answer(&v), "READY 128");
	for (int round = 0; round < 5; round++)
		for (size_t i = 0; i < FS_ARRAY_LEN(names); i++)
			expect(&v, answers[i]);
	quit(&v);
	for (size_t i = 0; i < FS_ARRAY_LEN(names); i++)
		expect_rows(text("%s/%s.sve", dir, names[i]), text("%s.rows_f16", names[i]));
}

static void bad_pictures_leave_it_usable(void **state)
{
	struct encoder v;
	char line[FS_LINE_MAX + 100];

	start(&v, "mmproj-f32.gguf", none);
	expect(&v, "READY ");
	order(&v, text("ENC %s/absent.png %s/bad.sve\n", dir, dir));
	expect(&v, "ERR cannot read the image ");
	order(&v, text("ENC %s %s/bad.sve\n", dir, dir));
	expect(&v, "ERR cannot read the image ");
	order(&v, text("ENC %s/data/cases/truncated.jpg %s/bad.sve\n", getenv("FS_TEST_DATA"), dir));
	expect(&v, "ERR could not decode the JPEG picture: ");
	order(&v, text("ENC %s/data/cases/bomb_20000.png %s/bad.sve\n", getenv("FS_TEST_DATA"), dir));
	expect(&v, "ERR the picture has 20000 x 20000 pixels");
	order(&v, text("ENC %s/data/cases/expected.json %s/bad.sve\n", getenv("FS_TEST_DATA"), dir));
	expect(&v, "ERR not a picture in a known format");
	order(&v, text("ENC %s %s/no/such/folder\n", picture("grid.png"), dir));
	expect(&v, "ERR cannot write ");
	memset(line, 'x', sizeof(line));
	memcpy(line + FS_LINE_MAX + 50, "\n", 2);
	order(&v, line);
	expect(&v, "ERR a line of more than ");
	order(&v, "\n");
	expect(&v, "ERR expected: ");
	assert_false(exists("bad.sve"));
	order(&v, text("ENC %s/data/cases/1x1.png %s/ok.sve\n", getenv("FS_TEST_DATA"), dir));
	expect(&v, "OK 4 2 2 ");
	assert_true(exists("ok.sve"));
	quit(&v);
}

/* ---- extended ---- */

static const char *const extended[] = {"--extended", NULL};

static void extended_protocol(void **state)
{
	struct encoder v;
	struct fs_reply r;
	struct fs_gguf *g;
	struct fs_rows_shape s;
	struct stat st;
	char fingerprint[33];
	uint8_t head[FS_ROWS_HEADER];
	const char *line;
	FILE *f;

	start(&v, "mmproj-f32.gguf", extended);
	line = answer(&v);
	assert_int_equal(fs_reply_parse(line, strlen(line), &r, &e), FS_OK);
	assert_int_equal(fs_gguf_open(&g, picture("mmproj-f32.gguf"), &e), FS_OK);
	assert_int_equal(fs_gguf_fingerprint(g, fingerprint, &e), FS_OK);
	fs_gguf_close(g);
	assert_string_equal(r.ready.fingerprint, fingerprint);
	assert_string_equal(r.ready.device, "cpu");
	assert_int_equal(r.ready.min_tokens, 4);
	assert_int_equal(r.ready.max_tokens, 48);
	order(&v, "CANCEL\n"); /* nothing runs: no answer */
	order(&v, text("ENC dtype=f16 max=9 %s %s/half.sve\n", picture("large.png"), dir));
	expect(&v, "OK 6 3 2 ");
	assert_int_equal(stat(text("%s/half.sve", dir), &st), 0);
	f = fopen(text("%s/half.sve", dir), "rb");
	assert_non_null(f);
	assert_int_equal(fread(head, 1, sizeof(head), f), sizeof(head));
	fclose(f);
	assert_int_equal(fs_rows_header_get_dtype(head, (uint64_t)st.st_size, FS_WIRE_F16, &s, &e), FS_OK);
	assert_int_equal(s.n_embd, 128);
	quit(&v);
}

/* Rows by the thousand: seconds of work, and memory for them. */
static const char *const slow[] = {"--extended", "--min-tokens", "16384", "--max-tokens", "16384", NULL};

static void start_slow(struct encoder *v)
{
	start(v, "mmproj-f32.gguf", slow);
	expect(v, "READY 128 ");
	order(v, text("ENC %s %s/slow.sve\n", picture("grid.png"), dir));
}

static void cancel_ends_one_picture(void **state)
{
	struct encoder v;

	start_slow(&v);
	order(&v, "CANCEL\nCANCEL\n");
	assert_string_equal(answer(&v), "ERR cancelled");
	assert_false(exists("slow.sve"));
	order(&v, text("ENC max=4 %s %s/after.sve\n", picture("grid.png"), dir));
	expect(&v, "OK ");
	assert_true(exists("after.sve"));
	quit(&v);
}

static void end_of_stdin_ends_it(void **state)
{
	struct encoder v;

	start_slow(&v);
	close(v.child.in);
	v.child.in = -1;
	assert_int_equal(end(&v), 0);
	assert_false(exists("slow.sve"));
	start(&v, "mmproj-f32.gguf", none); /* while it waits */
	expect(&v, "READY ");
	close(v.child.in);
	v.child.in = -1;
	assert_int_equal(end(&v), 0);
}

static void sigterm_ends_it(void **state)
{
	struct encoder v;

	start_slow(&v);
	fs_child_signal(&v.child, SIGTERM);
	assert_int_equal(end(&v), 0);
	assert_false(exists("slow.sve"));
}

/* An orderly QUIT lets the picture in front of it finish, even when stdin ends right behind it. */
static void quit_waits_for_its_turn(void **state)
{
	struct encoder v;

	start(&v, "mmproj-f32.gguf", none);
	order(&v, text("ENC %s %s/last.sve\nQUIT\n", picture("large.png"), dir));
	close(v.child.in);
	v.child.in = -1;
	expect(&v, "READY ");
	expect(&v, "OK ");
	assert_int_equal(end(&v), 0);
	assert_true(exists("last.sve"));
}

/* ---- starting ---- */

static void expect_no_start(const char *mmproj, const char *const args[], const char *why, int status)
{
	struct encoder v;
	const char *line;

	start(&v, mmproj, args);
	line = answer(&v);
	if (strncmp(line, "ERR ", 4) != 0 || strstr(line, why) == NULL)
		fail_msg("\"%s\", expected an ERR with \"%s\"", line, why);
	assert_int_equal(end(&v), status);
}

static void refuses_to_start(void **state)
{
	char model[4096];
	const char *const wrong_model[] = {"--model", model, NULL};
	const char *const no_gpu[] = {"--gpu", "--device", "cpu", NULL};
	const char *const threads[] = {"--threads", "0", NULL};
	const char *const device[] = {"--device", "abacus", NULL};
	const char *const unknown[] = {"--eyes", NULL};
	const char *const bounds[] = {"--min-tokens", "9", "--max-tokens", "8", NULL};

	snprintf(model, sizeof(model), "%s/parity/text/qwen2-f32.gguf", getenv("FS_TEST_DATA"));
	expect_no_start(NULL, none, "--mmproj is missing", 2);
	expect_no_start("absent.gguf", none, "cannot load the vision encoder: cannot open ", 1);
	expect_no_start("e2e-text-f16.gguf", none, "no mmproj file", 1);
	expect_no_start("grid.png", none, "not a GGUF file", 1);
	expect_no_start("mmproj-f32.gguf", wrong_model, "do not belong together", 1);
	expect_no_start("mmproj-f32.gguf", no_gpu, "contradict", 1);
	expect_no_start("mmproj-f32.gguf", threads, "--threads wants", 2);
	expect_no_start("mmproj-f32.gguf", device, "abacus", 1);
	expect_no_start("mmproj-f32.gguf", unknown, "--eyes", 2);
	expect_no_start("mmproj-f32.gguf", bounds, "--max-tokens", 1);
}

static int setup(void **state)
{
	signal(SIGPIPE, SIG_IGN);
	return mkdtemp(dir) == NULL || getenv("FS_BUILD") == NULL || getenv("FS_TEST_DATA") == NULL;
}

static int teardown(void **state)
{
	DIR *d = opendir(dir);
	struct dirent *f;

	while ((f = readdir(d)) != NULL)
		unlink(text("%s/%s", dir, f->d_name));
	closedir(d);
	return rmdir(dir);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
	        cmocka_unit_test(plain_protocol),
	        cmocka_unit_test(orders_ahead_are_answered_in_turn),
	        cmocka_unit_test(bad_pictures_leave_it_usable),
	        cmocka_unit_test(extended_protocol),
	        cmocka_unit_test(cancel_ends_one_picture),
	        cmocka_unit_test(end_of_stdin_ends_it),
	        cmocka_unit_test(sigterm_ends_it),
	        cmocka_unit_test(quit_waits_for_its_turn),
	        cmocka_unit_test(refuses_to_start),
	};

	return cmocka_run_group_tests(tests, setup, teardown);
}
