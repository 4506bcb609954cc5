/* check: whether nvcc works with this host's compiler, asked before the build relies on it. */
__global__ void fs_check(float *x)
{
	x[threadIdx.x] += 1.0f;
}
