/*
 * Calls of tools found in the text of an answer: whatever the pieces that it comes in, what is a call comes
 * out as one and all else as text.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <cmocka.h>

#include <stdio.h>
#include <string.h>

#include "server/engine/engine.h"

#define CALL(json) "<tool_call>\n" json "\n</tool_call>"

/* Everything in order: text as it is, a call as {name|arguments}. */
struct seen {
	struct fs_buf all;
	int calls;
};

static void take_text(void *arg, const char *utf8, size_t n)
{
	struct seen *s = arg;

	assert_true(n > 0);
	/* whole characters */
	assert_int_not_equal((uint8_t)utf8[0] & 0xc0, 0x80);
	assert_int_equal(fs_buf_append(&s->all, utf8, n), FS_OK);
}

static void take_call(void *arg, const char *name, const char *arguments)
{
	struct seen *s = arg;

	s->calls++;
	assert_int_equal(fs_buf_printf(&s->all, "{%s|%s}", name, arguments), FS_OK);
}

/* In pieces of `step` bytes, moved back to the start of a character. */
static void parse(const char *text, size_t n, size_t step, struct seen *s)
{
	const struct fs_tool_events ev = {.arg = s, .text = take_text, .call = take_call};
	struct fs_tool_parser *t = fs_tool_parser_create(&ev);

	assert_non_null(t);
	fs_buf_init(&s->all, (size_t)8 << 20);
	s->calls = 0;
	for (size_t at = 0; at < n;) {
		size_t end = FS_MIN(n, at + step);

		while (end < n && ((uint8_t)text[end] & 0xc0) == 0x80)
			end++;
		assert_int_equal(fs_tool_parser_push(t, text + at, end - at), FS_OK);
		at = end;
	}
	assert_int_equal(fs_tool_parser_end(t), FS_OK);
	fs_tool_parser_destroy(t);
}

static void expect(const char *text, const char *want)
{
	size_t n = strlen(text);

	for (size_t step = 1; step <= n; step += step < 24 ? 1 : n - 24 > 0 ? n - 24 : 1) {
		struct seen s;

		parse(text, n, step, &s);
		if (strcmp(s.all.data != NULL ? (char *)s.all.data : "", want) != 0)
			fail_msg("in steps of %zu: want \"%s\", got \"%s\"", step, want, (char *)s.all.data);
		fs_buf_finish(&s.all);
	}
}

static void calls(void **state)
{
	expect(CALL("{\"name\": \"f\", \"arguments\": {\"a\": 1}}"), "{f|{\"a\": 1}}");
	expect("<tool_call>{\"arguments\":{\"b\":[1,2.5,null],\"a\":\"\\u00fc\"},\"name\":\"g\"}</tool_call>",
	        "{g|{\"b\": [1, 2.5, null], \"a\": \"\xc3\xbc\"}}");
	expect("I look.\n" CALL("{\"name\": \"f\", \"arguments\": {}}") "\n" CALL(
	               "{\"name\": \"g\", \"arguments\": {\"x\": {\"y\": []}}}") "\n",
	        "I look.{f|{}}{g|{\"x\": {\"y\": []}}}");
	expect(CALL("{\"name\": \"now\"}") " \n Done.\n", "{now|{}}Done.\n");
}

/* Marks inside strings belong to the arguments. */
static void marks_in_strings(void **state)
{
	expect(CALL("{\"name\": \"w\", \"arguments\": {\"s\": \"a</tool_call>b<tool_call>c\"}}") "x",
	        "{w|{\"s\": \"a</tool_call>b<tool_call>c\"}}x");
}

static void plain_text(void **state)
{
	expect("", "");
	expect("no calls < here <tool <tool_cal> and </tool_call>",
	        "no calls < here <tool <tool_cal> and </tool_call>");
	expect("\n\n ends in space \n", "\n\n ends in space \n");
	expect("ends in a part <tool_ca", "ends in a part <tool_ca");
	expect("<<<tool_call", "<<<tool_call");
	expect("gr\xc3\xbc\xc3\x9f \xf0\x9f\x98\x80 \n<", "gr\xc3\xbc\xc3\x9f \xf0\x9f\x98\x80 \n<");
}

static void malformed(void **state)
{
	static const char *const bodies[] = {"", "not JSON", "[]", "{}", "{\"name\": 3}", "{\"name\": \"\"}",
	        "{\"name\": \"f\", \"arguments\": [1]}", "{\"name\": \"f\", \"arguments\": \"{}\"}",
	        "{\"name\": \"f\", \"arguments\": {\"a\": 1}",
	        "{\"name\": \"f\", \"arguments\": {\"a\": 1}}}", "{\"name\": \"f\" \"arguments\": {}}",
	        "{\"name\": \"a\\u0000b\", \"arguments\": {}}"};
	char text[256], want[256];

	for (size_t i = 0; i < FS_ARRAY_LEN(bodies); i++) {
		snprintf(text, sizeof(text), "a\n<tool_call>%s</tool_call> z", bodies[i]);
		expect(text, text);
		/* and what follows is read as if it stood alone */
		snprintf(
		        text, sizeof(text), "<tool_call>%s</tool_call>" CALL("{\"name\": \"g\"}"), bodies[i]);
		snprintf(want, sizeof(want), "<tool_call>%s</tool_call>{g|{}}", bodies[i]);
		expect(text, want);
	}
}

/* The answer ends, or the model forgets the closing mark. */
static void cut_short(void **state)
{
	expect("<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": 1}}", "{f|{\"a\": 1}}");
	expect("<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": 1}}\n</tool_c", "{f|{\"a\": 1}}");
	expect("x\n<tool_call>\n{\"name\": \"f\", \"argum", "x\n<tool_call>\n{\"name\": \"f\", \"argum");
	expect("<tool_call>{\"name\": \"f\"}\n" CALL("{\"name\": \"g\"}"), "{f|{}}{g|{}}");
	expect("<tool_call>{\"na\n" CALL("{\"name\": \"g\"}"), "<tool_call>{\"na\n{g|{}}");
}

/* Text goes out as soon as it can be no call. */
static void streams(void **state)
{
	struct seen s = {.calls = 0};
	const struct fs_tool_events ev = {.arg = &s, .text = take_text, .call = take_call};
	struct fs_tool_parser *t = fs_tool_parser_create(&ev);

	assert_non_null(t);
	fs_buf_init(&s.all, 1000);
	assert_int_equal(fs_tool_parser_push(t, "Hello, ", 7), FS_OK);
	assert_string_equal((char *)s.all.data, "Hello,");
	assert_int_equal(fs_tool_parser_push(t, "you <tool", 9), FS_OK);
	assert_string_equal((char *)s.all.data, "Hello, you");
	assert_int_equal(fs_tool_parser_push(t, "s> are", 6), FS_OK);
	assert_string_equal((char *)s.all.data, "Hello, you <tools> are");
	assert_int_equal(fs_tool_parser_push(t, "\n<tool_call>{\"name\":\"f\"}</tool_call", 35), FS_OK);
	assert_int_equal(s.calls, 0);
	assert_int_equal(fs_tool_parser_push(t, ">", 1), FS_OK);
	assert_int_equal(s.calls, 1);
	assert_int_equal(fs_tool_parser_end(t), FS_OK);
	fs_tool_parser_destroy(t);
	fs_tool_parser_destroy(NULL);
	fs_buf_finish(&s.all);
}

static char *repeat(const char *head, const char *body, size_t times, const char *tail, size_t *n)
{
	struct fs_buf b;

	fs_buf_init(&b, (size_t)8 << 20);
	assert_int_equal(fs_buf_append_str(&b, head), FS_OK);
	while (times-- > 0)
		assert_int_equal(fs_buf_append_str(&b, body), FS_OK);
	assert_int_equal(fs_buf_append_str(&b, tail), FS_OK);
	return fs_buf_take(&b, n);
}

/* No size and no number of marks makes it hold more than its bound, or work without end. */
static void bounds(void **state)
{
	static const struct {
		const char *head, *body, *tail;
		size_t times;
		int calls;
	} rows[] = {
	        {"<tool_call>{\"name\": \"f\", \"arguments\": {\"s\": \"", "0123456789", "\"}}</tool_call>",
	                90000, 1},
	        {"<tool_call>{\"name\": \"f\", \"arguments\": {\"s\": \"", "0123456789", "\"}}</tool_call>",
	                200000, 0},
	        {"", "<tool_call>{\"", "", 50000, 0},
	        {"<tool_call>{\"", "</tool_call>", "", 100000, 0},
	        {"<tool_call>", "[", "</tool_call>", 100000, 0},
	        {"", "\n", "<tool_call>{\"name\": \"f\"}</tool_call>", 100000, 1},
	};

	for (size_t i = 0; i < FS_ARRAY_LEN(rows); i++) {
		size_t n;
		char *text = repeat(rows[i].head, rows[i].body, rows[i].times, rows[i].tail, &n);
		struct seen s;

		parse(text, n, i % 2 == 0 ? n : 1000, &s);
		assert_int_equal(s.calls, rows[i].calls);
		if (rows[i].calls == 0) {
			assert_int_equal(s.all.len, n);
			assert_memory_equal(s.all.data, text, n);
		}
		fs_buf_finish(&s.all);
		free(text);
	}
}

/* Numbers keep their values, in the fewest digits that do. */
static void numbers(void **state)
{
	expect(CALL("{\"name\": \"f\", \"arguments\": {\"a\": 48.8566, \"b\": -3, \"c\": 9007199254740993}}"),
	        "{f|{\"a\": 48.8566, \"b\": -3, \"c\": 9007199254740993}}");
	expect(CALL("{\"name\": \"f\", \"arguments\": {\"a\": 0.30000000000000004}}"),
	        "{f|{\"a\": 0.30000000000000004}}");
}

int main(void)
{
	const struct CMUnitTest tests[] = {cmocka_unit_test(calls), cmocka_unit_test(marks_in_strings),
	        cmocka_unit_test(plain_text), cmocka_unit_test(malformed), cmocka_unit_test(cut_short),
	        cmocka_unit_test(streams), cmocka_unit_test(bounds), cmocka_unit_test(numbers)};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
