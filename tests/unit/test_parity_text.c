/*
 * The engine's logits against goldens that Hugging Face transformers computed from the same weights
 * (tests/parity/README.md): every architecture, every dtype, pictures with M-RoPE positions, prefill in
 * chunks and token by token, and the greedy continuation.
 *
 * Tolerances. Exact precision (f32 products of dequantised weights): sums in another order only. Auto: the
 * goldens carry what rounding to bf16, or activations to int8, does to the very same model when the reference
 * is run so; twice the square of that, on average over the logits.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "tests/unit/text_golden.h"

#define EXACT_NMSE 1e-10 /* f32 over these depths: 1e-5 relative */
#define KV_F16_NMSE 1e-6 /* auto keeps K and V as halves, 2^-11 relative each */

static const char *const models[] = {"llama-f32", "llama-mixed", "llama-k", "llama3-f32", "llama3-mixed",
        "qwen2-f32", "qwen2-mixed", "qwen2-legacy", "qwen3-f32", "qwen3-mixed", "qwen2vl-f32",
        "qwen2vl-mixed"};

/* Models of which every so-manieth goes through the slow ways: the imitation of a card is slow. */
#ifndef TEST_EVERY
#define TEST_EVERY 1
#endif

static double allowed_nmse(const struct fs_gguf *g, bool exact)
{
	float bf16 = tg_f32(g, "parity.bf16.nmse"), q8 = tg_f32(g, "parity.q8.nmse");

	return exact ? EXACT_NMSE : 2 * (double)FS_MAX(bf16, q8) + KV_F16_NMSE;
}

static void check_prompt(struct fs_engine *en, const char *name, const char *how, const struct fs_prompt *p,
        const float *want, double nmse)
{
	size_t n = (size_t)p->n * (size_t)fs_engine_info(en)->n_vocab;
	float *got = calloc(n, sizeof(*got));
	struct fs_errbuf e = {""};
	struct tg_diff d;

	assert_non_null(got);
	if (fs_engine_logits(en, p, got, &e) != FS_OK)
		fail_msg("%s", e.text);
	d = tg_compare(got, want, n);
	print_message("%-14s %-18s max |d| %.3g, nmse %.3g of %.3g\n", name, how, d.max, d.nmse, nmse);
	if (!(d.nmse <= nmse))
		fail_msg("%s %s: nmse %g, allowed %g", name, how, d.nmse, nmse);
	free(got);
}

/* Tokens and the logits that chose them, from a fresh cache. */
static void check_greedy(struct fs_engine *en, const struct fs_gguf *g, const char *name,
        const struct fs_prompt *p, double nmse)
{
	struct tg_taken t = {.n = 0};
	const struct fs_gen_events ev = {.arg = &t, .logits = tg_take};
	size_t n;
	int32_t *next = tg_ints(g, "parity.next_ids", &n);
	struct fs_gen_result r;

	t.want = tg_tensor(g, "next_logits", fs_engine_info(en)->n_vocab, (int64_t)n);
	r = tg_generate(en, p, (int32_t)n, NULL, &ev);
	assert_int_equal(r.completion_tokens, n);
	assert_int_equal(r.finish, FS_FINISH_LENGTH);
	if (memcmp(t.ids, next, n * sizeof(*next)) != 0)
		fail_msg("%s: another continuation", name);
	if (!(t.worst.nmse <= 10 * nmse)) /* one row, not the mean of forty */
		fail_msg("%s: continuation's nmse %g, allowed %g", name, t.worst.nmse, 10 * nmse);
	free(next);
}

static void check_model(const char *name, bool exact, int32_t chunk)
{
	struct fs_gguf *g = tg_open("text", name, ".golden.gguf");
	struct fs_engine *en = tg_engine("text", name, exact, chunk, 128);
	double nmse = allowed_nmse(g, exact);
	size_t n;
	int32_t *ids = tg_ints(g, "parity.ids", &n);
	struct fs_prompt *p = tg_prompt(en, ids, n);
	char how[32];

	snprintf(how, sizeof(how), "%s, chunks of %d", exact ? "exact" : "auto", chunk);
	check_prompt(en, name, how, p, tg_tensor(g, "logits", fs_engine_info(en)->n_vocab, (int64_t)n), nmse);
	check_greedy(en, g, name, p, nmse);
	free(ids);
	fs_prompt_destroy(p);
	fs_engine_destroy(en);
	fs_gguf_close(g);
}

static void exact(void **state)
{
	for (size_t i = 0; i < FS_ARRAY_LEN(models); i++)
		check_model(models[i], true, 256);
}

static void exact_in_chunks(void **state)
{
	for (size_t i = 0; i < FS_ARRAY_LEN(models); i += TEST_EVERY) {
		check_model(models[i], true, 7);
		check_model(models[i], true, 1);
	}
}

static void automatic(void **state)
{
	for (size_t i = 0; i < FS_ARRAY_LEN(models); i++) {
		check_model(models[i], false, 256);
		if (i % TEST_EVERY == 0)
			check_model(models[i], false, 1);
	}
}

/* ---- pictures ---- */

static struct fs_rows *picture_rows(const char *name, int32_t width, const float *from)
{
	struct fs_gguf *g = tg_open("vision", "vision", ".golden.gguf");
	char key[64];
	size_t n;
	snprintf(key, sizeof(key), "%s.size", name); /* width, height, nx, ny */
	int32_t *size = tg_ints(g, key, &n);
	struct fs_rows_shape s = {
	        .n_tokens = size[2] * size[3], .nx = size[2], .ny = size[3], .n_embd = width};
	size_t bytes = (size_t)s.n_tokens * (size_t)width * sizeof(float);
	float *data = malloc(bytes);
	uint8_t id[32] = {0};
	struct fs_rows *r;

	assert_int_equal(n, 4);
	memcpy(data, from, bytes);
	snprintf((char *)id, sizeof(id), "%s", name);
	assert_int_equal(fs_rows_create(&s, data, id, &r), FS_OK);
	free(size);
	fs_gguf_close(g);
	return r;
}

/* The golden's ids hold one pad a row; the engine's one -1 a picture. */
static size_t fold_ids(
        int32_t *ids, size_t n, const int32_t *starts, struct fs_rows *const *rows, size_t n_rows)
{
	size_t out = 0, pic = 0;

	for (size_t i = 0; i < n;) {
		if (pic < n_rows && (size_t)starts[pic] == i) {
			ids[out++] = -1;
			i += (size_t)rows[pic++]->shape.n_tokens;
		} else {
			ids[out++] = ids[i++];
		}
	}
	assert_int_equal(pic, n_rows);
	return out;
}

static void check_positions(const struct fs_gguf *g, const char *name, const struct fs_prompt *p)
{
	char key[64];
	size_t n;
	int32_t next;
	snprintf(key, sizeof(key), "%s.positions", name); /* planes t, h, w */
	int32_t *pos = tg_ints(g, key, &n);

	assert_int_equal(n, 3 * p->n);
	for (int32_t i = 0; i < p->n; i++)
		for (int a = 0; a < 3; a++)
			assert_int_equal(p->pos[i][a], pos[a * p->n + i]);
	snprintf(key, sizeof(key), "%s.next_position", name);
	assert_int_equal(fs_gguf_i32(g, key, &next, NULL), FS_OK);
	assert_int_equal(p->next_pos, next);
	free(pos);
}

#define MAX_PICTURES 4
static struct fs_prompt *picture_prompt(struct fs_engine *en, const struct fs_gguf *g, const char *name)
{
	struct fs_rows *rows[MAX_PICTURES];
	char key[64];
	const char *s;
	size_t n_rows = 0, len, n, n_starts;
	int32_t width = fs_engine_info(en)->n_embd;
	struct fs_gguf_strs it;
	struct fs_prompt *p = NULL;
	struct fs_errbuf e = {""};

	snprintf(key, sizeof(key), "%s.rows", name);
	const float *from = tg_tensor(g, key, width, 0);
	snprintf(key, sizeof(key), "%s.pictures", name);
	assert_int_equal(fs_gguf_arr_strs(g, key, &it, NULL), FS_OK);
	while (fs_gguf_strs_next(&it, &s, &len)) {
		char picture[32];
		snprintf(picture, sizeof(picture), "%.*s", (int)len, s);
		assert_true(n_rows < MAX_PICTURES);
		rows[n_rows] = picture_rows(picture, width, from);
		from += (size_t)rows[n_rows++]->shape.n_tokens * (size_t)width;
	}
	snprintf(key, sizeof(key), "%s.ids", name);
	int32_t *ids = tg_ints(g, key, &n);
	snprintf(key, sizeof(key), "%s.row_starts", name);
	int32_t *starts = tg_ints(g, key, &n_starts);
	assert_int_equal(n_starts, n_rows);
	n = fold_ids(ids, n, starts, rows, n_rows);
	if (fs_prompt_from_ids(en, ids, n, rows, n_rows, &p, &e) != FS_OK)
		fail_msg("%s", e.text);
	for (size_t i = 0; i < n_rows; i++)
		fs_rows_unref(rows[i]);
	free(ids);
	free(starts);
	return p;
}

static void check_pictures(const char *name, bool exact_products, int32_t chunk)
{
	struct fs_gguf *g = tg_open("vision", "e2e", ".golden.gguf");
	struct fs_engine *en = tg_engine("vision", "e2e-text-f16", exact_products, chunk, 0);
	struct fs_prompt *p = picture_prompt(en, g, name);
	struct tg_taken t = {.n = 0};
	const struct fs_gen_events ev = {.arg = &t, .logits = tg_take};
	char key[64];
	size_t n;

	check_positions(g, name, p);
	snprintf(key, sizeof(key), "%s.logits", name);
	check_prompt(en, name, exact_products ? "pictures, exact" : "pictures, auto", p,
	        tg_tensor(g, key, fs_engine_info(en)->n_vocab, p->n), allowed_nmse(g, exact_products));
	snprintf(key, sizeof(key), "%s.next_ids", name);
	int32_t *next = tg_ints(g, key, &n);
	tg_generate(en, p, (int32_t)n, NULL, &ev);
	assert_int_equal(t.n, n);
	assert_memory_equal(t.ids, next, n * sizeof(*next));
	free(next);
	fs_prompt_destroy(p);
	fs_engine_destroy(en);
	fs_gguf_close(g);
}

static void pictures(void **state)
{
	static const char *const prompts[] = {"one", "two"};

	for (size_t i = 0; i < FS_ARRAY_LEN(prompts); i++) {
		check_pictures(prompts[i], true, 256);
		check_pictures(prompts[i], true, 5); /* chunks that end inside of pictures */
		check_pictures(prompts[i], false, 256);
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = {cmocka_unit_test(exact), cmocka_unit_test(exact_in_chunks),
	        cmocka_unit_test(automatic), cmocka_unit_test(pictures)};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
