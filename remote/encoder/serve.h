/* The line protocol around one encoder; see docs/PROTOCOL.md. For main.c. */
#ifndef FS_ENCODER_SERVE_H
#define FS_ENCODER_SERVE_H

#include "remote/encoder/encoder.h"

/* Loads the encoder, answers orders from stdin until QUIT, its end or SIGTERM. The exit status: 0, 1 when
 * it could not start, FS_ENCODER_EXIT_LOST when the device failed for good. */
int serve(const struct fs_encoder_opts *o, bool extended);
/* "ERR <text>" on stdout, for failures before that. */
void serve_refuse(const char *text);

#endif
