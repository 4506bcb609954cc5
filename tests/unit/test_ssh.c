/* The ssh channel against a real sshd: bytes both ways, every refusal with its reason, cancel and deadline
 * while connecting. */
#include "server/ssh/internal.h"
#include "tests/unit/sshd.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

/* libssh2 1.10 loses two of OpenSSL's numbers with each ECDSA key that it signs with; its frames show only in
 * slow stack traces, and its functions' names only where there is a symbolizer. */
const char *__asan_default_options(void);
const char *__asan_default_options(void)
{
	return "fast_unwind_on_malloc=0";
}
const char *__lsan_default_suppressions(void);
const char *__lsan_default_suppressions(void)
{
	return "leak:libssh2.so";
}

static struct test_sshd sshd; /* shared by the tests that do not change it */

static struct fs_ssh_opts opts_for(const struct test_sshd *s, const char *command)
{
	static char host[64];
	snprintf(host, sizeof(host), "127.0.0.1:%d", s->port);
	return (struct fs_ssh_opts){.host = host,
	        .identity = s->identity,
	        .config_file = s->ssh_config,
	        .known_hosts = s->known_hosts,
	        .command = command};
}

static int dial(const struct fs_ssh_opts *o, struct fs_ssh **out, struct fs_errbuf *e)
{
	e->text[0] = '\0';
	return fs_ssh_connect(o, fs_deadline_ms(20000), -1, NULL, NULL, out, e);
}

static void refused(const struct fs_ssh_opts *o, int err, const char *want)
{
	struct fs_ssh *s = NULL;
	struct fs_errbuf e;
	int rc = dial(o, &s, &e);
	if (rc != err || !strstr(e.text, want))
		fail_msg("got %s \"%s\", want %s with \"%s\"", fs_err_name(rc), e.text, fs_err_name(err),
		        want);
	assert_null(s);
}

/* Reads until the channel ends or want bytes are there; returns what came. */
static size_t read_some(struct fs_ssh *s, char *buf, size_t want, struct fs_errbuf *e)
{
	size_t n = 0;
	int64_t until = fs_deadline_ms(20000);
	while (n < want && fs_now() < until) {
		ssize_t r = fs_ssh_read(s, buf + n, want - n, e);
		if (r < 0)
			break;
		n += (size_t)r;
		if (r == 0)
			assert_int_equal(fs_ssh_wait(s, false, -1, until), FS_OK);
	}
	return n;
}

static void accepted(const struct fs_ssh_opts *o)
{
	struct fs_ssh *s = NULL;
	struct fs_errbuf e;
	int rc = dial(o, &s, &e);
	if (rc)
		fail_msg("%s", e.text);
	fs_ssh_close(s);
}

static void echoes_bytes(void **state)
{
	/* more than the window, both ways at once, all byte values */
	enum { N = 6 << 20 };
	struct fs_ssh_opts o = opts_for(&sshd, "cat");
	struct fs_ssh *s = NULL;
	struct fs_errbuf e;
	if (dial(&o, &s, &e))
		fail_msg("%s", e.text);
	uint8_t *out = malloc(N), *in = malloc(N);
	uint32_t x = 1;
	for (size_t i = 0; i < N; i++)
		out[i] = (uint8_t)((x = x * 1664525u + 1013904223u) >> 24);
	size_t sent = 0, got = 0;
	int64_t until = fs_deadline_ms(60000);
	while (got < N) {
		assert_true(fs_now() < until);
		ssize_t w = 0, r;
		if (sent < N) {
			w = fs_ssh_write(s, out + sent, FS_MIN((size_t)65536, N - sent), &e);
			assert_true(w >= 0);
			sent += (size_t)w;
		}
		r = fs_ssh_read(s, in + got, FS_MIN((size_t)65536, N - got), &e);
		assert_true(r >= 0);
		got += (size_t)r;
		if (w == 0 && r == 0)
			assert_int_equal(fs_ssh_wait(s, sent < N, -1, until), FS_OK);
	}
	assert_memory_equal(out, in, N);
	free(out);
	free(in);
	fs_ssh_close(s);
}

static void long_commands_are_executed_whole(void **state)
{
	enum { N = 5000 };
	char command[N + 64] = "x=", told[8] = "";
	struct fs_errbuf e;
	struct fs_ssh *s = NULL;
	memset(command + 2, 'a', N);
	strcat(command, "; echo ${#x}");
	struct fs_ssh_opts o = opts_for(&sshd, command);
	if (dial(&o, &s, &e))
		fail_msg("%s", e.text);
	read_some(s, told, 5, &e);
	assert_string_equal(told, "5000\n");
	fs_ssh_close(s);
}

/*
 * A slow reader lets the host fill its window, keys are renegotiated meanwhile, and reads of many sizes of
 * both streams come in turn: not one byte may be lost. Lines of seven digits, so that each tells its number.
 */
static void full_windows_survive_new_keys(void **state)
{
	enum { LINES = 1500000, LINE = 8 };
	static const size_t sizes[] = {12, 65536, 700, 1, 4096, 32768};
	struct test_sshd strict;
	struct test_sshd_opts so = {.extra = "RekeyLimit 1M"};
	struct fs_ssh *s = NULL;
	struct fs_errbuf e;
	char *buf = malloc(65536), sink[64], want[LINE + 1] = "";
	test_sshd_init(&strict, &so);
	struct fs_ssh_opts o = opts_for(&strict, "seq 1000000 2499999");
	if (dial(&o, &s, &e))
		fail_msg("%s", e.text);
	size_t at = 0, total = (size_t)LINES * LINE;
	int64_t until = fs_deadline_ms(120000);
	for (size_t turn = 0; at < total && fs_now() < until; turn++) {
		ssize_t n = fs_ssh_read(s, buf, sizes[turn % FS_ARRAY_LEN(sizes)], &e);
		if (n < 0)
			fail_msg("%s", e.text);
		for (ssize_t i = 0; i < n; i++, at++) {
			if (at % LINE == 0)
				snprintf(want, sizeof(want), "%zu\n", 1000000 + at / LINE);
			if (buf[i] != want[at % LINE])
				fail_msg("byte %zu of %zu is not the one that was sent", at, total);
		}
		if (n == 0) {
			assert_int_equal(fs_ssh_read_stderr(s, sink, sizeof(sink)), 0);
			assert_int_equal(fs_ssh_wait(s, false, -1, until), FS_OK);
		}
	}
	assert_int_equal(at, total);
	fs_ssh_close(s);
	test_sshd_finish(&strict);
	free(buf);
}

static void tells_how_the_program_ended(void **state)
{
	char buf[64];
	struct fs_errbuf e;
	struct fs_ssh *s = NULL;
	struct fs_ssh_opts o = opts_for(&sshd, "printf out; printf err >&2; exit 3");
	assert_int_equal(dial(&o, &s, &e), FS_OK);
	assert_int_equal(read_some(s, buf, sizeof(buf), &e), 3);
	assert_memory_equal(buf, "out", 3);
	if (!strstr(e.text, "ended with status 3"))
		fail_msg("%s", e.text);
	fs_ssh_close(s);

	o = opts_for(&sshd, "kill -9 $$");
	assert_int_equal(dial(&o, &s, &e), FS_OK);
	assert_int_equal(read_some(s, buf, sizeof(buf), &e), 0);
	assert_non_null(strstr(e.text, "signal KILL"));
	fs_ssh_close(s);
}

static void reads_stderr_apart(void **state)
{
	char buf[64] = "";
	struct fs_errbuf e;
	struct fs_ssh *s = NULL;
	struct fs_ssh_opts o = opts_for(&sshd, "printf trouble >&2; cat");
	assert_int_equal(dial(&o, &s, &e), FS_OK);
	size_t n = 0;
	int64_t until = fs_deadline_ms(20000);
	while (n < 7 && fs_now() < until) {
		n += (size_t)fs_ssh_read_stderr(s, buf + n, sizeof(buf) - n);
		char one[8];
		assert_int_equal(fs_ssh_read(s, one, sizeof(one), &e), 0);
		if (n < 7)
			fs_ssh_wait(s, false, -1, until);
	}
	assert_memory_equal(buf, "trouble", 7);
	fs_ssh_close(s);
}

static void missing_command_is_named(void **state)
{
	char buf[8];
	struct fs_errbuf e;
	struct fs_ssh *s = NULL;
	struct fs_ssh_opts o = opts_for(&sshd, "no-such-program-here");
	assert_int_equal(dial(&o, &s, &e), FS_OK);
	assert_int_equal(read_some(s, buf, sizeof(buf), &e), 0);
	assert_non_null(strstr(e.text, "no-such-program-here is not installed"));
	fs_ssh_close(s);
}

static void alias_of_ssh_config_is_dialled(void **state)
{
	char path[256], text[1024];
	snprintf(path, sizeof(path), "%s/alias_config", sshd.dir);
	snprintf(text, sizeof(text),
	        "Host eyes\n HostName 127.0.0.1\n Port %d\n IdentityFile %s\n UserKnownHostsFile %s\n",
	        sshd.port, sshd.identity, sshd.known_hosts);
	test_write_file(path, text, 0600);
	struct fs_ssh_opts o = {.host = "eyes", .config_file = path, .command = "true"};
	accepted(&o);
}

/* ---- host keys ---- */

static struct fs_ssh_opts with_known_hosts(const char *name, const char *text)
{
	static char path[256];
	snprintf(path, sizeof(path), "%s/%s", sshd.dir, name);
	test_write_file(path, text, 0600);
	struct fs_ssh_opts o = opts_for(&sshd, "true");
	o.known_hosts = path;
	return o;
}

/* "type base64" of the server's host key. */
static char *host_key(const char *type)
{
	char path[256];
	snprintf(path, sizeof(path), "%s/host_%s.pub", sshd.dir, type);
	char *s = test_read_file(path);
	s[strcspn(s, "\n")] = '\0';
	return s;
}

static void six_known_hosts_forms_match(void **state)
{
	char *ed = host_key("ed25519"), *ec = host_key("ecdsa"), text[8192], path[256];
	struct fs_ssh_opts o;
	snprintf(text, sizeof(text), "127.0.0.1 %s\n", ed);
	o = with_known_hosts("kh_plain", text);
	accepted(&o);

	snprintf(text, sizeof(text), "[127.0.0.1]:%d %s\n", sshd.port, ed);
	o = with_known_hosts("kh_port", text);
	accepted(&o);

	o = with_known_hosts("kh_hashed", text);
	snprintf(path, sizeof(path), "%s/kh_hashed", sshd.dir);
	const char *const hash[] = {"ssh-keygen", "-q", "-H", "-f", path, NULL};
	assert_int_equal(test_run(hash), 0);
	char *hashed = test_read_file(path);
	assert_null(strstr(hashed, "127.0.0.1"));
	free(hashed);
	accepted(&o);

	/* the first line is of a type that the server does not have; only then its own */
	char *rsa = NULL;
	snprintf(path, sizeof(path), "%s/other_rsa", sshd.dir);
	const char *const gen[] = {"ssh-keygen", "-q", "-t", "rsa", "-b", "2048", "-N", "", "-f", path, NULL};
	assert_int_equal(test_run(gen), 0);
	snprintf(path, sizeof(path), "%s/other_rsa.pub", sshd.dir);
	rsa = test_read_file(path);
	snprintf(text, sizeof(text), "[127.0.0.1]:%d %s[127.0.0.1]:%d %s\n", sshd.port, rsa, sshd.port, ec);
	o = with_known_hosts("kh_types", text);
	accepted(&o);
	free(rsa);

	snprintf(text, sizeof(text), "# comment\r\n[127.0.0.1]:%d %s\r\n", sshd.port, ed);
	o = with_known_hosts("kh_crlf", text);
	accepted(&o);

	snprintf(text, sizeof(text), "garbage\nhost ssh-ed25519 !!!!\n[127.0.0.1]:%d %s\n", sshd.port, ed);
	o = with_known_hosts("kh_garbage", text);
	accepted(&o);
	free(ed);
	free(ec);
}

static void wrong_host_keys_are_refused(void **state)
{
	char *ed = host_key("ed25519"), text[8192];
	char *mine = test_read_file(sshd.authorized_keys); /* an ed25519 key that is not the host's */
	struct fs_ssh_opts o = with_known_hosts("kh_none", "");
	refused(&o, FS_EAUTH, "is not in ");
	refused(&o, FS_EAUTH, "SHA256:");

	snprintf(text, sizeof(text), "[127.0.0.1]:%d %s", sshd.port, mine);
	o = with_known_hosts("kh_changed", text);
	refused(&o, FS_EAUTH, "has changed");
	refused(&o, FS_EAUTH, "kh_changed:1");

	snprintf(text, sizeof(text), "[127.0.0.1]:%d %s\n@revoked * %s\n", sshd.port, ed, ed);
	o = with_known_hosts("kh_revoked", text);
	refused(&o, FS_EAUTH, "@revoked in");

	snprintf(text, sizeof(text), "@cert-authority * %s\n", ed);
	o = with_known_hosts("kh_ca", text);
	refused(&o, FS_EAUTH, "certificate authority");
	free(mine);
	free(ed);
}

/* ---- user keys ---- */

static void unusable_keys_are_explained(void **state)
{
	char path[256];
	struct fs_ssh_opts o = opts_for(&sshd, "true");
	o.identity = path;
	snprintf(path, sizeof(path), "%s/stranger", sshd.dir);
	const char *const gen[] = {"ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", path, NULL};
	assert_int_equal(test_run(gen), 0);
	refused(&o, FS_EAUTH, "accepts none of these keys");

	assert_int_equal(chmod(path, 0644), 0);
	refused(&o, FS_EAUTH, "can be read by others");

	snprintf(path, sizeof(path), "%s/locked", sshd.dir);
	const char *const enc[] = {"ssh-keygen", "-q", "-t", "ed25519", "-N", "secret", "-f", path, NULL};
	assert_int_equal(test_run(enc), 0);
	refused(&o, FS_EAUTH, "ssh-add");

	snprintf(path, sizeof(path), "%s/nothing", sshd.dir);
	refused(&o, FS_EAUTH, "does not exist");

	test_write_file(path, "hello\n", 0600);
	refused(&o, FS_EAUTH, "is not a private key");
}

static void ecdsa_and_pem_keys_work(void **state)
{
	char path[256], pub[260], text[16384];
	char *old = test_read_file(sshd.authorized_keys);
	struct fs_ssh_opts o = opts_for(&sshd, "true");
	o.identity = path;
	static const char *const formats[][2] = {
	        {"RFC4716", "key_new"}, {"PEM", "key_pem"}, {"PKCS8", "key_pkcs8"}};
	size_t n = (size_t)snprintf(text, sizeof(text), "%s", old);
	for (size_t i = 0; i < 3; i++) {
		snprintf(path, sizeof(path), "%s/%s", sshd.dir, formats[i][1]);
		const char *const gen[] = {
		        "ssh-keygen", "-q", "-t", "ecdsa", "-m", formats[i][0], "-N", "", "-f", path, NULL};
		assert_int_equal(test_run(gen), 0);
		snprintf(pub, sizeof(pub), "%s.pub", path);
		char *key = test_read_file(pub);
		n += (size_t)snprintf(text + n, sizeof(text) - n, "%s", key);
		free(key);
	}
	test_write_file(sshd.authorized_keys, text, 0600);
	for (size_t i = 0; i < 3; i++) {
		snprintf(path, sizeof(path), "%s/%s", sshd.dir, formats[i][1]);
		accepted(&o);
	}
	test_write_file(sshd.authorized_keys, old, 0600);
	free(old);
}

static void agent_signs(void **state)
{
	char sock[256];
	snprintf(sock, sizeof(sock), "%s/agent", sshd.dir);
	const char *const argv[] = {"ssh-agent", "-D", "-a", sock, NULL};
	struct fs_child agent;
	struct fs_errbuf e;
	assert_int_equal(fs_child_start(&agent, argv, NULL, false, true, &e), FS_OK);
	int64_t until = fs_deadline_ms(10000);
	while (access(sock, F_OK) && fs_now() < until)
		poll(NULL, 0, 2);
	setenv("SSH_AUTH_SOCK", sock, 1);
	struct fs_ssh_opts o = opts_for(&sshd, "true");
	o.identity = NULL;
	char config[256];
	snprintf(config, sizeof(config), "%s/only_agent", sshd.dir);
	test_write_file(config, "IdentityFile none\n", 0600);
	o.config_file = config;
	refused(&o, FS_EAUTH, "ssh-keygen -t ed25519"); /* an empty agent */

	/* ssh-add refuses nothing here: the key is 0600 */
	const char *const add[] = {"ssh-add", "-q", sshd.identity, NULL};
	assert_int_equal(test_run(add), 0);
	accepted(&o);

	/* a locked file is fine when the agent holds the key */
	char path[256];
	snprintf(path, sizeof(path), "%s/id_locked", sshd.dir);
	const char *const cp[] = {"cp", sshd.identity, path, NULL};
	assert_int_equal(test_run(cp), 0);
	const char *const lock[] = {"ssh-keygen", "-q", "-p", "-N", "secret", "-f", path, NULL};
	assert_int_equal(test_run(lock), 0);
	o.identity = path;
	accepted(&o);

	/* a key that the agent holds and does not sign with, since nobody is there to be asked: the next
	 * one's turn */
	char pub[260], *old = test_read_file(sshd.authorized_keys), text[16384];
	snprintf(path, sizeof(path), "%s/id_asks", sshd.dir);
	const char *const gen[] = {"ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", path, NULL};
	const char *const drop[] = {"ssh-add", "-q", "-D", NULL};
	const char *const ask[] = {"ssh-add", "-q", "-c", path, NULL};
	assert_int_equal(test_run(gen), 0);
	snprintf(pub, sizeof(pub), "%s.pub", path);
	char *line = test_read_file(pub);
	snprintf(text, sizeof(text), "%s%s", old, line);
	test_write_file(sshd.authorized_keys, text, 0600);
	assert_int_equal(test_run(drop), 0);
	assert_int_equal(test_run(ask), 0);
	test_write_file(config, "", 0600);
	o.identity = sshd.identity;
	accepted(&o);
	test_write_file(sshd.authorized_keys, old, 0600);
	free(line);
	free(old);

	unsetenv("SSH_AUTH_SOCK");
	fs_child_end(&agent, 1000);
}

/* An agent that takes the request and says nothing must not hold a connection past its deadline. */
static void silent_agent_meets_the_deadline(void **state)
{
	char config[256], text[512];
	int pair[2]; /* a listening unix socket of our own plays the agent */
	pair[0] = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	struct {
		unsigned short family;
		char path[108];
	} un = {AF_UNIX, ""};
	snprintf(un.path, sizeof(un.path), "%s/mute", sshd.dir);
	assert_int_equal(bind(pair[0], (struct sockaddr *)&un, sizeof(un)), 0);
	assert_int_equal(listen(pair[0], 4), 0);
	snprintf(config, sizeof(config), "%s/mute_config", sshd.dir);
	snprintf(text, sizeof(text), "IdentityAgent %s\n", un.path);
	test_write_file(config, text, 0600);
	struct fs_ssh_opts o = opts_for(&sshd, "true");
	o.config_file = config;
	struct fs_ssh *s = NULL;
	struct fs_errbuf e;
	assert_int_equal(fs_ssh_connect(&o, fs_deadline_ms(300), -1, NULL, NULL, &s, &e), FS_ETIMEOUT);
	close(pair[0]);
}

static void rsa_keys_are_explained_or_work(void **state)
{
	char path[256], pub[260], text[16384];
	snprintf(path, sizeof(path), "%s/key_rsa", sshd.dir);
	const char *const gen[] = {"ssh-keygen", "-q", "-t", "rsa", "-b", "2048", "-N", "", "-f", path, NULL};
	assert_int_equal(test_run(gen), 0);
	snprintf(pub, sizeof(pub), "%s.pub", path);
	char *old = test_read_file(sshd.authorized_keys), *key = test_read_file(pub);
	snprintf(text, sizeof(text), "%s%s", old, key);
	test_write_file(sshd.authorized_keys, text, 0600);
	struct fs_ssh_opts o = opts_for(&sshd, "true");
	o.identity = path;
	struct fs_ssh *s = NULL;
	struct fs_errbuf e;
	if (dial(&o, &s, &e) == FS_OK)
		fs_ssh_close(s); /* libssh2 1.11 and later */
	else
		assert_non_null(strstr(e.text, "ssh-keygen -t ed25519"));
	test_write_file(sshd.authorized_keys, old, 0600);
	free(old);
	free(key);
}

/* ---- deadlines and cancel ---- */

static int mute_listener(int *port)
{
	struct sockaddr_in in = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	socklen_t n = sizeof(in);
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	assert_int_equal(bind(fd, (struct sockaddr *)&in, sizeof(in)), 0);
	assert_int_equal(listen(fd, 8), 0);
	assert_int_equal(getsockname(fd, (struct sockaddr *)&in, &n), 0);
	*port = ntohs(in.sin_port);
	return fd;
}

static bool flag_is_set(void *arg)
{
	return atomic_load((atomic_bool *)arg);
}

struct firing {
	atomic_bool flag;
	int wake, listener;
};

/* Fires when the connection has been made, that is in the middle of the handshake. */
static void *fire_when_connected(void *arg)
{
	struct firing *f = arg;
	int fd = accept(f->listener, NULL, NULL);
	atomic_store(&f->flag, true);
	fs_wake(f->wake);
	return (void *)(intptr_t)fd;
}

static void cancel_ends_a_connect(void **state)
{
	struct firing f = {.wake = fs_wake_open()};
	int port;
	f.listener = mute_listener(&port);
	pthread_t t;
	struct fs_errbuf e;
	assert_int_equal(fs_thread_start(&t, "fire", fire_when_connected, &f, &e), FS_OK);
	struct fs_ssh_opts o = opts_for(&sshd, "true");
	o.host = "127.0.0.1";
	o.port = port;
	struct fs_ssh *s = NULL;
	assert_int_equal(fs_ssh_connect(&o, FS_NEVER, f.wake, flag_is_set, &f.flag, &s, &e), FS_ECANCELLED);
	void *fd;
	pthread_join(t, &fd);
	close((int)(intptr_t)fd);
	close(f.listener);
	close(f.wake);
}

/* An agent that holds the key, and asks its user before it signs: the request is the second one. */
struct asking_agent {
	struct firing firing;
	uint8_t *blob;
	size_t n;
};

static void *ask_the_user(void *arg)
{
	struct asking_agent *a = arg;
	uint8_t request[5], answer[512] = {0, 0, 0, 0, 12, 0, 0, 0, 1};
	size_t n = 9;
	int fd = accept(a->firing.listener, NULL, NULL);
	assert_int_equal(recv(fd, request, sizeof(request), MSG_WAITALL), sizeof(request));
	answer[n + 3] = (uint8_t)a->n;
	memcpy(answer + n + 4, a->blob, a->n);
	n += 4 + a->n + 4; /* its comment is empty */
	answer[3] = (uint8_t)(n - 4);
	assert_int_equal(send(fd, answer, n, MSG_NOSIGNAL), n);
	assert_int_equal(recv(fd, request, sizeof(request), MSG_WAITALL), sizeof(request));
	atomic_store(&a->firing.flag, true);
	fs_wake(a->firing.wake);
	return (void *)(intptr_t)fd;
}

static void cancel_ends_the_wait_for_an_agent(void **state)
{
	struct asking_agent a = {.firing.wake = fs_wake_open()};
	struct sockaddr_un un = {.sun_family = AF_UNIX};
	char config[256], text[512], *line = test_read_file(sshd.authorized_keys);
	char *key = strchr(line, ' ') + 1;
	a.blob = fs_ssh_base64(key, strcspn(key, " \n"), &a.n);
	assert_true(a.blob && a.n < 200);
	a.firing.listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	snprintf(un.sun_path, sizeof(un.sun_path), "%s/asks", sshd.dir);
	assert_int_equal(bind(a.firing.listener, (struct sockaddr *)&un, sizeof(un)), 0);
	assert_int_equal(listen(a.firing.listener, 1), 0);
	snprintf(config, sizeof(config), "%s/asks_config", sshd.dir);
	snprintf(text, sizeof(text), "IdentityAgent %s\nIdentityFile none\n", un.sun_path);
	test_write_file(config, text, 0600);
	struct fs_ssh_opts o = opts_for(&sshd, "true");
	o.config_file = config;
	o.identity = NULL;
	struct fs_ssh *s = NULL;
	struct fs_errbuf e;
	pthread_t t;
	void *fd;
	assert_int_equal(fs_thread_start(&t, "agent", ask_the_user, &a, &e), FS_OK);
	int rc =
	        fs_ssh_connect(&o, fs_deadline_ms(20000), a.firing.wake, flag_is_set, &a.firing.flag, &s, &e);
	assert_int_equal(rc, FS_ECANCELLED);
	pthread_join(t, &fd);
	close((int)(intptr_t)fd);
	close(a.firing.listener);
	close(a.firing.wake);
	free(a.blob);
	free(line);
}

static void silent_server_meets_the_deadline(void **state)
{
	int port, fd = mute_listener(&port);
	struct fs_ssh_opts o = opts_for(&sshd, "true");
	o.host = "127.0.0.1";
	o.port = port;
	struct fs_ssh *s = NULL;
	struct fs_errbuf e;
	assert_int_equal(fs_ssh_connect(&o, fs_deadline_ms(200), -1, NULL, NULL, &s, &e), FS_ETIMEOUT);
	assert_non_null(strstr(e.text, "did not answer in time"));
	close(fd);
}

static void dead_addresses_are_named(void **state)
{
	struct fs_ssh_opts o = opts_for(&sshd, "true");
	o.host = "127.0.0.1";
	o.port = test_free_port();
	refused(&o, FS_EUNAVAILABLE, "nothing listens on 127.0.0.1");
	o.host = "no-such-name.invalid"; /* RFC 6761; where no name server answers, the deadline ends it */
	struct fs_ssh *s = NULL;
	struct fs_errbuf e;
	int rc = fs_ssh_connect(&o, fs_deadline_ms(1500), -1, NULL, NULL, &s, &e);
	assert_true(rc == FS_EUNAVAILABLE || rc == FS_ETIMEOUT);
	assert_non_null(strstr(e.text, "name no-such-name.invalid"));
}

static void hosts_without_common_ciphers_are_explained(void **state)
{
	struct test_sshd other;
	struct test_sshd_opts oo = {.extra = "Ciphers chacha20-poly1305@openssh.com"};
	test_sshd_init(&other, &oo);
	struct fs_ssh_opts o = opts_for(&other, "true");
	refused(&o, FS_EUNAVAILABLE, "aes128-ctr");
	test_sshd_finish(&other);
}

/* libssh2 would take them. */
static void hosts_that_offer_only_weak_methods_are_refused(void **state)
{
	static const char *const weak[] = {"KexAlgorithms diffie-hellman-group14-sha1", "MACs hmac-sha1",
	        "KexAlgorithms diffie-hellman-group1-sha1"};
	for (size_t i = 0; i < FS_ARRAY_LEN(weak); i++) {
		struct test_sshd other;
		struct test_sshd_opts oo = {.extra = weak[i]};
		test_sshd_init(&other, &oo);
		struct fs_ssh_opts o = opts_for(&other, "true");
		refused(&o, FS_EUNAVAILABLE, "share no key exchange");
		test_sshd_finish(&other);
	}
}

static void lost_connection_is_an_error(void **state)
{
	struct test_sshd other;
	test_sshd_init(&other, NULL);
	struct fs_ssh_opts o = opts_for(&other, "cat");
	struct fs_ssh *s = NULL;
	struct fs_errbuf e;
	assert_int_equal(dial(&o, &s, &e), FS_OK);
	assert_true(test_sshd_signal_sessions(&other, SIGKILL) > 0);
	char buf[16];
	e.text[0] = '\0';
	assert_int_equal(read_some(s, buf, sizeof(buf), &e), 0);
	assert_true(*e.text != '\0');
	fs_ssh_close(s);
	test_sshd_finish(&other);
}

static int setup(void **state)
{
	struct fs_errbuf e;
	unsetenv("SSH_AUTH_SOCK");
	assert_int_equal(fs_ssh_init(&e), FS_OK);
	test_sshd_init(&sshd, NULL);
	return 0;
}

static int teardown(void **state)
{
	test_sshd_finish(&sshd);
	return 0;
}

int main(void)
{
	const struct CMUnitTest tests[] = {
	        cmocka_unit_test(echoes_bytes),
	        cmocka_unit_test(long_commands_are_executed_whole),
	        cmocka_unit_test(full_windows_survive_new_keys),
	        cmocka_unit_test(tells_how_the_program_ended),
	        cmocka_unit_test(reads_stderr_apart),
	        cmocka_unit_test(missing_command_is_named),
	        cmocka_unit_test(alias_of_ssh_config_is_dialled),
	        cmocka_unit_test(six_known_hosts_forms_match),
	        cmocka_unit_test(wrong_host_keys_are_refused),
	        cmocka_unit_test(unusable_keys_are_explained),
	        cmocka_unit_test(ecdsa_and_pem_keys_work),
	        cmocka_unit_test(agent_signs),
	        cmocka_unit_test(silent_agent_meets_the_deadline),
	        cmocka_unit_test(rsa_keys_are_explained_or_work),
	        cmocka_unit_test(cancel_ends_a_connect),
	        cmocka_unit_test(cancel_ends_the_wait_for_an_agent),
	        cmocka_unit_test(silent_server_meets_the_deadline),
	        cmocka_unit_test(dead_addresses_are_named),
	        cmocka_unit_test(hosts_without_common_ciphers_are_explained),
	        cmocka_unit_test(hosts_that_offer_only_weak_methods_are_refused),
	        cmocka_unit_test(lost_connection_is_an_error),
	};
	if (!test_sshd_available())
		return 77; /* skipped */
	return cmocka_run_group_tests(tests, setup, teardown);
}
