/*
 * cuda, inside: one NVIDIA card as a device. A stream of its own takes all work in order; copies from and to
 * the host go through pinned memory of the device's own, so that they overlap with work and the caller's
 * memory is free at once. Everything runs on the thread that owns the device, except the readers of
 * weights.c. Only files of common/compute/cuda and their tests include it.
 *
 * Errors: the first one sticks (fs_dev_fail). One after which the card answers nothing but errors, or nothing
 * at all, makes the device lost; then nothing is queued any more, and closing it waits for nothing.
 */
#ifndef FS_COMMON_COMPUTE_CUDA_CUDA_H
#define FS_COMMON_COMPUTE_CUDA_CUDA_H

#include "common/compute/cuda/blas.h"
#include "common/compute/cuda/launch.h"
#include "common/compute/cuda/runtime.h"
#include "common/compute/internal.h"

/* ---- pinned memory in slots, used in turn ---- */

#define FS_SLOTS 8

struct fs_slots {
	uint8_t *mem; /* [FS_SLOTS][size], pinned; NULL before fs_slots_init */
	size_t size;
	unsigned next; /* slot of the next fs_slots_take */
	cudaEvent_t done[FS_SLOTS];
	bool busy[FS_SLOTS]; /* done[] has been recorded and not been seen */
};

struct fs_cuda;

int fs_slots_init(struct fs_cuda *c, struct fs_slots *s, size_t size, struct fs_errbuf *e);
void fs_slots_finish(struct fs_cuda *c, struct fs_slots *s); /* also of zeroed or half-made ones */
/* Waits until slot i is free; false: the device failed. */
bool fs_slots_free(struct fs_cuda *c, struct fs_slots *s, unsigned i);
/* What was queued so far is the last to use slot i. */
void fs_slots_used(struct fs_cuda *c, struct fs_slots *s, unsigned i);

/* ---- recordings: graph.c ---- */

#define FS_RECORDINGS 16

struct fs_recorder {
	cudaStream_t stream; /* of the capture; runs nothing */
	bool on;             /* between replay and recorded: every operation is queued and captured */
	bool broken;         /* what is being captured can not be used */
	int failures;        /* in a row; after a few, steps are just run */
	uint64_t key;        /* of what is being captured */
	uint64_t tick;
	struct {
		uint64_t key, used; /* used: tick of its last use */
		cudaGraphExec_t exec;
	} r[FS_RECORDINGS];
};

/* ---- the device ---- */

struct fs_cuda_buf { /* [dev], grown as it is needed */
	void *p;
	size_t size;
};
struct fs_cuda_form { /* rows that are in a buffer in another form; x NULL: none */
	const float *x;
	int64_t n, in;
};
struct fs_load; /* weights.c */

struct fs_cuda {
	struct fs_dev dev;
	int card, arch, sms; /* card: the runtime's number; arch: 90 for compute capability 9.0 */
	enum fs_dtype half;  /* FS_BF16 where tensor cores have it, else FS_F16 */
	cudaStream_t stream;
	cudaMemPool_t pool; /* NULL: the card has none */
	void **held;        /* what it gave and has not got back: cudaDeviceReset leaves that */
	size_t n_held, cap_held;
	cudaEvent_t done, pace[2];
	bool paced[2]; /* pace[] has been recorded */
	unsigned pace_next;
	int64_t wait_limit; /* ns without an answer */
	size_t slice;       /* bytes of weights that are numbers at once */
	struct fs_slots slots;
	struct fs_blas *blas;
	void *workspace; /* [dev], blas's */
	struct fs_recorder rec;
	struct fs_load *load; /* while weights are being loaded */
	struct fs_cuda_buf deq, narrow, quant,
	        split;                           /* slices of weights; x in 16 bits, in int8; attention */
	struct fs_cuda_form narrowed, quantized; /* what narrow and quant hold */
};

static inline struct fs_cuda *fs_cuda(struct fs_dev *d)
{
	return (struct fs_cuda *)d;
}

/* After cudaDeviceReset: gives back what the pool gave, as far as the runtime still does that, and the pool.
 */
void fs_cuda_drop_pool(struct fs_cuda *c);
/* Makes a cudaError_t sticky, and the device lost when it answers nothing else any more. */
void fs_cuda_fail(struct fs_cuda *c, int rc, const char *what);
/* Asks the card whether it still answers; otherwise the device is lost. */
void fs_cuda_probe(struct fs_cuda *c);
/* False, and the sticky error set, on a lost device. */
bool fs_cuda_usable(struct fs_cuda *c);
/* Polls, since the runtime's own waits know no deadline. False: the device failed or is lost. */
bool fs_cuda_wait_event(struct fs_cuda *c, cudaEvent_t ev, const char *what);
bool fs_cuda_wait_stream(struct fs_cuda *c, const char *what);

/*
 * Queues `call`, an int expression with cudaError_t's values, in which `s` is the stream. While a step is
 * recorded it is evaluated a second time for the capture; so the step has run whatever becomes of the
 * capture.
 */
#define FS_CUDA_QUEUE(c, what, call)                                                                         \
	do {                                                                                                 \
		cudaStream_t s = (c)->stream;                                                                \
		int rc_ = fs_cuda_usable(c) ? (int)(call) : 0;                                               \
                                                                                                             \
		if (rc_) {                                                                                   \
			fs_cuda_fail(c, rc_, what);                                                          \
		} else if ((c)->rec.on) {                                                                    \
			s = (c)->rec.stream;                                                                 \
			(c)->rec.broken |= (call) != 0;                                                      \
		}                                                                                            \
	} while (0)

/* Memory may be another one now: rows in other forms are not those any more. */
static inline void fs_cuda_forget_forms(struct fs_cuda *c)
{
	c->narrowed.x = c->quantized.x = NULL;
}

/* ---- memory.c ---- */
int fs_cuda_alloc(struct fs_dev *d, size_t bytes, void **out, struct fs_errbuf *e);
void fs_cuda_release(struct fs_dev *d, void *p);
void fs_cuda_upload(struct fs_dev *d, void *dst, const void *src, size_t bytes);
void fs_cuda_download(struct fs_dev *d, void *dst, const void *src, size_t bytes);
void fs_cuda_copy(struct fs_dev *d, void *dst, const void *src, size_t bytes);
bool fs_cuda_memory(struct fs_dev *d, uint64_t *free_bytes, uint64_t *total_bytes);
/* At least so many bytes in b, its contents lost; NULL: no memory, which is sticky. */
void *fs_cuda_need(struct fs_cuda *c, struct fs_cuda_buf *b, size_t bytes);

/* ---- weights.c ---- */
/* How a weight lies in memory: its file's type in launch.h's form, or plain rows of c->half. */
bool fs_cuda_is_plain(const struct fs_weight *w);
uint64_t fs_cuda_weight_bytes(const struct fs_dev *d, const struct fs_gguf_tensor *t, bool expect_packed);
int fs_cuda_weight_load(struct fs_dev *d, const struct fs_gguf_tensor *t, bool expect_packed,
        struct fs_weight *w, struct fs_errbuf *e);
void fs_cuda_weight_finish(struct fs_dev *d, struct fs_weight *w);
/* Waits for the last weights, tells how long they took and gives back what loading needed. */
void fs_cuda_load_end(struct fs_cuda *c);

/* ---- matmul.c ---- */
void fs_cuda_matmul(struct fs_dev *d, const struct fs_weight *w, const float *bias, const float *x, float *y,
        int64_t n, bool add);
void fs_cuda_embed(struct fs_dev *d, const struct fs_weight *w, const int32_t *ids, float *y, int64_t n);

/* ---- ops.c: see compute.h ---- */
void fs_cuda_rms_norm(
        struct fs_dev *d, const float *x, const float *w, float *y, int64_t n, int64_t dim, float eps);
void fs_cuda_layer_norm(struct fs_dev *d, const float *x, const float *w, const float *b, float *y, int64_t n,
        int64_t dim, float eps);
void fs_cuda_rope_angles(struct fs_dev *d, const struct fs_rope *r, const int32_t *pos, float *cs, int64_t n);
void fs_cuda_rope(struct fs_dev *d, const struct fs_rope *r, const float *cs, float *x, int64_t stride,
        int64_t n, int heads, int head_dim);
void fs_cuda_kv_store(struct fs_dev *d, const struct fs_kv_store *k);
void fs_cuda_attention(struct fs_dev *d, const struct fs_attn *a);
void fs_cuda_act(struct fs_dev *d, enum fs_act act, float *x, int64_t n);
void fs_cuda_gate(struct fs_dev *d, enum fs_act act, const float *gate, const float *up, float *y, int64_t n);
void fs_cuda_add(struct fs_dev *d, float *y, const float *x, int64_t n);

/* ---- graph.c ---- */
bool fs_cuda_replay(struct fs_dev *d, uint64_t key);
void fs_cuda_recorded(struct fs_dev *d);
void fs_cuda_forget(struct fs_dev *d);

#endif
