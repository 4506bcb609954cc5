/* OpenAI's chat completions as a dialect of call.h. */
#ifndef FS_SERVER_API_OPENAI_H
#define FS_SERVER_API_OPENAI_H

#include "server/api/call.h"

extern const struct api_dialect api_openai_chat;

int api_openai_parse_chat(struct api_call *c, const json_t *root, struct fs_refusal *why);

#endif
