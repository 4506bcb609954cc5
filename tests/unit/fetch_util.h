/*
 * What the tests of server/fetch share: a web server, and libcurl's view of the world. Names are answered by
 * a getaddrinfo of this file, which libcurl calls instead of libc's, and connections to one public address
 * are led to the server: so the way of a public URL is walked whole, and each connection that libcurl opens
 * is counted. For one file of a test program.
 */
#ifndef FS_TEST_FETCH_UTIL_H
#define FS_TEST_FETCH_UTIL_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "server/fetch/fetch.h"
#include "tests/unit/web.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <dlfcn.h>
#include <netdb.h>
#include <poll.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#define PUBLIC "93.184.216.34"
#define NOT_FETCHED "the picture's URL could not be fetched"
#define LONG_MS 60000 /* where only a hang would reach it */

static struct web *web;
static struct fs_errbuf e;

/* ---- names and connections, as libcurl sees them ---- */

static atomic_int connects;    /* to IP addresses, of libcurl */
static atomic_int looking_up;  /* threads inside a look-up of slow.test */
static atomic_bool names_stay; /* slow.test is not answered while set */

static const struct {
	const char *name, *addrs[3];
} names[] = {
        {"public.test", {PUBLIC}},
        {"slow.test", {PUBLIC}},
        {"inside.test", {"127.0.0.1"}},
        {"nas.test", {"127.0.0.1"}},
        {"mixed.test", {"127.0.0.1", PUBLIC}},
        {"meta.test", {"169.254.169.254"}},
};

static int look_up(const char *host, const char *service, const struct addrinfo *hints, struct addrinfo **out)
{
	int (*next)(const char *, const char *, const struct addrinfo *, struct addrinfo **);
	*(void **)&next = dlsym(RTLD_NEXT, "getaddrinfo");
	return next(host, service, hints, out);
}

int getaddrinfo(const char *restrict host, const char *restrict service,
        const struct addrinfo *restrict hints, struct addrinfo **restrict out)
{
	if (host && strcmp(host, "slow.test") == 0) {
		atomic_fetch_add(&looking_up, 1);
		while (atomic_load(&names_stay))
			poll(NULL, 0, 2);
		atomic_fetch_sub(&looking_up, 1);
	}
	for (size_t i = 0; host && i < FS_ARRAY_LEN(names); i++) {
		if (strcasecmp(names[i].name, host) != 0)
			continue;
		struct addrinfo h = {.ai_socktype = hints->ai_socktype, .ai_flags = AI_NUMERICHOST};
		for (size_t k = 0; k < 3 && names[i].addrs[k]; k++, out = &(*out)->ai_next)
			if (look_up(names[i].addrs[k], service, &h, out) != 0)
				return EAI_NONAME;
		return 0;
	}
	return host && strstr(host, ".test") ? EAI_NONAME : look_up(host, service, hints, out);
}

int connect(int fd, __CONST_SOCKADDR_ARG to, socklen_t n)
{
	int (*next)(int, const struct sockaddr *, socklen_t);
	*(void **)&next = dlsym(RTLD_NEXT, "connect");
	struct sockaddr_in a = {0};
	if (to.__sockaddr__->sa_family == AF_INET || to.__sockaddr__->sa_family == AF_INET6)
		atomic_fetch_add(&connects, 1);
	if (to.__sockaddr__->sa_family != AF_INET || n != sizeof(a))
		return next(fd, to.__sockaddr__, n);
	memcpy(&a, to.__sockaddr__, sizeof(a));
	if (a.sin_addr.s_addr == inet_addr(PUBLIC))
		a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	return next(fd, (struct sockaddr *)&a, n);
}

/* ---- helpers ---- */

static int open_files(void)
{
	int n = 0;
	DIR *d = opendir("/proc/self/fd");
	while (readdir(d))
		n++;
	closedir(d);
	return n;
}

static int files_before;

static int setup(void **state)
{
	signal(SIGPIPE, SIG_IGN);
	files_before = open_files();
	web = web_start(false);
	atomic_store(&connects, 0);
	atomic_store(&names_stay, false);
	return 0;
}

/* Look-ups that outlive the fetch end in threads of libcurl, a moment after they are answered. */
static int teardown(void **state)
{
	web_stop(web);
	int64_t until = fs_deadline_ms(LONG_MS);
	while (open_files() != files_before && fs_now() < until)
		poll(NULL, 0, 5);
	return open_files() == files_before ? 0 : -1;
}

static struct fs_fetch_opts opts(void)
{
	return (struct fs_fetch_opts){.enabled = true,
	        .max_bytes = 100000,
	        .timeout_ms = LONG_MS,
	        .connect_timeout_ms = LONG_MS,
	        .stall_s = 60,
	        .max_redirects = 3};
}

static struct fs_fetch *create(struct fs_fetch_opts o)
{
	struct fs_fetch *f;
	assert_int_equal(fs_fetch_create(&o, &f, &e), FS_OK);
	return f;
}

/* "http://<host>:<port of the server><path>" in a buffer that the next call overwrites. */
static const char *url_of(const char *host, const char *path)
{
	static char url[256];
	snprintf(url, sizeof(url), "http://%s:%d%s", host, web_port(web), path);
	return url;
}

static struct fs_fetch_job *submit(struct fs_fetch *f, const char *url, struct fs_cancel *cancel)
{
	struct fs_fetch_job *j;
	assert_int_equal(fs_fetch_submit(f, url, cancel, &j, &e), FS_OK);
	return j;
}

/* Waits, checks the bytes, and destroys. */
static int wait_size(struct fs_fetch_job *j, size_t *n)
{
	uint8_t *bytes;
	e.text[0] = '\0';
	int rc = fs_fetch_wait(j, &bytes, n, &e);
	if (rc == FS_OK) {
		for (size_t i = 0; i < *n; i++)
			assert_int_equal(bytes[i], web_byte(i));
		free(bytes);
	}
	fs_fetch_job_destroy(j);
	return rc;
}

__attribute__((unused)) static int get(struct fs_fetch *f, const char *url, size_t *n)
{
	struct fs_fetch_job *j;
	int rc = fs_fetch_submit(f, url, NULL, &j, &e);
	return rc ? rc : wait_size(j, n);
}

__attribute__((unused)) static void assert_not_fetched(struct fs_fetch *f, const char *url)
{
	size_t n;
	int rc = get(f, url, &n);
	if (rc != FS_EINVAL || strcmp(e.text, NOT_FETCHED) != 0)
		fail_msg("%s: %d %s", url, rc, e.text);
}

/* Until the value is there, or LONG_MS. */
static void wait_for(int (*value)(struct web *), int want)
{
	int64_t until = fs_deadline_ms(LONG_MS);
	while (value(web) != want && fs_now() < until)
		poll(NULL, 0, 2);
	assert_int_equal(value(web), want);
}

__attribute__((unused)) static int look_ups(struct web *w)
{
	return atomic_load(&looking_up);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

#endif
