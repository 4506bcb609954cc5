/*
 * fetch: the bytes behind http: and https: URLs of pictures. Owns one thread with a libcurl multi handle, on
 * which all downloads of all requests run side by side, at most max_active at once; the rest queue. Requests
 * submit from any thread and wait with their cancel token. It connects to public addresses and to what the
 * allow-list names, judged by the address actually connected to at every redirect; it speaks http and https
 * only, keeps no connection, cookie or password, and takes nothing from the environment.
 *
 * Texts of errors are for clients and do not tell why a server did not answer as wanted, so that nobody can
 * map a network through us; the log says it, with the URL less its query.
 */
#ifndef FS_SERVER_FETCH_H
#define FS_SERVER_FETCH_H

#include "common/base/base.h"

#define FS_FETCH_URL_MAX 8192  /* bytes of a URL */
#define FS_FETCH_MAX_JOBS 1024 /* at a time; one ends a moment after it is destroyed */

struct fs_fetch;

struct fs_fetch_opts {
	bool enabled;               /* false: every URL is refused, and no thread runs */
	size_t max_bytes;           /* one picture */
	size_t max_total;           /* all downloads, until they are taken; 0 = max_active * max_bytes */
	int64_t timeout_ms;         /* one URL from submit to its last byte, the queue included; 0 = 20000 */
	int64_t connect_timeout_ms; /* look-up, connect and TLS of one hop; 0 = 5000 */
	int stall_s;                /* less than 1 KiB/s for so long ends it; 0 = 10 */
	int max_redirects;          /* 0 = none is followed */
	int max_active;             /* 0 = 16 */
	/*
	 * What may have an address that is not public: "nas.local" and "nas.local:8000" (the URL's host, any
	 * case, whatever it resolves to), "192.168.1.5", "192.168.1.5:8000", "fd00::5", "[fd00::5]:8000",
	 * "192.168.1.0/24", "fd00::/8" (the address connected to). Copied.
	 */
	const char *const *allow;
	size_t n_allow;
};
/* FS_EINVAL names an entry of the allow-list that is none of the above. */
int fs_fetch_create(const struct fs_fetch_opts *o, struct fs_fetch **out, struct fs_errbuf *e);
/* Waits for no server and no name look-up. Pending jobs end with FS_EUNAVAILABLE and may be destroyed later.
 */
void fs_fetch_destroy(struct fs_fetch *f);

struct fs_fetch_job; /* owned by who submitted it */
/*
 * Starts a download and returns at once; url is copied. FS_EINVAL: a scheme that is none of ours, a malformed
 * URL, one with a user or password, or URLs are off. FS_ELIMIT: longer than FS_FETCH_URL_MAX.
 * FS_EUNAVAILABLE: too many jobs. cancel fires: the transfer is aborted, the job ends with FS_ECANCELLED
 * within 100 ms.
 */
int fs_fetch_submit(struct fs_fetch *f, const char *url, struct fs_cancel *cancel, struct fs_fetch_job **out,
        struct fs_errbuf *e);
/*
 * Waits for the end; one thread, once. FS_OK: *bytes is a malloc'd block of *n > 0 bytes, now the caller's.
 * FS_EINVAL: it could not be fetched (no such name, refused address, no connection, TLS, status, too many
 * redirects, cut short, empty). FS_ELIMIT: over max_bytes. FS_ETIMEOUT: timeout, connect timeout or stall.
 * FS_EUNAVAILABLE: max_total is used up, or shutdown. FS_ECANCELLED: the token fired or its deadline passed.
 */
int fs_fetch_wait(struct fs_fetch_job *j, uint8_t **bytes, size_t *n, struct fs_errbuf *e);
/* Aborts the download when it is still running; never waits. NULL is fine. */
void fs_fetch_job_destroy(struct fs_fetch_job *j);

#endif
