/* Fuzz target: bytes as a GGUF file. The first of them reach the parser through a memory file, since the
 * reader maps files. */
#include "common/gguf/internal.h"

#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static void read_all(const struct fs_gguf *g)
{
	float row[1024];
	char fp[33];

	fs_gguf_fingerprint(g, fp, NULL);
	for (size_t i = 0; i < fs_gguf_n_tensors(g); i++) {
		const struct fs_gguf_tensor *t = fs_gguf_tensor_at(g, i);

		if (t->data != NULL && t->ne[0] <= 1024)
			fs_dequantize_row(t->type, t->data, row, t->ne[0]);
	}
}

static void read_key(const struct fs_gguf *g, const char *key)
{
	struct fs_gguf_strs it;
	const char *s;
	size_t n;
	uint32_t u;
	float f[4];
	int32_t v[4];

	fs_gguf_u32(g, key, &u, NULL);
	fs_gguf_str(g, key, &s, &n, NULL);
	fs_gguf_arr_f32(g, key, f, 3, NULL);
	fs_gguf_arr_i32(g, key, v, 2, NULL);
	if (fs_gguf_arr_strs(g, key, &it, NULL) == FS_OK)
		while (fs_gguf_strs_next(&it, &s, &n))
			if (n > 0)
				(void)((const volatile char *)s)[n - 1];
}

/* Whatever can be read has a stub that can be read, with the same names. */
static void check_stub(const struct fs_gguf *g)
{
	struct fs_gguf_stub_info info;
	struct fs_gguf *stub;
	char path[64];
	int fd = memfd_create("stub.gguf", 0);
	FILE *f = fd < 0 ? NULL : fdopen(fd, "w");

	if (f == NULL)
		abort();
	if (gguf_stub(g, f, &info, NULL) == FS_OK) {
		snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
		if (fflush(f) != 0 || lseek(fd, 0, SEEK_END) != (off_t)info.bytes_out ||
		        fs_gguf_open(&stub, path, NULL) != FS_OK ||
		        fs_gguf_n_tensors(stub) != fs_gguf_n_tensors(g))
			abort();
		fs_gguf_close(stub);
	}
	fclose(f);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
	static int fd = -1;
	struct fs_gguf *g;
	char path[64];

	if (fd < 0)
		fd = memfd_create("fuzz.gguf", 0);
	if (fd < 0 || ftruncate(fd, 0) != 0 || pwrite(fd, data, n, 0) != (ssize_t)n)
		abort();
	snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
	if (fs_gguf_open(&g, path, NULL) != FS_OK)
		return 0;
	read_all(g);
	read_key(g, "general.architecture");
	read_key(g, "words");
	read_key(g, "mean");
	check_stub(g);
	fs_gguf_close(g);
	return 0;
}
