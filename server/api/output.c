/*
 * Where the bytes of an answer go: to the request, or to the session that its client asked for, which then
 * outlives the request. A streamed answer with a session goes there alone, and a follower carries it to the
 * request; an answer in one piece goes to both.
 */
#include "server/api/call.h"
#include "server/api/streams.h"

#include <string.h>

int api_out_open(struct api_call *c)
{
	const char *id = fs_http_header(c->r, "X-Conversation-Id");
	struct fs_cancel *leaving = fs_http_cancel(c->r);
	if (!id || !*id || !c->api->streams || c->d->counted) {
		c->cancel = fs_cancel_ref(leaving);
		return FS_OK;
	}
	/* The client may leave: what ends the work is deletion, the deadline and shutdown. */
	c->cancel = fs_cancel_create(fs_cancel_deadline(leaving));
	if (!c->cancel)
		return FS_ENOMEM;
	c->session = api_session_open(c->api, c->r, c->cancel);
	if (!c->session) {
		fs_cancel_unref(c->cancel);
		c->cancel = fs_cancel_ref(leaving);
	}
	return FS_OK;
}

void api_out_stream(struct api_call *c, int first_sign_ms)
{
	fs_session_expect_events(c->session, c->d->error_before, c->d->error_after);
	fs_http_stream_begin_after(c->r, first_sign_ms);
	c->followed = c->session && api_session_follow(c->session, c->r) == FS_OK;
}

void api_out_begin(struct api_call *c)
{
	if (c->followed)
		fs_session_kind(c->session, true, 200, "text/event-stream");
	else
		fs_http_stream_begin(c->r);
	c->begun = true;
}

void api_out_events(struct api_call *c, const void *data, size_t n)
{
	if (c->followed)
		fs_session_event(c->session, data, n);
	else
		fs_http_stream_write(c->r, data, n);
}

void api_out_end(struct api_call *c)
{
	if (!c->followed) /* else the session's end is the stream's */
		fs_http_stream_end(c->r);
}

/* An error behind events can only be an event. */
static void add_error_event(struct api_call *c, const char *json, size_t n)
{
	const char *before = c->d->failed         ? c->d->failed_before
	                     : c->d->error_before ? c->d->error_before
	                                          : "data: ";
	const char *after = c->d->error_before ? c->d->error_after : "\n\ndata: [DONE]\n\n";
	struct fs_buf b;
	fs_buf_init(&b, n + 256);
	if (!fs_buf_append_str(&b, before) && !fs_buf_append(&b, json, n) && !fs_buf_append_str(&b, after))
		fs_session_event(c->session, b.data, b.len);
	fs_buf_finish(&b);
}

void api_out_whole(struct api_call *c, int status, const char *header, const char *json)
{
	size_t n = strlen(json);
	if (c->followed && c->begun) {
		add_error_event(c, json, n);
	} else {
		fs_session_kind(c->session, false, status, "application/json");
		fs_session_append(c->session, json, n);
	}
	if (!c->followed)
		fs_http_reply(c->r, status, NULL, header, json, n);
}

void api_out_close(struct api_call *c)
{
	fs_session_finish(c->session);
	fs_cancel_unref(c->cancel);
}
