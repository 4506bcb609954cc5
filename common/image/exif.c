/*
 * The one fact that is wanted from EXIF: the orientation (TIFF tag 0x0112 of the first directory). Stateless,
 * any thread. Damaged blocks count as absent: they must not make a good picture unreadable.
 */
#include "common/image/internal.h"

#include <string.h>

#define TAG_ORIENTATION 0x0112
#define TYPE_SHORT 3

struct tiff {
	const uint8_t *p;
	size_t n;
	bool big;
};

static uint32_t get_u16(const struct tiff *t, size_t at)
{
	return t->big ? (uint32_t)t->p[at] << 8 | t->p[at + 1] : (uint32_t)t->p[at + 1] << 8 | t->p[at];
}

static uint32_t get_u32(const struct tiff *t, size_t at)
{
	return t->big ? get_u16(t, at) << 16 | get_u16(t, at + 2) : get_u16(t, at + 2) << 16 | get_u16(t, at);
}

int image_exif_orientation(const uint8_t *exif, size_t n)
{
	struct tiff t = {exif, n, false};
	size_t at, entries;

	if (n >= 6 && memcmp(exif, "Exif\0\0", 6) == 0) {
		t.p += 6;
		t.n -= 6;
	}
	if (t.n < 8 || (memcmp(t.p, "II*\0", 4) != 0 && memcmp(t.p, "MM\0*", 4) != 0))
		return 1;
	t.big = t.p[0] == 'M';
	at = get_u32(&t, 4);
	if (at > t.n - 2)
		return 1;
	entries = FS_MIN((size_t)get_u16(&t, at), (t.n - at - 2) / 12);
	for (at += 2; entries > 0; entries--, at += 12)
		if (get_u16(&t, at) == TAG_ORIENTATION && get_u16(&t, at + 2) == TYPE_SHORT &&
		        get_u32(&t, at + 4) == 1) {
			uint32_t v = get_u16(&t, at + 8);

			return v >= 1 && v <= 8 ? (int)v : 1;
		}
	return 1;
}
