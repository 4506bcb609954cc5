/*
 * rows: the embedding rows of one picture, counted, so that a cache, a request and the engine can share them.
 * Immutable once made; any thread.
 */
#ifndef FS_SERVER_ROWS_H
#define FS_SERVER_ROWS_H

#include "common/wire/wire.h"

struct fs_rows {
	struct fs_rows_shape shape;
	float *data;      /* [n_tokens][n_embd] */
	uint8_t key[32];  /* SHA-256 that names picture and everything that changes its rows; equal keys mean
	                     equal rows */
	char host[64];    /* who encoded it, for people */
	double encode_ms; /* the encoder's own time */
	double queue_ms;  /* waited on the vision host */
	double total_ms;  /* from submission to the last row here */
	int refs;         /* private */
};
/* malloc'd memory for rows, in huge pages where the machine gives them: rows are many MB that are written
 * once, and their first touch would be an exception for each 4 KiB. That of rows which are gone is used again
 * (one piece of up to 64 MiB is kept), unless more than a sixteenth of it would be idle. NULL: out of
 * memory. */
void *fs_rows_alloc(size_t bytes);
/* Takes data (malloc'd) over, on failure too. refs = 1. */
int fs_rows_create(
        const struct fs_rows_shape *shape, float *data, const uint8_t key[32], struct fs_rows **out);
struct fs_rows *fs_rows_ref(struct fs_rows *r);
void fs_rows_unref(struct fs_rows *r); /* NULL is fine */

#endif
