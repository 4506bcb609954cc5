/*
 * Products of every weight type at every instruction-set level against sums in double over the reference
 * dequantisation, at odd sizes, on few and many rows, with and without bias and accumulation. Tolerances: f32
 * rounding of the sum of magnitudes; half a step of the activations' blocks for the int8 form; 2^-8 of the
 * magnitudes for bf16.
 */
#include "product_util.h"

#include <limits.h>

static const enum fs_dtype types[] = {
        FS_F32, FS_F16, FS_BF16, FS_Q8_0, FS_Q4_0, FS_Q4_1, FS_Q5_0, FS_Q5_1, FS_Q4_K, FS_Q5_K, FS_Q6_K};

enum form { FORM_F32, FORM_INT8, FORM_BF16 };

/* Largest error that the form allows for output o of row r, given the sum of magnitudes. */
static double allowed(const struct product *p, enum form form, int64_t r, int64_t o, double magnitude)
{
	double steps = 0;

	if (form == FORM_BF16)
		return magnitude / 128;
	if (form == FORM_F32)
		return magnitude * 2e-6 + 1e-6;
	for (int64_t b = 0; b < p->s.in / 32; b++) {
		double max = 0, w = 0;

		for (int64_t i = 32 * b; i < 32 * b + 32; i++) {
			max = fmax(max, fabs((double)p->x[r * p->s.in + i]));
			w += fabs((double)p->deq[o * p->s.in + i]);
		}
		steps += max / 127 / 2 * w;
	}
	return steps * 1.01 + magnitude * 1e-5;
}

static void check(
        const struct product *p, enum form form, const float *y, bool bias, bool add, const char *what)
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
			near(y[r * p->s.out + o], sum, allowed(p, form, r, o, magnitude), what,
			        r * p->s.out + o);
		}
	}
}

static void run(struct fs_dev *d, const struct product *p, bool packed, enum form form)
{
	struct fs_gguf_tensor t = {
	        .name = "w", .type = p->type, .n_dims = 2, .ne = {p->s.in, p->s.out, 1, 1}};
	struct fs_weight w;
	struct fs_errbuf e;
	char what[128];
	size_t bytes = (size_t)(p->s.n * p->s.out) * sizeof(float);
	float *y = need(bytes);

	t.data = p->w;
	t.nbytes = fs_dtype_row_bytes(p->type, p->s.in) * (size_t)p->s.out;
	assert_int_equal(fs_weight_load(d, &t, packed, &w, &e), FS_OK);
	for (int k = 0; k < 4; k++) {
		bool bias = k & 1, add = k & 2;

		snprintf(what, sizeof(what), "%s %s in %d out %d n %d%s%s%s", fs_dev_describe(d),
		        fs_dtype_info(p->type)->name, (int)p->s.in, (int)p->s.out, (int)p->s.n,
		        bias ? " bias" : "", add ? " add" : "", packed ? " packed" : "");
		memcpy(y, p->y0, bytes);
		fs_op_matmul(d, &w, bias ? p->bias : NULL, p->x, y, p->s.n, add);
		no_error(d);
		check(p, form, y, bias, add, what);
	}
	fs_weight_finish(d, &w);
	free(y);
}

static const struct shape shapes[] = {{256, 1, 1}, {512, 37, 1}, {256, 19, 2}, {768, 5, 3}, {256, 33, 4},
        {512, 7, 5}, {512, 11, 16}, {256, 6, 17}, {256, 9, 31}, {256, 5, 33}, {256, 21, 8}, {256, 35, 9},
        {512, 67, 45}, {256, 130, 131}};
static const struct shape small_shapes[] = {{32, 3, 1}, {96, 17, 2}, {160, 9, 7}, {288, 40, 40}};
static const struct shape odd_shapes[] = {
        {1, 1, 1}, {7, 5, 3}, {33, 3, 2}, {100, 31, 6}, {45, 9, 50}, {130, 70, 33}};

/* int8_rows: up to this many rows the device is expected to take quantised types in int8; many: its form of
 * large products. */
static void all_types(struct fs_dev *d, int int8_rows, enum form many, bool packed)
{
	const size_t n = FS_ARRAY_LEN(shapes), n_small = FS_ARRAY_LEN(small_shapes),
	             n_odd = FS_ARRAY_LEN(odd_shapes);

	for (size_t i = 0; i < FS_ARRAY_LEN(types); i++) {
		for (size_t s = 0; s < n + n_small + n_odd; s++) {
			struct shape shape = s < n             ? shapes[s]
			                     : s < n + n_small ? small_shapes[s - n]
			                                       : odd_shapes[s - n - n_small];
			struct product p;
			enum form form = shape.n > 8 ? many : FORM_F32;

			if (shape.in % fs_dtype_info(types[i])->block_elems)
				continue;
			if (fs_is_quantized(types[i]) && shape.n <= int8_rows)
				form = FORM_INT8;
			p = make(types[i], shape);
			run(d, &p, packed, form);
			drop(&p);
		}
	}
}

static void test_f32(void **state)
{
	for (int level = 0; level <= (int)best_level(); level++) {
		struct fs_dev *d = device((enum fs_cpu_level)level, FS_PRECISION_F32, false);

		all_types(d, 0, FORM_F32, false);
		all_types(d, 0, FORM_F32, true);
		fs_dev_close(d);
	}
}

static void test_auto(void **state)
{
	static const int int8_rows[] = {[FS_CPU_SCALAR] = 8, [FS_CPU_AVX2] = 32, [FS_CPU_AVX512] = INT_MAX};

	for (int level = 0; level <= (int)best_level(); level++) {
		struct fs_dev *d = device((enum fs_cpu_level)level, FS_PRECISION_AUTO, false);

		all_types(d, int8_rows[level], FORM_F32, false);
		fs_dev_close(d);
	}
}

static void test_bf16(void **state)
{
	bool bf16;
	struct fs_dev *d;

	if (fs_cpu_detect(&bf16) != FS_CPU_AVX512 || !bf16)
		skip();
	d = device(FS_CPU_AVX512, FS_PRECISION_AUTO, true);
	all_types(d, INT_MAX, FORM_BF16, false);
	all_types(d, 16, FORM_BF16, true);
	fs_dev_close(d);
}

/* The fast int8 forms give the scalar form's numbers to f32 rounding, since the integers are the same. */
static void test_int8_levels_agree(void **state)
{
	struct fs_dev *ref = device(FS_CPU_SCALAR, FS_PRECISION_AUTO, false);

	for (int level = 1; level <= (int)best_level(); level++) {
		struct fs_dev *d = device((enum fs_cpu_level)level, FS_PRECISION_AUTO, false);

		for (size_t i = 0; i < FS_ARRAY_LEN(types); i++) {
			struct product p = make(types[i], (struct shape){512, 23, 3});
			struct fs_weight w = {.type = p.type, .in = 512, .out = 23, .data = p.w};
			float *a = need(3 * 23 * sizeof(*a)), *b = need(3 * 23 * sizeof(*b));

			fs_op_matmul(ref, &w, NULL, p.x, a, 3, false);
			fs_op_matmul(d, &w, NULL, p.x, b, 3, false);
			for (int k = 0; k < 3 * 23; k++)
				near(b[k], (double)a[k], 2e-3, fs_dtype_info(p.type)->name, k);
			free(a);
			free(b);
			drop(&p);
		}
		fs_dev_close(d);
	}
	fs_dev_close(ref);
}

/* Whole numbers that every type and form holds exactly: the answer is known without any of our code. */
static void test_exact(void **state)
{
	for (int level = 0; level <= (int)best_level(); level++) {
		struct fs_dev *d = device((enum fs_cpu_level)level, FS_PRECISION_F32, false);
		float w[3][4] = {{1, 2, 3, 4}, {-1, 0, 1, 0}, {0.5f, 0.5f, 0.5f, 0.5f}};
		float x[2][4] = {{1, 1, 1, 1}, {2, -4, 6, -8}};
		float want[2][3] = {{10, 0, 2}, {-20, 4, -2}};
		float y[2][3];
		struct fs_weight fw = {.type = FS_F32, .in = 4, .out = 3, .data = w};

		fs_op_matmul(d, &fw, NULL, &x[0][0], &y[0][0], 2, false);
		no_error(d);
		assert_memory_equal(y, want, sizeof(want));
		fs_dev_close(d);
	}
}

static void test_embed(void **state)
{
	int32_t ids[3] = {2, 0, 2};
	float y[3 * 256];

	for (int level = 0; level <= (int)best_level(); level++) {
		struct fs_dev *d = device((enum fs_cpu_level)level, FS_PRECISION_AUTO, false);

		for (size_t i = 0; i < FS_ARRAY_LEN(types); i++) {
			struct product p = make(types[i], (struct shape){256, 3, 1});
			struct fs_weight w = {.type = p.type, .in = 256, .out = 3, .data = p.w};

			fs_op_embed(d, &w, ids, y, 3);
			no_error(d);
			for (int r = 0; r < 3; r++)
				for (int k = 0; k < 256; k++)
					near(y[r * 256 + k], (double)p.deq[ids[r] * 256 + k],
					        1e-6 + 1e-6 * fabs((double)p.deq[ids[r] * 256 + k]),
					        fs_dtype_info(p.type)->name, k);
			drop(&p);
		}
		fs_dev_close(d);
	}
}

/* Products of so many numbers of rows that plans of oneDNN's are thrown away and made again: the four of one
 * product must be there together. */
static void test_more_shapes_than_plans(void **state)
{
	struct fs_dev_opts o = {.device = "cpu", .threads = 1, .precision = FS_PRECISION_F32};
	struct product p[2] = {
	        make(FS_F32, (struct shape){8, 256, 511}), make(FS_F32, (struct shape){8, 288, 511})};
	struct fs_dev *d = NULL;

	assert_int_equal(fs_dev_open(&o, &d, NULL), FS_OK);
	for (int64_t n = 257; n <= 511; n++) {
		for (int i = 0; i < 2; i++) {
			p[i].s.n = n;
			run(d, &p[i], false, FORM_F32);
		}
	}
	for (int i = 0; i < 2; i++)
		drop(&p[i]);
	fs_dev_close(d);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
	        cmocka_unit_test(test_more_shapes_than_plans),
	        cmocka_unit_test(test_exact),
	        cmocka_unit_test(test_f32),
	        cmocka_unit_test(test_auto),
	        cmocka_unit_test(test_bf16),
	        cmocka_unit_test(test_int8_levels_agree),
	        cmocka_unit_test(test_embed),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
