/*
 * The tower's hyper-parameters from the mmproj's metadata. Stateless. Refuses other projectors by name and
 * sizes that do not go together, so that the graph can trust every number.
 */
#include "remote/encoder/tower.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#define PROJECTOR "qwen2vl_merger"
/* The published preprocessing's defaults, for files that do not tell. */
#define DEFAULT_MIN_PIXELS ((int64_t)56 * 56)
#define DEFAULT_MAX_PIXELS ((int64_t)28 * 28 * 1280)
#define MAX_FF 131072

static int check_projector(const struct fs_gguf *g, struct fs_errbuf *e)
{
	const char *s = NULL;
	size_t n = 0;
	bool vision = true;
	int err;

	if (fs_gguf_has(g, "clip.has_vision_encoder")) {
		err = fs_gguf_bool(g, "clip.has_vision_encoder", &vision, e);
		if (err != FS_OK)
			return err;
	}
	if (!vision)
		return fs_fail(e, FS_ENOTSUP, "it holds no vision encoder");
	if (fs_gguf_has(g, "clip.vision.projector_type"))
		err = fs_gguf_str(g, "clip.vision.projector_type", &s, &n, e);
	else
		err = fs_gguf_str(g, "clip.projector_type", &s, &n, e);
	if (err != FS_OK)
		return fs_fail_prefix(e, err, "it is no mmproj file");
	if (n != strlen(PROJECTOR) || memcmp(s, PROJECTOR, n) != 0)
		return fs_fail(e, FS_ENOTSUP, "its projector is %.*s; this encoder reads " PROJECTOR,
		        (int)FS_MIN(n, (size_t)64), s);
	return FS_OK;
}

/* A size within 1..max. */
static int get_size(const struct fs_gguf *g, const char *name, int max, int *out, struct fs_errbuf *e)
{
	char key[96];
	uint32_t v = 0;
	int err;

	snprintf(key, sizeof(key), "clip.vision.%s", name);
	err = fs_gguf_u32(g, key, &v, e);
	if (err != FS_OK)
		return err;
	if (v < 1 || v > (uint32_t)max)
		return fs_fail(e, FS_EFORMAT, "key %s is %u; 1 to %d can be", key, v, max);
	*out = (int)v;
	return FS_OK;
}

static int get_pixels(
        const struct fs_gguf *g, const char *key, int64_t def, int64_t *out, struct fs_errbuf *e)
{
	uint32_t v = 0;
	int err;

	*out = def;
	if (!fs_gguf_has(g, key))
		return FS_OK;
	err = fs_gguf_u32(g, key, &v, e);
	if (err == FS_OK && v == 0)
		err = fs_fail(e, FS_EFORMAT, "key %s is 0", key);
	if (err == FS_OK)
		*out = v;
	return err;
}

static int read_sizes(const struct fs_gguf *g, struct vision_hparams *h, struct fs_errbuf *e)
{
	const struct {
		const char *name;
		int max;
		int *out;
	} sizes[] = {
	        {"embedding_length", 16384, &h->n_embd},
	        {"attention.head_count", 1024, &h->n_heads},
	        {"block_count", 1024, &h->n_layers},
	        {"patch_size", 64, &h->patch},
	};
	int err = FS_OK;

	for (size_t i = 0; i < FS_ARRAY_LEN(sizes) && err == FS_OK; i++)
		err = get_size(g, sizes[i].name, sizes[i].max, sizes[i].out, e);
	h->merge = 2;
	if (err == FS_OK && fs_gguf_has(g, "clip.vision.spatial_merge_size"))
		err = get_size(g, "spatial_merge_size", 8, &h->merge, e);
	if (err != FS_OK)
		return err;
	h->head_dim = h->n_embd / h->n_heads;
	if (h->n_embd % h->n_heads != 0 || h->head_dim % 4 != 0 || h->head_dim > 256)
		return fs_fail(e, FS_EFORMAT, "%d heads on a width of %d cannot be", h->n_heads, h->n_embd);
	return FS_OK;
}

/* The width inside the feed-forward pair, from the first layer's shapes: the first of the two takes n_embd,
 * whatever its name. The key feed_forward_length is not asked, since no converter of Qwen2-VL writes it
 * right: older ones put 0 there, newer ones the text model's width. */
static int read_ff(const struct fs_gguf *g, struct vision_hparams *h, struct fs_errbuf *e)
{
	const struct fs_gguf_tensor *up = NULL, *down = NULL;
	int err = fs_gguf_need(g, "v.blk.0.ffn_up.weight", 0, 0, &up, e);
	int64_t n;

	if (err == FS_OK)
		err = fs_gguf_need(g, "v.blk.0.ffn_down.weight", 0, 0, &down, e);
	if (err != FS_OK)
		return err;
	n = down->ne[0] == h->n_embd ? down->ne[1] : up->ne[1];
	if (n > MAX_FF)
		return fs_fail(e, FS_EFORMAT, "the feed-forward layers have a width of %lld; 1 to %d can be",
		        (long long)n, MAX_FF);
	h->n_ff = (int)n;
	return FS_OK;
}

static int read_act(const struct fs_gguf *g, struct vision_hparams *h, struct fs_errbuf *e)
{
	bool gelu = false, silu = false;
	int err = FS_OK;

	if (fs_gguf_has(g, "clip.use_gelu"))
		err = fs_gguf_bool(g, "clip.use_gelu", &gelu, e);
	if (err == FS_OK && fs_gguf_has(g, "clip.use_silu"))
		err = fs_gguf_bool(g, "clip.use_silu", &silu, e);
	if (err == FS_OK && gelu && silu)
		err = fs_fail(e, FS_EFORMAT, "clip.use_gelu and clip.use_silu are both set");
	h->act = gelu ? FS_GELU_ERF : silu ? FS_SILU : FS_GELU_QUICK;
	return err;
}

static int read_normalisation(const struct fs_gguf *g, struct vision_hparams *h, struct fs_errbuf *e)
{
	int err = fs_gguf_arr_f32(g, "clip.vision.image_mean", h->mean, 3, e);

	if (err == FS_OK)
		err = fs_gguf_arr_f32(g, "clip.vision.image_std", h->std, 3, e);
	for (int c = 0; c < 3 && err == FS_OK; c++)
		if (!isfinite(h->mean[c]) || !isfinite(h->std[c]) || h->std[c] <= 0)
			err = fs_fail(e, FS_EFORMAT,
			        "clip.vision.image_mean or image_std holds an impossible value");
	return err;
}

int vision_hparams_read(const struct fs_gguf *g, struct vision_hparams *h, struct fs_errbuf *e)
{
	const struct fs_gguf_tensor *t = NULL;
	int err = check_projector(g, e);

	memset(h, 0, sizeof(*h));
	if (err == FS_OK)
		err = read_sizes(g, h, e);
	if (err == FS_OK)
		err = read_act(g, h, e);
	if (err == FS_OK)
		err = read_normalisation(g, h, e);
	h->eps = 1e-6f;
	if (err == FS_OK && fs_gguf_has(g, "clip.vision.attention.layer_norm_epsilon"))
		err = fs_gguf_f32(g, "clip.vision.attention.layer_norm_epsilon", &h->eps, e);
	if (err == FS_OK && !(h->eps >= 0 && h->eps < 1))
		err = fs_fail(
		        e, FS_EFORMAT, "clip.vision.attention.layer_norm_epsilon has an impossible value");
	if (err == FS_OK)
		err = get_pixels(g, "clip.vision.image_min_pixels", DEFAULT_MIN_PIXELS, &h->min_pixels, e);
	if (err == FS_OK)
		err = get_pixels(g, "clip.vision.image_max_pixels", DEFAULT_MAX_PIXELS, &h->max_pixels, e);
	if (err == FS_OK)
		err = fs_gguf_need(g, "mm.2.weight", (int64_t)h->merge * h->merge * h->n_embd, 0, &t, e);
	if (err == FS_OK && (t->ne[1] > 65536 || t->ne[2] != 1 || t->ne[3] != 1))
		err = fs_fail(e, FS_EFORMAT, "tensor mm.2.weight has an impossible shape");
	if (err != FS_OK)
		return err;
	h->n_out = (int)t->ne[1];
	return read_ff(g, h, e);
}
