/* The watchdog's configuration on the host, and its start. */
#include "server/cli/host.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define RENEW_S 660 /* more than a replacement waits for a host that is never without a picture */

static json_t *wishes(const struct host *h)
{
	json_t *w = json_object();
	if (*h->host_mmproj)
		json_object_set_new(w, "mmproj", json_string(h->host_mmproj));
	if (*h->host_model)
		json_object_set_new(w, "model", json_string(h->host_model));
	if (h->o.encoder)
		json_object_set_new(w, "encoder", json_string(h->o.encoder));
	if (h->o.n_encoder_args) {
		json_t *args = json_array();
		for (size_t i = 0; i < h->o.n_encoder_args; i++)
			json_array_append_new(args, json_string(h->o.encoder_args[i]));
		json_object_set_new(w, "encoder_args", args);
	}
	if (h->o.gpu)
		json_object_set_new(w, "gpu", json_true());
	if (h->o.threads)
		json_object_set_new(w, "threads", json_integer(h->o.threads));
	return w;
}

/* What was there before the first add stays beside it, and remove puts it back: empty when there was none, or
 * when an older release of add, which kept nothing then, has written what is there. */
static int keep_first(struct host *h, const json_t *now, struct fs_errbuf *e)
{
	static const char script[] = HOST_SETTINGS
	        "if [ -e \"$b\" ]; then exit 0; fi; set -e; umask 077; mkdir -p \"$(dirname \"$b\")\"; "
	        "if [ -e \"$f\" ] && [ -z \"$1\" ]; then cp -p \"$f\" \"$b.new\"; else : > \"$b.new\"; fi; "
	        "mv -f \"$b.new\" \"$b\"";
	char models[sizeof(h->facts.home) + 32];
	const char *mmproj = json_string_value(json_object_get(now, "mmproj"));
	snprintf(models, sizeof(models), "%s/.local/farsight/models/", h->facts.home);
	bool ours = mmproj && !strncmp(mmproj, models, strlen(models));
	struct host_call c = {.script = script, .args = {ours ? "ours" : ""}};
	return host_call(h, &c, NULL, e);
}

static int write_settings(
        struct host *h, const struct host_file *f, const json_t *settings, struct fs_errbuf *e)
{
	char *text = json_dumps(settings, JSON_INDENT(2));
	struct fs_buf b;
	fs_buf_init(&b, HOST_FILE_MAX);
	int rc = text && !fs_buf_printf(&b, "%s\n", text) ? FS_OK : fs_fail(e, FS_ENOMEM, "out of memory");
	free(text);
	if (!rc)
		rc = host_file_write(h, "config", f, b.data, b.len, e);
	fs_buf_finish(&b);
	return rc;
}

static int settle(struct host *h, const struct host_file *f)
{
	struct fs_errbuf e = {""};
	json_error_t je;
	json_t *wanted = wishes(h), *now = NULL, *next = NULL;
	char *changes = NULL;
	int rc = FS_OK;
	if (f->exists && !(now = json_loadb((char *)f->text.data, f->text.len, JSON_REJECT_DUPLICATES, &je)))
		rc = fs_fail(&e, FS_EFORMAT, "%s, line %d: %s", f->path, je.line, je.text);
	if (!rc)
		rc = host_json_merge(now, wanted, &next, &changes, &e);
	if (rc) {
		rc = host_failed(h, rc, "settings", "mend or remove that file on the host", e.text);
	} else if (!json_is_string(json_object_get(next, "mmproj"))) {
		rc = host_failed(h, FS_EINVAL, "settings",
		        "name the vision model: --mmproj FILE of this machine, or --host-mmproj PATH of one "
		        "that lies there",
		        "the host has no vision model");
	} else if (changes && f->exists &&
	           !host_ask(h, "%s differs: %s. Change it (a copy of the first one stays)?", f->path,
	                   changes)) {
		rc = host_failed(h, FS_ECANCELLED, "settings",
		        "give --yes, or leave the option out that asks for it", "they stay as they are");
	} else if ((rc = keep_first(h, now, &e)) || (changes && (rc = write_settings(h, f, next, &e)))) {
		rc = host_failed(h, rc, "settings", NULL, e.text);
	} else if (changes) {
		host_done(h, "settings", "%s: %s", f->path, changes);
	} else {
		host_ok(h, "settings", "%s", f->path);
	}
	free(changes);
	json_decref(now);
	json_decref(next);
	json_decref(wanted);
	return rc;
}

int host_configure(struct host *h)
{
	struct host_file f;
	struct fs_errbuf e = {""};
	int rc = host_file_read(h, "config", &f, &e);
	if (rc)
		return host_failed(h, rc, "settings", NULL, e.text);
	rc = settle(h, &f);
	fs_buf_finish(&f.text);
	return rc;
}

/* What the script below said of the watchdog that ran. */
struct renewal {
	char replaced[300]; /* another program took it over, or is going to */
	char refused[300];  /* it goes on with the old programs or settings */
};

/* A watchdog that runs goes over to new programs and settings in place, so that servers keep their encoder.
 * It reads them again in any case, and looks whether the models are still the same: an earlier run may have
 * been broken off before this, and a new model may have the name of the old one. */
static int renew(struct host *h, bool stop, struct renewal *r, struct fs_errbuf *e)
{
	static const char script[] =
	        "w=\"$HOME/.local/farsight/bin/farsight-watchdog\"; "
	        "if [ \"$1\" = stop ]; then \"$w\" stop > /dev/null 2>&1; exit 0; fi; "
	        "if [ \"$1\" = programs ]; then if r=\"$(\"$w\" replace 2>&1)\"; then echo \"replaced=$r\"; "
	        "else echo \"refused=$r\"; exit 0; fi; fi; "
	        "r=\"$(\"$w\" reload 2>&1)\" || echo \"refused=$r\"; exit 0";
	struct fs_buf out;
	*r = (struct renewal){.replaced = ""};
	fs_buf_init(&out, 65536);
	struct host_call c = {.script = script,
	        .args = {stop                  ? "stop"
	                 : h->programs_changed ? "programs"
	                                       : "settings"},
	        .out = &out,
	        .deadline_s = RENEW_S};
	int rc = host_call(h, &c, NULL, e);
	if (!rc) {
		host_value(&out, "replaced", r->replaced, sizeof(r->replaced));
		host_value(&out, "refused", r->refused, sizeof(r->refused));
	}
	fs_buf_finish(&out);
	return rc;
}

static int take_over(struct host *h)
{
	struct renewal r;
	struct fs_errbuf e = {""};
	int rc = renew(h, false, &r, &e);
	if (rc)
		return host_failed(h, rc, "watchdog", NULL, e.text);
	if (*r.replaced && !strstr(r.replaced, "nothing to replace"))
		host_done(h, "watchdog", "%s", r.replaced);
	if (!*r.refused)
		return FS_OK;
	host_note(h, "the watchdog that runs there goes on as before: %s", r.refused);
	if (!host_ask(h, "Stop it? Servers that use this host reconnect, and its encoder loads anew."))
		return host_failed(h, FS_ECANCELLED, "watchdog",
		        "type there: ~/.local/farsight/bin/farsight-watchdog stop, then run this again",
		        "it does not take the new programs or settings");
	rc = renew(h, true, &r, &e);
	if (rc)
		return host_failed(h, rc, "watchdog", NULL, e.text);
	host_done(h, "watchdog", "the old one was stopped");
	return FS_OK;
}

int host_start(struct host *h)
{
	/* Where a user manager runs it keeps the watchdog, else the agent starts one when a server comes. */
	static const char script[] =
	        "u=\"$HOME/.local/farsight/lib/systemd/user/farsight-watchdog.service\"; "
	        "if [ -f \"$u\" ] && systemctl --user show-environment > /dev/null 2>&1 && "
	        "systemctl --user enable \"$u\" > /dev/null 2>&1 && systemctl --user daemon-reload && "
	        "systemctl --user start farsight-watchdog; then echo how=systemd; "
	        "echo \"linger=$(loginctl show-user \"$(id -un)\" -p Linger --value 2> /dev/null)\"; "
	        "else echo how=agent; fi";
	struct fs_errbuf e = {""};
	struct fs_buf out;
	char how[16] = "", linger[16] = "";
	int rc = take_over(h);
	if (rc)
		return rc;
	fs_buf_init(&out, 65536);
	struct host_call c = {.script = script, .out = &out};
	rc = host_call(h, &c, NULL, &e);
	if (!rc) {
		host_value(&out, "how", how, sizeof(how));
		host_value(&out, "linger", linger, sizeof(linger));
	}
	fs_buf_finish(&out);
	if (rc)
		return host_failed(h, rc, "watchdog", NULL, e.text);
	if (strcmp(how, "systemd") != 0) {
		host_ok(h, "watchdog", "the agent starts it when a server comes");
		return FS_OK;
	}
	host_ok(h, "watchdog", "a systemd service of %s", h->facts.user);
	if (!strcmp(linger, "no"))
		host_note(h, "it ends when %s has no session left there; loginctl enable-linger keeps it",
		        h->facts.user);
	return FS_OK;
}
