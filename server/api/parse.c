/* Checked access to the members of a request, shared by all APIs. */
#include "server/api/parse.h"

#include "server/fetch/fetch.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

/* Rows that "detail": "low" asks for: what OpenAI's own models spend on such a picture. */
#define LOW_DETAIL_TOKENS 85

int api_bad(struct api_reader *rd, const char *param, const char *fmt, ...)
{
	struct fs_errbuf e;
	va_list ap;
	va_start(ap, fmt);
	vsnprintf(e.text, sizeof(e.text), fmt, ap);
	va_end(ap);
	return fs_refuse(rd->why, 400, "invalid_request_error", NULL, param, "\"%s\" %s", param, e.text);
}

int api_no_memory(struct api_reader *rd)
{
	return fs_refuse(rd->why, 500, "server_error", NULL, "", "out of memory");
}

char *api_strdup(const json_t *s)
{
	return strdup(json_string_value(s));
}

/* ---- scalars ---- */

int api_get_number(
        struct api_reader *rd, const json_t *o, const char *key, double min, double max, float *out)
{
	const json_t *v = json_object_get(o, key);
	if (!v || json_is_null(v))
		return FS_OK;
	double d = json_number_value(v);
	if (!json_is_number(v) || !(d >= min && d <= max))
		return api_bad(rd, key, "must be a number from %g to %g", min, max);
	*out = (float)d;
	return FS_OK;
}

int api_get_int(
        struct api_reader *rd, const json_t *o, const char *key, int64_t min, int64_t max, int64_t *out)
{
	const json_t *v = json_object_get(o, key);
	if (!v || json_is_null(v))
		return FS_OK;
	if (!json_is_integer(v) || json_integer_value(v) < min || json_integer_value(v) > max)
		return api_bad(
		        rd, key, "must be a whole number from %lld to %lld", (long long)min, (long long)max);
	*out = json_integer_value(v);
	return FS_OK;
}

int api_get_max_tokens(struct api_reader *rd, const json_t *o, const char *key, int64_t *out)
{
	const json_t *v = json_object_get(o, key);
	if (!v || json_is_null(v))
		return FS_OK;
	json_int_t n = json_integer_value(v);
	if (!json_is_integer(v) || n < -1 || n == 0 || n > INT32_MAX)
		return api_bad(
		        rd, key, "must be a whole number from 1 to %d, or -1 for what fits", INT32_MAX);
	*out = FS_MAX(n, 0);
	return FS_OK;
}

int api_get_bool(struct api_reader *rd, const json_t *o, const char *key, const char *param, bool *out)
{
	const json_t *v = json_object_get(o, key);
	if (!v || json_is_null(v))
		return FS_OK;
	if (!json_is_boolean(v))
		return api_bad(rd, param, "must be true or false");
	*out = json_is_true(v);
	return FS_OK;
}

int api_get_timeout(struct api_reader *rd, const json_t *root, int64_t *out)
{
	return api_get_int(rd, root, "timeout_s", 1, 86400, out);
}

/* ---- messages ---- */

int api_add_message(struct api_reader *rd, enum fs_role role, size_t n_parts, struct fs_chat_message **out)
{
	struct fs_chat *c = rd->chat;
	if (c->n_messages == API_MAX_MESSAGES)
		return api_bad(rd, "messages", "holds more than %d messages", API_MAX_MESSAGES);
	if (c->n_messages == rd->messages_cap) {
		size_t cap = rd->messages_cap ? rd->messages_cap * 2 : 16;
		struct fs_chat_message *m = realloc(c->messages, cap * sizeof(*m));
		if (!m)
			return api_no_memory(rd);
		c->messages = m;
		rd->messages_cap = cap;
	}
	struct fs_chat_message *m = &c->messages[c->n_messages];
	*m = (struct fs_chat_message){.role = role, .parts = calloc(n_parts + 1, sizeof(*m->parts))};
	if (!m->parts)
		return api_no_memory(rd);
	c->n_messages++;
	*out = m;
	return FS_OK;
}

int api_add_text(struct api_reader *rd, struct fs_chat_message *m, const char *utf8, size_t n)
{
	struct fs_chat_part *p = &m->parts[m->n_parts];
	p->text_len = n;
	p->text = malloc(n + 1);
	if (!p->text)
		return api_no_memory(rd);
	memcpy(p->text, utf8, n);
	p->text[n] = '\0';
	m->n_parts++;
	return FS_OK;
}

/* ---- pictures ---- */

static int picture_slot(struct api_reader *rd, const char *param, struct fs_picture **out)
{
	struct fs_chat *c = rd->chat;
	size_t most = fs_service_opts(rd->api->service)->max_pictures;
	if (c->n_pictures >= most)
		return fs_refuse(rd->why, 400, "invalid_request_error", "too_many_pictures", param,
		        "the request holds more than %zu pictures, the most that this server takes", most);
	if (c->n_pictures == rd->pictures_cap) {
		size_t cap = rd->pictures_cap ? rd->pictures_cap * 2 : 4;
		struct fs_picture *p = realloc(c->pictures, cap * sizeof(*p));
		if (!p)
			return api_no_memory(rd);
		c->pictures = p;
		rd->pictures_cap = cap;
	}
	struct fs_picture *p = &c->pictures[c->n_pictures];
	*p = (struct fs_picture){0};
	snprintf(p->where, sizeof(p->where), "%s", param);
	*out = p;
	return FS_OK;
}

static void keep_picture(struct api_reader *rd, struct fs_chat_message *m)
{
	m->parts[m->n_parts++] = (struct fs_chat_part){.picture = rd->chat->n_pictures++};
}

static int refuse_data(struct api_reader *rd, int rc, const char *param, const struct fs_errbuf *e)
{
	return fs_refuse(rd->why, 400, "invalid_request_error",
	        rc == FS_ELIMIT ? "picture_too_large" : "picture_unreadable", param, "%s", e->text);
}

static bool is_web(const char *url)
{
	return strncasecmp(url, "http://", 7) == 0 || strncasecmp(url, "https://", 8) == 0;
}

static int refuse_url(struct api_reader *rd, const char *param, const char *url)
{
	if (is_web(url))
		return api_bad(rd, param,
		        "is a web address; this server does not fetch pictures: send the picture itself as a "
		        "data: URL");
	if (fs_file_url_is(url) || url[0] == '\\')
		return api_bad(rd, param,
		        "names a file; this server reads no files for clients (\"picture_folders\" in its "
		        "config "
		        "would allow it): send the picture itself as a data: URL");
	return api_bad(
	        rd, param, "must be a data: URL, that is data:image/png;base64, in front of the base64 text");
}

static int get_detail(struct api_reader *rd, const json_t *detail, const char *param, int32_t *max_tokens)
{
	if (!detail || json_is_null(detail))
		return FS_OK;
	const char *name = json_string_value(detail);
	if (!name)
		return fs_refuse(rd->why, 400, "invalid_request_error", NULL, param,
		        "the \"detail\" of \"%s\" must be a string", param);
	if (strcmp(name, "low") == 0)
		*max_tokens = LOW_DETAIL_TOKENS;
	return FS_OK;
}

static int take_path(struct api_reader *rd, struct fs_picture *p, const char *url, const char *param)
{
	struct fs_errbuf e;
	int rc = fs_file_url_decode(url, &p->path, &e);
	if (rc == FS_ENOMEM)
		return api_no_memory(rd);
	return rc ? api_bad(rd, param, "%s", e.text) : FS_OK;
}

static int take_data(struct api_reader *rd, struct fs_picture *p, const json_t *url, const char *param)
{
	struct fs_errbuf e;
	int rc = fs_data_url_decode(json_string_value(url), json_string_length(url),
	        fs_service_opts(rd->api->service)->picture.max_bytes, &p->bytes, &p->n, &e);
	return rc ? refuse_data(rd, rc, param, &e) : FS_OK;
}

int api_add_picture_url(struct api_reader *rd, struct fs_chat_message *m, const json_t *url,
        const json_t *detail, const char *param)
{
	const struct fs_service_opts *o = fs_service_opts(rd->api->service);
	struct fs_picture *p = NULL;
	if (!json_is_string(url))
		return api_bad(rd, param, "must be a string");
	const char *text = json_string_value(url);
	bool whole = strlen(text) == json_string_length(url);
	bool fetch = o->fetch && is_web(text), file = o->n_picture_folders > 0 && fs_file_url_is(text);
	if (!fetch && !file && strncasecmp(text, "data:", 5) != 0)
		return refuse_url(rd, param, text);
	if (!whole)
		return api_bad(rd, param, "holds a NUL");
	int rc = picture_slot(rd, param, &p);
	if (!rc)
		rc = get_detail(rd, detail, param, &p->max_tokens);
	if (!rc && fetch)
		rc = (p->url = api_strdup(url)) ? FS_OK : api_no_memory(rd);
	else if (!rc && file)
		rc = take_path(rd, p, text, param);
	else if (!rc)
		rc = take_data(rd, p, url, param);
	if (!rc)
		keep_picture(rd, m);
	return rc;
}

int api_add_picture_base64(
        struct api_reader *rd, struct fs_chat_message *m, const json_t *data, const char *param)
{
	struct fs_picture *p = NULL;
	struct fs_errbuf e;
	if (!json_is_string(data))
		return api_bad(rd, param, "must be a string");
	int rc = picture_slot(rd, param, &p);
	if (rc)
		return rc;
	rc = fs_base64_decode(json_string_value(data), json_string_length(data),
	        fs_service_opts(rd->api->service)->picture.max_bytes, &p->bytes, &p->n, &e);
	if (rc)
		return refuse_data(rd, rc, param, &e);
	keep_picture(rd, m);
	return FS_OK;
}

/* ---- parameters ---- */

static int add_stop(struct api_reader *rd, const char *key, const json_t *v)
{
	struct fs_chat *c = rd->chat;
	size_t n = json_string_length(v);
	if (!json_is_string(v) || n == 0 || n > 256 || strlen(json_string_value(v)) != n)
		return api_bad(rd, key,
		        "must be a string of 1 to 256 bytes, or an array of at most %d such strings",
		        FS_MAX_STOPS);
	size_t at = c->gen.n_stops;
	c->stops[at] = strdup(json_string_value(v));
	if (!c->stops[at])
		return api_no_memory(rd);
	c->gen.stops[at] = c->stops[at];
	c->gen.n_stops++;
	return FS_OK;
}

int api_get_stops(struct api_reader *rd, const json_t *root, const char *key)
{
	const json_t *v = json_object_get(root, key);
	if (!v || json_is_null(v))
		return FS_OK;
	if (!json_is_array(v))
		return add_stop(rd, key, v);
	if (json_array_size(v) > FS_MAX_STOPS)
		return api_bad(rd, key, "holds more than %d strings", FS_MAX_STOPS);
	int rc = FS_OK;
	for (size_t i = 0; !rc && i < json_array_size(v); i++)
		rc = add_stop(rd, key, json_array_get(v, i));
	return rc;
}

int api_get_sampling(struct api_reader *rd, const json_t *root)
{
	struct fs_gen_params *g = &rd->chat->gen;
	int64_t top_k = g->top_k, last_n = g->repeat_last_n, seed = -1;
	int rc = api_get_number(rd, root, "temperature", 0, 2, &g->temperature);
	if (!rc)
		rc = api_get_number(rd, root, "top_p", 0, 1, &g->top_p);
	if (!rc)
		rc = api_get_number(rd, root, "min_p", 0, 1, &g->min_p);
	if (!rc)
		rc = api_get_number(rd, root, "presence_penalty", -2, 2, &g->presence_penalty);
	if (!rc)
		rc = api_get_number(rd, root, "frequency_penalty", -2, 2, &g->frequency_penalty);
	if (!rc)
		rc = api_get_number(rd, root, "repeat_penalty", 0.01, 10, &g->repeat_penalty);
	if (!rc)
		rc = api_get_int(rd, root, "top_k", 0, 1 << 20, &top_k);
	if (!rc)
		rc = api_get_int(rd, root, "repeat_last_n", 0, 1 << 20, &last_n);
	if (!rc)
		rc = api_get_int(rd, root, "seed", INT64_MIN, INT64_MAX, &seed);
	if (!rc)
		rc = api_get_bool(rd, root, "ignore_eos", "ignore_eos", &g->ignore_eos);
	g->top_k = (int32_t)top_k;
	g->repeat_last_n = (int32_t)last_n;
	g->seed = (uint64_t)seed;
	g->has_seed = json_is_integer(json_object_get(root, "seed")) &&
	              seed != -1; /* as llama.cpp's clients say "any" */
	return rc;
}
