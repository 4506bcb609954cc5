/* See sshd.h. Runs on the test's thread; the sshd is a child of the test and dies with it. */
#include "tests/unit/sshd.h"

#include <arpa/inet.h>
#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <pwd.h>
#include <signal.h>
#include <shadow.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static const char sshd_path[] = "/usr/sbin/sshd"; /* must be absolute: it executes itself again */

bool test_sshd_available(void)
{
	if (access(sshd_path, X_OK)) {
		printf("skipped: there is no %s\n", sshd_path);
		return false;
	}
	if (access("/usr/bin/ssh-keygen", X_OK)) {
		printf("skipped: there is no ssh-keygen\n");
		return false;
	}
	return true;
}

int test_run(const char *const argv[])
{
	struct fs_child c;
	struct fs_errbuf e;
	if (fs_child_start(&c, argv, NULL, true, true, &e)) {
		fprintf(stderr, "%s\n", e.text);
		return -1;
	}
	close(c.in);
	int status = 0;
	char sink[4096];
	struct pollfd pf[2] = {{.fd = c.out, .events = POLLIN}, {.fd = c.err, .events = POLLIN}};
	while (pf[0].fd >= 0 || pf[1].fd >= 0) {
		poll(pf, 2, -1);
		for (int i = 0; i < 2; i++)
			if (pf[i].fd >= 0 && pf[i].revents && read(pf[i].fd, sink, sizeof(sink)) == 0)
				pf[i].fd = -1;
	}
	waitpid(c.pid, &status, 0);
	close(c.out);
	close(c.err);
	return WIFEXITED(status) ? WEXITSTATUS(status) : 128;
}

char *test_read_file(const char *path)
{
	struct fs_buf b;
	fs_buf_init(&b, 16 << 20);
	FILE *f = fopen(path, "re");
	FS_ASSERT(f);
	char chunk[4096];
	size_t n;
	while ((n = fread(chunk, 1, sizeof(chunk), f)) > 0)
		FS_ASSERT(fs_buf_append(&b, chunk, n) == FS_OK);
	fclose(f);
	return fs_buf_take(&b, NULL);
}

void test_write_file(const char *path, const char *text, int mode)
{
	FILE *f = fopen(path, "we");
	FS_ASSERT(f);
	FS_ASSERT(fwrite(text, 1, strlen(text), f) == strlen(text));
	FS_ASSERT(fclose(f) == 0);
	FS_ASSERT(chmod(path, (mode_t)mode) == 0);
}

/* Zero: one that the kernel chooses. The port that was bound, 0 when it is taken. */
static int try_port(int port)
{
	struct sockaddr_in in = {.sin_family = AF_INET,
	        .sin_addr.s_addr = htonl(INADDR_LOOPBACK),
	        .sin_port = htons((uint16_t)port)};
	socklen_t n = sizeof(in);
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	FS_ASSERT(fd >= 0);
	bool ok =
	        bind(fd, (struct sockaddr *)&in, n) == 0 && getsockname(fd, (struct sockaddr *)&in, &n) == 0;
	close(fd);
	return ok ? ntohs(in.sin_port) : 0;
}

/* Below those that the kernel gives to whoever asks for any, and not one of a test that runs beside this one:
 * it is free still when a program takes it, and while that program is away. */
int test_free_port(void)
{
	static int n_asked;
	char *range = test_read_file("/proc/sys/net/ipv4/ip_local_port_range");
	int lowest = atoi(range), port = 0;
	free(range);
	for (int i = 0; lowest >= 20000 && i < 1024 && !port; i++)
		port = try_port(lowest - 1 - ((int)getpid() * 16 + n_asked++) % 16384);
	port = port ? port : try_port(0);
	FS_ASSERT(port);
	return port;
}

static void keygen(const char *type, const char *path)
{
	const char *const argv[] = {"ssh-keygen", "-q", "-t", type, "-N", "", "-C", "test", "-f", path, NULL};
	FS_ASSERT(test_run(argv) == 0);
}

/* Of root: without PAM sshd does not let it in then. */
static bool password_is_locked(void)
{
	const struct spwd *p = geteuid() == 0 ? getspnam("root") : NULL;
	return p && p->sp_pwdp[0] == '!';
}

static void write_config(struct test_sshd *s, const struct test_sshd_opts *o)
{
	struct fs_buf conf, known;
	fs_buf_init(&conf, 65536);
	fs_buf_init(&known, 65536);
	int rc = fs_buf_printf(&conf,
	        "ListenAddress 127.0.0.1\nPort %d\nPidFile none\nUsePAM %s\nStrictModes "
	        "no\nPasswordAuthentication no\n"
	        "KbdInteractiveAuthentication no\nPermitRootLogin prohibit-password\nMaxStartups "
	        "200\nLogLevel VERBOSE\nSetEnv SHLVL=2\n" /* bash then passes over the user's .bashrc */
	        "AuthorizedKeysFile %s\n%s\n",
	        s->port, password_is_locked() ? "yes" : "no", s->authorized_keys,
	        o && o->extra ? o->extra : "");
	if (o && o->forced_command)
		rc |= fs_buf_printf(&conf, "ForceCommand %s\n", o->forced_command);
	char types[64], path[200], pub[210];
	snprintf(types, sizeof(types), "%s", o && o->host_keys ? o->host_keys : "ed25519 ecdsa");
	for (char *save, *t = strtok_r(types, " ", &save); t; t = strtok_r(NULL, " ", &save)) {
		snprintf(path, sizeof(path), "%s/host_%s", s->dir, t);
		keygen(t, path);
		rc |= fs_buf_printf(&conf, "HostKey %s\n", path);
		snprintf(pub, sizeof(pub), "%s.pub", path);
		char *key = test_read_file(pub);
		rc |= fs_buf_printf(&known, "[127.0.0.1]:%d %s", s->port, key);
		free(key);
	}
	FS_ASSERT(rc == 0);
	test_write_file(s->config, (char *)conf.data, 0600);
	test_write_file(s->known_hosts, (char *)known.data, 0600);
	fs_buf_finish(&conf);
	fs_buf_finish(&known);
}

static bool port_answers(int port)
{
	struct sockaddr_in in = {.sin_family = AF_INET,
	        .sin_addr.s_addr = htonl(INADDR_LOOPBACK),
	        .sin_port = htons((uint16_t)port)};
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	FS_ASSERT(fd >= 0);
	bool ok = connect(fd, (struct sockaddr *)&in, sizeof(in)) == 0;
	close(fd);
	return ok;
}

void test_sshd_start(struct test_sshd *s)
{
	const char *const argv[] = {sshd_path, "-D", "-f", s->config, "-E", s->log, NULL};
	struct fs_errbuf e;
	if (fs_child_start(&s->child, argv, NULL, false, true, &e)) {
		fprintf(stderr, "%s\n", e.text);
		abort();
	}
	int64_t until = fs_deadline_ms(60000);
	while (!port_answers(s->port)) {
		if (fs_child_reap(&s->child, NULL) || fs_now() > until) {
			char *log = access(s->log, F_OK) == 0 ? test_read_file(s->log) : NULL;
			fprintf(stderr, "sshd does not come up: %s\n", log ? log : "no log");
			abort();
		}
		poll(NULL, 0, 5); /* between two looks at the port */
	}
}

void test_sshd_init(struct test_sshd *s, const struct test_sshd_opts *o)
{
	memset(s, 0, sizeof(*s));
	snprintf(s->dir, sizeof(s->dir), "%s/fs-sshd-XXXXXX", getenv("TMPDIR") ? getenv("TMPDIR") : "/tmp");
	FS_ASSERT(mkdtemp(s->dir));
	snprintf(s->config, sizeof(s->config), "%s/sshd_config", s->dir);
	snprintf(s->log, sizeof(s->log), "%s/sshd.log", s->dir);
	snprintf(s->known_hosts, sizeof(s->known_hosts), "%s/known_hosts", s->dir);
	snprintf(s->identity, sizeof(s->identity), "%s/id_ed25519", s->dir);
	snprintf(s->ssh_config, sizeof(s->ssh_config), "%s/ssh_config", s->dir);
	snprintf(s->authorized_keys, sizeof(s->authorized_keys), "%s/authorized_keys", s->dir);
	keygen("ed25519", s->identity);
	char pub[210];
	snprintf(pub, sizeof(pub), "%s.pub", s->identity);
	char *key = test_read_file(pub);
	test_write_file(s->authorized_keys, key, 0600);
	free(key);
	test_write_file(s->ssh_config, "", 0600);
	s->port = test_free_port();
	write_config(s, o);
	if (geteuid() == 0)
		mkdir("/run/sshd", 0755); /* Debian's sshd wants it when it is root */
	test_sshd_start(s);
}

/* Parent of pid, 0 when it is gone; *state (may be NULL) as ps shows it. */
static pid_t parent_of(pid_t pid, char *state)
{
	char path[64], text[512], st = 0;
	snprintf(path, sizeof(path), "/proc/%d/stat", (int)pid);
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return 0;
	ssize_t n = read(fd, text, sizeof(text) - 1);
	close(fd);
	if (n <= 0)
		return 0;
	text[n] = '\0';
	char *p = strrchr(text, ')');
	int ppid = 0;
	if (!p || sscanf(p + 1, " %c %d", &st, &ppid) != 2)
		return 0;
	if (state)
		*state = st;
	return ppid;
}

/* A signal is not yet a stop: it may be forking a session at this moment. */
static void stop_process(pid_t pid)
{
	int64_t until = fs_deadline_ms(60000);
	char state = 0;
	kill(pid, SIGSTOP);
	while (parent_of(pid, &state) && !strchr("TZ", state) && fs_now() < until)
		poll(NULL, 0, 1);
}

static bool descends_from(pid_t pid, pid_t ancestor)
{
	for (int i = 0; i < 64 && pid > 1; i++)
		if ((pid = parent_of(pid, NULL)) == ancestor)
			return true;
	return false;
}

int test_sshd_signal_sessions(const struct test_sshd *s, int sig)
{
	DIR *d = opendir("/proc");
	FS_ASSERT(d);
	pid_t found[256];
	int n = 0;
	for (struct dirent *en; (en = readdir(d)) && n < 256;)
		if (isdigit((unsigned char)en->d_name[0]) && descends_from(atoi(en->d_name), s->child.pid))
			found[n++] = atoi(en->d_name);
	closedir(d);
	for (int i = 0; i < n; i++)
		kill(found[i], sig);
	return n;
}

void test_sshd_stop(struct test_sshd *s)
{
	if (s->child.pid <= 0)
		return;
	stop_process(s->child.pid); /* so that it starts no session between the look and the signal */
	test_sshd_signal_sessions(s, SIGKILL);
	kill(s->child.pid, SIGKILL); /* while it is stopped, or it would take one more connection */
	fs_child_end(&s->child, 2000);
}

static void remove_dir(const char *dir)
{
	DIR *d = opendir(dir);
	if (!d)
		return;
	for (struct dirent *en; (en = readdir(d));) {
		char path[512];
		if (!strcmp(en->d_name, ".") || !strcmp(en->d_name, ".."))
			continue;
		snprintf(path, sizeof(path), "%s/%s", dir, en->d_name);
		struct stat st;
		if (lstat(path, &st) == 0 && S_ISDIR(st.st_mode))
			remove_dir(path);
		else
			unlink(path);
	}
	closedir(d);
	rmdir(dir);
}

void test_sshd_finish(struct test_sshd *s)
{
	test_sshd_stop(s);
	remove_dir(s->dir);
}
