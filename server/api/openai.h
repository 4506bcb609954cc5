/*
 * OpenAI's APIs as dialects of call.h: chat completions, completions (the older one, of plain text) and
 * responses, without any state between requests. Reference: OpenAI's API, "Create chat completion", "Create
 * completion" and "Create a model response". Beyond it: llama.cpp's sampling members, "ignore_eos",
 * "timeout_s" and "return_progress".
 */
#ifndef FS_SERVER_API_OPENAI_H
#define FS_SERVER_API_OPENAI_H

#include "server/api/call.h"
#include "server/api/parse.h"

extern const struct api_dialect api_openai_chat, api_openai_completions, api_openai_responses;

/* ---- reading: as parse.h ---- */

int api_openai_parse_chat(struct api_call *c, const json_t *root, struct fs_refusal *why);
int api_openai_parse_completion(struct api_call *c, const json_t *root, struct fs_refusal *why);
int api_openai_parse_response(struct api_call *c, const json_t *root, struct fs_refusal *why);

/* "stream", "stream_options" and "model". */
int api_openai_get_stream(struct api_reader *rd, const json_t *root, struct api_call *c);
/* Refuses what asks for several answers, or for tokens to be favoured: "n", "logit_bias". */
int api_openai_check_common(struct api_reader *rd, const json_t *root);
/* Whether a member is there and holds anything: not null, false, 0, "", [] or {}. */
bool api_openai_is_set(const json_t *root, const char *key);
/* An array of parts, or a string, as the content of m; where names it. Parts of both chat and responses are
 * taken; `wanted` lists those of this API, for the error. m must have room for api_openai_n_parts. */
int api_openai_add_content(struct api_reader *rd, struct fs_chat_message *m, const json_t *content,
        const char *where, const char *wanted);
/* FS_EINVAL when it is neither. */
int api_openai_n_parts(struct api_reader *rd, const json_t *content, const char *where, size_t *n);

/* The members "tools", "tool_choice" and "parallel_tool_calls". Chat wraps name and schema in an object
 * "function", responses does not. *one_call: only the first call of the answer is wanted. */
int api_openai_get_tools(struct api_reader *rd, const json_t *root, bool wrapped, bool *one_call);
/* One call of an earlier answer, with members name and arguments (JSON text of an object, or ""). */
int api_openai_add_call(struct api_reader *rd, struct fs_chat_message *m, const json_t *o, const char *where);

/* At the end of reading: an answer in one piece has no more tokens than probabilities can be kept for. */
void api_openai_bound_logprobs(struct api_call *c);

/* ---- shaping ---- */

/* "stop", "length", "tool_calls". */
const char *api_openai_finish(const struct api_call *c, const struct fs_chat_report *rep);

/* Token events go into c->logprobs, in the shape of chat or of completions; sets c->overflow when they are
 * more than a server should hold. */
void api_openai_chat_token(struct api_call *c, const struct fs_token_event *t);
void api_openai_completion_token(struct api_call *c, const struct fs_token_event *t);
/* What has gathered there, as the member "logprobs"; NULL (for null) when there is none or none was asked
 * for. */
json_t *api_openai_take_logprobs(struct api_call *c);

#endif
