/*
 * sampler: logits to the next token. Internal to the engine. One thread: the engine's. Deterministic for a
 * seed: xoshiro256++ (Blackman and Vigna) whose state is four outputs of splitmix64 started at the seed; one
 * draw a token, 53 bits of it.
 *
 * Order: penalties, temperature, top_k, top_p, min_p, draw. Each filter sees the distribution that the one
 * before left, renormalised; all keep at least one token. Ties go to the lower id. temperature 0: the largest
 * logit after penalties, no draw. Penalties: repeat_penalty divides positive and multiplies negative logits
 * of the tokens among the last repeat_last_n (prompt included; < 0 = all); presence and frequency subtract
 * from tokens generated so far, as OpenAI's API defines them.
 */
#ifndef FS_ENGINE_SAMPLER_H
#define FS_ENGINE_SAMPLER_H

#include "server/engine/engine.h"

struct fs_cand {
	int32_t id;
	float l; /* (logit - largest) / temperature */
	float p; /* after fs_sampler_filter: its probability */
};
struct fs_sampler {
	int32_t n_vocab, max_hist;
	struct fs_gen_params p;
	uint64_t rng[4];
	struct fs_cand *cand; /* [n_vocab] */
	int32_t *hist;        /* [max_hist] tokens of prompt and answer, rows left out */
	int32_t n_hist;
	int32_t n_prompt; /* of hist */
	uint32_t *count;  /* [n_vocab] times generated */
	uint32_t *stamp;  /* [n_vocab] epoch in which the repeat penalty was applied */
	uint32_t epoch;
};

/* FS_EINVAL naming the parameter that is out of its range. */
int fs_gen_params_check(const struct fs_gen_params *p, struct fs_errbuf *e);

/* max_hist: tokens that fs_sampler_accept and _begin may bring in all. */
int fs_sampler_init(struct fs_sampler *s, int32_t n_vocab, int32_t max_hist, struct fs_errbuf *e);
void fs_sampler_finish(struct fs_sampler *s);
/* A new generation after n prompt ids (negative ones are skipped). p was checked. */
void fs_sampler_begin(struct fs_sampler *s, const struct fs_gen_params *p, const int32_t *ids, int32_t n);
/* Chooses from logits[n_vocab], which are changed. FS_EINTERNAL: a logit is NaN, or none is finite. */
int fs_sampler_pick(struct fs_sampler *s, float *logits, int32_t *id, struct fs_errbuf *e);
/* The token was put out and counts from now on. */
void fs_sampler_accept(struct fs_sampler *s, int32_t id);

/* The steps of pick, for tests. */
void fs_sampler_penalise(struct fs_sampler *s, float *logits);
/* temperature > 0. Returns how many candidates are left, *out points at them, p sums to 1. 0: no finite logit
 * or a NaN. */
int32_t fs_sampler_filter(struct fs_sampler *s, const float *logits, struct fs_cand **out);
uint64_t fs_sampler_next(struct fs_sampler *s);

#endif
