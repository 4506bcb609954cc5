/* The file is first opened as a place alone (O_PATH), which wakes no device and waits at no fifo; when its
 * real path lies in a folder and it is a regular file, that very place is opened for reading. */
#include "server/service/files.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define PIECE ((size_t)256 << 10) /* read between two looks at the cancel token */

static int elsewhere(const char *path, const char *cause, struct fs_errbuf *e)
{
	fs_info("a picture's file was refused: %s: %s", path, cause);
	return fs_fail(
	        e, FS_EINVAL, "there is no such file in the folders that this server reads pictures from");
}

/* The name by which the kernel knows an open descriptor. */
static void name_of(int fd, char *out, size_t cap)
{
	snprintf(out, cap, "/proc/self/fd/%d", fd);
}

static bool real_path(int fd, char *out, size_t cap)
{
	char link[64];
	name_of(fd, link, sizeof(link));
	ssize_t n = readlink(link, out, cap - 1);
	if (n <= 0 || (size_t)n >= cap - 1 || out[0] != '/')
		return false;
	out[n] = '\0';
	return true;
}

static bool is_inside(const char *path, const char *const *folders, size_t n)
{
	for (size_t i = 0; i < n; i++) {
		char folder[PATH_MAX];
		if (!realpath(folders[i], folder))
			continue;
		size_t len = strcmp(folder, "/") == 0 ? 0 : strlen(folder);
		if (strncmp(path, folder, len) == 0 && path[len] == '/')
			return true;
	}
	return false;
}

/* -> a descriptor of the place, or FS_EINVAL. */
static int find(const char *path, const char *const *folders, size_t n, struct stat *st, struct fs_errbuf *e)
{
	char real[PATH_MAX];
	if (path[0] != '/')
		return elsewhere(path, "not an absolute path", e);
	int fd = open(path, O_PATH | O_CLOEXEC);
	if (fd < 0)
		return elsewhere(path, strerror(errno), e);
	int rc = FS_OK;
	if (!real_path(fd, real, sizeof(real)) || !is_inside(real, folders, n))
		rc = elsewhere(path, "outside of picture_folders", e);
	else if (fstat(fd, st) != 0)
		rc = elsewhere(path, strerror(errno), e);
	else if (!S_ISREG(st->st_mode))
		rc = fs_fail(e, FS_EINVAL, "the picture's file is no regular file");
	if (rc) {
		close(fd);
		return rc;
	}
	return fd;
}

/* Up to the end, or max + 1 bytes: the file may grow meanwhile. */
static int read_up_to(int fd, size_t max, struct fs_cancel *cancel, struct fs_buf *b, struct fs_errbuf *e)
{
	while (b->len <= max) {
		if (fs_cancelled(cancel))
			return FS_ECANCELLED;
		size_t want = FS_MIN(PIECE, max + 1 - b->len);
		if (fs_buf_reserve(b, want))
			return fs_fail(e, FS_ENOMEM, "out of memory");
		ssize_t got = read(fd, b->data + b->len, want);
		if (got < 0 && errno == EINTR)
			continue;
		if (got < 0)
			return fs_fail_errno(e, FS_EINVAL, "the picture's file can not be read");
		if (got == 0)
			return FS_OK;
		b->len += (size_t)got;
		b->data[b->len] = '\0';
	}
	return fs_fail(e, FS_ELIMIT, "the picture is larger than this server's limit of %zu bytes", max);
}

static int read_place(int place, const struct stat *st, size_t max, struct fs_cancel *cancel,
        struct fs_buf *b, struct fs_errbuf *e)
{
	char name[64];
	if (st->st_size > 0 && (size_t)st->st_size > max)
		return fs_fail(e, FS_ELIMIT,
		        "the picture is %zu bytes large; this server's limit is %zu bytes",
		        (size_t)st->st_size, max);
	name_of(place, name, sizeof(name));
	int fd = open(name, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
	if (fd < 0)
		return fs_fail_errno(e, FS_EINVAL, "the picture's file can not be read");
	int rc = read_up_to(fd, max, cancel, b, e);
	close(fd);
	if (!rc && b->len == 0)
		rc = fs_fail(e, FS_EINVAL, "the picture's file is empty");
	return rc;
}

int fs_file_read(const char *path, const char *const *folders, size_t n_folders, size_t max,
        struct fs_cancel *cancel, uint8_t **bytes, size_t *n, struct fs_errbuf *e)
{
	struct stat st;
	int place = find(path, folders, n_folders, &st, e);
	if (place < 0)
		return place;
	struct fs_buf b;
	fs_buf_init(&b, max + 1);
	int rc = read_place(place, &st, max, cancel, &b, e);
	close(place);
	if (!rc) {
		*bytes = (uint8_t *)fs_buf_take(&b, n);
		rc = *bytes ? FS_OK : fs_fail(e, FS_ENOMEM, "out of memory");
	}
	fs_buf_finish(&b);
	return rc;
}
