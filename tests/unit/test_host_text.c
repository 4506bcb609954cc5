/* Edits of authorized_keys, of the watchdog's settings and of a server's config: what is not ours stays. */
#include "server/cli/host.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define BLOB "AAAAC3NzaC1lZDI1NTE5AAAAIOne"
#define OLD_BLOB "AAAAC3NzaC1lZDI1NTE5AAAAIOld"
#define PUBLIC "ssh-ed25519 " BLOB " farsight:me@here"
#define LINE "restrict,command=\"x" HOST_AGENT_MARK "\" " PUBLIC
#define FRIEND "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIFriend friend\n"
#define OTHER_PC                                                                                             \
	"restrict,command=\"x" HOST_AGENT_MARK                                                               \
	"\" ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIOther farsight:you@there\n"

static json_t *json(const char *text)
{
	json_t *j = json_loads(text, 0, NULL);
	assert_non_null(j);
	return j;
}

static void keys_of(
        const char *public_key, const char *text, const char *line, const char *want, size_t want_others)
{
	struct fs_buf out;
	size_t others = 99;
	fs_buf_init(&out, 1 << 16);
	assert_int_equal(host_keys_edit(text, strlen(text), public_key, line, &out, &others, NULL), FS_OK);
	assert_string_equal(out.data ? (char *)out.data : "", want);
	assert_int_equal(others, want_others);
	fs_buf_finish(&out);
}

static void keys(const char *text, const char *line, const char *want, size_t want_others)
{
	keys_of(PUBLIC, text, line, want, want_others);
}

static void test_our_line_comes_and_goes(void **state)
{
	keys("", LINE, LINE "\n", 0);
	keys(FRIEND, LINE, FRIEND LINE "\n", 0);
	keys(FRIEND LINE "\n", LINE, FRIEND LINE "\n", 0);
	keys(FRIEND LINE "\n" OTHER_PC, NULL, FRIEND OTHER_PC, 1);
	keys(LINE "\n", NULL, "", 0);
	keys("", NULL, "", 0);
	keys("no newline", LINE, "no newline\n" LINE "\n", 0);
	keys("no newline", NULL, "no newline", 0);
}

static void test_older_lines_are_replaced_in_their_place(void **state)
{
	/* the same key with other options, and once more */
	keys("ssh-ed25519 " BLOB " somebody\n" FRIEND PUBLIC "\n", LINE, LINE "\n" FRIEND, 0);
	/* a key of the same comment that runs something else is none of ours */
	keys("ssh-ed25519 " OLD_BLOB " farsight:me@here\n", LINE,
	        "ssh-ed25519 " OLD_BLOB " farsight:me@here\n" LINE "\n", 0);
	/* nor is a longer comment, a comment line, or a key that begins like ours */
	keys("# " PUBLIC "\nssh-ed25519 " BLOB "More x\n", LINE,
	        "# " PUBLIC "\nssh-ed25519 " BLOB "More x\n" LINE "\n", 0);
	keys(OTHER_PC, LINE, OTHER_PC LINE "\n", 1);
	/* lines of another system keep their ends */
	keys("first\r\nlast\r\n", LINE, "first\r\nlast\r\n" LINE "\n", 0);
}

#define AGENT "restrict,command=\"x" HOST_AGENT_MARK "\" ssh-ed25519 "
#define TAGGED "ssh-ed25519 " BLOB " farsight:me@here:0123456789abcdef"
#define TAGGED_LINE "restrict,command=\"x" HOST_AGENT_MARK "\" " TAGGED

static void test_a_machine_of_the_same_name_keeps_its_line(void **state)
{
	/* written by older versions: of whichever machine */
	keys(AGENT OLD_BLOB " farsight:me@here\n", LINE, AGENT OLD_BLOB " farsight:me@here\n" LINE "\n", 1);
	keys_of(TAGGED, AGENT OLD_BLOB " farsight:me@here\n", TAGGED_LINE,
	        AGENT OLD_BLOB " farsight:me@here\n" TAGGED_LINE "\n", 1);
	keys_of(TAGGED, AGENT OLD_BLOB " farsight:me@here\n", NULL, AGENT OLD_BLOB " farsight:me@here\n", 1);
	/* another tag, and one that only ends alike */
	keys_of(TAGGED, AGENT OLD_BLOB " farsight:me@here:0123456789abcdee\n", NULL,
	        AGENT OLD_BLOB " farsight:me@here:0123456789abcdee\n", 1);
	keys_of(TAGGED, AGENT OLD_BLOB " not-farsight:me@here:0123456789abcdef\n", NULL,
	        AGENT OLD_BLOB " not-farsight:me@here:0123456789abcdef\n", 1);
	/* an earlier key of this machine, which is lost */
	keys_of(TAGGED, AGENT OLD_BLOB " farsight:me@here:0123456789abcdef\n" FRIEND, TAGGED_LINE,
	        TAGGED_LINE "\n" FRIEND, 0);
	/* the same key without the tag, as an older version wrote it */
	keys_of(TAGGED, LINE "\n", TAGGED_LINE, TAGGED_LINE "\n", 0);
}

static bool is_tagged(const char *line)
{
	size_t n;
	const char *comment = host_key_comment(line, &n);
	return host_comment_is_tagged(comment, n);
}

static void test_tags(void **state)
{
	assert_true(is_tagged(TAGGED));
	assert_true(is_tagged(TAGGED "\n"));
	assert_false(is_tagged(PUBLIC));
	assert_false(is_tagged(""));
	assert_false(is_tagged("ssh-ed25519 " BLOB));
	assert_false(is_tagged("ssh-ed25519 " BLOB " farsight::0123456789abcde"));
	assert_false(is_tagged("ssh-ed25519 " BLOB " farsight:0123456789abcdef"));
	assert_false(is_tagged("ssh-ed25519 " BLOB " farsight:me@here:0123456789abcdeF"));
	assert_false(is_tagged("ssh-ed25519 " BLOB " farsight:me @here:0123456789abcdef"));
	assert_false(is_tagged("ssh-ed25519 " BLOB " somebody:me@here:0123456789abcdef"));
}

static void whole(const char *path, const char *folder, const char *want)
{
	struct fs_buf b;
	fs_buf_init(&b, 4096);
	assert_int_equal(host_whole_path(path, folder, &b), FS_OK);
	assert_string_equal(b.data, want);
	fs_buf_finish(&b);
}

static void test_relative_paths_count_from_the_folder(void **state)
{
	struct fs_buf b;
	whole("known", "/a/b", "/a/b/known");
	whole("../known", "/a/b", "/a/b/../known");
	whole("/known", "/a", "/known");
	whole("~/known", "/a", "~/known");
	whole("~friend", "/a", "/a/~friend"); /* as the server reads it */
	whole("%d/known", "/a", "%d/known");
	whole("${HOME}/known", "/a", "${HOME}/known");
	whole("known", "/100%/b", "/100%%/b/known");
	fs_buf_init(&b, 8);
	assert_int_not_equal(host_whole_path("known", "/a/b", &b), FS_OK);
	fs_buf_finish(&b);
}

/* Where the i-th of the config is among those that are shown; -1 = nowhere. */
static int shown_at(const char *shown, const struct fs_vision_host_opts *hosts, size_t n, size_t i)
{
	json_t *list = json(shown);
	const json_t *one = host_shown(list, hosts, n, i);
	int at = -1;
	for (size_t k = 0; one && k < json_array_size(list); k++)
		at = json_array_get(list, k) == one ? (int)k : at;
	json_decref(list);
	return at;
}

static void test_hosts_are_found_by_the_name_that_is_shown(void **state)
{
	static const struct fs_vision_host_opts ports[] = {{.host = "box"}, {.host = "box", .port = 2222},
	        {.host = "boxes"}},
	                                        same[] = {{.host = "box"}, {.host = "a"}, {.host = "box"}};
#define H(name) "{\"host\": \"" name "\"}"
	for (int i = 0; i < 3; i++) {
		assert_int_equal(
		        shown_at("[" H("box") ", " H("box:2222") ", " H("boxes") "]", ports, 3, (size_t)i),
		        i);
		assert_int_equal(
		        shown_at("[" H("box #1") ", " H("a") ", " H("box #3") "]", same, 3, (size_t)i), i);
	}
	/* a server that has not taken all of the config */
	assert_int_equal(shown_at("[" H("boxes") ", " H("box:2222") "]", ports, 3, 0), -1);
	assert_int_equal(shown_at("[" H("boxes") ", " H("box:2222") "]", ports, 3, 1), 1);
	assert_int_equal(shown_at("[" H("boxes") ", " H("box:2222") "]", ports, 3, 2), 0);
	assert_int_equal(shown_at("[" H("box") "]", ports, 3, 0), 0);
	assert_int_equal(shown_at("[" H("box") "]", ports, 3, 1), -1);
	/* names that hosts kept over a change */
	assert_int_equal(shown_at("[" H("box") ", " H("box #2") "]", ports, 2, 1), 1);
	assert_int_equal(shown_at("[" H("box:2222") "]", ports + 1, 1, 0), 0);
	assert_int_equal(shown_at("[" H("box #3") "]", same, 1, 0), 0);
	assert_int_equal(shown_at("[" H("box:22") "]", ports + 1, 1, 0), -1);
	assert_int_equal(shown_at("[]", ports, 3, 0), -1);
	assert_null(host_shown(NULL, ports, 3, 0));
}

static bool settled(const char *shown, double since)
{
	json_t *one = json(shown);
	bool is = host_is_settled(one, since);
	json_decref(one);
	return is;
}

static void test_a_host_that_was_down_before_is_waited_for(void **state)
{
	assert_true(settled("{\"state\": \"up\", \"state_age_s\": 100.0}", 1));
	assert_false(settled("{\"state\": \"down\", \"state_age_s\": 100.0}", 1));
	assert_false(settled("{\"state\": \"down\", \"state_age_s\": 0.4}", 5)); /* tried again just now */
	assert_true(settled("{\"state\": \"down\", \"state_age_s\": 1.4}", 5));
	assert_false(settled("{\"state\": \"starting\", \"state_age_s\": 1.4}", 5));
	assert_false(settled("{}", 5));
	assert_false(host_is_settled(NULL, 5));
}

static void test_no_public_key(void **state)
{
	struct fs_buf out;
	size_t others;
	fs_buf_init(&out, 100);
	assert_int_equal(host_keys_edit("", 0, "nonsense", LINE, &out, &others, NULL), FS_EINVAL);
	assert_int_equal(
	        host_keys_edit(FRIEND FRIEND FRIEND, 3 * strlen(FRIEND), PUBLIC, LINE, &out, &others, NULL),
	        FS_ENOMEM);
	fs_buf_finish(&out);
}

static void merge(const char *base, const char *wanted, const char *want, const char *want_changes)
{
	json_t *b = base ? json(base) : NULL, *w = json(wanted), *out, *expected = json(want);
	char *changes;
	assert_int_equal(host_json_merge(b, w, &out, &changes, NULL), FS_OK);
	assert_true(json_equal(out, expected));
	if (want_changes)
		assert_string_equal(changes, want_changes);
	else
		assert_null(changes);
	free(changes);
	json_decref(b);
	json_decref(w);
	json_decref(out);
	json_decref(expected);
}

static void test_settings_are_merged(void **state)
{
	merge(NULL, "{\"mmproj\": \"/a\"}", "{\"mmproj\": \"/a\"}", "\"mmproj\": (none) -> \"/a\"");
	merge("{\"mmproj\": \"/a\", \"x\": [1]}", "{\"mmproj\": \"/a\"}", "{\"mmproj\": \"/a\", \"x\": [1]}",
	        NULL);
	merge("{\"mmproj\": \"/a\", \"x\": 1}", "{\"mmproj\": \"/b\", \"gpu\": true, \"x\": null}",
	        "{\"mmproj\": \"/b\", \"gpu\": true}",
	        "\"mmproj\": \"/a\" -> \"/b\"; \"gpu\": (none) -> true; \"x\": 1 -> (none)");
	json_t *list = json("[1]"), *wanted = json("{}"), *out;
	char *changes;
	assert_int_equal(host_json_merge(list, wanted, &out, &changes, NULL), FS_EFORMAT);
	json_decref(list);
	json_decref(wanted);
}

#define ENTRY "{\"host\": \"box\", \"identity\": \"/k\"}"

static int add(const char *config, const char *want, bool want_changed)
{
	json_t *c = json(config), *entry = json(ENTRY);
	bool changed = !want_changed;
	int rc = host_config_add(c, entry, &changed, NULL);
	if (!rc) {
		json_t *expected = json(want);
		assert_true(json_equal(c, expected));
		assert_int_equal(changed, want_changed);
		json_decref(expected);
	}
	json_decref(c);
	json_decref(entry);
	return rc;
}

static void test_hosts_are_added_to_a_config(void **state)
{
#define WITH(hosts) "{\"model\": \"m\", \"vision\": {\"remote\": true, \"hosts\": [" hosts "]}}"
	assert_int_equal(add("{\"model\": \"m\"}", WITH(ENTRY), true), 0);
	assert_int_equal(add(WITH(ENTRY), WITH(ENTRY), false), 0);
	assert_int_equal(add(WITH("\"a\""), WITH("\"a\", " ENTRY), true), 0);
	assert_int_equal(add(WITH("\"box\", \"a\""), WITH(ENTRY ", \"a\""), true), 0);
	assert_int_equal(add("{\"model\": \"m\", \"vision\": {\"remote\": true, \"hosts\": \"a\"}}",
	                         WITH("\"a\", " ENTRY), true),
	        0);
	assert_int_equal(add("{\"model\": \"m\", \"vision\": {\"hosts\": {\"host\": \"a\"}}}",
	                         WITH("{\"host\": \"a\"}, " ENTRY), true),
	        0);
	/* what the admin wrote into the entry stays */
	assert_int_equal(add(WITH("{\"host\": \"box\", \"port\": 7, \"command\": \"old\"}"),
	                         WITH("{\"host\": \"box\", \"port\": 7, \"identity\": \"/k\"}"), true),
	        0);
	assert_int_equal(add("{\"vision\": {\"mmproj\": \"/local\"}}", "{}", false), FS_EINVAL);
	assert_int_equal(add("{\"vision\": {\"hosts\": 3}}", "{}", false), FS_EFORMAT);
	assert_int_equal(add("{\"vision\": 3}", "{}", false), FS_EFORMAT);
	assert_int_equal(add("[]", "{}", false), FS_EFORMAT);
}

static void drop(const char *config, int want_rc, const char *want)
{
	json_t *c = json(config), *expected = json(want);
	assert_int_equal(host_config_remove(c, "box", NULL), want_rc);
	if (!want_rc)
		assert_true(json_equal(c, expected));
	json_decref(c);
	json_decref(expected);
}

static void test_hosts_are_removed_from_a_config(void **state)
{
	drop(WITH("\"a\", " ENTRY), 0, WITH("\"a\""));
	drop(WITH(ENTRY), 0, "{\"model\": \"m\"}");
	drop("{\"vision\": {\"remote\": true, \"hosts\": \"box\", \"cache\": 1}}", 0,
	        "{\"vision\": {\"cache\": 1}}");
	drop(WITH("\"a\""), FS_ENOTFOUND, "{}");
	drop("{}", FS_ENOTFOUND, "{}");
	drop("{\"vision\": []}", FS_ENOTFOUND, "{}");
}

static void test_values_of_a_hosts_answer(void **state)
{
	static const char text[] = "os=Debian\nempty=\n=x\na\0b\nhome=/home/me\nos=second\nlast=no newline";
	struct fs_buf b = {(uint8_t *)(uintptr_t)text, sizeof(text) - 1, sizeof(text) - 1, sizeof(text)},
	              none = {0};
	char v[8];
	assert_true(host_value(&b, "os", v, sizeof(v)));
	assert_string_equal(v, "Debian");
	assert_true(host_value(&b, "home", v, sizeof(v)));
	assert_string_equal(v, "/home/m"); /* cut */
	assert_true(host_value(&b, "empty", v, sizeof(v)));
	assert_string_equal(v, "");
	assert_true(host_value(&b, "last", v, sizeof(v)));
	assert_false(host_value(&b, "hom", v, sizeof(v)));
	assert_string_equal(v, "");
	assert_false(host_value(&none, "os", v, sizeof(v)));
}

int main(void)
{
	const struct CMUnitTest tests[] = {
	        cmocka_unit_test(test_our_line_comes_and_goes),
	        cmocka_unit_test(test_older_lines_are_replaced_in_their_place),
	        cmocka_unit_test(test_a_machine_of_the_same_name_keeps_its_line),
	        cmocka_unit_test(test_tags),
	        cmocka_unit_test(test_relative_paths_count_from_the_folder),
	        cmocka_unit_test(test_hosts_are_found_by_the_name_that_is_shown),
	        cmocka_unit_test(test_a_host_that_was_down_before_is_waited_for),
	        cmocka_unit_test(test_no_public_key),
	        cmocka_unit_test(test_settings_are_merged),
	        cmocka_unit_test(test_hosts_are_added_to_a_config),
	        cmocka_unit_test(test_hosts_are_removed_from_a_config),
	        cmocka_unit_test(test_values_of_a_hosts_answer),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}
