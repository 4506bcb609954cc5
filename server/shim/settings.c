/*
 * What farsight-remote is told: the arguments of an encoder, and the environment in which Strata's own
 * wrapper is set up. Runs before any thread starts.
 */
#include "common/gguf/gguf.h"
#include "server/shim/shim.h"
#include "server/vision/settings.h"

#include <errno.h>
#include <getopt.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char usage[] =
        "usage: farsight-remote --mmproj FILE [--model FILE] [--gpu] [--threads N] [--max-tokens N]\n"
        "                       [--min-tokens N] [--config FILE] [--log-level LEVEL]\n"
        "An encoder of the line protocol (docs/PROTOCOL.md) that works on a vision host.\n"
        "  --mmproj FILE     when this file exists here, the host must have the same model\n"
        "  --model, --gpu, --threads: taken, and left to the host's own configuration\n"
        "  --config FILE     the server's config, for hosts without STRATA_VISION_SSH; default:\n"
        "                    FARSIGHT_CONFIG, else ~/.config/farsight/server.json when there is one\n"
        "Environment:\n"
        "  STRATA_VISION_SSH            user@host or an alias of ~/.ssh/config\n"
        "  STRATA_VISION_SSH_OPTS       -p, -i, -l, -F, -o Port=, IdentityFile=, User=,\n"
        "                               UserKnownHostsFile= as for ssh\n"
        "  STRATA_VISION_ROOT           folder on the host that holds bin/farsight-agent\n"
        "  STRATA_VISION_LIVENESS_PORT  port of this machine that shows the host that it is still used\n"
        "  STRATA_VISION_PROBE_FAILS    failed probes of it in a row that end the host's encoder\n"
        "  STRATA_VISION_TIMEOUT        seconds for one picture; default 300\n"
        "  STRATA_VISION_START_TIMEOUT  seconds until the host is ready; default 180\n";

#define LONGEST_S 86400.0

/* ---- environment ---- */

static const char *env(const char *name)
{
	const char *v = getenv(name);
	return v && *v ? v : NULL;
}

/* A number of the environment; one that is none counts as absent, as those who set it are used to. */
static bool env_number(const char *name, double *out)
{
	const char *v = env(name);
	char *end;
	if (!v)
		return false;
	*out = strtod(v, &end);
	if (*end || !isfinite(*out)) {
		fs_warn("%s is no number (\"%.60s\") and is left out", name, v);
		return false;
	}
	return true;
}

/* Seconds by name, else a share of what the server itself waits, else the default. 0 and less mean as long as
 * it takes; there is an end all the same. */
static int timeout_ms(const char *name, const char *server_name, double least_s, double default_s)
{
	double s = default_s, server;
	if (!env_number(name, &s) && env_number(server_name, &server))
		s = server <= 0 ? LONGEST_S : FS_MAX(0.8 * server, least_s);
	if (s <= 0 || s > LONGEST_S)
		s = LONGEST_S;
	return (int)FS_MAX(s * 1000, 1.0);
}

static int env_whole(const char *name, double min, double max, int *out, struct fs_errbuf *e)
{
	double v;
	if (!env_number(name, &v))
		return FS_OK;
	if (v < min || v > max || v != floor(v))
		return fs_fail(e, FS_EINVAL, "%s must be a whole number from %.0f to %.0f", name, min, max);
	*out = (int)v;
	return FS_OK;
}

static int host_of_environment(struct shim_opts *o, const char *host, struct fs_errbuf *e)
{
	const char *opts = env("STRATA_VISION_SSH_OPTS"), *root = env("STRATA_VISION_ROOT");
	int rc = shim_ssh_opts(opts ? opts : "", &o->ssh, e);
	if (!rc && root)
		rc = shim_agent_command(root, o->command, sizeof(o->command), e);
	if (rc)
		return rc;
	bool add_user = *o->ssh.user && !strchr(host, '@');
	int n = snprintf(
	        o->host, sizeof(o->host), "%s%s%s", add_user ? o->ssh.user : "", add_user ? "@" : "", host);
	if ((size_t)n >= sizeof(o->host))
		return fs_fail(e, FS_ELIMIT, "STRATA_VISION_SSH is too long");
	struct fs_vision_host_opts h = {.host = o->host};
	for (size_t i = 0; i < o->vision.n_hosts; i++)
		if (strcmp(o->vision.hosts[i].host, o->host) == 0)
			h = o->vision.hosts[i]; /* the config knows more of it; the environment goes before */
	h.port = o->ssh.port ? o->ssh.port : h.port;
	h.identity = *o->ssh.identity ? o->ssh.identity : h.identity;
	h.known_hosts = *o->ssh.known_hosts ? o->ssh.known_hosts : h.known_hosts;
	h.config_file = *o->ssh.config ? o->ssh.config : h.config_file;
	h.command = *o->command ? o->command : h.command;
	o->vision.hosts[0] = h;
	o->vision.n_hosts = 1;
	return FS_OK;
}

static int read_environment(struct shim_opts *o, const char *config, struct fs_errbuf *e)
{
	const char *host = env("STRATA_VISION_SSH");
	struct fs_vision_opts *v = &o->vision;
	char path[SHIM_TEXT];
	fs_config_find(config, path, sizeof(path));
	int rc = *path ? fs_config_load(&o->config, path, e) : FS_OK;
	if (rc)
		return rc;
	fs_vision_opts_from_config(&o->config, v);
	if (host)
		rc = host_of_environment(o, host, e);
	else if (v->n_hosts == 0)
		rc = fs_fail(e, FS_EINVAL,
		        "no vision host: set STRATA_VISION_SSH to user@host, or name one in \"vision.hosts\" "
		        "of %s",
		        *path ? path : "~/.config/farsight/server.json");
	if (!rc)
		rc = env_whole("STRATA_VISION_LIVENESS_PORT", 0, 65535, &v->liveness_port, e);
	if (!rc)
		rc = env_whole("STRATA_VISION_PROBE_FAILS", 1, 1000, &v->probe_fails, e);
	v->encode_timeout_ms = timeout_ms("STRATA_VISION_TIMEOUT", "STRATA_VISION_ENCODE_S", 15, 300);
	o->start_timeout_ms = timeout_ms("STRATA_VISION_START_TIMEOUT", "STRATA_VISION_READY_S", 1, 180);
	v->program = "farsight-remote";
	return rc;
}

/* ---- command line ---- */

/* The host must have the mmproj that the server was set up with; without the file here any will do. */
static void want_model(struct shim_opts *o, const char *mmproj)
{
	struct fs_gguf *g;
	struct fs_errbuf e;
	if (access(mmproj, F_OK) != 0) {
		fs_info("%s is not on this machine; any model of the vision host will do", mmproj);
		return;
	}
	int rc = fs_gguf_open(&g, mmproj, &e);
	if (!rc) {
		rc = fs_gguf_fingerprint(g, o->fingerprint, &e);
		fs_gguf_close(g);
	}
	if (rc)
		fs_warn("the vision host's model is not compared with %s: %s", mmproj, e.text);
	else
		o->vision.fingerprint = o->fingerprint;
}

static int number(const char *option, const char *text, int max, int32_t *out, struct fs_errbuf *e)
{
	char *end;
	errno = 0;
	long v = strtol(text, &end, 10);
	if (!*text || *end || errno || v < 1 || v > max)
		return fs_fail(
		        e, FS_EINVAL, "%s wants a number from 1 to %d, not \"%.60s\"", option, max, text);
	*out = (int32_t)v;
	return FS_OK;
}

struct arguments {
	const char *mmproj, *config;
	int32_t max_tokens, min_tokens, threads;
	bool answered;
};

static int take_argument(struct arguments *a, int opt, char **argv, struct fs_errbuf *e)
{
	enum fs_log_level level;
	switch (opt) {
	case 'p':
		a->mmproj = optarg;
		return FS_OK;
	case 'm':
	case 'g':
		return FS_OK; /* the host's configuration says */
	case 't':
		return number("--threads", optarg, 1024, &a->threads, e);
	case 'x':
		return number("--max-tokens", optarg, FS_ROWS_MAX_TOKENS, &a->max_tokens, e);
	case 'n':
		return number("--min-tokens", optarg, FS_ROWS_MAX_TOKENS, &a->min_tokens, e);
	case 'c':
		a->config = optarg;
		return FS_OK;
	case 'l':
		if (fs_log_parse_level(optarg, &level))
			return fs_fail(e, FS_EINVAL, "--log-level knows error, warn, info and debug");
		fs_log_set_level(level);
		return FS_OK;
	case 'h':
	case 'V':
		fputs(opt == 'h' ? usage : "farsight-remote " FS_VERSION "\n", stdout);
		a->answered = true;
		return FS_OK;
	default:
		return fs_fail(
		        e, FS_EINVAL, "unknown option, or one without its value: %.100s", argv[optind - 1]);
	}
}

int shim_opts_read(struct shim_opts *o, int argc, char **argv, struct fs_errbuf *e)
{
	static const struct option options[] = {{"mmproj", required_argument, NULL, 'p'},
	        {"model", required_argument, NULL, 'm'}, {"gpu", no_argument, NULL, 'g'},
	        {"threads", required_argument, NULL, 't'}, {"max-tokens", required_argument, NULL, 'x'},
	        {"min-tokens", required_argument, NULL, 'n'}, {"config", required_argument, NULL, 'c'},
	        {"log-level", required_argument, NULL, 'l'}, {"help", no_argument, NULL, 'h'},
	        {"version", no_argument, NULL, 'V'}, {0}};
	struct arguments a = {0};
	int opt, rc = FS_OK;
	memset(o, 0, sizeof(*o));
	fs_config_init(&o->config);
	opterr = 0;
	while (!rc && !a.answered && (opt = getopt_long(argc, argv, "", options, NULL)) != -1)
		rc = take_argument(&a, opt, argv, e);
	if (a.answered)
		return 1;
	if (!rc && optind < argc)
		rc = fs_fail(e, FS_EINVAL, "unexpected argument: %.100s", argv[optind]);
	if (!rc && !a.mmproj)
		rc = fs_fail(e, FS_EINVAL, "--mmproj is missing");
	if (!rc && a.max_tokens && a.min_tokens > a.max_tokens)
		rc = fs_fail(e, FS_EINVAL, "--min-tokens is larger than --max-tokens");
	if (!rc)
		rc = read_environment(o, a.config, e);
	if (rc)
		return rc;
	if (a.max_tokens)
		o->vision.max_tokens = a.max_tokens;
	if (a.min_tokens)
		o->vision.min_tokens = a.min_tokens;
	want_model(o, a.mmproj);
	return FS_OK;
}

void shim_opts_finish(struct shim_opts *o)
{
	fs_config_finish(&o->config);
}
