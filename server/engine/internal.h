/*
 * engine, inside: the engine's thread, its queue and its health, for engine.c and recover.c alone.
 */
#ifndef FS_ENGINE_INTERNAL_H
#define FS_ENGINE_INTERNAL_H

#include "server/engine/core.h"

enum job_state { JOB_QUEUED, JOB_RUNNING, JOB_DONE };

struct job { /* on its caller's stack */
	struct fs_engine *en;
	const struct fs_prompt *p;
	const struct fs_gen_params *params; /* NULL: logits of the prompt */
	struct fs_cancel *cancel;
	const struct fs_gen_events *ev;
	struct fs_gen_result *result;
	float *out;
	struct fs_errbuf *e;
	int err;
	/* under the lock: */
	enum job_state state;
	bool woken; /* the token fired */
	struct job *next;
};

struct fs_engine {
	struct fs_core core; /* the thread's, but for tok, chat and the hyperparameters */
	struct fs_engine_info info;
	char name[128], device[128]; /* info points here */
	pthread_t thread;
	const struct fs_engine_opts *opts; /* during create only */
	struct fs_errbuf *load_err;        /* as well */
	int retry_ms;
	pthread_mutex_t lock;
	pthread_cond_t work; /* the queue, or quit, changed */
	pthread_cond_t done; /* a job's state, or started, changed */
	/* under the lock: */
	struct job *head;
	bool started, quit;
	int load_result;
	struct fs_engine_health health;
	int losses_in_a_row; /* without an answer between them */
};

/* ---- recover.c ---- */

/* The job that ran was not answered because the device is lost: tells everybody, gives the waiting jobs up
 * and brings up another device; returns when the engine is ready, has failed for good, or is to quit. The
 * engine's thread; the lock is given back meanwhile. */
void fs_engine_recover_locked(struct fs_engine *en);
/* Whether jobs are taken: FS_OK, or FS_EUNAVAILABLE with a text. */
int fs_engine_check_locked(const struct fs_engine *en, struct fs_errbuf *e);

#endif
