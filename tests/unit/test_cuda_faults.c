/*
 * What goes wrong with a card, on the imitation of the runtime: no driver, no card, another card, memory that
 * is short, kernels that fail, a card that does not answer, recordings that can not be made. Each has a text
 * that says what is the matter, nothing hangs, results are right or there are none, and what was taken is
 * given back.
 */
#include "compute_util.h"

#include "common/compute/cuda/cuda.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

static int setup(void **state)
{
	fake_cuda_init();
	return 0;
}

/* Everything was given back. */
static int teardown(void **state)
{
	const struct fake_cuda *f = &fake_cuda;

	if (f->blocks || f->pinned || f->streams || f->events || f->graphs || f->pools || f->cublas) {
		printf("left: %d blocks, %d pinned, %d streams, %d events, %d graphs, %d pools, %d of "
		       "cuBLAS\n",
		        f->blocks, f->pinned, f->streams, f->events, f->graphs, f->pools, f->cublas);
		return -1;
	}
	return 0;
}

static int try_open(const char *name, struct fs_dev **d, struct fs_errbuf *e)
{
	struct fs_dev_opts o = {.device = name, .threads = 1};

	return fs_dev_open(&o, d, e);
}

static struct fs_dev *open_gpu(void)
{
	struct fs_dev *d = NULL;
	struct fs_errbuf e = {.text = ""};

	if (try_open("cuda", &d, &e))
		fail_msg("%s", e.text);
	return d;
}

/* The card is refused with these words, and "auto" is the CPU then. */
static void refused(const char *name, int err, const char *words)
{
	struct fs_dev *d = NULL;
	struct fs_errbuf e = {.text = ""};

	assert_int_equal(try_open(name, &d, &e), err);
	if (!strstr(e.text, words))
		fail_msg("\"%s\" is not in \"%s\"", words, e.text);
	assert_null(d);
	if (!strcmp(name, "cuda")) {
		assert_int_equal(try_open("auto", &d, &e), FS_OK);
		assert_string_equal(fs_dev_name(d), "cpu");
		fs_dev_close(d);
	}
}

static void test_no_card(void **state)
{
	fake_cuda.driver = 0;
	refused("cuda", FS_EUNAVAILABLE, "no NVIDIA driver on this PC");
	fake_cuda.driver = 11040;
	refused("cuda", FS_EUNAVAILABLE, "supports CUDA 11.4, and this build needs 13.0 or newer");
	fake_cuda.driver = 13000;
	fake_cuda.cards = 0;
	refused("cuda", FS_EUNAVAILABLE, "finds no card");
	fake_cuda.cards = 1;
	fake_cuda.arch = 61;
	refused("cuda", FS_EUNAVAILABLE, "Fake card A has compute capability 6.1, and this build is for 7.5");
	fake_cuda.arch = 90;
	refused("cuda:3", FS_EUNAVAILABLE, "cuda:3: there is 1 card: 0 Fake card A");
	fake_cuda.cards = 2;
	refused("cuda:2", FS_EUNAVAILABLE, "cuda:2: there are 2 cards: 0 Fake card B, 1 Fake card A");
	fake_cuda.no_cublas = true;
	refused("cuda", FS_EUNAVAILABLE, "libcublasLt is not on this PC");
	fake_cuda.no_cublas = false;
	fake_cuda.memory = 1 << 20;
	refused("cuda", FS_ENOMEM, "has no memory for 32.0 MiB");
	fake_cuda.memory = (size_t)1 << 30;
	fake_cuda.no_pinned_at = fake_cuda.pinned_allocs + 1;
	refused("cuda:0", FS_ENOMEM, "pinned memory");
	fake_cuda.refused_at = fake_cuda.launches + 1;
	refused("cuda:0", FS_EINTERNAL, "cudaErrorLaunchOutOfResources");
}

/* By number in the order of places, else the fastest. */
static void test_which_card(void **state)
{
	static const char *const names[][3] = {{"cuda:1", "cuda:1", "Fake card B"},
	        {"cuda:0", "cuda:0", "Fake card C"}, {"cuda:2", "cuda:2", "Fake card A"},
	        {"auto", "cuda:2", "Fake card A"}};
	struct fs_dev *d = NULL;
	struct fs_errbuf e = {.text = ""};

	fake_cuda.cards = 3;
	for (size_t i = 0; i < FS_ARRAY_LEN(names); i++) {
		assert_int_equal(try_open(names[i][0], &d, &e), FS_OK);
		assert_string_equal(fs_dev_name(d), names[i][1]);
		assert_non_null(strstr(fs_dev_describe(d), names[i][2]));
		fs_dev_close(d);
	}
}

/* ---- memory ---- */

static void test_out_of_memory(void **state)
{
	for (int pools = 0; pools < 2; pools++) {
		struct fs_dev *d;
		struct fs_errbuf e = {.text = ""};
		uint64_t have, total;
		void *p = NULL, *q = NULL;

		fake_cuda.no_pools = !pools;
		d = open_gpu();
		assert_int_equal(fs_dev_alloc(d, (size_t)800 << 20, &p, &e), FS_OK);
		assert_true(fs_dev_memory(d, &have, &total));
		assert_int_equal(have, total - fake_cuda.used);
		assert_int_equal(fs_dev_alloc(d, (size_t)800 << 20, &q, &e), FS_ENOMEM);
		assert_non_null(strstr(e.text, "cuda:0 has no memory for 800.0 MiB: "));
		assert_non_null(strstr(e.text, "of 1024.0 MiB are free"));
		assert_null(q);
		fs_dev_free(d, p);
		assert_int_equal(fs_dev_alloc(d, (size_t)800 << 20, &q, &e), FS_OK);
		fs_dev_free(d, q);
		no_error(d);
		fs_dev_close(d);
	}
}

/* ---- a small product ---- */

struct small {
	struct fs_dev *d;
	struct fs_weight w;
	float *x, *y;
	int64_t n;
};

/* W is 64 x 64 of 1/8; x is ones: each product is 8. */
static struct small begin_form(struct fs_dev *d, int64_t n, bool expect_packed)
{
	static float w[64 * 64], ones[64 * 64];
	struct small s = {.d = d, .n = n};
	struct fs_gguf_tensor t = {.name = "w",
	        .type = FS_F32,
	        .n_dims = 2,
	        .ne = {64, 64, 1, 1},
	        .data = w,
	        .nbytes = sizeof(w)};
	struct fs_errbuf e = {.text = ""};
	void *p = NULL;

	for (int i = 0; i < 64 * 64; i++)
		w[i] = 0.125f, ones[i] = 1.0f;
	assert_int_equal(fs_weight_load(d, &t, expect_packed, &s.w, &e), FS_OK);
	assert_int_equal(fs_dev_alloc(d, sizeof(ones), &p, &e), FS_OK);
	s.x = p;
	assert_int_equal(fs_dev_alloc(d, sizeof(ones), &p, &e), FS_OK);
	s.y = p;
	fs_dev_upload(d, s.x, ones, sizeof(ones));
	return s;
}

static struct small begin(struct fs_dev *d, int64_t n)
{
	return begin_form(d, n, true);
}

static int product(struct small *s, const float *bias, float *first, struct fs_errbuf *e)
{
	float y[64 * 64];
	int err;

	fs_op_matmul(s->d, &s->w, bias, s->x, s->y, s->n, false);
	err = fs_dev_download(s->d, y, s->y, (size_t)(s->n * 64) * sizeof(float), e);
	*first = y[s->n * 64 - 1];
	return err;
}

static void end(struct small *s)
{
	fs_dev_forget(s->d);
	fs_dev_free(s->d, s->x);
	fs_dev_free(s->d, s->y);
	fs_weight_finish(s->d, &s->w);
	fs_dev_close(s->d);
}

/* To the program itself the card's memory is none. */
static void test_reach(void **state)
{
	struct small s = begin(open_gpu(), 3);
	struct fs_errbuf e = {.text = ""};
	float y;

	assert_true(fake_cuda_stops(s.x));
	assert_int_equal(product(&s, NULL, &y, &e), FS_OK);
	assert_true(fake_cuda_stops(s.w.data));
	assert_true(fake_cuda_stops(s.y + 64 * 64 - 1));
	end(&s);
}

/* A launch that is refused is this step's end and not the card's. */
static void test_refused_launch(void **state)
{
	struct small s = begin(open_gpu(), 3);
	struct fs_errbuf e = {.text = ""};
	float y;

	no_error(s.d);
	fake_cuda.refused_at = fake_cuda.launches + 1;
	assert_int_equal(product(&s, NULL, &y, &e), FS_EINTERNAL);
	assert_non_null(strstr(e.text, "cuda:0: a product: "));
	assert_non_null(strstr(e.text, "cudaErrorLaunchOutOfResources"));
	assert_false(fs_dev_lost(s.d));
	assert_int_equal(product(&s, NULL, &y, &e), FS_OK);
	assert_true(y == 8);
	end(&s);
}

/* Scratch that does not fit is an error of the step; with memory again it works. */
static void test_scratch(void **state)
{
	struct small s = begin(open_gpu(), 40);
	struct fs_errbuf e = {.text = ""};
	void *rest = NULL;
	float y;

	no_error(s.d);
	assert_int_equal(fs_dev_alloc(s.d, fake_cuda.memory - fake_cuda.used, &rest, &e), FS_OK);
	assert_int_equal(product(&s, NULL, &y, &e), FS_ENOMEM);
	assert_non_null(strstr(e.text, "has no memory for 1.0 MiB"));
	assert_false(fs_dev_lost(s.d));
	fs_dev_free(s.d, rest);
	assert_int_equal(product(&s, NULL, &y, &e), FS_OK);
	assert_true(y == 8);
	end(&s);
}

/* After an illegal access nothing works but closing, and the next device does. */
static void test_lost(void **state)
{
	for (int at = 1; at <= 3; at++) {
		struct small s = begin(open_gpu(), at == 3 ? 40 : 3);
		struct fs_errbuf e = {.text = ""};
		uint64_t have, total;
		void *p;
		float y;

		no_error(s.d);
		fake_cuda.illegal_at = fake_cuda.kernels + 1;
		assert_int_equal(product(&s, NULL, &y, &e), FS_EINTERNAL);
		assert_non_null(strstr(e.text, "an illegal memory access was encountered"));
		assert_non_null(strstr(e.text, "has to be opened again"));
		assert_true(fs_dev_lost(s.d));
		assert_int_equal(product(&s, NULL, &y, &e), FS_EUNAVAILABLE);
		assert_int_equal(fs_dev_alloc(s.d, 1, &p, &e), FS_EUNAVAILABLE);
		assert_false(fs_dev_memory(s.d, &have, &total));
		assert_false(fs_dev_replay(s.d, 1));
		fs_dev_recorded(s.d);
		fs_dev_pace(s.d);
		assert_int_equal(fs_dev_sync(s.d, &e), FS_EUNAVAILABLE);
		end(&s);
		assert_int_equal(fake_cuda.resets, 1);
		assert_int_equal(fake_cuda.used, 0); /* or the next device finds the card full */
		assert_int_equal(fake_cuda.pools, 0);
		fake_cuda_init();
		s = begin(open_gpu(), 3);
		assert_int_equal(product(&s, NULL, &y, &e), FS_OK);
		assert_true(y == 8);
		end(&s);
		fake_cuda_init();
	}
}

/* A context that a reset does not mend is told when the device is opened again. */
static void test_stays_broken(void **state)
{
	struct small s = begin(open_gpu(), 3);
	struct fs_errbuf e = {.text = ""};
	float y;

	no_error(s.d);
	fake_cuda.stays_broken = true;
	fake_cuda.illegal_at = fake_cuda.kernels + 1;
	assert_int_equal(product(&s, NULL, &y, &e), FS_EINTERNAL);
	end(&s);
	refused("cuda", FS_EUNAVAILABLE, "cuda:0 can not be used: an illegal memory access");
	fake_cuda_init();
}

/* A card that does not answer is given up, and closing it does not wait. */
static void test_hang(void **state)
{
	struct small s = begin(open_gpu(), 3);
	struct fs_errbuf e = {.text = ""};
	int64_t begin;
	float y;

	no_error(s.d);
	fs_cuda(s.d)->wait_limit = 30 * FS_MS;
	fake_cuda.hang = true;
	begin = fs_now();
	assert_int_equal(product(&s, NULL, &y, &e), FS_EINTERNAL);
	assert_true(fs_now() - begin >= 30 * FS_MS);
	assert_non_null(strstr(e.text, "does not answer"));
	assert_true(fs_dev_lost(s.d));
	assert_int_equal(product(&s, NULL, &y, &e), FS_EUNAVAILABLE);
	end(&s);
	assert_int_equal(fake_cuda.resets, 0);
	fake_cuda_init();
}

/* ---- products and recordings that can not be as they should ---- */

/* Of weights that are numbers, and of those that become numbers for the product. */
static void test_no_bias(void **state)
{
	for (int i = 0; i < 4; i++) {
		struct small s = begin_form(open_gpu(), 40, i % 2);
		struct fs_errbuf e = {.text = ""};
		float y;

		fake_cuda.no_bias = i / 2;
		if (product(&s, s.x, &y, &e) != FS_OK) /* ones */
			fail_msg("%s", e.text);
		assert_true(y == 9);
		assert_int_equal(fake_cuda.products, i + 1);
		end(&s);
	}
}

/* y += 8, a hundred times. */
static float steps(struct small *s, uint64_t key)
{
	static const float zeros[64 * 64];
	struct fs_errbuf e = {.text = ""};
	float y[64 * 64];

	fs_dev_upload(s->d, s->y, zeros, sizeof(zeros));
	for (int i = 0; i < 100; i++) {
		if (!fs_dev_replay(s->d, key)) {
			fs_op_matmul(s->d, &s->w, NULL, s->x, s->y, s->n, true);
			fs_dev_recorded(s->d);
		}
		assert_int_equal(fs_dev_sync(s->d, &e), FS_OK);
	}
	assert_int_equal(fs_dev_download(s->d, y, s->y, sizeof(float), &e), FS_OK);
	return y[0];
}

static void test_recordings(void **state)
{
	for (int k = 0; k < 4; k++) {
		struct small s = begin(open_gpu(), k % 2 ? 40 : 1);

		fake_cuda.graph_launches = 0;
		fake_cuda.no_capture = k == 1;
		fake_cuda.bad_capture = k == 2;
		fake_cuda.no_instance = k == 3;
		assert_true(steps(&s, 5) == 800);
		assert_int_equal(fake_cuda.graph_launches, k ? 0 : 99);
		fake_cuda.no_capture = fake_cuda.bad_capture = fake_cuda.no_instance = false;
		end(&s);
	}
}

/* Scratch that grows while a step is recorded: the recording names memory that is gone. */
static void test_growing_scratch(void **state)
{
	struct small s = begin(open_gpu(), 40);

	s.n = 12; /* the first many rows */
	assert_true(steps(&s, 1) == 800);
	assert_int_equal(fake_cuda.graph_launches, 98);
	end(&s);
}

/* An error within a step is that step's, and nothing of it is kept. */
static void test_error_while_recording(void **state)
{
	struct small s = begin(open_gpu(), 1);
	struct fs_errbuf e = {.text = ""};

	no_error(s.d);
	fake_cuda.refused_at = fake_cuda.launches + 1;
	assert_false(fs_dev_replay(s.d, 9));
	fs_op_matmul(s.d, &s.w, NULL, s.x, s.y, s.n, true);
	fs_dev_recorded(s.d);
	assert_int_equal(fs_dev_sync(s.d, &e), FS_EINTERNAL);
	assert_true(steps(&s, 9) == 800);
	assert_int_equal(fake_cuda.graph_launches, 99);
	end(&s);
}

/* ---- files ---- */

/* A file that is shorter than its map: its pages are an error, and not the program's end. */
static void test_unreadable(void **state)
{
	static const size_t sizes[] = {64 * 1024, 64 << 20};
	char name[] = "/tmp/farsight-test-XXXXXX";
	int fd = mkstemp(name);
	struct fs_dev *d = open_gpu();
	struct fs_errbuf e = {.text = ""};

	assert_true(fd >= 0);
	unlink(name);
	for (size_t i = 0; i < FS_ARRAY_LEN(sizes); i++) {
		struct fs_gguf_tensor t = {
		        .name = "blk.0.w", .type = FS_F32, .ne = {1024, (int64_t)(sizes[i] / 4096), 1, 1}};
		struct fs_weight w = {0};
		void *map;

		assert_int_equal(ftruncate(fd, (off_t)sizes[i]), 0);
		map = mmap(NULL, sizes[i], PROT_READ, MAP_PRIVATE, fd, 0);
		assert_true(map != MAP_FAILED);
		assert_int_equal(ftruncate(fd, 4096), 0);
		if (madvise(map, 4096, 22 /* MADV_POPULATE_READ */)) {
			printf("this Linux can not say beforehand that pages are missing\n");
			munmap(map, sizes[i]);
			break;
		}
		t.data = map;
		t.nbytes = sizes[i];
		assert_int_equal(fs_weight_load(d, &t, false, &w, &e), FS_EIO);
		assert_non_null(strstr(e.text, "tensor blk.0.w: its file can not be read"));
		munmap(map, sizes[i]);
	}
	close(fd);
	no_error(d);
	fs_dev_close(d);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
	        TEST(test_no_card),
	        TEST(test_which_card),
	        TEST(test_out_of_memory),
	        TEST(test_reach),
	        TEST(test_refused_launch),
	        TEST(test_scratch),
	        TEST(test_lost),
	        TEST(test_stays_broken),
	        TEST(test_hang),
	        TEST(test_no_bias),
	        TEST(test_recordings),
	        TEST(test_growing_scratch),
	        TEST(test_error_while_recording),
	        TEST(test_unreadable),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
