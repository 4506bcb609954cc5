/* logprobs: see logprobs.h. The queue is bounded by the tokens of one answer. */
#include "server/engine/logprobs.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define MAX_BYTES ((size_t)1 << 22) /* of the pieces of one event */

void fs_lp_init(struct fs_lp *lp, const struct fs_tok *tok, int32_t n_vocab,
        const struct fs_gen_params *params, const struct fs_gen_events *ev)
{
	memset(lp, 0, sizeof(*lp));
	fs_buf_init(&lp->bytes, MAX_BYTES);
	if (!params->logprobs || ev->token == NULL)
		return;
	lp->tok = tok;
	lp->ev = ev;
	lp->n_vocab = n_vocab;
	lp->n_top = FS_MIN(params->n_top_logprobs, n_vocab);
}

void fs_lp_finish(struct fs_lp *lp)
{
	fs_buf_finish(&lp->bytes);
	free(lp->queue);
	memset(lp, 0, sizeof(*lp));
}

/* ---- numbers ---- */

double fs_lp_norm(const float *logits, int32_t n)
{
	float max = -HUGE_VALF;
	double sum = 0;

	for (int32_t i = 0; i < n; i++)
		max = FS_MAX(max, logits[i]);
	if (!isfinite(max))
		return (double)max;
	for (int32_t i = 0; i < n; i++)
		sum += exp((double)logits[i] - (double)max);
	return (double)max + log(sum);
}

static float logprob(float logit, double norm)
{
	double l = (double)logit - norm;

	return l >= (double)FS_LOGPROB_MIN ? (float)l : FS_LOGPROB_MIN; /* NaN too */
}

void fs_lp_best(const float *logits, int32_t n, double norm, int32_t n_top, struct fs_lp_entry *top)
{
	int32_t have = 0;

	for (int32_t i = 0; i < n && n_top > 0; i++) {
		int32_t at = have;

		if (have == n_top && !(logits[i] > logits[top[n_top - 1].id]))
			continue;
		if (have == n_top)
			at = n_top - 1;
		else
			have++;
		for (; at > 0 && logits[i] > logits[top[at - 1].id]; at--)
			top[at] = top[at - 1];
		top[at].id = i;
	}
	for (int32_t i = 0; i < have; i++)
		top[i].logprob = logprob(logits[top[i].id], norm);
}

void fs_lp_measure(struct fs_lp *lp, const float *logits)
{
	if (!fs_lp_on(lp))
		return;
	lp->logits = logits;
	lp->norm = fs_lp_norm(logits, lp->n_vocab);
	fs_lp_best(logits, lp->n_vocab, lp->norm, lp->n_top, lp->top);
}

/* ---- events ---- */

/* Appends the token's bytes to lp->bytes; p->bytes is set when all are there. */
static void describe(struct fs_lp *lp, const struct fs_lp_entry *x, bool front, struct fs_token_prob *p)
{
	size_t before = lp->bytes.len, len = 0;
	const char *name;

	*p = (struct fs_token_prob){.id = x->id, .logprob = x->logprob};
	if (lp->tok == NULL || fs_tok_bytes(lp->tok, x->id, &lp->bytes) != FS_OK)
		return;
	if (lp->bytes.len == before && (name = fs_tok_text(lp->tok, x->id, &len)) != NULL) {
		p->control = true;
		(void)fs_buf_append(&lp->bytes, name, len);
	} else if (front && lp->bytes.len > before && lp->bytes.data[before] == ' ') {
		memmove(lp->bytes.data + before, lp->bytes.data + before + 1, lp->bytes.len - before - 1);
		lp->bytes.len--;
	}
	p->n_bytes = lp->bytes.len - before;
}

static void send(struct fs_lp *lp, const struct fs_lp_token *t)
{
	struct fs_token_prob top[FS_MAX_TOP_LOGPROBS];
	struct fs_token_event e = {.top = top, .n_top = (size_t)lp->n_top};
	size_t at = 0;

	fs_buf_clear(&lp->bytes);
	describe(lp, &t->chosen, t->front, &e.chosen);
	for (int32_t i = 0; i < lp->n_top; i++)
		describe(lp, &t->top[i], t->front, &top[i]);
	if (lp->bytes.data != NULL) { /* it does not move any more */
		e.chosen.bytes = (const char *)lp->bytes.data;
		at = e.chosen.n_bytes;
		for (int32_t i = 0; i < lp->n_top; at += top[i++].n_bytes)
			top[i].bytes = (const char *)lp->bytes.data + at;
	}
	lp->ev->token(lp->ev->arg, &e);
}

static void send_first(struct fs_lp *lp, size_t n)
{
	for (size_t i = 0; i < n; i++)
		send(lp, &lp->queue[i]);
	lp->n -= n;
	if (n > 0 && lp->n > 0)
		memmove(lp->queue, lp->queue + n, lp->n * sizeof(*lp->queue));
}

int fs_lp_add(struct fs_lp *lp, int32_t id, bool front)
{
	struct fs_lp_token *t;

	if (!fs_lp_on(lp))
		return FS_OK;
	if (lp->n == lp->cap) {
		size_t cap = lp->cap > 0 ? 2 * lp->cap : 16;

		t = realloc(lp->queue, cap * sizeof(*t));
		if (t == NULL)
			return FS_ENOMEM;
		lp->queue = t;
		lp->cap = cap;
	}
	t = &lp->queue[lp->n++];
	t->chosen = (struct fs_lp_entry){id, logprob(lp->logits[id], lp->norm)};
	memcpy(t->top, lp->top, sizeof(t->top));
	t->from = lp->in;
	t->front = front;
	if (lp->tok == NULL)
		send_first(lp, 1);
	return FS_OK;
}

void fs_lp_text_out(struct fs_lp *lp, size_t n)
{
	size_t ready = 0;

	if (!fs_lp_on(lp))
		return;
	lp->out += n;
	while (ready < lp->n && lp->queue[ready].from < lp->out)
		ready++;
	send_first(lp, ready);
}

void fs_lp_flush(struct fs_lp *lp)
{
	if (fs_lp_on(lp))
		send_first(lp, lp->n);
}
