/*
 * chat_scan: reads facts off the text of a Jinja chat template without executing it: the sums that its {{ }}
 * blocks put out, default system texts, filters. What it does not understand it skips. No state, any thread.
 * Internal to chat.
 */
#ifndef FS_ENGINE_CHAT_SCAN_H
#define FS_ENGINE_CHAT_SCAN_H

#include "common/base/base.h"

#define FS_SCAN_ATOMS 12
#define FS_SCAN_TEXT_MAX ((size_t)1 << 20) /* of a template, and of any text taken out of it */

enum fs_scan_kind {
	FS_SCAN_LITERAL,
	FS_SCAN_CONTENT,
	FS_SCAN_SYSTEM,
	FS_SCAN_BOS,
	FS_SCAN_EOS,
	FS_SCAN_OTHER
};
struct fs_scan_atom { /* one operand of a + b + c */
	enum fs_scan_kind kind;
	const char *s; /* in the template; a literal without its quotes, escapes not yet decoded */
	size_t len;
	bool trim; /* | trim or .strip() */
};
struct fs_scan_block {
	struct fs_scan_atom atoms[FS_SCAN_ATOMS];
	size_t n;
};

/* The next {{ }} block at or after *pos, which moves behind it; false when there is none. Atoms past the
 * maximum are dropped. */
bool fs_scan_next(const char *tmpl, size_t len, size_t *pos, struct fs_scan_block *b);

bool fs_scan_has(const char *tmpl, size_t len, const char *needle);
/* Whether the atom is a literal that holds the needle. */
bool fs_scan_atom_has(const struct fs_scan_atom *a, const char *needle);
/* Whether a message's content is trimmed anywhere. */
bool fs_scan_trims(const char *tmpl, size_t len);
/* Appends a literal's text, \n \t \' \" \\ decoded. */
int fs_scan_unescape(struct fs_buf *out, const char *s, size_t len);
/* The literal assigned to a variable (name = '…'), the first non-empty one; FS_ENOTFOUND. Appends it decoded.
 */
int fs_scan_assigned(const char *tmpl, size_t len, const char *name, struct fs_buf *out);
/* The first {% set name = … %} whose sum holds a message's content. */
bool fs_scan_set(const char *tmpl, size_t len, const char *name, struct fs_scan_block *b);
/* The constant text between the mark `open` with a line end behind it and the mark `close`; FS_ENOTFOUND when
 * nothing but expressions stands there. */
int fs_scan_between(const char *tmpl, size_t len, const char *open, const char *close, struct fs_buf *out);

#endif
