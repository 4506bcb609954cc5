/*
 * toolcall: the parser of calls in an answer; see engine.h. Any thread, one at a time for each parser. JSON
 * is jansson's business; what is done here is finding where a call ends, since the mark of its end may also
 * stand inside a string of its arguments: a call that breaks off at a mark is tried again at the next one.
 */
#include <stdlib.h>
#include <string.h>

#include "server/engine/chat_tools.h"
#include "server/engine/json_text.h"

#define OPEN_LEN (sizeof(FS_CALL_OPEN) - 1)
#define CLOSE_LEN (sizeof(FS_CALL_CLOSE) - 1)
#define SLICE ((size_t)65536)    /* of a push that is worked on at once */
#define MAX_WHITE ((size_t)4096) /* held back since a call may follow */
#define MAX_TRIES 32             /* marks inside one call */
#define MAX_ARGUMENTS (8 * FS_TOOL_CALL_MAX)

struct fs_tool_parser {
	struct fs_tool_events ev;
	struct fs_buf held;
	bool after_call; /* nothing but white space since the last call */
	bool in_call;    /* then: */
	size_t open_at;  /* of the opening mark in held; white space before it */
	size_t scan;     /* marks were looked for up to here */
	size_t cut;      /* behind the first mark that ended no call; 0 = none */
	int tries;
};

enum outcome { CALL_DONE, CALL_CUT, CALL_WRONG, CALL_NO_MEMORY };

struct fs_tool_parser *fs_tool_parser_create(const struct fs_tool_events *ev)
{
	struct fs_tool_parser *t = calloc(1, sizeof(*t));

	if (t == NULL)
		return NULL;
	t->ev = *ev;
	fs_buf_init(&t->held, FS_TOOL_CALL_MAX + 2 * SLICE);
	return t;
}

void fs_tool_parser_destroy(struct fs_tool_parser *t)
{
	if (t == NULL)
		return;
	fs_buf_finish(&t->held);
	free(t);
}

static bool is_white(uint8_t c)
{
	return c == ' ' || c == '\t' || c == '\r' || c == '\n';
}

static void put_text(struct fs_tool_parser *t, size_t n)
{
	if (n == 0)
		return;
	t->after_call = false;
	if (t->ev.text != NULL)
		t->ev.text(t->ev.arg, (const char *)t->held.data, n);
	fs_buf_consume(&t->held, n);
}

/* ---- one call ---- */

static enum outcome put_call(struct fs_tool_parser *t, const json_t *call)
{
	const char *name = json_string_value(json_object_get(call, "name"));
	const json_t *args = json_object_get(call, "arguments");
	struct fs_buf text;
	int rc;

	if (name == NULL || name[0] == '\0' || (args != NULL && !json_is_object(args)))
		return CALL_WRONG;
	fs_buf_init(&text, MAX_ARGUMENTS);
	rc = args != NULL ? fs_json_text(args, &text) : fs_buf_append_str(&text, "{}");
	if (rc == FS_OK && t->ev.call != NULL)
		t->ev.call(t->ev.arg, name, (const char *)text.data);
	fs_buf_finish(&text);
	return rc == FS_OK ? CALL_DONE : CALL_NO_MEMORY;
}

/* Whether held[from, to) is a call; then it is reported. */
static enum outcome try_call(struct fs_tool_parser *t, size_t from, size_t to)
{
	json_error_t je;
	json_t *v = json_loadb((const char *)t->held.data + from, to - from, 0, &je);
	enum outcome out = CALL_WRONG;

	if (v != NULL)
		out = put_call(t, v);
	else if (json_error_code(&je) == json_error_premature_end_of_input)
		out = CALL_CUT;
	else if (json_error_code(&je) == json_error_out_of_memory)
		out = CALL_NO_MEMORY;
	json_decref(v);
	return out;
}

static void leave_call(struct fs_tool_parser *t, size_t consumed)
{
	fs_buf_consume(&t->held, consumed);
	t->in_call = false;
	t->after_call = true;
}

/* It was none: its beginning is text, what follows is looked at anew. */
static void give_up(struct fs_tool_parser *t, size_t n)
{
	t->in_call = false;
	put_text(t, t->cut > 0 ? t->cut : n);
}

/* ---- the stream ---- */

static bool stands(const struct fs_tool_parser *t, size_t at, const char *mark, size_t len)
{
	return t->held.len - at >= len && memcmp(t->held.data + at, mark, len) == 0;
}

/* The first mark of either kind; held.len when there is none. */
static size_t find_either(const struct fs_tool_parser *t, size_t from, bool *close)
{
	while (from < t->held.len) {
		const uint8_t *at = memchr(t->held.data + from, '<', t->held.len - from);

		if (at == NULL)
			break;
		from = (size_t)(at - t->held.data);
		*close = stands(t, from, FS_CALL_CLOSE, CLOSE_LEN);
		if (*close || stands(t, from, FS_CALL_OPEN, OPEN_LEN))
			return from;
		from++;
	}
	return t->held.len;
}

/* Where a tail begins that may become the mark; held.len when there is none. */
static size_t partial(const struct fs_tool_parser *t, size_t from, const char *mark, size_t len)
{
	size_t at = t->held.len - FS_MIN(t->held.len - from, len - 1);

	while (at < t->held.len && memcmp(t->held.data + at, mark, t->held.len - at) != 0)
		at++;
	return at;
}

/* Back over white space. */
static size_t before_white(const struct fs_tool_parser *t, size_t at)
{
	size_t least = at > MAX_WHITE ? at - MAX_WHITE : 0;

	while (at > least && is_white(t->held.data[at - 1]))
		at--;
	return at;
}

/* All of these return true when there may be more to do. */
static bool in_text(struct fs_tool_parser *t)
{
	const uint8_t *open;
	size_t white = 0, at;

	while (t->after_call && white < t->held.len && is_white(t->held.data[white]))
		white++;
	fs_buf_consume(&t->held, white);
	open = t->held.len > 0 ? memmem(t->held.data, t->held.len, FS_CALL_OPEN, OPEN_LEN) : NULL;
	if (open == NULL) {
		put_text(t, before_white(t, partial(t, 0, FS_CALL_OPEN, OPEN_LEN)));
		return false;
	}
	at = (size_t)(open - t->held.data);
	white = before_white(t, at);
	t->open_at = at - white;
	put_text(t, white);
	t->in_call = true;
	t->scan = t->open_at + OPEN_LEN;
	t->cut = 0;
	t->tries = 0;
	return true;
}

static bool in_call(struct fs_tool_parser *t, int *err)
{
	bool close = false;
	size_t body = t->open_at + OPEN_LEN, at = find_either(t, t->scan, &close),
	       behind = close ? at + CLOSE_LEN : at;
	enum outcome out;

	if (at == t->held.len) {
		t->scan = FS_MAX(t->scan, at - FS_MIN(at, CLOSE_LEN - 1));
		if (at - body <= FS_TOOL_CALL_MAX)
			return false;
		give_up(t, body);
		return true;
	}
	out = ++t->tries <= MAX_TRIES ? try_call(t, body, at) : CALL_WRONG;
	if (out == CALL_DONE) {
		leave_call(t, behind);
	} else if (out == CALL_WRONG) {
		give_up(t, behind);
	} else if (out == CALL_NO_MEMORY) {
		*err = FS_ENOMEM;
		return false;
	} else { /* the mark may lie in a string */
		t->cut = t->cut > 0 ? t->cut : behind;
		t->scan = close ? behind : at + OPEN_LEN;
	}
	return true;
}

static int work(struct fs_tool_parser *t)
{
	int err = FS_OK;

	while (err == FS_OK && (t->in_call ? in_call(t, &err) : in_text(t)))
		;
	return err;
}

int fs_tool_parser_push(struct fs_tool_parser *t, const char *utf8, size_t n)
{
	int err = FS_OK;

	while (n > 0 && err == FS_OK) {
		size_t some = FS_MIN(n, SLICE);

		/* Text goes out in whole characters: a slice ends in front of one. */
		while (some < n && some > 1 && ((uint8_t)utf8[some] & 0xc0) == 0x80)
			some--;
		err = fs_buf_append(&t->held, utf8, some);
		if (err == FS_OK)
			err = work(t);
		utf8 += some;
		n -= some;
	}
	return err;
}

int fs_tool_parser_end(struct fs_tool_parser *t)
{
	int err = FS_OK;

	while (t->in_call && err == FS_OK) {
		size_t body = t->open_at + OPEN_LEN;
		enum outcome out = try_call(t, body, partial(t, body, FS_CALL_CLOSE, CLOSE_LEN));

		if (out == CALL_DONE)
			leave_call(t, t->held.len);
		else if (out == CALL_NO_MEMORY)
			err = FS_ENOMEM;
		else
			give_up(t, body);
		if (err == FS_OK)
			err = work(t);
	}
	if (err == FS_OK)
		put_text(t, t->held.len);
	return err;
}
