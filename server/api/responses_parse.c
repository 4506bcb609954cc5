/*
 * Reads a request of OpenAI's responses API. Nothing is kept between requests, so the whole conversation
 * comes in "input" each time, and members that refer to anything kept are refused.
 */
#include "server/api/openai.h"
#include "server/api/responses.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PARTS "\"input_text\", \"output_text\" or \"input_image\""
#define MAX_TEXT ((size_t)16 << 20)

/* ---- items ---- */

static int get_role(struct api_reader *rd, const json_t *o, const char *where, enum fs_role *out)
{
	static const struct {
		const char *name;
		enum fs_role role;
	} roles[] = {{"user", FS_ROLE_USER}, {"assistant", FS_ROLE_ASSISTANT}, {"system", FS_ROLE_SYSTEM},
	        {"developer", FS_ROLE_SYSTEM}};
	char param[64];
	const char *name = json_string_value(json_object_get(o, "role"));
	for (size_t i = 0; name && i < FS_ARRAY_LEN(roles); i++) {
		if (strcmp(roles[i].name, name) == 0) {
			*out = roles[i].role;
			return FS_OK;
		}
	}
	snprintf(param, sizeof(param), "%s.role", where);
	return api_bad(rd, param, "must be user, assistant, system or developer");
}

static int add_content(
        struct api_reader *rd, enum fs_role role, const json_t *o, const char *where, const char *member)
{
	struct fs_chat_message *m = NULL;
	const json_t *content = json_object_get(o, member);
	char param[64];
	size_t n = 0;
	snprintf(param, sizeof(param), "%s.%s", where, member);
	int rc = api_openai_n_parts(rd, content, param, &n);
	if (!rc)
		rc = api_add_message(rd, role, n, &m);
	return rc ? rc : api_openai_add_content(rd, m, content, param, PARTS);
}

static int add_message(struct api_reader *rd, const json_t *o, const char *where)
{
	enum fs_role role = FS_ROLE_USER;
	int rc = get_role(rd, o, where, &role);
	return rc ? rc : add_content(rd, role, o, where, "content");
}

static int check_call_id(struct api_reader *rd, const json_t *o, const char *where)
{
	char param[64];
	snprintf(param, sizeof(param), "%s.call_id", where);
	if (!json_is_string(json_object_get(o, "call_id")))
		return api_bad(rd, param, "must be a string");
	return FS_OK;
}

/* Calls follow the text of the same answer, one item each; templates want them in one message. */
static int add_call(struct api_reader *rd, const json_t *o, const char *where)
{
	struct fs_chat *c = rd->chat;
	struct fs_chat_message *m = c->n_messages > 0 ? &c->messages[c->n_messages - 1] : NULL;
	int rc = check_call_id(rd, o, where);
	if (!rc && (!m || m->role != FS_ROLE_ASSISTANT))
		rc = api_add_message(rd, FS_ROLE_ASSISTANT, 0, &m);
	return rc ? rc : api_openai_add_call(rd, m, o, where);
}

/* The model tells results apart by their order. */
static int add_result(struct api_reader *rd, const json_t *o, const char *where)
{
	int rc = check_call_id(rd, o, where);
	return rc ? rc : add_content(rd, FS_ROLE_TOOL, o, where, "output");
}

static int add_item(struct api_reader *rd, const json_t *o, size_t i)
{
	static const struct {
		const char *type;
		int (*add)(struct api_reader *rd, const json_t *o, const char *where);
	} types[] = {
	        {"message", add_message}, {"function_call", add_call}, {"function_call_output", add_result}};
	char where[32], param[48];
	snprintf(where, sizeof(where), "input[%zu]", i);
	snprintf(param, sizeof(param), "%s.type", where);
	if (!json_is_object(o))
		return api_bad(rd, where, "must be an object");
	const json_t *v = json_object_get(o, "type");
	const char *type = v ? json_string_value(v) : "message"; /* messages may come without it */
	for (size_t k = 0; type && k < FS_ARRAY_LEN(types); k++)
		if (strcmp(types[k].type, type) == 0)
			return types[k].add(rd, o, where);
	return api_bad(rd, param,
	        "must be \"message\", \"function_call\" or \"function_call_output\", not \"%.40s\": this "
	        "server knows no other items and keeps none",
	        type ? type : "?");
}

static int add_line(struct api_reader *rd, enum fs_role role, const json_t *text)
{
	struct fs_chat_message *m = NULL;
	int rc = api_add_message(rd, role, 1, &m);
	return rc ? rc : api_add_text(rd, m, json_string_value(text), json_string_length(text));
}

static int get_input(struct api_reader *rd, const json_t *root)
{
	const json_t *instructions = json_object_get(root, "instructions");
	const json_t *input = json_object_get(root, "input");
	int rc = FS_OK;
	if (instructions && !json_is_null(instructions) && !json_is_string(instructions))
		return api_bad(rd, "instructions", "must be a string");
	if (!json_is_string(input) && json_array_size(input) == 0)
		return api_bad(rd, "input", "must be a string or an array of at least one item");
	if (json_is_string(instructions))
		rc = add_line(rd, FS_ROLE_SYSTEM, instructions);
	if (!rc && json_is_string(input))
		rc = add_line(rd, FS_ROLE_USER, input);
	for (size_t i = 0; !rc && i < json_array_size(input); i++)
		rc = add_item(rd, json_array_get(input, i), i);
	return rc;
}

/* ---- parameters ---- */

static int check_format(struct api_reader *rd, const json_t *root)
{
	const json_t *text = json_object_get(root, "text"), *format = json_object_get(text, "format");
	const char *type = json_string_value(json_object_get(format, "type"));
	if (text && !json_is_null(text) && !json_is_object(text))
		return api_bad(rd, "text", "must be an object");
	if (format && !json_is_null(format) && (!type || strcmp(type, "text") != 0))
		return api_bad(rd, "text.format",
		        "must be {\"type\": \"text\"}: this server can not force a format");
	return FS_OK;
}

/* Members that change the answer in a way that this server can not give: refused, never ignored. */
static int check_unsupported(struct api_reader *rd, const json_t *root)
{
	static const char *const kept[] = {"previous_response_id", "conversation", "prompt"};
	for (size_t i = 0; i < FS_ARRAY_LEN(kept); i++)
		if (api_openai_is_set(root, kept[i]))
			return api_bad(rd, kept[i],
			        "must be absent: this server keeps nothing between requests; send the whole "
			        "conversation as \"input\"");
	if (api_openai_is_set(root, "background"))
		return api_bad(rd, "background", "must be false: this server keeps no responses");
	if (api_openai_is_set(root, "top_logprobs"))
		return api_bad(rd, "top_logprobs",
		        "must be 0: probabilities are had from /v1/chat/completions alone");
	const json_t *include = json_object_get(root, "include");
	for (size_t i = 0; i < json_array_size(include); i++) {
		const char *name = json_string_value(json_array_get(include, i));
		if (name && strcmp(name, "message.output_text.logprobs") == 0)
			return api_bad(rd, "include",
			        "holds message.output_text.logprobs; probabilities are had from "
			        "/v1/chat/completions alone");
	}
	return check_format(rd, root);
}

static int get_options(struct api_reader *rd, const json_t *root, struct api_call *c)
{
	int64_t max = c->chat.gen.max_tokens;
	bool store;
	int rc = api_openai_get_stream(rd, root, c);
	if (!rc)
		rc = api_get_bool(rd, root, "store", "store", &store);
	if (!rc)
		rc = api_openai_check_common(rd, root);
	if (!rc)
		rc = check_unsupported(rd, root);
	if (!rc)
		rc = api_get_sampling(rd, root);
	if (!rc)
		rc = api_get_max_tokens(rd, root, "max_output_tokens", &max);
	c->chat.gen.max_tokens = (int32_t)max;
	return rc ? rc : api_get_timeout(rd, root, &c->timeout_s);
}

/* Values are counted: they outlive the request's JSON. */
static json_t *keep(const json_t *root, const char *key)
{
	json_t *v = json_object_get(root, key);
	return json_is_null(v) ? NULL : json_incref(v);
}

int api_openai_parse_response(struct api_call *c, const json_t *root, struct fs_refusal *why)
{
	struct api_reader rd = {.api = c->api, .chat = &c->chat, .why = why};
	struct api_response_own *own = c->own = calloc(1, sizeof(*own));
	if (!own)
		return api_no_memory(&rd);
	fs_buf_init(&own->text, MAX_TEXT);
	own->output = json_array();
	c->chat.field = "input";
	int rc = own->output ? get_options(&rd, root, c) : api_no_memory(&rd);
	if (!rc)
		rc = api_openai_get_tools(&rd, root, false, &own->one_call);
	if (!rc)
		rc = get_input(&rd, root);
	if (!rc)
		rc = api_check_tools(&rd);
	own->instructions = keep(root, "instructions");
	own->metadata = keep(root, "metadata");
	own->tools = keep(root, "tools");
	own->tool_choice = keep(root, "tool_choice");
	return rc;
}
