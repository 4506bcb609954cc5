/*
 * The hand-over: the watchdog gets our stdin and stdout and speaks on them itself, so that rows make no
 * detour through this process. What stays here is the process that sshd waits for: it ends when the watchdog
 * lets the channel go, and the watchdog lets it go when we end, by the socket between us.
 */
#include "remote/agent/agent.h"

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#define TAKEN_MS 3000        /* a watchdog's loop never waits for so long */
#define LOOK_AGAIN_MS 1000   /* a HELLO that lies there this much longer is read by nobody */
#define HELLO_MAX_BYTES 8192 /* more than it, and less than pictures, which come after the host's answer */
#define LAST_MS 2000         /* for the watchdog to read what came before the end of our input */

int fs_agent_hand_over(
        int in, int out, int sock, const void *greeting, size_t n, int64_t deadline, struct fs_errbuf *e)
{
	union {
		struct cmsghdr align;
		char bytes[CMSG_SPACE(2 * sizeof(int))];
	} control = {0};
	struct iovec text = {(void *)greeting, n};
	struct msghdr m = {.msg_iov = &text,
	        .msg_iovlen = 1,
	        .msg_control = control.bytes,
	        .msg_controllen = sizeof(control.bytes)};
	struct cmsghdr *c = CMSG_FIRSTHDR(&m);
	c->cmsg_level = SOL_SOCKET;
	c->cmsg_type = SCM_RIGHTS;
	c->cmsg_len = CMSG_LEN(2 * sizeof(int));
	memcpy(CMSG_DATA(c), (int[2]){in, out}, 2 * sizeof(int));
	for (;;) {
		ssize_t w = sendmsg(sock, &m, MSG_NOSIGNAL);
		if (w == (ssize_t)n)
			return FS_OK;
		if (w >= 0)
			return fs_fail(e, FS_EIO, "the watchdog's socket takes no whole greeting");
		if (errno != EINTR && errno != EAGAIN)
			return fs_fail_errno(e, FS_EUNAVAILABLE, "the watchdog does not take the channel");
		struct pollfd p = {.fd = sock, .events = POLLOUT};
		if (errno == EAGAIN && poll(&p, 1, fs_poll_ms(deadline)) == 0)
			return fs_fail(e, FS_ETIMEOUT, "the watchdog does not take the channel in time");
	}
}

/* Something came from the watchdog within the time: its word, or its end, which fs_agent_attend finds. */
static bool is_heard(int sock, int timeout_ms)
{
	int64_t until = fs_deadline_ms(timeout_ms);
	struct pollfd p = {.fd = sock, .events = POLLIN};
	int n;
	while ((n = poll(&p, 1, fs_poll_ms(until))) < 0 && errno == EINTR)
		;
	return n != 0;
}

static int unread(int in)
{
	int n = 0;
	return ioctl(in, FIONREAD, &n) == 0 ? n : 0;
}

int fs_agent_confirm(int in, int sock, struct fs_errbuf *e)
{
	if (is_heard(sock, TAKEN_MS))
		return FS_OK;
	int before = unread(in);
	if (before == 0 || before > HELLO_MAX_BYTES || is_heard(sock, LOOK_AGAIN_MS) || unread(in) < before)
		return FS_OK;
	return fs_fail(e, FS_EUNAVAILABLE,
	        "the watchdog that runs on this vision host does not take the channel: it hangs, or it is "
	        "older "
	        "than this agent (%s); type there: farsight-watchdog stop",
	        FS_VERSION);
}

static bool hung_up(int fd, int timeout_ms)
{
	struct pollfd p = {.fd = fd, .events = POLLRDHUP};
	return poll(&p, 1, timeout_ms) > 0;
}

enum fs_agent_end fs_agent_attend(int in, int sock)
{
	int64_t until = FS_NEVER; /* once our input has ended */
	char sink[64];
	for (;;) {
		struct pollfd p[2] = {{.fd = sock, .events = POLLIN},
		        {.fd = until == FS_NEVER ? in : -1, .events = POLLRDHUP}};
		int n = poll(p, 2, fs_poll_ms(until));
		if (n == 0)
			return FS_AGENT_PEER_GONE;
		if (n < 0)
			continue; /* a signal that did not end us */
		if (p[1].revents)
			until = fs_deadline_ms(LAST_MS);
		if (p[0].revents && read(sock, sink, sizeof(sink)) <= 0)
			return until != FS_NEVER || hung_up(in, 0) ? FS_AGENT_PEER_GONE
			                                           : FS_AGENT_WATCHDOG_GONE;
	}
}
