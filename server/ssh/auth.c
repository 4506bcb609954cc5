/*
 * Public key authentication: the configured keys first (through the agent when it holds them, else from their
 * files), then the agent's others, then the usual files. Runs on the thread of the connection within its
 * patience. At most MAX_TRIES keys are offered: sshd hangs up at six failures. It never asks anybody for
 * anything.
 */
#include "server/ssh/heap.h"
#include "server/ssh/internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_TRIES 5

struct auth {
	LIBSSH2_SESSION *ls;
	const struct fs_ssh_conf *conf;
	const struct fs_patience *patience;
	struct fs_agent agent;
	struct fs_agent_key agent_keys[FS_AGENT_MAX_KEYS];
	bool agent_tried[FS_AGENT_MAX_KEYS];
	size_t n_agent_keys;
	int tries;
	char refused[256]; /* keys that the server did not take */
	char skipped[384]; /* keys that were not offered, and why */
	struct fs_errbuf sign_error;
	/* the key that the agent is asked to sign with */
	const uint8_t *blob;
	size_t blob_n;
};

static void note(char *list, size_t cap, const char *text)
{
	size_t n = strlen(list);
	if (n + 2 < cap)
		snprintf(list + n, cap - n, "%s%s", n ? ", " : "", text);
}

static bool library_has_rsa_sha2(void)
{
	return libssh2_version(0x010b00) != NULL;
}

/* After an EAGAIN of libssh2. */
static int wait_session(struct auth *a, struct fs_errbuf *e)
{
	int rc = fs_ssh_step(a->ls, a->patience);
	if (rc == FS_ETIMEOUT)
		return fs_fail(e, rc, "%s did not answer during authentication", a->conf->target.hostname);
	return rc ? fs_fail(e, rc, "cancelled") : FS_OK;
}

/* rc of libssh2 to: FS_OK accepted, FS_ENOTFOUND this key was refused, else the connection is over. */
static int verdict(struct auth *a, int rc, const char *name, struct fs_errbuf *e)
{
	a->tries++;
	if (rc == 0)
		return FS_OK;
	if (rc == LIBSSH2_ERROR_AUTHENTICATION_FAILED || rc == LIBSSH2_ERROR_PUBLICKEY_UNVERIFIED ||
	        rc == LIBSSH2_ERROR_FILE) {
		note(a->refused, sizeof(a->refused), name);
		return FS_ENOTFOUND;
	}
	char *text = NULL;
	libssh2_session_last_error(a->ls, &text, NULL, 0);
	return fs_fail(e, FS_EUNAVAILABLE, "%s ended the connection during authentication (%s)",
	        a->conf->target.hostname, text ? text : "no reason told");
}

static int sign_with_agent(LIBSSH2_SESSION *ls, unsigned char **sig, size_t *sig_n, const unsigned char *data,
        size_t n, void **abstract)
{
	struct auth *a = *abstract;
	uint8_t *own;
	if (fs_agent_sign(&a->agent, a->blob, a->blob_n, data, n, &own, sig_n, &a->sign_error))
		return -1;
	*sig = fs_heap_copy(ls, own, *sig_n);
	free(own);
	return *sig ? 0 : -1;
}

static int try_agent_key(struct auth *a, size_t i, struct fs_errbuf *e)
{
	struct fs_agent_key *k = &a->agent_keys[i];
	char type[64] = "key", name[200];
	a->agent_tried[i] = true;
	fs_ssh_blob_type(k->blob, k->n, type, sizeof(type));
	snprintf(name, sizeof(name), "%s of the agent", *k->comment ? k->comment : type);
	if (!strncmp(type, "sk-", 3) || strstr(type, "-cert-v01@")) {
		note(a->skipped, sizeof(a->skipped), name);
		note(a->skipped, sizeof(a->skipped), "(hardware keys and certificates are not supported)");
		return FS_ENOTFOUND;
	}
	if (!strcmp(type, "ssh-rsa") && !library_has_rsa_sha2()) {
		note(a->skipped, sizeof(a->skipped), name);
		note(a->skipped, sizeof(a->skipped),
		        "(RSA needs libssh2 1.11; make a key with ssh-keygen -t ed25519)");
		return FS_ENOTFOUND;
	}
	a->blob = k->blob;
	a->blob_n = k->n;
	a->sign_error.text[0] = '\0';
	void *self = a;
	int rc;
	while ((rc = libssh2_userauth_publickey(a->ls, a->conf->target.user, k->blob, k->n, sign_with_agent,
	                &self)) == LIBSSH2_ERROR_EAGAIN) {
		int w = wait_session(a, e);
		if (w)
			return w;
	}
	if (*a->sign_error.text) { /* the agent failed, not the server */
		note(a->skipped, sizeof(a->skipped), a->sign_error.text);
		const struct fs_patience *p = a->patience;
		if (p->cancelled && p->cancelled(p->arg))
			return fs_fail(e, FS_ECANCELLED, "%s", a->sign_error.text);
		return fs_now() >= p->deadline ? fs_fail(e, FS_ETIMEOUT, "%s", a->sign_error.text)
		                               : FS_ENOTFOUND;
	}
	return verdict(a, rc, name, e);
}

static int try_file_key(struct auth *a, const struct fs_ssh_key *k, struct fs_errbuf *e)
{
	const char *user = a->conf->target.user;
	int rc;
	while ((rc = libssh2_userauth_publickey_frommemory(
	                a->ls, user, strlen(user), NULL, 0, k->text, k->n, NULL)) == LIBSSH2_ERROR_EAGAIN) {
		int w = wait_session(a, e);
		if (w)
			return w;
	}
	return verdict(a, rc, k->path, e);
}

/* One configured or usual key file. FS_ENOTFOUND = go on with the next. */
static int try_identity(struct auth *a, const char *path, bool quiet, struct fs_errbuf *e)
{
	struct fs_ssh_key k;
	struct fs_errbuf why;
	int rc = fs_ssh_key_load(path, &k, &why);
	if (rc) {
		if (!quiet || rc != FS_ENOTFOUND)
			note(a->skipped, sizeof(a->skipped), why.text);
		return FS_ENOTFOUND;
	}
	char text[700];
	for (size_t i = 0; k.pub && i < a->n_agent_keys; i++) {
		if (a->agent_keys[i].n != k.pub_n || memcmp(a->agent_keys[i].blob, k.pub, k.pub_n))
			continue;
		rc = a->agent_tried[i] ? FS_ENOTFOUND : try_agent_key(a, i, e);
		fs_ssh_key_finish(&k);
		return rc;
	}
	rc = FS_ENOTFOUND;
	if (k.rsa && !library_has_rsa_sha2()) {
		snprintf(text, sizeof(text),
		        "%s (an RSA key, which libssh2 %s signs with SHA-1 alone and sshd refuses; make one "
		        "with ssh-keygen -t ed25519)",
		        path, libssh2_version(0));
		note(a->skipped, sizeof(a->skipped), text);
	} else if (k.encrypted) {
		snprintf(text, sizeof(text), "%s (encrypted; add it to the agent: ssh-add %s)", path, path);
		note(a->skipped, sizeof(a->skipped), text);
	} else {
		rc = try_file_key(a, &k, e);
	}
	fs_ssh_key_finish(&k);
	return rc;
}

static void open_agent(struct auth *a)
{
	const char *path = a->conf->target.identity_agent;
	a->agent.fd = -1;
	if (!*path)
		path = getenv("SSH_AUTH_SOCK");
	if (!path || !*path || !strcmp(path, "none"))
		return;
	struct fs_errbuf why;
	int rc = fs_agent_open(&a->agent, path, a->patience, &why);
	if (!rc)
		rc = fs_agent_list(&a->agent, a->agent_keys, &a->n_agent_keys, &why);
	if (rc)
		note(a->skipped, sizeof(a->skipped), why.text);
}

static int try_identities(struct auth *a, struct fs_errbuf *e)
{
	const struct fs_ssh_target *t = &a->conf->target;
	int rc = FS_ENOTFOUND;
	for (int i = 0; i < t->n_identities && rc == FS_ENOTFOUND && a->tries < MAX_TRIES; i++)
		rc = try_identity(a, t->identity[i], a->conf->default_identities, e);
	return rc;
}

static int try_all(struct auth *a, struct fs_errbuf *e)
{
	int rc = FS_ENOTFOUND;
	if (!a->conf->default_identities)
		rc = try_identities(a, e);
	if (rc == FS_ENOTFOUND && !a->conf->target.identities_only)
		for (size_t i = 0; i < a->n_agent_keys && rc == FS_ENOTFOUND && a->tries < MAX_TRIES; i++)
			if (!a->agent_tried[i])
				rc = try_agent_key(a, i, e);
	if (rc == FS_ENOTFOUND && a->conf->default_identities)
		rc = try_identities(a, e);
	return rc;
}

/* Also sends the service request. FS_OK: go on with keys. */
static int check_methods(struct auth *a, struct fs_errbuf *e)
{
	const struct fs_ssh_target *t = &a->conf->target;
	char *list;
	while (!(list = libssh2_userauth_list(a->ls, t->user, (unsigned)strlen(t->user)))) {
		if (libssh2_userauth_authenticated(a->ls))
			return FS_OK;
		if (libssh2_session_last_errno(a->ls) != LIBSSH2_ERROR_EAGAIN) {
			char *text = NULL;
			libssh2_session_last_error(a->ls, &text, NULL, 0);
			return fs_fail(e, FS_EUNAVAILABLE,
			        "%s ended the connection before authentication (%s)", t->hostname,
			        text ? text : "no reason told");
		}
		int rc = wait_session(a, e);
		if (rc)
			return rc;
	}
	if (!strstr(list, "publickey"))
		return fs_fail(e, FS_EAUTH,
		        "sshd of %s offers no public key authentication to %s (it offers: %s)", t->hostname,
		        t->user, list);
	return FS_OK;
}

static int explain(const struct auth *a, struct fs_errbuf *e)
{
	const struct fs_ssh_target *t = &a->conf->target;
	if (a->tries == 0 && !*a->skipped)
		return fs_fail(e, FS_EAUTH,
		        "there is no key for %s@%s: make one with ssh-keygen -t ed25519 and run ssh-copy-id "
		        "%s@%s",
		        t->user, t->hostname, t->user, t->hostname);
	if (a->tries == 0)
		return fs_fail(e, FS_EAUTH, "no usable key for %s@%s: %s", t->user, t->hostname, a->skipped);
	return fs_fail(e, FS_EAUTH,
	        "%s@%s accepts none of these keys: %s%s%s; put one into its authorized_keys with ssh-copy-id",
	        t->user, t->hostname, a->refused, *a->skipped ? "; not offered: " : "", a->skipped);
}

int fs_ssh_auth(
        LIBSSH2_SESSION *ls, const struct fs_ssh_conf *c, const struct fs_patience *p, struct fs_errbuf *e)
{
	struct auth *a = calloc(1, sizeof(*a));
	if (!a)
		return fs_fail(e, FS_ENOMEM, "out of memory");
	a->ls = ls;
	a->conf = c;
	a->patience = p;
	open_agent(a);
	int rc = check_methods(a, e);
	if (!rc && !libssh2_userauth_authenticated(ls))
		rc = try_all(a, e);
	if (rc == FS_ENOTFOUND)
		rc = explain(a, e);
	fs_agent_keys_free(a->agent_keys, a->n_agent_keys);
	fs_agent_close(&a->agent);
	free(a);
	return rc;
}
