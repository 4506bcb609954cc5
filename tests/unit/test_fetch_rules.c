/* server/fetch without a network: which addresses are special, the allow-list, what a URL must be. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "server/fetch/internal.h"

#include <arpa/inet.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct fs_errbuf e;

static socklen_t address(const char *text, int port, struct sockaddr_storage *out)
{
	struct sockaddr_in *v4 = (struct sockaddr_in *)out;
	struct sockaddr_in6 *v6 = (struct sockaddr_in6 *)out;
	memset(out, 0, sizeof(*out));
	if (inet_pton(AF_INET, text, &v4->sin_addr) == 1) {
		v4->sin_family = AF_INET;
		v4->sin_port = htons((uint16_t)port);
		return sizeof(*v4);
	}
	assert_int_equal(inet_pton(AF_INET6, text, &v6->sin6_addr), 1);
	v6->sin6_family = AF_INET6;
	v6->sin6_port = htons((uint16_t)port);
	return sizeof(*v6);
}

/* The first and last address of each special block, and their neighbours outside. */
static void special_addresses(void **state)
{
	static const struct {
		const char *text;
		bool special;
	} cases[] = {{"0.0.0.0", true}, {"0.255.255.255", true}, {"1.0.0.0", false}, {"9.255.255.255", false},
	        {"10.0.0.0", true}, {"10.255.255.255", true}, {"11.0.0.0", false}, {"100.63.255.255", false},
	        {"100.64.0.0", true}, {"100.127.255.255", true}, {"100.128.0.0", false},
	        {"126.255.255.255", false}, {"127.0.0.1", true}, {"127.255.255.255", true},
	        {"128.0.0.0", false}, {"169.253.255.255", false}, {"169.254.169.254", true},
	        {"169.255.0.0", false}, {"172.15.255.255", false}, {"172.16.0.0", true},
	        {"172.31.255.255", true}, {"172.32.0.0", false}, {"191.255.255.255", false},
	        {"192.0.0.0", true}, {"192.0.0.255", true}, {"192.0.1.0", false}, {"192.0.2.1", true},
	        {"192.0.3.0", false}, {"192.88.99.1", true}, {"192.88.100.0", false},
	        {"192.167.255.255", false}, {"192.168.0.0", true}, {"192.168.255.255", true},
	        {"192.169.0.0", false}, {"198.17.255.255", false}, {"198.18.0.0", true},
	        {"198.19.255.255", true}, {"198.20.0.0", false}, {"198.51.100.7", true},
	        {"203.0.113.7", true}, {"203.0.114.0", false}, {"223.255.255.255", false},
	        {"224.0.0.1", true}, {"239.255.255.250", true}, {"240.0.0.1", true},
	        {"255.255.255.255", true}, {"8.8.8.8", false}, {"93.184.216.34", false},
	        /* IPv6 of its own */
	        {"::", true}, {"::1", true}, {"::2", true}, {"100::1", true}, {"fc00::1", true},
	        {"fdff:ffff::1", true}, {"fe80::1", true}, {"febf::1", true}, {"fec0::1", true},
	        {"ff02::1", true}, {"ff00::", true}, {"1fff::1", true}, {"4000::1", true}, {"2001::1", true},
	        {"2001:1ff:ffff::1", true}, {"2001:200::1", false}, {"2001:db8::1", true},
	        {"2001:db9::1", false}, {"3fff::1", true}, {"3fff:1000::1", false},
	        {"2606:4700::1111", false}, {"2a00:1450:4001::200e", false}, {"5f00::1", true},
	        /* IPv6 that carries IPv4 */
	        {"::ffff:127.0.0.1", true}, {"::ffff:10.1.2.3", true}, {"::ffff:8.8.8.8", false},
	        {"::127.0.0.1", true}, {"::8.8.8.8", true}, {"::ffff:0:127.0.0.1", true},
	        {"64:ff9b::127.0.0.1", true}, {"64:ff9b::169.254.169.254", true}, {"64:ff9b::8.8.8.8", false},
	        {"64:ff9b:1::8.8.8.8", true}, {"2002:7f00:1::", true}, {"2002:a00:1::1", true},
	        {"2002:c0a8:101::1", true}, {"2002:808:808::1", false}};
	for (size_t i = 0; i < FS_ARRAY_LEN(cases); i++) {
		struct sockaddr_storage a;
		socklen_t n = address(cases[i].text, 80, &a);
		if (fs_fetch_addr_special((struct sockaddr *)&a, n) != cases[i].special)
			fail_msg("%s", cases[i].text);
		assert_true(fs_fetch_addr_special((struct sockaddr *)&a, n - 1));
	}
	struct sockaddr_storage a = {.ss_family = AF_UNIX};
	assert_true(fs_fetch_addr_special((struct sockaddr *)&a, sizeof(a)));
}

static void allow_list(void **state)
{
	static const struct {
		const char *entry, *host;
		int port;
		const char *addr;
		bool allowed;
	} cases[] = {
	        {"nas.local", "nas.local", 80, "192.168.1.9", true},
	        {"nas.local", "NAS.Local.", 8000, "10.0.0.1", true},
	        {"NAS.local.", "nas.local", 80, "fd00::1", true},
	        {"nas.local", "x.nas.local", 80, "192.168.1.9", false},
	        {"nas.local", "nas.local.evil.example", 80, "192.168.1.9", false},
	        {"nas.local:8000", "nas.local", 8000, "192.168.1.9", true},
	        {"nas.local:8000", "nas.local", 80, "192.168.1.9", false},
	        {"192.168.1.9", "192.168.1.9", 80, "192.168.1.9", true},
	        {"192.168.1.9", "any.example", 443, "192.168.1.9", true},
	        {"192.168.1.9", "any.example", 443, "::ffff:192.168.1.9", true},
	        {"192.168.1.9", "192.168.1.9", 80, "192.168.1.8", false}, /* not the text of the URL */
	        {"127.0.0.1:8000", "x", 8000, "127.0.0.1", true},
	        {"127.0.0.1:8000", "x", 8001, "127.0.0.1", false},
	        {"192.168.1.0/24", "x", 80, "192.168.1.255", true},
	        {"192.168.1.77/24", "x", 80, "192.168.1.0", true},
	        {"192.168.1.0/24", "x", 80, "192.168.2.0", false},
	        {"192.168.1.0/25", "x", 80, "192.168.1.128", false},
	        {"10.0.0.0/8", "x", 80, "10.255.0.1", true},
	        {"10.0.0.0/8", "x", 80, "64:ff9b::10.0.0.1", false},
	        {"0.0.0.0/0", "x", 80, "127.0.0.1", true},
	        {"0.0.0.0/0", "x", 80, "::1", false},
	        {"::1", "x", 80, "::1", true},
	        {"[::1]:8000", "x", 8000, "::1", true},
	        {"[::1]:8000", "x", 80, "::1", false},
	        {"[fd00::5]", "x", 80, "fd00::5", true},
	        {"fd00::/8", "x", 80, "fdff::1", true},
	        {"fd00::/8", "x", 80, "fe00::1", false},
	        {"printer_2", "printer_2", 80, "10.1.1.1", true},
	};
	for (size_t i = 0; i < FS_ARRAY_LEN(cases); i++) {
		struct fs_fetch_allow a;
		struct sockaddr_storage sa;
		assert_int_equal(fs_fetch_allow_init(&a, &cases[i].entry, 1, &e), FS_OK);
		socklen_t n = address(cases[i].addr, cases[i].port, &sa);
		if (fs_fetch_allows(&a, cases[i].host, cases[i].port, (struct sockaddr *)&sa, n) !=
		        cases[i].allowed)
			fail_msg("%s: %s %s", cases[i].entry, cases[i].host, cases[i].addr);
		fs_fetch_allow_finish(&a);
	}
}

static void refuses_bad_entries(void **state)
{
	static const char *const bad[] = {"", " ", "http://nas/", "nas local", "nas:", "nas:0", "nas:65536",
	        "nas:x", "a:b:c", "1.2.3", "1.2.3.4.5", "1.2.3.4/33", "1.2.3.4/", "1.2.3.4/-1", "::1/129",
	        "/8", "[::1", "[::1]x", "[::1]:", "[1.2.3.4]:80", "nas/24", ".nas", "*.local", "user@nas"};
	for (size_t i = 0; i < FS_ARRAY_LEN(bad); i++) {
		struct fs_fetch_allow a;
		const char *list[] = {"10.0.0.0/8", "nas", bad[i]};
		if (fs_fetch_allow_init(&a, list, 3, &e) != FS_EINVAL)
			fail_msg("\"%s\"", bad[i]);
	}
	struct fs_fetch *f;
	const char *one[] = {"300.0.0.0/8"};
	struct fs_fetch_opts o = {.enabled = true, .max_bytes = 1, .allow = one, .n_allow = 1};
	assert_int_equal(fs_fetch_create(&o, &f, &e), FS_EINVAL);
	assert_non_null(strstr(e.text, "300.0.0.0/8"));
}

static void urls(void **state)
{
	static const char scheme[] = "picture URLs must be data:, http: or https:";
	static const char malformed[] = "the picture's URL is malformed";
	static const char user[] = "the picture's URL must hold no user name or password";
	static const struct {
		const char *url, *text, *host; /* text NULL: good, and reads as host */
		int port;
		const char *shown;
	} cases[] = {
	        {"http://a.example/x.png", NULL, "a.example", 80, "http://a.example/x.png"},
	        {"HTTPS://A.example:8443/x?key=secret#part", NULL, "A.example", 8443,
	                "https://A.example:8443/x"},
	        {"http://[2001:db8::1]:81/", NULL, "[2001:db8::1]", 81, "http://[2001:db8::1]:81/"},
	        {"http://2130706433/", NULL, "127.0.0.1", 80, "http://127.0.0.1/"},
	        {"http://0x7f.1/", NULL, "127.0.0.1", 80, "http://127.0.0.1/"},
	        {"http://a/b c", NULL, "a", 80, "http://a/b%20c"},
	        {"file:///etc/hostname", scheme, NULL, 0, NULL},
	        {"/etc/hostname", scheme, NULL, 0, NULL},
	        {"\\\\host\\x", scheme, NULL, 0, NULL},
	        {"ftp://a/x", scheme, NULL, 0, NULL},
	        {"gopher://a/x", scheme, NULL, 0, NULL},
	        {"data:image/png;base64,AAAA", scheme, NULL, 0, NULL},
	        {"iVBORw0KGgoAAAANSUhEUgAA", scheme, NULL, 0, NULL},
	        {"a.example/x.png", scheme, NULL, 0, NULL},
	        {"//a.example/x.png", scheme, NULL, 0, NULL},
	        {" http://a/", scheme, NULL, 0, NULL},
	        {"", scheme, NULL, 0, NULL},
	        {"http:", scheme, NULL, 0, NULL},
	        {"http://", malformed, NULL, 0, NULL},
	        {"http://a:99999/", malformed, NULL, 0, NULL},
	        {"http://a/\r\nX: y", malformed, NULL, 0, NULL},
	        {"http://a b/", malformed, NULL, 0, NULL},
	        {"http://[::1/", malformed, NULL, 0, NULL},
	        {"http://me:pw@a/", user, NULL, 0, NULL},
	        {"http://me@a/", user, NULL, 0, NULL},
	        {"http://a@b@c/", malformed, NULL, 0, NULL},
	};
	for (size_t i = 0; i < FS_ARRAY_LEN(cases); i++) {
		struct fs_fetch_url u;
		e.text[0] = '\0';
		int rc = fs_fetch_url_init(&u, NULL, cases[i].url, &e);
		if (rc != (cases[i].text ? FS_EINVAL : FS_OK) || (rc && strcmp(e.text, cases[i].text) != 0))
			fail_msg("%s: %d %s", cases[i].url, rc, e.text);
		if (rc)
			continue;
		assert_string_equal(u.host, cases[i].host);
		assert_int_equal(u.port, cases[i].port);
		assert_string_equal(u.shown, cases[i].shown);
		fs_fetch_url_finish(&u);
	}
}

static void long_urls(void **state)
{
	char *url = malloc(FS_FETCH_URL_MAX + 2);
	struct fs_fetch_url u;
	memset(url, 'a', FS_FETCH_URL_MAX + 1);
	memcpy(url, "http://a/", 9);
	url[FS_FETCH_URL_MAX] = '\0';
	assert_int_equal(fs_fetch_url_init(&u, NULL, url, &e), FS_OK);
	assert_true(strlen(u.shown) < sizeof(u.shown));
	fs_fetch_url_finish(&u);
	url[FS_FETCH_URL_MAX] = 'a';
	url[FS_FETCH_URL_MAX + 1] = '\0';
	assert_int_equal(fs_fetch_url_init(&u, NULL, url, &e), FS_ELIMIT);
	free(url);
}

static void relative_urls(void **state)
{
	static const struct {
		const char *location, *shown; /* NULL: refused */
	} cases[] = {
	        {"c.png", "http://a.example:81/x/c.png"},
	        {"/c.png?q", "http://a.example:81/c.png"},
	        {"../../c.png", "http://a.example:81/c.png"},
	        {"//b.example/c.png", "http://b.example/c.png"},
	        {"https://b.example/", "https://b.example/"},
	        {"/a b.png", "http://a.example:81/a%20b.png"},
	        {"file:///etc/hostname", NULL},
	        {"ftp://b.example/", NULL},
	        {"data:image/png;base64,AAAA", NULL},
	        {"gopher://b.example/", NULL},
	        {"http://me:pw@b.example/", NULL},
	        {"//me@b.example/", NULL},
	};
	struct fs_fetch_url base, u;
	assert_int_equal(fs_fetch_url_init(&base, NULL, "http://a.example:81/x/y.png?z=1", &e), FS_OK);
	for (size_t i = 0; i < FS_ARRAY_LEN(cases); i++) {
		int rc = fs_fetch_url_init(&u, &base, cases[i].location, &e);
		if (rc != (cases[i].shown ? FS_OK : FS_EINVAL))
			fail_msg("%s: %d", cases[i].location, rc);
		if (rc)
			continue;
		assert_string_equal(u.shown, cases[i].shown);
		fs_fetch_url_finish(&u);
	}
	fs_fetch_url_finish(&base);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
	        cmocka_unit_test(special_addresses),
	        cmocka_unit_test(allow_list),
	        cmocka_unit_test(refuses_bad_entries),
	        cmocka_unit_test(urls),
	        cmocka_unit_test(long_urls),
	        cmocka_unit_test(relative_urls),
	};
	return cmocka_run_group_tests_name("fetch_rules", tests, NULL, NULL);
}
