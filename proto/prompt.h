/* A prompt: so many layers of a registered cache, and the query rows that stand in a slot of a
 * stash ring. What the daemon (server/ask.c) and an engine in the caller's process
 * (client/embedded_prompt.c) have to judge alike before there are blocks for the gate.
 */
#ifndef DKV_PROTO_PROMPT_H
#define DKV_PROTO_PROMPT_H

#include "proto/params.h"

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

/* What the cache says of `scale` and `logit_softcap` (0: nothing) holds unless the prompt says
 * otherwise. Resolves the parameters. */
enum dkv_status dkv_prompt_take_defaults(struct dkv_params *params, double scale,
                                         double logit_softcap, struct dkv_error *err);

#endif
