/* server/api: requests of OpenAI's APIs: tools, completions, responses, and pictures that are files. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "server/api/openai.h"

#include "tests/unit/api_util.h"

#define PICTURE "data:;base64,aGVsbG8="

static struct api_call out;
static struct fs_refusal why;

static int parse(const struct api_dialect *d, const char *json)
{
	memset(&why, 0, sizeof(why));
	out = (struct api_call){.api = &test_api, .d = d};
	return api_call_parse(&out, json, strlen(json), NULL, &why);
}

static const struct fs_chat *good(const struct api_dialect *d, const char *json)
{
	if (parse(d, json))
		fail_msg("%s: %s: %s", json, why.param, why.text.text);
	return &out.chat;
}

struct wrong {
	const char *json, *param, *part;
};

static void check_wrong(const struct api_dialect *d, const struct wrong *cases, size_t n)
{
	for (size_t i = 0; i < n; i++) {
		if (parse(d, cases[i].json) == FS_OK)
			fail_msg("taken: %s", cases[i].json);
		api_call_finish(&out);
		assert_int_equal(why.status, 400);
		assert_string_equal(why.type, "invalid_request_error");
		if (strcmp(why.param, cases[i].param) != 0 || !strstr(why.text.text, cases[i].part))
			fail_msg("%s\n%s: \"%s\"\nis not %s: \"%s\"", cases[i].json, why.param, why.text.text,
			        cases[i].param, cases[i].part);
	}
}

/* ---- chat: tools and what else it has beyond plain text ---- */

#define USER "{\"role\":\"user\",\"content\":\"x\"}"
#define CHAT(messages, more) "{\"messages\":[" messages "]" more "}"
#define TOOL(name) "{\"type\":\"function\",\"function\":{\"name\":\"" name "\"}}"
#define TOOLS ",\"tools\":[" TOOL("look") "," TOOL("tell") "]"
#define CALL(name, arguments)                                                                                \
	"{\"id\":\"call_1\",\"type\":\"function\",\"function\":{\"name\":\"" name                            \
	"\",\"arguments\":\"" arguments "\"}}"
#define CALLS(calls) "{\"role\":\"assistant\",\"content\":null,\"tool_calls\":[" calls "]}"

static void reads_a_chat_with_tools(void **state)
{
	const struct fs_chat *c = good(&api_openai_chat,
	        CHAT(USER "," CALLS(CALL("look", "{\\\"at\\\":1}") "," CALL("tell",
	                     " ")) ","
	                           "{\"role\":\"tool\",\"tool_call_id\":\"call_1\",\"content\":\"seen\"},"
	                           "{\"role\":\"tool\",\"tool_call_id\":\"call_2\",\"content\":[{\"type\":"
	                           "\"image_"
	                           "url\",\"image_url\":\"" PICTURE "\"},"
	                           "{\"type\":\"input_image\",\"image_url\":\"" PICTURE
	                           "\",\"detail\":\"low\"}]}",
	                ",\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"look\",\"description\":"
	                "\"looks\","
	                "\"parameters\":{\"type\":\"object\",\"properties\":{}},\"strict\":true}}],\"tool_"
	                "choice\":\"auto\","
	                "\"parallel_tool_calls\":true,\"function_call\":null,\"functions\":[]"));
	assert_int_equal(c->n_messages, 4);
	assert_int_equal(c->messages[1].n_parts, 0);
	assert_int_equal(c->messages[1].n_calls, 2);
	assert_string_equal(c->messages[1].calls[0].name, "look");
	assert_string_equal(c->messages[1].calls[0].arguments, "{\"at\":1}");
	assert_string_equal(c->messages[1].calls[1].arguments, "{}");
	assert_int_equal(c->messages[2].role, FS_ROLE_TOOL);
	assert_string_equal(c->messages[2].parts[0].text, "seen");
	assert_int_equal(c->messages[3].n_parts, 2);
	assert_int_equal(c->n_pictures, 2);
	assert_string_equal(c->pictures[0].where, "messages[3].content[0].image_url");
	assert_int_equal(c->pictures[0].max_tokens, 0);
	assert_true(c->pictures[1].max_tokens > 0);
	assert_int_equal(c->n_tools, 1);
	assert_string_equal(c->tools[0].name, "look");
	assert_string_equal(c->tools[0].description, "looks");
	assert_string_equal(c->tools[0].parameters, "{\"type\":\"object\",\"properties\":{}}");
	assert_int_equal(c->choice, FS_TOOLS_AUTO);
	api_call_finish(&out);
}

static void reads_the_choice_of_a_tool(void **state)
{
	static const struct {
		const char *json;
		enum fs_tool_choice choice;
	} cases[] = {{CHAT(USER, TOOLS), FS_TOOLS_AUTO},
	        {CHAT(USER, TOOLS ",\"tool_choice\":null"), FS_TOOLS_AUTO},
	        {CHAT(USER, TOOLS ",\"tool_choice\":\"none\""), FS_TOOLS_NONE},
	        {CHAT(USER, TOOLS ",\"tool_choice\":\"required\""), FS_TOOLS_REQUIRED},
	        {CHAT(USER, ",\"tool_choice\":\"none\""), FS_TOOLS_NONE},
	        {CHAT(USER, TOOLS ",\"tool_choice\":" TOOL("tell")), FS_TOOLS_NAMED}};
	for (size_t i = 0; i < FS_ARRAY_LEN(cases); i++) {
		const struct fs_chat *c = good(&api_openai_chat, cases[i].json);
		assert_int_equal(c->choice, cases[i].choice);
		if (c->choice == FS_TOOLS_NAMED)
			assert_string_equal(c->named, "tell");
		api_call_finish(&out);
	}
}

static void names_what_is_wrong_in_a_chat(void **state)
{
	static const struct wrong cases[] = {
	        {CHAT(USER, ",\"tools\":{}"), "tools", "must be an array"},
	        {CHAT(USER, ",\"tools\":[1]"), "tools[0]", "must be an object"},
	        {CHAT(USER, ",\"tools\":[{\"type\":\"custom\"}]"), "tools[0].type", "must be \"function\""},
	        {CHAT(USER, ",\"tools\":[{\"type\":\"function\"}]"), "tools[0].function",
	                "must be an object"},
	        {CHAT(USER, ",\"tools\":[" TOOL("look") "," TOOL("") "]"), "tools[1].function.name",
	                "must be a string of 1"},
	        {CHAT(USER, ",\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"a\",\"parameters\":"
	                    "\"x\"}}]"),
	                "tools[0].function.parameters", "must be an object"},
	        {CHAT(USER, ",\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"a\",\"description\":"
	                    "1}}]"),
	                "tools[0].function.description", "must be a string"},
	        {CHAT(USER, TOOLS ",\"tool_choice\":\"any\""), "tool_choice", "must be \"auto\""},
	        {CHAT(USER, TOOLS ",\"tool_choice\":1"), "tool_choice", "must be \"auto\""},
	        {CHAT(USER, TOOLS ",\"tool_choice\":{\"type\":\"allowed_tools\"}"), "tool_choice.type",
	                "must be \"function\""},
	        {CHAT(USER, TOOLS ",\"tool_choice\":" TOOL("hear")), "tool_choice.function.name",
	                "names no tool"},
	        {CHAT(USER, ",\"tool_choice\":\"required\""), "tool_choice", "has no \"tools\""},
	        {CHAT(USER, TOOLS ",\"parallel_tool_calls\":1"), "parallel_tool_calls", "true or false"},
	        {CHAT(USER, ",\"function_call\":\"auto\""), "function_call", "deprecated"},
	        {CHAT(CALLS("1"), ""), "messages[0].tool_calls[0].function", "must be an object"},
	        {CHAT(CALLS(CALL("", "{}")), ""), "messages[0].tool_calls[0].function.name",
	                "must be a string"},
	        {CHAT(CALLS(CALL("a", "{")), ""), "messages[0].tool_calls[0].function.arguments",
	                "JSON text of an object"},
	        {CHAT(CALLS(CALL("a", "[]")), ""), "messages[0].tool_calls[0].function.arguments",
	                "JSON text of an object"},
	        {CHAT("{\"role\":\"assistant\",\"tool_calls\":1}", ""), "messages[0].tool_calls",
	                "must be an array"},
	        {CHAT("{\"role\":\"user\",\"content\":\"x\",\"tool_calls\":[" CALL("a", "{}") "]}", ""),
	                "messages[0].tool_calls", "only stand in an assistant's"},
	        {CHAT("{\"role\":\"assistant\",\"function_call\":{\"name\":\"a\"}}", ""),
	                "messages[0].function_call", "deprecated"},
	        {CHAT("{\"role\":\"tool\",\"content\":\"x\"}", ""), "messages[0].tool_call_id",
	                "must be a string"},
	        {CHAT("{\"role\":\"function\",\"name\":\"a\",\"content\":\"x\"}", ""), "messages[0].role",
	                "not \"function\""},
	        {CHAT("{\"role\":\"user\",\"content\":[{\"type\":\"input_image\",\"file_id\":\"f\"}]}", ""),
	                "messages[0].content[0].file_id", "uploaded file"},
	        {CHAT(USER, ",\"top_logprobs\":2"), "top_logprobs", "needs \"logprobs\""},
	        {CHAT(USER, ",\"logprobs\":true,\"top_logprobs\":21"), "top_logprobs", "from 0 to 20"},
	        {CHAT(USER, ",\"return_progress\":1"), "return_progress", "true or false"},
	        {CHAT(USER, ",\"modalities\":[\"text\",\"audio\"]"), "modalities", "answers in text"},
	        {CHAT(USER, ",\"audio\":{\"voice\":\"x\"}"), "audio", "does not support"},
	        {CHAT(USER, ",\"web_search_options\":{\"x\":1}"), "web_search_options", "does not support"},
	};
	check_wrong(&api_openai_chat, cases, FS_ARRAY_LEN(cases));
}

/* ---- completions ---- */

static void reads_a_completion(void **state)
{
	const struct fs_chat *c =
	        good(&api_openai_completions, "{\"prompt\":\"a\\u0000b\",\"stop\":\"x\",\"n\":1,\"best_of\":"
	                                      "1,\"echo\":false,\"suffix\":null}");
	assert_int_equal(c->text_len, 3);
	assert_memory_equal(c->text, "a\0b", 4);
	assert_int_equal(c->gen.max_tokens, 16);
	assert_false(c->gen.logprobs);
	assert_int_equal(c->gen.n_stops, 1);
	api_call_finish(&out);

	c = good(&api_openai_completions,
	        "{\"prompt\":[\"one\"],\"max_tokens\":3,\"logprobs\":0,\"stream\":true}");
	assert_string_equal(c->text, "one");
	assert_int_equal(c->gen.max_tokens, 3);
	assert_true(c->gen.logprobs && c->gen.n_top_logprobs == 0 && out.stream);
	api_call_finish(&out);

	c = good(&api_openai_completions, "{\"prompt\":[[7,8]],\"logprobs\":5}");
	assert_null(c->text);
	assert_int_equal(c->n_ids, 2);
	assert_int_equal(c->ids[1], 8);
	assert_int_equal(c->gen.n_top_logprobs, 5);
	api_call_finish(&out);

	c = good(&api_openai_completions, "{\"prompt\":[0]}");
	assert_int_equal(c->n_ids, 1);
	api_call_finish(&out);
}

static void names_what_is_wrong_in_a_completion(void **state)
{
	static const struct wrong cases[] = {
	        {"{}", "prompt", "must be a string or an array of token ids"},
	        {"{\"prompt\":[]}", "prompt", "must be a string or an array of token ids"},
	        {"{\"prompt\":7}", "prompt", "must be a string or an array of token ids"},
	        {"{\"prompt\":[[]]}", "prompt", "must be a string or an array of token ids"},
	        {"{\"prompt\":\"\"}", "prompt", "is empty"},
	        {"{\"prompt\":[\"a\",\"b\"]}", "prompt", "several prompts"},
	        {"{\"prompt\":[[1],[2]]}", "prompt", "several prompts"},
	        {"{\"prompt\":[1,\"a\"]}", "prompt", "no token id, at index 1"},
	        {"{\"prompt\":[-1]}", "prompt", "no token id, at index 0"},
	        {"{\"prompt\":[2147483648]}", "prompt", "no token id"},
	        {"{\"prompt\":[1.5]}", "prompt", "no token id"},
	        {"{\"prompt\":\"a\",\"n\":2}", "n", "must be 1"},
	        {"{\"prompt\":\"a\",\"best_of\":2}", "best_of", "must be 1"},
	        {"{\"prompt\":\"a\",\"echo\":true}", "echo", "must be false"},
	        {"{\"prompt\":\"a\",\"suffix\":\"b\"}", "suffix", "must be absent"},
	        {"{\"prompt\":\"a\",\"logprobs\":true}", "logprobs", "whole number"},
	        {"{\"prompt\":\"a\",\"logprobs\":21}", "logprobs", "from 0 to 20"},
	        {"{\"prompt\":\"a\",\"max_tokens\":0}", "max_tokens", "from 1"},
	        {"{\"prompt\":\"a\",\"logit_bias\":{\"1\":2}}", "logit_bias", "must be an empty object"},
	};
	check_wrong(&api_openai_completions, cases, FS_ARRAY_LEN(cases));
}

/* As llama.cpp's clients say it; also where the API's own default is a small number. */
/* Past them there would be nothing to answer with but an error, after all that work. */
static void probabilities_bound_an_answer_in_one_piece(void **state)
{
	static const struct {
		const struct api_dialect *d;
		const char *json;
		int32_t most;
	} cases[] = {{&api_openai_chat, CHAT(USER, ",\"logprobs\":true,\"top_logprobs\":20"), 6241},
	        {&api_openai_chat, CHAT(USER, ",\"logprobs\":true,\"max_tokens\":200000"), 131072},
	        {&api_openai_chat, CHAT(USER, ",\"logprobs\":true,\"max_tokens\":7"), 7},
	        {&api_openai_chat, CHAT(USER, ",\"logprobs\":true,\"top_logprobs\":20,\"stream\":true"), 0},
	        {&api_openai_chat, CHAT(USER, ""), 0},
	        {&api_openai_completions, "{\"prompt\":\"a\",\"logprobs\":20,\"max_tokens\":-1}", 6241},
	        {&api_openai_completions, "{\"prompt\":\"a\",\"logprobs\":20}", 16}};
	for (size_t i = 0; i < FS_ARRAY_LEN(cases); i++) {
		assert_int_equal(good(cases[i].d, cases[i].json)->gen.max_tokens, cases[i].most);
		api_call_finish(&out);
	}
}

static void minus_one_token_is_what_fits(void **state)
{
	static const struct {
		const struct api_dialect *d;
		const char *request;
	} cases[] = {{&api_openai_completions, "{\"prompt\":\"a\",\"max_tokens\":-1}"},
	        {&api_openai_responses, "{\"input\":\"a\",\"max_output_tokens\":-1}"},
	        {&api_openai_chat,
	                "{\"messages\":[{\"role\":\"user\",\"content\":\"a\"}],\"max_tokens\":-1}"},
	        {&api_openai_chat, "{\"messages\":[{\"role\":\"user\",\"content\":\"a\"}],"
	                           "\"max_completion_tokens\":-1}"}};
	for (size_t i = 0; i < FS_ARRAY_LEN(cases); i++) {
		assert_int_equal(good(cases[i].d, cases[i].request)->gen.max_tokens, 0);
		api_call_finish(&out);
	}
	static const struct wrong wrong[] = {{"{\"prompt\":\"a\",\"max_tokens\":-2}", "max_tokens", "or -1"}};
	check_wrong(&api_openai_completions, wrong, FS_ARRAY_LEN(wrong));
}

/* ---- responses ---- */

#define INPUT(items, more) "{\"input\":[" items "]" more "}"
#define PARTS(parts) "{\"role\":\"user\",\"content\":[" parts "]}"

static void reads_a_response(void **state)
{
	const struct fs_chat *c = good(&api_openai_responses,
	        "{\"input\":\"hi\",\"instructions\":\"be brief\",\"max_output_tokens\":5,\"temperature\":0,"
	        "\"store\":true,"
	        "\"stream\":true,\"previous_response_id\":null,\"conversation\":null,\"background\":false,"
	        "\"text\":{\"format\":{\"type\":\"text\"}},\"include\":[\"reasoning.encrypted_content\"],"
	        "\"truncation\":\"auto\",\"top_logprobs\":0}");
	assert_int_equal(c->n_messages, 2);
	assert_int_equal(c->messages[0].role, FS_ROLE_SYSTEM);
	assert_string_equal(c->messages[0].parts[0].text, "be brief");
	assert_int_equal(c->messages[1].role, FS_ROLE_USER);
	assert_int_equal(c->gen.max_tokens, 5);
	assert_true(out.stream);
	assert_string_equal(c->field, "input");
	api_call_finish(&out);
}

static void reads_a_conversation_of_items(void **state)
{
	const struct fs_chat *c = good(&api_openai_responses,
	        INPUT("{\"type\":\"message\",\"role\":\"developer\",\"content\":\"d\"},"
	              "{\"role\":\"user\",\"content\":[{\"type\":\"input_text\",\"text\":\"u\"},"
	              "{\"type\":\"input_image\",\"image_url\":\"" PICTURE "\",\"detail\":\"auto\"}]},"
	              "{\"type\":\"message\",\"id\":\"msg_1\",\"role\":\"assistant\",\"status\":"
	              "\"completed\","
	              "\"content\":[{\"type\":\"output_text\",\"text\":\"a\",\"annotations\":[]}]},"
	              "{\"type\":\"function_call\",\"call_id\":\"c1\",\"name\":\"look\",\"arguments\":\"{}\"}"
	              ","
	              "{\"type\":\"function_call\",\"call_id\":\"c2\",\"name\":\"tell\",\"arguments\":\"\"},"
	              "{\"type\":\"function_call_output\",\"call_id\":\"c1\",\"output\":\"r\"},"
	              "{\"type\":\"function_call_output\",\"call_id\":\"c2\",\"output\":[{\"type\":\"input_"
	              "image\",\"image_url\":\"" PICTURE "\"}]},"
	              "{\"type\":\"function_call\",\"call_id\":\"c3\",\"name\":\"look\",\"arguments\":\"{}"
	              "\"}",
	                ",\"tools\":[{\"type\":\"function\",\"name\":\"look\",\"parameters\":{}}],"
	                "\"tool_choice\":{\"type\":\"function\",\"name\":\"look\"}"));
	static const enum fs_role roles[] = {FS_ROLE_SYSTEM, FS_ROLE_USER, FS_ROLE_ASSISTANT, FS_ROLE_TOOL,
	        FS_ROLE_TOOL, FS_ROLE_ASSISTANT};
	assert_int_equal(c->n_messages, FS_ARRAY_LEN(roles));
	for (size_t i = 0; i < FS_ARRAY_LEN(roles); i++)
		assert_int_equal(c->messages[i].role, roles[i]);
	assert_int_equal(c->messages[2].n_parts, 1);
	assert_int_equal(c->messages[2].n_calls, 2);
	assert_string_equal(c->messages[2].calls[1].name, "tell");
	assert_string_equal(c->messages[2].calls[1].arguments, "{}");
	assert_int_equal(c->messages[5].n_parts, 0);
	assert_int_equal(c->messages[5].n_calls, 1);
	assert_int_equal(c->n_pictures, 2);
	assert_string_equal(c->pictures[0].where, "input[1].content[1].image_url");
	assert_string_equal(c->pictures[1].where, "input[6].output[0].image_url");
	assert_int_equal(c->choice, FS_TOOLS_NAMED);
	api_call_finish(&out);
}

static void names_what_is_wrong_in_a_response(void **state)
{
	static const struct wrong cases[] = {
	        {"{}", "input", "must be a string or an array"},
	        {"{\"input\":[]}", "input", "at least one item"},
	        {"{\"input\":5}", "input", "must be a string or an array"},
	        {"{\"input\":\"x\",\"instructions\":[]}", "instructions", "must be a string"},
	        {INPUT("1", ""), "input[0]", "must be an object"},
	        {INPUT("{\"type\":\"reasoning\"}", ""), "input[0].type", "not \"reasoning\""},
	        {INPUT("{\"type\":\"item_reference\",\"id\":\"x\"}", ""), "input[0].type",
	                "not \"item_reference\""},
	        {INPUT("{\"type\":5}", ""), "input[0].type", "must be \"message\""},
	        {INPUT("{\"content\":\"x\"}", ""), "input[0].role", "must be user"},
	        {INPUT("{\"role\":\"tool\",\"content\":\"x\"}", ""), "input[0].role", "must be user"},
	        {INPUT("{\"role\":\"user\"}", ""), "input[0].content", "must be a string or an array"},
	        {INPUT(PARTS("{\"type\":\"input_file\"}"), ""), "input[0].content[0].type",
	                "not \"input_file\""},
	        {INPUT(PARTS("{\"type\":\"input_text\"}"), ""), "input[0].content[0].text",
	                "must be a string"},
	        {INPUT(PARTS("{\"type\":\"input_image\",\"file_id\":\"f\"}"), ""),
	                "input[0].content[0].file_id", "uploaded file"},
	        {INPUT(PARTS("{\"type\":\"input_image\"}"), ""), "input[0].content[0].image_url",
	                "must be a string"},
	        {INPUT("{\"type\":\"function_call\",\"name\":\"a\",\"arguments\":\"{}\"}", ""),
	                "input[0].call_id", "must be a string"},
	        {INPUT("{\"type\":\"function_call\",\"call_id\":\"c\",\"arguments\":\"{}\"}", ""),
	                "input[0].name", "must be a string"},
	        {INPUT("{\"type\":\"function_call\",\"call_id\":\"c\",\"name\":\"a\",\"arguments\":\"x\"}",
	                 ""),
	                "input[0].arguments", "JSON text of an object"},
	        {INPUT("{\"type\":\"function_call_output\",\"output\":\"x\"}", ""), "input[0].call_id",
	                "must be a string"},
	        {INPUT("{\"type\":\"function_call_output\",\"call_id\":\"c\"}", ""), "input[0].output",
	                "must be a string or an array"},
	        {"{\"input\":\"x\",\"previous_response_id\":\"resp_1\"}", "previous_response_id",
	                "keeps nothing"},
	        {"{\"input\":\"x\",\"conversation\":\"conv_1\"}", "conversation", "keeps nothing"},
	        {"{\"input\":\"x\",\"prompt\":{\"id\":\"p\"}}", "prompt", "keeps nothing"},
	        {"{\"input\":\"x\",\"background\":true}", "background", "must be false"},
	        {"{\"input\":\"x\",\"store\":1}", "store", "true or false"},
	        {"{\"input\":\"x\",\"max_output_tokens\":0}", "max_output_tokens", "from 1"},
	        {"{\"input\":\"x\",\"text\":1}", "text", "must be an object"},
	        {"{\"input\":\"x\",\"text\":{\"format\":{\"type\":\"json_schema\"}}}", "text.format",
	                "can not force"},
	        {"{\"input\":\"x\",\"top_logprobs\":3}", "top_logprobs", "must be 0"},
	        {"{\"input\":\"x\",\"include\":[\"message.output_text.logprobs\"]}", "include",
	                "probabilities"},
	        {"{\"input\":\"x\",\"tools\":[{\"type\":\"web_search\"}]}", "tools[0].type",
	                "no tools of its own"},
	        {"{\"input\":\"x\",\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"a\"}}]}",
	                "tools[0].name", "must be a string"},
	        {"{\"input\":\"x\",\"tool_choice\":{\"type\":\"function\",\"name\":\"a\"}}",
	                "tool_choice.name", "names no tool"},
	};
	check_wrong(&api_openai_responses, cases, FS_ARRAY_LEN(cases));
}

/* ---- pictures that are files ---- */

static void file_urls_of_every_shape(void **state)
{
	static const struct {
		const char *url, *path; /* NULL: refused */
	} cases[] = {{"/a/b%20c.png", "/a/b%20c.png"}, {"file:///a/b%20c.png", "/a/b c.png"},
	        {"FILE:///a", "/a"}, {"file:/a", "/a"}, {"file://localhost/a", "/a"},
	        {"file:///a%2Fb%C3%a9", "/a/b\xc3\xa9"}, {"file:///", "/"}, {"file://host/a", NULL},
	        {"file:a", NULL}, {"file:", NULL}, {"file://", NULL}, {"file:///a%", NULL},
	        {"file:///a%4", NULL}, {"file:///a%zz", NULL}, {"file:///a%00b", NULL},
	        {"file://localhost", NULL}};
	for (size_t i = 0; i < FS_ARRAY_LEN(cases); i++) {
		struct fs_errbuf e = {""};
		char *path = NULL;
		assert_true(fs_file_url_is(cases[i].url));
		int rc = fs_file_url_decode(cases[i].url, &path, &e);
		assert_int_equal(rc, cases[i].path ? FS_OK : FS_EINVAL);
		if (cases[i].path)
			assert_string_equal(path, cases[i].path);
		free(path);
	}
	assert_false(fs_file_url_is("/9j/4AAQSkZJRg")); /* a JPEG in base64 */
	assert_false(fs_file_url_is("https://example.com/a"));
	assert_false(fs_file_url_is("a/b.png"));
}

#define SHOWN(url) CHAT(PARTS("{\"type\":\"image_url\",\"image_url\":{\"url\":\"" url "\"}}"), "")
#define WHERE "messages[0].content[0].image_url.url"

static void files_are_taken_only_where_folders_are(void **state)
{
	static const char *const folders[] = {"/pictures"};
	struct fs_service_opts o = {.workers = 1,
	        .queue_depth = 1,
	        .max_pictures = 2,
	        .picture = {.max_bytes = 16},
	        .picture_folders = folders,
	        .n_picture_folders = 1};
	static const struct wrong without[] = {{SHOWN("/pictures/a.png"), WHERE, "reads no files"},
	        {SHOWN("file:///pictures/a.png"), WHERE, "reads no files"},
	        {SHOWN("\\\\\\\\host\\\\share"), WHERE, "reads no files"},
	        {SHOWN("/9j/4AAQSkZJRg"), WHERE, "must be a data: URL"}};
	static const struct wrong with[] = {{SHOWN("file://host/a.png"), WHERE, "absolute path"},
	        {SHOWN("file:///pictures/%zz"), WHERE, "hexadecimal"},
	        {SHOWN("/pictures/\\u0000"), WHERE, "holds a NUL"},
	        {SHOWN("/9j/4AAQSkZJRg"), WHERE, "must be a data: URL"},
	        {SHOWN("pictures/a.png"), WHERE, "must be a data: URL"},
	        {SHOWN("\\\\\\\\host\\\\share"), WHERE, "reads no files"}};
	check_wrong(&api_openai_chat, without, FS_ARRAY_LEN(without));
	struct fs_service *plain = test_api.service;
	assert_int_equal(fs_service_create(&o, &test_api.service, NULL), FS_OK);
	check_wrong(&api_openai_chat, with, FS_ARRAY_LEN(with));
	const struct fs_chat *c = good(&api_openai_chat, SHOWN("file:///pictures/a%20b.png"));
	assert_string_equal(c->pictures[0].path, "/pictures/a b.png");
	assert_null(c->pictures[0].bytes);
	api_call_finish(&out);
	fs_service_destroy(test_api.service);
	test_api.service = plain;
}

/* ---- what values take in memory ---- */

/* {"x":{"a":0,"a":0…}}: n values by their count, and next to nothing in memory, since each takes the other's
 * place. */
static char *body_of(size_t n, size_t *len)
{
	static const char unit[] = "\"a\":0,", head[] = "{\"x\":{", tail[] = "\"a\":0}}";
	char *text = malloc(sizeof(head) + sizeof(tail) + n * (sizeof(unit) - 1)), *to = text;
	assert_non_null(text);
	to = stpcpy(to, head);
	for (size_t i = 0; i < n; i++)
		to = stpcpy(to, unit);
	*len = (size_t)(stpcpy(to, tail) - text);
	return text;
}

static int parse_body(struct api_call *c, const char *text, size_t n)
{
	memset(&why, 0, sizeof(why));
	*c = (struct api_call){.api = &test_api, .d = &api_openai_chat};
	return api_call_parse(c, text, n, NULL, &why);
}

static void values_are_bounded_in_a_body_and_in_all(void **state)
{
	enum { PAIR = 96 + 64, MIB = 1 << 20 };
	struct api_call held[4], more;
	size_t n;
	char *text = body_of(257 * MIB / PAIR, &n);
	assert_int_not_equal(parse_body(&more, text, n), FS_OK);
	api_call_finish(&more);
	assert_int_equal(why.status, 413);
	assert_string_equal(why.code, "request_too_large");
	free(text);
	text = body_of(250 * MIB / PAIR, &n);
	for (size_t i = 0; i < FS_ARRAY_LEN(held); i++) { /* such a body is read, and has no messages */
		assert_int_not_equal(parse_body(&held[i], text, n), FS_OK);
		assert_string_equal(why.param, "messages");
	}
	free(text);
	text = body_of(30 * MIB / PAIR, &n);
	assert_int_not_equal(parse_body(&more, text, n), FS_OK);
	api_call_finish(&more);
	assert_int_equal(why.status, 503);
	assert_string_equal(why.code, "busy");
	good(&api_openai_chat, CHAT(USER, "")); /* a small one is */
	api_call_finish(&out);
	for (size_t i = 0; i < FS_ARRAY_LEN(held); i++)
		api_call_finish(&held[i]);
	assert_int_not_equal(parse_body(&more, text, n), FS_OK);
	assert_string_equal(why.param, "messages");
	api_call_finish(&more);
	free(text);
}

static void strings_are_no_values(void **state)
{
	static const char plain[] = "{\"a\":\"{[,:\\\\\\\"{[,:\"}";
	assert_int_equal(api_json_cost(plain, sizeof(plain) - 1), 256 + 96);
	assert_int_equal(api_json_cost("[[],{}]", 7), 3 * 256 + 64);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
	        cmocka_unit_test(values_are_bounded_in_a_body_and_in_all),
	        cmocka_unit_test(strings_are_no_values),
	        cmocka_unit_test(reads_a_chat_with_tools),
	        cmocka_unit_test(reads_the_choice_of_a_tool),
	        cmocka_unit_test(names_what_is_wrong_in_a_chat),
	        cmocka_unit_test(reads_a_completion),
	        cmocka_unit_test(names_what_is_wrong_in_a_completion),
	        cmocka_unit_test(probabilities_bound_an_answer_in_one_piece),
	        cmocka_unit_test(minus_one_token_is_what_fits),
	        cmocka_unit_test(reads_a_response),
	        cmocka_unit_test(reads_a_conversation_of_items),
	        cmocka_unit_test(names_what_is_wrong_in_a_response),
	        cmocka_unit_test(file_urls_of_every_shape),
	        cmocka_unit_test(files_are_taken_only_where_folders_are),
	};
	return cmocka_run_group_tests_name("api_requests", tests, api_setup, api_teardown);
}
