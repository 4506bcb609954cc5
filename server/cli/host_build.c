/*
 * The programs of a vision host: sources that are sent and built there by scripts/remote-build, or programs
 * that were built elsewhere. Both go as a tar that is made the same each time, so that its SHA-256 names the
 * version; the same version is not sent, and not built, twice.
 */
#include "server/cli/host.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define TAR_MAX ((size_t)512 << 20)
#define TAR_S 60
#define SEND_S 3600
#define BUILD_S 7200
#define SHOWN_LINES 12

/* What scripts/remote-build needs, and no more. */
static bool is_sources(const char *folder)
{
	char path[CLI_PATH + 32];
	snprintf(path, sizeof(path), "%s/scripts/remote-build", folder);
	return access(path, R_OK) == 0;
}

int host_find_sources(const struct host *h, char out[CLI_PATH], struct fs_errbuf *e)
{
	char self[CLI_PATH];
	if (h->o.sources) {
		snprintf(out, CLI_PATH, "%s", h->o.sources);
		return is_sources(out)
		               ? FS_OK
		               : fs_fail(e, FS_EINVAL,
		                         "%s holds no sources (scripts/remote-build is missing)", out);
	}
	ssize_t n = readlink("/proc/self/exe", self, sizeof(self) - 1);
	char *slash = n > 0 ? memrchr(self, '/', (size_t)n) : NULL;
	if (slash) {
		snprintf(out, CLI_PATH, "%.*s/../share/farsight/src", (int)(slash - self), self);
		if (is_sources(out))
			return FS_OK;
	}
	snprintf(out, CLI_PATH, "%s", FS_SOURCE_ROOT);
	if (is_sources(out))
		return FS_OK;
	return fs_fail(
	        e, FS_ENOTFOUND, "the sources are neither beside this program nor in %s", FS_SOURCE_ROOT);
}

static int make_tar(struct host *h, const char *folder, const char *mode, const char *const names[], size_t n,
        struct fs_buf *out, char sum[65], struct fs_errbuf *e)
{
	const char *argv[40] = {"tar", "-C", folder, "--format=ustar", "--sort=name", "--mtime=@0",
	        "--owner=0", "--group=0", "--numeric-owner", mode, "--dereference", "--exclude=.*",
	        "--exclude=*~", "-cf", "-"};
	size_t at = 15;
	FS_ASSERT(at + n < FS_ARRAY_LEN(argv));
	for (size_t i = 0; i < n; i++)
		argv[at++] = names[i];
	int rc = host_child(h, argv, out, TAR_S, e);
	if (!rc)
		host_sha256(out->data, out->len, sum);
	return rc;
}

struct upload {
	struct host *h;
	const char *what;
	uint64_t total;
};

static void on_sent(void *arg, uint64_t n)
{
	struct upload *u = arg;
	host_progress(u->h, u->what, n, u->total);
}

/* $1 is the checksum; the tar becomes the folder $d/$2.new, which the rest of the script goes on with. The
 * files are as old as their arrival (-m): in the tar all have one age, by which no build sees what is new. */
#define UNPACK                                                                                               \
	"set -e; umask 077; d=\"$HOME/.local/farsight\"; mkdir -p \"$d/share\" \"$d/bin\"; "                 \
	"t=\"$d/share/sent.tar\"; "                                                                          \
	"trap \"rm -f \\\"$t\\\"\" EXIT; cat > \"$t\"; "                                                     \
	"if [ \"$(sha256sum < \"$t\" | cut -d \" \" -f 1)\" != \"$1\" ]; then "                              \
	"echo \"it arrived damaged or in part\" >&2; exit 8; fi; "                                           \
	"rm -rf \"$d/$2.new\"; mkdir \"$d/$2.new\"; tar -xmf \"$t\" -C \"$d/$2.new\"; "

static int send_tar(struct host *h, const char *script, const char *folder, const char *what,
        const struct fs_buf *tar, const char *sum, int *status, struct fs_errbuf *e)
{
	struct upload u = {h, what, tar->len};
	struct host_call c = {.script = script,
	        .args = {sum, folder},
	        .input = tar->data,
	        .input_n = tar->len,
	        .sent = on_sent,
	        .arg = &u,
	        .deadline_s = SEND_S};
	return host_call(h, &c, status, e);
}

/* ---- built elsewhere ---- */

static int check_binary(struct host *h, const char *const names[], size_t n)
{
	struct fs_errbuf e;
	for (size_t i = 0; i < n; i++) {
		char path[CLI_PATH + 64];
		snprintf(path, sizeof(path), "%s/%s", h->o.binary, names[i]);
		if (access(path, X_OK) == 0)
			continue;
		fs_fail_errno(&e, FS_ENOTFOUND, "%s", path);
		return host_failed(h, FS_ENOTFOUND, "programs",
		        "--binary wants a folder with farsight-agent, farsight-watchdog and farsight-encoder",
		        e.text);
	}
	return FS_OK;
}

int host_send_binary(struct host *h)
{
	static const char *const names[] = {"farsight-agent", "farsight-watchdog", "farsight-encoder"};
	/* Programs that do not run there never replace any. A running one is replaced by name, not in place;
	 * one that is the same stays, so that a warm encoder is not taken for an old one. */
	static const char script[] =
	        UNPACK "for p in farsight-agent farsight-watchdog farsight-encoder; do \"$d/bin.new/$p\" "
	               "--version > /dev/null; "
	               "done; for p in farsight-agent farsight-watchdog farsight-encoder; do "
	               "cmp -s \"$d/bin.new/$p\" \"$d/bin/$p\" 2> /dev/null || "
	               "mv -f \"$d/bin.new/$p\" \"$d/bin/$p\"; "
	               "done; rm -rf \"$d/bin.new\" \"$d/share/built\"; echo \"$1\" > \"$d/share/binary\"";
	struct fs_errbuf e = {""};
	struct fs_buf tar;
	char sum[65];
	int status, rc = check_binary(h, names, FS_ARRAY_LEN(names));
	if (rc)
		return rc;
	fs_buf_init(&tar, TAR_MAX);
	rc = make_tar(h, h->o.binary, "--mode=0755", names, FS_ARRAY_LEN(names), &tar, sum, &e);
	bool same = !rc && !strcmp(sum, h->facts.binary) && *h->facts.version;
	if (!rc && !same)
		rc = send_tar(h, script, "bin", "programs", &tar, sum, &status, &e);
	fs_buf_finish(&tar);
	if (rc)
		return host_failed(h, rc, "programs",
		        rc == FS_EIO ? "they must be built for that machine and its libraries; leave "
		                       "--binary out to build there"
		                     : NULL,
		        e.text);
	if (same) {
		host_ok(h, "programs", "those of %s are there", h->o.binary);
		return FS_OK;
	}
	h->programs_changed = true;
	host_done(h, "programs", "sent those of %s to %s/.local/farsight/bin", h->o.binary, h->facts.home);
	return FS_OK;
}

/* ---- built there ---- */

/* In the folder of the sources: their ages tell what is to be built again. With older releases they did not.
 */
#define DATED ".dated"

static int send_sources(struct host *h, char sum[65])
{
	static const char *const names[] = {"LICENSE", "common", "meson.build", "meson_options.txt", "remote",
	        "scripts/install-deps", "scripts/remote-build"};
	/* What has not changed is not built again. */
	static const char script[] =
	        UNPACK "o=\"$d/share/src\"; cd \"$d/src.new\"; if [ -e \"$o/" DATED "\" ]; then "
	               "find . -type f | while read -r p; do if cmp -s \"$p\" \"$o/$p\" 2> /dev/null; then "
	               "touch -r \"$o/$p\" \"$p\"; fi; done; fi; : > " DATED "; cd \"$d\"; rm -rf \"$o\"; "
	               "mv src.new \"$o\"; echo \"$1\" > \"$d/share/sources\"";
	struct fs_errbuf e = {""};
	struct fs_buf tar;
	char folder[CLI_PATH];
	fs_buf_init(&tar, TAR_MAX);
	int rc = host_find_sources(h, folder, &e);
	if (!rc)
		rc = make_tar(h, folder, "--mode=u+rwX,go-rwx", names, FS_ARRAY_LEN(names), &tar, sum, &e);
	bool same = !rc && !strcmp(sum, h->facts.sources);
	if (!rc && !same)
		rc = send_tar(h, script, "src", "sources", &tar, sum, NULL, &e);
	double mib = (double)tar.len / 1048576;
	fs_buf_finish(&tar);
	if (rc)
		return host_failed(h, rc, "sources", NULL, e.text);
	if (same)
		host_ok(h, "sources", "this version is there");
	else
		host_done(h, "sources", "sent %.1f MiB from %s", mib, folder);
	return FS_OK;
}

struct build {
	struct host *h;
	char line[256]; /* the last one, as far as it came */
	size_t n;
};

/* ninja's "[12/80] Compiling ..." */
static void on_heard(void *arg, const char *bytes, size_t n)
{
	struct build *b = arg;
	for (size_t i = 0; i < n; i++) {
		if (bytes[i] != '\n') {
			if (b->n + 1 < sizeof(b->line))
				b->line[b->n++] = bytes[i];
			continue;
		}
		unsigned at, total;
		b->line[b->n] = '\0';
		b->n = 0;
		if (sscanf(b->line, "[%u/%u]", &at, &total) == 2 && at <= total)
			host_progress(b->h, "building", at, total);
	}
}

static void show_end(struct host *h, const struct fs_buf *out)
{
	size_t from = out->len, lines = 0;
	host_progress_end(h);
	while (from > 0 && (out->data[from - 1] != '\n' || lines++ < SHOWN_LINES))
		from--;
	fputs("        the build said, at its end:\n", stdout);
	if (from < out->len)
		cli_print(stdout, (const char *)out->data + from);
}

/* What the programs depend on: a card, or a CUDA compiler, that came later wants others. */
static void name_build(const struct host *h, const char *sum, char *out, size_t cap)
{
	snprintf(out, cap, "%s cards=%s nvcc=%s", sum, h->facts.cards, h->facts.nvcc);
}

int host_build(struct host *h)
{
	static const char script[] = "d=\"$HOME/.local/farsight\"; cd \"$d/share/src\" && "
	                             "{ [ -e " DATED " ] || rm -rf \"$d/build\"; } && : > " DATED " && "
	                             "sh scripts/remote-build --prefix \"$d\" --build \"$d/build\" 2>&1 && "
	                             "echo \"$1\" > \"$d/share/built\" && rm -f \"$d/share/binary\"";
	struct fs_errbuf e = {""};
	struct fs_buf out;
	struct build b = {.h = h};
	char sum[65], name[sizeof(h->facts.built)];
	int rc = send_sources(h, sum);
	if (rc)
		return rc;
	name_build(h, sum, name, sizeof(name));
	if (!strcmp(name, h->facts.built) && *h->facts.version) {
		host_ok(h, "programs", "%s, built of these sources", h->facts.version);
		return FS_OK;
	}
	fs_buf_init(&out, (size_t)16 << 20);
	struct host_call c = {.script = script,
	        .args = {name},
	        .out = &out,
	        .heard = on_heard,
	        .arg = &b,
	        .deadline_s = BUILD_S};
	rc = host_call(h, &c, NULL, &e);
	if (rc == FS_EIO)
		show_end(h, &out);
	fs_buf_finish(&out);
	if (rc)
		return host_failed(h, rc, "programs",
		        rc == FS_EIO ? "install what it misses, or try by hand on the host: "
		                       "sh ~/.local/farsight/share/src/scripts/remote-build"
		                     : NULL,
		        rc == FS_EIO ? "the build failed" : e.text);
	h->programs_changed = true;
	host_done(h, "programs", "built in %s/.local/farsight/bin", h->facts.home);
	return FS_OK;
}
