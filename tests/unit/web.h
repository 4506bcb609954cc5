/*
 * A small web server on loopback for tests, with faults on demand: one thread that accepts, one a connection,
 * one request a connection. What a path does:
 *   /pic?N        200 with Content-Length, N bytes of web_byte()
 *   /chunked?N    the same in chunks        /close?N     the same up to the connection's end
 *   /status?S     status S and a text       /to?URL      302 with "Location: URL" as it stands
 *   /loop         302 to itself             /hop?N       302 to /hop?N-1; /hop?0 is /pic?10
 *   /short        fewer bytes than announced             /endless     chunks without end
 *   /drip         a byte every 20 ms        /silent      takes the request and says nothing
 *   /gate?N       as /pic, once web_open_gate() was called
 */
#ifndef FS_TEST_WEB_H
#define FS_TEST_WEB_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct web;

struct web *web_start(bool tls); /* tls: with a certificate that nobody signed */
void web_stop(struct web *w);    /* ends its connections first */
int web_port(const struct web *w);
uint8_t web_byte(size_t i);

int web_accepted(struct web *w);     /* connections so far */
int web_left(struct web *w);         /* connections that clients closed before their answer's end */
int web_waiting(struct web *w);      /* requests that are being answered now */
int web_most_waiting(struct web *w); /* the most there were at once */
void web_open_gate(struct web *w);
/* The head of the last request. */
void web_last_request(struct web *w, char *out, size_t cap);

#endif
