/*
 * Pillow's resampling: convolution with weights of a filter that is stretched by the scale, so that shrinking
 * does not alias. Stateless, any thread. Bit for bit: weights in double, then 22-bit fixed point; sums in
 * int32; u8 between the horizontal pass and the vertical one. Inner loops run over a constant number of bytes
 * so that compilers vectorise them; an AVX2 build is chosen at run time.
 */
#include "common/image/internal.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define WEIGHT_BITS 22
#define LANES 32 /* rows of the horizontal pass, bytes of the vertical one, done at once */
#define MAX_SIDE 65535
#define CANCEL_ROWS 32

/* ---- weights ---- */

static double bilinear(double x)
{
	x = fabs(x);
	return x < 1.0 ? 1.0 - x : 0.0;
}

static double bicubic(double x)
{
	const double a = -0.5;

	x = fabs(x);
	if (x < 1.0)
		return ((a + 2.0) * x - (a + 3.0)) * x * x + 1;
	if (x < 2.0)
		return (((x - 5) * x + 8) * x - 4) * a;
	return 0.0;
}

static double sinc(double x)
{
	if (x == 0.0)
		return 1.0;
	x *= M_PI;
	return sin(x) / x;
}

static double lanczos(double x)
{
	return x >= -3.0 && x < 3.0 ? sinc(x) * sinc(x / 3) : 0.0;
}

static const struct {
	double (*weight)(double);
	double support;
} filters[] = {
        [FS_BILINEAR] = {bilinear, 1.0},
        [FS_BICUBIC] = {bicubic, 2.0},
        [FS_LANCZOS] = {lanczos, 3.0},
};

/* For each place of the result: the first source place, how many, and their weights [size][taps]. */
struct kernel {
	int taps;
	int *first, *count;
	int32_t *weight;
};

static void kernel_finish(struct kernel *k)
{
	free(k->first);
	free(k->count);
	free(k->weight);
}

static void fill_place(struct kernel *k, int i, int from, double scale, enum fs_filter filter, double *w)
{
	double stretch = FS_MAX(scale, 1.0), support = filters[filter].support * stretch, inv = 1.0 / stretch;
	double centre = (i + 0.5) * scale, sum = 0.0;
	int first = FS_MAX((int)(centre - support + 0.5), 0);
	int count = FS_MIN((int)(centre + support + 0.5), from) - first;
	int32_t *out = k->weight + (size_t)i * (size_t)k->taps;

	for (int t = 0; t < count; t++) {
		w[t] = filters[filter].weight((t + first - centre + 0.5) * inv);
		sum += w[t];
	}
	for (int t = 0; t < count; t++) {
		double v = sum != 0.0 ? w[t] / sum : w[t];

		out[t] = (int32_t)(v < 0 ? -0.5 + v * (1 << WEIGHT_BITS) : 0.5 + v * (1 << WEIGHT_BITS));
	}
	k->first[i] = first;
	k->count[i] = count;
}

static int kernel_init(struct kernel *k, int from, int to, enum fs_filter filter, struct fs_errbuf *e)
{
	double scale = (double)from / to;
	double *w;

	k->taps = (int)ceil(filters[filter].support * FS_MAX(scale, 1.0)) * 2 + 1;
	k->first = calloc((size_t)to, sizeof(*k->first));
	k->count = calloc((size_t)to, sizeof(*k->count));
	k->weight = calloc((size_t)to, (size_t)k->taps * sizeof(*k->weight));
	w = malloc((size_t)k->taps * sizeof(*w));
	if (k->first == NULL || k->count == NULL || k->weight == NULL || w == NULL) {
		free(w);
		kernel_finish(k);
		return fs_fail(e, FS_ENOMEM, "no memory for resizing");
	}
	for (int i = 0; i < to; i++)
		fill_place(k, i, from, scale, filter, w);
	free(w);
	return FS_OK;
}

/* ---- sums ---- */

/* out[LANES] = clamped sum over t of weight[t] · src[t · step][LANES] */
#define CONVOLVE_BODY                                                                                        \
	int32_t sum[LANES];                                                                                  \
                                                                                                             \
	for (int l = 0; l < LANES; l++)                                                                      \
		sum[l] = 1 << (WEIGHT_BITS - 1);                                                             \
	for (int t = 0; t < count; t++, src += step) {                                                       \
		int32_t w = weight[t];                                                                       \
                                                                                                             \
		for (int l = 0; l < LANES; l++)                                                              \
			sum[l] += src[l] * w;                                                                \
	}                                                                                                    \
	for (int l = 0; l < LANES; l++) {                                                                    \
		int32_t v = sum[l] >> WEIGHT_BITS;                                                           \
                                                                                                             \
		v = v < 0 ? 0 : v;                                                                           \
		out[l] = (uint8_t)(v > 255 ? 255 : v);                                                       \
	}

typedef void convolve_fn(const uint8_t *src, size_t step, const int32_t *weight, int count, uint8_t *out);

static void convolve(const uint8_t *src, size_t step, const int32_t *weight, int count, uint8_t *out)
{
	CONVOLVE_BODY
}

#ifdef __x86_64__
__attribute__((target("avx2"))) static void convolve_avx2(
        const uint8_t *src, size_t step, const int32_t *weight, int count, uint8_t *out)
{
	CONVOLVE_BODY
}
#endif

static convolve_fn *choose_convolve(void)
{
#ifdef __x86_64__
	if (__builtin_cpu_supports("avx2"))
		return convolve_avx2;
#endif
	return convolve;
}

/* ---- passes ---- */

/* rows [LANES] of n bytes each -> columns [n][LANES]; rows past the end are left as they were. */
static void to_columns(const uint8_t *src, size_t stride, int rows, size_t n, uint8_t *columns)
{
	for (int r = 0; r < rows; r++)
		for (size_t i = 0; i < n; i++)
			columns[i * LANES + (size_t)r] = src[(size_t)r * stride + i];
}

static void from_columns(const uint8_t *columns, size_t n, int rows, uint8_t *dst, size_t stride)
{
	for (int r = 0; r < rows; r++)
		for (size_t i = 0; i < n; i++)
			dst[(size_t)r * stride + i] = columns[i * LANES + (size_t)r];
}

/* LANES rows at a time, laid out so that one weight meets LANES bytes side by side. */
static int horizontal(const struct fs_image *src, const struct kernel *k, struct fs_image *dst,
        struct fs_cancel *cancel, struct fs_errbuf *e)
{
	convolve_fn *sum = choose_convolve();
	size_t in = (size_t)src->width * 3, out = (size_t)dst->width * 3;
	uint8_t *columns = calloc(in + out, LANES), *result = columns + in * LANES;
	int err = FS_OK;

	if (columns == NULL)
		return fs_fail(e, FS_ENOMEM, "no memory for resizing");
	for (int y = 0; y < src->height && err == FS_OK; y += LANES) {
		int rows = FS_MIN(LANES, src->height - y);

		to_columns(src->rgb + (size_t)y * in, in, rows, in, columns);
		for (int x = 0; x < dst->width; x++)
			for (int c = 0; c < 3; c++)
				sum(columns + ((size_t)k->first[x] * 3 + (size_t)c) * LANES, 3 * LANES,
				        k->weight + (size_t)x * (size_t)k->taps, k->count[x],
				        result + ((size_t)x * 3 + (size_t)c) * LANES);
		from_columns(result, out, rows, dst->rgb + (size_t)y * out, out);
		if (fs_cancelled(cancel))
			err = fs_fail(e, FS_ECANCELLED, "cancelled");
	}
	free(columns);
	return err;
}

static void vertical_row(convolve_fn *sum, const struct fs_image *src, const int32_t *weight, int first,
        int count, uint8_t *out)
{
	size_t stride = (size_t)src->width * 3, at = 0;
	const uint8_t *in = src->rgb + (size_t)first * stride;

	for (; at + LANES <= stride; at += LANES)
		sum(in + at, stride, weight, count, out + at);
	for (; at < stride; at++) { /* fewer than LANES bytes are left */
		int32_t s = 1 << (WEIGHT_BITS - 1);

		for (int t = 0; t < count; t++)
			s += in[(size_t)t * stride + at] * weight[t];
		s >>= WEIGHT_BITS;
		out[at] = (uint8_t)(s < 0 ? 0 : s > 255 ? 255 : s);
	}
}

static int vertical(const struct fs_image *src, const struct kernel *k, struct fs_image *dst,
        struct fs_cancel *cancel, struct fs_errbuf *e)
{
	convolve_fn *sum = choose_convolve();

	for (int y = 0; y < dst->height; y++) {
		if (y % CANCEL_ROWS == 0 && fs_cancelled(cancel))
			return fs_fail(e, FS_ECANCELLED, "cancelled");
		vertical_row(sum, src, k->weight + (size_t)y * (size_t)k->taps, k->first[y], k->count[y],
		        dst->rgb + (size_t)y * (size_t)dst->width * 3);
	}
	return FS_OK;
}

typedef int pass_fn(const struct fs_image *src, const struct kernel *k, struct fs_image *dst,
        struct fs_cancel *cancel, struct fs_errbuf *e);

static int run_pass(pass_fn *pass, const struct fs_image *src, int w, int h, int from, int to,
        enum fs_filter filter, struct fs_cancel *cancel, struct fs_image *dst, struct fs_errbuf *e)
{
	struct kernel k;
	int err = kernel_init(&k, from, to, filter, e);

	if (err != FS_OK)
		return err;
	err = image_alloc(dst, w, h, e);
	if (err == FS_OK)
		err = pass(src, &k, dst, cancel, e);
	kernel_finish(&k);
	return err;
}

static int copy(const struct fs_image *src, struct fs_image *dst, struct fs_errbuf *e)
{
	int err = image_alloc(dst, src->width, src->height, e);

	if (err == FS_OK)
		memcpy(dst->rgb, src->rgb, (size_t)src->width * (size_t)src->height * 3);
	return err;
}

/*
 * The order shows in the last bits, since values are rounded and clamped in between. Pillow up to 12 always
 * began with the horizontal pass; 13 begins with the vertical one when that takes away more than twice the
 * rows than the other takes columns (found by trying: 1,146 sizes, no exception).
 */
static bool vertical_first(const struct fs_image *src, int w, int h)
{
	return src->height > h && src->height - h > 2 * (src->width - w);
}

/* Both sizes change: through im, which has the size after the first pass. */
static int both_passes(const struct fs_image *src, int w, int h, enum fs_filter filter,
        struct fs_cancel *cancel, struct fs_image *out, struct fs_errbuf *e)
{
	struct fs_image im = {0};
	int err;

	if (vertical_first(src, w, h)) {
		err = run_pass(vertical, src, src->width, h, src->height, h, filter, cancel, &im, e);
		if (err == FS_OK)
			err = run_pass(horizontal, &im, w, h, src->width, w, filter, cancel, out, e);
	} else {
		err = run_pass(horizontal, src, w, src->height, src->width, w, filter, cancel, &im, e);
		if (err == FS_OK)
			err = run_pass(vertical, &im, w, h, src->height, h, filter, cancel, out, e);
	}
	fs_image_finish(&im);
	return err;
}

int fs_image_resize_cancellable(const struct fs_image *src, int w, int h, enum fs_filter filter,
        struct fs_cancel *cancel, struct fs_image *out, struct fs_errbuf *e)
{
	struct fs_image im = {0};
	int err;

	if (w < 1 || h < 1 || w > MAX_SIDE || h > MAX_SIDE || src->width > MAX_SIDE || src->height > MAX_SIDE)
		return fs_fail(
		        e, FS_EINVAL, "cannot resize %d x %d to %d x %d", src->width, src->height, w, h);
	if (w != src->width && h != src->height)
		err = both_passes(src, w, h, filter, cancel, &im, e);
	else if (w != src->width)
		err = run_pass(horizontal, src, w, h, src->width, w, filter, cancel, &im, e);
	else if (h != src->height)
		err = run_pass(vertical, src, w, h, src->height, h, filter, cancel, &im, e);
	else
		err = copy(src, &im, e);
	if (err == FS_OK)
		*out = im;
	else
		fs_image_finish(&im);
	return err;
}

int fs_image_resize(const struct fs_image *src, int w, int h, enum fs_filter filter, struct fs_image *out,
        struct fs_errbuf *e)
{
	return fs_image_resize_cancellable(src, w, h, filter, NULL, out, e);
}
