/*
 * POST /v1/messages and /v1/messages/count_tokens: the shapes of answers, events and errors. A stream is a
 * message of blocks: text or one call of a tool each, one open at a time. It begins with the first sign from
 * the engine, when it is known how much of the prompt is reused, since its first event has to tell.
 */
#include "server/api/anthropic.h"

#include <stdlib.h>
#include <string.h>

/* ---- shapes ---- */

/* In that API's terms input_tokens are those that were not taken from a cache. */
static json_t *usage(int32_t prompt, int32_t reused, int32_t output)
{
	return json_pack("{s:i, s:i, s:i, s:i}", "input_tokens", prompt - reused,
	        "cache_creation_input_tokens", 0, "cache_read_input_tokens", reused, "output_tokens", output);
}

static json_t *message(
        const struct api_call *c, json_t *content, const char *reason, const char *stop, json_t *counts)
{
	return json_pack("{s:s, s:s, s:s, s:s, s:o, s:s?, s:s?, s:o}", "id", c->id, "type", "message", "role",
	        "assistant", "model", c->api->model_name, "content", content, "stop_reason", reason,
	        "stop_sequence", stop, "usage", counts);
}

static const char *stop_reason(const struct api_call *c, const struct fs_chat_report *rep)
{
	if (rep->gen.finish == FS_FINISH_LENGTH)
		return "max_tokens";
	if (rep->gen.stop)
		return "stop_sequence";
	return c->n_calls > 0 ? "tool_use" : "end_turn";
}

/* Clients of that API take ids of calls by this prefix. */
static json_t *call_id(const struct api_tool_call *t)
{
	const char *random = strchr(t->id, '_');
	return json_sprintf("toolu_%s", random ? random + 1 : t->id);
}

static json_t *tool_use(const struct api_tool_call *t, json_t *input)
{
	return json_pack("{s:s, s:o, s:s, s:o}", "type", "tool_use", "id", call_id(t), "name", t->name,
	        "input", input ? input : json_object());
}

/* ---- whole ---- */

static json_t *whole(struct api_call *c, const struct fs_chat_report *rep)
{
	const struct api_anthropic *own = c->own;
	json_t *content = json_array();
	if (c->answer.len > 0)
		json_array_append_new(content, json_pack("{s:s, s:s%}", "type", "text", "text",
		                                       (char *)c->answer.data, c->answer.len));
	size_t n = own->one_call ? FS_MIN(c->n_calls, (size_t)1) : c->n_calls;
	for (size_t i = 0; i < n; i++)
		json_array_append_new(content,
		        tool_use(&c->calls[i], json_loads(c->calls[i].arguments, JSON_ALLOW_NUL, NULL)));
	return message(c, content, stop_reason(c, rep), rep->gen.stop,
	        usage(rep->gen.prompt_tokens, rep->gen.reused_tokens, rep->gen.completion_tokens));
}

static json_t *counted(struct api_call *c, int32_t tokens)
{
	return json_pack("{s:i}", "input_tokens", tokens);
}

/* ---- streamed ---- */

static void start(struct api_call *c)
{
	struct api_anthropic *own = c->own;
	if (own->started)
		return;
	own->started = true;
	api_call_send(c, "message_start",
	        json_pack("{s:s, s:o}", "type", "message_start", "message",
	                message(c, json_array(), NULL, NULL, usage(own->prompt, own->reused, 0))));
	api_call_send(c, "ping", json_pack("{s:s}", "type", "ping"));
}

static void open_block(struct api_call *c, json_t *block)
{
	const struct api_anthropic *own = c->own;
	api_call_send(c, "content_block_start",
	        json_pack("{s:s, s:i, s:o}", "type", "content_block_start", "index", own->block,
	                "content_block", block));
}

static void send_delta(struct api_call *c, json_t *delta)
{
	const struct api_anthropic *own = c->own;
	api_call_send(c, "content_block_delta",
	        json_pack("{s:s, s:i, s:o}", "type", "content_block_delta", "index", own->block, "delta",
	                delta));
}

static void close_block(struct api_call *c)
{
	struct api_anthropic *own = c->own;
	api_call_send(c, "content_block_stop",
	        json_pack("{s:s, s:i}", "type", "content_block_stop", "index", own->block));
	own->block++;
	own->in_text = false;
}

static void begin(struct api_call *c)
{
	/* the event that begins a message needs what progress tells first */
}

static void progress(struct api_call *c, int32_t done, int32_t total, int32_t reused)
{
	struct api_anthropic *own = c->own;
	own->prompt = total;
	own->reused = reused;
	start(c);
}

static void text(struct api_call *c, const char *utf8, size_t n)
{
	struct api_anthropic *own = c->own;
	start(c);
	if (!own->in_text)
		open_block(c, json_pack("{s:s, s:s}", "type", "text", "text", ""));
	own->in_text = true;
	send_delta(c, json_pack("{s:s, s:s%}", "type", "text_delta", "text", utf8, n));
}

static void call(struct api_call *c, const struct api_tool_call *t)
{
	struct api_anthropic *own = c->own;
	if (own->one_call && c->n_calls > 1)
		return;
	start(c);
	if (own->in_text)
		close_block(c);
	open_block(c, tool_use(t, NULL));
	send_delta(c, json_pack("{s:s, s:s}", "type", "input_json_delta", "partial_json", t->arguments));
	close_block(c);
}

static void end(struct api_call *c, const struct fs_chat_report *rep)
{
	const struct api_anthropic *own = c->own;
	start(c);
	if (own->in_text)
		close_block(c);
	api_call_send(c, "message_delta",
	        json_pack("{s:s, s:{s:s, s:s?}, s:o}", "type", "message_delta", "delta", "stop_reason",
	                stop_reason(c, rep), "stop_sequence", rep->gen.stop, "usage",
	                usage(rep->gen.prompt_tokens, rep->gen.reused_tokens, rep->gen.completion_tokens)));
	api_call_send(c, "message_stop", json_pack("{s:s}", "type", "message_stop"));
}

/* ---- errors ---- */

static const char *error_type(const struct api_error *err)
{
	static const struct {
		int status;
		const char *type;
	} types[] = {{401, "authentication_error"}, {403, "permission_error"}, {404, "not_found_error"},
	        {413, "request_too_large"}, {429, "rate_limit_error"}, {504, "timeout_error"}};
	for (size_t i = 0; i < FS_ARRAY_LEN(types); i++)
		if (types[i].status == err->status)
			return types[i].type;
	if (err->status == 503)
		return err->code && strcmp(err->code, "shutting_down") == 0 ? "api_error"
		                                                            : "overloaded_error";
	return err->status >= 500 ? "api_error" : "invalid_request_error";
}

json_t *api_error_anthropic(const struct api_error *err)
{
	return json_pack("{s:s, s:{s:s, s:o, s:s*, s:s*}}", "type", "error", "error", "type", error_type(err),
	        "message", api_text(err->message), "code", err->code, "param", err->param);
}

static void finish(struct api_call *c)
{
	free(c->own);
	c->own = NULL;
}

const struct api_dialect api_anthropic_messages = {.name = "messages",
        .id_prefix = "msg_",
        .id_header = "request-id",
        .error_before = "event: error\ndata: ",
        .error_after = "\n\n",
        .parse = api_anthropic_parse,
        .begin = begin,
        .text = text,
        .call = call,
        .progress = progress,
        .end = end,
        .whole = whole,
        .error = api_error_anthropic,
        .finish = finish};

const struct api_dialect api_anthropic_count = {.name = "messages.count_tokens",
        .id_prefix = "count_",
        .id_header = "request-id",
        .parse = api_anthropic_parse_count,
        .counted = counted,
        .error = api_error_anthropic,
        .finish = finish};

void fs_api_messages(void *arg, struct fs_http_request *r)
{
	api_call_start(arg, &api_anthropic_messages, r);
}

void fs_api_count_tokens(void *arg, struct fs_http_request *r)
{
	api_call_start(arg, &api_anthropic_count, r);
}
