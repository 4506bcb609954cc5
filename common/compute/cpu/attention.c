/*
 * attention.c: softmax(q·kᵀ·scale)·v for one level, by blocks of keys with a running maximum and sum (Milakov
 * and Gimelshein 2018; Dao et al. 2022), so memory does not grow with the number of keys. A task is a block
 * of queries of all heads that share one kv head: keys and values are converted once for all of them. Few
 * rows (decoding) take dot products along each key instead of tiles. Pure functions, any thread.
 */
#include "common/compute/cpu/kernels.h"
#include "common/compute/cpu/vec.h"

#define KEYS FS_ATTN_KEYS
#define PAD 16     /* floats: widths of tiles are padded to whole registers of any level */
#define FEW_ROWS 8 /* up to here the products are dots */
#if FS_LEVEL == 2
#define TILE_V 4 /* registers across: 6 x 4 sums of 32 registers */
#else
#define TILE_V 2 /* 6 x 2 sums of 16 registers */
#endif

struct work {
	const struct fs_attn *a;
	int kv_head, h0; /* first query head */
	int group;       /* query heads of this task */
	int hd, hdp;     /* head_dim, and padded */
	int rows;
	int64_t q0;
	float *q;   /* [rows][hdp], scaled */
	float *out; /* [rows][hdp] */
	float *kt;  /* [hd][KEYS] (tiles) or [KEYS][hdp] (dots) */
	float *v;   /* [KEYS][hdp], zeros past hd */
	float *p;   /* [rows][KEYS] scores, then weights */
	float *m;   /* [rows] running maximum */
	float *l;   /* [rows] running sum */
};

/* c[mr][nv·VW] (+)= a[mr][k]·b[k][…]; mr and nv are constants where it is inlined. */
FS_INLINE void tile(
        int mr, int nv, int k, const float *a, int lda, const float *b, int ldb, float *c, int ldc, int acc)
{
	vf s[6][TILE_V];

	FS_UNROLL
	for (int i = 0; i < mr; i++)
		FS_UNROLL
	for (int j = 0; j < nv; j++)
		s[i][j] = acc ? v_load(c + i * ldc + j * VW) : v_set(0.0f);
	for (int l = 0; l < k; l++) {
		vf w[TILE_V];

		FS_UNROLL
		for (int j = 0; j < nv; j++)
			w[j] = v_load(b + l * ldb + j * VW);
		FS_UNROLL
		for (int i = 0; i < mr; i++) {
			vf x = v_set(a[i * lda + l]);

			FS_UNROLL
			for (int j = 0; j < nv; j++)
				s[i][j] = v_fma(x, w[j], s[i][j]);
		}
	}
	FS_UNROLL
	for (int i = 0; i < mr; i++)
		FS_UNROLL
	for (int j = 0; j < nv; j++)
		v_store(c + i * ldc + j * VW, s[i][j]);
}

FS_INLINE void tile_rows(
        int nv, int m, int k, const float *a, int lda, const float *b, int ldb, float *c, int ldc, int acc)
{
	for (; m >= 6; m -= 6, a += 6 * lda, c += 6 * ldc)
		tile(6, nv, k, a, lda, b, ldb, c, ldc, acc);
	for (; m >= 2; m -= 2, a += 2 * lda, c += 2 * ldc)
		tile(2, nv, k, a, lda, b, ldb, c, ldc, acc);
	if (m)
		tile(1, nv, k, a, lda, b, ldb, c, ldc, acc);
}

/* c[m][n] (+)= a[m][k]·b[k][n], n a multiple of PAD */
static void product(
        int m, int n, int k, const float *a, int lda, const float *b, int ldb, float *c, int ldc, int acc)
{
	int j = 0;

	for (; j + TILE_V * VW <= n; j += TILE_V * VW)
		tile_rows(TILE_V, m, k, a, lda, b + j, ldb, c + j, ldc, acc);
	for (; j < n; j += VW)
		tile_rows(1, m, k, a, lda, b + j, ldb, c + j, ldc, acc);
}

static const void *kv_row(const struct work *w, const void *base, int64_t key)
{
	int64_t at = key * w->a->kv_stride + (int64_t)w->kv_head * w->hd;

	return w->a->kv_type == FS_F16 ? (const void *)((const uint16_t *)base + at)
	                               : (const float *)base + at;
}

/* One row of keys or values as f32, padded with zeros. */
static void read_row(const struct work *w, const void *base, int64_t key, float *dst)
{
	const void *src = kv_row(w, base, key);
	int i = 0;

	if (w->a->kv_type == FS_F16) {
		for (; i + VW <= w->hd; i += VW)
			v_store(dst + i, v_load_f16((const uint16_t *)src + i));
		for (; i < w->hd; i++)
			dst[i] = fs_f16_to_f32(((const uint16_t *)src)[i]);
	} else {
		memcpy(dst, src, (size_t)w->hd * sizeof(*dst));
		i = w->hd;
	}
	for (; i < w->hdp; i++)
		dst[i] = 0.0f;
}

static void read_keys_transposed(const struct work *w, int64_t k0, int n)
{
	float row[256 + PAD];

	for (int j = 0; j < n; j++) {
		read_row(w, w->a->k, k0 + j, row);
		for (int i = 0; i < w->hd; i++)
			w->kt[i * KEYS + j] = row[i];
	}
	for (int j = n; j < KEYS; j++)
		for (int i = 0; i < w->hd; i++)
			w->kt[i * KEYS + j] = 0.0f;
}

FS_INLINE float dot(const float *a, const float *b, int n)
{
	vf s = v_set(0.0f);

	for (int i = 0; i < n; i += VW)
		s = v_fma(v_load(a + i), v_load(b + i), s);
	return v_sum(s);
}

static void scores_few(const struct work *w, int64_t k0, int n)
{
	float row[256 + PAD];

	for (int j = 0; j < n; j++) {
		read_row(w, w->a->k, k0 + j, row);
		for (int r = 0; r < w->rows; r++)
			w->p[r * KEYS + j] = dot(w->q + r * w->hdp, row, w->hdp);
	}
}

/* Scores of a row become weights; what is there of the output shrinks to the new maximum. n: keys that this
 * row sees, of KEYS. */
static void soften(const struct work *w, int r, int n)
{
	float *p = w->p + r * KEYS, *o = w->out + r * w->hdp;
	float max, shrink, base;
	vf m = v_set(-INFINITY), sum = v_set(0.0f);
	int i = 0;

	for (i = n; i < KEYS; i++)
		p[i] = -INFINITY;
	for (i = 0; i < KEYS; i += VW)
		m = v_max(m, v_load(p + i));
	max = fmaxf(w->m[r], v_hmax(m));
	base = max == -INFINITY ? 0.0f : max; /* nothing seen yet: every weight below is e^-inf = 0 */
	shrink = v_hmax(v_exp(v_set(w->m[r] - base)));
	for (i = 0; i < KEYS; i += VW) {
		vf e = v_exp(v_sub(v_load(p + i), v_set(base)));

		v_store(p + i, e);
		sum = v_add(sum, e);
	}
	w->l[r] = w->l[r] * shrink + v_sum(sum);
	w->m[r] = max;
	if (shrink != 1.0f)
		for (i = 0; i < w->hdp; i += VW)
			v_store(o + i, v_mul(v_load(o + i), v_set(shrink)));
}

/* Keys that row r sees in all. */
static int64_t sees(const struct work *w, int r)
{
	return w->a->causal ? w->a->q_first + w->q0 + r / w->group + 1 : w->a->n_kv;
}

static void block(const struct work *w, int64_t k0, int n)
{
	if (w->rows <= FEW_ROWS) {
		scores_few(w, k0, n);
	} else {
		read_keys_transposed(w, k0, n);
		product(w->rows, KEYS, w->hd, w->q, w->hdp, w->kt, KEYS, w->p, KEYS, 0);
	}
	for (int r = 0; r < w->rows; r++) {
		int64_t seen = sees(w, r) - k0;

		soften(w, r, (int)FS_MAX(0, FS_MIN(seen, n)));
	}
	for (int j = 0; j < n; j++)
		read_row(w, w->a->v, k0 + j, w->v + j * w->hdp);
	product(w->rows, w->hdp, n, w->p, KEYS, w->v, w->hdp, w->out, w->hdp, 1);
}

/* Row r is query q0 + r / group, head h0 + r % group. */
static void load_queries(const struct work *w)
{
	for (int r = 0; r < w->rows; r++) {
		const float *src = w->a->q + (w->q0 + r / w->group) * w->a->q_stride +
		                   (int64_t)(w->h0 + r % w->group) * w->hd;
		float *dst = w->q + r * w->hdp;

		memset(w->out + r * w->hdp, 0, (size_t)w->hdp * sizeof(float));
		w->m[r] = -INFINITY;
		w->l[r] = 0.0f;
		for (int i = 0; i < w->hd; i++)
			dst[i] = src[i] * w->a->scale;
		for (int i = w->hd; i < w->hdp; i++)
			dst[i] = 0.0f;
	}
}

static void store_rows(const struct work *w)
{
	for (int r = 0; r < w->rows; r++) {
		float *dst = w->a->out + (w->q0 + r / w->group) * w->a->out_stride +
		             (int64_t)(w->h0 + r % w->group) * w->hd;
		const float *src = w->out + r * w->hdp;
		float inv = w->l[r] == 0.0f ? 0.0f : 1.0f / w->l[r];

		for (int i = 0; i < w->hd; i++)
			dst[i] = src[i] * inv;
	}
}

void FS_LV(attention)(const struct fs_attn *a, int h0, int h1, int64_t q0, int64_t q1, void *scratch)
{
	struct work w = {.a = a, .h0 = h0, .group = h1 - h0, .q0 = q0, .hd = a->head_dim};
	int64_t n_kv = a->causal ? a->q_first + q1 : a->n_kv;

	w.kv_head = h0 / (a->heads / a->kv_heads);
	w.rows = (int)(q1 - q0) * w.group;
	w.hdp = (w.hd + PAD - 1) / PAD * PAD;
	w.q = scratch;
	w.out = w.q + FS_ATTN_ROWS * w.hdp;
	w.kt = w.out + FS_ATTN_ROWS * w.hdp;
	w.v = w.kt + KEYS * w.hdp;
	w.p = w.v + KEYS * w.hdp;
	w.m = w.p + FS_ATTN_ROWS * KEYS;
	w.l = w.m + FS_ATTN_ROWS;
	load_queries(&w);
	for (int64_t k0 = 0; k0 < n_kv; k0 += KEYS)
		block(&w, k0, (int)FS_MIN(KEYS, n_kv - k0));
	store_rows(&w);
}

#if FS_LEVEL == 0
size_t fs_attn_scratch_bytes(int head_dim)
{
	size_t hdp = ((size_t)head_dim + PAD - 1) / PAD * PAD;

	return ((2 * FS_ATTN_ROWS + 2 * KEYS) * hdp + FS_ATTN_ROWS * KEYS + 2 * FS_ATTN_ROWS) * sizeof(float);
}
#endif
