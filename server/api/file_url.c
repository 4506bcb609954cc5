/* "file:" URLs (RFC 8089) and plain paths of this machine. */
#include "server/api/api.h"

#include <stdlib.h>
#include <string.h>
#include <strings.h>

static int hex_digit(char c)
{
	return c >= '0' && c <= '9'   ? c - '0'
	       : c >= 'a' && c <= 'f' ? c - 'a' + 10
	       : c >= 'A' && c <= 'F' ? c - 'A' + 10
	                              : -1;
}

/* In place. No byte of a path is a NUL. */
static int decode(char *s)
{
	char *w = s;
	for (const char *r = s; *r; r++) {
		int c = (unsigned char)*r;
		if (c == '%') {
			int high = hex_digit(r[1]), low = high < 0 ? -1 : hex_digit(r[2]);
			c = low < 0 ? 0 : high * 16 + low;
			r += 2;
			if (c == 0)
				return FS_EINVAL;
		}
		*w++ = (char)c;
	}
	*w = '\0';
	return FS_OK;
}

/* Behind "file:": "//host/path" or "/path"; NULL when it is neither, or another machine's. */
static const char *path_of(const char *rest)
{
	static const char local[] = "localhost/";
	if (strncmp(rest, "//", 2) != 0)
		return rest[0] == '/' ? rest : NULL;
	rest += 2;
	if (strncasecmp(rest, local, sizeof(local) - 1) == 0)
		rest += sizeof(local) - 2;
	return rest[0] == '/' ? rest : NULL;
}

bool fs_file_url_is(const char *url)
{
	/* "/9j/" begins each JPEG in base64, which some clients send without a data: URL around it. */
	bool jpeg = strncmp(url, "/9j/", 4) == 0;
	return strncasecmp(url, "file:", 5) == 0 || (url[0] == '/' && !jpeg);
}

int fs_file_url_decode(const char *url, char **path, struct fs_errbuf *e)
{
	bool plain = url[0] == '/';
	const char *from = plain ? url : path_of(url + 5);
	if (!from)
		return fs_fail(e, FS_EINVAL, "must be file:///<absolute path> on this server's machine");
	char *copy = strdup(from);
	if (!copy)
		return fs_fail(e, FS_ENOMEM, "out of memory");
	if (!plain && decode(copy)) {
		free(copy);
		return fs_fail(e, FS_EINVAL, "holds a %% that stands before no two hexadecimal digits");
	}
	*path = copy;
	return FS_OK;
}
