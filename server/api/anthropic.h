/*
 * Anthropic's Messages API as dialects of call.h. Reference: Anthropic's API, "Create a Message", "Count
 * Message tokens", "Streaming messages" and "Errors".
 */
#ifndef FS_SERVER_API_ANTHROPIC_H
#define FS_SERVER_API_ANTHROPIC_H

#include "server/api/call.h"

/* What a request keeps beside its chat: api_call.own. */
struct api_anthropic {
	bool one_call; /* tool_choice.disable_parallel_tool_use */
	/* the stream so far */
	bool started, in_text;
	int block; /* the one that is open, or comes next */
	int32_t prompt, reused;
};

extern const struct api_dialect api_anthropic_messages, api_anthropic_count;

/* A request to create a message, and one to count its tokens, which needs no max_tokens. Both fill c->own. */
int api_anthropic_parse(struct api_call *c, const json_t *root, struct fs_refusal *why);
int api_anthropic_parse_count(struct api_call *c, const json_t *root, struct fs_refusal *why);

#endif
