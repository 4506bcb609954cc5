/*
 * One transfer: the curl handle of a hop with every option that safety asks for, its callbacks, and what its
 * end means. Redirects are followed here rather than by libcurl, so that each hop passes the very checks of
 * the first. Runs on the thread that owns the multi handle.
 */
#include "server/fetch/internal.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define STALL_BYTES_PER_S 1024

void fs_transfer_init(struct fs_transfer *t, const struct fs_fetch_opts *o,
        const struct fs_fetch_allow *allow, struct fs_fetch_budget *budget, struct fs_fetch_url *url)
{
	*t = (struct fs_transfer){
	        .o = o, .allow = allow, .budget = budget, .next = *url, .connect_by = FS_NEVER};
	*url = (struct fs_fetch_url){0};
	fs_buf_init(&t->body, o->max_bytes);
}

void fs_transfer_finish(struct fs_transfer *t)
{
	FS_ASSERT(!t->easy);
	fs_fetch_url_finish(&t->url);
	fs_fetch_url_finish(&t->next);
	fs_buf_finish(&t->body);
	atomic_fetch_sub(&t->budget->used, t->charged);
	t->charged = 0;
}

/* ---- callbacks ---- */

static int on_look_up(void *resolver, void *reserved, void *arg)
{
	struct fs_transfer *t = arg;
	t->resolving = true;
	return 0;
}

/* Every connection of every hop comes by here, with the address that it is for. */
static curl_socket_t on_socket(void *arg, curlsocktype purpose, struct curl_sockaddr *a)
{
	struct fs_transfer *t = arg;
	t->resolving = false;
	if (t->abandoned || purpose != CURLSOCKTYPE_IPCXN)
		return CURL_SOCKET_BAD;
	if (fs_fetch_addr_special(&a->addr, a->addrlen) &&
	        !fs_fetch_allows(t->allow, t->url.host, t->url.port, &a->addr, a->addrlen)) {
		char text[64];
		fs_fetch_addr_text(&a->addr, a->addrlen, text, sizeof(text));
		snprintf(t->why, sizeof(t->why),
		        "%s is not a public address, and fetch.allow does not name it", text);
		return CURL_SOCKET_BAD;
	}
	return socket(a->family, a->socktype | SOCK_CLOEXEC, a->protocol);
}

static int on_connected(void *arg, char *peer_ip, char *own_ip, int peer_port, int own_port)
{
	struct fs_transfer *t = arg;
	t->connect_by = FS_NEVER;
	return CURL_PREREQFUNC_OK;
}

static long status_of(struct fs_transfer *t)
{
	long status = 0;
	curl_easy_getinfo(t->easy, CURLINFO_RESPONSE_CODE, &status);
	return status;
}

static bool has_picture(long status)
{
	return status == 200 || status == 203;
}

static bool charge(struct fs_transfer *t, size_t n)
{
	size_t used = atomic_load(&t->budget->used);
	do
		if (n > t->budget->max - used)
			return false;
	while (!atomic_compare_exchange_weak(&t->budget->used, &used, used + n));
	t->charged += n;
	return true;
}

static size_t on_bytes(char *data, size_t size, size_t n, void *arg)
{
	struct fs_transfer *t = arg;
	n *= size; /* size is always 1 */
	if (!has_picture(status_of(t)))
		return 0; /* nobody reads it; the status tells the rest */
	if (n > t->o->max_bytes - t->body.len)
		t->stop = FS_ELIMIT;
	else if (!charge(t, n))
		t->stop = FS_EUNAVAILABLE;
	else if (fs_buf_append(&t->body, data, n))
		t->stop = FS_ENOMEM;
	return t->stop ? 0 : n;
}

/* ---- a hop ---- */

static CURLcode set_safety(struct fs_transfer *t)
{
	CURL *c = t->easy;
	CURLcode rc;
	(void)((rc = curl_easy_setopt(c, CURLOPT_PROTOCOLS_STR, "http,https")) ||
	        (rc = curl_easy_setopt(c, CURLOPT_FOLLOWLOCATION, 0L)) ||
	        (rc = curl_easy_setopt(c, CURLOPT_DISALLOW_USERNAME_IN_URL, 1L)) ||
	        (rc = curl_easy_setopt(c, CURLOPT_OPENSOCKETFUNCTION, on_socket)) ||
	        (rc = curl_easy_setopt(c, CURLOPT_OPENSOCKETDATA, t)) ||
	        (rc = curl_easy_setopt(c, CURLOPT_PROXY, "")) || /* nor one of the environment */
	        (rc = curl_easy_setopt(c, CURLOPT_NOPROXY, "*")) ||
	        (rc = curl_easy_setopt(c, CURLOPT_NETRC, (long)CURL_NETRC_IGNORED)) ||
	        (rc = curl_easy_setopt(c, CURLOPT_FRESH_CONNECT, 1L)) || /* an old one passed other checks */
	        (rc = curl_easy_setopt(c, CURLOPT_FORBID_REUSE, 1L)) ||
	        (rc = curl_easy_setopt(c, CURLOPT_SSL_VERIFYPEER, 1L)) ||
	        (rc = curl_easy_setopt(c, CURLOPT_SSL_VERIFYHOST, 2L)));
	return rc;
}

/* libcurl's own timers are off: where they end a transfer, some versions wait for its look-up. */
static CURLcode set_limits(struct fs_transfer *t)
{
	CURL *c = t->easy;
	CURLcode rc;
	(void)((rc = curl_easy_setopt(c, CURLOPT_NOSIGNAL, 1L)) ||
	        (rc = curl_easy_setopt(c, CURLOPT_QUICK_EXIT, 1L)) ||
	        (rc = curl_easy_setopt(c, CURLOPT_TIMEOUT_MS, 0L)) ||
	        (rc = curl_easy_setopt(
	                 c, CURLOPT_CONNECTTIMEOUT_MS, 86400000L)) || /* 0 is libcurl's default */
	        (rc = curl_easy_setopt(c, CURLOPT_LOW_SPEED_LIMIT, (long)STALL_BYTES_PER_S)) ||
	        (rc = curl_easy_setopt(c, CURLOPT_LOW_SPEED_TIME, (long)t->o->stall_s)) ||
	        (rc = curl_easy_setopt(c, CURLOPT_MAXFILESIZE_LARGE, (curl_off_t)t->o->max_bytes)));
	return rc;
}

static CURLcode set_request(struct fs_transfer *t, void *tag)
{
	CURL *c = t->easy;
	CURLcode rc;
	(void)((rc = curl_easy_setopt(c, CURLOPT_CURLU, t->url.u)) ||
	        (rc = curl_easy_setopt(c, CURLOPT_PRIVATE, tag)) ||
	        (rc = curl_easy_setopt(c, CURLOPT_ERRORBUFFER, t->curl_why)) ||
	        (rc = curl_easy_setopt(c, CURLOPT_USERAGENT, "farsight/" FS_VERSION)) ||
	        (rc = curl_easy_setopt(c, CURLOPT_HTTP_VERSION, (long)CURL_HTTP_VERSION_1_1)) ||
	        (rc = curl_easy_setopt(c, CURLOPT_RESOLVER_START_FUNCTION, on_look_up)) ||
	        (rc = curl_easy_setopt(c, CURLOPT_RESOLVER_START_DATA, t)) ||
	        (rc = curl_easy_setopt(c, CURLOPT_PREREQFUNCTION, on_connected)) ||
	        (rc = curl_easy_setopt(c, CURLOPT_PREREQDATA, t)) ||
	        (rc = curl_easy_setopt(c, CURLOPT_WRITEFUNCTION, on_bytes)) ||
	        (rc = curl_easy_setopt(c, CURLOPT_WRITEDATA, t)));
	return rc;
}

int fs_transfer_start(struct fs_transfer *t, CURLM *multi, void *tag, struct fs_errbuf *e)
{
	FS_ASSERT(!t->easy && t->next.u);
	fs_fetch_url_finish(&t->url);
	t->url = t->next;
	t->next = (struct fs_fetch_url){0};
	t->curl_why[0] = '\0';
	t->connect_by = fs_deadline_ms(t->o->connect_timeout_ms);
	t->easy = curl_easy_init();
	if (!t->easy)
		return fs_fail(e, FS_ENOMEM, "out of memory");
	CURLcode rc;
	const char *what = NULL;
	if ((rc = set_safety(t)) || (rc = set_limits(t)) || (rc = set_request(t, tag))) {
		what = curl_easy_strerror(rc);
	} else {
		CURLMcode mrc = curl_multi_add_handle(multi, t->easy);
		what = mrc ? curl_multi_strerror(mrc) : NULL;
	}
	if (!what)
		return FS_OK;
	snprintf(t->why, sizeof(t->why), "libcurl: %s", what);
	curl_easy_cleanup(t->easy);
	t->easy = NULL;
	return fs_fail(e, FS_EINTERNAL, FS_FETCH_NOT_FETCHED);
}

void fs_transfer_stop(struct fs_transfer *t, CURLM *multi)
{
	if (!t->easy)
		return;
	curl_multi_remove_handle(multi, t->easy);
	curl_easy_cleanup(t->easy);
	t->easy = NULL;
	t->resolving = false;
}

/* ---- its end ---- */

static int not_fetched(int err, struct fs_errbuf *e)
{
	return fs_fail(e, err, FS_FETCH_NOT_FETCHED);
}

static int too_large(struct fs_transfer *t, struct fs_errbuf *e)
{
	snprintf(t->why, sizeof(t->why), "larger than %zu bytes", t->o->max_bytes);
	return fs_fail(
	        e, FS_ELIMIT, "the picture is larger than this server's limit of %zu bytes", t->o->max_bytes);
}

static int stopped(struct fs_transfer *t, struct fs_errbuf *e)
{
	switch (t->stop) {
	case FS_ELIMIT:
		return too_large(t, e);
	case FS_EUNAVAILABLE:
		snprintf(t->why, sizeof(t->why), "%zu bytes of pictures are in memory already",
		        atomic_load(&t->budget->used));
		return fs_fail(e, FS_EUNAVAILABLE, "too many pictures are being fetched; try again shortly");
	default:
		snprintf(t->why, sizeof(t->why), "out of memory");
		return fs_fail(e, FS_ENOMEM, "out of memory");
	}
}

static int redirected(struct fs_transfer *t, long status, bool *again, struct fs_errbuf *e)
{
	struct curl_header *h;
	struct fs_errbuf why = {""};
	if (curl_easy_header(t->easy, "Location", 0, CURLH_HEADER, -1, &h)) {
		snprintf(t->why, sizeof(t->why), "status %ld without a Location", status);
		return not_fetched(FS_EINVAL, e);
	}
	if (t->hops >= t->o->max_redirects) {
		snprintf(t->why, sizeof(t->why), "more than %d redirects", t->o->max_redirects);
		return not_fetched(FS_EINVAL, e);
	}
	int rc = fs_fetch_url_init(&t->next, &t->url, h->value, &why);
	if (rc == FS_ENOMEM)
		return fs_fail(e, rc, "out of memory");
	if (rc) {
		snprintf(t->why, sizeof(t->why), "a redirect that is not followed: %s", why.text);
		return not_fetched(FS_EINVAL, e);
	}
	t->hops++;
	*again = true;
	return FS_OK;
}

/* The status is not a picture's: what came with it does not matter. */
static int by_status(struct fs_transfer *t, long status, bool *again, struct fs_errbuf *e)
{
	if (status == 301 || status == 302 || status == 303 || status == 307 || status == 308)
		return redirected(t, status, again, e);
	snprintf(t->why, sizeof(t->why), "status %ld", status);
	return not_fetched(FS_EINVAL, e);
}

int fs_transfer_result(struct fs_transfer *t, CURLcode code, bool *again, struct fs_errbuf *e)
{
	*again = false;
	t->resolving = false;
	if (t->stop)
		return stopped(t, e);
	long status = status_of(t);
	if ((code == CURLE_OK || code == CURLE_WRITE_ERROR || code == CURLE_FILESIZE_EXCEEDED) &&
	        !has_picture(status))
		return by_status(t, status, again, e);
	switch (code) {
	case CURLE_OK:
		if (t->body.len)
			return FS_OK;
		snprintf(t->why, sizeof(t->why), "status %ld without a byte", status);
		return not_fetched(FS_EINVAL, e);
	case CURLE_FILESIZE_EXCEEDED:
		return too_large(t, e);
	default:
		if (!*t->why)
			snprintf(t->why, sizeof(t->why), "%s",
			        *t->curl_why ? t->curl_why : curl_easy_strerror(code));
		return not_fetched(code == CURLE_OPERATION_TIMEDOUT ? FS_ETIMEOUT : FS_EINVAL, e);
	}
}
