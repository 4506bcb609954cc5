/*
 * keystream: AES-128-CTR that is fast in small pieces, for libssh2, which has each block of 16 bytes
 * decrypted by a call of its own: OpenSSL's way down to one block costs several times the block itself. In
 * CTR mode the stream of key bytes does not depend on the data; so it is made in advance, a few KiB at a
 * time, and such a call has but to combine 16 bytes with it.
 *
 * What makes it is OpenSSL's own AES-128-CTR, over zeros: no cipher is implemented here. It is an OpenSSL
 * provider, the library's interface for other implementations, within a library context of one connection:
 * other connections and other users of OpenSSL in this process see nothing of it. Where it is not possible,
 * libssh2 does with what it finds.
 *
 * Owned by the thread of the connection.
 */
#ifndef FS_SERVER_SSH_KEYSTREAM_H
#define FS_SERVER_SSH_KEYSTREAM_H

#include <openssl/types.h>

struct fs_keystream;

/* NULL: not here, since memory is out or OpenSSL is to do nothing but what FIPS 140 has approved. */
struct fs_keystream *fs_keystream_create(void);
/* Only when the last cipher of it is gone; NULL is fine. */
void fs_keystream_destroy(struct fs_keystream *k);
/* Between the two, what this thread asks of OpenSSL without naming a context is done in that of k. Ciphers
 * that were begun there stay what they are. k may be NULL: nothing changes. */
OSSL_LIB_CTX *fs_keystream_enter(struct fs_keystream *k);
void fs_keystream_leave(OSSL_LIB_CTX *before);

#endif
