/* Fuzz target: the first byte chooses an API, the rest is a request's JSON, with data: and file: URLs inside
 * it. What parses keeps its promises. */
#include "server/api/anthropic.h"
#include "server/api/openai.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static const struct api_dialect *const dialects[] = {&api_openai_chat, &api_openai_completions,
        &api_openai_responses, &api_anthropic_messages, &api_anthropic_count};
#define MAX_PICTURES 4
#define MAX_BYTES 4096

static void check_messages(const struct fs_chat *chat)
{
	for (size_t i = 0; i < chat->n_messages; i++) {
		const struct fs_chat_message *m = &chat->messages[i];
		for (size_t j = 0; j < m->n_parts; j++)
			FS_ASSERT(m->parts[j].text || m->parts[j].picture < chat->n_pictures);
		for (size_t j = 0; j < m->n_calls; j++)
			FS_ASSERT(
			        m->role == FS_ROLE_ASSISTANT && m->calls[j].name[0] && m->calls[j].arguments);
	}
	for (size_t i = 0; i < chat->n_pictures; i++) {
		const struct fs_picture *p = &chat->pictures[i];
		FS_ASSERT(p->path ? p->path[0] == '/' && !p->bytes : p->n > 0 && p->n <= MAX_BYTES);
	}
}

static void check(const struct fs_chat *chat)
{
	int kinds = (chat->n_messages > 0) + (chat->text != NULL) + (chat->ids != NULL);
	FS_ASSERT(kinds == 1 && chat->n_pictures <= MAX_PICTURES && chat->gen.n_stops <= FS_MAX_STOPS);
	FS_ASSERT(chat->gen.n_top_logprobs >= 0 && chat->gen.n_top_logprobs <= FS_MAX_TOP_LOGPROBS);
	FS_ASSERT((chat->choice == FS_TOOLS_NAMED) == (chat->named != NULL));
	check_messages(chat);
	for (size_t i = 0; i < chat->n_tools; i++)
		FS_ASSERT(chat->tools[i].name[0]);
	for (size_t i = 0; i < chat->n_ids; i++)
		FS_ASSERT(chat->ids[i] >= 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
	static const char *const folders[] = {"/nonexistent"};
	static struct fs_api api;
	if (!api.service) {
		struct fs_service_opts o = {.workers = 1,
		        .queue_depth = 1,
		        .max_pictures = MAX_PICTURES,
		        .picture = {.max_bytes = MAX_BYTES},
		        .picture_folders = folders,
		        .n_picture_folders = FS_ARRAY_LEN(folders)};
		FS_ASSERT(fs_service_create(&o, &api.service, NULL) == FS_OK);
		fs_gen_params_default(&api.sampling);
	}
	if (n == 0)
		return 0;
	struct api_call call = {.api = &api, .d = dialects[data[0] % FS_ARRAY_LEN(dialects)]};
	struct fs_refusal why;
	if (api_call_parse(&call, (const char *)data + 1, n - 1, NULL, &why))
		FS_ASSERT(why.status == 400 || why.status == 500);
	else
		check(&call.chat);
	api_call_finish(&call);
	return 0;
}
