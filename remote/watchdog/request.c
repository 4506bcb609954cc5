/*
 * The life of one picture on the vision host: received into the spool, queued, encoded, its rows sent. Loop
 * thread. Leases take turns: the one that waited longest since its last picture goes first. Memory is
 * bounded: pictures and rows are files, and rows are read one chunk at a time as the socket drains; rows of
 * an encoder that can write into a FIFO come that way, and are sent while they are written. Refuses more
 * pictures than max_queue a lease, or than the spool may hold; a full file system is left for another one, or
 * told.
 */
#include "remote/watchdog/intake.h"
#include "remote/watchdog/state.h"

#include "common/gguf/gguf.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define ROWS_CHUNK                                                                                           \
	((size_t)FS_FRAME_CHUNK - FS_FRAME_HEADER) /* a frame of 64 KiB is what a unix socket takes at once  \
	                                            */
#define RESULTS_MAX                                                                                          \
	4 /* answers of one connection that wait to be read before its next picture is encoded               \
	   */

/*
 * While nobody waits for the encoder, its rows are taken from it at the pace at which the server takes them:
 * what was read last is then still in the processor's caches when it is written. Not for long, since an
 * encoder that writes does nothing else.
 */
#define READ_AHEAD ((size_t)192 << 10)
#define PACED_MS 100

#define SPARE_ROOM ((uint64_t)64 << 20) /* of a second folder for rows whose size nobody knows */

static struct fs_req *find(const struct fs_conn *c, uint32_t id)
{
	struct fs_req *r = c->wd->reqs;
	while (r && (r->conn != c || r->id != id))
		r = r->next;
	return r;
}

/* Removes the files; a running request keeps its record until the encoder is done. */
static void remove_files(struct fs_req *r)
{
	if (r->fd >= 0)
		close(r->fd);
	r->fd = -1;
	fs_intake_destroy(r->intake);
	r->intake = NULL;
	unlink(r->picture);
	unlink(r->rows);
}

static void destroy(struct fs_req *r)
{
	struct fs_wd *wd = r->wd;
	struct fs_req **at = &wd->reqs;
	while (*at != r)
		at = &(*at)->next;
	*at = r->next;
	if (wd->running == r)
		wd->running = NULL;
	remove_files(r);
	wd->n_reqs--;
	wd->spooled -= r->head.picture_bytes;
	r->lease->requests--;
	free(r);
}

/* Answers ERR and lets go of the request; what runs is cancelled and its record waits for the encoder. */
static void end(struct fs_req *r, int err, const char *text)
{
	if (r->conn) {
		fs_conn_send_err(r->conn, r->id, err, text);
		if (err != FS_ECANCELLED)
			r->wd->errors++;
	}
	r->conn = NULL;
	if (r->phase == FS_REQ_RUNNING)
		fs_encproc_cancel(&r->wd->enc);
	else
		destroy(r);
}

/* ---- received ---- */

static int admit(struct fs_conn *c, const struct fs_enc_head *h, struct fs_errbuf *e)
{
	struct fs_wd *wd = c->wd;
	if (!strcmp(fs_encproc_state_word(&wd->enc), "failed"))
		return fs_fail(e, FS_EUNAVAILABLE, "%s", wd->enc.cause);
	if (c->lease->requests >= (size_t)wd->cfg.max_queue)
		return fs_fail(e, FS_EUNAVAILABLE, "more than %d pictures of this server are waiting",
		        wd->cfg.max_queue);
	if (wd->n_reqs >= FS_WD_REQUESTS_MAX || wd->spooled + h->picture_bytes > FS_WD_SPOOL_MAX)
		return fs_fail(e, FS_EUNAVAILABLE, "too many pictures are waiting on this vision host");
	return FS_OK;
}

/* The spool, or one on another file system while that is full. */
static struct fs_spool *spool_with_room(struct fs_wd *wd, uint64_t bytes)
{
	struct fs_errbuf e;
	uint64_t wanted = bytes + wd->last_rows;
	if (fs_spool_room(&wd->spool) >= wanted)
		return &wd->spool;
	if (wd->spare.lock_fd < 0 && fs_spool_init_beside(&wd->spare, &wd->spool, wanted, &e) == FS_OK)
		fs_warn("%s is full: pictures go to %s meanwhile", wd->spool.folder, wd->spare.folder);
	return fs_spool_room(&wd->spare) >= wanted ? &wd->spare : &wd->spool;
}

int fs_req_begin(struct fs_conn *c, uint32_t id, const struct fs_enc_head *h, struct fs_errbuf *e)
{
	struct fs_wd *wd = c->wd;
	struct fs_errbuf why;
	if (id == 0 || find(c, id))
		return fs_fail(
		        e, FS_EFORMAT, "ENC with id %u, which is %s", id, id ? "in use" : "the connection's");
	int rc = admit(c, h, &why);
	struct fs_req *r = rc ? NULL : calloc(1, sizeof(*r));
	if (!rc && !r)
		rc = fs_fail(&why, FS_ENOMEM, "out of memory");
	if (!rc && fs_spool_picture(spool_with_room(wd, h->picture_bytes), r->picture, r->rows, &r->fd, &why))
		rc = fs_fail_prefix(&why, FS_EUNAVAILABLE, "the vision host can not store the picture");
	if (rc) {
		free(r);
		wd->errors++;
		fs_conn_send_err(c, id, rc, why.text);
		return FS_OK;
	}
	r->wd = wd;
	r->conn = c;
	r->lease = c->lease;
	r->id = id;
	r->head = *h;
	r->order = ++wd->order;
	r->deadline = h->deadline_ms ? fs_deadline_ms(h->deadline_ms) : FS_NEVER;
	r->next = wd->reqs;
	wd->reqs = r;
	wd->n_reqs++;
	wd->spooled += h->picture_bytes;
	r->lease->requests++;
	return FS_OK;
}

static int write_all(int fd, const uint8_t *data, size_t n)
{
	while (n) {
		ssize_t w = write(fd, data, n);
		if (w < 0 && errno == EINTR)
			continue;
		if (w <= 0)
			return FS_EIO;
		data += w;
		n -= (size_t)w;
	}
	return FS_OK;
}

int fs_req_data(struct fs_conn *c, const struct fs_frame *f, struct fs_errbuf *e)
{
	struct fs_req *r = find(c, f->id);
	if (!r)
		return FS_OK;
	if (r->phase != FS_REQ_RECEIVING || f->len > r->head.picture_bytes - r->received)
		return fs_fail(e, FS_EFORMAT, "request %u has more DATA than the %u bytes it announced",
		        f->id, r->head.picture_bytes);
	if (write_all(r->fd, f->payload, f->len)) {
		struct fs_errbuf why;
		fs_fail_errno(&why, FS_EIO, "the vision host can not store the picture");
		end(r, FS_EUNAVAILABLE, why.text);
		return FS_OK;
	}
	r->received += f->len;
	if (r->received == r->head.picture_bytes) {
		close(r->fd);
		r->fd = -1;
		r->phase = FS_REQ_QUEUED;
		r->queued_at = fs_now();
	}
	return FS_OK;
}

void fs_req_cancel(struct fs_conn *c, uint32_t id)
{
	struct fs_req *r = find(c, id);
	if (r)
		end(r, FS_ECANCELLED, "cancelled");
}

void fs_req_drop_all(struct fs_conn *c)
{
	for (struct fs_req *r = c->wd->reqs, *next; r; r = next) {
		next = r->next;
		if (r->conn != c)
			continue;
		r->conn = NULL;
		if (r->phase == FS_REQ_RUNNING)
			fs_encproc_cancel(&c->wd->enc);
		else
			destroy(r);
	}
}

/* ---- encoded ---- */

static size_t results_waiting(const struct fs_conn *c)
{
	size_t n = 0;
	for (const struct fs_req *r = c->wd->reqs; r; r = r->next)
		n += r->conn == c && r->phase == FS_REQ_SENDING;
	return n;
}

static struct fs_req *choose(const struct fs_wd *wd)
{
	struct fs_req *best = NULL;
	for (struct fs_req *r = wd->reqs; r; r = r->next) {
		if (r->phase != FS_REQ_QUEUED || results_waiting(r->conn) >= RESULTS_MAX)
			continue;
		if (!best || r->lease->turn < best->lease->turn ||
		        (r->lease->turn == best->lease->turn && r->order < best->order))
			best = r;
	}
	return best;
}

static void start(struct fs_wd *wd, struct fs_req *r)
{
	struct fs_order o = {.kind = FS_ORDER_ENC};
	struct fs_errbuf e;
	snprintf(o.in, sizeof(o.in), "%s", r->picture);
	snprintf(o.out, sizeof(o.out), "%s", r->rows);
	if (wd->cfg.extended) {
		int32_t most = wd->cfg.max_tokens;
		o.f16 = r->head.dtype == FS_WIRE_F16;
		o.max_tokens = most && r->head.max_tokens > most ? most : r->head.max_tokens;
		o.min_tokens = o.max_tokens ? FS_MIN(r->head.min_tokens, o.max_tokens) : r->head.min_tokens;
	}
	r->f16_file = o.f16;
	if (wd->cfg.extended && wd->enc.facts.pipe)
		r->intake =
		        fs_intake_create(r->rows, o.f16 ? FS_WIRE_F16 : FS_WIRE_F32, wd->enc.facts.n_embd);
	r->started_at = fs_now();
	r->lease->turn = ++wd->turn;
	int rc = fs_encproc_encode(&wd->enc, &o, &e);
	if (rc) {
		end(r, FS_EINTERNAL, e.text);
		return;
	}
	r->phase = FS_REQ_RUNNING;
	wd->running = r;
}

void fs_req_schedule(struct fs_wd *wd)
{
	int64_t now = fs_now();
	bool failed = !strcmp(fs_encproc_state_word(&wd->enc), "failed");
	for (struct fs_req *r = wd->reqs, *next; r; r = next) {
		next = r->next;
		if (failed && (r->phase == FS_REQ_QUEUED || r->phase == FS_REQ_RECEIVING))
			end(r, FS_EUNAVAILABLE, wd->enc.cause);
		else if (r->conn && r->phase != FS_REQ_SENDING && now >= r->deadline)
			end(r, FS_ETIMEOUT, "the picture was not encoded within its deadline");
	}
	bool pauses = wd->running || wd->stopping || fs_wd_replace_presses(wd);
	struct fs_req *r = pauses ? NULL : choose(wd);
	if (r && wd->enc.state == FS_ENC_READY)
		start(wd, r);
	else if (r && wd->enc.asleep)
		fs_encproc_wake(&wd->enc);
}

/* Whether the rows that are being written are to be read on now; *until: when to ask again. */
static bool reads_on(const struct fs_wd *wd, int64_t *until)
{
	const struct fs_req *r = wd->running;
	const struct fs_intake *in = r ? r->intake : NULL;
	if (!in || in->fd < 0)
		return false;
	if (!r->conn || in->refused || fs_intake_held(in) < READ_AHEAD || choose(wd))
		return true;
	*until = r->rows_at + PACED_MS * FS_MS;
	return fs_now() >= *until;
}

void fs_req_prepare(struct fs_wd *wd, struct fs_pollset *ps)
{
	int64_t until = FS_NEVER;
	for (struct fs_req *r = wd->reqs; r; r = r->next)
		if (r->conn && r->phase != FS_REQ_SENDING)
			fs_pollset_until(ps, r->deadline);
	wd->rows_slot = -1;
	if (reads_on(wd, &until))
		wd->rows_slot = fs_pollset_add(ps, wd->running->intake->fd, POLLIN);
	else
		fs_pollset_until(ps, until);
}

/* ---- sent ---- */

/* The rows file's header against its size, the answer's counts and the encoder's width. Elements are the
 * server's to check: it has to read them all anyway. */
static int open_rows(struct fs_req *r, const struct fs_rows_shape *told, int32_t n_embd, struct fs_errbuf *e)
{
	uint8_t header[FS_ROWS_HEADER];
	struct stat st;
	struct fs_rows_shape *s = &r->out.shape;
	r->fd = open(r->rows, O_RDONLY | O_NOFOLLOW | O_CLOEXEC);
	if (r->fd < 0 || fstat(r->fd, &st))
		return fs_fail_errno(e, FS_EUNAVAILABLE, "the encoder's rows can not be read");
	if (!S_ISREG(st.st_mode) || read(r->fd, header, sizeof(header)) != (ssize_t)sizeof(header))
		return fs_fail(e, FS_EFORMAT, "the encoder's rows file is too short");
	uint64_t bytes = (uint64_t)st.st_size;
	if (r->f16_file) /* the same header before elements of half the size */
		bytes = FS_ROWS_HEADER + 2 * (bytes - FS_ROWS_HEADER);
	int rc = fs_rows_header_get(header, bytes, s, e);
	if (rc)
		return fs_fail_prefix(e, rc, "the encoder's rows");
	if (s->n_embd != n_embd || s->n_tokens != told->n_tokens)
		return fs_fail(e, FS_EFORMAT, "the encoder told %d rows of %d and wrote %d of %d",
		        told->n_tokens, n_embd, s->n_tokens, s->n_embd);
	return FS_OK;
}

/* r->out.shape is there: the server hears of it. ms: the encoder's own time; 0 = it has not told. */
static int announce(struct fs_req *r, double ms, struct fs_errbuf *e)
{
	uint8_t head[FS_ROWS_HEAD];
	r->rows_at = fs_now();
	r->out.dtype = r->head.dtype;
	r->out.encode_us = (uint32_t)FS_MIN((r->rows_at - r->started_at) / 1000, (int64_t)UINT32_MAX);
	if (ms > 0 && ms < 4e6)
		r->out.encode_us = (uint32_t)(ms * 1000);
	r->out.queue_us = (uint32_t)FS_MIN((r->started_at - r->queued_at) / 1000, (int64_t)UINT32_MAX);
	int rc = fs_rows_head_bytes(&r->out, &r->total, e);
	if (rc)
		return rc;
	fs_rows_head_put(head, &r->out);
	fs_conn_send(r->conn, FS_FRAME_ROWS, r->id, head, sizeof(head));
	r->wd->last_rows = FS_ROWS_HEADER + r->total;
	return FS_OK;
}

/* What has come through the FIFO, and was announced when it began, against the answer. */
static int end_intake(struct fs_req *r, const struct fs_rows_shape *told, struct fs_errbuf *e)
{
	int rc = fs_intake_finish(r->intake, e);
	if (rc == FS_OK && r->intake->shape.n_tokens != told->n_tokens)
		rc = fs_fail(e, FS_EFORMAT, "the encoder told %d rows and wrote %d", told->n_tokens,
		        r->intake->shape.n_tokens);
	r->out.shape = r->intake->shape;
	return rc;
}

static void answer(struct fs_req *r, const struct fs_reply *reply)
{
	struct fs_wd *wd = r->wd;
	struct fs_errbuf e;
	int rc = r->intake ? end_intake(r, &reply->shape, &e)
	                   : open_rows(r, &reply->shape, wd->enc.facts.n_embd, &e);
	if (rc == FS_OK && !r->total)
		rc = announce(r, reply->ms, &e);
	if (rc) {
		end(r, FS_EUNAVAILABLE, e.text);
		return;
	}
	unlink(r->picture);
	unlink(r->rows); /* the descriptor keeps it until it is sent */
	r->phase = FS_REQ_SENDING;
	wd->encodes++;
}

void fs_req_dispatch(struct fs_wd *wd, const struct fs_pollset *ps)
{
	struct fs_req *r = wd->running;
	struct fs_errbuf e;
	if (!r || !r->intake || !fs_pollset_got(ps, wd->rows_slot))
		return;
	fs_intake_read(r->intake);
	if (!r->conn || r->total || !r->intake->begun)
		return;
	r->out.shape = r->intake->shape;
	if (announce(r, 0, &e))
		end(r, FS_EUNAVAILABLE, e.text);
}

/* An encoder that had no room for its rows gets another place once; false when there is none. */
static bool move_rows(struct fs_req *r, const char *text)
{
	struct fs_wd *wd = r->wd;
	struct fs_errbuf e;
	const char *full = strerror(ENOSPC);
	if (r->moved || r->intake || !strstr(text, full))
		return false;
	if (wd->spare.lock_fd < 0 && fs_spool_init_beside(&wd->spare, &wd->spool, SPARE_ROOM, &e))
		return false;
	if (!strncmp(r->rows, wd->spare.folder, strlen(wd->spare.folder)))
		return false;
	fs_warn("the encoder had no room for its rows in %s: once more, into %s", wd->spool.folder,
	        wd->spare.folder);
	unlink(r->rows);
	fs_spool_rows(&wd->spare, r->rows);
	r->moved = true;
	return true;
}

void fs_req_done(void *arg, int err, const struct fs_reply *reply, const char *text)
{
	struct fs_wd *wd = arg;
	struct fs_req *r = wd->running;
	if (!r)
		return;
	wd->running = NULL;
	r->phase = FS_REQ_QUEUED; /* of the states that end() may destroy */
	if (!r->conn)
		destroy(r);
	else if (err == FS_EINVAL && move_rows(r, text))
		return; /* queued again */
	else if (err == FS_EINVAL && strstr(text, strerror(ENOSPC)))
		end(r, FS_EUNAVAILABLE, text); /* not the picture's fault */
	else if (err)
		end(r, err, text);
	else
		answer(r, reply);
}

static int read_all(int fd, uint8_t *out, size_t n)
{
	while (n) {
		ssize_t got = read(fd, out, n);
		if (got < 0 && errno == EINTR)
			continue;
		if (got <= 0)
			return FS_EIO;
		out += got;
		n -= (size_t)got;
	}
	return FS_OK;
}

/* n bytes of the answer's dtype; a plain encoder's floats are narrowed on the way. */
static int read_elements(struct fs_req *r, uint8_t *out, size_t n)
{
	static uint8_t wide[2 * FS_FRAME_CHUNK];
	if (r->intake) {
		fs_intake_take(r->intake, out, n);
		return FS_OK;
	}
	if (r->out.dtype == FS_WIRE_F32 || r->f16_file)
		return read_all(r->fd, out, n);
	if (read_all(r->fd, wide, 2 * n))
		return FS_EIO;
	for (size_t i = 0; i < n / 2; i++) {
		float x;
		memcpy(&x, wide + 4 * i, sizeof(x));
		uint16_t h = fs_f32_to_f16(x);
		memcpy(out + 2 * i, &h, sizeof(h));
	}
	return FS_OK;
}

/* While the encoder writes, only whole chunks go, and the last one not: its answer may yet be ERR. */
static bool can_send(const struct fs_req *r)
{
	if (r->phase != FS_REQ_RUNNING || !r->total)
		return r->phase == FS_REQ_SENDING;
	return fs_intake_held(r->intake) >= ROWS_CHUNK && r->total - r->sent > ROWS_CHUNK;
}

/* The requests of a connection take turns by id, chunk for chunk. */
static struct fs_req *next_sender(const struct fs_conn *c)
{
	struct fs_req *first = NULL, *after = NULL;
	for (struct fs_req *r = c->wd->reqs; r; r = r->next) {
		if (r->conn != c || !can_send(r))
			continue;
		if (!first || r->id < first->id)
			first = r;
		if (r->id > c->last_sent && (!after || r->id < after->id))
			after = r;
	}
	return after ? after : first;
}

bool fs_req_next_chunk(struct fs_conn *c)
{
	struct fs_req *r = next_sender(c);
	if (!r)
		return false;
	size_t n = FS_MIN(r->total - r->sent, ROWS_CHUNK);
	if (read_elements(r, c->chunk + FS_FRAME_HEADER, n)) {
		end(r, FS_EUNAVAILABLE, "the encoder's rows were cut off while they were sent");
		return false;
	}
	fs_frame_header_put(c->chunk, FS_FRAME_DATA, r->id, (uint32_t)n);
	c->chunk_len = FS_FRAME_HEADER + n;
	c->chunk_off = 0;
	c->last_sent = r->id;
	r->sent += n;
	if (r->sent == r->total)
		destroy(r);
	return true;
}
