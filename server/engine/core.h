/*
 * core: everything of the engine that lives on its thread: device, model, cache, graph, sampler. Internal to
 * the engine. The tokenizer and the chat renderer are immutable and are read by other threads too.
 */
#ifndef FS_ENGINE_CORE_H
#define FS_ENGINE_CORE_H

#include "server/engine/chat.h"
#include "server/engine/graph.h"
#include "server/engine/sampler.h"

#define FS_CORE_MAX_CHUNK 4096
#define FS_CORE_LOGITS 8 /* rows of logits that fs_core_logits takes at once */

struct fs_core {
	struct fs_dev *dev; /* NULL: lost, see fs_core_place */
	struct fs_model model;
	struct fs_kv kv;
	struct fs_graph graph;
	struct fs_sampler sampler;
	struct fs_tok *tok;   /* NULL when ids_only */
	struct fs_chat *chat; /* NULL when ids_only */
	float *logits;        /* [FS_CORE_LOGITS][n_vocab], host */
	struct fs_buf piece;  /* text of one token */
	int32_t n_ctx;
	/* what it is brought up with again: */
	char device[16];
	int threads;
	int32_t chunk; /* 0 = chosen by the device */
	bool exact;
	int64_t load_ns; /* that it took last time */
};

/* core is zeroed first; need not be finished on failure. */
int fs_core_init(struct fs_core *c, const struct fs_engine_opts *o, struct fs_errbuf *e);
void fs_core_finish(struct fs_core *c);

/* ---- place.c ---- */

/* Opens the device ("auto": a GPU, or the CPU with one log line that says why), sees that everything fits and
 * brings it up there: weights, KV cache (empty), graph. model and n_ctx stand. Nothing is left on failure. */
int fs_core_place(struct fs_core *c, const char *device, struct fs_errbuf *e);
/* Takes all of that down, on a lost device too. */
void fs_core_displace(struct fs_core *c);

/* As fs_engine_generate and fs_engine_logits; prompt and params were checked by fs_core_check. */
int fs_core_generate(struct fs_core *c, const struct fs_prompt *p, const struct fs_gen_params *params,
        struct fs_cancel *cancel, const struct fs_gen_events *ev, struct fs_gen_result *r,
        struct fs_errbuf *e);
int fs_core_logits(struct fs_core *c, const struct fs_prompt *p, float *out, struct fs_errbuf *e);
/* Any thread: FS_EINVAL when the prompt leaves no room for an answer. */
int fs_core_check(int32_t n_ctx, const struct fs_prompt *p, struct fs_errbuf *e);

#endif
