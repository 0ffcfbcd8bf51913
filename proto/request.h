/* A scoring request and its single gate.
 *
 * Every front end (HTTP, local socket, embedded) ends here: it fills a dkv_request and calls
 * dkv_request_validate(), the only place where shapes, sizes, limits and parameters are judged.
 * Behind it nobody checks again; code asserts.
 */
#ifndef DKV_PROTO_REQUEST_H
#define DKV_PROTO_REQUEST_H

#include "proto/block.h"
#include "proto/params.h"

#ifdef __cplusplus
extern "C" {
#endif

struct dkv_request {
    struct dkv_params params;       /* resolved (dkv_params_resolve) */
    const struct dkv_block *blocks; /* [n_blocks], borrowed */
    uint32_t n_blocks;
    bool want_scores;
};

/* What the gate worked out for one block; engines read this instead of the parameters' raw form. */
struct dkv_plan {
    uint32_t group;         /* g = q_heads / kv_heads */
    uint32_t index;         /* of the block in its request */
    uint32_t n_blocks;      /* of the request */
    uint32_t window;        /* w = min(window, q_rows, n_valid): rows used per query head */
    uint64_t first_row;     /* q_rows - w: the first of them */
    uint64_t n_valid;       /* n_tokens - valid_from */
    uint32_t v_dim;         /* resolved */
    uint64_t sinks;         /* protected first valid tokens; sinks + recent <= n_valid */
    uint64_t recent;        /* protected last tokens */
    uint64_t keep_tokens;   /* k, per KV head: 1..n_valid; if ragged the mean that is dealt out */
    uint64_t keep_capacity; /* indices that the answer may have: kv_heads * k unless ragged */
    uint64_t most_tokens; /* that k of a block may become, where a request's blocks share a budget:
                             n_valid, or max_keep_tokens */
    bool ragged;          /* heads or layers may keep different numbers of tokens */
    bool keep_all;        /* the answer is every valid token: score only if scores are wanted */
    bool general;         /* selection needs more than one head's scores, scores of any sign, or
                             optional tensors: not for engines that know dkv_select() alone */
    double scale;         /* of logits, resolved */
    uint64_t k_entry_limit; /* paged: an entry e of the table is in bounds for keys if e < limit */
    uint64_t v_entry_limit;
};

/* Judges the whole request: `plans_out` is [n_blocks] and is written only on success.
 *
 * Views   strides are not negative (0 repeats a row); every row that a token of the block can have
 *         lies inside `bytes`. With a page table a whole page must fit wherever an entry points,
 *         and *_entry_limit says how far that is; without one the pages are counted exactly.
 * Scales  finite and above 0, for fp8 only. Keys and values have one type; queries may differ.
 * Budget  k as docs/numerics.md has it. max_keep_tokens is a promise to the caller's buffer: it
 *         wins over protection, and over keeping whole a prompt that is no longer than the window.
 *
 * Errors  INVALID, UNSUPPORTED or TOO_LARGE, naming the field, its value and the allowed range
 *         (and the block, when there are several).
 * Pure    no I/O, no allocation, no tensor bytes read: page table entries are checked by the
 *         engine, where they are read, against *_entry_limit.
 * Thread  any.
 */
enum dkv_status dkv_request_validate(const struct dkv_request *request, struct dkv_plan *plans_out,
                                     struct dkv_error *err);

/* What a budget of one KV head comes to after protection, caps and whole chunks: for layers=fixed
 * with per_head, whose numbers the engine reads again. `plan` is the gate's. */
uint64_t dkv_plan_head_tokens(const struct dkv_block *block, const struct dkv_params *params,
                              const struct dkv_plan *plan, uint32_t head);

#ifdef __cplusplus
}
#endif
#endif
