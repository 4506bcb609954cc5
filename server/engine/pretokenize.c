/* pretokenize: see pretokenize.h. Each take_* returns the length of its match at s, 0 when there is none. */
#include "server/engine/pretokenize.h"

#include <string.h>

#include "server/engine/unicode.h"
#include "server/engine/utf8.h"

#define LONG_S 0x17f /* folds to 's', so (?i:'s) takes it */

static const struct {
	const char *name;
	const char *canonical;
	enum fs_pre_kind kind;
} pre_names[] = {
        {"gpt-2", "gpt-2", FS_PRE_GPT2},
        {"phi-2", "gpt-2", FS_PRE_GPT2},
        {"llama-bpe", "llama-bpe", FS_PRE_LLAMA3},
        {"llama3", "llama-bpe", FS_PRE_LLAMA3},
        {"llama-v3", "llama-bpe", FS_PRE_LLAMA3},
        {"falcon3", "llama-bpe", FS_PRE_LLAMA3},
        {"pixtral", "llama-bpe", FS_PRE_LLAMA3},
        {"qwen2", "qwen2", FS_PRE_QWEN2},
        {"deepseek-r1-qwen", "qwen2", FS_PRE_QWEN2},
        {"megrez", "qwen2", FS_PRE_QWEN2},
        {"smollm", "smollm", FS_PRE_SMOLLM},
        {"starcoder", "smollm", FS_PRE_SMOLLM},
        {"refact", "smollm", FS_PRE_SMOLLM},
        {"command-r", "smollm", FS_PRE_SMOLLM},
};

int fs_pre_find(
        const char *name, size_t len, enum fs_pre_kind *out, const char **canonical, struct fs_errbuf *e)
{
	size_t i;

	for (i = 0; i < FS_ARRAY_LEN(pre_names); i++)
		if (strlen(pre_names[i].name) == len && memcmp(pre_names[i].name, name, len) == 0) {
			*out = pre_names[i].kind;
			*canonical = pre_names[i].canonical;
			return FS_OK;
		}
	return fs_fail(e, FS_ENOTSUP,
	        "tokenizer.ggml.pre: unknown pre-tokenizer \"%.*s\"; known are qwen2, llama-bpe, gpt-2 and "
	        "smollm",
	        (int)FS_MIN(len, (size_t)64), name);
}

struct ch {
	uint32_t cp;
	unsigned cls;
	size_t len; /* 0 at the end of the text */
};

static struct ch peek(const uint8_t *s, size_t n)
{
	struct ch c = {0, 0, 0};

	if (n > 0) {
		c.len = fs_utf8_get(s, n, &c.cp);
		c.cls = fs_uclass(c.cp);
	}
	return c;
}

/* Longest run of characters that have any of the wanted flags (want != 0), or none of letter, number, space
 * (want == 0). */
static size_t run(const uint8_t *s, size_t n, unsigned want)
{
	size_t i = 0;

	while (i < n) {
		struct ch c = peek(s + i, n - i);

		if (want != 0 ? (c.cls & want) == 0 : c.cls != 0)
			break;
		i += c.len;
	}
	return i;
}

static bool is_crlf(uint32_t cp)
{
	return cp == '\r' || cp == '\n';
}

/* 's 't 're 've 'm 'll 'd */
static size_t take_contraction(const uint8_t *s, size_t n, bool fold)
{
	static const char two[][2] = {{'r', 'e'}, {'v', 'e'}, {'l', 'l'}};
	struct ch a;
	uint8_t x, y;
	size_t i;

	if (n < 2 || s[0] != '\'')
		return 0;
	a = peek(s + 1, n - 1);
	if (fold && a.cp == LONG_S)
		return 1 + a.len;
	x = fold && a.cls == FS_UC_LETTER ? s[1] | 0x20 : s[1];
	if (x == 's' || x == 't' || x == 'm' || x == 'd')
		return 2;
	if (n < 3)
		return 0;
	y = fold && s[2] >= 'A' && s[2] <= 'Z' ? s[2] | 0x20 : s[2];
	for (i = 0; i < FS_ARRAY_LEN(two); i++)
		if (x == (uint8_t)two[i][0] && y == (uint8_t)two[i][1])
			return 3;
	return 0;
}

/* \s+(?!\S)|\s+ : a run gives its last character away when something follows it, unless it is the only one.
 */
static size_t take_spaces(const uint8_t *s, size_t n, size_t end_of_text)
{
	size_t i = 0, last = 0;

	while (i < n) {
		struct ch c = peek(s + i, n - i);

		if ((c.cls & FS_UC_SPACE) == 0)
			break;
		last = i;
		i += c.len;
	}
	return i == end_of_text || last == 0 ? i : last;
}

/* \s*[\r\n]+ : up to the last CR or LF of the run. */
static size_t take_lines(const uint8_t *s, size_t n)
{
	size_t i = 0, end = 0;

	while (i < n) {
		struct ch c = peek(s + i, n - i);

		if ((c.cls & FS_UC_SPACE) == 0)
			break;
		i += c.len;
		if (is_crlf(c.cp))
			end = i;
	}
	return end;
}

/* digits_apart: a number ends the text, as the first pass of smollm cuts there. */
static size_t next_gpt2(const uint8_t *s, size_t n, bool digits_apart)
{
	size_t sp, m, end = n;
	struct ch c;

	if ((m = take_contraction(s, n, false)) > 0)
		return m;
	sp = s[0] == ' ' ? 1 : 0;
	c = peek(s + sp, n - sp);
	if (c.len > 0 && (c.cls & FS_UC_LETTER) != 0)
		return sp + run(s + sp, n - sp, FS_UC_LETTER);
	if (c.len > 0 && (c.cls & FS_UC_NUMBER) != 0 && !digits_apart)
		return sp + run(s + sp, n - sp, FS_UC_NUMBER);
	if (c.len > 0 && c.cls == 0)
		return sp + run(s + sp, n - sp, 0);
	if (digits_apart) {
		m = run(s, n, FS_UC_SPACE);
		if (m < n && (peek(s + m, n - m).cls & FS_UC_NUMBER) != 0)
			end = m;
	}
	return take_spaces(s, n, end);
}

static size_t next_smollm(const uint8_t *s, size_t n)
{
	struct ch c = peek(s, n);

	return (c.cls & FS_UC_NUMBER) != 0 ? c.len : next_gpt2(s, n, true);
}

static size_t take_number(const uint8_t *s, size_t n, int most)
{
	size_t i = 0;

	while (most-- > 0 && i < n) {
		struct ch c = peek(s + i, n - i);

		if ((c.cls & FS_UC_NUMBER) == 0)
			break;
		i += c.len;
	}
	return i;
}

/* [^\r\n\p{L}\p{N}]?\p{L}+ */
static size_t take_word(const uint8_t *s, size_t n)
{
	struct ch c = peek(s, n);
	size_t skip = 0, m;

	if ((c.cls & (FS_UC_LETTER | FS_UC_NUMBER)) == 0 && !is_crlf(c.cp))
		skip = c.len;
	m = run(s + skip, n - skip, FS_UC_LETTER);
	return m > 0 ? skip + m : 0;
}

/*  ?[^\s\p{L}\p{N}]+[\r\n]* */
static size_t take_other(const uint8_t *s, size_t n)
{
	size_t sp = s[0] == ' ' ? 1 : 0;
	size_t m = run(s + sp, n - sp, 0);

	if (m == 0)
		return 0;
	m += sp;
	while (m < n && is_crlf(s[m]))
		m++;
	return m;
}

static size_t next_llama3(const uint8_t *s, size_t n, int digits)
{
	size_t m;

	if ((m = take_contraction(s, n, true)) > 0 || (m = take_word(s, n)) > 0 ||
	        (m = take_number(s, n, digits)) > 0 || (m = take_other(s, n)) > 0 ||
	        (m = take_lines(s, n)) > 0)
		return m;
	return take_spaces(s, n, n);
}

size_t fs_pre_next(enum fs_pre_kind kind, const uint8_t *s, size_t n)
{
	switch (kind) {
	case FS_PRE_GPT2:
		return next_gpt2(s, n, false);
	case FS_PRE_LLAMA3:
		return next_llama3(s, n, 3);
	case FS_PRE_QWEN2:
		return next_llama3(s, n, 1);
	case FS_PRE_SMOLLM:
		return next_smollm(s, n);
	}
	FS_ASSERT(false);
}
