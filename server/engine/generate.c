/*
 * generate: one generation from prefill to the last token, on the engine's thread. Looks at the cancel token
 * between chunks, layers and tokens; whatever ends it, the KV cache holds exactly the cells that were
 * completed, so the next prompt may reuse them.
 */
#include "server/engine/core.h"
#include "server/engine/logprobs.h"
#include "server/engine/stop.h"

#include <string.h>
#include <sys/random.h>

struct run {
	struct fs_core *c;
	const struct fs_prompt *p;
	struct fs_cancel *cancel;
	const struct fs_gen_events *ev; /* not NULL */
	struct fs_gen_result *r;
	struct fs_errbuf *e;
	struct fs_stop stop;
	struct fs_lp lp;
	struct fs_tok_stream stream;
	int32_t max_tokens;
	bool ignore_eos;
};

int fs_core_check(int32_t n_ctx, const struct fs_prompt *p, struct fs_errbuf *e)
{
	if (p->n < n_ctx)
		return FS_OK;
	return fs_fail(e, FS_EINVAL,
	        "the prompt has %d tokens, the context holds %d with at least one for the answer: shorten "
	        "the prompt, send smaller "
	        "pictures, or raise \"context\" in the server's configuration",
	        p->n, n_ctx);
}

static void report(struct run *u, int32_t done)
{
	if (u->ev->progress != NULL)
		u->ev->progress(u->ev->arg, done, u->p->n);
}

/* Leaves the prompt in the cache and the last cell's output in the graph. */
static int prefill(struct run *u)
{
	struct fs_core *c = u->c;
	int32_t at = FS_MIN(fs_kv_common(&c->kv, u->p),
	        u->p->n - 1); /* the last cell is computed in any case: it gives the logits */
	int err;

	fs_kv_truncate(&c->kv, at);
	u->r->reused_tokens = at;
	err = fs_kv_reserve(&c->kv, u->p, u->e);
	report(u, at);
	while (err == FS_OK && at < u->p->n) {
		int32_t n = FS_MIN(c->graph.max_rows, u->p->n - at), last = at + n == u->p->n;
		err = fs_cancelled(u->cancel)
		              ? FS_ECANCELLED
		              : fs_graph_prompt(&c->graph, u->p, at, n, n - last, u->cancel, u->e);
		if (err == FS_OK) {
			at += n;
			report(u, at);
		}
	}
	return err;
}

static void text_out(void *arg, const char *utf8, size_t n)
{
	struct run *u = arg;

	fs_lp_text_out(&u->lp, n);
	if (u->ev->text != NULL)
		u->ev->text(u->ev->arg, utf8, n);
}

/* The token's text through the stop strings. *hit: a stop string was completed. */
static int put_text(struct run *u, int32_t id, bool *hit)
{
	struct fs_core *c = u->c;
	int which, err;

	*hit = false;
	err = fs_lp_add(&u->lp, id, u->stream.drop_space);
	if (c->tok == NULL && err == FS_OK)
		return FS_OK;
	fs_buf_clear(&c->piece);
	if (err == FS_OK)
		err = fs_tok_stream_push(c->tok, &u->stream, id, &c->piece);
	fs_lp_text_in(&u->lp, c->piece.len);
	if (err == FS_OK && c->piece.len > 0)
		err = fs_stop_push(&u->stop, (const char *)c->piece.data, c->piece.len, text_out, u, &which);
	else
		which = -1;
	if (err != FS_OK)
		return fs_fail(u->e, err, "no memory for the answer's text");
	if (which >= 0) {
		u->r->stop = u->stop.stops[which];
		*hit = true;
	}
	return FS_OK;
}

/* The end without a stop string: an unfinished character, then what was held back. */
static void flush_text(struct run *u)
{
	struct fs_core *c = u->c;
	int hit = -1;

	if (c->tok == NULL)
		return;
	fs_buf_clear(&c->piece);
	if (fs_tok_stream_flush(&u->stream, &c->piece) == FS_OK && c->piece.len > 0) {
		fs_lp_text_in(&u->lp, c->piece.len);
		(void)fs_stop_push(&u->stop, (const char *)c->piece.data, c->piece.len, text_out, u, &hit);
	}
	fs_stop_flush(&u->stop, text_out, u);
	fs_lp_flush(&u->lp);
}

static int next_token(struct run *u, int32_t row, int32_t *id)
{
	struct fs_core *c = u->c;
	int err = fs_graph_logits(&c->graph, row, 1, c->logits, u->e);

	if (err != FS_OK)
		return err;
	if (u->ev->logits != NULL)
		u->ev->logits(u->ev->arg, c->logits, c->model.hp.n_vocab);
	if (fs_lp_on(&u->lp)) { /* penalties change them in place */
		float *raw = c->logits + c->model.hp.n_vocab;
		memcpy(raw, c->logits, (size_t)c->model.hp.n_vocab * sizeof(*raw));
		fs_lp_measure(&u->lp, raw);
	}
	err = fs_sampler_pick(&c->sampler, c->logits, id, u->e);
	if (err == FS_OK) {
		fs_sampler_accept(&c->sampler, *id);
		u->r->completion_tokens++;
		if (u->ev->step != NULL)
			u->ev->step(u->ev->arg);
	}
	return err;
}

/* Samples until something ends it; that is r->finish. */
static int decode(struct run *u)
{
	struct fs_core *c = u->c;
	int32_t pos = u->p->next_pos, row = c->graph.n - 1, id;
	bool hit = false;

	for (;; row = 0) {
		int err = next_token(u, row, &id);
		if (err != FS_OK)
			return err;
		u->r->finish = FS_FINISH_STOP;
		if (c->tok != NULL && !u->ignore_eos && fs_tok_is_eog(c->tok, id))
			return FS_OK;
		err = put_text(u, id, &hit);
		if (err != FS_OK || hit)
			return err;
		u->r->finish = FS_FINISH_LENGTH;
		if (u->r->completion_tokens >= u->max_tokens)
			return FS_OK;
		err = fs_cancelled(u->cancel) ? FS_ECANCELLED
		                              : fs_graph_token(&c->graph, id, pos++, u->cancel, u->e);
		if (err != FS_OK)
			return err;
	}
}

static void begin_sampler(struct run *u, const struct fs_gen_params *params)
{
	struct fs_gen_params p = *params;

	if (!p.has_seed && getrandom(&p.seed, sizeof(p.seed), 0) != (ssize_t)sizeof(p.seed))
		p.seed = (uint64_t)fs_now();
	fs_sampler_begin(&u->c->sampler, &p, u->p->ids, u->p->n);
}

/* Turns how it ended into the result. */
static int conclude(struct run *u, int err)
{
	if (u->r->stop == NULL)
		flush_text(u);
	if (err == FS_ECANCELLED) {
		u->r->finish = FS_FINISH_CANCEL;
		return FS_OK;
	}
	if (err == FS_OK)
		return FS_OK;
	u->r->finish = FS_FINISH_ERROR;
	fs_kv_truncate(&u->c->kv, 0); /* the device's memory is not to be trusted */
	if (u->e != NULL && u->e->text[0] == '\0')
		fs_fail(u->e, err, "%s", fs_err_name(err));
	if (u->r->completion_tokens == 0)
		return fs_fail_prefix(u->e, err, "the engine failed on the prompt");
	return fs_fail_prefix(
	        u->e, err, "the engine failed after %d token(s) of the answer", u->r->completion_tokens);
}

int fs_core_generate(struct fs_core *c, const struct fs_prompt *p, const struct fs_gen_params *params,
        struct fs_cancel *cancel, const struct fs_gen_events *ev, struct fs_gen_result *r,
        struct fs_errbuf *e)
{
	static const struct fs_gen_events none;
	struct run u = {.c = c, .p = p, .cancel = cancel, .ev = ev != NULL ? ev : &none, .r = r, .e = e};
	int32_t room = c->n_ctx - p->n;
	int64_t start = fs_now(), mid;
	int err;

	if (e != NULL)
		e->text[0] = '\0';
	err = fs_stop_init(&u.stop, params->stops, params->n_stops, e);
	if (err != FS_OK)
		return err;
	if (c->tok != NULL)
		u.stream.drop_space = p->answer && fs_tok_info(c->tok)->add_space_prefix;
	u.ignore_eos = params->ignore_eos;
	u.max_tokens = params->max_tokens > 0 ? FS_MIN(params->max_tokens, room) : room;
	fs_lp_init(&u.lp, c->tok, c->model.hp.n_vocab, params, u.ev);
	begin_sampler(&u, params);
	err = prefill(&u);
	mid = fs_now();
	r->prefill_ns = mid - start;
	if (err == FS_OK) {
		err = decode(&u);
		r->decode_ns = fs_now() - mid;
	}
	err = conclude(&u, err);
	fs_lp_finish(&u.lp);
	fs_stop_finish(&u.stop);
	return err;
}

int fs_core_logits(struct fs_core *c, const struct fs_prompt *p, float *out, struct fs_errbuf *e)
{
	size_t n_vocab = (size_t)c->model.hp.n_vocab;
	int err;

	fs_kv_truncate(&c->kv, 0);
	err = fs_kv_reserve(&c->kv, p, e);
	for (int32_t at = 0; at < p->n && err == FS_OK;) {
		int32_t n = FS_MIN(c->graph.max_rows, p->n - at);
		err = fs_graph_prompt(&c->graph, p, at, n, 0, NULL, e);
		for (int32_t i = 0; i < n && err == FS_OK;) {
			int32_t some = FS_MIN(c->graph.max_logits, n - i);
			err = fs_graph_logits(&c->graph, i, some, out + (size_t)(at + i) * n_vocab, e);
			i += some;
		}
		at += n;
	}
	fs_kv_truncate(&c->kv, 0);
	return err;
}
