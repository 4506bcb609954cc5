/*
 * Pictures: every file of tests/data/cases against what Pillow makes of it (expected.json), limits, damage of
 * every kind, resizing bit for bit against Pillow (tests/parity/resize.gguf).
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "common/gguf/gguf.h"
#include "common/image/image.h"

#include <jansson.h>
#include <openssl/evp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *data_path(const char *folder, const char *name)
{
	static char path[4096];
	const char *root = getenv("FS_TEST_DATA");

	snprintf(path, sizeof(path), "%s/%s/%s", root != NULL ? root : "tests", folder, name);
	return path;
}

static uint8_t *read_case(const char *name, size_t *n)
{
	FILE *f = fopen(data_path("data/cases", name), "rb");
	uint8_t *bytes;

	if (f == NULL)
		fail_msg("cannot open %s", name);
	fseek(f, 0, SEEK_END);
	*n = (size_t)ftell(f);
	rewind(f);
	bytes = malloc(*n); /* exactly: reading past the end is seen */
	assert_non_null(bytes);
	assert_int_equal(fread(bytes, 1, *n, f), *n);
	fclose(f);
	return bytes;
}

static struct fs_image decode_case(const char *name)
{
	struct fs_image im = {0};
	struct fs_errbuf e = {{0}};
	size_t n;
	uint8_t *bytes = read_case(name, &n);

	if (fs_image_decode(bytes, n, NULL, NULL, &im, &e) != FS_OK)
		fail_msg("%s: %s", name, e.text);
	free(bytes);
	return im;
}

/* ---- expected.json ---- */

static void check_pixels(const char *name, const json_t *fact, const struct fs_image *im, int tolerance)
{
	size_t i;
	json_t *p;

	json_array_foreach(json_object_get(fact, "pixels"), i, p)
	{
		int x = (int)json_integer_value(json_array_get(p, 0)),
		    y = (int)json_integer_value(json_array_get(p, 1));
		const uint8_t *got = im->rgb + ((size_t)y * (size_t)im->width + (size_t)x) * 3;

		for (size_t c = 0; c < 3; c++) {
			int want = (int)json_integer_value(json_array_get(p, 2 + c));

			if (abs(want - got[c]) > tolerance)
				fail_msg("%s: pixel (%d, %d) channel %zu is %d, expected %d", name, x, y, c,
				        got[c], want);
		}
	}
}

static void check_mean(const char *name, const json_t *fact, const struct fs_image *im)
{
	size_t n = (size_t)im->width * (size_t)im->height;

	for (size_t c = 0; c < 3; c++) {
		double sum = 0, want = json_number_value(json_array_get(json_object_get(fact, "mean"), c));

		for (size_t i = 0; i < n; i++)
			sum += im->rgb[i * 3 + c];
		if (sum / (double)n < want - 1 || sum / (double)n > want + 1)
			fail_msg("%s: mean of channel %zu is %.3f, expected %.3f", name, c, sum / (double)n,
			        want);
	}
}

static void check_hash(const char *name, const char *want, const struct fs_image *im)
{
	uint8_t md[EVP_MAX_MD_SIZE];
	char hex[65];

	assert_int_equal(
	        EVP_Digest(im->rgb, (size_t)im->width * (size_t)im->height * 3, md, NULL, EVP_sha256(), NULL),
	        1);
	for (size_t i = 0; i < 32; i++)
		snprintf(hex + 2 * i, 3, "%02x", md[i]);
	if (strcmp(hex, want) != 0)
		fail_msg("%s: pixels differ from the expected ones", name);
}

static void check_refused(const char *name, const char *how, int err, const struct fs_errbuf *e)
{
	if (strcmp(how, "damaged") == 0 && (err != FS_EFORMAT || strstr(e->text, "could not decode") == NULL))
		fail_msg("%s: %d \"%s\"", name, err, e->text);
	if (strcmp(how, "pixels") == 0 && (err != FS_ELIMIT || strstr(e->text, "pixels") == NULL))
		fail_msg("%s: %d \"%s\"", name, err, e->text);
}

static void check_case(const json_t *fact)
{
	const char *name = json_string_value(json_object_get(fact, "file"));
	const char *bad = json_string_value(json_object_get(fact, "error"));
	const char *hash = json_string_value(json_object_get(fact, "sha256"));
	const json_t *size = json_object_get(fact, "size");
	struct fs_image im = {0};
	struct fs_image_info info = {0};
	struct fs_errbuf e = {{0}};
	size_t n;
	uint8_t *bytes = read_case(name, &n);
	int err = fs_image_decode(bytes, n, NULL, NULL, &im, &e);

	if (bad != NULL) {
		check_refused(name, bad, err, &e);
		free(bytes);
		return;
	}
	if (err != FS_OK)
		fail_msg("%s: %s", name, e.text);
	assert_int_equal(fs_image_probe(bytes, n, NULL, &info, &e), FS_OK);
	free(bytes);
	if (im.width != json_integer_value(json_array_get(size, 0)) ||
	        im.height != json_integer_value(json_array_get(size, 1)))
		fail_msg("%s: %d x %d", name, im.width, im.height);
	if (info.width != im.width || info.height != im.height)
		fail_msg("%s: probed as %d x %d, decoded as %d x %d", name, info.width, info.height, im.width,
		        im.height);
	assert_int_equal(info.orientation, json_integer_value(json_object_get(fact, "orientation")));
	if (hash != NULL)
		check_hash(name, hash, &im);
	check_pixels(name, fact, &im,
	        hash != NULL ? 0 : (int)json_integer_value(json_object_get(fact, "tolerance")));
	check_mean(name, fact, &im);
	fs_image_finish(&im);
}

static void decodes_every_case(void **state)
{
	json_t *facts = json_load_file(data_path("data/cases", "expected.json"), 0, NULL), *fact;
	size_t i;

	assert_true(json_array_size(facts) > 60);
	json_array_foreach(facts, i, fact)
	{
		const char *name = json_string_value(json_object_get(fact, "file"));

		if (strstr(name, ".ppm") == NULL)
			check_case(fact);
	}
	json_decref(facts);
}

static int largest_difference(const struct fs_image *a, const struct fs_image *b)
{
	int most = 0;

	assert_int_equal(a->width, b->width);
	assert_int_equal(a->height, b->height);
	for (size_t i = 0; i < (size_t)a->width * (size_t)a->height * 3; i++)
		most = FS_MAX(most, abs(a->rgb[i] - b->rgb[i]));
	return most;
}

/* A picture stored in any of the eight orientations is the same picture. */
static void turns_all_orientations(void **state)
{
	struct fs_image plain = decode_case("plain.jpg");

	for (int i = 1; i <= 8; i++) {
		char name[16];
		struct fs_image im;

		snprintf(name, sizeof(name), "exif%d.jpg", i);
		im = decode_case(name);
		assert_in_range(largest_difference(&im, &plain), 0, 4);
		fs_image_finish(&im);
	}
	fs_image_finish(&plain);
}

/* ---- refusals ---- */

static void refuses_truncation_anywhere(void **state)
{
	static const char *const names[] = {"plain.jpg", "progressive.jpg", "restart.jpg", "cmyk.jpg",
	        "rgba.png", "rgb_adam7.png", "palette4.png", "lossy.webp", "lossless.webp",
	        "alpha_lossy.webp", "plain.gif", "interlaced.gif"};

	for (size_t k = 0; k < FS_ARRAY_LEN(names); k++) {
		size_t n;
		uint8_t *bytes = read_case(names[k], &n);
		size_t keep = strstr(names[k], ".png") != NULL
		                      ? 12
		                      : 2; /* IEND, EOI and terminators hold no pixels */

		for (size_t cut = 0; cut + keep < n; cut += cut < 700 ? 1 : 17) {
			struct fs_image im = {0};
			struct fs_errbuf e;
			uint8_t *part = malloc(cut + (cut == 0));
			int err;

			memcpy(part, bytes, cut);
			err = fs_image_decode(part, cut, NULL, NULL, &im, &e);
			if (err != FS_EFORMAT)
				fail_msg("%s cut at %zu of %zu: %d", names[k], cut, n, err);
			assert_null(im.rgb);
			free(part);
		}
		free(bytes);
	}
}

/* Whatever flipped bytes do, nothing outside the buffers is touched: the sanitizers watch. */
static void survives_flipped_bytes(void **state)
{
	static const char *const names[] = {"exif6.jpg", "progressive2.jpg", "cmyk.jpg", "palette_trns.png",
	        "rgba16_adam7.png", "alpha_lossless.webp", "exif8.webp", "offset.gif", "interlaced.gif"};
	const struct fs_image_limits small = {.max_pixels = 100000};

	for (size_t k = 0; k < FS_ARRAY_LEN(names); k++) {
		size_t n;
		uint8_t *bytes = read_case(names[k], &n);

		for (size_t i = 0; i < n; i += i < 400 ? 1 : 7) {
			struct fs_image im = {0};
			uint8_t was = bytes[i];

			bytes[i] ^= (uint8_t)(1u << (i % 8) | 0x10);
			if (fs_image_decode(bytes, n, &small, NULL, &im, NULL) == FS_OK)
				fs_image_finish(&im);
			bytes[i] = was;
		}
		free(bytes);
	}
}

static long peak_kb(void)
{
	char line[256];
	long kb = -1;
	FILE *f = fopen("/proc/self/status", "r");

	assert_non_null(f);
	while (kb < 0 && fgets(line, sizeof(line), f))
		if (strncmp(line, "VmHWM:", 6) == 0)
			kb = strtol(line + 6, NULL, 10);
	fclose(f);
	assert_true(kb > 0);
	return kb;
}

/* The most memory that was ever resident is what is resident now. */
static long forget_peak_kb(void)
{
	FILE *f = fopen("/proc/self/clear_refs", "w");

	assert_non_null(f);
	assert_true(fputs("5", f) >= 0);
	assert_int_equal(fclose(f), 0);
	return peak_kb();
}

static void limits_come_before_memory(void **state)
{
	struct fs_image_limits lim = {.max_pixels = 64 * 48 - 1};
	struct fs_image im = {0};
	struct fs_errbuf e;
	size_t n;
	uint8_t *bytes = read_case("plain.png", &n);

	assert_int_equal(fs_image_decode(bytes, n, &lim, NULL, &im, &e), FS_ELIMIT);
	assert_non_null(strstr(e.text, "64 x 48"));
	assert_non_null(strstr(e.text, "3071"));
	lim = (struct fs_image_limits){.max_side = 63};
	assert_int_equal(fs_image_probe(bytes, n, &lim, &(struct fs_image_info){0}, &e), FS_ELIMIT);
	assert_non_null(strstr(e.text, "at most 63"));
	lim = (struct fs_image_limits){.max_bytes = n - 1};
	assert_int_equal(fs_image_decode(bytes, n, &lim, NULL, &im, &e), FS_ELIMIT);
	assert_non_null(strstr(e.text, "bytes"));
	free(bytes);

	/* pixels, and comments in front of the pixels, that unpack to a thousand times their size */
	static const char *const bombs[] = {"bomb_20000.png", "bomb_text.png"};
	for (size_t i = 0; i < FS_ARRAY_LEN(bombs); i++) {
		bytes = read_case(bombs[i], &n);
		long before = forget_peak_kb();
		assert_int_equal(fs_image_decode(bytes, n, NULL, NULL, &im, &e), FS_ELIMIT);
		assert_int_equal(fs_image_probe(bytes, n, NULL, &(struct fs_image_info){0}, &e), FS_ELIMIT);
		assert_true(peak_kb() - before < 4 * 1024);
		free(bytes);
	}
}

/* A small file whose header claims 65500 x 65500. */
static void refuses_a_lying_jpeg_header(void **state)
{
	struct fs_image im = {0};
	struct fs_errbuf e;
	size_t n, i;
	uint8_t *bytes = read_case("plain.jpg", &n);

	for (i = 0; i + 9 < n && !(bytes[i] == 0xff && bytes[i + 1] == 0xc0); i++)
		;
	assert_true(i + 9 < n);
	memcpy(bytes + i + 5, "\xff\xdc\xff\xdc", 4);
	assert_int_equal(fs_image_decode(bytes, n, NULL, NULL, &im, &e), FS_ELIMIT);
	free(bytes);
}

static void names_what_it_cannot_read(void **state)
{
	struct fs_image_info info;
	struct fs_errbuf e;

	assert_int_equal(fs_image_probe("", 0, NULL, &info, &e), FS_EFORMAT);
	assert_int_equal(fs_image_probe("BM000000000000", 14, NULL, &info, &e), FS_EFORMAT);
	assert_non_null(strstr(e.text, "BMP"));
	assert_non_null(strstr(e.text, "JPEG, PNG, WebP and GIF"));
	assert_int_equal(fs_image_probe("hello, world", 12, NULL, &info, &e), FS_EFORMAT);
	assert_non_null(strstr(e.text, "JPEG, PNG, WebP and GIF"));
	assert_int_equal(fs_image_probe("\xff\xd8\xff", 3, NULL, &info, &e), FS_EFORMAT);
	assert_non_null(strstr(e.text, "could not decode the JPEG"));
}

static void cancels(void **state)
{
	static const char *const names[] = {
	        "plain.jpg", "progressive.jpg", "plain.png", "rgb_adam7.png", "lossy.webp", "plain.gif"};
	struct fs_cancel *c = fs_cancel_create(FS_NEVER);
	struct fs_image im = {0}, plain = decode_case("plain.png");

	fs_cancel_fire(c, FS_CANCEL_CLIENT);
	for (size_t i = 0; i < FS_ARRAY_LEN(names); i++) {
		size_t n;
		uint8_t *bytes = read_case(names[i], &n);

		assert_int_equal(fs_image_decode(bytes, n, NULL, c, &im, NULL), FS_ECANCELLED);
		free(bytes);
	}
	assert_int_equal(
	        fs_image_resize_cancellable(&plain, 10, 10, FS_BICUBIC, c, &im, NULL), FS_ECANCELLED);
	fs_image_finish(&plain);
	fs_cancel_unref(c);
}

/* ---- resizing ---- */

static struct fs_image golden_image(const struct fs_gguf *g, const char *name)
{
	const struct fs_gguf_tensor *t = NULL;
	struct fs_errbuf e;
	struct fs_image im = {0};
	size_t n;
	float *f;

	if (fs_gguf_need(g, name, 3, 0, &t, &e) != FS_OK)
		fail_msg("%s", e.text);
	im.width = (int)t->ne[1];
	im.height = (int)t->ne[2];
	n = (size_t)im.width * (size_t)im.height * 3;
	f = malloc(n * sizeof(*f));
	im.rgb = malloc(n);
	fs_dequantize_row(t->type, t->data, f, (int64_t)n);
	for (size_t i = 0; i < n; i++)
		im.rgb[i] = (uint8_t)f[i];
	free(f);
	return im;
}

static void check_resize(const struct fs_gguf *g, const char *name)
{
	static const char *const filters[] = {
	        [FS_BILINEAR] = "bilinear", [FS_BICUBIC] = "bicubic", [FS_LANCZOS] = "lanczos"};
	char source[32], filter[32], src_name[48];
	struct fs_image src, want, got = {0};
	int w, h, f = 0;

	assert_int_equal(sscanf(name, "%31[^.].%31[^.].%dx%d", source, filter, &w, &h), 4);
	while (strcmp(filters[f], filter) != 0)
		f++;
	snprintf(src_name, sizeof(src_name), "%s.src", source);
	src = golden_image(g, src_name);
	want = golden_image(g, name);
	assert_int_equal(fs_image_resize(&src, w, h, (enum fs_filter)f, &got, NULL), FS_OK);
	if (largest_difference(&want, &got) != 0)
		fail_msg("%s: differs from Pillow by up to %d", name, largest_difference(&want, &got));
	fs_image_finish(&src);
	fs_image_finish(&want);
	fs_image_finish(&got);
}

static void resizes_as_pillow_does(void **state)
{
	struct fs_gguf *g;
	struct fs_gguf_strs it;
	struct fs_errbuf e;
	const char *s;
	size_t n, cases = 0;

	if (fs_gguf_open(&g, data_path("parity", "resize.gguf"), &e) != FS_OK)
		fail_msg("%s", e.text);
	assert_int_equal(fs_gguf_arr_strs(g, "parity.cases", &it, &e), FS_OK);
	for (; fs_gguf_strs_next(&it, &s, &n); cases++) {
		char name[64];

		snprintf(name, sizeof(name), "%.*s", (int)n, s);
		check_resize(g, name);
	}
	assert_true(cases >= 30);
	fs_gguf_close(g);
}

static void refuses_impossible_sizes(void **state)
{
	struct fs_image plain = decode_case("plain.png"), im = {0};

	assert_int_equal(fs_image_resize(&plain, 0, 5, FS_BICUBIC, &im, NULL), FS_EINVAL);
	assert_int_equal(fs_image_resize(&plain, 5, -1, FS_BICUBIC, &im, NULL), FS_EINVAL);
	assert_int_equal(fs_image_resize(&plain, 70000, 5, FS_BICUBIC, &im, NULL), FS_EINVAL);
	fs_image_finish(&plain);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
	        cmocka_unit_test(limits_come_before_memory), /* first: it looks at the peak of memory */
	        cmocka_unit_test(decodes_every_case),
	        cmocka_unit_test(turns_all_orientations),
	        cmocka_unit_test(refuses_truncation_anywhere),
	        cmocka_unit_test(survives_flipped_bytes),
	        cmocka_unit_test(refuses_a_lying_jpeg_header),
	        cmocka_unit_test(names_what_it_cannot_read),
	        cmocka_unit_test(cancels),
	        cmocka_unit_test(resizes_as_pillow_does),
	        cmocka_unit_test(refuses_impossible_sizes),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
