/*
 * Reads an OpenAI chat completion request. Members that are unknown are passed over, as the clients of newer
 * versions of that API expect; known ones that this server can not honour are refused instead of ignored.
 */
#include "server/api/openai.h"
#include "server/api/parse.h"

#include <stdio.h>
#include <string.h>

static int add_image_url(
        struct api_reader *rd, struct fs_chat_message *m, const json_t *part, const char *where)
{
	char param[96];
	const json_t *image = json_object_get(part, "image_url");
	const json_t *url = json_is_object(image) ? json_object_get(image, "url") : image;
	snprintf(param, sizeof(param), "%s.image_url%s", where, json_is_object(image) ? ".url" : "");
	if (m->role != FS_ROLE_USER && m->role != FS_ROLE_TOOL)
		return api_bad(rd, where, "is a picture; only user and tool messages may hold pictures");
	return api_add_picture_url(rd, m, url, json_object_get(image, "detail"), param);
}

static int add_part(struct api_reader *rd, struct fs_chat_message *m, const json_t *part, const char *where)
{
	char param[96];
	const char *type = json_string_value(json_object_get(part, "type"));
	snprintf(param, sizeof(param), "%s.type", where);
	if (!json_is_object(part))
		return api_bad(rd, where, "must be an object");
	if (!type)
		return api_bad(rd, param, "must be \"text\" or \"image_url\"");
	if (strcmp(type, "image_url") == 0)
		return add_image_url(rd, m, part, where);
	if (strcmp(type, "text") != 0)
		return api_bad(rd, param, "must be \"text\" or \"image_url\", not \"%.40s\"", type);
	const json_t *text = json_object_get(part, "text");
	snprintf(param, sizeof(param), "%s.text", where);
	if (!json_is_string(text))
		return api_bad(rd, param, "must be a string");
	return api_add_text(rd, m, json_string_value(text), json_string_length(text));
}

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

static int get_message(struct api_reader *rd, const json_t *o, size_t i)
{
	struct fs_chat_message *m = NULL;
	enum fs_role role = FS_ROLE_USER;
	char where[32], param[64];
	snprintf(where, sizeof(where), "messages[%zu]", i);
	snprintf(param, sizeof(param), "%s.content", where);
	if (!json_is_object(o))
		return api_bad(rd, where, "must be an object");
	int rc = get_role(rd, o, where, &role);
	if (rc)
		return rc;
	const json_t *tool_calls = json_object_get(o, "tool_calls");
	if (json_array_size(tool_calls) > 0)
		return api_bad(rd, where, "holds tool_calls, which this server does not support");
	const json_t *content = json_object_get(o, "content");
	bool may_be_absent = role == FS_ROLE_ASSISTANT && (!content || json_is_null(content));
	if (!json_is_string(content) && !json_is_array(content) && !may_be_absent)
		return api_bad(rd, param, "must be a string or an array of parts");
	size_t n = json_is_array(content) ? json_array_size(content) : 1;
	if (n > API_MAX_PARTS)
		return api_bad(rd, param, "holds more than %d parts", API_MAX_PARTS);
	rc = api_add_message(rd, role, n, &m);
	if (!rc && json_is_string(content))
		rc = api_add_text(rd, m, json_string_value(content), json_string_length(content));
	for (size_t j = 0; !rc && j < json_array_size(content); j++) {
		char at[64];
		snprintf(at, sizeof(at), "%s[%zu]", param, j);
		rc = add_part(rd, m, json_array_get(content, j), at);
	}
	return rc;
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
	int64_t n = 1;
	bool logprobs = false;
	int rc = api_get_int(rd, root, "n", 1, 128, &n);
	if (!rc && n != 1)
		rc = api_bad(rd, "n", "must be 1: this server gives one answer a request");
	if (!rc)
		rc = api_get_bool(rd, root, "logprobs", "logprobs", &logprobs);
	if (!rc && logprobs)
		rc = api_bad(rd, "logprobs", "must be false: this server does not report probabilities");
	static const char *const lists[] = {"tools", "functions"};
	for (size_t i = 0; !rc && i < FS_ARRAY_LEN(lists); i++) {
		const json_t *list = json_object_get(root, lists[i]);
		if (list && !json_is_null(list) && (!json_is_array(list) || json_array_size(list) > 0))
			rc = api_bad(rd, lists[i],
			        "must be an empty array: this server does not support tool calls");
	}
	const json_t *bias = json_object_get(root, "logit_bias");
	if (!rc && bias && !json_is_null(bias) && (!json_is_object(bias) || json_object_size(bias) > 0))
		rc = api_bad(rd, "logit_bias", "must be an empty object: this server does not support it");
	const json_t *format = json_object_get(root, "response_format");
	const char *type = json_string_value(json_object_get(format, "type"));
	if (!rc && format && !json_is_null(format) && (!type || strcmp(type, "text") != 0))
		rc = api_bad(rd, "response_format",
		        "must be {\"type\": \"text\"}: this server can not force a format");
	return rc;
}

static int get_stream(struct api_reader *rd, const json_t *root, struct api_call *c)
{
	int rc = api_get_bool(rd, root, "stream", "stream", &c->stream);
	const json_t *o = json_object_get(root, "stream_options");
	if (!rc && o && !json_is_null(o) && !json_is_object(o))
		rc = api_bad(rd, "stream_options", "must be an object");
	if (!rc)
		rc = api_get_bool(rd, o, "include_usage", "stream_options.include_usage", &c->include_usage);
	const json_t *model = json_object_get(root, "model");
	if (!rc && model && !json_is_null(model) && !json_is_string(model))
		rc = api_bad(rd, "model", "must be a string");
	return rc;
}

static int get_max_tokens(struct api_reader *rd, const json_t *root)
{
	int64_t max = rd->chat->gen.max_tokens;
	int rc = api_get_int(rd, root, "max_tokens", 1, INT32_MAX, &max);
	if (!rc)
		rc = api_get_int(rd, root, "max_completion_tokens", 1, INT32_MAX, &max);
	rd->chat->gen.max_tokens = (int32_t)max;
	return rc;
}

int api_openai_parse_chat(struct api_call *c, const json_t *root, struct fs_refusal *why)
{
	struct api_reader rd = {.api = c->api, .chat = &c->chat, .why = why};
	int rc = get_stream(&rd, root, c);
	if (!rc)
		rc = check_unsupported(&rd, root);
	if (!rc)
		rc = api_get_sampling(&rd, root);
	if (!rc)
		rc = get_max_tokens(&rd, root);
	if (!rc)
		rc = api_get_timeout(&rd, root, &c->timeout_s);
	if (!rc)
		rc = api_get_stops(&rd, root, "stop");
	if (!rc)
		rc = get_messages(&rd, root);
	return rc;
}
