/*
 * What the engine's tests share: models and goldens of tests/parity/text, opening an engine on them,
 * comparing logits. Asserts on failure. Include after cmocka's headers.
 */
#ifndef FS_TEST_TEXT_GOLDEN_H
#define FS_TEST_TEXT_GOLDEN_H

#include "server/engine/prompt.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifndef TEST_DEVICE /* "cuda" where the CUDA device is linked with the imitation of its runtime */
#define TEST_DEVICE "cpu"
#endif

static inline const char *tg_path(const char *dir, const char *name, const char *suffix)
{
	static char path[2][1024];
	static int turn;
	const char *root = getenv("FS_TEST_DATA");

	assert_non_null(root);
	turn ^= 1;
	snprintf(path[turn], sizeof(path[turn]), "%s/parity/%s/%s%s", root, dir, name, suffix);
	return path[turn];
}

static inline struct fs_gguf *tg_open(const char *dir, const char *name, const char *suffix)
{
	struct fs_gguf *g = NULL;
	struct fs_errbuf e = {""};

	if (fs_gguf_open(&g, tg_path(dir, name, suffix), &e) != FS_OK)
		fail_msg("%s", e.text);
	return g;
}

static inline int32_t *tg_ints(const struct fs_gguf *g, const char *key, size_t *n)
{
	int32_t *out;

	assert_int_equal(fs_gguf_arr_len(g, key, n, NULL), FS_OK);
	out = calloc(*n + 1, sizeof(*out));
	assert_non_null(out);
	assert_int_equal(fs_gguf_arr_i32(g, key, out, *n, NULL), FS_OK);
	return out;
}

static inline float tg_f32(const struct fs_gguf *g, const char *key)
{
	float v = 0;

	assert_int_equal(fs_gguf_f32(g, key, &v, NULL), FS_OK);
	return v;
}

static inline const float *tg_tensor(const struct fs_gguf *g, const char *name, int64_t ne0, int64_t ne1)
{
	const struct fs_gguf_tensor *t = NULL;
	struct fs_errbuf e = {""};

	if (fs_gguf_need(g, name, ne0, ne1, &t, &e) != FS_OK)
		fail_msg("%s", e.text);
	assert_int_equal(t->type, FS_F32);
	return t->data;
}

static inline struct fs_engine *tg_engine(
        const char *dir, const char *name, bool exact, int32_t chunk, int32_t context)
{
	const struct fs_engine_opts o = {.model = tg_path(dir, name, ".gguf"),
	        .device = TEST_DEVICE,
	        .threads = 2,
	        .exact = exact,
	        .prefill_chunk = chunk,
	        .context = context,
	        .ids_only = true};
	struct fs_engine *en = NULL;
	struct fs_errbuf e = {""};

	if (fs_engine_create(&o, &en, &e) != FS_OK)
		fail_msg("%s", e.text);
	return en;
}

static inline struct fs_prompt *tg_prompt(struct fs_engine *en, const int32_t *ids, size_t n)
{
	struct fs_prompt *p = NULL;
	struct fs_errbuf e = {""};

	if (fs_prompt_from_ids(en, ids, n, NULL, 0, &p, &e) != FS_OK)
		fail_msg("%s", e.text);
	return p;
}

struct tg_diff {
	double max, nmse; /* largest difference; squared error over squared golden */
};
static inline struct tg_diff tg_compare(const float *got, const float *want, size_t n)
{
	struct tg_diff d = {0};
	double err = 0, ref = 0;

	for (size_t i = 0; i < n; i++) {
		double x = (double)got[i] - (double)want[i];
		if (!(fabs(x) <= d.max)) /* a NaN stays */
			d.max = fabs(x);
		err += x * x;
		ref += (double)want[i] * (double)want[i];
	}
	d.nmse = err / ref;
	return d;
}

/* Greedy ids of a generation, taken from the logits that chose them. */
struct tg_taken {
	int32_t ids[64];
	int n;
	const float *want; /* [][n_vocab]: compared with as they come; NULL = not */
	struct tg_diff worst;
};
static inline void tg_take(void *arg, const float *logits, int32_t n_vocab)
{
	struct tg_taken *t = arg;
	int32_t best = 0;

	for (int32_t i = 1; i < n_vocab; i++)
		if (logits[i] > logits[best])
			best = i;
	if (t->want != NULL) {
		struct tg_diff d =
		        tg_compare(logits, t->want + (size_t)t->n * (size_t)n_vocab, (size_t)n_vocab);
		t->worst.max = FS_MAX(t->worst.max, d.max);
		t->worst.nmse = FS_MAX(t->worst.nmse, d.nmse);
	}
	assert_true(t->n < (int)FS_ARRAY_LEN(t->ids));
	t->ids[t->n++] = best;
}

static inline struct fs_gen_params tg_greedy(int32_t max_tokens)
{
	return (struct fs_gen_params){.top_p = 1, .repeat_penalty = 1, .max_tokens = max_tokens};
}

static inline struct fs_gen_result tg_generate(struct fs_engine *en, const struct fs_prompt *p,
        int32_t max_tokens, struct fs_cancel *cancel, const struct fs_gen_events *ev)
{
	const struct fs_gen_params params = tg_greedy(max_tokens);
	struct fs_gen_result r;
	struct fs_errbuf e = {""};

	if (fs_engine_generate(en, p, &params, cancel, ev, &r, &e) != FS_OK)
		fail_msg("%s", e.text);
	return r;
}

#endif
