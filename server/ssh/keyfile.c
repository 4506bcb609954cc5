/*
 * Private key files: whether we may use one at all, and why not. Reads the file once (the descriptor that was
 * checked is the one that is read) and tells encrypted and RSA keys apart before the server is asked, so that
 * the error names the fix. Parses the outer shell only; signing is libssh2's and OpenSSL's.
 */
#include "server/ssh/internal.h"

#include <errno.h>
#include <fcntl.h>
#include <openssl/bio.h>
#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define KEY_MAX 65536
#define OPENSSH_BEGIN "-----BEGIN OPENSSH PRIVATE KEY-----"
#define OPENSSH_END "-----END OPENSSH PRIVATE KEY-----"

static int read_all(int fd, const char *path, char **text, size_t *n, struct fs_errbuf *e)
{
	char *buf = malloc(KEY_MAX + 1);
	if (!buf)
		return fs_fail(e, FS_ENOMEM, "out of memory");
	size_t len = 0;
	for (;;) {
		ssize_t r = read(fd, buf + len, KEY_MAX - len);
		if (r < 0 && errno == EINTR)
			continue;
		if (r < 0) {
			free(buf);
			return fs_fail_errno(e, FS_EIO, "can not read %s", path);
		}
		if (r == 0 || len == KEY_MAX)
			break;
		len += (size_t)r;
	}
	buf[len] = '\0';
	*text = buf;
	*n = len;
	return FS_OK;
}

/* A length-prefixed field at *at. */
static bool field(const uint8_t *b, size_t n, size_t *at, const uint8_t **s, size_t *len)
{
	if (n - *at < 4)
		return false;
	const uint8_t *p = b + *at;
	size_t l = (size_t)p[0] << 24 | (size_t)p[1] << 16 | (size_t)p[2] << 8 | p[3];
	if (l > n - *at - 4)
		return false;
	*s = p + 4;
	*len = l;
	*at += 4 + l;
	return true;
}

/* openssh-key-v1 (PROTOCOL.key): magic, cipher, kdf, kdf options, number of keys, public blob, private part.
 */
static bool parse_openssh(struct fs_ssh_key *k)
{
	const char *begin = strstr(k->text, OPENSSH_BEGIN), *end;
	if (!begin)
		return false;
	begin += strlen(OPENSSH_BEGIN); /* the two lines may share their dashes */
	end = strstr(begin, OPENSSH_END);
	if (!end)
		return false;
	char *b64 = malloc((size_t)(end - begin) + 1);
	size_t m = 0, n = 0;
	if (!b64)
		return false;
	for (const char *s = begin; s < end; s++)
		if (!strchr(" \t\r\n", *s))
			b64[m++] = *s;
	static const char magic[] = "openssh-key-v1"; /* with its NUL */
	uint8_t *raw = NULL;
	/* fs_ssh_base64 bounds one known_hosts line; a key this large is none */
	if (m <= 32768)
		raw = fs_ssh_base64(b64, m, &n);
	OPENSSL_cleanse(b64, m);
	free(b64);
	const uint8_t *cipher, *kdf, *opts, *pub;
	size_t at = sizeof(magic), cipher_n, kdf_n, opts_n, pub_n;
	char type[64];
	bool good = raw && n > sizeof(magic) + 4 && !memcmp(raw, magic, sizeof(magic)) &&
	            field(raw, n, &at, &cipher, &cipher_n) && field(raw, n, &at, &kdf, &kdf_n) &&
	            field(raw, n, &at, &opts, &opts_n) && n - at >= 4 && (at += 4) &&
	            field(raw, n, &at, &pub, &pub_n) && fs_ssh_blob_type(pub, pub_n, type, sizeof(type));
	if (good) {
		k->encrypted = cipher_n != 4 || memcmp(cipher, "none", 4);
		k->rsa = !strcmp(type, "ssh-rsa");
		k->pub = malloc(pub_n);
		if (k->pub)
			memcpy(k->pub, pub, k->pub_n = pub_n);
	}
	if (raw)
		OPENSSL_cleanse(raw, n);
	free(raw);
	return good;
}

static int no_passphrase(char *buf, int size, int rw, void *arg)
{
	return -1;
}

static bool parse_pem(struct fs_ssh_key *k)
{
	if (!strstr(k->text, "-----BEGIN") || !strstr(k->text, "PRIVATE KEY-----"))
		return false;
	k->encrypted =
	        strstr(k->text, "BEGIN ENCRYPTED PRIVATE KEY") || strstr(k->text, "Proc-Type: 4,ENCRYPTED");
	k->rsa = strstr(k->text, "BEGIN RSA PRIVATE KEY") != NULL;
	if (k->encrypted || k->rsa)
		return true;
	BIO *bio = BIO_new_mem_buf(k->text, (int)k->n);
	EVP_PKEY *pkey = bio ? PEM_read_bio_PrivateKey(bio, NULL, no_passphrase, NULL) : NULL;
	k->rsa = pkey && EVP_PKEY_base_id(pkey) == EVP_PKEY_RSA;
	bool good = pkey != NULL;
	EVP_PKEY_free(pkey);
	BIO_free(bio);
	return good;
}

/* "type base64 comment" of <path>.pub, when the private file does not tell the public key. */
static void load_pub(struct fs_ssh_key *k)
{
	char path[520], line[16384], type[64];
	snprintf(path, sizeof(path), "%s.pub", k->path);
	FILE *f = fopen(path, "re");
	if (!f)
		return;
	if (fgets(line, sizeof(line), f)) {
		char *b64 = line + strcspn(line, " \t");
		b64 += strspn(b64, " \t");
		k->pub = fs_ssh_base64(b64, strcspn(b64, " \t\r\n"), &k->pub_n);
		if (k->pub && !fs_ssh_blob_type(k->pub, k->pub_n, type, sizeof(type))) {
			free(k->pub);
			k->pub = NULL;
		}
	}
	fclose(f);
}

int fs_ssh_key_load(const char *path, struct fs_ssh_key *k, struct fs_errbuf *e)
{
	memset(k, 0, sizeof(*k));
	snprintf(k->path, sizeof(k->path), "%s", path);
	int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
	if (fd < 0 && (errno == ENOENT || errno == ENOTDIR))
		return fs_fail(e, FS_ENOTFOUND, "key file %s does not exist", path);
	if (fd < 0)
		return fs_fail_errno(e, FS_EAUTH, "can not open key file %s", path);
	struct stat st;
	int rc = FS_OK;
	if (fstat(fd, &st) || !S_ISREG(st.st_mode))
		rc = fs_fail(e, FS_EAUTH, "key %s is not a file", path);
	else if (st.st_uid == getuid() && (st.st_mode & 077))
		rc = fs_fail(e, FS_EAUTH, "key file %s can be read by others (mode %04o); run: chmod 600 %s",
		        path, (unsigned)st.st_mode & 07777, path);
	else
		rc = read_all(fd, path, &k->text, &k->n, e);
	close(fd);
	if (!rc && !parse_openssh(k) && !parse_pem(k))
		rc = fs_fail(e, FS_EAUTH, "%s is not a private key in OpenSSH or PEM format", path);
	if (rc) {
		fs_ssh_key_finish(k);
		return rc;
	}
	if (!k->pub)
		load_pub(k);
	return FS_OK;
}

void fs_ssh_key_finish(struct fs_ssh_key *k)
{
	if (k->text)
		OPENSSL_cleanse(k->text, k->n);
	free(k->text);
	free(k->pub);
	k->text = NULL;
	k->pub = NULL;
}
