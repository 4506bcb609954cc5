/*
 * The key that servers of this machine use on vision hosts: made once, without a passphrase, since a server
 * starts with nobody there; and therefore allowed to run the agent and nothing else.
 */
#include "server/cli/host.h"

#include <errno.h>
#include <pwd.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#define KEYGEN_S 30
#define COMMENT 320

/* What the server makes of "identity": "~/" and the like. */
static int entry_path(struct host *h, struct fs_errbuf *e)
{
	struct fs_ssh_opts o = h->ssh_opts;
	struct fs_ssh_target t;
	o.identity = h->entry_identity;
	o.only_identity = true;
	int rc = fs_ssh_resolve(&o, &t, e);
	if (!rc)
		snprintf(h->key, sizeof(h->key), "%s", t.identity[0]);
	return rc;
}

static int key_path(struct host *h, struct fs_errbuf *e)
{
	const char *xdg = getenv("XDG_CONFIG_HOME"), *home = getenv("HOME");
	int n;
	if (h->entry_identity)
		return entry_path(h, e);
	if (xdg && xdg[0] == '/')
		n = snprintf(h->key, sizeof(h->key), "%s/farsight/id_farsight", xdg);
	else if (home && home[0] == '/')
		n = snprintf(h->key, sizeof(h->key), "%s/.config/farsight/id_farsight", home);
	else
		return fs_fail(e, FS_EINVAL, "HOME is not set");
	return (size_t)n < sizeof(h->key) ? FS_OK : fs_fail(e, FS_EINVAL, "HOME is too long");
}

/* The folders above it, as far as they are missing. */
static int make_folders(const char *path, struct fs_errbuf *e)
{
	char part[CLI_PATH];
	for (const char *s = strchr(path + 1, '/'); s; s = strchr(s + 1, '/')) {
		snprintf(part, sizeof(part), "%.*s", (int)(s - path), path);
		if (mkdir(part, 0700) && errno != EEXIST)
			return fs_fail_errno(e, FS_EIO, "can not make the folder %s", part);
	}
	return FS_OK;
}

/* For people, in authorized_keys: images of machines share it. */
static void own_name(char *out, size_t cap)
{
	char machine[200] = "?";
	struct passwd *pw = getpwuid(getuid());
	gethostname(machine, sizeof(machine));
	machine[sizeof(machine) - 1] = '\0';
	snprintf(out, cap, "farsight:%s@%s", pw ? pw->pw_name : "?", machine);
}

/* Where a key was lost its public half may have stayed: the new one's line is to replace that one's. */
static bool lost_comment(const struct host *h, char *out, size_t cap)
{
	char path[CLI_PATH + 8], line[1024];
	size_t n = 0;
	snprintf(path, sizeof(path), "%s.pub", h->key);
	FILE *f = fopen(path, "re");
	const char *comment = f && fgets(line, sizeof(line), f) ? host_key_comment(line, &n) : "";
	if (f)
		fclose(f);
	snprintf(out, cap, "%.*s", (int)n, comment);
	return n < cap && host_comment_is_tagged(comment, n);
}

/* By the tag this machine's lines are told from those of others with the same name. */
static int new_comment(const struct host *h, char *out, size_t cap, struct fs_errbuf *e)
{
	uint8_t tag[HOST_TAG / 2];
	if (lost_comment(h, out, cap))
		return FS_OK;
	if (getrandom(tag, sizeof(tag), 0) != (ssize_t)sizeof(tag))
		return fs_fail(e, FS_EIO, "can not get random bytes");
	own_name(out, cap);
	for (size_t i = 0; i < sizeof(tag); i++) {
		size_t n = strlen(out);
		snprintf(out + n, cap - n, "%s%02x", i ? "" : ":", tag[i]);
	}
	return FS_OK;
}

static int make_key(struct host *h, struct fs_errbuf *e)
{
	char comment[COMMENT];
	struct fs_buf out;
	int rc = make_folders(h->key, e);
	if (!rc)
		rc = new_comment(h, comment, sizeof(comment), e);
	if (rc)
		return rc;
	const char *const argv[] = {
	        "ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", h->key, NULL};
	fs_buf_init(&out, 65536);
	rc = host_child(h, argv, &out, KEYGEN_S, e);
	fs_buf_finish(&out);
	return rc;
}

/* From the private file: a .pub beside it may be another key's. Comments that are not ours are not taken. */
static int read_public(struct host *h, struct fs_errbuf *e)
{
	char comment[COMMENT];
	struct fs_buf out;
	fs_buf_init(&out, sizeof(h->key_line) / 2);
	const char *const argv[] = {"ssh-keygen", "-y", "-P", "", "-f", h->key, NULL};
	int rc = host_child(h, argv, &out, KEYGEN_S, e);
	if (!rc) {
		char *text = (char *)out.data;
		char *end = text ? strchr(text, ' ') : NULL;
		end = end ? end + 1 + strcspn(end + 1, " \n") : NULL;
		size_t n = 0;
		const char *own = end ? host_key_comment(text, &n) : "";
		if (host_comment_is_tagged(own, n))
			snprintf(comment, sizeof(comment), "%.*s", (int)n, own);
		else
			own_name(comment, sizeof(comment));
		if (end)
			snprintf(h->key_line, sizeof(h->key_line), "%.*s %s", (int)(end - text), text,
			        comment);
		else
			rc = fs_fail(e, FS_EFORMAT, "ssh-keygen tells no public key of %s", h->key);
	}
	fs_buf_finish(&out);
	return rc;
}

int host_own_key(struct host *h, bool may_make)
{
	struct fs_errbuf e = {""};
	struct stat st;
	char remedy[CLI_PATH + 32];
	int rc = key_path(h, &e);
	if (rc)
		return host_failed(h, rc, "own key", NULL, e.text);
	bool there = stat(h->key, &st) == 0;
	if (!there && !may_make) {
		fs_fail(&e, FS_ENOTFOUND, "%s does not exist", h->key);
		return host_failed(
		        h, FS_ENOTFOUND, "own key", "run farsight host add, which makes one", e.text);
	}
	if (there && (st.st_mode & 077)) {
		fs_fail(&e, FS_EAUTH, "%s can be read by others", h->key);
		snprintf(remedy, sizeof(remedy), "type: chmod 600 %s", h->key);
		return host_failed(h, FS_EAUTH, "own key", remedy, e.text);
	}
	rc = there ? FS_OK : make_key(h, &e);
	if (!rc)
		rc = read_public(h, &e);
	if (rc)
		return host_failed(h, rc, "own key", NULL, e.text);
	if (there)
		host_ok(h, "own key", "%s", h->key);
	else
		host_done(h, "own key", "made %s", h->key);
	return FS_OK;
}

/* line NULL: our line goes. */
static int edit_keys(struct host *h, const char *line, bool *changed, size_t *others, struct fs_errbuf *e)
{
	struct host_file f;
	struct fs_buf out;
	int rc = host_file_read(h, "keys", &f, e);
	if (rc)
		return rc;
	fs_buf_init(&out, HOST_FILE_MAX + 4096);
	rc = host_keys_edit((char *)f.text.data, f.text.len, h->key_line, line, &out, others, e);
	*changed = !rc && (out.len != f.text.len || (out.len && memcmp(out.data, f.text.data, out.len) != 0));
	if (*changed)
		rc = host_file_write(h, "keys", &f, out.data, out.len, e);
	if (rc)
		fs_fail_prefix(e, rc, "%s", f.path);
	fs_buf_finish(&out);
	fs_buf_finish(&f.text);
	return rc;
}

int host_install_key(struct host *h)
{
	char line[sizeof(h->key_line) + 200];
	struct fs_errbuf e = {""};
	bool changed;
	size_t others;
	snprintf(line, sizeof(line), "restrict,command=\"exec \\\"$HOME%s\\\"\" %s", HOST_AGENT_MARK,
	        h->key_line);
	int rc = edit_keys(h, line, &changed, &others, &e);
	if (rc)
		return host_failed(h, rc, "key on the host", NULL, e.text);
	if (changed)
		host_done(h, "key on the host", "it may run farsight-agent there, and nothing else");
	if (changed && others)
		host_note(h,
		        "%zu other lines of authorized_keys there run farsight-agent: of other main PCs, or "
		        "of "
		        "keys that this one has lost",
		        others);
	if (!changed)
		host_ok(h, "key on the host", "it may run farsight-agent there, and nothing else");
	return FS_OK;
}

int host_remove_key(struct host *h, size_t *others)
{
	struct fs_errbuf e = {""};
	bool changed;
	int rc = edit_keys(h, NULL, &changed, others, &e);
	if (rc)
		return host_failed(h, rc, "key on the host", NULL, e.text);
	if (changed)
		host_done(h, "key on the host", "its line of authorized_keys is gone");
	else
		host_ok(h, "key on the host", "none was there");
	return FS_OK;
}
