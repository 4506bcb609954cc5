/* Little-endian numbers at unaligned places; for the files of this folder. */
#ifndef FS_WIRE_BYTES_H
#define FS_WIRE_BYTES_H

#include <stdint.h>

static inline void put_u32(uint8_t *p, uint32_t v)
{
	p[0] = (uint8_t)v;
	p[1] = (uint8_t)(v >> 8);
	p[2] = (uint8_t)(v >> 16);
	p[3] = (uint8_t)(v >> 24);
}

static inline uint32_t get_u32(const uint8_t *p)
{
	return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

static inline int32_t get_i32(const uint8_t *p)
{
	return (int32_t)get_u32(p);
}

#endif
