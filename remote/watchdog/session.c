/*
 * What the frames of a connection mean. Loop thread. HELLO comes first and once; frames that only a host
 * sends, ids in double use and sizes over the announced one end the connection; everything late (DATA or
 * CANCEL for a request that is over) is dropped, since it may have crossed its end on the way.
 */
#include "remote/watchdog/state.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- news ---- */

static void fill_hello(const struct fs_wd *wd, struct fs_hello *h)
{
	const struct fs_encproc *p = &wd->enc;
	*h = (struct fs_hello){.version = FS_PROTOCOL_VERSION, .max_picture_bytes = (int64_t)FS_PICTURE_MAX};
	snprintf(h->program, sizeof(h->program), "farsight-watchdog %s", FS_VERSION);
	snprintf(h->state, sizeof(h->state), "%s", fs_encproc_state_word(p));
	snprintf(h->cause, sizeof(h->cause), "%s", strcmp(h->state, "ready") ? p->cause : "");
	if (!p->have_facts)
		return;
	memcpy(h->fingerprint, p->facts.fingerprint, sizeof(h->fingerprint));
	memcpy(h->device, p->facts.device, sizeof(h->device));
	h->n_embd = p->facts.n_embd;
	h->vram_free_mb = p->facts.vram_free_mb;
	h->vram_total_mb = p->facts.vram_total_mb;
	h->min_tokens = p->facts.min_tokens ? p->facts.min_tokens : wd->cfg.min_tokens;
	h->max_tokens = p->facts.max_tokens ? p->facts.max_tokens : wd->cfg.max_tokens;
}

static void send_hello(struct fs_conn *c)
{
	struct fs_hello h;
	struct fs_buf json;
	fill_hello(c->wd, &h);
	fs_buf_init(&json, 8192);
	if (fs_hello_format(&h, &json) == FS_OK)
		fs_conn_send(c, FS_FRAME_HELLO, 0, json.data, json.len);
	fs_buf_finish(&json);
	snprintf(c->told, sizeof(c->told), "%s", h.state);
	c->told_start = c->wd->enc.starts;
}

static void send_state(struct fs_conn *c)
{
	const struct fs_wd *wd = c->wd;
	const char *word = fs_encproc_state_word(&wd->enc);
	json_t *j = json_pack(
	        "{s:s, s:I, s:s}", "state", word, "queue", (json_int_t)wd->n_reqs, "cause", wd->enc.cause);
	char *text = j ? json_dumps(j, JSON_COMPACT) : NULL;
	if (text)
		fs_conn_send(c, FS_FRAME_STATE, 0, text, strlen(text));
	free(text);
	json_decref(j);
	snprintf(c->told, sizeof(c->told), "%s", word);
	c->told_start = wd->enc.starts;
}

/* "ready" and "failed" come as a HELLO with all facts, since the encoder may be another one than before; the
 * way between them as STATE. */
void fs_session_news(struct fs_wd *wd)
{
	const char *word = fs_encproc_state_word(&wd->enc);
	for (struct fs_conn *c = wd->conns; c; c = c->next) {
		bool restarted = !strcmp(word, "ready") && c->told_start != wd->enc.starts;
		if (c->phase != FS_CONN_OPEN || (!strcmp(c->told, word) && !restarted))
			continue;
		if (strcmp(word, "starting"))
			send_hello(c);
		else
			send_state(c);
	}
}

/* ---- frames ---- */

/* The server has given this channel's forerunner up (its route or its sshd may hang), and with it what runs
 * there. */
static void replace_older(struct fs_conn *c)
{
	for (struct fs_conn *o = c->wd->conns; o; o = o->next)
		if (o != c && c->number && o->lease == c->lease && o->number == c->number) {
			fs_info("lease %.8s: channel %d was opened anew; the older one ends", c->lease->id,
			        c->number);
			fs_conn_lose(o);
		}
}

static int take_hello(struct fs_conn *c, const struct fs_frame *f, struct fs_errbuf *e)
{
	struct fs_hello h;
	if (c->phase != FS_CONN_HELLO)
		return fs_fail(e, FS_EFORMAT, "a second HELLO");
	int rc = fs_hello_parse(f->payload, f->len, &h, e);
	if (rc)
		return fs_fail_prefix(e, rc, "HELLO");
	rc = fs_lease_open(&c->wd->leases, &h, c->peer, &c->lease, e);
	if (rc)
		return rc;
	c->number = h.lease[0] ? h.channel : 0;
	replace_older(c);
	c->phase = FS_CONN_OPEN;
	c->last_frame = fs_now();
	c->ping_at = c->last_frame + c->wd->cfg.silence_s * FS_SEC / 3;
	fs_encproc_want(&c->wd->enc, true);
	fs_encproc_hurry(&c->wd->enc);
	send_hello(c);
	return FS_OK;
}

static int take_enc(struct fs_conn *c, const struct fs_frame *f, struct fs_errbuf *e)
{
	struct fs_enc_head h;
	int rc = fs_enc_head_get(f->payload, f->len, &h, e);
	if (rc)
		return fs_fail_prefix(e, rc, "ENC %u", f->id);
	return fs_req_begin(c, f->id, &h, e);
}

/* A server may leave one of its channels, since it knows this host by two names; with the last one it gives
 * up its lease. */
static void take_bye(struct fs_conn *c)
{
	struct fs_lease *l = c->lease;
	c->leaving = l->channels == 1;
	fs_conn_close(c);
	if (c->leaving)
		fs_lease_end(l, "the server said goodbye");
}

int fs_session_frame(struct fs_conn *c, const struct fs_frame *f, struct fs_errbuf *e)
{
	if (c->phase == FS_CONN_HELLO && f->type != FS_FRAME_HELLO)
		return fs_fail(e, FS_EFORMAT, "a frame of type %u came before HELLO", f->type);
	if (c->lease) {
		fs_lease_frame(c->lease);
		c->last_frame = fs_now();
		c->ping_at = c->last_frame + c->wd->cfg.silence_s * FS_SEC / 3;
	}
	switch ((enum fs_frame_type)f->type) {
	case FS_FRAME_HELLO:
		return take_hello(c, f, e);
	case FS_FRAME_ENC:
		return take_enc(c, f, e);
	case FS_FRAME_DATA:
		return fs_req_data(c, f, e);
	case FS_FRAME_CANCEL:
		fs_req_cancel(c, f->id);
		return FS_OK;
	case FS_FRAME_PING:
		if (f->len != 8)
			return fs_fail(e, FS_EFORMAT, "a PING of %u bytes", f->len);
		fs_conn_send(c, FS_FRAME_PONG, f->id, f->payload, f->len);
		return FS_OK;
	case FS_FRAME_PONG:
		return FS_OK;
	case FS_FRAME_BYE:
		take_bye(c);
		return FS_OK;
	case FS_FRAME_ROWS:
	case FS_FRAME_ERR:
	case FS_FRAME_STATE:
		break;
	}
	return fs_fail(e, FS_EFORMAT, "a frame of type %u is not a server's to send", f->type);
}
