/* The rules of access.h. */
#include "server/http/access.h"

#include <arpa/inet.h>
#include <ctype.h>
#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

#define OPEN_PATH "/health" /* what watches a server need not know its key */

static bool hash(const char *s, uint8_t out[32])
{
	return EVP_Digest(s, strlen(s), out, NULL, EVP_sha256(), NULL) == 1;
}

/* ---- names of hosts ---- */

enum host_kind { HOST_BAD, HOST_NAME, HOST_ADDRESS };

/* "name", "name:port", "1.2.3.4:port" or "[v6]:port": the name in lower case, without brackets and without a
 * final dot. */
static enum host_kind split_host(const char *text, char name[256])
{
	bool v6 = *text == '[';
	size_t n = v6 ? strcspn(++text, "]") : strcspn(text, ":");
	const char *rest = text + n;
	if (n == 0 || n > 255 || (v6 && *rest++ != ']'))
		return HOST_BAD;
	if (*rest && (*rest != ':' || strspn(rest + 1, "0123456789") != strlen(rest + 1)))
		return HOST_BAD;
	for (size_t i = 0; i < n; i++) {
		name[i] = (char)tolower((unsigned char)text[i]);
		if (!v6 && !isalnum((unsigned char)name[i]) && !strchr("-._", name[i]))
			return HOST_BAD;
	}
	name[n] = '\0';
	if (!v6 && n > 1 && name[n - 1] == '.')
		name[n - 1] = '\0';
	uint8_t address[16];
	if (inet_pton(v6 ? AF_INET6 : AF_INET, name, address) == 1)
		return HOST_ADDRESS;
	return v6 ? HOST_BAD : HOST_NAME;
}

static bool ends_with(const char *s, const char *end)
{
	size_t n = strlen(s), m = strlen(end);
	return n >= m && strcasecmp(s + n - m, end) == 0;
}

static bool is_loopback(enum host_kind kind, const char *name)
{
	if (kind == HOST_ADDRESS)
		return strncmp(name, "127.", 4) == 0 || strcmp(name, "::1") == 0;
	return kind == HOST_NAME && (strcmp(name, "localhost") == 0 || ends_with(name, ".localhost"));
}

static bool host_is_listed(const struct http_access *a, const char *name)
{
	for (size_t i = 0; i < HTTP_OWN_NAMES; i++)
		if (a->own_names[i][0] && strcasecmp(a->own_names[i], name) == 0)
			return true;
	for (size_t i = 0; i < a->n_allowed_hosts; i++) {
		const char *entry = a->allowed_hosts[i];
		if (strcmp(entry, "*") == 0 || strcasecmp(entry, name) == 0)
			return true;
		if (entry[0] == '.' && (ends_with(name, entry) || strcasecmp(entry + 1, name) == 0))
			return true;
	}
	return false;
}

/* A page under a name that is not ours may have had its name pointed at us. No attacker's page is under an
 * address. */
static bool host_is_ours(const struct http_access *a, const struct http_head *h, struct http_refusal *why)
{
	const char *host = http_head_find(h, "Host");
	char name[256];
	enum host_kind kind = host ? split_host(host, name) : HOST_ADDRESS; /* HTTP/1.0: no browser */
	if (!host || kind == HOST_ADDRESS || is_loopback(kind, name) ||
	        (kind == HOST_NAME && host_is_listed(a, name)))
		return true;
	*why = (struct http_refusal){.status = 403, .type = "permission_error", .code = "host_not_allowed"};
	snprintf(why->message, sizeof(why->message),
	        "the host name \"%.200s\" is not known to this server (a protection against DNS rebinding): "
	        "add it "
	        "to \"allowed_hosts\", or set an \"api_key\"",
	        host);
	return false;
}

/* ---- origins of web pages ---- */

static bool origin_is_listed(const struct http_access *a, const char *origin, bool *any)
{
	for (size_t i = 0; i < a->n_cors_origins; i++) {
		*any = strcmp(a->cors_origins[i], "*") == 0;
		if (*any || strcasecmp(a->cors_origins[i], origin) == 0)
			return true;
	}
	return false;
}

/* The page came from this very server: scheme aside, which a proxy in front may have changed. */
static bool is_own_host(const char *authority, const char *host)
{
	static const char *const ports[] = {"", ":80", ":443"};
	size_t n = host ? strlen(host) : 0, m = strlen(authority);
	if (n && n == m)
		return strcasecmp(authority, host) == 0;
	for (size_t i = 1; i < FS_ARRAY_LEN(ports); i++)
		if (n == m + strlen(ports[i]) && strncasecmp(authority, host, m) == 0 &&
		        strcmp(host + m, ports[i]) == 0)
			return true;
	return false;
}

static bool origin_may(const struct http_access *a, const struct http_head *h, const char *origin)
{
	bool any;
	char name[256];
	if (origin_is_listed(a, origin, &any))
		return true;
	const char *authority = strncasecmp(origin, "http://", 7) == 0    ? origin + 7
	                        : strncasecmp(origin, "https://", 8) == 0 ? origin + 8
	                                                                  : NULL;
	if (!authority)
		return false;
	enum host_kind kind = split_host(authority, name);
	return is_loopback(kind, name) ||
	       (kind != HOST_BAD && is_own_host(authority, http_head_find(h, "Host")));
}

/* Only what changes or costs something: of other answers a foreign page sees nothing without CORS. */
static bool is_harmless(const char *method)
{
	return strcmp(method, "GET") == 0 || strcmp(method, "HEAD") == 0 || strcmp(method, "OPTIONS") == 0;
}

static bool origin_is_fine(const struct http_access *a, const struct http_head *h, struct http_refusal *why)
{
	for (size_t i = 0; i < h->n_headers && !is_harmless(h->method); i++) {
		const char *origin = h->headers[i].value;
		if (strcasecmp(h->headers[i].name, "Origin") != 0 || origin_may(a, h, origin))
			continue;
		*why = (struct http_refusal){
		        .status = 403, .type = "permission_error", .code = "origin_not_allowed"};
		snprintf(why->message, sizeof(why->message),
		        "web pages of \"%.200s\" may not use this server: add the origin to "
		        "\"cors_origins\", or set "
		        "an \"api_key\"",
		        origin);
		return false;
	}
	return true;
}

const char *http_access_cors(const struct http_access *a, const struct http_head *h)
{
	const char *origin = http_head_find(h, "Origin");
	bool any = false;
	if (!origin || !origin_is_listed(a, origin, &any))
		return NULL;
	return any ? "*" : origin;
}

/* ---- keys ---- */

/* Hashes of one length are compared, all of them, so that time tells neither length nor content. */
static int find_key(const struct http_access *a, const char *said)
{
	uint8_t digest[32];
	int found = -1;
	if (!said || !hash(said, digest))
		return -1;
	for (size_t i = 0; i < a->n_keys; i++)
		found = CRYPTO_memcmp(digest, a->keys[i], sizeof(digest)) == 0 ? (int)i : found;
	return found;
}

int http_access_key(const struct http_access *a, const struct http_head *h)
{
	const char *bearer = http_head_find(h, "Authorization");
	bearer = bearer && strncasecmp(bearer, "Bearer ", 7) == 0 ? bearer + 7 + strspn(bearer + 7, " ")
	                                                          : NULL;
	int found = find_key(a, bearer);
	return found >= 0 ? found : find_key(a, http_head_find(h, "x-api-key"));
}

static bool key_is_right(const struct http_access *a, const struct http_head *h, struct http_refusal *why)
{
	bool open = strcmp(h->method, "OPTIONS") == 0 ||
	            (is_harmless(h->method) && strcmp(h->path, OPEN_PATH) == 0);
	if (open || http_access_key(a, h) >= 0)
		return true;
	*why = (struct http_refusal){.status = 401,
	        .type = "authentication_error",
	        .code = "invalid_api_key",
	        .header = "WWW-Authenticate: Bearer"};
	snprintf(why->message, sizeof(why->message),
	        "missing or wrong API key: send it as \"Authorization: Bearer KEY\" or \"x-api-key: KEY\"");
	return false;
}

bool http_access_allows(const struct http_access *a, const struct http_head *h, struct http_refusal *why)
{
	if (a->n_keys)
		return key_is_right(a, h, why);
	return host_is_ours(a, h, why) && origin_is_fine(a, h, why);
}

/* ---- start ---- */

static int add_key(struct http_access *a, const char *key, struct fs_errbuf *e)
{
	size_t n = strlen(key);
	if (n == 0 || isspace((unsigned char)key[0]) || isspace((unsigned char)key[n - 1]))
		return fs_fail(e, FS_EINVAL,
		        "an \"api_key\" must not be blank, nor begin or end with white space: give it a "
		        "value, or "
		        "leave it out");
	for (const char *c = key; *c; c++)
		if (iscntrl((unsigned char)*c))
			return fs_fail(e, FS_EINVAL, "an \"api_key\" must not hold control characters");
	if (a->n_keys == HTTP_MAX_KEYS)
		return fs_fail(e, FS_ELIMIT, "there are more than %d API keys", HTTP_MAX_KEYS);
	return hash(key, a->keys[a->n_keys++]) ? FS_OK : fs_fail(e, FS_EINTERNAL, "SHA-256 is not to be had");
}

static int check_host_entry(const char *s, struct fs_errbuf *e)
{
	char name[256];
	const char *bare = s[0] == '.' ? s + 1 : s;
	if (strcmp(s, "*") == 0 || (split_host(bare, name) == HOST_NAME && !strchr(s, ':')))
		return FS_OK;
	return fs_fail(e, FS_EINVAL,
	        "\"allowed_hosts\" takes names without port, \".name\" for all below it, or \"*\", not "
	        "\"%s\"",
	        s);
}

static int check_origin_entry(const char *s, struct fs_errbuf *e)
{
	const char *rest = strstr(s, "://");
	if (strcmp(s, "*") == 0 || (rest && rest != s && rest[3] && !strpbrk(rest + 3, "/ ?#*")))
		return FS_OK;
	return fs_fail(e, FS_EINVAL,
	        "\"cors_origins\" takes origins like \"https://app.example\" (no path) or \"*\", not \"%s\"",
	        s);
}

int http_access_init(
        struct http_access *a, const struct fs_http_opts *o, const char *listen_host, struct fs_errbuf *e)
{
	*a = (struct http_access){.allowed_hosts = o->allowed_hosts,
	        .n_allowed_hosts = o->n_allowed_hosts,
	        .cors_origins = o->cors_origins,
	        .n_cors_origins = o->n_cors_origins};
	int rc = FS_OK;
	for (size_t i = 0; !rc && i < o->n_api_keys; i++)
		rc = add_key(a, o->api_keys[i], e);
	for (size_t i = 0; !rc && i < o->n_allowed_hosts; i++)
		rc = check_host_entry(o->allowed_hosts[i], e);
	for (size_t i = 0; !rc && i < o->n_cors_origins; i++)
		rc = check_origin_entry(o->cors_origins[i], e);
	snprintf(a->own_names[0], sizeof(a->own_names[0]), "%s", listen_host);
	return rc;
}

void http_access_add_machine_name(struct http_access *a)
{
	char name[250] = "";
	if (gethostname(name, sizeof(name) - 1) || !*name)
		return;
	snprintf(a->own_names[1], sizeof(a->own_names[1]), "%s", name);
	snprintf(a->own_names[2], sizeof(a->own_names[2]), "%s.local", name);
}
