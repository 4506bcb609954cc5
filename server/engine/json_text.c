/* json_text: see json_text.h. */
#include "server/engine/json_text.h"

#include <stdlib.h>

static char *dump(const json_t *v, size_t digits)
{
	return json_dumps(v, JSON_ENCODE_ANY | JSON_REAL_PRECISION(digits));
}

static bool reads_back(const json_t *v, const char *text)
{
	json_t *again = json_loads(text, JSON_DECODE_ANY, NULL);
	bool same = again != NULL && json_equal(v, again);

	json_decref(again);
	return same;
}

int fs_json_text(const json_t *v, struct fs_buf *out)
{
	size_t digits = 15;
	char *s = dump(v, digits);
	int rc;

	while (s != NULL && digits < 17 && !reads_back(v, s)) {
		free(s);
		s = dump(v, ++digits);
	}
	rc = s != NULL ? fs_buf_append_str(out, s) : FS_ENOMEM;
	free(s);
	return rc;
}
