/*
 * link: frames over one ssh channel, on the host's thread. Control frames go before picture bytes, pictures
 * go in chunks, taking turns; rows are received straight into the job's buffer. Memory: one pinned output
 * buffer, one scratch frame, 256 KiB of control frames. It refuses frames that do not follow the format and
 * rows that nobody asked for in that shape.
 */
#include "server/vision/internal.h"

#include <stdlib.h>
#include <string.h>

#define OUT_CAP (FS_FRAME_CHUNK + 4096) /* one chunk, its header, an ENC, and control frames in front */
#define CONTROL_MAX ((size_t)256 * 1024)
#define TURN ((size_t)4 << 20) /* bytes one way before the other way gets its turn */
#define BULK                                                                                                 \
	((size_t)64 * 1024)  /* unsent bytes whose shrinking proves a living peer: more than pings can be */
#define FRAMES_A_SECOND 2000 /* beside rows; ten times what the fastest encoder needs */

int fs_link_init(struct fs_link *l, struct fs_host *h, struct fs_ssh *ssh, struct fs_errbuf *e)
{
	*l = (struct fs_link){.h = h, .ssh = ssh, .last_alive = fs_now()};
	fs_buf_init(&l->control, CONTROL_MAX);
	l->out = malloc(OUT_CAP);
	l->scratch = malloc(FS_FRAME_MAX);
	return l->out && l->scratch ? FS_OK : fs_fail(e, FS_ENOMEM, "out of memory");
}

void fs_link_finish(struct fs_link *l)
{
	fs_buf_finish(&l->control);
	free(l->out);
	free(l->scratch);
}

int fs_link_queue(
        struct fs_link *l, uint8_t type, uint32_t id, const void *payload, size_t n, struct fs_errbuf *e)
{
	if (fs_frame_append(&l->control, type, id, payload, n))
		return fs_fail(e, FS_EUNAVAILABLE, "the host does not take what is sent to it");
	return FS_OK;
}

bool fs_link_wants_write(const struct fs_link *l)
{
	return l->out_at < l->out_n || l->control.len || l->uploading;
}

/* ---- sending ---- */

static void begin_upload(struct fs_link *l, struct fs_vision_job *j)
{
	int64_t left = j->deadline - fs_now();
	struct fs_enc_head head = {
	        .picture_bytes = (uint32_t)j->n,
	        .dtype = l->h->v->o.f16 ? FS_WIRE_F16 : FS_WIRE_F32,
	        .min_tokens = j->params.min_tokens,
	        .max_tokens = j->params.max_tokens,
	        .deadline_ms = left > FS_MS ? (uint32_t)FS_MIN(left / FS_MS, (int64_t)UINT32_MAX) : 1,
	};
	uint8_t *p = l->out + l->out_n;
	if (++l->h->v->next_id == 0)
		l->h->v->next_id = 1;
	j->id = l->h->v->next_id;
	j->stage = FS_JOB_SENDING;
	j->sent = 0;
	fs_host_begins_locked(j);
	fs_frame_header_put(p, FS_FRAME_ENC, j->id, FS_ENC_HEAD);
	fs_enc_head_put(p + FS_FRAME_HEADER, &head);
	l->out_n += FS_FRAME_HEADER + FS_ENC_HEAD;
}

/* The next chunk of one job; the job then goes behind the others. */
static void add_chunk_locked(struct fs_link *l)
{
	struct fs_host *h = l->h;
	struct fs_vision_job *j = h->jobs.first;
	l->uploading = false;
	if (h->state != FS_HOST_UP)
		return;
	const struct fs_vision_job *full = NULL; /* one that has to wait, and so have all like it */
	for (; j; j = j->next) {
		if (j->done || j->stage > FS_JOB_SENDING)
			continue;
		if (j->stage == FS_JOB_SENDING || (!full && fs_host_has_room_locked(h, j)))
			break;
		full = j;
	}
	if (!j)
		return;
	if (j->stage == FS_JOB_WAITING)
		begin_upload(l, j);
	size_t room = OUT_CAP - l->out_n - FS_FRAME_HEADER;
	size_t n = FS_MIN(FS_MIN(j->n - j->sent, (size_t)FS_FRAME_CHUNK), room);
	fs_frame_header_put(l->out + l->out_n, FS_FRAME_DATA, j->id, (uint32_t)n);
	memcpy(l->out + l->out_n + FS_FRAME_HEADER, j->bytes + j->sent, n);
	l->out_n += FS_FRAME_HEADER + n;
	j->sent += n;
	if (j->sent == j->n) {
		j->stage = FS_JOB_SENT;
		fs_host_sent_locked(j);
	}
	fs_jobs_remove(&h->jobs, j);
	fs_jobs_append(&h->jobs, j);
	l->uploading = true; /* perhaps more; the next call finds out */
}

static void refill(struct fs_link *l)
{
	l->out_n = l->out_at = 0;
	size_t control = FS_MIN(l->control.len, (size_t)OUT_CAP);
	if (control) {
		memcpy(l->out, l->control.data, control);
		fs_buf_consume(&l->control, control);
		l->out_n = control;
	}
	if (l->control.len == 0 && OUT_CAP - l->out_n > 2 * FS_FRAME_HEADER + FS_ENC_HEAD + 1024) {
		pthread_mutex_lock(&l->h->v->lock);
		add_chunk_locked(l);
		pthread_mutex_unlock(&l->h->v->lock);
	}
}

int fs_link_send(struct fs_link *l, bool *moved, struct fs_errbuf *e)
{
	for (size_t turn = 0; turn < TURN;) {
		if (l->out_at == l->out_n)
			refill(l);
		if (l->out_n == 0)
			return FS_OK;
		ssize_t w = fs_ssh_write(l->ssh, l->out + l->out_at, l->out_n - l->out_at, e);
		if (w < 0)
			return (int)w;
		if (w == 0)
			return FS_OK;
		*moved = true;
		turn += (size_t)w;
		l->out_at += (size_t)w;
		l->up += (uint64_t)w;
	}
	return FS_OK;
}

/* ---- receiving ---- */

static struct fs_vision_job *find_job(struct fs_link *l, uint32_t id)
{
	struct fs_vision_job *j;
	pthread_mutex_lock(&l->h->v->lock);
	for (j = l->h->jobs.first; j && (j->id != id || j->done); j = j->next)
		;
	pthread_mutex_unlock(&l->h->v->lock);
	return j;
}

void fs_link_forget(struct fs_link *l, const struct fs_vision_job *j)
{
	if (l->in_job == j)
		l->in_job = NULL;
	if (j->stage == FS_JOB_RECEIVING)
		l->late += j->need - j->got;
	else if (j->stage != FS_JOB_WAITING)
		l->late += FS_ROWS_MAX_BYTES;
}

/* Rows of a job that has ended here may still be on their way; no others may. */
static int check_late(struct fs_link *l, struct fs_errbuf *e)
{
	struct fs_vision_job *j;
	pthread_mutex_lock(&l->h->v->lock);
	for (j = l->h->jobs.first; j && j->id != l->in.id; j = j->next)
		;
	pthread_mutex_unlock(&l->h->v->lock);
	if (j)
		return FS_OK; /* it is about to leave the list */
	if (l->in.len > l->late)
		return fs_fail(e, FS_EFORMAT, "it sent rows that nobody asked for");
	l->late -= l->in.len;
	return FS_OK;
}

static int check_pace(struct fs_link *l, struct fs_errbuf *e)
{
	int64_t now = fs_now();
	if (now - l->second >= FS_SEC) {
		l->second = now;
		l->frames = 0;
	}
	return ++l->frames <= FRAMES_A_SECOND
	               ? FS_OK
	               : fs_fail(e, FS_EFORMAT, "it sends more than %d frames a second", FRAMES_A_SECOND);
}

static int begin_payload(struct fs_link *l, struct fs_errbuf *e)
{
	int rc = fs_frame_header_get(l->head, &l->in, e);
	if (rc)
		return rc;
	l->in_at = 0;
	l->in_job = NULL;
	if (l->in.type != FS_FRAME_DATA)
		return FS_OK;
	struct fs_vision_job *j = find_job(l, l->in.id);
	if (!j)
		return check_late(l, e);
	if (j->stage != FS_JOB_RECEIVING || l->in.len > j->need - j->got)
		return fs_fail(e, FS_EFORMAT, "it sent rows that were not announced");
	l->in_job = j;
	return FS_OK;
}

static int end_payload(struct fs_link *l, struct fs_errbuf *e)
{
	struct fs_vision_job *j = l->in_job;
	l->head_n = 0;
	l->in_job = NULL;
	if (j) {
		fs_job_received(j, l->in.len);
		if (j->got == j->need)
			fs_job_complete(j);
		return FS_OK;
	}
	if (l->in.type == FS_FRAME_DATA)
		return FS_OK;
	l->in.payload = l->scratch;
	int rc = check_pace(l, e);
	return rc ? rc : fs_host_frame(l->h, l, &l->in, e);
}

/* Where the next bytes belong, and how many of them. */
static uint8_t *destination(struct fs_link *l, size_t *n)
{
	if (l->head_n < FS_FRAME_HEADER) {
		*n = FS_FRAME_HEADER - l->head_n;
		return l->head + l->head_n;
	}
	*n = l->in.len - l->in_at;
	struct fs_vision_job *j = l->in_job;
	return j ? j->data + j->data_at + j->got + l->in_at : l->scratch + l->in_at;
}

int fs_link_receive(struct fs_link *l, bool *moved, struct fs_errbuf *e)
{
	for (size_t turn = 0; turn < TURN;) {
		size_t n;
		uint8_t *to = destination(l, &n);
		ssize_t r = fs_ssh_read(l->ssh, to, n, e);
		if (r < 0)
			return (int)r;
		if (r == 0)
			break;
		*moved = true;
		l->last_alive = fs_now();
		turn += (size_t)r;
		l->down += (uint64_t)r;
		int rc = FS_OK;
		if (l->head_n < FS_FRAME_HEADER) {
			l->head_n += (size_t)r;
			if (l->head_n == FS_FRAME_HEADER)
				rc = begin_payload(l, e);
		} else {
			l->in_at += (size_t)r;
		}
		if (!rc && l->head_n == FS_FRAME_HEADER && l->in_at == l->in.len)
			rc = end_payload(l, e);
		if (rc)
			return rc;
	}
	size_t unsent = fs_ssh_unsent(l->ssh);
	if (l->last_unsent >= BULK && unsent < l->last_unsent)
		l->last_alive = fs_now();
	l->last_unsent = unsent;
	return FS_OK;
}
