/*
 * The whole CUDA device against the CPU's and against sums in double: every operation through the device API,
 * with memory that is the device's own, at odd sizes; copies larger than what is pinned, weights in several
 * pieces, products in slices, recorded steps. With FS_SIMT on the imitation of runtime, cuBLAS and kernels;
 * else on the first card, where there is none it skips and says why.
 */
#include "product_util.h"

#include "common/compute/cuda/cuda.h"

#include <unistd.h>

static struct fs_dev *open_gpu(enum fs_precision precision)
{
	struct fs_dev_opts o = {.device = "cuda", .precision = precision};
	struct fs_dev *d = NULL;
	struct fs_errbuf e = {.text = ""};

	if (fs_dev_open(&o, &d, &e))
		fail_msg("%s", e.text);
	return d;
}

static void *up(struct fs_dev *d, const void *host, size_t bytes)
{
	struct fs_errbuf e = {.text = ""};
	void *p = NULL;

	if (fs_dev_alloc(d, bytes, &p, &e))
		fail_msg("%s", e.text);
	if (host)
		fs_dev_upload(d, p, host, bytes);
	return p;
}

static void down(struct fs_dev *d, void *host, const void *p, size_t bytes)
{
	struct fs_errbuf e = {.text = ""};

	if (fs_dev_download(d, host, p, bytes, &e))
		fail_msg("%s", e.text);
}

static float *up_floats(struct fs_dev *d, const float *x, int64_t n)
{
	return up(d, x, (size_t)n * sizeof(*x));
}

/* What is at p, freed with it. */
static float *take_floats(struct fs_dev *d, float *p, int64_t n)
{
	float *x = need((size_t)n * sizeof(*x));

	down(d, x, p, (size_t)n * sizeof(*x));
	fs_dev_free(d, p);
	return x;
}

static void same(const float *got, const float *want, int64_t n, double tolerance, const char *what)
{
	for (int64_t i = 0; i < n; i++)
		near(got[i], (double)want[i], tolerance * (1 + fabs((double)want[i])), what, i);
}

/* ---- memory ---- */

static void test_copies(void **state)
{
	static const size_t sizes[] = {1, 3, 4095, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, (9 << 20) + 5};
	struct fs_dev *d = open_gpu(FS_PRECISION_AUTO);

	for (size_t i = 0; i < FS_ARRAY_LEN(sizes); i++) {
		size_t n = sizes[i];
		uint8_t *src = need(n), *got = need(n), *kept = need(n), *a, *b;

		for (size_t k = 0; k < n; k++)
			src[k] = (uint8_t)rng();
		memcpy(kept, src, n);
		a = up(d, src, n);
		memset(src, 0, n); /* it is ours again */
		b = up(d, NULL, n);
		fs_dev_copy(d, b, a, n);
		memset(got, 0, n);
		down(d, got, b, n);
		assert_memory_equal(got, kept, n);
		fs_dev_free(d, a);
		fs_dev_free(d, b);
		free(src);
		free(got);
		free(kept);
	}
	fs_dev_close(d);
}

static void test_facts(void **state)
{
	struct fs_dev *d = open_gpu(FS_PRECISION_AUTO);
	uint64_t have = 0, total = 0, later = 0;
	void *p;

	assert_true(fs_dev_is_gpu(d));
	assert_int_equal(strncmp(fs_dev_name(d), "cuda:", 5), 0);
	assert_non_null(strstr(fs_dev_describe(d), "GiB"));
	assert_true(fs_dev_memory(d, &have, &total) && have > 0 && have <= total);
	p = up(d, NULL, 100 << 20);
	assert_true(fs_dev_memory(d, &later, &total));
	assert_true(later <= have - (99 << 20));
	fs_dev_free(d, p);
	for (int i = 0; i < 5; i++) {
		fs_dev_pace(d);
		no_error(d);
	}
	assert_false(fs_dev_lost(d));
	fs_dev_close(d);
}

/* ---- products ---- */

static const enum fs_dtype types[] = {
        FS_F32, FS_F16, FS_BF16, FS_Q8_0, FS_Q4_0, FS_Q4_1, FS_Q5_0, FS_Q5_1, FS_Q4_K, FS_Q5_K, FS_Q6_K};

static struct fs_weight load(struct fs_dev *d, const struct product *p, bool packed)
{
	struct fs_gguf_tensor t = {
	        .name = "w", .type = p->type, .n_dims = 2, .ne = {p->s.in, p->s.out, 1, 1}, .data = p->w};
	struct fs_weight w;
	struct fs_errbuf e = {.text = ""};

	t.nbytes = fs_dtype_row_bytes(p->type, p->s.in) * (size_t)p->s.out;
	assert_true(fs_weight_bytes(d, &t, packed) >= 1);
	if (fs_weight_load(d, &t, packed, &w, &e))
		fail_msg("%s", e.text);
	return w;
}

/* x in blocks of 32 as int8: half a step of each block times the magnitudes of w; 16-bit numbers: 2^-9 of
 * each factor, 2^-8 where both are such; f32: rounding of the sum. */
static double allowed(
        const struct product *p, bool exact, bool packed, int64_t r, int64_t o, double magnitude)
{
	bool small = p->s.n <= (fs_is_quantized(p->type) && !packed ? 16 : 8);
	double steps = 0;

	if (exact)
		return magnitude * 2e-6 + 1e-6;
	if (!small || packed)
		return magnitude / 128;
	if (!fs_is_quantized(p->type))
		return magnitude * 2e-6 + 1e-6;
	for (int64_t b = 0; b < p->s.in / 32; b++) {
		double max = 0, w = 0;

		for (int64_t i = 32 * b; i < 32 * b + 32; i++) {
			max = fmax(max, fabs((double)p->x[r * p->s.in + i]));
			w += fabs((double)p->deq[o * p->s.in + i]);
		}
		steps += max / 127 / 2 * w;
	}
	return steps * 1.02 + magnitude * 1e-5;
}

static void check(const struct product *p, const float *y, bool exact, bool packed, bool bias, bool add,
        const char *what)
{
	for (int64_t r = 0; r < p->s.n; r++) {
		for (int64_t o = 0; o < p->s.out; o++) {
			double sum =
			        (bias ? (double)p->bias[o] : 0) + (add ? (double)p->y0[r * p->s.out + o] : 0);
			double magnitude = fabs(sum);

			for (int64_t i = 0; i < p->s.in; i++) {
				double v = (double)p->deq[o * p->s.in + i] * (double)p->x[r * p->s.in + i];

				sum += v;
				magnitude += fabs(v);
			}
			near(y[r * p->s.out + o], sum, allowed(p, exact, packed, r, o, magnitude), what,
			        r * p->s.out + o);
		}
	}
}

static void run(struct fs_dev *d, const struct product *p, bool packed)
{
	struct fs_weight w = load(d, p, packed);
	float *x = up_floats(d, p->x, p->s.n * p->s.in), *b = up_floats(d, p->bias, p->s.out);
	bool exact = d->precision == FS_PRECISION_F32;
	char what[128];

	for (int k = 0; k < 4; k++) {
		bool bias = k & 1, add = k & 2;
		float *y = up_floats(d, p->y0, p->s.n * p->s.out), *got;

		fs_op_matmul(d, &w, bias ? b : NULL, x, y, p->s.n, add);
		got = take_floats(d, y, p->s.n * p->s.out);
		snprintf(what, sizeof(what), "%s in %d out %d n %d%s%s%s%s", fs_dtype_info(p->type)->name,
		        (int)p->s.in, (int)p->s.out, (int)p->s.n, bias ? " bias" : "", add ? " add" : "",
		        packed ? " packed" : "", exact ? " f32" : "");
		check(p, got, exact, packed, bias, add, what);
		free(got);
	}
	fs_dev_free(d, x);
	fs_dev_free(d, b);
	fs_weight_finish(d, &w);
}

static const struct shape shapes[] = {{1, 1, 1}, {7, 5, 3}, {33, 3, 10}, {40, 9, 12}, {32, 3, 1}, {96, 17, 7},
        {160, 9, 9}, {288, 70, 17}, {256, 1, 1}, {256, 33, 5}, {512, 19, 8}, {256, 7, 9}, {256, 6, 16},
        {512, 67, 20}};

static void products(enum fs_precision precision, size_t slice)
{
	struct fs_dev *d = open_gpu(precision);

	if (slice)
		fs_cuda(d)->slice = slice;
	for (size_t i = 0; i < FS_ARRAY_LEN(types); i++) {
		for (size_t s = 0; s < FS_ARRAY_LEN(shapes); s++) {
			struct product p;

			if (shapes[s].in % fs_dtype_info(types[i])->block_elems)
				continue;
			p = make(types[i], shapes[s]);
			run(d, &p, false);
			if (!slice)
				run(d, &p, true);
			drop(&p);
		}
	}
	fs_dev_close(d);
}

static void test_products(void **state)
{
	products(FS_PRECISION_AUTO, 0);
}

static void test_products_f32(void **state)
{
	products(FS_PRECISION_F32, 0);
}

/* Slices of 64 rows, the least that there are, and one that is shorter. */
static void test_slices(void **state)
{
	products(FS_PRECISION_AUTO, 1);
}

/* Rows that were brought into another form are used again only while they are those rows. */
static void test_changed_rows(void **state)
{
	static const int64_t rows[] = {3, 20};

	for (size_t k = 0; k < FS_ARRAY_LEN(rows); k++) {
		struct product p = make(FS_Q4_0, (struct shape){64, 64, rows[k]});
		struct fs_dev *d = open_gpu(FS_PRECISION_AUTO);
		struct fs_weight w = load(d, &p, false);
		int64_t n = rows[k] * 64;
		float *x = up_floats(d, p.x, n), *y = up_floats(d, p.y0, n), *z = up_floats(d, p.y0, n), *got;

		for (int how = 0; how < 4; how++) {
			fs_op_matmul(d, &w, NULL, x, y, rows[k], false);
			fs_op_matmul(d, &w, NULL, x, z, rows[k], false); /* the form is there */
			if (how == 0)
				fs_dev_upload(d, x, p.y0, (size_t)n * sizeof(float));
			if (how == 1)
				fs_dev_copy(d, x, z, (size_t)n * sizeof(float));
			if (how == 2)
				fs_op_add(d, x, z, n);
			if (how == 3)
				fs_op_matmul(d, &w, NULL, z, x, rows[k], false);
			fs_op_matmul(d, &w, NULL, x, y, rows[k], false);
			down(d, p.x, x, (size_t)n * sizeof(float));
			got = need((size_t)n * sizeof(float));
			down(d, got, y, (size_t)n * sizeof(float));
			check(&p, got, false, false, false, false, "changed rows");
			free(got);
		}
		fs_dev_free(d, x);
		fs_dev_free(d, y);
		fs_dev_free(d, z);
		fs_weight_finish(d, &w);
		fs_dev_close(d);
		drop(&p);
	}
}

static void test_embed(void **state)
{
	const int32_t host[3] = {2, 0, 2};
	struct fs_dev *d = open_gpu(FS_PRECISION_AUTO);

	for (size_t i = 0; i < FS_ARRAY_LEN(types); i++) {
		struct product p = make(types[i], (struct shape){256, 3, 1});
		struct fs_weight w = load(d, &p, false);
		int32_t *ids = up(d, host, sizeof(host));
		float *got = up(d, NULL, 3 * 256 * sizeof(float));

		fs_op_embed(d, &w, ids, got, 3);
		got = take_floats(d, got, 3 * 256);
		for (int r = 0; r < 3; r++)
			same(got + r * 256, p.deq + host[r] * 256, 256, 1e-6, fs_dtype_info(types[i])->name);
		free(got);
		fs_dev_free(d, ids);
		fs_weight_finish(d, &w);
		drop(&p);
	}
	fs_dev_close(d);
}

/* Whole numbers, and many pieces: what readers bring arrives in its place. */
static void test_load_pieces(void **state)
{
	static const struct shape large[] = {{1024, 10000, 1}, {1000, 9001, 1}, {4096, 70, 1}};
	struct fs_dev *d = open_gpu(FS_PRECISION_AUTO);

	for (size_t i = 0; i < FS_ARRAY_LEN(large); i++) {
		size_t bytes = (size_t)(large[i].in * large[i].out) * sizeof(float);
		uint32_t *w = need(bytes), *got = need(bytes);
		struct fs_gguf_tensor t = {.name = "w",
		        .type = FS_F32,
		        .n_dims = 2,
		        .ne = {large[i].in, large[i].out, 1, 1},
		        .data = w,
		        .nbytes = bytes};
		struct fs_weight r;
		struct fs_errbuf e = {.text = ""};

		for (size_t k = 0; k < bytes / sizeof(*w); k++)
			w[k] = rng();
		if (fs_weight_load(d, &t, false, &r, &e))
			fail_msg("%s", e.text);
		assert_true(fs_weight_bytes(d, &t, false) >= bytes);
		down(d, got, r.data, bytes);
		assert_memory_equal(got, w, bytes);
		fs_weight_finish(d, &r);
		free(w);
		free(got);
	}
	fs_dev_close(d);
}

/* ---- the other operations, against the CPU's ---- */

struct devs {
	struct fs_dev *gpu, *cpu;
};

static struct devs open_both(enum fs_precision precision)
{
	struct devs v = {.gpu = open_gpu(precision), .cpu = device(best_level(), FS_PRECISION_F32, false)};

	return v;
}

static void close_both(struct devs *v)
{
	fs_dev_close(v->gpu);
	fs_dev_close(v->cpu);
}

static void test_rows(void **state)
{
	static const int64_t dims[] = {1, 5, 64, 100, 1000};
	struct devs v = open_both(FS_PRECISION_AUTO);

	for (size_t i = 0; i < FS_ARRAY_LEN(dims); i++) {
		int64_t dim = dims[i], n = 5 * dim;
		float *x = randoms(n), *w = randoms(dim), *b = randoms(dim), *want = need((size_t)n * 4);
		float *gx = up_floats(v.gpu, x, n), *gw = up_floats(v.gpu, w, dim),
		      *gb = up_floats(v.gpu, b, dim), *gy;

		for (int k = 0; k < 6; k++) {
			gy = up_floats(v.gpu, x, n);
			memcpy(want, x, (size_t)n * sizeof(*x));
			for (int side = 0; side < 2; side++) {
				struct fs_dev *d = side ? v.gpu : v.cpu;
				const float *dx = side ? gx : x, *dw = side ? gw : w, *db = side ? gb : b;
				float *y = side ? gy : want;

				if (k == 0)
					fs_op_rms_norm(d, dx, dw, y, 5, dim, 1e-5f);
				else if (k == 1)
					fs_op_layer_norm(d, dx, dw, db, y, 5, dim, 1e-2f);
				else if (k == 2)
					fs_op_layer_norm(d, y, dw, NULL, y, 5, dim, 1e-2f);
				else if (k == 3)
					fs_op_act(d, FS_GELU_TANH, y, n);
				else if (k == 4)
					fs_op_gate(d, FS_SILU, dx, y, y, n);
				else
					fs_op_add(d, y, dx, n);
			}
			gy = take_floats(v.gpu, gy, n);
			same(gy, want, n, 1e-4, "rows");
			free(gy);
		}
		fs_dev_free(v.gpu, gx);
		fs_dev_free(v.gpu, gw);
		fs_dev_free(v.gpu, gb);
		free(x);
		free(w);
		free(b);
		free(want);
	}
	close_both(&v);
}

static void test_rope(void **state)
{
	enum { N = 7, HEADS = 3, DIM = 20, PAIRS = 8, STRIDE = HEADS * DIM + 3 };
	struct devs v = open_both(FS_PRECISION_AUTO);
	struct fs_rope r = {.n_pairs = PAIRS, .n_axes = 3};
	float *x = randoms(N * STRIDE), cs[N * PAIRS * 2], *gcs, *gx;
	int32_t pos[3 * N], *gpos;

	for (int i = 0; i < 3 * N; i++)
		pos[i] = (int32_t)(rng() % 3000);
	for (int p = 0; p < PAIRS; p++) {
		r.freq[p] = powf(10000.0f, -(float)p / PAIRS);
		r.axis[p] = (uint8_t)(p % 3);
	}
	gpos = up(v.gpu, pos, sizeof(pos));
	gcs = up(v.gpu, NULL, sizeof(cs));
	gx = up_floats(v.gpu, x, N * STRIDE);
	for (int k = 0; k < 2; k++) {
		r.interleaved = k;
		fs_op_rope_angles(v.cpu, &r, pos, cs, N);
		fs_op_rope(v.cpu, &r, cs, x, STRIDE, N, HEADS, DIM);
		fs_op_rope_angles(v.gpu, &r, gpos, gcs, N);
		fs_op_rope(v.gpu, &r, gcs, gx, STRIDE, N, HEADS, DIM);
	}
	fs_dev_free(v.gpu, gpos);
	fs_dev_free(v.gpu, gcs);
	gx = take_floats(v.gpu, gx, N * STRIDE);
	same(gx, x, N * STRIDE, 2e-4, "rope");
	free(gx);
	free(x);
	close_both(&v);
}

struct cache { /* one kv head group's cache and the step before it */
	enum fs_dtype type;
	int64_t past, n, cells;
	int heads, kv_heads, dim;
};

/* Stores n rows behind past, attends to all; the output. */
static float *attend(struct fs_dev *d, const struct cache *c, const float *src, const float *q, bool placed)
{
	int64_t width = c->kv_heads * c->dim, wide = c->heads * c->dim, all = c->past + c->n;
	bool gpu = fs_dev_is_gpu(d);
	const int32_t past = (int32_t)c->past;
	size_t bytes = (size_t)(c->cells * width) * sizeof(float);
	float *zeros = calloc(1, bytes), *s = up_floats(d, src, all * width),
	      *x = up_floats(d, q, c->n * wide);
	float *k = up(d, zeros, bytes), *y = up(d, NULL, (size_t)(c->n * wide) * sizeof(float));
	int32_t *at = up(d, &past, sizeof(past));
	struct fs_kv_store store = {
	        .dst = k, .type = c->type, .src = s, .src_stride = width, .n = c->past, .width = width};
	struct fs_attn a = {.q = x,
	        .q_stride = wide,
	        .k = k,
	        .v = k,
	        .kv_stride = width,
	        .kv_type = c->type,
	        .out = y,
	        .out_stride = wide,
	        .n_q = c->n,
	        .n_kv = placed ? c->n : all,
	        .heads = c->heads,
	        .kv_heads = c->kv_heads,
	        .head_dim = c->dim,
	        .scale = 0.2f,
	        .causal = true,
	        .q_first = placed ? 0 : c->past,
	        .past = placed ? at : NULL,
	        .n_kv_max = c->cells};

	fs_op_kv_store(d, &store);
	store.src = s + c->past * width;
	store.n = c->n;
	store.at = placed ? 0 : c->past;
	store.past = placed ? at : NULL;
	fs_op_kv_store(d, &store);
	fs_op_attention(d, &a);
	y = take_floats(d, y, c->n * wide);
	fs_dev_free(d, s);
	fs_dev_free(d, x);
	fs_dev_free(d, k);
	fs_dev_free(d, at);
	free(zeros);
	assert_true(gpu == fs_dev_is_gpu(d));
	return y;
}

static void test_attention(void **state)
{
	static const struct cache caches[] = {
	        {FS_F16, 37, 1, 64, 4, 2, 64},
	        {FS_F16, 300, 1, 512, 8, 1, 128},
	        {FS_F32, 9, 5, 20, 3, 3, 20},
	        {FS_F16, 3, 40, 50, 2, 2, 80},
	};

	for (int exact = 0; exact < 2; exact++) {
		struct devs v = open_both(exact ? FS_PRECISION_F32 : FS_PRECISION_AUTO);

		for (size_t i = 0; i < FS_ARRAY_LEN(caches); i++) {
			const struct cache *c = &caches[i];
			float *src = randoms((c->past + c->n) * c->kv_heads * c->dim);
			float *q = randoms(c->n * c->heads * c->dim);
			float *want = attend(v.cpu, c, src, q, false);

			for (int placed = 0; placed < 2; placed++) {
				float *got = attend(v.gpu, c, src, q, placed);

				same(got, want, c->n * c->heads * c->dim, exact ? 1e-4 : 8e-3, "attention");
				free(got);
			}
			free(src);
			free(q);
			free(want);
		}
		close_both(&v);
	}
}

/* ---- steps that repeat ---- */

struct step {
	struct fs_dev *d;
	struct fs_weight w;
	float *x, *y, *norm;
	int64_t n;
	bool wide; /* another product in between, with more rows than before */
};

/* x = x / |x| · w; y += x · Wᵀ; x += y */
static void queue_step(struct step *s)
{
	fs_op_rms_norm(s->d, s->x, s->norm, s->x, s->n, 64, 1e-5f);
	fs_op_matmul(s->d, &s->w, s->norm, s->x, s->y, s->n, true);
	fs_op_add(s->d, s->x, s->y, s->n * 64);
}

static void do_step(struct step *s, uint64_t key)
{
	if (!key) {
		queue_step(s);
	} else if (!fs_dev_replay(s->d, key)) {
		queue_step(s);
		fs_dev_recorded(s->d);
	}
}

static struct step begin_steps(struct fs_dev *d, const struct product *p)
{
	struct step s = {.d = d, .w = load(d, p, false), .n = p->s.n};

	s.x = up_floats(d, p->x, p->s.n * 64);
	s.y = up_floats(d, p->y0, p->s.n * 64);
	s.norm = up_floats(d, p->bias, 64);
	return s;
}

static float *end_steps(struct step *s)
{
	fs_dev_forget(s->d);
	fs_dev_free(s->d, s->y);
	fs_dev_free(s->d, s->norm);
	fs_weight_finish(s->d, &s->w);
	return take_floats(s->d, s->x, s->n * 64);
}

/* However steps are named, recorded, forgotten and made room for, the numbers are those of steps that just
 * run. */
static void test_recordings(void **state)
{
	static const int64_t rows[] = {1, 18};

	for (size_t k = 0; k < FS_ARRAY_LEN(rows); k++) {
		struct product p = make(FS_Q8_0, (struct shape){64, 64, rows[k]});
		struct fs_dev *d = open_gpu(FS_PRECISION_AUTO);
		struct step plain = begin_steps(d, &p), named;
		float *want, *got;

		for (int i = 0; i < 60; i++)
			do_step(&plain, 0);
		want = end_steps(&plain);
		named = begin_steps(d, &p);
		for (int i = 0; i < 60; i++) {
			do_step(&named, i < 20 ? 7 : i < 45 ? 1 + (uint64_t)i % 23 : 100 + (uint64_t)i % 2);
			if (i == 50)
				fs_dev_forget(d);
			no_error(d);
		}
		got = end_steps(&named);
		assert_memory_equal(got, want, (size_t)(rows[k] * 64) * sizeof(float));
		free(want);
		free(got);
		fs_dev_close(d);
		drop(&p);
	}
}

static int before_all(void **state)
{
	fs_log_set_level(FS_LOG_WARN);
#ifdef FS_SIMT
	fake_cuda_init();
#else
	struct fs_dev_opts o = {.device = "cuda"};
	struct fs_dev *d;
	struct fs_errbuf e = {.text = ""};

	if (fs_dev_open(&o, &d, &e)) {
		/* where there is a driver, a card that can not be opened is a fault */
		bool driver = access("/proc/driver/nvidia/version", F_OK) == 0;
		printf("%s: %s\n", driver ? "failed" : "skipped", e.text);
		exit(driver ? 1 : 77);
	}
	printf("%s\n", fs_dev_describe(d));
	fs_dev_close(d);
#endif
	return 0;
}

int main(void)
{
	const struct CMUnitTest tests[] = {
	        cmocka_unit_test(test_facts),
	        cmocka_unit_test(test_copies),
	        cmocka_unit_test(test_products),
	        cmocka_unit_test(test_products_f32),
	        cmocka_unit_test(test_slices),
	        cmocka_unit_test(test_changed_rows),
	        cmocka_unit_test(test_embed),
	        cmocka_unit_test(test_load_pieces),
	        cmocka_unit_test(test_rows),
	        cmocka_unit_test(test_rope),
	        cmocka_unit_test(test_attention),
	        cmocka_unit_test(test_recordings),
	};

	return cmocka_run_group_tests(tests, before_all, NULL);
}
