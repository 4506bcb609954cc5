/* farsight host check and list: what works, and what to do about the rest. They change nothing. */
#include "server/cli/host.h"
#include "server/vision/settings.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Programs and settings as they lie there, seen with the admin's own keys. */
static void look_there(struct host *h)
{
	/* paths as the watchdog reads them; relative ones count from the file's folder, links not followed */
	static const char script[] =
	        "look() { case \"$2\" in \"\") return;; /*) f=\"$2\";; \"~/\"*) f=\"$HOME/${2#??}\";; "
	        "*) f=\"${XDG_CONFIG_HOME:-$HOME/.config}/farsight/$2\";; esac; "
	        "if [ -r \"$f\" ]; then echo \"$1=1\"; fi; }; look mmproj \"$1\"; look model \"$2\"";
	struct host_file f;
	struct fs_errbuf e = {""};
	struct fs_buf out;
	char value[16];
	if (host_file_read(h, "config", &f, &e)) {
		host_failed(h, FS_EIO, "settings", NULL, e.text);
		return;
	}
	json_t *settings = f.exists ? json_loadb((char *)f.text.data, f.text.len, 0, NULL) : NULL;
	const char *mmproj = json_string_value(json_object_get(settings, "mmproj"));
	const char *model = json_string_value(json_object_get(settings, "model"));
	fs_buf_init(&out, 65536);
	struct host_call c = {
	        .script = script, .args = {mmproj ? mmproj : "", model ? model : ""}, .out = &out};
	if (!mmproj) {
		fs_fail(&e, FS_EFORMAT, "%s %s", f.path, f.exists ? "names no mmproj" : "is missing");
		host_failed(
		        h, FS_EFORMAT, "settings", "run farsight host add again with --mmproj FILE", e.text);
	} else if (host_call(h, &c, NULL, &e)) {
		host_failed(h, FS_EIO, "settings", NULL, e.text);
	} else if (!host_value(&out, "mmproj", value, sizeof(value))) {
		fs_fail(&e, FS_ENOTFOUND, "%s is missing there", mmproj);
		host_failed(h, FS_ENOTFOUND, "settings", "run farsight host add again with --mmproj FILE",
		        e.text);
	} else if (model && !host_value(&out, "model", value, sizeof(value))) {
		fs_fail(&e, FS_ENOTFOUND, "%s is missing there", model);
		host_failed(
		        h, FS_ENOTFOUND, "settings", "run farsight host add again with --model FILE", e.text);
	} else {
		host_ok(h, "settings", "%s, mmproj %s", f.path, mmproj);
	}
	fs_buf_finish(&out);
	fs_buf_finish(&f.text);
	json_decref(settings);
}

static void check_programs(struct host *h)
{
	const char *version = h->facts.version;
	char remedy[300];
	snprintf(remedy, sizeof(remedy), "type: farsight host add %s", h->o.name);
	if (!*version)
		host_failed(h, FS_ENOTFOUND, "programs", remedy,
		        "~/.local/farsight/bin/farsight-agent does not run there");
	else if (strcmp(version, "farsight-agent " FS_VERSION) != 0)
		host_failed(h, FS_ENOTSUP, "programs", remedy,
		        "they are of another version than this program, which is " FS_VERSION);
	else
		host_ok(h, "programs", "%s", version);
}

static void check_server(struct host *h)
{
	json_t *hosts = host_server_hosts(h);
	const json_t *one = host_of_server(h, hosts, h->entry);
	const char *state = json_string_value(json_object_get(one, "state"));
	const char *cause = json_string_value(json_object_get(one, "cause"));
	char text[800];
	if (one) {
		snprintf(text, sizeof(text), "the running server says %s%s%s", state ? state : "?",
		        cause ? ": " : "", cause ? cause : "");
		if (state && !strcmp(state, "down"))
			host_failed(
			        h, FS_EUNAVAILABLE, "server", "it tries again by itself; see its log", text);
		else
			host_ok(h, "server", "%s", text);
	}
	if (hosts && !one)
		host_failed(h, FS_ENOTFOUND, "server",
		        "have it read its config again: SIGHUP, or farsight host add; its log says what it "
		        "did not "
		        "take",
		        "the running server does not know this host");
	if (!hosts)
		host_note(h, "no server answers here; what one would do is checked above");
	json_decref(hosts);
}

/* What the server needs comes first; the admin's own way in is only needed to look further. */
static void check_one(struct host *h)
{
	int before = h->failed;
	if (host_reach(h, false))
		return;
	if (h->by_entry)
		host_note(
		        h, "its entry was not made by host add: only what the server would do is looked at");
	bool usable = (h->by_entry || (!host_own_key(h, false) && !host_try_key(h))) && !host_try_picture(h);
	if (h->by_entry) {
		check_server(h);
		return;
	}
	if (!host_sign_in(h, !usable) && !host_learn(h)) {
		check_programs(h);
		look_there(h);
	}
	check_server(h);
	if (h->failed == before)
		host_note(h, "%s works", h->o.name);
}

static void take_entry(struct host *h, size_t i)
{
	const struct fs_config_host *c = &h->conf.vision.hosts[i];
	h->entry = i;
	h->o.name = c->host;
	h->o.port = c->port;
	h->o.known_hosts = c->known_hosts;
	h->o.ssh_config = c->ssh_config;
	h->entry_identity = c->identity;
	h->entry_command = c->command;
	const char *slash = c->identity ? strrchr(c->identity, '/') : NULL;
	h->by_entry = !slash || strcmp(slash, "/id_farsight") != 0;
}

int host_check(struct host *h)
{
	struct host_opts given = h->o;
	size_t done = 0;
	char text[CLI_PATH + 200], name[128];
	struct fs_vision_opts o;
	fs_vision_opts_from_config(&h->conf, &o);
	for (size_t i = 0; i < h->conf.vision.n_hosts && !host_stopped(h); i++) {
		const struct fs_config_host *c = &h->conf.vision.hosts[i];
		if (given.name && strcmp(given.name, c->host) != 0)
			continue;
		fs_vision_host_name(o.hosts, o.n_hosts, i, name, sizeof(name));
		printf("%s%s\n", done++ ? "\n" : "", name);
		h->o = given;
		take_entry(h, i);
		check_one(h);
		fs_ssh_close(h->ssh);
		h->ssh = NULL;
	}
	if (done == 0 && given.name) {
		snprintf(text, sizeof(text), "%s does not name %s", h->config_path, given.name);
		return host_failed(h, FS_ENOTFOUND, "config",
		        "run farsight host add, or name the server's config with --config", text);
	}
	if (done == 0)
		printf("%s names no vision host\n", h->config_path);
	return h->failed ? FS_EUNAVAILABLE : FS_OK;
}

static void list_one(const char *name, const json_t *hosts, const json_t *live)
{
	const char *state = json_string_value(json_object_get(live, "state"));
	const char *device = json_string_value(json_object_get(live, "device"));
	const char *cause = json_string_value(json_object_get(live, "cause"));
	char text[1200];
	snprintf(text, sizeof(text), "%-30s %-12s %8lld encodes %6lld errors %8.1f ms  %s%s%s", name,
	        state ? state : "?", (long long)json_integer_value(json_object_get(live, "encodes")),
	        (long long)json_integer_value(json_object_get(live, "errors")),
	        json_number_value(json_object_get(live, "rtt_ms")), device ? device : "", cause ? "  " : "",
	        cause ? cause : "");
	if (!live) /* there are no figures */
		snprintf(text, sizeof(text), "%-30s %s", name,
		        hosts ? "(the running server does not use it)" : "(no server answers)");
	cli_print(stdout, text);
	putchar('\n');
}

int host_list(struct host *h)
{
	json_t *hosts = host_server_hosts(h);
	struct fs_vision_opts o;
	char name[128];
	fs_vision_opts_from_config(&h->conf, &o);
	if (o.n_hosts == 0)
		printf("%s names no vision host\n", h->config_path);
	for (size_t i = 0; i < o.n_hosts; i++) {
		fs_vision_host_name(o.hosts, o.n_hosts, i, name, sizeof(name));
		list_one(name, hosts, host_shown(hosts, o.hosts, o.n_hosts, i));
	}
	json_decref(hosts);
	return FS_OK;
}
