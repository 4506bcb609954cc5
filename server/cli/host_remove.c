/* farsight host remove: what add installed goes. The running server lets go of the host before anything is
 * taken away there, so that no picture is lost; each step can be repeated. */
#include "server/cli/host.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

static int remove_there(struct host *h)
{
	/* The watchdog is ended by the program that is about to go; its folder holds socket, lock and logs. A
	 * configuration that was there before add came back. */
	static const char script[] =
	        "d=\"$HOME/.local/farsight\"; w=\"$d/bin/farsight-watchdog\"; "
	        "c=\"${XDG_CONFIG_HOME:-$HOME/.config}/farsight\"; r=\"/run/user/$(id -u)\"; "
	        "if systemctl --user cat farsight-watchdog > /dev/null 2>&1; then "
	        "systemctl --user disable --now farsight-watchdog > /dev/null 2>&1; "
	        "systemctl --user daemon-reload > /dev/null 2>&1; fi; "
	        "if [ -x \"$w\" ]; then \"$w\" stop > /dev/null 2>&1; fi; rm -rf \"$d\" || exit 1; "
	        "if [ -e \"$c/vision-host.json.before-farsight\" ]; then "
	        "mv -f \"$c/vision-host.json.before-farsight\" \"$c/vision-host.json\"; echo restored=1; "
	        "else rm -f \"$c/vision-host.json\"; fi; rmdir \"$c\" 2> /dev/null; "
	        "if [ -n \"$XDG_RUNTIME_DIR\" ]; then r=\"$XDG_RUNTIME_DIR/farsight\"; "
	        "elif [ -O \"$r\" ]; then r=\"$r/farsight\"; else r=\"/tmp/farsight-$(id -u)\"; fi; "
	        "if [ -O \"$r\" ]; then rm -f \"$r\"/watchdog.*; rmdir \"$r\" 2> /dev/null; fi; exit 0";
	struct fs_errbuf e = {""};
	struct fs_buf out;
	char restored[8];
	fs_buf_init(&out, 65536);
	struct host_call c = {.script = script, .out = &out, .deadline_s = 120};
	int rc = host_call(h, &c, NULL, &e);
	bool back = !rc && host_value(&out, "restored", restored, sizeof(restored));
	fs_buf_finish(&out);
	if (rc)
		return host_failed(h, rc, "programs", NULL, e.text);
	host_done(h, "programs", "watchdog ended; programs, sources and models are gone");
	host_done(h, "settings", back ? "those from before host add are back" : "vision-host.json is gone");
	return FS_OK;
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
		host_note(h, "run it again to remove what is left there");
	return rc;
}

/* The last host that could be reached with the key is gone. */
static void offer_key(struct host *h)
{
	char pub[CLI_PATH + 8];
	if (h->conf.vision.n_hosts > 1 || !*h->key || access(h->key, F_OK) != 0)
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
	int rc = h->o.here ? FS_OK : get_in(h);
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
