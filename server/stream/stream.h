/*
 * stream: sessions, in which the bytes of an answer are kept for readers that come and go.
 *
 * Ownership: a producer (the call that makes the answer) holds one reference to its session, each reader
 * holds one, and the table that finds sessions by id holds one. Nobody refers to anybody else: a producer
 * knows no connection, a reader no producer, and any of them may be gone first. Whoever deletes or replaces a
 * session fires the cancel token that its producer gave, which is how the work itself ends.
 *
 * Bytes: a ring that keeps the newest `ring_bytes`; offsets count every byte ever appended. The ring grows as
 * it fills, and all rings together stay under `total_bytes`: the completed session that ended first makes
 * room; when only running ones are left, their rings stop growing and drop their oldest bytes sooner.
 *
 * Any thread may call anything. Appending never waits for a reader: notify functions are called outside all
 * locks, must not block, and may come once more while fs_reader_detach runs, not after it.
 */
#ifndef FS_SERVER_STREAM_H
#define FS_SERVER_STREAM_H

#include "common/base/base.h"

#define FS_SESSION_ID_MAX 256 /* bytes of an id */
#define FS_SESSION_OWNER 32   /* bytes that name whom a session belongs to */

struct fs_streams;
struct fs_session;

struct fs_streams_opts {
	size_t ring_bytes;   /* of one session; 0 = 4 MiB */
	size_t total_bytes;  /* of all; 0 = 256 MiB */
	size_t max_sessions; /* 0 = 4096 */
	int64_t keep_ms;     /* how long a completed one is kept; 0 = 300 s */
};
int fs_streams_create(const struct fs_streams_opts *o, struct fs_streams **out, struct fs_errbuf *e);
/* Every session's producer must be done and every reader detached. NULL is fine. */
void fs_streams_destroy(struct fs_streams *s);
/* Drops what was completed too long ago; the other functions look as well, so that this only frees memory of
 * an idle server. now: fs_now(). */
void fs_streams_expire(struct fs_streams *s, int64_t now);
/* Fires the tokens of all running sessions, so that their readers come to an end. */
void fs_streams_cancel_all(struct fs_streams *s, enum fs_cancel_cause cause);

struct fs_streams_stats {
	size_t live, completed, readers, bytes; /* bytes: memory of the rings */
	uint64_t dropped_bytes, opened, replaced, deleted, expired, refused;
};
void fs_streams_stats(struct fs_streams *s, struct fs_streams_stats *out);

/* ---- the producer's side ---- */

/*
 * Makes a session. One with this id and owner that exists is taken out of the table: a running one's token
 * fires (deleted), and its readers end with its producer. An id that another owner uses is another session.
 * event_ids: each event gets an "id: " line with the offset behind it. FS_EINVAL: an id that is empty or too
 * long. FS_ELIMIT: max_sessions run already, or their rings hold all the memory.
 */
int fs_session_open(struct fs_streams *s, const char *id, const uint8_t owner[FS_SESSION_OWNER],
        struct fs_cancel *cancel, bool event_ids, struct fs_session **out, struct fs_errbuf *e);
/* The answer will be a stream of events when nothing goes wrong, so that readers may begin theirs before they
 * know. before, after: what stands around the JSON of an error that comes instead; static, NULL = they do not
 * matter. */
void fs_session_expect_events(struct fs_session *s, const char *before, const char *after);
/* What the bytes are: a stream of events (status 200), or one answer with its status and type. Said once,
 * before the first byte; readers that attached before learn it then. content_type is static text. */
void fs_session_kind(struct fs_session *s, bool events, int status, const char *content_type);
/* Appends one whole event, or any bytes of a whole answer. */
void fs_session_event(struct fs_session *s, const void *data, size_t n);
void fs_session_append(struct fs_session *s, const void *data, size_t n);
/* The producer is done: readers end behind the last byte. An answer of which nothing was said is one of
 * status 500 without a byte. Drops the producer's reference. NULL is fine. */
void fs_session_finish(struct fs_session *s);

/* ---- the readers' side ---- */

struct fs_reader;
/*
 * Attaches at offset from. notify(arg) is called when there is more to read, when the kind is known, and at
 * the end. FS_ENOTFOUND: no such session of this owner. FS_ELIMIT: the bytes at `from` were dropped already.
 * An offset beyond what there is waits.
 */
int fs_reader_attach(struct fs_streams *s, const char *id, const uint8_t owner[FS_SESSION_OWNER],
        uint64_t from, void (*notify)(void *arg), void *arg, struct fs_reader **out, struct fs_errbuf *e);
/* The same for the session at hand. */
int fs_reader_attach_to(
        struct fs_session *s, uint64_t from, void (*notify)(void *arg), void *arg, struct fs_reader **out);
struct fs_reader_kind {
	bool known, events;
	int status;
	const char *content_type;
	bool events_expected; /* see fs_session_expect_events */
	const char *error_before, *error_after;
};
void fs_reader_kind(struct fs_reader *r, struct fs_reader_kind *out);
/* > 0: bytes copied to buf. 0: nothing now. FS_ECANCELLED: the end; all was read. FS_ELIMIT: it fell behind
 * so far that bytes it had not read were dropped. */
ssize_t fs_reader_read(struct fs_reader *r, void *buf, size_t cap);
uint64_t fs_reader_offset(const struct fs_reader *r); /* of the next byte */
void fs_reader_detach(struct fs_reader *r);           /* NULL is fine */

/* ---- by id ---- */

/* Takes it out of the table and fires its token when it still runs; readers end when its producer has said
 * its last words, which is soon. Whether there was one. */
bool fs_streams_delete(struct fs_streams *s, const char *id, const uint8_t owner[FS_SESSION_OWNER]);
bool fs_streams_has(struct fs_streams *s, const char *id, const uint8_t owner[FS_SESSION_OWNER]);
struct fs_session_row {
	char id[FS_SESSION_ID_MAX + 1];
	bool done;
	uint64_t total_bytes, dropped_bytes;
	size_t readers;
	int64_t started_at, completed_at; /* wall clock, seconds; completed_at 0 while it runs */
};
/* Sessions of this owner whose id is `id` or begins with "<id>::". -> rows written. */
size_t fs_streams_lookup(struct fs_streams *s, const char *id, const uint8_t owner[FS_SESSION_OWNER],
        struct fs_session_row *out, size_t cap);

#endif
