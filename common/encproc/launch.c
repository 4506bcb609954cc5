/* The argv and the environment of an encoder; see launch.h. Any thread that owns its struct. */
#include "common/encproc/launch.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void arg(struct fs_launch *l, const char *s)
{
	FS_ASSERT(l->n + 1 < FS_LAUNCH_ARGS);
	l->argv[l->n++] = s;
	l->argv[l->n] = NULL;
}

static void number_arg(struct fs_launch *l, const char *name, int32_t value)
{
	if (value <= 0)
		return;
	char *s = l->numbers[l->n_numbers++];
	snprintf(s, sizeof(l->numbers[0]), "%d", value);
	arg(l, name);
	arg(l, s);
}

static void build_argv(struct fs_launch *l, const struct fs_encproc_opts *o)
{
	arg(l, o->program);
	arg(l, "--mmproj");
	arg(l, o->mmproj);
	if (o->model && *o->model) {
		arg(l, "--model");
		arg(l, o->model);
	}
	if (o->gpu)
		arg(l, "--gpu");
	if (o->gpu_if_any) {
		arg(l, "--device");
		arg(l, "auto");
	}
	number_arg(l, "--threads", o->threads);
	number_arg(l, "--max-tokens", o->max_tokens);
	number_arg(l, "--min-tokens", o->min_tokens);
	if (o->extended)
		arg(l, "--extended");
	for (size_t i = 0; o->args && o->args[i]; i++)
		arg(l, o->args[i]);
}

static bool is_variable(const char *entry, const char *name)
{
	size_t n = strlen(name);
	return !strncmp(entry, name, n) && entry[n] == '=';
}

/* The card is chosen by the environment that CUDA reads, so that any encoder obeys it. */
static int build_env(struct fs_launch *l, const char *devices, struct fs_errbuf *e)
{
	static const char order[] = "CUDA_DEVICE_ORDER=PCI_BUS_ID";
	size_t n = 0, kept = 0;
	while (environ[n])
		n++;
	l->env = calloc(n + 3, sizeof(*l->env));
	if (!l->env)
		return fs_fail(e, FS_ENOMEM, "out of memory");
	for (size_t i = 0; i < n; i++)
		if (!is_variable(environ[i], "CUDA_DEVICE_ORDER") &&
		        !is_variable(environ[i], "CUDA_VISIBLE_DEVICES"))
			l->env[kept++] = environ[i];
	snprintf(l->cuda, sizeof(l->cuda), "CUDA_VISIBLE_DEVICES=%s", devices);
	l->env[kept++] = (char *)order;
	l->env[kept] = l->cuda;
	return FS_OK;
}

bool fs_encproc_is_ours(const char *program)
{
	const char *slash = strrchr(program, '/');
	return strcmp(slash ? slash + 1 : program, "farsight-encoder") == 0;
}

int fs_encproc_set_device(struct fs_encproc_opts *o, const char *device, struct fs_errbuf *e)
{
	if (!fs_device_is_word(device))
		return fs_fail(e, FS_EINVAL, "must be " FS_DEVICE_WORDS);
	o->gpu = fs_device_is_gpu(device);
	o->gpu_if_any = strcmp(device, "auto") == 0 && fs_encproc_is_ours(o->program);
	snprintf(o->cuda_devices, sizeof(o->cuda_devices), "%s",
	        fs_device_number(device) >= 0 ? device + 5
	        : o->gpu || o->gpu_if_any     ? ""
	                                      : "-1");
	return FS_OK;
}

int fs_launch_init(struct fs_launch *l, const struct fs_encproc_opts *o, struct fs_errbuf *e)
{
	*l = (struct fs_launch){0};
	build_argv(l, o);
	return o->cuda_devices[0] ? build_env(l, o->cuda_devices, e) : FS_OK;
}

void fs_launch_finish(struct fs_launch *l)
{
	free(l->env);
	l->env = NULL;
}

uint64_t fs_launch_oom_kills(void)
{
	char line[128];
	unsigned long long n = 0;
	FILE *f = fopen("/proc/vmstat", "re");
	while (f && fgets(line, sizeof(line), f))
		if (sscanf(line, "oom_kill %llu", &n) == 1)
			break;
	if (f)
		fclose(f);
	return n;
}
