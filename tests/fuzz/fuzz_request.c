/* Fuzz target: a chat completion request's JSON, and data: URLs inside it. What parses keeps its promises. */
#include "server/api/api.h"

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
	struct fs_openai_chat chat;
	struct fs_refusal why;
	if (fs_openai_parse((const char *)data, n, &api, &chat, &why)) {
		FS_ASSERT(why.status == 400 || why.status == 500);
		return 0;
	}
	FS_ASSERT(chat.chat.n_messages > 0 && chat.chat.n_pictures <= 4 &&
	          chat.chat.gen.n_stops <= FS_MAX_STOPS);
	for (size_t i = 0; i < chat.chat.n_pictures; i++)
		FS_ASSERT(chat.chat.pictures[i].n > 0 && chat.chat.pictures[i].n <= 4096);
	fs_chat_finish(&chat.chat);
	return 0;
}
