/*
 * reload: the settings, read again while the server runs: on SIGHUP, and when a client on this machine asks
 * for it. The same command line is read as at the start, so files are read anew and what was set beside them
 * still goes over them. Vision hosts, "log_level" and "drain_s" take effect at once; keys that need a restart
 * are named in one line of the log and in GET /status. Settings that are wrong, or hosts that can not be
 * taken, change nothing.
 *
 * Everything runs on the main thread, but for asking and telling, which the HTTP loop does. The config that
 * runs is changed in those keys alone, so what others keep of it stays theirs.
 */
#ifndef FS_SERVER_RELOAD_H
#define FS_SERVER_RELOAD_H

#include "server/api/api.h"
#include "server/config/config.h"

struct fs_reload;

struct fs_reload_opts {
	/* Fills and checks an initialised config from the command line. */
	int (*read)(struct fs_config *c, void *arg, struct fs_errbuf *e);
	void *arg;
	struct fs_config *running;
	/* The config files of that command line, absolute; borrowed. */
	const char *const *files;
	size_t n_files;
};
int fs_reload_create(const struct fs_reload_opts *o, struct fs_reload **out, struct fs_errbuf *e);
/* Clients that wait are refused, and so are later ones. NULL is fine, here and below. */
void fs_reload_close(struct fs_reload *r);
void fs_reload_destroy(struct fs_reload *r); /* closed, and the HTTP loop has ended */

/* Readable when fs_reload_run has something to do. */
int fs_reload_fd(const struct fs_reload *r);
/* From a signal handler. */
void fs_reload_ask(struct fs_reload *r);
/* Reads and takes what was asked for, and answers who asked. vision NULL: the text model takes no pictures.
 */
void fs_reload_run(struct fs_reload *r, struct fs_vision *vision);

/* For fs_api: see there. */
struct fs_api_settings fs_reload_api(struct fs_reload *r);

#endif
