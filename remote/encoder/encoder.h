/*
 * encoder: a picture's bytes in, embedding rows out. Owns the mmproj file, the device and the weights on it.
 * An encoder belongs to the one thread that opened it (its device does); only the cancel token may be fired
 * from elsewhere. It refuses projectors other than qwen2vl_merger, pictures longer than 200 times their
 * width, and whatever common/image refuses.
 */
#ifndef FS_REMOTE_ENCODER_H
#define FS_REMOTE_ENCODER_H

#include "common/compute/compute.h"
#include "common/wire/wire.h"

struct fs_encoder;

struct fs_encoder_opts {
	const char *mmproj;         /* path of the GGUF file with tower and projector */
	const char *model;          /* text model whose row width must fit; NULL: not checked */
	const char *device;         /* as fs_dev_opts; NULL: "cpu", or any GPU when gpu is set */
	bool gpu;                   /* nothing but a GPU will do */
	int threads;                /* 0: the cores that this process may use */
	int min_tokens, max_tokens; /* 0: the file's, else the architecture's published 4 and 1280 */
	enum fs_precision precision;
};

struct fs_encoder_facts {
	int32_t n_embd;       /* floats of a row */
	char fingerprint[33]; /* of the mmproj */
	char device[64];      /* "cpu", "cuda:0" */
	bool gpu;
	int32_t min_tokens, max_tokens; /* rows of a picture; see docs/ENCODER.md for very long pictures */
};

int fs_encoder_open(const struct fs_encoder_opts *o, struct fs_encoder **out, struct fs_errbuf *e);
void fs_encoder_close(struct fs_encoder *v); /* NULL is fine */
const struct fs_encoder_facts *fs_encoder_facts(const struct fs_encoder *v);

/* What the tower took of the last picture's time; the rest went into reading and resizing it. */
int64_t fs_encoder_tower_ns(const struct fs_encoder *v);
/* Of the GPU; false on the CPU. */
bool fs_encoder_memory(struct fs_encoder *v, uint64_t *free_bytes, uint64_t *total_bytes);
/* The device failed in a way that it does not recover from: nothing is left but to close it. */
bool fs_encoder_lost(const struct fs_encoder *v);

/* Encodes a grey picture of the largest size, so that a GPU's memory is taken and its kernels are loaded. */
int fs_encoder_warm_up(struct fs_encoder *v, struct fs_errbuf *e);

/*
 * min_tokens, max_tokens: 0 or bounds for this picture alone. *rows is malloc'd,
 * [shape->n_tokens][shape->n_embd], raster order. FS_ECANCELLED soon after the token fires: it is looked at
 * between steps of some 10 ms, in reading and resizing as in the tower.
 */
int fs_encoder_encode(struct fs_encoder *v, const void *picture, size_t n, int min_tokens, int max_tokens,
        struct fs_cancel *cancel, struct fs_rows_shape *shape, float **rows, struct fs_errbuf *e);

#endif
