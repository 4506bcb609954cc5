/*
 * cublas: loads cuBLASLt. Of the versions that are found the newest is taken that the driver can run: it
 * knows the newest cards.
 */
#include "common/compute/cuda/blas.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#if defined(__has_include)
#if __has_include(<cublasLt.h>)
#include <cublasLt.h>
_Static_assert(
        sizeof(struct fs_cublas_result) == sizeof(cublasLtMatmulHeuristicResult_t) &&
                offsetof(struct fs_cublas_result, workspace) ==
                        offsetof(cublasLtMatmulHeuristicResult_t, workspaceSize) &&
                offsetof(struct fs_cublas_result, state) == offsetof(cublasLtMatmulHeuristicResult_t, state),
        "the layout of a heuristic's result");
_Static_assert((int)FS_CUBLAS_R_32F == (int)CUDA_R_32F && (int)FS_CUBLAS_R_16F == (int)CUDA_R_16F &&
                       (int)FS_CUBLAS_R_16BF == (int)CUDA_R_16BF &&
                       (int)FS_CUBLAS_COMPUTE_32F == (int)CUBLAS_COMPUTE_32F &&
                       (int)FS_CUBLAS_OP_T == (int)CUBLAS_OP_T,
        "types and operations");
_Static_assert(
        (int)FS_CUBLAS_DESC_TRANSA == (int)CUBLASLT_MATMUL_DESC_TRANSA &&
                (int)FS_CUBLAS_DESC_EPILOGUE == (int)CUBLASLT_MATMUL_DESC_EPILOGUE &&
                (int)FS_CUBLAS_DESC_BIAS_POINTER == (int)CUBLASLT_MATMUL_DESC_BIAS_POINTER &&
                (int)FS_CUBLAS_EPILOGUE_BIAS == (int)CUBLASLT_EPILOGUE_BIAS &&
                (int)FS_CUBLAS_PREF_MAX_WORKSPACE_BYTES == (int)CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES &&
                (int)FS_CUBLAS_PREF_ALIGNMENT_A == (int)CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES &&
                (int)FS_CUBLAS_PREF_ALIGNMENT_A + 3 == (int)CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
        "attributes");
#endif
#endif

#define NEWEST 13
#define OLDEST 11

/* Where toolkits put it without telling the loader; "" is the loader's own search. */
static const char *const folders[] = {"", "/usr/local/cuda/lib64/", "/opt/cuda/lib64/"};

static void *open_library(int newest)
{
	char path[128];
	void *lib = NULL;

	for (int v = newest; v >= OLDEST && !lib; v--) {
		for (size_t k = 0; k < FS_ARRAY_LEN(folders) && !lib; k++) {
			snprintf(path, sizeof(path), "%slibcublasLt.so.%d", folders[k], v);
			lib = dlopen(path, RTLD_NOW | RTLD_LOCAL);
		}
	}
	return lib;
}

/* POSIX lets a function's address pass through void *; C does not say so, hence the copy. */
static bool find(void *lib, const char *name, void *to, struct fs_errbuf *e)
{
	char symbol[64];
	void *p;

	snprintf(symbol, sizeof(symbol), "cublasLt%s", name);
	p = dlsym(lib, symbol);
	if (!p) {
		fs_fail(e, FS_EUNAVAILABLE, "libcublasLt has no %s", symbol);
		return false;
	}
	memcpy(to, &p, sizeof(p));
	return true;
}

int fs_cublas_load(struct fs_cublas *api, int newest, struct fs_errbuf *e)
{
	int version = FS_MAX(OLDEST, FS_MIN(newest / 1000, NEWEST));
	struct fs_cublas a = {.lib = open_library(version)};

	if (!a.lib)
		return fs_fail(e, FS_EUNAVAILABLE,
		        "the library libcublasLt.so.%d%s is not on this PC; it comes with the CUDA toolkit, "
		        "or alone as the package libcublas",
		        version, version > OLDEST ? " (or an older one, down to .11)" : "");
#define FIND(name) find(a.lib, #name, &a.name, e)
	if (!FIND(GetVersion) || !FIND(Create) || !FIND(Destroy) || !FIND(MatmulDescCreate) ||
	        !FIND(MatmulDescDestroy) || !FIND(MatmulDescSetAttribute) || !FIND(MatrixLayoutCreate) ||
	        !FIND(MatrixLayoutDestroy) || !FIND(MatmulPreferenceCreate) ||
	        !FIND(MatmulPreferenceDestroy) || !FIND(MatmulPreferenceSetAttribute) ||
	        !FIND(MatmulAlgoGetHeuristic) || !FIND(Matmul)) {
		dlclose(a.lib);
		return FS_EUNAVAILABLE;
	}
#undef FIND
	*api = a;
	return FS_OK;
}

void fs_cublas_unload(struct fs_cublas *api)
{
	if (api->lib)
		dlclose(api->lib);
	api->lib = NULL;
}
