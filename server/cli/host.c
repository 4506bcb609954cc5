/* farsight host: not in this build yet. */
#include "server/cli/cli.h"

int cli_host(int argc, char **argv)
{
	return cli_misused(
	        "host", "\"host\" is not in this build; docs/CONFIG.md says how to add a host by hand");
}
