/*
 * engine: the thread that owns the core, and the queue of calls in front of it. Callers block on their own
 * job, in the order of arrival; a job whose token fires while it waits leaves the queue at once. It refuses
 * prompts that do not fit before they cost a turn.
 */
#include "server/engine/internal.h"
#include "server/engine/utf8.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A chat's text is taken apart up to this many contexts, so that a refusal can still say how long it is. */
#define CHAT_MAX_CONTEXTS 4
#define MAX_OPENING 65536

/* ---- the thread ---- */

static void run_job(struct fs_engine *en, struct job *j)
{
	if (j->params != NULL)
		j->err = fs_core_generate(&en->core, j->p, j->params, j->cancel, j->ev, j->result, j->e);
	else
		j->err = fs_core_logits(&en->core, j->p, j->out, j->e);
}

/* Its caller is woken when the engine's state tells already why the job failed. */
static void end_job_locked(struct fs_engine *en, struct job *j)
{
	bool lost = fs_dev_lost(en->core.dev);

	j->state = JOB_DONE;
	if (lost) {
		snprintf(en->health.cause, sizeof(en->health.cause), "%s",
		        j->err != FS_OK && j->e != NULL ? j->e->text : "the device is lost");
		fs_engine_recover_locked(en);
		return;
	}
	if (j->err == FS_OK)
		en->losses_in_a_row = 0;
	pthread_cond_broadcast(&en->done);
}

static void serve(struct fs_engine *en)
{
	pthread_mutex_lock(&en->lock);
	for (;;) {
		while (en->head == NULL && !en->quit)
			fs_cond_wait_until(&en->work, &en->lock, FS_NEVER);
		if (en->head == NULL)
			break;
		struct job *j = en->head;
		en->head = j->next;
		j->state = JOB_RUNNING;
		pthread_mutex_unlock(&en->lock);
		run_job(en, j);
		pthread_mutex_lock(&en->lock);
		end_job_locked(en, j);
	}
	pthread_mutex_unlock(&en->lock);
}

static void *engine_thread(void *arg)
{
	struct fs_engine *en = arg;
	int err = fs_core_init(&en->core, en->opts, en->load_err);

	pthread_mutex_lock(&en->lock);
	en->load_result = err;
	en->started = true;
	pthread_cond_broadcast(&en->done);
	pthread_mutex_unlock(&en->lock);
	if (err != FS_OK)
		return NULL;
	serve(en);
	fs_core_finish(&en->core);
	return NULL;
}

/* ---- life ---- */

/* As UTF-8 without control characters, since it goes into every answer; what does not fit is cut off. */
static void copy_text(char *out, size_t cap, const char *s, size_t n)
{
	size_t at = 0, len;
	uint32_t cp;

	for (; n > 0; s += len, n -= len) {
		bool good = fs_utf8_next((const uint8_t *)s, n, &cp, &len) == FS_UTF8_OK && cp >= ' ' &&
		            cp != 0x7f;
		size_t more = good ? len : 1;
		if (at + more >= cap)
			break;
		memcpy(out + at, good ? s : "?", more);
		at += more;
	}
	out[at] = '\0';
}

static void set_name(struct fs_engine *en, const char *path)
{
	const char *s, *slash = strrchr(path, '/');
	size_t n;

	if (fs_gguf_str(en->core.model.gguf, "general.name", &s, &n, NULL) || n == 0) {
		s = slash != NULL ? slash + 1 : path;
		n = strlen(s);
	}
	copy_text(en->name, sizeof(en->name), s, n);
}

static void set_info(struct fs_engine *en, const char *path)
{
	const struct fs_hparams *hp = &en->core.model.hp;

	set_name(en, path);
	snprintf(en->device, sizeof(en->device), "%s", fs_dev_describe(en->core.dev));
	en->info = (struct fs_engine_info){
	        .arch = hp->arch_name,
	        .name = en->name,
	        .n_ctx = en->core.n_ctx,
	        .n_ctx_train = hp->n_ctx_train,
	        .n_embd = hp->n_embd,
	        .n_vocab = hp->n_vocab,
	        .n_layer = hp->n_layer,
	        .takes_rows = hp->mrope,
	        .takes_tools = en->core.chat != NULL && fs_chat_takes_tools(en->core.chat),
	        .template_name = en->core.chat != NULL ? fs_chat_name(en->core.chat) : NULL,
	        .device = en->device,
	        .weight_bytes = fs_gguf_tensor_bytes(en->core.model.gguf),
	        .kv_bytes = fs_kv_bytes(hp, en->core.n_ctx, en->core.exact),
	};
	memcpy(en->health.device, en->device, sizeof(en->health.device));
}

static int init_locks(struct fs_engine *en)
{
	if (pthread_mutex_init(&en->lock, NULL) != 0)
		return FS_ENOMEM;
	if (fs_cond_init(&en->work) != FS_OK) {
		pthread_mutex_destroy(&en->lock);
		return FS_ENOMEM;
	}
	if (fs_cond_init(&en->done) != FS_OK) {
		pthread_cond_destroy(&en->work);
		pthread_mutex_destroy(&en->lock);
		return FS_ENOMEM;
	}
	return FS_OK;
}

static void free_engine(struct fs_engine *en)
{
	pthread_cond_destroy(&en->done);
	pthread_cond_destroy(&en->work);
	pthread_mutex_destroy(&en->lock);
	free(en);
}

int fs_engine_create(const struct fs_engine_opts *o, struct fs_engine **out, struct fs_errbuf *e)
{
	struct fs_engine *en = calloc(1, sizeof(*en));
	int err;

	if (en == NULL || init_locks(en) != FS_OK) {
		free(en);
		return fs_fail(e, FS_ENOMEM, "no memory for the engine");
	}
	en->opts = o;
	en->retry_ms = o->retry_ms;
	en->load_err = e;
	err = fs_thread_start(&en->thread, "engine", engine_thread, en, e);
	if (err != FS_OK) {
		free_engine(en);
		return err;
	}
	pthread_mutex_lock(&en->lock);
	while (!en->started)
		fs_cond_wait_until(&en->done, &en->lock, FS_NEVER);
	err = en->load_result;
	pthread_mutex_unlock(&en->lock);
	if (err != FS_OK) {
		pthread_join(en->thread, NULL);
		free_engine(en);
		return err;
	}
	set_info(en, o->model);
	*out = en;
	return FS_OK;
}

void fs_engine_destroy(struct fs_engine *en)
{
	if (en == NULL)
		return;
	pthread_mutex_lock(&en->lock);
	en->quit = true;
	pthread_cond_broadcast(&en->work);
	pthread_mutex_unlock(&en->lock);
	pthread_join(en->thread, NULL);
	free_engine(en);
}

const struct fs_engine_info *fs_engine_info(const struct fs_engine *en)
{
	return &en->info;
}

/* ---- prompts ---- */

int fs_prompt_from_ids(struct fs_engine *en, const int32_t *ids, size_t n, struct fs_rows *const *rows,
        size_t n_rows, struct fs_prompt **out, struct fs_errbuf *e)
{
	return fs_prompt_build(&en->core.model.hp, ids, n, rows, n_rows, out, e);
}

/* Taking text apart costs some 50 bytes of memory a byte. */
static void init_ids(const struct fs_engine *en, struct fs_cancel *cancel, struct fs_ids *ids)
{
	fs_ids_init(ids, FS_MIN((size_t)en->info.n_ctx * CHAT_MAX_CONTEXTS, (size_t)FS_PROMPT_MAX_CELLS));
	ids->cancel = cancel;
}

static int too_long(const struct fs_engine *en, const struct fs_ids *ids, struct fs_errbuf *e)
{
	return fs_fail(e, FS_ELIMIT, "the prompt is more than %zu tokens long; the context holds %d",
	        ids->max, en->info.n_ctx);
}

int fs_prompt_from_text(struct fs_engine *en, const char *text, size_t len, struct fs_cancel *cancel,
        struct fs_prompt **out, struct fs_errbuf *e)
{
	const struct fs_tok *tok = en->core.tok;
	struct fs_ids ids;
	int err = FS_OK;

	if (tok == NULL)
		return fs_fail(e, FS_ENOTSUP, "this engine takes token ids only");
	init_ids(en, cancel, &ids);
	if (fs_tok_info(tok)->add_bos && fs_tok_info(tok)->bos >= 0)
		err = fs_ids_append(&ids, fs_tok_info(tok)->bos);
	if (err == FS_OK)
		err = fs_tok_encode(tok, text, len, false, &ids, e);
	if (err == FS_ELIMIT)
		err = too_long(en, &ids, e);
	if (err == FS_OK)
		err = fs_prompt_from_ids(en, ids.data, ids.len, NULL, 0, out, e);
	fs_ids_finish(&ids);
	return err;
}

/* The pictures of all messages, in order. */
struct pictures {
	struct fs_rows **rows; /* [n] */
	size_t n;
};

static int collect_pictures(const struct fs_message *msgs, size_t n_msgs, struct pictures *p)
{
	size_t at = 0;

	for (size_t i = 0; i < n_msgs; i++)
		for (size_t j = 0; j < msgs[i].n_parts; j++)
			p->n += fs_part_is_picture(&msgs[i].parts[j]);
	if (p->n == 0)
		return FS_OK;
	p->rows = calloc(p->n, sizeof(struct fs_rows *));
	if (p->rows == NULL)
		return FS_ENOMEM;
	for (size_t i = 0; i < n_msgs; i++)
		for (size_t j = 0; j < msgs[i].n_parts; j++) {
			const struct fs_part *part = &msgs[i].parts[j];
			if (fs_part_is_picture(part))
				p->rows[at++] = part->rows;
		}
	return FS_OK;
}

static int chat_prompt(struct fs_engine *en, const struct fs_message *msgs, size_t n,
        const struct fs_chat_extras *x, const struct pictures *pics, struct fs_prompt **out,
        struct fs_errbuf *e)
{
	struct fs_prompt *p = NULL;
	struct fs_buf opening;
	struct fs_ids ids;
	int err;

	init_ids(en, x != NULL ? x->cancel : NULL, &ids);
	fs_buf_init(&opening, MAX_OPENING);
	err = fs_chat_encode(en->core.chat, msgs, n, x, &ids, &opening, e);
	if (err == FS_ELIMIT)
		err = too_long(en, &ids, e);
	if (err == FS_OK)
		err = fs_prompt_from_ids(en, ids.data, ids.len, pics->rows, pics->n, &p, e);
	if (err == FS_OK) {
		p->answer = opening.len == 0;
		p->opening = fs_buf_take(&opening, NULL);
		*out = p;
	}
	fs_buf_finish(&opening);
	fs_ids_finish(&ids);
	return err;
}

int fs_prompt_from_chat_ex(struct fs_engine *en, const struct fs_message *msgs, size_t n,
        const struct fs_chat_extras *x, struct fs_prompt **out, struct fs_errbuf *e)
{
	struct pictures pics = {0};
	int err;

	if (en->core.chat == NULL)
		return fs_fail(e, FS_ENOTSUP, "this engine takes token ids only");
	err = collect_pictures(msgs, n, &pics);
	if (err != FS_OK)
		fs_fail(e, err, "no memory for %zu pictures", pics.n);
	else if (pics.n > 0 && !en->info.takes_rows)
		err = fs_fail(e, FS_EINVAL, "this model (%s) can not take pictures", en->info.arch);
	if (err == FS_OK)
		err = chat_prompt(en, msgs, n, x, &pics, out, e);
	free(pics.rows);
	return err;
}

int fs_prompt_from_chat(struct fs_engine *en, const struct fs_message *msgs, size_t n, struct fs_prompt **out,
        struct fs_errbuf *e)
{
	return fs_prompt_from_chat_ex(en, msgs, n, NULL, out, e);
}

/* ---- calls ---- */

/* Token's hook: from the thread that fires it. */
static void wake_job(void *arg)
{
	struct job *j = arg;

	pthread_mutex_lock(&j->en->lock);
	j->woken = true;
	pthread_cond_broadcast(&j->en->done);
	pthread_mutex_unlock(&j->en->lock);
}

static void append_locked(struct fs_engine *en, struct job *j)
{
	struct job **at = &en->head;

	while (*at != NULL)
		at = &(*at)->next;
	*at = j;
	pthread_cond_signal(&en->work);
}

static void remove_locked(struct fs_engine *en, struct job *j)
{
	struct job **at = &en->head;

	while (*at != j)
		at = &(*at)->next;
	*at = j->next;
}

/* Until the job is done, or its token fires while it is still queued: then it is taken out, FS_ECANCELLED. */
static int wait_job(struct fs_engine *en, struct job *j)
{
	int err;

	pthread_mutex_lock(&en->lock);
	err = fs_engine_check_locked(en, j->e);
	if (err == FS_OK)
		append_locked(en, j);
	while (err == FS_OK && j->state != JOB_DONE) {
		if (j->state == JOB_QUEUED && (j->woken || fs_now() >= fs_cancel_deadline(j->cancel))) {
			remove_locked(en, j);
			err = FS_ECANCELLED;
			break;
		}
		fs_cond_wait_until(&en->done, &en->lock,
		        j->state == JOB_QUEUED ? fs_cancel_deadline(j->cancel) : FS_NEVER);
	}
	pthread_mutex_unlock(&en->lock);
	return err != FS_OK ? err : j->err;
}

int fs_engine_generate(struct fs_engine *en, const struct fs_prompt *p, const struct fs_gen_params *params,
        struct fs_cancel *cancel, const struct fs_gen_events *ev, struct fs_gen_result *result,
        struct fs_errbuf *e)
{
	struct job j = {
	        .en = en, .p = p, .params = params, .cancel = cancel, .ev = ev, .result = result, .e = e};
	struct fs_cancel_hook hook = {.fn = wake_job, .arg = &j};
	int err;

	*result = (struct fs_gen_result){.finish = FS_FINISH_ERROR, .prompt_tokens = p->n};
	err = fs_gen_params_check(params, e);
	if (err == FS_OK)
		err = fs_core_check(en->info.n_ctx, p, e);
	if (err != FS_OK)
		return err;
	err = FS_ECANCELLED;
	if (fs_cancel_listen(cancel, &hook)) {
		err = wait_job(en, &j);
		fs_cancel_unlisten(cancel, &hook);
	}
	if (err == FS_ECANCELLED) { /* before its turn; fires a deadline that has passed, for whoever asks the
		                       token for the cause */
		(void)fs_cancelled(cancel);
		result->finish = FS_FINISH_CANCEL;
		return FS_OK;
	}
	return err;
}

int fs_engine_logits(struct fs_engine *en, const struct fs_prompt *p, float *out, struct fs_errbuf *e)
{
	struct job j = {.en = en, .p = p, .out = out, .e = e};

	if (p->n > en->info.n_ctx)
		return fs_fail(
		        e, FS_EINVAL, "the prompt has %d tokens, the context holds %d", p->n, en->info.n_ctx);
	return wait_job(en, &j);
}
