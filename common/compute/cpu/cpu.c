/*
 * cpu.c: opens the CPU device (instruction set, workers), its memory and its weights, which stay in the
 * file's memory map. Operations run to their end inside the call, so waiting is nothing. Runs on the owner
 * thread.
 */
#include "common/compute/cpu/cpu.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct fs_cpu *cpu(struct fs_dev *d)
{
	return (struct fs_cpu *)d;
}

#if defined(__x86_64__)
/* By hand: __builtin_cpu_supports of clang 14 does not know the name. That the system saves the registers is
 * AVX2's check. */
static bool has_f16c(void)
{
	unsigned a, b, c, d;

	return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
#endif

enum fs_cpu_level fs_cpu_detect(bool *bf16)
{
	*bf16 = false;
#if defined(__x86_64__)
	__builtin_cpu_init();
	if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !has_f16c())
		return FS_CPU_SCALAR;
	if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
	        !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl") ||
	        !__builtin_cpu_supports("avx512vnni"))
		return FS_CPU_AVX2;
	*bf16 = __builtin_cpu_supports("avx512bf16");
	return FS_CPU_AVX512;
#else
	return FS_CPU_SCALAR;
#endif
}

static int usable_cores(void)
{
	cpu_set_t set;

	if (sched_getaffinity(0, sizeof(set), &set))
		return 1;
	return FS_MAX(1, CPU_COUNT(&set));
}

void *fs_scratch_get(struct fs_cpu *c, struct fs_scratch *s, size_t count, size_t size)
{
	size_t bytes;

	if (!fs_mul_size(count, size, &bytes) || !fs_add_size(bytes, 63, &bytes)) {
		fs_dev_fail(&c->dev, FS_ENOMEM, "scratch memory: size overflow");
		return NULL;
	}
	bytes &= ~(size_t)63;
	if (bytes > s->size) {
		free(s->p);
		s->p = aligned_alloc(64, bytes);
		s->size = s->p ? bytes : 0;
		if (!s->p)
			fs_dev_fail(&c->dev, FS_ENOMEM, "no memory for %zu bytes of scratch", bytes);
	}
	return s->p;
}

static void cpu_close(struct fs_dev *d)
{
	struct fs_cpu *c = cpu(d);

	fs_pool_destroy(c->pool);
	fs_gemm_destroy(c->gemm);
	free(c->rows.p);
	free(c->worker.p);
	free(c);
}

static void cpu_wait(struct fs_dev *d)
{
}

static int cpu_alloc(struct fs_dev *d, size_t bytes, void **out, struct fs_errbuf *e)
{
	size_t padded;
	void *p;

	if (!fs_add_size(bytes, 63, &padded))
		return fs_fail(e, FS_ENOMEM, "no memory for %zu bytes", bytes);
	padded &= ~(size_t)63;
	p = aligned_alloc(64, padded ? padded : 64);
	if (!p)
		return fs_fail(e, FS_ENOMEM, "no memory for %zu bytes", bytes);
	*out = p;
	return FS_OK;
}

static void cpu_release(struct fs_dev *d, void *p)
{
	free(p);
}

static void cpu_copy(struct fs_dev *d, void *dst, const void *src, size_t bytes)
{
	memcpy(dst, src, bytes);
}

static int cpu_weight_load(struct fs_dev *d, const struct fs_gguf_tensor *t, bool expect_packed,
        struct fs_weight *w, struct fs_errbuf *e)
{
	struct fs_packed *packed = NULL;
	int err = FS_OK;

	w->data = t->data;
	if (expect_packed)
		err = fs_cpu_pack(cpu(d), w, &packed, e);
	w->packed = packed;
	return err ? fs_fail_prefix(e, err, "tensor %s", t->name) : FS_OK;
}

static void cpu_weight_finish(struct fs_dev *d, struct fs_weight *w)
{
	fs_cpu_packed_free(w->packed);
}

static const struct fs_dev_ops cpu_ops = {
        .close = cpu_close,
        .wait = cpu_wait,
        .alloc = cpu_alloc,
        .release = cpu_release,
        .upload = cpu_copy,
        .download = cpu_copy,
        .copy = cpu_copy,
        .weight_load = cpu_weight_load,
        .weight_finish = cpu_weight_finish,
        .matmul = fs_cpu_matmul,
        .embed = fs_cpu_embed,
        .rms_norm = fs_cpu_rms_norm,
        .layer_norm = fs_cpu_layer_norm,
        .rope_angles = fs_cpu_rope_angles,
        .rope = fs_cpu_rope,
        .kv_store = fs_cpu_kv_store,
        .attention = fs_cpu_attention,
        .act = fs_cpu_act,
        .gate = fs_cpu_gate,
        .add = fs_cpu_add,
};

static const struct fs_kernels *kernels_of(enum fs_cpu_level level)
{
#if defined(__x86_64__)
	if (level == FS_CPU_AVX512)
		return &fs_kernels_avx512;
	if (level == FS_CPU_AVX2)
		return &fs_kernels_avx2;
#endif
	return &fs_kernels_scalar;
}

int fs_cpu_open_level(const struct fs_dev_opts *o, enum fs_cpu_level level, bool bf16, struct fs_dev **out,
        struct fs_errbuf *e)
{
	bool has_bf16;
	struct fs_cpu *c;
	int err;

	if (level > fs_cpu_detect(&has_bf16) || (bf16 && !has_bf16))
		return fs_fail(e, FS_ENOTSUP, "this processor lacks the instructions asked for");
	c = calloc(1, sizeof(*c));
	if (!c)
		return fs_fail(e, FS_ENOMEM, "no memory for a device");
	c->dev.ops = &cpu_ops;
	c->dev.precision = o->precision;
	c->dev.threads = o->threads ? o->threads : usable_cores();
	c->k = kernels_of(level);
	c->bf16 = bf16 && o->precision == FS_PRECISION_AUTO;
	snprintf(c->dev.name, sizeof(c->dev.name), "cpu");
	snprintf(c->dev.describe, sizeof(c->dev.describe), "cpu: %s%s, %d thread%s", c->k->name,
	        c->bf16 ? " BF16" : "", c->dev.threads, c->dev.threads == 1 ? "" : "s");
	err = fs_gemm_create(c->dev.threads, &c->gemm, e);
	if (!err)
		err = fs_pool_create(c->dev.threads, fs_gemm_thread_init, &c->pool, e);
	if (err) {
		cpu_close(&c->dev);
		return err;
	}
	*out = &c->dev;
	return FS_OK;
}

int fs_cpu_open(const struct fs_dev_opts *o, struct fs_dev **out, struct fs_errbuf *e)
{
	bool bf16;
	enum fs_cpu_level level = fs_cpu_detect(&bf16);

	return fs_cpu_open_level(o, level, bf16, out, e);
}
