/*
 * Rows files and the shapes of rows. Stateless, any thread. Refuses shapes whose numbers contradict each
 * other or pass the limits, files of another size than their header says, and values that are not finite.
 */
#include "common/wire/bytes.h"
#include "common/wire/internal.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

size_t fs_wire_dtype_bytes(uint32_t dtype)
{
	return dtype == FS_WIRE_F32 ? 4 : dtype == FS_WIRE_F16 ? 2 : 0;
}

int wire_shape_check(const struct fs_rows_shape *s, uint32_t dtype, size_t *bytes, struct fs_errbuf *e)
{
	size_t elems, total;

	if (s->n_tokens < 1 || s->nx < 1 || s->ny < 1 || s->n_embd < 1)
		return fs_fail(e, FS_EFORMAT, "rows: sizes %d, %d x %d, %d are not all positive", s->n_tokens,
		        s->nx, s->ny, s->n_embd);
	if (s->n_tokens > FS_ROWS_MAX_TOKENS || s->n_embd > FS_ROWS_MAX_EMBD)
		return fs_fail(e, FS_EFORMAT, "rows: %d rows of %d are more than %d of %d", s->n_tokens,
		        s->n_embd, FS_ROWS_MAX_TOKENS, FS_ROWS_MAX_EMBD);
	if ((int64_t)s->nx * s->ny != s->n_tokens)
		return fs_fail(
		        e, FS_EFORMAT, "rows: %d rows are not a grid of %d x %d", s->n_tokens, s->nx, s->ny);
	if (fs_wire_dtype_bytes(dtype) == 0)
		return fs_fail(e, FS_EFORMAT, "rows: unknown dtype %u", dtype);
	if (!fs_mul_size((size_t)s->n_tokens, (size_t)s->n_embd, &elems) ||
	        !fs_mul_size(elems, fs_wire_dtype_bytes(dtype), &total) || total > FS_ROWS_MAX_BYTES)
		return fs_fail(e, FS_EFORMAT, "rows: %d rows of %d are too large", s->n_tokens, s->n_embd);
	*bytes = total;
	return FS_OK;
}

void fs_rows_header_put(uint8_t out[FS_ROWS_HEADER], const struct fs_rows_shape *s)
{
	put_u32(out, FS_ROWS_MAGIC);
	put_u32(out + 4, (uint32_t)s->n_tokens);
	put_u32(out + 8, (uint32_t)s->nx);
	put_u32(out + 12, (uint32_t)s->ny);
	put_u32(out + 16, (uint32_t)s->n_embd);
}

int fs_rows_header_begin(const uint8_t in[FS_ROWS_HEADER], enum fs_wire_dtype dtype,
        struct fs_rows_shape *out, size_t *bytes, struct fs_errbuf *e)
{
	struct fs_rows_shape s = {get_i32(in + 4), get_i32(in + 8), get_i32(in + 12), get_i32(in + 16)};
	int err;

	if (get_u32(in) != FS_ROWS_MAGIC)
		return fs_fail(e, FS_EFORMAT, "rows file: wrong magic %08x", get_u32(in));
	err = wire_shape_check(&s, dtype, bytes, e);
	if (err == FS_OK)
		*out = s;
	return err;
}

int fs_rows_header_get_dtype(const uint8_t in[FS_ROWS_HEADER], uint64_t file_bytes, enum fs_wire_dtype dtype,
        struct fs_rows_shape *out, struct fs_errbuf *e)
{
	struct fs_rows_shape s;
	size_t bytes = 0;
	int err = fs_rows_header_begin(in, dtype, &s, &bytes, e);

	if (err != FS_OK)
		return err;
	if (file_bytes != (uint64_t)bytes + FS_ROWS_HEADER)
		return fs_fail(e, FS_EFORMAT, "rows file: %llu bytes, its header says %llu",
		        (unsigned long long)file_bytes, (unsigned long long)bytes + FS_ROWS_HEADER);
	*out = s;
	return FS_OK;
}

int fs_rows_header_get(
        const uint8_t in[FS_ROWS_HEADER], uint64_t file_bytes, struct fs_rows_shape *out, struct fs_errbuf *e)
{
	return fs_rows_header_get_dtype(in, file_bytes, FS_WIRE_F32, out, e);
}

/* Infinities and NaNs are the values whose exponent bits are all set. */
static bool is_finite_bits(uint32_t u)
{
	return (u & 0x7f800000) != 0x7f800000;
}

int fs_rows_check_finite(const float *rows, size_t n, struct fs_errbuf *e)
{
	enum {
		BLOCK = 1024
	}; /* looked at without a branch between, so that the compiler takes many at once */

	for (size_t at = 0; at < n; at += BLOCK) {
		size_t end = FS_MIN(at + BLOCK, n);
		uint32_t u, bad = 0;

		for (size_t i = at; i < end; i++) {
			memcpy(&u, &rows[i], sizeof(u));
			bad |= !is_finite_bits(u);
		}
		for (size_t i = at; bad && i < end; i++) {
			memcpy(&u, &rows[i], sizeof(u));
			if (!is_finite_bits(u))
				return fs_fail(e, FS_EFORMAT, "rows: element %zu is not finite", i);
		}
	}
	return FS_OK;
}

/* ---- files ---- */

static bool write_all(int fd, const void *data, size_t n)
{
	const uint8_t *p = data;

	while (n > 0) {
		ssize_t k = write(fd, p, n);

		if (k < 0 && errno == EINTR)
			continue;
		if (k <= 0)
			return false;
		p += k;
		n -= (size_t)k;
	}
	return true;
}

static int write_file(
        const char *path, const struct fs_rows_shape *s, const void *rows, size_t bytes, struct fs_errbuf *e)
{
	uint8_t head[FS_ROWS_HEADER];
	int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
	bool ok;

	if (fd < 0)
		return fs_fail_errno(e, FS_EIO, "cannot write %s", path);
	fs_rows_header_put(head, s);
	ok = write_all(fd, head, sizeof(head)) && write_all(fd, rows, bytes);
	if (close(fd) == 0 && ok)
		return FS_OK;
	fs_fail_errno(e, FS_EIO, "cannot write %s", path);
	unlink(path);
	return FS_EIO;
}

int fs_rows_write_file(
        const char *path, const struct fs_rows_shape *s, const float *rows, struct fs_errbuf *e)
{
	size_t bytes = 0;
	int err = wire_shape_check(s, FS_WIRE_F32, &bytes, e);

	return err != FS_OK ? err : write_file(path, s, rows, bytes, e);
}

int fs_rows_replace_file(
        const char *path, const struct fs_rows_shape *s, const float *rows, struct fs_errbuf *e)
{
	char *temp;
	int err;

	if (asprintf(&temp, "%s.%ld.part", path, (long)getpid()) < 0)
		return fs_fail(e, FS_ENOMEM, "no memory");
	err = fs_rows_write_file(temp, s, rows, e);
	if (err == FS_OK && rename(temp, path) != 0) {
		err = fs_fail_errno(e, FS_EIO, "cannot write %s", path);
		unlink(temp);
	}
	free(temp);
	return err;
}

int fs_rows_write_file_f16(
        const char *path, const struct fs_rows_shape *s, const uint16_t *rows, struct fs_errbuf *e)
{
	size_t bytes = 0;
	int err = wire_shape_check(s, FS_WIRE_F16, &bytes, e);

	return err != FS_OK ? err : write_file(path, s, rows, bytes, e);
}

/* FS_EFORMAT when the file ends early. */
static int read_all(int fd, const char *path, void *data, size_t n, struct fs_errbuf *e)
{
	uint8_t *p = data;

	while (n > 0) {
		ssize_t k = read(fd, p, n);

		if (k < 0 && errno == EINTR)
			continue;
		if (k < 0)
			return fs_fail_errno(e, FS_EIO, "cannot read %s", path);
		if (k == 0)
			return fs_fail(e, FS_EFORMAT, "%s: a rows file cut short", path);
		p += k;
		n -= (size_t)k;
	}
	return FS_OK;
}

static int read_rows(int fd, const char *path, struct fs_rows_shape *s, float **rows, struct fs_errbuf *e)
{
	uint8_t head[FS_ROWS_HEADER];
	struct stat st;
	size_t elems;
	int err;

	if (fstat(fd, &st) < 0)
		return fs_fail_errno(e, FS_EIO, "cannot read %s", path);
	err = read_all(fd, path, head, sizeof(head), e);
	if (err == FS_OK)
		err = fs_rows_header_get(head, (uint64_t)st.st_size, s, e);
	if (err != FS_OK)
		return err;
	elems = (size_t)s->n_tokens * (size_t)s->n_embd;
	*rows = malloc(elems * sizeof(float));
	if (*rows == NULL)
		return fs_fail(e, FS_ENOMEM, "no memory for %zu bytes of rows", elems * sizeof(float));
	err = read_all(fd, path, *rows, elems * sizeof(float), e);
	if (err == FS_OK)
		err = fs_rows_check_finite(*rows, elems, e);
	if (err != FS_OK)
		free(*rows);
	return err;
}

int fs_rows_read_file(const char *path, struct fs_rows_shape *s, float **rows, struct fs_errbuf *e)
{
	struct fs_rows_shape shape;
	float *data = NULL;
	int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK), err;

	if (fd < 0)
		return fs_fail_errno(e, FS_EIO, "cannot read %s", path);
	err = read_rows(fd, path, &shape, &data, e);
	close(fd);
	if (err != FS_OK)
		return err;
	*s = shape;
	*rows = data;
	return FS_OK;
}
