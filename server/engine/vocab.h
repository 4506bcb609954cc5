/*
 * vocab: what a tokenizer holds, shared by the files that implement it (vocab.c loads it, special.c finds
 * special tokens, bpe.c and spm.c encode plain text). Immutable after loading. Internal to the tokenizer.
 */
#ifndef FS_ENGINE_VOCAB_H
#define FS_ENGINE_VOCAB_H

#include "server/engine/hash.h"
#include "server/engine/merge.h"
#include "server/engine/pretokenize.h"
#include "server/engine/tokenizer.h"

/* Values of tokenizer.ggml.token_type. */
enum fs_tok_type { FS_TT_NORMAL = 1, FS_TT_UNKNOWN, FS_TT_CONTROL, FS_TT_USER, FS_TT_UNUSED, FS_TT_BYTE };

#define FS_ALPHABET 324 /* GPT-2's byte alphabet lies in U+0021..U+0143 */

struct fs_tok {
	struct fs_tok_info info;
	struct fs_strtab
	        strs;   /* number < n_vocab: the token's text; above: strings of merges that are no token */
	uint8_t *types; /* [n_vocab] */
	bool *eog;      /* [n_vocab] */
	size_t longest; /* bytes of text that one token can stand for, at most */
	bool all_bytes; /* every byte has a token: no text is lost, so n bytes make at least n / longest
	                   tokens */

	uint32_t *specials; /* ids of control, unknown and user-defined tokens, sorted by their bytes */
	size_t n_specials;
	uint32_t special_first[257]; /* those that begin with byte b are specials[first[b] .. first[b+1]) */

	bool spm;
	float *scores;          /* SPM: [n_vocab] */
	uint32_t byte_sym[256]; /* BPE: string number of the byte's letter; SPM: id of <0xXX>; FS_SYM_NONE =
	                           none */

	enum fs_pre_kind pre;
	bool ignore_merges;
	struct fs_map64 merges; /* left << 32 | right -> rank << 32 | result, string numbers */
	uint16_t letter[256];   /* byte -> code point of the byte alphabet */
	int16_t byte_of[FS_ALPHABET];
};

struct fs_tok_scratch {
	struct fs_merge merge;
	struct fs_buf tmp;
};

/* Text that has no control meaning may become only these. */
static inline bool fs_tok_is_textual(const struct fs_tok *t, uint32_t id)
{
	return id < (uint32_t)t->info.n_vocab && (t->types[id] == FS_TT_NORMAL || t->types[id] == FS_TT_USER);
}

/* special.c */
int fs_special_index(struct fs_tok *t);
/* The longest special token at s; control tokens only when they fit in the first `trusted` bytes. FS_SYM_NONE
 * when there is none. */
uint32_t fs_special_match(const struct fs_tok *t, const uint8_t *s, size_t n, size_t trusted, size_t *len);

/* bpe.c: after the tokens are loaded. */
int fs_bpe_load(struct fs_tok *t, const struct fs_gguf *g, struct fs_errbuf *e);
int fs_bpe_encode(
        const struct fs_tok *t, struct fs_tok_scratch *x, const uint8_t *s, size_t n, struct fs_ids *out);
int fs_bpe_bytes(const struct fs_tok *t, const char *text, size_t len, struct fs_buf *out);

/* spm.c */
int fs_spm_load(struct fs_tok *t, const struct fs_gguf *g, struct fs_errbuf *e);
/* prefix: put a space in front. */
int fs_spm_encode(const struct fs_tok *t, struct fs_tok_scratch *x, const uint8_t *s, size_t n, bool prefix,
        struct fs_ids *out);
int fs_spm_bytes(const char *text, size_t len, struct fs_buf *out);
/* The value of "<0xXX>", -1 for any other text. */
int fs_spm_byte_value(const char *text, size_t len);

#endif
