/*
 * An encoder: mmproj, device and tower together. One thread, as encoder.h says. Refuses a text model of
 * another row width and values that are not finite (a damaged file, a number range exceeded): rows go out
 * complete and sane or not at all.
 */
#include "remote/encoder/encoder.h"

#include "remote/encoder/tower.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct fs_encoder {
	struct fs_gguf *g;
	struct fs_dev *d;
	struct tower tower;
	struct fs_encoder_facts facts;
	int64_t tower_ns; /* of the last picture */
};

static int64_t cell_pixels(const struct vision_hparams *h)
{
	int64_t side = (int64_t)h->patch * h->merge;

	return side * side;
}

/* The row width of a text model: <architecture>.embedding_length. */
static int model_width(const char *path, uint32_t *out, struct fs_errbuf *e)
{
	struct fs_gguf *g = NULL;
	const char *arch = NULL;
	char key[128];
	size_t n = 0;
	int err = fs_gguf_open(&g, path, e);

	if (err != FS_OK)
		return err;
	err = fs_gguf_str(g, "general.architecture", &arch, &n, e);
	if (err == FS_OK) {
		snprintf(key, sizeof(key), "%.*s.embedding_length", (int)FS_MIN(n, (size_t)64), arch);
		err = fs_gguf_u32(g, key, out, e);
	}
	if (err != FS_OK)
		fs_fail_prefix(e, err, "%s", path);
	fs_gguf_close(g);
	return err;
}

static int check_model(const struct fs_encoder_opts *o, int n_out, struct fs_errbuf *e)
{
	uint32_t width = 0;
	int err = o->model == NULL ? FS_OK : model_width(o->model, &width, e);

	if (err != FS_OK)
		return fs_fail_prefix(e, err, "cannot read the text model");
	if (o->model != NULL && width != (uint32_t)n_out)
		return fs_fail(e, FS_EINVAL,
		        "mismatch: the text model %s takes rows of %u, the projector of %s makes rows of %d; "
		        "they do not belong together",
		        o->model, width, o->mmproj, n_out);
	return FS_OK;
}

/* Options replace the file's bounds; a bound of the file gives way to one that was asked for. */
static int set_bounds(
        struct fs_encoder *v, const struct fs_encoder_opts *o, struct vision_hparams *h, struct fs_errbuf *e)
{
	int64_t cell = cell_pixels(h);

	if (o->min_tokens < 0 || o->max_tokens < 0 || o->min_tokens > FS_ROWS_MAX_TOKENS ||
	        o->max_tokens > FS_ROWS_MAX_TOKENS)
		return fs_fail(
		        e, FS_EINVAL, "the number of tokens must be within 1 and %d", FS_ROWS_MAX_TOKENS);
	if (o->min_tokens > 0 && o->max_tokens > 0 && o->min_tokens > o->max_tokens)
		return fs_fail(e, FS_EINVAL, "--min-tokens %d is over --max-tokens %d", o->min_tokens,
		        o->max_tokens);
	if (o->min_tokens > 0)
		h->min_pixels = o->min_tokens * cell;
	if (o->max_tokens > 0)
		h->max_pixels = o->max_tokens * cell;
	if (h->min_pixels < cell)
		h->min_pixels = cell;
	if (h->max_pixels > FS_ROWS_MAX_TOKENS * cell)
		h->max_pixels = FS_ROWS_MAX_TOKENS * cell;
	if (h->min_pixels > h->max_pixels && o->max_tokens > 0)
		h->min_pixels = h->max_pixels;
	if (h->max_pixels < h->min_pixels)
		h->max_pixels = h->min_pixels;
	v->facts.min_tokens = (int32_t)((h->min_pixels + cell - 1) / cell);
	v->facts.max_tokens = (int32_t)(h->max_pixels / cell);
	return FS_OK;
}

/* ---- the device ---- */

static const char no_room[] = "lower --max-tokens, use another card, or encode on the CPU (--device cpu)";

/* Cells of the largest picture. A very long one has more than max_tokens: docs/ENCODER.md. */
static int64_t most_cells(const struct fs_encoder *v)
{
	int64_t max = v->facts.max_tokens, longest = 1;

	while (longest * longest < 200 * max)
		longest++;
	return FS_MAX(max, longest);
}

static int check_room(struct fs_encoder *v, const struct vision_hparams *h, struct fs_errbuf *e)
{
	struct fs_dev_need n = {0};
	int err = tower_bytes(v->d, v->g, h, &n.weights, e);

	if (err != FS_OK)
		return err;
	n.work = tower_work_bytes(v->d, h, most_cells(v) * h->merge * h->merge);
	return fs_dev_fit(v->d, &n, no_room, e);
}

static int bring_up(struct fs_encoder *v, const struct fs_dev_opts *d, const struct vision_hparams *h,
        struct fs_errbuf *e)
{
	int err = fs_dev_open(d, &v->d, e);

	if (err == FS_OK)
		err = check_room(v, h, e);
	if (err == FS_OK)
		err = tower_init(&v->tower, v->d, v->g, h, e);
	return err;
}

/* "auto" takes the CPU when the tower does not fit the card. */
static int place(struct fs_encoder *v, const struct fs_encoder_opts *o, const struct vision_hparams *h,
        struct fs_errbuf *e)
{
	struct fs_dev_opts d = {.device = o->device, .threads = o->threads, .precision = o->precision};
	struct fs_errbuf why = {""};
	int err;

	if (d.device == NULL)
		d.device = "cpu";
	if (o->gpu && (o->device == NULL || strcmp(o->device, "auto") == 0))
		d.device = "cuda";
	if (o->gpu && strcmp(d.device, "cpu") == 0)
		return fs_fail(e, FS_EINVAL, "--gpu and --device cpu contradict each other");
	err = bring_up(v, &d, h, &why);
	if (err == FS_OK)
		return FS_OK;
	if (!fs_dev_else_cpu(v->d, d.device, err, why.text)) {
		fs_fail(e, err, "%s", why.text);
		return o->gpu && v->d == NULL ? fs_fail_prefix(e, err, "no GPU to encode on") : err;
	}
	fs_dev_close(v->d);
	v->d = NULL;
	d.device = "cpu";
	return bring_up(v, &d, h, e);
}

/* ---- life ---- */

static int open_parts(struct fs_encoder *v, const struct fs_encoder_opts *o, struct fs_errbuf *e)
{
	struct vision_hparams h = {0};
	int err = fs_gguf_open(&v->g, o->mmproj, e);

	if (err == FS_OK) {
		err = vision_hparams_read(v->g, &h, e);
		if (err != FS_OK)
			fs_fail_prefix(e, err, "%s", o->mmproj);
	}
	if (err != FS_OK)
		return fs_fail_prefix(e, err, "cannot load the vision encoder");
	err = check_model(o, h.n_out, e);
	if (err == FS_OK)
		err = set_bounds(v, o, &h, e);
	if (err == FS_OK)
		err = place(v, o, &h, e);
	if (err == FS_OK)
		err = fs_gguf_fingerprint(v->g, v->facts.fingerprint, e);
	if (err != FS_OK)
		return err;
	v->facts.n_embd = h.n_out;
	v->facts.gpu = fs_dev_is_gpu(v->d);
	snprintf(v->facts.device, sizeof(v->facts.device), "%s", fs_dev_name(v->d));
	return FS_OK;
}

int fs_encoder_open(const struct fs_encoder_opts *o, struct fs_encoder **out, struct fs_errbuf *e)
{
	struct fs_encoder *v = calloc(1, sizeof(*v));
	int err;

	if (v == NULL)
		return fs_fail(e, FS_ENOMEM, "no memory");
	err = open_parts(v, o, e);
	if (err != FS_OK) {
		fs_encoder_close(v);
		return err;
	}
	*out = v;
	return FS_OK;
}

void fs_encoder_close(struct fs_encoder *v)
{
	if (v == NULL)
		return;
	tower_finish(&v->tower);
	fs_dev_close(v->d);
	fs_gguf_close(v->g);
	free(v);
}

const struct fs_encoder_facts *fs_encoder_facts(const struct fs_encoder *v)
{
	return &v->facts;
}

int64_t fs_encoder_tower_ns(const struct fs_encoder *v)
{
	return v->tower_ns;
}

bool fs_encoder_memory(struct fs_encoder *v, uint64_t *free_bytes, uint64_t *total_bytes)
{
	return fs_dev_memory(v->d, free_bytes, total_bytes);
}

bool fs_encoder_lost(const struct fs_encoder *v)
{
	return fs_dev_lost(v->d);
}

/* Takes the patches' rows into a new block and checks them. */
static int run_tower(struct fs_encoder *v, const struct patches *p, struct fs_cancel *cancel,
        struct fs_rows_shape *shape, float **rows, struct fs_errbuf *e)
{
	const struct vision_hparams *h = &v->tower.h;
	struct fs_rows_shape s = {.nx = p->gw / h->merge, .ny = p->gh / h->merge, .n_embd = h->n_out};
	float *data;
	int64_t start;
	size_t n;
	int err;

	s.n_tokens = s.nx * s.ny;
	n = (size_t)s.n_tokens * (size_t)s.n_embd;
	data = malloc(n * sizeof(*data));
	if (data == NULL)
		return fs_fail(e, FS_ENOMEM, "no memory for %d rows", s.n_tokens);
	start = fs_now();
	err = tower_run(&v->tower, p, cancel, data, e);
	v->tower_ns = fs_now() - start;
	if (err == FS_OK && fs_rows_check_finite(data, n, e) != FS_OK)
		err = fs_fail(e, FS_EINTERNAL, "the vision encoder computed values that are no numbers");
	if (err != FS_OK) {
		free(data);
		return err;
	}
	*shape = s;
	*rows = data;
	return FS_OK;
}

/* The sides of the largest picture that is not much longer than wide. */
static void largest(int32_t cells, int *nx, int *ny)
{
	int best = 0;

	for (int side = 1; (int64_t)side * side <= cells; side++) {
		int other = cells / side;

		if (other <= 4 * side && side * other >= best) {
			best = side * other;
			*nx = side;
			*ny = other;
		}
	}
}

int fs_encoder_warm_up(struct fs_encoder *v, struct fs_errbuf *e)
{
	const struct vision_hparams *h = &v->tower.h;
	struct patches p = {0};
	struct fs_rows_shape shape;
	float *rows = NULL;
	int nx = 1, ny = 1, err;

	largest((int32_t)most_cells(v), &nx, &ny);
	err = patches_grey(h, nx * h->merge, ny * h->merge, &p, e);
	if (err == FS_OK)
		err = run_tower(v, &p, NULL, &shape, &rows, e);
	free(rows);
	patches_finish(&p);
	return err;
}

int fs_encoder_encode(struct fs_encoder *v, const void *picture, size_t n, int min_tokens, int max_tokens,
        struct fs_cancel *cancel, struct fs_rows_shape *shape, float **rows, struct fs_errbuf *e)
{
	const struct vision_hparams *h = &v->tower.h;
	int64_t min = min_tokens > 0 ? min_tokens * cell_pixels(h) : h->min_pixels;
	int64_t max = max_tokens > 0 ? FS_MIN(max_tokens * cell_pixels(h), h->max_pixels) : h->max_pixels;
	struct patches p = {0};
	int err;

	min = FS_MIN(min, max);
	err = preprocess(h, picture, n, min, max, cancel, &p, e);
	if (err == FS_OK)
		err = run_tower(v, &p, cancel, shape, rows, e);
	patches_finish(&p);
	return err;
}
