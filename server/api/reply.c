/* The shapes that all APIs share, and OpenAI's envelope of errors. */
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
		json_array_append_new(
		        pictures, json_pack("{s:o, s:i, s:b, s:f, s:f, s:f}", "host", api_text(p->host),
		                          "tokens", p->tokens, "cached", p->cached, "encode_ms", p->encode_ms,
		                          "queue_ms", p->queue_ms, "total_ms", p->total_ms));
	}
	return json_pack("{s:f, s:f, s:i, s:i, s:f, s:i, s:f, s:o}", "prepare_ms", ms(rep->prepare_ns),
	        "wait_ms", ms(rep->wait_ns), "cache_n", g->reused_tokens, "prompt_n",
	        g->prompt_tokens - g->reused_tokens, "prompt_ms", ms(g->prefill_ns), "predicted_n",
	        g->completion_tokens, "predicted_ms", ms(g->decode_ns), "pictures", pictures);
}

json_t *api_error_openai(const struct api_error *err)
{
	return json_pack("{s:{s:o, s:s, s:s?, s:s?}}", "error", "message", api_text(err->message), "type",
	        err->type, "param", err->param, "code", err->code);
}

void api_reply_error(struct fs_http_request *r, const struct api_error *err)
{
	json_t *o = api_error_openai(err);
	char *text = o ? json_dumps(o, JSON_COMPACT) : NULL;
	json_decref(o);
	if (text)
		fs_http_reply(r, err->status, NULL, err->status == 503 ? "Retry-After: 2" : NULL, text,
		        strlen(text));
	else
		fs_http_stream_end(r);
	free(text);
}

void api_reply_json(struct fs_http_request *r, json_t *o)
{
	api_reply_status_json(r, 200, o);
}

void api_reply_status_json(struct fs_http_request *r, int status, json_t *o)
{
	char *text = o ? json_dumps(o, JSON_COMPACT) : NULL;
	json_decref(o);
	if (text)
		fs_http_reply(r, status, NULL, NULL, text, strlen(text));
	else
		fs_http_stream_end(r);
	free(text);
	fs_http_unref(r);
}

int fs_api_error_body(const char *path, int status, const char *type, const char *code, const char *message,
        struct fs_buf *out)
{
	static const char anthropic[] = "/v1/messages";
	const size_t n = sizeof(anthropic) - 1;
	bool theirs = strncmp(path, anthropic, n) == 0 && (path[n] == '\0' || path[n] == '/');
	struct api_error err = {.status = status, .type = type, .code = code, .message = message};
	json_t *o = theirs ? api_error_anthropic(&err) : api_error_openai(&err);
	char *text = o ? json_dumps(o, JSON_COMPACT) : NULL;
	json_decref(o);
	int rc = text ? fs_buf_append_str(out, text) : FS_ENOMEM;
	free(text);
	return rc;
}
