/*
 * ops.c: cuts every operation but the products into pieces for the pool. Runs on the owner thread. Small
 * operations stay on it, since handing them out costs more than they take.
 */
#include "common/compute/cpu/cpu.h"

#include <math.h>
#include <string.h>

/* Elements of an element-wise operation that one task takes; about 10 us of work, and 128 KiB of two arrays.
 */
#define GRAIN 16384

struct span { /* elements or rows first..last-1 of a task */
	int64_t first, last;
};

static struct span span_of(int64_t task, int64_t grain, int64_t n)
{
	return (struct span){.first = task * grain, .last = FS_MIN(n, (task + 1) * grain)};
}

/* Runs fn over ceil(n / grain) tasks. */
static void share(struct fs_dev *d, int64_t n, int64_t grain, fs_task_fn *fn, void *arg)
{
	fs_pool_run(((struct fs_cpu *)d)->pool, (n + grain - 1) / grain, fn, arg);
}

/* Rows of a task when each has dim elements. */
static int64_t row_grain(int64_t dim)
{
	return FS_MAX(1, GRAIN / FS_MAX(1, dim));
}

struct norm_job {
	const struct fs_kernels *k;
	const float *x, *w, *b;
	float *y;
	int64_t n, dim, grain;
	float eps;
	bool rms;
};

static void norm_task(void *arg, int64_t task, int worker)
{
	struct norm_job *j = arg;
	struct span s = span_of(task, j->grain, j->n);
	const float *x = j->x + s.first * j->dim;
	float *y = j->y + s.first * j->dim;

	if (j->rms)
		j->k->rms_norm(x, j->w, y, s.last - s.first, j->dim, j->eps);
	else
		j->k->layer_norm(x, j->w, j->b, y, s.last - s.first, j->dim, j->eps);
}

void fs_cpu_rms_norm(
        struct fs_dev *d, const float *x, const float *w, float *y, int64_t n, int64_t dim, float eps)
{
	struct norm_job j = {
	        .k = ((struct fs_cpu *)d)->k, .x = x, .w = w, .y = y, .n = n, .dim = dim, .eps = eps};

	j.rms = true;
	j.grain = row_grain(dim);
	share(d, n, j.grain, norm_task, &j);
}

void fs_cpu_layer_norm(struct fs_dev *d, const float *x, const float *w, const float *b, float *y, int64_t n,
        int64_t dim, float eps)
{
	struct norm_job j = {
	        .k = ((struct fs_cpu *)d)->k, .x = x, .w = w, .b = b, .y = y, .n = n, .dim = dim};

	j.eps = eps;
	j.grain = row_grain(dim);
	share(d, n, j.grain, norm_task, &j);
}

struct rope_job {
	const struct fs_kernels *k;
	const struct fs_rope *r;
	const int32_t *pos; /* angles only */
	float *out;
	const float *cs;
	float *x;
	int64_t stride, n, grain;
	int heads, head_dim;
};

static void angles_task(void *arg, int64_t task, int worker)
{
	struct rope_job *j = arg;
	struct span s = span_of(task, j->grain, j->n);
	int pairs = j->r->n_pairs;

	for (int64_t i = s.first; i < s.last; i++) {
		for (int p = 0; p < pairs; p++) {
			float angle = (float)j->pos[j->r->axis[p] * j->n + i] * j->r->freq[p];

			j->out[2 * (i * pairs + p)] = cosf(angle);
			j->out[2 * (i * pairs + p) + 1] = sinf(angle);
		}
	}
}

void fs_cpu_rope_angles(struct fs_dev *d, const struct fs_rope *r, const int32_t *pos, float *cs, int64_t n)
{
	struct rope_job j = {.r = r, .pos = pos, .out = cs, .n = n, .grain = row_grain(r->n_pairs * 32)};

	for (int p = 0; p < r->n_pairs; p++)
		FS_ASSERT(r->axis[p] < r->n_axes);
	share(d, n, j.grain, angles_task, &j);
}

static void rope_task(void *arg, int64_t task, int worker)
{
	struct rope_job *j = arg;
	struct span s = span_of(task, j->grain, j->n);

	j->k->rope(j->r, j->cs + s.first * 2 * j->r->n_pairs, j->x + s.first * j->stride, j->stride,
	        s.last - s.first, j->heads, j->head_dim);
}

void fs_cpu_rope(struct fs_dev *d, const struct fs_rope *r, const float *cs, float *x, int64_t stride,
        int64_t n, int heads, int head_dim)
{
	struct rope_job j = {
	        .k = ((struct fs_cpu *)d)->k, .r = r, .cs = cs, .x = x, .stride = stride, .n = n};

	j.heads = heads;
	j.head_dim = head_dim;
	j.grain = row_grain((int64_t)heads * head_dim);
	share(d, n, j.grain, rope_task, &j);
}

void fs_cpu_kv_store(struct fs_dev *d, const struct fs_kv_store *s)
{
	const struct fs_kernels *k = ((struct fs_cpu *)d)->k;
	int64_t at = s->at + (s->past ? *s->past : 0);

	for (int64_t i = 0; i < s->n; i++) {
		const float *src = s->src + i * s->src_stride;

		if (s->type == FS_F32)
			memcpy((float *)s->dst + (at + i) * s->width, src, (size_t)s->width * sizeof(*src));
		else
			k->to_f16(src, (uint16_t *)s->dst + (at + i) * s->width, s->width);
	}
}

struct attn_job {
	const struct fs_kernels *k;
	const struct fs_attn *a;
	uint8_t *scratch; /* [workers][scratch_bytes] */
	size_t scratch_bytes;
	int heads;       /* of a task */
	int64_t queries; /* of a task */
	int64_t blocks;  /* of queries */
};

/* Late queries see more keys: with a causal mask they are taken first, so that no long task is left for the
 * end. */
static void attn_task(void *arg, int64_t task, int worker)
{
	struct attn_job *j = arg;
	const struct fs_attn *a = j->a;
	int group = a->heads / a->kv_heads, chunks = (group + j->heads - 1) / j->heads;
	int64_t block = j->blocks - 1 - task / (a->kv_heads * chunks), rest = task % (a->kv_heads * chunks);
	int h0 = (int)(rest / chunks) * group + (int)(rest % chunks) * j->heads;
	int h1 = FS_MIN(h0 + j->heads, (int)(rest / chunks + 1) * group);
	struct span s = span_of(block, j->queries, a->n_q);

	j->k->attention(a, h0, h1, s.first, s.last, j->scratch + (size_t)worker * j->scratch_bytes);
}

void fs_cpu_attention(struct fs_dev *d, const struct fs_attn *a)
{
	struct fs_cpu *c = (struct fs_cpu *)d;
	int group = a->heads / a->kv_heads;
	struct fs_attn placed = *a;
	struct attn_job j = {.k = c->k, .a = &placed, .heads = FS_MIN(group, FS_ATTN_ROWS)};
	int64_t chunks = (group + j.heads - 1) / j.heads;

	placed.n_kv += a->past ? *a->past : 0;
	placed.q_first += a->past ? *a->past : 0;
	j.scratch_bytes = (fs_attn_scratch_bytes(a->head_dim) + 63) & ~(size_t)63;
	j.scratch = fs_scratch_get(c, &c->worker, (size_t)d->threads, j.scratch_bytes);
	if (!j.scratch)
		return;
	j.queries = FS_MAX(1, FS_ATTN_ROWS / j.heads);
	j.blocks = (a->n_q + j.queries - 1) / j.queries;
	fs_pool_run(c->pool, j.blocks * a->kv_heads * chunks, attn_task, &j);
}

struct map_job {
	const struct fs_kernels *k;
	enum fs_act act;
	const float *gate, *up;
	float *y;
	int64_t n;
};

static void act_task(void *arg, int64_t task, int worker)
{
	struct map_job *j = arg;
	struct span s = span_of(task, GRAIN, j->n);

	j->k->act(j->act, j->y + s.first, s.last - s.first);
}

void fs_cpu_act(struct fs_dev *d, enum fs_act act, float *x, int64_t n)
{
	struct map_job j = {.k = ((struct fs_cpu *)d)->k, .act = act, .y = x, .n = n};

	share(d, n, GRAIN, act_task, &j);
}

static void gate_task(void *arg, int64_t task, int worker)
{
	struct map_job *j = arg;
	struct span s = span_of(task, GRAIN, j->n);

	j->k->gate(j->act, j->gate + s.first, j->up + s.first, j->y + s.first, s.last - s.first);
}

void fs_cpu_gate(struct fs_dev *d, enum fs_act act, const float *gate, const float *up, float *y, int64_t n)
{
	struct map_job j = {.k = ((struct fs_cpu *)d)->k, .act = act, .gate = gate, .up = up, .y = y, .n = n};

	share(d, n, GRAIN, gate_task, &j);
}

static void add_task(void *arg, int64_t task, int worker)
{
	struct map_job *j = arg;
	struct span s = span_of(task, GRAIN, j->n);

	j->k->add(j->y + s.first, j->up + s.first, s.last - s.first);
}

void fs_cpu_add(struct fs_dev *d, float *y, const float *x, int64_t n)
{
	struct map_job j = {.k = ((struct fs_cpu *)d)->k, .up = x, .y = y, .n = n};

	share(d, n, GRAIN, add_task, &j);
}
