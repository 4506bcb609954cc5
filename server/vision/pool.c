/* The arithmetic of the pool; see the header. */
#include "server/vision/pool.h"

#include <math.h>

#define SHARE 0.2                           /* of a new value in a mean */
#define WILD 4.0                            /* times the mean: what is more counts as so much */
#define FORGET_NS (600 * FS_SEC)            /* in which what is known of a host loses half its weight */
#define RATE_MIN_BYTES ((size_t)256 * 1024) /* less lies in buffers before anybody looks at a clock */
#define NAP_NS (2 * FS_SEC)                 /* what clocks may drift apart without a sleep */

double fs_pool_mean(double mean, double value)
{
	if (mean <= 0)
		return value;
	return (1 - SHARE) * mean + SHARE * FS_MIN(value, WILD * mean);
}

void fs_pool_saw_encode(struct fs_pool_speed *s, double ms, int32_t rows, int64_t now)
{
	if (rows < 1 || !(ms > 0))
		return;
	s->row_ms = fs_pool_mean(s->row_ms, ms / rows);
	s->picture_ms = fs_pool_mean(s->picture_ms, ms);
	s->at = now;
}

void fs_pool_saw_transfer(struct fs_pool_speed *s, double ms, size_t bytes)
{
	if (bytes >= RATE_MIN_BYTES && ms > 0)
		s->byte_ms = fs_pool_mean(s->byte_ms, ms / (double)bytes);
}

/* ---- what to expect of a host ---- */

static double best(const struct fs_pool *p, double (*get)(const struct fs_pool_speed *s))
{
	double found = 0;
	for (size_t i = 0; i < p->n; i++) {
		double x = get(&p->hosts[i].speed);
		if (x > 0 && (found <= 0 || x < found))
			found = x;
	}
	return found;
}

static double get_row(const struct fs_pool_speed *s)
{
	return s->row_ms;
}

static double get_byte(const struct fs_pool_speed *s)
{
	return s->byte_ms;
}

/* One usual picture there. Without any measurement all hosts are alike, whatever the unit. */
static double encode_ms(const struct fs_pool *p, size_t host)
{
	const struct fs_pool_speed *s = &p->hosts[host].speed;
	double fastest = best(p, get_row), rows = p->rows > 0 ? p->rows : 1;
	if (fastest <= 0)
		return rows;
	if (s->row_ms <= 0)
		return fastest * rows;
	double age = (double)FS_MAX(p->now - s->at, (int64_t)0) / (double)FORGET_NS;
	return (fastest + (s->row_ms - fastest) * exp2(-age)) * rows;
}

static double move_ms(const struct fs_pool *p, size_t host, size_t bytes)
{
	double own = p->hosts[host].speed.byte_ms;
	return (double)bytes * (own > 0 ? own : best(p, get_byte));
}

static double answer_ms(const struct fs_pool *p, size_t host)
{
	return move_ms(p, host, (size_t)(p->rows * (double)p->row_bytes)) + p->hosts[host].rtt_ms;
}

double fs_pool_expect_ms(const struct fs_pool *p, size_t host, size_t bytes)
{
	const struct fs_pool_host *h = &p->hosts[host];
	return (h->queued + 1) * encode_ms(p, host) + move_ms(p, host, h->unsent + bytes) +
	       answer_ms(p, host);
}

double fs_pool_usual_ms(const struct fs_pool *p, size_t host, size_t bytes)
{
	const struct fs_pool_host *h = &p->hosts[host];
	if (h->speed.row_ms <= 0)
		return 0;
	return FS_MAX(h->sent, 1u) * encode_ms(p, host) + move_ms(p, host, bytes) + answer_ms(p, host);
}

/* ---- choice ---- */

static bool takes(const struct fs_pool_host *h, size_t bytes)
{
	return h->up && (h->max_bytes == 0 || bytes <= h->max_bytes);
}

/* A host of which nothing is known gets one picture before the others, which then tells. */
static double rank(const struct fs_pool *p, size_t host, size_t bytes)
{
	const struct fs_pool_host *h = &p->hosts[host];
	bool first_try = h->speed.at == 0 && h->queued == 0 && !h->on_trial;
	return first_try ? 0 : fs_pool_expect_ms(p, host, bytes);
}

static int choose(const struct fs_pool *p, size_t bytes, uint32_t without, bool benched_too)
{
	int found = -1;
	double least = 0;
	for (size_t i = 0; i < p->n; i++) {
		const struct fs_pool_host *h = &p->hosts[i];
		if (!takes(h, bytes) || (without >> i & 1) || (!benched_too && p->now < h->benched_until))
			continue;
		double r = rank(p, i, bytes);
		if (found < 0 || r < least) {
			found = (int)i;
			least = r;
		}
	}
	return found;
}

int fs_pool_choose(const struct fs_pool *p, size_t bytes, uint32_t without)
{
	int i = choose(p, bytes, without, false);
	return i >= 0 ? i : choose(p, bytes, without, true); /* rather one that may fail than none */
}

uint32_t fs_pool_ahead(const struct fs_pool *p, size_t host, size_t bytes)
{
	const struct fs_pool_host *h = &p->hosts[host];
	if (h->on_trial)
		return 1;
	if (h->speed.row_ms <= 0)
		return 2;
	/* one at work, and as many as it finishes while the next one is on its way */
	double n = 1 + ceil((h->rtt_ms + move_ms(p, host, bytes)) / encode_ms(p, host));
	return n < 2 ? 2 : n > FS_POOL_MAX_AHEAD ? FS_POOL_MAX_AHEAD : (uint32_t)n;
}

int fs_pool_giver(const struct fs_pool *p, size_t taker, size_t bytes, uint32_t givers)
{
	const struct fs_pool_host *t = &p->hosts[taker];
	int found = -1;
	if (!takes(t, bytes) || p->now < t->benched_until || t->queued >= fs_pool_ahead(p, taker, bytes))
		return -1;
	double longest = fs_pool_expect_ms(p, taker, bytes);
	for (size_t i = 0; i < p->n; i++) {
		const struct fs_pool_host *h = &p->hosts[i];
		if (i == taker || !(givers >> i & 1) || h->queued == 0)
			continue;
		double wait = h->queued * encode_ms(p, i) + move_ms(p, i, h->unsent) + answer_ms(p, i);
		if (wait > longest) {
			found = (int)i;
			longest = wait;
		}
	}
	return found;
}

/* ---- times ---- */

int fs_pool_backoff_ms(int n, int first_ms, int max_ms, uint16_t chance)
{
	int64_t ms = first_ms;
	for (int i = 1; i < n && ms < max_ms; i++)
		ms *= 2;
	ms = FS_MIN(ms, (int64_t)max_ms);
	return (int)(ms * 4 / 5 + ms * 2 / 5 * chance / 65536);
}

bool fs_pool_slept(int64_t mono0, int64_t boot0, int64_t mono, int64_t boot)
{
	return (boot - boot0) - (mono - mono0) > NAP_NS;
}
