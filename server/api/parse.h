/*
 * parse: what the readers of all APIs' requests share: checked access to members, text, pictures in their
 * forms. Every function names the member that is wrong and returns FS_EINVAL with the refusal filled; an
 * absent member or null leaves *out as it is. Members that are unknown are passed over, as the clients of
 * newer versions of those APIs expect; known ones that this server can not honour are refused.
 */
#ifndef FS_SERVER_API_PARSE_H
#define FS_SERVER_API_PARSE_H

#include "server/api/internal.h"

#define API_MAX_MESSAGES 4096
#define API_MAX_PARTS 4096

struct api_reader {
	const struct fs_api *api;
	struct fs_chat *chat; /* finished by the caller, on failure too */
	struct fs_refusal *why;
	size_t pictures_cap, messages_cap; /* private */
};

/* "<param>" <text>. */
int api_bad(struct api_reader *rd, const char *param, const char *fmt, ...) FS_PRINTF(3, 4);
int api_no_memory(struct api_reader *rd);

int api_get_number(
        struct api_reader *rd, const json_t *o, const char *key, double min, double max, float *out);
int api_get_int(
        struct api_reader *rd, const json_t *o, const char *key, int64_t min, int64_t max, int64_t *out);
/* The most tokens of an answer. -1, which llama.cpp's clients send: what fits, 0 in *out. */
int api_get_max_tokens(struct api_reader *rd, const json_t *o, const char *key, int64_t *out);
int api_get_bool(struct api_reader *rd, const json_t *o, const char *key, const char *param, bool *out);
/* temperature, top_p, top_k, min_p, penalties, seed: the names that all APIs share. */
int api_get_sampling(struct api_reader *rd, const json_t *root);
/* A string or an array of strings under `key`, each of 1 to 256 bytes. */
int api_get_stops(struct api_reader *rd, const json_t *root, const char *key);
/* "timeout_s": seconds. */
int api_get_timeout(struct api_reader *rd, const json_t *root, int64_t *out);

/* One more message, with room for n_parts. */
int api_add_message(struct api_reader *rd, enum fs_role role, size_t n_parts, struct fs_chat_message **out);
/* A message's next part; there must be room. */
int api_add_text(struct api_reader *rd, struct fs_chat_message *m, const char *utf8, size_t n);
/* url: "data:", or http(s) when the server fetches. detail: as OpenAI's member, NULL or null = none. */
int api_add_picture_url(struct api_reader *rd, struct fs_chat_message *m, const json_t *url,
        const json_t *detail, const char *param);
int api_add_picture_base64(
        struct api_reader *rd, struct fs_chat_message *m, const json_t *data, const char *param);

/* One more tool from the members name, description and schema_key of o. */
int api_add_tool(struct api_reader *rd, const json_t *o, const char *schema_key, const char *where);
/* One more call of an assistant's message. arguments: malloc'd JSON text of an object, taken over on failure
 * too; NULL: memory was out. */
int api_add_call(struct api_reader *rd, struct fs_chat_message *m, const json_t *name, const char *name_param,
        char *arguments);
/* The answer must call this tool, which must be among those added. */
int api_choose_tool(struct api_reader *rd, const json_t *name, const char *param);
/* At the end: tools and choice fit together, and the model takes tools. */
int api_check_tools(struct api_reader *rd);

/* A copy of a JSON string; NULL when memory is out. Strings with a NUL inside are cut there. */
char *api_strdup(const json_t *s);

#endif
