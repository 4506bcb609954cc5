/* One session: its ring, its readers. */
#include "server/stream/internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

struct fs_session *stream_session_new(
        struct fs_streams *t, const char *id, const uint8_t *owner, struct fs_cancel *cancel, bool event_ids)
{
	struct fs_session *s = calloc(1, sizeof(*s));
	if (!s)
		return NULL;
	atomic_init(&s->refs, 1);
	s->table = t;
	s->cap = FS_MIN(STREAM_FIRST_RING, t->o.ring_bytes);
	s->ring = malloc(s->cap);
	if (!s->ring) {
		free(s);
		return NULL;
	}
	snprintf(s->id, sizeof(s->id), "%s", id);
	memcpy(s->owner, owner, sizeof(s->owner));
	s->event_ids = event_ids;
	s->started_at = time(NULL);
	s->cancel = fs_cancel_ref(cancel);
	pthread_mutex_init(&s->lock, NULL);
	pthread_mutex_init(&s->notify_lock, NULL);
	return s;
}

void stream_session_unref(struct fs_session *s)
{
	if (atomic_fetch_sub(&s->refs, 1) != 1)
		return;
	FS_ASSERT(!s->readers);
	atomic_fetch_sub(&s->table->bytes, s->cap);
	fs_cancel_unref(s->cancel);
	pthread_mutex_destroy(&s->lock);
	pthread_mutex_destroy(&s->notify_lock);
	free(s->ring);
	free(s);
}

/* ---- the ring ---- */

static void copy_in(struct fs_session *s, uint64_t at, const uint8_t *data, size_t n)
{
	size_t i = (size_t)(at % s->cap), head = FS_MIN(n, s->cap - i);
	memcpy(s->ring + i, data, head);
	memcpy(s->ring, data + head, n - head);
}

static void copy_out(const struct fs_session *s, uint64_t at, uint8_t *out, size_t n)
{
	size_t i = (size_t)(at % s->cap), head = FS_MIN(n, s->cap - i);
	memcpy(out, s->ring + i, head);
	memcpy(out + head, s->ring, n - head);
}

/* A ring of `cap` with the same bytes at the same offsets. */
static bool change_ring(struct fs_session *s, size_t cap)
{
	uint8_t *ring = malloc(cap);
	if (!ring)
		return false;
	struct fs_session old = *s;
	s->ring = ring;
	s->cap = cap;
	for (uint64_t at = old.dropped; at < old.total;) {
		size_t i = (size_t)(at % old.cap);
		size_t n = (size_t)FS_MIN((uint64_t)(old.cap - i), old.total - at);
		copy_in(s, at, old.ring + i, n);
		at += n;
	}
	free(old.ring);
	return true;
}

/* Tries to get room for all bytes and n more; with less memory the ring stays as it is. Called without the
 * session's lock, since the table's may be needed: what it reads is changed by the producer alone. */
static void grow(struct fs_session *s, size_t n)
{
	size_t most = s->table->o.ring_bytes, cap = s->cap, old = s->cap;
	uint64_t want = s->total - s->dropped + n;
	while (cap < want && cap < most)
		cap = FS_MIN(cap * 2, most);
	if (cap <= old || !stream_take_memory(s->table, cap - old, s))
		return;
	pthread_mutex_lock(&s->lock);
	if (!change_ring(s, cap))
		atomic_fetch_sub(&s->table->bytes, cap - old);
	pthread_mutex_unlock(&s->lock);
}

static void drop_to(struct fs_session *s, uint64_t dropped)
{
	atomic_fetch_add(&s->table->dropped_bytes, dropped - s->dropped);
	s->dropped = dropped;
}

static void append_locked(struct fs_session *s, const uint8_t *data, size_t n)
{
	uint64_t total = s->total + n;
	if (total - s->dropped > s->cap)
		drop_to(s, total - s->cap);
	size_t keep = (size_t)FS_MIN((uint64_t)n, total - s->dropped);
	copy_in(s, total - keep, data + n - keep, keep);
	s->total = total;
}

/* "id: N\n" where N counts itself. */
static size_t id_line(uint64_t total, size_t n, char out[32])
{
	size_t len = 0;
	for (int digits = 1; digits <= 20; digits++) {
		size_t guess = 5 + (size_t)digits;
		len = (size_t)snprintf(out, 32, "id: %llu\n", (unsigned long long)(total + guess + n));
		if (len == guess)
			break;
	}
	return len;
}

/* ---- the producer ---- */

static void tell_readers(struct fs_session *s)
{
	pthread_mutex_lock(&s->notify_lock);
	for (struct fs_reader *r = s->readers; r; r = r->next)
		r->notify(r->arg);
	pthread_mutex_unlock(&s->notify_lock);
}

void fs_session_kind(struct fs_session *s, bool events, int status, const char *content_type)
{
	if (!s)
		return;
	pthread_mutex_lock(&s->lock);
	s->kind.known = true;
	s->kind.events = events;
	s->kind.status = status;
	s->kind.content_type = content_type;
	pthread_mutex_unlock(&s->lock);
	tell_readers(s);
}

void fs_session_expect_events(struct fs_session *s, const char *before, const char *after)
{
	if (!s)
		return;
	pthread_mutex_lock(&s->lock);
	s->kind.events_expected = true;
	s->kind.error_before = before;
	s->kind.error_after = after;
	pthread_mutex_unlock(&s->lock);
	tell_readers(s);
}

void fs_session_append(struct fs_session *s, const void *data, size_t n)
{
	if (!s || n == 0)
		return;
	grow(s, n);
	pthread_mutex_lock(&s->lock);
	append_locked(s, data, n);
	pthread_mutex_unlock(&s->lock);
	tell_readers(s);
}

void fs_session_event(struct fs_session *s, const void *data, size_t n)
{
	char line[32];
	if (!s || n == 0)
		return;
	grow(s, n + sizeof(line));
	pthread_mutex_lock(&s->lock);
	if (s->event_ids)
		append_locked(s, (const uint8_t *)line, id_line(s->total, n, line));
	append_locked(s, data, n);
	pthread_mutex_unlock(&s->lock);
	tell_readers(s);
}

void fs_session_finish(struct fs_session *s)
{
	if (!s)
		return;
	stream_completed(s);
	tell_readers(s);
	stream_session_unref(s);
}

void stream_session_end(struct fs_session *s, enum fs_cancel_cause cause)
{
	pthread_mutex_lock(&s->lock);
	bool running = !s->done;
	pthread_mutex_unlock(&s->lock);
	if (running)
		fs_cancel_fire(s->cancel, cause);
}

/* ---- readers ---- */

int fs_reader_attach_to(
        struct fs_session *s, uint64_t from, void (*notify)(void *arg), void *arg, struct fs_reader **out)
{
	struct fs_reader *r = calloc(1, sizeof(*r));
	if (!r)
		return FS_ENOMEM;
	*r = (struct fs_reader){.s = s, .at = from, .notify = notify, .arg = arg};
	pthread_mutex_lock(&s->notify_lock);
	pthread_mutex_lock(&s->lock);
	bool lost = from < s->dropped;
	if (!lost) {
		r->next = s->readers;
		if (s->readers)
			s->readers->prev = r;
		s->readers = r;
		s->n_readers++;
	}
	pthread_mutex_unlock(&s->lock);
	pthread_mutex_unlock(&s->notify_lock);
	if (lost) {
		free(r);
		return FS_ELIMIT;
	}
	atomic_fetch_add(&s->refs, 1);
	atomic_fetch_add(&s->table->n_readers, 1);
	*out = r;
	return FS_OK;
}

void fs_reader_detach(struct fs_reader *r)
{
	if (!r)
		return;
	struct fs_session *s = r->s;
	pthread_mutex_lock(&s->notify_lock);
	pthread_mutex_lock(&s->lock);
	if (r->next)
		r->next->prev = r->prev;
	if (r->prev)
		r->prev->next = r->next;
	else
		s->readers = r->next;
	s->n_readers--;
	pthread_mutex_unlock(&s->lock);
	pthread_mutex_unlock(&s->notify_lock);
	atomic_fetch_sub(&s->table->n_readers, 1);
	free(r);
	stream_session_unref(s);
}

void fs_reader_kind(struct fs_reader *r, struct fs_reader_kind *out)
{
	pthread_mutex_lock(&r->s->lock);
	*out = r->s->kind;
	pthread_mutex_unlock(&r->s->lock);
}

ssize_t fs_reader_read(struct fs_reader *r, void *buf, size_t cap)
{
	struct fs_session *s = r->s;
	ssize_t rc;
	pthread_mutex_lock(&s->lock);
	if (r->at < s->dropped) {
		rc = FS_ELIMIT;
	} else if (r->at < s->total) {
		size_t n = (size_t)FS_MIN((uint64_t)cap, s->total - r->at);
		copy_out(s, r->at, buf, n);
		r->at += n;
		rc = (ssize_t)n;
	} else {
		rc = s->done ? FS_ECANCELLED : 0;
	}
	pthread_mutex_unlock(&s->lock);
	return rc;
}

uint64_t fs_reader_offset(const struct fs_reader *r)
{
	return r->at;
}
