/*
 * The parts of `farsight host`: one struct is one run of the subcommand about one vision host. Private to the
 * host*.c files and their tests; one thread (besides the one of cli_stop and those of a vision while a test
 * picture is encoded). Every step says what it did in one line and can be repeated: what is there already is
 * left alone.
 *
 * On the host everything lies below ~/.local/farsight (bin, share, build, models), but for the watchdog's
 * configuration and one line of authorized_keys. Commands there are fixed POSIX sh scripts; values are their
 * arguments and quoted. Scripts hold no single quote and no newline.
 */
#ifndef FS_SERVER_CLI_HOST_H
#define FS_SERVER_CLI_HOST_H

#include "server/cli/cli.h"
#include "server/ssh/ssh.h"
#include "server/vision/vision.h"

#define HOST_FILE_MAX ((size_t)1 << 20) /* configurations, authorized_keys */
#define HOST_MAX_ARGS 16
#define HOST_AGENT_MARK "/.local/farsight/bin/farsight-agent" /* in our lines of authorized_keys */
#define HOST_AGENT_COMMAND "exec \"$HOME" HOST_AGENT_MARK "\""

struct host_opts {          /* the command line; NULL and 0: not given */
	const char *name;   /* as the admin calls the host */
	const char *config; /* the server's */
	const char *identity, *known_hosts, *ssh_config, *fingerprint;
	const char *mmproj, *model, *host_mmproj, *binary, *sources, *encoder;
	const char *encoder_args[HOST_MAX_ARGS];
	size_t n_encoder_args;
	int64_t port, threads;
	bool gpu, yes, here;
};

struct host_facts { /* of the machine there; "" and 0: not known */
	char home[1024], user[64], os[128], arch[32], gpu[128];
	char cc[256], meson[256], ninja[256], nvcc[256], apt[256], sha256sum[256], tar[256];
	int64_t uid, cpus, mem_kb, free_kb;
	bool may_install; /* root, or sudo without a password */
	bool systemd;     /* a user manager answers */
	char cards[64];   /* compute capabilities of NVIDIA cards; "unknown": there is a driver */
	char sources[80]; /* SHA-256 of the sources that lie there */
	char built[480];  /* of what the programs were built: sources, cards, CUDA compiler */
	char binary[80];  /* SHA-256 of the programs that were sent */
	char version[64]; /* what the agent there says */
};

struct host {
	struct host_opts o;
	struct cli_stop stop;
	struct fs_cancel_hook hook;
	int wake; /* readable once stop has fired */
	bool have_stop;
	struct fs_config conf; /* the server's, as far as it could be read */
	char config_path[CLI_PATH];
	struct fs_ssh_opts ssh_opts; /* the admin's own way in */
	struct fs_ssh_target target;
	struct fs_ssh *ssh; /* NULL = not connected */
	int64_t ssh_used;   /* when it was last */
	struct host_facts facts;
	/* of the config's entry; by_entry, for check: it was written by hand, with another key than ours */
	const char *entry_identity, *entry_command;
	bool by_entry;
	size_t entry;                             /* its place among the config's hosts */
	int64_t asked_at;                         /* when the running server was asked to read its config */
	char key[CLI_PATH];                       /* our own private key file */
	char key_line[1024];                      /* its public half: "ssh-ed25519 AAAA... comment" */
	char host_mmproj[1100], host_model[1100]; /* absolute paths there; "" = none */
	bool programs_changed;
	int failed; /* steps of check */
	/* of a progress bar */
	int last_percent;
	bool on_terminal;
};

/* ---- host_ui.c: the lines that are printed ---- */

void host_ok(struct host *h, const char *step, const char *fmt, ...) FS_PRINTF(3, 4);
void host_done(struct host *h, const char *step, const char *fmt, ...) FS_PRINTF(3, 4);
void host_note(struct host *h, const char *fmt, ...) FS_PRINTF(2, 3);
/* remedy: what to do or type next; NULL when text says it. Counts; returns err (FS_EINTERNAL for 0). */
int host_failed(struct host *h, int err, const char *step, const char *remedy, const char *text);
/* true when --yes was given or somebody at the terminal says yes; without a terminal: no. */
bool host_ask(struct host *h, const char *fmt, ...) FS_PRINTF(2, 3);
/* A bar on a terminal, else a line for each tenth. total 0: nothing. */
void host_progress(struct host *h, const char *what, uint64_t at, uint64_t total);
void host_progress_end(struct host *h);
bool host_stopped(void *host);

/* ---- host_call.c: programs there and here ---- */

struct host_call {
	const char *script;
	const char *args[8]; /* $1 ...; up to the first NULL */
	const void *input;
	int input_fd;
	uint64_t input_n;
	struct fs_buf *out; /* initialised by the caller; NULL: dropped */
	void (*sent)(void *arg, uint64_t n);
	void (*heard)(void *arg, const char *bytes, size_t n);
	void *arg;
	int deadline_s; /* 0 = 60 */
};
/* FS_OK: the script ended with 0. FS_EUNAVAILABLE and the like: the connection. FS_EIO: it ended with
 * *status (may be NULL), the text is what it said on stderr. Output of the shell's start-up files in front of
 * the script's own is dropped. */
int host_call(struct host *h, const struct host_call *c, int *status, struct fs_errbuf *e);
/* For scripts: the watchdog's configuration as $f, its folder as $c, and as $b, beside the file itself, what
 * was there before host add. */
#define HOST_SETTINGS                                                                                        \
	"c=\"${XDG_CONFIG_HOME:-$HOME/.config}/farsight\"; f=\"$c/vision-host.json\"; "                      \
	"if [ -L \"$f\" ]; then f=$(readlink -f \"$f\"); fi; b=\"$f.before-farsight\"; "
/* which: "keys" (authorized_keys) or "config" (vision-host.json). tag stands for the state that was read;
 * text is "" when there is none, exists tells. */
struct host_file {
	char path[1200], tag[80];
	bool exists;
	struct fs_buf text;
};
int host_file_read(struct host *h, const char *which, struct host_file *f, struct fs_errbuf *e);
/* Replaces it, whole or not at all; FS_EUNAVAILABLE when it changed since it was read. An empty text removes
 * the file. */
int host_file_write(struct host *h, const char *which, const struct host_file *was, const void *text,
        size_t n, struct fs_errbuf *e);
/* Runs a program of this machine, stdout into out (initialised by the caller); FS_EIO and its stderr when
 * it fails. */
int host_child(
        struct host *h, const char *const argv[], struct fs_buf *out, int deadline_s, struct fs_errbuf *e);
/* 64 hex digits and NUL. The file's is told as progress. */
void host_sha256(const void *data, size_t n, char out[65]);
int host_sha256_file(
        struct host *h, int fd, uint64_t size, const char *what, char out[65], struct fs_errbuf *e);
/* The value of "name=..." in lines of text; false when there is none. */
bool host_value(const struct fs_buf *text, const char *name, char *out, size_t cap);

/* ---- host_text.c: pure edits ---- */

/* What stands behind the key in a public key's line; n 0: nothing, or that is none. Borrowed. */
const char *host_key_comment(const char *line, size_t *n);
/* "farsight:user@machine:0123456789abcdef". The tag was made by chance with this machine's first key,
 * so no other one has it that was not copied from this one with the key. */
#define HOST_TAG 16
bool host_comment_is_tagged(const char *comment, size_t n);
/* Puts line (NULL: nothing) where our older one stands: one with the same key, or with our command and the
 * same comment, when that is tagged; further ones of ours go. *others counts lines of other keys that run our
 * agent. */
int host_keys_edit(const char *text, size_t n, const char *public_key, const char *line, struct fs_buf *out,
        size_t *others, struct fs_errbuf *e);
/* Sets wanted's members in the object base (NULL = none there). *changes (malloc'd) says what differs, one
 * line each; NULL when nothing does. A member that is null in wanted goes. */
int host_json_merge(
        const json_t *base, const json_t *wanted, json_t **out, char **changes, struct fs_errbuf *e);
/* The server's config with this host, or without it. *changed: whether anything is different. FS_ENOTFOUND
 * when there is none to remove. */
int host_config_add(json_t *config, const json_t *entry, bool *changed, struct fs_errbuf *e);
int host_config_remove(json_t *config, const char *name, struct fs_errbuf *e);
/* Appends path as the config keeps it: a relative one counts from folder. What the server itself expands at
 * its front ("~/", "%d", "${NAME}") stays, and a '%' of the folder is doubled. */
int host_whole_path(const char *path, const char *folder, struct fs_buf *out);
/* Of the hosts that a server shows in /status, the i-th of the config's: as "box:2222" or "box #2" where
 * "box" is not alone. NULL when there is none. Borrowed. */
const json_t *host_shown(const json_t *shown, const struct fs_vision_host_opts *hosts, size_t n, size_t i);
/* Whether that one's state tells how a reload went that was asked for so many seconds ago: it is up; or it
 * went down since, and has been for longer than the next try takes to begin. */
bool host_is_settled(const json_t *shown, double since_reload_s);

/* ---- the steps; each prints its lines and returns FS_OK or the error that it printed ---- */

/* host_add.c: the config's entry of this name gives the options that were not given; false: there is none. */
bool host_take_entry(struct host *h);
/* host_add.c: the host key; then the admin's own keys; both. needed false: a failure is a note. */
int host_reach(struct host *h, bool may_pin);
int host_sign_in(struct host *h, bool needed);
int host_connect(struct host *h, bool may_pin);
int host_own_key(struct host *h, bool may_make);     /* host_key.c: here */
int host_install_key(struct host *h);                /* host_key.c: there */
int host_remove_key(struct host *h, size_t *others); /* host_key.c */
int host_learn(struct host *h);                      /* host_facts.c */
int host_tools(struct host *h);                      /* host_facts.c: what a build needs */
int host_build(struct host *h);                      /* host_build.c: from sources */
int host_send_binary(struct host *h);                /* host_build.c: given programs */
int host_find_sources(const struct host *h, char out[CLI_PATH], struct fs_errbuf *e);
int host_send_models(struct host *h);  /* host_model.c */
int host_configure(struct host *h);    /* host_setup.c: vision-host.json */
int host_start(struct host *h);        /* host_setup.c: the watchdog */
int host_try_key(struct host *h);      /* host_try.c: what our key can do */
int host_try_picture(struct host *h);  /* host_try.c */
int host_config_entry(struct host *h); /* host_server.c: the server's config */
int host_config_forget(struct host *h);
/* host_server.c: a running server reads its config again, and then: has the host, or has let go of it. What
 * came of it is printed; a failure is a note. */
void host_tell_server(struct host *h);
void host_tell_server_goodbye(struct host *h);
json_t *host_server_hosts(
        const struct host *h); /* host_server.c: "hosts" of a running server's /status; NULL */
/* host_server.c: the one of them that is the i-th of the config; NULL. Borrowed. */
const json_t *host_of_server(const struct host *h, const json_t *hosts, size_t i);

/* ---- the subcommands, with everything but the host's connection prepared ---- */

int host_add(struct host *h);
int host_check(struct host *h); /* o.name NULL: all of the config */
int host_list(struct host *h);
int host_remove(struct host *h);

#endif
