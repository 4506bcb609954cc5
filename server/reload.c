/* Reading, comparing and taking settings; see reload.h. */
#include "server/reload.h"

#include "server/vision/settings.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define MAX_ASKERS 16

struct fs_reload {
	struct fs_reload_opts o;
	int wake;
	pthread_mutex_t lock; /* of what follows */
	struct fs_http_request *askers[MAX_ASKERS];
	size_t n_askers;
	bool closed; /* nobody reads any more */
	struct fs_api_settings_state state;
};

static int64_t wall_ms(void)
{
	struct timespec ts;
	clock_gettime(CLOCK_REALTIME, &ts);
	return (int64_t)ts.tv_sec * 1000 + ts.tv_nsec / 1000000;
}

int fs_reload_create(const struct fs_reload_opts *o, struct fs_reload **out, struct fs_errbuf *e)
{
	struct fs_reload *r = calloc(1, sizeof(*r));
	if (!r)
		return fs_fail(e, FS_ENOMEM, "out of memory");
	r->o = *o;
	r->wake = fs_wake_open();
	if (r->wake < 0 || pthread_mutex_init(&r->lock, NULL)) {
		int rc = fs_fail_errno(e, FS_EIO, "can not make an eventfd");
		if (r->wake >= 0)
			close(r->wake);
		free(r);
		return rc;
	}
	r->state.loaded_wall = wall_ms();
	*out = r;
	return FS_OK;
}

int fs_reload_fd(const struct fs_reload *r)
{
	return r->wake;
}

void fs_reload_ask(struct fs_reload *r)
{
	fs_wake(r->wake);
}

/* ---- for the API, on its loop ---- */

static int ask(void *arg, const char *file, struct fs_http_request *request, struct fs_errbuf *e)
{
	struct fs_reload *r = arg;
	char *real = file ? realpath(file, NULL) : NULL;
	bool ours = !file;
	for (size_t i = 0; i < r->o.n_files && real; i++) {
		char *own = realpath(r->o.files[i], NULL);
		ours = ours || (own && strcmp(own, real) == 0);
		free(own);
	}
	free(real);
	if (r->o.n_files == 0)
		return fs_fail(e, FS_ENOTFOUND, "this server was started without a config file");
	if (!ours)
		return fs_fail(e, FS_ENOTFOUND, "this server reads %.300s, not %.300s", r->o.files[0], file);
	pthread_mutex_lock(&r->lock);
	bool taken = !r->closed && r->n_askers < MAX_ASKERS;
	if (taken)
		r->askers[r->n_askers++] = request;
	pthread_mutex_unlock(&r->lock);
	fs_wake(r->wake);
	return taken ? FS_OK : fs_fail(e, FS_EUNAVAILABLE, "the server is busy or ending");
}

static void tell(void *arg, struct fs_api_settings_state *out)
{
	struct fs_reload *r = arg;
	pthread_mutex_lock(&r->lock);
	*out = r->state;
	pthread_mutex_unlock(&r->lock);
}

struct fs_api_settings fs_reload_api(struct fs_reload *r)
{
	return (struct fs_api_settings){.ask = ask, .tell = tell, .arg = r};
}

/* ---- taking ---- */

/* What differs, sorted by what can be done about it. */
struct difference {
	bool hosts, kind; /* kind: of vision, remote or on this machine */
	bool log_level, drain;
	char restart[sizeof(((struct fs_api_settings_state *)0)->restart)];
};

static void sort_key(void *arg, const char *key)
{
	struct difference *d = arg;
	if (!strcmp(key, "log_level")) {
		d->log_level = true;
	} else if (!strcmp(key, "drain_s")) {
		d->drain = true;
	} else if (!strcmp(key, "vision.hosts") || !strcmp(key, "vision.remote")) {
		d->hosts = true;
	} else {
		d->kind = d->kind || !strcmp(key, "vision.mmproj");
		size_t n = strlen(d->restart);
		snprintf(d->restart + n, sizeof(d->restart) - n, "%s%s", n ? ", " : "", key);
	}
}

static int take_hosts(const struct fs_config *fresh, struct fs_vision *vision,
        struct fs_vision_change *change, struct fs_errbuf *e)
{
	struct fs_vision_opts o;
	if (!vision)
		return fs_fail(e, FS_EINVAL,
		        "\"vision.remote\" is set, but %s is a text model that takes no "
		        "pictures",
		        fresh->model);
	fs_vision_opts_from_config(fresh, &o);
	return fs_vision_set_hosts(vision, o.hosts, o.n_hosts, change, e);
}

static void swap_hosts(struct fs_config *a, struct fs_config *b)
{
	struct fs_config_host keep[FS_CONFIG_MAX_HOSTS];
	size_t n = a->vision.n_hosts;
	bool remote = a->vision.remote;
	memcpy(keep, a->vision.hosts, sizeof(keep));
	memcpy(a->vision.hosts, b->vision.hosts, sizeof(keep));
	memcpy(b->vision.hosts, keep, sizeof(keep));
	a->vision.n_hosts = b->vision.n_hosts;
	a->vision.remote = b->vision.remote;
	b->vision.n_hosts = n;
	b->vision.remote = remote;
}

static void take_log_level(struct fs_config *running, struct fs_config *fresh)
{
	enum fs_log_level level;
	char *old = running->log_level;
	running->log_level = fresh->log_level;
	fresh->log_level = old;
	fs_log_parse_level(running->log_level, &level);
	fs_log_set_level(level);
}

/* The hosts first: they alone can fail. */
static int take(struct fs_reload *r, struct fs_config *fresh, struct fs_vision *vision,
        struct fs_api_settings_state *s, struct fs_errbuf *e)
{
	struct fs_config *running = r->o.running;
	struct difference d = {0};
	fs_config_diff(running, fresh, sort_key, &d);
	if (d.hosts && (d.kind || running->vision.mmproj)) {
		sort_key(&d, "vision.hosts and vision.remote"); /* with the mmproj, whichever way */
		d.hosts = false;
	}
	int rc = FS_OK;
	if (d.hosts)
		rc = take_hosts(fresh, vision, &s->hosts, e);
	else if (vision && running->vision.remote) /* those that are down are tried */
		rc = take_hosts(running, vision, &s->hosts, e);
	if (rc)
		return rc;
	if (d.hosts)
		swap_hosts(running, fresh);
	if (d.log_level)
		take_log_level(running, fresh);
	if (d.drain)
		running->drain_s = fresh->drain_s;
	memcpy(s->restart, d.restart, sizeof(s->restart));
	return FS_OK;
}

static void say(const struct fs_api_settings_state *s)
{
	if (*s->error) {
		fs_error("the config was read again and is not taken, the one from before stays: %s",
		        s->error);
		return;
	}
	fs_info("the config was read again: vision hosts: %zu added, %zu removed, %zu as before",
	        s->hosts.added, s->hosts.removed, s->hosts.kept);
	if (*s->restart)
		fs_warn("these settings have changed and need a restart of the server: %s", s->restart);
}

void fs_reload_run(struct fs_reload *r, struct fs_vision *vision)
{
	struct fs_http_request *askers[MAX_ASKERS];
	struct fs_api_settings_state s = {.loaded_wall = wall_ms()};
	struct fs_config fresh;
	struct fs_errbuf e = {""};
	fs_wake_drain(r->wake);
	pthread_mutex_lock(&r->lock); /* who asks from here on gets the next reading */
	size_t n = r->n_askers;
	memcpy(askers, r->askers, sizeof(askers));
	r->n_askers = 0;
	s.reads = r->state.reads + 1;
	pthread_mutex_unlock(&r->lock);
	fs_config_init(&fresh);
	int rc = r->o.read(&fresh, r->o.arg, &e);
	if (!rc)
		rc = take(r, &fresh, vision, &s, &e);
	fs_config_finish(&fresh);
	snprintf(s.error, sizeof(s.error), "%s", rc ? e.text : "");
	say(&s);
	pthread_mutex_lock(&r->lock);
	if (rc) { /* what runs is as old as before, and so is what it lacks */
		s.loaded_wall = r->state.loaded_wall;
		memcpy(s.restart, r->state.restart, sizeof(s.restart));
	}
	r->state = s;
	pthread_mutex_unlock(&r->lock);
	for (size_t i = 0; i < n; i++)
		fs_api_reloaded(askers[i], &s);
}

void fs_reload_close(struct fs_reload *r)
{
	struct fs_http_request *askers[MAX_ASKERS];
	if (!r)
		return;
	pthread_mutex_lock(&r->lock);
	size_t n = r->n_askers;
	memcpy(askers, r->askers, sizeof(askers));
	r->n_askers = 0;
	r->closed = true;
	pthread_mutex_unlock(&r->lock);
	for (size_t i = 0; i < n; i++)
		fs_api_reloaded(askers[i], NULL);
}

void fs_reload_destroy(struct fs_reload *r)
{
	if (!r)
		return;
	FS_ASSERT(r->n_askers == 0);
	close(r->wake);
	pthread_mutex_destroy(&r->lock);
	free(r);
}
