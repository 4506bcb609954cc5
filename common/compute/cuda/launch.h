/*
 * launch: the kernels of the CUDA back end as plain C functions; the .cu files define them, cuda.c calls
 * them, and the tests run the same kernels on the host against tests/simt. Each queues its work on the stream
 * and returns a cudaError_t as int, 0 if it was queued. It allocates nothing, waits for nothing, and may be
 * captured into a graph.
 *
 * Threads: any, with the right card current. Memory: every pointer is device memory unless marked [host];
 * contents must stand until the stream has passed. Shapes as in compute.h: row-major, n rows of tokens,
 * W[out][in]. Arguments were checked by compute.c. Types are enum fs_dtype.
 */
#ifndef FS_COMMON_COMPUTE_CUDA_LAUNCH_H
#define FS_COMMON_COMPUTE_CUDA_LAUNCH_H

#include "common/compute/compute.h"

#ifdef __cplusplus
extern "C" {
#endif

struct CUstream_st; /* cudaStream_t is a pointer to it */

/* ---- weights: pack.cu ----
 * Weights lie in memory in a form of their own, made for wide aligned reads and described in blocks.cuh. F32,
 * F16 and BF16 keep the file's numbers; their rows are padded with zeros to a multiple of 16 bytes, as every
 * packed row is. */

/* Bytes of W[out][in] in that form. [host] */
size_t fs_cuk_packed_bytes(enum fs_dtype type, int64_t in, int64_t out);
/* Rows first .. first + n of the file (at `rows`, file's layout) into their place in packed. */
int fs_cuk_pack(struct CUstream_st *s, enum fs_dtype type, const void *rows, int64_t first, int64_t n,
        void *packed, int64_t in, int64_t out);
/* Rows first .. first + n of a packed weight as to = FS_F16, FS_BF16 or FS_F32, dst[n][in]. */
int fs_cuk_dequantize(struct CUstream_st *s, enum fs_dtype type, const void *packed, int64_t first, int64_t n,
        int64_t in, int64_t out, enum fs_dtype to, void *dst);
/* y[i][:] = W[ids[i]][:] */
int fs_cuk_embed(struct CUstream_st *s, enum fs_dtype type, const void *packed, int64_t in, int64_t out,
        const int32_t *ids, float *y, int64_t n);

/* ---- few rows: matvec.cu ---- */

#define FS_CUK_MATVEC_ROWS 8 /* n at most */

struct fs_cuk_matvec { /* y[n][out] = x[n][in] · Wᵀ + bias, or y += */
	enum fs_dtype type;
	const void *w; /* packed */
	int64_t in, out, n;
	const float *bias; /* or NULL */
	const float *x;
	const void *xq; /* fs_cuk_quantize of x, or NULL: the product is taken with x in f32 */
	float *y;
	bool add;
};
bool fs_cuk_matvec_wants_q8(enum fs_dtype type, int64_t in); /* [host] whether xq makes this type faster */
size_t fs_cuk_quantized_bytes(int64_t n, int64_t in);        /* [host] */
/* x[n][in] in blocks of 32: int8 values, their scale and their sum. in % 32 == 0. */
int fs_cuk_quantize(struct CUstream_st *s, const float *x, void *xq, int64_t n, int64_t in);
int fs_cuk_matvec(struct CUstream_st *s, const struct fs_cuk_matvec *m);

/* ---- rows: rows.cu ---- */

/* dst[i] = src[i] as to = FS_F16 or FS_BF16; what is beyond f16's range becomes its end. */
int fs_cuk_narrow(struct CUstream_st *s, const float *src, uint16_t *dst, int64_t n, enum fs_dtype to);
/* y[n][out] = bias, or += bias (bias may not be NULL) */
int fs_cuk_bias(struct CUstream_st *s, const float *bias, float *y, int64_t n, int64_t out, bool add);
int fs_cuk_rms_norm(
        struct CUstream_st *s, const float *x, const float *w, float *y, int64_t n, int64_t dim, float eps);
int fs_cuk_layer_norm(struct CUstream_st *s, const float *x, const float *w, const float *b, float *y,
        int64_t n, int64_t dim, float eps);
int fs_cuk_rope_angles(struct CUstream_st *s, const struct fs_rope *r /* [host] */, const int32_t *pos,
        float *cs, int64_t n);
int fs_cuk_rope(struct CUstream_st *s, const struct fs_rope *r /* [host] */, const float *cs, float *x,
        int64_t stride, int64_t n, int heads, int head_dim);
int fs_cuk_kv_store(struct CUstream_st *s, const struct fs_kv_store *k /* [host] */);
int fs_cuk_act(struct CUstream_st *s, enum fs_act act, float *x, int64_t n);
int fs_cuk_gate(
        struct CUstream_st *s, enum fs_act act, const float *gate, const float *up, float *y, int64_t n);
int fs_cuk_add(struct CUstream_st *s, float *y, const float *x, int64_t n);

/* ---- attention: attention.cu ---- */

/* Bytes of scratch that the call needs (partial results of split keys; narrowed keys and values). [host] */
size_t fs_cuk_attention_scratch(const struct fs_attn *a, bool exact);
/* exact: products in f32 on the ordinary units; else q, k and v are narrowed to 16 bits for the tensor cores.
 * Sums and softmax are f32 in both. sms: multiprocessors of the card, for the choice of how keys are split.
 */
int fs_cuk_attention(
        struct CUstream_st *s, const struct fs_attn *a /* [host] */, bool exact, int sms, void *scratch);

#ifdef __cplusplus
}
#endif

#endif
