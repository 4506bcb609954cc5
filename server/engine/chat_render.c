/* chat_render: writes messages out by a family's facts, as pieces of trusted and untrusted text, and
 * tokenises them; see chat.h. */
#include "server/engine/chat.h"

#include <stdlib.h>
#include <string.h>

#include "server/engine/chat_family.h"
#include "server/engine/unicode.h"
#include "server/engine/utf8.h"

#define MAX_RENDERED ((size_t)256 << 20)

void fs_chat_text_init(struct fs_chat_text *r)
{
	*r = (struct fs_chat_text){0};
	fs_buf_init(&r->text, MAX_RENDERED);
}

void fs_chat_text_finish(struct fs_chat_text *r)
{
	fs_buf_finish(&r->text);
	free(r->segs);
	fs_chat_text_init(r);
}

static int add(struct fs_chat_text *r, enum fs_chat_kind kind, const char *s, size_t len, size_t picture)
{
	size_t cap = r->cap_segs ? r->cap_segs * 2 : 32, off = r->text.len;
	struct fs_chat_seg *p;
	int rc;

	if (kind != FS_CHAT_PICTURE && len == 0)
		return FS_OK;
	if (r->n_segs == r->cap_segs) {
		if ((p = realloc(r->segs, cap * sizeof(*p))) == NULL)
			return FS_ENOMEM;
		r->segs = p;
		r->cap_segs = cap;
	}
	if ((rc = fs_buf_append(&r->text, s, len)) != FS_OK)
		return rc;
	r->segs[r->n_segs++] = (struct fs_chat_seg){kind, off, len, picture};
	return FS_OK;
}

static int literal(struct fs_chat_text *r, const char *s)
{
	return s != NULL ? add(r, FS_CHAT_LITERAL, s, strlen(s), 0) : FS_OK;
}

/* ---- a message's content ---- */

struct range { /* from byte o0 of part p0 up to byte o1 of part p1; o1 counts only when p1 is text */
	size_t p0, o0, p1, o1;
};

/* What Python's str.strip() takes away. */
static bool is_white(uint32_t cp)
{
	return (fs_uclass(cp) & FS_UC_SPACE) != 0 || (cp >= 0x1c && cp <= 0x1f);
}

static size_t skip_front(const char *text, size_t len)
{
	const uint8_t *s = (const uint8_t *)text;
	size_t i = 0, used;
	uint32_t cp;

	while (i < len && fs_utf8_next(s + i, len - i, &cp, &used) == FS_UTF8_OK && is_white(cp))
		i += used;
	return i;
}

/* Length of text without the white space behind it. */
static size_t skip_back(const char *text, size_t len)
{
	const uint8_t *s = (const uint8_t *)text;

	while (len > 0) {
		size_t i = len - 1, used;
		uint32_t cp;

		while (i > 0 && len - i < 4 && (s[i] & 0xc0) == 0x80)
			i--;
		if (fs_utf8_next(s + i, len - i, &cp, &used) != FS_UTF8_OK || i + used != len ||
		        !is_white(cp))
			break;
		len = i;
	}
	return len;
}

static struct range whole(const struct fs_message *m)
{
	struct range g = {0, 0, m->n_parts, 0};

	if (m->n_parts > 0) {
		g.p1 = m->n_parts - 1;
		g.o1 = m->parts[g.p1].text_len;
	}
	return g;
}

/* Narrows to what a strip of the joined texts leaves; a picture is no white space. */
static void trim(const struct fs_message *m, struct range *g)
{
	while (g->p0 < m->n_parts && m->parts[g->p0].rows == NULL) {
		const struct fs_part *p = &m->parts[g->p0];

		g->o0 += skip_front(p->text + g->o0, p->text_len - g->o0);
		if (g->o0 < p->text_len || g->p0 == g->p1)
			break;
		g->p0++;
		g->o0 = 0;
	}
	while (g->p1 < m->n_parts && m->parts[g->p1].rows == NULL) {
		size_t from = g->p1 == g->p0 ? g->o0 : 0;

		g->o1 = from + skip_back(m->parts[g->p1].text + from, g->o1 - from);
		if (g->o1 > from || g->p1 == g->p0)
			break;
		g->p1--;
		g->o1 = m->parts[g->p1].text_len;
	}
}

/* Behind the last "</think>" and the line ends that follow it. */
static void drop_thoughts(const struct fs_message *m, struct range *g)
{
	static const char mark[] = "</think>";
	size_t i;

	for (i = 0; i < m->n_parts; i++) {
		const struct fs_part *p = &m->parts[i];
		const char *s = p->text, *end, *hit;

		if (p->rows != NULL)
			continue;
		end = s + p->text_len;
		while ((hit = memmem(s, (size_t)(end - s), mark, sizeof(mark) - 1)) != NULL) {
			s = hit + sizeof(mark) - 1;
			g->p0 = i;
			g->o0 = (size_t)(s - p->text);
		}
		while (g->p0 == i && g->o0 > 0 && g->o0 < p->text_len && p->text[g->o0] == '\n')
			g->o0++;
	}
}

static int content(const struct fs_chat *c, struct fs_chat_text *r, const struct fs_message *m, bool old,
        size_t *picture)
{
	struct range g = whole(m);
	size_t i;
	int rc;

	if (old && c->drop_thoughts && m->role == FS_ROLE_ASSISTANT)
		drop_thoughts(m, &g);
	if (c->turn[m->role].trim && c->turn[m->role].pre != NULL) /* a folded system text stays as it is */
		trim(m, &g);
	for (i = g.p0; i < m->n_parts && i <= g.p1; i++) {
		const struct fs_part *p = &m->parts[i];
		size_t from = i == g.p0 ? g.o0 : 0, to = i == g.p1 ? g.o1 : p->text_len;

		if (p->rows == NULL)
			rc = to > from ? add(r, FS_CHAT_TEXT, p->text + from, to - from, 0) : FS_OK;
		else if ((rc = literal(r, "<|vision_start|>")) == FS_OK &&
		         (rc = add(r, FS_CHAT_PICTURE, "", 0, (*picture)++)) == FS_OK)
			rc = literal(r, "<|vision_end|>");
		if (rc != FS_OK)
			return rc;
	}
	return FS_OK;
}

/* ---- the conversation ---- */

static const char *role_name(enum fs_role role)
{
	static const char *const names[FS_N_ROLES] = {"system", "user", "assistant", "tool"};

	return names[role];
}

static bool folds_system(const struct fs_chat *c)
{
	return c->system_place == FS_SYSTEM_FIRST_USER || c->system_place == FS_SYSTEM_LAST_USER;
}

static int check_parts(const struct fs_chat *c, const struct fs_message *m, size_t i, struct fs_errbuf *e)
{
	size_t k;

	for (k = 0; k < m->n_parts; k++) {
		if (m->parts[k].rows == NULL)
			continue;
		if (!c->pictures)
			return fs_fail(e, FS_EINVAL,
			        "messages[%zu]: this model can not take pictures: its vocabulary has no "
			        "<|vision_start|> and <|vision_end|>",
			        i);
		if (m->role == FS_ROLE_SYSTEM && folds_system(c))
			return fs_fail(e, FS_EINVAL,
			        "messages[%zu]: the \"%s\" chat template has no place for a picture in a "
			        "system message",
			        i, fs_chat_name(c));
	}
	return FS_OK;
}

static int check(const struct fs_chat *c, const struct fs_message *msgs, size_t n, struct fs_errbuf *e)
{
	bool user = false, system = false;
	size_t i;
	int rc;

	if (n == 0)
		return fs_fail(e, FS_EINVAL, "messages: there is none");
	for (i = 0; i < n; i++) {
		enum fs_role role = msgs[i].role;
		bool folded = role == FS_ROLE_SYSTEM && folds_system(c);

		if ((unsigned)role >= FS_N_ROLES)
			return fs_fail(e, FS_EINVAL, "messages[%zu].role: unknown", i);
		if (c->turn[role].pre == NULL && !folded)
			return fs_fail(e, FS_EINVAL,
			        "messages[%zu].role: the \"%s\" chat template has no %s messages", i,
			        fs_chat_name(c), role_name(role));
		if (role == FS_ROLE_SYSTEM && i > 0 && c->system_place != FS_SYSTEM_TURN)
			return fs_fail(e, FS_EINVAL,
			        "messages[%zu].role: with the \"%s\" chat template a system message must be "
			        "the first",
			        i, fs_chat_name(c));
		if ((rc = check_parts(c, &msgs[i], i, e)) != FS_OK)
			return rc;
		user |= role == FS_ROLE_USER;
		system |= folded;
	}
	if (system && !user)
		return fs_fail(e, FS_EINVAL,
		        "messages: the \"%s\" chat template puts the system message into a user message, and "
		        "there is none",
		        fs_chat_name(c));
	return FS_OK;
}

struct walk {
	const struct fs_chat *c;
	const struct fs_message *msgs;
	size_t n;
	struct fs_chat_text *r;
	size_t folded_into; /* index of the user message that carries the system text, n = none */
	size_t last_user;   /* n = none */
	size_t picture;
};

static int one_message(struct walk *w, size_t i)
{
	const struct fs_chat *c = w->c;
	const struct fs_message *m = &w->msgs[i];
	const struct fs_chat_turn *t = &c->turn[m->role];
	bool tool = m->role == FS_ROLE_TOOL;
	int rc;

	if (m->role == FS_ROLE_SYSTEM && folds_system(c))
		return FS_OK;
	if (tool && (i == 0 || w->msgs[i - 1].role != FS_ROLE_TOOL) &&
	        (rc = literal(w->r, c->tool_open)) != FS_OK)
		return rc;
	if ((rc = literal(w->r, t->pre)) != FS_OK)
		return rc;
	if (i == w->folded_into && ((rc = literal(w->r, c->system_pre)) != FS_OK ||
	                                   (rc = content(c, w->r, &w->msgs[0], true, &w->picture)) != FS_OK ||
	                                   (rc = literal(w->r, c->system_post)) != FS_OK))
		return rc;
	if ((rc = content(c, w->r, m, w->last_user < w->n && i < w->last_user, &w->picture)) != FS_OK ||
	        (rc = literal(w->r, t->post)) != FS_OK)
		return rc;
	if (tool && (i + 1 == w->n || w->msgs[i + 1].role != FS_ROLE_TOOL))
		return literal(w->r, c->tool_close);
	return FS_OK;
}

static void find_users(struct walk *w)
{
	bool folds = w->msgs[0].role == FS_ROLE_SYSTEM && folds_system(w->c);
	size_t i, first = w->n;

	w->last_user = w->n;
	for (i = 0; i < w->n; i++) {
		if (w->msgs[i].role != FS_ROLE_USER)
			continue;
		first = FS_MIN(first, i);
		w->last_user = i;
	}
	w->folded_into = !folds ? w->n : w->c->system_place == FS_SYSTEM_FIRST_USER ? first : w->last_user;
}

static int front(struct walk *w)
{
	const struct fs_chat *c = w->c;
	const struct fs_chat_turn *sys = &c->turn[FS_ROLE_SYSTEM];
	size_t len;
	int rc;

	if (c->bos && (rc = literal(w->r, fs_tok_text(c->tok, fs_tok_info(c->tok)->bos, &len))) != FS_OK)
		return rc;
	if (c->default_system == NULL || w->msgs[0].role == FS_ROLE_SYSTEM)
		return FS_OK;
	if ((rc = literal(w->r, sys->pre)) != FS_OK || (rc = literal(w->r, c->default_system)) != FS_OK)
		return rc;
	return literal(w->r, sys->post);
}

int fs_chat_render(const struct fs_chat *c, const struct fs_message *msgs, size_t n, struct fs_chat_text *r,
        struct fs_errbuf *e)
{
	struct walk w = {.c = c, .msgs = msgs, .n = n, .r = r};
	size_t i;
	int rc;

	if ((rc = check(c, msgs, n, e)) != FS_OK)
		return rc;
	find_users(&w);
	rc = front(&w);
	for (i = 0; rc == FS_OK && i < n; i++)
		rc = one_message(&w, i);
	if (rc == FS_OK)
		rc = literal(r, c->opening);
	return rc == FS_OK ? rc : fs_fail(e, rc, "messages: too long");
}

/* ---- tokens ---- */

/* The text between two pictures. */
static int encode_run(const struct fs_chat *c, const struct fs_chat_text *r, const struct fs_chat_seg *segs,
        size_t n, struct fs_ids *ids, struct fs_errbuf *e)
{
	struct fs_tok_span *spans;
	size_t i;
	int rc;

	if (n == 0)
		return FS_OK;
	spans = calloc(n, sizeof(*spans));
	if (spans == NULL)
		return fs_fail(e, FS_ENOMEM, "messages: out of memory");
	for (i = 0; i < n; i++)
		spans[i] = (struct fs_tok_span){(const char *)r->text.data + segs[i].off, segs[i].len,
		        segs[i].kind == FS_CHAT_LITERAL};
	rc = fs_tok_encode_spans(c->tok, spans, n, ids, e);
	free(spans);
	return rc;
}

/* The tokenizer's wish for a BOS, unless the template has put one. */
static int lead_bos(const struct fs_chat *c, const struct fs_chat_text *r, struct fs_ids *ids)
{
	const struct fs_tok_info *in = fs_tok_info(c->tok);
	size_t len;
	const char *bos = fs_tok_text(c->tok, in->bos, &len);

	if (!in->add_bos || bos == NULL)
		return FS_OK;
	if (r->n_segs > 0 && r->segs[0].kind == FS_CHAT_LITERAL && r->segs[0].len >= len &&
	        memcmp(r->text.data, bos, len) == 0)
		return FS_OK;
	return fs_ids_append(ids, in->bos);
}

static int encode_text(
        const struct fs_chat *c, const struct fs_chat_text *r, struct fs_ids *ids, struct fs_errbuf *e)
{
	size_t i, from = 0;
	int rc;

	if ((rc = lead_bos(c, r, ids)) != FS_OK)
		return fs_fail(e, rc, "messages: too long");
	for (i = 0; i < r->n_segs; i++) {
		if (r->segs[i].kind != FS_CHAT_PICTURE)
			continue;
		if ((rc = encode_run(c, r, r->segs + from, i - from, ids, e)) != FS_OK)
			return rc;
		if ((rc = fs_ids_append(ids, -1)) != FS_OK)
			return fs_fail(e, rc, "messages: too long");
		from = i + 1;
	}
	return encode_run(c, r, r->segs + from, r->n_segs - from, ids, e);
}

int fs_chat_encode(const struct fs_chat *c, const struct fs_message *msgs, size_t n, struct fs_ids *ids,
        struct fs_errbuf *e)
{
	size_t before = ids->len;
	struct fs_chat_text r;
	int rc;

	fs_chat_text_init(&r);
	rc = fs_chat_render(c, msgs, n, &r, e);
	if (rc == FS_OK)
		rc = encode_text(c, &r, ids, e);
	if (rc != FS_OK)
		ids->len = before;
	fs_chat_text_finish(&r);
	return rc;
}
