/* See fake_gpu.h. */
#include "tests/tools/fake_gpu.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct fake_card fake_card = {.total = (uint64_t)1 << 40};

int __real_fs_dev_open(const struct fs_dev_opts *o, struct fs_dev **out, struct fs_errbuf *e);
int __wrap_fs_dev_open(const struct fs_dev_opts *o, struct fs_dev **out, struct fs_errbuf *e);

struct block { /* before each allocation */
	size_t bytes;
	char pad[56];
};
struct fake {
	struct fs_dev dev; /* first */
	struct fs_dev *cpu;
	bool recording;
};

static struct fake *fake_of(struct fs_dev *d)
{
	return (struct fake *)d;
}

static struct fs_dev *cpu_of(struct fs_dev *d)
{
	return fake_of(d)->cpu;
}

static void broken(const char *what)
{
	fprintf(stderr, "fake_gpu: %s\n", what);
	abort();
}

/* ---- the folder ---- */

static bool there(const char *name, bool take)
{
	char path[512];

	if (fake_card.folder == NULL)
		return false;
	snprintf(path, sizeof(path), "%s/%s", fake_card.folder, name);
	return take ? unlink(path) == 0 : access(path, F_OK) == 0;
}

void fake_gpu_folder(const char *folder)
{
	char path[512], text[32] = "";
	FILE *f;

	fake_card.folder = folder;
	snprintf(path, sizeof(path), "%s/memory", folder);
	f = fopen(path, "re");
	if (f != NULL && fgets(text, sizeof(text), f) != NULL)
		fake_card.total = strtoull(text, NULL, 10);
	if (f != NULL)
		fclose(f);
}

/* ---- memory ---- */

static bool take(uint64_t bytes)
{
	uint64_t used = fake_card.used + bytes;

	if (used + fake_card.others > fake_card.total)
		return false;
	fake_card.used = used;
	if (used > fake_card.peak)
		fake_card.peak = used;
	return true;
}

static int fake_alloc(struct fs_dev *d, size_t bytes, void **out, struct fs_errbuf *e)
{
	struct block *b;

	if (fake_of(d)->recording)
		broken("an allocation within a step that is recorded");
	if (!take(fs_dev_rounded(bytes)))
		return fs_fail(e, FS_ENOMEM, "the card has no %zu bytes left", bytes);
	b = aligned_alloc(64, (sizeof(*b) + bytes + 63) / 64 * 64);
	if (b == NULL)
		return fs_fail(e, FS_ENOMEM, "no memory for %zu bytes", bytes);
	memset(b, 0xff, sizeof(*b) + bytes); /* as floats: NaN */
	b->bytes = bytes;
	*out = b + 1;
	return FS_OK;
}

static void fake_release(struct fs_dev *d, void *p)
{
	struct block *b = (struct block *)p - 1;

	fake_card.used -= fs_dev_rounded(b->bytes);
	free(b);
}

static uint64_t fake_weight_bytes(const struct fs_dev *d, const struct fs_gguf_tensor *t, bool expect_packed)
{
	return fs_dev_rounded(t->nbytes);
}

static uint64_t loaded_bytes(const struct fs_weight *w)
{
	return fs_dev_rounded(fs_dtype_row_bytes(w->type, w->in) * (size_t)w->out);
}

static int fake_weight_load(struct fs_dev *d, const struct fs_gguf_tensor *t, bool expect_packed,
        struct fs_weight *w, struct fs_errbuf *e)
{
	int err = cpu_of(d)->ops->weight_load(cpu_of(d), t, expect_packed, w, e);

	if (err == FS_OK && !take(loaded_bytes(w))) {
		cpu_of(d)->ops->weight_finish(cpu_of(d), w);
		err = fs_fail(e, FS_ENOMEM, "the card has no %zu bytes left", t->nbytes);
	}
	return err;
}

static void fake_weight_finish(struct fs_dev *d, struct fs_weight *w)
{
	fake_card.used -= loaded_bytes(w);
	cpu_of(d)->ops->weight_finish(cpu_of(d), w);
}

static bool fake_memory(struct fs_dev *d, uint64_t *free_bytes, uint64_t *total_bytes)
{
	*total_bytes = fake_card.total;
	*free_bytes = fake_card.total - fake_card.others - fake_card.used;
	return true;
}

/* ---- the queue ---- */

static void lose(struct fs_dev *d)
{
	fs_dev_fail(d, FS_EINTERNAL, "an illegal memory access was encountered");
	d->lost = true;
	d->hung = fake_card.hangs;
}

/* False: this operation does not come about. */
static bool op(struct fs_dev *d)
{
	if (d->lost)
		broken("an operation on a card that is lost");
	fake_card.ops++;
	if ((fake_card.lose_at > 0 && --fake_card.lose_at == 0) || there("lose", true)) {
		lose(d);
		return false;
	}
	if (fake_card.fail_at > 0 && --fake_card.fail_at == 0) {
		fs_dev_fail(d, FS_EINTERNAL, "the card failed at that");
		return false;
	}
	return true;
}

static void not_recording(struct fs_dev *d, const char *what)
{
	if (fake_of(d)->recording)
		broken(what);
}

static void fake_wait(struct fs_dev *d)
{
	not_recording(d, "waiting within a step that is recorded");
	if (cpu_of(d)->err)
		fs_dev_fail(d, cpu_of(d)->err, "%s", cpu_of(d)->err_text.text);
	cpu_of(d)->err = FS_OK;
	if (d->lost) /* a real one says so again and again */
		fs_dev_fail(d, FS_EINTERNAL, "the card is lost");
}

static void fake_pace(struct fs_dev *d)
{
	not_recording(d, "waiting within a step that is recorded");
	fake_card.paces++;
}

static bool fake_replay(struct fs_dev *d, uint64_t key)
{
	fake_of(d)->recording = true;
	return false;
}

static void fake_recorded(struct fs_dev *d)
{
	if (!fake_of(d)->recording && !d->err) /* a device that has failed begins none */
		broken("the end of a recording that was not begun");
	fake_of(d)->recording = false;
	fake_card.recordings++;
}

static void fake_upload(struct fs_dev *d, void *dst, const void *src, size_t bytes)
{
	not_recording(d, "a copy within a step that is recorded");
	if (op(d))
		memcpy(dst, src, bytes);
}

static void fake_download(struct fs_dev *d, void *dst, const void *src, size_t bytes)
{
	not_recording(d, "a copy within a step that is recorded");
	if (op(d))
		memcpy(dst, src, bytes);
}

static void fake_copy(struct fs_dev *d, void *dst, const void *src, size_t bytes)
{
	if (op(d))
		memcpy(dst, src, bytes);
}

/* ---- operations: the CPU's ---- */

static void fake_matmul(struct fs_dev *d, const struct fs_weight *w, const float *bias, const float *x,
        float *y, int64_t n, bool add)
{
	if (op(d))
		cpu_of(d)->ops->matmul(cpu_of(d), w, bias, x, y, n, add);
}

static void fake_embed(struct fs_dev *d, const struct fs_weight *w, const int32_t *ids, float *y, int64_t n)
{
	if (op(d))
		cpu_of(d)->ops->embed(cpu_of(d), w, ids, y, n);
}

static void fake_rms_norm(
        struct fs_dev *d, const float *x, const float *w, float *y, int64_t n, int64_t dim, float eps)
{
	if (op(d))
		cpu_of(d)->ops->rms_norm(cpu_of(d), x, w, y, n, dim, eps);
}

static void fake_layer_norm(struct fs_dev *d, const float *x, const float *w, const float *b, float *y,
        int64_t n, int64_t dim, float eps)
{
	if (op(d))
		cpu_of(d)->ops->layer_norm(cpu_of(d), x, w, b, y, n, dim, eps);
}

static void fake_rope_angles(
        struct fs_dev *d, const struct fs_rope *r, const int32_t *pos, float *cs, int64_t n)
{
	if (op(d))
		cpu_of(d)->ops->rope_angles(cpu_of(d), r, pos, cs, n);
}

static void fake_rope(struct fs_dev *d, const struct fs_rope *r, const float *cs, float *x, int64_t stride,
        int64_t n, int heads, int head_dim)
{
	if (op(d))
		cpu_of(d)->ops->rope(cpu_of(d), r, cs, x, stride, n, heads, head_dim);
}

static void fake_kv_store(struct fs_dev *d, const struct fs_kv_store *k)
{
	if (op(d))
		cpu_of(d)->ops->kv_store(cpu_of(d), k);
}

static void fake_attention(struct fs_dev *d, const struct fs_attn *a)
{
	if (op(d))
		cpu_of(d)->ops->attention(cpu_of(d), a);
}

static void fake_act(struct fs_dev *d, enum fs_act act, float *x, int64_t n)
{
	if (op(d))
		cpu_of(d)->ops->act(cpu_of(d), act, x, n);
}

static void fake_gate(
        struct fs_dev *d, enum fs_act act, const float *gate, const float *up, float *y, int64_t n)
{
	if (op(d))
		cpu_of(d)->ops->gate(cpu_of(d), act, gate, up, y, n);
}

static void fake_add(struct fs_dev *d, float *y, const float *x, int64_t n)
{
	if (op(d))
		cpu_of(d)->ops->add(cpu_of(d), y, x, n);
}

static void fake_close(struct fs_dev *d)
{
	if (fake_card.used != 0)
		broken("the device is closed with memory taken");
	fs_dev_close(cpu_of(d));
	free(d);
}

static const struct fs_dev_ops fake_ops = {
        .close = fake_close,
        .wait = fake_wait,
        .alloc = fake_alloc,
        .release = fake_release,
        .upload = fake_upload,
        .download = fake_download,
        .copy = fake_copy,
        .weight_load = fake_weight_load,
        .weight_finish = fake_weight_finish,
        .matmul = fake_matmul,
        .embed = fake_embed,
        .rms_norm = fake_rms_norm,
        .layer_norm = fake_layer_norm,
        .rope_angles = fake_rope_angles,
        .rope = fake_rope,
        .kv_store = fake_kv_store,
        .attention = fake_attention,
        .act = fake_act,
        .gate = fake_gate,
        .add = fake_add,
        .replay = fake_replay,
        .recorded = fake_recorded,
        .pace = fake_pace,
        .memory = fake_memory,
        .weight_bytes = fake_weight_bytes,
};

int fake_gpu_open(const struct fs_dev_opts *o, struct fs_dev **out, struct fs_errbuf *e)
{
	struct fake *f;
	int err;

	fake_card.opens++;
	if (fake_card.hangs && fake_card.opens > 1)
		broken("a card that hangs is opened again");
	if (fake_card.no_card != 0 || there("gone", false)) {
		if (fake_card.no_card > 0)
			fake_card.no_card--;
		return fs_fail(e, FS_EUNAVAILABLE, "cuda: no card that works");
	}
	f = calloc(1, sizeof(*f));
	if (f == NULL)
		return fs_fail(e, FS_ENOMEM, "no memory");
	err = fs_cpu_open(o, &f->cpu, e);
	if (err != FS_OK) {
		free(f);
		return err;
	}
	f->dev = (struct fs_dev){.ops = &fake_ops,
	        .precision = f->cpu->precision,
	        .threads = f->cpu->threads,
	        .is_gpu = true,
	        .name = "cuda:0",
	        .describe = "cuda:0: a card of the tests"};
	*out = &f->dev;
	return FS_OK;
}

/* As the real one: "auto" takes the card, or the CPU with a log line. */
int __wrap_fs_dev_open(const struct fs_dev_opts *o, struct fs_dev **out, struct fs_errbuf *e)
{
	const char *name = o->device ? o->device : "auto";
	struct fs_errbuf why = {""};
	int err;

	if (strcmp(name, "auto") != 0 && strncmp(name, "cuda", 4) != 0)
		return __real_fs_dev_open(o, out, e);
	err = fake_gpu_open(o, out, &why);
	if (err != FS_OK && strcmp(name, "auto") == 0) {
		struct fs_dev_opts cpu = *o;

		cpu.device = "cpu";
		fs_info("the CPU is used: %s", why.text);
		return __real_fs_dev_open(&cpu, out, e);
	}
	return err != FS_OK ? fs_fail(e, err, "%s", why.text) : FS_OK;
}
