/* Fuzz target: the server's settings: the first byte chooses a file or one assignment of the command line,
 * the rest is its text. What is taken is within the bounds of the table, and can be used. */
#include "server/vision/settings.h"
#include "server/vision/wol.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static void check_host(const struct fs_config_host *h)
{
	struct fs_wol w;
	uint8_t packet[FS_WOL_PACKET];

	FS_ASSERT(h->host && h->port >= 0 && h->port <= 65535);
	if (!h->wol || fs_wol_parse(h->wol, h->wol_broadcast, &w, NULL))
		return;
	FS_ASSERT(w.to_n > 0 && w.to_n <= sizeof(w.to));
	fs_wol_packet(w.mac, packet);
	FS_ASSERT(memcmp(packet + FS_WOL_PACKET - 6, w.mac, 6) == 0);
}

static void check(const struct fs_config *c)
{
	struct fs_vision_opts o;

	FS_ASSERT(c->vision.n_hosts <= FS_CONFIG_MAX_HOSTS && c->api_key.n <= FS_CONFIG_MAX_STRINGS);
	FS_ASSERT(c->workers > 0 && c->queue_depth >= 0 && c->max_body_mb > 0);
	FS_ASSERT(c->sampling.temperature >= 0 && c->sampling.top_p >= 0 && c->sampling.top_p <= 1);
	for (size_t i = 0; i < c->vision.n_hosts; i++)
		check_host(&c->vision.hosts[i]);
	fs_vision_opts_from_config(c, &o);
	FS_ASSERT(o.n_hosts == c->vision.n_hosts);
	fs_config_check(c, NULL);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
	struct fs_config c;
	struct fs_errbuf e = {""};
	char *text = n > 0 ? strndup((const char *)data + 1, n - 1) : NULL;

	if (!text)
		return 0;
	fs_config_init(&c);
	int rc = data[0] & 1 ? fs_config_set(&c, text, &e)
	                     : fs_config_parse(&c, (const char *)data + 1, n - 1, "fuzz.json", &e);
	FS_ASSERT(rc == FS_OK || e.text[0]);
	if (rc == FS_OK)
		check(&c);
	fs_config_finish(&c);
	free(text);
	return 0;
}
