/* What one key alone does not tell: settings that need or exclude each other. */
#include "server/config/config.h"

#include <string.h>

static int check_device(const char *key, const char *device, struct fs_errbuf *e)
{
	if (fs_device_is_word(device))
		return FS_OK;
	return fs_fail(e, FS_EINVAL, "\"%s\" is \"%.40s\"; it must be " FS_DEVICE_WORDS, key, device);
}

/* Pictures are encoded on vision hosts, on this machine, or nowhere. */
static int check_kind(const struct fs_config *c, struct fs_errbuf *e)
{
	if (c->vision.remote && c->vision.mmproj)
		return fs_fail(e, FS_EINVAL,
		        "\"vision.remote\" is true and \"vision.mmproj\" is set: choose vision hosts or an "
		        "encoder on this machine");
	const char *idle = c->vision.exe       ? "exe"
	                   : c->vision.device  ? "device"
	                   : c->vision.gpu     ? "gpu"
	                   : c->vision.elastic ? "elastic"
	                   : c->vision.threads ? "threads"
	                                       : NULL;
	if (idle && !c->vision.mmproj)
		return fs_fail(e, FS_EINVAL,
		        "\"vision.%s\" is about an encoder on this machine: it needs \"vision.mmproj\"",
		        idle);
	if (c->vision.device && c->vision.gpu)
		return fs_fail(
		        e, FS_EINVAL, "\"vision.device\" says it all: leave out \"vision.gpu\" beside it");
	if (c->vision.max_tokens && c->vision.min_tokens > c->vision.max_tokens)
		return fs_fail(
		        e, FS_EINVAL, "\"vision.min_tokens\" must not be larger than \"vision.max_tokens\"");
	return FS_OK;
}

int fs_config_check(const struct fs_config *c, struct fs_errbuf *e)
{
	if (!c->model)
		return fs_fail(e, FS_EINVAL, "no text model: set \"model\" to the path of a GGUF file");
	if (c->max_bodies_mb < c->max_body_mb)
		return fs_fail(e, FS_EINVAL, "\"max_bodies_mb\" must not be smaller than \"max_body_mb\"");
	for (size_t i = 0; i < c->picture_folders.n; i++)
		if (c->picture_folders.items[i][0] != '/')
			return fs_fail(e, FS_EINVAL,
			        "\"picture_folders\" holds \"%s\", which is no absolute path",
			        c->picture_folders.items[i]);
	int rc = check_device("device", c->device, e);
	if (!rc && c->vision.device)
		rc = check_device("vision.device", c->vision.device, e);
	if (!rc)
		rc = check_kind(c, e);
	if (rc)
		return rc;
	if (c->vision.remote && c->vision.n_hosts == 0)
		return fs_fail(e, FS_EINVAL, "\"vision.remote\" is true but \"vision.hosts\" names no host");
	if (!c->vision.remote && c->vision.n_hosts > 0)
		return fs_fail(
		        e, FS_EINVAL, "\"vision.hosts\" is set; set \"vision.remote\": true to use it");
	if (c->vision.fingerprint && (strlen(c->vision.fingerprint) != 32 ||
	                                     strspn(c->vision.fingerprint, "0123456789abcdef") != 32))
		return fs_fail(e, FS_EINVAL, "\"vision.fingerprint\" must be 32 lower-case hex digits");
	if (c->vision.hedge > 0 && c->vision.hedge < 1)
		return fs_fail(e, FS_EINVAL, "\"vision.hedge\" must be 0, or 1 and more");
	if (c->vision.dead_after_s <= c->vision.ping_interval_s)
		return fs_fail(e, FS_EINVAL,
		        "\"vision.dead_after_s\" must be larger than \"vision.ping_interval_s\"");
	return FS_OK;
}
