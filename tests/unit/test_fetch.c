/* server/fetch: what is fetched and what is refused, by URL, address, status, size and certificate. */
#include "tests/unit/fetch_util.h"

static void good_pictures(void **state)
{
	static const char *const paths[] = {"/pic?%zu", "/chunked?%zu", "/close?%zu"};
	static const size_t sizes[] = {1, 1000, 40001, 100000};
	struct fs_fetch *f = create(opts());
	for (size_t i = 0; i < FS_ARRAY_LEN(paths); i++) {
		for (size_t k = 0; k < FS_ARRAY_LEN(sizes); k++) {
			char path[64];
			size_t n;
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wformat-nonliteral"
			snprintf(path, sizeof(path), paths[i], sizes[k]);
#pragma GCC diagnostic pop
			assert_int_equal(get(f, url_of("public.test", path), &n), FS_OK);
			assert_int_equal(n, sizes[k]);
		}
	}
	char head[4096];
	web_last_request(web, head, sizeof(head));
	assert_non_null(strstr(head, "GET /close?100000 HTTP/1.1\r\nHost: public.test:"));
	assert_non_null(strstr(head, "User-Agent: farsight/" FS_VERSION "\r\n"));
	assert_null(strcasestr(head, "accept-encoding"));
	assert_null(strcasestr(head, "cookie"));
	assert_null(strcasestr(head, "authorization"));
	assert_int_equal(web_accepted(web), 12); /* none was used again */
	fs_fetch_destroy(f);
}

static void no_picture(void **state)
{
	struct fs_fetch *f = create(opts());
	assert_not_fetched(f, url_of("public.test", "/status?404"));
	assert_not_fetched(f, url_of("public.test", "/status?500"));
	assert_not_fetched(f, url_of("public.test", "/status?204"));
	assert_not_fetched(f, url_of("public.test", "/status?301")); /* to nowhere */
	assert_not_fetched(f, url_of("public.test", "/pic?0"));
	assert_not_fetched(f, url_of("public.test", "/short"));
	assert_not_fetched(f, "http://nowhere.test/");
	fs_fetch_destroy(f);
}

static void redirects(void **state)
{
	static const char *const refused[] = {"/to?file:///etc/hostname", "/to?ftp://public.test/x",
	        "/to?data:image/png;base64,AAAA", "/to?http://me:pw@public.test/", "/to?http://", "/loop",
	        "/hop?4", "/to?/status?404"};
	struct fs_fetch *f = create(opts());
	size_t n;
	assert_int_equal(get(f, url_of("public.test", "/hop?3"), &n), FS_OK);
	assert_int_equal(n, 10);
	for (size_t i = 0; i < FS_ARRAY_LEN(refused); i++)
		assert_not_fetched(f, url_of("public.test", refused[i]));

	/* to addresses that are refused: one connection, the first hop's */
	static const char *const inside[] = {"127.0.0.1", "inside.test", "2130706433", "[::ffff:127.0.0.1]"};
	for (size_t i = 0; i < FS_ARRAY_LEN(inside); i++) {
		char path[300];
		int before = web_accepted(web);
		snprintf(path, sizeof(path), "/to?%s", url_of(inside[i], "/pic?10"));
		atomic_store(&connects, 0);
		assert_not_fetched(f, url_of("public.test", path));
		assert_int_equal(atomic_load(&connects), 1);
		assert_int_equal(web_accepted(web), before + 1);
	}
	fs_fetch_destroy(f);

	struct fs_fetch_opts o = opts();
	o.max_redirects = 0;
	f = create(o);
	assert_not_fetched(f, url_of("public.test", "/hop?1"));
	fs_fetch_destroy(f);
}

static void limits(void **state)
{
	static const char *const over[] = {"/pic?100001", "/chunked?100001", "/close?100001", "/endless"};
	struct fs_fetch *f = create(opts());
	size_t n;
	for (size_t i = 0; i < FS_ARRAY_LEN(over); i++) {
		assert_int_equal(get(f, url_of("public.test", over[i]), &n), FS_ELIMIT);
		assert_string_equal(e.text, "the picture is larger than this server's limit of 100000 bytes");
	}
	wait_for(web_waiting, 0);
	fs_fetch_destroy(f);
}

/* Results that nobody has taken count, and are given back when they are. */
static void memory_of_all(void **state)
{
	struct fs_fetch_opts o = opts();
	o.max_active = 1; /* one after the other */
	o.max_total = 200000;
	struct fs_fetch *f = create(o);
	struct fs_fetch_job *a = submit(f, url_of("public.test", "/pic?90000"), NULL);
	struct fs_fetch_job *b = submit(f, url_of("public.test", "/chunked?90000"), NULL);
	size_t n;
	assert_int_equal(get(f, url_of("public.test", "/pic?90000"), &n), FS_EUNAVAILABLE);
	assert_string_equal(e.text, "too many pictures are being fetched; try again shortly");
	assert_int_equal(wait_size(a, &n), FS_OK);
	assert_int_equal(get(f, url_of("public.test", "/pic?90000"), &n), FS_OK);
	fs_fetch_job_destroy(b); /* never taken */
	a = submit(f, url_of("public.test", "/pic?100000"), NULL);
	assert_int_equal(get(f, url_of("public.test", "/pic?100000"), &n), FS_OK);
	assert_int_equal(wait_size(a, &n), FS_OK);
	fs_fetch_destroy(f);
}

static void refused_addresses(void **state)
{
	static const char *const hosts[] = {"127.0.0.1", "localhost", "2130706433", "0177.0.0.1", "0x7f.1",
	        "127.1", "0.0.0.0", "0", "[::1]", "[::]", "[::ffff:127.0.0.1]", "[::ffff:7f00:1]",
	        "[64:ff9b::7f00:1]", "[2002:7f00:1::]", "169.254.169.254", "2852039166", "inside.test",
	        "meta.test", "nas.test", "127.0.0.1.", "%31%32%37.0.0.1"};
	struct fs_fetch *f = create(opts());
	for (size_t i = 0; i < FS_ARRAY_LEN(hosts); i++)
		assert_not_fetched(f, url_of(hosts[i], "/pic?10"));
	assert_int_equal(atomic_load(&connects), 0);
	assert_int_equal(web_accepted(web), 0);
	/* of several addresses only the public one is used */
	size_t n;
	assert_int_equal(get(f, url_of("mixed.test", "/pic?10"), &n), FS_OK);
	assert_int_equal(atomic_load(&connects), 1);
	fs_fetch_destroy(f);
}

static void allowed_addresses(void **state)
{
	char with_port[64], other_port[64], name_port[64];
	snprintf(with_port, sizeof(with_port), "127.0.0.1:%d", web_port(web));
	snprintf(other_port, sizeof(other_port), "127.0.0.1:%d", web_port(web) ^ 1);
	snprintf(name_port, sizeof(name_port), "nas.test:%d", web_port(web));
	const struct {
		const char *entry, *host;
		bool ok;
	} cases[] = {
	        {"127.0.0.0/8", "127.0.0.1", true},
	        {"127.0.0.1", "2130706433", true},
	        {"127.0.0.1", "[::ffff:127.0.0.1]", true},
	        {with_port, "127.0.0.1", true},
	        {other_port, "127.0.0.1", false},
	        {"nas.test", "nas.test", true},
	        {"nas.test", "NAS.test", true},
	        {name_port, "nas.test", true},
	        {"nas.test:1", "nas.test", false},
	        {"nas.test", "inside.test", false},
	        {"nas.test", "127.0.0.1", false},
	        {"10.0.0.0/8", "127.0.0.1", false},
	};
	for (size_t i = 0; i < FS_ARRAY_LEN(cases); i++) {
		struct fs_fetch_opts o = opts();
		o.allow = &cases[i].entry;
		o.n_allow = 1;
		struct fs_fetch *f = create(o);
		size_t n;
		int rc = get(f, url_of(cases[i].host, "/pic?10"), &n);
		if (rc != (cases[i].ok ? FS_OK : FS_EINVAL))
			fail_msg("%s by %s: %d %s", cases[i].host, cases[i].entry, rc, e.text);
		fs_fetch_destroy(f);
	}
}

/* What a client reads does not tell an address that answers from one that does not. */
static void errors_tell_nothing(void **state)
{
	const char *allow[] = {"127.0.0.2"};
	struct fs_fetch_opts o = opts();
	o.allow = allow;
	o.n_allow = 1;
	struct fs_fetch *f = create(o);
	assert_not_fetched(f, "http://127.0.0.2:1/");                /* closed */
	assert_not_fetched(f, url_of("public.test", "/status?403")); /* open */
	assert_not_fetched(f, url_of("127.0.0.1", "/"));             /* refused */
	assert_not_fetched(f, "http://nowhere.test/");               /* no such name */
	struct fs_fetch_job *j;
	assert_int_equal(fs_fetch_submit(f, "file:///etc/hostname", NULL, &j, &e), FS_EINVAL);
	assert_string_equal(e.text, "picture URLs must be data:, http: or https:");
	fs_fetch_destroy(f);
	o.enabled = false;
	f = create(o);
	assert_int_equal(fs_fetch_submit(f, "http://public.test/", NULL, &j, &e), FS_EINVAL);
	assert_string_equal(e.text, "this server fetches no URLs; send the picture as a data: URL");
	fs_fetch_destroy(f);
}

static void environment_is_not_read(void **state)
{
	setenv("http_proxy", "http://127.0.0.1:1", 1);
	setenv("ALL_PROXY", "socks5://127.0.0.1:1", 1);
	struct fs_fetch *f = create(opts());
	size_t n;
	assert_int_equal(get(f, url_of("public.test", "/pic?10"), &n), FS_OK);
	assert_not_fetched(f, url_of("127.0.0.1", "/pic?10"));
	assert_int_equal(atomic_load(&connects), 1);
	fs_fetch_destroy(f);
	unsetenv("http_proxy");
	unsetenv("ALL_PROXY");
}

static void certificates_are_checked(void **state)
{
	struct web *tls = web_start(true);
	struct fs_fetch *f = create(opts());
	char url[100];
	snprintf(url, sizeof(url), "https://public.test:%d/pic?10", web_port(tls));
	assert_not_fetched(f, url);
	assert_int_equal(web_accepted(tls), 1);
	assert_int_equal(web_most_waiting(tls), 0); /* no request was sent */
	fs_fetch_destroy(f);
	web_stop(tls);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
	        TEST(good_pictures),
	        TEST(no_picture),
	        TEST(redirects),
	        TEST(limits),
	        TEST(memory_of_all),
	        TEST(refused_addresses),
	        TEST(allowed_addresses),
	        TEST(errors_tell_nothing),
	        TEST(environment_is_not_read),
	        TEST(certificates_are_checked),
	};
	return cmocka_run_group_tests_name("fetch", tests, NULL, NULL);
}
