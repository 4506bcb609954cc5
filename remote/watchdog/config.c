/*
 * Settings of the watchdog: table, loading, help. Loop thread. Refuses unknown keys (naming the
 * nearest known one), wrong types and values out of bounds; a file that is absent is an error that says what
 * to write into it.
 */
#include "remote/watchdog/config.h"
#include "common/encproc/encproc.h"
#include "remote/watchdog/watchdog.h"

#include <errno.h>
#include <jansson.h>
#include <limits.h>
#include <pwd.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum key_type {
	KEY_PATH,
	KEY_BOOL,
	KEY_BOOL_OR_NONE,
	KEY_DEVICE,
	KEY_INT,
	KEY_AUTO_BOOL,
	KEY_ARGS,
	KEY_LEVEL
};

struct key {
	const char *name;
	enum key_type type;
	size_t offset;
	int32_t def, min, max; /* of KEY_INT; def of the other numbers too */
	const char *help;
};

#define AT(field) offsetof(struct fs_wd_config, field)
static const struct key keys[] = {
        {"mmproj", KEY_PATH, AT(mmproj), 0, 0, 0, "the vision model (GGUF); required"},
        {"model", KEY_PATH, AT(model), 0, 0, 0, "the text model, for encoders that want it"},
        {"encoder", KEY_PATH, AT(encoder), 0, 0, 0,
                "program that encodes; default: farsight-encoder beside the watchdog"},
        {"encoder_args", KEY_ARGS, AT(encoder_args), 0, 0, 0, "list of further arguments for it"},
        {"extended", KEY_AUTO_BOOL, AT(extended), -1, 0, 0,
                "whether it takes --extended; \"auto\": only when its name is farsight-encoder"},
        {"device", KEY_DEVICE, AT(device), 0, 0, 0,
                "where it encodes: \"auto\" (a GPU when there is one that will do), \"cpu\", \"cuda\", or "
                "\"cuda:N\", N counted in PCI bus order"},
        {"gpu", KEY_BOOL_OR_NONE, AT(gpu), -1, 0, 0, "true is \"device\": \"cuda\", false is \"cpu\""},
        {"gpu_device", KEY_INT, AT(gpu_device), -1, -1, 255,
                "with \"gpu\": true, the N of \"cuda:N\"; -1: what the encoder chooses"},
        {"threads", KEY_INT, AT(threads), 0, 0, 1024, "CPU threads of the encoder; 0: its own choice"},
        {"min_tokens", KEY_INT, AT(min_tokens), 0, 0, 65536, "lower bound of rows a picture; 0: the model's"},
        {"max_tokens", KEY_INT, AT(max_tokens), 0, 0, 65536, "upper bound of rows a picture; 0: the model's"},
        {"ready_timeout_s", KEY_INT, AT(ready_timeout_s), 300, 1, 86400,
                "an encoder that is not ready by then is ended"},
        {"encode_timeout_s", KEY_INT, AT(encode_timeout_s), 300, 1, 86400,
                "an encoder that has not answered by then is ended and restarted"},
        {"cancel_kill_s", KEY_INT, AT(cancel_kill_s), 30, 0, 86400,
                "a plain encoder can not cancel: it is restarted when nobody wants its picture for so long"},
        {"stop_grace_ms", KEY_INT, AT(stop_grace_ms), 2000, 0, 60000,
                "from asking the encoder to end to SIGTERM, and from there to SIGKILL"},
        {"lease_grace_s", KEY_INT, AT(lease_grace_s), 30, 0, 86400,
                "a server without channel whose port can not be probed is gone after so long"},
        {"silence_s", KEY_INT, AT(silence_s), 30, 1, 3600,
                "a channel without frames for so long is no sign of life"},
        {"probe_fails", KEY_INT, AT(probe_fails), 3, 1, 1000,
                "failed probes of the server's port in a row that end its lease"},
        {"probe_interval_s", KEY_INT, AT(probe_interval_s), 10, 1, 3600, "from one probe to the next"},
        {"keep_warm", KEY_BOOL, AT(keep_warm), 0, 0, 0, "keep the encoder when no server is left"},
        {"encoder_idle_s", KEY_INT, AT(encoder_idle_s), 0, 0, 604800,
                "end an encoder without work for so long, start it again at the next picture; 0: never"},
        {"idle_exit_s", KEY_INT, AT(idle_exit_s), 60, 0, 604800,
                "end the watchdog when it served nobody for so long (the next agent starts one); 0: never"},
        {"spool", KEY_PATH, AT(spool), 0, 0, 0,
                "folder for pictures and rows on their way; default: /dev/shm, else $TMPDIR or /tmp"},
        {"max_queue", KEY_INT, AT(max_queue), 64, 1, 1024, "pictures that one server may have waiting"},
        {"log_level", KEY_LEVEL, AT(log_level), FS_LOG_INFO, 0, 0, "error, warn, info or debug"},
};

static int unknown_key(const char *name, struct fs_errbuf *e)
{
	const char *known[FS_ARRAY_LEN(keys)];
	for (size_t i = 0; i < FS_ARRAY_LEN(keys); i++)
		known[i] = keys[i].name;
	const char *best = fs_nearest_word(name, known, FS_ARRAY_LEN(known));
	return fs_fail(e, FS_EINVAL, "unknown key \"%s\"; the nearest known one is \"%s\"", name, best);
}

/* Relative paths count from the file's own folder, "~/" from the home. */
static int set_path(char *out, const char *value, const char *file, struct fs_errbuf *e)
{
	const char *slash = strrchr(file, '/');
	const char *home = getenv("HOME");
	int n;
	if (!*value)
		return fs_fail(e, FS_EINVAL, "must not be empty");
	if (value[0] == '/')
		n = snprintf(out, 4096, "%s", value);
	else if (value[0] == '~' && value[1] == '/' && home)
		n = snprintf(out, 4096, "%s/%s", home, value + 2);
	else if (slash)
		n = snprintf(out, 4096, "%.*s/%s", (int)(slash - file), file, value);
	else
		n = snprintf(out, 4096, "%s", value);
	return n < 0 || n >= 4096 ? fs_fail(e, FS_EINVAL, "is too long") : FS_OK;
}

static int set_args(char **out, json_t *v, struct fs_errbuf *e)
{
	size_t n = json_array_size(v);
	if (!json_is_array(v) || n > FS_WD_ARGS_MAX)
		return fs_fail(e, FS_EINVAL, "must be a list of at most %d strings", FS_WD_ARGS_MAX);
	for (size_t i = 0; i < n; i++) {
		const char *s = json_string_value(json_array_get(v, i));
		if (!s)
			return fs_fail(e, FS_EINVAL, "must be a list of strings");
		out[i] = strdup(s);
		if (!out[i])
			return fs_fail(e, FS_ENOMEM, "out of memory");
	}
	return FS_OK;
}

static int set_int(int32_t *out, const struct key *k, json_t *v, struct fs_errbuf *e)
{
	json_int_t n = json_integer_value(v);
	if (!json_is_integer(v) || n < k->min || n > k->max)
		return fs_fail(e, FS_EINVAL, "must be a whole number from %d to %d", k->min, k->max);
	*out = (int32_t)n;
	return FS_OK;
}

static int set_device(char out[16], const char *s, struct fs_errbuf *e)
{
	struct fs_encproc_opts o = {.program = ""};
	int rc = fs_encproc_set_device(&o, s ? s : "", e);
	if (rc == FS_OK)
		snprintf(out, 16, "%s", s);
	return rc;
}

static int set_key(
        struct fs_wd_config *c, const struct key *k, json_t *v, const char *file, struct fs_errbuf *e)
{
	void *at = (char *)c + k->offset;
	const char *s = json_string_value(v);
	switch (k->type) {
	case KEY_PATH:
		return s ? set_path(at, s, file, e) : fs_fail(e, FS_EINVAL, "must be a path");
	case KEY_BOOL:
		*(bool *)at = json_is_true(v);
		return json_is_boolean(v) ? FS_OK : fs_fail(e, FS_EINVAL, "must be true or false");
	case KEY_BOOL_OR_NONE:
		*(int32_t *)at = json_is_true(v);
		return json_is_boolean(v) ? FS_OK : fs_fail(e, FS_EINVAL, "must be true or false");
	case KEY_DEVICE:
		return set_device(at, s, e);
	case KEY_AUTO_BOOL:
		*(int32_t *)at = json_is_true(v) ? 1 : json_is_false(v) ? 0 : -1;
		return json_is_boolean(v) || (s && !strcmp(s, "auto"))
		               ? FS_OK
		               : fs_fail(e, FS_EINVAL, "must be true, false or \"auto\"");
	case KEY_INT:
		return set_int(at, k, v, e);
	case KEY_ARGS:
		return set_args(at, v, e);
	case KEY_LEVEL:
		return s && fs_log_parse_level(s, at) == FS_OK
		               ? FS_OK
		               : fs_fail(e, FS_EINVAL, "must be error, warn, info or debug");
	}
	return FS_EINTERNAL;
}

static void set_defaults(struct fs_wd_config *c)
{
	memset(c, 0, sizeof(*c));
	for (size_t i = 0; i < FS_ARRAY_LEN(keys); i++) {
		void *at = (char *)c + keys[i].offset;
		if (keys[i].type == KEY_INT || keys[i].type == KEY_AUTO_BOOL ||
		        keys[i].type == KEY_BOOL_OR_NONE)
			*(int32_t *)at = keys[i].def;
		else if (keys[i].type == KEY_LEVEL)
			*(enum fs_log_level *)at = (enum fs_log_level)keys[i].def;
	}
}

/* The older words, gpu and gpu_device, in terms of "device". Beside it they may say the same. */
static int choose_device(struct fs_wd_config *c, struct fs_errbuf *e)
{
	char older[16] = "auto";
	if (c->gpu_device >= 0 && c->gpu < 0)
		return fs_fail(e, FS_EINVAL,
		        "\"gpu_device\" is set, but not \"gpu\": write \"device\": \"cuda:%d\"",
		        c->gpu_device);
	if (c->gpu >= 0)
		snprintf(older, sizeof(older), "%s", c->gpu ? "cuda" : "cpu");
	if (c->gpu == 1 && c->gpu_device >= 0)
		snprintf(older, sizeof(older), "cuda:%d", c->gpu_device);
	bool same = !strcmp(older, c->device) || (!strcmp(older, "cuda") && fs_device_is_gpu(c->device));
	if (!c->device[0] || !strcmp(c->device, "auto"))
		memcpy(c->device, older, sizeof(older));
	else if (c->gpu >= 0 && !same)
		return fs_fail(e, FS_EINVAL,
		        "\"device\" is \"%s\", \"gpu\" and \"gpu_device\" say \"%s\": leave them out",
		        c->device, older);
	return FS_OK;
}

static int set_all(struct fs_wd_config *c, json_t *root, const char *file, struct fs_errbuf *e)
{
	const char *name;
	json_t *v;
	if (!json_is_object(root))
		return fs_fail(e, FS_EINVAL, "must hold one JSON object");
	json_object_foreach(root, name, v)
	{
		size_t i = 0;
		while (i < FS_ARRAY_LEN(keys) && strcmp(keys[i].name, name))
			i++;
		if (i == FS_ARRAY_LEN(keys))
			return unknown_key(name, e);
		int rc = set_key(c, &keys[i], v, file, e);
		if (rc)
			return fs_fail_prefix(e, rc, "\"%s\"", name);
	}
	if (!c->mmproj[0])
		return fs_fail(e, FS_EINVAL, "\"mmproj\" is missing: the path of the vision model");
	if (c->max_tokens && c->min_tokens > c->max_tokens)
		return fs_fail(e, FS_EINVAL, "\"min_tokens\" is above \"max_tokens\"");
	return choose_device(c, e);
}

int fs_wd_config_load(struct fs_wd_config *c, const char *path, struct fs_errbuf *e)
{
	json_error_t je;
	set_defaults(c);
	if (access(path, R_OK)) {
		if (errno != ENOENT)
			return fs_fail_errno(e, FS_EINVAL, "can not read %s", path);
		return fs_fail(e, FS_EINVAL,
		        "this vision host is not set up: %s is missing; write {\"mmproj\": "
		        "\"/path/of/mmproj.gguf\"} "
		        "into it",
		        path);
	}
	json_t *root = json_load_file(path, JSON_REJECT_DUPLICATES, &je);
	if (!root)
		return fs_fail(e, FS_EINVAL, "%s, line %d: %s", path, je.line, je.text);
	int rc = set_all(c, root, path, e);
	json_decref(root);
	if (rc == FS_OK && !c->encoder[0])
		rc = fs_wd_find_program("farsight-encoder", "encoder", c->encoder, sizeof(c->encoder), e);
	if (rc) {
		fs_wd_config_finish(c);
		return fs_fail_prefix(e, rc, "%s", path);
	}
	if (c->extended < 0)
		c->extended = fs_encproc_is_ours(c->encoder);
	return FS_OK;
}

void fs_wd_config_finish(struct fs_wd_config *c)
{
	for (size_t i = 0; c->encoder_args[i]; i++) {
		free(c->encoder_args[i]);
		c->encoder_args[i] = NULL;
	}
}

int fs_wd_config_command(const struct fs_wd_config *c, struct fs_buf *out)
{
	fs_buf_clear(out);
	int rc = fs_buf_printf(out, "%s\n%s\n%s\nextended %d device %s threads %d tokens %d to %d",
	        c->encoder, c->mmproj, c->model, c->extended, c->device, c->threads, c->min_tokens,
	        c->max_tokens);
	for (size_t i = 0; rc == FS_OK && c->encoder_args[i]; i++)
		rc = fs_buf_printf(out, "\n%s", c->encoder_args[i]);
	return rc;
}

int fs_wd_config_files(const struct fs_wd_config *c, struct fs_buf *out)
{
	const char *const paths[] = {c->encoder, c->mmproj, c->model};
	int rc = FS_OK;
	fs_buf_clear(out);
	for (size_t i = 0; rc == FS_OK && i < FS_ARRAY_LEN(paths); i++) {
		struct stat st = {0};
		if (paths[i][0] && stat(paths[i], &st))
			st = (struct stat){0};
		rc = fs_buf_printf(out, "%llu:%llu:%lld.%09ld ", (unsigned long long)st.st_dev,
		        (unsigned long long)st.st_ino, (long long)st.st_mtim.tv_sec, st.st_mtim.tv_nsec);
	}
	return rc;
}

int fs_wd_config_default_path(char *out, size_t cap, struct fs_errbuf *e)
{
	const char *xdg = getenv("XDG_CONFIG_HOME"), *home = getenv("HOME");
	struct passwd *pw = home && home[0] == '/' ? NULL : getpwuid(getuid());
	int n;
	if (pw)
		home = pw->pw_dir;
	if (xdg && xdg[0] == '/')
		n = snprintf(out, cap, "%s/farsight/vision-host.json", xdg);
	else if (home && home[0] == '/')
		n = snprintf(out, cap, "%s/.config/farsight/vision-host.json", home);
	else
		return fs_fail(e, FS_EINVAL, "HOME is not set; name the configuration with --config");
	return n < 0 || (size_t)n >= cap ? fs_fail(e, FS_EINVAL, "HOME is too long") : FS_OK;
}

void fs_wd_config_help(void)
{
	for (size_t i = 0; i < FS_ARRAY_LEN(keys); i++) {
		const struct key *k = &keys[i];
		char def[32] = "";
		if (k->type == KEY_INT)
			snprintf(def, sizeof(def), " (%d; %d to %d)", k->def, k->min, k->max);
		else if (k->type == KEY_BOOL)
			snprintf(def, sizeof(def), " (false)");
		printf("%-18s %s%s\n", k->name, k->help, def);
	}
}
