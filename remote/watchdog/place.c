/* The lock and the socket; see place.h. Listens on nothing but this unix socket. */
#include "remote/watchdog/place.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#define CHECK_MS 5000

static bool same_file(const struct stat *a, const struct stat *b)
{
	return a->st_dev == b->st_dev && a->st_ino == b->st_ino;
}

/* The lock's file is never removed, so that who holds it holds the place. */
static int take_lock(struct fs_place *p, struct fs_errbuf *e)
{
	char path[FS_WD_PATH_MAX + 8];
	struct stat ours, there;
	snprintf(path, sizeof(path), "%s.lock", p->path);
	if (p->lock_fd >= 0 && !fstat(p->lock_fd, &ours) && !lstat(path, &there) && same_file(&ours, &there))
		return FS_OK;
	int fd = open(path, O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0600);
	if (fd < 0)
		return fs_fail_errno(e, FS_EIO, "can not open %s", path);
	if (flock(fd, LOCK_EX | LOCK_NB)) {
		int rc = errno == EWOULDBLOCK
		                 ? fs_fail(e, FS_EUNAVAILABLE, "a watchdog already runs at %s", p->path)
		                 : fs_fail_errno(e, FS_EIO, "can not lock %s", path);
		close(fd);
		return rc;
	}
	if (p->lock_fd >= 0)
		close(p->lock_fd);
	p->lock_fd = fd;
	return FS_OK;
}

/* With the lock held, a socket that is there is a dead watchdog's. */
static int open_socket(struct fs_place *p, struct fs_errbuf *e)
{
	struct sockaddr_un a = {.sun_family = AF_UNIX};
	memcpy(a.sun_path, p->path, strlen(p->path));
	unlink(p->path);
	int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	mode_t mask = umask(077);
	int rc = fd < 0 || bind(fd, (struct sockaddr *)&a, sizeof(a)) || listen(fd, 16) ||
	         lstat(p->path, &p->seen);
	umask(mask);
	if (rc) {
		rc = fs_fail_errno(e, FS_EIO, "can not listen at %s", p->path);
		if (fd >= 0)
			close(fd);
		return rc;
	}
	if (p->listen_fd >= 0)
		close(p->listen_fd);
	p->listen_fd = fd;
	return FS_OK;
}

static int open_place(struct fs_place *p, struct fs_errbuf *e)
{
	int rc = fs_wd_prepare_folder(p->path, e);
	if (rc == FS_OK)
		rc = take_lock(p, e);
	return rc ? rc : open_socket(p, e);
}

int fs_place_open(struct fs_place *p, const char *path, struct fs_errbuf *e)
{
	*p = (struct fs_place){.listen_fd = -1, .lock_fd = -1, .check_at = fs_deadline_ms(CHECK_MS)};
	if (strlen(path) >= sizeof(p->path))
		return fs_fail(e, FS_EINVAL, "the socket's path is too long: %s", path);
	memcpy(p->path, path, strlen(path) + 1);
	return open_place(p, e);
}

void fs_place_resume(struct fs_place *p, const char *path, int listen_fd, int lock_fd)
{
	*p = (struct fs_place){.listen_fd = listen_fd, .lock_fd = lock_fd, .check_at = fs_now()};
	snprintf(p->path, sizeof(p->path), "%s", path);
	if (lstat(p->path, &p->seen))
		p->seen = (struct stat){0}; /* the first check makes it anew */
}

/* Only our own: another watchdog may have taken the place. */
void fs_place_close_socket(struct fs_place *p)
{
	struct stat there;
	if (p->listen_fd < 0)
		return;
	if (!lstat(p->path, &there) && same_file(&there, &p->seen))
		unlink(p->path);
	close(p->listen_fd);
	p->listen_fd = -1;
}

void fs_place_finish(struct fs_place *p)
{
	fs_place_close_socket(p);
	if (p->lock_fd >= 0)
		close(p->lock_fd);
	p->lock_fd = -1;
}

int fs_place_check(struct fs_place *p)
{
	struct stat there;
	struct fs_errbuf e;
	if (p->listen_fd < 0 || fs_now() < p->check_at)
		return FS_OK;
	p->check_at = fs_deadline_ms(CHECK_MS);
	if (!lstat(p->path, &there) && same_file(&there, &p->seen))
		return FS_OK;
	int rc = open_place(p, &e);
	if (rc == FS_OK)
		fs_warn("the socket %s had been removed and was made anew", p->path);
	else if (!p->warned)
		fs_warn("the socket %s was removed: %s", p->path, e.text);
	p->warned = rc != FS_OK;
	if (rc != FS_EUNAVAILABLE)
		return FS_OK;
	close(p->listen_fd);
	p->listen_fd = -1;
	return rc;
}
