/* Gives a program that is linked with the imitation of CUDA's runtime its card, before anything else. */
#include "tests/simt/cudart.h"

__attribute__((constructor)) static void put_in(void)
{
	fake_cuda_init();
}
