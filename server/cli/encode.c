/*
 * farsight encode: one picture to a rows file, by the way that the server takes: the vision hosts of the
 * config, one named on the command line, or an encoder on this machine.
 */
#include "server/cli/cli.h"
#include "server/vision/settings.h"

#include <getopt.h>
#include <openssl/evp.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>

static const char usage[] =
        "usage: farsight encode PICTURE [--out ROWS.sve] [options]\n"
        "Encodes a picture as the server would, and prints the number of its rows, their grid and the "
        "times.\n"
        "  --out FILE        where the rows go (docs/PROTOCOL.md, \"Rows files\"); without: nowhere\n"
        "  --host HOST       on this vision host (alias, host or user@host[:port]); more of it: --config\n"
        "  --mmproj FILE     on this machine, with this mmproj\n"
        "  --config FILE     the server's config, whose vision section says where and how; default:\n"
        "                    FARSIGHT_CONFIG, else ~/.config/farsight/server.json when there is one\n"
        "  --min-tokens N    fewest rows\n"
        "  --max-tokens N    most rows\n"
        "  --timeout S       seconds in all; default 300\n"
        "  --verbose         tells what is done to reach the encoder\n";

struct encode {
	const char *picture, *out, *host, *mmproj, *config;
	int64_t min_tokens, max_tokens, timeout_s;
	bool verbose;
};

/* ---- where ---- */

static void options_local(const struct encode *a, const struct fs_config *c, struct fs_vision_local_opts *l,
        char exe[CLI_PATH], struct fs_vision_opts *o)
{
	fs_vision_local_from_config(c, exe, CLI_PATH, l);
	l->elastic = false; /* it has one picture to do */
	if (a->mmproj)
		l->mmproj = a->mmproj;
	o->n_hosts = 0;
	o->local = l;
}

/* A host of the config by its name there; else the name as ssh has it. */
static void options_host(const struct encode *a, struct fs_vision_opts *o)
{
	struct fs_vision_host_opts h = {.host = a->host};
	for (size_t i = 0; i < o->n_hosts; i++)
		if (strcmp(o->hosts[i].host, a->host) == 0)
			h = o->hosts[i];
	o->hosts[0] = h;
	o->n_hosts = 1;
}

static int options(const struct encode *a, const struct fs_config *c, struct fs_vision_local_opts *l,
        char exe[CLI_PATH], struct fs_vision_opts *o, struct fs_errbuf *e)
{
	fs_vision_opts_from_config(c, o);
	o->program = "farsight encode";
	o->encode_timeout_ms = (int)a->timeout_s * 1000;
	if (a->host)
		options_host(a, o);
	else if (a->mmproj || c->vision.mmproj)
		options_local(a, c, l, exe, o);
	else if (o->n_hosts == 0)
		return fs_fail(e, FS_EINVAL,
		        "where? The config names no vision host and no mmproj: give --host or --mmproj");
	return FS_OK;
}

/* ---- the work ---- */

/* Until one of the hosts is up, or all have failed once, or time is over; a submit then tells the cause. */
static void wait_for_host(struct fs_vision *v, int64_t until, struct fs_cancel *cancel, int cancel_fd)
{
	while (!fs_cancelled(cancel) && fs_now() < until) {
		struct fs_host_status st[FS_VISION_MAX_HOSTS];
		struct pollfd p[2] = {
		        {.fd = fs_vision_news(v), .events = POLLIN}, {.fd = cancel_fd, .events = POLLIN}};
		bool hope = false;
		fs_wake_drain(p[0].fd);
		size_t n = fs_vision_status(v, st, FS_ARRAY_LEN(st));
		for (size_t i = 0; i < n; i++) {
			if (st[i].state == FS_HOST_UP)
				return;
			hope = hope || st[i].state != FS_HOST_DOWN;
		}
		if (!hope)
			return;
		poll(p, 2, fs_poll_ms(until));
	}
}

/* Who had it, or was waited for, tells more than that time is over. */
static int say_late(struct fs_vision *v, const struct encode *a, struct fs_errbuf *e)
{
	struct fs_host_status st[FS_VISION_MAX_HOSTS];
	char who[400] = "";
	size_t n = fs_vision_status(v, st, FS_ARRAY_LEN(st)), at = 0;
	for (size_t i = 0; i < n && at < sizeof(who); i++)
		at += (size_t)snprintf(who + at, sizeof(who) - at, "; %s is %s%s%s", st[i].host,
		        fs_host_state_name(st[i].state), *st[i].cause ? ": " : "", st[i].cause);
	return fs_fail(
	        e, FS_ETIMEOUT, "the picture was not encoded within %lld s%s", (long long)a->timeout_s, who);
}

static int one_picture(struct fs_vision *v, const struct encode *a, const struct fs_buf *picture,
        struct cli_stop *stop, struct fs_rows **rows, struct fs_errbuf *e)
{
	struct fs_encode_params params = {(int32_t)a->min_tokens, (int32_t)a->max_tokens};
	struct fs_vision_job *job;
	uint8_t key[EVP_MAX_MD_SIZE];
	if (EVP_Digest(picture->data, picture->len, key, NULL, EVP_sha256(), NULL) != 1)
		return fs_fail(e, FS_EINTERNAL, "SHA-256 failed");
	wait_for_host(v, fs_cancel_deadline(stop->token), stop->token, stop->fired);
	int rc = fs_vision_submit(v, picture->data, picture->len, key, &params, stop->token, &job, e);
	if (!rc) {
		rc = fs_vision_wait(job, rows, e);
		fs_vision_job_destroy(job);
	}
	/* The host has the same deadline, and may be the first to notice it. */
	bool late = fs_cancel_cause(stop->token) == FS_CANCEL_DEADLINE ||
	            (rc == FS_ETIMEOUT && fs_now() > fs_cancel_deadline(stop->token) - FS_SEC);
	return rc && late ? say_late(v, a, e) : rc;
}

static int report(const struct encode *a, const struct fs_rows *r, struct fs_errbuf *e)
{
	const struct fs_rows_shape *s = &r->shape;
	int rc = a->out ? fs_rows_replace_file(a->out, s, r->data, e) : FS_OK;
	if (rc)
		return rc;
	printf("%d tokens, %d x %d, %d values each, from %s\n", s->n_tokens, s->nx, s->ny, s->n_embd,
	        r->host);
	printf("%.1f ms in all, encoder %.1f ms, queue there %.1f ms\n", r->total_ms, r->encode_ms,
	        r->queue_ms);
	return FS_OK;
}

static int encode(const struct encode *a, struct fs_errbuf *e)
{
	struct fs_config config;
	struct fs_vision_opts o;
	struct fs_vision_local_opts local;
	char exe[CLI_PATH];
	struct fs_vision *v = NULL;
	struct fs_rows *rows = NULL;
	struct cli_stop stop;
	struct fs_buf picture;
	int64_t until = fs_deadline_ms(a->timeout_s * 1000);
	fs_buf_init(&picture, FS_PICTURE_MAX);
	int rc = cli_config(a->config, &config, NULL, e);
	if (!rc)
		rc = options(a, &config, &local, exe, &o, e);
	if (!rc)
		rc = cli_read_picture(a->picture, &picture, e);
	if (!rc)
		rc = cli_stop_init(&stop, e);
	if (!rc) {
		fs_cancel_shorten(stop.token, until); /* for the wait and the encode together */
		rc = fs_vision_create(&o, &v, e);
		if (!rc)
			rc = one_picture(v, a, &picture, &stop, &rows, e);
		fs_vision_destroy(v);
		cli_stop_finish(&stop);
	}
	if (!rc)
		rc = report(a, rows, e);
	fs_rows_unref(rows);
	fs_buf_finish(&picture);
	fs_config_finish(&config);
	return rc;
}

/* ---- the command line ---- */

static int read_options(struct encode *a, int argc, char **argv, struct fs_errbuf *e)
{
	static const struct option long_options[] = {{"out", required_argument, NULL, 'o'},
	        {"host", required_argument, NULL, 'H'}, {"mmproj", required_argument, NULL, 'm'},
	        {"config", required_argument, NULL, 'c'}, {"min-tokens", required_argument, NULL, 'n'},
	        {"max-tokens", required_argument, NULL, 'x'}, {"timeout", required_argument, NULL, 'T'},
	        {"verbose", no_argument, NULL, 'v'}, {"help", no_argument, NULL, 'h'}, {0}};
	int opt, rc = FS_OK;
	while (!rc && (opt = getopt_long(argc, argv, "", long_options, NULL)) != -1) {
		switch (opt) {
		case 'o':
			a->out = optarg;
			break;
		case 'H':
			a->host = optarg;
			break;
		case 'm':
			a->mmproj = optarg;
			break;
		case 'c':
			a->config = optarg;
			break;
		case 'n':
			rc = cli_number("--min-tokens", optarg, 1, FS_ROWS_MAX_TOKENS, &a->min_tokens, e);
			break;
		case 'x':
			rc = cli_number("--max-tokens", optarg, 1, FS_ROWS_MAX_TOKENS, &a->max_tokens, e);
			break;
		case 'T':
			rc = cli_number("--timeout", optarg, 1, 86400, &a->timeout_s, e);
			break;
		case 'v':
			a->verbose = true;
			break;
		case 'h':
			fputs(usage, stdout);
			return 1;
		default:
			return fs_fail(e, FS_EINVAL, "that is no command line for encode");
		}
	}
	if (!rc && argc - optind != 1)
		rc = fs_fail(e, FS_EINVAL, "encode takes one picture");
	if (!rc && a->host && a->mmproj)
		rc = fs_fail(e, FS_EINVAL, "choose --host or --mmproj");
	a->picture = rc ? NULL : argv[optind];
	return rc;
}

int cli_encode(int argc, char **argv)
{
	struct encode a = {.timeout_s = 300};
	struct fs_errbuf e = {""};
	int rc = read_options(&a, argc, argv, &e);
	if (rc > 0)
		return CLI_OK;
	if (rc)
		return cli_misused("encode", "%s", e.text);
	/* what goes wrong on the way is in the error; the log would say it twice */
	fs_log_set_level(a.verbose ? FS_LOG_DEBUG : FS_LOG_ERROR);
	return encode(&a, &e) ? cli_failed(&e) : CLI_OK;
}
