/*
 * Fuzz target: the engine's readers of text: UTF-8, stop strings, JSON written anew. The first byte chooses
 * one and the size of its pieces. Compared: the cleaned text with its own cleaning, pieces with the whole, a
 * value with what its text reads as.
 */
#include "server/engine/json_text.h"
#include "server/engine/stop.h"
#include "server/engine/utf8.h"

#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static void clean(const uint8_t *s, size_t n)
{
	struct fs_buf once, twice;
	uint8_t again[4];
	uint32_t cp, same;
	size_t len;

	fs_buf_init(&once, 3 * n + 1);
	fs_buf_init(&twice, 3 * n + 1);
	FS_ASSERT(fs_utf8_append_clean(&once, s, n) == FS_OK);
	for (size_t at = 0; at < once.len; at += len) {
		FS_ASSERT(fs_utf8_next(once.data + at, once.len - at, &cp, &len) == FS_UTF8_OK);
		FS_ASSERT(len >= 1 && len <= 4 && fs_utf8_put(cp, again) == len &&
		          memcmp(again, once.data + at, len) == 0);
		FS_ASSERT(fs_utf8_get(once.data + at, once.len - at, &same) == len && same == cp);
	}
	FS_ASSERT(fs_utf8_append_clean(&twice, once.data, once.len) == FS_OK);
	FS_ASSERT(twice.len == once.len && (!once.len || memcmp(once.data, twice.data, once.len) == 0));
	fs_buf_finish(&once);
	fs_buf_finish(&twice);
}

/* ---- stop strings ---- */

static void take(void *arg, const char *utf8, size_t n)
{
	FS_ASSERT(n > 0 && fs_buf_append(arg, utf8, n) == FS_OK);
}

/* What comes out of text that goes in by pieces of whole characters, as the engine gives it. */
static bool stopped(const char *stop, const uint8_t *text, size_t n, size_t piece, struct fs_buf *out)
{
	struct fs_stop s;
	int hit = -1;

	FS_ASSERT(fs_stop_init(&s, &stop, 1, NULL) == FS_OK);
	for (size_t at = 0, len; at < n && hit < 0; at += len) {
		len = FS_MIN(piece, n - at);
		while (at + len < n && (text[at + len] & 0xc0) == 0x80)
			len++;
		FS_ASSERT(fs_stop_push(&s, (const char *)text + at, len, take, out, &hit) == FS_OK);
	}
	if (hit < 0)
		fs_stop_flush(&s, take, out);
	fs_stop_finish(&s);
	return hit >= 0;
}

/* The first line is the stop string, the rest the text. */
static void stop(const uint8_t *data, size_t n, size_t piece)
{
	struct fs_buf text, out;
	uint8_t *line, *found;
	size_t stop_n, rest_n;

	fs_buf_init(&text, 3 * n + 1);
	fs_buf_init(&out, 3 * n + 1);
	FS_ASSERT(fs_utf8_append_clean(&text, data, n) == FS_OK);
	line = text.len ? memchr(text.data, '\n', text.len) : NULL;
	stop_n = line ? (size_t)(line - text.data) : 0;
	if (stop_n > 0 && stop_n <= FS_STOP_MAX_BYTES && !memchr(text.data, '\0', stop_n)) {
		*line++ = '\0';
		rest_n = text.len - stop_n - 1;
		found = memmem(line, rest_n, text.data, stop_n);
		FS_ASSERT(stopped((char *)text.data, line, rest_n, piece, &out) == (found != NULL));
		FS_ASSERT(out.len == (found ? (size_t)(found - line) : rest_n));
		FS_ASSERT(!out.len || memcmp(out.data, line, out.len) == 0);
	}
	fs_buf_finish(&text);
	fs_buf_finish(&out);
}

/* ---- JSON ---- */

static void rewrite(const uint8_t *data, size_t n)
{
	json_t *v = json_loadb((const char *)data, n, JSON_DECODE_ANY, NULL), *again;
	struct fs_buf text;

	if (!v)
		return;
	fs_buf_init(&text, SIZE_MAX / 2);
	FS_ASSERT(fs_json_text(v, &text) == FS_OK);
	again = json_loadb((const char *)text.data, text.len, JSON_DECODE_ANY, NULL);
	FS_ASSERT(again && json_equal(v, again));
	json_decref(again);
	json_decref(v);
	fs_buf_finish(&text);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
	if (n < 1)
		return 0;
	switch (data[0] % 3) {
	case 0:
		clean(data + 1, n - 1);
		break;
	case 1:
		stop(data + 1, n - 1, 1 + data[0] / 3 % 16);
		break;
	default:
		rewrite(data + 1, n - 1);
	}
	return 0;
}
