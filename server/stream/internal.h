/* What the files of stream share. Two levels of locks: the table's, then a session's; never the other way
 * round. */
#ifndef FS_SERVER_STREAM_INTERNAL_H
#define FS_SERVER_STREAM_INTERNAL_H

#include "server/stream/stream.h"

#include <stdatomic.h>

/* What a session's ring has from its beginning: room for a few events. */
#define STREAM_FIRST_RING ((size_t)16 << 10)

struct fs_reader {
	struct fs_session *s;
	struct fs_reader *prev, *next; /* s->lock */
	uint64_t at;                   /* the reader's thread alone */
	void (*notify)(void *arg);
	void *arg;
};

struct fs_session {
	atomic_int refs;
	struct fs_streams *table;
	char id[FS_SESSION_ID_MAX + 1];
	uint8_t owner[FS_SESSION_OWNER];
	bool event_ids;
	int64_t started_at; /* wall clock, seconds */
	struct fs_cancel *cancel;

	struct fs_session *prev, *next; /* table->lock; all, the newest first */
	struct fs_session *done_prev,
	        *done_next;      /* table->lock; completed ones, the one that ended first in front */
	struct fs_session *same; /* table->lock; chain of the hash bucket */
	bool listed;             /* table->lock */

	pthread_mutex_t lock;
	uint8_t *ring; /* cap bytes; byte n lies at n % cap */
	size_t cap;
	uint64_t total, dropped; /* bytes ever appended; those of them that are gone */
	struct fs_reader_kind kind;
	bool done;                     /* the producer is done */
	int64_t done_at, completed_at; /* monotonic; wall clock */
	struct fs_reader *readers;
	size_t n_readers;
	pthread_mutex_t notify_lock; /* held while readers are told, and to detach: none is told afterwards */
};

#define FS_STREAM_BUCKETS 1024
struct fs_streams {
	struct fs_streams_opts o;
	pthread_mutex_t lock;
	struct fs_session *first;
	struct fs_session *done_first, *done_last;
	struct fs_session *buckets[FS_STREAM_BUCKETS];
	size_t n_sessions, n_done;
	atomic_size_t bytes, n_readers;
	atomic_ullong dropped_bytes;
	uint64_t opened, replaced, deleted, expired, refused;
};

/* table.c: room for `more` bytes of rings; frees completed sessions for it, but never `self`. */
bool stream_take_memory(struct fs_streams *t, size_t more, const struct fs_session *self);
/* The producer is done: the session moves to the completed ones. */
void stream_completed(struct fs_session *s);
/* session.c. The memory of its first ring is to be taken before, and goes back with the session; NULL: it is
 * not gone. */
struct fs_session *stream_session_new(
        struct fs_streams *t, const char *id, const uint8_t *owner, struct fs_cancel *cancel, bool event_ids);
void stream_session_unref(struct fs_session *s);
/* Fires the token of a running one; readers end with its producer. */
void stream_session_end(struct fs_session *s, enum fs_cancel_cause cause);

#endif
