/*
 * Shared by the files of this folder and their tests alone. Everything here belongs to the thread of the
 * connection that it is called for; nothing is global.
 */
#ifndef FS_SERVER_SSH_INTERNAL_H
#define FS_SERVER_SSH_INTERNAL_H

#include "server/ssh/ssh.h"

#include <libssh2.h>

/* ---- waiting: one deadline and one cancel question, spent across all steps of a connection ---- */

struct fs_patience {
	int64_t deadline; /* monotonic ns */
	int wake_fd;      /* -1 = none; drained here when it wakes: cancelled must know by other means */
	bool (*cancelled)(void *arg);
	void *arg;
};
/* Waits for events on fd. FS_OK (ready, or the wake fd fired without a cancel: try again), FS_ETIMEOUT,
 * FS_ECANCELLED. */
int fs_patience_poll(const struct fs_patience *p, int fd, short events);

/* ---- config.c: ~/.ssh/config ---- */

#define FS_SSH_MAX_KNOWN_FILES 4
#define FS_SSH_CONF_MAX_BYTES ((size_t)1 << 20) /* one file */
#define FS_SSH_CONF_MAX_DEPTH 8                 /* Include in Include */
#define FS_SSH_CONF_MAX_FILES 64                /* Include, all together */

struct fs_ssh_conf {
	struct fs_ssh_target target;
	char original[256];                                /* the name as written, without user and port */
	char known_files[2 * FS_SSH_MAX_KNOWN_FILES][512]; /* user files, then global ones */
	int n_known_files;
	bool default_identities; /* none was named: target.identity holds the usual files that exist */
};
int fs_ssh_conf_load(const struct fs_ssh_opts *o, struct fs_ssh_conf *out, struct fs_errbuf *e);
/* The same with the file's text given instead of read ("" = no file); Include still reads files. For tests
 * and fuzzing. */
int fs_ssh_conf_parse(const struct fs_ssh_opts *o, const char *text, size_t n, struct fs_ssh_conf *out,
        struct fs_errbuf *e);

/* pattern.c: '*' and '?' as in OpenSSH; linear memory, no recursion. */
bool fs_ssh_glob(const char *pattern, const char *s);
/* Comma- or space-separated patterns, '!' negates: 1 match, 0 none, -1 a negated one matched (which wins). */
int fs_ssh_glob_list(const char *list, char sep, const char *s);

/* ---- knownhosts.c ---- */

enum fs_kh_verdict {
	FS_KH_MATCH,
	FS_KH_UNKNOWN,    /* no line for this host */
	FS_KH_CHANGED,    /* a line with this key type holds another key */
	FS_KH_OTHER_TYPE, /* lines for this host, but none of this key type */
	FS_KH_REVOKED,    /* this key is marked @revoked for this host */
	FS_KH_ONLY_CA,    /* only @cert-authority lines; certificates are not checked here, so nothing vouches
	                     for the key */
};
struct fs_known_hosts;
/* Reads all files; a missing one is empty. Lines that do not parse are skipped and counted. */
int fs_kh_load(const struct fs_ssh_conf *c, struct fs_known_hosts **out, struct fs_errbuf *e);
/* One file's bytes, for tests and fuzzing. name is the (lower-case) host, port its port; alias: HostKeyAlias
 * (then the port is not used). */
int fs_kh_parse(const char *host, int port, bool alias, const char *text, size_t n,
        struct fs_known_hosts **out, struct fs_errbuf *e);
void fs_kh_free(struct fs_known_hosts *k);
/* The key types known for the host, in the files' order, then all others that this program accepts: the value
 * for LIBSSH2_METHOD_HOSTKEY. */
void fs_kh_method_pref(const struct fs_known_hosts *k, char *out, size_t cap);
/* where (may be NULL) gets "file:line" of the line that decided, or "". */
enum fs_kh_verdict fs_kh_check(
        const struct fs_known_hosts *k, const uint8_t *blob, size_t n, char *where, size_t cap);
size_t fs_kh_bad_lines(const struct fs_known_hosts *k);
size_t fs_kh_count(const struct fs_known_hosts *k);

/* Public key blobs begin with their type as an ssh string. false when the blob is no key. */
bool fs_ssh_blob_type(const uint8_t *blob, size_t n, char *out, size_t cap);
/* "SHA256:<base64 without padding>" as ssh-keygen -l prints it. */
void fs_ssh_fingerprint(const uint8_t *blob, size_t n, char out[64]);
/* Strict base64 of one word; the result is malloc'd. NULL when it is not base64 or memory is out. */
uint8_t *fs_ssh_base64(const char *text, size_t n, size_t *out_n);

/* ---- keyfile.c ---- */

struct fs_ssh_key {
	char path[512];
	char *text; /* the file, NUL-terminated; wiped when freed */
	size_t n;
	bool encrypted;
	bool rsa;
	uint8_t *pub; /* public blob from the file or its .pub; NULL when neither tells it */
	size_t pub_n;
};
/* FS_ENOTFOUND: no such file. FS_EAUTH: others can read it, or it is not a private key; the text says what to
 * do. An encrypted key is loaded as far as it can be (encrypted = true): the agent may hold it. */
int fs_ssh_key_load(const char *path, struct fs_ssh_key *out, struct fs_errbuf *e);
void fs_ssh_key_finish(struct fs_ssh_key *k);

/* ---- agent.c: the agent's socket, with deadlines (libssh2's own calls would wait for ever) ---- */

struct fs_agent {
	int fd; /* -1 = closed */
	const struct fs_patience *patience;
};
#define FS_AGENT_MAX_KEYS 64
struct fs_agent_key {
	uint8_t *blob; /* malloc'd */
	size_t n;
	char comment[128];
};
int fs_agent_open(
        struct fs_agent *a, const char *socket_path, const struct fs_patience *p, struct fs_errbuf *e);
void fs_agent_close(struct fs_agent *a);
/* keys[FS_AGENT_MAX_KEYS]; free with fs_agent_keys_free. */
int fs_agent_list(struct fs_agent *a, struct fs_agent_key *keys, size_t *n, struct fs_errbuf *e);
void fs_agent_keys_free(struct fs_agent_key *keys, size_t n);
/* The signature blob without its algorithm's name, malloc'd. */
int fs_agent_sign(struct fs_agent *a, const uint8_t *blob, size_t blob_n, const uint8_t *data, size_t data_n,
        uint8_t **sig, size_t *sig_n, struct fs_errbuf *e);

/* ---- session.c, for auth.c: waits until a step that met EAGAIN can go on; as fs_patience_poll ---- */

int fs_ssh_step(LIBSSH2_SESSION *ls, const struct fs_patience *p);

/* ---- session.c, for run.c: one command after another ---- */

int fs_ssh_exec(struct fs_ssh *s, const char *command, const struct fs_patience *p, struct fs_errbuf *e);
int fs_ssh_send_eof(struct fs_ssh *s, const struct fs_patience *p, struct fs_errbuf *e);
int fs_ssh_exec_end(struct fs_ssh *s, const struct fs_patience *p, int *status, struct fs_errbuf *e);

/* ---- pin.c ---- */

int fs_ssh_host_key_of(const struct fs_ssh_conf *c, const uint8_t *blob, size_t n, bool known,
        struct fs_ssh_host_key *out, struct fs_errbuf *e);

/* ---- auth.c ---- */

int fs_ssh_auth(
        LIBSSH2_SESSION *ls, const struct fs_ssh_conf *c, const struct fs_patience *p, struct fs_errbuf *e);

/* ---- net.c ---- */

/* A connected, non-blocking, close-on-exec TCP socket with keepalive, user timeout and no delay. */
int fs_ssh_dial(const char *host, int port, const struct fs_patience *p, int *fd, struct fs_errbuf *e);

#endif
