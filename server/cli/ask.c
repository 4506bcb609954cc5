/*
 * farsight ask: one question to a running server. The answer is printed as it is generated; with --times or
 * --json it comes whole, with what the server measured.
 */
#include "server/cli/cli.h"

#include <getopt.h>
#include <openssl/evp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PICTURE_MAX ((size_t)64 << 20)

static const char usage[] =
        "usage: farsight ask [--server URL] [--config FILE] [options] QUESTION [PICTURE...]\n"
        "Asks a running server; a picture is a file, or an http(s) URL that the server fetches.\n"
        "  --server URL      default: FARSIGHT_SERVER, else \"listen\" of the config\n"
        "  --config FILE     the server's config; default: FARSIGHT_CONFIG, else\n"
        "                    ~/.config/farsight/server.json when there is one\n"
        "  --max-tokens N    most tokens of the answer\n"
        "  --temperature T   default: the server's\n"
        "  --timeout S       seconds in all; default 600\n"
        "  --times           afterwards, on stderr, where the time went\n"
        "  --json            the server's whole answer\n"
        "The API key is FARSIGHT_API_KEY, else the config's first \"api_key\".\n";

struct ask {
	const char *server, *config, *question;
	char **pictures;
	int n_pictures;
	int64_t max_tokens, timeout_s;
	double temperature; /* < 0 = the server's */
	bool times, json;
};

/* ---- the request ---- */

/* The server goes by the bytes, never by a media type. */
static json_t *data_url(const struct fs_buf *b)
{
	static const char head[] = "data:;base64,";
	size_t room = sizeof(head) + (b->len + 2) / 3 * 4 + 1;
	char *url = malloc(room);
	if (!url)
		return NULL;
	memcpy(url, head, sizeof(head) - 1);
	int n = EVP_EncodeBlock((unsigned char *)url + sizeof(head) - 1, b->data, (int)b->len);
	json_t *s = json_stringn(url, sizeof(head) - 1 + (size_t)n);
	free(url);
	return s;
}

static int picture_part(const char *name, json_t **out, struct fs_errbuf *e)
{
	json_t *url;
	int rc = FS_OK;
	if (strncmp(name, "http://", 7) == 0 || strncmp(name, "https://", 8) == 0 ||
	        strncmp(name, "data:", 5) == 0) {
		url = json_string(name);
	} else {
		struct fs_buf b;
		fs_buf_init(&b, PICTURE_MAX);
		rc = cli_read_picture(name, &b, e);
		url = rc ? NULL : data_url(&b);
		fs_buf_finish(&b);
	}
	if (rc)
		return rc;
	*out = json_pack("{s:s, s:{s:o}}", "type", "image_url", "image_url", "url", url);
	return *out ? FS_OK : fs_fail(e, FS_EINVAL, "%.200s is no UTF-8, or memory is out", name);
}

static int request(const struct ask *a, json_t **out, struct fs_errbuf *e)
{
	json_t *parts = json_array();
	int rc = FS_OK;
	for (int i = 0; i < a->n_pictures && !rc; i++) {
		json_t *part = NULL;
		rc = picture_part(a->pictures[i], &part, e);
		if (!rc)
			json_array_append_new(parts, part);
	}
	json_t *text = json_pack("{s:s, s:s}", "type", "text", "text", a->question);
	if (!rc && !text)
		rc = fs_fail(e, FS_EINVAL, "the question is no UTF-8");
	if (rc) {
		json_decref(parts);
		json_decref(text);
		return rc;
	}
	json_array_append_new(parts, text);
	json_t *body = json_pack("{s:[{s:s, s:o}], s:b}", "messages", "role", "user", "content", parts,
	        "stream", !a->times && !a->json);
	if (a->max_tokens)
		json_object_set_new(body, "max_tokens", json_integer(a->max_tokens));
	if (a->temperature >= 0)
		json_object_set_new(body, "temperature", json_real(a->temperature));
	*out = body;
	return FS_OK;
}

/* ---- the answer ---- */

struct answer {
	bool any, cut, whole; /* text came; ended by max_tokens; the end came */
	bool newline;         /* the text ends with one */
};

static void take_choice(struct answer *a, const json_t *choice, const char *text)
{
	const char *why = json_string_value(json_object_get(choice, "finish_reason"));
	if (text && *text) {
		cli_print(stdout, text);
		fflush(stdout);
		a->any = true;
		a->newline = text[strlen(text) - 1] == '\n';
	}
	if (why) {
		a->whole = true;
		a->cut = strcmp(why, "length") == 0;
	}
}

static int on_event(void *arg, const char *data, size_t n, struct fs_errbuf *e)
{
	struct answer *a = arg;
	if (n == 6 && memcmp(data, "[DONE]", 6) == 0)
		return FS_OK;
	json_t *o = json_loadb(data, n, 0, NULL);
	const json_t *error = json_object_get(o, "error");
	const json_t *choice = json_array_get(json_object_get(o, "choices"), 0);
	int rc = FS_OK;
	if (!json_is_object(o)) {
		rc = fs_fail(e, FS_EFORMAT, "an event of the server is no JSON object");
	} else if (error) {
		const char *text = json_string_value(json_object_get(error, "message"));
		rc = fs_fail(e, FS_EINVAL, "%s", text ? text : "the server gave up");
	} else {
		take_choice(a, choice,
		        json_string_value(json_object_get(json_object_get(choice, "delta"), "content")));
	}
	json_decref(o);
	return rc;
}

static double number(const json_t *o, const char *name)
{
	return json_number_value(json_object_get(o, name));
}

static void print_times(const json_t *reply)
{
	const json_t *t = json_object_get(reply, "timings"), *p;
	size_t i;
	fflush(stdout);
	json_array_foreach(json_object_get(t, "pictures"), i, p)
	{
		const char *host = json_string_value(json_object_get(p, "host"));
		if (json_is_true(json_object_get(p, "cached")))
			fprintf(stderr, "picture %zu: %.0f rows, seen before\n", i + 1, number(p, "tokens"));
		else
			fprintf(stderr,
			        "picture %zu: %.0f rows from %s in %.1f ms; its encoder %.1f ms, queue there "
			        "%.1f ms\n",
			        i + 1, number(p, "tokens"), host ? host : "?", number(p, "total_ms"),
			        number(p, "encode_ms"), number(p, "queue_ms"));
	}
	fprintf(stderr,
	        "prompt: %.0f tokens in %.1f ms, %.0f more were cached; waited %.1f ms for the engine\n",
	        number(t, "prompt_n"), number(t, "prompt_ms"), number(t, "cache_n"), number(t, "wait_ms"));
	fprintf(stderr, "answer: %.0f tokens in %.1f ms\n", number(t, "predicted_n"),
	        number(t, "predicted_ms"));
}

static int print_whole(const struct ask *a, struct answer *answer, const json_t *reply, struct fs_errbuf *e)
{
	const json_t *choice = json_array_get(json_object_get(reply, "choices"), 0);
	const json_t *message = json_object_get(choice, "message");
	if (a->json)
		return json_dumpf(reply, stdout, JSON_INDENT(2)) || putchar('\n') == EOF
		               ? fs_fail_errno(e, FS_EIO, "can not write")
		               : FS_OK;
	if (!message)
		return fs_fail(e, FS_EFORMAT, "the server's answer has no message");
	take_choice(answer, choice, json_string_value(json_object_get(message, "content")));
	return FS_OK;
}

static int ask(const struct ask *a, struct fs_errbuf *e)
{
	struct fs_config config;
	struct cli_server server;
	struct answer answer = {0};
	struct cli_http_events events = {.on_event = on_event, .arg = &answer};
	json_t *body = NULL, *reply = NULL;
	int rc = cli_config(a->config, &config, NULL, e);
	if (!rc)
		rc = cli_server_find(&config, a->server, &server, e);
	if (!rc)
		rc = request(a, &body, e);
	if (!rc)
		rc = cli_http(&server, "/v1/chat/completions", body, a->timeout_s, NULL, &events, &reply, e);
	if (!rc && reply)
		rc = print_whole(a, &answer, reply, e);
	if (answer.any && !answer.newline)
		putchar('\n');
	if (!rc && !a->json && !answer.whole)
		rc = fs_fail(e, FS_EUNAVAILABLE, "the server ended its answer early");
	if (!rc && answer.cut)
		fprintf(stderr, "farsight: the answer was cut at its most tokens\n");
	if (!rc && a->times && !a->json)
		print_times(reply);
	json_decref(body);
	json_decref(reply);
	fs_config_finish(&config);
	return rc;
}

/* ---- the command line ---- */

static int read_options(struct ask *a, int argc, char **argv, struct fs_errbuf *e)
{
	static const struct option options[] = {{"server", required_argument, NULL, 's'},
	        {"config", required_argument, NULL, 'c'}, {"max-tokens", required_argument, NULL, 'n'},
	        {"temperature", required_argument, NULL, 't'}, {"timeout", required_argument, NULL, 'T'},
	        {"times", no_argument, NULL, 'm'}, {"json", no_argument, NULL, 'j'},
	        {"help", no_argument, NULL, 'h'}, {0}};
	int opt, rc = FS_OK;
	char *end;
	while (!rc && (opt = getopt_long(argc, argv, "", options, NULL)) != -1) {
		switch (opt) {
		case 's':
			a->server = optarg;
			rc = cli_server_url(optarg, e);
			break;
		case 'c':
			a->config = optarg;
			break;
		case 'n':
			rc = cli_number("--max-tokens", optarg, 1, 1 << 24, &a->max_tokens, e);
			break;
		case 't':
			a->temperature = strtod(optarg, &end);
			if (!*optarg || *end || !(a->temperature >= 0 && a->temperature <= 2))
				rc = fs_fail(e, FS_EINVAL, "--temperature wants a number from 0 to 2");
			break;
		case 'T':
			rc = cli_number("--timeout", optarg, 1, 86400, &a->timeout_s, e);
			break;
		case 'm':
			a->times = true;
			break;
		case 'j':
			a->json = true;
			break;
		case 'h':
			fputs(usage, stdout);
			return 1;
		default:
			return fs_fail(e, FS_EINVAL, "that is no command line for ask");
		}
	}
	if (!rc && optind >= argc)
		rc = fs_fail(e, FS_EINVAL, "the question is missing");
	if (rc)
		return rc;
	a->question = argv[optind];
	a->pictures = argv + optind + 1;
	a->n_pictures = argc - optind - 1;
	return FS_OK;
}

int cli_ask(int argc, char **argv)
{
	struct ask a = {.timeout_s = 600, .temperature = -1};
	struct fs_errbuf e = {""};
	int rc = read_options(&a, argc, argv, &e);
	if (rc > 0)
		return CLI_OK;
	if (rc)
		return cli_misused("ask", "%s", e.text);
	return ask(&a, &e) ? cli_failed(&e) : CLI_OK;
}
