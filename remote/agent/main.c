/*
 * farsight-agent: what the ssh channel of a server executes on the vision host. It hands its stdio to the
 * watchdog over the unix socket and stays for as long as the channel is used. Safe as a forced command
 * (restrict,command="farsight-agent"): it reads no argument from SSH_ORIGINAL_COMMAND and runs nothing but
 * the watchdog. What goes wrong before the hand-over is sent as one ERR frame, so that the server can show
 * it.
 */
#include "common/wire/wire.h"
#include "remote/agent/agent.h"

#include <fcntl.h>
#include <getopt.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define CONNECT_MS 10000
#define ERR_WRITE_MS 2000

static void usage(FILE *f)
{
	fprintf(f, "usage: farsight-agent [--socket PATH] [--watchdog PROGRAM] [--config FILE]\n"
	           "  Speaks Farsight's frames on stdin and stdout; started by farsight-server over ssh.\n"
	           "  --watchdog and --config say which watchdog is started when none runs.\n");
}

/* The address that the ssh session came from: the first word of SSH_CONNECTION. */
static void peer_address(char out[80])
{
	const char *s = getenv("SSH_CONNECTION");
	size_t n = s ? strcspn(s, " ") : 0;
	if (n >= 80)
		n = 0;
	memcpy(out, s ? s : "", n);
	out[n] = 0;
}

static void send_error(int err, const char *text)
{
	struct fs_buf b;
	fs_buf_init(&b, 4096);
	if (fs_frame_append_err(&b, 0, err, text) == FS_OK) {
		struct pollfd p = {.fd = STDOUT_FILENO, .events = POLLOUT};
		if (poll(&p, 1, ERR_WRITE_MS) > 0 && write(STDOUT_FILENO, b.data, b.len) < 0)
			fprintf(stderr, "farsight-agent: the channel is closed\n");
	}
	fs_buf_finish(&b);
	fprintf(stderr, "farsight-agent: %s\n", text);
}

static int serve(const struct fs_agent_opts *o)
{
	struct fs_wd_greeting g = {.purpose = FS_WD_CHANNEL};
	struct fs_errbuf e = {""};
	enum fs_agent_end end = FS_AGENT_WATCHDOG_GONE;
	int64_t deadline = fs_deadline_ms(CONNECT_MS);
	char greeting[FS_WD_GREETING_MAX];
	int sock, rc = fs_agent_connect(o, deadline, &sock, &e);
	if (rc) {
		send_error(rc, e.text);
		return 1;
	}
	peer_address(g.peer);
	size_t n = fs_wd_greeting_format(&g, greeting);
	int in_flags = fcntl(STDIN_FILENO, F_GETFL), out_flags = fcntl(STDOUT_FILENO, F_GETFL);
	rc = fs_agent_hand_over(STDIN_FILENO, STDOUT_FILENO, sock, greeting, n, deadline, &e);
	if (!rc)
		rc = fs_agent_confirm(STDIN_FILENO, sock, &e);
	if (rc)
		send_error(rc, e.text);
	else
		end = fs_agent_attend(STDIN_FILENO, sock);
	/* The descriptors may be shared with a shell or a script. */
	fcntl(STDIN_FILENO, F_SETFL, in_flags);
	fcntl(STDOUT_FILENO, F_SETFL, out_flags);
	close(sock);
	if (rc)
		return 1;
	if (end == FS_AGENT_PEER_GONE)
		return 0;
	fprintf(stderr, "farsight-agent: the watchdog closed the connection\n");
	return 3;
}

int main(int argc, char **argv)
{
	static const struct option options[] = {{"socket", required_argument, NULL, 's'},
	        {"watchdog", required_argument, NULL, 'w'}, {"config", required_argument, NULL, 'c'},
	        {"version", no_argument, NULL, 'v'}, {"help", no_argument, NULL, 'h'}, {NULL, 0, NULL, 0}};
	struct fs_agent_opts opts = {0};
	struct fs_errbuf e;
	char path[FS_WD_PATH_MAX];
	signal(SIGPIPE, SIG_IGN);
	for (int o; (o = getopt_long(argc, argv, "h", options, NULL)) != -1;) {
		switch (o) {
		case 's':
			opts.socket_path = optarg;
			break;
		case 'w':
			opts.watchdog = optarg;
			break;
		case 'c':
			opts.config = optarg;
			break;
		case 'v':
			printf("farsight-agent %s\n", FS_VERSION);
			return 0;
		case 'h':
			usage(stdout);
			return 0;
		default:
			usage(stderr);
			return 2;
		}
	}
	if (optind < argc) {
		usage(stderr);
		return 2;
	}
	if (!opts.socket_path) {
		int rc = fs_wd_find_socket(path, &e);
		if (rc) {
			send_error(rc, e.text);
			return 1;
		}
		opts.socket_path = path;
	}
	return serve(&opts);
}
