/*
 * The watchdog's private folder for pictures on their way to the encoder and rows on their way back. One
 * thread. The folder is 0700 and locked while we live, so that a later watchdog can tell a dead one's folder
 * from a live one's and removes it.
 */
#ifndef FS_WATCHDOG_SPOOL_H
#define FS_WATCHDOG_SPOOL_H

#include "common/base/base.h"

struct fs_spool {
	char folder[256]; /* holds no space and no newline: such paths do not fit the line protocol */
	int lock_fd;      /* the folder itself, flock'd */
	uint64_t next;    /* number of the next file */
};

#define FS_SPOOL_PATH 320
/* In /dev/shm when it has room, else in $TMPDIR or /tmp. Removes what dead watchdogs of this user left there.
 */
int fs_spool_init(struct fs_spool *s, struct fs_errbuf *e);
/* Removes the folder and all in it. */
void fs_spool_finish(struct fs_spool *s);
/* A new picture file, 0600, open for writing; rows is the path for its answer (not made). */
int fs_spool_picture(struct fs_spool *s, char picture[FS_SPOOL_PATH], char rows[FS_SPOOL_PATH], int *fd,
        struct fs_errbuf *e);

#endif
