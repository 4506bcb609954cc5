/*
 * GET and DELETE /v1/stream, POST /v1/streams/lookup, and the followers that carry a session to a client.
 * Paths, texts and the loose reading of `from` are those of llama.cpp's server, whose clients come here too.
 */
#include "server/api/streams.h"

#include <openssl/evp.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

/* A follower stops reading the session when so much waits for its client. */
#define ENOUGH_BACKLOG ((size_t)256 << 10)
#define PIECE ((size_t)64 << 10)
#define MAX_WHOLE ((size_t)32 << 20)
#define MAX_LOOKUP_ROWS 4096

void api_owner_of(const struct fs_api *api, const struct fs_http_request *r, uint8_t owner[FS_SESSION_OWNER])
{
	const char *key = fs_http_header(r, "x-api-key"), *bearer = fs_http_header(r, "Authorization");
	memset(owner, 0, FS_SESSION_OWNER);
	if (!api->has_keys)
		return;
	if (bearer && strncasecmp(bearer, "Bearer ", 7) == 0)
		key = bearer + 7 + strspn(bearer + 7, " ");
	if (key)
		EVP_Digest(key, strlen(key), owner, NULL, EVP_sha256(), NULL);
}

/* ---- followers ---- */

struct follower {
	atomic_int refs; /* the loop's until it ends, and one for each call under way */
	atomic_bool called;
	struct fs_http_request *r;
	struct fs_reader *reader; /* [loop] */
	struct fs_cancel_hook gone;
	struct fs_buf whole; /* [loop]; an answer that is no stream is sent when it is complete */
	bool begun, ended;   /* [loop] */
};

static void follower_unref(struct follower *f)
{
	if (atomic_fetch_sub(&f->refs, 1) != 1)
		return;
	fs_buf_finish(&f->whole);
	fs_http_unref(f->r);
	free(f);
}

static void go_on(void *arg);

/* Any thread; at most one call is under way. */
static void call_soon(void *arg)
{
	struct follower *f = arg;
	if (atomic_exchange(&f->called, true))
		return;
	atomic_fetch_add(&f->refs, 1);
	if (fs_http_call(f->r, go_on, f)) { /* memory is out: the next byte or the client's end tries again */
		atomic_store(&f->called, false);
		atomic_fetch_sub(&f->refs, 1);
	}
}

static void follower_end(struct follower *f)
{
	f->ended = true;
	fs_cancel_unlisten(fs_http_cancel(f->r), &f->gone);
	fs_reader_detach(f->reader);
	follower_unref(f);
}

static void end_whole(struct follower *f, const struct fs_reader_kind *kind)
{
	fs_http_reply(f->r, kind->status, kind->content_type, NULL,
	        f->whole.data ? (char *)f->whole.data : "", f->whole.len);
}

static void end_stream(struct follower *f, ssize_t why)
{
	static const char lost[] =
	        "event: error\ndata: {\"error\":{\"code\":400,\"message\":\"Stream offset lost, please "
	        "restart\",\"type\":\"invalid_request_error\"}}\n\n";
	if (why == FS_ELIMIT)
		fs_http_stream_write(f->r, lost, sizeof(lost) - 1);
	fs_http_stream_end(f->r);
}

/* What the session has, as far as the client takes it. 0: wait to be called again. */
static ssize_t carry(struct follower *f, bool events)
{
	static _Thread_local char piece[PIECE];
	for (;;) {
		if (events && fs_http_stream_backlog(f->r) > ENOUGH_BACKLOG) {
			fs_http_when_drained(f->r, call_soon, f);
			return 0;
		}
		ssize_t n = fs_reader_read(f->reader, piece, sizeof(piece));
		if (n <= 0)
			return n;
		int rc = events ? fs_http_stream_write(f->r, piece, (size_t)n)
		                : fs_buf_append(&f->whole, piece, (size_t)n);
		if (rc)
			return FS_ECANCELLED;
	}
}

/* The loop's turn at a follower. */
static void go_on(void *arg)
{
	struct follower *f = arg;
	struct fs_reader_kind kind;
	atomic_store(&f->called, false);
	if (f->ended) {
		follower_unref(f);
		return;
	}
	fs_reader_kind(f->reader, &kind);
	if (kind.known && kind.events && !f->begun) {
		fs_http_stream_begin(f->r);
		f->begun = true;
	}
	ssize_t rc = fs_cancelled(fs_http_cancel(f->r)) ? FS_ECANCELLED : carry(f, kind.events);
	if (rc < 0) {
		if (kind.known && !kind.events)
			end_whole(f, &kind);
		else
			end_stream(f, rc);
		follower_end(f);
	}
	follower_unref(f);
}

static struct follower *follower_new(struct fs_http_request *r)
{
	struct follower *f = calloc(1, sizeof(*f));
	if (!f)
		return NULL;
	atomic_init(&f->refs, 1);
	f->r = fs_http_ref(r);
	f->gone = (struct fs_cancel_hook){.fn = call_soon, .arg = f};
	fs_buf_init(&f->whole, MAX_WHOLE);
	return f;
}

static void follower_start(struct follower *f)
{
	fs_cancel_listen(fs_http_cancel(f->r), &f->gone);
	call_soon(f);
}

int api_session_follow(struct fs_session *s, struct fs_http_request *r)
{
	struct follower *f = follower_new(r);
	if (!f)
		return FS_ENOMEM;
	int rc = fs_reader_attach_to(s, 0, call_soon, f, &f->reader);
	if (rc)
		follower_unref(f);
	else
		follower_start(f);
	return rc;
}

struct fs_session *api_session_open(
        const struct fs_api *api, struct fs_http_request *r, struct fs_cancel *cancel)
{
	const char *id = fs_http_header(r, "X-Conversation-Id");
	uint8_t owner[FS_SESSION_OWNER];
	struct fs_session *s = NULL;
	struct fs_errbuf e;
	if (!id || !*id || !api->streams)
		return NULL;
	api_owner_of(api, r, owner);
	int rc = fs_session_open(
	        api->streams, id, owner, cancel, fs_http_header(r, "Last-Event-ID") != NULL, &s, &e);
	fs_http_add_header(r, "X-Conversation-Resumable", rc ? "no" : "yes");
	if (rc)
		fs_http_add_header(r, "X-Conversation-Error", e.text);
	return rc ? NULL : s;
}

/* ---- requests about sessions ---- */

static void reply_error(struct fs_http_request *r, int status, const char *type, const char *message)
{
	json_t *o =
	        json_pack("{s:{s:i, s:s, s:s}}", "error", "code", status, "message", message, "type", type);
	char *text = o ? json_dumps(o, JSON_COMPACT) : NULL;
	json_decref(o);
	if (text)
		fs_http_reply(r, status, "application/json; charset=utf-8", NULL, text, strlen(text));
	else
		fs_http_stream_end(r);
	free(text);
}

/* From the path or from conv_id; NULL (and the request is answered) when it has none. */
static char *conversation_of(struct fs_http_request *r)
{
	char *id = fs_http_path_tail(r, "/v1/stream/");
	if (!id)
		id = fs_http_query_value(r, "conv_id");
	if (id && *id)
		return id;
	free(id);
	reply_error(r, 400, "invalid_request_error", "Missing conversation id in path");
	return NULL;
}

/* As strtoull reads it: digits may be followed by anything, a minus wraps to an offset that never comes. */
static bool offset_of(struct fs_http_request *r, uint64_t *out)
{
	char *query = fs_http_query_value(r, "from"), *end;
	const char *from = query ? query : fs_http_header(r, "Last-Event-ID");
	*out = from && *from ? strtoull(from, &end, 10) : 0;
	bool good = !from || (*from && end != from);
	free(query);
	return good;
}

static void get_stream(const struct fs_api *api, struct fs_http_request *r, const char *id)
{
	uint8_t owner[FS_SESSION_OWNER];
	struct fs_errbuf e = {"Stream not found or expired"};
	uint64_t from;
	api_owner_of(api, r, owner);
	bool good = offset_of(r, &from);
	struct follower *f = follower_new(r);
	if (!f) {
		reply_error(r, 503, "unavailable_error", "out of memory");
		return;
	}
	/* Whether there is such a session is told before whether the offset is one. */
	int rc = FS_EINVAL;
	if (good)
		rc = fs_reader_attach(api->streams, id, owner, from, call_soon, f, &f->reader, &e);
	else if (!fs_streams_has(api->streams, id, owner))
		rc = FS_ENOTFOUND;
	if (!rc) {
		follower_start(f);
		return;
	}
	if (rc == FS_ENOTFOUND)
		reply_error(r, 404, "not_found_error", e.text);
	else
		reply_error(r, 400, "invalid_request_error", good ? e.text : "Invalid 'from' offset");
	follower_unref(f);
}

void fs_api_stream_get(void *arg, struct fs_http_request *r)
{
	char *id = conversation_of(r);
	if (id)
		get_stream(arg, r, id);
	free(id);
	fs_http_unref(r);
}

void fs_api_stream_delete(void *arg, struct fs_http_request *r)
{
	const struct fs_api *api = arg;
	char *id = conversation_of(r);
	uint8_t owner[FS_SESSION_OWNER];
	if (id) {
		api_owner_of(api, r, owner);
		fs_streams_delete(api->streams, id, owner);
		fs_http_reply(r, 204, "application/json", NULL, "", 0);
	}
	free(id);
	fs_http_unref(r);
}

static void add_rows(const struct fs_api *api, const char *id, const uint8_t *owner, json_t *out)
{
	struct fs_session_row *rows = calloc(MAX_LOOKUP_ROWS, sizeof(*rows));
	size_t n = rows ? fs_streams_lookup(api->streams, id, owner, rows, MAX_LOOKUP_ROWS) : 0;
	for (size_t i = 0; i < n && json_array_size(out) < MAX_LOOKUP_ROWS; i++)
		json_array_append_new(
		        out, json_pack("{s:o, s:b, s:I, s:I, s:I}", "conversation_id", api_text(rows[i].id),
		                     "is_done", rows[i].done, "total_bytes", (json_int_t)rows[i].total_bytes,
		                     "started_at", (json_int_t)rows[i].started_at, "completed_at",
		                     (json_int_t)rows[i].completed_at));
	free(rows);
}

void fs_api_streams_lookup(void *arg, struct fs_http_request *r)
{
	const struct fs_api *api = arg;
	uint8_t owner[FS_SESSION_OWNER];
	size_t n;
	json_error_t je;
	const char *body = fs_http_body(r, &n);
	json_t *root = json_loadb(body, n, 0, &je), *out = json_array();
	if (!root) {
		char message[256];
		snprintf(message, sizeof(message), "invalid body: %s", je.text);
		const struct api_error err = {
		        .status = 400, .type = "invalid_request_error", .message = message};
		api_reply_error(r, &err);
	} else {
		size_t i;
		json_t *id;
		api_owner_of(api, r, owner);
		json_array_foreach(json_object_get(root, "conversation_ids"), i,
		        id) if (json_is_string(id) && json_string_length(id) > 0)
		        add_rows(api, json_string_value(id), owner, out);
		char *text = json_dumps(out, JSON_COMPACT);
		if (text)
			fs_http_reply(r, 200, NULL, NULL, text, strlen(text));
		else
			fs_http_stream_end(r);
		free(text);
	}
	json_decref(root);
	json_decref(out);
	fs_http_unref(r);
}
