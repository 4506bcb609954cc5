/*
 * Reads an OpenAI chat completion request: jansson parses, this file checks every member that it uses and
 * names the one that is wrong. Members that are unknown are passed over, as the clients of newer versions of
 * that API expect; known ones that this server can not honour are refused instead of ignored.
 */
#include "server/api/api.h"

#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#define MAX_MESSAGES 4096
#define MAX_PARTS 4096

struct reader {
	const struct fs_api *api;
	struct fs_openai_chat *out;
	struct fs_refusal *why;
	size_t pictures_cap;
};

static int bad(struct reader *rd, const char *param, const char *fmt, ...) FS_PRINTF(3, 4);
static int bad(struct reader *rd, const char *param, const char *fmt, ...)
{
	struct fs_errbuf e;
	va_list ap;
	va_start(ap, fmt);
	vsnprintf(e.text, sizeof(e.text), fmt, ap);
	va_end(ap);
	return fs_refuse(rd->why, 400, "invalid_request_error", NULL, param, "\"%s\" %s", param, e.text);
}

static int no_memory(struct reader *rd)
{
	return fs_refuse(rd->why, 500, "server_error", NULL, "", "out of memory");
}

/* ---- scalars: an absent member or null leaves *out as it is ---- */

static int get_number(struct reader *rd, const json_t *o, const char *key, double min, double max, float *out)
{
	const json_t *v = json_object_get(o, key);
	if (!v || json_is_null(v))
		return FS_OK;
	double d = json_number_value(v);
	if (!json_is_number(v) || !(d >= min && d <= max))
		return bad(rd, key, "must be a number from %g to %g", min, max);
	*out = (float)d;
	return FS_OK;
}

static int get_int(
        struct reader *rd, const json_t *o, const char *key, int64_t min, int64_t max, int64_t *out)
{
	const json_t *v = json_object_get(o, key);
	if (!v || json_is_null(v))
		return FS_OK;
	if (!json_is_integer(v) || json_integer_value(v) < min || json_integer_value(v) > max)
		return bad(
		        rd, key, "must be a whole number from %lld to %lld", (long long)min, (long long)max);
	*out = json_integer_value(v);
	return FS_OK;
}

static int get_bool(struct reader *rd, const json_t *o, const char *key, const char *param, bool *out)
{
	const json_t *v = json_object_get(o, key);
	if (!v || json_is_null(v))
		return FS_OK;
	if (!json_is_boolean(v))
		return bad(rd, param, "must be true or false");
	*out = json_is_true(v);
	return FS_OK;
}

/* ---- content ---- */

static int add_text(struct reader *rd, struct fs_chat_message *m, const json_t *s)
{
	struct fs_chat_part *p = &m->parts[m->n_parts];
	p->text_len = json_string_length(s);
	p->text = malloc(p->text_len + 1);
	if (!p->text)
		return no_memory(rd);
	memcpy(p->text, json_string_value(s), p->text_len + 1);
	m->n_parts++;
	return FS_OK;
}

static int picture_slot(struct reader *rd, struct fs_picture **out)
{
	struct fs_chat *c = &rd->out->chat;
	if (c->n_pictures == rd->pictures_cap) {
		size_t cap = rd->pictures_cap ? rd->pictures_cap * 2 : 4;
		struct fs_picture *p = realloc(c->pictures, cap * sizeof(*p));
		if (!p)
			return no_memory(rd);
		c->pictures = p;
		rd->pictures_cap = cap;
	}
	*out = &c->pictures[c->n_pictures];
	**out = (struct fs_picture){0};
	return FS_OK;
}

static int refuse_url(struct reader *rd, const char *param, const char *url)
{
	if (strncasecmp(url, "http://", 7) == 0 || strncasecmp(url, "https://", 8) == 0)
		return bad(rd, param,
		        "is a web address; this server does not fetch pictures: send the picture itself as a "
		        "data: URL");
	if (strncasecmp(url, "file:", 5) == 0 || url[0] == '/' || url[0] == '\\')
		return bad(rd, param,
		        "names a file; this server reads no files for clients: send the picture itself as a "
		        "data: URL");
	return bad(
	        rd, param, "must be a data: URL, that is data:image/png;base64, in front of the base64 text");
}

static int add_picture(struct reader *rd, struct fs_chat_message *m, const json_t *url, const char *param)
{
	struct fs_chat *c = &rd->out->chat;
	const struct fs_service_opts *o = fs_service_opts(rd->api->service);
	if (c->n_pictures >= o->max_pictures)
		return fs_refuse(rd->why, 400, "invalid_request_error", "too_many_pictures", param,
		        "the request holds more than %zu pictures, the most that this server takes",
		        o->max_pictures);
	if (strncasecmp(json_string_value(url), "data:", 5) != 0)
		return refuse_url(rd, param, json_string_value(url));
	struct fs_picture *p = NULL;
	struct fs_errbuf e;
	int rc = picture_slot(rd, &p);
	if (rc)
		return rc;
	rc = fs_data_url_decode(
	        json_string_value(url), json_string_length(url), o->picture.max_bytes, &p->bytes, &p->n, &e);
	if (rc)
		return fs_refuse(rd->why, 400, "invalid_request_error",
		        rc == FS_ELIMIT ? "picture_too_large" : "picture_unreadable", param, "%s", e.text);
	snprintf(p->where, sizeof(p->where), "%s", param);
	m->parts[m->n_parts++] = (struct fs_chat_part){.picture = c->n_pictures++};
	return FS_OK;
}

static int add_image_url(struct reader *rd, struct fs_chat_message *m, const json_t *part, const char *where)
{
	char param[96];
	const json_t *image = json_object_get(part, "image_url");
	const json_t *url = json_is_object(image) ? json_object_get(image, "url") : image;
	snprintf(param, sizeof(param), "%s.image_url%s", where, json_is_object(image) ? ".url" : "");
	if (!json_is_string(url))
		return bad(rd, param, "must be a string");
	const json_t *detail = json_object_get(image, "detail");
	if (detail && !json_is_null(detail) && !json_is_string(detail))
		return fs_refuse(rd->why, 400, "invalid_request_error", NULL, where,
		        "\"%s.image_url.detail\" must be a string", where);
	if (m->role != FS_ROLE_USER && m->role != FS_ROLE_TOOL)
		return bad(rd, where, "is a picture; only user and tool messages may hold pictures");
	return add_picture(rd, m, url, param);
}

static int add_part(struct reader *rd, struct fs_chat_message *m, const json_t *part, const char *where)
{
	char param[96];
	const char *type = json_string_value(json_object_get(part, "type"));
	snprintf(param, sizeof(param), "%s.type", where);
	if (!json_is_object(part))
		return bad(rd, where, "must be an object");
	if (!type)
		return bad(rd, param, "must be \"text\" or \"image_url\"");
	if (strcmp(type, "image_url") == 0)
		return add_image_url(rd, m, part, where);
	if (strcmp(type, "text") != 0)
		return bad(rd, param, "must be \"text\" or \"image_url\", not \"%.40s\"", type);
	const json_t *text = json_object_get(part, "text");
	snprintf(param, sizeof(param), "%s.text", where);
	if (!json_is_string(text))
		return bad(rd, param, "must be a string");
	return add_text(rd, m, text);
}

static int get_role(struct reader *rd, const json_t *o, const char *where, enum fs_role *out)
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
		return bad(rd, param, "must be a string");
	for (size_t i = 0; i < FS_ARRAY_LEN(roles); i++) {
		if (strcmp(roles[i].name, name) == 0) {
			*out = roles[i].role;
			return FS_OK;
		}
	}
	return bad(rd, param, "must be system, developer, user, assistant or tool, not \"%.40s\"", name);
}

static int get_message(struct reader *rd, const json_t *o, size_t i, struct fs_chat_message *m)
{
	char where[32], param[64];
	snprintf(where, sizeof(where), "messages[%zu]", i);
	snprintf(param, sizeof(param), "%s.content", where);
	if (!json_is_object(o))
		return bad(rd, where, "must be an object");
	int rc = get_role(rd, o, where, &m->role);
	if (rc)
		return rc;
	const json_t *tool_calls = json_object_get(o, "tool_calls");
	if (json_array_size(tool_calls) > 0)
		return bad(rd, where, "holds tool_calls, which this server does not support");
	const json_t *content = json_object_get(o, "content");
	bool may_be_absent = m->role == FS_ROLE_ASSISTANT && (!content || json_is_null(content));
	if (!json_is_string(content) && !json_is_array(content) && !may_be_absent)
		return bad(rd, param, "must be a string or an array of parts");
	size_t n = json_is_array(content) ? json_array_size(content) : 1;
	if (n > MAX_PARTS)
		return bad(rd, param, "holds more than %d parts", MAX_PARTS);
	m->parts = calloc(n + 1, sizeof(*m->parts));
	if (!m->parts)
		return no_memory(rd);
	if (json_is_string(content))
		return add_text(rd, m, content);
	for (size_t j = 0; !rc && j < json_array_size(content); j++) {
		char at[64];
		snprintf(at, sizeof(at), "%s[%zu]", param, j);
		rc = add_part(rd, m, json_array_get(content, j), at);
	}
	return rc;
}

static int get_messages(struct reader *rd, const json_t *root)
{
	struct fs_chat *c = &rd->out->chat;
	const json_t *a = json_object_get(root, "messages");
	size_t n = json_array_size(a);
	if (!json_is_array(a) || n == 0)
		return bad(rd, "messages", "must be an array of at least one message");
	if (n > MAX_MESSAGES)
		return bad(rd, "messages", "holds more than %d messages", MAX_MESSAGES);
	c->messages = calloc(n, sizeof(*c->messages));
	if (!c->messages)
		return no_memory(rd);
	int rc = FS_OK;
	for (size_t i = 0; !rc && i < n; i++) {
		c->n_messages = i + 1;
		rc = get_message(rd, json_array_get(a, i), i, &c->messages[i]);
	}
	return rc;
}

/* ---- parameters ---- */

static int add_stop(struct reader *rd, const json_t *v)
{
	struct fs_chat *c = &rd->out->chat;
	size_t n = json_string_length(v);
	if (!json_is_string(v) || n == 0 || n > 256 || strlen(json_string_value(v)) != n)
		return bad(rd, "stop",
		        "must be a string of 1 to 256 bytes, or an array of at most %d such strings",
		        FS_MAX_STOPS);
	size_t at = c->gen.n_stops;
	c->stops[at] = strdup(json_string_value(v));
	if (!c->stops[at])
		return no_memory(rd);
	c->gen.stops[at] = c->stops[at];
	c->gen.n_stops++;
	return FS_OK;
}

static int get_stops(struct reader *rd, const json_t *root)
{
	const json_t *v = json_object_get(root, "stop");
	if (!v || json_is_null(v))
		return FS_OK;
	if (!json_is_array(v))
		return add_stop(rd, v);
	if (json_array_size(v) > FS_MAX_STOPS)
		return bad(rd, "stop", "holds more than %d strings", FS_MAX_STOPS);
	int rc = FS_OK;
	for (size_t i = 0; !rc && i < json_array_size(v); i++)
		rc = add_stop(rd, json_array_get(v, i));
	return rc;
}

static int get_sampling(struct reader *rd, const json_t *root)
{
	struct fs_gen_params *g = &rd->out->chat.gen;
	int64_t top_k = g->top_k, last_n = g->repeat_last_n, seed = -1, max = g->max_tokens;
	int rc = get_number(rd, root, "temperature", 0, 2, &g->temperature);
	if (!rc)
		rc = get_number(rd, root, "top_p", 0, 1, &g->top_p);
	if (!rc)
		rc = get_number(rd, root, "min_p", 0, 1, &g->min_p);
	if (!rc)
		rc = get_number(rd, root, "presence_penalty", -2, 2, &g->presence_penalty);
	if (!rc)
		rc = get_number(rd, root, "frequency_penalty", -2, 2, &g->frequency_penalty);
	if (!rc)
		rc = get_number(rd, root, "repeat_penalty", 0.01, 10, &g->repeat_penalty);
	if (!rc)
		rc = get_int(rd, root, "top_k", 0, 1 << 20, &top_k);
	if (!rc)
		rc = get_int(rd, root, "repeat_last_n", 0, 1 << 20, &last_n);
	if (!rc)
		rc = get_int(rd, root, "seed", INT64_MIN, INT64_MAX, &seed);
	if (!rc)
		rc = get_int(rd, root, "max_tokens", 1, INT32_MAX, &max);
	if (!rc)
		rc = get_int(rd, root, "max_completion_tokens", 1, INT32_MAX, &max);
	g->top_k = (int32_t)top_k;
	g->repeat_last_n = (int32_t)last_n;
	g->max_tokens = (int32_t)max;
	g->seed = (uint64_t)seed;
	g->has_seed = json_is_integer(json_object_get(root, "seed"));
	return rc;
}

/* Members that change the answer in a way that this server can not give: refused, never ignored. */
static int check_unsupported(struct reader *rd, const json_t *root)
{
	int64_t n = 1;
	bool logprobs = false;
	int rc = get_int(rd, root, "n", 1, 128, &n);
	if (!rc && n != 1)
		rc = bad(rd, "n", "must be 1: this server gives one answer a request");
	if (!rc)
		rc = get_bool(rd, root, "logprobs", "logprobs", &logprobs);
	if (!rc && logprobs)
		rc = bad(rd, "logprobs", "must be false: this server does not report probabilities");
	static const char *const lists[] = {"tools", "functions"};
	for (size_t i = 0; !rc && i < FS_ARRAY_LEN(lists); i++) {
		const json_t *list = json_object_get(root, lists[i]);
		if (list && !json_is_null(list) && (!json_is_array(list) || json_array_size(list) > 0))
			rc = bad(rd, lists[i],
			        "must be an empty array: this server does not support tool calls");
	}
	const json_t *bias = json_object_get(root, "logit_bias");
	if (!rc && bias && !json_is_null(bias) && (!json_is_object(bias) || json_object_size(bias) > 0))
		rc = bad(rd, "logit_bias", "must be an empty object: this server does not support it");
	const json_t *format = json_object_get(root, "response_format");
	const char *type = json_string_value(json_object_get(format, "type"));
	if (!rc && format && !json_is_null(format) && (!type || strcmp(type, "text") != 0))
		rc = bad(rd, "response_format",
		        "must be {\"type\": \"text\"}: this server can not force a format");
	return rc;
}

static int get_stream(struct reader *rd, const json_t *root)
{
	int rc = get_bool(rd, root, "stream", "stream", &rd->out->stream);
	const json_t *o = json_object_get(root, "stream_options");
	if (!rc && o && !json_is_null(o) && !json_is_object(o))
		rc = bad(rd, "stream_options", "must be an object");
	if (!rc)
		rc = get_bool(
		        rd, o, "include_usage", "stream_options.include_usage", &rd->out->include_usage);
	const json_t *model = json_object_get(root, "model");
	if (!rc && model && !json_is_null(model) && !json_is_string(model))
		rc = bad(rd, "model", "must be a string");
	return rc;
}

int fs_openai_parse(const char *json, size_t n, const struct fs_api *api, struct fs_openai_chat *out,
        struct fs_refusal *why)
{
	json_error_t je;
	json_t *root = json_loadb(json, n, JSON_ALLOW_NUL, &je);
	if (!root)
		return fs_refuse(why, 400, "invalid_request_error", "invalid_json", "",
		        "the body is not JSON: line %d, column %d: %s", je.line, je.column, je.text);
	memset(out, 0, sizeof(*out));
	out->chat.gen = api->sampling;
	struct reader rd = {.api = api, .out = out, .why = why};
	int rc = FS_OK;
	if (!json_is_object(root))
		rc = fs_refuse(why, 400, "invalid_request_error", "invalid_json", "",
		        "the body must be a JSON object");
	if (!rc)
		rc = get_stream(&rd, root);
	if (!rc)
		rc = check_unsupported(&rd, root);
	if (!rc)
		rc = get_sampling(&rd, root);
	if (!rc)
		rc = get_stops(&rd, root);
	if (!rc)
		rc = get_messages(&rd, root);
	json_decref(root);
	if (rc)
		fs_chat_finish(&out->chat);
	return rc;
}
