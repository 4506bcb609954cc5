/* The server of web.h: blocking sockets, since nothing here has to be fast. */
#include "tests/unit/web.h"

#include "common/base/base.h"

#include <arpa/inet.h>
#include <openssl/ssl.h>
#include <poll.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>
#include <unistd.h>

#define MAX_CONNS 512
#define HEAD_MAX 16384

struct conn {
	struct web *w;
	pthread_t thread;
	int fd;
	SSL *ssl;
	char head[HEAD_MAX];
};

struct web {
	int fd, port;
	SSL_CTX *tls;
	pthread_t thread;
	atomic_bool stopping, open;
	atomic_int accepted, left, waiting, most_waiting;
	pthread_mutex_t lock;
	char last[HEAD_MAX];
	struct conn *conns[MAX_CONNS];
};

uint8_t web_byte(size_t i)
{
	return (uint8_t)(i * 31 + (i >> 8) + 7);
}

/* ---- a connection ---- */

static bool put(struct conn *c, const void *data, size_t n)
{
	const char *p = data;
	while (n > 0) {
		ssize_t r = c->ssl ? SSL_write(c->ssl, p, (int)n) : send(c->fd, p, n, MSG_NOSIGNAL);
		if (r <= 0)
			return false;
		p += r;
		n -= (size_t)r;
	}
	return true;
}

static bool put_text(struct conn *c, const char *s)
{
	return put(c, s, strlen(s));
}

static bool put_bytes(struct conn *c, size_t from, size_t n)
{
	uint8_t buf[4096];
	for (size_t i = 0; i < n;) {
		size_t part = FS_MIN(n - i, sizeof(buf));
		for (size_t k = 0; k < part; k++)
			buf[k] = web_byte(from + i + k);
		if (!put(c, buf, part))
			return false;
		i += part;
	}
	return true;
}

static bool put_chunk(struct conn *c, size_t from, size_t n)
{
	char size[32];
	snprintf(size, sizeof(size), "%zx\r\n", n);
	return put_text(c, size) && put_bytes(c, from, n) && put_text(c, "\r\n");
}

static bool picture(struct conn *c, size_t n)
{
	char head[128];
	snprintf(head, sizeof(head),
	        "HTTP/1.1 200 OK\r\nContent-Type: image/png\r\nContent-Length: %zu\r\n\r\n", n);
	return put_text(c, head) && put_bytes(c, 0, n);
}

static bool chunked(struct conn *c, size_t n, bool end)
{
	if (!put_text(c, "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"))
		return false;
	for (size_t i = 0; i < n || !end;) {
		size_t part = end ? FS_MIN(n - i, (size_t)1000) : 4096;
		if (!put_chunk(c, i, part))
			return false;
		i += part;
	}
	return put_text(c, "0\r\n\r\n");
}

static bool redirect(struct conn *c, const char *to)
{
	char head[HEAD_MAX + 256];
	snprintf(head, sizeof(head),
	        "HTTP/1.1 302 Found\r\nLocation: %s\r\nContent-Length: 12\r\n\r\nnot a picture", to);
	return put_text(c, head);
}

static bool hop(struct conn *c, long n)
{
	char to[64];
	snprintf(to, sizeof(to), "hop?%ld", n - 1);
	return n > 0 ? redirect(c, to) : picture(c, 10);
}

/* True when the client closed; false when the server stops. */
static bool wait_for_end(struct conn *c, int pause_ms)
{
	char byte;
	int64_t until = pause_ms ? fs_deadline_ms(pause_ms) : FS_NEVER;
	while (!atomic_load(&c->w->stopping) && fs_now() < until) {
		struct pollfd p = {.fd = c->fd, .events = POLLIN};
		if (poll(&p, 1, pause_ms ? pause_ms : 1000) > 0)
			return recv(c->fd, &byte, 1, 0) <= 0 && !atomic_load(&c->w->stopping);
	}
	return false;
}

static bool drip(struct conn *c)
{
	bool live = put_text(c, "HTTP/1.1 200 OK\r\nContent-Length: 50000\r\n\r\n");
	while (live && !atomic_load(&c->w->stopping))
		live = put_text(c, "x") && !wait_for_end(c, 20);
	return live;
}

static bool gate(struct conn *c, size_t n)
{
	while (!atomic_load(&c->w->open) && !atomic_load(&c->w->stopping))
		if (wait_for_end(c, 5))
			return false;
	return picture(c, n);
}

/* False when the client left early. */
static bool answer(struct conn *c, const char *path, const char *arg)
{
	char status[64];
	size_t n = strtoul(arg, NULL, 10);
	if (!strcmp(path, "/pic"))
		return picture(c, n);
	if (!strcmp(path, "/chunked"))
		return chunked(c, n, true);
	if (!strcmp(path, "/close"))
		return put_text(c, "HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n") && put_bytes(c, 0, n);
	if (!strcmp(path, "/to"))
		return redirect(c, arg);
	if (!strcmp(path, "/loop"))
		return redirect(c, "/loop");
	if (!strcmp(path, "/hop"))
		return hop(c, (long)n);
	if (!strcmp(path, "/short"))
		return put_text(c, "HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n") && put_bytes(c, 0, 10);
	if (!strcmp(path, "/endless"))
		return chunked(c, 0, false);
	if (!strcmp(path, "/drip"))
		return drip(c);
	if (!strcmp(path, "/silent"))
		return !wait_for_end(c, 0);
	if (!strcmp(path, "/gate"))
		return gate(c, n);
	snprintf(status, sizeof(status), "HTTP/1.1 %zu Whatever\r\nContent-Length: 4\r\n\r\ntext",
	        n ? n : 404);
	return put_text(c, status);
}

static bool read_head(struct conn *c)
{
	size_t n = 0;
	while (n + 1 < sizeof(c->head)) {
		ssize_t r = c->ssl ? SSL_read(c->ssl, c->head + n, (int)(sizeof(c->head) - 1 - n))
		                   : recv(c->fd, c->head + n, sizeof(c->head) - 1 - n, 0);
		if (r <= 0)
			return false;
		n += (size_t)r;
		c->head[n] = '\0';
		if (strstr(c->head, "\r\n\r\n"))
			return true;
	}
	return false;
}

static void serve(struct conn *c)
{
	struct web *w = c->w;
	char path[64] = "", arg[HEAD_MAX] = "";
	if (!read_head(c))
		return;
	pthread_mutex_lock(&w->lock);
	memcpy(w->last, c->head, sizeof(w->last));
	pthread_mutex_unlock(&w->lock);
	sscanf(c->head, "GET %63[^? ]?%16000[^ ]", path, arg);
	int now = atomic_fetch_add(&w->waiting, 1) + 1, most = atomic_load(&w->most_waiting);
	while (now > most && !atomic_compare_exchange_weak(&w->most_waiting, &most, now))
		;
	bool stayed = answer(c, path, arg);
	atomic_fetch_sub(&w->waiting, 1);
	if (!stayed)
		atomic_fetch_add(&w->left, 1);
}

static void *run_conn(void *arg)
{
	struct conn *c = arg;
	if (c->w->tls) {
		c->ssl = SSL_new(c->w->tls);
		SSL_set_fd(c->ssl, c->fd);
	}
	if (!c->ssl || SSL_accept(c->ssl) > 0)
		serve(c);
	if (c->ssl)
		SSL_shutdown(c->ssl);
	SSL_free(c->ssl);
	/* what the client still sends must not turn our end into a reset */
	shutdown(c->fd, SHUT_WR);
	wait_for_end(c, 1000);
	shutdown(c->fd, SHUT_RDWR);
	return NULL;
}

/* ---- the server ---- */

static void *run(void *arg)
{
	struct web *w = arg;
	while (!atomic_load(&w->stopping)) {
		int fd = accept4(w->fd, NULL, NULL, SOCK_CLOEXEC);
		int i = fd < 0 ? MAX_CONNS : atomic_fetch_add(&w->accepted, 1);
		struct conn *c = i < MAX_CONNS ? calloc(1, sizeof(*c)) : NULL;
		if (!c) {
			if (fd >= 0)
				close(fd);
			continue;
		}
		c->w = w;
		c->fd = fd;
		FS_ASSERT(fs_thread_start(&c->thread, "web conn", run_conn, c, NULL) == FS_OK);
		w->conns[i] = c;
	}
	return NULL;
}

/* A key, and a certificate signed by that key alone. */
static SSL_CTX *make_tls(void)
{
	SSL_CTX *ctx = SSL_CTX_new(TLS_server_method());
	EVP_PKEY *key = EVP_EC_gen("P-256");
	X509 *x = X509_new();
	X509_NAME *name = X509_get_subject_name(x);
	X509_gmtime_adj(X509_getm_notBefore(x), -3600);
	X509_gmtime_adj(X509_getm_notAfter(x), 3600);
	X509_NAME_add_entry_by_txt(name, "CN", MBSTRING_ASC, (const unsigned char *)"public.test", -1, -1, 0);
	X509_set_issuer_name(x, name);
	X509_set_pubkey(x, key);
	FS_ASSERT(ctx && X509_sign(x, key, EVP_sha256()) > 0);
	FS_ASSERT(SSL_CTX_use_certificate(ctx, x) == 1 && SSL_CTX_use_PrivateKey(ctx, key) == 1);
	X509_free(x);
	EVP_PKEY_free(key);
	return ctx;
}

struct web *web_start(bool tls)
{
	struct web *w = calloc(1, sizeof(*w));
	FS_ASSERT(w);
	struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	socklen_t n = sizeof(a);
	w->tls = tls ? make_tls() : NULL;
	pthread_mutex_init(&w->lock, NULL);
	w->fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	FS_ASSERT(bind(w->fd, (struct sockaddr *)&a, n) == 0 && listen(w->fd, 256) == 0);
	FS_ASSERT(getsockname(w->fd, (struct sockaddr *)&a, &n) == 0);
	w->port = ntohs(a.sin_port);
	FS_ASSERT(fs_thread_start(&w->thread, "web", run, w, NULL) == FS_OK);
	return w;
}

void web_stop(struct web *w)
{
	if (!w)
		return;
	atomic_store(&w->stopping, true);
	shutdown(w->fd, SHUT_RDWR); /* ends accept() */
	pthread_join(w->thread, NULL);
	close(w->fd);
	for (int i = 0; i < MAX_CONNS; i++) {
		struct conn *c = w->conns[i];
		if (!c)
			continue;
		shutdown(c->fd, SHUT_RDWR);
		pthread_join(c->thread, NULL);
		close(c->fd);
		free(c);
	}
	SSL_CTX_free(w->tls);
	pthread_mutex_destroy(&w->lock);
	free(w);
}

int web_port(const struct web *w)
{
	return w->port;
}

int web_accepted(struct web *w)
{
	return atomic_load(&w->accepted);
}

int web_left(struct web *w)
{
	return atomic_load(&w->left);
}

int web_waiting(struct web *w)
{
	return atomic_load(&w->waiting);
}

int web_most_waiting(struct web *w)
{
	return atomic_load(&w->most_waiting);
}

void web_open_gate(struct web *w)
{
	atomic_store(&w->open, true);
}

void web_last_request(struct web *w, char *out, size_t cap)
{
	pthread_mutex_lock(&w->lock);
	snprintf(out, cap, "%s", w->last);
	pthread_mutex_unlock(&w->lock);
}
