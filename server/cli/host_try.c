/*
 * What a server would do with this host: come in with the restricted key, and have a picture encoded. The
 * picture is drawn: a disc on white, 64 by 64.
 */
#include "common/gguf/gguf.h"
#include "server/cli/host.h"

#include <poll.h>
#include <stdio.h>
#include <string.h>

#define CONNECT_S 15
#define KEY_S 30
#define CONNECT_MS 15000
#define ENCODE_MS 300000
#define AGAIN_MS 10000
#define PAUSE_MS 500
#define ASKED "farsight-asked"

static const uint8_t picture[] = {0x89, 0x50, 0x4e, 0x47, 0x0d, 0x0a, 0x1a, 0x0a, 0x00, 0x00, 0x00, 0x0d,
        0x49, 0x48, 0x44, 0x52, 0x00, 0x00, 0x00, 0x40, 0x00, 0x00, 0x00, 0x40, 0x01, 0x03, 0x00, 0x00, 0x00,
        0x90, 0xa7, 0xe3, 0x9d, 0x00, 0x00, 0x00, 0x06, 0x50, 0x4c, 0x54, 0x45, 0xff, 0xff, 0xff, 0xc8, 0x1e,
        0x1e, 0xe4, 0x30, 0x16, 0x3a, 0x00, 0x00, 0x00, 0x60, 0x49, 0x44, 0x41, 0x54, 0x78, 0xda, 0xc5, 0x90,
        0xc1, 0x0d, 0x80, 0x20, 0x10, 0x04, 0x31, 0x3c, 0x28, 0xc3, 0x52, 0x2c, 0x4d, 0x4b, 0xb3, 0x14, 0x4a,
        0xa0, 0x00, 0xe3, 0x08, 0x87, 0x59, 0x31, 0xf8, 0xc6, 0xfb, 0xdc, 0x3c, 0xf6, 0x92, 0xdb, 0x71, 0xee,
        0xa7, 0x59, 0xce, 0x1b, 0x60, 0xb3, 0xed, 0x21, 0x1a, 0x04, 0x48, 0x06, 0x33, 0x1c, 0x35, 0x0b, 0x35,
        0xbd, 0x02, 0x6f, 0xc8, 0xdb, 0xee, 0xa7, 0x02, 0x7b, 0x0b, 0xbe, 0x40, 0x6c, 0x21, 0x14, 0x48, 0x83,
        0xa1, 0x7f, 0xa3, 0x7f, 0x55, 0x2d, 0x3e, 0x0a, 0xaa, 0xbb, 0x6c, 0xc8, 0x8f, 0x8c, 0xc9, 0xe1, 0x63,
        0x75, 0xd4, 0x5c, 0x30, 0x60, 0x9d, 0x7a, 0xc2, 0xbf, 0x93, 0xf8, 0x00, 0x00, 0x00, 0x00, 0x49, 0x45,
        0x4e, 0x44, 0xae, 0x42, 0x60, 0x82};

static struct fs_ssh_opts restricted(const struct host *h)
{
	struct fs_ssh_opts o = h->ssh_opts;
	o.identity = h->key;
	o.only_identity = true;
	return o;
}

/* The agent says frames, or nothing when its input ends so soon; a shell would say the word. What else keeps
 * it from working, the test picture tells. */
static int look_at_answer(struct host *h, int status, const struct fs_buf *out, const struct fs_buf *err)
{
	char text[600];
	if (out->len && memmem(out->data, out->len, ASKED, strlen(ASKED)))
		return host_failed(h, FS_EAUTH, "key's limits",
		        "run farsight host add again; another line of authorized_keys may hold the same key",
		        "the key opens a shell there: it is not restricted to farsight-agent");
	if (out->len || status == 0)
		return FS_OK;
	snprintf(text, sizeof(text), "farsight-agent does not answer (status %d)%s%.*s", status,
	        err->len ? ": " : "", (int)FS_MIN(err->len, (size_t)400),
	        err->len ? (const char *)err->data : "");
	for (char *s = text; *s; s++)
		if (*s == '\n')
			*s = ' ';
	return host_failed(
	        h, FS_EUNAVAILABLE, "key's limits", "run farsight host add again, which installs it", text);
}

int host_try_key(struct host *h)
{
	struct fs_ssh_opts o = restricted(h);
	struct fs_errbuf e = {""};
	struct fs_ssh *s;
	int status = 0,
	    rc = fs_ssh_open(&o, fs_deadline_ms(CONNECT_S * 1000), h->wake, host_stopped, h, &s, &e);
	if (rc)
		return host_failed(h, rc, "own key's sign-in",
		        rc == FS_EAUTH ? "run farsight host add again; sshd may read another "
		                         "AuthorizedKeysFile there"
		                       : NULL,
		        e.text);
	host_ok(h, "own key's sign-in", "accepted");
	struct fs_buf out, err;
	fs_buf_init(&out, (size_t)1 << 20);
	fs_buf_init(&err, 4096);
	struct fs_ssh_run r = {.command = "echo " ASKED,
	        .out = &out,
	        .err = &err,
	        .deadline = fs_deadline_ms(KEY_S * 1000),
	        .wake_fd = h->wake,
	        .cancelled = host_stopped,
	        .cancelled_arg = h};
	rc = fs_ssh_run(s, &r, &status, &e);
	fs_ssh_close(s);
	rc = rc ? host_failed(h, rc, "key's limits", NULL, e.text) : look_at_answer(h, status, &out, &err);
	fs_buf_finish(&out);
	fs_buf_finish(&err);
	if (!rc)
		host_ok(h, "key's limits", "it runs farsight-agent whatever is asked for");
	return rc;
}

/* The row width that the text model of the config takes; 0 = not known. */
static int32_t text_model_width(const struct host *h)
{
	struct fs_gguf *g;
	const char *arch;
	size_t n;
	char key[128];
	uint32_t width = 0;
	if (!h->conf.model || fs_gguf_open(&g, h->conf.model, NULL))
		return 0;
	if (fs_gguf_str(g, "general.architecture", &arch, &n, NULL) == FS_OK) {
		snprintf(key, sizeof(key), "%.*s.embedding_length", (int)FS_MIN(n, (size_t)80), arch);
		if (fs_gguf_u32(g, key, &width, NULL))
			width = 0;
	}
	fs_gguf_close(g);
	return width <= INT32_MAX ? (int32_t)width : 0;
}

static int encode(struct host *h, struct fs_vision *v, struct fs_rows **rows, struct fs_errbuf *e)
{
	static const uint8_t key[32] = {1};
	struct fs_vision_job *job;
	struct fs_encode_params p = {0};
	int rc = fs_vision_submit(v, picture, sizeof(picture), key, &p, h->stop.token, &job, e);
	if (rc)
		return rc;
	rc = fs_vision_wait(job, rows, e);
	fs_vision_job_destroy(job);
	return rc;
}

/* A watchdog whose encoder could not start pauses before it tries again, and tells the old cause meanwhile;
 * what was wrong may have been mended just now. */
static int encode_patiently(struct host *h, struct fs_vision *v, struct fs_rows **rows, struct fs_errbuf *e)
{
	int64_t until = fs_deadline_ms(AGAIN_MS);
	for (;;) {
		int rc = encode(h, v, rows, e);
		if (rc != FS_EUNAVAILABLE || fs_now() >= until)
			return rc;
		struct pollfd p[2] = {
		        {.fd = fs_vision_news(v), .events = POLLIN}, {.fd = h->wake, .events = POLLIN}};
		poll(p, 2, PAUSE_MS);
		fs_wake_drain(p[0].fd);
		if (host_stopped(h))
			return fs_fail(e, FS_ECANCELLED, "cancelled");
	}
}

int host_try_picture(struct host *h)
{
	int32_t width = text_model_width(h);
	struct fs_vision_opts o = {.n_hosts = 1,
	        .n_embd = width,
	        .connect_timeout_ms = CONNECT_MS,
	        .ping_interval_ms = 5000,
	        .dead_after_ms = 30000,
	        .encode_timeout_ms = ENCODE_MS,
	        .program = "farsight " FS_VERSION};
	struct fs_host_status st = {0};
	struct fs_errbuf e = {""};
	struct fs_vision *v;
	struct fs_rows *rows = NULL;
	enum fs_log_level level = fs_log_get_level();
	o.hosts[0] = (struct fs_vision_host_opts){.host = h->o.name,
	        .port = (int)h->o.port,
	        .identity = h->by_entry ? h->entry_identity : h->key,
	        .command = h->by_entry ? h->entry_command : NULL,
	        .known_hosts = h->o.known_hosts,
	        .config_file = h->o.ssh_config};
	fs_log_set_level(FS_LOG_ERROR); /* what goes wrong is told below */
	int rc = fs_vision_create(&o, &v, &e);
	if (!rc) {
		rc = encode_patiently(h, v, &rows, &e);
		fs_vision_status(v, &st, 1);
		fs_vision_destroy(v);
	}
	fs_log_set_level(level);
	if (rc)
		return host_failed(h, rc, "test picture",
		        "on the host, see watchdog.log in the folder that farsight-watchdog status names",
		        e.text);
	host_ok(h, "test picture",
	        "%d rows (%d x %d) of %d values in %.1f ms, of which the encoder took %.1f ms, on %s",
	        rows->shape.n_tokens, rows->shape.nx, rows->shape.ny, rows->shape.n_embd, rows->total_ms,
	        rows->encode_ms, *st.device ? st.device : "a device it does not name");
	if (width)
		host_ok(h, "models", "the rows fit %s", h->conf.model);
	fs_rows_unref(rows);
	return FS_OK;
}
