/* farsight stub: a GGUF without weights, by common/gguf. */
#include "common/gguf/gguf.h"
#include "server/cli/cli.h"

#include <getopt.h>
#include <stdio.h>

static const char usage[] =
        "usage: farsight stub FULL.gguf OUT.gguf\n"
        "Writes what FULL says of itself: metadata, vocabulary and the names of its tensors, without their\n"
        "weights. Of a split model the first part is enough. Encoders that need the text model for its\n"
        "vocabulary and its sizes alone take the small file instead. An OUT that exists is replaced.\n";

int cli_stub(int argc, char **argv)
{
	static const struct option options[] = {{"help", no_argument, NULL, 'h'}, {0}};
	struct fs_gguf_stub_info info;
	struct fs_errbuf e = {""};
	int opt = getopt_long(argc, argv, "", options, NULL);
	if (opt == 'h') {
		fputs(usage, stdout);
		return CLI_OK;
	}
	if (opt != -1 || argc - optind != 2)
		return cli_misused("stub", "stub takes the model and the file to write");
	if (fs_gguf_write_stub(argv[optind], argv[optind + 1], &info, &e))
		return cli_failed(&e);
	printf("%s: %zu keys, %zu tensors without weights, %.2f MiB of %.2f MiB\n", argv[optind + 1],
	        info.n_keys, info.n_tensors, (double)info.bytes_out / 1048576,
	        (double)info.bytes_in / 1048576);
	return CLI_OK;
}
