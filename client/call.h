/* A call: a dropkv_request turned into what the gate and the engines read, one block for each
 * sequence of the batch.
 *
 * Owner   the call owns its copies of parameters and scales; tensors are borrowed from the caller.
 * Thread  any; no shared state.
 */
#ifndef DKV_CLIENT_CALL_H
#define DKV_CLIENT_CALL_H

#include "client/dropkv.h"
#include "proto/request.h"

/* Zero is an empty call. */
struct dkv_call {
    struct dkv_request request; /* accepted by dkv_request_validate() */
    struct dkv_block *blocks;   /* [request.n_blocks] */
    struct dkv_plan *plans;     /* [request.n_blocks] */
    float *floats;              /* copies of head_scales and sink_logits */
};

/* Copies, converts and passes the gate.
 *
 * Errors  INVALID for what the public struct can get wrong (a null pointer, strides that overflow,
 *         an unknown parameter), whatever the gate says, NOMEM. *call_out is written only on
 *         success.
 */
enum dkv_status dkv_call_init(struct dkv_call *call_out, const struct dropkv_request *request,
                              struct dkv_error *err);
void dkv_call_fini(struct dkv_call *call);

#endif
