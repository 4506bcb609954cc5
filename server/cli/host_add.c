/* farsight host add: the steps in their order, and the way in, which the other subcommands take too. */
#include "common/gguf/gguf.h"
#include "server/cli/host.h"

#include <stdio.h>
#include <string.h>

#define CONNECT_S 15

/* "ssh-copy-id -p 2222 user@host", as the admin would type it. */
static void copy_id_hint(const struct host *h, char *out, size_t cap)
{
	char port[24] = "";
	if (h->target.port != 22)
		snprintf(port, sizeof(port), " -p %d", h->target.port);
	snprintf(out, cap,
	        "type: ssh-copy-id%s %s@%s   (it asks for the password once; without a key of your own, "
	        "ssh-keygen -t ed25519 makes one)",
	        port, h->target.user, h->target.hostname);
}

static int take_key(struct host *h, const struct fs_ssh_host_key *k, bool may_pin)
{
	const char *want = h->o.fingerprint;
	struct fs_errbuf e;
	char text[400];
	if (want && strcmp(want, k->fingerprint) != 0) {
		snprintf(text, sizeof(text), "%s shows %s %s, not %s", h->target.hostname, k->type,
		        k->fingerprint, want);
		return host_failed(h, FS_EAUTH, "host key",
		        "compare with what this prints on the host: ssh-keygen -lf "
		        "/etc/ssh/ssh_host_ed25519_key.pub",
		        text);
	}
	if (k->known) {
		host_ok(h, "host key", "%s %s is known", k->type, k->fingerprint);
		return FS_OK;
	}
	snprintf(text, sizeof(text), "%s (%s %s) is not in %s", h->target.hostname, k->type, k->fingerprint,
	        k->file);
	if (!may_pin)
		return host_failed(
		        h, FS_EAUTH, "host key", "run farsight host add, which shows it and asks", text);
	host_note(h, "%s", text);
	if (!want && !host_ask(h, "Is that the host's key, and may it be trusted from now on?"))
		return host_failed(h, FS_EAUTH, "host key",
		        "compare it with ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub on the host, then "
		        "give "
		        "--fingerprint SHA256:... or --yes",
		        "it was not agreed to");
	if (fs_ssh_pin(k, &e))
		return host_failed(h, FS_EIO, "host key", NULL, e.text);
	host_done(h, "host key", "%s %s is in %s now", k->type, k->fingerprint, k->file);
	return FS_OK;
}

bool host_take_entry(struct host *h)
{
	for (size_t i = 0; i < h->conf.vision.n_hosts; i++) {
		const struct fs_config_host *c = &h->conf.vision.hosts[i];
		const char *slash = c->identity ? strrchr(c->identity, '/') : NULL;
		if (strcmp(c->host, h->o.name) != 0)
			continue;
		h->o.port = h->o.port ? h->o.port : c->port;
		h->o.known_hosts = h->o.known_hosts ? h->o.known_hosts : c->known_hosts;
		h->o.ssh_config = h->o.ssh_config ? h->o.ssh_config : c->ssh_config;
		/* another's key, which may open more there, is neither restricted nor removed */
		if (slash && !strcmp(slash, "/id_farsight"))
			h->entry_identity = c->identity;
		return true;
	}
	return false;
}

int host_reach(struct host *h, bool may_pin)
{
	struct fs_ssh_host_key k;
	struct fs_errbuf e = {""};
	h->ssh_opts = (struct fs_ssh_opts){.host = h->o.name,
	        .port = (int)h->o.port,
	        .identity = h->o.identity,
	        .config_file = h->o.ssh_config,
	        .known_hosts = h->o.known_hosts};
	int rc = fs_ssh_resolve(&h->ssh_opts, &h->target, &e);
	if (rc)
		return host_failed(h, rc, "name", NULL, e.text);
	host_ok(h, "name", "%s is %s@%s, port %d", h->o.name, h->target.user, h->target.hostname,
	        h->target.port);
	int64_t deadline = fs_deadline_ms(CONNECT_S * 1000);
	rc = fs_ssh_host_key(&h->ssh_opts, deadline, h->wake, host_stopped, h, &k, &e);
	if (rc)
		return host_failed(h, rc, rc == FS_EAUTH ? "host key" : "connection",
		        rc == FS_EAUTH
		                ? NULL
		                : "check name, network and that sshd runs there; ssh must work by hand",
		        e.text);
	return take_key(h, &k, may_pin);
}

int host_sign_in(struct host *h, bool needed)
{
	struct fs_errbuf e = {""};
	char hint[400];
	int64_t deadline = fs_deadline_ms(CONNECT_S * 1000);
	int rc = fs_ssh_open(&h->ssh_opts, deadline, h->wake, host_stopped, h, &h->ssh, &e);
	h->ssh_used = fs_now();
	if (rc && needed) {
		copy_id_hint(h, hint, sizeof(hint));
		return host_failed(h, rc, "sign-in", rc == FS_EAUTH ? hint : NULL, e.text);
	}
	if (rc)
		host_note(h, "not looked at further, since your own keys do not open it: %s", e.text);
	else
		host_ok(h, "sign-in", "with your own keys, as %s", h->target.user);
	return rc;
}

int host_connect(struct host *h, bool may_pin)
{
	int rc = host_reach(h, may_pin);
	return rc ? rc : host_sign_in(h, true);
}

/* A file that is no vision model would be noticed by the encoder, after a build and a long transfer. What
 * other encoders take is theirs to say. */
static int check_mmproj(struct host *h)
{
	struct fs_gguf *g;
	struct fs_errbuf e;
	const char *arch = "clip";
	size_t n = 4;
	if (!h->o.mmproj)
		return FS_OK;
	int rc = fs_gguf_open(&g, h->o.mmproj, &e);
	if (rc)
		return host_failed(h, rc, "mmproj", NULL, e.text);
	fs_gguf_str(g, "general.architecture", &arch, &n, NULL);
	if (!h->o.encoder && (n != 4 || memcmp(arch, "clip", 4) != 0))
		rc = fs_fail(&e, FS_EFORMAT, "%s is a model of the architecture \"%.*s\", no vision model",
		        h->o.mmproj, (int)FS_MIN(n, (size_t)64), arch);
	fs_gguf_close(g);
	return rc ? host_failed(h, rc, "mmproj",
	                    "the vision model is a file of its own, often named mmproj-*.gguf", e.text)
	          : FS_OK;
}

/* Nothing is sent before it is clear what with. */
static int check_wishes(struct host *h)
{
	struct fs_errbuf e;
	if (h->conf.vision.mmproj) {
		fs_fail(&e, FS_EINVAL,
		        "%s has \"vision.mmproj\" (%s): its server encodes on this machine, and a server has "
		        "one kind of "
		        "vision",
		        h->config_path, h->conf.vision.mmproj);
		return host_failed(h, FS_EINVAL, "config", "remove that key to use vision hosts", e.text);
	}
	if (h->o.host_mmproj && h->o.host_mmproj[0] != '/')
		return host_failed(h, FS_EINVAL, "mmproj", "give its whole path there",
		        "--host-mmproj is no absolute path");
	return check_mmproj(h);
}

static int install_programs(struct host *h)
{
	int rc;
	if (h->o.binary)
		return host_send_binary(h);
	if (!h->o.sources && *h->facts.binary && !strcmp(h->facts.version, "farsight-agent " FS_VERSION)) {
		host_ok(h, "programs", "%s, sent earlier (--sources DIR builds them there instead)",
		        h->facts.version);
		return FS_OK;
	}
	rc = host_tools(h);
	return rc ? rc : host_build(h);
}

int host_add(struct host *h)
{
	int rc = check_wishes(h);
	host_take_entry(h);
	if (!rc)
		rc = host_connect(h, true);
	if (!rc)
		rc = host_learn(h);
	if (!rc)
		rc = host_own_key(h, true);
	if (!rc)
		rc = host_install_key(h);
	if (!rc)
		rc = install_programs(h);
	if (!rc)
		rc = host_send_models(h);
	if (!rc)
		rc = host_configure(h);
	if (!rc)
		rc = host_start(h);
	if (!rc)
		rc = host_try_key(h);
	if (!rc)
		rc = host_try_picture(h);
	if (!rc)
		rc = host_config_entry(h);
	if (!rc)
		host_tell_server(h);
	return rc;
}
