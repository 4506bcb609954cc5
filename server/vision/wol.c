/* Addresses from text, and the packet; see the header. */
#include "server/vision/wol.h"

#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int hex(char c)
{
	return c >= '0' && c <= '9'   ? c - '0'
	       : c >= 'a' && c <= 'f' ? c - 'a' + 10
	       : c >= 'A' && c <= 'F' ? c - 'A' + 10
	                              : -1;
}

static bool parse_mac(const char *s, uint8_t out[6])
{
	char separator = s[0] && s[1] && (s[2] == ':' || s[2] == '-') ? s[2] : '\0';
	for (size_t i = 0; i < 6; i++) {
		int high = hex(s[0]), low = high < 0 ? -1 : hex(s[1]);
		if (low < 0)
			return false;
		out[i] = (uint8_t)(high << 4 | low);
		s += 2;
		if (separator && i < 5 && *s++ != separator)
			return false;
	}
	return *s == '\0';
}

/* "1.2.3.4", "1.2.3.4:9", "[ff02::1]:9", "ff02::1" */
static bool parse_address(const char *s, struct fs_wol *w)
{
	char host[64], port[8];
	const char *colon = strrchr(s, ':'), *end = NULL;
	snprintf(port, sizeof(port), "%d", FS_WOL_PORT);
	if (*s == '[') {
		end = strchr(++s, ']');
		colon = end && end[1] == ':' ? end + 1 : NULL;
		if (!end || (end[1] && !colon))
			return false;
	} else {
		end = colon && strchr(s, ':') == colon ? colon : s + strlen(s);
		colon = *end ? end : NULL;
	}
	if (colon) {
		long n = strspn(colon + 1, "0123456789") == strlen(colon + 1) ? strtol(colon + 1, NULL, 10)
		                                                              : 0;
		if (n < 1 || n > 65535)
			return false;
		snprintf(port, sizeof(port), "%ld", n);
	}
	if ((size_t)(end - s) >= sizeof(host))
		return false;
	snprintf(host, sizeof(host), "%.*s", (int)(end - s), s);
	struct addrinfo hints = {.ai_socktype = SOCK_DGRAM, .ai_flags = AI_NUMERICHOST | AI_NUMERICSERV},
	                *list;
	if (!*host || getaddrinfo(host, port, &hints, &list))
		return false;
	memcpy(&w->to, list->ai_addr, list->ai_addrlen);
	w->to_n = list->ai_addrlen;
	freeaddrinfo(list);
	return true;
}

int fs_wol_parse(const char *mac, const char *broadcast, struct fs_wol *out, struct fs_errbuf *e)
{
	struct fs_wol w = {0};
	if (!parse_mac(mac, w.mac))
		return fs_fail(e, FS_EINVAL, "\"%s\" is no MAC address (\"01:23:45:67:89:ab\")", mac);
	if (!parse_address(broadcast ? broadcast : "255.255.255.255", &w))
		return fs_fail(e, FS_EINVAL,
		        "\"%s\" is no broadcast address (\"192.168.1.255\" or \"192.168.1.255:9\")",
		        broadcast);
	*out = w;
	return FS_OK;
}

void fs_wol_packet(const uint8_t mac[6], uint8_t out[FS_WOL_PACKET])
{
	memset(out, 0xff, 6);
	for (size_t i = 1; i <= 16; i++)
		memcpy(out + 6 * i, mac, 6);
}

int fs_wol_send(const struct fs_wol *w, struct fs_errbuf *e)
{
	uint8_t packet[FS_WOL_PACKET];
	int on = 1, rc = FS_OK;
	int fd = socket(w->to.ss_family, SOCK_DGRAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
	if (fd < 0)
		return fs_fail_errno(e, FS_EIO, "can not open a socket for the wake-up packet");
	fs_wol_packet(w->mac, packet);
	if (setsockopt(fd, SOL_SOCKET, SO_BROADCAST, &on, sizeof(on)))
		rc = fs_fail_errno(e, FS_EIO, "can not broadcast the wake-up packet");
	for (int i = 0; i < FS_WOL_BURST && !rc; i++)
		if (sendto(fd, packet, sizeof(packet), 0, (const struct sockaddr *)&w->to, w->to_n) < 0)
			rc = fs_fail_errno(e, FS_EIO, "can not send the wake-up packet");
	close(fd);
	return rc;
}
