/* What all subcommands share: errors, numbers, the config and the server that it speaks of, signals. */
#include "server/cli/cli.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/signalfd.h>
#include <unistd.h>

int cli_failed(const struct fs_errbuf *e)
{
	fflush(stdout);
	fprintf(stderr, "farsight: %s\n", e->text);
	return CLI_FAILED;
}

int cli_misused(const char *subcommand, const char *fmt, ...)
{
	va_list ap;
	fputs("farsight: ", stderr);
	va_start(ap, fmt);
	vfprintf(stderr, fmt, ap);
	va_end(ap);
	fprintf(stderr, "\nfarsight: \"farsight %s --help\" tells more\n", subcommand);
	return CLI_USAGE;
}

void cli_print(FILE *f, const char *text)
{
	if (!isatty(fileno(f))) {
		fputs(text, f);
		return;
	}
	for (const unsigned char *p = (const unsigned char *)text; *p; p++) {
		bool c1 = p[0] == 0xc2 && p[1] >= 0x80 && p[1] < 0xa0; /* U+0080 to U+009F */
		p += c1;
		putc(c1 || (*p < 0x20 && *p != '\n' && *p != '\t') || *p == 0x7f ? '?' : *p, f);
	}
}

int cli_number(
        const char *option, const char *text, int64_t min, int64_t max, int64_t *out, struct fs_errbuf *e)
{
	char *end;
	errno = 0;
	long long v = strtoll(text, &end, 10);
	if (*text == '\0' || *end != '\0' || errno || v < min || v > max)
		return fs_fail(e, FS_EINVAL, "%s wants a whole number from %lld to %lld, not \"%.100s\"",
		        option, (long long)min, (long long)max, text);
	*out = v;
	return FS_OK;
}

int cli_read_picture(const char *path, struct fs_buf *b, struct fs_errbuf *e)
{
	int rc = fs_buf_append_file(b, path, e);
	return !rc && b->len == 0 ? fs_fail(e, FS_EINVAL, "%s is empty", path) : rc;
}

/* ---- config ---- */

int cli_config(const char *given, struct fs_config *c, char path[CLI_PATH], struct fs_errbuf *e)
{
	char own[CLI_PATH];
	path = path ? path : own;
	fs_config_init(c);
	fs_config_find(given, path, CLI_PATH);
	return *path ? fs_config_load(c, path, e) : FS_OK;
}

/* ---- the server ---- */

/* "listen" as a client reaches it: all addresses include loopback. */
static int url_of_listen(const char *listen, char *url, size_t cap, struct fs_errbuf *e)
{
	const char *colon = strrchr(listen, ':');
	int n = colon ? (int)(colon - listen) : 0;
	if (!colon || strcmp(colon, ":0") == 0)
		return fs_fail(e, FS_EINVAL,
		        "\"listen\" of the config (%.200s) does not tell the port: name the server with "
		        "--server http://ADDRESS:PORT",
		        listen);
	if (n == 0 || strncmp(listen, "0.0.0.0", (size_t)n) == 0)
		snprintf(url, cap, "http://127.0.0.1%s", colon);
	else if (strncmp(listen, "[::]", (size_t)n) == 0)
		snprintf(url, cap, "http://[::1]%s", colon);
	else
		snprintf(url, cap, "http://%s", listen);
	return FS_OK;
}

int cli_server_url(const char *text, struct fs_errbuf *e)
{
	bool good = strlen(text) < sizeof(((struct cli_server *)0)->url) &&
	            (!strncmp(text, "http://", 7) || !strncmp(text, "https://", 8));
	return good ? FS_OK : fs_fail(e, FS_EINVAL, "--server takes an http(s) URL, not \"%.200s\"", text);
}

int cli_server_find(const struct fs_config *c, const char *given, struct cli_server *out, struct fs_errbuf *e)
{
	const char *env = getenv("FARSIGHT_SERVER"), *key = getenv("FARSIGHT_API_KEY");
	char own[sizeof(out->url)] = "";
	*out = (struct cli_server){0};
	if (!given && env && *env)
		given = env;
	int rc = url_of_listen(c->listen, own, sizeof(own), given ? NULL : e);
	if (!given && rc)
		return rc;
	given = given ? given : own;
	size_t n = strlen(given);
	while (n > 0 && given[n - 1] == '/')
		n--;
	rc = cli_server_url(given, e);
	if (rc)
		return rc;
	memcpy(out->url, given, n);
	/* the config's key belongs to the config's server and is told to no other */
	if ((!key || !*key) && c->api_key.n && strcmp(out->url, own) == 0)
		key = c->api_key.items[0];
	if (key && strlen(key) >= sizeof(out->key))
		return fs_fail(e, FS_ELIMIT, "the API key is longer than %zu bytes", sizeof(out->key) - 1);
	if (key && strpbrk(key, "\r\n"))
		return fs_fail(e, FS_EINVAL, "the API key holds a line break");
	snprintf(out->key, sizeof(out->key), "%s", key ? key : "");
	return FS_OK;
}

/* ---- signals ---- */

static void signals_of_interest(sigset_t *set)
{
	sigemptyset(set);
	sigaddset(set, SIGINT);
	sigaddset(set, SIGTERM);
	sigaddset(set, SIGHUP);
}

static void *wait_for_signals(void *arg)
{
	struct cli_stop *s = arg;
	sigset_t set;
	signals_of_interest(&set);
	struct pollfd p[2] = {
	        {.fd = signalfd(-1, &set, SFD_CLOEXEC), .events = POLLIN}, {.fd = s->wake, .events = POLLIN}};
	while (poll(p, 2, -1) < 0 && errno == EINTR)
		;
	if (p[0].revents) {
		fs_cancel_fire(s->token, FS_CANCEL_CLIENT);
		fs_wake(s->fired);
	}
	if (p[0].fd >= 0)
		close(p[0].fd);
	return NULL;
}

static void free_stop(struct cli_stop *s)
{
	fs_cancel_unref(s->token);
	if (s->wake >= 0)
		close(s->wake);
	if (s->fired >= 0)
		close(s->fired);
}

int cli_stop_init(struct cli_stop *s, struct fs_errbuf *e)
{
	sigset_t set;
	signals_of_interest(&set);
	*s = (struct cli_stop){
	        .token = fs_cancel_create(FS_NEVER), .wake = fs_wake_open(), .fired = fs_wake_open()};
	int rc = FS_OK;
	if (!s->token)
		rc = fs_fail(e, FS_ENOMEM, "out of memory");
	else if (s->wake < 0 || s->fired < 0)
		rc = fs_fail_errno(e, FS_EIO, "can not open an eventfd");
	if (!rc) {
		pthread_sigmask(SIG_BLOCK, &set, NULL);
		rc = fs_thread_start(&s->thread, "cli-signals", wait_for_signals, s, e);
	}
	if (rc)
		free_stop(s);
	return rc;
}

void cli_stop_finish(struct cli_stop *s)
{
	fs_wake(s->wake);
	pthread_join(s->thread, NULL);
	free_stop(s);
}
