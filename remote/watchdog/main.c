/*
 * farsight-watchdog: the daemon of a vision host and its two admin commands. Stays in the foreground: the
 * agent (or a service manager) detaches it. Configuration: docs/REMOTE_VISION.md; frames: docs/PROTOCOL.md.
 */
#include "remote/watchdog/state.h"

#include <errno.h>
#include <getopt.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void usage(FILE *f)
{
	fprintf(f, "usage: farsight-watchdog [--config FILE] [--socket PATH] [run|status|stop]\n"
	           "       farsight-watchdog --help-config\n"
	           "  run     owns this host's encoder and serves servers that come in over ssh (default)\n"
	           "  status  prints what the running watchdog does, as JSON\n"
	           "  stop    ends it and its encoder, and waits until it is gone\n");
}

/* The agent that started us waits on this descriptor for "ok", "busy" or the reason why not. */
static void report_start(int fd, const char *text)
{
	if (fd < 0)
		return;
	ssize_t n = write(fd, text, strlen(text));
	(void)n; /* an agent that left needs no answer */
	close(fd);
}

static int run(const char *socket_path, const char *config, int ready_fd)
{
	static struct fs_wd wd;
	struct fs_errbuf e;
	char path[4096];
	int rc = FS_OK;
	if (!config) {
		rc = fs_wd_config_default_path(path, sizeof(path), &e);
		config = path;
	}
	if (rc == FS_OK)
		rc = fs_wd_init(&wd, socket_path, config, &e);
	if (rc) {
		fprintf(stderr, "farsight-watchdog: %s\n", e.text);
		report_start(ready_fd, rc == FS_EUNAVAILABLE ? "busy" : e.text);
		return 1;
	}
	report_start(ready_fd, "ok");
	rc = fs_wd_run(&wd);
	fs_wd_finish(&wd);
	fs_info("ended");
	return rc ? 1 : 0;
}

/* One line out, everything that comes back to stdout until the watchdog closes. */
static int ask(const char *socket_path, enum fs_wd_purpose purpose, int timeout_ms)
{
	struct fs_wd_greeting g = {.purpose = purpose};
	struct fs_errbuf e;
	char line[FS_WD_GREETING_MAX], bytes[4096];
	int fd, rc = fs_wd_connect(socket_path, &fd, &e);
	if (rc) {
		fprintf(stderr, "farsight-watchdog: %s\n", e.text);
		return 1;
	}
	size_t n = fs_wd_greeting_format(&g, line);
	if (write(fd, line, n) != (ssize_t)n) {
		fprintf(stderr, "farsight-watchdog: the watchdog does not listen\n");
		close(fd);
		return 1;
	}
	int64_t until = fs_deadline_ms(timeout_ms);
	for (;;) {
		struct pollfd p = {.fd = fd, .events = POLLIN};
		int got = poll(&p, 1, fs_poll_ms(until));
		if (got < 0 && errno == EINTR)
			continue;
		ssize_t r = got > 0 ? read(fd, bytes, sizeof(bytes)) : -1;
		if (got > 0 && r < 0 && (errno == EAGAIN || errno == EINTR))
			continue;
		if (r > 0) {
			fwrite(bytes, 1, (size_t)r, stdout);
			continue;
		}
		close(fd);
		if (got > 0)
			return 0;
		fprintf(stderr, "farsight-watchdog: no answer within %d s\n", timeout_ms / 1000);
		return 1;
	}
}

int main(int argc, char **argv)
{
	static const struct option options[] = {{"config", required_argument, NULL, 'c'},
	        {"socket", required_argument, NULL, 's'}, {"ready-fd", required_argument, NULL, 'r'},
	        {"help-config", no_argument, NULL, 'k'}, {"version", no_argument, NULL, 'v'},
	        {"help", no_argument, NULL, 'h'}, {NULL, 0, NULL, 0}};
	const char *config = NULL, *socket_path = NULL;
	char path[FS_WD_PATH_MAX];
	struct fs_errbuf e;
	int ready_fd = -1;
	for (int o; (o = getopt_long(argc, argv, "h", options, NULL)) != -1;) {
		switch (o) {
		case 'c':
			config = optarg;
			break;
		case 's':
			socket_path = optarg;
			break;
		case 'r':
			ready_fd = atoi(optarg);
			break;
		case 'k':
			fs_wd_config_help();
			return 0;
		case 'v':
			printf("farsight-watchdog %s\n", FS_VERSION);
			return 0;
		case 'h':
			usage(stdout);
			return 0;
		default:
			usage(stderr);
			return 2;
		}
	}
	const char *command = optind < argc ? argv[optind] : "run";
	if (optind + 1 < argc ||
	        (strcmp(command, "run") && strcmp(command, "status") && strcmp(command, "stop"))) {
		usage(stderr);
		return 2;
	}
	if (!socket_path && fs_wd_socket_path(path, &e)) {
		fprintf(stderr, "farsight-watchdog: %s\n", e.text);
		report_start(ready_fd, e.text);
		return 1;
	}
	socket_path = socket_path ? socket_path : path;
	if (!strcmp(command, "run"))
		return run(socket_path, config, ready_fd);
	return ask(socket_path, strcmp(command, "stop") ? FS_WD_STATUS : FS_WD_STOP,
	        strcmp(command, "stop") ? 5000 : 30000);
}
