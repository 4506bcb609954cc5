/* The parser of calls: any text, in pieces whose sizes the input chooses. Nothing is lost: without a call all
 * of the text comes out again. */
#include <stdlib.h>
#include <string.h>

#include "server/engine/engine.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

struct seen {
	size_t text, calls;
};

static void take_text(void *arg, const char *utf8, size_t n)
{
	struct seen *s = arg;

	FS_ASSERT(utf8 != NULL && n > 0);
	s->text += n;
}

static void take_call(void *arg, const char *name, const char *arguments)
{
	struct seen *s = arg;

	FS_ASSERT(name[0] != '\0' && arguments[0] == '{' && arguments[strlen(arguments) - 1] == '}');
	s->calls++;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
	struct seen s = {0};
	const struct fs_tool_events ev = {.arg = &s, .text = take_text, .call = take_call};
	struct fs_tool_parser *t = fs_tool_parser_create(&ev);
	size_t step = n > 0 ? data[0] % 40 + 1 : 1;

	FS_ASSERT(t != NULL);
	for (size_t at = 0; at < n; at += step)
		FS_ASSERT(fs_tool_parser_push(t, (const char *)data + at, FS_MIN(step, n - at)) == FS_OK);
	FS_ASSERT(fs_tool_parser_end(t) == FS_OK);
	FS_ASSERT(s.calls > 0 ? s.text < n : s.text == n);
	fs_tool_parser_destroy(t);
	return 0;
}
