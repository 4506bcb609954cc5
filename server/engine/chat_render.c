/* chat_render: writes messages out by a family's facts, as pieces of trusted and untrusted text; see chat.h.
 */
#include "server/engine/chat.h"

#include <stdlib.h>
#include <string.h>

#include "server/engine/chat_family.h"
#include "server/engine/chat_tools.h"
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
	while (g->p0 < m->n_parts && !fs_part_is_picture(&m->parts[g->p0])) {
		const struct fs_part *p = &m->parts[g->p0];

		g->o0 += skip_front(p->text + g->o0, p->text_len - g->o0);
		if (g->o0 < p->text_len || g->p0 == g->p1)
			break;
		g->p0++;
		g->o0 = 0;
	}
	while (g->p1 < m->n_parts && !fs_part_is_picture(&m->parts[g->p1])) {
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

		if (fs_part_is_picture(p))
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

		if (!fs_part_is_picture(p))
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

/* Tools and calls: the family must have a form for them, and only an assistant calls. */
static int check_tools(const struct fs_chat *c, const struct fs_message *msgs, size_t n,
        const struct fs_chat_extras *x, struct fs_errbuf *e)
{
	size_t i;

	if (fs_chat_has_tools(x) && !fs_chat_takes_tools(c))
		return fs_fail(e, FS_ENOTSUP,
		        "tools: the model's chat template (\"%s\") has no form for them", fs_chat_name(c));
	for (i = 0; i < n; i++) {
		if (msgs[i].n_calls == 0)
			continue;
		if (msgs[i].role != FS_ROLE_ASSISTANT)
			return fs_fail(e, FS_EINVAL,
			        "messages[%zu].tool_calls: only assistant messages have them", i);
		if (!fs_chat_takes_tools(c))
			return fs_fail(e, FS_ENOTSUP,
			        "messages[%zu].tool_calls: the model's chat template (\"%s\") has no form "
			        "for "
			        "them",
			        i, fs_chat_name(c));
	}
	return fs_chat_tools_check(x, e);
}

static int check_parts(const struct fs_chat *c, const struct fs_message *m, size_t i, struct fs_errbuf *e)
{
	size_t k;

	for (k = 0; k < m->n_parts; k++) {
		if (!fs_part_is_picture(&m->parts[k]))
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
	const struct fs_chat_extras *x; /* NULL = none */
	struct fs_chat_text *r;
	struct fs_errbuf *e;
	struct fs_buf json; /* of one tool or call */
	bool own_results;   /* results of tools in the common form, since the template has none */
	size_t folded_into; /* index of the user message that carries the system text, n = none */
	size_t last_user;   /* n = none */
	size_t picture;
};

/* What the walk's json holds, as text of the client's. */
static int put_json(struct walk *w)
{
	int rc = add(w->r, FS_CHAT_TEXT, (const char *)w->json.data, w->json.len, 0);

	fs_buf_clear(&w->json);
	return rc;
}

/* Whether a call would begin its line: nothing was put out since text was `from` bytes long, or a thought and
 * its line ends last. */
static bool at_line(const struct walk *w, size_t from)
{
	static const char mark[] = "</think>";
	const uint8_t *s = w->r->text.data;
	size_t end = w->r->text.len;

	while (w->c->drop_thoughts && end > from && s[end - 1] == '\n')
		end--;
	if (end == w->r->text.len || end == from)
		return end == from;
	return end - from >= sizeof(mark) - 1 &&
	       memcmp(s + end - (sizeof(mark) - 1), mark, sizeof(mark) - 1) == 0;
}

static int put_calls(struct walk *w, size_t i, bool line_begun)
{
	const struct fs_message *m = &w->msgs[i];
	size_t k;
	int rc = FS_OK;

	for (k = 0; k < m->n_calls && rc == FS_OK; k++) {
		if ((rc = literal(w->r, k > 0 || !line_begun ? "\n" FS_CALL_OPEN "\n" : FS_CALL_OPEN "\n")) ==
		                FS_OK &&
		        (rc = fs_chat_call_json(m, i, k, &w->json, w->e)) == FS_OK &&
		        (rc = put_json(w)) == FS_OK)
			rc = literal(w->r, "\n" FS_CALL_CLOSE);
	}
	return rc;
}

/* Results that stand beside each other share a turn. */
static int results_edge(struct walk *w, size_t i, bool front)
{
	const char *form = front ? w->c->tool_open : w->c->tool_close;
	size_t beside = front ? i - 1 : i + 1;

	if (w->msgs[i].role != FS_ROLE_TOOL || (beside < w->n && w->msgs[beside].role == FS_ROLE_TOOL))
		return FS_OK;
	if (w->own_results)
		form = front ? FS_RESULTS_OPEN : FS_RESULTS_CLOSE;
	return literal(w->r, form);
}

static int turn_edge(struct walk *w, size_t i, bool front)
{
	const struct fs_chat_turn *t = &w->c->turn[w->msgs[i].role];

	if (w->msgs[i].role == FS_ROLE_TOOL && w->own_results)
		return literal(w->r, front ? FS_RESULT_OPEN : FS_RESULT_CLOSE);
	return literal(w->r, front ? t->pre : t->post);
}

static int one_message(struct walk *w, size_t i)
{
	const struct fs_chat *c = w->c;
	const struct fs_message *m = &w->msgs[i];
	bool old = w->last_user < w->n && i < w->last_user;
	size_t from;
	int rc;

	if (m->role == FS_ROLE_SYSTEM && (folds_system(c) || (i == 0 && fs_chat_has_tools(w->x))))
		return FS_OK;
	if ((rc = results_edge(w, i, true)) != FS_OK || (rc = turn_edge(w, i, true)) != FS_OK)
		return rc;
	if (i == 0 && m->role == FS_ROLE_SYSTEM && (rc = literal(w->r, c->lead)) != FS_OK)
		return rc;
	if (i == w->folded_into && ((rc = literal(w->r, c->system_pre)) != FS_OK ||
	                                   (rc = content(c, w->r, &w->msgs[0], true, &w->picture)) != FS_OK ||
	                                   (rc = literal(w->r, c->system_post)) != FS_OK))
		return rc;
	from = w->r->text.len;
	if ((rc = content(c, w->r, m, old, &w->picture)) != FS_OK ||
	        (rc = put_calls(w, i, at_line(w, from))) != FS_OK || (rc = turn_edge(w, i, false)) != FS_OK)
		return rc;
	return results_edge(w, i, false);
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

/* The system's turn when there are tools: its text, or the template's, then theirs. */
static int tools_turn(struct walk *w)
{
	const struct fs_chat *c = w->c;
	size_t i;
	int rc = literal(w->r, c->turn[FS_ROLE_SYSTEM].pre);

	if (rc == FS_OK && w->msgs[0].role == FS_ROLE_SYSTEM) {
		if ((rc = content(c, w->r, &w->msgs[0], true, &w->picture)) == FS_OK)
			rc = literal(w->r, "\n\n");
	} else if (rc == FS_OK && c->default_system != NULL) {
		if ((rc = literal(w->r, c->default_system)) == FS_OK)
			rc = literal(w->r, "\n\n");
	}
	if (rc == FS_OK)
		rc = literal(w->r, FS_TOOLS_HEAD);
	for (i = 0; i < w->x->n_tools && rc == FS_OK; i++)
		if ((rc = literal(w->r, "\n")) == FS_OK &&
		        (rc = fs_chat_tool_json(w->x, i, &w->json, w->e)) == FS_OK)
			rc = put_json(w);
	if (rc == FS_OK && (rc = literal(w->r, FS_TOOLS_TAIL)) == FS_OK)
		rc = literal(w->r, c->turn[FS_ROLE_SYSTEM].post);
	return rc;
}

static int front(struct walk *w)
{
	const struct fs_chat *c = w->c;
	const struct fs_chat_turn *sys = &c->turn[FS_ROLE_SYSTEM];
	size_t len;
	int rc;

	if (c->bos && (rc = literal(w->r, fs_tok_text(c->tok, fs_tok_info(c->tok)->bos, &len))) != FS_OK)
		return rc;
	if (fs_chat_has_tools(w->x))
		return tools_turn(w);
	if (c->default_system == NULL || w->msgs[0].role == FS_ROLE_SYSTEM)
		return FS_OK;
	if ((rc = literal(w->r, sys->pre)) != FS_OK || (rc = literal(w->r, c->lead)) != FS_OK ||
	        (rc = literal(w->r, c->default_system)) != FS_OK)
		return rc;
	return literal(w->r, sys->post);
}

/* The assistant's turn, and in it the beginning of a call that is required, or of a thought. */
static int opening(struct walk *w)
{
	int rc = literal(w->r, w->c->opening);

	w->r->opening = w->r->text.len;
	if (rc == FS_OK)
		rc = fs_chat_opening_json(w->x, &w->json, w->e);
	if (rc != FS_OK)
		return rc;
	if (w->json.len > 0)
		return (rc = literal(w->r, FS_CALL_OPEN "\n")) == FS_OK ? put_json(w) : rc;
	rc = literal(w->r, w->c->thought);
	w->r->opening = w->r->text.len;
	return rc;
}

static bool any_call(const struct fs_message *msgs, size_t n)
{
	size_t i;

	for (i = 0; i < n; i++)
		if (msgs[i].n_calls > 0)
			return true;
	return false;
}

int fs_chat_render(const struct fs_chat *c, const struct fs_message *msgs, size_t n,
        const struct fs_chat_extras *x, struct fs_chat_text *r, struct fs_errbuf *e)
{
	struct fs_errbuf why = {""};
	struct walk w = {.c = c, .msgs = msgs, .n = n, .x = x, .r = r, .e = &why};
	size_t i;
	int rc;

	if ((rc = check(c, msgs, n, e)) != FS_OK || (rc = check_tools(c, msgs, n, x, e)) != FS_OK)
		return rc;
	w.own_results = c->family == FS_FAMILY_CHATML && c->tool_open == NULL &&
	                (fs_chat_has_tools(x) || any_call(msgs, n));
	fs_buf_init(&w.json, MAX_RENDERED);
	find_users(&w);
	rc = front(&w);
	for (i = 0; rc == FS_OK && i < n; i++)
		rc = one_message(&w, i);
	if (rc == FS_OK)
		rc = opening(&w);
	fs_buf_finish(&w.json);
	return rc == FS_OK ? rc : fs_fail(e, rc, "%s", why.text[0] != '\0' ? why.text : "messages: too long");
}
