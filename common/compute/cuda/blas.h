/*
 * blas: large products by cuBLASLt, which is loaded at run time, so that programs start on PCs that have no
 * CUDA. cublas.c loads it; blas.c keeps, for each shape that was asked for, the algorithm that the library
 * recommends. On the device's thread.
 */
#ifndef FS_COMMON_COMPUTE_CUDA_BLAS_H
#define FS_COMMON_COMPUTE_CUDA_BLAS_H

#include "common/compute/compute.h"

struct CUstream_st;

/*
 * The part of cuBLASLt that is used, by its stable C interface: opaque handles are pointers, enumerations are
 * ints, statuses are 0 for success. Names and arguments are the library's without "cublasLt"; declared here
 * because a toolkit can come without its headers (cublas.c compares where they are).
 */
struct fs_cublas_result {
	uint64_t algo[8];
	size_t workspace;
	int state;
	float waves;
	int reserved[4];
};
struct fs_cublas {
	void *lib;
	size_t (*GetVersion)(void);
	int (*Create)(void **handle);
	int (*Destroy)(void *handle);
	int (*MatmulDescCreate)(void **desc, int compute, int scale_type);
	int (*MatmulDescDestroy)(void *desc);
	int (*MatmulDescSetAttribute)(void *desc, int attr, const void *value, size_t size);
	int (*MatrixLayoutCreate)(void **layout, int type, uint64_t rows, uint64_t cols, int64_t ld);
	int (*MatrixLayoutDestroy)(void *layout);
	int (*MatmulPreferenceCreate)(void **pref);
	int (*MatmulPreferenceDestroy)(void *pref);
	int (*MatmulPreferenceSetAttribute)(void *pref, int attr, const void *value, size_t size);
	int (*MatmulAlgoGetHeuristic)(void *handle, void *desc, void *a, void *b, void *c, void *d,
	        void *pref, int wanted, struct fs_cublas_result *results, int *n);
	int (*Matmul)(void *handle, void *desc, const void *alpha, const void *a, void *la, const void *b,
	        void *lb, const void *beta, const void *c, void *lc, void *d, void *ld, const uint64_t *algo,
	        void *workspace, size_t workspace_size, struct CUstream_st *stream);
};
enum fs_cublas_value { /* of the library's enumerations */
	FS_CUBLAS_R_32F = 0,
	FS_CUBLAS_R_16F = 2,
	FS_CUBLAS_R_16BF = 14,
	FS_CUBLAS_COMPUTE_32F = 68,
	FS_CUBLAS_DESC_TRANSA = 3,
	FS_CUBLAS_DESC_EPILOGUE = 7,
	FS_CUBLAS_DESC_BIAS_POINTER = 8,
	FS_CUBLAS_OP_T = 1,
	FS_CUBLAS_EPILOGUE_BIAS = 4,
	FS_CUBLAS_PREF_MAX_WORKSPACE_BYTES = 1,
	FS_CUBLAS_PREF_ALIGNMENT_A = 5, /* and b, c, d after it */
};

/* newest: the CUDA version that the driver supports, 13000 for 13.0; libraries of a later first number do not
 * start on it. FS_EUNAVAILABLE: none of the others is on this PC; the text says what is missing. */
int fs_cublas_load(struct fs_cublas *api, int newest, struct fs_errbuf *e);
void fs_cublas_unload(struct fs_cublas *api);

struct fs_blas;

/* workspace: [dev], the library's scratch; it is the caller's. */
int fs_blas_create(struct fs_blas **out, void *workspace, size_t workspace_size, struct fs_errbuf *e);
/* leave: the card does not answer, so the library is left as it is. NULL is fine. */
void fs_blas_destroy(struct fs_blas *b, bool leave);

struct fs_blas_product {    /* y[n][out] = x[n][in] · w[out][in]ᵀ + bias, or y += */
	enum fs_dtype type; /* of w and x: FS_F32 (products in f32), FS_F16 or FS_BF16 (sums in f32) */
	const void *w, *x;  /* [dev], rows without gaps */
	float *y;           /* [dev], rows y_stride apart */
	const float *bias;  /* [dev] or NULL */
	int64_t in, out, n, y_stride;
	bool add;
};
/* Whether bias can be part of the product. False also when the library can not take the product at all. */
bool fs_blas_takes_bias(struct fs_blas *b, const struct fs_blas_product *p);
/* Queues it; 0, or a cuBLAS status. May be captured. */
int fs_blas_run(struct fs_blas *b, struct CUstream_st *s, const struct fs_blas_product *p);

#endif
