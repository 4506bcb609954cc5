/* server/api: what a request must look like, and in which words it is refused. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "server/api/openai.h"

#include <stdlib.h>
#include <string.h>

/* The picture of RFC 2397's own example is too long for here; any bytes do, since parsing does not decode
 * pictures. */
#define PICTURE "data:image/png;base64,aGVsbG8="

static struct fs_api api;
static struct api_call out;
static struct fs_refusal why;

static int setup(void **state)
{
	struct fs_service_opts o = {
	        .workers = 1, .queue_depth = 1, .max_pictures = 2, .picture = {.max_bytes = 16}};
	fs_gen_params_default(&api.sampling);
	return fs_service_create(&o, &api.service, NULL);
}

static int teardown(void **state)
{
	fs_service_destroy(api.service);
	return 0;
}

static int parse(const char *json)
{
	memset(&why, 0, sizeof(why));
	out = (struct api_call){.api = &api, .d = &api_openai_chat};
	return api_call_parse(&out, json, strlen(json), NULL, &why);
}

static void reads_a_whole_request(void **state)
{
	assert_int_equal(
	        parse("{\"model\":\"any\",\"stream\":true,\"stream_options\":{\"include_usage\":true},"
	              "\"temperature\":0,\"top_p\":0.5,"
	              "\"seed\":7,\"max_tokens\":5,\"stop\":[\"a\",\"bc\"],\"user\":\"x\",\"tools\":[],"
	              "\"messages\":["
	              "{\"role\":\"developer\",\"content\":\"be brief\"},"
	              "{\"role\":\"user\",\"content\":[{\"type\":\"text\",\"text\":\"one\"},"
	              "{\"type\":\"image_url\",\"image_url\":{\"url\":\"" PICTURE "\",\"detail\":\"low\"}},"
	              "{\"type\":\"text\",\"text\":\"two\\u0000three\"}]},"
	              "{\"role\":\"assistant\",\"content\":null}]}"),
	        FS_OK);
	const struct fs_chat *c = &out.chat;
	assert_true(out.stream && out.include_usage);
	assert_true(c->gen.temperature == 0.0F && c->gen.top_p == 0.5F);
	assert_true(c->gen.has_seed && c->gen.seed == 7);
	assert_int_equal(c->gen.max_tokens, 5);
	assert_int_equal(c->gen.n_stops, 2);
	assert_string_equal(c->gen.stops[1], "bc");
	assert_int_equal(c->n_messages, 3);
	assert_int_equal(c->messages[0].role, FS_ROLE_SYSTEM);
	assert_int_equal(c->messages[1].n_parts, 3);
	assert_null(c->messages[1].parts[1].text);
	assert_int_equal(c->messages[1].parts[2].text_len, 9);
	assert_int_equal(c->n_pictures, 1);
	assert_int_equal(c->pictures[0].n, 5);
	assert_memory_equal(c->pictures[0].bytes, "hello", 5);
	assert_string_equal(c->pictures[0].where, "messages[1].content[1].image_url.url");
	assert_int_equal(c->messages[2].n_parts, 0);
	api_call_finish(&out);
}

#define MESSAGES(m) "{\"messages\":[" m "]}"
#define USER(parts) MESSAGES("{\"role\":\"user\",\"content\":[" parts "]}")
#define IMAGE(url) "{\"type\":\"image_url\",\"image_url\":{\"url\":\"" url "\"}}"
#define WITH(member) "{" member ",\"messages\":[{\"role\":\"user\",\"content\":\"x\"}]}"

static void names_what_is_wrong(void **state)
{
	static const struct {
		const char *json, *param, *part;
	} cases[] = {
	        {"{", "", "the body is not JSON: line 1"},
	        {"[]", "", "must be a JSON object"},
	        {"{}", "messages", "must be an array"},
	        {"{\"messages\":[]}", "messages", "at least one message"},
	        {"{\"messages\":\"hi\"}", "messages", "must be an array"},
	        {MESSAGES("1"), "messages[0]", "must be an object"},
	        {MESSAGES("{\"content\":\"x\"}"), "messages[0].role", "must be a string"},
	        {MESSAGES("{\"role\":\"robot\",\"content\":\"x\"}"), "messages[0].role", "not \"robot\""},
	        {MESSAGES("{\"role\":\"user\"}"), "messages[0].content", "must be a string or an array"},
	        {MESSAGES("{\"role\":\"user\",\"content\":5}"), "messages[0].content",
	                "must be a string or an array"},
	        {USER("5"), "messages[0].content[0]", "must be an object"},
	        {USER("{\"type\":\"input_audio\"}"), "messages[0].content[0].type", "not \"input_audio\""},
	        {USER("{\"type\":\"text\"}"), "messages[0].content[0].text", "must be a string"},
	        {USER("{\"type\":\"image_url\"}"), "messages[0].content[0].image_url", "must be a string"},
	        {USER("{\"type\":\"image_url\",\"image_url\":{}}"), "messages[0].content[0].image_url.url",
	                "must be a string"},
	        {USER(IMAGE("https://example.com/a.png")), "messages[0].content[0].image_url.url",
	                "is a web address"},
	        {USER(IMAGE("file:///etc/hostname")), "messages[0].content[0].image_url.url", "names a file"},
	        {USER(IMAGE("/etc/hostname")), "messages[0].content[0].image_url.url", "names a file"},
	        {USER(IMAGE("aGVsbG8=")), "messages[0].content[0].image_url.url", "must be a data: URL"},
	        {USER(IMAGE("data:image/png,abc")), "messages[0].content[0].image_url.url",
	                "must be data:<media type>;base64,<data>"},
	        {USER(IMAGE("data:;base64,a*b=")), "messages[0].content[0].image_url.url",
	                "damaged or empty"},
	        {USER(IMAGE("data:;base64,")), "messages[0].content[0].image_url.url", "damaged or empty"},
	        {USER(IMAGE("data:;base64,aGVsbG8gaGVsbG8gaGVsbG8gaGVsbG8=")),
	                "messages[0].content[0].image_url.url", "limit is 16 bytes"},
	        {USER(IMAGE(PICTURE) "," IMAGE(PICTURE) "," IMAGE(PICTURE)),
	                "messages[0].content[2].image_url.url", "more than 2 pictures"},
	        {MESSAGES("{\"role\":\"system\",\"content\":[" IMAGE(PICTURE) "]}"), "messages[0].content[0]",
	                "only user and tool messages"},
	        {WITH("\"temperature\":\"hot\""), "temperature", "must be a number from 0 to 2"},
	        {WITH("\"temperature\":3"), "temperature", "must be a number from 0 to 2"},
	        {WITH("\"top_p\":-1"), "top_p", "must be a number"},
	        {WITH("\"max_tokens\":0"), "max_tokens", "must be a whole number from 1"},
	        {WITH("\"max_tokens\":1.5"), "max_tokens", "must be a whole number from 1"},
	        {WITH("\"n\":2"), "n", "must be 1"},
	        {WITH("\"stream\":\"yes\""), "stream", "must be true or false"},
	        {WITH("\"stream_options\":1"), "stream_options", "must be an object"},
	        {WITH("\"stop\":[1]"), "stop", "must be a string"},
	        {WITH("\"stop\":\"\""), "stop", "must be a string"},
	        {WITH("\"tools\":[{}]"), "tools[0].type", "must be \"function\""},
	        {WITH("\"tools\":\"x\""), "tools", "must be an array"},
	        {WITH("\"functions\":[{}]"), "functions", "deprecated"},
	        {WITH("\"logit_bias\":[]"), "logit_bias", "must be an empty object"},
	        {WITH("\"response_format\":\"json\""), "response_format", "can not force"},
	        {WITH("\"response_format\":{\"type\":1}"), "response_format", "can not force"},
	        {WITH("\"logprobs\":2"), "logprobs", "must be true or false"},
	        {WITH("\"response_format\":{\"type\":\"json_object\"}"), "response_format", "can not force"},
	        {WITH("\"model\":5"), "model", "must be a string"},
	};
	for (size_t i = 0; i < FS_ARRAY_LEN(cases); i++) {
		assert_true(parse(cases[i].json) < 0);
		api_call_finish(&out);
		assert_int_equal(why.status, 400);
		assert_string_equal(why.type, "invalid_request_error");
		assert_string_equal(why.param, cases[i].param);
		if (!strstr(why.text.text, cases[i].part))
			fail_msg("\"%s\" lacks \"%s\"", why.text.text, cases[i].part);
	}
}

static void check_url(const char *url, const char *bytes)
{
	uint8_t *got = NULL;
	size_t n = 0;
	int rc = fs_data_url_decode(url, strlen(url), 64, &got, &n, NULL);
	if (!bytes) {
		assert_true(rc < 0);
		return;
	}
	assert_int_equal(rc, FS_OK);
	assert_int_equal(n, strlen(bytes));
	assert_memory_equal(got, bytes, n);
	free(got);
}

/* RFC 2397 for the URL's shape, RFC 4648 section 10 for the vectors. */
static void data_urls_of_every_shape(void **state)
{
	check_url("data:image/png;base64,Zm9vYmFy", "foobar");
	check_url("data:image/png;charset=utf-8;base64,Zm9vYmE=", "fooba");
	check_url("DATA:image/PNG;BASE64,Zm9vYg==", "foob");
	check_url("data:;base64,Zm9vYmE", "fooba");
	check_url("data:;base64,Zm9vYg", "foob");
	check_url("data:;base64,Zm9v%59mFy", "foobar");
	check_url("data:;base64,Zm9v\n YmFy", "foobar");
	check_url("data:;base64,Zg%3D%3D", "f");
	check_url("data:;base64,_-8=", "\xff\xef");
	check_url("data:image/png,abc", NULL);
	check_url("data:image/png;base64", NULL);
	check_url("data:;base64,Z", NULL);
	check_url("data:;base64,Zm=v", NULL);
	check_url("data:;base64,Zm9v%5", NULL);
	check_url("data:;base64,Zm9v%", NULL);
	check_url("data:;base64,Zm9v%zz", NULL);
	check_url("data:", NULL);
	check_url("", NULL);
}

/* Quotes of a request may be cut within a character, and hosts may send anything: an answer is JSON anyway.
 */
static void foreign_text_becomes_utf8(void **state)
{
	static const struct {
		const char *in, *out;
	} cases[] = {{"", ""}, {"plain \n\x1b", "plain \n\x1b"}, {"caf\xc3\xa9", "caf\xc3\xa9"},
	        {"cut \xc3\" end", "cut ?\" end"}, {"cut \xe2\x82", "cut ??"},
	        {"\xf0\x9f\x98\x80 \xf0\x9f\x98", "\xf0\x9f\x98\x80 ???"},
	        {"\xff\xc0\x80\xed\xa0\x80", "??????"}};
	for (size_t i = 0; i < FS_ARRAY_LEN(cases); i++) {
		json_t *j = api_text(cases[i].in);
		assert_string_equal(json_string_value(j), cases[i].out);
		json_decref(j);
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
	        cmocka_unit_test(reads_a_whole_request),
	        cmocka_unit_test(names_what_is_wrong),
	        cmocka_unit_test(data_urls_of_every_shape),
	        cmocka_unit_test(foreign_text_becomes_utf8),
	};
	return cmocka_run_group_tests_name("api", tests, setup, teardown);
}
