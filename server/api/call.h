/*
 * call: what all APIs share in the life of one request on its worker: the record, reading the JSON, carrying
 * the chat, collecting or streaming the answer, and its end. What differs between them is a dialect: a table
 * of functions that read that API's request and shape its answer.
 *
 * Threads: a call belongs to its worker; text, call, token and progress come on the engine's thread while the
 * worker waits for it.
 */
#ifndef FS_SERVER_API_CALL_H
#define FS_SERVER_API_CALL_H

#include "server/api/internal.h"

struct api_call;
struct api_tool_call {
	char id[40];
	char *name, *arguments; /* arguments: JSON text of an object */
};

struct api_dialect {
	const char *name;      /* in records: "chat.completions" */
	const char *id_prefix; /* "chatcmpl-" */
	const char *id_header; /* the answer's header that holds the id, as that API's clients show it */
	/* What stands around an error's JSON when it has to go out as an event; NULL: as OpenAI's chat. */
	const char *error_before, *error_after;
	/* Fills c->chat and the call's options; c->chat.gen holds the config's sampling before. Everything is
	   checked and copied. */
	int (*parse)(struct api_call *c, const json_t *root, struct fs_refusal *why);
	/* Not NULL: the prompt is only counted, and this makes the answer. */
	json_t *(*counted)(struct api_call *c, int32_t tokens);
	/* Streamed: the first events (the turn has come), pieces of the answer, the last events. text, call,
	   progress and token may be NULL. */
	void (*begin)(struct api_call *c);
	void (*text)(struct api_call *c, const char *utf8, size_t n);
	void (*call)(struct api_call *c, const struct api_tool_call *t);
	void (*progress)(struct api_call *c, int32_t done, int32_t total, int32_t reused);
	void (*end)(struct api_call *c, const struct fs_chat_report *rep);
	/* With gen.logprobs, streamed or not, before the text that the token belongs to. */
	void (*token)(struct api_call *c, const struct fs_token_event *t);
	/* Not streamed: the whole answer, from c->answer and c->calls. */
	json_t *(*whole)(struct api_call *c, const struct fs_chat_report *rep);
	json_t *(*error)(const struct api_error *err);
	/* Streamed, and begin was called: the one event that ends it when it went wrong, and what stands
	   before its JSON instead of error_before. NULL: error's JSON as an event. */
	json_t *(*failed)(struct api_call *c, const struct api_error *err);
	const char *failed_before;
	void (*finish)(struct api_call *c); /* frees `own`; may be NULL */
};

struct api_call {
	const struct fs_api *api;
	const struct api_dialect *d;
	struct fs_http_request *r;
	struct fs_record *rec;
	struct fs_cancel *cancel;   /* of the work: the request's own, or one that outlives it */
	struct fs_session *session; /* NULL: the client asked for none */
	bool followed;              /* a streamed answer goes to the session alone */
	char id[48];
	int64_t created; /* wall clock seconds */

	/* from the request */
	struct fs_chat chat;
	bool stream;
	bool include_usage;
	int64_t timeout_s; /* 0 = the server's */
	void *own;         /* the dialect's */
	size_t json_cost;  /* of its body */

	/* the answer so far */
	struct fs_buf answer; /* not streamed: its text */
	bool begun;           /* streamed: begin was called */
	bool overflow;        /* it is larger than this server can hold, or memory was out */
	int retry_after_s;    /* of a refusal, when the client may try again; 0 = what is usual */
	struct api_tool_call *calls;
	size_t n_calls;
	json_t *logprobs; /* the dialect's, kept for it until the end */
};

/* The body of every handler of a dialect: hands the request to a worker. */
void api_call_start(const struct fs_api *api, const struct api_dialect *d, struct fs_http_request *r);
/* Streams one event: "event: <event>" when not NULL, and o as "data: …". Takes o over; NULL o: memory was
 * out, nothing is sent. */
void api_call_send(struct api_call *c, const char *event, json_t *o);
void api_call_send_text(struct api_call *c, const char *bytes); /* as it is */
/* Reads a request's body into c, whose api and d are set; for run, tests and fuzzing. FS_ECANCELLED, or the
 * refusal is filled. api_call_finish frees what c holds, on failure too. */
int api_call_parse(
        struct api_call *c, const char *body, size_t n, struct fs_cancel *cancel, struct fs_refusal *why);
void api_call_finish(struct api_call *c);

/* ---- output.c: where the answer goes; for call.c ---- */

int api_out_open(struct api_call *c); /* makes `cancel` and `session`; FS_ENOMEM */
/* The answer will be streamed: the client sees a first sign of life after first_sign_ms at the latest. */
void api_out_stream(struct api_call *c, int first_sign_ms);
void api_out_begin(struct api_call *c);
void api_out_events(struct api_call *c, const void *data, size_t n);
void api_out_end(struct api_call *c);
/* One answer or error; header as fs_http_reply's. */
void api_out_whole(struct api_call *c, int status, const char *header, const char *json);
void api_out_close(struct api_call *c); /* the producer's end, after everything else */

/* prefix and 24 random hexadecimal digits. */
void api_make_id(char *out, size_t cap, const char *prefix);

#endif
