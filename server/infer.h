/* Inference: from a received body to a job and back to a reply.
 *
 * Thread  loop only.
 */
#ifndef DKV_SERVER_INFER_H
#define DKV_SERVER_INFER_H

#include "server/exchange.h"

/* Called when the header has been accepted: may the request come in at all? NOT_FOUND for another
 * model or version, DRAINING or BUSY. */
enum dkv_status dkv_infer_admit(struct dkv_exchange *exchange, struct dkv_error *err);

/* Whose share of device and memory it uses: the holder of a token, over all its connections, or the
 * connection. NULL if out of memory. */
struct dkv_backend_client *dkv_infer_client(struct dkv_exchange *exchange);

/* The HTTP status of a refusal; 429 where what was charged last was the client's own share. */
unsigned dkv_infer_http_status(const struct dkv_exchange *exchange, enum dkv_status status);

/* Called as the body arrives: reads the JSON part once it is complete, so that a bad request costs
 * no transfer. */
enum dkv_status dkv_infer_progress(struct dkv_exchange *exchange, struct dkv_error *err);

/* Called again after the connection was resumed: the job has ended. */
void dkv_infer_finish(struct dkv_exchange *exchange);

/* The peer went away while its job was with the backend. */
void dkv_infer_gone(struct dkv_exchange *exchange);

/* Counts a request that was refused. */
void dkv_infer_count_refusal(struct dkv_exchange *exchange, const struct dkv_error *err);

/* Counts one whose caller went away. */
void dkv_infer_count_gone(struct dkv_exchange *exchange);

/* Frees what the exchange holds of its request. */
void dkv_infer_release(struct dkv_exchange *exchange);

/* The exchange no longer counts as accepted: its reply has left, or nobody waits for one. */
void dkv_infer_leave(struct dkv_exchange *exchange);

#endif
