/*
 * sampler: penalties, filters and the draw. Runs on the engine's thread; allocates only in init. It refuses
 * logits that are NaN. Filters take the best tokens off a heap, so their cost follows what they keep, not a
 * sort of the whole vocabulary.
 */
#include "server/engine/sampler.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

void fs_gen_params_default(struct fs_gen_params *p)
{
	*p = (struct fs_gen_params){
	        .temperature = 0.8f,
	        .top_k = 40,
	        .top_p = 0.95f,
	        .min_p = 0.05f,
	        .repeat_penalty = 1,
	        .repeat_last_n = 64,
	};
}

int fs_gen_params_check(const struct fs_gen_params *p, struct fs_errbuf *e)
{
	const struct {
		const char *name;
		float v, min, max;
	} ranges[] = {
	        {"temperature", p->temperature, 0, 1e6f},
	        {"top_p", p->top_p, 0, 1},
	        {"min_p", p->min_p, 0, 1},
	        {"repeat_penalty", p->repeat_penalty, 1e-3f, 1e3f},
	        {"presence_penalty", p->presence_penalty, -1e3f, 1e3f},
	        {"frequency_penalty", p->frequency_penalty, -1e3f, 1e3f},
	};

	for (size_t i = 0; i < FS_ARRAY_LEN(ranges); i++)
		if (!(ranges[i].v >= ranges[i].min && ranges[i].v <= ranges[i].max)) /* NaN too */
			return fs_fail(e, FS_EINVAL, "%s is %g; it must be from %g to %g", ranges[i].name,
			        (double)ranges[i].v, (double)ranges[i].min, (double)ranges[i].max);
	if (p->top_k < 0)
		return fs_fail(e, FS_EINVAL, "top_k is %d; it must be 0 (off) or more", p->top_k);
	if (p->logprobs && (p->n_top_logprobs < 0 || p->n_top_logprobs > FS_MAX_TOP_LOGPROBS))
		return fs_fail(e, FS_EINVAL, "top_logprobs is %d; it must be from 0 to %d", p->n_top_logprobs,
		        FS_MAX_TOP_LOGPROBS);
	if (p->n_stops > FS_MAX_STOPS)
		return fs_fail(
		        e, FS_EINVAL, "%zu stop strings; at most %d are taken", p->n_stops, FS_MAX_STOPS);
	return FS_OK;
}

/* ---- random numbers ---- */

static uint64_t splitmix64(uint64_t *x)
{
	uint64_t z = *x += 0x9e3779b97f4a7c15u;

	z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
	z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
	return z ^ (z >> 31);
}

static uint64_t rotl(uint64_t x, int k)
{
	return (x << k) | (x >> (64 - k));
}

uint64_t fs_sampler_next(struct fs_sampler *s)
{
	uint64_t *r = s->rng, out = rotl(r[0] + r[3], 23) + r[0], t = r[1] << 17;

	r[2] ^= r[0];
	r[3] ^= r[1];
	r[1] ^= r[2];
	r[0] ^= r[3];
	r[2] ^= t;
	r[3] = rotl(r[3], 45);
	return out;
}

/* ---- life ---- */

int fs_sampler_init(struct fs_sampler *s, int32_t n_vocab, int32_t max_hist, struct fs_errbuf *e)
{
	memset(s, 0, sizeof(*s));
	s->n_vocab = n_vocab;
	s->max_hist = max_hist;
	s->cand = calloc((size_t)n_vocab, sizeof(*s->cand));
	s->count = calloc((size_t)n_vocab, sizeof(*s->count));
	s->stamp = calloc((size_t)n_vocab, sizeof(*s->stamp));
	s->hist = calloc((size_t)max_hist, sizeof(*s->hist));
	if (s->cand == NULL || s->count == NULL || s->stamp == NULL || s->hist == NULL) {
		fs_sampler_finish(s);
		return fs_fail(e, FS_ENOMEM, "no memory for a vocabulary of %d", n_vocab);
	}
	return FS_OK;
}

void fs_sampler_finish(struct fs_sampler *s)
{
	free(s->cand);
	free(s->count);
	free(s->stamp);
	free(s->hist);
	memset(s, 0, sizeof(*s));
}

void fs_sampler_begin(struct fs_sampler *s, const struct fs_gen_params *p, const int32_t *ids, int32_t n)
{
	uint64_t seed = p->seed;

	for (int32_t i = s->n_prompt; i < s->n_hist; i++)
		s->count[s->hist[i]] = 0;
	s->p = *p;
	for (int i = 0; i < 4; i++)
		s->rng[i] = splitmix64(&seed);
	s->n_hist = 0;
	for (int32_t i = 0; i < n; i++) {
		if (ids[i] >= 0 && s->n_hist < s->max_hist)
			s->hist[s->n_hist++] = ids[i];
	}
	s->n_prompt = s->n_hist;
}

void fs_sampler_accept(struct fs_sampler *s, int32_t id)
{
	FS_ASSERT(id >= 0 && id < s->n_vocab && s->n_hist < s->max_hist);
	s->hist[s->n_hist++] = id;
	s->count[id]++;
}

/* ---- penalties ---- */

static void next_epoch(struct fs_sampler *s)
{
	if (++s->epoch == 0) {
		memset(s->stamp, 0, (size_t)s->n_vocab * sizeof(*s->stamp));
		s->epoch = 1;
	}
}

void fs_sampler_penalise(struct fs_sampler *s, float *logits)
{
	const struct fs_gen_params *p = &s->p;
	int32_t window = p->repeat_last_n < 0 ? s->n_hist : FS_MIN(p->repeat_last_n, s->n_hist);

	next_epoch(s);
	for (int32_t i = s->n_hist - window; i < s->n_hist && p->repeat_penalty != 1; i++) {
		int32_t id = s->hist[i];
		if (s->stamp[id] == s->epoch)
			continue;
		s->stamp[id] = s->epoch;
		logits[id] = logits[id] > 0 ? logits[id] / p->repeat_penalty : logits[id] * p->repeat_penalty;
	}
	if (p->presence_penalty == 0 && p->frequency_penalty == 0)
		return;
	next_epoch(s);
	for (int32_t i = s->n_prompt; i < s->n_hist; i++) {
		int32_t id = s->hist[i];
		if (s->stamp[id] == s->epoch)
			continue;
		s->stamp[id] = s->epoch;
		logits[id] -= p->presence_penalty + p->frequency_penalty * (float)s->count[id];
	}
}

/* ---- filters ---- */

static bool better(const struct fs_cand *a, const struct fs_cand *b)
{
	return a->l > b->l || (a->l == b->l && a->id < b->id);
}

static void swap_cand(struct fs_cand *a, struct fs_cand *b)
{
	struct fs_cand t = *a;

	*a = *b;
	*b = t;
}

static void sift_down(struct fs_cand *c, int32_t n, int32_t i)
{
	for (;;) {
		int32_t top = i, left = 2 * i + 1;
		if (left < n && better(&c[left], &c[top]))
			top = left;
		if (left + 1 < n && better(&c[left + 1], &c[top]))
			top = left + 1;
		if (top == i)
			return;
		swap_cand(&c[i], &c[top]);
		i = top;
	}
}

static void heapify(struct fs_cand *c, int32_t n)
{
	for (int32_t i = n / 2 - 1; i >= 0; i--)
		sift_down(c, n, i);
}

/*
 * Takes the best off a heap of n until max_n are taken or their p reaches the mass. Afterwards they lie, best
 * first, at the returned place in c.
 */
static struct fs_cand *take_best(struct fs_cand *c, int32_t n, int32_t max_n, double mass, int32_t *taken)
{
	int32_t left = n;
	double sum = 0;

	while (left > 0 && n - left < max_n && sum < mass) {
		left--;
		swap_cand(&c[0], &c[left]);
		sift_down(c, left, 0);
		sum += (double)c[left].p;
	}
	*taken = n - left;
	for (int32_t i = left, j = n - 1; i < j; i++, j--)
		swap_cand(&c[i], &c[j]);
	return c + left;
}

static double total_p(const struct fs_cand *c, int32_t n)
{
	double sum = 0;

	for (int32_t i = 0; i < n; i++)
		sum += (double)c[i].p;
	return sum;
}

/* Largest logit; false for a NaN or when none is finite. */
static bool find_max(const float *logits, int32_t n, int32_t *at)
{
	int32_t best = 0;
	bool nan = false;

	for (int32_t i = 0; i < n; i++) {
		nan |= isnan(logits[i]);
		if (logits[i] > logits[best])
			best = i;
	}
	*at = best;
	return !nan && isfinite(logits[best]);
}

/* Fills cand with relative probabilities (the best has 1). */
static bool fill(struct fs_sampler *s, const float *logits)
{
	int32_t best;

	if (!find_max(logits, s->n_vocab, &best))
		return false;
	for (int32_t i = 0; i < s->n_vocab; i++) {
		float l = (logits[i] - logits[best]) / s->p.temperature;
		s->cand[i] = (struct fs_cand){.id = i, .l = l, .p = expf(l)};
	}
	return true;
}

/* c sorted or not, best is its largest p: drops what is below min_p of it, keeping the order. */
static int32_t apply_min_p(struct fs_cand *c, int32_t n, float limit)
{
	int32_t kept = 0;

	for (int32_t i = 0; i < n; i++)
		if (c[i].p >= limit)
			c[kept++] = c[i];
	return kept;
}

int32_t fs_sampler_filter(struct fs_sampler *s, const float *logits, struct fs_cand **out)
{
	const struct fs_gen_params *p = &s->p;
	struct fs_cand *c = s->cand;
	int32_t n = s->n_vocab;
	double sum;

	if (!fill(s, logits))
		return 0;
	bool heap = false;
	if (p->top_k > 0 && p->top_k < n) {
		heapify(c, n);
		c = take_best(c, n, p->top_k, HUGE_VAL, &n);
		heap = true; /* sorted best first is a heap as well */
	}
	if (p->top_p < 1) {
		double mass = (double)p->top_p * total_p(c, n);
		if (!heap)
			heapify(c, n);
		c = take_best(c, n, n, FS_MAX(mass, 1e-30), &n);
	}
	if (p->min_p > 0)
		n = apply_min_p(c, n, p->min_p);
	sum = total_p(c, n);
	for (int32_t i = 0; i < n; i++)
		c[i].p = (float)((double)c[i].p / sum);
	*out = c;
	return n;
}

int fs_sampler_pick(struct fs_sampler *s, float *logits, int32_t *id, struct fs_errbuf *e)
{
	struct fs_cand *c = NULL;
	int32_t n, i = 0;
	double r;

	fs_sampler_penalise(s, logits);
	if (s->p.temperature == 0) {
		if (!find_max(logits, s->n_vocab, id))
			return fs_fail(e, FS_EINTERNAL, "the model's logits are not finite");
		return FS_OK;
	}
	n = fs_sampler_filter(s, logits, &c);
	if (n == 0)
		return fs_fail(e, FS_EINTERNAL, "the model's logits are not finite");
	r = (double)(fs_sampler_next(s) >> 11) * 0x1p-53;
	while (i < n - 1 && r >= (double)c[i].p)
		r -= (double)c[i++].p;
	*id = c[i].id;
	return FS_OK;
}
