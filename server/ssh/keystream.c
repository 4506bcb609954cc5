/* See keystream.h. The provider has one cipher; its state is the stream and the cipher that makes more of it.
 */
#include "server/ssh/keystream.h"

#include "common/base/base.h"

#include <openssl/core_dispatch.h>
#include <openssl/core_names.h>
#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/provider.h>
#include <stdlib.h>
#include <string.h>

#define CIPHER "AES-128-CTR"
#define NAME "farsight"
#define BLOCK 16
#define STREAM 4096 /* made at once: the way down costs little then, and it stays in the fastest cache */

struct fs_keystream {
	OSSL_LIB_CTX *ctx;
	OSSL_PROVIDER *base, *ours;
};

struct ctr {
	EVP_CIPHER_CTX *maker;
	size_t left; /* the last bytes of stream that are not used yet */
	uint8_t stream[STREAM];
};

/* ---- the cipher; 1 is success, as in all of OpenSSL ---- */

static void ctr_free(void *ctr)
{
	struct ctr *c = ctr;
	if (!c)
		return;
	EVP_CIPHER_CTX_free(c->maker);
	OPENSSL_cleanse(c, sizeof(*c));
	free(c);
}

static void *ctr_new(void *library)
{
	struct ctr *c = calloc(1, sizeof(*c));
	EVP_CIPHER *base = EVP_CIPHER_fetch(library, CIPHER, "provider=default");
	if (c)
		c->maker = EVP_CIPHER_CTX_new();
	if (!c || !base || !c->maker || !EVP_EncryptInit_ex2(c->maker, base, NULL, NULL, NULL)) {
		ctr_free(c);
		c = NULL;
	}
	EVP_CIPHER_free(base);
	return c;
}

static int ctr_init(void *ctr, const unsigned char *key, size_t n_key, const unsigned char *iv, size_t n_iv,
        const OSSL_PARAM params[])
{
	struct ctr *c = ctr;
	if ((key && n_key != BLOCK) || (iv && n_iv != BLOCK))
		return 0;
	c->left = 0;
	return EVP_EncryptInit_ex2(c->maker, NULL, key, iv, params);
}

static int refill(struct ctr *c)
{
	static const uint8_t zeros[STREAM];
	int n = 0;
	if (!EVP_EncryptUpdate(c->maker, c->stream, &n, zeros, STREAM) || n != STREAM)
		return 0;
	c->left = STREAM;
	return 1;
}

/* A block at any address. */
typedef uint64_t block __attribute__((vector_size(BLOCK), aligned(1), may_alias));

/* Kept apart, since each block would pay for the registers that it needs. */
__attribute__((noinline)) static int update_any(
        struct ctr *c, unsigned char *out, const unsigned char *in, size_t n)
{
	for (size_t at = 0; at < n; c->left--, at++) {
		if (!c->left && !refill(c))
			return 0;
		out[at] = in[at] ^ c->stream[STREAM - c->left];
	}
	return 1;
}

/* Encrypts and decrypts; in and out may be the same. */
static int ctr_update(
        void *ctr, unsigned char *out, size_t *n_out, size_t cap, const unsigned char *in, size_t n)
{
	struct ctr *c = ctr;
	if (cap < n)
		return 0;
	*n_out = n;
	if (n != BLOCK || c->left < BLOCK)
		return update_any(c, out, in, n);
	const uint8_t *key = c->stream + STREAM - c->left;
	*(block *)out = *(const block *)in ^ *(const block *)key;
	c->left -= BLOCK;
	return 1;
}

static int ctr_final(void *ctr, unsigned char *out, size_t *n_out, size_t cap)
{
	*n_out = 0;
	return 1;
}

static int ctr_facts(OSSL_PARAM params[])
{
	static const struct {
		const char *name;
		size_t value;
	} facts[] = {{OSSL_CIPHER_PARAM_BLOCK_SIZE, 1}, {OSSL_CIPHER_PARAM_KEYLEN, BLOCK},
	        {OSSL_CIPHER_PARAM_IVLEN, BLOCK}};
	OSSL_PARAM *p;
	for (size_t i = 0; i < FS_ARRAY_LEN(facts); i++)
		if ((p = OSSL_PARAM_locate(params, facts[i].name)) &&
		        !OSSL_PARAM_set_size_t(p, facts[i].value))
			return 0;
	p = OSSL_PARAM_locate(params, OSSL_CIPHER_PARAM_MODE);
	return !p || OSSL_PARAM_set_uint(p, EVP_CIPH_CTR_MODE);
}

static int ctr_facts_now(void *ctr, OSSL_PARAM params[])
{
	return ctr_facts(params);
}

/* ---- the provider ---- */

#define FUNCTION(f) ((void (*)(void))(f))

static const OSSL_ALGORITHM *offers(void *library, int operation, int *no_cache)
{
	static const OSSL_DISPATCH functions[] = {{OSSL_FUNC_CIPHER_NEWCTX, FUNCTION(ctr_new)},
	        {OSSL_FUNC_CIPHER_FREECTX, FUNCTION(ctr_free)},
	        {OSSL_FUNC_CIPHER_ENCRYPT_INIT, FUNCTION(ctr_init)},
	        {OSSL_FUNC_CIPHER_DECRYPT_INIT, FUNCTION(ctr_init)},
	        {OSSL_FUNC_CIPHER_UPDATE, FUNCTION(ctr_update)},
	        {OSSL_FUNC_CIPHER_FINAL, FUNCTION(ctr_final)},
	        {OSSL_FUNC_CIPHER_CIPHER, FUNCTION(ctr_update)},
	        {OSSL_FUNC_CIPHER_GET_PARAMS, FUNCTION(ctr_facts)},
	        {OSSL_FUNC_CIPHER_GET_CTX_PARAMS, FUNCTION(ctr_facts_now)}, {0, NULL}};
	/* No other key lengths: OpenSSL's own generator of random numbers is built on AES-256-CTR. */
	static const OSSL_ALGORITHM ciphers[] = {{CIPHER, "provider=" NAME, functions, NULL}, {0}};
	*no_cache = 0;
	return operation == OSSL_OP_CIPHER ? ciphers : NULL;
}

static int start(
        const OSSL_CORE_HANDLE *core, const OSSL_DISPATCH *in, const OSSL_DISPATCH **out, void **library)
{
	static const OSSL_DISPATCH functions[] = {
	        {OSSL_FUNC_PROVIDER_QUERY_OPERATION, FUNCTION(offers)}, {0, NULL}};
	for (; in->function_id; in++)
		if (in->function_id == OSSL_FUNC_CORE_GET_LIBCTX)
			*library = OSSL_FUNC_core_get_libctx(in)(core);
	*out = functions;
	return *library != NULL;
}

struct fs_keystream *fs_keystream_create(void)
{
	struct fs_keystream *k = EVP_default_properties_is_fips_enabled(NULL) ? NULL : calloc(1, sizeof(*k));
	if (!k)
		return NULL;
	k->ctx = OSSL_LIB_CTX_new();
	if (k->ctx && OSSL_PROVIDER_add_builtin(k->ctx, NAME, start)) {
		k->base = OSSL_PROVIDER_load(k->ctx, "default");
		k->ours = OSSL_PROVIDER_load(k->ctx, NAME);
	}
	/* "?": what we do not have is taken from the other */
	if (k->base && k->ours && EVP_set_default_properties(k->ctx, "?provider=" NAME))
		return k;
	fs_keystream_destroy(k);
	return NULL;
}

void fs_keystream_destroy(struct fs_keystream *k)
{
	if (!k)
		return;
	if (k->ours)
		OSSL_PROVIDER_unload(k->ours);
	if (k->base)
		OSSL_PROVIDER_unload(k->base);
	OSSL_LIB_CTX_free(k->ctx);
	free(k);
}

OSSL_LIB_CTX *fs_keystream_enter(struct fs_keystream *k)
{
	return k ? OSSL_LIB_CTX_set0_default(k->ctx) : NULL;
}

void fs_keystream_leave(OSSL_LIB_CTX *before)
{
	if (before)
		OSSL_LIB_CTX_set0_default(before);
}
