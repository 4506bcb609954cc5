/*
 * Notices that a client left while its request is being worked on. evhttp stops reading then, so its own
 * close callback stays silent until a reply starts; enabling its reading again would let a pipelined request
 * abort the process. So the socket is duplicated and the duplicate watched for the peer's end alone, which
 * leaves evhttp's state untouched. Loop thread only.
 */
#include "server/http/internal.h"

#include <event2/bufferevent.h>
#include <event2/util.h>
#include <errno.h>
#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

/* Edge-triggered, since bytes of a pipelined request may lie unread; EV_READ is in it because libevent
 * reports a reset as that. */
static void peer_event(evutil_socket_t fd, short what, void *arg)
{
	struct fs_http_request *r = arg;
	char c;
	ssize_t n = recv(fd, &c, 1, MSG_PEEK | MSG_DONTWAIT);
	if (!(what & EV_CLOSED) && (n > 0 || (n < 0 && (errno == EAGAIN || errno == EINTR))))
		return;
	event_del(r->gone_event);
	fs_cancel_fire(r->cancel, FS_CANCEL_CLIENT);
}

/* evhttp gave its connection up while the answer was made. Ours would stay open and tell nothing when it did
 * so because the socket took no byte for too long. */
void http_peer_lost(struct fs_http_request *r)
{
	char c;
	ssize_t n = recv(r->gone_fd, &c, 1, MSG_PEEK | MSG_DONTWAIT);
	r->gate = NULL;
	fs_cancel_fire(r->cancel, n > 0 || (n < 0 && errno == EAGAIN) ? FS_CANCEL_UNREAD : FS_CANCEL_CLIENT);
}

int http_watch_start(struct fs_http_request *r)
{
	struct evhttp_connection *evcon = evhttp_request_get_connection(r->req);
	evutil_socket_t fd = bufferevent_getfd(evhttp_connection_get_bufferevent(evcon));
	r->gone_fd = fcntl(fd, F_DUPFD_CLOEXEC, 3);
	if (r->gone_fd < 0)
		return FS_EIO;
	r->gone_event =
	        event_new(r->h->base, r->gone_fd, EV_READ | EV_CLOSED | EV_ET | EV_PERSIST, peer_event, r);
	if (!r->gone_event || event_add(r->gone_event, NULL)) {
		http_watch_stop(r);
		return FS_EIO;
	}
	return FS_OK;
}

void http_watch_stop(struct fs_http_request *r)
{
	if (r->gone_event)
		event_free(r->gone_event);
	r->gone_event = NULL;
	if (r->gone_fd >= 0)
		close(r->gone_fd);
	r->gone_fd = -1;
}
