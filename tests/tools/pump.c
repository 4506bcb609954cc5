/*
 * pump: reads <up> bytes from stdin, then writes <down> bytes to stdout, again and again until stdin ends.
 * The far end of farsight-bench-transport's plain OpenSSH connection: the same bytes with no protocol at all.
 * One thread; refuses nothing.
 */
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static int read_all(uint8_t *buf, size_t n)
{
	while (n) {
		ssize_t r = read(0, buf, n);
		if (r < 0 && errno == EINTR)
			continue;
		if (r <= 0)
			return -1;
		buf += r;
		n -= (size_t)r;
	}
	return 0;
}

static int write_all(const uint8_t *buf, size_t n)
{
	while (n) {
		ssize_t r = write(1, buf, n);
		if (r < 0 && errno == EINTR)
			continue;
		if (r <= 0)
			return -1;
		buf += r;
		n -= (size_t)r;
	}
	return 0;
}

int main(int argc, char **argv)
{
	size_t up = argc > 1 ? strtoul(argv[1], NULL, 10) : 0,
	       down = argc > 2 ? strtoul(argv[2], NULL, 10) : 0;
	uint8_t *in = up ? malloc(up) : NULL, *out = down ? malloc(down) : NULL;
	if (!in || !out || up > 1u << 30 || down > 1u << 30) {
		fprintf(stderr, "usage: pump <up> <down>: bytes to read, bytes to answer\n");
		return 2;
	}
	uint32_t x = 1;
	for (size_t i = 0; i < down; i++)
		out[i] = (uint8_t)((x = x * 1664525u + 1013904223u) >> 24);
	while (read_all(in, up) == 0 && write_all(out, down) == 0)
		;
	free(in);
	free(out);
	return 0;
}
