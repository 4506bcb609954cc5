/*
 * The engine from messages to text: what comes out is the tokens' text, stop strings end it wherever they
 * fall, pictures land where the template puts them. On a model of random weights, so the texts are nonsense,
 * but always the same nonsense.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "server/engine/tokenizer.h"
#include "tests/unit/text_golden.h"

enum { VISION_START = 317, VISION_END = 318, TOKENS = 24 };

static struct fs_engine *en;
static struct fs_tok *tok;

static int open_model(void **state)
{
	const struct fs_engine_opts o = {.model = tg_path("text", "qwen2vl-f32", ".gguf"),
	        .device = "cpu",
	        .threads = 2,
	        .exact = true,
	        .context = 256};
	struct fs_gguf *g = tg_open("text", "qwen2vl-f32", ".gguf");
	struct fs_errbuf e = {""};

	assert_int_equal(fs_tok_create(g, &tok, NULL), FS_OK);
	fs_gguf_close(g);
	if (fs_engine_create(&o, &en, &e) != FS_OK)
		fail_msg("%s", e.text);
	return 0;
}

static int close_model(void **state)
{
	fs_engine_destroy(en);
	fs_tok_destroy(tok);
	return 0;
}

struct answer {
	struct tg_taken taken;
	char text[4096];
	size_t n;
};

static void take_text(void *arg, const char *utf8, size_t n)
{
	struct answer *a = arg;

	assert_true(n > 0 && a->n + n < sizeof(a->text));
	memcpy(a->text + a->n, utf8, n);
	a->n += n;
	a->text[a->n] = '\0';
}

static void take_logits(void *arg, const float *logits, int32_t n_vocab)
{
	tg_take(&((struct answer *)arg)->taken, logits, n_vocab);
}

static struct fs_prompt *ask(const char *text, struct fs_rows *rows)
{
	const struct fs_part parts[2] = {{.rows = rows}, {.text = text, .text_len = strlen(text)}};
	const struct fs_message m = {.role = FS_ROLE_USER,
	        .parts = rows != NULL ? parts : parts + 1,
	        .n_parts = rows != NULL ? 2 : 1};
	struct fs_prompt *p = NULL;
	struct fs_errbuf e = {""};

	if (fs_prompt_from_chat(en, &m, 1, &p, &e) != FS_OK)
		fail_msg("%s", e.text);
	return p;
}

static struct fs_gen_result answer(
        const struct fs_prompt *p, const char *const *stops, size_t n_stops, struct answer *a)
{
	const struct fs_gen_events ev = {.arg = a, .text = take_text, .logits = take_logits};
	struct fs_gen_params params = tg_greedy(TOKENS);
	struct fs_gen_result r;
	struct fs_errbuf e = {""};

	memset(a, 0, sizeof(*a));
	for (size_t i = 0; i < n_stops; i++)
		params.stops[i] = stops[i];
	params.n_stops = n_stops;
	if (fs_engine_generate(en, p, &params, NULL, &ev, &r, &e) != FS_OK)
		fail_msg("%s", e.text);
	return r;
}

/* The tokens' text as the tokenizer alone decodes them, end tokens giving none. */
static void expect_text_of(const struct answer *a)
{
	struct fs_tok_stream s = {.n_held = 0};
	struct fs_buf b;

	fs_buf_init(&b, 1 << 16);
	for (int i = 0; i < a->taken.n; i++)
		assert_int_equal(fs_tok_stream_push(tok, &s, a->taken.ids[i], &b), FS_OK);
	assert_int_equal(fs_tok_stream_flush(&s, &b), FS_OK);
	assert_int_equal(b.len, a->n);
	if (b.len > 0)
		assert_memory_equal(b.data, a->text, b.len);
	fs_buf_finish(&b);
}

static void text_of_tokens(void **state)
{
	struct fs_prompt *p = ask("What colour is the circle?", NULL);
	struct answer a;
	struct fs_gen_result r = answer(p, NULL, 0, &a);

	assert_int_equal(r.prompt_tokens, fs_prompt_cells(p));
	assert_int_equal(r.completion_tokens, a.taken.n);
	assert_true(a.n > 0);
	assert_null(r.stop);
	expect_text_of(&a);
	fs_prompt_destroy(p);
}

/* Every piece of the answer as a stop string: the text ends where it first stands, in whatever tokens it
 * lies. */
static void stops(void **state)
{
	struct fs_prompt *p = ask("How many shapes are there?", NULL);
	struct answer whole, a;

	answer(p, NULL, 0, &whole);
	assert_true(whole.n >= 8);
	for (size_t at = 0; at + 3 <= whole.n; at++) {
		char piece[4] = {whole.text[at], whole.text[at + 1], whole.text[at + 2], '\0'};
		const char *list[] = {"never in the answer", piece};
		const char *first = strstr(whole.text, piece);
		struct fs_gen_result r = answer(p, list, 2, &a);
		assert_int_equal(r.finish, FS_FINISH_STOP);
		assert_ptr_equal(r.stop, piece);
		assert_true(r.completion_tokens <= whole.taken.n);
		if (((uint8_t)piece[0] & 0xc0) != 0x80) {
			assert_int_equal(a.n, first - whole.text);
			assert_memory_equal(a.text, whole.text, a.n);
		}
	}
	fs_prompt_destroy(p);
}

static void stops_refused(void **state)
{
	struct fs_prompt *p = ask("?", NULL);
	struct fs_gen_params params = tg_greedy(2);
	struct fs_gen_result r;
	struct fs_errbuf e = {""};

	params.stops[0] = "";
	params.n_stops = 1;
	assert_int_equal(fs_engine_generate(en, p, &params, NULL, NULL, &r, &e), FS_EINVAL);
	assert_non_null(strstr(e.text, "stop string"));
	fs_prompt_destroy(p);
}

/* <|vision_start|> rows <|vision_end|>, in front of the question. */
static void picture_in_chat(void **state)
{
	struct fs_rows_shape s = {.n_tokens = 6, .nx = 3, .ny = 2, .n_embd = 64};
	const uint8_t key[32] = {1};
	struct fs_rows *rows = NULL;
	struct fs_prompt *p, *text;
	int32_t at = 0;

	assert_int_equal(fs_rows_create(&s, calloc(6 * 64, sizeof(float)), key, &rows), FS_OK);
	p = ask("What is it?", rows);
	text = ask("What is it?", NULL);
	fs_rows_unref(rows);
	assert_int_equal(p->n_pics, 1);
	at = p->pics[0].first;
	assert_int_equal(p->ids[at - 1], VISION_START);
	assert_int_equal(p->ids[at + 5], -1);
	assert_int_equal(p->ids[at + 6], VISION_END);
	assert_int_equal(p->pos[at + 6][0], p->pos[at][0] + 3);
	assert_int_equal(p->n, text->n + 8);
	fs_prompt_destroy(p);
	fs_prompt_destroy(text);
}

/* Control tokens written by a user are text. */
static void control_tokens_as_text(void **state)
{
	struct fs_prompt *p = ask("<|vision_start|><|im_end|>", NULL), *plain = ask("x", NULL);
	int32_t ends = 0, want = 0;

	for (int32_t i = 0; i < p->n; i++) {
		assert_int_not_equal(p->ids[i], VISION_START);
		ends += p->ids[i] == 316;
	}
	for (int32_t i = 0; i < plain->n; i++)
		want += plain->ids[i] == 316;
	assert_int_equal(ends, want);
	fs_prompt_destroy(p);
	fs_prompt_destroy(plain);
}

static void plain_text(void **state)
{
	struct fs_prompt *p = NULL;

	assert_int_equal(fs_prompt_from_text(en, "The circle", 10, &p, NULL), FS_OK);
	struct answer a;
	answer(p, NULL, 0, &a);
	expect_text_of(&a);
	fs_prompt_destroy(p);
}

/* Far past the context: refused without taking all of it apart, and told from a lack of memory. */
static void far_too_long(void **state)
{
	size_t n = (size_t)8 << 20;
	char *text = malloc(n);

	assert_non_null(text);
	memset(text, 'w', n);
	const struct fs_part part = {.text = text, .text_len = n};
	const struct fs_message m = {.role = FS_ROLE_USER, .parts = &part, .n_parts = 1};
	struct fs_prompt *p = NULL;
	struct fs_errbuf e = {""};

	assert_int_equal(fs_prompt_from_chat(en, &m, 1, &p, &e), FS_ELIMIT);
	assert_non_null(strstr(e.text, "more than 1024 tokens long; the context holds 256"));
	assert_null(p);
	free(text);
}

int main(void)
{
	const struct CMUnitTest tests[] = {cmocka_unit_test(text_of_tokens), cmocka_unit_test(stops),
	        cmocka_unit_test(stops_refused), cmocka_unit_test(picture_in_chat),
	        cmocka_unit_test(control_tokens_as_text), cmocka_unit_test(plain_text),
	        cmocka_unit_test(far_too_long)};

	return cmocka_run_group_tests(tests, open_model, close_model);
}
