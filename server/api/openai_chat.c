/* POST /v1/chat/completions: the shapes of its answers and chunks. */
#include "server/api/openai_chat.h"
#include "server/api/openai.h"

#include <stdlib.h>

static json_t *envelope(const struct api_call *c, json_t *choices, json_t *usage)
{
	return json_pack("{s:s, s:s, s:I, s:s, s:o, s:o?}", "id", c->id, "object", "chat.completion.chunk",
	        "created", (json_int_t)c->created, "model", c->api->model_name, "choices", choices, "usage",
	        usage);
}

/* The probabilities that have gathered go with whatever is sent next. */
static json_t *chunk(struct api_call *c, json_t *delta, const char *finish)
{
	return envelope(c,
	        json_pack("[{s:i, s:o, s:o?, s:s?}]", "index", 0, "delta", delta, "logprobs",
	                api_openai_take_logprobs(c), "finish_reason", finish),
	        NULL);
}

static json_t *tool_call(const struct api_tool_call *t)
{
	return json_pack("{s:s, s:s, s:{s:s, s:s}}", "id", t->id, "type", "function", "function", "name",
	        t->name, "arguments", t->arguments);
}

/* ---- streamed ---- */

static void begin(struct api_call *c)
{
	struct api_openai_chat_own *own = c->own;
	own->began = fs_now();
	api_call_send(c, NULL, chunk(c, json_pack("{s:s, s:s}", "role", "assistant", "content", ""), NULL));
}

/* llama.cpp's members: "processed" counts what came from the cache as well. */
static void progress(struct api_call *c, int32_t done, int32_t total, int32_t reused)
{
	const struct api_openai_chat_own *own = c->own;
	if (!own->progress)
		return;
	json_t *o = chunk(c, json_object(), NULL);
	json_object_set_new(o, "prompt_progress",
	        json_pack("{s:i, s:i, s:i, s:I}", "total", total, "cache", reused, "processed", done,
	                "time_ms", (json_int_t)((fs_now() - own->began) / FS_MS)));
	api_call_send(c, NULL, o);
}

static void text(struct api_call *c, const char *utf8, size_t n)
{
	api_call_send(c, NULL, chunk(c, json_pack("{s:s%}", "content", utf8, n), NULL));
}

static void call(struct api_call *c, const struct api_tool_call *t)
{
	const struct api_openai_chat_own *own = c->own;
	if (own->one_call && c->n_calls > 1)
		return;
	json_t *one = tool_call(t);
	json_object_set_new(one, "index", json_integer((json_int_t)c->n_calls - 1));
	api_call_send(c, NULL, chunk(c, json_pack("{s:[o]}", "tool_calls", one), NULL));
}

static void end(struct api_call *c, const struct fs_chat_report *rep)
{
	api_call_send(c, NULL, chunk(c, json_object(), api_openai_finish(c, rep)));
	if (c->include_usage)
		api_call_send(c, NULL, envelope(c, json_array(), api_usage(rep)));
	api_call_send_text(c, "data: [DONE]\n\n");
}

/* ---- whole ---- */

static json_t *message(const struct api_call *c)
{
	const struct api_openai_chat_own *own = c->own;
	size_t n = own->one_call ? FS_MIN(c->n_calls, (size_t)1) : c->n_calls;
	json_t *m = json_pack("{s:s, s:s%, s:n}", "role", "assistant", "content",
	        c->answer.data ? (char *)c->answer.data : "", c->answer.len, "refusal");
	if (n == 0)
		return m;
	json_t *calls = json_array();
	for (size_t i = 0; i < n; i++)
		json_array_append_new(calls, tool_call(&c->calls[i]));
	json_object_set_new(m, "tool_calls", calls);
	if (c->answer.len == 0)
		json_object_set_new(m, "content", json_null());
	return m;
}

static json_t *whole(struct api_call *c, const struct fs_chat_report *rep)
{
	return json_pack("{s:s, s:s, s:I, s:s, s:[{s:i, s:o, s:o?, s:s}], s:o, s:o}", "id", c->id, "object",
	        "chat.completion", "created", (json_int_t)c->created, "model", c->api->model_name, "choices",
	        "index", 0, "message", message(c), "logprobs", api_openai_take_logprobs(c), "finish_reason",
	        api_openai_finish(c, rep), "usage", api_usage(rep), "timings", api_timings(rep));
}

static void finish(struct api_call *c)
{
	free(c->own);
}

const struct api_dialect api_openai_chat = {.name = "chat.completions",
        .id_prefix = "chatcmpl-",
        .id_header = "x-request-id",
        .parse = api_openai_parse_chat,
        .begin = begin,
        .text = text,
        .call = call,
        .progress = progress,
        .end = end,
        .token = api_openai_chat_token,
        .whole = whole,
        .error = api_error_openai,
        .finish = finish};

void fs_api_chat_completions(void *arg, struct fs_http_request *r)
{
	api_call_start(arg, &api_openai_chat, r);
}
