/*
 * Kernels of test_simt: right ones whose answers are known, and wrong ones.
 */
#include "common/compute/cuda/device.cuh"

#include "tests/simt/selftest.h"

/* ---- right ---- */

__global__ void mma_kernel(const uint16_t *a, const uint16_t *b, float *c, int how)
{
	FS_SHARED(uint16_t, sa, [16][24]);
	FS_SHARED(uint16_t, sb, [16][24]);
	int lane = (int)threadIdx.x, g = lane / 4, t = lane % 4;
	uint32_t ra[4], rb[4];
	float rc[4];

	for (int i = lane; i < 256; i += 32)
		sa[i / 16][i % 16] = a[i];
	for (int i = lane; i < 256; i += 32)
		sb[i / 16][i % 16] = i % 16 < 8 ? b[i / 16 * 8 + i % 16] : 0;
	__syncthreads();
	if (how & SELF_LDMATRIX) {
		fs_ldmatrix_x4(ra, &sa[lane % 16][lane / 16 * 8]);
		fs_ldmatrix_x4_trans(rb, &sb[lane % 16][lane / 16 * 8]);
	} else {
		for (int i = 0; i < 4; i++)
			ra[i] = fs_ld4(&sa[g + i % 2 * 8][2 * t + i / 2 * 8]);
		for (int i = 0; i < 2; i++)
			rb[i] = sb[2 * t + 8 * i][g] | (uint32_t)sb[2 * t + 8 * i + 1][g] << 16;
	}
	for (int i = 0; i < 4; i++)
		rc[i] = c[(g + i / 2 * 8) * 8 + 2 * t + i % 2];
	if (how & SELF_BF16)
		fs_mma_16x8x16_bf16(rc, ra, rb);
	else
		fs_mma_16x8x16(rc, ra, rb);
	for (int i = 0; i < 4; i++)
		c[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = rc[i];
}

int self_mma(const uint16_t *a, const uint16_t *b, float *c, int how)
{
	return FS_LAUNCH(mma_kernel, 1, 32, 0, NULL, a, b, c, how);
}

__global__ void sum_kernel(const float *x, int n, float *sums)
{
	FS_SHARED_DYNAMIC(float, part);
	int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32, warps = (int)blockDim.x / 32;
	float s = 0;

	for (int i = (int)threadIdx.x; i < n; i += (int)blockDim.x)
		s += x[(int)blockIdx.x * n + i];
	s = fs_warp_sum(s);
	if (lane == 0)
		part[warp] = s;
	__syncthreads();
	if (warp > 0)
		return;
	s = fs_warp_sum(lane < warps ? part[lane] : 0.0f);
	if (lane == 0)
		sums[blockIdx.x] = s;
}

int self_sum(const float *x, int n, float *sums, int blocks, int threads)
{
	return FS_LAUNCH(
	        sum_kernel, (unsigned)blocks, (unsigned)threads, (size_t)threads / 32 * 4, NULL, x, n, sums);
}

template <bool barrier> __global__ void reverse_kernel(const int *x, int *y)
{
	FS_SHARED(int, tile, [64]);
	int i = (int)threadIdx.x;

	tile[i] = x[64 * (int)blockIdx.x + i];
	if (barrier)
		__syncthreads();
	y[64 * (int)blockIdx.x + i] = tile[63 - i];
}

int self_reverse(const int *x, int *y, int blocks, int barrier)
{
	return barrier ? FS_LAUNCH(reverse_kernel<true>, (unsigned)blocks, 64, 0, NULL, x, y)
	               : FS_LAUNCH(reverse_kernel<false>, (unsigned)blocks, 64, 0, NULL, x, y);
}

__global__ void shuffle_kernel(int *out)
{
	int lane = (int)threadIdx.x, at = lane;
	int one = __shfl_sync(FS_FULL, lane, 5);
	double two = __shfl_xor_sync(FS_FULL, (double)lane, 3);
	int half = 0;

	out[at] = one;
	out[at += 32] = (int)two;
	out[at += 32] = __shfl_down_sync(FS_FULL, lane, 4);
	out[at += 32] = __shfl_up_sync(FS_FULL, lane, 4);
	out[at += 32] = __shfl_sync(FS_FULL, lane, 3, 8);
	out[at += 32] = __shfl_down_sync(FS_FULL, lane, 3, 8);
	out[at += 32] = (int)__ballot_sync(FS_FULL, lane % 3 == 0);
	out[at += 32] = __any_sync(FS_FULL, lane == 7) + 2 * __all_sync(FS_FULL, lane < 31);
	if (lane < 16) /* half of a warp on its own */
		half = __shfl_xor_sync(0xffffu, lane, 1);
	else
		half = __shfl_xor_sync(0xffff0000u, lane, 2);
	out[at += 32] = half;
	__syncwarp();
	out[at += 32] = __syncthreads_count(lane < 9);
	out[at += 32] = (int)fs_warp_sum((float)lane);
	out[at += 32] = (int)fs_warp_max((float)(lane ^ 9));
}

int self_shuffles(int *out)
{
	return FS_LAUNCH(shuffle_kernel, 1, 32, 0, NULL, out);
}

template <bool wait> __global__ void copy_kernel(const uint32_t *x, uint32_t *y)
{
	FS_SHARED(uint32_t, to, [32][4]);
	int lane = (int)threadIdx.x;

	fs_cp16(to[lane], x + 4 * lane, lane != 31);
	fs_cp_commit();
	if (wait)
		fs_cp_wait<0>();
	__syncwarp();
	for (int k = 0; k < 4; k++)
		y[4 * lane + k] = to[lane ^ 1][k];
}

int self_copy(const uint32_t *x, uint32_t *y, int wait)
{
	return wait ? FS_LAUNCH(copy_kernel<true>, 1, 32, 0, NULL, x, y)
	            : FS_LAUNCH(copy_kernel<false>, 1, 32, 0, NULL, x, y);
}

/* ---- wrong ---- */

__global__ void wrong_kernel(enum self_wrong what, int *x)
{
	FS_SHARED(int, tile, [64]);
	FS_SHARED_DYNAMIC(int, more);
	int i = (int)threadIdx.x;

	tile[i] = more[i] = i;
	switch (what) {
	case SELF_DIVERGENT_BARRIER:
		if (i < 40)
			__syncthreads();
		else
			(void)__syncthreads_count(1);
		break;
	case SELF_ENDED_THREAD:
		if (i == 63)
			return;
		__syncthreads();
		break;
	case SELF_MISSING_LANE:
		if (i != 5)
			x[i] = __shfl_xor_sync(FS_FULL, i, 1);
		break;
	case SELF_OTHER_COLLECTIVE:
		if (i % 2)
			__syncwarp();
		else
			x[i] = __shfl_sync(FS_FULL, i, 0);
		break;
	case SELF_ODD_LOAD:
		x[i] = (int)fs_ld16(x + 1).x;
		break;
	case SELF_OUT_OF_SHARED:
		x[i] = *((const int *)tile + i + (x[0] ? 1 : 0)); /* a step that UBSan does not follow */
		break;
	case SELF_OUT_OF_DYNAMIC:
		x[i] = more[i + (x[0] ? 1 : 0)];
		break;
	case SELF_OUT_OF_GLOBAL:
		x[i + (x[0] ? 1 : 0)] = 1;
		break;
	default:
		break;
	}
}

__global__ void large_kernel(int *x)
{
	FS_SHARED(int, tile, [12289]);

	tile[threadIdx.x] = 1;
	x[threadIdx.x] = tile[threadIdx.x];
}

int self_wrong(enum self_wrong what, int *x)
{
	if (what == SELF_TOO_MUCH_SHARED)
		return FS_LAUNCH(large_kernel, 1, 64, 0, NULL, x);
	return FS_LAUNCH(wrong_kernel, 1, 64, 64 * sizeof(int), NULL, what, x);
}

int self_bad_launch(int *x)
{
	return FS_LAUNCH(wrong_kernel, 1, 1056, 0, NULL, SELF_WRONGS, x);
}
