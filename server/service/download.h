/* download: pictures named by a URL or a path, had side by side before anything of the request is encoded. */
#ifndef FS_SERVER_SERVICE_DOWNLOAD_H
#define FS_SERVER_SERVICE_DOWNLOAD_H

#include "server/service/service.h"

/* Gives every picture with a URL or a path its bytes. The first failure ends the others. FS_ECANCELLED, or
 * *why is filled. */
int fs_pictures_fetch(const struct fs_service_opts *o, struct fs_chat *chat, struct fs_cancel *cancel,
        struct fs_record *rec, struct fs_refusal *why);

#endif
