/*
 * gemm.c: oneDNN behind plans. Owns the engine, a stream for each worker and the newest plans. Plans are made
 * on the owner thread (about a quarter of a millisecond each: code is generated) and executed on workers;
 * scratch memory is the caller's, which is what makes one primitive safe on several threads.
 */
#include "common/compute/cpu/gemm.h"

#include <dnnl.h>
#include <stdlib.h>
#include <string.h>

#if DNNL_VERSION_MAJOR != 2
#error "common/compute needs oneDNN 2.x: its C interface changed in version 3"
#endif

/* libgomp, which oneDNN runs on. Declared here because omp.h is not on every compiler's path. */
void omp_set_num_threads(int n);

#define MAX_PLANS 256
#define PACK_ROWS 256 /* rows of the product for which the packed form is chosen; it serves any number */

struct fs_gemm_plan {
	struct fs_gemm_shape shape;
	dnnl_primitive_t prim; /* NULL: free slot */
	uint64_t asked;        /* when it was last asked for, in plans */
	dnnl_memory_desc_t a, w, y, scratch;
};

struct fs_gemm {
	dnnl_engine_t engine;
	int threads;
	uint64_t asked; /* plans, so far */
	struct fs_gemm_plan plans[MAX_PLANS];
	dnnl_stream_t streams[]; /* one a worker */
};

void fs_gemm_thread_init(void)
{
	omp_set_num_threads(1);
}

int fs_gemm_create(int threads, struct fs_gemm **out, struct fs_errbuf *e)
{
	struct fs_gemm *g = calloc(1, sizeof(*g) + (size_t)threads * sizeof(g->streams[0]));
	dnnl_status_t st;

	if (!g)
		return fs_fail(e, FS_ENOMEM, "no memory for matrix products");
	fs_gemm_thread_init();
	g->threads = threads;
	st = dnnl_engine_create(&g->engine, dnnl_cpu, 0);
	for (int i = 0; i < threads && st == dnnl_success; i++)
		st = dnnl_stream_create(&g->streams[i], g->engine, dnnl_stream_default_flags);
	if (st != dnnl_success) {
		fs_gemm_destroy(g);
		return fs_fail(e, FS_EINTERNAL, "oneDNN does not start: status %d", (int)st);
	}
	*out = g;
	return FS_OK;
}

static void plan_finish(struct fs_gemm_plan *p)
{
	if (p->prim)
		dnnl_primitive_destroy(p->prim);
	p->prim = NULL;
}

void fs_gemm_destroy(struct fs_gemm *g)
{
	if (!g)
		return;
	for (size_t i = 0; i < MAX_PLANS; i++)
		plan_finish(&g->plans[i]);
	for (int i = 0; i < g->threads; i++)
		if (g->streams[i])
			dnnl_stream_destroy(g->streams[i]);
	if (g->engine)
		dnnl_engine_destroy(g->engine);
	free(g);
}

static dnnl_data_type_t type_of(bool bf16)
{
	return bf16 ? dnnl_bf16 : dnnl_f32;
}

static dnnl_status_t dense(dnnl_memory_desc_t *md, int64_t rows, int64_t cols, dnnl_data_type_t type)
{
	dnnl_dims_t dims = {rows, cols};

	return dnnl_memory_desc_init_by_tag(md, 2, dims, type, dnnl_ab);
}

/* W as a [k][n] matrix: plain rows of k, or whatever oneDNN likes best. */
static dnnl_status_t weights_desc(dnnl_memory_desc_t *md, int64_t n, int64_t k, bool bf16, bool any)
{
	dnnl_dims_t dims = {k, n};

	return dnnl_memory_desc_init_by_tag(md, 2, dims, type_of(bf16), any ? dnnl_format_tag_any : dnnl_ba);
}

/* The descriptor of one product; p->w says how W lies (format any is allowed). */
static dnnl_status_t describe(
        const struct fs_gemm *g, const struct fs_gemm_plan *p, dnnl_primitive_desc_t *out)
{
	dnnl_matmul_desc_t desc;
	dnnl_primitive_attr_t attr = NULL;
	dnnl_status_t st = dnnl_matmul_desc_init(&desc, &p->a, &p->w, NULL, &p->y);

	if (st == dnnl_success)
		st = dnnl_primitive_attr_create(&attr);
	if (st == dnnl_success)
		st = dnnl_primitive_attr_set_scratchpad_mode(attr, dnnl_scratchpad_mode_user);
	if (st == dnnl_success)
		st = dnnl_primitive_desc_create(out, &desc, attr, g->engine, NULL);
	if (attr)
		dnnl_primitive_attr_destroy(attr);
	return st;
}

/* How packed weights lie. Asked for at one number of rows, so that all products agree on it. */
static dnnl_status_t packed_desc(
        const struct fs_gemm *g, int64_t n, int64_t k, bool bf16, dnnl_memory_desc_t *out)
{
	struct fs_gemm_plan p = {0};
	dnnl_primitive_desc_t pd = NULL;
	dnnl_status_t st = dense(&p.a, PACK_ROWS, k, type_of(bf16));

	if (st == dnnl_success)
		st = dense(&p.y, PACK_ROWS, n, dnnl_f32);
	if (st == dnnl_success)
		st = weights_desc(&p.w, n, k, bf16, true);
	if (st == dnnl_success)
		st = describe(g, &p, &pd);
	if (st != dnnl_success)
		return st;
	*out = *dnnl_primitive_desc_query_md(pd, dnnl_query_weights_md, 0);
	dnnl_primitive_desc_destroy(pd);
	return st;
}

static dnnl_status_t make(const struct fs_gemm *g, struct fs_gemm_plan *p)
{
	const struct fs_gemm_shape *s = &p->shape;
	dnnl_primitive_desc_t pd = NULL;
	dnnl_status_t st = dense(&p->a, s->m, s->k, type_of(s->bf16));

	if (st == dnnl_success)
		st = dense(&p->y, s->m, s->n, dnnl_f32);
	if (st == dnnl_success)
		st = s->packed ? packed_desc(g, s->n, s->k, s->bf16, &p->w)
		               : weights_desc(&p->w, s->n, s->k, s->bf16, false);
	if (st == dnnl_success)
		st = describe(g, p, &pd);
	if (st != dnnl_success)
		return st;
	p->scratch = *dnnl_primitive_desc_query_md(pd, dnnl_query_scratchpad_md, 0);
	st = dnnl_primitive_create(&p->prim, pd);
	dnnl_primitive_desc_destroy(pd);
	return st;
}

static bool same(const struct fs_gemm_shape *a, const struct fs_gemm_shape *b)
{
	return a->m == b->m && a->n == b->n && a->k == b->k && a->bf16 == b->bf16 && a->packed == b->packed;
}

int fs_gemm_plan(struct fs_gemm *g, const struct fs_gemm_shape *s, const struct fs_gemm_plan **out,
        struct fs_errbuf *e)
{
	struct fs_gemm_plan p = {.shape = *s, .asked = ++g->asked}, *oldest = g->plans;
	dnnl_status_t st;

	for (size_t i = 0; i < MAX_PLANS; i++) {
		struct fs_gemm_plan *q = &g->plans[i];

		if (q->prim && same(&q->shape, s)) {
			q->asked = p.asked;
			*out = q;
			return FS_OK;
		}
		if (q->asked < oldest->asked)
			oldest = q;
	}
	st = make(g, &p);
	if (st != dnnl_success)
		return fs_fail(e, st == dnnl_out_of_memory ? FS_ENOMEM : FS_EINTERNAL,
		        "oneDNN has no %s product of %lld x %lld by %lld rows: status %d",
		        s->bf16 ? "bf16" : "f32", (long long)s->k, (long long)s->n, (long long)s->m, (int)st);
	plan_finish(oldest);
	*oldest = p;
	*out = oldest;
	return FS_OK;
}

size_t fs_gemm_plan_scratch(const struct fs_gemm_plan *p)
{
	return dnnl_memory_desc_get_size(&p->scratch);
}

/* args[i] = a memory object over p; on failure those made so far are destroyed by the caller (n counts them).
 */
static dnnl_status_t bind(const struct fs_gemm *g, dnnl_exec_arg_t *args, int *n, int arg,
        const dnnl_memory_desc_t *md, void *p)
{
	dnnl_status_t st = dnnl_memory_create(&args[*n].memory, md, g->engine, p);

	args[*n].arg = arg;
	*n += st == dnnl_success;
	return st;
}

bool fs_gemm_execute(const struct fs_gemm *g, const struct fs_gemm_plan *p, int worker, const void *a,
        const void *w, float *y, void *scratch)
{
	dnnl_exec_arg_t args[4];
	int n = 0;
	/* oneDNN takes all memory as writable; it reads sources and weights only */
	dnnl_status_t st = bind(g, args, &n, DNNL_ARG_SRC, &p->a, (void *)(uintptr_t)a);

	if (st == dnnl_success)
		st = bind(g, args, &n, DNNL_ARG_WEIGHTS, &p->w, (void *)(uintptr_t)w);
	if (st == dnnl_success)
		st = bind(g, args, &n, DNNL_ARG_DST, &p->y, y);
	if (st == dnnl_success)
		st = bind(g, args, &n, DNNL_ARG_SCRATCHPAD, &p->scratch, scratch);
	if (st == dnnl_success)
		st = dnnl_primitive_execute(p->prim, g->streams[worker], n, args);
	for (int i = 0; i < n; i++)
		dnnl_memory_destroy(args[i].memory);
	return st == dnnl_success;
}

int fs_gemm_packed_bytes(struct fs_gemm *g, int64_t n, int64_t k, bool bf16, size_t *out, struct fs_errbuf *e)
{
	dnnl_memory_desc_t md;
	dnnl_status_t st = packed_desc(g, n, k, bf16, &md);

	if (st != dnnl_success)
		return fs_fail(e, FS_EINTERNAL, "oneDNN has no packed form for %lld x %lld: status %d",
		        (long long)k, (long long)n, (int)st);
	*out = dnnl_memory_desc_get_size(&md);
	return FS_OK;
}

int fs_gemm_pack(
        struct fs_gemm *g, int64_t n, int64_t k, bool bf16, const void *w, void *packed, struct fs_errbuf *e)
{
	dnnl_memory_desc_t from, to;
	dnnl_primitive_desc_t pd = NULL;
	dnnl_primitive_t prim = NULL;
	dnnl_exec_arg_t args[2];
	int bound = 0;
	dnnl_status_t st = packed_desc(g, n, k, bf16, &to);

	if (st == dnnl_success)
		st = weights_desc(&from, n, k, bf16, false);
	if (st == dnnl_success)
		st = dnnl_reorder_primitive_desc_create(&pd, &from, g->engine, &to, g->engine, NULL);
	if (st == dnnl_success)
		st = dnnl_primitive_create(&prim, pd);
	if (st == dnnl_success)
		st = bind(g, args, &bound, DNNL_ARG_FROM, &from, (void *)(uintptr_t)w);
	if (st == dnnl_success)
		st = bind(g, args, &bound, DNNL_ARG_TO, &to, packed);
	if (st == dnnl_success)
		st = dnnl_primitive_execute(prim, g->streams[0], bound, args);
	for (int i = 0; i < bound; i++)
		dnnl_memory_destroy(args[i].memory);
	if (prim)
		dnnl_primitive_destroy(prim);
	if (pd)
		dnnl_primitive_desc_destroy(pd);
	return st == dnnl_success
	               ? FS_OK
	               : fs_fail(e, FS_EINTERNAL, "oneDNN does not pack weights: status %d", (int)st);
}
