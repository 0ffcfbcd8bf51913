/* The HTTP front: libmicrohttpd on the loop.
 *
 * The library runs in external-epoll mode: its epoll descriptor is polled by the loop and its work
 * is done in MHD_run() on the loop thread, so handlers need no locks.
 *
 * Owner   open/close.
 * Thread  loop only.
 * Errors  open: INVALID for an address, IO if it cannot listen.
 */
#ifndef DKV_SERVER_HTTP_H
#define DKV_SERVER_HTTP_H

#include "server/server.h"

struct dkv_exchange;

/* Listens on config->http, or on the socket that the service manager handed over. */
enum dkv_status dkv_http_open(struct dkv_server *server, struct dkv_error *err);

/* The port in use. */
unsigned dkv_http_port(const struct dkv_http *http);

/* Closes connections that wait for a next request; the others get Connection: close with their
 * reply. */
void dkv_http_drain(struct dkv_http *http);

/* Every reply has been sent. */
bool dkv_http_is_quiet(const struct dkv_http *http);

/* Answers or drops what is suspended and closes every connection. The backend has been closed; the
 * loop must be run until its handles are closed. */
void dkv_http_close(struct dkv_http *http);

/* Takes the server's limits, which have changed. */
void dkv_http_relimit(struct dkv_http *http);

/* Takes the exchange's connection out of the library's hands while its job is with the backend, and
 * puts it back. */
void dkv_http_suspend(struct dkv_exchange *exchange);
void dkv_http_resume(struct dkv_exchange *exchange);

#endif
