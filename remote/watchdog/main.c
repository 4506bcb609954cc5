/*
 * farsight-watchdog: the daemon of a vision host and its admin commands. Stays in the foreground: the agent
 * (or a service manager) detaches it. Settings, commands, service: docs/VISION_HOST.md; frames:
 * docs/PROTOCOL.md.
 */
#include "remote/watchdog/client.h"
#include "remote/watchdog/state.h"

#include <getopt.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

#define RETRY_MS 20

static void usage(FILE *f)
{
	fprintf(f, "usage: farsight-watchdog [--config FILE] [--socket PATH] [--service] [run]\n"
	           "       farsight-watchdog [--socket PATH] [--json|--text] status\n"
	           "       farsight-watchdog [--socket PATH] stop|replace|reload\n"
	           "       farsight-watchdog --help-config\n"
	           "  run      owns this host's encoder and serves servers that come in over ssh (default);\n"
	           "           SIGHUP reads the settings again\n"
	           "  status   prints what the running watchdog does: text on a terminal, else JSON\n"
	           "  stop     ends it and its encoder, and waits until both are gone\n"
	           "  replace  this program takes over from the one that runs, with its encoder and servers\n"
	           "  reload   has the running one read its settings again\n"
	           "  --service  as a service: stays although it serves nobody, and waits for a watchdog\n"
	           "             that runs already\n");
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

/* Another watchdog may take a place that became free before we do: then its end is awaited as well. */
static int init(struct fs_wd *wd, const struct fs_wd_opts *o, struct fs_errbuf *e)
{
	for (;;) {
		int rc = fs_wd_init(wd, o, e);
		if (rc != FS_EUNAVAILABLE || !o->service || o->resume_fd >= 0)
			return rc;
		rc = fs_wd_client_await_place(o->socket_path, o->notify, e);
		if (rc)
			return rc;
		poll(NULL, 0, RETRY_MS); /* it closes its socket just before it lets go of the lock */
	}
}

static int run(struct fs_wd_opts *o, int ready_fd)
{
	static struct fs_wd wd;
	struct fs_notify notify;
	struct fs_errbuf e;
	char path[4096];
	int rc = FS_OK;
	prctl(PR_SET_NAME, "farsight-watchd"); /* an exec by descriptor leaves a number there */
	fs_notify_init(&notify);
	o->notify = &notify;
	if (!o->config_path) {
		rc = fs_wd_config_default_path(path, sizeof(path), &e);
		o->config_path = path;
	}
	if (rc == FS_OK)
		rc = init(&wd, o, &e);
	if (rc) {
		fprintf(stderr, "farsight-watchdog: %s\n", e.text);
		fs_notify_status(&notify, "%s", e.text);
		fs_notify_finish(&notify);
		report_start(ready_fd, rc == FS_EUNAVAILABLE ? "busy" : e.text);
		return rc == FS_ECANCELLED ? 0 : 1;
	}
	report_start(ready_fd, "ok");
	rc = fs_wd_run(&wd);
	fs_wd_finish(&wd);
	fs_info("ended");
	return rc ? 1 : 0;
}

static int command(const char *name, struct fs_wd_opts *o, int ready_fd, bool json)
{
	if (!strcmp(name, "status"))
		return fs_wd_client_status(o->socket_path, json);
	if (!strcmp(name, "stop"))
		return fs_wd_client_stop(o->socket_path);
	if (!strcmp(name, "replace"))
		return fs_wd_client_replace(o->socket_path);
	if (!strcmp(name, "reload"))
		return fs_wd_client_reload(o->socket_path);
	if (!strcmp(name, "run"))
		return run(o, ready_fd);
	usage(stderr);
	return 2;
}

int main(int argc, char **argv)
{
	static const struct option options[] = {{"config", required_argument, NULL, 'c'},
	        {"socket", required_argument, NULL, 's'}, {"ready-fd", required_argument, NULL, 'r'},
	        {"resume-fd", required_argument, NULL, 'R'}, {"service", no_argument, NULL, 'S'},
	        {"json", no_argument, NULL, 'j'}, {"text", no_argument, NULL, 't'},
	        {"help-config", no_argument, NULL, 'k'}, {"version", no_argument, NULL, 'v'},
	        {"help", no_argument, NULL, 'h'}, {NULL, 0, NULL, 0}};
	struct fs_wd_opts opts = {.resume_fd = -1};
	bool json = !isatty(STDOUT_FILENO);
	char path[FS_WD_PATH_MAX];
	struct fs_errbuf e;
	int ready_fd = -1;
	for (int o; (o = getopt_long(argc, argv, "h", options, NULL)) != -1;) {
		switch (o) {
		case 'c':
			opts.config_path = optarg;
			break;
		case 's':
			opts.socket_path = optarg;
			break;
		case 'r':
			ready_fd = atoi(optarg);
			break;
		case 'R':
			opts.resume_fd = atoi(optarg);
			break;
		case 'S':
			opts.service = true;
			break;
		case 'j':
		case 't':
			json = o == 'j';
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
	if (optind + 1 < argc) {
		usage(stderr);
		return 2;
	}
	if (!opts.socket_path) {
		if (fs_wd_find_socket(path, &e)) {
			fprintf(stderr, "farsight-watchdog: %s\n", e.text);
			report_start(ready_fd, e.text);
			return 1;
		}
		opts.socket_path = path;
	}
	return command(optind < argc ? argv[optind] : "run", &opts, ready_fd, json);
}
