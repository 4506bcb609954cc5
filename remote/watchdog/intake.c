/* See intake.h. */
#include "remote/watchdog/intake.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define TURN ((size_t)256 << 10)    /* bytes before others get their turn */
#define CAP_FIRST ((size_t)1 << 20) /* of the memory; enough while the server keeps up */
#define ROOM ((size_t)64 << 10)     /* for one read */
#define PIPE                                                                                                 \
	(256 << 10) /* fewer turns of the writer than with the usual 64 KiB; 1 MiB would leave the caches */

struct fs_intake *fs_intake_create(const char *path, enum fs_wire_dtype dtype, int32_t n_embd)
{
	struct fs_intake *in = calloc(1, sizeof(*in));
	if (!in)
		return NULL;
	in->fd = -1;
	in->dtype = dtype;
	in->n_embd = n_embd;
	if (mkfifo(path, 0600) == 0) {
		in->fd = open(path, O_RDONLY | O_NONBLOCK | O_NOFOLLOW | O_CLOEXEC);
		if (in->fd >= 0) {
			fcntl(in->fd, F_SETPIPE_SZ, PIPE); /* a wish: the user may have many pipes */
			return in;
		}
		unlink(path);
	}
	free(in);
	return NULL;
}

static void close_end(struct fs_intake *in)
{
	if (in->fd >= 0)
		close(in->fd);
	in->fd = -1;
}

void fs_intake_destroy(struct fs_intake *in)
{
	if (!in)
		return;
	close_end(in);
	free(in->data);
	free(in);
}

static void begin(struct fs_intake *in)
{
	int rc = fs_rows_header_begin(in->header, in->dtype, &in->shape, &in->total, &in->why);
	if (rc)
		fs_fail_prefix(&in->why, rc, "the encoder's rows");
	else if (in->shape.n_embd != in->n_embd)
		rc = fs_fail(&in->why, FS_EFORMAT, "the encoder wrote rows of %d values instead of %d",
		        in->shape.n_embd, in->n_embd);
	in->refused = rc != FS_OK;
	in->begun = !in->refused;
}

size_t fs_intake_held(const struct fs_intake *in)
{
	return in->got - in->taken;
}

void fs_intake_take(struct fs_intake *in, uint8_t *out, size_t n)
{
	FS_ASSERT(n <= fs_intake_held(in));
	memcpy(out, in->data + in->from, n);
	in->taken += n;
	in->from = fs_intake_held(in) ? in->from + n : 0;
}

/* Where the next bytes go, *room of them; NULL: memory is out. */
static uint8_t *make_room(struct fs_intake *in, size_t *room)
{
	size_t held = fs_intake_held(in), want = FS_MIN(in->total - in->got, ROOM);
	if (in->cap - in->from - held < want && held <= in->cap / 2 && in->cap - held >= want) {
		memmove(in->data, in->data + in->from, held);
		in->from = 0;
	} else if (in->cap - in->from - held < want) {
		size_t cap = FS_MAX(in->cap * 2, CAP_FIRST);
		uint8_t *grown = realloc(in->data, cap);
		if (!grown)
			return NULL;
		in->data = grown;
		in->cap = cap;
	}
	*room = FS_MIN(in->total - in->got, in->cap - in->from - held);
	return in->data + in->from + held;
}

static void refuse(struct fs_intake *in, const char *why)
{
	fs_fail(&in->why, FS_EFORMAT, "%s", why);
	in->refused = true;
}

/* Bytes read; 0: none are there, or none will come. */
static size_t read_some(struct fs_intake *in)
{
	uint8_t beyond[4096], *to = beyond;
	size_t room = sizeof(beyond);
	if (in->n_header < FS_ROWS_HEADER) {
		to = in->header + in->n_header;
		room = FS_ROWS_HEADER - in->n_header;
	} else if (!in->refused && in->got < in->total) {
		to = make_room(in, &room);
		if (!to) {
			refuse(in, "out of memory for the encoder's rows");
			return 0;
		}
	}
	ssize_t n;
	do
		n = read(in->fd, to, room);
	while (n < 0 && errno == EINTR);
	if (n < 0 && errno == EAGAIN)
		return 0;
	if (n <= 0) {
		close_end(in);
		return 0;
	}
	if (in->n_header < FS_ROWS_HEADER) {
		in->n_header += (size_t)n;
		if (in->n_header == FS_ROWS_HEADER)
			begin(in);
	} else if (to != beyond) {
		in->got += (size_t)n;
	} else if (!in->refused) {
		refuse(in, "the encoder wrote more rows than it announced");
	}
	return (size_t)n;
}

void fs_intake_read(struct fs_intake *in)
{
	for (size_t n = 1, total = 0; n && in->fd >= 0 && total < TURN; total += n)
		n = read_some(in);
}

int fs_intake_finish(struct fs_intake *in, struct fs_errbuf *e)
{
	while (in->fd >= 0 && !in->refused && read_some(in))
		;
	if (in->refused)
		return fs_fail(e, FS_EFORMAT, "%s", in->why.text);
	if (!in->begun || in->got < in->total)
		return fs_fail(e, FS_EFORMAT, "the encoder's rows are cut off");
	close_end(in);
	return FS_OK;
}
