/*
 * What a picture's URL must be. libcurl's own parser reads it, and the very handle that was checked is what
 * the transfer uses: there is no second reading of the text that could differ.
 */
#include "server/fetch/internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

static bool has_part(CURLU *u, CURLUPart part)
{
	char *s = NULL;
	CURLUcode rc = curl_url_get(u, part, &s, 0);
	curl_free(s);
	return rc == CURLUE_OK;
}

static bool is_http(CURLU *u)
{
	char *s = NULL;
	bool yes = curl_url_get(u, CURLUPART_SCHEME, &s, 0) == CURLUE_OK &&
	           (strcasecmp(s, "http") == 0 || strcasecmp(s, "https") == 0);
	curl_free(s);
	return yes;
}

/* Without query and credentials, which may be secrets. */
static void show(CURLU *u, char *out, size_t cap)
{
	CURLU *copy = curl_url_dup(u);
	char *s = NULL;
	if (copy && !curl_url_set(copy, CURLUPART_QUERY, NULL, 0) &&
	        !curl_url_set(copy, CURLUPART_FRAGMENT, NULL, 0) &&
	        !curl_url_set(copy, CURLUPART_USER, NULL, 0) &&
	        !curl_url_set(copy, CURLUPART_PASSWORD, NULL, 0) && !curl_url_get(copy, CURLUPART_URL, &s, 0))
		snprintf(out, cap, "%s", s);
	curl_free(s);
	curl_url_cleanup(copy);
}

static int take_host(struct fs_fetch_url *u, struct fs_errbuf *e)
{
	char *host = NULL, *port = NULL;
	int rc = FS_OK;
	if (curl_url_get(u->u, CURLUPART_HOST, &host, 0) ||
	        curl_url_get(u->u, CURLUPART_PORT, &port, CURLU_DEFAULT_PORT) || !*host)
		rc = fs_fail(e, FS_EINVAL, "the picture's URL is malformed");
	else if (!(u->host = strdup(host)))
		rc = fs_fail(e, FS_ENOMEM, "out of memory");
	else
		u->port = atoi(port);
	curl_free(host);
	curl_free(port);
	return rc;
}

static int read_url(struct fs_fetch_url *u, bool relative, const char *url, struct fs_errbuf *e)
{
	if (strlen(url) > FS_FETCH_URL_MAX)
		return fs_fail(e, FS_ELIMIT, "the picture's URL is longer than %d bytes", FS_FETCH_URL_MAX);
	if (!relative && strncasecmp(url, "http://", 7) != 0 && strncasecmp(url, "https://", 8) != 0)
		return fs_fail(e, FS_EINVAL, "picture URLs must be data:, http: or https:");
	/* as browsers do: spaces and bytes beyond ASCII are escaped rather than refused */
	if (curl_url_set(u->u, CURLUPART_URL, url, CURLU_URLENCODE | CURLU_ALLOW_SPACE))
		return fs_fail(e, FS_EINVAL, "the picture's URL is malformed");
	if (!is_http(u->u))
		return fs_fail(e, FS_EINVAL, "picture URLs must be data:, http: or https:");
	if (has_part(u->u, CURLUPART_USER) || has_part(u->u, CURLUPART_PASSWORD))
		return fs_fail(e, FS_EINVAL, "the picture's URL must hold no user name or password");
	return take_host(u, e);
}

int fs_fetch_url_init(
        struct fs_fetch_url *out, const struct fs_fetch_url *base, const char *url, struct fs_errbuf *e)
{
	struct fs_fetch_url u = {.u = base ? curl_url_dup(base->u) : curl_url()};
	int rc = u.u ? read_url(&u, base != NULL, url, e) : fs_fail(e, FS_ENOMEM, "out of memory");
	if (rc) {
		fs_fetch_url_finish(&u);
		return rc;
	}
	show(u.u, u.shown, sizeof(u.shown));
	*out = u;
	return FS_OK;
}

void fs_fetch_url_finish(struct fs_fetch_url *u)
{
	curl_url_cleanup(u->u);
	free(u->host);
	*u = (struct fs_fetch_url){0};
}
