/* The life of one call on its worker: JSON, chat, answer, end, and the record of it. */
#include "server/api/call.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>

#define MAX_ANSWER ((size_t)16 << 20)
#define MAX_EVENT ((size_t)16 << 20)
#define MAX_CALLS 128
/* A stream's client sees headers and a comment after this long, even when its picture is still being encoded.
 */
#define FIRST_SIGN_MS 5000

void api_make_id(char *out, size_t cap, const char *prefix)
{
	uint8_t rnd[12] = {0};
	ssize_t got = getrandom(rnd, sizeof(rnd), 0);
	(void)got; /* ids need not be secret, only unlikely to meet */
	size_t at = (size_t)snprintf(out, cap, "%s", prefix);
	for (size_t i = 0; i < sizeof(rnd) && at + 2 < cap; i++, at += 2)
		snprintf(out + at, cap - at, "%02x", rnd[i]);
}

/* ---- streaming ---- */

void api_call_send_text(struct api_call *c, const char *bytes)
{
	api_out_events(c, bytes, strlen(bytes));
}

void api_call_send(struct api_call *c, const char *event, json_t *o)
{
	char *text = o ? json_dumps(o, JSON_COMPACT) : NULL;
	json_decref(o);
	if (!text)
		return;
	struct fs_buf b;
	fs_buf_init(&b, MAX_EVENT);
	int rc = event ? fs_buf_printf(&b, "event: %s\n", event) : FS_OK;
	if (!rc && fs_buf_printf(&b, "data: %s\n\n", text) == FS_OK)
		api_out_events(c, b.data, b.len);
	fs_buf_finish(&b);
	free(text);
}

/* ---- the answer as it comes ---- */

static void on_prepared(void *arg)
{
	struct api_call *c = arg;
	fs_http_drop_body(c->r);
}

static void on_start(void *arg)
{
	struct api_call *c = arg;
	if (!c->stream)
		return;
	api_out_begin(c);
	c->d->begin(c);
}

static void on_progress(void *arg, int32_t done, int32_t total, int32_t reused)
{
	struct api_call *c = arg;
	if (c->stream && c->d->progress)
		c->d->progress(c, done, total, reused);
}

static void on_text(void *arg, const char *utf8, size_t n)
{
	struct api_call *c = arg;
	if (!c->stream)
		c->overflow |= fs_buf_append(&c->answer, utf8, n) != FS_OK;
	else if (c->d->text)
		c->d->text(c, utf8, n);
}

static void on_token(void *arg, const struct fs_token_event *t)
{
	struct api_call *c = arg;
	if (c->d->token)
		c->d->token(c, t);
}

static void on_call(void *arg, const char *name, const char *arguments)
{
	struct api_call *c = arg;
	struct api_tool_call *calls = realloc(c->calls, (c->n_calls + 1) * sizeof(*calls));
	if (calls)
		c->calls = calls;
	if (!calls || c->n_calls == MAX_CALLS) {
		c->overflow = true;
		return;
	}
	struct api_tool_call *t = &c->calls[c->n_calls];
	*t = (struct api_tool_call){.name = strdup(name), .arguments = strdup(arguments)};
	if (!t->name || !t->arguments) {
		free(t->name);
		free(t->arguments);
		c->overflow = true;
		return;
	}
	c->n_calls++;
	api_make_id(t->id, sizeof(t->id), "call_");
	if (c->stream && c->d->call)
		c->d->call(c, t);
}

/* ---- its end ---- */

/* The record is closed before the answer's last bytes go out: who has the answer finds it in the history. */
static void close_record(struct api_call *c, const struct fs_record_end *end)
{
	fs_record_close(c->rec, end);
	c->rec = NULL;
}

static void reply_error(struct api_call *c, const struct api_error *err)
{
	bool failed = c->begun && c->d->failed;
	if (failed)
		fs_http_set_stream_frame(c->r, c->d->failed_before, c->d->error_after);
	json_t *o = failed ? c->d->failed(c, err) : c->d->error(err);
	char *text = o ? json_dumps(o, JSON_COMPACT) : NULL;
	json_decref(o);
	char retry[32];
	int wait_s = c->retry_after_s ? c->retry_after_s : err->status == 503 ? 2 : 0;
	snprintf(retry, sizeof(retry), "Retry-After: %d", wait_s);
	if (text)
		api_out_whole(c, err->status, wait_s ? retry : NULL, text);
	else
		api_out_end(c);
	free(text);
}

static void end_with(
        struct api_call *c, const struct api_error *err, enum fs_end end, enum fs_cancel_cause cause)
{
	struct fs_record_end row = {.end = end,
	        .cause = cause,
	        .status = err->status,
	        .code = err->code ? err->code : err->type,
	        .error = err->message};
	close_record(c, &row);
	reply_error(c, err);
}

static void end_refused(struct api_call *c, const struct fs_refusal *why)
{
	struct api_error err = {.status = why->status,
	        .type = why->type,
	        .code = why->code,
	        .param = why->param[0] ? why->param : NULL,
	        .message = why->text.text};
	c->retry_after_s = why->retry_after_s;
	bool fault = why->status >= 500 && why->status != 503;
	end_with(c, &err, fault ? FS_END_ERROR : FS_END_REFUSED, FS_CANCEL_NONE);
}

static void end_cancelled(struct api_call *c)
{
	enum fs_cancel_cause cause = fs_cancel_cause(c->cancel);
	struct api_error err = {504, "timeout_error", "timeout", NULL,
	        "the request took longer than the server's timeout_s or its own"};
	if (cause == FS_CANCEL_SHUTDOWN)
		err = (struct api_error){
		        503, "unavailable_error", "shutting_down", NULL, "the server is shutting down"};
	else if (cause == FS_CANCEL_DELETED)
		err = (struct api_error){499, "invalid_request_error", "conversation_deleted", NULL,
		        "the conversation was deleted, or replaced by a newer request"};
	else if (cause != FS_CANCEL_DEADLINE) /* it may still read: closing only its writing side counts as
	                                         leaving */
		err = (struct api_error){499, "invalid_request_error", "client_closed", NULL,
		        "the client closed its side of the connection, which cancels the request"};
	end_with(c, &err, cause == FS_CANCEL_UNREAD ? FS_END_DISCONNECT : FS_END_CANCEL, cause);
}

static void end_failed(struct api_call *c, const char *message)
{
	struct api_error err = {500, "server_error", NULL, NULL, message};
	end_with(c, &err, FS_END_ERROR, FS_CANCEL_NONE);
}

static void end_whole(struct api_call *c, json_t *o, const struct fs_record_end *row)
{
	char *text = o ? json_dumps(o, JSON_COMPACT) : NULL;
	json_decref(o);
	if (text) {
		close_record(c, row);
		api_out_whole(c, 200, NULL, text);
	} else {
		end_failed(c, "out of memory");
	}
	free(text);
}

static void end_answered(struct api_call *c, const struct fs_chat_report *rep)
{
	struct fs_record_end row = {
	        .end = rep->gen.finish == FS_FINISH_LENGTH ? FS_END_LENGTH : FS_END_STOP, .status = 200};
	if (c->overflow) {
		end_failed(c, "the answer is larger than this server can hold");
	} else if (c->stream) {
		close_record(c, &row);
		c->d->end(c, rep);
		api_out_end(c);
	} else {
		end_whole(c, c->d->whole(c, rep), &row);
	}
}

/* ---- the way there ---- */

static void log_end(const struct api_call *c, const char *end, const struct fs_chat_report *rep)
{
	fs_info("%s: %s, %d prompt + %d tokens, %zu pictures; prepare %.0f ms, wait %.0f ms, prefill %.0f "
	        "ms, "
	        "decode %.0f ms",
	        c->id, end, rep->gen.prompt_tokens, rep->gen.completion_tokens, rep->n_pictures,
	        (double)rep->prepare_ns / 1e6, (double)rep->wait_ns / 1e6, (double)rep->gen.prefill_ns / 1e6,
	        (double)rep->gen.decode_ns / 1e6);
}

static void answer(struct api_call *c)
{
	struct fs_chat_sink sink = {.arg = c,
	        .prepared = on_prepared,
	        .start = on_start,
	        .progress = on_progress,
	        .text = on_text,
	        .call = on_call,
	        .token = on_token};
	struct fs_chat_report rep;
	struct fs_refusal why = {0};
	if (c->stream)
		api_out_stream(c, FIRST_SIGN_MS);
	int rc = fs_service_chat(c->api->service, &c->chat, c->cancel, c->rec, &sink, &rep, &why);
	bool cancelled = rc == FS_ECANCELLED || (!rc && rep.gen.finish == FS_FINISH_CANCEL);
	log_end(c, cancelled ? "cancel" : rc ? why.text.text : api_finish_name(rep.gen.finish), &rep);
	if (cancelled)
		end_cancelled(c);
	else if (rc)
		end_refused(c, &why);
	else
		end_answered(c, &rep);
}

static void count(struct api_call *c)
{
	struct fs_record_end row = {.end = FS_END_STOP, .status = 200};
	struct fs_refusal why = {0};
	int32_t tokens;
	int rc = fs_service_count(c->api->service, &c->chat, c->cancel, c->rec, &tokens, &why);
	if (rc == FS_ECANCELLED)
		end_cancelled(c);
	else if (rc)
		end_refused(c, &why);
	else
		end_whole(c, c->d->counted(c, tokens), &row);
}

int api_call_parse(
        struct api_call *c, const char *body, size_t n, struct fs_cancel *cancel, struct fs_refusal *why)
{
	json_t *root;
	int rc = api_load_json(body, n, cancel, &root, &c->json_cost, why);
	if (rc)
		return rc;
	c->chat.gen = c->api->sampling;
	rc = c->d->parse(c, root, why);
	json_decref(root);
	return !rc && fs_cancelled(cancel) ? FS_ECANCELLED : rc;
}

void api_call_finish(struct api_call *c)
{
	if (c->d->finish)
		c->d->finish(c);
	for (size_t i = 0; i < c->n_calls; i++) {
		free(c->calls[i].name);
		free(c->calls[i].arguments);
	}
	free(c->calls);
	json_decref(c->logprobs);
	fs_chat_finish(&c->chat);
	fs_buf_finish(&c->answer);
	api_json_release(c->json_cost);
	c->json_cost = 0;
}

static void call_free(struct api_call *c)
{
	api_call_finish(c);
	api_out_close(c);
	fs_http_unref(c->r);
	free(c);
}

static void run(void *arg)
{
	struct api_call *c = arg;
	struct fs_refusal why = {0};
	size_t n;
	const char *body = fs_http_body(c->r, &n);
	fs_record_phase(c->rec, FS_PHASE_PARSE);
	int rc = api_call_parse(c, body, n, c->cancel, &why);
	fs_record_stream(c->rec, c->stream);
	if (!rc && c->timeout_s > 0)
		fs_cancel_shorten(c->cancel, fs_http_arrived(c->r) + c->timeout_s * FS_SEC);
	if (rc == FS_ECANCELLED)
		end_cancelled(c);
	else if (rc)
		end_refused(c, &why);
	else if (c->d->counted)
		count(c);
	else
		answer(c);
	call_free(c);
}

void api_call_start(const struct fs_api *api, const struct api_dialect *d, struct fs_http_request *r)
{
	struct api_call *c = calloc(1, sizeof(*c));
	if (!c) {
		fs_http_stream_end(r);
		fs_http_unref(r);
		return;
	}
	*c = (struct api_call){.api = api, .d = d, .r = r, .created = time(NULL)};
	fs_buf_init(&c->answer, MAX_ANSWER);
	api_make_id(c->id, sizeof(c->id), d->id_prefix);
	c->rec = fs_record_open(fs_service_books(api->service), d->name, c->id, fs_http_arrived(r));
	if (d->id_header)
		fs_http_add_header(r, d->id_header, c->id);
	if (d->error_before)
		fs_http_set_stream_frame(r, d->error_before, d->error_after);
	if (api_out_open(c)) {
		end_failed(c, "out of memory");
		call_free(c);
		return;
	}
	if (c->session)
		fs_record_conversation(c->rec);
	if (fs_service_submit(api->service, run, c) == FS_OK)
		return;
	struct fs_refusal why;
	fs_refuse(&why, 503, "unavailable_error", "queue_full", "",
	        "this server works on as many requests as it can; try again shortly");
	end_refused(c, &why);
	call_free(c);
}
