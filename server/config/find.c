/* Where the config lies when nobody names it. Reads the environment; any thread. */
#include "server/config/config.h"

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

void fs_config_find(const char *given, char *path, size_t cap)
{
	const char *env = getenv("FARSIGHT_CONFIG"), *xdg = getenv("XDG_CONFIG_HOME"), *home = getenv("HOME");
	path[0] = '\0';
	if (!given && env && *env)
		given = env;
	if (given) {
		snprintf(path, cap, "%s", given);
		return;
	}
	if (xdg && *xdg)
		snprintf(path, cap, "%s/farsight/server.json", xdg);
	else if (home && *home)
		snprintf(path, cap, "%s/.config/farsight/server.json", home);
	if (*path && access(path, F_OK) != 0)
		path[0] = '\0';
}
