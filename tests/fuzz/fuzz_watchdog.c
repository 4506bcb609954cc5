/*
 * Fuzz target: the agent's side of a connection to the watchdog, greeting and frames, in pieces; the first
 * byte is their size. An encoder is played: it answers each order at once, rightly or with an error by turns.
 * What comes back must be whole frames (or, to an admin, one line), pictures must be gone when the connection
 * is.
 */
#include "remote/watchdog/state.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

#define EMBD 4

static struct fs_wd wd;

static void remove_spool(void)
{
	fs_spool_finish(&wd.spool);
}

static void set_up(void)
{
	static bool done;
	struct fs_encproc_opts o;

	if (done)
		return;
	done = true;
	fs_log_set_level(FS_LOG_ERROR);
	wd.cfg = (struct fs_wd_config){.encoder = "/nonexistent",
	        .silence_s = 30,
	        .lease_grace_s = 30,
	        .probe_fails = 3,
	        .probe_interval_s = 10,
	        .max_queue = 4,
	        .extended = 1};
	FS_ASSERT(fs_spool_init(&wd.spool, NULL) == FS_OK);
	atexit(remove_spool);
	wd.spare.lock_fd = -1;
	fs_wd_encoder_opts(&wd.cfg, &o);
	fs_encproc_init(&wd.enc, &o, fs_req_done, &wd);
	fs_leases_init(&wd.leases, &wd.cfg);
	fs_encproc_want(&wd.enc, false);
}

/* Its state without the process. */
static void encoder_is_ready(void)
{
	wd.enc.state = FS_ENC_READY;
	wd.enc.wanted = true;
	wd.enc.have_facts = true;
	wd.enc.facts.n_embd = EMBD;
	fs_buf_clear(&wd.enc.out);
}

static void encoder_answers(void)
{
	static const float rows[2 * EMBD] = {1, 2, 3};
	static const uint16_t halves[2 * EMBD] = {0x3c00};
	struct fs_reply reply = {.kind = FS_REPLY_OK, .shape = {2, 2, 1, 0}, .ms = 1};
	struct fs_req *r = wd.running;

	if (!r)
		return;
	encoder_is_ready();
	if (r->id % 3 == 0)
		fs_req_done(&wd, FS_EINVAL, NULL, "no picture");
	else if (r->id % 3 == 1 && r->f16_file)
		FS_ASSERT(fs_rows_write_file_f16(
		                  r->rows, &(struct fs_rows_shape){2, 2, 1, EMBD}, halves, NULL) == FS_OK);
	else
		FS_ASSERT(fs_rows_write_file(r->rows, &(struct fs_rows_shape){2, 2, 1, EMBD}, rows, NULL) ==
		          FS_OK);
	if (wd.running)
		fs_req_done(&wd, FS_OK, &reply, "");
}

static void one_round(void)
{
	static struct fs_pollset ps;

	ps.n = 0;
	ps.deadline = FS_NEVER;
	for (struct fs_conn *c = wd.conns; c; c = c->next)
		fs_conn_prepare(c, &ps);
	FS_ASSERT(poll(ps.fds, ps.n, 0) >= 0);
	for (struct fs_conn *c = wd.conns; c; c = c->next)
		fs_conn_dispatch(c, &ps);
	fs_req_schedule(&wd);
	encoder_answers();
	fs_session_news(&wd);
	fs_conn_sweep(&wd);
	fs_leases_sweep(&wd.leases);
}

static void hear(int fd, struct fs_buf *heard)
{
	uint8_t bytes[65536];
	ssize_t n;

	while ((n = recv(fd, bytes, sizeof(bytes), MSG_DONTWAIT)) > 0)
		FS_ASSERT(fs_buf_append(heard, bytes, (size_t)n) == FS_OK);
}

static void check_heard(const struct fs_buf *heard)
{
	struct fs_frame f;
	size_t at = 0, used;
	bool line = heard->len > 0 && heard->data[0] == '{';
	bool refused = heard->len > 9 && memcmp(heard->data, "FARSIGHT ", 9) == 0;

	if (line || refused) {
		FS_ASSERT(heard->data[heard->len - 1] == '\n');
		return;
	}
	for (; at < heard->len; at += used) {
		FS_ASSERT(fs_frame_parse(heard->data + at, heard->len - at, &f, &used, NULL) == FS_OK);
		FS_ASSERT(f.type != FS_FRAME_ENC && f.type != FS_FRAME_CANCEL);
	}
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
	struct fs_buf heard;
	int fds[2];

	if (n < 2)
		return 0;
	set_up();
	encoder_is_ready();
	wd.stopping = wd.retiring = false;
	fs_buf_init(&heard, 64 << 20);
	size_t piece = data[0] % 16 ? (size_t)data[0] * data[0] : n;
	FS_ASSERT(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fds) == 0);
	FS_ASSERT(fs_conn_accept(&wd, fds[0], NULL) == FS_OK);
	for (size_t at = 1; at < n && wd.conns;) {
		ssize_t sent = send(fds[1], data + at, FS_MIN(piece, n - at), MSG_NOSIGNAL | MSG_DONTWAIT);
		FS_ASSERT(
		        sent > 0 || (sent < 0 && (errno == EAGAIN || errno == EPIPE || errno == ECONNRESET)));
		at += sent > 0 ? (size_t)sent : 0;
		one_round();
		hear(fds[1], &heard);
	}
	one_round();
	hear(fds[1], &heard);
	check_heard(&heard);
	if (wd.conns)
		fs_conn_lose(wd.conns);
	fs_conn_sweep(&wd);
	FS_ASSERT(!wd.conns && wd.n_conns == 0 && wd.n_reqs == 0 && wd.spooled == 0 && !wd.reqs);
	fs_leases_finish(&wd.leases);
	fs_leases_init(&wd.leases, &wd.cfg);
	close(fds[1]);
	fs_buf_finish(&heard);
	return 0;
}
