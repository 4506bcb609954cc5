/*
 * compute: the one device API on which the text engine and the vision tower stand. Model graphs are written
 * once against it; cpu/ implements it (oneDNN for large products, own kernels for quantised mat-vec), cuda/
 * is another back end behind the same table.
 *
 * Threads: a device belongs to the one thread that uses it (opening and closing included); it runs its own
 * workers inside. Memory: pointers marked [dev] are device memory from fs_dev_alloc (host memory on the CPU,
 * not to be dereferenced elsewhere). Shapes: row-major, rows are tokens; x[n][d] means n rows of d contiguous
 * floats unless a stride (in elements) is given. Errors: operations are queued and return nothing. The first
 * failure sticks, later operations do nothing, and fs_dev_sync (and download) report it. Nothing here is
 * cancelled half-way: callers check their token between layers.
 */
#ifndef FS_COMMON_COMPUTE_H
#define FS_COMMON_COMPUTE_H

#include "common/gguf/gguf.h"

struct fs_dev;

enum fs_precision {
	FS_PRECISION_AUTO, /* large products in bf16 where the processor or card has it; KV cache f16 */
	FS_PRECISION_F32,  /* every product in f32; for parity tests */
};
struct fs_dev_opts {
	const char *device; /* "auto", "cpu", "cuda", "cuda:N" (N in PCI bus order); NULL = "auto" */
	int threads;        /* CPU worker threads; 0 = the cores this process may use */
	enum fs_precision precision;
};
/* FS_EUNAVAILABLE: no such card or driver; FS_ENOTSUP: this build has no CUDA. "auto" falls back to the CPU
 * with one log line. */
int fs_dev_open(const struct fs_dev_opts *o, struct fs_dev **out, struct fs_errbuf *e);
/* Whether what failed with err on d, which was opened for `device`, is to be tried again on the CPU, because
 * "auto" had chosen a GPU; then `why` is logged. Not when the file is at fault, which is as wrong on the CPU.
 * d may be NULL. */
bool fs_dev_else_cpu(const struct fs_dev *d, const char *device, int err, const char *why);
void fs_dev_close(struct fs_dev *d); /* NULL is fine; everything allocated from it must have been freed */
const char *fs_dev_name(const struct fs_dev *d); /* "cpu" | "cuda:0" */
/* For people: "cpu: AVX-512 BF16, 2 threads". */
const char *fs_dev_describe(const struct fs_dev *d);
bool fs_dev_is_gpu(const struct fs_dev *d);
int fs_dev_threads(const struct fs_dev *d);
/* Bytes of the device's memory that are free and that it has; false on the CPU, where they are not asked for.
 */
bool fs_dev_memory(struct fs_dev *d, uint64_t *free_bytes, uint64_t *total_bytes);
/* After an error that the device does not recover from (an illegal access, a card that fell off the bus):
 * every further operation fails, and the only thing left is to free what was allocated and close it. */
bool fs_dev_lost(const struct fs_dev *d);
/* It is lost because it did not answer, and opening it again from this process may not come to an end. */
bool fs_dev_hung(const struct fs_dev *d);
/* Between layers, so that a cancel token is looked at while the work is done and not long before: waits until
 * what was queued before the last call is done. So the device never runs dry, and never has more than two
 * layers before it. Not within a step that is recorded. */
void fs_dev_pace(struct fs_dev *d);
/* Waits for all queued work; the sticky error, if any (and clears it). */
int fs_dev_sync(struct fs_dev *d, struct fs_errbuf *e);

/* ---- memory ---- */
int fs_dev_alloc(
        struct fs_dev *d, size_t bytes, void **out, struct fs_errbuf *e); /* 64-byte aligned, not cleared */
void fs_dev_free(struct fs_dev *d, void *p);
void fs_dev_upload(
        struct fs_dev *d, void *dst, const void *src, size_t bytes); /* src may be reused on return */
int fs_dev_download(
        struct fs_dev *d, void *dst, const void *src, size_t bytes, struct fs_errbuf *e); /* waits */
void fs_dev_copy(
        struct fs_dev *d, void *dst, const void *src, size_t bytes); /* [dev] to [dev], not overlapping */

/* What a program is going to take of a device's memory, in bytes. */
struct fs_dev_need {
	uint64_t weights, cache; /* cache: KV cache; 0 = none */
	uint64_t work;           /* scratch, the caller's and fs_dev_scratch */
};
/* To be called before anything is allocated. On a GPU one log line tells the need and what is free; when that
 * is too little, FS_ENOMEM with the same numbers and `advice`, what the user can do. FS_OK on the CPU. */
int fs_dev_fit(struct fs_dev *d, const struct fs_dev_need *n, const char *advice, struct fs_errbuf *e);
/* Bytes that an allocation of so many takes. */
uint64_t fs_dev_rounded(uint64_t bytes);
/* Bytes that the device itself takes at most for products of `rows` rows of up to `widest` elements and for
 * attention over n_kv keys of `kv_width` floats (0: they are stored in half precision); 0 on the CPU. */
uint64_t fs_dev_scratch(const struct fs_dev *d, int64_t rows, int64_t widest, int64_t n_kv, int64_t kv_width);

/* ---- steps that repeat ----
 * A decode step queues the same operations token after token; what changes lies in device memory (ids,
 *positions, `past`). A device that can (CUDA graphs) records them once and queues them again by one call;
 *others just run them:
 *
 *	if (!fs_dev_replay(d, key)) {
 *		... operations ...
 *		fs_dev_recorded(d);
 *	}
 *
 * Between the two there is no allocation, upload, download or sync, and every pointer used stays valid until
 * fs_dev_forget or the device's end. key: the caller's name for a step of these very operations and sizes. */
bool fs_dev_replay(struct fs_dev *d, uint64_t key); /* true: it had been recorded and is queued */
void fs_dev_recorded(struct fs_dev *d);
void fs_dev_forget(struct fs_dev *d); /* all recordings; before memory that they use is freed */

/* ---- weights ---- */
struct fs_weight { /* a linear layer or embedding table, W[out][in] */
	enum fs_dtype type;
	int64_t in, out;
	const void *data; /* [dev] rows as in the file; on the CPU the memory map itself, so the GGUF must
	                     outlive it */
	void *packed;     /* back end's own form for large products, or NULL */
};
/* expect_packed: this weight will be used with many rows at once (a vision tower), so the back end may keep a
 * second, packed form. name and expected shape are checked by fs_gguf_need beforehand. */
/* Device memory that loading it will take; 0 where weights are used from the file's own pages. */
uint64_t fs_weight_bytes(const struct fs_dev *d, const struct fs_gguf_tensor *t, bool expect_packed);
int fs_weight_load(struct fs_dev *d, const struct fs_gguf_tensor *t, bool expect_packed, struct fs_weight *w,
        struct fs_errbuf *e);
void fs_weight_finish(struct fs_dev *d, struct fs_weight *w);
/* The same of fs_vector_load. */
uint64_t fs_vector_bytes(const struct fs_dev *d, const struct fs_gguf_tensor *t);
/* A vector (norm weight, bias) of any readable type as f32; [dev], free with fs_dev_free. */
int fs_vector_load(struct fs_dev *d, const struct fs_gguf_tensor *t, float **out, struct fs_errbuf *e);

/* ---- operations ---- */

/* y[n][out] = x[n][in] · Wᵀ + bias (bias may be NULL); add: y += … instead. Any n >= 1: few rows take the
 * mat-vec kernels (weights read once for all rows), many rows the large product. x and y do not overlap. */
void fs_op_matmul(struct fs_dev *d, const struct fs_weight *w, const float *bias, const float *x, float *y,
        int64_t n, bool add);
/* y[i][:] = W[ids[i]][:] as f32; ids: int32 [dev], each in [0, w->out), checked by the caller. */
void fs_op_embed(struct fs_dev *d, const struct fs_weight *w, const int32_t *ids, float *y, int64_t n);

/* RMSNorm: y = x / sqrt(mean(x²) + eps) · w over rows of dim floats, x and y rows `stride` apart; y may be x.
 * For per-head norms call it with n = rows·heads and dim = stride = head_dim. */
void fs_op_rms_norm(
        struct fs_dev *d, const float *x, const float *w, float *y, int64_t n, int64_t dim, float eps);
/* LayerNorm, biased variance: y = (x − mean)/sqrt(var + eps) · w + b; b may be NULL; y may be x. */
void fs_op_layer_norm(struct fs_dev *d, const float *x, const float *w, const float *b, float *y, int64_t n,
        int64_t dim, float eps);

/*
 * Rotary embedding, all kinds in one form: pair p of a head turns by angle pos[axis[p]][row] · freq[p].
 * Interleaved pairs are (2p, 2p+1) ("NORM", llama), others (p, p + n_pairs) ("NEOX"). M-RoPE and the 2D rope
 * of vision towers differ only in axis[] and freq[]. Dimensions from 2·n_pairs on are left as they are.
 */
struct fs_rope {
	int n_pairs;
	bool interleaved;
	int n_axes;        /* planes of positions, 1..4 */
	float freq[256];   /* [n_pairs]; n_pairs <= 256 */
	uint8_t axis[256]; /* [n_pairs] */
};
/* cs[n][n_pairs][2] = {cos, sin}, [dev]; pos: int32 [n_axes][n], [dev]. Once a batch, used by every layer. */
void fs_op_rope_angles(struct fs_dev *d, const struct fs_rope *r, const int32_t *pos, float *cs, int64_t n);
/* In place on x: n rows `stride` apart, each with `heads` heads of head_dim. */
void fs_op_rope(struct fs_dev *d, const struct fs_rope *r, const float *cs, float *x, int64_t stride,
        int64_t n, int heads, int head_dim);

/* KV cache rows: dst[at + *past + i][width] = src[i][width], rows of src src_stride apart. */
struct fs_kv_store {
	void *dst;          /* [n_cells][width] */
	enum fs_dtype type; /* of dst: FS_F16 or FS_F32 */
	int64_t at;
	const int32_t *past; /* [dev] or NULL for 0 */
	const float *src;
	int64_t src_stride;
	int64_t n, width;
};
void fs_op_kv_store(struct fs_dev *d, const struct fs_kv_store *k);

/* softmax(q·kᵀ·scale)·v in f32 accumulation, never holding n_q x n_kv scores. Grouped heads: query head h
 * uses kv head h / (heads / kv_heads). */
struct fs_attn {
	const float *q; /* [n_q][heads·head_dim], rows q_stride apart */
	int64_t q_stride;
	const void *k, *v; /* [n_kv][kv_heads·head_dim], rows kv_stride apart (elements) */
	int64_t kv_stride;
	enum fs_dtype kv_type; /* FS_F16 or FS_F32 */
	float *out;            /* [n_q][heads·head_dim], rows out_stride apart */
	int64_t out_stride;
	int64_t n_q, n_kv;
	int heads, kv_heads, head_dim; /* any head_dim that is a multiple of 4, <= 256 */
	float scale;
	bool causal;     /* query i sees keys 0 .. q_first + i */
	int64_t q_first; /* causal only; q_first + n_q <= n_kv */
	/* Causal only, or NULL: [dev] *past is added to n_kv and q_first when the operation runs, so that it
	 * can be part of a recording. n_kv + *past <= n_kv_max, the cells that k and v hold at least. */
	const int32_t *past;
	int64_t n_kv_max;
};
void fs_op_attention(struct fs_dev *d, const struct fs_attn *a);

enum fs_act { FS_GELU_ERF, FS_GELU_TANH, FS_GELU_QUICK, FS_SILU };
void fs_op_act(struct fs_dev *d, enum fs_act act, float *x, int64_t n); /* in place */
void fs_op_gate(struct fs_dev *d, enum fs_act act, const float *gate, const float *up, float *y,
        int64_t n); /* y = act(gate)·up; y may be either */
void fs_op_add(struct fs_dev *d, float *y, const float *x, int64_t n); /* y += x */

#endif
