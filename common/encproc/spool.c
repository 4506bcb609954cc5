/* The spool folder; see encproc.h. Never follows a link out of the folder, never removes what is not ours. */
#include "common/encproc/encproc.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#define MEMORY_ROOT "/dev/shm"
#define ROOM_WANTED ((uint64_t)512 << 20)

static void folder_prefix(char *out, size_t cap)
{
	snprintf(out, cap, "farsight-spool-%u-", (unsigned)getuid());
}

/* The folder is flat: files only. */
static void remove_folder(int parent, const char *name, int fd)
{
	int copy = openat(fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	DIR *d = copy >= 0 ? fdopendir(copy) : NULL;
	if (!d) {
		if (copy >= 0)
			close(copy);
		return;
	}
	for (struct dirent *f; (f = readdir(d));)
		if (strcmp(f->d_name, ".") && strcmp(f->d_name, ".."))
			unlinkat(fd, f->d_name, 0);
	closedir(d);
	unlinkat(parent, name, AT_REMOVEDIR);
}

/* A folder whose lock can be had belongs to a process that is gone. */
static void remove_stale(const char *root)
{
	char prefix[64];
	folder_prefix(prefix, sizeof(prefix));
	DIR *d = opendir(root);
	if (!d)
		return;
	for (struct dirent *f; (f = readdir(d));) {
		struct stat st;
		if (strncmp(f->d_name, prefix, strlen(prefix)))
			continue;
		int fd = openat(dirfd(d), f->d_name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
		if (fd < 0)
			continue;
		if (fstat(fd, &st) == 0 && st.st_uid == getuid() && flock(fd, LOCK_EX | LOCK_NB) == 0) {
			fs_info("removing %s/%s, left by a process that is gone", root, f->d_name);
			remove_folder(dirfd(d), f->d_name, fd);
		}
		close(fd);
	}
	closedir(d);
}

/* Another process's clean-up may take the folder between mkdtemp and our lock: then it is made anew. */
static int make_folder(struct fs_spool *s, const char *root, struct fs_errbuf *e)
{
	char prefix[64];
	folder_prefix(prefix, sizeof(prefix));
	for (int attempt = 0; attempt < 5; attempt++) {
		struct stat a, b;
		int n = snprintf(s->folder, sizeof(s->folder), "%s/%sXXXXXX", root, prefix);
		if (n < 0 || (size_t)n >= sizeof(s->folder))
			return fs_fail(
			        e, FS_EINVAL, "the path of the temporary folder is too long: %s", root);
		if (!mkdtemp(s->folder))
			return fs_fail_errno(e, FS_EIO, "can not make a folder in %s", root);
		s->lock_fd = open(s->folder, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
		if (s->lock_fd >= 0 && flock(s->lock_fd, LOCK_EX | LOCK_NB) == 0 &&
		        stat(s->folder, &a) == 0 && fstat(s->lock_fd, &b) == 0 && a.st_ino == b.st_ino)
			return FS_OK;
		if (s->lock_fd >= 0)
			close(s->lock_fd);
		s->lock_fd = -1;
	}
	return fs_fail(e, FS_EIO, "can not lock a folder in %s", root);
}

static uint64_t room_in(const char *root)
{
	struct statvfs v;
	return statvfs(root, &v) ? 0 : (uint64_t)v.f_bavail * v.f_frsize;
}

static bool has_room(const char *root, uint64_t bytes)
{
	return room_in(root) >= bytes && !access(root, W_OK);
}

/* A path with a blank would not fit the line protocol. */
static const char *temporary_root(void)
{
	const char *tmp = getenv("TMPDIR");
	return tmp && tmp[0] == '/' && !strpbrk(tmp, " \t\r\n") ? tmp : "/tmp";
}

int fs_spool_init_at(struct fs_spool *s, const char *root, struct fs_errbuf *e)
{
	*s = (struct fs_spool){.lock_fd = -1};
	if (strpbrk(root, " \t\r\n"))
		return fs_fail(e, FS_EINVAL, "the folder for pictures has a blank in its path: %s", root);
	remove_stale(root);
	return make_folder(s, root, e);
}

int fs_spool_init_beside(
        struct fs_spool *s, const struct fs_spool *other, uint64_t bytes, struct fs_errbuf *e)
{
	const char *const roots[] = {MEMORY_ROOT, temporary_root()};
	struct stat here, there;
	*s = (struct fs_spool){.lock_fd = -1};
	for (size_t i = 0; i < FS_ARRAY_LEN(roots); i++)
		if (fstat(other->lock_fd, &here) == 0 && stat(roots[i], &there) == 0 &&
		        here.st_dev != there.st_dev && has_room(roots[i], bytes))
			return fs_spool_init_at(s, roots[i], e);
	return fs_fail(e, FS_ENOTFOUND, "no other folder has room");
}

uint64_t fs_spool_room(const struct fs_spool *s)
{
	return s->lock_fd < 0 ? 0 : room_in(s->folder);
}

int fs_spool_init(struct fs_spool *s, struct fs_errbuf *e)
{
	const char *tmp = temporary_root();
	remove_stale(tmp);
	if (has_room(MEMORY_ROOT, ROOM_WANTED) && fs_spool_init_at(s, MEMORY_ROOT, e) == FS_OK)
		return FS_OK;
	remove_stale(MEMORY_ROOT);
	return fs_spool_init_at(s, tmp, e);
}

void fs_spool_finish(struct fs_spool *s)
{
	if (s->lock_fd < 0)
		return;
	remove_folder(AT_FDCWD, s->folder, s->lock_fd);
	close(s->lock_fd);
	s->lock_fd = -1;
}

void fs_spool_rows(struct fs_spool *s, char rows[FS_SPOOL_PATH])
{
	snprintf(rows, FS_SPOOL_PATH, "%s/%" PRIu64 ".sve", s->folder, s->next++);
}

int fs_spool_picture(struct fs_spool *s, char picture[FS_SPOOL_PATH], char rows[FS_SPOOL_PATH], int *fd,
        struct fs_errbuf *e)
{
	uint64_t n = s->next++;
	snprintf(picture, FS_SPOOL_PATH, "%s/%" PRIu64 ".img", s->folder, n);
	snprintf(rows, FS_SPOOL_PATH, "%s/%" PRIu64 ".sve", s->folder, n);
	*fd = open(picture, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
	if (*fd < 0)
		return fs_fail_errno(e, FS_EIO, "can not write %s", picture);
	return FS_OK;
}
