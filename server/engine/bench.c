/*
 * farsight-bench-engine: tokens per second of prefill and decode of a GGUF on this machine, medians of
 * repeats, with a hash of the logits so that two runs can be told to have computed the same. Built, not
 * installed. Random token ids from a fixed seed; every repeat has another prompt, so nothing is reused.
 *
 * prefill: prompt tokens / time until the first token's logits could be computed. decode: passes / time, a
 * pass with its logits and its greedy choice. GFLOP counts the layers' products, two a multiply-add;
 * attention and the one row of logits are left out. Bytes a token are those that a decode step can not help
 * reading: all weights but the embedding table (unless it makes the logits too), and the KV cache as it is
 * half-way.
 */
#include "server/engine/engine.h"
#include "common/bench/bench.h"
#include "common/gguf/gguf.h"

#include <getopt.h>
#include <jansson.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define NAME "farsight-bench-engine"
#define MAX_REPEAT 100

struct args {
	const char *model, *device;
	int threads, prompt, gen, repeat, chunk;
	bool json, exact;
};

static int usage(FILE *f)
{
	fprintf(f, "usage: farsight-bench-engine --model FILE.gguf [options]\n"
	           "  --threads N        CPU threads (all cores)\n"
	           "  --prompt-tokens N  512\n"
	           "  --gen N            tokens generated, 64\n"
	           "  --repeat R         5\n"
	           "  --chunk N          prefill chunk, 256, on a GPU 1024\n"
	           "  --device NAME      auto\n"
	           "  --exact            f32 products\n"
	           "  --json             one JSON object\n");
	return f == stdout ? 0 : 2;
}

static const struct option options[] = {
        {"model", required_argument, NULL, 'm'},
        {"device", required_argument, NULL, 'd'},
        {"threads", required_argument, NULL, 't'},
        {"prompt-tokens", required_argument, NULL, 'p'},
        {"gen", required_argument, NULL, 'g'},
        {"repeat", required_argument, NULL, 'r'},
        {"chunk", required_argument, NULL, 'c'},
        {"exact", no_argument, NULL, 'e'},
        {"json", no_argument, NULL, 'j'},
        {"help", no_argument, NULL, 'h'},
        {NULL, 0, NULL, 0},
};

/* -1: go on; else the exit status. */
static int parse_args(int argc, char **argv, struct args *a)
{
	int c, at = 0;
	bool ok = true;

	*a = (struct args){.prompt = 512, .gen = 64, .repeat = 5};
	while ((c = getopt_long(argc, argv, "", options, &at)) != -1) {
		switch (c) {
		case 'm':
			a->model = optarg;
			break;
		case 'd':
			a->device = optarg;
			break;
		case 't':
			ok = fs_bench_int(NAME, "threads", optarg, 0, 1024, &a->threads) && ok;
			break;
		case 'p':
			ok = fs_bench_int(NAME, "prompt-tokens", optarg, 1, 1 << 20, &a->prompt) && ok;
			break;
		case 'g':
			ok = fs_bench_int(NAME, "gen", optarg, 2, 1 << 16, &a->gen) && ok;
			break;
		case 'r':
			ok = fs_bench_int(NAME, "repeat", optarg, 1, MAX_REPEAT, &a->repeat) && ok;
			break;
		case 'c':
			ok = fs_bench_int(NAME, "chunk", optarg, 1, 4096, &a->chunk) && ok;
			break;
		case 'e':
			a->exact = true;
			break;
		case 'j':
			a->json = true;
			break;
		case 'h':
			return usage(stdout);
		default:
			return usage(stderr);
		}
	}
	return a->model == NULL || optind < argc || !ok ? usage(stderr) : -1;
}

struct hash { /* FNV-1a over the bits of one token's logits */
	uint64_t v;
	bool taken;
};

static void take_hash(void *arg, const float *logits, int32_t n)
{
	struct hash *h = arg;

	if (h->taken)
		return;
	h->taken = true;
	h->v = fs_bench_hash(logits, (size_t)n * sizeof(float));
}

static struct fs_prompt *random_prompt(struct fs_engine *en, int n, uint64_t seed, struct fs_errbuf *e)
{
	int32_t *ids = calloc((size_t)n, sizeof(*ids));
	struct fs_prompt *p = NULL;

	if (ids == NULL) {
		fs_fail(e, FS_ENOMEM, "no memory for %d ids", n);
		return NULL;
	}
	seed = seed * 0x9e3779b97f4a7c15u + 1;
	for (int i = 0; i < n; i++) {
		seed = seed * 6364136223846793005u + 1442695040888963407u;
		ids[i] = (int32_t)((seed >> 33) % (uint64_t)fs_engine_info(en)->n_vocab);
	}
	if (fs_prompt_from_ids(en, ids, (size_t)n, NULL, 0, &p, e) != FS_OK)
		p = NULL;
	free(ids);
	return p;
}

static int run_once(struct fs_engine *en, const struct args *a, int round, struct hash *h, double *prefill,
        double *decode, struct fs_errbuf *e)
{
	const struct fs_gen_params params = {.top_p = 1, .repeat_penalty = 1, .max_tokens = a->gen};
	const struct fs_gen_events ev = {.arg = h, .logits = take_hash};
	struct fs_prompt *p = random_prompt(en, a->prompt, (uint64_t)round, e);
	struct fs_gen_result r;
	int err = p == NULL ? FS_ENOMEM
	                    : fs_engine_generate(en, p, &params, NULL, round == 0 ? &ev : NULL, &r, e);

	fs_prompt_destroy(p);
	if (err != FS_OK)
		return err;
	*prefill = (double)(r.prompt_tokens - r.reused_tokens) * 1e9 / (double)r.prefill_ns;
	*decode = (double)(r.completion_tokens - 1) * 1e9 / (double)r.decode_ns;
	return FS_OK;
}

static json_t *sample_json(struct fs_sample *s)
{
	double m = fs_sample_median(s);

	return json_pack("{s:f, s:f, s:f}", "median", m, "min", s->v[0], "max", s->v[s->n - 1]);
}

struct token_cost {
	double gflop; /* of a prompt's token */
	double gb;    /* read by a decode step */
};

static int token_cost(
        const struct fs_engine_info *info, const struct args *a, struct token_cost *out, struct fs_errbuf *e)
{
	struct fs_gguf *g = NULL;
	int err = fs_gguf_open(&g, a->model, e);
	double flop = 0, bytes = (double)info->kv_bytes * (a->prompt + a->gen / 2.0) / info->n_ctx;

	if (err != FS_OK)
		return err;
	for (size_t i = 0; i < fs_gguf_n_tensors(g); i++) {
		const struct fs_gguf_tensor *t = fs_gguf_tensor_at(g, i);

		if (t->n_dims == 2 && strncmp(t->name, "blk.", 4) == 0)
			flop += 2 * (double)t->ne[0] * (double)t->ne[1];
		if (strcmp(t->name, "token_embd.weight") != 0 || !fs_gguf_has_tensor(g, "output.weight"))
			bytes += (double)t->nbytes;
	}
	fs_gguf_close(g);
	*out = (struct token_cost){.gflop = flop / 1e9, .gb = bytes / 1e9};
	return FS_OK;
}

static int print_json(const struct fs_engine_info *info, const struct args *a, struct fs_sample *pp,
        struct fs_sample *tg, const struct token_cost *cost, const char *hash)
{
	json_t *o = json_pack("{s:s, s:s, s:s, s:I, s:i, s:i, s:i, s:i, s:o, s:f, s:o, s:f, s:s}", "model",
	        info->name, "architecture", info->arch, "device", info->device, "weight_bytes",
	        (json_int_t)info->weight_bytes, "threads", a->threads, "prompt_tokens", a->prompt,
	        "generated", a->gen, "repeat", a->repeat, "prefill_tokens_per_s", sample_json(pp),
	        "prefill_gflops", fs_sample_median(pp) * cost->gflop, "decode_tokens_per_s", sample_json(tg),
	        "decode_gbs", fs_sample_median(tg) * cost->gb, "logits_hash", hash);

	if (o == NULL || json_dumpf(o, stdout, JSON_REAL_PRECISION(6)) != 0) {
		fprintf(stderr, "farsight-bench-engine: can not write JSON\n");
		return 1;
	}
	putchar('\n');
	json_decref(o);
	return 0;
}

static void print_row(const char *what, int n, struct fs_sample *s)
{
	double m = fs_sample_median(s);

	printf("%-8s %6d %12.2f %12.2f %12.2f\n", what, n, m, s->v[0], s->v[s->n - 1]);
}

static void print_table(const struct fs_engine_info *info, const struct args *a, struct fs_sample *pp,
        struct fs_sample *tg, const struct token_cost *cost, const char *hash)
{
	printf("%s (%s), %.2f GB of weights, %s, %d repeats\n", info->name, info->arch,
	        (double)info->weight_bytes / 1e9, info->device, a->repeat);
	printf("%-8s %6s %12s %12s %12s\n", "tokens/s", "tokens", "median", "min", "max");
	print_row("prefill", a->prompt, pp);
	print_row("decode", a->gen, tg);
	printf("prefill %.1f GFLOP/s, decode %.1f GB/s, logits hash %s\n", fs_sample_median(pp) * cost->gflop,
	        fs_sample_median(tg) * cost->gb, hash);
}

static int bench(struct fs_engine *en, const struct args *a, struct fs_errbuf *e)
{
	static struct fs_sample pp, tg;
	struct hash h = {0};
	char hash[32];
	struct token_cost cost = {0};
	double drop;
	int err = token_cost(fs_engine_info(en), a, &cost, e);

	if (err == FS_OK)
		err = run_once(en, a, -1, &h, &drop, &drop, e); /* touches every weight */

	for (int i = 0; i < a->repeat && err == FS_OK; i++) {
		err = run_once(en, a, i, &h, &pp.v[i], &tg.v[i], e);
		pp.n = tg.n = i + 1;
	}
	if (err != FS_OK)
		return err;
	snprintf(hash, sizeof(hash), "%016llx", (unsigned long long)h.v);
	if (a->json)
		return print_json(fs_engine_info(en), a, &pp, &tg, &cost, hash) == 0
		               ? FS_OK
		               : fs_fail(e, FS_EIO, "output failed");
	print_table(fs_engine_info(en), a, &pp, &tg, &cost, hash);
	return FS_OK;
}

int main(int argc, char **argv)
{
	struct args a;
	struct fs_engine *en = NULL;
	struct fs_errbuf e = {""};
	int status = parse_args(argc, argv, &a), err;

	if (status >= 0)
		return status;
	const struct fs_engine_opts o = {.model = a.model,
	        .device = a.device,
	        .threads = a.threads,
	        .context = a.prompt + a.gen + 1,
	        .prefill_chunk = a.chunk,
	        .exact = a.exact,
	        .ids_only = true};
	err = fs_engine_create(&o, &en, &e);
	if (err == FS_OK)
		err = bench(en, &a, &e);
	fs_engine_destroy(en);
	if (err != FS_OK) {
		fprintf(stderr, "farsight-bench-engine: %s\n", e.text);
		return 1;
	}
	return 0;
}
