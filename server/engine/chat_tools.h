/*
 * chat_tools: the form in which ChatML models are told of tools, call them and get their results: that of the
 * published templates of Qwen2.5 and Qwen3, which is the one of the Hermes models with another introduction.
 * Pieces of text only; chat_render.c puts them in their places. No state, any thread. Internal to chat.
 */
#ifndef FS_ENGINE_CHAT_TOOLS_H
#define FS_ENGINE_CHAT_TOOLS_H

#include "server/engine/chat.h"

#define FS_CALL_OPEN "<tool_call>"
#define FS_CALL_CLOSE "</tool_call>"

/* Around the lines of the tools, in the system's turn. */
#define FS_TOOLS_HEAD                                                                                        \
	"# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"                   \
	"You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
#define FS_TOOLS_TAIL                                                                                        \
	"\n</tools>\n\nFor each function call, return a json object with function name and arguments "       \
	"within "                                                                                            \
	"<tool_call></tool_call> XML tags:\n<tool_call>\n"                                                   \
	"{\"name\": <function-name>, \"arguments\": <args-json-object>}\n</tool_call>"

/* Of a template that has no place of its own for them. */
#define FS_RESULTS_OPEN "<|im_start|>user"
#define FS_RESULTS_CLOSE "<|im_end|>\n"
#define FS_RESULT_OPEN "\n<tool_response>\n"
#define FS_RESULT_CLOSE "\n</tool_response>"

/* Whether the tools of x go into the prompt; x may be NULL. */
bool fs_chat_has_tools(const struct fs_chat_extras *x);
/* A choice that can not be had, a tool without a name. */
int fs_chat_tools_check(const struct fs_chat_extras *x, struct fs_errbuf *e);
/* Appends tools[i] as one line of JSON. */
int fs_chat_tool_json(const struct fs_chat_extras *x, size_t i, struct fs_buf *out, struct fs_errbuf *e);
/* Appends call k of message i as JSON, what stands between the marks of a call. */
int fs_chat_call_json(
        const struct fs_message *m, size_t i, size_t k, struct fs_buf *out, struct fs_errbuf *e);
/* Appends what follows FS_CALL_OPEN "\n" when a call is required: up to the name, or up to the arguments when
 * only one tool can be meant. Nothing when no call is. */
int fs_chat_opening_json(const struct fs_chat_extras *x, struct fs_buf *out, struct fs_errbuf *e);

#endif
