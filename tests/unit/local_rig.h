/* A vision whose encoder is fake_encoder on this machine, with a log of what the encoder saw; for tests. */
#ifndef FS_TESTS_LOCAL_RIG_H
#define FS_TESTS_LOCAL_RIG_H

#include "server/vision/vision.h"

#include <dirent.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define RIG_EMBD 8
#define RIG_LIMIT_MS 60000 /* of any single wait; nothing here measures time */

struct rig {
	char folder[64], exe[96], log[96];
	struct fs_vision_local_opts local;
	struct fs_vision_opts o;
	struct fs_vision *v;
};

/* The encoder gets args (a piece of shell) in front of the server's own. */
static inline void rig_args(struct rig *r, const char *args)
{
	FILE *f = fopen(r->exe, "we");
	FS_ASSERT(f != NULL);
	fprintf(f, "#!/bin/sh\nexec %s/tests/tools/fake_encoder --log %s %s \"$@\"\n", getenv("FS_BUILD"),
	        r->log, args);
	fchmod(fileno(f), 0700);
	fclose(f);
}

static inline void rig_prepare(struct rig *r, const char *args, bool extended)
{
	*r = (struct rig){.folder = "/tmp/farsight-local-XXXXXX"};
	FS_ASSERT(mkdtemp(r->folder) != NULL);
	snprintf(r->exe, sizeof(r->exe), "%s/encoder", r->folder);
	snprintf(r->log, sizeof(r->log), "%s/log", r->folder);
	rig_args(r, args);
	r->local = (struct fs_vision_local_opts){
	        .exe = r->exe, .mmproj = "none.gguf", .extended = extended, .ready_timeout_s = 60};
	r->o = (struct fs_vision_opts){.n_embd = RIG_EMBD, .encode_timeout_ms = RIG_LIMIT_MS};
}

static inline void rig_create(struct rig *r)
{
	struct fs_errbuf e;
	r->o.local = &r->local;
	FS_ASSERT(fs_vision_create(&r->o, &r->v, &e) == FS_OK);
}

static inline void rig_finish(struct rig *r)
{
	fs_vision_destroy(r->v);
	unlink(r->exe);
	unlink(r->log);
	rmdir(r->folder);
}

/* Lines of the encoder's log that begin with word; the last one's rest in *rest (may be NULL). */
static inline int rig_events(const struct rig *r, const char *word, char *rest, size_t cap)
{
	char line[512];
	int n = 0;
	FILE *f = fopen(r->log, "re");
	while (f && fgets(line, sizeof(line), f)) {
		if (strncmp(line, word, strlen(word)) != 0)
			continue;
		n++;
		line[strcspn(line, "\n")] = '\0';
		if (rest)
			snprintf(rest, cap, "%s", line + strlen(word));
	}
	if (f)
		fclose(f);
	return n;
}

static inline void rig_wait_events(const struct rig *r, const char *word, int n)
{
	int64_t until = fs_deadline_ms(RIG_LIMIT_MS);
	while (rig_events(r, word, NULL, 0) < n) {
		FS_ASSERT(fs_now() < until);
		poll(NULL, 0, 2);
	}
}

static inline struct fs_host_status rig_status(const struct rig *r)
{
	struct fs_host_status s;
	FS_ASSERT(fs_vision_status(r->v, &s, 1) == 1);
	return s;
}

static inline void rig_wait_state(const struct rig *r, enum fs_host_state state)
{
	int64_t until = fs_deadline_ms(RIG_LIMIT_MS);
	while (rig_status(r).state != state) {
		FS_ASSERT(fs_now() < until);
		poll(NULL, 0, 2);
	}
}

/* What the encoder makes of a picture: element k is (k % 8) + (sum of its bytes % 256) / 256. */
static inline bool rig_rows_are_of(const struct fs_rows *rows, const char *picture)
{
	unsigned sum = 0;
	for (const char *p = picture; *p; p++)
		sum += (unsigned char)*p;
	for (int32_t k = 0; k < rows->shape.n_tokens * rows->shape.n_embd; k++)
		if (rows->data[k] != (float)(k % 8) + (float)(sum % 256) / 256)
			return false;
	return true;
}

#endif
