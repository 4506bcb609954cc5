/*
 * fetch, inside: which addresses are public, the allow-list, what a URL must be, one transfer. The first
 * three are pure functions for any thread; transfers belong to the thread that owns the multi handle.
 */
#ifndef FS_SERVER_FETCH_INTERNAL_H
#define FS_SERVER_FETCH_INTERNAL_H

#include "server/fetch/fetch.h"

#include <curl/curl.h>
#include <netinet/in.h>
#include <sys/socket.h>

/* ---- addresses ---- */

/*
 * True for addresses that a picture of the public internet can not have: private, loopback, link-local,
 * shared (CGNAT), multicast, reserved, documentation; IPv6 outside 2000::/3; and forms of IPv6 that carry
 * such an IPv4 address (mapped, NAT64, 6to4). After the IANA registries of special-purpose addresses. True,
 * too, for families other than IPv4 and IPv6 and for a length too short.
 */
bool fs_fetch_addr_special(const struct sockaddr *sa, socklen_t n);
/* "192.0.2.1" or "2001:db8::1", for the log. */
void fs_fetch_addr_text(const struct sockaddr *sa, socklen_t n, char *out, size_t cap);

/* ---- the allow-list ---- */

struct fs_fetch_allowed {
	char *name;       /* of a URL's host, lower case, no dot at its end; NULL = an address */
	uint8_t addr[16]; /* IPv4 in its mapped form */
	int prefix;       /* bits of addr that count */
	int port;         /* 0 = any */
};
struct fs_fetch_allow {
	struct fs_fetch_allowed *entries;
	size_t n;
};
int fs_fetch_allow_init(struct fs_fetch_allow *a, const char *const *texts, size_t n, struct fs_errbuf *e);
void fs_fetch_allow_finish(struct fs_fetch_allow *a);
/* host and port are the URL's; the port of sa counts for entries with an address. */
bool fs_fetch_allows(
        const struct fs_fetch_allow *a, const char *host, int port, const struct sockaddr *sa, socklen_t n);

/* ---- URLs ---- */

struct fs_fetch_url {
	CURLU *u;
	char *host; /* as libcurl reads it, so that nothing is judged that is not what is asked */
	int port;
	char shown[256]; /* scheme, host, port and path, cut; for the log */
};
/* Reads url, relative to base when there is one. FS_EINVAL and FS_ELIMIT as fs_fetch_submit. */
int fs_fetch_url_init(
        struct fs_fetch_url *out, const struct fs_fetch_url *base, const char *url, struct fs_errbuf *e);
void fs_fetch_url_finish(struct fs_fetch_url *u);

/* One text for all causes: which it was would tell a client what listens where. */
#define FS_FETCH_NOT_FETCHED "the picture's URL could not be fetched"

/* ---- one transfer: a URL and its redirects, one curl handle a hop ---- */

/* Bytes of all transfers and of results that nobody took yet. Any thread. */
struct fs_fetch_budget {
	_Atomic size_t used;
	size_t max;
};

struct fs_transfer {
	const struct fs_fetch_opts *o;
	const struct fs_fetch_allow *allow;
	struct fs_fetch_budget *budget;
	struct fs_fetch_url url;  /* of this hop */
	struct fs_fetch_url next; /* of the one to be started */
	CURL *easy;               /* NULL between hops */
	int hops;                 /* redirects followed */
	int64_t connect_by;       /* FS_NEVER once this hop is connected */
	bool resolving;           /* a look-up is going on, which nothing can interrupt */
	bool abandoned;           /* nobody wants it: no connection is opened for it any more */
	struct fs_buf body;
	size_t charged;                 /* to the budget, for body */
	int stop;                       /* the fs_err with which a callback ended it */
	char curl_why[CURL_ERROR_SIZE]; /* libcurl's words */
	char why[CURL_ERROR_SIZE + 64]; /* why it failed, for the log */
};
/* Takes url over. o, allow and budget outlive the transfer. */
void fs_transfer_init(struct fs_transfer *t, const struct fs_fetch_opts *o,
        const struct fs_fetch_allow *allow, struct fs_fetch_budget *budget, struct fs_fetch_url *url);
/* Gives back what it holds; harmless when done before. Not while it runs: fs_transfer_stop first. */
void fs_transfer_finish(struct fs_transfer *t);
/* Adds the next hop to the multi handle; `tag` is its CURLINFO_PRIVATE. */
int fs_transfer_start(struct fs_transfer *t, CURLM *multi, void *tag, struct fs_errbuf *e);
/* Takes it off the multi handle and closes its connection. Waits for nothing; a look-up that is going on goes
 * on by itself, in a thread that ends with it. */
void fs_transfer_stop(struct fs_transfer *t, CURLM *multi);
/* What the end of this hop means, before fs_transfer_stop. FS_OK with *again: there is a next hop to be
 * started. Else the text of e is for the client and t->why for the log. */
int fs_transfer_result(struct fs_transfer *t, CURLcode code, bool *again, struct fs_errbuf *e);

/* ---- jobs and the thread ---- */

struct fs_fetch_job {
	struct fs_fetch *f;
	int refs; /* the owner's, the list's */
	struct fs_cancel *cancel;
	struct fs_cancel_hook hook;
	pthread_cond_t cond;
	int64_t submitted, deadline;
	char shown[256]; /* the first URL, for the log */

	/* under the lock */
	bool done;
	int rc;
	struct fs_errbuf err;
	uint8_t *bytes; /* of FS_OK until taken */
	size_t n, charged;

	struct fs_fetch_job *prev, *next; /* the queue's under the lock, then the thread's */
	struct fs_transfer t;             /* the thread's while a list holds the job */
};

struct fs_fetch_list {
	struct fs_fetch_job *first, *last;
	int n;
};

struct fs_fetch {
	struct fs_fetch_opts o;
	struct fs_fetch_allow allow;
	struct fs_fetch_budget budget;
	CURLM *multi; /* NULL when off; others than the thread only wake it */
	pthread_t thread;

	pthread_mutex_t lock;
	int refs; /* the creator's, one a job */
	bool stopping;
	struct fs_fetch_list queue; /* submitted, not begun */

	struct fs_fetch_list active; /* the thread's */
	struct fs_fetch_list aside;  /* the thread's: ended, their look-ups not */
};

/* Wakes the waiter and the thread; does nothing when it had ended before. */
void fs_fetch_end_locked(struct fs_fetch_job *j, int rc, const char *text);
/* False when it had ended before. Not with the lock held, nor a lock that hooks of tokens take. */
bool fs_fetch_end(struct fs_fetch_job *j, int rc, const char *text);
/* Its deadline has passed: the token's, which then fires, or its own. */
void fs_fetch_expire(struct fs_fetch_job *j);
/* Takes the lock off; the job, and with the last one the fetch, may be gone afterwards. */
void fs_fetch_unref_unlock(struct fs_fetch_job *j);

void fs_fetch_append(struct fs_fetch_list *l, struct fs_fetch_job *j);
void fs_fetch_take_off(struct fs_fetch_list *l, struct fs_fetch_job *j);
/* The thread: until `stopping`. */
void *fs_fetch_run(void *fetch);

#endif
