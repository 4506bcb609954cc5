/*
 * compute: chooses the back end by name, keeps the sticky error and hands every operation on through the back
 * end's table. Runs on the thread that owns the device. It refuses what no back end could do: a weight whose
 * bytes do not match its shape, a head size or group that the attention contract excludes (these are the
 * caller's mistakes, hence asserts, except where a file decides them).
 */
#include "common/compute/internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void fs_dev_fail(struct fs_dev *d, int err, const char *fmt, ...)
{
	va_list ap;
	char text[sizeof(d->err_text.text)];

	if (d->err)
		return;
	va_start(ap, fmt);
	vsnprintf(text, sizeof(text), fmt, ap);
	va_end(ap);
	d->err = fs_fail(&d->err_text, err, "%s", text);
}

#ifdef FS_CUDA
static int open_cuda(const struct fs_dev_opts *o, struct fs_dev **out, struct fs_errbuf *e)
{
	return fs_cuda_open(o, out, e);
}
#else
static int open_cuda(const struct fs_dev_opts *o, struct fs_dev **out, struct fs_errbuf *e)
{
	return fs_fail(e, FS_ENOTSUP, "this build of farsight %s has no CUDA support", FS_VERSION);
}
#endif

int fs_dev_open(const struct fs_dev_opts *o, struct fs_dev **out, struct fs_errbuf *e)
{
	const char *name = o->device ? o->device : "auto";
	struct fs_errbuf why = {.text = ""};
	int err;

	if (o->threads < 0 || o->threads > 1024)
		return fs_fail(e, FS_EINVAL, "threads: %d is not in 0..1024", o->threads);
	if (!strcmp(name, "cpu"))
		return fs_cpu_open(o, out, e);
	if (fs_device_is_gpu(name)) {
		err = open_cuda(o, out, &why);
		return err ? fs_fail(e, err, "device \"%s\": %s; use \"cpu\" or \"auto\" to do without", name,
		                     why.text)
		           : FS_OK;
	}
	if (strcmp(name, "auto"))
		return fs_fail(e, FS_EINVAL, "device \"%s\" must be " FS_DEVICE_WORDS, name);
	if (open_cuda(o, out, &why) == FS_OK)
		return FS_OK;
	fs_info("device \"auto\": the CPU, because %s", why.text);
	return fs_cpu_open(o, out, e);
}

bool fs_dev_else_cpu(const struct fs_dev *d, const char *device, int err, const char *why)
{
	if (strcmp(device, "auto") != 0 || d == NULL || !fs_dev_is_gpu(d) || err == FS_EFORMAT ||
	        err == FS_ENOTSUP)
		return false;
	fs_warn("the CPU is used instead of a GPU: %s", why);
	return true;
}

void fs_dev_close(struct fs_dev *d)
{
	if (d)
		d->ops->close(d);
}

const char *fs_dev_name(const struct fs_dev *d)
{
	return d->name;
}

const char *fs_dev_describe(const struct fs_dev *d)
{
	return d->describe;
}

bool fs_dev_is_gpu(const struct fs_dev *d)
{
	return d->is_gpu;
}

int fs_dev_threads(const struct fs_dev *d)
{
	return d->threads;
}

bool fs_dev_memory(struct fs_dev *d, uint64_t *free_bytes, uint64_t *total_bytes)
{
	return d->ops->memory && d->ops->memory(d, free_bytes, total_bytes);
}

bool fs_dev_lost(const struct fs_dev *d)
{
	return d->lost;
}

bool fs_dev_hung(const struct fs_dev *d)
{
	return d->hung;
}

void fs_dev_pace(struct fs_dev *d)
{
	if (d->ops->pace)
		d->ops->pace(d);
	else if (d->is_gpu)
		d->ops->wait(d);
}

int fs_dev_sync(struct fs_dev *d, struct fs_errbuf *e)
{
	int err;

	d->ops->wait(d);
	err = d->err;
	d->err = FS_OK;
	return err ? fs_fail(e, err, "%s", d->err_text.text) : FS_OK;
}

/* ---- memory ---- */

int fs_dev_alloc(struct fs_dev *d, size_t bytes, void **out, struct fs_errbuf *e)
{
	return d->ops->alloc(d, bytes, out, e);
}

void fs_dev_free(struct fs_dev *d, void *p)
{
	if (p)
		d->ops->release(d, p);
}

void fs_dev_upload(struct fs_dev *d, void *dst, const void *src, size_t bytes)
{
	if (!d->err && bytes)
		d->ops->upload(d, dst, src, bytes);
}

int fs_dev_download(struct fs_dev *d, void *dst, const void *src, size_t bytes, struct fs_errbuf *e)
{
	if (!d->err && bytes)
		d->ops->download(d, dst, src, bytes);
	return fs_dev_sync(d, e);
}

void fs_dev_copy(struct fs_dev *d, void *dst, const void *src, size_t bytes)
{
	if (!d->err && bytes)
		d->ops->copy(d, dst, src, bytes);
}

/* ---- steps that repeat ---- */

bool fs_dev_replay(struct fs_dev *d, uint64_t key)
{
	return !d->err && d->ops->replay && d->ops->replay(d, key);
}

void fs_dev_recorded(struct fs_dev *d)
{
	if (d->ops->recorded)
		d->ops->recorded(d);
}

void fs_dev_forget(struct fs_dev *d)
{
	if (d->ops->forget)
		d->ops->forget(d);
}

/* ---- weights ---- */

/* Elements of a tensor as [out][in]. Callers know ne[0] and ne[1] and size their buffers by them, so there
 * may be no further dimension. */
static int check_shape(const struct fs_gguf_tensor *t, int64_t *in, int64_t *out, struct fs_errbuf *e)
{
	size_t row, bytes;

	for (int i = 0; i < 4; i++)
		if (t->ne[i] < 1)
			return fs_fail(e, FS_EFORMAT, "tensor %s: dimension %d is %lld", t->name, i,
			        (long long)t->ne[i]);
	row = fs_dtype_info(t->type) ? fs_dtype_row_bytes(t->type, t->ne[0]) : 0;
	if (!row)
		return fs_fail(e, FS_ENOTSUP,
		        "tensor %s: rows of %lld elements of type %d can not be computed with", t->name,
		        (long long)t->ne[0], (int)t->type);
	if (t->ne[2] != 1 || t->ne[3] != 1)
		return fs_fail(e, FS_EFORMAT,
		        "tensor %s has %lld x %lld x %lld x %lld elements, and is no matrix", t->name,
		        (long long)t->ne[0], (long long)t->ne[1], (long long)t->ne[2], (long long)t->ne[3]);
	if (!fs_mul_size((size_t)t->ne[1], row, &bytes) || bytes > t->nbytes)
		return fs_fail(
		        e, FS_EFORMAT, "tensor %s: its %zu bytes do not hold its shape", t->name, t->nbytes);
	*in = t->ne[0];
	*out = t->ne[1];
	return FS_OK;
}

uint64_t fs_weight_bytes(const struct fs_dev *d, const struct fs_gguf_tensor *t, bool expect_packed)
{
	return d->ops->weight_bytes ? d->ops->weight_bytes(d, t, expect_packed) : 0;
}

int fs_weight_load(struct fs_dev *d, const struct fs_gguf_tensor *t, bool expect_packed, struct fs_weight *w,
        struct fs_errbuf *e)
{
	struct fs_weight r = {.type = t->type};
	int err = check_shape(t, &r.in, &r.out, e);

	if (!err)
		err = d->ops->weight_load(d, t, expect_packed, &r, e);
	if (!err)
		*w = r;
	return err;
}

void fs_weight_finish(struct fs_dev *d, struct fs_weight *w)
{
	if (w->data || w->packed)
		d->ops->weight_finish(d, w);
	*w = (struct fs_weight){0};
}

int fs_vector_load(struct fs_dev *d, const struct fs_gguf_tensor *t, float **out, struct fs_errbuf *e)
{
	int64_t in = 0, rows = 0; /* set on FS_OK, which gcc -O3 does not see */
	size_t row_bytes, bytes;
	float *host;
	void *dev = NULL;
	int err = check_shape(t, &in, &rows, e);

	if (err)
		return err;
	row_bytes = fs_dtype_row_bytes(t->type, in);
	if (!fs_mul_size((size_t)in, (size_t)rows, &bytes) || !fs_mul_size(bytes, sizeof(float), &bytes))
		return fs_fail(e, FS_ENOMEM, "tensor %s is too large", t->name);
	host = malloc(bytes);
	if (!host)
		return fs_fail(e, FS_ENOMEM, "no memory for tensor %s (%zu bytes)", t->name, bytes);
	for (int64_t i = 0; i < rows; i++)
		fs_dequantize_row(
		        t->type, (const uint8_t *)t->data + (size_t)i * row_bytes, host + i * in, in);
	err = d->ops->alloc(d, bytes, &dev, e);
	if (!err) {
		d->ops->upload(d, dev, host, bytes);
		*out = dev;
	}
	free(host);
	return err;
}

/* ---- operations ---- */

void fs_op_matmul(struct fs_dev *d, const struct fs_weight *w, const float *bias, const float *x, float *y,
        int64_t n, bool add)
{
	if (!d->err && n > 0)
		d->ops->matmul(d, w, bias, x, y, n, add);
}

void fs_op_embed(struct fs_dev *d, const struct fs_weight *w, const int32_t *ids, float *y, int64_t n)
{
	if (!d->err && n > 0)
		d->ops->embed(d, w, ids, y, n);
}

void fs_op_rms_norm(
        struct fs_dev *d, const float *x, const float *w, float *y, int64_t n, int64_t dim, float eps)
{
	if (!d->err && n > 0)
		d->ops->rms_norm(d, x, w, y, n, dim, eps);
}

void fs_op_layer_norm(struct fs_dev *d, const float *x, const float *w, const float *b, float *y, int64_t n,
        int64_t dim, float eps)
{
	if (!d->err && n > 0)
		d->ops->layer_norm(d, x, w, b, y, n, dim, eps);
}

void fs_op_rope_angles(struct fs_dev *d, const struct fs_rope *r, const int32_t *pos, float *cs, int64_t n)
{
	FS_ASSERT(r->n_pairs >= 0 && r->n_pairs <= 256 && r->n_axes >= 1 && r->n_axes <= 4);
	if (!d->err && n > 0)
		d->ops->rope_angles(d, r, pos, cs, n);
}

void fs_op_rope(struct fs_dev *d, const struct fs_rope *r, const float *cs, float *x, int64_t stride,
        int64_t n, int heads, int head_dim)
{
	FS_ASSERT(2 * r->n_pairs <= head_dim);
	if (!d->err && n > 0)
		d->ops->rope(d, r, cs, x, stride, n, heads, head_dim);
}

void fs_op_kv_store(struct fs_dev *d, const struct fs_kv_store *k)
{
	FS_ASSERT(k->type == FS_F16 || k->type == FS_F32);
	if (!d->err && k->n > 0)
		d->ops->kv_store(d, k);
}

void fs_op_attention(struct fs_dev *d, const struct fs_attn *a)
{
	FS_ASSERT(a->head_dim >= 4 && a->head_dim <= 256 && a->head_dim % 4 == 0);
	FS_ASSERT(a->kv_heads > 0 && a->heads > 0 && a->heads % a->kv_heads == 0);
	FS_ASSERT(a->kv_type == FS_F16 || a->kv_type == FS_F32);
	FS_ASSERT(!a->past || (a->causal && a->n_kv <= a->n_kv_max));
	FS_ASSERT(a->n_kv >= 0 && (!a->causal || (a->q_first >= 0 && a->q_first + a->n_q <= a->n_kv)));
	if (!d->err && a->n_q > 0)
		d->ops->attention(d, a);
}

void fs_op_act(struct fs_dev *d, enum fs_act act, float *x, int64_t n)
{
	if (!d->err && n > 0)
		d->ops->act(d, act, x, n);
}

void fs_op_gate(struct fs_dev *d, enum fs_act act, const float *gate, const float *up, float *y, int64_t n)
{
	if (!d->err && n > 0)
		d->ops->gate(d, act, gate, up, y, n);
}

void fs_op_add(struct fs_dev *d, float *y, const float *x, int64_t n)
{
	if (!d->err && n > 0)
		d->ops->add(d, y, x, n);
}
