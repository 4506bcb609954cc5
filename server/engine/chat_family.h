/*
 * chat_family: a chat template as data, the same for all families: what stands around the messages of each
 * role. Filled by chat.c, written out by chat_render.c. Internal to chat.
 */
#ifndef FS_ENGINE_CHAT_FAMILY_H
#define FS_ENGINE_CHAT_FAMILY_H

#include "server/engine/chat.h"

enum fs_family { FS_FAMILY_CHATML, FS_FAMILY_LLAMA3, FS_FAMILY_MISTRAL, FS_FAMILY_GEMMA, FS_FAMILY_VICUNA };
#define FS_N_FAMILIES 5
#define FS_N_ROLES 4

enum fs_system_place {
	FS_SYSTEM_TURN,       /* a message of its own, anywhere */
	FS_SYSTEM_LEAD,       /* a message of its own, at the front only */
	FS_SYSTEM_FIRST_USER, /* in front of the first user message's text */
	FS_SYSTEM_LAST_USER,  /* in front of the last one's */
};

struct fs_chat_turn {
	char *pre, *post; /* NULL pre: the family has no such role */
	bool trim;        /* white space around the content goes away */
};
/* All strings are owned, NUL-terminated and may hold control tokens. */
struct fs_chat {
	enum fs_family family;
	const struct fs_tok *tok;
	bool bos;                             /* the text begins with the BOS token's */
	struct fs_chat_turn turn[FS_N_ROLES]; /* by enum fs_role */
	char *tool_open, *tool_close;         /* around neighbouring tool messages; NULL = nothing */
	char *opening;                        /* of the assistant's turn */
	char *thought;                        /* what follows it, unless a call is required; NULL = nothing */
	enum fs_system_place system_place;
	char *system_pre, *system_post; /* around a system text that stands in a user message */
	char *lead;           /* in front of the first system text, or the default one; NULL = nothing */
	char *default_system; /* when the first message is no system message; NULL = nothing */
	bool drop_thoughts;   /* earlier answers lose what comes before "</think>" */
	bool pictures;        /* the vocabulary has <|vision_start|> and <|vision_end|> */
};

#endif
