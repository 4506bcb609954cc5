/* The life of one chat on its worker: pictures, prompt, turn, generation. */
#include "server/service/service.h"

#include "server/service/download.h"
#include "server/service/pictures.h"
#include "server/service/turn.h"
#include "server/service/workers.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Whoever restarts the server needs that long at least. */
#define FAILED_RETRY_S 30

struct fs_service {
	struct fs_service_opts o;
	struct fs_workers *workers;
	struct fs_turn own_turn, *turn;
	struct fs_books *books;
};

int fs_service_create(const struct fs_service_opts *o, struct fs_service **out, struct fs_errbuf *e)
{
	struct fs_service *s = calloc(1, sizeof(*s));
	if (!s)
		return fs_fail(e, FS_ENOMEM, "out of memory");
	s->o = *o;
	s->turn = o->turn ? o->turn : &s->own_turn;
	int rc = o->turn ? FS_OK : fs_turn_init(&s->own_turn, (size_t)o->queue_depth);
	if (!rc)
		rc = fs_books_create(&s->books, e);
	if (!rc)
		rc = fs_workers_create(o->workers, &s->workers, e);
	if (rc) {
		fs_books_destroy(s->books);
		free(s);
		return rc;
	}
	*out = s;
	return FS_OK;
}

void fs_service_destroy(struct fs_service *s)
{
	if (!s)
		return;
	fs_workers_destroy(s->workers);
	if (!s->o.turn)
		fs_turn_finish(&s->own_turn);
	fs_books_destroy(s->books);
	free(s);
}

const struct fs_service_opts *fs_service_opts(const struct fs_service *s)
{
	return &s->o;
}

struct fs_books *fs_service_books(struct fs_service *s)
{
	return s->books;
}

void fs_service_turn(struct fs_service *s, struct fs_turn_state *out)
{
	struct fs_turn *t = s->turn;
	pthread_mutex_lock(&t->lock);
	*out = (struct fs_turn_state){
	        .held = t->held, .waiting = t->waiting, .depth = t->depth, .entries = t->entries};
	pthread_mutex_unlock(&t->lock);
}

size_t fs_service_running(struct fs_service *s)
{
	return fs_workers_busy(s->workers);
}

int fs_service_submit(struct fs_service *s, void (*fn)(void *arg), void *arg)
{
	return fs_workers_submit(s->workers, fn, arg);
}

int fs_refuse(struct fs_refusal *r, int status, const char *type, const char *code, const char *param,
        const char *fmt, ...)
{
	r->status = status;
	r->type = type;
	r->code = code;
	r->retry_after_s = 0;
	snprintf(r->param, sizeof(r->param), "%s", param);
	va_list ap;
	va_start(ap, fmt);
	vsnprintf(r->text.text, sizeof(r->text.text), fmt, ap);
	va_end(ap);
	return FS_EINVAL;
}

/* Up to tens of MiB, which would wait for the engine and for the end of the answer. */
static void drop_bytes(struct fs_chat *c)
{
	for (size_t i = 0; i < c->n_pictures; i++) {
		free(c->pictures[i].bytes);
		c->pictures[i].bytes = NULL;
		c->pictures[i].n = 0;
	}
}

static void finish_message(struct fs_chat_message *m)
{
	for (size_t j = 0; j < m->n_parts; j++)
		free(m->parts[j].text);
	for (size_t j = 0; j < m->n_calls; j++) {
		free(m->calls[j].name);
		free(m->calls[j].arguments);
	}
	free(m->parts);
	free(m->calls);
}

void fs_chat_finish(struct fs_chat *c)
{
	for (size_t i = 0; i < c->n_messages; i++)
		finish_message(&c->messages[i]);
	drop_bytes(c);
	for (size_t i = 0; i < c->n_pictures; i++) {
		free(c->pictures[i].url);
		free(c->pictures[i].path);
	}
	for (size_t i = 0; i < c->n_tools; i++) {
		free(c->tools[i].name);
		free(c->tools[i].description);
		free(c->tools[i].parameters);
	}
	for (size_t i = 0; i < FS_ARRAY_LEN(c->stops); i++)
		free(c->stops[i]);
	free(c->messages);
	free(c->pictures);
	free(c->tools);
	free(c->named);
	free(c->text);
	free(c->ids);
	memset(c, 0, sizeof(*c));
}

/* ---- the prompt ---- */

/* The engine's view of the chat: borrowed text, rows in the place of pictures. */
struct view {
	struct fs_message *msgs;
	struct fs_part *parts;
	struct fs_tool_call *calls;
	struct fs_tool *tools;
};

static void view_finish(struct view *v)
{
	free(v->msgs);
	free(v->parts);
	free(v->calls);
	free(v->tools);
}

static int view_alloc(struct view *v, const struct fs_chat *chat)
{
	size_t n_parts = 0, n_calls = 0;
	for (size_t i = 0; i < chat->n_messages; i++) {
		n_parts += chat->messages[i].n_parts;
		n_calls += chat->messages[i].n_calls;
	}
	v->msgs = calloc(chat->n_messages + 1, sizeof(*v->msgs));
	v->parts = calloc(n_parts + 1, sizeof(*v->parts));
	v->calls = calloc(n_calls + 1, sizeof(*v->calls));
	v->tools = calloc(chat->n_tools + 1, sizeof(*v->tools));
	return v->msgs && v->parts && v->calls && v->tools ? FS_OK : FS_ENOMEM;
}

static void view_fill(struct view *v, const struct fs_chat *chat, struct fs_rows *const *rows)
{
	size_t at = 0, call = 0;
	for (size_t i = 0; i < chat->n_messages; i++) {
		const struct fs_chat_message *m = &chat->messages[i];
		v->msgs[i] = (struct fs_message){.role = m->role,
		        .parts = v->parts + at,
		        .n_parts = m->n_parts,
		        .calls = v->calls + call,
		        .n_calls = m->n_calls};
		for (size_t j = 0; j < m->n_parts; j++) {
			const struct fs_chat_part *p = &m->parts[j];
			v->parts[at++] = (struct fs_part){.text = p->text,
			        .text_len = p->text_len,
			        .rows = p->text ? NULL : rows[p->picture]};
		}
		for (size_t j = 0; j < m->n_calls; j++)
			v->calls[call++] = (struct fs_tool_call){m->calls[j].name, m->calls[j].arguments};
	}
	for (size_t i = 0; i < chat->n_tools; i++) {
		const struct fs_chat_tool *t = &chat->tools[i];
		v->tools[i] = (struct fs_tool){t->name, t->description, t->parameters};
	}
}

static int render(struct fs_service *s, const struct fs_chat *chat, struct fs_rows *const *rows,
        struct fs_cancel *cancel, struct fs_prompt **out, struct fs_errbuf *e)
{
	if (chat->ids)
		return fs_prompt_from_ids(s->o.engine, chat->ids, chat->n_ids, NULL, 0, out, e);
	if (chat->text)
		return fs_prompt_from_text(s->o.engine, chat->text, chat->text_len, cancel, out, e);
	struct view v = {0};
	int rc = view_alloc(&v, chat);
	if (rc) {
		fs_fail(e, rc, "out of memory");
	} else {
		view_fill(&v, chat, rows);
		struct fs_chat_extras x = {.tools = v.tools,
		        .n_tools = chat->n_tools,
		        .choice = chat->choice,
		        .named = chat->named,
		        .cancel = cancel};
		rc = fs_prompt_from_chat_ex(s->o.engine, v.msgs, chat->n_messages, &x, out, e);
	}
	view_finish(&v);
	return rc;
}

static const char *prompt_field(const struct fs_chat *chat)
{
	if (chat->field)
		return chat->field;
	return chat->ids || chat->text ? "prompt" : "messages";
}

static int make_prompt(struct fs_service *s, const struct fs_chat *chat, struct fs_rows *const *rows,
        struct fs_cancel *cancel, struct fs_prompt **out, struct fs_refusal *why)
{
	struct fs_errbuf e = {""};
	int rc = fs_cancelled(cancel) ? FS_ECANCELLED : render(s, chat, rows, cancel, out, &e);
	if (rc == FS_ECANCELLED)
		return rc;
	if (rc == FS_EINVAL || rc == FS_ENOTSUP)
		return fs_refuse(why, 400, "invalid_request_error", NULL, prompt_field(chat), "%s", e.text);
	if (rc == FS_ELIMIT)
		return fs_refuse(why, 400, "invalid_request_error", "context_length_exceeded",
		        prompt_field(chat), "%s; shorten it, or raise \"context\" in the server's config",
		        e.text);
	if (rc)
		return fs_refuse(why, 500, "server_error", NULL, "", "%s", e.text);
	return FS_OK;
}

/* ---- generation ---- */

struct generation {
	const struct fs_chat_sink *sink;
	struct fs_record *rec;
	struct fs_tool_parser *tools; /* NULL: the text goes out as it is */
	struct fs_chat_report *report;
};

static void on_progress(void *arg, int32_t done, int32_t total)
{
	struct generation *g = arg;
	fs_record_reused(g->rec, g->report->gen.reused_tokens);
	fs_record_progress(g->rec, done, total);
	if (g->sink->progress)
		g->sink->progress(g->sink->arg, done, total, g->report->gen.reused_tokens);
}

static void on_text(void *arg, const char *utf8, size_t n)
{
	struct generation *g = arg;
	if (g->tools)
		fs_tool_parser_push(g->tools, utf8, n);
	else if (g->sink->text)
		g->sink->text(g->sink->arg, utf8, n);
}

static void on_token(void *arg, const struct fs_token_event *t)
{
	struct generation *g = arg;
	if (g->sink->token)
		g->sink->token(g->sink->arg, t);
}

static void on_step(void *arg)
{
	fs_record_token(((struct generation *)arg)->rec);
}

static void on_plain_text(void *arg, const char *utf8, size_t n)
{
	struct generation *g = arg;
	if (g->sink->text)
		g->sink->text(g->sink->arg, utf8, n);
}

static void on_call(void *arg, const char *name, const char *arguments)
{
	struct generation *g = arg;
	g->report->n_calls++;
	if (g->sink->call)
		g->sink->call(g->sink->arg, name, arguments);
}

/* An answer is searched for calls only when the request offered tools. */
static int find_calls(struct generation *g, const struct fs_chat *chat, const struct fs_prompt *prompt)
{
	if (chat->n_tools == 0 || chat->choice == FS_TOOLS_NONE)
		return FS_OK;
	struct fs_tool_events ev = {.arg = g, .text = on_plain_text, .call = on_call};
	g->tools = fs_tool_parser_create(&ev);
	const char *opening = fs_prompt_opening(prompt);
	return g->tools ? fs_tool_parser_push(g->tools, opening, strlen(opening)) : FS_ENOMEM;
}

static int check_room(struct fs_service *s, const struct fs_prompt *prompt, const struct fs_chat *chat,
        struct fs_refusal *why)
{
	int32_t need = fs_prompt_cells(prompt), have = fs_engine_info(s->o.engine)->n_ctx;
	if (need < have)
		return FS_OK;
	return fs_refuse(why, 400, "invalid_request_error", "context_length_exceeded", prompt_field(chat),
	        "the prompt is %d tokens long and leaves no room to answer in the context of %d; shorten it, "
	        "or "
	        "raise \"context\" in the server's config",
	        need, have);
}

static int take_turn(struct fs_service *s, struct fs_cancel *cancel, struct fs_record *rec, int64_t *waited,
        struct fs_refusal *why)
{
	int64_t start = fs_now();
	fs_record_phase(rec, FS_PHASE_QUEUE);
	int rc = fs_turn_enter(s->turn, cancel);
	*waited = fs_now() - start;
	if (rc == FS_EUNAVAILABLE)
		return fs_refuse(why, 503, "unavailable_error", "queue_full", "",
		        "%d requests wait for the engine already; try again shortly", s->o.queue_depth);
	if (rc && rc != FS_ECANCELLED)
		return fs_refuse(why, 500, "server_error", NULL, "", "internal error");
	return rc;
}

/* FS_OK while the engine has its device. */
static int check_engine(struct fs_service *s, int status, const char *type, struct fs_refusal *why)
{
	struct fs_engine_health h;
	fs_engine_health(s->o.engine, &h);
	if (h.state == FS_ENGINE_READY)
		return FS_OK;
	fs_refuse(why, status, type, "engine_unavailable", "", "%s", fs_engine_state_text(h.state));
	why->retry_after_s = h.state == FS_ENGINE_RELOADING ? h.retry_after_s : FAILED_RETRY_S;
	return FS_EINVAL;
}

static int engine_gone(struct fs_service *s, struct fs_refusal *why)
{
	return check_engine(s, 503, "unavailable_error", why);
}

/* Why a generation failed that had begun. */
static int refuse_failed(struct fs_service *s, int rc, const char *text, struct fs_refusal *why)
{
	fs_error("generation failed: %s", text);
	if (rc == FS_EUNAVAILABLE && engine_gone(s, why))
		return FS_EINVAL;
	if (check_engine(s, 500, "server_error", why))
		return FS_EINVAL;
	return fs_refuse(why, 500, "server_error", NULL, "", "the engine failed; the server's log says how");
}

static int run_engine(struct fs_service *s, const struct fs_prompt *prompt, const struct fs_chat *chat,
        struct fs_cancel *cancel, struct generation *g, struct fs_refusal *why)
{
	struct fs_gen_events ev = {
	        .arg = g, .progress = on_progress, .text = on_text, .token = on_token, .step = on_step};
	struct fs_errbuf e = {""};
	if (engine_gone(s, why)) {
		fs_turn_leave(s->turn);
		return FS_EINVAL;
	}
	fs_record_phase(g->rec, FS_PHASE_PREFILL);
	fs_record_turn(g->rec, true);
	if (g->sink->start)
		g->sink->start(g->sink->arg);
	int rc = fs_engine_generate(s->o.engine, prompt, &chat->gen, cancel, &ev, &g->report->gen, &e);
	fs_record_turn(g->rec, false);
	fs_turn_leave(s->turn);
	if (!rc && g->tools)
		fs_tool_parser_end(g->tools);
	if (rc == FS_EINVAL)
		return fs_refuse(why, 400, "invalid_request_error", "context_length_exceeded",
		        prompt_field(chat), "%s", e.text);
	return rc && rc != FS_ECANCELLED ? refuse_failed(s, rc, e.text, why) : rc;
}

static int generate(struct fs_service *s, const struct fs_prompt *prompt, const struct fs_chat *chat,
        struct fs_cancel *cancel, struct generation *g, struct fs_refusal *why)
{
	int rc = check_room(s, prompt, chat, why);
	if (rc)
		return rc;
	if (find_calls(g, chat, prompt))
		return fs_refuse(why, 500, "server_error", NULL, "", "out of memory");
	fs_record_prompt(g->rec, fs_prompt_cells(prompt), chat->gen.max_tokens);
	rc = take_turn(s, cancel, g->rec, &g->report->wait_ns, why);
	if (!rc) {
		rc = run_engine(s, prompt, chat, cancel, g, why);
		const struct fs_gen_result *r = &g->report->gen;
		fs_record_counts(g->rec, r->prompt_tokens, r->reused_tokens, r->completion_tokens);
	}
	return rc;
}

/* ---- the whole way ---- */

static void report_pictures(
        struct fs_chat_report *report, const struct fs_chat *chat, struct fs_rows *const *rows)
{
	report->n_pictures = FS_MIN(chat->n_pictures, (size_t)FS_MAX_PICTURE_REPORTS);
	for (size_t i = 0; i < report->n_pictures; i++) {
		struct fs_picture_report *p = &report->pictures[i];
		snprintf(p->host, sizeof(p->host), "%s", rows[i]->host);
		p->tokens = rows[i]->shape.n_tokens;
		p->cached = chat->pictures[i].cached;
		if (p->cached)
			continue;
		p->encode_ms = rows[i]->encode_ms;
		p->queue_ms = rows[i]->queue_ms;
		p->total_ms = rows[i]->total_ms;
	}
}

/* From the chat to its prompt: pictures fetched and encoded, text rendered. No turn is held. */
static int prepare(struct fs_service *s, struct fs_chat *chat, struct fs_cancel *cancel,
        struct fs_record *rec, struct fs_chat_report *report, struct fs_prompt **prompt,
        struct fs_refusal *why)
{
	if (chat->n_pictures > s->o.max_pictures)
		return fs_refuse(why, 400, "invalid_request_error", "too_many_pictures",
		        chat->pictures[s->o.max_pictures].where,
		        "the request holds %zu pictures; this server takes at most %zu", chat->n_pictures,
		        s->o.max_pictures);
	struct fs_rows **rows = calloc(chat->n_pictures + 1, sizeof(struct fs_rows *));
	if (!rows)
		return fs_refuse(why, 500, "server_error", NULL, "", "out of memory");
	int64_t start = fs_now();
	fs_record_pictures(rec, (int32_t)chat->n_pictures, 0);
	int rc = fs_pictures_fetch(&s->o, chat, cancel, rec, why);
	if (!rc && chat->n_pictures > 0) {
		fs_record_phase(rec, FS_PHASE_ENCODE);
		rc = fs_pictures_encode(&s->o, chat, cancel, rows, why);
	}
	report->prepare_ns = fs_now() - start;
	if (!rc) {
		int32_t cached = 0;
		for (size_t i = 0; i < chat->n_pictures; i++)
			cached += chat->pictures[i].cached;
		fs_record_pictures(rec, (int32_t)chat->n_pictures, cached);
		report_pictures(report, chat, rows);
		rc = make_prompt(s, chat, rows, cancel, prompt, why);
	}
	for (size_t i = 0; i < chat->n_pictures; i++)
		fs_rows_unref(rows[i]);
	free(rows);
	return rc;
}

int fs_service_chat(struct fs_service *s, struct fs_chat *chat, struct fs_cancel *cancel,
        struct fs_record *rec, const struct fs_chat_sink *sink, struct fs_chat_report *report,
        struct fs_refusal *why)
{
	memset(report, 0, sizeof(*report));
	struct generation g = {.sink = sink, .rec = rec, .report = report};
	struct fs_prompt *prompt = NULL;
	int rc = engine_gone(s, why);
	if (!rc)
		rc = prepare(s, chat, cancel, rec, report, &prompt, why);
	drop_bytes(chat);
	if (!rc && sink->prepared)
		sink->prepared(sink->arg);
	if (!rc)
		rc = generate(s, prompt, chat, cancel, &g, why);
	fs_tool_parser_destroy(g.tools);
	fs_prompt_destroy(prompt);
	return rc;
}

int fs_service_count(struct fs_service *s, struct fs_chat *chat, struct fs_cancel *cancel,
        struct fs_record *rec, int32_t *tokens, struct fs_refusal *why)
{
	struct fs_chat_report report = {0};
	struct fs_prompt *prompt = NULL;
	int rc = prepare(s, chat, cancel, rec, &report, &prompt, why);
	if (rc)
		return rc;
	*tokens = fs_prompt_cells(prompt);
	fs_record_prompt(rec, *tokens, 0);
	fs_prompt_destroy(prompt);
	return FS_OK;
}
