/*
 * One GGUF file in memory -> its metadata index and tensor table. Runs on the opening thread. Reads only
 * through a cursor that knows the file's end; refuses anything that does not fit in the file, duplicate names
 * and unaligned or outside tensors.
 */
#include "common/gguf/internal.h"

#include <stdlib.h>
#include <string.h>

struct cursor {
	const uint8_t *pos, *end;
};

static size_t left(const struct cursor *c)
{
	return (size_t)(c->end - c->pos);
}

static bool take(struct cursor *c, void *out, size_t n)
{
	if (left(c) < n)
		return false;
	memcpy(out, c->pos, n);
	c->pos += n;
	return true;
}

/* A length-prefixed string; *s points into the map. */
static bool take_str(struct cursor *c, const char **s, size_t *n)
{
	uint64_t len;

	if (!take(c, &len, sizeof(len)) || len > left(c))
		return false;
	*s = (const char *)c->pos;
	*n = (size_t)len;
	c->pos += len;
	return true;
}

size_t gguf_value_size(int32_t type)
{
	static const uint8_t size[GGUF_N_TYPES] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};

	return type >= 0 && type < GGUF_N_TYPES ? size[type] : 0;
}

const char *gguf_value_name(int32_t type)
{
	static const char *const name[GGUF_N_TYPES] = {"u8", "i8", "u16", "i16", "u32", "i32", "f32", "bool",
	        "string", "array", "u64", "i64", "f64"};

	return type >= 0 && type < GGUF_N_TYPES ? name[type] : "unknown";
}

/* ---- metadata ---- */

static int skip_strings(struct cursor *c, uint64_t count, const char *path, struct fs_errbuf *e)
{
	const char *s;
	size_t n;

	if (count > left(c) / 8)
		return fs_fail(e, FS_EFORMAT, "%s: a string array is longer than the file", path);
	for (uint64_t i = 0; i < count; i++)
		if (!take_str(c, &s, &n))
			return fs_fail(e, FS_EFORMAT, "%s: a string array ends outside the file", path);
	return FS_OK;
}

static int take_array(struct cursor *c, struct gguf_kv *kv, const char *path, struct fs_errbuf *e)
{
	size_t size, bytes;

	if (!take(c, &kv->elem, 4) || !take(c, &kv->count, 8))
		return fs_fail(e, FS_EFORMAT, "%s: truncated in its metadata", path);
	kv->data = c->pos;
	if (kv->elem == GGUF_STRING)
		return skip_strings(c, kv->count, path, e);
	size = gguf_value_size(kv->elem);
	if (size == 0)
		return fs_fail(e, FS_EFORMAT, "%s: metadata array of %s elements", path,
		        kv->elem == GGUF_ARRAY ? "array" : "unknown");
	if (kv->count > left(c) || !fs_mul_size((size_t)kv->count, size, &bytes) || bytes > left(c))
		return fs_fail(e, FS_EFORMAT, "%s: a metadata array is longer than the file", path);
	c->pos += bytes;
	return FS_OK;
}

static int take_kv(struct cursor *c, struct gguf_kv *kv, const char *path, struct fs_errbuf *e)
{
	size_t size;

	if (!take_str(c, &kv->key, &kv->key_len) || !take(c, &kv->type, 4))
		return fs_fail(e, FS_EFORMAT, "%s: truncated in its metadata", path);
	if (kv->key_len == 0 || kv->key_len > GGUF_MAX_KEY || memchr(kv->key, 0, kv->key_len) != NULL)
		return fs_fail(e, FS_EFORMAT, "%s: a metadata key is empty, too long or holds a NUL", path);
	kv->elem = kv->type;
	kv->count = 1;
	kv->data = c->pos;
	if (kv->type == GGUF_ARRAY)
		return take_array(c, kv, path, e);
	if (kv->type == GGUF_STRING) {
		const char *s;
		size_t n;

		if (!take_str(c, &s, &n))
			return fs_fail(e, FS_EFORMAT, "%s: a metadata string ends outside the file", path);
		kv->data = (const uint8_t *)s;
		kv->count = n;
		return FS_OK;
	}
	size = gguf_value_size(kv->type);
	if (size == 0)
		return fs_fail(e, FS_EFORMAT, "%s: unknown metadata type %d of key %.*s", path, kv->type,
		        (int)FS_MIN(kv->key_len, 100), kv->key);
	if (size > left(c))
		return fs_fail(e, FS_EFORMAT, "%s: truncated in its metadata", path);
	c->pos += size;
	return FS_OK;
}

static int compare_keys(const char *a, size_t an, const char *b, size_t bn)
{
	int order = memcmp(a, b, FS_MIN(an, bn));

	return order != 0 ? order : an < bn ? -1 : an > bn;
}

static int order_kv(const void *a, const void *b)
{
	const struct gguf_kv *x = a, *y = b;

	return compare_keys(x->key, x->key_len, y->key, y->key_len);
}

const struct gguf_kv *gguf_find(const struct gguf_part *part, const char *key)
{
	struct gguf_kv wanted = {.key = key, .key_len = strlen(key)};

	if (part->n_kv == 0)
		return NULL;
	return bsearch(&wanted, part->kv, part->n_kv, sizeof(*part->kv), order_kv);
}

static int parse_metadata(
        struct gguf_part *part, struct cursor *c, uint64_t n, const char *path, struct fs_errbuf *e)
{
	/* the smallest record: key length, one byte of key, type, one byte of value */
	if (n > GGUF_MAX_KV || n > left(c) / 14)
		return fs_fail(e, FS_EFORMAT, "%s: announces %llu metadata keys, more than fit", path,
		        (unsigned long long)n);
	part->kv = calloc(n + 1, sizeof(*part->kv));
	if (part->kv == NULL)
		return fs_fail(e, FS_ENOMEM, "%s: no memory for its metadata", path);
	for (; part->n_kv < n; part->n_kv++) {
		int err = take_kv(c, &part->kv[part->n_kv], path, e);

		if (err != FS_OK)
			return err;
	}
	qsort(part->kv, n, sizeof(*part->kv), order_kv);
	for (size_t i = 1; i < n; i++)
		if (order_kv(&part->kv[i - 1], &part->kv[i]) == 0)
			return fs_fail(e, FS_EFORMAT, "%s: metadata key %.*s appears twice", path,
			        (int)FS_MIN(part->kv[i].key_len, 100), part->kv[i].key);
	return FS_OK;
}

/* ---- tensor table ---- */

/* Elements are counted in int64 and must stay below 2^62, so that later products of sizes can be checked
 * simply. */
static int take_shape(struct cursor *c, struct fs_gguf_tensor *t, const char *path, struct fs_errbuf *e)
{
	int64_t total = 1;

	if (!take(c, &t->n_dims, 4))
		return fs_fail(e, FS_EFORMAT, "%s: truncated in its tensor table", path);
	if (t->n_dims > 4)
		return fs_fail(e, FS_EFORMAT, "%s: tensor %s has %u dimensions", path, t->name, t->n_dims);
	for (uint32_t i = 0; i < 4; i++)
		t->ne[i] = 1;
	for (uint32_t i = 0; i < t->n_dims; i++) {
		if (!take(c, &t->ne[i], 8))
			return fs_fail(e, FS_EFORMAT, "%s: truncated in its tensor table", path);
		if (t->ne[i] < 1 || __builtin_mul_overflow(total, t->ne[i], &total) || total > INT64_MAX / 2)
			return fs_fail(e, FS_EFORMAT, "%s: tensor %s has an impossible dimension %lld", path,
			        t->name, (long long)t->ne[i]);
	}
	return FS_OK;
}

/* Sets data to the offset for now: the blob's place is known only behind the table. */
static int take_tensor(
        struct cursor *c, struct fs_gguf_tensor *t, uint64_t *offset, const char *path, struct fs_errbuf *e)
{
	const char *name;
	size_t n;
	int32_t type;
	int err;

	if (!take_str(c, &name, &n))
		return fs_fail(e, FS_EFORMAT, "%s: truncated in its tensor table", path);
	if (n == 0 || n > GGUF_MAX_NAME || memchr(name, 0, n) != NULL)
		return fs_fail(e, FS_EFORMAT,
		        "%s: a tensor name is empty, longer than %d bytes or holds a NUL", path,
		        GGUF_MAX_NAME);
	t->name = strndup(name, n);
	if (t->name == NULL)
		return fs_fail(e, FS_ENOMEM, "%s: no memory for its tensor table", path);
	err = take_shape(c, t, path, e);
	if (err != FS_OK)
		return err;
	if (!take(c, &type, 4) || !take(c, offset, 8))
		return fs_fail(e, FS_EFORMAT, "%s: truncated in its tensor table", path);
	t->type = (enum fs_dtype)type;
	return FS_OK;
}

/* Resolves offset and size against the blob. A type that is not known keeps data NULL: an error only when it
 * is asked for. */
static int place_tensor(const struct gguf_part *part, struct fs_gguf_tensor *t, uint64_t offset,
        size_t alignment, const char *path, struct fs_errbuf *e)
{
	size_t blob = part->size - FS_MIN(part->size, part->data_start), row, bytes;

	if (offset % alignment != 0)
		return fs_fail(
		        e, FS_EFORMAT, "%s: tensor %s is not aligned to %zu bytes", path, t->name, alignment);
	if (offset > blob)
		return fs_fail(e, FS_EFORMAT, "%s: tensor %s starts outside the file (is the file complete?)",
		        path, t->name);
	if (fs_dtype_info((int)t->type) == NULL)
		return FS_OK;
	row = fs_dtype_row_bytes(t->type, t->ne[0]);
	if (row == 0)
		return fs_fail(e, FS_EFORMAT,
		        "%s: tensor %s: rows of %lld elements do not divide into %s blocks", path, t->name,
		        (long long)t->ne[0], fs_dtype_info((int)t->type)->name);
	if (!fs_mul_size(row, (size_t)(t->ne[1] * t->ne[2] * t->ne[3]), &bytes) ||
	        bytes > blob - (size_t)offset)
		return fs_fail(e, FS_EFORMAT, "%s: tensor %s ends outside the file (is the file complete?)",
		        path, t->name);
	t->data = part->map + part->data_start + offset;
	t->nbytes = bytes;
	return FS_OK;
}

static int read_alignment(const struct gguf_part *part, size_t *out, const char *path, struct fs_errbuf *e)
{
	const struct gguf_kv *kv = gguf_find(part, "general.alignment");
	uint32_t a = 32;

	if (kv != NULL) {
		if (kv->type != GGUF_U32)
			return fs_fail(e, FS_EFORMAT, "%s: general.alignment is %s, not u32", path,
			        gguf_value_name(kv->type));
		memcpy(&a, kv->data, 4);
	}
	if (a == 0 || (a & (a - 1)) != 0 || a > GGUF_MAX_ALIGNMENT)
		return fs_fail(e, FS_EFORMAT, "%s: general.alignment %u is no usable power of two", path, a);
	if (a < 4)
		return fs_fail(e, FS_ENOTSUP,
		        "%s: general.alignment %u: tensors must be aligned to 4 bytes at least", path, a);
	*out = a;
	return FS_OK;
}

static int parse_tensors(struct fs_gguf *g, struct gguf_part *part, struct cursor *c, uint64_t n,
        size_t alignment, const char *path, struct fs_errbuf *e)
{
	size_t first = g->n_tensors;
	int err = FS_OK;

	/* the smallest record: name length, one byte of name, dimensions, type, offset */
	if (n > GGUF_MAX_TENSORS - first || n > left(c) / 25)
		return fs_fail(e, FS_EFORMAT, "%s: announces %llu tensors, more than fit", path,
		        (unsigned long long)n);

	struct fs_gguf_tensor *grown = reallocarray(g->tensors, first + n + 1, sizeof(*grown));
	uint64_t *offsets = calloc(n + 1, sizeof(*offsets));

	if (grown != NULL)
		g->tensors = grown;
	if (grown == NULL || offsets == NULL) {
		free(offsets);
		return fs_fail(e, FS_ENOMEM, "%s: no memory for its tensor table", path);
	}
	for (uint64_t i = 0; i < n && err == FS_OK; i++) {
		memset(&g->tensors[g->n_tensors], 0, sizeof(*g->tensors));
		err = take_tensor(c, &g->tensors[g->n_tensors], &offsets[i], path, e);
		g->n_tensors++; /* counted even when half read: its name is freed with the rest */
	}
	part->table_end = (size_t)(c->pos - part->map);
	part->data_start = (part->table_end + alignment - 1) / alignment * alignment;
	for (uint64_t i = 0; i < n && err == FS_OK; i++)
		err = place_tensor(part, &g->tensors[first + i], offsets[i], alignment, path, e);
	free(offsets);
	return err;
}

int gguf_parse_part(struct fs_gguf *g, struct gguf_part *part, const char *path, struct fs_errbuf *e)
{
	struct cursor c = {part->map, part->map + part->size};
	char magic[4];
	uint32_t version;
	int64_t n_tensors, n_kv;
	size_t alignment = 0;
	int err;

	if (!take(&c, magic, 4) || memcmp(magic, "GGUF", 4) != 0)
		return fs_fail(e, FS_EFORMAT, "%s: not a GGUF file", path);
	if (!take(&c, &version, 4))
		return fs_fail(e, FS_EFORMAT, "%s: truncated in its header", path);
	if (version != 0 && (version & 0xffff) == 0)
		return fs_fail(e, FS_ENOTSUP, "%s: a big-endian GGUF file", path);
	if (version != 2 && version != 3)
		return fs_fail(
		        e, FS_ENOTSUP, "%s: GGUF version %u; versions 2 and 3 can be read", path, version);
	if (!take(&c, &n_tensors, 8) || !take(&c, &n_kv, 8))
		return fs_fail(e, FS_EFORMAT, "%s: truncated in its header", path);
	if (n_tensors < 0 || n_kv < 0)
		return fs_fail(e, FS_EFORMAT, "%s: negative counts in its header", path);
	err = parse_metadata(part, &c, (uint64_t)n_kv, path, e);
	if (err == FS_OK)
		err = read_alignment(part, &alignment, path, e);
	if (err == FS_OK)
		err = parse_tensors(g, part, &c, (uint64_t)n_tensors, alignment, path, e);
	return err;
}

void gguf_part_finish(struct gguf_part *part)
{
	free(part->kv);
	part->kv = NULL;
	part->n_kv = 0;
}
