/*
 * The allow-list: hosts by name as they stand in URLs, addresses and networks as they are connected to.
 * Addresses are kept as IPv6, IPv4 in its mapped form, so that both forms of one address match one entry.
 */
#include "server/fetch/internal.h"

#include <arpa/inet.h>
#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define ENTRY_MAX 260 /* a name has at most 253 bytes */

static const uint8_t mapped_prefix[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};

static bool number(const char *s, int min, int max, int *out)
{
	size_t n = strlen(s);
	if (n == 0 || n > 5 || strspn(s, "0123456789") != n)
		return false;
	*out = atoi(s);
	return *out >= min && *out <= max;
}

static bool address4(const char *s, uint8_t out[16])
{
	memcpy(out, mapped_prefix, sizeof(mapped_prefix));
	return inet_pton(AF_INET, s, out + 12) == 1;
}

static bool network(char *s, struct fs_fetch_allowed *a)
{
	char *slash = strchr(s, '/');
	int bits;
	*slash = '\0';
	if (address4(s, a->addr) && number(slash + 1, 0, 32, &bits)) {
		a->prefix = 96 + bits;
		return true;
	}
	return inet_pton(AF_INET6, s, a->addr) == 1 && number(slash + 1, 0, 128, &a->prefix);
}

static bool bracketed(char *s, struct fs_fetch_allowed *a)
{
	char *end = strchr(s, ']');
	if (!end || (end[1] && (end[1] != ':' || !number(end + 2, 1, 65535, &a->port))))
		return false;
	*end = '\0';
	a->prefix = 128;
	return inet_pton(AF_INET6, s + 1, a->addr) == 1;
}

static bool is_name(const char *s)
{
	bool letter = false;
	for (const char *p = s; *p; p++) {
		unsigned char c = (unsigned char)*p;
		if (!isalnum(c) && !strchr("-_.", c) && c < 0x80)
			return false;
		letter = letter || !(isdigit(c) || c == '.');
	}
	return letter && *s != '.'; /* digits and dots alone are a damaged address */
}

static bool name(const char *s, struct fs_fetch_allowed *a)
{
	size_t n = strlen(s);
	if (!is_name(s))
		return false;
	a->name = strndup(s, s[n - 1] == '.' ? n - 1 : n);
	for (char *p = a->name; p && *p; p++)
		*p = (char)tolower((unsigned char)*p);
	return true;
}

static bool entry(char *s, struct fs_fetch_allowed *a)
{
	if (strchr(s, '/'))
		return network(s, a);
	if (*s == '[')
		return bracketed(s, a);
	a->prefix = 128;
	if (inet_pton(AF_INET6, s, a->addr) == 1)
		return true;
	char *colon = strchr(s, ':');
	if (colon) {
		*colon = '\0';
		if (!number(colon + 1, 1, 65535, &a->port))
			return false;
	}
	return address4(s, a->addr) || name(s, a);
}

int fs_fetch_allow_init(struct fs_fetch_allow *a, const char *const *texts, size_t n, struct fs_errbuf *e)
{
	*a = (struct fs_fetch_allow){0};
	if (n == 0)
		return FS_OK;
	a->entries = calloc(n, sizeof(*a->entries));
	if (!a->entries)
		return fs_fail(e, FS_ENOMEM, "out of memory");
	for (size_t i = 0; i < n; i++) {
		struct fs_fetch_allowed *x = &a->entries[a->n++];
		char s[ENTRY_MAX];
		size_t len = strlen(texts[i]);
		bool fits = len > 0 && len < sizeof(s);
		if (fits)
			memcpy(s, texts[i], len + 1);
		if (!fits || !entry(s, x)) {
			fs_fetch_allow_finish(a);
			return fs_fail(e, FS_EINVAL,
			        "\"%.100s\" is no host, host:port, address, address:port or network like "
			        "192.168.1.0/24",
			        texts[i]);
		}
	}
	return FS_OK;
}

void fs_fetch_allow_finish(struct fs_fetch_allow *a)
{
	for (size_t i = 0; i < a->n; i++)
		free(a->entries[i].name);
	free(a->entries);
	*a = (struct fs_fetch_allow){0};
}

static bool same_name(const char *allowed, const char *host)
{
	size_t n = strlen(host);
	if (n > 0 && host[n - 1] == '.')
		n--;
	return strlen(allowed) == n && strncasecmp(allowed, host, n) == 0;
}

static bool same_bits(const uint8_t *a, const uint8_t *b, int bits)
{
	size_t bytes = (size_t)bits / 8;
	return memcmp(a, b, bytes) == 0 && (bits % 8 == 0 || (a[bytes] ^ b[bytes]) >> (8 - bits % 8) == 0);
}

/* The address as the entries have it, and its port; false for families that have none. */
static bool widen(const struct sockaddr *sa, socklen_t n, uint8_t addr[16], int *port)
{
	if (n >= sizeof(struct sockaddr_in) && sa->sa_family == AF_INET) {
		struct sockaddr_in in;
		memcpy(&in, sa, sizeof(in));
		memcpy(addr, mapped_prefix, sizeof(mapped_prefix));
		memcpy(addr + 12, &in.sin_addr, 4);
		*port = ntohs(in.sin_port);
		return true;
	}
	if (n >= sizeof(struct sockaddr_in6) && sa->sa_family == AF_INET6) {
		struct sockaddr_in6 in;
		memcpy(&in, sa, sizeof(in));
		memcpy(addr, in.sin6_addr.s6_addr, 16);
		*port = ntohs(in.sin6_port);
		return true;
	}
	return false;
}

bool fs_fetch_allows(
        const struct fs_fetch_allow *a, const char *host, int port, const struct sockaddr *sa, socklen_t n)
{
	uint8_t addr[16];
	int sa_port;
	if (!widen(sa, n, addr, &sa_port))
		return false;
	for (size_t i = 0; i < a->n; i++) {
		const struct fs_fetch_allowed *x = &a->entries[i];
		if (x->name ? same_name(x->name, host) && (!x->port || x->port == port)
		            : same_bits(x->addr, addr, x->prefix) && (!x->port || x->port == sa_port))
			return true;
	}
	return false;
}
