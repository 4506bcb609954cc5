/*
 * kv: memory and records of the KV cache. Runs on the device's thread. Cells count only once every layer has
 * stored them: a run that ends half-way leaves `used` where it was, and its cells are overwritten by the
 * next. It refuses contexts whose size overflows.
 */
#include "server/engine/kv.h"

#include <stdlib.h>
#include <string.h>

static size_t elem_bytes(const struct fs_kv *kv)
{
	return kv->type == FS_F32 ? sizeof(float) : sizeof(uint16_t);
}

static int alloc_records(struct fs_kv *kv)
{
	kv->k = calloc((size_t)kv->n_layer, sizeof(*kv->k));
	kv->v = calloc((size_t)kv->n_layer, sizeof(*kv->v));
	kv->ids = calloc((size_t)kv->n_ctx, sizeof(*kv->ids));
	return kv->k != NULL && kv->v != NULL && kv->ids != NULL ? FS_OK : FS_ENOMEM;
}

int fs_kv_init(struct fs_kv *kv, struct fs_dev *dev, const struct fs_hparams *hp, int32_t n_ctx, bool f32,
        struct fs_errbuf *e)
{
	size_t bytes;
	int err;

	memset(kv, 0, sizeof(*kv));
	kv->dev = dev;
	kv->n_layer = hp->n_layer;
	kv->n_ctx = n_ctx;
	kv->width = (int64_t)hp->kv_heads * hp->head_dim;
	kv->type = f32 ? FS_F32 : FS_F16;
	if (!fs_mul_size((size_t)n_ctx, (size_t)kv->width * elem_bytes(kv), &bytes))
		return fs_fail(e, FS_EINVAL, "a context of %d is too large", n_ctx);
	err = alloc_records(kv);
	for (int i = 0; i < kv->n_layer && err == FS_OK; i++) {
		err = fs_dev_alloc(dev, bytes, &kv->k[i], e);
		if (err == FS_OK)
			err = fs_dev_alloc(dev, bytes, &kv->v[i], e);
	}
	if (err != FS_OK) {
		double gib = 2.0 * (double)bytes * kv->n_layer / (1 << 30);
		fs_kv_finish(kv);
		return fs_fail(e, err,
		        "no memory for a context of %d (%.2f GiB of KV cache); lower \"context\"", n_ctx,
		        gib);
	}
	return FS_OK;
}

void fs_kv_finish(struct fs_kv *kv)
{
	for (int i = 0; i < kv->n_layer; i++) {
		if (kv->k != NULL && kv->k[i] != NULL)
			fs_dev_free(kv->dev, kv->k[i]);
		if (kv->v != NULL && kv->v[i] != NULL)
			fs_dev_free(kv->dev, kv->v[i]);
	}
	free(kv->k);
	free(kv->v);
	free(kv->ids);
	free(kv->pics);
	memset(kv, 0, sizeof(*kv));
}

uint64_t fs_kv_bytes(const struct fs_hparams *hp, int32_t n_ctx, bool f32)
{
	uint64_t width = (uint64_t)hp->kv_heads * (uint64_t)hp->head_dim,
	         elem = f32 ? sizeof(float) : sizeof(uint16_t);

	return 2 * (uint64_t)hp->n_layer * (uint64_t)n_ctx * width * elem;
}

/* Both start at the same cell by then. How many of their cells agree. */
static int32_t common_picture(const struct fs_kv_pic *a, const struct fs_prompt_pic *b)
{
	const struct fs_rows_shape *s = &b->rows->shape;

	if (a->first != b->first || a->nx != s->nx || a->ny != s->ny ||
	        memcmp(a->key, b->rows->key, sizeof(a->key)) != 0)
		return 0;
	return FS_MIN(a->n, s->n_tokens);
}

int32_t fs_kv_common(const struct fs_kv *kv, const struct fs_prompt *p)
{
	int32_t n = FS_MIN(kv->used, p->n), i = 0;

	while (i < n) {
		if (kv->ids[i] >= 0 || p->ids[i] >= 0) {
			if (kv->ids[i] != p->ids[i])
				break;
			i++;
			continue;
		}
		const struct fs_kv_pic *a = &kv->pics[-1 - kv->ids[i]];
		int32_t same = common_picture(a, &p->pics[-1 - p->ids[i]]);
		i += same;
		if (same == 0 || same < a->nx * a->ny)
			break;
	}
	return FS_MIN(i, n);
}

void fs_kv_truncate(struct fs_kv *kv, int32_t n)
{
	FS_ASSERT(n >= 0);
	if (n >= kv->used)
		return;
	kv->used = n;
	while (kv->n_pics > 0 && kv->pics[kv->n_pics - 1].first >= n)
		kv->n_pics--;
	if (kv->n_pics > 0) {
		struct fs_kv_pic *last = &kv->pics[kv->n_pics - 1];
		last->n = FS_MIN(last->n, n - last->first);
	}
}

int fs_kv_reserve(struct fs_kv *kv, const struct fs_prompt *p, struct fs_errbuf *e)
{
	int32_t want = p->n_pics;
	struct fs_kv_pic *pics;

	if (want <= kv->cap_pics)
		return FS_OK;
	pics = realloc(kv->pics, (size_t)want * sizeof(*pics));
	if (pics == NULL)
		return fs_fail(e, FS_ENOMEM, "no memory for %d pictures", want);
	kv->pics = pics;
	kv->cap_pics = want;
	return FS_OK;
}

void fs_kv_commit(struct fs_kv *kv, const struct fs_prompt *p, int32_t first, int32_t n)
{
	FS_ASSERT(first == kv->used && n >= 0 && n <= kv->n_ctx - first);
	for (int32_t i = first; i < first + n; i++) {
		kv->ids[i] = p->ids[i];
		if (p->ids[i] >= 0)
			continue;
		int32_t pic = -1 - p->ids[i];
		if (pic == kv->n_pics) {
			const struct fs_rows *r = p->pics[pic].rows;
			FS_ASSERT(kv->n_pics < kv->cap_pics);
			kv->pics[pic] = (struct fs_kv_pic){.first = i, .nx = r->shape.nx, .ny = r->shape.ny};
			memcpy(kv->pics[pic].key, r->key, sizeof(r->key));
			kv->n_pics++;
		}
		FS_ASSERT(pic == kv->n_pics - 1);
		kv->pics[pic].n++;
	}
	kv->used = first + n;
}

void fs_kv_commit_token(struct fs_kv *kv, int32_t id)
{
	FS_ASSERT(kv->used < kv->n_ctx && id >= 0);
	kv->ids[kv->used++] = id;
}
