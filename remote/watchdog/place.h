/*
 * place: the one watchdog of a socket path: the lock beside it, the socket itself, and looking after both,
 * since the folder of a user who logged out may be swept away under us. Loop thread.
 */
#ifndef FS_WATCHDOG_PLACE_H
#define FS_WATCHDOG_PLACE_H

#include "remote/watchdog/pollset.h"
#include "remote/watchdog/watchdog.h"

#include <sys/stat.h>

struct fs_place {
	char path[FS_WD_PATH_MAX];
	int listen_fd, lock_fd; /* -1 = none */
	struct stat seen;       /* of the socket's file */
	int64_t check_at;
	bool warned;
};

/* FS_EUNAVAILABLE when another watchdog has it; finish is called in any case. */
int fs_place_open(struct fs_place *p, const char *path, struct fs_errbuf *e);
/* What an earlier program of this process had. */
void fs_place_resume(struct fs_place *p, const char *path, int listen_fd, int lock_fd);
void fs_place_close_socket(struct fs_place *p);
void fs_place_finish(struct fs_place *p);

/* FS_OK; FS_EUNAVAILABLE once when the place was lost to another watchdog: listen_fd is -1 from then on. */
int fs_place_check(struct fs_place *p);

#endif
