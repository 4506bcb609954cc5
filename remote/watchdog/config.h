/*
 * The watchdog's settings, read from a JSON file at the start and again on SIGHUP. One table in config.c
 * gives each key its type, bounds, default and help; parsing, the check for unknown keys and --help-config
 * all follow from it.
 */
#ifndef FS_WATCHDOG_CONFIG_H
#define FS_WATCHDOG_CONFIG_H

#include "common/base/base.h"

#define FS_WD_ARGS_MAX 32 /* as FS_ENCPROC_ARGS_MAX */

struct fs_wd_config {
	/* Paths are absolute after loading; "" = not given. */
	char mmproj[4096], model[4096], encoder[4096], spool[4096];
	char *encoder_args[FS_WD_ARGS_MAX + 1]; /* owned; NULL-terminated */
	int32_t extended;                       /* 1, 0, or -1 = by the encoder's file name */
	char device[16];                        /* "auto", "cpu", "cuda", "cuda:N" */
	int32_t gpu;        /* older words for the same, both gone after loading; -1 = not given */
	int32_t gpu_device; /* index in PCI bus order; -1 = not given */
	int32_t threads, min_tokens, max_tokens; /* 0 = the encoder's own */
	int32_t ready_timeout_s, encode_timeout_s, cancel_kill_s, stop_grace_ms;
	int32_t lease_grace_s, silence_s, probe_fails, probe_interval_s;
	bool keep_warm;
	int32_t encoder_idle_s, idle_exit_s, max_queue;
	enum fs_log_level log_level;
};

/* ~/.config/farsight/vision-host.json, or below $XDG_CONFIG_HOME. */
int fs_wd_config_default_path(char *out, size_t cap, struct fs_errbuf *e);
/* FS_EINVAL with the file, the key and what is wrong; the strings of c are set only on FS_OK. */
int fs_wd_config_load(struct fs_wd_config *c, const char *path, struct fs_errbuf *e);
void fs_wd_config_finish(struct fs_wd_config *c);
/* What an encoder is started with, as one text (cleared first): where two of them differ, it has to be
 * started anew. files: which files its program and models are just now. */
int fs_wd_config_command(const struct fs_wd_config *c, struct fs_buf *out);
int fs_wd_config_files(const struct fs_wd_config *c, struct fs_buf *out);
/* Prints the table of keys. */
void fs_wd_config_help(void);

#endif
