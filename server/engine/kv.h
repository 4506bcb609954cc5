/*
 * kv: the KV cache of one sequence, and what its cells hold, so that the longest common prefix of the next
 * prompt need not be computed again. Internal to the engine. One thread: the device's.
 */
#ifndef FS_ENGINE_KV_H
#define FS_ENGINE_KV_H

#include "server/engine/prompt.h"

struct fs_kv_pic {
	int32_t first, n; /* its cells; the last may have been cut off */
	int32_t nx, ny;
	uint8_t key[32];
};
struct fs_kv {
	struct fs_dev *dev;
	void **k, **v; /* [n_layer], each [dev][n_ctx][width] of type */
	int32_t n_layer, n_ctx;
	int64_t width;      /* kv_heads · head_dim */
	enum fs_dtype type; /* FS_F16, or FS_F32 for exact products */
	int32_t used;       /* cells 0 .. used hold what ids says */
	int32_t *ids;       /* [n_ctx]; -1 - i: a row of pics[i] */
	struct fs_kv_pic *pics;
	int32_t n_pics, cap_pics;
};

int fs_kv_init(struct fs_kv *kv, struct fs_dev *dev, const struct fs_hparams *hp, int32_t n_ctx, bool f32,
        struct fs_errbuf *e);
void fs_kv_finish(struct fs_kv *kv);
/* Of the cells of so large a context; what fs_kv_init takes of the device. */
uint64_t fs_kv_bytes(const struct fs_hparams *hp, int32_t n_ctx, bool f32);

/* Length of the prefix of p that the cache holds. Pictures are the same when key and shape are. */
int32_t fs_kv_common(const struct fs_kv *kv, const struct fs_prompt *p);
/* Forgets the cells from n on. */
void fs_kv_truncate(struct fs_kv *kv, int32_t n);
/* Room for p's pictures in the records, so that fs_kv_commit can not fail. */
int fs_kv_reserve(struct fs_kv *kv, const struct fs_prompt *p, struct fs_errbuf *e);
/* Cells first .. first + n of p have been computed by every layer; first is used, and first + n <= n_ctx. */
void fs_kv_commit(struct fs_kv *kv, const struct fs_prompt *p, int32_t first, int32_t n);
/* One more token has been computed. used < n_ctx. */
void fs_kv_commit_token(struct fs_kv *kv, int32_t id);

#endif
