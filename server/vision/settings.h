/*
 * settings: the part of the server's configuration that speaks of vision hosts, as the options of a vision.
 * One place for all programs that reach the hosts of the configuration.
 */
#ifndef FS_SERVER_VISION_SETTINGS_H
#define FS_SERVER_VISION_SETTINGS_H

#include "server/config/config.h"
#include "server/vision/vision.h"

/* Hosts, limits and times. Strings stay the config's. What depends on the program (local, n_embd,
 * liveness_port, program) is left 0 or NULL. */
void fs_vision_opts_from_config(const struct fs_config *c, struct fs_vision_opts *o);
/* The encoder on this machine; without "vision.exe" the one that lies beside this program, else the one in
 * PATH. exe holds its path and lives as long as l is used. The turn is left empty. */
void fs_vision_local_from_config(
        const struct fs_config *c, char *exe, size_t cap, struct fs_vision_local_opts *l);

#endif
