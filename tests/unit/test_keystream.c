/* keystream: the bytes of OpenSSL's own AES-128-CTR, in pieces of all sizes; where it is used and where not.
 */
#include "server/ssh/keystream.h"

#include "common/base/base.h"

#include <openssl/evp.h>
#include <openssl/provider.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define LEN ((size_t)40000)

static void hex(const char *text, uint8_t *out)
{
	for (; *text; text += 2, out++)
		*out = (uint8_t)strtoul((char[]){text[0], text[1], 0}, NULL, 16);
}

static void noise(uint8_t *out, size_t n, uint32_t seed)
{
	for (size_t i = 0; i < n; i++)
		out[i] = (uint8_t)((seed = seed * 1664525u + 1013904223u) >> 24);
}

static const char *provider_of(const EVP_CIPHER *c)
{
	return OSSL_PROVIDER_get0_name(EVP_CIPHER_get0_provider(c));
}

/* As libssh2 begins one. */
static EVP_CIPHER_CTX *begin(struct fs_keystream *k, const uint8_t *key, const uint8_t *iv, int encrypt)
{
	OSSL_LIB_CTX *before = fs_keystream_enter(k);
	EVP_CIPHER_CTX *c = EVP_CIPHER_CTX_new();
	assert_int_equal(EVP_CipherInit(c, EVP_aes_128_ctr(), key, iv, encrypt), 1);
	fs_keystream_leave(before);
	assert_string_equal(provider_of(EVP_CIPHER_CTX_get0_cipher(c)), k ? "farsight" : "default");
	return c;
}

/* As libssh2 asks for a block. */
static void crypt_block(EVP_CIPHER_CTX *c, uint8_t *block)
{
	uint8_t out[16];
	assert_int_equal(EVP_Cipher(c, out, block, 16), 16);
	memcpy(block, out, 16);
}

/* SP 800-38A, F.5.1 and F.5.2 */
static void test_published(void **state)
{
	uint8_t key[16], iv[16], plain[64], secret[64], b[64];
	hex("2b7e151628aed2a6abf7158809cf4f3c", key);
	hex("f0f1f2f3f4f5f6f7f8f9fafbfcfdfeff", iv);
	hex("6bc1bee22e409f96e93d7e117393172aae2d8a571e03ac9c9eb76fac45af8e51"
	    "30c81c46a35ce411e5fbc1191a0a52eff69f2445df4f9b17ad2b417be66c3710",
	        plain);
	hex("874d6191b620e3261bef6864990db6ce9806f66b7970fdff8617187bb9fffdff"
	    "5ae4df3edbd5d35e5b4f09020db03eab1e031dda2fbe03d1792170a0f3009cee",
	        secret);
	struct fs_keystream *k = fs_keystream_create();
	assert_non_null(k);
	for (int encrypt = 0; encrypt < 2; encrypt++) {
		EVP_CIPHER_CTX *c = begin(k, key, iv, encrypt);
		assert_int_equal(EVP_CIPHER_CTX_get_block_size(c), 1);
		assert_int_equal(EVP_CIPHER_CTX_get_key_length(c), 16);
		assert_int_equal(EVP_CIPHER_CTX_get_iv_length(c), 16);
		assert_int_equal(EVP_CIPHER_CTX_get_mode(c), EVP_CIPH_CTR_MODE);
		memcpy(b, encrypt ? plain : secret, sizeof(b));
		for (size_t i = 0; i < sizeof(b); i += 16)
			crypt_block(c, b + i);
		assert_memory_equal(b, encrypt ? secret : plain, sizeof(b));
		EVP_CIPHER_CTX_free(c);
	}
	fs_keystream_destroy(k);
}

/* Pieces of seed-chosen lengths, most of them of 16 bytes, against the whole at once. */
static void compare(
        struct fs_keystream *k, EVP_CIPHER_CTX *c, const uint8_t *key, const uint8_t *iv, uint32_t seed)
{
	static const size_t sizes[] = {16, 16, 16, 1, 15, 17, 4095, 4096, 4097, 9000, 32, 5};
	uint8_t *in = malloc(LEN), *got = malloc(LEN), *want = malloc(LEN);
	int n = 0;
	noise(in, LEN, seed);
	EVP_CIPHER_CTX *other = begin(NULL, key, iv, 1);
	assert_int_equal(EVP_EncryptUpdate(other, want, &n, in, (int)LEN), 1);
	assert_int_equal(n, LEN);
	memcpy(got, in, LEN);
	for (size_t at = 0; at < LEN;) {
		seed = seed * 1664525u + 1013904223u;
		size_t piece = FS_MIN(sizes[(seed >> 16) % FS_ARRAY_LEN(sizes)], LEN - at);
		if (seed & 0x800) /* in place, or not */
			assert_int_equal(EVP_Cipher(c, got + at, got + at, (unsigned)piece), piece);
		else
			assert_int_equal(EVP_CipherUpdate(c, got + at, &n, in + at, (int)piece), 1);
		at += piece;
	}
	assert_memory_equal(got, want, LEN);
	assert_int_equal(EVP_CipherFinal(c, got, &n), 1);
	assert_int_equal(n, 0);
	EVP_CIPHER_CTX_free(other);
	free(in);
	free(got);
	free(want);
}

static void test_pieces(void **state)
{
	uint8_t key[16], iv[16];
	struct fs_keystream *k = fs_keystream_create();
	assert_non_null(k);
	for (uint32_t seed = 1; seed <= 20; seed++) {
		noise(key, 16, seed);
		noise(iv, 16, ~seed);
		if (seed % 4 == 0)
			memset(iv, 0xff, 16); /* the counter wraps */
		EVP_CIPHER_CTX *c = begin(k, key, iv, (int)(seed & 1));
		compare(k, c, key, iv, seed);
		EVP_CIPHER_CTX_free(c);
	}
	fs_keystream_destroy(k);
}

/* New keys within a connection, and what was made in advance with the old ones is not used. */
static void test_new_keys(void **state)
{
	uint8_t key[16] = {1}, iv[16] = {2}, block[16] = {0};
	struct fs_keystream *k = fs_keystream_create();
	EVP_CIPHER_CTX *c = begin(k, key, iv, 0), *in = begin(k, key, iv, 1);
	for (int i = 0; i < 5; i++) {
		crypt_block(c, block);
		noise(key, 16, (uint32_t)i);
		assert_int_equal(EVP_CipherInit(c, NULL, key, iv, 0), 1);
		compare(k, c, key, iv, 77);
		noise(iv, 16, (uint32_t)i + 100);
		crypt_block(c, block);
		assert_int_equal(EVP_CipherInit(c, NULL, NULL, iv, 0), 1);
		compare(k, c, key, iv, 78);
	}
	memset(key, 0, 16);
	key[0] = 1;
	memset(iv, 0, 16);
	iv[0] = 2;
	compare(k, in, key, iv, 79); /* the other direction is not touched by all that */
	EVP_CIPHER_CTX_free(c);
	EVP_CIPHER_CTX_free(in);
	fs_keystream_destroy(k);
}

static void check_default(const char *name, const char *provider)
{
	EVP_CIPHER *c = EVP_CIPHER_fetch(NULL, name, NULL);
	assert_non_null(c);
	assert_string_equal(provider_of(c), provider);
	EVP_CIPHER_free(c);
}

/* Outside of it, and beside its one cipher, all is as ever. */
static void test_confined(void **state)
{
	struct fs_keystream *k = fs_keystream_create(), *other = fs_keystream_create();
	check_default("AES-128-CTR", "default");
	OSSL_LIB_CTX *before = fs_keystream_enter(k);
	check_default("AES-128-CTR", "farsight");
	check_default("AES-256-CTR", "default");
	check_default("AES-128-GCM", "default");
	EVP_MD *md = EVP_MD_fetch(NULL, "SHA256", NULL);
	assert_non_null(md);
	EVP_MD_free(md);
	OSSL_LIB_CTX *within = fs_keystream_enter(other);
	fs_keystream_leave(within);
	check_default("AES-128-CTR", "farsight");
	fs_keystream_leave(before);
	check_default("AES-128-CTR", "default");
	assert_null(fs_keystream_enter(NULL));
	fs_keystream_leave(NULL);
	check_default("AES-128-CTR", "default");
	fs_keystream_destroy(other);
	fs_keystream_destroy(k);
	fs_keystream_destroy(NULL);
}

static void *run_connection(void *arg)
{
	uint8_t key[16], iv[16];
	uint32_t seed = *(uint32_t *)arg;
	for (int i = 0; i < 4; i++) {
		struct fs_keystream *k = fs_keystream_create();
		noise(key, 16, seed + (uint32_t)i);
		noise(iv, 16, seed - (uint32_t)i);
		EVP_CIPHER_CTX *c = begin(k, key, iv, 0), *d = begin(k, iv, key, 1);
		compare(k, c, key, iv, seed);
		compare(k, d, iv, key, seed);
		EVP_CIPHER_CTX_free(c);
		EVP_CIPHER_CTX_free(d);
		fs_keystream_destroy(k);
	}
	return NULL;
}

static void test_threads(void **state)
{
	pthread_t t[4];
	uint32_t seeds[4] = {11, 22, 33, 44};
	for (int i = 0; i < 4; i++)
		assert_int_equal(pthread_create(&t[i], NULL, run_connection, &seeds[i]), 0);
	for (int i = 0; i < 4; i++)
		pthread_join(t[i], NULL);
}

int main(void)
{
	const struct CMUnitTest tests[] = {cmocka_unit_test(test_published), cmocka_unit_test(test_pieces),
	        cmocka_unit_test(test_new_keys), cmocka_unit_test(test_confined),
	        cmocka_unit_test(test_threads)};
	return cmocka_run_group_tests(tests, NULL, NULL);
}
