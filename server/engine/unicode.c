/* unicode: see unicode.h. */
#include "server/engine/unicode.h"

static unsigned ascii_class(uint32_t cp)
{
	if ((cp | 0x20) >= 'a' && (cp | 0x20) <= 'z')
		return FS_UC_LETTER;
	if (cp >= '0' && cp <= '9')
		return FS_UC_NUMBER;
	return cp == ' ' || (cp >= '\t' && cp <= '\r') ? FS_UC_SPACE : 0;
}

unsigned fs_uclass(uint32_t cp)
{
	size_t lo = 0, hi = fs_unicode_n_changes;

	if (cp < 0x80)
		return ascii_class(cp);
	if (cp > 0x10ffff)
		return 0;
	while (hi - lo > 1) { /* changes[lo] <= cp < changes[hi] */
		size_t mid = lo + (hi - lo) / 2;

		if (fs_unicode_changes[mid] >> 8 <= cp)
			lo = mid;
		else
			hi = mid;
	}
	return fs_unicode_changes[lo] & 0xff;
}
