/*
 * cudart: the part of the CUDA runtime's C interface that common/compute/cuda uses, answered on the host,
 * with the runtime's names, values and rules. Streams are lists that run when somebody waits for them and not
 * before, one operation a question, so whatever is used or given back too early shows. Memory of the card is
 * allocated to the byte and filled with 0xff; copies must name memory of the kind that they say, and under
 * the address sanitizer the program is stopped that reads the card's memory itself. After an illegal access
 * every call fails until the device is reset, as on a card.
 *
 * Threads: one at a time. fake_cuda says what PC it is, and what goes wrong on it.
 */
#ifndef FS_TESTS_SIMT_CUDART_H
#define FS_TESTS_SIMT_CUDART_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef enum cudaError {
	cudaSuccess = 0,
	cudaErrorInvalidValue = 1,
	cudaErrorMemoryAllocation = 2,
	cudaErrorInsufficientDriver = 35,
	cudaErrorNoDevice = 100,
	cudaErrorInvalidDevice = 101,
	cudaErrorNotReady = 600,
	cudaErrorIllegalAddress = 700,
	cudaErrorLaunchOutOfResources = 701,
	cudaErrorNotSupported = 801,
	cudaErrorStreamCaptureInvalidated = 901,
} cudaError_t;
typedef struct CUstream_st *cudaStream_t;
typedef struct CUevent_st *cudaEvent_t;
typedef struct CUgraph_st *cudaGraph_t;
typedef struct CUgraphExec_st *cudaGraphExec_t;
typedef struct CUmemPoolHandle_st *cudaMemPool_t;

struct cudaDeviceProp {
	char name[256];
	size_t totalGlobalMem;
	int major, minor, multiProcessorCount;
};
enum cudaMemcpyKind {
	cudaMemcpyHostToDevice = 1,
	cudaMemcpyDeviceToHost = 2,
	cudaMemcpyDeviceToDevice = 3,
};
enum cudaMemAllocationType { cudaMemAllocationTypePinned = 1 };
enum cudaMemLocationType { cudaMemLocationTypeDevice = 1 };
struct cudaMemPoolProps {
	enum cudaMemAllocationType allocType;
	struct {
		enum cudaMemLocationType type;
		int id;
	} location;
};
enum cudaMemPoolAttr {
	cudaMemPoolAttrReleaseThreshold = 4,
	cudaMemPoolAttrReservedMemCurrent = 5,
	cudaMemPoolAttrUsedMemCurrent = 7,
};
enum cudaDeviceAttr {
	cudaDevAttrPciBusId = 33,
	cudaDevAttrPciDeviceId = 34,
	cudaDevAttrPciDomainId = 50,
	cudaDevAttrMemoryPoolsSupported = 115,
};
enum cudaStreamCaptureMode { cudaStreamCaptureModeRelaxed = 2 };
#define cudaStreamNonBlocking 1u
#define cudaEventDisableTiming 2u
#define cudaHostAllocDefault 0u

cudaError_t cudaGetDeviceCount(int *n);
cudaError_t cudaDriverGetVersion(int *version);
cudaError_t cudaRuntimeGetVersion(int *version);
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int card);
cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attr, int card);
cudaError_t cudaSetDevice(int card);
cudaError_t cudaDeviceReset(void);
const char *cudaGetErrorName(cudaError_t rc);
const char *cudaGetErrorString(cudaError_t rc);
cudaError_t cudaGetLastError(void);
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *out, unsigned flags);
cudaError_t cudaStreamDestroy(cudaStream_t s);
cudaError_t cudaStreamQuery(cudaStream_t s);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *out, unsigned flags);
cudaError_t cudaEventDestroy(cudaEvent_t ev);
cudaError_t cudaEventRecord(cudaEvent_t ev, cudaStream_t s);
cudaError_t cudaEventQuery(cudaEvent_t ev);
cudaError_t cudaMalloc(void **out, size_t bytes);
cudaError_t cudaFree(void *p);
cudaError_t cudaMemPoolCreate(cudaMemPool_t *out, const struct cudaMemPoolProps *props);
cudaError_t cudaMemPoolDestroy(cudaMemPool_t pool);
cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr attr, void *value);
cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr attr, void *value);
cudaError_t cudaMemPoolTrimTo(cudaMemPool_t pool, size_t keep);
cudaError_t cudaMallocFromPoolAsync(void **out, size_t bytes, cudaMemPool_t pool, cudaStream_t s);
cudaError_t cudaFreeAsync(void *p, cudaStream_t s);
cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total);
cudaError_t cudaHostAlloc(void **out, size_t bytes, unsigned flags);
cudaError_t cudaFreeHost(void *p);
cudaError_t cudaMemcpyAsync(
        void *dst, const void *src, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t s);
cudaError_t cudaStreamBeginCapture(cudaStream_t s, enum cudaStreamCaptureMode mode);
cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t *out);
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *out, cudaGraph_t graph, unsigned long long flags);
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t s);
cudaError_t cudaGraphDestroy(cudaGraph_t graph);
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec);

/* ---- the PC ---- */

struct fake_cuda {
	int cards;     /* card 0 is the fastest, and the last in order of their places */
	int arch;      /* arch: 90 for compute capability 9.0 */
	int driver;    /* CUDA version that it supports, 13000; 0 = none */
	size_t memory; /* of a card */
	bool no_pools, no_cublas;
	/* what goes wrong */
	bool hang;                                 /* no event happens any more */
	bool stays_broken;                         /* a reset does not help */
	bool no_capture, bad_capture, no_instance; /* recordings */
	bool no_bias;                              /* in products */
	int illegal_at;                            /* the kernel that makes an illegal access, from 1 on */
	int refused_at;                            /* the launch that is refused, from 1 on */
	int no_pinned_at;                          /* the pinned allocation that fails, from 1 on */
	/* what happened */
	int kernels, launches, graph_launches, products, pinned_allocs, resets, polls;
	/* what is there */
	size_t used, peak; /* bytes of the card */
	int blocks, pinned, streams, events, graphs, pools, cublas;
};
extern struct fake_cuda fake_cuda;

/* A PC with one card of compute capability 9.0 and 1 GiB, and nothing wrong. Everything must have been given
 * back, but for what broke. */
void fake_cuda_init(void);

/* Whether the program would be stopped that followed p; true where no address sanitizer watches. */
bool fake_cuda_stops(const void *p);

/* A library's object, cleared; counted in fake_cuda.cublas. */
void *fake_cuda_make(size_t bytes);
void fake_cuda_drop(void *p);
/* An operation of a library's: runs in its turn, as often as it is part of a graph that is launched. */
int fake_cuda_queue(cudaStream_t s, void (*run)(void *arg), void (*drop)(void *arg), void *arg);

#endif
