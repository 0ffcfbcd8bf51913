/* libdropkv: caches that are registered once, and requests for prompts in them. Part of dropkv.h.
 */
#ifndef DROPKV_CACHE_H
#define DROPKV_CACHE_H

#include "base.h"
#include "buffer.h"
#include "client.h"
#include "request.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- caches that are registered once ----
 *
 * An engine's cache does not move: tell its layout once, and a message of about 150 bytes asks for
 * all layers of a prompt. Over unix:/// and embedded; elsewhere these calls are UNSUPPORTED.
 *
 *     dropkv_client_add_buffer(client, kv, &error);               the cache's memory
 *     dropkv_client_add_buffer(client, rows, &error);             the query rows'
 *     struct dropkv_cache_layout layout = DROPKV_CACHE_LAYOUT_INIT;
 *     ...geometry, and where each layer's keys and values lie...
 *     dropkv_cache_add(client, &layout, &cache, &error);
 *     dropkv_stash_add(client, &stash_layout, &stash, &error);
 *     for each prompt:
 *         struct dropkv_prompt prompt = DROPKV_PROMPT_INIT;
 *         prompt.cache = cache, prompt.stash = stash, prompt.n_tokens = n, ...
 *         dropkv_score_prompt(client, &prompt, &result, &error);
 *
 * Caches and stashes belong to their client, which registers them with the daemon, and again
 * whenever it has to connect again; a daemon's refusal is the answer of every prompt that names
 * them. client/examples/prompts.c is a whole program.
 */

/* Where the keys, or the values, of one layer lie in a buffer: head h of token t at
 *     offset + entry(t / page_tokens) * page_stride + (t % page_tokens) * token_stride
 *            + h * head_stride
 * in bytes, with entry() of the prompt's page table. A cache without pages has page_tokens 0, and
 * token t lies at offset + t * token_stride + h * head_stride. The buffer was added to the client
 * and is borrowed until the cache is removed. This struct never changes. */
struct dropkv_view {
    const struct dropkv_buffer *buffer;
    size_t offset;
    enum dropkv_dtype dtype;
    float scale; /* element value = stored * scale; fp8 only; 0 means 1 */
    int64_t page_stride;
    int64_t token_stride;
    int64_t head_stride;
};

/* This struct never changes. */
struct dropkv_layer {
    struct dropkv_view key;
    struct dropkv_view value;
};

struct dropkv_cache_layout {
    size_t struct_size;
    uint32_t q_heads; /* of every layer; a multiple of kv_heads */
    uint32_t kv_heads;
    uint32_t head_dim;
    uint32_t v_dim;                    /* of values; 0: head_dim */
    uint32_t page_tokens;              /* tokens per entry of a page table; 0: no pages */
    uint32_t n_layers;                 /* 1..1024 */
    const struct dropkv_layer *layers; /* [n_layers]; copied */
    const float *head_scales; /* [n_layers][key, value][kv_heads], instead of the views' scales;
                                 NULL: those; copied */
    const float *sink_logits; /* [n_layers][q_heads]: learned sink logits; NULL: none; copied */
    double scale;             /* of logits; 0: 1 / sqrt(head_dim) */
    double logit_softcap;     /* 0: none */
};

/* A ring of query rows that the producer writes while it prefills: row r of head h of a slot's
 * ring, for one layer, lies in the buffer at offset + layer * layer_stride + slot * slot_stride + r
 * * row_stride + h * head_stride bytes. A slot serves one sequence at a time. */
struct dropkv_stash_layout {
    size_t struct_size;
    const struct dropkv_buffer *buffer; /* as in dropkv_view */
    size_t offset;
    enum dropkv_dtype dtype; /* BF16, FP16 or FP32 */
    uint32_t n_layers;       /* 1..1024 */
    uint32_t n_slots;
    uint32_t n_rows; /* of a slot's ring: at least the window */
    int64_t layer_stride;
    int64_t slot_stride;
    int64_t row_stride;
    int64_t head_stride;
};

struct dropkv_cache;
struct dropkv_stash;

/* Nothing is waited for. *cache_out, *stash_out: the client's, valid until removed or the client is
 * closed; written only on success. INVALID names the field; UNSUPPORTED; NOMEM. */
DROPKV_API enum dropkv_status dropkv_cache_add(struct dropkv_client *client,
                                               const struct dropkv_cache_layout *layout,
                                               struct dropkv_cache **cache_out,
                                               struct dropkv_error *error);
DROPKV_API enum dropkv_status dropkv_stash_add(struct dropkv_client *client,
                                               const struct dropkv_stash_layout *layout,
                                               struct dropkv_stash **stash_out,
                                               struct dropkv_error *error);

/* Prompts that the daemon has are still answered; others that name it end with NOT_FOUND. NULL is
 * fine. INVALID: it is another client's, and stays. */
DROPKV_API enum dropkv_status dropkv_cache_remove(struct dropkv_client *client,
                                                  struct dropkv_cache *cache);
DROPKV_API enum dropkv_status dropkv_stash_remove(struct dropkv_client *client,
                                                  struct dropkv_stash *stash);

/* A request for layers of a registered cache. */
struct dropkv_prompt {
    size_t struct_size;
    struct dropkv_cache *cache;
    struct dropkv_stash *stash;
    uint32_t first_layer;
    uint32_t n_layers; /* 0: all from first_layer on */

    uint32_t n_tokens;   /* stored tokens of the sequence */
    uint32_t valid_from; /* the first that exists; answers count stored positions all the same */
    uint32_t slot;       /* of the stash */
    uint32_t newest_row; /* of the slot's ring: the query of token n_tokens - 1 */
    uint32_t q_rows;     /* rows that are there, the newest included; the last `window` are used */

    /* The page table of a paged cache: table_entries int32 or int64 numbers, inline (`table`,
     * copied) or in a buffer. NULL both: page i of the sequence is page i of the view. */
    const void *table;
    const struct dropkv_buffer *table_buffer;
    size_t table_offset; /* in the buffer */
    uint32_t table_entries;
    uint32_t table_entry_bytes; /* 4 or 8 */
    uint64_t table_mask;        /* applied to each entry; 0: all bits */
    int64_t null_entry;         /* of a page that is not there, */
    int has_null_entry;         /* if this is not 0 */

    /* Nothing is read before the 8-byte number at fence_offset of the buffer, host byte order and a
     * multiple of 8, is fence_value or more (unsigned). The producer writes it after the data, by a
     * store or from its stream; the daemon looks, until the deadline. NULL: read at once. */
    const struct dropkv_buffer *fence;
    size_t fence_offset;
    uint64_t fence_value;

    /* Where the answer goes: room for keep_indices, then scores if wanted, at a multiple of 4 of a
     * buffer that was given to dropkv_client_add_output(). The result's arrays point there, until
     * something else is written there. After a cancel or TIMEOUT it may still be written until
     * dropkv_client_detach_buffer() has returned. NULL: into memory of the result's own. */
    const struct dropkv_buffer *output;
    size_t output_offset;
    size_t output_bytes;

    const struct dropkv_param *params; /* as in dropkv_request; copied */
    size_t n_params;
    int want_scores;
    int64_t timeout_us;
    void *user;

    /* As in dropkv_request, for each of the n_layers; sent, also with a fence. NULL: none. */
    const float *token_weight;    /* [n_layers][kv_heads][n_tokens] */
    const float *carry_in;        /* [n_layers][kv_heads][n_tokens] */
    const float *external_scores; /* [n_layers][kv_heads][n_tokens] */
    const float *value_metric;    /* [n_layers][q_heads][v_dim][v_dim] */
};

/* clang-format off */
#ifdef __cplusplus
#define DROPKV_CACHE_LAYOUT_INIT dropkv_cache_layout_make()
#define DROPKV_STASH_LAYOUT_INIT dropkv_stash_layout_make()
#define DROPKV_PROMPT_INIT dropkv_prompt_make()
static inline struct dropkv_cache_layout dropkv_cache_layout_make(void)
{
    struct dropkv_cache_layout layout = {};
    layout.struct_size = sizeof(layout);
    return layout;
}
static inline struct dropkv_stash_layout dropkv_stash_layout_make(void)
{
    struct dropkv_stash_layout layout = {};
    layout.struct_size = sizeof(layout);
    return layout;
}
static inline struct dropkv_prompt dropkv_prompt_make(void)
{
    struct dropkv_prompt prompt = {};
    prompt.struct_size = sizeof(prompt);
    return prompt;
}
#else
#define DROPKV_CACHE_LAYOUT_INIT {.struct_size = sizeof(struct dropkv_cache_layout)}
#define DROPKV_STASH_LAYOUT_INIT {.struct_size = sizeof(struct dropkv_stash_layout)}
#define DROPKV_PROMPT_INIT {.struct_size = sizeof(struct dropkv_prompt)}
#endif
/* clang-format on */

#ifdef __cplusplus
}
#endif
#endif
