/*
 * wire: the three formats that cross a process or machine boundary, as pure functions over bytes (no
 * descriptors, no threads, no memory but the caller's): the encoder's line protocol, the frames of the ssh
 * channel, and rows files. docs/PROTOCOL.md is the specification. Every parser takes untrusted bytes.
 */
#ifndef FS_COMMON_WIRE_H
#define FS_COMMON_WIRE_H

#include "common/base/base.h"

/* ================= rows files, "SVE1" =================
 * int32 LE {0x31455653, n_tokens, nx, ny, n_embd}, then float32 LE [n_tokens][n_embd]; n_tokens == nx*ny; row
 * i is the cell x = i % nx, y = i / nx. */

#define FS_ROWS_MAGIC 0x31455653
#define FS_ROWS_HEADER 20
#define FS_ROWS_MAX_TOKENS 65536
#define FS_ROWS_MAX_EMBD 65536
#define FS_ROWS_MAX_BYTES ((size_t)1 << 30)

struct fs_rows_shape {
	int32_t n_tokens, nx, ny, n_embd;
};
void fs_rows_header_put(uint8_t out[FS_ROWS_HEADER], const struct fs_rows_shape *s);
/* Checks magic, signs, product, limits; file_bytes is the whole file's size and must match exactly. */
int fs_rows_header_get(const uint8_t in[FS_ROWS_HEADER], uint64_t file_bytes, struct fs_rows_shape *out,
        struct fs_errbuf *e);
enum fs_wire_dtype { FS_WIRE_F32 = 0, FS_WIRE_F16 = 1 };
size_t fs_wire_dtype_bytes(uint32_t dtype); /* 4, 2; 0 for an unknown one */
/* As fs_rows_header_get for a file whose rows were asked for in dtype (the header does not tell). */
int fs_rows_header_get_dtype(const uint8_t in[FS_ROWS_HEADER], uint64_t file_bytes, enum fs_wire_dtype dtype,
        struct fs_rows_shape *out, struct fs_errbuf *e);
/* The same of rows that are still being written: *bytes is what the header says that follows it. */
int fs_rows_header_begin(const uint8_t in[FS_ROWS_HEADER], enum fs_wire_dtype dtype,
        struct fs_rows_shape *out, size_t *bytes, struct fs_errbuf *e);
/* Writes header and rows to a new file (0600, O_EXCL not required: the path is truncated); removes it on
 * failure. */
int fs_rows_write_file(
        const char *path, const struct fs_rows_shape *s, const float *rows, struct fs_errbuf *e);
/* The same with IEEE halves, as answer to dtype=f16. */
int fs_rows_write_file_f16(
        const char *path, const struct fs_rows_shape *s, const uint16_t *rows, struct fs_errbuf *e);
/* As fs_rows_write_file, but a file of that name is whole at any time: the new one is written beside it and
 * renamed. */
int fs_rows_replace_file(
        const char *path, const struct fs_rows_shape *s, const float *rows, struct fs_errbuf *e);
/* Reads and checks all of it, finiteness included; *rows is malloc'd, [n_tokens][n_embd]. */
int fs_rows_read_file(const char *path, struct fs_rows_shape *s, float **rows, struct fs_errbuf *e);
/* FS_EFORMAT naming the first element that is NaN or infinite. */
int fs_rows_check_finite(const float *rows, size_t n, struct fs_errbuf *e);

/* ================= line protocol =================
 * UTF-8 lines between a server (or watchdog) and an encoder's stdin/stdout. Plain: READY n_embd / ENC in out
 * / OK n nx ny ms / ERR text / QUIT. Extended (encoder started with --extended): CANCEL; "ENC" may carry
 * options in front of the paths: "ENC dtype=f16 min=4 max=64 <in> <out>"; READY n_embd fingerprint=<32 hex>
 * device=<word> min_tokens=N max_tokens=N vram_free_mb=N vram_total_mb=N. */

/* Exit status of an encoder whose device failed for good, and which would be of use again after a new start.
 */
#define FS_ENCODER_EXIT_LOST 75

#define FS_LINE_MAX 8192 /* bytes with the newline; a longer line is FS_EFORMAT */

struct fs_ready {
	int32_t n_embd;
	char fingerprint[33];                /* "" when not told */
	char device[64];                     /* "" when not told */
	int32_t min_tokens, max_tokens;      /* 0 when not told */
	int32_t vram_free_mb, vram_total_mb; /* of its GPU once it is loaded; 0 when not told */
	bool pipe; /* it writes rows from front to back, so that its output may be a FIFO */
};
enum fs_reply_kind { FS_REPLY_READY, FS_REPLY_OK, FS_REPLY_ERR };
struct fs_reply {
	enum fs_reply_kind kind;
	struct fs_ready ready; /* READY */
	struct fs_rows_shape
	        shape;  /* OK: n_embd is 0; nx, ny are n_tokens x 1 when an encoder tells only n_tokens */
	double ms;      /* OK: 0 when not told */
	char text[512]; /* ERR */
};
/* One line without its newline. */
int fs_reply_parse(const char *line, size_t n, struct fs_reply *out, struct fs_errbuf *e);

enum fs_order_kind { FS_ORDER_ENC, FS_ORDER_CANCEL, FS_ORDER_QUIT };
struct fs_order {
	enum fs_order_kind kind;
	bool f16; /* dtype=f16: the rows file holds n_embd halves a row behind the same header; extended only
	           */
	int32_t min_tokens, max_tokens; /* 0 = the encoder's own; extended only */
	char in[4096], out[4096];       /* split at the last space */
};
int fs_order_parse(const char *line, size_t n, bool extended, struct fs_order *out, struct fs_errbuf *e);
/* Formats with newline; FS_ELIMIT when it does not fit, FS_EINVAL for a path with a newline, or an output
 * path with a space. */
int fs_order_format(const struct fs_order *o, bool extended, char *line, size_t cap, struct fs_errbuf *e);

/* Splits a byte stream into lines. The buffer's max bounds a line. */
/* Returns the length of the first complete line in b (without "\n"), or FS_ENOTFOUND, or FS_EFORMAT when
 * FS_LINE_MAX is passed without one. */
int fs_line_next(const struct fs_buf *b, size_t *len, struct fs_errbuf *e);

/* ================= frames of the ssh channel =================
 * Header, 12 bytes LE: u32 payload length (<= FS_FRAME_MAX), u8 type, u8 flags (0), u16 reserved (0), u32
 * request id (0 = about the connection). Then the payload. */

#define FS_PROTOCOL_VERSION 1
#define FS_FRAME_HEADER 12
#define FS_FRAME_MAX (256 * 1024)
#define FS_FRAME_CHUNK (64 * 1024) /* what senders use for DATA, so that control frames never wait long */

enum fs_frame_type {
	FS_FRAME_HELLO = 1,  /* both ways, first; payload: JSON object (struct fs_hello) */
	FS_FRAME_ENC = 2,    /* server -> host: struct fs_enc_head, then DATA frames with the picture */
	FS_FRAME_DATA = 3,   /* either way: the next bytes of this request's picture or rows */
	FS_FRAME_ROWS = 4,   /* host -> server: struct fs_rows_head, then DATA frames with the rows */
	FS_FRAME_ERR = 5,    /* host -> server: u32 fs_err code as positive number, then UTF-8 text; ends the
	                        request (id 0: the connection) */
	FS_FRAME_CANCEL = 6, /* server -> host: no payload; the host answers ERR(cancelled) unless all its
	                        DATA is already sent */
	FS_FRAME_PING = 7,   /* either way: 8 opaque bytes; answered at once by PONG with the same */
	FS_FRAME_PONG = 8,
	FS_FRAME_STATE = 9, /* host -> server: JSON object: encoder state changes ("ready", "starting",
	                       "failed"), queue, cause */
	FS_FRAME_BYE = 10,  /* either way: an orderly end; server -> host gives its lease up at once */
};

struct fs_frame {
	uint8_t type;
	uint32_t id;
	uint32_t len;           /* payload bytes */
	const uint8_t *payload; /* into the buffer it was parsed from */
};
void fs_frame_header_put(uint8_t out[FS_FRAME_HEADER], uint8_t type, uint32_t id, uint32_t len);
/* Appends header and payload to b. */
int fs_frame_append(struct fs_buf *b, uint8_t type, uint32_t id, const void *payload, size_t n);
/* The header alone, for readers that take payloads straight to where they belong; payload is NULL. Same
 * checks as fs_frame_parse. */
int fs_frame_header_get(const uint8_t in[FS_FRAME_HEADER], struct fs_frame *out, struct fs_errbuf *e);
/* FS_OK: a frame, *used bytes long, at the front of data. FS_ENOTFOUND: more bytes are needed. FS_EFORMAT:
 * unknown type, flags, length. */
int fs_frame_parse(const uint8_t *data, size_t n, struct fs_frame *out, size_t *used, struct fs_errbuf *e);

struct fs_enc_head {                    /* 24 bytes LE in this order */
	uint32_t picture_bytes;         /* 1 .. 64 MiB */
	uint32_t dtype;                 /* enum fs_wire_dtype wanted for the rows */
	int32_t min_tokens, max_tokens; /* 0 = the host's */
	uint32_t deadline_ms;           /* what is left for this encode; 0 = the host's own */
	uint32_t reserved;              /* 0 */
};
#define FS_ENC_HEAD 24
#define FS_PICTURE_MAX ((size_t)64 << 20)
void fs_enc_head_put(uint8_t out[FS_ENC_HEAD], const struct fs_enc_head *h);
int fs_enc_head_get(const uint8_t *in, size_t n, struct fs_enc_head *out, struct fs_errbuf *e);

struct fs_rows_head { /* 32 bytes LE in this order */
	struct fs_rows_shape shape;
	uint32_t dtype;     /* of the DATA that follows: n_tokens * n_embd elements */
	uint32_t encode_us; /* the encoder's own time */
	uint32_t queue_us;  /* waited on the host before it */
	uint32_t reserved;
};
#define FS_ROWS_HEAD 32
void fs_rows_head_put(uint8_t out[FS_ROWS_HEAD], const struct fs_rows_head *h);
int fs_rows_head_get(const uint8_t *in, size_t n, struct fs_rows_head *out, struct fs_errbuf *e);
/* Bytes of rows that follow; checked product. */
int fs_rows_head_bytes(const struct fs_rows_head *h, size_t *out, struct fs_errbuf *e);

/* ERR. err is negative (anything else is sent as FS_EINTERNAL); text is cut at FS_ERR_TEXT_MAX bytes. */
#define FS_ERR_TEXT_MAX 1024
int fs_frame_append_err(struct fs_buf *b, uint32_t id, int err, const char *text);
/* *err gets the negative code (an unknown one becomes FS_EINTERNAL), *text the peer's text, made printable.
 */
int fs_err_payload_get(const uint8_t *in, size_t n, int *err, struct fs_errbuf *text, struct fs_errbuf *e);

/* HELLO, both ways. Unknown members are ignored; absent ones are 0 or "". JSON names are the field names. */
struct fs_hello {
	int32_t version;  /* FS_PROTOCOL_VERSION; another one is refused by name */
	char program[64]; /* "farsight-server 0.1.0" */
	/* server -> host */
	char lease[65];  /* random id of this server process; a reconnect with the same one takes the same
	                    lease up again */
	int32_t channel; /* which of its channels to this host; a new one ends the older one of the same
	                    number; 0 = ends none */
	int32_t liveness_port;                  /* the server's HTTP port for probes; 0 = do not probe */
	int32_t probe_fails, probe_interval_ms; /* 0 = host's defaults 3 and 10000 */
	char want_fingerprint[33];              /* "" = any */
	int32_t want_n_embd;                    /* 0 = any */
	/* host -> server; sent when the encoder is ready, or at once with state "starting"/"failed" (then
	 * STATE frames follow) */
	char state[16];  /* "ready" | "starting" | "failed" */
	char cause[256]; /* of "failed" */
	char fingerprint[33];
	int32_t n_embd;
	char device[64];
	int32_t min_tokens, max_tokens;
	int64_t max_picture_bytes;
	int32_t vram_free_mb, vram_total_mb; /* as the encoder told when it became ready; 0 = not known */
};
/* JSON into b (cleared first). Names not meaningful for a side may be sent as they are. */
int fs_hello_format(const struct fs_hello *h, struct fs_buf *b);
int fs_hello_parse(const uint8_t *json, size_t n, struct fs_hello *out, struct fs_errbuf *e);

#endif
