/*
 * bench: farsight-bench-compute times the operations that decide how fast a model runs, at shapes that people
 * run, and prints a table of medians or, with --json, one JSON object. The yardsticks are measured in the
 * same run, since figures of different runs on a busy machine do not compare: a copy within the device's
 * memory (bytes read and bytes written a second), a plain product of bf16 weights, and on the CPU
 * dnnl_sgemm. Built, never installed.
 *
 * On a GPU an operation is queued many times before it is waited for, and each time with other weights, so
 * that neither the way there nor the card's cache is measured.
 */
#include "common/bench/bench.h"
#include "common/compute/compute.h"

#include <dnnl.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* libgomp; the yardstick runs on oneDNN's own team. */
void omp_set_num_threads(int n);

#define MAX_REPEATS 51
#define MAX_COPIES 64
#define CACHE_BYTES ((size_t)256 << 20) /* more than any card caches */

static const enum fs_dtype types[] = {
        FS_F32, FS_F16, FS_BF16, FS_Q8_0, FS_Q4_0, FS_Q4_1, FS_Q5_0, FS_Q5_1, FS_Q4_K, FS_Q5_K, FS_Q6_K};

struct bench {
	struct fs_dev *dev;
	json_t *rows;
	bool json, quick, gpu;
	bool cpu_time;    /* one thread: its own time, which other processes disturb little */
	const char *only; /* rows whose name holds one of these words, "large,few"; NULL = all */
	double budget;    /* seconds a row */
};

static void die(const char *what, const struct fs_errbuf *e)
{
	fprintf(stderr, "farsight-bench-compute: %s%s%s\n", what, e ? ": " : "", e ? e->text : "");
	exit(1);
}

static void *need(size_t bytes)
{
	void *p = aligned_alloc(64, (bytes + 63) & ~(size_t)63);

	if (!p)
		die("no memory", NULL);
	return p;
}

static uint32_t rng(void)
{
	static uint64_t s = 88172645463325252ULL;

	s ^= s << 13;
	s ^= s >> 7;
	s ^= s << 17;
	return (uint32_t)(s >> 16);
}

static float *randoms(int64_t n)
{
	float *x = need((size_t)n * sizeof(*x));

	for (int64_t i = 0; i < n; i++)
		x[i] = (float)(rng() >> 8) / 8388608.0f - 1.0f;
	return x;
}

static int64_t clock_of(const struct bench *b)
{
	struct timespec t;

	if (!b->cpu_time)
		return fs_now();
	clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
	return t.tv_sec * FS_SEC + t.tv_nsec;
}

static bool wanted(const struct bench *b, const char *what)
{
	const char *word = b->only;

	while (word) {
		const char *comma = strchr(word, ',');
		int n = (int)(comma ? comma - word : (long)strlen(word));

		for (const char *at = what; *at; at++)
			if (!strncmp(at, word, (size_t)n))
				return true;
		word = comma ? comma + 1 : NULL;
	}
	return !b->only;
}

/* ---- device memory ---- */

static void *dev_need(struct bench *b, size_t bytes)
{
	struct fs_errbuf e;
	void *p;

	if (fs_dev_alloc(b->dev, bytes, &p, &e))
		die("device memory", &e);
	return p;
}

/* Takes host over. */
static void *dev_take(struct bench *b, void *host, size_t bytes)
{
	void *p = dev_need(b, bytes);

	fs_dev_upload(b->dev, p, host, bytes);
	free(host);
	return p;
}

static float *dev_randoms(struct bench *b, int64_t n)
{
	return dev_take(b, randoms(n), (size_t)n * sizeof(float));
}

/* ---- time ---- */

struct job {
	void (*fn)(void *arg, int i); /* queues the i-th of many */
	void *arg;
};

static double seconds_of(struct bench *b, const struct job *j, int times)
{
	struct fs_errbuf e;
	int64_t t0 = clock_of(b);

	for (int i = 0; i < times; i++)
		j->fn(j->arg, i);
	if (fs_dev_sync(b->dev, &e))
		die("the device", &e);
	return (double)(clock_of(b) - t0) / 1e9 / times;
}

/* Median seconds of one. */
static double median(struct bench *b, void (*fn)(void *, int), void *arg)
{
	const struct job j = {fn, arg};
	struct fs_sample t = {.n = 0};
	int64_t begin = fs_now();
	int times = 1;

	(void)seconds_of(b, &j, 1); /* plans, caches, page faults */
	if (b->gpu)
		times = (int)FS_MAX(FS_MIN(0.005 / seconds_of(b, &j, 1), 200.0), 1.0);
	while (t.n < MAX_REPEATS && (t.n < 3 || (double)(fs_now() - begin) < b->budget * 1e9))
		t.v[t.n++] = seconds_of(b, &j, times);
	return fs_sample_median(&t);
}

static void row(struct bench *b, const char *what, const char *type, const char *shape, double seconds,
        double gflops, double gbs)
{
	if (b->json) {
		json_array_append_new(
		        b->rows, json_pack("{s:s,s:s,s:s,s:f,s:f,s:f}", "what", what, "type", type, "shape",
		                         shape, "ms", seconds * 1e3, "gflops", gflops, "gbs", gbs));
		return;
	}
	printf("%-18s %-6s %-22s %10.3f ms %9.1f GFLOP/s", what, type, shape, seconds * 1e3, gflops);
	if (gbs > 0)
		printf(" %7.2f GB/s", gbs);
	printf("\n");
	fflush(stdout);
}

/* ---- products ---- */

struct product {
	struct fs_dev *dev;
	struct fs_weight w[MAX_COPIES];
	int copies;
	float *x, *y;
	int64_t n;
};

static void run_product(void *arg, int i)
{
	struct product *p = arg;

	fs_op_matmul(p->dev, &p->w[i % p->copies], NULL, p->x, p->y, p->n, false);
}

/* Weights of any type: random bits with small scales (the speed does not depend on the values, but NaN
 * might). */
static uint8_t *random_weight(enum fs_dtype type, int64_t in, int64_t out, size_t *bytes)
{
	size_t block = fs_dtype_info(type)->block_bytes;
	int scale = type == FS_Q6_K ? 208 : 0;
	uint8_t *w;

	*bytes = fs_dtype_row_bytes(type, in) * (size_t)out;
	w = need(*bytes);
	if (type == FS_F32 || type == FS_F16 || type == FS_BF16) {
		float f[64];

		for (int i = 0; i < 64; i++)
			f[i] = (float)(rng() >> 8) / 8388608.0f - 1.0f;
		for (size_t i = 0; i < *bytes / (64 * block); i++)
			fs_quantize_row(type, f, w + i * 64 * block, 64);
		return w;
	}
	for (size_t i = 0; i < *bytes; i++)
		w[i] = (uint8_t)rng();
	for (size_t i = 0; i < *bytes; i += block) {
		uint16_t h[2] = {fs_f32_to_f16(0.01f), fs_f32_to_f16(0.01f)};

		memcpy(w + i + scale, h,
		        type == FS_Q6_K || type == FS_Q8_0 || type == FS_Q4_0 || type == FS_Q5_0 ? 2 : 4);
	}
	return w;
}

static void product(struct bench *b, const char *what, enum fs_dtype type, int64_t in, int64_t out, int64_t n,
        bool packed)
{
	struct product p = {.dev = b->dev, .n = n, .copies = 1};
	struct fs_gguf_tensor t = {.name = "w", .type = type, .ne = {in, out, 1, 1}};
	struct fs_errbuf e;
	char shape[64];
	double s;

	if (!wanted(b, what))
		return;
	p.x = dev_randoms(b, n * in);
	p.y = dev_need(b, (size_t)(n * out) * 4);
	t.data = random_weight(type, in, out, &t.nbytes);
	if (b->gpu && n <= 64)
		p.copies = (int)FS_MIN(CACHE_BYTES / t.nbytes + 1, (size_t)MAX_COPIES);
	for (int i = 0; i < p.copies; i++)
		if (fs_weight_load(b->dev, &t, packed, &p.w[i], &e))
			die("load", &e);
	s = median(b, run_product, &p);
	snprintf(shape, sizeof(shape), "%lldx%lld n=%lld", (long long)in, (long long)out, (long long)n);
	row(b, what, fs_dtype_info(type)->name, shape, s,
	        2.0 * (double)in * (double)out * (double)n / s / 1e9,
	        n <= 16 ? (double)t.nbytes / s / 1e9 : 0);
	for (int i = 0; i < p.copies; i++)
		fs_weight_finish(b->dev, &p.w[i]);
	free((void *)(uintptr_t)t.data);
	fs_dev_free(b->dev, p.x);
	fs_dev_free(b->dev, p.y);
}

/* ---- yardsticks ---- */

struct copy {
	struct fs_dev *dev;
	void *from, *to;
	size_t bytes;
};

static void run_copy(void *arg, int i)
{
	struct copy *c = arg;

	fs_dev_copy(c->dev, c->to, c->from, c->bytes);
}

static void copy(struct bench *b)
{
	struct copy c = {.dev = b->dev, .bytes = b->gpu ? (size_t)1 << 30 : CACHE_BYTES};
	char shape[64];
	double s;

	if (!wanted(b, "copy"))
		return;
	c.from = dev_take(b, memset(need(c.bytes), 1, c.bytes), c.bytes);
	c.to = dev_need(b, c.bytes);
	s = median(b, run_copy, &c);
	snprintf(shape, sizeof(shape), "%zu MiB", c.bytes >> 20);
	row(b, "copy", "", shape, s, 0, 2.0 * (double)c.bytes / s / 1e9);
	fs_dev_free(b->dev, c.from);
	fs_dev_free(b->dev, c.to);
}

struct yard {
	int64_t in, out, n;
	float *x, *w, *y;
};

static void run_yard(void *arg, int i)
{
	struct yard *g = arg;

	dnnl_sgemm('N', 'T', g->n, g->out, g->in, 1.0f, g->x, g->in, g->w, g->in, 0.0f, g->y, g->out);
}

static void yardstick(struct bench *b, int64_t in, int64_t out, int64_t n)
{
	struct yard g = {.in = in, .out = out, .n = n, .x = randoms(n * in), .w = randoms(in * out)};
	char shape[64];
	double s;

	g.y = need((size_t)(n * out) * 4);
	omp_set_num_threads(fs_dev_threads(b->dev));
	s = median(b, run_yard, &g);
	omp_set_num_threads(1);
	snprintf(shape, sizeof(shape), "%lldx%lld n=%lld", (long long)in, (long long)out, (long long)n);
	row(b, "dnnl_sgemm", "F32", shape, s, 2.0 * (double)in * (double)out * (double)n / s / 1e9, 0);
	free(g.x);
	free(g.w);
	free(g.y);
}

/* ---- attention ---- */

struct attention {
	struct fs_dev *dev;
	struct fs_attn a;
};

static void run_attention(void *arg, int i)
{
	struct attention *t = arg;

	fs_op_attention(t->dev, &t->a);
}

static void attention(
        struct bench *b, int64_t n_q, int64_t n_kv, int heads, int kv_heads, int head_dim, bool causal)
{
	int64_t width = heads * head_dim, kv = kv_heads * head_dim;
	float *q = dev_randoms(b, n_q * width), *out = dev_need(b, (size_t)(n_q * width) * 4), *k32;
	float *host = randoms(n_kv * kv);
	uint16_t *k16 = need((size_t)(n_kv * kv) * 2);
	struct attention t = {.dev = b->dev};
	double pairs = causal ? (double)n_q * ((double)n_kv - (double)(n_q - 1) / 2)
	                      : (double)n_q * (double)n_kv,
	       s;
	char shape[64];

	fs_quantize_row(FS_F16, host, k16, n_kv * kv);
	k16 = dev_take(b, k16, (size_t)(n_kv * kv) * 2);
	k32 = dev_take(b, host, (size_t)(n_kv * kv) * 4);
	t.a = (struct fs_attn){.q = q, .q_stride = width, .kv_stride = kv, .out = out, .out_stride = width};
	t.a.k = t.a.v = causal ? (void *)k16 : (void *)k32;
	t.a.kv_type = causal ? FS_F16 : FS_F32;
	t.a.n_q = n_q;
	t.a.n_kv = n_kv;
	t.a.heads = heads;
	t.a.kv_heads = kv_heads;
	t.a.head_dim = head_dim;
	t.a.scale = 0.1f;
	t.a.causal = causal;
	t.a.q_first = n_kv - n_q;
	s = median(b, run_attention, &t);
	snprintf(shape, sizeof(shape), "q%lld kv%lld h%d/%d d%d", (long long)n_q, (long long)n_kv, heads,
	        kv_heads, head_dim);
	row(b, causal ? "attention causal" : "attention full", causal ? "F16" : "F32", shape, s,
	        4.0 * pairs * (double)width / s / 1e9, n_q == 1 ? (double)(n_kv * kv * 4) / s / 1e9 : 0);
	fs_dev_free(b->dev, q);
	fs_dev_free(b->dev, out);
	fs_dev_free(b->dev, k32);
	fs_dev_free(b->dev, k16);
}

static void run_all(struct bench *b)
{
	static const int64_t shapes[][2] = {{1536, 8960}, {3584, 3584}, {4096, 14336}};
	size_t n_shapes = b->quick ? 1 : FS_ARRAY_LEN(shapes);
	int64_t side = b->gpu ? 8192 : b->quick ? 1024 : 2048;

	copy(b);
	product(b, "plain", FS_BF16, side, side, side, true);
	for (size_t s = 0; s < n_shapes; s++) {
		int64_t in = shapes[s][0], out = shapes[s][1];

		if (!b->only && !b->gpu)
			yardstick(b, in, out, 512);
		product(b, "large", FS_F32, in, out, 512, false);
		product(b, "large", FS_BF16, in, out, 512, false);
		product(b, "large packed", FS_BF16, in, out, 512, true);
		product(b, "large packed", FS_F16, in, out, 512, true);
		product(b, "large", FS_F16, in, out, 512, false);
		product(b, "large", FS_Q8_0, in, out, 512, false);
		product(b, "large", FS_Q4_K, in, out, 512, false);
		product(b, "large", FS_Q6_K, in, out, 512, false);
	}
	for (int64_t n = 2; n <= 64; n *= 2) {
		product(b, "few", FS_Q4_K, 1536, 8960, n, false);
		product(b, "few", FS_Q8_0, 1536, 8960, n, false);
		product(b, "few", FS_F16, 1536, 8960, n, false);
	}
	for (size_t s = 0; s < n_shapes; s++)
		for (size_t i = 0; i < FS_ARRAY_LEN(types); i++)
			product(b, "mat-vec", types[i], shapes[s][0], shapes[s][1], 1, false);
	if (!wanted(b, "attention"))
		return;
	attention(b, 1024, 1024, 16, 16, 80, false);
	attention(b, 4096, 4096, 4, 4, 80, false);
	attention(b, 512, 2048, 12, 2, 128, true);
	attention(b, 1, 2048, 12, 2, 128, true);
	attention(b, 1, 2048, 32, 8, 128, true);
}

int main(int argc, char **argv)
{
	struct bench b = {.json = false};
	struct fs_dev_opts o = {.device = "cpu"};
	struct fs_errbuf e;

	for (int i = 1; i < argc; i++) {
		if (!strcmp(argv[i], "--json"))
			b.json = true;
		else if (!strcmp(argv[i], "--quick"))
			b.quick = true;
		else if (!strcmp(argv[i], "--cpu-time"))
			b.cpu_time = true, o.threads = 1;
		else if (!strcmp(argv[i], "--f32"))
			o.precision = FS_PRECISION_F32;
		else if (!strcmp(argv[i], "--only") && i + 1 < argc)
			b.only = argv[++i];
		else if (!strcmp(argv[i], "--device") && i + 1 < argc)
			o.device = argv[++i];
		else if (!strcmp(argv[i], "--threads") && i + 1 < argc)
			o.threads = atoi(argv[++i]);
		else
			die("usage: farsight-bench-compute [--device NAME] [--json] [--quick] [--only "
			    "WORD,...] "
			    "[--f32] [--cpu-time] [--threads N]",
			        NULL);
	}
	if (b.cpu_time && o.threads != 1)
		die("--cpu-time is for one thread", NULL);
	if (fs_dev_open(&o, &b.dev, &e))
		die("open", &e);
	b.gpu = fs_dev_is_gpu(b.dev);
	b.budget = b.quick ? 0.1 : 0.5;
	b.rows = json_array();
	if (!b.json)
		printf("%s\n", fs_dev_describe(b.dev));
	run_all(&b);
	if (b.json) {
		json_t *all = json_pack("{s:s,s:i,s:o}", "device", fs_dev_describe(b.dev), "threads",
		        fs_dev_threads(b.dev), "rows", b.rows);

		json_dumpf(all, stdout, JSON_INDENT(1) | JSON_REAL_PRECISION(6));
		printf("\n");
		json_decref(all);
	} else {
		json_decref(b.rows);
	}
	fs_dev_close(b.dev);
	return 0;
}
