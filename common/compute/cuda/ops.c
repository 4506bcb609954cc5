/*
 * ops: the operations that are one kernel each. Runs on the thread that owns the device; arguments were
 * checked by compute.c.
 */
#include "common/compute/cuda/cuda.h"

/* Every one of these may write what a buffer of another form was made of. */
#define QUEUE(what, call)                                                                                    \
	do {                                                                                                 \
		struct fs_cuda *c_ = fs_cuda(d);                                                             \
                                                                                                             \
		fs_cuda_forget_forms(c_);                                                                    \
		FS_CUDA_QUEUE(c_, what, call);                                                               \
	} while (0)

void fs_cuda_rms_norm(
        struct fs_dev *d, const float *x, const float *w, float *y, int64_t n, int64_t dim, float eps)
{
	QUEUE("an RMS norm", fs_cuk_rms_norm(s, x, w, y, n, dim, eps));
}

void fs_cuda_layer_norm(struct fs_dev *d, const float *x, const float *w, const float *b, float *y, int64_t n,
        int64_t dim, float eps)
{
	QUEUE("a layer norm", fs_cuk_layer_norm(s, x, w, b, y, n, dim, eps));
}

void fs_cuda_rope_angles(struct fs_dev *d, const struct fs_rope *r, const int32_t *pos, float *cs, int64_t n)
{
	if (r->n_pairs > 0)
		QUEUE("rotary angles", fs_cuk_rope_angles(s, r, pos, cs, n));
}

void fs_cuda_rope(struct fs_dev *d, const struct fs_rope *r, const float *cs, float *x, int64_t stride,
        int64_t n, int heads, int head_dim)
{
	if (r->n_pairs > 0)
		QUEUE("a rotary embedding", fs_cuk_rope(s, r, cs, x, stride, n, heads, head_dim));
}

void fs_cuda_kv_store(struct fs_dev *d, const struct fs_kv_store *k)
{
	QUEUE("storing keys", fs_cuk_kv_store(s, k));
}

void fs_cuda_attention(struct fs_dev *d, const struct fs_attn *a)
{
	struct fs_cuda *c = fs_cuda(d);
	bool exact = d->precision == FS_PRECISION_F32;
	size_t bytes = fs_cuk_attention_scratch(a, exact);
	void *scratch = bytes ? fs_cuda_need(c, &c->split, bytes) : NULL;

	if (!bytes || scratch)
		QUEUE("attention", fs_cuk_attention(s, a, exact, c->sms, scratch));
}

void fs_cuda_act(struct fs_dev *d, enum fs_act act, float *x, int64_t n)
{
	QUEUE("an activation", fs_cuk_act(s, act, x, n));
}

void fs_cuda_gate(struct fs_dev *d, enum fs_act act, const float *gate, const float *up, float *y, int64_t n)
{
	QUEUE("a gated activation", fs_cuk_gate(s, act, gate, up, y, n));
}

void fs_cuda_add(struct fs_dev *d, float *y, const float *x, int64_t n)
{
	QUEUE("a sum", fs_cuk_add(s, y, x, n));
}
