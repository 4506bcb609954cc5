/*
 * Probabilities of tokens in the shapes of chat completions and of completions. A token may be a part of a
 * character: chat then has its bytes as \xNN in "token" and as numbers in "bytes", completions as
 * "bytes:\xNN".
 */
#include "server/api/openai.h"

#include <stdio.h>

/* One takes some 600 bytes in memory. */
#define MAX_PROBS ((size_t)1 << 17)

static json_t *token_text(const struct fs_token_prob *p, const char *prefix)
{
	json_t *text = json_stringn(p->bytes, p->n_bytes); /* jansson is the judge of UTF-8 */
	if (text)
		return text;
	struct fs_buf b;
	fs_buf_init(&b, (size_t)1 << 16);
	int rc = fs_buf_append_str(&b, prefix);
	for (size_t i = 0; !rc && i < p->n_bytes; i++)
		rc = fs_buf_printf(&b, "\\x%02x", (unsigned char)p->bytes[i]);
	text = rc ? NULL : json_stringn((char *)b.data, b.len);
	fs_buf_finish(&b);
	return text;
}

static bool too_many(struct api_call *c, size_t tokens, const struct fs_token_event *t)
{
	bool full = (tokens + 1) * (t->n_top + 1) > MAX_PROBS;
	c->overflow |= full;
	return full;
}

void api_openai_bound_logprobs(struct api_call *c)
{
	struct fs_gen_params *g = &c->chat.gen;
	int32_t most = (int32_t)(MAX_PROBS / ((size_t)g->n_top_logprobs + 1));
	if (!c->stream && g->logprobs && (g->max_tokens == 0 || g->max_tokens > most))
		g->max_tokens = most;
}

/* ---- chat ---- */

static json_t *prob(const struct fs_token_prob *p)
{
	json_t *bytes = p->control ? json_null() : json_array();
	for (size_t i = 0; json_is_array(bytes) && i < p->n_bytes; i++)
		json_array_append_new(bytes, json_integer((unsigned char)p->bytes[i]));
	return json_pack(
	        "{s:o, s:f, s:o}", "token", token_text(p, ""), "logprob", (double)p->logprob, "bytes", bytes);
}

void api_openai_chat_token(struct api_call *c, const struct fs_token_event *t)
{
	if (!c->logprobs)
		c->logprobs = json_pack("{s:[], s:n}", "content", "refusal");
	json_t *content = json_object_get(c->logprobs, "content");
	if (too_many(c, json_array_size(content), t))
		return;
	json_t *top = json_array(), *one = prob(&t->chosen);
	for (size_t i = 0; i < t->n_top; i++)
		json_array_append_new(top, prob(&t->top[i]));
	json_object_set_new(one, "top_logprobs", top);
	json_array_append_new(content, one);
}

/* ---- completions ---- */

static json_t *legacy_text(const struct fs_token_prob *p)
{
	return token_text(p, "bytes:");
}

/* Maps the texts to their logarithms; the chosen one is always among them. */
static json_t *legacy_top(const struct fs_token_event *t)
{
	json_t *o = json_object();
	for (size_t i = 0; i <= t->n_top; i++) {
		const struct fs_token_prob *p = i < t->n_top ? &t->top[i] : &t->chosen;
		json_t *text = legacy_text(p);
		/* Different tokens may have the same text: the likelier stays. */
		if (text && !json_object_get(o, json_string_value(text)))
			json_object_set_new(o, json_string_value(text), json_real((double)p->logprob));
		json_decref(text);
	}
	return o;
}

/* c->own counts the characters that the tokens before have begun. */
void api_openai_completion_token(struct api_call *c, const struct fs_token_event *t)
{
	size_t *chars = c->own;
	if (!c->logprobs)
		c->logprobs = json_pack("{s:[], s:[], s:[], s:[]}", "tokens", "token_logprobs",
		        "top_logprobs", "text_offset");
	if (too_many(c, json_array_size(json_object_get(c->logprobs, "tokens")), t))
		return;
	json_array_append_new(json_object_get(c->logprobs, "tokens"), legacy_text(&t->chosen));
	json_array_append_new(
	        json_object_get(c->logprobs, "token_logprobs"), json_real((double)t->chosen.logprob));
	json_array_append_new(json_object_get(c->logprobs, "top_logprobs"), legacy_top(t));
	json_array_append_new(json_object_get(c->logprobs, "text_offset"), json_integer((json_int_t)*chars));
	for (size_t i = 0; !t->chosen.control && i < t->chosen.n_bytes; i++)
		*chars += ((unsigned char)t->chosen.bytes[i] & 0xc0) != 0x80;
}

json_t *api_openai_take_logprobs(struct api_call *c)
{
	json_t *o = c->logprobs;
	c->logprobs = NULL;
	return o;
}
