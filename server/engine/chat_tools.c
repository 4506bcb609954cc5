/* chat_tools: see chat_tools.h. JSON of clients is parsed and written anew, so that the model sees the
 * spacing that it was trained on whatever the client sent. */
#include "server/engine/chat_tools.h"

#include <string.h>

#include "server/engine/json_text.h"

bool fs_chat_has_tools(const struct fs_chat_extras *x)
{
	return x != NULL && x->n_tools > 0 && x->choice != FS_TOOLS_NONE;
}

/* The one tool that a required call can be of, NULL when there are several. */
static const struct fs_tool *only_tool(const struct fs_chat_extras *x)
{
	if (x->choice != FS_TOOLS_NAMED)
		return x->n_tools == 1 ? &x->tools[0] : NULL;
	for (size_t i = 0; i < x->n_tools; i++)
		if (x->named != NULL && strcmp(x->tools[i].name, x->named) == 0)
			return &x->tools[i];
	return NULL;
}

int fs_chat_tools_check(const struct fs_chat_extras *x, struct fs_errbuf *e)
{
	if (x == NULL)
		return FS_OK;
	for (size_t i = 0; i < x->n_tools; i++)
		if (x->tools[i].name == NULL || x->tools[i].name[0] == '\0')
			return fs_fail(e, FS_EINVAL, "tools[%zu].name: there is none", i);
	if (x->choice == FS_TOOLS_REQUIRED && x->n_tools == 0)
		return fs_fail(e, FS_EINVAL, "tool_choice: a call is required, and there are no tools");
	if (x->choice == FS_TOOLS_NAMED && only_tool(x) == NULL)
		return fs_fail(e, FS_EINVAL, "tool_choice: no tool has the name \"%.64s\"",
		        x->named != NULL ? x->named : "");
	return FS_OK;
}

/* Takes the object over. */
static int put(json_t *v, struct fs_buf *out, struct fs_errbuf *e)
{
	int rc = v != NULL ? fs_json_text(v, out) : FS_ENOMEM;

	json_decref(v);
	return rc == FS_OK ? FS_OK : fs_fail(e, rc, "tools: too long");
}

int fs_chat_tool_json(const struct fs_chat_extras *x, size_t i, struct fs_buf *out, struct fs_errbuf *e)
{
	const struct fs_tool *t = &x->tools[i];
	json_t *f = json_pack("{s:s}", "name", t->name), *params, *v;
	json_error_t je;

	if (f == NULL)
		return fs_fail(e, FS_EINVAL, "tools[%zu].name: not UTF-8", i);
	if (t->description != NULL &&
	        json_object_set_new(f, "description", json_string(t->description)) != 0) {
		json_decref(f);
		return fs_fail(e, FS_EINVAL, "tools[%zu].description: not UTF-8", i);
	}
	if (t->parameters != NULL) {
		params = json_loads(t->parameters, JSON_DECODE_ANY, &je);
		if (!json_is_object(params)) {
			fs_fail(e, FS_EINVAL, "tools[%zu].parameters: %s", i,
			        params == NULL ? je.text : "it must be an object");
			json_decref(params);
			json_decref(f);
			return FS_EINVAL;
		}
		json_object_set_new(f, "parameters", params);
	}
	v = json_pack("{s:s}", "type", "function");
	if (json_object_set_new(v, "function", f) != 0) {
		json_decref(v);
		v = NULL;
	}
	return put(v, out, e);
}

static bool is_blank(const char *s)
{
	return s == NULL || s[strspn(s, " \t\r\n")] == '\0';
}

int fs_chat_call_json(const struct fs_message *m, size_t i, size_t k, struct fs_buf *out, struct fs_errbuf *e)
{
	const struct fs_tool_call *c = &m->calls[k];
	json_t *args, *v;
	json_error_t je;

	if (c->name == NULL || c->name[0] == '\0')
		return fs_fail(e, FS_EINVAL, "messages[%zu].tool_calls[%zu]: it has no name", i, k);
	args = is_blank(c->arguments) ? json_object() : json_loads(c->arguments, JSON_DECODE_ANY, &je);
	if (!json_is_object(args)) {
		fs_fail(e, FS_EINVAL, "messages[%zu].tool_calls[%zu]: arguments are no JSON object%s%s", i, k,
		        args == NULL ? ": " : "", args == NULL ? je.text : "");
		json_decref(args);
		return FS_EINVAL;
	}
	v = json_pack("{s:s}", "name", c->name);
	if (json_object_set_new(v, "arguments", args) != 0) {
		json_decref(v);
		return fs_fail(e, FS_EINVAL, "messages[%zu].tool_calls[%zu]: the name is not UTF-8", i, k);
	}
	return put(v, out, e);
}

int fs_chat_opening_json(const struct fs_chat_extras *x, struct fs_buf *out, struct fs_errbuf *e)
{
	const struct fs_tool *one;
	int rc;

	if (x == NULL || (x->choice != FS_TOOLS_REQUIRED && x->choice != FS_TOOLS_NAMED))
		return FS_OK;
	one = only_tool(x);
	if (one == NULL)
		rc = fs_buf_append_str(out, "{\"name\": \"");
	else if ((rc = fs_buf_append_str(out, "{\"name\": ")) == FS_OK &&
	         (rc = put(json_string(one->name), out, e)) == FS_OK)
		/* Without the space behind the colon: it is part of the next token. */
		rc = fs_buf_append_str(out, ", \"arguments\":");
	return rc == FS_OK ? FS_OK : fs_fail(e, rc, "tools: too long");
}
