/* farsight-remote's reading of ssh options, of a root folder, and of its environment. */
#include "server/shim/shim.h"

#include <getopt.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

static struct shim_ssh ssh;

static void expect(const char *text, int port, const char *user, const char *identity)
{
	struct fs_errbuf e = {""};
	if (shim_ssh_opts(text, &ssh, &e))
		fail_msg("%s: %s", text, e.text);
	assert_int_equal(ssh.port, port);
	assert_string_equal(ssh.user, user);
	assert_string_equal(ssh.identity, identity);
}

static void test_ssh_opts(void **state)
{
	expect("", 0, "", "");
	expect("  \t ", 0, "", "");
	expect("-p 2222", 2222, "", "");
	expect("-p2222 -i/key -lme", 2222, "me", "/key");
	expect("-i '/a key' -l \"me\"", 0, "me", "/a key");
	expect("-i /a\\ key", 0, "", "/a key");
	expect("-i '/it'\\''s' -p 1", 1, "", "/it's");
	expect("-i \"/a\\\"b\"", 0, "", "/a\"b");
	expect("-o Port=7 -oUser=me -o IdentityFile=/k", 7, "me", "/k");
	expect("-o \"port 7\" -o 'USER = me'", 7, "me", "");
	expect("-i ''x -p 5", 5, "", "x");
	expect("-o UserKnownHostsFile=/x/known -F /cfg", 0, "", "");
	assert_string_equal(ssh.known_hosts, "/x/known");
	assert_string_equal(ssh.config, "/cfg");
	expect("-o 'UserKnownHostsFile=/a /b'", 0, "", "");
	assert_string_equal(ssh.known_hosts, "/a");
}

static void test_ssh_opts_without_a_meaning(void **state)
{
	expect("-4 -C -q -v -J jump -c aes128-ctr -p 9 -o Compression=yes -oStrictHostKeyChecking=no", 9, "",
	        "");
	expect("-Jjump -p 9", 9, "", "");
	expect("-J", 0, "", "");
}

static void expect_refused(const char *text, const char *said)
{
	struct fs_errbuf e = {""};
	if (shim_ssh_opts(text, &ssh, &e) == FS_OK || !strstr(e.text, said) ||
	        !strstr(e.text, "STRATA_VISION_SSH_OPTS"))
		fail_msg("%s: \"%s\" does not say \"%s\"", text, e.text, said);
}

static void test_wrong_ssh_opts(void **state)
{
	expect_refused("-p 0", "1 to 65535");
	expect_refused("-p 65536", "1 to 65535");
	expect_refused("-p x", "1 to 65535");
	expect_refused("-p", "1 to 65535");
	expect_refused("-o Port=", "1 to 65535");
	expect_refused("-i", "-i lacks its value");
	expect_refused("-o User=", "User lacks its value");
	expect_refused("-i 'open", "quote");
	expect_refused("-i \"open", "quote");
	expect_refused("user@host", "no option");
	char many[512] = "";
	for (int i = 0; i < 70; i++)
		strcat(many, "-4 ");
	expect_refused(many, "64 words");
	char *longer = malloc(SHIM_TEXT + 1);
	memset(longer, 'x', SHIM_TEXT);
	longer[SHIM_TEXT] = '\0';
	expect_refused(longer, "longer than");
	free(longer);
}

/* What a shell makes of the command's one word. */
static void expect_word(const char *root, const char *want)
{
	char command[SHIM_TEXT], line[SHIM_TEXT + 64], got[SHIM_TEXT] = "";
	assert_int_equal(shim_agent_command(root, command, sizeof(command), NULL), FS_OK);
	snprintf(line, sizeof(line), "HOME=/home/me; printf %%s %s", command);
	FILE *p = popen(line, "r");
	assert_non_null(p);
	assert_true(fgets(got, sizeof(got), p) != NULL);
	assert_int_equal(pclose(p), 0);
	assert_string_equal(got, want);
}

static void test_agent_command(void **state)
{
	expect_word("/opt/farsight", "/opt/farsight/bin/farsight-agent");
	expect_word("/opt/farsight/", "/opt/farsight/bin/farsight-agent");
	expect_word("/", "/bin/farsight-agent");
	expect_word("far sight's $(id) `id` \"x\"", "far sight's $(id) `id` \"x\"/bin/farsight-agent");
	expect_word("~/farsight", "/home/me/farsight/bin/farsight-agent");
	expect_word("~/it's", "/home/me/it's/bin/farsight-agent");
	expect_word("~", "/home/me/bin/farsight-agent");
	expect_word("~/", "/home/me/bin/farsight-agent");
	expect_word("~other", "~other/bin/farsight-agent");
	char small[24];
	struct fs_errbuf e = {""};
	assert_int_equal(shim_agent_command("/opt/farsight", small, sizeof(small), &e), FS_ELIMIT);
}

static int read_opts(struct shim_opts *o, struct fs_errbuf *e)
{
	char *argv[] = {(char *)"farsight-remote", (char *)"--mmproj", (char *)"/absent.gguf",
	        (char *)"--max-tokens", (char *)"99", NULL};
	optind = 0;
	return shim_opts_read(o, 5, argv, e);
}

static void clear_environment(void)
{
	clearenv();
	setenv("XDG_CONFIG_HOME", "/nonexistent", 1);
}

static void test_environment(void **state)
{
	struct shim_opts *o = malloc(sizeof(*o));
	struct fs_errbuf e = {""};
	clear_environment();
	assert_int_equal(read_opts(o, &e), FS_EINVAL);
	assert_non_null(strstr(e.text, "STRATA_VISION_SSH"));
	shim_opts_finish(o);

	setenv("STRATA_VISION_SSH", "box", 1);
	assert_int_equal(read_opts(o, &e), FS_OK);
	assert_int_equal(o->vision.n_hosts, 1);
	assert_string_equal(o->vision.hosts[0].host, "box");
	assert_null(o->vision.hosts[0].command);
	assert_null(o->vision.hosts[0].identity);
	assert_null(o->vision.fingerprint);
	assert_int_equal(o->vision.max_tokens, 99);
	assert_int_equal(o->vision.liveness_port, 0);
	assert_int_equal(o->vision.encode_timeout_ms, 300000);
	assert_int_equal(o->start_timeout_ms, 180000);
	shim_opts_finish(o);

	setenv("STRATA_VISION_SSH_OPTS", "-l me -p 2200", 1);
	setenv("STRATA_VISION_ROOT", "/opt/f", 1);
	setenv("STRATA_VISION_LIVENESS_PORT", "1918", 1);
	setenv("STRATA_VISION_PROBE_FAILS", "4", 1);
	setenv("STRATA_VISION_TIMEOUT", "2.5", 1);
	setenv("STRATA_VISION_START_TIMEOUT", "7", 1);
	assert_int_equal(read_opts(o, &e), FS_OK);
	assert_string_equal(o->vision.hosts[0].host, "me@box");
	assert_int_equal(o->vision.hosts[0].port, 2200);
	assert_string_equal(o->vision.hosts[0].command, "'/opt/f/bin/farsight-agent'");
	assert_int_equal(o->vision.liveness_port, 1918);
	assert_int_equal(o->vision.probe_fails, 4);
	assert_int_equal(o->vision.encode_timeout_ms, 2500);
	assert_int_equal(o->start_timeout_ms, 7000);
	shim_opts_finish(o);
	free(o);
}

static void expect_times(const char *encode_s, const char *ready_s, int encode_ms, int start_ms)
{
	struct shim_opts *o = malloc(sizeof(*o));
	struct fs_errbuf e = {""};
	clear_environment();
	setenv("STRATA_VISION_SSH", "box", 1);
	setenv("STRATA_VISION_ENCODE_S", encode_s, 1);
	setenv("STRATA_VISION_READY_S", ready_s, 1);
	assert_int_equal(read_opts(o, &e), FS_OK);
	assert_int_equal(o->vision.encode_timeout_ms, encode_ms);
	assert_int_equal(o->start_timeout_ms, start_ms);
	shim_opts_finish(o);
	free(o);
}

/* An answer in time is worth more than a late one: a share of what the server waits. */
static void test_times_of_the_server(void **state)
{
	expect_times("100", "200", 80000, 160000);
	expect_times("10", "200", 15000, 160000);
	expect_times("no number", "nan", 300000, 180000);
	expect_times("0", "-1", 86400000, 86400000); /* for ever, there; not here */
	expect_times("1e30", "1e300", 86400000, 86400000);
}

static void test_host_of_the_config(void **state)
{
	struct shim_opts *o = malloc(sizeof(*o));
	struct fs_errbuf e = {""};
	char path[] = "/tmp/fs-test-shim-XXXXXX";
	static const char text[] =
	        "{\"vision\": {\"remote\": true, \"dead_after_s\": 9, \"hosts\": [\"other\","
	        "{\"host\": \"box\", \"identity\": \"/id\", \"port\": 5}]}}";
	int fd = mkstemp(path);
	assert_true(fd >= 0 && write(fd, text, strlen(text)) == (ssize_t)strlen(text));
	close(fd);
	clear_environment();
	setenv("FARSIGHT_CONFIG", path, 1);
	assert_int_equal(read_opts(o, &e), FS_OK);
	assert_int_equal(o->vision.n_hosts, 2);
	shim_opts_finish(o);
	/* named by the environment: what the config knows of it holds where the environment is silent */
	setenv("STRATA_VISION_SSH", "box", 1);
	setenv("STRATA_VISION_SSH_OPTS", "-p 6", 1);
	assert_int_equal(read_opts(o, &e), FS_OK);
	assert_int_equal(o->vision.n_hosts, 1);
	assert_string_equal(o->vision.hosts[0].identity, "/id");
	assert_int_equal(o->vision.hosts[0].port, 6);
	assert_int_equal(o->vision.dead_after_ms, 9000);
	shim_opts_finish(o);
	unlink(path);
	free(o);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
	        cmocka_unit_test(test_ssh_opts),
	        cmocka_unit_test(test_ssh_opts_without_a_meaning),
	        cmocka_unit_test(test_wrong_ssh_opts),
	        cmocka_unit_test(test_agent_command),
	        cmocka_unit_test(test_environment),
	        cmocka_unit_test(test_times_of_the_server),
	        cmocka_unit_test(test_host_of_the_config),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}
