/* Fuzz target: a chat completion request's JSON, and data: URLs inside it. What parses keeps its promises. */
#include "server/api/openai.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
	static struct fs_api api;
	if (!api.service) {
		struct fs_service_opts o = {
		        .workers = 1, .queue_depth = 1, .max_pictures = 4, .picture = {.max_bytes = 4096}};
		FS_ASSERT(fs_service_create(&o, &api.service, NULL) == FS_OK);
		fs_gen_params_default(&api.sampling);
	}
	struct api_call call = {.api = &api, .d = &api_openai_chat};
	struct fs_refusal why;
	const struct fs_chat *chat = &call.chat;
	if (api_call_parse(&call, (const char *)data, n, NULL, &why)) {
		FS_ASSERT(why.status == 400 || why.status == 500);
	} else {
		FS_ASSERT(chat->n_messages > 0 && chat->n_pictures <= 4 && chat->gen.n_stops <= FS_MAX_STOPS);
		for (size_t i = 0; i < chat->n_pictures; i++)
			FS_ASSERT(chat->pictures[i].n > 0 && chat->pictures[i].n <= 4096);
	}
	api_call_finish(&call);
	return 0;
}
