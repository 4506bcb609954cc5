/* Fuzz target: a request's head, what access says of it, and the chunks behind it. In pieces or whole, the
 * same must come out, and nothing that two readers could take in two ways may pass. */
#include "server/http/access.h"
#include "server/http/internal.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

/* Names of conversations, offsets and the like: decoded, and never longer than they were. */
static void check_values(const struct http_head *h)
{
	static const char *const names[] = {"conv_id", "from", "x", ""};
	struct fs_http_request r = {.head = *h};
	for (size_t i = 0; i < FS_ARRAY_LEN(names); i++) {
		char *value = fs_http_query_value(&r, names[i]);
		FS_ASSERT(!value || strlen(value) <= strlen(h->query));
		free(value);
	}
	char *tail = fs_http_path_tail(&r, "/v1/stream/");
	FS_ASSERT(!tail || strlen(tail) <= strlen(h->path));
	free(tail);
}

static void check_head(const struct http_head *h)
{
	struct http_access a = {.own_names = {"box"}};
	struct http_refusal why = {0};
	size_t lengths = 0;
	FS_ASSERT(h->path[0] == '/' || strcmp(h->path, "*") == 0);
	FS_ASSERT(!(h->chunked && h->length >= 0));
	for (size_t i = 0; i < h->n_headers; i++) {
		FS_ASSERT(h->headers[i].name[0] && !strpbrk(h->headers[i].name, " \t\r\n:"));
		FS_ASSERT(!strpbrk(h->headers[i].value, "\r\n"));
		lengths += strcasecmp(h->headers[i].name, "Content-Length") == 0 ||
		           strcasecmp(h->headers[i].name, "Transfer-Encoding") == 0;
	}
	FS_ASSERT(lengths <= 1);
	if (!http_access_allows(&a, h, &why))
		FS_ASSERT(why.status == 403 && why.message[0]);
	http_access_cors(&a, h);
	check_values(h);
}

/* The body's bytes, in pieces of `piece`; the number of bytes used, or an error. */
static int64_t read_body(const char *p, size_t n, size_t piece, struct fs_buf *out)
{
	struct http_chunks c = {0};
	size_t at = 0;
	int rc = 0;
	while (rc == 0 && at < n) {
		size_t used, data_n;
		const char *data;
		rc = http_chunks_read(&c, p + at, FS_MIN(piece, n - at), &used, &data, &data_n, NULL);
		if (rc < 0)
			return rc;
		FS_ASSERT(used > 0 && data >= p && data + data_n <= p + n);
		FS_ASSERT(fs_buf_append(out, data, data_n) == FS_OK);
		at += used;
	}
	return (int64_t)at;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
	const char *p = (const char *)data;
	size_t scanned = 0, fresh = 0;
	int end = 0, status;
	for (size_t have = 1; have <= n && end == 0; have++)
		end = http_head_end(p, have, &scanned, NULL);
	FS_ASSERT(end == http_head_end(p, n, &fresh, NULL));
	struct http_head h;
	if (end > 0 && http_head_parse(p, (size_t)end, &h, &status, NULL) == FS_OK) {
		check_head(&h);
		http_head_finish(&h);
	} else if (end > 0) {
		FS_ASSERT(status >= 400);
	}
	size_t from = end > 0 ? (size_t)end : 0;
	struct fs_buf whole, pieces;
	fs_buf_init(&whole, n);
	fs_buf_init(&pieces, n);
	int64_t a = read_body(p + from, n - from, SIZE_MAX, &whole);
	int64_t b = read_body(p + from, n - from, 1, &pieces);
	FS_ASSERT(a == b &&
	          (a < 0 || (whole.len == pieces.len &&
	                            (!whole.len || memcmp(whole.data, pieces.data, whole.len) == 0))));
	fs_buf_finish(&whole);
	fs_buf_finish(&pieces);
	return 0;
}
