/*
 * wol: wake-on-LAN: the magic packet, and a burst of it as UDP broadcast. Stateless, any thread; sending
 * never waits and nothing comes back: whether the machine wakes is seen when it can be reached. Source: AMD,
 * "Magic Packet Technology", publication 20213 (six bytes 0xff, then the address 16 times).
 */
#ifndef FS_SERVER_VISION_WOL_H
#define FS_SERVER_VISION_WOL_H

#include "common/base/base.h"

#include <sys/socket.h>

#define FS_WOL_PACKET 102
#define FS_WOL_PORT 9
#define FS_WOL_BURST 3 /* packets; one may be lost */

struct fs_wol {
	uint8_t mac[6];
	struct sockaddr_storage to;
	socklen_t to_n;
};
/* mac: six bytes in hex, separated by ':' or '-' or by nothing. broadcast: an address in digits, or
 * address:port; NULL = 255.255.255.255. FS_EINVAL names what is wrong. */
int fs_wol_parse(const char *mac, const char *broadcast, struct fs_wol *out, struct fs_errbuf *e);
void fs_wol_packet(const uint8_t mac[6], uint8_t out[FS_WOL_PACKET]);
int fs_wol_send(const struct fs_wol *w, struct fs_errbuf *e);

#endif
