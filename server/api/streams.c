/*
 * GET and DELETE /v1/stream, POST /v1/streams/lookup, and the followers that carry a session to a client.
 * Paths, texts and the loose reading of `from` are those of llama.cpp's server, whose clients come here too.
 */
#include "server/api/streams.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

/* A follower stops reading the session when so much waits for its client. */
#define ENOUGH_BACKLOG ((size_t)256 << 10)
#define PIECE ((size_t)64 << 10)
#define MAX_WHOLE ((size_t)32 << 20)
#define MAX_LOOKUP_ROWS 4096
#define MAX_LOOKUP_IDS 1024
#define MAX_LOOKUP_BODY ((size_t)512 << 10)
#define MAX_LOOKUP_COST ((size_t)1 << 20) /* of its values: sixteen times what the ids take */
/* A reader of an answer that will be a stream sees headers and a comment after this long. */
#define FIRST_SIGN_MS 5000
#define OFFSET_LOST "Stream offset lost, please restart"

void api_owner_of(const struct fs_http_request *r, uint8_t owner[FS_SESSION_OWNER])
{
	int32_t key = fs_http_key(r);
	memset(owner, 0, FS_SESSION_OWNER);
	memcpy(owner, &key, sizeof(key));
}

/* ---- followers ---- */

struct follower {
	atomic_int refs; /* the loop's until it ends, and one for each call under way */
	atomic_bool called;
	struct fs_http_request *r;
	struct fs_reader *reader; /* [loop] */
	struct fs_cancel_hook gone;
	struct fs_buf whole; /* [loop]; an answer that is no stream is sent when it is complete */
	bool announced;      /* [loop]; the stream begins by itself, soon */
	bool begun, ended;   /* [loop] */
	bool draining;       /* [loop]; it is called once its client has read, and has a reference for that */
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

static void on_drained(void *arg)
{
	struct follower *f = arg;
	f->draining = false;
	call_soon(f);
	follower_unref(f);
}

static void follower_end(struct follower *f)
{
	f->ended = true;
	fs_cancel_unlisten(fs_http_cancel(f->r), &f->gone);
	fs_reader_detach(f->reader);
	if (f->draining && fs_http_not_when_drained(f->r))
		follower_unref(f);
	follower_unref(f);
}

static void reply_error(struct fs_http_request *r, int status, const char *type, const char *message);

static void end_whole(struct follower *f, const struct fs_reader_kind *kind, ssize_t why)
{
	if (why == FS_ELIMIT) /* its first bytes were dropped as the last ones came */
		reply_error(f->r, 400, "invalid_request_error", OFFSET_LOST);
	else
		fs_http_reply(f->r, kind->status, kind->content_type,
		        kind->status == 503 ? "Retry-After: 2" : NULL,
		        f->whole.data ? (char *)f->whole.data : "", f->whole.len);
}

static void end_stream(struct follower *f, ssize_t why)
{
	static const char lost[] = "event: error\ndata: {\"error\":{\"code\":400,\"message\":\"" OFFSET_LOST
	                           "\",\"type\":\"invalid_request_error\"}}\n\n";
	if (why == FS_ELIMIT)
		fs_http_stream_write(f->r, lost, sizeof(lost) - 1);
	fs_http_stream_end(f->r);
}

/* What the session has, as far as the client takes it. 0: wait to be called again. last: the server ends, and
 * waits for no slow client. */
static ssize_t carry(struct follower *f, bool events, bool last)
{
	static _Thread_local char piece[PIECE];
	for (;;) {
		if (events && fs_http_stream_backlog(f->r) > ENOUGH_BACKLOG) {
			if (last)
				return FS_ECANCELLED;
			if (!f->draining) {
				f->draining = true;
				atomic_fetch_add(&f->refs, 1);
				fs_http_when_drained(f->r, on_drained, f);
			}
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

/* Its headers, as soon as they are known; before that, when events are to be expected, a sign of life. */
static void begin(struct follower *f, const struct fs_reader_kind *kind)
{
	if (kind->known && kind->events && !f->begun) {
		fs_http_stream_begin(f->r);
		f->begun = true;
	}
	if (kind->known || !kind->events_expected || f->announced)
		return;
	f->announced = true;
	if (kind->error_before)
		fs_http_set_stream_frame(f->r, kind->error_before, kind->error_after);
	fs_http_stream_begin_after(f->r, FIRST_SIGN_MS);
}

static bool is_head(const struct follower *f)
{
	return strcmp(fs_http_method(f->r), "HEAD") == 0;
}

/* HEAD asks for what is known at once. */
static void end_head(struct follower *f, const struct fs_reader_kind *kind)
{
	if (kind->events)
		fs_http_stream_end(f->r);
	else
		fs_http_reply(f->r, kind->status, kind->content_type, NULL, "", 0);
}

/* The loop's turn at a follower. A token that fired for another cause than the client's leaving ends nothing
 * here: the session's producer is told the same, and its last words are still to be sent. */
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
	begin(f, &kind);
	enum fs_cancel_cause cause = fs_cancel_cause(fs_http_cancel(f->r));
	bool left = cause == FS_CANCEL_CLIENT || cause == FS_CANCEL_UNREAD;
	ssize_t rc = left         ? FS_ECANCELLED
	             : kind.known ? carry(f, kind.events, cause == FS_CANCEL_SHUTDOWN)
	                          : 0;
	if (rc < 0) {
		if (left && !f->begun) /* it may have closed its writing side alone */
			reply_error(f->r, 499, "invalid_request_error",
			        "the client closed its side of the connection");
		else if (kind.known && !kind.events)
			end_whole(f, &kind, rc);
		else
			end_stream(f, rc);
		follower_end(f);
	} else if (kind.known && is_head(f)) {
		end_head(f, &kind);
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
	api_owner_of(r, owner);
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
	api_owner_of(r, owner);
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
		api_owner_of(r, owner);
		fs_streams_delete(api->streams, id, owner);
		fs_http_reply(r, 204, "application/json", NULL, "", 0);
	}
	free(id);
	fs_http_unref(r);
}

static void add_rows(const struct fs_api *api, const char *id, const uint8_t *owner,
        struct fs_session_row *rows, json_t *out)
{
	size_t n = fs_streams_lookup(api->streams, id, owner, rows, MAX_LOOKUP_ROWS - json_array_size(out));
	for (size_t i = 0; i < n; i++)
		json_array_append_new(
		        out, json_pack("{s:o, s:b, s:I, s:I, s:I}", "conversation_id", api_text(rows[i].id),
		                     "is_done", rows[i].done, "total_bytes", (json_int_t)rows[i].total_bytes,
		                     "started_at", (json_int_t)rows[i].started_at, "completed_at",
		                     (json_int_t)rows[i].completed_at));
}

/* NULL: memory is out. */
static json_t *look_up(const struct fs_api *api, const struct fs_http_request *r, const json_t *ids)
{
	struct fs_session_row *rows = calloc(MAX_LOOKUP_ROWS, sizeof(*rows));
	json_t *out = rows ? json_array() : NULL;
	uint8_t owner[FS_SESSION_OWNER];
	api_owner_of(r, owner);
	for (size_t i = 0; out && i < json_array_size(ids); i++) {
		const json_t *id = json_array_get(ids, i);
		if (json_string_length(id) > 0)
			add_rows(api, json_string_value(id), owner, rows, out);
	}
	free(rows);
	return out;
}

/* On the loop, so both the body and the number of look-ups are kept small. NULL: *root is the request. */
static const char *read_lookup(const char *body, size_t n, json_t **root, char *text, size_t cap)
{
	json_error_t je;
	if (n > MAX_LOOKUP_BODY || api_json_cost(body, n) > MAX_LOOKUP_COST)
		return "invalid body: it is too large";
	*root = json_loadb(body, n, 0, &je);
	if (!*root)
		snprintf(text, cap, "invalid body: %s", je.text);
	else if (json_array_size(json_object_get(*root, "conversation_ids")) > MAX_LOOKUP_IDS)
		snprintf(text, cap, "invalid body: more than %d conversation_ids", MAX_LOOKUP_IDS);
	else
		return NULL;
	return text;
}

void fs_api_streams_lookup(void *arg, struct fs_http_request *r)
{
	size_t n;
	char text[256];
	json_t *root = NULL;
	const char *body = fs_http_body(r, &n), *wrong = read_lookup(body, n, &root, text, sizeof(text));
	if (wrong) {
		const struct api_error err = {
		        .status = 400, .type = "invalid_request_error", .message = wrong};
		api_reply_error(r, &err);
		fs_http_unref(r);
	} else {
		api_reply_json(r, look_up(arg, r, json_object_get(root, "conversation_ids")));
	}
	json_decref(root);
}
