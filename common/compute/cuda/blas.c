/*
 * blas: products by cuBLASLt. Our rows are its columns: y[n][out] without gaps is its out x n matrix, so it
 * is asked for wᵀ · x with w as an in x out and x as an in x n matrix. A plan holds the descriptions of a
 * shape and the algorithm recommended for it; plans are kept, the least used one making room, because asking
 * takes longer than a small product.
 */
#include "common/compute/cuda/blas.h"

#include "common/compute/cuda/runtime.h"

#include <stdlib.h>
#include <string.h>

#define PLANS 64

struct plan {
	struct key {
		enum fs_dtype type;
		int64_t in, out, n, y_stride;
		uint32_t align[3]; /* of w, x and y in bytes, at most 256 */
		bool bias;
	} key;
	uint64_t used;
	bool possible;
	void *desc, *w, *x, *y;
	struct fs_cublas_result found;
};

struct fs_blas {
	struct fs_cublas api;
	void *handle, *pref, *workspace;
	size_t workspace_size;
	uint64_t tick;
	struct plan plans[PLANS];
};

int fs_blas_create(struct fs_blas **out, void *workspace, size_t workspace_size, struct fs_errbuf *e)
{
	struct fs_blas *b = calloc(1, sizeof(*b));
	uint64_t size = workspace_size;
	int err, status, driver = 0;

	if (!b)
		return fs_fail(e, FS_ENOMEM, "no memory for the plans of products");
	b->workspace = workspace;
	b->workspace_size = workspace_size;
	(void)cudaDriverGetVersion(&driver);
	err = fs_cublas_load(&b->api, driver, e);
	if (err) {
		free(b);
		return err;
	}
	status = b->api.Create(&b->handle);
	if (!status)
		status = b->api.MatmulPreferenceCreate(&b->pref);
	if (!status)
		status = b->api.MatmulPreferenceSetAttribute(
		        b->pref, FS_CUBLAS_PREF_MAX_WORKSPACE_BYTES, &size, sizeof(size));
	if (status) {
		fs_blas_destroy(b, false);
		return fs_fail(e, FS_EUNAVAILABLE, "cuBLASLt does not start: status %d", status);
	}
	*out = b;
	return FS_OK;
}

static void drop(struct fs_blas *b, struct plan *p)
{
	if (p->desc)
		b->api.MatmulDescDestroy(p->desc);
	if (p->w)
		b->api.MatrixLayoutDestroy(p->w);
	if (p->x)
		b->api.MatrixLayoutDestroy(p->x);
	if (p->y)
		b->api.MatrixLayoutDestroy(p->y);
	memset(p, 0, sizeof(*p));
}

void fs_blas_destroy(struct fs_blas *b, bool leave)
{
	if (!b)
		return;
	if (!leave) {
		for (int i = 0; i < PLANS; i++)
			drop(b, &b->plans[i]);
		if (b->pref)
			b->api.MatmulPreferenceDestroy(b->pref);
		if (b->handle)
			b->api.Destroy(b->handle);
		fs_cublas_unload(&b->api);
	}
	free(b);
}

static int type_of(enum fs_dtype t)
{
	return t == FS_BF16 ? FS_CUBLAS_R_16BF : t == FS_F16 ? FS_CUBLAS_R_16F : FS_CUBLAS_R_32F;
}

/* Success means that the descriptions exist. bias: any of the shape, since the library looks at its
 * alignment.
 */
static int describe(struct fs_blas *b, struct plan *p, const float *bias)
{
	const struct key *k = &p->key;
	const int transposed = FS_CUBLAS_OP_T, with_bias = FS_CUBLAS_EPILOGUE_BIAS;
	int type = type_of(k->type),
	    status = b->api.MatmulDescCreate(&p->desc, FS_CUBLAS_COMPUTE_32F, FS_CUBLAS_R_32F);

	if (!status)
		status = b->api.MatmulDescSetAttribute(
		        p->desc, FS_CUBLAS_DESC_TRANSA, &transposed, sizeof(transposed));
	if (!status && k->bias)
		status = b->api.MatmulDescSetAttribute(
		        p->desc, FS_CUBLAS_DESC_EPILOGUE, &with_bias, sizeof(with_bias));
	if (!status && k->bias)
		status = b->api.MatmulDescSetAttribute(
		        p->desc, FS_CUBLAS_DESC_BIAS_POINTER, &bias, sizeof(bias));
	if (!status)
		status = b->api.MatrixLayoutCreate(&p->w, type, (uint64_t)k->in, (uint64_t)k->out, k->in);
	if (!status)
		status = b->api.MatrixLayoutCreate(&p->x, type, (uint64_t)k->in, (uint64_t)k->n, k->in);
	if (!status)
		status = b->api.MatrixLayoutCreate(
		        &p->y, FS_CUBLAS_R_32F, (uint64_t)k->out, (uint64_t)k->n, k->y_stride);
	return status;
}

/* The algorithm; false when there is none. */
static bool choose(struct fs_blas *b, struct plan *p)
{
	const uint32_t *a = p->key.align, align[4] = {a[0], a[1], a[2], a[2]};
	int n = 0;

	for (int i = 0; i < 4; i++)
		if (b->api.MatmulPreferenceSetAttribute(
		            b->pref, FS_CUBLAS_PREF_ALIGNMENT_A + i, &align[i], sizeof(align[i])))
			return false;
	return b->api.MatmulAlgoGetHeuristic(
	               b->handle, p->desc, p->w, p->x, p->y, p->y, b->pref, 1, &p->found, &n) == 0 &&
	       n > 0 && p->found.state == 0;
}

static uint32_t alignment(const void *p)
{
	uintptr_t a = (uintptr_t)p | 256;

	return (uint32_t)(a & -a);
}

static struct plan *plan_of(struct fs_blas *b, const struct fs_blas_product *p)
{
	struct plan *oldest = &b->plans[0];
	struct key k;

	memset(&k, 0, sizeof(k)); /* keys are compared with their padding */
	k.type = p->type;
	k.in = p->in;
	k.out = p->out;
	k.n = p->n;
	k.y_stride = p->y_stride;
	k.align[0] = alignment(p->w);
	k.align[1] = alignment(p->x);
	k.align[2] = alignment(p->y);
	k.bias = p->bias != NULL;
	b->tick++;
	for (int i = 0; i < PLANS; i++) {
		struct plan *q = &b->plans[i];

		if (q->used && !memcmp(&q->key, &k, sizeof(k))) {
			q->used = b->tick;
			return q;
		}
		if (q->used < oldest->used)
			oldest = q;
	}
	drop(b, oldest);
	memcpy(&oldest->key, &k, sizeof(k));
	oldest->used = b->tick;
	oldest->possible = describe(b, oldest, p->bias) == 0 && choose(b, oldest);
	return oldest;
}

bool fs_blas_takes_bias(struct fs_blas *b, const struct fs_blas_product *p)
{
	return plan_of(b, p)->possible;
}

int fs_blas_run(struct fs_blas *b, struct CUstream_st *s, const struct fs_blas_product *p)
{
	const struct plan *q = plan_of(b, p);
	const float one = 1.0f, beta = p->add ? 1.0f : 0.0f;
	int status = q->possible ? 0 : 15 /* not supported */;

	if (!status && p->bias)
		status = b->api.MatmulDescSetAttribute(
		        q->desc, FS_CUBLAS_DESC_BIAS_POINTER, &p->bias, sizeof(p->bias));
	if (!status)
		status = b->api.Matmul(b->handle, q->desc, &one, p->w, q->w, p->x, q->x, &beta, p->y, q->y,
		        p->y, q->y, q->found.algo, b->workspace, b->workspace_size, s);
	return status;
}
