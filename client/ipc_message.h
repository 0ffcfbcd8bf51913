/* Calls as messages of the local socket, and answers back into results.
 *
 * Thread  any; no state.
 */
#ifndef DKV_CLIENT_IPC_MESSAGE_H
#define DKV_CLIENT_IPC_MESSAGE_H

#include "client/buffer.h"
#include "client/transport.h"
#include "proto/conn.h"

/* A buffer that the daemon knows by number. */
struct dkv_ipc_region {
    const struct dropkv_buffer *buffer;
    uint32_t number; /* 0: not registered on this connection */
    uint64_t add_id; /* of the message that registers it; 0: none is under way */
    bool refused;    /* on this connection: GPU memory that the daemon does not take, and why */
    struct dkv_error why;
};

/* A request of plain blocks, ready to send. */
struct dkv_ipc_request {
    uint8_t *payload; /* DKV_WIRE_PAYLOAD_MAX bytes of room */
    size_t payload_bytes;
    void *bulk; /* from malloc: tensors that lie in no region, row by row; NULL: none */
    uint64_t bulk_bytes;
};

/* Fills payload and bulk. `timeout_us` is what is left until the deadline. NOMEM; for a tensor in
 * GPU memory that is not registered: why not. */
enum dkv_status dkv_ipc_put_request(const struct dkv_call *call,
                                    const struct dkv_ipc_region *regions, size_t n_regions,
                                    uint64_t timeout_us, struct dkv_ipc_request *request,
                                    struct dkv_error *err);

/* Judges a RESULT against the call and makes room for its numbers in the job's result, in order:
 * all indices, then all scores. MALFORMED, NOMEM. */
enum dkv_status dkv_ipc_take_result(struct dkv_job *job,
                                    const struct dkv_wire_conn_message *message,
                                    struct dkv_error *err);

#endif
