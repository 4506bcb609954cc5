/*
 * Another program for this process. It is executed in place: the process keeps its number, its children, its
 * lock and its descriptors, and what it knew goes along in a memory file. So a newer watchdog takes over a
 * warm encoder, its leases and even the open channels of servers, and there are never two encoders for one
 * card. Loop thread.
 *
 * The exec waits for a moment when nothing is on its way. A host that never has one begins no further picture
 * after PRESS_S; then the channels that still bring something are dropped, and their servers come again.
 */
#include "remote/watchdog/state.h"

#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define PRESS_S 30
#define LOOK_MS 60000
#define SETTLED_S 2 /* a file that was changed this lately may still be written */
#define STATE_MAX (256 * 1024)

/* ---- what goes along ---- */

/* Every descriptor that the next program needs. */
static void keep_all(const struct fs_wd *wd, bool keep)
{
	const struct fs_child *k = &wd->enc.child;
	const int own[] = {wd->place.listen_fd, wd->place.lock_fd, wd->spool.lock_fd, wd->spare.lock_fd,
	        k->in, k->out, k->err};
	for (size_t i = 0; i < FS_ARRAY_LEN(own); i++)
		if (own[i] >= 0)
			fcntl(own[i], F_SETFD, keep ? 0 : FD_CLOEXEC);
	for (const struct fs_conn *c = wd->conns; c; c = c->next) {
		if (c->phase == FS_CONN_DEAD)
			continue;
		fcntl(c->fd, F_SETFD, keep ? 0 : FD_CLOEXEC);
		fcntl(c->from, F_SETFD, keep ? 0 : FD_CLOEXEC);
		fcntl(c->to, F_SETFD, keep ? 0 : FD_CLOEXEC);
	}
}

static json_t *save_spool(const struct fs_spool *s)
{
	return json_pack(
	        "{s:s, s:i, s:I}", "folder", s->folder, "lock_fd", s->lock_fd, "next", (json_int_t)s->next);
}

static json_t *save_encoder(const struct fs_wd *wd)
{
	const struct fs_encproc *p = &wd->enc;
	const struct fs_ready *f = &p->facts;
	bool there = p->state == FS_ENC_READY;
	return json_pack(
	        "{s:b, s:b, s:i, s:i, s:i, s:i, s:I, s:i, s:s, s:s, s:i, s:i, s:i, s:i, s:b, s:s, s:s}",
	        "there", there, "asleep", p->asleep, "pid", there ? (int)p->child.pid : 0, "in", p->child.in,
	        "out", p->child.out, "err", p->child.err, "starts", (json_int_t)p->starts, "n_embd",
	        f->n_embd, "fingerprint", f->fingerprint, "device", f->device, "min_tokens", f->min_tokens,
	        "max_tokens", f->max_tokens, "vram_free_mb", f->vram_free_mb, "vram_total_mb",
	        f->vram_total_mb, "pipe", f->pipe, "command", (const char *)wd->command.data, "files",
	        (const char *)wd->files.data);
}

static json_t *save_lease(const struct fs_lease *l)
{
	return json_pack("{s:s, s:s, s:i, s:i, s:I, s:I, s:I, s:b, s:b, s:i, s:I}", "id", l->id, "peer",
	        l->peer, "port", l->port, "max_fails", l->max_fails, "interval", (json_int_t)l->interval,
	        "last_sign", (json_int_t)l->last_sign, "opened", (json_int_t)l->opened, "answered",
	        l->answered, "reported", l->reported, "fails", l->fails, "turn", (json_int_t)l->turn);
}

/* The lease by its place in the list; -1 for the connection that asked. */
static json_t *save_conn(const struct fs_wd *wd, const struct fs_conn *c)
{
	int place = 0;
	for (const struct fs_lease *l = wd->leases.head; l && l != c->lease; l = l->next)
		place += !l->over;
	return json_pack("{s:i, s:i, s:i, s:i, s:s, s:i, s:s}", "fd", c->fd, "from", c->from, "to", c->to,
	        "lease", c->lease ? place : -1, "peer", c->peer, "number", c->number, "told", c->told);
}

static json_t *save(const struct fs_wd *wd)
{
	json_t *leases = json_array(), *conns = json_array();
	for (const struct fs_lease *l = wd->leases.head; l; l = l->next)
		if (!l->over)
			json_array_append_new(leases, save_lease(l));
	for (const struct fs_conn *c = wd->conns; c; c = c->next)
		if (c->replace || c->phase == FS_CONN_OPEN)
			json_array_append_new(conns, save_conn(wd, c));
	return json_pack(
	        "{s:i, s:i, s:b, s:i, s:i, s:o, s:o, s:s, s:I, s:I, s:I, s:I, s:I, s:I, s:o, s:o, s:o}",
	        "format", FS_WD_STATE_FORMAT, "updater", (int)wd->updater.pid, "retiring", wd->retiring,
	        "listen_fd", wd->place.listen_fd, "lock_fd", wd->place.lock_fd, "spool",
	        save_spool(&wd->spool), "spare", save_spool(&wd->spare), "notify", wd->notify.path,
	        "notify_every", (json_int_t)wd->notify.every, "order", (json_int_t)wd->order, "turn",
	        (json_int_t)wd->turn, "encodes", (json_int_t)wd->encodes, "errors", (json_int_t)wd->errors,
	        "started", (json_int_t)wd->started, "encoder", save_encoder(wd), "leases", leases, "conns",
	        conns);
}

/* A memory file with the state, which outlives the exec; negative when there is none. */
static int save_to_file(const struct fs_wd *wd)
{
	json_t *j = save(wd);
	int fd = j ? memfd_create("farsight-watchdog", 0) : -1;
	if (fd >= 0 && (json_dumpfd(j, fd, JSON_COMPACT) || lseek(fd, 0, SEEK_SET))) {
		close(fd);
		fd = -1;
	}
	json_decref(j);
	return fd;
}

/* ---- the exec ---- */

static struct fs_conn *asker(const struct fs_wd *wd)
{
	struct fs_conn *c = wd->conns;
	while (c && !(c->replace && c->phase == FS_CONN_CLOSING))
		c = c->next;
	return c;
}

int fs_wd_replace_ask(struct fs_wd *wd, struct fs_conn *c, struct fs_errbuf *e)
{
	static struct fs_wd_config checked;
	if (wd->stopping)
		return fs_fail(e, FS_EUNAVAILABLE, "this watchdog is ending");
	if (c->program < 0)
		return fs_fail(e, FS_EINVAL, "no program came with the request");
	int rc = fs_wd_config_load(&checked, wd->config_path, e);
	if (rc)
		return rc; /* the next program would not start */
	fs_wd_config_finish(&checked);
	if (!asker(wd)) /* several may ask; the last one's program it will be, and all are told */
		wd->replace_asked = fs_now();
	c->replace = true;
	fs_info("another program asks to take over");
	return FS_OK;
}

bool fs_wd_replace_presses(const struct fs_wd *wd)
{
	return asker(wd) && fs_now() - wd->replace_asked >= PRESS_S * FS_SEC;
}

void fs_wd_replace_prepare(const struct fs_wd *wd, struct fs_pollset *ps)
{
	if (asker(wd) && !fs_wd_replace_presses(wd))
		fs_pollset_until(ps, wd->replace_asked + PRESS_S * FS_SEC);
	if (wd->updater.pid <= 0 && !wd->stopping) /* else nobody looks */
		fs_pollset_until(ps, wd->binary_at);
}

static bool encoder_rests(const struct fs_encproc *p)
{
	if (p->renew || p->in.len || p->out.len)
		return false;
	return p->state == FS_ENC_READY || p->state == FS_ENC_ABSENT || p->state == FS_ENC_BACKOFF;
}

/* With a pressing asker the channels that keep us waiting go. */
static bool may_exec(struct fs_wd *wd)
{
	bool quiet = wd->n_reqs == 0, presses = fs_wd_replace_presses(wd);
	if (!encoder_rests(&wd->enc) || wd->running)
		return false;
	for (struct fs_conn *c = wd->conns; c; c = c->next) {
		bool waits_for_us = c->replace || (c->admin && c->ctrl.len == 0);
		quiet &= waits_for_us || c->phase == FS_CONN_DEAD || fs_conn_quiet(c);
	}
	if (quiet || !presses)
		return quiet;
	for (struct fs_conn *c = wd->conns; c; c = c->next) {
		bool waits = c->lease && c->lease->requests > 0;
		if (!c->replace && (waits || !fs_conn_quiet(c)))
			fs_conn_lose(c);
	}
	return wd->n_reqs == 0;
}

void fs_wd_replace_step(struct fs_wd *wd)
{
	struct fs_conn *c = asker(wd);
	char number[16];
	if (!c || wd->stopping || !may_exec(wd))
		return;
	int fd = save_to_file(wd);
	if (fd >= 0) {
		snprintf(number, sizeof(number), "%d", fd);
		const char *argv[] = {"farsight-watchdog", "--socket", wd->place.path, "--config",
		        wd->config_path, "--resume-fd", number, wd->service ? "--service" : NULL, NULL};
		fs_info("the other program takes over");
		keep_all(wd, true);
		execveat(c->program, "", (char *const *)argv, environ, AT_EMPTY_PATH);
		keep_all(wd, false);
		close(fd);
	}
	fs_error("the other program can not be executed: %s", strerror(errno));
	c->replace = false;
	fs_conn_lose(c);
}

/* ---- what came along ---- */

static int64_t number(const json_t *j, const char *name)
{
	return json_integer_value(json_object_get(j, name));
}

static const char *text(const json_t *j, const char *name)
{
	const char *s = json_string_value(json_object_get(j, name));
	return s ? s : "";
}

/* A descriptor of ours again, or -1. */
static int descriptor(const json_t *j, const char *name)
{
	const json_t *v = json_object_get(j, name);
	int fd = v ? (int)json_integer_value(v) : -1;
	return fd >= 0 && fcntl(fd, F_SETFD, FD_CLOEXEC) == 0 ? fd : -1;
}

static void load_spool(struct fs_spool *s, const json_t *j)
{
	snprintf(s->folder, sizeof(s->folder), "%s", text(j, "folder"));
	s->lock_fd = descriptor(j, "lock_fd");
	s->next = (uint64_t)number(j, "next");
}

static void load_encoder(struct fs_wd *wd, const json_t *j)
{
	struct fs_child c = {.pid = (pid_t)number(j, "pid"), .in = -1, .out = -1, .err = -1};
	struct fs_ready f = {.n_embd = (int32_t)number(j, "n_embd"),
	        .min_tokens = (int32_t)number(j, "min_tokens"),
	        .max_tokens = (int32_t)number(j, "max_tokens"),
	        .vram_free_mb = (int32_t)number(j, "vram_free_mb"),
	        .vram_total_mb = (int32_t)number(j, "vram_total_mb"),
	        .pipe = json_is_true(json_object_get(j, "pipe"))};
	snprintf(f.fingerprint, sizeof(f.fingerprint), "%s", text(j, "fingerprint"));
	snprintf(f.device, sizeof(f.device), "%s", text(j, "device"));
	if (json_is_true(json_object_get(j, "there"))) {
		c.in = descriptor(j, "in");
		c.out = descriptor(j, "out");
		c.err = descriptor(j, "err");
	} else if (!json_is_true(json_object_get(j, "asleep"))) {
		return;
	}
	fs_encproc_adopt(&wd->enc, &c, &f, (uint64_t)number(j, "starts"));
	/* Its files may be newer by now: that alone ends no warm encoder. Another command does. */
	if (strcmp(text(j, "command"), (const char *)wd->command.data)) {
		struct fs_encproc_opts o;
		fs_wd_encoder_opts(&wd->cfg, &o);
		fs_encproc_renew(&wd->enc, &o);
		return;
	}
	fs_buf_clear(&wd->files);
	fs_buf_append_str(&wd->files, text(j, "files"));
}

static int load_leases(struct fs_wd *wd, const json_t *list, struct fs_errbuf *e)
{
	for (size_t i = json_array_size(list); i-- > 0;) { /* each goes to the front */
		const json_t *j = json_array_get(list, i);
		struct fs_lease l = {.port = (int32_t)number(j, "port"),
		        .max_fails = (int32_t)number(j, "max_fails"),
		        .interval = number(j, "interval"),
		        .last_sign = number(j, "last_sign"),
		        .opened = number(j, "opened"), /* 0 from programs that did not know it */
		        .answered = json_is_true(json_object_get(j, "answered")),
		        .reported = json_is_true(json_object_get(j, "reported")),
		        .fails = (int)number(j, "fails"),
		        .turn = (uint64_t)number(j, "turn")};
		snprintf(l.id, sizeof(l.id), "%s", text(j, "id"));
		snprintf(l.peer, sizeof(l.peer), "%s", text(j, "peer"));
		int rc = fs_lease_resume(&wd->leases, &l, e);
		if (rc)
			return rc;
	}
	return FS_OK;
}

static int load_conns(struct fs_wd *wd, const json_t *list, struct fs_errbuf *e)
{
	for (size_t i = json_array_size(list); i-- > 0;) {
		const json_t *j = json_array_get(list, i);
		struct fs_lease *l = wd->leases.head;
		struct fs_conn *c;
		int64_t place = number(j, "lease");
		int fd = descriptor(j, "fd"), from = descriptor(j, "from"), to = descriptor(j, "to");
		for (int64_t k = 0; k < place && l; k++)
			l = l->next;
		if (fd < 0 || fs_conn_resume(wd, fd, from, to, place < 0 ? NULL : l, &c))
			return fs_fail(e, FS_EFORMAT, "a connection does not fit");
		snprintf(c->peer, sizeof(c->peer), "%s", text(j, "peer"));
		snprintf(c->told, sizeof(c->told), "%s", text(j, "told"));
		c->number = (int32_t)number(j, "number");
		c->told_start = wd->enc.starts;
	}
	return FS_OK;
}

static int load(struct fs_wd *wd, const char *socket_path, const json_t *j, struct fs_errbuf *e)
{
	if (number(j, "format") != FS_WD_STATE_FORMAT)
		return fs_fail(e, FS_EFORMAT, "it has format %d, not %d", (int)number(j, "format"),
		        FS_WD_STATE_FORMAT);
	fs_place_resume(&wd->place, socket_path, descriptor(j, "listen_fd"), descriptor(j, "lock_fd"));
	fs_notify_resume(&wd->notify, text(j, "notify"), number(j, "notify_every"));
	load_spool(&wd->spool, json_object_get(j, "spool"));
	load_spool(&wd->spare, json_object_get(j, "spare"));
	wd->order = (uint64_t)number(j, "order");
	wd->turn = (uint64_t)number(j, "turn");
	wd->encodes = (uint64_t)number(j, "encodes");
	wd->errors = (uint64_t)number(j, "errors");
	wd->started = number(j, "started");
	wd->retiring = json_is_true(json_object_get(j, "retiring"));
	wd->updater = (struct fs_child){.pid = (pid_t)number(j, "updater"), .in = -1, .out = -1, .err = -1};
	load_encoder(wd, json_object_get(j, "encoder"));
	int rc = load_leases(wd, json_object_get(j, "leases"), e);
	return rc ? rc : load_conns(wd, json_object_get(j, "conns"), e);
}

int fs_wd_resume(struct fs_wd *wd, const char *socket_path, int fd, struct fs_errbuf *e)
{
	json_error_t je;
	json_t *j = json_loadfd(fd, 0, &je);
	close(fd);
	if (!j)
		return fs_fail(
		        e, FS_EFORMAT, "the state of the earlier program can not be read: %s", je.text);
	int rc = load(wd, socket_path, j, e);
	json_decref(j);
	return rc ? fs_fail_prefix(e, rc, "the state of the earlier program can not be taken over") : FS_OK;
}

/* ---- a newer file where our program was ---- */

static bool own_path(char *out, size_t cap)
{
	static const char gone[] = " (deleted)";
	ssize_t n = readlink("/proc/self/exe", out, cap - 1);
	if (n <= 0)
		return false;
	out[n] = 0;
	size_t m = sizeof(gone) - 1;
	if ((size_t)n > m && !strcmp(out + n - m, gone))
		out[(size_t)n - m] = 0;
	return true;
}

static bool same_file(const struct stat *a, const struct stat *b)
{
	return a->st_dev == b->st_dev && a->st_ino == b->st_ino && a->st_mtim.tv_sec == b->st_mtim.tv_sec &&
	       a->st_mtim.tv_nsec == b->st_mtim.tv_nsec;
}

static void reap_updater(struct fs_wd *wd)
{
	int status;
	if (wd->updater.pid <= 0 || !fs_child_reap(&wd->updater, &status))
		return;
	fs_child_end(&wd->updater, 0);
	if (status)
		fs_warn("the newer program did not take over");
}

void fs_wd_look_for_newer(struct fs_wd *wd)
{
	char path[4096];
	struct stat there;
	struct fs_errbuf e;
	reap_updater(wd);
	if (fs_now() < wd->binary_at || wd->stopping || wd->updater.pid > 0)
		return;
	wd->binary_at = fs_deadline_ms(LOOK_MS);
	if (wd->binary.st_ino == 0 && stat("/proc/self/exe", &wd->binary))
		return;
	if (!own_path(path, sizeof(path)) || stat(path, &there) || same_file(&there, &wd->binary))
		return;
	struct timespec now;
	clock_gettime(CLOCK_REALTIME, &now);
	int64_t age = now.tv_sec - there.st_ctim.tv_sec;
	if (age >= 0 && age < SETTLED_S) {
		wd->binary_at = fs_deadline_ms(SETTLED_S * 1000);
		return;
	}
	wd->binary = there;
	const char *argv[] = {path, "--socket", wd->place.path, "replace", NULL};
	fs_info("another program lies at %s", path);
	if (fs_child_start(&wd->updater, argv, NULL, false, false, &e))
		fs_warn("it does not start: %s", e.text);
}
