/*
 * ssh: one libssh2 session with one exec channel to a vision host, as a non-blocking byte stream. Resolves
 * the host by ~/.ssh/config (Host patterns, HostName, User, Port, IdentityFile, UserKnownHostsFile,
 * HostKeyAlias, IdentitiesOnly, Include), checks the host key against known_hosts always, authenticates with
 * key files and the agent.
 *
 * Threads: an fs_ssh belongs to one thread; fs_ssh_init once before threads. Only fs_ssh_resolve and the
 * parsers are free of that. It refuses: unknown, changed and revoked host keys; keys readable by others;
 * passwords; ProxyJump and ProxyCommand (a clear error).
 */
#ifndef FS_SERVER_SSH_H
#define FS_SERVER_SSH_H

#include "common/base/base.h"

int fs_ssh_init(struct fs_errbuf *e);

#define FS_SSH_MAX_KEYS 8
struct fs_ssh_opts {
	const char *host;        /* "alias", "host", "user@host" or "user@host:port" as the admin wrote it */
	int port;                /* 0 = from the above, ~/.ssh/config, 22 */
	const char *identity;    /* a key file that goes before those of ~/.ssh/config; NULL = none */
	const char *config_file; /* NULL = ~/.ssh/config */
	const char *known_hosts; /* NULL = UserKnownHostsFile or ~/.ssh/known_hosts, then
	                            /etc/ssh/ssh_known_hosts */
	const char *command;     /* what the channel executes; NULL = "farsight-agent" */
	bool only_identity;      /* no key but identity is offered */
};

/* What the name came to mean; for messages and tests. */
struct fs_ssh_target {
	char hostname[256], user[64], host_key_alias[256];
	int port;
	char identity[FS_SSH_MAX_KEYS][512];
	int n_identities;
	bool identities_only;
	char known_hosts[512];
	char identity_agent[512]; /* socket; "" = SSH_AUTH_SOCK; "none" = no agent */
};
int fs_ssh_resolve(const struct fs_ssh_opts *o, struct fs_ssh_target *out, struct fs_errbuf *e);

struct fs_ssh;
/*
 * Connects, checks, authenticates, starts the command. Returns by the deadline (monotonic ns), or
 * FS_ECANCELLED as soon as wake_fd (an fs_wake descriptor, -1 = none) is readable and cancelled() says so.
 * Errors name which of name, route, port, host key, user, key or remote program was wrong and what to type
 * next.
 */
int fs_ssh_connect(const struct fs_ssh_opts *o, int64_t deadline, int wake_fd, bool (*cancelled)(void *arg),
        void *arg, struct fs_ssh **out, struct fs_errbuf *e);
/* Never waits for the peer: shuts the socket down first. NULL is fine. */
void fs_ssh_close(struct fs_ssh *s);

/* > 0 bytes read; 0 = nothing now; FS_EUNAVAILABLE = the channel ended or the connection broke (text says
 * how, with the remote exit status). */
ssize_t fs_ssh_read(struct fs_ssh *s, void *buf, size_t n, struct fs_errbuf *e);
/* Bytes the command wrote to stderr; same results, never an error at its end. */
ssize_t fs_ssh_read_stderr(struct fs_ssh *s, void *buf, size_t n);
/* > 0 bytes taken; 0 = nothing now. After 0 (or a short count) the next call must pass the same bytes again
 * from where it stopped, at the same address: libssh2 remembers them. Reads may come between, and go on while
 * the socket takes nothing. */
ssize_t fs_ssh_write(struct fs_ssh *s, const void *buf, size_t n, struct fs_errbuf *e);
/* Bytes that the peer's kernel has not acknowledged yet: falling means that the route and the other kernel
 * live. */
size_t fs_ssh_unsent(const struct fs_ssh *s);
/* Waits until the session can go on, wake_fd is readable, or the deadline passes. want_write: there is data
 * to write. Returns at once while output may lie queued, that is until fs_ssh_read has returned 0 after the
 * last write or read of stderr, and while stderr lies queued: read both. Negative on poll failure. */
int fs_ssh_wait(struct fs_ssh *s, bool want_write, int wake_fd, int64_t deadline);

/* ---- setting a host up: its key before it is trusted, and one command after another over one session ----
 */

struct fs_ssh_host_key {
	bool known;                     /* the known_hosts files hold it: fs_ssh_connect takes it */
	char type[64], fingerprint[64]; /* "ssh-ed25519", "SHA256:..." */
	char file[512];                 /* where fs_ssh_pin writes it */
	char line[4096];                /* what it writes, without newline */
};
/* Asks the host for its key and hangs up. FS_EAUTH, with the text of fs_ssh_connect, when the known_hosts
 * files speak against it: changed, revoked, of another type. Patience as for fs_ssh_connect. */
int fs_ssh_host_key(const struct fs_ssh_opts *o, int64_t deadline, int wake_fd, bool (*cancelled)(void *arg),
        void *arg, struct fs_ssh_host_key *out, struct fs_errbuf *e);
/* Appends the line to the file, making both folder (0700) and file (0600). Only after somebody has
 * agreed. */
int fs_ssh_pin(const struct fs_ssh_host_key *k, struct fs_errbuf *e);

/* As fs_ssh_connect, without a command: for fs_ssh_run and fs_ssh_close alone. */
int fs_ssh_open(const struct fs_ssh_opts *o, int64_t deadline, int wake_fd, bool (*cancelled)(void *arg),
        void *arg, struct fs_ssh **out, struct fs_errbuf *e);

struct fs_ssh_run {
	const char *command; /* for the user's shell there; values in it go through fs_ssh_quote */
	/* its stdin: bytes, or input_n bytes of a file from its current place on; input_fd is looked at when
	 * input is NULL and input_n is not 0 */
	const void *input;
	int input_fd;
	uint64_t input_n;
	struct fs_buf *out;                  /* its stdout; FS_ELIMIT when there is more; NULL: dropped */
	struct fs_buf *err;                  /* its stderr; what does not fit is dropped; NULL: all of it */
	void (*sent)(void *arg, uint64_t n); /* input handed on so far; may be NULL */
	void (*heard)(void *arg, const char *bytes, size_t n); /* stdout as it comes; may be NULL */
	void *arg;
	int64_t idle_ms; /* FS_ETIMEOUT when there is input and nothing moves for so long; 0 = the deadline
	                    alone */
	int64_t deadline;
	int wake_fd; /* these three as for fs_ssh_connect */
	bool (*cancelled)(void *arg);
	void *cancelled_arg;
};
/* Runs one command to its end. FS_OK: it ended, *status (255: killed). Afterwards the next may run; after an
 * error the session is good for fs_ssh_close alone. */
int fs_ssh_run(struct fs_ssh *s, const struct fs_ssh_run *r, int *status, struct fs_errbuf *e);
/* Appends a space and the value, quoted for any POSIX shell. FS_EINVAL when it holds a newline or other
 * control characters. */
int fs_ssh_quote(struct fs_buf *b, const char *value, struct fs_errbuf *e);

#endif
