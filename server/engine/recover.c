/*
 * recover: what the engine does when its device is lost (a card that fell off the bus, an illegal access that
 * took the context with it): the model is brought up anew, on the engine's own thread, while every call is
 * refused at once. A card that does not come back, or is lost again and again, ends the attempts: then the
 * engine says that the server must be restarted. With device "auto" the last attempt may end on the CPU.
 */
#include "server/engine/internal.h"

#include <stdio.h>
#include <string.h>

#define TRIES 5
#define FIRST_PAUSE_MS 1000 /* before the second try, and doubled each time */
#define MAX_LOSSES 3        /* in a row */

static const char reloading[] =
        "the GPU failed, and the engine is loading the model again; try again in a moment";
static const char failed[] = "the GPU failed and could not be brought back; the server must be restarted";

int fs_engine_check_locked(const struct fs_engine *en, struct fs_errbuf *e)
{
	if (en->health.state == FS_ENGINE_READY)
		return FS_OK;
	return fs_fail(e, FS_EUNAVAILABLE, "%s", fs_engine_state_text(en->health.state));
}

const char *fs_engine_state_text(enum fs_engine_state state)
{
	return state == FS_ENGINE_READY ? "" : state == FS_ENGINE_RELOADING ? reloading : failed;
}

void fs_engine_health(struct fs_engine *en, struct fs_engine_health *out)
{
	pthread_mutex_lock(&en->lock);
	*out = en->health;
	pthread_mutex_unlock(&en->lock);
}

static void set_state_locked(struct fs_engine *en, enum fs_engine_state state)
{
	en->health.state = state;
	while (state != FS_ENGINE_READY && en->head != NULL) {
		struct job *j = en->head;

		en->head = j->next;
		j->err = fs_engine_check_locked(en, j->e);
		j->state = JOB_DONE;
	}
	pthread_cond_broadcast(&en->done);
}

/* False: the engine is to quit. */
static bool pause_locked(struct fs_engine *en, int try)
{
	int first = en->retry_ms > 0 ? en->retry_ms : FIRST_PAUSE_MS;
	int64_t until = try == 0 ? 0 : fs_deadline_ms((int64_t)first << (try - 1));

	while (!en->quit && fs_now() < until)
		fs_cond_wait_until(&en->work, &en->lock, until);
	return !en->quit;
}

/* Without the lock. */
static int bring_back(struct fs_engine *en, int try, const char *device)
{
	struct fs_errbuf e = {""};
	int err = fs_core_place(&en->core, device, &e);

	if (err != FS_OK)
		fs_error("the engine's device, attempt %d of %d: %s", try + 1, TRIES, e.text);
	else
		fs_info("the engine is ready again, on %s", fs_dev_describe(en->core.dev));
	return err;
}

static void note_loss_locked(struct fs_engine *en, const char *device)
{
	struct fs_engine_health *h = &en->health;

	h->losses++;
	en->losses_in_a_row++;
	h->retry_after_s = (int)(en->core.load_ns / FS_SEC) + 2;
	set_state_locked(en, FS_ENGINE_RELOADING);
	fs_error("%s is lost; the engine loads the model again", device);
}

/* The last try takes what was asked for, which may be "auto"; a card that hangs is not asked at all. NULL:
 * there is nothing to be tried. */
static const char *next_device(const struct fs_engine *en, int try, const char *lost, bool hung)
{
	bool any = strcmp(en->core.device, "auto") == 0;

	if (try == TRIES || en->losses_in_a_row > MAX_LOSSES)
		return NULL;
	if (hung)
		return any && try == 0 ? "cpu" : NULL;
	return try == TRIES - 1 ? en->core.device : lost;
}

void fs_engine_recover_locked(struct fs_engine *en)
{
	bool hung = fs_dev_hung(en->core.dev);
	const char *next;
	char device[16];
	int err = FS_EUNAVAILABLE;

	snprintf(device, sizeof(device), "%s", fs_dev_name(en->core.dev));
	note_loss_locked(en, device);
	pthread_mutex_unlock(&en->lock);
	fs_core_displace(&en->core);
	pthread_mutex_lock(&en->lock);
	for (int try = 0; (next = next_device(en, try, device, hung)) != NULL; try++) {
		if (!pause_locked(en, try))
			return;
		pthread_mutex_unlock(&en->lock);
		err = bring_back(en, try, next);
		pthread_mutex_lock(&en->lock);
		if (err == FS_OK)
			break;
	}
	if (err != FS_OK) {
		fs_error("%s does not come back; text and pictures are refused until the server is restarted",
		        device);
		set_state_locked(en, FS_ENGINE_FAILED);
		return;
	}
	snprintf(en->health.device, sizeof(en->health.device), "%s", fs_dev_describe(en->core.dev));
	set_state_locked(en, FS_ENGINE_READY);
}
