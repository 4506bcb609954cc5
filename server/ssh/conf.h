/* The state of reading ~/.ssh/config: config.c reads files into it, resolve.c makes the target of it. Private
 * to those two. */
#ifndef FS_SERVER_SSH_CONF_H
#define FS_SERVER_SSH_CONF_H

#include "server/ssh/internal.h"

struct fs_conf_files {
	char path[FS_SSH_MAX_KNOWN_FILES][512]; /* before expansion */
	int n;
	bool set; /* also when it was "none" */
};
struct fs_conf_parse {
	struct fs_ssh_conf *out;
	struct fs_errbuf *e;
	char hostname[256]; /* HostName, before expansion */
	struct fs_conf_files user_known, global_known;
	bool identity_set, identities_only_set;
	bool check_owner; /* the user's own file: others must not be able to write it */
	char home[400], login[64];
	const char *file; /* being read; for messages */
	int line, depth, n_files;
	char proxy_file[256], proxy_key[16];
	int proxy_line; /* 0 = none */
	bool proxy_none;
};

/* text is cut up in place; text[n] must be writable and NUL. */
int fs_conf_parse_text(struct fs_conf_parse *p, const char *file, char *text, size_t n);
/* FS_ENOTFOUND when there is none. *text is malloc'd and NUL-terminated. */
int fs_conf_read_file(const char *path, bool check_owner, char **text, size_t *n, struct fs_errbuf *e);
/* '~', % tokens and ${NAME}. key: for the message. */
int fs_conf_expand(const struct fs_conf_parse *p, const char *key, const char *in, char *out, size_t cap,
        struct fs_errbuf *e);

#endif
