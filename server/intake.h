/* The intake: from a request's header to the moment its body is complete.
 *
 * Return values are for the HTTP library: false closes the connection without a reply.
 *
 * Thread  loop only.
 */
#ifndef DKV_SERVER_INTAKE_H
#define DKV_SERVER_INTAKE_H

#include "server/exchange.h"

/* The header is complete: guard, route, token, admission, room for the body. */
bool dkv_intake_begin(struct dkv_exchange *exchange, const struct dkv_http_rules *rules,
                      const char *method, const char *path, const char *version);

/* A piece of the body. */
bool dkv_intake_receive(struct dkv_exchange *exchange, const char *bytes, size_t n_bytes);

/* The body is complete, or the exchange was resumed. */
bool dkv_intake_finish(struct dkv_exchange *exchange);

#endif
