/*
 * One libssh2 session with one exec channel, as a non-blocking byte stream. Owned by one thread. What libssh2
 * demands is kept here: no packet is sent in part, since nothing else could happen on the session before the
 * rest of it, not even reading; and the socket is shut down before it is freed. libssh2's keepalive is never
 * used: it can not notice a dead peer.
 */
#include "server/ssh/heap.h"
#include "server/ssh/internal.h"
#include "server/ssh/keystream.h"

#include <errno.h>
#include <linux/sockios.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#define WINDOW (2u << 20) /* what the host may send ahead; measured best on libssh2 1.10 */
#define PACKET 32768u
#define READ_MAX ((size_t)64 << 10)    /* bytes of one read: what the window must hold beyond LOW_WINDOW */
#define LOW_WINDOW (WINDOW / 4 * 3)    /* libssh2 widens a window that is less than this and the read */
#define WIDEN_BY (WINDOW / 2)          /* so that one step is always enough */
#define ALLOWANCE ((size_t)64 << 10)   /* what one read takes off the socket */
#define UNSENT_MAX ((size_t)256 << 10) /* a packet, and what libssh2 answers by itself meanwhile */
#define EXIT_WAIT_MS 250               /* for the exit status that follows the end of the output */

/* What libssh2 does fastest first: it decrypts block by block, which is cheap for AES-128-CTR alone
 * (keystream.h) and costs GCM (known from 1.11 on) half as much again as CTR with its MAC. The same both
 * ways, since mixed AEAD and plain fails up to 1.11.1. The library drops what it does not know. No ChaCha20:
 * sshd would then renegotiate keys every GiB; no encrypt-then-MAC: Terrapin and a heap overflow. */
static const char *const ciphers =
        "aes128-ctr,aes256-ctr,aes192-ctr,aes128-gcm@openssh.com,aes256-gcm@openssh.com";
static const char *const macs = "hmac-sha2-256,hmac-sha2-512";
/* Nothing with SHA-1, which old sshds still offer and libssh2 would still take. */
static const char *const exchanges =
        "curve25519-sha256,curve25519-sha256@libssh.org,ecdh-sha2-nistp256,ecdh-sha2-nistp384,"
        "ecdh-sha2-nistp521,diffie-hellman-group-exchange-sha256,diffie-hellman-group16-sha512,"
        "diffie-hellman-group18-sha512,diffie-hellman-group14-sha256";

struct fs_ssh {
	int fd;
	struct fs_heap heap; /* of ls */
	LIBSSH2_SESSION *ls;
	LIBSSH2_CHANNEL *ch;
	bool greeted;              /* the first keys are agreed on */
	bool closing;              /* the socket is shut down */
	size_t fed;                /* bytes that the end of the socket was put off by */
	char label[400];           /* user@host:port */
	char command[256];         /* its beginning, for messages */
	const char *whole_command; /* the caller's; while a channel is opened */
	bool maybe_more;           /* data may lie in libssh2's queue that poll does not see */
	bool no_stderr;            /* of what has been received, there is none unread */
	size_t allowance;          /* bytes that libssh2 may take from the socket for now */
	struct fs_buf unsent;      /* what libssh2 has sent and the socket has not taken */
	const void *pinned;        /* of the write that is to be repeated; NULL = none */
	/* where keys are agreed on, ciphers are begun in it; NULL = none */
	struct fs_keystream *keystream;
};

/* 1.11.1 warns of the older name. */
#if LIBSSH2_VERSION_NUM >= 0x010b01
#define set_callback(ls, kind, f) libssh2_session_callback_set2(ls, kind, (libssh2_cb_generic *)(f))
#else
#define set_callback(ls, kind, f) libssh2_session_callback_set(ls, kind, (void *)(f))
#endif

struct fs_start {
	const struct fs_ssh_conf *conf;
	struct fs_patience patience;
};

int fs_ssh_init(struct fs_errbuf *e)
{
	int rc = libssh2_init(0);
	return rc ? fs_fail(e, FS_EINTERNAL, "libssh2 can not be initialised (%d)", rc) : FS_OK;
}

static const char *last_error(struct fs_ssh *s)
{
	char *text = NULL;
	libssh2_session_last_error(s->ls, &text, NULL, 0);
	return text && *text ? text : "no reason told";
}

/* A host key is freed by libssh2 1.10 only once new keys hold, so that a first exchange that is given up just
 * before is told that they do: SSH_MSG_NEWKEYS, RFC 4253 section 7.3, as a packet that is not encrypted yet.
 */
static ssize_t feed(struct fs_ssh *s, void *buffer, size_t n)
{
	static const uint8_t new_keys[16] = {[3] = 12 /* bytes follow */, 10 /* of padding */, 21};
	n = FS_MIN(n, sizeof(new_keys) - s->fed);
	memcpy(buffer, new_keys + s->fed, n);
	s->fed += n;
	return (ssize_t)n;
}

/* What libssh2 receives with. Left alone it takes all that the socket holds before it gives any of it, up to
 * the whole window: by then that is out of the caches, and the host waits for the window to be widened. */
static LIBSSH2_RECV_FUNC(receive)
{
	struct fs_ssh *s = ((struct fs_heap *)*abstract)->owner;
	if (!s->allowance)
		return -EAGAIN;
	ssize_t r = recv(socket, buffer, FS_MIN(length, s->allowance), flags);
	if (r < 0)
		return -errno;
	if (r == 0 && s->closing && !s->greeted)
		return feed(s, buffer, length);
	s->allowance -= (size_t)r;
	s->no_stderr = false;
	return r;
}

/* Hands over what the socket did not take before. 0, or a negative errno when it is broken. */
static int flush(struct fs_ssh *s)
{
	while (s->unsent.len) {
		ssize_t n = send(s->fd, s->unsent.data, s->unsent.len, MSG_NOSIGNAL);
		if (n < 0)
			return errno == EAGAIN || errno == EINTR ? 0 : -errno;
		fs_buf_consume(&s->unsent, (size_t)n);
	}
	return 0;
}

/* What libssh2 sends with: a packet is taken whole or not at all. The part that the socket does not take
 * waits here. */
static LIBSSH2_SEND_FUNC(transmit)
{
	struct fs_ssh *s = ((struct fs_heap *)*abstract)->owner;
	ssize_t n = flush(s);
	if (n == 0 && !s->unsent.len && (n = send(socket, buffer, length, flags)) < 0)
		n = errno == EAGAIN || errno == EINTR ? 0 : -errno;
	if (n < 0 || (size_t)n == length)
		return n;
	if (fs_buf_append(&s->unsent, (const char *)buffer + n, length - (size_t)n))
		return -ENOBUFS; /* a host that asks for answers and does not take them */
	return (ssize_t)length;
}

/* What poll is asked for: all that libssh2 waits for is input, once it has sent. */
static short events_of(const struct fs_ssh *s)
{
	return s->unsent.len ? POLLIN | POLLOUT : POLLIN;
}

int fs_ssh_step(LIBSSH2_SESSION *ls, const struct fs_patience *p)
{
	struct fs_ssh *s = ((struct fs_heap *)*libssh2_session_abstract(ls))->owner;
	int rc = fs_patience_poll(p, s->fd, events_of(s));
	flush(s); /* a socket that is broken fails the step that is repeated */
	return rc;
}

/* After an EAGAIN while connecting. */
static int wait_step(struct fs_ssh *s, const struct fs_start *st, const char *step, struct fs_errbuf *e)
{
	int rc = fs_ssh_step(s->ls, &st->patience);
	if (rc == FS_ETIMEOUT)
		return fs_fail(e, rc, "%s did not answer in time (%s)", s->label, step);
	return rc ? fs_fail(e, rc, "cancelled") : FS_OK;
}

static int handshake(struct fs_ssh *s, const struct fs_start *st, struct fs_errbuf *e)
{
	int rc, w = FS_OK;
	s->keystream = fs_keystream_create();
	OSSL_LIB_CTX *before = fs_keystream_enter(s->keystream);
	while (!w && (rc = libssh2_session_handshake(s->ls, s->fd)) == LIBSSH2_ERROR_EAGAIN)
		w = wait_step(s, st, "ssh handshake", e);
	fs_keystream_leave(before);
	if (w)
		return w;
	s->greeted = rc == 0;
	if (rc == LIBSSH2_ERROR_KEX_FAILURE || rc == LIBSSH2_ERROR_KEY_EXCHANGE_FAILURE ||
	        rc == LIBSSH2_ERROR_METHOD_NONE)
		return fs_fail(e, FS_EUNAVAILABLE,
		        "sshd of %s and libssh2 %s share no key exchange, host key type, cipher or MAC (%s): "
		        "it "
		        "needs curve25519-sha256, an ed25519 or ECDSA host key, aes128-ctr or aes256-ctr, "
		        "and "
		        "hmac-sha2-256",
		        s->label, libssh2_version(0), last_error(s));
	if (rc == LIBSSH2_ERROR_BANNER_RECV || rc == LIBSSH2_ERROR_BANNER_NONE)
		return fs_fail(e, FS_EUNAVAILABLE,
		        "what listens at %s is no ssh server, or it hangs up at once", s->label);
	return rc ? fs_fail(e, FS_EUNAVAILABLE, "ssh handshake with %s failed: %s", s->label, last_error(s))
	          : FS_OK;
}

/* How the admin reaches the host with OpenSSH, to accept its key once. */
static void ssh_hint(const struct fs_ssh_conf *c, char *out, size_t cap)
{
	const struct fs_ssh_target *t = &c->target;
	char port[16] = "";
	if (t->port != 22)
		snprintf(port, sizeof(port), " -p %d", t->port);
	snprintf(out, cap, "ssh%s %s@%s", port, t->user, c->original);
}

static int check_host_key(
        struct fs_ssh *s, const struct fs_start *st, const struct fs_known_hosts *k, struct fs_errbuf *e)
{
	const struct fs_ssh_target *t = &st->conf->target;
	size_t n = 0;
	int kind;
	const char *blob = libssh2_session_hostkey(s->ls, &n, &kind);
	char type[64] = "?", print[64], where[600], hint[512];
	if (!blob || !fs_ssh_blob_type((const uint8_t *)blob, n, type, sizeof(type)))
		return fs_fail(e, FS_EAUTH, "%s showed no host key", s->label);
	fs_ssh_fingerprint((const uint8_t *)blob, n, print);
	ssh_hint(st->conf, hint, sizeof(hint));
	switch (fs_kh_check(k, (const uint8_t *)blob, n, where, sizeof(where))) {
	case FS_KH_MATCH:
		return FS_OK;
	case FS_KH_REVOKED:
		return fs_fail(e, FS_EAUTH, "the host key of %s (%s %s) is marked @revoked in %s", s->label,
		        type, print, where);
	case FS_KH_CHANGED:
		return fs_fail(e, FS_EAUTH,
		        "the host key of %s has changed: it shows %s %s, not the one in %s. Either the host "
		        "was set up anew (then remove "
		        "that line and run: %s) or somebody stands in between",
		        s->label, type, print, where, hint);
	case FS_KH_OTHER_TYPE:
		return fs_fail(e, FS_EAUTH,
		        "the host key of %s (%s %s) is of another type than the one known in %s; if the "
		        "fingerprint is right, run: %s",
		        s->label, type, print, where, hint);
	case FS_KH_ONLY_CA:
		return fs_fail(e, FS_EAUTH,
		        "%s is vouched for by a certificate authority alone (%s), and certificates are not "
		        "checked here; add its plain key "
		        "(%s %s) to %s",
		        s->label, where, type, print, t->known_hosts);
	case FS_KH_UNKNOWN:
		break;
	}
	return fs_fail(e, FS_EAUTH,
	        "the host key of %s (%s %s) is not in %s; compare the fingerprint with ssh-keygen -l on the "
	        "host, then accept it once with: %s",
	        s->label, type, print, *t->known_hosts ? t->known_hosts : "any known_hosts file", hint);
}

static int open_channel(struct fs_ssh *s, const struct fs_start *st, struct fs_errbuf *e)
{
	while (!(s->ch = libssh2_channel_open_ex(s->ls, "session", 7, WINDOW, PACKET, NULL, 0))) {
		if (libssh2_session_last_errno(s->ls) != LIBSSH2_ERROR_EAGAIN)
			return fs_fail(
			        e, FS_EUNAVAILABLE, "%s opens no session: %s", s->label, last_error(s));
		int w = wait_step(s, st, "opening a channel", e);
		if (w)
			return w;
	}
	int rc;
	while ((rc = libssh2_channel_process_startup(s->ch, "exec", 4, s->whole_command,
	                (unsigned)strlen(s->whole_command))) == LIBSSH2_ERROR_EAGAIN) {
		int w = wait_step(s, st, "starting the remote program", e);
		if (w)
			return w;
	}
	return rc ? fs_fail(e, FS_EUNAVAILABLE, "%s refuses to start %s: %s", s->label, s->command,
	                    last_error(s))
	          : FS_OK;
}

/* told: bytes of it that messages have room for. */
static int run_command(
        struct fs_ssh *s, const char *command, int told, const struct fs_start *st, struct fs_errbuf *e)
{
	snprintf(s->command, sizeof(s->command), "%.*s", told, command);
	s->whole_command = command;
	int rc = open_channel(s, st, e);
	s->whole_command = NULL;
	return rc;
}

/* The wanted methods that this libssh2 knows: its own weeding copies overlapping memory (1.10). */
static int prefer(struct fs_ssh *s, int method, const char *wanted)
{
	const char **known = NULL;
	char list[512] = "", all[512];
	int n = libssh2_session_supported_algs(s->ls, method, &known);
	if (n <= 0)
		return -1;
	snprintf(all, sizeof(all), "%s", wanted);
	char *save, *w = strtok_r(all, ",", &save);
	for (size_t at = 0; w; w = strtok_r(NULL, ",", &save))
		for (int i = 0; i < n; i++)
			if (!strcmp(known[i], w))
				at += (size_t)snprintf(
				        list + at, sizeof(list) - at, "%s%s", at ? "," : "", w);
	libssh2_free(s->ls, (void *)known);
	return libssh2_session_method_pref(s->ls, method, list);
}

static int set_methods(struct fs_ssh *s, const struct fs_known_hosts *k, struct fs_errbuf *e)
{
	char hostkeys[256];
	fs_kh_method_pref(k, hostkeys, sizeof(hostkeys));
	if (prefer(s, LIBSSH2_METHOD_KEX, exchanges) || prefer(s, LIBSSH2_METHOD_HOSTKEY, hostkeys) ||
	        prefer(s, LIBSSH2_METHOD_CRYPT_CS, ciphers) || prefer(s, LIBSSH2_METHOD_CRYPT_SC, ciphers) ||
	        prefer(s, LIBSSH2_METHOD_MAC_CS, macs) || prefer(s, LIBSSH2_METHOD_MAC_SC, macs))
		return fs_fail(e, FS_EINTERNAL, "libssh2 %s lacks the ciphers that are needed: %s",
		        libssh2_version(0), last_error(s));
	return FS_OK;
}

/* Up to where the host has shown its key; *known lives until fs_kh_free. */
static int greet(
        struct fs_ssh *s, const struct fs_start *st, struct fs_known_hosts **known, struct fs_errbuf *e)
{
	const struct fs_ssh_target *t = &st->conf->target;
	int rc = fs_kh_load(st->conf, known, e);
	if (rc)
		return rc;
	struct fs_known_hosts *k = *known;
	if (fs_kh_bad_lines(k))
		fs_debug("%zu lines of the known_hosts files do not parse and are skipped",
		        fs_kh_bad_lines(k));
	rc = fs_ssh_dial(t->hostname, t->port, &st->patience, &s->fd, e);
	if (!rc && !(s->ls = fs_heap_session(&s->heap)))
		rc = fs_fail(e, FS_ENOMEM, "out of memory");
	if (!rc) {
		set_callback(s->ls, LIBSSH2_CALLBACK_RECV, receive);
		set_callback(s->ls, LIBSSH2_CALLBACK_SEND, transmit);
		libssh2_session_set_blocking(s->ls, 0);
		rc = set_methods(s, k, e);
	}
	return rc ? rc : handshake(s, st, e);
}

static int start(struct fs_ssh *s, const struct fs_start *st, struct fs_errbuf *e)
{
	struct fs_known_hosts *k = NULL;
	int rc = greet(s, st, &k, e);
	if (!rc)
		rc = check_host_key(s, st, k, e);
	fs_kh_free(k);
	return rc ? rc : fs_ssh_auth(s->ls, st->conf, &st->patience, e);
}

static int create(
        const struct fs_ssh_opts *o, struct fs_ssh **out, struct fs_ssh_conf **conf_out, struct fs_errbuf *e)
{
	struct fs_ssh_conf *conf = malloc(sizeof(*conf));
	struct fs_ssh *s = calloc(1, sizeof(*s));
	int rc = conf && s ? fs_ssh_conf_load(o, conf, e) : fs_fail(e, FS_ENOMEM, "out of memory");
	if (rc) {
		free(conf);
		free(s);
		return rc;
	}
	const struct fs_ssh_target *t = &conf->target;
	s->fd = -1;
	s->heap.owner = s;
	fs_buf_init(&s->unsent, UNSENT_MAX);
	snprintf(s->label, sizeof(s->label), "%s@%s:%d", t->user, t->hostname, t->port);
	s->maybe_more = true;
	s->allowance = SIZE_MAX;
	*out = s;
	*conf_out = conf;
	return FS_OK;
}

static int connect_to(const struct fs_ssh_opts *o, const char *command, const struct fs_patience *patience,
        struct fs_ssh **out, struct fs_errbuf *e)
{
	struct fs_ssh_conf *conf;
	struct fs_ssh *s;
	int rc = create(o, &s, &conf, e);
	if (rc)
		return rc;
	struct fs_start st = {conf, *patience};
	rc = start(s, &st, e);
	if (!rc && command)
		rc = run_command(s, command, 255, &st, e);
	free(conf);
	if (rc)
		fs_ssh_close(s);
	else
		*out = s;
	return rc;
}

int fs_ssh_connect(const struct fs_ssh_opts *o, int64_t deadline, int wake_fd, bool (*cancelled)(void *arg),
        void *arg, struct fs_ssh **out, struct fs_errbuf *e)
{
	return connect_to(o, o->command ? o->command : "farsight-agent",
	        &(struct fs_patience){deadline, wake_fd, cancelled, arg}, out, e);
}

int fs_ssh_open(const struct fs_ssh_opts *o, int64_t deadline, int wake_fd, bool (*cancelled)(void *arg),
        void *arg, struct fs_ssh **out, struct fs_errbuf *e)
{
	return connect_to(o, NULL, &(struct fs_patience){deadline, wake_fd, cancelled, arg}, out, e);
}

int fs_ssh_host_key(const struct fs_ssh_opts *o, int64_t deadline, int wake_fd, bool (*cancelled)(void *arg),
        void *arg, struct fs_ssh_host_key *out, struct fs_errbuf *e)
{
	struct fs_ssh_conf *conf;
	struct fs_ssh *s;
	struct fs_known_hosts *k = NULL;
	int rc = create(o, &s, &conf, e);
	if (rc)
		return rc;
	struct fs_start st = {conf, {deadline, wake_fd, cancelled, arg}};
	rc = greet(s, &st, &k, e);
	if (!rc) {
		size_t n = 0;
		const char *blob = libssh2_session_hostkey(s->ls, &n, &(int){0});
		bool unknown = blob && fs_kh_check(k, (const uint8_t *)blob, n, NULL, 0) == FS_KH_UNKNOWN;
		if (!unknown)
			rc = check_host_key(s, &st, k, e);
		if (!rc)
			rc = fs_ssh_host_key_of(conf, (const uint8_t *)blob, n, !unknown, out, e);
	}
	fs_kh_free(k);
	free(conf);
	fs_ssh_close(s);
	return rc;
}

int fs_ssh_exec(struct fs_ssh *s, const char *command, const struct fs_patience *p, struct fs_errbuf *e)
{
	struct fs_start st = {NULL, *p};
	FS_ASSERT(!s->ch);
	s->pinned = NULL;
	s->maybe_more = true;
	return run_command(s, command, 60, &st, e); /* a script, as a rule */
}

/* After the end of the output. */
int fs_ssh_exec_end(struct fs_ssh *s, const struct fs_patience *p, int *status, struct fs_errbuf *e)
{
	struct fs_start st = {NULL, *p};
	int rc, w;
	while ((rc = libssh2_channel_wait_closed(s->ch)) == LIBSSH2_ERROR_EAGAIN)
		if ((w = wait_step(s, &st, "waiting for the end of a command", e)))
			return w;
	if (rc)
		return fs_fail(e, FS_EUNAVAILABLE, "the connection to %s broke: %s", s->label, last_error(s));
	char *sig = NULL;
	libssh2_channel_get_exit_signal(s->ch, &sig, NULL, NULL, NULL, NULL, NULL);
	*status = sig ? 255 : libssh2_channel_get_exit_status(s->ch);
	if (sig)
		libssh2_free(s->ls, sig);
	while ((rc = libssh2_channel_free(s->ch)) == LIBSSH2_ERROR_EAGAIN)
		if ((w = wait_step(s, &st, "closing a channel", e)))
			return w;
	s->ch = NULL;
	return rc ? fs_fail(e, FS_EUNAVAILABLE, "the connection to %s broke: %s", s->label, last_error(s))
	          : FS_OK;
}

int fs_ssh_send_eof(struct fs_ssh *s, const struct fs_patience *p, struct fs_errbuf *e)
{
	struct fs_start st = {NULL, *p};
	int rc;
	while ((rc = libssh2_channel_send_eof(s->ch)) == LIBSSH2_ERROR_EAGAIN) {
		int w = wait_step(s, &st, "ending the input of a command", e);
		if (w)
			return w;
	}
	s->maybe_more = true;
	/* a command that has ended takes no more input */
	return rc && rc != LIBSSH2_ERROR_CHANNEL_CLOSED
	               ? fs_fail(e, FS_EUNAVAILABLE, "the connection to %s broke: %s", s->label,
	                         last_error(s))
	               : FS_OK;
}

/* The step that an exchange of keys may have interrupted. Where it meets the end of the socket the exchange
 * frees OpenSSL's numbers, which libssh2_session_free does not (1.10). */
static int go_on(struct fs_ssh *s)
{
	char byte;
	if (!s->greeted)
		return libssh2_session_handshake(s->ls, s->fd);
	if (s->ch)
		return (int)libssh2_channel_read(s->ch, &byte, 1);
	s->ch = libssh2_channel_open_session(s->ls);
	return libssh2_session_last_errno(s->ls);
}

void fs_ssh_close(struct fs_ssh *s)
{
	if (!s)
		return;
	if (s->fd >= 0)
		shutdown(s->fd, SHUT_RDWR);
	s->closing = true;
	s->allowance = SIZE_MAX;
	/* A dead socket answers at once from here on, so that these calls end; the bound is for the library's
	 * own mistakes. */
	for (int i = 0; s->ls && i < 100 && go_on(s) == LIBSSH2_ERROR_EAGAIN; i++)
		;
	for (int i = 0; s->ls && i < 100; i++)
		if (libssh2_session_free(s->ls) != LIBSSH2_ERROR_EAGAIN)
			s->ls = NULL;
	if (s->ls)
		fs_warn("%s: libssh2 does not let go of a closed session; its memory is lost", s->label);
	else
		fs_keystream_destroy(s->keystream);
	if (s->fd >= 0)
		close(s->fd);
	fs_buf_finish(&s->unsent);
	fs_heap_clear(&s->heap);
	free(s);
}

/* The output has ended (error text may still lie unread): says how, with the exit status that sshd sends
 * after it. */
static int ended(struct fs_ssh *s, struct fs_errbuf *e)
{
	int64_t until = fs_deadline_ms(EXIT_WAIT_MS);
	int rc;
	while ((rc = libssh2_channel_wait_closed(s->ch)) == LIBSSH2_ERROR_EAGAIN && fs_now() < until) {
		struct pollfd pf = {.fd = s->fd, .events = POLLIN};
		if (poll(&pf, 1, fs_poll_ms(until)) < 0 && errno != EINTR)
			break;
	}
	if (rc)
		return fs_fail(e, FS_EUNAVAILABLE, "%s on %s closed its output", s->command, s->label);
	char *sig = NULL;
	size_t sig_n = 0;
	libssh2_channel_get_exit_signal(s->ch, &sig, &sig_n, NULL, NULL, NULL, NULL);
	int status = libssh2_channel_get_exit_status(s->ch);
	if (sig) {
		fs_fail(e, FS_EUNAVAILABLE, "%s on %s was killed by signal %.*s", s->command, s->label,
		        (int)sig_n, sig);
		libssh2_free(s->ls, sig);
	} else if (status == 127) {
		fs_fail(e, FS_EUNAVAILABLE,
		        "%s is not installed on %s, or not in the PATH that sshd gives; install it there",
		        s->command, s->label);
	} else {
		fs_fail(e, FS_EUNAVAILABLE, "%s on %s ended with status %d", s->command, s->label, status);
	}
	return FS_EUNAVAILABLE;
}

/*
 * Reads after the window was widened. libssh2 1.10 would do that itself, but when it can not send
 * the adjustment at once, as in every renegotiation of keys, it books the size of the repeated read and sends
 * that of the first: once the two differ it silently cuts off what the host may rightly send. So the window
 * never gets so small that it does, and our steps are all alike.
 */
static ssize_t read_stream(struct fs_ssh *s, int stream, void *buf, size_t n)
{
	ssize_t r = 0;
	n = FS_MIN(n, READ_MAX);
	flush(s);
	OSSL_LIB_CTX *before = fs_keystream_enter(s->keystream); /* new keys may be agreed on */
	if (libssh2_channel_window_read(s->ch) < LOW_WINDOW + READ_MAX)
		r = libssh2_channel_receive_window_adjust2(s->ch, WIDEN_BY, 1, NULL);
	s->allowance = ALLOWANCE;
	if (!r)
		r = libssh2_channel_read_ex(s->ch, stream, buf, n);
	s->allowance = SIZE_MAX;
	fs_keystream_leave(before);
	return r;
}

ssize_t fs_ssh_read(struct fs_ssh *s, void *buf, size_t n, struct fs_errbuf *e)
{
	if (n == 0)
		return 0;
	ssize_t r = read_stream(s, 0, buf, n);
	if (r > 0) {
		s->maybe_more = true;
		return r;
	}
	if (r == LIBSSH2_ERROR_EAGAIN) {
		s->maybe_more = false; /* what is left lies in the socket, for poll to see */
		return 0;
	}
	if (r < 0)
		return fs_fail(e, FS_EUNAVAILABLE, "the connection to %s broke: %s", s->label, last_error(s));
	/* libssh2_channel_eof would say no while error text lies unread; this one asks for the end of the
	 * output alone */
	if (libssh2_channel_wait_closed(s->ch) != LIBSSH2_ERROR_INVAL)
		return ended(s, e);
	s->maybe_more = true;
	return 0;
}

ssize_t fs_ssh_read_stderr(struct fs_ssh *s, void *buf, size_t n)
{
	if (n == 0)
		return 0;
	ssize_t r = read_stream(s, SSH_EXTENDED_DATA_STDERR, buf, n);
	s->maybe_more = true; /* it may have queued output, which poll will not tell */
	if (r == LIBSSH2_ERROR_EAGAIN)
		s->no_stderr = true;
	return r > 0 ? r : 0;
}

ssize_t fs_ssh_write(struct fs_ssh *s, const void *buf, size_t n, struct fs_errbuf *e)
{
	FS_ASSERT(!s->pinned || s->pinned == buf);
	if (n == 0 || (flush(s) == 0 && s->unsent.len))
		return 0;
	OSSL_LIB_CTX *before = fs_keystream_enter(s->keystream);
	ssize_t r = libssh2_channel_write_ex(s->ch, 0, buf, n);
	fs_keystream_leave(before);
	s->maybe_more = true; /* it reads what has arrived into its queue */
	s->pinned = NULL;
	if (r > 0)
		return r;
	if (r == 0 || r == LIBSSH2_ERROR_EAGAIN) {
		s->pinned = buf;
		return 0;
	}
	if (r == LIBSSH2_ERROR_CHANNEL_CLOSED || r == LIBSSH2_ERROR_CHANNEL_EOF_SENT)
		return ended(s, e);
	return fs_fail(e, FS_EUNAVAILABLE, "the connection to %s broke: %s", s->label, last_error(s));
}

size_t fs_ssh_unsent(const struct fs_ssh *s)
{
	int n = 0;
	return s->unsent.len + (ioctl(s->fd, SIOCOUTQ, &n) == 0 && n > 0 ? (size_t)n : 0);
}

int fs_ssh_wait(struct fs_ssh *s, bool want_write, int wake_fd, int64_t deadline)
{
	if (s->maybe_more)
		return FS_OK;
	/* Error text that a read of the output has queued: poll does not see it. The question is answered
	 * with yes for whatever else a host queues, too. */
	if (!s->no_stderr && libssh2_poll_channel_read(s->ch, 1))
		return FS_OK;
	/* pinned means that the host's window is full, or keys are agreed on: what comes next is input */
	if (want_write && !s->pinned && !s->unsent.len)
		return FS_OK;
	struct pollfd pf[2] = {{.fd = s->fd, .events = events_of(s)}, {.fd = wake_fd, .events = POLLIN}};
	int n = poll(pf, 2, fs_poll_ms(deadline));
	return n < 0 && errno != EINTR ? FS_EIO : FS_OK;
}
