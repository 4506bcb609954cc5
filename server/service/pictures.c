/*
 * From picture bytes to rows, without the engine's turn. Headers and limits are checked for all pictures
 * before anything costly starts; different pictures are encoded side by side, the same one once, whoever
 * asks for it (flight.h). The first failure ends this request's part in the others.
 */
#include "server/service/pictures.h"

#include "server/service/flight.h"

#include <inttypes.h>
#include <openssl/evp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define KEY_VERSION "farsight rows 2"

static int check_headers(const struct fs_service_opts *o, const struct fs_chat *chat, struct fs_refusal *why)
{
	for (size_t i = 0; i < chat->n_pictures; i++) {
		const struct fs_picture *p = &chat->pictures[i];
		struct fs_image_info info;
		struct fs_errbuf e;
		int rc = fs_image_probe(p->bytes, p->n, &o->picture, &info, &e);
		if (rc)
			return fs_refuse(why, 400, "invalid_request_error",
			        rc == FS_ELIMIT ? "picture_too_large" : "picture_unreadable", p->where, "%s",
			        e.text);
	}
	return FS_OK;
}

/* Names rows: the picture's bytes and everything that this server knows to change its rows. */
static int make_key(const char *identity, struct fs_flight_picture *p)
{
	int32_t limits[2] = {p->params.min_tokens, p->params.max_tokens};
	EVP_MD_CTX *ctx = EVP_MD_CTX_new();
	bool ok = ctx && EVP_DigestInit_ex(ctx, EVP_sha256(), NULL) &&
	          EVP_DigestUpdate(ctx, KEY_VERSION, sizeof(KEY_VERSION)) &&
	          EVP_DigestUpdate(ctx, identity, strlen(identity) + 1) &&
	          EVP_DigestUpdate(ctx, limits, sizeof(limits)) && EVP_DigestUpdate(ctx, p->bytes, p->n) &&
	          EVP_DigestFinal_ex(ctx, p->key, NULL);
	EVP_MD_CTX_free(ctx);
	return ok ? FS_OK : FS_EINTERNAL;
}

/* In each API's envelope this is the one code by which a client tells "no eyes now" from "your picture is
 * bad". */
static int refuse_encode(
        const struct fs_service_opts *o, struct fs_refusal *why, int rc, const char *where, const char *text)
{
	int refused;
	switch (rc) {
	case FS_EINVAL:
	case FS_EFORMAT:
		return fs_refuse(why, 400, "invalid_request_error", "picture_unreadable", where,
		        "the picture could not be encoded: %s", text);
	case FS_ELIMIT: /* no host takes so many bytes */
		return fs_refuse(why, 400, "invalid_request_error", "picture_too_large", where, "%s", text);
	case FS_ECANCELLED:
		return FS_ECANCELLED;
	default:
		refused = fs_refuse(why, 400, "invalid_request_error", "vision_unavailable", where,
		        "the image encoder is not available: %s", text);
		why->retry_after_s = fs_vision_retry_after_s(o->vision);
		return refused;
	}
}

/* Hashing and copying a picture takes tens of milliseconds, and there may be many. */
static int join_all(const struct fs_service_opts *o, struct fs_chat *chat, struct fs_seat **seats,
        struct fs_cancel *cancel, struct fs_refusal *why)
{
	char identity[FS_VISION_IDENTITY];
	fs_vision_identity(o->vision, identity);
	for (size_t i = 0; i < chat->n_pictures; i++) {
		struct fs_picture *p = &chat->pictures[i];
		struct fs_flight_picture fp = {
		        .bytes = p->bytes, .n = p->n, .params = {.max_tokens = p->max_tokens}};
		struct fs_errbuf e = {""};
		if (fs_cancelled(cancel))
			return FS_ECANCELLED;
		if (make_key(identity, &fp))
			return fs_refuse(why, 500, "server_error", NULL, "", "internal error");
		int rc = fs_flight_join(o->flights, &fp, &seats[i], &e);
		if (rc)
			return refuse_encode(o, why, rc, p->where, e.text);
		p->cached = fs_seat_cached(seats[i]);
	}
	return FS_OK;
}

static int wait_all(const struct fs_service_opts *o, const struct fs_chat *chat, struct fs_seat **seats,
        struct fs_cancel *cancel, struct fs_rows **rows, struct fs_refusal *why)
{
	for (size_t i = 0; i < chat->n_pictures; i++) {
		struct fs_errbuf e = {""};
		int rc = fs_seat_wait(seats[i], cancel, &rows[i], &e);
		if (rc)
			return refuse_encode(o, why, rc, chat->pictures[i].where, e.text);
	}
	return FS_OK;
}

static uint64_t sum_of(const void *data, size_t n)
{
	uint8_t md[EVP_MAX_MD_SIZE] = {0};
	uint64_t sum = 0;
	EVP_Digest(data, n, md, NULL, EVP_sha256(), NULL);
	for (int i = 0; i < 8; i++)
		sum = sum << 8 | md[i];
	return sum;
}

/* Lets two runs be compared: which rows came of which bytes, whoever encoded them. Costs a pass over both. */
static void log_sums(const struct fs_chat *chat, struct fs_rows *const *rows)
{
	for (size_t i = 0; i < chat->n_pictures && fs_log_get_level() >= FS_LOG_DEBUG; i++) {
		const struct fs_rows_shape *s = &rows[i]->shape;
		size_t bytes = (size_t)s->n_tokens * (size_t)s->n_embd * sizeof(float);
		fs_debug("picture %016" PRIx64 ": %d x %d rows of %d, sum %016" PRIx64 ", from %s",
		        sum_of(chat->pictures[i].bytes, chat->pictures[i].n), s->nx, s->ny, s->n_embd,
		        sum_of(rows[i]->data, bytes), rows[i]->host);
	}
}

int fs_pictures_encode(const struct fs_service_opts *o, struct fs_chat *chat, struct fs_cancel *cancel,
        struct fs_rows **rows, struct fs_refusal *why)
{
	size_t n = chat->n_pictures;
	if (n == 0)
		return FS_OK;
	if (!fs_vision_has_hosts(o->vision))
		return fs_refuse(why, 400, "invalid_request_error", "vision_unavailable",
		        chat->pictures[0].where,
		        "this server has no image encoder: it can not read pictures");
	int rc = check_headers(o, chat, why);
	if (rc)
		return rc;
	struct fs_seat **seats = calloc(n, sizeof(struct fs_seat *));
	if (!seats)
		return fs_refuse(why, 500, "server_error", NULL, "", "out of memory");
	rc = join_all(o, chat, seats, cancel, why);
	if (!rc)
		rc = wait_all(o, chat, seats, cancel, rows, why);
	if (rc && fs_cancelled(cancel)) /* whichever was noticed first, it is the cause */
		rc = FS_ECANCELLED;
	for (size_t i = 0; i < n; i++) {
		fs_seat_leave(seats[i]);
		if (rc) {
			fs_rows_unref(rows[i]);
			rows[i] = NULL;
		}
	}
	free(seats);
	if (!rc)
		log_sums(chat, rows);
	return rc;
}
