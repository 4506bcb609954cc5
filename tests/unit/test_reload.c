/* server/reload behind POST /v1/reload, over real sockets: who is answered by a reading, and who is refused
 * because there are too many, or because the server ends. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "server/reload.h"
#include "tests/unit/http_client.h"

#include <signal.h>

#define ASKERS 16 /* that wait for one reading */

static struct fs_config running;
static struct fs_reload *reload;
static struct fs_http *server;
static struct fs_api api;

static int read_config(struct fs_config *c, void *arg, struct fs_errbuf *e)
{
	return FS_OK;
}

static int setup(void **state)
{
	static const char *const files[] = {"/dev/null"};
	static const struct fs_http_route routes[] = {{"POST", "/v1/reload", fs_api_reload, &api}};
	struct fs_reload_opts o = {.read = read_config, .running = &running, .files = files, .n_files = 1};
	struct fs_http_opts h = {.listen = "127.0.0.1:0",
	        .max_body = 1 << 20,
	        .timeout_ms = 60000,
	        .routes = routes,
	        .n_routes = FS_ARRAY_LEN(routes)};
	signal(SIGPIPE, SIG_IGN);
	fs_config_init(&running);
	if (fs_reload_create(&o, &reload, NULL) || fs_http_create(&h, &server, NULL))
		return -1;
	api.settings = fs_reload_api(reload);
	return fs_http_start(server, NULL);
}

static int teardown(void **state)
{
	fs_reload_close(reload);
	fs_http_destroy(server);
	fs_reload_destroy(reload);
	fs_config_finish(&running);
	return 0;
}

static int ask(void)
{
	int fd = http_dial(server);
	http_say(fd, "POST /v1/reload HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: "
	             "0\r\n\r\n");
	return fd;
}

/* The whole answer; the connection is over. */
static const char *answer(int fd)
{
	static char text[4096];
	text[0] = '\0';
	http_hear(fd, text, sizeof(text), NULL);
	close(fd);
	return text;
}

static void assert_refused(const char *text, const char *code)
{
	char member[64];
	snprintf(member, sizeof(member), "\"code\":\"%s\"", code);
	if (strncmp(text, "HTTP/1.1 503 ", 13) || !strstr(text, "\r\nRetry-After: ") || !strstr(text, member))
		fail_msg("no refusal as %s: %s", code, text);
}

static void one_too_many_is_refused_and_the_others_share_a_reading(void **state)
{
	struct pollfd asked[ASKERS + 1];
	int n_refused = 0;
	for (size_t i = 0; i < FS_ARRAY_LEN(asked); i++)
		asked[i] = (struct pollfd){.fd = ask(), .events = POLLIN};
	assert_int_equal(poll(asked, FS_ARRAY_LEN(asked), WAIT_MS), 1);
	for (size_t i = 0; i < FS_ARRAY_LEN(asked); i++)
		if (asked[i].revents) {
			assert_refused(answer(asked[i].fd), "busy");
			asked[i].fd = -1;
			n_refused++;
		}
	assert_int_equal(n_refused, 1);
	fs_reload_run(reload, NULL);
	for (size_t i = 0; i < FS_ARRAY_LEN(asked); i++)
		if (asked[i].fd >= 0) {
			const char *text = answer(asked[i].fd);
			assert_memory_equal(text, "HTTP/1.1 200 ", 13);
			assert_non_null(strstr(text, "\"reads\":1"));
		}
}

/* It would be read on the loop, where everybody else waits meanwhile. */
static void a_long_body_is_not_read(void **state)
{
	static char body[64 << 10];
	char head[128];
	int fd = http_dial(server);
	memset(body, ' ', sizeof(body));
	memcpy(body + sizeof(body) - 2, "{}", 2);
	snprintf(head, sizeof(head),
	        "POST /v1/reload HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: "
	        "%zu\r\n\r\n",
	        sizeof(body));
	http_say(fd, head);
	assert_true(http_send(fd, body, sizeof(body)));
	assert_memory_equal(answer(fd), "HTTP/1.1 400 ", 13);
}

static void the_end_of_the_server_refuses_who_waits_and_who_comes(void **state)
{
	struct pollfd p = {.fd = fs_reload_fd(reload), .events = POLLIN};
	int fd = ask();
	assert_int_equal(poll(&p, 1, WAIT_MS), 1);
	fs_reload_close(reload);
	assert_refused(answer(fd), "shutting_down");
	assert_refused(answer(ask()), "busy");
}

int main(void)
{
	const struct CMUnitTest tests[] = {
	        cmocka_unit_test(one_too_many_is_refused_and_the_others_share_a_reading),
	        cmocka_unit_test(a_long_body_is_not_read),
	        cmocka_unit_test(the_end_of_the_server_refuses_who_waits_and_who_comes),
	};
	return cmocka_run_group_tests(tests, setup, teardown);
}
