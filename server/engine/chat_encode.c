/* chat_encode: the rendered pieces to token ids; see chat.h. Control tokens come out of trusted pieces only.
 */
#include "server/engine/chat.h"

#include <stdlib.h>
#include <string.h>

#include "server/engine/chat_family.h"

/* The text between two pictures. */
static int encode_run(const struct fs_chat *c, const struct fs_chat_text *r, const struct fs_chat_seg *segs,
        size_t n, struct fs_ids *ids, struct fs_errbuf *e)
{
	struct fs_tok_span *spans;
	size_t i;
	int rc;

	if (n == 0)
		return FS_OK;
	spans = calloc(n, sizeof(*spans));
	if (spans == NULL)
		return fs_fail(e, FS_ENOMEM, "messages: out of memory");
	for (i = 0; i < n; i++)
		spans[i] = (struct fs_tok_span){(const char *)r->text.data + segs[i].off, segs[i].len,
		        segs[i].kind == FS_CHAT_LITERAL};
	rc = fs_tok_encode_spans(c->tok, spans, n, ids, e);
	free(spans);
	return rc;
}

/* The tokenizer's wish for a BOS, unless the template has put one. */
static int lead_bos(const struct fs_chat *c, const struct fs_chat_text *r, struct fs_ids *ids)
{
	const struct fs_tok_info *in = fs_tok_info(c->tok);
	size_t len;
	const char *bos = fs_tok_text(c->tok, in->bos, &len);

	if (!in->add_bos || bos == NULL)
		return FS_OK;
	if (r->n_segs > 0 && r->segs[0].kind == FS_CHAT_LITERAL && r->segs[0].len >= len &&
	        memcmp(r->text.data, bos, len) == 0)
		return FS_OK;
	return fs_ids_append(ids, in->bos);
}

static int encode_text(
        const struct fs_chat *c, const struct fs_chat_text *r, struct fs_ids *ids, struct fs_errbuf *e)
{
	size_t i, from = 0;
	int rc;

	if ((rc = lead_bos(c, r, ids)) != FS_OK)
		return fs_fail(e, rc, "messages: too long");
	for (i = 0; i < r->n_segs; i++) {
		if (r->segs[i].kind != FS_CHAT_PICTURE)
			continue;
		if ((rc = encode_run(c, r, r->segs + from, i - from, ids, e)) != FS_OK)
			return rc;
		if ((rc = fs_ids_append(ids, -1)) != FS_OK)
			return fs_fail(e, rc, "messages: too long");
		from = i + 1;
	}
	return encode_run(c, r, r->segs + from, r->n_segs - from, ids, e);
}

int fs_chat_encode(const struct fs_chat *c, const struct fs_message *msgs, size_t n,
        const struct fs_chat_extras *x, struct fs_ids *ids, struct fs_buf *opening, struct fs_errbuf *e)
{
	size_t before = ids->len;
	struct fs_chat_text r;
	int rc;

	fs_chat_text_init(&r);
	rc = fs_chat_render(c, msgs, n, x, &r, e);
	if (rc == FS_OK)
		rc = encode_text(c, &r, ids, e);
	if (rc == FS_OK && opening != NULL && r.opening < r.text.len &&
	        (rc = fs_buf_append(opening, r.text.data + r.opening, r.text.len - r.opening)) != FS_OK)
		fs_fail(e, rc, "tools: too long");
	if (rc != FS_OK)
		ids->len = before;
	fs_chat_text_finish(&r);
	return rc;
}
