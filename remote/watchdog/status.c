/* What the watchdog tells of itself, to the admin as JSON and to a service manager as a line. Loop thread. */
#include "remote/watchdog/state.h"

#include <jansson.h>
#include <stdlib.h>
#include <unistd.h>

static json_t *lease_json(const struct fs_leases *ls, const struct fs_lease *l)
{
	return json_pack("{s:s, s:s, s:i, s:i, s:b, s:b, s:i, s:I}", "lease", l->id, "peer", l->peer, "port",
	        l->port, "channels", l->channels, "live", fs_lease_live(ls, l), "port_answered", l->answered,
	        "probe_fails", l->fails, "pictures", (json_int_t)l->requests);
}

static json_t *encoder_json(const struct fs_wd *wd)
{
	const struct fs_encproc *p = &wd->enc;
	return json_pack("{s:s, s:s, s:s, s:b, s:i, s:I, s:i, s:s, s:s, s:s, s:i}", "state",
	        fs_encproc_state_name(p), "program", wd->cfg.encoder, "mmproj", wd->cfg.mmproj, "gpu",
	        fs_device_is_gpu(wd->cfg.device), "pid", (int)p->child.pid, "starts", (json_int_t)p->starts,
	        "failures", p->failures, "cause", p->cause, "device", p->facts.device, "fingerprint",
	        p->facts.fingerprint, "n_embd", p->facts.n_embd);
}

int fs_wd_status(struct fs_wd *wd, struct fs_buf *out)
{
	json_t *leases = json_array();
	for (const struct fs_lease *l = wd->leases.head; l; l = l->next)
		if (!l->over)
			json_array_append_new(leases, lease_json(&wd->leases, l));
	json_t *j = json_pack("{s:s, s:i, s:i, s:I, s:s, s:b, s:b, s:b, s:s, s:i, s:i, s:I, s:I, s:o, s:o}",
	        "version", FS_VERSION, "state_format", FS_WD_STATE_FORMAT, "pid", (int)getpid(), "uptime_s",
	        (json_int_t)((fs_now() - wd->started) / FS_SEC), "config", wd->config_path, "service",
	        wd->service, "stopping", wd->stopping, "retiring", wd->retiring, "spool", wd->spool.folder,
	        "connections", (int)wd->n_conns, "pictures", (int)wd->n_reqs, "encodes",
	        (json_int_t)wd->encodes, "errors", (json_int_t)wd->errors, "encoder", encoder_json(wd),
	        "leases", leases);
	char *text = j ? json_dumps(j, JSON_COMPACT) : NULL;
	int rc = text ? fs_buf_printf(out, "%s\n", text) : FS_ENOMEM;
	free(text);
	json_decref(j);
	return rc;
}
