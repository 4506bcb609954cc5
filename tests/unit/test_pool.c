/*
 * The pool's arithmetic and the wake-up packet: which host gets a picture, how many go ahead, who gives to
 * whom, pauses, a machine's sleep, and what crosses the network for a host that sleeps.
 */
#include "server/vision/pool.h"
#include "server/vision/wol.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <arpa/inet.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define NOW (1000 * FS_SEC)

/* n hosts that are up, each with a speed of ms a row (0 = not known). Pictures have 100 rows. */
static struct fs_pool pool_of(size_t n, const double *row_ms)
{
	struct fs_pool p = {.n = n, .rows = 100, .row_bytes = 4096, .now = NOW};
	for (size_t i = 0; i < n; i++) {
		p.hosts[i].up = true;
		if (row_ms[i] > 0)
			p.hosts[i].speed = (struct fs_pool_speed){row_ms[i], 100 * row_ms[i], 0, NOW};
	}
	return p;
}

/* Gives n pictures to hosts as they are chosen. */
static void deal(struct fs_pool *p, int n)
{
	for (int k = 0; k < n; k++) {
		int i = fs_pool_choose(p, 1000, 0);
		assert_true(i >= 0);
		p->hosts[i].queued++;
	}
}

static void alike_hosts_get_alike(void **state)
{
	struct fs_pool p = pool_of(4, (double[]){0, 0, 0, 0});
	deal(&p, 16);
	for (size_t i = 0; i < 4; i++)
		assert_int_equal(p.hosts[i].queued, 4);
	p = pool_of(4, (double[]){1, 1, 1, 1});
	deal(&p, 8);
	for (size_t i = 0; i < 4; i++)
		assert_int_equal(p.hosts[i].queued, 2);
}

static void faster_hosts_get_more(void **state)
{
	struct fs_pool p = pool_of(2, (double[]){1, 4});
	deal(&p, 10);
	assert_int_equal(p.hosts[0].queued, 8);
	assert_int_equal(p.hosts[1].queued, 2);
	/* so much slower that it is not worth a wait */
	p = pool_of(2, (double[]){1, 50});
	deal(&p, 10);
	assert_int_equal(p.hosts[1].queued, 0);
}

static void an_unknown_host_gets_one_first(void **state)
{
	struct fs_pool p = pool_of(2, (double[]){1, 0});
	p.hosts[1].rtt_ms = 30; /* which would count against it */
	assert_int_equal(fs_pool_choose(&p, 1000, 0), 1);
	p.hosts[1].queued = 1;
	assert_int_equal(fs_pool_choose(&p, 1000, 0), 0);
	/* not when what it was given failed */
	p.hosts[1].queued = 0;
	p.hosts[1].on_trial = true;
	assert_int_equal(fs_pool_choose(&p, 1000, 0), 0);
}

static void routes_count(void **state)
{
	struct fs_pool p = pool_of(2, (double[]){1, 1.2});
	assert_int_equal(fs_pool_choose(&p, 100000, 0), 0);
	/* 100 KB up and 400 KB down at 1 MB/s are worth more than 20 ms of encoding */
	p.hosts[0].speed.byte_ms = 1e-3;
	p.hosts[1].speed.byte_ms = 1e-5;
	assert_int_equal(fs_pool_choose(&p, 100000, 0), 1);
	p.hosts[0].speed.byte_ms = p.hosts[1].speed.byte_ms = 1e-5;
	p.hosts[0].rtt_ms = 300;
	assert_int_equal(fs_pool_choose(&p, 100000, 0), 1);
	/* what lies in front of it has to be moved first */
	p.hosts[0].rtt_ms = 0;
	p.hosts[0].unsent = 64 << 20;
	assert_int_equal(fs_pool_choose(&p, 100000, 0), 1);
}

static void who_can_not_is_left_out(void **state)
{
	struct fs_pool p = pool_of(3, (double[]){1, 2, 3});
	p.hosts[0].max_bytes = 999;
	assert_int_equal(fs_pool_choose(&p, 999, 0), 0);
	assert_int_equal(fs_pool_choose(&p, 1000, 0), 1);
	assert_int_equal(fs_pool_choose(&p, 1000, 1u << 1), 2);
	assert_int_equal(fs_pool_choose(&p, 1000, 1u << 1 | 1u << 2), -1);
	p.hosts[1].up = p.hosts[2].up = false;
	assert_int_equal(fs_pool_choose(&p, 1000, 0), -1);
}

static void benched_hosts_wait_unless_there_is_no_other(void **state)
{
	struct fs_pool p = pool_of(2, (double[]){1, 9});
	p.hosts[0].benched_until = NOW + FS_SEC;
	p.hosts[0].on_trial = true;
	assert_int_equal(fs_pool_choose(&p, 1000, 0), 1);
	assert_int_equal(fs_pool_choose(&p, 1000, 1u << 1), 0);
	p.now = NOW + FS_SEC;
	assert_int_equal(fs_pool_choose(&p, 1000, 0), 0);
	assert_int_equal(fs_pool_ahead(&p, 0, 1000), 1); /* on trial */
}

static void old_measurements_fade(void **state)
{
	struct fs_pool p = pool_of(2, (double[]){1, 10});
	double before = fs_pool_expect_ms(&p, 1, 0);
	assert_true(before > 990);
	p.now += 600 * FS_SEC; /* half of what it was slower */
	double later = fs_pool_expect_ms(&p, 1, 0);
	assert_true(later > 540 && later < 560);
	p.now += 36000 * FS_SEC;
	assert_true(fs_pool_expect_ms(&p, 1, 0) < 101);
}

static void means_move_slowly(void **state)
{
	struct fs_pool_speed s = {0};
	fs_pool_saw_encode(&s, 100, 50, 1);
	assert_true(s.row_ms > 1.99 && s.row_ms < 2.01 && s.picture_ms > 99 && s.at == 1);
	fs_pool_saw_encode(&s, 1e9, 50, 2); /* counts as four times the mean */
	assert_true(s.row_ms > 3.1 && s.row_ms < 3.3);
	fs_pool_saw_encode(&s, 0, 50, 3); /* tells nothing */
	fs_pool_saw_encode(&s, 5, 0, 3);
	assert_int_equal(s.at, 2);
	for (int i = 0; i < 60; i++)
		fs_pool_saw_encode(&s, 50, 50, 4);
	assert_true(s.row_ms > 0.99 && s.row_ms < 1.01);
	fs_pool_saw_transfer(&s, 10, 1000); /* too few to tell */
	assert_true(s.byte_ms <= 0);
	fs_pool_saw_transfer(&s, 10, 1000000);
	assert_true(s.byte_ms > 0.9e-5 && s.byte_ms < 1.1e-5);
}

static void so_many_go_ahead(void **state)
{
	struct fs_pool p = pool_of(2, (double[]){0, 0.1}); /* 10 ms a picture */
	assert_int_equal(fs_pool_ahead(&p, 0, 1000), 2);   /* nothing is known */
	assert_int_equal(fs_pool_ahead(&p, 1, 1000), 2);
	p.hosts[1].rtt_ms = 35;
	assert_int_equal(fs_pool_ahead(&p, 1, 1000), 5);
	p.hosts[1].rtt_ms = 3500;
	assert_int_equal(fs_pool_ahead(&p, 1, 1000), FS_POOL_MAX_AHEAD);
}

static void idle_hosts_take_over(void **state)
{
	struct fs_pool p = pool_of(3, (double[]){1, 1, 2});
	p.hosts[0].queued = 4;
	p.hosts[1].queued = 6;
	assert_int_equal(fs_pool_giver(&p, 2, 0, 3), 1); /* the longest queue */
	assert_int_equal(fs_pool_giver(&p, 2, 0, 1), 0);
	assert_int_equal(fs_pool_giver(&p, 2, 0, 0), -1);
	p.hosts[2].queued = 2; /* has enough */
	assert_int_equal(fs_pool_giver(&p, 2, 0, 3), -1);
	p.hosts[2].queued = 0;
	p.hosts[0].queued = p.hosts[1].queued = 2; /* there as soon as here */
	assert_int_equal(fs_pool_giver(&p, 2, 0, 3), -1);
	p.hosts[1].queued = 6;
	p.hosts[2].benched_until = NOW + 1;
	assert_int_equal(fs_pool_giver(&p, 2, 0, 3), -1);
}

static void lateness_needs_a_measure(void **state)
{
	struct fs_pool p = pool_of(2, (double[]){1, 0});
	p.hosts[0].sent = 3;
	assert_true(fs_pool_usual_ms(&p, 0, 0) > 299 && fs_pool_usual_ms(&p, 0, 0) < 301);
	assert_true(fs_pool_usual_ms(&p, 1, 0) <= 0);
}

static void pauses_grow_to_their_limit(void **state)
{
	assert_int_equal(fs_pool_backoff_ms(1, 1000, 60000, 0x8000), 1000);
	assert_int_equal(fs_pool_backoff_ms(2, 1000, 60000, 0x8000), 2000);
	assert_int_equal(fs_pool_backoff_ms(3, 1000, 60000, 0x8000), 4000);
	assert_int_equal(fs_pool_backoff_ms(1000, 1000, 60000, 0x8000), 60000);
	assert_int_equal(fs_pool_backoff_ms(1, 1000, 60000, 0), 800);
	assert_true(fs_pool_backoff_ms(1, 1000, 60000, 0xffff) >= 1199);
}

static void a_sleep_is_told_from_a_wait(void **state)
{
	assert_false(fs_pool_slept(5, 100, 5 + 3600 * FS_SEC, 100 + 3600 * FS_SEC)); /* a long pause */
	assert_true(fs_pool_slept(5, 100, 5 + FS_SEC, 100 + 61 * FS_SEC));
}

/* ---- wake-on-LAN ---- */

static void addresses_are_parsed(void **state)
{
	static const uint8_t mac[6] = {0x01, 0x23, 0x45, 0x67, 0x89, 0xab};
	static const char *const good[] = {"01:23:45:67:89:ab", "01-23-45-67-89-AB", "0123456789ab"};
	static const char *const bad[] = {"", "01:23:45:67:89", "01:23:45:67:89:ab:cd", "01:23-45:67:89:ab",
	        "01:23:45:67:89:ag", "1:23:45:67:89:ab", "01:23:45:67:89:a"};
	static const char *const bad_to[] = {"", "gpu-box", "1.2.3.4:", "1.2.3.4:0", "1.2.3.4:70000",
	        "1.2.3.4:x", "[::1", "[::1]x", "1.2.3.4.5"};
	struct fs_wol w;
	struct fs_errbuf e;
	for (size_t i = 0; i < FS_ARRAY_LEN(good); i++) {
		assert_int_equal(fs_wol_parse(good[i], NULL, &w, &e), FS_OK);
		assert_memory_equal(w.mac, mac, 6);
	}
	const struct sockaddr_in *to = (const struct sockaddr_in *)&w.to;
	assert_int_equal(to->sin_addr.s_addr, INADDR_BROADCAST);
	assert_int_equal(ntohs(to->sin_port), 9);
	for (size_t i = 0; i < FS_ARRAY_LEN(bad); i++)
		if (fs_wol_parse(bad[i], NULL, &w, &e) != FS_EINVAL || !strstr(e.text, "is no MAC address"))
			fail_msg("\"%s\" was taken", bad[i]);
	for (size_t i = 0; i < FS_ARRAY_LEN(bad_to); i++)
		if (fs_wol_parse(good[0], bad_to[i], &w, &e) != FS_EINVAL || !strstr(e.text, "broadcast"))
			fail_msg("\"%s\" was taken", bad_to[i]);
	assert_int_equal(fs_wol_parse(good[0], "192.168.1.255:7", &w, &e), FS_OK);
	assert_int_equal(ntohs(to->sin_port), 7);
	assert_int_equal(fs_wol_parse(good[0], "[::1]:7", &w, &e), FS_OK);
	assert_int_equal(w.to.ss_family, AF_INET6);
	assert_int_equal(fs_wol_parse(good[0], "::1", &w, &e), FS_OK);
	assert_int_equal(ntohs(((const struct sockaddr_in6 *)&w.to)->sin6_port), 9);
}

static void a_burst_is_three_magic_packets(void **state)
{
	struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	socklen_t n = sizeof(at);
	int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	assert_int_equal(bind(fd, (struct sockaddr *)&at, n), 0);
	assert_int_equal(getsockname(fd, (struct sockaddr *)&at, &n), 0);
	char to[32];
	struct fs_wol w;
	struct fs_errbuf e;
	snprintf(to, sizeof(to), "127.0.0.1:%d", ntohs(at.sin_port));
	assert_int_equal(fs_wol_parse("01:23:45:67:89:ab", to, &w, &e), FS_OK);
	assert_int_equal(fs_wol_send(&w, &e), FS_OK);
	for (int i = 0; i < 3; i++) {
		uint8_t got[200];
		struct pollfd p = {.fd = fd, .events = POLLIN};
		assert_int_equal(poll(&p, 1, 20000), 1);
		assert_int_equal(recv(fd, got, sizeof(got), 0), 102);
		for (size_t k = 0; k < 102; k++)
			assert_int_equal(got[k], k < 6 ? 0xff : w.mac[k % 6]);
	}
	struct pollfd p = {.fd = fd, .events = POLLIN};
	assert_int_equal(poll(&p, 1, 0), 0);
	close(fd);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
	        cmocka_unit_test(alike_hosts_get_alike),
	        cmocka_unit_test(faster_hosts_get_more),
	        cmocka_unit_test(an_unknown_host_gets_one_first),
	        cmocka_unit_test(routes_count),
	        cmocka_unit_test(who_can_not_is_left_out),
	        cmocka_unit_test(benched_hosts_wait_unless_there_is_no_other),
	        cmocka_unit_test(old_measurements_fade),
	        cmocka_unit_test(means_move_slowly),
	        cmocka_unit_test(so_many_go_ahead),
	        cmocka_unit_test(idle_hosts_take_over),
	        cmocka_unit_test(lateness_needs_a_measure),
	        cmocka_unit_test(pauses_grow_to_their_limit),
	        cmocka_unit_test(a_sleep_is_told_from_a_wait),
	        cmocka_unit_test(addresses_are_parsed),
	        cmocka_unit_test(a_burst_is_three_magic_packets),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}
