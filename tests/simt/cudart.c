/*
 * cudart: see the header. Memory is kept in one list, so that copies can be told memory of the wrong kind; a
 * list of operations is either a stream's or a graph's. An operation is dropped when nobody can run it again.
 */
#include "tests/simt/cudart.h"
#include "tests/simt/launches.h"

#include "common/base/base.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct fake_cuda fake_cuda;

static cudaError_t broken; /* the context's error, until it is reset */
static cudaError_t last;   /* of the call before */

/* ---- operations ---- */

struct op {
	void (*run)(void *arg);
	void (*drop)(void *arg);
	void *arg;
	struct op *next;
};
struct ops {
	struct op *first, **end; /* end: NULL while there is none */
};
struct CUstream_st {
	struct ops queue, captured;
	bool capturing;
	uint64_t queued, done;
};
struct CUevent_st {
	struct CUstream_st *s;
	uint64_t at;
};
struct CUgraph_st { /* and what was instantiated of it */
	struct ops ops;
	int refs;
};
struct CUgraphExec_st {
	struct CUgraph_st *g;
};

static void *need(size_t bytes)
{
	void *p = calloc(1, bytes);

	FS_ASSERT(p != NULL);
	return p;
}

/* Objects that the context takes along when it is reset. */
struct object {
	void *p;
	void (*drop)(void *p);
	struct object *next;
};
static struct object *objects;

static void *make_object(size_t bytes, void (*end)(void *p))
{
	struct object *o = need(sizeof(*o));

	*o = (struct object){.p = need(bytes), .drop = end, .next = objects};
	objects = o;
	return o->p;
}

static void drop_object(void *p)
{
	struct object **at = &objects, *o;

	while (*at && (*at)->p != p)
		at = &(*at)->next;
	FS_ASSERT(*at != NULL); /* dropped twice, or never made */
	o = *at;
	*at = o->next;
	o->drop(o->p);
	free(o);
}

void *fake_cuda_make(size_t bytes)
{
	fake_cuda.cublas++;
	return make_object(bytes, free);
}

void fake_cuda_drop(void *p)
{
	fake_cuda.cublas--;
	drop_object(p);
}

static void append(struct ops *o, struct op *op)
{
	if (!o->end)
		o->end = &o->first;
	*o->end = op;
	o->end = &op->next;
}

static struct op *take(struct ops *o)
{
	struct op *op = o->first;

	o->first = op->next;
	if (!o->first)
		o->end = NULL;
	return op;
}

static void drop_op(struct op *op)
{
	op->drop(op->arg);
	free(op);
}

static void drop_all(struct ops *o)
{
	while (o->first)
		drop_op(take(o));
}

static cudaError_t say(cudaError_t rc)
{
	last = rc;
	return rc;
}

int fake_cuda_queue(cudaStream_t s, void (*run)(void *arg), void (*drop)(void *arg), void *arg)
{
	struct op *op;

	if (broken) {
		drop(arg);
		return say(broken);
	}
	op = need(sizeof(*op));
	*op = (struct op){.run = run, .drop = drop, .arg = arg};
	if (s->capturing) {
		append(&s->captured, op);
		return cudaSuccess;
	}
	append(&s->queue, op);
	s->queued++;
	return cudaSuccess;
}

static void run_one(struct CUstream_st *s)
{
	struct op *op = take(&s->queue);

	if (!broken)
		op->run(op->arg);
	drop_op(op);
	s->done++;
}

static void nothing(void *arg)
{
}

/* ---- kernels ---- */

static void run_job(void *arg)
{
	if (broken)
		return;
	if (++fake_cuda.kernels == fake_cuda.illegal_at)
		broken = cudaErrorIllegalAddress;
	else
		simt_job_run(arg);
}

static void drop_job(void *arg)
{
	simt_job_drop(arg);
}

static int on_launch(void *arg, struct CUstream_st *s, struct simt_job *job)
{
	if (!broken && ++fake_cuda.launches == fake_cuda.refused_at) {
		simt_job_drop(job);
		return say(cudaErrorLaunchOutOfResources);
	}
	return fake_cuda_queue(s, run_job, drop_job, job);
}

/* ---- memory ---- */

struct block {
	uint8_t *p;
	size_t size;
	bool pinned, freed; /* freed: by a stream that has not got there */
	struct block *next;
};
static struct block *blocks;

static cudaError_t new_block(void **out, size_t size, bool pinned)
{
	struct block *b;

	if (broken)
		return say(broken);
	if (!pinned && size > fake_cuda.memory - fake_cuda.used)
		return say(cudaErrorMemoryAllocation);
	b = need(sizeof(*b));
	FS_ASSERT(posix_memalign((void **)&b->p, 512, size ? size : 1) == 0); /* to the byte */
	if (size <= (size_t)8 << 20) /* the rest is written by copies, or scratch */
		memset(b->p, 0xff, size);
	b->size = size;
	b->pinned = pinned;
	b->next = blocks;
	blocks = b;
	if (!pinned) {
		fake_cuda.used += size;
		fake_cuda.peak = FS_MAX(fake_cuda.peak, fake_cuda.used);
		fake_cuda.blocks++;
	} else {
		fake_cuda.pinned++;
	}
	*out = b->p;
	return cudaSuccess;
}

static struct block **block_at(const void *p)
{
	struct block **at = &blocks;

	while (*at && (*at)->p != p)
		at = &(*at)->next;
	return at;
}

static void remove_block(struct block **at)
{
	struct block *b = *at;

	*at = b->next;
	free(b->p);
	free(b);
}

/* What the caller sees of a free; the memory itself may go later. */
static void count_freed(struct block *b)
{
	if (b->pinned) {
		fake_cuda.pinned--;
	} else {
		fake_cuda.used -= b->size;
		fake_cuda.blocks--;
	}
	b->freed = true;
}

static cudaError_t free_block(void *p, bool pinned)
{
	struct block **at = block_at(p);

	if (broken)
		return say(broken);
	if (!*at || (*at)->freed || (*at)->pinned != pinned)
		return say(cudaErrorInvalidValue);
	count_freed(*at);
	remove_block(at);
	return cudaSuccess;
}

/* Whether n bytes at p are memory of that kind. */
static bool is_block(const void *p, size_t n, bool pinned)
{
	for (const struct block *b = blocks; b; b = b->next) {
		uintptr_t at = (uintptr_t)p - (uintptr_t)b->p;

		if (at < b->size && n <= b->size - at)
			return b->pinned == pinned && !b->freed;
	}
	return false;
}

cudaError_t cudaMalloc(void **out, size_t bytes)
{
	return new_block(out, bytes, false);
}

cudaError_t cudaFree(void *p)
{
	return free_block(p, false);
}

cudaError_t cudaHostAlloc(void **out, size_t bytes, unsigned flags)
{
	if (++fake_cuda.pinned_allocs == fake_cuda.no_pinned_at)
		return say(cudaErrorMemoryAllocation);
	return new_block(out, bytes, true);
}

cudaError_t cudaFreeHost(void *p)
{
	return free_block(p, true);
}

cudaError_t cudaMallocFromPoolAsync(void **out, size_t bytes, cudaMemPool_t pool, cudaStream_t s)
{
	return new_block(out, bytes, false);
}

static void free_later(void *arg)
{
	remove_block(block_at(arg));
}

cudaError_t cudaFreeAsync(void *p, cudaStream_t s)
{
	struct block **at = block_at(p);

	if (broken)
		return say(broken);
	if (!*at || (*at)->freed || (*at)->pinned || s->capturing)
		return say(cudaErrorInvalidValue);
	count_freed(*at);
	return (cudaError_t)fake_cuda_queue(s, free_later, nothing, p);
}

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total)
{
	*free_bytes = fake_cuda.memory - fake_cuda.used;
	*total = fake_cuda.memory;
	return say(broken);
}

struct CUmemPoolHandle_st {
	int card;
};

cudaError_t cudaMemPoolCreate(cudaMemPool_t *out, const struct cudaMemPoolProps *props)
{
	if (broken)
		return say(broken);
	*out = make_object(sizeof(**out), free);
	fake_cuda.pools++;
	return cudaSuccess;
}

cudaError_t cudaMemPoolDestroy(cudaMemPool_t pool)
{
	drop_object(pool);
	fake_cuda.pools--;
	return cudaSuccess;
}

cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr attr, void *value)
{
	return cudaSuccess;
}

/* What was freed is given back at once. */
cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr attr, void *value)
{
	uint64_t used = fake_cuda.used;

	memcpy(value, &used, sizeof(used));
	return say(broken);
}

cudaError_t cudaMemPoolTrimTo(cudaMemPool_t pool, size_t keep)
{
	return say(broken);
}

/* ---- copies ---- */

struct copy {
	void *dst;
	const void *src;
	size_t bytes;
};

static void run_copy(void *arg)
{
	const struct copy *c = arg;

	memcpy(c->dst, c->src, c->bytes);
}

cudaError_t cudaMemcpyAsync(
        void *dst, const void *src, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t s)
{
	struct copy *c;

	if (broken)
		return say(broken);
	if (!is_block(dst, bytes, kind == cudaMemcpyDeviceToHost) ||
	        !is_block(src, bytes, kind == cudaMemcpyHostToDevice))
		return say(cudaErrorInvalidValue);
	c = need(sizeof(*c));
	*c = (struct copy){.dst = dst, .src = src, .bytes = bytes};
	return (cudaError_t)fake_cuda_queue(s, run_copy, free, c);
}

/* ---- streams and events ---- */

static void end_stream(void *p)
{
	struct CUstream_st *s = p;

	drop_all(&s->queue);
	drop_all(&s->captured);
	free(s);
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *out, unsigned flags)
{
	if (broken)
		return say(broken);
	*out = make_object(sizeof(**out), end_stream);
	fake_cuda.streams++;
	return cudaSuccess;
}

/* As on a card, what was queued runs all the same. */
cudaError_t cudaStreamDestroy(cudaStream_t s)
{
	if (broken)
		return say(broken);
	while (s->queue.first)
		run_one(s);
	drop_object(s);
	fake_cuda.streams--;
	return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t s)
{
	return say(broken ? broken : s->queue.first ? cudaErrorNotReady : cudaSuccess);
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *out, unsigned flags)
{
	if (broken)
		return say(broken);
	*out = make_object(sizeof(**out), free);
	fake_cuda.events++;
	return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t ev)
{
	drop_object(ev);
	fake_cuda.events--;
	return say(broken);
}

cudaError_t cudaEventRecord(cudaEvent_t ev, cudaStream_t s)
{
	ev->s = s;
	ev->at = s->queued;
	return say(broken);
}

/* One operation a question. */
cudaError_t cudaEventQuery(cudaEvent_t ev)
{
	struct CUstream_st *s = ev->s;

	fake_cuda.polls++;
	if (fake_cuda.hang)
		return say(cudaErrorNotReady);
	if (!broken && s && s->done < ev->at)
		run_one(s);
	return say(broken ? broken : s && s->done < ev->at ? cudaErrorNotReady : cudaSuccess);
}

/* ---- graphs ---- */

static void unref_graph(struct CUgraph_st *g)
{
	if (--g->refs)
		return;
	drop_all(&g->ops);
	free(g);
}

cudaError_t cudaStreamBeginCapture(cudaStream_t s, enum cudaStreamCaptureMode mode)
{
	if (broken || fake_cuda.no_capture || s->capturing)
		return say(broken ? broken : cudaErrorNotSupported);
	s->capturing = true;
	return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t *out)
{
	struct CUgraph_st *g;

	*out = NULL;
	if (broken || !s->capturing)
		return say(broken ? broken : cudaErrorInvalidValue);
	s->capturing = false;
	if (fake_cuda.bad_capture) {
		drop_all(&s->captured);
		return say(cudaErrorStreamCaptureInvalidated);
	}
	g = need(sizeof(*g));
	g->refs = 1;
	g->ops = s->captured;
	s->captured = (struct ops){NULL, NULL};
	if (g->ops.first && g->ops.end == &s->captured.first)
		g->ops.end = &g->ops.first;
	fake_cuda.graphs++;
	*out = g;
	return cudaSuccess;
}

static void end_exec(void *p)
{
	struct CUgraphExec_st *exec = p;

	unref_graph(exec->g);
	free(exec);
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *out, cudaGraph_t graph, unsigned long long flags)
{
	if (broken || fake_cuda.no_instance)
		return say(broken ? broken : cudaErrorMemoryAllocation);
	*out = make_object(sizeof(**out), end_exec);
	(*out)->g = graph;
	graph->refs++;
	fake_cuda.graphs++;
	return cudaSuccess;
}

static void run_graph(void *arg)
{
	struct CUgraph_st *g = arg;

	for (struct op *op = g->ops.first; op && !broken; op = op->next)
		op->run(op->arg);
}

static void drop_graph(void *arg)
{
	unref_graph(arg);
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t s)
{
	if (broken)
		return say(broken);
	fake_cuda.graph_launches++;
	exec->g->refs++;
	return (cudaError_t)fake_cuda_queue(s, run_graph, drop_graph, exec->g);
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph)
{
	unref_graph(graph);
	fake_cuda.graphs--;
	return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec)
{
	drop_object(exec);
	fake_cuda.graphs--;
	return cudaSuccess;
}

/* ---- the PC ---- */

cudaError_t cudaGetDeviceCount(int *n)
{
	if (fake_cuda.driver < 13000)
		return say(cudaErrorInsufficientDriver);
	*n = fake_cuda.cards;
	return say(fake_cuda.cards ? cudaSuccess : cudaErrorNoDevice);
}

cudaError_t cudaDriverGetVersion(int *version)
{
	*version = fake_cuda.driver;
	return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int *version)
{
	*version = 13000;
	return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int card)
{
	if (card < 0 || card >= fake_cuda.cards)
		return say(cudaErrorInvalidDevice);
	memset(p, 0, sizeof(*p));
	snprintf(p->name, sizeof(p->name), "Fake card %c", 'A' + card);
	p->totalGlobalMem = fake_cuda.memory;
	p->major = fake_cuda.arch / 10;
	p->minor = fake_cuda.arch % 10;
	p->multiProcessorCount = 4;
	return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attr, int card)
{
	*value = !fake_cuda.no_pools;
	return cudaSuccess;
}

cudaError_t cudaSetDevice(int card)
{
	if (card < 0 || card >= fake_cuda.cards)
		return say(cudaErrorInvalidDevice);
	simt_set_hook(on_launch, NULL);
	return say(broken);
}

cudaError_t cudaDeviceReset(void)
{
	fake_cuda.resets++;
	/* what is queued may name blocks, and does not run any more */
	broken = broken ? broken : cudaErrorIllegalAddress;
	while (blocks) {
		if (!blocks->freed)
			count_freed(blocks);
		remove_block(&blocks);
	}
	while (objects)
		drop_object(objects->p);
	fake_cuda.pools = fake_cuda.streams = fake_cuda.events = fake_cuda.graphs = fake_cuda.cublas = 0;
	if (!fake_cuda.stays_broken)
		broken = cudaSuccess;
	return say(cudaSuccess);
}

const char *cudaGetErrorName(cudaError_t rc)
{
	static const struct {
		cudaError_t rc;
		const char *name;
	} names[] = {{cudaSuccess, "cudaSuccess"}, {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation"},
	        {cudaErrorIllegalAddress, "cudaErrorIllegalAddress"},
	        {cudaErrorLaunchOutOfResources, "cudaErrorLaunchOutOfResources"}};

	for (size_t i = 0; i < FS_ARRAY_LEN(names); i++)
		if (names[i].rc == rc)
			return names[i].name;
	return "cudaErrorOfAnotherKind";
}

const char *cudaGetErrorString(cudaError_t rc)
{
	return rc == cudaErrorIllegalAddress     ? "an illegal memory access was encountered"
	       : rc == cudaErrorMemoryAllocation ? "out of memory"
	                                         : "another error";
}

cudaError_t cudaGetLastError(void)
{
	cudaError_t rc = last;

	last = cudaSuccess;
	return rc;
}

void fake_cuda_init(void)
{
	cudaDeviceReset();
	broken = last = cudaSuccess;
	memset(&fake_cuda, 0, sizeof(fake_cuda));
	fake_cuda.cards = 1;
	fake_cuda.arch = 90;
	fake_cuda.driver = 13000;
	fake_cuda.memory = (size_t)1 << 30;
}
