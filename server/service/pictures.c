/*
 * From picture bytes to rows, without the engine's turn. Headers and limits are checked for all pictures
 * before anything costly starts; the same picture twice in a request is encoded once; different ones side by
 * side. The first failure cancels the others.
 */
#include "server/service/pictures.h"

#include <openssl/evp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define KEY_VERSION "farsight rows 1"

struct work {
	uint8_t key[32];
	struct fs_vision_job *job; /* NULL: same picture as `same` */
	size_t same;
};

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
static int make_key(const struct fs_service_opts *o, const struct fs_picture *p, uint8_t key[32])
{
	EVP_MD_CTX *ctx = EVP_MD_CTX_new();
	uint8_t dtype = o->f16;
	bool ok = ctx && EVP_DigestInit_ex(ctx, EVP_sha256(), NULL) &&
	          EVP_DigestUpdate(ctx, KEY_VERSION, sizeof(KEY_VERSION)) &&
	          EVP_DigestUpdate(ctx, &dtype, 1) && EVP_DigestUpdate(ctx, p->bytes, p->n) &&
	          EVP_DigestFinal_ex(ctx, key, NULL);
	EVP_MD_CTX_free(ctx);
	return ok ? FS_OK : FS_EINTERNAL;
}

/* In each API's envelope this is the one code by which a client tells "no eyes now" from "your picture is
 * bad". */
static int refuse_encode(struct fs_refusal *why, int rc, const char *where, const char *text)
{
	switch (rc) {
	case FS_EINVAL:
	case FS_EFORMAT:
	case FS_ELIMIT:
		return fs_refuse(why, 400, "invalid_request_error", "picture_unreadable", where,
		        "the picture could not be encoded: %s", text);
	case FS_ECANCELLED:
		return FS_ECANCELLED;
	default:
		return fs_refuse(why, 400, "invalid_request_error", "vision_unavailable", where,
		        "the image encoder is not available: %s", text);
	}
}

static int submit_all(const struct fs_service_opts *o, const struct fs_chat *chat, struct fs_cancel *cancel,
        struct work *w, struct fs_refusal *why)
{
	for (size_t i = 0; i < chat->n_pictures; i++) {
		const struct fs_picture *p = &chat->pictures[i];
		if (make_key(o, p, w[i].key))
			return fs_refuse(why, 500, "server_error", NULL, "", "internal error");
		w[i].same = i;
		for (size_t j = 0; j < i && w[i].same == i; j++)
			if (memcmp(w[i].key, w[j].key, sizeof(w[i].key)) == 0)
				w[i].same = w[j].same;
		if (w[i].same != i)
			continue;
		struct fs_errbuf e = {""};
		struct fs_encode_params params = {0};
		int rc =
		        fs_vision_submit(o->vision, p->bytes, p->n, w[i].key, &params, cancel, &w[i].job, &e);
		if (rc)
			return refuse_encode(why, rc, p->where, e.text);
	}
	return FS_OK;
}

static int wait_all(const struct fs_chat *chat, struct work *w, struct fs_rows **rows, struct fs_refusal *why)
{
	for (size_t i = 0; i < chat->n_pictures; i++) {
		struct fs_errbuf e = {""};
		if (w[i].same != i) {
			rows[i] = fs_rows_ref(rows[w[i].same]);
			continue;
		}
		int rc = fs_vision_wait(w[i].job, &rows[i], &e);
		if (rc)
			return refuse_encode(why, rc, chat->pictures[i].where, e.text);
	}
	return FS_OK;
}

static void forward_cancel(void *arg)
{
	fs_cancel_fire(arg, FS_CANCEL_CLIENT);
}

int fs_pictures_encode(const struct fs_service_opts *o, const struct fs_chat *chat, struct fs_cancel *cancel,
        struct fs_rows **rows, struct fs_refusal *why)
{
	size_t n = chat->n_pictures;
	if (n == 0)
		return FS_OK;
	if (!o->vision)
		return fs_refuse(why, 400, "invalid_request_error", "vision_unavailable",
		        chat->pictures[0].where,
		        "this server has no image encoder: it can not read pictures");
	int rc = check_headers(o, chat, why);
	if (rc)
		return rc;

	/* The jobs' own token: fires with the request's, or when one picture fails. */
	struct work *w = calloc(n, sizeof(*w));
	struct fs_cancel *own = fs_cancel_create(fs_cancel_deadline(cancel));
	struct fs_cancel_hook hook = {.fn = forward_cancel, .arg = own};
	if (!w || !own) {
		free(w);
		fs_cancel_unref(own);
		return fs_refuse(why, 500, "server_error", NULL, "", "out of memory");
	}
	if (!fs_cancel_listen(cancel, &hook))
		fs_cancel_fire(own, FS_CANCEL_CLIENT);
	rc = submit_all(o, chat, own, w, why);
	if (!rc)
		rc = wait_all(chat, w, rows, why);
	if (rc && fs_cancelled(
	                  cancel)) /* the jobs share its deadline; whichever noticed first, it is the cause */
		rc = FS_ECANCELLED;
	if (rc)
		fs_cancel_fire(own, FS_CANCEL_SIBLING);
	for (size_t i = 0; i < n; i++) {
		fs_vision_job_destroy(w[i].job);
		if (rc) {
			fs_rows_unref(rows[i]);
			rows[i] = NULL;
		}
	}
	fs_cancel_unlisten(cancel, &hook);
	fs_cancel_unref(own);
	free(w);
	return rc;
}
