/*
 * Child processes by argv. Each leads its own process group, so that ending it reaches what it started and
 * nothing else. The caller owns the struct; SIGCHLD is left alone, children are reaped by pid.
 */
#include "common/base/base.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

extern char **environ;

struct pipes {
	int in[2], out[2], err[2], fail[2]; /* [0] read end, [1] write end; -1 when not open */
};

static void close_fd(int *fd)
{
	if (*fd >= 0)
		close(*fd);
	*fd = -1;
}

static void close_pipes(struct pipes *p)
{
	for (int i = 0; i < 2; i++) {
		close_fd(&p->in[i]);
		close_fd(&p->out[i]);
		close_fd(&p->err[i]);
		close_fd(&p->fail[i]);
	}
}

/* Descriptors of our own that may be 0-2 would be overwritten in the child; pipe2 gives such numbers only to
 * a program that closed them. */
static int open_pipes(struct pipes *p, bool want_stderr)
{
	*p = (struct pipes){{-1, -1}, {-1, -1}, {-1, -1}, {-1, -1}};
	if (pipe2(p->in, O_CLOEXEC) || pipe2(p->out, O_CLOEXEC) || pipe2(p->fail, O_CLOEXEC) ||
	        (want_stderr && pipe2(p->err, O_CLOEXEC))) {
		close_pipes(p);
		return -1;
	}
	return 0;
}

/* Runs in the child between vfork and exec, in our memory: async-signal-safe calls only, and nothing
 * of ours is written to. */
_Noreturn static void exec_child(const struct pipes *p, const char *const argv[], char *const env[],
        bool want_stderr, bool die, pid_t parent)
{
	setpgid(0, 0);
	for (int s = 1; s < NSIG; s++)
		signal(s, SIG_DFL);
	sigset_t none;
	sigemptyset(&none);
	sigprocmask(SIG_SETMASK, &none, NULL);
	if (die) {
		prctl(PR_SET_PDEATHSIG, SIGKILL); /* a stopped process would keep any other for later */
		if (getppid() != parent)
			_exit(127);
	}
	int e = 0;
	if (dup2(p->in[0], 0) < 0 || dup2(p->out[1], 1) < 0 || (want_stderr && dup2(p->err[1], 2) < 0))
		e = errno;
	if (!e) {
		/* everything above 2 but the failure pipe, which closes itself on exec */
		int keep = p->fail[1];
		if (keep > 3)
			syscall(SYS_close_range, 3u, (unsigned)keep - 1, 0);
		syscall(SYS_close_range, (unsigned)keep + 1, ~0u, 0);
		execvpe(argv[0], (char *const *)argv, env);
		e = errno;
	}
	ssize_t n = write(p->fail[1], &e, sizeof(e));
	(void)n;
	_exit(127);
}

int fs_child_start(struct fs_child *c, const char *const argv[], char *const env[], bool want_stderr,
        bool die_with_parent, struct fs_errbuf *e)
{
	*c = (struct fs_child){.in = -1, .out = -1, .err = -1};
	struct pipes p;
	if (open_pipes(&p, want_stderr))
		return fs_fail_errno(e, FS_EIO, "can not open pipes for %s", argv[0]);

	sigset_t all, old;
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &old);
	pid_t parent = getpid();
	/* We would wait for its exec anyway. A fork copies the page tables of a program that may hold tens of
	 * GB, and after it each page that is written to is an exception. */
	pid_t pid = vfork();
	if (pid == 0)
		exec_child(&p, argv, env ? env : environ, want_stderr, die_with_parent, parent);
	pthread_sigmask(SIG_SETMASK, &old, NULL);
	if (pid < 0) {
		int rc = fs_fail_errno(e, FS_EIO, "can not start a process for %s", argv[0]);
		close_pipes(&p);
		return rc;
	}
	setpgid(pid, pid); /* both sides set it, so that it stands whoever comes first */
	close_fd(&p.fail[1]);
	int why = 0;
	ssize_t n;
	do
		n = read(p.fail[0], &why, sizeof(why));
	while (n < 0 && errno == EINTR);
	if (n == (ssize_t)sizeof(why)) {
		waitpid(pid, NULL, 0);
		close_pipes(&p);
		errno = why;
		return fs_fail_errno(e, FS_EUNAVAILABLE, "can not execute %s", argv[0]);
	}
	c->pid = pid;
	c->in = p.in[1];
	c->out = p.out[0];
	c->err = p.err[0];
	p.in[1] = p.out[0] = p.err[0] = -1;
	close_pipes(&p);
	fcntl(c->in, F_SETFL, O_NONBLOCK);
	fcntl(c->out, F_SETFL, O_NONBLOCK);
	if (c->err >= 0)
		fcntl(c->err, F_SETFL, O_NONBLOCK);
	return FS_OK;
}

void fs_child_signal(const struct fs_child *c, int sig)
{
	if (c->pid > 0)
		kill(-c->pid, sig);
}

bool fs_child_reap(struct fs_child *c, int *status)
{
	if (c->pid <= 0)
		return true;
	int st = 0;
	pid_t r = waitpid(c->pid, &st, WNOHANG);
	if (r == 0 || (r < 0 && errno == EINTR))
		return false;
	c->pid = 0;
	if (status)
		*status = st;
	return true;
}

/* The leader may be gone while others of its group live on: the group is killed before the leader is reaped,
 * since its pid keeps the group's number from being given to somebody else. */
void fs_child_end(struct fs_child *c, int grace_ms)
{
	if (c->pid > 0) {
		int64_t until = fs_deadline_ms(grace_ms);
		close_fd(&c->in);
		fs_child_signal(c, SIGTERM);
		for (;;) {
			siginfo_t si = {0};
			if (waitid(P_PID, (id_t)c->pid, &si, WEXITED | WNOHANG | WNOWAIT) < 0 &&
			        errno != EINTR)
				break;
			if (si.si_pid || fs_now() >= until)
				break;
			nanosleep(&(struct timespec){.tv_nsec = 2 * FS_MS}, NULL);
		}
		fs_child_signal(c, SIGKILL);
		while (waitpid(c->pid, NULL, 0) < 0 && errno == EINTR)
			;
		c->pid = 0;
	}
	close_fd(&c->in);
	close_fd(&c->out);
	close_fd(&c->err);
}
