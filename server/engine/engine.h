/*
 * engine: a text model from GGUF, its tokenizer, chat template, KV cache and sampler. Exposes sessions of
 * text, no tensors.
 *
 * Threads: the engine's own thread owns model, device and KV cache. Everything but fs_engine_generate is
 * read-only and may be called from any thread; fs_engine_generate blocks its caller while the engine's thread
 * works, one call at a time in the order of arrival. Lifetime: prompts hold references to their rows and do
 * not refer to the messages they were made from.
 */
#ifndef FS_SERVER_ENGINE_H
#define FS_SERVER_ENGINE_H

#include "server/rows/rows.h"

struct fs_engine;

struct fs_engine_opts {
	const char *model;         /* path of a GGUF, or of a split model's first part */
	const char *device;        /* as fs_dev_opts */
	int threads;               /* 0 = all cores */
	int32_t context;           /* KV cells; 0 = the smaller of the model's and 8192 */
	const char *chat_template; /* NULL = recognised from the file; else "chatml" | "llama3" | "mistral" |
	                              "gemma" | "vicuna" */
	int32_t prefill_chunk;     /* tokens between two looks at the cancel token; 0 = 256, on a GPU 1024 */
	int retry_ms;  /* pause before the second try to bring back a lost device, doubled each time;
	                  0 = 1000 */
	bool exact;    /* f32 products, for parity tests */
	bool ids_only; /* no tokenizer, no chat template: prompts from ids, no text events; tests, benches */
};
struct fs_engine_info {
	const char *arch, *name; /* general.architecture, general.name (or file name) */
	int32_t n_ctx, n_ctx_train, n_embd, n_vocab, n_layer;
	bool takes_rows;           /* the architecture places picture rows (qwen2vl) */
	bool takes_tools;          /* the chat template has a known form for tools (chatml) */
	const char *template_name; /* "chatml" … */
	const char *device;        /* fs_dev_describe, at the start: see fs_engine_health */
	uint64_t weight_bytes, kv_bytes;
};
/* Errors name the file and what is wrong: unknown architecture, tokenizer or chat template (the text names
 * the config key that helps). */
int fs_engine_create(const struct fs_engine_opts *o, struct fs_engine **out, struct fs_errbuf *e);
void fs_engine_destroy(struct fs_engine *en); /* NULL is fine; no call may be running */
const struct fs_engine_info *fs_engine_info(const struct fs_engine *en);

/* ---- health ---- */

enum fs_engine_state {
	FS_ENGINE_READY,
	FS_ENGINE_RELOADING, /* the device was lost; the model is loaded anew, calls are refused meanwhile */
	FS_ENGINE_FAILED,    /* it could not be brought back: for good */
};
struct fs_engine_health {
	enum fs_engine_state state;
	char device[128];  /* fs_dev_describe of the one that it runs on, or ran on last */
	char cause[256];   /* how it was lost the last time; "" = never */
	int losses;        /* since the start */
	int retry_after_s; /* RELOADING: about how long it takes */
};
/* Any thread. */
void fs_engine_health(struct fs_engine *en, struct fs_engine_health *out);
/* For users; "" when ready. Static. */
const char *fs_engine_state_text(enum fs_engine_state state);

/* ---- prompts ---- */

enum fs_role { FS_ROLE_SYSTEM, FS_ROLE_USER, FS_ROLE_ASSISTANT, FS_ROLE_TOOL };
struct fs_part {          /* text, or a picture's rows: one of them */
	const char *text; /* UTF-8 of text_len bytes; control tokens inside are plain text */
	size_t text_len;
	struct fs_rows *rows; /* not NULL: a picture; the prompt takes its own reference */
};
struct fs_tool_call {
	const char *name;
	const char *arguments; /* JSON text, an object; "" or NULL = {} */
};
struct fs_message {
	enum fs_role role;
	const struct fs_part *parts;
	size_t n_parts;
	const struct fs_tool_call *calls; /* of an assistant's message, behind its parts */
	size_t n_calls;
};
struct fs_tool {
	const char *name;
	const char *description; /* NULL = none */
	const char *parameters;  /* JSON Schema as JSON text, an object; NULL = none */
};
enum fs_tool_choice {
	FS_TOOLS_AUTO,     /* the model decides */
	FS_TOOLS_NONE,     /* the tools are left out of the prompt */
	FS_TOOLS_REQUIRED, /* the answer is opened with the beginning of a call: see fs_prompt_opening */
	FS_TOOLS_NAMED,    /* the same, of the tool `named` */
};
struct fs_chat_extras { /* all zero: as fs_prompt_from_chat */
	const struct fs_tool *tools;
	size_t n_tools;
	enum fs_tool_choice choice;
	const char *named;        /* for FS_TOOLS_NAMED: the name of one of the tools */
	struct fs_cancel *cancel; /* when it fires: FS_ECANCELLED, soon; NULL = none */
};
struct fs_prompt;
/* Renders the messages through the model's template, ends with the opening of the assistant's turn.
 * FS_EINVAL: a role or a picture that this template or model can not take, rows of another width than n_embd.
 * FS_ELIMIT: several times longer than the context; such a text is not taken apart to its end.
 */
int fs_prompt_from_chat(struct fs_engine *en, const struct fs_message *msgs, size_t n, struct fs_prompt **out,
        struct fs_errbuf *e);
/*
 * The same with tools, in the form that Qwen2.5 and the Hermes models are trained on. x may be NULL. Texts of
 * errors begin with the member at fault ("tools[1].parameters: …", "messages[3].tool_calls[0]: …").
 * FS_ENOTSUP: tools, or a message with calls, and a template that has no form for them. Nothing of x or msgs
 * is kept.
 */
int fs_prompt_from_chat_ex(struct fs_engine *en, const struct fs_message *msgs, size_t n,
        const struct fs_chat_extras *x, struct fs_prompt **out, struct fs_errbuf *e);
/* What the assistant's turn was opened with beyond the template's own opening: the beginning of a call that
 * the caller required. It belongs in front of the generated text, for fs_tool_parser_push. Owned by p; "" as
 * a rule. */
const char *fs_prompt_opening(const struct fs_prompt *p);
/* Plain text, BOS added when the model wants it; control tokens written in it are plain text. FS_EINVAL: no
 * text. FS_ELIMIT: as fs_prompt_from_chat. FS_ECANCELLED: cancel (may be NULL) fired. */
int fs_prompt_from_text(struct fs_engine *en, const char *text, size_t len, struct fs_cancel *cancel,
        struct fs_prompt **out, struct fs_errbuf *e);
/* Token ids as they are; -1 marks the next of rows[] (n_rows of them; from outside: NULL and 0). FS_EINVAL:
 * an id out of the vocabulary, no ids. */
int fs_prompt_from_ids(struct fs_engine *en, const int32_t *ids, size_t n, struct fs_rows *const *rows,
        size_t n_rows, struct fs_prompt **out, struct fs_errbuf *e);
void fs_prompt_destroy(struct fs_prompt *p);
/* KV cells that it takes: tokens and rows. */
int32_t fs_prompt_cells(const struct fs_prompt *p);

/* ---- generation ---- */

#define FS_MAX_STOPS 16
#define FS_MAX_TOP_LOGPROBS 20
struct fs_gen_params {
	float temperature;    /* 0 = greedy */
	int32_t top_k;        /* 0 = off */
	float top_p;          /* 1 = off */
	float min_p;          /* 0 = off */
	float repeat_penalty; /* 1 = off; over the last repeat_last_n tokens */
	float presence_penalty, frequency_penalty;
	int32_t repeat_last_n; /* 64 */
	uint64_t seed;         /* used when has_seed, else random */
	bool has_seed;
	int32_t max_tokens;              /* <= 0: what fits */
	const char *stops[FS_MAX_STOPS]; /* stop strings, not put out; matched across tokens */
	size_t n_stops;
	bool ignore_eos;        /* goes on behind the model's own end, to max_tokens; for benches and tests */
	bool logprobs;          /* token events are wanted */
	int32_t n_top_logprobs; /* with that: the most likely tokens of each event, 0..FS_MAX_TOP_LOGPROBS */
};
void fs_gen_params_default(
        struct fs_gen_params *p); /* temperature 0.8, top_k 40, top_p 0.95, min_p 0.05, no penalties */

enum fs_finish { FS_FINISH_STOP, FS_FINISH_LENGTH, FS_FINISH_CANCEL, FS_FINISH_ERROR };

struct fs_token_prob {
	int32_t id;
	float logprob; /* natural logarithm, of the model's own distribution over the whole vocabulary: before
	                  penalties, temperature and filters. At least FS_LOGPROB_MIN. */
	const char *bytes; /* n_bytes, maybe a part of a character; for control tokens their name */
	size_t n_bytes;
	bool control; /* bytes are no part of the text */
};
#define FS_LOGPROB_MIN (-9999.0f)
struct fs_token_event { /* valid during the call */
	struct fs_token_prob chosen;
	const struct fs_token_prob *top; /* the most likely first; chosen need not be among them */
	size_t n_top;
};

/* Called on the engine's thread; must not block for long. Any may be NULL. */
struct fs_gen_events {
	void *arg;
	void (*progress)(void *arg, int32_t done, int32_t total); /* prompt cells, reused ones included */
	void (*text)(void *arg, const char *utf8,
	        size_t n); /* whole UTF-8 characters; held back while a stop string may be starting */
	void (*logits)(void *arg, const float *logits,
	        int32_t n_vocab); /* before sampling each token; for tests and benches */
	void (*step)(void *arg);  /* each sampled token, before anything of it comes out */
	/* With params.logprobs: each token of the answer, right before the first text that holds some of it.
	   A token that ends the answer, or that lies in a stop string, has no event. */
	void (*token)(void *arg, const struct fs_token_event *t);
};
struct fs_gen_result {
	enum fs_finish finish;
	int32_t prompt_tokens, reused_tokens, completion_tokens;
	int64_t prefill_ns, decode_ns;
	const char *stop; /* the stop string that ended it (one of params.stops), or NULL */
};
/*
 * FS_OK with finish stop, length or cancel (the token fired: whatever text came before is valid). FS_EINVAL:
 * the prompt does not fit; the text says N tokens, the context and what to do. FS_EINTERNAL: the device
 * failed. FS_EUNAVAILABLE: it is lost, and being brought back or not; the text says which. result is filled
 * as far as known in any case.
 */
int fs_engine_generate(struct fs_engine *en, const struct fs_prompt *p, const struct fs_gen_params *params,
        struct fs_cancel *cancel, const struct fs_gen_events *ev, struct fs_gen_result *result,
        struct fs_errbuf *e);

/* Logits of every prompt position, [cells][n_vocab], without sampling and without the cache; for parity
 * tests. */
int fs_engine_logits(struct fs_engine *en, const struct fs_prompt *p, float *out, struct fs_errbuf *e);

/* ---- calls of tools in the answer ---- */

/*
 * Finds <tool_call>{"name": …, "arguments": {…}}</tool_call> in text that comes in pieces. One thread at a
 * time; it needs no engine. What may be the beginning of a mark is held back; white space around calls is
 * dropped. What stands between the marks and is no such call (not JSON, no name, arguments that are no
 * object, more than FS_TOOL_CALL_MAX bytes) comes out as text, marks included; so does a call that the end
 * cuts short, unless it is whole but for its closing mark.
 */
#define FS_TOOL_CALL_MAX ((size_t)1 << 20)
struct fs_tool_events {
	void *arg;
	void (*text)(void *arg, const char *utf8, size_t n);
	/* arguments: JSON text of an object. Both are valid during the call. */
	void (*call)(void *arg, const char *name, const char *arguments);
};
struct fs_tool_parser;
/* ev is copied. NULL when memory is out. */
struct fs_tool_parser *fs_tool_parser_create(const struct fs_tool_events *ev);
void fs_tool_parser_destroy(struct fs_tool_parser *t);                         /* NULL is fine */
int fs_tool_parser_push(struct fs_tool_parser *t, const char *utf8, size_t n); /* FS_ENOMEM */
/* The end of the answer: puts out what was held. */
int fs_tool_parser_end(struct fs_tool_parser *t);

#endif
