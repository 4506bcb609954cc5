/*
 * prompt: what the model is fed: one cell a token or a picture's row, with its positions. Internal to the
 * engine and its tests. Immutable once made; any thread. Knows nothing of the device.
 */
#ifndef FS_ENGINE_PROMPT_H
#define FS_ENGINE_PROMPT_H

#include "server/engine/engine.h"
#include "server/engine/model.h"

#define FS_PROMPT_MAX_CELLS (1 << 22)

struct fs_prompt_pic {
	int32_t first;        /* its first cell; shape.n_tokens cells follow each other */
	struct fs_rows *rows; /* one reference */
};
struct fs_prompt {
	int32_t n;         /* cells */
	int32_t *ids;      /* [n]; -1 - i: a row of pics[i] */
	int32_t (*pos)[3]; /* [n] planes t, h, w; all the same for tokens */
	struct fs_prompt_pic *pics;
	int32_t n_pics;
	int32_t next_pos; /* of the token after the prompt */
	char *opening;    /* fs_prompt_opening; NULL = "" */
	bool answer;      /* an assistant's turn was opened: SPM's leading space is no part of the text */
};

/*
 * ids with -1 for each of the rows, in order. M-RoPE (hp->mrope): tokens count on by one; a picture at p0 has
 * t = p0, h = p0 + y, w = p0 + x, and the next token is p0 + max(nx, ny). FS_EINVAL: ids out of the
 * vocabulary, no or too few or too many rows, rows of another width, rows for a model that has no place for
 * them.
 */
int fs_prompt_build(const struct fs_hparams *hp, const int32_t *ids, size_t n, struct fs_rows *const *rows,
        size_t n_rows, struct fs_prompt **out, struct fs_errbuf *e);
/* The picture's row that cell i is (ids[i] < 0). */
static inline const float *fs_prompt_row(const struct fs_prompt *p, int32_t i)
{
	const struct fs_prompt_pic *pic = &p->pics[-1 - p->ids[i]];
	return pic->rows->data + (size_t)(i - pic->first) * (size_t)pic->rows->shape.n_embd;
}

#endif
