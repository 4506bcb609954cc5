/*
 * watchdog: what other programs may know of the vision host's daemon: where its unix socket lies, how it is
 * reached, and the one line that a client says first. No state, no threads. Everything else of the module is
 * private to remote/watchdog.
 *
 * The socket is the user's own: its folder must belong to the caller and be closed to others, on both sides
 * of the connection, so that nobody else on the machine can pose as the watchdog or talk to it.
 */
#ifndef FS_REMOTE_WATCHDOG_H
#define FS_REMOTE_WATCHDOG_H

#include "common/base/base.h"

#define FS_WD_PATH_MAX 108 /* sizeof(sun_path), the NUL included */

/*
 * $XDG_RUNTIME_DIR/farsight/watchdog.sock; without that variable (sshd sets it only with PAM) the same below
 * /run/user/<uid> when that folder is the user's, else /tmp/farsight-<uid>/watchdog.sock.
 */
int fs_wd_socket_path(char out[FS_WD_PATH_MAX], struct fs_errbuf *e);
/* Of all these places the first where a watchdog answers, since the environment of sessions differs; else as
 * above. */
int fs_wd_find_socket(char out[FS_WD_PATH_MAX], struct fs_errbuf *e);
/* Makes the socket's folder (0700) when it is missing. FS_EAUTH when it is another user's or open to others.
 */
int fs_wd_prepare_folder(const char *socket_path, struct fs_errbuf *e);
/* A connected, non-blocking, close-on-exec socket. FS_EUNAVAILABLE when no watchdog answers there. */
int fs_wd_connect(const char *socket_path, int *fd, struct fs_errbuf *e);

/*
 * A program of the same installation: beside this one, or in ../<folder> as the build lays them out.
 * FS_ENOTFOUND names the first place.
 */
int fs_wd_find_program(const char *name, const char *folder, char *out, size_t cap, struct fs_errbuf *e);

#define FS_WD_TAKEN "FARSIGHT taken\n"
/* The first line on the socket, at most FS_WD_GREETING_MAX bytes: "FARSIGHT 1 <purpose> <peer>\n". */
#define FS_WD_GREETING_MAX 160
enum fs_wd_purpose {
	FS_WD_CHANNEL, /* frames follow, both ways; FS_WD_TAKEN when descriptors for them came along */
	FS_WD_STATUS,  /* one JSON object comes back, then the end */
	FS_WD_STOP,    /* the same; the socket ends when the watchdog has */
	FS_WD_RETIRE,  /* the same, as soon as it serves nobody */
	FS_WD_REPLACE, /* with a descriptor of a program that takes the process over; its status comes back */
	FS_WD_RELOAD,  /* the settings are read again; the status, or "FARSIGHT refused: <text>" */
};
struct fs_wd_greeting {
	enum fs_wd_purpose purpose;
	char peer[80]; /* numeric address that the ssh session came from; "" when there was none */
};
/* Returns the bytes written to out, newline included. A peer that is no address is left out. */
size_t fs_wd_greeting_format(const struct fs_wd_greeting *g, char out[FS_WD_GREETING_MAX]);
/* One line without its newline. */
int fs_wd_greeting_parse(const char *line, size_t n, struct fs_wd_greeting *out, struct fs_errbuf *e);

#endif
