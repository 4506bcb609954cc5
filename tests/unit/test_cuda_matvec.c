/*
 * Products of one to eight rows on the emulated card: every type at odd sizes against sums in double over the
 * reference's numbers, with and without bias and accumulation, rows of W whole and shared between warps.
 * Bounds: with x in f32 the rounding of the sum of magnitudes; with x in int8 half a step of each block of 32
 * on top of it, and without that where int8 holds x exactly.
 */
#include "cuda_util.h"

struct shape {
	int64_t in, out, n;
};

struct product {
	struct shape s;
	struct weight w;
	float *x, *bias, *y0, *y; /* y0: what y holds before */
	void *xq;
};

static struct product make(enum fs_dtype type, struct shape s)
{
	struct product p = {.s = s, .w = weight_make(type, s.in, s.out)};
	size_t n = (size_t)(s.n * s.in), m = (size_t)(s.n * s.out);

	p.x = device_memory(n * 4);
	for (size_t i = 0; i < n; i++)
		p.x[i] = uniform(-2.0f, 2.0f);
	p.bias = randoms(s.out);
	p.y0 = randoms((int64_t)m);
	p.y = device_memory(m * 4);
	if (s.in % 32 == 0) {
		p.xq = device_memory(fs_cuk_quantized_bytes(s.n, s.in));
		assert_int_equal(fs_cuk_quantize(NULL, p.x, p.xq, s.n, s.in), 0);
	}
	return p;
}

static void drop(struct product *p)
{
	weight_drop(&p->w);
	free(p->x);
	free(p->bias);
	free(p->y0);
	free(p->y);
	free(p->xq);
}

/* Half a step of every block of row r times the weights that it meets, for output o. */
static double step_error(const struct product *p, int64_t r, int64_t o)
{
	double error = 0;

	for (int64_t b = 0; b < p->s.in / 32; b++) {
		double max = 0, w = 0;

		for (int64_t i = 32 * b; i < 32 * b + 32; i++) {
			max = fmax(max, fabs((double)p->x[r * p->s.in + i]));
			w += fabs((double)p->w.numbers[o * p->s.in + i]);
		}
		error += max / 127 / 2 * w;
	}
	return error * 1.001;
}

static void check(const struct product *p, bool q8, bool bias, bool add, const char *what)
{
	const struct shape *s = &p->s;

	for (int64_t r = 0; r < s->n; r++) {
		for (int64_t o = 0; o < s->out; o++) {
			double sum =
			        (bias ? (double)p->bias[o] : 0) + (add ? (double)p->y0[r * s->out + o] : 0);
			double magnitude = fabs(sum);

			for (int64_t i = 0; i < s->in; i++) {
				double v = (double)p->w.numbers[o * s->in + i] * (double)p->x[r * s->in + i];

				sum += v;
				magnitude += fabs(v);
			}
			near(p->y[r * s->out + o], sum,
			        magnitude * 1e-5 + 1e-6 + (q8 ? step_error(p, r, o) : 0), what,
			        r * s->out + o);
		}
	}
}

/* whole: int8 holds x without loss */
static void multiply(struct product *p, bool q8, bool whole, int form)
{
	struct fs_cuk_matvec m = {.type = p->w.type,
	        .w = p->w.packed,
	        .in = p->s.in,
	        .out = p->s.out,
	        .n = p->s.n,
	        .bias = form & 1 ? p->bias : NULL,
	        .x = p->x,
	        .xq = q8 ? p->xq : NULL,
	        .y = p->y,
	        .add = form & 2};
	char what[128];

	snprintf(what, sizeof(what), "%s%s in %d out %d n %d form %d", fs_dtype_info((int)p->w.type)->name,
	        q8 ? " int8" : "", (int)p->s.in, (int)p->s.out, (int)p->s.n, form);
	if (m.add)
		memcpy(p->y, p->y0, (size_t)(p->s.n * p->s.out) * 4);
	else
		memset(p->y, 0xff, (size_t)(p->s.n * p->s.out) * 4);
	assert_int_equal(fs_cuk_matvec(NULL, &m), 0);
	check(p, q8 && !whole, m.bias, m.add, what);
}

static void each(const struct shape *shapes, size_t count)
{
	for (size_t t = 0; t < FS_ARRAY_LEN(all_types); t++) {
		for (size_t i = 0; i < count; i++) {
			struct product p;

			if (shapes[i].in % fs_dtype_info((int)all_types[t])->block_elems)
				continue;
			p = make(all_types[t], shapes[i]);
			for (int form = 0; form < 4; form++) {
				multiply(&p, false, false, form);
				if (fs_cuk_matvec_wants_q8(all_types[t], shapes[i].in))
					multiply(&p, true, false, form);
			}
			drop(&p);
		}
	}
}

static void test_rows(void **state)
{
	static const struct shape shapes[] = {{256, 5, 1}, {512, 3, 2}, {256, 7, 3}, {256, 2, 4}, {512, 1, 5},
	        {256, 9, 6}, {256, 3, 7}, {768, 4, 8}};

	simt_set_sms(1); /* a row is one warp's, or two warps' */
	each(shapes, FS_ARRAY_LEN(shapes));
}

static void test_odd_rows(void **state)
{
	static const struct shape shapes[] = {{32, 1, 1}, {96, 17, 2}, {1184, 3, 1}, {160, 5, 3}, {8, 3, 1},
	        {1, 1, 1}, {7, 5, 2}, {33, 3, 8}, {100, 9, 1}, {264, 2, 4}};

	simt_set_sms(4);
	each(shapes, FS_ARRAY_LEN(shapes));
}

/* x that int8 holds exactly (whole numbers up to 127 of a power of two, block by block): nothing is lost. */
static void test_whole_numbers(void **state)
{
	static const struct shape shapes[] = {
	        {256, 5, 1}, {512, 3, 2}, {256, 3, 4}, {1024, 2, 7}, {96, 3, 1}};

	simt_set_sms(4);
	for (size_t t = 0; t < FS_ARRAY_LEN(all_types); t++) {
		for (size_t i = 0; i < FS_ARRAY_LEN(shapes); i++) {
			const struct shape *s = &shapes[i];
			struct product p;

			if (!fs_is_quantized(all_types[t]) ||
			        s->in % fs_dtype_info((int)all_types[t])->block_elems)
				continue;
			p = make(all_types[t], *s);
			for (int64_t k = 0; k < s->n * s->in; k++)
				p.x[k] = ldexpf(k % 32 ? (float)(rng() % 255) - 127.0f : 127.0f,
				        (int)(k / 32 % 5) - 8);
			assert_int_equal(fs_cuk_quantize(NULL, p.x, p.xq, s->n, s->in), 0);
			multiply(&p, true, true, 3);
			drop(&p);
		}
	}
}

/* Long rows, few of them: four warps a row; many short ones: one. */
static void test_shared_rows(void **state)
{
	static const struct shape few[] = {{4608, 3, 1}, {2816, 2, 3}}, many[] = {{256, 203, 1}};

	simt_set_sms(132);
	each(few, FS_ARRAY_LEN(few));
	simt_set_sms(1);
	each(many, FS_ARRAY_LEN(many));
}

/* Whole numbers that every form holds exactly: the answers are known without any of our code. */
static void test_exact(void **state)
{
	enum { IN = 64 };
	float w[2][IN], *x = device_memory(IN * 4), y[2] = {0};
	uint16_t half[2][IN];
	void *packed = device_memory(fs_cuk_packed_bytes(FS_F16, IN, 2));
	struct fs_cuk_matvec m = {.type = FS_F16, .w = packed, .in = IN, .out = 2, .n = 1, .x = x, .y = y};
	float want[2] = {0, 0};

	for (int i = 0; i < IN; i++) {
		w[0][i] = (float)(i % 5 - 2);
		w[1][i] = (float)(i % 3);
		x[i] = (float)(i % 7 - 3);
		for (int o = 0; o < 2; o++) {
			half[o][i] = fs_f32_to_f16(w[o][i]);
			want[o] += w[o][i] * x[i];
		}
	}
	assert_int_equal(fs_cuk_pack(NULL, FS_F16, half, 0, 2, packed, IN, 2), 0);
	assert_int_equal(fs_cuk_matvec(NULL, &m), 0);
	assert_memory_equal(y, want, sizeof(want));
	free(packed);
	free(x);
}

/* x that begins anywhere: a row in the middle of a tensor of odd width. */
static void test_any_address(void **state)
{
	static const enum fs_dtype types[] = {FS_F16, FS_F32, FS_Q4_K};

	for (size_t t = 0; t < FS_ARRAY_LEN(types); t++) {
		struct product p = make(types[t], (struct shape){256, 3, 2});
		float *x = p.x, *shifted = device_memory((2 * 256 + 1) * 4);

		memcpy(shifted + 1, x, (size_t)2 * 256 * 4);
		p.x = shifted + 1;
		assert_int_equal(fs_cuk_quantize(NULL, p.x, p.xq, 2, 256), 0);
		multiply(&p, false, false, 1);
		if (fs_cuk_matvec_wants_q8(types[t], 256))
			multiply(&p, true, false, 1);
		p.x = x;
		free(shifted);
		drop(&p);
	}
}

/* Zeros, tiny and huge numbers keep their size; a NaN or an infinity is not lost. */
static void test_awkward_numbers(void **state)
{
	struct product p = make(FS_Q8_0, (struct shape){64, 3, 1});
	struct fs_cuk_matvec m = {
	        .type = FS_Q8_0, .w = p.w.packed, .in = 64, .out = 3, .n = 1, .x = p.x, .xq = p.xq, .y = p.y};

	for (int k = 0; k < 5; k++) {
		static const float size[] = {0.0f, 1e-30f, 1e30f, NAN, INFINITY};

		for (int i = 0; i < 64; i++)
			p.x[i] = (k < 3 ? size[k] : 1.0f) * (float)(i % 9 - 4);
		if (k >= 3)
			p.x[37] = size[k];
		assert_int_equal(fs_cuk_quantize(NULL, p.x, p.xq, 1, 64), 0);
		assert_int_equal(fs_cuk_matvec(NULL, &m), 0);
		for (int o = 0; o < 3; o++) {
			if (k >= 3)
				assert_false(isfinite(p.y[o]));
			else if (k == 0)
				assert_true(p.y[o] == 0.0f);
		}
		if (k < 3)
			check(&p, true, false, false, "awkward");
	}
	drop(&p);
}

static void test_refused(void **state)
{
	struct product p = make(FS_Q4_0, (struct shape){32, 2, 1});
	struct fs_cuk_matvec m = {
	        .type = FS_Q4_0, .w = p.w.packed, .in = 32, .out = 2, .n = 9, .x = p.x, .y = p.y};

	assert_int_not_equal(fs_cuk_matvec(NULL, &m), 0);
	m.n = 0;
	assert_int_not_equal(fs_cuk_matvec(NULL, &m), 0);
	assert_int_not_equal(fs_cuk_quantize(NULL, p.x, p.xq, 1, 33), 0);
	drop(&p);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
	        cmocka_unit_test(test_exact),
	        cmocka_unit_test(test_rows),
	        cmocka_unit_test(test_odd_rows),
	        cmocka_unit_test(test_whole_numbers),
	        cmocka_unit_test(test_shared_rows),
	        cmocka_unit_test(test_any_address),
	        cmocka_unit_test(test_awkward_numbers),
	        cmocka_unit_test(test_refused),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
