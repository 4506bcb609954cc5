/* The server on this machine: its config file, and what it says when it runs. */
#include "server/cli/host.h"
#include "server/vision/settings.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define ASK_S 3
#define RELOAD_S 15
#define UP_S 20    /* for the host to be up at the server */
#define LEAVE_S 60 /* for its last pictures there */
#define LOOK_MS 200

static int load(const char *path, json_t **out, struct fs_errbuf *e)
{
	json_error_t je;
	if (access(path, F_OK) != 0 && errno == ENOENT) {
		*out = json_object();
		return FS_OK;
	}
	*out = json_load_file(path, JSON_REJECT_DUPLICATES, &je);
	return *out ? FS_OK : fs_fail(e, FS_EFORMAT, "%s, line %d: %s", path, je.line, je.text);
}

static int write_all(int fd, const char *text, size_t n)
{
	while (n) {
		ssize_t w = write(fd, text, n);
		if (w < 0 && errno != EINTR)
			return -1;
		text += w > 0 ? w : 0;
		n -= w > 0 ? (size_t)w : 0;
	}
	return fsync(fd);
}

/* Owner, group and mode as they were, so that whoever could read it still can. */
static int keep_access(int fd, const char *path, struct fs_errbuf *e)
{
	struct stat old, now;
	if (stat(path, &old))
		return errno == ENOENT ? FS_OK : fs_fail_errno(e, FS_EIO, "can not look at %s", path);
	bool failed = fstat(fd, &now) != 0;
	if (!failed && (old.st_uid != now.st_uid || old.st_gid != now.st_gid))
		failed = fchown(fd, old.st_uid, old.st_gid) != 0;
	if (failed || fchmod(fd, old.st_mode & 07777))
		return fs_fail_errno(
		        e, FS_EIO, "can not write %s with the owner, group and mode that it has", path);
	return FS_OK;
}

/* Beside it and then in its place, so that a server never reads half of it. */
static int replace(const char *path, const struct fs_buf *b, struct fs_errbuf *e)
{
	char next[CLI_PATH + 8];
	snprintf(next, sizeof(next), "%s.new", path);
	unlink(next); /* of a run that was killed: whose it is and who may read it is not known */
	/* api keys may stand in it */
	int fd = open(next, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
	if (fd < 0)
		return fs_fail_errno(e, FS_EIO, "can not write %s", next);
	int rc = keep_access(fd, path, e);
	if (!rc && (write_all(fd, (char *)b->data, b->len) || rename(next, path)))
		rc = fs_fail_errno(e, FS_EIO, "can not write %s", path);
	if (rc)
		unlink(next);
	close(fd);
	return rc;
}

static int store(const char *path, const json_t *config, struct fs_errbuf *e)
{
	char real[CLI_PATH], folder[CLI_PATH];
	if (!realpath(path, real))
		snprintf(real, sizeof(real), "%s", path);
	snprintf(folder, sizeof(folder), "%s", real);
	char *slash = strrchr(folder, '/');
	if (slash && slash != folder) {
		*slash = '\0';
		if (mkdir(folder, 0700) && errno != EEXIST)
			return fs_fail_errno(e, FS_EIO, "can not make the folder %s", folder);
	}
	char *text = json_dumps(config, JSON_INDENT(2));
	struct fs_buf b;
	fs_buf_init(&b, HOST_FILE_MAX);
	int rc = text && !fs_buf_printf(&b, "%s\n", text) ? FS_OK : fs_fail(e, FS_ENOMEM, "out of memory");
	free(text);
	if (!rc)
		rc = replace(real, &b, e);
	fs_buf_finish(&b);
	return rc;
}

/* What the server itself would say of it. */
static int check(const json_t *config, const char *path, struct fs_errbuf *e)
{
	struct fs_config c;
	char *text = json_dumps(config, 0);
	fs_config_init(&c);
	int rc = text ? fs_config_parse(&c, text, strlen(text), path, e)
	              : fs_fail(e, FS_ENOMEM, "out of memory");
	if (!rc && c.model) /* a config without one takes it from the server's command line */
		rc = fs_config_check(&c, e);
	fs_config_finish(&c);
	free(text);
	return rc;
}

/* The server has another folder than this program. */
static int put_path(json_t *entry, const char *key, const char *path, struct fs_errbuf *e)
{
	char folder[CLI_PATH];
	struct fs_buf b;
	if (!path)
		return FS_OK;
	if (!getcwd(folder, sizeof(folder)))
		return fs_fail_errno(e, FS_EIO, "can not find out in which folder %s is", path);
	fs_buf_init(&b, CLI_PATH);
	int rc = host_whole_path(path, folder, &b);
	if (rc || json_object_set_new(entry, key, json_string((char *)b.data)))
		rc = fs_fail(e, FS_EINVAL, "\"%s\" can not hold %.200s", key, path);
	fs_buf_finish(&b);
	return rc;
}

static int make_entry(const struct host *h, json_t **out, struct fs_errbuf *e)
{
	json_t *entry = *out = json_pack("{s:s, s:s}", "host", h->o.name, "identity", h->key);
	if (!entry)
		return fs_fail(e, FS_EINVAL, "the host's name can not stand in a config");
	if (h->o.port)
		json_object_set_new(entry, "port", json_integer(h->o.port));
	int rc = put_path(entry, "known_hosts", h->o.known_hosts, e);
	return rc ? rc : put_path(entry, "ssh_config", h->o.ssh_config, e);
}

int host_config_entry(struct host *h)
{
	struct fs_errbuf e = {""};
	json_t *config = NULL, *entry = NULL;
	bool changed = false;
	int rc = make_entry(h, &entry, &e);
	if (!rc)
		rc = load(h->config_path, &config, &e);
	if (!rc)
		rc = host_config_add(config, entry, &changed, &e);
	if (!rc)
		rc = check(config, h->config_path, &e);
	if (!rc && changed)
		rc = store(h->config_path, config, &e);
	bool has_model = json_is_string(json_object_get(config, "model"));
	json_decref(config);
	if (rc) {
		char *text = json_dumps(entry, JSON_COMPACT), remedy[1200];
		snprintf(remedy, sizeof(remedy), "mend it, or add this to its \"vision.hosts\" by hand: %s",
		        text ? text : "");
		free(text);
		json_decref(entry);
		return host_failed(h, rc, "config", remedy, e.text);
	}
	json_decref(entry);
	if (changed)
		host_done(h, "config", "%s names %s now", h->config_path, h->o.name);
	else
		host_ok(h, "config", "%s names %s", h->config_path, h->o.name);
	if (!has_model)
		host_note(h, "that config has no \"model\" yet: the text model's GGUF file, which the server "
		             "needs");
	return FS_OK;
}

int host_config_forget(struct host *h)
{
	struct fs_errbuf e = {""};
	json_t *config = NULL;
	int rc = load(h->config_path, &config, &e);
	if (!rc)
		rc = host_config_remove(config, h->o.name, &e);
	if (!rc)
		rc = store(h->config_path, config, &e);
	json_decref(config);
	if (rc == FS_ENOTFOUND) {
		host_ok(h, "config", "%s does not name %s", h->config_path, h->o.name);
		return FS_OK;
	}
	if (rc)
		return host_failed(h, rc, "config", NULL, e.text);
	host_done(h, "config", "%s names %s no more", h->config_path, h->o.name);
	return FS_OK;
}

json_t *host_server_hosts(const struct host *h)
{
	struct cli_server server;
	json_t *reply = NULL, *hosts = NULL;
	if (cli_server_find(&h->conf, NULL, &server, NULL) ||
	        cli_http(&server, "/status", NULL, ASK_S, h->stop.token, NULL, &reply, NULL))
		return NULL;
	hosts = json_incref(json_object_get(json_object_get(reply, "vision"), "hosts"));
	json_decref(reply);
	return hosts;
}

const json_t *host_of_server(const struct host *h, const json_t *hosts, size_t i)
{
	struct fs_vision_opts o;
	fs_vision_opts_from_config(&h->conf, &o);
	return i < o.n_hosts ? host_shown(hosts, o.hosts, o.n_hosts, i) : NULL;
}

/* FS_OK: the server has taken the config as it is now. FS_EUNAVAILABLE: none answers. */
static int reload_server(struct host *h, struct cli_server *server, json_t **reply, struct fs_errbuf *e)
{
	char *path = realpath(h->config_path, NULL);
	h->asked_at = fs_now();
	json_t *body = json_pack("{s:s}", "config", path ? path : h->config_path);
	int rc = cli_http(server, "/v1/reload", body, RELOAD_S, h->stop.token, NULL, reply, e);
	json_decref(body);
	free(path);
	return rc;
}

/* Asks until `settled` is content with /status, which it looks at, or the time is over. */
static void watch(struct host *h, const struct cli_server *server, int seconds,
        bool (*settled)(const struct host *h, const json_t *vision, char *state, size_t cap), char *state,
        size_t cap)
{
	int64_t until = fs_deadline_ms(seconds * 1000);
	for (;;) {
		json_t *status = NULL;
		struct fs_errbuf e;
		if (cli_http(server, "/status", NULL, ASK_S, h->stop.token, NULL, &status, &e))
			return;
		bool done = settled(h, json_object_get(status, "vision"), state, cap);
		json_decref(status);
		struct pollfd p = {.fd = h->wake, .events = POLLIN};
		if (done || fs_now() >= until || poll(&p, 1, LOOK_MS) > 0)
			return;
	}
}

/* What a host that the server had before is down for may be mended by now: only what came since counts. */
static bool is_up_or_down(const struct host *h, const json_t *vision, char *state, size_t cap)
{
	const json_t *one = host_of_server(h, json_object_get(vision, "hosts"), h->entry);
	const char *word = json_string_value(json_object_get(one, "state")),
	           *cause = json_string_value(json_object_get(one, "cause"));
	if (word)
		snprintf(state, cap, "%s%s%s", word, cause ? ": " : "", cause ? cause : "");
	return host_is_settled(one, (double)(fs_now() - h->asked_at) / FS_SEC);
}

static bool nobody_leaves(const struct host *h, const json_t *vision, char *state, size_t cap)
{
	json_int_t n = json_integer_value(json_object_get(vision, "leaving"));
	snprintf(state, cap, "%s", n ? "it still finishes pictures there" : "");
	return n == 0;
}

static void note_restart(struct host *h, const json_t *reply)
{
	json_t *restart = json_object_get(reply, "restart"), *key;
	size_t i;
	json_array_foreach(restart, i, key)
	        host_note(h, "the config's \"%s\" has changed as well: that needs a restart of the server",
	                json_string_value(key));
}

/* What could not be done is a note: the config is right, and a restart of the server takes it. */
static bool tell(struct host *h, struct cli_server *server, const char *otherwise)
{
	struct fs_errbuf e = {""};
	json_t *reply = NULL;
	if (cli_server_find(&h->conf, NULL, server, &e)) {
		host_note(h, "a server that runs is not told, since the config does not say its port: "
		             "FARSIGHT_SERVER=http://ADDRESS:PORT does");
		return false;
	}
	int rc = reload_server(h, server, &reply, &e);
	if (rc == FS_EUNAVAILABLE)
		host_note(h, "no server answers at %s; one that starts with this config %s", server->url,
		        otherwise);
	else if (rc)
		host_note(h,
		        "the server did not read its config again (%s): until it does, or is restarted, "
		        "it goes on as before",
		        e.text);
	else
		note_restart(h, reply);
	json_decref(reply);
	return rc == FS_OK;
}

/* The config as it is now: the server's places in it are those of its hosts. */
static void read_again(struct host *h)
{
	fs_config_init(&h->conf);
	fs_config_load(&h->conf, h->config_path, NULL);
	for (size_t i = h->conf.vision.n_hosts; i-- > 0;)
		if (strcmp(h->conf.vision.hosts[i].host, h->o.name) == 0)
			h->entry = i; /* the first of that name is the one that was added */
}

static void tell_and_watch(struct host *h)
{
	struct cli_server server;
	char state[700] = "not there yet";
	if (!tell(h, &server, "uses the host"))
		return;
	watch(h, &server, UP_S, is_up_or_down, state, sizeof(state));
	if (!strncmp(state, "up", 2))
		host_ok(h, "server", "the running one at %s uses %s now", server.url, h->o.name);
	else
		host_note(h, "the running server at %s has taken %s, which is %s", server.url, h->o.name,
		        state);
}

void host_tell_server(struct host *h)
{
	struct fs_config before = h->conf; /* options may be its strings */
	read_again(h);
	tell_and_watch(h);
	fs_config_finish(&h->conf);
	h->conf = before;
}

void host_tell_server_goodbye(struct host *h)
{
	struct cli_server server;
	char state[100] = "";
	if (!tell(h, &server, "does not use the host"))
		return;
	watch(h, &server, LEAVE_S, nobody_leaves, state, sizeof(state));
	if (*state)
		host_note(h, "the running server at %s has let go of %s; %s", server.url, h->o.name, state);
	else
		host_ok(h, "server", "the running one at %s has let go of %s", server.url, h->o.name);
}
