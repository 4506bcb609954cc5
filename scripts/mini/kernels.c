// The parts of a training step that torch does in many passes over memory, each in one: attention over packed
// conversations, norms with the residual sum before them, activations. Matrices are bf16 (as u16), sums f32.
// One thread; the caller owns every buffer. kernels.py builds and calls it.
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef uint16_t bf16;
typedef float vec __attribute__((vector_size(64), aligned(4)));
enum { W = 32, HALF = 16, QB = 8 }; // width of a head, of a vector, queries at a time

static inline float up(bf16 x)
{
	union {
		uint32_t u;
		float f;
	} v = {(uint32_t)x << 16};
	return v.f;
}

static inline bf16 down(float x)
{
	union {
		float f;
		uint32_t u;
	} v = {x};
	return (bf16)((v.u + 0x7fff + (v.u >> 16 & 1)) >> 16);
}

// e to the x, within 2e-7 of it, for x of -80 to 80: in a form that the compiler turns into vector
// instructions.
static inline float power(float x)
{
	union {
		int32_t i;
		float f;
	} two;
	x = x < -80 ? -80 : x;
	float n = __builtin_rintf(x * 1.44269504f), r = x - n * .693359375f + n * 2.12194440e-4f;
	two.i = ((int32_t)n + 127) << 23;
	float p =
	        ((((1.9875691500e-4f * r + 1.3981999507e-3f) * r + 8.3334519073e-3f) * r + 4.1665795894e-2f) *
	                        r +
	                1.6666665459e-1f) *
	                r +
	        .5f;
	return (p * r * r + r + 1) * two.f;
}

// Kept away from infinity, which the fast division does not know.
static inline float sigmoid(float x)
{
	return 1 / (1 + power(x > -80 ? -x : 80));
}

static inline vec load(const float *p)
{
	return *(const vec *)p;
}

static inline void store(float *p, vec v)
{
	*(vec *)p = v;
}

// x (+ add) -> sum, and its RMS norm times w.
void rms_forward(long n, long d, const float *x, const bf16 *add, const float *w, float eps, float *sum,
        bf16 *h, float *inv)
{
	for (long i = 0; i < n; i++) {
		const float *xi = x + i * d;
		float *si = sum + i * d, s = 0;
		if (add)
			for (long j = 0; j < d; j++)
				si[j] = xi[j] + up(add[i * d + j]);
		else if (si != xi)
			memcpy(si, xi, d * sizeof *si);
		for (long j = 0; j < d; j++)
			s += si[j] * si[j];
		float r = inv[i] = 1 / sqrtf(s / d + eps);
		for (long j = 0; j < d; j++)
			h[i * d + j] = down(si[j] * r * w[j]);
	}
}

// dx += gradient through the norm; dw += that of its weights; low: dx as bf16.
void rms_backward(long n, long d, const float *x, const float *w, const float *inv, const bf16 *dh, float *dx,
        float *dw, bf16 *low)
{
	for (long i = 0; i < n; i++) {
		const float *xi = x + i * d, r = inv[i];
		const bf16 *g = dh + i * d;
		float *o = dx + i * d, dot = 0;
		for (long j = 0; j < d; j++) {
			float gj = up(g[j]);
			dot += gj * w[j] * xi[j];
			dw[j] += gj * xi[j] * r;
		}
		float c = dot * r * r * r / d;
		for (long j = 0; j < d; j++) {
			o[j] += up(g[j]) * w[j] * r - xi[j] * c;
			low[i * d + j] = down(o[j]);
		}
	}
}

void ln_forward(long n, long d, const float *x, const bf16 *add, const float *w, const float *b, float eps,
        float *sum, bf16 *h, float *inv, float *mean)
{
	for (long i = 0; i < n; i++) {
		const float *xi = x + i * d;
		float *si = sum + i * d, s = 0, q = 0;
		if (add)
			for (long j = 0; j < d; j++)
				si[j] = xi[j] + up(add[i * d + j]);
		else if (si != xi)
			memcpy(si, xi, d * sizeof *si);
		for (long j = 0; j < d; j++)
			s += si[j];
		float m = mean[i] = s / d;
		for (long j = 0; j < d; j++)
			q += (si[j] - m) * (si[j] - m);
		float r = inv[i] = 1 / sqrtf(q / d + eps);
		for (long j = 0; j < d; j++)
			h[i * d + j] = down((si[j] - m) * r * w[j] + b[j]);
	}
}

void ln_backward(long n, long d, const float *x, const float *w, const float *inv, const float *mean,
        const bf16 *dh, float *dx, float *dw, float *db, bf16 *low)
{
	for (long i = 0; i < n; i++) {
		const float *xi = x + i * d, r = inv[i], m = mean[i];
		const bf16 *g = dh + i * d;
		float *o = dx + i * d, dot = 0, all = 0;
		for (long j = 0; j < d; j++) {
			float gj = up(g[j]), y = (xi[j] - m) * r;
			all += gj * w[j];
			dot += gj * w[j] * y;
			dw[j] += gj * y;
			db[j] += gj;
		}
		all /= d, dot /= d;
		for (long j = 0; j < d; j++) {
			o[j] += r * (up(g[j]) * w[j] - all - (xi[j] - m) * r * dot);
			low[i * d + j] = down(o[j]);
		}
	}
}

// gu [n, 2f]: gate, up -> silu(gate) * up.
void swiglu_forward(long n, long f, const bf16 *gu, bf16 *a)
{
	for (long i = 0; i < n; i++, gu += 2 * f, a += f)
		for (long j = 0; j < f; j++) {
			float g = up(gu[j]);
			a[j] = down(g * sigmoid(g) * up(gu[f + j]));
		}
}

void swiglu_backward(long n, long f, const bf16 *gu, const bf16 *da, bf16 *dgu)
{
	for (long i = 0; i < n; i++, gu += 2 * f, dgu += 2 * f, da += f)
		for (long j = 0; j < f; j++) {
			float g = up(gu[j]), s = sigmoid(g), d = up(da[j]);
			dgu[j] = down(d * up(gu[f + j]) * s * (1 + g * (1 - s)));
			dgu[f + j] = down(d * g * s);
		}
}

void quick_gelu_forward(long n, const bf16 *u, bf16 *a)
{
	for (long j = 0; j < n; j++) {
		float x = up(u[j]);
		a[j] = down(x * sigmoid(1.702f * x));
	}
}

void quick_gelu_backward(long n, const bf16 *u, bf16 *da)
{
	for (long j = 0; j < n; j++) {
		float x = up(u[j]), s = sigmoid(1.702f * x);
		da[j] = down(up(da[j]) * s * (1 + 1.702f * x * (1 - s)));
	}
}

void column_sum(long n, long m, const bf16 *x, float *sum)
{
	for (long i = 0; i < n; i++)
		for (long j = 0; j < m; j++)
			sum[j] += up(x[i * m + j]);
}

// out[q][j] = a[q] . bt[:, j] for QB rows and the keys of a range, in steps of W.
static inline void scores(const float *a, const float *bt, long stride, long keys, float *out, long row)
{
	for (long j = 0; j < keys; j += W) {
		vec s[QB][2];
		for (int q = 0; q < QB; q++)
			s[q][0] = s[q][1] = (vec){0};
		for (int d = 0; d < W; d++) {
			vec lo = load(bt + d * stride + j), hi = load(bt + d * stride + j + HALF);
#pragma GCC unroll 8
			for (int q = 0; q < QB; q++) {
				s[q][0] += a[q * W + d] * lo;
				s[q][1] += a[q * W + d] * hi;
			}
		}
#pragma GCC unroll 8
		for (int q = 0; q < QB; q++) {
			store(out + q * row + j, s[q][0]);
			store(out + q * row + j + HALF, s[q][1]);
		}
	}
}

// o[q] += sum over j of p[q][j] b[j].
static inline void gather(const float *p, long row, const float *b, long keys, float *o)
{
	vec s[QB][2];
#pragma GCC unroll 8
	for (int q = 0; q < QB; q++)
		s[q][0] = load(o + q * W), s[q][1] = load(o + q * W + HALF);
	for (long j = 0; j < keys; j++) {
		vec lo = load(b + j * W), hi = load(b + j * W + HALF);
#pragma GCC unroll 8
		for (int q = 0; q < QB; q++) {
			s[q][0] += p[q * row + j] * lo;
			s[q][1] += p[q * row + j] * hi;
		}
	}
#pragma GCC unroll 8
	for (int q = 0; q < QB; q++)
		store(o + q * W, s[q][0]), store(o + q * W + HALF, s[q][1]);
}

// b[j] += sum over the n queries of p[q][j] a[q], for all keys of a range.
static inline void scatter(const float *p, long row, const float *a, long n, long keys, float *b)
{
	for (long j = 0; j < keys; j += QB) {
		vec s[QB][2];
		long m = keys - j < QB ? keys - j : QB;
		for (int k = 0; k < QB; k++)
			s[k][0] = s[k][1] = (vec){0};
		for (long q = 0; q < n; q++) {
			vec lo = load(a + q * W), hi = load(a + q * W + HALF);
#pragma GCC unroll 8
			for (int k = 0; k < QB; k++) {
				s[k][0] += p[q * row + j + k] * lo;
				s[k][1] += p[q * row + j + k] * hi;
			}
		}
		for (long k = 0; k < m; k++) {
			store(b + (j + k) * W, load(b + (j + k) * W) + s[k][0]);
			store(b + (j + k) * W + HALF, load(b + (j + k) * W + HALF) + s[k][1]);
		}
	}
}

// A head's columns of a packed projection, turned by the token's angles, times scale.
static void fetch(long n, const bf16 *x, long stride, const float *bias, const float *cs, const float *sn,
        float scale, float *to)
{
	for (long i = 0; i < n; i++, x += stride, to += W)
		for (int j = 0; j < HALF; j++) {
			float a = up(x[j]) + bias[j], b = up(x[j + HALF]) + bias[j + HALF];
			float c = cs ? cs[i * HALF + j] : 1, s = cs ? sn[i * HALF + j] : 0;
			to[j] = (a * c - b * s) * scale;
			to[j + HALF] = (b * c + a * s) * scale;
		}
}

static void put(long n, const float *x, const float *cs, const float *sn, float scale, bf16 *to, long stride)
{
	for (long i = 0; i < n; i++, x += W, to += stride)
		for (int j = 0; j < HALF; j++) {
			float a = x[j], b = x[j + HALF], c = cs ? cs[i * HALF + j] : 1,
			      s = cs ? sn[i * HALF + j] : 0;
			to[j] = down((a * c + b * s) * scale);
			to[j + HALF] = down((b * c - a * s) * scale);
		}
}

static void transpose(long n, const float *x, float *t, long stride)
{
	for (long i = 0; i < n; i += HALF)
		for (int d = 0; d < W; d++)
			for (int k = 0; k < HALF; k++)
				t[d * stride + i + k] = x[(i + k) * W + d];
}

static long whole(long x)
{
	return (x + W - 1) / W * W;
}

static float *room(long floats)
{
	return aligned_alloc(64, (floats * 4 + 63) / 64 * 64);
}

// A segment is four numbers: first token, past its last, first and past the last token of the prefix that it
// sees as well. qkv [n, (heads + 2 kv) * W]; kept: the shares, for the way back, a block of rows for each
// head of each segment. n and the buffers' ends: reads run over by up to W rows, so the scratch is longer.
int attend_forward(long n, int heads, int kv, int causal, long segs, const int32_t *seg, const bf16 *qkv,
        const float *bias, const float *cs, const float *sn, float *kept, bf16 *out)
{
	long stride = (heads + 2 * kv) * W, pad = n + 2 * W, group = heads / kv;
	float *q = room(pad * W), *k = room(pad * W), *kt = room(pad * W), *v = room(pad * W);
	if (!q || !k || !kt || !v)
		return -1;
	memset(q + n * W, 0, 2 * W * W * 4);
	memset(k + n * W, 0, 2 * W * W * 4);
	memset(out, 0, n * heads * W * 2);
	for (int h = 0; h < heads; h++) {
		long at = h / group;
		if (h % group == 0) {
			fetch(n, qkv + (heads + at) * W, stride, bias + (heads + at) * W, cs, sn, 1, k);
			fetch(n, qkv + (heads + kv + at) * W, stride, bias + (heads + kv + at) * W, NULL,
			        NULL, 1, v);
			transpose(n + W, k, kt, pad);
		}
		fetch(n, qkv + h * W, stride, bias + h * W, cs, sn, 1 / sqrtf(W), q);
		for (long s = 0; s < segs; s++) {
			long a = seg[4 * s], b = seg[4 * s + 1], p0 = seg[4 * s + 2], p = seg[4 * s + 3] - p0;
			long pw = whole(p), row = pw + whole(b - a);
			for (long i = a; i < b; i += QB, kept += QB * row) {
				float o[QB * W] = {0}, sum[QB];
				long own = causal && i + QB < b ? i + QB - a : b - a;
				scores(q + i * W, kt + p0, pad, p, kept, row);
				scores(q + i * W, kt + a, pad, own, kept + pw, row);
				for (int e = 0; e < QB; e++) {
					float *x = kept + e * row, top = -1e30f, t = 0;
					long seen = causal ? i + e - a + 1 : b - a;
					if (seen > b - a)
						seen = b - a;
					for (long j = 0; j < p; j++)
						top = x[j] > top ? x[j] : top;
					for (long j = 0; j < seen; j++)
						top = x[pw + j] > top ? x[pw + j] : top;
					for (long j = 0; j < p; j++)
						t += x[j] = power(x[j] - top);
					for (long j = 0; j < seen; j++)
						t += x[pw + j] = power(x[pw + j] - top);
					t = i + e < b ? 1 / t : 0;
					for (long j = 0; j < p; j++)
						x[j] *= t;
					for (long j = 0; j < seen; j++)
						x[pw + j] *= t;
					memset(x + p, 0, (pw - p) * 4);
					memset(x + pw + seen, 0, (row - pw - seen) * 4);
					sum[e] = t;
				}
				(void)sum;
				gather(kept, row, v + p0 * W, p, o);
				gather(kept + pw, row, v + a * W, own, o);
				for (long e = 0; e < QB && i + e < b; e++)
					for (int j = 0; j < W; j++)
						out[((i + e) * heads + h) * W + j] = down(o[e * W + j]);
			}
		}
	}
	free(q), free(k), free(kt), free(v);
	return 0;
}

int attend_backward(long n, int heads, int kv, int causal, long segs, const int32_t *seg, const bf16 *qkv,
        const float *bias, const float *cs, const float *sn, const float *kept, const bf16 *dout, bf16 *dqkv)
{
	long stride = (heads + 2 * kv) * W, pad = n + 2 * W, group = heads / kv, most = 0;
	for (long s = 0; s < segs; s++) {
		long c = seg[4 * s + 1] - seg[4 * s],
		     size = (c + QB) * (whole(seg[4 * s + 3] - seg[4 * s + 2]) + whole(c));
		most = size > most ? size : most;
	}
	float *q = room(pad * W), *k = room(pad * W), *v = room(pad * W), *vt = room(pad * W),
	      *g = room(pad * W);
	float *dq = room(pad * W), *dk = room(pad * W), *dv = room(pad * W), *ds = room(most), zero[W] = {0};
	if (!q || !k || !v || !vt || !g || !dq || !dk || !dv || !ds)
		return -1;
	memset(v + n * W, 0, 2 * W * W * 4);
	memset(g + n * W, 0, 2 * W * W * 4);
	for (int h = 0; h < heads; h++) {
		long at = h / group;
		if (h % group == 0) {
			fetch(n, qkv + (heads + at) * W, stride, bias + (heads + at) * W, cs, sn, 1, k);
			fetch(n, qkv + (heads + kv + at) * W, stride, bias + (heads + kv + at) * W, NULL,
			        NULL, 1, v);
			transpose(n + W, v, vt, pad);
			memset(dk, 0, pad * W * 4);
			memset(dv, 0, pad * W * 4);
		}
		fetch(n, qkv + h * W, stride, bias + h * W, cs, sn, 1 / sqrtf(W), q);
		fetch(n, dout + h * W, heads * W, zero, NULL, NULL, 1, g);
		memset(dq, 0, pad * W * 4);
		for (long s = 0; s < segs; s++) {
			long a = seg[4 * s], b = seg[4 * s + 1], p0 = seg[4 * s + 2], p = seg[4 * s + 3] - p0;
			long pw = whole(p), row = pw + whole(b - a);
			for (long i = a; i < b; i += QB) {
				float *d = ds + (i - a) * row, o[QB * W] = {0};
				const float *x = kept + (i - a) * row;
				long own = causal && i + QB < b ? i + QB - a : b - a;
				scores(g + i * W, vt + p0, pad, p, d, row);
				scores(g + i * W, vt + a, pad, own, d + pw, row);
				for (int e = 0; e < QB; e++) {
					float *y = d + e * row, dot = 0;
					const float *z = x + e * row;
					for (long j = 0; j < p; j++)
						dot += y[j] * z[j];
					for (long j = 0; j < own; j++)
						dot += y[pw + j] * z[pw + j];
					for (long j = 0; j < p; j++)
						y[j] = z[j] * (y[j] - dot);
					for (long j = 0; j < own; j++)
						y[pw + j] = z[pw + j] * (y[pw + j] - dot);
					memset(y + p, 0, (pw - p) * 4);
					memset(y + pw + own, 0, (row - pw - own) * 4);
				}
				gather(d, row, k + p0 * W, p, o);
				gather(d + pw, row, k + a * W, own, o);
				for (long e = 0; e < QB && i + e < b; e++)
					memcpy(dq + (i + e) * W, o + e * W, W * 4);
			}
			scatter(ds, row, q + a * W, b - a, p, dk + p0 * W);
			scatter(ds + pw, row, q + a * W, b - a, b - a, dk + a * W);
			scatter(kept, row, g + a * W, b - a, p, dv + p0 * W);
			scatter(kept + pw, row, g + a * W, b - a, b - a, dv + a * W);
			kept += (b - a + QB - 1) / QB * QB * row;
		}
		put(n, dq, cs, sn, 1 / sqrtf(W), dqkv + h * W, stride);
		if (h % group == group - 1) {
			put(n, dk, cs, sn, 1, dqkv + (heads + at) * W, stride);
			put(n, dv, NULL, NULL, 1, dqkv + (heads + kv + at) * W, stride);
		}
	}
	free(q), free(k), free(v), free(vt), free(g), free(dq), free(dk), free(dv), free(ds);
	return 0;
}
