/*
 * files: pictures named by a path, from the folders that the config names and from nowhere else. What is
 * judged is the file that was opened, by its real path: links and ".." in the name do not matter. Nothing is
 * kept open.
 */
#ifndef FS_SERVER_SERVICE_FILES_H
#define FS_SERVER_SERVICE_FILES_H

#include "common/base/base.h"

/*
 * *bytes is malloc'd. folders: absolute paths. FS_EINVAL: there is no such file in one of them, which is one
 * text for all causes, so that nobody can ask what lies elsewhere (the log says the cause); or it is no
 * regular file, empty or unreadable. FS_ELIMIT: more than max bytes. FS_ECANCELLED.
 */
int fs_file_read(const char *path, const char *const *folders, size_t n_folders, size_t max,
        struct fs_cancel *cancel, uint8_t **bytes, size_t *n, struct fs_errbuf *e);

#endif
