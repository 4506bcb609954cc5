/*
 * gguf: reads GGUF v2 and v3 files (the container of llama.cpp; format: ggml's gguf.h), split files included,
 * and knows the layouts of the tensor types. Owns the memory maps; every pointer it hands out lives until
 * fs_gguf_close. Every length, count and offset is checked against the file before it is used. Read-only
 * after opening, so any thread may read. It refuses: big-endian files, versions 1 and > 3, duplicate names,
 * tensors of a type it can not size.
 */
#ifndef FS_COMMON_GGUF_H
#define FS_COMMON_GGUF_H

#include "common/base/base.h"

/* Values are ggml's type ids. */
enum fs_dtype {
	FS_F32 = 0,
	FS_F16 = 1,
	FS_Q4_0 = 2,
	FS_Q4_1 = 3,
	FS_Q5_0 = 6,
	FS_Q5_1 = 7,
	FS_Q8_0 = 8,
	FS_Q4_K = 12,
	FS_Q5_K = 13,
	FS_Q6_K = 14,
	FS_BF16 = 30,
};

struct fs_dtype_info {
	const char *name;     /* "Q4_K" */
	uint32_t block_elems; /* 1, 32 or 256 */
	uint32_t block_bytes;
};
/* NULL for a type that this program can not compute with. */
const struct fs_dtype_info *fs_dtype_info(int type);
/* Bytes of one row of n elements; 0 when n is no multiple of the block. */
size_t fs_dtype_row_bytes(enum fs_dtype type, int64_t n);
/* The scalar reference: n elements (a multiple of the block) of any readable type to f32. */
void fs_dequantize_row(enum fs_dtype type, const void *src, float *dst, int64_t n);
/* f32 to type, for tests, converters and KV caches: F32, F16, BF16 (round to nearest even) and Q8_0;
 * FS_ENOTSUP else. */
int fs_quantize_row(enum fs_dtype type, const float *src, void *dst, int64_t n);

/* IEEE half and bfloat16, round to nearest even, NaN kept. */
float fs_f16_to_f32(uint16_t h);
uint16_t fs_f32_to_f16(float f);
static inline float fs_bf16_to_f32(uint16_t h)
{
	union {
		uint32_t u;
		float f;
	} v = {.u = (uint32_t)h << 16};
	return v.f;
}
uint16_t fs_f32_to_bf16(float f);

struct fs_gguf;

struct fs_gguf_tensor {
	const char *name;
	enum fs_dtype type;
	uint32_t n_dims;
	int64_t ne[4];    /* ne[0] is the row length (fastest); missing dimensions are 1 */
	const void *data; /* in the map; aligned to general.alignment */
	size_t nbytes;
};

/*
 * Opens one file, or the first part of a split model ("<prefix>-00001-of-000NN.gguf"; the siblings are found
 * beside it, metadata is the first part's). Errors name the file and what is wrong: FS_EIO, FS_EFORMAT,
 * FS_ENOTSUP (an unknown tensor type is an error only when such a tensor is asked for).
 */
int fs_gguf_open(struct fs_gguf **out, const char *path, struct fs_errbuf *e);
void fs_gguf_close(struct fs_gguf *g); /* NULL is fine */
/*
 * For programs, once at their start: a model file that is overwritten or cut in place while it is open ends
 * the process with this status and a line on stderr that names the file, where it would die by SIGBUS
 * without a word. Nothing can be saved then: the weights are gone. (A file that is replaced by renaming is
 * no trouble, the old one stays until it is closed.)
 */
#define FS_GGUF_CHANGED_STATUS 74 /* sysexits.h's EX_IOERR */
void fs_gguf_name_changed_files(void);
/* Sum of tensor bytes. */
uint64_t fs_gguf_tensor_bytes(const struct fs_gguf *g);
/* 32 hex digits and NUL: SHA-256 (first 16 bytes) over all metadata, the tensor table and the first 4 KiB of
 * each tensor. Tells models apart; it is no checksum of the whole file. */
int fs_gguf_fingerprint(const struct fs_gguf *g, char out[33], struct fs_errbuf *e);

/* ---- metadata. Typed getters convert between integer widths when the value fits. FS_ENOTFOUND when the key
 * is absent, FS_EFORMAT when it has another type or does not fit; both name the key. ---- */
int fs_gguf_u32(const struct fs_gguf *g, const char *key, uint32_t *out, struct fs_errbuf *e);
int fs_gguf_u64(const struct fs_gguf *g, const char *key, uint64_t *out, struct fs_errbuf *e);
int fs_gguf_i32(const struct fs_gguf *g, const char *key, int32_t *out, struct fs_errbuf *e);
int fs_gguf_f32(const struct fs_gguf *g, const char *key, float *out, struct fs_errbuf *e);
int fs_gguf_bool(const struct fs_gguf *g, const char *key, bool *out, struct fs_errbuf *e);
/* A NUL-terminated copy owned by g is not made: s points into the map, *len bytes, not terminated. */
int fs_gguf_str(const struct fs_gguf *g, const char *key, const char **s, size_t *len, struct fs_errbuf *e);
bool fs_gguf_has(const struct fs_gguf *g, const char *key);

/* Arrays: the count first, then elements by index (index < count, else FS_EINVAL). */
int fs_gguf_arr_len(const struct fs_gguf *g, const char *key, size_t *count, struct fs_errbuf *e);
int fs_gguf_arr_f32(const struct fs_gguf *g, const char *key, float *out, size_t count,
        struct fs_errbuf *e); /* first count, f32/f64/ints */
int fs_gguf_arr_i32(
        const struct fs_gguf *g, const char *key, int32_t *out, size_t count, struct fs_errbuf *e);

/* Arrays of strings are walked, since strings have no fixed size. */
struct fs_gguf_strs {
	const struct fs_gguf *g;
	size_t left; /* strings not yet read */
	const uint8_t *pos;
};
int fs_gguf_arr_strs(const struct fs_gguf *g, const char *key, struct fs_gguf_strs *it, struct fs_errbuf *e);
bool fs_gguf_strs_next(struct fs_gguf_strs *it, const char **s, size_t *len);

/* ---- tensors ---- */
size_t fs_gguf_n_tensors(const struct fs_gguf *g);
/* Whether there is one of that name, of whatever type: what may be absent is asked for so, since one that can
 * not be read must not pass for absent. */
bool fs_gguf_has_tensor(const struct fs_gguf *g, const char *name);
/* NULL when there is none of that name (or its type is unknown: then fs_gguf_need says so). */
const struct fs_gguf_tensor *fs_gguf_tensor(const struct fs_gguf *g, const char *name);
const struct fs_gguf_tensor *fs_gguf_tensor_at(const struct fs_gguf *g, size_t i);
/* A tensor that must exist with these dimensions (0 = any); expected and actual shape are in the error. */
int fs_gguf_need(const struct fs_gguf *g, const char *name, int64_t ne0, int64_t ne1,
        const struct fs_gguf_tensor **out, struct fs_errbuf *e);
/* Part of a tensor as one of its own: elements first .. first + n of a vector (axis 0; not of a quantised
 * type), rows first .. first + n of a matrix (axis 1). They must be there. */
struct fs_gguf_tensor fs_gguf_part(const struct fs_gguf_tensor *t, int axis, int64_t first, int64_t n);

/* ---- stubs: what a model says of itself, without its weights ---- */

struct fs_gguf_stub_info {
	size_t n_keys, n_tensors;
	uint64_t bytes_in, bytes_out; /* of the file that was read, of the one that was written */
};
/*
 * Writes a stub of a text model: all metadata and its vocabulary as they are, and its tensor table with every
 * tensor cut to one f32, at consecutive aligned offsets. split.no is 0 and split.count 1: of a split model
 * the first part is read alone. Readers that want vocabulary and sizes only take it for the model. The file
 * appears whole or not at all (a file of that name is replaced), and only metadata and table of the model are
 * read. It refuses: later parts, files without a vocabulary, and to write over the model or over anything but
 * a regular file. info may be NULL.
 */
int fs_gguf_write_stub(
        const char *model, const char *stub, struct fs_gguf_stub_info *info, struct fs_errbuf *e);

#endif
