/*
 * farsight-bench-encoder: how fast this machine turns pictures into rows, by picture size: medians of repeats
 * from the file's bytes to the rows, rows and GFLOP a second, and a hash of the rows so that two runs can be
 * told to have computed the same. Built, not installed. Pictures are drawn from a fixed seed, or one is
 * given.
 *
 * GFLOP counts the products and the attention of the tower, two a multiply-add, in the tower's own time;
 * reading the picture is in the other times.
 */
#include "common/bench/bench.h"
#include "remote/encoder/encoder.h"
#include "remote/encoder/tower.h"

#include <getopt.h>
#include <jansson.h>
#include <spng.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define NAME "farsight-bench-encoder"
#define MAX_REPEAT 100
#define MAX_SIZES 16
#define MAX_SIDE 4096
#define MAX_FILE ((size_t)64 << 20)

struct size {
	int w, h;
};

struct args {
	const char *mmproj, *device, *picture, *rows;
	struct size sizes[MAX_SIZES];
	int n_sizes, threads, repeat;
	bool json, exact;
};

struct result {
	struct size pixels; /* of the picture; 0 x 0 for one that was given */
	struct fs_rows_shape shape;
	struct fs_sample ms, tower_ms;
	double gflop; /* of one encode */
	uint64_t hash;
};

static int usage(FILE *f)
{
	fprintf(f, "usage: farsight-bench-encoder --mmproj FILE.gguf [options]\n"
	           "  --size WxH      picture drawn in that size, up to 16 times (448x448)\n"
	           "  --picture FILE  this picture instead\n"
	           "  --rows FILE     leave the rows of the last picture there, as a rows file\n"
	           "  --threads N     CPU threads (all cores)\n"
	           "  --repeat R      5\n"
	           "  --device NAME   cpu\n"
	           "  --exact         f32 products\n"
	           "  --json          one JSON object\n");
	return f == stdout ? 0 : 2;
}

static bool parse_size(struct args *a, const char *s)
{
	struct size z;
	char tail;

	if (sscanf(s, "%5dx%5d%c", &z.w, &z.h, &tail) != 2 || z.w < 1 || z.h < 1 || z.w > MAX_SIDE ||
	        z.h > MAX_SIDE || a->n_sizes == MAX_SIZES) {
		fprintf(stderr,
		        "farsight-bench-encoder: --size takes WxH up to %d a side, %d times, not \"%s\"\n",
		        MAX_SIDE, MAX_SIZES, s);
		return false;
	}
	a->sizes[a->n_sizes++] = z;
	return true;
}

static const struct option options[] = {
        {"mmproj", required_argument, NULL, 'm'},
        {"size", required_argument, NULL, 's'},
        {"picture", required_argument, NULL, 'p'},
        {"rows", required_argument, NULL, 'o'},
        {"threads", required_argument, NULL, 't'},
        {"repeat", required_argument, NULL, 'r'},
        {"device", required_argument, NULL, 'd'},
        {"exact", no_argument, NULL, 'e'},
        {"json", no_argument, NULL, 'j'},
        {"help", no_argument, NULL, 'h'},
        {NULL, 0, NULL, 0},
};

/* -1: go on; else the exit status. */
static int parse_args(int argc, char **argv, struct args *a)
{
	bool ok = true;
	int c;

	*a = (struct args){.repeat = 5};
	while ((c = getopt_long(argc, argv, "", options, NULL)) != -1) {
		switch (c) {
		case 'm':
			a->mmproj = optarg;
			break;
		case 's':
			ok = parse_size(a, optarg) && ok;
			break;
		case 'p':
			a->picture = optarg;
			break;
		case 'o':
			a->rows = optarg;
			break;
		case 't':
			ok = fs_bench_int(NAME, "threads", optarg, 0, 1024, &a->threads) && ok;
			break;
		case 'r':
			ok = fs_bench_int(NAME, "repeat", optarg, 1, MAX_REPEAT, &a->repeat) && ok;
			break;
		case 'd':
			a->device = optarg;
			break;
		case 'e':
			a->exact = true;
			break;
		case 'j':
			a->json = true;
			break;
		case 'h':
			return usage(stdout);
		default:
			return usage(stderr);
		}
	}
	if (a->n_sizes == 0)
		a->sizes[a->n_sizes++] = (struct size){448, 448};
	return a->mmproj == NULL || optind < argc || !ok ? usage(stderr) : -1;
}

/* ---- pictures ---- */

struct bytes {
	void *data; /* malloc'd */
	size_t n;
};

static int read_picture(const char *path, struct bytes *out, struct fs_errbuf *e)
{
	FILE *f = fopen(path, "rb");
	int err = FS_OK;

	if (f == NULL)
		return fs_fail_errno(e, FS_EIO, "%s", path);
	out->data = malloc(MAX_FILE);
	if (out->data == NULL)
		err = fs_fail(e, FS_ENOMEM, "no memory for a picture");
	else
		out->n = fread(out->data, 1, MAX_FILE, f);
	if (err == FS_OK && (ferror(f) || !feof(f)))
		err = fs_fail(e, FS_EIO, "%s: unreadable, or over 64 MiB", path);
	fclose(f);
	return err;
}

/* Ramps with some grain: an encoder's time does not depend on what is drawn, the hash does. */
static void draw(uint8_t *rgb, struct size z)
{
	uint32_t s = 1;

	for (int y = 0; y < z.h; y++)
		for (int x = 0; x < z.w; x++, rgb += 3) {
			s = s * 1664525u + 1013904223u;
			rgb[0] = (uint8_t)(x * 255 / z.w);
			rgb[1] = (uint8_t)(y * 255 / z.h);
			rgb[2] = (uint8_t)(96 + (s >> 26));
		}
}

static int draw_png(struct size z, struct bytes *out, struct fs_errbuf *e)
{
	size_t n = (size_t)z.w * (size_t)z.h * 3;
	struct spng_ihdr head = {.width = (uint32_t)z.w,
	        .height = (uint32_t)z.h,
	        .bit_depth = 8,
	        .color_type = SPNG_COLOR_TYPE_TRUECOLOR};
	spng_ctx *png = spng_ctx_new(SPNG_CTX_ENCODER);
	uint8_t *rgb = malloc(n);
	int err = SPNG_EMEM;

	if (png != NULL && rgb != NULL) {
		draw(rgb, z);
		spng_set_option(png, SPNG_ENCODE_TO_BUFFER, 1);
		spng_set_option(png, SPNG_IMG_COMPRESSION_LEVEL, 1);
		spng_set_ihdr(png, &head);
		err = spng_encode_image(png, rgb, n, SPNG_FMT_PNG, SPNG_ENCODE_FINALIZE);
		if (err == 0)
			out->data = spng_get_png_buffer(png, &out->n, &err);
	}
	spng_ctx_free(png);
	free(rgb);
	return err == 0 ? FS_OK : fs_fail(e, FS_EINTERNAL, "drawing a PNG: %s", spng_strerror(err));
}

/* ---- measuring ---- */

/* GFLOP of one picture of n patches. */
static double gflop(const struct vision_hparams *h, double n)
{
	double d = h->n_embd, cell = (double)h->merge * h->merge, wide = cell * d;
	double layer = 4 * d * d + 2 * d * h->n_ff + 2 * n * d;
	double patch = 3.0 * h->patch * h->patch * d;

	return 2e-9 * (n * (h->n_layers * layer + patch) + n / cell * (wide * wide + wide * h->n_out));
}

static int measure(struct fs_encoder *v, const struct args *a, const struct bytes *picture, struct result *r,
        struct fs_errbuf *e)
{
	for (int i = -1; i < a->repeat; i++) { /* the first touches every weight */
		int64_t t = fs_now();
		float *rows = NULL;
		int err = fs_encoder_encode(v, picture->data, picture->n, 0, 0, NULL, &r->shape, &rows, e);

		if (err != FS_OK)
			return err;
		if (i < 0)
			r->hash = fs_bench_hash(
			        rows, (size_t)r->shape.n_tokens * (size_t)r->shape.n_embd * sizeof(*rows));
		else {
			r->ms.v[r->ms.n++] = (double)(fs_now() - t) / 1e6;
			r->tower_ms.v[r->tower_ms.n++] = (double)fs_encoder_tower_ns(v) / 1e6;
		}
		if (i < 0 && a->rows != NULL)
			err = fs_rows_write_file(a->rows, &r->shape, rows, e);
		free(rows);
		if (err != FS_OK)
			return err;
	}
	fs_sample_sort(&r->ms);
	return FS_OK;
}

static json_t *result_json(struct result *r)
{
	double s = fs_sample_median(&r->ms) / 1e3, tower_s = fs_sample_median(&r->tower_ms) / 1e3;
	char hash[32];

	snprintf(hash, sizeof(hash), "%016llx", (unsigned long long)r->hash);
	return json_pack("{s:i, s:i, s:i, s:i, s:i, s:f, s:f, s:f, s:f, s:f, s:f, s:s}", "width", r->pixels.w,
	        "height", r->pixels.h, "rows", r->shape.n_tokens, "nx", r->shape.nx, "ny", r->shape.ny,
	        "encode_ms", s * 1e3, "encode_ms_min", r->ms.v[0], "encode_ms_max", r->ms.v[r->ms.n - 1],
	        "rows_per_s", r->shape.n_tokens / s, "tower_ms", tower_s * 1e3, "gflops", r->gflop / tower_s,
	        "rows_hash", hash);
}

static void print_result(struct result *r)
{
	double s = fs_sample_median(&r->ms) / 1e3, tower_s = fs_sample_median(&r->tower_ms) / 1e3;
	char size[32] = "given", cells[32];

	if (r->pixels.w > 0)
		snprintf(size, sizeof(size), "%dx%d", r->pixels.w, r->pixels.h);
	snprintf(cells, sizeof(cells), "%dx%d", r->shape.nx, r->shape.ny);
	printf("%-10s %-8s %10.1f %10.1f %10.1f %10.1f %10.1f %10.1f  %016llx\n", size, cells, s * 1e3,
	        r->ms.v[0], r->ms.v[r->ms.n - 1], r->shape.n_tokens / s, tower_s * 1e3, r->gflop / tower_s,
	        (unsigned long long)r->hash);
	fflush(stdout);
}

static int bench_one(struct fs_encoder *v, const struct args *a, const struct vision_hparams *h,
        struct size z, json_t *list, struct fs_errbuf *e)
{
	struct result r = {.pixels = a->picture != NULL ? (struct size){0, 0} : z};
	struct bytes b = {0};
	int err = a->picture != NULL ? read_picture(a->picture, &b, e) : draw_png(z, &b, e);

	if (err == FS_OK)
		err = measure(v, a, &b, &r, e);
	free(b.data);
	if (err != FS_OK)
		return err;
	r.gflop = gflop(h, (double)r.shape.n_tokens * h->merge * h->merge);
	if (a->json)
		json_array_append_new(list, result_json(&r));
	else
		print_result(&r);
	return FS_OK;
}

static int bench(
        struct fs_encoder *v, const struct args *a, const struct vision_hparams *h, struct fs_errbuf *e)
{
	const struct fs_encoder_facts *f = fs_encoder_facts(v);
	json_t *list = json_array(), *all;
	int err = FS_OK;

	if (!a->json)
		printf("%s: %d layers of %d on %s, %d repeats\n%-10s %-8s %10s %10s %10s %10s %10s %10s  "
		       "%s\n",
		        a->mmproj, h->n_layers, h->n_embd, f->device, a->repeat, "picture", "rows",
		        "median ms", "min", "max", "rows/s", "tower ms", "GFLOP/s", "rows hash");
	for (int i = 0; i < (a->picture != NULL ? 1 : a->n_sizes) && err == FS_OK; i++)
		err = bench_one(v, a, h, a->sizes[i], list, e);
	all = json_pack("{s:s, s:s, s:i, s:i, s:i, s:i, s:o}", "mmproj", a->mmproj, "device", f->device,
	        "threads", a->threads, "layers", h->n_layers, "width", h->n_embd, "repeat", a->repeat,
	        "pictures", list);
	if (err == FS_OK && a->json) {
		json_dumpf(all, stdout, JSON_REAL_PRECISION(6));
		putchar('\n');
	}
	json_decref(all);
	return err;
}

int main(int argc, char **argv)
{
	struct vision_hparams h;
	struct fs_encoder *v = NULL;
	struct fs_gguf *g = NULL;
	struct fs_errbuf e = {""};
	struct args a;
	int status = parse_args(argc, argv, &a), err;

	if (status >= 0)
		return status;
	const struct fs_encoder_opts o = {.mmproj = a.mmproj,
	        .device = a.device,
	        .threads = a.threads,
	        .precision = a.exact ? FS_PRECISION_F32 : FS_PRECISION_AUTO};
	err = fs_gguf_open(&g, a.mmproj, &e);
	if (err == FS_OK)
		err = vision_hparams_read(g, &h, &e);
	fs_gguf_close(g);
	if (err == FS_OK)
		err = fs_encoder_open(&o, &v, &e);
	if (err == FS_OK)
		err = bench(v, &a, &h, &e);
	fs_encoder_close(v);
	if (err != FS_OK) {
		fprintf(stderr, "farsight-bench-encoder: %s\n", e.text);
		return 1;
	}
	return 0;
}
