/*
 * What the tests of products of the CPU's and the card's device begin with: weights of a type, their numbers
 * by the reference, and everything else that a product takes.
 */
#ifndef FS_TESTS_PRODUCT_UTIL_H
#define FS_TESTS_PRODUCT_UTIL_H

#include "compute_util.h"

struct shape {
	int64_t in, out, n;
};

struct product {
	struct shape s;
	enum fs_dtype type;
	uint8_t *w;
	float *deq, *bias, *x, *y0; /* y0: what y held before */
};

static inline struct product make(enum fs_dtype type, struct shape s)
{
	struct product p = {.s = s, .type = type, .w = random_weight(type, s.in, s.out)};
	size_t row = fs_dtype_row_bytes(type, s.in);

	p.deq = need((size_t)(s.in * s.out) * sizeof(float));
	for (int64_t o = 0; o < s.out; o++)
		fs_dequantize_row(type, p.w + (size_t)o * row, p.deq + o * s.in, s.in);
	p.bias = randoms(s.out);
	p.x = randoms(s.n * s.in);
	p.y0 = randoms(s.n * s.out);
	return p;
}

static inline void drop(struct product *p)
{
	free(p->w);
	free(p->deq);
	free(p->bias);
	free(p->x);
	free(p->y0);
}

#endif
