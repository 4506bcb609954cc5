/*
 * Closing a socket that holds unread bytes resets the connection, and the client may then never see the
 * answer that said why. So a duplicate of the socket is kept a while, what still comes is thrown away, and
 * the client's own end is awaited. Loop thread only.
 */
#include "server/http/internal.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

#define QUIET_MS 2000
#define LONGEST_MS 30000

struct http_linger {
	struct fs_http *h;
	struct http_linger *prev, *next; /* h->lingers */
	int fd;
	int64_t until;
	struct event *event;
};

static void linger_end(struct http_linger *l)
{
	if (l->next)
		l->next->prev = l->prev;
	if (l->prev)
		l->prev->next = l->next;
	else
		l->h->lingers = l->next;
	l->h->n_lingers--;
	event_free(l->event);
	close(l->fd);
	free(l);
}

static void on_bytes(evutil_socket_t fd, short what, void *arg)
{
	struct http_linger *l = arg;
	char waste[16 * 1024];
	for (int i = 0; i < 16 && !(what & EV_TIMEOUT); i++) {
		ssize_t n = recv(fd, waste, sizeof(waste), MSG_DONTWAIT);
		if (n < 0 && (errno == EAGAIN || errno == EINTR))
			break;
		if (n <= 0)
			what |= EV_TIMEOUT;
	}
	if ((what & EV_TIMEOUT) || fs_now() > l->until)
		linger_end(l);
}

void http_linger_start(struct fs_http *h, int fd)
{
	struct timeval quiet = {.tv_sec = QUIET_MS / 1000};
	struct http_linger *l = calloc(1, sizeof(*l));
	int copy = l ? fcntl(fd, F_DUPFD_CLOEXEC, 3) : -1;
	struct event *event = copy < 0 ? NULL : event_new(h->base, copy, EV_READ | EV_PERSIST, on_bytes, l);
	if (!event || event_add(event, &quiet)) { /* then it is closed at once, as without us */
		if (event)
			event_free(event);
		if (copy >= 0)
			close(copy);
		free(l);
		return;
	}
	*l = (struct http_linger){
	        .h = h, .next = h->lingers, .fd = copy, .until = fs_deadline_ms(LONGEST_MS), .event = event};
	if (h->lingers)
		h->lingers->prev = l;
	h->lingers = l;
	h->n_lingers++;
	while (h->n_lingers > HTTP_SPARE_CONNECTIONS) {
		while (l->next)
			l = l->next;
		linger_end(l);
		l = h->lingers;
	}
}

void http_linger_end_all(struct fs_http *h)
{
	while (h->lingers)
		linger_end(h->lingers);
}
