/*
 * The line protocol: takes orders from the inbox, encodes, leaves rows files, answers. Runs on the main
 * thread, which owns the encoder. Exactly one answer goes out for each ENC; a rows file exists when the
 * answer is OK, and only then. A device that is lost takes the program along: its picture gets no answer but
 * the end, since "ERR" would say that the picture was at fault.
 */
#include "remote/encoder/serve.h"

#include "common/image/image.h"
#include "remote/encoder/inbox.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define READ_STEP ((size_t)1 << 20)

/* False when nobody reads any more. */
static bool say(const char *line)
{
	size_t n = strlen(line);

	while (n > 0) {
		ssize_t k = write(STDOUT_FILENO, line, n);

		if (k < 0 && errno == EINTR)
			continue;
		if (k <= 0)
			return false;
		line += k;
		n -= (size_t)k;
	}
	return true;
}

static bool say_error(const char *text)
{
	char line[FS_LINE_MAX];

	snprintf(line, sizeof(line), "ERR %.*s\n", FS_LINE_MAX - 8, text);
	return say(line);
}

void serve_refuse(const char *text)
{
	say_error(text);
}

static bool say_ready(struct fs_encoder *v, bool extended)
{
	const struct fs_encoder_facts *f = fs_encoder_facts(v);
	uint64_t have, total;
	char line[FS_LINE_MAX], vram[80] = "";

	if (fs_encoder_memory(v, &have, &total))
		snprintf(vram, sizeof(vram), " vram_free_mb=%llu vram_total_mb=%llu",
		        (unsigned long long)(have >> 20), (unsigned long long)(total >> 20));
	if (extended)
		snprintf(line, sizeof(line),
		        "READY %d rows=pipe fingerprint=%s device=%s min_tokens=%d max_tokens=%d%s\n",
		        f->n_embd, f->fingerprint, f->device, f->min_tokens, f->max_tokens, vram);
	else
		snprintf(line, sizeof(line), "READY %d\n", f->n_embd);
	return say(line);
}

/* ---- one picture ---- */

struct file {
	uint8_t *bytes; /* malloc'd */
	size_t n;
};

static int read_bytes(int fd, const char *path, struct file *f, struct fs_cancel *cancel, struct fs_errbuf *e)
{
	size_t have = 0;

	while (have < f->n) {
		ssize_t k = read(fd, f->bytes + have, FS_MIN(f->n - have, READ_STEP));

		if (fs_cancelled(cancel))
			return fs_fail(e, FS_ECANCELLED, "cancelled");
		if (k < 0 && errno == EINTR)
			continue;
		if (k < 0)
			return fs_fail_errno(e, FS_EIO, "cannot read the image %s", path);
		if (k == 0)
			break; /* it shrank: what is there decides */
		have += (size_t)k;
	}
	f->n = have;
	return FS_OK;
}

static int read_file(const char *path, struct file *f, struct fs_cancel *cancel, struct fs_errbuf *e)
{
	int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK), err = FS_OK;
	struct stat st;

	if (fd < 0)
		return fs_fail_errno(e, FS_EIO, "cannot read the image %s", path);
	if (fstat(fd, &st) < 0)
		err = fs_fail_errno(e, FS_EIO, "cannot read the image %s", path);
	else if (!S_ISREG(st.st_mode))
		err = fs_fail(e, FS_EINVAL, "cannot read the image %s: not a regular file", path);
	else if ((uint64_t)st.st_size > FS_PICTURE_MAX)
		err = fs_fail(e, FS_ELIMIT, "the picture has %lld bytes; at most %zu are allowed",
		        (long long)st.st_size, FS_PICTURE_MAX);
	if (err == FS_OK) {
		f->n = (size_t)st.st_size;
		f->bytes = malloc(f->n + 1);
		err = f->bytes == NULL ? fs_fail(e, FS_ENOMEM, "no memory for the picture")
		                       : read_bytes(fd, path, f, cancel, e);
	}
	close(fd);
	return err;
}

static int write_halves(
        const char *path, const struct fs_rows_shape *s, const float *rows, struct fs_errbuf *e)
{
	size_t n = (size_t)s->n_tokens * (size_t)s->n_embd;
	uint16_t *half = malloc(n * sizeof(*half));
	int err = FS_OK;

	if (half == NULL)
		return fs_fail(e, FS_ENOMEM, "no memory for %d rows", s->n_tokens);
	fs_quantize_row(FS_F16, rows, half, (int64_t)n);
	for (size_t i = 0; i < n && err == FS_OK; i++)
		if ((half[i] & 0x7c00) == 0x7c00)
			err = fs_fail(e, FS_EINTERNAL, "the rows do not fit into f16");
	if (err == FS_OK)
		err = fs_rows_write_file_f16(path, s, half, e);
	free(half);
	return err;
}

static int encode(struct fs_encoder *v, struct inbox *b, const struct inbox_order *o, struct fs_rows_shape *s,
        struct fs_errbuf *e)
{
	struct file f = {0};
	float *rows = NULL;
	int err = read_file(o->order.in, &f, o->cancel, e);

	if (err == FS_OK)
		err = fs_encoder_encode(
		        v, f.bytes, f.n, o->order.min_tokens, o->order.max_tokens, o->cancel, s, &rows, e);
	free(f.bytes);
	if (err != FS_OK)
		return err;
	inbox_writing(b, true);
	err = o->order.f16 ? write_halves(o->order.out, s, rows, e)
	                   : fs_rows_write_file(o->order.out, s, rows, e);
	inbox_writing(b, false);
	free(rows);
	return err;
}

/* False when the answer could not be delivered, or there is none. */
static bool answer(struct fs_encoder *v, struct inbox *b, const struct inbox_order *o)
{
	struct fs_rows_shape s = {0};
	struct fs_errbuf e = o->error;
	int64_t start = fs_now();
	char line[128];
	int err = FS_EFORMAT;

	if (e.text[0] == 0)
		err = encode(v, b, o, &s, &e);
	if (fs_encoder_lost(v)) {
		fs_error("the GPU failed: %s", e.text[0] ? e.text : "it is lost");
		return false;
	}
	snprintf(line, sizeof(line), "OK %d %d %d %.1f\n", s.n_tokens, s.nx, s.ny,
	        (double)(fs_now() - start) / 1e6);
	inbox_done(b);
	if (err == FS_OK)
		return say(line);
	return say_error(err == FS_ECANCELLED ? "cancelled" : e.text);
}

/* ---- the program ---- */

static void block_signals(void)
{
	sigset_t set;

	sigemptyset(&set);
	sigaddset(&set, SIGTERM);
	sigaddset(&set, SIGINT);
	sigaddset(&set, SIGHUP);
	pthread_sigmask(SIG_BLOCK, &set, NULL);
	signal(SIGPIPE, SIG_IGN);
}

static int run(const struct fs_encoder_opts *o, bool extended, struct inbox *b, struct fs_errbuf *e)
{
	struct fs_encoder *v = NULL;
	struct inbox_order *order;
	int err = fs_encoder_open(o, &v, e);

	if (err == FS_OK && fs_encoder_facts(v)->gpu)
		err = fs_encoder_warm_up(v, e);
	if (err == FS_OK) {
		inbox_ready(b);
		if (say_ready(v, extended))
			while ((order = inbox_next(b)) != NULL && answer(v, b, order))
				;
	}
	if (v != NULL && fs_encoder_lost(v)) {
		if (err != FS_OK)
			say_error(e->text);
		_exit(FS_ENCODER_EXIT_LOST); /* an orderly end might wait for a driver that does not answer */
	}
	fs_encoder_close(v);
	return err;
}

int serve(const struct fs_encoder_opts *o, bool extended)
{
	struct inbox *b = NULL;
	struct fs_errbuf e = {{0}};
	int err;

	block_signals();
	err = inbox_open(&b, extended, &e);
	if (err == FS_OK)
		err = run(o, extended, b, &e);
	if (err != FS_OK) {
		fs_error("%s", e.text);
		say_error(e.text);
	}
	inbox_close(b);
	return err == FS_OK ? 0 : 1;
}
