/* server/api: Anthropic's Messages API: what a request must look like, and the shapes of what comes back. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "server/api/anthropic.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define BASE64 "aGVsbG8="
#define PICTURE(data)                                                                                        \
	"{\"type\":\"image\",\"source\":{\"type\":\"base64\",\"media_type\":\"image/png\",\"data\":\"" data  \
	"\"}}"
#define TEXT(t) "{\"type\":\"text\",\"text\":\"" t "\"}"
#define USE(input) "{\"type\":\"tool_use\",\"id\":\"toolu_1\",\"name\":\"look\",\"input\":" input "}"
#define RESULT(content) "{\"type\":\"tool_result\",\"tool_use_id\":\"toolu_1\",\"content\":" content "}"
#define TOOL "{\"name\":\"look\",\"description\":\"Looks.\",\"input_schema\":{\"type\":\"object\"}}"

static struct fs_api api = {.model_name = "mini"};
static struct api_call out;
static struct fs_refusal why;
static struct fs_buf wire; /* what went to the client's stream */

int __wrap_fs_http_stream_write(struct fs_http_request *r, const void *data, size_t n);
int __wrap_fs_http_stream_write(struct fs_http_request *r, const void *data, size_t n)
{
	return fs_buf_append(&wire, data, n);
}

static int setup(void **state)
{
	struct fs_service_opts o = {
	        .workers = 1, .queue_depth = 1, .max_pictures = 2, .picture = {.max_bytes = 16}};
	fs_gen_params_default(&api.sampling);
	fs_buf_init(&wire, 1 << 20);
	return fs_service_create(&o, &api.service, NULL);
}

static int teardown(void **state)
{
	fs_service_destroy(api.service);
	fs_buf_finish(&wire);
	return 0;
}

static int parse_as(const struct api_dialect *d, const char *json)
{
	memset(&why, 0, sizeof(why));
	out = (struct api_call){.api = &api, .d = d, .id = "msg_1"};
	fs_buf_init(&out.answer, 1 << 16);
	return api_call_parse(&out, json, strlen(json), NULL, &why);
}

static int parse(const char *json)
{
	return parse_as(&api_anthropic_messages, json);
}

/* ---- requests ---- */

static void reads_a_whole_request(void **state)
{
	assert_int_equal(
	        parse("{\"model\":\"any\",\"max_tokens\":5,\"stream\":true,\"temperature\":0,\"top_p\":0.5,"
	              "\"top_k\":3,\"seed\":7,\"stop_sequences\":[\"a\",\"bc\"],\"metadata\":{\"user_id\":"
	              "\"x\"},\"thinking\":{\"type\":\"disabled\"},\"service_tier\":\"auto\",\"timeout_s\":9,"
	              "\"system\":[" TEXT(
	                      "be brief") ",{\"type\":\"text\",\"text\":\"and kind\","
	                                  "\"cache_control\":{\"type\":\"ephemeral\"}}],\"messages\":["
	                                  "{\"role\":\"user\",\"content\":\"hi\"},"
	                                  "{\"role\":\"assistant\",\"content\":\"hello\"},"
	                                  "{\"role\":\"user\",\"content\":[" TEXT("see") "," PICTURE(
	                                          BASE64) "]},"
	                                                  "{\"role\":\"system\",\"content\":\"later\"}]}"),
	        FS_OK);
	const struct fs_chat *c = &out.chat;
	assert_true(out.stream);
	assert_int_equal(out.timeout_s, 9);
	assert_true(c->gen.temperature == 0.0F && c->gen.top_p == 0.5F);
	assert_int_equal(c->gen.top_k, 3);
	assert_int_equal(c->gen.max_tokens, 5);
	assert_int_equal(c->gen.n_stops, 2);
	assert_string_equal(c->gen.stops[1], "bc");
	assert_int_equal(c->n_messages, 5);
	assert_int_equal(c->messages[0].role, FS_ROLE_SYSTEM);
	assert_int_equal(c->messages[0].n_parts, 3); /* a blank line between */
	assert_string_equal(c->messages[0].parts[1].text, "\n\n");
	assert_int_equal(c->messages[2].role, FS_ROLE_ASSISTANT);
	assert_int_equal(c->messages[4].role, FS_ROLE_SYSTEM);
	assert_int_equal(c->n_pictures, 1);
	assert_memory_equal(c->pictures[0].bytes, "hello", 5);
	assert_string_equal(c->pictures[0].where, "messages[2].content[1].source.data");
	api_call_finish(&out);
}

/* One of that API's messages may hold results and words: each result is a message in a tool's role. */
static void results_of_tools_become_messages(void **state)
{
	assert_int_equal(
	        parse("{\"max_tokens\":5,\"tools\":[" TOOL "],\"messages\":["
	              "{\"role\":\"user\",\"content\":\"look\"},"
	              "{\"role\":\"assistant\",\"content\":[{\"type\":\"thinking\",\"thinking\":\"hm\","
	              "\"signature\":\"x\"}," TEXT("I look") "," USE("{\"at\":1}") "," USE(
	                      "{}") "]},"
	                            "{\"role\":\"user\",\"content\":[" RESULT(
	                                    "\"one\"") ","
	                                               "" RESULT("[" TEXT("two") "," PICTURE(BASE64) "]") "," TEXT(
	                                                       "and?") "," TEXT("so?") ","
	                                                                               "{\"type\":\"tool_"
	                                                                               "result\",\"tool_use_"
	                                                                               "id\":\"toolu_1\","
	                                                                               "\"is_error\":true}]}]"
	                                                                               "}"),
	        FS_OK);
	const struct fs_chat *c = &out.chat;
	static const enum fs_role roles[] = {
	        FS_ROLE_USER, FS_ROLE_ASSISTANT, FS_ROLE_TOOL, FS_ROLE_TOOL, FS_ROLE_USER, FS_ROLE_TOOL};
	static const size_t parts[] = {1, 1, 1, 2, 2, 0};
	assert_int_equal(c->n_messages, FS_ARRAY_LEN(roles));
	for (size_t i = 0; i < FS_ARRAY_LEN(roles); i++) {
		assert_int_equal(c->messages[i].role, roles[i]);
		assert_int_equal(c->messages[i].n_parts, parts[i]);
	}
	assert_int_equal(c->messages[1].n_calls, 2);
	assert_string_equal(c->messages[1].calls[0].name, "look");
	assert_string_equal(c->messages[1].calls[0].arguments, "{\"at\":1}");
	assert_string_equal(c->messages[2].parts[0].text, "one");
	assert_null(c->messages[3].parts[1].text);
	assert_string_equal(c->pictures[0].where, "messages[2].content[1].content[1].source.data");
	assert_string_equal(c->messages[4].parts[1].text, "so?");
	assert_int_equal(c->n_tools, 1);
	assert_string_equal(c->tools[0].name, "look");
	assert_string_equal(c->tools[0].description, "Looks.");
	assert_string_equal(c->tools[0].parameters, "{\"type\":\"object\"}");
	assert_int_equal(c->choice, FS_TOOLS_AUTO);
	api_call_finish(&out);
}

#define REST "\"max_tokens\":5,\"messages\":[{\"role\":\"user\",\"content\":\"x\"}]}"
#define WITH(members) "{" members "," REST
#define MESSAGES(m) "{\"max_tokens\":5,\"messages\":[" m "]}"
#define USER(blocks) MESSAGES("{\"role\":\"user\",\"content\":[" blocks "]}")
#define ANSWER(blocks)                                                                                       \
	MESSAGES("{\"role\":\"assistant\",\"content\":[" blocks "]},{\"role\":\"user\",\"content\":\"x\"}")

static void check_choice(const char *json, enum fs_tool_choice choice, const char *named, bool one_call)
{
	assert_int_equal(parse(json), FS_OK);
	assert_int_equal(out.chat.choice, choice);
	if (named)
		assert_string_equal(out.chat.named, named);
	assert_int_equal(((struct api_anthropic *)out.own)->one_call, one_call);
	api_call_finish(&out);
}

static void tools_are_chosen(void **state)
{
#define CHOICE(c) WITH("\"tools\":[" TOOL "],\"tool_choice\":{" c "}")
	check_choice(CHOICE("\"type\":\"auto\""), FS_TOOLS_AUTO, NULL, false);
	check_choice(
	        CHOICE("\"type\":\"any\",\"disable_parallel_tool_use\":true"), FS_TOOLS_REQUIRED, NULL, true);
	check_choice(CHOICE("\"type\":\"none\""), FS_TOOLS_NONE, NULL, false);
	check_choice(CHOICE("\"type\":\"tool\",\"name\":\"look\""), FS_TOOLS_NAMED, "look", false);
}

static void names_what_is_wrong(void **state)
{
	static const struct {
		const char *json, *param, *part;
	} cases[] = {
	        {"[]", "", "must be a JSON object"},
	        {"{\"messages\":[{\"role\":\"user\",\"content\":\"x\"}]}", "max_tokens", "is required"},
	        {"{\"max_tokens\":1}", "messages", "must be an array"},
	        {"{\"max_tokens\":1,\"messages\":[]}", "messages", "at least one"},
	        {MESSAGES("1"), "messages[0]", "must be an object"},
	        {MESSAGES("{\"content\":\"x\"}"), "messages[0].role", "must be a string"},
	        {MESSAGES("{\"role\":\"tool\",\"content\":\"x\"}"), "messages[0].role", "not \"tool\""},
	        {MESSAGES("{\"role\":\"user\"}"), "messages[0].content", "a string or an array"},
	        {MESSAGES("{\"role\":\"assistant\",\"content\":\"(\"}"), "messages[0]", "does not go on"},
	        {USER("1"), "messages[0].content[0]", "must be an object"},
	        {USER("{\"text\":\"x\"}"), "messages[0].content[0].type", "must be a string"},
	        {USER("{\"type\":\"text\"}"), "messages[0].content[0].text", "must be a string"},
	        {USER("{\"type\":\"document\"}"), "messages[0].content[0].type", "not \"document\""},
	        {USER(USE("{}")), "messages[0].content[0].type", "not \"tool_use\""},
	        {USER("{\"type\":\"image\"}"), "messages[0].content[0].source", "must be an object"},
	        {USER("{\"type\":\"image\",\"source\":{}}"), "messages[0].content[0].source.type",
	                "\"base64\" or \"url\""},
	        {USER("{\"type\":\"image\",\"source\":{\"type\":\"file\",\"file_id\":\"f\"}}"),
	                "messages[0].content[0].source.type", "not \"file\""},
	        {USER("{\"type\":\"image\",\"source\":{\"type\":\"base64\"}}"),
	                "messages[0].content[0].source.data", "must be a string"},
	        {USER(PICTURE("a*b=")), "messages[0].content[0].source.data", "damaged"},
	        {USER("{\"type\":\"image\",\"source\":{\"type\":\"url\",\"url\":\"https://a.example/"
	              "b.png\"}}"),
	                "messages[0].content[0].source.url", "is a web address"},
	        {USER(PICTURE(BASE64) "," PICTURE(BASE64) "," PICTURE(BASE64)),
	                "messages[0].content[2].source.data", "more than 2 pictures"},
	        {USER("{\"type\":\"tool_result\"}"), "messages[0].content[0].tool_use_id", "not empty"},
	        {USER(RESULT("5")), "messages[0].content[0].content", "a string or an array"},
	        {USER(RESULT("[{\"type\":\"document\"}]")), "messages[0].content[0].content[0].type",
	                "not \"document\""},
	        {ANSWER(PICTURE(BASE64)), "messages[0].content[0].type", "not \"image\""},
	        {ANSWER(USE("5")), "messages[0].content[0].input", "must be an object"},
	        {ANSWER("{\"type\":\"tool_use\",\"name\":\"x\",\"input\":{}}"), "messages[0].content[0].id",
	                "not empty"},
	        {ANSWER("{\"type\":\"tool_use\",\"id\":\"x\",\"input\":{}}"), "messages[0].content[0].name",
	                "must be a string"},
	        {WITH("\"system\":5"), "system", "a string or an array"},
	        {WITH("\"system\":[" PICTURE(BASE64) "]"), "system[0].type", "must be \"text\""},
	        {WITH("\"temperature\":1.5"), "temperature", "from 0 to 1"},
	        {WITH("\"top_k\":-1"), "top_k", "whole number"},
	        {"{\"max_tokens\":0,\"messages\":[]}", "max_tokens", "whole number from 1"},
	        {WITH("\"stop_sequences\":\"x\""), "stop_sequences", "an array of strings"},
	        {WITH("\"stop_sequences\":[\"\"]"), "stop_sequences", "1 to 256 bytes"},
	        {WITH("\"stream\":1"), "stream", "true or false"},
	        {WITH("\"metadata\":1"), "metadata", "must be an object"},
	        {WITH("\"model\":1"), "model", "must be a string"},
	        {WITH("\"thinking\":{\"type\":\"enabled\",\"budget_tokens\":1024}"), "thinking.type",
	                "does not think"},
	        {WITH("\"thinking\":true"), "thinking", "must be an object"},
	        {WITH("\"mcp_servers\":[{}]"), "mcp_servers", "is not supported"},
	        {WITH("\"container\":\"x\""), "container", "is not supported"},
	        {WITH("\"output_config\":{\"format\":{\"type\":\"json_schema\"}}"), "output_config.format",
	                "can not force"},
	        {WITH("\"tools\":{}"), "tools", "must be an array"},
	        {WITH("\"tools\":[1]"), "tools[0]", "must be an object"},
	        {WITH("\"tools\":[{\"type\":\"bash_20250124\",\"name\":\"bash\"}]"), "tools[0].type",
	                "no tools of its own"},
	        {WITH("\"tools\":[{\"name\":\"\",\"input_schema\":{}}]"), "tools[0].name", "1 to 128"},
	        {WITH("\"tools\":[{\"name\":\"x\"}]"), "tools[0].input_schema", "must be an object"},
	        {WITH("\"tools\":[{\"name\":\"x\",\"input_schema\":5}]"), "tools[0].input_schema",
	                "must be an object"},
	        {WITH("\"tool_choice\":{\"type\":\"any\"}"), "tool_choice", "has no \"tools\""},
	        {CHOICE("\"type\":\"tool\",\"name\":\"run\""), "tool_choice.name", "names no tool"},
	        {CHOICE("\"type\":\"all\""), "tool_choice.type", "not \"all\""},
	        {CHOICE("\"type\":\"auto\",\"disable_parallel_tool_use\":5"),
	                "tool_choice.disable_parallel_tool_use", "true or false"},
	};
	for (size_t i = 0; i < FS_ARRAY_LEN(cases); i++) {
		if (parse(cases[i].json) == FS_OK)
			fail_msg("taken: %s", cases[i].json);
		api_call_finish(&out);
		assert_int_equal(why.status, 400);
		assert_string_equal(why.type, "invalid_request_error");
		assert_string_equal(why.param, cases[i].param);
		if (!strstr(why.text.text, cases[i].part))
			fail_msg("\"%s\" lacks \"%s\"", why.text.text, cases[i].part);
	}
}

static void counting_needs_no_length(void **state)
{
	static const char json[] = "{\"messages\":[{\"role\":\"user\",\"content\":\"x\"}]}";
	assert_int_equal(parse_as(&api_anthropic_count, json), FS_OK);
	json_t *o = api_anthropic_count.counted(&out, 42);
	assert_int_equal(json_integer_value(json_object_get(o, "input_tokens")), 42);
	json_decref(o);
	api_call_finish(&out);
}

/* ---- answers ---- */

static void check_json(json_t *got, const char *want)
{
	json_t *w = json_loads(want, 0, NULL);
	assert_non_null(w);
	if (!json_equal(got, w)) {
		char *text = json_dumps(got, JSON_COMPACT);
		fail_msg("%s\nis not %s", text ? text : "NULL", want);
	}
	json_decref(got);
	json_decref(w);
}

static const struct api_tool_call calls[] = {
        {.id = "call_ab12", .name = (char[]){"look"}, .arguments = (char[]){"{\"at\": [1]}"}},
        {.id = "call_cd34", .name = (char[]){"go"}, .arguments = (char[]){"{}"}}};

static void add_call(size_t i)
{
	out.calls = realloc(out.calls, (out.n_calls + 1) * sizeof(*out.calls));
	assert_non_null(out.calls);
	out.calls[out.n_calls] = calls[i];
	out.calls[out.n_calls].name = strdup(calls[i].name);
	out.calls[out.n_calls].arguments = strdup(calls[i].arguments);
	out.n_calls++;
}

#define HEAD "{\"id\":\"msg_1\",\"type\":\"message\",\"role\":\"assistant\",\"model\":\"mini\","
#define USAGE                                                                                                \
	"\"usage\":{\"input_tokens\":10,\"cache_creation_input_tokens\":0,\"cache_read_input_tokens\":20,"   \
	"\"output_tokens\":4}"

static const struct fs_chat_report report = {
        .gen = {.finish = FS_FINISH_STOP, .prompt_tokens = 30, .reused_tokens = 20, .completion_tokens = 4}};

static void whole_answers(void **state)
{
	struct fs_chat_report rep = report;
	assert_int_equal(parse("{" REST), FS_OK);
	check_json(out.d->whole(&out, &rep),
	        HEAD "\"content\":[],\"stop_reason\":\"end_turn\",\"stop_sequence\":null," USAGE "}");
	fs_buf_append_str(&out.answer, "Hi");
	rep.gen.stop = "###";
	check_json(out.d->whole(&out, &rep),
	        HEAD "\"content\":[" TEXT("Hi") "],\"stop_reason\":\"stop_sequence\","
	                                        "\"stop_sequence\":\"###\"," USAGE "}");
	rep.gen.stop = NULL;
	add_call(0);
	add_call(1);
#define LOOK(input) "{\"type\":\"tool_use\",\"id\":\"toolu_ab12\",\"name\":\"look\",\"input\":" input "}"
#define GO "{\"type\":\"tool_use\",\"id\":\"toolu_cd34\",\"name\":\"go\",\"input\":{}}"
	check_json(out.d->whole(&out, &rep), HEAD
	        "\"content\":[" TEXT("Hi") "," LOOK("{\"at\":[1]}") "," GO "],\"stop_reason\":\"tool_use\","
	                                                            "\"stop_sequence\":null," USAGE "}");
	((struct api_anthropic *)out.own)->one_call = true;
	rep.gen.finish = FS_FINISH_LENGTH;
	check_json(out.d->whole(&out, &rep),
	        HEAD "\"content\":[" TEXT("Hi") "," LOOK("{\"at\":[1]}") "],\"stop_reason\":\"max_tokens\","
	                                                                 "\"stop_sequence\":null," USAGE "}");
	api_call_finish(&out);
}

/* ---- events ---- */

/* Every event names its type on its first line too. */
static json_t *events(void)
{
	json_t *all = json_array();
	char *at = (char *)wire.data;
	while (at && *at) {
		char name[40];
		char *end = strstr(at, "\n\n"), *data = strstr(at, "\ndata: ");
		assert_non_null(end);
		assert_true(data && data < end);
		*end = '\0';
		json_t *o = json_loads(data + 7, 0, NULL);
		assert_int_equal(sscanf(at, "event: %39s", name), 1);
		assert_string_equal(name, json_string_value(json_object_get(o, "type")));
		json_array_append_new(all, o);
		at = end + 2;
	}
	fs_buf_clear(&wire);
	return all;
}

#define BEGUN                                                                                                \
	"{\"type\":\"message_start\",\"message\":" HEAD                                                      \
	"\"content\":[],\"stop_reason\":null,\"stop_sequence\":null,"                                        \
	"\"usage\":{\"input_tokens\":10,\"cache_creation_input_tokens\":0,\"cache_read_input_tokens\":20,"   \
	"\"output_tokens\":0}}},{\"type\":\"ping\"}"
#define OPEN(i, block) "{\"type\":\"content_block_start\",\"index\":" i ",\"content_block\":" block "}"
#define DELTA(i, d) "{\"type\":\"content_block_delta\",\"index\":" i ",\"delta\":" d "}"
#define SAID(t) "{\"type\":\"text_delta\",\"text\":\"" t "\"}"
#define INPUT(j) "{\"type\":\"input_json_delta\",\"partial_json\":\"" j "\"}"
#define CLOSE(i) "{\"type\":\"content_block_stop\",\"index\":" i "}"
#define ENDED(reason)                                                                                        \
	"{\"type\":\"message_delta\",\"delta\":{\"stop_reason\":\"" reason                                   \
	"\",\"stop_sequence\":null}," USAGE "},{\"type\":\"message_stop\"}"

static void say(const char *text)
{
	out.d->text(&out, text, strlen(text));
}

static void begin(const char *json)
{
	assert_int_equal(parse(json), FS_OK);
	out.d->begin(&out);
	out.d->progress(&out, 20, 30, 20);
	out.d->progress(&out, 30, 30, 20);
}

static void a_stream_of_text(void **state)
{
	begin("{\"stream\":true," REST);
	say("Hi");
	say(" there");
	out.d->end(&out, &report);
	check_json(events(), "[" BEGUN "," OPEN("0", TEXT("")) "," DELTA("0", SAID("Hi")) "," DELTA(
	                             "0", SAID(" there")) "," CLOSE("0") "," ENDED("end_turn") "]");
	api_call_finish(&out);
}

static void a_stream_of_nothing(void **state)
{
	begin("{\"stream\":true," REST);
	out.d->end(&out, &report);
	check_json(events(), "[" BEGUN "," ENDED("end_turn") "]");
	api_call_finish(&out);
}

static void call_tool(size_t i)
{
	add_call(i);
	out.d->call(&out, &out.calls[out.n_calls - 1]);
}

/* Blocks are numbered on; text behind a call is a block of its own. */
static void a_stream_of_calls(void **state)
{
	begin("{\"stream\":true," REST);
	say("Hi");
	call_tool(0);
	call_tool(1);
	say("!");
	out.d->end(&out, &report);
	check_json(events(),
	        "[" BEGUN "," OPEN("0", TEXT("")) "," DELTA("0", SAID("Hi")) "," CLOSE("0") "," OPEN("1",
	                LOOK("{}")) "," DELTA("1", INPUT("{\\\"at\\\": [1]}")) "," CLOSE("1") "," OPEN("2",
	                GO) "," DELTA("2", INPUT("{}")) "," CLOSE("2") "," OPEN("3", TEXT("")) "," DELTA("3",
	                SAID("!")) "," CLOSE("3") "," ENDED("tool_use") "]");
	api_call_finish(&out);
}

static void only_one_call_when_asked(void **state)
{
	begin("{\"stream\":true,\"tools\":[" TOOL "],\"tool_choice\":{\"type\":\"auto\","
	      "\"disable_parallel_tool_use\":true}," REST);
	call_tool(0);
	call_tool(1);
	out.d->end(&out, &report);
	check_json(events(), "[" BEGUN "," OPEN("0", LOOK("{}")) "," DELTA("0",
	                             INPUT("{\\\"at\\\": [1]}")) "," CLOSE("0") "," ENDED("tool_use") "]");
	api_call_finish(&out);
}

/* ---- errors ---- */

static void errors_have_that_api_s_types(void **state)
{
	static const struct {
		int status;
		const char *code, *type;
	} cases[] = {{400, "vision_unavailable", "invalid_request_error"},
	        {401, NULL, "authentication_error"}, {403, NULL, "permission_error"},
	        {404, NULL, "not_found_error"}, {405, NULL, "invalid_request_error"},
	        {408, NULL, "invalid_request_error"}, {413, NULL, "request_too_large"},
	        {429, NULL, "rate_limit_error"}, {500, NULL, "api_error"},
	        {503, "queue_full", "overloaded_error"}, {503, "shutting_down", "api_error"},
	        {504, "timeout", "timeout_error"}};
	for (size_t i = 0; i < FS_ARRAY_LEN(cases); i++) {
		struct api_error err = {cases[i].status, "any", cases[i].code, NULL, "text \xff"};
		json_t *o = api_error_anthropic(&err), *e = json_object_get(o, "error");
		assert_string_equal(json_string_value(json_object_get(o, "type")), "error");
		assert_string_equal(json_string_value(json_object_get(e, "type")), cases[i].type);
		assert_string_equal(json_string_value(json_object_get(e, "message")), "text ?");
		const json_t *code = json_object_get(e, "code");
		assert_true(!code == !cases[i].code);
		if (code)
			assert_string_equal(json_string_value(code), cases[i].code);
		json_decref(o);
	}
}

static void check_body(const char *path, const char *want)
{
	struct fs_buf b;
	fs_buf_init(&b, 1024);
	assert_int_equal(fs_api_error_body(path, 404, "invalid_request_error", NULL, "no", &b), FS_OK);
	check_json(json_loads((char *)b.data, 0, NULL), want);
	fs_buf_finish(&b);
}

static void http_s_errors_have_the_path_s_envelope(void **state)
{
	static const char theirs[] =
	        "{\"type\":\"error\",\"error\":{\"type\":\"not_found_error\",\"message\":\"no\"}}";
	static const char others[] =
	        "{\"error\":{\"message\":\"no\",\"type\":\"invalid_request_error\",\"param\":null,"
	        "\"code\":null}}";
	check_body("/v1/messages", theirs);
	check_body("/v1/messages/count_tokens", theirs);
	check_body("/v1/messagesx", others);
	check_body("/v1/chat/completions", others);
	check_body("", others);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
	        cmocka_unit_test(reads_a_whole_request),
	        cmocka_unit_test(results_of_tools_become_messages),
	        cmocka_unit_test(tools_are_chosen),
	        cmocka_unit_test(names_what_is_wrong),
	        cmocka_unit_test(counting_needs_no_length),
	        cmocka_unit_test(whole_answers),
	        cmocka_unit_test(a_stream_of_text),
	        cmocka_unit_test(a_stream_of_nothing),
	        cmocka_unit_test(a_stream_of_calls),
	        cmocka_unit_test(only_one_call_when_asked),
	        cmocka_unit_test(errors_have_that_api_s_types),
	        cmocka_unit_test(http_s_errors_have_the_path_s_envelope),
	};
	return cmocka_run_group_tests(tests, setup, teardown);
}
