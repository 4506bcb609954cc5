/* farsight status: what a running server says of itself, as tables for people. */
#include "server/cli/cli.h"

#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static const char usage[] = "usage: farsight status [--server URL] [--config FILE] [--json]\n"
                            "Shows engine, requests, cache and vision hosts of a running server.\n"
                            "  --server URL   default: FARSIGHT_SERVER, else \"listen\" of the config\n"
                            "  --config FILE  the server's config; default: FARSIGHT_CONFIG, else\n"
                            "                 ~/.config/farsight/server.json when there is one\n"
                            "  --json         the server's own answer\n";

#define STATUS_TIMEOUT_S 10

static const char *text(const json_t *o, const char *name, const char *otherwise)
{
	const char *s = json_string_value(json_object_get(o, name));
	return s ? s : otherwise;
}

static double number(const json_t *o, const char *name)
{
	return json_number_value(json_object_get(o, name));
}

/* ---- tables: cells of text, columns as wide as their widest cell ---- */

#define COLUMNS 10
#define ROWS 64
#define CELL 96
struct table {
	char cell[ROWS][COLUMNS][CELL];
	size_t rows, columns;
};

static void add_row(struct table *t, const char *const *cells)
{
	if (t->rows == ROWS)
		return;
	for (size_t i = 0; i < t->columns; i++)
		snprintf(t->cell[t->rows][i], CELL, "%s", cells[i] ? cells[i] : "");
	t->rows++;
}

/* Columns on a terminal, not bytes: continuation bytes have no width. */
static size_t width(const char *s)
{
	size_t n = 0;
	for (; *s; s++)
		n += ((unsigned char)*s & 0xc0) != 0x80;
	return n;
}

static void print_table(const struct table *t)
{
	size_t wide[COLUMNS] = {0};
	for (size_t r = 0; r < t->rows; r++)
		for (size_t c = 0; c < t->columns; c++)
			wide[c] = FS_MAX(wide[c], width(t->cell[r][c]));
	for (size_t r = 0; r < t->rows; r++) {
		fputs("  ", stdout);
		for (size_t c = 0; c < t->columns; c++) {
			cli_print(stdout, t->cell[r][c]);
			for (size_t i = width(t->cell[r][c]); i < wide[c] + 2 && c + 1 < t->columns; i++)
				putchar(' ');
		}
		putchar('\n');
	}
}

/* "3 s", "12 min", "5 h", "3 d" */
static const char *age(double s, char out[CELL])
{
	if (s < 120)
		snprintf(out, CELL, "%.0f s", s);
	else if (s < 7200)
		snprintf(out, CELL, "%.0f min", s / 60);
	else if (s < 172800)
		snprintf(out, CELL, "%.0f h", s / 3600);
	else
		snprintf(out, CELL, "%.0f d", s / 86400);
	return out;
}

static const char *size(double bytes, char out[CELL])
{
	if (bytes < 1048576)
		snprintf(out, CELL, "%.0f KiB", bytes / 1024);
	else
		snprintf(out, CELL, "%.1f MiB", bytes / 1048576);
	return out;
}

/* ---- sections ---- */

static void print_line(const char *line)
{
	cli_print(stdout, line);
	putchar('\n');
}

static void print_engine(const struct cli_server *s, const json_t *o)
{
	const json_t *e = json_object_get(o, "engine"), *turn = json_object_get(o, "turn");
	char line[1024];
	snprintf(line, sizeof(line), "%s: %s (%s) on %s, context %.0f", s->url, text(e, "model", "?"),
	        text(e, "arch", "?"), text(e, "device", "?"), number(e, "context"));
	print_line(line);
	snprintf(line, sizeof(line), "engine %s, %.0f waiting (at most %.0f)",
	        json_is_true(json_object_get(turn, "held")) ? "busy" : "idle", number(turn, "waiting"),
	        number(turn, "depth"));
	print_line(line);
}

static void print_totals(const json_t *o)
{
	const json_t *t = json_object_get(o, "totals"), *v, *cache = json_object_get(o, "cache");
	const char *name;
	char line[1024], since[64] = "?", a[CELL];
	time_t at = (time_t)number(t, "since");
	struct tm tm;
	if (localtime_r(&at, &tm))
		strftime(since, sizeof(since), "%Y-%m-%d %H:%M:%S", &tm);
	int n = snprintf(line, sizeof(line), "%.0f requests since %s", number(t, "requests"), since);
	json_object_foreach(json_object_get((json_t *)t, "finish"), name, v)
	{
		if (json_number_value(v) > 0 && n > 0 && (size_t)n < sizeof(line))
			n += snprintf(
			        line + n, sizeof(line) - (size_t)n, ", %s %.0f", name, json_number_value(v));
	}
	print_line(line);
	snprintf(line, sizeof(line), "%.0f tokens read, %.0f written, %.0f pictures (%.0f seen before)",
	        number(t, "prompt_tokens"), number(t, "completion_tokens"), number(t, "pictures"),
	        number(t, "pictures_cached"));
	print_line(line);
	if (!cache)
		return;
	snprintf(line, sizeof(line), "rows kept of %.0f pictures, %s", number(cache, "entries"),
	        size(number(cache, "bytes"), a));
	print_line(line);
}

static void print_requests(const json_t *o)
{
	struct table *t = calloc(1, sizeof(*t));
	const json_t *r;
	size_t i;
	if (!t || json_array_size(json_object_get(o, "requests")) == 0) {
		free(t);
		return;
	}
	t->columns = 6;
	add_row(t, (const char *const[]){"REQUEST", "API", "PHASE", "AGE", "TOKENS", "TOKENS/S"});
	json_array_foreach(json_object_get(o, "requests"), i, r)
	{
		char a[CELL], tokens[CELL], rate[CELL];
		snprintf(tokens, sizeof(tokens), "%.0f", number(r, "completion_tokens"));
		snprintf(rate, sizeof(rate), "%.1f", number(r, "tokens_per_s"));
		add_row(t, (const char *const[]){text(r, "id", "?"), text(r, "api", "?"),
		                   text(r, "phase", "?"), age(number(r, "age_s"), a), tokens, rate});
	}
	puts("\nrunning");
	print_table(t);
	free(t);
}

static void add_host(struct table *t, const json_t *h)
{
	char a[CELL], rtt[CELL], up[CELL], down[CELL], encodes[CELL], errors[CELL], queue[CELL], speed[CELL];
	bool known = number(h, "picture_ms") > 0, benched = number(h, "benched_s") > 0;
	snprintf(speed, sizeof(speed), known ? "%.0f ms" : "-", number(h, "picture_ms"));
	snprintf(rtt, sizeof(rtt), number(h, "rtt_ms") > 0 ? "%.1f ms" : "-", number(h, "rtt_ms"));
	snprintf(encodes, sizeof(encodes), "%.0f", number(h, "encodes"));
	snprintf(errors, sizeof(errors), "%.0f", number(h, "errors"));
	snprintf(queue, sizeof(queue), "%.0f", number(h, "outstanding"));
	add_row(t, (const char *const[]){text(h, "host", "?"), benched ? "benched" : text(h, "state", "?"),
	                   age(number(h, "state_age_s"), a), rtt, speed, encodes, errors, queue,
	                   size(number(h, "bytes_up"), up), size(number(h, "bytes_down"), down)});
}

static void print_hosts(const json_t *o)
{
	const json_t *v = json_object_get(o, "vision"), *hosts = json_object_get(v, "hosts"), *h;
	struct table *t = calloc(1, sizeof(*t));
	size_t i;
	if (!t || !json_is_true(json_object_get(v, "configured"))) {
		puts("no vision: pictures are refused");
		free(t);
		return;
	}
	t->columns = 10;
	add_row(t, (const char *const[]){"HOST", "STATE", "FOR", "PING", "PICTURE", "ENCODES", "ERRORS",
	                   "QUEUE", "SENT", "RECEIVED"});
	json_array_foreach(hosts, i, h)
	{
		add_host(t, h);
	}
	puts("\nvision");
	print_table(t);
	free(t);
	json_array_foreach(hosts, i, h)
	{
		char line[1024];
		const char *cause = text(h, "cause", NULL), *device = text(h, "device", NULL);
		if (cause || device) {
			snprintf(
			        line, sizeof(line), "  %s: %s", text(h, "host", "?"), cause ? cause : device);
			print_line(line);
		}
	}
}

static int status(const char *given, const char *path, bool as_json, struct fs_errbuf *e)
{
	struct fs_config config;
	struct cli_server server;
	json_t *o = NULL;
	int rc = cli_config(path, &config, NULL, e);
	if (!rc)
		rc = cli_server_find(&config, given, &server, e);
	if (!rc)
		rc = cli_http(&server, "/status", NULL, STATUS_TIMEOUT_S, NULL, NULL, &o, e);
	if (!rc && !json_is_object(json_object_get(o, "engine")))
		rc = fs_fail(e, FS_EFORMAT, "%s does not answer as farsight-server would", server.url);
	if (!rc && as_json) {
		json_dumpf(o, stdout, JSON_INDENT(2));
		putchar('\n');
	} else if (!rc) {
		print_engine(&server, o);
		print_totals(o);
		print_requests(o);
		print_hosts(o);
	}
	json_decref(o);
	fs_config_finish(&config);
	return rc;
}

int cli_status(int argc, char **argv)
{
	static const struct option options[] = {{"server", required_argument, NULL, 's'},
	        {"config", required_argument, NULL, 'c'}, {"json", no_argument, NULL, 'j'},
	        {"help", no_argument, NULL, 'h'}, {0}};
	const char *server = NULL, *config = NULL;
	bool as_json = false;
	struct fs_errbuf e = {""};
	int opt;
	while ((opt = getopt_long(argc, argv, "", options, NULL)) != -1) {
		switch (opt) {
		case 's':
			server = optarg;
			if (cli_server_url(server, &e))
				return cli_misused("status", "%s", e.text);
			break;
		case 'c':
			config = optarg;
			break;
		case 'j':
			as_json = true;
			break;
		case 'h':
			fputs(usage, stdout);
			return CLI_OK;
		default:
			return cli_misused("status", "that is no command line for status");
		}
	}
	if (optind < argc)
		return cli_misused("status", "status takes no \"%.100s\"", argv[optind]);
	return status(server, config, as_json, &e) ? cli_failed(&e) : CLI_OK;
}
