/* server/http over real sockets: routes, whole answers, streams, clients that leave, pipelining, slow
 * readers. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "server/http/http.h"

#include <arpa/inet.h>
#include <poll.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

static struct fs_http *server;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct fs_http_request *held[16];
static size_t n_held;

static void keep(void *arg, struct fs_http_request *r)
{
	pthread_mutex_lock(&lock);
	held[n_held++] = r;
	pthread_mutex_unlock(&lock);
}

static void echo(void *arg, struct fs_http_request *r)
{
	size_t n;
	const char *body = fs_http_body(r, &n);
	fs_http_reply(r, 200, "text/plain", "X-Test: yes", body, n);
	fs_http_unref(r);
}

/* What the server says that it was asked. */
static void tell(void *arg, struct fs_http_request *r)
{
	char text[512];
	const char *x = fs_http_header(r, "x-MARK"), *query = fs_http_query(r);
	snprintf(text, sizeof(text), "%s %s %s %s %s %s", (const char *)arg, fs_http_method(r),
	        fs_http_path(r), query ? query : "-", x ? x : "-", fs_http_peer(r));
	fs_http_add_header(r, "X-One", "1");
	fs_http_add_header(r, "X-Two", "2");
	fs_http_reply(r, 200, "text/plain", NULL, text, strlen(text));
	fs_http_unref(r);
}

/* The next request that `keep` got. */
static struct fs_http_request *take(void)
{
	for (;;) {
		pthread_mutex_lock(&lock);
		struct fs_http_request *r = n_held ? held[--n_held] : NULL;
		pthread_mutex_unlock(&lock);
		if (r)
			return r;
		poll(NULL, 0, 1);
	}
}

static char this_route[] = "this", any_route[] = "any", gone_route[] = "gone";

static const struct fs_http_route routes[] = {{"POST", "/echo", echo, NULL}, {"POST", "/keep", keep, NULL},
        {"GET", "/tell/this", tell, this_route}, {"GET", "/tell/*", tell, any_route},
        {"DELETE", "/tell/*", tell, gone_route}};

static int setup(void **state)
{
	signal(SIGPIPE, SIG_IGN);
	struct fs_http_opts o = {.listen = "127.0.0.1:0",
	        .max_body = 1 << 20,
	        .timeout_ms = 60000,
	        .routes = routes,
	        .n_routes = FS_ARRAY_LEN(routes)};
	int rc = fs_http_create(&o, &server, NULL);
	return rc ? rc : fs_http_start(server, NULL);
}

static int teardown(void **state)
{
	fs_http_destroy(server);
	return 0;
}

static int dial(int rcvbuf)
{
	struct sockaddr_in a = {.sin_family = AF_INET,
	        .sin_port = htons((uint16_t)fs_http_port(server)),
	        .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	if (rcvbuf)
		setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &rcvbuf, sizeof(rcvbuf));
	assert_int_equal(connect(fd, (struct sockaddr *)&a, sizeof(a)), 0);
	return fd;
}

static void send_text(int fd, const char *s)
{
	assert_int_equal(write(fd, s, strlen(s)), strlen(s));
}

/* Reads until `until` is in the text, or the end. */
static void read_until(int fd, char *buf, size_t cap, const char *until)
{
	size_t n = 0;
	buf[0] = '\0';
	while (n + 1 < cap && !(until && strstr(buf, until))) {
		struct pollfd p = {.fd = fd, .events = POLLIN};
		assert_int_equal(poll(&p, 1, 60000), 1);
		ssize_t r = read(fd, buf + n, cap - 1 - n);
		if (r <= 0)
			break;
		n += (size_t)r;
		buf[n] = '\0';
	}
}

#define POST(path, body) "POST " path " HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n\r\n" body

static void wait_cancelled(struct fs_http_request *r)
{
	while (!fs_cancelled(fs_http_cancel(r)))
		poll(NULL, 0, 1);
	assert_int_equal(fs_cancel_cause(fs_http_cancel(r)), FS_CANCEL_CLIENT);
}

static void wait_idle(void)
{
	while (fs_http_live(server) > 0)
		poll(NULL, 0, 1);
}

static void answers_and_routes(void **state)
{
	char buf[4096];
	int fd = dial(0);
	send_text(fd, POST("/echo", "hello"));
	read_until(fd, buf, sizeof(buf), "hello");
	assert_non_null(strstr(buf, "HTTP/1.1 200"));
	assert_non_null(strstr(buf, "X-Test: yes"));
	send_text(fd, "GET /nothing HTTP/1.1\r\nHost: localhost\r\n\r\n");
	read_until(fd, buf, sizeof(buf), "}}");
	assert_non_null(strstr(buf, "HTTP/1.1 404"));
	assert_non_null(strstr(buf, "\"not_found_error\""));
	send_text(fd, "GET /echo HTTP/1.1\r\nHost: localhost\r\n\r\n");
	read_until(fd, buf, sizeof(buf), "}}");
	assert_non_null(strstr(buf, "HTTP/1.1 405"));
	assert_non_null(strstr(buf, "Allow: POST"));
	/* An answer to HEAD has no body: the next answer begins where its headers end. */
	send_text(fd, "HEAD /echo HTTP/1.1\r\nHost: localhost\r\n\r\n" POST("/echo", "hello"));
	read_until(fd, buf, sizeof(buf), "hello");
	assert_non_null(strstr(buf, "HTTP/1.1 405"));
	assert_memory_equal(strstr(buf, "\r\n\r\n") + 4, "HTTP/1.1 200", 12);
	close(fd);
}

/* Sends a request without a body, returns the answer's text up to `until`. */
static char *ask(const char *line, const char *until)
{
	static char buf[4096], text[1024];
	int fd = dial(0);
	snprintf(text, sizeof(text), "%s HTTP/1.1\r\nHost: localhost\r\nX-Mark: m\r\n\r\n", line);
	send_text(fd, text);
	read_until(fd, buf, sizeof(buf), until);
	close(fd);
	return buf;
}

static void a_handler_sees_what_was_asked(void **state)
{
	assert_non_null(strstr(ask("GET /tell/this", "127.0.0.1"), "this GET /tell/this - m 127.0.0.1"));
	assert_non_null(strstr(ask("GET /tell/a/b%2fc?from=1&x", "127.0.0.1"),
	        "any GET /tell/a/b%2fc from=1&x m 127.0.0.1"));
	char *answer = ask("DELETE /tell/a", "127.0.0.1");
	assert_non_null(strstr(answer, "gone DELETE /tell/a - m 127.0.0.1"));
	assert_non_null(strstr(answer, "X-One: 1\r\n"));
	assert_non_null(strstr(answer, "X-Two: 2\r\n"));
	assert_non_null(strstr(ask("GET /tell/", "}}"), "HTTP/1.1 404"));
	answer = ask("POST /tell/a", "}}");
	assert_non_null(strstr(answer, "HTTP/1.1 405"));
	assert_non_null(strstr(answer, "Allow: GET, DELETE\r\n"));
	answer = ask("HEAD /tell/this", "\r\n\r\n"); /* the GET's headers, and nothing behind them */
	assert_non_null(strstr(answer, "HTTP/1.1 200"));
	assert_non_null(strstr(answer, "Content-Length: 34\r\n"));
	assert_string_equal(strstr(answer, "\r\n\r\n"), "\r\n\r\n");
}

static void a_client_that_leaves_fires_the_token(void **state)
{
	int fd = dial(0);
	send_text(fd, POST("/keep", "hello"));
	struct fs_http_request *r = take();
	assert_false(fs_cancelled(fs_http_cancel(r)));
	close(fd);
	wait_cancelled(r);
	fs_http_reply(r, 200, NULL, NULL, "{}", 2);
	fs_http_unref(r);
	wait_idle();
}

/* SO_LINGER 0 makes the end a reset instead of a FIN. */
static void a_reset_fires_the_token(void **state)
{
	int fd = dial(0);
	send_text(fd, POST("/keep", "hello"));
	struct fs_http_request *r = take();
	struct linger lg = {.l_onoff = 1};
	setsockopt(fd, SOL_SOCKET, SO_LINGER, &lg, sizeof(lg));
	close(fd);
	wait_cancelled(r);
	fs_http_stream_end(r);
	fs_http_unref(r);
	wait_idle();
}

/* A second request on the connection while the first is being worked on: both are answered, in order, and a
 * later end is still noticed. */
static void a_pipelined_request_waits(void **state)
{
	char buf[4096];
	int fd = dial(0);
	send_text(fd, POST("/keep", "first"));
	struct fs_http_request *r = take();
	send_text(fd, POST("/keep", "later"));
	poll(NULL, 0, 20); /* time for the bytes to arrive; nothing may happen */
	assert_false(fs_cancelled(fs_http_cancel(r)));
	fs_http_reply(r, 200, NULL, NULL, "{\"a\":1}", 7);
	fs_http_unref(r);
	read_until(fd, buf, sizeof(buf), "{\"a\":1}");
	r = take();
	send_text(fd, "x");
	close(fd);
	wait_cancelled(r);
	fs_http_reply(r, 200, NULL, NULL, "{}", 2);
	fs_http_unref(r);
	wait_idle();
}

static void a_stream_flows_and_ends(void **state)
{
	char buf[4096];
	int fd = dial(0);
	send_text(fd, POST("/keep", "hello"));
	struct fs_http_request *r = take();
	assert_int_equal(fs_http_stream_begin(r), FS_OK);
	assert_int_equal(fs_http_stream_write(r, "data: 1\n\n", 9), FS_OK);
	read_until(fd, buf, sizeof(buf), "data: 1");
	assert_non_null(strstr(buf, "text/event-stream"));
	assert_non_null(strstr(buf, "X-Accel-Buffering: no"));
	while (fs_http_stream_backlog(r) > 0)
		poll(NULL, 0, 1);
	assert_int_equal(fs_http_stream_write(r, "data: 2\n\n", 9), FS_OK);
	fs_http_stream_end(r);
	fs_http_unref(r);
	read_until(fd, buf, sizeof(buf), "0\r\n\r\n");
	assert_non_null(strstr(buf, "data: 2"));
	close(fd);
	wait_idle();
}

/* Such a client is told no length and knows no chunks. */
static void a_stream_to_http_1_0_ends_with_its_connection(void **state)
{
	char buf[4096];
	int fd = dial(0);
	send_text(fd, "POST /keep HTTP/1.0\r\nHost: localhost\r\nConnection: keep-alive\r\nContent-Length: "
	              "1\r\n\r\nx");
	struct fs_http_request *r = take();
	fs_http_stream_begin(r);
	fs_http_stream_write(r, "data: 1\n\n", 9);
	fs_http_stream_end(r);
	fs_http_unref(r);
	read_until(fd, buf, sizeof(buf), NULL);
	assert_null(strstr(buf, "Content-Length"));
	assert_null(strstr(buf, "keep-alive"));
	assert_non_null(strstr(buf, "\r\n\r\ndata: 1\n\n"));
	close(fd);
	wait_idle();
}

static atomic_int n_drained, n_taken_back;

static void count_drained(void *arg)
{
	atomic_fetch_add(&n_drained, 1);
}

static void listen_for_drain(void *arg)
{
	fs_http_when_drained(arg, count_drained, NULL);
}

static void take_back(void *arg)
{
	atomic_fetch_add(&n_taken_back, fs_http_not_when_drained(arg) ? 1 : 100);
}

static void wait_count(atomic_int *n, int want)
{
	while (atomic_load(n) < want)
		poll(NULL, 0, 1);
	assert_int_equal(atomic_load(n), want);
}

static void a_call_for_the_drain_can_be_taken_back(void **state)
{
	static char block[512 * 1024], buf[1 << 20];
	memset(block, 'x', sizeof(block));
	int fd = dial(4096);
	send_text(fd, POST("/keep", "hello"));
	struct fs_http_request *r = take();
	fs_http_stream_begin(r);
	for (int i = 0; i < 6; i++) /* more than sockets hold */
		assert_int_equal(fs_http_stream_write(r, block, sizeof(block)), FS_OK);
	fs_http_call(r, listen_for_drain, r);
	fs_http_call(r, take_back, r);
	wait_count(&n_taken_back, 1);
	fs_http_call(r, take_back, r); /* none waits any more */
	wait_count(&n_taken_back, 101);
	fs_http_call(r, listen_for_drain, r);
	for (size_t got = 0; got < 6 * sizeof(block);) {
		ssize_t n = read(fd, buf, sizeof(buf));
		assert_true(n > 0);
		got += (size_t)n;
	}
	wait_count(&n_drained, 1);
	fs_http_stream_end(r);
	fs_http_unref(r);
	read_until(fd, buf, sizeof(buf), "0\r\n\r\n");
	close(fd);
	wait_idle();
}

static void a_stream_begins_by_itself_and_may_still_fail(void **state)
{
	char buf[4096];
	int fd = dial(0);
	send_text(fd, POST("/keep", "hello"));
	struct fs_http_request *r = take();
	fs_http_stream_begin_after(r, 10);
	read_until(fd, buf, sizeof(buf), ": keep-alive\n\n");
	assert_non_null(strstr(buf, "HTTP/1.1 200"));
	fs_http_reply(r, 400, NULL, NULL, "{\"error\":1}", 11);
	fs_http_unref(r);
	read_until(fd, buf, sizeof(buf), "0\r\n\r\n");
	char *event = strstr(buf, "data: ");
	assert_non_null(event);
	assert_non_null(strstr(buf, "{\"error\":1}"));
	assert_non_null(strstr(buf, "data: [DONE]"));
	close(fd);
	wait_idle();
}

static void a_reader_that_stops_is_dropped(void **state)
{
	static char block[64 * 1024];
	memset(block, 'x', sizeof(block));
	int fd = dial(4096);
	send_text(fd, POST("/keep", "hello"));
	struct fs_http_request *r = take();
	fs_http_stream_begin(r);
	size_t sent = 0;
	while (fs_http_stream_write(r, block, sizeof(block)) == FS_OK) {
		sent += sizeof(block);
		assert_true(sent < ((size_t)256 << 20));
		if (sent % (1 << 20) == 0)
			poll(NULL, 0, 1);
	}
	assert_true(fs_http_stream_backlog(r) > (size_t)1 << 20);
	fs_http_stream_end(r);
	fs_http_unref(r);
	close(fd);
	wait_idle();
}

static void every_live_request_can_be_cancelled(void **state)
{
	int fd = dial(0);
	send_text(fd, POST("/keep", "hello"));
	struct fs_http_request *r = take();
	fs_http_cancel_all(server, FS_CANCEL_SHUTDOWN);
	assert_int_equal(fs_cancel_cause(fs_http_cancel(r)), FS_CANCEL_SHUTDOWN);
	fs_http_reply(r, 503, NULL, "Retry-After: 2", "{}", 2);
	fs_http_unref(r);
	char buf[1024];
	read_until(fd, buf, sizeof(buf), "{}");
	assert_non_null(strstr(buf, "Retry-After: 2"));
	close(fd);
	wait_idle();
}

/* The lowest free descriptor number. */
static rlim_t next_fd(void)
{
	int fd = dup(0);
	close(fd);
	return (rlim_t)fd;
}

/* A connection that can not be accepted for want of a descriptor: served later, and no busy loop until then,
 * which would have logged each of its rounds. */
static void out_of_descriptors(void **state)
{
	enum { ROUNDS = 500 };
	char buf[4096], path[] = "/tmp/fs-test-http-XXXXXX";
	struct rlimit old, low;
	int log = mkstemp(path), err = dup(2), open_before = dial(0), late;
	unlink(path);
	send_text(open_before, POST("/echo", "hello")); /* now it is accepted */
	read_until(open_before, buf, sizeof(buf), "hello");
	wait_idle();
	late = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	struct sockaddr_in a = {.sin_family = AF_INET,
	        .sin_port = htons((uint16_t)fs_http_port(server)),
	        .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};

	getrlimit(RLIMIT_NOFILE, &old);
	low = old;
	low.rlim_cur = next_fd();
	dup2(log, 2);
	assert_int_equal(setrlimit(RLIMIT_NOFILE, &low), 0);
	assert_int_equal(connect(late, (struct sockaddr *)&a, sizeof(a)), 0);
	for (int i = 0; i < ROUNDS; i++) {
		send_text(open_before, "GET /nothing HTTP/1.1\r\nHost: localhost\r\n\r\n");
		read_until(open_before, buf, sizeof(buf), "}}");
	}
	setrlimit(RLIMIT_NOFILE, &old);
	dup2(err, 2);

	off_t size = lseek(log, 0, SEEK_END);
	assert_true(size > 0 && size < ROUNDS * 20); /* a few lines of some 80 bytes */
	send_text(late, POST("/echo", "later"));
	read_until(late, buf, sizeof(buf), "later");
	assert_non_null(strstr(buf, "HTTP/1.1 200"));
	close(late);
	close(open_before);
	close(err);
	close(log);
	wait_idle();
}

static void listen_errors_say_why(void **state)
{
	struct fs_http_opts o = {.max_body = 1, .timeout_ms = 1, .routes = routes, .n_routes = 1};
	struct fs_http *h = NULL;
	struct fs_errbuf e = {""};
	char taken[32];
	o.listen = ":80";
	assert_int_not_equal(fs_http_create(&o, &h, &e), FS_OK);
	assert_string_equal(e.text, "can not listen on :80: there is no such address");
	snprintf(taken, sizeof(taken), "127.0.0.1:%d", fs_http_port(server));
	o.listen = taken;
	assert_int_not_equal(fs_http_create(&o, &h, &e), FS_OK);
	assert_non_null(strstr(e.text, "Address already in use"));
	o.listen = "8080";
	assert_int_not_equal(fs_http_create(&o, &h, &e), FS_OK);
	assert_non_null(strstr(e.text, "must be address:port"));
}

int main(void)
{
	const struct CMUnitTest tests[] = {
	        cmocka_unit_test(answers_and_routes),
	        cmocka_unit_test(a_handler_sees_what_was_asked),
	        cmocka_unit_test(a_client_that_leaves_fires_the_token),
	        cmocka_unit_test(a_reset_fires_the_token),
	        cmocka_unit_test(a_pipelined_request_waits),
	        cmocka_unit_test(a_stream_flows_and_ends),
	        cmocka_unit_test(a_stream_to_http_1_0_ends_with_its_connection),
	        cmocka_unit_test(a_call_for_the_drain_can_be_taken_back),
	        cmocka_unit_test(a_stream_begins_by_itself_and_may_still_fail),
	        cmocka_unit_test(a_reader_that_stops_is_dropped),
	        cmocka_unit_test(every_live_request_can_be_cancelled),
	        cmocka_unit_test(out_of_descriptors),
	        cmocka_unit_test(listen_errors_say_why),
	};
	return cmocka_run_group_tests_name("http", tests, setup, teardown);
}
