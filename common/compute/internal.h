/*
 * compute, inside: the table that a back end fills and the part of a device that all back ends share. Only
 * files of common/compute and their tests include it. Everything runs on the thread that owns the device.
 */
#ifndef FS_COMMON_COMPUTE_INTERNAL_H
#define FS_COMMON_COMPUTE_INTERNAL_H

#include "common/compute/compute.h"

/* Arguments were checked by compute.c: sizes are not negative, n is at least 1. An operation that fails calls
 * fs_dev_fail. */
struct fs_dev_ops {
	void (*close)(struct fs_dev *d);
	void (*wait)(struct fs_dev *d); /* until all queued work is done */
	int (*alloc)(struct fs_dev *d, size_t bytes, void **out, struct fs_errbuf *e);
	void (*release)(struct fs_dev *d, void *p);
	void (*upload)(struct fs_dev *d, void *dst, const void *src, size_t bytes);
	void (*download)(struct fs_dev *d, void *dst, const void *src, size_t bytes);
	void (*copy)(struct fs_dev *d, void *dst, const void *src, size_t bytes);
	int (*weight_load)(struct fs_dev *d, const struct fs_gguf_tensor *t, bool expect_packed,
	        struct fs_weight *w, struct fs_errbuf *e);
	void (*weight_finish)(struct fs_dev *d, struct fs_weight *w);
	void (*matmul)(struct fs_dev *d, const struct fs_weight *w, const float *bias, const float *x,
	        float *y, int64_t n, bool add);
	void (*embed)(struct fs_dev *d, const struct fs_weight *w, const int32_t *ids, float *y, int64_t n);
	void (*rms_norm)(struct fs_dev *d, const float *x, const float *w, float *y, int64_t n, int64_t dim,
	        float eps);
	void (*layer_norm)(struct fs_dev *d, const float *x, const float *w, const float *b, float *y,
	        int64_t n, int64_t dim, float eps);
	void (*rope_angles)(
	        struct fs_dev *d, const struct fs_rope *r, const int32_t *pos, float *cs, int64_t n);
	void (*rope)(struct fs_dev *d, const struct fs_rope *r, const float *cs, float *x, int64_t stride,
	        int64_t n, int heads, int head_dim);
	void (*kv_store)(struct fs_dev *d, const struct fs_kv_store *k);
	void (*attention)(struct fs_dev *d, const struct fs_attn *a);
	void (*act)(struct fs_dev *d, enum fs_act act, float *x, int64_t n);
	void (*gate)(
	        struct fs_dev *d, enum fs_act act, const float *gate, const float *up, float *y, int64_t n);
	void (*add)(struct fs_dev *d, float *y, const float *x, int64_t n);
	/* NULL where the device has no such thing: */
	bool (*replay)(struct fs_dev *d, uint64_t key);
	void (*recorded)(struct fs_dev *d);
	void (*forget)(struct fs_dev *d);
	void (*pace)(struct fs_dev *d); /* NULL on a GPU: wait */
	bool (*memory)(struct fs_dev *d, uint64_t *free_bytes, uint64_t *total_bytes);
	uint64_t (*weight_bytes)(const struct fs_dev *d, const struct fs_gguf_tensor *t, bool expect_packed);
};

/* First member of every back end's own device struct. */
struct fs_dev {
	const struct fs_dev_ops *ops;
	int err; /* sticky: FS_OK or the first failure, whose text is in err_text */
	struct fs_errbuf err_text;
	enum fs_precision precision;
	int threads;
	bool is_gpu;
	bool lost; /* for good */
	bool hung; /* lost, since it did not answer */
	char name[16];
	char describe[96];
};

/* Makes err sticky unless one already is. */
void fs_dev_fail(struct fs_dev *d, int err, const char *fmt, ...) FS_PRINTF(3, 4);

int fs_cpu_open(const struct fs_dev_opts *o, struct fs_dev **out, struct fs_errbuf *e);
/* Where FS_CUDA is defined. The device is "auto", "cuda" or "cuda:N" with N below 100. */
int fs_cuda_open(const struct fs_dev_opts *o, struct fs_dev **out, struct fs_errbuf *e);

#endif
