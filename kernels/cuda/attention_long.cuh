/* Both passes for long units with one chunk of rows: the chunk's queries stay in registers, and
 * keys come through rings. More has to be set up than where a warp loads its keys itself, which is
 * why shorter units do that. Included by attention.cu. */
#ifndef DKV_KERNELS_CUDA_ATTENTION_LONG_CUH
#define DKV_KERNELS_CUDA_ATTENTION_LONG_CUH

#include "kernels/cuda/attention_ring.cuh"
#include "kernels/cuda/attention_score.cuh"
#include "kernels/cuda/attention_weigh.cuh"

namespace
{

template <bool bf16, int blocks>
__global__ void __launch_bounds__(threads, long_resident) weigh_long(const attention_args args)
{
    extern __shared__ __align__(128) unsigned char memory[];
    __shared__ job work;
    __shared__ ring_flags flags[warps];
    __shared__ int last_keys[chunk_slots];
    __shared__ partial room[threads];
    start_dependents();
    const uint32_t range = open_job(args, 0, blockIdx.x, work);
    const row_group group = group_of(work.at, 0);
    const key_ring<blocks> ring = open_ring<blocks>(work, memory, flags);
    const uint32_t end_key = min(work.block.n_valid, (range + 1) * work.at.range_keys);
    const scaling scale = scaling_of(work.block);
    uint32_t first_key = range * work.at.range_keys + threadIdx.x / 32 * tile_keys;
    held_queries<blocks> held;
    partial mine[n_columns] = {nothing, nothing, nothing, nothing};
    float odd = 0;

#pragma unroll 1
    for (uint32_t t = 0; t < ring_tiles; t++) {
        const uint32_t key = first_key + t * warps * tile_keys;
        send_for(work, ring, t, key < end_key, key, end_key);
    }
    hold_queries(work, group, held);
    if (threadIdx.x < chunk_slots)
        last_keys[threadIdx.x] = last_key_of(work, group, threadIdx.x);
    __syncthreads();

    for (uint32_t slot = 0; first_key < end_key; first_key += warps * tile_keys) {
        logits z;
        const uint32_t next = first_key + ring_tiles * warps * tile_keys;
        unsigned there[2] = {~0u, ~0u};
        await_tile();
        ring_products<bf16, blocks>(ring, slot, held, z);
        if (!is_simple_tile(ring, first_key, end_key)) {
            there[0] = ring.flags[slot][0];
            there[1] = ring.flags[slot][1];
        }
        __syncwarp(); /* it was read by all lanes */
        send_for(work, ring, slot, next < end_key, next, end_key);
        slot = slot + 1 < ring_tiles ? slot + 1 : 0;
        to_logits(scale, z, odd);
        if (!is_plain(work, there, first_key))
            hide(there, first_key, last_keys, 1, z);
        absorb(z, mine);
    }
    if (odd != 0)
        atomicOr(&work.unit.report->flags, DKV_CU_RETRY);
    finish_range(args, work, group, range, 0, 1, mine, room);
}

template <bool bf16, int blocks, int fold>
__global__ void __launch_bounds__(threads, long_resident) score_long(const attention_args args)
{
    extern __shared__ __align__(128) unsigned char memory[];
    __shared__ job work;
    __shared__ ring_flags flags[warps];
    __shared__ row_result results[chunk_slots];
    const uint32_t item = open_job(args, 1, gridDim.x - 1 - blockIdx.x, work);
    const dkv_cu_block &block = work.block;
    const row_group group = group_of(work.at, 0);
    const key_ring<blocks> ring = open_ring<blocks>(work, memory, flags);
    const uint32_t begin = item * args.score_keys;
    const uint32_t end_key = min(block.n_valid, begin + args.score_keys);
    const int last_tile = static_cast<int>((end_key - begin - 1) / tile_keys);
    const int top_tile = last_tile - static_cast<int>(threadIdx.x / 32);
    const scaling scale = scaling_of(block);
    const head_rule rule = head_rule_of(block);
    held_queries<blocks> held;

#pragma unroll 1
    for (int t = 0; t < ring_tiles; t++) {
        const int tile = top_tile - t * warps;
        send_for(work, ring, t, tile >= 0, begin + tile * tile_keys, end_key);
    }
    hold_queries(work, group, held);
    wait_for_weigh();
    if (threadIdx.x < chunk_slots)
        results[threadIdx.x] = threadIdx.x < group.n_slots ? results_of(work)[threadIdx.x] : no_row;
    __syncthreads();

    uint32_t slot = 0;
    for (int tile = top_tile; tile >= 0; tile -= warps) {
        logits z;
        const uint32_t first_key = begin + tile * tile_keys;
        const int next = tile - ring_tiles * warps;
        unsigned there[2] = {~0u, ~0u};
        float odd = 0; /* weigh has seen to it */
        key_totals sum = {};
        await_tile();
        ring_products<bf16, blocks>(ring, slot, held, z);
        if (!is_simple_tile(ring, first_key, end_key)) {
            there[0] = ring.flags[slot][0];
            there[1] = ring.flags[slot][1];
        }
        __syncwarp();
        send_for(work, ring, slot, next >= 0, begin + next * tile_keys, end_key);
        slot = slot + 1 < ring_tiles ? slot + 1 : 0;
        to_logits(scale, z, odd);
        if (!is_plain(work, there, first_key))
            hide(there, first_key, &results->last, sizeof(row_result) / sizeof(int), z);
        to_weights<bf16>(results, block.p_round != 0, z);
        add_chunk<fold>(rule, results, group.n_slots, z, sum);
        finish_tile<fold>(work, first_key, sum, nullptr, true, true);
    }
}

} // namespace

#endif
