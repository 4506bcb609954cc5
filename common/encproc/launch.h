/* How an encoder is started; private to common/encproc. Pure functions but for reading the environment. */
#ifndef FS_ENCPROC_LAUNCH_H
#define FS_ENCPROC_LAUNCH_H

#include "common/encproc/encproc.h"

#define FS_LAUNCH_ARGS (FS_ENCPROC_ARGS_MAX + 16)

struct fs_launch { /* borrows the options' strings */
	const char *argv[FS_LAUNCH_ARGS];
	size_t n;
	char numbers[3][16];
	size_t n_numbers;
	char cuda[64];
	char **env; /* owned; NULL = ours as it is */
};

int fs_launch_init(struct fs_launch *l, const struct fs_encproc_opts *o, struct fs_errbuf *e);
void fs_launch_finish(struct fs_launch *l);

/* How often the kernel of this machine ended a process to get memory back; 0 when it does not tell. */
uint64_t fs_launch_oom_kills(void);

#endif
