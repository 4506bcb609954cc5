/*
 * json_text: JSON values to text as Python's json.dumps writes them, which is what chat templates put into
 * the prompts that models are trained on: ", " and ": " between members, the order of the input, characters
 * beyond ASCII as they are, each real with the fewest digits (15 to 17 for the whole text) that read back the
 * same. Known differences: control characters are \u001B here and \u001b there, exponents 1e-7 and 1e-07. No
 * state, any thread. Internal to server/engine.
 */
#ifndef FS_ENGINE_JSON_TEXT_H
#define FS_ENGINE_JSON_TEXT_H

#include <jansson.h>

#include "common/base/base.h"

/* Appends. FS_ENOMEM. */
int fs_json_text(const json_t *v, struct fs_buf *out);

#endif
