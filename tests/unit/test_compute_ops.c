/*
 * Everything but the products, at every instruction-set level: against formulas in double, known values of
 * the activations, and a naive attention; at odd sizes, in place and with strides. And the device's own
 * rules: names, sticky errors, the pool.
 */
#include "compute_util.h"

#include <stdatomic.h>

static const int64_t sizes[] = {1, 3, 7, 8, 15, 16, 17, 31, 33, 64, 100, 257, 1000};

static void for_levels(void (*fn)(struct fs_dev *d))
{
	for (int level = 0; level <= (int)best_level(); level++) {
		struct fs_dev *d = device((enum fs_cpu_level)level, FS_PRECISION_AUTO, false);

		fn(d);
		no_error(d);
		fs_dev_close(d);
	}
}

/* ---- norms ---- */

static void check_norm(struct fs_dev *d, bool rms, int64_t n, int64_t dim, bool bias, bool in_place)
{
	float *x = randoms(n * dim), *w = randoms(dim), *b = randoms(dim);
	float *y = in_place ? need((size_t)(n * dim) * sizeof(*y)) : randoms(n * dim);

	if (in_place)
		memcpy(y, x, (size_t)(n * dim) * sizeof(*y));
	if (rms)
		fs_op_rms_norm(d, in_place ? y : x, w, y, n, dim, 1e-5f);
	else
		fs_op_layer_norm(d, in_place ? y : x, w, bias ? b : NULL, y, n, dim, 1e-5f);
	for (int64_t r = 0; r < n; r++) {
		double mean = 0, var = 0;

		for (int64_t i = 0; i < dim && !rms; i++)
			mean += (double)x[r * dim + i] / (double)dim;
		for (int64_t i = 0; i < dim; i++)
			var += pow((double)x[r * dim + i] - mean, 2) / (double)dim;
		for (int64_t i = 0; i < dim; i++) {
			double v = ((double)x[r * dim + i] - mean) / sqrt(var + 1e-5) * (double)w[i];

			near(y[r * dim + i], v + (bias && !rms ? (double)b[i] : 0), 3e-5,
			        rms ? "rms" : "layer", i);
		}
	}
	free(x);
	free(w);
	free(b);
	free(y);
}

static void norms(struct fs_dev *d)
{
	for (size_t i = 0; i < FS_ARRAY_LEN(sizes); i++) {
		if (sizes[i] > 1) {
			check_norm(d, false, 3, sizes[i], true, false);
			check_norm(d, false, 70, sizes[i], false, true);
		}
		check_norm(d, true, 3, sizes[i], false, false);
		check_norm(d, true, 70, sizes[i], false, true);
	}
}

static void test_norms(void **state)
{
	for_levels(norms);
}

/* ---- activations ---- */

static double act_of(enum fs_act act, double x)
{
	switch (act) {
	case FS_GELU_ERF:
		return 0.5 * x * erfc(-x / sqrt(2));
	case FS_GELU_TANH:
		return 0.5 * x * (1 + tanh(sqrt(2 / acos(-1)) * (x + 0.044715 * x * x * x)));
	case FS_GELU_QUICK:
		return x / (1 + exp(-1.702 * x));
	default:
		return x / (1 + exp(-x));
	}
}

static void acts(struct fs_dev *d)
{
	for (int act = FS_GELU_ERF; act <= FS_SILU; act++) {
		for (size_t s = 0; s < FS_ARRAY_LEN(sizes); s++) {
			int64_t n = sizes[s];
			float *x = randoms(n + 1), *up = randoms(n), *y = need((size_t)(n + 1) * sizeof(*y));

			for (int64_t i = 0; i < n; i++)
				x[i] *= 6;
			memcpy(y, x, (size_t)(n + 1) * sizeof(*y));
			fs_op_act(d, (enum fs_act)act, y, n);
			for (int64_t i = 0; i < n; i++)
				near(y[i], act_of((enum fs_act)act, (double)x[i]),
				        4e-7 * (1 + fabs((double)x[i])), "act", i);
			assert_true(y[n] == x[n]);
			memcpy(y, x, (size_t)n * sizeof(*y));
			fs_op_gate(d, (enum fs_act)act, y, up, y, n);
			for (int64_t i = 0; i < n; i++)
				near(y[i], act_of((enum fs_act)act, (double)x[i]) * (double)up[i],
				        8e-7 * (1 + fabs((double)x[i])), "gate", i);
			free(x);
			free(up);
			free(y);
		}
	}
}

static void test_acts(void **state)
{
	for_levels(acts);
}

/* Values of the functions' published definitions at 1 and -1 (WolframAlpha's digits), and the ends of the
 * range. */
static void act_values(struct fs_dev *d)
{
	static const struct {
		enum fs_act act;
		double at_1, at_minus_1;
	} known[] = {
	        {FS_GELU_ERF, 0.8413447460685429, -0.15865525393145707},
	        {FS_GELU_TANH, 0.8411919906082768, -0.15880800939172324},
	        {FS_GELU_QUICK, 0.8457957659328212, -0.15420423406717886},
	        {FS_SILU, 0.7310585786300049, -0.2689414213699951},
	};

	for (size_t i = 0; i < FS_ARRAY_LEN(known); i++) {
		float x[17] = {
		        1, -1, 0, 1e30f, -1e30f, 88.0f, -88.0f, 1e-30f, -120.0f, 300.0f, NAN, INFINITY};

		fs_op_act(d, known[i].act, x, 17);
		near(x[0], known[i].at_1, 2e-7, "at 1", (int64_t)i);
		near(x[1], known[i].at_minus_1, 2e-7, "at -1", (int64_t)i);
		assert_true(x[2] == 0);
		assert_true(x[3] == 1e30f);
		assert_true(x[4] == 0);
		assert_true(x[5] == 88.0f);
		near(x[6], 0, 1e-35, "at -88", (int64_t)i);
		near(x[7], 0.5e-30, 1e-36, "at 1e-30", (int64_t)i);
		near(x[8], 0, 1e-37, "at -120", (int64_t)i);
		assert_true(x[9] == 300.0f);
		assert_true(isnan(x[10]));
		assert_true(x[11] == INFINITY);
	}
}

static void test_act_values(void **state)
{
	for_levels(act_values);
}

static void adds(struct fs_dev *d)
{
	int64_t n = 40001;
	float *x = randoms(n), *y = randoms(n), *z = need((size_t)n * sizeof(*z));

	memcpy(z, y, (size_t)n * sizeof(*z));
	fs_op_add(d, z, x, n);
	for (int64_t i = 0; i < n; i++)
		assert_true(z[i] == x[i] + y[i]);
	free(x);
	free(y);
	free(z);
}

static void test_add(void **state)
{
	for_levels(adds);
}

/* ---- rope ---- */

static void check_rope(
        struct fs_dev *d, int pairs, int head_dim, int heads, int64_t n, bool interleaved, int axes)
{
	struct fs_rope r = {.n_pairs = pairs, .interleaved = interleaved, .n_axes = axes};
	int64_t stride = heads * head_dim + 5;
	float *x = randoms(n * stride), *y = need((size_t)(n * stride) * sizeof(*y));
	float *cs = need((size_t)(n * pairs * 2) * sizeof(*cs));
	int32_t *pos = need((size_t)(n * axes) * sizeof(*pos));

	memcpy(y, x, (size_t)(n * stride) * sizeof(*y));
	for (int p = 0; p < pairs; p++) {
		r.freq[p] = powf(10000.0f, -(float)p / (float)pairs);
		r.axis[p] = (uint8_t)(p % axes);
	}
	for (int64_t i = 0; i < n * axes; i++)
		pos[i] = (int32_t)(rng() % 300);
	fs_op_rope_angles(d, &r, pos, cs, n);
	fs_op_rope(d, &r, cs, y, stride, n, heads, head_dim);
	for (int64_t i = 0; i < n; i++) {
		for (int64_t e = 0; e < stride; e++) {
			int in_head = (int)(e % head_dim),
			    p = interleaved ? in_head / 2 : in_head % FS_MAX(1, pairs);
			bool second = interleaved ? in_head & 1 : in_head >= pairs;
			double want = (double)x[i * stride + e];

			if (e < heads * head_dim && in_head < 2 * pairs) {
				double a = (double)pos[r.axis[p] * n + i] * (double)r.freq[p];
				int64_t other = e + (second ? -1 : 1) * (interleaved ? 1 : pairs);

				want = want * cos(a) +
				       (second ? 1 : -1) * (double)x[i * stride + other] * sin(a);
			}
			near(y[i * stride + e], want, 1e-4, "rope", i * stride + e);
		}
	}
	free(x);
	free(y);
	free(cs);
	free(pos);
}

static void ropes(struct fs_dev *d)
{
	check_rope(d, 16, 32, 3, 5, false, 1);
	check_rope(d, 32, 64, 2, 40, true, 1);
	check_rope(d, 20, 80, 4, 7, false, 2);
	check_rope(d, 5, 12, 1, 33, false, 4);
	check_rope(d, 5, 12, 7, 3, true, 3);
	check_rope(d, 64, 128, 12, 1, false, 3);
	check_rope(d, 64, 128, 12, 65, true, 1);
}

static void test_rope(void **state)
{
	for_levels(ropes);
}

/* ---- attention ---- */

struct case_ {
	int64_t n_q, n_kv;
	int heads, kv_heads, head_dim;
	enum fs_dtype kv;
	bool causal;
	float spread; /* of the scores */
};

static const struct case_ cases[] = {
        {1, 1, 1, 1, 4, FS_F32, false, 1},
        {1, 1, 1, 1, 4, FS_F16, true, 1},
        {1, 65, 4, 2, 64, FS_F16, true, 1},
        {1, 300, 14, 2, 128, FS_F16, true, 1},
        {1, 777, 6, 6, 80, FS_F32, false, 1},
        {2, 130, 3, 1, 20, FS_F16, true, 1},
        {5, 64, 2, 2, 36, FS_F32, true, 1},
        {9, 63, 8, 1, 100, FS_F16, true, 1},
        {64, 64, 2, 1, 32, FS_F32, true, 1},
        {100, 100, 3, 3, 80, FS_F32, false, 1},
        {129, 129, 4, 2, 64, FS_F16, true, 1},
        {70, 333, 6, 2, 72, FS_F16, true, 1},
        {257, 257, 2, 2, 256, FS_F32, false, 1},
        {40, 200, 2, 1, 48, FS_F32, false, 60},
        {3, 90, 150, 1, 16, FS_F32, true, 1},
        {200, 513, 1, 1, 8, FS_F16, false, 20},
};

static double kv_at(const void *p, enum fs_dtype t, int64_t i)
{
	return (double)(t == FS_F16 ? fs_f16_to_f32(((const uint16_t *)p)[i]) : ((const float *)p)[i]);
}

/* out[head_dim] of one query and head, by the definition. */
static void naive(const struct fs_attn *a, int64_t i, int h, double *out)
{
	int64_t n = a->causal ? a->q_first + i + 1 : a->n_kv,
	        off = h / (a->heads / a->kv_heads) * a->head_dim;
	double *s = need((size_t)n * sizeof(*s)), max = -1e300, sum = 0;

	for (int64_t j = 0; j < n; j++) {
		s[j] = 0;
		for (int e = 0; e < a->head_dim; e++)
			s[j] += (double)a->q[i * a->q_stride + h * a->head_dim + e] *
			        kv_at(a->k, a->kv_type, j * a->kv_stride + off + e) * (double)a->scale;
		max = fmax(max, s[j]);
	}
	for (int e = 0; e < a->head_dim; e++)
		out[e] = 0;
	for (int64_t j = 0; j < n; j++) {
		double p = exp(s[j] - max);

		sum += p;
		for (int e = 0; e < a->head_dim; e++)
			out[e] += p * kv_at(a->v, a->kv_type, j * a->kv_stride + off + e);
	}
	for (int e = 0; e < a->head_dim; e++)
		out[e] /= sum;
	free(s);
}

static void *kv_values(enum fs_dtype t, int64_t n)
{
	float *x = randoms(n);
	uint16_t *h = need((size_t)n * sizeof(*h));

	if (t == FS_F32) {
		free(h);
		return x;
	}
	for (int64_t i = 0; i < n; i++)
		h[i] = fs_f32_to_f16(x[i]);
	free(x);
	return h;
}

static void check_attention(struct fs_dev *d, const struct case_ *c)
{
	int64_t width = c->heads * c->head_dim, kv_width = c->kv_heads * c->head_dim;
	struct fs_attn a = {.q_stride = width + 3, .kv_stride = kv_width + 8, .out_stride = width + 1};
	float *q = randoms(c->n_q * a.q_stride), *out = randoms(c->n_q * a.out_stride);
	void *k = kv_values(c->kv, c->n_kv * a.kv_stride), *v = kv_values(c->kv, c->n_kv * a.kv_stride);
	double want[256];
	float after = out[width];
	char what[64];

	a.q = q;
	a.k = k;
	a.v = v;
	a.out = out;
	a.kv_type = c->kv;
	a.n_q = c->n_q;
	a.n_kv = c->n_kv;
	a.heads = c->heads;
	a.kv_heads = c->kv_heads;
	a.head_dim = c->head_dim;
	a.scale = c->spread / sqrtf((float)c->head_dim);
	a.causal = c->causal;
	a.q_first = c->n_kv - c->n_q;
	fs_op_attention(d, &a);
	snprintf(what, sizeof(what), "attention %s case %d", fs_dev_describe(d), (int)(c - cases));
	for (int64_t i = 0; i < c->n_q; i++) {
		for (int h = 0; h < c->heads; h++) {
			naive(&a, i, h, want);
			for (int e = 0; e < c->head_dim; e++)
				near(out[i * a.out_stride + h * c->head_dim + e], want[e],
				        2e-5 * (double)c->spread, what, i * width + h * c->head_dim + e);
		}
	}
	assert_true(out[width] == after);
	free(q);
	free(k);
	free(v);
	free(out);
}

static void attentions(struct fs_dev *d)
{
	for (size_t i = 0; i < FS_ARRAY_LEN(cases); i++)
		check_attention(d, &cases[i]);
}

static void test_attention(void **state)
{
	for_levels(attentions);
}

/* Scores far beyond exp's range: the largest key must win, and no NaN appear. */
static void attention_extremes(struct fs_dev *d)
{
	float q[4] = {1e4f, 0, 0, 0}, k[100 * 4] = {0}, v[100 * 4], out[4];
	struct fs_attn a = {
	        .q = q, .q_stride = 4, .k = k, .v = v, .kv_stride = 4, .kv_type = FS_F32, .out = out};

	for (int i = 0; i < 100; i++) {
		k[4 * i] = i == 77 ? 1e4f : -1e4f * (float)i;
		for (int e = 0; e < 4; e++)
			v[4 * i + e] = (float)(i + e);
	}
	a.out_stride = 4;
	a.n_q = a.heads = a.kv_heads = 1;
	a.n_kv = 100;
	a.head_dim = 4;
	a.scale = 1;
	fs_op_attention(d, &a);
	for (int e = 0; e < 4; e++)
		assert_true(out[e] == (float)(77 + e));
}

static void test_attention_extremes(void **state)
{
	for_levels(attention_extremes);
}

/* Halves: exact values, rounding to even, overflow to infinity, the smallest subnormal. */
static void kv_store(struct fs_dev *d)
{
	float src[2][19] = {{0, 1, -2, 0.5f, 65504, 1e6f, 2049, 2051, 5.9604645e-8f, -0.0f}};
	static const uint16_t want[10] = {
	        0, 0x3c00, 0xc000, 0x3800, 0x7bff, 0x7c00, 0x6800, 0x6802, 1, 0x8000};
	uint16_t dst[4 * 18];

	for (int e = 0; e < 18; e++)
		src[1][e] = (float)e;
	memset(dst, 0xff, sizeof(dst));
	fs_op_kv_store(d, &(struct fs_kv_store){.dst = dst,
	                          .type = FS_F16,
	                          .at = 1,
	                          .src = &src[0][0],
	                          .src_stride = 19,
	                          .n = 2,
	                          .width = 18});
	assert_memory_equal(dst + 18, want, sizeof(want));
	for (int e = 0; e < 18; e++) {
		assert_int_equal(dst[e], 0xffff);
		assert_int_equal(dst[3 * 18 + e], 0xffff);
		assert_true(fs_f16_to_f32(dst[2 * 18 + e]) == (float)e);
	}
}

static void test_kv_store(void **state)
{
	for_levels(kv_store);
}

/* A place taken from device memory is the same place. */
static void placed(struct fs_dev *d)
{
	enum { PAST = 37, N = 3, WIDTH = 2 * 20, HEADS = 4, CELLS = 64 };
	static const enum fs_dtype types[] = {FS_F16, FS_F32};
	float *src = randoms(CELLS * WIDTH), *q = randoms(N * HEADS * 20), want[N * HEADS * 20],
	      got[N * HEADS * 20];
	const int32_t past = PAST;

	for (size_t t = 0; t < FS_ARRAY_LEN(types); t++) {
		void *a = need(CELLS * WIDTH * sizeof(float)), *b = need(CELLS * WIDTH * sizeof(float));
		struct fs_kv_store s = {.dst = a,
		        .type = types[t],
		        .src = src,
		        .src_stride = WIDTH,
		        .n = PAST + N,
		        .width = WIDTH};
		struct fs_attn x = {.q = q,
		        .q_stride = HEADS * 20,
		        .k = a,
		        .v = a,
		        .kv_stride = WIDTH,
		        .kv_type = types[t],
		        .out = want,
		        .out_stride = HEADS * 20,
		        .n_q = N,
		        .n_kv = PAST + N,
		        .heads = HEADS,
		        .kv_heads = 2,
		        .head_dim = 20,
		        .scale = 0.3f,
		        .causal = true,
		        .q_first = PAST};

		memset(a, 0, CELLS * WIDTH * sizeof(float));
		memset(b, 0, CELLS * WIDTH * sizeof(float));
		fs_op_kv_store(d, &s);
		fs_op_attention(d, &x);
		s.dst = b;
		s.n = PAST;
		fs_op_kv_store(d, &s);
		s.src += PAST * WIDTH;
		s.n = N;
		s.past = &past;
		fs_op_kv_store(d, &s);
		assert_memory_equal(a, b, CELLS * WIDTH * sizeof(float));
		x.out = got;
		x.n_kv = N;
		x.q_first = 0;
		x.past = &past;
		x.n_kv_max = CELLS;
		fs_op_attention(d, &x);
		assert_memory_equal(want, got, sizeof(want));
		free(a);
		free(b);
	}
	free(src);
	free(q);
}

static void test_placed(void **state)
{
	for_levels(placed);
}

/* ---- the device ---- */

static void test_open(void **state)
{
	static const char *const wrong[] = {
	        "tpu", "cuda:", "cuda:-1", "cuda:1x", "cuda:1000", "cuda1", "auto "};
	struct fs_dev_opts o = {.device = "cuda:99"};
	struct fs_errbuf e;
	struct fs_dev *d = NULL;

	int err = fs_dev_open(&o, &d, &e);

	assert_true(err == FS_ENOTSUP || err == FS_EUNAVAILABLE); /* a build without CUDA, with it */
	assert_non_null(strstr(e.text, err == FS_ENOTSUP ? "no CUDA support" : "cuda:99"));
	for (size_t i = 0; i < FS_ARRAY_LEN(wrong); i++) {
		o.device = wrong[i];
		assert_int_equal(fs_dev_open(&o, &d, &e), FS_EINVAL);
		assert_non_null(strstr(e.text, wrong[i]));
	}
	o.device = "cpu";
	o.threads = -1;
	assert_int_equal(fs_dev_open(&o, &d, &e), FS_EINVAL);
	assert_null(d);
	o.threads = 2;
	assert_int_equal(fs_dev_open(&o, &d, &e), FS_OK);
	assert_string_equal(fs_dev_name(d), "cpu");
	assert_int_equal(fs_dev_threads(d), 2);
	assert_false(fs_dev_is_gpu(d));
	assert_non_null(strstr(fs_dev_describe(d), "2 threads"));
	fs_dev_close(d);
	fs_dev_close(NULL);
}

static void test_weight_checks(void **state)
{
	struct fs_dev *d = device(FS_CPU_SCALAR, FS_PRECISION_AUTO, false);
	uint8_t bytes[68] = {0};
	struct fs_gguf_tensor t = {
	        .name = "blk.0.x", .type = FS_Q8_0, .ne = {32, 2, 1, 1}, .data = bytes, .nbytes = 67};
	struct fs_weight w = {0};
	struct fs_errbuf e;

	assert_int_equal(fs_weight_load(d, &t, false, &w, &e), FS_EFORMAT);
	assert_non_null(strstr(e.text, "blk.0.x"));
	t.nbytes = 68;
	t.ne[0] = 33;
	assert_int_equal(fs_weight_load(d, &t, false, &w, &e), FS_ENOTSUP);
	t.ne[0] = 32;
	t.ne[1] = t.ne[2] = t.ne[3] = INT64_MAX;
	assert_int_equal(fs_weight_load(d, &t, false, &w, &e), FS_EFORMAT);
	t.ne[1] = 2;
	t.ne[2] = t.ne[3] = 1;
	assert_int_equal(fs_weight_load(d, &t, false, &w, &e), FS_OK);
	assert_int_equal(w.in, 32);
	assert_int_equal(w.out, 2);
	fs_weight_finish(d, &w);
	fs_dev_close(d);
}

static void test_vector_load(void **state)
{
	struct fs_dev *d = device(FS_CPU_SCALAR, FS_PRECISION_AUTO, false);
	uint16_t half[3] = {0x3c00, 0xc000, 0x3800};
	struct fs_gguf_tensor t = {
	        .name = "b", .type = FS_F16, .ne = {3, 1, 1, 1}, .data = half, .nbytes = 6};
	float *v = NULL;
	struct fs_errbuf e;

	assert_int_equal(fs_vector_load(d, &t, &v, &e), FS_OK);
	assert_true(v[0] == 1.0f && v[1] == -2.0f && v[2] == 0.5f);
	fs_dev_free(d, v);
	fs_dev_close(d);
}

/* After a failure operations do nothing until sync has told it. */
static void test_sticky(void **state)
{
	struct fs_dev *d = device(FS_CPU_SCALAR, FS_PRECISION_AUTO, false);
	float y[2] = {1, 2}, x[2] = {5, 5};
	struct fs_errbuf e;

	fs_dev_fail(d, FS_ENOMEM, "first %d", 1);
	fs_dev_fail(d, FS_EINTERNAL, "second");
	fs_op_add(d, y, x, 2);
	assert_true(y[0] == 1);
	assert_int_equal(fs_dev_sync(d, &e), FS_ENOMEM);
	assert_string_equal(e.text, "first 1");
	fs_op_add(d, y, x, 2);
	assert_int_equal(fs_dev_download(d, x, y, sizeof(x), &e), FS_OK);
	assert_true(x[0] == 6 && x[1] == 7);
	fs_dev_close(d);
}

/* ---- the pool ---- */

#define TASKS 500
struct tally {
	_Atomic int runs[TASKS];
	_Atomic int busy[4];
	_Atomic bool clash;
};

static void tally_task(void *arg, int64_t task, int worker)
{
	struct tally *t = arg;

	if (atomic_fetch_add(&t->busy[worker], 1))
		atomic_store(&t->clash, true);
	atomic_fetch_add(&t->runs[task], 1);
	atomic_fetch_sub(&t->busy[worker], 1);
}

static void test_pool(void **state)
{
	struct fs_errbuf e;

	for (int threads = 1; threads <= 4; threads++) {
		struct fs_pool *p = NULL;

		assert_int_equal(fs_pool_create(threads, NULL, &p, &e), FS_OK);
		assert_int_equal(fs_pool_threads(p), threads);
		for (int round = 0; round < 3000; round++) {
			static struct tally t;
			int n = (int)(rng() % TASKS) % (round % 7 ? 9 : TASKS);

			memset(&t, 0, sizeof(t));
			fs_pool_run(p, n, tally_task, &t);
			for (int i = 0; i < TASKS; i++)
				assert_int_equal(t.runs[i], i < n);
			assert_false(t.clash);
		}
		fs_pool_destroy(p);
	}
	fs_pool_destroy(NULL);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
	        cmocka_unit_test(test_norms),
	        cmocka_unit_test(test_acts),
	        cmocka_unit_test(test_act_values),
	        cmocka_unit_test(test_add),
	        cmocka_unit_test(test_rope),
	        cmocka_unit_test(test_attention),
	        cmocka_unit_test(test_attention_extremes),
	        cmocka_unit_test(test_kv_store),
	        cmocka_unit_test(test_placed),
	        cmocka_unit_test(test_open),
	        cmocka_unit_test(test_weight_checks),
	        cmocka_unit_test(test_vector_load),
	        cmocka_unit_test(test_sticky),
	        cmocka_unit_test(test_pool),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
