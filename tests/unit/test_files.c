/* server/service/files: what may be read as a picture's file, and what must not. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "server/service/files.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define ELSEWHERE "no such file in the folders"

/* top/{in,out}: "in" is the folder that may be read. */
static char top[64];

static const char *at(const char *name)
{
	static char paths[4][PATH_MAX];
	static int turn;
	char *p = paths[turn++ % 4];
	snprintf(p, PATH_MAX, "%s/%s", top, name);
	return p;
}

static void put(const char *name, const char *text)
{
	FILE *f = fopen(at(name), "w");
	assert_non_null(f);
	fputs(text, f);
	fclose(f);
}

static int setup(void **state)
{
	strcpy(top, "/tmp/fs-files-XXXXXX");
	if (!mkdtemp(top) || mkdir(at("in"), 0700) || mkdir(at("in/sub"), 0700) || mkdir(at("out"), 0700) ||
	        mkdir(at("in-too"), 0700))
		return -1;
	put("in/a.png", "picture");
	put("in/sub/b c.png", "below");
	put("in/empty.png", "");
	put("out/secret", "secret");
	put("in-too/secret", "secret");
	return symlink("../out/secret", at("in/link-out")) || symlink(at("out"), at("in/folder-out")) ||
	       symlink("sub/b c.png", at("in/link-in")) || symlink(at("in/a.png"), at("out/link-back")) ||
	       symlink("nowhere", at("in/dangling")) || symlink("/dev/null", at("in/device")) ||
	       mkfifo(at("in/fifo"), 0600);
}

static int teardown(void **state)
{
	char command[128];
	snprintf(command, sizeof(command), "rm -r %s", top);
	return system(command);
}

static int read_file(const char *path, size_t max, char **text, struct fs_errbuf *e)
{
	const char *folders[] = {"/nonexistent-folder", at("in")};
	uint8_t *bytes = NULL;
	size_t n = 0;
	int rc = fs_file_read(path, folders, FS_ARRAY_LEN(folders), max, NULL, &bytes, &n, e);
	*text = (char *)bytes;
	if (!rc)
		assert_int_equal(strlen(*text), n);
	return rc;
}

static void reads_files_of_the_folders(void **state)
{
	static const struct {
		const char *name, *text;
	} cases[] = {{"in/a.png", "picture"}, {"in/sub/b c.png", "below"}, {"in/sub/../a.png", "picture"},
	        {"in//./a.png", "picture"}, {"in/link-in", "below"}, {"out/link-back", "picture"}};
	for (size_t i = 0; i < FS_ARRAY_LEN(cases); i++) {
		struct fs_errbuf e = {""};
		char *text;
		if (read_file(at(cases[i].name), 7, &text, &e))
			fail_msg("%s: %s", cases[i].name, e.text);
		assert_string_equal(text, cases[i].text);
		free(text);
	}
}

static void refuses_all_else(void **state)
{
	static const struct {
		const char *name, *text;
	} cases[] = {{"out/secret", ELSEWHERE}, {"in/../out/secret", ELSEWHERE}, {"in/link-out", ELSEWHERE},
	        {"in/folder-out/secret", ELSEWHERE}, {"in-too/secret", ELSEWHERE}, {"in/missing", ELSEWHERE},
	        {"in/dangling", ELSEWHERE}, {"in/device", ELSEWHERE}, {"out/missing", ELSEWHERE},
	        {"in/a.png/x", ELSEWHERE}, {"in", ELSEWHERE}, {"in/sub", "no regular file"},
	        {"in/fifo", "no regular file"}, {"in/empty.png", "is empty"}};
	for (size_t i = 0; i < FS_ARRAY_LEN(cases); i++) {
		struct fs_errbuf e = {""};
		char *text;
		assert_int_equal(read_file(at(cases[i].name), 100, &text, &e), FS_EINVAL);
		if (!strstr(e.text, cases[i].text))
			fail_msg("%s: \"%s\" lacks \"%s\"", cases[i].name, e.text, cases[i].text);
		if (strstr(e.text, top))
			fail_msg("\"%s\" tells a path", e.text);
	}
	struct fs_errbuf e;
	char *text;
	assert_int_equal(read_file("in/a.png", 100, &text, &e), FS_EINVAL);
	assert_int_equal(read_file("", 100, &text, &e), FS_EINVAL);
}

static void opens_no_device(void **state)
{
	static const char *const folders[] = {"/dev"};
	struct fs_errbuf e = {""};
	uint8_t *bytes;
	size_t n;
	assert_int_equal(fs_file_read("/dev/zero", folders, 1, 100, NULL, &bytes, &n, &e), FS_EINVAL);
	assert_non_null(strstr(e.text, "no regular file"));
}

static void keeps_to_the_limit(void **state)
{
	struct fs_errbuf e = {""};
	char *text;
	assert_int_equal(read_file(at("in/a.png"), 6, &text, &e), FS_ELIMIT);
	assert_non_null(strstr(e.text, "limit is 6 bytes"));
	/* A file that says that it is empty and is not: its bytes are counted while they are read. */
	const char *folders[] = {"/proc/self"};
	uint8_t *bytes;
	size_t n;
	assert_int_equal(fs_file_read("/proc/self/status", folders, 1, 16, NULL, &bytes, &n, &e), FS_ELIMIT);
}

static void stops_when_cancelled(void **state)
{
	struct fs_cancel *cancel = fs_cancel_create(FS_NEVER);
	const char *folders[] = {at("in")};
	struct fs_errbuf e;
	uint8_t *bytes;
	size_t n;
	fs_cancel_fire(cancel, FS_CANCEL_CLIENT);
	assert_int_equal(
	        fs_file_read(at("in/a.png"), folders, 1, 100, cancel, &bytes, &n, &e), FS_ECANCELLED);
	fs_cancel_unref(cancel);
}

static void a_link_may_be_the_folder(void **state)
{
	const char *folders[] = {at("in/folder-out")};
	struct fs_errbuf e;
	uint8_t *bytes;
	size_t n;
	assert_int_equal(fs_file_read(at("out/secret"), folders, 1, 100, NULL, &bytes, &n, &e), FS_OK);
	free(bytes);
	folders[0] = "/";
	assert_int_equal(fs_file_read(at("out/secret"), folders, 1, 100, NULL, &bytes, &n, &e), FS_OK);
	free(bytes);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
	        cmocka_unit_test(reads_files_of_the_folders),
	        cmocka_unit_test(refuses_all_else),
	        cmocka_unit_test(opens_no_device),
	        cmocka_unit_test(keeps_to_the_limit),
	        cmocka_unit_test(stops_when_cancelled),
	        cmocka_unit_test(a_link_may_be_the_folder),
	};
	return cmocka_run_group_tests_name("files", tests, setup, teardown);
}
