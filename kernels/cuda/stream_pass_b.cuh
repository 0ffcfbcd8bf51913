/* Pass B of the stream scorer: the score of every key, as fast_pass_b.cuh says, from logits made
 * again. A thread sees rows g and g + 8 of its warp's 16, of every eight keys 2t and 2t + 1; what
 * it needs to know of rows it has in registers. Each warp adds up its rows; another one adds up
 * what the warps have.
 */
#ifndef DKV_KERNELS_CUDA_STREAM_PASS_B_CUH
#define DKV_KERNELS_CUDA_STREAM_PASS_B_CUH

#include "kernels/cuda/stream_pass_a.cuh"

namespace dkv_stream
{

/* Two elements of a merged row's hi: those at 8 * column + 2 * pair. lo is LO_WORDS behind. */
template <class S>
__device__ __forceinline__ const uint32_t *word_of(const merged<S> &rows, int row, int column,
                                                   int pair)
{
    return reinterpret_cast<const uint32_t *>(rows.a[row / BLOCK_ROWS] +
                                              element_offset<S>(row % BLOCK_ROWS, column)) +
           pair;
}
template <class S> constexpr int LO_WORDS = BLOCK_ROWS *S::ROW_BYTES / 4;

/* |a - v|^2 of a row and a key of a tile, summed plainly by the whole warp; as exact_distance() in
 * fast_pass_b.cuh, with the row from global memory. */
template <class S>
__device__ __forceinline__ float plain_distance(const merged<S> *rows, int row, uint32_t v_tile,
                                                int key, int lane)
{
    float sum = 0.0f;
    float scale = 0.0f;
    for (int pair = lane; pair < S::DIM / 2; pair += 32) {
        const uint32_t *a = word_of(*rows, row, pair / 4, pair % 4);
        const float2 hi = unpack<typename S::type>(__ldcg(a));
        const float2 lo = unpack<typename S::type>(__ldcg(a + LO_WORDS<S>));
        const float2 v = unpack<typename S::type>(
            load_shared(v_tile + element_offset<S>(key, pair / 4) + 4 * (pair % 4)));
        const float x = hi.x - v.x + lo.x;
        const float y = hi.y - v.y + lo.y;
        sum = fmaf(x, x, fmaf(y, y, sum));
        scale = fmaf(v.x, v.x, fmaf(v.y, v.y, scale));
    }
    for (int lanes = 16; lanes > 0; lanes /= 2) {
        sum += __shfl_xor_sync(~0u, sum, lanes);
        scale += __shfl_xor_sync(~0u, scale, lanes);
    }
    return sum <= EQUAL * scale ? 0.0f : sum;
}

/* A group's part of pass B. */
template <class S> struct group_b {
    shared_b<S> &shared;
    place<S> at;
    int first_row; /* of the group */
    tile_pair<S> now;
    ring<PARTS> parts;
    uint32_t q[S::K_STEPS][4];
    uint32_t hi[S::K_STEPS][4]; /* of a */
    uint32_t lo[S::K_STEPS][4];
    float norm[2];  /* |a|^2 */
    float shift[2]; /* the range factor, less log2 of the denominator */
    int top[2];     /* see merged */
    float z[8][4];
    float dot[8][4];

    __device__ __forceinline__ group_b(shared_b<S> &in, int group, int thread)
        : shared(in), at(thread), first_row(64 * group)
    {
    }

    __device__ __forceinline__ const merged<S> &merged_rows(const job &work) const
    {
        return reinterpret_cast<const merged<S> *>(work.unit.work)[work.item.row_group];
    }

    __device__ __forceinline__ void load_rows(const job &work)
    {
        const merged<S> &from = merged_rows(work);
        load_rows_of_query(work, first_row, at, q);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int row = first_row + at.row(i);
#pragma unroll
            for (int k = 0; k < S::K_STEPS; k++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const uint32_t *word = word_of(from, row, 2 * k + half, at.t);
                    hi[k][2 * half + i] = __ldcg(word);
                    lo[k][2 * half + i] = __ldcg(word + LO_WORDS<S>);
                }
            norm[i] = 0.0f;
#pragma unroll
            for (int part = 0; part < S::DIM / 32; part++)
                norm[i] += __ldcg(&from.norm[row][part]);
            shift[i] = DKV_CU_EXPONENT - __ldcg(&from.lse[row]);
            top[i] = __ldcg(&from.top[row]);
        }
    }

    /* Starts dot = a.v with a tile's values. */
    __device__ __forceinline__ void start_values(uint32_t v_tile)
    {
        const uint64_t values = keys_operand<S>(v_tile);
        warpgroup_fence();
        warpgroup_mma_first<typename S::type>(dot, hi[0], values);
#pragma unroll
        for (int k = 1; k < S::K_STEPS; k++)
            warpgroup_mma<typename S::type, 0>(dot, hi[k], values + keys_step(k), 1);
#pragma unroll
        for (int k = 0; k < S::K_STEPS; k++)
            warpgroup_mma<typename S::type, 0>(dot, lo[k], values + keys_step(k), 1);
        warpgroup_commit();
    }

    /* z = (p / (1 - p))^2, with the range factor. */
    __device__ __forceinline__ void make_weights(float factor)
    {
#pragma unroll
        for (int j = 0; j < 8; j++)
#pragma unroll
            for (int c = 0; c < 4; c++) {
                const float p = exp2_fast(fmaf(z[j][c], factor, shift[c >> 1]));
                const float ratio = p * rcp_fast(fmaf(-RANGE, p, 1.0f));
                z[j][c] = ratio * ratio;
            }
    }

    /* The term of a row whose top key is in this tile takes the place of the plain one: as weight,
     * with a distance of 1. Rare. */
    __device__ __forceinline__ void put_terms(const job &work, int first_key)
    {
        const merged<S> &from = merged_rows(work);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int row = first_row + at.row(i);
            float distance = 0.0f;
            for (int part = 0; part < S::DIM / 32; part++)
                distance += __ldcg(&from.top_distance[row][part]);
            const float term = __ldcg(&from.top_weight[row]) * distance;
            put_at_top(z, i, first_key, term);
        }
    }
    __device__ __forceinline__ void put_at_top(float (&x)[8][4], int i, int first_key,
                                               float value) const
    {
        const int mine = top[i] - first_key - 2 * at.t;
#pragma unroll
        for (int j = 0; j < 8; j++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                if (mine == 8 * j + e)
                    x[j][2 * i + e] = value;
            }
    }

    /* Distances that cancel, again. Rare. */
    __device__ __forceinline__ void distances_that_cancel(const job &work, uint32_t v_tile,
                                                          const float *squares)
    {
        unsigned cancels = 0; /* a bit 4j + c each */
#pragma unroll
        for (int j = 0; j < 8; j++)
#pragma unroll
            for (int c = 0; c < 4; c++) {
                const float whole = norm[c >> 1] + squares[8 * j + 2 * at.t + (c & 1)];
                if (dot[j][c] < CANCELS * whole)
                    cancels |= 1u << (4 * j + c);
            }
        for (;;) {
            const unsigned lanes = __ballot_sync(~0u, cancels != 0);
            if (lanes == 0)
                return;
            const int lane = __ffs(lanes) - 1;
            const int which = __ffs(__shfl_sync(~0u, cancels, lane)) - 1;
            const int row = first_row + 16 * at.warp + which % 4 / 2 * 8 + lane / 4;
            const int key = which / 4 * 8 + lane % 4 * 2 + which % 2;
            const float exact = plain_distance<S>(&merged_rows(work), row, v_tile, key, at.lane);
            const unsigned mine = at.lane == lane ? 1u << which : 0;
            cancels &= ~mine;
#pragma unroll
            for (int j = 0; j < 8; j++)
#pragma unroll
                for (int c = 0; c < 4; c++) {
                    if (mine & 1u << (4 * j + c))
                        dot[j][c] = exact;
                }
        }
    }

    /* dot = |a - v|^2 */
    __device__ __forceinline__ void make_distances(const job &work)
    {
        const float *squares = shared.squares[now.at.index / 2];
        float room = INFINITY; /* the least by which a distance exceeds what may be noise */
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const float2 square = *reinterpret_cast<const float2 *>(squares + 8 * j + 2 * at.t);
#pragma unroll
            for (int c = 0; c < 4; c++) {
                const float whole = norm[c >> 1] + (c & 1 ? square.y : square.x);
                dot[j][c] = fmaf(-2.0f, dot[j][c], whole);
                room = fminf(room, fmaf(-CANCELS, whole, dot[j][c]));
            }
        }
        if (__any_sync(~0u, room < 0.0f))
            distances_that_cancel(work, now.values(shared), squares);
    }

    /* The warp's sums of a tile's keys go to the warp that adds them up. */
    __device__ __forceinline__ void store_parts(float (&sum)[16])
    {
        fold<16>(sum, 16, at.lane);
        fold<8>(sum, 8, at.lane);
        fold<4>(sum, 4, at.lane);
        mbarrier_wait(shared_address(&shared.parts_empty[parts.index]), parts.parity ^ 1);
        float *to = shared.parts[parts.index][first_row / 16 + at.warp];
        *reinterpret_cast<float2 *>(to + 8 * at.g + 2 * at.t) = make_float2(sum[0], sum[1]);
        __syncwarp();
        if (at.lane == 0)
            mbarrier_arrive(shared_address(&shared.parts_full[parts.index]));
    }

    /* One tile: weights while the tensor cores multiply its values. */
    __device__ __forceinline__ void step(const job &work, const logit_rule &rule,
                                         const logit_factor &logits, int first_key)
    {
        mbarrier_wait_both(now.keys_full(shared), now.at.parity, now.values_full(shared),
                           now.at.parity);
        fence_async_proxy();
        start_row_dots<S>(z, q, now.keys(shared));
        start_values(now.values(shared));
        warpgroup_wait<1>();
        hold(z);
        now.release_keys(shared, at.lane);
        if (!logits.plain)
            rule.apply<8, 4>(z);
        if (first_key + TILE > rule.open_keys)
            hide_keys_of(work, first_row, at, first_key, z);
        make_weights(logits.factor);
        const bool has_tops = __any_sync(~0u, static_cast<unsigned>(top[0] - first_key) < TILE ||
                                                  static_cast<unsigned>(top[1] - first_key) < TILE);
        if (has_tops) /* between the weights and the wait, or the compiler would mix them */
            put_terms(work, first_key);
        warpgroup_wait<0>();
        hold(dot);
        make_distances(work);
        if (has_tops) {
            put_at_top(dot, 0, first_key, 1.0f);
            put_at_top(dot, 1, first_key, 1.0f);
        }
        float sum[16];
#pragma unroll
        for (int j = 0; j < 8; j++)
#pragma unroll
            for (int e = 0; e < 2; e++)
                sum[2 * j + e] = fmaf(z[j][e], dot[j][e], z[j][2 + e] * dot[j][2 + e]);
        now.release_values(shared, at.lane);
        store_parts(sum);
    }

    __device__ __forceinline__ void run(const job &work)
    {
        const logit_rule rule(work);
        const logit_factor logits(rule);
        const int tiles = range_tiles(work.item);
        load_rows(work);
#pragma unroll 1
        for (int tile = 0; tile < tiles; tile++) {
            step(work, rule, logits, item_first_key(work.item) + tile * TILE);
            parts.advance();
            now.advance();
        }
    }
};

/* The score of a key, if there is such a key. */
__device__ __forceinline__ void store_score(const score_sink &sink, float sum, uint32_t key)
{
    if (key >= sink.n_keys)
        return;
    float score = sum * sink.factor;
    if (sink.adds)
        score += sink.scores[key];
    sink.scores[key] = score;
    if (!dkv_cu_finite(score))
        atomicOr(sink.flags, DKV_CU_RETRY);
}

/* Adds up the warps' sums of every tile and stores scores. By one warp: a lane has two keys. */
template <class S>
__device__ __forceinline__ void store_scores(shared_b<S> &shared, const job &work,
                                             ring<PARTS> &parts, int lane)
{
    const score_sink sink(work);
    const int tiles = range_tiles(work.item);
    uint32_t key = item_first_key(work.item) + 2 * lane;
    for (int tile = 0; tile < tiles; tile++, key += TILE) {
        mbarrier_wait(shared_address(&shared.parts_full[parts.index]), parts.parity);
        float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
        for (int warp = 0; warp < 4 * GROUPS; warp++) {
            const float2 part = *reinterpret_cast<const float2 *>(
                &shared.parts[parts.index][warp][2 * lane]);
            sum.x += part.x;
            sum.y += part.y;
        }
        __syncwarp();
        if (lane == 0)
            mbarrier_arrive(shared_address(&shared.parts_empty[parts.index]));
        parts.advance();
        store_score(sink, sum.x, key);
        store_score(sink, sum.y, key + 1);
    }
}

template <class S>
__device__ __forceinline__ void run_group_b(shared_b<S> &shared, const stream_args &args, int group,
                                            int thread)
{
    group_b<S> work(shared, group, thread);
    griddepcontrol_wait();
    for (uint32_t turn = 0; turn < args.turns; turn++) {
        const job &item = item_wait(shared.items, turn);
        if (item.item.chunks != 0)
            work.run(item);
        item_release(shared.items, turn, work.at.lane);
    }
}

/* Copies |v|^2 of a tile's keys beside its values. */
template <class S>
__device__ __forceinline__ void fetch_values(shared_b<S> &shared, tile_stream<S, S::TILES> &stream,
                                             const job &work, uint64_t policy, int lane)
{
    const int tiles = range_tiles(work.item);
    const float *squares = squares_of<S>(work) + item_first_key(work.item) + 2 * lane;
    tile_source<S> from(work, false, lane);
    for (int tile = 0; tile < tiles; tile++, squares += TILE) {
        const int place = stream.next.index;
        stream.fetch(from, work, tile, policy);
        stream.next.advance();
        copy_8(shared_address(&shared.squares[place / 2][2 * lane]), squares);
        mbarrier_arrive_after_copies(shared_address(&shared.tiles.full[place]));
    }
}

template <class S> __device__ __forceinline__ void init_b(shared_b<S> &shared)
{
    init_tiles(shared.tiles, 2, 4 * GROUPS, 0); /* |v|^2 comes with the values */
    init_items(shared.items, 4 * GROUPS + 3);
    for (int i = 0; i < PARTS; i++) {
        mbarrier_init(shared_address(&shared.parts_full[i]), 4 * GROUPS);
        mbarrier_init(shared_address(&shared.parts_empty[i]), 1);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

/* Empty except for sm_90a. What it reads before griddepcontrol_wait(), no kernel before it writes.
 */
template <class S>
__global__ void __launch_bounds__(STREAM_THREADS, 1)
    stream_b(const __grid_constant__ stream_args args)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    griddepcontrol_launch();
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    shared_b<S> &shared = *reinterpret_cast<shared_b<S> *>(shared_bytes);
    if (threadIdx.x == 0)
        init_b(shared);
    __syncthreads();
    const int group = threadIdx.x / GROUP_THREADS;
    if (group < GROUPS) {
        registers_set<COMPUTE_REGISTERS, STREAM_LAUNCH_REGISTERS>();
        run_group_b<S>(shared, args, group, thread_in_group());
    } else {
        registers_set<LOAD_REGISTERS, STREAM_LAUNCH_REGISTERS>();
        const int thread = thread_in_group();
        const int lane = thread & 31;
        if (thread < 64) {
            tile_stream<S, S::TILES> stream(shared.places, shared.tiles.full, shared.tiles.empty,
                                            lane);
            const uint64_t policy = policy_evict_first();
            if (thread >= 32) {
                stream.next.advance();
                griddepcontrol_wait(); /* for |v|^2 */
            }
            for (uint32_t turn = 0; turn < args.turns; turn++) {
                const job &work = item_wait(shared.items, turn);
                if (thread < 32)
                    fetch_tiles<S>(stream, work, true, range_tiles(work.item), policy, lane);
                else if (work.item.chunks != 0)
                    fetch_values<S>(shared, stream, work, policy, lane);
                item_release(shared.items, turn, lane);
            }
        } else if (thread < 96) {
            for (uint32_t turn = 0; turn < args.turns; turn++)
                load_item(shared.items, args, turn, lane);
        } else {
            ring<PARTS> parts;
            for (uint32_t turn = 0; turn < args.turns; turn++) {
                const job &work = item_wait(shared.items, turn);
                if (work.item.chunks != 0)
                    store_scores<S>(shared, work, parts, lane);
                item_release(shared.items, turn, lane);
            }
        }
    }
#endif
}

} // namespace dkv_stream

#endif
