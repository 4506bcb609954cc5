/*
 * tokenizer: text to token ids and back, from the tokenizer.ggml.* keys of a GGUF: byte-level BPE ("gpt2"
 * with the pre-tokenizers qwen2, llama-bpe, gpt-2, smollm) and SentencePiece BPE ("llama"). Internal to
 * server/engine and its tests.
 *
 * Threads: a tokenizer is immutable once made, any thread may use it; id arrays and stream states belong to
 * one thread at a time. It copies what it needs, the GGUF may be closed afterwards.
 *
 * Text from outside: invalid UTF-8 becomes U+FFFD (one for each maximal subpart, as the Unicode standard
 * recommends); nothing else is normalised (the published Qwen2 tokenizer composes to NFC, but a GGUF does not
 * say so and other GGUF programs do not).
 *
 * Special tokens: control tokens are recognised only where the caller says so. Tokens of type "user-defined"
 * are plain text that always is one token (runs of line ends in Gemma, say): they match everywhere, as in
 * llama.cpp; but those that look like control tokens (<|...|>) or are marks of chat templates count as
 * control tokens, so that a message can not open a turn. Where two overlap in a text the leftmost, then the
 * longest is taken, as in the publishers' tokenizers (llama.cpp: the longest of all first).
 */
#ifndef FS_ENGINE_TOKENIZER_H
#define FS_ENGINE_TOKENIZER_H

#include "common/gguf/gguf.h"

/* A growing array of ids with a maximum. data is NULL while cap is 0. */
struct fs_ids {
	int32_t *data;
	size_t len, cap;
	size_t max;               /* len never exceeds it */
	struct fs_cancel *cancel; /* borrowed; when it fires, encoding into it gives up; NULL = none */
};
void fs_ids_init(struct fs_ids *a, size_t max);
void fs_ids_finish(struct fs_ids *a);
/* FS_ELIMIT when max would be passed, FS_ENOMEM; the array is then unchanged. */
int fs_ids_append(struct fs_ids *a, int32_t id);

struct fs_tok;

struct fs_tok_info {
	int32_t n_vocab;
	int32_t bos, eos, eot, unk; /* -1 when the model has none */
	bool add_bos, add_eos;
	bool add_space_prefix; /* SPM: a space goes in front of the text */
	const char *model;     /* "gpt2" | "llama" */
	const char *pre;       /* name of the pre-tokenizer; "" for SPM */
};

/* Errors (FS_EFORMAT, FS_ENOTSUP, FS_ENOMEM) name the key that is wrong; an unknown pre-tokenizer is
 * FS_ENOTSUP and lists the known ones. */
int fs_tok_create(const struct fs_gguf *g, struct fs_tok **out, struct fs_errbuf *e);
void fs_tok_destroy(struct fs_tok *t); /* NULL is fine */
const struct fs_tok_info *fs_tok_info(const struct fs_tok *t);

/* End of generation: eos, eot, eom, the fim_pad/rep/sep tokens and the well-known turn ends by their text.
 * false for ids out of range. */
bool fs_tok_is_eog(const struct fs_tok *t, int32_t id);
/* Control and unknown tokens: they put out no text. */
bool fs_tok_is_control(const struct fs_tok *t, int32_t id);
/* The token whose stored text is exactly this, -1 when there is none. For byte-level BPE the stored text of
 * normal tokens is in its byte alphabet. */
int32_t fs_tok_find(const struct fs_tok *t, const char *text, size_t len);
/* The stored text of a token (owned by t, NUL-terminated), NULL when out of range. */
const char *fs_tok_text(const struct fs_tok *t, int32_t id, size_t *len);

/* ---- encoding: appends to out. On failure (FS_ELIMIT: out's maximum; FS_ECANCELLED: out's token; FS_ENOMEM)
 * out keeps its former length. ---- */

/* One text. parse_special: control tokens written in it are taken as such. Adds neither BOS nor EOS. */
int fs_tok_encode(const struct fs_tok *t, const char *text, size_t len, bool parse_special,
        struct fs_ids *out, struct fs_errbuf *e);

/* A piece of a text that is put together from trusted and untrusted pieces. */
struct fs_tok_span {
	const char *text;
	size_t len;
	bool special; /* control tokens may be recognised here */
};
/*
 * The spans are one text: merges run across their borders, as they do when a template is rendered to a
 * string. A control token counts only when all of its bytes lie in adjacent spans marked special; so a
 * control token never comes out of unmarked text, nor out of its seam with marked text.
 */
int fs_tok_encode_spans(const struct fs_tok *t, const struct fs_tok_span *spans, size_t n, struct fs_ids *out,
        struct fs_errbuf *e);

/* ---- decoding ---- */

/* Appends the bytes of one token (maybe a part of a character); nothing for control (but for the marks
 * of calls, <tool_call> and </tool_call>), unknown and unused tokens or ids out of range. */
int fs_tok_bytes(const struct fs_tok *t, int32_t id, struct fs_buf *out);

/* Token ids to whole UTF-8 characters: holds back at most 3 bytes of an unfinished one. Zero-initialise. */
struct fs_tok_stream {
	uint8_t held[4];
	uint8_t n_held;
	bool drop_space; /* set by the caller: drop one space in front of the first text (SPM puts it there)
	                  */
};
/* Appends the characters that are complete now; bytes that can not become a character come out as U+FFFD. */
int fs_tok_stream_push(const struct fs_tok *t, struct fs_tok_stream *s, int32_t id, struct fs_buf *out);
/* The end: an unfinished character comes out as U+FFFD. */
int fs_tok_stream_flush(struct fs_tok_stream *s, struct fs_buf *out);

#endif
