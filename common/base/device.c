/* The words for devices. */
#include "common/base/base.h"

#include <stdlib.h>
#include <string.h>

int fs_device_number(const char *s)
{
	size_t digits;

	if (strncmp(s, "cuda:", 5) != 0)
		return -1;
	digits = strspn(s + 5, "0123456789");
	return digits >= 1 && digits <= 3 && s[5 + digits] == '\0' ? atoi(s + 5) : -1;
}

bool fs_device_is_gpu(const char *s)
{
	return strcmp(s, "cuda") == 0 || fs_device_number(s) >= 0;
}

bool fs_device_is_word(const char *s)
{
	return strcmp(s, "auto") == 0 || strcmp(s, "cpu") == 0 || fs_device_is_gpu(s);
}
