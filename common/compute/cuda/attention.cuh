/*
 * attention: what the three attention kernels share. attention.cu chooses one of them and joins the parts of
 * keys that were taken by different blocks; attention_tile.cu (many queries, tensor cores),
 * attention_decode.cu (few queries, long keys) and attention_exact.cu (f32) do the work.
 *
 * Rows: all query heads that share a kv head are rows of one problem, row r being query r / group and head
 * r % group of the group, so that keys and values are read once for them. A block takes tile_rows rows and
 * the keys of one split. Scores are kept in units of log 2: e^x is 2^(x·log2 e), and q carries the factor.
 */
#ifndef FS_COMMON_COMPUTE_CUDA_ATTENTION_CUH
#define FS_COMMON_COMPUTE_CUDA_ATTENTION_CUH

#include "common/compute/cuda/device.cuh"

#define FS_ATTN_LOG2E 1.44269504f
#define FS_ATTN_FEW 16 /* rows that the decode kernel takes */

struct fs_attn_run {
	struct fs_attn a;
	int group;                /* query heads of a kv head */
	int rows;                 /* n_q·group */
	int tile_rows, tile_keys; /* of the kernel */
	int splits;
	int head_step;   /* elements from a kv head of k, v to the next */
	bool vector;     /* four elements of k, v may be read at once */
	float *part;     /* [splits][kv_heads·rows][head_dim], relative to their maximum, where splits > 1 */
	float2 *part_ml; /* [splits][kv_heads·rows]: maximum and sum */
};

/* What one block does. */
struct fs_attn_place {
	int kv_head, split;
	int row0;        /* first row */
	int n_rows;      /* of tile_rows */
	int first, last; /* keys */
};

/* [host] Queue one kernel; the grid is (kv_heads·splits, tiles of rows). */
int fs_attn_tile(struct CUstream_st *s, const struct fs_attn_run *r);
void fs_attn_tile_shape(int head_dim, int *rows, int *keys);
int fs_attn_decode(struct CUstream_st *s, const struct fs_attn_run *r);
#define FS_ATTN_DECODE_KEYS 64
#define FS_ATTN_DECODE_HEAD 128 /* head_dim at most */
int fs_attn_exact(struct CUstream_st *s, const struct fs_attn_run *r);
#define FS_ATTN_EXACT_ROWS 16
#define FS_ATTN_EXACT_KEYS 32

static inline dim3 fs_attn_grid(const struct fs_attn_run *r)
{
	return dim3((unsigned)(r->a.kv_heads * r->splits),
	        (unsigned)((r->rows + r->tile_rows - 1) / r->tile_rows));
}

/* Keys that a row sees, 0 past the last row. */
FS_DEVICE int fs_attn_seen(const struct fs_attn_run &r, int row)
{
	if (row >= r.rows)
		return 0;
	if (!r.a.causal)
		return (int)r.a.n_kv;
	return (int)r.a.q_first + (r.a.past ? *r.a.past : 0) + row / r.group + 1;
}

/* Keys of each split of a tile whose last row sees n: whole tiles of keys, shared out evenly over what there
 * is now, not over what there may be. */
FS_DEVICE int fs_attn_chunk(const struct fs_attn_run &r, int n)
{
	int tiles = (n + r.tile_keys - 1) / r.tile_keys;

	return (tiles + r.splits - 1) / r.splits * r.tile_keys;
}

/* Late rows see more keys and are begun first. */
FS_DEVICE struct fs_attn_place fs_attn_place_of(const struct fs_attn_run &r)
{
	struct fs_attn_place p;
	int tile = (int)(gridDim.y - 1 - blockIdx.y), n, chunk;

	p.kv_head = (int)blockIdx.x / r.splits;
	p.split = (int)blockIdx.x % r.splits;
	p.row0 = tile * r.tile_rows;
	p.n_rows = min(r.tile_rows, r.rows - p.row0);
	n = fs_attn_seen(r, p.row0 + p.n_rows - 1);
	chunk = fs_attn_chunk(r, n);
	p.first = min(n, p.split * chunk);
	p.last = min(n, p.first + chunk);
	return p;
}

/* Nothing to do and nothing to write: the join knows that this split has no keys. */
FS_DEVICE bool fs_attn_idle(const struct fs_attn_run &r, const struct fs_attn_place &p)
{
	return r.splits > 1 && p.first >= p.last;
}

FS_DEVICE const float *fs_attn_q(const struct fs_attn_run &r, const struct fs_attn_place &p, int row)
{
	return r.a.q + row / r.group * r.a.q_stride +
	       (int64_t)(p.kv_head * r.group + row % r.group) * r.a.head_dim;
}

/* Where a row's result goes, and the factor that it gets on its way: sum > 0 divides it out. */
FS_DEVICE float *fs_attn_out(
        const struct fs_attn_run &r, const struct fs_attn_place &p, int row, float sum, float *factor)
{
	if (r.splits > 1) {
		int64_t all = (int64_t)r.a.kv_heads * r.rows, at = (int64_t)p.kv_head * r.rows + row;

		*factor = 1.0f;
		return r.part + (p.split * all + at) * r.a.head_dim;
	}
	*factor = sum == 0.0f ? 0.0f : 1.0f / sum;
	return r.a.out + row / r.group * r.a.out_stride +
	       (int64_t)(p.kv_head * r.group + row % r.group) * r.a.head_dim;
}

/* Of a split row, by one thread. */
FS_DEVICE void fs_attn_note(
        const struct fs_attn_run &r, const struct fs_attn_place &p, int row, float max, float sum)
{
	if (r.splits > 1)
		r.part_ml[((int64_t)p.split * r.a.kv_heads + p.kv_head) * r.rows + row] =
		        make_float2(max, sum);
}

/* 2^x to 2 units in the last place of f32, by one instruction. */
FS_DEVICE float fs_attn_exp2(float x)
{
#ifdef FS_SIMT
	return exp2f(x);
#else
	float y;

	asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
	return y;
#endif
}

/* What scores are taken relative to: nothing seen yet leaves every weight at 2^-inf = 0. */
FS_DEVICE float fs_attn_base(float max)
{
	return max == -INFINITY ? 0.0f : max;
}

FS_DEVICE uint32_t fs_attn_narrow2(float lo, float hi)
{
	return fs_pack_h2(fs_hold_f16(lo), fs_hold_f16(hi));
}

/* Four elements of k or v as f32; wide: the address allows one load. */
FS_DEVICE float4 fs_attn_load4(const void *base, enum fs_dtype type, int64_t at, bool wide)
{
	if (type == FS_F32) {
		const float *p = (const float *)base + at;

		if (wide) {
			uint4 u = fs_ld16(p);

			return make_float4(__uint_as_float(u.x), __uint_as_float(u.y), __uint_as_float(u.z),
			        __uint_as_float(u.w));
		}
		return make_float4(p[0], p[1], p[2], p[3]);
	}
	const uint16_t *h = (const uint16_t *)base + at;

	if (wide) {
		uint2 u = fs_ld8(h);
		float2 a = fs_unpack_h2(u.x), b = fs_unpack_h2(u.y);

		return make_float4(a.x, a.y, b.x, b.y);
	}
	return make_float4(fs_h2f(h[0]), fs_h2f(h[1]), fs_h2f(h[2]), fs_h2f(h[3]));
}

/*
 * One step of the running softmax on a fragment of scores, for the two rows (g and g + 8) of this lane. s:
 * [N] fragments of 16 x 8; keys k0 + 8i + 2t and the next. Scores become weights; returns in shrink what the
 * output so far is multiplied by. The quad of four lanes that shares a row agrees on the maximum; l stays
 * each lane's own part of the sum. ragged: one of the lane's rows does not see all of these keys.
 */
template <int N>
FS_DEVICE void fs_attn_soften(
        float (&s)[N][4], int k0, bool ragged, const int seen[2], float m[2], float l[2], float shrink[2])
{
	int k = k0 + (int)threadIdx.x % 4 * 2;

#pragma unroll
	for (int h = 0; h < 2; h++) {
		float max = m[h], base;

#pragma unroll
		for (int i = 0; i < N; i++) {
			if (ragged && k + 8 * i >= seen[h])
				s[i][2 * h] = -INFINITY;
			if (ragged && k + 8 * i + 1 >= seen[h])
				s[i][2 * h + 1] = -INFINITY;
			max = fmaxf(max, fmaxf(s[i][2 * h], s[i][2 * h + 1]));
		}
		max = fmaxf(max, __shfl_xor_sync(FS_FULL, max, 1));
		max = fmaxf(max, __shfl_xor_sync(FS_FULL, max, 2));
		base = fs_attn_base(max);
		shrink[h] = fs_attn_exp2(m[h] - base);
		m[h] = max;
		l[h] *= shrink[h];
#pragma unroll
		for (int i = 0; i < N; i++) {
			s[i][2 * h] = fs_attn_exp2(s[i][2 * h] - base);
			s[i][2 * h + 1] = fs_attn_exp2(s[i][2 * h + 1] - base);
			l[h] += s[i][2 * h] + s[i][2 * h + 1];
		}
	}
}

/* Two fragments of weights (16 keys) as the left side of a product. */
FS_DEVICE void fs_attn_weights(const float lo[4], const float hi[4], uint32_t a[4])
{
	a[0] = fs_pack_h2(lo[0], lo[1]);
	a[1] = fs_pack_h2(lo[2], lo[3]);
	a[2] = fs_pack_h2(hi[0], hi[1]);
	a[3] = fs_pack_h2(hi[2], hi[3]);
}

FS_DEVICE float fs_attn_quad_sum(float v)
{
	v += __shfl_xor_sync(FS_FULL, v, 1);
	return v + __shfl_xor_sync(FS_FULL, v, 2);
}

#endif
