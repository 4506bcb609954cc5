/*
 * The settings, read again while the watchdog runs. Loop thread. Everything but "spool" takes effect at once;
 * what the encoder is started with, when it has no work. Settings that are wrong are told and change nothing.
 */
#include "remote/watchdog/state.h"

#include <stdio.h>
#include <string.h>

void fs_wd_encoder_opts(const struct fs_wd_config *c, struct fs_encproc_opts *o)
{
	*o = (struct fs_encproc_opts){.program = c->encoder,
	        .mmproj = c->mmproj,
	        .model = c->model,
	        .args = c->encoder_args,
	        .extended = c->extended > 0,
	        .threads = c->threads,
	        .min_tokens = c->min_tokens,
	        .max_tokens = c->max_tokens,
	        .ready_timeout_s = c->ready_timeout_s,
	        .encode_timeout_s = c->encode_timeout_s,
	        .cancel_kill_s = c->cancel_kill_s,
	        .stop_grace_ms = c->stop_grace_ms,
	        .idle_s = c->encoder_idle_s};
	(void)fs_encproc_set_device(o, c->device, NULL); /* checked as it was read */
}

static bool differs(const struct fs_buf *a, const struct fs_buf *b)
{
	return a->len != b->len || memcmp(a->data, b->data, a->len) != 0;
}

/* True when the encoder that is there is not the one that would be started now. */
static bool take_command(struct fs_wd *wd)
{
	struct fs_buf command, files;
	fs_buf_init(&command, wd->command.max);
	fs_buf_init(&files, wd->files.max);
	bool changed = !fs_wd_config_command(&wd->cfg, &command) && !fs_wd_config_files(&wd->cfg, &files) &&
	               (differs(&command, &wd->command) || differs(&files, &wd->files));
	if (changed) {
		fs_buf_finish(&wd->command);
		fs_buf_finish(&wd->files);
		wd->command = command;
		wd->files = files;
	} else {
		fs_buf_finish(&command);
		fs_buf_finish(&files);
	}
	return changed;
}

int fs_wd_reload(struct fs_wd *wd, struct fs_errbuf *e)
{
	static struct fs_wd_config fresh; /* large; the loop's alone */
	struct fs_encproc_opts o;
	int rc = fs_wd_config_load(&fresh, wd->config_path, e);
	if (rc)
		return rc;
	if (strcmp(fresh.spool, wd->cfg.spool))
		fs_warn("\"spool\" changes with the next start of the watchdog alone");
	memcpy(fresh.spool, wd->cfg.spool, sizeof(fresh.spool));
	fs_wd_config_finish(&wd->cfg);
	wd->cfg = fresh; /* in place: the encoder's options point into it */
	fs_log_set_level(wd->cfg.log_level);
	fs_wd_encoder_opts(&wd->cfg, &o);
	bool changed = take_command(wd);
	if (changed)
		fs_encproc_renew(&wd->enc, &o);
	else
		fs_encproc_adjust(&wd->enc, &o);
	fs_info("settings read again%s", changed ? "; the encoder is started anew when it has no work" : "");
	return FS_OK;
}
