/* Tools, their calls and the choice among them, as far as all APIs share them. */
#include "server/api/parse.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_TOOLS 1024
#define MAX_NAME 128

/* A name goes into the prompt as it is, and comes back in the answer. */
static int get_name(struct api_reader *rd, const json_t *name, const char *param, char **out)
{
	size_t n = json_string_length(name);
	if (!json_is_string(name) || n == 0 || n > MAX_NAME || strlen(json_string_value(name)) != n)
		return api_bad(rd, param, "must be a string of 1 to %d bytes", MAX_NAME);
	*out = api_strdup(name);
	return *out ? FS_OK : api_no_memory(rd);
}

static int get_schema(struct api_reader *rd, const json_t *schema, const char *param, char **out)
{
	if (!schema || json_is_null(schema))
		return FS_OK;
	if (!json_is_object(schema))
		return api_bad(rd, param, "must be an object, a JSON Schema");
	*out = json_dumps(schema, JSON_COMPACT);
	return *out ? FS_OK : api_no_memory(rd);
}

int api_add_tool(struct api_reader *rd, const json_t *o, const char *schema_key, const char *where)
{
	struct fs_chat *c = rd->chat;
	char param[96];
	if (c->n_tools == MAX_TOOLS)
		return api_bad(rd, "tools", "holds more than %d tools", MAX_TOOLS);
	struct fs_chat_tool *tools = realloc(c->tools, (c->n_tools + 1) * sizeof(*tools));
	if (!tools)
		return api_no_memory(rd);
	c->tools = tools;
	struct fs_chat_tool *t = &tools[c->n_tools++];
	*t = (struct fs_chat_tool){0};
	snprintf(param, sizeof(param), "%s.name", where);
	int rc = get_name(rd, json_object_get(o, "name"), param, &t->name);
	const json_t *about = json_object_get(o, "description");
	snprintf(param, sizeof(param), "%s.description", where);
	if (!rc && about && !json_is_null(about)) {
		if (!json_is_string(about))
			return api_bad(rd, param, "must be a string");
		t->description = api_strdup(about);
		if (!t->description)
			return api_no_memory(rd);
	}
	snprintf(param, sizeof(param), "%s.%s", where, schema_key);
	if (!rc)
		rc = get_schema(rd, json_object_get(o, schema_key), param, &t->parameters);
	return rc;
}

int api_add_call(struct api_reader *rd, struct fs_chat_message *m, const json_t *name, const char *name_param,
        char *arguments)
{
	struct fs_chat_call *calls = realloc(m->calls, (m->n_calls + 1) * sizeof(*calls));
	if (!calls || !arguments) {
		m->calls = calls ? calls : m->calls;
		free(arguments);
		return api_no_memory(rd);
	}
	m->calls = calls;
	calls[m->n_calls] = (struct fs_chat_call){.arguments = arguments};
	return get_name(rd, name, name_param, &calls[m->n_calls++].name);
}

int api_choose_tool(struct api_reader *rd, const json_t *name, const char *param)
{
	struct fs_chat *c = rd->chat;
	int rc = get_name(rd, name, param, &c->named);
	c->choice = FS_TOOLS_NAMED;
	for (size_t i = 0; !rc && i < c->n_tools; i++)
		if (strcmp(c->tools[i].name, c->named) == 0)
			return FS_OK;
	return rc ? rc : api_bad(rd, param, "names no tool of this request");
}

/* Calls of earlier answers count: a template without tools has no form for them either. */
static const char *first_tool(const struct fs_chat *c)
{
	for (size_t i = 0; i < c->n_messages; i++)
		if (c->messages[i].n_calls > 0)
			return "messages";
	return c->n_tools > 0 && c->choice != FS_TOOLS_NONE ? "tools" : NULL;
}

int api_check_tools(struct api_reader *rd)
{
	const struct fs_chat *c = rd->chat;
	const struct fs_engine *en = fs_service_opts(rd->api->service)->engine;
	const char *param = first_tool(c);
	if (c->n_tools == 0 && (c->choice == FS_TOOLS_REQUIRED || c->choice == FS_TOOLS_NAMED))
		return api_bad(rd, "tool_choice", "asks for a call, but the request has no \"tools\"");
	if (!param || !en || fs_engine_info(en)->takes_tools)
		return FS_OK;
	return api_bad(rd, param,
	        "holds tools, and the chat template of this server's model (%s) has no form for them",
	        fs_engine_info(en)->template_name);
}
