/* A call: what the public structs ask for, copied and turned into what the gate, the engines and
 * the wire read.
 *
 *   a dropkv_request   one block for each sequence of the batch, judged by the gate
 *   a dropkv_prompt    parameters and the struct itself; the daemon, which knows the cache, judges
 *
 * A call is used again: init() keeps the memory of the one before, up to a bound.
 *
 * Owner   the call owns its copies of parameters, scales and page tables; tensors are borrowed from
 *         the caller.
 * Thread  any; no shared state.
 */
#ifndef DKV_CLIENT_CALL_H
#define DKV_CLIENT_CALL_H

#include "client/dropkv.h"
#include "proto/request.h"

/* Zero is an empty call. */
struct dkv_call {
    struct dkv_request
        request;              /* accepted by dkv_request_validate(); of a prompt: its parameters */
    struct dkv_block *blocks; /* [request.n_blocks] */
    struct dkv_plan *plans;   /* [request.n_blocks] */
    float *floats;            /* copies of head_scales and sink_logits */
    uint32_t blocks_room, floats_room;

    /* What a request and a prompt have in common; NULL buffers: none. */
    struct dkv_call_fence {
        const struct dropkv_buffer *buffer;
        size_t offset;
        uint64_t value;
    } fence;
    struct dkv_call_output {
        const struct dropkv_buffer *buffer;
        size_t offset, bytes;
    } output;

    bool is_prompt;
    struct dropkv_prompt prompt; /* without params; `table` is NULL, or the copy */
    void *table;
    size_t table_room;
};

/* Copies, converts and passes the gate. `call` is empty or was initialised before.
 *
 * Errors  INVALID for what the public struct can get wrong (a null pointer, strides that overflow,
 *         an unknown parameter), whatever the gate says, NOMEM. Then the call is of no use until it
 *         is initialised again, and may be finished.
 */
enum dkv_status dkv_call_init(struct dkv_call *call, const struct dropkv_request *request,
                              struct dkv_error *err);
enum dkv_status dkv_call_init_prompt(struct dkv_call *call, const struct dropkv_prompt *prompt,
                                     struct dkv_error *err);
void dkv_call_fini(struct dkv_call *call);

/* Makes room for the blocks and plans of a prompt, and for floats that they point to. What was
 * there is lost. False: no memory. */
bool dkv_call_reserve(struct dkv_call *call, uint32_t n_blocks, uint32_t n_floats);

/* Frees what is too large to be kept for the next init(). */
void dkv_call_trim(struct dkv_call *call);

/* A struct of the public header made by a caller that was compiled against another version: what it
 * knows is taken, the rest is zero, and what only it knows must be zero. `least` is the size of the
 * first version; `name` and `macro` ("REQUEST") are for the error. INVALID, UNSUPPORTED. */
enum dkv_status dkv_take_struct(const void *from, size_t least, void *to, size_t bytes,
                                const char *name, const char *macro, struct dkv_error *err);

#endif
