/* The table of keys, and reading JSON through it. Runs on the main thread before any other starts. */
#include "server/config/config.h"

#include <jansson.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum type { T_STRING, T_INT, T_REAL, T_BOOL, T_STRINGS };

struct key {
	const char *name; /* "vision.remote": an object and its member */
	enum type type;
	size_t offset;
	double min, max;      /* T_INT and T_REAL */
	const char *fallback; /* the default, as JSON */
	const char *words;    /* T_STRING: allowed values, separated by '|'; NULL = any */
	const char *help;
};

#define AT(field) offsetof(struct fs_config, field)

static const struct key keys[] = {
        {"model", T_STRING, AT(model), 0, 0, "null", NULL,
                "Path of the text model, a GGUF file (a split model: its first part). Required."},
        {"name", T_STRING, AT(name), 0, 0, "null", NULL,
                "The model's name in answers and in /v1/models. Default: the name inside the file."},
        {"listen", T_STRING, AT(listen), 0, 0, "\"127.0.0.1:8080\"", NULL,
                "Address and port of the HTTP API; port 0 takes a free one and logs it."},
        {"api_key", T_STRINGS, AT(api_key), 0, 0, "null", NULL,
                "Keys of which every request but GET /health must carry one, as \"Authorization: Bearer "
                "KEY\" or "
                "\"x-api-key: KEY\". Without: the checks of Host and Origin described in docs/API.md."},
        {"open_to_network_without_key", T_BOOL, AT(open_to_network_without_key), 0, 0, "false", NULL,
                "Allows a \"listen\" that other machines can reach although there is no api_key."},
        {"allowed_hosts", T_STRINGS, AT(allowed_hosts), 0, 0, "null", NULL,
                "Host names by which clients reach the server, beside addresses, localhost and that of "
                "listen: "
                "\"name\", \".name\" for it and all below it, \"*\" for any. Looked at without an api_key."},
        {"cors_origins", T_STRINGS, AT(cors_origins), 0, 0, "null", NULL,
                "Origins of web pages that may use the server: \"https://app.example\", or \"*\" for any."},
        {"max_connections", T_INT, AT(max_connections), 1, 65536, "512", NULL,
                "Connections open at once; past it the answer is 503."},
        {"max_bodies_mb", T_INT, AT(max_bodies_mb), 1, 65536, "256", NULL,
                "MiB of all request bodies in memory at once; past it the answer is 503."},
        {"read_timeout_s", T_INT, AT(read_timeout_s), 1, 3600, "60", NULL,
                "Seconds in which a request must have arrived whole, from its first byte on; then 408."},
        {"peer_timeout_s", T_INT, AT(peer_timeout_s), 1, 3600, "30", NULL,
                "Seconds after which a client that acknowledges nothing (power or network lost) is taken for "
                "gone."},
        {"device", T_STRING, AT(device), 0, 0, "\"auto\"", NULL,
                "Where the text model runs: \"cpu\", \"cuda\", \"cuda:N\", or \"auto\", a GPU when there is "
                "one that "
                "will do."},
        {"threads", T_INT, AT(threads), 0, 1024, "0", NULL,
                "CPU threads of the engine; 0 = the cores this process may use."},
        {"context", T_INT, AT(context), 0, 1 << 24, "0", NULL,
                "Context in tokens; 0 = the smaller of the model's own and 8192."},
        {"chat_template", T_STRING, AT(chat_template), 0, 0, "null", "chatml|llama3|mistral|gemma|vicuna",
                "Chooses the chat template's family when the model's own is not recognised."},
        {"log_level", T_STRING, AT(log_level), 0, 0, "\"info\"", "error|warn|info|debug",
                "How much is logged to stderr."},
        {"timeout_s", T_INT, AT(timeout_s), 1, 86400, "600", NULL,
                "Seconds a request may take in all; then it is cancelled."},
        {"drain_s", T_INT, AT(drain_s), 0, 3600, "5", NULL,
                "Seconds that running answers get after the first SIGINT or SIGTERM."},
        {"workers", T_INT, AT(workers), 1, 4096, "128", NULL,
                "Requests at once, most of which wait for pictures or for the engine; past it the answer is "
                "503."},
        {"queue_depth", T_INT, AT(queue_depth), 1, 4096, "64", NULL,
                "Requests that may wait for the engine; past it the answer is 503."},
        {"max_body_mb", T_INT, AT(max_body_mb), 1, 1024, "64", NULL, "Largest request body in MiB."},
        {"max_pictures", T_INT, AT(max_pictures), 0, 256, "16", NULL, "Most pictures in one request."},
        {"max_picture_mb", T_INT, AT(max_picture_mb), 1, 64, "20", NULL,
                "Largest picture in MiB, as encoded."},
        {"max_picture_mpx", T_INT, AT(max_picture_mpx), 1, 64, "50", NULL,
                "Largest picture in million pixels, of which a side may have 16384."},
        {"picture_folders", T_STRINGS, AT(picture_folders), 0, 0, "null", NULL,
                "Folders of this machine, absolute paths, whose files requests may name as pictures, by "
                "path or file: URL, and every client may so see. Without: no file is read."},
        {"sampling.temperature", T_REAL, AT(sampling.temperature), 0, 10, "0.8", NULL,
                "Used when a request gives none; 0 = always the likeliest token."},
        {"sampling.top_k", T_INT, AT(sampling.top_k), 0, 1 << 20, "40", NULL, "As above; 0 = off."},
        {"sampling.top_p", T_REAL, AT(sampling.top_p), 0, 1, "0.95", NULL, "As above; 1 = off."},
        {"sampling.min_p", T_REAL, AT(sampling.min_p), 0, 1, "0.05", NULL, "As above; 0 = off."},
        {"sampling.repeat_penalty", T_REAL, AT(sampling.repeat_penalty), 0.01, 10, "1", NULL,
                "As above; 1 = off."},
        {"cache_mb", T_INT, AT(cache_mb), 0, 1 << 20, "256", NULL,
                "MiB that the rows of pictures seen lately may take; 0 = none are kept."},
        {"vision.remote", T_BOOL, AT(vision.remote), 0, 0, "false", NULL,
                "Pictures are encoded on the vision hosts of vision.hosts. Without it and without "
                "vision.mmproj pictures are refused."},
        {"vision.mmproj", T_STRING, AT(vision.mmproj), 0, 0, "null", NULL,
                "Path of an mmproj, a GGUF file: pictures are encoded on this machine."},
        {"vision.exe", T_STRING, AT(vision.exe), 0, 0, "null", NULL,
                "The encoder on this machine, any program of the line protocol; default: the "
                "farsight-encoder beside farsight-server, else the one in PATH."},
        {"vision.extended", T_STRING, AT(vision.extended), 0, 0, "\"auto\"", "auto|on|off",
                "Whether that encoder knows --extended; \"auto\": farsight-encoder does."},
        {"vision.device", T_STRING, AT(vision.device), 0, 0, "null", NULL,
                "Where that encoder works: \"cpu\", \"cuda\", \"cuda:N\" (N in PCI bus order), or \"auto\", "
                "a GPU "
                "when there is one that will do. On a GPU its pictures queue with the answers. Default: as "
                "vision.gpu says."},
        {"vision.gpu", T_BOOL, AT(vision.gpu), 0, 0, "false", NULL,
                "true is \"device\": \"cuda\" for that encoder, false \"cpu\"."},
        {"vision.threads", T_INT, AT(vision.threads), 0, 1024, "0", NULL,
                "CPU threads of that encoder; 0 = its own choice."},
        {"vision.elastic", T_BOOL, AT(vision.elastic), 0, 0, "false", NULL,
                "That encoder is started by the first picture and ended when it has none for a while."},
        {"vision.elastic_idle_s", T_INT, AT(vision.elastic_idle_s), 1, 604800, "300", NULL,
                "Seconds without a picture after which an elastic encoder is ended."},
        {"vision.ready_timeout_s", T_INT, AT(vision.ready_timeout_s), 1, 86400, "300", NULL,
                "Seconds that encoder may take to start."},
        {"vision.max_tokens", T_INT, AT(vision.max_tokens), 0, 65536, "0", NULL,
                "Most rows of a picture, on this machine or on vision hosts; 0 = the encoder's own."},
        {"vision.min_tokens", T_INT, AT(vision.min_tokens), 0, 65536, "0", NULL,
                "Fewest rows of a picture; 0 = the encoder's own."},
        {"vision.fingerprint", T_STRING, AT(vision.fingerprint), 0, 0, "null", NULL,
                "Fingerprint of the mmproj that hosts must have; default: any whose rows fit the text "
                "model."},
        {"vision.rows_dtype", T_STRING, AT(vision.rows_dtype), 0, 0, "\"f32\"", "f32|f16",
                "How rows cross the network; f16 halves the bytes."},
        {"vision.connect_timeout_s", T_INT, AT(vision.connect_timeout_s), 1, 300, "3", NULL,
                "Seconds to reach a host, ssh handshake included."},
        {"vision.encode_timeout_s", T_INT, AT(vision.encode_timeout_s), 1, 86400, "300", NULL,
                "Seconds one encode may take, its wait on the host included."},
        {"vision.ping_interval_s", T_INT, AT(vision.ping_interval_s), 1, 3600, "5", NULL,
                "Seconds between two pings on a quiet channel."},
        {"vision.dead_after_s", T_INT, AT(vision.dead_after_s), 2, 3600, "15", NULL,
                "Seconds of silence after which a host is taken for gone."},
        {"vision.hedge", T_REAL, AT(vision.hedge), 0, 100, "0", NULL,
                "A picture that takes so many times as long as usual on its host is also given to a second "
                "host, and the first answer is taken; 0 = never."},
        {"vision.wol_wait_s", T_INT, AT(vision.wol_wait_s), 0, 600, "0", NULL,
                "Seconds that pictures wait for a host that was sent a wake-up packet, from the packet on; 0 "
                "= they are refused meanwhile."},
        {"fetch.enabled", T_BOOL, AT(fetch.enabled), 0, 0, "true", NULL,
                "Pictures may be named by http: and https: URLs, which the server fetches: from public "
                "addresses, and what fetch.allow names."},
        {"fetch.allow", T_STRINGS, AT(fetch.allow), 0, 0, "null", NULL,
                "What may have an address that is not public: \"nas.local\", \"nas.local:8000\", "
                "\"192.168.1.5\", \"[fd00::5]:8000\", \"192.168.1.0/24\"."},
        {"fetch.timeout_s", T_INT, AT(fetch.timeout_s), 1, 3600, "20", NULL,
                "Seconds one picture may take to fetch, redirects and its wait included."},
        {"fetch.max_redirects", T_INT, AT(fetch.max_redirects), 0, 20, "3", NULL,
                "Most redirects followed for one picture."},
        {"fetch.max_active", T_INT, AT(fetch.max_active), 1, 256, "16", NULL,
                "Pictures fetched at once, of all requests. So many of max_picture_mb fit in memory."},
        {"streams.ring_kb", T_INT, AT(streams.ring_kb), 64, 1 << 20, "4096", NULL,
                "KiB of one conversation's answer that are kept for clients that come back; the oldest go "
                "first."},
        {"streams.total_mb", T_INT, AT(streams.total_mb), 1, 65536, "256", NULL,
                "MiB of all such answers together; those that ended first make room."},
        {"streams.keep_s", T_INT, AT(streams.keep_s), 1, 86400, "300", NULL,
                "Seconds that a finished answer is kept."},
        {"streams.max", T_INT, AT(streams.max), 1, 65536, "4096", NULL,
                "Conversations that are kept, running ones included."},
};

/* The members of one element of vision.hosts. */
static const struct {
	const char *name;
	size_t offset;
	bool is_port;
	const char *help;
} host_keys[] = {
        {"host", offsetof(struct fs_config_host, host), false,
                "Alias of ~/.ssh/config, host, user@host or user@host:port. Required."},
        {"port", offsetof(struct fs_config_host, port), true,
                "ssh port; default: from ~/.ssh/config, else 22."},
        {"identity", offsetof(struct fs_config_host, identity), false,
                "Private key file, tried before those of ~/.ssh/config and the agent."},
        {"known_hosts", offsetof(struct fs_config_host, known_hosts), false,
                "Known-hosts file used instead of ~/.ssh/known_hosts."},
        {"ssh_config", offsetof(struct fs_config_host, ssh_config), false,
                "File read instead of ~/.ssh/config."},
        {"command", offsetof(struct fs_config_host, command), false,
                "What the ssh channel executes; default farsight-agent."},
        {"wol", offsetof(struct fs_config_host, wol), false,
                "MAC address for wake-on-LAN: a picture that no host can take sends it a wake-up packet."},
        {"wol_broadcast", offsetof(struct fs_config_host, wol_broadcast), false,
                "Where that packet goes, address or address:port; default 255.255.255.255, port 9."},
};

static void *field(struct fs_config *c, size_t offset)
{
	return (char *)c + offset;
}

static int set_string(char **dst, const char *s, struct fs_errbuf *e)
{
	char *copy = s ? strdup(s) : NULL;
	if (s && !copy)
		return fs_fail(e, FS_ENOMEM, "out of memory");
	free(*dst);
	*dst = copy;
	return FS_OK;
}

static bool is_word(const char *words, const char *s)
{
	size_t n = strlen(s);
	for (const char *w = words; *w;) {
		size_t len = strcspn(w, "|");
		if (len == n && memcmp(w, s, n) == 0)
			return true;
		w += len + (w[len] == '|');
	}
	return false;
}

static void finish_strings(struct fs_config_strings *l)
{
	for (size_t i = 0; i < l->n; i++)
		free(l->items[i]);
	*l = (struct fs_config_strings){0};
}

/* A string stands for a list of one. */
static int set_strings(struct fs_config_strings *l, const char *name, const json_t *v, struct fs_errbuf *e)
{
	size_t n = json_is_array(v) ? json_array_size(v) : json_is_null(v) ? 0 : 1;
	if (n > FS_CONFIG_MAX_STRINGS)
		return fs_fail(
		        e, FS_ELIMIT, "\"%s\" holds more than %d strings", name, FS_CONFIG_MAX_STRINGS);
	finish_strings(l);
	for (size_t i = 0; i < n; i++) {
		const json_t *one = json_is_array(v) ? json_array_get(v, i) : v;
		if (!json_is_string(one) || strlen(json_string_value(one)) != json_string_length(one))
			return fs_fail(e, FS_EINVAL, "\"%s\" must be a string or an array of strings", name);
		int rc = set_string(&l->items[l->n], json_string_value(one), e);
		if (rc)
			return rc;
		l->n++;
	}
	return FS_OK;
}

static int set_key(struct fs_config *c, const struct key *k, const json_t *v, struct fs_errbuf *e)
{
	void *dst = field(c, k->offset);
	switch (k->type) {
	case T_STRING:
		if (json_is_null(v))
			return set_string(dst, NULL, e);
		if (!json_is_string(v) || strlen(json_string_value(v)) != json_string_length(v))
			return fs_fail(e, FS_EINVAL, "\"%s\" must be a string", k->name);
		if (k->words && !is_word(k->words, json_string_value(v)))
			return fs_fail(e, FS_EINVAL, "\"%s\" must be one of %s, not \"%s\"", k->name,
			        k->words, json_string_value(v));
		return set_string(dst, json_string_value(v), e);
	case T_BOOL:
		if (!json_is_boolean(v))
			return fs_fail(e, FS_EINVAL, "\"%s\" must be true or false", k->name);
		*(bool *)dst = json_is_true(v);
		return FS_OK;
	case T_INT:
		if (!json_is_integer(v) || (double)json_integer_value(v) < k->min ||
		        (double)json_integer_value(v) > k->max)
			return fs_fail(e, FS_EINVAL, "\"%s\" must be a whole number from %.0f to %.0f",
			        k->name, k->min, k->max);
		*(int64_t *)dst = json_integer_value(v);
		return FS_OK;
	case T_REAL:
		if (!json_is_number(v) || !(json_number_value(v) >= k->min && json_number_value(v) <= k->max))
			return fs_fail(e, FS_EINVAL, "\"%s\" must be a number from %g to %g", k->name, k->min,
			        k->max);
		*(double *)dst = json_number_value(v);
		return FS_OK;
	case T_STRINGS:
		return set_strings(dst, k->name, v, e);
	}
	return FS_EINVAL;
}

static void finish_host(struct fs_config_host *h)
{
	free(h->host);
	free(h->identity);
	free(h->known_hosts);
	free(h->ssh_config);
	free(h->command);
	free(h->wol);
	free(h->wol_broadcast);
	*h = (struct fs_config_host){0};
}

static void finish_hosts(struct fs_config *c)
{
	for (size_t i = 0; i < c->vision.n_hosts; i++)
		finish_host(&c->vision.hosts[i]);
	c->vision.n_hosts = 0;
}

static int unknown_key(
        const char *where, const char *leaf, const char *nearest, bool is_near, struct fs_errbuf *e)
{
	return is_near ? fs_fail(e, FS_EINVAL, "unknown key \"%s%s\"; did you mean \"%s\"?", where, leaf,
	                         nearest)
	               : fs_fail(e, FS_EINVAL,
	                         "unknown key \"%s%s\"; the nearest known one is \"%s\", and docs/CONFIG.md "
	                         "lists all",
	                         where, leaf, nearest);
}

static int set_host_member(struct fs_config_host *h, const char *name, const json_t *v, struct fs_errbuf *e)
{
	const char *known[FS_ARRAY_LEN(host_keys)];
	for (size_t i = 0; i < FS_ARRAY_LEN(host_keys); i++) {
		known[i] = host_keys[i].name;
		if (strcmp(known[i], name) != 0)
			continue;
		void *dst = (char *)h + host_keys[i].offset;
		if (host_keys[i].is_port) {
			if (!json_is_integer(v) || json_integer_value(v) < 1 || json_integer_value(v) > 65535)
				return fs_fail(e, FS_EINVAL,
				        "\"vision.hosts[].port\" must be a whole number from 1 to 65535");
			*(int64_t *)dst = json_integer_value(v);
			return FS_OK;
		}
		if (!json_is_string(v))
			return fs_fail(e, FS_EINVAL, "\"vision.hosts[].%s\" must be a string", name);
		return set_string(dst, json_string_value(v), e);
	}
	const char *best = fs_nearest_word(name, known, FS_ARRAY_LEN(known));
	char nearest[64];
	snprintf(nearest, sizeof(nearest), "vision.hosts[].%s", best);
	return unknown_key("vision.hosts[].", name, nearest, fs_word_is_near(name, best), e);
}

static int add_host(struct fs_config *c, const json_t *v, struct fs_errbuf *e)
{
	if (c->vision.n_hosts == FS_CONFIG_MAX_HOSTS)
		return fs_fail(
		        e, FS_ELIMIT, "\"vision.hosts\" holds more than %d hosts", FS_CONFIG_MAX_HOSTS);
	struct fs_config_host *h = &c->vision.hosts[c->vision.n_hosts++];
	*h = (struct fs_config_host){0};
	if (json_is_string(v))
		return set_string(&h->host, json_string_value(v), e);
	if (!json_is_object(v))
		return fs_fail(e, FS_EINVAL, "an element of \"vision.hosts\" must be a string or an object");
	const char *name;
	json_t *m;
	json_object_foreach((json_t *)v, name, m)
	{
		int rc = set_host_member(h, name, m, e);
		if (rc)
			return rc;
	}
	if (!h->host || !*h->host)
		return fs_fail(e, FS_EINVAL, "an element of \"vision.hosts\" lacks \"host\"");
	return FS_OK;
}

static int set_hosts(struct fs_config *c, const json_t *v, struct fs_errbuf *e)
{
	finish_hosts(c);
	if (!json_is_array(v))
		return add_host(c, v, e);
	for (size_t i = 0; i < json_array_size(v); i++) {
		int rc = add_host(c, json_array_get(v, i), e);
		if (rc)
			return rc;
	}
	return FS_OK;
}

struct mistake {
	char nearest[64]; /* the known key, in full */
	size_t distance;  /* of the last parts, twice; odd where it stands elsewhere */
	bool is_near;
};

/* A candidate for what was meant by leaf in where; it may stand elsewhere. */
static void consider(const char *where, const char *leaf, const char *name, size_t n, struct mistake *m)
{
	char candidate[sizeof(m->nearest)];
	snprintf(candidate, sizeof(candidate), "%.*s", (int)n, name);
	const char *dot = strrchr(candidate, '.'), *word = dot ? dot + 1 : candidate;
	size_t place = (size_t)(word - candidate);
	bool here = place == strlen(where) && strncmp(candidate, where, place) == 0;
	size_t d = 2 * fs_word_distance(leaf, word) + !here;
	if (d >= m->distance)
		return;
	m->distance = d;
	m->is_near = fs_word_is_near(leaf, word);
	memcpy(m->nearest, candidate, sizeof(candidate));
}

/* Keys, and the objects that hold them. */
static int mistyped(const char *where, const char *leaf, struct fs_errbuf *e)
{
	struct mistake m = {.distance = SIZE_MAX};
	for (size_t i = 0; i < FS_ARRAY_LEN(keys); i++) {
		consider(where, leaf, keys[i].name, strlen(keys[i].name), &m);
		if (strchr(keys[i].name, '.'))
			consider(where, leaf, keys[i].name, strcspn(keys[i].name, "."), &m);
	}
	consider(where, leaf, "vision.hosts", strlen("vision.hosts"), &m);
	return unknown_key(where, leaf, m.nearest, m.is_near, e);
}

/* name is the full dotted key; where and leaf are its parts, for the error. */
static int set_by_name(
        struct fs_config *c, const char *where, const char *leaf, const json_t *v, struct fs_errbuf *e)
{
	char name[128];
	snprintf(name, sizeof(name), "%s%s", where, leaf);
	if (strcmp(name, "vision.hosts") == 0)
		return set_hosts(c, v, e);
	for (size_t i = 0; i < FS_ARRAY_LEN(keys); i++)
		if (strcmp(keys[i].name, name) == 0)
			return set_key(c, &keys[i], v, e);
	return mistyped(where, leaf, e);
}

static bool is_section(const char *name)
{
	size_t n = strlen(name);
	for (size_t i = 0; i < FS_ARRAY_LEN(keys); i++)
		if (strncmp(keys[i].name, name, n) == 0 && keys[i].name[n] == '.')
			return true;
	return false;
}

static int set_object(struct fs_config *c, const char *where, const json_t *o, struct fs_errbuf *e)
{
	const char *name;
	json_t *v;
	json_object_foreach((json_t *)o, name, v)
	{
		int rc;
		if (!*where && is_section(name)) {
			char section[64];
			if (!json_is_object(v))
				return fs_fail(e, FS_EINVAL, "\"%s\" must be an object", name);
			snprintf(section, sizeof(section), "%s.", name);
			rc = set_object(c, section, v, e);
		} else {
			rc = set_by_name(c, where, name, v, e);
		}
		if (rc)
			return rc;
	}
	return FS_OK;
}

void fs_config_init(struct fs_config *c)
{
	memset(c, 0, sizeof(*c));
	for (size_t i = 0; i < FS_ARRAY_LEN(keys); i++) {
		json_t *v = json_loads(keys[i].fallback, JSON_DECODE_ANY, NULL);
		FS_ASSERT(v && set_key(c, &keys[i], v, NULL) == FS_OK);
		json_decref(v);
	}
}

void fs_config_finish(struct fs_config *c)
{
	for (size_t i = 0; i < FS_ARRAY_LEN(keys); i++) {
		if (keys[i].type == T_STRING)
			set_string(field(c, keys[i].offset), NULL, NULL);
		else if (keys[i].type == T_STRINGS)
			finish_strings(field(c, keys[i].offset));
	}
	finish_hosts(c);
}

int fs_config_parse(struct fs_config *c, const char *json, size_t n, const char *from, struct fs_errbuf *e)
{
	json_error_t je;
	json_t *root = json_loadb(json, n, JSON_REJECT_DUPLICATES, &je);
	if (!root) { /* without what stands there: it may be a key, and a running server tells its clients */
		const char *quote = strstr(je.text, " near '");
		return fs_fail(e, FS_EFORMAT, "%s, line %d, column %d: %.*s", from, je.line, je.column,
		        quote ? (int)(quote - je.text) : (int)sizeof(je.text), je.text);
	}
	int rc = json_is_object(root) ? set_object(c, "", root, e)
	                              : fs_fail(e, FS_EFORMAT, "must be a JSON object");
	json_decref(root);
	return rc ? fs_fail_prefix(e, rc, "%s", from) : FS_OK;
}

int fs_config_load(struct fs_config *c, const char *path, struct fs_errbuf *e)
{
	FILE *f = fopen(path, "re");
	if (!f)
		return fs_fail_errno(e, FS_EIO, "can not open the config %s", path);
	struct fs_buf b;
	fs_buf_init(&b, 1 << 20);
	char chunk[4096];
	size_t n;
	int rc = FS_OK;
	while (!rc && (n = fread(chunk, 1, sizeof(chunk), f)) > 0)
		rc = fs_buf_append(&b, chunk, n);
	if (rc)
		rc = fs_fail(e, FS_ELIMIT, "%s is larger than 1 MiB", path);
	else if (ferror(f))
		rc = fs_fail_errno(e, FS_EIO, "can not read the config %s", path);
	else
		rc = fs_config_parse(c, b.data ? (char *)b.data : "", b.len, path, e);
	fclose(f);
	fs_buf_finish(&b);
	return rc;
}

/* Keys of strings take a number or "true" on the command line as the text that it is. */
static bool is_plain_text(const char *name, const json_t *v)
{
	for (size_t i = 0; i < FS_ARRAY_LEN(keys); i++) {
		if (strcmp(keys[i].name, name) != 0)
			continue;
		if (keys[i].type == T_STRINGS && json_is_array(v))
			return false;
		return (keys[i].type == T_STRING || keys[i].type == T_STRINGS) && !json_is_string(v) &&
		       !json_is_null(v);
	}
	return false;
}

int fs_config_set(struct fs_config *c, const char *assignment, struct fs_errbuf *e)
{
	const char *eq = strchr(assignment, '=');
	if (!eq || eq - assignment > 100)
		return fs_fail(e, FS_EINVAL, "--set takes key=value, not \"%s\"", assignment);
	char name[101];
	snprintf(name, sizeof(name), "%.*s", (int)(eq - assignment), assignment);
	json_t *v = json_loads(eq + 1, JSON_DECODE_ANY, NULL);
	if (!v || is_plain_text(name, v)) {
		json_decref(v);
		v = json_string(eq + 1);
	}
	if (!v)
		return fs_fail(e, FS_EINVAL, "the value of \"%s\" is not UTF-8", name);
	char where[101] = "", *dot = strchr(name, '.');
	const char *leaf = name;
	if (dot) {
		snprintf(where, sizeof(where), "%.*s", (int)(dot + 1 - name), name);
		leaf = dot + 1;
	}
	int rc = set_by_name(c, where, leaf, v, e);
	json_decref(v);
	return rc ? fs_fail_prefix(e, rc, "--set") : FS_OK;
}

/* ---- what differs ---- */

static bool same_text(const char *a, const char *b)
{
	return a && b ? strcmp(a, b) == 0 : a == b;
}

static bool same_strings(const struct fs_config_strings *a, const struct fs_config_strings *b)
{
	bool same = a->n == b->n;
	for (size_t i = 0; same && i < a->n; i++)
		same = strcmp(a->items[i], b->items[i]) == 0;
	return same;
}

static bool same_key(const struct key *k, const void *a, const void *b)
{
	switch (k->type) {
	case T_STRING:
		return same_text(*(char *const *)a, *(char *const *)b);
	case T_BOOL:
		return *(const bool *)a == *(const bool *)b;
	case T_INT:
		return *(const int64_t *)a == *(const int64_t *)b;
	case T_REAL:
		return memcmp(a, b, sizeof(double)) == 0;
	case T_STRINGS:
		return same_strings(a, b);
	}
	return false;
}

static bool same_host(const struct fs_config_host *a, const struct fs_config_host *b)
{
	for (size_t i = 0; i < FS_ARRAY_LEN(host_keys); i++) {
		const void *x = (const char *)a + host_keys[i].offset,
		           *y = (const char *)b + host_keys[i].offset;
		if (host_keys[i].is_port ? *(const int64_t *)x != *(const int64_t *)y
		                         : !same_text(*(char *const *)x, *(char *const *)y))
			return false;
	}
	return true;
}

void fs_config_diff(const struct fs_config *a, const struct fs_config *b,
        void (*differs)(void *arg, const char *key), void *arg)
{
	for (size_t i = 0; i < FS_ARRAY_LEN(keys); i++)
		if (!same_key(&keys[i], (const char *)a + keys[i].offset, (const char *)b + keys[i].offset))
			differs(arg, keys[i].name);
	bool same = a->vision.n_hosts == b->vision.n_hosts;
	for (size_t i = 0; same && i < a->vision.n_hosts; i++)
		same = same_host(&a->vision.hosts[i], &b->vision.hosts[i]);
	if (!same)
		differs(arg, "vision.hosts");
}

void fs_config_print_table(FILE *f)
{
	static const char *const types[] = {
	        "string", "integer", "number", "boolean", "string or array of strings"};
	fputs("| key | type | default | meaning |\n| --- | --- | --- | --- |\n", f);
	for (size_t i = 0; i < FS_ARRAY_LEN(keys); i++) {
		const struct key *k = &keys[i];
		fprintf(f, "| `%s` | %s", k->name, types[k->type]);
		if (k->type == T_INT || k->type == T_REAL)
			fprintf(f, ", %.10g to %.10g", k->min, k->max);
		fprintf(f, " | %s%s%s | %s", k->fallback[0] == 'n' ? "" : "`",
		        k->fallback[0] == 'n' ? "none" : k->fallback, k->fallback[0] == 'n' ? "" : "`",
		        k->help);
		if (k->words) {
			fputs(" One of:", f);
			for (const char *w = k->words; *w;) {
				size_t len = strcspn(w, "|");
				fprintf(f, "%s `%.*s`", w == k->words ? "" : ",", (int)len, w);
				w += len + (w[len] == '|');
			}
			fputs(".", f);
		}
		fputs(" |\n", f);
	}
	fputs("| `vision.hosts` | string, object or array of them | none | The vision hosts, at most 16. A "
	      "string is an object with `host` alone. |\n",
	        f);
	for (size_t i = 0; i < FS_ARRAY_LEN(host_keys); i++)
		fprintf(f, "| `vision.hosts[].%s` | %s | none | %s |\n", host_keys[i].name,
		        host_keys[i].is_port ? "integer, 1 to 65535" : "string", host_keys[i].help);
}
