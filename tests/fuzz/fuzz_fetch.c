/*
 * Fuzz target: which addresses a picture may have. The first line is an entry of the allow-list, the second a
 * URL, the third what it redirects to. Nothing but http and https with a host and a port passes, no name or
 * password is shown in the log, and an address that is not public is never allowed by an empty list.
 */
#include "server/fetch/internal.h"

#include <arpa/inet.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static void check_address(const struct fs_fetch_allow *a, const struct fs_fetch_url *u)
{
	static const struct fs_fetch_allow none;
	struct sockaddr_in in = {.sin_family = AF_INET, .sin_port = htons((uint16_t)u->port)};
	struct sockaddr_in6 in6 = {.sin6_family = AF_INET6, .sin6_port = in.sin_port};
	char text[INET6_ADDRSTRLEN];

	if (inet_pton(AF_INET, u->host, &in.sin_addr) == 1) {
		fs_fetch_addr_text((struct sockaddr *)&in, sizeof(in), text, sizeof(text));
		FS_ASSERT(strcmp(text, u->host) == 0);
	}
	FS_ASSERT(!fs_fetch_allows(&none, u->host, u->port, (struct sockaddr *)&in, sizeof(in)));
	fs_fetch_allows(a, u->host, u->port, (struct sockaddr *)&in, sizeof(in));
	/* IPv4 in IPv6's clothes is what it is */
	memset(&in6.sin6_addr.s6_addr[10], 0xff, 2);
	memcpy(&in6.sin6_addr.s6_addr[12], &in.sin_addr, 4);
	FS_ASSERT(!fs_fetch_addr_special((struct sockaddr *)&in, sizeof(in)) ||
	          fs_fetch_addr_special((struct sockaddr *)&in6, sizeof(in6)));
	FS_ASSERT(fs_fetch_allows(a, u->host, u->port, (struct sockaddr *)&in, sizeof(in)) ==
	          fs_fetch_allows(a, u->host, u->port, (struct sockaddr *)&in6, sizeof(in6)));
}

static bool check_url(const struct fs_fetch_allow *a, const struct fs_fetch_url *base, const char *text,
        struct fs_fetch_url *u)
{
	struct fs_errbuf e = {""};

	if (fs_fetch_url_init(u, base, text, &e)) {
		FS_ASSERT(e.text[0]);
		return false;
	}
	FS_ASSERT(u->host[0] && u->port >= 0 && u->port <= 65535);
	FS_ASSERT(strncasecmp(u->shown, "http://", 7) == 0 || strncasecmp(u->shown, "https://", 8) == 0);
	FS_ASSERT(!strchr(u->shown, '?') && !strchr(u->shown, '#'));
	check_address(a, u);
	return true;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
	struct fs_fetch_allow allow = {0};
	struct fs_fetch_url first, next;
	char *text = strndup((const char *)data, n), *rest = text;

	if (!text)
		return 0;
	const char *entry = strsep(&rest, "\n"), *url = strsep(&rest, "\n"), *other = strsep(&rest, "\n");
	fs_fetch_allow_init(&allow, &entry, 1, NULL);
	if (url && check_url(&allow, NULL, url, &first)) {
		if (other && check_url(&allow, &first, other, &next))
			fs_fetch_url_finish(&next);
		fs_fetch_url_finish(&first);
	}
	fs_fetch_allow_finish(&allow);
	free(text);
	return 0;
}
