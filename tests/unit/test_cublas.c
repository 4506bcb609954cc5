/*
 * The real cuBLASLt, where it is installed: that it is found, and that it takes the descriptions and
 * attributes as they are declared here; for that it needs no card. Products on a card are test_cuda_device's.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/compute/cuda/blas.h"

static struct fs_cublas api;

static void test_descriptions(void **state)
{
	const int transposed = FS_CUBLAS_OP_T, bias = FS_CUBLAS_EPILOGUE_BIAS;
	const float *at = NULL;
	void *desc = NULL, *layout = NULL;

	assert_true(api.GetVersion() >= 110000);
	assert_int_equal(api.MatmulDescCreate(&desc, FS_CUBLAS_COMPUTE_32F, FS_CUBLAS_R_32F), 0);
	assert_int_equal(
	        api.MatmulDescSetAttribute(desc, FS_CUBLAS_DESC_TRANSA, &transposed, sizeof(int)), 0);
	assert_int_equal(api.MatmulDescSetAttribute(desc, FS_CUBLAS_DESC_EPILOGUE, &bias, sizeof(int)), 0);
	assert_int_equal(api.MatmulDescSetAttribute(desc, FS_CUBLAS_DESC_BIAS_POINTER, &at, sizeof(at)), 0);
	assert_int_not_equal(api.MatmulDescSetAttribute(desc, FS_CUBLAS_DESC_TRANSA, &transposed, 1), 0);
	assert_int_equal(api.MatmulDescDestroy(desc), 0);
	for (size_t i = 0; i < 3; i++) {
		const int types[] = {FS_CUBLAS_R_32F, FS_CUBLAS_R_16F, FS_CUBLAS_R_16BF};

		assert_int_equal(api.MatrixLayoutCreate(&layout, types[i], 64, 32, 64), 0);
		assert_int_equal(api.MatrixLayoutDestroy(layout), 0);
	}
}

static void test_preferences(void **state)
{
	const uint64_t workspace = 32 << 20;
	const uint32_t align = 16;
	void *pref = NULL;

	assert_int_equal(api.MatmulPreferenceCreate(&pref), 0);
	assert_int_equal(api.MatmulPreferenceSetAttribute(
	                         pref, FS_CUBLAS_PREF_MAX_WORKSPACE_BYTES, &workspace, sizeof(workspace)),
	        0);
	for (int i = 0; i < 4; i++)
		assert_int_equal(api.MatmulPreferenceSetAttribute(
		                         pref, FS_CUBLAS_PREF_ALIGNMENT_A + i, &align, sizeof(align)),
		        0);
	assert_int_equal(api.MatmulPreferenceDestroy(pref), 0);
}

/* A library that needs a newer driver is as good as none. */
static void test_old_driver(void **state)
{
	for (int driver = 11080; driver < 13000; driver += 1000) {
		struct fs_cublas old;
		struct fs_errbuf e = {""};

		if (fs_cublas_load(&old, driver, &e)) {
			assert_non_null(
			        strstr(e.text, driver < 12000 ? "libcublasLt.so.11 is" : ".so.12 (or"));
			continue;
		}
		assert_true(old.GetVersion() / 10000 <= (size_t)driver / 1000);
		fs_cublas_unload(&old);
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
	        cmocka_unit_test(test_descriptions),
	        cmocka_unit_test(test_preferences),
	        cmocka_unit_test(test_old_driver),
	};
	const int newest = 13000;
	struct fs_errbuf e;
	int failed;

	if (fs_cublas_load(&api, newest, &e)) {
		printf("skipped: %s\n", e.text);
		return 77;
	}
	failed = cmocka_run_group_tests(tests, NULL, NULL);
	fs_cublas_unload(&api);
	return failed;
}
