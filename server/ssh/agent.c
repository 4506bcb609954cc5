/*
 * The ssh agent's protocol (draft-miller-ssh-agent), the two requests that are needed: list and sign. Own
 * code because libssh2's waits on the agent without a deadline, and an agent may be stuck or be asking its
 * user. Runs on the thread of the connection; one request at a time; answers are bounded.
 */
#include "server/ssh/internal.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#define AGENT_MAX (256 * 1024) /* as OpenSSH's own limit */
enum { REQUEST_IDENTITIES = 11, IDENTITIES_ANSWER = 12, SIGN_REQUEST = 13, SIGN_RESPONSE = 14 };

int fs_agent_open(
        struct fs_agent *a, const char *socket_path, const struct fs_patience *p, struct fs_errbuf *e)
{
	struct sockaddr_un un = {.sun_family = AF_UNIX};
	a->fd = -1;
	a->patience = p;
	if (strlen(socket_path) >= sizeof(un.sun_path))
		return fs_fail(
		        e, FS_EINVAL, "the path of the ssh agent's socket is too long: %.200s", socket_path);
	strcpy(un.sun_path, socket_path);
	a->fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (a->fd < 0 || connect(a->fd, (struct sockaddr *)&un, sizeof(un))) {
		int rc = fs_fail_errno(e, FS_EUNAVAILABLE, "can not reach the ssh agent at %s", socket_path);
		fs_agent_close(a);
		return rc;
	}
	return FS_OK;
}

void fs_agent_close(struct fs_agent *a)
{
	if (a->fd >= 0)
		close(a->fd);
	a->fd = -1;
}

static int move(struct fs_agent *a, void *buf, size_t n, bool out, struct fs_errbuf *e)
{
	uint8_t *p = buf;
	while (n) {
		ssize_t r = out ? send(a->fd, p, n, MSG_NOSIGNAL) : recv(a->fd, p, n, 0);
		if (r > 0) {
			p += r;
			n -= (size_t)r;
			continue;
		}
		if (r == 0)
			return fs_fail(e, FS_EUNAVAILABLE, "the ssh agent closed the connection");
		if (errno == EINTR)
			continue;
		if (errno != EAGAIN && errno != EWOULDBLOCK)
			return fs_fail_errno(e, FS_EUNAVAILABLE, "the ssh agent can not be reached");
		int rc = fs_patience_poll(a->patience, a->fd, out ? POLLOUT : POLLIN);
		if (rc)
			return fs_fail(e, rc,
			        rc == FS_ETIMEOUT ? "the ssh agent did not answer in time" : "cancelled");
	}
	return FS_OK;
}

static void put_u32(struct fs_buf *b, uint32_t v, int *rc)
{
	uint8_t be[4] = {(uint8_t)(v >> 24), (uint8_t)(v >> 16), (uint8_t)(v >> 8), (uint8_t)v};
	if (!*rc)
		*rc = fs_buf_append(b, be, 4);
}

static void put_str(struct fs_buf *b, const uint8_t *s, size_t n, int *rc)
{
	put_u32(b, (uint32_t)n, rc);
	if (!*rc)
		*rc = fs_buf_append(b, s, n);
}

static bool take_u32(const uint8_t **p, size_t *n, uint32_t *v)
{
	if (*n < 4)
		return false;
	*v = (uint32_t)(*p)[0] << 24 | (uint32_t)(*p)[1] << 16 | (uint32_t)(*p)[2] << 8 | (*p)[3];
	*p += 4;
	*n -= 4;
	return true;
}

static bool take_str(const uint8_t **p, size_t *n, const uint8_t **s, size_t *len)
{
	uint32_t l;
	if (!take_u32(p, n, &l) || l > *n)
		return false;
	*s = *p;
	*len = l;
	*p += l;
	*n -= l;
	return true;
}

/* body: the request with its type byte. answer (an initialised buffer) gets the reply without length and
 * type. */
static int ask(struct fs_agent *a, const struct fs_buf *body, uint8_t want, struct fs_buf *answer,
        struct fs_errbuf *e)
{
	uint8_t head[5] = {(uint8_t)(body->len >> 24), (uint8_t)(body->len >> 16), (uint8_t)(body->len >> 8),
	        (uint8_t)body->len};
	int rc;
	if ((rc = move(a, head, 4, true, e)) || (rc = move(a, body->data, body->len, true, e)) ||
	        (rc = move(a, head, 5, false, e)))
		return rc;
	size_t n = (size_t)head[0] << 24 | (size_t)head[1] << 16 | (size_t)head[2] << 8 | head[3];
	if (n < 1 || n > AGENT_MAX)
		return fs_fail(e, FS_EFORMAT, "the ssh agent sent nonsense");
	if (fs_buf_reserve(answer, n))
		return fs_fail(e, FS_ENOMEM, "out of memory");
	if ((rc = move(a, answer->data, n - 1, false, e)))
		return rc;
	answer->len = n - 1;
	if (head[4] != want)
		return fs_fail(e, FS_EAUTH, "the ssh agent refused");
	return FS_OK;
}

int fs_agent_list(struct fs_agent *a, struct fs_agent_key *keys, size_t *n, struct fs_errbuf *e)
{
	struct fs_buf q, r;
	fs_buf_init(&q, 16);
	fs_buf_init(&r, AGENT_MAX);
	uint8_t type = REQUEST_IDENTITIES;
	int rc = fs_buf_append(&q, &type, 1);
	if (!rc)
		rc = ask(a, &q, IDENTITIES_ANSWER, &r, e);
	*n = 0;
	const uint8_t *p = r.data, *s, *comment;
	size_t left = r.len, len, comment_n;
	uint32_t count = 0;
	if (!rc && !take_u32(&p, &left, &count))
		rc = fs_fail(e, FS_EFORMAT, "the ssh agent sent nonsense");
	while (!rc && count-- && *n < FS_AGENT_MAX_KEYS) {
		struct fs_agent_key *k = &keys[*n];
		if (!take_str(&p, &left, &s, &len) || !take_str(&p, &left, &comment, &comment_n)) {
			rc = fs_fail(e, FS_EFORMAT, "the ssh agent sent nonsense");
		} else if (!(k->blob = malloc(len ? len : 1))) {
			rc = fs_fail(e, FS_ENOMEM, "out of memory");
		} else {
			memcpy(k->blob, s, len);
			k->n = len;
			snprintf(k->comment, sizeof(k->comment), "%.*s", (int)FS_MIN(comment_n, (size_t)127),
			        (const char *)comment);
			++*n;
		}
	}
	if (rc) {
		fs_agent_keys_free(keys, *n);
		*n = 0;
	}
	fs_buf_finish(&q);
	fs_buf_finish(&r);
	return rc;
}

void fs_agent_keys_free(struct fs_agent_key *keys, size_t n)
{
	for (size_t i = 0; i < n; i++)
		free(keys[i].blob);
}

/* Answer: string signature { string algorithm, string blob }. libssh2 puts the key's type in front itself. */
int fs_agent_sign(struct fs_agent *a, const uint8_t *blob, size_t blob_n, const uint8_t *data, size_t data_n,
        uint8_t **sig, size_t *sig_n, struct fs_errbuf *e)
{
	struct fs_buf q, r;
	fs_buf_init(&q, AGENT_MAX);
	fs_buf_init(&r, AGENT_MAX);
	uint8_t type = SIGN_REQUEST;
	int rc = fs_buf_append(&q, &type, 1);
	put_str(&q, blob, blob_n, &rc);
	put_str(&q, data, data_n, &rc);
	put_u32(&q, 0, &rc); /* no flags: rsa-sha2 would need a library that announces it */
	if (rc)
		fs_fail(e, rc, "out of memory");
	else
		rc = ask(a, &q, SIGN_RESPONSE, &r, e);
	const uint8_t *p = r.data, *outer, *algo, *s;
	size_t left = r.len, outer_n, algo_n, s_n;
	if (!rc) {
		if (!take_str(&p, &left, &outer, &outer_n) || !take_str(&outer, &outer_n, &algo, &algo_n) ||
		        !take_str(&outer, &outer_n, &s, &s_n) || s_n == 0)
			rc = fs_fail(e, FS_EFORMAT, "the ssh agent sent nonsense");
		else if (!(*sig = malloc(s_n)))
			rc = fs_fail(e, FS_ENOMEM, "out of memory");
		else
			memcpy(*sig, s, *sig_n = s_n);
	}
	fs_buf_finish(&q);
	fs_buf_finish(&r);
	return rc;
}
