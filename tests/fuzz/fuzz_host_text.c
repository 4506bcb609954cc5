/*
 * What a vision host says to `farsight host`, from arbitrary bytes: its authorized_keys, its settings, its
 * facts. An edit of authorized_keys is stable, and taking our line out leaves none of it.
 */
#include "server/cli/host.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

#define PUBLIC "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIOne farsight:me@here"
#define LINE "restrict,command=\"x" HOST_AGENT_MARK "\" " PUBLIC

static void edit(const void *text, size_t n, const char *line, struct fs_buf *out)
{
	size_t others;
	fs_buf_init(out, n + 4096);
	FS_ASSERT(host_keys_edit(n ? text : "", n, PUBLIC, line, out, &others, NULL) == FS_OK);
}

static void keys(const char *text, size_t n)
{
	struct fs_buf with, again, without;
	edit(text, n, LINE, &with);
	edit(with.data, with.len, LINE, &again);
	FS_ASSERT(again.len == with.len && memcmp(again.data, with.data, with.len) == 0);
	FS_ASSERT(memmem(with.data, with.len, LINE "\n", strlen(LINE) + 1));
	edit(with.data, with.len, NULL, &without);
	FS_ASSERT(without.len <= n + 1 &&
	          !(without.len && memmem(without.data, without.len, LINE "\n", strlen(LINE) + 1)));
	fs_buf_finish(&with);
	fs_buf_finish(&again);
	fs_buf_finish(&without);
}

static void settings(const char *text, size_t n)
{
	json_t *base = json_loadb(text, n, JSON_REJECT_DUPLICATES, NULL), *wanted, *out;
	wanted = json_pack("{s:s, s:n}", "mmproj", "/a", "model");
	char *changes;
	bool changed;
	struct fs_buf b = {(uint8_t *)(uintptr_t)text, n, n, n};
	char value[16];
	host_value(&b, "path", value, sizeof(value));
	if (base && host_json_merge(base, wanted, &out, &changes, NULL) == FS_OK) {
		free(changes);
		json_t *same;
		FS_ASSERT(host_json_merge(out, wanted, &same, &changes, NULL) == FS_OK && !changes);
		json_decref(same);
		json_decref(out);
	}
	json_t *entry = json_pack("{s:s}", "host", "box");
	if (base && host_config_add(base, entry, &changed, NULL) == FS_OK) {
		FS_ASSERT(host_config_add(base, entry, &changed, NULL) == FS_OK && !changed);
		FS_ASSERT(host_config_remove(base, "box", NULL) == FS_OK);
	}
	json_decref(entry);
	json_decref(base);
	json_decref(wanted);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
	if (n == 0 || n > 65536)
		return 0;
	char *text = malloc(n);
	FS_ASSERT(text);
	memcpy(text, data + 1, n - 1);
	text[n - 1] = '\0';
	if (data[0] & 1)
		keys(text, n - 1);
	else
		settings(text, n - 1);
	free(text);
	return 0;
}
