/*
 * GET /status and GET /v1/history: what the server is doing, and what it did. Answered on the loop at once
 * from the books and the hosts' states; they are no requests themselves and never wait for the engine.
 */
#include "server/api/internal.h"
#include "server/service/flight.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static double seconds(int64_t ns)
{
	return (double)ns / 1e9;
}

/* ---- vision ---- */

/* What is counted of a host, and how it does; numbers that are not known yet are null. */
static json_t *host_figures(const struct fs_host_status *h, int64_t now)
{
	json_t *by = json_object();
	for (size_t i = 0; i < FS_N_HOST_ERRORS; i++)
		json_object_set_new(by, fs_host_error_name(i), json_integer((json_int_t)h->errors_by[i]));
	json_t *o = json_pack("{s:f, s:f, s:I, s:I, s:o, s:I, s:I, s:I, s:I, s:I, s:I, s:i, s:i, s:f}",
	        "state_age_s", seconds(now - h->since), "rtt_ms", h->rtt_ms, "encodes",
	        (json_int_t)h->encodes, "errors", (json_int_t)h->errors, "errors_by", by, "retries",
	        (json_int_t)h->retries, "hedged", (json_int_t)h->hedged, "hedge_wins",
	        (json_int_t)h->hedge_wins, "bytes_up", (json_int_t)h->bytes_up, "bytes_down",
	        (json_int_t)h->bytes_down, "outstanding", (json_int_t)h->outstanding, "min_tokens",
	        h->min_tokens, "max_tokens", h->max_tokens, "benched_s",
	        h->benched_until ? seconds(FS_MAX(h->benched_until - now, (int64_t)0)) : 0.0);
	bool known = h->picture_ms > 0;
	json_object_set_new(o, "picture_ms", known ? json_real(h->picture_ms) : json_null());
	json_object_set_new(o, "pictures_per_s", known ? json_real(1e3 / h->picture_ms) : json_null());
	for (size_t i = 0; i < FS_N_HOST_TIMES; i++) {
		char name[32];
		snprintf(name, sizeof(name), "%s_ms", fs_host_time_name(i));
		json_object_set_new(
		        o, name, h->times[i].count ? json_real(h->times[i].mean_ms) : json_null());
	}
	bool told = h->vram_total_mb > 0;
	json_object_set_new(o, "vram_free_mb", told ? json_integer(h->vram_free_mb) : json_null());
	json_object_set_new(o, "vram_total_mb", told ? json_integer(h->vram_total_mb) : json_null());
	json_object_set_new(o, "bytes_per_s", h->bytes_per_s > 0 ? json_real(h->bytes_per_s) : json_null());
	if (h->fingerprint[0])
		json_object_set_new(o, "fingerprint", api_text(h->fingerprint));
	return o;
}

static json_t *host_json(const struct fs_host_status *h, bool whole, int64_t now)
{
	json_t *o = json_pack("{s:o, s:s, s:o*, s:o*}", "host", api_text(h->host), "state",
	        fs_host_state_name(h->state), "cause", h->cause[0] ? api_text(h->cause) : NULL, "device",
	        h->device[0] ? api_text(h->device) : NULL);
	json_t *more = whole ? host_figures(h, now) : NULL;
	if (more)
		json_object_update(o, more);
	json_decref(more);
	return o;
}

json_t *api_vision(struct fs_vision *v, bool whole)
{
	struct fs_host_status st[FS_VISION_MAX_HOSTS];
	size_t n = v ? fs_vision_status(v, st, FS_ARRAY_LEN(st)) : 0;
	int64_t now = fs_now();
	bool up = false;
	json_t *hosts = json_array();
	for (size_t i = 0; i < n; i++) {
		up |= st[i].state == FS_HOST_UP;
		json_array_append_new(hosts, host_json(&st[i], whole, now));
	}
	json_t *o = json_pack(
	        "{s:b, s:b, s:o}", "configured", fs_vision_has_hosts(v), "available", up, "hosts", hosts);
	if (o && whole)
		json_object_set_new(o, "leaving", json_integer(v ? (json_int_t)fs_vision_leaving(v) : 0));
	return o;
}

/* ---- rows ---- */

/* What live and ended requests have in common. */
static json_t *row_json(const struct fs_record_row *r)
{
	json_t *phases = json_object();
	for (size_t i = 0; i < FS_N_PHASES; i++)
		json_object_set_new(phases, fs_phase_name(i), json_real((double)r->spent[i] / 1e6));
	return json_pack("{s:s, s:s, s:b, s:b, s:f, s:s, s:o, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:f}", "id",
	        r->id, "api", r->api, "stream", r->stream, "conversation", r->conversation, "began",
	        (double)r->began_wall / 1e3, "phase", fs_phase_name(r->phase), "phases_ms", phases,
	        "pictures", r->pictures, "pictures_cached", r->pictures_cached, "prompt_tokens",
	        r->prompt_tokens, "prompt_done", r->prompt_done, "reused_tokens", r->reused_tokens,
	        "completion_tokens", r->completion_tokens, "max_tokens", r->max_tokens, "tokens_per_s_mean",
	        r->tokens_per_s_mean);
}

static json_t *live_json(const struct fs_record_row *r)
{
	json_t *o = row_json(r);
	json_object_set_new(o, "age_s", json_real(seconds(r->lasted)));
	json_object_set_new(o, "phase_age_s", json_real(seconds(r->phase_age)));
	json_object_set_new(o, "tokens_per_s", json_real(r->tokens_per_s));
	json_object_set_new(o, "holds_turn", json_boolean(r->holds_turn));
	return o;
}

static json_t *ended_json(const struct fs_record_row *r)
{
	json_t *o = row_json(r);
	json_object_set_new(o, "duration_ms", json_real((double)r->lasted / 1e6));
	json_object_set_new(o, "finish", json_string(fs_end_name(r->end)));
	json_object_set_new(o, "status", json_integer(r->status));
	if (r->cause != FS_CANCEL_NONE)
		json_object_set_new(o, "cause", json_string(fs_cancel_cause_name(r->cause)));
	if (r->code[0])
		json_object_set_new(o, "code", api_text(r->code));
	if (r->error[0])
		json_object_set_new(o, "error", api_text(r->error));
	return o;
}

/* ---- /status ---- */

static json_t *turn_json(struct fs_service *s, const struct fs_record_row *live, size_t n)
{
	struct fs_turn_state t;
	json_t *holder = NULL;
	fs_service_turn(s, &t);
	for (size_t i = 0; i < n && !holder; i++)
		if (live[i].holds_turn)
			holder = json_pack("{s:s, s:s}", "id", live[i].id, "api", live[i].api);
	return json_pack("{s:b, s:o?, s:I, s:I, s:I}", "held", t.held, "holder", holder, "waiting",
	        (json_int_t)t.waiting, "depth", (json_int_t)t.depth, "entries", (json_int_t)t.entries);
}

static json_t *totals_json(const struct fs_books_totals *t)
{
	json_t *ends = json_object();
	for (size_t i = FS_END_NONE + 1; i < FS_N_ENDS; i++)
		json_object_set_new(ends, fs_end_name(i), json_integer((json_int_t)t->ends[i]));
	return json_pack("{s:f, s:I, s:o, s:I, s:I, s:I, s:I, s:I}", "since", (double)t->since_wall / 1e3,
	        "requests", (json_int_t)t->requests, "finish", ends, "prompt_tokens",
	        (json_int_t)t->prompt_tokens, "reused_tokens", (json_int_t)t->reused_tokens,
	        "completion_tokens", (json_int_t)t->completion_tokens, "pictures", (json_int_t)t->pictures,
	        "pictures_cached", (json_int_t)t->pictures_cached);
}

/* What http answered with an error by itself: {"401": 3}. */
static json_t *turned_away_json(const struct fs_http *http)
{
	struct fs_http_turned_away away[FS_HTTP_MAX_STATUSES];
	size_t n = http ? fs_http_turned_away(http, away) : 0;
	json_t *o = json_object();
	for (size_t i = 0; i < n; i++) {
		char status[16];
		snprintf(status, sizeof(status), "%d", away[i].status);
		json_object_set_new(o, status, json_integer((json_int_t)away[i].n));
	}
	return o;
}

/* Pictures' rows; NULL without vision. */
static json_t *cache_json(struct fs_flights *f)
{
	struct fs_flight_stats st;
	if (!f)
		return NULL;
	fs_flights_stats(f, &st);
	const struct fs_rows_cache_stats *c = &st.cache;
	return json_pack("{s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I}", "hits", (json_int_t)c->hits, "misses",
	        (json_int_t)c->misses, "joins", (json_int_t)st.joins, "evictions", (json_int_t)c->evictions,
	        "entries", (json_int_t)c->entries, "bytes", (json_int_t)c->bytes, "limit_bytes",
	        (json_int_t)c->limit, "encoding", (json_int_t)st.live);
}

/* Answers that outlive their clients; NULL without them. Numbers alone: ids are nobody's but their owners'.
 */
static json_t *streams_json(struct fs_streams *streams)
{
	struct fs_streams_stats st;
	if (!streams)
		return NULL;
	fs_streams_stats(streams, &st);
	return json_pack("{s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I}", "live", (json_int_t)st.live,
	        "completed", (json_int_t)st.completed, "readers", (json_int_t)st.readers, "bytes",
	        (json_int_t)st.bytes, "dropped_bytes", (json_int_t)st.dropped_bytes, "opened",
	        (json_int_t)st.opened, "replaced", (json_int_t)st.replaced, "deleted", (json_int_t)st.deleted,
	        "expired", (json_int_t)st.expired, "refused", (json_int_t)st.refused);
}

static json_t *engine_json(const struct fs_api *api, struct fs_engine *engine)
{
	static const char *const states[] = {"ready", "reloading", "failed"};
	const struct fs_engine_info *e = fs_engine_info(engine);
	struct fs_engine_health h;
	fs_engine_health(engine, &h);
	return json_pack("{s:s, s:s, s:i, s:s, s:s, s:I, s:I, s:s, s:i, s:o?}", "model", api->model_name,
	        "arch", e->arch, "context", e->n_ctx, "template", e->template_name, "device", h.device,
	        "weight_bytes", (json_int_t)e->weight_bytes, "kv_bytes", (json_int_t)e->kv_bytes, "state",
	        states[h.state], "device_losses", h.losses, "device_error",
	        h.cause[0] ? api_text(h.cause) : NULL);
}

void fs_api_status(void *arg, struct fs_http_request *r)
{
	const struct fs_api *api = arg;
	const struct fs_service_opts *o = fs_service_opts(api->service);
	struct fs_books *books = fs_service_books(api->service);
	struct fs_books_totals totals;
	struct fs_record_row *live = calloc((size_t)o->workers + 1, sizeof(*live));
	size_t n = live ? fs_books_live(books, live, (size_t)o->workers + 1) : 0;
	json_t *rows = json_array();
	fs_books_totals(books, &totals);
	for (size_t i = 0; i < n; i++)
		json_array_append_new(rows, live_json(&live[i]));
	struct fs_flights *flights = fs_vision_has_hosts(o->vision) ? o->flights : NULL;
	json_t *settings = NULL;
	if (api->settings.tell) {
		struct fs_api_settings_state st;
		api->settings.tell(api->settings.arg, &st);
		settings = api_settings(&st);
	}
	api_reply_json(r, json_pack("{s:b, s:o, s:o, s:o, s:o?, s:o?, s:o, s:o, s:o, s:o?}", "busy", n > 0,
	                          "turn", turn_json(api->service, live, n), "requests", rows, "vision",
	                          api_vision(o->vision, true), "cache", cache_json(flights), "streams",
	                          streams_json(api->streams), "engine", engine_json(api, o->engine), "totals",
	                          totals_json(&totals), "turned_away", turned_away_json(api->http), "config",
	                          settings));
	free(live);
}

/* ---- /v1/history ---- */

#define DEFAULT_ROWS 100

/* "limit=N" in a query string; false when it is no whole number from 1 on. */
static bool get_limit(const char *query, size_t *limit)
{
	*limit = DEFAULT_ROWS;
	for (const char *p = query; p; p = strchr(p, '&') ? strchr(p, '&') + 1 : NULL) {
		char *end;
		if (strncmp(p, "limit=", 6) != 0)
			continue;
		unsigned long n = p[6] >= '0' && p[6] <= '9' ? strtoul(p + 6, &end, 10) : 0;
		if (n == 0 || (*end != '\0' && *end != '&'))
			return false;
		*limit = FS_MIN(n, (size_t)FS_HISTORY_ROWS);
	}
	return true;
}

void fs_api_history(void *arg, struct fs_http_request *r)
{
	const struct fs_api *api = arg;
	size_t limit;
	if (!get_limit(fs_http_query(r), &limit)) {
		struct api_error err = {400, "invalid_request_error", NULL, "limit",
		        "\"limit\" must be a whole number from 1 on"};
		api_reply_error(r, &err);
		fs_http_unref(r);
		return;
	}
	struct fs_record_row *rows = calloc(limit, sizeof(*rows));
	size_t n = rows ? fs_books_history(fs_service_books(api->service), rows, limit) : 0;
	json_t *data = json_array();
	for (size_t i = 0; i < n; i++)
		json_array_append_new(data, ended_json(&rows[i]));
	free(rows);
	api_reply_json(r, json_pack("{s:s, s:o}", "object", "list", "data", data));
}
