/* Stop strings over every way to cut a text into pieces: the same text comes out, at the latest possible
 * moment only. */
#include "server/engine/stop.h"

#include <setjmp.h>
#include <stdarg.h>
#include <string.h>

#include <cmocka.h>

struct out {
	char text[256];
	size_t n, calls;
};

static void take(void *arg, const char *utf8, size_t n)
{
	struct out *o = arg;

	assert_true(n > 0 && o->n + n < sizeof(o->text));
	assert_int_not_equal((uint8_t)utf8[0] & 0xc0, 0x80); /* whole characters */
	memcpy(o->text + o->n, utf8, n);
	o->n += n;
	o->text[o->n] = '\0';
	o->calls++;
}

/* Feeds text in pieces of `step` bytes (whole characters at least); the index of the stop that ended it. */
static int feed(const char *const *stops, size_t n_stops, const char *text, size_t step, struct out *o)
{
	struct fs_stop s;
	size_t at = 0, len = strlen(text);
	int hit = -1;

	memset(o, 0, sizeof(*o));
	assert_int_equal(fs_stop_init(&s, stops, n_stops, NULL), FS_OK);
	while (at < len && hit < 0) {
		size_t n = step < len - at ? step : len - at;
		while (at + n < len && ((uint8_t)text[at + n] & 0xc0) == 0x80)
			n++;
		assert_int_equal(fs_stop_push(&s, text + at, n, take, o, &hit), FS_OK);
		at += n;
	}
	if (hit < 0)
		fs_stop_flush(&s, take, o);
	fs_stop_finish(&s);
	return hit;
}

static void cuts(void **state)
{
	static const char *const stops[] = {"\n\nUser:", "END", "é!"};
	static const struct {
		const char *text, *want;
		int hit;
	} cases[] = {
	        {"plain text", "plain text", -1},
	        {"hello\n\nUser: more", "hello", 0},
	        {"hello\n\n\nUser: more", "hello\n", 0}, /* the first newline is no start after all */
	        {"hello\n\nUsed", "hello\n\nUsed", -1},
	        {"EEND", "E", 1},
	        {"ENEND x", "EN", 1},
	        {"END", "", 1},
	        {"un café!", "un caf", 2},
	        {"un café ?", "un café ?", -1},
	        {"日本語 EN", "日本語 EN", -1}, /* held to the end, then put out */
	        {"a\n\nEND\n\nUser:", "a\n\n", 1},
	};

	for (size_t i = 0; i < FS_ARRAY_LEN(cases); i++)
		for (size_t step = 1; step <= strlen(cases[i].text); step++) {
			struct out o;
			int hit = feed(stops, 3, cases[i].text, step, &o);
			if (hit != cases[i].hit || strcmp(o.text, cases[i].want) != 0)
				fail_msg("case %zu, pieces of %zu: \"%s\" with %d", i, step, o.text, hit);
		}
}

/* Nothing is held that can be put out, nothing is put out that may be a stop string. */
static void holds(void **state)
{
	static const char *const stops[] = {"abcd"};
	struct fs_stop s;
	struct out o = {.n = 0};
	int hit;

	assert_int_equal(fs_stop_init(&s, stops, 1, NULL), FS_OK);
	assert_int_equal(fs_stop_push(&s, "xabc", 4, take, &o, &hit), FS_OK);
	assert_string_equal(o.text, "x");
	assert_int_equal(fs_stop_push(&s, "abc", 3, take, &o, &hit), FS_OK);
	assert_string_equal(o.text, "xabc");
	assert_int_equal(fs_stop_push(&s, "z", 1, take, &o, &hit), FS_OK);
	assert_string_equal(o.text, "xabcabcz");
	assert_int_equal(fs_stop_push(&s, "abcd", 4, NULL, NULL, &hit), FS_OK);
	assert_int_equal(hit, 0);
	fs_stop_finish(&s);
}

/* Of two completed in one piece the one that starts first wins. */
static void earliest(void **state)
{
	static const char *const stops[] = {"two", "one"};
	struct out o;

	assert_int_equal(feed(stops, 2, "x one two", 9, &o), 1);
	assert_string_equal(o.text, "x ");
}

static void refused(void **state)
{
	static char huge[FS_STOP_MAX_BYTES + 2];
	const char *empty[] = {"a", ""}, *too_long[] = {huge};
	struct fs_errbuf e;
	struct fs_stop s;

	memset(huge, 'x', sizeof(huge) - 1);
	assert_int_equal(fs_stop_init(&s, empty, 2, &e), FS_EINVAL);
	assert_non_null(strstr(e.text, "2"));
	assert_int_equal(fs_stop_init(&s, too_long, 1, &e), FS_EINVAL);
}

int main(void)
{
	const struct CMUnitTest tests[] = {cmocka_unit_test(cuts), cmocka_unit_test(holds),
	        cmocka_unit_test(earliest), cmocka_unit_test(refused)};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
