/*
 * The watchdog's start, its one loop and its end. Enforces one watchdog a socket by a lock beside it. Signals
 * arrive through a descriptor. Listens on nothing but the unix socket.
 */
#include "remote/watchdog/state.h"

#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

/* ---- start ---- */

static int take_lock(struct fs_wd *wd, struct fs_errbuf *e)
{
	char path[FS_WD_PATH_MAX + 8];
	snprintf(path, sizeof(path), "%s.lock", wd->socket_path);
	wd->lock_fd = open(path, O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0600);
	if (wd->lock_fd < 0)
		return fs_fail_errno(e, FS_EIO, "can not open %s", path);
	if (flock(wd->lock_fd, LOCK_EX | LOCK_NB))
		return errno == EWOULDBLOCK
		               ? fs_fail(e, FS_EUNAVAILABLE, "a watchdog already runs at %s", wd->socket_path)
		               : fs_fail_errno(e, FS_EIO, "can not lock %s", path);
	return FS_OK;
}

/* With the lock held, a socket that is there is a dead watchdog's. */
static int open_socket(struct fs_wd *wd, struct fs_errbuf *e)
{
	struct sockaddr_un a = {.sun_family = AF_UNIX};
	memcpy(a.sun_path, wd->socket_path, strlen(wd->socket_path));
	unlink(wd->socket_path);
	wd->listen_fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	mode_t mask = umask(077);
	int rc = wd->listen_fd < 0 || bind(wd->listen_fd, (struct sockaddr *)&a, sizeof(a)) ||
	         listen(wd->listen_fd, 16);
	umask(mask);
	return rc ? fs_fail_errno(e, FS_EIO, "can not listen at %s", wd->socket_path) : FS_OK;
}

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

/* The card is chosen by the environment that CUDA reads, so that any encoder obeys it. */
static void choose_gpu(int32_t device)
{
	char number[16];
	if (device < 0)
		return;
	snprintf(number, sizeof(number), "%d", device);
	setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID", 1);
	setenv("CUDA_VISIBLE_DEVICES", number, 1);
}

static void init_encoder(struct fs_wd *wd)
{
	const struct fs_wd_config *c = &wd->cfg;
	struct fs_encproc_opts o = {.program = c->encoder,
	        .mmproj = c->mmproj,
	        .model = c->model,
	        .args = c->encoder_args,
	        .gpu = c->gpu,
	        .extended = c->extended > 0,
	        .threads = c->threads,
	        .min_tokens = c->min_tokens,
	        .max_tokens = c->max_tokens,
	        .ready_timeout_s = c->ready_timeout_s,
	        .encode_timeout_s = c->encode_timeout_s,
	        .cancel_kill_s = c->cancel_kill_s,
	        .stop_grace_ms = c->stop_grace_ms,
	        .idle_s = c->encoder_idle_s};
	fs_encproc_init(&wd->enc, &o, fs_req_done, wd);
}

int fs_wd_init(struct fs_wd *wd, const char *socket_path, const char *config_path, struct fs_errbuf *e)
{
	memset(wd, 0, sizeof(*wd));
	wd->listen_fd = wd->lock_fd = wd->signal_fd = wd->spool.lock_fd = -1;
	wd->started = wd->idle_since = fs_now();
	int rc = fs_wd_config_load(&wd->cfg, config_path, e);
	if (rc)
		return rc;
	fs_log_set_level(wd->cfg.log_level);
	fs_leases_init(&wd->leases, &wd->cfg);
	init_encoder(wd);
	choose_gpu(wd->cfg.gpu_device);
	FS_ASSERT(strlen(socket_path) < sizeof(wd->socket_path));
	rc = fs_wd_prepare_folder(socket_path, e);
	if (rc == FS_OK) {
		memcpy(wd->socket_path, socket_path, strlen(socket_path) + 1);
		rc = take_lock(wd, e);
	}
	if (rc == FS_OK)
		rc = open_signals(wd, e);
	if (rc == FS_OK)
		rc = fs_spool_init(&wd->spool, e);
	if (rc == FS_OK)
		rc = open_socket(wd, e);
	if (rc)
		fs_wd_finish(wd);
	return rc;
}

static void close_socket(struct fs_wd *wd)
{
	if (wd->listen_fd < 0)
		return;
	unlink(wd->socket_path);
	close(wd->listen_fd);
	wd->listen_fd = -1;
}

void fs_wd_finish(struct fs_wd *wd)
{
	close_socket(wd);
	fs_encproc_finish(&wd->enc);
	for (struct fs_conn *c = wd->conns; c; c = c->next)
		fs_conn_lose(c);
	fs_req_done(
	        wd, FS_ECANCELLED, NULL, "the watchdog ends"); /* frees what ran, since nobody waits for it */
	fs_conn_sweep(wd);
	fs_leases_finish(&wd->leases);
	fs_spool_finish(&wd->spool);
	fs_wd_config_finish(&wd->cfg);
	if (wd->signal_fd >= 0)
		close(wd->signal_fd);
	if (wd->lock_fd >= 0)
		close(wd->lock_fd); /* last: who gets the lock finds nothing of ours */
	wd->signal_fd = wd->lock_fd = -1;
}

/* ---- status ---- */

static json_t *lease_json(const struct fs_leases *ls, const struct fs_lease *l)
{
	return json_pack("{s:s, s:s, s:i, s:i, s:b, s:b, s:i, s:I}", "lease", l->id, "peer", l->peer, "port",
	        l->port, "channels", l->channels, "live", fs_lease_live(ls, l), "port_answered", l->answered,
	        "probe_fails", l->fails, "pictures", (json_int_t)l->requests);
}

int fs_wd_status(struct fs_wd *wd, struct fs_buf *out)
{
	const struct fs_encproc *p = &wd->enc;
	json_t *leases = json_array();
	for (const struct fs_lease *l = wd->leases.head; l; l = l->next)
		if (!l->over)
			json_array_append_new(leases, lease_json(&wd->leases, l));
	json_t *encoder = json_pack("{s:s, s:s, s:i, s:I, s:i, s:s, s:s, s:s, s:i}", "state",
	        fs_encproc_state_name(p), "program", wd->cfg.encoder, "pid", (int)p->child.pid, "starts",
	        (json_int_t)p->starts, "failures", p->failures, "cause", p->cause, "device", p->facts.device,
	        "fingerprint", p->facts.fingerprint, "n_embd", p->facts.n_embd);
	json_t *j = json_pack("{s:s, s:i, s:I, s:b, s:s, s:i, s:i, s:I, s:I, s:o, s:o}", "version",
	        FS_VERSION, "pid", (int)getpid(), "uptime_s", (json_int_t)((fs_now() - wd->started) / FS_SEC),
	        "stopping", wd->stopping, "spool", wd->spool.folder, "connections", (int)wd->n_conns,
	        "pictures", (int)wd->n_reqs, "encodes", (json_int_t)wd->encodes, "errors",
	        (json_int_t)wd->errors, "encoder", encoder, "leases", leases);
	char *text = j ? json_dumps(j, JSON_COMPACT) : NULL;
	int rc = text ? fs_buf_printf(out, "%s\n", text) : FS_ENOMEM;
	free(text);
	json_decref(j);
	return rc;
}

/* ---- the loop ---- */

static void accept_all(struct fs_wd *wd)
{
	for (;;) {
		struct fs_errbuf e = {""};
		int fd = accept4(wd->listen_fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
		if (fd < 0)
			return;
		if (fs_conn_accept(wd, fd, &e))
			fs_warn("connection refused: %s", e.text);
	}
}

static void read_signals(struct fs_wd *wd)
{
	struct signalfd_siginfo si;
	while (read(wd->signal_fd, &si, sizeof(si)) == (ssize_t)sizeof(si)) {
		if (si.ssi_signo == SIGTERM || si.ssi_signo == SIGINT) {
			fs_info("signal %u: ending", si.ssi_signo);
			wd->stopping = true;
		}
	}
}

static void prepare(struct fs_wd *wd, struct fs_pollset *ps)
{
	ps->n = 0;
	ps->deadline = FS_NEVER;
	wd->listen_slot = wd->listen_fd >= 0 ? fs_pollset_add(ps, wd->listen_fd, POLLIN) : -1;
	wd->signal_slot = fs_pollset_add(ps, wd->signal_fd, POLLIN);
	struct pollfd fds[FS_ENCPROC_FDS];
	fs_encproc_prepare(&wd->enc, fds, &ps->deadline);
	for (int i = 0; i < FS_ENCPROC_FDS; i++)
		wd->enc_slots[i] = fs_pollset_add(ps, fds[i].fd, fds[i].events);
	fs_leases_prepare(&wd->leases, ps);
	for (struct fs_conn *c = wd->conns; c; c = c->next)
		fs_conn_prepare(c, ps);
	fs_req_prepare(wd, ps);
	if (wd->cfg.idle_exit_s && wd->idle_since != FS_NEVER)
		fs_pollset_until(ps, wd->idle_since + wd->cfg.idle_exit_s * FS_SEC);
}

static void dispatch(struct fs_wd *wd, const struct fs_pollset *ps)
{
	if (fs_pollset_got(ps, wd->signal_slot))
		read_signals(wd);
	struct pollfd fds[FS_ENCPROC_FDS];
	for (int i = 0; i < FS_ENCPROC_FDS; i++)
		fds[i].revents = fs_pollset_got(ps, wd->enc_slots[i]);
	fs_encproc_dispatch(&wd->enc, fds);
	for (struct fs_conn *c = wd->conns; c; c = c->next)
		fs_conn_dispatch(c, ps);
	fs_leases_dispatch(&wd->leases, ps);
	if (fs_pollset_got(ps, wd->listen_slot))
		accept_all(wd);
}

/* What follows from the events: who needs the encoder, who is next, who has to know, what is over. */
static void settle(struct fs_wd *wd)
{
	bool leased = fs_leases_count(&wd->leases) > 0;
	if (leased || wd->stopping || !wd->cfg.keep_warm)
		fs_encproc_want(&wd->enc, leased && !wd->stopping);
	fs_req_schedule(wd);
	fs_session_news(wd);
	fs_conn_sweep(wd);
	fs_leases_sweep(&wd->leases);
	bool busy = leased || wd->n_conns || wd->enc.state != FS_ENC_ABSENT;
	if (busy)
		wd->idle_since = FS_NEVER;
	else if (wd->idle_since == FS_NEVER)
		wd->idle_since = fs_now();
	else if (wd->cfg.idle_exit_s && fs_now() - wd->idle_since >= wd->cfg.idle_exit_s * FS_SEC) {
		fs_info("nobody was served for %d s: ending", wd->cfg.idle_exit_s);
		wd->stopping = true;
	}
}

static void say_goodbye(struct fs_wd *wd)
{
	close_socket(wd);
	for (struct fs_conn *c = wd->conns; c; c = c->next) {
		if (c->phase == FS_CONN_OPEN)
			fs_conn_send(c, FS_FRAME_BYE, 0, NULL, 0);
		if (!c->admin)
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
	fs_info("watchdog %s at %s, encoder %s%s", FS_VERSION, wd->socket_path, wd->cfg.encoder,
	        wd->cfg.extended ? " (extended)" : "");
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
	}
}
