/*
 * farsight-server: reads the settings, puts engine, vision, service and HTTP together, and waits for a
 * signal. Runs on the main thread; the signal handler only sets a flag and wakes it.
 */
#include "common/gguf/gguf.h"
#include "server/api/api.h"
#include "server/config/config.h"
#include "server/fetch/fetch.h"
#include "server/http/http.h"
#include "server/reload.h"
#include "server/ssh/ssh.h"
#include "server/vision/settings.h"

#include <fcntl.h>
#include <getopt.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define CHORES_MS 10000
#define MAX_CONFIG_FILES 16

static volatile sig_atomic_t signals, hangups;
static int wake_fd = -1;
static struct fs_reload *reload; /* NULL until SIGHUP may come */
static bool ends_with_terminal;  /* it has one, and was not started to outlive it (nohup) */

static void on_signal(int sig)
{
	signals = signals + 1;
	fs_wake(wake_fd);
}

static void on_hangup(int sig)
{
	hangups = 1;
	fs_reload_ask(reload);
}

static bool has_terminal(void)
{
	int fd = open("/dev/tty", O_RDWR | O_NOCTTY | O_CLOEXEC);
	if (fd >= 0)
		close(fd);
	return fd >= 0;
}

static void usage(FILE *f)
{
	fputs("usage: farsight-server [--config FILE] [--set KEY=VALUE]... [--model FILE] [--listen "
	      "ADDRESS:PORT] [--log-level LEVEL]\n"
	      "       farsight-server --help | --help-config | --version\n"
	      "Serves OpenAI-style requests; pictures are encoded on the vision hosts of the config. "
	      "docs/CONFIG.md lists the keys.\n"
	      "SIGHUP has it read its settings again.\n",
	        f);
}

static int set_option(struct fs_config *c, const char *key, const char *value, struct fs_errbuf *e)
{
	char assignment[4200];
	snprintf(assignment, sizeof(assignment), "%s=%s", key, value);
	return fs_config_set(c, assignment, e);
}

struct command_line {
	int argc;
	char **argv;
	char *files[MAX_CONFIG_FILES]; /* malloc'd; absolute where that could be told */
	size_t n_files;
};

static int note_file(struct command_line *l, const char *path, struct fs_errbuf *e)
{
	if (l->n_files == MAX_CONFIG_FILES)
		return fs_fail(e, FS_ELIMIT, "more than %d config files", MAX_CONFIG_FILES);
	char *real = realpath(path, NULL);
	l->files[l->n_files] = real ? real : strdup(path);
	return l->files[l->n_files++] ? FS_OK : fs_fail(e, FS_ENOMEM, "out of memory");
}

/* > 0: exit with that minus one. The files are noted in l when it is not NULL. */
static int read_options(
        struct fs_config *c, int argc, char **argv, struct command_line *l, struct fs_errbuf *e)
{
	static const struct option options[] = {{"config", required_argument, NULL, 'c'},
	        {"set", required_argument, NULL, 's'}, {"model", required_argument, NULL, 'm'},
	        {"listen", required_argument, NULL, 'l'}, {"log-level", required_argument, NULL, 'v'},
	        {"help", no_argument, NULL, 'h'}, {"help-config", no_argument, NULL, 'H'},
	        {"version", no_argument, NULL, 'V'}, {0}};
	int opt, rc = FS_OK;
	optind = 0; /* it is done again for each reading */
	while (!rc && (opt = getopt_long(argc, argv, "", options, NULL)) != -1) {
		switch (opt) {
		case 'c':
			rc = fs_config_load(c, optarg, e);
			if (!rc && l)
				rc = note_file(l, optarg, e);
			break;
		case 's':
			rc = fs_config_set(c, optarg, e);
			break;
		case 'm':
			rc = set_option(c, "model", optarg, e);
			break;
		case 'l':
			rc = set_option(c, "listen", optarg, e);
			break;
		case 'v':
			rc = set_option(c, "log_level", optarg, e);
			break;
		case 'h':
			usage(stdout);
			return 1;
		case 'H':
			fs_config_print_table(stdout);
			return 1;
		case 'V':
			puts("farsight-server " FS_VERSION);
			return 1;
		default:
			usage(stderr);
			return 3;
		}
	}
	if (!rc && optind < argc)
		rc = fs_fail(e, FS_EINVAL, "\"%s\" is no option", argv[optind]);
	return rc ? rc : fs_config_check(c, e);
}

static int read_again(struct fs_config *c, void *arg, struct fs_errbuf *e)
{
	const struct command_line *l = arg;
	return read_options(c, l->argc, l->argv, NULL, e);
}

/* Each with the server's fs_api as its argument. */
static const struct fs_http_route api_routes[] = {
        {"POST", "/v1/chat/completions", fs_api_chat_completions, NULL},
        {"POST", "/v1/completions", fs_api_completions, NULL},
        {"POST", "/v1/responses", fs_api_responses, NULL},
        {"POST", "/v1/responses/*", fs_api_no_response, NULL},
        {"GET", "/v1/responses/*", fs_api_no_response, NULL},
        {"DELETE", "/v1/responses/*", fs_api_no_response, NULL},
        {"POST", "/v1/messages", fs_api_messages, NULL},
        {"POST", "/v1/messages/count_tokens", fs_api_count_tokens, NULL},
        {"GET", "/v1/stream", fs_api_stream_get, NULL},
        {"GET", "/v1/stream/", fs_api_stream_get, NULL},
        {"GET", "/v1/stream/*", fs_api_stream_get, NULL},
        {"DELETE", "/v1/stream", fs_api_stream_delete, NULL},
        {"DELETE", "/v1/stream/", fs_api_stream_delete, NULL},
        {"DELETE", "/v1/stream/*", fs_api_stream_delete, NULL},
        {"POST", "/v1/streams/lookup", fs_api_streams_lookup, NULL},
        {"GET", "/v1/models", fs_api_models, NULL},
        {"GET", "/health", fs_api_health, NULL},
        {"GET", "/status", fs_api_status, NULL},
        {"GET", "/v1/history", fs_api_history, NULL},
        {"GET", "/metrics", fs_api_metrics, NULL},
        {"POST", "/v1/reload", fs_api_reload, NULL},
};

struct server {
	struct fs_engine *engine;
	struct fs_turn turn;
	bool have_turn;
	char encoder[4096]; /* on this machine */
	struct fs_turn_of_encoder encoder_turn;
	struct fs_vision *vision;
	struct fs_flights *flights; /* NULL without vision */
	struct fs_fetch *fetch;     /* NULL: picture URLs are refused */
	struct fs_streams *streams;
	struct fs_service *service;
	struct fs_http *http;
	struct fs_api api;
	struct fs_http_route routes[FS_ARRAY_LEN(api_routes)];
};

static int start_engine(struct server *s, const struct fs_config *c, struct fs_errbuf *e)
{
	struct fs_engine_opts o = {.model = c->model,
	        .device = c->device,
	        .threads = (int)c->threads,
	        .context = (int32_t)c->context,
	        .chat_template = c->chat_template};
	int rc = fs_engine_create(&o, &s->engine, e);
	if (rc)
		return rc;
	const struct fs_engine_info *i = fs_engine_info(s->engine);
	fs_info("%s: %s, %d layers, context %d, template %s, on %s; weights %.1f MiB, KV cache %.1f MiB",
	        i->name, i->arch, i->n_layer, i->n_ctx, i->template_name, i->device,
	        (double)i->weight_bytes / 1048576, (double)i->kv_bytes / 1048576);
	if ((c->vision.remote || c->vision.mmproj) && !i->takes_rows)
		return fs_fail(e, FS_EINVAL,
		        "\"vision.%s\" is set, but %s (%s) is a text model that takes no pictures",
		        c->vision.remote ? "remote" : "mmproj", c->model, i->arch);
	return FS_OK;
}

static int start_vision(struct server *s, const struct fs_config *c, int port, struct fs_errbuf *e)
{
	/* one without hosts may get some while the server runs */
	if (!fs_engine_info(s->engine)->takes_rows)
		return FS_OK;
	struct fs_vision_local_opts local;
	struct fs_vision_opts o;
	fs_vision_opts_from_config(c, &o);
	o.n_embd = fs_engine_info(s->engine)->n_embd;
	o.liveness_port = port;
	if (c->vision.mmproj) {
		fs_vision_local_from_config(c, s->encoder, sizeof(s->encoder), &local);
		local.turn = fs_turn_for_encoder(&s->encoder_turn, &s->turn);
		o.local = &local;
	}
	int rc = fs_ssh_init(e);
	if (!rc)
		rc = fs_vision_create(&o, &s->vision, e);
	if (!rc)
		rc = fs_vision_wait_ready(s->vision, wake_fd, e);
	return rc ? rc : fs_flights_create(s->vision, (size_t)c->cache_mb << 20, &s->flights, e);
}

static int start_fetch(struct server *s, const struct fs_config *c, struct fs_errbuf *e)
{
	if (!c->fetch.enabled)
		return FS_OK;
	struct fs_fetch_opts o = {.enabled = true,
	        .max_bytes = (size_t)c->max_picture_mb << 20,
	        .timeout_ms = c->fetch.timeout_s * 1000,
	        .max_redirects = (int)c->fetch.max_redirects,
	        .max_active = (int)c->fetch.max_active,
	        .allow = (const char *const *)c->fetch.allow.items,
	        .n_allow = c->fetch.allow.n};
	return fs_fetch_create(&o, &s->fetch, e);
}

static int start_streams(struct server *s, const struct fs_config *c, struct fs_errbuf *e)
{
	struct fs_streams_opts o = {.ring_bytes = (size_t)c->streams.ring_kb << 10,
	        .total_bytes = (size_t)c->streams.total_mb << 20,
	        .keep_ms = c->streams.keep_s * 1000,
	        .max_sessions = (size_t)c->streams.max};
	int rc = fs_streams_create(&o, &s->streams, e);
	s->api.streams = s->streams;
	return rc;
}

static int start_service(struct server *s, const struct fs_config *c, struct fs_errbuf *e)
{
	struct fs_service_opts o = {.engine = s->engine,
	        .vision = s->vision,
	        .flights = s->flights,
	        .turn = &s->turn,
	        .fetch = s->fetch,
	        .workers = (int)c->workers,
	        .queue_depth = (int)c->queue_depth,
	        .max_pictures = (size_t)c->max_pictures,
	        .picture = {.max_bytes = (size_t)c->max_picture_mb << 20,
	                .max_pixels = (uint64_t)c->max_picture_mpx * 1000000},
	        .picture_folders = (const char *const *)c->picture_folders.items,
	        .n_picture_folders = c->picture_folders.n};
	int rc = fs_service_create(&o, &s->service, e);
	if (rc)
		return rc;
	struct fs_gen_params *g = &s->api.sampling;
	fs_gen_params_default(g);
	g->temperature = (float)c->sampling.temperature;
	g->top_k = (int32_t)c->sampling.top_k;
	g->top_p = (float)c->sampling.top_p;
	g->min_p = (float)c->sampling.min_p;
	g->repeat_penalty = (float)c->sampling.repeat_penalty;
	s->api.service = s->service;
	s->api.model_name = c->name ? c->name : fs_engine_info(s->engine)->name;
	s->api.created = time(NULL);
	return FS_OK;
}

/* Binds before the rest stands, since vision hosts are told the port for their probes; serving begins with
 * fs_http_start. */
static int bind_http(struct server *s, const struct fs_config *c, struct fs_errbuf *e)
{
	for (size_t i = 0; i < FS_ARRAY_LEN(api_routes); i++) {
		s->routes[i] = api_routes[i];
		s->routes[i].arg = &s->api;
	}
	struct fs_http_opts o = {.listen = c->listen,
	        .max_body = (size_t)c->max_body_mb << 20,
	        .timeout_ms = c->timeout_s * 1000,
	        .routes = s->routes,
	        .n_routes = FS_ARRAY_LEN(s->routes),
	        .api_keys = (const char *const *)c->api_key.items,
	        .n_api_keys = c->api_key.n,
	        .allowed_hosts = (const char *const *)c->allowed_hosts.items,
	        .n_allowed_hosts = c->allowed_hosts.n,
	        .cors_origins = (const char *const *)c->cors_origins.items,
	        .n_cors_origins = c->cors_origins.n,
	        .open_without_key = c->open_to_network_without_key,
	        .max_connections = (size_t)c->max_connections,
	        .max_bodies = (size_t)c->max_bodies_mb << 20,
	        .read_timeout_ms = c->read_timeout_s * 1000,
	        .peer_timeout_ms = c->peer_timeout_s * 1000,
	        .error_body = fs_api_error_body};
	int rc = fs_http_create(&o, &s->http, e);
	s->api.http = s->http;
	return rc;
}

static int start(struct server *s, const struct fs_config *c, struct fs_errbuf *e)
{
	int rc = bind_http(s, c, e);
	if (!rc)
		rc = fs_turn_init(&s->turn, (size_t)c->queue_depth);
	s->have_turn = rc == FS_OK;
	if (!rc)
		rc = start_engine(s, c, e);
	if (!rc)
		rc = start_vision(s, c, fs_http_port(s->http), e);
	if (!rc)
		rc = start_fetch(s, c, e);
	if (!rc)
		rc = start_streams(s, c, e);
	if (!rc)
		rc = start_service(s, c, e);
	if (!rc)
		rc = fs_http_start(s->http, e);
	if (!rc)
		fs_info("listening on %s, port %d", c->listen, fs_http_port(s->http));
	return rc;
}

/* Requests, and answers that outlive theirs. */
static size_t running(const struct server *s)
{
	return (s->http ? fs_http_live(s->http) : 0) + (s->service ? fs_service_running(s->service) : 0);
}

static void wait_for_end(struct server *s, const struct fs_config *c)
{
	struct pollfd p[2] = {
	        {.fd = wake_fd, .events = POLLIN}, {.fd = fs_reload_fd(reload), .events = POLLIN}};
	while (signals == 0) {
		bool asked = poll(p, 2, CHORES_MS) > 0 && p[1].revents;
		/* in this order: the kernel takes a terminal away and sends SIGHUP in one step */
		bool has = ends_with_terminal && has_terminal(), hung_up = hangups;
		hangups = 0;
		if (hung_up && ends_with_terminal && !has)
			break;            /* that SIGHUP was meant literally: its window was closed */
		ends_with_terminal = has; /* whoever went without a word left it in the background */
		if (asked)
			fs_reload_run(reload, s->vision);
		fs_streams_expire(s->streams, fs_now());
	}
	fs_info("stopping: %zu requests are running; they get %lld s (a second signal ends them at once)",
	        running(s), (long long)c->drain_s);
	fs_http_stop_accepting(s->http);
	fs_reload_close(reload);
	int64_t until = fs_deadline_ms(c->drain_s * 1000);
	while (running(s) > 0 && signals < 2 && fs_now() < until)
		poll(NULL, 0, 20);
}

static void stop(struct server *s)
{
	fs_reload_close(reload);
	while (running(s) > 0) { /* also those that arrived a moment ago */
		fs_http_cancel_all(s->http, FS_CANCEL_SHUTDOWN);
		fs_streams_cancel_all(s->streams, FS_CANCEL_SHUTDOWN);
		poll(NULL, 0, 10);
	}
	fs_service_destroy(s->service);
	fs_http_destroy(s->http);
	fs_streams_destroy(s->streams);
	fs_fetch_destroy(s->fetch);
	fs_flights_destroy(s->flights);
	fs_vision_destroy(s->vision);
	if (s->have_turn)
		fs_turn_finish(&s->turn);
	fs_engine_destroy(s->engine);
}

static int catch_signals(struct fs_config *config, struct command_line *l, struct fs_errbuf *e)
{
	struct fs_reload_opts o = {.read = read_again,
	        .arg = l,
	        .running = config,
	        .files = (const char *const *)l->files,
	        .n_files = l->n_files};
	int rc = fs_reload_create(&o, &reload, e);
	if (rc)
		return rc;
	wake_fd = fs_wake_open();
	if (wake_fd < 0)
		return fs_fail_errno(e, FS_EIO, "can not make an eventfd");
	struct sigaction sa = {.sa_handler = on_signal};
	sigaction(SIGINT, &sa, NULL);
	sigaction(SIGTERM, &sa, NULL);
	struct sigaction hup = {.sa_handler = on_hangup}, inherited;
	bool terminal = has_terminal();
	sigaction(SIGHUP, &hup, &inherited);
	ends_with_terminal = terminal && inherited.sa_handler != SIG_IGN;
	signal(SIGPIPE, SIG_IGN);
	return FS_OK;
}

static void finish(struct fs_config *c, struct command_line *l)
{
	fs_config_finish(c);
	for (size_t i = 0; i < l->n_files; i++)
		free(l->files[i]);
}

int main(int argc, char **argv)
{
	struct fs_config config;
	struct fs_errbuf e = {""};
	struct server s = {0};
	struct command_line line = {.argc = argc, .argv = argv};
	fs_gguf_name_changed_files();
	fs_config_init(&config);
	int rc = read_options(&config, argc, argv, &line, &e);
	if (rc > 0) {
		finish(&config, &line);
		return rc - 1;
	}
	if (!rc) {
		enum fs_log_level level;
		fs_log_parse_level(config.log_level, &level);
		fs_log_set_level(level);
		rc = catch_signals(&config, &line, &e);
	}
	if (!rc) {
		s.api.settings = fs_reload_api(reload);
		rc = start(&s, &config, &e);
	}
	if (rc)
		fprintf(stderr, "farsight-server: %s\n", e.text);
	else
		wait_for_end(&s, &config);
	stop(&s);
	signal(SIGHUP, SIG_IGN);
	fs_reload_destroy(reload);
	finish(&config, &line);
	return rc ? 1 : 0;
}
