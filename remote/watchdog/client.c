/* What farsight-watchdog's commands ask of the one that runs; see client.h. */
#include "remote/watchdog/client.h"
#include "remote/watchdog/state.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <jansson.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <unistd.h>

#define STATUS_MS 5000
#define STOP_MS 150000 /* twice the longest stop_grace_ms */
#define REPLACE_MS 600000
#define ANSWER_MAX (1024 * 1024)

static int complain(const char *text)
{
	fprintf(stderr, "farsight-watchdog: %s\n", text);
	return 1;
}

/* The greeting, with a descriptor when there is one. */
static int greet(int fd, enum fs_wd_purpose purpose, int program, struct fs_errbuf *e)
{
	struct fs_wd_greeting g = {.purpose = purpose};
	char line[FS_WD_GREETING_MAX];
	union {
		struct cmsghdr align;
		char bytes[CMSG_SPACE(sizeof(int))];
	} control = {0};
	struct iovec v = {line, fs_wd_greeting_format(&g, line)};
	struct msghdr m = {.msg_iov = &v, .msg_iovlen = 1};
	if (program >= 0) {
		m.msg_control = control.bytes;
		m.msg_controllen = sizeof(control.bytes);
		struct cmsghdr *c = CMSG_FIRSTHDR(&m);
		c->cmsg_level = SOL_SOCKET;
		c->cmsg_type = SCM_RIGHTS;
		c->cmsg_len = CMSG_LEN(sizeof(int));
		memcpy(CMSG_DATA(c), &program, sizeof(int));
	}
	return sendmsg(fd, &m, MSG_NOSIGNAL) == (ssize_t)v.iov_len
	               ? FS_OK
	               : fs_fail(e, FS_EUNAVAILABLE, "the watchdog does not listen");
}

/* All that comes until the watchdog closes; first_line: until the end of that. */
static int read_answer(int fd, bool first_line, int64_t until, struct fs_buf *out, struct fs_errbuf *e)
{
	char bytes[4096];
	for (;;) {
		struct pollfd p = {.fd = fd, .events = POLLIN};
		int got = poll(&p, 1, fs_poll_ms(until));
		if (got < 0 && errno == EINTR)
			continue;
		if (got <= 0)
			return fs_fail(e, FS_ETIMEOUT, "the watchdog does not answer in time");
		ssize_t r = read(fd, bytes, sizeof(bytes));
		if (r < 0 && (errno == EAGAIN || errno == EINTR))
			continue;
		if (r <= 0)
			return out->len ? FS_OK : fs_fail(e, FS_EUNAVAILABLE, "the watchdog gave no answer");
		if (fs_buf_append(out, bytes, (size_t)r))
			return fs_fail(e, FS_ELIMIT, "the watchdog's answer is too long");
		if (first_line && memchr(bytes, '\n', (size_t)r))
			return FS_OK;
	}
}

/* *fd, when asked for, stays open behind the first line. */
static int ask(const char *socket_path, enum fs_wd_purpose purpose, int program, int timeout_ms, int *keep,
        struct fs_buf *out, struct fs_errbuf *e)
{
	int fd, rc = fs_wd_connect(socket_path, &fd, e);
	if (rc)
		return rc;
	fs_buf_init(out, ANSWER_MAX);
	rc = greet(fd, purpose, program, e);
	if (rc == FS_OK)
		rc = read_answer(fd, keep != NULL, fs_deadline_ms(timeout_ms), out, e);
	if (rc || !keep)
		close(fd);
	else
		*keep = fd;
	if (rc)
		fs_buf_finish(out);
	return rc;
}

/* ---- status and stop ---- */

static const char *text(const json_t *j, const char *name)
{
	const char *s = json_string_value(json_object_get(j, name));
	return s ? s : "";
}

static int64_t number(const json_t *j, const char *name)
{
	return json_integer_value(json_object_get(j, name));
}

static bool yes(const json_t *j, const char *name)
{
	return json_is_true(json_object_get(j, name));
}

static void print_time(int64_t s)
{
	if (s >= 86400)
		printf("%" PRId64 " d %" PRId64 " h", s / 86400, s / 3600 % 24);
	else if (s >= 3600)
		printf("%" PRId64 " h %" PRId64 " min", s / 3600, s / 60 % 60);
	else
		printf("%" PRId64 " min %" PRId64 " s", s / 60, s % 60);
}

static void print_lease(const json_t *l)
{
	const char *peer = text(l, "peer"), *port = yes(l, "port_answered") ? "answers" : "has not answered";
	printf("  %s: %" PRId64 " channel%s%s, %" PRId64 " pictures", *peer ? peer : "unknown address",
	        number(l, "channels"), number(l, "channels") == 1 ? "" : "s",
	        yes(l, "live") ? "" : " (silent)", number(l, "pictures"));
	if (number(l, "port") == 0)
		printf(", no port to probe\n");
	else if (number(l, "probe_fails"))
		printf(", port %" PRId64 " failed the last %" PRId64 " probes\n", number(l, "port"),
		        number(l, "probe_fails"));
	else
		printf(", port %" PRId64 " %s\n", number(l, "port"), port);
}

static void print_status(const json_t *j)
{
	const json_t *enc = json_object_get(j, "encoder"), *leases = json_object_get(j, "leases"), *l;
	size_t i;
	printf("farsight-watchdog %s, process %" PRId64 "%s, up ", text(j, "version"), number(j, "pid"),
	        yes(j, "service") ? " (a service)" : "");
	print_time(number(j, "uptime_s"));
	printf("%s\n", yes(j, "stopping")   ? ", ending"
	               : yes(j, "retiring") ? ", ends when it serves nobody"
	                                    : "");
	printf("settings: %s\n", text(j, "config"));
	printf("encoder: %s", text(enc, "state"));
	if (number(enc, "pid"))
		printf(", process %" PRId64, number(enc, "pid"));
	if (*text(enc, "device"))
		printf(", on %s", text(enc, "device"));
	printf(", started %" PRId64 " times\n", number(enc, "starts"));
	printf("  %s\n  %s\n", text(enc, "program"), text(enc, "mmproj"));
	if (*text(enc, "cause"))
		printf("  last failure: %s\n", text(enc, "cause"));
	printf("pictures: %" PRId64 " here, %" PRId64 " encoded, %" PRId64 " failed\n", number(j, "pictures"),
	        number(j, "encodes"), number(j, "errors"));
	printf("servers: %zu\n", json_array_size(leases));
	json_array_foreach(leases, i, l) print_lease(l);
}

static int print_answer(struct fs_buf *answer, bool json)
{
	json_error_t je;
	json_t *j = json ? NULL : json_loadb((char *)answer->data, answer->len, 0, &je);
	if (j)
		print_status(j);
	else
		fwrite(answer->data, 1, answer->len, stdout);
	json_decref(j);
	fs_buf_finish(answer);
	return 0;
}

int fs_wd_client_status(const char *socket_path, bool json)
{
	struct fs_errbuf e;
	struct fs_buf answer;
	if (ask(socket_path, FS_WD_STATUS, -1, STATUS_MS, NULL, &answer, &e))
		return complain(e.text);
	return print_answer(&answer, json);
}

int fs_wd_client_stop(const char *socket_path)
{
	struct fs_errbuf e;
	struct fs_buf answer;
	if (ask(socket_path, FS_WD_STOP, -1, STOP_MS, NULL, &answer, &e))
		return complain(e.text);
	return print_answer(&answer, true);
}

/* ---- replace ---- */

static int query(const char *socket_path, json_t **out, struct fs_errbuf *e)
{
	json_error_t je;
	struct fs_buf answer;
	int rc = ask(socket_path, FS_WD_STATUS, -1, STATUS_MS, NULL, &answer, e);
	if (rc)
		return rc;
	*out = json_loadb((char *)answer.data, answer.len, 0, &je);
	fs_buf_finish(&answer);
	return *out ? FS_OK : fs_fail(e, FS_EFORMAT, "the watchdog's status is no JSON");
}

/* It knows nothing of a hand-over that we could take. */
static int retire(const char *socket_path, const char *version)
{
	struct fs_errbuf e;
	struct fs_buf answer;
	int fd;
	if (ask(socket_path, FS_WD_RETIRE, -1, STATUS_MS, &fd, &answer, &e))
		return complain(e.text);
	close(fd);
	fs_buf_finish(&answer);
	printf("farsight-watchdog %s can not hand over to %s: it ends as soon as it serves nobody\n", version,
	        FS_VERSION);
	return 0;
}

int fs_wd_client_replace(const char *socket_path)
{
	struct fs_errbuf e;
	struct fs_buf answer;
	json_t *old, *fresh;
	json_error_t je;
	signal(SIGPIPE, SIG_IGN); /* the watchdog that started us for itself does not read what we say */
	int rc = query(socket_path, &old, &e);
	if (rc == FS_EUNAVAILABLE) {
		printf("no watchdog runs at %s: nothing to replace\n", socket_path);
		return 0;
	}
	if (rc)
		return complain(e.text);
	if (number(old, "state_format") != FS_WD_STATE_FORMAT) {
		rc = retire(socket_path, text(old, "version"));
		json_decref(old);
		return rc;
	}
	int program = open("/proc/self/exe", O_RDONLY | O_CLOEXEC);
	rc = program < 0 ? fs_fail_errno(&e, FS_EIO, "can not open this program")
	                 : ask(socket_path, FS_WD_REPLACE, program, REPLACE_MS, NULL, &answer, &e);
	if (program >= 0)
		close(program);
	fresh = rc ? NULL : json_loadb((char *)answer.data, answer.len, 0, &je);
	if (fresh)
		printf("farsight-watchdog %s took over from %s in process %" PRId64 "\n",
		        text(fresh, "version"), text(old, "version"), number(fresh, "pid"));
	else
		complain(rc ? e.text : (char *)answer.data);
	if (!rc)
		fs_buf_finish(&answer);
	rc = fresh ? 0 : 1;
	json_decref(fresh);
	json_decref(old);
	return rc;
}

/* ---- reload ---- */

int fs_wd_client_reload(const char *socket_path)
{
	static const char refused[] = "FARSIGHT refused: ";
	struct fs_errbuf e;
	struct fs_buf answer;
	json_error_t je;
	int rc = ask(socket_path, FS_WD_RELOAD, -1, STATUS_MS, NULL, &answer, &e);
	if (rc == FS_EUNAVAILABLE) {
		printf("no watchdog runs at %s: the next one reads them at its start\n", socket_path);
		return 0;
	}
	if (rc)
		return complain(e.text);
	json_t *status = json_loadb((char *)answer.data, answer.len, 0, &je);
	char *line = (char *)answer.data;
	line[strcspn(line, "\n")] = 0;
	if (status)
		printf("farsight-watchdog %s has read %s again\n", text(status, "version"),
		        text(status, "config"));
	else if (!strncmp(line, refused, sizeof(refused) - 1))
		fs_fail(&e, FS_EINVAL, "the settings stay as they were: %s", line + sizeof(refused) - 1);
	else
		fs_fail(&e, FS_ENOTSUP,
		        "the watchdog that runs does not know this command; SIGHUP does the same");
	rc = status ? 0 : complain(e.text);
	json_decref(status);
	fs_buf_finish(&answer);
	return rc;
}

/* ---- waiting for the place ---- */

static int wait_for_end(int sock, int signals, struct fs_notify *n, struct fs_errbuf *e)
{
	static struct fs_pollset ps;
	char sink[256];
	for (;;) {
		ps.n = 0;
		ps.deadline = FS_NEVER;
		int s = fs_pollset_add(&ps, sock, POLLIN), sig = fs_pollset_add(&ps, signals, POLLIN);
		fs_notify_prepare(n, &ps);
		if (poll(ps.fds, ps.n, fs_poll_ms(ps.deadline)) < 0)
			continue;
		fs_notify_dispatch(n);
		if (fs_pollset_got(&ps, sig))
			return fs_fail(e, FS_ECANCELLED, "ended while waiting for the other watchdog");
		if (fs_pollset_got(&ps, s) && read(sock, sink, sizeof(sink)) == 0)
			return FS_OK;
	}
}

int fs_wd_client_await_place(const char *socket_path, struct fs_notify *n, struct fs_errbuf *e)
{
	struct fs_buf answer;
	sigset_t set;
	int sock, rc = ask(socket_path, FS_WD_RETIRE, -1, STATUS_MS, &sock, &answer, e);
	if (rc)
		return rc == FS_EUNAVAILABLE ? FS_OK : rc;
	fs_buf_finish(&answer);
	fs_info("another watchdog serves at %s: waiting until it serves nobody", socket_path);
	fs_notify_send(n, "READY=1");
	fs_notify_status(n, "waiting for the end of the watchdog that an agent started");
	sigemptyset(&set);
	sigaddset(&set, SIGTERM);
	sigaddset(&set, SIGINT);
	sigprocmask(SIG_BLOCK, &set, NULL);
	int signals = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
	rc = signals < 0 ? fs_fail_errno(e, FS_EIO, "signalfd") : wait_for_end(sock, signals, n, e);
	if (signals >= 0)
		close(signals);
	close(sock);
	return rc;
}
