/*
 * Fuzz target: what a vision host sends to the server, while two pictures wait for it, in pieces; the first
 * byte is their size. The ssh session is played. However it ends, each picture has one end: rows that are
 * finite and of the shape that was told, or a text.
 */
#include "server/vision/internal.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static struct {
	const uint8_t *data;
	size_t n, piece;
	struct fs_buf sent;
} host;

ssize_t __wrap_fs_ssh_read(struct fs_ssh *s, void *buf, size_t n, struct fs_errbuf *e);
ssize_t __wrap_fs_ssh_read_stderr(struct fs_ssh *s, void *buf, size_t n);
ssize_t __wrap_fs_ssh_write(struct fs_ssh *s, const void *buf, size_t n, struct fs_errbuf *e);
size_t __wrap_fs_ssh_unsent(const struct fs_ssh *s);
int __wrap_fs_ssh_wait(struct fs_ssh *s, bool want_write, int wake_fd, int64_t deadline);

ssize_t __wrap_fs_ssh_read(struct fs_ssh *s, void *buf, size_t n, struct fs_errbuf *e)
{
	static bool pause;

	if (host.n == 0)
		return fs_fail(e, FS_EUNAVAILABLE, "the channel ended");
	pause = !pause;
	if (pause)
		return 0;
	n = FS_MIN(n, FS_MIN(host.piece, host.n));
	memcpy(buf, host.data, n);
	host.data += n;
	host.n -= n;
	return (ssize_t)n;
}

ssize_t __wrap_fs_ssh_read_stderr(struct fs_ssh *s, void *buf, size_t n)
{
	return 0;
}

ssize_t __wrap_fs_ssh_write(struct fs_ssh *s, const void *buf, size_t n, struct fs_errbuf *e)
{
	FS_ASSERT(fs_buf_append(&host.sent, buf, n) == FS_OK);
	return (ssize_t)n;
}

size_t __wrap_fs_ssh_unsent(const struct fs_ssh *s)
{
	return 0;
}

int __wrap_fs_ssh_wait(struct fs_ssh *s, bool want_write, int wake_fd, int64_t deadline)
{
	return FS_OK;
}

static struct fs_vision *make(void)
{
	struct fs_vision *v = calloc(1, sizeof(*v));

	FS_ASSERT(v && pthread_mutex_init(&v->lock, NULL) == 0);
	v->o = (struct fs_vision_opts){.connect_timeout_ms = 1000,
	        .ping_interval_ms = 1,
	        .dead_after_ms = 60000,
	        .encode_timeout_ms = 60000,
	        .f16 = true};
	v->news = fs_wake_open();
	v->n_hosts = 1;
	v->hosts[0] =
	        (struct fs_host){.v = v, .name = "box", .use = FS_SLOT_LIVE, .state = FS_HOST_CONNECTING};
	v->hosts[0].wake = fs_wake_open();
	FS_ASSERT(v->news >= 0 && v->hosts[0].wake >= 0);
	return v;
}

/* As the host's thread does it when a connection has ended. */
static void lose_jobs(struct fs_vision *v, const char *why)
{
	pthread_mutex_lock(&v->lock);
	v->hosts[0].state = FS_HOST_DOWN;
	while (v->hosts[0].jobs.first)
		fs_job_lost_locked(v->hosts[0].jobs.first, FS_HOST_ERR_LOST, why);
	pthread_mutex_unlock(&v->lock);
}

static void check_job(struct fs_vision_job *j)
{
	struct fs_rows *rows = NULL;
	struct fs_errbuf e = {""};

	if (j->done && fs_vision_wait(j, &rows, &e) == FS_OK) {
		const struct fs_rows_shape *s = &rows->shape;
		FS_ASSERT(s->n_tokens == s->nx * s->ny && s->n_tokens > 0 && s->n_embd > 0);
		for (size_t i = 0; i < (size_t)s->n_tokens * (size_t)s->n_embd; i++)
			FS_ASSERT(isfinite(rows->data[i]));
		fs_rows_unref(rows);
	} else {
		FS_ASSERT(!j->done || e.text[0]);
	}
	fs_vision_job_destroy(j);
}

static void check_sent(void)
{
	struct fs_frame f;
	size_t used;

	for (size_t at = 0; at < host.sent.len; at += used)
		FS_ASSERT(fs_frame_parse(host.sent.data + at, host.sent.len - at, &f, &used, NULL) == FS_OK);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
	static const uint8_t key[32];
	struct fs_vision_job *jobs[2];
	struct fs_errbuf e = {""};
	bool greeted = false;

	if (n < 2 || n > 65536)
		return 0;
	fs_log_set_level(FS_LOG_ERROR);
	host.data = data + 1;
	host.n = n - 1;
	host.piece = data[0] % 16 ? (size_t)data[0] * data[0] : n;
	fs_buf_init(&host.sent, 64 << 20);
	struct fs_vision *v = make();
	for (size_t i = 0; i < FS_ARRAY_LEN(jobs); i++)
		FS_ASSERT(fs_vision_submit(v, "picture", 7, key, NULL, NULL, &jobs[i], &e) == FS_OK);
	FS_ASSERT(fs_host_serve(&v->hosts[0], NULL, &greeted, &e) != FS_OK && e.text[0]);
	lose_jobs(v, e.text);
	check_sent();
	for (size_t i = 0; i < FS_ARRAY_LEN(jobs); i++)
		check_job(jobs[i]);
	FS_ASSERT(v->n_jobs == 0 && v->job_bytes == 0);
	fs_vision_destroy(v);
	fs_buf_finish(&host.sent);
	return 0;
}
