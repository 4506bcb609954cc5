/* Fuzz target: the sizes that a text model and a vision model tell of themselves, from bytes as a GGUF file.
 * What passes can be computed with: no size is zero, and no product of them is more than the graphs can hold.
 */
#include "remote/encoder/tower.h"
#include "server/engine/model.h"

#include <math.h>
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static void check_text(const struct fs_gguf *g)
{
	static struct fs_rope rope;
	struct fs_hparams h;

	if (fs_hparams_read(g, &h, &rope, NULL))
		return;
	FS_ASSERT(h.n_embd > 0 && h.n_layer > 0 && h.n_ff > 0 && h.n_vocab > 0 && h.n_ctx_train > 0);
	FS_ASSERT(h.kv_heads > 0 && h.heads % h.kv_heads == 0 && h.head_dim > 0 && h.head_dim <= 256);
	FS_ASSERT(rope.n_pairs > 0 && 2 * rope.n_pairs <= h.head_dim && isfinite(h.attn_scale));
	for (int p = 0; p < rope.n_pairs; p++)
		FS_ASSERT(rope.axis[p] < rope.n_axes);
}

static void check_vision(const struct fs_gguf *g)
{
	struct vision_hparams h;
	int w, height;

	if (vision_hparams_read(g, &h, NULL))
		return;
	FS_ASSERT(h.n_heads > 0 && h.head_dim * h.n_heads == h.n_embd && h.n_layers > 0 && h.n_ff > 0);
	FS_ASSERT(h.patch > 0 && h.merge > 0 && h.n_out > 0 && h.std[0] > 0);
	FS_ASSERT(h.min_pixels > 0 && h.max_pixels > 0);
	if (smart_resize(640, 480, h.patch * h.merge, h.min_pixels, h.max_pixels, &w, &height, NULL) == FS_OK)
		FS_ASSERT(w > 0 && height > 0 && w % (h.patch * h.merge) == 0 &&
		          height % (h.patch * h.merge) == 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
	static int fd = -1;
	struct fs_gguf *g;
	char path[64];

	if (fd < 0)
		fd = memfd_create("fuzz.gguf", 0);
	FS_ASSERT(fd >= 0 && ftruncate(fd, 0) == 0 && pwrite(fd, data, n, 0) == (ssize_t)n);
	snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
	if (fs_gguf_open(&g, path, NULL))
		return 0;
	check_text(g);
	check_vision(g);
	fs_gguf_close(g);
	return 0;
}
