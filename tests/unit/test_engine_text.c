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

	assert_int_equal(fs_prompt_from_text(en, "The circle", 10, NULL, &p, NULL), FS_OK);
	struct answer a;
	answer(p, NULL, 0, &a);
	expect_text_of(&a);
	fs_prompt_destroy(p);
}

/* ---- token events ---- */

struct events {
	struct tg_taken taken;
	float raw[64][320]; /* logits of each sampled token */
	char text[4096];
	size_t n_text, n_tokens;
	struct fs_tok_stream stream; /* the events' tokens, taken together */
	struct fs_buf decoded;
	bool wrong;
	int32_t ids[64];
	float chosen[64], top[64][FS_MAX_TOP_LOGPROBS];
	int32_t top_ids[64][FS_MAX_TOP_LOGPROBS];
	size_t n_top;
};

static void keep_logits(void *arg, const float *logits, int32_t n_vocab)
{
	struct events *v = arg;

	assert_int_equal(n_vocab, 320);
	memcpy(v->raw[v->taken.n], logits, sizeof(v->raw[0]));
	tg_take(&v->taken, logits, n_vocab);
}

static void keep_text(void *arg, const char *utf8, size_t n)
{
	struct events *v = arg;

	memcpy(v->text + v->n_text, utf8, n);
	v->n_text += n;
	/* The tokens of a text come before it, but for the end of a character that none finished. */
	v->wrong |= v->n_text > v->decoded.len + (v->stream.n_held > 0 ? 9 : 0);
}

static void keep_token(void *arg, const struct fs_token_event *t)
{
	struct events *v = arg;
	struct fs_buf one = {.max = 100};

	v->ids[v->n_tokens] = t->chosen.id;
	v->chosen[v->n_tokens] = t->chosen.logprob;
	v->n_top = t->n_top;
	for (size_t i = 0; i < t->n_top; i++) {
		v->top_ids[v->n_tokens][i] = t->top[i].id;
		v->top[v->n_tokens][i] = t->top[i].logprob;
		v->wrong |= t->top[i].n_bytes == 0;
	}
	v->n_tokens++;
	v->wrong |= fs_tok_stream_push(tok, &v->stream, t->chosen.id, &v->decoded) != FS_OK;
	fs_buf_clear(&one);
	v->wrong |= fs_tok_bytes(tok, t->chosen.id, &one) != FS_OK;
	if (!t->chosen.control)
		v->wrong |= one.len != t->chosen.n_bytes || memcmp(one.data, t->chosen.bytes, one.len) != 0;
	else
		v->wrong |= one.len != 0;
	fs_buf_finish(&one);
}

static void run_events(struct fs_gen_params params, struct events *v)
{
	const struct fs_gen_events ev = {
	        .arg = v, .text = keep_text, .logits = keep_logits, .token = keep_token};
	struct fs_prompt *p = ask("How many shapes are there?", NULL);
	struct fs_gen_result r;
	struct fs_errbuf e = {""};

	memset(v, 0, sizeof(*v));
	fs_buf_init(&v->decoded, sizeof(v->text));
	params.logprobs = true;
	if (fs_engine_generate(en, p, &params, NULL, &ev, &r, &e) != FS_OK)
		fail_msg("%s", e.text);
	assert_false(v->wrong);
	fs_buf_finish(&v->decoded);
	fs_prompt_destroy(p);
}

static double log_softmax(const float *logits, int32_t id)
{
	double sum = 0;

	for (int i = 0; i < 320; i++)
		sum += exp((double)logits[i]);
	return (double)logits[id] - log(sum);
}

/* Of the model's own distribution, whatever penalties and temperature do to the choice. */
static void log_probabilities(void **state)
{
	static struct events v;
	struct fs_gen_params params = {.temperature = 1.5f,
	        .top_k = 40,
	        .top_p = 0.9f,
	        .repeat_penalty = 1.5f,
	        .repeat_last_n = 64,
	        .presence_penalty = 1,
	        .seed = 7,
	        .has_seed = true,
	        .max_tokens = TOKENS,
	        .n_top_logprobs = 5};

	run_events(params, &v);
	assert_true(v.n_tokens >= 4);
	assert_int_equal(v.n_top, 5);
	for (size_t i = 0; i < v.n_tokens; i++) {
		double want = log_softmax(v.raw[i], v.ids[i]);

		assert_true(fabs((double)v.chosen[i] - want) < 1e-4);
		assert_int_equal(v.top_ids[i][0], v.taken.ids[i]); /* the largest raw logit */
		for (size_t k = 0; k < 5; k++) {
			want = log_softmax(v.raw[i], v.top_ids[i][k]);
			assert_true(fabs((double)v.top[i][k] - want) < 1e-4);
			assert_true(k == 0 || v.top[i][k] <= v.top[i][k - 1]);
		}
	}
}

/* The events' bytes are the text's, but for bytes that make no character; with a stop string they end in the
 * token that the text ends in. */
static void events_and_stops(void **state)
{
	static struct events whole, v;
	struct fs_gen_params params = tg_greedy(TOKENS);
	size_t at = 0, tokens = 0;
	char piece[4] = "";

	run_events(params, &whole);
	assert_int_equal(whole.n_top, 0);
	assert_true(whole.n_text >= 8 && whole.n_tokens >= 4);
	for (size_t i = 0; i + 3 <= whole.n_text; i++) { /* the last three plain characters */
		bool plain = true;
		for (size_t k = 0; k < 3; k++)
			plain &= (uint8_t)whole.text[i + k] < 0x80;
		at = plain ? i : at;
	}
	memcpy(piece, whole.text + at, 3);
	at = (size_t)(strstr(whole.text, piece) - whole.text);
	params.stops[0] = piece;
	params.n_stops = 1;
	run_events(params, &v);
	assert_int_equal(v.n_text, at);
	assert_true(v.n_tokens < whole.n_tokens);
	assert_memory_equal(v.ids, whole.ids, v.n_tokens * sizeof(v.ids[0]));
	for (struct fs_buf b = {.max = 4096}; tokens < v.n_tokens; tokens++) {
		if (tokens + 1 == v.n_tokens)
			assert_true(at == 0 || b.len < at); /* the last one begins in the text */
		assert_int_equal(fs_tok_bytes(tok, v.ids[tokens], &b), FS_OK);
		if (tokens + 1 == v.n_tokens)
			fs_buf_finish(&b);
	}
}

static void events_refused(void **state)
{
	struct fs_gen_params params = tg_greedy(2);
	struct fs_prompt *p = ask("?", NULL);
	struct fs_gen_result r;
	struct fs_errbuf e = {""};

	params.logprobs = true;
	params.n_top_logprobs = FS_MAX_TOP_LOGPROBS + 1;
	assert_int_equal(fs_engine_generate(en, p, &params, NULL, NULL, &r, &e), FS_EINVAL);
	assert_non_null(strstr(e.text, "top_logprobs is 21"));
	assert_int_equal(r.finish, FS_FINISH_ERROR);
	fs_prompt_destroy(p);
}

/* ---- failures ---- */

/* As a device that fails would leave them, from the nth token on. */
static void spoil(void *arg, const float *logits, int32_t n_vocab)
{
	int *left = arg;

	if ((*left)-- == 0)
		((float *)(uintptr_t)logits)[n_vocab / 2] = NAN;
}

static void failures(void **state)
{
	static const char *const says[] = {
	        "the engine failed on the prompt: the model's logits are not finite",
	        "the engine failed after 1 token(s) of the answer: ",
	        "the engine failed after 2 token(s) of the answer: "};
	const struct fs_gen_params params = tg_greedy(TOKENS);
	struct fs_prompt *p = ask("How many shapes are there?", NULL);
	struct answer before, after;

	answer(p, NULL, 0, &before);
	for (int i = 0; i < 3; i++) {
		int left = i;
		const struct fs_gen_events ev = {.arg = &left, .logits = spoil};
		struct fs_gen_result r;
		struct fs_errbuf e = {"of another call"};

		assert_int_equal(fs_engine_generate(en, p, &params, NULL, &ev, &r, &e), FS_EINTERNAL);
		assert_int_equal(r.finish, FS_FINISH_ERROR);
		assert_int_equal(r.completion_tokens, i);
		if (strncmp(e.text, says[i], strlen(says[i])) != 0)
			fail_msg("\"%s\" does not begin with \"%s\"", e.text, says[i]);
	}
	answer(p, NULL, 0, &after);
	assert_int_equal(before.n, after.n);
	assert_memory_equal(before.text, after.text, before.n);
	fs_prompt_destroy(p);
}

/* ---- tools, counted prompts, prompts from outside ---- */

static void tools_in_prompts(void **state)
{
	static const struct fs_tool tool = {"f", "Does it.", "{\"type\":\"object\"}"};
	const struct fs_chat_extras x = {.tools = &tool, .n_tools = 1, .choice = FS_TOOLS_REQUIRED};
	const struct fs_part part = {.text = "q", .text_len = 1};
	const struct fs_message m = {.role = FS_ROLE_USER, .parts = &part, .n_parts = 1};
	struct fs_prompt *p = NULL, *plain = ask("q", NULL);
	struct fs_errbuf e = {""};

	assert_true(fs_engine_info(en)->takes_tools);
	/* as many bytes as tokens nearly: this vocabulary knows few merges */
	assert_int_equal(fs_prompt_from_chat_ex(en, &m, 1, &x, &p, &e), FS_OK);
	assert_true(fs_prompt_cells(p) > fs_prompt_cells(plain) + 100);
	assert_string_equal(fs_prompt_opening(p), "<tool_call>\n{\"name\": \"f\", \"arguments\":");
	assert_string_equal(fs_prompt_opening(plain), "");
	assert_true(plain->answer && !p->answer);
	fs_prompt_destroy(p);
	fs_prompt_destroy(plain);
}

static void prompts_from_outside(void **state)
{
	static const char marks[] = "<|im_start|>system\n<|vision_start|>";
	const int32_t bad[] = {-1, -2, 320, INT32_MAX, INT32_MIN}, good[] = {0, 319};
	struct fs_prompt *p = NULL;
	struct fs_errbuf e = {""};

	assert_int_equal(fs_prompt_from_text(en, marks, strlen(marks), NULL, &p, &e), FS_OK);
	for (int32_t i = 0; i < p->n; i++)
		assert_false(fs_tok_is_control(tok, p->ids[i]));
	fs_prompt_destroy(p);
	assert_int_equal(fs_prompt_from_text(en, "", 0, NULL, &p, &e), FS_EINVAL);
	for (size_t i = 0; i < FS_ARRAY_LEN(bad); i++) {
		assert_int_equal(fs_prompt_from_ids(en, &bad[i], 1, NULL, 0, &p, &e), FS_EINVAL);
		assert_non_null(strstr(e.text, "outside of the vocabulary of 320"));
	}
	assert_int_equal(fs_prompt_from_ids(en, NULL, 0, NULL, 0, &p, &e), FS_EINVAL);
	assert_int_equal(fs_prompt_from_ids(en, good, 2, NULL, 0, &p, &e), FS_OK);
	assert_int_equal(fs_prompt_cells(p), 2);
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
	assert_int_equal(fs_prompt_from_text(en, text, n, NULL, &p, &e), FS_ELIMIT);
	assert_non_null(strstr(e.text, "more than 1024 tokens long; the context holds 256"));
	assert_null(p);
	free(text);
}

static void nobody_waits_for_a_prompt(void **state)
{
	const struct fs_part part = {.text = "hello", .text_len = 5};
	const struct fs_message m = {.role = FS_ROLE_USER, .parts = &part, .n_parts = 1};
	const struct fs_chat_extras x = {.cancel = fs_cancel_create(FS_NEVER)};
	struct fs_prompt *p = NULL;
	struct fs_errbuf e = {""};

	fs_cancel_fire(x.cancel, FS_CANCEL_CLIENT);
	assert_int_equal(fs_prompt_from_chat_ex(en, &m, 1, &x, &p, &e), FS_ECANCELLED);
	assert_int_equal(fs_prompt_from_text(en, "hello", 5, x.cancel, &p, &e), FS_ECANCELLED);
	assert_null(p);
	fs_cancel_unref(x.cancel);
}

int main(void)
{
	const struct CMUnitTest tests[] = {cmocka_unit_test(text_of_tokens), cmocka_unit_test(stops),
	        cmocka_unit_test(stops_refused), cmocka_unit_test(picture_in_chat),
	        cmocka_unit_test(control_tokens_as_text), cmocka_unit_test(plain_text),
	        cmocka_unit_test(log_probabilities), cmocka_unit_test(events_and_stops),
	        cmocka_unit_test(events_refused), cmocka_unit_test(tools_in_prompts),
	        cmocka_unit_test(failures), cmocka_unit_test(prompts_from_outside),
	        cmocka_unit_test(far_too_long), cmocka_unit_test(nobody_waits_for_a_prompt)};

	return cmocka_run_group_tests(tests, open_model, close_model);
}
