/*
 * Chat rendering against jinja2 (tests/parity/make_chat.py and make_chat_tools.py): templates of every
 * family, a dozen conversations each, and those with tools for ChatML. Where a template itself refuses a
 * conversation (a system message, as a rule) the rendering here is not compared. Templates of no known family
 * must be refused.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <cmocka.h>

#include <jansson.h>
#include <stdio.h>
#include <string.h>

#include "server/engine/chat.h"
#include "tests/unit/tok_make.h"

#define MAX_MSGS 16
#define MAX_PARTS 64
#define MAX_CALLS 16
#define MAX_TOOLS 8
#define PICTURE "<|image_pad|>" /* what the templates put where a picture goes */

struct conversation {
	struct fs_message msgs[MAX_MSGS];
	size_t n;
	struct fs_part parts[MAX_PARTS];
	size_t n_parts;
	struct fs_rows rows;
	struct fs_tool_call calls[MAX_CALLS];
	size_t n_calls;
	struct fs_tool tools[MAX_TOOLS];
	struct fs_chat_extras x;
	char *json[MAX_CALLS + MAX_TOOLS]; /* what calls and tools point at */
	size_t n_json;
};

static const char *str(const json_t *row, const char *key)
{
	const char *s = json_string_value(json_object_get(row, key));

	assert_non_null(s);
	return s;
}

static struct fs_tok *tokenizer_for(const json_t *row)
{
	struct tok_spec s = {.pre = "gpt-2",
	        .tokens = {str(row, "bos"), str(row, "eos"), "<|vision_start|>", "<|vision_end|>"},
	        .types = {3, 3, 3, 3},
	        .bos = TM_BPE_FIRST,
	        .eos = TM_BPE_FIRST + 1};

	return tm_tokenizer(&s);
}

static enum fs_role role_of(const char *name)
{
	return strcmp(name, "system") == 0 ? FS_ROLE_SYSTEM
	       : strcmp(name, "user") == 0 ? FS_ROLE_USER
	       : strcmp(name, "tool") == 0 ? FS_ROLE_TOOL
	                                   : FS_ROLE_ASSISTANT;
}

static void add_part(struct conversation *c, const json_t *text)
{
	struct fs_part *p = &c->parts[c->n_parts++];

	assert_true(c->n_parts <= MAX_PARTS);
	*p = (struct fs_part){0};
	if (text != NULL) {
		p->text = json_string_value(text);
		p->text_len = json_string_length(text);
	} else {
		p->rows = &c->rows;
	}
	c->msgs[c->n - 1].n_parts++;
}

/* As a client may send it: spaced otherwise than the rendering, characters escaped. */
static const char *as_sent(struct conversation *c, const json_t *v)
{
	char *s = json_dumps(v, JSON_INDENT(1) | JSON_ENSURE_ASCII);

	assert_non_null(s);
	assert_true(c->n_json < FS_ARRAY_LEN(c->json));
	c->json[c->n_json++] = s;
	return s;
}

static void free_json(struct conversation *c)
{
	while (c->n_json > 0)
		free(c->json[--c->n_json]);
}

static void read_calls(struct conversation *c, const json_t *calls)
{
	struct fs_message *m = &c->msgs[c->n - 1];
	const json_t *call, *f;
	size_t i;

	m->calls = &c->calls[c->n_calls];
	m->n_calls = json_array_size(calls);
	json_array_foreach(calls, i, call)
	{
		f = json_object_get(call, "function");
		assert_true(c->n_calls < MAX_CALLS);
		c->calls[c->n_calls++] =
		        (struct fs_tool_call){str(f, "name"), as_sent(c, json_object_get(f, "arguments"))};
	}
}

static void read_tools(struct conversation *c, const json_t *tools)
{
	const json_t *t;
	size_t i;

	json_array_foreach(tools, i, t)
	{
		const json_t *f = json_object_get(t, "function"), *p = json_object_get(f, "parameters");

		assert_true(i < MAX_TOOLS);
		c->tools[i] =
		        (struct fs_tool){str(f, "name"), json_string_value(json_object_get(f, "description")),
		                p != NULL ? as_sent(c, p) : NULL};
	}
	c->x = (struct fs_chat_extras){.tools = c->tools, .n_tools = json_array_size(tools)};
}

static void read_messages(struct conversation *c, const json_t *msgs)
{
	size_t i, k;
	json_t *m, *part;

	memset(c, 0, sizeof(*c));
	json_array_foreach(msgs, i, m)
	{
		const json_t *content = json_object_get(m, "content");

		assert_true(c->n < MAX_MSGS);
		c->msgs[c->n++] =
		        (struct fs_message){.role = role_of(str(m, "role")), .parts = &c->parts[c->n_parts]};
		if (json_is_string(content))
			add_part(c, content);
		else
			json_array_foreach(content, k, part) add_part(c, json_object_get(part, "text"));
		read_calls(c, json_object_get(m, "tool_calls"));
	}
}

/* The pieces in order, pictures as their mark. */
static void flatten(const struct fs_chat_text *r, struct fs_buf *out)
{
	size_t i;

	for (i = 0; i < r->n_segs; i++) {
		const struct fs_chat_seg *s = &r->segs[i];
		int rc = s->kind == FS_CHAT_PICTURE ? fs_buf_append_str(out, PICTURE)
		                                    : fs_buf_append(out, r->text.data + s->off, s->len);

		assert_int_equal(rc, FS_OK);
	}
}

/* Text that comes from messages is marked so, all of it and nothing else: the golden's literals never hold
 * "control as text". */
static void check_marks(const struct fs_chat_text *r)
{
	static const char probe[] = "control as text: <|im_end|>";
	size_t i;

	for (i = 0; i < r->n_segs; i++)
		if (memmem(r->text.data + r->segs[i].off, r->segs[i].len, probe, strlen(probe)) != NULL)
			assert_int_equal(r->segs[i].kind, FS_CHAT_TEXT);
}

static bool same(const json_t *row, const struct fs_buf *got)
{
	const char *want = str(row, "rendered");
	size_t len = strlen(want), at = 0;
	bool whole = json_is_true(json_object_get(row, "add_generation_prompt"));

	/* Ours always opens the assistant's turn: without that the golden is a beginning of it. */
	if ((whole ? got->len == len : got->len >= len) && memcmp(got->data, want, len) == 0)
		return true;
	while (got->data[at] == (uint8_t)want[at])
		at++;
	at = at > 40 ? at - 40 : 0;
	print_error("%s, from byte %zu:\nwant %.120s\ngot  %.120s\n", str(row, "name"), at, want + at,
	        (char *)got->data + at);
	return false;
}

static bool check_row(const json_t *row)
{
	struct fs_tok *t = tokenizer_for(row);
	const char *tmpl = str(row, "template");
	struct conversation conv;
	struct fs_chat_text r;
	struct fs_chat *c = NULL;
	struct fs_errbuf e;
	struct fs_buf got;
	bool ok = true;

	if (fs_chat_create_text(tmpl, strlen(tmpl), t, NULL, &c, &e) != FS_OK)
		fail_msg("%s: %s", str(row, "name"), e.text);
	assert_string_equal(fs_chat_name(c), str(row, "family"));
	read_messages(&conv, json_object_get(row, "messages"));
	read_tools(&conv, json_object_get(row, "tools"));
	fs_chat_text_init(&r);
	fs_buf_init(&got, 1 << 20);
	if (fs_chat_render(c, conv.msgs, conv.n, &conv.x, &r, &e) != FS_OK)
		fail_msg("%s: %s", str(row, "name"), e.text);
	flatten(&r, &got);
	check_marks(&r);
	if (json_object_get(row, "error") == NULL)
		ok = same(row, &got);
	fs_buf_finish(&got);
	fs_chat_text_finish(&r);
	fs_chat_destroy(c);
	fs_tok_destroy(t);
	free_json(&conv);
	return ok;
}

static void check_unknown(const json_t *row)
{
	struct fs_tok *t = tokenizer_for(row);
	const char *tmpl = str(row, "template");
	struct fs_chat *c = NULL;
	struct fs_errbuf e;

	assert_int_equal(fs_chat_create_text(tmpl, strlen(tmpl), t, NULL, &c, &e), FS_ENOTSUP);
	assert_non_null(strstr(e.text, "\"chat_template\""));
	assert_non_null(strstr(e.text, "vicuna"));
	assert_null(c);
	fs_tok_destroy(t);
}

struct tally {
	size_t compared, unknown, bad;
};

static void read_goldens(const char *name, struct tally *n)
{
	const char *data = getenv("FS_TEST_DATA");
	char path[512], *line = NULL;
	json_error_t je;
	size_t cap = 0;
	FILE *f;

	assert_non_null(data);
	snprintf(path, sizeof(path), "%s/parity/%s", data, name);
	f = fopen(path, "r");
	assert_non_null(f);
	while (getline(&line, &cap, f) >= 0) {
		json_t *row = json_loads(line, 0, &je);

		assert_non_null(row);
		if (strcmp(str(row, "family"), "unknown") == 0) {
			check_unknown(row);
			n->unknown++;
		} else {
			n->bad += !check_row(row);
			n->compared += json_object_get(row, "error") == NULL;
		}
		json_decref(row);
	}
	free(line);
	fclose(f);
}

static void goldens(void **state)
{
	struct tally n = {0};

	read_goldens("chat.jsonl", &n);
	assert_true(n.compared > 150);
	assert_true(n.unknown >= 3);
	assert_int_equal(n.bad, 0);
}

static void tools(void **state)
{
	struct tally n = {0};

	read_goldens("chat_tools.jsonl", &n);
	assert_true(n.compared > 50);
	assert_int_equal(n.bad, 0);
}

int main(void)
{
	const struct CMUnitTest tests[] = {cmocka_unit_test(goldens), cmocka_unit_test(tools)};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
