/* The config's vision section as fs_vision_opts. */
#include "server/vision/settings.h"

#include "common/encproc/encproc.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

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
	        .encode_timeout_ms = (int)c->vision.encode_timeout_s * 1000,
	        .hedge = c->vision.hedge,
	        .wol_wait_ms = (int)c->vision.wol_wait_s * 1000};
	for (size_t i = 0; i < o->n_hosts; i++) {
		const struct fs_config_host *h = &c->vision.hosts[i];
		o->hosts[i] = (struct fs_vision_host_opts){.host = h->host,
		        .port = (int)h->port,
		        .identity = h->identity,
		        .known_hosts = h->known_hosts,
		        .config_file = h->ssh_config,
		        .command = h->command,
		        .wol = h->wol,
		        .wol_broadcast = h->wol_broadcast};
	}
}

/* The encoder that was installed, or built, with this program. */
static void default_encoder(char *out, size_t cap)
{
	static const char name[] = "farsight-encoder";
	ssize_t n = readlink("/proc/self/exe", out, cap - sizeof(name));
	char *slash = n > 0 ? memrchr(out, '/', (size_t)n) : NULL;
	if (slash)
		memcpy(slash + 1, name, sizeof(name));
	if (!slash || access(out, X_OK) != 0)
		snprintf(out, cap, "%s", name);
}

void fs_vision_local_from_config(
        const struct fs_config *c, char *exe, size_t cap, struct fs_vision_local_opts *l)
{
	if (c->vision.exe)
		snprintf(exe, cap, "%s", c->vision.exe);
	else
		default_encoder(exe, cap);
	bool ours = fs_encproc_is_ours(exe);
	*l = (struct fs_vision_local_opts){.exe = exe,
	        .mmproj = c->vision.mmproj,
	        .model = c->model,
	        .extended = strcmp(c->vision.extended, "auto") == 0 ? ours
	                                                            : strcmp(c->vision.extended, "on") == 0,
	        .device = c->vision.device,
	        .gpu = c->vision.gpu,
	        .elastic = c->vision.elastic,
	        .threads = (int)c->vision.threads,
	        .idle_s = (int)c->vision.elastic_idle_s,
	        .ready_timeout_s = (int)c->vision.ready_timeout_s};
}
