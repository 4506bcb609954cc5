/* server/config: what is refused, in which words, and that the documentation is the table. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "server/config/config.h"

#include <stdlib.h>
#include <string.h>

static struct fs_errbuf e;

static int parse(struct fs_config *c, const char *json)
{
	fs_config_finish(c);
	fs_config_init(c);
	return fs_config_parse(c, json, strlen(json), "test.json", &e);
}

static void reads_values_and_hosts(void **state)
{
	struct fs_config c;
	fs_config_init(&c);
	assert_int_equal(
	        parse(&c, "{\"model\":\"m.gguf\",\"threads\":3,\"sampling\":{\"temperature\":0},\"vision\":{"
	                  "\"remote\":true,"
	                  "\"hosts\":[\"eyes\",{\"host\":\"u@box\",\"port\":2222,\"identity\":\"/k\"}]}}"),
	        FS_OK);
	assert_string_equal(c.model, "m.gguf");
	assert_int_equal(c.threads, 3);
	assert_true(c.sampling.temperature == 0.0);
	assert_true(c.vision.remote);
	assert_int_equal(c.vision.n_hosts, 2);
	assert_string_equal(c.vision.hosts[0].host, "eyes");
	assert_int_equal(c.vision.hosts[1].port, 2222);
	assert_string_equal(c.vision.hosts[1].identity, "/k");
	assert_int_equal(fs_config_check(&c, &e), FS_OK);
	assert_int_equal(fs_config_set(&c, "vision.hosts=other", &e), FS_OK);
	assert_int_equal(c.vision.n_hosts, 1);
	assert_int_equal(fs_config_set(&c, "listen=[::1]:0", &e), FS_OK);
	assert_string_equal(c.listen, "[::1]:0");
	assert_int_equal(fs_config_set(&c, "name=123", &e), FS_OK);
	assert_string_equal(c.name, "123");
	assert_true(c.fetch.enabled);
	assert_int_equal(c.fetch.allow.n, 0);
	assert_int_equal(parse(&c, "{\"fetch\":{\"allow\":[\"nas.local:8000\",\"10.0.0.0/8\"]}}"), FS_OK);
	assert_int_equal(c.fetch.allow.n, 2);
	assert_string_equal(c.fetch.allow.items[1], "10.0.0.0/8");
	assert_int_equal(fs_config_set(&c, "fetch.allow=192.168.1.0/24", &e), FS_OK);
	assert_int_equal(c.fetch.allow.n, 1);
	assert_string_equal(c.fetch.allow.items[0], "192.168.1.0/24");
	fs_config_finish(&c);
}

static void refuses_in_clear_words(void **state)
{
	static const struct {
		const char *json, *text;
	} cases[] = {
	        {"{\"modle\":\"x\"}", "test.json: unknown key \"modle\"; did you mean \"model\"?"},
	        {"{\"vision\":{\"remot\":true}}",
	                "test.json: unknown key \"vision.remot\"; did you mean \"vision.remote\"?"},
	        {"{\"vision\":{\"host\":\"x\"}}",
	                "test.json: unknown key \"vision.host\"; did you mean \"vision.hosts\"?"},
	        {"{\"vision\":{\"hosts\":[{\"hots\":\"x\"}]}}",
	                "test.json: unknown key \"vision.hosts[].hots\"; did you mean "
	                "\"vision.hosts[].host\"?"},
	        {"{\"xyzzyplugh\":1}",
	                "test.json: unknown key \"xyzzyplugh\"; the nearest known one is \"sampling\", and "
	                "docs/CONFIG.md lists all"},
	        /* objects are known words too, and a key may stand in the wrong place */
	        {"{\"visoin\":{}}", "test.json: unknown key \"visoin\"; did you mean \"vision\"?"},
	        {"{\"samplin\":{}}", "test.json: unknown key \"samplin\"; did you mean \"sampling\"?"},
	        {"{\"hosts\":\"x\"}", "test.json: unknown key \"hosts\"; did you mean \"vision.hosts\"?"},
	        {"{\"gpu\":true}", "test.json: unknown key \"gpu\"; did you mean \"vision.gpu\"?"},
	        {"{\"vision\":{\"timeout_s\":1}}",
	                "test.json: unknown key \"vision.timeout_s\"; did you mean \"timeout_s\"?"},
	        {"{\"threads\":\"two\"}", "test.json: \"threads\" must be a whole number from 0 to 1024"},
	        {"{\"threads\":-1}", "test.json: \"threads\" must be a whole number from 0 to 1024"},
	        {"{\"vision\":true}", "test.json: \"vision\" must be an object"},
	        {"{\"vision\":{\"remote\":\"yes\"}}", "test.json: \"vision.remote\" must be true or false"},
	        {"{\"chat_template\":\"chat\"}", "test.json: \"chat_template\" must be one of "
	                                         "chatml|llama3|mistral|gemma|vicuna, not \"chat\""},
	        {"{\"vision\":{\"hosts\":[{\"port\":1}]}}",
	                "test.json: an element of \"vision.hosts\" lacks \"host\""},
	        {"[1]", "test.json: must be a JSON object"},
	};
	struct fs_config c;
	fs_config_init(&c);
	for (size_t i = 0; i < FS_ARRAY_LEN(cases); i++) {
		assert_true(parse(&c, cases[i].json) < 0);
		assert_string_equal(e.text, cases[i].text);
	}
	assert_int_equal(parse(&c, "{\"model\":}"), FS_EFORMAT);
	assert_non_null(strstr(e.text, "test.json, line 1, column"));
	assert_int_equal(parse(&c, "{\"threads\":1,\"threads\":2}"), FS_EFORMAT);
	assert_int_equal(parse(&c, "{\"api_key\" \"sk-secret\"}"), FS_EFORMAT);
	assert_string_equal(e.text, "test.json, line 1, column 22: ':' expected");
	assert_int_equal(fs_config_load(&c, "/nonexistent.json", &e), FS_EIO);
	fs_config_finish(&c);
}

static void checks_what_keys_mean_together(void **state)
{
	struct fs_config c;
	fs_config_init(&c);
	assert_int_equal(parse(&c, "{}"), FS_OK);
	assert_int_equal(fs_config_check(&c, &e), FS_EINVAL);
	assert_non_null(strstr(e.text, "\"model\""));
	assert_int_equal(parse(&c, "{\"model\":\"m\",\"picture_folders\":[\"/a\",\"b\"]}"), FS_OK);
	assert_int_equal(fs_config_check(&c, &e), FS_EINVAL);
	assert_non_null(strstr(e.text, "\"picture_folders\" holds \"b\""));
	assert_int_equal(parse(&c, "{\"model\":\"m\",\"picture_folders\":\"/a\"}"), FS_OK);
	assert_int_equal(fs_config_check(&c, &e), FS_OK);
	assert_int_equal(parse(&c, "{\"model\":\"m\",\"vision\":{\"remote\":true}}"), FS_OK);
	assert_int_equal(fs_config_check(&c, &e), FS_EINVAL);
	assert_non_null(strstr(e.text, "\"vision.hosts\""));
	assert_int_equal(
	        parse(&c, "{\"model\":\"m\",\"vision\":{\"remote\":true,\"hosts\":\"a\",\"fingerprint\":"
	                  "\"0123456789abcdef0123456789abcdef\"}}"),
	        FS_OK);
	assert_int_equal(fs_config_check(&c, &e), FS_OK);
	assert_int_equal(parse(&c, "{\"model\":\"m\",\"vision\":{\"fingerprint\":"
	                           "\"0123456789abcdef0123456789abcdefX\"}}"),
	        FS_OK);
	assert_int_equal(fs_config_check(&c, &e), FS_EINVAL);
	assert_non_null(strstr(e.text, "\"vision.fingerprint\""));
	static const struct {
		const char *vision, *text; /* NULL: it is fine */
	} kinds[] = {
	        {"\"mmproj\":\"p\"", NULL},
	        {"\"mmproj\":\"p\",\"gpu\":true,\"elastic\":true,\"exe\":\"e\",\"threads\":2", NULL},
	        {"\"mmproj\":\"p\",\"remote\":true,\"hosts\":\"a\"", "choose vision hosts or an encoder"},
	        {"\"mmproj\":\"p\",\"hosts\":\"a\"", "\"vision.hosts\""},
	        {"\"exe\":\"e\"", "\"vision.exe\" is about an encoder on this machine"},
	        {"\"remote\":true,\"hosts\":\"a\",\"gpu\":true", "\"vision.gpu\" is about"},
	        {"\"elastic\":true", "\"vision.elastic\" is about"},
	        {"\"device\":\"cuda\"", "\"vision.device\" is about"},
	        {"\"mmproj\":\"p\",\"device\":\"auto\"", NULL},
	        {"\"mmproj\":\"p\",\"device\":\"cuda:12\",\"gpu\":false", NULL},
	        {"\"mmproj\":\"p\",\"device\":\"cuda:\"", "\"vision.device\" is \"cuda:\"; it must be"},
	        {"\"mmproj\":\"p\",\"device\":\"gpu\"", "\"vision.device\" is \"gpu\"; it must be"},
	        {"\"mmproj\":\"p\",\"device\":\"cpu\",\"gpu\":true", "leave out \"vision.gpu\""},
	        {"\"threads\":1", "\"vision.threads\" is about"},
	        {"\"mmproj\":\"p\",\"max_tokens\":4,\"min_tokens\":8", "must not be larger"},
	};
	for (size_t i = 0; i < FS_ARRAY_LEN(kinds); i++) {
		char json[256];
		snprintf(json, sizeof(json), "{\"model\":\"m\",\"vision\":{%s}}", kinds[i].vision);
		assert_int_equal(parse(&c, json), FS_OK);
		assert_int_equal(fs_config_check(&c, &e), kinds[i].text ? FS_EINVAL : FS_OK);
		assert_true(!kinds[i].text || strstr(e.text, kinds[i].text));
	}
	fs_config_finish(&c);
}

static void lists_of_strings(void **state)
{
	struct fs_config c;
	fs_config_init(&c);
	assert_int_equal(c.api_key.n, 0);
	assert_int_equal(parse(&c, "{\"api_key\":\"one\",\"cors_origins\":[\"a\",\"b\"]}"), FS_OK);
	assert_int_equal(c.api_key.n, 1);
	assert_string_equal(c.api_key.items[0], "one");
	assert_int_equal(c.cors_origins.n, 2);
	assert_string_equal(c.cors_origins.items[1], "b");
	assert_int_equal(fs_config_set(&c, "api_key=123", &e), FS_OK); /* text, not a number */
	assert_string_equal(c.api_key.items[0], "123");
	assert_int_equal(fs_config_set(&c, "api_key=[\"x\",\"y\"]", &e), FS_OK);
	assert_int_equal(c.api_key.n, 2);
	assert_int_equal(fs_config_set(&c, "api_key=null", &e), FS_OK);
	assert_int_equal(c.api_key.n, 0);
	static const char *const wrong[] = {"{\"api_key\":1}", "{\"api_key\":[\"a\",1]}", "{\"api_key\":{}}"};
	for (size_t i = 0; i < FS_ARRAY_LEN(wrong); i++) {
		assert_int_equal(parse(&c, wrong[i]), FS_EINVAL);
		assert_string_equal(e.text, "test.json: \"api_key\" must be a string or an array of strings");
	}
	fs_config_finish(&c);
}

/* docs/CONFIG.md holds the very table that the program prints. */
static void documentation_is_the_table(void **state)
{
	char path[1024];
	snprintf(path, sizeof(path), "%s/../docs/CONFIG.md", getenv("FS_TEST_DATA"));
	FILE *f = fopen(path, "re");
	assert_non_null(f);
	char *doc = NULL, *table = NULL;
	size_t n = 0;
	assert_true(getdelim(&doc, &n, '\0', f) > 0);
	fclose(f);
	FILE *m = open_memstream(&table, &n);
	fs_config_print_table(m);
	fclose(m);
	assert_non_null(strstr(doc, table));
	free(doc);
	free(table);
}

struct diffs {
	char text[1024];
};

static void note(void *arg, const char *key)
{
	struct diffs *d = arg;
	size_t n = strlen(d->text);
	snprintf(d->text + n, sizeof(d->text) - n, "%s;", key);
}

static void differences_are_found(void **state)
{
	static const struct {
		const char *a, *b, *want;
	} cases[] = {
	        {"{}", "{}", ""},
	        {"{\"threads\":2}", "{\"threads\":2}", ""},
	        {"{\"threads\":2}", "{\"threads\":3,\"model\":\"x\"}", "model;threads;"},
	        {"{\"model\":\"x\"}", "{\"model\":\"y\",\"fetch\":{\"enabled\":false}}",
	                "model;fetch.enabled;"},
	        {"{\"api_key\":[\"a\",\"b\"]}", "{\"api_key\":[\"a\",\"c\"]}", "api_key;"},
	        {"{\"api_key\":\"a\"}", "{\"api_key\":[\"a\"]}", ""},
	        {"{\"sampling\":{\"top_p\":0.5}}", "{\"sampling\":{\"top_p\":0.25}}", "sampling.top_p;"},
	        {"{\"vision\":{\"hosts\":\"a\"}}", "{\"vision\":{\"hosts\":[{\"host\":\"a\"}]}}", ""},
	        {"{\"vision\":{\"hosts\":\"a\"}}", "{\"vision\":{\"hosts\":[{\"host\":\"a\",\"port\":1}]}}",
	                "vision.hosts;"},
	        {"{\"vision\":{\"hosts\":[\"a\",\"b\"]}}", "{\"vision\":{\"hosts\":[\"b\",\"a\"]}}",
	                "vision.hosts;"},
	        {"{\"vision\":{\"hosts\":[{\"host\":\"a\",\"wol\":\"x\"}]}}",
	                "{\"vision\":{\"hosts\":[\"a\"],\"remote\":true}}", "vision.remote;vision.hosts;"},
	};
	for (size_t i = 0; i < FS_ARRAY_LEN(cases); i++) {
		struct fs_config a, b;
		struct diffs there = {""}, back = {""};
		fs_config_init(&a);
		fs_config_init(&b);
		assert_int_equal(fs_config_parse(&a, cases[i].a, strlen(cases[i].a), "a", NULL), FS_OK);
		assert_int_equal(fs_config_parse(&b, cases[i].b, strlen(cases[i].b), "b", NULL), FS_OK);
		fs_config_diff(&a, &b, note, &there);
		fs_config_diff(&b, &a, note, &back);
		assert_string_equal(there.text, cases[i].want);
		assert_string_equal(back.text, cases[i].want);
		fs_config_finish(&a);
		fs_config_finish(&b);
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
	        cmocka_unit_test(reads_values_and_hosts),
	        cmocka_unit_test(refuses_in_clear_words),
	        cmocka_unit_test(checks_what_keys_mean_together),
	        cmocka_unit_test(lists_of_strings),
	        cmocka_unit_test(differences_are_found),
	        cmocka_unit_test(documentation_is_the_table),
	};
	return cmocka_run_group_tests_name("config", tests, NULL, NULL);
}
