/* One block: the query window, keys and values of one (layer, sequence), as views of memory that
 * somebody else laid out.
 *
 * Every serving engine's cache is read in place through one address rule. For KV head h and stored
 * token t, in bytes:
 *
 *   addr(h, t) = base + offset + entry(t / page) * page_stride + (t % page) * token_stride
 *                     + h * head_stride
 *   entry(i)   = table[i] & mask, or i itself where there is no table
 *
 * NHD, HND, packed K|V, cross-layer, padded pages, one slot per token (page 1) and plain contiguous
 * tensors are only numbers. A layout is never inferred from a shape. The head_dim elements of one
 * row are adjacent.
 *
 * Owner   views borrow their memory; whoever fills a block keeps it alive until the answer.
 * Thread  any; plain data.
 * Errors  none here: dkv_request_validate() is the one place that judges these fields.
 */
#ifndef DKV_PROTO_BLOCK_H
#define DKV_PROTO_BLOCK_H

#include "proto/types.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A view of [heads][tokens][dim] elements. */
struct dkv_view {
    const void *base;     /* start of the memory that bounds this view */
    uint64_t bytes;       /* size of that memory: nothing outside it is ever read */
    uint64_t offset;      /* bytes from base to (entry 0, token 0, head 0) */
    int64_t page_stride;  /* bytes from one table entry's page to the next; unused without pages */
    int64_t token_stride; /* bytes from one token to the next (inside a page) */
    int64_t head_stride;  /* bytes from one head to the next */
    enum dkv_dtype dtype;
    enum dkv_place place;
    float scale;              /* element value = stored value * scale; 0 means 1; fp8 only */
    const float *head_scales; /* host, [heads], instead of `scale`; NULL if there is one scale */
};

/* A page table: entry i says where tokens i*page .. i*page+page-1 are stored. */
struct dkv_page_table {
    const void *entries; /* int32 or int64, by entry_bytes; may be unaligned; NULL: entry(i) = i */
    uint64_t n_entries;
    uint32_t entry_bytes; /* 4 or 8 */
    enum dkv_place place;
    int64_t mask;       /* applied to each entry; 0 means "all bits" */
    int64_t null_entry; /* with has_null_entry: marks a page that is not there (vLLM: 0), whether an
                           entry equals it as stored or after the mask */
    bool has_null_entry;
};

struct dkv_block {
    uint32_t q_heads;    /* Hq: query heads */
    uint32_t kv_heads;   /* Hkv: KV heads; query heads h*g .. h*g+g-1 belong to KV head h */
    uint32_t head_dim;   /* D: of queries and keys; multiple of 8, up to 512 */
    uint32_t v_dim;      /* D_v: of values; 0 means head_dim */
    uint64_t q_rows;     /* Lq: stored query rows; the last `window` of them are used */
    uint64_t n_tokens;   /* n: stored tokens, those before valid_from included */
    uint64_t valid_from; /* first token that exists (left padding, freed pages); usually 0 */

    struct dkv_view query; /* never paged; token_stride steps from row to row */
    struct dkv_view key;
    struct dkv_view value;

    uint32_t page_tokens;          /* tokens per table entry; 0: not paged */
    struct dkv_page_table table;   /* of keys, and of values unless v_table says otherwise */
    struct dkv_page_table v_table; /* used if v_table.entries is not NULL */

    const float *sink_logits; /* host, [q_heads], or NULL: one more softmax term per query head
                                 whose value is the zero vector (gpt-oss) */

    /* What some policies take beside the tensors (proto/policy.h); host, NULL if there is none. */
    const float *token_weight;    /* [kv_heads][n_tokens], >= 0: factor of a token's score */
    const float *carry_in;        /* [kv_heads][n_tokens], >= 0: scores of earlier calls */
    const float *external_scores; /* [kv_heads][n_tokens] */
    const float *value_metric; /* [q_heads][v_dim][v_dim], row-major: distances are |M (a - v)| */
};

/* A view of a dense row-major [heads][tokens][dim] tensor of `bytes` bytes at `base`. */
struct dkv_view dkv_view_dense(const void *base, uint64_t bytes, enum dkv_dtype dtype,
                               uint64_t tokens, uint64_t dim);

#ifdef __cplusplus
}
#endif
#endif
