/*
 * fake_encoder: an encoder of the line protocol that does what a test wants. It shares no code with Farsight,
 * so that both sides of the protocol are not wrong in the same way. One thread.
 *
 * Rows: element k of a picture is (k % 8) + (sum of the picture's bytes % 256) / 256, exact in f32 and in
 * f16.
 *
 * Arguments (others are ignored): --extended, --embd N (8), --rows NXxNY (2x2), --log FILE, --ready-delay-ms
 * N, --noise (rows are drawn from a generator that all bytes of the picture seed: multiples of 1/256),
 * --control FILE (its words, while it is there, are for every picture),
 * --pipe (READY says that rows may go into a FIFO), --mute (never READY), --exit N (before READY, with words
 * on stderr), --start-err TEXT, --fail-once FILE (exits before READY unless FILE exists, and makes it),
 * --child (a second process of its group), --stubborn (ignores TERM, QUIT and EOF). A picture that holds
 * "FAKE " tells by the words after it what this answer alone does: delay=MS rows=NXxNY embd=N hang die
 * nonsense longline nan err=WORD norows short twice grow (takes memory until it is killed) deaf (CANCEL is
 * not read), mid=hang, die or err (half of the rows are written before that), more (than the header says).
 */
#include <errno.h>
#include <math.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static struct {
	bool extended, mute, child, stubborn, noise, pipe;
	int embd, nx, ny, ready_delay, exit_code;
	const char *log, *start_err, *fail_once, *control;
} opt = {.embd = 8, .nx = 2, .ny = 2, .exit_code = -1};

struct answer {
	int delay, nx, ny, embd;
	bool hang, die, nonsense, longline, nan, norows, shorter, twice, deaf, grow;
	uint64_t seed; /* FNV-1a of the picture's bytes */
	char err[64], mid[8];
	bool more;
};

static char input[65536];
static size_t input_len;

__attribute__((format(printf, 1, 2))) static void note(const char *fmt, ...)
{
	va_list ap;
	FILE *f = opt.log ? fopen(opt.log, "a") : NULL;
	if (!f)
		return;
	va_start(ap, fmt);
	vfprintf(f, fmt, ap);
	va_end(ap);
	fputc('\n', f);
	fclose(f);
}

static int64_t now_ms(void)
{
	struct timespec ts;
	clock_gettime(CLOCK_MONOTONIC, &ts);
	return (int64_t)ts.tv_sec * 1000 + ts.tv_nsec / 1000000;
}

_Noreturn static void leave(const char *why)
{
	if (opt.stubborn) {
		note("stubborn %s", why);
		for (;;)
			pause();
	}
	note("end %s", why);
	_exit(0);
}

/* Waits for a line until the time is over (ms from now, -1 for ever); false when there is none. */
static bool next_line(char *line, size_t cap, int ms)
{
	int64_t until = now_ms() + ms;
	for (;;) {
		char *nl = memchr(input, '\n', input_len);
		if (nl) {
			size_t n = (size_t)(nl - input);
			size_t keep = n < cap ? n : cap - 1;
			memcpy(line, input, keep);
			line[keep] = 0;
			input_len -= n + 1;
			memmove(input, nl + 1, input_len);
			return true;
		}
		int left = ms < 0 ? -1 : (int)(until - now_ms());
		struct pollfd p = {.fd = 0, .events = POLLIN};
		if (ms >= 0 && left < 0)
			return false;
		int got = poll(&p, 1, left);
		if (got < 0 && errno == EINTR)
			continue;
		if (got <= 0)
			return false;
		ssize_t n = read(0, input + input_len, sizeof(input) - input_len);
		if (n <= 0)
			leave("eof");
		input_len += (size_t)n;
	}
}

__attribute__((format(printf, 1, 2))) static void say(const char *fmt, ...)
{
	va_list ap;
	va_start(ap, fmt);
	vprintf(fmt, ap);
	va_end(ap);
	putchar('\n');
	fflush(stdout);
}

static void take_word(struct answer *a, const char *w)
{
	struct {
		const char *name;
		bool *flag;
	} flags[] = {{"hang", &a->hang}, {"die", &a->die}, {"nonsense", &a->nonsense},
	        {"longline", &a->longline}, {"nan", &a->nan}, {"norows", &a->norows}, {"short", &a->shorter},
	        {"twice", &a->twice}, {"deaf", &a->deaf}, {"grow", &a->grow}, {"more", &a->more}};
	for (size_t i = 0; i < sizeof(flags) / sizeof(flags[0]); i++)
		if (!strcmp(flags[i].name, w))
			*flags[i].flag = true;
	if (!strncmp(w, "delay=", 6))
		a->delay = atoi(w + 6);
	else if (!strncmp(w, "embd=", 5))
		a->embd = atoi(w + 5);
	else if (!strncmp(w, "mid=", 4))
		snprintf(a->mid, sizeof(a->mid), "%.7s", w + 4);
	else if (!strncmp(w, "err=", 4))
		snprintf(a->err, sizeof(a->err), "%.63s", w + 4);
	else if (!strncmp(w, "rows=", 5) && sscanf(w + 5, "%dx%d", &a->nx, &a->ny) != 2)
		exit(2);
}

static void take_words(struct answer *a, char *text)
{
	char *save = NULL;
	for (char *w = strtok_r(text, " \n", &save); w; w = strtok_r(NULL, " \n", &save))
		take_word(a, w);
}

static void read_control(struct answer *a)
{
	char text[512];
	FILE *f = opt.control ? fopen(opt.control, "r") : NULL;
	if (!f)
		return;
	text[fread(text, 1, sizeof(text) - 1, f)] = 0;
	fclose(f);
	take_words(a, text);
}

/* The picture's sum of bytes; its words when it has some. */
static int read_picture(const char *path, struct answer *a, long *size)
{
	static unsigned char bytes[1 << 20];
	char text[512];
	int sum = 0;
	size_t n;
	FILE *f = fopen(path, "rb");
	if (!f)
		return -1;
	*size = 0;
	while ((n = fread(bytes, 1, sizeof(bytes), f)) > 0) {
		const unsigned char *words = *size == 0 ? memmem(bytes, n, "FAKE ", 5) : NULL;
		if (words) {
			size_t keep = (size_t)(bytes + n - words);
			if (keep >= sizeof(text))
				keep = sizeof(text) - 1;
			memcpy(text, words, keep);
			text[keep] = 0;
			take_words(a, text);
		}
		for (size_t i = 0; i < n; i++) {
			sum = (sum + bytes[i]) % 256;
			a->seed = (a->seed ^ bytes[i]) * 0x100000001b3;
		}
		*size += (long)n;
	}
	fclose(f);
	return sum;
}

static uint16_t half_of(float x)
{
	/* exact for the values above: 0 <= x < 8 with 8 fractional bits */
	int e;
	if (isnan(x))
		return 0x7e00;
	if (x == 0)
		return 0;
	float m = frexpf(x, &e);
	return (uint16_t)(((e - 1 + 15) << 10) + (int)((m * 2 - 1) * 1024));
}

/* Element k: splitmix64 from the picture's seed. */
static float noise(const struct answer *a, size_t k)
{
	uint64_t z = a->seed + (k + 1) * 0x9e3779b97f4a7c15;
	z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
	z = (z ^ z >> 27) * 0x94d049bb133111eb;
	return (float)((z ^ z >> 31) >> 56) / 256;
}

/* In the middle of the rows. Returns for an answer of ERR alone. */
static void break_off(const char *how)
{
	note("half");
	if (!strcmp(how, "die"))
		raise(SIGKILL);
	while (!strcmp(how, "hang"))
		pause();
}

/* false: the disk is full. */
static bool write_rows(const char *path, const struct answer *a, int sum, bool f16)
{
	int32_t head[5] = {0x31455653, a->nx * a->ny, a->nx, a->ny, a->embd};
	size_t n = (size_t)head[1] * (size_t)a->embd, size = f16 ? 2 : 4;
	uint8_t *out = malloc(n * size);
	FILE *f = fopen(path, "wb");
	struct stat st;
	if (!out || !f || fstat(fileno(f), &st))
		exit(3);
	note("out %s", S_ISFIFO(st.st_mode) ? "fifo" : "file");
	for (size_t k = 0; k < n; k++) {
		float x = opt.noise ? noise(a, k) : (float)(k % 8) + (float)sum / 256;
		if (a->nan && k == n - 1)
			x = NAN;
		uint16_t h = half_of(x);
		memcpy(out + k * size, f16 ? (void *)&h : (void *)&x, size);
	}
	if (a->shorter)
		n--;
	size_t first = a->mid[0] ? n / 2 : n;
	bool ok = fwrite(head, sizeof(head), 1, f) == 1 && fwrite(out, size, first, f) == first;
	if (a->more)
		ok = fwrite(out, size, 1, f) == 1 && ok;
	if (a->mid[0] && fflush(f) == 0)
		break_off(a->mid);
	free(out);
	if (fclose(f))
		ok = false;
	if (!ok)
		unlink(path);
	return ok;
}

_Noreturn static void grow(void)
{
	const size_t piece = 8 << 20;
	note("grow");
	for (;;) {
		char *p = malloc(piece);
		if (!p)
			abort();
		explicit_bzero(p, piece); /* a memset of memory that nobody looks at may be left out */
	}
}

/* true when the order was cancelled. */
static bool work(const struct answer *a)
{
	char line[512];
	int64_t until = now_ms() + a->delay;
	for (;;) {
		int left = a->hang ? -1 : (int)(until - now_ms());
		if (a->deaf && left > 0) {
			poll(NULL, 0, left);
			return false;
		}
		if (left < 0 && !a->hang)
			left = 0;
		if (!next_line(line, sizeof(line), left))
			return false;
		if (!strcmp(line, "CANCEL")) {
			note("cancel");
			if (opt.extended && !a->deaf)
				return true;
		} else if (!strcmp(line, "QUIT")) {
			leave("quit");
		}
	}
}

static void encode(char *order)
{
	struct answer a = {.nx = opt.nx, .ny = opt.ny, .embd = opt.embd, .seed = 0xcbf29ce484222325};
	bool f16 = false;
	char min_max[64] = "";
	long size = 0;
	char *paths = order + 4, *space = strrchr(order, ' ');
	*space = 0;
	while (opt.extended && strchr(paths, ' ')) {
		f16 |= !strncmp(paths, "dtype=f16 ", 10);
		if (!strncmp(paths, "min=", 4) || !strncmp(paths, "max=", 4))
			snprintf(min_max + strlen(min_max), sizeof(min_max) - strlen(min_max), " %.*s",
			        (int)strcspn(paths, " "), paths);
		paths = strchr(paths, ' ') + 1;
	}
	read_control(&a);
	int sum = read_picture(paths, &a, &size);
	note("enc %ld %d %s", size, sum, f16 ? "f16" : "f32");
	note("file %s", paths);
	if (min_max[0])
		note("limits%s", min_max);
	if (sum < 0) {
		say("ERR cannot read the image %s", paths);
		return;
	}
	if (work(&a)) {
		say("ERR cancelled");
		return;
	}
	if (a.grow)
		grow();
	if (a.die) {
		note("die");
		raise(SIGKILL);
	}
	if (a.err[0]) {
		say("ERR %s", a.err);
		return;
	}
	if (a.nonsense) {
		say("HELLO WORLD");
		return;
	}
	if (a.longline) {
		for (int i = 0; i < 20000; i++)
			putchar('x');
		fflush(stdout);
		return;
	}
	if (!a.norows && !write_rows(space + 1, &a, sum, f16)) {
		say("ERR cannot write %s: %s", space + 1, strerror(errno));
		note("full");
		return;
	}
	note("ok"); /* first: a fault may end this process between the two */
	if (a.mid[0]) {
		say("ERR broken off");
		return;
	}
	say("OK %d %d %d 1.5", a.nx * a.ny, a.nx, a.ny);
	if (a.twice)
		say("OK %d %d %d 1.5", a.nx * a.ny, a.nx, a.ny);
}

static void start(void)
{
	note("start %d", (int)getpid());
	if (opt.stubborn)
		signal(SIGTERM, SIG_IGN);
	if (opt.fail_once && access(opt.fail_once, F_OK)) {
		fclose(fopen(opt.fail_once, "w"));
		opt.exit_code = 7;
	}
	if (opt.exit_code >= 0) {
		fprintf(stderr, "the fake model is broken\n");
		exit(opt.exit_code);
	}
	if (opt.start_err) {
		say("ERR %s", opt.start_err);
		exit(1);
	}
	if (opt.child) {
		pid_t pid = fork();
		if (pid == 0) {
			signal(SIGTERM, SIG_IGN);
			for (;;)
				pause();
		}
		note("child %d", (int)pid);
	}
	if (opt.ready_delay)
		poll(NULL, 0, opt.ready_delay);
	while (opt.mute)
		pause();
	if (opt.extended)
		say("READY %d fingerprint=00112233445566778899aabbccddeeff device=fake min_tokens=4 "
		    "max_tokens=1024%s",
		        opt.embd, opt.pipe ? " rows=pipe" : "");
	else
		say("READY %d", opt.embd);
}

static void parse(int argc, char **argv)
{
	for (int i = 1; i < argc; i++) {
		const char *a = argv[i], *v = i + 1 < argc ? argv[i + 1] : "";
		opt.extended |= !strcmp(a, "--extended");
		opt.mute |= !strcmp(a, "--mute");
		opt.child |= !strcmp(a, "--child");
		opt.stubborn |= !strcmp(a, "--stubborn");
		opt.noise |= !strcmp(a, "--noise");
		opt.pipe |= !strcmp(a, "--pipe");
		if (!strcmp(a, "--embd"))
			opt.embd = atoi(v);
		else if (!strcmp(a, "--rows") && sscanf(v, "%dx%d", &opt.nx, &opt.ny) != 2)
			exit(2);
		else if (!strcmp(a, "--log"))
			opt.log = v;
		else if (!strcmp(a, "--ready-delay-ms"))
			opt.ready_delay = atoi(v);
		else if (!strcmp(a, "--exit"))
			opt.exit_code = atoi(v);
		else if (!strcmp(a, "--start-err"))
			opt.start_err = v;
		else if (!strcmp(a, "--fail-once"))
			opt.fail_once = v;
		else if (!strcmp(a, "--control"))
			opt.control = v;
	}
}

int main(int argc, char **argv)
{
	char line[8192];
	parse(argc, argv);
	for (int i = 1; i < argc; i++)
		note("arg %s", argv[i]);
	start();
	while (next_line(line, sizeof(line), -1)) {
		if (!strncmp(line, "ENC ", 4) && strchr(line + 4, ' '))
			encode(line);
		else if (!strcmp(line, "QUIT"))
			leave("quit");
		else if (strcmp(line, "CANCEL"))
			say("ERR expected: ENC <image> <output>");
	}
	return 0;
}
