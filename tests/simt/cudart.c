/*
 * cudart: see the header. A list of operations is either a stream's or a graph's. An operation is dropped
 * when nobody can run it again.
 */
#include "tests/simt/cudart_inside.h"
#include "tests/simt/launches.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct fake_cuda fake_cuda;

cudaError_t fake_cuda_broken;
static cudaError_t last; /* of the call before */

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

void *fake_cuda_need(size_t bytes)
{
	void *p = calloc(1, bytes);

	FS_ASSERT(p != NULL);
	return p;
}

struct object {
	void *p;
	void (*drop)(void *p);
	struct object *next;
};
static struct object *objects;

void *fake_cuda_object(size_t bytes, void (*end)(void *p))
{
	struct object *o = fake_cuda_need(sizeof(*o));

	*o = (struct object){.p = fake_cuda_need(bytes), .drop = end, .next = objects};
	objects = o;
	return o->p;
}

void fake_cuda_drop_object(void *p)
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
	return fake_cuda_object(bytes, free);
}

void fake_cuda_drop(void *p)
{
	fake_cuda.cublas--;
	fake_cuda_drop_object(p);
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

cudaError_t fake_cuda_say(cudaError_t rc)
{
	last = rc;
	return rc;
}

int fake_cuda_queue(cudaStream_t s, void (*run)(void *arg), void (*drop)(void *arg), void *arg)
{
	struct op *op;

	if (fake_cuda_broken) {
		drop(arg);
		return fake_cuda_say(fake_cuda_broken);
	}
	op = fake_cuda_need(sizeof(*op));
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

	if (!fake_cuda_broken) {
		fake_cuda_reach(true);
		op->run(op->arg);
		fake_cuda_reach(false);
	}
	drop_op(op);
	s->done++;
}

bool fake_cuda_captures(cudaStream_t s)
{
	return s->capturing;
}

/* ---- kernels ---- */

static void run_job(void *arg)
{
	if (fake_cuda_broken)
		return;
	if (++fake_cuda.kernels == fake_cuda.illegal_at)
		fake_cuda_broken = cudaErrorIllegalAddress;
	else
		simt_job_run(arg);
}

static void drop_job(void *arg)
{
	simt_job_drop(arg);
}

static int on_launch(void *arg, struct CUstream_st *s, struct simt_job *job)
{
	if (!fake_cuda_broken && ++fake_cuda.launches == fake_cuda.refused_at) {
		simt_job_drop(job);
		return fake_cuda_say(cudaErrorLaunchOutOfResources);
	}
	return fake_cuda_queue(s, run_job, drop_job, job);
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
	if (fake_cuda_broken)
		return fake_cuda_say(fake_cuda_broken);
	*out = fake_cuda_object(sizeof(**out), end_stream);
	fake_cuda.streams++;
	return cudaSuccess;
}

/* As on a card, what was queued runs all the same. */
cudaError_t cudaStreamDestroy(cudaStream_t s)
{
	if (fake_cuda_broken)
		return fake_cuda_say(fake_cuda_broken);
	while (s->queue.first)
		run_one(s);
	fake_cuda_drop_object(s);
	fake_cuda.streams--;
	return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t s)
{
	return fake_cuda_say(fake_cuda_broken ? fake_cuda_broken
	                     : s->queue.first ? cudaErrorNotReady
	                                      : cudaSuccess);
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *out, unsigned flags)
{
	if (fake_cuda_broken)
		return fake_cuda_say(fake_cuda_broken);
	*out = fake_cuda_object(sizeof(**out), free);
	fake_cuda.events++;
	return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t ev)
{
	fake_cuda_drop_object(ev);
	fake_cuda.events--;
	return fake_cuda_say(fake_cuda_broken);
}

cudaError_t cudaEventRecord(cudaEvent_t ev, cudaStream_t s)
{
	ev->s = s;
	ev->at = s->queued;
	return fake_cuda_say(fake_cuda_broken);
}

/* One operation a question. */
cudaError_t cudaEventQuery(cudaEvent_t ev)
{
	struct CUstream_st *s = ev->s;

	fake_cuda.polls++;
	if (fake_cuda.hang)
		return fake_cuda_say(cudaErrorNotReady);
	if (!fake_cuda_broken && s && s->done < ev->at)
		run_one(s);
	return fake_cuda_say(fake_cuda_broken        ? fake_cuda_broken
	                     : s && s->done < ev->at ? cudaErrorNotReady
	                                             : cudaSuccess);
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
	if (fake_cuda_broken || fake_cuda.no_capture || s->capturing)
		return fake_cuda_say(fake_cuda_broken ? fake_cuda_broken : cudaErrorNotSupported);
	s->capturing = true;
	return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t *out)
{
	struct CUgraph_st *g;

	*out = NULL;
	if (fake_cuda_broken || !s->capturing)
		return fake_cuda_say(fake_cuda_broken ? fake_cuda_broken : cudaErrorInvalidValue);
	s->capturing = false;
	if (fake_cuda.bad_capture) {
		drop_all(&s->captured);
		return fake_cuda_say(cudaErrorStreamCaptureInvalidated);
	}
	g = fake_cuda_need(sizeof(*g));
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
	if (fake_cuda_broken || fake_cuda.no_instance)
		return fake_cuda_say(fake_cuda_broken ? fake_cuda_broken : cudaErrorMemoryAllocation);
	*out = fake_cuda_object(sizeof(**out), end_exec);
	(*out)->g = graph;
	graph->refs++;
	fake_cuda.graphs++;
	return cudaSuccess;
}

static void run_graph(void *arg)
{
	struct CUgraph_st *g = arg;

	for (struct op *op = g->ops.first; op && !fake_cuda_broken; op = op->next)
		op->run(op->arg);
}

static void drop_graph(void *arg)
{
	unref_graph(arg);
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t s)
{
	if (fake_cuda_broken)
		return fake_cuda_say(fake_cuda_broken);
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
	fake_cuda_drop_object(exec);
	fake_cuda.graphs--;
	return cudaSuccess;
}

/* ---- the PC ---- */

cudaError_t cudaGetDeviceCount(int *n)
{
	if (fake_cuda.driver < 13000)
		return fake_cuda_say(cudaErrorInsufficientDriver);
	*n = fake_cuda.cards;
	return fake_cuda_say(fake_cuda.cards ? cudaSuccess : cudaErrorNoDevice);
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
		return fake_cuda_say(cudaErrorInvalidDevice);
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
	*value = attr == cudaDevAttrMemoryPoolsSupported ? !fake_cuda.no_pools
	         : attr == cudaDevAttrPciBusId           ? 64 - card
	                                                 : 0;
	return cudaSuccess;
}

cudaError_t cudaSetDevice(int card)
{
	if (card < 0 || card >= fake_cuda.cards)
		return fake_cuda_say(cudaErrorInvalidDevice);
	simt_set_hook(on_launch, NULL);
	return fake_cuda_say(fake_cuda_broken);
}

cudaError_t cudaDeviceReset(void)
{
	fake_cuda.resets++;
	/* what is queued may name blocks, and does not run any more */
	fake_cuda_broken = fake_cuda_broken ? fake_cuda_broken : cudaErrorIllegalAddress;
	fake_cuda_free_all(
	        false); /* "cudaDeviceReset() will not destroy memory allocations by cudaMallocAsync()" */
	while (objects)
		fake_cuda_drop_object(objects->p);
	fake_cuda.streams = fake_cuda.events = fake_cuda.graphs = fake_cuda.cublas = 0;
	if (!fake_cuda.stays_broken)
		fake_cuda_broken = cudaSuccess;
	return fake_cuda_say(cudaSuccess);
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
	fake_cuda_free_all(true);
	fake_cuda_broken = last = cudaSuccess;
	memset(&fake_cuda, 0, sizeof(fake_cuda));
	fake_cuda.cards = 1;
	fake_cuda.arch = 90;
	fake_cuda.driver = 13000;
	fake_cuda.memory = (size_t)1 << 30;
}
