/* The config's vision section as fs_vision_opts. */
#include "server/vision/settings.h"

#include <string.h>

void fs_vision_opts_from_config(const struct fs_config *c, struct fs_vision_opts *o)
{
	*o = (struct fs_vision_opts){.n_hosts = c->vision.n_hosts,
	        .min_tokens = (int32_t)c->vision.min_tokens,
	        .max_tokens = (int32_t)c->vision.max_tokens,
	        .fingerprint = c->vision.fingerprint,
	        .f16 = strcmp(c->vision.rows_dtype, "f16") == 0,
	        .connect_timeout_ms = (int)c->vision.connect_timeout_s * 1000,
	        .ping_interval_ms = (int)c->vision.ping_interval_s * 1000,
	        .dead_after_ms = (int)c->vision.dead_after_s * 1000,
	        .encode_timeout_ms = (int)c->vision.encode_timeout_s * 1000};
	for (size_t i = 0; i < o->n_hosts; i++) {
		const struct fs_config_host *h = &c->vision.hosts[i];
		o->hosts[i] = (struct fs_vision_host_opts){.host = h->host,
		        .port = (int)h->port,
		        .identity = h->identity,
		        .known_hosts = h->known_hosts,
		        .config_file = h->ssh_config,
		        .command = h->command};
	}
}
