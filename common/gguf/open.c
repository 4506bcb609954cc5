/*
 * Opening: memory maps, split files, the index of tensor names, the fingerprint. Runs on the opening thread;
 * afterwards all is read-only. A file that shrinks while it is mapped ends the process by SIGBUS, as with
 * every mapped file; guard.c names it.
 */
#include "common/gguf/internal.h"

#include <errno.h>
#include <fcntl.h>
#include <openssl/evp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define FINGERPRINT_TENSOR_BYTES 4096

static int map_file(struct gguf_part *part, const char *path, struct fs_errbuf *e)
{
	struct stat st;
	int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK), err = FS_OK;
	void *map;

	if (fd < 0)
		return fs_fail_errno(e, FS_EIO, "cannot open %s", path);
	if (fstat(fd, &st) < 0) {
		err = fs_fail_errno(e, FS_EIO, "cannot read %s", path);
	} else if (!S_ISREG(st.st_mode)) {
		err = fs_fail(e, FS_EIO, "cannot read %s: not a regular file", path);
	} else if (st.st_size < 24) {
		err = fs_fail(e, FS_EFORMAT, "%s: not a GGUF file (%lld bytes)", path, (long long)st.st_size);
	} else {
		map = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
		if (map == MAP_FAILED) {
			err = fs_fail_errno(e, FS_EIO, "cannot map %s", path);
		} else {
			part->map = map;
			part->size = (size_t)st.st_size;
		}
	}
	close(fd);
	return err;
}

static int open_part(struct fs_gguf *g, const char *path, struct fs_errbuf *e)
{
	struct gguf_part *part = &g->parts[g->n_parts];
	int err = map_file(part, path, e);

	if (err != FS_OK)
		return err;
	g->n_parts++;
	part->path = strdup(path);
	if (part->path == NULL)
		return fs_fail(e, FS_ENOMEM, "no memory");
	gguf_guard_add(part);
	return gguf_parse_part(g, part, path, e);
}

/* ---- split files ---- */

/* Length of "<prefix>" when path is "<prefix>-00001-of-000NN.gguf" with these numbers, else -1. */
static int split_prefix(const char *path, int64_t no, int64_t count)
{
	char suffix[64];
	size_t n = strlen(path), sn;

	snprintf(suffix, sizeof(suffix), "-%05lld-of-%05lld.gguf", (long long)no, (long long)count);
	sn = strlen(suffix);
	if (n <= sn || n > 4096 || strcmp(path + n - sn, suffix) != 0)
		return -1;
	return (int)(n - sn);
}

static int open_sibling(
        struct fs_gguf *g, const char *path, int prefix, int64_t index, int64_t count, struct fs_errbuf *e)
{
	char *sibling;
	int64_t no = -1;
	int err;

	if (asprintf(&sibling, "%.*s-%05lld-of-%05lld.gguf", prefix, path, (long long)index + 1,
	            (long long)count) < 0)
		return fs_fail(e, FS_ENOMEM, "no memory");
	err = open_part(g, sibling, e);
	if (err == FS_OK)
		err = gguf_int(&g->parts[g->n_parts - 1], "split.no", &no, e);
	if (err == FS_OK && no != index)
		err = fs_fail(e, FS_EFORMAT, "%s: says it is part %lld of the split model, not %lld", sibling,
		        (long long)no + 1, (long long)index + 1);
	free(sibling);
	return err;
}

/* Opens parts 2..n when part 1 says that there are some. */
static int open_siblings(struct fs_gguf *g, const char *path, struct fs_errbuf *e)
{
	int64_t count = 0, no = 0, tensors = 0;
	struct gguf_part *grown;
	int err, prefix;

	if (gguf_find(&g->parts[0], "split.count") == NULL)
		return FS_OK;
	err = gguf_int(&g->parts[0], "split.count", &count, e);
	if (err != FS_OK || count <= 1)
		return err;
	err = gguf_int(&g->parts[0], "split.no", &no, e);
	if (err != FS_OK)
		return err;
	if (count > GGUF_MAX_PARTS)
		return fs_fail(e, FS_ELIMIT, "%s: split into %lld parts; at most %d are read", path,
		        (long long)count, GGUF_MAX_PARTS);
	if (no != 0)
		return fs_fail(e, FS_EINVAL,
		        "%s: part %lld of a split model; name the first part (…-00001-of-%05lld.gguf)", path,
		        (long long)no + 1, (long long)count);
	prefix = split_prefix(path, 1, count);
	if (prefix < 0)
		return fs_fail(e, FS_EINVAL,
		        "%s: the first of %lld parts must be called …-00001-of-%05lld.gguf for the others to "
		        "be found",
		        path, (long long)count, (long long)count);
	grown = reallocarray(g->parts, (size_t)count, sizeof(*grown));
	if (grown == NULL)
		return fs_fail(e, FS_ENOMEM, "no memory");
	memset(grown + 1, 0, ((size_t)count - 1) * sizeof(*grown));
	g->parts = grown;
	for (int64_t i = 1; i < count; i++) {
		err = open_sibling(g, path, prefix, i, count, e);
		if (err != FS_OK)
			return err;
	}
	if (gguf_find(&g->parts[0], "split.tensors.count") != NULL) {
		err = gguf_int(&g->parts[0], "split.tensors.count", &tensors, e);
		if (err == FS_OK && (uint64_t)tensors != g->n_tensors)
			err = fs_fail(e, FS_EFORMAT, "%s: the parts hold %zu tensors, not %lld", path,
			        g->n_tensors, (long long)tensors);
	}
	return err;
}

/* ---- names ---- */

static int order_tensors(const void *a, const void *b)
{
	const struct fs_gguf_tensor *const *x = a, *const *y = b;

	return strcmp((*x)->name, (*y)->name);
}

static int index_tensors(struct fs_gguf *g, struct fs_errbuf *e)
{
	g->by_name = calloc(g->n_tensors + 1, sizeof(struct fs_gguf_tensor *));
	if (g->by_name == NULL)
		return fs_fail(e, FS_ENOMEM, "%s: no memory for its tensor table", g->path);
	for (size_t i = 0; i < g->n_tensors; i++)
		g->by_name[i] = &g->tensors[i];
	qsort(g->by_name, g->n_tensors, sizeof(struct fs_gguf_tensor *), order_tensors);
	for (size_t i = 1; i < g->n_tensors; i++)
		if (strcmp(g->by_name[i - 1]->name, g->by_name[i]->name) == 0)
			return fs_fail(
			        e, FS_EFORMAT, "%s: tensor %s appears twice", g->path, g->by_name[i]->name);
	return FS_OK;
}

int gguf_open(struct fs_gguf **out, const char *path, bool siblings, struct fs_errbuf *e)
{
	struct fs_gguf *g = calloc(1, sizeof(*g));
	int err;

	if (g == NULL)
		return fs_fail(e, FS_ENOMEM, "no memory");
	g->path = strdup(path);
	g->parts = calloc(1, sizeof(*g->parts));
	if (g->path == NULL || g->parts == NULL)
		err = fs_fail(e, FS_ENOMEM, "no memory");
	else
		err = open_part(g, path, e);
	if (err == FS_OK && siblings)
		err = open_siblings(g, path, e);
	if (err == FS_OK)
		err = index_tensors(g, e);
	if (err != FS_OK) {
		fs_gguf_close(g);
		return err;
	}
	*out = g;
	return FS_OK;
}

int fs_gguf_open(struct fs_gguf **out, const char *path, struct fs_errbuf *e)
{
	return gguf_open(out, path, true, e);
}

void fs_gguf_close(struct fs_gguf *g)
{
	if (g == NULL)
		return;
	for (size_t i = 0; i < g->n_tensors; i++)
		free((char *)g->tensors[i].name);
	for (size_t i = 0; i < g->n_parts; i++) {
		gguf_guard_remove(&g->parts[i]);
		munmap(g->parts[i].map, g->parts[i].size);
		free(g->parts[i].path);
		gguf_part_finish(&g->parts[i]);
	}
	free(g->tensors);
	free(g->by_name);
	free(g->parts);
	free(g->path);
	free(g);
}

uint64_t fs_gguf_tensor_bytes(const struct fs_gguf *g)
{
	uint64_t sum = 0;

	for (size_t i = 0; i < g->n_tensors; i++)
		sum += g->tensors[i].nbytes;
	return sum;
}

static bool digest_model(EVP_MD_CTX *ctx, const struct fs_gguf *g, uint8_t md[EVP_MAX_MD_SIZE])
{
	if (EVP_DigestInit_ex(ctx, EVP_sha256(), NULL) != 1)
		return false;
	for (size_t i = 0; i < g->n_parts; i++)
		if (EVP_DigestUpdate(ctx, g->parts[i].map, g->parts[i].table_end) != 1)
			return false;
	for (size_t i = 0; i < g->n_tensors; i++) {
		const struct fs_gguf_tensor *t = &g->tensors[i];

		if (t->data != NULL &&
		        EVP_DigestUpdate(ctx, t->data, FS_MIN(t->nbytes, FINGERPRINT_TENSOR_BYTES)) != 1)
			return false;
	}
	return EVP_DigestFinal_ex(ctx, md, NULL) == 1;
}

int fs_gguf_fingerprint(const struct fs_gguf *g, char out[33], struct fs_errbuf *e)
{
	EVP_MD_CTX *ctx = EVP_MD_CTX_new();
	uint8_t md[EVP_MAX_MD_SIZE];
	bool ok = ctx != NULL && digest_model(ctx, g, md);

	EVP_MD_CTX_free(ctx);
	if (!ok)
		return fs_fail(e, FS_EINTERNAL, "SHA-256 failed");
	for (int i = 0; i < 16; i++)
		snprintf(out + 2 * i, 3, "%02x", md[i]);
	return FS_OK;
}

/* ---- tensors ---- */

size_t fs_gguf_n_tensors(const struct fs_gguf *g)
{
	return g->n_tensors;
}

const struct fs_gguf_tensor *fs_gguf_tensor_at(const struct fs_gguf *g, size_t i)
{
	return i < g->n_tensors ? &g->tensors[i] : NULL;
}

static const struct fs_gguf_tensor *find_tensor(const struct fs_gguf *g, const char *name)
{
	struct fs_gguf_tensor wanted = {.name = name}, *key = &wanted, **found;

	if (g->n_tensors == 0)
		return NULL;
	found = bsearch(&key, g->by_name, g->n_tensors, sizeof(struct fs_gguf_tensor *), order_tensors);
	return found == NULL ? NULL : *found;
}

bool fs_gguf_has_tensor(const struct fs_gguf *g, const char *name)
{
	return find_tensor(g, name) != NULL;
}

const struct fs_gguf_tensor *fs_gguf_tensor(const struct fs_gguf *g, const char *name)
{
	const struct fs_gguf_tensor *t = find_tensor(g, name);

	return t != NULL && t->data != NULL ? t : NULL;
}

static void shape_text(const int64_t *ne, uint32_t n, char *out, size_t cap)
{
	size_t at = 0;

	out[0] = 0;
	for (uint32_t i = 0; i < n && at < cap; i++)
		at += (size_t)snprintf(out + at, cap - at, "%s%lld", i > 0 ? " x " : "", (long long)ne[i]);
}

static int wrong_shape(const struct fs_gguf *g, const struct fs_gguf_tensor *t, int64_t ne0, int64_t ne1,
        struct fs_errbuf *e)
{
	char have[96], want0[24] = "any", want1[24] = "any";

	shape_text(t->ne, FS_MAX(t->n_dims, 2u), have, sizeof(have));
	if (ne0 != 0)
		snprintf(want0, sizeof(want0), "%lld", (long long)ne0);
	if (ne1 != 0)
		snprintf(want1, sizeof(want1), "%lld", (long long)ne1);
	return fs_fail(
	        e, FS_EFORMAT, "%s: tensor %s is %s, expected %s x %s", g->path, t->name, have, want0, want1);
}

int fs_gguf_need(const struct fs_gguf *g, const char *name, int64_t ne0, int64_t ne1,
        const struct fs_gguf_tensor **out, struct fs_errbuf *e)
{
	const struct fs_gguf_tensor *t = find_tensor(g, name);

	if (t == NULL)
		return fs_fail(e, FS_ENOTFOUND, "%s: tensor %s is missing", g->path, name);
	if (t->data == NULL)
		return fs_fail(e, FS_ENOTSUP, "%s: tensor %s has type %d, which this program cannot read",
		        g->path, name, (int)t->type);
	if ((ne0 != 0 && t->ne[0] != ne0) || (ne1 != 0 && t->ne[1] != ne1))
		return wrong_shape(g, t, ne0, ne1, e);
	*out = t;
	return FS_OK;
}

struct fs_gguf_tensor fs_gguf_part(const struct fs_gguf_tensor *t, int axis, int64_t first, int64_t n)
{
	struct fs_gguf_tensor part = *t;
	size_t each = fs_dtype_row_bytes(t->type, axis == 0 ? 1 : t->ne[0]);

	FS_ASSERT(each > 0 && (axis == 0 || axis == 1) && first >= 0 && n >= 0 && first + n <= t->ne[axis]);
	part.n_dims = (uint32_t)axis + 1;
	part.ne[axis] = n;
	for (int i = axis + 1; i < 4; i++)
		part.ne[i] = 1;
	part.data = (const uint8_t *)t->data + (size_t)first * each;
	part.nbytes = (size_t)n * each;
	return part;
}
