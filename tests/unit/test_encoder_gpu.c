/*
 * The encoder on a GPU that is made up (tests/tools/fake_gpu.h): what it says it needs holds its largest
 * picture, a tower that does not fit leaves the card alone, warming up takes the memory of any later picture,
 * and a card that is lost is told from a picture that fails.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "remote/encoder/encoder.h"
#include "remote/encoder/tower.h"
#include "tests/tools/fake_gpu.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_TOKENS 60

static struct fs_errbuf e;

static const char *data_path(const char *name)
{
	static char paths[4][4096];
	static unsigned turn;
	char *path = paths[turn++ % 4];
	const char *root = getenv("FS_TEST_DATA");

	snprintf(path, sizeof(paths[0]), "%s/parity/vision/%s", root != NULL ? root : "tests", name);
	return path;
}

static void new_card(uint64_t total)
{
	assert_int_equal(fake_card.used, 0);
	fake_card = (struct fake_card){.total = total};
}

static int open_on(const char *device, struct fs_encoder **v)
{
	const struct fs_encoder_opts o = {.mmproj = data_path("mmproj-f16.gguf"),
	        .device = device,
	        .threads = 1,
	        .max_tokens = MAX_TOKENS,
	        .precision = FS_PRECISION_F32};

	return fs_encoder_open(&o, v, &e);
}

struct picture {
	uint8_t *bytes;
	size_t n;
};

static struct picture picture(const char *name)
{
	FILE *f = fopen(data_path(name), "rb");
	struct picture p = {.bytes = malloc(1 << 20)};

	assert_non_null(f);
	p.n = fread(p.bytes, 1, 1 << 20, f);
	fclose(f);
	return p;
}

static int encode(struct fs_encoder *v, const char *name, float **rows, size_t *n)
{
	struct picture p = picture(name);
	struct fs_rows_shape shape;
	int err = fs_encoder_encode(v, p.bytes, p.n, 0, 0, NULL, &shape, rows, &e);

	free(p.bytes);
	if (err == FS_OK)
		*n = (size_t)shape.n_tokens * (size_t)shape.n_embd;
	return err;
}

static void same_as_on_the_cpu(struct fs_encoder *v, const char *name)
{
	struct fs_encoder *cpu = NULL;
	float *got = NULL, *want = NULL;
	size_t n_got = 0, n_want = 0;

	assert_int_equal(open_on("cpu", &cpu), FS_OK);
	assert_int_equal(encode(v, name, &got, &n_got), FS_OK);
	assert_int_equal(encode(cpu, name, &want, &n_want), FS_OK);
	assert_int_equal(n_got, n_want);
	for (size_t i = 0; i < n_got; i++)
		assert_true(got[i] - want[i] < 1e-3f && want[i] - got[i] < 1e-3f);
	free(got);
	free(want);
	fs_encoder_close(cpu);
}

static bool fits(uint64_t total)
{
	struct fs_encoder *v = NULL;
	int err;

	new_card(total);
	err = open_on("cuda", &v);
	if (err == FS_OK) {
		if (fs_encoder_warm_up(v, &e) != FS_OK)
			fail_msg("%llu: %s", (unsigned long long)total, e.text);
	} else {
		assert_int_equal(err, FS_ENOMEM);
		assert_int_equal(fake_card.peak, 0);
	}
	fs_encoder_close(v);
	return err == FS_OK;
}

/* The least memory with which it starts holds the largest picture, and little more but the back end's own. */
static void need(void **state)
{
	uint64_t low = 0, high = (uint64_t)8 << 30, scratch, taken, held;
	struct fs_dev *d = NULL;
	struct fs_encoder *v = NULL;

	new_card(high);
	assert_int_equal(fake_gpu_open(&(struct fs_dev_opts){.threads = 1}, &d, NULL), FS_OK);
	scratch = fs_dev_scratch(d, 0, 0, 0, 0);
	fs_dev_close(d);
	assert_true(fits(high));
	taken = fake_card.peak;
	while (high - low > 1) {
		uint64_t mid = low + (high - low) / 2;

		if (fits(mid))
			high = mid;
		else
			low = mid;
	}
	assert_true(taken > 0 && high >= taken + scratch);
	assert_true(high - taken - scratch < 16 << 20);
	assert_false(fits(low));
	assert_non_null(strstr(e.text, "it needs "));
	assert_non_null(strstr(e.text, "--max-tokens"));
	assert_null(strstr(e.text, "KV cache"));
	/* no picture takes more than the warm-up did */
	new_card(high);
	assert_int_equal(open_on("cuda", &v), FS_OK);
	assert_int_equal(fs_encoder_warm_up(v, &e), FS_OK);
	held = fake_card.peak;
	for (size_t i = 0; i < 4; i++) {
		static const char *const names[] = {"large.png", "wide.png", "tall.png", "tiny.png"};

		same_as_on_the_cpu(v, names[i]);
	}
	assert_int_equal(fake_card.peak, held);
	fs_encoder_close(v);
}

static void too_little_for_auto(void **state)
{
	struct fs_encoder *v = NULL;

	new_card((uint64_t)64 << 20);
	assert_int_equal(open_on("auto", &v), FS_OK);
	assert_int_equal(fake_card.opens, 1);
	assert_int_equal(fake_card.peak, 0);
	assert_string_equal(fs_encoder_facts(v)->device, "cpu");
	assert_false(fs_encoder_facts(v)->gpu);
	same_as_on_the_cpu(v, "grid.png");
	fs_encoder_close(v);
	v = NULL;
	new_card((uint64_t)8 << 30);
	assert_int_equal(open_on("auto", &v), FS_OK);
	assert_string_equal(fs_encoder_facts(v)->device, "cuda:0");
	fs_encoder_close(v);
}

static void only_a_gpu_will_do(void **state)
{
	const struct fs_encoder_opts o = {.mmproj = data_path("mmproj-f16.gguf"), .gpu = true, .threads = 1};
	struct fs_encoder *v = NULL;

	new_card((uint64_t)64 << 20);
	assert_int_equal(fs_encoder_open(&o, &v, &e), FS_ENOMEM);
	assert_int_equal(fake_card.peak, 0);
	fake_card.no_card = -1;
	assert_int_equal(fs_encoder_open(&o, &v, &e), FS_EUNAVAILABLE);
	assert_non_null(strstr(e.text, "no GPU to encode on"));
}

static void fails_and_is_lost(void **state)
{
	struct fs_encoder *v = NULL;
	float *rows = NULL;
	size_t n;
	int ops;

	new_card((uint64_t)8 << 30);
	assert_int_equal(open_on("cuda", &v), FS_OK);
	ops = fake_card.ops;
	same_as_on_the_cpu(v, "grid.png");
	assert_true(fake_card.paces > 0);
	ops = fake_card.ops - ops;
	for (int at = 1; at <= ops; at += FS_MAX((ops - 1) / 5, 1)) {
		fake_card.fail_at = at;
		assert_int_equal(encode(v, "grid.png", &rows, &n), FS_EINTERNAL);
		assert_int_equal(fake_card.fail_at, 0);
		assert_false(fs_encoder_lost(v));
		same_as_on_the_cpu(v, "grid.png");
	}
	fs_encoder_close(v);
	for (int at = 1; at <= ops; at += FS_MAX((ops - 1) / 5, 1)) {
		v = NULL;
		assert_int_equal(open_on("cuda", &v), FS_OK);
		fake_card.lose_at = at;
		assert_int_equal(encode(v, "grid.png", &rows, &n), FS_EINTERNAL);
		assert_true(fs_encoder_lost(v));
		assert_non_null(strstr(e.text, "illegal memory access"));
		fs_encoder_close(v);
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
	        cmocka_unit_test(need),
	        cmocka_unit_test(too_little_for_auto),
	        cmocka_unit_test(only_a_gpu_will_do),
	        cmocka_unit_test(fails_and_is_lost),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
