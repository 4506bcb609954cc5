/* The table of sessions: by id and owner, those that are completed in the order of their end. */
#include "server/stream/internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

int fs_streams_create(const struct fs_streams_opts *o, struct fs_streams **out, struct fs_errbuf *e)
{
	struct fs_streams *t = calloc(1, sizeof(*t));
	if (!t || pthread_mutex_init(&t->lock, NULL)) {
		free(t);
		return fs_fail(e, FS_ENOMEM, "out of memory");
	}
	t->o = *o;
	if (!t->o.ring_bytes)
		t->o.ring_bytes = (size_t)4 << 20;
	if (!t->o.total_bytes)
		t->o.total_bytes = (size_t)256 << 20;
	if (!t->o.max_sessions)
		t->o.max_sessions = 4096;
	if (!t->o.keep_ms)
		t->o.keep_ms = 300 * 1000;
	*out = t;
	return FS_OK;
}

/* ---- lists; all with the table's lock held ---- */

/* FNV-1a, 32 bits. */
static size_t bucket_of(const char *id, const uint8_t *owner)
{
	uint32_t h = 2166136261u;
	for (; *id; id++)
		h = (h ^ (uint8_t)*id) * 16777619u;
	for (size_t i = 0; i < FS_SESSION_OWNER; i++)
		h = (h ^ owner[i]) * 16777619u;
	return h % FS_STREAM_BUCKETS;
}

static struct fs_session *find(struct fs_streams *t, const char *id, const uint8_t *owner)
{
	struct fs_session *s = t->buckets[bucket_of(id, owner)];
	while (s && (strcmp(s->id, id) != 0 || memcmp(s->owner, owner, FS_SESSION_OWNER) != 0))
		s = s->same;
	return s;
}

static void list(struct fs_streams *t, struct fs_session *s)
{
	struct fs_session **bucket = &t->buckets[bucket_of(s->id, s->owner)];
	s->same = *bucket;
	*bucket = s;
	s->next = t->first;
	if (t->first)
		t->first->prev = s;
	t->first = s;
	s->listed = true;
	t->n_sessions++;
	atomic_fetch_add(&s->refs, 1);
}

static void unlist_done(struct fs_streams *t, struct fs_session *s)
{
	if (s->done_prev)
		s->done_prev->done_next = s->done_next;
	else
		t->done_first = s->done_next;
	if (s->done_next)
		s->done_next->done_prev = s->done_prev;
	else
		t->done_last = s->done_prev;
	t->n_done--;
}

/* The table's reference is the caller's afterwards. */
static void unlist(struct fs_streams *t, struct fs_session *s)
{
	struct fs_session **at = &t->buckets[bucket_of(s->id, s->owner)];
	while (*at != s)
		at = &(*at)->same;
	*at = s->same;
	if (s->prev)
		s->prev->next = s->next;
	else
		t->first = s->next;
	if (s->next)
		s->next->prev = s->prev;
	if (s->done_at)
		unlist_done(t, s);
	s->listed = false;
	t->n_sessions--;
}

/* Takes completed sessions out, those that ended first, while `more` says so; -> a chain over `same`. */
static struct fs_session *take_oldest(struct fs_streams *t, struct fs_session *chain)
{
	struct fs_session *s = t->done_first;
	unlist(t, s);
	s->same = chain;
	return s;
}

static struct fs_session *take_expired(struct fs_streams *t, int64_t now)
{
	struct fs_session *chain = NULL;
	while (t->done_first && now - t->done_first->done_at >= t->o.keep_ms * FS_MS) {
		chain = take_oldest(t, chain);
		t->expired++;
	}
	return chain;
}

/* Outside the lock, the table's references to completed ones; their readers have their own. */
static void drop_chain(struct fs_session *chain)
{
	while (chain) {
		struct fs_session *next = chain->same;
		stream_session_unref(chain);
		chain = next;
	}
}

void fs_streams_expire(struct fs_streams *t, int64_t now)
{
	pthread_mutex_lock(&t->lock);
	struct fs_session *chain = take_expired(t, now);
	pthread_mutex_unlock(&t->lock);
	drop_chain(chain);
}

bool stream_take_memory(struct fs_streams *t, size_t more, const struct fs_session *self)
{
	for (;;) {
		size_t have = atomic_load(&t->bytes);
		if (have + more <= t->o.total_bytes) {
			if (atomic_compare_exchange_weak(&t->bytes, &have, have + more))
				return true;
			continue;
		}
		pthread_mutex_lock(&t->lock);
		struct fs_session *s = t->done_first ? take_oldest(t, NULL) : NULL;
		pthread_mutex_unlock(&t->lock);
		if (!s)
			return false;
		FS_ASSERT(s != self); /* it still runs */
		drop_chain(s);
	}
}

void stream_completed(struct fs_session *s)
{
	struct fs_streams *t = s->table;
	pthread_mutex_lock(&t->lock);
	pthread_mutex_lock(&s->lock);
	s->done = true;
	if (!s->kind.known)
		s->kind = (struct fs_reader_kind){
		        .known = true, .status = 500, .content_type = "application/json"};
	s->completed_at = time(NULL);
	pthread_mutex_unlock(&s->lock);
	if (s->listed) {
		s->done_at = fs_now();
		s->done_prev = t->done_last;
		if (t->done_last)
			t->done_last->done_next = s;
		else
			t->done_first = s;
		t->done_last = s;
		t->n_done++;
	}
	pthread_mutex_unlock(&t->lock);
}

/* ---- by id ---- */

/* A place for one more: completed sessions go first. */
static bool make_place(struct fs_streams *t, struct fs_session **chain)
{
	while (t->n_sessions >= t->o.max_sessions && t->done_first)
		*chain = take_oldest(t, *chain);
	return t->n_sessions < t->o.max_sessions;
}

/* Takes out what the id named so far: its token fires and its readers end. */
static void replace(struct fs_streams *t, const char *id, const uint8_t *owner)
{
	pthread_mutex_lock(&t->lock);
	struct fs_session *old = find(t, id, owner);
	if (old) {
		unlist(t, old);
		t->replaced++;
	}
	pthread_mutex_unlock(&t->lock);
	if (!old)
		return;
	stream_session_end(old, FS_CANCEL_DELETED);
	stream_session_unref(old);
}

static int refuse(struct fs_streams *t, struct fs_errbuf *e, const char *text)
{
	pthread_mutex_lock(&t->lock);
	t->refused++;
	pthread_mutex_unlock(&t->lock);
	return fs_fail(e, FS_ELIMIT, "%s", text);
}

/* False: there are too many. Another request with the same id may have come in between, and is replaced. */
static bool try_list(struct fs_streams *t, struct fs_session *s)
{
	struct fs_session *chain = NULL;
	bool place = false, again = true;
	while (again) {
		pthread_mutex_lock(&t->lock);
		again = find(t, s->id, s->owner) != NULL;
		place = !again && make_place(t, &chain);
		if (place) {
			list(t, s);
			t->opened++;
		}
		pthread_mutex_unlock(&t->lock);
		if (again)
			replace(t, s->id, s->owner);
	}
	drop_chain(chain);
	return place;
}

int fs_session_open(struct fs_streams *t, const char *id, const uint8_t owner[FS_SESSION_OWNER],
        struct fs_cancel *cancel, bool event_ids, struct fs_session **out, struct fs_errbuf *e)
{
	size_t n = strlen(id), first = FS_MIN(STREAM_FIRST_RING, t->o.ring_bytes);
	if (n == 0 || n > FS_SESSION_ID_MAX)
		return fs_fail(e, FS_EINVAL, "a conversation's id has 1 to %d bytes", FS_SESSION_ID_MAX);
	fs_streams_expire(t, fs_now());
	replace(t, id,
	        owner); /* also when the new one gets no session: nobody is to read an old answer for it */
	if (!stream_take_memory(t, first, NULL))
		return refuse(t, e, "the answers that are being given fill the memory for conversations");
	struct fs_session *s = stream_session_new(t, id, owner, cancel, event_ids);
	if (!s) {
		atomic_fetch_sub(&t->bytes, first);
		return fs_fail(e, FS_ENOMEM, "out of memory");
	}
	if (!try_list(t, s)) {
		stream_session_unref(s);
		return refuse(t, e, "as many conversations as this server keeps are being answered already");
	}
	*out = s;
	return FS_OK;
}

bool fs_streams_delete(struct fs_streams *t, const char *id, const uint8_t owner[FS_SESSION_OWNER])
{
	pthread_mutex_lock(&t->lock);
	struct fs_session *s = find(t, id, owner);
	if (s) {
		unlist(t, s);
		t->deleted++;
	}
	pthread_mutex_unlock(&t->lock);
	if (!s)
		return false;
	stream_session_end(s, FS_CANCEL_DELETED);
	stream_session_unref(s);
	return true;
}

bool fs_streams_has(struct fs_streams *t, const char *id, const uint8_t owner[FS_SESSION_OWNER])
{
	fs_streams_expire(t, fs_now());
	pthread_mutex_lock(&t->lock);
	bool has = find(t, id, owner) != NULL;
	pthread_mutex_unlock(&t->lock);
	return has;
}

int fs_reader_attach(struct fs_streams *t, const char *id, const uint8_t owner[FS_SESSION_OWNER],
        uint64_t from, void (*notify)(void *arg), void *arg, struct fs_reader **out, struct fs_errbuf *e)
{
	pthread_mutex_lock(&t->lock);
	struct fs_session *chain = take_expired(t, fs_now()), *s = find(t, id, owner);
	if (s)
		atomic_fetch_add(&s->refs, 1);
	pthread_mutex_unlock(&t->lock);
	drop_chain(chain);
	if (!s)
		return fs_fail(e, FS_ENOTFOUND, "Stream not found or expired");
	int rc = fs_reader_attach_to(s, from, notify, arg, out);
	stream_session_unref(s);
	if (rc == FS_ELIMIT)
		return fs_fail(e, rc, "Stream offset lost, please restart");
	return rc ? fs_fail(e, rc, "out of memory") : FS_OK;
}

static void fill_row(struct fs_session *s, struct fs_session_row *row)
{
	memcpy(row->id, s->id, sizeof(row->id));
	pthread_mutex_lock(&s->lock);
	row->done = s->done;
	row->total_bytes = s->total;
	row->dropped_bytes = s->dropped;
	row->readers = s->n_readers;
	row->started_at = s->started_at;
	row->completed_at = s->done ? s->completed_at : 0;
	pthread_mutex_unlock(&s->lock);
}

size_t fs_streams_lookup(struct fs_streams *t, const char *id, const uint8_t owner[FS_SESSION_OWNER],
        struct fs_session_row *out, size_t cap)
{
	size_t found = 0, n = strlen(id);
	pthread_mutex_lock(&t->lock);
	struct fs_session *chain = take_expired(t, fs_now());
	for (struct fs_session *s = t->first; s && found < cap; s = s->next) {
		bool fits = strncmp(s->id, id, n) == 0 && (!s->id[n] || strncmp(s->id + n, "::", 2) == 0);
		if (fits && n > 0 && memcmp(s->owner, owner, FS_SESSION_OWNER) == 0)
			fill_row(s, &out[found++]);
	}
	pthread_mutex_unlock(&t->lock);
	drop_chain(chain);
	return found;
}

/* ---- all ---- */

void fs_streams_stats(struct fs_streams *t, struct fs_streams_stats *out)
{
	pthread_mutex_lock(&t->lock);
	*out = (struct fs_streams_stats){.live = t->n_sessions - t->n_done,
	        .completed = t->n_done,
	        .readers = atomic_load(&t->n_readers),
	        .bytes = atomic_load(&t->bytes),
	        .dropped_bytes = atomic_load(&t->dropped_bytes),
	        .opened = t->opened,
	        .replaced = t->replaced,
	        .deleted = t->deleted,
	        .expired = t->expired,
	        .refused = t->refused};
	pthread_mutex_unlock(&t->lock);
}

/* Tokens are fired outside the table's lock; their hooks may come back here. */
void fs_streams_cancel_all(struct fs_streams *t, enum fs_cancel_cause cause)
{
	pthread_mutex_lock(&t->lock);
	size_t n = 0, cap = t->n_sessions;
	struct fs_cancel **tokens = calloc(cap + 1, sizeof(struct fs_cancel *));
	for (struct fs_session *s = t->first; tokens && s; s = s->next)
		if (!s->done_at)
			tokens[n++] = fs_cancel_ref(s->cancel);
	pthread_mutex_unlock(&t->lock);
	for (size_t i = 0; i < n; i++) {
		fs_cancel_fire(tokens[i], cause);
		fs_cancel_unref(tokens[i]);
	}
	free(tokens);
}

void fs_streams_destroy(struct fs_streams *t)
{
	if (!t)
		return;
	while (t->first) {
		struct fs_session *s = t->first;
		unlist(t, s);
		FS_ASSERT(s->done && !s->readers);
		stream_session_unref(s);
	}
	pthread_mutex_destroy(&t->lock);
	free(t);
}
