/* STRATA_VISION_SSH_OPTS: options as one would give them to ssh, of which a few have a meaning here. */
#include "server/shim/shim.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#define MAX_WORDS 64

struct words {
	char text[SHIM_TEXT]; /* the words one behind the other, each with its NUL */
	const char *word[MAX_WORDS];
	size_t n;
};

/* Quotes and backslashes as in a POSIX shell; nothing is expanded. */
static int split(const char *s, struct words *w, struct fs_errbuf *e)
{
	char *out = w->text;
	if (strlen(s) >= sizeof(w->text) / 2) /* each byte gives at most one byte and one NUL */
		return fs_fail(e, FS_ELIMIT, "it is longer than %zu bytes", sizeof(w->text) / 2 - 1);
	for (;;) {
		s += strspn(s, " \t\r\n");
		if (!*s)
			return FS_OK;
		if (w->n == MAX_WORDS)
			return fs_fail(e, FS_ELIMIT, "it has more than %d words", MAX_WORDS);
		w->word[w->n++] = out;
		for (char quote = 0; *s && (quote || !strchr(" \t\r\n", *s)); s++) {
			if (quote ? *s == quote : *s == '\'' || *s == '"')
				quote = quote ? 0 : *s;
			else if (*s == '\\' && quote != '\'' && s[1])
				*out++ = *++s;
			else
				*out++ = *s;
			if (quote && !s[1])
				return fs_fail(e, FS_EINVAL, "a quote is not closed");
		}
		*out++ = '\0';
	}
}

static int put(char *out, size_t cap, const char *option, const char *value, struct fs_errbuf *e)
{
	if (!*value)
		return fs_fail(e, FS_EINVAL, "%s lacks its value", option);
	if ((size_t)snprintf(out, cap, "%s", value) >= cap)
		return fs_fail(e, FS_ELIMIT, "the value of %s is too long", option);
	return FS_OK;
}

static int put_port(struct shim_ssh *out, const char *value, struct fs_errbuf *e)
{
	char *end;
	long v = strtol(value, &end, 10);
	if (!*value || *end || v < 1 || v > 65535)
		return fs_fail(
		        e, FS_EINVAL, "the port must be a number from 1 to 65535, not \"%.60s\"", value);
	out->port = (int)v;
	return FS_OK;
}

/* "Key=Value" or "Key Value" */
static int take_o(const char *text, struct shim_ssh *out, struct fs_errbuf *e)
{
	size_t n = strcspn(text, "= \t");
	const char *value = text + n;
	value += strspn(value, " \t");
	value += *value == '=';
	value += strspn(value, " \t");
	char key[64];
	snprintf(key, sizeof(key), "%.*s", (int)FS_MIN(n, sizeof(key) - 1), text);
	if (strcasecmp(key, "Port") == 0)
		return put_port(out, value, e);
	if (strcasecmp(key, "User") == 0)
		return put(out->user, sizeof(out->user), key, value, e);
	if (strcasecmp(key, "IdentityFile") == 0)
		return put(out->identity, sizeof(out->identity), key, value, e);
	if (strcasecmp(key, "UserKnownHostsFile") == 0) {
		int rc = put(out->known_hosts, sizeof(out->known_hosts), key, value, e);
		out->known_hosts[strcspn(out->known_hosts, " \t")] = '\0'; /* the first of several */
		return rc;
	}
	fs_warn("STRATA_VISION_SSH_OPTS: -o %s has no meaning here and is left out", key);
	return FS_OK;
}

/* w is "-x…"; *next is taken when the option has its value there. */
static int take_option(const char *w, const char *next, bool *took, struct shim_ssh *out, struct fs_errbuf *e)
{
	static const char with_value[] = "BbcDEeFIiJLlmOopQRSWw"; /* ssh(1) */
	char name[3] = {'-', w[1], '\0'};
	const char *value = w + 2;
	bool has_value = w[1] && strchr(with_value, w[1]);
	*took = has_value && !*value && next;
	if (*took)
		value = next;
	switch (w[1]) {
	case 'p':
		return put_port(out, value, e);
	case 'i':
		return put(out->identity, sizeof(out->identity), name, value, e);
	case 'l':
		return put(out->user, sizeof(out->user), name, value, e);
	case 'F':
		return put(out->config, sizeof(out->config), name, value, e);
	case 'o':
		return take_o(value, out, e);
	default:
		fs_warn("STRATA_VISION_SSH_OPTS: %s has no meaning here and is left out",
		        has_value ? name : w);
		return FS_OK;
	}
}

int shim_ssh_opts(const char *text, struct shim_ssh *out, struct fs_errbuf *e)
{
	struct words w = {.n = 0};
	*out = (struct shim_ssh){.port = 0};
	int rc = split(text, &w, e);
	for (size_t i = 0; i < w.n && !rc; i++) {
		bool took = false;
		if (w.word[i][0] == '-')
			rc = take_option(w.word[i], i + 1 < w.n ? w.word[i + 1] : NULL, &took, out, e);
		else
			rc = fs_fail(e, FS_EINVAL, "\"%.100s\" is no option of ssh", w.word[i]);
		i += took;
	}
	return rc ? fs_fail_prefix(e, rc, "STRATA_VISION_SSH_OPTS") : FS_OK;
}

int shim_agent_command(const char *root, char *out, size_t cap, struct fs_errbuf *e)
{
	struct fs_buf b;
	fs_buf_init(&b, cap - 1);
	bool home = root[0] == '~' && (root[1] == '/' || !root[1]);
	int rc = fs_buf_append_str(&b, home ? "~/'" : "'");
	root += home;
	root += home && *root == '/';
	for (; *root && !rc; root++)
		rc = *root == '\'' ? fs_buf_append_str(&b, "'\\''") : fs_buf_append(&b, root, 1);
	if (!rc && b.len > 1 && b.data[b.len - 1] != '/' && !(home && b.len == 3))
		rc = fs_buf_append_str(&b, "/");
	if (!rc)
		rc = fs_buf_append_str(&b, "bin/farsight-agent'");
	if (rc)
		fs_fail(e, FS_ELIMIT, "STRATA_VISION_ROOT is too long");
	else
		memcpy(out, b.data, b.len + 1);
	fs_buf_finish(&b);
	return rc ? FS_ELIMIT : FS_OK;
}
