/*
 * The watchdog's whole state, one struct owned by the loop in loop.c and touched by its thread alone.
 *
 *   connection (conn.c)  frames in and out of one agent, bounded queues
 *   session.c            what the frames mean: HELLO, ENC, DATA, CANCEL, PING, BYE, and the news to servers
 *   request (request.c)  one picture: received, queued, encoded, its rows sent
 *   lease, and common/encproc: have headers of their own and know nothing of these
 */
#ifndef FS_WATCHDOG_STATE_H
#define FS_WATCHDOG_STATE_H

#include "common/encproc/encproc.h"
#include "remote/watchdog/config.h"
#include "remote/watchdog/lease.h"
#include "remote/watchdog/notify.h"
#include "remote/watchdog/place.h"
#include "remote/watchdog/watchdog.h"

#define FS_WD_CONNS_MAX 64
#define FS_WD_REQUESTS_MAX 256
#define FS_WD_SPOOL_MAX ((uint64_t)1 << 30) /* announced picture bytes at one time, all servers together */

struct fs_wd;
struct fs_conn;

/* ---- connections ---- */

enum fs_conn_phase {
	FS_CONN_GREETING, /* the agent's line is awaited */
	FS_CONN_HELLO,    /* the server's HELLO is awaited */
	FS_CONN_OPEN,
	FS_CONN_CLOSING, /* what is queued is still written, nothing is read */
	FS_CONN_DEAD,    /* freed by the next sweep */
};

struct fs_conn {
	struct fs_conn *next;
	struct fs_wd *wd;
	int fd, slot; /* the agent's socket */
	int from, to; /* where frames are read and written: what came with the greeting, else fd */
	int from_slot, to_slot;
	enum fs_conn_phase phase;
	bool overflow; /* ctrl is full: the server does not read */
	bool admin;    /* "stop" and "retire": stays open until the watchdog ends */
	bool leaving;  /* the server said goodbye: stays open until its encoder has ended, when nobody else
	                  needs it */
	bool replace;  /* waits for another program to take this process over */
	int program;   /* that program, opened; came with the greeting; -1 = none */
	char peer[80];
	struct fs_lease *lease; /* counted there as a channel; NULL before HELLO */
	int32_t number;         /* of HELLO: the lease's channel of this number; 0 = none */
	struct fs_buf in;       /* received, not yet a whole frame */
	struct fs_buf ctrl;     /* whole frames to write before any DATA */
	uint8_t *chunk;         /* the DATA frame being written; FS_FRAME_HEADER + FS_FRAME_CHUNK bytes */
	size_t chunk_len, chunk_off;
	int64_t deadline; /* of GREETING, HELLO, CLOSING */
	int64_t last_frame, ping_at;
	char told[16];       /* the state word of the last news */
	uint64_t told_start; /* which start of the encoder it was about */
	uint32_t last_sent;  /* id of the request whose DATA was written last, so that they take turns */
};

int fs_conn_accept(struct fs_wd *wd, int fd, struct fs_errbuf *e); /* takes fd, also when it fails */
void fs_conn_prepare(struct fs_conn *c, struct fs_pollset *ps);
void fs_conn_dispatch(struct fs_conn *c, const struct fs_pollset *ps);
/* Queues one frame; a connection whose queue is full is ended in the next round. */
void fs_conn_send(struct fs_conn *c, uint8_t type, uint32_t id, const void *payload, size_t n);
void fs_conn_send_err(struct fs_conn *c, uint32_t id, int err, const char *text);
/* Writes what is queued (within a deadline), then ends the connection. */
void fs_conn_close(struct fs_conn *c);
/* At once, with all that hangs on it. */
void fs_conn_lose(struct fs_conn *c);
/* Of a connection that survives an exec: it is OPEN again, or (lease NULL) one that waits for the status. */
int fs_conn_resume(struct fs_wd *wd, int fd, int from, int to, struct fs_lease *lease, struct fs_conn **out);
/* Nothing is on its way in or out. */
bool fs_conn_quiet(const struct fs_conn *c);
/* ERR about the connection, then fs_conn_close. */
void fs_conn_refuse(struct fs_conn *c, int err, const char *text);
void fs_conn_sweep(struct fs_wd *wd);

/* ---- session ---- */

/* FS_OK, or the error for which the connection is ended. */
int fs_session_frame(struct fs_conn *c, const struct fs_frame *f, struct fs_errbuf *e);
/* Tells each server what it does not know yet about the encoder. */
void fs_session_news(struct fs_wd *wd);

/* ---- requests ---- */

enum fs_req_phase { FS_REQ_RECEIVING, FS_REQ_QUEUED, FS_REQ_RUNNING, FS_REQ_SENDING };

struct fs_req {
	struct fs_req *next;
	struct fs_wd *wd;
	struct fs_conn *conn;   /* NULL: nobody waits any more (only in RUNNING) */
	struct fs_lease *lease; /* counted there */
	uint32_t id;
	enum fs_req_phase phase;
	struct fs_enc_head head;
	uint32_t received; /* picture bytes */
	int fd;            /* RECEIVING: the picture; SENDING: the rows; -1 else */
	char picture[FS_SPOOL_PATH], rows[FS_SPOOL_PATH];
	struct fs_intake *intake; /* its rows come, or came, through a FIFO; NULL: as a file */
	uint64_t order;           /* first come, first served within a lease */
	int64_t deadline;         /* FS_NEVER when the server gave none */
	int64_t queued_at, started_at, rows_at;
	bool f16_file; /* the encoder was asked to write halves */
	bool moved;    /* its rows have got another place, since the first one was full */
	struct fs_rows_head out;
	size_t sent, total; /* bytes of DATA */
};

/* FS_EFORMAT and FS_EINVAL end the connection; a refused picture is answered with ERR and is FS_OK here. */
int fs_req_begin(struct fs_conn *c, uint32_t id, const struct fs_enc_head *h, struct fs_errbuf *e);
int fs_req_data(struct fs_conn *c, const struct fs_frame *f, struct fs_errbuf *e);
void fs_req_cancel(struct fs_conn *c, uint32_t id);
/* The connection is gone: drops its requests, cancels the running one. */
void fs_req_drop_all(struct fs_conn *c);
/* Fills c->chunk with the next DATA frame; false when there is none. */
bool fs_req_next_chunk(struct fs_conn *c);
/* Starts the next encode when the encoder is free; refuses what waits for an encoder that can not start;
 * deadlines. */
void fs_req_schedule(struct fs_wd *wd);
void fs_req_prepare(struct fs_wd *wd, struct fs_pollset *ps);
void fs_req_dispatch(struct fs_wd *wd, const struct fs_pollset *ps);
/* encproc's done(). */
void fs_req_done(void *wd, int err, const struct fs_reply *reply, const char *text);

/* ---- everything ---- */

struct fs_wd_opts {
	const char *socket_path, *config_path;
	bool service;             /* stays although it serves nobody */
	struct fs_notify *notify; /* taken over */
	int resume_fd;            /* the state of an earlier program of this process; -1 = none */
};

struct fs_wd {
	struct fs_wd_config cfg;
	char config_path[4096];
	bool service;
	struct fs_buf command, files; /* of fs_wd_config_command and _files, for the encoder that is there */
	struct fs_place place;
	struct fs_notify notify;
	int signal_fd, listen_slot, signal_slot, enc_slots[FS_ENCPROC_FDS], rows_slot;
	struct fs_spool spool, spare; /* spare: where pictures go when spool is full; made at need */
	struct fs_encproc enc;
	struct fs_leases leases;
	struct fs_conn *conns;
	size_t n_conns;
	struct fs_req *reqs, *running;
	size_t n_reqs;
	uint64_t spooled;     /* announced bytes of the pictures here */
	uint64_t last_rows;   /* bytes of the last rows file: about what the next one will need */
	uint64_t order, turn; /* counters for requests and for taking turns */
	uint64_t encodes, errors;
	bool stopping;
	bool retiring; /* ends as soon as nobody is served */
	int64_t started, idle_since;
	int64_t replace_asked;   /* 0 = nobody did */
	struct fs_child updater; /* a newer program at our path that asks to take over */
	struct stat binary;      /* the file that this process runs, or the last one that was tried */
	int64_t binary_at;       /* when to look for another one */
};

int fs_wd_init(struct fs_wd *wd, const struct fs_wd_opts *o, struct fs_errbuf *e);
/* Until SIGTERM, SIGINT, "stop", or nobody needs it any more. */
int fs_wd_run(struct fs_wd *wd);
void fs_wd_finish(struct fs_wd *wd);
/* One JSON object in one line. */
int fs_wd_status(struct fs_wd *wd, struct fs_buf *out);

/* ---- settings (reload.c) ---- */

/* The encoder's options as the settings have them; strings are the settings' own. */
void fs_wd_encoder_opts(const struct fs_wd_config *c, struct fs_encproc_opts *o);
/* Reads the settings again; an encoder whose command or files changed is started anew when it has no work.
 * Settings that are wrong change nothing. */
int fs_wd_reload(struct fs_wd *wd, struct fs_errbuf *e);

/* ---- another program for this process (upgrade.c) ---- */

#define FS_WD_STATE_FORMAT 1 /* of what is handed over; another number is not taken */
/* FS_OK: c waits, and the exec follows when nothing is on its way. */
int fs_wd_replace_ask(struct fs_wd *wd, struct fs_conn *c, struct fs_errbuf *e);
/* No further picture is begun, since a replacement has waited for long. */
bool fs_wd_replace_presses(const struct fs_wd *wd);
void fs_wd_replace_prepare(const struct fs_wd *wd, struct fs_pollset *ps);
/* Each round: does not return when the exec succeeds. */
void fs_wd_replace_step(struct fs_wd *wd);
/* Starts a newer program that lies at our path, so that it asks for the place. */
void fs_wd_look_for_newer(struct fs_wd *wd);
/* After the settings: what the earlier program had. */
int fs_wd_resume(struct fs_wd *wd, const char *socket_path, int fd, struct fs_errbuf *e);

#endif
