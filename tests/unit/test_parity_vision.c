/*
 * The vision encoder against tests/parity/vision: sizes, resized pixels, patches and rows as Hugging Face
 * transformers computes them for a random tower, in both spellings of the file.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "common/image/image.h"
#include "remote/encoder/encoder.h"
#include "remote/encoder/tower.h"
#include "tests/unit/gguf_make.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#ifndef TEST_DEVICE /* "cuda" where the CUDA device is linked with the imitation of its runtime */
#define TEST_DEVICE "cpu"
#endif

static struct fs_errbuf e;
static struct fs_gguf *golden;

/* Valid for the next three calls. */
static const char *data_path(const char *name)
{
	static char paths[4][4096];
	static unsigned turn;
	char *path = paths[turn++ % 4];
	const char *root = getenv("FS_TEST_DATA");

	snprintf(path, sizeof(paths[0]), "%s/parity/vision/%s", root != NULL ? root : "tests", name);
	return path;
}

static uint8_t *read_picture(const char *name, size_t *n)
{
	char file[64];
	FILE *f;
	uint8_t *bytes;

	snprintf(file, sizeof(file), "%s.png", name);
	f = fopen(data_path(file), "rb");
	assert_non_null(f);
	bytes = malloc(1 << 20);
	*n = fread(bytes, 1, 1 << 20, f);
	fclose(f);
	return bytes;
}

/* A golden tensor as f32; malloc'd. */
static float *golden_floats(const char *picture, const char *what, size_t *n)
{
	const struct fs_gguf_tensor *t = NULL;
	char name[64];
	float *f;

	snprintf(name, sizeof(name), "%s.%s", picture, what);
	if (fs_gguf_need(golden, name, 0, 0, &t, &e) != FS_OK)
		fail_msg("%s", e.text);
	*n = (size_t)(t->ne[0] * t->ne[1] * t->ne[2] * t->ne[3]);
	f = malloc(*n * sizeof(*f));
	fs_dequantize_row(t->type, t->data, f, (int64_t)*n);
	return f;
}

struct difference {
	double max, nmse;
};

static struct difference compare(const float *got, const float *want, size_t n)
{
	double most = 0, err = 0, all = 0;

	for (size_t i = 0; i < n; i++) {
		double d = (double)got[i] - (double)want[i];

		most = fmax(most, fabs(d));
		err += d * d;
		all += (double)want[i] * (double)want[i];
	}
	return (struct difference){most, err / all};
}

/* Calls check for each picture's name. */
static size_t each_picture(void (*check)(const char *name, void *arg), void *arg)
{
	struct fs_gguf_strs it;
	const char *s;
	size_t n, count = 0;

	assert_int_equal(fs_gguf_arr_strs(golden, "parity.pictures", &it, &e), FS_OK);
	for (; fs_gguf_strs_next(&it, &s, &n); count++) {
		char name[32];

		snprintf(name, sizeof(name), "%.*s", (int)n, s);
		check(name, arg);
	}
	return count;
}

static void golden_size(const char *name, int32_t size[4])
{
	char key[64];

	snprintf(key, sizeof(key), "%s.size", name);
	assert_int_equal(fs_gguf_arr_i32(golden, key, size, 4, &e), FS_OK);
}

static struct vision_hparams read_hparams(void)
{
	struct fs_gguf *g;
	struct vision_hparams h;

	assert_int_equal(fs_gguf_open(&g, data_path("mmproj-f32.gguf"), &e), FS_OK);
	if (vision_hparams_read(g, &h, &e) != FS_OK)
		fail_msg("%s", e.text);
	fs_gguf_close(g);
	return h;
}

/* ---- preprocessing ---- */

static void check_resize(const char *name, void *arg)
{
	const struct vision_hparams *h = arg;
	struct fs_image im = {0}, small = {0};
	size_t n, m;
	uint8_t *bytes = read_picture(name, &n);
	float *want = golden_floats(name, "resized", &m);
	int32_t size[4];
	int w, t;

	golden_size(name, size);
	assert_int_equal(fs_image_decode(bytes, n, NULL, NULL, &im, &e), FS_OK);
	assert_int_equal(smart_resize(im.width, im.height, h->patch * h->merge, h->min_pixels, h->max_pixels,
	                         &w, &t, &e),
	        FS_OK);
	if (w != size[0] || t != size[1])
		fail_msg("%s: %d x %d, expected %d x %d", name, w, t, size[0], size[1]);
	assert_int_equal(fs_image_resize(&im, w, t, FS_BICUBIC, &small, &e), FS_OK);
	assert_int_equal(m, (size_t)w * (size_t)t * 3);
	for (size_t i = 0; i < m; i++)
		if ((float)small.rgb[i] != want[i])
			fail_msg("%s: byte %zu is %d, expected %.0f", name, i, small.rgb[i], (double)want[i]);
	fs_image_finish(&im);
	fs_image_finish(&small);
	free(bytes);
	free(want);
}

static void pictures_are_resized_alike(void **state)
{
	struct vision_hparams h = read_hparams();

	assert_int_equal(each_picture(check_resize, &h), 7);
}

/* The processor's patches hold two equal frames, ours one. */
static void patches_are_cut_alike(void **state)
{
	static const char *const names[] = {"grid", "tiny"};
	struct vision_hparams h = read_hparams();
	size_t plane = (size_t)h.patch * (size_t)h.patch;

	for (size_t k = 0; k < FS_ARRAY_LEN(names); k++) {
		struct patches p = {0};
		size_t n, m;
		uint8_t *bytes = read_picture(names[k], &n);
		float *want = golden_floats(names[k], "pixel_values", &m);

		assert_int_equal(preprocess(&h, bytes, n, h.min_pixels, h.max_pixels, NULL, &p, &e), FS_OK);
		assert_int_equal(m, (size_t)p.n * 6 * plane);
		for (size_t i = 0; i < (size_t)p.n * 3; i++)
			for (size_t j = 0; j < plane; j++)
				if (fabsf(p.data[i * plane + j] - want[i * 2 * plane + j]) > 1e-5f)
					fail_msg("%s: plane %zu, pixel %zu differs", names[k], i, j);
		patches_finish(&p);
		free(bytes);
		free(want);
	}
}

/* Expected sizes were computed with the published function. */
static void sizes_follow_the_published_rule(void **state)
{
	static const struct {
		int w, h, want_w, want_h;
	} cases[] = {
	        {28, 28, 56, 56}, /* below the minimum: up */
	        {1, 1, 56, 56},
	        {70, 98, 56, 112}, /* 2.5 and 3.5 cells: halves go to the even side */
	        {1120, 840, 1120, 840},
	        {4000, 3000, 1148, 840},
	        {10, 1000, 28, 560}, /* no lower limit of one cell before the minimum is applied: 0 cells */
	        {8000, 41, 8008, 28},
	};
	int w, h;

	for (size_t i = 0; i < FS_ARRAY_LEN(cases); i++) {
		assert_int_equal(
		        smart_resize(cases[i].w, cases[i].h, 28, 56 * 56, 28 * 28 * 1280, &w, &h, &e), FS_OK);
		if (w != cases[i].want_w || h != cases[i].want_h)
			fail_msg("%d x %d became %d x %d, expected %d x %d", cases[i].w, cases[i].h, w, h,
			        cases[i].want_w, cases[i].want_h);
	}
	assert_int_equal(smart_resize(4020, 20, 28, 3136, 1003520, &w, &h, &e), FS_EINVAL);
	assert_non_null(strstr(e.text, "200 times"));
	assert_int_equal(smart_resize(4000, 20, 28, 3136, 1003520, &w, &h, &e), FS_OK);
}

/* ---- rows ---- */

struct rows_check {
	struct fs_encoder *v;
	const char *what;
	double max, nmse; /* allowed; max 0: not looked at */
};

static void check_rows(const char *name, void *arg)
{
	const struct rows_check *c = arg;
	struct fs_rows_shape s;
	struct difference d;
	size_t n, m;
	uint8_t *bytes = read_picture(name, &n);
	float *want = golden_floats(name, c->what, &m), *rows = NULL;
	int32_t size[4];

	golden_size(name, size);
	if (fs_encoder_encode(c->v, bytes, n, 0, 0, NULL, &s, &rows, &e) != FS_OK)
		fail_msg("%s: %s", name, e.text);
	assert_int_equal(s.nx, size[2]);
	assert_int_equal(s.ny, size[3]);
	assert_int_equal((size_t)s.n_tokens * (size_t)s.n_embd, m);
	d = compare(rows, want, m);
	print_message("%s.%s: max %.2e, nmse %.2e\n", name, c->what, d.max, d.nmse);
	if (!(d.nmse <= c->nmse) || (c->max > 0 && !(d.max <= c->max)))
		fail_msg("%s.%s: max %.3e, nmse %.3e", name, c->what, d.max, d.nmse);
	free(rows);
	free(bytes);
	free(want);
}

static void check_file(
        const char *file, const char *what, enum fs_precision precision, double max, double nmse)
{
	struct fs_encoder_opts o = {
	        .mmproj = data_path(file), .device = TEST_DEVICE, .threads = 2, .precision = precision};
	struct rows_check c = {.what = what, .max = max, .nmse = nmse};

	if (fs_encoder_open(&o, &c.v, &e) != FS_OK)
		fail_msg("%s", e.text);
	assert_int_equal(fs_encoder_facts(c.v)->n_embd, 128);
	assert_int_equal(fs_encoder_facts(c.v)->min_tokens, 4);
	assert_int_equal(fs_encoder_facts(c.v)->max_tokens, 48);
	assert_int_equal(each_picture(check_rows, &c), 7);
	fs_encoder_close(c.v);
}

static void rows_in_f32(void **state)
{
	check_file("mmproj-f32.gguf", "rows_f32", FS_PRECISION_F32, 1e-3, 1e-7);
}

/* The same tower as F16 with the old names of the feed-forward pair. */
static void rows_of_the_f16_file(void **state)
{
	check_file("mmproj-f16.gguf", "rows_f16", FS_PRECISION_F32, 1e-3, 1e-7);
}

static void rows_in_bf16(void **state)
{
	check_file("mmproj-f32.gguf", "rows_f32", FS_PRECISION_AUTO, 0, 1e-4);
}

/* Copies a tensor; q, k and v of a layer are put together into one, as newer files have them. */
static void copy_tensor(struct gguf_make *m, const struct fs_gguf *g, const struct fs_gguf_tensor *t)
{
	const struct fs_gguf_tensor *k, *v;
	char name[64], *at;
	int64_t ne[4];
	struct fs_buf all;

	memcpy(ne, t->ne, sizeof(ne));
	if (strstr(t->name, ".attn_k.") != NULL || strstr(t->name, ".attn_v.") != NULL)
		return;
	if (strstr(t->name, ".attn_q.") == NULL) {
		gm_tensor(m, t->name, (int32_t)t->type, ne, t->n_dims, t->data, t->nbytes);
		return;
	}
	snprintf(name, sizeof(name), "%s", t->name);
	at = strstr(name, ".attn_q.") + 6;
	*at = 'k';
	k = fs_gguf_tensor(g, name);
	*at = 'v';
	v = fs_gguf_tensor(g, name);
	fs_buf_init(&all, 1 << 24);
	gm_bytes(&all, t->data, t->nbytes);
	gm_bytes(&all, k->data, k->nbytes);
	gm_bytes(&all, v->data, v->nbytes);
	snprintf(at, sizeof(name) - (size_t)(at - name), "qkv%s", strstr(t->name, ".attn_q.") + 7);
	ne[t->n_dims - 1] *= 3;
	gm_tensor(m, name, (int32_t)t->type, ne, t->n_dims, all.data, all.len);
	fs_buf_finish(&all);
}

/* What of a file is written anew. */
struct rewrite {
	const char *from;
	bool fused;  /* q, k and v in one tensor */
	uint32_t ff; /* what the key feed_forward_length says */
};

static void rewrite(const struct rewrite *w, const char *path)
{
	struct fs_gguf *g;
	struct gguf_make m;
	struct vision_hparams h = read_hparams();

	assert_int_equal(fs_gguf_open(&g, data_path(w->from), &e), FS_OK);
	gm_init(&m);
	gm_str(&m, "clip.vision.projector_type", "qwen2vl_merger");
	gm_u32(&m, "clip.vision.embedding_length", (uint32_t)h.n_embd);
	gm_u32(&m, "clip.vision.attention.head_count", (uint32_t)h.n_heads);
	gm_u32(&m, "clip.vision.block_count", (uint32_t)h.n_layers);
	gm_u32(&m, "clip.vision.feed_forward_length", w->ff);
	gm_u32(&m, "clip.vision.patch_size", (uint32_t)h.patch);
	gm_u32(&m, "clip.vision.image_min_pixels", (uint32_t)h.min_pixels);
	gm_u32(&m, "clip.vision.image_max_pixels", (uint32_t)h.max_pixels);
	gm_arr(&m, "clip.vision.image_mean", 6, h.mean, 3, 4);
	gm_arr(&m, "clip.vision.image_std", 6, h.std, 3, 4);
	for (size_t i = 0; i < fs_gguf_n_tensors(g); i++) {
		const struct fs_gguf_tensor *t = fs_gguf_tensor_at(g, i);

		if (w->fused)
			copy_tensor(&m, g, t);
		else
			gm_tensor(&m, t->name, (int32_t)t->type, t->ne, t->n_dims, t->data, t->nbytes);
	}
	gm_build(&m);
	gm_write(path, m.file.data, m.file.len);
	gm_finish(&m);
	fs_gguf_close(g);
}

static void check_rewritten(const struct rewrite *w, const char *what)
{
	char path[] = "/tmp/fs-test-mmproj-XXXXXX";
	struct fs_encoder_opts o = {.mmproj = path, .device = "cpu", .precision = FS_PRECISION_F32};
	struct rows_check c = {.what = what, .max = 1e-3, .nmse = 1e-7};
	int fd = mkstemp(path);

	assert_true(fd >= 0);
	close(fd);
	rewrite(w, path);
	if (fs_encoder_open(&o, &c.v, &e) != FS_OK)
		fail_msg("%s", e.text);
	assert_int_equal(each_picture(check_rows, &c), 7);
	fs_encoder_close(c.v);
	unlink(path);
}

static void rows_of_a_fused_file(void **state)
{
	check_rewritten(&(struct rewrite){"mmproj-f32.gguf", true, 128}, "rows_f32");
}

/* What llama.cpp's converters write for Qwen2-VL: qwen2_vl_surgery.py 0 ("not sure what this does"),
 * convert_hf_to_gguf.py the text model's width, here one that is not the tower's by chance. */
static void rows_of_published_files(void **state)
{
	check_rewritten(&(struct rewrite){"mmproj-f16.gguf", false, 0}, "rows_f16");
	check_rewritten(&(struct rewrite){"mmproj-f32.gguf", false, 96}, "rows_f32");
}

/* Bounds for one picture narrow the encoder's own and never widen them. */
static void bounds_of_one_picture(void **state)
{
	struct fs_encoder_opts o = {
	        .mmproj = data_path("mmproj-f32.gguf"), .device = "cpu", .precision = FS_PRECISION_F32};
	struct fs_encoder *v;
	struct fs_rows_shape s;
	size_t n;
	uint8_t *bytes = read_picture("large", &n);
	float *few = NULL, *more = NULL;

	assert_int_equal(fs_encoder_open(&o, &v, &e), FS_OK);
	assert_int_equal(fs_encoder_encode(v, bytes, n, 0, 12, NULL, &s, &few, &e), FS_OK);
	assert_in_range(s.n_tokens, 4, 12);
	assert_int_equal(fs_encoder_encode(v, bytes, n, 0, 4000, NULL, &s, &more, &e), FS_OK);
	assert_in_range(s.n_tokens, 13, 48);
	free(few);
	free(more);
	free(bytes);
	fs_encoder_close(v);
}

static void refusals(void **state)
{
	struct fs_encoder_opts o = {.mmproj = data_path("e2e-text-f16.gguf"), .device = "cpu"};
	struct fs_cancel *c = fs_cancel_create(FS_NEVER);
	struct fs_encoder *v = NULL;
	struct fs_rows_shape s;
	char mmproj[4096], model[4096];
	float *rows = NULL;
	size_t n;
	uint8_t *bytes = read_picture("grid", &n);

	assert_int_not_equal(fs_encoder_open(&o, &v, &e), FS_OK);
	assert_non_null(strstr(e.text, "no mmproj file"));
	snprintf(mmproj, sizeof(mmproj), "%s", data_path("mmproj-f32.gguf"));
	o.mmproj = mmproj;
	snprintf(model, sizeof(model), "%s", data_path("../text/qwen2-f32.gguf"));
	o.model = model;
	assert_int_equal(fs_encoder_open(&o, &v, &e), FS_EINVAL);
	assert_non_null(strstr(e.text, "do not belong together"));
	snprintf(model, sizeof(model), "%s", data_path("e2e-text-f16.gguf"));
	assert_int_equal(fs_encoder_open(&o, &v, &e), FS_OK);
	assert_int_equal(fs_encoder_encode(v, "no picture", 10, 0, 0, NULL, &s, &rows, &e), FS_EFORMAT);
	fs_cancel_fire(c, FS_CANCEL_CLIENT);
	assert_int_equal(fs_encoder_encode(v, bytes, n, 0, 0, c, &s, &rows, &e), FS_ECANCELLED);
	assert_null(rows);
	assert_int_equal(fs_encoder_encode(v, bytes, n, 0, 0, NULL, &s, &rows, &e), FS_OK);
	free(rows);
	fs_encoder_close(v);
	fs_cancel_unref(c);
	free(bytes);
}

static int setup(void **state)
{
	return fs_gguf_open(&golden, data_path("vision.golden.gguf"), &e);
}

static int teardown(void **state)
{
	fs_gguf_close(golden);
	return 0;
}

int main(void)
{
	const struct CMUnitTest tests[] = {
	        cmocka_unit_test(pictures_are_resized_alike),
	        cmocka_unit_test(patches_are_cut_alike),
	        cmocka_unit_test(sizes_follow_the_published_rule),
	        cmocka_unit_test(rows_in_f32),
	        cmocka_unit_test(rows_of_the_f16_file),
	        cmocka_unit_test(rows_of_a_fused_file),
	        cmocka_unit_test(rows_of_published_files),
	        cmocka_unit_test(rows_in_bf16),
	        cmocka_unit_test(bounds_of_one_picture),
	        cmocka_unit_test(refusals),
	};

	return cmocka_run_group_tests(tests, setup, teardown);
}
