/*
 * model: hyperparameters and weights of a text model, from GGUF. Internal to the engine. The weights belong
 * to the device's thread; the hyperparameters are read-only after fs_model_open.
 */
#ifndef FS_ENGINE_MODEL_H
#define FS_ENGINE_MODEL_H

#include "common/compute/compute.h"

enum fs_arch { FS_ARCH_LLAMA, FS_ARCH_QWEN2, FS_ARCH_QWEN2VL, FS_ARCH_QWEN3 };

struct fs_hparams {
	enum fs_arch arch;
	const char *arch_name; /* static */
	int32_t n_vocab, n_ctx_train, n_embd, n_layer, n_ff;
	int32_t heads, kv_heads, head_dim; /* width of q: heads·head_dim; of k and v: kv_heads·head_dim */
	float rms_eps, attn_scale;
	bool mrope; /* pictures have grid positions; position planes are t, h, w (and a constant 0) */
};

struct fs_layer {
	float *attn_norm, *ffn_norm; /* [n_embd] */
	struct fs_weight q, k, v, o; /* [heads·hd][n_embd], [kv_heads·hd][n_embd] twice, [n_embd][heads·hd] */
	float *q_bias, *k_bias, *v_bias, *o_bias; /* NULL = none */
	float *q_norm, *k_norm;                   /* [head_dim], qwen3; else NULL */
	struct fs_weight gate, up, down;          /* [n_ff][n_embd] twice, [n_embd][n_ff] */
	float *gate_bias, *up_bias, *down_bias;
};

struct fs_model {
	struct fs_gguf *gguf; /* owned: weights may point into its map */
	struct fs_dev *dev;   /* not owned; NULL: the weights are not loaded */
	struct fs_hparams hp;
	struct fs_rope rope;
	struct fs_weight tok_embd; /* [n_vocab][n_embd] */
	float *out_norm;           /* [n_embd] */
	struct fs_weight output;   /* [n_vocab][n_embd]; untied models only */
	bool tied;                 /* logits come from tok_embd */
	float *out_bias;           /* [n_vocab] or NULL */
	struct fs_layer *layers;   /* [n_layer] */
};

/* Hyperparameters alone: FS_ENOTSUP for an architecture or variant that this program can not run, naming
 * those that it can. */
int fs_hparams_read(
        const struct fs_gguf *g, struct fs_hparams *hp, struct fs_rope *rope, struct fs_errbuf *e);
/* The file and its hyperparameters, without weights. m is zeroed first and need not be finished on failure.
 * Errors name the file. */
int fs_model_open(struct fs_model *m, const char *path, struct fs_errbuf *e);
/* Bytes of dev's memory that the weights will take; 0 where they are used from the file's own pages. Errors
 * as of fs_model_load, so that a file that lacks something is refused before anything is allocated. */
int fs_model_bytes(struct fs_model *m, struct fs_dev *dev, uint64_t *out, struct fs_errbuf *e);
/* All weights onto dev, and back. What the file says stays, so that they can be loaded onto another device.
 */
int fs_model_load(struct fs_model *m, struct fs_dev *dev, struct fs_errbuf *e);
void fs_model_unload(struct fs_model *m);
void fs_model_finish(struct fs_model *m);
static inline const struct fs_weight *fs_model_output(const struct fs_model *m)
{
	return m->tied ? &m->tok_embd : &m->output;
}

#endif
