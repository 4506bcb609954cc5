/* Fuzz target: vision-host.json. What is taken starts an encoder: paths are absolute, numbers within their
 * bounds. */
#include "common/encproc/encproc.h"
#include "remote/watchdog/config.h"

#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static void check(const struct fs_wd_config *c)
{
	const char *const paths[] = {c->mmproj, c->model, c->encoder, c->spool};
	struct fs_buf command;
	size_t args = 0;

	FS_ASSERT(c->mmproj[0] && c->encoder[0]);
	for (size_t i = 0; i < FS_ARRAY_LEN(paths); i++)
		FS_ASSERT(paths[i][0] == '\0' || paths[i][0] == '/');
	while (c->encoder_args[args])
		args++;
	FS_ASSERT(args <= FS_ENCPROC_ARGS_MAX && (c->extended == 0 || c->extended == 1));
	FS_ASSERT(c->ready_timeout_s > 0 && c->encode_timeout_s > 0 && c->silence_s > 0 && c->max_queue > 0);
	FS_ASSERT(c->probe_fails > 0 && c->probe_interval_s > 0 && c->gpu_device >= -1 && c->threads >= 0);
	fs_buf_init(&command, 1 << 20);
	FS_ASSERT(fs_wd_config_command(c, &command) == FS_OK);
	fs_buf_finish(&command);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
	static struct fs_wd_config c;
	static int fd = -1;
	struct fs_errbuf e = {""};
	char path[64];

	if (fd < 0)
		fd = memfd_create("vision-host.json", 0);
	FS_ASSERT(fd >= 0 && ftruncate(fd, 0) == 0 && pwrite(fd, data, n, 0) == (ssize_t)n);
	snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
	if (fs_wd_config_load(&c, path, &e)) {
		FS_ASSERT(strstr(e.text, path));
		return 0;
	}
	check(&c);
	fs_wd_config_finish(&c);
	return 0;
}
