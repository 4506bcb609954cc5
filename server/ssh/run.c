/*
 * One remote command after another over one session: input from memory or a file, output into bounded
 * buffers, the exit status. Runs on the session's thread and waits; made for the admin's command, where one
 * step follows another, not for the server. Input goes out and output comes in side by side, so that neither
 * end can block the other.
 */
#include "server/ssh/internal.h"

#include <ctype.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define CHUNK ((size_t)64 << 10)

struct flow {
	struct fs_ssh *s;
	const struct fs_ssh_run *r;
	struct fs_patience patience;
	uint8_t *chunk; /* [CHUNK]: of the file, and pinned while a write is pending */
	const uint8_t *at;
	size_t left;           /* at at */
	uint64_t read_n, sent; /* of the input */
	bool eof_sent, ended;
	int64_t moved_at;
};

int fs_ssh_quote(struct fs_buf *b, const char *value, struct fs_errbuf *e)
{
	int rc = fs_buf_append_str(b, " '");
	for (const char *s = value; *s && !rc; s++) {
		if (iscntrl((unsigned char)*s))
			return fs_fail(e, FS_EINVAL, "a value for the host holds a control character");
		rc = *s == '\'' ? fs_buf_append_str(b, "'\\''") : fs_buf_append(b, s, 1);
	}
	if (!rc)
		rc = fs_buf_append_str(b, "'");
	return rc ? fs_fail(e, rc, "a command for the host is too long") : FS_OK;
}

static int refill(struct flow *f, struct fs_errbuf *e)
{
	uint64_t rest = f->r->input_n - f->read_n;
	if (f->left || rest == 0)
		return FS_OK;
	size_t n = (size_t)FS_MIN(rest, (uint64_t)CHUNK);
	if (f->r->input) {
		f->at = (const uint8_t *)f->r->input + f->read_n;
	} else {
		ssize_t got;
		while ((got = read(f->r->input_fd, f->chunk, n)) < 0 && errno == EINTR)
			;
		if (got < 0)
			return fs_fail_errno(e, FS_EIO, "can not read the file that is being sent");
		if (got == 0)
			return fs_fail(e, FS_EIO, "the file that is being sent got shorter meanwhile");
		n = (size_t)got;
		f->at = f->chunk;
	}
	f->left = n;
	f->read_n += n;
	return FS_OK;
}

static int send_some(struct flow *f, bool *moved, struct fs_errbuf *e)
{
	if (f->eof_sent)
		return FS_OK;
	int rc = refill(f, e);
	if (rc)
		return rc;
	if (!f->left) {
		f->eof_sent = true;
		return fs_ssh_send_eof(f->s, &f->patience, e);
	}
	struct fs_errbuf end;
	ssize_t n = fs_ssh_write(f->s, f->at, f->left, &end);
	if (n < 0) { /* it ended without reading everything; its status and stderr tell why */
		f->eof_sent = true;
		f->left = 0;
		return FS_OK;
	}
	f->at += n;
	f->left -= (size_t)n;
	f->sent += (uint64_t)n;
	*moved |= n > 0;
	if (n > 0 && f->r->sent)
		f->r->sent(f->r->arg, f->sent);
	return FS_OK;
}

static void hear_stderr(struct flow *f, bool *moved)
{
	char bytes[4096];
	ssize_t n;
	while ((n = fs_ssh_read_stderr(f->s, bytes, sizeof(bytes))) > 0) {
		*moved = true;
		if (f->r->err) /* bounded: the beginning is what counts */
			fs_buf_append(f->r->err, bytes, FS_MIN((size_t)n, f->r->err->max - f->r->err->len));
	}
}

/* The output after the error text: fs_ssh_wait takes a read of that for a sign of more. */
static int hear_some(struct flow *f, bool *moved, struct fs_errbuf *e)
{
	char bytes[16384];
	struct fs_errbuf end;
	hear_stderr(f, moved);
	ssize_t n = fs_ssh_read(f->s, bytes, sizeof(bytes), &end);
	*moved |= n != 0;
	if (n < 0) {
		f->ended = true;
		hear_stderr(f, moved);
	}
	if (n > 0 && f->r->heard)
		f->r->heard(f->r->arg, bytes, (size_t)n);
	if (n > 0 && f->r->out && fs_buf_append(f->r->out, bytes, (size_t)n))
		return fs_fail(
		        e, FS_ELIMIT, "a command on the host says more than %zu bytes", f->r->out->max);
	return FS_OK;
}

static int check_patience(struct flow *f, struct fs_errbuf *e)
{
	int64_t now = fs_now();
	if (f->patience.cancelled && f->patience.cancelled(f->patience.arg))
		return fs_fail(e, FS_ECANCELLED, "cancelled");
	if (now >= f->patience.deadline)
		return fs_fail(e, FS_ETIMEOUT, "a command on the host took too long");
	if (f->r->idle_ms && !f->eof_sent && now >= f->moved_at + f->r->idle_ms * FS_MS)
		return fs_fail(
		        e, FS_ETIMEOUT, "the host fell silent for %lld s", (long long)f->r->idle_ms / 1000);
	return FS_OK;
}

static int flow_run(struct flow *f, struct fs_errbuf *e)
{
	while (!f->ended) {
		bool moved = false;
		int rc = check_patience(f, e);
		if (!rc)
			rc = send_some(f, &moved, e);
		if (!rc)
			rc = hear_some(f, &moved, e);
		if (rc)
			return rc;
		if (moved) {
			f->moved_at = fs_now();
			continue;
		}
		int64_t until = f->patience.deadline;
		if (f->r->idle_ms && !f->eof_sent)
			until = FS_MIN(until, f->moved_at + f->r->idle_ms * FS_MS);
		rc = fs_ssh_wait(f->s, f->left > 0, f->patience.wake_fd, until);
		if (rc)
			return fs_fail_errno(e, rc, "can not wait for the host");
	}
	return FS_OK;
}

int fs_ssh_run(struct fs_ssh *s, const struct fs_ssh_run *r, int *status, struct fs_errbuf *e)
{
	struct flow f = {.s = s,
	        .r = r,
	        .patience = {r->deadline, r->wake_fd, r->cancelled, r->cancelled_arg},
	        .moved_at = fs_now()};
	int rc = fs_ssh_exec(s, r->command, &f.patience, e);
	if (rc)
		return rc;
	f.chunk = malloc(CHUNK);
	rc = f.chunk ? flow_run(&f, e) : fs_fail(e, FS_ENOMEM, "out of memory");
	if (!rc)
		rc = fs_ssh_exec_end(s, &f.patience, status, e);
	free(f.chunk);
	return rc;
}
