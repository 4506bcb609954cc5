/*
 * One HTTP request to the server by libcurl, on the caller's thread. Answers are bounded: a JSON body by
 * BODY_MAX, a line of a stream by LINE_MAX. It follows no redirects and uses no proxies of the environment:
 * the server is a machine of the admin's.
 */
#include "server/cli/cli.h"

#include <curl/curl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define BODY_MAX ((size_t)16 << 20)
#define LINE_MAX_BYTES ((size_t)1 << 20)
#define CONNECT_TIMEOUT_MS 5000L

struct exchange {
	CURL *curl;
	struct fs_cancel *cancel;
	const struct cli_http_events *events;
	struct cli_sse sse;
	struct fs_buf body;
	bool streaming;
	int rc; /* why on_body stopped it */
	struct fs_errbuf *e;
};

int cli_sse_feed(struct cli_sse *s, const char *bytes, size_t n, const struct cli_http_events *events,
        struct fs_errbuf *e)
{
	while (n > 0) {
		const char *end = memchr(bytes, '\n', n);
		size_t take = end ? (size_t)(end - bytes) + 1 : n;
		if (fs_buf_append(&s->line, bytes, take))
			return fs_fail(
			        e, FS_ELIMIT, "the server sent a line of more than %zu bytes", s->line.max);
		bytes += take;
		n -= take;
		if (!end)
			break;
		char *line = (char *)s->line.data;
		size_t len = s->line.len - 1;
		len -= len > 0 && line[len - 1] == '\r';
		line[len] = '\0';
		int rc = FS_OK;
		if (len >= 5 && memcmp(line, "data:", 5) == 0 && events && events->on_event) {
			size_t skip = 5 + (line[5] == ' ');
			rc = events->on_event(events->arg, line + skip, len - skip, e);
		}
		fs_buf_clear(&s->line);
		if (rc)
			return rc;
	}
	return FS_OK;
}

static bool is_stream(CURL *curl)
{
	const char *type = NULL;
	long status = 0;
	curl_easy_getinfo(curl, CURLINFO_CONTENT_TYPE, &type);
	curl_easy_getinfo(curl, CURLINFO_RESPONSE_CODE, &status);
	return status == 200 && type && strncmp(type, "text/event-stream", 17) == 0;
}

static size_t on_body(char *bytes, size_t size, size_t count, void *arg)
{
	struct exchange *x = arg;
	size_t n = size * count;
	x->streaming = x->streaming || is_stream(x->curl);
	if (x->streaming)
		x->rc = cli_sse_feed(&x->sse, bytes, n, x->events, x->e);
	else if (fs_buf_append(&x->body, bytes, n))
		x->rc = fs_fail(x->e, FS_ELIMIT, "the server's answer is larger than %zu bytes", x->body.max);
	return x->rc ? 0 : n;
}

static int on_progress(void *arg, curl_off_t a, curl_off_t b, curl_off_t c, curl_off_t d)
{
	struct exchange *x = arg;
	return fs_cancelled(x->cancel) ? 1 : 0;
}

/* The text of an error body, in OpenAI's envelope or as it is. */
static int refused(long status, const json_t *body, const struct fs_buf *raw, struct fs_errbuf *e)
{
	const json_t *error = json_object_get(body, "error");
	const char *text = json_string_value(json_object_get(error, "message"));
	if (status == 401)
		return fs_fail(e, FS_EAUTH, "%s: set FARSIGHT_API_KEY, or \"api_key\" in the config",
		        text ? text : "the server wants an API key");
	if (text)
		return fs_fail(e, FS_EINVAL, "%s", text);
	return fs_fail(e, FS_EFORMAT, "the server answered with status %ld: %.200s", status,
	        raw->data ? (const char *)raw->data : "no body");
}

static int finish(struct exchange *x, CURLcode code, const struct cli_server *s, json_t **reply)
{
	long status = 0;
	json_error_t je;
	curl_easy_getinfo(x->curl, CURLINFO_RESPONSE_CODE, &status);
	if (x->rc)
		return x->rc;
	if (code == CURLE_ABORTED_BY_CALLBACK)
		return fs_fail(x->e, FS_ECANCELLED, "cancelled");
	if (code == CURLE_OPERATION_TIMEDOUT && status)
		return fs_fail(x->e, FS_ETIMEOUT, "%s did not answer in time", s->url);
	if (code != CURLE_OK)
		return fs_fail(x->e, FS_EUNAVAILABLE, "%s: %s%s", s->url, curl_easy_strerror(code),
		        code == CURLE_COULDNT_CONNECT ? "; does farsight-server run there?" : "");
	if (x->streaming)
		return FS_OK;
	json_t *body =
	        x->body.data ? json_loadb((char *)x->body.data, x->body.len, JSON_DECODE_ANY, &je) : NULL;
	int rc = FS_OK;
	if (status != 200)
		rc = refused(status, body, &x->body, x->e);
	else if (!body)
		rc = fs_fail(x->e, FS_EFORMAT, "%s did not answer with JSON; is it farsight-server?", s->url);
	if (rc)
		json_decref(body);
	else
		*reply = body;
	return rc;
}

static CURLcode set_up(struct exchange *x, const char *url, int64_t timeout_s, struct curl_slist *headers)
{
	CURL *c = x->curl;
	curl_easy_setopt(c, CURLOPT_URL, url);
	curl_easy_setopt(c, CURLOPT_PROTOCOLS_STR, "http,https");
	curl_easy_setopt(c, CURLOPT_PROXY, "");
	curl_easy_setopt(c, CURLOPT_NOSIGNAL, 1L);
	curl_easy_setopt(c, CURLOPT_CONNECTTIMEOUT_MS, CONNECT_TIMEOUT_MS);
	curl_easy_setopt(c, CURLOPT_TIMEOUT, (long)timeout_s);
	curl_easy_setopt(c, CURLOPT_HTTPHEADER, headers);
	curl_easy_setopt(c, CURLOPT_USERAGENT, "farsight/" FS_VERSION);
	curl_easy_setopt(c, CURLOPT_NOPROGRESS, 0L);
	curl_easy_setopt(c, CURLOPT_XFERINFOFUNCTION, on_progress);
	curl_easy_setopt(c, CURLOPT_XFERINFODATA, x);
	curl_easy_setopt(c, CURLOPT_WRITEFUNCTION, on_body);
	return curl_easy_setopt(c, CURLOPT_WRITEDATA, x);
}

static bool add_header(struct curl_slist **list, const char *line)
{
	struct curl_slist *more = curl_slist_append(*list, line);
	if (more)
		*list = more;
	return more != NULL;
}

int cli_http(const struct cli_server *s, const char *path, const json_t *body, int64_t timeout_s,
        struct fs_cancel *cancel, const struct cli_http_events *events, json_t **reply, struct fs_errbuf *e)
{
	char url[1024], bearer[1100];
	struct exchange x = {.cancel = cancel, .events = events, .e = e, .curl = curl_easy_init()};
	struct curl_slist *headers = NULL;
	char *text = body ? json_dumps(body, JSON_COMPACT) : NULL;
	fs_buf_init(&x.sse.line, LINE_MAX_BYTES);
	fs_buf_init(&x.body, BODY_MAX);
	snprintf(url, sizeof(url), "%s%s", s->url, path);
	snprintf(bearer, sizeof(bearer), "Authorization: Bearer %s", s->key);
	bool ok = x.curl && (text || !body) && add_header(&headers, "Content-Type: application/json") &&
	          (!*s->key || add_header(&headers, bearer)) &&
	          set_up(&x, url, timeout_s, headers) == CURLE_OK;
	if (ok && text) {
		curl_easy_setopt(x.curl, CURLOPT_POSTFIELDSIZE_LARGE, (curl_off_t)strlen(text));
		ok = curl_easy_setopt(x.curl, CURLOPT_POSTFIELDS, text) == CURLE_OK;
	}
	if (reply)
		*reply = NULL;
	json_t *got = NULL;
	int rc = ok ? finish(&x, curl_easy_perform(x.curl), s, &got)
	            : fs_fail(e, FS_EINTERNAL, "libcurl can not be set up");
	if (!rc && reply)
		*reply = got;
	else
		json_decref(got);
	curl_slist_free_all(headers);
	curl_easy_cleanup(x.curl);
	fs_buf_finish(&x.sse.line);
	fs_buf_finish(&x.body);
	free(text);
	return rc;
}
