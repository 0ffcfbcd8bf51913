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

#define DKV_POOL_TILE 1024u /* tokens per tile: tile, halo and results stay in the L1 cache */
#define DKV_POOL_HALO (DKV_KERNEL_MAX - 1u)

struct dkv_pool_spec {
    enum dkv_pool pool;
    uint32_t kernel; /* odd */
    uint64_t begin;  /* tokens [begin, end) are pooled; the others stand for themselves */
    uint64_t end;
};

/* Pooled scores of one tile, and work space. None is ever -0. */
struct dkv_pool_tile {
    float pooled[DKV_POOL_TILE]; /* rounded to float, which only an average needs */
    double sum[DKV_POOL_TILE];   /* the exact value behind it; only for an average */

    float x[DKV_POOL_TILE + DKV_POOL_HALO];
    double wide[DKV_POOL_TILE + DKV_POOL_HALO];
};

/* Computes tokens first .. first+count-1 (count <= DKV_POOL_TILE) of a head's `raw` scores. */
void dkv_pool_tile(const struct dkv_pool_spec *spec, const float *raw, uint64_t first, size_t count,
                   struct dkv_pool_tile *tile);

#endif
