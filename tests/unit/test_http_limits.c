/*
 * server/http at its limits, over raw sockets: what is malformed, too large, too slow, too much or unwanted
 * is answered in JSON, in full, on a connection that ends in an orderly way; and the next request works.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "http_client.h"

#include <errno.h>
#include <linux/filter.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>

#define MAX_BODY ((size_t)256 * 1024)
#define H "Host: localhost\r\n"

static struct fs_http *server;
static _Atomic(struct fs_http_request *) held;

static void echo(void *arg, struct fs_http_request *r)
{
	size_t n;
	const char *body = fs_http_body(r, &n);
	fs_http_reply(r, 200, "text/plain", NULL, body, n);
	fs_http_unref(r);
}

static void keep(void *arg, struct fs_http_request *r)
{
	assert_null(held);
	held = r;
}

static struct fs_http_request *take(void)
{
	struct fs_http_request *r;
	while (!(r = held))
		poll(NULL, 0, 1);
	held = NULL;
	return r;
}

static void reply(struct fs_http_request *r, const char *text)
{
	fs_http_reply(r, 200, "text/plain", NULL, text, strlen(text));
	fs_http_unref(r);
}

static const struct fs_http_route routes[] = {
        {"POST", "/echo", echo, NULL}, {"POST", "/keep", keep, NULL}, {"GET", "/keep", keep, NULL}};

static struct fs_http_opts options(void)
{
	return (struct fs_http_opts){.listen = "127.0.0.1:0",
	        .max_body = MAX_BODY,
	        .timeout_ms = 60000,
	        .routes = routes,
	        .n_routes = FS_ARRAY_LEN(routes)};
}

static void start(const struct fs_http_opts *o)
{
	assert_int_equal(fs_http_create(o, &server, NULL), FS_OK);
	assert_int_equal(fs_http_start(server, NULL), FS_OK);
}

static void stop(void)
{
	fs_http_destroy(server);
	server = NULL;
}

static void wait_idle(void)
{
	while (fs_http_live(server) > 0)
		poll(NULL, 0, 1);
}

static const char post_hello[] = "POST /echo HTTP/1.1\r\n" H "Content-Length: 5\r\n\r\nhello";

static void the_next_request_works(void)
{
	char buf[1024] = "";
	int fd = http_dial(server);
	http_say(fd, post_hello);
	http_hear(fd, buf, sizeof(buf), "hello");
	assert_non_null(strstr(buf, "HTTP/1.1 200"));
	close(fd);
}

/* Sends text; the whole answer must be JSON of that status, and the connection end after it. */
static void is_refused(const char *text, const char *status, const char *part)
{
	char buf[4096] = "", line[64];
	int fd = http_dial(server);
	http_say(fd, text);
	bool orderly = http_hear(fd, buf, sizeof(buf), NULL);
	snprintf(line, sizeof(line), "HTTP/1.1 %s ", status);
	if (!orderly || strncmp(buf, line, strlen(line)) != 0 || !strstr(buf, part))
		fail_msg("to %s: %s", text, buf);
	assert_non_null(strstr(buf, "\r\nContent-Type: application/json\r\n"));
	assert_non_null(strstr(buf, "\r\nConnection: close\r\n"));
	assert_non_null(strstr(buf, "\r\n\r\n{\"error\":{\"message\":\""));
	assert_string_equal(buf + strlen(buf) - 2, "}}");
	close(fd);
}

static void malformed_requests_get_json(void **state)
{
	struct fs_http_opts o = options();
	start(&o);
	is_refused("POST /echo HTTP/1.1\r\n" H "Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello", "400",
	        "twice");
	is_refused("POST /echo HTTP/1.1\r\n" H
	           "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
	        "400", "twice");
	is_refused("POST /echo HTTP/1.1\r\n" H "Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", "400",
	        "chunked");
	is_refused("POST /echo HTTP/1.1\r\n" H "Transfer-Encoding: chunked\r\n\r\n0x3\r\nabc\r\n0\r\n\r\n",
	        "400", "malformed");
	is_refused("POST /echo HTTP/1.1\r\n" H "Transfer-Encoding: chunked\r\n\r\n+3\r\nabc\r\n0\r\n\r\n",
	        "400", "malformed");
	is_refused("GET /x HTTP/1.1\r\n" H ": nameless\r\n\r\n", "400", "proper name");
	is_refused("GET /x HTTP/1.1\r\n\r\n", "400", "Host");
	is_refused("GET /x HTTP/1.1\nHost: localhost\n\n", "400", "carriage return");
	is_refused("GET /x HTTP/1.1\r\n" H "X: 1\r\n 2\r\n\r\n", "400", "one before");
	is_refused("\x16\x03\x01\x02", "400", "control character"); /* TLS to a plain port */
	is_refused("GET /x HTTP/3.0\r\n" H "\r\n", "505", "HTTP/1.1");
	is_refused("BREW /x HTTP/1.1\r\n" H "\r\n", "501", "method");
	is_refused("POST /echo HTTP/1.1\r\n" H "Expect: tea\r\nContent-Length: 5\r\n\r\n", "417",
	        "100-continue");
	is_refused("GET /x HTTP/1.1\r\nHost: evil.example\r\n\r\n", "403", "host_not_allowed");
	is_refused("POST /echo HTTP/1.1\r\n" H "Origin: null\r\nContent-Length: 5\r\n\r\n", "403",
	        "origin_not_allowed");
	the_next_request_works();
	static const struct fs_http_turned_away want[] = {{400, 10}, {403, 2}, {417, 1}, {501, 1}, {505, 1}};
	struct fs_http_turned_away away[FS_HTTP_MAX_STATUSES];
	assert_int_equal(fs_http_turned_away(server, away), FS_ARRAY_LEN(want));
	for (size_t i = 0; i < FS_ARRAY_LEN(want); i++) {
		assert_int_equal(away[i].status, want[i].status);
		assert_int_equal(away[i].n, want[i].n);
	}
	stop();
}

static void good_requests_in_all_shapes_work(void **state)
{
	struct fs_http_opts o = options();
	char buf[4096] = "";
	start(&o);
	int fd = http_dial(server);
	static const char chunked[] = "POST /echo HTTP/1.1\r\n" H "Transfer-Encoding: chunked\r\n\r\n"
	                              "3;x=y\r\nabc\r\nA\r\ndefghijklm\r\n0\r\nX-Sum: 1\r\n\r\n";
	for (size_t i = 0; i < sizeof(chunked) - 1; i++)
		assert_true(http_send(fd, chunked + i, 1));
	http_hear(fd, buf, sizeof(buf), "abcdefghijklm");
	assert_non_null(strstr(buf, "HTTP/1.1 200"));
	/* Three at once on the same connection, then one of HTTP/1.0 that ends it. */
	buf[0] = '\0';
	http_say(fd, "POST /echo HTTP/1.1\r\n" H "Content-Length: 3\r\n\r\noneGET /x HTTP/1.1\r\n" H
	             "\r\nPOST /echo HTTP/1.1\r\n" H "Content-Length: 5\r\n\r\nthreePOST /echo HTTP/1.0\r\n"
	             "Content-Length: 4\r\n\r\nfourGET /never HTTP/1.1\r\n" H "\r\n");
	http_hear(fd, buf, sizeof(buf), NULL);
	char *one = strstr(buf, "\r\n\r\none"), *two = one ? strstr(one, "HTTP/1.1 404") : NULL,
	     *three = two ? strstr(two, "\r\n\r\nthree") : NULL,
	     *four = three ? strstr(three, "\r\n\r\nfour") : NULL;
	assert_non_null(four);
	assert_string_equal(four, "\r\n\r\nfour");
	close(fd);
	/* curl's way with larger bodies. */
	buf[0] = '\0';
	fd = http_dial(server);
	http_say(fd, "POST /echo HTTP/1.1\r\n" H "Content-Length: 5\r\nExpect: 100-continue\r\n\r\n");
	http_hear(fd, buf, sizeof(buf), "HTTP/1.1 100 Continue\r\n\r\n");
	http_say(fd, "hello");
	http_hear(fd, buf, sizeof(buf), "hello");
	assert_non_null(strstr(buf, "HTTP/1.1 200"));
	close(fd);
	stop();
}

/* A client that sends all of n bytes before it reads, as most do, and gives up when it can not. */
static void body_is_refused(const char *head, size_t n, const char *status)
{
	char buf[4096] = "", *body = calloc(1, n);
	int fd = http_dial(server);
	http_say(fd, head);
	assert_true(http_send(fd, body, n));
	assert_true(http_hear(fd, buf, sizeof(buf), NULL));
	assert_non_null(strstr(buf, status));
	assert_null(strstr(buf, "100 Continue"));
	assert_string_equal(buf + strlen(buf) - 2, "}}");
	close(fd);
	free(body);
}

static void large_bodies_get_413(void **state)
{
	struct fs_http_opts o = options();
	char head[256];
	start(&o);
	snprintf(head, sizeof(head), "POST /echo HTTP/1.1\r\n" H "Content-Length: %zu\r\n\r\n", MAX_BODY + 1);
	is_refused(head, "413", "request_too_large"); /* nothing of the body is needed */
	body_is_refused(head, MAX_BODY + 1, "HTTP/1.1 413");
	snprintf(head, sizeof(head), "POST /echo HTTP/1.1\r\n" H "Content-Length: %d\r\n\r\n", 32 << 20);
	body_is_refused(head, (size_t)32 << 20, "HTTP/1.1 413");
	snprintf(head, sizeof(head),
	        "POST /echo HTTP/1.1\r\n" H "Expect: 100-continue\r\nContent-Length: %zu\r\n\r\n",
	        MAX_BODY + 1);
	is_refused(head, "413", "262144 bytes");
	snprintf(head, sizeof(head), "POST /echo HTTP/1.1\r\n" H "Transfer-Encoding: chunked\r\n\r\n%zx\r\n",
	        MAX_BODY + 1);
	body_is_refused(head, MAX_BODY + 1, "HTTP/1.1 413");
	/* To the byte it works. */
	char *all = calloc(1, MAX_BODY + 1), *back = calloc(1, MAX_BODY + 1024);
	memset(all, 'x', MAX_BODY);
	int fd = http_dial(server);
	snprintf(head, sizeof(head),
	        "POST /echo HTTP/1.1\r\n" H "Connection: close\r\nContent-Length: %zu\r\n\r\n", MAX_BODY);
	http_say(fd, head);
	assert_true(http_send(fd, all, MAX_BODY));
	assert_true(http_hear(fd, back, MAX_BODY + 1024, NULL));
	assert_string_equal(strstr(back, "\r\n\r\n") + 4, all);
	close(fd);
	free(all);
	free(back);
	the_next_request_works();
	stop();
}

static void a_wrong_key_is_told_before_the_body(void **state)
{
	const char *key = "secret", *origin = "https://app.example";
	struct fs_http_opts o = options();
	o.api_keys = &key;
	o.n_api_keys = 1;
	o.cors_origins = &origin;
	o.n_cors_origins = 1;
	start(&o);
	is_refused("POST /echo HTTP/1.1\r\n" H "Content-Length: 5\r\nExpect: 100-continue\r\n\r\n", "401",
	        "\"authentication_error\"");
	is_refused("POST /echo HTTP/1.1\r\n" H "Content-Length: 9999999\r\n\r\n", "401",
	        "WWW-Authenticate: Bearer");
	is_refused("POST /nothing HTTP/1.1\r\n" H
	           "Origin: https://app.example\r\nContent-Length: 5\r\n\r\nhello",
	        "401", "Access-Control-Allow-Origin: https://app.example\r\n");
	char buf[4096] = "";
	int fd = http_dial(server);
	http_say(fd, "OPTIONS /echo HTTP/1.1\r\n" H
	             "Origin: https://app.example\r\nAccess-Control-Request-Headers: "
	             "authorization, x-other\r\nAccess-Control-Request-Method: POST\r\n\r\n");
	http_hear(fd, buf, sizeof(buf), "\r\n\r\n");
	assert_non_null(strstr(buf, "HTTP/1.1 204"));
	assert_non_null(strstr(buf, "Access-Control-Allow-Headers: authorization, x-other\r\n"));
	assert_non_null(strstr(buf, "Access-Control-Allow-Methods: GET, POST, DELETE, OPTIONS\r\n"));
	assert_non_null(strstr(buf, "Access-Control-Max-Age: 600\r\n"));
	assert_non_null(strstr(buf, "Vary: Origin\r\n"));
	buf[0] = '\0';
	http_say(fd, "OPTIONS /echo HTTP/1.1\r\n" H "Origin: https://evil.example\r\n\r\n");
	http_hear(fd, buf, sizeof(buf), "\r\n\r\n");
	assert_non_null(strstr(buf, "HTTP/1.1 204"));
	assert_null(strstr(buf, "Access-Control"));
	buf[0] = '\0';
	http_say(fd,
	        "POST /echo HTTP/1.1\r\n" H "Authorization: Bearer secret\r\nContent-Length: 5\r\n\r\nhello");
	http_hear(fd, buf, sizeof(buf), "hello");
	assert_non_null(strstr(buf, "HTTP/1.1 200"));
	close(fd);
	stop();
}

static int their_envelope(const char *path, int status, const char *type, const char *code,
        const char *message, struct fs_buf *out)
{
	return fs_buf_printf(out, "<%s %d %s %s>", path, status, type, code ? code : "-");
}

static void errors_take_the_envelope_of_their_path(void **state)
{
	struct fs_http_opts o = options();
	char buf[4096] = "";
	o.error_body = their_envelope;
	start(&o);
	int fd = http_dial(server);
	http_say(fd, "GET /v1/messages HTTP/1.1\r\n" H "\r\nGET /echo?a HTTP/1.1\r\n" H
	             "\r\nPOST /b HTTP/1.1\r\nHost: evil\r\n\r\n");
	http_hear(fd, buf, sizeof(buf), NULL);
	assert_non_null(strstr(buf, "</v1/messages 404 not_found_error ->"));
	assert_non_null(strstr(buf, "</echo 405 invalid_request_error ->"));
	assert_non_null(strstr(buf, "</b 403 permission_error host_not_allowed>"));
	close(fd);
	stop();
}

static void large_heads_get_431(void **state)
{
	struct fs_http_opts o = options();
	char buf[4096] = "", *head = calloc(1, 2 << 20);
	start(&o);
	memset(head, 'x', 2 << 20);
	memcpy(head, "GET /x HTTP/1.1\r\nX: ", 20);
	int fd = http_dial(server);
	assert_true(http_send(fd, head, 2 << 20));
	assert_true(http_hear(fd, buf, sizeof(buf), NULL));
	assert_non_null(strstr(buf, "HTTP/1.1 431"));
	assert_non_null(strstr(buf, "64 KiB"));
	close(fd);
	free(head);
	the_next_request_works();
	stop();
}

/* The timer runs from a request's first byte: a byte now and then does not stretch it. */
static void slow_senders_get_408(void **state)
{
	static const char *const beginnings[] = {"G",
	        "GET /x HTTP/1.1\r\nHost:", "POST /echo HTTP/1.1\r\n" H "Content-Length: 500\r\n\r\nhel",
	        "POST /echo HTTP/1.1\r\n" H "Transfer-Encoding: chunked\r\n\r\n500\r\nhel"};
	struct fs_http_opts o = options();
	o.read_timeout_ms = 200;
	start(&o);
	for (size_t i = 0; i < FS_ARRAY_LEN(beginnings); i++) {
		char buf[4096] = "";
		int fd = http_dial(server);
		struct pollfd p = {.fd = fd, .events = POLLIN};
		http_say(fd, beginnings[i]);
		for (int n = 0; n < 400 && poll(&p, 1, 50) == 0; n++)
			http_send(fd, "x", 1);
		assert_true(http_hear(fd, buf, sizeof(buf), NULL));
		assert_non_null(strstr(buf, "HTTP/1.1 408"));
		assert_non_null(strstr(buf, "request_timeout"));
		close(fd);
	}
	/* A connection that waits between requests is not a slow sender, nor is one whose answer takes long.
	 */
	char buf[4096] = "";
	int fd = http_dial(server);
	poll(NULL, 0, 300);
	http_say(fd, "GET /keep HTTP/1.1\r\n" H "\r\n");
	struct fs_http_request *r = take();
	poll(NULL, 0, 300);
	reply(r, "late");
	http_hear(fd, buf, sizeof(buf), "late");
	assert_non_null(strstr(buf, "HTTP/1.1 200"));
	poll(NULL, 0, 300);
	http_say(fd, post_hello);
	http_hear(fd, buf, sizeof(buf), "hello");
	close(fd);
	stop();
}

static void too_many_connections_get_503(void **state)
{
	enum { MOST = 4 };
	struct fs_http_opts o = options();
	int fds[MOST];
	char buf[4096];
	o.max_connections = MOST;
	start(&o);
	for (int i = 0; i < MOST; i++) {
		fds[i] = http_dial(server);
		http_say(fds[i], "GET /keep HTTP/1.1\r\n" H); /* unfinished: not idle */
	}
	is_refused(post_hello, "503", "too_many_connections");
	is_refused("", "503", "Retry-After: ");
	/* One that has been answered and idles makes room. */
	http_say(fds[0], "\r\n");
	reply(take(), "first");
	buf[0] = '\0';
	http_hear(fds[0], buf, sizeof(buf), "first");
	the_next_request_works();
	buf[0] = '\0';
	assert_true(http_hear(fds[0], buf, sizeof(buf), NULL)); /* it was closed for it */
	assert_string_equal(buf, "");
	for (int i = 0; i < MOST; i++)
		close(fds[i]);
	the_next_request_works();
	/* A flood, far past what is even refused at once: the rest waits to be accepted, and is served in the
	 * end. */
	enum { FLOOD = 300 };
	int flood[FLOOD];
	for (int i = 0; i < FLOOD; i++)
		flood[i] = http_dial(server);
	for (int i = 0; i < FLOOD; i++)
		close(flood[i]);
	do { /* until the ends of all those have been seen */
		int fd = http_dial(server);
		http_say(fd, "POST /echo HTTP/1.0\r\nContent-Length: 5\r\n\r\nhello");
		buf[0] = '\0';
		assert_true(http_hear(fd, buf, sizeof(buf), NULL));
		close(fd);
	} while (strncmp(buf, "HTTP/1.1 503", 12) == 0);
	assert_non_null(strstr(buf, " 200 OK"));
	stop();
}

static void bodies_have_a_budget(void **state)
{
	struct fs_http_opts o = options();
	char buf[4096] = "", head[256], *half = calloc(1, MAX_BODY);
	o.max_bodies = MAX_BODY + 1000;
	start(&o);
	int first = http_dial(server);
	snprintf(head, sizeof(head), "POST /keep HTTP/1.1\r\n" H "Content-Length: %zu\r\n\r\n", MAX_BODY);
	http_say(first, head);
	assert_true(http_send(first, half, MAX_BODY));
	struct fs_http_request *r = take();
	/* By what is announced, and by what comes. */
	is_refused("POST /echo HTTP/1.1\r\n" H "Content-Length: 1001\r\n\r\n", "503", "Retry-After: ");
	snprintf(head, sizeof(head), "POST /echo HTTP/1.1\r\n" H "Transfer-Encoding: chunked\r\n\r\n%x\r\n",
	        1001);
	body_is_refused(head, 1001, "HTTP/1.1 503");
	the_next_request_works(); /* it is small */
	/* Whoever has read one lets it go. */
	fs_http_drop_body(r);
	size_t n = 1;
	assert_string_equal(fs_http_body(r, &n), "");
	assert_int_equal(n, 0);
	int second = http_dial(server);
	http_say(second, "POST /echo HTTP/1.1\r\n" H "Content-Length: 1001\r\n\r\n");
	assert_true(http_send(second, half, 1001));
	http_hear(second, buf, sizeof(buf), "\r\n\r\n");
	assert_non_null(strstr(buf, " 200 OK"));
	close(second);
	reply(r, "done");
	http_hear(first, buf, sizeof(buf), "done");
	close(first);
	/* It is all given back, also by requests that were refused or never finished. */
	wait_idle();
	first = http_dial(server);
	snprintf(head, sizeof(head), "POST /keep HTTP/1.0\r\nContent-Length: %zu\r\n\r\n", MAX_BODY);
	http_say(first, head);
	http_send(first, half, MAX_BODY / 2);
	close(first);
	for (int tries = 0;; tries++) { /* until its end has been seen */
		int fd = http_dial(server);
		http_say(fd, head);
		bool all = http_send(fd, half, MAX_BODY);
		struct pollfd p = {.fd = fd, .events = POLLIN};
		while (all && !held && poll(&p, 1, 1) == 0)
			;
		if (held)
			reply(take(), "done");
		buf[0] = '\0';
		http_hear(fd, buf, sizeof(buf), NULL);
		close(fd);
		if (strstr(buf, " 200 OK"))
			break;
		assert_true(tries < 1000);
	}
	free(half);
	stop();
}

/* The far end's kernel drops whatever comes, as when its network is gone: no FIN, no reset, no
 * acknowledgement. */
static void a_vanished_peer_is_noticed(void **state)
{
	struct sock_filter drop[] = {{.code = BPF_RET | BPF_K, .k = 0}};
	struct sock_fprog program = {.len = 1, .filter = drop};
	struct fs_http_opts o = options();
	o.peer_timeout_ms = 1000;
	start(&o);
	int fd = http_dial(server);
	http_say(fd, "GET /keep HTTP/1.1\r\n" H "\r\n");
	struct fs_http_request *r = take();
	int filtered = setsockopt(fd, SOL_SOCKET, SO_ATTACH_FILTER, &program, sizeof(program)), why = errno;
	if (filtered && geteuid() != 0) { /* what is left is not enough to go on with */
		print_message("skipped: this user may attach no filter: %s\n", strerror(why));
		close(fd);
		reply(r, "");
		wait_idle();
		stop();
		skip();
	}
	assert_int_equal(filtered, 0);
	int64_t until = fs_deadline_ms(WAIT_MS);
	while (!fs_cancelled(fs_http_cancel(r)) && fs_now() < until)
		poll(NULL, 0, 10);
	assert_int_equal(fs_cancel_cause(fs_http_cancel(r)), FS_CANCEL_CLIENT);
	reply(r, "nobody");
	wait_idle();
	the_next_request_works();
	close(fd);
	stop();
}

static void what_a_client_sends_during_a_stream_is_bounded(void **state)
{
	struct fs_http_opts o = options();
	char buf[4096] = "", *waste = calloc(1, 16 << 20);
	start(&o);
	int fd = http_dial(server);
	http_say(fd, "GET /keep HTTP/1.1\r\n" H "\r\n");
	struct fs_http_request *r = take();
	fs_http_stream_begin(r);
	http_hear(fd, buf, sizeof(buf), "\r\n\r\n");
	size_t sent = 0;
	for (int idle = 0; idle < 20 && sent < (16 << 20);) { /* until nothing more is taken for a while */
		ssize_t n = send(fd, waste + sent, (16 << 20) - sent, MSG_DONTWAIT | MSG_NOSIGNAL);
		sent += n > 0 ? (size_t)n : 0;
		idle = n > 0 ? 0 : idle + 1;
		poll(NULL, 0, n > 0 ? 0 : 10);
	}
	assert_true(sent < (16 << 20)); /* the kernels' buffers and ours, not our memory */
	assert_int_equal(fs_http_stream_write(r, "data: 1\n\n", 9), FS_OK);
	http_hear(fd, buf, sizeof(buf), "data: 1");
	close(fd); /* its end is stuck behind what is not read; but it can not take the next bytes */
	int64_t until = fs_deadline_ms(WAIT_MS);
	while (fs_http_stream_write(r, "data: 2\n\n", 9) == FS_OK && fs_now() < until)
		poll(NULL, 0, 1);
	assert_true(fs_cancelled(fs_http_cancel(r)));
	fs_http_stream_end(r);
	fs_http_unref(r);
	free(waste);
	wait_idle();
	the_next_request_works();
	stop();
}

/* Stopping: idle connections end, a running answer comes to its end and takes its connection along, what
 * arrives now is told so. */
static void stopping_is_orderly(void **state)
{
	enum { LARGE = 4 << 20 };
	struct fs_http_opts o = options();
	char buf[4096] = "", *large = malloc(LARGE + 1), *got = calloc(1, LARGE + 4096);
	start(&o);
	int idle = http_dial(server), fresh = http_dial(server), streaming = http_dial(server),
	    half = http_dial(server);
	http_say(idle, post_hello);
	http_hear(idle, buf, sizeof(buf), "hello");
	http_say(half, "GET /x HTTP/1.1\r\nHo");
	http_say(streaming, "GET /keep HTTP/1.1\r\n" H "\r\n");
	struct fs_http_request *r = take();
	fs_http_stream_begin(r);
	http_hear(streaming, got, 4096, "\r\n\r\n");
	fs_http_stop_accepting(server);
	buf[0] = '\0';
	assert_true(http_hear(idle, buf, sizeof(buf), NULL));
	assert_true(http_hear(fresh, buf, sizeof(buf), NULL));
	assert_string_equal(buf, "");
	http_say(half, "st: localhost\r\n\r\n");
	assert_true(http_hear(half, buf, sizeof(buf), NULL));
	assert_non_null(strstr(buf, "HTTP/1.1 503"));
	assert_non_null(strstr(buf, "\"shutting_down\""));
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	struct sockaddr_in a = {.sin_family = AF_INET,
	        .sin_port = htons((uint16_t)fs_http_port(server)),
	        .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	assert_int_not_equal(connect(fd, (struct sockaddr *)&a, sizeof(a)), 0);
	/* The last answer is larger than the socket takes at once, and all of it arrives though the server
	 * ends. */
	memset(large, 'x', LARGE);
	memcpy(large + LARGE - 4, "end\n", 5);
	assert_int_equal(fs_http_stream_write(r, large, LARGE), FS_OK);
	fs_http_stream_end(r);
	fs_http_unref(r);
	pthread_t ending;
	assert_int_equal(
	        fs_thread_start(&ending, "ending", (void *(*)(void *))(void *)fs_http_destroy, server, NULL),
	        0);
	assert_true(http_hear(streaming, got, LARGE + 4096, NULL));
	assert_non_null(strstr(got, "end\n\r\n0\r\n\r\n"));
	pthread_join(ending, NULL);
	server = NULL;
	int all[] = {idle, fresh, streaming, half, fd};
	for (size_t i = 0; i < FS_ARRAY_LEN(all); i++)
		close(all[i]);
	free(large);
	free(got);
}

static void listening_for_others_needs_a_key(void **state)
{
	struct fs_http_opts o = options();
	struct fs_errbuf e = {""};
	const char *key = "secret";
	static const char *const open[] = {"0.0.0.0:0", "[::]:0"};
	for (size_t i = 0; i < FS_ARRAY_LEN(open); i++) {
		o.listen = open[i];
		o.open_without_key = false;
		o.n_api_keys = 0;
		int rc = fs_http_create(&o, &server, &e);
		if (rc == FS_EIO) /* no IPv6 here */
			continue;
		assert_int_equal(rc, FS_EAUTH);
		assert_non_null(strstr(e.text, "\"api_key\""));
		assert_non_null(strstr(e.text, "\"open_to_network_without_key\": true"));
		o.open_without_key = true;
		assert_int_equal(fs_http_create(&o, &server, &e), FS_OK);
		stop();
		o.open_without_key = false;
		o.api_keys = &key;
		o.n_api_keys = 1;
		assert_int_equal(fs_http_create(&o, &server, &e), FS_OK);
		stop();
	}
	o = options();
	o.listen = "localhost:0";
	assert_int_equal(fs_http_create(&o, &server, &e), FS_OK);
	stop();
}

/* evhttp gives such a connection up; its request must hear of it, and hears why. */
static void who_takes_nothing_of_an_answer_is_let_go(void **state)
{
	static char block[1 << 20];
	struct fs_http_opts o = options();
	o.idle_timeout_ms = 200;
	start(&o);
	int fd = http_dial(server), small = 4096;
	setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &small, sizeof(small));
	http_say(fd, "GET /keep HTTP/1.1\r\n" H "\r\n");
	struct fs_http_request *r = take();
	fs_http_stream_begin(r);
	for (int i = 0; i < 3; i++) /* less than what is dropped for its size */
		assert_int_equal(fs_http_stream_write(r, block, sizeof(block)), FS_OK);
	int64_t until = fs_deadline_ms(WAIT_MS);
	while (!fs_cancelled(fs_http_cancel(r)) && fs_now() < until)
		poll(NULL, 0, 1);
	assert_int_equal(fs_cancel_cause(fs_http_cancel(r)), FS_CANCEL_UNREAD);
	fs_http_stream_end(r);
	fs_http_unref(r);
	wait_idle();
	close(fd);
	stop();
}

int main(void)
{
	const struct CMUnitTest tests[] = {
	        cmocka_unit_test(malformed_requests_get_json),
	        cmocka_unit_test(good_requests_in_all_shapes_work),
	        cmocka_unit_test(large_bodies_get_413),
	        cmocka_unit_test(a_wrong_key_is_told_before_the_body),
	        cmocka_unit_test(errors_take_the_envelope_of_their_path),
	        cmocka_unit_test(large_heads_get_431),
	        cmocka_unit_test(slow_senders_get_408),
	        cmocka_unit_test(too_many_connections_get_503),
	        cmocka_unit_test(bodies_have_a_budget),
	        cmocka_unit_test(a_vanished_peer_is_noticed),
	        cmocka_unit_test(what_a_client_sends_during_a_stream_is_bounded),
	        cmocka_unit_test(who_takes_nothing_of_an_answer_is_let_go),
	        cmocka_unit_test(stopping_is_orderly),
	        cmocka_unit_test(listening_for_others_needs_a_key),
	};
	signal(SIGPIPE, SIG_IGN);
	return cmocka_run_group_tests_name("http_limits", tests, NULL, NULL);
}
