/*
 * hparams: reads and checks a text model's hyperparameters and builds its rotary embedding. Pure functions
 * over an open GGUF. It refuses what the graph would compute wrongly: unknown architectures, mixtures of
 * experts, per-layer widths, YaRN and other rope scalings than linear, keys and values of different widths.
 */
#include "server/engine/model.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

static const struct arch_row {
	const char *name;
	enum fs_arch arch;
	bool interleaved; /* rope pairs (2p, 2p+1) */
	bool mrope;
} archs[] = {
        {"llama", FS_ARCH_LLAMA, true, false},
        {"qwen2", FS_ARCH_QWEN2, false, false},
        {"qwen2vl", FS_ARCH_QWEN2VL, false, true},
        {"qwen3", FS_ARCH_QWEN3, false, false},
};

/* Bounds on what a file may ask for; well above any published model of these architectures. */
#define MAX_LAYERS 512
#define MAX_WIDTH (1 << 18)
#define MAX_VOCAB (1 << 22)

static const struct arch_row *find_arch(const char *s, size_t n)
{
	for (size_t i = 0; i < FS_ARRAY_LEN(archs); i++)
		if (strlen(archs[i].name) == n && memcmp(archs[i].name, s, n) == 0)
			return &archs[i];
	return NULL;
}

static int unknown_arch(const char *s, size_t n, struct fs_errbuf *e)
{
	char known[128] = "";

	for (size_t i = 0; i < FS_ARRAY_LEN(archs); i++) {
		size_t at = strlen(known);
		snprintf(known + at, sizeof(known) - at, "%s%s", i == 0 ? "" : ", ", archs[i].name);
	}
	if (n == 4 && memcmp(s, "clip", 4) == 0)
		return fs_fail(
		        e, FS_ENOTSUP, "this is an image encoder (architecture \"clip\"), not a text model");
	return fs_fail(e, FS_ENOTSUP, "the model's architecture \"%.*s\" is not supported; known are: %s",
	        (int)FS_MIN(n, 64), s, known);
}

struct reader { /* "<arch>.<name>" keys; the first failure sticks */
	const struct fs_gguf *g;
	const char *arch;
	struct fs_errbuf *e;
	int err;
	char key[96];
};

static const char *key_of(struct reader *r, const char *name)
{
	snprintf(r->key, sizeof(r->key), "%s.%s", r->arch, name);
	return r->key;
}

static bool has(struct reader *r, const char *name)
{
	return fs_gguf_has(r->g, key_of(r, name));
}

/* A positive integer up to max. Required when def is 0. */
static int32_t read_int(struct reader *r, const char *name, int32_t def, int32_t max)
{
	uint32_t v = 0;

	if (r->err != FS_OK || (def > 0 && !has(r, name)))
		return def;
	r->err = fs_gguf_u32(r->g, key_of(r, name), &v, r->e);
	if (r->err != FS_OK)
		return def;
	if (v < 1 || v > (uint32_t)max) {
		r->err = fs_fail(r->e, FS_EFORMAT, "%s is %u; it must be 1 to %d", r->key, v, max);
		return def;
	}
	return (int32_t)v;
}

static float read_f32(struct reader *r, const char *name, const float *def)
{
	float v = 0;

	if (r->err != FS_OK || (def != NULL && !has(r, name)))
		return def != NULL ? *def : 0;
	r->err = fs_gguf_f32(r->g, key_of(r, name), &v, r->e);
	if (r->err == FS_OK && !isfinite(v))
		r->err = fs_fail(r->e, FS_EFORMAT, "%s is not a finite number", r->key);
	return v;
}

/* What multiplies every angle: 1 / factor of linear scaling. */
static float read_freq_scale(struct reader *r)
{
	static const float zero;
	const char *type = "linear";
	size_t n = strlen(type);
	float factor;

	if (r->err == FS_OK && has(r, "rope.scaling.type"))
		r->err = fs_gguf_str(r->g, key_of(r, "rope.scaling.type"), &type, &n, r->e);
	if (r->err != FS_OK || (n == 4 && memcmp(type, "none", 4) == 0))
		return 1;
	if (n != 6 || memcmp(type, "linear", 6) != 0) {
		r->err = fs_fail(r->e, FS_ENOTSUP,
		        "rope scaling \"%.*s\" is not supported; known are: none, linear", (int)FS_MIN(n, 32),
		        type);
		return 1;
	}
	factor = read_f32(
	        r, has(r, "rope.scaling.factor") ? "rope.scaling.factor" : "rope.scale_linear", &zero);
	if (factor < 0)
		r->err = fs_fail(r->e, FS_EFORMAT, "%s is negative", r->key);
	return factor == 0 ? 1 : 1 / factor;
}

/* M-RoPE: sections count pairs of the axes t, h, w and a fourth that is always 0 here. */
static void read_sections(struct reader *r, struct fs_rope *rope)
{
	int32_t s[4] = {0};
	size_t n = 0;
	int64_t sum;

	if (r->err != FS_OK)
		return;
	r->err = fs_gguf_arr_len(r->g, key_of(r, "rope.dimension_sections"), &n, r->e);
	if (r->err == FS_OK && (n < 3 || n > 4))
		r->err = fs_fail(r->e, FS_EFORMAT, "%s has %zu numbers; it must have 4", r->key, n);
	if (r->err == FS_OK)
		r->err = fs_gguf_arr_i32(r->g, r->key, s, n, r->e);
	if (r->err != FS_OK)
		return;
	for (int i = 0; i < 4; i++)
		if (s[i] < 0 || s[i] > rope->n_pairs)
			r->err = fs_fail(r->e, FS_EFORMAT, "%s holds %d with %d rotary pairs", r->key, s[i],
			        rope->n_pairs);
	sum = (int64_t)s[0] + s[1] + s[2] + s[3];
	if (r->err == FS_OK && sum == 0)
		r->err = fs_fail(r->e, FS_EFORMAT, "%s is all zero", r->key);
	if (r->err != FS_OK)
		return;
	rope->n_axes = 4;
	for (int p = 0; p < rope->n_pairs; p++) {
		int64_t sector = p % sum;
		rope->axis[p] = sector < s[0]                 ? 0
		                : sector < s[0] + s[1]        ? 1
		                : sector < s[0] + s[1] + s[2] ? 2
		                                              : 3;
	}
}

/* Llama 3's long-context divisors, one a pair. */
static void apply_rope_freqs(struct reader *r, struct fs_rope *rope)
{
	const struct fs_gguf_tensor *t;
	const float *div;

	if (r->err != FS_OK || !fs_gguf_has_tensor(r->g, "rope_freqs.weight"))
		return;
	r->err = fs_gguf_need(r->g, "rope_freqs.weight", rope->n_pairs, 1, &t, r->e);
	if (r->err == FS_OK && t->type != FS_F32)
		r->err = fs_fail(r->e, FS_EFORMAT, "rope_freqs.weight must be F32");
	if (r->err != FS_OK)
		return;
	div = t->data;
	for (int p = 0; p < rope->n_pairs; p++) {
		if (!isfinite(div[p]) || div[p] <= 0) {
			r->err = fs_fail(
			        r->e, FS_EFORMAT, "rope_freqs.weight[%d] is not a positive number", p);
			return;
		}
		rope->freq[p] /= div[p];
	}
}

static void read_rope(
        struct reader *r, const struct arch_row *a, const struct fs_hparams *hp, struct fs_rope *rope)
{
	static const float base_default = 10000;
	int32_t n_rot = read_int(r, "rope.dimension_count", hp->head_dim, 1 << 16);
	float base = read_f32(r, "rope.freq_base", &base_default), scale = read_freq_scale(r);

	if (r->err != FS_OK)
		return;
	if (n_rot % 2 != 0 || n_rot > hp->head_dim || n_rot / 2 > (int)FS_ARRAY_LEN(rope->freq)) {
		r->err = fs_fail(r->e, FS_EFORMAT, "%s.rope.dimension_count is %d with heads of %d", r->arch,
		        n_rot, hp->head_dim);
		return;
	}
	if (base <= 0) {
		r->err = fs_fail(r->e, FS_EFORMAT, "%s.rope.freq_base is not positive", r->arch);
		return;
	}
	memset(rope, 0, sizeof(*rope));
	rope->n_pairs = n_rot / 2;
	rope->interleaved = a->interleaved;
	rope->n_axes = 1;
	for (int p = 0; p < rope->n_pairs; p++)
		rope->freq[p] = scale * (float)pow((double)base, -2.0 * p / n_rot);
	if (a->mrope)
		read_sections(r, rope);
	apply_rope_freqs(r, rope);
}

static void refuse_variants(struct reader *r)
{
	static const char *const not_here[] = {"expert_count", "expert_used_count"};

	for (size_t i = 0; i < FS_ARRAY_LEN(not_here) && r->err == FS_OK; i++) {
		uint32_t v = 0;
		if (has(r, not_here[i]))
			r->err = fs_gguf_u32(r->g, key_of(r, not_here[i]), &v, r->e);
		if (r->err == FS_OK && v > 0)
			r->err = fs_fail(r->e, FS_ENOTSUP, "mixtures of experts are not supported (%s is %u)",
			        r->key, v);
	}
}

static void read_heads(struct reader *r, struct fs_hparams *hp)
{
	static const float zero;
	int32_t v_dim;

	hp->heads = read_int(r, "attention.head_count", 0, 4096);
	hp->kv_heads = read_int(r, "attention.head_count_kv", hp->heads, 4096);
	if (r->err != FS_OK)
		return;
	if (hp->heads % hp->kv_heads != 0)
		r->err = fs_fail(r->e, FS_EFORMAT, "%d heads can not share %d key-value heads", hp->heads,
		        hp->kv_heads);
	else if (hp->n_embd % hp->heads != 0 && !has(r, "attention.key_length"))
		r->err = fs_fail(
		        r->e, FS_EFORMAT, "%d heads do not divide a width of %d", hp->heads, hp->n_embd);
	hp->head_dim = read_int(r, "attention.key_length", hp->n_embd / hp->heads, 1024);
	v_dim = read_int(r, "attention.value_length", hp->head_dim, 1024);
	if (r->err == FS_OK && v_dim != hp->head_dim)
		r->err = fs_fail(r->e, FS_ENOTSUP,
		        "keys of %d and values of %d are not supported: they must be as wide", hp->head_dim,
		        v_dim);
	if (r->err == FS_OK && (hp->head_dim % 4 != 0 || hp->head_dim > 256))
		r->err = fs_fail(r->e, FS_ENOTSUP,
		        "heads of %d are not supported: a multiple of 4 up to 256 is", hp->head_dim);
	hp->attn_scale = read_f32(r, "attention.scale", &zero);
	if (hp->attn_scale == 0)
		hp->attn_scale = (float)(1.0 / sqrt((double)FS_MAX(hp->head_dim, 1)));
}

static void read_vocab(struct reader *r, struct fs_hparams *hp)
{
	const struct fs_gguf_tensor *t = NULL;

	if (r->err != FS_OK)
		return;
	r->err = fs_gguf_need(r->g, "token_embd.weight", hp->n_embd, 0, &t, r->e);
	if (r->err != FS_OK)
		return;
	if (t->ne[1] < 1 || t->ne[1] > MAX_VOCAB)
		r->err = fs_fail(r->e, FS_EFORMAT, "token_embd.weight has %lld rows", (long long)t->ne[1]);
	else
		hp->n_vocab = (int32_t)t->ne[1];
}

int fs_hparams_read(const struct fs_gguf *g, struct fs_hparams *hp, struct fs_rope *rope, struct fs_errbuf *e)
{
	struct reader r = {.g = g, .e = e};
	const struct arch_row *a;
	const char *name;
	size_t n;
	int err = fs_gguf_str(g, "general.architecture", &name, &n, e);

	if (err != FS_OK)
		return err;
	a = find_arch(name, n);
	if (a == NULL)
		return unknown_arch(name, n, e);
	r.arch = a->name;
	memset(hp, 0, sizeof(*hp));
	hp->arch = a->arch;
	hp->arch_name = a->name;
	hp->mrope = a->mrope;
	refuse_variants(&r);
	hp->n_embd = read_int(&r, "embedding_length", 0, MAX_WIDTH);
	hp->n_layer = read_int(&r, "block_count", 0, MAX_LAYERS);
	hp->n_ff = read_int(&r, "feed_forward_length", 0, MAX_WIDTH * 8);
	hp->n_ctx_train = read_int(&r, "context_length", 0, INT32_MAX);
	hp->rms_eps = read_f32(&r, "attention.layer_norm_rms_epsilon", NULL);
	read_heads(&r, hp);
	read_vocab(&r, hp);
	read_rope(&r, a, hp, rope);
	return r.err;
}
