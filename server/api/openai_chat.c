/* POST /v1/chat/completions: the shapes of its answers and chunks. */
#include "server/api/openai.h"

static json_t *chunk(const struct api_call *c, json_t *delta, const char *finish, json_t *usage)
{
	json_t *choices = delta ? json_pack("[{s:i, s:o, s:n, s:s?}]", "index", 0, "delta", delta, "logprobs",
	                                  "finish_reason", finish)
	                        : json_array();
	return json_pack("{s:s, s:s, s:I, s:s, s:o, s:o?}", "id", c->id, "object", "chat.completion.chunk",
	        "created", (json_int_t)c->created, "model", c->api->model_name, "choices", choices, "usage",
	        usage);
}

static void begin(struct api_call *c)
{
	api_call_send(
	        c, NULL, chunk(c, json_pack("{s:s, s:s}", "role", "assistant", "content", ""), NULL, NULL));
}

static void text(struct api_call *c, const char *utf8, size_t n)
{
	api_call_send(c, NULL, chunk(c, json_pack("{s:s%}", "content", utf8, n), NULL, NULL));
}

static void end(struct api_call *c, const struct fs_chat_report *rep)
{
	api_call_send(c, NULL, chunk(c, json_object(), api_finish_name(rep->gen.finish), NULL));
	if (c->include_usage)
		api_call_send(c, NULL, chunk(c, NULL, NULL, api_usage(rep)));
	api_call_send_text(c, "data: [DONE]\n\n");
}

static json_t *whole(struct api_call *c, const struct fs_chat_report *rep)
{
	return json_pack("{s:s, s:s, s:I, s:s, s:[{s:i, s:{s:s, s:s%}, s:n, s:s}], s:o, s:o}", "id", c->id,
	        "object", "chat.completion", "created", (json_int_t)c->created, "model", c->api->model_name,
	        "choices", "index", 0, "message", "role", "assistant", "content",
	        c->answer.data ? (char *)c->answer.data : "", c->answer.len, "logprobs", "finish_reason",
	        api_finish_name(rep->gen.finish), "usage", api_usage(rep), "timings", api_timings(rep));
}

const struct api_dialect api_openai_chat = {.name = "chat.completions",
        .id_prefix = "chatcmpl-",
        .parse = api_openai_parse_chat,
        .begin = begin,
        .text = text,
        .end = end,
        .whole = whole,
        .error = api_error_openai};

void fs_api_chat_completions(void *arg, struct fs_http_request *r)
{
	api_call_start(arg, &api_openai_chat, r);
}
