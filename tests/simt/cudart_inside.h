/*
 * cudart_inside: what the two halves of the imitated runtime share: cudart.c has the PC, streams, events,
 * graphs and kernels, cudart_memory.c memory and copies.
 */
#ifndef FS_TESTS_SIMT_CUDART_INSIDE_H
#define FS_TESTS_SIMT_CUDART_INSIDE_H

#include "tests/simt/cudart.h"

#include "common/base/base.h"

extern cudaError_t fake_cuda_broken; /* the context's error, until it is reset */

cudaError_t fake_cuda_say(cudaError_t rc); /* the last error is this one; returns it */
void *fake_cuda_need(size_t bytes);        /* cleared; never NULL */
/* Objects that the context takes along when it is reset, by end. */
void *fake_cuda_object(size_t bytes, void (*end)(void *p));
void fake_cuda_drop_object(void *p);
void fake_cuda_free_all(bool pooled); /* the card's memory, what pools gave or not, and what is pinned */
/* Whether the card's memory can be reached: by what runs on it. To the program itself its addresses mean
 * nothing, and under the address sanitizer it is stopped when it follows one. */
void fake_cuda_reach(bool card);
bool fake_cuda_captures(cudaStream_t s);

#endif
