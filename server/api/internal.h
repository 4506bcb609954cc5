/* The shapes of OpenAI's answers, shared by the files of api. JSON values are new references; NULL when
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
json_t *api_completion(const char *id, int64_t created, const char *model, const char *text, size_t n,
        const struct fs_chat_report *rep);
/* One streamed chunk. Takes delta over; NULL delta: no choices, only usage. */
json_t *api_chunk(const char *id, int64_t created, const char *model, json_t *delta, const char *finish,
        const json_t *usage);

/* Ends the request with the error envelope. 503 carries Retry-After. */
void api_error(struct fs_http_request *r, int status, const char *type, const char *code, const char *param,
        const char *message);
void api_refusal(struct fs_http_request *r, const struct fs_refusal *why);

#endif
