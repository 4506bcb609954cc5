/*
 * inbox: what stands between stdin and the encoder. A thread reads lines while a picture is encoded, so that
 * CANCEL, the end of stdin and SIGTERM are seen at once. It keeps orders in their order and fires the token
 * of the oldest unanswered one.
 */
#ifndef FS_ENCODER_INBOX_H
#define FS_ENCODER_INBOX_H

#include "common/wire/wire.h"

struct inbox;

struct inbox_order {
	struct fs_order order;
	struct fs_cancel *cancel; /* of an ENC; owned by the inbox */
	struct fs_errbuf error;   /* not "": the line was no order, and this is why */
};

/* SIGTERM, SIGINT and SIGHUP must be blocked in every thread. Until inbox_ready, the end of stdin or a signal
 * ends the process at once. */
int inbox_open(struct inbox **out, bool extended, struct fs_errbuf *e);
void inbox_ready(struct inbox *b);
/* Waits for the next order; NULL when there is nothing more to do. It stays valid, and cancellable, until
 * inbox_done. */
struct inbox_order *inbox_next(struct inbox *b);
/* Right before its answer is written: a CANCEL that comes later finds nothing running. */
void inbox_done(struct inbox *b);
/* While true, an end of stdin does not end the process by force (a result is being written). */
void inbox_writing(struct inbox *b, bool writing);
void inbox_close(struct inbox *b);

#endif
