/*
 * gemm: large products of one piece each, by oneDNN (C interface of version 2), always on the calling thread:
 * the pool cuts the work, so oneDNN's own OpenMP team is held to one thread. Plans (a compiled kernel for one
 * shape) are made and found by the owner thread; executing one is safe on all workers at once.
 */
#ifndef FS_COMPUTE_CPU_GEMM_H
#define FS_COMPUTE_CPU_GEMM_H

#include "common/base/base.h"

struct fs_gemm;
struct fs_gemm_plan;

/*
 * y[m][n] = a[m][k]·W[n][k]ᵀ, all dense; a and W in bf16 or f32, y f32. packed: W in the form that
 * fs_gemm_pack makes, else plain rows. oneDNN's fast kernels refuse an output with gaps between its rows and
 * fall back to a reference loop, so pieces are computed densely and copied.
 */
struct fs_gemm_shape {
	int64_t m, n, k;
	bool bf16, packed;
};

int fs_gemm_create(int threads, struct fs_gemm **out, struct fs_errbuf *e);
void fs_gemm_destroy(struct fs_gemm *g); /* NULL is fine */
/* To be called once on every thread that executes. */
void fs_gemm_thread_init(void);

/* Owner thread. The plan lives until 64 others have been asked for since. */
int fs_gemm_plan(struct fs_gemm *g, const struct fs_gemm_shape *s, const struct fs_gemm_plan **out,
        struct fs_errbuf *e);
size_t fs_gemm_plan_scratch(const struct fs_gemm_plan *p); /* bytes that execute needs, 64-byte aligned */
/* false when oneDNN failed; the outputs are then undefined. */
bool fs_gemm_execute(const struct fs_gemm *g, const struct fs_gemm_plan *p, int worker, const void *a,
        const void *w, float *y, void *scratch);

/* The packed form of W[n][k] (bf16 or f32 as given): its size, and the conversion. Owner thread. */
int fs_gemm_packed_bytes(
        struct fs_gemm *g, int64_t n, int64_t k, bool bf16, size_t *out, struct fs_errbuf *e);
int fs_gemm_pack(
        struct fs_gemm *g, int64_t n, int64_t k, bool bf16, const void *w, void *packed, struct fs_errbuf *e);

#endif
