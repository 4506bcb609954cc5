/*
 * books: a record of every request from its arrival to its end: the live ones, a ring of the last
 * FS_HISTORY_ROWS that ended, totals and one histogram a phase. Owns all records. Any thread; nothing here
 * waits but for a short lock.
 *
 * A record is opened when the request is taken in, before it is parsed, told of each phase by whoever carries
 * the request, and closed exactly once; closing moves it to the history. Times are monotonic nanoseconds.
 */
#ifndef FS_SERVER_SERVICE_BOOKS_H
#define FS_SERVER_SERVICE_BOOKS_H

#include "common/base/base.h"

enum fs_phase {
	FS_PHASE_ACCEPT, /* read, waits for a worker */
	FS_PHASE_PARSE,
	FS_PHASE_FETCH,  /* downloads of pictures */
	FS_PHASE_ENCODE, /* waits for rows: of its own encode, of another request's, or of a host */
	FS_PHASE_QUEUE,  /* waits for the turn */
	FS_PHASE_PREFILL,
	FS_PHASE_DECODE,
	FS_N_PHASES
};
const char *fs_phase_name(enum fs_phase p); /* "accept" … "decode" */

enum fs_end {
	FS_END_NONE, /* still running */
	FS_END_STOP,
	FS_END_LENGTH,
	FS_END_CANCEL,     /* its token fired: see cause */
	FS_END_DISCONNECT, /* it did not read its answer */
	FS_END_ERROR,      /* the server's or a host's fault */
	FS_END_REFUSED,    /* the request's fault, or too many wait */
	FS_N_ENDS
};
const char *fs_end_name(enum fs_end e); /* "stop", "length", "cancel", "disconnect", "error", "refused" */

struct fs_record_row { /* one record, copied */
	char id[48];
	const char *api;           /* "chat.completions" …; static */
	bool stream, conversation; /* conversation: its answer outlives its client */
	int64_t began;             /* monotonic */
	int64_t began_wall;        /* wall clock, milliseconds */
	int64_t lasted;            /* until now, or its end */
	enum fs_phase phase;       /* now, or the one that it ended in */
	int64_t phase_age;
	int64_t spent[FS_N_PHASES];
	int32_t pictures, pictures_cached;
	int32_t prompt_tokens, reused_tokens,
	        prompt_done;                    /* cells; done: prefilled so far, reused ones included */
	int32_t completion_tokens, max_tokens;  /* max: 0 = what fits */
	double tokens_per_s, tokens_per_s_mean; /* of about the last two seconds; of the whole decode */
	bool holds_turn;
	enum fs_end end;
	enum fs_cancel_cause cause; /* of FS_END_CANCEL */
	int status;                 /* HTTP status of its end */
	char code[40];              /* of an error: its machine-readable code; "" = none */
	char error[256];            /* of an error, for people */
};

#define FS_HISTORY_ROWS 500
/* Upper bounds of the histograms' buckets: 1 ms, doubling. The last bucket has none. */
#define FS_N_BUCKETS 22
double fs_bucket_bound(size_t i); /* seconds */

struct fs_books_totals {
	int64_t since_wall; /* milliseconds */
	uint64_t requests, ends[FS_N_ENDS];
	uint64_t prompt_tokens, reused_tokens, completion_tokens, pictures, pictures_cached;
	struct {
		uint64_t count, buckets[FS_N_BUCKETS + 1]; /* not cumulative */
		double sum;                                /* seconds */
	} phase[FS_N_PHASES], whole,
	        first_token; /* phases that a request did not pass through are not counted */
	size_t live[FS_N_PHASES];
};

struct fs_books;
struct fs_record;
int fs_books_create(struct fs_books **out, struct fs_errbuf *e);
void fs_books_destroy(struct fs_books *b); /* NULL is fine; no record may be open */

/* NULL when memory is out; every function below takes NULL and does nothing. id is copied. */
struct fs_record *fs_record_open(struct fs_books *b, const char *api, const char *id, int64_t began);
void fs_record_stream(struct fs_record *r, bool stream);
void fs_record_conversation(struct fs_record *r);
/* Time from now on counts for phase p. A phase may come several times. */
void fs_record_phase(struct fs_record *r, enum fs_phase p);
void fs_record_pictures(struct fs_record *r, int32_t n, int32_t cached);
void fs_record_prompt(struct fs_record *r, int32_t tokens, int32_t max_tokens);
void fs_record_turn(struct fs_record *r, bool holds);
/* Prefilled so far of all. */
void fs_record_progress(struct fs_record *r, int32_t done, int32_t total);
void fs_record_reused(struct fs_record *r, int32_t reused);
/* One more token of the answer; the first ends the prefill. */
void fs_record_token(struct fs_record *r);
/* What the engine counted in the end goes over what was seen on the way. */
void fs_record_counts(struct fs_record *r, int32_t prompt, int32_t reused, int32_t completion);
struct fs_record_end {
	enum fs_end end;
	enum fs_cancel_cause cause;
	int status;
	const char *code, *error; /* NULL = none; copied */
};
void fs_record_close(struct fs_record *r, const struct fs_record_end *end);

/* Oldest first. -> rows written. */
size_t fs_books_live(struct fs_books *b, struct fs_record_row *out, size_t cap);
/* Newest first, at most cap. */
size_t fs_books_history(struct fs_books *b, struct fs_record_row *out, size_t cap);
void fs_books_totals(struct fs_books *b, struct fs_books_totals *out);

#endif
