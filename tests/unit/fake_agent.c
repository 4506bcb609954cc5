/*
 * fake_agent: the far end of the ssh channel for tests of server/vision: speaks frames on stdin and stdout,
 * makes rows from the picture's bytes by a rule that the test knows, and misbehaves on demand. One thread;
 * answers of several requests are interleaved on purpose.
 *
 *   --rows N --embd E        size of the answer (default 4 x 8, nx = N)
 *   --hello-embd E           what HELLO says, when it is to differ
 *   --fingerprint HEX        in HELLO
 *   --delay MS               before an answer;   --hang: never answer
 *   --slow-first             the delay is for the first request alone, so that answers overtake
 *   --serial                 one answer after the other, as an encoder works
 *   --late-from N --late MS  from the N-th request on the delay is MS
 *   --die-at N               exit after N bytes of an answer
 *   --break-at N             ERR after so many bytes of an answer, and no more of it
 *   --refuse CODE TEXT       answer ERR; --refuse-from N: from the N-th request on
 *   --nan                    one NaN in the rows
 *   --malformed              a frame that follows no format instead of the answer
 *   --print TEXT             this before HELLO, as a shell's start-up file would
 *   --mute                   no HELLO;  --mute-pings: no PONG
 *   --version N              in HELLO
 *   --starting MS            HELLO "starting", and "ready" after MS;  --failed TEXT: HELLO "failed"
 *   --stderr TEXT            to stderr at start
 *   --flood WHAT             "data", "pings" or "states" without end, instead of the answer
 *   --once FILE              --die-at, --refuse and --flood happen only if FILE does not exist yet (it is
 * made then)
 *   --log FILE               appends one line an event
 */
#include "common/gguf/gguf.h"
#include "common/wire/wire.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MAX_REQUESTS 64

struct request {
	uint32_t id; /* 0 = free */
	struct fs_enc_head head;
	uint64_t sum;
	size_t got;
	int64_t due; /* when the answer starts; FS_NEVER until the picture is whole */
	uint8_t *rows;
	size_t n, at;
};
static struct {
	int rows, embd, hello_embd, delay, die_at, break_at, refuse, version, starting, late_from, late,
	        refuse_from;
	bool hang, serial, slow_first, nan, malformed, mute, mute_pings;
	const char *refuse_text, *print, *failed, *err, *once, *log, *fingerprint, *flood;
} knob = {.rows = 4,
        .embd = 8,
        .die_at = -1,
        .break_at = -1,
        .version = FS_PROTOCOL_VERSION,
        .starting = -1,
        .fingerprint = "00112233445566778899aabbccddeeff"};
static struct request requests[MAX_REQUESTS];
static int n_seen;
static int64_t last_due;
static int64_t ready_at = FS_NEVER;

static void note(const char *what, uint32_t id, size_t n)
{
	if (!knob.log)
		return;
	FILE *f = fopen(knob.log, "ae");
	FS_ASSERT(f);
	fprintf(f, "%s %u %zu\n", what, id, n);
	fclose(f);
}

static void put(const void *p, size_t n)
{
	const uint8_t *b = p;
	while (n) {
		ssize_t w = write(1, b, n);
		if (w < 0 && errno == EINTR)
			continue;
		if (w <= 0)
			exit(3);
		b += w;
		n -= (size_t)w;
	}
}

static void put_frame(uint8_t type, uint32_t id, const void *p, size_t n)
{
	struct fs_buf b;
	fs_buf_init(&b, FS_FRAME_MAX + FS_FRAME_HEADER);
	FS_ASSERT(fs_frame_append(&b, type, id, p, n) == FS_OK);
	put(b.data, b.len);
	fs_buf_finish(&b);
}

static void put_err(uint32_t id, int err, const char *text)
{
	uint8_t b[600];
	size_t n = strlen(text);
	b[0] = (uint8_t)-err;
	b[1] = b[2] = b[3] = 0;
	memcpy(b + 4, text, n);
	put_frame(FS_FRAME_ERR, id, b, 4 + n);
}

static void put_hello(const char *state)
{
	struct fs_hello h = {.version = knob.version, .min_tokens = 1, .max_tokens = 1000};
	bool ready = !strcmp(state, "ready");
	snprintf(h.program, sizeof(h.program), "fake_agent");
	snprintf(h.state, sizeof(h.state), "%s", state);
	if (ready) {
		snprintf(h.fingerprint, sizeof(h.fingerprint), "%s", knob.fingerprint);
		snprintf(h.device, sizeof(h.device), "fake");
		h.vram_free_mb = 3000;
		h.vram_total_mb = 12000;
		h.n_embd = knob.hello_embd ? knob.hello_embd : knob.embd;
	} else if (knob.failed) {
		snprintf(h.cause, sizeof(h.cause), "%s", knob.failed);
	}
	struct fs_buf b;
	fs_buf_init(&b, 8192);
	FS_ASSERT(fs_hello_format(&h, &b) == FS_OK);
	put_frame(FS_FRAME_HELLO, 0, b.data, b.len);
	fs_buf_finish(&b);
}

/* --once: whether the fault happens this time. */
static bool fault(void)
{
	if (!knob.once)
		return true;
	int fd = open(knob.once, O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC, 0600);
	if (fd < 0)
		return false;
	close(fd);
	return true;
}

/* Row values are exact in f16: element i is ((sum of the picture's bytes + i) mod 1000) / 8. */
static void make_rows(struct request *r)
{
	size_t n = (size_t)knob.rows * (size_t)knob.embd;
	bool f16 = r->head.dtype == FS_WIRE_F16;
	r->n = n * (f16 ? 2 : 4);
	r->rows = malloc(r->n);
	FS_ASSERT(r->rows);
	for (size_t i = 0; i < n; i++) {
		float f = (float)((r->sum + i) % 1000) / 8.0f;
		if (knob.nan && i == n / 2)
			f = NAN;
		uint16_t h = fs_f32_to_f16(f);
		if (f16)
			memcpy(r->rows + 2 * i, &h, 2);
		else
			memcpy(r->rows + 4 * i, &f, 4);
	}
	struct fs_rows_head head = {.shape = {knob.rows, knob.rows, 1, knob.embd},
	        .dtype = r->head.dtype,
	        .encode_us = 1500,
	        .queue_us = 500};
	uint8_t wire[FS_ROWS_HEAD];
	fs_rows_head_put(wire, &head);
	put_frame(FS_FRAME_ROWS, r->id, wire, sizeof(wire));
}

static void drop(struct request *r)
{
	free(r->rows);
	*r = (struct request){0};
}

static void start_answer(struct request *r)
{
	if (knob.malformed) {
		uint8_t junk[FS_FRAME_HEADER] = {1, 0, 0, 0, 200, 0, 0, 0, 1, 0, 0, 0};
		put(junk, sizeof(junk));
	}
	if (knob.refuse && n_seen >= knob.refuse_from && fault()) {
		put_err(r->id, -knob.refuse, knob.refuse_text);
		drop(r);
		return;
	}
	make_rows(r);
}

static void next_chunk(struct request *r)
{
	size_t n = FS_MIN(r->n - r->at, (size_t)FS_FRAME_CHUNK);
	if (knob.die_at >= 0 && r->at + n >= (size_t)knob.die_at && fault()) {
		uint8_t head[FS_FRAME_HEADER];
		fs_frame_header_put(head, FS_FRAME_DATA, r->id, (uint32_t)n);
		if ((size_t)knob.die_at > r->at) {
			put(head, sizeof(head));
			put(r->rows + r->at, (size_t)knob.die_at - r->at);
		}
		note("died", r->id, (size_t)knob.die_at);
		exit(9);
	}
	if (knob.break_at >= 0 && r->at + n > (size_t)knob.break_at && fault()) {
		if ((size_t)knob.break_at > r->at)
			put_frame(FS_FRAME_DATA, r->id, r->rows + r->at, (size_t)knob.break_at - r->at);
		put_err(r->id, FS_EUNAVAILABLE, "broken off");
		note("broken", r->id, (size_t)knob.break_at);
		drop(r);
		return;
	}
	put_frame(FS_FRAME_DATA, r->id, r->rows + r->at, n);
	r->at += n;
	if (r->at == r->n) {
		note("sent", r->id, r->n);
		drop(r);
	}
}

static struct request *find(uint32_t id)
{
	for (size_t i = 0; i < MAX_REQUESTS; i++)
		if (requests[i].id == id)
			return &requests[i];
	return NULL;
}

_Noreturn static void flood(void)
{
	static const uint8_t rows[FS_FRAME_CHUNK];
	for (;;) { /* until nobody takes it any more */
		if (!strcmp(knob.flood, "data"))
			put_frame(FS_FRAME_DATA, 0x7fffffff, rows, sizeof(rows));
		else if (!strcmp(knob.flood, "pings"))
			put_frame(FS_FRAME_PING, 0, "12345678", 8);
		else
			put_frame(FS_FRAME_STATE, 0, "{\"state\":\"ready\"}", 17);
	}
}

static void on_enc(const struct fs_frame *f)
{
	struct request *r = find(0);
	FS_ASSERT(r && f->id);
	*r = (struct request){.id = f->id, .due = FS_NEVER};
	FS_ASSERT(fs_enc_head_get(f->payload, f->len, &r->head, NULL) == FS_OK);
	FS_ASSERT(r->head.deadline_ms > 0);
	note("enc", f->id, r->head.picture_bytes);
	if (knob.flood && fault())
		flood();
}

static void on_data(const struct fs_frame *f)
{
	struct request *r = find(f->id);
	if (!r)
		return;
	for (uint32_t i = 0; i < f->len; i++)
		r->sum += f->payload[i];
	r->got += f->len;
	FS_ASSERT(r->got <= r->head.picture_bytes);
	if (r->got < r->head.picture_bytes || knob.hang)
		return;
	bool slow = !knob.slow_first || n_seen == 0;
	n_seen++;
	int delay = knob.late_from && n_seen >= knob.late_from ? knob.late : slow ? knob.delay : 0;
	r->due = fs_deadline_ms(delay);
	if (knob.serial) {
		r->due = FS_MAX(r->due, last_due + delay * FS_MS);
		last_due = r->due;
	}
}

static void on_cancel(const struct fs_frame *f)
{
	struct request *r = find(f->id);
	note("cancel", f->id, 0);
	if (r) {
		put_err(f->id, FS_ECANCELLED, "cancelled");
		drop(r);
	}
}

static void on_frame(const struct fs_frame *f)
{
	switch (f->type) {
	case FS_FRAME_HELLO:
		note("hello", 0, f->len);
		break;
	case FS_FRAME_ENC:
		on_enc(f);
		break;
	case FS_FRAME_DATA:
		on_data(f);
		break;
	case FS_FRAME_CANCEL:
		on_cancel(f);
		break;
	case FS_FRAME_PING:
		if (!knob.mute_pings)
			put_frame(FS_FRAME_PONG, 0, f->payload, f->len);
		break;
	case FS_FRAME_BYE:
		note("bye", 0, 0);
		exit(0);
	default:
		break;
	}
}

static void read_frames(struct fs_buf *in)
{
	FS_ASSERT(fs_buf_reserve(in, 65536) == FS_OK);
	ssize_t n = read(0, in->data + in->len, 65536);
	if (n <= 0) {
		note("eof", 0, 0);
		exit(0);
	}
	in->len += (size_t)n;
	struct fs_frame f;
	size_t used;
	while (fs_frame_parse(in->data, in->len, &f, &used, NULL) == FS_OK) {
		on_frame(&f);
		fs_buf_consume(in, used);
	}
}

static void parse_knobs(int argc, char **argv)
{
	for (int i = 1; i < argc; i++) {
		const char *a = argv[i], *v = i + 1 < argc ? argv[i + 1] : "";
		const struct {
			const char *name;
			int *number;
			const char **text;
			bool *flag;
		} table[] = {{"--rows", &knob.rows, NULL, NULL}, {"--embd", &knob.embd, NULL, NULL},
		        {"--hello-embd", &knob.hello_embd, NULL, NULL}, {"--delay", &knob.delay, NULL, NULL},
		        {"--die-at", &knob.die_at, NULL, NULL}, {"--break-at", &knob.break_at, NULL, NULL},
		        {"--version", &knob.version, NULL, NULL}, {"--starting", &knob.starting, NULL, NULL},
		        {"--late-from", &knob.late_from, NULL, NULL}, {"--late", &knob.late, NULL, NULL},
		        {"--refuse-from", &knob.refuse_from, NULL, NULL},
		        {"--serial", NULL, NULL, &knob.serial},
		        {"--fingerprint", NULL, &knob.fingerprint, NULL},
		        {"--print", NULL, &knob.print, NULL}, {"--failed", NULL, &knob.failed, NULL},
		        {"--stderr", NULL, &knob.err, NULL}, {"--flood", NULL, &knob.flood, NULL},
		        {"--once", NULL, &knob.once, NULL}, {"--log", NULL, &knob.log, NULL},
		        {"--hang", NULL, NULL, &knob.hang}, {"--slow-first", NULL, NULL, &knob.slow_first},
		        {"--nan", NULL, NULL, &knob.nan}, {"--malformed", NULL, NULL, &knob.malformed},
		        {"--mute", NULL, NULL, &knob.mute}, {"--mute-pings", NULL, NULL, &knob.mute_pings}};
		bool known = false;
		if (!strcmp(a, "--refuse") && i + 2 < argc) {
			knob.refuse = atoi(v);
			knob.refuse_text = argv[i + 2];
			i += 2;
			continue;
		}
		for (size_t k = 0; k < FS_ARRAY_LEN(table) && !known; k++) {
			if (strcmp(a, table[k].name))
				continue;
			known = true;
			if (table[k].flag)
				*table[k].flag = true;
			else if (table[k].number)
				*table[k].number = atoi(v);
			else
				*table[k].text = v;
			i += !table[k].flag;
		}
		FS_ASSERT(known);
	}
}

int main(int argc, char **argv)
{
	parse_knobs(argc, argv);
	if (knob.err)
		fprintf(stderr, "%s\n", knob.err);
	if (knob.print)
		put(knob.print, strlen(knob.print));
	if (knob.starting >= 0)
		ready_at = fs_deadline_ms(knob.starting);
	if (!knob.mute)
		put_hello(knob.failed ? "failed" : knob.starting >= 0 ? "starting" : "ready");
	struct fs_buf in;
	fs_buf_init(&in, 4 * FS_FRAME_MAX);
	for (;;) {
		int64_t next = ready_at, now = fs_now();
		for (size_t i = 0; i < MAX_REQUESTS; i++)
			if (requests[i].id)
				next = FS_MIN(next, requests[i].due);
		struct pollfd pf = {.fd = 0, .events = POLLIN};
		if (poll(&pf, 1, fs_poll_ms(next)) > 0)
			read_frames(&in);
		now = fs_now();
		if (now >= ready_at) {
			ready_at = FS_NEVER;
			put_hello("ready");
		}
		for (size_t i = 0; i < MAX_REQUESTS; i++) {
			struct request *r = &requests[i];
			if (!r->id || now < r->due)
				continue;
			if (!r->rows)
				start_answer(r);
			else
				next_chunk(r);
		}
	}
}
