/*
 * graph: the forward pass of the dense decoder that llama, qwen2, qwen2vl and qwen3 share. Internal to the
 * engine. One thread: the device's. Scratch is allocated once, for the largest batch; a pass allocates
 * nothing.
 */
#ifndef FS_ENGINE_GRAPH_H
#define FS_ENGINE_GRAPH_H

#include "server/engine/kv.h"

struct fs_graph {
	struct fs_dev *dev;
	const struct fs_model *m; /* outlives the graph */
	struct fs_kv *kv;         /* as well */
	int32_t max_rows;
	/* [dev], rows of the batch: */
	float *x, *h;       /* [max_rows][n_embd] residual stream; normed input of a block */
	float *q, *att;     /* [max_rows][heads·head_dim] */
	float *k, *v;       /* [max_rows][kv_heads·head_dim] */
	float *gate, *up;   /* [max_rows][n_ff] */
	float *cs;          /* [max_rows][n_pairs][2] */
	int32_t *ids, *pos; /* [max_rows], [n_axes][max_rows] (planes of the batch's n) */
	int32_t *
	        step; /* [2 + n_axes] of a single token: cells before it, its id, its position on each axis */
	float *logits; /* [max_logits][n_vocab] */
	int32_t max_logits;
	int32_t *host_ids, *host_pos; /* staging, same shapes */
	int32_t n;                    /* rows of the last pass; x[keep .. n) are its outputs */
	int32_t keep;
	bool have_logits; /* of the last pass, a token's: they were computed with it */
};

/* Bytes of the device's memory that fs_graph_init will take. */
uint64_t fs_graph_bytes(const struct fs_model *m, int32_t max_rows, int32_t max_logits);
/* max_logits: rows that fs_graph_logits may be asked for at once. */
int fs_graph_init(struct fs_graph *g, const struct fs_model *m, struct fs_kv *kv, int32_t max_rows,
        int32_t max_logits, struct fs_errbuf *e);
void fs_graph_finish(struct fs_graph *g);

/*
 * Cells first .. first + n of p (n <= max_rows, first == kv->used, first + n <= n_ctx) through all layers,
 * then committed to the cache. keep: rows keep .. n of the batch will be asked for by fs_graph_logits, so the
 * last layer computes nothing for those before (n = none). FS_ECANCELLED: the token fired between layers;
 * nothing is committed. FS_EINTERNAL: the device.
 */
int fs_graph_prompt(struct fs_graph *g, const struct fs_prompt *p, int32_t first, int32_t n, int32_t keep,
        struct fs_cancel *cancel, struct fs_errbuf *e);
/* One token at a position, and its logits. kv->used < n_ctx. Same results, but that nothing is waited for:
 * what the device has to say comes with fs_graph_logits. */
int fs_graph_token(
        struct fs_graph *g, int32_t id, int32_t pos, struct fs_cancel *cancel, struct fs_errbuf *e);
/* Logits of rows row .. row + n of the last pass (keep <= row), n <= max_logits, to out[n][n_vocab] on the
 * host. */
int fs_graph_logits(struct fs_graph *g, int32_t row, int32_t n, float *out, struct fs_errbuf *e);

#endif
