/*
 * pool_client: pictures without end through server/vision, by several threads, for a test that breaks the
 * hosts meanwhile. Each answer is compared with the rule by which tests/tools/fake_encoder makes rows of a
 * picture's bytes, to the last element. When stdin ends it lets what is under way end, and prints one JSON
 * object: what was asked for, how it ended, and what is counted of the hosts.
 *
 *   pool_client CONFIG [--set KEY=VALUE]... [--threads N] [--seed N]
 *
 * CONFIG is the server's; kinds of pictures: most are good, some are refused by the encoder, a few kill it.
 */
#include "server/ssh/ssh.h"
#include "server/vision/settings.h"

#include <jansson.h>
#include <poll.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MAX_THREADS 32
#define MAX_PICTURE 60000
#define EMBD 192 /* of the fake encoder as the test starts it */

enum kind { GOOD, REFUSED, DEADLY };
enum end { END_OK, END_REFUSED, END_UNAVAILABLE, END_TIMEOUT, N_ENDS };
static const char *const end_names[] = {"ok", "refused", "unavailable", "timeout"};

static struct {
	struct fs_vision *v;
	atomic_bool stop;
	atomic_ullong sent, ends[N_ENDS];
	atomic_ullong wrong; /* rows that are not the picture's, ends that its kind can not have, errors
	                        without a text */
} all;

struct worker {
	pthread_t thread;
	uint64_t random;
	uint8_t picture[MAX_PICTURE];
};

static uint32_t draw(struct worker *w, uint32_t below)
{
	w->random ^= w->random << 13; /* xorshift64 */
	w->random ^= w->random >> 7;
	w->random ^= w->random << 17;
	return (uint32_t)(w->random >> 32) % below;
}

static size_t make_picture(struct worker *w, enum kind *kind)
{
	uint32_t x = draw(w, 1000);
	*kind = x < 3 ? DEADLY : x < 60 ? REFUSED : GOOD;
	const char *what = *kind == DEADLY ? "die" : *kind == REFUSED ? "err=bad-picture" : "";
	size_t n = 100 + draw(w, MAX_PICTURE - 100);
	int head = snprintf((char *)w->picture, MAX_PICTURE, "FAKE delay=%u rows=%ux%u %s\n", draw(w, 60),
	        1 + draw(w, 20), 1 + draw(w, 20), what);
	for (size_t i = (size_t)head; i < n; i++)
		w->picture[i] = (uint8_t)draw(w, 256);
	return n;
}

static bool rows_are_right(const struct fs_rows *rows, const uint8_t *picture, size_t n)
{
	unsigned sum = 0;
	for (size_t i = 0; i < n; i++)
		sum = (sum + picture[i]) % 256;
	size_t count = (size_t)rows->shape.n_tokens * EMBD;
	for (size_t k = 0; k < count; k++)
		if (memcmp(&rows->data[k], &(float){(float)(k % 8) + (float)sum / 256}, sizeof(float)) != 0)
			return false;
	return rows->shape.n_embd == EMBD;
}

static enum end end_of(int rc)
{
	return rc == FS_OK         ? END_OK
	       : rc == FS_EINVAL   ? END_REFUSED
	       : rc == FS_ETIMEOUT ? END_TIMEOUT
	                           : END_UNAVAILABLE;
}

static void one(struct worker *w)
{
	enum kind kind;
	size_t n = make_picture(w, &kind);
	uint8_t key[32] = {0};
	struct fs_vision_job *j = NULL;
	struct fs_rows *rows = NULL;
	struct fs_errbuf e = {""};
	atomic_fetch_add(&all.sent, 1);
	int rc = fs_vision_submit(all.v, w->picture, n, key, NULL, NULL, &j, &e);
	bool at_once = rc != FS_OK;
	if (!rc)
		rc = fs_vision_wait(j, &rows, &e);
	enum end end = end_of(rc);
	bool good = end == END_OK ? kind == GOOD && rows_are_right(rows, w->picture, n) : *e.text != '\0';
	if ((end == END_REFUSED && kind != REFUSED) || !good) {
		atomic_fetch_add(&all.wrong, 1);
		fprintf(stderr, "wrong: kind %d, %zu bytes: %s %s\n", (int)kind, n, fs_err_name(rc), e.text);
	}
	atomic_fetch_add(&all.ends[end], 1);
	fs_rows_unref(rows);
	fs_vision_job_destroy(j);
	if (at_once)
		poll(NULL, 0, 50); /* nobody is there: as a client that asks again */
}

static void *work(void *arg)
{
	while (!atomic_load(&all.stop))
		one(arg);
	return NULL;
}

static json_t *hosts_json(void)
{
	struct fs_host_status st[FS_VISION_MAX_HOSTS];
	size_t n = fs_vision_status(all.v, st, FS_ARRAY_LEN(st));
	json_t *list = json_array();
	for (size_t i = 0; i < n; i++) {
		json_t *by = json_object();
		for (size_t k = 0; k < FS_N_HOST_ERRORS; k++)
			json_object_set_new(by, fs_host_error_name((enum fs_host_error)k),
			        json_integer((json_int_t)st[i].errors_by[k]));
		json_array_append_new(
		        list, json_pack("{s:s, s:s, s:I, s:I, s:o, s:I, s:I, s:I, s:i}", "host", st[i].host,
		                      "state", fs_host_state_name(st[i].state), "encodes",
		                      (json_int_t)st[i].encodes, "errors", (json_int_t)st[i].errors,
		                      "errors_by", by, "retries", (json_int_t)st[i].retries, "hedged",
		                      (json_int_t)st[i].hedged, "hedge_wins", (json_int_t)st[i].hedge_wins,
		                      "outstanding", (int)st[i].outstanding));
	}
	return list;
}

static void report(void)
{
	json_t *o = json_pack("{s:I, s:I, s:o}", "sent", (json_int_t)atomic_load(&all.sent), "wrong",
	        (json_int_t)atomic_load(&all.wrong), "hosts", hosts_json());
	for (size_t i = 0; i < N_ENDS; i++)
		json_object_set_new(o, end_names[i], json_integer((json_int_t)atomic_load(&all.ends[i])));
	json_dumpf(o, stdout, JSON_COMPACT);
	puts("");
	json_decref(o);
}

static int start(int argc, char **argv, int *threads, uint64_t *seed, struct fs_errbuf *e)
{
	struct fs_config c;
	struct fs_vision_opts o;
	fs_config_init(&c);
	int rc = argc > 1 ? fs_config_load(&c, argv[1], e) : fs_fail(e, FS_EINVAL, "no CONFIG is named");
	for (int i = 2; i + 1 < argc && !rc; i += 2) {
		if (!strcmp(argv[i], "--set"))
			rc = fs_config_set(&c, argv[i + 1], e);
		else if (!strcmp(argv[i], "--threads"))
			*threads = atoi(argv[i + 1]);
		else if (!strcmp(argv[i], "--seed"))
			*seed = strtoull(argv[i + 1], NULL, 10);
	}
	if (!rc)
		rc = fs_config_check(&c, e);
	if (!rc) {
		fs_vision_opts_from_config(&c, &o);
		o.program = "pool_client";
		rc = fs_vision_create(&o, &all.v, e);
	}
	fs_config_finish(&c);
	return rc;
}

int main(int argc, char **argv)
{
	static struct worker workers[MAX_THREADS];
	struct fs_errbuf e = {""};
	int threads = 8;
	uint64_t seed = 1;
	char byte;
	signal(SIGPIPE, SIG_IGN);
	if (start(argc, argv, &threads, &seed, &e)) {
		fprintf(stderr, "pool_client: %s\n", e.text);
		return 1;
	}
	threads = FS_MIN(FS_MAX(threads, 1), MAX_THREADS);
	for (int i = 0; i < threads; i++) {
		workers[i].random = (seed + 1) * 0x9e3779b97f4a7c15u + (uint64_t)i;
		FS_ASSERT(fs_thread_start(&workers[i].thread, "client", work, &workers[i], &e) == FS_OK);
	}
	while (read(0, &byte, 1) > 0)
		;
	atomic_store(&all.stop, true);
	for (int i = 0; i < threads; i++)
		pthread_join(workers[i].thread, NULL);
	report();
	fs_vision_destroy(all.v);
	return 0;
}
