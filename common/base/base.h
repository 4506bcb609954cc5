/*
 * base: what every other module stands on: errors, log, bounded buffers, monotonic time, threads, cancel
 * tokens, child processes. Owns no global state but the log's level and sink. Everything here may be called
 * from any thread unless a comment says otherwise; nothing here allocates without a stated bound.
 */
#ifndef FS_COMMON_BASE_H
#define FS_COMMON_BASE_H

#include <pthread.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#define FS_PRINTF(fmt, args) __attribute__((format(printf, fmt, args)))
#define FS_ARRAY_LEN(a) (sizeof(a) / sizeof((a)[0]))
#define FS_MIN(a, b) ((a) < (b) ? (a) : (b))
#define FS_MAX(a, b) ((a) > (b) ? (a) : (b))

/* Holds in release builds too; for invariants, never for input. */
#define FS_ASSERT(cond)                                                                                      \
	do {                                                                                                 \
		if (!(cond))                                                                                 \
			fs_assert_failed(#cond, __FILE__, __LINE__);                                         \
	} while (0)
_Noreturn void fs_assert_failed(const char *cond, const char *file, int line);

/* ---- errors: functions return FS_OK or one of these, results go through out-pointers that are set only on
 * FS_OK ---- */

enum fs_err {
	FS_OK = 0,
	FS_EINVAL = -1,       /* input from outside is wrong; the text says what and what to do */
	FS_ENOMEM = -2,       /* memory, or a stated maximum of a buffer, is used up */
	FS_EIO = -3,          /* the operating system refused: file, socket, process */
	FS_EFORMAT = -4,      /* bytes do not follow their format (file, frame, line, picture) */
	FS_ETIMEOUT = -5,     /* a deadline passed */
	FS_ECANCELLED = -6,   /* the caller's cancel token fired */
	FS_EUNAVAILABLE = -7, /* a peer, host, device or program is not there now; trying later may work */
	FS_ELIMIT = -8,       /* within the format but over a configured limit */
	FS_ENOTSUP = -9,      /* valid, but this build or program can not do it */
	FS_ENOTFOUND = -10,
	FS_EAUTH = -11,     /* host key, user key or permission */
	FS_EINTERNAL = -12, /* a device or library failed in a way that is not the input's fault */
};

/* Text for people. Owned by the caller, on its stack as a rule; always NUL-terminated. NULL is accepted
 * everywhere. */
struct fs_errbuf {
	char text[512];
};

const char *fs_err_name(int err);
/* Formats the text (cut at the buffer's size, control characters replaced by '?') and returns err. */
int fs_fail(struct fs_errbuf *e, int err, const char *fmt, ...) FS_PRINTF(3, 4);
/* As fs_fail, with ": <strerror(errno)>" appended. */
int fs_fail_errno(struct fs_errbuf *e, int err, const char *fmt, ...) FS_PRINTF(3, 4);
/* Puts "<context>: " in front of the text that is there; returns err. */
int fs_fail_prefix(struct fs_errbuf *e, int err, const char *fmt, ...) FS_PRINTF(3, 4);

/* ---- log: one line a call on stderr, "2026-01-31T12:00:00.000Z level thread: text", control characters
 * escaped ---- */

enum fs_log_level { FS_LOG_ERROR, FS_LOG_WARN, FS_LOG_INFO, FS_LOG_DEBUG };
void fs_log_set_level(enum fs_log_level level);
enum fs_log_level fs_log_get_level(void);
/* "error" | "warn" | "info" | "debug" -> level; FS_EINVAL else. */
int fs_log_parse_level(const char *name, enum fs_log_level *out);
void fs_log(enum fs_log_level level, const char *fmt, ...) FS_PRINTF(2, 3);
#define fs_error(...) fs_log(FS_LOG_ERROR, __VA_ARGS__)
#define fs_warn(...) fs_log(FS_LOG_WARN, __VA_ARGS__)
#define fs_info(...) fs_log(FS_LOG_INFO, __VA_ARGS__)
#define fs_debug(...) fs_log(FS_LOG_DEBUG, __VA_ARGS__)

/* ---- bounded growable bytes. One thread at a time. data is NULL while cap is 0; data[len] is always a NUL
 * when cap > 0. ---- */

struct fs_buf {
	uint8_t *data;
	size_t len;
	size_t cap;
	size_t max; /* len never exceeds it */
};

void fs_buf_init(struct fs_buf *b, size_t max);
void fs_buf_finish(struct fs_buf *b); /* frees; the buffer may be used again (empty, same max) */
void fs_buf_clear(struct fs_buf *b);  /* len = 0, keeps the memory */
/* FS_ENOMEM when max would be passed or memory is out; the buffer is then unchanged. */
int fs_buf_reserve(struct fs_buf *b, size_t more);
int fs_buf_append(struct fs_buf *b, const void *data, size_t n);
int fs_buf_append_str(struct fs_buf *b, const char *s);
int fs_buf_printf(struct fs_buf *b, const char *fmt, ...) FS_PRINTF(2, 3);
/* Appends the whole of a regular file. FS_EIO, FS_ELIMIT past max; what was read by then stays. A FIFO or a
 * device is FS_EINVAL and never waited for. */
int fs_buf_append_file(struct fs_buf *b, const char *path, struct fs_errbuf *e);
/* Drops n bytes from the front. n <= len. */
void fs_buf_consume(struct fs_buf *b, size_t n);
/* Takes the bytes out as a malloc'd, NUL-terminated block (never NULL unless memory is out); *n may be NULL.
 */
char *fs_buf_take(struct fs_buf *b, size_t *n);

/* ---- sizes from outside: false when the result does not fit ---- */

static inline bool fs_mul_size(size_t a, size_t b, size_t *out)
{
	return !__builtin_mul_overflow(a, b, out);
}
static inline bool fs_add_size(size_t a, size_t b, size_t *out)
{
	return !__builtin_add_overflow(a, b, out);
}

/* ---- time: monotonic nanoseconds everywhere; the wall clock only for people ---- */

#define FS_MS (1000000LL)
#define FS_SEC (1000000000LL)
#define FS_NEVER INT64_MAX
int64_t fs_now(void); /* CLOCK_MONOTONIC, ns */
/* ms for poll(): -1 for FS_NEVER, 0 when past, rounded up, at most 1 hour. */
int fs_poll_ms(int64_t deadline);
/* now + ms, saturating; ms < 0 gives FS_NEVER. */
int64_t fs_deadline_ms(int64_t ms);

/* ---- threads ---- */

/* A joinable thread with a name (<= 15 bytes) and all signals but SIGBUS blocked. */
int fs_thread_start(pthread_t *out, const char *name, void *(*fn)(void *), void *arg, struct fs_errbuf *e);
/* Condition variable on CLOCK_MONOTONIC; wait with fs_cond_wait_until. */
int fs_cond_init(pthread_cond_t *c);
/* true when signalled, false when the deadline passed. Spurious wake-ups return true: loop on the condition.
 */
bool fs_cond_wait_until(pthread_cond_t *c, pthread_mutex_t *m, int64_t deadline);
/* Close-on-exec, non-blocking eventfd used to wake a poll loop; fs_wake_drain resets it. Negative fs_err on
 * failure. */
int fs_wake_open(void);
void fs_wake(int fd);
void fs_wake_drain(int fd);

/* ---- mistyped words ---- */

#define FS_WORD_FAR ((size_t)999)                          /* a word of more than 64 bytes is near to none */
size_t fs_word_distance(const char *a, const char *b);     /* Levenshtein's */
bool fs_word_is_near(const char *word, const char *known); /* enough to be meant by it */
/* n > 0; the first of equals. */
const char *fs_nearest_word(const char *word, const char *const *known, size_t n);

/* ---- cancel token: one type for client gone, stream deletion, deadline, shutdown ---- */

enum fs_cancel_cause {
	FS_CANCEL_NONE,
	FS_CANCEL_CLIENT,   /* the client left */
	FS_CANCEL_DELETED,  /* its stream was deleted or replaced */
	FS_CANCEL_DEADLINE, /* the deadline given at creation passed */
	FS_CANCEL_SHUTDOWN,
	FS_CANCEL_UNREAD, /* the client does not read its answer */
};
struct fs_cancel; /* counted; every holder has a reference */
/* A hook that fires once, from the firing thread, with no lock of the token held by callers of fs_cancelled.
 * Must not block and must not call listen/unlisten/unref of the same token. The struct is the listener's;
 * link fields are the token's. */
struct fs_cancel_hook {
	void (*fn)(void *arg);
	void *arg;
	struct fs_cancel_hook *prev, *next; /* private to the token */
};

/* deadline: monotonic ns or FS_NEVER. NULL when memory is out. */
struct fs_cancel *fs_cancel_create(int64_t deadline);
struct fs_cancel *fs_cancel_ref(struct fs_cancel *c); /* NULL in, NULL out */
void fs_cancel_unref(struct fs_cancel *c);
/* The first cause wins; later calls do nothing. Runs the hooks. */
void fs_cancel_fire(struct fs_cancel *c, enum fs_cancel_cause cause);
/* True once fired or past the deadline (fires it then). NULL is never cancelled. Cheap: one atomic load and
 * one clock read. */
bool fs_cancelled(struct fs_cancel *c);
enum fs_cancel_cause fs_cancel_cause(const struct fs_cancel *c);
const char *fs_cancel_cause_name(enum fs_cancel_cause cause); /* "client", "deleted" …: for programs */
int64_t fs_cancel_deadline(const struct fs_cancel *c);        /* FS_NEVER for NULL */
/* Brings the deadline forward; a later one changes nothing. Who waits already keeps the one that it saw, so
 * it is called before anybody waits. */
void fs_cancel_shorten(struct fs_cancel *c, int64_t deadline);
/* Adds a hook; false (and the hook not added, not called) when the token has already fired. */
bool fs_cancel_listen(struct fs_cancel *c, struct fs_cancel_hook *h);
/* Afterwards fn is neither running nor will run. Harmless when it was never added or has fired. */
void fs_cancel_unlisten(struct fs_cancel *c, struct fs_cancel_hook *h);

/* ---- where something computes, as settings and options name it ---- */

#define FS_DEVICE_WORDS "\"auto\", \"cpu\", \"cuda\" or \"cuda:N\"" /* N in PCI bus order, 0 to 999 */
bool fs_device_is_word(const char *s);
/* "cuda" or "cuda:N". */
bool fs_device_is_gpu(const char *s);
/* The N of "cuda:N"; -1 of other words. */
int fs_device_number(const char *s);

/* ---- child processes, by argv, never a shell ---- */

struct fs_child {
	pid_t pid;   /* 0 when none; leader of its own process group and of nothing else */
	int in, out; /* our ends of its stdin and stdout, non-blocking, close-on-exec; -1 when none */
	int err;     /* our end of its stderr when asked for, else -1 (stderr is inherited) */
};
/*
 * Starts argv[0] (searched in PATH when it holds no '/'), argv NULL-terminated, env NULL = ours. The child
 * gets default signal handlers, an empty mask, PR_SET_PDEATHSIG(SIGKILL) of the starting thread only when
 * die_with_parent is set, and no descriptors but 0-2. A failed exec is FS_EUNAVAILABLE with its reason,
 * reported through a close-on-exec pipe.
 */
int fs_child_start(struct fs_child *c, const char *const argv[], char *const env[], bool want_stderr,
        bool die_with_parent, struct fs_errbuf *e);
/* Signals the whole group. */
void fs_child_signal(const struct fs_child *c, int sig);
/* Reaps without waiting: true when ended, *status as from waitpid (may be NULL). */
bool fs_child_reap(struct fs_child *c, int *status);
/* TERM, waits up to grace_ms, then KILL; reaps and closes the descriptors. */
void fs_child_end(struct fs_child *c, int grace_ms);

#endif
