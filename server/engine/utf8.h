/*
 * utf8: decoding of untrusted UTF-8, one character at a time, by Unicode 15 table 3-7 (no overlong forms, no
 * surrogates, nothing above U+10FFFF). No state, any thread; never reads outside [s, s+n). Internal to
 * server/engine.
 */
#ifndef FS_ENGINE_UTF8_H
#define FS_ENGINE_UTF8_H

#include "common/base/base.h"

enum fs_utf8_state {
	FS_UTF8_OK,  /* a character */
	FS_UTF8_BAD, /* bytes that begin no character: the maximal subpart, to be replaced by one U+FFFD */
	FS_UTF8_INCOMPLETE, /* the input ends inside a character that is right so far: *len == n */
};
/* n >= 1. *len is the number of bytes used up (1..4); *cp the code point, U+FFFD unless OK. */
enum fs_utf8_state fs_utf8_next(const uint8_t *s, size_t n, uint32_t *cp, size_t *len);

/* For text known to be valid. n >= 1; returns the length, 1..4. */
static inline size_t fs_utf8_get(const uint8_t *s, size_t n, uint32_t *cp)
{
	size_t len;

	if (s[0] < 0x80) {
		*cp = s[0];
		return 1;
	}
	fs_utf8_next(s, n, cp, &len);
	return len;
}

/* cp must be a scalar value. Returns the length. */
size_t fs_utf8_put(uint32_t cp, uint8_t out[4]);

/* Appends text with each bad part replaced by U+FFFD; what is appended is valid UTF-8 of at most 3 * n bytes.
 */
int fs_utf8_append_clean(struct fs_buf *out, const void *text, size_t n);

#endif
