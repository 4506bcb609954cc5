/* chat: recognises a template's family and fills in its facts; see chat.h. Creation only; rendering is in
 * chat_render.c. */
#include "server/engine/chat.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "server/engine/chat_family.h"
#include "server/engine/chat_scan.h"

static const char *const family_names[FS_N_FAMILIES] = {"chatml", "llama3", "mistral", "gemma", "vicuna"};

#define KNOWN "set \"chat_template\" to one of chatml, llama3, mistral, gemma, vicuna"

struct source { /* s is NULL when there is no template */
	const char *s;
	size_t len;
};

static bool has(const struct source *src, const char *needle)
{
	return src->s != NULL && fs_scan_has(src->s, src->len, needle);
}

/* ---- which family ---- */

static int family_by_name(const char *name, enum fs_family *out, struct fs_errbuf *e)
{
	size_t i;

	for (i = 0; i < FS_N_FAMILIES; i++)
		if (strcmp(name, family_names[i]) == 0) {
			*out = (enum fs_family)i;
			return FS_OK;
		}
	return fs_fail(e, FS_EINVAL, "unknown chat template \"%.64s\": " KNOWN, name);
}

static int family_by_text(const struct source *src, enum fs_family *out, struct fs_errbuf *e)
{
	if (has(src, "<|im_start|>") && has(src, "<|im_end|>") && !has(src, "<|im_sep|>"))
		*out = FS_FAMILY_CHATML;
	else if (has(src, "<|start_header_id|>") && has(src, "<|eot_id|>"))
		*out = FS_FAMILY_LLAMA3;
	else if (has(src, "<start_of_turn>") && has(src, "<end_of_turn>"))
		*out = FS_FAMILY_GEMMA;
	else if (has(src, "[INST]") && has(src, "[/INST]"))
		*out = FS_FAMILY_MISTRAL;
	else if (has(src, "ASSISTANT:") && (has(src, "USER:") || has(src, ".upper()")))
		*out = FS_FAMILY_VICUNA;
	else
		return fs_fail(e, FS_ENOTSUP, "the model's chat template is of no known family: " KNOWN);
	return FS_OK;
}

static bool in_vocab(const struct fs_tok *t, const char *text)
{
	return fs_tok_find(t, text, strlen(text)) >= 0;
}

static int family_by_vocab(const struct fs_tok *t, enum fs_family *out, struct fs_errbuf *e)
{
	if (in_vocab(t, "<|im_start|>") && in_vocab(t, "<|im_end|>"))
		*out = FS_FAMILY_CHATML;
	else if (in_vocab(t, "<|start_header_id|>") && in_vocab(t, "<|eot_id|>"))
		*out = FS_FAMILY_LLAMA3;
	else if (in_vocab(t, "<start_of_turn>") && in_vocab(t, "<end_of_turn>"))
		*out = FS_FAMILY_GEMMA;
	else if (in_vocab(t, "[INST]") && in_vocab(t, "[/INST]"))
		*out = FS_FAMILY_MISTRAL;
	else
		return fs_fail(e, FS_ENOTSUP,
		        "the model has no chat template and its vocabulary does not tell which it "
		        "wants: " KNOWN);
	return FS_OK;
}

/* ---- filling in. All return false only when memory is out. ---- */

static bool set(char **dst, const char *s)
{
	free(*dst);
	*dst = strdup(s);
	return *dst != NULL;
}

static bool set_turn(struct fs_chat *c, enum fs_role role, const char *pre, const char *post)
{
	return set(&c->turn[role].pre, pre) && set(&c->turn[role].post, post);
}

/* pre with one %s for the role's name */
static bool set_named_turns(struct fs_chat *c, const char *head, const char *tail, const char *post,
        const char *const names[FS_N_ROLES])
{
	char pre[128];
	int r;

	for (r = 0; r < FS_N_ROLES; r++) {
		if (names[r] == NULL)
			continue;
		snprintf(pre, sizeof(pre), "%s%s%s", head, names[r], tail);
		if (!set_turn(c, (enum fs_role)r, pre, post))
			return false;
	}
	snprintf(pre, sizeof(pre), "%s%s%s", head, names[FS_ROLE_ASSISTANT], tail);
	return set(&c->opening, pre);
}

static void set_trim(struct fs_chat *c, bool trim)
{
	int r;

	for (r = 0; r < FS_N_ROLES; r++)
		c->turn[r].trim = trim;
}

static const char *token_text(const struct fs_tok *t, int32_t id, const char *fallback)
{
	size_t len;
	const char *s = fs_tok_text(t, id, &len);

	return s != NULL ? s : fallback;
}

/* Takes a default system text found by a scan (rc) into the template. */
static bool take_default(struct fs_chat *c, struct fs_buf *text, int rc)
{
	bool ok = rc == FS_ENOTFOUND ||
	          (rc == FS_OK && set(&c->default_system, text->data ? (char *)text->data : ""));

	fs_buf_finish(text);
	return ok;
}

static bool fill_chatml(struct fs_chat *c, const struct source *src)
{
	static const char *const names[FS_N_ROLES] = {"system", "user", "assistant", "tool"};
	struct fs_buf text;
	int rc;

	if (!set_named_turns(c, "<|im_start|>", "\n", "<|im_end|>\n", names))
		return false;
	c->drop_thoughts = has(src, "</think>");
	if (src->s == NULL)
		return true;
	set_trim(c, fs_scan_trims(src->s, src->len));
	if (has(src, "<tool_response>") &&
	        !(set_turn(c, FS_ROLE_TOOL, "\n<tool_response>\n", "\n</tool_response>") &&
	                set(&c->tool_open, "<|im_start|>user") && set(&c->tool_close, "<|im_end|>\n")))
		return false;
	fs_buf_init(&text, FS_SCAN_TEXT_MAX);
	rc = fs_scan_between(src->s, src->len, "<|im_start|>system", "<|im_end|>", &text);
	if (rc == FS_ENOTFOUND)
		rc = fs_scan_assigned(src->s, src->len, "system_message", &text);
	return take_default(c, &text, rc);
}

/* Llama 3.1 puts two dates in front of the system text that comes first, also of none; one that comes later
 * has no dates. Where the template takes today's date from the clock its own constant is used: a prompt that
 * changes at midnight would lose its cached prefix. */
static bool fill_llama3_dates(struct fs_chat *c, const struct source *src)
{
	struct fs_buf date, lead;
	bool ok;
	int rc;

	fs_buf_init(&date, 256);
	fs_buf_init(&lead, 512);
	rc = fs_scan_assigned(src->s, src->len, "date_string", &date);
	ok = (rc == FS_OK || rc == FS_ENOTFOUND) &&
	     fs_buf_printf(&lead, "Cutting Knowledge Date: December 2023\nToday Date: %s\n\n",
	             rc == FS_OK ? (char *)date.data : "26 Jul 2024") == FS_OK &&
	     set(&c->lead, (char *)lead.data) && set(&c->default_system, "");
	fs_buf_finish(&date);
	fs_buf_finish(&lead);
	return ok;
}

static bool fill_llama3(struct fs_chat *c, const struct source *src)
{
	const char *names[FS_N_ROLES] = {"system", "user", "assistant", "tool"};

	if (has(src, "ipython"))
		names[FS_ROLE_TOOL] = "ipython";
	if (!set_named_turns(c, "<|start_header_id|>", "<|end_header_id|>\n\n", "<|eot_id|>", names))
		return false;
	set_trim(c, src->s == NULL || fs_scan_trims(src->s, src->len));
	return !has(src, "Cutting Knowledge Date: December 2023") || fill_llama3_dates(c, src);
}

static bool fill_gemma(struct fs_chat *c, const struct source *src)
{
	static const char *const names[FS_N_ROLES] = {NULL, "user", "model", NULL};

	set_trim(c, src->s == NULL || fs_scan_trims(src->s, src->len));
	c->system_place = FS_SYSTEM_FIRST_USER;
	return set_named_turns(c, "<start_of_turn>", "\n", "<end_of_turn>\n", names) &&
	       set(&c->system_pre, "") && set(&c->system_post, "\n\n");
}

/* Appends the constant atoms [from, to) of a block. */
static bool constants(
        const struct fs_chat *c, const struct fs_scan_block *b, size_t from, size_t to, struct fs_buf *out)
{
	const struct fs_tok_info *in = fs_tok_info(c->tok);
	int rc = FS_OK;

	for (; from < to && rc == FS_OK; from++) {
		const struct fs_scan_atom *a = &b->atoms[from];

		if (a->kind == FS_SCAN_LITERAL)
			rc = fs_scan_unescape(out, a->s, a->len);
		else if (a->kind == FS_SCAN_BOS)
			rc = fs_buf_append_str(out, token_text(c->tok, in->bos, ""));
		else if (a->kind == FS_SCAN_EOS)
			rc = fs_buf_append_str(out, token_text(c->tok, in->eos, "</s>"));
	}
	return rc == FS_OK;
}

static bool set_constants(
        const struct fs_chat *c, char **dst, const struct fs_scan_block *b, size_t from, size_t to)
{
	struct fs_buf text;
	bool ok;

	fs_buf_init(&text, FS_SCAN_TEXT_MAX);
	ok = constants(c, b, from, to, &text) && set(dst, text.data ? (char *)text.data : "");
	fs_buf_finish(&text);
	return ok;
}

/* QwQ's template and those of models that do nothing but think open a thought with the assistant's turn. One
 * that asks enable_thinking is not meant: whether it does depends on the caller. */
static bool fill_thought(struct fs_chat *c, const struct source *src)
{
	static const char opening[] = "<|im_start|>assistant\n<think>\n";
	struct fs_scan_block b;
	char *text = NULL;
	size_t pos = 0;
	bool ok = true;

	if (src->s == NULL || has(src, "enable_thinking"))
		return true;
	while (ok && c->thought == NULL && fs_scan_next(src->s, src->len, &pos, &b)) {
		ok = set_constants(c, &text, &b, 0, b.n);
		if (ok && b.n == 1 && strcmp(text, opening) == 0)
			ok = set(&c->thought, "<think>\n");
	}
	free(text);
	return ok;
}

/* Index of the first atom of that kind at or after `from`, b->n when there is none. */
static size_t find_kind(const struct fs_scan_block *b, enum fs_scan_kind kind, size_t from)
{
	while (from < b->n && b->atoms[from].kind != kind)
		from++;
	return from;
}

static bool block_has(const struct fs_scan_block *b, size_t to, const char *needle)
{
	size_t i;

	for (i = 0; i < to; i++)
		if (fs_scan_atom_has(&b->atoms[i], needle))
			return true;
	return false;
}

/* A block that puts out a message: the constants on both sides of its content become the turn's. */
static bool take_turn(struct fs_chat *c, enum fs_role role, const struct fs_scan_block *b, size_t content)
{
	c->turn[role].trim = b->atoms[content].trim;
	return set_constants(c, &c->turn[role].pre, b, 0, content) &&
	       set_constants(c, &c->turn[role].post, b, content + 1, b->n);
}

/* '[INST] ' + system + '\n\n' + content + '[/INST]' */
static bool mistral_fold(struct fs_chat *c, const struct fs_scan_block *b, size_t system, size_t content)
{
	return set(&c->system_pre, "") && set_constants(c, &c->system_post, b, system + 1, content);
}

static bool mistral_block(struct fs_chat *c, const struct fs_scan_block *b)
{
	size_t content = find_kind(b, FS_SCAN_CONTENT, 0), system = find_kind(b, FS_SCAN_SYSTEM, 0);

	if (block_has(b, b->n, "<<SYS>>"))
		return true;
	if (block_has(b, b->n, "[SYSTEM_PROMPT]") && FS_MIN(content, system) < b->n) {
		c->system_place = FS_SYSTEM_TURN;
		return take_turn(c, FS_ROLE_SYSTEM, b, FS_MIN(content, system));
	}
	if (content == b->n)
		return true;
	if (system < content)
		return mistral_fold(c, b, system, content);
	if (block_has(b, content, "[INST]"))
		return take_turn(c, FS_ROLE_USER, b, content);
	if (find_kind(b, FS_SCAN_EOS, content) < b->n)
		return take_turn(c, FS_ROLE_ASSISTANT, b, content);
	return true;
}

static bool fill_mistral(struct fs_chat *c, const struct source *src)
{
	const char *eos = token_text(c->tok, fs_tok_info(c->tok)->eos, "</s>"), *bos;
	struct fs_scan_block b;
	size_t pos = 0;

	c->system_place =
	        has(src, "loop.last and system_message") ? FS_SYSTEM_LAST_USER : FS_SYSTEM_FIRST_USER;
	if (!set_turn(c, FS_ROLE_USER, "[INST] ", " [/INST]") || !set_turn(c, FS_ROLE_ASSISTANT, "", eos) ||
	        !set(&c->opening, "") || !set(&c->system_pre, "") || !set(&c->system_post, "\n\n"))
		return false;
	if (src->s == NULL)
		return true;
	if (has(src, "<<SYS>>") && /* Llama 2 */
	        !(set(&c->system_pre, "<<SYS>>\n") && set(&c->system_post, "\n<</SYS>>\n\n")))
		return false;
	while (fs_scan_next(src->s, src->len, &pos, &b))
		if (!mistral_block(c, &b))
			return false;
	/* Llama 2 repeats the BOS in every user turn, the first one among them. */
	bos = token_text(c->tok, fs_tok_info(c->tok)->bos, "");
	if (*bos != 0 && strncmp(c->turn[FS_ROLE_USER].pre, bos, strlen(bos)) == 0)
		c->bos = false;
	return true;
}

/* A block with neither speaker's name puts out the system text; a BOS in it is the front's business. */
static bool vicuna_system(struct fs_chat *c, const struct fs_scan_block *b, size_t text)
{
	struct fs_chat_turn *t = &c->turn[FS_ROLE_SYSTEM];
	size_t from = find_kind(b, FS_SCAN_BOS, 0);

	return set_constants(c, &t->pre, b, from < text ? from + 1 : 0, text) &&
	       set_constants(c, &t->post, b, text + 1, b->n);
}

static bool vicuna_block(struct fs_chat *c, const struct fs_scan_block *b)
{
	size_t text = FS_MIN(find_kind(b, FS_SCAN_CONTENT, 0), find_kind(b, FS_SCAN_SYSTEM, 0));

	if (text == b->n)
		return !block_has(b, b->n, "ASSISTANT:") || set_constants(c, &c->opening, b, 0, b->n);
	if (block_has(b, text, "ASSISTANT:"))
		return take_turn(c, FS_ROLE_ASSISTANT, b, text);
	return block_has(b, text, "USER:") ? take_turn(c, FS_ROLE_USER, b, text) : vicuna_system(c, b, text);
}

/* LLaVA's: message['role'].upper() + ': ', then the content and a space, for every role but the system's. */
static bool fill_upper(struct fs_chat *c)
{
	return set_turn(c, FS_ROLE_SYSTEM, "", " ") && set_turn(c, FS_ROLE_USER, "USER: ", " ") &&
	       set_turn(c, FS_ROLE_ASSISTANT, "ASSISTANT: ", " ");
}

/* Without a template: the form of FastChat's "vicuna_v1.1", which LLaVA 1.5 was trained on. */
static bool fill_vicuna(struct fs_chat *c, const struct source *src)
{
	const char *eos = token_text(c->tok, fs_tok_info(c->tok)->eos, "</s>");
	struct fs_scan_block b;
	struct fs_buf text;
	size_t pos = 0;

	c->system_place = FS_SYSTEM_LEAD;
	if (!set_turn(c, FS_ROLE_SYSTEM, "", src->s != NULL ? "" : " ") ||
	        !set_turn(c, FS_ROLE_USER, "USER: ", " ") ||
	        !set_turn(c, FS_ROLE_ASSISTANT, "ASSISTANT: ", eos) || !set(&c->opening, "ASSISTANT:"))
		return false;
	if (src->s == NULL)
		return set(&c->default_system,
		        "A chat between a curious user and an artificial intelligence assistant. The "
		        "assistant gives "
		        "helpful, detailed, and polite answers to the user's questions.");
	if (has(src, ".upper()"))
		return fill_upper(c);
	while (fs_scan_next(src->s, src->len, &pos, &b))
		if (!vicuna_block(c, &b))
			return false;
	/* What the template adds to a system text before it puts it out. */
	if (fs_scan_set(src->s, src->len, "system_message", &b) &&
	        !take_turn(c, FS_ROLE_SYSTEM, &b, find_kind(&b, FS_SCAN_CONTENT, 0)))
		return false;
	fs_buf_init(&text, FS_SCAN_TEXT_MAX);
	return take_default(c, &text, fs_scan_assigned(src->s, src->len, "system_message", &text));
}

/* A BOS in front: the template's variable, or the token's own text. */
static bool wants_bos(const struct fs_chat *c, const struct source *src)
{
	size_t len;
	const char *bos = fs_tok_text(c->tok, fs_tok_info(c->tok)->bos, &len);

	if (src->s == NULL || bos == NULL)
		return false;
	return has(src, "bos_token") || (src->len >= len && memcmp(src->s, bos, len) == 0);
}

static bool fill(struct fs_chat *c, const struct source *src)
{
	c->bos = wants_bos(c, src);
	c->pictures = fs_tok_is_control(c->tok, fs_tok_find(c->tok, "<|vision_start|>", 16)) &&
	              fs_tok_is_control(c->tok, fs_tok_find(c->tok, "<|vision_end|>", 14));
	switch (c->family) {
	case FS_FAMILY_CHATML:
		return fill_chatml(c, src) && fill_thought(c, src);
	case FS_FAMILY_LLAMA3:
		return fill_llama3(c, src);
	case FS_FAMILY_MISTRAL:
		return fill_mistral(c, src);
	case FS_FAMILY_GEMMA:
		return fill_gemma(c, src);
	case FS_FAMILY_VICUNA:
		return fill_vicuna(c, src);
	}
	FS_ASSERT(false);
}

/* ---- public ---- */

int fs_chat_create_text(const char *tmpl, size_t len, const struct fs_tok *t, const char *name,
        struct fs_chat **out, struct fs_errbuf *e)
{
	struct source src = {tmpl, tmpl != NULL ? len : 0};
	enum fs_family family, found;
	struct fs_chat *c;
	int rc;

	if (src.len > FS_SCAN_TEXT_MAX)
		return fs_fail(e, FS_ELIMIT, "tokenizer.chat_template: %zu bytes, at most %zu", len,
		        FS_SCAN_TEXT_MAX);
	if (name != NULL)
		rc = family_by_name(name, &family, e);
	else
		rc = src.s != NULL ? family_by_text(&src, &family, e) : family_by_vocab(t, &family, e);
	if (rc != FS_OK)
		return rc;
	/* A template of another family than the one that was asked for says nothing about it. */
	if (name != NULL && src.s != NULL && (family_by_text(&src, &found, NULL) != FS_OK || found != family))
		src = (struct source){NULL, 0};
	c = calloc(1, sizeof(*c));
	if (c == NULL)
		return fs_fail(e, FS_ENOMEM, "chat template: out of memory");
	c->family = family;
	c->tok = t;
	if (!fill(c, &src)) {
		fs_chat_destroy(c);
		return fs_fail(e, FS_ENOMEM, "chat template: out of memory");
	}
	*out = c;
	return FS_OK;
}

int fs_chat_create(const struct fs_gguf *g, const struct fs_tok *t, const char *name, struct fs_chat **out,
        struct fs_errbuf *e)
{
	const char *key = "tokenizer.chat_template", *s = NULL;
	size_t len = 0;
	int rc;

	if (fs_gguf_has(g, key) && (rc = fs_gguf_str(g, key, &s, &len, e)) != FS_OK)
		return rc;
	return fs_chat_create_text(s, len, t, name, out, e);
}

void fs_chat_destroy(struct fs_chat *c)
{
	int r;

	if (c == NULL)
		return;
	for (r = 0; r < FS_N_ROLES; r++) {
		free(c->turn[r].pre);
		free(c->turn[r].post);
	}
	free(c->tool_open);
	free(c->tool_close);
	free(c->opening);
	free(c->thought);
	free(c->system_pre);
	free(c->system_post);
	free(c->lead);
	free(c->default_system);
	free(c);
}

const char *fs_chat_name(const struct fs_chat *c)
{
	return family_names[c->family];
}

bool fs_chat_takes_tools(const struct fs_chat *c)
{
	return c->family == FS_FAMILY_CHATML;
}
