/* Fuzz target: bytes as a stream of server-sent events, whole and in pieces of every size; both must tell the
 * same. */
#include "server/cli/cli.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static int take(void *arg, const char *text, size_t n, struct fs_errbuf *e)
{
	if (text[n] != '\0' || fs_buf_append(arg, text, n) || fs_buf_append(arg, "\n", 1))
		abort();
	return n == 3 && memcmp(text, "end", 3) == 0 ? FS_ECANCELLED : FS_OK;
}

static int feed(const uint8_t *data, size_t n, size_t piece, struct fs_buf *told)
{
	struct cli_sse s;
	struct cli_http_events events = {.on_event = take, .arg = told};
	int rc = FS_OK;
	fs_buf_init(&s.line, 256);
	for (size_t at = 0; at < n && !rc; at += piece)
		rc = cli_sse_feed(&s, (const char *)data + at, FS_MIN(piece, n - at), &events, NULL);
	fs_buf_finish(&s.line);
	return rc;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
	struct fs_buf whole, pieces;
	fs_buf_init(&whole, 1 << 20);
	fs_buf_init(&pieces, 1 << 20);
	int a = feed(data, n, n + 1, &whole), b = feed(data, n, n > 0 ? 1 + data[0] % 17 : 1, &pieces);
	/* a line that is too long may be noticed sooner or later, never its events */
	if (a != b || whole.len != pieces.len || (whole.len && memcmp(whole.data, pieces.data, whole.len)))
		abort();
	fs_buf_finish(&whole);
	fs_buf_finish(&pieces);
	return 0;
}
