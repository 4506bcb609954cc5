/*
 * flight: pictures that are being encoded, each once, whoever asks. Those who ask for the same key share one
 * job of vision's and have a seat each: a seat waits with its own token; when its owner leaves, the encode
 * goes on for the others; when the last one leaves, it is cancelled at once. Rows that came go into the
 * cache, where the next one finds them. Any thread; the lock is never held while anything is encoded or
 * copied.
 */
#ifndef FS_SERVER_SERVICE_FLIGHT_H
#define FS_SERVER_SERVICE_FLIGHT_H

#include "server/rows/cache.h"
#include "server/vision/vision.h"

struct fs_flights;
/* Borrows vision; cache_bytes bounds the cache, 0 = none. */
int fs_flights_create(
        struct fs_vision *vision, size_t cache_bytes, struct fs_flights **out, struct fs_errbuf *e);
void fs_flights_destroy(struct fs_flights *f); /* nobody may hold a seat; NULL is fine */

struct fs_flight_picture {
	const void *bytes; /* copied */
	size_t n;
	uint8_t key[32];
	struct fs_encode_params params;
};
struct fs_seat; /* owned by who took it */
/* Rows of the cache, a seat in a flight under way, or in a new one; returns at once. Errors of
 * fs_vision_submit, when it is a new one. */
int fs_flight_join(
        struct fs_flights *f, const struct fs_flight_picture *p, struct fs_seat **out, struct fs_errbuf *e);
/* True when its rows were in the cache. */
bool fs_seat_cached(const struct fs_seat *s);
/* As fs_vision_wait_for: the end of the encode, the same for all, or FS_ECANCELLED for this one. */
int fs_seat_wait(struct fs_seat *s, struct fs_cancel *cancel, struct fs_rows **rows, struct fs_errbuf *e);
/* Never waits. NULL is fine. */
void fs_seat_leave(struct fs_seat *s);

struct fs_flight_stats {
	struct fs_rows_cache_stats cache; /* its misses are joins or encodes */
	uint64_t joins;                   /* found their picture being encoded */
	uint64_t encodes;                 /* begun */
	size_t live;                      /* under way */
};
void fs_flights_stats(struct fs_flights *f, struct fs_flight_stats *out);

#endif
