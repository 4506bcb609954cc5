/*
 * vision_rig: a vision with one or more fake agents behind private sshds, as tests of server/vision start it.
 * Included once by each test, which owns the sshds of the first two hosts.
 */
#ifndef FS_TEST_VISION_RIG_H
#define FS_TEST_VISION_RIG_H

#include "server/vision/vision.h"
#include "tests/unit/sshd.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static struct test_sshd sshd, sshd2;
static const char *agent;
static int n_tests;

/* One vision with its own command, log and name; fill o before start. */
struct rig {
	char command[1024], command2[1024], host[64], host2[64], log[256], once[256];
	struct fs_vision_opts o;
	struct fs_vision *v;
};

static inline void add_host(struct rig *r, const struct test_sshd *s, char *host, const char *command)
{
	snprintf(host, 64, "127.0.0.1:%d", s->port);
	r->o.hosts[r->o.n_hosts++] = (struct fs_vision_host_opts){.host = host,
	        .identity = s->identity,
	        .known_hosts = s->known_hosts,
	        .config_file = s->ssh_config,
	        .command = command};
}

/* args: knobs of the fake agent; %L in it is the log, %O the once-file. */
static inline void expand(const struct rig *r, char *out, size_t cap, const char *args)
{
	size_t n = (size_t)snprintf(out, cap, "%s --log %s ", agent, r->log);
	for (; *args; args++) {
		if (args[0] == '%' && args[1] == 'O') {
			n += (size_t)snprintf(out + n, cap - n, "%s", r->once);
			args++;
		} else {
			out[n++] = *args;
			out[n] = '\0';
		}
	}
}

static inline void prepare(struct rig *r, const char *args)
{
	memset(r, 0, sizeof(*r));
	snprintf(r->log, sizeof(r->log), "%s/log%d", sshd.dir, ++n_tests);
	snprintf(r->once, sizeof(r->once), "%s/once%d", sshd.dir, n_tests);
	expand(r, r->command, sizeof(r->command), args);
	r->o.n_embd = 8;
	r->o.connect_timeout_ms = 60000; /* a loaded machine must not fail the tests that are not about it */
	r->o.encode_timeout_ms = 120000;
	r->o.dead_after_ms = 60000;
	add_host(r, &sshd, r->host, r->command);
}

static inline void start(struct rig *r)
{
	struct fs_errbuf e;
	if (fs_vision_create(&r->o, &r->v, &e))
		fail_msg("%s", e.text);
}

static inline void rig_up(struct rig *r, const char *args)
{
	prepare(r, args);
	start(r);
}

static inline size_t count_log(const struct rig *r, const char *word)
{
	if (access(r->log, F_OK))
		return 0;
	char *text = test_read_file(r->log), *s = text;
	size_t n = 0, len = strlen(word);
	for (; s && *s; s = strchr(s, '\n') ? strchr(s, '\n') + 1 : NULL)
		n += !strncmp(s, word, len) && s[len] == ' ';
	free(text);
	return n;
}

static inline void wait_log(const struct rig *r, const char *word, size_t n)
{
	int64_t until = fs_deadline_ms(90000);
	while (count_log(r, word) < n) {
		if (fs_now() > until)
			fail_msg("the host never saw %zu x %s", n, word);
		poll(NULL, 0, 2);
	}
}

static inline void wait_state(const struct rig *r, size_t host, enum fs_host_state want)
{
	struct fs_host_status st[FS_VISION_MAX_HOSTS];
	int64_t until = fs_deadline_ms(90000);
	for (;;) {
		assert_true(fs_vision_status(r->v, st, FS_VISION_MAX_HOSTS) > host);
		if (st[host].state == want)
			return;
		if (fs_now() > until)
			fail_msg("host is %s (%s), not %s", fs_host_state_name(st[host].state),
			        st[host].cause, fs_host_state_name(want));
		poll(NULL, 0, 2);
	}
}

static const uint8_t key[32] = {1, 2, 3};

static inline struct fs_vision_job *submit(struct rig *r, size_t n, uint8_t fill, struct fs_cancel *c)
{
	uint8_t *picture = malloc(n);
	struct fs_vision_job *j = NULL;
	struct fs_errbuf e;
	memset(picture, fill, n);
	int rc = fs_vision_submit(r->v, picture, n, key, NULL, c, &j, &e);
	free(picture);
	if (rc)
		fail_msg("%s: %s", fs_err_name(rc), e.text);
	return j;
}

/* The rule of fake_agent's rows. */
static inline void check_rows(const struct fs_rows *rows, size_t picture_n, uint8_t fill)
{
	size_t n = (size_t)rows->shape.n_tokens * (size_t)rows->shape.n_embd;
	uint64_t sum = (uint64_t)picture_n * fill;
	for (size_t i = 0; i < n; i++)
		if (memcmp(&rows->data[i], &(float){(float)((sum + i) % 1000) / 8.0f}, sizeof(float)))
			fail_msg("element %zu is %g", i, (double)rows->data[i]);
	assert_memory_equal(rows->key, key, sizeof(key));
}

static inline void good_encode(struct rig *r, size_t n, uint8_t fill)
{
	struct fs_vision_job *j = submit(r, n, fill, NULL);
	struct fs_rows *rows = NULL;
	struct fs_errbuf e;
	int rc = fs_vision_wait(j, &rows, &e);
	if (rc)
		fail_msg("%s: %s", fs_err_name(rc), e.text);
	check_rows(rows, n, fill);
	fs_rows_unref(rows);
	fs_vision_job_destroy(j);
}

/* From submission to the end, wherever it is refused. */
static inline void bad_encode(struct rig *r, int err, const char *want)
{
	struct fs_vision_job *j = NULL;
	struct fs_rows *rows = NULL;
	struct fs_errbuf e = {""};
	int rc = fs_vision_submit(r->v, "picture", 7, key, NULL, NULL, &j, &e);
	if (!rc)
		rc = fs_vision_wait(j, &rows, &e);
	if (rc != err || !strstr(e.text, want))
		fail_msg("got %s \"%s\", want %s with \"%s\"", fs_err_name(rc), e.text, fs_err_name(err),
		        want);
	fs_vision_job_destroy(j);
}

/* ---- the program around the tests ---- */

static inline int two_sshds(void **state)
{
	unsetenv("SSH_AUTH_SOCK");
	if (!getenv("FS_LOG"))
		fs_log_set_level(FS_LOG_ERROR);
	test_sshd_init(&sshd, NULL);
	test_sshd_init(&sshd2, NULL);
	return 0;
}

static inline int no_sshds(void **state)
{
	test_sshd_finish(&sshd);
	test_sshd_finish(&sshd2);
	return 0;
}

/* What main does, once it has its array of tests; an argument chooses some by name. */
#define vision_tests(tests, argc, argv)                                                                      \
	(vision_tests_can_run(argc, argv) ? cmocka_run_group_tests(tests, two_sshds, no_sshds) : 77)

static inline bool vision_tests_can_run(int argc, char **argv)
{
	agent = getenv("FS_FAKE_AGENT");
	if (!agent) {
		fprintf(stderr, "FS_FAKE_AGENT must name the fake_agent program\n");
		exit(1);
	}
	if (argc > 1)
		cmocka_set_test_filter(argv[1]);
	return test_sshd_available();
}

#endif
