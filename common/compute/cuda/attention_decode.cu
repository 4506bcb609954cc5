/*
 * attention_decode: few queries against long keys, the step that makes tokens. Up to 16 rows (the heads of a
 * group, a few queries) fill one fragment of the tensor cores, so that every key and value is read once for
 * all of them, straight from memory into the registers in which the products want it: a dot product does not
 * mind the order of its terms, so a lane takes 16 contiguous bytes of a key and q is laid out to match;
 * columns of the output may be any dimensions, so a lane takes 16 contiguous bytes of each of four values.
 * Nothing passes through shared memory but the end, where the warps' results are joined.
 *
 * What limits it: memory. Warps work on 16 keys each, without barriers, and ask for the values before the
 * scores are taken and for the next keys before the values are used: at head_dim 128 two blocks a
 * multiprocessor have 64 KiB under way, where the H200 needs about 26 (4.8 TB/s, 700 ns, 132 of them). The
 * products of 16 padded rows take 13 % of its tensor cores meanwhile, a quarter of an RTX 3060's. Of long
 * contexts it should read at more than 85 % of what a copy gets.
 */
#include "common/compute/cuda/attention.cuh"

#define WARPS 4

/* Keys by blocks of 32 dimensions (16 bytes a lane) and a rest of 16 (8 bytes). */
template <int HDP> struct fs_decode_keys {
	uint32_t word[2][HDP / 8]; /* [8 keys each][2 words of each 16 dimensions] */
};

/* Values by blocks of 64 dimensions (16 bytes a lane), then rests of 32 and 16. */
template <int HDP> struct fs_decode_values {
	uint32_t word[4][HDP / 16]; /* [the lane's four keys][dimensions] */
};

template <int HDP> struct fs_decode_rows {
	uint32_t q[HDP / 16][4];
	float o[HDP / 8][4];
	float m[2], l[2];
	int seen[2];
};

/* Dimensions that fragment i of a row takes: the lane's two words of k-step i, as keys are read. */
FS_DEVICE int fs_decode_dim(int hdp, int i, int t, int word)
{
	if (16 * i < hdp / 32 * 32)
		return i / 2 * 32 + 8 * t + i % 2 * 4 + 2 * word;
	return 16 * i + 4 * t + 2 * word;
}

template <int HDP>
FS_DEVICE void fs_decode_begin(
        const struct fs_attn_run &r, const struct fs_attn_place &p, fs_decode_rows<HDP> &w)
{
	int lane = (int)threadIdx.x % FS_WARP, row = p.row0 + lane / 4, t = lane % 4;
	float scale = r.a.scale * FS_ATTN_LOG2E;

#pragma unroll
	for (int h = 0; h < 2; h++) {
		bool real = row + 8 * h < r.rows;
		const float *q = fs_attn_q(r, p, real ? row + 8 * h : 0);

		w.seen[h] = fs_attn_seen(r, row + 8 * h);
		w.m[h] = -INFINITY;
		w.l[h] = 0.0f;
#pragma unroll
		for (int i = 0; i < HDP / 8; i++) {
			int e = fs_decode_dim(HDP, i / 2, t, i % 2);
			bool in = real && e < r.a.head_dim;

			w.q[i / 2][i % 2 * 2 + h] =
			        fs_attn_narrow2(in ? q[e] * scale : 0.0f, in ? q[e + 1] * scale : 0.0f);
			w.o[i][2 * h] = w.o[i][2 * h + 1] = 0.0f;
		}
	}
}

FS_DEVICE uint4 fs_decode_ld16(const uint16_t *p, bool in)
{
	return in ? fs_ld16_once(p) : make_uint4(0, 0, 0, 0);
}

FS_DEVICE uint2 fs_decode_ld8(const uint16_t *p, bool in)
{
	return in ? fs_ld8_once(p) : make_uint2(0, 0);
}

/* Keys k0 + g and k0 + 8 + g; ks: the head's first key. */
template <int HDP>
FS_DEVICE void fs_decode_read_keys(
        const struct fs_attn_run &r, const uint16_t *ks, int k0, int last, fs_decode_keys<HDP> &k)
{
	int lane = (int)threadIdx.x % FS_WARP, g = lane / 4, t = lane % 4;

#pragma unroll
	for (int j = 0; j < 2; j++) {
		int key = k0 + 8 * j + g;
		const uint16_t *p = ks + key * r.a.kv_stride;

#pragma unroll
		for (int i = 0; i < HDP / 32; i++) {
			int e = 32 * i + 8 * t;
			uint4 u = fs_decode_ld16(p + e, key < last && e < r.a.head_dim);

			k.word[j][4 * i] = u.x;
			k.word[j][4 * i + 1] = u.y;
			k.word[j][4 * i + 2] = u.z;
			k.word[j][4 * i + 3] = u.w;
		}
		if (HDP % 32 != 0) {
			int e = HDP / 32 * 32 + 4 * t;
			uint2 u = fs_decode_ld8(p + e, key < last && e < r.a.head_dim);

			k.word[j][HDP / 8 - 2] = u.x;
			k.word[j][HDP / 8 - 1] = u.y;
		}
	}
}

/* The lane's key c of 16, as the weights' fragment has it. */
FS_DEVICE int fs_decode_key(int k0, int t, int c)
{
	return k0 + 2 * t + c % 2 + c / 2 * 8;
}

template <int HDP>
FS_DEVICE void fs_decode_read_values(
        const struct fs_attn_run &r, const uint16_t *vs, int k0, int last, fs_decode_values<HDP> &v)
{
	int lane = (int)threadIdx.x % FS_WARP, g = lane / 4, t = lane % 4;

#pragma unroll
	for (int c = 0; c < 4; c++) {
		int key = fs_decode_key(k0, t, c), e = HDP / 64 * 64;
		const uint16_t *p = vs + key * r.a.kv_stride;

#pragma unroll
		for (int i = 0; i < HDP / 64; i++) {
			int d = 64 * i + 8 * g;
			uint4 u = fs_decode_ld16(p + d, key < last && d < r.a.head_dim);

			v.word[c][4 * i] = u.x;
			v.word[c][4 * i + 1] = u.y;
			v.word[c][4 * i + 2] = u.z;
			v.word[c][4 * i + 3] = u.w;
		}
		if (HDP / 32 % 2 != 0) {
			uint2 u = fs_decode_ld8(p + e + 4 * g, key < last && e + 4 * g < r.a.head_dim);

			v.word[c][e / 16] = u.x;
			v.word[c][e / 16 + 1] = u.y;
			e += 32;
		}
		if (HDP / 16 % 2 != 0)
			v.word[c][e / 16] =
			        key < last && e + 2 * g < r.a.head_dim ? fs_ld4_once(p + e + 2 * g) : 0;
	}
}

/* o += weights·v. Word i of a lane's values holds two dimensions: of two columns of the output. */
template <int HDP>
FS_DEVICE void fs_decode_weigh(const float (&s)[2][4], const fs_decode_values<HDP> &v, fs_decode_rows<HDP> &w)
{
	uint32_t a[4];

	fs_attn_weights(s[0], s[1], a);
#pragma unroll
	for (int i = 0; i < HDP / 16; i++) {
		uint32_t lo[2], hi[2];

#pragma unroll
		for (int c = 0; c < 2; c++) {
			lo[c] = __byte_perm(v.word[2 * c][i], v.word[2 * c + 1][i], 0x5410);
			hi[c] = __byte_perm(v.word[2 * c][i], v.word[2 * c + 1][i], 0x7632);
		}
		fs_mma_16x8x16(w.o[2 * i], a, lo);
		fs_mma_16x8x16(w.o[2 * i + 1], a, hi);
	}
}

/* Dimension of fragment i, column 2t + c: see how values are read. */
FS_DEVICE int fs_decode_column(int hdp, int i, int col)
{
	int whole = hdp / 64 * 64, half = whole + hdp / 32 % 2 * 32;

	if (8 * i < whole)
		return i / 8 * 64 + 8 * col + i % 8;
	if (8 * i < half)
		return whole + 4 * col + (i - whole / 8);
	return half + 2 * col + (i - half / 8);
}

/* Each warp's rows to shared memory. */
template <int HDP>
FS_DEVICE void fs_decode_put(const fs_decode_rows<HDP> &w, float (*o)[HDP + 4], float *m, float *l)
{
	int lane = (int)threadIdx.x % FS_WARP, g = lane / 4, t = lane % 4;

#pragma unroll
	for (int h = 0; h < 2; h++) {
		float sum = fs_attn_quad_sum(w.l[h]);

		if (t == 0) {
			m[g + 8 * h] = w.m[h];
			l[g + 8 * h] = sum;
		}
#pragma unroll
		for (int i = 0; i < HDP / 8; i++)
#pragma unroll
			for (int c = 0; c < 2; c++)
				o[g + 8 * h][fs_decode_column(HDP, i, 2 * t + c)] = w.o[i][2 * h + c];
	}
}

/* The warps' rows joined, and out. */
template <int HDP>
FS_DEVICE void fs_decode_join(const struct fs_attn_run &r, const struct fs_attn_place &p,
        float (*o)[16][HDP + 4], float (*m)[16], float (*l)[16])
{
	for (int row = (int)threadIdx.x / FS_WARP; row < p.n_rows; row += WARPS) {
		float max = m[0][row], sum = 0.0f, part[WARPS], factor, *out;

#pragma unroll
		for (int i = 1; i < WARPS; i++)
			max = fmaxf(max, m[i][row]);
#pragma unroll
		for (int i = 0; i < WARPS; i++) {
			part[i] = fs_attn_exp2(m[i][row] - fs_attn_base(max));
			sum += part[i] * l[i][row];
		}
		out = fs_attn_out(r, p, p.row0 + row, sum, &factor);
		if (threadIdx.x % FS_WARP == 0)
			fs_attn_note(r, p, p.row0 + row, max, sum);
		for (int e = (int)threadIdx.x % FS_WARP; e < r.a.head_dim; e += FS_WARP) {
			float y = 0.0f;

#pragma unroll
			for (int i = 0; i < WARPS; i++)
				y += part[i] * o[i][row][e];
			out[e] = y * factor;
		}
	}
}

template <int HDP>
FS_DEVICE void fs_decode_scores(const fs_decode_rows<HDP> &w, const fs_decode_keys<HDP> &k, float (&s)[2][4])
{
#pragma unroll
	for (int j = 0; j < 2; j++) {
		s[j][0] = s[j][1] = s[j][2] = s[j][3] = 0.0f;
#pragma unroll
		for (int i = 0; i < HDP / 16; i++)
			fs_mma_16x8x16(s[j], w.q[i], &k.word[j][2 * i]);
	}
}

template <int HDP>
__global__ void __launch_bounds__(WARPS *FS_WARP, 2) fs_attn_decode_kernel(const struct fs_attn_run r)
{
	FS_SHARED(float, o, [WARPS][16][HDP + 4]);
	FS_SHARED(float, m, [WARPS][16]);
	FS_SHARED(float, l, [WARPS][16]);
	struct fs_attn_place p = fs_attn_place_of(r);
	int warp = (int)threadIdx.x / FS_WARP;
	const uint16_t *ks = (const uint16_t *)r.a.k + (int64_t)p.kv_head * r.head_step;
	const uint16_t *vs = (const uint16_t *)r.a.v + (int64_t)p.kv_head * r.head_step;
	fs_decode_rows<HDP> w;
	fs_decode_keys<HDP> k;

	if (fs_attn_idle(r, p))
		return;
	fs_decode_read_keys<HDP>(r, ks, p.first + 16 * warp, p.last, k);
	fs_decode_begin(r, p, w);
	for (int k0 = p.first + 16 * warp; k0 < p.last; k0 += 16 * WARPS) {
		fs_decode_values<HDP> v;
		float s[2][4], shrink[2];

		fs_decode_read_values<HDP>(r, vs, k0, p.last, v);
		fs_decode_scores(w, k, s);
		fs_decode_read_keys<HDP>(r, ks, k0 + 16 * WARPS, p.last, k);
		fs_attn_soften(s, k0, true, w.seen, w.m, w.l, shrink);
#pragma unroll
		for (int i = 0; i < HDP / 8; i++)
#pragma unroll
			for (int e = 0; e < 4; e++)
				w.o[i][e] *= shrink[e / 2];
		fs_decode_weigh(s, v, w);
	}
	fs_decode_put(w, o[warp], m[warp], l[warp]);
	__syncthreads();
	fs_decode_join<HDP>(r, p, o, m, l);
}

/* ---- [host] ---- */

int fs_attn_decode(struct CUstream_st *s, const struct fs_attn_run *r)
{
	dim3 grid = fs_attn_grid(r);
	int hd = r->a.head_dim, block = WARPS * FS_WARP;

	if (hd <= 32)
		return FS_LAUNCH(fs_attn_decode_kernel<32>, grid, block, 0, s, *r);
	if (hd <= 64)
		return FS_LAUNCH(fs_attn_decode_kernel<64>, grid, block, 0, s, *r);
	if (hd <= 80)
		return FS_LAUNCH(fs_attn_decode_kernel<80>, grid, block, 0, s, *r);
	if (hd <= 96)
		return FS_LAUNCH(fs_attn_decode_kernel<96>, grid, block, 0, s, *r);
	return FS_LAUNCH(fs_attn_decode_kernel<128>, grid, block, 0, s, *r);
}
