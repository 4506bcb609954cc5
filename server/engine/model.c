/*
 * model: loads a text model's weights onto a device, every shape checked against the hyperparameters. Runs on
 * the device's thread. Fused attn_qkv tensors are split into views by rows, so the graph knows one form only.
 * What it will take of a device's memory is counted by the same walk. It refuses files that lack a tensor.
 */
#include "server/engine/model.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct loader { /* the first failure sticks */
	struct fs_model *m;
	struct fs_dev *dev;
	struct fs_errbuf *e;
	int err;
	bool count; /* nothing is loaded: */
	uint64_t bytes;
	char name[64];
};

static void take_weight(struct loader *l, const struct fs_gguf_tensor *t, struct fs_weight *w)
{
	if (l->count)
		l->bytes += fs_weight_bytes(l->dev, t, false);
	else
		l->err = fs_weight_load(l->dev, t, false, w, l->e);
}

static void take_vector(struct loader *l, const struct fs_gguf_tensor *t, float **out)
{
	if (l->count)
		l->bytes += fs_vector_bytes(l->dev, t);
	else
		l->err = fs_vector_load(l->dev, t, out, l->e);
}

static const char *layer_name(struct loader *l, int layer, const char *what)
{
	snprintf(l->name, sizeof(l->name), "blk.%d.%s", layer, what);
	return l->name;
}

static void load_weight(struct loader *l, const char *name, int64_t in, int64_t out, struct fs_weight *w)
{
	const struct fs_gguf_tensor *t;

	if (l->err == FS_OK)
		l->err = fs_gguf_need(l->m->gguf, name, in, out, &t, l->e);
	if (l->err == FS_OK)
		take_weight(l, t, w);
}

static void load_vector(struct loader *l, const char *name, int64_t n, bool required, float **out)
{
	const struct fs_gguf_tensor *t;

	if (l->err != FS_OK || (!required && !fs_gguf_has_tensor(l->m->gguf, name)))
		return;
	l->err = fs_gguf_need(l->m->gguf, name, n, 1, &t, l->e);
	if (l->err == FS_OK)
		take_vector(l, t, out);
}

static void load_fused_bias(struct loader *l, int layer, struct fs_layer *y, int64_t nq, int64_t nkv)
{
	const struct fs_gguf_tensor *t;
	const char *name = layer_name(l, layer, "attn_qkv.bias");
	float **const to[3] = {&y->q_bias, &y->k_bias, &y->v_bias};
	int64_t first = 0;

	if (l->err != FS_OK || !fs_gguf_has_tensor(l->m->gguf, name))
		return;
	l->err = fs_gguf_need(l->m->gguf, name, nq + 2 * nkv, 1, &t, l->e);
	if (l->err == FS_OK && fs_dtype_row_bytes(t->type, 1) == 0)
		l->err = fs_fail(l->e, FS_ENOTSUP, "%s is quantised", name);
	for (int i = 0; i < 3 && l->err == FS_OK; i++) {
		int64_t n = i == 0 ? nq : nkv;
		struct fs_gguf_tensor v = fs_gguf_part(t, 0, first, n);
		take_vector(l, &v, to[i]);
		first += n;
	}
}

static void load_fused_qkv(struct loader *l, int layer, struct fs_layer *y, int64_t nq, int64_t nkv)
{
	const struct fs_gguf_tensor *t;
	struct fs_weight *const to[3] = {&y->q, &y->k, &y->v};
	int64_t first = 0;

	if (l->err == FS_OK)
		l->err = fs_gguf_need(l->m->gguf, layer_name(l, layer, "attn_qkv.weight"), l->m->hp.n_embd,
		        nq + 2 * nkv, &t, l->e);
	for (int i = 0; i < 3 && l->err == FS_OK; i++) {
		int64_t n = i == 0 ? nq : nkv;
		struct fs_gguf_tensor v = fs_gguf_part(t, 1, first, n);
		take_weight(l, &v, to[i]);
		first += n;
	}
	load_fused_bias(l, layer, y, nq, nkv);
}

static void load_attention(struct loader *l, int i, struct fs_layer *y)
{
	const struct fs_hparams *hp = &l->m->hp;
	int64_t nq = (int64_t)hp->heads * hp->head_dim, nkv = (int64_t)hp->kv_heads * hp->head_dim;

	load_vector(l, layer_name(l, i, "attn_norm.weight"), hp->n_embd, true, &y->attn_norm);
	if (fs_gguf_has_tensor(l->m->gguf, layer_name(l, i, "attn_qkv.weight"))) {
		load_fused_qkv(l, i, y, nq, nkv);
	} else {
		load_weight(l, layer_name(l, i, "attn_q.weight"), hp->n_embd, nq, &y->q);
		load_weight(l, layer_name(l, i, "attn_k.weight"), hp->n_embd, nkv, &y->k);
		load_weight(l, layer_name(l, i, "attn_v.weight"), hp->n_embd, nkv, &y->v);
		load_vector(l, layer_name(l, i, "attn_q.bias"), nq, false, &y->q_bias);
		load_vector(l, layer_name(l, i, "attn_k.bias"), nkv, false, &y->k_bias);
		load_vector(l, layer_name(l, i, "attn_v.bias"), nkv, false, &y->v_bias);
	}
	if (hp->arch == FS_ARCH_QWEN3) {
		load_vector(l, layer_name(l, i, "attn_q_norm.weight"), hp->head_dim, true, &y->q_norm);
		load_vector(l, layer_name(l, i, "attn_k_norm.weight"), hp->head_dim, true, &y->k_norm);
	}
	load_weight(l, layer_name(l, i, "attn_output.weight"), nq, hp->n_embd, &y->o);
	load_vector(l, layer_name(l, i, "attn_output.bias"), hp->n_embd, false, &y->o_bias);
}

static void load_ffn(struct loader *l, int i, struct fs_layer *y)
{
	const struct fs_hparams *hp = &l->m->hp;

	load_vector(l, layer_name(l, i, "ffn_norm.weight"), hp->n_embd, true, &y->ffn_norm);
	load_weight(l, layer_name(l, i, "ffn_gate.weight"), hp->n_embd, hp->n_ff, &y->gate);
	load_weight(l, layer_name(l, i, "ffn_up.weight"), hp->n_embd, hp->n_ff, &y->up);
	load_weight(l, layer_name(l, i, "ffn_down.weight"), hp->n_ff, hp->n_embd, &y->down);
	load_vector(l, layer_name(l, i, "ffn_gate.bias"), hp->n_ff, false, &y->gate_bias);
	load_vector(l, layer_name(l, i, "ffn_up.bias"), hp->n_ff, false, &y->up_bias);
	load_vector(l, layer_name(l, i, "ffn_down.bias"), hp->n_embd, false, &y->down_bias);
}

static void load_all(struct loader *l)
{
	struct fs_model *m = l->m;

	load_weight(l, "token_embd.weight", m->hp.n_embd, m->hp.n_vocab, &m->tok_embd);
	load_vector(l, "output_norm.weight", m->hp.n_embd, true, &m->out_norm);
	m->tied = !fs_gguf_has_tensor(m->gguf, "output.weight");
	if (!m->tied)
		load_weight(l, "output.weight", m->hp.n_embd, m->hp.n_vocab, &m->output);
	load_vector(l, "output.bias", m->hp.n_vocab, false, &m->out_bias);
	for (int i = 0; i < m->hp.n_layer && l->err == FS_OK; i++) {
		load_attention(l, i, &m->layers[i]);
		load_ffn(l, i, &m->layers[i]);
	}
}

int fs_model_open(struct fs_model *m, const char *path, struct fs_errbuf *e)
{
	int err;

	memset(m, 0, sizeof(*m));
	err = fs_gguf_open(&m->gguf, path, e);
	if (err != FS_OK)
		return err;
	err = fs_hparams_read(m->gguf, &m->hp, &m->rope, e);
	if (err == FS_OK) {
		m->layers = calloc((size_t)m->hp.n_layer, sizeof(*m->layers));
		if (m->layers == NULL)
			err = fs_fail(e, FS_ENOMEM, "no memory for %d layers", m->hp.n_layer);
	}
	if (err != FS_OK) {
		fs_model_finish(m);
		return fs_fail_prefix(e, err, "%s", path);
	}
	return FS_OK;
}

int fs_model_bytes(struct fs_model *m, struct fs_dev *dev, uint64_t *out, struct fs_errbuf *e)
{
	struct loader l = {.m = m, .dev = dev, .e = e, .count = true};

	load_all(&l);
	if (l.err == FS_OK)
		*out = l.bytes;
	return l.err;
}

int fs_model_load(struct fs_model *m, struct fs_dev *dev, struct fs_errbuf *e)
{
	struct loader l = {.m = m, .dev = dev, .e = e};

	FS_ASSERT(m->dev == NULL);
	m->dev = dev;
	load_all(&l);
	if (l.err == FS_OK)
		l.err = fs_dev_sync(dev, e);
	if (l.err != FS_OK)
		fs_model_unload(m);
	return l.err;
}

static void finish_layer(struct fs_dev *d, struct fs_layer *y)
{
	struct fs_weight *const weights[] = {&y->q, &y->k, &y->v, &y->o, &y->gate, &y->up, &y->down};
	float *const vectors[] = {y->attn_norm, y->ffn_norm, y->q_bias, y->k_bias, y->v_bias, y->o_bias,
	        y->q_norm, y->k_norm, y->gate_bias, y->up_bias, y->down_bias};

	for (size_t i = 0; i < FS_ARRAY_LEN(weights); i++)
		fs_weight_finish(d, weights[i]);
	for (size_t i = 0; i < FS_ARRAY_LEN(vectors); i++)
		fs_dev_free(d, vectors[i]);
	memset(y, 0, sizeof(*y));
}

void fs_model_unload(struct fs_model *m)
{
	if (m->dev == NULL)
		return;
	for (int i = 0; i < m->hp.n_layer; i++)
		finish_layer(m->dev, &m->layers[i]);
	fs_weight_finish(m->dev, &m->tok_embd);
	fs_weight_finish(m->dev, &m->output);
	fs_dev_free(m->dev, m->out_norm);
	fs_dev_free(m->dev, m->out_bias);
	m->out_norm = m->out_bias = NULL;
	m->dev = NULL;
}

void fs_model_finish(struct fs_model *m)
{
	fs_model_unload(m);
	free(m->layers);
	fs_gguf_close(m->gguf);
	memset(m, 0, sizeof(*m));
}
