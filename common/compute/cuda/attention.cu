/*
 * attention: which kernel takes a call, how its keys are split, and the two small kernels around it: rows of
 * keys and values into 16 bits at addresses that the tensor-core kernel can copy from, and the join of the
 * splits.
 *
 * Splits: a decode step has one tile of rows for each kv head, four to sixteen blocks for 132
 * multiprocessors; cutting the keys makes blocks enough for one wave. How many there are depends on sizes
 * that the host knows (n_kv_max with *past), which keys each takes on those of the moment.
 */
#include "common/compute/cuda/attention.cuh"

#define MAX_SMS 256
#define MAX_SPLITS 128
#define JOIN_WARPS 8

/* ---- keys and values into 16 bits ---- */

struct fs_attn_narrow {
	const void *k, *v;     /* [n][kv_heads·head_dim], rows stride apart */
	uint16_t *k_to, *v_to; /* [n][kv_heads][wide] */
	enum fs_dtype type;
	int64_t stride, n;
	const int32_t *past;
	int kv_heads, head_dim;
	int wide; /* head_dim to the next multiple of 8 */
	bool vector;
};

/* Four elements a thread: a plain copy, at the memory's speed and a fiftieth of what the products take. */
__global__ void __launch_bounds__(256) fs_attn_narrow_kernel(const struct fs_attn_narrow c)
{
	int64_t n = c.n + (c.past ? *c.past : 0);
	int per_row = c.kv_heads * c.wide / 4;
	const void *src = blockIdx.y ? c.v : c.k;
	uint16_t *dst = blockIdx.y ? c.v_to : c.k_to;

	for (int64_t i = (int64_t)blockIdx.x * 256 + threadIdx.x; i < n * per_row;
	        i += (int64_t)gridDim.x * 256) {
		int at = (int)(i % per_row) * 4, head = at / c.wide, e = at % c.wide;
		float4 v = make_float4(0, 0, 0, 0);

		if (e < c.head_dim)
			v = fs_attn_load4(
			        src, c.type, i / per_row * c.stride + head * c.head_dim + e, c.vector);
		*(uint2 *)(dst + i * 4) = make_uint2(fs_attn_narrow2(v.x, v.y), fs_attn_narrow2(v.z, v.w));
	}
}

/* ---- the join ---- */

/* One row a block: its splits shared by the warps, four dimensions a lane. */
__global__ void __launch_bounds__(JOIN_WARPS *FS_WARP) fs_attn_join_kernel(const struct fs_attn_run r)
{
	FS_SHARED(float, weight, [MAX_SPLITS]);
	FS_SHARED(float, part, [JOIN_WARPS][256 + 4]);
	int row = (int)blockIdx.x, kv_head = (int)blockIdx.y, tile_last, n, chunk, used;
	int lane = (int)threadIdx.x % FS_WARP, warp = (int)threadIdx.x / FS_WARP, hd = r.a.head_dim;
	int64_t all = (int64_t)r.a.kv_heads * r.rows, at = (int64_t)kv_head * r.rows + row;
	float max = -INFINITY, sum = 0.0f;

	tile_last = min(r.rows, (row / r.tile_rows + 1) * r.tile_rows) - 1;
	n = fs_attn_seen(r, tile_last);
	chunk = fs_attn_chunk(r, n);
	used = n ? (n + chunk - 1) / chunk : 0;
	for (int i = lane; i < used; i += FS_WARP)
		max = fmaxf(max, r.part_ml[i * all + at].x);
	max = fs_attn_base(fs_warp_max(max));
	for (int i = lane; i < used; i += FS_WARP) {
		float2 ml = r.part_ml[i * all + at];
		float w = fs_attn_exp2(ml.x - max);

		sum += w * ml.y;
		if (warp == 0)
			weight[i] = w;
	}
	sum = fs_warp_sum(sum);
	__syncthreads();
	for (int e = lane; e < hd; e += FS_WARP) {
		float y = 0.0f;

#pragma unroll 4
		for (int i = warp; i < used; i += JOIN_WARPS)
			y += weight[i] * r.part[(i * all + at) * hd + e];
		part[warp][e] = y;
	}
	__syncthreads();
	for (int e = (int)threadIdx.x; e < hd; e += JOIN_WARPS * FS_WARP) {
		float y = 0.0f;

#pragma unroll
		for (int i = 0; i < JOIN_WARPS; i++)
			y += part[i][e];
		r.a.out[row / r.group * r.a.out_stride + (int64_t)(kv_head * r.group + row % r.group) * hd +
		        e] = sum == 0.0f ? 0.0f : y / sum;
	}
}

/* ---- [host] the plan ---- */

enum fs_attn_kind { TILE, DECODE, EXACT };

struct fs_attn_plan {
	enum fs_attn_kind kind;
	struct fs_attn_run run;
	int64_t n_max; /* keys at most */
	bool narrow;
	int wide;
	size_t narrow_bytes; /* of keys, and of values again */
	size_t part_bytes, ml_bytes;
};

static size_t fs_attn_round(size_t bytes)
{
	return (bytes + 255) & ~(size_t)255;
}

static bool fs_attn_multiple(const struct fs_attn *a, int elements, uintptr_t bytes)
{
	return a->kv_stride % elements == 0 && a->head_dim % elements == 0 && (uintptr_t)a->k % bytes == 0 &&
	       (uintptr_t)a->v % bytes == 0;
}

static void fs_attn_choose(struct fs_attn_plan *p, bool exact)
{
	const struct fs_attn *a = &p->run.a;
	bool ready = a->kv_type == FS_F16 && fs_attn_multiple(a, 8, 16), few = p->run.rows <= FS_ATTN_FEW;

	p->kind = TILE;
	if (exact || (few && !ready))
		p->kind = EXACT;
	else if (few && a->head_dim <= FS_ATTN_DECODE_HEAD)
		p->kind = DECODE;
	p->narrow = p->kind == TILE && !ready;
	switch (p->kind) {
	case TILE:
		fs_attn_tile_shape(a->head_dim, &p->run.tile_rows, &p->run.tile_keys);
		break;
	case DECODE:
		p->run.tile_rows = FS_ATTN_FEW;
		p->run.tile_keys = FS_ATTN_DECODE_KEYS;
		break;
	case EXACT:
		p->run.tile_rows = FS_ATTN_EXACT_ROWS;
		p->run.tile_keys = FS_ATTN_EXACT_KEYS;
		break;
	}
}

/* Blocks enough for one wave (two a multiprocessor, one of the tile kernel's), each with keys for two turns
 * at least. Grows with sms, so that scratch for MAX_SMS is enough for any card. */
static int fs_attn_splits(const struct fs_attn_plan *p, int sms)
{
	int64_t tiles = (p->run.rows + p->run.tile_rows - 1) / p->run.tile_rows * p->run.a.kv_heads;
	int64_t wave = (int64_t)FS_MAX(1, FS_MIN(sms, MAX_SMS)) * (p->kind == TILE ? 1 : 2);
	int64_t by_keys = (p->n_max + 2 * p->run.tile_keys - 1) / (2 * p->run.tile_keys);

	return (int)FS_MAX(1, FS_MIN(FS_MIN(wave / tiles, by_keys), MAX_SPLITS));
}

/* false: more rows or keys than an int counts. */
static bool fs_attn_plan_of(const struct fs_attn *a, bool exact, int sms, struct fs_attn_plan *p)
{
	int64_t cells;

	memset(p, 0, sizeof(*p));
	p->run.a = *a;
	p->run.group = a->heads / a->kv_heads;
	p->n_max = a->past ? a->n_kv_max : a->n_kv;
	if (a->n_q > INT32_MAX / p->run.group || p->n_max > INT32_MAX - 64)
		return false;
	p->run.rows = (int)a->n_q * p->run.group;
	p->run.head_step = a->head_dim;
	p->run.vector = fs_attn_multiple(a, 4, a->kv_type == FS_F32 ? 16 : 8);
	fs_attn_choose(p, exact);
	p->run.splits = fs_attn_splits(p, sms);
	p->wide = (a->head_dim + 7) / 8 * 8;
	cells = p->n_max * a->kv_heads * p->wide;
	if (p->narrow)
		p->narrow_bytes = fs_attn_round((size_t)cells * sizeof(uint16_t));
	if (p->run.splits > 1) {
		size_t rows = (size_t)p->run.splits * (size_t)a->kv_heads * (size_t)p->run.rows;

		p->part_bytes = fs_attn_round(rows * (size_t)a->head_dim * sizeof(float));
		p->ml_bytes = fs_attn_round(rows * sizeof(float2));
	}
	return true;
}

/* Keys and values to scratch; the run reads them there. */
static int fs_attn_narrow_all(struct CUstream_st *s, struct fs_attn_plan *p, uint8_t *scratch)
{
	struct fs_attn *a = &p->run.a;
	struct fs_attn_narrow c = {};
	int64_t threads = p->n_max * a->kv_heads * p->wide / 4;
	dim3 grid((unsigned)FS_MIN(FS_MAX(1, (threads + 255) / 256), 4096), 2);
	int err;

	c.k = a->k;
	c.v = a->v;
	c.k_to = (uint16_t *)scratch;
	c.v_to = (uint16_t *)(scratch + p->narrow_bytes);
	c.type = a->kv_type;
	c.stride = a->kv_stride;
	c.n = a->n_kv;
	c.past = a->past;
	c.kv_heads = a->kv_heads;
	c.head_dim = a->head_dim;
	c.wide = p->wide;
	c.vector = p->run.vector;
	err = FS_LAUNCH(fs_attn_narrow_kernel, grid, 256, 0, s, c);
	a->k = c.k_to;
	a->v = c.v_to;
	a->kv_type = FS_F16;
	a->kv_stride = (int64_t)a->kv_heads * p->wide;
	p->run.head_step = p->wide;
	return err;
}

size_t fs_cuk_attention_scratch(const struct fs_attn *a, bool exact)
{
	struct fs_attn_plan p;

	if (!fs_attn_plan_of(a, exact, MAX_SMS, &p))
		return 0;
	return 2 * p.narrow_bytes + p.part_bytes + p.ml_bytes;
}

int fs_cuk_attention(struct CUstream_st *s, const struct fs_attn *a, bool exact, int sms, void *scratch)
{
	struct fs_attn_plan p;
	uint8_t *at = (uint8_t *)scratch;
	int err = 0;

	if (!fs_attn_plan_of(a, exact, sms, &p))
		return FS_CUK_INVALID;
	if (p.narrow)
		err = fs_attn_narrow_all(s, &p, at);
	at += 2 * p.narrow_bytes;
	if (p.run.splits > 1) {
		p.run.part = (float *)at;
		p.run.part_ml = (float2 *)(at + p.part_bytes);
	}
	if (!err && p.kind == TILE)
		err = fs_attn_tile(s, &p.run);
	else if (!err && p.kind == DECODE)
		err = fs_attn_decode(s, &p.run);
	else if (!err)
		err = fs_attn_exact(s, &p.run);
	if (!err && p.run.splits > 1)
		err = FS_LAUNCH(fs_attn_join_kernel, dim3((unsigned)p.run.rows, (unsigned)a->kv_heads),
		        JOIN_WARPS * FS_WARP, 0, s, p.run);
	return err;
}
