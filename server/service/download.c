/* All downloads of a request run side by side on fetch's thread; the worker reads the files meanwhile, and
 * then waits for one download after the other. */
#include "server/service/download.h"

#include "server/fetch/fetch.h"
#include "server/service/files.h"

#include <stdlib.h>

static bool wants_fetch(const struct fs_chat *chat)
{
	for (size_t i = 0; i < chat->n_pictures; i++)
		if (chat->pictures[i].url || chat->pictures[i].path)
			return true;
	return false;
}

static int refuse_fetch(struct fs_refusal *why, int rc, const char *where, const char *text)
{
	if (rc == FS_ECANCELLED)
		return rc;
	const char *code = rc == FS_ELIMIT ? "picture_too_large" : "picture_not_fetched";
	if (rc == FS_EUNAVAILABLE)
		return fs_refuse(why, 503, "unavailable_error", code, where, "%s", text);
	return fs_refuse(why, 400, "invalid_request_error", code, where, "%s", text);
}

static int submit_all(const struct fs_service_opts *o, const struct fs_chat *chat, struct fs_cancel *cancel,
        struct fs_fetch_job **jobs, struct fs_refusal *why)
{
	for (size_t i = 0; i < chat->n_pictures; i++) {
		const struct fs_picture *p = &chat->pictures[i];
		struct fs_errbuf e = {""};
		int rc = p->url ? fs_fetch_submit(o->fetch, p->url, cancel, &jobs[i], &e) : FS_OK;
		if (rc)
			return refuse_fetch(why, rc, p->where, e.text);
	}
	return FS_OK;
}

static int read_files(const struct fs_service_opts *o, struct fs_chat *chat, struct fs_cancel *cancel,
        struct fs_refusal *why)
{
	for (size_t i = 0; i < chat->n_pictures; i++) {
		struct fs_picture *p = &chat->pictures[i];
		struct fs_errbuf e = {""};
		int rc = p->path ? fs_file_read(p->path, o->picture_folders, o->n_picture_folders,
		                           o->picture.max_bytes, cancel, &p->bytes, &p->n, &e)
		                 : FS_OK;
		if (rc)
			return refuse_fetch(why, rc, p->where, e.text);
	}
	return FS_OK;
}

static int take_all(struct fs_chat *chat, struct fs_fetch_job **jobs, struct fs_refusal *why)
{
	for (size_t i = 0; i < chat->n_pictures; i++) {
		struct fs_picture *p = &chat->pictures[i];
		struct fs_errbuf e = {""};
		int rc = jobs[i] ? fs_fetch_wait(jobs[i], &p->bytes, &p->n, &e) : FS_OK;
		if (rc)
			return refuse_fetch(why, rc, p->where, e.text);
	}
	return FS_OK;
}

int fs_pictures_fetch(const struct fs_service_opts *o, struct fs_chat *chat, struct fs_cancel *cancel,
        struct fs_record *rec, struct fs_refusal *why)
{
	if (!wants_fetch(chat))
		return FS_OK;
	if (!fs_vision_has_hosts(o->vision)) /* nothing would be done with them */
		return FS_OK;
	fs_record_phase(rec, FS_PHASE_FETCH);
	struct fs_fetch_job **jobs = calloc(chat->n_pictures, sizeof(struct fs_fetch_job *));
	if (!jobs)
		return fs_refuse(why, 500, "server_error", NULL, "", "out of memory");
	int rc = submit_all(o, chat, cancel, jobs, why);
	if (!rc)
		rc = read_files(o, chat, cancel, why);
	if (!rc)
		rc = take_all(chat, jobs, why);
	for (size_t i = 0; i < chat->n_pictures; i++)
		fs_fetch_job_destroy(jobs[i]);
	free(jobs);
	return rc;
}
