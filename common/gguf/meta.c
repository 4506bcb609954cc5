/*
 * Typed access to metadata: the keys of the first part. Read-only, any thread. Values are copied out of the
 * map byte by byte, since they have no alignment. Integers convert between widths when the value fits,
 * nothing else converts silently.
 */
#include "common/gguf/internal.h"

#include <string.h>

static int absent(struct fs_errbuf *e, const char *key)
{
	return fs_fail(e, FS_ENOTFOUND, "the model file has no key %s", key);
}

static int wrong_type(struct fs_errbuf *e, const char *key, const struct gguf_kv *kv, const char *want)
{
	if (kv->type == GGUF_ARRAY)
		return fs_fail(e, FS_EFORMAT, "key %s is an array of %s, not %s", key,
		        gguf_value_name(kv->elem), want);
	return fs_fail(e, FS_EFORMAT, "key %s is %s, not %s", key, gguf_value_name(kv->type), want);
}

static int no_fit(struct fs_errbuf *e, const char *key, const char *want)
{
	return fs_fail(e, FS_EFORMAT, "the value of key %s does not fit into %s", key, want);
}

#define LOAD(type, p)                                                                                        \
	({                                                                                                   \
		type v_;                                                                                     \
		memcpy(&v_, (p), sizeof(v_));                                                                \
		v_;                                                                                          \
	})

/* An integer of any type at p: its magnitude as u64 and whether it is negative. False when type is no integer
 * type. */
static bool load_int(int32_t type, const uint8_t *p, int64_t *out, bool *big)
{
	*big = false;
	switch (type) {
	case GGUF_U8:
		*out = *p;
		return true;
	case GGUF_I8:
		*out = (int8_t)*p;
		return true;
	case GGUF_U16:
		*out = LOAD(uint16_t, p);
		return true;
	case GGUF_I16:
		*out = LOAD(int16_t, p);
		return true;
	case GGUF_U32:
		*out = LOAD(uint32_t, p);
		return true;
	case GGUF_I32:
		*out = LOAD(int32_t, p);
		return true;
	case GGUF_I64:
		*out = LOAD(int64_t, p);
		return true;
	case GGUF_U64:
		*out = LOAD(int64_t, p);
		*big = *out < 0; /* past INT64_MAX */
		return true;
	default:
		return false;
	}
}

static int get_int(
        const struct gguf_part *part, const char *key, int64_t *out, bool *big, struct fs_errbuf *e)
{
	const struct gguf_kv *kv = gguf_find(part, key);

	if (kv == NULL)
		return absent(e, key);
	if (!load_int(kv->type, kv->data, out, big))
		return wrong_type(e, key, kv, "an integer");
	return FS_OK;
}

int gguf_int(const struct gguf_part *part, const char *key, int64_t *out, struct fs_errbuf *e)
{
	int64_t v = 0;
	bool big = false;
	int err = get_int(part, key, &v, &big, e);

	if (err != FS_OK)
		return err;
	if (big)
		return no_fit(e, key, "i64");
	*out = v;
	return FS_OK;
}

int fs_gguf_u32(const struct fs_gguf *g, const char *key, uint32_t *out, struct fs_errbuf *e)
{
	int64_t v = 0;
	int err = gguf_int(&g->parts[0], key, &v, e);

	if (err != FS_OK)
		return err;
	if (v < 0 || v > UINT32_MAX)
		return no_fit(e, key, "u32");
	*out = (uint32_t)v;
	return FS_OK;
}

int fs_gguf_u64(const struct fs_gguf *g, const char *key, uint64_t *out, struct fs_errbuf *e)
{
	int64_t v = 0;
	bool big = false;
	int err = get_int(&g->parts[0], key, &v, &big, e);

	if (err != FS_OK)
		return err;
	if (v < 0 && !big)
		return no_fit(e, key, "u64");
	*out = (uint64_t)v;
	return FS_OK;
}

int fs_gguf_i32(const struct fs_gguf *g, const char *key, int32_t *out, struct fs_errbuf *e)
{
	int64_t v = 0;
	int err = gguf_int(&g->parts[0], key, &v, e);

	if (err != FS_OK)
		return err;
	if (v < INT32_MIN || v > INT32_MAX)
		return no_fit(e, key, "i32");
	*out = (int32_t)v;
	return FS_OK;
}

int fs_gguf_f32(const struct fs_gguf *g, const char *key, float *out, struct fs_errbuf *e)
{
	const struct gguf_kv *kv = gguf_find(&g->parts[0], key);

	if (kv == NULL)
		return absent(e, key);
	if (kv->type == GGUF_F32)
		*out = LOAD(float, kv->data);
	else if (kv->type == GGUF_F64)
		*out = (float)LOAD(double, kv->data);
	else
		return wrong_type(e, key, kv, "a float");
	return FS_OK;
}

int fs_gguf_bool(const struct fs_gguf *g, const char *key, bool *out, struct fs_errbuf *e)
{
	const struct gguf_kv *kv = gguf_find(&g->parts[0], key);

	if (kv == NULL)
		return absent(e, key);
	if (kv->type != GGUF_BOOL)
		return wrong_type(e, key, kv, "a bool");
	*out = *kv->data != 0;
	return FS_OK;
}

int fs_gguf_str(const struct fs_gguf *g, const char *key, const char **s, size_t *len, struct fs_errbuf *e)
{
	const struct gguf_kv *kv = gguf_find(&g->parts[0], key);

	if (kv == NULL)
		return absent(e, key);
	if (kv->type != GGUF_STRING)
		return wrong_type(e, key, kv, "a string");
	*s = (const char *)kv->data;
	*len = (size_t)kv->count;
	return FS_OK;
}

bool fs_gguf_has(const struct fs_gguf *g, const char *key)
{
	return gguf_find(&g->parts[0], key) != NULL;
}

/* ---- arrays ---- */

static int find_array(
        const struct fs_gguf *g, const char *key, const struct gguf_kv **out, struct fs_errbuf *e)
{
	const struct gguf_kv *kv = gguf_find(&g->parts[0], key);

	if (kv == NULL)
		return absent(e, key);
	if (kv->type != GGUF_ARRAY)
		return wrong_type(e, key, kv, "an array");
	*out = kv;
	return FS_OK;
}

int fs_gguf_arr_len(const struct fs_gguf *g, const char *key, size_t *count, struct fs_errbuf *e)
{
	const struct gguf_kv *kv = NULL;
	int err = find_array(g, key, &kv, e);

	if (err == FS_OK)
		*count = (size_t)kv->count;
	return err;
}

static int find_counted(const struct fs_gguf *g, const char *key, size_t count, const struct gguf_kv **out,
        struct fs_errbuf *e)
{
	int err = find_array(g, key, out, e);

	if (err == FS_OK && (*out)->count < count)
		err = fs_fail(e, FS_EINVAL, "key %s has %llu elements, %zu are needed", key,
		        (unsigned long long)(*out)->count, count);
	return err;
}

int fs_gguf_arr_f32(const struct fs_gguf *g, const char *key, float *out, size_t count, struct fs_errbuf *e)
{
	const struct gguf_kv *kv = NULL;
	int err = find_counted(g, key, count, &kv, e);
	size_t size;

	if (err != FS_OK)
		return err;
	size = gguf_value_size(kv->elem);
	for (size_t i = 0; i < count; i++) {
		const uint8_t *p = kv->data + i * size;
		int64_t v;
		bool big;

		if (kv->elem == GGUF_F32)
			out[i] = LOAD(float, p);
		else if (kv->elem == GGUF_F64)
			out[i] = (float)LOAD(double, p);
		else if (load_int(kv->elem, p, &v, &big))
			out[i] = big ? (float)(uint64_t)v : (float)v;
		else
			return wrong_type(e, key, kv, "an array of numbers");
	}
	return FS_OK;
}

int fs_gguf_arr_i32(const struct fs_gguf *g, const char *key, int32_t *out, size_t count, struct fs_errbuf *e)
{
	const struct gguf_kv *kv = NULL;
	int err = find_counted(g, key, count, &kv, e);
	size_t size;

	if (err != FS_OK)
		return err;
	size = gguf_value_size(kv->elem);
	for (size_t i = 0; i < count; i++) {
		int64_t v;
		bool big;

		if (kv->elem == GGUF_BOOL)
			v = kv->data[i] != 0, big = false;
		else if (!load_int(kv->elem, kv->data + i * size, &v, &big))
			return wrong_type(e, key, kv, "an array of integers");
		if (big || v < INT32_MIN || v > INT32_MAX)
			return no_fit(e, key, "i32");
		out[i] = (int32_t)v;
	}
	return FS_OK;
}

int fs_gguf_arr_strs(const struct fs_gguf *g, const char *key, struct fs_gguf_strs *it, struct fs_errbuf *e)
{
	const struct gguf_kv *kv = NULL;
	int err = find_array(g, key, &kv, e);

	if (err != FS_OK)
		return err;
	if (kv->elem != GGUF_STRING)
		return wrong_type(e, key, kv, "an array of strings");
	*it = (struct fs_gguf_strs){.g = g, .left = (size_t)kv->count, .pos = kv->data};
	return FS_OK;
}

/* Lengths were checked against the file when it was opened. */
bool fs_gguf_strs_next(struct fs_gguf_strs *it, const char **s, size_t *len)
{
	if (it->left == 0)
		return false;
	*len = (size_t)LOAD(uint64_t, it->pos);
	*s = (const char *)it->pos + 8;
	it->pos += 8 + *len;
	it->left--;
	return true;
}
