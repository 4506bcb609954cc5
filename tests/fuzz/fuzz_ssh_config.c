/* ssh_config and known_hosts from arbitrary bytes: the first byte chooses, the rest is the file. Include is
 * left to the tests. */
#include "server/ssh/internal.h"

#include <stdlib.h>
#include <string.h>
#include <strings.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static void config(const uint8_t *data, size_t n)
{
	static const char include[] = "include";
	for (size_t i = 0; i + sizeof(include) - 1 <= n; i++)
		if (!strncasecmp((const char *)data + i, include, sizeof(include) - 1))
			return; /* reads files */
	static struct fs_ssh_conf c;
	struct fs_errbuf e;
	struct fs_ssh_opts o = {.host = "gpu1.lan"};
	fs_ssh_conf_parse(&o, (const char *)data, n, &c, &e);
}

/* The first line is the name. */
static void name(const uint8_t *data, size_t n)
{
	static struct fs_ssh_conf c;
	struct fs_errbuf e;
	char *host = malloc(n + 1);
	if (!host)
		return;
	memcpy(host, data, n);
	host[n] = '\0';
	struct fs_ssh_opts o = {.host = host};
	fs_ssh_conf_parse(&o, "", 0, &c, &e);
	free(host);
}

static void known_hosts(const uint8_t *data, size_t n)
{
	struct fs_known_hosts *k = NULL;
	struct fs_errbuf e;
	char pref[256];
	static const uint8_t key[] = {0, 0, 0, 4, 't', 'e', 's', 't', 1};
	if (fs_kh_parse("gpu1", 2222, false, (const char *)data, n, &k, &e))
		return;
	fs_kh_method_pref(k, pref, sizeof(pref));
	fs_kh_check(k, key, sizeof(key), NULL, 0);
	fs_kh_free(k);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
	if (n < 1 || n > 65536)
		return 0;
	switch (data[0] % 3) {
	case 0:
		config(data + 1, n - 1);
		break;
	case 1:
		known_hosts(data + 1, n - 1);
		break;
	default:
		name(data + 1, n - 1);
		break;
	}
	return 0;
}
