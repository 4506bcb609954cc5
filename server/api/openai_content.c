/* What OpenAI's APIs share in their requests: content with its parts, the stream's options, refusals. */
#include "server/api/openai.h"

#include <stdio.h>
#include <string.h>

enum kind { TEXT, PICTURE };

/* Clients mix the names of chat completions and responses. */
static const struct {
	const char *type, *member;
	enum kind kind;
} part_types[] = {{"text", "text", TEXT}, {"input_text", "text", TEXT}, {"output_text", "text", TEXT},
        {"refusal", "refusal", TEXT}, {"image_url", "image_url", PICTURE},
        {"input_image", "image_url", PICTURE}};

static int add_picture(
        struct api_reader *rd, struct fs_chat_message *m, const json_t *part, const char *where)
{
	char param[96];
	const json_t *image = json_object_get(part, "image_url");
	const json_t *url = json_is_object(image) ? json_object_get(image, "url") : image;
	const json_t *detail = json_object_get(json_is_object(image) ? image : part, "detail");
	if (m->role != FS_ROLE_USER && m->role != FS_ROLE_TOOL)
		return api_bad(rd, where, "is a picture; only user and tool messages may hold pictures");
	if (!url && api_openai_is_set(part, "file_id")) {
		snprintf(param, sizeof(param), "%s.file_id", where);
		return api_bad(rd, param,
		        "names an uploaded file, and this server keeps none: send the picture itself as a "
		        "data: URL");
	}
	snprintf(param, sizeof(param), "%s.image_url%s", where, json_is_object(image) ? ".url" : "");
	return api_add_picture_url(rd, m, url, detail, param);
}

static int add_text(struct api_reader *rd, struct fs_chat_message *m, const json_t *text, const char *where,
        const char *member)
{
	char param[96];
	snprintf(param, sizeof(param), "%s.%s", where, member);
	if (!json_is_string(text))
		return api_bad(rd, param, "must be a string");
	return api_add_text(rd, m, json_string_value(text), json_string_length(text));
}

static int add_part(struct api_reader *rd, struct fs_chat_message *m, const json_t *part, const char *where,
        const char *wanted)
{
	char param[96];
	const char *type = json_string_value(json_object_get(part, "type"));
	if (!json_is_object(part))
		return api_bad(rd, where, "must be an object");
	for (size_t i = 0; type && i < FS_ARRAY_LEN(part_types); i++) {
		const char *member = part_types[i].member;
		if (strcmp(part_types[i].type, type) != 0)
			continue;
		if (part_types[i].kind == PICTURE)
			return add_picture(rd, m, part, where);
		return add_text(rd, m, json_object_get(part, member), where, member);
	}
	snprintf(param, sizeof(param), "%s.type", where);
	if (!type)
		return api_bad(rd, param, "must be %s", wanted);
	return api_bad(rd, param, "must be %s, not \"%.40s\"", wanted, type);
}

int api_openai_n_parts(struct api_reader *rd, const json_t *content, const char *where, size_t *n)
{
	if (!json_is_string(content) && !json_is_array(content))
		return api_bad(rd, where, "must be a string or an array of parts");
	if (json_array_size(content) > API_MAX_PARTS)
		return api_bad(rd, where, "holds more than %d parts", API_MAX_PARTS);
	*n = json_is_array(content) ? json_array_size(content) : 1;
	return FS_OK;
}

int api_openai_add_content(struct api_reader *rd, struct fs_chat_message *m, const json_t *content,
        const char *where, const char *wanted)
{
	if (json_is_string(content))
		return api_add_text(rd, m, json_string_value(content), json_string_length(content));
	int rc = FS_OK;
	for (size_t i = 0; !rc && i < json_array_size(content); i++) {
		char at[80];
		snprintf(at, sizeof(at), "%s[%zu]", where, i);
		rc = add_part(rd, m, json_array_get(content, i), at, wanted);
	}
	return rc;
}

bool api_openai_is_set(const json_t *root, const char *key)
{
	const json_t *v = json_object_get(root, key);
	if (json_is_array(v))
		return json_array_size(v) > 0;
	if (json_is_object(v))
		return json_object_size(v) > 0;
	if (json_is_string(v))
		return json_string_length(v) > 0;
	if (json_is_number(v))
		return json_number_value(v) != 0;
	return v && !json_is_null(v) && !json_is_false(v);
}

int api_openai_check_common(struct api_reader *rd, const json_t *root)
{
	int64_t n = 1;
	int rc = api_get_int(rd, root, "n", 1, 128, &n);
	if (!rc && n != 1)
		rc = api_bad(rd, "n", "must be 1: this server gives one answer a request");
	const json_t *bias = json_object_get(root, "logit_bias");
	if (!rc && bias && !json_is_null(bias) && (!json_is_object(bias) || json_object_size(bias) > 0))
		rc = api_bad(rd, "logit_bias", "must be an empty object: this server does not support it");
	return rc;
}

int api_openai_get_stream(struct api_reader *rd, const json_t *root, struct api_call *c)
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

const char *api_openai_finish(const struct api_call *c, const struct fs_chat_report *rep)
{
	return c->n_calls > 0 && rep->gen.finish == FS_FINISH_STOP ? "tool_calls"
	                                                           : api_finish_name(rep->gen.finish);
}
