/*
 * gguf internals, shared by the files of this folder alone.
 */
#ifndef FS_GGUF_INTERNAL_H
#define FS_GGUF_INTERNAL_H

#include "common/gguf/gguf.h"

#include <stdio.h>

/* Limits on what a file may announce; far above any model that exists. */
#define GGUF_MAX_KV 65536
#define GGUF_MAX_TENSORS 262144
#define GGUF_MAX_NAME 63 /* bytes of a tensor's name, as ggml has it */
#define GGUF_MAX_KEY 65535
#define GGUF_MAX_PARTS 1000
#define GGUF_MAX_ALIGNMENT (1u << 24)

enum gguf_value_type {
	GGUF_U8,
	GGUF_I8,
	GGUF_U16,
	GGUF_I16,
	GGUF_U32,
	GGUF_I32,
	GGUF_F32,
	GGUF_BOOL,
	GGUF_STRING,
	GGUF_ARRAY,
	GGUF_U64,
	GGUF_I64,
	GGUF_F64,
	GGUF_N_TYPES,
};

struct gguf_kv {
	const char *key; /* in the map, key_len bytes, no NUL inside or behind */
	size_t key_len;
	int32_t type;        /* enum gguf_value_type */
	int32_t elem;        /* of an array, else equal to type */
	uint64_t count;      /* of an array; bytes of a string; else 1 */
	const uint8_t *data; /* first value byte: of a string or array, what follows the counts */
};

struct gguf_part {
	char *path;
	uint8_t *map;
	size_t size;
	size_t table_end;   /* bytes of header, metadata and tensor table */
	size_t data_start;  /* of the blob; may lie at the file's end when there are no tensors */
	struct gguf_kv *kv; /* sorted by key */
	size_t n_kv;
};

struct fs_gguf {
	char *path;
	struct gguf_part *parts;
	size_t n_parts;
	struct fs_gguf_tensor
	        *tensors; /* table order; of unknown types with data NULL and nbytes 0. names are ours */
	struct fs_gguf_tensor **by_name;
	size_t n_tensors;
};

/* As fs_gguf_open; without siblings, the other parts of a split model are left alone. */
int gguf_open(struct fs_gguf **out, const char *path, bool siblings, struct fs_errbuf *e);
/* The stub of g's first part, to the end of f; the caller looks at ferror. */
int gguf_stub(const struct fs_gguf *g, FILE *f, struct fs_gguf_stub_info *info, struct fs_errbuf *e);

/* Bytes of a value of fixed size; 0 for strings, arrays and unknown types. */
size_t gguf_value_size(int32_t type);
const char *gguf_value_name(int32_t type);

/* Parses header, metadata and tensor table of part->map and appends the tensors to g. path is for the error
 * text. */
int gguf_parse_part(struct fs_gguf *g, struct gguf_part *part, const char *path, struct fs_errbuf *e);
/* Frees what parsing allocated; the map is the caller's. */
void gguf_part_finish(struct gguf_part *part);

/* guard.c: between the two, a fault in the map is named by the part's path. */
void gguf_guard_add(const struct gguf_part *part);
void gguf_guard_remove(const struct gguf_part *part);

const struct gguf_kv *gguf_find(const struct gguf_part *part, const char *key);
/* Any integer type as int64 (a u64 past INT64_MAX does not fit). FS_ENOTFOUND, FS_EFORMAT. */
int gguf_int(const struct gguf_part *part, const char *key, int64_t *out, struct fs_errbuf *e);

#endif
