/* The service manager's datagrams; see notify.h. Protocol: sd_notify(3), "Socket Address" and "Notes". */
#include "remote/watchdog/notify.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

/* 0 unless it is meant for this process and a whole number of microseconds. */
static int64_t watchdog_interval(const char *usec, const char *pid)
{
	char *end;
	if (!usec || (pid && strtoll(pid, NULL, 10) != getpid()))
		return 0;
	errno = 0;
	long long us = strtoll(usec, &end, 10);
	return *end || errno || us <= 0 || us > INT64_MAX / 1000 ? 0 : us * 1000 / 2;
}

void fs_notify_resume(struct fs_notify *n, const char *path, int64_t every)
{
	*n = (struct fs_notify){.fd = -1};
	/* vsock addresses and the like are for machines, not for a user's service */
	if (!path || (path[0] != '/' && path[0] != '@') || !path[1] || strlen(path) >= sizeof(n->path))
		return;
	n->fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (n->fd < 0) {
		fs_warn("the service manager can not be told anything: %s", strerror(errno));
		return;
	}
	snprintf(n->path, sizeof(n->path), "%s", path);
	n->every = every;
	n->next = fs_now();
}

void fs_notify_init(struct fs_notify *n)
{
	fs_notify_resume(n, getenv("NOTIFY_SOCKET"),
	        watchdog_interval(getenv("WATCHDOG_USEC"), getenv("WATCHDOG_PID")));
	unsetenv("NOTIFY_SOCKET");
	unsetenv("WATCHDOG_USEC");
	unsetenv("WATCHDOG_PID");
}

void fs_notify_finish(struct fs_notify *n)
{
	if (n->fd >= 0)
		close(n->fd);
	n->fd = -1;
}

bool fs_notify_wanted(const struct fs_notify *n)
{
	return n->fd >= 0;
}

/* The address each time, since a manager that was restarted has a new socket at the same place. */
void fs_notify_send(struct fs_notify *n, const char *text)
{
	struct sockaddr_un a = {.sun_family = AF_UNIX};
	size_t len = strlen(n->path);
	if (n->fd < 0)
		return;
	memcpy(a.sun_path, n->path, len);
	if (a.sun_path[0] == '@')
		a.sun_path[0] = 0;
	socklen_t size = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + len + (n->path[0] == '/'));
	if (sendto(n->fd, text, strlen(text), MSG_NOSIGNAL, (struct sockaddr *)&a, size) < 0)
		fs_debug("the service manager does not listen: %s", strerror(errno));
}

void fs_notify_reloading(struct fs_notify *n)
{
	char text[64];
	snprintf(text, sizeof(text), "RELOADING=1\nMONOTONIC_USEC=%lld", (long long)(fs_now() / 1000));
	fs_notify_send(n, text);
}

void fs_notify_status(struct fs_notify *n, const char *fmt, ...)
{
	char text[sizeof(n->status)] = "STATUS=";
	va_list ap;
	if (n->fd < 0)
		return;
	va_start(ap, fmt);
	vsnprintf(text + 7, sizeof(text) - 7, fmt, ap);
	va_end(ap);
	if (!strcmp(text, n->status))
		return;
	memcpy(n->status, text, sizeof(text));
	fs_notify_send(n, text);
}

void fs_notify_prepare(const struct fs_notify *n, struct fs_pollset *ps)
{
	if (n->fd >= 0 && n->every)
		fs_pollset_until(ps, n->next);
}

void fs_notify_dispatch(struct fs_notify *n)
{
	if (n->fd < 0 || !n->every || fs_now() < n->next)
		return;
	fs_notify_send(n, "WATCHDOG=1");
	n->next = fs_now() + n->every;
}
