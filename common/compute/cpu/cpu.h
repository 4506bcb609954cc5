/*
 * cpu: the CPU device and what its files share. One thread owns it and calls everything here; pieces of an
 * operation run on its pool.
 */
#ifndef FS_COMPUTE_CPU_CPU_H
#define FS_COMPUTE_CPU_CPU_H

#include "common/compute/cpu/gemm.h"
#include "common/compute/cpu/kernels.h"
#include "common/compute/cpu/pool.h"
#include "common/compute/internal.h"

struct fs_scratch { /* grows, never shrinks; the contents are lost when it grows */
	void *p;
	size_t size;
};

struct fs_cpu {
	struct fs_dev dev; /* first */
	struct fs_pool *pool;
	struct fs_gemm *gemm;
	const struct fs_kernels *k;
	bool bf16;                /* large products in bf16 */
	struct fs_scratch rows;   /* activations in another type */
	struct fs_scratch worker; /* per-worker pieces */
};

/* The best level of this processor, and whether it multiplies bf16. */
enum fs_cpu_level fs_cpu_detect(bool *bf16);
/* fs_cpu_open with a given level, for tests; FS_ENOTSUP when the processor lacks it. */
int fs_cpu_open_level(const struct fs_dev_opts *o, enum fs_cpu_level level, bool bf16, struct fs_dev **out,
        struct fs_errbuf *e);

/* At least count·size bytes, 64-byte aligned; NULL (and the device's sticky error) when there is no memory.
 */
void *fs_scratch_get(struct fs_cpu *c, struct fs_scratch *s, size_t count, size_t size);

/* large.c: many rows. packed is the back end's form in fs_weight. */
struct fs_packed;
void fs_cpu_matmul_large(struct fs_cpu *c, const struct fs_weight *w, const float *bias, const float *x,
        float *y, int64_t n, bool add);
/* many.c: the same for quantised weights in int8; only where k->panel_pack is not NULL. */
void fs_cpu_matmul_many(struct fs_cpu *c, const struct fs_weight *w, const float *bias, const float *x,
        float *y, int64_t n, bool add);
int fs_cpu_pack(struct fs_cpu *c, const struct fs_weight *w, struct fs_packed **out, struct fs_errbuf *e);
void fs_cpu_packed_free(struct fs_packed *p);

/* ops.c and matmul.c: entries of the table */
void fs_cpu_matmul(struct fs_dev *d, const struct fs_weight *w, const float *bias, const float *x, float *y,
        int64_t n, bool add);
void fs_cpu_embed(struct fs_dev *d, const struct fs_weight *w, const int32_t *ids, float *y, int64_t n);
void fs_cpu_rms_norm(
        struct fs_dev *d, const float *x, const float *w, float *y, int64_t n, int64_t dim, float eps);
void fs_cpu_layer_norm(struct fs_dev *d, const float *x, const float *w, const float *b, float *y, int64_t n,
        int64_t dim, float eps);
void fs_cpu_rope_angles(struct fs_dev *d, const struct fs_rope *r, const int32_t *pos, float *cs, int64_t n);
void fs_cpu_rope(struct fs_dev *d, const struct fs_rope *r, const float *cs, float *x, int64_t stride,
        int64_t n, int heads, int head_dim);
void fs_cpu_kv_store(struct fs_dev *d, const struct fs_kv_store *s);
void fs_cpu_attention(struct fs_dev *d, const struct fs_attn *a);
void fs_cpu_act(struct fs_dev *d, enum fs_act act, float *x, int64_t n);
void fs_cpu_gate(struct fs_dev *d, enum fs_act act, const float *gate, const float *up, float *y, int64_t n);
void fs_cpu_add(struct fs_dev *d, float *y, const float *x, int64_t n);

#endif
