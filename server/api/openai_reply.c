/* The shapes of OpenAI's answers and errors. Pure functions but for the two that reply. */
#include "server/api/internal.h"

#include <stdlib.h>
#include <string.h>

json_t *api_text(const char *s)
{
	json_t *j = json_string(s);
	char *copy = j ? NULL : strdup(s);
	if (!copy)
		return j;
	size_t n = strlen(s);
	for (size_t i = 0; i < n;) {
		unsigned char lead = (unsigned char)copy[i];
		size_t len = lead < 0x80 ? 1 : lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4;
		json_t *one = len <= n - i ? json_stringn(copy + i, len) : NULL; /* jansson is the judge */
		if (!one)
			copy[i] = '?';
		i += one ? len : 1;
		json_decref(one);
	}
	j = json_string(copy);
	free(copy);
	return j;
}

const char *api_finish_name(enum fs_finish f)
{
	return f == FS_FINISH_LENGTH ? "length" : "stop";
}

json_t *api_usage(const struct fs_chat_report *rep)
{
	const struct fs_gen_result *g = &rep->gen;
	return json_pack("{s:i, s:i, s:i, s:{s:i}}", "prompt_tokens", g->prompt_tokens, "completion_tokens",
	        g->completion_tokens, "total_tokens", g->prompt_tokens + g->completion_tokens,
	        "prompt_tokens_details", "cached_tokens", g->reused_tokens);
}

static double ms(int64_t ns)
{
	return (double)ns / 1e6;
}

json_t *api_timings(const struct fs_chat_report *rep)
{
	const struct fs_gen_result *g = &rep->gen;
	json_t *pictures = json_array();
	for (size_t i = 0; i < rep->n_pictures; i++) {
		const struct fs_picture_report *p = &rep->pictures[i];
		json_array_append_new(pictures,
		        json_pack("{s:o, s:i, s:f, s:f, s:f}", "host", api_text(p->host), "tokens", p->tokens,
		                "encode_ms", p->encode_ms, "queue_ms", p->queue_ms, "total_ms", p->total_ms));
	}
	return json_pack("{s:f, s:f, s:i, s:i, s:f, s:i, s:f, s:o}", "prepare_ms", ms(rep->prepare_ns),
	        "wait_ms", ms(rep->wait_ns), "cache_n", g->reused_tokens, "prompt_n",
	        g->prompt_tokens - g->reused_tokens, "prompt_ms", ms(g->prefill_ns), "predicted_n",
	        g->completion_tokens, "predicted_ms", ms(g->decode_ns), "pictures", pictures);
}

json_t *api_completion(const char *id, int64_t created, const char *model, const char *text, size_t n,
        const struct fs_chat_report *rep)
{
	return json_pack("{s:s, s:s, s:I, s:s, s:[{s:i, s:{s:s, s:s%}, s:n, s:s}], s:o, s:o}", "id", id,
	        "object", "chat.completion", "created", (json_int_t)created, "model", model, "choices",
	        "index", 0, "message", "role", "assistant", "content", text, n, "logprobs", "finish_reason",
	        api_finish_name(rep->gen.finish), "usage", api_usage(rep), "timings", api_timings(rep));
}

json_t *api_chunk(const char *id, int64_t created, const char *model, json_t *delta, const char *finish,
        const json_t *usage)
{
	json_t *choices = delta ? json_pack("[{s:i, s:o, s:n, s:s?}]", "index", 0, "delta", delta, "logprobs",
	                                  "finish_reason", finish)
	                        : json_array();
	return json_pack("{s:s, s:s, s:I, s:s, s:o, s:O?}", "id", id, "object", "chat.completion.chunk",
	        "created", (json_int_t)created, "model", model, "choices", choices, "usage", (json_t *)usage);
}

void api_error(struct fs_http_request *r, int status, const char *type, const char *code, const char *param,
        const char *message)
{
	json_t *o = json_pack("{s:{s:o, s:s, s:s?, s:s?}}", "error", "message", api_text(message), "type",
	        type, "param", param, "code", code);
	char *text = o ? json_dumps(o, JSON_COMPACT) : NULL;
	const char *body = text ? text
	                        : "{\"error\":{\"message\":\"internal "
	                          "error\",\"type\":\"server_error\",\"param\":null,\"code\":null}}";
	fs_http_reply(r, status, NULL, status == 503 ? "Retry-After: 2" : NULL, body, strlen(body));
	json_decref(o);
	free(text);
}

void api_refusal(struct fs_http_request *r, const struct fs_refusal *why)
{
	api_error(r, why->status, why->type, why->code, why->param[0] ? why->param : NULL, why->text.text);
}
