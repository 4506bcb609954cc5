/* Tools in OpenAI's requests: what the model may call, what it must, and what it has called. */
#include "server/api/openai.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int add_tool(struct api_reader *rd, const json_t *o, bool wrapped, size_t i)
{
	char where[48], param[64];
	snprintf(where, sizeof(where), "tools[%zu]", i);
	snprintf(param, sizeof(param), "%s.type", where);
	if (!json_is_object(o))
		return api_bad(rd, where, "must be an object");
	const char *type = json_string_value(json_object_get(o, "type"));
	if (!type || strcmp(type, "function") != 0)
		return api_bad(rd, param,
		        "must be \"function\": this server hands calls to its client and has no tools of its "
		        "own");
	if (!wrapped)
		return api_add_tool(rd, o, "parameters", where);
	const json_t *f = json_object_get(o, "function");
	snprintf(param, sizeof(param), "%s.function", where);
	if (!json_is_object(f))
		return api_bad(rd, param, "must be an object");
	return api_add_tool(rd, f, "parameters", param);
}

static int choose_named(struct api_reader *rd, const json_t *v, bool wrapped)
{
	const char *type = json_string_value(json_object_get(v, "type"));
	if (!type || strcmp(type, "function") != 0)
		return api_bad(rd, "tool_choice.type", "must be \"function\"");
	if (!wrapped)
		return api_choose_tool(rd, json_object_get(v, "name"), "tool_choice.name");
	return api_choose_tool(
	        rd, json_object_get(json_object_get(v, "function"), "name"), "tool_choice.function.name");
}

static int get_choice(struct api_reader *rd, const json_t *root, bool wrapped)
{
	static const struct {
		const char *name;
		enum fs_tool_choice choice;
	} words[] = {{"auto", FS_TOOLS_AUTO}, {"none", FS_TOOLS_NONE}, {"required", FS_TOOLS_REQUIRED}};
	const json_t *v = json_object_get(root, "tool_choice");
	if (!v || json_is_null(v))
		return FS_OK;
	if (json_is_object(v))
		return choose_named(rd, v, wrapped);
	for (size_t i = 0; json_is_string(v) && i < FS_ARRAY_LEN(words); i++) {
		if (strcmp(words[i].name, json_string_value(v)) == 0) {
			rd->chat->choice = words[i].choice;
			return FS_OK;
		}
	}
	return api_bad(rd, "tool_choice",
	        "must be \"auto\", \"none\", \"required\" or an object that names a function");
}

int api_openai_get_tools(struct api_reader *rd, const json_t *root, bool wrapped, bool *one_call)
{
	const json_t *tools = json_object_get(root, "tools");
	bool parallel = true;
	int rc = FS_OK;
	if (tools && !json_is_null(tools) && !json_is_array(tools))
		return api_bad(rd, "tools", "must be an array");
	for (size_t i = 0; !rc && i < json_array_size(tools); i++)
		rc = add_tool(rd, json_array_get(tools, i), wrapped, i);
	if (!rc)
		rc = get_choice(rd, root, wrapped);
	if (!rc)
		rc = api_get_bool(rd, root, "parallel_tool_calls", "parallel_tool_calls", &parallel);
	*one_call = !parallel;
	return rc;
}

/* Models are known to write a call without arguments as "". */
static int get_arguments(struct api_reader *rd, const json_t *v, const char *param, char **out)
{
	const char *text = json_string_value(v);
	if (!text || strlen(text) != json_string_length(v))
		return api_bad(rd, param, "must be a string");
	if (text[strspn(text, " \t\r\n")] == '\0') {
		*out = strdup("{}");
		return *out ? FS_OK : api_no_memory(rd);
	}
	json_t *o = json_loads(text, 0, NULL);
	bool good = json_is_object(o);
	json_decref(o);
	if (!good)
		return api_bad(rd, param, "must be the JSON text of an object");
	*out = strdup(text);
	return *out ? FS_OK : api_no_memory(rd);
}

int api_openai_add_call(struct api_reader *rd, struct fs_chat_message *m, const json_t *o, const char *where)
{
	char param[96], *arguments = NULL;
	snprintf(param, sizeof(param), "%s.arguments", where);
	int rc = get_arguments(rd, json_object_get(o, "arguments"), param, &arguments);
	if (rc)
		return rc;
	snprintf(param, sizeof(param), "%s.name", where);
	return api_add_call(rd, m, json_object_get(o, "name"), param, arguments);
}
