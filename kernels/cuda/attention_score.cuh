/* The attention scorer's second pass: logits again, p, reduced over rows. Included by attention.cu.
 */
#ifndef DKV_KERNELS_CUDA_ATTENTION_SCORE_CUH
#define DKV_KERNELS_CUDA_ATTENTION_SCORE_CUH

#include "kernels/cuda/attention_tiles.cuh"

namespace
{

/* Over rows, then over query heads. */
enum fold {
    fold_sum,      /* one weighted sum over all of them */
    fold_max,      /* one maximum */
    fold_variance, /* by head: mean + gamma * unbiased variance */
};

template <bool largest> __device__ inline float fold_two(float a, float b)
{
    return largest ? fmaxf(a, b) : a + b;
}

/* Over the eight lanes that have the same keys: lane / 8 says which of the four a lane gets. */
template <bool largest> __device__ inline float fold_lanes(const float (&of_key)[4])
{
    const bool upper = threadIdx.x & 16;
    float two[2];
#pragma unroll
    for (int i = 0; i < 2; i++)
        two[i] = fold_two<largest>(upper ? of_key[2 + i] : of_key[i],
                                   __shfl_xor_sync(~0u, upper ? of_key[i] : of_key[2 + i], 16));
    const bool odd = threadIdx.x & 8;
    const float one = fold_two<largest>(odd ? two[1] : two[0],
                                        __shfl_xor_sync(~0u, odd ? two[0] : two[1], 8));
    return fold_two<largest>(one, __shfl_xor_sync(~0u, one, 4));
}

/* Logits to p. */
template <bool bf16>
__device__ inline void to_weights(const row_result *results, bool rounded, logits &z)
{
#pragma unroll
    for (int r = 0; r < n_columns; r++) {
        const row_result row = results[r * 8 + threadIdx.x % 32 / 4];
#pragma unroll
        for (int i = 0; i < 4; i++)
            z[r][i] = exp2_fast(z[r][i] - row.top) * row.inverse;
    }
    if (!rounded)
        return;
#pragma unroll
    for (int k = 0; k < n_columns * 4; k++)
        z[k / 4][k % 4] = dkv_cu_round(z[k / 4][k % 4], bf16 ? DKV_BF16 : DKV_FP16);
}

/* What a lane has so far of its four keys and a row group. */
struct key_totals {
    float of_rows[4]; /* over its own rows; of a variance: over those of one head, of p - pivot */
    float squares[4];
    float pivot[4]; /* p of the head's first row */
    uint32_t t;     /* rows of that head so far */
    float heads;    /* of the key that fold_lanes() gives the lane */
};

/* What a variance takes beside p. */
struct head_rule {
    uint32_t window;
    float per_row; /* 1 / window */
    float per_gap; /* gamma / (window - 1); 0: one row */
    bool largest;  /* over heads */
};

__device__ inline head_rule head_rule_of(const dkv_cu_block &block)
{
    return {block.window, 1.0f / static_cast<float>(block.window),
            block.window > 1 ? block.gamma / static_cast<float>(block.window - 1) : 0.0f,
            block.gqa == DKV_GQA_MAX};
}

/* Eight more rows of a head. Squares are of differences to the head's first row: since that is one
 * of the values, what cancels afterwards is at most `window` times the result. */
__device__ inline void add_head_rows(const head_rule &rule, bool counts, const float (&p)[4],
                                     key_totals &sum)
{
    const bool begins = sum.t == 0;
    sum.t += 8;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if (begins) {
            sum.pivot[i] = __shfl_sync(~0u, p[i], threadIdx.x % 4);
            sum.of_rows[i] = sum.squares[i] = 0;
        }
        const float gap = counts ? p[i] - sum.pivot[i] : 0.0f;
        sum.of_rows[i] += gap;
        sum.squares[i] = fmaf(gap, gap, sum.squares[i]);
    }
    if (sum.t < rule.window)
        return;
    sum.t = 0;
    const float gaps = fold_lanes<false>(sum.of_rows);
    const float squares = fold_lanes<false>(sum.squares);
    const uint32_t mine = threadIdx.x % 32 / 8;
    const float pivot = mine < 2 ? (mine == 0 ? sum.pivot[0] : sum.pivot[1])
                                 : (mine == 2 ? sum.pivot[2] : sum.pivot[3]);
    const float mean_gap = gaps * rule.per_row;
    const float spread = fmaxf(fmaf(-gaps, mean_gap, squares), 0.0f);
    const float head = fmaf(rule.per_gap, spread, pivot + mean_gap);
    sum.heads = rule.largest ? fmaxf(sum.heads, head) : sum.heads + head;
}

/* Adds a chunk, of which `n_slots` are there. */
template <int fold>
__device__ inline void add_chunk(const head_rule &rule, const row_result *results, uint32_t n_slots,
                                 const logits &p, key_totals &sum)
{
#pragma unroll
    for (int r = 0; r < n_columns; r++) {
        const float weight = results[r * 8 + threadIdx.x % 32 / 4].weight;
        if (fold == fold_variance) {
            if (r * 8 < n_slots)
                add_head_rows(rule, weight != 0, p[r], sum);
        } else {
#pragma unroll
            for (int i = 0; i < 4; i++)
                sum.of_rows[i] = fold == fold_max ? fmaxf(sum.of_rows[i], p[r][i])
                                                  : fmaf(p[r][i], weight, sum.of_rows[i]);
        }
    }
}

/* A tile's totals, joined with those of earlier row groups, which are in `held`; stored after the
 * last. */
template <int fold>
__device__ inline void finish_tile(const job &work, uint32_t first_key, const key_totals &sum,
                                   float *held, bool first, bool last)
{
    const bool largest = fold == fold_max ||
                         (fold == fold_variance && work.block.gqa == DKV_GQA_MAX);
    float total = fold == fold_variance ? sum.heads : fold_lanes<fold == fold_max>(sum.of_rows);
    if (threadIdx.x & 4)
        return;
    const uint32_t key = key_of(threadIdx.x % 32 / 8);
    if (!first)
        total = largest ? fmaxf(held[key], total) : held[key] + total;
    if (last)
        store_score(work.block, work.unit, first_key + key, total);
    else
        held[key] = total;
}

/* Item = args.score_keys keys of a unit. The other way round than weigh, so that this begins with
 * keys which that read last. */
template <bool bf16, int blocks, int fold>
__global__ void __launch_bounds__(threads, resident) score(const attention_args args)
{
    __shared__ job work;
    __shared__ uint4 queries[group_slots_max / 8 * blocks * 32];
    __shared__ row_result results[group_slots_max];
    __shared__ float held[score_keys_max];
    const uint32_t item = open_job(args, 1, gridDim.x - 1 - blockIdx.x, work);
    const place &at = work.at;
    const dkv_cu_block &block = work.block;
    const uint32_t begin = item * args.score_keys;
    const uint32_t end_key = min(block.n_valid, begin + args.score_keys);
    const int last_tile = static_cast<int>((end_key - begin - 1) / tile_keys);
    const int warp = threadIdx.x / 32;
    const int top_tile = last_tile - warp; /* the warp's first; warps take tiles in turn */
    const row_result *all = results_of(work);
    const scaling scale = scaling_of(block);
    const head_rule rule = head_rule_of(block);
    const key_source source = source_of<blocks>(work);

    for (uint32_t g = 0; g < at.n_groups; g++) {
        const row_group group = group_of(at, g);
        key_tile<blocks> keys;
        if (g > 0)
            __syncthreads();
        if (top_tile >= 0)
            load_keys(work, source, begin + top_tile * tile_keys, end_key, keys);
        load_queries<blocks>(work, group, queries);
        if (g == 0)
            wait_for_weigh();
        if (threadIdx.x < group_slots_max)
            results[threadIdx.x] = threadIdx.x < group.n_slots ? all[group.first_slot + threadIdx.x]
                                                               : no_row;
        __syncthreads();
        for (int tile = top_tile; tile >= 0; tile -= warps) {
            const uint32_t first_key = begin + tile * tile_keys;
            const unsigned there[2] = {keys.there[0], keys.there[1]};
            const bool plain = is_plain(work, there, first_key);
            key_totals sum = {};
            for (uint32_t c = 0; c < group.n_chunks; c++) {
                const row_result *of_chunk = results + c * chunk_slots;
                logits z;
                float odd = 0; /* weigh has seen to it */
                products<bf16, blocks>(keys, queries + c * n_columns * blocks * 32, z);
                if (c + 1 == group.n_chunks && tile >= warps)
                    load_keys(work, source, first_key - warps * tile_keys, end_key, keys);
                to_logits(scale, z, odd);
                if (!plain)
                    hide(there, first_key, &of_chunk->last, sizeof(row_result) / sizeof(int), z);
                to_weights<bf16>(of_chunk, block.p_round != 0, z);
                add_chunk<fold>(rule, of_chunk, group.n_slots - c * chunk_slots, z, sum);
            }
            finish_tile<fold>(work, first_key, sum, held + tile * tile_keys, g == 0,
                              g + 1 == at.n_groups);
        }
    }
}

} // namespace

#endif
