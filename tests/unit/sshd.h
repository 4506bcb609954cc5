/*
 * sshd: a private OpenSSH server on 127.0.0.1 for tests: own port, own host keys, own authorised key, nothing
 * of the user's touched or read. Needs no root; everything lives in one temporary folder that
 * test_sshd_finish removes.
 */
#ifndef FS_TEST_SSHD_H
#define FS_TEST_SSHD_H

#include "common/base/base.h"

struct test_sshd_opts {
	const char *forced_command; /* as ForceCommand, so any requested command runs this; NULL = what is
	                               asked */
	const char *extra;          /* further lines of sshd_config; NULL = none */
	const char *host_keys; /* "ed25519", "ecdsa", "rsa" separated by spaces; NULL = "ed25519 ecdsa" */
};
struct test_sshd {
	char dir[128];
	int port;
	struct fs_child child;
	/* paths inside dir */
	char config[200], log[200], known_hosts[200], identity[200], ssh_config[200], authorized_keys[200];
};

/* false, with the reason printed, when there is no sshd or ssh-keygen: then skip. */
bool test_sshd_available(void);
/* Generates the keys, writes known_hosts with every host key as "[127.0.0.1]:port", an empty ssh_config, and
 * starts sshd. Asserts on failure. */
void test_sshd_init(struct test_sshd *s, const struct test_sshd_opts *o);
void test_sshd_finish(struct test_sshd *s);
/* Ends the listener and all of its sessions; start brings it up on the same port again. */
void test_sshd_stop(struct test_sshd *s);
void test_sshd_start(struct test_sshd *s);
/* Ends the sessions alone, or stops and continues them (SIGSTOP, SIGCONT). Returns how many processes got the
 * signal. */
int test_sshd_signal_sessions(const struct test_sshd *s, int sig);

/* Runs a program to its end, its output goes nowhere; the exit status, -1 when it can not be started. */
int test_run(const char *const argv[]);
/* Whole small files. test_read_file: malloc'd, NUL-terminated. Assert on failure. */
char *test_read_file(const char *path);
void test_write_file(const char *path, const char *text, int mode);
/* A port of 127.0.0.1 that nobody listens on now. */
int test_free_port(void);

#endif
