/* What the machine there is and has, and what it lacks for a build. */
#include "server/cli/host.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define INSTALL_S 1800

static const char facts_script[] =
        "d=\"$HOME/.local/farsight\"; echo \"home=$HOME\"; echo \"user=$(id -un)\"; echo \"uid=$(id -u)\"; "
        "echo \"arch=$(uname -m)\"; if [ -r /etc/os-release ]; then . /etc/os-release; fi; echo "
        "\"os=$PRETTY_NAME\"; "
        "echo \"cpus=$(getconf _NPROCESSORS_ONLN)\"; "
        "echo \"mem_kb=$(sed -n \"s/^MemTotal: *\\([0-9]*\\).*/\\1/p\" /proc/meminfo)\"; "
        "echo \"free_kb=$(df -Pk \"$HOME\" | sed -n 2p | tr -s \" \" | cut -d \" \" -f 4)\"; "
        "PATH=\"$PATH:/usr/local/cuda/bin:/opt/cuda/bin\"; for p in cc gcc clang meson ninja nvcc apt-get "
        "sha256sum tar; "
        "do "
        "echo \"$p=$(command -v $p 2>/dev/null)\"; done; "
        "if [ \"$(id -u)\" = 0 ] || sudo -n true 2>/dev/null; then echo may_install=1; fi; "
        "if systemctl --user show-environment >/dev/null 2>&1; then echo systemd=1; fi; "
        "echo \"gpu=$(nvidia-smi --query-gpu=name,memory.total --format=csv,noheader 2>/dev/null | head -n "
        "1)\"; "
        "if c=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null); then "
        "echo \"cards=$(echo \"$c\" | sort -u | paste -sd, -)\"; "
        "elif [ -e /proc/driver/nvidia/version ]; then echo cards=unknown; fi; "
        "for f in sources built binary; do if [ -r \"$d/share/$f\" ]; then echo \"$f=$(cat "
        "\"$d/share/$f\")\"; fi; done; "
        "echo \"version=$(\"$d/bin/farsight-agent\" --version 2>/dev/null)\"";

static int64_t number(const struct fs_buf *text, const char *name)
{
	char s[32];
	return host_value(text, name, s, sizeof(s)) ? strtoll(s, NULL, 10) : 0;
}

static void take_facts(struct host_facts *f, const struct fs_buf *out)
{
	const struct {
		const char *name;
		char *at;
		size_t cap;
	} texts[] = {{"home", f->home, sizeof(f->home)}, {"user", f->user, sizeof(f->user)},
	        {"os", f->os, sizeof(f->os)}, {"arch", f->arch, sizeof(f->arch)},
	        {"gpu", f->gpu, sizeof(f->gpu)}, {"cards", f->cards, sizeof(f->cards)},
	        {"meson", f->meson, sizeof(f->meson)}, {"ninja", f->ninja, sizeof(f->ninja)},
	        {"nvcc", f->nvcc, sizeof(f->nvcc)}, {"apt-get", f->apt, sizeof(f->apt)},
	        {"sha256sum", f->sha256sum, sizeof(f->sha256sum)}, {"tar", f->tar, sizeof(f->tar)},
	        {"sources", f->sources, sizeof(f->sources)}, {"built", f->built, sizeof(f->built)},
	        {"binary", f->binary, sizeof(f->binary)}, {"version", f->version, sizeof(f->version)}};
	static const char *const compilers[] = {"cc", "gcc", "clang"};
	char yes[8];
	for (size_t i = 0; i < FS_ARRAY_LEN(texts); i++)
		host_value(out, texts[i].name, texts[i].at, texts[i].cap);
	for (size_t i = 0; i < FS_ARRAY_LEN(compilers) && !*f->cc; i++)
		host_value(out, compilers[i], f->cc, sizeof(f->cc));
	f->uid = number(out, "uid");
	f->cpus = number(out, "cpus");
	f->mem_kb = number(out, "mem_kb");
	f->free_kb = number(out, "free_kb");
	f->may_install = host_value(out, "may_install", yes, sizeof(yes));
	f->systemd = host_value(out, "systemd", yes, sizeof(yes));
}

int host_learn(struct host *h)
{
	struct host_facts *f = &h->facts;
	struct fs_errbuf e = {""};
	struct fs_buf out;
	fs_buf_init(&out, 65536);
	struct host_call c = {.script = facts_script, .out = &out};
	int rc = host_call(h, &c, NULL, &e);
	memset(f, 0, sizeof(*f));
	if (!rc)
		take_facts(f, &out);
	fs_buf_finish(&out);
	if (!rc && f->home[0] != '/')
		rc = fs_fail(&e, FS_EUNAVAILABLE, "its shell gives no sensible answers (HOME is \"%.100s\")",
		        f->home);
	if (rc)
		return host_failed(h, rc, "machine", "ssh must run commands there by hand", e.text);
	host_ok(h, "machine",
	        "%s, %s, %lld CPUs, %.1f GiB memory, %.1f GiB free disk, GPU: %s, CUDA compiler: %s",
	        *f->os ? f->os : "unknown system", f->arch, (long long)f->cpus, (double)f->mem_kb / 1048576,
	        (double)f->free_kb / 1048576, *f->gpu ? f->gpu : "none", *f->nvcc ? f->nvcc : "none");
	if (!*f->sha256sum || !*f->tar)
		return host_failed(h, FS_ENOTSUP, "machine", "install coreutils and tar there",
		        "sha256sum or tar is missing, without which nothing can be sent");
	return FS_OK;
}

/* scripts/install-deps runs there, so that one list of packages serves both ways. */
static int run_install_deps(
        struct host *h, const char *option, struct fs_buf *out, int deadline_s, struct fs_errbuf *e)
{
	char folder[CLI_PATH], path[CLI_PATH + 32];
	struct stat st;
	int rc = host_find_sources(h, folder, e);
	if (rc)
		return rc;
	snprintf(path, sizeof(path), "%s/scripts/install-deps", folder);
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0 || fstat(fd, &st)) {
		rc = fs_fail_errno(e, FS_EIO, "can not open %s", path);
	} else {
		struct host_call c = {
		        .script =
		                "t=$(mktemp) && cat > \"$t\" && sh \"$t\" --server-less $1 < /dev/null 2>&1; "
		                "rc=$?; rm -f \"$t\"; exit $rc",
		        .args = {option},
		        .input_fd = fd,
		        .input_n = (uint64_t)st.st_size,
		        .out = out,
		        .deadline_s = deadline_s};
		rc = host_call(h, &c, NULL, e);
	}
	if (fd >= 0)
		close(fd);
	return rc;
}

/* Packages that are missing there, separated by spaces; "" when none or when it is no Debian. */
static int missing_packages(struct host *h, char *out, size_t cap, struct fs_errbuf *e)
{
	struct fs_buf text;
	*out = '\0';
	if (!*h->facts.apt)
		return FS_OK;
	fs_buf_init(&text, 65536);
	int rc = run_install_deps(h, "--missing", &text, 60, e);
	if (!rc && text.len) {
		snprintf(out, cap, "%s", (char *)text.data);
		for (char *s = out; *s; s++)
			if (*s == '\n')
				*s = s[1] ? ' ' : '\0';
	}
	fs_buf_finish(&text);
	return rc;
}

static int install(struct host *h, const char *packages)
{
	struct fs_errbuf e = {""};
	struct fs_buf text;
	char remedy[1200];
	snprintf(remedy, sizeof(remedy), "on the host, type: sudo apt-get install -y %s", packages);
	if (!h->facts.may_install)
		return host_failed(h, FS_ENOTFOUND, "build tools", remedy,
		        "packages are missing there, and this user may not install any");
	if (!host_ask(h, "Install these packages on the host with apt-get: %s?", packages))
		return host_failed(h, FS_ENOTFOUND, "build tools", remedy, "packages are missing there");
	host_note(h, "installing; that may take minutes");
	fs_buf_init(&text, 8 << 20);
	int rc = run_install_deps(h, "", &text, INSTALL_S, &e);
	if (rc == FS_EIO && text.len) { /* the last line of apt-get says more than its status */
		const char *s = (const char *)text.data;
		size_t n = text.len > 300 ? text.len - 300 : 0;
		fs_fail(&e, rc, "apt-get failed: %s", s + n);
	}
	fs_buf_finish(&text);
	if (rc)
		return host_failed(h, rc, "build tools", remedy, e.text);
	host_done(h, "build tools", "installed %s", packages);
	return FS_OK;
}

int host_tools(struct host *h)
{
	const struct host_facts *f = &h->facts;
	struct fs_errbuf e = {""};
	char packages[1000], text[200] = "";
	int rc = missing_packages(h, packages, sizeof(packages), &e);
	if (rc)
		return host_failed(h, rc, "build tools", NULL, e.text);
	if (*packages)
		return install(h, packages);
	const char *lacking[] = {
	        !*f->cc ? "a C compiler" : NULL, !*f->meson ? "meson" : NULL, !*f->ninja ? "ninja" : NULL};
	for (size_t i = 0; i < FS_ARRAY_LEN(lacking); i++)
		if (lacking[i])
			snprintf(text + strlen(text), sizeof(text) - strlen(text), "%s%s", *text ? ", " : "",
			        lacking[i]);
	if (*text) {
		snprintf(text + strlen(text), sizeof(text) - strlen(text),
		        ": not in the PATH that sshd gives");
		return host_failed(h, FS_ENOTFOUND, "build tools",
		        "on the host, type: sudo apt-get install -y gcc meson ninja-build pkg-config   (or "
		        "the like), or send "
		        "programs that were built elsewhere: --binary DIR",
		        text);
	}
	host_ok(h, "build tools", "%s, %s, %s", f->cc, f->meson, f->ninja);
	return FS_OK;
}
