/* encoder internals: the tower's hyper-parameters, weights and graph, and the preprocessing; for this folder
 * and its tests. */
#ifndef FS_ENCODER_TOWER_H
#define FS_ENCODER_TOWER_H

#include "common/compute/compute.h"

/* ---- hparams.c ---- */

struct vision_hparams {
	int n_embd, n_heads, n_layers, n_ff;
	int head_dim;     /* n_embd / n_heads */
	int patch, merge; /* pixels a side; patches a side that become one row */
	int n_out;        /* floats of a row, from the last projector weight */
	float eps;        /* of every LayerNorm */
	enum fs_act act;  /* of the layers */
	float mean[3], std[3];
	int64_t min_pixels, max_pixels;
};

int vision_hparams_read(const struct fs_gguf *g, struct vision_hparams *h, struct fs_errbuf *e);

/* ---- preprocess.c ---- */

/* One picture, ready for the tower: patches in merge order, that is, block (by, bx) raster, inside it patch
 * (dy, dx) raster. */
struct patches {
	float *data; /* [n][3 · patch · patch]: channel, y, x; normalised; malloc'd */
	int64_t n;   /* gw · gh */
	int gw, gh;  /* grid in patches; both multiples of merge */
};
void patches_finish(struct patches *p);

/* Sides for a picture of w x h, multiples of factor: see docs/ENCODER.md. FS_EINVAL for pictures too long. */
int smart_resize(int w, int h, int factor, int64_t min_pixels, int64_t max_pixels, int *out_w, int *out_h,
        struct fs_errbuf *e);
int preprocess(const struct vision_hparams *h, const void *picture, size_t n, int64_t min_pixels,
        int64_t max_pixels, struct fs_cancel *cancel, struct patches *out, struct fs_errbuf *e);
/* A grey picture of gw x gh patches. */
int patches_grey(const struct vision_hparams *h, int gw, int gh, struct patches *out, struct fs_errbuf *e);

/* ---- weights.c ---- */

struct linear { /* y = W x + b */
	struct fs_weight w;
	float *b; /* [dev] [out], or NULL */
};
struct norm {
	float *w, *b; /* [dev] [n_embd]; b may be NULL */
};
struct tower_layer {
	struct norm ln1, ln2;
	struct linear q, k, v, out, up, down;
};
struct tower {
	struct vision_hparams h;
	struct fs_dev *d;
	float *kernel; /* host, [n_embd][3 · patch · patch]: the sum of the two temporal kernels; patch points
	                  into it on the CPU */
	struct linear patch;
	struct tower_layer *layers; /* [n_layers] */
	struct norm post_ln;
	struct linear merge1, merge2; /* merge² · n_embd -> same -> n_out */
	struct fs_rope rope;
};
/* Bytes of d's memory that the weights will take; errors as of tower_init. */
int tower_bytes(struct fs_dev *d, const struct fs_gguf *g, const struct vision_hparams *h, uint64_t *out,
        struct fs_errbuf *e);
/* h is read already; g must outlive the tower (weights may stay in its map). On failure everything is given
 * back. */
int tower_init(struct tower *t, struct fs_dev *d, const struct fs_gguf *g, const struct vision_hparams *h,
        struct fs_errbuf *e);
void tower_finish(struct tower *t);

/* ---- tower.c ---- */

/* Bytes of d's memory that a picture of n patches takes while it is encoded. */
uint64_t tower_work_bytes(const struct fs_dev *d, const struct vision_hparams *h, int64_t n);
/* rows: host, [p->n / merge²][n_out], raster order of the blocks. */
int tower_run(const struct tower *t, const struct patches *p, struct fs_cancel *cancel, float *rows,
        struct fs_errbuf *e);

#endif
