/* What a response keeps beside its call; see responses.c. */
#ifndef FS_SERVER_API_RESPONSES_H
#define FS_SERVER_API_RESPONSES_H

#include "common/base/base.h"

#include <jansson.h>

struct api_response_own {
	bool one_call; /* "parallel_tool_calls": false */
	/* Members of the request that the answer repeats; NULL = null or the default. */
	json_t *instructions, *metadata, *tools, *tool_choice;

	/* Streamed: */
	json_int_t sequence; /* of the next event */
	json_t *output;      /* the items that are finished */
	struct fs_buf text;  /* of the message that is open */
	char message_id[48]; /* of the same; "" = none is open */
};

#endif
