/*
 * Who may ask: API keys, and without one the checks that keep web pages out (Host against DNS rebinding,
 * Origin against foreign pages), and which origins get CORS headers. Decides from a request's head alone,
 * before its body is read. Immutable after init, so any thread may ask.
 */
#ifndef FS_SERVER_HTTP_ACCESS_H
#define FS_SERVER_HTTP_ACCESS_H

#include "server/http/head.h"
#include "server/http/http.h"

#define HTTP_MAX_KEYS 64
#define HTTP_OWN_NAMES 3

/* A request that is answered with an error before any handler sees it. */
struct http_refusal {
	int status;
	const char *type, *code; /* code NULL = none */
	const char *header;      /* "Name: value", NULL = none */
	char message[384];
};

struct http_access {
	const char *const *allowed_hosts, *const *cors_origins;
	size_t n_allowed_hosts, n_cors_origins, n_keys;
	uint8_t keys[HTTP_MAX_KEYS][32];     /* SHA-256 */
	char own_names[HTTP_OWN_NAMES][256]; /* "" = unused */
};

/* Checks what the options say of access. listen_host: the address part of "listen". The options' strings are
 * kept, not copied. */
int http_access_init(
        struct http_access *a, const struct fs_http_opts *o, const char *listen_host, struct fs_errbuf *e);
/* The server is reached from other machines: then by this machine's name too. */
void http_access_add_machine_name(struct http_access *a);
bool http_access_allows(const struct http_access *a, const struct http_head *h, struct http_refusal *why);
/* Which of the keys the request carries; -1 = none. */
int http_access_key(const struct http_access *a, const struct http_head *h);
/* What Access-Control-Allow-Origin is to say; NULL when the request's origin is not listed. */
const char *http_access_cors(const struct http_access *a, const struct http_head *h);

#endif
