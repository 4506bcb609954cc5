/*
 * Loading: hyperparameters, rotary tables and weights from files made by hand, each with one thing in it that
 * is unusual or wrong. What a file means is worked out here from the format's description; fused and separate
 * q, k, v are two spellings of one model.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "tests/unit/gguf_make.h"
#include "tests/unit/text_golden.h"

#include <unistd.h>

enum { E = 8, HEADS = 2, KV = 1, HD = 4, FF = 12, VOCAB = 16 };

/* One model; fields change one thing each. */
struct tiny {
	const char *arch;
	const char *skip, *shape; /* a tensor that is missing, one with a row too many */
	const char *deep;         /* one with a third dimension, of 2 */
	const char *unreadable;   /* one of a type that nobody knows */
	const char *skip_key;
	uint32_t heads, kv_heads, experts, key_length, value_length, rot;
	const char *scaling;
	float factor;
	bool sections, fused, tied, rope_freqs;
	int32_t sections_sum;
};

static void put_matrix(struct gguf_make *m, const struct tiny *t, const char *name, int64_t in, int64_t out,
        const float *data)
{
	int64_t ne[3] = {in, out + (t->shape != NULL && strcmp(t->shape, name) == 0), 2};

	if (t->deep != NULL && strcmp(t->deep, name) == 0)
		gm_tensor(m, name, FS_F32, ne, 3, data, (size_t)(2 * ne[0] * ne[1]) * sizeof(float));
	else if (t->unreadable != NULL && strcmp(t->unreadable, name) == 0)
		gm_table_entry(m, name, 16, ne, out > 1 ? 2 : 1, 0);
	else if (t->skip == NULL || strcmp(t->skip, name) != 0)
		gm_tensor(
		        m, name, FS_F32, ne, out > 1 ? 2 : 1, data, (size_t)(ne[0] * ne[1]) * sizeof(float));
}

static void put_keys(struct gguf_make *m, const struct tiny *t)
{
	const struct {
		const char *name;
		uint32_t v;
	} ints[] = {{"embedding_length", E}, {"block_count", 1}, {"feed_forward_length", FF},
	        {"context_length", 32}, {"attention.head_count", t->heads ? t->heads : HEADS},
	        {"attention.head_count_kv", t->kv_heads ? t->kv_heads : KV}, {"expert_count", t->experts},
	        {"attention.key_length", t->key_length}, {"attention.value_length", t->value_length},
	        {"rope.dimension_count", t->rot}};
	char key[96];

	gm_str(m, "general.architecture", t->arch);
	for (size_t i = 0; i < FS_ARRAY_LEN(ints); i++) {
		snprintf(key, sizeof(key), "%s.%s", t->arch, ints[i].name);
		if (ints[i].v > 0 && (t->skip_key == NULL || strcmp(t->skip_key, ints[i].name) != 0))
			gm_u32(m, key, ints[i].v);
	}
	snprintf(key, sizeof(key), "%s.attention.layer_norm_rms_epsilon", t->arch);
	gm_f32(m, key, 1e-5f);
	snprintf(key, sizeof(key), "%s.rope.freq_base", t->arch);
	gm_f32(m, key, 100);
	if (t->scaling != NULL) {
		snprintf(key, sizeof(key), "%s.rope.scaling.type", t->arch);
		gm_str(m, key, t->scaling);
		snprintf(key, sizeof(key), "%s.rope.scaling.factor", t->arch);
		gm_f32(m, key, t->factor);
	}
	if (t->sections) {
		const int32_t s[4] = {t->sections_sum, 0, 0, 0};
		snprintf(key, sizeof(key), "%s.rope.dimension_sections", t->arch);
		gm_arr(m, key, 5, s, 4, 4);
	}
}

static void put_tensors(struct gguf_make *m, const struct tiny *t)
{
	static float w[4096];
	static const float div[HD / 2] = {1, 8};
	uint32_t x = 1;

	for (size_t i = 0; i < FS_ARRAY_LEN(w); i++) {
		x = x * 1664525u + 1013904223u;
		w[i] = (float)(x >> 8) / (float)(1 << 23) - 1;
	}
	put_matrix(m, t, "token_embd.weight", E, VOCAB, w);
	put_matrix(m, t, "output_norm.weight", E, 1, w + 10);
	if (!t->tied)
		put_matrix(m, t, "output.weight", E, VOCAB, w + 200);
	put_matrix(m, t, "blk.0.attn_norm.weight", E, 1, w + 20);
	put_matrix(m, t, "blk.0.ffn_norm.weight", E, 1, w + 30);
	const float *qkv = w + 1000, *bias = w + 500;
	if (t->fused) {
		put_matrix(m, t, "blk.0.attn_qkv.weight", E, (HEADS + 2 * KV) * HD, qkv);
		put_matrix(m, t, "blk.0.attn_qkv.bias", (HEADS + 2 * KV) * HD, 1, bias);
	} else {
		put_matrix(m, t, "blk.0.attn_q.weight", E, HEADS * HD, qkv);
		put_matrix(m, t, "blk.0.attn_k.weight", E, KV * HD, qkv + E * HEADS * HD);
		put_matrix(m, t, "blk.0.attn_v.weight", E, KV * HD, qkv + E * (HEADS + KV) * HD);
		put_matrix(m, t, "blk.0.attn_q.bias", HEADS * HD, 1, bias);
		put_matrix(m, t, "blk.0.attn_k.bias", KV * HD, 1, bias + HEADS * HD);
		put_matrix(m, t, "blk.0.attn_v.bias", KV * HD, 1, bias + (HEADS + KV) * HD);
	}
	put_matrix(m, t, "blk.0.attn_output.weight", HEADS * HD, E, w + 1500);
	put_matrix(m, t, "blk.0.ffn_gate.weight", E, FF, w + 1600);
	put_matrix(m, t, "blk.0.ffn_up.weight", E, FF, w + 1700);
	put_matrix(m, t, "blk.0.ffn_down.weight", FF, E, w + 1800);
	if (t->rope_freqs)
		put_matrix(m, t, "rope_freqs.weight", HD / 2, 1, div);
}

static char path[] = "/tmp/fs-test-model-XXXXXX";

static void write_model(const struct tiny *t)
{
	struct gguf_make m;

	gm_init(&m);
	put_keys(&m, t);
	put_tensors(&m, t);
	gm_build(&m);
	gm_write(path, m.file.data, m.file.len);
	gm_finish(&m);
}

static int create(const struct tiny *t, struct fs_engine **en, struct fs_errbuf *e)
{
	struct fs_engine_opts o = {
	        .model = path, .device = "cpu", .threads = 1, .exact = true, .ids_only = true};

	write_model(t);
	return fs_engine_create(&o, en, e);
}

static void logits_of(const struct tiny *t, float out[4][VOCAB])
{
	static const int32_t ids[4] = {3, 1, 4, 1};
	struct fs_engine *en = NULL;
	struct fs_errbuf e = {""};
	struct fs_prompt *p;

	if (create(t, &en, &e) != FS_OK)
		fail_msg("%s", e.text);
	p = tg_prompt(en, ids, 4);
	assert_int_equal(fs_engine_logits(en, p, out[0], NULL), FS_OK);
	fs_prompt_destroy(p);
	fs_engine_destroy(en);
}

static void fused_qkv(void **state)
{
	float a[4][VOCAB], b[4][VOCAB];

	logits_of(&(struct tiny){.arch = "qwen2"}, a);
	logits_of(&(struct tiny){.arch = "qwen2", .fused = true}, b);
	assert_memory_equal(a, b, sizeof(a));
	assert_true(isfinite(a[3][0]) && a[3][0] != a[2][0]);
}

static void tied_output(void **state)
{
	float a[4][VOCAB], b[4][VOCAB];

	logits_of(&(struct tiny){.arch = "qwen2"}, a);
	logits_of(&(struct tiny){.arch = "qwen2", .tied = true}, b);
	assert_memory_not_equal(a, b, sizeof(a));
}

/* With all pairs on the time axis M-RoPE of text is plain rope. */
static void mrope_of_text(void **state)
{
	float a[4][VOCAB], b[4][VOCAB];

	logits_of(&(struct tiny){.arch = "qwen2"}, a);
	logits_of(&(struct tiny){.arch = "qwen2vl", .sections = true, .sections_sum = 2}, b);
	assert_memory_equal(a, b, sizeof(a));
}

/* base 100, 2 pairs: frequencies 1 and 1/10. */
static void rope_tables(void **state)
{
	static const struct {
		struct tiny t;
		float f0, f1;
		bool interleaved;
	} cases[] = {
	        {{.arch = "llama"}, 1, 0.1f, true},
	        {{.arch = "qwen2"}, 1, 0.1f, false},
	        {{.arch = "llama", .rope_freqs = true}, 1, 0.0125f, true},
	        {{.arch = "llama", .scaling = "linear", .factor = 4}, 0.25f, 0.025f, true},
	        {{.arch = "llama", .scaling = "none", .factor = 4}, 1, 0.1f, true},
	        {{.arch = "qwen2", .scaling = "linear", .factor = 0}, 1, 0.1f, false},
	};

	for (size_t i = 0; i < FS_ARRAY_LEN(cases); i++) {
		struct fs_gguf *g = NULL;
		struct fs_hparams hp;
		struct fs_rope r;
		write_model(&cases[i].t);
		assert_int_equal(fs_gguf_open(&g, path, NULL), FS_OK);
		assert_int_equal(fs_hparams_read(g, &hp, &r, NULL), FS_OK);
		assert_int_equal(r.n_pairs, 2);
		assert_int_equal(r.interleaved, cases[i].interleaved);
		assert_float_equal(r.freq[0], cases[i].f0, 1e-7f);
		assert_float_equal(r.freq[1], cases[i].f1, 1e-7f);
		assert_float_equal(hp.attn_scale, 0.5f, 0);
		fs_gguf_close(g);
	}
}

static void refused(void **state)
{
	static const struct {
		struct tiny t;
		int err;
		const char *text;
	} cases[] = {
	        {{.arch = "mamba"}, FS_ENOTSUP, "llama, qwen2, qwen2vl, qwen3"},
	        {{.arch = "clip"}, FS_ENOTSUP, "image encoder"},
	        {{.arch = "llama", .experts = 8}, FS_ENOTSUP, "experts"},
	        {{.arch = "llama", .scaling = "yarn", .factor = 2}, FS_ENOTSUP, "yarn"},
	        {{.arch = "llama", .scaling = "linear", .factor = -2}, FS_EFORMAT, "negative"},
	        {{.arch = "qwen2", .skip = "blk.0.ffn_up.weight"}, FS_ENOTFOUND, "blk.0.ffn_up.weight"},
	        {{.arch = "qwen2", .skip = "token_embd.weight"}, FS_ENOTFOUND, "token_embd.weight"},
	        /* what may be absent must not pass for it */
	        {{.arch = "qwen2", .unreadable = "output.weight"}, FS_ENOTSUP, "output.weight has type 16"},
	        {{.arch = "qwen2", .unreadable = "blk.0.attn_k.bias"}, FS_ENOTSUP, "attn_k.bias has type 16"},
	        {{.arch = "qwen2", .fused = true, .unreadable = "blk.0.attn_qkv.bias"}, FS_ENOTSUP,
	                "attn_qkv.bias has type 16"},
	        {{.arch = "llama", .rope_freqs = true, .unreadable = "rope_freqs.weight"}, FS_ENOTSUP,
	                "rope_freqs.weight has type 16"},
	        {{.arch = "qwen3"}, FS_ENOTFOUND, "attn_q_norm"},
	        {{.arch = "qwen2", .shape = "blk.0.attn_k.weight"}, FS_EFORMAT, "blk.0.attn_k.weight"},
	        {{.arch = "qwen2", .shape = "blk.0.attn_qkv.weight", .fused = true}, FS_EFORMAT,
	                "blk.0.attn_qkv.weight"},
	        {{.arch = "qwen2", .shape = "output.weight"}, FS_EFORMAT, "output.weight"},
	        /* sizes that are known are those of the first two dimensions */
	        {{.arch = "qwen2", .deep = "blk.0.ffn_gate.weight"}, FS_EFORMAT,
	                "ffn_gate.weight has 8 x 12 x 2"},
	        {{.arch = "qwen2", .deep = "output.weight"}, FS_EFORMAT, "output.weight has 8 x 16 x 2"},
	        {{.arch = "qwen2", .deep = "blk.0.attn_k.bias"}, FS_EFORMAT, "attn_k.bias has 4 x 1 x 2"},
	        {{.arch = "qwen2", .skip_key = "context_length"}, FS_ENOTFOUND, "qwen2.context_length"},
	        {{.arch = "qwen2", .skip_key = "embedding_length"}, FS_ENOTFOUND, "qwen2.embedding_length"},
	        {{.arch = "qwen2", .heads = 3, .kv_heads = 2}, FS_EFORMAT, "3 heads"},
	        {{.arch = "qwen2", .heads = 3, .kv_heads = 3}, FS_EFORMAT, "3 heads"},
	        {{.arch = "qwen2", .key_length = 6}, FS_ENOTSUP, "heads of 6"},
	        {{.arch = "qwen2", .value_length = 8}, FS_ENOTSUP, "values of 8"},
	        {{.arch = "qwen2", .rot = 6}, FS_EFORMAT, "rope.dimension_count"},
	        {{.arch = "qwen2", .rot = 3}, FS_EFORMAT, "rope.dimension_count"},
	        {{.arch = "qwen2vl"}, FS_ENOTFOUND, "rope.dimension_sections"},
	        {{.arch = "qwen2vl", .sections = true}, FS_EFORMAT, "all zero"},
	        {{.arch = "qwen2vl", .sections = true, .sections_sum = -1}, FS_EFORMAT, "dimension_sections"},
	};

	for (size_t i = 0; i < FS_ARRAY_LEN(cases); i++) {
		struct fs_engine *en = NULL;
		struct fs_errbuf e = {""};
		int err = create(&cases[i].t, &en, &e);
		if (err != cases[i].err || strstr(e.text, cases[i].text) == NULL ||
		        strstr(e.text, path) == NULL)
			fail_msg("case %zu: %s \"%s\", expected %s with \"%s\" and the path", i,
			        fs_err_name(err), e.text, fs_err_name(cases[i].err), cases[i].text);
	}
}

static void options(void **state)
{
	const struct tiny t = {.arch = "qwen2"};
	struct fs_engine_opts o = {.model = path, .device = "cpu", .threads = 1, .ids_only = true};
	struct fs_engine *en = NULL;
	struct fs_errbuf e = {""};

	write_model(&t);
	o.context = 1;
	assert_int_equal(fs_engine_create(&o, &en, &e), FS_EINVAL);
	o.context = 0;
	o.prefill_chunk = 1 << 20;
	assert_int_equal(fs_engine_create(&o, &en, &e), FS_EINVAL);
	o.prefill_chunk = 0;
	o.device = "abacus";
	assert_int_equal(fs_engine_create(&o, &en, &e), FS_EINVAL);
	o.device = "cpu";
	o.model = "/nonexistent/model.gguf";
	assert_int_not_equal(fs_engine_create(&o, &en, &e), FS_OK);
	assert_non_null(strstr(e.text, "/nonexistent/model.gguf"));
	o.model = path;
	o.ids_only = false; /* the file has no tokenizer */
	assert_int_not_equal(fs_engine_create(&o, &en, &e), FS_OK);
	assert_non_null(strstr(e.text, path));
	o.ids_only = true;
	assert_int_equal(fs_engine_create(&o, &en, &e), FS_OK);
	assert_int_equal(fs_engine_info(en)->n_ctx, 32); /* the model's own */
	assert_string_equal(fs_engine_info(en)->arch, "qwen2");
	assert_int_equal(fs_engine_info(en)->kv_bytes, 2 * 32 * KV * HD * 2);
	assert_false(fs_engine_info(en)->takes_rows);
	fs_engine_destroy(en);
	fs_engine_destroy(NULL);
}

static int make_file(void **state)
{
	int fd = mkstemp(path);

	return fd < 0 ? -1 : close(fd);
}

static int drop_file(void **state)
{
	return unlink(path);
}

int main(void)
{
	const struct CMUnitTest tests[] = {cmocka_unit_test(fused_qkv), cmocka_unit_test(tied_output),
	        cmocka_unit_test(mrope_of_text), cmocka_unit_test(rope_tables), cmocka_unit_test(refused),
	        cmocka_unit_test(options)};

	return cmocka_run_group_tests(tests, make_file, drop_file);
}
