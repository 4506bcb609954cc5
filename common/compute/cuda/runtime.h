/*
 * runtime: the CUDA runtime's C interface, or in tests (FS_SIMT defined) the host's imitation of the part of
 * it that is used here. Whatever else differs between the two is a defect of the imitation.
 */
#ifndef FS_COMMON_COMPUTE_CUDA_RUNTIME_H
#define FS_COMMON_COMPUTE_CUDA_RUNTIME_H

#ifdef FS_SIMT
#include "tests/simt/cudart.h"
#else
#include <cuda_runtime_api.h>
#endif

#endif
