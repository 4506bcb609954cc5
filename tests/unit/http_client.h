/* Raw sockets to a server/http on loopback, for tests that send what no client library would. Waits are
 * bounded by WAIT_MS, which only a hang reaches. */
#ifndef FS_TESTS_HTTP_CLIENT_H
#define FS_TESTS_HTTP_CLIENT_H

#include "server/http/http.h"

#include <arpa/inet.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define WAIT_MS 60000

static inline int http_dial(const struct fs_http *server)
{
	struct sockaddr_in a = {.sin_family = AF_INET,
	        .sin_port = htons((uint16_t)fs_http_port(server)),
	        .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	assert_int_equal(connect(fd, (struct sockaddr *)&a, sizeof(a)), 0);
	return fd;
}

/* False when the other side does not take it all. */
static inline bool http_send(int fd, const void *data, size_t n)
{
	const char *p = data;
	while (n > 0) {
		struct pollfd w = {.fd = fd, .events = POLLOUT};
		ssize_t sent = poll(&w, 1, WAIT_MS) == 1 ? send(fd, p, n, MSG_NOSIGNAL) : -1;
		if (sent <= 0)
			return false;
		p += sent;
		n -= (size_t)sent;
	}
	return true;
}

static inline void http_say(int fd, const char *text)
{
	assert_true(http_send(fd, text, strlen(text)));
}

/* Appends to buf until `until` is in it (NULL: until the end). True when the other side has closed in an
 * orderly way. */
static inline bool http_hear(int fd, char *buf, size_t cap, const char *until)
{
	size_t n = strlen(buf);
	while (n + 1 < cap && !(until && strstr(buf, until))) {
		struct pollfd p = {.fd = fd, .events = POLLIN};
		assert_int_equal(poll(&p, 1, WAIT_MS), 1);
		ssize_t r = read(fd, buf + n, cap - 1 - n);
		if (r <= 0)
			return r == 0;
		n += (size_t)r;
		buf[n] = '\0';
	}
	return false;
}

#endif
