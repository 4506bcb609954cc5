/* Connections that are given up in the middle of anything: a relay before a real sshd holds back what the
 * host sends after so many bytes, in every place from the greeting over the exchange of keys, by each method,
 * to the command's output and the next keys. That nothing of a session stays in memory is for the leak
 * sanitizer to say, at the end of this program. */
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
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

struct relay {
	int listener, port, host_port;
	int wake_fd;      /* written when over turns true */
	atomic_bool over; /* no more will come: held back, or the host has ended */
	int units;        /* of what the host sends in clear pass: its greeting, then packets */
	size_t more;      /* bytes that pass after them */
	pthread_t thread;
};

/* What the host sends in clear, byte by byte. */
struct clear {
	bool greeted;
	size_t n_head, left; /* of a packet: bytes of its length that are there, bytes that follow */
};

/* true for the last byte of a unit. */
static bool ends_unit(struct clear *c, uint8_t byte)
{
	if (!c->greeted)
		return (c->greeted = byte == '\n');
	if (c->n_head < 4) {
		c->left = c->left << 8 | byte;
		c->n_head++;
		return false;
	}
	if (--c->left)
		return false;
	c->n_head = 0;
	return true;
}

/* How many of n bytes pass. */
static size_t passing(struct clear *c, int *units, size_t *more, const uint8_t *p, size_t n)
{
	size_t i = 0;
	while (i<n && * units> 0)
		*units -= ends_unit(c, p[i++]);
	size_t rest = FS_MIN(n - i, *more);
	*more -= rest;
	return i + rest;
}

static int loopback(int port, bool listening)
{
	struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
	a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	assert_true(fd >= 0);
	if (listening)
		assert_int_equal(bind(fd, (struct sockaddr *)&a, sizeof(a)) | listen(fd, 1), 0);
	else
		assert_int_equal(connect(fd, (struct sockaddr *)&a, sizeof(a)), 0);
	return fd;
}

static bool send_all(int fd, const char *p, size_t n)
{
	while (n) {
		ssize_t w = send(fd, p, n, MSG_NOSIGNAL);
		if (w <= 0)
			return false;
		p += w;
		n -= (size_t)w;
	}
	return true;
}

/* One connection, until the client is gone. */
static void *run_relay(void *arg)
{
	struct relay *r = arg;
	struct clear clear = {0};
	int units = r->units;
	size_t more = r->more;
	char buf[16384];
	int client = accept4(r->listener, NULL, NULL, SOCK_CLOEXEC), host = loopback(r->host_port, false);
	struct pollfd pf[2] = {{.fd = client, .events = POLLIN}, {.fd = host, .events = POLLIN}};
	while (poll(pf, 2, -1) > 0) {
		if (pf[0].revents) {
			ssize_t n = recv(client, buf, sizeof(buf), 0);
			if (n <= 0)
				break;
			(void)send_all(host, buf, (size_t)n); /* a host that has ended takes no more */
		}
		if (pf[1].revents) {
			ssize_t n = recv(host, buf, sizeof(buf), 0);
			size_t pass = n > 0 ? passing(&clear, &units, &more, (uint8_t *)buf, (size_t)n) : 0;
			if (!send_all(client, buf, pass))
				break;
			if (n <= 0 || (!units && !more)) {
				pf[1].fd = -1;
				poll(NULL, 0, 10); /* so that the client has most often read what passed */
				atomic_store(&r->over, true);
				assert_int_equal(eventfd_write(r->wake_fd, 1), 0);
			}
		}
	}
	close(client);
	close(host);
	return NULL;
}

static bool over(void *arg)
{
	return atomic_load(&((struct relay *)arg)->over);
}

static void cut_at(struct relay *r, const struct test_sshd *host, int units, size_t more)
{
	struct fs_ssh *s = NULL;
	struct fs_errbuf e = {0};
	char config[128], buf[512];
	r->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	r->units = units;
	r->more = more;
	atomic_store(&r->over, false);
	snprintf(config, sizeof(config), "HostKeyAlias [127.0.0.1]:%d\n", host->port);
	test_write_file(host->ssh_config, config, 0600);
	struct fs_ssh_opts o = {.host = "127.0.0.1",
	        .port = r->port,
	        .identity = host->identity,
	        .config_file = host->ssh_config,
	        .known_hosts = host->known_hosts,
	        .command = "seq 1 5000"};
	int64_t deadline = fs_deadline_ms(60000);
	assert_int_equal(fs_thread_start(&r->thread, "relay", run_relay, r, &e), FS_OK);
	int rc = fs_ssh_connect(&o, deadline, r->wake_fd, over, r, &s, &e);
	if (rc && !over(r))
		fail_msg("%d units and %zu bytes: %s", units, more, e.text);
	while (!rc && !over(r) && fs_now() < deadline && fs_ssh_read(s, buf, sizeof(buf), &e) >= 0)
		assert_int_equal(fs_ssh_wait(s, false, r->wake_fd, deadline), FS_OK);
	fs_ssh_close(s);
	pthread_join(r->thread, NULL);
	close(r->wake_fd);
}

static void nothing_stays(void **state)
{
	static const struct {
		const char *method;
		int clear; /* units of the first exchange: greeting, KEXINIT, the method's, NEWKEYS */
		size_t step;
	} tries[] = {{"curve25519-sha256", 4, 127}, {"ecdh-sha2-nistp256", 4, 331},
	        {"diffie-hellman-group14-sha256", 4, 331}, {"diffie-hellman-group-exchange-sha256", 5, 331}};
	for (size_t i = 0; i < FS_ARRAY_LEN(tries); i++) {
		struct test_sshd host;
		char extra[128];
		snprintf(extra, sizeof(extra), "KexAlgorithms %s\nRekeyLimit 16", tries[i].method);
		test_sshd_init(&host, &(struct test_sshd_opts){.extra = extra});
		struct relay r = {.host_port = host.port, .port = test_free_port()};
		r.listener = loopback(r.port, true);
		for (int units = 0; units < tries[i].clear; units++)
			cut_at(&r, &host, units, 0);
		for (size_t more = 0; more < 4000; more += tries[i].step)
			cut_at(&r, &host, tries[i].clear, more);
		close(r.listener);
		test_sshd_finish(&host);
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
	        cmocka_unit_test(nothing_stays),
	};
	struct fs_errbuf e;
	unsetenv("SSH_AUTH_SOCK");
	if (!test_sshd_available())
		return 77; /* skipped */
	return fs_ssh_init(&e) ? 1 : cmocka_run_group_tests(tests, NULL, NULL);
}
