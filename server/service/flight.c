/*
 * A flight is listed from the first ask for its key until somebody sees its end or the last one leaves. The
 * look into the cache and into the list are one step under the lock, and so are the rows' way into the cache
 * and the flight's way off the list: nobody encodes again what has just come.
 */
#include "server/service/flight.h"

#include <stdlib.h>
#include <string.h>

struct flight {
	struct flight *prev, *next; /* while it is listed */
	bool listed;
	uint8_t key[32];
	size_t seats;
	bool submitted;            /* job, or rc and why, are set and stay */
	struct fs_vision_job *job; /* NULL: vision refused it */
	int rc;
	struct fs_errbuf why;
};

struct fs_flights {
	pthread_mutex_t lock;
	pthread_cond_t submitted;
	struct flight *first; /* few: vision bounds its jobs */
	struct fs_vision *vision;
	struct fs_rows_cache *cache;
	uint64_t joins, encodes;
	size_t live;
};

struct fs_seat {
	struct fs_flights *f;
	struct fs_rows *rows; /* of the cache; then there is no flight */
	struct flight *flight;
};

int fs_flights_create(
        struct fs_vision *vision, size_t cache_bytes, struct fs_flights **out, struct fs_errbuf *e)
{
	struct fs_flights *f = calloc(1, sizeof(*f));
	if (!f)
		return fs_fail(e, FS_ENOMEM, "out of memory");
	int rc = fs_rows_cache_create(cache_bytes, &f->cache, e);
	if (rc) {
		free(f);
		return rc;
	}
	pthread_mutex_init(&f->lock, NULL);
	pthread_cond_init(&f->submitted, NULL);
	f->vision = vision;
	*out = f;
	return FS_OK;
}

void fs_flights_destroy(struct fs_flights *f)
{
	if (!f)
		return;
	FS_ASSERT(!f->first);
	fs_rows_cache_destroy(f->cache);
	pthread_cond_destroy(&f->submitted);
	pthread_mutex_destroy(&f->lock);
	free(f);
}

static struct flight *find_locked(struct fs_flights *f, const uint8_t key[32])
{
	struct flight *x = f->first;
	while (x && memcmp(x->key, key, sizeof(x->key)) != 0)
		x = x->next;
	return x;
}

static void list_locked(struct fs_flights *f, struct flight *x)
{
	x->listed = true;
	x->next = f->first;
	if (x->next)
		x->next->prev = x;
	f->first = x;
	f->live++;
}

static void unlist_locked(struct fs_flights *f, struct flight *x)
{
	if (!x->listed)
		return;
	*(x->prev ? &x->prev->next : &f->first) = x->next;
	if (x->next)
		x->next->prev = x->prev;
	x->listed = false;
	f->live--;
}

/* The one to join, NULL = none: a failure that nobody has seen yet is for those who were there, and a new
 * encode may succeed. */
static struct flight *boarding_locked(struct fs_flights *f, const uint8_t key[32])
{
	struct flight *x = find_locked(f, key);
	if (!x || !x->job || !fs_vision_job_failed(x->job))
		return x;
	unlist_locked(f, x);
	return NULL;
}

/* By whoever listed it. The copy that vision makes of the picture is made without the lock. */
static int submit(
        struct fs_flights *f, struct flight *x, const struct fs_flight_picture *p, struct fs_errbuf *e)
{
	struct fs_vision_job *job = NULL;
	struct fs_errbuf why = {""};
	/* no token: the job is ended by hand when nobody waits any more */
	int rc = fs_vision_submit(f->vision, p->bytes, p->n, p->key, &p->params, NULL, &job, &why);
	pthread_mutex_lock(&f->lock);
	x->submitted = true;
	x->job = job;
	x->rc = rc;
	x->why = why;
	if (rc)
		unlist_locked(f, x);
	else
		f->encodes++;
	pthread_cond_broadcast(&f->submitted);
	pthread_mutex_unlock(&f->lock);
	return rc ? fs_fail(e, rc, "%s", why.text) : FS_OK;
}

int fs_flight_join(
        struct fs_flights *f, const struct fs_flight_picture *p, struct fs_seat **out, struct fs_errbuf *e)
{
	struct fs_seat *s = calloc(1, sizeof(*s));
	struct flight *fresh = calloc(1, sizeof(*fresh));
	bool mine = false;
	if (!s || !fresh) {
		free(s);
		free(fresh);
		return fs_fail(e, FS_ENOMEM, "out of memory");
	}
	s->f = f;
	memcpy(fresh->key, p->key, sizeof(fresh->key));
	pthread_mutex_lock(&f->lock);
	s->rows = fs_rows_cache_get(f->cache, p->key);
	if (!s->rows) {
		s->flight = boarding_locked(f, p->key);
		mine = !s->flight;
		if (mine) {
			s->flight = fresh;
			list_locked(f, fresh);
		} else {
			f->joins++;
		}
		s->flight->seats++;
	}
	pthread_mutex_unlock(&f->lock);
	int rc = FS_OK;
	if (mine)
		rc = submit(f, fresh, p, e);
	else
		free(fresh);
	if (rc)
		fs_seat_leave(s);
	else
		*out = s;
	return rc;
}

bool fs_seat_cached(const struct fs_seat *s)
{
	return s->rows != NULL;
}

int fs_seat_wait(struct fs_seat *s, struct fs_cancel *cancel, struct fs_rows **rows, struct fs_errbuf *e)
{
	struct fs_flights *f = s->f;
	struct flight *x = s->flight;
	if (fs_cancelled(cancel))
		return fs_fail(e, FS_ECANCELLED, "cancelled");
	if (!x) {
		*rows = fs_rows_ref(s->rows);
		return FS_OK;
	}
	pthread_mutex_lock(&f->lock);
	while (!x->submitted) /* by straight-line code of another thread, which waits for nothing */
		pthread_cond_wait(&f->submitted, &f->lock);
	pthread_mutex_unlock(&f->lock);
	if (!x->job)
		return fs_fail(e, x->rc, "%s", x->why.text);

	struct fs_rows *r = NULL;
	int rc = fs_vision_wait_for(x->job, cancel, &r, e);
	bool ended = rc != FS_ECANCELLED; /* else this seat's wait alone: the job has no token */
	pthread_mutex_lock(&f->lock);
	if (ended && x->listed) {
		if (r)
			fs_rows_cache_put(f->cache, r);
		unlist_locked(f, x);
	}
	pthread_mutex_unlock(&f->lock);
	if (!rc)
		*rows = r;
	return rc;
}

void fs_seat_leave(struct fs_seat *s)
{
	if (!s)
		return;
	struct fs_flights *f = s->f;
	struct flight *x = s->flight;
	if (x) {
		pthread_mutex_lock(&f->lock);
		bool last = --x->seats == 0;
		if (last)
			unlist_locked(f, x); /* nobody can join it any more */
		pthread_mutex_unlock(&f->lock);
		if (last) {
			fs_vision_job_destroy(x->job);
			free(x);
		}
	}
	fs_rows_unref(s->rows);
	free(s);
}

void fs_flights_stats(struct fs_flights *f, struct fs_flight_stats *out)
{
	fs_rows_cache_stats(f->cache, &out->cache);
	pthread_mutex_lock(&f->lock);
	out->joins = f->joins;
	out->encodes = f->encodes;
	out->live = f->live;
	pthread_mutex_unlock(&f->lock);
}
