/* What a chat completion keeps beside its call. */
#ifndef FS_SERVER_API_OPENAI_CHAT_H
#define FS_SERVER_API_OPENAI_CHAT_H

#include <stdbool.h>
#include <stdint.h>

struct api_openai_chat_own {
	bool one_call; /* "parallel_tool_calls": false */
	bool progress; /* "return_progress" */
	int64_t began; /* monotonic: when the prompt's turn came */
};

#endif
