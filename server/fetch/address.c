/*
 * Which addresses are special. A list of what is refused for IPv4; for IPv6 the one block that is handed out
 * for the public internet, less its special parts, since everything beside it is special or unassigned.
 */
#include "server/fetch/internal.h"

#include <arpa/inet.h>
#include <stdio.h>
#include <string.h>

struct block {
	uint8_t addr[16];
	int prefix; /* bits */
};

static const struct block special4[] = {
        {{0}, 8},             /* this network */
        {{10}, 8},            /* private */
        {{100, 64}, 10},      /* shared by carriers' NAT */
        {{127}, 8},           /* loopback */
        {{169, 254}, 16},     /* link-local */
        {{172, 16}, 12},      /* private */
        {{192, 0, 0}, 24},    /* protocol assignments */
        {{192, 0, 2}, 24},    /* documentation */
        {{192, 88, 99}, 24},  /* 6to4 relays */
        {{192, 168}, 16},     /* private */
        {{198, 18}, 15},      /* benchmarks */
        {{198, 51, 100}, 24}, /* documentation */
        {{203, 0, 113}, 24},  /* documentation */
        {{224}, 4},           /* multicast */
        {{240}, 4},           /* reserved, broadcast */
};

static const struct block global6 = {{0x20}, 3};
static const struct block special6[] = {
        {{0x20, 0x01}, 23},             /* protocol assignments: Teredo, ORCHID, benchmarks */
        {{0x20, 0x01, 0x0d, 0xb8}, 32}, /* documentation */
        {{0x3f, 0xff}, 20},             /* documentation */
};

static const struct block mapped = {{0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff}, 96};
static const struct block nat64 = {{0x00, 0x64, 0xff, 0x9b}, 96};
static const struct block sixtofour = {{0x20, 0x02}, 16};

static bool within(const uint8_t *addr, const struct block *b)
{
	size_t bytes = (size_t)b->prefix / 8;
	int bits = b->prefix % 8;
	return memcmp(addr, b->addr, bytes) == 0 &&
	       (bits == 0 || (addr[bytes] ^ b->addr[bytes]) >> (8 - bits) == 0);
}

static bool any(const uint8_t *addr, const struct block *blocks, size_t n)
{
	for (size_t i = 0; i < n; i++)
		if (within(addr, &blocks[i]))
			return true;
	return false;
}

static bool is_special4(const uint8_t *addr)
{
	return any(addr, special4, FS_ARRAY_LEN(special4));
}

static bool is_special6(const uint8_t *addr)
{
	if (within(addr, &mapped) || within(addr, &nat64))
		return is_special4(addr + 12);
	if (within(addr, &sixtofour))
		return is_special4(addr + 2);
	return !within(addr, &global6) || any(addr, special6, FS_ARRAY_LEN(special6));
}

bool fs_fetch_addr_special(const struct sockaddr *sa, socklen_t n)
{
	if (n >= sizeof(struct sockaddr_in) && sa->sa_family == AF_INET) {
		struct sockaddr_in a;
		memcpy(&a, sa, sizeof(a));
		return is_special4((const uint8_t *)&a.sin_addr);
	}
	if (n >= sizeof(struct sockaddr_in6) && sa->sa_family == AF_INET6) {
		struct sockaddr_in6 a;
		memcpy(&a, sa, sizeof(a));
		return is_special6(a.sin6_addr.s6_addr);
	}
	return true;
}

void fs_fetch_addr_text(const struct sockaddr *sa, socklen_t n, char *out, size_t cap)
{
	char text[INET6_ADDRSTRLEN] = "";
	if (n >= sizeof(struct sockaddr_in) && sa->sa_family == AF_INET) {
		struct sockaddr_in a;
		memcpy(&a, sa, sizeof(a));
		inet_ntop(AF_INET, &a.sin_addr, text, sizeof(text));
	} else if (n >= sizeof(struct sockaddr_in6) && sa->sa_family == AF_INET6) {
		struct sockaddr_in6 a;
		memcpy(&a, sa, sizeof(a));
		inet_ntop(AF_INET6, &a.sin6_addr, text, sizeof(text));
	}
	snprintf(out, cap, "%s", *text ? text : "no IP address");
}
