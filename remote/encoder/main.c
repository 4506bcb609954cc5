/*
 * farsight-encoder: arguments and nothing else. Refuses to start without an mmproj file and with numbers that
 * are none; says why on stderr and, for the program that started it, as ERR on stdout.
 */
#include "remote/encoder/serve.h"

#include <errno.h>
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char usage[] =
        "usage: farsight-encoder --mmproj FILE [options]\n"
        "Reads orders from stdin, answers on stdout (docs/PROTOCOL.md).\n"
        "  --mmproj FILE      GGUF file with vision tower and projector\n"
        "  --model FILE       text model (GGUF) that the rows must fit\n"
        "  --gpu              encode on a GPU, or fail\n"
        "  --device NAME      cpu, auto, cuda or cuda:N; default cpu, with --gpu any GPU\n"
        "  --threads N        CPU threads; default: the cores this process may use\n"
        "  --max-tokens N     most rows of a picture; default from the file\n"
        "  --min-tokens N     fewest rows of a picture; default from the file\n"
        "  --extended         speak the extended protocol\n"
        "  --log-level LEVEL  error, warn, info or debug\n"
        "  --version, --help\n";

enum {
	OPT_MMPROJ = 256,
	OPT_MODEL,
	OPT_GPU,
	OPT_DEVICE,
	OPT_THREADS,
	OPT_MAX,
	OPT_MIN,
	OPT_EXTENDED,
	OPT_LOG,
	OPT_VERSION,
	OPT_HELP
};

static const struct option options[] = {
        {"mmproj", required_argument, NULL, OPT_MMPROJ},
        {"model", required_argument, NULL, OPT_MODEL},
        {"gpu", no_argument, NULL, OPT_GPU},
        {"device", required_argument, NULL, OPT_DEVICE},
        {"threads", required_argument, NULL, OPT_THREADS},
        {"max-tokens", required_argument, NULL, OPT_MAX},
        {"min-tokens", required_argument, NULL, OPT_MIN},
        {"extended", no_argument, NULL, OPT_EXTENDED},
        {"log-level", required_argument, NULL, OPT_LOG},
        {"version", no_argument, NULL, OPT_VERSION},
        {"help", no_argument, NULL, OPT_HELP},
        {NULL, 0, NULL, 0},
};

static _Noreturn void refuse(const char *what, const char *value)
{
	char text[256];

	snprintf(text, sizeof(text), "%s%.100s", what, value);
	fprintf(stderr, "farsight-encoder: %s (--help tells more)\n", text);
	serve_refuse(text);
	exit(2);
}

static int number(const char *option, const char *value, int max)
{
	char what[64], *end;
	long v;

	errno = 0;
	v = strtol(value, &end, 10);
	if (*value == 0 || *end != 0 || errno != 0 || v < 1 || v > max) {
		snprintf(what, sizeof(what), "%s wants a number from 1 to %d, not ", option, max);
		refuse(what, value);
	}
	return (int)v;
}

static void set_log_level(const char *name)
{
	enum fs_log_level level;

	if (fs_log_parse_level(name, &level) != FS_OK)
		refuse("--log-level knows error, warn, info and debug, not ", name);
	fs_log_set_level(level);
}

int main(int argc, char **argv)
{
	struct fs_encoder_opts o = {0};
	bool extended = false;
	int c;

	fs_gguf_name_changed_files();
	opterr = 0;
	while ((c = getopt_long(argc, argv, "", options, NULL)) != -1) {
		switch (c) {
		case OPT_MMPROJ:
			o.mmproj = optarg;
			break;
		case OPT_MODEL:
			o.model = optarg;
			break;
		case OPT_GPU:
			o.gpu = true;
			break;
		case OPT_DEVICE:
			o.device = optarg;
			break;
		case OPT_THREADS:
			o.threads = number("--threads", optarg, 1024);
			break;
		case OPT_MAX:
			o.max_tokens = number("--max-tokens", optarg, FS_ROWS_MAX_TOKENS);
			break;
		case OPT_MIN:
			o.min_tokens = number("--min-tokens", optarg, FS_ROWS_MAX_TOKENS);
			break;
		case OPT_EXTENDED:
			extended = true;
			break;
		case OPT_LOG:
			set_log_level(optarg);
			break;
		case OPT_VERSION:
			puts("farsight-encoder " FS_VERSION);
			return 0;
		case OPT_HELP:
			fputs(usage, stdout);
			return 0;
		default:
			refuse("unknown option, or one without its value: ", argv[optind - 1]);
		}
	}
	if (optind < argc)
		refuse("unexpected argument: ", argv[optind]);
	if (o.mmproj == NULL)
		refuse("--mmproj is missing", "");
	return serve(&o, extended);
}
