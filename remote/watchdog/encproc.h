/*
 * encproc: the encoder as a child process. Owns its process group, its pipes and its state; knows nothing of
 * servers, leases or queues. One thread, never blocks: all waiting is done by deadlines and the poll loop.
 *
 * States: ABSENT -> STARTING -> READY <-> BUSY; ENDING while it is being ended; BACKOFF after a failure,
 * until the next start. It signals the group that it started and nothing else.
 */
#ifndef FS_WATCHDOG_ENCPROC_H
#define FS_WATCHDOG_ENCPROC_H

#include "common/wire/wire.h"
#include "remote/watchdog/config.h"
#include "remote/watchdog/pollset.h"

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
	const struct fs_wd_config *cfg;
	fs_encproc_done *done;
	void *done_arg;
	struct fs_child child;
	enum fs_encproc_state state;
	bool wanted;       /* somebody holds a lease */
	bool asleep;       /* wanted, but ended for being idle */
	bool have_facts;   /* facts are of the last start that got ready */
	bool start_failed; /* the last process ended before it was ready */
	bool cancelling;   /* the order under way is wanted by nobody */
	bool late_cancel;  /* a CANCEL crossed an answer; one more "ERR cancelled" may come */
	bool retry;        /* what is ending now ends by failure: back off, then start again */
	struct fs_ready facts;
	char cause[256];      /* of the last failure; "" when none since READY */
	char last_words[160]; /* its last line on stderr */
	int failures;         /* in a row, without an answer between them */
	uint64_t starts;      /* for status */
	int64_t deadline;     /* of the state: READY line, answer, next signal, next start, going to sleep */
	int64_t cancel_deadline;
	int next_signal;       /* in ENDING */
	struct fs_buf in, out; /* its stdout not yet parsed; orders not yet written */
	struct fs_buf err;     /* its stderr up to the next newline */
	int in_slot, out_slot, err_slot;
};

void fs_encproc_init(struct fs_encproc *p, const struct fs_wd_config *cfg, fs_encproc_done *done, void *arg);
/* Ends the child and waits for it, at most about twice stop_grace_ms. */
void fs_encproc_finish(struct fs_encproc *p);

/* true: start it when it is not there and keep it so; false: end it. */
void fs_encproc_want(struct fs_encproc *p, bool wanted);
/* Only in READY. Options that only an extended encoder knows are left out for a plain one. */
int fs_encproc_encode(struct fs_encproc *p, const struct fs_order *order, struct fs_errbuf *e);
/* The order under way is wanted by nobody; done() follows when the encoder is free again. */
void fs_encproc_cancel(struct fs_encproc *p);
/* Starts an encoder that was ended for being idle. */
void fs_encproc_wake(struct fs_encproc *p);

void fs_encproc_prepare(struct fs_encproc *p, struct fs_pollset *ps);
void fs_encproc_dispatch(struct fs_encproc *p, const struct fs_pollset *ps);

/* As in HELLO and STATE frames: "ready", "starting" or "failed". */
const char *fs_encproc_state_word(const struct fs_encproc *p);
const char *fs_encproc_state_name(const struct fs_encproc *p);

#endif
