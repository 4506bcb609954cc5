/* Directs the made-up GPU of a whole program by the folder that FAKE_GPU names; see fake_gpu.h. */
#include "tests/tools/fake_gpu.h"

#include <stdlib.h>

__attribute__((constructor)) static void take_folder(void)
{
	const char *folder = getenv("FAKE_GPU");

	if (folder != NULL)
		fake_gpu_folder(folder);
}
