/*
 * Builds GGUF files in memory, for tests: a header, metadata, tensors, in the order of the calls. Bytes are
 * written as the format says, with no help from the reader under test. One thread; asserts on out of memory.
 */
#ifndef FS_TEST_GGUF_MAKE_H
#define FS_TEST_GGUF_MAKE_H

#include "common/gguf/gguf.h"

#include <stdio.h>
#include <string.h>

struct gguf_make {
	struct fs_buf kv, table, blob, file;
	uint64_t n_kv, n_tensors;
	uint32_t version;
	size_t alignment;
};

static inline void gm_init(struct gguf_make *m)
{
	memset(m, 0, sizeof(*m));
	fs_buf_init(&m->kv, 1 << 26);
	fs_buf_init(&m->table, 1 << 26);
	fs_buf_init(&m->blob, 1 << 28);
	fs_buf_init(&m->file, 1 << 28);
	m->version = 3;
	m->alignment = 32;
}

static inline void gm_finish(struct gguf_make *m)
{
	fs_buf_finish(&m->kv);
	fs_buf_finish(&m->table);
	fs_buf_finish(&m->blob);
	fs_buf_finish(&m->file);
}

static inline void gm_bytes(struct fs_buf *b, const void *p, size_t n)
{
	FS_ASSERT(fs_buf_append(b, p, n) == FS_OK);
}

static inline void gm_string(struct fs_buf *b, const char *s)
{
	uint64_t n = strlen(s);

	gm_bytes(b, &n, 8);
	gm_bytes(b, s, n);
}

static inline void gm_kv(struct gguf_make *m, const char *key, int32_t type, const void *value, size_t n)
{
	gm_string(&m->kv, key);
	gm_bytes(&m->kv, &type, 4);
	gm_bytes(&m->kv, value, n);
	m->n_kv++;
}

static inline void gm_u32(struct gguf_make *m, const char *key, uint32_t v)
{
	gm_kv(m, key, 4, &v, 4);
}

static inline void gm_u16(struct gguf_make *m, const char *key, uint16_t v)
{
	gm_kv(m, key, 2, &v, 2);
}

static inline void gm_i32(struct gguf_make *m, const char *key, int32_t v)
{
	gm_kv(m, key, 5, &v, 4);
}

static inline void gm_f32(struct gguf_make *m, const char *key, float v)
{
	gm_kv(m, key, 6, &v, 4);
}

static inline void gm_bool(struct gguf_make *m, const char *key, bool v)
{
	uint8_t b = v;

	gm_kv(m, key, 7, &b, 1);
}

static inline void gm_str(struct gguf_make *m, const char *key, const char *s)
{
	gm_kv(m, key, 8, "", 0);
	gm_string(&m->kv, s);
}

/* Elements of a fixed size. */
static inline void gm_arr(
        struct gguf_make *m, const char *key, int32_t elem, const void *v, uint64_t count, size_t size)
{
	gm_kv(m, key, 9, &elem, 4);
	gm_bytes(&m->kv, &count, 8);
	gm_bytes(&m->kv, v, count * size);
}

static inline void gm_arr_str(struct gguf_make *m, const char *key, const char *const *s, uint64_t count)
{
	int32_t elem = 8;

	gm_kv(m, key, 9, &elem, 4);
	gm_bytes(&m->kv, &count, 8);
	for (uint64_t i = 0; i < count; i++)
		gm_string(&m->kv, s[i]);
}

static inline void gm_table_entry(struct gguf_make *m, const char *name, int32_t type, const int64_t *ne,
        uint32_t n_dims, uint64_t offset)
{
	gm_string(&m->table, name);
	gm_bytes(&m->table, &n_dims, 4);
	gm_bytes(&m->table, ne, n_dims * 8);
	gm_bytes(&m->table, &type, 4);
	gm_bytes(&m->table, &offset, 8);
	m->n_tensors++;
}

/* Appends the data, padded to the alignment. */
static inline void gm_tensor(struct gguf_make *m, const char *name, int32_t type, const int64_t *ne,
        uint32_t n_dims, const void *data, size_t n)
{
	static const uint8_t zeros[4096];

	gm_table_entry(m, name, type, ne, n_dims, m->blob.len);
	gm_bytes(&m->blob, data, n);
	gm_bytes(&m->blob, zeros, (m->alignment - n % m->alignment) % m->alignment);
}

/* Puts the parts together; m->file holds the file until gm_finish. */
static inline void gm_build(struct gguf_make *m)
{
	static const uint8_t zeros[4096];

	fs_buf_clear(&m->file);
	gm_bytes(&m->file, "GGUF", 4);
	gm_bytes(&m->file, &m->version, 4);
	gm_bytes(&m->file, &m->n_tensors, 8);
	gm_bytes(&m->file, &m->n_kv, 8);
	if (m->kv.len > 0)
		gm_bytes(&m->file, m->kv.data, m->kv.len);
	if (m->table.len > 0)
		gm_bytes(&m->file, m->table.data, m->table.len);
	gm_bytes(&m->file, zeros, (m->alignment - m->file.len % m->alignment) % m->alignment);
	if (m->blob.len > 0)
		gm_bytes(&m->file, m->blob.data, m->blob.len);
}

static inline void gm_write(const char *path, const void *bytes, size_t n)
{
	FILE *f = fopen(path, "wb");

	FS_ASSERT(f != NULL && fwrite(bytes, 1, n, f) == n && fclose(f) == 0);
}

#endif
