/*
 * dial: the thread of one vision host. Connects, hands the connection to host.c, and when it ends connects
 * again with growing pauses, for as long as the vision lives and wants it. A pause is cut short by a picture
 * that asks for the host, while the host is waking, and when this machine has slept.
 */
#include "server/vision/internal.h"

#include <poll.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>

#define BACKOFF_FIRST_MS 500
#define BACKOFF_MAX_MS 30000
#define KICK_PAUSE_MS 500    /* between two attempts that pictures ask for */
#define WAKING_PAUSE_MS 1000 /* the same with a host that was sent a wake-up packet */
#define NAP_LOOK_MS 5000     /* a pause is looked at so often: the machine may have slept through it */

static void set_state(struct fs_host *h, enum fs_host_state state, const char *cause)
{
	pthread_mutex_lock(&h->v->lock);
	fs_host_set_state_locked(h, state, cause);
	pthread_mutex_unlock(&h->v->lock);
}

static bool is_stopping(void *arg)
{
	return fs_host_is_over(arg);
}

bool fs_host_slept(int64_t *mono, int64_t *boot)
{
	struct timespec ts;
	clock_gettime(CLOCK_BOOTTIME, &ts);
	int64_t now = fs_now(), now_boot = ts.tv_sec * FS_SEC + ts.tv_nsec;
	bool slept = *mono && fs_pool_slept(*mono, *boot, now, now_boot);
	*mono = now;
	*boot = now_boot;
	return slept;
}

static void lose_jobs(struct fs_host *h, enum fs_host_state state, const char *why)
{
	struct fs_vision *v = h->v;
	bool failed = false;
	pthread_mutex_lock(&v->lock);
	h->state = state; /* first, so that none of them comes back here */
	h->since = fs_now();
	while (h->jobs.first) {
		struct fs_vision_job *j = h->jobs.first;
		failed = failed || (j->stage != FS_JOB_WAITING && !j->done);
		if (j->stage == FS_JOB_WAITING)
			fs_job_unassign_locked(j);
		else
			fs_job_lost_locked(j, FS_HOST_ERR_LOST, why);
	}
	if (failed)
		fs_host_failed_locked(h);
	memset(&h->facts, 0, sizeof(h->facts));
	h->rtt_ms = 0;
	pthread_mutex_unlock(&v->lock);
}

/* The n-th in a row. */
static int64_t pause_end(int n)
{
	uint16_t chance = 0x8000;
	if (getrandom(&chance, sizeof(chance), GRND_NONBLOCK) < 0)
		chance = 0x8000;
	return fs_deadline_ms(fs_pool_backoff_ms(n, BACKOFF_FIRST_MS, BACKOFF_MAX_MS, chance));
}

static void send_wol(struct fs_host *h)
{
	struct fs_errbuf e;
	pthread_mutex_lock(&h->v->lock);
	bool due = h->wol_due;
	h->wol_due = false;
	pthread_mutex_unlock(&h->v->lock);
	if (!due)
		return;
	if (fs_wol_send(&h->wol, &e))
		fs_warn("vision host %s can not be woken: %s", h->name, e.text);
	else
		fs_info("vision host %s is sent a wake-up packet", h->name);
}

/* Of a step that waits: it was woken up. */
static bool is_called_off(void *arg)
{
	send_wol(arg);
	return is_stopping(arg);
}

/* Sleeps out the pause, cut short by a picture that asks for this host, and by a sleep of this machine. */
static void pause_until(struct fs_host *h, int64_t until, int64_t last_attempt)
{
	struct fs_vision *v = h->v;
	int64_t mono = 0, boot = 0;
	while (!is_called_off(h)) {
		pthread_mutex_lock(&v->lock);
		if (h->woken_at && fs_now() < h->woken_at + FS_VISION_WOL_HOPE_MS * FS_MS)
			until = FS_MIN(until, last_attempt + WAKING_PAUSE_MS * FS_MS);
		if (h->kicked)
			until = FS_MIN(until, last_attempt + KICK_PAUSE_MS * FS_MS);
		h->next_attempt = until;
		pthread_mutex_unlock(&v->lock);
		if (fs_host_slept(&mono, &boot) || fs_now() >= until)
			break;
		struct pollfd pf = {.fd = h->wake, .events = POLLIN};
		if (poll(&pf, 1, fs_poll_ms(FS_MIN(until, fs_deadline_ms(NAP_LOOK_MS)))) > 0)
			fs_wake_drain(h->wake);
	}
	pthread_mutex_lock(&v->lock);
	h->kicked = false;
	h->next_attempt = 0;
	pthread_mutex_unlock(&v->lock);
}

/* FS_OK: it was up and was lost, try again at once. */
static int attempt(struct fs_host *h, bool *greeted, struct fs_errbuf *e)
{
	struct fs_ssh *ssh = NULL;
	*greeted = false;
	int rc = fs_ssh_connect(
	        &h->ssh, fs_deadline_ms(h->v->o.connect_timeout_ms), h->wake, is_called_off, h, &ssh, e);
	pthread_mutex_lock(&h->v->lock);
	h->asleep = rc == FS_EUNAVAILABLE || rc == FS_ETIMEOUT;
	pthread_mutex_unlock(&h->v->lock);
	if (!rc)
		rc = fs_host_serve(h, ssh, greeted, e);
	fs_ssh_close(ssh);
	return rc;
}

void *fs_host_run(void *arg)
{
	struct fs_host *h = arg;
	int in_a_row = 0;
	while (!is_stopping(h)) {
		struct fs_errbuf e = {"stopping"};
		bool greeted, was_up;
		int64_t began = fs_now();
		attempt(h, &greeted, &e);
		if (is_stopping(h))
			break;
		pthread_mutex_lock(&h->v->lock);
		was_up = h->state == FS_HOST_UP;
		h->errors[FS_HOST_ERR_CONNECT] += !greeted;
		pthread_mutex_unlock(&h->v->lock);
		/* A connection that stood for a while is dialled again at once, and until that fails there is
		 * hope. */
		bool again = was_up && fs_now() - began > FS_SEC;
		lose_jobs(h, again ? FS_HOST_CONNECTING : FS_HOST_DOWN, e.text);
		set_state(h, again ? FS_HOST_CONNECTING : FS_HOST_DOWN, e.text);
		if (again)
			fs_warn("vision host %s was lost: %s", h->name, e.text);
		if (greeted && was_up)
			in_a_row = 0;
		if (again)
			continue;
		pause_until(h, pause_end(++in_a_row), began);
	}
	lose_jobs(h, FS_HOST_DOWN, "the server is shutting down");
	fs_host_ended(h);
	return NULL;
}
