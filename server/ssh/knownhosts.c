/*
 * known_hosts: which keys are known for one host, and whether the one it shows is among them. Runs on the
 * thread of the connection. Own matching on purpose: libssh2 1.10 ignores @revoked, patterns and negations,
 * gives up a file at the first bad line, takes CR for part of a key and calls another key type a changed key.
 * Names are compared as configured, never by address.
 */
#include "server/ssh/internal.h"

#include <ctype.h>
#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#define MAX_ENTRIES 256      /* lines of one host that are kept */
#define MAX_LINE 32768       /* longer ones are bad */
#define MAX_FILE (16u << 20) /* known_hosts of a large site */

enum marker { PLAIN, REVOKED, AUTHORITY };

struct entry {
	enum marker marker;
	bool by_name_only; /* matched the bare name while the port is not 22: vouches, but does not contradict
	                    */
	char type[64];
	uint8_t *blob;
	size_t n;
	char where[600];
};
struct fs_known_hosts {
	char name[256];      /* lower case */
	char name_port[280]; /* "[name]:port", "" on port 22 and for an alias */
	struct entry entries[MAX_ENTRIES];
	size_t n, bad;
};

uint8_t *fs_ssh_base64(const char *text, size_t n, size_t *out_n)
{
	if (n == 0 || n % 4 || n > MAX_LINE)
		return NULL;
	size_t pad = (text[n - 1] == '=') + (text[n - 1] == '=' && text[n - 2] == '=');
	for (size_t i = 0; i < n - pad; i++)
		if (!isalnum((unsigned char)text[i]) && text[i] != '+' && text[i] != '/')
			return NULL;
	uint8_t *out = malloc(n / 4 * 3 + 1);
	if (!out)
		return NULL;
	int len = EVP_DecodeBlock(out, (const unsigned char *)text, (int)n);
	if (len < 0) {
		free(out);
		return NULL;
	}
	*out_n = (size_t)len - pad;
	return out;
}

bool fs_ssh_blob_type(const uint8_t *blob, size_t n, char *out, size_t cap)
{
	if (n < 4)
		return false;
	size_t len = (size_t)blob[0] << 24 | (size_t)blob[1] << 16 | (size_t)blob[2] << 8 | blob[3];
	if (len == 0 || len > n - 4 || len >= cap)
		return false;
	for (size_t i = 0; i < len; i++)
		if (!isgraph(blob[4 + i]) || blob[4 + i] == ',')
			return false;
	memcpy(out, blob + 4, len);
	out[len] = '\0';
	return true;
}

void fs_ssh_fingerprint(const uint8_t *blob, size_t n, char out[64])
{
	unsigned char md[EVP_MAX_MD_SIZE], text[64];
	unsigned len = 0;
	if (EVP_Digest(blob, n, md, &len, EVP_sha256(), NULL) != 1 || len != 32) {
		snprintf(out, 64, "SHA256:?");
		return;
	}
	EVP_EncodeBlock(text, md, 32);
	text[43] = '\0'; /* 44 characters, the last is padding */
	snprintf(out, 64, "SHA256:%s", (const char *)text);
}

/* |1|salt|hash, both base64: hash = HMAC-SHA1(salt, name) */
static bool hashed_matches(const char *field, const char *name)
{
	const char *salt64 = field + 3, *bar = strchr(salt64, '|');
	if (!bar)
		return false;
	size_t salt_n = 0, want_n = 0;
	uint8_t *salt = fs_ssh_base64(salt64, (size_t)(bar - salt64), &salt_n);
	uint8_t *want = fs_ssh_base64(bar + 1, strlen(bar + 1), &want_n);
	unsigned char md[EVP_MAX_MD_SIZE];
	unsigned len = 0;
	bool hit = salt && want &&
	           HMAC(EVP_sha1(), salt, (int)salt_n, (const unsigned char *)name, strlen(name), md, &len) &&
	           len == want_n && CRYPTO_memcmp(md, want, len) == 0;
	free(salt);
	free(want);
	return hit;
}

static bool field_matches(const char *field, const char *name)
{
	if (!*name)
		return false;
	return strncmp(field, "|1|", 3) == 0 ? hashed_matches(field, name)
	                                     : fs_ssh_glob_list(field, ',', name) == 1;
}

static char *cut(char **p)
{
	char *s = *p + strspn(*p, " \t");
	if (!*s)
		return NULL;
	char *end = s + strcspn(s, " \t");
	*p = *end ? end + 1 : end;
	*end = '\0';
	return s;
}

static void lower(char *s)
{
	for (; *s; s++)
		*s = (char)tolower((unsigned char)*s);
}

static bool parse_marker(const char *word, enum marker *m)
{
	if (!strcmp(word, "@revoked"))
		*m = REVOKED;
	else if (!strcmp(word, "@cert-authority"))
		*m = AUTHORITY;
	else
		return false;
	return true;
}

/* false: the line does not parse. A line about another host is fine. */
static bool add_line(struct fs_known_hosts *k, const char *file, int line_no, char *line)
{
	char *p = line;
	struct entry en = {0};
	char *hosts = cut(&p);
	if (!hosts || *hosts == '#')
		return true;
	if (*hosts == '@' && (!parse_marker(hosts, &en.marker) || !(hosts = cut(&p))))
		return false;
	char *type = cut(&p), *key = cut(&p);
	if (!type || !key || strlen(type) >= sizeof(en.type))
		return false;
	if (*hosts != '|')
		lower(hosts);
	bool exact = *k->name_port ? field_matches(hosts, k->name_port) : field_matches(hosts, k->name);
	en.by_name_only = !exact && *k->name_port && field_matches(hosts, k->name);
	en.blob = fs_ssh_base64(key, strlen(key), &en.n);
	bool good = en.blob && fs_ssh_blob_type(en.blob, en.n, en.type, sizeof(en.type)) &&
	            !strcmp(en.type, type);
	if (!good || (!exact && !en.by_name_only) || k->n == MAX_ENTRIES) {
		free(en.blob);
		return good;
	}
	snprintf(en.where, sizeof(en.where), "%s:%d", file, line_no);
	k->entries[k->n++] = en;
	return true;
}

static void add_text(struct fs_known_hosts *k, const char *file, const char *text, size_t n)
{
	const char *end = text + n;
	char *line = malloc(MAX_LINE);
	int no = 0;
	while (line && text < end) {
		const char *nl = memchr(text, '\n', (size_t)(end - text));
		size_t len = nl ? (size_t)(nl - text) : (size_t)(end - text);
		size_t keep = len;
		no++;
		while (keep && (text[keep - 1] == '\r' || text[keep - 1] == ' ' || text[keep - 1] == '\t'))
			keep--;
		if (keep >= MAX_LINE || memchr(text, '\0', keep)) {
			k->bad++;
		} else {
			memcpy(line, text, keep);
			line[keep] = '\0';
			k->bad += !add_line(k, file, no, line);
		}
		text += len + (nl != NULL);
	}
	free(line);
}

static struct fs_known_hosts *create(const char *host, int port, bool alias)
{
	struct fs_known_hosts *k = calloc(1, sizeof(*k));
	if (!k)
		return NULL;
	snprintf(k->name, sizeof(k->name), "%s", host);
	lower(k->name);
	if (!alias && port != 22)
		snprintf(k->name_port, sizeof(k->name_port), "[%s]:%d", k->name, port);
	return k;
}

int fs_kh_parse(const char *host, int port, bool alias, const char *text, size_t n,
        struct fs_known_hosts **out, struct fs_errbuf *e)
{
	struct fs_known_hosts *k = create(host, port, alias);
	if (!k)
		return fs_fail(e, FS_ENOMEM, "out of memory");
	add_text(k, "known_hosts", text, n);
	*out = k;
	return FS_OK;
}

/* FS_ENOTFOUND when there is none. */
static int add_file(struct fs_known_hosts *k, const char *path, struct fs_errbuf *e)
{
	FILE *f = fopen(path, "re");
	if (!f)
		return fs_fail_errno(e, FS_ENOTFOUND, "can not open %s", path);
	struct fs_buf b;
	fs_buf_init(&b, MAX_FILE);
	char chunk[16384];
	size_t n;
	int rc = FS_OK;
	while (!rc && (n = fread(chunk, 1, sizeof(chunk), f)) > 0)
		rc = fs_buf_append(&b, chunk, n);
	if (rc)
		fs_fail(e, rc, "%s is larger than %u bytes", path, MAX_FILE);
	else if (ferror(f))
		rc = fs_fail_errno(e, FS_EIO, "can not read %s", path);
	else if (b.len)
		add_text(k, path, (const char *)b.data, b.len);
	fs_buf_finish(&b);
	fclose(f);
	return rc;
}

int fs_kh_load(const struct fs_ssh_conf *c, struct fs_known_hosts **out, struct fs_errbuf *e)
{
	const struct fs_ssh_target *t = &c->target;
	bool alias = *t->host_key_alias != '\0';
	struct fs_known_hosts *k = create(alias ? t->host_key_alias : t->hostname, t->port, alias);
	if (!k)
		return fs_fail(e, FS_ENOMEM, "out of memory");
	for (int i = 0; i < c->n_known_files; i++) {
		int rc = add_file(k, c->known_files[i], e);
		if (rc && rc != FS_ENOTFOUND) {
			fs_kh_free(k);
			return rc;
		}
	}
	*out = k;
	return FS_OK;
}

void fs_kh_free(struct fs_known_hosts *k)
{
	if (!k)
		return;
	for (size_t i = 0; i < k->n; i++)
		free(k->entries[i].blob);
	free(k);
}

size_t fs_kh_bad_lines(const struct fs_known_hosts *k)
{
	return k->bad;
}

size_t fs_kh_count(const struct fs_known_hosts *k)
{
	return k->n;
}

static bool listed(const char *list, const char *word)
{
	size_t n = strlen(word);
	for (const char *s = list; (s = strstr(s, word)); s += n)
		if ((s == list || s[-1] == ',') && (s[n] == ',' || !s[n]))
			return true;
	return false;
}

static void add_method(char *out, size_t cap, const char *method)
{
	size_t n = strlen(out);
	if (!listed(out, method) && n + strlen(method) + 2 <= cap)
		snprintf(out + n, cap - n, "%s%s", n ? "," : "", method);
}

void fs_kh_method_pref(const struct fs_known_hosts *k, char *out, size_t cap)
{
	static const char *const all[] = {"ssh-ed25519", "ecdsa-sha2-nistp256", "ecdsa-sha2-nistp384",
	        "ecdsa-sha2-nistp521", "rsa-sha2-512", "rsa-sha2-256"};
	out[0] = '\0';
	for (size_t i = 0; i < k->n; i++) {
		const struct entry *en = &k->entries[i];
		if (en->marker != PLAIN)
			continue;
		if (!strcmp(en->type, "ssh-rsa")) { /* one key type, three signatures; the one that has its
			                               name is SHA-1's */
			add_method(out, cap, "rsa-sha2-512");
			add_method(out, cap, "rsa-sha2-256");
		}
		for (size_t j = 0; j < FS_ARRAY_LEN(all); j++)
			if (!strcmp(all[j], en->type))
				add_method(out, cap, all[j]);
	}
	for (size_t i = 0; i < FS_ARRAY_LEN(all); i++)
		add_method(out, cap, all[i]);
}

enum fs_kh_verdict fs_kh_check(
        const struct fs_known_hosts *k, const uint8_t *blob, size_t n, char *where, size_t cap)
{
	char type[64] = "";
	fs_ssh_blob_type(blob, n, type, sizeof(type));
	enum fs_kh_verdict v = FS_KH_UNKNOWN;
	const struct entry *why = NULL;
	for (size_t i = 0; i < k->n; i++) {
		const struct entry *en = &k->entries[i];
		bool same = en->n == n && CRYPTO_memcmp(en->blob, blob, n) == 0;
		enum fs_kh_verdict this;
		if (en->marker == REVOKED)
			this = same ? FS_KH_REVOKED : FS_KH_UNKNOWN;
		else if (en->marker == AUTHORITY)
			this = FS_KH_ONLY_CA;
		else if (same)
			this = FS_KH_MATCH;
		else if (en->by_name_only)
			this = FS_KH_UNKNOWN; /* the same machine may run another sshd on this port */
		else
			this = strcmp(en->type, type) ? FS_KH_OTHER_TYPE : FS_KH_CHANGED;
		/* revoked beats match beats changed beats other type beats authority beats nothing */
		static const int rank[] = {[FS_KH_UNKNOWN] = 0,
		        [FS_KH_ONLY_CA] = 1,
		        [FS_KH_OTHER_TYPE] = 2,
		        [FS_KH_CHANGED] = 3,
		        [FS_KH_MATCH] = 4,
		        [FS_KH_REVOKED] = 5};
		if (rank[this] > rank[v]) {
			v = this;
			why = en;
		}
	}
	if (where)
		snprintf(where, cap, "%s", why ? why->where : "");
	return v;
}
