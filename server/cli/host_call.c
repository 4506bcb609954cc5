/*
 * What `farsight host` runs: scripts on the host over the admin's session, and programs here. Output is
 * bounded, each call has a deadline and ends with Ctrl-C.
 */
#include "server/cli/host.h"

#include <errno.h>
#include <openssl/evp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define MARK "farsight-output-begins\n"
#define CALL_S 60
#define SILENCE_MS 30000
#define STDERR_MAX 4096
/* a session that was idle for longer may have been given up by sshd: nobody answered it */
#define FRESH_S 10
#define CONNECT_S 15

/* ---- on the host ---- */

static int write_command(const struct host_call *c, struct fs_buf *b, struct fs_errbuf *e)
{
	FS_ASSERT(!strpbrk(c->script, "'\n"));
	int rc = fs_buf_printf(b, "exec sh -c 'echo %.*s; %s' sh", (int)strlen(MARK) - 1, MARK, c->script);
	if (rc)
		return fs_fail(e, rc, "a command for the host is too long");
	for (size_t i = 0; i < FS_ARRAY_LEN(c->args) && c->args[i] && !rc; i++)
		rc = fs_ssh_quote(b, c->args[i], e);
	return rc;
}

/* What comes before the mark is the start-up files' of the user's shell. */
static void drop_noise(struct fs_buf *out)
{
	uint8_t *mark = out->len ? memmem(out->data, out->len, MARK, strlen(MARK)) : NULL;
	if (mark)
		fs_buf_consume(out, (size_t)(mark - out->data) + strlen(MARK));
}

/* The last lines, in one. */
static void say_stderr(const struct fs_buf *err, int status, struct fs_errbuf *e)
{
	char text[400];
	size_t n = err->len;
	while (n && (err->data[n - 1] == '\n' || err->data[n - 1] == ' '))
		n--;
	size_t from = n > sizeof(text) - 1 ? n - (sizeof(text) - 1) : 0;
	snprintf(text, sizeof(text), "%.*s", (int)(n - from), n ? (const char *)err->data + from : "");
	for (char *s = text; *s; s++)
		if (*s == '\n')
			*s = ';';
	if (*text)
		fs_fail(e, FS_EIO, "%s", text);
	else
		fs_fail(e, FS_EIO, "a command on the host ended with status %d", status);
}

static int freshen(struct host *h, struct fs_errbuf *e)
{
	if (h->ssh && fs_now() - h->ssh_used < FRESH_S * FS_SEC)
		return FS_OK;
	fs_ssh_close(h->ssh);
	h->ssh = NULL;
	return fs_ssh_open(
	        &h->ssh_opts, fs_deadline_ms(CONNECT_S * 1000), h->wake, host_stopped, h, &h->ssh, e);
}

int host_call(struct host *h, const struct host_call *c, int *status, struct fs_errbuf *e)
{
	struct fs_buf command, err, dropped;
	int mine = -1, rc;
	fs_buf_init(&command, 65536);
	fs_buf_init(&err, STDERR_MAX);
	fs_buf_init(&dropped, 65536);
	struct fs_buf *out = c->out ? c->out : &dropped;
	rc = write_command(c, &command, e);
	if (!rc)
		rc = freshen(h, e);
	if (!rc) {
		struct fs_ssh_run r = {.command = (const char *)command.data,
		        .input = c->input,
		        .input_fd = c->input_fd,
		        .input_n = c->input_n,
		        .out = out,
		        .err = &err,
		        .sent = c->sent,
		        .heard = c->heard,
		        .arg = c->arg,
		        .idle_ms = c->input_n ? SILENCE_MS : 0,
		        .deadline = fs_deadline_ms((c->deadline_s ? c->deadline_s : CALL_S) * 1000LL),
		        .wake_fd = h->wake,
		        .cancelled = host_stopped,
		        .cancelled_arg = h};
		rc = fs_ssh_run(h->ssh, &r, &mine, e);
		if (rc) { /* a session with half a command on it is of no use any more */
			fs_ssh_close(h->ssh);
			h->ssh = NULL;
		}
	}
	h->ssh_used = fs_now();
	if (!rc) {
		drop_noise(out);
		if (mine)
			say_stderr(&err, mine, e);
		rc = mine ? FS_EIO : FS_OK;
	}
	if (status)
		*status = mine;
	fs_buf_finish(&command);
	fs_buf_finish(&err);
	fs_buf_finish(&dropped);
	return rc;
}

bool host_value(const struct fs_buf *text, const char *name, char *out, size_t cap)
{
	size_t want = strlen(name);
	const char *s = text->data ? (const char *)text->data : "", *end = s + text->len;
	*out = '\0';
	while (s < end) {
		const char *nl = memchr(s, '\n', (size_t)(end - s));
		size_t n = nl ? (size_t)(nl - s) : (size_t)(end - s);
		if (n > want && s[want] == '=' && memcmp(s, name, want) == 0) {
			snprintf(out, cap, "%.*s", (int)(n - want - 1), s + want + 1);
			return true;
		}
		s += n + (nl != NULL);
	}
	return false;
}

/* ---- its two files ---- */

#define PICK                                                                                                 \
	"case $1 in keys) f=\"$HOME/.ssh/authorized_keys\";; "                                               \
	"config) f=\"${XDG_CONFIG_HOME:-$HOME/.config}/farsight/vision-host.json\";; esac; "                 \
	"if [ -L \"$f\" ]; then f=$(readlink -f \"$f\"); fi; "                                               \
	"if [ -e \"$f\" ]; then tag=$(cksum < \"$f\" | tr \" \" -); else tag=absent; fi; "

int host_file_read(struct host *h, const char *which, struct host_file *f, struct fs_errbuf *e)
{
	memset(f, 0, sizeof(*f));
	fs_buf_init(&f->text, HOST_FILE_MAX);
	struct host_call c = {.script = PICK "echo \"path=$f\"; echo \"tag=$tag\"; "
	                                     "if [ -e \"$f\" ]; then cat \"$f\"; fi",
	        .args = {which},
	        .out = &f->text};
	int rc = host_call(h, &c, NULL, e);
	if (!rc && (!host_value(&f->text, "path", f->path, sizeof(f->path)) ||
	                   !host_value(&f->text, "tag", f->tag, sizeof(f->tag))))
		rc = fs_fail(e, FS_EFORMAT, "the host's shell gives no sensible answers");
	if (rc) {
		fs_buf_finish(&f->text);
		return rc;
	}
	f->exists = strcmp(f->tag, "absent") != 0;
	for (int i = 0; i < 2; i++) { /* the two lines were found above */
		uint8_t *nl = memchr(f->text.data, '\n', f->text.len);
		fs_buf_consume(&f->text, nl ? (size_t)(nl - f->text.data) + 1 : f->text.len);
	}
	return FS_OK;
}

int host_file_write(struct host *h, const char *which, const struct host_file *was, const void *text,
        size_t n, struct fs_errbuf *e)
{
	/* A connection that breaks looks like the end of the input: the size tells. A file that its owner may
	 * not write stays so. */
	static const char script[] = PICK
	        "set -e; umask 077; mkdir -p \"$(dirname \"$f\")\"; t=\"$f.farsight-new\"; w=u+w; rm -f "
	        "\"$t\"; "
	        "if [ -e \"$f\" ]; then case \"$(ls -ld \"$f\")\" in ?[r-]-*) w=u-w;; esac; "
	        "cp -p \"$f\" \"$t\"; chmod u+w \"$t\"; fi; cat > \"$t\"; "
	        "if [ \"$(wc -c < \"$t\" | tr -d \" \")\" != \"$3\" ]; then rm -f \"$t\"; exit 8; fi; "
	        "if [ \"$tag\" != \"$2\" ]; then rm -f \"$t\"; exit 9; fi; "
	        "if [ \"$3\" = 0 ]; then rm -f \"$t\" \"$f\"; else chmod \"$w\" \"$t\"; mv -f \"$t\" \"$f\"; "
	        "fi";
	char size[24];
	int status, rc;
	snprintf(size, sizeof(size), "%zu", n);
	struct host_call c = {.script = script, .args = {which, was->tag, size}, .input = text, .input_n = n};
	rc = host_call(h, &c, &status, e);
	if (rc == FS_EIO && status == 9)
		return fs_fail(e, FS_EUNAVAILABLE, "%s changed while it was being edited; run this again",
		        was->path);
	return rc;
}

/* ---- here ---- */

static int child_output(struct host *h, struct fs_child *c, struct fs_buf *out, struct fs_buf *err,
        int64_t deadline, struct fs_errbuf *e)
{
	struct pollfd p[3] = {{.fd = c->out, .events = POLLIN}, {.fd = c->err, .events = POLLIN},
	        {.fd = h->wake, .events = POLLIN}};
	struct fs_buf *to[2] = {out, err};
	char bytes[65536];
	while (p[0].fd >= 0 || p[1].fd >= 0) {
		if (host_stopped(h))
			return fs_fail(e, FS_ECANCELLED, "cancelled");
		if (fs_now() >= deadline)
			return fs_fail(e, FS_ETIMEOUT, "a program took too long");
		poll(p, 3, fs_poll_ms(deadline));
		for (int i = 0; i < 2; i++) {
			ssize_t n = p[i].fd >= 0 && p[i].revents ? read(p[i].fd, bytes, sizeof(bytes)) : -1;
			if (n == 0)
				p[i].fd = -1;
			else if (n > 0 && fs_buf_append(to[i], bytes, (size_t)n) && i == 0)
				return fs_fail(
				        e, FS_ELIMIT, "a program writes more than %zu bytes", out->max);
		}
	}
	return FS_OK;
}

int host_child(
        struct host *h, const char *const argv[], struct fs_buf *out, int deadline_s, struct fs_errbuf *e)
{
	struct fs_child c;
	struct fs_buf err;
	int64_t deadline = fs_deadline_ms(deadline_s * 1000LL);
	int status = 0, rc = fs_child_start(&c, argv, NULL, true, true, e);
	if (rc)
		return rc;
	close(c.in);
	c.in = -1;
	fs_buf_init(&err, STDERR_MAX);
	rc = child_output(h, &c, out, &err, deadline, e);
	while (!rc && waitpid(c.pid, &status, 0) < 0) /* it has closed its output: it is ending */
		if (errno != EINTR)
			rc = fs_fail_errno(e, FS_EIO, "can not wait for %s", argv[0]);
	if (!rc) {
		c.pid = 0;
		if (!WIFEXITED(status) || WEXITSTATUS(status)) {
			say_stderr(&err, WIFEXITED(status) ? WEXITSTATUS(status) : 255, e);
			rc = fs_fail_prefix(e, FS_EIO, "%s", argv[0]);
		}
	}
	fs_child_end(&c, 500);
	fs_buf_finish(&err);
	return rc;
}

/* ---- checksums ---- */

static void hex(const unsigned char *md, char out[65])
{
	for (int i = 0; i < 32; i++)
		snprintf(out + 2 * i, 3, "%02x", md[i]);
}

void host_sha256(const void *data, size_t n, char out[65])
{
	unsigned char md[EVP_MAX_MD_SIZE];
	FS_ASSERT(EVP_Digest(data, n, md, NULL, EVP_sha256(), NULL) == 1);
	hex(md, out);
}

int host_sha256_file(
        struct host *h, int fd, uint64_t size, const char *what, char out[65], struct fs_errbuf *e)
{
	enum { CHUNK = 1 << 20 };
	EVP_MD_CTX *ctx = EVP_MD_CTX_new();
	uint8_t *bytes = malloc(CHUNK);
	unsigned char md[EVP_MAX_MD_SIZE];
	uint64_t at = 0;
	int rc = ctx && bytes && EVP_DigestInit_ex(ctx, EVP_sha256(), NULL) == 1
	                 ? FS_OK
	                 : fs_fail(e, FS_ENOMEM, "out of memory");
	while (!rc && at < size) {
		ssize_t n = pread(fd, bytes, CHUNK, (off_t)at);
		if (host_stopped(h))
			rc = fs_fail(e, FS_ECANCELLED, "cancelled");
		else if (n <= 0)
			rc = fs_fail_errno(e, FS_EIO, "can not read %s", what);
		else
			EVP_DigestUpdate(ctx, bytes, (size_t)n);
		at += rc ? 0 : (uint64_t)n;
		if (size > (uint64_t)256 << 20)
			host_progress(h, "checksum", at, size);
	}
	if (!rc && EVP_DigestFinal_ex(ctx, md, NULL) == 1)
		hex(md, out);
	EVP_MD_CTX_free(ctx);
	free(bytes);
	return rc;
}
