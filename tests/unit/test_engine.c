/*
 * The engine's behaviour on small models of random weights: reuse of the cache, cancelling at every stage and
 * what the next request sees, the queue, limits. Values come from a second engine that has never seen another
 * request.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "server/engine/core.h"
#include "tests/unit/text_golden.h"

#define SAME_NMSE 1e-10 /* f32 products, other chunk sizes */

static int32_t prompt_ids[40];
static size_t n_prompt;

static int load_ids(void **state)
{
	struct fs_gguf *g = tg_open("text", "qwen2vl-f32", ".golden.gguf");
	int32_t *ids = tg_ints(g, "parity.ids", &n_prompt);

	assert_int_equal(n_prompt, 40);
	memcpy(prompt_ids, ids, sizeof(prompt_ids));
	free(ids);
	fs_gguf_close(g);
	return 0;
}

static struct fs_engine *open_engine(int32_t chunk, int32_t context)
{
	return tg_engine("text", "qwen2vl-f32", true, chunk, context);
}

/* ---- what a generation gives, and that of an engine with an empty cache ---- */

struct seen {
	struct tg_taken taken;
	float *first; /* logits of the first token */
	struct fs_cancel *fire;
	int fire_at_token;    /* fires before sampling the n-th token (from 1); 0 = not */
	int32_t fire_at_cell; /* fires when the prompt is read up to here; 0 = not */
	int32_t last_done;
};

static void see_logits(void *arg, const float *logits, int32_t n_vocab)
{
	struct seen *s = arg;

	if (s->taken.n == 0 && s->first != NULL)
		memcpy(s->first, logits, (size_t)n_vocab * sizeof(float));
	tg_take(&s->taken, logits, n_vocab);
	if (s->taken.n == s->fire_at_token)
		fs_cancel_fire(s->fire, FS_CANCEL_CLIENT);
}

static void see_progress(void *arg, int32_t done, int32_t total)
{
	struct seen *s = arg;

	assert_true(done >= s->last_done && done <= total);
	s->last_done = done;
	if (s->fire_at_cell > 0 && done >= s->fire_at_cell)
		fs_cancel_fire(s->fire, FS_CANCEL_CLIENT);
}

static struct fs_gen_result run(struct fs_engine *en, const struct fs_prompt *p, int32_t max, struct seen *s)
{
	const struct fs_gen_events ev = {.arg = s, .progress = see_progress, .logits = see_logits};

	return tg_generate(en, p, max, s->fire, &ev);
}

/* p on en gives the logits and the tokens that a fresh engine gives. */
static void expect_like_fresh(struct fs_engine *en, const struct fs_prompt *p, int32_t want_reused)
{
	struct fs_engine *fresh = open_engine(256, 128);
	size_t n_vocab = (size_t)fs_engine_info(en)->n_vocab;
	struct seen a = {.first = calloc(n_vocab, sizeof(float))},
	            b = {.first = calloc(n_vocab, sizeof(float))};
	struct fs_gen_result r = run(en, p, 6, &a);
	struct tg_diff d;

	assert_int_equal(r.reused_tokens, want_reused);
	assert_int_equal(a.last_done, p->n);
	assert_int_equal(run(fresh, p, 6, &b).reused_tokens, 0);
	d = tg_compare(a.first, b.first, n_vocab);
	if (!(d.nmse <= SAME_NMSE))
		fail_msg("logits differ: nmse %g", d.nmse);
	assert_int_equal(a.taken.n, b.taken.n);
	assert_memory_equal(a.taken.ids, b.taken.ids, (size_t)a.taken.n * sizeof(int32_t));
	free(a.first);
	free(b.first);
	fs_engine_destroy(fresh);
}

/* ---- reuse ---- */

static void reuse_of_text(void **state)
{
	struct fs_engine *en = open_engine(16, 128);
	struct fs_prompt *p = tg_prompt(en, prompt_ids, n_prompt), *shorter = tg_prompt(en, prompt_ids, 20),
	                 *next, *other;
	struct seen s = {.first = NULL};
	int32_t turn[64], branch[40];

	assert_int_equal(run(en, p, 8, &s).reused_tokens, 0);
	memcpy(turn, prompt_ids, sizeof(prompt_ids)); /* the next turn: prompt, answer, question */
	memcpy(turn + 40, s.taken.ids, 8 * sizeof(int32_t));
	turn[48] = 7;
	turn[49] = 9;
	next = tg_prompt(en, turn, 50);
	expect_like_fresh(en, next, 47); /* the answer's last token was never fed */
	expect_like_fresh(en, next, 49); /* the last cell is computed in any case */
	memcpy(branch, prompt_ids, sizeof(branch));
	branch[25] ^= 1;
	other = tg_prompt(en, branch, 40);
	expect_like_fresh(en, other, 25);
	expect_like_fresh(en, shorter, 19);
	expect_like_fresh(en, p, 20); /* the answer in the cells behind it is another text */
	fs_prompt_destroy(p);
	fs_prompt_destroy(shorter);
	fs_prompt_destroy(next);
	fs_prompt_destroy(other);
	fs_engine_destroy(en);
}

static struct fs_rows *make_rows(int32_t nx, int32_t ny, uint8_t name)
{
	struct fs_rows_shape s = {.n_tokens = nx * ny, .nx = nx, .ny = ny, .n_embd = 64};
	float *data = calloc((size_t)s.n_tokens * 64, sizeof(float));
	uint8_t key[32] = {name};
	struct fs_rows *r;

	for (int32_t i = 0; i < s.n_tokens * 64; i++)
		data[i] = sinf((float)(i * (name + 1)));
	assert_int_equal(fs_rows_create(&s, data, key, &r), FS_OK);
	return r;
}

static struct fs_prompt *picture_prompt(struct fs_engine *en, struct fs_rows *r)
{
	const int32_t ids[] = {5, 6, 7, -1, 8, 9};
	struct fs_prompt *p = NULL;

	assert_int_equal(fs_prompt_from_ids(en, ids, 6, &r, 1, &p, NULL), FS_OK);
	return p;
}

static void reuse_of_pictures(void **state)
{
	struct fs_engine *en = open_engine(4, 128); /* chunks end inside of the picture */
	struct fs_rows *a = make_rows(3, 3, 1), *a_again = make_rows(3, 3, 1), *b = make_rows(3, 3, 2),
	               *wide = make_rows(9, 1, 1);
	struct fs_prompt *pa = picture_prompt(en, a), *pa2 = picture_prompt(en, a_again),
	                 *pb = picture_prompt(en, b), *pw = picture_prompt(en, wide);

	expect_like_fresh(en, pa, 0);
	expect_like_fresh(en, pa2, 13);
	expect_like_fresh(en, pb, 3);
	expect_like_fresh(en, pw, 3); /* the same key in another shape has other positions */
	struct fs_prompt *const prompts[] = {pa, pa2, pb, pw};
	struct fs_rows *const rows[] = {a, a_again, b, wide};
	for (size_t i = 0; i < 4; i++) {
		fs_prompt_destroy(prompts[i]);
		fs_rows_unref(rows[i]);
	}
	fs_engine_destroy(en);
}

/* ---- cancel ---- */

static void cancel_in_prefill(void **state)
{
	struct fs_engine *en = open_engine(8, 128);
	struct fs_prompt *p = tg_prompt(en, prompt_ids, n_prompt);
	struct seen s = {.fire = fs_cancel_create(FS_NEVER), .fire_at_cell = 16};
	struct fs_gen_result r = run(en, p, 8, &s);

	assert_int_equal(r.finish, FS_FINISH_CANCEL);
	assert_int_equal(r.completion_tokens, 0);
	assert_int_equal(s.last_done, 16);
	expect_like_fresh(en, p, 16);
	fs_cancel_unref(s.fire);
	fs_prompt_destroy(p);
	fs_engine_destroy(en);
}

/* A picture cut off in the middle is taken up where it was left. */
static void cancel_in_a_picture(void **state)
{
	struct fs_engine *en = open_engine(4, 128);
	struct fs_rows *a = make_rows(3, 3, 1);
	struct fs_prompt *p = picture_prompt(en, a);
	struct seen s = {.fire = fs_cancel_create(FS_NEVER), .fire_at_cell = 8};

	assert_int_equal(run(en, p, 8, &s).finish, FS_FINISH_CANCEL);
	expect_like_fresh(en, p, 8);
	fs_cancel_unref(s.fire);
	fs_prompt_destroy(p);
	fs_rows_unref(a);
	fs_engine_destroy(en);
}

static void cancel_in_decode(void **state)
{
	struct fs_engine *en = open_engine(256, 128);
	struct fs_prompt *p = tg_prompt(en, prompt_ids, n_prompt);
	struct seen s = {.fire = fs_cancel_create(FS_NEVER), .fire_at_token = 3};
	struct fs_gen_result r = run(en, p, 8, &s);

	assert_int_equal(r.finish, FS_FINISH_CANCEL);
	assert_int_equal(r.completion_tokens, 3);
	expect_like_fresh(en, p, 39);
	fs_cancel_unref(s.fire);
	fs_prompt_destroy(p);
	fs_engine_destroy(en);
}

/* Inside of a pass: nothing of it counts. */
static void cancel_in_a_pass(void **state)
{
	const struct fs_engine_opts o = {.model = tg_path("text", "qwen2vl-f32", ".gguf"),
	        .device = "cpu",
	        .threads = 1,
	        .exact = true,
	        .ids_only = true,
	        .context = 64};
	struct fs_cancel *fired = fs_cancel_create(FS_NEVER);
	struct fs_core *c = calloc(1, sizeof(*c));
	struct fs_prompt *p;
	size_t n = 320;
	float *a = calloc(n, sizeof(*a)), *b = calloc(n, sizeof(*b));

	assert_int_equal(fs_core_init(c, &o, NULL), FS_OK);
	assert_int_equal(c->model.hp.n_vocab, n);
	assert_int_equal(fs_prompt_build(&c->model.hp, prompt_ids, 40, NULL, 0, &p, NULL), FS_OK);
	fs_cancel_fire(fired, FS_CANCEL_CLIENT);
	assert_int_equal(fs_graph_prompt(&c->graph, p, 0, 30, 30, NULL, NULL), FS_OK);
	assert_int_equal(fs_graph_prompt(&c->graph, p, 30, 10, 9, NULL, NULL), FS_OK);
	assert_int_equal(fs_graph_logits(&c->graph, 9, 1, a, NULL), FS_OK);
	fs_kv_truncate(&c->kv, 30);
	assert_int_equal(fs_graph_prompt(&c->graph, p, 30, 10, 9, fired, NULL), FS_ECANCELLED);
	assert_int_equal(c->kv.used, 30);
	assert_int_equal(fs_graph_token(&c->graph, 5, 30, fired, NULL), FS_ECANCELLED);
	assert_int_equal(c->kv.used, 30);
	assert_int_equal(fs_graph_prompt(&c->graph, p, 30, 10, 9, NULL, NULL), FS_OK);
	assert_int_equal(fs_graph_logits(&c->graph, 9, 1, b, NULL), FS_OK);
	assert_memory_equal(a, b, n * sizeof(float));
	fs_prompt_destroy(p);
	fs_core_finish(c);
	fs_cancel_unref(fired);
	free(c);
	free(a);
	free(b);
}

/* ---- the queue ---- */

struct gate { /* holds the engine's thread inside of a request until it is opened */
	pthread_mutex_t lock;
	pthread_cond_t changed;
	bool inside, open;
};

static void wait_at_gate(void *arg, const float *logits, int32_t n_vocab)
{
	struct gate *g = arg;

	pthread_mutex_lock(&g->lock);
	g->inside = true;
	pthread_cond_broadcast(&g->changed);
	while (!g->open)
		pthread_cond_wait(&g->changed, &g->lock);
	pthread_mutex_unlock(&g->lock);
}

struct caller {
	struct fs_engine *en;
	const struct fs_prompt *p;
	struct fs_cancel *cancel;
	struct fs_gen_events ev;
	struct fs_gen_result r;
	pthread_t thread;
};

static void *call(void *arg)
{
	struct caller *c = arg;

	c->r = tg_generate(c->en, c->p, 2, c->cancel, &c->ev);
	return NULL;
}

static void cancel_while_queued(void **state)
{
	struct fs_engine *en = open_engine(256, 128);
	struct fs_prompt *p = tg_prompt(en, prompt_ids, n_prompt);
	struct gate gate = {.open = false};
	struct caller first = {.en = en, .p = p, .ev = {.arg = &gate, .logits = wait_at_gate}};
	struct caller fired = {.en = en, .p = p, .cancel = fs_cancel_create(FS_NEVER)};
	struct caller late = {.en = en, .p = p, .cancel = fs_cancel_create(fs_deadline_ms(5))};
	struct caller last = {.en = en, .p = p};

	pthread_mutex_init(&gate.lock, NULL);
	pthread_cond_init(&gate.changed, NULL);
	assert_int_equal(pthread_create(&first.thread, NULL, call, &first), 0);
	pthread_mutex_lock(&gate.lock);
	while (!gate.inside)
		pthread_cond_wait(&gate.changed, &gate.lock);
	pthread_mutex_unlock(&gate.lock);
	assert_int_equal(pthread_create(&fired.thread, NULL, call, &fired), 0);
	assert_int_equal(pthread_create(&late.thread, NULL, call, &late), 0);
	assert_int_equal(pthread_create(&last.thread, NULL, call, &last), 0);
	fs_cancel_fire(fired.cancel, FS_CANCEL_CLIENT);
	pthread_join(fired.thread, NULL); /* both end although the engine stands still */
	pthread_join(late.thread, NULL);
	assert_int_equal(fired.r.finish, FS_FINISH_CANCEL);
	assert_int_equal(late.r.finish, FS_FINISH_CANCEL);
	assert_int_equal(fs_cancel_cause(late.cancel), FS_CANCEL_DEADLINE);
	pthread_mutex_lock(&gate.lock);
	gate.open = true;
	pthread_cond_broadcast(&gate.changed);
	pthread_mutex_unlock(&gate.lock);
	pthread_join(first.thread, NULL);
	pthread_join(last.thread, NULL);
	assert_int_equal(first.r.finish, FS_FINISH_LENGTH);
	assert_int_equal(last.r.finish, FS_FINISH_LENGTH);
	assert_int_equal(last.r.completion_tokens, 2);
	fs_cancel_unref(fired.cancel);
	fs_cancel_unref(late.cancel);
	pthread_cond_destroy(&gate.changed);
	pthread_mutex_destroy(&gate.lock);
	fs_prompt_destroy(p);
	fs_engine_destroy(en);
}

/* A token that fired before the call. */
static void cancel_before(void **state)
{
	struct fs_engine *en = open_engine(256, 128);
	struct fs_prompt *p = tg_prompt(en, prompt_ids, n_prompt);
	struct fs_cancel *c = fs_cancel_create(FS_NEVER);

	fs_cancel_fire(c, FS_CANCEL_SHUTDOWN);
	assert_int_equal(tg_generate(en, p, 2, c, NULL).finish, FS_FINISH_CANCEL);
	fs_cancel_unref(c);
	fs_prompt_destroy(p);
	fs_engine_destroy(en);
}

/* ---- limits ---- */

static void expect_einval(
        struct fs_engine *en, const struct fs_prompt *p, const struct fs_gen_params *params, const char *text)
{
	struct fs_gen_result r;
	struct fs_errbuf e = {""};

	assert_int_equal(fs_engine_generate(en, p, params, NULL, NULL, &r, &e), FS_EINVAL);
	if (strstr(e.text, text) == NULL)
		fail_msg("\"%s\" does not hold \"%s\"", e.text, text);
}

static void limits(void **state)
{
	struct fs_engine *en = open_engine(256, 40);
	struct fs_prompt *full = tg_prompt(en, prompt_ids, 40), *nearly = tg_prompt(en, prompt_ids, 37);
	struct fs_gen_params params = tg_greedy(1);
	float *out = calloc((size_t)40 * (size_t)fs_engine_info(en)->n_vocab, sizeof(*out));
	struct fs_gen_result r;

	expect_einval(en, full, &params, "40 tokens");
	expect_einval(en, full, &params, "raise \"context\"");
	assert_int_equal(fs_engine_logits(en, full, out, NULL), FS_OK);
	params = tg_greedy(0); /* what fits */
	params.top_p = 2;
	expect_einval(en, nearly, &params, "top_p");
	r = tg_generate(en, nearly, 0, NULL, NULL);
	assert_int_equal(r.completion_tokens, 3);
	assert_int_equal(r.finish, FS_FINISH_LENGTH);
	assert_int_equal(tg_generate(en, nearly, 1000000, NULL, NULL).completion_tokens, 3);
	free(out);
	fs_prompt_destroy(full);
	fs_prompt_destroy(nearly);
	fs_engine_destroy(en);
}

/* The same seed gives the same tokens, whatever ran in between. */
static void seeds(void **state)
{
	struct fs_engine *en = open_engine(256, 128);
	struct fs_prompt *p = tg_prompt(en, prompt_ids, n_prompt);
	struct fs_gen_params params = {
	        .temperature = 2, .top_p = 1, .repeat_penalty = 1, .max_tokens = 12, .has_seed = true};
	struct seen s[3] = {{.first = NULL}, {.first = NULL}, {.first = NULL}};

	for (int i = 0; i < 3; i++) {
		const struct fs_gen_events ev = {.arg = &s[i], .logits = see_logits};
		struct fs_gen_result r;
		params.seed = i == 1 ? 7 : 3;
		assert_int_equal(fs_engine_generate(en, p, &params, NULL, &ev, &r, NULL), FS_OK);
	}
	/* see_logits keeps each step's best token: after the first sampled token the paths part, or stay the
	 * same */
	assert_memory_equal(s[0].taken.ids, s[2].taken.ids, 12 * sizeof(int32_t));
	assert_memory_not_equal(s[0].taken.ids, s[1].taken.ids, 12 * sizeof(int32_t));
	fs_prompt_destroy(p);
	fs_engine_destroy(en);
}

int main(void)
{
	const struct CMUnitTest tests[] = {cmocka_unit_test(reuse_of_text),
	        cmocka_unit_test(reuse_of_pictures), cmocka_unit_test(cancel_in_prefill),
	        cmocka_unit_test(cancel_in_a_picture), cmocka_unit_test(cancel_in_decode),
	        cmocka_unit_test(cancel_in_a_pass), cmocka_unit_test(cancel_while_queued),
	        cmocka_unit_test(cancel_before), cmocka_unit_test(limits), cmocka_unit_test(seeds)};

	return cmocka_run_group_tests(tests, load_ids, NULL);
}
