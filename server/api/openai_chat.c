/*
 * POST /v1/chat/completions: carries one request on a worker from its body to its answer. The sink's text
 * comes on the engine's thread; everything else here runs on the worker.
 */
#include "server/api/internal.h"

#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>

#define MAX_ANSWER ((size_t)16 << 20)
/* A stream's client sees headers and a comment after this long, even when its picture is still being encoded.
 */
#define FIRST_SIGN_MS 5000

struct call {
	const struct fs_api *api;
	struct fs_http_request *r;
	struct fs_openai_chat req;
	char id[40];
	int64_t created;
	struct fs_buf answer; /* not streamed: the text so far */
	bool overflow;
};

static void send_chunk(struct call *c, json_t *delta, const char *finish, const json_t *usage)
{
	json_t *o = api_chunk(c->id, c->created, c->api->model_name, delta, finish, usage);
	char *text = o ? json_dumps(o, JSON_COMPACT) : NULL;
	json_decref(o);
	if (!text)
		return;
	struct fs_buf b;
	fs_buf_init(&b, MAX_ANSWER);
	if (fs_buf_printf(&b, "data: %s\n\n", text) == FS_OK)
		fs_http_stream_write(c->r, b.data, b.len);
	fs_buf_finish(&b);
	free(text);
}

static void on_start(void *arg)
{
	struct call *c = arg;
	if (!c->req.stream)
		return;
	fs_http_stream_begin(c->r);
	send_chunk(c, json_pack("{s:s, s:s}", "role", "assistant", "content", ""), NULL, NULL);
}

static void on_text(void *arg, const char *utf8, size_t n)
{
	struct call *c = arg;
	if (c->req.stream)
		send_chunk(c, json_pack("{s:s%}", "content", utf8, n), NULL, NULL);
	else if (fs_buf_append(&c->answer, utf8, n))
		c->overflow = true;
}

static void finish_stream(struct call *c, const struct fs_chat_report *rep)
{
	static const char done[] = "data: [DONE]\n\n";
	json_t *usage = api_usage(rep);
	send_chunk(c, json_object(), api_finish_name(rep->gen.finish), NULL);
	if (c->req.include_usage)
		send_chunk(c, NULL, NULL, usage);
	json_decref(usage);
	fs_http_stream_write(c->r, done, sizeof(done) - 1);
	fs_http_stream_end(c->r);
}

static void finish_whole(struct call *c, const struct fs_chat_report *rep)
{
	if (c->overflow) {
		api_error(c->r, 500, "server_error", NULL, NULL,
		        "the answer is larger than this server can hold");
		return;
	}
	json_t *o = api_completion(c->id, c->created, c->api->model_name,
	        c->answer.data ? (char *)c->answer.data : "", c->answer.len, rep);
	char *text = o ? json_dumps(o, JSON_COMPACT) : NULL;
	json_decref(o);
	if (text)
		fs_http_reply(c->r, 200, NULL, NULL, text, strlen(text));
	else
		api_error(c->r, 500, "server_error", NULL, NULL, "out of memory");
	free(text);
}

static void finish_cancelled(struct call *c)
{
	enum fs_cancel_cause cause = fs_cancel_cause(fs_http_cancel(c->r));
	if (cause ==
	        FS_CANCEL_CLIENT) /* it may still read: closing only its writing side counts as leaving */
		api_error(c->r, 499, "invalid_request_error", "client_closed", NULL,
		        "the client closed its side of the connection, which cancels the request");
	else if (cause == FS_CANCEL_SHUTDOWN)
		api_error(
		        c->r, 503, "unavailable_error", "shutting_down", NULL, "the server is shutting down");
	else
		api_error(c->r, 504, "timeout_error", "timeout", NULL,
		        "the request took longer than the server's timeout_s");
}

static void log_end(const struct call *c, const char *end, const struct fs_chat_report *rep)
{
	fs_info("%s: %s, %d prompt + %d tokens, %zu pictures; prepare %.0f ms, wait %.0f ms, prefill %.0f "
	        "ms, decode %.0f ms",
	        c->id, end, rep->gen.prompt_tokens, rep->gen.completion_tokens, rep->n_pictures,
	        (double)rep->prepare_ns / 1e6, (double)rep->wait_ns / 1e6, (double)rep->gen.prefill_ns / 1e6,
	        (double)rep->gen.decode_ns / 1e6);
}

static void answer(struct call *c)
{
	struct fs_chat_sink sink = {.arg = c, .start = on_start, .text = on_text};
	struct fs_chat_report rep;
	struct fs_refusal why;
	if (c->req.stream)
		fs_http_stream_begin_after(c->r, FIRST_SIGN_MS);
	int rc = fs_service_chat(c->api->service, &c->req.chat, fs_http_cancel(c->r), &sink, &rep, &why);
	bool cancelled = rc == FS_ECANCELLED || (!rc && rep.gen.finish == FS_FINISH_CANCEL);
	log_end(c, cancelled ? "cancel" : rc ? why.text.text : api_finish_name(rep.gen.finish), &rep);
	if (cancelled)
		finish_cancelled(c);
	else if (rc)
		api_refusal(c->r, &why);
	else if (c->req.stream)
		finish_stream(c, &rep);
	else
		finish_whole(c, &rep);
}

static void run(void *arg)
{
	struct call *c = arg;
	struct fs_refusal why;
	size_t n;
	const char *body = fs_http_body(c->r, &n);
	if (fs_openai_parse(body, n, c->api, &c->req, &why)) {
		api_refusal(c->r, &why);
	} else {
		answer(c);
		fs_chat_finish(&c->req.chat);
	}
	fs_buf_finish(&c->answer);
	fs_http_unref(c->r);
	free(c);
}

static void make_id(char out[40])
{
	uint8_t rnd[12] = {0};
	ssize_t got = getrandom(rnd, sizeof(rnd), 0);
	(void)got; /* ids need not be secret, only unlikely to meet */
	strcpy(out, "chatcmpl-");
	for (size_t i = 0; i < sizeof(rnd); i++)
		snprintf(out + 9 + 2 * i, 3, "%02x", rnd[i]);
}

void fs_api_chat_completions(void *arg, struct fs_http_request *r)
{
	struct fs_api *api = arg;
	struct call *c = calloc(1, sizeof(*c));
	if (c) {
		*c = (struct call){.api = api, .r = r, .created = time(NULL)};
		fs_buf_init(&c->answer, MAX_ANSWER);
		make_id(c->id);
	}
	if (c && fs_service_submit(api->service, run, c) == FS_OK)
		return;
	free(c);
	api_error(r, 503, "unavailable_error", "queue_full", NULL,
	        "too many requests are waiting; try again shortly");
	fs_http_unref(r);
}
