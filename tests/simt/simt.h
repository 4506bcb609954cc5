/*
 * simt: the CUDA that the kernels of common/compute/cuda see in tests: blocks as loops, the threads of a
 * block as fibers of the thread that launches, shared memory, warp collectives, tensor-core products by the
 * documented fragments. Kernels are compiled by the host's C++ compiler with FS_SIMT; device memory is plain
 * memory. What a card forgives by luck ends the program here with a line that says where: threads that do not
 * reach a barrier, lanes that do not reach a collective or name another one, vector accesses at odd
 * addresses. Shared memory is filled with 0xff (NaN) before every block and allocated to the byte, warps and
 * lanes run in an order that changes from block to block, copies of cp.async land as late as they may: what
 * depends on luck gives other numbers. With ThreadSanitizer, accesses that no barrier orders are reported.
 *
 * Threads: any; each has its own fibers and its own record of launches. Kernels of one launch run to their
 * end before FS_LAUNCH returns, unless a hook takes them.
 */
#ifndef FS_TESTS_SIMT_H
#define FS_TESTS_SIMT_H

#include <limits.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <tuple>

#include "tests/simt/launches.h"

extern "C" {
float fs_f16_to_f32(uint16_t h);
uint16_t fs_f32_to_f16(float f);
uint16_t fs_f32_to_bf16(float f);
}

#define __global__ static
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) alignas(n)

/* ---- vector types ---- */

#define SIMT_VECTOR2(name, elem)                                                                             \
	struct alignas(2 * sizeof(elem)) name {                                                              \
		elem x, y;                                                                                   \
	};                                                                                                   \
	static inline name make_##name(elem x, elem y)                                                       \
	{                                                                                                    \
		return name{x, y};                                                                           \
	}
#define SIMT_VECTOR4(name, elem)                                                                             \
	struct alignas(4 * sizeof(elem)) name {                                                              \
		elem x, y, z, w;                                                                             \
	};                                                                                                   \
	static inline name make_##name(elem x, elem y, elem z, elem w)                                       \
	{                                                                                                    \
		return name{x, y, z, w};                                                                     \
	}
SIMT_VECTOR2(float2, float)
SIMT_VECTOR2(int2, int)
SIMT_VECTOR2(uint2, unsigned int)
SIMT_VECTOR4(float4, float)
SIMT_VECTOR4(int4, int)
SIMT_VECTOR4(uint4, unsigned int)
SIMT_VECTOR4(ushort4, unsigned short)
SIMT_VECTOR4(uchar4, unsigned char)

struct uint3 {
	unsigned int x, y, z;
};
struct dim3 {
	unsigned int x, y, z;

	dim3(unsigned int nx = 1, unsigned int ny = 1, unsigned int nz = 1) : x(nx), y(ny), z(nz)
	{
	}
};

/* ---- where this fiber is ---- */

struct simt_place {
	uint3 thread, block;
	dim3 block_dim, grid_dim;
	int lane;
};
extern thread_local simt_place *simt_now;
#define threadIdx (simt_now->thread)
#define blockIdx (simt_now->block)
#define blockDim (simt_now->block_dim)
#define gridDim (simt_now->grid_dim)
#define warpSize 32

[[noreturn]] void simt_fail(const char *fmt, ...) __attribute__((format(printf, 1, 2)));

/* ---- launching ---- */

struct simt_job {
	virtual void body() const = 0; /* one thread's run */
	virtual ~simt_job()
	{
	}
	const char *name;
	const void *kernel;
	dim3 grid, block;
	size_t shared;
};

/* To the hook, or at once. Takes the job over. */
int simt_submit(struct CUstream_st *s, simt_job *job);

template <class... P> struct simt_job_of : simt_job {
	void (*call)(P...);
	std::tuple<P...> args;

	simt_job_of(void (*f)(P...), P... p) : call(f), args(p...)
	{
	}
	void body() const override
	{
		std::apply(call, args);
	}
};

template <class... P, class... A>
static int simt_launch(const char *name, void (*kernel)(P...), dim3 grid, dim3 block, size_t shared,
        struct CUstream_st *s, A... a)
{
	simt_job *job = new simt_job_of<P...>(kernel, (P)a...);

	job->name = name;
	job->kernel = (const void *)kernel;
	job->grid = grid;
	job->block = block;
	job->shared = shared;
	return simt_submit(s, job);
}
#define FS_LAUNCH(...) simt_launch(#__VA_ARGS__, __VA_ARGS__)

int fs_sms(void);
int simt_allow_shared(const void *kernel, size_t bytes);
#define FS_ALLOW_SHARED(bytes, ...) simt_allow_shared((const void *)(__VA_ARGS__), (size_t)(bytes))

/* ---- shared memory ---- */

void *simt_shared(const void *key, size_t bytes); /* the block's own, made by the first thread that asks */
void *simt_dynamic(void);
#define FS_SHARED(type, name, dims)                                                                          \
	typedef type name##_simt_type dims;                                                                  \
	static const char name##_simt_key = 0;                                                               \
	name##_simt_type &name = *(name##_simt_type *)simt_shared(&name##_simt_key, sizeof(name##_simt_type))
#define FS_SHARED_DYNAMIC(type, name) type *name = (type *)simt_dynamic()

/* ---- barriers and collectives ---- */

void __syncthreads(void);
int __syncthreads_or(int v);
int __syncthreads_count(int v);
void __syncwarp(unsigned int mask = 0xffffffffu);
static inline void __threadfence(void)
{
}
static inline void __threadfence_block(void)
{
}

/* from: the lane whose 8 bytes this lane gets. */
uint64_t simt_shuffle(unsigned int mask, uint64_t bits, int from, const char *name);
unsigned int simt_ballot(unsigned int mask, bool v);

template <class T> static inline T simt_shuffle_of(unsigned int mask, T v, int from, const char *name)
{
	uint64_t bits = 0;
	T got;

	static_assert(sizeof(T) <= 8, "shuffles move 8 bytes at most");
	memcpy(&bits, &v, sizeof(v));
	bits = simt_shuffle(mask, bits, from, name);
	memcpy(&got, &bits, sizeof(got));
	return got;
}

template <class T> static inline T __shfl_sync(unsigned int mask, T v, int from, int width = 32)
{
	int lane = simt_now->lane;

	return simt_shuffle_of(mask, v, (lane & ~(width - 1)) | (from & (width - 1)), "__shfl_sync");
}

template <class T> static inline T __shfl_xor_sync(unsigned int mask, T v, int bits, int width = 32)
{
	int lane = simt_now->lane, from = lane ^ bits;

	/* lanes of a later group are out of reach, those of earlier ones are not */
	return simt_shuffle_of(
	        mask, v, from >= (lane & ~(width - 1)) + width ? lane : from, "__shfl_xor_sync");
}

template <class T> static inline T __shfl_down_sync(unsigned int mask, T v, unsigned int by, int width = 32)
{
	int lane = simt_now->lane, from = lane + (int)by;

	return simt_shuffle_of(
	        mask, v, from >= (lane & ~(width - 1)) + width ? lane : from, "__shfl_down_sync");
}

template <class T> static inline T __shfl_up_sync(unsigned int mask, T v, unsigned int by, int width = 32)
{
	int lane = simt_now->lane, from = lane - (int)by;

	return simt_shuffle_of(mask, v, from < (lane & ~(width - 1)) ? lane : from, "__shfl_up_sync");
}

static inline unsigned int __ballot_sync(unsigned int mask, int v)
{
	return simt_ballot(mask, v != 0);
}

static inline int __any_sync(unsigned int mask, int v)
{
	return simt_ballot(mask, v != 0) != 0;
}

static inline int __all_sync(unsigned int mask, int v)
{
	return simt_ballot(mask, v != 0) == mask;
}

/* Fragments: see device.cuh. */
void simt_mma(float c[4], const uint32_t a[4], const uint32_t b[2], bool bf16);
void simt_ldmatrix(uint32_t r[4], const void *row, bool trans);

static inline void fs_mma_16x8x16(float c[4], const uint32_t a[4], const uint32_t b[2])
{
	simt_mma(c, a, b, false);
}

static inline void fs_mma_16x8x16_bf16(float c[4], const uint32_t a[4], const uint32_t b[2])
{
	simt_mma(c, a, b, true);
}

static inline void fs_ldmatrix_x4(uint32_t r[4], const void *row)
{
	simt_ldmatrix(r, row, false);
}

static inline void fs_ldmatrix_x4_trans(uint32_t r[4], const void *row)
{
	simt_ldmatrix(r, row, true);
}

/* ---- memory ---- */

template <class T> static inline T simt_load(const void *p)
{
	T v;

	if ((uintptr_t)p % sizeof(T) != 0)
		simt_fail("a load of %zu bytes at %p", sizeof(T), p);
	memcpy(&v, p, sizeof(v));
	return v;
}

#define fs_ld16 simt_load<uint4>
#define fs_ld8 simt_load<uint2>
#define fs_ld4 simt_load<uint32_t>
#define fs_ld16_once simt_load<uint4>
#define fs_ld8_once simt_load<uint2>
#define fs_ld4_once simt_load<uint32_t>
#define fs_ld16_const simt_load<uint4>
#define fs_ld4_const simt_load<uint32_t>
#define fs_ld2_const simt_load<uint16_t>

static inline void fs_keep(const uint8_t *&p)
{
}

static inline void fs_st16(void *p, uint4 v)
{
	if ((uintptr_t)p % 16 != 0)
		simt_fail("a store of 16 bytes at %p", p);
	memcpy(p, &v, sizeof(v));
}

template <class T> static inline T __ldg(const T *p)
{
	return simt_load<T>(p);
}

void fs_cp16(void *shared, const void *src, bool fill);
void fs_cp_commit(void);
void simt_cp_wait(int n);
template <int n> static inline void fs_cp_wait(void)
{
	simt_cp_wait(n);
}

template <class T> static inline T atomicAdd(T *p, T v)
{
	T old = *p;

	*p = old + v;
	return old;
}

template <class T> static inline T atomicMax(T *p, T v)
{
	T old = *p;

	*p = old > v ? old : v;
	return old;
}

/* ---- numbers ---- */

#define SIMT_BITS(name, to, from)                                                                            \
	static inline to name(from v)                                                                        \
	{                                                                                                    \
		to r;                                                                                        \
		memcpy(&r, &v, sizeof(r));                                                                   \
		return r;                                                                                    \
	}
SIMT_BITS(__float_as_uint, unsigned int, float)
SIMT_BITS(__uint_as_float, float, unsigned int)
SIMT_BITS(__float_as_int, int, float)
SIMT_BITS(__int_as_float, float, int)

static inline float fs_h2f(uint16_t h)
{
	return fs_f16_to_f32(h);
}

static inline uint16_t fs_f2h(float f)
{
	return fs_f32_to_f16(f);
}

static inline float fs_b2f(uint16_t b)
{
	return __uint_as_float((uint32_t)b << 16);
}

static inline uint16_t fs_f2b(float f)
{
	return fs_f32_to_bf16(f);
}

static inline uint32_t fs_pack_h2(float lo, float hi)
{
	return fs_f2h(lo) | (uint32_t)fs_f2h(hi) << 16;
}

static inline uint32_t fs_pack_b2(float lo, float hi)
{
	return fs_f2b(lo) | (uint32_t)fs_f2b(hi) << 16;
}

static inline float2 fs_unpack_h2(uint32_t h2)
{
	return make_float2(fs_h2f((uint16_t)h2), fs_h2f((uint16_t)(h2 >> 16)));
}

/* Sums of four products of bytes, added to c. */
static inline int __dp4a(int a, int b, int c)
{
	for (int i = 0; i < 4; i++)
		c += (int)(int8_t)(a >> 8 * i) * (int)(int8_t)(b >> 8 * i);
	return c;
}

static inline unsigned int __byte_perm(unsigned int a, unsigned int b, unsigned int pick)
{
	uint64_t both = (uint64_t)b << 32 | a;
	unsigned int r = 0;

	for (int i = 0; i < 4; i++) {
		unsigned int k = pick >> 4 * i & 15;
		unsigned int byte = (unsigned int)(both >> 8 * (k & 7)) & 255;

		r |= (k & 8 ? (byte & 128 ? 255u : 0u) : byte) << 8 * i;
	}
	return r;
}

/* Bytes, each on its own, without carry. */
static inline unsigned int __vsub4(unsigned int a, unsigned int b)
{
	unsigned int r = 0;

	for (int i = 0; i < 32; i += 8)
		r |= (((a >> i) - (b >> i)) & 255u) << i;
	return r;
}

static inline int __popc(unsigned int v)
{
	return __builtin_popcount(v);
}

static inline int __float2int_rn(float f)
{
	return isnan(f) ? 0 : f >= 2147483648.0f ? INT_MAX : f < -2147483648.0f ? INT_MIN : (int)rintf(f);
}

static inline float __fmul_rn(float a, float b)
{
	return a * b; /* built with -ffp-contract=off */
}

static inline float __fadd_rn(float a, float b)
{
	return a + b;
}

static inline float __fsub_rn(float a, float b)
{
	return a - b;
}

static inline float __fdividef(float a, float b)
{
	return a / b;
}

static inline float __fdiv_rn(float a, float b)
{
	return a / b;
}

static inline float __frcp_rn(float a)
{
	return 1.0f / a;
}

static inline float __fsqrt_rn(float a)
{
	return sqrtf(a);
}

static inline float rsqrtf(float a)
{
	return 1.0f / sqrtf(a);
}

#define __expf expf /* a name that libm's header has taken */

#define __logf logf /* a name that libm's header has taken */

template <class T> static inline T min(T a, T b)
{
	return b < a ? b : a;
}

template <class T> static inline T max(T a, T b)
{
	return a < b ? b : a;
}

#endif
