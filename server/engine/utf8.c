/* utf8: see utf8.h. */
#include "server/engine/utf8.h"

/* Length by lead byte and the range of the second byte (table 3-7); 0 = no lead byte. */
static size_t lead(uint8_t b, uint8_t *lo, uint8_t *hi)
{
	*lo = 0x80;
	*hi = 0xbf;
	if (b >= 0xc2 && b <= 0xdf)
		return 2;
	if (b >= 0xe0 && b <= 0xef) {
		if (b == 0xe0)
			*lo = 0xa0;
		if (b == 0xed)
			*hi = 0x9f;
		return 3;
	}
	if (b >= 0xf0 && b <= 0xf4) {
		if (b == 0xf0)
			*lo = 0x90;
		if (b == 0xf4)
			*hi = 0x8f;
		return 4;
	}
	return 0;
}

enum fs_utf8_state fs_utf8_next(const uint8_t *s, size_t n, uint32_t *cp, size_t *len)
{
	uint8_t lo, hi;
	uint32_t v;
	size_t want, i;

	if (s[0] < 0x80) {
		*cp = s[0];
		*len = 1;
		return FS_UTF8_OK;
	}
	*cp = 0xfffd;
	*len = 1;
	want = lead(s[0], &lo, &hi);
	if (want == 0)
		return FS_UTF8_BAD;
	v = s[0] & (0xffu >> (want + 1));
	for (i = 1; i < want; i++) {
		*len = i;
		if (i == n)
			return FS_UTF8_INCOMPLETE;
		if (s[i] < lo || s[i] > hi)
			return FS_UTF8_BAD;
		v = v << 6 | (s[i] & 0x3fu);
		lo = 0x80;
		hi = 0xbf;
	}
	*len = want;
	*cp = v;
	return FS_UTF8_OK;
}

size_t fs_utf8_put(uint32_t cp, uint8_t out[4])
{
	if (cp < 0x80) {
		out[0] = (uint8_t)cp;
		return 1;
	}
	if (cp < 0x800) {
		out[0] = (uint8_t)(0xc0 | cp >> 6);
		out[1] = (uint8_t)(0x80 | (cp & 0x3f));
		return 2;
	}
	if (cp < 0x10000) {
		out[0] = (uint8_t)(0xe0 | cp >> 12);
		out[1] = (uint8_t)(0x80 | (cp >> 6 & 0x3f));
		out[2] = (uint8_t)(0x80 | (cp & 0x3f));
		return 3;
	}
	out[0] = (uint8_t)(0xf0 | cp >> 18);
	out[1] = (uint8_t)(0x80 | (cp >> 12 & 0x3f));
	out[2] = (uint8_t)(0x80 | (cp >> 6 & 0x3f));
	out[3] = (uint8_t)(0x80 | (cp & 0x3f));
	return 4;
}

int fs_utf8_append_clean(struct fs_buf *out, const void *text, size_t n)
{
	const uint8_t *s = text;
	size_t i = 0, good = 0, len;
	uint32_t cp;
	int rc;

	if (n == 0) /* text may be NULL then */
		return FS_OK;
	while (i < n) {
		if (fs_utf8_next(s + i, n - i, &cp, &len) == FS_UTF8_OK) {
			i += len;
			continue;
		}
		if ((rc = fs_buf_append(out, s + good, i - good)) != FS_OK ||
		        (rc = fs_buf_append(out, "\xef\xbf\xbd", 3)) != FS_OK)
			return rc;
		i += len;
		good = i;
	}
	return fs_buf_append(out, s + good, n - good);
}
