/*
 * intake: the rows of one picture on their way from the encoder through a FIFO, beginning before all of them
 * are written. What is not sent yet is kept in memory, so that an encoder need not wait for the network; the
 * memory grows with it alone. Loop thread; never blocks. What is no rows file of the expected width is
 * refused, and read to its end all the same, since its writer would wait otherwise.
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
	struct fs_rows_shape shape; /* once begun */
	size_t total, got, taken;   /* bytes: in all, read, and taken from here again */
	uint8_t *data;              /* those between taken and got, from `from` on */
	size_t cap, from;
	bool begun;   /* the header has come and fits */
	bool refused; /* why says so */
	struct fs_errbuf why;
};

/* Makes the FIFO at path. NULL: it can not be made, and a file has to do. */
struct fs_intake *fs_intake_create(const char *path, enum fs_wire_dtype dtype, int32_t n_embd);
/* NULL is fine. The FIFO's name is the caller's to remove. */
void fs_intake_destroy(struct fs_intake *in);
/* Reads what has arrived, up to a bound. */
void fs_intake_read(struct fs_intake *in);
/* Bytes that can be taken. */
size_t fs_intake_held(const struct fs_intake *in);
/* The next n of them. */
void fs_intake_take(struct fs_intake *in, uint8_t *out, size_t n);
/* The encoder has answered OK: reads the rest. FS_EFORMAT when it is not all that the header promised. */
int fs_intake_finish(struct fs_intake *in, struct fs_errbuf *e);

#endif
