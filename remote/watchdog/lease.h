/*
 * Leases: who needs the encoder. A lease is one server process, named by the random id of its HELLO; it
 * outlives the server's channels, so that a reconnect finds a warm encoder. One thread, never blocks.
 *
 * Signs of life: frames on a channel, or the server's own port answering a TCP connect at the address that
 * the ssh session came from. Failed probes count only without a live channel and only once the port has
 * answered; a server whose port is not known, or never answered, has a grace without a live channel instead.
 * When another server has come from the same address with the same port, that one answers the probes: the
 * older lease then has nothing but its channels, and ends without a live one at once.
 */
#ifndef FS_WATCHDOG_LEASE_H
#define FS_WATCHDOG_LEASE_H

#include "common/wire/wire.h"
#include "remote/watchdog/config.h"
#include "remote/watchdog/pollset.h"

#define FS_LEASES_MAX 32

struct fs_lease {
	struct fs_lease *next;
	char id[65];   /* "" = of one connection that named none, and gone with it */
	char peer[80]; /* numeric; "" = unknown */
	int32_t port;  /* 0 = no probes */
	int32_t max_fails;
	int64_t interval;  /* ns from probe to probe */
	int channels;      /* open now */
	int64_t opened;    /* when its last HELLO came */
	int64_t last_sign; /* the last frame, or the loss of the last channel */
	bool answered;     /* the port has, once */
	bool reported;     /* that it never did */
	int fails;         /* in a row */
	uint64_t probes;
	int probe_fd; /* a connect under way; -1 = none */
	int slot;
	int64_t probe_at; /* the next start, or the present one's deadline */
	uint64_t turn;    /* when its last picture was encoded; the smallest is served next */
	size_t requests;  /* that it has here */
	bool over;        /* ended; freed by the sweep once no connection points to it */
};

struct fs_leases {
	const struct fs_wd_config *cfg;
	struct fs_lease *head;
	size_t n;
};

void fs_leases_init(struct fs_leases *l, const struct fs_wd_config *cfg);
void fs_leases_finish(struct fs_leases *l);
/* Takes up the lease of this HELLO or makes one, and adds a channel to it. FS_EINVAL, FS_ELIMIT. */
int fs_lease_open(struct fs_leases *l, const struct fs_hello *h, const char *peer, struct fs_lease **out,
        struct fs_errbuf *e);
/* One that an earlier program of this process had (its facts alone), without channels. */
int fs_lease_resume(struct fs_leases *l, const struct fs_lease *was, struct fs_errbuf *e);
void fs_lease_frame(struct fs_lease *l); /* a frame came */
void fs_lease_close(struct fs_lease *l); /* one of its channels is gone */
void fs_lease_end(struct fs_lease *l, const char *why);
bool fs_lease_live(const struct fs_leases *ls, const struct fs_lease *l); /* a channel with recent frames */
/* Ends those without a channel: nobody finds the way back to us. */
void fs_leases_end_absent(struct fs_leases *l, const char *why);
/* Leases that are not over. */
size_t fs_leases_count(const struct fs_leases *l);
/* Frees those that are over and have no channel. */
void fs_leases_sweep(struct fs_leases *l);

void fs_leases_prepare(struct fs_leases *l, struct fs_pollset *ps);
void fs_leases_dispatch(struct fs_leases *l, const struct fs_pollset *ps);

#endif
