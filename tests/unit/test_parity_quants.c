/* The scalar dequantisation against tests/parity/quants.gguf: random blocks of every type, decoded by the
 * PyPI package gguf. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "common/gguf/gguf.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct fs_errbuf e;

static const struct fs_gguf_tensor *need(const struct fs_gguf *g, const char *type, const char *what)
{
	const struct fs_gguf_tensor *t = NULL;
	char name[64];

	snprintf(name, sizeof(name), "%s.%s", type, what);
	if (fs_gguf_need(g, name, 0, 0, &t, &e) != FS_OK)
		fail_msg("%s", e.text);
	return t;
}

static void check_type(const struct fs_gguf *g, const char *type, bool exact)
{
	const struct fs_gguf_tensor *t = need(g, type, "typed"), *f = need(g, type, "f32");
	const float *want = f->data;
	float *got, most = 0;
	size_t n = (size_t)t->ne[0];

	assert_string_equal(fs_dtype_info((int)f->type)->name, "F32");
	assert_int_equal(f->nbytes, n * 4);
	assert_true(n >= 1024);
	got = malloc(n * sizeof(*got));
	fs_dequantize_row(t->type, t->data, got, (int64_t)n);
	for (size_t i = 0; i < n; i++)
		if (isfinite(want[i]))
			most = fmaxf(most, fabsf(want[i]));
	for (size_t i = 0; i < n; i++) {
		if (isnan(want[i]) && isnan(got[i]))
			continue;
		if (got[i] != want[i] && (exact || !(fabsf(got[i] - want[i]) <= most * 1e-6f)))
			fail_msg("%s: element %zu is %.9g, expected %.9g", type, i, (double)got[i],
			        (double)want[i]);
	}
	free(got);
}

static void every_type_decodes_as_published(void **state)
{
	static const struct {
		const char *type;
		bool exact;
	} types[] = {{"f16", true}, {"bf16", true}, {"q4_0", true}, {"q4_1", false}, {"q5_0", true},
	        {"q5_1", false}, {"q8_0", true}, {"q4_k", false}, {"q5_k", false}, {"q6_k", true}};
	const char *root = getenv("FS_TEST_DATA");
	struct fs_gguf *g;
	char path[4096];

	snprintf(path, sizeof(path), "%s/parity/quants.gguf", root != NULL ? root : "tests");
	if (fs_gguf_open(&g, path, &e) != FS_OK)
		fail_msg("%s", e.text);
	for (size_t i = 0; i < FS_ARRAY_LEN(types); i++)
		check_type(g, types[i].type, types[i].exact);
	fs_gguf_close(g);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
	        cmocka_unit_test(every_type_decodes_as_published),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
