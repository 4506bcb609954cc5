/* GET /v1/models and GET /health: answered on the loop at once, whatever the engine and the hosts are doing.
 */
#include "server/api/internal.h"

#include <string.h>

void fs_api_models(void *arg, struct fs_http_request *r)
{
	const struct fs_api *api = arg;
	const struct fs_service_opts *o = fs_service_opts(api->service);
	const struct fs_engine_info *info = fs_engine_info(o->engine);
	json_t *modalities = o->vision ? json_pack("[s, s]", "text", "image") : json_pack("[s]", "text");
	api_reply_json(
	        r, json_pack("{s:s, s:[{s:s, s:s, s:I, s:s, s:{s:i, s:i, s:i}, s:{s:o, s:[s]}}]}", "object",
	                   "list", "data", "id", api->model_name, "object", "model", "created",
	                   (json_int_t)api->created, "owned_by", "farsight", "meta", "n_ctx", info->n_ctx,
	                   "n_ctx_train", info->n_ctx_train, "n_embd", info->n_embd, "architecture",
	                   "input_modalities", modalities, "output_modalities", "text"));
}

static json_t *host_list(struct fs_vision *v)
{
	struct fs_host_status st[FS_VISION_MAX_HOSTS];
	size_t n = v ? fs_vision_status(v, st, FS_ARRAY_LEN(st)) : 0;
	json_t *a = json_array();
	for (size_t i = 0; i < n; i++)
		json_array_append_new(a, json_pack("{s:o, s:s, s:o*, s:o*}", "host", api_text(st[i].host),
		                                 "state", fs_host_state_name(st[i].state), "cause",
		                                 st[i].cause[0] ? api_text(st[i].cause) : NULL, "device",
		                                 st[i].device[0] ? api_text(st[i].device) : NULL));
	return a;
}

static bool any_up(const json_t *hosts)
{
	for (size_t i = 0; i < json_array_size(hosts); i++)
		if (strcmp(json_string_value(json_object_get(json_array_get(hosts, i), "state")),
		            fs_host_state_name(FS_HOST_UP)) == 0)
			return true;
	return false;
}

void fs_api_health(void *arg, struct fs_http_request *r)
{
	const struct fs_api *api = arg;
	struct fs_vision *v = fs_service_opts(api->service)->vision;
	json_t *hosts = host_list(v);
	bool up = any_up(hosts);
	api_reply_json(r, json_pack("{s:s, s:s, s:b, s:{s:b, s:b, s:o}}", "status", "ok", "model",
	                          api->model_name, "images", v != NULL, "vision", "configured", v != NULL,
	                          "available", up, "hosts", hosts));
}
