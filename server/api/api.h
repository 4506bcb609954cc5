/*
 * api: the JSON of the APIs on top of service: parsing and checking requests, shaping answers, events and
 * errors. Handlers run on the HTTP loop; they answer at once or hand over to a worker. call.h holds what
 * all APIs share; each API is a dialect of it. Reference: OpenAI's API, "Create chat completion" and "List
 * models"; Anthropic's as said in anthropic.h.
 */
#ifndef FS_SERVER_API_H
#define FS_SERVER_API_H

#include "server/http/http.h"
#include "server/service/service.h"
#include "server/stream/stream.h"

/* What became of the config since the start. */
struct fs_api_settings_state {
	int64_t loaded_wall; /* milliseconds; of what runs */
	uint64_t reads;      /* since the start, failed ones included */
	char error[512];     /* of the last one; "" = it was taken */
	char restart[1024];  /* keys that have changed since and need a restart: "listen, threads" */
	struct fs_vision_change hosts; /* of the last one */
};
/* Who reads the config. Both are called on the HTTP loop and do not block. ask hands the request over to who
 * answers it with fs_api_reloaded, on any thread; on failure it stays the caller's. file: the config that the
 * client means, NULL = any. FS_EUNAVAILABLE: busy or ending, may be asked again. */
struct fs_api_settings {
	int (*ask)(void *arg, const char *file, struct fs_http_request *r, struct fs_errbuf *e);
	void (*tell)(void *arg, struct fs_api_settings_state *out);
	void *arg;
};

struct fs_api {
	struct fs_service *service;
	const char *model_name;        /* in answers and in /v1/models */
	int64_t created;               /* wall clock seconds, of /v1/models */
	struct fs_gen_params sampling; /* what a request does not say */
	struct fs_streams *streams;    /* NULL: no answer outlives its client */
	const struct fs_http *http;    /* NULL: nothing is told of what it answers by itself */
	struct fs_api_settings settings;
};

/* Handlers; arg is a struct fs_api. */
void fs_api_chat_completions(void *arg, struct fs_http_request *r); /* POST /v1/chat/completions */
void fs_api_completions(void *arg, struct fs_http_request *r);      /* POST /v1/completions */
void fs_api_responses(void *arg, struct fs_http_request *r);        /* POST /v1/responses */
void fs_api_no_response(void *arg, struct fs_http_request *r);      /* what is below it */
void fs_api_messages(void *arg, struct fs_http_request *r);         /* POST /v1/messages */
void fs_api_count_tokens(void *arg, struct fs_http_request *r);     /* POST /v1/messages/count_tokens */
void fs_api_models(void *arg, struct fs_http_request *r);           /* GET /v1/models */
void fs_api_health(void *arg, struct fs_http_request *r);           /* GET /health */
void fs_api_status(void *arg, struct fs_http_request *r);           /* GET /status */
void fs_api_history(void *arg, struct fs_http_request *r);          /* GET /v1/history */
void fs_api_stream_get(void *arg, struct fs_http_request *r);       /* GET /v1/stream[/<id>] */
void fs_api_stream_delete(void *arg, struct fs_http_request *r);    /* DELETE of the same */
void fs_api_streams_lookup(void *arg, struct fs_http_request *r);   /* POST /v1/streams/lookup */
void fs_api_metrics(void *arg, struct fs_http_request *r);          /* GET /metrics */
void fs_api_reload(void *arg, struct fs_http_request *r);           /* POST /v1/reload */
/* Ends such a request, and gives up its reference. NULL: nobody reads the config any more. */
void fs_api_reloaded(struct fs_http_request *r, const struct fs_api_settings_state *s);

/* Errors that http answers itself, in the envelope of the API that the path belongs to: an
 * fs_http_error_body. */
int fs_api_error_body(const char *path, int status, const char *type, const char *code, const char *message,
        struct fs_buf *out);

/* ---- for tests and fuzzing ---- */

/*
 * RFC 2397 "data:" URL with ";base64": any media type or none, any parameters, any case; padding may be
 * missing; white space is skipped. *bytes is malloc'd. FS_EINVAL, FS_ELIMIT (more than max bytes).
 */
int fs_data_url_decode(
        const char *url, size_t n, size_t max, uint8_t **bytes, size_t *len, struct fs_errbuf *e);
/* The same without the URL around it. */
int fs_base64_decode(
        const char *data, size_t n, size_t max, uint8_t **bytes, size_t *len, struct fs_errbuf *e);

/* Whether it names a file of this machine: a "file:" URL (RFC 8089), or an absolute path. */
bool fs_file_url_is(const char *url);
/* Its path, malloc'd. FS_EINVAL: another machine's, or wrong escapes; the text goes behind the URL's name. */
int fs_file_url_decode(const char *url, char **path, struct fs_errbuf *e);

#endif
