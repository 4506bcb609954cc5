/*
 * Stubs: a model's metadata and tensor names without weights. Reads through the map of an opened file, whose
 * records were checked by the parser, and writes in one pass. Metadata records are copied as they are, in
 * their order.
 */
#include "common/gguf/internal.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define STUB_VERSION 3
#define STUB_MAX_DATA ((uint64_t)256 << 20) /* bytes of all tensors, their padding included */

static void put(FILE *f, const void *bytes, size_t n)
{
	fwrite(bytes, 1, n, f); /* errors stick to f */
}

static void put_u32(FILE *f, uint32_t v)
{
	put(f, &v, sizeof(v));
}

static void put_u64(FILE *f, uint64_t v)
{
	put(f, &v, sizeof(v));
}

static void put_str(FILE *f, const char *s)
{
	put_u64(f, strlen(s));
	put(f, s, strlen(s));
}

static void put_zeros(FILE *f, uint64_t n)
{
	static const uint8_t zeros[4096];
	for (; n > 0; n -= FS_MIN(n, sizeof(zeros)))
		put(f, zeros, (size_t)FS_MIN(n, sizeof(zeros)));
}

/* ---- metadata ---- */

static const uint8_t *kv_end(const struct gguf_kv *kv)
{
	const uint8_t *p = kv->data;
	if (kv->type == GGUF_STRING)
		return p + kv->count;
	if (kv->elem != GGUF_STRING)
		return p + kv->count * gguf_value_size(kv->elem);
	for (uint64_t i = 0, n; i < kv->count; i++) {
		memcpy(&n, p, sizeof(n));
		p += sizeof(n) + n;
	}
	return p;
}

static bool is_of_split(const struct gguf_kv *kv)
{
	return kv->key_len >= 6 && memcmp(kv->key, "split.", 6) == 0;
}

static int order_by_place(const void *a, const void *b)
{
	const struct gguf_kv *const *x = a, *const *y = b;
	return (*x)->key < (*y)->key ? -1 : (*x)->key > (*y)->key;
}

/* Pointers into part->kv in the order of the file, without those about the split. */
static const struct gguf_kv **kept_keys(const struct gguf_part *part, size_t *n)
{
	const struct gguf_kv **kept = calloc(part->n_kv + 1, sizeof(*kept));
	*n = 0;
	for (size_t i = 0; kept && i < part->n_kv; i++)
		if (!is_of_split(&part->kv[i]))
			kept[(*n)++] = &part->kv[i];
	if (kept)
		qsort(kept, *n, sizeof(*kept), order_by_place);
	return kept;
}

#define N_SPLIT_KEYS 3

static void put_split_keys(FILE *f, size_t n_tensors)
{
	const uint16_t no = 0, count = 1;
	put_str(f, "split.no");
	put_u32(f, GGUF_U16);
	put(f, &no, sizeof(no));
	put_str(f, "split.count");
	put_u32(f, GGUF_U16);
	put(f, &count, sizeof(count));
	put_str(f, "split.tensors.count");
	put_u32(f, GGUF_I32);
	put_u32(f, (uint32_t)n_tensors);
}

/* ---- the file ---- */

static uint64_t padded(uint64_t n, uint64_t alignment)
{
	return (n + alignment - 1) / alignment * alignment;
}

int gguf_stub(const struct fs_gguf *g, FILE *f, struct fs_gguf_stub_info *info, struct fs_errbuf *e)
{
	const struct gguf_part *part = &g->parts[0];
	int64_t alignment = 32;
	if (gguf_find(part, "general.alignment"))
		gguf_int(part, "general.alignment", &alignment, NULL); /* the parser has checked it */
	uint64_t step = padded(sizeof(float), (uint64_t)alignment), at = 24;
	if (g->n_tensors * step > STUB_MAX_DATA)
		return fs_fail(e, FS_ELIMIT, "%s: its alignment of %lld bytes makes a stub too large",
		        g->path, (long long)alignment);
	size_t n_keys;
	const struct gguf_kv **kept = kept_keys(part, &n_keys);
	if (!kept)
		return fs_fail(e, FS_ENOMEM, "no memory");
	put(f, "GGUF", 4);
	put_u32(f, STUB_VERSION);
	put_u64(f, g->n_tensors);
	put_u64(f, n_keys + N_SPLIT_KEYS);
	for (size_t i = 0; i < n_keys; i++) {
		const uint8_t *from = (const uint8_t *)kept[i]->key - sizeof(uint64_t);
		put(f, from, (size_t)(kv_end(kept[i]) - from));
		at += (uint64_t)(kv_end(kept[i]) - from);
	}
	free(kept);
	put_split_keys(f, g->n_tensors);
	at += N_SPLIT_KEYS * 12 +
	      strlen("split.no"
	             "split.count"
	             "split.tensors.count") +
	      2 + 2 + 4;
	for (size_t i = 0; i < g->n_tensors; i++) {
		put_str(f, g->tensors[i].name);
		put_u32(f, 1); /* dimensions */
		put_u64(f, 1);
		put_u32(f, FS_F32);
		put_u64(f, i * step);
		at += 8 + strlen(g->tensors[i].name) + 4 + 8 + 4 + 8;
	}
	uint64_t end = padded(at, (uint64_t)alignment) + g->n_tensors * step;
	put_zeros(f, end - at);
	*info = (struct fs_gguf_stub_info){.n_keys = n_keys + N_SPLIT_KEYS,
	        .n_tensors = g->n_tensors,
	        .bytes_in = part->size,
	        .bytes_out = end};
	return FS_OK;
}

/* A stub is for a text model: say so when it can not be one. */
static int check_model(const struct fs_gguf *g, struct fs_errbuf *e)
{
	int64_t no = 0;
	if (gguf_find(&g->parts[0], "split.no") && gguf_int(&g->parts[0], "split.no", &no, e))
		return FS_EFORMAT;
	if (no != 0)
		return fs_fail(e, FS_EINVAL,
		        "%s is part %lld of a split model; the metadata is in the first part", g->path,
		        (long long)no + 1);
	if (!gguf_find(&g->parts[0], "tokenizer.ggml.tokens"))
		return fs_fail(e, FS_EINVAL, "%s has no vocabulary; a stub is made of a text model", g->path);
	return FS_OK;
}

static int check_target(const char *model, const char *stub, struct fs_errbuf *e)
{
	struct stat in, out;
	if (stat(stub, &out))
		return errno == ENOENT ? FS_OK : fs_fail_errno(e, FS_EIO, "cannot write %s", stub);
	if (!S_ISREG(out.st_mode))
		return fs_fail(e, FS_EINVAL, "%s exists and is no regular file", stub);
	if (stat(model, &in) == 0 && in.st_dev == out.st_dev && in.st_ino == out.st_ino)
		return fs_fail(e, FS_EINVAL, "the stub would replace the model %s", model);
	return FS_OK;
}

/* Beside its name, so that renaming it needs no copy. */
static int write_beside(
        const struct fs_gguf *g, const char *stub, struct fs_gguf_stub_info *info, struct fs_errbuf *e)
{
	char *temp;
	if (asprintf(&temp, "%s.%ld.part", stub, (long)getpid()) < 0)
		return fs_fail(e, FS_ENOMEM, "no memory");
	int fd = open(temp, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
	FILE *f = fd < 0 ? NULL : fdopen(fd, "w");
	int err = f ? gguf_stub(g, f, info, e) : fs_fail_errno(e, FS_EIO, "cannot write %s", temp);
	if (f) {
		bool bad = fflush(f) || ferror(f) || fsync(fd);
		if (err == FS_OK && bad)
			err = fs_fail_errno(e, FS_EIO, "cannot write %s", temp);
		fclose(f);
		if (err == FS_OK && rename(temp, stub))
			err = fs_fail_errno(e, FS_EIO, "cannot write %s", stub);
		if (err != FS_OK)
			unlink(temp);
	} else if (fd >= 0) {
		close(fd);
		unlink(temp);
	}
	free(temp);
	return err;
}

int fs_gguf_write_stub(
        const char *model, const char *stub, struct fs_gguf_stub_info *info, struct fs_errbuf *e)
{
	struct fs_gguf_stub_info own;
	struct fs_gguf *g;
	int err = check_target(model, stub, e);
	if (err == FS_OK)
		err = gguf_open(&g, model, false, e);
	if (err != FS_OK)
		return err;
	err = check_model(g, e);
	if (err == FS_OK)
		err = write_beside(g, stub, &own, e);
	fs_gguf_close(g);
	if (err == FS_OK && info)
		*info = own;
	return err;
}
