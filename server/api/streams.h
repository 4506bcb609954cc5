/*
 * streams: what joins sessions (server/stream) and HTTP requests. A follower carries a session's bytes to one
 * request, at the pace of its client; it lives on the HTTP loop and is gone when either of the two ends.
 */
#ifndef FS_SERVER_API_STREAMS_H
#define FS_SERVER_API_STREAMS_H

#include "server/api/internal.h"
#include "server/stream/stream.h"

/* Names whom the request's sessions belong to: its API key; all share one owner when the server has no keys.
 */
void api_owner_of(const struct fs_http_request *r, uint8_t owner[FS_SESSION_OWNER]);

/* Opens the session that the request's X-Conversation-Id asks for. NULL: it asks for none, or there is none
 * to be had, which a header of the answer says. cancel ends the work. */
struct fs_session *api_session_open(
        const struct fs_api *api, struct fs_http_request *r, struct fs_cancel *cancel);
/* r, which is not answered yet, gets all bytes of the session from now on. Takes a reference of its own. */
int api_session_follow(struct fs_session *s, struct fs_http_request *r);

#endif
