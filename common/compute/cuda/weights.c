/*
 * weights: from the file's pages to the card. A few reader threads bring the next pieces of a tensor into
 * pinned slots (page faults, disk reads and the copy of pages take more than one core to keep up with a fast
 * link), while this thread queues the copies of those before and the kernels that bring rows into the card's
 * form. So disk, link and card work side by side, with FS_SLOTS pieces of pinned memory. They exist
 * from the first weight of some size until the device is first used or waited for, which is when the load's
 * time is told. Runs on the thread that owns the device, but for the readers, which touch slots and file
 * alone.
 *
 * The card's form of a weight is launch.h's packed one, which is as small as the file's; or, where many rows
 * are expected at once, plain rows of 16-bit numbers, which large products take as they are.
 */
#include "common/compute/cuda/cuda.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define PIECE ((size_t)4 << 20)
#define READERS 4
#define ALONE ((size_t)256 << 10) /* less is not worth waking a reader */

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22 /* Linux 5.14; older ones refuse it, and the pages come one by one */
#endif

struct fs_load {
	struct fs_slots slots; /* the owner's, but for the bytes */
	void *raw, *packed;    /* [dev] a piece as in the file; the same in packed form */
	size_t packed_size;
	int64_t begin, bytes;

	pthread_t readers[READERS];
	int n_readers;
	pthread_mutex_t lock; /* of what follows */
	pthread_cond_t work, filled;
	bool stop;
	const uint8_t *src; /* the tensor that is being read: n pieces of piece bytes, the last one shorter */
	size_t size, piece;
	unsigned offered, taken; /* pieces whose slot is free; pieces that a reader has begun */
	bool full[FS_SLOTS];
	int err; /* errno of a page that can not be read */
};

/* ---- readers ---- */

/* First the disk is asked for all of the piece at once. Then a page that it does not give is an error, which
 * would end the program in memcpy. */
static int read_piece(uint8_t *dst, const uint8_t *src, size_t n)
{
	uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), begin = (uintptr_t)src & ~(page - 1);
	size_t span = (uintptr_t)src + n - begin;
	int rc;

	(void)madvise((void *)begin, span, MADV_WILLNEED);
	rc = madvise((void *)begin, span, MADV_POPULATE_READ);
	if (rc && (errno == EFAULT || errno == EHWPOISON || errno == EIO))
		return errno;
	memcpy(dst, src, n);
	return 0;
}

static void *reader(void *arg)
{
	struct fs_load *l = arg;

	pthread_mutex_lock(&l->lock);
	while (!l->stop) {
		unsigned k = l->taken, slot = k % FS_SLOTS;
		size_t at = k * l->piece;
		const uint8_t *src;
		size_t n;
		int err;

		if (k == l->offered) {
			pthread_cond_wait(&l->work, &l->lock);
			continue;
		}
		src = l->src + at;
		n = FS_MIN(l->size - at, l->piece);
		l->taken++;
		pthread_mutex_unlock(&l->lock);
		err = read_piece(l->slots.mem + slot * l->slots.size, src, n);
		pthread_mutex_lock(&l->lock);
		l->full[slot] = true;
		if (err)
			l->err = err;
		pthread_cond_signal(&l->filled);
	}
	pthread_mutex_unlock(&l->lock);
	return NULL;
}

static void load_finish(struct fs_cuda *c)
{
	struct fs_load *l = c->load;

	c->load = NULL;
	pthread_mutex_lock(&l->lock);
	l->stop = true;
	pthread_cond_broadcast(&l->work);
	pthread_mutex_unlock(&l->lock);
	for (int i = 0; i < l->n_readers; i++)
		pthread_join(l->readers[i], NULL);
	fs_slots_finish(c, &l->slots);
	fs_cuda_release(&c->dev, l->raw);
	fs_cuda_release(&c->dev, l->packed);
	pthread_cond_destroy(&l->work);
	pthread_cond_destroy(&l->filled);
	pthread_mutex_destroy(&l->lock);
	free(l);
}

static int load_begin(struct fs_cuda *c, struct fs_errbuf *e)
{
	struct fs_load *l = calloc(1, sizeof(*l));
	int err;

	if (!l)
		return fs_fail(e, FS_ENOMEM, "no memory for loading weights");
	pthread_mutex_init(&l->lock, NULL);
	fs_cond_init(&l->work);
	fs_cond_init(&l->filled);
	l->begin = fs_now();
	c->load = l;
	err = fs_cuda_alloc(&c->dev, PIECE, &l->raw, e);
	if (err)
		load_finish(c);
	return err;
}

/* The first weight that is worth them. */
static int start_readers(struct fs_cuda *c, struct fs_errbuf *e)
{
	struct fs_load *l = c->load;
	int err = l->slots.mem ? FS_OK : fs_slots_init(c, &l->slots, PIECE, e);

	while (!err && l->n_readers < READERS) {
		err = fs_thread_start(&l->readers[l->n_readers], "weights", reader, l, e);
		l->n_readers += !err;
	}
	return err;
}

void fs_cuda_load_end(struct fs_cuda *c)
{
	struct fs_load *l = c->load;
	double s;

	if (!l)
		return;
	if (fs_cuda_wait_stream(c, "loading weights")) {
		s = (double)FS_MAX(fs_now() - l->begin, 1) / 1e9;
		fs_info("%s: %.1f MiB of weights in %.2f s, %.2f GB/s", c->dev.name,
		        (double)l->bytes / 1048576, s, (double)l->bytes / 1e9 / s);
	}
	load_finish(c);
}

/* ---- forms ---- */

bool fs_cuda_is_plain(const struct fs_weight *w)
{
	return w->packed != NULL;
}

static bool wants_plain(const struct fs_dev *d, int64_t in, bool expect_packed)
{
	return expect_packed && d->precision == FS_PRECISION_AUTO && in % 8 == 0;
}

static size_t bytes_of(const struct fs_dev *d, enum fs_dtype type, int64_t in, int64_t out, bool plain)
{
	return plain ? (size_t)in * (size_t)out * sizeof(uint16_t) : fs_cuk_packed_bytes(type, in, out);
}

uint64_t fs_cuda_weight_bytes(const struct fs_dev *d, const struct fs_gguf_tensor *t, bool expect_packed)
{
	int64_t in = t->ne[0], out = t->ne[1] * t->ne[2] * t->ne[3];

	return in < 1 || out < 1
	               ? 0
	               : fs_dev_rounded(bytes_of(d, t->type, in, out, wants_plain(d, in, expect_packed)));
}

/* ---- a weight ---- */

struct job {
	const struct fs_gguf_tensor *t;
	struct fs_weight *w;
	uint8_t *dst;
	size_t row;       /* bytes in the file */
	bool plain, same; /* same: the file's rows are the card's */
};

/* Rows first .. first + n, in pinned memory, on their way. */
static void queue_rows(
        struct fs_cuda *c, const struct job *j, const uint8_t *pinned, int64_t first, int64_t n)
{
	struct fs_load *l = c->load;
	const struct fs_weight *w = j->w;
	enum fs_dtype type = w->type;
	void *to = j->same ? j->dst + (size_t)first * j->row : l->raw;

	FS_CUDA_QUEUE(c, "loading weights",
	        cudaMemcpyAsync(to, pinned, (size_t)n * j->row, cudaMemcpyHostToDevice, s));
	if (j->same)
		return;
	if (!j->plain) {
		FS_CUDA_QUEUE(
		        c, "packing weights", fs_cuk_pack(s, type, l->raw, first, n, j->dst, w->in, w->out));
		return;
	}
	to = j->dst + (size_t)first * (size_t)w->in * sizeof(uint16_t);
	FS_CUDA_QUEUE(c, "packing weights", fs_cuk_pack(s, type, l->raw, 0, n, l->packed, w->in, n));
	FS_CUDA_QUEUE(
	        c, "weights as numbers", fs_cuk_dequantize(s, type, l->packed, 0, n, w->in, n, c->half, to));
}

/* Waits for the reader of piece k. It can not be left behind, so there is no deadline: a disk that does not
 * answer holds any program that touches its file. */
static int wait_full(struct fs_load *l, unsigned slot)
{
	int err;

	pthread_mutex_lock(&l->lock);
	while (!l->full[slot])
		pthread_cond_wait(&l->filled, &l->lock);
	l->full[slot] = false;
	err = l->err;
	pthread_mutex_unlock(&l->lock);
	return err;
}

static void offer(struct fs_load *l, unsigned upto)
{
	pthread_mutex_lock(&l->lock);
	l->offered = upto;
	pthread_cond_broadcast(&l->work);
	pthread_mutex_unlock(&l->lock);
}

/* Slots of pieces k .. are given to readers as copies out of them end; the one of piece k at any rate. */
static bool offer_free(struct fs_cuda *c, struct fs_load *l, unsigned k, unsigned pieces)
{
	unsigned upto = l->offered; /* written by this thread alone */

	while (upto < pieces && upto < k + FS_SLOTS) {
		unsigned slot = upto % FS_SLOTS;

		if (upto > k && l->slots.busy[slot] && cudaEventQuery(l->slots.done[slot]) != cudaSuccess)
			break;
		if (!fs_slots_free(c, &l->slots, slot))
			return false;
		upto++;
	}
	if (upto > l->offered)
		offer(l, upto);
	return true;
}

static void set_source(struct fs_load *l, const void *src, size_t size, size_t piece)
{
	pthread_mutex_lock(&l->lock);
	l->src = src;
	l->size = size;
	l->piece = piece;
	l->offered = l->taken = 0;
	memset(l->full, 0, sizeof(l->full));
	l->err = 0;
	pthread_mutex_unlock(&l->lock);
}

/* Readers that have begun a piece end it before the source goes. */
static void wait_idle(struct fs_load *l, unsigned done)
{
	for (unsigned k = done; k < l->offered; k++)
		wait_full(l, k % FS_SLOTS);
}

static int read_all(struct fs_cuda *c, const struct job *j, int64_t rows)
{
	struct fs_load *l = c->load;
	size_t size = (size_t)j->w->out * j->row;
	unsigned pieces = (unsigned)((j->w->out + rows - 1) / rows), k;
	int err = 0;

	set_source(l, j->t->data, size, (size_t)rows * j->row);
	for (k = 0; k < pieces && !err && !c->dev.err; k++) {
		unsigned slot = k % FS_SLOTS;
		int64_t first = k * rows;

		if (!offer_free(c, l, k, pieces))
			break;
		err = wait_full(l, slot);
		if (!err)
			queue_rows(c, j, l->slots.mem + slot * l->slots.size, first,
			        FS_MIN(rows, j->w->out - first));
		fs_slots_used(c, &l->slots, slot);
	}
	wait_idle(l, k);
	return err;
}

/* A small one, read by this thread into a slot for uploads. */
static int read_alone(struct fs_cuda *c, const struct job *j)
{
	struct fs_slots *slots = &c->slots;
	unsigned slot = slots->next++ % FS_SLOTS;
	uint8_t *pinned = slots->mem + slot * slots->size;
	int err;

	if (!fs_slots_free(c, slots, slot))
		return 0;
	err = read_piece(pinned, j->t->data, (size_t)j->w->out * j->row);
	if (!err)
		queue_rows(c, j, pinned, 0, j->w->out);
	fs_slots_used(c, slots, slot);
	return err;
}

/* Room for a piece of rows in packed form, and for what large products make of quantised rows: a card that
 * has no memory for it says so now. */
static int make_room(struct fs_cuda *c, const struct job *j, int64_t rows, struct fs_errbuf *e)
{
	struct fs_load *l = c->load;
	size_t need = fs_cuk_packed_bytes(j->w->type, j->w->in, rows);

	if (!j->plain && fs_dtype_info(j->w->type)->block_elems > 1 && !fs_cuda_need(c, &c->deq, c->slice))
		return fs_fail(e, c->dev.err, "%s", c->dev.err_text.text);
	if (!j->plain || need <= l->packed_size)
		return FS_OK;
	fs_cuda_release(&c->dev, l->packed);
	l->packed = NULL;
	l->packed_size = 0;
	if (fs_cuda_alloc(&c->dev, need, &l->packed, e))
		return FS_ENOMEM;
	l->packed_size = need;
	return FS_OK;
}

static int load(struct fs_cuda *c, const struct job *j, struct fs_errbuf *e)
{
	size_t size = (size_t)j->w->out * j->row;
	int64_t rows = (int64_t)(PIECE / j->row);
	bool alone = size <= ALONE;
	int err, rc;

	if (rows < 1)
		return fs_fail(e, FS_ENOTSUP,
		        "rows of %zu bytes are more than the %zu that are loaded at once", j->row, PIECE);
	err = make_room(c, j, FS_MIN(rows, j->w->out), e);
	if (!err && !alone)
		err = start_readers(c, e);
	if (err)
		return err;
	rc = alone ? read_alone(c, j) : read_all(c, j, rows);
	if (rc)
		return fs_fail(e, FS_EIO, "its file can not be read: %s", strerror(rc));
	if (c->dev.err)
		return fs_fail(e, c->dev.err, "%s", c->dev.err_text.text);
	c->load->bytes += (int64_t)size;
	return FS_OK;
}

int fs_cuda_weight_load(struct fs_dev *d, const struct fs_gguf_tensor *t, bool expect_packed,
        struct fs_weight *w, struct fs_errbuf *e)
{
	struct fs_cuda *c = fs_cuda(d);
	struct job j = {.t = t,
	        .w = w,
	        .row = fs_dtype_row_bytes(t->type, w->in),
	        .plain = wants_plain(d, w->in, expect_packed)};
	size_t bytes = bytes_of(d, w->type, w->in, w->out, j.plain);
	void *mem = NULL;
	int err = c->load ? FS_OK : load_begin(c, e);

	if (!err)
		err = fs_cuda_alloc(d, bytes, &mem, e);
	if (err)
		return fs_fail_prefix(e, err, "tensor %s", t->name);
	j.dst = mem;
	j.same = j.plain ? w->type == c->half
	                 : fs_dtype_info(w->type)->block_elems == 1 && bytes == (size_t)w->out * j.row;
	err = load(c, &j, e);
	if (err) {
		fs_cuda_release(d, mem);
		return fs_fail_prefix(e, err, "tensor %s", t->name);
	}
	w->data = mem;
	w->packed = j.plain ? mem : NULL;
	return FS_OK;
}

void fs_cuda_weight_finish(struct fs_dev *d, struct fs_weight *w)
{
	fs_cuda_release(d, (void *)(uintptr_t)w->data);
}
