/* POST /v1/completions: plain text continued, without any chat template. */
#include "server/api/openai.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define DEFAULT_MAX_TOKENS 16 /* that API's own */

/* ---- reading ---- */

static int get_ids(struct api_reader *rd, const json_t *a)
{
	struct fs_chat *c = rd->chat;
	size_t n = json_array_size(a);
	c->ids = calloc(n, sizeof(*c->ids));
	if (!c->ids)
		return api_no_memory(rd);
	for (size_t i = 0; i < n; i++) {
		const json_t *v = json_array_get(a, i);
		json_int_t id = json_integer_value(v);
		if (!json_is_integer(v) || id < 0 || id > INT32_MAX)
			return api_bad(rd, "prompt", "holds an element that is no token id, at index %zu", i);
		c->ids[i] = (int32_t)id;
	}
	c->n_ids = n;
	return FS_OK;
}

static int get_text(struct api_reader *rd, const json_t *v)
{
	struct fs_chat *c = rd->chat;
	size_t n = json_string_length(v);
	if (n == 0)
		return api_bad(rd, "prompt", "is empty: there is nothing to continue");
	c->text = malloc(n + 1);
	if (!c->text)
		return api_no_memory(rd);
	memcpy(c->text, json_string_value(v), n + 1);
	c->text_len = n;
	return FS_OK;
}

/* A string, or token ids; or an array of one such. */
static int get_prompt(struct api_reader *rd, const json_t *root)
{
	const json_t *v = json_object_get(root, "prompt"), *first = json_array_get(v, 0);
	if (json_is_string(first) || json_is_array(first)) {
		if (json_array_size(v) > 1)
			return api_bad(rd, "prompt",
			        "holds several prompts: this server takes one a request, so send a request "
			        "each");
		v = first;
	}
	if (json_is_string(v))
		return get_text(rd, v);
	if (json_array_size(v) > 0)
		return get_ids(rd, v);
	return api_bad(rd, "prompt", "must be a string or an array of token ids");
}

static int check_unsupported(struct api_reader *rd, const json_t *root)
{
	int64_t best_of = 1;
	bool echo = false;
	int rc = api_openai_check_common(rd, root);
	if (!rc)
		rc = api_get_int(rd, root, "best_of", 1, 128, &best_of);
	if (!rc && best_of != 1)
		rc = api_bad(rd, "best_of", "must be 1: this server gives one answer a request");
	if (!rc)
		rc = api_get_bool(rd, root, "echo", "echo", &echo);
	if (!rc && echo)
		rc = api_bad(rd, "echo", "must be false: this server does not repeat the prompt");
	if (!rc && api_openai_is_set(root, "suffix"))
		rc = api_bad(rd, "suffix", "must be absent: this server only continues a text at its end");
	return rc;
}

static int get_limits(struct api_reader *rd, const json_t *root)
{
	struct fs_gen_params *g = &rd->chat->gen;
	int64_t max = g->max_tokens > 0 ? g->max_tokens : DEFAULT_MAX_TOKENS, top = -1;
	int rc = api_get_max_tokens(rd, root, "max_tokens", &max);
	if (!rc)
		rc = api_get_int(rd, root, "logprobs", 0, FS_MAX_TOP_LOGPROBS, &top);
	g->max_tokens = (int32_t)max;
	g->logprobs = top >= 0;
	g->n_top_logprobs = (int32_t)FS_MAX(top, 0);
	return rc;
}

int api_openai_parse_completion(struct api_call *c, const json_t *root, struct fs_refusal *why)
{
	struct api_reader rd = {.api = c->api, .chat = &c->chat, .why = why};
	c->own = calloc(1, sizeof(size_t)); /* characters so far: see api_openai_completion_token */
	if (!c->own)
		return api_no_memory(&rd);
	int rc = api_openai_get_stream(&rd, root, c);
	if (!rc)
		rc = check_unsupported(&rd, root);
	if (!rc)
		rc = api_get_sampling(&rd, root);
	if (!rc)
		rc = get_limits(&rd, root);
	if (!rc)
		rc = api_get_timeout(&rd, root, &c->timeout_s);
	if (!rc)
		rc = api_get_stops(&rd, root, "stop");
	api_openai_bound_logprobs(c);
	return rc ? rc : get_prompt(&rd, root);
}

/* ---- shapes ---- */

static json_t *object(const struct api_call *c, json_t *choices, json_t *usage)
{
	return json_pack("{s:s, s:s, s:I, s:s, s:o, s:o?}", "id", c->id, "object", "text_completion",
	        "created", (json_int_t)c->created, "model", c->api->model_name, "choices", choices, "usage",
	        usage);
}

static json_t *choice(struct api_call *c, const char *utf8, size_t n, const char *finish)
{
	return json_pack("[{s:i, s:s%, s:o?, s:s?}]", "index", 0, "text", utf8, n, "logprobs",
	        api_openai_take_logprobs(c), "finish_reason", finish);
}

static void begin(struct api_call *c)
{
	/* nothing is said before the first text */
}

static void text(struct api_call *c, const char *utf8, size_t n)
{
	api_call_send(c, NULL, object(c, choice(c, utf8, n, NULL), NULL));
}

static void end(struct api_call *c, const struct fs_chat_report *rep)
{
	api_call_send(c, NULL, object(c, choice(c, "", 0, api_finish_name(rep->gen.finish)), NULL));
	if (c->include_usage)
		api_call_send(c, NULL, object(c, json_array(), api_usage(rep)));
	api_call_send_text(c, "data: [DONE]\n\n");
}

static json_t *whole(struct api_call *c, const struct fs_chat_report *rep)
{
	json_t *o = object(c,
	        choice(c, c->answer.data ? (char *)c->answer.data : "", c->answer.len,
	                api_finish_name(rep->gen.finish)),
	        api_usage(rep));
	json_object_set_new(o, "timings", api_timings(rep));
	return o;
}

static void finish(struct api_call *c)
{
	free(c->own);
}

const struct api_dialect api_openai_completions = {.name = "completions",
        .id_prefix = "cmpl-",
        .id_header = "x-request-id",
        .parse = api_openai_parse_completion,
        .begin = begin,
        .text = text,
        .end = end,
        .token = api_openai_completion_token,
        .whole = whole,
        .error = api_error_openai,
        .finish = finish};

void fs_api_completions(void *arg, struct fs_http_request *r)
{
	api_call_start(arg, &api_openai_completions, r);
}
