/*
 * The CUDA attention kernels, run by the emulation of tests/simt, against the definition in double. What
 * rounding to 16 bits may change is derived for each output from the very numbers it is made of, so that one
 * key too many or too few does not hide in it. Memory is allocated to the element and scratch is full of NaN.
 */
#include "compute_util.h"

#include "common/compute/cuda/launch.h"

struct case_ {
	int64_t n_q, n_kv;
	int heads, kv_heads, head_dim;
	enum fs_dtype kv;
	bool causal, exact;
	int sms;
	int gap;        /* elements between rows of k, v; of q and out one more */
	int shift;      /* elements by which k and v begin late */
	int32_t before; /* keys in front of the first query, of which *past tells; -1: n_kv - n_q, told by
	                   q_first */
	float spread;   /* of the scores */
};

struct setup {
	struct fs_attn a;
	float *q, *out, *k_true, *v_true; /* [n][kv_heads·head_dim] as they stand in memory */
	void *k, *v;
	int32_t past;
	int64_t out_len, n;
};

static double kv_at(const void *p, enum fs_dtype t, int64_t i)
{
	return (double)(t == FS_F16 ? fs_f16_to_f32(((const uint16_t *)p)[i]) : ((const float *)p)[i]);
}

static void *kv_values(enum fs_dtype t, int64_t n)
{
	float *x = randoms(n);
	uint16_t *h;

	if (t == FS_F32)
		return x;
	h = need((size_t)n * sizeof(*h));
	for (int64_t i = 0; i < n; i++)
		h[i] = fs_f32_to_f16(x[i]);
	free(x);
	return h;
}

static void *plus(void *p, enum fs_dtype t, int elements)
{
	return t == FS_F16 ? (void *)((uint16_t *)p + elements) : (void *)((float *)p + elements);
}

static void set_up(const struct case_ *c, struct setup *s)
{
	int64_t width = (int64_t)c->heads * c->head_dim, kv_width = (int64_t)c->kv_heads * c->head_dim;
	struct fs_attn *a = &s->a;
	int64_t q_len, kv_len;

	s->n = c->before < 0 ? c->n_kv : c->n_q + c->before;
	*a = (struct fs_attn){.n_q = c->n_q, .n_kv = c->n_kv, .heads = c->heads, .kv_heads = c->kv_heads};
	a->head_dim = c->head_dim;
	a->kv_type = c->kv;
	a->causal = c->causal;
	a->scale = c->spread / sqrtf((float)c->head_dim);
	a->q_stride = a->out_stride = width + (c->gap ? c->gap + 1 : 0);
	a->kv_stride = kv_width + c->gap;
	a->q_first = c->causal ? c->n_kv - c->n_q : 0;
	if (c->before >= 0) {
		s->past = c->before;
		a->past = &s->past;
		a->n_kv = c->n_q;
		a->q_first = 0;
		a->n_kv_max = c->n_kv;
	}
	q_len = (c->n_q - 1) * a->q_stride + width;
	kv_len = c->n_kv ? (c->n_kv - 1) * a->kv_stride + kv_width + c->shift : 0;
	s->out_len = q_len;
	a->q = s->q = randoms(q_len);
	a->out = s->out = randoms(q_len);
	s->k = kv_values(c->kv, kv_len);
	s->v = kv_values(c->kv, kv_len);
	a->k = plus(s->k, c->kv, c->shift);
	a->v = plus(s->v, c->kv, c->shift);
}

static void tear_down(struct setup *s)
{
	free(s->q);
	free(s->out);
	free(s->k);
	free(s->v);
}

static void run(const struct fs_attn *a, bool exact, int sms)
{
	size_t bytes = fs_cuk_attention_scratch(a, exact);
	void *scratch = need(bytes);

	memset(scratch, 0xff, bytes);
	assert_int_equal(fs_cuk_attention(NULL, a, exact, sms, scratch), 0);
	free(scratch);
}

struct row { /* what one query and head should give */
	double out[256], tolerance[256];
};

/*
 * Rounding q and k to 16 bits moves a score by about scale·sqrt(Σ(q·k)²)·2^-11, a weight and a value are off
 * by 2^-11 of themselves: independent errors, so that of the sum is the root of their squares, of which five
 * are allowed. A weight below f16's normal range is off by 2^-25 at most. In f32 it is 2^-22 for some
 * roundings of a sum instead, and of the score's own size.
 */
static void reference(const struct setup *s, const struct case_ *c, int64_t i, int h, struct row *r)
{
	const struct fs_attn *a = &s->a;
	int64_t n = a->causal ? s->n - a->n_q + i + 1 : s->n;
	int64_t off = (int64_t)(h / (a->heads / a->kv_heads)) * a->head_dim;
	double *p = need((size_t)n * sizeof(*p)), *moved = need((size_t)n * sizeof(*moved));
	double max = -1e300, sum = 0, unit = ldexp(1, c->exact ? -22 : -11), tiny = ldexp(1, -25);

	for (int64_t j = 0; j < n; j++) {
		double score = 0, squares = 0;

		for (int e = 0; e < a->head_dim; e++) {
			double t = (double)a->q[i * a->q_stride + h * a->head_dim + e] *
			           kv_at(a->k, a->kv_type, j * a->kv_stride + off + e) * (double)a->scale;

			score += t;
			squares += t * t;
		}
		p[j] = score;
		max = fmax(max, score);
		moved[j] = sqrt(2 * squares) * unit + (c->exact ? fabs(score) * unit : 0);
	}
	for (int64_t j = 0; j < n; j++)
		sum += p[j] = exp(p[j] - max);
	for (int e = 0; e < a->head_dim; e++) {
		double out = 0, squares = 0, small = 0;

		for (int64_t j = 0; j < n; j++)
			out += p[j] / sum * kv_at(a->v, a->kv_type, j * a->kv_stride + off + e);
		for (int64_t j = 0; j < n; j++) {
			double v = kv_at(a->v, a->kv_type, j * a->kv_stride + off + e), w = p[j] / sum;

			squares += w * w *
			           ((v - out) * (v - out) * moved[j] * moved[j] + 2 * v * v * unit * unit);
			small += c->exact ? 0 : tiny * fabs(v) / sum;
		}
		r->out[e] = out;
		r->tolerance[e] = 5 * sqrt(squares) + small + 1e-6;
	}
	free(p);
	free(moved);
}

static void check_case(const struct case_ *c, int number)
{
	struct setup s = {0};
	struct row want;
	float *before;
	char what[64];

	set_up(c, &s);
	before = need((size_t)s.out_len * sizeof(*before));
	memcpy(before, s.out, (size_t)s.out_len * sizeof(*before));
	run(&s.a, c->exact, c->sms);
	snprintf(what, sizeof(what), "attention case %d", number);
	for (int64_t i = 0; i < c->n_q; i++) {
		for (int h = 0; h < c->heads; h++) {
			reference(&s, c, i, h, &want);
			for (int e = 0; e < c->head_dim; e++) {
				int64_t at = i * s.a.out_stride + h * c->head_dim + e;

				near(s.out[at], want.out[e], want.tolerance[e], what, at);
			}
		}
	}
	for (int64_t at = 0; at < s.out_len; at++)
		if (at % s.a.out_stride >= (int64_t)c->heads * c->head_dim)
			assert_true(s.out[at] == before[at]);
	free(before);
	tear_down(&s);
}

static void check_all(const struct case_ *cases, size_t n)
{
	for (size_t i = 0; i < n; i++)
		check_case(&cases[i], (int)i);
}

/* One step of one sequence: every head size, groups of 1 to 8, one block and many, ragged ends. */
static void test_decode(void **state)
{
	static const struct case_ cases[] = {
	        {1, 1, 1, 1, 8, FS_F16, true, false, 1, 0, 0, -1, 1},
	        {1, 2, 3, 3, 16, FS_F16, true, false, 132, 0, 0, -1, 1},
	        {1, 17, 4, 2, 24, FS_F16, true, false, 1, 8, 0, -1, 1},
	        {1, 65, 4, 2, 64, FS_F16, true, false, 1, 0, 0, -1, 1},
	        {1, 300, 7, 1, 128, FS_F16, true, false, 132, 16, 0, -1, 1},
	        {1, 1000, 4, 2, 128, FS_F16, true, false, 4, 0, 0, -1, 1},
	        {1, 129, 5, 1, 72, FS_F16, true, false, 60, 0, 0, -1, 1},
	        {1, 257, 6, 2, 80, FS_F16, true, false, 3, 8, 8, -1, 1},
	        {1, 200, 8, 1, 96, FS_F16, true, false, 28, 0, 0, -1, 1},
	        {1, 130, 6, 1, 112, FS_F16, true, false, 28, 0, 0, -1, 3},
	        {2, 190, 8, 1, 64, FS_F16, true, false, 132, 8, 0, -1, 1},
	        {5, 140, 3, 1, 40, FS_F16, true, false, 132, 0, 0, -1, 1},
	        {16, 140, 1, 1, 32, FS_F16, false, false, 132, 0, 0, -1, 1},
	        {3, 40, 5, 1, 56, FS_F16, false, false, 1, 0, 0, -1, 1},
	        {1, 1500, 2, 1, 24, FS_F16, true, false, 132, 0, 0, -1,
	                1}, /* more parts than the join has warps */
	};

	check_all(cases, FS_ARRAY_LEN(cases));
}

/* Many rows: causal and full, with keys that are ready for the tensor cores and such that are not. */
static void test_tile(void **state)
{
	static const struct case_ cases[] = {
	        {17, 17, 1, 1, 4, FS_F32, false, false, 1, 0, 0, -1, 1},
	        {20, 20, 1, 1, 16, FS_F16, true, false, 1, 0, 0, -1, 1},
	        {33, 97, 2, 1, 64, FS_F16, true, false, 1, 8, 0, -1, 1},
	        {70, 70, 2, 2, 80, FS_F32, false, false, 1, 3, 0, -1, 1},
	        {40, 65, 3, 3, 72, FS_F32, false, false, 132, 0, 0, -1, 1},
	        {19, 150, 7, 1, 128, FS_F16, true, false, 1, 0, 0, -1, 1},
	        {12, 300, 4, 2, 128, FS_F16, true, false, 132, 0, 0, -1, 1},
	        {150, 150, 1, 1, 96, FS_F16, true, false, 1, 0, 0, -1, 1},
	        {30, 70, 1, 1, 100, FS_F16, true, false, 1, 0, 0, -1, 1},
	        {24, 90, 2, 2, 20, FS_F16, false, false, 7, 5, 0, -1, 1},
	        {9, 64, 4, 2, 36, FS_F16, true, false, 1, 0, 1, -1, 1},
	        {21, 45, 1, 1, 160, FS_F16, true, false, 1, 0, 0, -1, 1},
	        {1, 100, 2, 1, 256, FS_F16, true, false, 132, 0, 0, -1, 1},
	        {70, 33, 1, 1, 256, FS_F32, false, false, 1, 0, 0, -1, 1},
	        {40, 120, 2, 1, 48, FS_F32, false, false, 1, 0, 0, -1, 12},
	        {4, 90, 150, 25, 16, FS_F16, true, false, 1, 0, 0, -1, 1},
	};

	check_all(cases, FS_ARRAY_LEN(cases));
}

static void test_exact(void **state)
{
	static const struct case_ cases[] = {
	        {1, 1, 1, 1, 4, FS_F32, false, true, 1, 0, 0, -1, 1},
	        {1, 1, 1, 1, 4, FS_F16, true, true, 1, 0, 0, -1, 1},
	        {1, 300, 14, 2, 128, FS_F16, true, true, 132, 0, 0, -1, 1},
	        {1, 377, 6, 6, 80, FS_F32, false, true, 2, 0, 0, -1, 1},
	        {5, 64, 2, 2, 36, FS_F32, true, true, 1, 3, 1, -1, 1},
	        {9, 63, 8, 1, 100, FS_F16, true, true, 1, 1, 3, -1, 1},
	        {70, 133, 6, 2, 72, FS_F16, true, true, 20, 0, 0, -1, 1},
	        {37, 37, 2, 2, 256, FS_F32, false, true, 1, 0, 0, -1, 1},
	        {40, 200, 2, 1, 48, FS_F32, false, true, 1, 0, 0, -1, 60},
	        {3, 90, 32, 1, 16, FS_F32, true, true, 132, 0, 0, -1, 1},
	        /* few rows that the tensor-core kernels do not take */
	        {1, 70, 3, 1, 20, FS_F16, true, false, 132, 0, 0, -1, 1},
	        {2, 70, 3, 1, 64, FS_F32, true, false, 1, 0, 0, -1, 1},
	};

	check_all(cases, FS_ARRAY_LEN(cases));
}

/* Places from device memory, grids for more keys than there are. Cells past the end hold what they like. */
static void test_past(void **state)
{
	static const struct case_ cases[] = {
	        {1, 700, 4, 2, 64, FS_F16, true, false, 132, 0, 0, 0, 1},
	        {1, 700, 4, 2, 64, FS_F16, true, false, 132, 0, 0, 36, 1},
	        {1, 700, 4, 2, 80, FS_F16, true, false, 132, 0, 0, 650, 1},
	        {2, 600, 4, 1, 128, FS_F16, true, false, 5, 0, 0, 598, 1},
	        {20, 300, 2, 1, 64, FS_F16, true, false, 132, 0, 0, 100, 1},
	        {20, 300, 2, 1, 64, FS_F32, true, false, 132, 0, 0, 7, 1},
	        {20, 150, 2, 1, 20, FS_F16, true, false, 2, 0, 0, 130, 1},
	        {1, 300, 2, 1, 64, FS_F16, true, true, 132, 0, 0, 100, 1},
	        {3, 300, 2, 1, 64, FS_F32, true, true, 132, 0, 0, 0, 1},
	};

	check_all(cases, FS_ARRAY_LEN(cases));
}

/* No keys at all: no result but zero, and no NaN. */
static void test_no_keys(void **state)
{
	static const int64_t rows[] = {1, 40};

	for (int how = 0; how < 8; how++) {
		struct case_ c = {.n_q = rows[how & 1],
		        .heads = 2,
		        .kv_heads = 1,
		        .head_dim = how & 2 ? 64 : 12,
		        .kv = FS_F16,
		        .exact = how & 4,
		        .before = -1,
		        .spread = 1};
		struct setup s = {0};

		set_up(&c, &s);
		run(&s.a, c.exact, 132);
		for (int64_t i = 0; i < s.out_len; i++)
			assert_true(s.out[i] == 0);
		tear_down(&s);
	}
}

/* Scores far beyond the range of the exponential, and values at the end of f16's: the largest key wins. */
static void check_extremes(int rows, int head_dim, enum fs_dtype kv, bool exact, int sms)
{
	int64_t n = 300, width = head_dim;
	float *q = need((size_t)(rows * width) * sizeof(*q)), *out = randoms(rows * width);
	float *kf = need((size_t)(n * width) * sizeof(*kf)), *vf = need((size_t)(n * width) * sizeof(*vf));
	uint16_t *kh = need((size_t)(n * width) * sizeof(*kh)), *vh = need((size_t)(n * width) * sizeof(*vh));
	struct fs_attn a = {.q = q, .q_stride = width, .k = kv == FS_F16 ? (void *)kh : (void *)kf};

	for (int64_t i = 0; i < rows * width; i++)
		q[i] = i % width ? 0 : 1e4f;
	for (int64_t i = 0; i < n * width; i++) {
		kf[i] = i % width ? 0 : i / width == 77 ? 6e4f : -200.0f * (float)(i / width);
		vf[i] = i / width == 76 ? 65504 : (float)((i / width + i) % 512);
		kh[i] = fs_f32_to_f16(kf[i]);
		vh[i] = fs_f32_to_f16(vf[i]);
	}
	a.v = kv == FS_F16 ? (void *)vh : (void *)vf;
	a.kv_type = kv;
	a.kv_stride = a.out_stride = width;
	a.out = out;
	a.n_q = rows;
	a.n_kv = n;
	a.heads = a.kv_heads = 1;
	a.head_dim = head_dim;
	a.scale = 1;
	run(&a, exact, sms);
	for (int64_t i = 0; i < rows * width; i++)
		assert_true(out[i] == vf[77 * width + i % width]);
	free(q);
	free(out);
	free(kf);
	free(vf);
	free(kh);
	free(vh);
}

static void test_extremes(void **state)
{
	check_extremes(1, 64, FS_F16, false, 1);
	check_extremes(1, 64, FS_F16, false, 132);
	check_extremes(20, 64, FS_F16, false, 1);
	check_extremes(20, 64, FS_F32, false, 132);
	check_extremes(3, 64, FS_F32, true, 1);
	check_extremes(3, 20, FS_F16, true, 132);
}

/* f32 beyond f16's range is held to its end, where infinity would make NaN of weights that are 0. */
static void test_range(void **state)
{
	float q[20 * 8], k[3 * 8] = {0}, v[3 * 8], out[20 * 8];
	struct fs_attn a = {
	        .q = q, .q_stride = 8, .k = k, .v = v, .kv_stride = 8, .kv_type = FS_F32, .out = out};

	for (int i = 0; i < 20 * 8; i++)
		q[i] = 1e9f;
	for (int i = 0; i < 3 * 8; i++) {
		k[i] = i < 8 ? 1e6f : -1e6f;
		v[i] = i < 8 ? 5 : 1e6f;
	}
	a.out_stride = 8;
	a.n_q = 20;
	a.n_kv = 3;
	a.heads = a.kv_heads = 1;
	a.head_dim = 8;
	a.scale = 1;
	run(&a, false, 1);
	for (int i = 0; i < 20 * 8; i++)
		assert_true(out[i] == 5);
}

/* Scratch asked for without knowing the card is enough for each; too many rows are refused. */
static void test_plan(void **state)
{
	struct fs_attn a = {.n_q = (int64_t)1 << 40, .n_kv = 10, .heads = 2, .kv_heads = 1, .head_dim = 64};

	a.kv_type = FS_F16;
	assert_true(fs_cuk_attention(NULL, &a, false, 1, NULL) != 0);
	for (int sms = 1; sms < 600; sms = sms * 2 + 1)
		check_case(&(struct case_){2, 400, 2, 1, 32, FS_F16, true, false, sms, 0, 0, -1, 1}, sms);
	a.n_q = 1000; /* rows enough for every card: nothing is split, nothing narrowed */
	a.heads = a.kv_heads = 64;
	a.kv_stride = 4096;
	a.n_kv = 1000;
	assert_int_equal(fs_cuk_attention_scratch(&a, false), 0);
	a.kv_type = FS_F32; /* keys and values in 16 bits */
	assert_int_equal(fs_cuk_attention_scratch(&a, false), 2 * 2 * 1000 * 4096);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
	        cmocka_unit_test(test_decode),
	        cmocka_unit_test(test_tile),
	        cmocka_unit_test(test_exact),
	        cmocka_unit_test(test_past),
	        cmocka_unit_test(test_no_keys),
	        cmocka_unit_test(test_extremes),
	        cmocka_unit_test(test_range),
	        cmocka_unit_test(test_plan),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
