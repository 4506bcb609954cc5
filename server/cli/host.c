/* farsight host: the command line, and what all of its four subcommands need before they begin. */
#include "server/cli/host.h"

#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char usage[] =
        "usage: farsight host add NAME --mmproj FILE [options]   from nothing to a working vision host\n"
        "       farsight host check [NAME]                       what works and what to do about the rest\n"
        "       farsight host list                               the hosts of the config and their state\n"
        "       farsight host remove NAME                        undoes what add installed, there and here\n"
        "NAME is an alias of ~/.ssh/config, host, user@host or user@host:port. All can be repeated: what is\n"
        "done already is left alone, an interrupted transfer goes on where it ended.\n"
        "  --config FILE        the server's config (default: FARSIGHT_CONFIG, "
        "~/.config/farsight/server.json)\n"
        "  --yes                agrees to everything that would be asked\n"
        "the way in:\n"
        "  --port N, --identity FILE, --known-hosts FILE, --ssh-config FILE   instead of ~/.ssh/config's\n"
        "  --fingerprint SHA256:...   the host key that is expected; it is pinned without asking\n"
        "what add installs:\n"
        "  --mmproj FILE        the vision model of this machine, a GGUF file; sent and checksummed\n"
        "  --host-mmproj PATH   one that lies on the host already\n"
        "  --model FILE         the text model, for encoders that want its vocabulary: a stub of it is sent\n"
        "  --binary DIR         sends the programs of DIR instead of building on the host\n"
        "  --sources DIR        builds these sources (default: those installed with this program)\n"
        "  --encoder PROGRAM, --encoder-arg ARG   another encoder on the host, and further arguments for it\n"
        "  --gpu, --threads N   told to the encoder\n"
        "of remove:\n"
        "  --here               only this machine's config; the host is not asked\n";

enum {
	OPT_BINARY = 256,
	OPT_SOURCES,
	OPT_MODEL,
	OPT_HOST_MMPROJ,
	OPT_ENCODER,
	OPT_ENCODER_ARG,
	OPT_GPU,
	OPT_THREADS,
	OPT_HERE,
	OPT_FINGERPRINT,
	OPT_KNOWN_HOSTS,
	OPT_SSH_CONFIG,
	OPT_PORT,
	OPT_IDENTITY,
	OPT_MMPROJ
};

static const struct option options[] = {{"config", required_argument, NULL, 'c'},
        {"yes", no_argument, NULL, 'y'}, {"help", no_argument, NULL, 'h'},
        {"port", required_argument, NULL, OPT_PORT}, {"identity", required_argument, NULL, OPT_IDENTITY},
        {"known-hosts", required_argument, NULL, OPT_KNOWN_HOSTS},
        {"ssh-config", required_argument, NULL, OPT_SSH_CONFIG},
        {"fingerprint", required_argument, NULL, OPT_FINGERPRINT},
        {"mmproj", required_argument, NULL, OPT_MMPROJ},
        {"host-mmproj", required_argument, NULL, OPT_HOST_MMPROJ},
        {"model", required_argument, NULL, OPT_MODEL}, {"binary", required_argument, NULL, OPT_BINARY},
        {"sources", required_argument, NULL, OPT_SOURCES}, {"encoder", required_argument, NULL, OPT_ENCODER},
        {"encoder-arg", required_argument, NULL, OPT_ENCODER_ARG}, {"gpu", no_argument, NULL, OPT_GPU},
        {"threads", required_argument, NULL, OPT_THREADS}, {"here", no_argument, NULL, OPT_HERE}, {0}};

static int take_option(struct host_opts *o, int opt, const char *arg, struct fs_errbuf *e)
{
	const struct {
		int opt;
		const char **at;
	} texts[] = {{'c', &o->config}, {OPT_IDENTITY, &o->identity}, {OPT_KNOWN_HOSTS, &o->known_hosts},
	        {OPT_SSH_CONFIG, &o->ssh_config}, {OPT_FINGERPRINT, &o->fingerprint},
	        {OPT_MMPROJ, &o->mmproj}, {OPT_HOST_MMPROJ, &o->host_mmproj}, {OPT_MODEL, &o->model},
	        {OPT_BINARY, &o->binary}, {OPT_SOURCES, &o->sources}, {OPT_ENCODER, &o->encoder}};
	for (size_t i = 0; i < FS_ARRAY_LEN(texts); i++)
		if (texts[i].opt == opt) {
			*texts[i].at = arg;
			return FS_OK;
		}
	switch (opt) {
	case 'y':
		o->yes = true;
		return FS_OK;
	case OPT_GPU:
		o->gpu = true;
		return FS_OK;
	case OPT_HERE:
		o->here = true;
		return FS_OK;
	case OPT_PORT:
		return cli_number("--port", arg, 1, 65535, &o->port, e);
	case OPT_THREADS:
		return cli_number("--threads", arg, 1, 1024, &o->threads, e);
	case OPT_ENCODER_ARG:
		if (o->n_encoder_args == HOST_MAX_ARGS)
			return fs_fail(e, FS_ELIMIT, "at most %d --encoder-arg", HOST_MAX_ARGS);
		o->encoder_args[o->n_encoder_args++] = arg;
		return FS_OK;
	default:
		return fs_fail(e, FS_EINVAL, "wrong arguments"); /* getopt has named it */
	}
}

static const struct {
	const char *name;
	int (*run)(struct host *h);
	bool needs_name, takes_name;
} subcommands[] = {{"add", host_add, true, true}, {"check", host_check, false, true},
        {"list", host_list, false, false}, {"remove", host_remove, true, true}};

static void wake(void *arg)
{
	fs_wake(*(int *)arg);
}

static int begin(struct host *h, struct fs_errbuf *e)
{
	h->on_terminal = isatty(STDOUT_FILENO);
	h->last_percent = -1;
	int rc = fs_ssh_init(e);
	if (rc)
		return rc;
	h->wake = fs_wake_open();
	if (h->wake < 0)
		return fs_fail_errno(e, FS_EIO, "can not open an eventfd");
	rc = cli_stop_init(&h->stop, e);
	if (rc)
		return rc;
	h->have_stop = true;
	h->hook = (struct fs_cancel_hook){.fn = wake, .arg = &h->wake};
	if (!fs_cancel_listen(h->stop.token, &h->hook))
		fs_wake(h->wake);
	return FS_OK;
}

static void finish(struct host *h)
{
	fs_ssh_close(h->ssh);
	if (h->have_stop) {
		fs_cancel_unlisten(h->stop.token, &h->hook);
		cli_stop_finish(&h->stop);
	}
	if (h->wake >= 0)
		close(h->wake);
	fs_config_finish(&h->conf);
}

/* Where the config is, or will be. One that can not be read is an error: it is going to be written. */
static int read_config(struct host *h, bool may_be_new, struct fs_errbuf *e)
{
	const char *given = h->o.config ? h->o.config : getenv("FARSIGHT_CONFIG");
	if (may_be_new && given && *given && access(given, F_OK) != 0) {
		fs_config_init(&h->conf);
		snprintf(h->config_path, sizeof(h->config_path), "%s", given);
		return FS_OK;
	}
	int rc = cli_config(h->o.config, &h->conf, h->config_path, e);
	const char *xdg = getenv("XDG_CONFIG_HOME"), *home = getenv("HOME");
	if (!rc && !*h->config_path)
		snprintf(h->config_path, sizeof(h->config_path), "%s%s/farsight/server.json",
		        xdg && *xdg     ? xdg
		        : home && *home ? home
		                        : "",
		        xdg && *xdg ? "" : "/.config");
	return rc;
}

static int run(size_t which, const struct host_opts *o)
{
	struct host *h = calloc(1, sizeof(*h));
	struct fs_errbuf e = {""};
	if (!h)
		return cli_failed(&(struct fs_errbuf){"out of memory"});
	h->o = *o;
	h->wake = -1;
	int rc = read_config(h, subcommands[which].run == host_add, &e);
	if (!rc)
		rc = begin(h, &e);
	int status = rc ? cli_failed(&e) : subcommands[which].run(h) ? CLI_FAILED : CLI_OK;
	if (h->have_stop && host_stopped(h))
		puts("stopped; run it again to go on where it ended");
	finish(h);
	free(h);
	return status;
}

int cli_host(int argc, char **argv)
{
	struct host_opts o = {0};
	struct fs_errbuf e = {""};
	int opt;
	size_t which = 0;
	while ((opt = getopt_long(argc, argv, "", options, NULL)) != -1) {
		if (opt == 'h') {
			fputs(usage, stdout);
			return CLI_OK;
		}
		if (take_option(&o, opt, optarg, &e))
			return cli_misused("host", "%s", e.text);
	}
	if (optind == argc)
		return cli_misused("host", "host wants add, check, list or remove");
	while (which < FS_ARRAY_LEN(subcommands) && strcmp(subcommands[which].name, argv[optind]) != 0)
		which++;
	if (which == FS_ARRAY_LEN(subcommands))
		return cli_misused("host", "\"%.100s\" is none of add, check, list and remove", argv[optind]);
	o.name = optind + 1 < argc ? argv[optind + 1] : NULL;
	if (subcommands[which].needs_name && !o.name)
		return cli_misused("host", "host %s wants the name of a host", subcommands[which].name);
	if (argc - optind > (subcommands[which].takes_name ? 2 : 1))
		return cli_misused("host", "\"%.100s\" is one argument too many", argv[argc - 1]);
	if (o.mmproj && o.host_mmproj)
		return cli_misused("host", "--mmproj and --host-mmproj exclude each other");
	return run(which, &o);
}
