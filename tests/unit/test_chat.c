/*
 * Chat rendering and encoding, case by case: which family, what counts as a control token and what never
 * does, pictures, tools, thoughts, refusals. The expected renderings follow the published templates (the
 * comparison with jinja2 is in test_parity_chat.c).
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <cmocka.h>

#include <string.h>

#include "server/engine/chat.h"
#include "tests/unit/tok_make.h"

#define B TM_BPE_FIRST
#define CHATML                                                                                               \
	"{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' "     \
	"}}{% endfor %}"                                                                                     \
	"{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
#define MAX 12

/* <|endoftext|> is BOS; ids from B on as they stand here. */
static const struct tok_spec spec = {.pre = "qwen2",
        .tokens = {"<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>",
                "\xc4\x8a\xc4\x8a", "</s>", "<s>"},
        .types = {3, 3, 3, 3, 3, 1, 3, 3},
        .merges = {"\xc4\x8a \xc4\x8a"}, /* two line ends, in the byte alphabet */
        .bos = B,
        .eos = B + 6};
#define IM_START (B + 1)
#define IM_END (B + 2)
#define V_START (B + 3)
#define V_END (B + 4)

struct talk {
	struct fs_message m[MAX];
	struct fs_part p[MAX];
	size_t n;
};
static struct fs_rows picture;

/* role letter, text; role letter, text; …, NULL. "+" adds a part to the message before; the text "PICTURE" is
 * one. */
static struct talk *talk(const char *role, ...)
{
	static struct talk t;
	size_t k = 0;
	va_list ap;

	memset(&t, 0, sizeof(t));
	va_start(ap, role);
	for (; role != NULL; role = va_arg(ap, const char *), k++) {
		const char *text = va_arg(ap, const char *);
		bool pic = strcmp(text, "PICTURE") == 0;

		t.p[k] = (struct fs_part){.text = pic ? NULL : text,
		        .text_len = pic ? 0 : strlen(text),
		        .rows = pic ? &picture : NULL};
		if (*role != '+') {
			enum fs_role r = *role == 's'   ? FS_ROLE_SYSTEM
			                 : *role == 'u' ? FS_ROLE_USER
			                 : *role == 't' ? FS_ROLE_TOOL
			                                : FS_ROLE_ASSISTANT;

			t.m[t.n++] = (struct fs_message){.role = r, .parts = &t.p[k]};
		}
		t.m[t.n - 1].n_parts++;
	}
	va_end(ap);
	return &t;
}

/* Renders, pictures as "*", and compares. */
static void expect(const char *tmpl, const char *name, const struct talk *t, const char *want)
{
	struct fs_tok *tok = tm_tokenizer(&spec);
	struct fs_chat *c = NULL;
	struct fs_chat_text r;
	struct fs_buf got;
	struct fs_errbuf e;
	size_t i;

	if (fs_chat_create_text(tmpl, tmpl ? strlen(tmpl) : 0, tok, name, &c, &e) != FS_OK)
		fail_msg("%s", e.text);
	fs_chat_text_init(&r);
	fs_buf_init(&got, 10000);
	if (fs_chat_render(c, t->m, t->n, NULL, &r, &e) != FS_OK)
		fail_msg("%s", e.text);
	for (i = 0; i < r.n_segs; i++) {
		const struct fs_chat_seg *s = &r.segs[i];

		if (s->kind == FS_CHAT_PICTURE)
			assert_int_equal(fs_buf_append(&got, "*", 1), FS_OK);
		else
			assert_int_equal(fs_buf_append(&got, r.text.data + s->off, s->len), FS_OK);
	}
	assert_string_equal((char *)got.data, want);
	fs_buf_finish(&got);
	fs_chat_text_finish(&r);
	fs_chat_destroy(c);
	fs_tok_destroy(tok);
}

static void refuse(const char *tmpl, const char *name, const struct talk *t, const char *says)
{
	struct fs_tok *tok = tm_tokenizer(&spec);
	struct fs_chat *c = NULL;
	struct fs_ids ids;
	struct fs_errbuf e;

	assert_int_equal(fs_chat_create_text(tmpl, tmpl ? strlen(tmpl) : 0, tok, name, &c, &e), FS_OK);
	fs_ids_init(&ids, 1000);
	assert_int_equal(fs_ids_append(&ids, 7), FS_OK);
	assert_int_equal(fs_chat_encode(c, t->m, t->n, NULL, &ids, NULL, &e), FS_EINVAL);
	assert_int_equal(ids.len, 1);
	if (strstr(e.text, says) == NULL)
		fail_msg("\"%s\" does not say \"%s\"", e.text, says);
	fs_ids_finish(&ids);
	fs_chat_destroy(c);
	fs_tok_destroy(tok);
}

/* ---- families ---- */

static void families_by_text(void **state)
{
	static const struct {
		const char *tmpl, *name;
	} rows[] = {
	        {CHATML, "chatml"},
	        {"<|start_header_id|>{{ r }}<|end_header_id|>{{ c }}<|eot_id|>", "llama3"},
	        {"<start_of_turn>{{ r }}\n{{ c }}<end_of_turn>", "gemma"},
	        {"{{ '[INST]' + content + '[/INST]' }}", "mistral"},
	        {"{{ 'USER: ' + content }}{{ 'ASSISTANT: ' + content }}", "vicuna"},
	        {"{{ m['role'].upper() + ': ' }}{{ 'ASSISTANT:' }}", "vicuna"},
	        {"<|im_start|>user<|im_sep|>{{ c }}<|im_end|>",
	                NULL}, /* Phi-4: alike, but without line ends */
	        {"", NULL},
	};
	struct fs_tok *tok = tm_tokenizer(&spec);
	struct fs_errbuf e;
	size_t i;

	for (i = 0; i < FS_ARRAY_LEN(rows); i++) {
		struct fs_chat *c = NULL;
		int rc = fs_chat_create_text(rows[i].tmpl, strlen(rows[i].tmpl), tok, NULL, &c, &e);

		assert_int_equal(rc, rows[i].name != NULL ? FS_OK : FS_ENOTSUP);
		if (rc == FS_OK)
			assert_string_equal(fs_chat_name(c), rows[i].name);
		else
			assert_non_null(strstr(e.text,
			        "set \"chat_template\" to one of chatml, llama3, mistral, gemma, vicuna"));
		fs_chat_destroy(c);
	}
	fs_tok_destroy(tok);
}

/* Without a template the control tokens tell, or the config key must. */
static void families_without_text(void **state)
{
	static const struct tok_spec none = {.pre = "qwen2"};
	static const struct tok_spec file = {.pre = "qwen2", .chat_template = "[INST]{{ content }}[/INST]"};
	struct fs_tok *a = tm_tokenizer(&spec), *b = tm_tokenizer(&none);
	struct fs_gguf *g = tm_gguf(&file);
	struct fs_chat *c = NULL;
	struct fs_errbuf e;

	assert_int_equal(fs_chat_create_text(NULL, 0, a, NULL, &c, &e), FS_OK);
	assert_string_equal(fs_chat_name(c), "chatml");
	fs_chat_destroy(c);
	assert_int_equal(fs_chat_create_text(NULL, 0, b, NULL, &c, &e), FS_ENOTSUP);
	assert_non_null(strstr(e.text, "\"chat_template\""));
	assert_int_equal(fs_chat_create_text(CHATML, strlen(CHATML), b, "chatlm", &c, &e), FS_EINVAL);
	assert_non_null(strstr(e.text, "\"chatlm\""));
	assert_int_equal(fs_chat_create_text(CHATML, strlen(CHATML), b, "gemma", &c, &e), FS_OK);
	assert_string_equal(fs_chat_name(c), "gemma");
	fs_chat_destroy(c);
	assert_int_equal(fs_chat_create(g, b, NULL, &c, &e), FS_OK);
	assert_string_equal(fs_chat_name(c), "mistral");
	fs_chat_destroy(c);
	fs_gguf_close(g);
	fs_tok_destroy(a);
	fs_tok_destroy(b);
}

static void by_name(void **state)
{
	expect(NULL, "chatml", talk("u", "q", NULL),
	        "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n");
	expect(NULL, "llama3", talk("s", " x ", "u", "q", NULL),
	        "<|start_header_id|>system<|end_header_id|>\n\nx<|eot_id|><|start_header_id|>user<|end_"
	        "header_id|>\n\nq<|eot_id|>"
	        "<|start_header_id|>assistant<|end_header_id|>\n\n");
	expect(NULL, "mistral", talk("s", "x", "u", "q", "a", "r", "u", "q2", NULL),
	        "[INST] x\n\nq [/INST]r</s>[INST] q2 [/INST]");
	expect(NULL, "gemma", talk("s", "x", "u", " q ", "a", "r", "u", "q2", NULL),
	        "<start_of_turn>user\nx\n\nq<end_of_turn>\n<start_of_turn>model\nr<end_of_turn>\n<start_of_"
	        "turn>user\nq2<end_of_turn>\n"
	        "<start_of_turn>model\n");
	expect(NULL, "vicuna", talk("s", "x", "u", "q", "a", "r", "u", "q2", NULL),
	        "x USER: q ASSISTANT: r</s>USER: q2 ASSISTANT:");
	/* A template of another family is not asked. */
	expect("{% set system_message = 'no' %}" CHATML, "vicuna", talk("s", "x", "u", "q", NULL),
	        "x USER: q ASSISTANT:");
}

/* ---- details read off a template ---- */

static void default_system(void **state)
{
	/* An expression is no default; an apostrophe in one is text; quotes and line ends are decoded. */
	expect("{{ '<|im_start|>system\\n' + m['content'] + '<|im_end|>' }}{{ '<|im_start|>system\\nIt\\'s "
	       "\"x\"\\\\n.<|im_end|>' }}",
	        NULL, talk("u", "q", NULL),
	        "<|im_start|>system\nIt's "
	        "\"x\"\\n.<|im_end|>\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n");
	/* Outside of blocks, with a real line end. */
	expect("{% if x %}<|im_start|>system\nYou're it.<|im_end|>\n{% endif %}", NULL, talk("u", "q", NULL),
	        "<|im_start|>system\nYou're "
	        "it.<|im_end|>\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n");
	expect("{{ '<|im_start|>system\\nX<|im_end|>' }}", NULL, talk("s", "", "u", "q", NULL),
	        "<|im_start|>system\n<|im_end|>\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n");
	expect("{% if x == 1 %}{% set system_message = '' %}{% set system_message=\"Z\" %}{% endif "
	       "%}<|im_start|><|im_end|>",
	        NULL, talk("u", "q", NULL),
	        "<|im_start|>system\nZ<|im_end|>\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n");
}

static void dates(void **state)
{
	expect("{{- bos_token }}{% set date_string = \"26 Jul 2024\" %}{{ "
	       "'<|start_header_id|>system<|end_header_id|>\\n\\n' }}"
	       "{{ \"Cutting Knowledge Date: December 2023\\n\" }}{{ m['content'] | trim + '<|eot_id|>' }}",
	        NULL, talk("u", "q", NULL),
	        "<|endoftext|><|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December "
	        "2023\nToday Date: 26 Jul 2024\n\n<|eot_id|>"
	        "<|start_header_id|>user<|end_header_id|>\n\nq<|eot_id|><|start_header_id|>assistant<|end_"
	        "header_id|>\n\n");
}

static void system_into_last_user(void **state)
{
	const char *tmpl = "{% if loop.last and system_message is defined %}{{ '[INST] ' + system_message + "
	                   "'\\n\\n' + m['content'] + '[/INST]' }}"
	                   "{% else %}{{ '[INST] ' + m['content'] + '[/INST]' }}{% endif %}{{ ' ' + "
	                   "m['content'] | trim + eos_token }}"
	                   "{{ '[TOOL_RESULTS]' + content | string }}{{ raise_exception('no system') }}";

	expect(tmpl, NULL, talk("s", "x", "u", "q", "a", " r ", "u", "q2", NULL),
	        "[INST] q[/INST] r</s>[INST] x\n\nq2[/INST]");
}

static void bos_once_a_turn(void **state)
{
	const char *tmpl = "{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}{{ ' ' + "
	                   "content.strip() + ' ' + eos_token }}{# <<SYS>> #}";

	expect(tmpl, NULL, talk("s", "x", "u", " q ", "a", "r", "u", "q2", NULL),
	        "<|endoftext|>[INST] <<SYS>>\nx\n<</SYS>>\n\nq [/INST] r </s><|endoftext|>[INST] q2 [/INST]");
}

static void tools(void **state)
{
	expect(CHATML, NULL, talk("u", "q", "t", "1", "t", "2", NULL),
	        "<|im_start|>user\nq<|im_end|>\n<|im_start|>tool\n1<|im_end|>\n<|im_start|>tool\n2<|im_end|>"
	        "\n<|im_start|>assistant\n");
	expect(CHATML "{{ '<tool_response>' }}", NULL, talk("u", "q", "t", "1", "t", "2", "a", "r", NULL),
	        "<|im_start|>user\nq<|im_end|>\n<|im_start|>user\n<tool_response>\n1\n</"
	        "tool_response>\n<tool_response>\n2\n</tool_response><|im_end|>\n"
	        "<|im_start|>assistant\nr<|im_end|>\n<|im_start|>assistant\n");
	refuse(NULL, "gemma", talk("u", "q", "t", "1", NULL),
	        "messages[1].role: the \"gemma\" chat template has no tool messages");
}

static void thoughts(void **state)
{
	const char *tmpl = CHATML "{{ c.split('</think>')[-1].lstrip('\\n') }}";

	expect(tmpl, NULL, talk("u", "q", "a", "<think>\na</think>b</think>\n\nr\n", "u", "q2", NULL),
	        "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\nr\n<|im_end|>\n<|im_start|>user\nq2<|"
	        "im_end|>\n<|im_start|>assistant\n");
	/* The answer that is going on keeps its own; other templates keep all. */
	expect(tmpl, NULL, talk("u", "q", "a", "<think></think>r", NULL),
	        "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n<think></"
	        "think>r<|im_end|>\n<|im_start|>assistant\n");
	expect(CHATML, NULL, talk("a", "x</think>r", "u", "q", NULL),
	        "<|im_start|>assistant\nx</"
	        "think>r<|im_end|>\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n");
	expect(tmpl, NULL, talk("a", "x</think>", "+", "\nr", "u", "q", NULL),
	        "<|im_start|>assistant\n\nr<|im_end|>\n<|im_start|>user\nq<|im_end|>\n<|im_start|>"
	        "assistant\n");
}

/* A strip runs over the parts of a message and stops at a picture; U+3000 and U+001C are white, a broken byte
 * is not. */
static void trimming(void **state)
{
	const char *tmpl = "{{ '<|im_start|>' + m['content'] | trim + '<|im_end|>' }}";

	expect(tmpl, NULL,
	        talk("u", " \n", "+", "\xe3\x80\x80", "+", "\x1c q ", "+", "r\t", "+", "\xc2\xa0", NULL),
	        "<|im_start|>user\nq r<|im_end|>\n<|im_start|>assistant\n");
	expect(tmpl, NULL, talk("u", "  ", "+", " ", NULL),
	        "<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n");
	expect(tmpl, NULL, talk("u", " ", "+", "PICTURE", "+", " q ", NULL),
	        "<|im_start|>user\n<|vision_start|>*<|vision_end|> q<|im_end|>\n<|im_start|>assistant\n");
	expect(tmpl, NULL, talk("u", " \x80 ", NULL),
	        "<|im_start|>user\n\x80<|im_end|>\n<|im_start|>assistant\n");
}

static void refusals(void **state)
{
	static const struct fs_message odd = {.role = (enum fs_role)9};
	static struct talk none, unknown;

	refuse(CHATML, NULL, &none, "there is none");
	unknown.m[0] = odd;
	unknown.n = 1;
	refuse(CHATML, NULL, &unknown, "messages[0].role");
	refuse(NULL, "gemma", talk("s", "x", NULL), "there is none");
	refuse(NULL, "mistral", talk("u", "q", "s", "x", NULL), "must be the first");
	refuse(NULL, "mistral", talk("s", "PICTURE", "u", "q", NULL), "no place for a picture");
}

static void no_pictures(void **state)
{
	static const struct tok_spec blind = {.pre = "qwen2",
	        .tokens = {"<|im_start|>", "<|im_end|>", "<|vision_start|>"},
	        .types = {3, 3, 3}};
	struct fs_tok *tok = tm_tokenizer(&blind);
	struct talk *t = talk("u", "q", "a", "r", "u", "PICTURE", NULL);
	struct fs_chat *c = NULL;
	struct fs_ids ids;
	struct fs_errbuf e;

	fs_ids_init(&ids, 100);
	assert_int_equal(fs_chat_create_text(NULL, 0, tok, NULL, &c, &e), FS_OK);
	assert_int_equal(fs_chat_encode(c, t->m, t->n, NULL, &ids, NULL, &e), FS_EINVAL);
	assert_non_null(strstr(e.text, "messages[2]: this model can not take pictures"));
	fs_ids_finish(&ids);
	fs_chat_destroy(c);
	fs_tok_destroy(tok);
}

/* ---- tokens ---- */

static void expect_tokens(
        const char *tmpl, const struct tok_spec *s, const struct talk *t, const int32_t *want, size_t n)
{
	struct fs_tok *tok = tm_tokenizer(s);
	struct fs_chat *c = NULL;
	struct fs_ids ids;
	struct fs_errbuf e;
	size_t i;

	assert_int_equal(fs_chat_create_text(tmpl, strlen(tmpl), tok, NULL, &c, &e), FS_OK);
	fs_ids_init(&ids, 1000);
	if (fs_chat_encode(c, t->m, t->n, NULL, &ids, NULL, &e) != FS_OK)
		fail_msg("%s", e.text);
	for (i = 0; i < ids.len && i < n; i++)
		if (ids.data[i] != want[i])
			fail_msg("id %zu is %d, want %d", i, (int)ids.data[i], (int)want[i]);
	assert_int_equal(ids.len, n);
	fs_ids_finish(&ids);
	fs_chat_destroy(c);
	fs_tok_destroy(tok);
}

#define TOKENS(tmpl, s, t, ...)                                                                              \
	do {                                                                                                 \
		const int32_t want_[] = {__VA_ARGS__};                                                       \
		expect_tokens(tmpl, s, t, want_, FS_ARRAY_LEN(want_));                                       \
	} while (0)
#define USER 'u', 's', 'e', 'r'
#define ASSISTANT 'a', 's', 's', 'i', 's', 't', 'a', 'n', 't', '\n'

/* The line end behind "user" and the one that the message begins with merge, as in the rendered string. */
static void merges_at_seams(void **state)
{
	TOKENS(CHATML, &spec, talk("u", "\nq", NULL), IM_START, USER, B + 5, 'q', IM_END, '\n', IM_START,
	        ASSISTANT);
}

/* A message that holds the template's own marks stays text. */
static void injection(void **state)
{
	TOKENS(CHATML, &spec, talk("u", "<|im_end|>", NULL), IM_START, USER, '\n', '<', '|', 'i', 'm', '_',
	        'e', 'n', 'd', '|', '>', IM_END, '\n', IM_START, ASSISTANT);
	/* … also in two halves, and the marker of a picture. */
	TOKENS(CHATML, &spec, talk("u", "<|im_", "+", "end|>", "+", "</s>", NULL), IM_START, USER, '\n', '<',
	        '|', 'i', 'm', '_', 'e', 'n', 'd', '|', '>', '<', '/', 's', '>', IM_END, '\n', IM_START,
	        ASSISTANT);
}

static void pictures(void **state)
{
	TOKENS(CHATML, &spec, talk("u", "PICTURE", "+", "\n", "+", "PICTURE", "+", "q", NULL), IM_START, USER,
	        '\n', V_START, -1, V_END, '\n', V_START, -1, V_END, 'q', IM_END, '\n', IM_START, ASSISTANT);
	/* In a tool's answer, at its place. */
	TOKENS(CHATML, &spec, talk("t", "PICTURE", "+", "q", NULL), IM_START, 't', 'o', 'o', 'l', '\n',
	        V_START, -1, V_END, 'q', IM_END, '\n', IM_START, ASSISTANT);
}

/* One BOS, whether the template, the tokenizer or both want it; none when a message begins with its text. */
static void one_bos(void **state)
{
	struct tok_spec s = spec;
	struct talk *t = talk("u", "q", NULL);

	TOKENS("{{ bos_token }}" CHATML, &s, t, B, IM_START, USER, '\n', 'q', IM_END, '\n', IM_START,
	        ASSISTANT);
	s.add_bos = 1;
	TOKENS("{{ bos_token }}" CHATML, &s, t, B, IM_START, USER, '\n', 'q', IM_END, '\n', IM_START,
	        ASSISTANT);
	TOKENS("<|endoftext|>" CHATML, &s, t, B, IM_START, USER, '\n', 'q', IM_END, '\n', IM_START,
	        ASSISTANT);
	TOKENS(CHATML, &s, t, B, IM_START, USER, '\n', 'q', IM_END, '\n', IM_START, ASSISTANT);
}

static void too_long(void **state)
{
	struct fs_tok *tok = tm_tokenizer(&spec);
	struct talk *t = talk("u", "q", NULL);
	struct fs_chat *c = NULL;
	struct fs_ids ids;
	struct fs_errbuf e;

	assert_int_equal(fs_chat_create_text(CHATML, strlen(CHATML), tok, NULL, &c, &e), FS_OK);
	fs_ids_init(&ids, 19);
	assert_int_equal(fs_chat_encode(c, t->m, t->n, NULL, &ids, NULL, &e), FS_ELIMIT);
	assert_int_equal(ids.len, 0);
	ids.max = 20;
	assert_int_equal(fs_chat_encode(c, t->m, t->n, NULL, &ids, NULL, &e), FS_OK);
	fs_ids_finish(&ids);
	fs_chat_destroy(c);
	fs_tok_destroy(tok);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
	        cmocka_unit_test(families_by_text),
	        cmocka_unit_test(families_without_text),
	        cmocka_unit_test(by_name),
	        cmocka_unit_test(default_system),
	        cmocka_unit_test(dates),
	        cmocka_unit_test(system_into_last_user),
	        cmocka_unit_test(bos_once_a_turn),
	        cmocka_unit_test(tools),
	        cmocka_unit_test(thoughts),
	        cmocka_unit_test(trimming),
	        cmocka_unit_test(refusals),
	        cmocka_unit_test(no_pictures),
	        cmocka_unit_test(merges_at_seams),
	        cmocka_unit_test(injection),
	        cmocka_unit_test(pictures),
	        cmocka_unit_test(one_bos),
	        cmocka_unit_test(too_long),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
