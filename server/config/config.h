/*
 * config: the server's settings. One table gives every key its name, type, bounds, default and help; the JSON
 * file, the command line's
 * --set, the printed help and docs/CONFIG.md all come from it. Read at start; what other threads
 * read of it is never changed afterwards (server/reload.h). It refuses unknown keys (naming the nearest known
 * one), wrong types and values out of bounds; nothing is ignored.
 */
#ifndef FS_SERVER_CONFIG_H
#define FS_SERVER_CONFIG_H

#include "common/base/base.h"

#include <stdio.h>

#define FS_CONFIG_MAX_HOSTS 16

#define FS_CONFIG_MAX_STRINGS 64
struct fs_config_strings { /* owned by the config */
	char *items[FS_CONFIG_MAX_STRINGS];
	size_t n;
};

struct fs_config_host { /* strings owned by the config; NULL = default */
	char *host;
	int64_t port;
	char *identity, *known_hosts, *ssh_config, *command, *wol, *wol_broadcast;
};

struct fs_config {
	char *model, *name, *listen, *device, *chat_template, *log_level;
	struct fs_config_strings api_key, allowed_hosts, cors_origins;
	bool open_to_network_without_key;
	int64_t max_connections, max_bodies_mb, read_timeout_s, peer_timeout_s;
	int64_t threads, context;
	int64_t timeout_s, drain_s, workers, queue_depth;
	int64_t max_body_mb, max_pictures, max_picture_mb, max_picture_mpx, cache_mb;
	struct fs_config_strings picture_folders;
	struct {
		double temperature, top_p, min_p, repeat_penalty;
		int64_t top_k;
	} sampling;
	struct {
		bool remote;
		char *mmproj, *exe, *extended, *device;
		bool gpu, elastic;
		int64_t threads, elastic_idle_s, ready_timeout_s, max_tokens, min_tokens;
		char *fingerprint, *rows_dtype;
		int64_t connect_timeout_s, encode_timeout_s, ping_interval_s, dead_after_s, wol_wait_s;
		double hedge;
		struct fs_config_host hosts[FS_CONFIG_MAX_HOSTS];
		size_t n_hosts;
	} vision;
	struct {
		bool enabled;
		int64_t timeout_s, max_redirects, max_active;
		struct fs_config_strings allow;
	} fetch;
	struct {
		int64_t ring_kb, total_mb, keep_s, max;
	} streams;
};

void fs_config_init(struct fs_config *c); /* the defaults */
void fs_config_finish(struct fs_config *c);
/* Reads a JSON file over what is there. Errors name file, key (or line and column) and what is wanted. */
int fs_config_load(struct fs_config *c, const char *path, struct fs_errbuf *e);
/* For programs beside the server: `given`, else FARSIGHT_CONFIG, else server.json in
 * $XDG_CONFIG_HOME/farsight or ~/.config/farsight when it exists; "" when there is none. */
void fs_config_find(const char *given, char *path, size_t cap);
/* As fs_config_load, from text; `from` names it in errors. */
int fs_config_parse(struct fs_config *c, const char *json, size_t n, const char *from, struct fs_errbuf *e);
/* "key=value" as on the command line: the value as JSON, or as a bare string. */
int fs_config_set(struct fs_config *c, const char *assignment, struct fs_errbuf *e);
/* What no single key can tell: model missing, vision.remote without hosts, … */
int fs_config_check(const struct fs_config *c, struct fs_errbuf *e);
/* Calls differs with the name of each key whose value is not the same in both, "vision.hosts" among them. */
void fs_config_diff(const struct fs_config *a, const struct fs_config *b,
        void (*differs)(void *arg, const char *key), void *arg);
/* The table as Markdown: key, type, default, meaning. */
void fs_config_print_table(FILE *f);

#endif
