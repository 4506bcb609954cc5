/*
 * farsight-bench-transport: what the network path adds to one picture. In one run, round by round: (a) our
 * path, server/vision through agent and watchdog to a null encoder; (b) the same bytes over one plain OpenSSH
 * connection that stays open; (c) one ssh command a transfer with base64, the way it was done before. Prints
 * medians, with --json one object. With --loopback it starts a sshd of its own and needs nothing configured;
 * else the named host must have farsight-agent set up with tests/tools/null_encoder.
 */
#include "common/bench/bench.h"
#include "server/vision/vision.h"
#include "tests/unit/sshd.h"

#include <errno.h>
#include <getopt.h>
#include <jansson.h>
#include <libgen.h>
#include <openssl/evp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define MAX_ROUNDS 500

struct bench {
	/* options */
	const char *host, *bin, *ssh_options[16];
	size_t n_ssh_options;
	bool loopback, json, f16;
	int rounds, tokens, embd;
	size_t up, down;
	/* state */
	struct test_sshd sshd;
	char host_text[64], agent[1024], plain[1024], remote_file[300], port[16], known[300];
	struct fs_vision *v;
	struct fs_child ssh;
	uint8_t *picture, *sink;
	double ours[MAX_ROUNDS], openssh[MAX_ROUNDS], base64[MAX_ROUNDS];
};

_Noreturn static void die(const char *what, const char *why)
{
	fprintf(stderr, "farsight-bench-transport: %s: %s\n", what, why);
	exit(1);
}

static double ms_since(int64_t t)
{
	return (double)(fs_now() - t) / (double)FS_MS;
}

/* ---- (a) ---- */

static void ours(struct bench *b, double *ms)
{
	struct fs_vision_job *j = NULL;
	struct fs_rows *rows = NULL;
	struct fs_errbuf e;
	uint8_t key[32] = {0};
	int64_t t = fs_now();
	if (fs_vision_submit(b->v, b->picture, b->up, key, NULL, NULL, &j, &e) ||
	        fs_vision_wait(j, &rows, &e))
		die("our path", e.text);
	*ms = ms_since(t);
	if ((size_t)rows->shape.n_tokens * (size_t)rows->shape.n_embd != (size_t)b->tokens * (size_t)b->embd)
		die("our path", "rows of another shape");
	fs_rows_unref(rows);
	fs_vision_job_destroy(j);
}

/* ---- children ---- */

/* Writes up bytes and reads down bytes, both at once; down 0: to the end. Returns what was read. */
static size_t exchange(
        struct fs_child *c, const uint8_t *out, size_t up, uint8_t *in, size_t cap, bool to_the_end)
{
	size_t sent = 0, got = 0;
	while (to_the_end || sent < up || got < cap) {
		if (sent == up && to_the_end && c->in >= 0) {
			close(c->in);
			c->in = -1;
		}
		struct pollfd pf[2] = {
		        {.fd = c->out, .events = POLLIN}, {.fd = sent < up ? c->in : -1, .events = POLLOUT}};
		if (poll(pf, 2, 60000) <= 0)
			die("ssh", "nothing moved for a minute");
		if (pf[1].revents) {
			ssize_t w = write(c->in, out + sent, up - sent);
			if (w < 0 && errno != EAGAIN)
				die("ssh", strerror(errno));
			sent += w > 0 ? (size_t)w : 0;
		}
		if (!pf[0].revents)
			continue;
		ssize_t r = read(c->out, in + got, cap - got);
		if (r == 0 || (r < 0 && errno != EAGAIN)) {
			if (to_the_end && r == 0)
				break;
			die("ssh", "the connection ended");
		}
		got += r > 0 ? (size_t)r : 0;
		if (to_the_end && got == cap)
			die("ssh", "more bytes than expected");
	}
	return got;
}

static void start_ssh(struct bench *b, struct fs_child *c, const char *command)
{
	const char *argv[32] = {"ssh", "-T", "-o", "BatchMode=yes"};
	size_t n = 4;
	for (size_t i = 0; i < b->n_ssh_options; i++)
		argv[n++] = b->ssh_options[i];
	argv[n++] = b->loopback ? "127.0.0.1" : b->host;
	argv[n++] = command;
	argv[n] = NULL;
	struct fs_errbuf e;
	if (fs_child_start(c, argv, NULL, false, true, &e))
		die("ssh", e.text);
}

/* ---- (b) ---- */

static void openssh(struct bench *b, double *ms)
{
	int64_t t = fs_now();
	exchange(&b->ssh, b->picture, b->up, b->sink, b->down, false);
	*ms = ms_since(t);
}

/* ---- (c) ---- */

static void end_ssh(struct fs_child *c)
{
	int status = 0;
	waitpid(c->pid, &status, 0);
	c->pid = 0;
	fs_child_end(c, 0);
	if (status)
		die("ssh", "a command failed");
}

static void base64(struct bench *b, double *ms)
{
	char command[400];
	struct fs_child c;
	size_t cap = b->down / 3 * 4 + b->down / 40 + 1024;
	uint8_t *text = malloc(FS_MAX(cap, b->up * 2)), nothing[64];
	int64_t t = fs_now();
	int n = EVP_EncodeBlock(text, b->picture, (int)b->up);
	snprintf(command, sizeof(command), "base64 -d > %s.up", b->remote_file);
	start_ssh(b, &c, command);
	exchange(&c, text, (size_t)n, nothing, sizeof(nothing), true);
	end_ssh(&c);
	snprintf(command, sizeof(command), "base64 %s", b->remote_file);
	start_ssh(b, &c, command);
	size_t got = exchange(&c, NULL, 0, text, cap, true);
	end_ssh(&c);
	EVP_ENCODE_CTX *ctx = EVP_ENCODE_CTX_new();
	int out = 0, tail = 0;
	EVP_DecodeInit(ctx);
	if (EVP_DecodeUpdate(ctx, b->sink, &out, text, (int)got) < 0 ||
	        EVP_DecodeFinal(ctx, b->sink + out, &tail) < 0 || (size_t)(out + tail) != b->down)
		die("base64", "what came back is not what was sent");
	*ms = ms_since(t);
	EVP_ENCODE_CTX_free(ctx);
	free(text);
}

/* ---- set-up ---- */

static void write_watchdog_config(struct bench *b)
{
	char path[300], text[1200];
	snprintf(path, sizeof(path), "%s/farsight", b->sshd.dir);
	mkdir(path, 0700);
	snprintf(path, sizeof(path), "%s/null.gguf", b->sshd.dir);
	test_write_file(path, "not looked into by the null encoder", 0600);
	snprintf(text, sizeof(text),
	        "{\"mmproj\": \"%s\", \"encoder\": \"%s/tests/tools/null_encoder\", \"encoder_args\": "
	        "[\"--rows\", \"%dx%d\"], "
	        "\"extended\": true, \"idle_exit_s\": 1}\n",
	        path, b->bin, b->tokens, b->embd);
	snprintf(path, sizeof(path), "%s/farsight/vision-host.json", b->sshd.dir);
	test_write_file(path, text, 0600);
}

static void add_ssh_option(struct bench *b, const char *o)
{
	if (b->n_ssh_options == FS_ARRAY_LEN(b->ssh_options))
		die("options", "too many for ssh");
	b->ssh_options[b->n_ssh_options++] = o;
}

static void set_up_loopback(struct bench *b)
{
	if (!test_sshd_available())
		exit(77);
	test_sshd_init(&b->sshd, NULL);
	write_watchdog_config(b);
	snprintf(b->host_text, sizeof(b->host_text), "127.0.0.1:%d", b->sshd.port);
	b->host = b->host_text;
	snprintf(b->agent, sizeof(b->agent),
	        "env XDG_RUNTIME_DIR=%s XDG_CONFIG_HOME=%s "
	        "FARSIGHT_WATCHDOG=%s/remote/watchdog/farsight-watchdog %s/remote/agent/farsight-agent",
	        b->sshd.dir, b->sshd.dir, b->bin, b->bin);
	snprintf(b->plain, sizeof(b->plain), "%s/tests/tools/pump %zu %zu", b->bin, b->up, b->down);
	snprintf(b->port, sizeof(b->port), "%d", b->sshd.port);
	snprintf(b->known, sizeof(b->known), "UserKnownHostsFile=%s", b->sshd.known_hosts);
	const char *const options[] = {"-F", "none", "-p", b->port, "-i", b->sshd.identity, "-o", b->known};
	for (size_t i = 0; i < FS_ARRAY_LEN(options); i++)
		add_ssh_option(b, options[i]);
	snprintf(b->remote_file, sizeof(b->remote_file), "%s/rows", b->sshd.dir);
}

static void set_up_remote(struct bench *b)
{
	/* what stands on every host: a shell loop in place of the pump */
	snprintf(b->plain, sizeof(b->plain),
	        "while [ \"$(head -c %zu | wc -c)\" -eq %zu ]; do head -c %zu /dev/zero; done", b->up, b->up,
	        b->down);
	snprintf(b->remote_file, sizeof(b->remote_file), "/tmp/farsight-bench-%d", (int)getpid());
}

static void put_remote_rows(struct bench *b)
{
	struct fs_child c;
	char command[400];
	uint8_t nothing[64];
	snprintf(command, sizeof(command), "cat > %s", b->remote_file);
	start_ssh(b, &c, command);
	exchange(&c, b->sink, b->down, nothing, sizeof(nothing), true);
	end_ssh(&c);
}

static void remove_remote_rows(struct bench *b)
{
	struct fs_child c;
	char command[700];
	uint8_t nothing[64];
	snprintf(command, sizeof(command), "rm -f %s %s.up", b->remote_file, b->remote_file);
	start_ssh(b, &c, command);
	exchange(&c, NULL, 0, nothing, sizeof(nothing), true);
	end_ssh(&c);
}

static void set_up(struct bench *b)
{
	struct fs_errbuf e;
	b->down = (size_t)b->tokens * (size_t)b->embd * (b->f16 ? 2 : 4);
	b->picture = malloc(b->up);
	b->sink = malloc(b->down + 64);
	if (!b->picture || !b->sink)
		die("memory", "out of it");
	uint32_t x = 7;
	for (size_t i = 0; i < b->up; i++)
		b->picture[i] = (uint8_t)((x = x * 1664525u + 1013904223u) >> 24);
	for (size_t i = 0; i < b->down; i++)
		b->sink[i] = (uint8_t)((x = x * 1664525u + 1013904223u) >> 24);
	if (b->loopback)
		set_up_loopback(b);
	else
		set_up_remote(b);
	struct fs_vision_opts o = {
	        .n_hosts = 1, .n_embd = b->embd, .f16 = b->f16, .connect_timeout_ms = 10000};
	o.hosts[0] = (struct fs_vision_host_opts){.host = b->host};
	if (b->loopback)
		o.hosts[0] = (struct fs_vision_host_opts){.host = b->host,
		        .identity = b->sshd.identity,
		        .known_hosts = b->sshd.known_hosts,
		        .config_file = b->sshd.ssh_config,
		        .command = b->agent};
	if (fs_vision_create(&o, &b->v, &e))
		die("vision", e.text);
	start_ssh(b, &b->ssh, b->plain);
	put_remote_rows(b);
}

/* ---- result ---- */

static double median(const double *v, int n)
{
	struct fs_sample s = {.n = n};
	memcpy(s.v, v, (size_t)n * sizeof(*v));
	return fs_sample_median(&s);
}

static double least(const double *v, int n)
{
	double m = v[0];
	for (int i = 1; i < n; i++)
		m = FS_MIN(m, v[i]);
	return m;
}

static void report(const struct bench *b)
{
	int n = b->rounds;
	double a = median(b->ours, n), p = median(b->openssh, n), c = median(b->base64, n);
	if (b->json) {
		json_t *o = json_pack("{s:f,s:f,s:f,s:f,s:f,s:f,s:f,s:f,s:i,s:I,s:I,s:b,s:s}",
		        "ratio_openssh", a / p, "ratio_base64", a / c, "ours_ms", a, "openssh_ms", p,
		        "base64_ms", c, "ours_min_ms", least(b->ours, n), "openssh_min_ms",
		        least(b->openssh, n), "base64_min_ms", least(b->base64, n), "rounds", n, "bytes_up",
		        (json_int_t)b->up, "bytes_down", (json_int_t)b->down, "f16", b->f16, "host",
		        b->loopback ? "loopback" : b->host);
		char *text = o ? json_dumps(o, JSON_PRESERVE_ORDER) : NULL;
		puts(text ? text : "{}");
		free(text);
		json_decref(o);
		return;
	}
	printf("%zu bytes up, %zu bytes down, %s, medians of %d interleaved rounds\n\n", b->up, b->down,
	        b->loopback ? "loopback" : b->host, n);
	printf("%-46s %10s %10s\n", "", "median ms", "least ms");
	printf("%-46s %10.1f %10.1f\n", "farsight (agent, watchdog, null encoder)", a, least(b->ours, n));
	printf("%-46s %10.1f %10.1f\n", "one open OpenSSH connection", p, least(b->openssh, n));
	printf("%-46s %10.1f %10.1f\n", "one ssh command a transfer, base64", c, least(b->base64, n));
	printf("\nfarsight / OpenSSH %.2f (budget 1.3)   farsight / base64 %.3f (budget 0.1)\n", a / p,
	        a / c);
}

static void parse(struct bench *b, int argc, char **argv)
{
	static const struct option longs[] = {{"loopback", no_argument, NULL, 'l'},
	        {"host", required_argument, NULL, 'h'}, {"rounds", required_argument, NULL, 'r'},
	        {"json", no_argument, NULL, 'j'}, {"f16", no_argument, NULL, 'f'},
	        {"rows", required_argument, NULL, 'R'}, {"up", required_argument, NULL, 'u'},
	        {"bin", required_argument, NULL, 'b'}, {"ssh-option", required_argument, NULL, 'o'}, {0}};
	int c;
	bool good = true;
	while ((c = getopt_long(argc, argv, "", longs, NULL)) != -1) {
		b->loopback |= c == 'l';
		b->json |= c == 'j';
		b->f16 |= c == 'f';
		if (c == 'h')
			b->host = optarg;
		else if (c == 'r')
			b->rounds = atoi(optarg);
		else if (c == 'u')
			b->up = strtoul(optarg, NULL, 10);
		else if (c == 'b')
			b->bin = optarg;
		else if (c == 'o')
			add_ssh_option(b, optarg);
		else if (c == 'R')
			good = good && sscanf(optarg, "%dx%d", &b->tokens, &b->embd) == 2;
		else if (c == '?')
			good = false;
	}
	if (!good || b->loopback == (b->host != NULL) || b->rounds < 1 || b->rounds > MAX_ROUNDS ||
	        b->tokens < 1 || b->tokens > 65536 || b->embd < 1 || b->embd > 65536 || b->up < 1 ||
	        b->up > FS_PICTURE_MAX) {
		fprintf(stderr,
		        "usage: farsight-bench-transport --loopback | --host HOST [--ssh-option OPT]…\n"
		        "       [--rounds 21] [--rows 1024x2560] [--up 200000] [--f16] [--json] [--bin "
		        "BUILD-FOLDER]\n");
		exit(2);
	}
}

/* In each order in turn: what ran just before decides on which processors things find themselves, and what
 * the caches hold. */
static void run_round(struct bench *b, int i)
{
	static const char orders[][4] = {"abc", "bca", "cab", "acb", "cba", "bac"};
	for (const char *way = orders[(size_t)i % FS_ARRAY_LEN(orders)]; *way; way++)
		if (*way == 'a')
			ours(b, &b->ours[i]);
		else if (*way == 'b')
			openssh(b, &b->openssh[i]);
		else
			base64(b, &b->base64[i]);
}

int main(int argc, char **argv)
{
	static struct bench b = {.rounds = 21, .tokens = 1024, .embd = 2560, .up = 200000};
	parse(&b, argc, argv);
	char self[1024] = "";
	if (!b.bin && readlink("/proc/self/exe", self, sizeof(self) - 1) > 0)
		b.bin = dirname(dirname(dirname(self)));
	fs_log_set_level(FS_LOG_WARN);
	set_up(&b);
	double warm;
	for (int i = 0; i < 2; i++) {
		ours(&b, &warm);
		openssh(&b, &warm);
	}
	for (int i = 0; i < b.rounds; i++)
		run_round(&b, i);
	report(&b);
	fs_vision_destroy(b.v);
	fs_child_end(&b.ssh, 1000);
	remove_remote_rows(&b);
	if (b.loopback)
		test_sshd_finish(&b.sshd);
	free(b.picture);
	free(b.sink);
	return 0;
}
