/*
 * Reads a request of Anthropic's Messages API. A user's message with results of tools becomes several of
 * ours: one a result, in the role of a tool, and what stands between them in the role of the user. Members
 * that would change the answer in a way that this server can not give are refused, never ignored.
 */
#include "server/api/anthropic.h"
#include "server/api/parse.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- blocks ---- */

static int add_image(struct api_reader *rd, struct fs_chat_message *m, const json_t *block, const char *where)
{
	char param[96];
	const json_t *source = json_object_get(block, "source");
	const char *type = json_string_value(json_object_get(source, "type"));
	snprintf(param, sizeof(param), "%s.source", where);
	if (!json_is_object(source))
		return api_bad(rd, param, "must be an object");
	if (type && strcmp(type, "base64") == 0) {
		snprintf(param, sizeof(param), "%s.source.data", where);
		return api_add_picture_base64(rd, m, json_object_get(source, "data"), param);
	}
	if (type && strcmp(type, "url") == 0) {
		snprintf(param, sizeof(param), "%s.source.url", where);
		return api_add_picture_url(rd, m, json_object_get(source, "url"), NULL, param);
	}
	snprintf(param, sizeof(param), "%s.source.type", where);
	return api_bad(rd, param, "must be \"base64\" or \"url\"%s%.40s%s", type ? ", not \"" : "",
	        type ? type : "", type ? "\"" : "");
}

static int add_text(struct api_reader *rd, struct fs_chat_message *m, const json_t *text, const char *where)
{
	char param[96];
	snprintf(param, sizeof(param), "%s.text", where);
	if (!json_is_string(text))
		return api_bad(rd, param, "must be a string");
	return api_add_text(rd, m, json_string_value(text), json_string_length(text));
}

static int get_type(struct api_reader *rd, const json_t *block, const char *where, const char **type)
{
	char param[96];
	if (!json_is_object(block))
		return api_bad(rd, where, "must be an object");
	*type = json_string_value(json_object_get(block, "type"));
	snprintf(param, sizeof(param), "%s.type", where);
	return *type ? FS_OK : api_bad(rd, param, "must be a string");
}

static int refuse_type(struct api_reader *rd, const char *where, const char *known, const char *type)
{
	char param[96];
	snprintf(param, sizeof(param), "%s.type", where);
	return api_bad(rd, param, "must be %s, not \"%.40s\"", known, type);
}

/* A block of text or a picture; others are named to the client as what is not among `known`. */
static int add_block(struct api_reader *rd, struct fs_chat_message *m, const json_t *block, const char *where,
        const char *known)
{
	const char *type = NULL;
	int rc = get_type(rd, block, where, &type);
	if (rc)
		return rc;
	if (strcmp(type, "text") == 0)
		return add_text(rd, m, json_object_get(block, "text"), where);
	if (strcmp(type, "image") == 0)
		return add_image(rd, m, block, where);
	return refuse_type(rd, where, known, type);
}

static bool is_type(const json_t *block, const char *name)
{
	const char *type = json_string_value(json_object_get(block, "type"));
	return type && strcmp(type, name) == 0;
}

static int check_content(struct api_reader *rd, const json_t *content, const char *param)
{
	if (!json_is_string(content) && !json_is_array(content))
		return api_bad(rd, param, "must be a string or an array of blocks");
	if (json_array_size(content) > API_MAX_PARTS)
		return api_bad(rd, param, "holds more than %d blocks", API_MAX_PARTS);
	return FS_OK;
}

/* ---- the user's messages ---- */

static int check_id(struct api_reader *rd, const json_t *block, const char *key, const char *where)
{
	char param[96];
	snprintf(param, sizeof(param), "%s.%s", where, key);
	return json_string_length(json_object_get(block, key)) > 0
	               ? FS_OK
	               : api_bad(rd, param, "must be a string that is not empty");
}

static int add_tool_result(struct api_reader *rd, const json_t *block, const char *where)
{
	struct fs_chat_message *m = NULL;
	char param[64];
	const json_t *content = json_object_get(block, "content");
	bool none = !content || json_is_null(content);
	snprintf(param, sizeof(param), "%s.content", where);
	int rc = check_id(rd, block, "tool_use_id", where);
	if (!rc && !none)
		rc = check_content(rd, content, param);
	if (!rc)
		rc = api_add_message(
		        rd, FS_ROLE_TOOL, json_is_array(content) ? json_array_size(content) : 1, &m);
	if (!rc && json_is_string(content))
		rc = api_add_text(rd, m, json_string_value(content), json_string_length(content));
	for (size_t k = 0; !rc && k < json_array_size(content); k++) {
		char at[80];
		snprintf(at, sizeof(at), "%s[%zu]", param, k);
		rc = add_block(rd, m, json_array_get(content, k), at, "\"text\" or \"image\"");
	}
	return rc;
}

/* How many blocks from j on belong to one message of ours. */
static size_t run_of_blocks(const json_t *content, size_t j)
{
	size_t end = j;
	while (end < json_array_size(content) && !is_type(json_array_get(content, end), "tool_result"))
		end++;
	return end - j;
}

static int get_user(struct api_reader *rd, const json_t *content, const char *param)
{
	struct fs_chat_message *m = NULL;
	if (json_is_string(content) || json_array_size(content) == 0) {
		int rc = api_add_message(rd, FS_ROLE_USER, 1, &m);
		if (!rc && json_is_string(content))
			rc = api_add_text(rd, m, json_string_value(content), json_string_length(content));
		return rc;
	}
	for (size_t j = 0; j < json_array_size(content); j++) {
		const json_t *block = json_array_get(content, j);
		char at[64];
		int rc = FS_OK;
		snprintf(at, sizeof(at), "%s[%zu]", param, j);
		if (is_type(block, "tool_result")) {
			m = NULL;
			rc = add_tool_result(rd, block, at);
		} else {
			if (!m)
				rc = api_add_message(rd, FS_ROLE_USER, run_of_blocks(content, j), &m);
			if (!rc)
				rc = add_block(rd, m, block, at, "\"text\", \"image\" or \"tool_result\"");
		}
		if (rc)
			return rc;
	}
	return FS_OK;
}

/* ---- the assistant's ---- */

static int add_tool_use(
        struct api_reader *rd, struct fs_chat_message *m, const json_t *block, const char *where)
{
	char param[96];
	const json_t *input = json_object_get(block, "input");
	int rc = check_id(rd, block, "id", where);
	snprintf(param, sizeof(param), "%s.input", where);
	if (!rc && !json_is_object(input))
		rc = api_bad(rd, param, "must be an object");
	snprintf(param, sizeof(param), "%s.name", where);
	return rc ? rc
	          : api_add_call(
	                    rd, m, json_object_get(block, "name"), param, json_dumps(input, JSON_COMPACT));
}

static int add_answer_block(
        struct api_reader *rd, struct fs_chat_message *m, const json_t *block, const char *where)
{
	const char *type = NULL;
	int rc = get_type(rd, block, where, &type);
	if (rc)
		return rc;
	if (strcmp(type, "text") == 0)
		return add_text(rd, m, json_object_get(block, "text"), where);
	if (strcmp(type, "tool_use") == 0)
		return add_tool_use(rd, m, block, where);
	/* Thoughts of an earlier turn, of whatever model, are no part of a prompt in that API either. */
	if (strcmp(type, "thinking") == 0 || strcmp(type, "redacted_thinking") == 0)
		return FS_OK;
	return refuse_type(rd, where, "\"text\" or \"tool_use\"", type);
}

static int get_assistant(struct api_reader *rd, const json_t *content, const char *param)
{
	struct fs_chat_message *m = NULL;
	size_t n = json_is_array(content) ? json_array_size(content) : 1;
	int rc = api_add_message(rd, FS_ROLE_ASSISTANT, n, &m);
	if (!rc && json_is_string(content))
		rc = api_add_text(rd, m, json_string_value(content), json_string_length(content));
	for (size_t j = 0; !rc && j < json_array_size(content); j++) {
		char at[64];
		snprintf(at, sizeof(at), "%s[%zu]", param, j);
		rc = add_answer_block(rd, m, json_array_get(content, j), at);
	}
	return rc;
}

/* ---- messages ---- */

/* Blocks of the system's text are paragraphs. */
static int get_system(struct api_reader *rd, const json_t *content, const char *param)
{
	struct fs_chat_message *m = NULL;
	size_t n = json_is_array(content) ? 2 * json_array_size(content) : 1;
	int rc = api_add_message(rd, FS_ROLE_SYSTEM, n, &m);
	if (!rc && json_is_string(content))
		rc = api_add_text(rd, m, json_string_value(content), json_string_length(content));
	for (size_t i = 0; !rc && i < json_array_size(content); i++) {
		const json_t *block = json_array_get(content, i);
		const char *type = NULL;
		char at[64];
		snprintf(at, sizeof(at), "%s[%zu]", param, i);
		rc = get_type(rd, block, at, &type);
		if (!rc && strcmp(type, "text") != 0)
			rc = refuse_type(rd, at, "\"text\"", type);
		if (!rc && i > 0)
			rc = api_add_text(rd, m, "\n\n", 2);
		if (!rc)
			rc = add_text(rd, m, json_object_get(block, "text"), at);
	}
	return rc;
}

static int get_message(struct api_reader *rd, const json_t *o, size_t i, bool last)
{
	char where[32], param[48];
	const char *role = json_string_value(json_object_get(o, "role"));
	const json_t *content = json_object_get(o, "content");
	snprintf(where, sizeof(where), "messages[%zu]", i);
	if (!json_is_object(o))
		return api_bad(rd, where, "must be an object");
	snprintf(param, sizeof(param), "%s.role", where);
	if (!role)
		return api_bad(rd, param, "must be a string");
	bool user = strcmp(role, "user") == 0, system = strcmp(role, "system") == 0;
	if (!user && !system && strcmp(role, "assistant") != 0)
		return api_bad(rd, param, "must be user, assistant or system, not \"%.40s\"", role);
	if (last && !user && !system)
		return api_bad(rd, where,
		        "is the assistant's: this server does not go on with an answer that is given; end "
		        "with a user's message");
	snprintf(param, sizeof(param), "%s.content", where);
	int rc = check_content(rd, content, param);
	if (rc)
		return rc;
	return user     ? get_user(rd, content, param)
	       : system ? get_system(rd, content, param)
	                : get_assistant(rd, content, param);
}

static int get_messages(struct api_reader *rd, const json_t *root)
{
	const json_t *system = json_object_get(root, "system"), *a = json_object_get(root, "messages");
	size_t n = json_array_size(a);
	int rc = FS_OK;
	if (system && !json_is_null(system)) {
		rc = check_content(rd, system, "system");
		if (!rc)
			rc = get_system(rd, system, "system");
	}
	if (!rc && (!json_is_array(a) || n == 0))
		rc = api_bad(rd, "messages", "must be an array of at least one message");
	for (size_t i = 0; !rc && i < n; i++)
		rc = get_message(rd, json_array_get(a, i), i, i + 1 == n);
	return rc;
}

/* ---- tools ---- */

static int get_tools(struct api_reader *rd, const json_t *root)
{
	const json_t *a = json_object_get(root, "tools");
	if (!a || json_is_null(a))
		return FS_OK;
	if (!json_is_array(a))
		return api_bad(rd, "tools", "must be an array");
	int rc = FS_OK;
	for (size_t i = 0; !rc && i < json_array_size(a); i++) {
		const json_t *o = json_array_get(a, i), *type = json_object_get(o, "type");
		char where[32], param[48];
		snprintf(where, sizeof(where), "tools[%zu]", i);
		snprintf(param, sizeof(param), "%s.type", where);
		if (!json_is_object(o))
			rc = api_bad(rd, where, "must be an object");
		else if (type && !json_is_null(type) && !json_is_string(type))
			rc = api_bad(rd, param, "must be a string");
		else if (json_is_string(type) && !is_type(o, "custom"))
			rc = api_bad(rd, param,
			        "must be \"custom\", not \"%.40s\": this server runs no tools of its own",
			        json_string_value(type));
		else
			rc = api_add_tool(rd, o, "input_schema", where);
		snprintf(param, sizeof(param), "%s.input_schema", where);
		if (!rc && !json_is_object(json_object_get(o, "input_schema")))
			rc = api_bad(rd, param, "must be an object, a JSON Schema");
	}
	return rc;
}

static int get_tool_choice(struct api_reader *rd, const json_t *root, struct api_anthropic *own)
{
	const json_t *o = json_object_get(root, "tool_choice");
	const char *type = json_string_value(json_object_get(o, "type"));
	if (!o || json_is_null(o))
		return FS_OK;
	if (!json_is_object(o))
		return api_bad(rd, "tool_choice", "must be an object");
	int rc = api_get_bool(
	        rd, o, "disable_parallel_tool_use", "tool_choice.disable_parallel_tool_use", &own->one_call);
	if (rc)
		return rc;
	if (is_type(o, "tool"))
		return api_choose_tool(rd, json_object_get(o, "name"), "tool_choice.name");
	if (is_type(o, "any"))
		rd->chat->choice = FS_TOOLS_REQUIRED;
	else if (is_type(o, "none"))
		rd->chat->choice = FS_TOOLS_NONE;
	else if (!is_type(o, "auto"))
		return api_bad(rd, "tool_choice.type", "must be auto, any, tool or none%s%.40s%s",
		        type ? ", not \"" : "", type ? type : "", type ? "\"" : "");
	return FS_OK;
}

/* ---- parameters ---- */

static int check_thinking(struct api_reader *rd, const json_t *root)
{
	const json_t *o = json_object_get(root, "thinking");
	if (!o || json_is_null(o))
		return FS_OK;
	if (!json_is_object(o))
		return api_bad(rd, "thinking", "must be an object");
	/* adaptive leaves it to the model whether to think, and this one does not */
	if (is_type(o, "disabled") || is_type(o, "adaptive"))
		return FS_OK;
	return api_bad(rd, "thinking.type",
	        "must be \"disabled\": this server's model does not think before it answers");
}

static int check_unsupported(struct api_reader *rd, const json_t *root)
{
	static const struct {
		const char *key, *text;
	} members[] = {{"mcp_servers", "is not supported: this server calls no other servers"},
	        {"container", "is not supported: this server runs no code"},
	        {"output_format", "is not supported: this server can not force a format"}};
	for (size_t i = 0; i < FS_ARRAY_LEN(members); i++) {
		const json_t *v = json_object_get(root, members[i].key);
		if (v && !json_is_null(v) && !(json_is_array(v) && json_array_size(v) == 0))
			return api_bad(rd, members[i].key, "%s", members[i].text);
	}
	const json_t *format = json_object_get(json_object_get(root, "output_config"), "format");
	if (format && !json_is_null(format))
		return api_bad(rd, "output_config.format", "%s", members[2].text);
	return check_thinking(rd, root);
}

static int get_strings(struct api_reader *rd, const json_t *root)
{
	const json_t *model = json_object_get(root, "model"), *meta = json_object_get(root, "metadata");
	const json_t *stops = json_object_get(root, "stop_sequences");
	if (model && !json_is_null(model) && !json_is_string(model))
		return api_bad(rd, "model", "must be a string");
	if (meta && !json_is_null(meta) && !json_is_object(meta))
		return api_bad(rd, "metadata", "must be an object");
	if (stops && !json_is_null(stops) && !json_is_array(stops))
		return api_bad(rd, "stop_sequences", "must be an array of strings");
	return api_get_stops(rd, root, "stop_sequences");
}

static int get_numbers(struct api_reader *rd, const json_t *root, struct api_call *c, bool counting)
{
	int64_t max = 0;
	int rc = api_get_int(rd, root, "max_tokens", 1, INT32_MAX, &max);
	if (!rc && max == 0 && !counting)
		rc = api_bad(rd, "max_tokens", "is required: the most tokens of the answer, from 1 on");
	rd->chat->gen.max_tokens = (int32_t)max;
	if (!rc) /* narrower than that of the other APIs */
		rc = api_get_number(rd, root, "temperature", 0, 1, &rd->chat->gen.temperature);
	if (!rc)
		rc = api_get_sampling(rd, root);
	if (!rc)
		rc = api_get_timeout(rd, root, &c->timeout_s);
	return rc;
}

static int parse(struct api_call *c, const json_t *root, struct fs_refusal *why, bool counting)
{
	struct api_reader rd = {.api = c->api, .chat = &c->chat, .why = why};
	struct api_anthropic *own = calloc(1, sizeof(*own));
	if (!own)
		return api_no_memory(&rd);
	c->own = own;
	int rc = get_strings(&rd, root);
	if (!rc)
		rc = get_numbers(&rd, root, c, counting);
	if (!rc && !counting)
		rc = api_get_bool(&rd, root, "stream", "stream", &c->stream);
	if (!rc)
		rc = check_unsupported(&rd, root);
	if (!rc)
		rc = get_messages(&rd, root);
	if (!rc)
		rc = get_tools(&rd, root);
	if (!rc)
		rc = get_tool_choice(&rd, root, own);
	return rc ? rc : api_check_tools(&rd);
}

int api_anthropic_parse(struct api_call *c, const json_t *root, struct fs_refusal *why)
{
	return parse(c, root, why, false);
}

int api_anthropic_parse_count(struct api_call *c, const json_t *root, struct fs_refusal *why)
{
	return parse(c, root, why, true);
}
