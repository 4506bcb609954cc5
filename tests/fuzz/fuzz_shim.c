/*
 * Fuzz target: the environment of farsight-remote: options of ssh, and the folder whose agent is started
 * there. The folder must reach the host's shell as one word, whatever it holds.
 */
#include "server/shim/shim.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

/* What a POSIX shell makes of a word of '...' and \'. NULL: it is more than that. */
static char *unquote(const char *s)
{
	char *out = calloc(1, strlen(s) + 1), *p = out;

	FS_ASSERT(out);
	for (bool inside = false; *s || inside; s++) {
		if (*s == '\'')
			inside = !inside;
		else if (*s && inside)
			*p++ = *s;
		else if (!inside && s[0] == '\\' && s[1] == '\'')
			*p++ = *++s;
		else
			break;
	}
	if (*s == '\0')
		return out;
	free(out);
	return NULL;
}

static void root(const char *text)
{
	char command[SHIM_TEXT];
	bool home = text[0] == '~' && (text[1] == '/' || !text[1]);

	if (shim_agent_command(text, command, sizeof(command), NULL))
		return;
	FS_ASSERT(strlen(command) < sizeof(command) && (!home || strncmp(command, "~/", 2) == 0));
	char *word = unquote(command + (home ? 2 : 0));
	const char *folder = home ? text + 1 + (text[1] == '/') : text;
	size_t n = strlen(folder);
	FS_ASSERT(word && strncmp(word, folder, n) == 0);
	FS_ASSERT(
	        strcmp(word + n, "bin/farsight-agent") == 0 || strcmp(word + n, "/bin/farsight-agent") == 0);
	free(word);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
	static struct shim_ssh ssh;
	struct fs_errbuf e = {""};
	char *text = n > 0 ? strndup((const char *)data + 1, n - 1) : NULL;

	if (!text)
		return 0;
	fs_log_set_level(FS_LOG_ERROR);
	if (data[0] & 1)
		root(text);
	else if (shim_ssh_opts(text, &ssh, &e))
		FS_ASSERT(strstr(e.text, "STRATA_VISION_SSH_OPTS"));
	else
		FS_ASSERT(ssh.port >= 0 && ssh.port <= 65535);
	free(text);
	return 0;
}
