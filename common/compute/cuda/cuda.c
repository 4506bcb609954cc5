/*
 * cuda: opens and closes a card, waits for it and says what went wrong with it. Runs on the thread that owns
 * the device; that thread has one card at a time, since the runtime's choice of card is the thread's.
 *
 * A card that does not answer is given up after a minute: no step that this program queues takes seconds.
 * What an error leaves behind is asked of the card itself: when it answers the next question with an error as
 * well, its context is gone, and the device is lost.
 */
#include "common/compute/cuda/cuda.h"

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#ifndef FS_CUDA_MIN_ARCH
#define FS_CUDA_MIN_ARCH 75 /* the oldest card that kernels are built for */
#endif

#define WAIT_LIMIT (60 * FS_SEC)
#define WORKSPACE ((size_t)32 << 20) /* what cuBLAS recommends for its fastest kernels on new cards */
#define SLICE ((size_t)64 << 20)
#define UPLOAD_SLOT ((size_t)1 << 20)

/* ---- errors ---- */

void fs_cuda_probe(struct fs_cuda *c)
{
	cudaError_t rc;

	if (c->dev.lost)
		return;
	(void)cudaGetLastError();
	rc = cudaStreamQuery(c->stream);
	c->dev.lost = rc != cudaSuccess && rc != cudaErrorNotReady;
	if (c->dev.lost)
		fs_error("%s: lost: %s (%s)", c->dev.name, cudaGetErrorString(rc), cudaGetErrorName(rc));
}

void fs_cuda_fail(struct fs_cuda *c, int rc, const char *what)
{
	cudaError_t error = (cudaError_t)rc;

	if (c->dev.lost)
		return;
	fs_cuda_probe(c);
	fs_dev_fail(&c->dev, error == cudaErrorMemoryAllocation ? FS_ENOMEM : FS_EINTERNAL,
	        "%s: %s: %s (%s)%s", c->dev.name, what, cudaGetErrorString(error), cudaGetErrorName(error),
	        c->dev.lost ? "; the card has to be opened again" : "");
}

bool fs_cuda_usable(struct fs_cuda *c)
{
	if (c->dev.lost)
		fs_dev_fail(&c->dev, FS_EUNAVAILABLE,
		        "%s failed before; it has to be opened again before it is of use", c->dev.name);
	return !c->dev.lost;
}

/* ---- waiting ---- */

/* A decode step lasts milliseconds, and a sleep overruns by a tenth of one: so the first 20 ms are spent
 * asking, and whoever waits longer does not mind. */
static void pause_for(int64_t waited)
{
	struct timespec t = {.tv_nsec = waited < 200 * FS_MS ? 100000 : 1000000};

	if (waited < 20 * FS_MS)
		sched_yield();
	else
		nanosleep(&t, NULL);
}

bool fs_cuda_wait_event(struct fs_cuda *c, cudaEvent_t ev, const char *what)
{
	int64_t begin = fs_now();

	while (fs_cuda_usable(c)) {
		/* the clock first: a process may be stopped for long between the two */
		int64_t waited = fs_now() - begin;
		cudaError_t rc = cudaEventQuery(ev);

		if (rc == cudaSuccess)
			return true;
		if (rc != cudaErrorNotReady) {
			fs_cuda_fail(c, rc, what);
			return false;
		} else if (waited > c->wait_limit) {
			c->dev.hung = c->dev.lost = true;
			fs_error("%s: lost: %s: no answer for %lld s", c->dev.name, what,
			        (long long)(waited / FS_SEC));
			fs_dev_fail(&c->dev, FS_EINTERNAL,
			        "%s: %s: the card does not answer; this program has to be started again",
			        c->dev.name, what);
		} else {
			pause_for(waited);
		}
	}
	return false;
}

bool fs_cuda_wait_stream(struct fs_cuda *c, const char *what)
{
	int rc;

	if (!fs_cuda_usable(c))
		return false;
	rc = cudaEventRecord(c->done, c->stream);
	if (rc) {
		fs_cuda_fail(c, rc, what);
		return false;
	}
	return fs_cuda_wait_event(c, c->done, what);
}

static void cuda_wait(struct fs_dev *d)
{
	struct fs_cuda *c = fs_cuda(d);

	fs_cuda_load_end(c);
	fs_cuda_wait_stream(c, "waiting for the card");
}

/* Two events in turn: what lies before the last call is done when this one returns. */
static void cuda_pace(struct fs_dev *d)
{
	struct fs_cuda *c = fs_cuda(d);
	unsigned now = c->pace_next, before = now ^ 1;
	int rc;

	if (!fs_cuda_usable(c))
		return;
	rc = cudaEventRecord(c->pace[now], c->stream);
	if (rc) {
		fs_cuda_fail(c, rc, "waiting for a layer");
		return;
	}
	c->paced[now] = true;
	c->pace_next = before;
	if (c->paced[before])
		fs_cuda_wait_event(c, c->pace[before], "waiting for a layer");
}

/* ---- which card ---- */

/* Why the runtime finds no card, for people. */
static int no_cards(int rc, struct fs_errbuf *e)
{
	int driver = 0, built = 0;

	cudaDriverGetVersion(&driver);
	cudaRuntimeGetVersion(&built);
	if (rc == cudaErrorInsufficientDriver && driver == 0)
		return fs_fail(e, FS_EUNAVAILABLE, "there is no NVIDIA driver on this PC");
	if (rc == cudaErrorInsufficientDriver)
		return fs_fail(e, FS_EUNAVAILABLE,
		        "the NVIDIA driver supports CUDA %d.%d, and this build needs %d.0 or newer: update "
		        "the "
		        "driver",
		        driver / 1000, driver % 1000 / 10, built / 1000);
	if (rc == cudaErrorNoDevice || rc == cudaSuccess)
		return fs_fail(
		        e, FS_EUNAVAILABLE, "the NVIDIA driver finds no card on this PC that it may use");
	return fs_fail(e, FS_EUNAVAILABLE, "CUDA does not start: %s (%s)",
	        cudaGetErrorString((cudaError_t)rc), cudaGetErrorName((cudaError_t)rc));
}

/* Where the card is plugged in. */
static int64_t place_of(int card)
{
	static const enum cudaDeviceAttr parts[] = {
	        cudaDevAttrPciDomainId, cudaDevAttrPciBusId, cudaDevAttrPciDeviceId};
	int64_t place = 0;
	int v;

	for (size_t i = 0; i < FS_ARRAY_LEN(parts); i++) {
		v = 0;
		(void)cudaDeviceGetAttribute(&v, parts[i], card);
		place = place << 16 | v;
	}
	return place;
}

/* N of "cuda:N": cards are counted by their places, as nvidia-smi does; the runtime has the fastest first. */
static int number_of(int card, int n)
{
	int before = 0;

	for (int i = 0; i < n; i++)
		before += i != card &&
		          (place_of(i) < place_of(card) || (place_of(i) == place_of(card) && i < card));
	return before;
}

static int card_of(int number, int n)
{
	int card = 0;

	for (int i = 0; i < n; i++)
		if (number_of(i, n) == number)
			card = i;
	return card;
}

/* "0 NVIDIA RTX A, 1 NVIDIA RTX B" */
static void list_cards(int n, char *out, size_t cap)
{
	struct cudaDeviceProp p;
	size_t at = 0;

	out[0] = '\0';
	for (int i = 0; i < n && at < cap; i++)
		if (cudaGetDeviceProperties(&p, card_of(i, n)) == cudaSuccess)
			at += (size_t)snprintf(out + at, cap - at, "%s%d %s", at ? ", " : "", i, p.name);
}

static bool new_enough(int card)
{
	struct cudaDeviceProp p;

	return cudaGetDeviceProperties(&p, card) == cudaSuccess && 10 * p.major + p.minor >= FS_CUDA_MIN_ARCH;
}

/* "cuda:N" is that card; else the fastest that this build has kernels for, or the fastest. */
static int choose_card(const char *name, int *card, int *number, struct fs_errbuf *e)
{
	char list[256];
	int wanted = fs_device_number(name), n = 0, rc = cudaGetDeviceCount(&n);

	if (rc || n < 1)
		return no_cards(rc, e);
	*card = 0;
	if (wanted >= 0) {
		if (wanted >= n) {
			list_cards(n, list, sizeof(list));
			return fs_fail(e, FS_EUNAVAILABLE, "cuda:%d: there %s %d card%s: %s", wanted,
			        n == 1 ? "is" : "are", n, n == 1 ? "" : "s", list);
		}
		*card = card_of(wanted, n);
	} else {
		for (int i = n - 1; i >= 0; i--)
			if (new_enough(i))
				*card = i;
	}
	*number = number_of(*card, n);
	return FS_OK;
}

static int describe(struct fs_cuda *c, struct fs_errbuf *e)
{
	struct cudaDeviceProp p;
	int rc = cudaGetDeviceProperties(&p, c->card);

	if (rc)
		return no_cards(rc, e);
	c->arch = 10 * p.major + p.minor;
	c->sms = p.multiProcessorCount;
	c->half = c->arch >= 80 ? FS_BF16 : FS_F16;
	snprintf(c->dev.describe, sizeof(c->dev.describe), "%s: %.50s, %.1f GiB", c->dev.name, p.name,
	        (double)p.totalGlobalMem / (double)((uint64_t)1 << 30));
	if (c->arch < FS_CUDA_MIN_ARCH)
		return fs_fail(e, FS_EUNAVAILABLE,
		        "%s: %s has compute capability %d.%d, and this build is for %d.%d and newer",
		        c->dev.name, p.name, p.major, p.minor, FS_CUDA_MIN_ARCH / 10, FS_CUDA_MIN_ARCH % 10);
	return FS_OK;
}

/* ---- opening ---- */

/* Memory that was freed stays with the device: what an encoder needed once is there when it is needed again.
 */
static int open_pool(struct fs_cuda *c)
{
	struct cudaMemPoolProps props;
	uint64_t keep = UINT64_MAX;
	int has = 0, rc = cudaDeviceGetAttribute(&has, cudaDevAttrMemoryPoolsSupported, c->card);

	if (rc || !has)
		return rc;
	memset(&props, 0, sizeof(props));
	props.allocType = cudaMemAllocationTypePinned;
	props.location.type = cudaMemLocationTypeDevice;
	props.location.id = c->card;
	rc = cudaMemPoolCreate(&c->pool, &props);
	return rc ? rc : (int)cudaMemPoolSetAttribute(c->pool, cudaMemPoolAttrReleaseThreshold, &keep);
}

static int open_streams(struct fs_cuda *c)
{
	int rc = cudaSetDevice(c->card);

	if (!rc)
		rc = cudaStreamCreateWithFlags(&c->stream, cudaStreamNonBlocking);
	if (!rc)
		rc = cudaStreamCreateWithFlags(&c->rec.stream, cudaStreamNonBlocking);
	if (!rc)
		rc = cudaEventCreateWithFlags(&c->done, cudaEventDisableTiming);
	for (int i = 0; i < 2 && !rc; i++)
		rc = cudaEventCreateWithFlags(&c->pace[i], cudaEventDisableTiming);
	return rc ? rc : open_pool(c);
}

/* One sum there and back: whether this build's kernels run on this card. */
static int try_it(struct fs_cuda *c, struct fs_errbuf *e)
{
	const float x[8] = {1, 2, 3, 4, 1, 2, 3, 4};
	float y[4] = {0}, *mem;
	void *p;
	int err = fs_cuda_alloc(&c->dev, sizeof(x), &p, e);

	if (err)
		return err;
	mem = p;
	fs_dev_upload(&c->dev, mem, x, sizeof(x));
	fs_op_add(&c->dev, mem, mem + 4, 4);
	err = fs_dev_download(&c->dev, y, mem, sizeof(y), e);
	fs_dev_free(&c->dev, mem);
	if (!err && (y[0] != 2 || y[1] != 4 || y[2] != 6 || y[3] != 8))
		err = fs_fail(
		        e, FS_EUNAVAILABLE, "%s computes wrongly: 1 + 1 = %g", c->dev.name, (double)y[0]);
	return err;
}

static void cuda_close(struct fs_dev *d)
{
	struct fs_cuda *c = fs_cuda(d);
	struct fs_cuda_buf *bufs[] = {&c->deq, &c->narrow, &c->quant, &c->split};

	fs_cuda_load_end(c);
	if (c->stream && !c->dev.lost)
		fs_cuda_wait_stream(c, "closing");
	fs_cuda_forget(d);
	fs_blas_destroy(c->blas, c->dev.hung);
	for (size_t i = 0; i < FS_ARRAY_LEN(bufs); i++)
		fs_cuda_release(d, bufs[i]->p);
	fs_cuda_release(d, c->workspace);
	fs_slots_finish(c, &c->slots);
	/* What a context that broke still holds goes with it, but for the pool's; the next device makes a new
	 * one. */
	if (c->dev.lost && !c->dev.hung) {
		(void)cudaDeviceReset();
		fs_cuda_drop_pool(c);
	}
	if (!c->dev.lost) {
		for (int i = 0; i < 2; i++)
			if (c->pace[i])
				cudaEventDestroy(c->pace[i]);
		if (c->done)
			cudaEventDestroy(c->done);
		if (c->rec.stream)
			cudaStreamDestroy(c->rec.stream);
		if (c->stream)
			cudaStreamDestroy(c->stream);
		if (c->pool)
			cudaMemPoolDestroy(c->pool);
	}
	free(c->held);
	free(c);
}

static const struct fs_dev_ops cuda_ops = {
        .close = cuda_close,
        .wait = cuda_wait,
        .alloc = fs_cuda_alloc,
        .release = fs_cuda_release,
        .upload = fs_cuda_upload,
        .download = fs_cuda_download,
        .copy = fs_cuda_copy,
        .weight_load = fs_cuda_weight_load,
        .weight_finish = fs_cuda_weight_finish,
        .matmul = fs_cuda_matmul,
        .embed = fs_cuda_embed,
        .rms_norm = fs_cuda_rms_norm,
        .layer_norm = fs_cuda_layer_norm,
        .rope_angles = fs_cuda_rope_angles,
        .rope = fs_cuda_rope,
        .kv_store = fs_cuda_kv_store,
        .attention = fs_cuda_attention,
        .act = fs_cuda_act,
        .gate = fs_cuda_gate,
        .add = fs_cuda_add,
        .replay = fs_cuda_replay,
        .recorded = fs_cuda_recorded,
        .forget = fs_cuda_forget,
        .pace = cuda_pace,
        .memory = fs_cuda_memory,
        .weight_bytes = fs_cuda_weight_bytes,
};

static int open_rest(struct fs_cuda *c, struct fs_errbuf *e)
{
	void *workspace = NULL;
	int rc = open_streams(c), err;

	if (rc)
		return fs_fail(e, rc == cudaErrorMemoryAllocation ? FS_ENOMEM : FS_EUNAVAILABLE,
		        "%s can not be used: %s (%s)", c->dev.name, cudaGetErrorString((cudaError_t)rc),
		        cudaGetErrorName((cudaError_t)rc));
	err = fs_slots_init(c, &c->slots, UPLOAD_SLOT, e);
	if (!err)
		err = try_it(c, e);
	if (!err)
		err = fs_cuda_alloc(&c->dev, WORKSPACE, &workspace, e);
	if (!err)
		err = fs_blas_create(&c->blas, workspace, WORKSPACE, e);
	c->workspace = workspace;
	return err;
}

int fs_cuda_open(const struct fs_dev_opts *o, struct fs_dev **out, struct fs_errbuf *e)
{
	struct fs_cuda *c;
	int card, number, err = choose_card(o->device ? o->device : "auto", &card, &number, e);

	if (err)
		return err;
	c = calloc(1, sizeof(*c));
	if (!c)
		return fs_fail(e, FS_ENOMEM, "no memory for a device");
	c->dev.ops = &cuda_ops;
	c->dev.precision = o->precision;
	c->dev.threads = 1;
	c->dev.is_gpu = true;
	c->card = card;
	c->wait_limit = WAIT_LIMIT;
	c->slice = SLICE;
	snprintf(c->dev.name, sizeof(c->dev.name), "cuda:%d", number);
	err = describe(c, e);
	if (!err)
		err = open_rest(c, e);
	if (err) {
		cuda_close(&c->dev);
		return err;
	}
	*out = &c->dev;
	return FS_OK;
}
