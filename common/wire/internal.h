/* wire internals, shared by the files of this folder alone. */
#ifndef FS_WIRE_INTERNAL_H
#define FS_WIRE_INTERNAL_H

#include "common/wire/wire.h"

/* Signs, product, limits; *bytes is what the rows take in this dtype. */
int wire_shape_check(const struct fs_rows_shape *s, uint32_t dtype, size_t *bytes, struct fs_errbuf *e);

#endif
