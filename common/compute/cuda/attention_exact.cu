/*
 * attention_exact: every product in f32 on the ordinary units, for parity and for what the other kernels do
 * not take (few queries whose keys are f32 or lie at odd addresses). 16 rows and 32 keys a block: eight lanes
 * share a row, each takes four scores of a tile and every eighth float4 of the output.
 *
 * What limits it: shared memory, two reads of 16 bytes for four multiply-adds, so about an eighth of the
 * card's f32 peak. Rows are padded by 16 bytes, so that eight keys' reads meet no bank twice.
 */
#include "common/compute/cuda/attention.cuh"

#define ROWS FS_ATTN_EXACT_ROWS
#define KEYS FS_ATTN_EXACT_KEYS
#define LANES 8 /* of a row */
#define THREADS (ROWS * LANES)
#define VECTORS (256 / 4 / LANES) /* float4 of the output a lane has at most */

struct fs_exact_row {
	float o[VECTORS][4];
	float s[KEYS / LANES]; /* of keys lane, lane + 8, … */
	float m, l;
	int seen;
};

FS_DEVICE float4 fs_exact_at(const float *p)
{
	return *(const float4 *)p;
}

/* [KEYS][head_dim] as f32, zeros past the last key. */
FS_DEVICE void fs_exact_load(const struct fs_attn_run &r, const struct fs_attn_place &p, const void *src,
        int key, float *dst, int ld)
{
	int per_row = r.a.head_dim / 4;

	for (int i = (int)threadIdx.x; i < KEYS * per_row; i += THREADS) {
		int row = i / per_row, c = i % per_row * 4;
		int64_t at = (key + row) * r.a.kv_stride + (int64_t)p.kv_head * r.head_step + c;
		float4 v = make_float4(0, 0, 0, 0);

		if (key + row < p.last)
			v = fs_attn_load4(src, r.a.kv_type, at, r.vector);
		*(float4 *)(dst + row * ld + c) = v;
	}
}

FS_DEVICE void fs_exact_begin(
        const struct fs_attn_run &r, const struct fs_attn_place &p, float *q, int ld, fs_exact_row &w)
{
	int row = (int)threadIdx.x / LANES;

	w.seen = fs_attn_seen(r, p.row0 + row);
	w.m = -INFINITY;
	w.l = 0.0f;
#pragma unroll
	for (int i = 0; i < VECTORS; i++)
		w.o[i][0] = w.o[i][1] = w.o[i][2] = w.o[i][3] = 0.0f;
	for (int e = (int)threadIdx.x % LANES; e < r.a.head_dim; e += LANES)
		q[row * ld + e] = row < p.n_rows
		                          ? fs_attn_q(r, p, p.row0 + row)[e] * (r.a.scale * FS_ATTN_LOG2E)
		                          : 0.0f;
}

FS_DEVICE void fs_exact_scores(const float *q, const float *k, int ld, int head_dim, fs_exact_row &w)
{
	q += (int)threadIdx.x / LANES * ld;
	k += (int)threadIdx.x % LANES * ld;
#pragma unroll
	for (int j = 0; j < KEYS / LANES; j++)
		w.s[j] = 0.0f;
	for (int e = 0; e < head_dim; e += 4) {
		float4 a = fs_exact_at(q + e);

#pragma unroll
		for (int j = 0; j < KEYS / LANES; j++) {
			float4 b = fs_exact_at(k + j * LANES * ld + e);

			w.s[j] = fmaf(a.x, b.x, fmaf(a.y, b.y, fmaf(a.z, b.z, fmaf(a.w, b.w, w.s[j]))));
		}
	}
}

/* Scores become weights, in shared memory. */
FS_DEVICE void fs_exact_soften(int k0, float *weights, fs_exact_row &w)
{
	int lane = (int)threadIdx.x % LANES;
	float max = w.m, base, shrink;

#pragma unroll
	for (int j = 0; j < KEYS / LANES; j++) {
		if (k0 + lane + j * LANES >= w.seen)
			w.s[j] = -INFINITY;
		max = fmaxf(max, w.s[j]);
	}
#pragma unroll
	for (int k = 1; k < LANES; k *= 2)
		max = fmaxf(max, __shfl_xor_sync(FS_FULL, max, k));
	base = fs_attn_base(max);
	shrink = exp2f(w.m - base);
	w.m = max;
	w.l *= shrink;
#pragma unroll
	for (int j = 0; j < KEYS / LANES; j++) {
		float p = exp2f(w.s[j] - base);

		w.l += p;
		weights[(int)threadIdx.x / LANES * KEYS + lane + j * LANES] = p;
	}
#pragma unroll
	for (int i = 0; i < VECTORS; i++)
#pragma unroll
		for (int e = 0; e < 4; e++)
			w.o[i][e] *= shrink;
}

FS_DEVICE void fs_exact_weigh(const float *weights, const float *v, int ld, int head_dim, fs_exact_row &w)
{
	int lane = (int)threadIdx.x % LANES;

	weights += (int)threadIdx.x / LANES * KEYS;
	for (int key = 0; key < KEYS; key++) {
		float p = weights[key];

#pragma unroll
		for (int i = 0; i < VECTORS; i++) {
			int e = 4 * (lane + i * LANES);

			if (e < head_dim) {
				float4 x = fs_exact_at(v + key * ld + e);

				w.o[i][0] = fmaf(p, x.x, w.o[i][0]);
				w.o[i][1] = fmaf(p, x.y, w.o[i][1]);
				w.o[i][2] = fmaf(p, x.z, w.o[i][2]);
				w.o[i][3] = fmaf(p, x.w, w.o[i][3]);
			}
		}
	}
}

FS_DEVICE void fs_exact_end(const struct fs_attn_run &r, const struct fs_attn_place &p, fs_exact_row &w)
{
	int row = (int)threadIdx.x / LANES, lane = (int)threadIdx.x % LANES;
	float factor, *out;

#pragma unroll
	for (int k = 1; k < LANES; k *= 2)
		w.l += __shfl_xor_sync(FS_FULL, w.l, k);
	if (row >= p.n_rows)
		return;
	out = fs_attn_out(r, p, p.row0 + row, w.l, &factor);
	if (lane == 0)
		fs_attn_note(r, p, p.row0 + row, w.m, w.l);
#pragma unroll
	for (int i = 0; i < VECTORS; i++) {
		int e = 4 * (lane + i * LANES);

		if (e < r.a.head_dim)
			for (int c = 0; c < 4; c++)
				out[e + c] = w.o[i][c] * factor;
	}
}

__global__ void __launch_bounds__(THREADS, 4) fs_attn_exact_kernel(const struct fs_attn_run r)
{
	FS_SHARED_DYNAMIC(float, q);
	int hd = r.a.head_dim, ld = hd + 4;
	float *kv = q + ROWS * ld, *weights = kv + KEYS * ld;
	struct fs_attn_place p = fs_attn_place_of(r);
	fs_exact_row w;

	if (fs_attn_idle(r, p))
		return;
	fs_exact_begin(r, p, q, ld, w);
	for (int k0 = p.first; k0 < p.last; k0 += KEYS) {
		fs_exact_load(r, p, r.a.k, k0, kv, ld);
		__syncthreads();
		fs_exact_scores(q, kv, ld, hd, w);
		__syncthreads(); /* the keys have been used */
		fs_exact_load(r, p, r.a.v, k0, kv, ld);
		fs_exact_soften(k0, weights, w);
		__syncthreads();
		fs_exact_weigh(weights, kv, ld, hd, w);
		__syncthreads(); /* and the values */
	}
	fs_exact_end(r, p, w);
}

/* ---- [host] ---- */

static size_t fs_exact_shared(int head_dim)
{
	return sizeof(float) * ((ROWS + KEYS) * (size_t)(head_dim + 4) + ROWS * KEYS);
}

int fs_attn_exact(struct CUstream_st *s, const struct fs_attn_run *r)
{
	size_t shared = fs_exact_shared(r->a.head_dim);
	int err = 0;

	if (shared > 48 * 1024)
		err = FS_ALLOW_SHARED(shared, fs_attn_exact_kernel);
	return err ? err : FS_LAUNCH(fs_attn_exact_kernel, fs_attn_grid(r), THREADS, shared, s, *r);
}
