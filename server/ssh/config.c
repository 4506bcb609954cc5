/*
 * ~/.ssh/config: from a name as the admin wrote it to host, port, user, keys and known_hosts files, by
 * OpenSSH's rules: the first value of a key wins, Host blocks match the name as written, identity files add
 * up. Runs on the thread of the connection; keeps nothing. It refuses what it can not honour when it would
 * apply (ProxyJump, ProxyCommand, Match exec), naming file and line, and a file that others may write.
 */
#include "server/ssh/conf.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <glob.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>
#include <unistd.h>

static int parse_text(struct fs_conf_parse *p, const char *file, char *text, size_t n, bool active);

/* Cuts the next word out of *p in place: quotes, backslash inside quotes, '#' at a word's start ends the
 * line. NULL = no more. */
static char *next_word(char **p)
{
	char *s = *p;
	while (*s == ' ' || *s == '\t')
		s++;
	if (!*s || *s == '#')
		return NULL;
	char *start = s, *w = s, quote = 0;
	for (; *s && (quote || (*s != ' ' && *s != '\t')); s++) {
		if (!quote && (*s == '"' || *s == '\'')) {
			quote = *s;
		} else if (quote && *s == quote) {
			quote = 0;
		} else {
			if (*s == '\\' && (s[1] == '"' || s[1] == '\'' || s[1] == '\\'))
				s++;
			*w++ = *s;
		}
	}
	*p = *s ? s + 1 : s;
	*w = '\0';
	return start;
}

static bool host_block_matches(const char *name, char *rest)
{
	bool found = false;
	for (char *w; (w = next_word(&rest));) {
		bool negated = *w == '!';
		if (fs_ssh_glob(w + negated, name)) {
			if (negated)
				return false;
			found = true;
		}
	}
	return found;
}

/* The name that "Match host" sees: HostName as far as it is known by now. */
static int current_hostname(const struct fs_conf_parse *p, char *out, size_t cap)
{
	return fs_conf_expand(p, "HostName", *p->hostname ? p->hostname : "%n", out, cap, p->e);
}

static int unsupported(const struct fs_conf_parse *p, const char *what, const char *hint, struct fs_errbuf *e)
{
	return fs_fail(e, FS_ENOTSUP, "%s line %d: %s applies to host %s and can not be honoured here; %s",
	        p->file, p->line, what, p->out->original, hint);
}

/* Criteria are checked in order; what needs a program or a second pass is an error unless an earlier
 * criterion already failed. */
static int match_block(struct fs_conf_parse *p, char *rest, bool *active, struct fs_errbuf *e)
{
	bool on = true;
	for (char *w; (w = next_word(&rest));) {
		bool negated = *w == '!';
		const char *crit = w + negated;
		if (!strcasecmp(crit, "all")) {
			on = on && !negated;
			continue;
		}
		if (!strcasecmp(crit, "canonical")) { /* names are never canonicalised here */
			on = on && negated;
			continue;
		}
		if (!strcasecmp(crit, "final")) {
			if (on)
				return unsupported(
				        p, "\"Match final\"", "write the settings into a Host block", e);
			continue;
		}
		char *arg = next_word(&rest);
		if (!arg)
			return fs_fail(e, FS_EINVAL, "%s line %d: \"Match %s\" lacks its value", p->file,
			        p->line, crit);
		const char *subject = NULL;
		char hostname[256];
		int rc = current_hostname(p, hostname, sizeof(hostname));
		if (rc)
			return rc;
		if (!strcasecmp(crit, "host"))
			subject = hostname;
		else if (!strcasecmp(crit, "originalhost"))
			subject = p->out->original;
		else if (!strcasecmp(crit, "user"))
			subject = *p->out->target.user ? p->out->target.user : p->login;
		else if (!strcasecmp(crit, "localuser"))
			subject = p->login;
		if (!subject) {
			if (on)
				return unsupported(p, "a Match block whose criteria can not be evaluated",
				        "write the settings into a Host block", e);
			continue;
		}
		bool hit = fs_ssh_glob_list(arg, ',', subject) == 1;
		on = on && hit != negated;
	}
	*active = on;
	return FS_OK;
}

static int include_one(struct fs_conf_parse *p, const char *path, bool active, struct fs_errbuf *e)
{
	if (++p->n_files > FS_SSH_CONF_MAX_FILES)
		return fs_fail(e, FS_ELIMIT, "%s line %d: Include reads more than %d files", p->file, p->line,
		        FS_SSH_CONF_MAX_FILES);
	char *text;
	size_t n;
	int rc = fs_conf_read_file(path, p->check_owner, &text, &n, e);
	if (rc == FS_ENOTFOUND)
		return FS_OK;
	if (rc)
		return rc;
	const char *file = p->file;
	int line = p->line;
	p->depth++;
	rc = parse_text(p, path, text, n, active);
	p->depth--;
	p->file = file;
	p->line = line;
	free(text);
	return rc;
}

static int include(struct fs_conf_parse *p, char *rest, bool active, struct fs_errbuf *e)
{
	if (p->depth >= FS_SSH_CONF_MAX_DEPTH)
		return fs_fail(e, FS_ELIMIT, "%s line %d: Include is nested more than %d deep", p->file,
		        p->line, FS_SSH_CONF_MAX_DEPTH);
	int rc = FS_OK;
	for (char *w; !rc && (w = next_word(&rest));) {
		char pattern[1024];
		int n;
		if (*w == '~' && w[1] == '/')
			n = snprintf(pattern, sizeof(pattern), "%s%s", p->home, w + 1);
		else if (*w == '/')
			n = snprintf(pattern, sizeof(pattern), "%s", w);
		else
			n = snprintf(pattern, sizeof(pattern), "%s/.ssh/%s", p->home, w);
		if (n < 0 || (size_t)n >= sizeof(pattern))
			return fs_fail(e, FS_ELIMIT, "%s line %d: the path is too long", p->file, p->line);
		glob_t g;
		if (glob(pattern, 0, NULL, &g))
			continue; /* nothing matches: fine, as in OpenSSH */
		for (size_t i = 0; !rc && i < g.gl_pathc; i++)
			rc = include_one(p, g.gl_pathv[i], active, e);
		globfree(&g);
	}
	return rc;
}

static int take_string(struct fs_conf_parse *p, char *dst, size_t cap, const char *value, struct fs_errbuf *e)
{
	if (*dst)
		return FS_OK; /* the first one wins */
	if (strlen(value) >= cap)
		return fs_fail(e, FS_ELIMIT, "%s line %d: the value is too long", p->file, p->line);
	strcpy(dst, value);
	return FS_OK;
}

static int take_files(
        struct fs_conf_parse *p, struct fs_conf_files *f, char *first, char *rest, struct fs_errbuf *e)
{
	if (f->set)
		return FS_OK;
	f->set = true;
	for (char *w = first; w && f->n < FS_SSH_MAX_KNOWN_FILES; w = next_word(&rest)) {
		if (!strcasecmp(w, "none"))
			break;
		if (strlen(w) >= sizeof(f->path[0]))
			return fs_fail(e, FS_ELIMIT, "%s line %d: the path is too long", p->file, p->line);
		strcpy(f->path[f->n++], w);
	}
	return FS_OK;
}

static int take_port(struct fs_conf_parse *p, const char *value, struct fs_errbuf *e)
{
	char *end;
	errno = 0;
	long port = strtol(value, &end, 10);
	if (errno || *end || port < 1 || port > 65535)
		return fs_fail(e, FS_EINVAL, "%s line %d: Port must be 1 to 65535", p->file, p->line);
	if (!p->out->target.port)
		p->out->target.port = (int)port;
	return FS_OK;
}

static int take_identity(struct fs_conf_parse *p, const char *value, struct fs_errbuf *e)
{
	struct fs_ssh_target *t = &p->out->target;
	p->identity_set = true;
	if (!strcasecmp(value, "none") || t->n_identities >= FS_SSH_MAX_KEYS)
		return FS_OK;
	if (strlen(value) >= sizeof(t->identity[0]))
		return fs_fail(e, FS_ELIMIT, "%s line %d: the path is too long", p->file, p->line);
	strcpy(t->identity[t->n_identities++], value);
	return FS_OK;
}

static int take_proxy(struct fs_conf_parse *p, const char *key, const char *value)
{
	if (p->proxy_line)
		return FS_OK;
	p->proxy_line = p->line;
	p->proxy_none = !strcasecmp(value, "none");
	snprintf(p->proxy_file, sizeof(p->proxy_file), "%s", p->file);
	snprintf(p->proxy_key, sizeof(p->proxy_key), "%s", key);
	return FS_OK;
}

/* One setting of an active block. */
static int take_setting(struct fs_conf_parse *p, const char *key, char *rest, struct fs_errbuf *e)
{
	struct fs_ssh_target *t = &p->out->target;
	if (!strcasecmp(key, "ProxyCommand") || !strcasecmp(key, "ProxyJump")) {
		char *w = next_word(&rest);
		return w ? take_proxy(p, key, w) : FS_OK;
	}
	char *value = next_word(&rest);
	if (!value)
		return FS_OK;
	if (!strcasecmp(key, "HostName"))
		return take_string(p, p->hostname, sizeof(p->hostname), value, e);
	if (!strcasecmp(key, "User"))
		return take_string(p, t->user, sizeof(t->user), value, e);
	if (!strcasecmp(key, "Port"))
		return take_port(p, value, e);
	if (!strcasecmp(key, "HostKeyAlias"))
		return take_string(p, t->host_key_alias, sizeof(t->host_key_alias), value, e);
	if (!strcasecmp(key, "IdentityFile"))
		return take_identity(p, value, e);
	if (!strcasecmp(key, "IdentityAgent"))
		return take_string(p, t->identity_agent, sizeof(t->identity_agent), value, e);
	if (!strcasecmp(key, "UserKnownHostsFile"))
		return take_files(p, &p->user_known, value, rest, e);
	if (!strcasecmp(key, "GlobalKnownHostsFile"))
		return take_files(p, &p->global_known, value, rest, e);
	if (!strcasecmp(key, "IdentitiesOnly") && !p->identities_only_set) {
		p->identities_only_set = true;
		t->identities_only = !strcasecmp(value, "yes") || !strcasecmp(value, "true");
	}
	return FS_OK;
}

/* Keyword, then blanks or one '='. Returns the rest of the line, NULL for an empty line or a comment. */
static char *split_key(char *line, char **key)
{
	char *end = line + strlen(line);
	while (end > line && isspace((unsigned char)end[-1]))
		*--end = '\0';
	while (isspace((unsigned char)*line))
		line++;
	if (!*line || *line == '#')
		return NULL;
	*key = line;
	char *rest = line + strcspn(line, " \t=\"");
	if (*rest && *rest != '"')
		*rest++ = '\0';
	rest += strspn(rest, " \t");
	if (*rest == '=')
		rest += 1 + strspn(rest + 1, " \t");
	return rest;
}

/* allowed: whether the block that includes this file is active; a Host line inside can only narrow it. */
static int parse_text(struct fs_conf_parse *p, const char *file, char *text, size_t n, bool allowed)
{
	struct fs_errbuf *e = p->e;
	bool active = allowed;
	p->file = file;
	p->line = 0;
	char *end = text + n;
	for (char *line = text; line < end;) {
		char *nl = memchr(line, '\n', (size_t)(end - line));
		char *next = nl ? nl + 1 : end;
		if (nl)
			*nl = '\0';
		p->line++;
		char *key = NULL, *rest = split_key(line, &key);
		line = next;
		if (!rest)
			continue;
		int rc = FS_OK;
		if (!strcasecmp(key, "Host")) {
			active = allowed && host_block_matches(p->out->original, rest);
		} else if (!strcasecmp(key, "Match")) {
			active = false;
			if (allowed)
				rc = match_block(p, rest, &active, e);
		} else if (!strcasecmp(key, "Include")) {
			rc = active ? include(p, rest, active, e) : FS_OK;
		} else if (active) {
			rc = take_setting(p, key, rest, e);
		}
		if (rc)
			return rc;
	}
	return FS_OK;
}

int fs_conf_parse_text(struct fs_conf_parse *p, const char *file, char *text, size_t n)
{
	int rc = parse_text(p, file, text, n, true);
	if (!rc && p->proxy_line && !p->proxy_none) {
		p->file = p->proxy_file;
		p->line = p->proxy_line;
		rc = unsupported(p, p->proxy_key,
		        "give the vision host an address that this machine reaches directly, or forward a "
		        "port with ssh -L and name that",
		        p->e);
	}
	return rc;
}

int fs_conf_read_file(const char *path, bool check_owner, char **text, size_t *n, struct fs_errbuf *e)
{
	/* as with ssh -F, the way to say "no file" */
	if (strcmp(path, "/dev/null") == 0) {
		*n = 0;
		*text = calloc(1, 1);
		return *text ? FS_OK : fs_fail(e, FS_ENOMEM, "out of memory");
	}
	int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
	if (fd < 0)
		return errno == ENOENT || errno == ENOTDIR
		               ? FS_ENOTFOUND
		               : fs_fail_errno(e, FS_EIO, "can not open %s", path);
	struct stat st;
	int rc = FS_OK;
	char *buf = NULL;
	size_t len = 0;
	if (fstat(fd, &st) || !S_ISREG(st.st_mode))
		rc = fs_fail(e, FS_EINVAL, "%s is not a file", path);
	else if (check_owner && ((st.st_uid != 0 && st.st_uid != getuid()) || (st.st_mode & 022)))
		rc = fs_fail(e, FS_EAUTH, "%s can be changed by others; run: chmod go-w %s", path, path);
	else if ((uint64_t)st.st_size > FS_SSH_CONF_MAX_BYTES)
		rc = fs_fail(e, FS_ELIMIT, "%s is larger than %zu bytes", path, FS_SSH_CONF_MAX_BYTES);
	else if (!(buf = malloc((size_t)st.st_size + 1)))
		rc = fs_fail(e, FS_ENOMEM, "out of memory");
	while (!rc && len < (size_t)st.st_size) {
		ssize_t r = read(fd, buf + len, (size_t)st.st_size - len);
		if (r < 0 && errno == EINTR)
			continue;
		if (r < 0)
			rc = fs_fail_errno(e, FS_EIO, "can not read %s", path);
		if (r <= 0)
			break;
		len += (size_t)r;
	}
	close(fd);
	if (rc) {
		free(buf);
		return rc;
	}
	/* a NUL inside would hide what follows it: such a line ends there, as any C string does */
	buf[len] = '\0';
	*text = buf;
	*n = len;
	return FS_OK;
}
