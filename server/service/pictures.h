/* pictures: the part of a request's life before the turn: checks, hashes, encodes side by side, rows. */
#ifndef FS_SERVER_SERVICE_PICTURES_H
#define FS_SERVER_SERVICE_PICTURES_H

#include "server/service/service.h"

/* rows[chat->n_pictures], all set on FS_OK, to be unref'd by the caller; on failure none is set. Says in the
 * chat whose rows were cached. Errors as fs_service_chat. */
int fs_pictures_encode(const struct fs_service_opts *o, struct fs_chat *chat, struct fs_cancel *cancel,
        struct fs_rows **rows, struct fs_refusal *why);

#endif
