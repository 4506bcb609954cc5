/*
 * stop: see stop.h. Held text never exceeds the longest stop string plus one piece. It refuses empty stop
 * strings, which would end every answer, and those beyond FS_STOP_MAX_BYTES.
 */
#include "server/engine/stop.h"

#include <string.h>

#define MAX_HELD ((size_t)1 << 20)

int fs_stop_init(struct fs_stop *s, const char *const *stops, size_t n, struct fs_errbuf *e)
{
	memset(s, 0, sizeof(*s));
	FS_ASSERT(n <= FS_MAX_STOPS);
	for (size_t i = 0; i < n; i++) {
		s->len[i] = stops[i] != NULL ? strlen(stops[i]) : 0;
		if (s->len[i] == 0)
			return fs_fail(e, FS_EINVAL, "stop string %zu is empty", i + 1);
		if (s->len[i] > FS_STOP_MAX_BYTES)
			return fs_fail(e, FS_EINVAL, "stop string %zu is longer than %d bytes", i + 1,
			        FS_STOP_MAX_BYTES);
	}
	s->stops = stops;
	s->n = n;
	fs_buf_init(&s->held, MAX_HELD);
	return FS_OK;
}

void fs_stop_finish(struct fs_stop *s)
{
	fs_buf_finish(&s->held);
}

static void put_out(struct fs_stop *s, size_t n, fs_stop_out out, void *arg)
{
	if (n > 0 && out != NULL)
		out(arg, (const char *)s->held.data, n);
	fs_buf_consume(&s->held, n);
}

/* The first place where a whole stop string lies; held.len when there is none. */
static size_t find_stop(const struct fs_stop *s, int *hit)
{
	size_t best = s->held.len;

	*hit = -1;
	for (size_t i = 0; i < s->n; i++) {
		const uint8_t *at = memmem(s->held.data, s->held.len, s->stops[i], s->len[i]);
		if (at != NULL && (size_t)(at - s->held.data) < best) {
			best = (size_t)(at - s->held.data);
			*hit = (int)i;
		}
	}
	return best;
}

static bool may_start(const struct fs_stop *s, size_t at)
{
	size_t n = s->held.len - at;

	for (size_t i = 0; i < s->n; i++)
		if (n < s->len[i] && memcmp(s->held.data + at, s->stops[i], n) == 0)
			return true;
	return false;
}

/* Where text must be held from: the longest tail that begins a stop string, moved back to the start of its
 * character. */
static size_t hold_from(const struct fs_stop *s)
{
	size_t longest = 0, at;

	for (size_t i = 0; i < s->n; i++)
		longest = FS_MAX(longest, s->len[i]);
	at = s->held.len > longest ? s->held.len - longest : 0;
	while (at < s->held.len && !may_start(s, at))
		at++;
	while (at > 0 && at < s->held.len && (s->held.data[at] & 0xc0) == 0x80)
		at--;
	return at;
}

int fs_stop_push(struct fs_stop *s, const char *text, size_t n, fs_stop_out out, void *arg, int *hit)
{
	int err;

	*hit = -1;
	if (n == 0)
		return FS_OK;
	err = fs_buf_append(&s->held, text, n);
	if (err != FS_OK)
		return err;
	size_t at = find_stop(s, hit);
	if (*hit >= 0) {
		put_out(s, at, out, arg);
		fs_buf_clear(&s->held);
		return FS_OK;
	}
	put_out(s, hold_from(s), out, arg);
	return FS_OK;
}

void fs_stop_flush(struct fs_stop *s, fs_stop_out out, void *arg)
{
	put_out(s, s->held.len, out, arg);
}
