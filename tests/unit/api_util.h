/* For tests of dialects: a call whose stream goes to a session of the test's, and its events as JSON. */
#ifndef FS_TEST_API_UTIL_H
#define FS_TEST_API_UTIL_H

#include "server/api/call.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct fs_api test_api = {.model_name = "mini"};

static inline int api_setup(void **state)
{
	struct fs_service_opts o = {
	        .workers = 1, .queue_depth = 1, .max_pictures = 2, .picture = {.max_bytes = 16}};
	fs_gen_params_default(&test_api.sampling);
	return fs_service_create(&o, &test_api.service, NULL) ||
	       fs_streams_create(&(struct fs_streams_opts){0}, &test_api.streams, NULL);
}

static inline int api_teardown(void **state)
{
	fs_service_destroy(test_api.service);
	fs_streams_destroy(test_api.streams);
	return 0;
}

struct test_call {
	struct api_call c;
	struct fs_reader *reader;
};

static inline void ignore_notify(void *arg)
{
}

static inline void call_open(struct test_call *t, const struct api_dialect *d, const char *json)
{
	static const uint8_t owner[FS_SESSION_OWNER];
	struct fs_refusal why = {0};
	memset(t, 0, sizeof(*t));
	t->c = (struct api_call){.api = &test_api, .d = d, .created = 1700000000, .followed = true};
	snprintf(t->c.id, sizeof(t->c.id), "%s1", d->id_prefix);
	fs_buf_init(&t->c.answer, 1 << 20);
	if (api_call_parse(&t->c, json, strlen(json), NULL, &why))
		fail_msg("%s: %s", json, why.text.text);
	t->c.cancel = fs_cancel_create(FS_NEVER);
	assert_int_equal(
	        fs_session_open(test_api.streams, "test", owner, t->c.cancel, false, &t->c.session, NULL),
	        FS_OK);
	assert_int_equal(fs_reader_attach_to(t->c.session, 0, ignore_notify, NULL, &t->reader), FS_OK);
}

static inline void call_close(struct test_call *t)
{
	fs_reader_detach(t->reader);
	fs_session_finish(t->c.session);
	fs_cancel_unref(t->c.cancel);
	api_call_finish(&t->c);
}

/* What the engine's text and calls do to a call, as in call.c. */
static inline void call_text(struct test_call *t, const char *text)
{
	if (t->c.stream)
		t->c.d->text(&t->c, text, strlen(text));
	else
		fs_buf_append_str(&t->c.answer, text);
}

static inline void call_tool(struct test_call *t, const char *name, const char *arguments)
{
	struct api_call *c = &t->c;
	c->calls = realloc(c->calls, (c->n_calls + 1) * sizeof(*c->calls));
	struct api_tool_call *one = &c->calls[c->n_calls++];
	*one = (struct api_tool_call){.name = strdup(name), .arguments = strdup(arguments)};
	snprintf(one->id, sizeof(one->id), "call_%zu", c->n_calls);
	if (c->stream)
		c->d->call(c, one);
}

/* What was streamed so far, as one text. */
static inline char *call_bytes(struct test_call *t)
{
	static char text[1 << 16];
	ssize_t n = fs_reader_read(t->reader, text, sizeof(text) - 1);
	text[n > 0 ? n : 0] = '\0';
	return text;
}

/* The events of a stream: an array of {"event": name or null, "data": object or, when it is no JSON, text}.
 */
static inline json_t *call_events(struct test_call *t)
{
	json_t *all = json_array();
	char *text = call_bytes(t), *next;
	for (; *text; text = next) {
		char *end = strstr(text, "\n\n"), *event = NULL;
		assert_non_null(end);
		*end = '\0';
		next = end + 2;
		if (strncmp(text, "event: ", 7) == 0) {
			event = text + 7;
			text = strchr(text, '\n');
			*text++ = '\0';
		}
		assert_memory_equal(text, "data: ", 6);
		json_t *data = json_loads(text + 6, 0, NULL);
		json_array_append_new(all, json_pack("{s:s?, s:o}", "event", event, "data",
		                                   data ? data : json_string(text + 6)));
	}
	return all;
}

/* Whether o has all members that `want` (JSON text) has, as deep as it goes; arrays must be as long. */
static inline bool json_has(const json_t *o, const json_t *want)
{
	const char *key;
	json_t *v;
	if (json_is_array(want)) {
		bool same = json_is_array(o) && json_array_size(o) == json_array_size(want);
		for (size_t i = 0; same && i < json_array_size(want); i++)
			same = json_has(json_array_get(o, i), json_array_get(want, i));
		return same;
	}
	if (!json_is_object(want))
		return json_equal(o, want);
	json_object_foreach((json_t *)want, key, v)
	{
		if (!json_has(json_object_get(o, key), v))
			return false;
	}
	return json_is_object(o);
}

static inline void assert_has(const json_t *o, const char *want)
{
	json_error_t je;
	json_t *w = json_loads(want, JSON_DECODE_ANY, &je);
	if (!w)
		fail_msg("the test's own JSON is wrong: %s: %s", je.text, want);
	if (!json_has(o, w)) {
		char *text = json_dumps(o, JSON_ENCODE_ANY);
		fail_msg("%s\nlacks\n%s", text, want);
	}
	json_decref(w);
}

#endif
