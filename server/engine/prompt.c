/*
 * prompt: builds the cells of a prompt and their positions. Pure; any thread. It refuses what the model can
 * not place.
 */
#include "server/engine/prompt.h"

#include <stdlib.h>
#include <string.h>

static int check_rows(const struct fs_hparams *hp, const struct fs_rows *r, size_t i, struct fs_errbuf *e)
{
	if (r->shape.n_embd != hp->n_embd)
		return fs_fail(e, FS_EINVAL,
		        "picture %zu has rows of %d, the model's are %d: the image encoder belongs to "
		        "another model",
		        i + 1, r->shape.n_embd, hp->n_embd);
	return FS_OK;
}

/* Counts cells and pictures and checks every id. */
static int measure(const struct fs_hparams *hp, const int32_t *ids, size_t n, struct fs_rows *const *rows,
        size_t n_pictures, int64_t *cells, struct fs_errbuf *e)
{
	size_t seen = 0;

	*cells = 0;
	for (size_t i = 0; i < n; i++) {
		if (ids[i] >= 0) {
			if (ids[i] >= hp->n_vocab)
				return fs_fail(e, FS_EINVAL, "token id %d is outside of the vocabulary of %d",
				        ids[i], hp->n_vocab);
			*cells += 1;
			continue;
		}
		if (ids[i] != -1 || n_pictures == 0)
			return fs_fail(e, FS_EINVAL, "token id %d is outside of the vocabulary of %d", ids[i],
			        hp->n_vocab);
		if (seen == n_pictures)
			return fs_fail(
			        e, FS_EINVAL, "the prompt has a place for a picture that is not there");
		if (!hp->mrope)
			return fs_fail(e, FS_EINVAL, "this model (%s) can not take pictures", hp->arch_name);
		if (check_rows(hp, rows[seen], seen, e) != FS_OK)
			return FS_EINVAL;
		*cells += rows[seen++]->shape.n_tokens;
	}
	if (seen != n_pictures)
		return fs_fail(e, FS_EINVAL, "%zu pictures for %zu places in the prompt", n_pictures, seen);
	if (*cells < 1)
		return fs_fail(e, FS_EINVAL, "the prompt is empty");
	if (*cells > FS_PROMPT_MAX_CELLS)
		return fs_fail(e, FS_EINVAL, "the prompt has %lld tokens; at most %d are taken",
		        (long long)*cells, FS_PROMPT_MAX_CELLS);
	return FS_OK;
}

static struct fs_prompt *alloc_prompt(int64_t cells, size_t n_rows)
{
	struct fs_prompt *p = calloc(1, sizeof(*p));

	if (p == NULL)
		return NULL;
	p->ids = calloc((size_t)cells, sizeof(*p->ids));
	p->pos = calloc((size_t)cells, sizeof(*p->pos));
	p->pics = calloc(FS_MAX(n_rows, 1), sizeof(*p->pics));
	if (p->ids == NULL || p->pos == NULL || p->pics == NULL) {
		fs_prompt_destroy(p);
		return NULL;
	}
	return p;
}

static void put_token(struct fs_prompt *p, int32_t id)
{
	p->ids[p->n] = id;
	for (int a = 0; a < 3; a++)
		p->pos[p->n][a] = p->next_pos;
	p->n++;
	p->next_pos++;
}

static void put_picture(struct fs_prompt *p, struct fs_rows *r)
{
	const struct fs_rows_shape *s = &r->shape;

	p->pics[p->n_pics].first = p->n;
	p->pics[p->n_pics].rows = fs_rows_ref(r);
	for (int32_t i = 0; i < s->n_tokens; i++, p->n++) {
		p->ids[p->n] = -1 - p->n_pics;
		p->pos[p->n][0] = p->next_pos;
		p->pos[p->n][1] = p->next_pos + i / s->nx;
		p->pos[p->n][2] = p->next_pos + i % s->nx;
	}
	p->n_pics++;
	p->next_pos += FS_MAX(s->nx, s->ny);
}

int fs_prompt_build(const struct fs_hparams *hp, const int32_t *ids, size_t n, struct fs_rows *const *rows,
        size_t n_rows, struct fs_prompt **out, struct fs_errbuf *e)
{
	struct fs_prompt *p;
	int64_t cells;
	int err = measure(hp, ids, n, rows, n_rows, &cells, e);

	if (err != FS_OK)
		return err;
	p = alloc_prompt(cells, n_rows);
	if (p == NULL)
		return fs_fail(e, FS_ENOMEM, "no memory for a prompt of %lld tokens", (long long)cells);
	for (size_t i = 0; i < n; i++) {
		if (ids[i] >= 0)
			put_token(p, ids[i]);
		else
			put_picture(p, rows[p->n_pics]);
	}
	FS_ASSERT(p->n == cells);
	*out = p;
	return FS_OK;
}

void fs_prompt_destroy(struct fs_prompt *p)
{
	if (p == NULL)
		return;
	for (int32_t i = 0; i < p->n_pics; i++)
		fs_rows_unref(p->pics[i].rows);
	free(p->opening);
	free(p->pics);
	free(p->pos);
	free(p->ids);
	free(p);
}

const char *fs_prompt_opening(const struct fs_prompt *p)
{
	return p->opening != NULL ? p->opening : "";
}

int32_t fs_prompt_cells(const struct fs_prompt *p)
{
	return p->n;
}
