/* Live records in a list by arrival, ended ones in a ring, all under one lock that is held for a copy at
 * most.
 */
#include "server/service/books.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define RATE_WINDOW FS_SEC

struct fs_record {
	struct fs_record *prev, *next;
	struct fs_books *books;
	struct fs_record_row row; /* `lasted`, `phase_age` and the rates are made when it is copied */
	int64_t phase_since, first_token, last_token;
	struct {
		int64_t at;
		int32_t tokens;
	} window[2];     /* the rate is counted from the older one */
	uint32_t passed; /* bit a phase */
};

struct fs_books {
	pthread_mutex_t lock;
	struct fs_record *first, *last;
	struct fs_books_totals totals;
	struct fs_record_row history[FS_HISTORY_ROWS];
	size_t n_history, at; /* at: where the next one goes */
};

const char *fs_phase_name(enum fs_phase p)
{
	static const char *const names[FS_N_PHASES] = {
	        "accept", "parse", "fetch", "encode", "queue", "prefill", "decode"};
	return p < FS_N_PHASES ? names[p] : "?";
}

const char *fs_end_name(enum fs_end e)
{
	static const char *const names[FS_N_ENDS] = {
	        "running", "stop", "length", "cancel", "disconnect", "error", "refused"};
	return e < FS_N_ENDS ? names[e] : "?";
}

double fs_bucket_bound(size_t i)
{
	return 0.001 * (double)(1u << i);
}

static int64_t wall_ms(void)
{
	struct timespec ts;
	clock_gettime(CLOCK_REALTIME, &ts);
	return (int64_t)ts.tv_sec * 1000 + ts.tv_nsec / 1000000;
}

int fs_books_create(struct fs_books **out, struct fs_errbuf *e)
{
	struct fs_books *b = calloc(1, sizeof(*b));
	if (!b || pthread_mutex_init(&b->lock, NULL)) {
		free(b);
		return fs_fail(e, FS_ENOMEM, "out of memory");
	}
	b->totals.since_wall = wall_ms();
	*out = b;
	return FS_OK;
}

void fs_books_destroy(struct fs_books *b)
{
	if (!b)
		return;
	FS_ASSERT(!b->first);
	pthread_mutex_destroy(&b->lock);
	free(b);
}

/* ---- one record ---- */

struct fs_record *fs_record_open(struct fs_books *b, const char *api, const char *id, int64_t began)
{
	struct fs_record *r = calloc(1, sizeof(*r));
	if (!r)
		return NULL;
	int64_t now = fs_now();
	r->books = b;
	r->row.api = api;
	snprintf(r->row.id, sizeof(r->row.id), "%s", id);
	r->row.began = began;
	r->row.began_wall = wall_ms() - (now - began) / FS_MS;
	r->phase_since = began;
	r->passed = 1u << FS_PHASE_ACCEPT;
	pthread_mutex_lock(&b->lock);
	r->prev = b->last;
	if (b->last)
		b->last->next = r;
	else
		b->first = r;
	b->last = r;
	b->totals.requests++;
	b->totals.live[FS_PHASE_ACCEPT]++;
	pthread_mutex_unlock(&b->lock);
	return r;
}

void fs_record_stream(struct fs_record *r, bool stream)
{
	if (!r)
		return;
	pthread_mutex_lock(&r->books->lock);
	r->row.stream = stream;
	pthread_mutex_unlock(&r->books->lock);
}

void fs_record_conversation(struct fs_record *r)
{
	if (!r)
		return;
	pthread_mutex_lock(&r->books->lock);
	r->row.conversation = true;
	pthread_mutex_unlock(&r->books->lock);
}

static void phase_locked(struct fs_record *r, enum fs_phase p, int64_t now)
{
	r->row.spent[r->row.phase] += now - r->phase_since;
	r->books->totals.live[r->row.phase]--;
	r->books->totals.live[p]++;
	r->row.phase = p;
	r->phase_since = now;
	r->passed |= 1u << p;
}

void fs_record_phase(struct fs_record *r, enum fs_phase p)
{
	if (!r)
		return;
	int64_t now = fs_now();
	pthread_mutex_lock(&r->books->lock);
	phase_locked(r, p, now);
	pthread_mutex_unlock(&r->books->lock);
}

void fs_record_pictures(struct fs_record *r, int32_t n, int32_t cached)
{
	if (!r)
		return;
	pthread_mutex_lock(&r->books->lock);
	r->row.pictures = n;
	r->row.pictures_cached = cached;
	pthread_mutex_unlock(&r->books->lock);
}

void fs_record_prompt(struct fs_record *r, int32_t tokens, int32_t max_tokens)
{
	if (!r)
		return;
	pthread_mutex_lock(&r->books->lock);
	r->row.prompt_tokens = tokens;
	r->row.max_tokens = max_tokens;
	pthread_mutex_unlock(&r->books->lock);
}

void fs_record_turn(struct fs_record *r, bool holds)
{
	if (!r)
		return;
	pthread_mutex_lock(&r->books->lock);
	r->row.holds_turn = holds;
	pthread_mutex_unlock(&r->books->lock);
}

void fs_record_progress(struct fs_record *r, int32_t done, int32_t total)
{
	if (!r)
		return;
	pthread_mutex_lock(&r->books->lock);
	r->row.prompt_done = done;
	r->row.prompt_tokens = total;
	pthread_mutex_unlock(&r->books->lock);
}

void fs_record_reused(struct fs_record *r, int32_t reused)
{
	if (!r)
		return;
	pthread_mutex_lock(&r->books->lock);
	r->row.reused_tokens = reused;
	pthread_mutex_unlock(&r->books->lock);
}

void fs_record_token(struct fs_record *r)
{
	if (!r)
		return;
	int64_t now = fs_now();
	pthread_mutex_lock(&r->books->lock);
	if (!r->first_token) {
		r->first_token = now;
		r->window[0].at = r->window[1].at = now;
		r->window[0].tokens = r->window[1].tokens = 1;
		phase_locked(r, FS_PHASE_DECODE, now);
		r->row.prompt_done = r->row.prompt_tokens;
	}
	r->row.completion_tokens++;
	r->last_token = now;
	if (now - r->window[1].at >= RATE_WINDOW) {
		r->window[0] = r->window[1];
		r->window[1].at = now;
		r->window[1].tokens = r->row.completion_tokens;
	}
	pthread_mutex_unlock(&r->books->lock);
}

void fs_record_counts(struct fs_record *r, int32_t prompt, int32_t reused, int32_t completion)
{
	if (!r)
		return;
	pthread_mutex_lock(&r->books->lock);
	r->row.prompt_tokens = prompt;
	r->row.reused_tokens = reused;
	r->row.completion_tokens = completion;
	pthread_mutex_unlock(&r->books->lock);
}

static double rate(int32_t tokens, int64_t ns)
{
	return tokens > 0 && ns > 0 ? tokens / ((double)ns / 1e9) : 0;
}

static void copy_locked(const struct fs_record *r, int64_t now, struct fs_record_row *out)
{
	*out = r->row;
	out->lasted = now - r->row.began;
	out->phase_age = now - r->phase_since;
	out->spent[r->row.phase] += out->phase_age;
	int32_t n = r->row.completion_tokens;
	out->tokens_per_s_mean = rate(n - 1, r->last_token - r->first_token);
	out->tokens_per_s = rate(n - r->window[0].tokens, now - r->window[0].at);
}

/* ---- ends and totals ---- */

static void count(uint64_t *n, uint64_t buckets[FS_N_BUCKETS + 1], double *sum, int64_t ns)
{
	double s = (double)ns / 1e9;
	size_t i = 0;
	while (i < FS_N_BUCKETS && s > fs_bucket_bound(i))
		i++;
	buckets[i]++;
	*sum += s;
	++*n;
}

static void add_to_totals(
        struct fs_books_totals *t, const struct fs_record *r, const struct fs_record_row *row)
{
	t->live[row->phase]--;
	t->ends[row->end]++;
	t->prompt_tokens += (uint64_t)row->prompt_tokens;
	t->reused_tokens += (uint64_t)row->reused_tokens;
	t->completion_tokens += (uint64_t)row->completion_tokens;
	t->pictures += (uint64_t)row->pictures;
	t->pictures_cached += (uint64_t)row->pictures_cached;
	for (size_t i = 0; i < FS_N_PHASES; i++)
		if (r->passed >> i & 1)
			count(&t->phase[i].count, t->phase[i].buckets, &t->phase[i].sum, row->spent[i]);
	count(&t->whole.count, t->whole.buckets, &t->whole.sum, row->lasted);
	if (r->first_token)
		count(&t->first_token.count, t->first_token.buckets, &t->first_token.sum,
		        r->first_token - row->began);
}

void fs_record_close(struct fs_record *r, const struct fs_record_end *end)
{
	if (!r)
		return;
	struct fs_books *b = r->books;
	int64_t now = fs_now();
	pthread_mutex_lock(&b->lock);
	struct fs_record_row *row = &b->history[b->at];
	copy_locked(r, now, row);
	row->holds_turn = false;
	row->end = end->end;
	row->cause = end->cause;
	row->status = end->status;
	snprintf(row->code, sizeof(row->code), "%s", end->code ? end->code : "");
	snprintf(row->error, sizeof(row->error), "%s", end->error ? end->error : "");
	b->at = (b->at + 1) % FS_HISTORY_ROWS;
	b->n_history = FS_MIN(b->n_history + 1, (size_t)FS_HISTORY_ROWS);
	add_to_totals(&b->totals, r, row);
	if (r->prev)
		r->prev->next = r->next;
	else
		b->first = r->next;
	if (r->next)
		r->next->prev = r->prev;
	else
		b->last = r->prev;
	pthread_mutex_unlock(&b->lock);
	free(r);
}

size_t fs_books_live(struct fs_books *b, struct fs_record_row *out, size_t cap)
{
	size_t n = 0;
	int64_t now = fs_now();
	pthread_mutex_lock(&b->lock);
	for (struct fs_record *r = b->first; r && n < cap; r = r->next)
		copy_locked(r, now, &out[n++]);
	pthread_mutex_unlock(&b->lock);
	return n;
}

size_t fs_books_history(struct fs_books *b, struct fs_record_row *out, size_t cap)
{
	pthread_mutex_lock(&b->lock);
	size_t n = FS_MIN(cap, b->n_history);
	for (size_t i = 0; i < n; i++)
		out[i] = b->history[(b->at + FS_HISTORY_ROWS - 1 - i) % FS_HISTORY_ROWS];
	pthread_mutex_unlock(&b->lock);
	return n;
}

void fs_books_totals(struct fs_books *b, struct fs_books_totals *out)
{
	pthread_mutex_lock(&b->lock);
	*out = b->totals;
	pthread_mutex_unlock(&b->lock);
}
