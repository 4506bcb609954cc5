/* server/http's reading of heads and chunks, and its rules of access: pure functions, table by table. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "server/http/access.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct fs_errbuf e;

/* Reads text byte by byte as it would arrive; the status of the error, 0 for a good head. */
static int read_head(const char *text, size_t n, struct http_head *h)
{
	size_t scanned = 0;
	int end = 0, status = 0;
	for (size_t have = 1; have <= n && end == 0; have++)
		end = http_head_end(text, have, &scanned, &e);
	size_t fresh = 0;
	assert_int_equal(end, http_head_end(text, n, &fresh, &e)); /* in pieces or whole */
	if (end <= 0)
		return end == 0 ? -1 : end == FS_ELIMIT ? 431 : 400;
	return http_head_parse(text, (size_t)end, h, &status, &e) ? status : 0;
}

static void a_good_head_is_taken_apart(void **state)
{
	static const char text[] =
	        "POST /v1/x%20y?a=b?c HTTP/1.1\r\nHost: localhost:80\r\ncontent-LENGTH:  12 \t\r\n"
	        "X-Empty:\r\nX-Two: 1\r\nx-two: 2\r\nConnection: foo, Close\r\n"
	        "Expect: 100-Continue\r\nX-Text: caf\xc3\xa9\tau lait\r\n\r\nbody";
	struct http_head h;
	assert_int_equal(read_head(text, sizeof(text) - 1, &h), 0);
	assert_string_equal(h.method, "POST");
	assert_string_equal(h.path, "/v1/x%20y");
	assert_string_equal(h.query, "a=b?c");
	assert_int_equal(h.minor, 1);
	assert_int_equal(h.length, 12);
	assert_true(h.wants_continue);
	assert_true(h.last);
	assert_false(h.chunked);
	assert_string_equal(http_head_find(&h, "x-empty"), "");
	assert_string_equal(http_head_find(&h, "X-TWO"), "1");
	assert_string_equal(http_head_find(&h, "x-text"), "caf\xc3\xa9\tau lait");
	assert_null(http_head_find(&h, "x"));
	http_head_finish(&h);
	assert_int_equal(read_head("GET / HTTP/1.0\r\n\r\n", 18, &h), 0);
	assert_true(h.last);
	assert_null(h.query);
	assert_int_equal(h.length, -1);
	http_head_finish(&h);
	static const char chunked[] = "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: Chunked\r\n\r\n";
	assert_int_equal(read_head(chunked, sizeof(chunked) - 1, &h), 0);
	assert_true(h.chunked);
	assert_false(h.last);
	http_head_finish(&h);
}

#define H "Host: a\r\n"
#define P "POST / HTTP/1.1\r\n" H

static void a_bad_head_is_refused(void **state)
{
	static const struct {
		const char *text;
		int status;
	} cases[] = {
	        {P "Content-Length: 5\r\nContent-Length: 5\r\n\r\n", 400},
	        {P "Content-Length: 5, 5\r\n\r\n", 400},
	        {P "Content-Length: +5\r\n\r\n", 400},
	        {P "Content-Length: 0x5\r\n\r\n", 400},
	        {P "Content-Length: -5\r\n\r\n", 400},
	        {P "Content-Length: \r\n\r\n", 400},
	        {P "Content-Length: 99999999999999999999\r\n\r\n", 400},
	        {P "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n", 400},
	        {P "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n", 400},
	        {P "Transfer-Encoding: gzip, chunked\r\n\r\n", 400},
	        {P "Transfer-Encoding: gzip\r\n\r\n", 400},
	        {P "Transfer-Encoding: \x0b"
	           "chunked\r\n\r\n",
	                400},
	        {"POST / HTTP/1.0\r\n" H "Transfer-Encoding: chunked\r\n\r\n", 400},
	        {P ": empty\r\n\r\n", 400},
	        {P "No colon\r\n\r\n", 400},
	        {P "Space : x\r\n\r\n", 400},
	        {P "X: 1\r\n folded\r\n\r\n", 400},
	        {P "X: 1\nY: 2\r\n\r\n", 400},
	        {P "X: 1\rY: 2\r\n\r\n", 400},
	        {P "\rContent-Length: 5\r\n\r\n", 400},
	        {P "X: a\x01"
	           "b\r\n\r\n",
	                400},
	        {P "Host: b\r\n\r\n", 400},
	        {"GET / HTTP/1.1\r\n\r\n", 400},
	        {"GET / HTTP/1.1\n\n", 400},
	        {"GET  / HTTP/1.1\r\n" H "\r\n", 400},
	        {"GET /a b HTTP/1.1\r\n" H "\r\n", 400},
	        {"GET /\xc3\xa9 HTTP/1.1\r\n" H "\r\n", 400},
	        {"GET /#x HTTP/1.1\r\n" H "\r\n", 400},
	        {"GET http://a/ HTTP/1.1\r\n" H "\r\n", 400},
	        {"GET * HTTP/1.1\r\n" H "\r\n", 400},
	        {"GET /\r\n" H "\r\n", 400},
	        {"G(T / HTTP/1.1\r\n" H "\r\n", 400},
	        {"GET / HTTP/2.0\r\n" H "\r\n", 505},
	        {"GET / HTTP/1.11\r\n" H "\r\n", 400},
	        {"\r\n\r\n", 400},
	        {P "Expect: 200-ok\r\n\r\n", 417},
	};
	for (size_t i = 0; i < FS_ARRAY_LEN(cases); i++) {
		struct http_head h;
		int status = read_head(cases[i].text, strlen(cases[i].text), &h);
		if (status != cases[i].status)
			print_error("case %zu: %d\n", i, status);
		assert_int_equal(status, cases[i].status);
	}
	struct http_head h;
	assert_int_equal(read_head("GET / HTTP/1.1\r\nX: a\0b\r\n\r\n", 27, &h), 400);
}

static void a_head_has_limits(void **state)
{
	struct http_head h;
	struct fs_buf b;
	fs_buf_init(&b, 1 << 20);
	fs_buf_append_str(&b, P);
	for (int i = 0; i < HTTP_MAX_HEADERS; i++) /* with Host one more than there may be */
		fs_buf_append_str(&b, "X: y\r\n");
	fs_buf_append_str(&b, "\r\n");
	assert_int_equal(read_head((char *)b.data, b.len, &h), 431);
	fs_buf_clear(&b);
	fs_buf_append_str(&b, P "X: ");
	while (b.len < HTTP_MAX_HEAD - 4)
		fs_buf_append_str(&b, "y");
	size_t scanned = 0;
	fs_buf_append_str(&b, "\r\n\r");
	assert_int_equal(http_head_end((char *)b.data, b.len, &scanned, &e), 0);
	fs_buf_append_str(&b, "\n");
	assert_int_equal(http_head_end((char *)b.data, b.len, &scanned, &e), HTTP_MAX_HEAD);
	b.data[HTTP_MAX_HEAD - 1] = 'y';
	scanned = 0;
	assert_int_equal(http_head_end((char *)b.data, b.len, &scanned, &e), FS_ELIMIT);
	fs_buf_finish(&b);
}

/* Reads text in pieces of `piece` bytes; the body comes to `out`. */
static int read_chunks(const char *text, size_t piece, char *out, size_t *rest)
{
	struct http_chunks c = {0};
	size_t n = strlen(text), at = 0, len = 0;
	int rc = 0;
	while (rc == 0 && at < n) {
		size_t used, data_n;
		const char *data;
		rc = http_chunks_read(&c, text + at, FS_MIN(piece, n - at), &used, &data, &data_n, &e);
		if (rc < 0)
			return rc;
		memcpy(out + len, data, data_n);
		len += data_n;
		at += used;
	}
	out[len] = '\0';
	*rest = n - at;
	return rc;
}

static void chunks_are_read_strictly(void **state)
{
	static const char good[] =
	        "5\r\nhello\r\n00C;name=\"value\"\r\n, over there\r\n0\r\nX-Trailer: yes\r\n\r\nnext";
	static const char *const bad[] = {"0x3\r\nabc\r\n0\r\n\r\n", "+3\r\nabc\r\n", "-1\r\n",
	        " 3\r\nabc\r\n", "3 \r\nabc\r\n", "3\nabc\r\n", "3\r\nabcd\r\n", "3\r\nabc\n0\r\n\r\n",
	        "\r\n", ";x\r\n", "g\r\n", "1234567890123\r\n", "3;a\x01\r\nabc\r\n", "0\r\n folded\r\n\r\n",
	        "0\r\nX: y\n\r\n", "3\rabc"};
	char out[256];
	size_t rest;
	for (size_t piece = 1; piece < sizeof(good); piece++) {
		assert_int_equal(read_chunks(good, piece, out, &rest), 1);
		assert_string_equal(out, "hello, over there");
		assert_int_equal(rest, 4);
	}
	for (size_t i = 0; i < FS_ARRAY_LEN(bad); i++)
		for (size_t piece = 1; piece < 20; piece++)
			assert_int_equal(read_chunks(bad[i], piece, out, &rest), FS_EFORMAT);
	struct fs_buf b; /* neither an extension nor trailers without end */
	fs_buf_init(&b, 1 << 20);
	fs_buf_append_str(&b, "1;");
	while (b.len < 300)
		fs_buf_append_str(&b, "x");
	assert_int_equal(read_chunks((char *)b.data, 1000, out, &rest), FS_EFORMAT);
	fs_buf_clear(&b);
	fs_buf_append_str(&b, "0\r\n");
	while (b.len < 20000)
		fs_buf_append_str(&b, "X: y\r\n");
	assert_int_equal(read_chunks((char *)b.data, 1000, out, &rest), FS_EFORMAT);
	fs_buf_finish(&b);
}

/* ---- access ---- */

/* The status that access gives, 0 when it lets the request pass. Of headers: lines without the final CRLF. */
static int ask(const struct http_access *a, const char *line, const char *headers, const char **cors)
{
	char text[1024];
	struct http_head h;
	struct http_refusal why = {0};
	snprintf(text, sizeof(text), "%s HTTP/1.0\r\n%s%s\r\n", line, headers, *headers ? "\r\n" : "");
	assert_int_equal(read_head(text, strlen(text), &h), 0);
	bool passes = http_access_allows(a, &h, &why);
	if (cors) {
		static char origin[256];
		const char *got = http_access_cors(a, &h);
		snprintf(origin, sizeof(origin), "%s", got ? got : "-");
		*cors = origin;
	}
	http_head_finish(&h);
	assert_int_equal(passes, why.status == 0);
	return why.status;
}

static void keys_open_the_door(void **state)
{
	const char *keys[] = {"first", "sec ond\xc3\xa9"};
	struct fs_http_opts o = {.api_keys = keys, .n_api_keys = 2};
	struct http_access a;
	assert_int_equal(http_access_init(&a, &o, "127.0.0.1", &e), FS_OK);
	assert_int_equal(ask(&a, "GET /v1/models", "", NULL), 401);
	assert_int_equal(ask(&a, "POST /health", "", NULL), 401);
	assert_int_equal(ask(&a, "GET /healthy", "", NULL), 401);
	assert_int_equal(ask(&a, "GET /health", "", NULL), 0);
	assert_int_equal(ask(&a, "HEAD /health", "", NULL), 0);
	assert_int_equal(ask(&a, "OPTIONS /v1/models", "", NULL), 0);
	assert_int_equal(ask(&a, "GET /x", "Authorization: Bearer first", NULL), 0);
	assert_int_equal(ask(&a, "GET /x", "authorization: bEARER   first", NULL), 0);
	assert_int_equal(ask(&a, "GET /x", "X-API-Key: sec ond\xc3\xa9", NULL), 0);
	assert_int_equal(ask(&a, "GET /x", "Authorization: Bearer no\r\nX-Api-Key: first", NULL), 0);
	static const char *const wrong[] = {"Authorization: first", "Authorization: Basic first",
	        "Authorization: Bearer firs", "Authorization: Bearer firstt", "Authorization: Bearer",
	        "Authorization: Bearer ", "x-api-key: First", "x-api-key:", "x-api-keys: first"};
	for (size_t i = 0; i < FS_ARRAY_LEN(wrong); i++)
		assert_int_equal(ask(&a, "POST /x", wrong[i], NULL), 401);
	/* With a key, names and origins do not matter: no page knows it. */
	assert_int_equal(
	        ask(&a, "POST /x", "x-api-key: first\r\nHost: evil\r\nOrigin: http://evil", NULL), 0);
}

static void names_are_checked_without_a_key(void **state)
{
	const char *hosts[] = {"box", ".lan.example"};
	struct fs_http_opts o = {.allowed_hosts = hosts, .n_allowed_hosts = 2};
	struct http_access a;
	assert_int_equal(http_access_init(&a, &o, "mainpc", &e), FS_OK);
	static const char *const good[] = {"127.0.0.1:8080", "192.168.1.5", "[::1]:80", "[fe80::1]",
	        "localhost", "LOCALHOST:1", "a.localhost", "localhost.", "box", "Box:8080", "mainpc",
	        "x.lan.example", "lan.example", "box:"};
	static const char *const bad[] = {"evil.example", "boxx", "notlocalhost", "localhost.evil",
	        "xlan.example", "127.0.0.1.evil", "127.1", "[::1", "::1", "a:b", "user@localhost",
	        "localhost:80:80", "box:x", "[::1]x", ""};
	char line[300];
	for (size_t i = 0; i < FS_ARRAY_LEN(good); i++) {
		snprintf(line, sizeof(line), "Host: %s", good[i]);
		assert_int_equal(ask(&a, "GET /x", line, NULL), 0);
	}
	for (size_t i = 0; i < FS_ARRAY_LEN(bad); i++) {
		snprintf(line, sizeof(line), "Host: %s", bad[i]);
		assert_int_equal(ask(&a, "GET /x", line, NULL), 403);
	}
	assert_int_equal(ask(&a, "OPTIONS /x", "Host: evil", NULL), 403);
	assert_int_equal(ask(&a, "GET /x", "", NULL), 0); /* HTTP/1.0 without Host */
	const char *any[] = {"*"};
	o = (struct fs_http_opts){.allowed_hosts = any, .n_allowed_hosts = 1};
	assert_int_equal(http_access_init(&a, &o, "127.0.0.1", &e), FS_OK);
	assert_int_equal(ask(&a, "GET /x", "Host: evil", NULL), 0);
}

static void origins_are_checked_without_a_key(void **state)
{
	const char *origins[] = {"https://app.example", "chrome-extension://abc"};
	const char *hosts[] = {"mainpc"};
	struct fs_http_opts o = {
	        .allowed_hosts = hosts, .n_allowed_hosts = 1, .cors_origins = origins, .n_cors_origins = 2};
	struct http_access a;
	assert_int_equal(http_access_init(&a, &o, "127.0.0.1", &e), FS_OK);
	static const struct {
		const char *origin;
		int status;
		const char *cors;
	} cases[] = {
	        {"https://app.example", 0, "https://app.example"},
	        {"chrome-extension://abc", 0, "chrome-extension://abc"},
	        {"http://mainpc:8080", 0, "-"},
	        {"https://mainpc:8080", 0, "-"}, /* a proxy may have ended TLS */
	        {"http://localhost:3000", 0, "-"},
	        {"http://127.0.0.1", 0, "-"},
	        {"http://[::1]:5", 0, "-"},
	        {"http://mainpc:9090", 403, "-"},
	        {"http://mainpc", 403, "-"},
	        {"null", 403, "-"},
	        {"", 403, "-"},
	        {"http://evil.example", 403, "-"},
	        {"https://app.example.evil", 403, "-"},
	        {"http://app.example", 403, "-"},
	        {"http://192.168.1.5:8080", 403, "-"},
	        {"chrome-extension://xyz", 403, "-"},
	        {"http://mainpc:8080, http://evil", 403, "-"},
	};
	for (size_t i = 0; i < FS_ARRAY_LEN(cases); i++) {
		char line[300];
		const char *cors;
		snprintf(line, sizeof(line), "Host: mainpc:8080\r\nOrigin: %s", cases[i].origin);
		assert_int_equal(ask(&a, "POST /x", line, &cors), cases[i].status);
		assert_string_equal(cors, cases[i].cors);
		assert_int_equal(ask(&a, "DELETE /x", line, NULL), cases[i].status);
		assert_int_equal(ask(&a, "GET /x", line, NULL), 0);
	}
	assert_int_equal(ask(&a, "POST /x", "Host: mainpc", NULL), 0); /* no browser */
	assert_int_equal(ask(&a, "POST /x", "Host: mainpc:80\r\nOrigin: http://mainpc", NULL), 0);
	assert_int_equal(
	        ask(&a, "POST /x", "Host: mainpc\r\nOrigin: http://localhost\r\nOrigin: http://e", NULL),
	        403);
}

static void access_settings_are_checked(void **state)
{
	static const struct {
		const char *key, *host, *origin, *text;
	} cases[] = {
	        {"", NULL, NULL, "must not be blank"},
	        {"  ", NULL, NULL, "must not be blank"},
	        {"key\n", NULL, NULL, "white space"},
	        {"k\x01y", NULL, NULL, "control characters"},
	        {NULL, "box:8080", NULL, "\"allowed_hosts\""},
	        {NULL, "http://box", NULL, "\"allowed_hosts\""},
	        {NULL, "*.box", NULL, "\"allowed_hosts\""},
	        {NULL, "", NULL, "\"allowed_hosts\""},
	        {NULL, NULL, "app.example", "\"cors_origins\""},
	        {NULL, NULL, "https://app.example/", "\"cors_origins\""},
	        {NULL, NULL, "https://*.example", "\"cors_origins\""},
	};
	for (size_t i = 0; i < FS_ARRAY_LEN(cases); i++) {
		struct fs_http_opts o = {.api_keys = &cases[i].key,
		        .n_api_keys = cases[i].key != NULL,
		        .allowed_hosts = &cases[i].host,
		        .n_allowed_hosts = cases[i].host != NULL,
		        .cors_origins = &cases[i].origin,
		        .n_cors_origins = cases[i].origin != NULL};
		struct http_access a;
		assert_int_equal(http_access_init(&a, &o, "127.0.0.1", &e), FS_EINVAL);
		assert_non_null(strstr(e.text, cases[i].text));
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
	        cmocka_unit_test(a_good_head_is_taken_apart),
	        cmocka_unit_test(a_bad_head_is_refused),
	        cmocka_unit_test(a_head_has_limits),
	        cmocka_unit_test(chunks_are_read_strictly),
	        cmocka_unit_test(keys_open_the_door),
	        cmocka_unit_test(names_are_checked_without_a_key),
	        cmocka_unit_test(origins_are_checked_without_a_key),
	        cmocka_unit_test(access_settings_are_checked),
	};
	return cmocka_run_group_tests_name("http_head", tests, NULL, NULL);
}
