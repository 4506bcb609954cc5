/*
 * pretokenize: cuts a text into the pieces inside which byte-level BPE merges, as the published regexes do,
 * by hand-written matchers. No allocation, linear in the text, any thread. Internal to server/engine. It
 * refuses names that it does not know.
 */
#ifndef FS_ENGINE_PRETOKENIZE_H
#define FS_ENGINE_PRETOKENIZE_H

#include "common/base/base.h"

/*
 * The published regexes, tried in order at each place; what none takes is a piece of its own. T is the tail
 * that two of them share, and folding is Unicode's, so that (?i:'s) takes U+017F too:
 *   [^\r\n\p{L}\p{N}]?\p{L}+ | <digits> |  ?[^\s\p{L}\p{N}]+[\r\n]* | \s*[\r\n]+ | \s+(?!\S) | \s+
 */
enum fs_pre_kind {
	FS_PRE_GPT2,   /* 's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+ */
	FS_PRE_LLAMA3, /* (?i:'s|'t|'re|'ve|'m|'ll|'d) | T with \p{N}{1,3} */
	FS_PRE_QWEN2,  /* (?i:'s|'t|'re|'ve|'m|'ll|'d) | T with \p{N} */
	FS_PRE_SMOLLM, /* every \p{N} alone, then GPT2 on each text between them */
};

/* A name of tokenizer.ggml.pre. FS_ENOTSUP lists the known ones. */
int fs_pre_find(
        const char *name, size_t len, enum fs_pre_kind *out, const char **canonical, struct fs_errbuf *e);

/* The length in bytes (1..n) of the piece that starts at s; n >= 1, valid UTF-8. What follows matters,
 * what went before does not. */
size_t fs_pre_next(enum fs_pre_kind kind, const uint8_t *s, size_t n);

#endif
