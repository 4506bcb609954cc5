/* GET /v1/models and GET /health: answered on the loop at once, whatever the engine and the hosts are doing.
 */
#include "server/api/internal.h"

void fs_api_models(void *arg, struct fs_http_request *r)
{
	const struct fs_api *api = arg;
	const struct fs_service_opts *o = fs_service_opts(api->service);
	const struct fs_engine_info *info = fs_engine_info(o->engine);
	json_t *modalities = fs_vision_has_hosts(o->vision) ? json_pack("[s, s]", "text", "image")
	                                                    : json_pack("[s]", "text");
	api_reply_json(
	        r, json_pack("{s:s, s:[{s:s, s:s, s:I, s:s, s:{s:i, s:i, s:i}, s:{s:o, s:[s]}}]}", "object",
	                   "list", "data", "id", api->model_name, "object", "model", "created",
	                   (json_int_t)api->created, "owned_by", "farsight", "meta", "n_ctx", info->n_ctx,
	                   "n_ctx_train", info->n_ctx_train, "n_embd", info->n_embd, "architecture",
	                   "input_modalities", modalities, "output_modalities", "text"));
}

/* "ok", or what the engine is at without its device: not healthy then, 503. */
void fs_api_health(void *arg, struct fs_http_request *r)
{
	static const char *const words[] = {"ok", "reloading", "failed"};
	const struct fs_api *api = arg;
	const struct fs_service_opts *o = fs_service_opts(api->service);
	struct fs_engine_health h;
	fs_engine_health(o->engine, &h);
	json_t *body = json_pack("{s:s, s:s, s:b, s:o}", "status", words[h.state], "model", api->model_name,
	        "images", fs_vision_has_hosts(o->vision), "vision", api_vision(o->vision, false));
	api_reply_status_json(r, h.state == FS_ENGINE_READY ? 200 : 503, body);
}
