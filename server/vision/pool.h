/*
 * pool: which of several hosts does a picture, how many it is given ahead, how long one that failed is left
 * alone. Pure functions over numbers: no lock, no clock, no chance of their own; whoever calls them holds
 * what they read. Times of speeds and waits are in ms, times of the clock in monotonic ns.
 *
 * The choice is the least expected wait: the pictures that a host has, and this one, by its measured time a
 * row and the usual number of rows; the bytes that are still to be moved by its measured rate; its round
 * trip. What was never measured counts as the best that was, and a measurement that gets old comes near the
 * best again, so that no host is left out for good because of one bad day.
 */
#ifndef FS_SERVER_VISION_POOL_H
#define FS_SERVER_VISION_POOL_H

#include "common/base/base.h"

#define FS_POOL_MAX_HOSTS 32 /* a bit each in an uint32_t */
#define FS_POOL_MAX_AHEAD 8  /* pictures sent to one host and not answered */

/* Moving means of what was seen of a host; 0 = nothing yet. */
struct fs_pool_speed {
	double row_ms;     /* one row's share of an encode, from one answer to the next while it is busy */
	double picture_ms; /* the same for a whole picture */
	double byte_ms;    /* to move a byte of rows */
	int64_t at;        /* when the last encode was seen */
};
void fs_pool_saw_encode(struct fs_pool_speed *s, double ms, int32_t rows, int64_t now);
/* Too few bytes to tell, or no time, are passed over. */
void fs_pool_saw_transfer(struct fs_pool_speed *s, double ms, size_t bytes);
/* A mean that moves by a fifth, and by one wild value at most by so much; the first value is the mean. */
double fs_pool_mean(double mean, double value);

struct fs_pool_host {
	bool up;               /* takes pictures */
	bool on_trial;         /* the last encode there failed: one picture at a time until one comes back */
	int64_t benched_until; /* left alone before this, while there is another */
	uint64_t max_bytes;    /* of a picture; 0 = any */
	uint32_t queued;       /* pictures that it was given and has not answered */
	uint32_t sent;         /* of these, how many are on their way or there */
	size_t unsent;         /* bytes of those that are not */
	double rtt_ms;
	struct fs_pool_speed speed;
};
struct fs_pool {
	struct fs_pool_host hosts[FS_POOL_MAX_HOSTS];
	size_t n;
	double rows;      /* that a picture usually has; 0 = not known */
	size_t row_bytes; /* of one row on the wire */
	int64_t now;
};

/* The host for a picture of so many bytes; -1 = none. Bits of `without` (1 << index) leave hosts out. */
int fs_pool_choose(const struct fs_pool *p, size_t bytes, uint32_t without);
/* Until the rows of one more picture of so many bytes would be here. */
double fs_pool_expect_ms(const struct fs_pool *p, size_t host, size_t bytes);
/* The same for a picture that was just sent, as the last of `sent`; 0 = nothing is known of the host. */
double fs_pool_usual_ms(const struct fs_pool *p, size_t host, size_t bytes);
/* How many pictures may be sent there ahead of their answers: what keeps it busy, and no more, so that the
 * others stay where another host can take them over. */
uint32_t fs_pool_ahead(const struct fs_pool *p, size_t host, size_t bytes);
/* The host from which `taker`, which has room, should take over a waiting picture of the most loaded: of
 * those with a bit in `givers`, where the last picture would have to wait longer; -1 = none. */
int fs_pool_giver(const struct fs_pool *p, size_t taker, size_t bytes, uint32_t givers);

/* The pause after the n-th failure in a row (1, 2, …): doubled each time from first_ms to at most max_ms,
 * then 80 to 120 % of it by chance (0..65535), so that many do not come back at the same moment. */
int fs_pool_backoff_ms(int n, int first_ms, int max_ms, uint16_t chance);

/* Whether the machine slept between two looks at its clocks: boot time goes on then, the monotonic one does
 * not. All in ns. */
bool fs_pool_slept(int64_t mono0, int64_t boot0, int64_t mono, int64_t boot);

#endif
