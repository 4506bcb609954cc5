/*
 * Shared by the files of this folder alone. One mutex (fs_vision.lock) guards every field that is not said to
 * belong to a host's thread; it is held for short list work, never across a system call that can wait. Lock
 * order: a cancel token's own lock comes first (its hook takes ours), so nothing here touches a token while
 * it holds fs_vision.lock.
 */
#ifndef FS_SERVER_VISION_INTERNAL_H
#define FS_SERVER_VISION_INTERNAL_H

#include "server/ssh/ssh.h"
#include "server/vision/pool.h"
#include "server/vision/vision.h"
#include "server/vision/wol.h"

#include <stdatomic.h>

#define FS_VISION_SLOTS FS_POOL_MAX_HOSTS /* hosts in use, and those that are let go */
#define FS_VISION_MAX_JOBS 256            /* at once, all hosts together */
#define FS_VISION_MAX_RETRIES 2
#define FS_VISION_MAX_JOB_BYTES ((size_t)512 << 20) /* pictures of all jobs */
#define FS_VISION_LOST_EXTRA_MS 1000 /* a lost job waits connect_timeout_ms and this for a host */
#define FS_VISION_RETRY_PAUSE_MS                                                                             \
	100 /* before the same host is asked again: its state frame may be on the way */

#define FS_VISION_BENCH_FIRST_MS 1000 /* after a failed encode; doubled with each further one */
#define FS_VISION_BENCH_MAX_MS 60000
#define FS_VISION_WOL_EVERY_MS 60000 /* between two bursts of wake-up packets to one host */
#define FS_VISION_WOL_HOPE_MS 120000 /* a host that was sent one is asked often, and said to be waking */
#define FS_VISION_WOL_RETRY_S 15     /* told to clients meanwhile */
#define FS_VISION_HEDGE_MIN_MS 50    /* no host is late before this */

struct fs_host;

/* Where a job stands with the host it is given to. */
enum fs_job_stage { FS_JOB_WAITING, FS_JOB_SENDING, FS_JOB_SENT, FS_JOB_RECEIVING };

struct fs_vision_job {
	struct fs_vision *v;
	int refs; /* its owner, and the host's list */
	pthread_cond_t cond;
	struct fs_cancel *cancel;
	struct fs_cancel_hook hook;
	uint8_t *bytes; /* [n]; constant */
	size_t n;
	uint8_t key[32];
	struct fs_encode_params params;
	int64_t submitted, deadline;
	int64_t park_until;    /* parked: when hope ends; counts from the last loss */
	int64_t not_before;    /* parked: not given to a host before this */
	int64_t wait_for_wake; /* parked: stays until this although no host is up: one was woken for it */
	int64_t waits_since;   /* it came, or its last host lost it */
	int tries;             /* encodes lost so far */
	uint32_t tried;        /* bit a slot: hosts that lost it */
	bool done;
	int rc; /* once done */
	struct fs_errbuf err;
	struct fs_rows *rows; /* once done with FS_OK */
	struct fs_host *host; /* NULL = parked, or done before it had one */
	struct fs_vision_job *prev, *next;
	/* A late picture is also given to a second host, as a job of its own: the twin, which has the bytes
	 * and one reference of the first job. It has no owner and never parks; whoever is first ends both. */
	struct fs_vision_job *first, *twin;
	bool hedged; /* it has, or had, a twin */

	/* of the host's thread while it is in that host's list */
	enum fs_job_stage stage;
	uint32_t id; /* on the wire; fresh for each try; 0 before ENC */
	size_t sent;
	int64_t begun_at; /* its sending */
	int64_t sent_at;  /* the picture is whole on its way */
	int64_t hedge_at; /* when the host is late with it; FS_NEVER = is not minded */
	int64_t rows_at;  /* its rows began */
	struct fs_rows_head head;
	uint8_t *data; /* malloc'd, room for f32 rows; halves arrive in its second half */
	size_t data_at, need, got;
	size_t n_finite; /* f32 values at the front that were looked at and are finite */
};

struct fs_job_list {
	struct fs_vision_job *first, *last;
};

struct fs_link; /* the framed channel, link.c */

/* What a slot holds. New pictures go to LIVE ones alone, and nobody is told of others. */
enum fs_slot {
	FS_SLOT_FREE,
	FS_SLOT_NEW, /* being made */
	FS_SLOT_LIVE,
	FS_SLOT_LEAVING, /* not wanted any more; its thread ends once it has no picture left */
	FS_SLOT_ENDED,   /* its thread is to be joined */
};

struct fs_host {
	struct fs_vision *v;
	char name[128];
	struct fs_vision_host_opts own; /* as they were given, strings owned */
	struct fs_ssh_opts ssh;         /* strings of `own` */
	pthread_t thread;
	bool started; /* there is a thread */
	int wake;
	atomic_bool leaving; /* as FS_SLOT_LEAVING, for its thread */
	/* under the lock */
	enum fs_slot use;
	size_t order; /* its place in the configuration */
	enum fs_host_state state;
	char cause[512];
	struct fs_hello facts;
	struct fs_job_list jobs;
	uint32_t outstanding; /* in the list; of these, `ahead` were begun to be sent */
	uint32_t ahead;
	double rtt_ms;
	struct fs_pool_speed speed;
	struct fs_host_times times[FS_N_HOST_TIMES];
	int64_t last_rows; /* when the rows of its last answer began */
	uint64_t encodes, bytes_up, bytes_down, retries, hedged, hedge_wins;
	uint64_t errors[FS_N_HOST_ERRORS];
	int fails;             /* encodes lost there in a row */
	int64_t benched_until; /* after them */
	int64_t next_attempt;  /* to connect; 0 = no pause is going on */
	int64_t since;
	bool kicked; /* somebody asked for it while it was down: try now */
	/* wake-on-LAN */
	bool has_wol, wol_due; /* due: its thread is to send a burst */
	struct fs_wol wol;
	bool asleep;      /* the last attempt found nothing that answers */
	int64_t woken_at; /* last burst asked for; 0 = never */
};

struct fs_vision {
	pthread_mutex_t lock;
	struct fs_host hosts[FS_VISION_SLOTS];
	size_t n_hosts; /* slots that were ever in use; they never become fewer */
	int news;       /* eventfd, -1 before it is open */
	struct fs_job_list parked;
	size_t n_jobs, job_bytes;
	double rows; /* moving mean of rows a picture */
	uint32_t next_id;
	atomic_bool stopping;
	bool destroyed; /* by its owner; jobs whose owners are slower keep it until they are gone */
	char lease[65], program[32];
	char fingerprint[33];     /* wanted, or of the first host that came up; "" = not known yet */
	char fingerprint_of[128]; /* the name of who set it; "" = the configuration, or nobody */
	const struct fs_host *fingerprint_from; /* the live host that did; NULL = no host */
	unsigned unbound;                       /* how often what a host had set has been forgotten */
	struct fs_encode_params last_limits;    /* of the encoder that came up last */
	struct fs_local *local;                 /* NULL: all hosts are remote */
	struct fs_vision_opts o;                /* pointers inside are not used after create */
};

/* ---- job.c ---- */

void fs_jobs_append(struct fs_job_list *l, struct fs_vision_job *j);
void fs_jobs_remove(struct fs_job_list *l, struct fs_vision_job *j);
/* First end wins. Wakes the waiter, and the host's thread, which takes it off its list. */
void fs_job_end_locked(struct fs_vision_job *j, int rc, const char *fmt, ...) FS_PRINTF(3, 4);
void fs_job_unref_locked(struct fs_vision_job *j);
/* By the host's thread: takes a job off its list, lost through the host's fault. Goes to another host, waits,
 * or ends. */
void fs_job_lost_locked(struct fs_vision_job *j, enum fs_host_error cause, const char *why);
/* By the host's thread: off its list and back to the waiting ones, at no cost to it: it was not sent. */
void fs_job_unassign_locked(struct fs_vision_job *j);
/* By the host's thread: n more bytes of rows are here. Looks at them while the cache still holds them. */
void fs_job_received(struct fs_vision_job *j, size_t n);
/* By the host's thread: all rows are here. Checks them and ends the job. */
void fs_job_complete(struct fs_vision_job *j);
/* Gives a second host the same picture. Nothing happens when memory is out. */
void fs_job_twin_locked(struct fs_vision_job *j, struct fs_host *second);

/* ---- spread.c: which host has which job ---- */

/* The host that should do it now; NULL = none is up. Bits of `without` (1 << index) leave hosts out. */
struct fs_host *fs_vision_pick_locked(const struct fs_vision *v, size_t picture_bytes, uint32_t without);
void fs_vision_assign_locked(struct fs_host *h, struct fs_vision_job *j);
/* Gives parked jobs to hosts, or ends them when no host is left to hope for; moves waiting ones to hosts that
 * have nothing to do. After every change of a host's state or load. */
void fs_vision_review_locked(struct fs_vision *v);
bool fs_vision_hope_locked(const struct fs_vision *v, bool *starting);
/* Sleeping hosts are sent wake-up packets, when they may be. Until when a picture may wait for one; 0 = none
 * is waking. */
int64_t fs_vision_rouse_locked(struct fs_vision *v);
/* "<host>: <cause>; <host>: <cause>" */
void fs_vision_causes_locked(const struct fs_vision *v, char *out, size_t cap);
/* By the host's thread. Whether one more of its jobs may be begun. */
bool fs_host_has_room_locked(const struct fs_host *h, const struct fs_vision_job *j);
/* By the host's thread: the job is being sent; the picture is whole on its way; its rows begin; they are
 * here. */
void fs_host_begins_locked(struct fs_vision_job *j);
void fs_host_sent_locked(struct fs_vision_job *j);
void fs_host_answers_locked(struct fs_vision_job *j);
void fs_host_did_locked(struct fs_vision_job *j);
/* An encode was lost there: the host is left alone for a while. Once for all that one event took. */
void fs_host_failed_locked(struct fs_host *h);
/* By the host's thread: gives late pictures to second hosts; when it is to be called again. */
int64_t fs_host_hedge_locked(struct fs_host *h);

/* ---- hosts.c ---- */

/* The first hosts of a vision that is being made. On failure what is there is freed with the vision. */
int fs_hosts_create(struct fs_vision *v, const struct fs_vision_opts *o, struct fs_errbuf *e);
/* Whether its thread is to end: the vision does, or the host is let go and has no picture left. */
bool fs_host_is_over(struct fs_host *h);
/* What its thread does last. */
void fs_host_ended(struct fs_host *h);
/* h set the model that binds all hosts, and is gone or has another one by now: it binds on where another host
 * has it, else any will do. */
void fs_host_unbind_locked(const struct fs_host *h);
/* Its thread has ended, or never began. The slot is empty then. */
void fs_host_finish(struct fs_host *h);
static inline bool fs_host_is_live(const struct fs_host *h)
{
	return h->use == FS_SLOT_LIVE;
}

/* ---- vision.c ---- */

/* After destroy, when the last job is gone. */
void fs_vision_free(struct fs_vision *v);

/* ---- dial.c ---- */

void *fs_host_run(void *host);
/* Whether this machine slept since the call before; the caller keeps the two clocks, 0 at first. */
bool fs_host_slept(int64_t *mono, int64_t *boot);

/* ---- host.c ---- */

/* Runs a connection to its end; the text says why it ended. *greeted: the host had said HELLO. */
int fs_host_serve(struct fs_host *h, struct fs_ssh *ssh, bool *greeted, struct fs_errbuf *e);
/* Whether rows of a host with these facts fit; keeps what later hosts, and the names of rows, go by. */
int fs_host_check_model_locked(struct fs_host *h, const struct fs_hello *f, struct fs_errbuf *e);
void fs_host_set_state_locked(struct fs_host *h, enum fs_host_state state, const char *cause);
/* What the link calls for each frame that is not DATA of a known job. Negative ends the connection. */
int fs_host_frame(struct fs_host *h, struct fs_link *l, const struct fs_frame *f, struct fs_errbuf *e);

/* ---- local.c: the encoder on this machine, as the one host of its vision ---- */

struct fs_local;
int fs_local_create(
        struct fs_host *h, const struct fs_vision_local_opts *o, struct fs_local **out, struct fs_errbuf *e);
void fs_local_destroy(struct fs_local *l); /* its thread has ended; NULL is fine */
void *fs_local_run(void *local);

/* ---- link.c: all of the host's thread ---- */

struct fs_link {
	struct fs_host *h;
	struct fs_ssh *ssh;
	struct fs_buf control; /* frames that go before any DATA */
	uint8_t *out;          /* pinned until it is all written: libssh2 remembers it */
	size_t out_n, out_at;
	uint8_t head[FS_FRAME_HEADER];
	size_t head_n;
	struct fs_frame in;
	struct fs_vision_job
	        *in_job;  /* whose DATA is being received, straight into its rows; NULL = into scratch */
	uint8_t *scratch; /* [FS_FRAME_MAX] */
	size_t in_at;
	int64_t last_alive;
	size_t last_unsent;
	uint64_t up, down; /* bytes since they were last added to the host's */
	uint64_t late;     /* bytes of rows that may still come for jobs that have left */
	int64_t second;    /* when the counting of frames began */
	int frames;
	bool hello_seen, uploading;
};
int fs_link_init(struct fs_link *l, struct fs_host *h, struct fs_ssh *ssh, struct fs_errbuf *e);
void fs_link_finish(struct fs_link *l);
int fs_link_queue(
        struct fs_link *l, uint8_t type, uint32_t id, const void *payload, size_t n, struct fs_errbuf *e);
/* Each moves what can be moved now, within a bound; *moved says whether anything was. */
int fs_link_send(struct fs_link *l, bool *moved, struct fs_errbuf *e);
int fs_link_receive(struct fs_link *l, bool *moved, struct fs_errbuf *e);
bool fs_link_wants_write(const struct fs_link *l);
/* The job leaves the list: DATA of it that is half here goes to scratch. */
void fs_link_forget(struct fs_link *l, const struct fs_vision_job *j);

#endif
