/*
 * graph: steps that repeat, as CUDA graphs. The first time that a step is seen its operations are queued as
 * ever and, beside that, captured on a stream that runs nothing (FS_CUDA_QUEUE). So nothing depends on the
 * capture: when it can not be used, the step has run all the same and is tried again the next time, a few
 * times in all. A capture in relaxed mode forbids the thread nothing, and kernels that the driver has not
 * loaded yet are loaded by their first, uncaptured launch.
 */
#include "common/compute/cuda/cuda.h"

#include <string.h>

#define MAX_FAILURES 3

/* Ends a capture; *graph is NULL unless it is whole. */
static void end_capture(struct fs_cuda *c, cudaGraph_t *graph)
{
	cudaGraph_t g = NULL;
	int rc = cudaStreamEndCapture(c->rec.stream, &g);

	c->rec.on = false;
	if ((rc || c->rec.broken || c->dev.err) && g) {
		cudaGraphDestroy(g);
		g = NULL;
	}
	if (rc)
		(void)cudaGetLastError();
	*graph = rc ? NULL : g;
}

static void give_up_capture(struct fs_cuda *c)
{
	cudaGraph_t g;

	if (!c->rec.on)
		return;
	c->rec.broken = true;
	end_capture(c, &g);
}

/* True: queued. A graph that does not start is dropped, and its step is run. */
static bool launch(struct fs_cuda *c, int i)
{
	int rc = cudaGraphLaunch(c->rec.r[i].exec, c->stream);

	if (!rc) {
		c->rec.r[i].used = ++c->rec.tick;
		return true;
	}
	fs_warn("%s: a recorded step does not start: %s", c->dev.name, cudaGetErrorString((cudaError_t)rc));
	(void)cudaGetLastError();
	cudaGraphExecDestroy(c->rec.r[i].exec);
	memset(&c->rec.r[i], 0, sizeof(c->rec.r[i]));
	c->rec.failures++;
	return false;
}

bool fs_cuda_replay(struct fs_dev *d, uint64_t key)
{
	struct fs_cuda *c = fs_cuda(d);
	int rc;

	fs_cuda_load_end(c);
	fs_cuda_forget_forms(c);
	give_up_capture(c);
	if (!fs_cuda_usable(c) || c->rec.failures >= MAX_FAILURES)
		return false;
	for (int i = 0; i < FS_RECORDINGS; i++)
		if (c->rec.r[i].exec && c->rec.r[i].key == key)
			return launch(c, i);
	rc = cudaStreamBeginCapture(c->rec.stream, cudaStreamCaptureModeRelaxed);
	if (rc) {
		(void)cudaGetLastError();
		c->rec.failures++;
		return false;
	}
	c->rec.on = true;
	c->rec.broken = false;
	c->rec.key = key;
	return false;
}

void fs_cuda_recorded(struct fs_dev *d)
{
	struct fs_cuda *c = fs_cuda(d);
	cudaGraphExec_t exec = NULL;
	cudaGraph_t graph;
	int oldest = 0, rc;

	fs_cuda_forget_forms(c);
	if (!c->rec.on)
		return;
	end_capture(c, &graph);
	if (!graph) {
		c->rec.failures += !c->dev.err;
		return;
	}
	rc = cudaGraphInstantiate(&exec, graph, 0);
	cudaGraphDestroy(graph);
	if (rc) {
		(void)cudaGetLastError();
		fs_warn("%s: a step can not be recorded: %s", d->name, cudaGetErrorString((cudaError_t)rc));
		c->rec.failures++;
		return;
	}
	for (int i = 0; i < FS_RECORDINGS; i++)
		if (c->rec.r[i].used < c->rec.r[oldest].used)
			oldest = i;
	if (c->rec.r[oldest].exec)
		cudaGraphExecDestroy(c->rec.r[oldest].exec);
	c->rec.r[oldest].key = c->rec.key;
	c->rec.r[oldest].exec = exec;
	c->rec.r[oldest].used = ++c->rec.tick;
	c->rec.failures = 0;
}

/* One that is running is freed by the runtime when it has ended. */
void fs_cuda_forget(struct fs_dev *d)
{
	struct fs_cuda *c = fs_cuda(d);

	c->rec.broken = true;
	for (int i = 0; i < FS_RECORDINGS; i++)
		if (c->rec.r[i].exec && !c->dev.lost)
			cudaGraphExecDestroy(c->rec.r[i].exec);
	memset(c->rec.r, 0, sizeof(c->rec.r));
}
