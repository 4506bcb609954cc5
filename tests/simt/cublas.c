/*
 * cublas: cuBLASLt for tests, in the place of common/compute/cuda/cublas.c: products by plain sums in double,
 * queued on cudart's streams. It asks for what the library asks for: descriptions that fit each other, the
 * alignment that was promised, a bias where the epilogue says so.
 */
#include "common/compute/cuda/blas.h"
#include "tests/simt/cudart.h"

#include <stdlib.h>
#include <string.h>

#define NOT_SUPPORTED 15
#define INVALID_VALUE 7

struct desc {
	int transposed, epilogue;
	const float *bias;
};
struct layout {
	int type;
	uint64_t rows, cols;
	int64_t ld;
};
struct pref {
	uint64_t workspace;
	uint32_t align[4];
};
struct product {
	struct desc desc;
	struct layout a, b, d;
	const void *w, *x;
	float *y;
	float beta;
};

static size_t version(void)
{
	return 130000;
}

static int make(void **out, size_t size)
{
	*out = fake_cuda_make(size);
	return 0;
}

static int drop(void *p)
{
	fake_cuda_drop(p);
	return 0;
}

static int create(void **handle)
{
	return make(handle, 1);
}

static int desc_create(void **desc, int compute, int scale_type)
{
	return compute != FS_CUBLAS_COMPUTE_32F || scale_type != FS_CUBLAS_R_32F
	               ? NOT_SUPPORTED
	               : make(desc, sizeof(struct desc));
}

static int desc_set(void *desc, int attr, const void *value, size_t size)
{
	struct desc *d = desc;

	if (attr == FS_CUBLAS_DESC_TRANSA && size == sizeof(d->transposed))
		memcpy(&d->transposed, value, size);
	else if (attr == FS_CUBLAS_DESC_EPILOGUE && size == sizeof(d->epilogue))
		memcpy(&d->epilogue, value, size);
	else if (attr == FS_CUBLAS_DESC_BIAS_POINTER && size == sizeof(d->bias))
		memcpy(&d->bias, value, size);
	else
		return INVALID_VALUE;
	return 0;
}

static int layout_create(void **out, int type, uint64_t rows, uint64_t cols, int64_t ld)
{
	if (ld < (int64_t)rows || make(out, sizeof(struct layout)))
		return INVALID_VALUE;
	*(struct layout *)*out = (struct layout){.type = type, .rows = rows, .cols = cols, .ld = ld};
	return 0;
}

static int pref_create(void **out)
{
	return make(out, sizeof(struct pref));
}

static int pref_set(void *pref, int attr, const void *value, size_t size)
{
	struct pref *p = pref;

	if (attr == FS_CUBLAS_PREF_MAX_WORKSPACE_BYTES && size == sizeof(p->workspace))
		memcpy(&p->workspace, value, size);
	else if (attr >= FS_CUBLAS_PREF_ALIGNMENT_A && attr < FS_CUBLAS_PREF_ALIGNMENT_A + 4 &&
	         size == sizeof(uint32_t))
		memcpy(&p->align[attr - FS_CUBLAS_PREF_ALIGNMENT_A], value, size);
	else
		return INVALID_VALUE;
	return 0;
}

static bool fits(const struct desc *t, const struct layout *a, const struct layout *b, const struct layout *d)
{
	return t->transposed == FS_CUBLAS_OP_T && a->rows == b->rows && a->cols == d->rows &&
	       b->cols == d->cols && a->type == b->type && d->type == FS_CUBLAS_R_32F;
}

/* The algorithm's words are the promised alignments. */
static int heuristic(void *handle, void *desc, void *a, void *b, void *c, void *d, void *pref, int wanted,
        struct fs_cublas_result *results, int *n)
{
	const struct desc *t = desc;
	const struct pref *p = pref;

	*n = 0;
	if (!fits(t, a, b, d) || c != d)
		return INVALID_VALUE;
	if (t->epilogue == FS_CUBLAS_EPILOGUE_BIAS && fake_cuda.no_bias)
		return NOT_SUPPORTED;
	memset(results, 0, sizeof(*results));
	for (int i = 0; i < 4; i++)
		results->algo[i] = p->align[i];
	*n = 1;
	return 0;
}

static double at(const void *p, int type, size_t i)
{
	return type == FS_CUBLAS_R_32F   ? (double)((const float *)p)[i]
	       : type == FS_CUBLAS_R_16F ? (double)fs_f16_to_f32(((const uint16_t *)p)[i])
	                                 : (double)fs_bf16_to_f32(((const uint16_t *)p)[i]);
}

static void run(void *arg)
{
	const struct product *p = arg;

	fake_cuda.products++;
	for (size_t c = 0; c < p->d.cols; c++) {
		for (size_t r = 0; r < p->d.rows; r++) {
			float *y = p->y + c * (size_t)p->d.ld + r;
			double sum = p->beta != 0 ? (double)p->beta * (double)*y : 0;

			for (size_t k = 0; k < p->a.rows; k++)
				sum += at(p->w, p->a.type, r * (size_t)p->a.ld + k) *
				       at(p->x, p->b.type, c * (size_t)p->b.ld + k);
			*y = (float)(sum + (p->desc.bias ? (double)p->desc.bias[r] : 0));
		}
	}
}

static bool aligned(const void *p, uint64_t to)
{
	return to > 0 && (uintptr_t)p % to == 0;
}

static int matmul(void *handle, void *desc, const void *alpha, const void *a, void *la, const void *b,
        void *lb, const void *beta, const void *c, void *lc, void *d, void *ld, const uint64_t *algo,
        void *workspace, size_t workspace_size, struct CUstream_st *stream)
{
	struct product *p;

	if (!fits(desc, la, lb, ld) || c != d || lc != ld || *(const float *)alpha != 1.0f || !workspace ||
	        !aligned(a, algo[0]) || !aligned(b, algo[1]) || !aligned(d, algo[3]))
		return INVALID_VALUE;
	p = calloc(1, sizeof(*p));
	if (!p)
		return 3;
	*p = (struct product){.desc = *(struct desc *)desc,
	        .a = *(struct layout *)la,
	        .b = *(struct layout *)lb,
	        .d = *(struct layout *)ld,
	        .w = a,
	        .x = b,
	        .y = d,
	        .beta = *(const float *)beta};
	if (p->desc.epilogue != FS_CUBLAS_EPILOGUE_BIAS)
		p->desc.bias = NULL;
	return fake_cuda_queue(stream, run, free, p) ? 14 : 0;
}

int fs_cublas_load(struct fs_cublas *api, int newest, struct fs_errbuf *e)
{
	if (newest != fake_cuda.driver)
		return fs_fail(e, FS_EUNAVAILABLE, "not what the driver said");
	if (fake_cuda.no_cublas)
		return fs_fail(e, FS_EUNAVAILABLE, "the library libcublasLt is not on this PC");
	*api = (struct fs_cublas){.GetVersion = version,
	        .Create = create,
	        .Destroy = drop,
	        .MatmulDescCreate = desc_create,
	        .MatmulDescDestroy = drop,
	        .MatmulDescSetAttribute = desc_set,
	        .MatrixLayoutCreate = layout_create,
	        .MatrixLayoutDestroy = drop,
	        .MatmulPreferenceCreate = pref_create,
	        .MatmulPreferenceDestroy = drop,
	        .MatmulPreferenceSetAttribute = pref_set,
	        .MatmulAlgoGetHeuristic = heuristic,
	        .Matmul = matmul};
	return FS_OK;
}

void fs_cublas_unload(struct fs_cublas *api)
{
}
