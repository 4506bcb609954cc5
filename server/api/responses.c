/*
 * POST /v1/responses: the shapes of its answers and the sequence of its events. An answer is a list of items:
 * messages, of one part of text each, and calls of functions. A stream opens an item with its first text, and
 * closes it before the next. Nothing is kept: what is under /v1/responses/ is never there.
 */
#include "server/api/responses.h"
#include "server/api/openai.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- shapes ---- */

static json_t *or_default(json_t *kept, json_t *fallback)
{
	if (!kept)
		return fallback;
	json_decref(fallback);
	return json_incref(kept);
}

static json_t *usage(const struct fs_chat_report *rep)
{
	const struct fs_gen_result *g = &rep->gen;
	return json_pack("{s:i, s:{s:i}, s:i, s:{s:i}, s:i}", "input_tokens", g->prompt_tokens,
	        "input_tokens_details", "cached_tokens", g->reused_tokens, "output_tokens",
	        g->completion_tokens, "output_tokens_details", "reasoning_tokens", 0, "total_tokens",
	        g->prompt_tokens + g->completion_tokens);
}

/* As it was written, not as the nearest float. */
static double decimal(float f)
{
	return round((double)f * 1e6) / 1e6;
}

/* What the request said, repeated. */
static json_t *settings(const struct api_call *c)
{
	const struct api_response_own *own = c->own;
	const struct fs_gen_params *g = &c->chat.gen;
	json_t *most = g->max_tokens > 0 ? json_integer(g->max_tokens) : NULL;
	return json_pack("{s:b, s:o?, s:o, s:o?, s:s, s:b, s:n, s:n, s:n, s:b, s:f, s:f, s:o, s:o, s:s, "
	                 "s:{s:{s:s}}, s:{s:n, s:n}}",
	        "background", 0, "instructions", json_incref(own->instructions), "metadata",
	        or_default(own->metadata, json_object()), "max_output_tokens", most, "model",
	        c->api->model_name, "parallel_tool_calls", !own->one_call, "previous_response_id", "prompt",
	        "user", "store", 0, "temperature", decimal(g->temperature), "top_p", decimal(g->top_p),
	        "tools", or_default(own->tools, json_array()), "tool_choice",
	        or_default(own->tool_choice, json_string("auto")), "truncation", "disabled", "text", "format",
	        "type", "text", "reasoning", "effort", "summary");
}

/* output, error, counts NULL: empty, null. */
static json_t *response(const struct api_call *c, const char *status, json_t *output, json_t *error,
        const char *incomplete, json_t *counts)
{
	json_t *o = settings(c);
	json_t *head = json_pack("{s:s, s:s, s:I, s:s, s:o?, s:o, s:o?}", "id", c->id, "object", "response",
	        "created_at", (json_int_t)c->created, "status", status, "error", error, "output",
	        output ? output : json_array(), "usage", counts);
	json_object_set_new(head, "incomplete_details",
	        incomplete ? json_pack("{s:s}", "reason", incomplete) : json_null());
	json_object_update_missing(head, o);
	json_decref(o);
	return head;
}

static json_t *text_part(const char *utf8, size_t n)
{
	return json_pack(
	        "{s:s, s:s%, s:[], s:[]}", "type", "output_text", "text", utf8, n, "annotations", "logprobs");
}

/* part NULL: none yet. */
static json_t *message_item(const char *id, const char *status, json_t *part)
{
	json_t *content = part ? json_pack("[o]", part) : json_array();
	return json_pack("{s:s, s:s, s:s, s:s, s:o}", "type", "message", "id", id, "status", status, "role",
	        "assistant", "content", content);
}

/* The item's own id and the call's share their random part. */
static json_t *call_item(const struct api_tool_call *t, const char *status, const char *arguments)
{
	const char *random = strchr(t->id, '_');
	return json_pack("{s:s, s:o, s:s, s:s, s:s, s:s}", "type", "function_call", "id",
	        json_sprintf("fc_%s", random ? random + 1 : t->id), "status", status, "call_id", t->id,
	        "name", t->name, "arguments", arguments);
}

static const char *status_of(const struct fs_chat_report *rep)
{
	return rep->gen.finish == FS_FINISH_LENGTH ? "incomplete" : "completed";
}

static const char *incomplete_of(const struct fs_chat_report *rep)
{
	return rep->gen.finish == FS_FINISH_LENGTH ? "max_output_tokens" : NULL;
}

/* ---- whole ---- */

static json_t *whole(struct api_call *c, const struct fs_chat_report *rep)
{
	const struct api_response_own *own = c->own;
	size_t n = own->one_call ? FS_MIN(c->n_calls, (size_t)1) : c->n_calls;
	json_t *output = json_array();
	char id[48];
	api_make_id(id, sizeof(id), "msg_");
	if (c->answer.len > 0 || n == 0)
		json_array_append_new(output,
		        message_item(id, status_of(rep),
		                text_part(c->answer.data ? (char *)c->answer.data : "", c->answer.len)));
	for (size_t i = 0; i < n; i++)
		json_array_append_new(output, call_item(&c->calls[i], "completed", c->calls[i].arguments));
	json_t *o = response(c, status_of(rep), output, NULL, incomplete_of(rep), usage(rep));
	json_object_set_new(o, "timings", api_timings(rep));
	return o;
}

/* ---- streamed ---- */

/* Takes o over, and returns it. */
static json_t *event(struct api_call *c, const char *type, json_t *o)
{
	struct api_response_own *own = c->own;
	json_object_set_new(o, "type", json_string(type));
	json_object_set_new(o, "sequence_number", json_integer(own->sequence++));
	return o;
}

static void send(struct api_call *c, const char *type, json_t *o)
{
	api_call_send(c, type, event(c, type, o));
}

static void send_response(struct api_call *c, const char *type, json_t *r)
{
	send(c, type, json_pack("{s:o}", "response", r));
}

static json_int_t index_of_item(const struct api_call *c)
{
	const struct api_response_own *own = c->own;
	return (json_int_t)json_array_size(own->output);
}

static void send_item(struct api_call *c, const char *type, json_t *item)
{
	send(c, type, json_pack("{s:I, s:o}", "output_index", index_of_item(c), "item", item));
}

/* An event within the open message; key and v: its own member. */
static void send_part(struct api_call *c, const char *type, const char *key, json_t *v, bool with_logprobs)
{
	const struct api_response_own *own = c->own;
	json_t *o = json_pack("{s:s, s:I, s:i, s:o}", "item_id", own->message_id, "output_index",
	        index_of_item(c), "content_index", 0, key, v);
	if (with_logprobs)
		json_object_set_new(o, "logprobs", json_array());
	send(c, type, o);
}

static void begin(struct api_call *c)
{
	send_response(c, "response.created", response(c, "in_progress", NULL, NULL, NULL, NULL));
	send_response(c, "response.in_progress", response(c, "in_progress", NULL, NULL, NULL, NULL));
}

static void open_message(struct api_call *c)
{
	struct api_response_own *own = c->own;
	if (own->message_id[0])
		return;
	api_make_id(own->message_id, sizeof(own->message_id), "msg_");
	fs_buf_clear(&own->text);
	send_item(c, "response.output_item.added", message_item(own->message_id, "in_progress", NULL));
	send_part(c, "response.content_part.added", "part", text_part("", 0), false);
}

/* The message that is open, as far as it has come. */
static json_t *open_item(const struct api_call *c, const char *status)
{
	const struct api_response_own *own = c->own;
	const char *text = own->text.data ? (char *)own->text.data : "";
	return message_item(own->message_id, status, text_part(text, own->text.len));
}

static void close_message(struct api_call *c, const char *status)
{
	struct api_response_own *own = c->own;
	if (!own->message_id[0])
		return;
	const char *text = own->text.data ? (char *)own->text.data : "";
	size_t n = own->text.len;
	json_t *item = open_item(c, status);
	send_part(c, "response.output_text.done", "text", json_stringn(text, n), true);
	send_part(c, "response.content_part.done", "part", text_part(text, n), false);
	send_item(c, "response.output_item.done", json_incref(item));
	json_array_append_new(own->output, item);
	own->message_id[0] = '\0';
}

static void text(struct api_call *c, const char *utf8, size_t n)
{
	struct api_response_own *own = c->own;
	open_message(c);
	c->overflow |= fs_buf_append(&own->text, utf8, n) != FS_OK;
	send_part(c, "response.output_text.delta", "delta", json_stringn(utf8, n), true);
}

/* The engine tells of a call when it is whole, so its arguments are one piece. */
static void call(struct api_call *c, const struct api_tool_call *t)
{
	struct api_response_own *own = c->own;
	if (own->one_call && c->n_calls > 1)
		return;
	close_message(c, "completed");
	json_t *item = call_item(t, "completed", t->arguments), *id = json_object_get(item, "id");
	send_item(c, "response.output_item.added", call_item(t, "in_progress", ""));
	send(c, "response.function_call_arguments.delta",
	        json_pack("{s:O, s:I, s:s}", "item_id", id, "output_index", index_of_item(c), "delta",
	                t->arguments));
	send(c, "response.function_call_arguments.done",
	        json_pack("{s:O, s:I, s:s, s:s}", "item_id", id, "output_index", index_of_item(c), "name",
	                t->name, "arguments", t->arguments));
	send_item(c, "response.output_item.done", json_incref(item));
	json_array_append_new(own->output, item);
}

static void end(struct api_call *c, const struct fs_chat_report *rep)
{
	struct api_response_own *own = c->own;
	if (json_array_size(own->output) == 0)
		open_message(c);
	close_message(c, status_of(rep));
	bool cut = rep->gen.finish == FS_FINISH_LENGTH;
	send_response(c, cut ? "response.incomplete" : "response.completed",
	        response(c, status_of(rep), json_incref(own->output), NULL, incomplete_of(rep), usage(rep)));
}

/* Nothing but this event reaches a client whose request was cancelled, so it holds what there was. */
static json_t *failed(struct api_call *c, const struct api_error *err)
{
	struct api_response_own *own = c->own;
	json_t *error = json_pack(
	        "{s:s, s:o}", "code", err->code ? err->code : err->type, "message", api_text(err->message));
	json_t *output = json_copy(own->output);
	if (own->message_id[0])
		json_array_append_new(output, open_item(c, "incomplete"));
	return event(c, "response.failed",
	        json_pack("{s:o}", "response", response(c, "failed", output, error, NULL, NULL)));
}

static void finish(struct api_call *c)
{
	struct api_response_own *own = c->own;
	if (!own)
		return;
	json_decref(own->instructions);
	json_decref(own->metadata);
	json_decref(own->tools);
	json_decref(own->tool_choice);
	json_decref(own->output);
	fs_buf_finish(&own->text);
	free(own);
}

const struct api_dialect api_openai_responses = {.name = "responses",
        .id_prefix = "resp_",
        .id_header = "x-request-id",
        .error_before = "event: error\ndata: ",
        .error_after = "\n\n",
        .parse = api_openai_parse_response,
        .begin = begin,
        .text = text,
        .call = call,
        .end = end,
        .whole = whole,
        .error = api_error_openai,
        .failed = failed,
        .failed_before = "event: response.failed\ndata: ",
        .finish = finish};

void fs_api_responses(void *arg, struct fs_http_request *r)
{
	api_call_start(arg, &api_openai_responses, r);
}

void fs_api_no_response(void *arg, struct fs_http_request *r)
{
	struct api_error err = {404, "invalid_request_error", "not_found", NULL,
	        "there is no such response: this server keeps none"};
	api_reply_error(r, &err);
	fs_http_unref(r);
}
