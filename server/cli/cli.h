/*
 * cli: the admin's command `farsight` and its subcommands, each in a file of its own. Every process does one
 * thing and ends: memory and threads live as long as the subcommand. Results go to stdout, errors to stderr
 * as "farsight: <text>"; the exit status is one of enum cli_exit. It is a client like any other: it asks a
 * running server through its HTTP API, and vision hosts through server/vision.
 */
#ifndef FS_SERVER_CLI_H
#define FS_SERVER_CLI_H

#include "server/config/config.h"

#include <jansson.h>

enum cli_exit {
	CLI_OK = 0,
	CLI_FAILED = 1, /* it was tried and did not work; the text says why */
	CLI_USAGE = 2,  /* nothing was tried: the command line is wrong */
};

/* argv[0] is the subcommand's name; getopt starts fresh. Each answers --help with its usage on stdout. */
int cli_host(int argc, char **argv);
int cli_ask(int argc, char **argv);
int cli_encode(int argc, char **argv);
int cli_status(int argc, char **argv);
int cli_stub(int argc, char **argv);

/* "farsight: <text>" on stderr; returns CLI_FAILED. */
int cli_failed(const struct fs_errbuf *e);
/* The same with the way to its usage behind it; returns CLI_USAGE. */
int cli_misused(const char *subcommand, const char *fmt, ...) FS_PRINTF(2, 3);
/* Text from elsewhere: on a terminal, control characters but newline and tab become '?'. */
void cli_print(FILE *f, const char *text);
/* A whole number from min to max. */
int cli_number(
        const char *option, const char *text, int64_t min, int64_t max, int64_t *out, struct fs_errbuf *e);

/* A picture's bytes into b, which is the caller's and bounds them. */
int cli_read_picture(const char *path, struct fs_buf *b, struct fs_errbuf *e);

/*
 * The server's config: `given`, else FARSIGHT_CONFIG, else ~/.config/farsight/server.json when that exists,
 * else the defaults. path gets its name ("" = none was read) and may be NULL. c is initialised here and the
 * caller's to finish, on failure too. A file that was named must exist and be right.
 */
#define CLI_PATH 4096
int cli_config(const char *given, struct fs_config *c, char path[CLI_PATH], struct fs_errbuf *e);

/* ---- a running server ---- */

struct cli_server {
	char url[512];  /* without a '/' at its end */
	char key[1024]; /* sent as "Authorization: Bearer"; "" = none */
};
/* Whether --server may be this. FS_EINVAL. */
int cli_server_url(const char *text, struct fs_errbuf *e);
/*
 * The server of `given` (a URL), else FARSIGHT_SERVER, else the config's "listen". The key is
 * FARSIGHT_API_KEY; else the config's first, for the server of the config alone.
 */
int cli_server_find(
        const struct fs_config *c, const char *given, struct cli_server *out, struct fs_errbuf *e);

/* What cli_http tells on the way; each returns FS_OK, or an error that ends the request. May be NULL. */
struct cli_http_events {
	int (*on_event)(void *arg, const char *data, size_t n, struct fs_errbuf *e); /* "data:" of a stream */
	void *arg;
};
/*
 * Sends one request (body NULL = GET) and waits for its end, timeout_s at most. *reply gets the JSON of the
 * answer; NULL for a stream whose events were told. A status other than 200 is an error with the server's
 * text. Ends early with FS_ECANCELLED when cancel fires.
 */
int cli_http(const struct cli_server *s, const char *path, const json_t *body, int64_t timeout_s,
        struct fs_cancel *cancel, const struct cli_http_events *events, json_t **reply, struct fs_errbuf *e);

/* Server-sent events, byte by byte: data has the bytes behind "data:" of each line. Public for tests. */
struct cli_sse {
	struct fs_buf line; /* its max bounds a line */
};
int cli_sse_feed(struct cli_sse *s, const char *bytes, size_t n, const struct cli_http_events *events,
        struct fs_errbuf *e);

/* ---- Ctrl-C and TERM as a cancel token, for subcommands that have something to put in order ---- */

struct cli_stop {
	struct fs_cancel *token;
	int fired; /* eventfd: readable once the token has fired */
	pthread_t thread;
	int wake; /* ends the thread */
};
/* Before any other thread starts, since it blocks the signals for all of them. */
int cli_stop_init(struct cli_stop *s, struct fs_errbuf *e);
void cli_stop_finish(struct cli_stop *s);

#endif
