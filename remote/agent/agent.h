/* The agent's parts; private to remote/agent. One thread. */
#ifndef FS_REMOTE_AGENT_H
#define FS_REMOTE_AGENT_H

#include "remote/watchdog/watchdog.h"

struct fs_agent_opts {
	const char *socket_path; /* of the watchdog */
	const char *
	        watchdog; /* program; NULL = $FARSIGHT_WATCHDOG, else farsight-watchdog beside this program */
	const char *config; /* passed on to a watchdog that is started; NULL = its default */
};

/* A connected socket, after starting a watchdog when none runs. Returns by the deadline (monotonic ns). */
int fs_agent_connect(const struct fs_agent_opts *o, int64_t deadline, int *fd, struct fs_errbuf *e);

/*
 * Sends the greeting (at most FS_WD_GREETING_MAX bytes) and with it our ends of the channel; from then on
 * only the watchdog may read in and write out. It makes both non-blocking.
 */
int fs_agent_hand_over(
        int in, int out, int sock, const void *greeting, size_t n, int64_t deadline, struct fs_errbuf *e);

/*
 * Waits until the watchdog says that it has taken them. One from before it said so is known by its reading
 * what the server sends. FS_EUNAVAILABLE: nobody reads that, so the watchdog hangs, or is so old that it
 * knows no hand-over; the server is to be told instead of waiting.
 */
int fs_agent_confirm(int in, int sock, struct fs_errbuf *e);

enum fs_agent_end {
	FS_AGENT_PEER_GONE,     /* our input ended: the ssh channel is closed */
	FS_AGENT_WATCHDOG_GONE, /* the socket ended first */
};
/* Waits for the end of the channel, without a deadline; when the input ends, for at most 2 s more. */
enum fs_agent_end fs_agent_attend(int in, int sock);

#endif
