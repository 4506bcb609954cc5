/*
 * null_encoder: an encoder of the extended line protocol that encodes nothing: every picture gets the same
 * rows, written anew each time, so that farsight-bench-transport measures the way to it and back alone.
 * Arguments: --rows N (grid N x 1) or --rows NxE as tokens x width; others are ignored. One thread.
 */
#include "common/gguf/gguf.h"
#include "common/wire/wire.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int parse_rows(int argc, char **argv, struct fs_rows_shape *s)
{
	*s = (struct fs_rows_shape){1024, 1024, 1, 2560};
	for (int i = 1; i + 1 < argc; i++)
		if (!strcmp(argv[i], "--rows") && sscanf(argv[i + 1], "%dx%d", &s->n_tokens, &s->n_embd) < 1)
			return -1;
	s->nx = s->n_tokens;
	return s->n_tokens < 1 || s->n_tokens > FS_ROWS_MAX_TOKENS || s->n_embd < 1 ||
	                       s->n_embd > FS_ROWS_MAX_EMBD
	               ? -1
	               : 0;
}

int main(int argc, char **argv)
{
	struct fs_rows_shape shape;
	if (parse_rows(argc, argv, &shape)) {
		fprintf(stderr, "usage: null_encoder --rows TOKENSxWIDTH\n");
		return 2;
	}
	size_t n = (size_t)shape.n_tokens * (size_t)shape.n_embd;
	float *rows = malloc(n * sizeof(*rows));
	uint16_t *halves = malloc(n * sizeof(*halves));
	if (!rows || !halves)
		return 1;
	uint32_t x = 1; /* noise, so that nothing on the way can compress it */
	for (size_t i = 0; i < n; i++)
		rows[i] = (float)((x = x * 1664525u + 1013904223u) >> 8) / 16777216.0f;
	for (size_t i = 0; i < n; i++)
		halves[i] = fs_f32_to_f16(rows[i]);
	printf("READY %d rows=pipe\n", shape.n_embd);
	fflush(stdout);
	char line[FS_LINE_MAX];
	while (fgets(line, sizeof(line), stdin)) {
		struct fs_order o;
		struct fs_errbuf e;
		line[strcspn(line, "\n")] = '\0';
		int rc = fs_order_parse(line, strlen(line), true, &o, &e);
		if (!rc && o.kind == FS_ORDER_QUIT)
			break;
		if (!rc && o.kind == FS_ORDER_ENC)
			rc = o.f16 ? fs_rows_write_file_f16(o.out, &shape, halves, &e)
			           : fs_rows_write_file(o.out, &shape, rows, &e);
		if (rc)
			printf("ERR %s\n", e.text);
		else
			printf("OK %d %d %d 0\n", shape.n_tokens, shape.nx, shape.ny);
		fflush(stdout);
	}
	free(rows);
	free(halves);
	return 0;
}
