/* The life of one chat on its worker: pictures, prompt, turn, generation. */
#include "server/service/service.h"

#include "server/service/pictures.h"
#include "server/service/turn.h"
#include "server/service/workers.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct fs_service {
	struct fs_service_opts o;
	struct fs_workers *workers;
	struct fs_turn turn;
};

int fs_service_create(const struct fs_service_opts *o, struct fs_service **out, struct fs_errbuf *e)
{
	struct fs_service *s = calloc(1, sizeof(*s));
	if (!s)
		return fs_fail(e, FS_ENOMEM, "out of memory");
	s->o = *o;
	int rc = fs_turn_init(&s->turn, (size_t)o->queue_depth);
	if (!rc)
		rc = fs_workers_create(o->workers, (size_t)o->queue_depth, &s->workers, e);
	if (rc) {
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
	fs_turn_finish(&s->turn);
	free(s);
}

const struct fs_service_opts *fs_service_opts(const struct fs_service *s)
{
	return &s->o;
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
	snprintf(r->param, sizeof(r->param), "%s", param);
	va_list ap;
	va_start(ap, fmt);
	vsnprintf(r->text.text, sizeof(r->text.text), fmt, ap);
	va_end(ap);
	return FS_EINVAL;
}

void fs_chat_finish(struct fs_chat *c)
{
	for (size_t i = 0; i < c->n_messages; i++) {
		for (size_t j = 0; j < c->messages[i].n_parts; j++)
			free(c->messages[i].parts[j].text);
		free(c->messages[i].parts);
	}
	for (size_t i = 0; i < c->n_pictures; i++)
		free(c->pictures[i].bytes);
	for (size_t i = 0; i < FS_ARRAY_LEN(c->stops); i++)
		free(c->stops[i]);
	free(c->messages);
	free(c->pictures);
	memset(c, 0, sizeof(*c));
}

/* The engine's view of the messages: borrowed text, rows in the place of pictures. */
static int make_prompt(struct fs_service *s, const struct fs_chat *chat, struct fs_rows *const *rows,
        struct fs_prompt **out, struct fs_refusal *why)
{
	size_t n_parts = 0, at = 0;
	for (size_t i = 0; i < chat->n_messages; i++)
		n_parts += chat->messages[i].n_parts;
	struct fs_message *msgs = calloc(chat->n_messages + 1, sizeof(*msgs));
	struct fs_part *parts = calloc(n_parts + 1, sizeof(*parts));
	int rc = msgs && parts ? FS_OK : FS_ENOMEM;
	for (size_t i = 0; !rc && i < chat->n_messages; i++) {
		const struct fs_chat_message *m = &chat->messages[i];
		msgs[i] = (struct fs_message){.role = m->role, .parts = parts + at, .n_parts = m->n_parts};
		for (size_t j = 0; j < m->n_parts; j++, at++) {
			const struct fs_chat_part *p = &m->parts[j];
			parts[at] = (struct fs_part){.text = p->text,
			        .text_len = p->text_len,
			        .rows = p->text ? NULL : rows[p->picture]};
		}
	}
	struct fs_errbuf e = {"out of memory"};
	if (!rc)
		rc = fs_prompt_from_chat(s->o.engine, msgs, chat->n_messages, out, &e);
	free(msgs);
	free(parts);
	if (rc == FS_EINVAL)
		return fs_refuse(why, 400, "invalid_request_error", NULL, "messages", "%s", e.text);
	if (rc == FS_ELIMIT)
		return fs_refuse(why, 400, "invalid_request_error", "context_length_exceeded", "messages",
		        "%s; shorten it, or raise \"context\" in the server's config", e.text);
	if (rc)
		return fs_refuse(why, 500, "server_error", NULL, "", "%s", e.text);
	return FS_OK;
}

static int generate(struct fs_service *s, const struct fs_prompt *prompt, const struct fs_chat *chat,
        struct fs_cancel *cancel, const struct fs_chat_sink *sink, struct fs_chat_report *report,
        struct fs_refusal *why)
{
	int32_t need = fs_prompt_cells(prompt), have = fs_engine_info(s->o.engine)->n_ctx;
	if (need >= have)
		return fs_refuse(why, 400, "invalid_request_error", "context_length_exceeded", "messages",
		        "the prompt is %d tokens long and leaves no room to answer in the context of %d; "
		        "shorten it, or raise \"context\" in the "
		        "server's config",
		        need, have);
	int64_t start = fs_now();
	int rc = fs_turn_enter(&s->turn, cancel);
	report->wait_ns = fs_now() - start;
	if (rc == FS_EUNAVAILABLE)
		return fs_refuse(why, 503, "unavailable_error", "queue_full", "",
		        "%d requests wait for the engine already; try again shortly", s->o.queue_depth);
	if (rc == FS_ECANCELLED)
		return rc;
	if (rc)
		return fs_refuse(why, 500, "server_error", NULL, "", "internal error");
	if (sink->start)
		sink->start(sink->arg);
	struct fs_gen_events ev = {.arg = sink->arg, .text = sink->text};
	struct fs_errbuf e = {""};
	rc = fs_engine_generate(s->o.engine, prompt, &chat->gen, cancel, &ev, &report->gen, &e);
	fs_turn_leave(&s->turn);
	if (rc == FS_EINVAL)
		return fs_refuse(why, 400, "invalid_request_error", "context_length_exceeded", "messages",
		        "%s", e.text);
	if (rc && rc != FS_ECANCELLED) {
		fs_error("generation failed: %s", e.text);
		return fs_refuse(
		        why, 500, "server_error", NULL, "", "the engine failed; the server's log says how");
	}
	return rc;
}

static void report_pictures(struct fs_chat_report *report, struct fs_rows *const *rows, size_t n)
{
	report->n_pictures = FS_MIN(n, (size_t)FS_MAX_PICTURE_REPORTS);
	for (size_t i = 0; i < report->n_pictures; i++) {
		struct fs_picture_report *p = &report->pictures[i];
		snprintf(p->host, sizeof(p->host), "%s", rows[i]->host);
		p->tokens = rows[i]->shape.n_tokens;
		p->encode_ms = rows[i]->encode_ms;
		p->queue_ms = rows[i]->queue_ms;
		p->total_ms = rows[i]->total_ms;
	}
}

int fs_service_chat(struct fs_service *s, const struct fs_chat *chat, struct fs_cancel *cancel,
        const struct fs_chat_sink *sink, struct fs_chat_report *report, struct fs_refusal *why)
{
	memset(report, 0, sizeof(*report));
	if (chat->n_pictures > s->o.max_pictures)
		return fs_refuse(why, 400, "invalid_request_error", "too_many_pictures",
		        chat->pictures[s->o.max_pictures].where,
		        "the request holds %zu pictures; this server takes at most %zu", chat->n_pictures,
		        s->o.max_pictures);
	struct fs_rows **rows = calloc(chat->n_pictures + 1, sizeof(struct fs_rows *));
	if (!rows)
		return fs_refuse(why, 500, "server_error", NULL, "", "out of memory");
	int64_t start = fs_now();
	struct fs_prompt *prompt = NULL;
	int rc = fs_pictures_encode(&s->o, chat, cancel, rows, why);
	report->prepare_ns = fs_now() - start;
	if (!rc) {
		report_pictures(report, rows, chat->n_pictures);
		rc = make_prompt(s, chat, rows, &prompt, why);
	}
	for (size_t i = 0; i < chat->n_pictures; i++)
		fs_rows_unref(rows[i]);
	free(rows);
	if (!rc)
		rc = generate(s, prompt, chat, cancel, sink, report, why);
	fs_prompt_destroy(prompt);
	return rc;
}
