/* "data:" URLs with base64. The decoding is OpenSSL's; here are the URL's grammar and the limits. */
#include "server/api/api.h"

#include <openssl/evp.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

/* What follows "data:" up to the comma must end in ";base64". */
static bool is_base64(const char *head, size_t n)
{
	static const char tail[] = ";base64";
	size_t t = sizeof(tail) - 1;
	return n >= t && strncasecmp(head + n - t, tail, t) == 0;
}

/* The base64 alphabet without white space; "%2B" and its like are decoded, "-" and "_" are the URL alphabet.
 * *len gets the count. */
static int collect(const char *s, size_t n, char *out, size_t *len)
{
	size_t w = 0;
	for (size_t i = 0; i < n; i++) {
		char c = s[i];
		if (c == '%') {
			char hex[3] = {i + 2 < n ? s[i + 1] : 0, i + 2 < n ? s[i + 2] : 0, 0}, *end;
			c = (char)strtol(hex, &end, 16);
			if (end != hex + 2)
				return FS_EINVAL;
			i += 2;
		}
		if (c == ' ' || c == '\t' || c == '\r' || c == '\n')
			continue;
		c = c == '-' ? '+' : c == '_' ? '/' : c;
		out[w++] = c;
	}
	while (w > 0 && out[w - 1] == '=')
		w--;
	*len = w;
	return FS_OK;
}

static int decode(char *text, size_t len, uint8_t *out, size_t *n)
{
	/* EVP_DecodeBlock wants whole groups: the missing padding is put back, and its zero bytes are taken
	 * off the count. */
	size_t pad = (4 - len % 4) % 4;
	if (pad == 3 || len == 0)
		return FS_EINVAL;
	memset(text + len, '=', pad);
	size_t total = len + pad;
	if (strspn(text, "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/") < len)
		return FS_EINVAL;
	int got = EVP_DecodeBlock(out, (const unsigned char *)text, (int)total);
	if (got < 0 || (size_t)got < pad)
		return FS_EINVAL;
	*n = (size_t)got - pad;
	return FS_OK;
}

static int too_large(size_t max, struct fs_errbuf *e)
{
	return fs_fail(e, FS_ELIMIT, "the picture is larger than this server's limit of %zu bytes", max);
}

int fs_base64_decode(
        const char *data, size_t n, size_t max, uint8_t **bytes, size_t *len, struct fs_errbuf *e)
{
	if (n > (size_t)1 << 30)
		return too_large(max, e);
	char *text = malloc(n + 5);
	uint8_t *out = malloc(n / 4 * 3 + 6);
	size_t text_len, got = 0;
	int rc = FS_OK;
	if (!text || !out) {
		rc = fs_fail(e, FS_ENOMEM, "out of memory");
	} else if (collect(data, n, text, &text_len)) {
		rc = FS_EINVAL;
	} else {
		text[text_len] = '\0';
		rc = decode(text, text_len, out, &got);
	}
	if (rc == FS_EINVAL)
		rc = fs_fail(e, FS_EINVAL, "the picture's base64 data is damaged or empty");
	if (!rc && got > max)
		rc = fs_fail(e, FS_ELIMIT, "the picture is %zu bytes large; this server's limit is %zu bytes",
		        got, max);
	free(text);
	if (rc) {
		free(out);
		return rc;
	}
	*bytes = out;
	*len = got;
	return FS_OK;
}

int fs_data_url_decode(
        const char *url, size_t n, size_t max, uint8_t **bytes, size_t *len, struct fs_errbuf *e)
{
	const char *comma = n > 5 && strncasecmp(url, "data:", 5) == 0 ? memchr(url, ',', n) : NULL;
	if (!comma || !is_base64(url + 5, (size_t)(comma - url) - 5))
		return fs_fail(e, FS_EINVAL, "a picture's data: URL must be data:<media type>;base64,<data>");
	return fs_base64_decode(comma + 1, n - (size_t)(comma + 1 - url), max, bytes, len, e);
}
