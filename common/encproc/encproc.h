/*
 * encproc: driving an encoder of the line protocol, wherever it runs: the encoder as a child process, and the
 * private folder through which pictures go to it and rows come back. Knows nothing of servers, leases or
 * queues. One thread, never blocks: all waiting is done by deadlines and the caller's poll loop.
 *
 * States: ABSENT -> STARTING -> READY <-> BUSY; ENDING while it is being ended; BACKOFF after a failure,
 * until the next start. It signals the group that it started and nothing else; the encoder is
 * killed when that thread ends without a word.
 */
#ifndef FS_COMMON_ENCPROC_H
#define FS_COMMON_ENCPROC_H

#include "common/wire/wire.h"

#include <poll.h>

/* ================= the process ================= */

#define FS_ENCPROC_ARGS_MAX 32
#define FS_ENCPROC_FDS 3

struct fs_encproc_opts { /* strings and args are borrowed for as long as the encproc lives */
	const char *program, *mmproj;
	const char *model;    /* NULL or "" = not told */
	char *const *args;    /* further ones, NULL-terminated, at most FS_ENCPROC_ARGS_MAX; NULL = none */
	char cuda_devices[8]; /* its CUDA_VISIBLE_DEVICES, in PCI bus order; "" = ours */
	bool gpu;             /* --gpu */
	bool gpu_if_any;      /* --device auto, which farsight-encoder alone knows */
	bool extended;        /* it speaks the extended protocol */
	bool on_demand;       /* started by fs_encproc_wake alone, after a failure too */
	int32_t threads, min_tokens, max_tokens; /* 0 = the encoder's own */
	int32_t ready_timeout_s;                 /* from its start to READY */
	int32_t encode_timeout_s;                /* from an order to its answer */
	int32_t cancel_kill_s;                   /* a plain encoder whose order is cancelled gets this long */
	int32_t stop_grace_ms;                   /* between QUIT, TERM and KILL */
	int32_t idle_s;                          /* ends after so long without an order; 0 = never */
};

enum fs_encproc_state {
	FS_ENC_ABSENT,
	FS_ENC_STARTING,
	FS_ENC_READY,
	FS_ENC_BUSY,
	FS_ENC_ENDING,
	FS_ENC_BACKOFF
};

/*
 * The end of the order: FS_OK with reply OK, FS_EINVAL with the encoder's own ERR text, FS_ECANCELLED,
 * FS_ETIMEOUT or FS_EUNAVAILABLE with a text. Called from within the functions below; must not call back into
 * them.
 */
typedef void fs_encproc_done(void *arg, int err, const struct fs_reply *reply, const char *text);

struct fs_encproc {
	struct fs_encproc_opts o;
	fs_encproc_done *done;
	void *done_arg;
	struct fs_child child;
	enum fs_encproc_state state;
	bool wanted;       /* somebody needs it */
	bool asleep;       /* wanted, but not there until it is woken */
	bool have_facts;   /* facts are of the last start that got ready */
	bool start_failed; /* the last process ended before it was ready */
	bool cancelling;   /* the order under way is wanted by nobody */
	bool late_cancel;  /* a CANCEL crossed an answer; one more "ERR cancelled" may come */
	bool retry;        /* what is ending now ends by failure: back off, then start again */
	bool renew;        /* the next start is with other options */
	struct fs_encproc_opts next;
	struct fs_ready facts;
	char cause[256];      /* of the last failure; "" when none since READY */
	char last_words[160]; /* its last line on stderr */
	int failures;         /* in a row, without a good answer between them */
	int failures_before;  /* what the last answer set back to 0 */
	uint64_t starts;      /* for status */
	int64_t deadline;     /* of the state: READY line, answer, next signal, next start, going to sleep */
	int64_t cancel_deadline;
	int64_t ready_since, failed_at; /* 0 = not yet */
	uint64_t oom_kills;             /* of the machine, before the start */
	int next_signal;                /* in ENDING */
	struct fs_buf in, out;          /* its stdout not yet parsed; orders not yet written */
	struct fs_buf err;              /* its stderr up to the next newline */
};

/* Whether the program is farsight-encoder, by its file name: others do not know what it knows. */
bool fs_encproc_is_ours(const char *program);
/*
 * Where it encodes: "cpu", "cuda", "cuda:N" (N in PCI bus order) or "auto". Sets gpu, gpu_if_any and
 * cuda_devices: who said "cpu" gets an encoder that does not see a card. "auto" is a GPU when there is one
 * that will do, for farsight-encoder; others get "cpu".
 * FS_EINVAL for other words.
 */
int fs_encproc_set_device(struct fs_encproc_opts *o, const char *device, struct fs_errbuf *e);

void fs_encproc_init(struct fs_encproc *p, const struct fs_encproc_opts *o, fs_encproc_done *done, void *arg);
/* After init: takes over a process that was READY, from an earlier program of this process; c->pid 0: one
 * that sleeps. */
void fs_encproc_adopt(
        struct fs_encproc *p, const struct fs_child *c, const struct fs_ready *facts, uint64_t starts);
/* Ends the child and waits for it, at most about twice stop_grace_ms. */
void fs_encproc_finish(struct fs_encproc *p);

/* true: start it (on demand: when it is woken) and keep it so; false: end it. */
void fs_encproc_want(struct fs_encproc *p, bool wanted);
/* Only in READY. Options that only an extended encoder knows are left out for a plain one. */
int fs_encproc_encode(struct fs_encproc *p, const struct fs_order *order, struct fs_errbuf *e);
/* The order under way is wanted by nobody; done() follows when the encoder is free again, or is gone. */
void fs_encproc_cancel(struct fs_encproc *p);
/* Starts an encoder that sleeps, and puts off the sleep of one that is there. */
void fs_encproc_wake(struct fs_encproc *p);
/* Somebody new needs it: a back-off ends within a second; at once, and its count begins anew, when the
 * failure is long ago. */
void fs_encproc_hurry(struct fs_encproc *p);
/* Other options, whose strings may lie where the old ones did: a process that is there ends when it has no
 * order, and the next one starts with them. */
void fs_encproc_renew(struct fs_encproc *p, const struct fs_encproc_opts *o);
/* Other times alone, for the process that is there. */
void fs_encproc_adjust(struct fs_encproc *p, const struct fs_encproc_opts *o);
/* What it said last (READY, or an OK that was taken as good) was wrong: it is ended, as after any failure. */
void fs_encproc_fault(struct fs_encproc *p, const char *text);

/* Sets the three slots for the next poll (an unused one has descriptor -1) and brings *until forward. */
void fs_encproc_prepare(struct fs_encproc *p, struct pollfd fds[FS_ENCPROC_FDS], int64_t *until);
void fs_encproc_dispatch(struct fs_encproc *p, const struct pollfd fds[FS_ENCPROC_FDS]);

/* As in HELLO and STATE frames: "ready", "starting" or "failed". */
const char *fs_encproc_state_word(const struct fs_encproc *p);
const char *fs_encproc_state_name(const struct fs_encproc *p);

/* ================= the folder =================
 * 0700, its files 0600, in memory-backed storage where possible. Locked while we live, so that a later
 * process can tell a dead one's folder from a live one's and removes it. */

struct fs_spool {
	char folder[256]; /* holds no space and no newline: such paths do not fit the line protocol */
	int lock_fd;      /* the folder itself, flock'd; -1 = none */
	uint64_t next;    /* number of the next file */
};

#define FS_SPOOL_PATH 320
/* In /dev/shm when it has room, else in $TMPDIR or /tmp. Removes what dead processes of this user left there.
 */
int fs_spool_init(struct fs_spool *s, struct fs_errbuf *e);
/* The same in a folder that is named. */
int fs_spool_init_at(struct fs_spool *s, const char *root, struct fs_errbuf *e);
/* A second one on another file system that has so many bytes free; FS_ENOTFOUND when there is none. */
int fs_spool_init_beside(
        struct fs_spool *s, const struct fs_spool *other, uint64_t bytes, struct fs_errbuf *e);
/* Bytes that still fit; 0 when it can not be told. */
uint64_t fs_spool_room(const struct fs_spool *s);
/* Removes the folder and all in it. */
void fs_spool_finish(struct fs_spool *s);
/* The path for an answer alone. */
void fs_spool_rows(struct fs_spool *s, char rows[FS_SPOOL_PATH]);
/* A new picture file, 0600, open for writing; rows is the path for its answer (not made). */
int fs_spool_picture(struct fs_spool *s, char picture[FS_SPOOL_PATH], char rows[FS_SPOOL_PATH], int *fd,
        struct fs_errbuf *e);

#endif
