/*
 * attention_tile: many queries (prefill, vision tower), after FlashAttention-2 (Dao 2023): a warp keeps 16
 * rows of queries and their output in registers while tiles of keys and values pass through shared memory;
 * scores become weights in the registers in which the next product wants them. K and V are f16 here, in rows
 * that begin at multiples of 16 bytes, K's next tile is copied while V's is used and the other way round.
 *
 * f16 rather than bf16 on both sides: weights lie in 0..1 and keep 11 bits instead of 8, the KV cache is f16
 * anyway, sums are f32; q, and k and v from f32, are held to f16's range.
 *
 * What limits it: tensor cores and 2^x together. For each pair of query and key 4·head_dim flops stand
 * against one 2^x of a unit that does 16 a cycle: at head_dim 80 the H200's mma.sync (about 0.6 of wgmma's
 * rate, hence of cuBLAS) needs 20 cycles for what takes the other unit 8, and two warps a scheduler overlap
 * them. 128 rows a block read K and V from the L2 cache once for 128 flops a byte, 2.7 TB/s at 350 TFLOP/s.
 * Half of cuBLAS' rate at 1024 tokens costs a 600M tower, whose attention is an eighth of its flops, about a
 * tenth of its speed. Rows in shared memory are padded by 16 bytes: stride / 16 is odd, so ldmatrix meets no
 * bank twice.
 */
#include "common/compute/cuda/attention.cuh"

template <int HDP, int WARPS, int KEYS> struct fs_tile_shape {
	enum { LD = HDP + 8, SHARE = WARPS * FS_WARP / KEYS }; /* SHARE: threads that copy a row */
};

/* One warp's 16 rows, in the lanes' fragments: this lane has rows g and g + 8. */
template <int HDP, int KEYS> struct fs_tile_rows {
	uint32_t q[HDP / 16][4];
	float s[KEYS / 8][4];
	float o[HDP / 8][4];
	float m[2], l[2];
	int seen[2];
};

/* [KEYS][HDP] from global memory, zeros past the last key and past head_dim. A few threads share a row, so
 * that one address and steps known in advance are all that it takes. */
template <int HDP, int WARPS, int KEYS>
FS_DEVICE void fs_tile_load(
        const struct fs_attn_run &r, const struct fs_attn_place &p, const void *from, int key, uint16_t *dst)
{
	typedef fs_tile_shape<HDP, WARPS, KEYS> shape;
	int row = (int)threadIdx.x / shape::SHARE, c = (int)threadIdx.x % shape::SHARE * 8;
	bool there = key + row < p.last;
	const uint16_t *src = (const uint16_t *)from + (there ? (key + row) * r.a.kv_stride : 0) +
	                      p.kv_head * r.head_step + c;

	dst += row * shape::LD + c;
#pragma unroll
	for (int i = 0; i < HDP; i += 8 * shape::SHARE) {
		bool in = there && c + i < r.a.head_dim;

		if (c + i < HDP)
			fs_cp16(dst + i, in ? src + i : from, in);
	}
	fs_cp_commit();
}

template <int HDP, int KEYS>
FS_DEVICE void fs_tile_begin(
        const struct fs_attn_run &r, const struct fs_attn_place &p, int warp, fs_tile_rows<HDP, KEYS> &w)
{
	int lane = (int)threadIdx.x % FS_WARP, row = p.row0 + 16 * warp + lane / 4, t = lane % 4;

#pragma unroll
	for (int h = 0; h < 2; h++) {
		const float *q = fs_attn_q(r, p, min(row + 8 * h, r.rows - 1));

		w.seen[h] = fs_attn_seen(r, row + 8 * h);
		w.m[h] = -INFINITY;
		w.l[h] = 0.0f;
#pragma unroll
		for (int i = 0; i < HDP / 8; i++) {
			int e = 8 * i + 2 * t;
			float scale = r.a.scale * FS_ATTN_LOG2E;
			bool in = e < r.a.head_dim; /* head_dim is even */

			w.q[i / 2][i % 2 * 2 + h] =
			        fs_attn_narrow2(in ? q[e] * scale : 0.0f, in ? q[e + 1] * scale : 0.0f);
			w.o[i][2 * h] = w.o[i][2 * h + 1] = 0.0f;
		}
	}
}

/* s = q·kᵀ */
template <int HDP, int KEYS> FS_DEVICE void fs_tile_scores(fs_tile_rows<HDP, KEYS> &w, const uint16_t *k)
{
	int lane = (int)threadIdx.x % FS_WARP;
	const uint16_t *row = k + (lane % 8 + lane / 16 * 8) * (HDP + 8) + lane / 8 % 2 * 8;

#pragma unroll
	for (int j = 0; j < KEYS / 8; j++)
		w.s[j][0] = w.s[j][1] = w.s[j][2] = w.s[j][3] = 0.0f;
#pragma unroll
	for (int i = 0; i < HDP / 16; i++) {
#pragma unroll
		for (int j = 0; j < KEYS / 16; j++) {
			uint32_t b[4];

			fs_ldmatrix_x4(b, row + 16 * j * (HDP + 8) + 16 * i);
			fs_mma_16x8x16(w.s[2 * j], w.q[i], b);
			fs_mma_16x8x16(w.s[2 * j + 1], w.q[i], b + 2);
		}
	}
}

/* o = o·shrink + weights·v */
template <int HDP, int KEYS> FS_DEVICE void fs_tile_weigh(fs_tile_rows<HDP, KEYS> &w, const uint16_t *v)
{
	int lane = (int)threadIdx.x % FS_WARP;
	const uint16_t *row = v + lane % 16 * (HDP + 8) + lane / 16 * 8;

#pragma unroll
	for (int j = 0; j < KEYS / 16; j++) {
		uint32_t a[4];

		fs_attn_weights(w.s[2 * j], w.s[2 * j + 1], a);
#pragma unroll
		for (int i = 0; i < HDP / 16; i++) {
			uint32_t b[4];

			fs_ldmatrix_x4_trans(b, row + 16 * j * (HDP + 8) + 16 * i);
			fs_mma_16x8x16(w.o[2 * i], a, b);
			fs_mma_16x8x16(w.o[2 * i + 1], a, b + 2);
		}
	}
}

template <int HDP, int KEYS> FS_DEVICE void fs_tile_soften(fs_tile_rows<HDP, KEYS> &w, int k0)
{
	float shrink[2];

	fs_attn_soften(w.s, k0, k0 + KEYS > min(w.seen[0], w.seen[1]), w.seen, w.m, w.l, shrink);
#pragma unroll
	for (int i = 0; i < HDP / 8; i++)
#pragma unroll
		for (int e = 0; e < 4; e++)
			w.o[i][e] *= shrink[e / 2];
}

template <int HDP, int KEYS>
FS_DEVICE void fs_tile_end(
        const struct fs_attn_run &r, const struct fs_attn_place &p, int warp, fs_tile_rows<HDP, KEYS> &w)
{
	int lane = (int)threadIdx.x % FS_WARP, t = lane % 4;

#pragma unroll
	for (int h = 0; h < 2; h++) {
		int row = p.row0 + 16 * warp + lane / 4 + 8 * h;
		float sum = fs_attn_quad_sum(w.l[h]), factor, *out;

		if (row >= r.rows)
			continue;
		out = fs_attn_out(r, p, row, sum, &factor);
		if (t == 0)
			fs_attn_note(r, p, row, w.m[h], sum);
#pragma unroll
		for (int i = 0; i < HDP / 8; i++) {
			int e = 8 * i + 2 * t;

			if (e < r.a.head_dim) {
				out[e] = w.o[i][2 * h] * factor;
				out[e + 1] = w.o[i][2 * h + 1] * factor;
			}
		}
	}
}

template <int HDP, int WARPS, int KEYS, int BLOCKS>
__global__ void __launch_bounds__(WARPS *FS_WARP, BLOCKS) fs_attn_tile_kernel(const struct fs_attn_run r)
{
	typedef fs_tile_shape<HDP, WARPS, KEYS> shape;
	FS_SHARED(uint16_t, k, [KEYS * shape::LD]);
	FS_SHARED(uint16_t, v, [KEYS * shape::LD]);
	struct fs_attn_place p = fs_attn_place_of(r);
	int warp = (int)threadIdx.x / FS_WARP;
	fs_tile_rows<HDP, KEYS> w;

	if (fs_attn_idle(r, p))
		return;
	fs_tile_begin(r, p, warp, w);
	if (p.first < p.last)
		fs_tile_load<HDP, WARPS, KEYS>(r, p, r.a.k, p.first, k);
	for (int k0 = p.first; k0 < p.last; k0 += KEYS) {
		bool sees = __any_sync(FS_FULL, k0 < max(w.seen[0], w.seen[1])); /* some row of the warp */

		fs_cp_wait<0>();
		__syncthreads(); /* k is there, v has been used */
		fs_tile_load<HDP, WARPS, KEYS>(r, p, r.a.v, k0, v);
		if (sees)
			fs_tile_scores(w, k);
		__syncthreads(); /* k has been used */
		if (k0 + KEYS < p.last)
			fs_tile_load<HDP, WARPS, KEYS>(r, p, r.a.k, k0 + KEYS, k);
		else
			fs_cp_commit();
		if (sees)
			fs_tile_soften(w, k0);
		fs_cp_wait<1>();
		__syncthreads(); /* v is there */
		if (sees)
			fs_tile_weigh(w, v);
	}
	fs_tile_end(r, p, warp, w);
}

/* ---- [host] ---- */

/* Wide heads leave no registers for eight warps' worth of rows and for long tiles. */
void fs_attn_tile_shape(int head_dim, int *rows, int *keys)
{
	*rows = head_dim <= 128 ? 128 : 64;
	*keys = head_dim <= 128 ? 64 : head_dim <= 192 ? 32 : 16;
}

int fs_attn_tile(struct CUstream_st *s, const struct fs_attn_run *r)
{
	dim3 grid = fs_attn_grid(r);
	int hd = r->a.head_dim;

	if (hd <= 32)
		return FS_LAUNCH((fs_attn_tile_kernel<32, 8, 64, 2>), grid, 256, 0, s, *r);
	if (hd <= 64)
		return FS_LAUNCH((fs_attn_tile_kernel<64, 8, 64, 2>), grid, 256, 0, s, *r);
	if (hd <= 80)
		return FS_LAUNCH((fs_attn_tile_kernel<80, 8, 64, 2>), grid, 256, 0, s, *r);
	if (hd <= 96)
		return FS_LAUNCH((fs_attn_tile_kernel<96, 8, 64, 1>), grid, 256, 0, s, *r);
	if (hd <= 128)
		return FS_LAUNCH((fs_attn_tile_kernel<128, 8, 64, 1>), grid, 256, 0, s, *r);
	if (hd <= 192)
		return FS_LAUNCH((fs_attn_tile_kernel<192, 4, 32, 1>), grid, 128, 0, s, *r);
	return FS_LAUNCH((fs_attn_tile_kernel<256, 4, 16, 1>), grid, 128, 0, s, *r);
}
