/*
 * unicode: the three classes that pre-tokenizers ask for: \p{L}, \p{N} and \s (White_Space), by Unicode 16.0.
 * The table is made by scripts/gen-unicode. No state, any thread. Internal to server/engine.
 */
#ifndef FS_ENGINE_UNICODE_H
#define FS_ENGINE_UNICODE_H

#include "common/base/base.h"

enum fs_uclass { FS_UC_LETTER = 1, FS_UC_NUMBER = 2, FS_UC_SPACE = 4 };

/* Flags of a code point; 0 above U+10FFFF. */
unsigned fs_uclass(uint32_t cp);

/* Sorted: code point << 8 | flags that hold from there to the next entry; the first entry is U+0000's. */
extern const uint32_t fs_unicode_changes[];
extern const size_t fs_unicode_n_changes;

#endif
