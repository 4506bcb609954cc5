/* What a connection does while its socket takes no more: a relay before a real sshd holds back what we send,
 * and the socket's buffer is made so small that it is full. What the host sends is read on, beyond the point
 * where its window has to be widened; nobody is woken for nothing; no byte is lost once the way is free; and
 * a connection that is closed in this state leaves nothing, which is for the leak sanitizer to say. */
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
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define DOWN ((size_t)1500000) /* less than the window, and far beyond where it is widened */
#define UP ((size_t)300000)

struct relay {
	int listener, port, host_port;
	atomic_bool held; /* what the client sends stays where it is */
	atomic_bool obeyed;
	pthread_t thread;
};

static struct test_sshd sshd;

static struct sockaddr_in loopback(int port)
{
	return (struct sockaddr_in){.sin_family = AF_INET,
	        .sin_port = htons((uint16_t)port),
	        .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
}

static bool pass_on(int from, int to)
{
	char buf[16384];
	ssize_t n = recv(from, buf, sizeof(buf), 0);
	for (ssize_t at = 0, w; at < n; at += w)
		if ((w = send(to, buf + at, (size_t)(n - at), MSG_NOSIGNAL)) <= 0)
			return false;
	return n > 0;
}

/* One connection, until either end is gone. */
static void *run_relay(void *arg)
{
	struct relay *r = arg;
	struct sockaddr_in a = loopback(r->host_port);
	int client = accept4(r->listener, NULL, NULL, SOCK_CLOEXEC);
	int host = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	assert_int_equal(connect(host, (struct sockaddr *)&a, sizeof(a)), 0);
	for (bool open = true; open;) {
		bool held = atomic_load(&r->held);
		atomic_store(&r->obeyed, held);
		struct pollfd pf[2] = {{client, held ? POLLRDHUP : POLLIN, 0}, {host, POLLIN, 0}};
		poll(pf, 2, 5);
		open = !pf[0].revents || (!held && pass_on(client, host));
		open = open && (!pf[1].revents || pass_on(host, client));
	}
	close(client);
	close(host);
	return NULL;
}

static void begin(struct relay *r, struct fs_ssh **s)
{
	char config[128], command[64];
	struct fs_errbuf e = {""};
	struct sockaddr_in a;
	int small = 1;
	*r = (struct relay){.host_port = sshd.port, .port = test_free_port()};
	a = loopback(r->port);
	r->listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	setsockopt(r->listener, SOL_SOCKET, SO_RCVBUF, &small, sizeof(small));
	assert_int_equal(bind(r->listener, (struct sockaddr *)&a, sizeof(a)), 0);
	assert_int_equal(listen(r->listener, 1), 0);
	snprintf(config, sizeof(config), "HostKeyAlias [127.0.0.1]:%d\n", sshd.port);
	test_write_file(sshd.ssh_config, config, 0600);
	snprintf(command, sizeof(command), "head -c %zu /dev/zero; cat", DOWN);
	struct fs_ssh_opts o = {.host = "127.0.0.1",
	        .port = r->port,
	        .identity = sshd.identity,
	        .config_file = sshd.ssh_config,
	        .known_hosts = sshd.known_hosts,
	        .command = command};
	assert_int_equal(fs_thread_start(&r->thread, "relay", run_relay, r, &e), FS_OK);
	if (fs_ssh_connect(&o, fs_deadline_ms(60000), -1, NULL, NULL, s, &e))
		fail_msg("%s", e.text);
}

static void end(struct relay *r, struct fs_ssh *s)
{
	fs_ssh_close(s);
	atomic_store(&r->held, false); /* or the relay would not see it */
	pthread_join(r->thread, NULL);
	close(r->listener);
}

/* From now on the client's socket takes what it has taken and nothing else. */
static void fill(struct relay *r, struct fs_ssh *s, const uint8_t *up, size_t *sent)
{
	struct fs_errbuf e;
	ssize_t n;
	int small = 1, found = -1;
	for (int fd = 3; fd < 1024; fd++) {
		struct sockaddr_in peer;
		socklen_t len = sizeof(peer);
		if (getpeername(fd, (struct sockaddr *)&peer, &len) == 0 && peer.sin_family == AF_INET &&
		        ntohs(peer.sin_port) == r->port)
			found = fd;
	}
	assert_true(found >= 0);
	atomic_store(&r->held, true);
	while (!atomic_load(&r->obeyed))
		poll(NULL, 0, 1);
	while (*sent < 100000 && (n = fs_ssh_write(s, up + *sent, UP - *sent, &e)) > 0)
		*sent += (size_t)n;
	assert_int_equal(setsockopt(found, SOL_SOCKET, SO_SNDBUF, &small, sizeof(small)), 0);
	while ((n = fs_ssh_write(s, up + *sent, UP - *sent, &e)) > 0)
		*sent += (size_t)n;
	assert_int_equal(n, 0);
	assert_true(*sent < UP); /* which the host's window would hold */
}

static void read_up_to(struct fs_ssh *s, uint8_t *in, size_t *got, size_t want)
{
	struct fs_errbuf e;
	int64_t until = fs_deadline_ms(60000);
	while (*got < want && fs_now() < until) {
		ssize_t n = fs_ssh_read(s, in + *got, want - *got, &e);
		if (n < 0)
			fail_msg("%s", e.text);
		*got += (size_t)n;
		if (n == 0)
			assert_int_equal(fs_ssh_wait(s, false, -1, until), FS_OK);
	}
	assert_int_equal(*got, want);
}

static void what_comes_is_read_on(void **state)
{
	struct relay r;
	struct fs_ssh *s;
	struct fs_errbuf e;
	uint8_t *up = malloc(UP), *in = malloc(DOWN + UP);
	size_t sent = 0, got = 0;
	for (size_t i = 0; i < UP; i++)
		up[i] = (uint8_t)(i * 2654435761u >> 13);
	begin(&r, &s);
	fill(&r, s, up, &sent);
	read_up_to(s, in, &got, DOWN);

	/* nothing can be sent, and nothing comes: that is waited for, not asked for again and again */
	int64_t until = fs_deadline_ms(500);
	int turns = 0;
	for (; fs_now() < until; turns++) {
		ssize_t n = fs_ssh_write(s, up + sent, UP - sent, &e); /* a late acknowledgement makes room */
		assert_true(n >= 0);
		sent += (size_t)n;
		assert_int_equal(fs_ssh_read(s, in + got, UP, &e), 0);
		assert_int_equal(fs_ssh_wait(s, true, -1, until), FS_OK);
	}
	assert_true(turns < 50 && sent < UP);

	atomic_store(&r.held, false);
	until = fs_deadline_ms(60000);
	while (sent < UP && fs_now() < until) {
		ssize_t n = fs_ssh_write(s, up + sent, UP - sent, &e);
		assert_true(n >= 0);
		sent += (size_t)n;
		if (n == 0)
			assert_int_equal(fs_ssh_wait(s, true, -1, fs_deadline_ms(20)), FS_OK);
	}
	assert_int_equal(sent, UP);
	struct fs_patience p = {.deadline = fs_deadline_ms(60000), .wake_fd = -1};
	assert_int_equal(fs_ssh_send_eof(s, &p, &e), FS_OK);
	read_up_to(s, in, &got, DOWN + UP);
	assert_memory_equal(in + DOWN, up, UP);
	end(&r, s);
	free(up);
	free(in);
}

/* Its host may have vanished in the middle of a picture. */
static void closing_leaves_nothing(void **state)
{
	struct relay r;
	struct fs_ssh *s;
	uint8_t *up = calloc(1, UP), *in = malloc(DOWN);
	for (int reads = 0; reads < 2; reads++) {
		size_t sent = 0, got = 0;
		begin(&r, &s);
		fill(&r, s, up, &sent);
		if (reads)
			read_up_to(s, in, &got, DOWN);
		end(&r, s);
	}
	free(up);
	free(in);
}

static int start(void **state)
{
	test_sshd_init(&sshd, NULL);
	return 0;
}

static int stop(void **state)
{
	test_sshd_finish(&sshd);
	return 0;
}

int main(void)
{
	const struct CMUnitTest tests[] = {
	        cmocka_unit_test(what_comes_is_read_on),
	        cmocka_unit_test(closing_leaves_nothing),
	};
	struct fs_errbuf e;
	unsetenv("SSH_AUTH_SOCK");
	if (!test_sshd_available())
		return 77; /* skipped */
	return fs_ssh_init(&e) ? 1 : cmocka_run_group_tests(tests, start, stop);
}
