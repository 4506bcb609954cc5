/* farsight: finds the subcommand and hands the rest of the command line to it. */
#include "server/cli/cli.h"

#include <signal.h>
#include <stdio.h>
#include <string.h>

static const struct {
	const char *name, *what;
	int (*run)(int argc, char **argv);
} commands[] = {
        {"host", "sets up vision hosts, checks, lists and removes them", cli_host},
        {"status", "what a running server and its vision hosts are doing", cli_status},
        {"ask", "asks a running server one question, about pictures too", cli_ask},
        {"encode", "turns a picture into a rows file, on a vision host or here", cli_encode},
        {"stub", "makes a small GGUF with metadata and vocabulary, without weights", cli_stub},
};

static void usage(FILE *f)
{
	fputs("usage: farsight COMMAND [ARGUMENTS]\n"
	      "       farsight COMMAND --help\n"
	      "       farsight --help | --version\n",
	        f);
	for (size_t i = 0; i < FS_ARRAY_LEN(commands); i++)
		fprintf(f, "  %-8s %s\n", commands[i].name, commands[i].what);
	fputs("Exit status: 0 done, 1 failed, 2 wrong command line.\n", f);
}

static int unknown(const char *word)
{
	const char *known[FS_ARRAY_LEN(commands)];
	for (size_t i = 0; i < FS_ARRAY_LEN(commands); i++)
		known[i] = commands[i].name;
	const char *near = fs_nearest_word(word, known, FS_ARRAY_LEN(known));
	fprintf(stderr, "farsight: \"%.100s\" is no command", word);
	if (fs_word_is_near(word, near))
		fprintf(stderr, "; did you mean \"%s\"?", near);
	fputs("\nfarsight: \"farsight --help\" lists them\n", stderr);
	return CLI_USAGE;
}

int main(int argc, char **argv)
{
	signal(SIGPIPE, SIG_IGN); /* of sockets; a closed stdout shows when it is flushed */
	if (argc < 2) {
		usage(stderr);
		return CLI_USAGE;
	}
	if (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "help") == 0) {
		usage(stdout);
		return CLI_OK;
	}
	if (strcmp(argv[1], "--version") == 0) {
		puts("farsight " FS_VERSION);
		return CLI_OK;
	}
	for (size_t i = 0; i < FS_ARRAY_LEN(commands); i++) {
		if (strcmp(argv[1], commands[i].name) != 0)
			continue;
		fs_log_set_level(FS_LOG_WARN); /* what is worth a line to an admin; --verbose tells more */
		int rc = commands[i].run(argc - 1, argv + 1);
		if (fflush(stdout) || ferror(stdout)) {
			perror("farsight: stdout");
			return rc ? rc : CLI_FAILED;
		}
		return rc;
	}
	return unknown(argv[1]);
}
