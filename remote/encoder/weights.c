/*
 * The tower's weights, found by name, checked by shape, put on the device; what they will take of its memory
 * is counted by the same walk. Runs on the device's thread. Knows the two spellings that files have: q, k and
 * v apart or in one tensor, and the feed-forward pair under exchanged names.
 */
#include "remote/encoder/tower.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct loader {
	struct fs_dev *d;
	const struct fs_gguf *g;
	struct fs_errbuf *e;
	uint64_t *count; /* not NULL: nothing is loaded, the bytes are added to it */
};

/* ---- parts ---- */

static int take_weight(const struct loader *l, const struct fs_gguf_tensor *t, struct fs_weight *w)
{
	if (l->count == NULL)
		return fs_weight_load(l->d, t, true, w, l->e);
	*l->count += fs_weight_bytes(l->d, t, true);
	return FS_OK;
}

static int take_vector(const struct loader *l, const struct fs_gguf_tensor *t, float **out)
{
	if (l->count == NULL)
		return fs_vector_load(l->d, t, out, l->e);
	*l->count += fs_vector_bytes(l->d, t);
	return FS_OK;
}

static int load_vector(const struct loader *l, const char *name, int64_t n, float **out)
{
	const struct fs_gguf_tensor *t = NULL;
	int err = fs_gguf_need(l->g, name, n, 1, &t, l->e);

	return err != FS_OK ? err : take_vector(l, t, out);
}

/* "<base>.bias" when the file has one. */
static int load_bias(const struct loader *l, const char *base, int64_t n, float **out)
{
	char name[80];

	snprintf(name, sizeof(name), "%s.bias", base);
	return fs_gguf_has_tensor(l->g, name) ? load_vector(l, name, n, out) : FS_OK;
}

static int load_linear(const struct loader *l, const char *base, int64_t in, int64_t out, struct linear *y)
{
	const struct fs_gguf_tensor *t = NULL;
	char name[80];
	int err;

	snprintf(name, sizeof(name), "%s.weight", base);
	err = fs_gguf_need(l->g, name, in, out, &t, l->e);
	if (err == FS_OK)
		err = take_weight(l, t, &y->w);
	return err != FS_OK ? err : load_bias(l, base, out, &y->b);
}

static int load_norm(const struct loader *l, const char *base, int64_t n, struct norm *y)
{
	char name[80];
	int err;

	snprintf(name, sizeof(name), "%s.weight", base);
	err = load_vector(l, name, n, &y->w);
	return err != FS_OK ? err : load_bias(l, base, n, &y->b);
}

static void linear_finish(struct fs_dev *d, struct linear *y)
{
	fs_weight_finish(d, &y->w);
	fs_dev_free(d, y->b);
	y->b = NULL;
}

static void norm_finish(struct fs_dev *d, struct norm *y)
{
	fs_dev_free(d, y->w);
	fs_dev_free(d, y->b);
	y->w = y->b = NULL;
}

/* ---- patch embedding ---- */

/* Adds a temporal kernel, [n_embd][3][patch][patch], to the sum. */
static int add_kernel(const struct loader *l, const struct vision_hparams *h, const char *name, float *sum)
{
	const struct fs_gguf_tensor *t = NULL;
	int64_t n = (int64_t)h->n_embd * 3 * h->patch * h->patch;
	int err = fs_gguf_need(l->g, name, h->patch, h->patch, &t, l->e);
	float *one;

	if (err != FS_OK)
		return err;
	if (t->ne[2] != 3 || t->ne[3] != h->n_embd || fs_dtype_info((int)t->type)->block_elems != 1)
		return fs_fail(l->e, FS_EFORMAT,
		        "tensor %s has another shape than %d x %d x 3 x %d, or is quantised", name, h->patch,
		        h->patch, h->n_embd);
	one = malloc((size_t)n * sizeof(*one));
	if (one == NULL)
		return fs_fail(l->e, FS_ENOMEM, "no memory for tensor %s", name);
	fs_dequantize_row(t->type, t->data, one, n);
	for (int64_t i = 0; i < n; i++)
		sum[i] += one[i];
	free(one);
	return FS_OK;
}

/* A still picture is both frames of the pair, so the two temporal kernels act as their sum. */
static int load_patch(const struct loader *l, struct tower *t)
{
	const struct vision_hparams *h = &t->h;
	int64_t in = 3 * (int64_t)h->patch * h->patch;
	struct fs_gguf_tensor both = {.name = "v.patch_embd.weight",
	        .type = FS_F32,
	        .n_dims = 2,
	        .ne = {in, h->n_embd, 1, 1},
	        .nbytes = (size_t)in * (size_t)h->n_embd * sizeof(float)};
	int err;

	t->kernel = aligned_alloc(64, (both.nbytes + 63) / 64 * 64);
	if (t->kernel == NULL)
		return fs_fail(l->e, FS_ENOMEM, "no memory for the patch kernel");
	memset(t->kernel, 0, both.nbytes);
	err = add_kernel(l, h, "v.patch_embd.weight", t->kernel);
	if (err == FS_OK)
		err = add_kernel(l, h, "v.patch_embd.weight.1", t->kernel);
	both.data = t->kernel;
	if (err == FS_OK)
		err = take_weight(l, &both, &t->patch.w);
	return err != FS_OK ? err : load_bias(l, "v.patch_embd", h->n_embd, &t->patch.b);
}

/* ---- layers ---- */

/* The i-th third of the fused q, k, v. */
static int load_fused(const struct loader *l, const char *base, int64_t n, int i, struct linear *y)
{
	const struct fs_gguf_tensor *w = NULL, *b;
	struct fs_gguf_tensor part;
	char name[80];
	int err;

	snprintf(name, sizeof(name), "%s.weight", base);
	err = fs_gguf_need(l->g, name, n, 3 * n, &w, l->e);
	if (err != FS_OK)
		return err;
	part = fs_gguf_part(w, 1, i * n, n);
	err = take_weight(l, &part, &y->w);
	snprintf(name, sizeof(name), "%s.bias", base);
	if (err != FS_OK || !fs_gguf_has_tensor(l->g, name))
		return err;
	err = fs_gguf_need(l->g, name, 3 * n, 1, &b, l->e);
	if (err == FS_OK && fs_dtype_info((int)b->type)->block_elems != 1)
		err = fs_fail(l->e, FS_EFORMAT, "tensor %s is quantised", name);
	if (err != FS_OK)
		return err;
	part = fs_gguf_part(b, 0, i * n, n);
	return take_vector(l, &part, &y->b);
}

static int load_qkv(const struct loader *l, int il, int64_t n, struct tower_layer *y)
{
	struct linear *parts[3] = {&y->q, &y->k, &y->v};
	char base[64], name[80];
	int err = FS_OK;

	snprintf(base, sizeof(base), "v.blk.%d.attn_qkv", il);
	snprintf(name, sizeof(name), "%s.weight", base);
	if (fs_gguf_has_tensor(l->g, name)) {
		for (int i = 0; i < 3 && err == FS_OK; i++)
			err = load_fused(l, base, n, i, parts[i]);
		return err;
	}
	for (int i = 0; i < 3 && err == FS_OK; i++) {
		snprintf(base, sizeof(base), "v.blk.%d.attn_%c", il, "qkv"[i]);
		err = load_linear(l, base, n, n, parts[i]);
	}
	return err;
}

/* Old converters called the first layer ffn_down and the second ffn_up; the input width tells. */
static int load_ffn(const struct loader *l, int il, const struct vision_hparams *h, struct tower_layer *y)
{
	char up[64], down[64], name[80];
	const struct fs_gguf_tensor *t;
	bool swapped;
	int err;

	snprintf(up, sizeof(up), "v.blk.%d.ffn_up", il);
	snprintf(down, sizeof(down), "v.blk.%d.ffn_down", il);
	snprintf(name, sizeof(name), "%s.weight", down);
	t = fs_gguf_tensor(l->g, name);
	swapped = t != NULL && t->ne[0] == h->n_embd;
	err = load_linear(l, swapped ? down : up, h->n_embd, h->n_ff, &y->up);
	return err != FS_OK ? err : load_linear(l, swapped ? up : down, h->n_ff, h->n_embd, &y->down);
}

static int load_layer(const struct loader *l, int il, const struct vision_hparams *h, struct tower_layer *y)
{
	char base[64];
	int err;

	snprintf(base, sizeof(base), "v.blk.%d.ln1", il);
	err = load_norm(l, base, h->n_embd, &y->ln1);
	if (err == FS_OK)
		err = load_qkv(l, il, h->n_embd, y);
	snprintf(base, sizeof(base), "v.blk.%d.attn_out", il);
	if (err == FS_OK)
		err = load_linear(l, base, h->n_embd, h->n_embd, &y->out);
	snprintf(base, sizeof(base), "v.blk.%d.ln2", il);
	if (err == FS_OK)
		err = load_norm(l, base, h->n_embd, &y->ln2);
	return err != FS_OK ? err : load_ffn(l, il, h, y);
}

static void layer_finish(struct fs_dev *d, struct tower_layer *y)
{
	struct linear *linears[] = {&y->q, &y->k, &y->v, &y->out, &y->up, &y->down};

	norm_finish(d, &y->ln1);
	norm_finish(d, &y->ln2);
	for (size_t i = 0; i < FS_ARRAY_LEN(linears); i++)
		linear_finish(d, linears[i]);
}

/* ---- all ---- */

/* Pairs (p, p + head_dim/2): the first half of them turns by the patch's y, the second by its x, each with
 * the whole series of frequencies. */
static void fill_rope(struct fs_rope *r, int head_dim)
{
	int half = head_dim / 4;

	*r = (struct fs_rope){.n_pairs = 2 * half, .interleaved = false, .n_axes = 2};
	for (int p = 0; p < r->n_pairs; p++) {
		r->axis[p] = p >= half;
		r->freq[p] = (float)pow(10000.0, -2.0 * (p % half) / (2.0 * half));
	}
}

static int load_all(const struct loader *l, struct tower *t)
{
	const struct vision_hparams *h = &t->h;
	int64_t wide = (int64_t)h->merge * h->merge * h->n_embd;
	int err = load_patch(l, t);

	if (err != FS_OK)
		return err;
	t->layers = calloc((size_t)h->n_layers, sizeof(*t->layers));
	if (t->layers == NULL)
		return fs_fail(l->e, FS_ENOMEM, "no memory");
	for (int il = 0; il < h->n_layers && err == FS_OK; il++)
		err = load_layer(l, il, h, &t->layers[il]);
	if (err == FS_OK)
		err = load_norm(l, "v.post_ln", h->n_embd, &t->post_ln);
	if (err == FS_OK)
		err = load_linear(l, "mm.0", wide, wide, &t->merge1);
	if (err == FS_OK)
		err = load_linear(l, "mm.2", wide, h->n_out, &t->merge2);
	return err;
}

static void begin(struct tower *t, struct fs_dev *d, const struct vision_hparams *h)
{
	memset(t, 0, sizeof(*t));
	t->h = *h;
	t->d = d;
	fill_rope(&t->rope, h->head_dim);
}

int tower_bytes(struct fs_dev *d, const struct fs_gguf *g, const struct vision_hparams *h, uint64_t *out,
        struct fs_errbuf *e)
{
	uint64_t bytes = 0;
	struct loader l = {.d = d, .g = g, .e = e, .count = &bytes};
	struct tower t;
	int err;

	begin(&t, d, h);
	err = load_all(&l, &t);
	tower_finish(&t);
	if (err == FS_OK)
		*out = bytes;
	return err;
}

int tower_init(struct tower *t, struct fs_dev *d, const struct fs_gguf *g, const struct vision_hparams *h,
        struct fs_errbuf *e)
{
	struct loader l = {.d = d, .g = g, .e = e};
	int err;

	begin(t, d, h);
	err = load_all(&l, t);
	if (err == FS_OK)
		err = fs_dev_sync(d, e);
	if (err != FS_OK)
		tower_finish(t);
	return err;
}

void tower_finish(struct tower *t)
{
	if (t->d == NULL)
		return;
	for (int il = 0; t->layers != NULL && il < t->h.n_layers; il++)
		layer_finish(t->d, &t->layers[il]);
	free(t->layers);
	linear_finish(t->d, &t->patch);
	norm_finish(t->d, &t->post_ln);
	linear_finish(t->d, &t->merge1);
	linear_finish(t->d, &t->merge2);
	free(t->kernel);
	memset(t, 0, sizeof(*t));
}
