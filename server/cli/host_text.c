/* Edits of authorized_keys and of configurations, as pure functions over text and JSON. */
#include "server/cli/host.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- authorized_keys ---- */

struct own_key { /* slices of a public key's line */
	const char *blob, *comment;
	size_t blob_n, comment_n;
};

static bool split_key(const char *line, struct own_key *k)
{
	k->blob = line + strcspn(line, " ");
	k->blob += strspn(k->blob, " ");
	k->blob_n = strcspn(k->blob, " \n");
	k->comment = k->blob + k->blob_n;
	k->comment += strspn(k->comment, " ");
	k->comment_n = strcspn(k->comment, "\n");
	return k->blob_n > 16;
}

const char *host_key_comment(const char *line, size_t *n)
{
	struct own_key k;
	bool is_key = split_key(line, &k);
	*n = is_key ? k.comment_n : 0;
	return is_key ? k.comment : "";
}

/* As a word of its own. */
static bool has_word(const char *line, size_t n, const char *word, size_t word_n)
{
	const char *s = line, *end = line + n;
	while ((s = memmem(s, (size_t)(end - s), word, word_n))) {
		const char *after = s + word_n;
		if ((s == line || s[-1] == ' ' || s[-1] == '\t') &&
		        (after == end || *after == ' ' || *after == '\t' || *after == '\r'))
			return true;
		s++;
	}
	return false;
}

bool host_comment_is_tagged(const char *comment, size_t n)
{
	static const char begin[] = "farsight:";
	if (n < sizeof(begin) + HOST_TAG || memcmp(comment, begin, sizeof(begin) - 1) != 0)
		return false;
	const char *tag = comment + n - HOST_TAG;
	if (tag[-1] != ':')
		return false;
	for (size_t i = 0; i < HOST_TAG; i++)
		if (!memchr("0123456789abcdef", tag[i], 16))
			return false;
	return !memchr(comment, ' ', n);
}

/* By the key; another key's line only by the tag, since names of users and machines are no one's alone. */
static bool is_ours(const char *line, size_t n, const struct own_key *k, bool *runs_agent)
{
	*runs_agent = *line != '#' && memmem(line, n, HOST_AGENT_MARK, strlen(HOST_AGENT_MARK));
	if (n == 0 || *line == '#')
		return false;
	if (has_word(line, n, k->blob, k->blob_n))
		return true;
	return *runs_agent && host_comment_is_tagged(k->comment, k->comment_n) && n > k->comment_n &&
	       line[n - k->comment_n - 1] == ' ' &&
	       memcmp(line + n - k->comment_n, k->comment, k->comment_n) == 0;
}

int host_keys_edit(const char *text, size_t n, const char *public_key, const char *line, struct fs_buf *out,
        size_t *others, struct fs_errbuf *e)
{
	struct own_key k;
	const char *end = text + n;
	bool placed = line == NULL;
	int rc = FS_OK;
	*others = 0;
	if (!split_key(public_key, &k))
		return fs_fail(e, FS_EINVAL, "that is no public key");
	while (text < end && !rc) {
		const char *nl = memchr(text, '\n', (size_t)(end - text));
		size_t len = nl ? (size_t)(nl - text) : (size_t)(end - text);
		bool runs_agent;
		if (is_ours(text, len, &k, &runs_agent)) {
			if (!placed)
				rc = fs_buf_printf(out, "%s\n", line);
			placed = true;
		} else {
			*others += runs_agent;
			rc = fs_buf_append(out, text, len);
			if (!rc && (nl || !placed)) /* a last line without its newline gets one before ours */
				rc = fs_buf_append_str(out, "\n");
		}
		text += len + (nl != NULL);
	}
	if (!rc && !placed)
		rc = fs_buf_printf(out, "%s\n", line);
	return rc ? fs_fail(e, rc, "authorized_keys is too long") : FS_OK;
}

/* ---- paths ---- */

int host_whole_path(const char *path, const char *folder, struct fs_buf *out)
{
	bool whole = *path == '/' || (*path == '~' && (path[1] == '/' || !path[1])) ||
	             (*path == '%' && path[1] == 'd') || (*path == '$' && path[1] == '{');
	int rc = FS_OK;
	for (const char *s = folder; !whole && *s && !rc; s++)
		rc = fs_buf_append(out, *s == '%' ? "%%" : s, *s == '%' ? 2 : 1);
	return rc ? rc : fs_buf_printf(out, "%s%s", whole ? "" : "/", path);
}

/* ---- hosts as a server shows them ---- */

static bool may_be(const json_t *shown, const struct fs_vision_host_opts *host)
{
	const char *name = json_string_value(json_object_get(shown, "host"));
	size_t n = strlen(host->host);
	if (!name || strncmp(name, host->host, n) != 0)
		return false;
	name += n;
	return !*name || !strncmp(name, " #", 2) || (*name == ':' && atoi(name + 1) == host->port);
}

const json_t *host_shown(const json_t *shown, const struct fs_vision_host_opts *hosts, size_t n, size_t i)
{
	const json_t *one, *alike = NULL;
	char name[128];
	size_t at;
	if (json_array_size(shown) == n && may_be(json_array_get(shown, i), &hosts[i]))
		return json_array_get(shown, i); /* they stand in the config's order */
	fs_vision_host_name(hosts, n, i, name, sizeof(name));
	json_array_foreach(shown, at, one)
	{
		const char *s = json_string_value(json_object_get(one, "host"));
		if (s && !strcmp(s, name))
			return one;
		if (!alike && may_be(one, &hosts[i]))
			alike = one;
	}
	for (at = 0; at < i; at++) /* what is alike is the first one's of that name */
		if (strcmp(hosts[at].host, hosts[i].host) == 0)
			return NULL;
	return alike;
}

bool host_is_settled(const json_t *shown, double since_reload_s)
{
	const char *state = json_string_value(json_object_get(shown, "state"));
	double age = json_number_value(json_object_get(shown, "state_age_s"));
	if (!state || strcmp(state, "down") != 0)
		return state && !strcmp(state, "up");
	return age >= 1 && age < since_reload_s;
}

/* ---- JSON objects ---- */

static void say_change(struct fs_buf *b, const char *name, const json_t *from, const json_t *to)
{
	char *a = from ? json_dumps(from, JSON_ENCODE_ANY | JSON_COMPACT) : NULL;
	char *z = to ? json_dumps(to, JSON_ENCODE_ANY | JSON_COMPACT) : NULL;
	fs_buf_printf(b, "%s\"%s\": %s -> %s", b->len ? "; " : "", name, a ? a : "(none)", z ? z : "(none)");
	free(a);
	free(z);
}

int host_json_merge(
        const json_t *base, const json_t *wanted, json_t **out, char **changes, struct fs_errbuf *e)
{
	struct fs_buf b;
	const char *name;
	json_t *v, *copy = base ? json_deep_copy(base) : json_object();
	if (!json_is_object(copy)) {
		json_decref(copy);
		return fs_fail(e, FS_EFORMAT, "it does not hold one JSON object");
	}
	fs_buf_init(&b, 65536);
	json_object_foreach((json_t *)wanted, name, v)
	{
		json_t *now = json_object_get(copy, name), *then = json_is_null(v) ? NULL : v;
		if (now == then || (now && then && json_equal(now, then)))
			continue;
		say_change(&b, name, now, then);
		if (then)
			json_object_set(copy, name, then);
		else
			json_object_del(copy, name);
	}
	*changes = b.len ? fs_buf_take(&b, NULL) : NULL;
	fs_buf_finish(&b);
	*out = copy;
	return FS_OK;
}

/* ---- the server's config ---- */

static const char *name_of(const json_t *host)
{
	const char *s = json_is_string(host) ? json_string_value(host)
	                                     : json_string_value(json_object_get(host, "host"));
	return s ? s : "";
}

/* "vision.hosts" as an array, whatever it was. NULL when it is none of what a config may hold. */
static json_t *hosts_of(json_t *vision)
{
	json_t *hosts = json_object_get(vision, "hosts");
	if (json_is_array(hosts))
		return hosts;
	if (hosts && !json_is_string(hosts) && !json_is_object(hosts))
		return NULL;
	json_t *list = json_array();
	if (hosts)
		json_array_append(list, hosts);
	json_object_set_new(vision, "hosts", list);
	return list;
}

static size_t find_host(const json_t *hosts, const char *name)
{
	size_t i = 0;
	while (i < json_array_size(hosts) && strcmp(name_of(json_array_get(hosts, i)), name) != 0)
		i++;
	return i;
}

int host_config_add(json_t *config, const json_t *entry, bool *changed, struct fs_errbuf *e)
{
	json_t *before = json_deep_copy(config), *vision = json_object_get(config, "vision");
	if (!json_is_object(config) || (vision && !json_is_object(vision))) {
		json_decref(before);
		return fs_fail(e, FS_EFORMAT, "it is no config of a server");
	}
	if (!vision)
		json_object_set_new(config, "vision", vision = json_object());
	const char *mmproj = json_string_value(json_object_get(vision, "mmproj"));
	json_t *hosts = hosts_of(vision);
	if (mmproj || !hosts) {
		json_decref(before);
		return mmproj ? fs_fail(e, FS_EINVAL,
		                        "its \"vision.mmproj\" (%s) asks for an encoder on this machine, and "
		                        "a server has "
		                        "one kind of vision; remove that key to use vision hosts",
		                        mmproj)
		              : fs_fail(e, FS_EFORMAT,
		                        "its \"vision.hosts\" is neither string, object nor array");
	}
	if (!json_object_get(vision, "remote") || !json_is_true(json_object_get(vision, "remote")))
		json_object_set_new(vision, "remote", json_true());
	size_t i = find_host(hosts, name_of(entry));
	if (i == json_array_size(hosts)) {
		json_array_append_new(hosts, json_deep_copy(entry));
	} else if (json_is_string(json_array_get(hosts, i))) {
		json_array_set_new(hosts, i, json_deep_copy(entry));
	} else { /* what else the admin wrote into it stays, but for the command: the key's own one runs */
		json_t *merged = json_deep_copy(json_array_get(hosts, i));
		json_object_update(merged, (json_t *)entry);
		json_object_del(merged, "command");
		json_array_set_new(hosts, i, merged);
	}
	*changed = !json_equal(before, config);
	json_decref(before);
	return FS_OK;
}

int host_config_remove(json_t *config, const char *name, struct fs_errbuf *e)
{
	json_t *vision = json_object_get(config, "vision");
	json_t *hosts = json_is_object(vision) ? hosts_of(vision) : NULL;
	size_t i = hosts ? find_host(hosts, name) : 0;
	if (!hosts || i == json_array_size(hosts))
		return fs_fail(e, FS_ENOTFOUND, "it names no vision host \"%s\"", name);
	json_array_remove(hosts, i);
	if (json_array_size(hosts) == 0) { /* "remote" without hosts would keep the server from starting */
		json_object_del(vision, "hosts");
		json_object_del(vision, "remote");
		if (json_object_size(vision) == 0)
			json_object_del(config, "vision");
	}
	return FS_OK;
}
