/*
 * Reads an OpenAI chat completion request. Members that are unknown are passed over, as the clients of newer
 * versions of that API expect; known ones that this server can not honour are refused instead of ignored.
 */
#include "server/api/openai.h"
#include "server/api/openai_chat.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PARTS "\"text\" or \"image_url\""

/* ---- messages ---- */

static int get_role(struct api_reader *rd, const json_t *o, const char *where, enum fs_role *out)
{
	static const struct {
		const char *name;
		enum fs_role role;
	} roles[] = {{"system", FS_ROLE_SYSTEM}, {"developer", FS_ROLE_SYSTEM}, {"user", FS_ROLE_USER},
	        {"assistant", FS_ROLE_ASSISTANT}, {"tool", FS_ROLE_TOOL}};
	char param[96];
	snprintf(param, sizeof(param), "%s.role", where);
	const char *name = json_string_value(json_object_get(o, "role"));
	if (!name)
		return api_bad(rd, param, "must be a string");
	for (size_t i = 0; i < FS_ARRAY_LEN(roles); i++) {
		if (strcmp(roles[i].name, name) == 0) {
			*out = roles[i].role;
			return FS_OK;
		}
	}
	return api_bad(rd, param, "must be system, developer, user, assistant or tool, not \"%.40s\"", name);
}

static int add_calls(struct api_reader *rd, struct fs_chat_message *m, const json_t *calls, const char *where)
{
	char param[80], at[96];
	int rc = FS_OK;
	snprintf(param, sizeof(param), "%s.tool_calls", where);
	if (!calls || json_is_null(calls))
		return FS_OK;
	if (!json_is_array(calls))
		return api_bad(rd, param, "must be an array");
	if (json_array_size(calls) > 0 && m->role != FS_ROLE_ASSISTANT)
		return api_bad(rd, param, "may only stand in an assistant's message");
	for (size_t i = 0; !rc && i < json_array_size(calls); i++) {
		const json_t *f = json_object_get(json_array_get(calls, i), "function");
		snprintf(at, sizeof(at), "%s[%zu].function", param, i);
		rc = json_is_object(f) ? api_openai_add_call(rd, m, f, at)
		                       : api_bad(rd, at, "must be an object");
	}
	return rc;
}

/* What ties a result to its call. The model tells them apart by their order. */
static int check_call_id(struct api_reader *rd, const json_t *o, enum fs_role role, const char *where)
{
	char param[64];
	snprintf(param, sizeof(param), "%s.tool_call_id", where);
	if (role == FS_ROLE_TOOL && !json_is_string(json_object_get(o, "tool_call_id")))
		return api_bad(rd, param, "must be a string: the id of the call that this is the result of");
	snprintf(param, sizeof(param), "%s.function_call", where);
	if (api_openai_is_set(o, "function_call"))
		return api_bad(rd, param,
		        "is a deprecated form that this server does not take: use "
		        "\"tool_calls\"");
	return FS_OK;
}

static int get_message(struct api_reader *rd, const json_t *o, size_t i)
{
	struct fs_chat_message *m = NULL;
	enum fs_role role = FS_ROLE_USER;
	char where[32], param[64];
	size_t n = 0;
	snprintf(where, sizeof(where), "messages[%zu]", i);
	snprintf(param, sizeof(param), "%s.content", where);
	if (!json_is_object(o))
		return api_bad(rd, where, "must be an object");
	int rc = get_role(rd, o, where, &role);
	if (!rc)
		rc = check_call_id(rd, o, role, where);
	const json_t *content = json_object_get(o, "content");
	bool absent = role == FS_ROLE_ASSISTANT && (!content || json_is_null(content));
	if (!rc && !absent)
		rc = api_openai_n_parts(rd, content, param, &n);
	if (!rc)
		rc = api_add_message(rd, role, n, &m);
	if (!rc && !absent)
		rc = api_openai_add_content(rd, m, content, param, PARTS);
	return rc ? rc : add_calls(rd, m, json_object_get(o, "tool_calls"), where);
}

static int get_messages(struct api_reader *rd, const json_t *root)
{
	const json_t *a = json_object_get(root, "messages");
	size_t n = json_array_size(a);
	if (!json_is_array(a) || n == 0)
		return api_bad(rd, "messages", "must be an array of at least one message");
	int rc = FS_OK;
	for (size_t i = 0; !rc && i < n; i++)
		rc = get_message(rd, json_array_get(a, i), i);
	return rc;
}

/* ---- parameters ---- */

/* Members that change the answer in a way that this server can not give: refused, never ignored. */
static int check_unsupported(struct api_reader *rd, const json_t *root)
{
	static const char *const deprecated[] = {"functions", "function_call"};
	static const char *const absent[] = {"audio", "web_search_options"};
	for (size_t i = 0; i < FS_ARRAY_LEN(deprecated); i++)
		if (api_openai_is_set(root, deprecated[i]))
			return api_bad(rd, deprecated[i],
			        "is a deprecated form that this server does not take: use \"tools\" and "
			        "\"tool_choice\"");
	for (size_t i = 0; i < FS_ARRAY_LEN(absent); i++)
		if (api_openai_is_set(root, absent[i]))
			return api_bad(rd, absent[i], "must be absent: this server does not support it");
	const json_t *modalities = json_object_get(root, "modalities");
	if (modalities && !json_is_null(modalities) && !json_is_array(modalities))
		return api_bad(rd, "modalities", "must be [\"text\"]: this server answers in text");
	for (size_t i = 0; i < json_array_size(modalities); i++) {
		const char *name = json_string_value(json_array_get(modalities, i));
		if (!name || strcmp(name, "text") != 0)
			return api_bad(rd, "modalities", "must be [\"text\"]: this server answers in text");
	}
	const json_t *format = json_object_get(root, "response_format");
	const char *type = json_string_value(json_object_get(format, "type"));
	if (format && !json_is_null(format) && (!type || strcmp(type, "text") != 0))
		return api_bad(rd, "response_format",
		        "must be {\"type\": \"text\"}: this server can not force a format");
	return FS_OK;
}

static int get_logprobs(struct api_reader *rd, const json_t *root)
{
	struct fs_gen_params *g = &rd->chat->gen;
	int64_t top = 0;
	int rc = api_get_bool(rd, root, "logprobs", "logprobs", &g->logprobs);
	if (!rc)
		rc = api_get_int(rd, root, "top_logprobs", 0, FS_MAX_TOP_LOGPROBS, &top);
	if (!rc && top > 0 && !g->logprobs)
		rc = api_bad(rd, "top_logprobs", "needs \"logprobs\": true");
	g->n_top_logprobs = (int32_t)top;
	return rc;
}

static int get_max_tokens(struct api_reader *rd, const json_t *root)
{
	int64_t max = rd->chat->gen.max_tokens;
	int rc = api_get_max_tokens(rd, root, "max_tokens", &max);
	if (!rc)
		rc = api_get_max_tokens(rd, root, "max_completion_tokens", &max);
	rd->chat->gen.max_tokens = (int32_t)max;
	return rc;
}

static int get_options(struct api_reader *rd, const json_t *root, struct api_call *c)
{
	struct api_openai_chat_own *own = c->own;
	int rc = api_openai_get_stream(rd, root, c);
	if (!rc)
		rc = api_get_bool(rd, root, "return_progress", "return_progress", &own->progress);
	if (!rc)
		rc = api_openai_check_common(rd, root);
	if (!rc)
		rc = check_unsupported(rd, root);
	if (!rc)
		rc = api_get_sampling(rd, root);
	if (!rc)
		rc = get_logprobs(rd, root);
	if (!rc)
		rc = get_max_tokens(rd, root);
	if (!rc)
		rc = api_get_timeout(rd, root, &c->timeout_s);
	if (!rc)
		rc = api_get_stops(rd, root, "stop");
	return rc;
}

int api_openai_parse_chat(struct api_call *c, const json_t *root, struct fs_refusal *why)
{
	struct api_reader rd = {.api = c->api, .chat = &c->chat, .why = why};
	struct api_openai_chat_own *own = c->own = calloc(1, sizeof(*own));
	if (!own)
		return api_no_memory(&rd);
	int rc = get_options(&rd, root, c);
	if (!rc)
		rc = api_openai_get_tools(&rd, root, true, &own->one_call);
	if (!rc)
		rc = get_messages(&rd, root);
	api_openai_bound_logprobs(c);
	return rc ? rc : api_check_tools(&rd);
}
