/*
 * device: what the kernels stand on. Under nvcc it is the CUDA runtime with a few names of our own; for the
 * tests (FS_SIMT defined) the same names come from tests/simt, which runs blocks and threads on the host. A
 * kernel that uses only what is declared here, and plain C, runs in both. Included by .cu files alone.
 *
 * Conventions: a warp is 32 lanes; halves and bfloat16 travel as uint16_t bits; loads of 16 bytes ask for
 * addresses that are multiples of 16. Shared memory holds junk when a block begins, and is declared by
 * FS_SHARED and FS_SHARED_DYNAMIC. Kernels are launched by FS_LAUNCH, an int expression: 0 or a cudaError_t.
 */
#ifndef FS_COMMON_COMPUTE_CUDA_DEVICE_CUH
#define FS_COMMON_COMPUTE_CUDA_DEVICE_CUH

/* C's headers, outside the braces that follow */
#include <float.h>
#include <math.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <string.h>

#define _Noreturn __attribute__((noreturn)) /* C17's word, which C++ lacks */
extern "C" {
#include "common/compute/cuda/launch.h"
}
#undef _Noreturn

#ifdef FS_SIMT
#include "tests/simt/simt.h"
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#endif

#define FS_WARP 32
#define FS_FULL 0xffffffffu
#define FS_DEVICE static __device__ __forceinline__

#ifndef FS_SIMT

/* ---- launching ---- */

template <class... P>
static int fs_launch_typed(
        void (*kernel)(P...), dim3 grid, dim3 block, size_t shared, struct CUstream_st *s, P... p)
{
	void *args[] = {(void *)&p..., NULL};

	return (int)cudaLaunchKernel((const void *)kernel, grid, block, args, shared, s);
}

template <class... P, class... A>
static int fs_launch(
        void (*kernel)(P...), dim3 grid, dim3 block, size_t shared, struct CUstream_st *s, A... a)
{
	return fs_launch_typed<P...>(kernel, grid, block, shared, s, (P)a...);
}

/* kernel, grid (dim3 or number of blocks), block, bytes of dynamic shared memory, stream, arguments */
#define FS_LAUNCH(...) fs_launch(__VA_ARGS__)
/* Before a launch with more than 48 KiB of dynamic shared memory; 0 or an error, as the card allows it. */
#define FS_ALLOW_SHARED(bytes, ...)                                                                          \
	((int)cudaFuncSetAttribute(                                                                          \
	        (const void *)(__VA_ARGS__), cudaFuncAttributeMaxDynamicSharedMemorySize, (int)(bytes)))

/* Multiprocessors of the current card. */
static inline int fs_sms(void)
{
	int card = 0, n = 0;

	if (cudaGetDevice(&card) || cudaDeviceGetAttribute(&n, cudaDevAttrMultiProcessorCount, card))
		return 32;
	return n;
}

/* FS_SHARED(float, tile, [64][33]); 16-byte aligned */
#define FS_SHARED(type, name, dims) __shared__ __align__(16) type name dims
#define FS_SHARED_DYNAMIC(type, name)                                                                        \
	extern __shared__ __align__(16) unsigned char fs_dynamic_shared[];                                   \
	type *name = (type *)fs_dynamic_shared

/* ---- numbers ---- */

FS_DEVICE float fs_h2f(uint16_t h)
{
	return __half2float(__ushort_as_half(h));
}

FS_DEVICE uint16_t fs_f2h(float f)
{
	return __half_as_ushort(__float2half_rn(f));
}

FS_DEVICE float fs_b2f(uint16_t b)
{
	return __uint_as_float((uint32_t)b << 16);
}

FS_DEVICE uint16_t fs_f2b(float f)
{
	return __bfloat16_as_ushort(__float2bfloat16_rn(f));
}

/* Two numbers in a register, lo in the lower half. */
FS_DEVICE uint32_t fs_pack_h2(float lo, float hi)
{
	__half2 h = __floats2half2_rn(lo, hi);

	return *(uint32_t *)&h;
}

FS_DEVICE uint32_t fs_pack_b2(float lo, float hi)
{
	return (uint32_t)fs_f2b(lo) | (uint32_t)fs_f2b(hi) << 16;
}

FS_DEVICE float2 fs_unpack_h2(uint32_t h2)
{
	return __half22float2(*(__half2 *)&h2);
}

/* ---- memory: 16, 8 and 4 bytes at an address that is a multiple of as many ---- */

FS_DEVICE uint4 fs_ld16(const void *p)
{
	return *(const uint4 *)p;
}

FS_DEVICE uint2 fs_ld8(const void *p)
{
	return *(const uint2 *)p;
}

FS_DEVICE uint32_t fs_ld4(const void *p)
{
	return *(const uint32_t *)p;
}

/* The same of memory that nothing writes while the kernel runs and that is read once: it takes no room in the
 * first cache. */
FS_DEVICE uint4 fs_ld16_once(const void *p)
{
	uint4 v;

	asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
	        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
	        : "l"(p));
	return v;
}

FS_DEVICE uint2 fs_ld8_once(const void *p)
{
	uint2 v;

	asm("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
	return v;
}

FS_DEVICE uint32_t fs_ld4_once(const void *p)
{
	uint32_t v;

	asm("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(v) : "l"(p));
	return v;
}

/* Of memory that nothing writes while the kernel runs, but that is read more than once. */
FS_DEVICE uint4 fs_ld16_const(const void *p)
{
	return __ldg((const uint4 *)p);
}

FS_DEVICE uint32_t fs_ld4_const(const void *p)
{
	return __ldg((const unsigned int *)p);
}

FS_DEVICE uint32_t fs_ld2_const(const void *p)
{
	return __ldg((const unsigned short *)p);
}

/* Makes the compiler keep this address in registers instead of working it out again at every use. */
FS_DEVICE void fs_keep(const uint8_t *&p)
{
	asm volatile("" : "+l"(p));
}

FS_DEVICE void fs_st16(void *p, uint4 v)
{
	*(uint4 *)p = v;
}

/* Copies of 16 bytes from global to shared memory that run beside the kernel (from sm_80 on; before, they are
 * done at once). fill false: zeros instead, and src is not read. A group is what was begun between two
 * commits; after fs_cp_wait<n> all but the n latest groups of this thread have landed, for this thread. */
FS_DEVICE void fs_cp16(void *shared, const void *src, bool fill)
{
#if __CUDA_ARCH__ >= 800
	asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
	                     (uint32_t)__cvta_generic_to_shared(shared)),
	             "l"(src), "r"(fill ? 16 : 0)
	             : "memory");
#else
	*(uint4 *)shared = fill ? *(const uint4 *)src : make_uint4(0, 0, 0, 0);
#endif
}

FS_DEVICE void fs_cp_commit(void)
{
#if __CUDA_ARCH__ >= 800
	asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

template <int n> FS_DEVICE void fs_cp_wait(void)
{
#if __CUDA_ARCH__ >= 800
	asm volatile("cp.async.wait_group %0;" ::"n"(n) : "memory");
#endif
}

/* ---- tensor cores: a warp at once, fragments as in the PTX manual's m16n8k16 ---- */

/* c[16][8] += a[16][16] · b[16][8] in f32, a and b in f16. Lane l, g = l / 4, t = l % 4 holds
 * a: rows g, g + 8, g, g + 8, columns 2t, 2t + 1 (+ 8 in the last two); b: rows 2t, 2t + 1 (+ 8 in the
 * second), column g; c: row g columns 2t, 2t + 1, then row g + 8. */
FS_DEVICE void fs_mma_16x8x16(float c[4], const uint32_t a[4], const uint32_t b[2])
{
#if __CUDA_ARCH__ >= 800
	asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
	             "{%8, %9}, {%0, %1, %2, %3};"
	             : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
	             : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
	asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
	             "{%0, %1, %2, %3};"
	             : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
	             : "r"(a[0]), "r"(a[1]), "r"(b[0]));
	asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
	             "{%0, %1, %2, %3};"
	             : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
	             : "r"(a[2]), "r"(a[3]), "r"(b[1]));
#endif
}

/* The same in bf16, which sm_75 does not have: a kernel that uses it must not be chosen there. */
FS_DEVICE void fs_mma_16x8x16_bf16(float c[4], const uint32_t a[4], const uint32_t b[2])
{
#if __CUDA_ARCH__ >= 800
	asm volatile(
	        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
	        "{%8, %9}, {%0, %1, %2, %3};"
	        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
	        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
	__trap();
#endif
}

/* Four 8x8 matrices of 16-bit numbers from shared memory: lane l gives the address of row l % 8 of matrix
 * l / 8, and gets of each matrix row l / 4, columns 2(l % 4) and the next; transposed: column l / 4, rows
 * 2(l % 4) and the next. */
FS_DEVICE void fs_ldmatrix_x4(uint32_t r[4], const void *row)
{
	asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
	             : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
	             : "r"((uint32_t)__cvta_generic_to_shared(row))
	             : "memory");
}

FS_DEVICE void fs_ldmatrix_x4_trans(uint32_t r[4], const void *row)
{
	asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
	             : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
	             : "r"((uint32_t)__cvta_generic_to_shared(row))
	             : "memory");
}

#endif /* FS_SIMT */

/* Of a cudaError_t: what was asked makes no sense. */
#define FS_CUK_INVALID 1

/* To the range of f16: one infinity would be a row of NaN after a product, even by a weight of 0. NaN stays.
 */
FS_DEVICE float fs_hold_f16(float x)
{
	return x > 65504.0f ? 65504.0f : x < -65504.0f ? -65504.0f : x;
}

/* ---- a warp's sums ---- */

FS_DEVICE float fs_warp_sum(float v)
{
#pragma unroll
	for (int k = FS_WARP / 2; k > 0; k /= 2)
		v += __shfl_xor_sync(FS_FULL, v, k);
	return v;
}

FS_DEVICE float fs_warp_max(float v)
{
#pragma unroll
	for (int k = FS_WARP / 2; k > 0; k /= 2)
		v = fmaxf(v, __shfl_xor_sync(FS_FULL, v, k));
	return v;
}

#endif
