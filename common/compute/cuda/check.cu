/* check: whether nvcc works with this host's compiler and is new enough, asked before the build relies on it.
 */
#include <cuda_runtime_api.h>

#if CUDART_VERSION < 12000
#error "CUDA 12.0 or newer is needed"
#endif

__global__ void fs_check(float *x)
{
	x[threadIdx.x] += 1.0f;
}
