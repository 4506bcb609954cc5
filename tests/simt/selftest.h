/*
 * selftest: small kernels by which test_simt sees that the emulation does what a card does, and that it ends
 * the program where a kernel is wrong. Each returns what its launch returned.
 */
#ifndef FS_TESTS_SIMT_SELFTEST_H
#define FS_TESTS_SIMT_SELFTEST_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { SELF_LDMATRIX = 1, SELF_BF16 = 2 };
/* c[16][8] += a[16][16] · b[16][8]; a and b are 16-bit numbers. */
int self_mma(const uint16_t *a, const uint16_t *b, float *c, int how);
/* sums[i] = sum of x[0..n) over block i, threads threads each; the block's first warp adds the warps' sums.
 */
int self_sum(const float *x, int n, float *sums, int blocks, int threads);
/* y[b] = x reversed in pieces of 64, through shared memory; barrier false: without the barrier. */
int self_reverse(const int *x, int *y, int blocks, int barrier);
/* All kinds of shuffles and votes; out[12][32]. */
int self_shuffles(int *out);
/* y[32][4] = x[32][4] by copies that run beside the kernel; wait false: without waiting for them. */
int self_copy(const uint32_t *x, uint32_t *y, int wait);

enum self_wrong {
	SELF_DIVERGENT_BARRIER,
	SELF_ENDED_THREAD,
	SELF_MISSING_LANE,
	SELF_OTHER_COLLECTIVE,
	SELF_ODD_LOAD,
	SELF_OUT_OF_SHARED,
	SELF_OUT_OF_DYNAMIC,
	SELF_TOO_MUCH_SHARED,
	SELF_OUT_OF_GLOBAL,
	SELF_WRONGS,
};
/* Does what a kernel must not; x[64]. */
int self_wrong(enum self_wrong what, int *x);
/* More threads than a block has. */
int self_bad_launch(int *x);

#ifdef __cplusplus
}
#endif

#endif
