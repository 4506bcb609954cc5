/*
 * Host keys on their way into known_hosts: the line that trusts one, and appending it. Only the admin's
 * command does this, after somebody has compared the fingerprint; a connection never does. Any thread.
 */
#include "server/ssh/internal.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <openssl/evp.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

int fs_ssh_host_key_of(const struct fs_ssh_conf *c, const uint8_t *blob, size_t n, bool known,
        struct fs_ssh_host_key *out, struct fs_errbuf *e)
{
	const struct fs_ssh_target *t = &c->target;
	char name[300];
	unsigned char b64[3000];
	memset(out, 0, sizeof(*out));
	if (n > sizeof(b64) / 4 * 3 - 3 || !fs_ssh_blob_type(blob, n, out->type, sizeof(out->type)))
		return fs_fail(
		        e, FS_EAUTH, "the host key of %s is none that can be written down", t->hostname);
	if (*t->host_key_alias)
		snprintf(name, sizeof(name), "%s", t->host_key_alias);
	else if (t->port != 22)
		snprintf(name, sizeof(name), "[%s]:%d", t->hostname, t->port);
	else
		snprintf(name, sizeof(name), "%s", t->hostname);
	for (char *s = name; *s; s++)
		*s = (char)tolower((unsigned char)*s);
	EVP_EncodeBlock(b64, blob, (int)n);
	fs_ssh_fingerprint(blob, n, out->fingerprint);
	snprintf(out->file, sizeof(out->file), "%s", t->known_hosts);
	snprintf(out->line, sizeof(out->line), "%s %s %s", name, out->type, (const char *)b64);
	out->known = known;
	return FS_OK;
}

/* Whether the file's last line lacks its newline. */
static bool unfinished(int fd)
{
	char last;
	off_t end = lseek(fd, 0, SEEK_END);
	return end > 0 && pread(fd, &last, 1, end - 1) == 1 && last != '\n';
}

int fs_ssh_pin(const struct fs_ssh_host_key *k, struct fs_errbuf *e)
{
	char folder[512], text[sizeof(k->line) + 2];
	if (!*k->file || !strcmp(k->file, "/dev/null"))
		return fs_fail(
		        e, FS_EINVAL, "no known_hosts file is configured (UserKnownHostsFile is none)");
	snprintf(folder, sizeof(folder), "%s", k->file);
	char *slash = strrchr(folder, '/');
	if (slash && slash != folder) {
		*slash = '\0';
		if (mkdir(folder, 0700) && errno != EEXIST)
			return fs_fail_errno(e, FS_EIO, "can not make the folder %s", folder);
	}
	int fd = open(k->file, O_RDWR | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
	if (fd < 0)
		return fs_fail_errno(e, FS_EIO, "can not write %s", k->file);
	int n = snprintf(text, sizeof(text), "%s%s\n", unfinished(fd) ? "\n" : "", k->line);
	int rc = write(fd, text, (size_t)n) == n ? FS_OK
	                                         : fs_fail_errno(e, FS_EIO, "can not write %s", k->file);
	if (close(fd) && !rc)
		rc = fs_fail_errno(e, FS_EIO, "can not write %s", k->file);
	return rc;
}
