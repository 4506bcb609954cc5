/*
 * shim: farsight-remote, an encoder of the plain line protocol (docs/PROTOCOL.md) whose work is done on a
 * vision host. For servers that start an encoder by themselves: they name this program instead, with the
 * same arguments. stdout carries the protocol alone, stderr the log.
 *
 * Threads: main works on the orders; one thread reads stdin and minds signals and the parent, so that the
 * end of any of them is seen while a picture is on its way; server/vision has its own. Nothing waits for
 * ever: the start, a picture and the end have a deadline each.
 */
#ifndef FS_SERVER_SHIM_H
#define FS_SERVER_SHIM_H

#include "server/config/config.h"
#include "server/vision/vision.h"

#define SHIM_TEXT 4096

/* ---- settings.c: command line and environment; nothing else reads either ---- */

/* What STRATA_VISION_SSH_OPTS says, "" and 0 where it is silent. */
struct shim_ssh {
	char user[64], identity[SHIM_TEXT], known_hosts[SHIM_TEXT], config[SHIM_TEXT];
	int port;
};
/* Words are split as a shell would split them, without expanding anything. Of ssh's options -p, -i, -l, -F
 * and -o with Port, IdentityFile, User and UserKnownHostsFile are understood; a warning names each other.
 * FS_EINVAL for a wrong value of these. */
int shim_ssh_opts(const char *text, struct shim_ssh *out, struct fs_errbuf *e);

/* The command that starts the agent below a folder of the host, quoted for its shell; "~/" stays its home. */
int shim_agent_command(const char *root, char *out, size_t cap, struct fs_errbuf *e);

struct shim_opts {
	struct fs_vision_opts vision;
	int start_timeout_ms; /* until READY */

	/* private: what vision points to */
	struct fs_config config;
	struct shim_ssh ssh;
	char host[512], command[SHIM_TEXT], fingerprint[33];
};
/* > 0: --help or --version was answered. o must be finished in every case. */
int shim_opts_read(struct shim_opts *o, int argc, char **argv, struct fs_errbuf *e);
void shim_opts_finish(struct shim_opts *o);

/* ---- orders.c: the reading side ---- */

struct shim_orders;
/* Blocks the signals that end the program, for all threads that start later. parent: whose end is ours. */
int shim_orders_open(struct shim_orders **out, pid_t parent, struct fs_errbuf *e);
void shim_orders_close(struct shim_orders *o);
/* Fires when stdin ends, at a signal, or when the parent is gone: answers have no reader any more. From then
 * on the process ends within END_GRACE_MS, by force if it must. */
struct fs_cancel *shim_orders_end(struct shim_orders *o);
/* Readable once it has fired. */
int shim_orders_end_fd(struct shim_orders *o);
/* Waits for the next line, FS_OK; the caller frees it. FS_EFORMAT: a line was too long and is dropped.
 * FS_EUNAVAILABLE: the end. */
int shim_orders_next(struct shim_orders *o, char **line, size_t *n, struct fs_errbuf *e);

#endif
