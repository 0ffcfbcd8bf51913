/* Pooling in tiles: the pooled scores of a short stretch of tokens, computed from the raw ones.
 *
 * Inner part of selection (select.h says what pooling means and in which order sums are taken).
 * Nothing of size n is stored: the result of a tile depends on `raw` and the token positions alone,
 * never on where the tile begins.
 *
 * Thread  any; no shared state.
 */
#ifndef DKV_KERNELS_POOL_H
#define DKV_KERNELS_POOL_H

#include "proto/params.h"

#define DKV_POOL_TILE 1024u /* tokens per tile; 1,024 doubles and a halo stay in the L1 cache */
#define DKV_POOL_HALO (DKV_KERNEL_MAX - 1u)

struct dkv_pool_spec {
    enum dkv_pool pool;
    uint32_t kernel; /* odd */
    uint64_t begin;  /* tokens [begin, end) are pooled; the others keep their raw score */
    uint64_t end;
};

/* Work space; contents mean nothing between calls. */
struct dkv_pool_scratch {
    double sums[DKV_POOL_TILE + DKV_POOL_HALO];
    float raw[DKV_POOL_TILE + DKV_POOL_HALO];
};

/* Pooled scores of tokens first .. first+count-1 (count <= DKV_POOL_TILE) of the head's `raw`
 * scores; for an average, the sum. Never -0. */
void dkv_pool_tile(const struct dkv_pool_spec *spec, const float *raw, uint64_t first, size_t count,
                   struct dkv_pool_scratch *scratch, double *pooled_out);

#endif
