/*
 * Reaching the watchdog, and starting it when none runs: detached by a double fork into a session of its own,
 * so that it outlives this ssh session. Its start is reported over a pipe: "ok", "busy" (another one holds
 * the lock) or the reason why not, a failed exec included.
 */
#include "remote/agent/agent.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define READY_FD 3
#define RETRY_MS 20
#define LOG_MAX (1024 * 1024)

static int find_watchdog(const struct fs_agent_opts *o, char *out, size_t cap, struct fs_errbuf *e)
{
	const char *named = o->watchdog ? o->watchdog : getenv("FARSIGHT_WATCHDOG");
	if (named && *named) {
		int n = snprintf(out, cap, "%s", named);
		return (size_t)n < cap ? FS_OK : fs_fail(e, FS_EINVAL, "the watchdog's path is too long");
	}
	return fs_wd_find_program("farsight-watchdog", "watchdog", out, cap, e);
}

/* watchdog.log beside the socket; one older file is kept. */
static int open_log(const char *socket_path)
{
	char path[FS_WD_PATH_MAX + 16], old[FS_WD_PATH_MAX + 24];
	struct stat st;
	snprintf(path, sizeof(path), "%.*s/watchdog.log", (int)(strrchr(socket_path, '/') - socket_path),
	        socket_path);
	snprintf(old, sizeof(old), "%s.old", path);
	if (stat(path, &st) == 0 && st.st_size > LOG_MAX)
		rename(path, old);
	return open(path, O_WRONLY | O_CREAT | O_APPEND | O_NOFOLLOW | O_CLOEXEC, 0600);
}

_Noreturn static void exec_watchdog(const char *const argv[], int log_fd, int report)
{
	int null = open("/dev/null", O_RDWR);
	int err = log_fd >= 0 ? log_fd : null;
	for (int s = 1; s < NSIG; s++)
		signal(s, SIG_DFL);
	sigset_t none;
	sigemptyset(&none);
	sigprocmask(SIG_SETMASK, &none, NULL);
	/* The report pipe last: the log may be open at its new number. */
	if (dup2(null, 0) < 0 || dup2(err, 1) < 0 || dup2(err, 2) < 0 || dup2(report, READY_FD) < 0 ||
	        fcntl(READY_FD, F_SETFD, 0) || chdir("/"))
		_exit(127);
	syscall(SYS_close_range, READY_FD + 1u, ~0u, 0);
	execv(argv[0], (char *const *)argv);
	dprintf(READY_FD, "can not execute %s: %s", argv[0], strerror(errno));
	_exit(127);
}

static void detach(const char *const argv[], int log_fd, int report)
{
	static const char *const ours[] = {
	        "SSH_CONNECTION", "SSH_CLIENT", "SSH_ORIGINAL_COMMAND", "SSH_TTY", "SSH_AUTH_SOCK"};
	for (size_t i = 0; i < FS_ARRAY_LEN(ours); i++)
		unsetenv(ours[i]);
	setsid();
	pid_t pid = fork();
	if (pid == 0)
		exec_watchdog(argv, log_fd, report);
	_exit(pid < 0 ? 1 : 0);
}

/* Until the writer closes or the deadline; text is cut at its size. */
static int read_report(int fd, char *text, size_t cap, int64_t deadline)
{
	size_t len = 0;
	for (;;) {
		struct pollfd p = {.fd = fd, .events = POLLIN};
		int n = poll(&p, 1, fs_poll_ms(deadline));
		if (n < 0 && errno == EINTR)
			continue;
		if (n <= 0)
			return FS_ETIMEOUT;
		ssize_t r = read(fd, text + len, cap - 1 - len);
		if (r < 0 && errno == EINTR)
			continue;
		if (r > 0)
			len += (size_t)r;
		text[len] = 0;
		if (r <= 0 || len == cap - 1)
			return FS_OK;
	}
}

static int start(const struct fs_agent_opts *o, int64_t deadline, struct fs_errbuf *e)
{
	char program[4096], number[8], report[400];
	int rc = find_watchdog(o, program, sizeof(program), e);
	if (rc == FS_OK)
		rc = fs_wd_prepare_folder(o->socket_path, e);
	if (rc)
		return rc;
	snprintf(number, sizeof(number), "%d", READY_FD);
	const char *argv[] = {
	        program, "--socket", o->socket_path, "--ready-fd", number, "--config", o->config, NULL};
	if (!o->config)
		argv[5] = NULL;
	int fds[2], log_fd = open_log(o->socket_path);
	if (pipe2(fds, O_CLOEXEC))
		return fs_fail_errno(e, FS_EIO, "can not open a pipe");
	pid_t pid = fork();
	if (pid == 0)
		detach(argv, log_fd, fds[1]);
	close(fds[1]);
	if (log_fd >= 0)
		close(log_fd);
	int status = 1;
	if (pid > 0)
		while (waitpid(pid, &status, 0) < 0 && errno == EINTR)
			;
	rc = status ? fs_fail(e, FS_EIO, "can not fork for the watchdog")
	            : read_report(fds[0], report, sizeof(report), deadline);
	close(fds[0]);
	if (rc == FS_ETIMEOUT)
		return fs_fail(e, rc, "%s was started and did not become ready in time", program);
	if (rc)
		return rc;
	if (!strcmp(report, "ok") || !strcmp(report, "busy"))
		return FS_OK;
	return fs_fail(
	        e, FS_EUNAVAILABLE, "%s", report[0] ? report : "the watchdog ended before it was ready");
}

/* "busy" means that another agent's watchdog is just starting, or an old one just ending: both are short. */
int fs_agent_connect(const struct fs_agent_opts *o, int64_t deadline, int *fd, struct fs_errbuf *e)
{
	for (;;) {
		int rc = fs_wd_connect(o->socket_path, fd, e);
		if (rc != FS_EUNAVAILABLE)
			return rc;
		rc = start(o, deadline, e);
		if (rc)
			return rc;
		rc = fs_wd_connect(o->socket_path, fd, e);
		if (rc != FS_EUNAVAILABLE || fs_now() >= deadline)
			return rc;
		poll(NULL, 0, RETRY_MS);
	}
}
