/*
 * logprobs: what a generation tells about each token: how likely the model found it, and the most likely
 * ones. Internal to the engine. One thread: the engine's. Tokens wait here until the first text that holds
 * some of theirs goes out, as stop strings hold text back; those that no text follows go with the end, or are
 * dropped when they lie in a stop string. It costs nothing when no events are wanted.
 */
#ifndef FS_ENGINE_LOGPROBS_H
#define FS_ENGINE_LOGPROBS_H

#include "server/engine/engine.h"
#include "server/engine/tokenizer.h"

struct fs_lp_entry {
	int32_t id;
	float logprob;
};
struct fs_lp_token {
	struct fs_lp_entry chosen, top[FS_MAX_TOP_LOGPROBS];
	uint64_t from; /* bytes of text before it */
	bool front;    /* a space in front of its text is dropped */
};
struct fs_lp {
	const struct fs_tok *tok;       /* NULL: ids only, tokens go out at once */
	const struct fs_gen_events *ev; /* NULL: off */
	int32_t n_vocab, n_top;
	const float *logits; /* raw, of the token to come; the caller's */
	double norm;         /* log of the sum of their exponentials */
	struct fs_lp_entry top[FS_MAX_TOP_LOGPROBS];
	struct fs_lp_token *queue; /* [n] waiting */
	size_t n, cap;
	uint64_t in, out; /* bytes of text that tokens have put in, and that went out */
	struct fs_buf bytes;
};

/* Off unless params ask for it and ev takes it. tok may be NULL. */
void fs_lp_init(struct fs_lp *lp, const struct fs_tok *tok, int32_t n_vocab,
        const struct fs_gen_params *params, const struct fs_gen_events *ev);
void fs_lp_finish(struct fs_lp *lp);
static inline bool fs_lp_on(const struct fs_lp *lp)
{
	return lp->ev != NULL;
}
/* Before the token is chosen. logits[n_vocab] must stay as they are until fs_lp_add. */
void fs_lp_measure(struct fs_lp *lp, const float *logits);
/* The token was chosen; its text comes with fs_lp_text_in. front: as fs_lp_token. FS_ENOMEM. */
int fs_lp_add(struct fs_lp *lp, int32_t id, bool front);
static inline void fs_lp_text_in(struct fs_lp *lp, size_t n)
{
	lp->in += n;
}
/* n bytes are about to go out: first the events of the tokens that they begin in. */
void fs_lp_text_out(struct fs_lp *lp, size_t n);
/* The end without a stop string: the rest. */
void fs_lp_flush(struct fs_lp *lp);

/* The log of the sum of exponentials, in double; -inf when all are. */
double fs_lp_norm(const float *logits, int32_t n);
/* The n_top largest, best first, ties to the lower id; n_top <= n and <= FS_MAX_TOP_LOGPROBS. */
void fs_lp_best(const float *logits, int32_t n, double norm, int32_t n_top, struct fs_lp_entry *top);

#endif
