/* The server on this machine: its config file, and what it says when it runs. */
#include "server/cli/host.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define ASK_S 3

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

/* Beside it and then in its place, so that a server never reads half of it; the mode stays. */
static int store(const char *path, const json_t *config, struct fs_errbuf *e)
{
	char real[CLI_PATH], next[CLI_PATH + 8], folder[CLI_PATH];
	struct stat st;
	if (!realpath(path, real))
		snprintf(real, sizeof(real), "%s", path);
	snprintf(folder, sizeof(folder), "%s", real);
	char *slash = strrchr(folder, '/');
	if (slash && slash != folder) {
		*slash = '\0';
		if (mkdir(folder, 0700) && errno != EEXIST)
			return fs_fail_errno(e, FS_EIO, "can not make the folder %s", folder);
	}
	snprintf(next, sizeof(next), "%s.new", real);
	char *text = json_dumps(config, JSON_INDENT(2));
	struct fs_buf b;
	fs_buf_init(&b, HOST_FILE_MAX);
	int rc = text && !fs_buf_printf(&b, "%s\n", text) ? FS_OK : fs_fail(e, FS_ENOMEM, "out of memory");
	free(text);
	/* api keys may stand in it */
	int fd = rc ? -1 : open(next, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
	if (!rc && (fd < 0 || (stat(real, &st) == 0 && fchmod(fd, st.st_mode & 07777)) ||
	                   write_all(fd, (char *)b.data, b.len) || rename(next, real))) {
		rc = fs_fail_errno(e, FS_EIO, "can not write %s", path);
		unlink(next);
	}
	if (fd >= 0)
		close(fd);
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

static json_t *entry_of(const struct host *h)
{
	json_t *entry = json_pack("{s:s, s:s}", "host", h->o.name, "identity", h->key);
	if (h->o.port)
		json_object_set_new(entry, "port", json_integer(h->o.port));
	if (h->o.known_hosts)
		json_object_set_new(entry, "known_hosts", json_string(h->o.known_hosts));
	if (h->o.ssh_config)
		json_object_set_new(entry, "ssh_config", json_string(h->o.ssh_config));
	return entry;
}

int host_config_entry(struct host *h)
{
	struct fs_errbuf e = {""};
	json_t *config = NULL, *entry = entry_of(h);
	bool changed = false;
	int rc = load(h->config_path, &config, &e);
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

void host_tell_server(struct host *h)
{
	json_t *hosts = host_server_hosts(h), *one;
	size_t i;
	bool knows = false;
	json_array_foreach(hosts, i, one)
	{
		const char *name = json_string_value(json_object_get(one, "host"));
		knows |= name && !strcmp(name, h->o.name);
	}
	if (!hosts)
		host_note(h, "no server answers; one that starts with this config uses the host");
	else if (knows)
		host_ok(h, "server", "the running one uses %s", h->o.name);
	else
		host_note(
		        h, "the running server began with an older config: restart it to use %s", h->o.name);
	json_decref(hosts);
}
