/* known_hosts: keys, fingerprints and hashed names below were made by ssh-keygen, so the expectations are
 * OpenSSH's. */
#include "server/ssh/internal.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define A64 "AAAAC3NzaC1lZDI1NTE5AAAAILOAT5TOAUPgvJj0MQDZVgW1IztJhTUddKtwVF+Lw3+E"
#define B64 "AAAAC3NzaC1lZDI1NTE5AAAAIDSKtky9jiuIVwppLisGNSS8zW+u56pU6DimxwfiFpfT"
#define C64                                                                                                  \
	"AAAAE2VjZHNhLXNoYTItbmlzdHAyNTYAAAAIbmlzdHAyNTYAAABBBPX3F6DoORBG5smZ7sp5ao2IhEPny1uCdkeEalyy2AxxY8" \
	"vunKk7"                                                                                             \
	"YON1cxQ4hQ8vYtvcjtFKu1DCz+S32DkE3hQ="
#define A "ssh-ed25519 " A64
#define B "ssh-ed25519 " B64
#define C "ecdsa-sha2-nistp256 " C64

static struct {
	uint8_t *blob;
	size_t n;
} a, b, c;

/* The verdict on key `blob` for box:port under this text; *bad (may be NULL) gets the lines that do not
 * parse. */
static enum fs_kh_verdict check(int port, const char *text, const uint8_t *blob, size_t n, size_t *bad)
{
	struct fs_known_hosts *k = NULL;
	struct fs_errbuf e;
	assert_int_equal(fs_kh_parse("Box", port, false, text, strlen(text), &k, &e), FS_OK);
	enum fs_kh_verdict v = fs_kh_check(k, blob, n, NULL, 0);
	if (bad)
		*bad = fs_kh_bad_lines(k);
	fs_kh_free(k);
	return v;
}
#define CHECK(port, text, key) check(port, text, (key).blob, (key).n, NULL)

static void plain_lines(void **state)
{
	assert_int_equal(CHECK(22, "box " A "\n", a), FS_KH_MATCH);
	assert_int_equal(CHECK(22, "other,BOX " A, a), FS_KH_MATCH);
	assert_int_equal(CHECK(22, "boxes " A "\n", a), FS_KH_UNKNOWN);
	assert_int_equal(CHECK(22, "box " A "\n", b), FS_KH_CHANGED);
	assert_int_equal(CHECK(22, "box " A "\n", c), FS_KH_OTHER_TYPE);
	assert_int_equal(CHECK(22, "box " B "\nbox " A " comment here\n", a), FS_KH_MATCH);
	assert_int_equal(CHECK(22, "", a), FS_KH_UNKNOWN);
}

static void ports(void **state)
{
	assert_int_equal(CHECK(2222, "[box]:2222 " A "\n", a), FS_KH_MATCH);
	assert_int_equal(CHECK(2222, "[box]:22 " A "\n", a), FS_KH_UNKNOWN);
	assert_int_equal(CHECK(22, "[box]:2222 " A "\n", a), FS_KH_UNKNOWN);
	/* as OpenSSH: the bare name vouches for another port too, but a different key there is no alarm */
	assert_int_equal(CHECK(2222, "box " A "\n", a), FS_KH_MATCH);
	assert_int_equal(CHECK(2222, "box " B "\n", a), FS_KH_UNKNOWN);
	assert_int_equal(CHECK(2222, "box " A "\n[box]:2222 " B "\n", b), FS_KH_MATCH);
}

static void hashed_names(void **state)
{
	static const char text[] = "|1|6xPov4DIInhNj95BFNz6IFRI7Ls=|L/iniX2ud47BQa+V7A/lqmlDIKU= " A "\n";
	static const char with_port[] =
	        "|1|BOu1VA34OidZE8Ag16aeTeF/IJM=|uDxi+EQePBQbSp0A1CjDdYdIdrQ= " A "\n";
	assert_int_equal(CHECK(22, text, a), FS_KH_MATCH);
	assert_int_equal(CHECK(22, text, b), FS_KH_CHANGED);
	assert_int_equal(CHECK(2222, with_port, a), FS_KH_MATCH);
	assert_int_equal(CHECK(2223, with_port, a), FS_KH_UNKNOWN);
	assert_int_equal(
	        CHECK(22, "|1|!!|L/iniX2ud47BQa+V7A/lqmlDIKU= " A "\n|1|nothing " A "\n", a), FS_KH_UNKNOWN);
}

static void patterns_and_negation(void **state)
{
	assert_int_equal(CHECK(22, "b?x,*.lan " A "\n", a), FS_KH_MATCH);
	assert_int_equal(CHECK(22, "*,!box " A "\n", a), FS_KH_UNKNOWN);
	assert_int_equal(CHECK(2222, "[*]:2222 " A "\n", a), FS_KH_MATCH);
}

static void markers(void **state)
{
	assert_int_equal(CHECK(22, "box " A "\n@revoked * " A "\n", a), FS_KH_REVOKED);
	assert_int_equal(CHECK(22, "@revoked * " A "\nbox " A "\n", a), FS_KH_REVOKED);
	assert_int_equal(CHECK(22, "@revoked other " A "\nbox " A "\n", a), FS_KH_MATCH);
	assert_int_equal(CHECK(22, "@revoked * " B "\nbox " A "\n", a), FS_KH_MATCH);
	assert_int_equal(CHECK(22,
	                         "@revoked |1|6xPov4DIInhNj95BFNz6IFRI7Ls=|L/iniX2ud47BQa+V7A/lqmlDIKU= " A
	                         "\nbox " A "\n",
	                         a),
	        FS_KH_REVOKED);
	assert_int_equal(CHECK(22, "@cert-authority * " A "\n", a), FS_KH_ONLY_CA);
	assert_int_equal(CHECK(22, "@cert-authority * " B "\nbox " A "\n", a), FS_KH_MATCH);
}

static void damaged_files(void **state)
{
	size_t bad;
	assert_int_equal(check(22, "# c\r\n\r\nbox " A "\r\n", a.blob, a.n, &bad), FS_KH_MATCH);
	assert_int_equal(bad, 0);
	assert_int_equal(
	        check(22, "garbage\n@new box " A "\nbox ssh-rsa " A64 "\nbox ssh-ed25519 ####\nbox " A,
	                a.blob, a.n, &bad),
	        FS_KH_MATCH);
	assert_int_equal(bad, 4);
	/* a line longer than any key */
	size_t n = 100000;
	char *text = malloc(n + 200);
	memset(text, 'x', n);
	snprintf(text + n, 200, "\nbox %s\n", A);
	assert_int_equal(check(22, text, a.blob, a.n, &bad), FS_KH_MATCH);
	assert_int_equal(bad, 1);
	free(text);
}

static void known_types_are_negotiated_first(void **state)
{
	struct fs_known_hosts *k = NULL;
	struct fs_errbuf e;
	char pref[256];
	const char *text = "box " C "\n@revoked box " A "\n";
	assert_int_equal(fs_kh_parse("box", 22, false, text, strlen(text), &k, &e), FS_OK);
	fs_kh_method_pref(k, pref, sizeof(pref));
	assert_int_equal(strncmp(pref, "ecdsa-sha2-nistp256,ssh-ed25519,", 32), 0);
	assert_null(strstr(pref + 1, "ecdsa-sha2-nistp256"));
	assert_null(strstr(pref, "ssh-rsa")); /* signs with SHA-1 */
	assert_int_equal(fs_kh_count(k), 2);
	fs_kh_free(k);
}

static void an_alias_has_no_port(void **state)
{
	struct fs_known_hosts *k = NULL;
	struct fs_errbuf e;
	const char *text = "eyes " A "\n";
	assert_int_equal(fs_kh_parse("eyes", 2222, true, text, strlen(text), &k, &e), FS_OK);
	assert_int_equal(fs_kh_check(k, a.blob, a.n, NULL, 0), FS_KH_MATCH);
	assert_int_equal(fs_kh_check(k, b.blob, b.n, NULL, 0), FS_KH_CHANGED);
	fs_kh_free(k);
}

static void fingerprints_are_ssh_keygen_s(void **state)
{
	char print[64];
	fs_ssh_fingerprint(a.blob, a.n, print);
	assert_string_equal(print, "SHA256:YegcR4RNwVdW7tXAoj7PNauqy7fd5zp+iNDMurd15uQ");
	fs_ssh_fingerprint(c.blob, c.n, print);
	assert_string_equal(print, "SHA256:cL5Gi8Ljge9m7ZC7S/hsjvuxKv3QlTQSUi3xfGZceJA");
}

static void base64_is_strict(void **state)
{
	size_t n;
	static const char *const wrong[] = {"", "A", "AAA", "AA=A", "====", "AAAA====", "AA\nA", "AAA-"};
	for (size_t i = 0; i < FS_ARRAY_LEN(wrong); i++) {
		uint8_t *p = fs_ssh_base64(wrong[i], strlen(wrong[i]), &n);
		if (p)
			fail_msg("\"%s\" was taken", wrong[i]);
	}
	uint8_t *p = fs_ssh_base64("aGVsbG8=", 8, &n); /* RFC 4648 */
	assert_non_null(p);
	assert_int_equal(n, 5);
	assert_memory_equal(p, "hello", 5);
	free(p);
}

static int setup(void **state)
{
	a.blob = fs_ssh_base64(A64, strlen(A64), &a.n);
	b.blob = fs_ssh_base64(B64, strlen(B64), &b.n);
	c.blob = fs_ssh_base64(C64, strlen(C64), &c.n);
	return !a.blob || !b.blob || !c.blob;
}

static int teardown(void **state)
{
	free(a.blob);
	free(b.blob);
	free(c.blob);
	return 0;
}

int main(void)
{
	const struct CMUnitTest tests[] = {
	        cmocka_unit_test(plain_lines),
	        cmocka_unit_test(ports),
	        cmocka_unit_test(hashed_names),
	        cmocka_unit_test(patterns_and_negation),
	        cmocka_unit_test(markers),
	        cmocka_unit_test(damaged_files),
	        cmocka_unit_test(known_types_are_negotiated_first),
	        cmocka_unit_test(an_alias_has_no_port),
	        cmocka_unit_test(fingerprints_are_ssh_keygen_s),
	        cmocka_unit_test(base64_is_strict),
	};
	return cmocka_run_group_tests(tests, setup, teardown);
}
