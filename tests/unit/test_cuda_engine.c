/*
 * The engine on the CUDA device, on the imitation of its runtime: decode steps are recorded once and queued
 * again, what was said to be needed is enough, and a kernel that takes the context with it costs one answer.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "tests/simt/cudart.h"
#include "tests/unit/text_golden.h"

#include <unistd.h>

enum { TOKENS = 6 };

struct text {
	char s[512];
	size_t n;
};

static struct fs_engine *open_on(const char *device)
{
	const struct fs_engine_opts o = {.model = tg_path("text", "qwen2vl-mixed", ".gguf"),
	        .device = device,
	        .threads = 1,
	        .exact = true,
	        .context = 64,
	        .retry_ms = 1};
	struct fs_engine *en = NULL;
	struct fs_errbuf e = {""};

	if (fs_engine_create(&o, &en, &e) != FS_OK)
		fail_msg("%s", e.text);
	return en;
}

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
	const struct fs_gen_params params = tg_greedy(TOKENS);
	const struct fs_gen_events ev = {.arg = out, .text = take};
	struct fs_gen_result r;
	struct fs_prompt *p = NULL;
	int err;

	*out = (struct text){.n = 0};
	assert_int_equal(fs_prompt_from_text(en, "How many?", 9, NULL, &p, NULL), FS_OK);
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
	assert_string_equal(got.s, want->s);
}

static void reference(struct text *out)
{
	struct fs_engine *en = open_on("cpu");

	assert_int_equal(ask(en, out, NULL), FS_OK);
	assert_true(out->n > 0);
	fs_engine_destroy(en);
}

static void settled(struct fs_engine *en, struct fs_engine_health *h)
{
	int64_t until = fs_deadline_ms(120000);

	for (fs_engine_health(en, h); h->state == FS_ENGINE_RELOADING; fs_engine_health(en, h)) {
		assert_true(fs_now() < until);
		usleep(1000);
	}
}

static void steps_are_recorded(void **state)
{
	struct text want;
	struct fs_engine *en;
	int graphs;

	reference(&want);
	fake_cuda_init();
	en = open_on("cuda");
	answers(en, &want);
	graphs = fake_cuda.graph_launches;
	assert_true(graphs >= TOKENS - 2);
	answers(en, &want);
	assert_true(fake_cuda.graph_launches >= graphs + TOKENS - 1); /* all of them by now */
	fs_engine_destroy(en);
	assert_int_equal(fake_cuda.blocks + fake_cuda.graphs + fake_cuda.streams + fake_cuda.pinned, 0);
}

static void too_little_memory(void **state)
{
	struct text want;
	struct fs_engine *en;

	reference(&want);
	fake_cuda_init();
	fake_cuda.memory = (size_t)128 << 20;
	en = open_on("auto");
	assert_memory_equal(fs_engine_info(en)->device, "cpu", 3);
	assert_int_equal(fake_cuda.blocks + fake_cuda.streams + fake_cuda.pinned, 0);
	answers(en, &want);
	fs_engine_destroy(en);
}

static void an_illegal_access(void **state)
{
	static const int at[] = {1, 40, 90};
	struct text want, got;
	struct fs_engine *en;
	struct fs_engine_health h;
	struct fs_errbuf e;

	reference(&want);
	fake_cuda_init();
	en = open_on("cuda");
	answers(en, &want);
	for (size_t i = 0; i < FS_ARRAY_LEN(at); i++) {
		fake_cuda.illegal_at = fake_cuda.kernels + at[i];
		assert_int_equal(ask(en, &got, &e), FS_EINTERNAL);
		settled(en, &h);
		assert_int_equal(h.state, FS_ENGINE_READY);
		assert_int_equal(h.losses, i + 1);
		assert_memory_equal(h.device, "cuda:0", 6);
		assert_int_equal(fake_cuda.resets, i + 1);
		answers(en, &want);
	}
	fs_engine_destroy(en);
	assert_int_equal(fake_cuda.blocks + fake_cuda.graphs + fake_cuda.streams + fake_cuda.pinned, 0);
}

static void a_card_that_stays_broken(void **state)
{
	struct text want, got;
	struct fs_engine *en;
	struct fs_engine_health h;
	struct fs_errbuf e;

	reference(&want);
	fake_cuda_init();
	en = open_on("auto");
	assert_memory_equal(fs_engine_info(en)->device, "cuda:0", 6);
	fake_cuda.stays_broken = true;
	fake_cuda.illegal_at = fake_cuda.kernels + 20;
	assert_int_equal(ask(en, &got, &e), FS_EINTERNAL);
	settled(en, &h);
	assert_int_equal(h.state, FS_ENGINE_READY);
	assert_memory_equal(h.device, "cpu", 3);
	answers(en, &want);
	fs_engine_destroy(en);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
	        cmocka_unit_test(steps_are_recorded),
	        cmocka_unit_test(too_little_memory),
	        cmocka_unit_test(an_illegal_access),
	        cmocka_unit_test(a_card_that_stays_broken),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
