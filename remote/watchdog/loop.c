/*
 * The watchdog's start, its one loop and its end. Signals arrive through a descriptor.
 */
#include "remote/watchdog/state.h"

#include <errno.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <unistd.h>

#define COMMAND_MAX (64 * 1024)

/* ---- start ---- */

static int open_signals(struct fs_wd *wd, struct fs_errbuf *e)
{
	sigset_t set;
	sigemptyset(&set);
	sigaddset(&set, SIGTERM);
	sigaddset(&set, SIGINT);
	sigaddset(&set, SIGHUP);
	sigaddset(&set, SIGCHLD);
	sigprocmask(SIG_BLOCK, &set, NULL);
	signal(SIGPIPE, SIG_IGN);
	wd->signal_fd = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
	return wd->signal_fd < 0 ? fs_fail_errno(e, FS_EIO, "signalfd") : FS_OK;
}

static int load_settings(struct fs_wd *wd, struct fs_errbuf *e)
{
	struct fs_encproc_opts o;
	int rc = fs_wd_config_load(&wd->cfg, wd->config_path, e);
	if (rc)
		return rc;
	fs_log_set_level(wd->cfg.log_level);
	fs_buf_init(&wd->command, COMMAND_MAX);
	fs_buf_init(&wd->files, 1024);
	rc = fs_wd_config_command(&wd->cfg, &wd->command);
	if (rc == FS_OK)
		rc = fs_wd_config_files(&wd->cfg, &wd->files);
	fs_leases_init(&wd->leases, &wd->cfg);
	fs_wd_encoder_opts(&wd->cfg, &o);
	fs_encproc_init(&wd->enc, &o, fs_req_done, wd);
	return rc ? fs_fail(e, rc, "%s: the encoder's arguments are too long", wd->config_path) : FS_OK;
}

static int open_all(struct fs_wd *wd, const char *socket_path, struct fs_errbuf *e)
{
	int rc = fs_place_open(&wd->place, socket_path, e);
	if (rc)
		return rc;
	return wd->cfg.spool[0] ? fs_spool_init_at(&wd->spool, wd->cfg.spool, e)
	                        : fs_spool_init(&wd->spool, e);
}

int fs_wd_init(struct fs_wd *wd, const struct fs_wd_opts *o, struct fs_errbuf *e)
{
	memset(wd, 0, sizeof(*wd));
	wd->place.listen_fd = wd->place.lock_fd = wd->signal_fd = -1;
	wd->spool.lock_fd = wd->spare.lock_fd = wd->notify.fd = -1;
	wd->started = wd->idle_since = wd->binary_at = fs_now();
	wd->updater = (struct fs_child){.in = -1, .out = -1, .err = -1};
	wd->service = o->service;
	if (snprintf(wd->config_path, sizeof(wd->config_path), "%s", o->config_path) >= PATH_MAX)
		return fs_fail(e, FS_EINVAL, "the configuration's path is too long");
	int rc = load_settings(wd, e);
	if (rc)
		return rc;
	rc = open_signals(wd, e);
	if (rc == FS_OK)
		rc = o->resume_fd >= 0 ? fs_wd_resume(wd, o->socket_path, o->resume_fd, e)
		                       : open_all(wd, o->socket_path, e);
	if (rc) {
		fs_wd_finish(wd);
		return rc;
	}
	if (o->resume_fd < 0)
		wd->notify = *o->notify;
	*o->notify = (struct fs_notify){.fd = -1};
	return FS_OK;
}

void fs_wd_finish(struct fs_wd *wd)
{
	fs_place_close_socket(&wd->place);
	fs_encproc_finish(&wd->enc);
	fs_child_end(&wd->updater, 0);
	for (struct fs_conn *c = wd->conns; c; c = c->next)
		fs_conn_lose(c);
	fs_req_done(
	        wd, FS_ECANCELLED, NULL, "the watchdog ends"); /* frees what ran, since nobody waits for it */
	fs_conn_sweep(wd);
	fs_leases_finish(&wd->leases);
	fs_spool_finish(&wd->spool);
	fs_spool_finish(&wd->spare);
	fs_buf_finish(&wd->command);
	fs_buf_finish(&wd->files);
	fs_wd_config_finish(&wd->cfg);
	fs_notify_finish(&wd->notify);
	if (wd->signal_fd >= 0)
		close(wd->signal_fd);
	wd->signal_fd = -1;
	fs_place_finish(&wd->place); /* last: who gets the lock finds nothing of ours */
}

/* ---- the loop ---- */

static void accept_all(struct fs_wd *wd)
{
	for (;;) {
		struct fs_errbuf e = {""};
		int fd = accept4(wd->place.listen_fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
		if (fd < 0)
			return;
		if (fs_conn_accept(wd, fd, &e))
			fs_warn("connection refused: %s", e.text);
		wd->binary_at = FS_MIN(wd->binary_at, fs_now());
	}
}

static void reload(struct fs_wd *wd)
{
	struct fs_errbuf e;
	fs_notify_reloading(&wd->notify);
	if (fs_wd_reload(wd, &e))
		fs_error("the settings stay as they were: %s", e.text);
	fs_notify_send(&wd->notify, "READY=1");
}

static void read_signals(struct fs_wd *wd)
{
	struct signalfd_siginfo si;
	while (read(wd->signal_fd, &si, sizeof(si)) == (ssize_t)sizeof(si)) {
		if (si.ssi_signo == SIGTERM || si.ssi_signo == SIGINT) {
			fs_info("signal %u: ending", si.ssi_signo);
			wd->stopping = true;
		} else if (si.ssi_signo == SIGHUP) {
			reload(wd);
		}
	}
}

static bool ends_when_idle(const struct fs_wd *wd)
{
	return wd->cfg.idle_exit_s && !wd->service;
}

static void prepare(struct fs_wd *wd, struct fs_pollset *ps)
{
	ps->n = 0;
	ps->deadline = FS_NEVER;
	wd->listen_slot = -1;
	if (wd->place.listen_fd >= 0) {
		wd->listen_slot = fs_pollset_add(ps, wd->place.listen_fd, POLLIN);
		fs_pollset_until(ps, wd->place.check_at);
	}
	wd->signal_slot = fs_pollset_add(ps, wd->signal_fd, POLLIN);
	struct pollfd fds[FS_ENCPROC_FDS];
	fs_encproc_prepare(&wd->enc, fds, &ps->deadline);
	for (int i = 0; i < FS_ENCPROC_FDS; i++)
		wd->enc_slots[i] = fs_pollset_add(ps, fds[i].fd, fds[i].events);
	fs_leases_prepare(&wd->leases, ps);
	for (struct fs_conn *c = wd->conns; c; c = c->next)
		fs_conn_prepare(c, ps);
	fs_req_prepare(wd, ps);
	fs_notify_prepare(&wd->notify, ps);
	fs_wd_replace_prepare(wd, ps);
	if (ends_when_idle(wd) && wd->idle_since != FS_NEVER)
		fs_pollset_until(ps, wd->idle_since + wd->cfg.idle_exit_s * FS_SEC);
}

static void dispatch(struct fs_wd *wd, const struct fs_pollset *ps)
{
	if (fs_pollset_got(ps, wd->signal_slot))
		read_signals(wd);
	struct pollfd fds[FS_ENCPROC_FDS];
	for (int i = 0; i < FS_ENCPROC_FDS; i++)
		fds[i].revents = fs_pollset_got(ps, wd->enc_slots[i]);
	fs_req_dispatch(wd, ps); /* before the answer that may follow them */
	fs_encproc_dispatch(&wd->enc, fds);
	for (struct fs_conn *c = wd->conns; c; c = c->next)
		fs_conn_dispatch(c, ps);
	fs_leases_dispatch(&wd->leases, ps);
	if (fs_pollset_got(ps, wd->listen_slot))
		accept_all(wd);
}

/* Connections of servers; an admin's waits for us, not we for it. */
static size_t count_servers(const struct fs_wd *wd)
{
	size_t n = 0;
	for (const struct fs_conn *c = wd->conns; c; c = c->next)
		n += !c->admin;
	return n;
}

static void end_when_idle(struct fs_wd *wd, bool leased)
{
	bool busy = leased || count_servers(wd) || wd->enc.state != FS_ENC_ABSENT;
	if (busy)
		wd->idle_since = FS_NEVER;
	else if (wd->idle_since == FS_NEVER)
		wd->idle_since = fs_now();
	if (busy || wd->stopping)
		return;
	if (wd->retiring) {
		fs_info("nobody is served any more: ending, as was asked");
		wd->stopping = true;
	} else if (ends_when_idle(wd) && fs_now() - wd->idle_since >= wd->cfg.idle_exit_s * FS_SEC) {
		fs_info("nobody was served for %d s: ending", wd->cfg.idle_exit_s);
		wd->stopping = true;
	}
}

/* Another watchdog has our place, so that nobody finds the way to us any more. */
static void keep_place(struct fs_wd *wd)
{
	if (fs_place_check(&wd->place) == FS_EUNAVAILABLE)
		wd->retiring = true;
	if (wd->place.listen_fd < 0 && !wd->stopping)
		fs_leases_end_absent(&wd->leases, "another watchdog has taken our place");
}

/* What follows from the events: who needs the encoder, who is next, who has to know, what is over. */
static void settle(struct fs_wd *wd)
{
	keep_place(wd);
	bool leased = fs_leases_count(&wd->leases) > 0;
	bool keep = wd->cfg.keep_warm && !wd->retiring;
	if (leased || wd->stopping || !keep)
		fs_encproc_want(&wd->enc, leased && !wd->stopping);
	fs_req_schedule(wd);
	fs_session_news(wd);
	fs_conn_sweep(wd);
	fs_leases_sweep(&wd->leases);
	end_when_idle(wd, leased);
	fs_wd_look_for_newer(wd);
	fs_wd_replace_step(wd);
	fs_notify_status(&wd->notify, "encoder %s, %zu server%s", fs_encproc_state_name(&wd->enc),
	        fs_leases_count(&wd->leases), fs_leases_count(&wd->leases) == 1 ? "" : "s");
}

static void say_goodbye(struct fs_wd *wd)
{
	fs_place_close_socket(&wd->place);
	fs_notify_send(&wd->notify, "STOPPING=1");
	for (struct fs_conn *c = wd->conns; c; c = c->next) {
		if (c->phase == FS_CONN_OPEN)
			fs_conn_send(c, FS_FRAME_BYE, 0, NULL, 0);
		if (c->replace)
			fs_conn_lose(c);
		else if (!c->admin)
			fs_conn_close(c);
	}
}

/* Goodbyes are written and the encoder has ended; both have deadlines of their own. */
static bool all_ended(const struct fs_wd *wd)
{
	if (wd->enc.state != FS_ENC_ABSENT)
		return false;
	for (const struct fs_conn *c = wd->conns; c; c = c->next)
		if (c->phase != FS_CONN_DEAD && !(c->admin && c->ctrl.len == 0))
			return false;
	return true;
}

int fs_wd_run(struct fs_wd *wd)
{
	static struct fs_pollset ps;
	bool told = false;
	fs_info("watchdog %s at %s, encoder %s%s", FS_VERSION, wd->place.path, wd->cfg.encoder,
	        wd->cfg.extended ? " (extended)" : "");
	fs_notify_send(&wd->notify, "READY=1");
	for (;;) {
		settle(wd);
		if (wd->stopping && !told) {
			say_goodbye(wd);
			told = true;
			continue;
		}
		if (told && all_ended(wd))
			return FS_OK;
		prepare(wd, &ps);
		if (poll(ps.fds, ps.n, fs_poll_ms(ps.deadline)) < 0) {
			if (errno != EINTR) {
				fs_error("poll: %s", strerror(errno));
				return FS_EIO;
			}
			for (size_t i = 0; i < ps.n; i++)
				ps.fds[i].revents = 0;
		}
		dispatch(wd, &ps);
		fs_notify_dispatch(&wd->notify);
	}
}
