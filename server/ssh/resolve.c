/*
 * From the options of a host to what is dialled: splits "user@host:port", lets ~/.ssh/config fill in, puts
 * the defaults, expands % tokens and '~'. Runs on any thread; keeps nothing.
 */
#include "server/ssh/conf.h"

#include <errno.h>
#include <pwd.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void whoami(char *home, size_t home_cap, char *login, size_t login_cap)
{
	struct passwd pw, *found = NULL;
	char mem[4096];
	if (getpwuid_r(getuid(), &pw, mem, sizeof(mem), &found))
		found = NULL;
	const char *h = getenv("HOME");
	if (!h || *h != '/')
		h = found ? found->pw_dir : "/";
	snprintf(home, home_cap, "%s", h);
	if (found)
		snprintf(login, login_cap, "%s", found->pw_name);
	else
		snprintf(login, login_cap, "%u", (unsigned)getuid());
}

static bool all_digits(const char *s)
{
	return *s && s[strspn(s, "0123456789")] == '\0';
}

/* "[user@]host[:port]"; an IPv6 address with a port needs brackets. */
static int split_name(const char *name, struct fs_ssh_conf *c, struct fs_errbuf *e)
{
	struct fs_ssh_target *t = &c->target;
	const char *at = strrchr(name, '@'), *host = at ? at + 1 : name, *port = NULL;
	size_t n = strlen(host);
	if (at && (size_t)(at - name) >= sizeof(t->user))
		return fs_fail(e, FS_EINVAL, "the user name in \"%.100s\" is too long", name);
	if (at)
		memcpy(t->user, name, (size_t)(at - name));
	const char *colon = strrchr(host, ':');
	if (*host == '[') {
		const char *close = strchr(host, ']');
		if (!close || (close[1] && close[1] != ':'))
			return fs_fail(e, FS_EINVAL,
			        "host \"%.100s\": write an IPv6 address as [address]:port", name);
		port = close[1] ? close + 2 : NULL;
		host++;
		n = (size_t)(close - host);
	} else if (colon && colon == strchr(host, ':')) {
		port = colon + 1;
		n = (size_t)(colon - host);
	}
	if (n == 0 || n >= sizeof(c->original) || *host == '-' || (at && at == name))
		return fs_fail(e, FS_EINVAL,
		        "\"%.100s\" is not a host; write host, user@host or an alias of ~/.ssh/config", name);
	memcpy(c->original, host, n);
	for (const char *s = c->original; *s; s++)
		if ((unsigned char)*s <= ' ' || *s == 0x7f || strchr("/\\\"'`$&;|<>()*?!", *s))
			return fs_fail(e, FS_EINVAL,
			        "the host name \"%.100s\" holds a character that no host name has", name);
	if (!port)
		return FS_OK;
	if (!all_digits(port) || strlen(port) > 5 || atoi(port) < 1 || atoi(port) > 65535)
		return fs_fail(e, FS_EINVAL, "host \"%.100s\": the port must be 1 to 65535", name);
	t->port = atoi(port);
	return FS_OK;
}

/* Appends; false when it does not fit. */
static bool put(char *out, size_t cap, size_t *n, const char *s)
{
	size_t len = strlen(s);
	if (len >= cap - *n)
		return false;
	memcpy(out + *n, s, len + 1);
	*n += len;
	return true;
}

/* The tokens of ssh_config(5) that have a meaning for a direct connection. */
static const char *token(const struct fs_conf_parse *p, char which, char *mem, size_t cap)
{
	const struct fs_ssh_target *t = &p->out->target;
	switch (which) {
	case '%':
		return "%";
	case 'd':
		return p->home;
	case 'h':
		return *t->hostname ? t->hostname : p->out->original;
	case 'k':
		return *t->host_key_alias ? t->host_key_alias : p->out->original;
	case 'n':
		return p->out->original;
	case 'p':
		snprintf(mem, cap, "%d", t->port);
		return mem;
	case 'r':
		return t->user;
	case 'u':
		return p->login;
	case 'i':
		snprintf(mem, cap, "%u", (unsigned)getuid());
		return mem;
	case 'l':
	case 'L':
		if (gethostname(mem, cap))
			return NULL;
		mem[cap - 1] = '\0';
		if (which == 'L')
			mem[strcspn(mem, ".")] = '\0';
		return mem;
	default:
		return NULL;
	}
}

/* ${NAME} */
static const char *env_token(const char *s, size_t *used)
{
	const char *close = strchr(s, '}');
	char name[128];
	if (!close || (size_t)(close - s) - 2 >= sizeof(name))
		return NULL;
	memcpy(name, s + 2, (size_t)(close - s) - 2);
	name[close - s - 2] = '\0';
	*used = (size_t)(close - s) + 1;
	return getenv(name);
}

int fs_conf_expand(const struct fs_conf_parse *p, const char *key, const char *in, char *out, size_t cap,
        struct fs_errbuf *e)
{
	size_t n = 0;
	bool fits = true;
	out[0] = '\0';
	if (in[0] == '~' && (in[1] == '/' || !in[1])) {
		fits = put(out, cap, &n, p->home);
		in++;
	}
	while (*in && fits) {
		char one[2] = {*in, 0}, mem[256];
		const char *s = one;
		size_t used = 1;
		if (*in == '%' && in[1]) {
			s = token(p, in[1], mem, sizeof(mem));
			used = 2;
		} else if (*in == '$' && in[1] == '{') {
			s = env_token(in, &used);
		}
		if (!s)
			return fs_fail(e, FS_EINVAL,
			        "%s of host %s: \"%.2s\" in \"%.200s\" can not be expanded", key,
			        p->out->original, in, in);
		fits = put(out, cap, &n, s);
		in += used;
	}
	return fits ? FS_OK : fs_fail(e, FS_ELIMIT, "%s of host %s is too long", key, p->out->original);
}

static int expand_identities(struct fs_conf_parse *p, const char *first, struct fs_errbuf *e)
{
	struct fs_ssh_target *t = &p->out->target;
	char raw[FS_SSH_MAX_KEYS + 1][512];
	int n = 0;
	if (first) {
		if (strlen(first) >= sizeof(raw[0]))
			return fs_fail(e, FS_ELIMIT, "the key path of host %s is too long", p->out->original);
		strcpy(raw[n++], first);
	}
	for (int i = 0; i < t->n_identities; i++)
		strcpy(raw[n++], t->identity[i]);
	p->out->default_identities = n == 0 && !p->identity_set;
	if (p->out->default_identities) {
		static const char *const usual[] = {"id_ed25519", "id_ecdsa", "id_rsa"};
		for (size_t i = 0; i < FS_ARRAY_LEN(usual); i++) {
			snprintf(raw[n], sizeof(raw[n]), "%s/.ssh/%s", p->home, usual[i]);
			n += access(raw[n], F_OK) == 0;
		}
	}
	t->n_identities = 0;
	for (int i = 0; i < n && i < FS_SSH_MAX_KEYS; i++) {
		int rc = fs_conf_expand(
		        p, "IdentityFile", raw[i], t->identity[t->n_identities], sizeof(t->identity[0]), e);
		if (rc)
			return rc;
		t->n_identities++;
	}
	return FS_OK;
}

static int add_known_files(struct fs_conf_parse *p, const struct fs_conf_files *f,
        const char *const defaults[], struct fs_errbuf *e)
{
	struct fs_ssh_conf *c = p->out;
	int rc = FS_OK;
	for (int i = 0; f->set && i < f->n && !rc; i++)
		rc = fs_conf_expand(p, "UserKnownHostsFile", f->path[i], c->known_files[c->n_known_files++],
		        sizeof(c->known_files[0]), e);
	for (int i = 0; !f->set && defaults[i] && !rc; i++)
		rc = fs_conf_expand(p, "UserKnownHostsFile", defaults[i], c->known_files[c->n_known_files++],
		        sizeof(c->known_files[0]), e);
	return rc;
}

static int expand_known_files(struct fs_conf_parse *p, const char *only, struct fs_errbuf *e)
{
	static const char *const user[] = {"~/.ssh/known_hosts", "~/.ssh/known_hosts2", NULL};
	static const char *const global[] = {"/etc/ssh/ssh_known_hosts", "/etc/ssh/ssh_known_hosts2", NULL};
	struct fs_ssh_conf *c = p->out;
	int rc;
	if (only) {
		rc = fs_conf_expand(p, "known_hosts", only, c->known_files[0], sizeof(c->known_files[0]), e);
		c->n_known_files = 1;
	} else {
		rc = add_known_files(p, &p->user_known, user, e);
		if (!rc)
			rc = add_known_files(p, &p->global_known, global, e);
	}
	if (!rc && c->n_known_files)
		memcpy(c->target.known_hosts, c->known_files[0], sizeof(c->target.known_hosts));
	return rc;
}

static int expand_agent(struct fs_conf_parse *p, struct fs_errbuf *e)
{
	char *agent = p->out->target.identity_agent, raw[512];
	if (!*agent || !strcmp(agent, "none"))
		return FS_OK;
	if (!strcmp(agent, "SSH_AUTH_SOCK")) {
		*agent = '\0';
		return FS_OK;
	}
	if (*agent == '$' && agent[1] != '{') {
		const char *v = getenv(agent + 1);
		snprintf(raw, sizeof(raw), "%s", v ? v : "none");
		strcpy(agent, raw);
		return FS_OK;
	}
	strcpy(raw, agent);
	return fs_conf_expand(p, "IdentityAgent", raw, agent, sizeof(p->out->target.identity_agent), e);
}

static int finish(struct fs_conf_parse *p, const struct fs_ssh_opts *o, struct fs_errbuf *e)
{
	struct fs_ssh_target *t = &p->out->target;
	if (!t->port)
		t->port = 22;
	if (!*t->user)
		snprintf(t->user, sizeof(t->user), "%s", p->login);
	int rc;
	char hostname[sizeof(t->hostname)];
	if ((rc = fs_conf_expand(
	             p, "HostName", *p->hostname ? p->hostname : "%n", hostname, sizeof(hostname), e)))
		return rc;
	strcpy(t->hostname, hostname);
	if (o->only_identity) {
		t->n_identities = 0;
		t->identities_only = p->identities_only_set = true;
	}
	if ((rc = expand_identities(p, o->identity, e)) || (rc = expand_known_files(p, o->known_hosts, e)))
		return rc;
	return expand_agent(p, e);
}

static int begin(
        struct fs_conf_parse *p, const struct fs_ssh_opts *o, struct fs_ssh_conf *out, struct fs_errbuf *e)
{
	memset(out, 0, sizeof(*out));
	memset(p, 0, sizeof(*p));
	p->out = out;
	p->e = e;
	whoami(p->home, sizeof(p->home), p->login, sizeof(p->login));
	if (!o->host)
		return fs_fail(e, FS_EINVAL, "no host is named");
	int rc = split_name(o->host, out, e);
	if (!rc && o->port)
		out->target.port = o->port;
	return rc;
}

int fs_ssh_conf_parse(
        const struct fs_ssh_opts *o, const char *text, size_t n, struct fs_ssh_conf *out, struct fs_errbuf *e)
{
	struct fs_conf_parse p;
	int rc = begin(&p, o, out, e);
	if (rc)
		return rc;
	char *copy = malloc(n + 1);
	if (!copy)
		return fs_fail(e, FS_ENOMEM, "out of memory");
	memcpy(copy, text, n);
	copy[n] = '\0';
	rc = fs_conf_parse_text(&p, "ssh_config", copy, n);
	free(copy);
	return rc ? rc : finish(&p, o, e);
}

int fs_ssh_conf_load(const struct fs_ssh_opts *o, struct fs_ssh_conf *out, struct fs_errbuf *e)
{
	struct fs_conf_parse p;
	int rc = begin(&p, o, out, e);
	if (rc)
		return rc;
	char path[512];
	if (o->config_file)
		rc = fs_conf_expand(&p, "the configuration file", o->config_file, path, sizeof(path), e);
	else
		snprintf(path, sizeof(path), "%s/.ssh/config", p.home);
	if (rc)
		return rc;
	char *text;
	size_t n;
	p.check_owner = o->config_file == NULL;
	rc = fs_conf_read_file(path, p.check_owner, &text, &n, e);
	if (rc == FS_ENOTFOUND && !o->config_file)
		return finish(&p, o, e);
	if (rc)
		return rc == FS_ENOTFOUND ? fs_fail(e, FS_EINVAL, "%s does not exist", path) : rc;
	rc = fs_conf_parse_text(&p, path, text, n);
	free(text);
	return rc ? rc : finish(&p, o, e);
}

int fs_ssh_resolve(const struct fs_ssh_opts *o, struct fs_ssh_target *out, struct fs_errbuf *e)
{
	struct fs_ssh_conf *c = malloc(sizeof(*c));
	if (!c)
		return fs_fail(e, FS_ENOMEM, "out of memory");
	int rc = fs_ssh_conf_load(o, c, e);
	if (!rc)
		*out = c->target;
	free(c);
	return rc;
}
