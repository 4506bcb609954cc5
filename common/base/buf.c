/* Bounded growable bytes. A buffer belongs to one thread at a time; it never grows past its maximum. */
#include "common/base/base.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

void fs_buf_init(struct fs_buf *b, size_t max)
{
	*b = (struct fs_buf){.max = max};
}

void fs_buf_finish(struct fs_buf *b)
{
	free(b->data);
	fs_buf_init(b, b->max);
}

void fs_buf_clear(struct fs_buf *b)
{
	b->len = 0;
	if (b->data)
		b->data[0] = 0;
}

int fs_buf_reserve(struct fs_buf *b, size_t more)
{
	size_t need;
	if (!fs_add_size(b->len, more, &need) || need > b->max || need == SIZE_MAX)
		return FS_ENOMEM;
	if (b->data && need < b->cap)
		return FS_OK;
	/* Doubling keeps appends linear; one byte more for the NUL. */
	size_t cap = FS_MAX(b->cap, (size_t)64);
	while (cap <= need)
		cap = cap > SIZE_MAX / 2 ? need + 1 : cap * 2;
	if (cap > b->max)
		cap = FS_MAX(b->max, need) + 1;
	uint8_t *p = realloc(b->data, cap);
	if (!p)
		return FS_ENOMEM;
	b->data = p;
	b->cap = cap;
	b->data[b->len] = 0;
	return FS_OK;
}

int fs_buf_append(struct fs_buf *b, const void *data, size_t n)
{
	int rc = fs_buf_reserve(b, n);
	if (rc)
		return rc;
	if (n)
		memcpy(b->data + b->len, data, n);
	b->len += n;
	b->data[b->len] = 0;
	return FS_OK;
}

int fs_buf_append_str(struct fs_buf *b, const char *s)
{
	return fs_buf_append(b, s, strlen(s));
}

int fs_buf_printf(struct fs_buf *b, const char *fmt, ...)
{
	va_list ap;
	va_start(ap, fmt);
	int n = vsnprintf(NULL, 0, fmt, ap);
	va_end(ap);
	if (n < 0)
		return FS_EINVAL;
	int rc = fs_buf_reserve(b, (size_t)n);
	if (rc)
		return rc;
	va_start(ap, fmt);
	vsnprintf((char *)b->data + b->len, (size_t)n + 1, fmt, ap);
	va_end(ap);
	b->len += (size_t)n;
	return FS_OK;
}

void fs_buf_consume(struct fs_buf *b, size_t n)
{
	FS_ASSERT(n <= b->len);
	if (n == 0)
		return;
	memmove(b->data, b->data + n, b->len - n);
	b->len -= n;
	b->data[b->len] = 0;
}

char *fs_buf_take(struct fs_buf *b, size_t *n)
{
	if (!b->data && fs_buf_reserve(b, 0))
		return NULL;
	char *p = (char *)b->data;
	if (n)
		*n = b->len;
	b->data = NULL;
	b->len = b->cap = 0;
	return p;
}

static int append_fd(struct fs_buf *b, int fd, const char *path, struct fs_errbuf *e)
{
	char chunk[65536];
	for (;;) {
		ssize_t n = read(fd, chunk, sizeof(chunk));
		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0)
			return fs_fail_errno(e, FS_EIO, "can not read %s", path);
		if (n == 0)
			return FS_OK;
		if (fs_buf_append(b, chunk, (size_t)n))
			return fs_fail(e, FS_ELIMIT, "%s is larger than %zu bytes", path, b->max);
	}
}

int fs_buf_append_file(struct fs_buf *b, const char *path, struct fs_errbuf *e)
{
	struct stat st;
	int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
	if (fd < 0)
		return fs_fail_errno(e, FS_EIO, "can not open %s", path);
	int rc = fstat(fd, &st)         ? fs_fail_errno(e, FS_EIO, "can not read %s", path)
	         : !S_ISREG(st.st_mode) ? fs_fail(e, FS_EINVAL, "%s is no regular file", path)
	                                : append_fd(b, fd, path, e);
	close(fd);
	return rc;
}
