/*
 * GET /metrics in Prometheus' text format 0.0.4: totals of the books, histograms of phases, states of hosts.
 * Answered on the loop at once. Only requests to the model are counted in it: probes, lists of models and
 * this page itself are no requests, so an idle server's histograms stand still however often it is asked.
 * Reference: Prometheus, "Exposition formats" and "Metric and label naming".
 */
#include "server/api/internal.h"
#include "server/service/flight.h"

#include <stdio.h>

#define MAX_PAGE ((size_t)512 << 10) /* several times what all hosts and histograms take */

static void family(struct fs_buf *b, const char *name, const char *type, const char *help)
{
	fs_buf_printf(b, "# HELP %s %s\n# TYPE %s %s\n", name, help, name, type);
}

/* "{key="value"}"; backslash, quote and line feed are escaped, other control characters are no text. */
static void label(struct fs_buf *b, const char *key, const char *value)
{
	json_t *clean = api_text(value);
	fs_buf_printf(b, "{%s=\"", key);
	for (const char *p = clean ? json_string_value(clean) : ""; *p; p++) {
		if (*p == '\\' || *p == '"')
			fs_buf_printf(b, "\\%c", *p);
		else if (*p == '\n')
			fs_buf_append_str(b, "\\n");
		else
			fs_buf_append(b, (unsigned char)*p < 0x20 ? "?" : p, 1);
	}
	fs_buf_append_str(b, "\"}");
	json_decref(clean);
}

static void simple(struct fs_buf *b, const char *name, const char *type, const char *help, double value)
{
	family(b, name, type, help);
	fs_buf_printf(b, "%s %.15g\n", name, value);
}

static void counter(struct fs_buf *b, const char *name, const char *help, uint64_t n)
{
	simple(b, name, "counter", help, (double)n);
}

/* ---- histograms ---- */

struct histogram {
	uint64_t count;
	const uint64_t *buckets; /* [n_bounds + 1], not cumulative */
	double sum;
	size_t n_bounds;
	double (*bound)(size_t i);
};

/* "name{key="value"}", or the name alone when key is NULL. */
static void labelled(
        struct fs_buf *b, const char *name, const char *suffix, const char *key, const char *value)
{
	fs_buf_printf(b, "%s%s", name, suffix);
	if (key)
		label(b, key, value);
}

static void histogram(
        struct fs_buf *b, const char *name, const char *key, const char *value, const struct histogram *h)
{
	uint64_t below = 0;
	for (size_t i = 0; i <= h->n_bounds; i++) {
		below += h->buckets[i];
		labelled(b, name, "_bucket", key, value);
		if (key)
			b->len--; /* opens the braces again */
		fs_buf_append_str(b, key ? ",le=\"" : "{le=\"");
		if (i < h->n_bounds)
			fs_buf_printf(b, "%.15g", h->bound(i));
		else
			fs_buf_append_str(b, "+Inf");
		fs_buf_printf(b, "\"} %llu\n", (unsigned long long)below);
	}
	labelled(b, name, "_sum", key, value);
	fs_buf_printf(b, " %.15g\n", h->sum);
	labelled(b, name, "_count", key, value);
	fs_buf_printf(b, " %llu\n", (unsigned long long)h->count);
}

static void histograms(struct fs_buf *b, const struct fs_books_totals *t)
{
	family(b, "farsight_phase_seconds", "histogram", "Time that requests spent in a phase.");
	for (size_t i = 0; i < FS_N_PHASES; i++)
		histogram(b, "farsight_phase_seconds", "phase", fs_phase_name(i),
		        &(struct histogram){t->phase[i].count, t->phase[i].buckets, t->phase[i].sum,
		                FS_N_BUCKETS, fs_bucket_bound});
	family(b, "farsight_request_seconds", "histogram", "From the arrival of a request to its end.");
	histogram(b, "farsight_request_seconds", NULL, NULL,
	        &(struct histogram){
	                t->whole.count, t->whole.buckets, t->whole.sum, FS_N_BUCKETS, fs_bucket_bound});
	family(b, "farsight_first_token_seconds", "histogram",
	        "From the arrival of a request to its first token.");
	histogram(b, "farsight_first_token_seconds", NULL, NULL,
	        &(struct histogram){t->first_token.count, t->first_token.buckets, t->first_token.sum,
	                FS_N_BUCKETS, fs_bucket_bound});
}

/* ---- requests ---- */

static void requests(struct fs_buf *b, const struct fs_books_totals *t)
{
	family(b, "farsight_requests_total", "counter", "Requests that ended, by their end.");
	for (size_t i = FS_END_NONE + 1; i < FS_N_ENDS; i++) {
		fs_buf_append_str(b, "farsight_requests_total");
		label(b, "end", fs_end_name(i));
		fs_buf_printf(b, " %llu\n", (unsigned long long)t->ends[i]);
	}
	family(b, "farsight_requests_live", "gauge", "Requests that are being worked on, by their phase.");
	for (size_t i = 0; i < FS_N_PHASES; i++) {
		fs_buf_append_str(b, "farsight_requests_live");
		label(b, "phase", fs_phase_name(i));
		fs_buf_printf(b, " %zu\n", t->live[i]);
	}
	counter(b, "farsight_prompt_tokens_total", "Tokens of prompts, reused ones included.",
	        t->prompt_tokens);
	counter(b, "farsight_reused_tokens_total", "Tokens of prompts that were still in the engine's cache.",
	        t->reused_tokens);
	counter(b, "farsight_completion_tokens_total", "Tokens of answers.", t->completion_tokens);
	counter(b, "farsight_pictures_total", "Pictures in requests.", t->pictures);
	counter(b, "farsight_pictures_cached_total", "Pictures whose rows were in the cache.",
	        t->pictures_cached);
}

static void turned_away(struct fs_buf *b, const struct fs_http *http)
{
	struct fs_http_turned_away away[FS_HTTP_MAX_STATUSES];
	size_t n = http ? fs_http_turned_away(http, away) : 0;
	if (n > 0)
		family(b, "farsight_turned_away_total", "counter",
		        "Requests that were refused before they were read whole, and those for no known "
		        "path.");
	for (size_t i = 0; i < n; i++)
		fs_buf_printf(b, "farsight_turned_away_total{status=\"%d\"} %llu\n", away[i].status,
		        (unsigned long long)away[i].n);
}

static void turn(struct fs_buf *b, struct fs_service *s)
{
	struct fs_turn_state t;
	fs_service_turn(s, &t);
	simple(b, "farsight_queue_length", "gauge", "Requests that wait for the turn.", (double)t.waiting);
	simple(b, "farsight_turn_held", "gauge", "Whether the engine or this machine's GPU is taken.",
	        t.held);
	counter(b, "farsight_turn_entries_total", "How often the turn was taken.", t.entries);
}

static void engine(struct fs_buf *b, struct fs_engine *en)
{
	struct fs_engine_health h;
	fs_engine_health(en, &h);
	simple(b, "farsight_engine_ready", "gauge", "Whether the engine has its device.",
	        h.state == FS_ENGINE_READY);
	counter(b, "farsight_device_losses_total", "How often the engine lost its device.",
	        (uint64_t)h.losses);
}

static void cache(struct fs_buf *b, struct fs_flights *f)
{
	struct fs_flight_stats st;
	if (!f)
		return;
	fs_flights_stats(f, &st);
	counter(b, "farsight_cache_hits_total", "Pictures whose rows were found in the cache.",
	        st.cache.hits);
	counter(b, "farsight_cache_misses_total", "Pictures whose rows were not.", st.cache.misses);
	counter(b, "farsight_cache_evictions_total", "Rows that left the cache to make room.",
	        st.cache.evictions);
	counter(b, "farsight_encode_joins_total", "Pictures that were being encoded for another request.",
	        st.joins);
	counter(b, "farsight_encodes_total", "Encodes that were begun.", st.encodes);
	simple(b, "farsight_cache_bytes", "gauge", "Bytes of the rows in the cache.", (double)st.cache.bytes);
	simple(b, "farsight_cache_limit_bytes", "gauge", "The most bytes that the cache may hold.",
	        (double)st.cache.limit);
	simple(b, "farsight_cache_entries", "gauge", "Pictures in the cache.", (double)st.cache.entries);
	simple(b, "farsight_encodes_live", "gauge", "Encodes under way.", (double)st.live);
}

/* ---- sessions ---- */

static void sessions(struct fs_buf *b, struct fs_streams *streams)
{
	struct fs_streams_stats st;
	if (!streams)
		return;
	fs_streams_stats(streams, &st);
	simple(b, "farsight_streams_live", "gauge", "Conversations that are being answered.",
	        (double)st.live);
	simple(b, "farsight_streams_completed", "gauge", "Answers that are kept for clients that come back.",
	        (double)st.completed);
	simple(b, "farsight_streams_readers", "gauge", "Clients that read conversations.",
	        (double)st.readers);
	simple(b, "farsight_streams_bytes", "gauge", "Bytes of memory for conversations' answers.",
	        (double)st.bytes);
	counter(b, "farsight_streams_dropped_bytes_total", "Bytes of answers that made room for newer ones.",
	        st.dropped_bytes);
	counter(b, "farsight_streams_opened_total", "Conversations that were begun.", st.opened);
	counter(b, "farsight_streams_replaced_total", "Conversations that a newer request replaced.",
	        st.replaced);
	counter(b, "farsight_streams_deleted_total", "Conversations that a client deleted.", st.deleted);
	counter(b, "farsight_streams_expired_total", "Answers that were kept for their time.", st.expired);
	counter(b, "farsight_streams_refused_total",
	        "Requests for which there was no room to keep the answer.", st.refused);
}

/* ---- hosts ---- */

static double host_up(const struct fs_host_status *h)
{
	return h->state == FS_HOST_UP;
}
static double host_encodes(const struct fs_host_status *h)
{
	return (double)h->encodes;
}
static double host_errors(const struct fs_host_status *h)
{
	return (double)h->errors;
}
static double host_sent(const struct fs_host_status *h)
{
	return (double)h->bytes_up;
}
static double host_received(const struct fs_host_status *h)
{
	return (double)h->bytes_down;
}
static double host_rtt(const struct fs_host_status *h)
{
	return h->rtt_ms / 1e3;
}
static double host_outstanding(const struct fs_host_status *h)
{
	return h->outstanding;
}

static double host_retries(const struct fs_host_status *h)
{
	return (double)h->retries;
}
static double host_hedged(const struct fs_host_status *h)
{
	return (double)h->hedged;
}
static double host_hedge_wins(const struct fs_host_status *h)
{
	return (double)h->hedge_wins;
}
static double host_picture(const struct fs_host_status *h)
{
	return h->picture_ms / 1e3;
}
static double host_rate(const struct fs_host_status *h)
{
	return h->bytes_per_s;
}
static double host_benched(const struct fs_host_status *h)
{
	return h->benched_until ? FS_MAX((double)(h->benched_until - fs_now()) / 1e9, 0.0) : 0;
}
static double host_since(const struct fs_host_status *h)
{
	return (double)(fs_now() - h->since) / 1e9;
}

/* Two labels, which `label` does not write. */
static void host_error_causes(struct fs_buf *b, const struct fs_host_status *st, size_t n)
{
	static const char name[] = "farsight_host_error_causes_total";
	family(b, name, "counter", "What went wrong with a host, by its cause.");
	for (size_t k = 0; k < n; k++)
		for (size_t i = 0; i < FS_N_HOST_ERRORS; i++) {
			fs_buf_append_str(b, name);
			label(b, "host", st[k].host);
			b->len--; /* opens the braces again */
			fs_buf_printf(b, ",cause=\"%s\"} %llu\n", fs_host_error_name(i),
			        (unsigned long long)st[k].errors_by[i]);
		}
}

static void host_times(struct fs_buf *b, const struct fs_host_status *st, size_t n)
{
	static const char *const help[] = {
	        "Time that pictures waited, here for the host and there for its encoder.",
	        "Time that pictures and their rows were on their way.",
	        "Time that the encoder took for a picture."};
	_Static_assert(FS_ARRAY_LEN(help) == FS_N_HOST_TIMES, "one for each");
	char name[64];
	for (size_t i = 0; i < FS_N_HOST_TIMES; i++) {
		snprintf(name, sizeof(name), "farsight_host_%s_seconds", fs_host_time_name(i));
		family(b, name, "histogram", help[i]);
		for (size_t k = 0; k < n; k++) {
			const struct fs_host_times *t = &st[k].times[i];
			histogram(b, name, "host", st[k].host,
			        &(struct histogram){
			                t->count, t->buckets, t->sum, FS_HOST_BUCKETS, fs_host_bucket_bound});
		}
	}
}

/* Those that told alone: a zero would look like a GPU that is full. */
static void host_vram(struct fs_buf *b, const struct fs_host_status *st, size_t n)
{
	static const char name[] = "farsight_host_vram_free_bytes";
	bool told = false;
	for (size_t k = 0; k < n; k++) {
		if (st[k].vram_total_mb <= 0)
			continue;
		if (!told)
			family(b, name, "gauge",
			        "Free memory of the host's GPU when its encoder became ready.");
		told = true;
		fs_buf_append_str(b, name);
		label(b, "host", st[k].host);
		fs_buf_printf(b, " %.15g\n", st[k].vram_free_mb * 1048576.0);
	}
}

static void hosts(struct fs_buf *b, struct fs_vision *v)
{
	static const struct {
		const char *name, *type, *help;
		double (*get)(const struct fs_host_status *h);
	} families[] = {{"farsight_host_up", "gauge", "Whether the host takes pictures.", host_up},
	        {"farsight_host_encodes_total", "counter", "Pictures that the host encoded.", host_encodes},
	        {"farsight_host_errors_total", "counter", "Pictures that failed on the host.", host_errors},
	        {"farsight_host_sent_bytes_total", "counter", "Bytes sent to the host.", host_sent},
	        {"farsight_host_received_bytes_total", "counter", "Bytes that came from the host.",
	                host_received},
	        {"farsight_host_rtt_seconds", "gauge", "Round trip of the last ping; 0 = unknown.", host_rtt},
	        {"farsight_host_outstanding", "gauge", "Pictures that the host has not answered yet.",
	                host_outstanding},
	        {"farsight_host_retries_total", "counter",
	                "Pictures that the host lost and that were tried again.", host_retries},
	        {"farsight_host_hedged_total", "counter",
	                "Late pictures that were also given to a second host.", host_hedged},
	        {"farsight_host_hedge_wins_total", "counter",
	                "Pictures that the host encoded as the second one, before the first.",
	                host_hedge_wins},
	        {"farsight_host_picture_seconds", "gauge", "Moving mean of an encode; 0 = unknown.",
	                host_picture},
	        {"farsight_host_bytes_per_second", "gauge", "Rate of rows on their way here; 0 = unknown.",
	                host_rate},
	        {"farsight_host_benched_seconds", "gauge",
	                "For how long the host is not asked, or dialled, any more.", host_benched},
	        {"farsight_host_state_seconds", "gauge", "Since the host's state changed.", host_since}};
	struct fs_host_status st[FS_VISION_MAX_HOSTS];
	size_t n = v ? fs_vision_status(v, st, FS_ARRAY_LEN(st)) : 0;
	if (n > 0) {
		host_error_causes(b, st, n);
		host_times(b, st, n);
		host_vram(b, st, n);
	}
	for (size_t i = 0; n > 0 && i < FS_ARRAY_LEN(families); i++) {
		family(b, families[i].name, families[i].type, families[i].help);
		for (size_t k = 0; k < n; k++) {
			fs_buf_append_str(b, families[i].name);
			label(b, "host", st[k].host);
			fs_buf_printf(b, " %.15g\n", families[i].get(&st[k]));
		}
	}
}

int api_metrics_page(const struct fs_api *api, struct fs_buf *b)
{
	struct fs_books_totals t;
	int rc = fs_buf_reserve(b, MAX_PAGE); /* so that no append fails */
	if (rc)
		return rc;
	fs_books_totals(fs_service_books(api->service), &t);
	family(b, "farsight_build_info", "gauge", "The server's version.");
	fs_buf_append_str(b, "farsight_build_info");
	label(b, "version", FS_VERSION);
	fs_buf_append_str(b, " 1\n");
	simple(b, "farsight_start_time_seconds", "gauge", "When the server started, in seconds since 1970.",
	        (double)t.since_wall / 1e3);
	requests(b, &t);
	turned_away(b, api->http);
	turn(b, api->service);
	engine(b, fs_service_opts(api->service)->engine);
	histograms(b, &t);
	const struct fs_service_opts *o = fs_service_opts(api->service);
	cache(b, fs_vision_has_hosts(o->vision) ? o->flights : NULL);
	sessions(b, api->streams);
	hosts(b, o->vision);
	return FS_OK;
}

void fs_api_metrics(void *arg, struct fs_http_request *r)
{
	struct fs_buf b;
	fs_buf_init(&b, MAX_PAGE);
	if (api_metrics_page(arg, &b) == FS_OK)
		fs_http_reply(r, 200, "text/plain; version=0.0.4; charset=utf-8", NULL, b.data, b.len);
	else
		fs_http_stream_end(r);
	fs_buf_finish(&b);
	fs_http_unref(r);
}
