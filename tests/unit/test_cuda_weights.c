/*
 * Packed weights: every type at odd sizes comes back as the reference's numbers, bit by bit in f32 and
 * rounded once in 16 bits; packed in pieces as in one; and as embeddings.
 */
#include "cuda_util.h"

static const int64_t lengths[] = {1, 7, 8, 24, 32, 96, 100, 256, 288, 512, 1280};

static void check_rows(const struct weight *w, int64_t first, int64_t n)
{
	size_t count = (size_t)(n * w->in);
	float *f = device_memory(count * 4);
	uint16_t *h = device_memory(count * 2), *b = device_memory(count * 2);
	const float *want = w->numbers + first * w->in;

	assert_int_equal(fs_cuk_dequantize(NULL, w->type, w->packed, first, n, w->in, w->out, FS_F32, f), 0);
	assert_int_equal(fs_cuk_dequantize(NULL, w->type, w->packed, first, n, w->in, w->out, FS_F16, h), 0);
	assert_int_equal(fs_cuk_dequantize(NULL, w->type, w->packed, first, n, w->in, w->out, FS_BF16, b), 0);
	for (size_t i = 0; i < count; i++)
		if (memcmp(&f[i], &want[i], 4) != 0 || h[i] != fs_f32_to_f16(want[i]) ||
		        b[i] != fs_f32_to_bf16(want[i]))
			fail_msg("%s in %d, number %zu: %.9g %04x %04x, want %.9g %04x %04x",
			        fs_dtype_info((int)w->type)->name, (int)w->in, i, (double)f[i], h[i], b[i],
			        (double)want[i], fs_f32_to_f16(want[i]), fs_f32_to_bf16(want[i]));
	free(f);
	free(h);
	free(b);
}

static void each(void (*check)(enum fs_dtype type, int64_t in))
{
	for (size_t t = 0; t < FS_ARRAY_LEN(all_types); t++)
		for (size_t i = 0; i < FS_ARRAY_LEN(lengths); i++)
			if (lengths[i] % fs_dtype_info((int)all_types[t])->block_elems == 0)
				check(all_types[t], lengths[i]);
}

static void round_trip(enum fs_dtype type, int64_t in)
{
	struct weight w = weight_make(type, in, 5);

	check_rows(&w, 0, 5);
	check_rows(&w, 3, 1);
	assert_int_equal(fs_cuk_dequantize(NULL, type, w.packed, 1, 0, in, 5, FS_F32, NULL), 0);
	assert_int_not_equal(fs_cuk_dequantize(NULL, type, w.packed, 1, 5, in, 5, FS_F32, NULL), 0);
	weight_drop(&w);
}

static void test_round_trip(void **state)
{
	each(round_trip);
}

/* Rows in pieces, as a loader brings them, at addresses of no alignment. */
static void in_pieces(enum fs_dtype type, int64_t in)
{
	struct weight w = weight_make(type, in, 7);
	size_t row = fs_dtype_row_bytes(type, in);
	uint8_t *copy = device_memory(w.packed_bytes), *piece = need(3 * row + 2);

	for (int64_t first = 0; first < 7; first += 3) {
		int64_t n = FS_MIN(3, 7 - first);
		size_t shift = type == FS_F32 ? 0 : 2;

		memcpy(piece + shift, w.file + (size_t)first * row, (size_t)n * row);
		assert_int_equal(fs_cuk_pack(NULL, type, piece + shift, first, n, copy, in, 7), 0);
	}
	assert_memory_equal(copy, w.packed, w.packed_bytes);
	assert_int_not_equal(fs_cuk_pack(NULL, type, piece, 5, 3, copy, in, 7), 0);
	free(copy);
	free(piece);
	weight_drop(&w);
}

static void test_in_pieces(void **state)
{
	each(in_pieces);
}

static void embed(enum fs_dtype type, int64_t in)
{
	static const int32_t ids[] = {4, 0, 4, 8, 1};
	struct weight w = weight_make(type, in, 9);
	float *y = device_memory((size_t)(5 * in) * 4);

	assert_int_equal(fs_cuk_embed(NULL, type, w.packed, in, 9, ids, y, 5), 0);
	for (int r = 0; r < 5; r++)
		assert_memory_equal(y + r * in, w.numbers + ids[r] * in, (size_t)in * 4);
	free(y);
	weight_drop(&w);
}

static void test_embed(void **state)
{
	each(embed);
}

/* At the lengths of real rows packing takes no more than a fiftieth above the file. */
static void test_bytes(void **state)
{
	static const int64_t real[] = {896, 1536, 3584, 4096, 11008, 18944};

	for (size_t t = 0; t < FS_ARRAY_LEN(all_types); t++) {
		for (size_t i = 0; i < FS_ARRAY_LEN(real); i++) {
			size_t file = fs_dtype_row_bytes(all_types[t], real[i]);
			size_t packed = fs_cuk_packed_bytes(all_types[t], real[i], 1);

			if (file == 0)
				continue;
			assert_int_equal(packed % 16, 0);
			assert_true(packed >= file && packed - file <= file / 50);
		}
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
	        cmocka_unit_test(test_round_trip),
	        cmocka_unit_test(test_in_pieces),
	        cmocka_unit_test(test_embed),
	        cmocka_unit_test(test_bytes),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
