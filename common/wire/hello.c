/*
 * HELLO's JSON. One table names the members, their bounds and places, and serves writing and reading.
 * Stateless, any thread. Refuses wrong types, texts that do not fit and numbers out of bounds; ignores
 * members that it does not know.
 */
#include "common/wire/wire.h"

#include <jansson.h>
#include <stdlib.h>
#include <string.h>

enum kind { INT32, INT64, TEXT };

struct member {
	const char *name;
	enum kind kind;
	size_t offset;
	int64_t max; /* numbers: 0..max; texts: the size of the array */
};

#define NUMBER(field, max_)                                                                                  \
	{                                                                                                    \
#field, INT32, offsetof(struct fs_hello, field), max_                                        \
	}
#define STRING(field)                                                                                        \
	{                                                                                                    \
#field, TEXT, offsetof(struct fs_hello, field), sizeof(((struct fs_hello *)0)->field)        \
	}

static const struct member members[] = {
        NUMBER(version, 65535),
        STRING(program),
        STRING(lease),
        NUMBER(channel, 65535),
        NUMBER(liveness_port, 65535),
        NUMBER(probe_fails, 1000000),
        NUMBER(probe_interval_ms, 86400000),
        STRING(want_fingerprint),
        NUMBER(want_n_embd, FS_ROWS_MAX_EMBD),
        STRING(state),
        STRING(cause),
        STRING(fingerprint),
        NUMBER(n_embd, FS_ROWS_MAX_EMBD),
        STRING(device),
        NUMBER(min_tokens, FS_ROWS_MAX_TOKENS),
        NUMBER(max_tokens, FS_ROWS_MAX_TOKENS),
        NUMBER(vram_free_mb, INT32_MAX),
        NUMBER(vram_total_mb, INT32_MAX),
        {"max_picture_bytes", INT64, offsetof(struct fs_hello, max_picture_bytes), INT64_MAX},
};

/* Causes come from programs and systems: what is not UTF-8 is sent as '?'. */
static json_t *make_text(const char *s)
{
	json_t *j = json_string(s);
	char *copy;

	if (j != NULL)
		return j;
	copy = strdup(s);
	if (copy == NULL)
		return NULL;
	for (char *p = copy; *p != 0; p++)
		if ((unsigned char)*p >= 0x80)
			*p = '?';
	j = json_string(copy);
	free(copy);
	return j;
}

/* 0 and "" are left out: that is what absent means. */
static int put_member(json_t *o, const struct member *m, const uint8_t *base)
{
	const void *p = base + m->offset;
	json_t *value;
	int64_t v;

	if (m->kind == TEXT) {
		if (*(const char *)p == 0)
			return 0;
		value = make_text(p);
	} else {
		v = m->kind == INT32 ? *(const int32_t *)p : *(const int64_t *)p;
		if (v == 0)
			return 0;
		value = json_integer(v);
	}
	return json_object_set_new(o, m->name, value);
}

int fs_hello_format(const struct fs_hello *h, struct fs_buf *b)
{
	json_t *o = json_object();
	char *text = NULL;
	int err = o == NULL ? FS_ENOMEM : FS_OK;

	for (size_t i = 0; i < FS_ARRAY_LEN(members) && err == FS_OK; i++)
		if (put_member(o, &members[i], (const uint8_t *)h) != 0)
			err = FS_ENOMEM;
	if (err == FS_OK)
		text = json_dumps(o, JSON_COMPACT);
	json_decref(o);
	if (text == NULL)
		return FS_ENOMEM;
	fs_buf_clear(b);
	err = fs_buf_append_str(b, text);
	free(text);
	return err;
}

static int get_text(const json_t *value, const struct member *m, char *out, struct fs_errbuf *e)
{
	size_t n;

	if (!json_is_string(value))
		return fs_fail(e, FS_EFORMAT, "HELLO: %s is no text", m->name);
	n = json_string_length(value);
	if (n >= (size_t)m->max || memchr(json_string_value(value), 0, n) != NULL)
		return fs_fail(e, FS_EFORMAT, "HELLO: %s has more than %zu bytes or a NUL", m->name,
		        (size_t)m->max - 1);
	memcpy(out, json_string_value(value), n);
	out[n] = 0;
	for (char *p = out; *p != 0; p++)
		if ((unsigned char)*p < 0x20 || *p == 0x7f)
			*p = '?';
	return FS_OK;
}

static int get_member(const json_t *o, const struct member *m, uint8_t *base, struct fs_errbuf *e)
{
	const json_t *value = json_object_get(o, m->name);
	void *p = base + m->offset;
	json_int_t v;

	if (value == NULL)
		return FS_OK;
	if (m->kind == TEXT)
		return get_text(value, m, p, e);
	if (!json_is_integer(value))
		return fs_fail(e, FS_EFORMAT, "HELLO: %s is no whole number", m->name);
	v = json_integer_value(value);
	if (v < 0 || v > m->max)
		return fs_fail(e, FS_EFORMAT, "HELLO: %s is out of bounds", m->name);
	if (m->kind == INT32)
		*(int32_t *)p = (int32_t)v;
	else
		*(int64_t *)p = v;
	return FS_OK;
}

static bool fingerprint_ok(const char *s)
{
	return *s == 0 || (strlen(s) == 32 && strspn(s, "0123456789abcdef") == 32);
}

static int check_hello(const struct fs_hello *h, struct fs_errbuf *e)
{
	if (h->version == 0)
		return fs_fail(e, FS_EFORMAT, "HELLO without a protocol version");
	if (h->version != FS_PROTOCOL_VERSION)
		return fs_fail(e, FS_ENOTSUP,
		        "protocol version %d; this program (%s) speaks version %d: install the same release "
		        "on both machines",
		        h->version, "farsight " FS_VERSION, FS_PROTOCOL_VERSION);
	if (!fingerprint_ok(h->fingerprint) || !fingerprint_ok(h->want_fingerprint))
		return fs_fail(e, FS_EFORMAT, "HELLO: a fingerprint is not 32 hex digits");
	if (h->state[0] != 0 && strcmp(h->state, "ready") != 0 && strcmp(h->state, "starting") != 0 &&
	        strcmp(h->state, "failed") != 0)
		return fs_fail(e, FS_EFORMAT, "HELLO: unknown state %s", h->state);
	return FS_OK;
}

int fs_hello_parse(const uint8_t *json, size_t n, struct fs_hello *out, struct fs_errbuf *e)
{
	struct fs_hello h;
	json_error_t jerr;
	json_t *o = json_loadb((const char *)json, n, JSON_REJECT_DUPLICATES, &jerr);
	int err = FS_OK;

	if (o == NULL)
		return fs_fail(e, FS_EFORMAT, "HELLO: bad JSON: %s", jerr.text);
	memset(&h, 0, sizeof(h));
	if (!json_is_object(o))
		err = fs_fail(e, FS_EFORMAT, "HELLO: no JSON object");
	for (size_t i = 0; i < FS_ARRAY_LEN(members) && err == FS_OK; i++)
		err = get_member(o, &members[i], (uint8_t *)&h, e);
	json_decref(o);
	if (err == FS_OK)
		err = check_hello(&h, e);
	if (err == FS_OK)
		*out = h;
	return err;
}
