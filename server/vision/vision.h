/*
 * vision: who turns pictures into rows: vision hosts, or an encoder on this machine. Owns one thread a vision
 * host: it keeps the ssh channel up (reconnecting in the background with growing back-off and jitter), speaks
 * frames, pings, and matches answers to requests by id. The encoder on this machine is one more kind of host,
 * named "local": its thread starts it, gives it pictures in turn, restarts it when it dies. Requests submit
 * from any thread and wait with their cancel token. A host known to be down is refused at once.
 */
#ifndef FS_SERVER_VISION_H
#define FS_SERVER_VISION_H

#include "server/rows/rows.h"

struct fs_vision;

#define FS_VISION_MAX_HOSTS 16
struct fs_vision_host_opts {
	const char *host; /* as fs_ssh_opts */
	int port;
	const char *identity, *known_hosts, *config_file, *command; /* NULL = defaults */
	const char
	        *wol; /* MAC address to which a wake-up packet is sent when no host is up; NULL = none is */
	const char *wol_broadcast; /* address or address:port; NULL = 255.255.255.255, port 9 */
};

/*
 * The turn in front of this machine's GPU, as an encoder on it needs it: one ask at a time. granted is called
 * once, on any thread, maybe from within ask, unless give_back comes first; it only takes note. give_back
 * also withdraws an ask. The turn must outlive the vision.
 */
struct fs_vision_turn {
	void *arg;
	void (*ask)(void *arg, void (*granted)(void *), void *granted_arg); /* NULL: there is no turn */
	void (*give_back)(void *arg);
};
struct fs_vision_local_opts { /* copied */
	const char *exe;      /* of the line protocol (docs/PROTOCOL.md); searched in PATH when without '/' */
	const char *mmproj;   /* what it is to load */
	const char *model;    /* the text model, told to it; NULL = not told */
	bool extended;        /* it speaks the extended protocol */
	const char *device;   /* "auto", "cpu", "cuda", "cuda:N"; NULL = "cuda" with gpu, else left to it */
	bool gpu;             /* it works on a GPU of this machine and takes the turn for each picture */
	bool elastic;         /* started by the first picture, ended after idle_s without one */
	int threads;          /* 0 = as it likes */
	int idle_s;           /* 300; elastic only */
	int ready_timeout_s;  /* 300 */
	struct fs_vision_turn turn;
};
struct fs_vision_opts {
	struct fs_vision_host_opts hosts[FS_VISION_MAX_HOSTS];
	size_t n_hosts;                           /* 0: none yet; pictures are refused until there are some */
	const struct fs_vision_local_opts *local; /* not NULL: the encoder on this machine; n_hosts is 0 */
	int32_t n_embd; /* the text model's; a host whose rows have another width is refused by name */
	const char *fingerprint; /* of the mmproj that every host must have; NULL = any, but all the same */
	bool f16;                /* rows cross the network as f16 */
	int32_t min_tokens, max_tokens;     /* bounds of a picture's rows; 0 = the encoder's own */
	int connect_timeout_ms;             /* 3000 */
	int ping_interval_ms;               /* 5000 */
	int dead_after_ms;                  /* silence after which a host is gone; 15000 */
	int encode_timeout_ms;              /* one encode, queue on the host included; 300000 */
	int liveness_port;                  /* told to hosts; 0 = none */
	int probe_fails, probe_interval_ms; /* of that port, told to hosts; 0 = theirs */
	const char *program;                /* told to hosts, for people; NULL = "farsight-server" */
	double hedge;    /* a picture that takes so many times what it usually would is also given to a second
	                    host, and the first answer is taken; 0 = never */
	int wol_wait_ms; /* from the wake-up packet on, pictures wait so long for the host; 0 = they do not */
};
int fs_vision_create(const struct fs_vision_opts *o, struct fs_vision **out, struct fs_errbuf *e);
void fs_vision_destroy(struct fs_vision *v); /* says BYE where it can, within a second; pending jobs end with
                                                FS_EUNAVAILABLE and may be destroyed later */

/* Whether there is anything that pictures could be given to, up or down. NULL has nothing. */
bool fs_vision_has_hosts(struct fs_vision *v);

struct fs_vision_change {
	size_t added, removed, kept; /* a host whose settings differ was removed and added */
};
/*
 * From now on these are the hosts, 0 to FS_VISION_MAX_HOSTS. Those that are the same in every setting are not
 * touched, but dialled at once where they are down. New ones are connected; the others get no further
 * picture: what waited for them goes elsewhere, what was sent to them is finished there (or is tried
 * elsewhere when they are lost), and then they are left with BYE. All or nothing: on failure everything is as
 * before. Never waits for the network. One caller at a time. FS_ENOTSUP: the encoder is on this machine.
 */
int fs_vision_set_hosts(struct fs_vision *v, const struct fs_vision_host_opts *hosts, size_t n,
        struct fs_vision_change *change, struct fs_errbuf *e);

/* What the i-th of n hosts is called in errors, figures and metrics: as it is written, with its port or its
 * number behind it ("box:2222", "box #2") where others are written alike. One that was kept over a change
 * has its old name. */
void fs_vision_host_name(const struct fs_vision_host_opts *hosts, size_t n, size_t i, char *out, size_t cap);

/* Hosts that were removed and still work on pictures, or say BYE. */
size_t fs_vision_leaving(struct fs_vision *v);

/* Waits until an encoder on this machine that is not elastic can take pictures; FS_EUNAVAILABLE and its cause
 * when it can not start; FS_ECANCELLED when stop_fd becomes readable first (-1 = none). FS_OK at once for
 * everything else. */
int fs_vision_wait_ready(struct fs_vision *v, int stop_fd, struct fs_errbuf *e);
/* An eventfd that is readable once the state of a host has changed, until fs_wake_drain: for owners that wait
 * for other things too. It lives as long as v. */
int fs_vision_news(const struct fs_vision *v);
/* What changes rows beside the picture and its parameters, as far as it is known by now, as text. */
#define FS_VISION_IDENTITY 160
void fs_vision_identity(struct fs_vision *v, char out[FS_VISION_IDENTITY]);

struct fs_vision_job; /* owned by who submitted it */
struct fs_encode_params {
	int32_t min_tokens, max_tokens; /* 0 = the host's */
};
/*
 * Starts an encode and returns at once. bytes are copied. key: 32 bytes that name the rows. FS_EUNAVAILABLE
 * at once when no host is up (text: "<host>: <cause>"), except while the very first connection attempt is
 * still going on: then it waits for it, at most connect_timeout_ms. A host whose encoder is being started is
 * waited for as long as the job may take. A refusal makes hosts that are down try again soon, and sends a
 * wake-up packet to those that have an address for it and are not reached, at most one burst a minute. cancel
 * fires: the host is told (CANCEL frame) and the job ends with FS_ECANCELLED within 100 ms.
 */
int fs_vision_submit(struct fs_vision *v, const void *bytes, size_t n, const uint8_t key[32],
        const struct fs_encode_params *p, struct fs_cancel *cancel, struct fs_vision_job **out,
        struct fs_errbuf *e);
/* Waits for the end. FS_OK: *rows is one reference. FS_EINVAL: the encoder refused the picture (its text).
 * FS_EUNAVAILABLE: host lost, retries used up. */
int fs_vision_wait(struct fs_vision_job *job, struct fs_rows **rows, struct fs_errbuf *e);
/* The same for one of several who wait for the job: it returns FS_ECANCELLED when its own token fires, which
 * leaves the job alone. */
int fs_vision_wait_for(
        struct fs_vision_job *job, struct fs_cancel *cancel, struct fs_rows **rows, struct fs_errbuf *e);
/* Whether it has ended without rows. Never waits. */
bool fs_vision_job_failed(struct fs_vision_job *job);
/* Ends the job when it is still running; never waits. NULL is fine. */
void fs_vision_job_destroy(struct fs_vision_job *job);

/* Wakes hosts that sleep, as a picture would: for owners that want one up before they have a picture. */
void fs_vision_rouse(struct fs_vision *v);
/* Whole seconds after which a picture that was refused may find a host: > 0 while one is waking. */
int fs_vision_retry_after_s(struct fs_vision *v);

/* What went wrong with a host, each counted once. The first is about connections, the last the pictures' own
 * fault, the others encodes that the host lost. */
enum fs_host_error {
	FS_HOST_ERR_CONNECT, /* an attempt to connect that failed */
	FS_HOST_ERR_LOST,    /* the connection ended on the way */
	FS_HOST_ERR_ENCODER, /* its encoder died or could not */
	FS_HOST_ERR_TIMEOUT, /* its encoder took too long */
	FS_HOST_ERR_ROWS,    /* the rows were no good */
	FS_HOST_ERR_PICTURE, /* the encoder refused the picture */
	FS_N_HOST_ERRORS
};
const char *fs_host_error_name(enum fs_host_error err); /* "connect", "lost" … */

/* Where the time of a picture went, from its coming to its rows. */
enum fs_host_time {
	FS_HOST_TIME_QUEUE,    /* it waited, here for its turn and there for the encoder */
	FS_HOST_TIME_TRANSFER, /* it, and then its rows, were on their way */
	FS_HOST_TIME_ENCODE,   /* the encoder worked on it */
	FS_N_HOST_TIMES
};
const char *fs_host_time_name(enum fs_host_time t); /* "queue", "transfer", "encode" */
#define FS_HOST_BUCKETS 17
double fs_host_bucket_bound(size_t i);                /* seconds: 1 ms, doubling, to 65.5 s */
struct fs_host_times {                                /* of pictures that the host encoded */
	uint64_t count, buckets[FS_HOST_BUCKETS + 1]; /* not cumulative; the last one has no bound */
	double sum;                                   /* seconds */
	double mean_ms;                               /* moving; 0 = none yet */
};

enum fs_host_state { FS_HOST_CONNECTING, FS_HOST_STARTING, FS_HOST_UP, FS_HOST_DOWN };
struct fs_host_status {
	char host[128];
	enum fs_host_state state;
	char cause[512]; /* of DOWN */
	char device[64];
	char fingerprint[33];
	int32_t n_embd; /* width of its rows; 0 = not known yet */
	int32_t min_tokens, max_tokens;
	int32_t vram_free_mb, vram_total_mb; /* of its GPU, when the encoder became ready; 0 = not told */
	double rtt_ms;                       /* of the last ping; 0 = unknown */
	uint64_t encodes, bytes_up, bytes_down;
	uint64_t errors; /* encodes that the host lost */
	uint64_t errors_by[FS_N_HOST_ERRORS];
	uint64_t retries;    /* of the lost ones, those that were tried again */
	uint64_t hedged;     /* late pictures of it that were also given to a second host */
	uint64_t hedge_wins; /* pictures that it encoded as the second host, before the first */
	double picture_ms;   /* of an encode, moving mean while it is busy; 0 = unknown */
	double bytes_per_s;  /* of rows on their way here; 0 = unknown */
	struct fs_host_times times[FS_N_HOST_TIMES];
	uint32_t outstanding;
	int64_t since;         /* monotonic ns of the last change of state */
	int64_t benched_until; /* monotonic ns: not asked (UP) or dialled (DOWN) before; 0 = is not benched */
};
/* In the configuration's order. */
size_t fs_vision_status(struct fs_vision *v, struct fs_host_status *out, size_t cap);
const char *fs_host_state_name(enum fs_host_state s);

#endif
