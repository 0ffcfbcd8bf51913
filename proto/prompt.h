/* A prompt: so many layers of a registered cache, and the query rows that stand in a slot of a
 * stash ring. What the daemon (server/ask.c) and an engine in the caller's process
 * (client/embedded_prompt.c) have to judge alike before there are blocks for the gate.
 */
#ifndef DKV_PROTO_PROMPT_H
#define DKV_PROTO_PROMPT_H

#include "proto/params.h"

#include <stdbool.h>
#include <stdint.h>

/* What a prompt names, and what there is of it. */
struct dkv_prompt_reach {
    uint32_t first_layer, n_layers; /* their sum does not overflow */
    uint32_t slot, newest_row, q_rows;
    uint32_t cache_layers;
    uint32_t stash_layers, stash_slots, stash_rows;
};

/* Errors: INVALID, with what is asked for and what there is. */
enum dkv_status dkv_prompt_check(const struct dkv_prompt_reach *reach, struct dkv_error *err);

/* ---- the query rows: a ring for each slot and layer ---- */

/* A stash, as its owner described it; nothing in it has been judged. Strides are in bytes. */
struct dkv_prompt_stash {
    uint64_t offset;
    int64_t layer_stride, slot_stride, row_stride, head_stride;
    uint32_t n_rows; /* of a ring */
};

/* Where those of a layer that are used lie. */
struct dkv_prompt_rows {
    uint64_t offset; /* of the oldest one, head 0; if they wrap, of row 0 */
    uint64_t first;  /* the oldest, counted from row 0 or a turn later */
    bool wraps;      /* they lie around the end of the ring */
};

/* How many are used of the q_rows that are there. A window outside its range is for the gate. */
uint32_t dkv_prompt_rows_used(int64_t window, uint32_t q_rows);

/* The newest `n_used` rows, 1..n_rows of them, up to newest_row. INVALID: strides overflow. */
enum dkv_status dkv_prompt_find_rows(const struct dkv_prompt_stash *stash, uint32_t layer,
                                     uint32_t slot, uint32_t newest_row, uint32_t n_used,
                                     struct dkv_prompt_rows *rows_out, struct dkv_error *err);

/* What is judged of rows that wrap, since the gate sees a copy of them: the whole ring lies within
 * the `bytes` of its memory. A row has row_bytes. INVALID. */
enum dkv_status dkv_prompt_check_ring(const struct dkv_prompt_stash *stash,
                                      const struct dkv_prompt_rows *rows, uint32_t q_heads,
                                      uint64_t row_bytes, uint64_t bytes, struct dkv_error *err);

/* Whether the driver can put rows in order that wrap in GPU memory, by two copies with a pitch.
 * UNSUPPORTED. */
enum dkv_status dkv_prompt_check_ring_on_gpu(const struct dkv_prompt_stash *stash, uint32_t q_heads,
                                             uint64_t row_bytes, struct dkv_error *err);

/* ---- parameters ---- */

/* What the cache says of `scale` and `logit_softcap` (0: nothing) holds unless the prompt says
 * otherwise. Resolves the parameters. */
enum dkv_status dkv_prompt_take_defaults(struct dkv_params *params, double scale,
                                         double logit_softcap, struct dkv_error *err);

#endif
