/* The shapes that the files of api share. JSON values are new references; NULL when
 * memory is out. */
#ifndef FS_SERVER_API_INTERNAL_H
#define FS_SERVER_API_INTERNAL_H

#include "server/api/api.h"

#include <jansson.h>

/* Text from outside (errors that quote, names that were cut): bytes that are no UTF-8 come out as '?'. */
json_t *api_text(const char *s);
const char *api_finish_name(enum fs_finish f); /* "stop", "length" */
json_t *api_usage(const struct fs_chat_report *rep);
/* Where the time went: llama.cpp's "timings" names, and one entry a picture. */
json_t *api_timings(const struct fs_chat_report *rep);
/* An error in the terms of every API's envelope; NULL = none. */
struct api_error {
	int status;
	const char *type, *code, *param, *message;
};
json_t *api_error_openai(const struct api_error *err);
json_t *api_error_anthropic(const struct api_error *err);
/* Ends a request that is no call with OpenAI's envelope. */
void api_reply_error(struct fs_http_request *r, const struct api_error *err);
/* Ends a request that is no call with 200, and gives up its reference. Takes o over; NULL: memory was out. */
void api_reply_json(struct fs_http_request *r, json_t *o);
void api_reply_status_json(struct fs_http_request *r, int status, json_t *o); /* the same with any status */
/* Whether pictures can be taken, and each host's state; with all its counters when `whole`. v NULL = none. */
json_t *api_vision(struct fs_vision *v, bool whole);
/* What became of the config, for /status and for who had it read again. */
json_t *api_settings(const struct fs_api_settings_state *s);
/* Appends the page of GET /metrics; b holds at least 512 KiB. FS_ENOMEM. */
int api_metrics_page(const struct fs_api *api, struct fs_buf *b);

/* ---- json.c: bodies ---- */

/* The body as a JSON object, and what its values were counted as: to be released once neither they nor what
 * was made of them is kept. FS_ECANCELLED, or the refusal is filled; nothing is to be released then. */
int api_load_json(const char *text, size_t n, struct fs_cancel *cancel, json_t **out, size_t *cost,
        struct fs_refusal *why);
void api_json_release(size_t cost);
/* Bytes that the values of a JSON text will take, about; its strings' bytes aside. */
size_t api_json_cost(const char *text, size_t n);

#endif
