/*
 * The watchdog's socket as its clients see it: path, folder check, connection, greeting. Any thread. Refuses
 * a folder that another user owns or could write to.
 */
#include "remote/watchdog/watchdog.h"

#include <errno.h>
#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

static const char *const purposes[] = {"channel", "status", "stop", "retire", "replace", "reload"};

static bool own_folder(const char *path)
{
	struct stat st;
	return lstat(path, &st) == 0 && S_ISDIR(st.st_mode) && st.st_uid == getuid();
}

#define PLACES 3

/* In the order of preference; "" where a place is not to be had. */
static int list_places(char out[PLACES][FS_WD_PATH_MAX], struct fs_errbuf *e)
{
	const char *xdg = getenv("XDG_RUNTIME_DIR");
	char run[64];
	int n = 0;
	snprintf(run, sizeof(run), "/run/user/%u", (unsigned)getuid());
	memset(out, 0, PLACES * sizeof(out[0]));
	if (xdg && xdg[0] == '/')
		n = snprintf(out[0], FS_WD_PATH_MAX, "%s/farsight/watchdog.sock", xdg);
	if (own_folder(run))
		snprintf(out[1], FS_WD_PATH_MAX, "%s/farsight/watchdog.sock", run);
	snprintf(out[2], FS_WD_PATH_MAX, "/tmp/farsight-%u/watchdog.sock", (unsigned)getuid());
	if (n < 0 || n >= FS_WD_PATH_MAX)
		return fs_fail(e, FS_EINVAL,
		        "XDG_RUNTIME_DIR is too long for a unix socket (%d bytes at most): %s",
		        FS_WD_PATH_MAX - 1, xdg ? xdg : "");
	return FS_OK;
}

int fs_wd_socket_path(char out[FS_WD_PATH_MAX], struct fs_errbuf *e)
{
	char places[PLACES][FS_WD_PATH_MAX];
	size_t i = 0;
	int rc = list_places(places, e);
	if (rc)
		return rc;
	while (!places[i][0])
		i++;
	memcpy(out, places[i], FS_WD_PATH_MAX);
	return FS_OK;
}

int fs_wd_find_socket(char out[FS_WD_PATH_MAX], struct fs_errbuf *e)
{
	char places[PLACES][FS_WD_PATH_MAX];
	int fd, rc = list_places(places, e);
	for (size_t i = 0; rc == FS_OK && i < PLACES; i++) {
		if (!places[i][0] || fs_wd_connect(places[i], &fd, NULL))
			continue;
		close(fd);
		memcpy(out, places[i], FS_WD_PATH_MAX);
		return FS_OK;
	}
	return rc ? rc : fs_wd_socket_path(out, e);
}

/* The folder part of a socket's path; FS_EINVAL when there is none or it does not fit a socket address. */
static int folder_of(const char *socket_path, char out[FS_WD_PATH_MAX], struct fs_errbuf *e)
{
	size_t n = strlen(socket_path);
	const char *slash = strrchr(socket_path, '/');
	if (n >= FS_WD_PATH_MAX || !slash || slash == socket_path || socket_path[0] != '/')
		return fs_fail(e, FS_EINVAL,
		        "the socket needs an absolute path of at most %d bytes in a folder of its own: %s",
		        FS_WD_PATH_MAX - 1, socket_path);
	memcpy(out, socket_path, (size_t)(slash - socket_path));
	out[slash - socket_path] = 0;
	return FS_OK;
}

static int check_folder(const char *folder, struct fs_errbuf *e)
{
	struct stat st;
	if (lstat(folder, &st))
		return fs_fail_errno(e, errno == ENOENT ? FS_EUNAVAILABLE : FS_EIO, "%s", folder);
	if (!S_ISDIR(st.st_mode))
		return fs_fail(e, FS_EAUTH, "%s is no folder", folder);
	if (st.st_uid != getuid())
		return fs_fail(e, FS_EAUTH,
		        "%s belongs to user %u, not to us; remove it or set XDG_RUNTIME_DIR", folder,
		        (unsigned)st.st_uid);
	if (st.st_mode & 077)
		return fs_fail(e, FS_EAUTH, "%s is open to other users; run: chmod 700 %s", folder, folder);
	return FS_OK;
}

int fs_wd_prepare_folder(const char *socket_path, struct fs_errbuf *e)
{
	char folder[FS_WD_PATH_MAX];
	int rc = folder_of(socket_path, folder, e);
	if (rc)
		return rc;
	if (mkdir(folder, 0700) && errno != EEXIST)
		return fs_fail_errno(e, FS_EIO, "can not make the folder %s", folder);
	return check_folder(folder, e);
}

int fs_wd_connect(const char *socket_path, int *out, struct fs_errbuf *e)
{
	char folder[FS_WD_PATH_MAX];
	int rc = folder_of(socket_path, folder, e);
	if (rc)
		return rc;
	rc = check_folder(folder, e);
	if (rc == FS_EUNAVAILABLE)
		return fs_fail(e, rc, "no watchdog runs: there is no %s", socket_path);
	if (rc)
		return rc;
	struct sockaddr_un a = {.sun_family = AF_UNIX};
	memcpy(a.sun_path, socket_path, strlen(socket_path));
	int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (fd < 0)
		return fs_fail_errno(e, FS_EIO, "can not make a socket");
	while (connect(fd, (struct sockaddr *)&a, sizeof(a))) {
		if (errno == EINTR)
			continue;
		rc = fs_fail_errno(e, FS_EUNAVAILABLE, "no watchdog answers at %s", socket_path);
		close(fd);
		return rc;
	}
	*out = fd;
	return FS_OK;
}

int fs_wd_find_program(const char *name, const char *folder, char *out, size_t cap, struct fs_errbuf *e)
{
	char self[4096];
	ssize_t n = readlink("/proc/self/exe", self, sizeof(self) - 1);
	if (n <= 0)
		return fs_fail_errno(e, FS_EIO, "can not tell where this program lies");
	self[n] = 0;
	*strrchr(self, '/') = 0;
	for (int step = 0; step < 2; step++) {
		int m = step == 0 ? snprintf(out, cap, "%s/%s", self, name)
		                  : snprintf(out, cap, "%s/../%s/%s", self, folder, name);
		if (m < 0 || (size_t)m >= cap)
			return fs_fail(e, FS_EINVAL, "the path of %s is too long", name);
		if (access(out, X_OK) == 0)
			return FS_OK;
	}
	return fs_fail(e, FS_ENOTFOUND, "%s is not installed: no such program at %s/%s", name, self, name);
}

/* Numeric IPv4 or IPv6, a scope ("%eth0") included. */
static bool is_address(const char *s)
{
	struct addrinfo hints = {.ai_flags = AI_NUMERICHOST, .ai_socktype = SOCK_STREAM}, *res = NULL;
	if (!*s || getaddrinfo(s, NULL, &hints, &res))
		return false;
	freeaddrinfo(res);
	return true;
}

size_t fs_wd_greeting_format(const struct fs_wd_greeting *g, char out[FS_WD_GREETING_MAX])
{
	FS_ASSERT((size_t)g->purpose < FS_ARRAY_LEN(purposes));
	int n = snprintf(out, FS_WD_GREETING_MAX, "FARSIGHT 1 %s %s\n", purposes[g->purpose],
	        is_address(g->peer) ? g->peer : "-");
	FS_ASSERT(n > 0 && n < FS_WD_GREETING_MAX);
	return (size_t)n;
}

int fs_wd_greeting_parse(const char *line, size_t n, struct fs_wd_greeting *out, struct fs_errbuf *e)
{
	char text[FS_WD_GREETING_MAX], word[16], peer[80];
	int version, end = 0;
	if (n >= sizeof(text) || memchr(line, 0, n))
		return fs_fail(e, FS_EFORMAT, "the greeting is too long or holds a NUL");
	memcpy(text, line, n);
	text[n] = 0;
	if (sscanf(text, "FARSIGHT %d %15s %79s%n", &version, word, peer, &end) != 3 || text[end])
		return fs_fail(e, FS_EFORMAT, "expected \"FARSIGHT 1 <purpose> <peer>\"");
	if (version != 1)
		return fs_fail(e, FS_ENOTSUP,
		        "the agent's greeting has version %d, this watchdog knows 1; "
		        "install both programs from one release",
		        version);
	struct fs_wd_greeting g = {0};
	size_t i = 0;
	while (i < FS_ARRAY_LEN(purposes) && strcmp(purposes[i], word))
		i++;
	if (i == FS_ARRAY_LEN(purposes))
		return fs_fail(e, FS_EFORMAT, "unknown purpose \"%s\"", word);
	g.purpose = (enum fs_wd_purpose)i;
	if (strcmp(peer, "-")) {
		if (!is_address(peer))
			return fs_fail(e, FS_EFORMAT, "the peer \"%s\" is no numeric address", peer);
		memcpy(g.peer, peer, sizeof(peer));
	}
	*out = g;
	return FS_OK;
}
