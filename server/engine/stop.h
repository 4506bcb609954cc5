/*
 * stop: finds stop strings in text that comes in pieces, and holds back what may be the start of one.
 * Internal to the engine. One thread at a time. Text goes in and comes out in whole UTF-8 characters.
 */
#ifndef FS_ENGINE_STOP_H
#define FS_ENGINE_STOP_H

#include "server/engine/engine.h"

#define FS_STOP_MAX_BYTES 4096 /* of one stop string */

struct fs_stop {
	const char *const *stops; /* not owned */
	size_t len[FS_MAX_STOPS];
	size_t n;
	struct fs_buf held;
};

/* FS_EINVAL: an empty or too long stop string. */
int fs_stop_init(struct fs_stop *s, const char *const *stops, size_t n, struct fs_errbuf *e);
void fs_stop_finish(struct fs_stop *s);
typedef void (*fs_stop_out)(void *arg, const char *utf8, size_t n);
/*
 * Puts out what can not belong to a stop string any more. *hit: the index of the stop string that was
 * completed (the one that starts first), with all text before it put out and nothing held; -1 when none. out
 * may be NULL. FS_ENOMEM.
 */
int fs_stop_push(struct fs_stop *s, const char *text, size_t n, fs_stop_out out, void *arg, int *hit);
/* The end without a stop string: puts out what was held. */
void fs_stop_flush(struct fs_stop *s, fs_stop_out out, void *arg);

#endif
