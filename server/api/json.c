/*
 * Reads the JSON of bodies: piece by piece, so that a large one can be given up on the way, and within bounds
 * of the memory that its values take: two braces are some 250 bytes then. All that are read are counted
 * together.
 */
#include "server/api/internal.h"

#include <malloc.h>
#include <stdatomic.h>
#include <string.h>

#define PIECE ((size_t)64 << 10) /* parsed between two looks at the cancel token */
#define MOST_OF_ONE ((size_t)256 << 20)
#define MOST_OF_ALL ((size_t)1 << 30)
#define LARGE ((size_t)16 << 20) /* its memory goes back to the system, not only to this process */

static atomic_size_t taken; /* of all bodies */

/* ---- what values take ---- */

struct scan {
	bool in_string, escaped;
	size_t cost;
};

static void scan(struct scan *s, const char *p, size_t n)
{
	for (size_t i = 0; i < n; i++) {
		char c = p[i];
		if (s->in_string) {
			s->in_string = s->escaped || c != '"';
			s->escaped = !s->escaped && c == '\\';
		} else if (c == '"') {
			s->in_string = true;
		} else if (c == '{' || c == '[') {
			s->cost += 256;
		} else if (c == ',') {
			s->cost += 64;
		} else if (c == ':') {
			s->cost += 96;
		}
	}
}

size_t api_json_cost(const char *text, size_t n)
{
	struct scan s = {0};
	scan(&s, text, n);
	return s.cost;
}

/* ---- reading ---- */

struct body {
	const char *at;
	size_t left;
	struct fs_cancel *cancel;
	struct scan scan;
	size_t charged;
	bool too_many, busy;
};

static bool charge(struct body *b)
{
	size_t more = b->scan.cost - b->charged;
	size_t all = atomic_fetch_add(&taken, more) + more;
	b->charged = b->scan.cost;
	b->too_many = b->charged > MOST_OF_ONE;
	b->busy = !b->too_many && all > MOST_OF_ALL;
	return !b->too_many && !b->busy;
}

static size_t next_piece(void *buffer, size_t size, void *arg)
{
	struct body *b = arg;
	if (fs_cancelled(b->cancel))
		return (size_t)-1;
	size_t n = FS_MIN(FS_MIN(size, PIECE), b->left);
	scan(&b->scan, b->at, n);
	if (!charge(b))
		return (size_t)-1;
	memcpy(buffer, b->at, n);
	b->at += n;
	b->left -= n;
	return n;
}

static int refuse(const struct body *b, const json_error_t *je, struct fs_refusal *why)
{
	if (fs_cancelled(b->cancel))
		return FS_ECANCELLED;
	if (b->too_many)
		return fs_refuse(why, 413, "invalid_request_error", "request_too_large", "",
		        "the body holds more values of JSON than this server takes: millions");
	if (b->busy)
		return fs_refuse(why, 503, "unavailable_error", "busy", "",
		        "too many values of requests' JSON are in memory; try again shortly");
	return fs_refuse(why, 400, "invalid_request_error", "invalid_json", "",
	        "the body is not JSON: line %d, column %d: %s", je->line, je->column, je->text);
}

void api_json_release(size_t cost)
{
	atomic_fetch_sub(&taken, cost);
	if (cost >= LARGE)
		malloc_trim(0);
}

int api_load_json(const char *text, size_t n, struct fs_cancel *cancel, json_t **out, size_t *cost,
        struct fs_refusal *why)
{
	struct body b = {.at = text, .left = n, .cancel = cancel};
	json_error_t je;
	json_t *root = json_load_callback(next_piece, &b, JSON_ALLOW_NUL, &je);
	int rc = root ? FS_OK : refuse(&b, &je, why);
	if (!rc && fs_cancelled(cancel)) /* a long string is made at its end, at one go */
		rc = FS_ECANCELLED;
	if (!rc && !json_is_object(root))
		rc = fs_refuse(why, 400, "invalid_request_error", "invalid_json", "",
		        "the body must be a JSON object");
	if (rc) {
		json_decref(root);
		api_json_release(b.charged);
		return rc;
	}
	*out = root;
	*cost = b.charged;
	return FS_OK;
}
