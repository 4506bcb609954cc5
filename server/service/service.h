/*
 * service: the life of a request between the API and engine, vision hosts and their queues. Owns the workers,
 * the books and, unless it is given one, the turn; borrows the rest, which must outlive it. A request is
 * carried by one worker thread from its body to its end: pictures first, without the engine's turn; then the
 * turn; then generation. It knows nothing of HTTP or of any API's JSON.
 */
#ifndef FS_SERVER_SERVICE_H
#define FS_SERVER_SERVICE_H

#include "common/image/image.h"
#include "server/engine/engine.h"
#include "server/service/books.h"
#include "server/service/flight.h"
#include "server/service/turn.h"
#include "server/vision/vision.h"

struct fs_service;
struct fs_fetch;

struct fs_service_opts {
	struct fs_engine *engine;
	struct fs_vision *vision;   /* NULL or without hosts: pictures are refused */
	struct fs_flights *flights; /* of the same vision; NULL without one */
	struct fs_turn *turn;   /* shared with an encoder on this machine's GPU; NULL: the service's own */
	struct fs_fetch *fetch; /* NULL: picture URLs are refused */
	int workers;            /* requests at once; their threads are started as they are needed */
	int queue_depth;        /* waiting for the turn */
	size_t max_pictures;
	struct fs_image_limits picture; /* of one picture */
	/* Absolute paths of the folders whose files requests may name as pictures; borrowed. 0 = none may. */
	const char *const *picture_folders;
	size_t n_picture_folders;
};
int fs_service_create(const struct fs_service_opts *o, struct fs_service **out, struct fs_errbuf *e);
/* Waits for the workers; cancel the requests before. NULL is fine. */
void fs_service_destroy(struct fs_service *s);
const struct fs_service_opts *fs_service_opts(const struct fs_service *s);

struct fs_books *fs_service_books(struct fs_service *s);
size_t fs_service_running(struct fs_service *s); /* calls that a worker carries */
struct fs_turn_state {
	bool held;             /* by a request, or by an encoder on this machine's GPU */
	size_t waiting, depth; /* depth: the most that may wait */
	uint64_t entries;      /* how often it was taken since the start */
};
void fs_service_turn(struct fs_service *s, struct fs_turn_state *out);

/* Runs fn(arg) on a worker of its own; FS_EUNAVAILABLE when all are busy. */
int fs_service_submit(struct fs_service *s, void (*fn)(void *arg), void *arg);

/* ---- a chat, parsed; all memory is its own, freed by fs_chat_finish ---- */

struct fs_picture {
	uint8_t *bytes; /* encoded picture; NULL until it is fetched from url or read from path */
	size_t n;
	char *url;          /* http(s); NULL = bytes came with the request, or: */
	char *path;         /* a file of picture_folders; NULL = none */
	int32_t max_tokens; /* most rows, from "detail": "low"; 0 = what the encoder takes */
	bool cached;        /* its rows were there already; known once it was encoded */
	char where[96];     /* the request's field, for errors: "messages[1].content[0].image_url.url" */
};
struct fs_chat_part {
	char *text; /* NULL: the picture at `picture` */
	size_t text_len;
	size_t picture;
};
struct fs_chat_call {
	char *name, *arguments; /* JSON text of an object */
};
struct fs_chat_message {
	enum fs_role role;
	struct fs_chat_part *parts;
	size_t n_parts;
	struct fs_chat_call *calls; /* an assistant's */
	size_t n_calls;
};
struct fs_chat_tool {
	char *name, *description, *parameters; /* description and parameters (JSON text) may be NULL */
};
struct fs_chat {
	const char *field; /* what the prompt is called in that API, for errors; static; NULL = "messages" */
	struct fs_chat_message *messages;
	size_t n_messages;
	char *text; /* instead of messages: the prompt as it is, text_len bytes */
	size_t text_len;
	int32_t *ids; /* instead of messages: the prompt as token ids */
	size_t n_ids;
	struct fs_picture *pictures;
	size_t n_pictures;
	struct fs_chat_tool *tools;
	size_t n_tools;
	enum fs_tool_choice choice;
	char *named;              /* of FS_TOOLS_NAMED */
	struct fs_gen_params gen; /* stops point into `stops` */
	char *stops[FS_MAX_STOPS];
};
void fs_chat_finish(struct fs_chat *c);

/* Why a request is refused, in the terms that every API's error envelope needs. */
struct fs_refusal {
	int status;        /* 400, 500, 503 */
	const char *type;  /* "invalid_request_error", "unavailable_error", "server_error" */
	const char *code;  /* machine-readable; NULL = none */
	char param[96];    /* field of the request; "" = none */
	int retry_after_s; /* when asking again may help; 0 = not known */
	struct fs_errbuf text;
};
/* Fills it and returns FS_EINVAL. */
int fs_refuse(struct fs_refusal *r, int status, const char *type, const char *code, const char *param,
        const char *fmt, ...) FS_PRINTF(6, 7);

struct fs_picture_report {
	char host[64];
	int32_t tokens;
	bool cached; /* its rows were there already; the times are 0 then */
	double encode_ms, queue_ms, total_ms;
};
#define FS_MAX_PICTURE_REPORTS 16
struct fs_chat_report {              /* where the time went */
	int64_t prepare_ns, wait_ns; /* pictures; the turn */
	size_t n_calls;              /* of tools, in the answer */
	struct fs_gen_result gen;
	struct fs_picture_report pictures[FS_MAX_PICTURE_REPORTS]; /* the first ones */
	size_t n_pictures;
};
/* What comes of a chat on its way. Any may be NULL. prepared and start come on the worker, the others on the
 * engine's thread and, at the end, on the worker; never two at once. */
struct fs_chat_sink {
	void *arg;
	void (*prepared)(void *arg); /* the prompt is made: nothing else of the request's content is needed */
	void (*start)(void *arg);    /* the request is good and its turn has come */
	void (*progress)(void *arg, int32_t done, int32_t total, int32_t reused); /* of the prompt */
	void (*text)(void *arg, const char *utf8, size_t n);
	void (*call)(void *arg, const char *name, const char *arguments); /* a call of a tool */
	void (*token)(void *arg, const struct fs_token_event *t);         /* with gen.logprobs */
};
/*
 * Carries a chat to its end on the calling worker and tells rec (may be NULL) its phases. FS_OK: *report is
 * filled; its finish may be cancel. Negative: *why is filled, unless it is FS_ECANCELLED (nobody waits for an
 * answer then, or the deadline passed: fs_cancel_cause tells). Pictures' bytes are gone afterwards.
 */
int fs_service_chat(struct fs_service *s, struct fs_chat *chat, struct fs_cancel *cancel,
        struct fs_record *rec, const struct fs_chat_sink *sink, struct fs_chat_report *report,
        struct fs_refusal *why);
/* The prompt's length in tokens, pictures encoded (and cached) for it. Takes no turn. */
int fs_service_count(struct fs_service *s, struct fs_chat *chat, struct fs_cancel *cancel,
        struct fs_record *rec, int32_t *tokens, struct fs_refusal *why);

#endif
