/*
 * kernels: what one thread does with a piece of an operation, once for each instruction set. vec.c,
 * attention.c and dot.c are compiled three times (FS_LEVEL 0, 1, 2) and meet here as tables; the device takes
 * the best that the processor has. Level 0 is plain C on libm and the reference for the other two. All
 * functions are pure: no globals, no allocation, any thread.
 */
#ifndef FS_COMPUTE_CPU_KERNELS_H
#define FS_COMPUTE_CPU_KERNELS_H

#include "common/compute/compute.h"

enum fs_cpu_level {
	FS_CPU_SCALAR,
	FS_CPU_AVX2,   /* AVX2, FMA, F16C */
	FS_CPU_AVX512, /* AVX-512 F, BW, DQ, VL, VNNI */
};

/*
 * Activation rows in int8: blocks of 32 along the row, x ~= d·q. One row is q[in] (int8), d[in/32], s[in/32]
 * and s16[in/16] (f32), where s is d times the sum of the block's q and s16 the same for its halves: what
 * weight types with an offset need.
 */
struct fs_xq {
	int8_t *q;
	float *d, *s, *s16;
};

/* Outputs o0..o1-1 of a product with few rows: y[r·ldy + o] (+)= bias[o] + W[o]·x[r]. */
struct fs_few {
	enum fs_dtype type;
	int64_t in;
	const uint8_t *w; /* W[0] */
	size_t row_bytes;
	int64_t o0, o1;
	const float *bias; /* or NULL */
	bool add;
	int n;           /* rows, >= 1 */
	const float *x;  /* [n][in]: the f32 forms */
	struct fs_xq xq; /* row 0; row r lies at q + r·in, d + r·in/32 and so on: the int8 form */
	float *y;
	int64_t ldy;
	float *tmp; /* [in], for types that are dequantised first */
};

/* Activation rows r0..r1-1 with the panel of up to FS_TILE_OUTS weight rows: y[r·ldy + 0..outs-1] (+)= bias +
 * …  */
#define FS_TILE_OUTS 16
struct fs_tile {
	enum fs_dtype type;
	int64_t in, r0, r1;
	const uint8_t *panel;
	int outs;
	struct fs_xq xq;   /* row 0, as in struct fs_few */
	const float *bias; /* of the panel's first output, or NULL */
	float *y;          /* row 0, the panel's first output */
	int64_t ldy;
	bool add;
};

struct fs_kernels {
	const char *name;
	void (*rms_norm)(const float *x, const float *w, float *y, int64_t n, int64_t dim, float eps);
	void (*layer_norm)(
	        const float *x, const float *w, const float *b, float *y, int64_t n, int64_t dim, float eps);
	void (*rope)(const struct fs_rope *r, const float *cs, float *x, int64_t stride, int64_t n, int heads,
	        int head_dim);
	void (*act)(enum fs_act act, float *x, int64_t n);
	void (*gate)(enum fs_act act, const float *gate, const float *up, float *y, int64_t n);
	void (*add)(float *y, const float *x, int64_t n);
	void (*to_f16)(const float *x, uint16_t *y, int64_t n);
	void (*to_bf16)(const float *x, uint16_t *y, int64_t n);
	/* Any readable type to f32; n is a multiple of its block. */
	void (*dequantize)(enum fs_dtype type, const void *src, float *dst, int64_t n);
	void (*dequantize_bf16)(enum fs_dtype type, const void *src, uint16_t *dst, int64_t n);
	/* One activation row to int8; in is a multiple of 32. */
	void (*quantize)(const float *x, struct fs_xq *xq, int64_t in);
	void (*few_f32)(const struct fs_few *f); /* f32 arithmetic, any type */
	void (*few_q8)(const struct fs_few *f);  /* int8 activations; quantised types only */
	/* Quantised weights with many rows in int8, or NULL: bytes of a panel, unpacking of w (outs rows,
	 * row_bytes apart), product. */
	size_t (*panel_bytes)(enum fs_dtype type, int64_t in);
	void (*panel_pack)(
	        enum fs_dtype type, const uint8_t *w, size_t row_bytes, int outs, int64_t in, uint8_t *panel);
	void (*panel_multiply)(const struct fs_tile *t);
	/* Queries q0..q1-1 of heads h0..h1-1, which share a kv head; (q1 - q0)·(h1 - h0) <= FS_ATTN_ROWS.
	 * scratch: fs_attn_scratch_bytes, 64-byte aligned. */
	void (*attention)(const struct fs_attn *a, int h0, int h1, int64_t q0, int64_t q1, void *scratch);
};
extern const struct fs_kernels fs_kernels_scalar;
extern const struct fs_kernels fs_kernels_avx2;
extern const struct fs_kernels fs_kernels_avx512;

/* Rows (queries times heads) and keys that one attention task holds at a time. */
#define FS_ATTN_ROWS 128
#define FS_ATTN_KEYS 64
size_t fs_attn_scratch_bytes(int head_dim);

/* Types that few_q8 takes. */
static inline bool fs_is_quantized(enum fs_dtype t)
{
	return t != FS_F32 && t != FS_F16 && t != FS_BF16;
}

/* Names of one level: FS_LV(rms_norm) is fs_rms_norm_avx2 in the files compiled for AVX2. */
#define FS_PASTE2(a, b) a##_##b
#define FS_PASTE(a, b) FS_PASTE2(a, b)
#ifdef FS_LEVEL
#if FS_LEVEL == 0
#define FS_LEVEL_NAME scalar
#elif FS_LEVEL == 1
#define FS_LEVEL_NAME avx2
#else
#define FS_LEVEL_NAME avx512
#endif
#define FS_LV(name) FS_PASTE(fs_##name, FS_LEVEL_NAME)

void FS_LV(to_bf16)(const float *x, uint16_t *y, int64_t n);
void FS_LV(dequantize)(enum fs_dtype type, const void *src, float *dst, int64_t n);
void FS_LV(dequantize_bf16)(enum fs_dtype type, const void *src, uint16_t *dst, int64_t n);
void FS_LV(quantize)(const float *x, struct fs_xq *xq, int64_t in);
void FS_LV(few_f32)(const struct fs_few *f);
void FS_LV(few_q8)(const struct fs_few *f);
size_t FS_LV(panel_bytes)(enum fs_dtype type, int64_t in);
void FS_LV(panel_pack)(
        enum fs_dtype type, const uint8_t *w, size_t row_bytes, int outs, int64_t in, uint8_t *panel);
void FS_LV(panel_multiply)(const struct fs_tile *t);
void FS_LV(attention)(const struct fs_attn *a, int h0, int h1, int64_t q0, int64_t q1, void *scratch);
#endif

#endif
