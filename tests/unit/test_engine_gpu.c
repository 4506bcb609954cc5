/*
 * The engine on a GPU that is made up (tests/tools/fake_gpu.h): what it says it needs is what it takes, a
 * model that does not fit leaves the card alone, prompts are computed a layer or two ahead, and a card that
 * fails, or is lost, costs the request that it fails under and nothing else.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "server/engine/core.h"
#include "tests/tools/fake_gpu.h"
#include "tests/unit/text_golden.h"

#include <unistd.h>

enum { TOKENS = 24, CONTEXT = 256, CHUNK = 64 };

static const uint64_t plenty = (uint64_t)1 << 40;

static void new_card(uint64_t total)
{
	assert_int_equal(fake_card.used, 0);
	fake_card = (struct fake_card){.total = total};
}

static struct fs_engine_opts opts(const char *device)
{
	return (struct fs_engine_opts){.model = tg_path("text", "qwen2vl-f32", ".gguf"),
	        .device = device,
	        .threads = 1,
	        .exact = true,
	        .context = CONTEXT,
	        .prefill_chunk = CHUNK,
	        .retry_ms = 1};
}

static struct fs_engine *open_with(const struct fs_engine_opts *o)
{
	struct fs_engine *en = NULL;
	struct fs_errbuf e = {""};

	if (fs_engine_create(o, &en, &e) != FS_OK)
		fail_msg("%s", e.text);
	return en;
}

static struct fs_engine *open_on(const char *device)
{
	const struct fs_engine_opts o = opts(device);

	return open_with(&o);
}

struct text {
	char s[4096];
	size_t n;
};

static void take(void *arg, const char *utf8, size_t n)
{
	struct text *t = arg;

	assert_true(t->n + n < sizeof(t->s));
	memcpy(t->s + t->n, utf8, n);
	t->n += n;
	t->s[t->n] = '\0';
}

static int ask(struct fs_engine *en, struct text *out, struct fs_errbuf *e)
{
	static const char question[] =
	        "How many shapes are there, and what is the colour of the largest of them?";
	const struct fs_gen_params params = tg_greedy(TOKENS);
	struct fs_gen_events ev = {.arg = out, .text = take};
	struct fs_gen_result r;
	struct fs_prompt *p = NULL;
	int err;

	out->n = 0;
	out->s[0] = '\0';
	assert_int_equal(fs_prompt_from_text(en, question, sizeof(question) - 1, NULL, &p, NULL), FS_OK);
	err = fs_engine_generate(en, p, &params, NULL, &ev, &r, e);
	fs_prompt_destroy(p);
	return err;
}

static void answers(struct fs_engine *en, const struct text *want)
{
	struct text got;
	struct fs_errbuf e = {""};

	if (ask(en, &got, &e) != FS_OK)
		fail_msg("%s", e.text);
	assert_true(got.n > 0);
	assert_string_equal(got.s, want->s);
}

static void fails(struct fs_engine *en, int err, const char *word)
{
	struct text got;
	struct fs_errbuf e = {""};

	assert_int_equal(ask(en, &got, &e), err);
	if (strstr(e.text, word) == NULL)
		fail_msg("\"%s\" does not say \"%s\"", e.text, word);
}

/* What the CPU answers; the made-up card computes the same. */
static void reference(struct text *out)
{
	struct fs_engine *en = open_on("cpu");

	assert_int_equal(ask(en, out, NULL), FS_OK);
	assert_true(out->n > 0);
	fs_engine_destroy(en);
}

static enum fs_engine_state settled(struct fs_engine *en, struct fs_engine_health *h)
{
	int64_t until = fs_deadline_ms(60000);

	for (fs_engine_health(en, h); h->state == FS_ENGINE_RELOADING; fs_engine_health(en, h)) {
		assert_true(fs_now() < until);
		usleep(1000);
	}
	return h->state;
}

/* ---- memory ---- */

static bool fits(uint64_t total, struct fs_errbuf *e)
{
	const struct fs_engine_opts o = opts("cuda");
	struct fs_engine *en = NULL;
	int err;

	new_card(total);
	err = fs_engine_create(&o, &en, e);
	if (err != FS_OK) {
		assert_int_equal(err, FS_ENOMEM);
		assert_int_equal(fake_card.peak, 0); /* nothing of the card was touched */
	}
	fs_engine_destroy(en);
	return err == FS_OK;
}

/* The least memory with which it starts is exactly what it takes, and the back end's own part. */
static void need(void **state)
{
	uint64_t low = 0, high = (uint64_t)8 << 30, scratch, taken;
	struct fs_errbuf e = {""};
	struct fs_dev *d = NULL;

	new_card(plenty);
	assert_int_equal(fake_gpu_open(&(struct fs_dev_opts){.threads = 1}, &d, NULL), FS_OK);
	scratch = fs_dev_scratch(d, CHUNK, 0, 0, 0);
	fs_dev_close(d);
	assert_true(fits(high, &e));
	taken = fake_card.peak;
	while (high - low > 1) {
		uint64_t mid = low + (high - low) / 2;

		if (fits(mid, &e))
			high = mid;
		else
			low = mid;
	}
	assert_true(taken > 0 && high >= taken + scratch);
	assert_true(high - taken - scratch < 4 << 20); /* narrowed rows and keys */
	assert_false(fits(low, &e));
	for (size_t i = 0; i < 5; i++) {
		static const char *const says[] = {"it needs ", "KV cache", "cuda:0 has ", "context", "cpu"};

		if (strstr(e.text, says[i]) == NULL)
			fail_msg("\"%s\" does not say \"%s\"", e.text, says[i]);
	}
}

static void too_little_for_auto(void **state)
{
	struct text want;
	struct fs_engine *en;

	reference(&want);
	new_card((uint64_t)64 << 20);
	en = open_on("auto");
	assert_int_equal(fake_card.opens, 1);
	assert_int_equal(fake_card.peak, 0);
	assert_memory_equal(fs_engine_info(en)->device, "cpu", 3);
	answers(en, &want);
	fs_engine_destroy(en);
	new_card(plenty);
	en = open_on("auto");
	assert_memory_equal(fs_engine_info(en)->device, "cuda:0", 6);
	answers(en, &want);
	fs_engine_destroy(en);
}

/* Memory taken by others counts as taken. */
static void other_programs(void **state)
{
	const struct fs_engine_opts o = opts("cuda:0");
	struct fs_engine *en = NULL;
	struct fs_errbuf e = {""};

	new_card((uint64_t)4 << 30);
	fake_card.others = ((uint64_t)4 << 30) - 4096;
	assert_int_equal(fs_engine_create(&o, &en, &e), FS_ENOMEM);
	if (strstr(e.text, "has 0.0 MiB of 4.0 GiB free") == NULL)
		fail_msg("\"%s\"", e.text);
}

/* ---- the queue ---- */

static void chunks(void **state)
{
	struct fs_engine_opts o = opts("cuda");
	struct fs_core *c = calloc(1, sizeof(*c));
	struct fs_hparams hp;
	uint64_t whole;

	o.ids_only = true;
	o.context = 2048;
	o.prefill_chunk = 0;
	new_card(plenty);
	assert_int_equal(fs_core_init(c, &o, NULL), FS_OK);
	assert_int_equal(c->graph.max_rows, 1024);
	hp = c->model.hp;
	whole = fake_card.peak;
	fs_core_finish(c);
	/* some of the work's memory is missing: fewer rows at once */
	new_card(whole + fs_dev_rounded((uint64_t)256 << 20));
	assert_int_equal(fs_core_init(c, &o, NULL), FS_OK);
	assert_int_equal(c->graph.max_rows, 256);
	assert_int_equal(c->model.hp.n_embd, hp.n_embd);
	fs_core_finish(c);
	o.device = "cpu";
	assert_int_equal(fs_core_init(c, &o, NULL), FS_OK);
	assert_int_equal(c->graph.max_rows, 256);
	fs_core_finish(c);
	free(c);
}

static void paced(void **state)
{
	struct fs_engine_opts o = opts("cuda");
	struct fs_core *c = calloc(1, sizeof(*c));
	struct fs_cancel *fired = fs_cancel_create(FS_NEVER);
	int32_t ids[40];
	struct fs_prompt *p = NULL;
	int ops;

	for (int i = 0; i < 40; i++)
		ids[i] = i;
	o.ids_only = true;
	new_card(plenty);
	assert_int_equal(fs_core_init(c, &o, NULL), FS_OK);
	assert_int_equal(fs_prompt_build(&c->model.hp, ids, 40, NULL, 0, &p, NULL), FS_OK);
	ops = fake_card.ops;
	assert_int_equal(fs_graph_prompt(&c->graph, p, 0, 40, 39, NULL, NULL), FS_OK);
	assert_int_equal(fake_card.paces, c->model.hp.n_layer);
	ops = fake_card.ops - ops;
	assert_int_equal(fs_graph_token(&c->graph, 7, 40, NULL, NULL), FS_OK);
	assert_int_equal(fake_card.recordings, 1);
	assert_int_equal(fake_card.paces, c->model.hp.n_layer); /* none within a step */
	fs_kv_truncate(&c->kv, 0);
	fs_cancel_fire(fired, FS_CANCEL_CLIENT);
	fake_card.ops = 0;
	assert_int_equal(fs_graph_prompt(&c->graph, p, 0, 40, 39, fired, NULL), FS_ECANCELLED);
	assert_true(fake_card.ops * 2 < ops + 10);
	fs_prompt_destroy(p);
	fs_core_finish(c);
	fs_cancel_unref(fired);
	free(c);
}

/* ---- a card that fails ---- */

/* Operations at which it fails: the first, the last, and so many between that one is a step's upload. */
#define N_PLACES 211

static void places(struct fs_engine *en, const struct text *want, int at[N_PLACES])
{
	int ops;

	answers(en, want);
	ops = fake_card.ops;
	answers(en, want); /* its prompt is in the cache: the shortest way to an answer */
	ops = fake_card.ops - ops;
	assert_true(ops > 40);
	for (int i = 0; i < N_PLACES; i++)
		at[i] = 1 + i * (ops - 1) / (N_PLACES - 1);
}

static void survives(void **state)
{
	int at[N_PLACES];
	struct text want;
	struct fs_engine *en;
	struct fs_engine_health h;

	reference(&want);
	new_card(plenty);
	en = open_on("cuda");
	places(en, &want, at);
	for (size_t i = 0; i < FS_ARRAY_LEN(at); i++) {
		fake_card.fail_at = at[i];
		fails(en, FS_EINTERNAL, "the card failed at that");
		assert_int_equal(fake_card.fail_at, 0);
		answers(en, &want);
	}
	assert_int_equal(settled(en, &h), FS_ENGINE_READY);
	assert_int_equal(h.losses, 0);
	assert_int_equal(fake_card.opens, 1);
	fs_engine_destroy(en);
}

static void comes_back(void **state)
{
	int at[N_PLACES];
	struct text want;
	struct fs_engine *en;
	struct fs_engine_health h;

	reference(&want);
	new_card(plenty);
	en = open_on("auto");
	places(en, &want, at);
	for (size_t i = 0; i < FS_ARRAY_LEN(at); i++) {
		int tries = (int)i % 3; /* that are in vain */

		fake_card.opens = 0;
		fake_card.no_card = tries;
		fake_card.lose_at = at[i];
		fails(en, FS_EINTERNAL, "illegal memory access");
		assert_int_equal(settled(en, &h), FS_ENGINE_READY);
		assert_int_equal(h.losses, i + 1);
		assert_int_equal(fake_card.opens, tries + 1);
		assert_non_null(strstr(h.cause, "illegal memory access"));
		assert_memory_equal(h.device, "cuda:0", 6);
		answers(en, &want);
	}
	fs_engine_destroy(en);
}

static void refused_meanwhile(void **state)
{
	struct fs_engine_opts o = opts("cuda");
	struct fs_engine_health h;
	struct fs_engine *en;

	o.retry_ms = 1000000; /* ends with the engine */
	new_card(plenty);
	en = open_with(&o);
	fake_card.no_card = 1;
	fake_card.lose_at = 50;
	fails(en, FS_EINTERNAL, "illegal memory access");
	fs_engine_health(en, &h);
	assert_int_equal(h.state, FS_ENGINE_RELOADING);
	assert_true(h.retry_after_s > 0);
	fails(en, FS_EUNAVAILABLE, "loading the model again; try again");
	fails(en, FS_EUNAVAILABLE, fs_engine_state_text(FS_ENGINE_RELOADING));
	fs_engine_destroy(en);
}

static void gone(void **state)
{
	struct fs_engine_health h;
	struct fs_engine *en;

	new_card(plenty);
	en = open_on("cuda");
	fake_card.no_card = -1;
	fake_card.lose_at = 50;
	fails(en, FS_EINTERNAL, "illegal memory access");
	assert_int_equal(settled(en, &h), FS_ENGINE_FAILED);
	assert_int_equal(fake_card.opens, 1 + 5);
	fake_card.no_card = 0;
	fails(en, FS_EUNAVAILABLE, "the server must be restarted");
	assert_int_equal(fake_card.opens, 1 + 5);
	fs_engine_destroy(en);
}

static void gone_for_auto(void **state)
{
	struct fs_engine_health h;
	struct fs_engine *en;
	struct text want;

	reference(&want);
	new_card(plenty);
	en = open_on("auto");
	fake_card.no_card = -1;
	fake_card.lose_at = 50;
	fails(en, FS_EINTERNAL, "illegal memory access");
	assert_int_equal(settled(en, &h), FS_ENGINE_READY);
	assert_memory_equal(h.device, "cpu", 3);
	answers(en, &want);
	fs_engine_destroy(en);
}

/* Opening a card that does not answer would hang as well. */
static void hangs(void **state)
{
	struct fs_engine_health h;
	struct fs_engine *en;
	struct text want;

	reference(&want);
	new_card(plenty);
	fake_card.hangs = true;
	en = open_on("auto");
	fake_card.lose_at = 50;
	fails(en, FS_EINTERNAL, "illegal memory access");
	assert_int_equal(settled(en, &h), FS_ENGINE_READY);
	assert_memory_equal(h.device, "cpu", 3);
	answers(en, &want);
	fs_engine_destroy(en);
	new_card(plenty);
	fake_card.hangs = true;
	en = open_on("cuda");
	fake_card.lose_at = 50;
	fails(en, FS_EINTERNAL, "illegal memory access");
	assert_int_equal(settled(en, &h), FS_ENGINE_FAILED);
	assert_int_equal(fake_card.opens, 1);
	fs_engine_destroy(en);
}

/* Something that takes the card down each time is not tried for ever; an answer between makes it forget. */
static void again_and_again(void **state)
{
	struct fs_engine_health h;
	struct fs_engine *en;
	struct text want;

	reference(&want);
	new_card(plenty);
	en = open_on("cuda");
	for (int i = 0; i < 6; i++) {
		fake_card.lose_at = 50;
		fails(en, FS_EINTERNAL, "illegal memory access");
		assert_int_equal(settled(en, &h), FS_ENGINE_READY);
		if (i == 2)
			answers(en, &want);
	}
	fake_card.lose_at = 50;
	fails(en, FS_EINTERNAL, "illegal memory access");
	assert_int_equal(settled(en, &h), FS_ENGINE_FAILED);
	fs_engine_destroy(en);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
	        cmocka_unit_test(need),
	        cmocka_unit_test(too_little_for_auto),
	        cmocka_unit_test(other_programs),
	        cmocka_unit_test(chunks),
	        cmocka_unit_test(paced),
	        cmocka_unit_test(survives),
	        cmocka_unit_test(comes_back),
	        cmocka_unit_test(refused_meanwhile),
	        cmocka_unit_test(gone),
	        cmocka_unit_test(gone_for_auto),
	        cmocka_unit_test(hangs),
	        cmocka_unit_test(again_and_again),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
