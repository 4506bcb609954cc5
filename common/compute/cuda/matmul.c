/*
 * matmul: products, and rows of embedding tables. Runs on the thread that owns the device.
 *
 * Few rows: the quantised weights are read once for up to eight rows, x in int8 where the type gains by it.
 * Quantised weights are small, so two such passes read less than turning them into numbers writes; hence up
 * to sixteen rows go this way. Many rows: cuBLASLt on 16-bit numbers with sums in f32. Weights that are not
 * numbers yet become numbers a slice of rows at a time, so that they stay quantised in memory. x is brought
 * into the other form once for all products that follow with the same x (q, k and v; gate and up).
 *
 * FS_PRECISION_F32, and rows that are no multiple of 8 (which tensor cores do not take): all in f32.
 */
#include "common/compute/cuda/cuda.h"

/* y is new: what was made of memory that it covers is not that any more. */
static void wrote(struct fs_cuda *c, const float *y, int64_t count)
{
	struct fs_cuda_form *forms[] = {&c->narrowed, &c->quantized};

	for (int i = 0; i < 2; i++)
		if (forms[i]->x && forms[i]->x < y + count && y < forms[i]->x + forms[i]->n * forms[i]->in)
			forms[i]->x = NULL;
}

static bool holds(const struct fs_cuda_form *f, const float *x, int64_t n, int64_t in)
{
	return f->x == x && f->n == n && f->in == in;
}

/* ---- few rows ---- */

static const void *quantized(struct fs_cuda *c, const float *x, int64_t n, int64_t in)
{
	if (holds(&c->quantized, x, n, in))
		return c->quant.p;
	c->quantized.x = NULL;
	if (!fs_cuda_need(c, &c->quant, fs_cuk_quantized_bytes(n, in)))
		return NULL;
	FS_CUDA_QUEUE(c, "quantising rows", fs_cuk_quantize(s, x, c->quant.p, n, in));
	c->quantized = (struct fs_cuda_form){.x = x, .n = n, .in = in};
	return c->quant.p;
}

static void few(struct fs_cuda *c, const struct fs_weight *w, const float *bias, const float *x, float *y,
        int64_t n, bool add)
{
	struct fs_cuk_matvec m = {.type = fs_cuda_is_plain(w) ? c->half : w->type,
	        .w = w->data,
	        .in = w->in,
	        .out = w->out,
	        .n = n,
	        .bias = bias,
	        .x = x,
	        .y = y,
	        .add = add};

	if (c->dev.precision == FS_PRECISION_AUTO && fs_cuk_matvec_wants_q8(m.type, m.in)) {
		m.xq = quantized(c, x, n, w->in);
		if (!m.xq)
			return;
	}
	FS_CUDA_QUEUE(c, "a product", fs_cuk_matvec(s, &m));
}

/* ---- many rows ---- */

static const void *narrowed(struct fs_cuda *c, const float *x, int64_t n, int64_t in)
{
	if (holds(&c->narrowed, x, n, in))
		return c->narrow.p;
	c->narrowed.x = NULL;
	if (!fs_cuda_need(c, &c->narrow, (size_t)n * (size_t)in * sizeof(uint16_t)))
		return NULL;
	FS_CUDA_QUEUE(c, "narrowing rows", fs_cuk_narrow(s, x, c->narrow.p, n * in, c->half));
	c->narrowed = (struct fs_cuda_form){.x = x, .n = n, .in = in};
	return c->narrow.p;
}

static size_t size_of(enum fs_dtype to)
{
	return to == FS_F32 ? sizeof(float) : sizeof(uint16_t);
}

/* Whether the rows can be used as they lie. */
static bool as_they_are(const struct fs_cuda *c, const struct fs_weight *w, enum fs_dtype to)
{
	if (fs_cuda_is_plain(w))
		return to == c->half;
	return w->type == to &&
	       fs_cuk_packed_bytes(w->type, w->in, w->out) == (size_t)w->in * (size_t)w->out * size_of(to);
}

static void product(struct fs_cuda *c, const struct fs_blas_product *p)
{
	int status;

	if (!fs_cuda_usable(c))
		return;
	status = fs_blas_run(c->blas, c->stream, p);
	if (status) {
		fs_dev_fail(&c->dev, FS_EINTERNAL,
		        "%s: cuBLASLt fails at a product of %lld x %lld x %lld: status %d", c->dev.name,
		        (long long)p->n, (long long)p->in, (long long)p->out, status);
		fs_cuda_probe(c);
	} else if (c->rec.on) {
		c->rec.broken |= fs_blas_run(c->blas, c->rec.stream, p) != 0;
	}
}

static void bias_first(struct fs_cuda *c, struct fs_blas_product *p)
{
	const float *bias = p->bias;
	bool add = p->add;

	FS_CUDA_QUEUE(c, "a bias", fs_cuk_bias(s, bias, p->y, p->n, p->out, add));
	p->bias = NULL;
	p->add = true;
}

/* Slices begin at multiples of 64 rows, so that results are as aligned as a whole product's. */
static void in_slices(struct fs_cuda *c, const struct fs_weight *w, struct fs_blas_product *p)
{
	size_t row = (size_t)w->in * size_of(p->type);
	int64_t rows = FS_MAX((int64_t)(c->slice / row) / 64 * 64, 64), out = p->out;
	float *y = p->y;
	void *deq = fs_cuda_need(c, &c->deq, (size_t)FS_MIN(rows, w->out) * row);

	if (!deq)
		return;
	p->w = deq;
	if (p->bias && (rows < out || !fs_blas_takes_bias(c->blas, p)))
		bias_first(c, p);
	for (int64_t first = 0; first < out && !c->dev.err; first += rows) {
		int64_t n = FS_MIN(rows, out - first);

		FS_CUDA_QUEUE(c, "weights as numbers",
		        fs_cuk_dequantize(s, w->type, w->data, first, n, w->in, w->out, p->type, deq));
		p->out = n;
		p->y = y + first;
		product(c, p);
	}
}

static void many(struct fs_cuda *c, const struct fs_weight *w, const float *bias, const float *x, float *y,
        int64_t n, bool add)
{
	bool exact = c->dev.precision == FS_PRECISION_F32 || w->in % 8 != 0;
	struct fs_blas_product p = {.type = exact ? FS_F32 : c->half,
	        .w = w->data,
	        .x = exact ? x : narrowed(c, x, n, w->in),
	        .y = y,
	        .bias = bias,
	        .in = w->in,
	        .out = w->out,
	        .n = n,
	        .y_stride = w->out,
	        .add = add};
	bool whole = as_they_are(c, w, p.type);

	if (!p.x)
		return;
	if (bias && whole && !fs_blas_takes_bias(c->blas, &p))
		bias_first(c, &p);
	if (whole)
		product(c, &p);
	else
		in_slices(c, w, &p);
}

/* ---- both ---- */

void fs_cuda_matmul(struct fs_dev *d, const struct fs_weight *w, const float *bias, const float *x, float *y,
        int64_t n, bool add)
{
	struct fs_cuda *c = fs_cuda(d);
	int64_t most = !fs_cuda_is_plain(w) && fs_dtype_info(w->type)->block_elems > 1
	                       ? 2 * FS_CUK_MATVEC_ROWS
	                       : FS_CUK_MATVEC_ROWS;

	fs_cuda_load_end(c);
	if (n > most)
		many(c, w, bias, x, y, n, add);
	for (int64_t i = 0; n <= most && i < n; i += FS_CUK_MATVEC_ROWS)
		few(c, w, bias, x + i * w->in, y + i * w->out, FS_MIN(n - i, FS_CUK_MATVEC_ROWS), add);
	wrote(c, y, n * w->out);
}

void fs_cuda_embed(struct fs_dev *d, const struct fs_weight *w, const int32_t *ids, float *y, int64_t n)
{
	struct fs_cuda *c = fs_cuda(d);
	enum fs_dtype type = fs_cuda_is_plain(w) ? c->half : w->type;

	fs_cuda_load_end(c);
	fs_cuda_forget_forms(c);
	FS_CUDA_QUEUE(c, "embedding rows", fs_cuk_embed(s, type, w->data, w->in, w->out, ids, y, n));
}
