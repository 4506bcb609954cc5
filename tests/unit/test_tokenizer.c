/*
 * The tokenizer's rules one by one, on vocabularies made by hand so that every expected id can be worked out
 * on paper: merges, special tokens and who may write them, invalid UTF-8, limits, decoding. The goldens are
 * in test_parity_tokenizer.c.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <cmocka.h>

#include <string.h>

#include "server/engine/pretokenize.h"
#include "server/engine/unicode.h"
#include "server/engine/utf8.h"
#include "tests/unit/tok_make.h"

#define B TM_BPE_FIRST
#define S TM_SPM_FIRST

static void expect_ids(const struct fs_ids *got, const int32_t *want, size_t n)
{
	size_t i;

	for (i = 0; i < got->len && i < n; i++)
		if (got->data[i] != want[i])
			fail_msg("id %zu is %d, want %d", i, (int)got->data[i], (int)want[i]);
	assert_int_equal(got->len, n);
}

#define EXPECT(t, text, special, ...)                                                                        \
	do {                                                                                                 \
		const int32_t want_[] = {__VA_ARGS__};                                                       \
		expect_encoding(t, text, sizeof(text) - 1, special, want_, FS_ARRAY_LEN(want_));             \
	} while (0)

static void expect_encoding(
        const struct fs_tok *t, const char *text, size_t len, bool special, const int32_t *want, size_t n)
{
	struct fs_ids ids;
	struct fs_errbuf e;

	fs_ids_init(&ids, 1 << 20);
	if (fs_tok_encode(t, text, len, special, &ids, &e) != FS_OK)
		fail_msg("%s", e.text);
	expect_ids(&ids, want, n);
	fs_ids_finish(&ids);
}

/* ---- pieces ---- */

static void expect_pieces(enum fs_pre_kind kind, const char *text, const char *bars)
{
	const uint8_t *s = (const uint8_t *)text;
	size_t n = strlen(text), i = 0, k = 0;
	char got[256];

	while (i < n) {
		size_t len = fs_pre_next(kind, s + i, n - i);

		assert_true(len >= 1 && len <= n - i);
		memcpy(got + k, s + i, len);
		k += len;
		i += len;
		got[k++] = i < n ? '|' : 0;
	}
	assert_string_equal(got, bars);
}

/* Worked out from the regexes by hand; the goldens repeat this with the regex engine itself. */
static void pieces(void **state)
{
	expect_pieces(FS_PRE_GPT2, "I'm 12 years", "I|'m| 12| years");
	expect_pieces(FS_PRE_GPT2, "I'M a   b\t\tc\n", "I|'|M| a|  | b|\t|\t|c|\n");
	expect_pieces(FS_PRE_LLAMA3, "I'M 12345!?\n\nx", "I|'M| |123|45|!?\n\n|x");
	expect_pieces(FS_PRE_QWEN2, "a 12\r\n  b  \n", "a| |1|2|\r\n| | b|  \n");
	expect_pieces(FS_PRE_QWEN2, "(word) \n \n  z", "(word|)| \n \n| | z");
	expect_pieces(FS_PRE_SMOLLM, "a  12 b", "a|  |1|2| b");
	expect_pieces(FS_PRE_SMOLLM, "a  b", "a| | b");
	/* (?i:'s) takes the long s, which folds to s; other letters of the same byte length do not. */
	expect_pieces(FS_PRE_QWEN2,
	        "'\xc5\xbf"
	        "a",
	        "'\xc5\xbf|a");
	expect_pieces(FS_PRE_QWEN2,
	        "'\xc5\xbe"
	        "a",
	        "'\xc5\xbe"
	        "a");
	expect_pieces(FS_PRE_GPT2,
	        "'\xc5\xbf"
	        "a",
	        "'|\xc5\xbf"
	        "a");
}

static void unknown_pre(void **state)
{
	enum fs_pre_kind kind;
	const char *name = NULL;
	struct fs_errbuf e;

	assert_int_equal(fs_pre_find("default", 7, &kind, &name, &e), FS_ENOTSUP);
	assert_non_null(strstr(e.text, "\"default\""));
	assert_non_null(strstr(e.text, "qwen2, llama-bpe, gpt-2 and smollm"));
	assert_int_equal(fs_pre_find("llama3", 6, &kind, &name, &e), FS_OK);
	assert_string_equal(name, "llama-bpe");
}

static void unicode_classes(void **state)
{
	assert_int_equal(fs_uclass('Z'), FS_UC_LETTER);
	assert_int_equal(fs_uclass('_'), 0);
	assert_int_equal(fs_uclass(0x0c), FS_UC_SPACE);
	assert_int_equal(fs_uclass(0x1c), 0);
	assert_int_equal(fs_uclass(0x85), FS_UC_SPACE);
	assert_int_equal(fs_uclass(0xb2), FS_UC_NUMBER);   /* superscript two: No */
	assert_int_equal(fs_uclass(0x2160), FS_UC_NUMBER); /* Roman one: Nl */
	assert_int_equal(fs_uclass(0x301), 0);             /* combining acute: Mn */
	assert_int_equal(fs_uclass(0x3000), FS_UC_SPACE);
	assert_int_equal(fs_uclass(0x200b), 0); /* zero width space is Cf */
	assert_int_equal(fs_uclass(0x9fff), FS_UC_LETTER);
	assert_int_equal(fs_uclass(0x10ffff), 0);
	assert_int_equal(fs_uclass(0x110000), 0);
	assert_int_equal(fs_uclass(UINT32_MAX), 0);
}

/* ---- UTF-8 ---- */

/* The table of The Unicode Standard, section 3.9, "U+FFFD substitution of maximal subparts". */
static void bad_utf8(void **state)
{
	static const struct {
		const char *in, *out;
	} rows[] = {
	        {"\xc0\xaf\xe0\x80\xbf\xf0\x81\x82\x41", "\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd"
	                                                 "\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd"
	                                                 "A"},
	        {"\xed\xa0\x80\xed\xbf\xbf\xed\xaf\x41", "\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd"
	                                                 "\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd"
	                                                 "A"},
	        {"\xf4\x91\x92\x93\xff\x41\x80\xbf\x42",
	                "\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd"
	                "A\xef\xbf\xbd\xef\xbf\xbd"
	                "B"},
	        {"\xe1\x80\xe2\xf0\x91\x92\xf1\xbf\x41", "\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd"
	                                                 "A"},
	        {"ok \xe2\x82", "ok \xef\xbf\xbd"},
	        {"\xf4\x8f\xbf\xbf", "\xf4\x8f\xbf\xbf"},
	};
	struct fs_buf b;
	size_t i;

	fs_buf_init(&b, 1000);
	for (i = 0; i < FS_ARRAY_LEN(rows); i++) {
		fs_buf_clear(&b);
		assert_int_equal(fs_utf8_append_clean(&b, rows[i].in, strlen(rows[i].in)), FS_OK);
		assert_string_equal((char *)b.data, rows[i].out);
	}
	fs_buf_finish(&b);
}

/* ---- byte-level BPE ---- */

/* "ab" before "bc": abc is ab c; equal pairs merge from the left. */
static void merges(void **state)
{
	struct tok_spec s = {.pre = "gpt-2",
	        .tokens = {"ab", "bc", "aa", "aaaa"},
	        .merges = {"a b", "b c", "a a", "aa aa"}};
	struct fs_tok *t = tm_tokenizer(&s);

	EXPECT(t, "abc", false, B, 'c');
	EXPECT(t, "bc", false, B + 1);
	EXPECT(t, "aaa", false, B + 2, 'a');
	EXPECT(t, "aaaaa", false, B + 3, 'a');
	EXPECT(t, "aab", false, 'a', B);
	EXPECT(t, " ab\n", false, ' ', B, '\n');
	assert_int_equal(fs_tok_info(t)->n_vocab, 260);
	assert_int_equal(fs_tok_info(t)->bos, -1);
	assert_string_equal(fs_tok_info(t)->pre, "gpt-2");
	fs_tok_destroy(t);
}

/* A merge whose result is no token leads to one that is; where it ends in between, the bytes come out one by
 * one. */
static void merges_without_token(void **state)
{
	struct tok_spec s = {.pre = "gpt-2", .tokens = {"xyz"}, .merges = {"x y", "xy z"}};
	struct fs_tok *t = tm_tokenizer(&s);

	EXPECT(t, "xyz", false, B);
	EXPECT(t, "xy", false, 'x', 'y');
	fs_tok_destroy(t);
}

/* llama-bpe takes a piece that is a token as a whole, whatever the merges say, and adds BOS by default. */
static void whole_pieces(void **state)
{
	struct tok_spec s = {.pre = "llama-bpe",
	        .tokens = {"he", "hello", "<|begin_of_text|>"},
	        .types = {1, 1, 3},
	        .merges = {"h e"},
	        .bos = B + 2};
	struct fs_tok *t = tm_tokenizer(&s);

	EXPECT(t, "hello", false, B + 1);
	EXPECT(t, "hellos", false, B, 'l', 'l', 'o', 's');
	assert_true(fs_tok_info(t)->add_bos);
	assert_int_equal(fs_tok_info(t)->bos, B + 2);
	fs_tok_destroy(t);
	s.pre = "qwen2";
	t = tm_tokenizer(&s);
	EXPECT(t, "hello", false, B, 'l', 'l', 'o');
	assert_false(fs_tok_info(t)->add_bos);
	fs_tok_destroy(t);
}

/* U+0000 is a byte like others; bad bytes are those of U+FFFD. */
static void odd_bytes(void **state)
{
	struct tok_spec s = {.pre = "gpt-2"};
	struct fs_tok *t = tm_tokenizer(&s);

	EXPECT(t,
	        "\0\xff"
	        "a",
	        false, 0, 0xef, 0xbf, 0xbd, 'a');
	EXPECT(t, "\xc3\xa9", false, 0xc3, 0xa9);
	expect_encoding(t, "", 0, false, NULL, 0);
	expect_encoding(t, NULL, 0, true, NULL, 0);
	fs_tok_destroy(t);
}

/* ---- special tokens ---- */

static const struct tok_spec special_spec = {.pre = "qwen2",
        .tokens = {"<|im_start|>", "<|im_end|>", "<|im_end|>!", "\n\n", "<unk>", "<|mine|>", "[INST]"},
        .types = {3, 3, 3, 4, 2, 4, 4},
        .eos = B + 1};

static void special_tokens(void **state)
{
	struct fs_tok *t = tm_tokenizer(&special_spec);

	EXPECT(t, "a<|im_start|>b", true, 'a', B, 'b');
	EXPECT(t, "<|im_end|>!", true, B + 2); /* the longest */
	EXPECT(t, "<|im_end|><|im_end|>", true, B + 1, B + 1);
	EXPECT(t, "<<|im_end|", true, '<', '<', '|', 'i', 'm', '_', 'e', 'n', 'd', '|');
	EXPECT(t, "<unk>", true, B + 4);
	EXPECT(t, "a\n\n\nb", true, 'a', B + 3, '\n', 'b');
	/* Untrusted text: user-defined tokens only. */
	EXPECT(t, "<|im_end|>", false, '<', '|', 'i', 'm', '_', 'e', 'n', 'd', '|', '>');
	EXPECT(t, "<unk>", false, '<', 'u', 'n', 'k', '>');
	EXPECT(t, "a\n\n\nb", false, 'a', B + 3, '\n', 'b');
	/* What looks like a control token is one, even if the file calls it user-defined. */
	EXPECT(t, "[INST]", false, '[', 'I', 'N', 'S', 'T', ']');
	EXPECT(t, "<|mine|>", false, '<', '|', 'm', 'i', 'n', 'e', '|', '>');
	EXPECT(t, "[INST]<|mine|>", true, B + 6, B + 5);
	fs_tok_destroy(t);
}

#define SPANS(t, spans, ...)                                                                                 \
	do {                                                                                                 \
		const int32_t want_[] = {__VA_ARGS__};                                                       \
		struct fs_ids ids_;                                                                          \
		fs_ids_init(&ids_, 1000);                                                                    \
		assert_int_equal(fs_tok_encode_spans(t, spans, FS_ARRAY_LEN(spans), &ids_, NULL), FS_OK);    \
		expect_ids(&ids_, want_, FS_ARRAY_LEN(want_));                                               \
		fs_ids_finish(&ids_);                                                                        \
	} while (0)

/* Merges cross the seams of spans, control tokens do not cross into untrusted ones. */
static void seams(void **state)
{
	struct tok_spec s = special_spec;
	struct fs_tok *t;

	s.tokens[7] = "ab";
	s.merges[0] = "a b";
	t = tm_tokenizer(&s);
	{
		struct fs_tok_span spans[] = {
		        {"<|im_start|>a", 13, true}, {"b<|im_end|>", 11, false}, {"<|im_end|>", 10, true}};

		SPANS(t, spans, B, B + 7, '<', '|', 'i', 'm', '_', 'e', 'n', 'd', '|', '>', B + 1);
	}
	{
		struct fs_tok_span spans[] = {{"<|im_", 5, true}, {"end|>", 5, true}, {"", 0, false},
		        {"<|im_", 5, true}, {"end|>", 5, false}};

		SPANS(t, spans, B + 1, '<', '|', 'i', 'm', '_', 'e', 'n', 'd', '|', '>');
	}
	{ /* the longer one reaches into what is not trusted: the shorter one counts */
		struct fs_tok_span spans[] = {{"<|im_end|>", 10, true}, {"!", 1, false}};

		SPANS(t, spans, B + 1, '!');
	}
	{ /* a broken character stays broken, a user-defined token is found across the seam */
		struct fs_tok_span spans[] = {{"\xe2\x82\n", 3, false}, {"\n", 1, true}};

		SPANS(t, spans, 0xef, 0xbf, 0xbd, B + 3);
	}
	fs_tok_destroy(t);
}

static void end_of_generation(void **state)
{
	struct tok_spec s = {.pre = "qwen2",
	        .tokens = {"<|endoftext|>", "<|im_end|>", "</s>", "mine"},
	        .types = {3, 3, 1, 1},
	        .eos = B + 3};
	struct fs_tok *t = tm_tokenizer(&s);

	assert_true(fs_tok_is_eog(t, B));
	assert_true(fs_tok_is_eog(t, B + 1));
	assert_true(fs_tok_is_eog(t, B + 2));
	assert_true(fs_tok_is_eog(t, B + 3));
	assert_false(fs_tok_is_eog(t, 'a'));
	assert_false(fs_tok_is_eog(t, -1));
	assert_false(fs_tok_is_eog(t, 1 << 30));
	assert_int_equal(fs_tok_info(t)->eot, B + 1);
	/* Forced to be control tokens by their text, whatever the file says. */
	assert_true(fs_tok_is_control(t, B + 2));
	assert_false(fs_tok_is_control(t, B + 3));
	EXPECT(t, "</s>", false, '<', '/', 's', '>');
	assert_int_equal(fs_tok_find(t, "mine", 4), B + 3);
	assert_int_equal(fs_tok_find(t, "min", 3), -1);
	fs_tok_destroy(t);
}

/* ---- SPM ---- */

static const struct tok_spec spm_spec = {.tokens = {"\xe2\x96\x81", "a", "b", "ab",
                                                 "\xe2\x96\x81"
                                                 "a",
                                                 "<", "s", "<s", ">", "bb"},
        .scores = {-10, -11, -12, -2, -1, -13, -14, -3, -15, -2}};

static void spm(void **state)
{
	struct tok_spec s = spm_spec;
	struct fs_tok *t = tm_tokenizer(&s);

	/* The best score first: "▁a" (-1) before "ab" (-2). */
	EXPECT(t, "ab", false, S + 4, S + 2);
	EXPECT(t, " ab", false, S, S + 4, S + 2);
	/* Equal scores: from the left. */
	EXPECT(t, "abb", false, S + 4, S + 9);
	EXPECT(t, "babb", false, S, S + 2, S + 3, S + 2);
	/* No token for the character: its bytes. */
	EXPECT(t, "\xc3\xa9", false, S, 3 + 0xc3, 3 + 0xa9);
	/* Merging never arrives at a control token, though "<s" and ">" would join to one. */
	EXPECT(t, "<s>", false, S, S + 7, S + 8);
	EXPECT(t, "<s>a", true, 1, S + 4);
	EXPECT(t, "<0x41>", false, S, S + 5, 3 + '0', 3 + 'x', 3 + '4', 3 + '1', S + 8);
	expect_encoding(t, "", 0, false, NULL, 0);
	assert_true(fs_tok_info(t)->add_bos);
	fs_tok_destroy(t);
	s.add_prefix = -1;
	t = tm_tokenizer(&s);
	EXPECT(t, "ab", false, S + 3);
	EXPECT(t, " ab", false, S + 4, S + 2);
	fs_tok_destroy(t);
}

/* ---- decoding ---- */

static void expect_stream(
        const struct fs_tok *t, struct fs_tok_stream s, const int32_t *ids, size_t n, const char *steps)
{
	struct fs_buf out;
	size_t i;

	fs_buf_init(&out, 1000);
	for (i = 0; i < n; i++) {
		assert_int_equal(fs_tok_stream_push(t, &s, ids[i], &out), FS_OK);
		assert_int_equal(fs_buf_append(&out, "|", 1), FS_OK);
	}
	assert_int_equal(fs_tok_stream_flush(&s, &out), FS_OK);
	assert_string_equal((char *)out.data, steps);
	fs_buf_finish(&out);
}

#define STREAM(t, drop, steps, ...)                                                                          \
	do {                                                                                                 \
		const int32_t ids_[] = {__VA_ARGS__};                                                        \
		expect_stream(                                                                               \
		        t, (struct fs_tok_stream){.drop_space = drop}, ids_, FS_ARRAY_LEN(ids_), steps);     \
	} while (0)

static void stream_steps(void **state)
{
	struct tok_spec s = {.pre = "qwen2",
	        .tokens = {"<|im_end|>",
	                "\xc4\xa0"
	                "a",
	                "\n\n"},
	        .types = {3, 1, 4}};
	struct fs_tok *t = tm_tokenizer(&s);

	STREAM(t, false, "|||\xf0\x9f\x98\x80|a|", 0xf0, 0x9f, 0x98, 0x80, 'a');
	/* A character that is broken off by another one, by the end, and stray bytes. */
	STREAM(t, false,
	        "||\xef\xbf\xbd"
	        "a|",
	        0xe2, 0x82, 'a');
	STREAM(t, false, "||\xef\xbf\xbd", 0xe2, 0x82);
	STREAM(t, false, "\xef\xbf\xbd|\xef\xbf\xbd|", 0x80, 0xff);
	STREAM(t, false, "|\xef\xbf\xbd|\xc3\xa9|", 0xe2, 0xc3, 0xa9);
	/* Control tokens and ids out of range put out nothing and break nothing. */
	STREAM(t, false, "||||\xc3\xa9|", 0xc3, B, -1, 1 << 30, 0xa9);
	STREAM(t, false, " a|\n\n|", B + 1, B + 2);
	STREAM(t, true, "|a| a|", B, B + 1, B + 1);
	STREAM(t, true, "b| a|", 'b', B + 1);
	fs_tok_destroy(t);
}

/* ---- limits ---- */

static void too_long(void **state)
{
	struct tok_spec s = {.pre = "gpt-2", .tokens = {"aa"}, .merges = {"a a"}};
	struct fs_tok *t = tm_tokenizer(&s);
	struct fs_ids ids;
	struct fs_errbuf e;
	size_t n = 1000;
	char *text = malloc(n);

	assert_non_null(text);
	memset(text, 'b', n);
	fs_ids_init(&ids, 100);
	assert_int_equal(fs_tok_encode(t, "aaaa", 4, false, &ids, &e), FS_OK);
	assert_int_equal(fs_tok_encode(t, text, n, false, &ids, &e), FS_ELIMIT);
	assert_non_null(strstr(e.text, "1000 bytes do not fit in 98 tokens"));
	assert_int_equal(ids.len, 2);
	assert_int_equal(fs_tok_encode(t, text, 98, false, &ids, &e), FS_OK);
	assert_int_equal(ids.len, 100);
	fs_ids_finish(&ids);
	free(text);
	fs_tok_destroy(t);
}

/* One letter a million times: with a quadratic merge this would take hours, and the test's time limit is
 * minutes. */
static void long_run(void **state)
{
	struct tok_spec s = {.pre = "qwen2",
	        .tokens = {"aa", "aaaa", "aaaaaaaa"},
	        .merges = {"a a", "aa aa", "aaaa aaaa"}};
	struct fs_tok *t = tm_tokenizer(&s);
	size_t n = 1 << 20, i;
	char *text = malloc(n);
	struct fs_ids ids;

	assert_non_null(text);
	memset(text, 'a', n);
	fs_ids_init(&ids, n);
	assert_int_equal(fs_tok_encode(t, text, n - 1, false, &ids, NULL), FS_OK);
	assert_int_equal(ids.len, n / 8 - 1 + 3); /* 7 left over: 4 + 2 + 1 */
	for (i = 0; i < n / 8 - 1; i++)
		assert_int_equal(ids.data[i], B + 2);
	assert_int_equal(ids.data[n / 8 - 1], B + 1);
	assert_int_equal(ids.data[n / 8], B);
	assert_int_equal(ids.data[n / 8 + 1], 'a');
	fs_ids_finish(&ids);
	fs_tok_destroy(t);
	free(text);
}

/* Gives up on the way: the token fires by its deadline, long before the text's end and after its beginning.
 */
static void expect_cancelled(struct fs_tok *t, const char *unit)
{
	size_t n = (size_t)4 << 20, len = strlen(unit);
	char *text = malloc(n);
	struct fs_errbuf e;
	struct fs_ids ids;

	assert_non_null(text);
	for (size_t i = 0; i < n; i++)
		text[i] = unit[i % len];
	fs_ids_init(&ids, SIZE_MAX);
	assert_int_equal(fs_tok_encode(t, "ab", 2, false, &ids, NULL), FS_OK);
	size_t before = ids.len;
	ids.cancel = fs_cancel_create(fs_deadline_ms(20));
	assert_int_equal(fs_tok_encode(t, text, n, false, &ids, &e), FS_ECANCELLED);
	assert_int_equal(ids.len, before);
	fs_cancel_unref(ids.cancel);
	ids.cancel = NULL;
	assert_int_equal(fs_tok_encode(t, text, 1000, false, &ids, &e), FS_OK);
	fs_ids_finish(&ids);
	free(text);
}

static void gives_up_when_cancelled(void **state)
{
	struct tok_spec bpe = {.pre = "qwen2",
	        .tokens = {"aa", "aaaa", "aaaaaaaa"},
	        .merges = {"a a", "aa aa", "aaaa aaaa"}};
	struct tok_spec s = spm_spec;
	struct fs_tok *t = tm_tokenizer(&bpe);

	expect_cancelled(t, "a");  /* one piece */
	expect_cancelled(t, " b"); /* many */
	fs_tok_destroy(t);
	t = tm_tokenizer(&s);
	expect_cancelled(t, "ab");
	expect_cancelled(t, " ");
	fs_tok_destroy(t);
}

/* ---- broken files ---- */

static void expect_refused(struct gguf_make *m, int err, const char *text)
{
	struct fs_gguf *g = tm_open(m);
	struct fs_tok *t = NULL;
	struct fs_errbuf e;

	assert_int_equal(fs_tok_create(g, &t, &e), err);
	if (strstr(e.text, text) == NULL)
		fail_msg("\"%s\" does not say \"%s\"", e.text, text);
	assert_null(t);
	fs_gguf_close(g);
	gm_finish(m);
}

static void begin(struct gguf_make *m, const char *model, const char *pre)
{
	gm_init(m);
	gm_str(m, "general.architecture", "llama");
	gm_str(m, "tokenizer.ggml.model", model);
	if (pre != NULL)
		gm_str(m, "tokenizer.ggml.pre", pre);
}

static void broken_files(void **state)
{
	static const char *const twice[] = {"a", "b", "a"}, *const two[] = {"a", "b"},
	                         *const bad_merge[] = {"a b", "ab"};
	static const float scores[] = {0, 0, 0};
	static const int32_t types[] = {1, 1, 1};
	struct gguf_make m;

	gm_init(&m);
	gm_str(&m, "general.architecture", "llama");
	expect_refused(&m, FS_ENOTFOUND, "tokenizer.ggml.model");
	begin(&m, "t5", NULL);
	expect_refused(&m, FS_ENOTSUP, "known are gpt2 and llama");
	begin(&m, "gpt2", NULL); /* no name of a pre-tokenizer: "default" */
	gm_arr_str(&m, "tokenizer.ggml.tokens", two, 2);
	expect_refused(&m, FS_ENOTSUP, "\"default\"");
	begin(&m, "gpt2", "qwen2");
	gm_arr_str(&m, "tokenizer.ggml.tokens", twice, 3);
	expect_refused(&m, FS_EFORMAT, "tokens 0 and 2 are the same");
	begin(&m, "gpt2", "qwen2");
	gm_arr_str(&m, "tokenizer.ggml.tokens", two, 0);
	expect_refused(&m, FS_EFORMAT, "0 tokens");
	begin(&m, "gpt2", "qwen2");
	gm_arr_str(&m, "tokenizer.ggml.tokens", two, 2);
	expect_refused(&m, FS_ENOTFOUND, "tokenizer.ggml.merges");
	begin(&m, "gpt2", "qwen2");
	gm_arr_str(&m, "tokenizer.ggml.tokens", two, 2);
	gm_arr_str(&m, "tokenizer.ggml.merges", bad_merge, 2);
	expect_refused(&m, FS_EFORMAT, "entry 1 is no pair");
	begin(&m, "gpt2", "qwen2");
	gm_arr_str(&m, "tokenizer.ggml.tokens", two, 2);
	gm_arr(&m, "tokenizer.ggml.token_type", 5, types, 3, 4);
	expect_refused(&m, FS_EFORMAT, "3 entries for 2 tokens");
	begin(&m, "llama", NULL);
	gm_arr_str(&m, "tokenizer.ggml.tokens", two, 2);
	gm_arr(&m, "tokenizer.ggml.scores", 6, scores, 3, 4);
	expect_refused(&m, FS_EFORMAT, "3 entries for 2 tokens");
}

/* Ids outside the vocabulary count as absent; an empty token gets a name; a byte without a token is left out.
 */
static void odd_files(void **state)
{
	static const char *const tokens[] = {"a", "", "b"}, *const merges_[] = {"a b"};
	struct fs_tok *t = NULL;
	struct gguf_make m;
	struct fs_gguf *g;
	size_t len;

	begin(&m, "gpt2", "gpt-2");
	gm_arr_str(&m, "tokenizer.ggml.tokens", tokens, 3);
	gm_arr_str(&m, "tokenizer.ggml.merges", merges_, 1);
	gm_u32(&m, "tokenizer.ggml.bos_token_id", 3);
	gm_u32(&m, "tokenizer.ggml.eos_token_id", UINT32_MAX);
	gm_i32(&m, "tokenizer.ggml.eot_token_id", -1);
	g = tm_open(&m);
	assert_int_equal(fs_tok_create(g, &t, NULL), FS_OK);
	fs_gguf_close(g);
	gm_finish(&m);
	assert_int_equal(fs_tok_info(t)->bos, -1);
	assert_int_equal(fs_tok_info(t)->eos, -1);
	assert_int_equal(fs_tok_info(t)->eot, -1);
	assert_string_equal(fs_tok_text(t, 1, &len), "[EMPTY_1]");
	assert_null(fs_tok_text(t, 3, &len));
	EXPECT(t, "abxb", false, 0, 2, 2);
	fs_tok_destroy(t);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
	        cmocka_unit_test(pieces),
	        cmocka_unit_test(unknown_pre),
	        cmocka_unit_test(unicode_classes),
	        cmocka_unit_test(bad_utf8),
	        cmocka_unit_test(merges),
	        cmocka_unit_test(merges_without_token),
	        cmocka_unit_test(whole_pieces),
	        cmocka_unit_test(odd_bytes),
	        cmocka_unit_test(special_tokens),
	        cmocka_unit_test(seams),
	        cmocka_unit_test(end_of_generation),
	        cmocka_unit_test(spm),
	        cmocka_unit_test(stream_steps),
	        cmocka_unit_test(too_long),
	        cmocka_unit_test(long_run),
	        cmocka_unit_test(gives_up_when_cancelled),
	        cmocka_unit_test(broken_files),
	        cmocka_unit_test(odd_files),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
