/* server/api: the shapes of OpenAI's answers, whole and streamed, from text and calls as an engine would give
 * them. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "server/api/openai.h"

#include "tests/unit/api_util.h"

#define TOOL "{\"type\":\"function\",\"function\":{\"name\":\"look\",\"parameters\":{\"type\":\"object\"}}}"
#define FLAT_TOOL "{\"type\":\"function\",\"name\":\"look\",\"parameters\":{\"type\":\"object\"}}"
#define CHAT(more) "{\"messages\":[{\"role\":\"user\",\"content\":\"x\"}]" more "}"
#define INPUT(more) "{\"input\":\"x\"" more "}"

static const struct fs_chat_report stopped = {
        .gen = {.finish = FS_FINISH_STOP, .prompt_tokens = 9, .reused_tokens = 4, .completion_tokens = 3}};
static const struct fs_chat_report cut = {
        .gen = {.finish = FS_FINISH_LENGTH, .prompt_tokens = 9, .completion_tokens = 3}};

static void check_whole(const struct api_dialect *d, const char *request, const char *text,
        const char *const *calls, const struct fs_chat_report *rep, const char *want)
{
	struct test_call t;
	call_open(&t, d, request);
	if (text)
		call_text(&t, text);
	for (size_t i = 0; calls && calls[i]; i += 2)
		call_tool(&t, calls[i], calls[i + 1]);
	json_t *o = d->whole(&t.c, rep);
	assert_has(o, want);
	json_decref(o);
	call_close(&t);
}

static const char *const one_call[] = {"look", "{\"at\": 1}", NULL};
static const char *const two_calls[] = {"look", "{}", "look", "{\"at\": \"\\u00e9\"}", NULL};

static void a_chat_in_one_piece(void **state)
{
	const struct api_dialect *d = &api_openai_chat;
	check_whole(d, CHAT(""), "hi", NULL, &stopped,
	        "{\"id\":\"chatcmpl-1\",\"object\":\"chat.completion\",\"created\":1700000000,\"model\":"
	        "\"mini\","
	        "\"choices\":[{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":\"hi\","
	        "\"refusal\":"
	        "null},"
	        "\"logprobs\":null,\"finish_reason\":\"stop\"}],\"usage\":{\"prompt_tokens\":9,"
	        "\"completion_tokens\":3,"
	        "\"total_tokens\":12,\"prompt_tokens_details\":{\"cached_tokens\":4}}}");
	check_whole(d, CHAT(""), NULL, NULL, &cut,
	        "{\"choices\":[{\"message\":{\"content\":\"\"},\"finish_reason\":\"length\"}]}");
	check_whole(d, CHAT(",\"tools\":[" TOOL "]"), NULL, one_call, &stopped,
	        "{\"choices\":[{\"message\":{\"content\":null,\"tool_calls\":[{\"id\":\"call_1\",\"type\":"
	        "\"function\","
	        "\"function\":{\"name\":\"look\",\"arguments\":\"{\\\"at\\\": 1}\"}}]},\"finish_reason\":"
	        "\"tool_calls\"}]}");
	check_whole(d, CHAT(",\"tools\":[" TOOL "]"), "so:", two_calls, &stopped,
	        "{\"choices\":[{\"message\":{\"content\":\"so:\",\"tool_calls\":[{\"id\":\"call_1\"},{\"id\":"
	        "\"call_2\"}]}"
	        "}]}");
	check_whole(d, CHAT(",\"tools\":[" TOOL "],\"parallel_tool_calls\":false"), NULL, two_calls, &stopped,
	        "{\"choices\":[{\"message\":{\"tool_calls\":[{\"id\":\"call_1\"}]}}]}");
	check_whole(d, CHAT(",\"tools\":[" TOOL "]"), NULL, one_call, &cut,
	        "{\"choices\":[{\"finish_reason\":\"length\"}]}");
}

/* chunk i's choice has these members. */
static void chunk_has(json_t *events, size_t i, const char *want)
{
	const json_t *data = json_object_get(json_array_get(events, i), "data");
	assert_has(data, "{\"id\":\"chatcmpl-1\",\"object\":\"chat.completion.chunk\",\"created\":1700000000,"
	                 "\"model\":\"mini\"}");
	assert_has(json_array_get(json_object_get(data, "choices"), 0), want);
}

static void a_chat_in_chunks(void **state)
{
	const struct api_dialect *d = &api_openai_chat;
	struct test_call t;
	call_open(&t, d,
	        CHAT(",\"stream\":true,\"stream_options\":{\"include_usage\":true},\"tools\":[" TOOL "]"));
	d->begin(&t.c);
	d->progress(&t.c, 9, 9, 4); /* not asked for */
	call_text(&t, "h\"");
	call_tool(&t, "look", "{\"at\": 1}");
	call_tool(&t, "look", "{}");
	d->end(&t.c, &stopped);
	json_t *e = call_events(&t);
	assert_int_equal(json_array_size(e), 7);
	chunk_has(e, 0,
	        "{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"logprobs\":null,"
	        "\"finish_reason\":null}");
	chunk_has(e, 1, "{\"delta\":{\"content\":\"h\\\"\"},\"finish_reason\":null}");
	chunk_has(e, 2,
	        "{\"delta\":{\"tool_calls\":[{\"index\":0,\"id\":\"call_1\",\"type\":\"function\","
	        "\"function\":{\"name\":\"look\",\"arguments\":\"{\\\"at\\\": "
	        "1}\"}}]},\"finish_reason\":null}");
	chunk_has(e, 3, "{\"delta\":{\"tool_calls\":[{\"index\":1,\"id\":\"call_2\"}]}}");
	chunk_has(e, 4, "{\"delta\":{},\"finish_reason\":\"tool_calls\"}");
	assert_has(json_array_get(e, 5),
	        "{\"event\":null,\"data\":{\"choices\":[],\"usage\":{\"total_tokens\":12}}}");
	assert_has(json_array_get(e, 6), "{\"event\":null,\"data\":\"[DONE]\"}");
	json_decref(e);
	call_close(&t);
}

static void progress_of_the_prompt(void **state)
{
	const struct api_dialect *d = &api_openai_chat;
	struct test_call t;
	call_open(&t, d, CHAT(",\"stream\":true,\"return_progress\":true"));
	d->begin(&t.c);
	d->progress(&t.c, 7, 9, 4);
	json_t *e = call_events(&t);
	const json_t *data = json_object_get(json_array_get(e, 1), "data");
	chunk_has(e, 1, "{\"delta\":{},\"finish_reason\":null}");
	assert_has(data, "{\"prompt_progress\":{\"total\":9,\"cache\":4,\"processed\":7}}");
	assert_true(json_integer_value(
	                    json_object_get(json_object_get(data, "prompt_progress"), "time_ms")) >= 0);
	json_decref(e);
	call_close(&t);
}

/* ---- probabilities ---- */

static const struct fs_token_prob likely[] = {{.id = 1, .logprob = -0.25F, .bytes = "a", .n_bytes = 1},
        {.id = 2, .logprob = -2, .bytes = "\xe2\x82", .n_bytes = 2},
        {.id = 3, .logprob = -9999, .bytes = "<end>", .n_bytes = 5, .control = true}};

static void chat_probabilities(void **state)
{
	const struct api_dialect *d = &api_openai_chat;
	const struct fs_token_event first = {likely[1], likely, 3}, second = {likely[0], NULL, 0};
	struct test_call t;
	call_open(&t, d, CHAT(",\"logprobs\":true,\"top_logprobs\":3"));
	assert_true(t.c.chat.gen.logprobs && t.c.chat.gen.n_top_logprobs == 3);
	d->token(&t.c, &first);
	d->token(&t.c, &second);
	json_t *o = d->whole(&t.c, &stopped);
	assert_has(o, "{\"choices\":[{\"logprobs\":{\"refusal\":null,\"content\":["
	              "{\"token\":\"\\\\xe2\\\\x82\",\"logprob\":-2.0,\"bytes\":[226,130],\"top_logprobs\":["
	              "{\"token\":\"a\",\"logprob\":-0.25,\"bytes\":[97]},{\"token\":\"\\\\xe2\\\\x82\"},"
	              "{\"token\":\"<end>\",\"logprob\":-9999.0,\"bytes\":null}]},"
	              "{\"token\":\"a\",\"logprob\":-0.25,\"bytes\":[97],\"top_logprobs\":[]}]}}]}");
	json_decref(o);
	call_close(&t);
}

static void chat_probabilities_go_with_the_next_chunk(void **state)
{
	const struct api_dialect *d = &api_openai_chat;
	const struct fs_token_event event = {likely[0], NULL, 0};
	struct test_call t;
	call_open(&t, d, CHAT(",\"stream\":true,\"logprobs\":true"));
	d->begin(&t.c);
	d->token(&t.c, &event);
	d->token(&t.c, &event);
	call_text(&t, "aa");
	d->token(&t.c, &event);
	d->end(&t.c, &stopped);
	json_t *e = call_events(&t);
	chunk_has(e, 0, "{\"logprobs\":null}");
	chunk_has(e, 1,
	        "{\"delta\":{\"content\":\"aa\"},\"logprobs\":{\"content\":[{\"token\":\"a\"},{\"token\":"
	        "\"a\"}]}}");
	chunk_has(e, 2, "{\"finish_reason\":\"stop\",\"logprobs\":{\"content\":[{\"token\":\"a\"}]}}");
	json_decref(e);
	call_close(&t);
}

static void too_many_probabilities_overflow(void **state)
{
	const struct api_dialect *d = &api_openai_chat;
	const struct fs_token_event event = {likely[0], likely, 2};
	struct test_call t;
	call_open(&t, d, CHAT(",\"logprobs\":true,\"top_logprobs\":2"));
	for (size_t i = 0; i < 44000 && !t.c.overflow; i++)
		d->token(&t.c, &event);
	assert_true(t.c.overflow);
	call_close(&t);
}

/* ---- completions ---- */

static void a_completion(void **state)
{
	const struct api_dialect *d = &api_openai_completions;
	const struct fs_token_event events[] = {
	        {likely[0], likely, 2}, {likely[1], likely, 1}, {likely[0], NULL, 0}};
	struct test_call t;
	call_open(&t, d, "{\"prompt\":\"x\",\"logprobs\":2}");
	for (size_t i = 0; i < FS_ARRAY_LEN(events); i++)
		d->token(&t.c, &events[i]);
	call_text(&t, "a");
	json_t *o = d->whole(&t.c, &cut);
	assert_has(o, "{\"id\":\"cmpl-1\",\"object\":\"text_completion\",\"model\":\"mini\",\"choices\":[{"
	              "\"index\":"
	              "0,\"text\":\"a\","
	              "\"finish_reason\":\"length\",\"logprobs\":{\"tokens\":[\"a\",\"bytes:\\\\xe2\\\\x82\","
	              "\"a\"],"
	              "\"token_logprobs\":[-0.25,-2.0,-0.25],\"text_offset\":[0,1,2],"
	              "\"top_logprobs\":[{\"a\":-0.25,\"bytes:\\\\xe2\\\\x82\":-2.0},{\"a\":-0.25,\"bytes:"
	              "\\\\xe2\\\\x82\":-2.0},{\"a\":-0.25}]}}],"
	              "\"usage\":{\"total_tokens\":12}}");
	json_decref(o);
	call_close(&t);
	check_whole(d, "{\"prompt\":\"x\"}", "b", NULL, &stopped,
	        "{\"choices\":[{\"text\":\"b\",\"logprobs\":null,\"finish_reason\":\"stop\"}]}");
}

static void a_completion_in_chunks(void **state)
{
	const struct api_dialect *d = &api_openai_completions;
	struct test_call t;
	call_open(&t, d, "{\"prompt\":\"x\",\"stream\":true}");
	d->begin(&t.c);
	call_text(&t, "a");
	d->end(&t.c, &stopped);
	json_t *e = call_events(&t);
	assert_has(e, "[{\"data\":{\"object\":\"text_completion\",\"choices\":[{\"text\":\"a\",\"finish_"
	              "reason\":null}]}},"
	              "{\"data\":{\"choices\":[{\"text\":\"\",\"finish_reason\":\"stop\"}]}},{\"data\":"
	              "\"[DONE]\"}]");
	json_decref(e);
	call_close(&t);
}

/* ---- responses ---- */

static void a_response_in_one_piece(void **state)
{
	const struct api_dialect *d = &api_openai_responses;
	check_whole(d, INPUT(",\"instructions\":\"be brief\",\"temperature\":0,\"max_output_tokens\":7"),
	        "hi", NULL, &stopped,
	        "{\"id\":\"resp_1\",\"object\":\"response\",\"created_at\":1700000000,\"status\":"
	        "\"completed\",\"model\":\"mini\","
	        "\"error\":null,\"incomplete_details\":null,\"instructions\":\"be "
	        "brief\",\"max_output_tokens\":7,"
	        "\"previous_response_id\":null,\"store\":false,\"parallel_tool_calls\":true,\"temperature\":"
	        "0."
	        "0,"
	        "\"text\":{\"format\":{\"type\":\"text\"}},\"tools\":[],\"tool_choice\":\"auto\","
	        "\"truncation\":"
	        "\"disabled\","
	        "\"metadata\":{},\"usage\":{\"input_tokens\":9,\"input_tokens_details\":{\"cached_tokens\":4}"
	        ","
	        "\"output_tokens\":3,\"output_tokens_details\":{\"reasoning_tokens\":0},\"total_tokens\":12},"
	        "\"output\":[{\"type\":\"message\",\"role\":\"assistant\",\"status\":\"completed\","
	        "\"content\":"
	        "["
	        "{\"type\":\"output_text\",\"text\":\"hi\",\"annotations\":[]}]}]}");
	check_whole(d, INPUT(",\"temperature\":0.7,\"top_p\":0.9"), "hi", NULL, &stopped,
	        "{\"temperature\":0.7,\"top_p\":0.9}");
	check_whole(d, INPUT(""), "hi", NULL, &cut,
	        "{\"status\":\"incomplete\",\"incomplete_details\":{\"reason\":\"max_output_tokens\"},"
	        "\"output\":[{\"status\":\"incomplete\"}]}");
	check_whole(d, INPUT(",\"tools\":[" FLAT_TOOL "],\"tool_choice\":\"required\""), NULL, one_call,
	        &stopped,
	        "{\"status\":\"completed\",\"tools\":[" FLAT_TOOL
	        "],\"tool_choice\":\"required\",\"output\":["
	        "{\"type\":\"function_call\",\"id\":\"fc_1\",\"call_id\":\"call_1\",\"status\":\"completed\","
	        "\"name\":\"look\",\"arguments\":\"{\\\"at\\\": 1}\"}]}");
	check_whole(d, INPUT(""), NULL, NULL, &stopped,
	        "{\"output\":[{\"content\":[{\"type\":\"output_text\",\"text\":\"\"}]}]}");
}

/* The names and numbers of a stream's events; each data has them as well. */
static void check_sequence(json_t *e, const char *const *names, size_t n)
{
	assert_int_equal(json_array_size(e), n);
	for (size_t i = 0; i < n; i++) {
		const json_t *o = json_array_get(e, i), *data = json_object_get(o, "data");
		assert_string_equal(json_string_value(json_object_get(o, "event")), names[i]);
		assert_string_equal(json_string_value(json_object_get(data, "type")), names[i]);
		assert_int_equal(json_integer_value(json_object_get(data, "sequence_number")), i);
	}
}

static const json_t *data_of(const json_t *e, size_t i)
{
	return json_object_get(json_array_get(e, i), "data");
}

static void a_response_in_events(void **state)
{
	static const char *const names[] = {"response.created", "response.in_progress",
	        "response.output_item.added", "response.content_part.added", "response.output_text.delta",
	        "response.output_text.delta", "response.output_text.done", "response.content_part.done",
	        "response.output_item.done", "response.output_item.added",
	        "response.function_call_arguments.delta", "response.function_call_arguments.done",
	        "response.output_item.done", "response.completed"};
	const struct api_dialect *d = &api_openai_responses;
	struct test_call t;
	call_open(&t, d, INPUT(",\"stream\":true,\"tools\":[" FLAT_TOOL "]"));
	d->begin(&t.c);
	call_text(&t, "so");
	call_text(&t, ":");
	call_tool(&t, "look", "{\"at\": 1}");
	d->end(&t.c, &stopped);
	json_t *e = call_events(&t);
	check_sequence(e, names, FS_ARRAY_LEN(names));
	assert_has(data_of(e, 0), "{\"response\":{\"id\":\"resp_1\",\"status\":\"in_progress\",\"output\":[],"
	                          "\"usage\":null}}");
	assert_has(data_of(e, 2), "{\"output_index\":0,\"item\":{\"type\":\"message\",\"status\":\"in_"
	                          "progress\",\"content\":[]}}");
	const char *id = json_string_value(json_object_get(json_object_get(data_of(e, 2), "item"), "id"));
	for (size_t i = 3; i < 8; i++) {
		assert_has(data_of(e, i), "{\"output_index\":0,\"content_index\":0}");
		assert_string_equal(json_string_value(json_object_get(data_of(e, i), "item_id")), id);
	}
	assert_has(data_of(e, 5), "{\"delta\":\":\",\"logprobs\":[]}");
	assert_has(data_of(e, 6), "{\"text\":\"so:\"}");
	assert_has(data_of(e, 7), "{\"part\":{\"type\":\"output_text\",\"text\":\"so:\"}}");
	assert_has(data_of(e, 9),
	        "{\"output_index\":1,\"item\":{\"type\":\"function_call\",\"id\":\"fc_1\","
	        "\"call_id\":\"call_1\",\"name\":\"look\",\"arguments\":\"\",\"status\":\"in_"
	        "progress\"}}");
	assert_has(data_of(e, 10), "{\"output_index\":1,\"item_id\":\"fc_1\",\"delta\":\"{\\\"at\\\": 1}\"}");
	assert_has(data_of(e, 11),
	        "{\"output_index\":1,\"item_id\":\"fc_1\",\"arguments\":\"{\\\"at\\\": 1}\"}");
	assert_has(data_of(e, 12),
	        "{\"output_index\":1,\"item\":{\"arguments\":\"{\\\"at\\\": 1}\",\"status\":"
	        "\"completed\"}}");
	assert_has(data_of(e, 13),
	        "{\"response\":{\"status\":\"completed\",\"usage\":{\"total_tokens\":12},\"output\":["
	        "{\"type\":\"message\",\"content\":[{\"text\":\"so:\"}]},{\"type\":\"function_call\"}]}}");
	json_decref(e);
	call_close(&t);
}

static void text_behind_a_call_is_a_message_of_its_own(void **state)
{
	const struct api_dialect *d = &api_openai_responses;
	struct test_call t;
	call_open(&t, d, INPUT(",\"stream\":true,\"tools\":[" FLAT_TOOL "],\"parallel_tool_calls\":false"));
	d->begin(&t.c);
	call_tool(&t, "look", "{}");
	call_text(&t, "then");
	call_tool(&t, "look", "{}"); /* one call only was wanted */
	d->end(&t.c, &stopped);
	json_t *e = call_events(&t);
	assert_has(data_of(e, json_array_size(e) - 1),
	        "{\"response\":{\"parallel_tool_calls\":false,\"output\":[{\"type\":\"function_call\"},"
	        "{\"type\":\"message\",\"content\":[{\"text\":\"then\"}]}]}}");
	json_decref(e);
	call_close(&t);
}

static void a_response_that_is_cut(void **state)
{
	const struct api_dialect *d = &api_openai_responses;
	struct test_call t;
	call_open(&t, d, INPUT(",\"stream\":true"));
	d->begin(&t.c);
	call_text(&t, "so");
	d->end(&t.c, &cut);
	json_t *e = call_events(&t);
	assert_has(json_array_get(e, json_array_size(e) - 1),
	        "{\"event\":\"response.incomplete\",\"data\":{\"response\":{\"status\":\"incomplete\","
	        "\"incomplete_details\":{\"reason\":\"max_output_tokens\"},\"output\":[{\"status\":"
	        "\"incomplete\"}]}}}");
	json_decref(e);
	call_close(&t);
}

static void a_response_that_says_nothing(void **state)
{
	const struct api_dialect *d = &api_openai_responses;
	struct test_call t;
	call_open(&t, d, INPUT(",\"stream\":true"));
	d->begin(&t.c);
	d->end(&t.c, &stopped);
	json_t *e = call_events(&t);
	assert_int_equal(json_array_size(e), 8);
	assert_has(data_of(e, 7), "{\"response\":{\"output\":[{\"content\":[{\"text\":\"\"}]}]}}");
	json_decref(e);
	call_close(&t);
}

static void a_response_that_fails(void **state)
{
	const struct api_dialect *d = &api_openai_responses;
	const struct api_error err = {504, "timeout_error", "timeout", NULL, "too \xff late"};
	struct test_call t;
	call_open(&t, d, INPUT(",\"stream\":true"));
	d->begin(&t.c);
	call_text(&t, "so");
	json_t *e = call_events(&t), *o = d->failed(&t.c, &err);
	assert_int_equal(json_integer_value(json_object_get(o, "sequence_number")), json_array_size(e));
	assert_has(o, "{\"type\":\"response.failed\",\"response\":{"
	              "\"status\":\"failed\","
	              "\"error\":{\"code\":\"timeout\",\"message\":\"too ? late\"},\"usage\":null,"
	              "\"output\":[{\"status\":\"incomplete\",\"content\":[{\"text\":\"so\"}]}]}}");
	json_decref(o);
	json_decref(e);
	call_close(&t);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
	        cmocka_unit_test(a_chat_in_one_piece),
	        cmocka_unit_test(a_chat_in_chunks),
	        cmocka_unit_test(progress_of_the_prompt),
	        cmocka_unit_test(chat_probabilities),
	        cmocka_unit_test(chat_probabilities_go_with_the_next_chunk),
	        cmocka_unit_test(too_many_probabilities_overflow),
	        cmocka_unit_test(a_completion),
	        cmocka_unit_test(a_completion_in_chunks),
	        cmocka_unit_test(a_response_in_one_piece),
	        cmocka_unit_test(a_response_in_events),
	        cmocka_unit_test(text_behind_a_call_is_a_message_of_its_own),
	        cmocka_unit_test(a_response_that_is_cut),
	        cmocka_unit_test(a_response_that_says_nothing),
	        cmocka_unit_test(a_response_that_fails),
	};
	return cmocka_run_group_tests_name("api_openai", tests, api_setup, api_teardown);
}
