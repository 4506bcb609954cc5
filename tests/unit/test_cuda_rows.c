/*
 * The CUDA kernels of norms, rotary embedding, activations, sums and conversions, run by the emulation of
 * tests/simt: against formulas in double, and against the CPU back end where bits must agree; at odd sizes,
 * at addresses that allow 16-byte loads and at such that do not, in place, with strides.
 */
#include "compute_util.h"

#include "common/compute/cuda/launch.h"

static const int64_t sizes[] = {1, 3, 4, 7, 16, 31, 33, 64, 100, 257, 1000, 2049};

/* n floats in memory of exactly shift + n: the allocator's alignment or an odd one, and the sanitizer sees
 * what lies beyond. */
struct array {
	float *base, *at;
};

static struct array array(int64_t n, int shift)
{
	struct array a = {.base = randoms(n + shift)};

	a.at = a.base + shift;
	return a;
}

static float *copy(const float *x, int64_t n)
{
	float *y = need((size_t)n * sizeof(*y));

	memcpy(y, x, (size_t)n * sizeof(*y));
	return y;
}

/* ---- conversions ---- */

static void check_narrow(int64_t n, int shift, enum fs_dtype to)
{
	static const float special[] = {0, -0.0f, 65504, 65520, -1e6f, 1e-8f, 5.9604645e-8f, 6e-5f, 2049,
	        2051, INFINITY, -INFINITY, 3.4e38f, 1e-40f};
	struct array x = array(n, shift);
	uint16_t *y = need((size_t)(n + shift) * sizeof(*y));

	for (int64_t i = 0; i < n && i < (int64_t)FS_ARRAY_LEN(special); i++)
		x.at[i] = special[i];
	assert_int_equal(fs_cuk_narrow(NULL, x.at, y + shift, n, to), 0);
	for (int64_t i = 0; i < n; i++)
		assert_int_equal(y[shift + i], to == FS_F16
		                                       ? fs_f32_to_f16(fminf(fmaxf(x.at[i], -65504), 65504))
		                                       : fs_f32_to_bf16(x.at[i]));
	free(x.base);
	free(y);
}

static void test_narrow(void **state)
{
	for (size_t i = 0; i < FS_ARRAY_LEN(sizes); i++) {
		for (int shift = 0; shift < 4; shift += 3) {
			check_narrow(sizes[i], shift, FS_F16);
			check_narrow(sizes[i], shift, FS_BF16);
		}
	}
}

static void check_kv_store(
        enum fs_dtype type, int64_t n, int64_t width, int64_t stride, int32_t past, int shift)
{
	struct fs_dev *d = device(FS_CPU_SCALAR, FS_PRECISION_AUTO, false);
	int64_t cells = n + past + 3;
	size_t bytes = (size_t)(cells * width) * (type == FS_F16 ? 2 : 4);
	struct array src = array((n - 1) * stride + width, shift);
	uint8_t *got = need(bytes), *want = need(bytes);
	struct fs_kv_store s = {.dst = got,
	        .type = type,
	        .at = 1,
	        .past = &past,
	        .src = src.at,
	        .src_stride = stride,
	        .n = n,
	        .width = width};

	memset(got, 0x5a, bytes);
	memset(want, 0x5a, bytes);
	src.at[0] = 1e6f; /* infinity in f16, on both */
	assert_int_equal(fs_cuk_kv_store(NULL, &s), 0);
	s.dst = want;
	fs_op_kv_store(d, &s);
	no_error(d);
	assert_memory_equal(got, want, bytes);
	s.dst = got;
	s.at += past;
	s.past = NULL;
	memset(got, 0x5a, bytes);
	assert_int_equal(fs_cuk_kv_store(NULL, &s), 0);
	assert_memory_equal(got, want, bytes);
	free(src.base);
	free(got);
	free(want);
	fs_dev_close(d);
}

static void test_kv_store(void **state)
{
	static const enum fs_dtype types[] = {FS_F16, FS_F32};

	for (size_t t = 0; t < FS_ARRAY_LEN(types); t++) {
		check_kv_store(types[t], 1, 256, 256, 0, 0);
		check_kv_store(types[t], 3, 128, 132, 17, 0);
		check_kv_store(types[t], 3, 128, 129, 17, 0);
		check_kv_store(types[t], 5, 36, 36, 2, 1);
		check_kv_store(types[t], 2, 19, 23, 1, 0);
	}
}

/* ---- sums ---- */

static void check_bias(int64_t n, int64_t out, int shift, bool add)
{
	struct array b = array(out, shift), y = array(n * out, shift);
	float *before = copy(y.at, n * out);

	assert_int_equal(fs_cuk_bias(NULL, b.at, y.at, n, out, add), 0);
	for (int64_t i = 0; i < n * out; i++)
		assert_true(y.at[i] == (add ? before[i] : 0) + b.at[i % out]);
	free(b.base);
	free(y.base);
	free(before);
}

static void check_add(int64_t n, int shift)
{
	struct array x = array(n, shift), y = array(n, shift);
	float *before = copy(y.at, n);

	assert_int_equal(fs_cuk_add(NULL, y.at, x.at, n), 0);
	for (int64_t i = 0; i < n; i++)
		assert_true(y.at[i] == before[i] + x.at[i]);
	free(x.base);
	free(y.base);
	free(before);
}

static void test_sums(void **state)
{
	for (size_t i = 0; i < FS_ARRAY_LEN(sizes); i++) {
		for (int shift = 0; shift < 2; shift++) {
			check_bias(3, sizes[i], shift, false);
			check_bias(2, sizes[i], shift, true);
			check_add(sizes[i], shift);
		}
	}
}

/* ---- norms ---- */

struct norm_case {
	bool rms, bias, in_place;
	int64_t n, dim;
	int shift, b_shift;
	float middle;
};

/* Sums are trees of f32: their relative error is some roundings (2^-24 each), whatever the length. What is
 * left of a mean far from zero is its own rounding, but squares of the middle must not come into it. */
static void check_norm(const struct norm_case *c)
{
	int64_t n = c->n, dim = c->dim;
	struct array x = array(n * dim, c->shift), w = array(dim, c->shift), b = array(dim, c->b_shift);
	struct array y = array(n * dim, c->shift);
	float *before;

	for (int64_t i = 0; i < n * dim; i++)
		x.at[i] += c->middle;
	before = copy(x.at, n * dim);
	if (c->rms)
		fs_cuk_rms_norm(NULL, x.at, w.at, c->in_place ? x.at : y.at, n, dim, 1e-5f);
	else
		fs_cuk_layer_norm(
		        NULL, x.at, w.at, c->bias ? b.at : NULL, c->in_place ? x.at : y.at, n, dim, 1e-5f);
	for (int64_t r = 0; r < n; r++) {
		double mean = 0, var = 0;

		for (int64_t i = 0; i < dim && !c->rms; i++)
			mean += (double)before[r * dim + i] / (double)dim;
		for (int64_t i = 0; i < dim; i++)
			var += pow((double)before[r * dim + i] - mean, 2) / (double)dim;
		for (int64_t i = 0; i < dim; i++) {
			double v = ((double)before[r * dim + i] - mean) / sqrt(var + 1e-5) * (double)w.at[i];
			double near_to =
			        1e-6 * (1 + fabs(v)) + 4e-7 * (double)fabsf(c->middle) / sqrt(var + 1e-5);

			v += c->bias && !c->rms ? (double)b.at[i] : 0;
			near((c->in_place ? x.at : y.at)[r * dim + i], v, near_to, c->rms ? "rms" : "layer",
			        r * dim + i);
		}
	}
	free(x.base);
	free(w.base);
	free(b.base);
	free(y.base);
	free(before);
}

static void test_norms(void **state)
{
	static const int64_t dims[] = {2, 3, 8, 31, 33, 64, 128, 511, 512, 513, 516, 1000, 2052, 5001, 8192};

	for (size_t i = 0; i < FS_ARRAY_LEN(dims); i++) {
		for (int how = 0; how < 8; how++) {
			struct norm_case c = {.rms = how & 1,
			        .bias = how & 4,
			        .in_place = how & 2,
			        .n = dims[i] > 1000 ? 2 : 5,
			        .dim = dims[i],
			        .shift = how / 2 % 2,
			        .b_shift = how / 2 % 3};

			check_norm(&c);
		}
	}
	check_norm(&(struct norm_case){.rms = true, .n = 300, .dim = 1});
	check_norm(&(struct norm_case){.rms = true, .n = 131, .dim = 128, .in_place = true});
	check_norm(&(struct norm_case){.n = 3, .dim = 1280, .middle = 1000});
	check_norm(&(struct norm_case){.n = 3, .dim = 100, .middle = -1000, .bias = true});
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

static void check_act(enum fs_act act, int64_t n, int shift)
{
	struct array x = array(n, shift), up = array(n, shift), y = array(n, shift);
	float *before;

	for (int64_t i = 0; i < n; i++)
		x.at[i] *= 6;
	before = copy(x.at, n);
	assert_int_equal(fs_cuk_gate(NULL, act, x.at, up.at, y.at, n), 0);
	for (int64_t i = 0; i < n; i++)
		near(y.at[i], act_of(act, (double)before[i]) * (double)up.at[i],
		        6e-7 * (1 + fabs((double)before[i])), "gate", i);
	memcpy(y.at, up.at, (size_t)n * sizeof(float));
	assert_int_equal(fs_cuk_gate(NULL, act, x.at, y.at, y.at, n), 0);
	for (int64_t i = 0; i < n; i++)
		near(y.at[i], act_of(act, (double)before[i]) * (double)up.at[i],
		        6e-7 * (1 + fabs((double)before[i])), "gate over up", i);
	assert_int_equal(fs_cuk_act(NULL, act, x.at, n), 0);
	for (int64_t i = 0; i < n; i++)
		near(x.at[i], act_of(act, (double)before[i]), 3e-7 * (1 + fabs((double)before[i])), "act", i);
	free(x.base);
	free(up.base);
	free(y.base);
	free(before);
}

/* The ends of the range. */
static void check_act_ends(enum fs_act act)
{
	float x[13] = {0, 1e30f, -1e30f, 88, -88, 1e-30f, -120, 300, NAN, INFINITY, -1e-30f, 3e38f, -3e38f};

	assert_int_equal(fs_cuk_act(NULL, act, x, 13), 0);
	assert_true(x[0] == 0);
	assert_true(x[1] == 1e30f);
	assert_true(x[2] == 0);
	assert_true(x[3] == 88);
	near(x[4], 0, 1e-35, "at -88", act);
	near(x[5], 0.5e-30, 1e-36, "at 1e-30", act);
	near(x[6], 0, 1e-37, "at -120", act);
	assert_true(x[7] == 300);
	assert_true(isnan(x[8]));
	assert_true(x[9] == INFINITY);
	near(x[10], -0.5e-30, 1e-36, "at -1e-30", act);
	assert_true(x[11] == 3e38f);
	assert_true(x[12] == 0);
}

static void test_acts(void **state)
{
	for (int act = FS_GELU_ERF; act <= FS_SILU; act++) {
		for (size_t i = 0; i < FS_ARRAY_LEN(sizes); i++) {
			check_act((enum fs_act)act, sizes[i], 0);
			check_act((enum fs_act)act, sizes[i], 1);
		}
		check_act_ends((enum fs_act)act);
	}
}

/* ---- rope ---- */

struct rope_case {
	int pairs, head_dim, heads, axes;
	int64_t n, stride;
	bool interleaved;
	int32_t far; /* positions below */
};

/* The angle is rounded to f32 as the CPU does it; its cosine is good to some units in the last place. */
static float *check_angles(const struct fs_rope *r, const int32_t *pos, int64_t n)
{
	float *cs = need((size_t)(n * r->n_pairs * 2) * sizeof(*cs));

	assert_int_equal(fs_cuk_rope_angles(NULL, r, pos, cs, n), 0);
	for (int64_t i = 0; i < n; i++) {
		for (int p = 0; p < r->n_pairs; p++) {
			float angle = (float)pos[r->axis[p] * n + i] * r->freq[p];
			int64_t at = 2 * (i * r->n_pairs + p);

			near(cs[at], cos((double)angle), 2.5e-7, "cos", at);
			near(cs[at + 1], sin((double)angle), 2.5e-7, "sin", at);
		}
	}
	return cs;
}

static void check_rope(const struct rope_case *c)
{
	struct fs_rope r = {.n_pairs = c->pairs, .interleaved = c->interleaved, .n_axes = c->axes};
	int64_t width = (int64_t)c->heads * c->head_dim, all = (c->n - 1) * c->stride + width;
	float *x = randoms(all), *y = copy(x, all), *cs;
	int32_t *pos = need((size_t)(c->n * c->axes) * sizeof(*pos));

	for (int p = 0; p < c->pairs; p++) {
		r.freq[p] = powf(10000.0f, -(float)p / (float)c->pairs);
		r.axis[p] = (uint8_t)(p % c->axes);
	}
	for (int64_t i = 0; i < c->n * c->axes; i++)
		pos[i] = (int32_t)(rng() % (uint32_t)c->far);
	cs = check_angles(&r, pos, c->n);
	assert_int_equal(fs_cuk_rope(NULL, &r, cs, y, c->stride, c->n, c->heads, c->head_dim), 0);
	for (int64_t e = 0; e < all; e++) {
		int64_t row = e / c->stride, in_row = e % c->stride, in_head = in_row % c->head_dim;
		int64_t p = c->interleaved ? in_head / 2 : in_head % FS_MAX(1, c->pairs);
		bool second = c->interleaved ? in_head & 1 : in_head >= c->pairs;
		const float *a = cs + 2 * (row * c->pairs + p);

		if (in_row >= width || in_head >= 2 * c->pairs) {
			assert_true(y[e] == x[e]);
			continue;
		}
		near(y[e],
		        (double)x[e] * (double)a[0] +
		                (second ? 1 : -1) * (double)a[1] *
		                        (double)x[e + (second ? -1 : 1) * (c->interleaved ? 1 : c->pairs)],
		        5e-7, "rope", e);
	}
	free(x);
	free(y);
	free(cs);
	free(pos);
}

static void test_rope(void **state)
{
	static const struct rope_case cases[] = {
	        {16, 32, 3, 1, 5, 101, false, 300},
	        {32, 64, 2, 1, 40, 128, true, 300},
	        {20, 80, 4, 2, 7, 325, false, 50},
	        {5, 12, 1, 4, 33, 12, false, 300},
	        {5, 12, 7, 3, 3, 84, true, 300},
	        {64, 128, 12, 3, 1, 1536, false, 32768},
	        {64, 128, 2, 1, 65, 256, true, 131072},
	        {128, 256, 1, 1, 2, 256, false, 1 << 24},
	        {0, 8, 2, 1, 3, 16, false, 10},
	};

	for (size_t i = 0; i < FS_ARRAY_LEN(cases); i++)
		check_rope(&cases[i]);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
	        cmocka_unit_test(test_narrow),
	        cmocka_unit_test(test_kv_store),
	        cmocka_unit_test(test_sums),
	        cmocka_unit_test(test_norms),
	        cmocka_unit_test(test_acts),
	        cmocka_unit_test(test_rope),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
