/*
 * One connection from an agent: bytes in, frames out, both bounded. Loop thread. An agent may hand over the
 * ends of its channel with its greeting; its socket then only tells that it lives. Control frames go before
 * DATA; a DATA frame is made only when the one before it is written, so a slow server holds no rows in memory
 * and a CANCEL or PING waits behind one chunk at most. Refuses malformed frames by ending this connection
 * only.
 */
#include "remote/watchdog/state.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define CTRL_MAX (256 * 1024)
#define CTRL_BUSY (64 * 1024)   /* with so much to write, nothing more is read */
#define ROUND_MAX (1024 * 1024) /* bytes read or written in one round of the loop */
#define GREETING_MS 10000
#define HELLO_MS 30000
#define CLOSING_MS 2000

static bool has_output(const struct fs_conn *c)
{
	return c->ctrl.len > 0 || c->chunk_off < c->chunk_len;
}

/* Takes fd, also when it fails. */
static int add_conn(struct fs_wd *wd, int fd, struct fs_conn **out, struct fs_errbuf *e)
{
	int rc = FS_ENOMEM;
	struct fs_conn *c = NULL;
	if (wd->n_conns >= FS_WD_CONNS_MAX)
		rc = fs_fail(e, FS_ELIMIT, "more than %d connections", FS_WD_CONNS_MAX);
	else
		c = calloc(1, sizeof(*c));
	if (c)
		c->chunk = malloc(FS_FRAME_HEADER + FS_FRAME_CHUNK);
	if (!c || !c->chunk) {
		free(c);
		close(fd);
		return rc;
	}
	fs_buf_init(&c->in, FS_FRAME_MAX + FS_FRAME_HEADER);
	fs_buf_init(&c->ctrl, CTRL_MAX);
	c->wd = wd;
	c->fd = c->from = c->to = fd;
	c->slot = c->from_slot = c->to_slot = c->program = -1;
	c->deadline = fs_deadline_ms(GREETING_MS);
	c->ping_at = FS_NEVER;
	c->next = wd->conns;
	wd->conns = c;
	wd->n_conns++;
	*out = c;
	return FS_OK;
}

int fs_conn_accept(struct fs_wd *wd, int fd, struct fs_errbuf *e)
{
	struct ucred peer;
	socklen_t n = sizeof(peer);
	struct fs_conn *c;
	if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &n) || (peer.uid != getuid() && peer.uid != 0)) {
		close(fd);
		return fs_fail(e, FS_EAUTH, "a connection of another user");
	}
	return add_conn(wd, fd, &c, e);
}

int fs_conn_resume(struct fs_wd *wd, int fd, int from, int to, struct fs_lease *lease, struct fs_conn **out)
{
	int rc = add_conn(wd, fd, out, NULL);
	if (rc)
		return rc;
	struct fs_conn *c = *out;
	if (from >= 0 && to >= 0) {
		c->from = from;
		c->to = to;
	}
	if (lease) {
		c->phase = FS_CONN_OPEN;
		c->lease = lease;
		c->last_frame = fs_now();
		c->ping_at = c->last_frame + wd->cfg.silence_s * FS_SEC / 3;
		lease->channels++;
		return FS_OK;
	}
	rc = fs_wd_status(wd, &c->ctrl);
	fs_conn_close(c);
	return rc;
}

bool fs_conn_quiet(const struct fs_conn *c)
{
	return c->phase == FS_CONN_OPEN && !c->overflow && !c->lease->over && c->in.len == 0 &&
	       !has_output(c);
}

static bool handed_over(const struct fs_conn *c)
{
	return c->from != c->fd;
}

/* Back to the socket alone. */
static void close_ends(struct fs_conn *c)
{
	if (handed_over(c)) {
		close(c->from);
		close(c->to);
	}
	c->from = c->to = c->fd;
}

/* The connection and all that hangs on it; the struct itself goes with the sweep. */
void fs_conn_lose(struct fs_conn *c)
{
	if (c->phase == FS_CONN_DEAD)
		return;
	c->phase = FS_CONN_DEAD;
	fs_req_drop_all(c);
	if (c->lease)
		fs_lease_close(c->lease);
	c->lease = NULL;
	close_ends(c);
	close(c->fd);
	if (c->program >= 0)
		close(c->program);
	c->fd = c->from = c->to = c->program = -1;
}

void fs_conn_sweep(struct fs_wd *wd)
{
	for (struct fs_conn **at = &wd->conns; *at;) {
		struct fs_conn *c = *at;
		if (c->phase != FS_CONN_DEAD) {
			at = &c->next;
			continue;
		}
		*at = c->next;
		wd->n_conns--;
		fs_buf_finish(&c->in);
		fs_buf_finish(&c->ctrl);
		free(c->chunk);
		free(c);
	}
}

void fs_conn_close(struct fs_conn *c)
{
	if (c->phase >= FS_CONN_CLOSING)
		return;
	c->phase = FS_CONN_CLOSING;
	c->deadline = fs_deadline_ms(CLOSING_MS);
	fs_req_drop_all(c);
	if (c->lease)
		fs_lease_close(c->lease);
	c->lease = NULL;
}

void fs_conn_refuse(struct fs_conn *c, int err, const char *text)
{
	if (c->phase >= FS_CONN_CLOSING)
		return;
	fs_warn("connection: %s", text);
	fs_conn_send_err(c, 0, err, text);
	fs_conn_close(c);
}

static bool may_send(const struct fs_conn *c)
{
	return c->phase < FS_CONN_CLOSING && !c->overflow;
}

/* rc: of the frame that was to be queued. */
static void note_queued(struct fs_conn *c, int rc)
{
	if (!rc)
		return;
	fs_warn("connection: the server does not read; ended");
	c->overflow = true; /* lost in the next round: callers may be walking its requests */
}

void fs_conn_send(struct fs_conn *c, uint8_t type, uint32_t id, const void *payload, size_t n)
{
	if (may_send(c))
		note_queued(c, fs_frame_append(&c->ctrl, type, id, payload, n));
}

void fs_conn_send_err(struct fs_conn *c, uint32_t id, int err, const char *text)
{
	if (may_send(c))
		note_queued(c, fs_frame_append_err(&c->ctrl, id, err, text));
}

/* ---- out ---- */

/* > 0: bytes written; 0: the socket is full; negative: it is broken. */
static ssize_t write_some(struct fs_conn *c, const uint8_t *data, size_t n)
{
	ssize_t w;
	do
		w = write(c->to, data, n); /* SIGPIPE is ignored */
	while (w < 0 && errno == EINTR);
	if (w < 0)
		return errno == EAGAIN || errno == EWOULDBLOCK ? 0 : -1;
	return w;
}

/* A chunk that was begun is ended before anything else, since frames can not be mixed. */
static void write_out(struct fs_conn *c)
{
	for (size_t total = 0; total < ROUND_MAX;) {
		ssize_t w;
		if (!has_output(c) && (c->phase != FS_CONN_OPEN || !fs_req_next_chunk(c)))
			return;
		if (c->chunk_off < c->chunk_len) {
			w = write_some(c, c->chunk + c->chunk_off, c->chunk_len - c->chunk_off);
			c->chunk_off += w > 0 ? (size_t)w : 0;
		} else {
			w = write_some(c, c->ctrl.data, c->ctrl.len);
			fs_buf_consume(&c->ctrl, w > 0 ? (size_t)w : 0);
		}
		if (w < 0)
			fs_conn_lose(c);
		if (w <= 0)
			return;
		total += (size_t)w;
	}
}

/* ---- in ---- */

static int unblock(int fd)
{
	int flags = fcntl(fd, F_GETFL);
	return flags < 0 ? -1 : fcntl(fd, F_SETFL, flags | O_NONBLOCK);
}

/* Two descriptors are the ends of a channel, a single one is a program; any other number is nobody's. */
static void take_descriptors(struct fs_conn *c, const int *fds, size_t n)
{
	if (n == 2 && !handed_over(c) && !unblock(fds[0]) && !unblock(fds[1])) {
		c->from = fds[0];
		c->to = fds[1];
		return;
	}
	if (n == 1 && c->program < 0) {
		c->program = fds[0];
		return;
	}
	for (size_t i = 0; i < n; i++)
		close(fds[i]);
}

/* As recv, with the descriptors that may come with a greeting. */
static ssize_t recv_greeting(struct fs_conn *c, uint8_t *data, size_t n)
{
	union {
		struct cmsghdr align;
		char bytes[CMSG_SPACE(4 * sizeof(int))];
	} control;
	struct iovec v = {data, n};
	struct msghdr m = {.msg_iov = &v,
	        .msg_iovlen = 1,
	        .msg_control = control.bytes,
	        .msg_controllen = sizeof(control.bytes)};
	ssize_t got = recvmsg(c->fd, &m, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
	for (struct cmsghdr *h = got < 0 ? NULL : CMSG_FIRSTHDR(&m); h; h = CMSG_NXTHDR(&m, h)) {
		int fds[4];
		size_t bytes = FS_MIN(h->cmsg_len - CMSG_LEN(0), sizeof(fds));
		if (h->cmsg_level != SOL_SOCKET || h->cmsg_type != SCM_RIGHTS)
			continue;
		memcpy(fds, CMSG_DATA(h), bytes);
		take_descriptors(c, fds, bytes / sizeof(int));
	}
	return got;
}

static void close_program(struct fs_conn *c)
{
	if (c->program >= 0)
		close(c->program);
	c->program = -1;
}

/* An admin's: all are answered by the status, a replacement by that of the program that took over. */
static void take_order(struct fs_conn *c, enum fs_wd_purpose purpose)
{
	struct fs_wd *wd = c->wd;
	struct fs_errbuf e = {"its status can not be told"};
	c->admin = purpose == FS_WD_STOP || purpose == FS_WD_RETIRE;
	wd->stopping |= purpose == FS_WD_STOP;
	wd->retiring |= purpose == FS_WD_RETIRE;
	bool may_refuse = purpose == FS_WD_REPLACE || purpose == FS_WD_RELOAD;
	int rc = purpose == FS_WD_RELOAD ? fs_wd_reload(wd, &e) : FS_OK;
	if (!rc)
		rc = purpose == FS_WD_REPLACE ? fs_wd_replace_ask(wd, c, &e) : fs_wd_status(wd, &c->ctrl);
	if (rc && may_refuse)
		fs_buf_printf(&c->ctrl, "FARSIGHT refused: %s\n", e.text);
	else if (rc)
		fs_conn_lose(c);
	fs_conn_close(c);
}

static void take_greeting(struct fs_conn *c)
{
	struct fs_wd_greeting g;
	struct fs_errbuf e;
	uint8_t *end = c->in.len ? memchr(c->in.data, '\n', c->in.len) : NULL;
	if (!end && c->in.len < FS_WD_GREETING_MAX)
		return;
	size_t n = end ? (size_t)(end - c->in.data) : c->in.len;
	int rc = fs_wd_greeting_parse((const char *)c->in.data, n, &g, &e);
	if (rc) {
		fs_conn_refuse(c, rc, e.text);
		return;
	}
	fs_buf_consume(&c->in, n + 1);
	memcpy(c->peer, g.peer, sizeof(c->peer));
	if (g.purpose != FS_WD_REPLACE)
		close_program(c);
	if (g.purpose == FS_WD_CHANNEL) {
		if (handed_over(c) &&
		        send(c->fd, FS_WD_TAKEN, strlen(FS_WD_TAKEN), MSG_DONTWAIT | MSG_NOSIGNAL) < 0)
			fs_debug("connection: its agent does not hear that it was taken");
		c->phase = FS_CONN_HELLO;
		c->deadline = fs_deadline_ms(HELLO_MS);
		return;
	}
	close_ends(c);
	take_order(c, g.purpose);
}

static void take_frames(struct fs_conn *c)
{
	size_t off = 0;
	while ((c->phase == FS_CONN_HELLO || c->phase == FS_CONN_OPEN) && c->ctrl.len < CTRL_BUSY &&
	        off < c->in.len) {
		struct fs_frame f;
		struct fs_errbuf e;
		size_t used;
		int rc = fs_frame_parse(c->in.data + off, c->in.len - off, &f, &used, &e);
		if (rc == FS_ENOTFOUND)
			break;
		if (rc == FS_OK)
			rc = fs_session_frame(c, &f, &e);
		if (rc) {
			fs_conn_refuse(c, rc, e.text);
			break;
		}
		off += used;
	}
	if (off)
		fs_buf_consume(&c->in, FS_MIN(off, c->in.len));
}

static void read_in(struct fs_conn *c)
{
	for (size_t total = 0; total < ROUND_MAX && c->phase < FS_CONN_CLOSING;) {
		size_t room = c->in.max - c->in.len;
		if (room == 0 || c->ctrl.len >= CTRL_BUSY)
			return;
		if (fs_buf_reserve(&c->in, FS_MIN(room, c->phase == FS_CONN_GREETING ? 4096 : room)))
			return;
		uint8_t *to = c->in.data + c->in.len;
		room = FS_MIN(room, c->in.cap - c->in.len - 1);
		ssize_t n =
		        c->phase == FS_CONN_GREETING ? recv_greeting(c, to, room) : read(c->from, to, room);
		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
			return;
		if (n <= 0) {
			fs_conn_lose(c);
			return;
		}
		c->in.len += (size_t)n;
		total += (size_t)n;
		if (c->phase == FS_CONN_GREETING)
			take_greeting(c);
		take_frames(c);
	}
}

/* ---- the loop ---- */

/* Kept open, without a deadline, since its end tells that something has come to pass. */
static bool is_held(const struct fs_conn *c)
{
	const struct fs_wd *wd = c->wd;
	if (c->phase != FS_CONN_CLOSING)
		return false;
	bool ending = c->leaving && !wd->cfg.keep_warm && wd->enc.state != FS_ENC_ABSENT &&
	              fs_leases_count(&wd->leases) == 0;
	return c->admin || c->replace || ending;
}

void fs_conn_prepare(struct fs_conn *c, struct fs_pollset *ps)
{
	c->slot = c->from_slot = c->to_slot = -1;
	if (c->phase == FS_CONN_DEAD)
		return;
	if (c->phase == FS_CONN_OPEN && !has_output(c) && fs_req_next_chunk(c))
		fs_debug("connection: rows begin to flow");
	short in = c->phase < FS_CONN_CLOSING && c->ctrl.len < CTRL_BUSY ? POLLIN : 0;
	short out = has_output(c) ? POLLOUT : 0;
	if (!handed_over(c)) {
		c->slot = c->from_slot = c->to_slot = fs_pollset_add(ps, c->fd, in | out);
	} else {
		c->slot = fs_pollset_add(ps, c->fd, POLLIN);
		c->from_slot = in ? fs_pollset_add(ps, c->from, in)
		                  : -1; /* a hang-up would be told again and again */
		c->to_slot = out ? fs_pollset_add(ps, c->to, out) : -1;
	}
	if (!is_held(c))
		fs_pollset_until(ps, c->phase == FS_CONN_OPEN ? c->ping_at : c->deadline);
}

/* A server that is silent is asked whether it lives; its PONG is the frame that keeps the lease. */
static void ping_when_silent(struct fs_conn *c)
{
	static const uint8_t payload[8] = "silence";
	if (c->phase != FS_CONN_OPEN || fs_now() < c->ping_at)
		return;
	fs_conn_send(c, FS_FRAME_PING, 0, payload, sizeof(payload));
	c->ping_at = fs_now() + c->wd->cfg.silence_s * FS_SEC / 3;
}

static void expire(struct fs_conn *c)
{
	if (c->phase == FS_CONN_DEAD || c->phase == FS_CONN_OPEN)
		return;
	bool written = c->phase == FS_CONN_CLOSING && !has_output(c);
	bool late = fs_now() >= c->deadline;
	if (c->phase < FS_CONN_CLOSING && late)
		fs_conn_refuse(c, FS_ETIMEOUT, "no greeting or HELLO came in time");
	else if ((written || late) && !is_held(c))
		fs_conn_lose(c);
}

void fs_conn_dispatch(struct fs_conn *c, const struct fs_pollset *ps)
{
	const short end = POLLHUP | POLLERR;
	short from = fs_pollset_got(ps, c->from_slot), to = fs_pollset_got(ps, c->to_slot);
	/* An agent says no more than its greeting; before the end of its socket, what its server said last is
	 * read. */
	bool gone = handed_over(c) ? fs_pollset_got(ps, c->slot) != 0
	                           : c->phase == FS_CONN_CLOSING && (fs_pollset_got(ps, c->slot) & end);
	if (c->overflow)
		fs_conn_lose(c);
	if (c->phase != FS_CONN_DEAD && (to & (POLLOUT | (handed_over(c) ? end : 0)))) {
		write_out(c);
		take_frames(c);
	}
	if (c->phase < FS_CONN_CLOSING && (from & (POLLIN | end)))
		read_in(c);
	if (gone)
		fs_conn_lose(c);
	if (c->lease && c->lease->over && c->phase == FS_CONN_OPEN)
		fs_conn_refuse(c, FS_EUNAVAILABLE, "the lease has ended");
	ping_when_silent(c);
	expire(c);
}
