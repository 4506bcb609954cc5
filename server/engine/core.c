/*
 * core: brings the engine's parts up and down, on the engine's thread. It refuses contexts and chunks out of
 * range, and a tokenizer that has more tokens than the model has embeddings.
 */
#include "server/engine/core.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define DEFAULT_CONTEXT 8192
#define MAX_PIECE 65536

static int choose_context(struct fs_core *c, const struct fs_engine_opts *o, struct fs_errbuf *e)
{
	int32_t train = c->model.hp.n_ctx_train;

	if (o->context < 0 || o->context == 1)
		return fs_fail(e, FS_EINVAL,
		        "context is %d; it must be at least 2 (0 = chosen from the model)", o->context);
	c->n_ctx = o->context > 0 ? o->context : FS_MIN(train, DEFAULT_CONTEXT);
	if (c->n_ctx > train)
		fs_warn("the context of %d is longer than the %d that the model was trained with", c->n_ctx,
		        train);
	return FS_OK;
}

static int load_text(struct fs_core *c, const struct fs_engine_opts *o, struct fs_errbuf *e)
{
	int err = fs_tok_create(c->model.gguf, &c->tok, e);

	if (err == FS_OK && fs_tok_info(c->tok)->n_vocab > c->model.hp.n_vocab)
		err = fs_fail(e, FS_EFORMAT, "the tokenizer has %d tokens, the model %d embeddings",
		        fs_tok_info(c->tok)->n_vocab, c->model.hp.n_vocab);
	if (err == FS_OK)
		err = fs_chat_create(c->model.gguf, c->tok, o->chat_template, &c->chat, e);
	if (err != FS_OK)
		return fs_fail_prefix(e, err, "%s", o->model);
	return FS_OK;
}

static int keep_opts(struct fs_core *c, const struct fs_engine_opts *o, struct fs_errbuf *e)
{
	const char *device = o->device != NULL ? o->device : "auto";

	if (o->prefill_chunk > FS_CORE_MAX_CHUNK)
		return fs_fail(
		        e, FS_EINVAL, "prefill_chunk is %d; at most %d", o->prefill_chunk, FS_CORE_MAX_CHUNK);
	if (snprintf(c->device, sizeof(c->device), "%s", device) >= (int)sizeof(c->device))
		return fs_fail(
		        e, FS_EINVAL, "device \"%.40s\" is not one of auto, cpu, cuda, cuda:N", device);
	c->threads = o->threads;
	c->chunk = FS_MAX(o->prefill_chunk, 0);
	c->exact = o->exact;
	return FS_OK;
}

static int alloc_host(struct fs_core *c, struct fs_errbuf *e)
{
	int32_t n_vocab = c->model.hp.n_vocab;
	int err = fs_sampler_init(&c->sampler, n_vocab, c->n_ctx, e);

	if (err != FS_OK)
		return err;
	c->logits = calloc((size_t)FS_CORE_LOGITS * (size_t)n_vocab, sizeof(float));
	return c->logits != NULL ? FS_OK : fs_fail(e, FS_ENOMEM, "no memory for logits");
}

int fs_core_init(struct fs_core *c, const struct fs_engine_opts *o, struct fs_errbuf *e)
{
	int err;

	memset(c, 0, sizeof(*c));
	fs_buf_init(&c->piece, MAX_PIECE);
	err = keep_opts(c, o, e);
	if (err == FS_OK)
		err = fs_model_open(&c->model, o->model, e);
	if (err == FS_OK)
		err = choose_context(c, o, e);
	if (err == FS_OK && !o->ids_only)
		err = load_text(c, o, e);
	if (err == FS_OK)
		err = alloc_host(c, e);
	if (err == FS_OK) {
		err = fs_core_place(c, c->device, e);
		if (err != FS_OK && err != FS_EUNAVAILABLE && err != FS_ENOTSUP)
			fs_fail_prefix(e, err, "%s", o->model);
	}
	if (err != FS_OK)
		fs_core_finish(c);
	return err;
}

void fs_core_finish(struct fs_core *c)
{
	free(c->logits);
	fs_sampler_finish(&c->sampler);
	fs_core_displace(c);
	fs_chat_destroy(c->chat);
	fs_tok_destroy(c->tok);
	fs_model_finish(&c->model);
	fs_buf_finish(&c->piece);
	memset(c, 0, sizeof(*c));
}
