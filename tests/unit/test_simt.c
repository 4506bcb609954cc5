/*
 * The emulation itself: what it computes, and that wrong kernels end the program instead of passing: each
 * runs in a child, whose last words are read. Out-of-bounds accesses are found where ASan is compiled in.
 */
#include "compute_util.h"

#include <sys/wait.h>
#include <unistd.h>

#include "tests/simt/launches.h"
#include "tests/simt/selftest.h"

#if defined(__SANITIZE_ADDRESS__)
#define ASAN 1
#elif defined(__SANITIZE_THREAD__)
#define TSAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define ASAN 1
#elif __has_feature(thread_sanitizer)
#define TSAN 1
#endif
#endif

static void test_mma(void **state)
{
	for (int how = 0; how < 4; how++) {
		bool bf16 = how & SELF_BF16;
		uint16_t a[256], b[128];
		float fa[256], fb[128], c[128], want[128];

		for (int i = 0; i < 256; i++) {
			float f = uniform(-2, 2);

			a[i] = bf16 ? fs_f32_to_bf16(f) : fs_f32_to_f16(f);
			fa[i] = bf16 ? fs_bf16_to_f32(a[i]) : fs_f16_to_f32(a[i]);
		}
		for (int i = 0; i < 128; i++) {
			float f = uniform(-2, 2);

			b[i] = bf16 ? fs_f32_to_bf16(f) : fs_f32_to_f16(f);
			fb[i] = bf16 ? fs_bf16_to_f32(b[i]) : fs_f16_to_f32(b[i]);
			c[i] = want[i] = uniform(-1, 1);
		}
		for (int i = 0; i < 16; i++)
			for (int j = 0; j < 8; j++)
				for (int k = 0; k < 16; k++)
					want[8 * i + j] += fa[16 * i + k] * fb[8 * k + j];
		assert_int_equal(self_mma(a, b, c, how), 0);
		for (int i = 0; i < 128; i++)
			near(c[i], (double)want[i], 1e-4, "mma", i);
	}
}

static void test_sum(void **state)
{
	static const int threads[] = {32, 64, 96, 256, 1024};

	for (size_t k = 0; k < FS_ARRAY_LEN(threads); k++) {
		int n = 777, blocks = 5;
		float *x = randoms(n * blocks), sums[5];

		assert_int_equal(self_sum(x, n, sums, blocks, threads[k]), 0);
		for (int b = 0; b < blocks; b++) {
			double want = 0;

			for (int i = 0; i < n; i++)
				want += (double)x[b * n + i];
			near(sums[b], want, 1e-3, "sum", b);
		}
		free(x);
	}
}

#ifdef TSAN
/* TSan ends a program that it has found a race in with its own code. */
static void missing_barrier(void)
{
	int x[6 * 64] = {0}, y[6 * 64], status;
	pid_t child = fork();

	assert_true(child >= 0);
	if (child == 0) {
		assert_non_null(freopen("/dev/null", "w", stderr));
		self_reverse(x, y, 6, 0);
		exit(0);
	}
	assert_true(waitpid(child, &status, 0) == child);
	assert_int_equal(WEXITSTATUS(status), 66);
}
#else
static void missing_barrier(void)
{
	int x[6 * 64], y[6 * 64], wrong = 0;

	for (int i = 0; i < 6 * 64; i++)
		x[i] = (int)rng();
	assert_int_equal(self_reverse(x, y, 6, 0), 0);
	for (int b = 0; b < 6; b++) {
		bool block_wrong = false;

		for (int i = 0; i < 64; i++)
			block_wrong |= y[64 * b + i] != x[64 * b + 63 - i];
		wrong += block_wrong;
	}
	assert_int_equal(wrong, 6);
}
#endif

static void test_barrier(void **state)
{
	int x[6 * 64], y[6 * 64];

	for (int i = 0; i < 6 * 64; i++)
		x[i] = (int)rng();
	assert_int_equal(self_reverse(x, y, 6, 1), 0);
	for (int i = 0; i < 6 * 64; i++)
		assert_int_equal(y[i], x[i / 64 * 64 + 63 - i % 64]);
	missing_barrier();
}

static void test_shuffles(void **state)
{
	int out[12][32];

	assert_int_equal(self_shuffles(&out[0][0]), 0);
	for (int l = 0; l < 32; l++) {
		assert_int_equal(out[0][l], 5);
		assert_int_equal(out[1][l], l ^ 3);
		assert_int_equal(out[2][l], l + 4 < 32 ? l + 4 : l);
		assert_int_equal(out[3][l], l >= 4 ? l - 4 : l);
		assert_int_equal(out[4][l], l / 8 * 8 + 3);
		assert_int_equal(out[5][l], l % 8 + 3 < 8 ? l + 3 : l);
		assert_int_equal((uint32_t)out[6][l], 0x49249249u);
		assert_int_equal(out[7][l], 1);
		assert_int_equal(out[8][l], l < 16 ? l ^ 1 : l ^ 2);
		assert_int_equal(out[9][l], 9);
		assert_int_equal(out[10][l], 31 * 16);
		assert_int_equal(out[11][l], 31);
	}
}

static void test_copies(void **state)
{
	uint32_t *x = aligned_alloc(16, 512), y[128];

	assert_non_null(x);
	for (int i = 0; i < 128; i++)
		x[i] = rng() | 1;
	assert_int_equal(self_copy(x, y, 1), 0);
	for (int i = 0; i < 128; i++)
		assert_int_equal(y[i], (i / 4 ^ 1) == 31 ? 0 : x[i ^ 4]);
	assert_int_equal(self_copy(x, y, 0), 0); /* nothing has landed */
	for (int i = 0; i < 128; i++)
		assert_int_equal(y[i], 0xffffffffu);
	free(x);
}

/* What a child says that does this. */
static void last_words(enum self_wrong what, char *text, size_t size)
{
	int fd[2], status;
	size_t got = 0;
	ssize_t n;
	pid_t pid;

	assert_int_equal(pipe(fd), 0);
	pid = fork();
	assert_true(pid >= 0);
	if (pid == 0) {
		int *x = malloc(64 * sizeof(*x));

		dup2(fd[1], 2);
		for (int i = 0; x && i < 64; i++)
			x[i] = 1;
		self_wrong(what, x);
		_exit(0);
	}
	close(fd[1]);
	while (got < size - 1 && (n = read(fd[0], text + got, size - 1 - got)) > 0)
		got += (size_t)n;
	text[got] = '\0';
	close(fd[0]);
	assert_int_equal(waitpid(pid, &status, 0), pid);
	assert_false(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

static void test_wrong_kernels(void **state)
{
	static const char *const words[SELF_WRONGS] = {
	        [SELF_DIVERGENT_BARRIER] = "others are at __syncthreads",
	        [SELF_ENDED_THREAD] = "waits at __syncthreads",
	        [SELF_MISSING_LANE] = "lane 5, which has ended",
	        [SELF_OTHER_COLLECTIVE] = "is at __syncwarp",
	        [SELF_ODD_LOAD] = "a load of 16 bytes at",
	        [SELF_TOO_MUCH_SHARED] = "bytes of shared memory",
#ifdef ASAN
	        [SELF_OUT_OF_SHARED] = "heap-buffer-overflow",
	        [SELF_OUT_OF_DYNAMIC] = "heap-buffer-overflow",
	        [SELF_OUT_OF_GLOBAL] = "heap-buffer-overflow",
#endif
	};

	for (int i = 0; i < SELF_WRONGS; i++) {
		char text[4096];

		if (!words[i])
			continue;
		last_words((enum self_wrong)i, text, sizeof(text));
		if (!strstr(text, words[i]))
			fail_msg("%d: \"%s\" is not in: %s", i, words[i], text);
	}
}

/* The last launch's job is kept and run again. */
static int keep(void *arg, struct CUstream_st *s, struct simt_job *job)
{
	*(struct simt_job **)arg = job;
	return 0;
}

static int refuse(void *arg, struct CUstream_st *s, struct simt_job *job)
{
	simt_job_drop(job);
	return 700;
}

static void test_launches(void **state)
{
	int x[64], y[64] = {0};
	struct simt_job *job = NULL;

	for (int i = 0; i < 64; i++)
		x[i] = i;
	assert_int_not_equal(self_bad_launch(x), 0);
	simt_set_hook(refuse, NULL);
	assert_int_equal(self_reverse(x, y, 1, 1), 700);
	simt_set_hook(keep, &job);
	assert_int_equal(self_reverse(x, y, 1, 1), 0);
	assert_int_equal(y[0], 0);
	simt_set_hook(NULL, NULL);
	assert_non_null(strstr(simt_job_name(job), "reverse_kernel"));
	for (int k = 0; k < 2; k++) {
		x[63] += k;
		simt_job_run(job);
		assert_int_equal(y[0], x[63]);
	}
	simt_job_drop(job);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
	        cmocka_unit_test(test_mma),
	        cmocka_unit_test(test_sum),
	        cmocka_unit_test(test_barrier),
	        cmocka_unit_test(test_shuffles),
	        cmocka_unit_test(test_copies),
	        cmocka_unit_test(test_wrong_kernels),
	        cmocka_unit_test(test_launches),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
