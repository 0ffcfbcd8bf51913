/* Shared by the streaming passes, head_pass.c and head_rule.c; nobody else's. */
#ifndef DKV_KERNELS_CPU_HEAD_PASS_H
#define DKV_KERNELS_CPU_HEAD_PASS_H

#include "kernels/cpu/head.h"

/* Keys converted at a time, and keys of a tile of pass B: few enough that their floats are still in
 * the first cache level when they are used. Pass A's tile is larger because it touches the whole
 * output panel once per tile. */
#define DKV_CONVERT_KEYS 24u
#define DKV_SCORE_KEYS   24u

static inline size_t dkv_tile_keys(uint64_t first, uint64_t end, size_t most)
{
    return end - first < most ? (size_t)(end - first) : most;
}

/* The first token that the chunk's first row does not see: tokens from here on are hidden from some
 * of its rows. Row t of the block sees tokens up to n - w + t. */
static inline uint64_t dkv_all_see(const struct dkv_head *head)
{
    return head->n - head->item->plan->window + head->row_first + 1;
}

/* Whether a token's value stays out of the outputs: the window's do in an averaged one. */
static inline bool dkv_left_out(const struct dkv_head *head, uint64_t token)
{
    return head->averaged && token >= head->n - head->item->plan->window;
}

void dkv_split_range(const struct dkv_head *head, uint32_t split, uint64_t *first_out,
                     uint64_t *end_out);

/* Loads a tile: logits into tile->logits, values into tile->rows. With top_out the tensors are
 * watched; later passes over the same tokens need not. */
unsigned dkv_open_tile(struct dkv_head *head, const struct dkv_tile *tile, uint64_t first, size_t n,
                       float factor, const float *shift, float *top_out);

/* What the last product of a tile fetches: the keys that the next tile begins with. */
struct dkv_ahead dkv_next_keys(const struct dkv_head *head, uint64_t first, const void **rows);

/* Takes each row's best key out of the tile (-inf), if it is in it. */
void dkv_hide_best(const struct dkv_head *head, float *logits, uint64_t first, size_t n);

/* Selection takes nothing else. False where a product or a score leaves float32, or somebody wrote
 * to the tensors since pass A. */
bool dkv_all_within(const float *scores, size_t n, float most);

/* The largest raw score that is finite still once it is reported. */
float dkv_largest_raw(const struct dkv_head *head);

#endif
