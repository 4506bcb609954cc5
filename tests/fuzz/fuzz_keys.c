/* Fuzz target: private key files, and what an ssh agent answers: the first byte chooses, the rest is the file
 * or the agent's side of the connection. */
#include "server/ssh/internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static void file(const uint8_t *data, size_t n)
{
	static int fd = -1;
	struct fs_ssh_key k;
	char path[64], type[64];

	if (fd < 0)
		fd = memfd_create("id_fuzz", 0);
	FS_ASSERT(fd >= 0 && fchmod(fd, 0600) == 0 && ftruncate(fd, 0) == 0);
	FS_ASSERT(pwrite(fd, data, n, 0) == (ssize_t)n);
	snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
	if (fs_ssh_key_load(path, &k, NULL))
		return;
	FS_ASSERT(k.text && (!k.pub || fs_ssh_blob_type(k.pub, k.pub_n, type, sizeof(type))));
	fs_ssh_key_finish(&k);
}

static void agent(const uint8_t *data, size_t n, bool sign)
{
	struct fs_patience p = {.deadline = fs_deadline_ms(5000), .wake_fd = -1};
	struct fs_agent_key keys[FS_AGENT_MAX_KEYS];
	struct fs_agent a = {.patience = &p};
	uint8_t *sig = NULL;
	size_t len = 0;
	int fds[2];

	FS_ASSERT(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, fds) == 0);
	a.fd = fds[0];
	if (send(fds[1], data, n, 0) == (ssize_t)n && shutdown(fds[1], SHUT_WR) == 0) {
		if (sign && fs_agent_sign(&a, data, n, data, n, &sig, &len, NULL) == FS_OK)
			FS_ASSERT(sig && len > 0 && len < n);
		else if (!sign && fs_agent_list(&a, keys, &len, NULL) == FS_OK)
			fs_agent_keys_free(keys, len);
	}
	free(sig);
	fs_agent_close(&a);
	close(fds[1]);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
	if (n < 1 || n > 65536)
		return 0;
	switch (data[0] % 3) {
	case 0:
		file(data + 1, n - 1);
		break;
	case 1:
		agent(data + 1, n - 1, false);
		break;
	default:
		agent(data + 1, n - 1, true);
	}
	return 0;
}
