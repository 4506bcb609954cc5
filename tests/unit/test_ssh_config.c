/* ~/.ssh/config: what a name comes to mean. The expectations are ssh_config(5)'s; the last test asks ssh -G
 * itself. */
#include "server/ssh/internal.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static char home[64];

static int parse(const char *host, const char *text, struct fs_ssh_conf *c, struct fs_errbuf *e)
{
	struct fs_ssh_opts o = {.host = host};
	return fs_ssh_conf_parse(&o, text, strlen(text), c, e);
}

static struct fs_ssh_conf good(const char *host, const char *text)
{
	struct fs_ssh_conf c;
	struct fs_errbuf e;
	if (parse(host, text, &c, &e))
		fail_msg("%s", e.text);
	return c;
}

static void bad(const char *host, const char *text, int err, const char *want)
{
	struct fs_ssh_conf c;
	struct fs_errbuf e = {""};
	int rc = parse(host, text, &c, &e);
	if (rc != err || !strstr(e.text, want))
		fail_msg("got %s \"%s\", want %s with \"%s\"", fs_err_name(rc), e.text, fs_err_name(err),
		        want);
}

static void names_are_split(void **state)
{
	struct fs_ssh_conf c = good("eve@box:2200", "");
	assert_string_equal(c.target.user, "eve");
	assert_string_equal(c.target.hostname, "box");
	assert_int_equal(c.target.port, 2200);
	c = good("box", "");
	assert_int_equal(c.target.port, 22);
	assert_true(*c.target.user != '\0');
	c = good("[fe80::1%eth0]:2200", "");
	assert_string_equal(c.target.hostname, "fe80::1%eth0");
	assert_int_equal(c.target.port, 2200);
	c = good("::1", "");
	assert_string_equal(c.target.hostname, "::1");
	assert_int_equal(c.target.port, 22);
	static const char *const wrong[] = {"", "@box", "eve@", "box:0", "box:65536", "box:1a",
	        "box:", "-oProxyCommand=x", "a b", "a;b", "[::1", "[::1]x"};
	for (size_t i = 0; i < FS_ARRAY_LEN(wrong); i++)
		bad(wrong[i], "", FS_EINVAL, "");
}

static void first_value_wins_and_blocks_match(void **state)
{
	static const char text[] = "# comment\n"
	                           "Host gpu*  !gpu-old\n"
	                           "\tHostName 10.0.0.7\n"
	                           "  user = \"night owl\"\n"
	                           "Port=2222\n"
	                           "HostName 10.0.0.8\n"
	                           "\n"
	                           "Host *\n"
	                           "  User other\n"
	                           "  Port 99\n"
	                           "  HostKeyAlias alias\n";
	struct fs_ssh_conf c = good("gpu1", text);
	assert_string_equal(c.target.hostname, "10.0.0.7");
	assert_string_equal(c.target.user, "night owl");
	assert_int_equal(c.target.port, 2222);
	assert_string_equal(c.target.host_key_alias, "alias");
	c = good("gpu-old", text);
	assert_string_equal(c.target.hostname, "gpu-old");
	assert_string_equal(c.target.user, "other");
	assert_int_equal(c.target.port, 99);
	c = good("me@gpu1:7", text); /* what is written with the name goes before the file */
	assert_string_equal(c.target.user, "me");
	assert_int_equal(c.target.port, 7);
}

static void keys_and_files_are_expanded(void **state)
{
	char want[256];
	struct fs_ssh_conf c = good("box",
	        "HostName %h.lan\nUser eve\nPort 44\n"
	        "IdentityFile ~/.ssh/%r_%n\nIdentityFile %d/k_%h_%p%%\n"
	        "UserKnownHostsFile ~/a \"%d/b c\"\nGlobalKnownHostsFile none\nIdentitiesOnly yes\n"
	        "IdentityAgent ${FS_TEST_SOCK}\n");
	assert_string_equal(c.target.hostname, "box.lan");
	assert_int_equal(c.target.n_identities, 2);
	snprintf(want, sizeof(want), "%s/.ssh/eve_box", home);
	assert_string_equal(c.target.identity[0], want);
	snprintf(want, sizeof(want), "%s/k_box.lan_44%%", home);
	assert_string_equal(c.target.identity[1], want);
	assert_int_equal(c.n_known_files, 2);
	snprintf(want, sizeof(want), "%s/b c", home);
	assert_string_equal(c.known_files[1], want);
	assert_true(c.target.identities_only);
	assert_string_equal(c.target.identity_agent, "/run/test-agent");
	bad("box", "HostName %q\n", FS_EINVAL, "%q");
}

static void defaults_are_openssh_s(void **state)
{
	char path[256], want[256];
	struct fs_ssh_conf c = good("box", "");
	assert_int_equal(c.target.n_identities, 0); /* none of the usual files is there */
	snprintf(path, sizeof(path), "%s/.ssh/id_ed25519", home);
	FILE *f = fopen(path, "we");
	assert_non_null(f);
	fclose(f);
	c = good("box", "");
	assert_int_equal(c.target.n_identities, 1);
	assert_string_equal(c.target.identity[0], path);
	assert_true(c.default_identities);
	c = good("box", "IdentityFile none\n");
	assert_int_equal(c.target.n_identities, 0);
	assert_false(c.default_identities);
	unlink(path);
	snprintf(want, sizeof(want), "%s/.ssh/known_hosts", home);
	assert_string_equal(c.target.known_hosts, want);
}

static void options_go_first(void **state)
{
	struct fs_ssh_conf c;
	struct fs_errbuf e;
	struct fs_ssh_opts o = {.host = "box:5", .port = 6, .identity = "/first", .known_hosts = "/kh"};
	const char *text = "IdentityFile /second\nUserKnownHostsFile /other\n";
	assert_int_equal(fs_ssh_conf_parse(&o, text, strlen(text), &c, &e), FS_OK);
	assert_int_equal(c.target.port, 6);
	assert_string_equal(c.target.identity[0], "/first");
	assert_string_equal(c.target.identity[1], "/second");
	assert_int_equal(c.n_known_files, 1);
	assert_string_equal(c.known_files[0], "/kh");
}

static void what_can_not_be_honoured_names_its_line(void **state)
{
	bad("box", "Host box\n\n  ProxyJump jump\n", FS_ENOTSUP, "line 3: ProxyJump applies to host box");
	bad("box", "ProxyCommand nc %h %p\n", FS_ENOTSUP, "line 1: ProxyCommand");
	good("box", "Host other\n ProxyJump jump\n");
	good("box", "ProxyJump none\nHost *\n ProxyJump jump\n");
	bad("box", "Match exec \"true\"\n Port 7\n", FS_ENOTSUP, "line 1");
	good("box", "Match originalhost other exec \"true\"\n Port 7\n");
	bad("box", "Port seven\n", FS_EINVAL, "line 1: Port");
	bad("box", "Match host\n", FS_EINVAL, "lacks its value");
}

static void match_blocks_are_evaluated(void **state)
{
	assert_int_equal(good("box", "Match all\n Port 7\n").target.port, 7);
	assert_int_equal(good("box", "Match host box,other\n Port 7\n").target.port, 7);
	assert_int_equal(good("box", "Match host !box,*\n Port 7\n").target.port, 22);
	assert_int_equal(good("box", "Match !host other\n Port 7\n").target.port, 7);
	assert_int_equal(
	        good("box", "HostName real\nMatch host real originalhost box\n Port 7\n").target.port, 7);
	assert_int_equal(good("eve@box", "Match user eve\n Port 7\n").target.port, 7);
	assert_int_equal(good("bob@box", "Match user eve\n Port 7\n").target.port, 22);
	assert_int_equal(good("box", "Match canonical\n Port 7\n").target.port, 22);
}

static void write_file(const char *name, const char *text, int mode)
{
	char path[256];
	snprintf(path, sizeof(path), "%s/.ssh/%s", home, name);
	FILE *f = fopen(path, "we");
	assert_non_null(f);
	fputs(text, f);
	fclose(f);
	assert_int_equal(chmod(path, (mode_t)mode), 0);
}

static void include_follows_its_block(void **state)
{
	write_file("inc_a", "Port 7\nHost other\n User nobody\n", 0600);
	assert_int_equal(good("box", "Include inc_a\n").target.port, 7);
	struct fs_ssh_conf c = good("box", "Host box\n Include inc_*\n User eve\n");
	assert_int_equal(c.target.port, 7);
	assert_string_equal(c.target.user, "eve"); /* the included Host line does not reach past its file */
	assert_int_equal(good("box", "Host other\n Include inc_a\n").target.port, 22);
	assert_int_equal(good("box", "Include missing-*\nPort 8\n").target.port, 8);
	write_file("loop", "Include loop\n", 0600);
	bad("box", "Include loop\n", FS_ELIMIT, "nested");
}

static void own_file_must_be_ours(void **state)
{
	struct fs_ssh_conf c;
	struct fs_errbuf e;
	struct fs_ssh_opts o = {.host = "box"};
	write_file("config", "Port 9\n", 0600);
	assert_int_equal(fs_ssh_conf_load(&o, &c, &e), FS_OK);
	assert_int_equal(c.target.port, 9);
	write_file("config", "Port 9\n", 0666);
	assert_int_equal(fs_ssh_conf_load(&o, &c, &e), FS_EAUTH);
	assert_non_null(strstr(e.text, "chmod go-w"));
	write_file("config", "", 0600);
	o.config_file = "~/.ssh/none";
	assert_int_equal(fs_ssh_conf_load(&o, &c, &e), FS_EINVAL);
}

/* The same file read by OpenSSH: value of one key in the output of ssh -G. */
static void ssh_g(const char *config, const char *host, const char *key, char *out, size_t cap)
{
	char command[512], line[1024];
	snprintf(command, sizeof(command), "ssh -G -F %s %s 2>/dev/null", config, host);
	FILE *f = popen(command, "re");
	assert_non_null(f);
	out[0] = '\0';
	size_t n = strlen(key);
	while (fgets(line, sizeof(line), f)) {
		line[strcspn(line, "\n")] = '\0';
		if (!*out && !strncmp(line, key, n) && line[n] == ' ')
			snprintf(out, cap, "%s", line + n + 1);
	}
	pclose(f);
}

static void openssh_reads_it_the_same_way(void **state)
{
	if (system("ssh -V >/dev/null 2>&1")) {
		printf("skipped: there is no ssh\n");
		skip();
	}
	write_file("big",
	        "Host *.lan gpu? !gpu9\n HostName %h.example\n User=\"u1\"\n Port 2201\nHost gpu9\n Port "
	        "2209\n"
	        "Match host gpu1.example\n HostKeyAlias viamatch\nMatch originalhost gp* user other\n Port "
	        "1\nHost *\n User u2\n"
	        " Port 2299\n IdentityFile /k/%h-%r\n",
	        0600);
	static const char *const hosts[] = {"gpu1", "gpu9", "gpu10", "x.lan", "lan", "other@gpu2"};
	char path[256], want[1024], port[16];
	snprintf(path, sizeof(path), "%s/.ssh/big", home);
	for (size_t i = 0; i < FS_ARRAY_LEN(hosts); i++) {
		struct fs_ssh_target t;
		struct fs_errbuf e;
		struct fs_ssh_opts o = {.host = hosts[i], .config_file = path};
		assert_int_equal(fs_ssh_resolve(&o, &t, &e), FS_OK);
		ssh_g(path, hosts[i], "hostname", want, sizeof(want));
		assert_string_equal(t.hostname, want);
		ssh_g(path, hosts[i], "user", want, sizeof(want));
		assert_string_equal(t.user, want);
		ssh_g(path, hosts[i], "port", want, sizeof(want));
		snprintf(port, sizeof(port), "%d", t.port);
		assert_string_equal(port, want);
		ssh_g(path, hosts[i], "hostkeyalias", want, sizeof(want));
		assert_string_equal(t.host_key_alias, want);
	}
}

static void patterns(void **state)
{
	assert_true(fs_ssh_glob("*", ""));
	assert_true(fs_ssh_glob("a*c?", "abbbcd"));
	assert_false(fs_ssh_glob("a*c?", "abbbc"));
	assert_false(fs_ssh_glob("", "a"));
	assert_true(fs_ssh_glob("**a**", "xxaxx"));
	assert_int_equal(fs_ssh_glob_list("!b,*", ',', "b"), -1);
	assert_int_equal(fs_ssh_glob_list("!b,*", ',', "c"), 1);
	assert_int_equal(fs_ssh_glob_list("x,y", ',', "c"), 0);
	/* would take for ever with a backtracking matcher */
	char text[2001];
	memset(text, 'a', 2000);
	text[2000] = '\0';
	assert_false(fs_ssh_glob("*a*a*a*a*a*a*a*a*a*a*a*a*a*a*a*b", text));
}

static int setup(void **state)
{
	char dir[80];
	snprintf(home, sizeof(home), "/tmp/fs-home-XXXXXX");
	assert_non_null(mkdtemp(home));
	snprintf(dir, sizeof(dir), "%s/.ssh", home);
	assert_int_equal(mkdir(dir, 0700), 0);
	setenv("HOME", home, 1);
	setenv("FS_TEST_SOCK", "/run/test-agent", 1);
	return 0;
}

static int teardown(void **state)
{
	char path[128];
	static const char *const files[] = {"inc_a", "loop", "config", "big"};
	for (size_t i = 0; i < FS_ARRAY_LEN(files); i++) {
		snprintf(path, sizeof(path), "%s/.ssh/%s", home, files[i]);
		unlink(path);
	}
	snprintf(path, sizeof(path), "%s/.ssh", home);
	return rmdir(path) || rmdir(home);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
	        cmocka_unit_test(names_are_split),
	        cmocka_unit_test(first_value_wins_and_blocks_match),
	        cmocka_unit_test(keys_and_files_are_expanded),
	        cmocka_unit_test(defaults_are_openssh_s),
	        cmocka_unit_test(options_go_first),
	        cmocka_unit_test(what_can_not_be_honoured_names_its_line),
	        cmocka_unit_test(match_blocks_are_evaluated),
	        cmocka_unit_test(include_follows_its_block),
	        cmocka_unit_test(own_file_must_be_ours),
	        cmocka_unit_test(openssh_reads_it_the_same_way),
	        cmocka_unit_test(patterns),
	};
	return cmocka_run_group_tests(tests, setup, teardown);
}
