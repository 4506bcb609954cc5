/*
 * POST /v1/reload: the config is read again, and the answer tells what became of it. For clients on this
 * machine alone, whatever "listen" is and even with an API key: it is the admin's, who could send a signal as
 * well. The loop only hands it over.
 */
#include "server/api/internal.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <netinet/in.h>
#include <string.h>

#define MAX_BODY ((size_t)32 << 10) /* it holds a path at most, and is read on the loop */

static bool same_address(const struct sockaddr *own, const char *peer)
{
	char text[INET6_ADDRSTRLEN] = "";
	if (own && own->sa_family == AF_INET)
		inet_ntop(AF_INET, &((const struct sockaddr_in *)(const void *)own)->sin_addr, text,
		        sizeof(text));
	else if (own && own->sa_family == AF_INET6)
		inet_ntop(AF_INET6, &((const struct sockaddr_in6 *)(const void *)own)->sin6_addr, text,
		        sizeof(text));
	if (strncmp(peer, "::ffff:", 7) == 0)
		peer += 7;
	return *text && strcmp(text, peer) == 0;
}

/* Who talks to an address of this machine from itself has that address, or a loopback one. */
static bool is_here(const char *peer)
{
	struct ifaddrs *all = NULL;
	bool here = false;
	if (!peer || getifaddrs(&all))
		return false;
	for (const struct ifaddrs *a = all; a && !here; a = a->ifa_next)
		here = same_address(a->ifa_addr, peer);
	freeifaddrs(all);
	return here;
}

json_t *api_settings(const struct fs_api_settings_state *s)
{
	json_t *restart = json_array(), *error = *s->error ? api_text(s->error) : json_null();
	for (const char *p = s->restart; *p;) {
		size_t n = strcspn(p, ",");
		json_array_append_new(restart, json_stringn(p, n));
		p += n + strspn(p + n, ", ");
	}
	return json_pack("{s:f, s:I, s:o, s:o}", "loaded", (double)s->loaded_wall / 1e3, "reads",
	        (json_int_t)s->reads, "error", error, "restart", restart);
}

static void refuse(struct fs_http_request *r, int status, const char *code, const char *text)
{
	const char *type = status == 503 ? "unavailable_error" : "invalid_request_error";
	struct api_error err = {status, type, code, NULL, text};
	api_reply_error(r, &err);
	fs_http_unref(r);
}

/* The body may name the file that the client has in mind: {"config": "/path"}. */
static bool read_body(const struct fs_http_request *r, json_t **body, const char **file)
{
	size_t n;
	const char *text = fs_http_body(r, &n);
	*body = n > MAX_BODY ? NULL : n ? json_loadb(text, n, JSON_REJECT_DUPLICATES, NULL) : json_object();
	json_t *config = json_object_get(*body, "config");
	*file = json_string_value(config);
	return json_is_object(*body) && (!config || *file);
}

void fs_api_reload(void *arg, struct fs_http_request *r)
{
	const struct fs_api *api = arg;
	struct fs_errbuf e = {""};
	json_t *body;
	const char *file;
	if (!is_here(fs_http_peer(r))) {
		refuse(r, 403, "not_here", "only programs on the server's machine may have its config read");
		return;
	}
	if (!read_body(r, &body, &file))
		refuse(r, 400, NULL, "the body must be empty, or an object whose \"config\" is a path");
	else if (!api->settings.ask)
		refuse(r, 404, NULL, "this server reads no config");
	else {
		int err = api->settings.ask(api->settings.arg, file, r, &e);
		if (err == FS_EUNAVAILABLE)
			refuse(r, 503, "busy", e.text);
		else if (err)
			refuse(r, 409, "config_refused", e.text);
	}
	json_decref(body);
}

void fs_api_reloaded(struct fs_http_request *r, const struct fs_api_settings_state *s)
{
	if (!s) {
		refuse(r, 503, "shutting_down", "the server is shutting down");
		return;
	}
	if (*s->error) {
		refuse(r, 409, "config_refused", s->error);
		return;
	}
	json_t *o = api_settings(s);
	if (o)
		json_object_set_new(o, "hosts",
		        json_pack("{s:I, s:I, s:I}", "added", (json_int_t)s->hosts.added, "removed",
		                (json_int_t)s->hosts.removed, "kept", (json_int_t)s->hosts.kept));
	api_reply_json(r, o);
}
