/*
 * Models on their way to the host: checksummed by SHA-256, continued after an interruption, left alone when
 * they are there. A part carries the checksum of its whole in its name, so that no other file's is continued.
 */
#include "common/gguf/gguf.h"
#include "server/cli/host.h"

#include <ctype.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define SEND_S (24 * 3600)
#define SUM_S 1800

struct sending {
	struct host *h;
	const char *step;
	char name[256]; /* there */
	int fd;
	uint64_t size, begun; /* begun: bytes that were there */
	char sum[65], part[24];
};

/* $1 name, $2 part's tag. */
#define PLACE "d=\"$HOME/.local/farsight/models\"; f=\"$d/$1\"; p=\"$d/.$1.$2.part\"; "

static int ask_state(struct sending *s, bool *same, int64_t *free_kb, struct fs_errbuf *e)
{
	static const char script[] =
	        PLACE "umask 077; mkdir -p \"$d\" || exit 1; for q in \"$d/.$1.\"*.part; do "
	              "if [ -e \"$q\" ] && [ \"$q\" != \"$p\" ]; then rm -f \"$q\"; fi; done; "
	              "if [ -f \"$f\" ] && [ \"$(wc -c < \"$f\" | tr -d \" \")\" = \"$3\" ]; then "
	              "echo \"sum=$(sha256sum < \"$f\" | cut -d \" \" -f 1)\"; fi; "
	              "if [ -f \"$p\" ]; then echo \"part=$(wc -c < \"$p\" | tr -d \" \")\"; fi; "
	              "echo \"free_kb=$(df -Pk \"$d\" | sed -n 2p | tr -s \" \" | cut -d \" \" -f 4)\"";
	char size[24], value[80];
	struct fs_buf out;
	snprintf(size, sizeof(size), "%llu", (unsigned long long)s->size);
	fs_buf_init(&out, 65536);
	struct host_call c = {
	        .script = script, .args = {s->name, s->part, size}, .out = &out, .deadline_s = SUM_S};
	int rc = host_call(s->h, &c, NULL, e);
	if (!rc) {
		*same = host_value(&out, "sum", value, sizeof(value)) && !strcmp(value, s->sum);
		s->begun = host_value(&out, "part", value, sizeof(value)) ? strtoull(value, NULL, 10) : 0;
		*free_kb = host_value(&out, "free_kb", value, sizeof(value)) ? strtoll(value, NULL, 10) : -1;
		if (s->begun > s->size)
			s->begun = 0;
	}
	fs_buf_finish(&out);
	return rc;
}

static void on_sent(void *arg, uint64_t n)
{
	struct sending *s = arg;
	host_progress(s->h, s->step, s->begun + n, s->size);
}

static int send_rest(struct sending *s, struct fs_errbuf *e)
{
	/* Written at its place and not at the end: what a broken connection left running there writes the
	 * same bytes to the same places. dd moves the descriptor that cat goes on with. */
	static const char script[] = PLACE "umask 077; if [ \"$3\" = 0 ]; then : > \"$p\"; fi; "
	                                   "{ dd if=/dev/null bs=1 seek=\"$3\" count=0 conv=notrunc 2> "
	                                   "/dev/null; exec cat; } 1<> \"$p\"";
	char from[24];
	snprintf(from, sizeof(from), "%llu", (unsigned long long)s->begun);
	if (lseek(s->fd, (off_t)s->begun, SEEK_SET) < 0)
		return fs_fail_errno(e, FS_EIO, "can not seek");
	struct host_call c = {.script = script,
	        .args = {s->name, s->part, from},
	        .input_fd = s->fd,
	        .input_n = s->size - s->begun,
	        .sent = on_sent,
	        .arg = s,
	        .deadline_s = SEND_S};
	return host_call(s->h, &c, NULL, e);
}

/* FS_EFORMAT: what arrived is not what was sent, and is removed. */
static int settle(struct sending *s, struct fs_errbuf *e)
{
	static const char script[] =
	        PLACE "if [ \"$(sha256sum < \"$p\" | cut -d \" \" -f 1)\" != \"$3\" ]; then "
	              "rm -f \"$p\"; exit 9; fi; mv -f \"$p\" \"$f\"";
	int status;
	struct host_call c = {.script = script, .args = {s->name, s->part, s->sum}, .deadline_s = SUM_S};
	int rc = host_call(s->h, &c, &status, e);
	return rc == FS_EIO && status == 9
	               ? fs_fail(e, FS_EFORMAT, "it arrived with another checksum and was removed there")
	               : rc;
}

static int send_file(struct sending *s, bool *same, struct fs_errbuf *e)
{
	int64_t free_kb;
	int rc = ask_state(s, same, &free_kb, e);
	if (rc || *same)
		return rc;
	uint64_t rest = s->size - s->begun;
	if (free_kb >= 0 && rest / 1024 + 1024 > (uint64_t)free_kb)
		return fs_fail(e, FS_ELIMIT, "its disk has room for %.1f MiB, and %.1f MiB are to come",
		        (double)free_kb / 1024, (double)rest / 1048576);
	if (s->begun)
		host_note(s->h, "%s: %.1f of %.1f MiB are there; going on from there", s->step,
		        (double)s->begun / 1048576, (double)s->size / 1048576);
	if (rest)
		rc = send_rest(s, e);
	return rc ? rc : settle(s, e);
}

/* name: of the file there, or NULL for its own. out gets its path there. */
static int send_model(
        struct host *h, const char *step, const char *path, const char *name, char *out, size_t cap)
{
	struct sending s = {.h = h, .step = step};
	struct fs_errbuf e = {""};
	struct stat st;
	bool same = false;
	const char *slash = strrchr(path, '/');
	char magic[4] = "";
	snprintf(s.name, sizeof(s.name), "%s", name ? name : slash ? slash + 1 : path);
	for (char *c = s.name; *c; c++)
		if (!isalnum((unsigned char)*c) && !strchr("-_.+", *c))
			*c = '_';
	if (*s.name == '.')
		*s.name = '_';
	s.fd = open(path, O_RDONLY | O_CLOEXEC);
	int rc = FS_OK;
	if (s.fd < 0 || fstat(s.fd, &st))
		rc = fs_fail_errno(&e, FS_EIO, "can not open %s", path);
	else if (!S_ISREG(st.st_mode) || pread(s.fd, magic, 4, 0) != 4 || memcmp(magic, "GGUF", 4) != 0)
		rc = fs_fail(&e, FS_EFORMAT, "%s is no GGUF file", path);
	if (!rc) {
		s.size = (uint64_t)st.st_size;
		rc = host_sha256_file(h, s.fd, s.size, path, s.sum, &e);
	}
	if (!rc) {
		snprintf(s.part, sizeof(s.part), "%.16s", s.sum);
		rc = send_file(&s, &same, &e);
	}
	if (s.fd >= 0)
		close(s.fd);
	if (rc)
		return host_failed(h, rc, step,
		        rc == FS_EIO || rc == FS_EFORMAT || rc == FS_ELIMIT
		                ? NULL
		                : "run it again: what has arrived stays there",
		        e.text);
	snprintf(out, cap, "%s/.local/farsight/models/%s", h->facts.home, s.name);
	if (same)
		host_ok(h, step, "%s is there, its checksum is right", s.name);
	else
		host_done(h, step, "%s, %.1f MiB, checksum right", s.name,
		        (double)(s.size - s.begun) / 1048576);
	return FS_OK;
}

/* The text model's vocabulary without its weights. */
static int send_stub(struct host *h)
{
	struct fs_errbuf e = {""};
	char stub[CLI_PATH], name[300];
	const char *tmp = getenv("TMPDIR"), *slash = strrchr(h->o.model, '/'),
	           *base = slash ? slash + 1 : h->o.model;
	size_t n = strlen(base);
	if (n > 5 && !strcmp(base + n - 5, ".gguf"))
		n -= 5;
	snprintf(name, sizeof(name), "%.*s-vocabulary.gguf", (int)FS_MIN(n, (size_t)230), base);
	snprintf(stub, sizeof(stub), "%s/farsight-stub-XXXXXX", tmp && *tmp ? tmp : "/tmp");
	int fd = mkstemp(stub), rc;
	if (fd < 0)
		return host_failed(h, FS_EIO, "vocabulary", NULL,
		        (fs_fail_errno(&e, FS_EIO, "can not make %s", stub), e.text));
	close(fd);
	rc = fs_gguf_write_stub(h->o.model, stub, NULL, &e);
	if (rc)
		rc = host_failed(h, rc, "vocabulary", NULL, e.text);
	else
		rc = send_model(h, "vocabulary", stub, name, h->host_model, sizeof(h->host_model));
	unlink(stub);
	return rc;
}

/* One that lies there already: settings that work are not changed to name a file that can not be read. */
static int look_at_model(struct host *h)
{
	struct fs_errbuf e = {""};
	struct host_call c = {
	        .script = "head -c 4 -- \"$1\" | grep -q \"^GGUF$\"", .args = {h->o.host_mmproj}};
	int status = 0, rc = host_call(h, &c, &status, &e);
	if (rc == FS_EIO && status)
		return host_failed(h, rc, "mmproj", "on the host, look at it with ls -l",
		        (fs_fail(&e, rc, "%s on the host is no GGUF file that %s can read", h->o.host_mmproj,
		                 h->target.user),
		                e.text));
	if (rc)
		return host_failed(h, rc, "mmproj", NULL, e.text);
	snprintf(h->host_mmproj, sizeof(h->host_mmproj), "%s", h->o.host_mmproj);
	host_ok(h, "mmproj", "%s of the host", h->host_mmproj);
	return FS_OK;
}

int host_send_models(struct host *h)
{
	int rc = h->o.host_mmproj ? look_at_model(h) : FS_OK;
	if (!rc && h->o.mmproj)
		rc = send_model(h, "mmproj", h->o.mmproj, NULL, h->host_mmproj, sizeof(h->host_mmproj));
	return rc || !h->o.model ? rc : send_stub(h);
}
