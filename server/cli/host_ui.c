/* The lines of `farsight host`, its questions and its progress bars. */
#include "server/cli/host.h"

#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static void FS_PRINTF(3, 0) print_line(const char *mark, const char *step, const char *fmt, va_list ap)
{
	char text[2048];
	vsnprintf(text, sizeof(text), fmt, ap);
	printf("%-7s %s%s", mark, step, *step ? ": " : "");
	cli_print(stdout, text);
	putchar('\n');
	fflush(stdout);
}

void host_ok(struct host *h, const char *step, const char *fmt, ...)
{
	va_list ap;
	host_progress_end(h);
	va_start(ap, fmt);
	print_line("ok", step, fmt, ap);
	va_end(ap);
}

void host_done(struct host *h, const char *step, const char *fmt, ...)
{
	va_list ap;
	host_progress_end(h);
	va_start(ap, fmt);
	print_line("done", step, fmt, ap);
	va_end(ap);
}

void host_note(struct host *h, const char *fmt, ...)
{
	va_list ap;
	host_progress_end(h);
	va_start(ap, fmt);
	print_line("note", "", fmt, ap);
	va_end(ap);
}

int host_failed(struct host *h, int err, const char *step, const char *remedy, const char *text)
{
	host_progress_end(h);
	printf("failed  %s: ", step);
	cli_print(stdout, text);
	putchar('\n');
	if (remedy && *remedy) {
		fputs("        -> ", stdout);
		cli_print(stdout, remedy);
		putchar('\n');
	}
	fflush(stdout);
	h->failed++;
	return err ? err : FS_EINTERNAL;
}

bool host_stopped(void *host)
{
	struct host *h = host;
	return fs_cancelled(h->stop.token);
}

/* One line of the terminal; false at its end or when Ctrl-C comes. Byte by byte, since nothing of the next
 * answer may be read ahead. */
static bool read_answer(struct host *h, char *out, size_t cap)
{
	size_t n = 0;
	while (n + 1 < cap) {
		struct pollfd p[2] = {
		        {.fd = STDIN_FILENO, .events = POLLIN}, {.fd = h->wake, .events = POLLIN}};
		if (poll(p, 2, -1) < 0 && !host_stopped(h))
			continue;
		if (host_stopped(h) || read(STDIN_FILENO, out + n, 1) != 1)
			return false;
		if (out[n] == '\n')
			break;
		n++;
	}
	out[n] = '\0';
	return true;
}

bool host_ask(struct host *h, const char *fmt, ...)
{
	char text[2048], answer[32] = "";
	va_list ap;
	host_progress_end(h);
	va_start(ap, fmt);
	vsnprintf(text, sizeof(text), fmt, ap);
	va_end(ap);
	if (h->o.yes || !isatty(STDIN_FILENO)) {
		host_note(h, "%s %s", text,
		        h->o.yes ? "yes (--yes)" : "no (there is nobody to ask; --yes agrees)");
		return h->o.yes;
	}
	cli_print(stdout, text);
	fputs(" [y/N] ", stdout);
	fflush(stdout);
	bool read = read_answer(h, answer, sizeof(answer));
	return read && (!strcmp(answer, "y") || !strcmp(answer, "Y") || !strcmp(answer, "yes"));
}

void host_progress(struct host *h, const char *what, uint64_t at, uint64_t total)
{
	enum { WIDTH = 40 };
	if (total == 0)
		return;
	int percent = (int)((double)at * 100 / (double)total);
	if (percent == h->last_percent || (!h->on_terminal && percent / 10 == h->last_percent / 10))
		return;
	h->last_percent = percent;
	if (!h->on_terminal) {
		printf("        %s: %d %%\n", what, percent / 10 * 10);
	} else {
		char bar[WIDTH + 1];
		memset(bar, ' ', WIDTH);
		memset(bar, '#', (size_t)(percent * WIDTH / 100));
		bar[WIDTH] = '\0';
		printf("\r        %s [%s] %3d %% ", what, bar, percent);
	}
	fflush(stdout);
}

void host_progress_end(struct host *h)
{
	if (h->on_terminal && h->last_percent >= 0)
		fputs("\r\033[K", stdout);
	h->last_percent = -1;
}
