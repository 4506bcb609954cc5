/*
 * chat: messages to prompt, by the family of the model's chat template: "chatml", "llama3", "mistral",
 * "gemma", "vicuna". The family is recognised by the marks that tokenizer.chat_template holds, and details
 * (default system text, spaces, trimming) are read off its text; the template is not executed. Internal to
 * server/engine and its tests. Immutable once made: any thread. It refuses: templates of no known family (the
 * error names the config key "chat_template" and its values), roles and pictures that the family or the
 * vocabulary has no place for.
 */
#ifndef FS_ENGINE_CHAT_H
#define FS_ENGINE_CHAT_H

#include "server/engine/engine.h"
#include "server/engine/tokenizer.h"

struct fs_chat;

/*
 * name: a family, or NULL: recognised from g's tokenizer.chat_template, or when that key is absent from the
 * control tokens of t. t must outlive it; g may be closed. FS_EINVAL: an unknown name. FS_ENOTSUP: not
 * recognised.
 */
int fs_chat_create(const struct fs_gguf *g, const struct fs_tok *t, const char *name, struct fs_chat **out,
        struct fs_errbuf *e);
/* As above with the template's text instead of the file (NULL = absent). */
int fs_chat_create_text(const char *tmpl, size_t len, const struct fs_tok *t, const char *name,
        struct fs_chat **out, struct fs_errbuf *e);
void fs_chat_destroy(struct fs_chat *c); /* NULL is fine */
const char *fs_chat_name(const struct fs_chat *c);

/* Text, or a picture. */
static inline bool fs_part_is_picture(const struct fs_part *p)
{
	return p->rows != NULL;
}

/* Whether tools, calls and their results have a form in this family. */
bool fs_chat_takes_tools(const struct fs_chat *c);

/*
 * What the engine calls: the prompt's ids, ending with the opening of the assistant's turn; BOS in front
 * exactly once when the template or the tokenizer wants it. Each picture is one id -1, in the order in which
 * the pictures stand in msgs. x may be NULL. opening, when not NULL: what fs_prompt_opening says is appended.
 * On failure ids keeps its former length. FS_EINVAL: no message, a role, a picture or a choice of tools that
 * can not be had. FS_ENOTSUP: tools or calls, and a family that has no form for them. FS_ELIMIT: more tokens
 * than ids takes. FS_ENOMEM.
 */
int fs_chat_encode(const struct fs_chat *c, const struct fs_message *msgs, size_t n,
        const struct fs_chat_extras *x, struct fs_ids *ids, struct fs_buf *opening, struct fs_errbuf *e);

/* ---- the step before: the rendered text, in pieces ---- */

enum fs_chat_kind {
	FS_CHAT_LITERAL, /* from the template: its control tokens count */
	FS_CHAT_TEXT,    /* from a message: never a control token */
	FS_CHAT_PICTURE, /* rows go here; off == the place in text, len == 0 */
};
struct fs_chat_seg {
	enum fs_chat_kind kind;
	size_t off, len; /* in text */
	size_t picture;  /* its number among the pictures of msgs, from 0 */
};
struct fs_chat_text {
	struct fs_buf text; /* the whole rendering, pictures left out */
	struct fs_chat_seg *segs;
	size_t n_segs, cap_segs;
	size_t opening; /* where in text the beginning of a required call lies; text.len when there is none */
};
void fs_chat_text_init(struct fs_chat_text *r);
void fs_chat_text_finish(struct fs_chat_text *r);
/* r must be initialised and empty. */
int fs_chat_render(const struct fs_chat *c, const struct fs_message *msgs, size_t n,
        const struct fs_chat_extras *x, struct fs_chat_text *r, struct fs_errbuf *e);

#endif
