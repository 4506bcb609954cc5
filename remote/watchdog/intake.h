/*
 * intake: the rows of one picture on their way from the encoder through a FIFO, beginning before all of them
 * are written. They are kept in memory until they are sent, so that an encoder need not wait for the network.
 * Loop thread; never blocks. What is no rows file of the expected width is refused, and read to its end all
 * the same, since its writer would wait otherwise.
 */
#ifndef FS_WATCHDOG_INTAKE_H
#define FS_WATCHDOG_INTAKE_H

#include "common/wire/wire.h"

struct fs_intake {
	int fd; /* -1: the writer has closed it */
	enum fs_wire_dtype dtype;
	int32_t n_embd;
	uint8_t header[FS_ROWS_HEADER];
	size_t n_header;
	struct fs_rows_shape shape; /* once there is data */
	uint8_t *data;              /* [total]; NULL: the header has not come, or is refused */
	size_t total, got;          /* bytes */
	bool refused;               /* why says so */
	struct fs_errbuf why;
};

/* Makes the FIFO at path. NULL: it can not be made, and a file has to do. */
struct fs_intake *fs_intake_create(const char *path, enum fs_wire_dtype dtype, int32_t n_embd);
/* NULL is fine. The FIFO's name is the caller's to remove. */
void fs_intake_destroy(struct fs_intake *in);
/* Takes what has arrived, up to a bound. */
void fs_intake_read(struct fs_intake *in);
/* The encoder has answered OK: takes the rest. FS_EFORMAT when it is not all that the header promised. */
int fs_intake_finish(struct fs_intake *in, struct fs_errbuf *e);

#endif
