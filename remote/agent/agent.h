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

enum fs_relay_end {
	FS_RELAY_PEER_GONE,     /* our input ended or our output broke: the ssh channel is closed */
	FS_RELAY_WATCHDOG_GONE, /* the socket ended */
};
/* Copies in -> sock and sock -> out until one side ends; what is in the rings then is still written, for at
 * most 2 s. All three are set non-blocking. first: bytes for the socket that go before everything (the
 * greeting). */
int fs_agent_relay(
        int in, int out, int sock, const void *first, size_t n, enum fs_relay_end *end, struct fs_errbuf *e);

#endif
