/* farsight host remove: what add installed goes. The running server lets go of the host before anything is
 * taken away there, so that no picture is lost; each step can be repeated. */
#include "server/cli/host.h"

#include <stdio.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

/* More than systemd (130 s) and farsight-watchdog stop (150 s) together wait for the encoder's end. */
#define END_S 300

static int remove_there(struct host *h)
{
	/* The watchdog is ended by the program that is about to go; its folder holds socket, lock and logs. A
	 * configuration that was there before add comes back, once. */
	static const char script[] = HOST_SETTINGS
	        "d=\"$HOME/.local/farsight\"; w=\"$d/bin/farsight-watchdog\"; r=\"/run/user/$(id -u)\"; "
	        "if systemctl --user cat farsight-watchdog > /dev/null 2>&1; then "
	        "systemctl --user disable --now farsight-watchdog > /dev/null 2>&1; "
	        "systemctl --user daemon-reload > /dev/null 2>&1; fi; "
	        "if [ -x \"$w\" ] && ! \"$w\" stop > /dev/null 2>&1 && \"$w\" status > /dev/null 2>&1; then "
	        "echo the watchdog does not end >&2; exit 1; fi; rm -rf \"$d\" || exit 1; "
	        "if [ -s \"$b\" ]; then mv -f \"$b\" \"$f\" && echo settings=back || exit 1; "
	        "elif [ -e \"$b\" ]; then rm -f \"$f\" \"$b\" && echo settings=gone || exit 1; "
	        "elif [ -e \"$f\" ]; then echo settings=left; fi; "
	        "rmdir \"$c\" 2> /dev/null; "
	        "if [ -n \"$XDG_RUNTIME_DIR\" ]; then r=\"$XDG_RUNTIME_DIR/farsight\"; "
	        "elif [ -O \"$r\" ]; then r=\"$r/farsight\"; else r=\"/tmp/farsight-$(id -u)\"; fi; "
	        "if [ -O \"$r\" ]; then rm -f \"$r\"/watchdog.*; rmdir \"$r\" 2> /dev/null; fi; exit 0";
	struct fs_errbuf e = {""};
	struct fs_buf out;
	char settings[8];
	fs_buf_init(&out, 65536);
	struct host_call c = {.script = script, .out = &out, .deadline_s = END_S};
	int rc = host_call(h, &c, NULL, &e);
	host_value(&out, "settings", settings, sizeof(settings));
	fs_buf_finish(&out);
	if (rc)
		return host_failed(h, rc, "programs", NULL, e.text);
	host_done(h, "programs", "watchdog ended; programs, sources and models are gone");
	if (!strcmp(settings, "back"))
		host_done(h, "settings", "those from before host add are back");
	else if (!strcmp(settings, "gone"))
		host_done(h, "settings", "vision-host.json is gone");
	else if (!strcmp(settings, "left"))
		host_ok(h, "settings",
		        "vision-host.json stays: nothing from before host add is kept beside it");
	return FS_OK;
}

/* ---- whether that host is meant ---- */

/* Another name of the config for the same account on the same host; NULL. */
static const char *other_name(const struct host *h, char names[], size_t cap)
{
	struct fs_ssh_opts o = {.host = h->o.name,
	        .port = (int)h->o.port,
	        .config_file = h->o.ssh_config,
	        .known_hosts = h->o.known_hosts};
	struct fs_ssh_target own, t;
	const char *same = NULL;
	bool known = !fs_ssh_resolve(&o, &own, NULL);
	*names = '\0';
	for (size_t i = 0, n = 0; i < h->conf.vision.n_hosts; i++) {
		const struct fs_config_host *c = &h->conf.vision.hosts[i];
		if (n < cap)
			n += (size_t)snprintf(names + n, cap - n, "%s%s", n ? ", " : "", c->host);
		o = (struct fs_ssh_opts){.host = c->host,
		        .port = (int)c->port,
		        .config_file = c->ssh_config,
		        .known_hosts = c->known_hosts};
		if (known && !fs_ssh_resolve(&o, &t, NULL) && own.port == t.port &&
		        !strcmp(own.user, t.user) && !strcasecmp(own.hostname, t.hostname))
			same = c->host;
	}
	return same;
}

/* One that the config does not name may be what an earlier remove could not finish, or one that is still
 * used, by another name. */
static int agree_to_unnamed(struct host *h)
{
	char names[700], text[CLI_PATH + 1000], remedy[300];
	const char *same = other_name(h, names, sizeof(names));
	if (same) {
		snprintf(text, sizeof(text), "%s names that host %s", h->config_path, same);
		snprintf(remedy, sizeof(remedy), "type: farsight host remove %.250s", same);
		return host_failed(h, FS_ENOTFOUND, "config", remedy, text);
	}
	snprintf(text, sizeof(text), "%s does not name %s; it names %s", h->config_path, h->o.name,
	        *names ? names : "no vision host");
	host_note(h, "%s", text);
	if (host_ask(h, "Remove what host add has installed on %s all the same?", h->o.name))
		return FS_OK;
	return host_failed(h, FS_ECANCELLED, "config", "give one of the config's names, or --yes",
	        "nothing was changed");
}

/* The way in, before anything is changed. */
static int get_in(struct host *h)
{
	int rc = host_connect(h, false);
	if (!rc)
		rc = host_learn(h);
	if (!rc)
		rc = host_own_key(h, false);
	if (rc)
		host_note(h, "nothing was changed; --here removes the host from this machine's config alone");
	return rc;
}

/* The config's entry is gone, and with it what it said of the way in. */
static void say_again(struct host *h)
{
	const struct {
		const char *option, *value;
	} texts[] = {{"--config", h->o.config}, {"--identity", h->o.identity},
	        {"--known-hosts", h->o.known_hosts}, {"--ssh-config", h->o.ssh_config}};
	struct fs_buf b;
	fs_buf_init(&b, 65536);
	int rc = fs_ssh_quote(&b, h->o.name, NULL);
	if (!rc && h->o.port)
		rc = fs_buf_printf(&b, " --port %d", (int)h->o.port);
	for (size_t i = 0; i < FS_ARRAY_LEN(texts) && !rc; i++) {
		if (!texts[i].value)
			continue;
		rc = fs_buf_printf(&b, " %s", texts[i].option);
		if (!rc)
			rc = fs_ssh_quote(&b, texts[i].value, NULL);
	}
	host_note(h, "to remove what is left there, type: farsight host remove%s --yes",
	        rc ? " NAME" : (const char *)b.data);
	fs_buf_finish(&b);
}

static int on_the_host(struct host *h)
{
	size_t others = 0;
	int rc = host_remove_key(h, &others);
	if (!rc && others > 0)
		host_note(h,
		        "%zu other machines use this vision host: its programs, models and settings stay",
		        others);
	else if (!rc)
		rc = remove_there(h);
	if (rc)
		say_again(h);
	return rc;
}

/* As the config is now. One that can not be read may name some. */
static bool names_none(const struct host *h)
{
	struct fs_config now;
	bool none = access(h->config_path, F_OK) != 0;
	if (!none) {
		none = !cli_config(h->config_path, &now, NULL, NULL) && now.vision.n_hosts == 0;
		fs_config_finish(&now);
	}
	return none;
}

/* The last host that could be reached with the key is gone. */
static void offer_key(struct host *h)
{
	char pub[CLI_PATH + 8];
	if (!*h->key || access(h->key, F_OK) != 0 || !names_none(h))
		return;
	if (!host_ask(h, "No vision host is left. Remove the key %s as well?", h->key))
		return;
	snprintf(pub, sizeof(pub), "%s.pub", h->key);
	unlink(pub);
	if (unlink(h->key) == 0)
		host_done(h, "own key", "removed %s", h->key);
}

int host_remove(struct host *h)
{
	int rc = host_take_entry(h) || h->o.here ? FS_OK : agree_to_unnamed(h);
	if (!rc && !h->o.here)
		rc = get_in(h);
	if (!rc)
		rc = host_config_forget(h);
	if (rc)
		return rc;
	host_tell_server_goodbye(h);
	if (h->o.here)
		return FS_OK;
	rc = on_the_host(h);
	if (rc)
		return rc;
	offer_key(h);
	host_note(h, "its host key stays in %s; ssh-keygen -R removes it", h->target.known_hosts);
	return FS_OK;
}
